//! The one table from errors of the engine to gRPC codes.
//!
//! CSI gives the codes their meaning. After CANCELLED, DEADLINE_EXCEEDED, UNAVAILABLE and ABORTED
//! the operation "may still be running". After any other code nothing runs, and nothing was left
//! behind. Invalid requests are refused before the engine sees them. INVALID_ARGUMENT is for the
//! content of an archive, and for the deletion of one snapshot of a group.

use std::error::Error as _;

use tonic::Code;

use crate::archive;
use crate::engine::Error;

/// The code of an engine error. There is no wildcard: a new variant does not compile without a
/// code.
#[must_use]
pub fn code_of(error: &Error) -> Code {
    match error {
        // The unmount of a volume with open files goes on: the kernel has not finished it.
        Error::Busy(_) | Error::HeldOpen(_) | Error::Coming { .. } | Error::Cleared(_) => {
            Code::Aborted
        }
        Error::NoSuchContent(_)
        | Error::NoSuchName(_)
        | Error::NoSuchArtifact(_)
        | Error::NotPublished { .. }
        | Error::NoSuchClaim(_)
        | Error::ClaimNotHere(_)
        | Error::NoSuchSnapshot(_)
        | Error::NoSuchNode(_) => Code::NotFound,
        Error::Different { .. }
        | Error::Exists { .. }
        | Error::ExistsElsewhere { .. }
        | Error::NameTaken(_) => Code::AlreadyExists,
        Error::OutOfRange { .. } => Code::OutOfRange,
        Error::Archive { source, .. } => of_archive(source),
        Error::OfGroup { .. } | Error::OtherDigest { .. } => Code::InvalidArgument,
        // The request is valid, but something has to change first on the node or in the pool.
        Error::PublishedElsewhere { .. }
        | Error::Target { .. }
        | Error::Unsupported { .. }
        | Error::InUse { .. }
        | Error::SealIntentStays(_)
        | Error::NotExportable { .. }
        | Error::ClaimInUse { .. }
        | Error::Lost { .. }
        | Error::LostContent { .. }
        | Error::Pool { .. }
        | Error::PoolInUse { .. } => Code::FailedPrecondition,
        Error::Full(_)
        | Error::CopyTooLarge { .. }
        | Error::TargetFull(_)
        | Error::AtLimit { .. }
        | Error::TooLarge { .. }
        | Error::Elsewhere(_) => Code::ResourceExhausted,
        Error::Remote { code, .. } => Code::from_i32(*code),
        Error::ShuttingDown | Error::Degraded(_) => Code::Unavailable,
        // The next start knows whether it was done.
        Error::Index(error) if error.is_unsure() => Code::Unavailable,
        Error::Defect
        | Error::WritebackFailed
        | Error::Index(_)
        | Error::System { .. }
        | Error::Backend { .. } => Code::Internal,
    }
}

/// Errors of an archive: its content is refused, or one end went away.
fn of_archive(error: &archive::Error) -> Code {
    match error {
        archive::Error::Truncated { .. }
        | archive::Error::Codec(_)
        | archive::Error::Malformed { .. }
        | archive::Error::Refused { .. }
        | archive::Error::Limit { .. } => Code::InvalidArgument,
        // The caller stalled.
        archive::Error::Read(error) | archive::Error::Write(error)
            if error.kind() == std::io::ErrorKind::TimedOut =>
        {
            Code::DeadlineExceeded
        }
        archive::Error::Read(_) | archive::Error::Write(_) | archive::Error::Stopped => {
            Code::Cancelled
        }
        archive::Error::Shrunk { .. } => Code::Aborted,
        archive::Error::Unpackable { .. } => Code::FailedPrecondition,
        archive::Error::Stalled { .. } => Code::DeadlineExceeded,
        archive::Error::System(_)
        | archive::Error::Tree(_)
        | archive::Error::Damaged { .. }
        | archive::Error::Incomplete { .. }
        | archive::Error::Spill(_)
        | archive::Error::Cut => Code::Internal,
    }
}

/// An error with all its causes, without those that the message quotes already.
#[must_use]
pub fn message_of(error: &Error) -> String {
    let mut message = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let text = error.to_string();
        if !message.contains(&text) {
            message.push_str(": ");
            message.push_str(&text);
        }
        cause = error.source();
    }
    message
}

/// The name of a code as in the documents of gRPC.
#[must_use]
pub fn code_name(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "CANCELLED",
        Code::Unknown => "UNKNOWN",
        Code::InvalidArgument => "INVALID_ARGUMENT",
        Code::DeadlineExceeded => "DEADLINE_EXCEEDED",
        Code::NotFound => "NOT_FOUND",
        Code::AlreadyExists => "ALREADY_EXISTS",
        Code::PermissionDenied => "PERMISSION_DENIED",
        Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
        Code::FailedPrecondition => "FAILED_PRECONDITION",
        Code::Aborted => "ABORTED",
        Code::OutOfRange => "OUT_OF_RANGE",
        Code::Unimplemented => "UNIMPLEMENTED",
        Code::Internal => "INTERNAL",
        Code::Unavailable => "UNAVAILABLE",
        Code::DataLoss => "DATA_LOSS",
        Code::Unauthenticated => "UNAUTHENTICATED",
    }
}

