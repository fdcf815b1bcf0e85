//! Why something in the shared tier failed: which object, why, and what to do next.
//! The crate's errors are translated here. No message has a credential or the query of a URL.

use std::fmt::Write as _;

use object_store::client::{HttpError, HttpErrorKind};

use crate::{archive, sys};

/// A failure.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It fails until a person changes something.
    #[error(
        "{object} cannot be used: {cause}; check the URL, the bucket and the permissions of this \
         node"
    )]
    Permanent {
        /// The object, or the whole tier.
        object: String,
        /// The cause.
        cause: String,
    },
    /// The storage does not answer, or answers with an error of its own.
    #[error("{object} cannot be reached: {cause}; the operation can be tried again later")]
    Away {
        /// The object.
        object: String,
        /// The cause.
        cause: String,
    },
    /// A read got nothing for as long as one waits for the next bytes. It holds a thread for so
    /// long, so the callers give up sooner than after other errors.
    #[error(
        "{object} cannot be reached: no answer in time; the operation can be tried again later"
    )]
    Stalled {
        /// The object.
        object: String,
    },
    /// The storage has no space, or its owner no quota.
    #[error(
        "{object} cannot be written, the shared tier is full: {cause}; raise the quota, or make \
         room in the storage; uploads, and the collection of garbage, wait until then"
    )]
    Full {
        /// The object.
        object: String,
        /// The cause.
        cause: String,
    },
    /// The storage asks for fewer requests.
    #[error("the storage asks for fewer requests ({object}: {cause}); try again later")]
    SlowDown {
        /// The object.
        object: String,
        /// The cause.
        cause: String,
    },
    /// Another node changed the object first.
    #[error("{object} was changed by another writer; read it again")]
    Conflict {
        /// The object.
        object: String,
    },
    /// A collector deletes the record at this moment.
    #[error(
        "a collector is deleting {object}; try again later. If the collector was killed, this \
         works after at most 3 hours"
    )]
    Deleting {
        /// The record.
        object: String,
    },
    /// The object is gone.
    #[error("{object} does not exist; resolve the name again")]
    Missing {
        /// The object.
        object: String,
    },
    /// The object is not what it should be.
    #[error(
        "{object} is damaged: {cause}; it is refused, and a node that has the content can upload \
         it again"
    )]
    Corrupt {
        /// The object.
        object: String,
        /// What is wrong with it.
        cause: String,
    },
    /// The object was written by a newer version.
    #[error(
        "{object} has format {found}, and this version reads up to format {known}; upgrade this \
         node"
    )]
    Newer {
        /// The object.
        object: String,
        /// Its format.
        found: u64,
        /// The newest format that this version knows.
        known: u64,
    },
    /// The publication took too long; the objects that it refers to may be collected.
    #[error("{object} was not published in time; publish it again from the beginning")]
    Late {
        /// What was to be published.
        object: String,
    },
    /// A collection took too long to read what there is, so that it could not decide safely. The
    /// next one would, too.
    #[error(
        "reading all that is below {prefix} took more than {minutes} minutes, so nothing of it was \
         collected; shorten the ttl of outputs, or run the collector nearer to the storage"
    )]
    TooSlow {
        /// Where the tenant's objects are.
        prefix: String,
        /// The limit.
        minutes: u64,
    },
    /// Another collector works on this tenant.
    #[error("another collector has the lease {object}; it ends within {minutes} minutes")]
    Leased {
        /// The lease.
        object: String,
        /// When the lease ends at the latest.
        minutes: u64,
    },
    /// The layer on this node cannot be read or made.
    #[error(transparent)]
    Layer(#[from] archive::Error),
    /// A system call on this node failed.
    #[error(transparent)]
    System(#[from] sys::Error),
    /// The caller stopped it.
    #[error("it was stopped before it was complete")]
    Stopped,
}

/// A result of this module.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// Whether the same call may succeed later without a person's help.
    #[must_use]
    pub fn is_temporary(&self) -> bool {
        matches!(
            self,
            Self::Away { .. }
                | Self::Stalled { .. }
                | Self::SlowDown { .. }
                | Self::Full { .. }
                | Self::Conflict { .. }
                | Self::Deleting { .. }
                | Self::Late { .. }
                | Self::Leased { .. }
        )
    }

    /// Whether another source may have the content whole.
    #[must_use]
    pub fn is_of_the_source(&self) -> bool {
        match self {
            Self::Layer(error) => is_of_the_source(error),
            Self::System(_) | Self::Stopped | Self::Leased { .. } => false,
            _ => true,
        }
    }

    #[expect(
        clippy::needless_pass_by_value,
        reason = "a key or an error, owned or borrowed"
    )]
    pub(super) fn corrupt(object: impl ToString, cause: impl ToString) -> Self {
        let (object, cause) = (object.to_string(), cause.to_string());
        Self::Corrupt { object, cause }
    }

    #[expect(
        clippy::needless_pass_by_value,
        reason = "a key or an error, owned or borrowed"
    )]
    pub(super) fn away(object: impl ToString, cause: impl ToString) -> Self {
        let (object, cause) = (object.to_string(), cause.to_string());
        Self::Away { object, cause }
    }

    pub(super) fn stalled(object: impl Into<String>) -> Self {
        let object = object.into();
        Self::Stalled { object }
    }

    /// Translates an error of the crate about `object`.
    pub(super) fn of_store(object: &str, error: &object_store::Error) -> Self {
        use object_store::Error as Store;
        let object = object.to_owned();
        let cause = cause(error);
        match error {
            Store::NotFound { .. } if is_bucket_missing(&cause) => {
                let cause = "the bucket does not exist".to_owned();
                Self::Permanent { object, cause }
            }
            Store::NotFound { .. } if is_of_another(error) => {
                let cause = "status 404 from a server that is not the storage".to_owned();
                Self::Away { object, cause }
            }
            Store::NotFound { .. } => Self::Missing { object },
            _ if is_beyond_end(&cause, error) => {
                Self::corrupt(object, "it is shorter than it should be")
            }
            _ if is_full(&cause, error) => Self::Full { object, cause },
            Store::AlreadyExists { .. }
            | Store::Precondition { .. }
            | Store::NotModified { .. } => Self::Conflict { object },
            Store::PermissionDenied { .. } => denied(object, &cause),
            Store::Unauthenticated { .. } => {
                let cause = format!("the credentials are not valid ({cause})");
                Self::Permanent { object, cause }
            }
            Store::Generic { .. } => of_generic(object, cause, error),
            Store::JoinError { .. } => Self::Away { object, cause },
            _ => Self::Permanent { object, cause },
        }
    }
}

