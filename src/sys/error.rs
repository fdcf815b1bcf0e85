//! What a failed system call is reported as: which call, on what, and the errno.
//!
//! Decisions are made on the errno ([`Error::is`]); the rest is for the person who reads the message.

use std::fmt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;

/// The result of a system call.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A failed system call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    call: &'static str,
    subject: PathBuf,
    errno: Errno,
    detail: Option<String>,
}

impl Error {
    /// A failure of `call` on `subject` (a path, for the message only).
    pub fn new(call: &'static str, subject: impl Into<PathBuf>, errno: impl IntoErrno) -> Self {
        Self {
            call,
            subject: subject.into(),
            errno: errno.into_errno(),
            detail: None,
        }
    }

    /// The same failure with what the kernel said about it in words.
    #[must_use]
    pub fn with_detail(mut self, detail: impl Into<String>) -> Self {
        let detail = detail.into();
        self.detail = (!detail.is_empty()).then_some(detail);
        self
    }

    /// The errno.
    #[must_use]
    pub fn errno(&self) -> Errno {
        self.errno
    }

    /// Whether the errno is `errno`.
    #[must_use]
    pub fn is(&self, errno: Errno) -> bool {
        self.errno == errno
    }

    /// Whether the filesystem has no room left: ENOSPC or EDQUOT.
    #[must_use]
    pub fn is_full(&self) -> bool {
        matches!(self.errno, Errno::ENOSPC | Errno::EDQUOT)
    }

    /// What the call was applied to.
    #[must_use]
    pub fn subject(&self) -> &Path {
        &self.subject
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // nix prints "ENOENT: No such file or directory".
        write!(
            f,
            "{} {}: {}",
            self.call,
            self.subject.display(),
            self.errno
        )?;
        match &self.detail {
            Some(detail) => write!(f, " ({detail})"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Error {}

/// The errno types of the libraries that make the calls.
pub trait IntoErrno {
    /// The errno, as nix names it.
    fn into_errno(self) -> Errno;
}

impl IntoErrno for Errno {
    fn into_errno(self) -> Errno {
        self
    }
}

impl IntoErrno for rustix::io::Errno {
    fn into_errno(self) -> Errno {
        Errno::from_raw(self.raw_os_error())
    }
}

impl IntoErrno for std::io::Error {
    fn into_errno(self) -> Errno {
        self.raw_os_error().map_or(Errno::EIO, Errno::from_raw)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_names_call_subject_and_errno() {
        let error = Error::new("mkdirat", "/pool/volumes/a", Errno::ENOSPC);
        assert_eq!(
            error.to_string(),
            "mkdirat /pool/volumes/a: ENOSPC: No space left on device"
        );
        let error = error.with_detail("overlay: no workdir");
        assert!(error.to_string().ends_with("(overlay: no workdir)"));
        assert!(error.is_full() && error.is(Errno::ENOSPC));
    }
}
