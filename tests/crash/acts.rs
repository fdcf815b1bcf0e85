//! The operations that pass each named point, where the process is killed.
//!
//! An act is prepared by a process that survives. Then come the calls during which the process is
//! killed; like kubelet, the test repeats them until they are answered.

use std::fs;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use baggageclaim::engine::failpoint::Point;
use baggageclaim::model::layout;
use rustix::mount::UnmountFlags;

use super::common::{Snapshot, layers};
use super::driver::{Call, Connection, Place};
use super::world::{World, outcome, publish, unpublish, without_root_time, write};

/// An operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Act {
    /// A fork of an artifact.
    PublishFork,
    /// An output: empty, may be sealed.
    PublishOutput,
    /// Empty, never sealed.
    PublishScratch,
    /// Remounts a volume whose mount another process removed.
    PublishVanished,
    /// A step is done with what it made.
    UnpublishOutput,
    /// A step is done with its cache, and left the marker.
    UnpublishFork,
    /// Ends a step whose output is unwanted.
    UnpublishScratch,
    /// The pod's end becomes known while its volume is mounted.
    OutcomeWhileMounted,
    /// The pod's end becomes known when its volume waits for it.
    OutcomeAwaited,
    /// A retried output takes the name of the first.
    Supersede,
    /// A step fetched what another one had fetched before it was done.
    LoseName,
    /// The time of an output is over.
    Expire,
    /// An administrator deletes.
    Destroy,
    /// A name is cleared in the whole cluster.
    Clear,
    /// A task cache was committed often enough that its layers are merged.
    Flatten,
    /// An artifact leaves as an archive.
    Export,
    /// It comes back under another name.
    Import,
    /// An artifact of two layers comes from another node.
    Receive,
    /// The same, where each layer gets its table.
    ReceiveStack,
    /// An artifact was uploaded.
    Share,
}

/// An act about to be made.
#[derive(Debug)]
pub(crate) struct Prepared {
    /// The calls of a caller that repeats unanswered ones, in this order.
    pub(crate) calls: Vec<Call>,
    /// The difference after all were answered.
    pub(crate) done: Done,
}

