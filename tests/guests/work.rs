//! A pool at work: a workload of all driver calls, which records its promises. The check of these
//! after a power cut is in `verdict`.

use std::fs;
use std::io::Cursor;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use baggageclaim::archive::{self, Codec, Hashing, Pack, Progress};
use baggageclaim::backend::BackendKind;
use baggageclaim::engine::claims::{CreateClaim, MountClaim};
use baggageclaim::engine::{Config, Engine, Error, ImportRequest};
use baggageclaim::model::{ArtifactId, ClaimSource, Outcome, PersistentVolume, Reference};
use baggageclaim::sys::Dir;
use serde::{Deserialize, Serialize};

use super::common::bench::{empty_claim, request};
use super::facts::{self, Fact, Random};

/// A filesystem, and the backend of the pool on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Ground {
    Ext4,
    Xfs,
    Btrfs,
}

impl Ground {
    pub(crate) const ALL: [Ground; 3] = [Ground::Ext4, Ground::Xfs, Ground::Btrfs];

    /// As the kernel calls it.
    pub(crate) fn filesystem(self) -> &'static str {
        match self {
            Self::Ext4 => "ext4",
            Self::Xfs => "xfs",
            Self::Btrfs => "btrfs",
        }
    }

    pub(crate) fn backend(self) -> BackendKind {
        match self {
            Self::Ext4 | Self::Xfs => BackendKind::Overlay,
            Self::Btrfs => BackendKind::Btrfs,
        }
    }

    /// The smallest disk on which it behaves as on large ones.
    pub(crate) fn disk(self) -> u64 {
        match self {
            Self::Ext4 => 192 << 20,
            Self::Xfs => 320 << 20,
            Self::Btrfs => 256 << 20,
        }
    }

    pub(crate) fn mkfs(self) -> (&'static str, &'static [&'static str]) {
        match self {
            Self::Ext4 => (
                "mkfs.ext4",
                &[
                    "-q",
                    "-F",
                    "-b",
                    "4096",
                    "-J",
                    "size=8",
                    "-E",
                    "nodiscard,lazy_itable_init=1",
                ],
            ),
            Self::Xfs => ("mkfs.xfs", &["-q", "-f", "-K"]),
            Self::Btrfs => ("mkfs.btrfs", &["-q", "-f", "-K"]),
        }
    }
}

/// A pool, and where what is mounted goes.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    pub(crate) ground: Ground,
    pub(crate) pool: PathBuf,
    pub(crate) targets: PathBuf,
    pub(crate) seed: u64,
}

const OUTPUT: &str = "output";
const IMPORT: &str = "import";
/// One of so many steps is an import.
const IMPORTS: u64 = 6;
pub(crate) const CACHE: &str = "task-cache/shared";

impl Place {
    fn config(&self) -> Config {
        let mut config = Config::new(&self.pool);
        config.backend = Some(self.ground.backend());
        config.reserve = 1 << 20;
        config.outcome_wait = Duration::from_secs(3600);
        // Nothing goes but what is destroyed, or has no name any more.
        config.high_watermark = 99;
        config
    }

    pub(crate) async fn open(&self) -> Result<Engine, Error> {
        fs::create_dir_all(&self.targets).expect("mkdir");
        Engine::open(self.config()).await
    }

    pub(crate) fn target(&self, volume: &str) -> PathBuf {
        self.targets.join(volume)
    }
}

/// The work of one life: goes on until `enough` says so, or the machine dies.
pub(crate) struct Work<'a> {
    place: &'a Place,
    engine: Engine,
    random: Random,
    number: u64,
    outputs: Vec<String>,
    waiting: Vec<String>,
    claims: Vec<(PersistentVolume, String, u64)>,
    /// Operations that began and did not complete: kubelet would repeat them.
    unfinished: Vec<Unfinished>,
    note: &'a dyn Fn(Fact),
}

enum Unfinished {
    Volume(String),
    Claim(Box<PersistentVolume>),
}

/// Why [`Work::prove`] failed.
pub(crate) enum Unproven {
    /// An operation was refused.
    Refused(String),
    /// The driver only unmounts until it is started again.
    Degraded(String),
}

impl<'a> Work<'a> {
    pub(crate) async fn begin(place: &'a Place, note: &'a dyn Fn(Fact)) -> Self {
        let engine = place.open().await.expect("the engine opens");
        Self {
            place,
            engine,
            random: Random::new(place.seed),
            number: 0,
            outputs: Vec::new(),
            waiting: Vec::new(),
            claims: Vec::new(),
            unfinished: Vec::new(),
            note,
        }
    }

