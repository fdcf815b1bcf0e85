//! Why the engine could not do what it was asked to. One variant per answer that a caller would act
//! on differently; the tier above maps each to a gRPC code, exhaustively.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::model::{ArtifactId, Elsewhere, LayerId, Name, Reference, Sha256, VolumeId};
use crate::{archive, backend, store, sys};

/// A result of the engine.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why the engine could not do it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Another operation on this volume is running.
    #[error("another operation on volume {0} is running; try again")]
    Busy(VolumeId),
    /// The volume to mount is mounted nowhere, but its last mount has not ended: a process has
    /// files of it open.
    #[error(
        "volume {0} is no longer mounted, but a process still holds files of it open (often of a \
         pod that was deleted by force); try again when that process has ended"
    )]
    HeldOpen(VolumeId),
    /// The content is known to be coming and did not come in time.
    #[error(
        "{reference} is not sealed yet: {state}; waited {}", humantime::format_duration(*waited))]
    Coming {
        /// What was waited for.
        reference: Reference,
        /// How far it is.
        state: String,
        /// How long it was waited for.
        waited: Duration,
    },
    /// The tenant has no content of that name, and no step is making it.
    #[error(
        "there is no {0}, and no known step will make it; check its name, and whether the step \
         that makes it ran on this node and committed it"
    )]
    NoSuchContent(Name),
    /// No artifact or cache of that name, asked for by an administrator.
    #[error("there is no {0}")]
    NoSuchName(Name),
    /// No such volume, or it is not published at that path.
    #[error("volume {volume} is not published at {}", path.display())]
    NotPublished {
        /// As the caller named it.
        volume: String,
        /// Where it was looked for.
        path: PathBuf,
    },
    /// The volume is published already, and differently.
    #[error("volume {volume} is published with another {what}; unpublish it first")]
    Different {
        /// Which volume.
        volume: VolumeId,
        /// What differs.
        what: &'static str,
    },
    /// The volume is published elsewhere, and may have one target.
    #[error(
        "volume {volume} is published at {} already, and {why} one target; unpublish it there \
         first",
        target.display()
    )]
    PublishedElsewhere {
        /// Which volume.
        volume: VolumeId,
        /// Where it is.
        target: PathBuf,
        /// What limits it.
        why: &'static str,
    },
    /// The target path is not what it must be.
    #[error("target path {}: {problem}", path.display())]
    Target {
        /// The path.
        path: PathBuf,
        /// What is wrong with it, and what to do.
        problem: String,
    },
    /// This pool cannot do it; trying again is of no use.
    #[error("{what} is not possible here: {why}")]
    Unsupported {
        /// What was asked for.
        what: String,
        /// What is missing.
        why: String,
    },
    /// The disk is full.
    #[error("the pool has no room left: {0}")]
    Full(Shortage),
    /// The pool cannot hold something and a copy of it, whatever goes.
    #[error(
        "{operation}: the pool has {pool} bytes and cannot hold the original and a copy of {needs} \
         bytes; make the pool larger"
    )]
    CopyTooLarge {
        /// What was being done.
        operation: &'static str,
        /// How many bytes the copy takes at least.
        needs: u64,
        /// How many there are in all.
        pool: u64,
    },
    /// The filesystem of kubelet's directory is full, and it is not the pool's. Evicting content
    /// from the pool does not help.
    #[error(
        "the target path's filesystem is full: {0}; it is not the pool's filesystem; make room \
         there"
    )]
    TargetFull(String),
    /// A limit of the kernel is reached that has nothing to do with the pool. Evicting content does
    /// not help.
    #[error(
        "{operation}: {source}; raise the limit (sysctl {limit}) or stop what uses it up, then try \
         again"
    )]
    AtLimit {
        /// What was being done.
        operation: &'static str,
        /// The sysctl.
        limit: &'static str,
        /// What failed.
        source: sys::Error,
    },
    /// A volume uses the content that an administrator wants to delete.
    #[error(
        "{name} is in use by {volumes} volume(s); nothing was deleted; end the pods that use it \
         (baggageclaim volumes), then try again"
    )]
    InUse {
        /// What.
        name: Name,
        /// How many volumes.
        volumes: usize,
    },
    /// The seal intent cannot be withdrawn. If the artifact were deleted, the next start would
    /// bring it back.
    #[error(
        "{0} cannot be destroyed: the record of its seal in pending/ cannot be moved; correct the \
         cause (the driver's log has the path), then restart the driver"
    )]
    SealIntentStays(Name),
    /// The disk failed to write back data that the operation was about.
    #[error("the disk failed to write back data")]
    WritebackFailed,
    /// A defect of the engine: the operation ended in a panic, which the log has.
    #[error("a defect of the driver ended this operation; the driver's log shows where")]
    Defect,
    /// No claim of that id.
    #[error("there is no volume {0:?}")]
    NoSuchClaim(String),
    /// A claim that is to be mounted is not in this pool.
    #[error(
        "there is no volume {0:?} in the pool of this node: its PersistentVolume names another \
         node's volume, or its data is lost; `kubectl get volumes.baggageclaim.concourse-ci.org` \
         shows its node and its state"
    )]
    ClaimNotHere(String),
    /// No snapshot, or group of snapshots, of that id.
    #[error("there is no snapshot or group of snapshots {0:?}")]
    NoSuchSnapshot(String),
    /// The last write to the index is in doubt. Until the index can be opened again and the driver
    /// restarts, nothing in the pool is changed. The text is the failure.
    #[error(
        "a write to the pool's index failed: {0}; until the index can be opened again, the driver \
         only unmounts volumes; it restarts by itself when the disk answers"
    )]
    Degraded(String),
    /// A snapshot of a group goes with its group only (CSI specification, "DeleteSnapshot Errors").
    #[error("snapshot {snapshot} is one of group {group}; delete the group instead")]
    OfGroup {
        /// The snapshot.
        snapshot: VolumeId,
        /// The group.
        group: VolumeId,
    },
    /// A claim, snapshot or group of that name was asked for before, and differently.
    #[error("{name:?} exists already, with another {what}")]
    Exists {
        /// The name.
        name: String,
        /// What differs.
        what: &'static str,
    },
    /// A size that is not possible, because of the pool or because of the request's own bounds.
    #[error("{wanted} bytes are not possible: {why}")]
    OutOfRange {
        /// What was asked for.
        wanted: u64,
        /// Why not.
        why: String,
    },
    /// More was asked for than the pool holds.
    #[error("{wanted} bytes were requested, and the pool has {pool}")]
    TooLarge {
        /// What was asked for.
        wanted: u64,
        /// What there is.
        pool: u64,
    },
    /// It is wanted where it cannot be.
    #[error(transparent)]
    Elsewhere(#[from] Elsewhere),
    /// A claim of that name exists, and the request wants it where it cannot be. An existing claim
    /// does not move.
    #[error("{name:?} exists already: {elsewhere}")]
    ExistsElsewhere {
        /// The name.
        name: String,
        /// Where it is wanted, and where it is.
        #[source]
        elsewhere: Elsewhere,
    },
    /// No node of that id.
    #[error("there is no node {:?}", .0.chars().take(128).collect::<String>())]
    NoSuchNode(String),
    /// A claim that must not be in use is.
    #[error("volume {claim} is {how}")]
    ClaimInUse {
        /// Which claim.
        claim: VolumeId,
        /// How it is used, and what to do.
        how: String,
    },
    /// A layer of a claim or snapshot is gone: another program deleted it. The rest of the content
    /// is not used.
    #[error("{of} cannot be used: its layer {layer} is missing; delete it")]
    Lost {
        /// The claim or snapshot.
        of: VolumeId,
        /// What is gone.
        layer: LayerId,
    },
    /// The same, for the content that a volume was to be a fork of.
    #[error(
        "{reference} cannot be forked: the content of its layer {layer} is missing; delete it with \
         `baggageclaim destroy`, then run the step that makes it again"
    )]
    LostContent {
        /// As what it was asked for.
        reference: Reference,
        /// Whose content is gone.
        layer: LayerId,
    },
    /// No artifact of that id.
    #[error(
        "there is no artifact {0}; it may have been replaced or evicted; see `baggageclaim \
         artifacts`"
    )]
    NoSuchArtifact(ArtifactId),
    /// A volume cannot be exported as it is now.
    #[error("volume {volume} cannot be exported: {why}")]
    NotExportable {
        /// Which volume.
        volume: VolumeId,
        /// Why, and what to do.
        why: String,
    },
    /// An archive does not have the requested digest.
    #[error(
        "the archive does not have the requested digest {wanted}; nothing was imported. The \
         archive as received has {packed}; its tar stream has {plain}"
    )]
    OtherDigest {
        /// What was asked for.
        wanted: Sha256,
        /// Of the tar stream.
        plain: Sha256,
        /// Of what was received.
        packed: Sha256,
    },
    /// An import into a resource cache that has content already.
    #[error(
        "{0} has content already, and a resource cache keeps its first content; destroy it before \
         you import another"
    )]
    NameTaken(Name),
    /// The name was cleared in the whole cluster after the content began.
    #[error(
        "{0} was cleared in the cluster after this content was begun, so the content is not used; \
         try again"
    )]
    Cleared(Name),
    /// Content was not packed, or an archive not unpacked.
    #[error("{operation}: {source}")]
    Archive {
        /// What was being done.
        operation: &'static str,
        /// What is wrong, with the archive most often.
        source: archive::Error,
    },
    /// Another process refused: the driver on the node of a claim, or the API server.
    #[error("{message}")]
    Remote {
        /// The gRPC code of the answer.
        code: i32,
        /// What it said.
        message: String,
    },
    /// The engine is shutting down.
    #[error("the driver is shutting down; try again")]
    ShuttingDown,
    /// The pool cannot be opened or used as it is; the message says what to do.
    #[error("pool {}: {problem}", path.display())]
    Pool {
        /// The pool.
        path: PathBuf,
        /// What is wrong with it, and what to do.
        problem: String,
    },
    /// Another process has the pool.
    #[error("pool {}: {problem}", path.display())]
    PoolInUse {
        /// The pool.
        path: PathBuf,
        /// Which process, if that is known.
        problem: String,
    },
    /// The index failed.
    #[error("index: {0}")]
    Index(#[source] store::Error),
    /// A system call failed.
    #[error("{operation}: {source}")]
    System {
        /// What was being done.
        operation: &'static str,
        /// What failed.
        source: sys::Error,
    },
    /// A backend failed in a way that has no answer of its own.
    #[error("{operation}: {source}")]
    Backend {
        /// What was being done.
        operation: &'static str,
        /// What failed.
        source: backend::Error,
    },
}

