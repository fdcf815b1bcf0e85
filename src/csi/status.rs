//! The failures of an RPC, and the gRPC code and message of each.
//!
//! RPC bodies return [`Failure`], never `Status`: tonic converts any `std::io::Error` to a status
//! (ENOENT becomes NOT_FOUND). So a `?` in the wrong place would answer a code with another meaning
//! in CSI.

use std::future::Future;

use tonic::{Code, Response, Status};

use super::parse::Invalid;
use crate::engine;
use crate::server::{code_of, message_of};

/// Why an RPC failed.
#[derive(Debug)]
pub(super) enum Failure {
    /// The request is wrong.
    Invalid(Invalid),
    /// The pool is still being opened.
    Recovering,
    /// The objects of the cluster are still being listed.
    Listing,
    /// The pool cannot be opened, for this reason; volumes can only be unmounted.
    UnmountsOnly(String),
    /// An error of the engine.
    Engine(engine::Error),
    /// An RPC that the driver does not advertise.
    NotServed(&'static str),
    /// No object of a kind has this id.
    NotFound(&'static str, String),
    /// The starting token is not from this list.
    BadToken,
    /// The persistent volume is not staged.
    NotStaged,
    /// The node has its maximum of attached volumes.
    AllAttached(u32),
    /// NodeExpandVolume asks for more bytes than the volume has.
    NotGrown { required: u64, capacity: u64 },
    /// CreateVolume failed before it began anything.
    NotBegun(Box<Failure>),
}

impl Failure {
    /// For CreateVolume, when nothing was begun and nothing runs. After ABORTED and UNAVAILABLE the
    /// provisioner assumes that a volume may be coming, and keeps the claim on this node.
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

/// The one table from failures to codes. Errors of the engine have their own (`server::code_of`).
fn described(failure: Failure) -> (Code, String) {
    match failure {
        Failure::Invalid(invalid) => (Code::InvalidArgument, invalid.to_string()),
        Failure::Recovering => (
            Code::Unavailable,
            "recovering: the pool is being opened; try again".to_owned(),
        ),
        Failure::Listing => (
            Code::Unavailable,
            "starting: the API server has not listed the volumes yet; try again".to_owned(),
        ),
        Failure::UnmountsOnly(why) => (
            Code::Unavailable,
            format!(
                "{why}; volumes can only be unmounted until the driver, which tries again by \
                 itself, can open the pool"
            ),
        ),
        Failure::Engine(error) => (code_of(&error), message_of(&error)),
        Failure::NotServed(method) => (
            Code::Unimplemented,
            format!("{method} is not advertised by this driver"),
        ),
        Failure::NotFound(what, id) => {
            (Code::NotFound, format!("there is no {what} {:?}", cut(&id)))
        }
        Failure::BadToken => (
            Code::Aborted,
            "starting_token is not from this list; list again without a token".to_owned(),
        ),
        Failure::NotStaged => (
            Code::FailedPrecondition,
            "staging_target_path is missing; call NodeStageVolume before NodePublishVolume"
                .to_owned(),
        ),
        Failure::AllAttached(most) => (
            Code::ResourceExhausted,
            format!("{most} volumes are attached to the node, its maximum; detach one first"),
        ),
        Failure::NotGrown { required, capacity } => (
            Code::OutOfRange,
            format!(
                "the volume has {capacity} bytes, and the request needs {required}; call \
                 ControllerExpandVolume first"
            ),
        ),
        Failure::NotBegun(failure) => match described(*failure) {
            (
                Code::Aborted | Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled,
                message,
            ) => (
                Code::FailedPrecondition,
                format!("{message} (nothing was begun)"),
            ),
            other => other,
        },
    }
}

/// A caller's text, cut to a length that fits a message.
fn cut(text: &str) -> String {
    text.chars().take(128).collect()
}

/// Refuses a method that is not advertised.
pub(super) fn advertised(is_on: bool, method: &'static str) -> Result<(), Failure> {
    is_on.then_some(()).ok_or(Failure::NotServed(method))
}

/// Converts the result of an RPC body to what tonic expects.
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
            (Failure::Listing, Code::Unavailable, "try again"),
            (
                Failure::UnmountsOnly("the pool is read-only".to_owned()),
                Code::Unavailable,
                "volumes can only be unmounted",
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
            (Failure::BadToken, Code::Aborted, "list again"),
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
                "has 1 bytes, and the request needs 2",
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