    /// Waits until all that can be sealed is, and no longer than a broken disk deserves.
    async fn settled(&self) {
        let all = self.engine.settled();
        let _late = tokio::time::timeout(Duration::from_secs(10), all).await;
    }

    fn tell(&self, fact: Fact) {
        (self.note)(fact);
    }

    /// Some operation; a word about it when it fails.
    pub(crate) async fn step(&mut self) -> Result<(), String> {
        self.number += 1;
        let finished = self.finish().await;
        if finished.is_err() {
            return finished.map_err(|error| error.to_string());
        }
        let done = match self.random.below(16) {
            // Each life has some, so that cuts find them.
            _ if self.number.is_multiple_of(IMPORTS) => self.import().await,
            0..=4 => self.output().await,
            5..=7 => self.cache().await,
            8..=11 => self.claim().await,
            12 => self.scratch().await,
            13 => self.destroy().await,
            14 => self.unclaim().await,
            _ => self.engine.reap().await.map(drop),
        };
        self.hear_of_seals();
        done.map_err(|error| error.to_string())
    }

    /// Whether a step's output can be made, and is sealed.
    pub(crate) async fn prove(&mut self) -> Result<(), Unproven> {
        self.number += 1;
        let name = format!("{OUTPUT}-{}-{}", self.place.seed, self.number);
        let made = match self.finish().await {
            Ok(()) => self.output().await,
            failed => failed,
        };
        match made {
            Ok(()) => {}
            Err(error @ Error::Degraded(_)) => return Err(Unproven::Degraded(error.to_string())),
            Err(error) => return Err(Unproven::Refused(error.to_string())),
        }
        self.settled().await;
        self.hear_of_seals();
        if self.outputs.contains(&name) {
            Ok(())
        } else {
            Err(Unproven::Refused(format!("{name} is not sealed")))
        }
    }

    /// A degraded driver ends when the disk answers again, and kubelet starts it again. The pool
    /// has one owner at a time: the old engine is dropped before the new one opens it.
    pub(crate) async fn restarted(self) -> Self {
        let Self { place, engine, .. } = self;
        engine.needs_restart().await;
        engine.shutdown().await;
        drop(engine);
        let engine = place.open().await.expect("the engine opens again");
        Self { engine, ..self }
    }

    /// Asks again for what was not answered with yes.
    async fn finish(&mut self) -> Result<(), Error> {
        while let Some(left) = self.unfinished.pop() {
            let done = match &left {
                Unfinished::Volume(volume) => self.leave(volume, Outcome::Failed).await,
                Unfinished::Claim(claim) => unmount(&self.engine, self.place, claim).await,
            };
            if done.is_err() {
                self.unfinished.push(left);
                return done;
            }
        }
        Ok(())
    }

    /// Ends in order, having waited for everything.
    pub(crate) async fn end(mut self) {
        // A broken disk says no.
        let _asked = self.finish().await;
        self.settled().await;
        self.hear_of_seals();
        self.engine.shutdown().await;
    }

    /// Content that is durable now, but was not known to be.
    fn hear_of_seals(&mut self) {
        let rows = self.engine.artifacts(None);
        let is_durable = |reference: &str| {
            let mut rows = rows.iter();
            rows.any(|row| {
                row.durable
                    && row
                        .name
                        .as_ref()
                        .is_some_and(|n| n.to_string() == reference)
            })
        };
        let (durable, waiting): (Vec<String>, _) = std::mem::take(&mut self.waiting)
            .into_iter()
            .partition(|name| is_durable(&format!("artifact/{name}")));
        self.waiting = waiting;
        for name in durable {
            self.tell(Fact::Sealed(name.clone()));
            self.outputs.push(name);
        }
    }

    async fn publish(
        &mut self,
        volume: &str,
        attributes: &[(&str, &str)],
    ) -> Result<PathBuf, Error> {
        let target = self.place.target(volume);
        let pod = format!("pod-{volume}");
        self.unfinished.push(Unfinished::Volume(volume.to_owned()));
        let asked = request(&target, "ci", &pod, volume, attributes);
        self.engine.publish(asked).await?;
        Ok(target)
    }

    async fn leave(&self, volume: &str, outcome: Outcome) -> Result<(), Error> {
        let pod = format!("pod-{volume}").parse().expect("a uid");
        self.engine.report_outcome(&pod, outcome).await?;
        let target = self.place.target(volume);
        self.engine.unpublish(volume, &target).await
    }