/// The code of this name; UNKNOWN for any other text.
#[must_use]
pub fn code_named(name: &str) -> Code {
    let mut codes = (0..=16).map(Code::from_i32);
    let found = codes.find(|code| code_name(*code) == name);
    found.unwrap_or(Code::Unknown)
}

/// Whether the operation may go on after an error with this code (CSI specification, "Error
/// Scheme").
#[must_use]
pub fn may_go_on(code: Code) -> bool {
    matches!(
        code,
        Code::Cancelled | Code::DeadlineExceeded | Code::Unavailable | Code::Aborted
    )
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;
    use std::time::Duration;

    use super::*;
    use crate::model::{ArtifactId, LayerId, Name, Node, NodeId, Requirement, Sha256, Topology};
    use crate::sys::{self, Errno};
    use crate::{backend, store};

    /// Objects that are not where the caller expects them.
    fn misplaced() -> [Error; 3] {
        let topology = |node: &str| Topology([("node".to_owned(), node.to_owned())].into());
        let here = Node {
            id: NodeId::new("node-1").expect("an id"),
            topology: topology("node-1"),
        };
        let wanted = Requirement {
            requisite: vec![topology("node-2")],
            preferred: Vec::new(),
        };
        let elsewhere = wanted.choose([&here.into()]).expect_err("elsewhere");
        [
            Error::Elsewhere(elsewhere.clone()),
            Error::ExistsElsewhere {
                name: "pvc-1".into(),
                elsewhere,
            },
            Error::NoSuchNode("node-9\n".into()),
        ]
    }

    /// The variant's name. Exhaustive, so a new variant is a reminder to add it to `one_of_each`.
    fn variant(error: &Error) -> &'static str {
        match error {
            Error::Busy(_) => "Busy",
            Error::HeldOpen(_) => "HeldOpen",
            Error::Coming { .. } => "Coming",
            Error::NoSuchContent(_) => "NoSuchContent",
            Error::NoSuchName(_) => "NoSuchName",
            Error::NotPublished { .. } => "NotPublished",
            Error::Different { .. } => "Different",
            Error::PublishedElsewhere { .. } => "PublishedElsewhere",
            Error::Target { .. } => "Target",
            Error::Unsupported { .. } => "Unsupported",
            Error::Full(_) => "Full",
            Error::CopyTooLarge { .. } => "CopyTooLarge",
            Error::TargetFull(_) => "TargetFull",
            Error::AtLimit { .. } => "AtLimit",
            Error::InUse { .. } => "InUse",
            Error::SealIntentStays(_) => "SealIntentStays",
            Error::Defect => "Defect",
            Error::WritebackFailed => "WritebackFailed",
            Error::NoSuchClaim(_) => "NoSuchClaim",
            Error::ClaimNotHere(_) => "ClaimNotHere",
            Error::NoSuchSnapshot(_) => "NoSuchSnapshot",
            Error::Degraded(_) => "Degraded",
            Error::OfGroup { .. } => "OfGroup",
            Error::Exists { .. } => "Exists",
            Error::OutOfRange { .. } => "OutOfRange",
            Error::TooLarge { .. } => "TooLarge",
            Error::Elsewhere(_) => "Elsewhere",
            Error::ExistsElsewhere { .. } => "ExistsElsewhere",
            Error::NoSuchNode(_) => "NoSuchNode",
            Error::ClaimInUse { .. } => "ClaimInUse",
            Error::Lost { .. } => "Lost",
            Error::LostContent { .. } => "LostContent",
            Error::NoSuchArtifact(_) => "NoSuchArtifact",
            Error::NotExportable { .. } => "NotExportable",
            Error::OtherDigest { .. } => "OtherDigest",
            Error::NameTaken(_) => "NameTaken",
            Error::Cleared(_) => "Cleared",
            Error::Archive { .. } => "Archive",
            Error::Remote { .. } => "Remote",
            Error::ShuttingDown => "ShuttingDown",
            Error::Pool { .. } => "Pool",
            Error::PoolInUse { .. } => "PoolInUse",
            Error::Index(_) => "Index",
            Error::System { .. } => "System",
            Error::Backend { .. } => "Backend",
        }
    }

    #[expect(clippy::too_many_lines, reason = "it is a list")]
    fn one_of_each() -> Vec<Error> {
        let volume = || "csi-1".parse().expect("an id");
        let name = || Name {
            tenant: "ci".parse().expect("a label"),
            reference: "artifact/src".parse().expect("a reference"),
        };
        let path = || "/pods/1/mount".into();
        let system = || sys::Error::new("mkdirat", "/pool/volumes/csi-1", Errno::EIO);
        vec![
            Error::Busy(volume()),
            Error::HeldOpen(volume()),
            Error::Coming {
                reference: name().reference,
                state: "its pod is still running".into(),
                waited: Duration::from_secs(90),
            },
            Error::NoSuchContent(name()),
            Error::NoSuchName(name()),
            Error::NotPublished {
                volume: "csi-1".into(),
                path: path(),
            },
            Error::Different {
                volume: volume(),
                what: "access mode",
            },
            Error::PublishedElsewhere {
                volume: volume(),
                target: path(),
                why: "its access mode allows",
            },
            Error::Target {
                path: path(),
                problem: "is a file; remove it".into(),
            },
            Error::Unsupported {
                what: "type import".into(),
                why: "this version has no importer".into(),
            },
            Error::Full("mkdirat /pool/volumes/csi-1: ENOSPC".to_owned().into()),
            Error::CopyTooLarge {
                operation: "copy the volume's content",
                needs: 6 << 30,
                pool: 10 << 30,
            },
            Error::TargetFull("mkdirat /pods/1/mount: ENOSPC".into()),
            Error::AtLimit {
                operation: "attach the volume at the target",
                limit: "fs.mount-max",
                source: sys::Error::new("move_mount", "/pods/1/mount", Errno::ENOSPC),
            },
            Error::InUse {
                name: name(),
                volumes: 2,
            },
            Error::Defect,
            Error::WritebackFailed,
            Error::NoSuchClaim("vol-1".into()),
            Error::ClaimNotHere("vol-1".into()),
            Error::NoSuchSnapshot("snap-1".into()),
            Error::Degraded("write to the index: I/O error".into()),
            Error::OfGroup {
                snapshot: "snap-1".parse().expect("an id"),
                group: "group-1".parse().expect("an id"),
            },
            Error::Exists {
                name: "pvc-1".into(),
                what: "source",
            },
            Error::OutOfRange {
                wanted: 5,
                why: "its source has 7".into(),
            },
            Error::TooLarge {
                wanted: 1 << 60,
                pool: 1 << 30,
            },
            Error::ClaimInUse {
                claim: "vol-1".parse().expect("an id"),
                how: "mounted at /pods/1/mount; unmount it first".into(),
            },
            Error::Lost {
                of: "snap-1".parse().expect("an id"),
                layer: LayerId::from_bits(1),
            },
            Error::LostContent {
                reference: "task-cache/k".parse().expect("a reference"),
                layer: LayerId::from_bits(1),
            },
            Error::NoSuchArtifact(ArtifactId::from_bits(1)),
            Error::NotExportable {
                volume: volume(),
                why: "it is not mounted now".into(),
            },
            Error::OtherDigest {
                wanted: Sha256([1; 32]),
                plain: Sha256([2; 32]),
                packed: Sha256([3; 32]),
            },
            Error::NameTaken(name()),
            Error::Cleared(name()),
            Error::SealIntentStays(name()),
            Error::Archive {
                operation: "unpack the archive",
                source: archive::Error::Truncated { at: 512 },
            },
            Error::Archive {
                operation: "unpack the archive",
                source: archive::Error::Read(std::io::ErrorKind::ConnectionReset.into()),
            },
            Error::Remote {
                code: Code::ResourceExhausted.into(),
                message: "node-2: the pool has no room left".into(),
            },
            Error::ShuttingDown,
            Error::Pool {
                path: "/pool".into(),
                problem: "it is on a read-only filesystem".into(),
            },
            Error::PoolInUse {
                path: "/pool".into(),
                problem: "another process owns it; stop that first".into(),
            },
            Error::Index(store::Error::Damaged {
                path: "/pool/index.redb".into(),
                why: "it is torn; run `baggageclaim check --rebuild`".into(),
            }),
            Error::System {
                operation: "make the volume's directory",
                source: system(),
            },
            Error::Backend {
                operation: "seal",
                source: backend::Error::System(system()),
            },
        ]
    }

    #[test]
    fn every_error_has_its_code_and_a_message_that_says_things_once() {
        let mut table = String::new();
        for error in one_of_each().into_iter().chain(misplaced()) {
            let code = code_name(code_of(&error));
            // Writing to a String cannot fail.
            let _ = writeln!(
                table,
                "{} -> {code}: {}",
                variant(&error),
                message_of(&error)
            );
        }
        insta::assert_snapshot!(table);
    }

    /// A caller that took it for final would forget what the next start may find.
    #[test]
    fn what_is_in_doubt_may_go_on() {
        let error = Error::Index(store::Error::Unsure {
            operation: "write to the index",
            source: Box::new(redb::Error::PreviousIo),
            number: 1,
        });
        assert!(may_go_on(code_of(&error)));
    }

    #[test]
    fn a_cause_is_told_once() {
        for error in one_of_each().into_iter().chain(misplaced()) {
            let message = message_of(&error);
            assert!(!message.is_empty());
            assert!(message.matches("EIO").count() <= 1, "{message}");
        }
    }
}