/// What there is no room for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shortage {
    pub(super) what: String,
    /// How many bytes must be free at once; 0: some blocks, or unknown.
    pub(super) needs: u64,
}

impl From<String> for Shortage {
    fn from(what: String) -> Self {
        Self { what, needs: 0 }
    }
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { what, needs } = self;
        let evicted = if *needs == 0 {
            "are being evicted"
        } else {
            "are evicted if that is enough"
        };
        write!(f, "{what}; unused caches {evicted}; try again")
    }
}

impl From<store::Error> for Error {
    fn from(error: store::Error) -> Self {
        match error {
            // Only the end of the engine closes it, after everything else.
            store::Error::Closed => Self::ShuttingDown,
            error => Self::Index(error),
        }
    }
}

impl Error {
    /// A system call failed while this was being done: which of the errors that have an answer of
    /// their own that is.
    fn of_call(operation: &'static str, source: sys::Error) -> Self {
        if source.is_full() {
            return Self::Full(format!("{operation}: {source}").into());
        }
        match source.limit() {
            Some(limit) => Self::AtLimit {
                operation,
                limit,
                source,
            },
            None => Self::System { operation, source },
        }
    }

    /// Whether a backend stopped because it was told to.
    pub(super) fn is_stopped(&self) -> bool {
        let Self::Backend { source, .. } = self else {
            return false;
        };
        matches!(source, backend::Error::Stopped)
    }

