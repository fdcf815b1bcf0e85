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
    /// There is no engine, and there will be none.
    CannotServe(String),
    /// What the engine says.
    Engine(engine::Error),
    /// An RPC that nothing advertises.
    NotServed(&'static str),
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
        let (code, message) = match failure {
            Failure::Invalid(invalid) => (Code::InvalidArgument, invalid.to_string()),
            Failure::Recovering => (
                Code::Unavailable,
                "recovering: the pool is being opened; try again".to_owned(),
            ),
            Failure::CannotServe(why) => (Code::FailedPrecondition, why),
            Failure::Engine(error) => (code_of(&error), message_of(&error)),
            Failure::NotServed(method) => (
                Code::Unimplemented,
                format!("{method} is not advertised by this driver"),
            ),
        };
        Status::new(code, message)
    }
}

/// An RPC's body as tonic wants it.
pub(super) async fn answer<T>(
    body: impl Future<Output = Result<T, Failure>>,
) -> Result<Response<T>, Status> {
    body.await.map(Response::new).map_err(Status::from)
}