/// The effect of an act on the world.
#[derive(Debug)]
pub(crate) enum Done {
    Published(&'static str, Option<&'static str>, Snapshot),
    Ended(&'static str),
    Deleted(&'static str),
    Imported(&'static str, Snapshot),
    /// A name, and a volume that would have been committed under it.
    Cleared(&'static str, &'static str),
    Nothing,
}

impl Act {
    /// The acts that pass a point.
    #[expect(clippy::too_many_lines, reason = "one entry for each case")]
    pub(crate) fn passing(point: Point) -> &'static [Self] {
        match point {
            Point::PublishTargetMade
            | Point::PublishDirectoryMade
            | Point::PublishContentMade
            | Point::PublishRecorded
            | Point::PublishMounted
            | Point::PublishAttached => &[
                Self::PublishFork,
                Self::PublishOutput,
                Self::PublishScratch,
            ],
            Point::TargetDetached
            | Point::TargetRemoved
            | Point::UnpublishPromised
            | Point::SealFrozen => &[
                Self::UnpublishOutput,
                Self::UnpublishFork,
                Self::UnpublishScratch,
            ],
            Point::PublishAgainRecorded | Point::PublishAgainAttached => {
                &[Self::PublishVanished]
            }
            Point::DiscardDeleted => &[Self::UnpublishScratch],
            Point::SealGivenUp => &[Self::LoseName],
            Point::DestroyUnnamed => &[Self::Destroy],
            Point::FenceIndexed => &[Self::Clear],
            Point::OutcomeNoted => &[Self::OutcomeWhileMounted, Self::OutcomeAwaited],
            Point::SealLayerMade
            | Point::SealLayerRecorded
            | Point::SealContentMoved
            | Point::SealVisible
            | Point::CommitSynced
            | Point::CommitIndexed
            | Point::CommitConfirmed
            | Point::CommitPendingTrashed => &[Self::UnpublishOutput, Self::UnpublishFork],
            Point::CollectUnindexed | Point::CollectTrashed => {
                &[Self::Supersede, Self::Expire, Self::Destroy]
            }
            // `starts` visits the points of a start, of a full disk and of a failing one.
            Point::OpenLocked
            | Point::OpenSwept
            | Point::OpenFounded
            | Point::OpenIndexed
            | Point::RecoverSwept
            | Point::RecoverThrownAway
            | Point::RecoverIndexed
            | Point::ReserveMade
            | Point::ReserveGivenBack
            | Point::WritebackFailureHeard
            | Point::WritebackFailureNoted
            | Point::WritebackFailureMarked
            | Point::WritebackFailureFinished
            // `days` visits the points that no call waits for or that run without a driver.
            | Point::RebuildMade
            | Point::RebuildCleared
            | Point::RebuildPlaced
            // `tests/failing` visits it: nothing is changed there.
            | Point::TableWritten
            | Point::TablePlaced
            | Point::CheckListed
            // `tests/claims_crash.rs` visits the points of claims.
            | Point::ClaimIndexed
            | Point::ClaimChanged
            | Point::ClaimLimited
            | Point::ClaimContentMade
            | Point::ClaimContentPlaced
            | Point::ClaimRecorded
            | Point::ClaimMounted
            | Point::ClaimAttached
            | Point::RecoverContentBack
            | Point::FreezeMarked
            | Point::FreezeLayerMade
            | Point::FreezeContentMoved
            | Point::FreezeSynced
            | Point::FreezeIndexed
            | Point::FreezeConfirmed
            | Point::FreezeCleared
            | Point::ClaimUnindexed
            | Point::ClaimTrashed
            | Point::SnapshotUnindexed
            | Point::SnapshotTrashed => &[],
            Point::FlattenMerged
            | Point::FlattenPlaced
            | Point::FlattenSynced
            | Point::FlattenIndexed
            | Point::FlattenConfirmed => &[Self::Flatten],
            Point::ExportOpened => &[Self::Export],
            Point::ImportMade
            | Point::ImportUnpacked
            | Point::ImportRecorded
            | Point::ImportPlaced => &[Self::Import],
            Point::EntryShown
            | Point::EntrySynced
            | Point::EntryIndexed
            | Point::EntryConfirmed => &[Self::Import, Self::Receive],
            Point::ReceiveMade
            | Point::ReceiveFilled
            | Point::ReceiveRecorded
            | Point::ReceivePlaced => &[Self::Receive],
            Point::ReceiveTabled => &[Self::ReceiveStack],
            Point::SharingIndexed | Point::SharingNoted => &[Self::Share],
        }
    }

    /// Whether only a backend passes anything by it that keeps an artifact as a stack of layers,
    /// mounted for each volume.
    pub(crate) fn needs_stacks(self) -> bool {
        matches!(self, Self::Flatten | Self::ReceiveStack)
    }

    /// Does all that comes before.
    #[expect(
        clippy::too_many_lines,
        reason = "one arm for each act, and each is plain"
    )]
    pub(crate) fn prepare(self, place: &Place, world: &mut World, on: &mut Connection) -> Prepared {
        let calls;
        let done;
        match self {
            Self::PublishFork => {
                let fork = [("type", "input"), ("from", "artifact/base")];
                calls = vec![publish(place, "fork", &fork)];
                done = Done::Published("fork", None, world.sealed["artifact/base"].clone());
            }
            Self::PublishOutput => {
                let output = [("type", "output"), ("name", "made")];
                calls = vec![publish(place, "maker", &output)];
                done = Done::Published("maker", Some("artifact/made"), empty());
            }
            Self::PublishScratch => {
                calls = vec![publish(place, "scratch", &[])];
                done = Done::Published("scratch", None, empty());
            }
            Self::PublishVanished => {
                let output = [("type", "output"), ("name", "made")];
                let call = publish(place, "maker", &output);
                on.must(&call);
                let target = place.target("maker");
                fs::write(target.join("kept"), "of before").expect("write");
                let content = Snapshot::of(&target);
                rustix::mount::unmount(&target, UnmountFlags::NOFOLLOW).expect("umount");
                calls = vec![call];
                done = Done::Published("maker", Some("artifact/made"), content);
            }
            Self::LoseName => {
                let cache = [("type", "resource-cache"), ("key", "r")];
                world.start_pod(place, on, "winner", Some("resource-cache/r"), &cache);
                world.start_pod(place, on, "loser", None, &cache);
                world.end_pod(place, on, "winner");
                on.must(&outcome("loser", true));
                calls = vec![unpublish(place, "loser"), Call::Settle];
                done = Done::Ended("loser");
            }
            Self::UnpublishOutput => {
                let output = [("type", "output"), ("name", "made")];
                world.start_pod(place, on, "maker", Some("artifact/made"), &output);
                on.must(&outcome("maker", true));
                calls = vec![unpublish(place, "maker"), Call::Settle];
                done = Done::Ended("maker");
            }
            Self::UnpublishFork => {
                let cache = [
                    ("type", "task-cache"),
                    ("key", "t"),
                    ("commit", "on-marker"),
                ];
                world.start_pod(place, on, "task", Some("task-cache/t"), &cache);
                let content = &mut world.live.get_mut("task").expect("just made").content;
                *content = without_root_time(content.clone());
                let marker = place.target("task").join(layout::COMMIT_MARKER);
                fs::write(marker, "").expect("the marker");
                calls = vec![unpublish(place, "task"), Call::Settle];
                done = Done::Ended("task");
            }
            Self::UnpublishScratch => {
                world.start_pod(place, on, "scratch", None, &[]);
                calls = vec![unpublish(place, "scratch"), Call::Settle];
                done = Done::Ended("scratch");
            }
            Self::OutcomeWhileMounted => {
                let output = [("type", "output"), ("name", "made")];
                world.start_pod(place, on, "maker", Some("artifact/made"), &output);
                calls = vec![
                    outcome("maker", true),
                    unpublish(place, "maker"),
                    Call::Settle,
                ];
                done = Done::Ended("maker");
            }
            Self::OutcomeAwaited => {
                let output = [("type", "output"), ("name", "made")];
                world.start_pod(place, on, "maker", Some("artifact/made"), &output);
                on.must(&unpublish(place, "maker"));
                on.must(&Call::Settle);
                calls = vec![outcome("maker", true), Call::Settle];
                done = Done::Ended("maker");
            }
            Self::Supersede => {
                let output = [("type", "output"), ("name", "twice")];
                world.start_pod(place, on, "first", Some("artifact/twice"), &output);
                world.end_pod(place, on, "first");
                world.start_pod(place, on, "second", Some("artifact/twice"), &output);
                on.must(&outcome("second", true));
                calls = vec![unpublish(place, "second"), Call::Settle, Call::Reap];
                done = Done::Ended("second");
            }
            Self::Expire => {
                let output = [("type", "output"), ("name", "short"), ("ttl", "1s")];
                world.start_pod(place, on, "short", Some("artifact/short"), &output);
                world.end_pod(place, on, "short");
                on.must(&Call::Reap);
                std::thread::sleep(Duration::from_millis(1100));
                calls = vec![Call::Reap];
                done = Done::Deleted("artifact/short");
            }
            Self::Destroy => {
                let output = [("type", "output"), ("name", "unwanted")];
                world.start_pod(place, on, "maker", Some("artifact/unwanted"), &output);
                world.end_pod(place, on, "maker");
                let reference = "artifact/unwanted".to_owned();
                calls = vec![Call::Destroy { reference }];
                done = Done::Deleted("artifact/unwanted");
            }
            Self::Clear => {
                let cache = [("type", "task-cache"), ("key", "cleared")];
                world.start_pod(place, on, "maker", Some("task-cache/cleared"), &cache);
                world.end_pod(place, on, "maker");
                // It began before, and ends after.
                world.start_pod(place, on, "writer", None, &cache);
                on.must(&outcome("writer", true));
                let reference = "task-cache/cleared".to_owned();
                calls = vec![
                    Call::Clear { reference },
                    unpublish(place, "writer"),
                    Call::Settle,
                    Call::Reap,
                ];
                done = Done::Cleared("task-cache/cleared", "writer");
            }
            Self::Flatten => {
                let cache = [("type", "task-cache"), ("key", "chain")];
                // Each layer holds directories of the others: the ninth is one too many.
                for link in 0..8 {
                    let volume = format!("link-{link}");
                    world.start_pod(place, on, &volume, Some("task-cache/chain"), &cache);
                    world.end_pod(place, on, &volume);
                }
                on.must(&Call::Reap);
                // A fork over the layers that are merged away under it.
                let fork = [("type", "input"), ("from", "task-cache/chain")];
                world.start_pod(place, on, "onlooker", None, &fork);
                world.start_pod(place, on, "last-link", Some("task-cache/chain"), &cache);
                on.must(&outcome("last-link", true));
                calls = vec![unpublish(place, "last-link"), Call::Settle, Call::Reap];
                done = Done::Ended("last-link");
            }
            Self::Export => {
                calls = vec![export(place)];
                done = Done::Nothing;
            }
            Self::Import => {
                on.must(&export(place));
                calls = vec![Call::Import {
                    reference: "artifact/imported".to_owned(),
                    file: archive(place),
                }];
                done = Done::Imported("artifact/imported", world.sealed["artifact/base"].clone());
            }
            Self::Receive | Self::ReceiveStack => {
                let (call, content) = receive(place, "received");
                calls = vec![call];
                done = Done::Imported("artifact/received", content);
            }
            Self::Share => {
                let reference = "artifact/base".to_owned();
                calls = vec![Call::Share { reference }];
                done = Done::Nothing;
            }
        }
        Prepared { calls, done }
    }
}

