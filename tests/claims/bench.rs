//! An engine on its own filesystem, and pods that mount claims. It checks nothing itself.

use std::future::Future;
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, io};

use crate::common::bench::{empty_claim, mount_request};
use baggageclaim::backend::BackendKind;
use baggageclaim::engine::claims::{CreateClaim, MountClaim};
use baggageclaim::engine::{Config, Engine, Error, Result};
use baggageclaim::model::{ClaimSource, PersistentVolume, Snapshot};

use super::common::{self, Fs, Lab};

/// A backend on a filesystem.
pub(crate) type Ground = (BackendKind, Fs);

pub(crate) const OVERLAY: Ground = (BackendKind::Overlay, Fs::Ext4);
pub(crate) const BTRFS: Ground = (BackendKind::Btrfs, Fs::Btrfs);
pub(crate) const COPY: Ground = (BackendKind::Copy, Fs::XfsReflink);
pub(crate) const ALL: [Ground; 4] = [OVERLAY, (BackendKind::Overlay, Fs::XfsReflink), BTRFS, COPY];

/// An engine and its world.
pub(crate) struct Bench {
    pub(crate) lab: Lab,
    pub(crate) engine: Engine,
    pub(crate) config: Config,
}

/// A request for an empty claim.
pub(crate) fn request(name: &str) -> CreateClaim {
    empty_claim(name)
}

/// Repeats a busy call, as kubelet and the sidecars do. Other tests start processes, and between
/// fork and exec such a process holds all descriptors of this one.
pub(crate) async fn again<T, F: Future<Output = Result<T>>>(ask: impl Fn() -> F) -> Result<T> {
    for _ in 0..3000 {
        match ask().await {
            Err(error) if is_busy(&error) => tokio::time::sleep(Duration::from_millis(10)).await,
            result => return result,
        }
    }
    ask().await
}

fn is_busy(error: &Error) -> bool {
    match error {
        Error::Busy(_) | Error::HeldOpen(_) => true,
        Error::ClaimInUse { how, .. } => how.contains("a process still holds"),
        _ => false,
    }
}

impl Bench {
    /// `None`, and a word about it, where this machine cannot.
    pub(crate) async fn new(ground: Ground) -> Option<Self> {
        Self::sized(ground, 1 << 30).await
    }

    pub(crate) async fn sized((backend, fs): Ground, bytes: u64) -> Option<Self> {
        let lab = match Lab::try_sized(fs, bytes) {
            Ok(lab) => lab,
            Err(reason) => {
                common::skip(&reason);
                return None;
            }
        };
        let mut config = Config::new(lab.path().join("pool"));
        config.backend = Some(backend);
        config.clock_settles = Duration::ZERO;
        let engine = Engine::open(config.clone()).await.expect("it opens");
        Some(Self {
            lab,
            engine,
            config,
        })
    }

    pub(crate) async fn create(&self, name: &str) -> PersistentVolume {
        self.engine.create_claim(request(name)).await.expect(name)
    }

    pub(crate) async fn create_from(&self, name: &str, source: ClaimSource) -> PersistentVolume {
        let request = CreateClaim {
            source: Some(source),
            ..request(name)
        };
        let made = again(|| self.engine.create_claim(request.clone()));
        made.await.expect(name)
    }

    pub(crate) async fn clone_of(&self, name: &str, source: &PersistentVolume) -> PersistentVolume {
        let source = ClaimSource::Claim(source.id.clone());
        self.create_from(name, source).await
    }

    pub(crate) async fn restore(&self, name: &str, snapshot: &Snapshot) -> PersistentVolume {
        let source = ClaimSource::Snapshot(snapshot.id.clone());
        self.create_from(name, source).await
    }

    pub(crate) async fn snapshot(&self, name: &str, claim: &PersistentVolume) -> Snapshot {
        let taken = again(|| self.engine.create_snapshot(name, claim.id.as_str()));
        taken.await.expect(name)
    }

    pub(crate) fn at(&self, place: &str) -> PathBuf {
        self.lab.kubelet_dir().join("pods").join(place)
    }

    pub(crate) fn staging(&self, claim: &PersistentVolume) -> PathBuf {
        self.at(&format!("{}-globalmount", claim.id))
    }

    pub(crate) fn publish_request(&self, claim: &PersistentVolume, place: &str) -> MountClaim {
        MountClaim {
            staged_at: Some(self.staging(claim)),
            ..mount_request(claim, &self.at(place))
        }
    }

    pub(crate) fn stage_request(&self, claim: &PersistentVolume) -> MountClaim {
        MountClaim {
            target: self.staging(claim),
            staging: true,
            staged_at: None,
            ..self.publish_request(claim, "")
        }
    }

    pub(crate) async fn stage(&self, claim: &PersistentVolume) -> Result<()> {
        let request = self.stage_request(claim);
        fs::create_dir_all(&request.target).expect("the staging path");
        self.engine.mount_claim(request).await
    }

    pub(crate) async fn staged_read_only(&self, claim: &PersistentVolume) -> Result<()> {
        let request = MountClaim {
            read_only: true,
            ..self.stage_request(claim)
        };
        fs::create_dir_all(&request.target).expect("the staging path");
        again(|| self.engine.mount_claim(request.clone())).await
    }

    /// Stages and publishes a claim, as kubelet does for a pod; where it is.
    pub(crate) async fn mount(&self, claim: &PersistentVolume) -> PathBuf {
        again(|| self.stage(claim)).await.expect("staged");
        let request = self.publish_request(claim, claim.id.as_str());
        let target = request.target.clone();
        self.engine.mount_claim(request).await.expect("published");
        target
    }