/// The first code is that of S3 and of Google Cloud, the second that of Azure.
fn is_bucket_missing(cause: &str) -> bool {
    let codes = ["NoSuchBucket", "ContainerNotFound"];
    codes.iter().any(|code| cause.contains(code))
}

/// Whether the response is not the storage's, such as the 404 of a proxy that has no route at the
/// moment: it has a body, and no code of a storage in it. A response to HEAD has no body.
fn is_of_another(error: &object_store::Error) -> bool {
    let whole = error.to_string();
    let body = response(&whole).map_or("", |(_, body)| body.trim());
    !body.is_empty() && code(body).is_none()
}

/// A range that begins at or after the end of an object. For a file, the crate says so in words.
fn is_beyond_end(cause: &str, error: &object_store::Error) -> bool {
    status(cause) == Some(416)
        || chain(error).any(|error| error.to_string().contains("but object was only"))
}

/// A full storage answers 507 (RFC 4918), or another status with its own code. A file system fails
/// with ENOSPC or EDQUOT.
fn is_full(cause: &str, error: &object_store::Error) -> bool {
    use std::io::ErrorKind as Kind;
    let code = ["QuotaExceeded", "StorageFull"];
    let kind = io_cause(error).map(std::io::Error::kind);
    status(cause) == Some(507)
        || (status(cause).is_some() && code.iter().any(|code| cause.contains(code)))
        || matches!(kind, Some(Kind::StorageFull | Kind::QuotaExceeded))
}

