//! A pool at work: a workload of all driver calls, which records its promises. And the check of a
//! pool after a power cut, which finds broken promises.

use std::fs;
use std::io::Cursor;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baggageclaim::archive::{self, Codec, Pack, Progress};
use baggageclaim::backend::BackendKind;
use baggageclaim::engine::claims::{CreateClaim, MountClaim, SnapshotFilter};
use baggageclaim::engine::{Config, Engine, Error, ImportRequest};
use baggageclaim::model::{
    ArtifactId, ClaimParameters, ClaimSource, MutableParameters, Outcome, PersistentVolume,
    Reference,
};
use baggageclaim::sys::Dir;
use serde::{Deserialize, Serialize};

use super::common::bench::request;
use super::facts::{self, Fact, Promised, Random};

/// How long something is waited for before it counts as never coming.
const NEVER: Duration = Duration::from_secs(120);

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

/// Content that should not be there, or that is missing.
#[derive(Debug, Default, Clone, Serialize, Deserialize)]
pub(crate) struct Verdict {
    pub(crate) lost: Vec<String>,
    pub(crate) leaked: Vec<String>,
    pub(crate) wrong: Vec<String>,
    /// Imports that were sealed before the cut, and are whole.
    pub(crate) imports: u64,
    /// Imports that the cut interrupted, and that are whole or not there.
    pub(crate) cut_imports: u64,
}

impl Verdict {
    pub(crate) fn is_good(&self) -> bool {
        self.lost.is_empty() && self.leaked.is_empty() && self.wrong.is_empty()
    }
}

const OUTPUT: &str = "output";
const IMPORT: &str = "import";
/// One of so many steps is an import.
const IMPORTS: u64 = 6;
const CACHE: &str = "task-cache/shared";

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

    async fn open(&self) -> Result<Engine, Error> {
        fs::create_dir_all(&self.targets).expect("mkdir");
        Engine::open(self.config()).await
    }

    fn target(&self, volume: &str) -> PathBuf {
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
    pub(crate) async fn prove(&mut self) -> Result<(), String> {
        self.number += 1;
        let name = format!("{OUTPUT}-{}-{}", self.place.seed, self.number);
        let made = match self.finish().await {
            Ok(()) => self.output().await,
            failed => failed,
        };
        made.map_err(|error| error.to_string())?;
        self.settled().await;
        self.hear_of_seals();
        if self.outputs.contains(&name) {
            Ok(())
        } else {
            Err(format!("{name} is not sealed"))
        }
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
        self.engine.import(request, input, Arc::default()).await?;
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
        temporary: &tree,
    };
    let mut bytes = Vec::new();
    archive::pack(&tree, &mut bytes, how, &Progress::default(), &|| false).expect("pack");
    bytes
}

fn claim(name: &str, source: Option<ClaimSource>) -> CreateClaim {
    CreateClaim {
        name: name.to_owned(),
        required_bytes: 0,
        limit_bytes: None,
        parameters: ClaimParameters::default(),
        mutable: MutableParameters::default(),
        source,
    }
}

/// As a driver without staging would: one mount.
async fn mount(engine: &Engine, place: &Place, claim: &PersistentVolume) -> Result<PathBuf, Error> {
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

async fn unmount(engine: &Engine, place: &Place, claim: &PersistentVolume) -> Result<(), Error> {
    let id = claim.id.as_str();
    engine.unmount_claim(id, &place.target(id), false).await?;
    let staged = place.targets.join(format!("{id}-globalmount"));
    engine.unmount_claim(id, &staged, true).await?;
    match fs::remove_dir(staged) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => panic!("rmdir: {error}"),
        _ => Ok(()),
    }
}

/// Looks at a pool whose machine lost power; empties it, and sees that nothing is left over.
pub(crate) async fn look(place: &Place, promised: &Promised) -> Verdict {
    let mut verdict = Verdict::default();
    let engine = match place.open().await {
        Ok(engine) => engine,
        Err(error) => {
            verdict
                .lost
                .push(format!("the pool does not open: {error}"));
            return verdict;
        }
    };
    if let Err(error) = look_at(place, promised, &engine, &mut verdict).await {
        verdict.wrong.push(error.to_string());
    }
    engine.shutdown().await;
    drop(engine);
    match Engine::check_offline(&place.pool) {
        Ok(findings) => {
            let findings = findings.iter().map(|finding| format!("{finding:?}"));
            verdict.leaked.extend(findings);
        }
        Err(error) => verdict.wrong.push(format!("check: {error}")),
    }
    verdict
}

async fn look_at(
    place: &Place,
    promised: &Promised,
    engine: &Engine,
    verdict: &mut Verdict,
) -> Result<(), Error> {
    engine.settled().await;
    engine.reap().await?;
    let findings = engine.check().await?;
    let findings = findings.iter().map(|finding| format!("{finding:?}"));
    verdict.leaked.extend(findings);

    look_at_outputs(place, promised, engine, verdict).await?;
    look_at_claims(place, promised, engine, verdict).await?;

    // It works as a new one does.
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
    if !work.waiting.is_empty() {
        verdict.wrong.push("a new output is not sealed".to_owned());
    }
    empty(place, engine, verdict).await
}