/// An output of two layers that another node made, and what it shows.
pub(crate) fn receive(place: &Place, name: &str) -> (Call, Snapshot) {
    static MADE: AtomicU32 = AtomicU32::new(0);
    let number = MADE.fetch_add(1, Ordering::Relaxed);
    let at = place.lab.run_dir().join(format!("layers-{number}"));
    let (layers, shown) = layers::two(&at, name);
    let reference = format!("artifact/{name}");
    (Call::Receive { reference, layers }, shown)
}

fn archive(place: &Place) -> std::path::PathBuf {
    place.lab.run_dir().join("base.tar.zst")
}

fn export(place: &Place) -> Call {
    Call::Export {
        reference: "artifact/base".to_owned(),
        file: archive(place),
    }
}

/// The content of an empty volume. Its times do not matter.
fn empty() -> Snapshot {
    let folder = tempfile::tempdir().expect("a temporary folder");
    rustix::fs::chmod(folder.path(), 0o777.into()).expect("chmod");
    without_root_time(Snapshot::of(folder.path()))
}

impl Done {
    /// Operations that have begun and will complete in any case, and names that may be listed until
    /// then.
    pub(crate) fn begun(&self, world: &mut World) -> Vec<String> {
        match self {
            Self::Published(..) | Self::Nothing => Vec::new(),
            Self::Imported(name, _) => vec![(*name).to_owned()],
            Self::Ended(volume) => {
                world.pod_ended(volume);
                Vec::new()
            }
            Self::Deleted(name) => {
                world.sealed.remove(*name);
                vec![(*name).to_owned()]
            }
            // The clear is in the index.
            Self::Cleared(name, volume) => {
                world.pod_ended(volume);
                world.sealed.remove(*name);
                Vec::new()
            }
        }
    }

    /// The content after the answer.
    pub(crate) fn answered(self, place: &Place, world: &mut World) {
        if let Self::Imported(name, content) = self {
            world.sealed.insert(name.to_owned(), content);
        } else if let Self::Published(volume, becomes, content) = self {
            world.note_live(place, volume, becomes);
            world.live.get_mut(volume).expect("just noted").content = content;
            world.check_live(place);
            write(&place.target(volume), volume);
            world.note_live(place, volume, becomes);
        }
    }
}