    /// What is wrong with a pool, for the person who starts the driver.
    pub(super) fn of_pool(path: &Path, error: store::Error) -> Self {
        let path = path.to_owned();
        let problem = match error {
            store::Error::Locked { .. } => {
                let problem = error.to_string();
                return Self::PoolInUse { path, problem };
            }
            store::Error::System(source) if source.is(sys::Errno::EROFS) => {
                format!("it is on a read-only filesystem ({source})")
            }
            store::Error::System(source) if source.is_full() => {
                format!("its disk is full, make room by hand ({source})")
            }
            error => error.to_string(),
        };
        Self::Pool { path, problem }
    }

    /// Whether the filesystem has lost a write: in this call, or in an earlier one whose error was
    /// not reported yet.
    pub(super) fn is_lost_write(&self) -> bool {
        matches!(self, Self::System { source, .. } if source.is(sys::Errno::EIO))
    }
}

/// Says what was being done when a system call or a backend failed, and finds the failures that
/// have an answer of their own.
pub(crate) trait Context<T> {
    /// The result with `doing` in its error.
    fn context(self, operation: &'static str) -> Result<T>;
}

impl<T> Context<T> for sys::Result<T> {
    fn context(self, operation: &'static str) -> Result<T> {
        self.map_err(|source| Error::of_call(operation, source))
    }
}

impl<T> Context<T> for archive::Result<T> {
    fn context(self, operation: &'static str) -> Result<T> {
        self.map_err(|error| match error {
            archive::Error::System(source) => Error::of_call(operation, source),
            // It is told to stop when the engine ends.
            archive::Error::Stopped => Error::ShuttingDown,
            source => Error::Archive { operation, source },
        })
    }
}

impl<T> Context<T> for backend::Result<T> {
    fn context(self, operation: &'static str) -> Result<T> {
        self.map_err(|error| match error {
            backend::Error::System(source) => Error::of_call(operation, source),
            backend::Error::Unsupported { what, why } => Error::Unsupported {
                what: what.to_owned(),
                why,
            },
            backend::Error::NoRoom { needs, total, .. } if needs > total.saturating_sub(needs) => {
                Error::CopyTooLarge {
                    operation,
                    needs,
                    pool: total,
                }
            }
            source @ backend::Error::NoRoom { needs, .. } => Error::Full(Shortage {
                what: format!("{operation}: {source}"),
                needs,
            }),
            source @ (backend::Error::Refused { .. } | backend::Error::Stopped) => {
                Error::Backend { operation, source }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_that_is_closed_is_no_defect() {
        let error = Error::from(store::Error::Closed);
        assert!(matches!(error, Error::ShuttingDown), "{error:?}");
    }

    #[test]
    fn a_limit_of_the_kernel_is_not_taken_for_a_full_pool() {
        let failed = |call| sys::Error::new(call, "/pods/1/mount", sys::Errno::ENOSPC);
        let operation = "attach the volume at the target";
        let error = Err::<(), _>(failed("move_mount")).context(operation);
        assert!(
            matches!(&error, Err(Error::AtLimit { limit, .. }) if *limit == "fs.mount-max"),
            "{error:?}"
        );
        let of_backend = backend::Error::System(failed("move_mount"));
        let error = Err::<(), _>(of_backend).context(operation);
        assert!(matches!(error, Err(Error::AtLimit { .. })), "{error:?}");
        let error = Err::<(), _>(failed("mkdirat")).context("make the target");
        assert!(matches!(error, Err(Error::Full(_))), "{error:?}");
    }
}
