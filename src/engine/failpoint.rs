//! Named places where a test lets the process die as by `kill -9`, one by one.
//!
//! They lie between the steps whose order matters. One step changes one name on disk, or the next
//! start can tell how far it came. Release builds have none.

/// Defines the points, their names, and the list of all of them.
macro_rules! points {
    ($($(#[$doc:meta])* $point:ident = $name:literal,)*) => {
        /// A place to die.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Point { $($(#[$doc])* $point,)* }

        impl Point {
            /// All of them.
            pub const ALL: &'static [Self] = &[$(Self::$point,)*];

            /// What the test calls it.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(Self::$point => $name,)* }
            }
        }
    };
}

points! {
    /// The pool's directories are there, and locked.
    OpenLocked = "open-locked",
    /// Incomplete imports and fetches are in the trash.
    OpenSwept = "open-swept",
    /// A new pool has its identity, and no index.
    OpenFounded = "open-founded",
    /// The index is there, and read.
    OpenIndexed = "open-indexed",
    /// The spare volumes of an older version are gone.
    RecoverSwept = "recover-swept",
    /// One thing that an earlier process, or boot, left over is in the trash.
    RecoverThrownAway = "recover-thrown-away",
    /// The content of a persistent volume is back from the layer that a freeze moved it to. The
    /// note of that move still exists.
    RecoverContentBack = "recover-content-back",
    /// The index no longer names what is not there.
    RecoverIndexed = "recover-indexed",
    /// The reserve for a full disk exists.
    ReserveMade = "reserve-made",
    /// The reserve is deleted; the operation that needs its space is not done.
    ReserveGivenBack = "reserve-given-back",
    /// The kernel has reported a write-back error, which it does once. The error is not noted yet.
    WritebackFailureHeard = "failure-heard",
    /// That the disk lost something is written down, and nothing is done about it.
    WritebackFailureNoted = "failure-noted",
    /// Claims say that they may be damaged; that is not written down as done.
    WritebackFailureMarked = "failure-marked",
    /// It is; what is not to be sealed is in its place still.
    WritebackFailureFinished = "failure-finished",
    /// The mount point is made, nothing else.
    PublishTargetMade = "publish-target-made",
    /// `volumes/<id>` is made.
    PublishDirectoryMade = "publish-directory-made",
    /// Its content is made.
    PublishContentMade = "publish-content-made",
    /// Its record is written.
    PublishRecorded = "publish-recorded",
    /// A detached mount shows it.
    PublishMounted = "publish-mounted",
    /// It is attached at the target; the caller has no answer.
    PublishAttached = "publish-attached",
    /// The record of a volume whose mount vanished names a target where it is not mounted yet.
    PublishAgainRecorded = "publish-again-recorded",
    /// It is attached there; the caller has no answer.
    PublishAgainAttached = "publish-again-attached",
    /// The target of a volume or claim is detached.
    TargetDetached = "target-detached",
    /// Its mount point is gone. The record of a claim still names it.
    TargetRemoved = "target-removed",
    /// The volume is in `pending/` or `trash/`; the caller has no answer.
    UnpublishPromised = "unpublish-promised",
    /// The outcome is noted in the volume's directory.
    OutcomeNoted = "outcome-noted",
    /// The content is frozen, or no process holds the content that is to be deleted.
    SealFrozen = "seal-frozen",
    /// A discarded volume is deleted; the process still knows it.
    DiscardDeleted = "discard-deleted",
    /// `layers/<id>` is made.
    SealLayerMade = "seal-layer-made",
    /// `sealing.json` is written.
    SealLayerRecorded = "seal-layer-recorded",
    /// The content is in the layer.
    SealContentMoved = "seal-content-moved",
    /// It can be forked.
    SealVisible = "seal-visible",
    /// The begun layer of a discarded volume is in the trash; its seal intent still exists.
    SealGivenUp = "seal-given-up",
    /// The pool's filesystem is synced.
    CommitSynced = "commit-synced",
    /// The index names it.
    CommitIndexed = "commit-indexed",
    /// The layers say that the index names them; that they were promised is there still.
    CommitConfirmed = "commit-confirmed",
    /// `pending/<id>` is in the trash.
    CommitPendingTrashed = "commit-pending-trashed",
    /// The index no longer has the name that is destroyed, but still what it named.
    DestroyUnnamed = "destroy-unnamed",
    /// The index has a fence, and no longer the names that it clears; memory still has them.
    FenceIndexed = "fence-indexed",
    /// The index no longer names what is collected; its layers are still there.
    CollectUnindexed = "collect-unindexed",
    /// One layer of the collected artifacts is in the trash.
    CollectTrashed = "collect-trashed",
    /// A merged layer lies in `incoming/`.
    FlattenMerged = "flatten-merged",
    /// A merged layer lies in `layers/`, and the index still names the old ones.
    FlattenPlaced = "flatten-placed",
    /// The whole pool is on the disk, with the merged layer. The index still names the old layers.
    FlattenSynced = "flatten-synced",
    /// The index names the merged layer.
    FlattenIndexed = "flatten-indexed",
    /// The merged layer's record says that it is named.
    FlattenConfirmed = "flatten-confirmed",
    /// A layer's table of contents is on the disk, under its temporary name.
    TableWritten = "table-written",
    /// It has its name.
    TablePlaced = "table-placed",
    /// fsck has read memory and the names of layers. It holds no lock.
    CheckListed = "check-listed",
    /// What the view of an export needs lies in `incoming/`, and it is open.
    ExportOpened = "export-opened",
    /// There is a place in `incoming/` for an archive's content.
    ImportMade = "import-made",
    /// The archive is unpacked there.
    ImportUnpacked = "import-unpacked",
    /// It says what it will be.
    ImportRecorded = "import-recorded",
    /// It lies in `layers/`, and nothing names it.
    ImportPlaced = "import-placed",
    /// There is a place in `incoming/` for a layer of another node.
    ReceiveMade = "receive-made",
    /// The layer is there.
    ReceiveFilled = "receive-filled",
    /// Its table of contents lies beside it.
    ReceiveTabled = "receive-tabled",
    /// It says what it will be.
    ReceiveRecorded = "receive-recorded",
    /// It lies in `layers/`, and nothing names it.
    ReceivePlaced = "receive-placed",
    /// An import, or content of another node, is visible under its name, and not durable yet.
    EntryShown = "entry-shown",
    /// Its layers, or those of a persistent volume, are on the disk.
    EntrySynced = "entry-synced",
    /// The index names what stacks them.
    EntryIndexed = "entry-indexed",
    /// The layers say so; the caller has no answer.
    EntryConfirmed = "entry-confirmed",
    /// The index knows that an artifact is in the shared tier, and its layer's record does not.
    SharingIndexed = "sharing-indexed",
    /// The record does, too; the caller has no answer.
    SharingNoted = "sharing-noted",
    /// A rebuilt index lies beside the old one.
    RebuildMade = "rebuild-made",
    /// The old one is renamed: there is no index now.
    RebuildCleared = "rebuild-cleared",
    /// The new one is in its place.
    RebuildPlaced = "rebuild-placed",
    /// The index names a new claim; the caller has no answer.
    ClaimIndexed = "claim-indexed",
    /// The index has the change of a claim; the size limit of its content is as before.
    ClaimChanged = "claim-changed",
    /// That follows now; the caller has no answer.
    ClaimLimited = "claim-limited",
    /// A claim's first content is whole, in `incoming/`.
    ClaimContentMade = "claim-content-made",
    /// It is in its place.
    ClaimContentPlaced = "claim-content-placed",
    /// The claim's record names the target.
    ClaimRecorded = "claim-recorded",
    /// A detached mount shows the claim.
    ClaimMounted = "claim-mounted",
    /// It is attached at the target; the caller has no answer.
    ClaimAttached = "claim-attached",
    /// The claim's directory says to which layer its content is going to move.
    FreezeMarked = "freeze-marked",
    /// That layer's directory is made.
    FreezeLayerMade = "freeze-layer-made",
    /// The content of a claim is in the layer.
    FreezeContentMoved = "freeze-content-moved",
    /// It is written back.
    FreezeSynced = "freeze-synced",
    /// The index names what was made of it: a snapshot, a group or a clone.
    FreezeIndexed = "freeze-indexed",
    /// The layers' records say that they are named; this is what the answer leaves.
    FreezeConfirmed = "freeze-confirmed",
    /// The rest of the claim's directory is in the trash; the caller has no answer.
    FreezeCleared = "freeze-cleared",
    /// The index no longer names a claim that is deleted.
    ClaimUnindexed = "claim-unindexed",
    /// Its directory is in the trash.
    ClaimTrashed = "claim-trashed",
    /// The index no longer names a snapshot, or a group and its snapshots, that is deleted.
    SnapshotUnindexed = "snapshot-unindexed",
    /// The layers that only it referred to are in the trash; the caller has no answer.
    SnapshotTrashed = "snapshot-trashed",
}

/// Dies here if this is the place to die.
#[inline]
pub(super) fn point(point: Point) {
    #[cfg(debug_assertions)]
    armed::visit(point);
    #[cfg(not(debug_assertions))]
    let _ = point;
}

#[cfg(debug_assertions)]
pub use armed::{arm, at, visits};

#[cfg(debug_assertions)]
mod armed {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use parking_lot::Mutex;

    use super::Point;

    /// What happens, and when.
    struct Armed {
        point: Point,
        /// Visits until then, that one included.
        left: usize,
        act: Box<dyn FnOnce() + Send>,
    }

    static ARMED: Mutex<Option<Armed>> = Mutex::new(None);

    static VISITS: [AtomicUsize; Point::ALL.len()] =
        [const { AtomicUsize::new(0) }; Point::ALL.len()];

    /// Sets the point and the visit (1 is the first) at which this process dies. `false`: no point
    /// has that name.
    #[must_use]
    pub fn arm(name: &str, visit: usize) -> bool {
        let mut points = Point::ALL.iter().copied();
        let point = points.find(|point| point.name() == name);
        point.is_some_and(|point| {
            at(point, visit, die);
            true
        })
    }

    /// Runs `act` at a visit of a point, on the thread that passes it, for tests in which something
    /// changes between two steps. A later call replaces an earlier one.
    pub fn at(point: Point, visit: usize, act: impl FnOnce() + Send + 'static) {
        *ARMED.lock() = Some(Armed {
            point,
            left: visit,
            act: Box::new(act),
        });
    }

    /// How often this process has passed a point.
    #[must_use]
    pub fn visits(point: Point) -> usize {
        VISITS[point as usize].load(Ordering::SeqCst)
    }

    pub(super) fn visit(here: Point) {
        VISITS[here as usize].fetch_add(1, Ordering::SeqCst);
        let mut armed = ARMED.lock();
        let Some(waiting) = armed.as_mut().filter(|armed| armed.point == here) else {
            return;
        };
        waiting.left = waiting.left.saturating_sub(1);
        if waiting.left == 0 {
            let happens = armed.take();
            // What happens may pass points itself.
            drop(armed);
            if let Some(armed) = happens {
                (armed.act)();
            }
        }
    }

    /// SIGKILL runs no destructor, no exit handler and no flush. Only what is on disk or in the
    /// kernel survives.
    fn die() {
        let _killed = nix::sys::signal::kill(nix::unistd::Pid::this(), nix::sys::signal::SIGKILL);
        loop {
            std::thread::park();
        }
    }
}