    /// The same of what was just published, which is at its end then.
    async fn end_of(&mut self, volume: &str, outcome: Outcome) -> Result<(), Error> {
        self.leave(volume, outcome).await?;
        self.unfinished.pop();
        Ok(())
    }

    async fn output(&mut self) -> Result<(), Error> {
        let name = format!("{OUTPUT}-{}-{}", self.place.seed, self.number);
        let target = self
            .publish(&name, &[("type", "output"), ("name", &name)])
            .await?;
        let written = facts::write_output(&target, &name);
        // A failed write in a pod makes its step fail.
        let outcome = match written {
            Ok(()) => Outcome::Succeeded,
            Err(_) => Outcome::Failed,
        };
        self.end_of(&name, outcome).await?;
        if written.is_ok() {
            self.waiting.push(name);
        }
        if self.random.below(3) == 0 {
            self.settled().await;
        }
        Ok(())
    }

    /// An archive becomes an artifact, which is durable when the answer comes.
    async fn import(&mut self) -> Result<(), Error> {
        let name = format!("{IMPORT}-{}-{}", self.place.seed, self.number);
        let archive = archive_of(&name);
        let request = ImportRequest {
            tenant: "ci".parse().expect("a tenant"),
            reference: format!("artifact/{name}").parse().expect("a reference"),
            digest: None,
            size: (self.random.below(2) == 0).then_some(archive.len() as u64),
            ttl: None,
            base: None,
        };
        let input = Cursor::new(archive);
        self.tell(Fact::Importing(name.clone()));
        self.engine
            .import(request, input, Arc::default(), || true)
            .await?;
        self.tell(Fact::Sealed(name.clone()));
        self.outputs.push(name);
        Ok(())
    }

    async fn cache(&mut self) -> Result<(), Error> {
        let volume = format!("cache-{}", self.number);
        let attributes = [("type", "task-cache"), ("key", "shared")];
        let before = self.durable_cache();
        let target = self.publish(&volume, &attributes).await?;
        let next = match facts::cache_generation(&target, self.place.seed) {
            Ok(generation) => generation + 1,
            // Nothing was committed yet.
            Err(_) => 0,
        };
        let outcome = match facts::write_cache(&target, self.place.seed, next) {
            Ok(()) => Outcome::Succeeded,
            Err(_) => Outcome::Failed,
        };
        self.end_of(&volume, outcome).await?;
        self.settled().await;
        let after = self.durable_cache();
        // The durable content is this commit's only if no earlier commit was in flight.
        let ours = after.is_some() && after != before && (before.is_some() || next == 0);
        if ours && outcome == Outcome::Succeeded {
            self.tell(Fact::Cached(next));
        }
        Ok(())
    }

    /// The commit that the cache's name points at, if it is durable.
    fn durable_cache(&self) -> Option<ArtifactId> {
        let rows = self.engine.artifacts(None).into_iter();
        let mut caches = rows.filter(|row| {
            let name = row.name.as_ref().map(ToString::to_string);
            row.durable && name.as_deref() == Some(CACHE)
        });
        caches.next().map(|row| row.id)
    }

    async fn scratch(&mut self) -> Result<(), Error> {
        let volume = format!("scratch-{}", self.number);
        let target = self.publish(&volume, &[]).await?;
        let _pods_own_affair = facts::write_output(&target, &volume);
        self.end_of(&volume, Outcome::Succeeded).await
    }

    async fn destroy(&mut self) -> Result<(), Error> {
        if self.outputs.is_empty() {
            return Ok(());
        }
        let at = self.random.below(self.outputs.len() as u64);
        let name = self.outputs.swap_remove(usize::try_from(at).expect("few"));
        self.tell(Fact::Destroying(name.clone()));
        let reference: Reference = format!("artifact/{name}").parse().expect("a reference");
        let tenant = "ci".parse().expect("a tenant");
        self.engine.destroy(&tenant, &reference).await?;
        self.tell(Fact::Destroyed(name));
        Ok(())
    }

    /// Makes a claim, which takes one transaction of the index and no more.
    pub(crate) async fn one_more_claim(&mut self) -> Result<(), String> {
        let made = self.make_claim().await;
        made.map_err(|error| error.to_string())
    }

    async fn make_claim(&mut self) -> Result<(), Error> {
        self.number += 1;
        let name = format!("claim-{}-{}", self.place.seed, self.number);
        let made = self.engine.create_claim(claim(&name, None)).await?;
        self.tell(Fact::Claimed(name.clone()));
        self.claims.push((made, name, 0));
        Ok(())
    }