    /// Unpublishes what a claim has at a place.
    pub(crate) async fn unpublish(&self, claim: &PersistentVolume, place: &str) {
        let path = self.at(place);
        let unpublished = self.engine.unmount_claim(claim.id.as_str(), &path, false);
        unpublished.await.expect("unpublished");
        assert!(!path.exists(), "the target is gone");
    }

    pub(crate) async fn unmount(&self, claim: &PersistentVolume) {
        self.unpublish(claim, claim.id.as_str()).await;
        let staged = self.staging(claim);
        let unstaged = self.engine.unmount_claim(claim.id.as_str(), &staged, true);
        unstaged.await.expect("unstaged");
        assert!(staged.exists(), "the staging path stays");
    }

    /// Does something in a claim as a pod would, and unmounts it.
    pub(crate) async fn inside<T>(
        &self,
        claim: &PersistentVolume,
        work: impl FnOnce(&Path) -> T,
    ) -> T {
        let target = self.mount(claim).await;
        let result = work(&target);
        self.unmount(claim).await;
        result
    }

    pub(crate) async fn read(&self, claim: &PersistentVolume, file: &str) -> io::Result<String> {
        self.inside(claim, |path| fs::read_to_string(path.join(file)))
            .await
    }

    pub(crate) async fn write(&self, claim: &PersistentVolume, file: &str, text: &str) {
        let write = |path: &Path| fs::write(path.join(file), text).expect(file);
        self.inside(claim, write).await;
    }

    /// An upgrade of the driver: the engine ends and starts again; mounts stay.
    pub(crate) async fn restart(self) -> Self {
        self.restart_after(|| ()).await
    }

    /// The same, with something that happens in between.
    pub(crate) async fn restart_after(self, between: impl FnOnce()) -> Self {
        self.engine.shutdown().await;
        let (lab, config) = (self.lab, self.config);
        drop(self.engine);
        between();
        let engine = common::bench::open_again(&config).await;
        Self {
            lab,
            engine,
            config,
        }
    }

    /// The machine is rebooted: no mount is left, and the records are of another boot.
    pub(crate) async fn reboot(self) -> Self {
        self.engine.shutdown().await;
        let (lab, config) = (self.lab, self.config);
        drop(self.engine);
        lab.remount();
        for dir in fs::read_dir(config.pool.join("volumes")).expect("volumes") {
            let path = dir.expect("an entry").path().join("claim.json");
            let text = fs::read_to_string(&path).expect("a record");
            let mut record: serde_json::Value = serde_json::from_str(&text).expect("JSON");
            record["boot"] = "the one before".into();
            fs::write(&path, record.to_string()).expect("written");
        }
        for place in fs::read_dir(lab.kubelet_dir().join("pods")).expect("pods") {
            fs::remove_dir(place.expect("an entry").path()).expect("an empty mount point");
        }
        let engine = common::bench::open_again(&config).await;
        Self {
            lab,
            engine,
            config,
        }
    }

    pub(crate) async fn assert_sound(&self) {
        assert_eq!(self.engine.check().await.expect("check"), []);
    }

    pub(crate) fn names_in(&self, directory: &str) -> Vec<String> {
        let entries = fs::read_dir(self.config.pool.join(directory)).expect(directory);
        let name = |entry: io::Result<fs::DirEntry>| entry.expect("an entry").file_name();
        let mut names: Vec<String> = entries
            .map(|entry| name(entry).into_string().expect("text"))
            .collect();
        names.sort();
        names
    }

    /// Deletes a claim that no pod has any more.
    pub(crate) async fn delete(&self, claim: &str) {
        // Another test's process, on its way to exec, may hold what was just unmounted.
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        loop {
            match self.engine.delete_claim(claim).await {
                Err(Error::Busy(_) | Error::ClaimInUse { .. })
                    if std::time::Instant::now() < deadline =>
                {
                    tokio::task::yield_now().await;
                }
                deleted => break deleted.expect("deleted"),
            }
        }
    }

    /// Deletes all that there is, and makes sure that nothing is left of it.
    pub(crate) async fn finish(self) {
        self.assert_sound().await;
        let engine = &self.engine;
        for claim in engine.claims(None, usize::MAX).items {
            self.delete(claim.id.as_str()).await;
        }
        let filter = baggageclaim::engine::claims::SnapshotFilter::default();
        for snapshot in engine
            .snapshots(&filter, None, usize::MAX)
            .expect("list")
            .items
        {
            let id = snapshot
                .group
                .as_ref()
                .map_or(snapshot.id.as_str(), |group| group.as_str());
            if snapshot.group.is_some() {
                engine.delete_group(id).await.expect("deleted");
            } else {
                engine.delete_snapshot(id).await.expect("deleted");
            }
        }
        engine.reap().await.expect("reap");
        self.assert_sound().await;
        engine.shutdown().await;
        for directory in ["volumes", "layers", "pending", "incoming", "trash"] {
            assert_eq!(
                self.names_in(directory),
                Vec::<String>::new(),
                "{directory}"
            );
        }
        drop(self.engine);
        assert_eq!(self.lab.close(), Vec::<PathBuf>::new(), "mounts left over");
    }
}

/// The name of a ground, for messages.
pub(crate) fn say(ground: Ground) {
    eprintln!("{} on {}", ground.0, ground.1.name());
}