fn of_generic(object: String, cause: String, error: &object_store::Error) -> Error {
    let status = status(&cause);
    match status {
        Some(429 | 503) => Error::SlowDown { object, cause },
        // It has no conditional writes, for one.
        Some(501) => Error::Permanent { object, cause },
        Some(408 | 500..) => Error::Away { object, cause },
        Some(_) => Error::Permanent { object, cause },
        None if has_http_cause(error) || io_cause(error).is_some_and(is_passing) => {
            Error::Away { object, cause }
        }
        None => match io_cause(error) {
            Some(_) => Error::Permanent { object, cause },
            // A configuration, a credential chain that found nothing, an answer that makes no
            // sense.
            None if ["redential", "onfig", "token file"]
                .iter()
                .any(|it| cause.contains(it)) =>
            {
                Error::Permanent { object, cause }
            }
            None if is_deletion_denied(error) => denied(object, &cause),
            None => Error::Away { object, cause },
        },
    }
}

fn denied(object: String, cause: &str) -> Error {
    let cause = format!("access is denied ({cause})");
    Error::Permanent { object, cause }
}

/// S3 and Azure delete with a request for many objects. They answer that with success, and with a
/// code for each object, which the crate's message ends with.
fn is_deletion_denied(error: &object_store::Error) -> bool {
    let text = error.to_string();
    let codes = ["(code: AccessDenied)", "(code: 403)"];
    codes.iter().any(|code| text.ends_with(code))
}

fn chain<'a>(
    error: &'a (dyn std::error::Error + 'static),
) -> impl Iterator<Item = &'a (dyn std::error::Error + 'static)> {
    std::iter::successors(Some(error), |error| error.source())
}

fn io_cause(error: &object_store::Error) -> Option<&std::io::Error> {
    chain(error).find_map(|error| error.downcast_ref())
}

fn is_passing(error: &std::io::Error) -> bool {
    use std::io::ErrorKind as Kind;
    !matches!(
        error.kind(),
        Kind::PermissionDenied | Kind::ReadOnlyFilesystem | Kind::NotADirectory | Kind::NotFound
    )
}

fn has_http_cause(error: &object_store::Error) -> bool {
    chain(error).any(<dyn std::error::Error>::is::<HttpError>)
}

/// The status of a response that the crate wrote into its message.
fn status(cause: &str) -> Option<u16> {
    let digits = cause.strip_prefix("status ")?.get(..3)?;
    digits.parse().ok()
}

/// The cause as a message may show it: a status with the storage's own code, or what failed on the
/// way. The crate's messages hold the URL and the whole response, where a store may repeat what was
/// signed.
fn cause(error: &object_store::Error) -> String {
    let whole = error.to_string();
    if let Some((status, body)) = response(&whole) {
        return said(status, body);
    }
    if let Some(error) = io_cause(error) {
        return error.to_string();
    }
    let http = chain(error).find_map(|error| error.downcast_ref::<HttpError>());
    match http.map(HttpError::kind) {
        Some(HttpErrorKind::Connect) => "no connection".to_owned(),
        Some(HttpErrorKind::Timeout) => "no answer in time".to_owned(),
        Some(HttpErrorKind::Interrupted) => "the connection was cut".to_owned(),
        Some(_) => "the request failed on its way".to_owned(),
        None => without_urls(&whole),
    }
}

/// The status and the body of a response that the crate wrote into its message.
fn response(whole: &str) -> Option<(&str, &str)> {
    let marks = ["status code: ", "error response: "];
    let (_, rest) = marks.iter().find_map(|mark| whole.split_once(mark))?;
    Some(rest.split_once(": ").unwrap_or((rest, "")))
}

/// The storage's own code in the body of a response.
fn code(body: &str) -> Option<&str> {
    let (_, rest) = body.split_once("<Code>")?;
    rest.split_once("</Code>").map(|(code, _)| code)
}

/// `403 Forbidden` and `<Error><Code>AccessDenied</Code>…` as `status 403 Forbidden, AccessDenied`.
fn said(status: &str, body: &str) -> String {
    let line: String = status
        .chars()
        .take(60)
        .filter(|c| !c.is_control())
        .collect();
    let mut text = format!("status {line}");
    if let Some(code) = code(body).filter(|code| code.len() < 80) {
        // Writing to a String cannot fail.
        let _ = write!(text, ", {}", sys::printable(code));
    }
    text
}

/// The text without what looks like a URL, since a query may hold a signature.
fn without_urls(text: &str) -> String {
    let words = text
        .split_whitespace()
        .map(|word| if word.contains("://") { "(URL)" } else { word });
    let text: Vec<&str> = words.collect();
    let text: String = text.join(" ").chars().take(300).collect();
    sys::printable(&text)
}