    async fn claim(&mut self) -> Result<(), Error> {
        if self.claims.len() < 2 || self.random.below(8) == 0 {
            self.make_claim().await?;
        }
        let at = usize::try_from(self.random.below(self.claims.len() as u64)).expect("few");
        let (claim, name, mut generation) = self.claims[at].clone();
        // The driver says what it will not do with it, and does it no more when the disk is well
        // again.
        let known = self.engine.claim_use(claim.id.as_str()).await;
        if known.is_ok_and(|known| !known.problems.is_empty()) {
            self.claims.swap_remove(at);
            return Ok(());
        }
        self.unfinished
            .push(Unfinished::Claim(Box::new(claim.clone())));
        let target = mount(&self.engine, self.place, &claim).await?;
        for _ in 0..=self.random.below(2) {
            if facts::write_claim(&target, &name, generation + 1).is_err() {
                // It may be there or not: the number is not used again.
                generation += 1;
                break;
            }
            generation += 1;
            self.tell(Fact::Synced(name.clone(), generation));
        }
        self.claims[at].2 = generation;
        unmount(&self.engine, self.place, &claim).await?;
        self.unfinished.pop();
        if self.random.below(3) == 0 {
            let snapshot = format!("snapshot-{}-{}", self.place.seed, self.number);
            self.engine
                .create_snapshot(&snapshot, claim.id.as_str())
                .await?;
            self.tell(Fact::Snapshot(snapshot, name, generation));
        }
        Ok(())
    }

    async fn unclaim(&mut self) -> Result<(), Error> {
        if self.claims.len() < 2 {
            return Ok(());
        }
        let (claim, name, _) = self.claims.swap_remove(0);
        self.tell(Fact::Unclaiming(name.clone()));
        self.engine.delete_claim(claim.id.as_str()).await?;
        self.tell(Fact::Unclaimed(name));
        Ok(())
    }
}

/// An archive of what an output of this name holds. It is made in memory.
fn archive_of(name: &str) -> Vec<u8> {
    let root = tempfile::tempdir().expect("a temporary folder");
    facts::write_output(root.path(), name).expect("memory");
    let tree = Dir::open(root.path()).expect("open");
    let how = Pack {
        codec: Codec::Zstd(1),
        devices: false,
        hashing: Hashing::None,
        temporary: &tree,
    };
    let mut bytes = Vec::new();
    archive::pack(&tree, &mut bytes, how, &Progress::default(), &|| false).expect("pack");
    bytes
}

pub(crate) fn claim(name: &str, source: Option<ClaimSource>) -> CreateClaim {
    CreateClaim {
        source,
        ..empty_claim(name)
    }
}

/// As a driver without staging would: one mount.
pub(crate) async fn mount(
    engine: &Engine,
    place: &Place,
    claim: &PersistentVolume,
) -> Result<PathBuf, Error> {
    let target = place.target(claim.id.as_str());
    let staged = place.targets.join(format!("{}-globalmount", claim.id));
    fs::create_dir_all(&staged).expect("mkdir");
    let request = MountClaim {
        claim: claim.id.clone(),
        target: staged.clone(),
        staging: true,
        staged_at: None,
        read_only: false,
        multiple_targets: false,
        mount_group: None,
    };
    engine.mount_claim(request.clone()).await?;
    let publish = MountClaim {
        target: target.clone(),
        staging: false,
        staged_at: Some(staged),
        ..request
    };
    engine.mount_claim(publish).await?;
    Ok(target)
}

pub(crate) async fn unmount(
    engine: &Engine,
    place: &Place,
    claim: &PersistentVolume,
) -> Result<(), Error> {
    let id = claim.id.as_str();
    engine.unmount_claim(id, &place.target(id), false).await?;
    let staged = place.targets.join(format!("{id}-globalmount"));
    engine.unmount_claim(id, &staged, true).await?;
    match fs::remove_dir(staged) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => panic!("rmdir: {error}"),
        _ => Ok(()),
    }
}

/// An output and a commit of the cache, in a pool that survived; whether the output is sealed.
pub(crate) async fn one_more_day(place: &Place, engine: &Engine) -> Result<bool, Error> {
    let mut work = Work {
        place,
        engine: engine.clone(),
        random: Random::new(1),
        number: 1 << 40,
        outputs: Vec::new(),
        waiting: Vec::new(),
        claims: Vec::new(),
        unfinished: Vec::new(),
        note: &|_| {},
    };
    work.output().await?;
    work.cache().await?;
    engine.settled().await;
    work.hear_of_seals();
    Ok(work.waiting.is_empty())
}
