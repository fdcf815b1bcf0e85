//! Snapshots that the controller takes so that a clone can be made on another node than its
//! source's. Each is for one `Volume`, and its name says which: so a call that is repeated, and a
//! controller that was killed, find it. It is deleted by an order, as any other.
//!
//! It goes as soon as its volume is made, has failed, or is to be deleted. If there is no volume of
//! that name, a call may be about to make it: then the snapshot goes after a while. A restore of a
//! snapshot that a person took needs none of these.

use std::sync::Arc;
use std::time::Duration;

use kube::ResourceExt as _;
use tokio::time::Instant;

use super::cluster::Cluster;
use super::since::Since;
use super::volumes::absent;
use crate::api::{Phase, Snapshot, Volume, Wanted};
use crate::engine::Result;
use crate::engine::claims::snapshot_id;

/// csi-snapshotter's names do not begin so (`--snapshot-name-prefix`), and a `/` is in none.
const PREFIX: &str = "for-clone/";

/// The name of the snapshot for a `Volume`.
pub(in crate::k8s) fn name_for(volume: &str) -> String {
    format!("{PREFIX}{volume}")
}

/// The `Volume` for which a snapshot of this name was taken; `None`: a person took it.
pub(in crate::k8s) fn volume_of(name: &str) -> Option<&str> {
    name.strip_prefix(PREFIX)
}

/// Whether a snapshot is of no more use to this volume.
pub(in crate::k8s) fn is_over(volume: &Volume) -> bool {
    let is_made = matches!(
        volume.phase(),
        Some(Phase::Ready | Phase::Lost | Phase::Gone | Phase::Failed)
    );
    is_made || volume.spec.wanted != Wanted::Present
}

impl Cluster {
    /// Orders the deletion of snapshots that are needed no more. `alone`: those whose volume does
    /// not exist, of which each stays for `grace`.
    pub(super) async fn end_temporary(&self, alone: &mut Since<String>, grace: Duration) {
        let (all, now) = (self.temporary(), Instant::now());
        let volume_for = |one: &Snapshot| volume_of(&one.spec.name).unwrap_or_default().to_owned();
        let is_alone = |one: &&Arc<Snapshot>| {
            // A node may take long to make one, and calls wait for it.
            one.status.is_some() && self.seen_volumes.get(&volume_for(one)).is_none()
        };
        let uids = all.iter().filter(is_alone).filter_map(|one| one.uid());
        alone.look(uids, now);
        for snapshot in all {
            let volume = volume_for(&snapshot);
            let uid = snapshot.uid().unwrap_or_default();
            let is_due = match self.seen_volumes.get(&volume) {
                Some(volume) => is_over(&volume),
                None => alone.is_due(&uid, now, grace),
            };
            if is_due && let Err(error) = self.end_if_over(&snapshot, &volume).await {
                tracing::warn!(snapshot = %snapshot.name_any(), %error,
                    "the snapshot of a clone could not be deleted; retrying");
            }
        }
    }

    /// The snapshots for clones that are not to be deleted yet.
    fn temporary(&self) -> Vec<Arc<Snapshot>> {
        let mut all = self.seen_snapshots.all();
        all.retain(|one| volume_of(&one.spec.name).is_some() && one.spec.wanted != Wanted::Absent);
        all
    }

    /// Orders a deletion, if the volume, read live, needs the snapshot no more.
    async fn end_if_over(&self, snapshot: &Snapshot, volume: &str) -> Result<()> {
        let Ok(id) = volume.parse() else {
            return Ok(());
        };
        // A call that is about to make the volume has it.
        let Ok(_alone) = self.running.take(id) else {
            return Ok(());
        };
        let live = self.volumes.get(volume).await?;
        if live.as_ref().is_none_or(is_over) {
            self.snapshots.write(snapshot, absent()).await?;
        }
        Ok(())
    }

    /// Orders the deletion of the snapshot of a volume whose object is deleted. If that fails, the
    /// look does it later.
    pub(super) async fn end_temporary_of(&self, volume: &Volume) {
        if volume.spec.fetch.is_none() {
            return;
        }
        let id = snapshot_id(&name_for(&volume.name_any()));
        let ended = async {
            if let Some(snapshot) = self.snapshots.get(id.as_str()).await? {
                self.snapshots.write(&snapshot, absent()).await?;
            }
            Ok::<(), crate::engine::Error>(())
        };
        if let Err(error) = ended.await {
            tracing::warn!(snapshot = %id, %error,
                "the snapshot of a clone could not be deleted; retrying later");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::{Mutable, VolumeSpec, VolumeStatus};

    #[test]
    fn a_snapshot_is_needed_until_its_volume_is_made_or_given_up() {
        assert_eq!(volume_of(&name_for("vol-1")), Some("vol-1"));
        assert_eq!(volume_of("snapshot-3f0c9a52"), None);
        let volume = |wanted, phase: Option<Phase>| {
            let spec = VolumeSpec::empty("pvc-1", "node-2", wanted);
            let mut volume = Volume::new("vol-1", spec);
            volume.status = phase.map(|phase| VolumeStatus {
                observed_generation: 1,
                phase,
                pool: "pool".to_owned(),
                capacity: 0,
                mutable: Mutable::default(),
                error: None,
            });
            is_over(&volume)
        };
        assert!(!volume(Wanted::Present, None));
        assert!(!volume(Wanted::Present, Some(Phase::Fetching)));
        assert!(volume(Wanted::Absent, Some(Phase::Fetching)));
        for phase in [Phase::Ready, Phase::Lost, Phase::Failed, Phase::Gone] {
            assert!(volume(Wanted::Present, Some(phase)), "{phase:?}");
        }
    }
}