/// Whether an error of a layer is about what was received, and not about this node.
pub(super) fn is_of_the_source(error: &archive::Error) -> bool {
    use archive::Error as Layer;
    !matches!(
        error,
        Layer::System(_)
            | Layer::Tree(_)
            | Layer::Spill(_)
            | Layer::Stopped
            | Layer::Write(_)
            | Layer::Unpackable { .. }
            | Layer::Shrunk { .. }
            | Layer::Damaged { .. }
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn generic(text: &str) -> object_store::Error {
        object_store::Error::Generic {
            store: "S3",
            source: text.to_owned().into(),
        }
    }

    #[test]
    fn the_crates_errors_have_the_right_kind_and_tell_no_secret() {
        let secret = "Error performing GET https://b/x?X-Amz-Signature=hunter2 in 3ms - Server returned \
                      non-2xx status code: 503 Service Unavailable: <Error><Code>SlowDown</Code>\
                      <StringToSign>hunter2</StringToSign></Error>";
        let error = Error::of_store("names/x", &generic(secret));
        assert!(matches!(error, Error::SlowDown { .. }), "{error:?}");
        let text = error.to_string();
        assert!(text.contains("names/x") && text.contains("503") && text.contains("SlowDown"));
        assert!(
            !format!("{error:?}{error}").contains("hunter2"),
            "{error:?}"
        );

        let error = Error::of_store("x", &generic("at https://b/x?sig=hunter2 all went wrong"));
        assert!(matches!(error, Error::Away { .. }), "{error:?}");
        assert!(
            !format!("{error:?}{error}").contains("hunter2"),
            "{error:?}"
        );

        let body = "Server returned non-2xx status code: 400 Bad Request: <Code>AuthorizationHeaderMalformed</Code>";
        let error = Error::of_store("x", &generic(body));
        assert!(matches!(error, Error::Permanent { .. }), "{error:?}");
        let body = "Server returned non-2xx status code: 500 Internal Server Error: ";
        let error = Error::of_store("x", &generic(body));
        assert!(matches!(error, Error::Away { .. }), "{error:?}");

        let deletion = |code| {
            // So long that a message does not show the code.
            let key = "k".repeat(400);
            generic(&format!(
                "DeleteObjects request failed for key {key}: why (code: {code})"
            ))
        };
        for code in ["AccessDenied", "403"] {
            let error = Error::of_store("x", &deletion(code));
            assert!(matches!(error, Error::Permanent { .. }), "{error:?}");
        }
        let error = Error::of_store("x", &deletion("InternalError"));
        assert!(matches!(error, Error::Away { .. }), "{error:?}");

        let denied = object_store::Error::PermissionDenied {
            path: "x".into(),
            source:
                "Server returned non-2xx status code: 403 Forbidden: <Code>QuotaExceeded</Code>"
                    .into(),
        };
        let file = |errno| object_store::Error::Generic {
            store: "LocalFileSystem",
            source: Box::new(std::io::Error::from(errno)),
        };
        for error in [
            generic("Server returned non-2xx status code: 507 Insufficient Storage: "),
            generic(
                "Server returned non-2xx status code: 400 Bad Request: \
                 <Code>XMinioAdminBucketQuotaExceeded</Code>",
            ),
            denied,
            file(rustix::io::Errno::DQUOT),
            file(rustix::io::Errno::NOSPC),
        ] {
            let error = Error::of_store("x", &error);
            assert!(matches!(error, Error::Full { .. }), "{error:?}");
        }

        let missing = |text: &str| object_store::Error::NotFound {
            path: "x".into(),
            source: text.to_owned().into(),
        };
        for code in ["NoSuchBucket", "ContainerNotFound"] {
            let body =
                format!("Server returned non-2xx status code: 404 Not Found: <Code>{code}</Code>");
            let error = Error::of_store("x", &missing(&body));
            assert!(matches!(error, Error::Permanent { .. }), "{error:?}");
        }
        let body = "Server returned non-2xx status code: 404 Not Found: <Code>NoSuchKey</Code>";
        let error = Error::of_store("x", &missing(body));
        assert!(matches!(error, Error::Missing { .. }), "{error:?}");
    }
}