async fn look_at_outputs(
    place: &Place,
    promised: &Promised,
    engine: &Engine,
    verdict: &mut Verdict,
) -> Result<(), Error> {
    let mut names: Vec<String> = Vec::new();
    for row in engine.artifacts(None) {
        let Some(name) = row.name else { continue };
        if !row.durable {
            let found = format!("{name} is not durable after a start");
            verdict.wrong.push(found);
        }
        names.push(name.to_string());
    }
    for name in &promised.outputs {
        if !names.contains(&format!("artifact/{name}")) {
            verdict.lost.push(format!("{name} was durable"));
        }
    }
    if promised.cached.is_some() && !names.iter().any(|name| name == CACHE) {
        verdict.lost.push("the cache was durable".to_owned());
    }
    let is_there = |name: &&String| names.contains(&format!("artifact/{name}"));
    let absent = promised.importing.iter().filter(|name| !is_there(name));
    verdict.cut_imports += absent.count() as u64;
    for (number, reference) in names.iter().enumerate() {
        let volume = format!("look-{number}");
        let target = place.target(&volume);
        let attributes = [("type", "input"), ("from", reference.as_str())];
        let pod = format!("pod-{volume}");
        let asked = request(&target, "ci", &pod, &volume, &attributes);
        engine.publish(asked).await?;
        if reference == CACHE {
            match facts::cache_generation(&target, place.seed) {
                Ok(generation) if Some(generation) >= promised.cached => {}
                Ok(generation) => verdict.lost.push(format!(
                    "the cache has generation {generation}, and {:?} was durable",
                    promised.cached
                )),
                Err(why) => verdict.wrong.push(format!("the cache: {why}")),
            }
        } else {
            let name = reference.trim_start_matches("artifact/");
            if promised.destroyed.contains(name) {
                verdict.wrong.push(format!("{name} was destroyed"));
            }
            // An import that was cut is here, too, if it is there at all: it must be whole.
            let wrong = facts::wrong_with_output(&target, name);
            verdict.imports += u64::from(wrong.is_none() && promised.imported.contains(name));
            let interrupted = promised.importing.contains(name);
            verdict.cut_imports += u64::from(wrong.is_none() && interrupted);
            verdict.wrong.extend(wrong);
        }
        engine.unpublish(&volume, &target).await?;
        engine
            .report_outcome(&pod.parse().expect("a uid"), Outcome::Failed)
            .await?;
    }
    Ok(())
}

async fn look_at_claims(
    place: &Place,
    promised: &Promised,
    engine: &Engine,
    verdict: &mut Verdict,
) -> Result<(), Error> {
    let claims = engine.claims(None, usize::MAX).items;
    for (name, generation) in &promised.claims {
        let Some(claim) = claims.iter().find(|claim| claim.name == *name) else {
            verdict.lost.push(format!("{name} was made"));
            continue;
        };
        let target = mount(engine, place, claim).await?;
        match facts::claim_generation(&target, name) {
            Ok(found) if found >= *generation => {}
            Ok(found) => {
                let said = format!("{name}: {found:?} is there, {generation:?} was synced");
                verdict.lost.push(said);
            }
            Err(why) => verdict.wrong.push(why),
        }
        unmount(engine, place, claim).await?;
    }
    for claim in &claims {
        if promised.unclaimed.contains(&claim.name) {
            verdict.wrong.push(format!("{} was deleted", claim.name));
        }
    }
    let all = SnapshotFilter::default();
    let snapshots = engine.snapshots(&all, None, usize::MAX)?.items;
    for (name, (of, generation)) in &promised.snapshots {
        let Some(snapshot) = snapshots.iter().find(|snapshot| snapshot.name == *name) else {
            verdict.lost.push(format!("{name} was taken"));
            continue;
        };
        let source = ClaimSource::Snapshot(snapshot.id.clone());
        let clone = engine
            .create_claim(claim(&format!("of-{name}"), Some(source)))
            .await?;
        let target = mount(engine, place, &clone).await?;
        match facts::claim_generation(&target, of) {
            Ok(found) if found == Some(*generation) => {}
            found => {
                let said = format!("{name}: {found:?} is there, {generation} was");
                verdict.wrong.push(said);
            }
        }
        unmount(engine, place, &clone).await?;
    }
    Ok(())
}

/// Deletes everything, and says what is left.
async fn empty(place: &Place, engine: &Engine, verdict: &mut Verdict) -> Result<(), Error> {
    let all = SnapshotFilter::default();
    for snapshot in engine.snapshots(&all, None, usize::MAX)?.items {
        engine.delete_snapshot(snapshot.id.as_str()).await?;
    }
    for claim in engine.claims(None, usize::MAX).items {
        engine.delete_claim(claim.id.as_str()).await?;
    }
    engine.settled().await;
    let tenant = "ci".parse().expect("a tenant");
    for row in engine.artifacts(None) {
        if let Some(reference) = row.name {
            engine.destroy(&tenant, &reference).await?;
        }
    }
    let deadline = Instant::now() + NEVER;
    while engine.reap().await?.held > 0 && Instant::now() < deadline {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    for room in ["volumes", "pending", "layers", "incoming", "trash"] {
        for entry in fs::read_dir(place.pool.join(room))
            .expect("a room")
            .flatten()
        {
            verdict
                .leaked
                .push(format!("{room}/{}", entry.file_name().display()));
        }
    }
    for entry in fs::read_dir(&place.targets).expect("targets").flatten() {
        let name = entry.file_name();
        verdict.leaked.push(format!("target {}", name.display()));
    }
    Ok(())
}
