//! The one table from what the engine says to the code of a gRPC status.
//!
//! CSI gives the codes their meaning: after CANCELLED, DEADLINE_EXCEEDED, UNAVAILABLE and ABORTED "it may still be
//! running", after any other nothing is, and nothing was left behind. INVALID_ARGUMENT is there once: whatever else is
//! wrong with a request is found before the engine sees it.

use std::error::Error as _;

use tonic::Code;

use crate::engine::Error;

/// The code of an error of the engine. No wildcard: a new variant does not compile until somebody has decided.
#[must_use]
pub fn code_of(error: &Error) -> Code {
    match error {
        // Of what is held open the unmount goes on: the kernel has not seen its end.
        Error::Busy(_) | Error::HeldOpen(_) | Error::Coming { .. } => Code::Aborted,
        Error::NoSuchContent(_)
        | Error::NoSuchName(_)
        | Error::NotPublished { .. }
        | Error::NoSuchClaim(_)
        | Error::NoSuchSnapshot(_)
        | Error::NoSuchNode(_) => Code::NotFound,
        Error::Different { .. } | Error::Exists { .. } | Error::ExistsElsewhere { .. } => {
            Code::AlreadyExists
        }
        Error::OutOfRange { .. } => Code::OutOfRange,
        Error::OfGroup { .. } => Code::InvalidArgument,
        // Nothing is wrong with the request as such: something has to be changed first, on the node or in the pool.
        Error::PublishedElsewhere { .. }
        | Error::Target { .. }
        | Error::Unsupported { .. }
        | Error::InUse { .. }
        | Error::ClaimInUse { .. }
        | Error::Lost { .. }
        | Error::LostContent { .. }
        | Error::OnNode { .. }
        | Error::Pool { .. }
        | Error::PoolReadOnly { .. } => Code::FailedPrecondition,
        Error::Full(_)
        | Error::CopyTooLarge { .. }
        | Error::TargetFull(_)
        | Error::AtLimit { .. }
        | Error::TooLarge { .. }
        | Error::Elsewhere(_) => Code::ResourceExhausted,
        Error::ShuttingDown | Error::Degraded(_) => Code::Unavailable,
        Error::Defect
        | Error::Doomed
        | Error::Index(_)
        | Error::System { .. }
        | Error::Backend { .. } => Code::Internal,
    }
}

/// An error with all its causes, each once: a cause that its effect has quoted already is not said again.
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

/// A code as gRPC's documents write it.
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

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;
    use std::time::Duration;

    use super::*;
    use crate::model::{LayerId, Name, Node, NodeId, Requirement, Topology};
    use crate::sys::{self, Errno};
    use crate::{backend, store};

    /// What is not where it is wanted.
    fn misplaced() -> [Error; 4] {
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
            Error::OnNode {
                claim: "vol-1".parse().expect("an id"),
                node: "node-1".into(),
            },
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
            Error::Defect => "Defect",
            Error::Doomed => "Doomed",
            Error::NoSuchClaim(_) => "NoSuchClaim",
            Error::NoSuchSnapshot(_) => "NoSuchSnapshot",
            Error::Degraded(_) => "Degraded",
            Error::OfGroup { .. } => "OfGroup",
            Error::Exists { .. } => "Exists",
            Error::OutOfRange { .. } => "OutOfRange",
            Error::TooLarge { .. } => "TooLarge",
            Error::Elsewhere(_) => "Elsewhere",
            Error::ExistsElsewhere { .. } => "ExistsElsewhere",
            Error::NoSuchNode(_) => "NoSuchNode",
            Error::OnNode { .. } => "OnNode",
            Error::ClaimInUse { .. } => "ClaimInUse",
            Error::Lost { .. } => "Lost",
            Error::LostContent { .. } => "LostContent",
            Error::ShuttingDown => "ShuttingDown",
            Error::Pool { .. } => "Pool",
            Error::PoolReadOnly { .. } => "PoolReadOnly",
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
                doing: "copy the volume's content",
                needs: 6 << 30,
                pool: 10 << 30,
            },
            Error::TargetFull("mkdirat /pods/1/mount: ENOSPC".into()),
            Error::AtLimit {
                doing: "attach the volume at the target",
                limit: "fs.mount-max",
                source: sys::Error::new("move_mount", "/pods/1/mount", Errno::ENOSPC),
            },
            Error::InUse {
                name: name(),
                volumes: 2,
            },
            Error::Defect,
            Error::Doomed,
            Error::NoSuchClaim("vol-1".into()),
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
            Error::ShuttingDown,
            Error::Pool {
                path: "/pool".into(),
                problem: "another process owns it; stop that first".into(),
            },
            Error::PoolReadOnly {
                path: "/pool".into(),
                source: sys::Error::new("openat", "/pool/lock", Errno::EROFS),
            },
            Error::Index(store::Error::Damaged {
                path: "/pool/index.redb".into(),
                why: "it is torn; run `baggageclaim check --rebuild`".into(),
            }),
            Error::System {
                doing: "make the volume's directory",
                source: system(),
            },
            Error::Backend {
                doing: "seal",
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

    #[test]
    fn a_cause_is_told_once() {
        for error in one_of_each().into_iter().chain(misplaced()) {
            let message = message_of(&error);
            assert!(!message.is_empty());
            assert!(message.matches("EIO").count() <= 1, "{message}");
        }
    }
}
