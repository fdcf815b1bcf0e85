//! How an RPC fails: the three places an error can come from, and what they look like on the wire.
//!
//! RPC bodies return [`Failure`], never `Status`: tonic makes a status of any `std::io::Error` by itself (ENOENT becomes
//! NOT_FOUND), so a `?` in the wrong place would answer something that the specification gives another meaning.

use std::future::Future;

use tonic::{Code, Response, Status};

use super::parse::Invalid;
use crate::engine;
use crate::server::{code_of, message_of};

/// Why an RPC has no other answer.
#[derive(Debug)]
pub(super) enum Failure {
    /// The request is wrong.
    Invalid(Invalid),
    /// There is no engine yet.
    Recovering,
    /// There is none while the pool takes no changes; why.
    UnmountsOnly(String),
    /// What the engine says.
    Engine(engine::Error),
    /// An RPC that nothing advertises.
    NotServed(&'static str),
    /// Something of a kind that has no such id.
    NotFound(&'static str, String),
    /// A starting token that is no token of this list.
    BadToken,
    /// A claim is published that is not staged.
    NotStaged,
    /// As many volumes as may be attached are.
    AllAttached(u32),
    /// A node is asked for more than the controller made.
    NotGrown { required: u64, capacity: u64 },
    /// CreateVolume did not begin.
    NotBegun(Box<Failure>),
}

impl Failure {
    /// Of CreateVolume, when nothing was begun and nothing runs: the provisioner takes ABORTED and UNAVAILABLE to mean
    /// that a volume may be coming, and parks the claim on this node until it is.
    pub(super) fn not_begun(self) -> Self {
        Self::NotBegun(Box::new(self))
    }
}

impl From<Invalid> for Failure {
    fn from(invalid: Invalid) -> Self {
        Self::Invalid(invalid)
    }
}

impl From<engine::Error> for Failure {
    fn from(error: engine::Error) -> Self {
        Self::Engine(error)
    }
}

impl From<Failure> for Status {
    fn from(failure: Failure) -> Self {
        let (code, message) = described(failure);
        Status::new(code, message)
    }
}

/// The one table from failures to codes; what the engine says has its own (`server::code_of`).
fn described(failure: Failure) -> (Code, String) {
    match failure {
        Failure::Invalid(invalid) => (Code::InvalidArgument, invalid.to_string()),
        Failure::Recovering => (
            Code::Unavailable,
            "recovering: the pool is being opened; try again".to_owned(),
        ),
        Failure::UnmountsOnly(why) => (
            Code::Unavailable,
            format!("{why}; until it takes changes, volumes can be unmounted and nothing else: repair it, then restart the driver"),
        ),
        Failure::Engine(error) => (code_of(&error), message_of(&error)),
        Failure::NotServed(method) => (
            Code::Unimplemented,
            format!("{method} is not advertised by this driver"),
        ),
        Failure::NotFound(what, id) => (
            Code::NotFound,
            format!("there is no {what} {:?}", cut(&id)),
        ),
        Failure::BadToken => (
            Code::Aborted,
            "starting_token is not one that this list gave; begin again without one".to_owned(),
        ),
        Failure::NotStaged => (
            Code::FailedPrecondition,
            "staging_target_path is missing: a claim's volume is staged (NodeStageVolume) before it is published"
                .to_owned(),
        ),
        Failure::AllAttached(most) => (
            Code::ResourceExhausted,
            format!("{most} volumes are attached to the node, which is as many as it may have; detach one first"),
        ),
        Failure::NotGrown { required, capacity } => (
            Code::OutOfRange,
            format!(
                "the volume has {capacity} bytes and {required} are asked for; ControllerExpandVolume makes it larger, \
                 and comes first"
            ),
        ),
        Failure::NotBegun(failure) => match described(*failure) {
            (Code::Aborted | Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled, message) => (
                Code::FailedPrecondition,
                format!("{message} (nothing was begun)"),
            ),
            other => other,
        },
    }
}

/// A caller's text, not longer than a message should be.
fn cut(text: &str) -> String {
    text.chars().take(128).collect()
}

/// An RPC's body as tonic wants it.
pub(super) async fn answer<T>(
    body: impl Future<Output = Result<T, Failure>>,
) -> Result<Response<T>, Status> {
    body.await.map(Response::new).map_err(Status::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_failure_has_its_code_and_says_what_to_do() {
        let cases = [
            (Failure::Recovering, Code::Unavailable, "try again"),
            (
                Failure::UnmountsOnly("the pool is read-only".to_owned()),
                Code::Unavailable,
                "volumes can be unmounted and nothing else",
            ),
            (
                Failure::Engine(engine::Error::ShuttingDown),
                Code::Unavailable,
                "shutting down",
            ),
            (
                Failure::NotServed("X"),
                Code::Unimplemented,
                "X is not advertised",
            ),
            (
                Failure::NotFound("snapshot", "s".into()),
                Code::NotFound,
                r#"no snapshot "s""#,
            ),
            (Failure::BadToken, Code::Aborted, "begin again"),
            (
                Failure::NotStaged,
                Code::FailedPrecondition,
                "NodeStageVolume",
            ),
            (
                Failure::AllAttached(3),
                Code::ResourceExhausted,
                "3 volumes",
            ),
            (
                Failure::NotGrown {
                    required: 2,
                    capacity: 1,
                },
                Code::OutOfRange,
                "has 1 bytes and 2 are asked for",
            ),
        ];
        for (failure, code, message) in cases {
            let status = Status::from(failure);
            assert_eq!(status.code(), code, "{}", status.message());
            assert!(status.message().contains(message), "{}", status.message());
        }
    }

    #[test]
    fn what_was_not_begun_never_looks_as_if_it_were_running() {
        for failure in [
            Failure::Recovering,
            Failure::Engine(engine::Error::ShuttingDown),
            Failure::BadToken,
        ] {
            let status = Status::from(failure.not_begun());
            assert_eq!(status.code(), Code::FailedPrecondition);
            assert!(status.message().ends_with("(nothing was begun)"));
        }
        let other = Status::from(Failure::AllAttached(1).not_begun());
        assert_eq!(other.code(), Code::ResourceExhausted);
    }
}
