//! The error of a system call: the call, its object, and the errno.
//!
//! Code decides by the errno ([`Error::is`]); the rest is for the reader of the message.

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
    /// A failure of `call` on `subject` (a path, only for the message).
    pub fn new(call: &'static str, subject: impl Into<PathBuf>, errno: impl IntoErrno) -> Self {
        Self {
            call,
            subject: subject.into(),
            errno: errno.into_errno(),
            detail: None,
        }
    }

    /// Adds the kernel's own explanation.
    #[must_use]
    pub fn with_detail(mut self, detail: impl Into<String>) -> Self {
        let detail = detail.into();
        self.detail = (!detail.is_empty()).then_some(detail);
        self
    }

    /// Sets the path for a call that was made without one.
    #[must_use]
    pub fn of(mut self, path: &Path) -> Self {
        let subject = self.subject.as_mut_os_string();
        subject.push(" of ");
        subject.push(path);
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

    /// Whether the filesystem is full: ENOSPC or EDQUOT, from a call that means the disk by it.
    #[must_use]
    pub fn is_full(&self) -> bool {
        matches!(self.errno, Errno::ENOSPC | Errno::EDQUOT) && self.limit().is_none()
    }

    /// Whether the call sets an extended attribute. ENOSPC then may be about the file's inode, and
    /// not about the disk.
    #[must_use]
    pub fn sets_attribute(&self) -> bool {
        self.call == "setxattr"
    }

    /// Whether a name could not be opened as a directory because it is none, or is a mount point.
    #[must_use]
    pub fn is_no_directory(&self) -> bool {
        matches!(self.errno, Errno::ENOTDIR | Errno::ELOOP | Errno::EXDEV)
    }

    /// Whether this process ran out of descriptors or memory. The call may succeed later.
    #[must_use]
    pub fn is_of_this_process(&self) -> bool {
        matches!(self.errno, Errno::ENOMEM | Errno::EMFILE | Errno::ENFILE)
    }

    /// The sysctl whose limit was reached, if ENOSPC does not mean a full disk.
    ///
    /// These calls only attach mounts or add watches and write no data. mount(2) is not listed: it
    /// creates a filesystem, which may write. It counts mounts only at the end, inside a
    /// [`PrivateMountNs`](super::PrivateMountNs), which has few.
    #[must_use]
    pub fn limit(&self) -> Option<&'static str> {
        if self.errno != Errno::ENOSPC {
            return None;
        }
        match self.call {
            "move_mount" => Some("fs.mount-max"),
            "unshare" => Some("user.max_mnt_namespaces"),
            "clone" => Some("user.max_user_namespaces"),
            "inotify_add_watch" => Some("fs.inotify.max_user_watches"),
            _ => None,
        }
    }

    /// The object of the call.
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
            printable(self.subject.display()),
            self.errno
        )?;
        if let Some(limit) = self.limit() {
            write!(
                f,
                " (not a full disk: this node's limit {limit} is reached)"
            )?;
        }
        match &self.detail {
            Some(detail) => write!(f, " ({})", printable(detail)),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Error {}

/// The most characters of a name or path in a message.
const LONGEST_SHOWN: usize = 1024;

/// Text that is safe in a terminal, message or log. File names come from tenants and may hold any
/// byte but NUL. So invisible and bidirectional characters are escaped; long text is cut.
#[must_use]
pub fn printable(text: impl fmt::Display) -> String {
    let text = text.to_string();
    let mut shown = String::with_capacity(text.len());
    for (at, c) in text.chars().enumerate() {
        if at == LONGEST_SHOWN {
            shown.push('…');
            break;
        }
        push_printable(&mut shown, c);
    }
    shown
}

/// The same of a whole message, which may have several lines. It is not cut.
#[must_use]
pub fn printable_lines(text: impl fmt::Display) -> String {
    let text = text.to_string();
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        if c == '\n' {
            shown.push(c);
        } else {
            push_printable(&mut shown, c);
        }
    }
    shown
}

fn push_printable(shown: &mut String, c: char) {
    if matches!(c, '"' | '\'' | '\\') {
        shown.push(c);
    } else {
        shown.extend(c.escape_debug());
    }
}

/// The errno types of the libraries in use.
pub trait IntoErrno {
    /// The errno as nix's type.
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

    #[test]
    fn a_limit_of_the_kernel_is_no_full_disk() {
        for (call, limit) in [
            ("move_mount", "fs.mount-max"),
            ("unshare", "user.max_mnt_namespaces"),
            ("clone", "user.max_user_namespaces"),
            ("inotify_add_watch", "fs.inotify.max_user_watches"),
        ] {
            let error = Error::new(call, "/pods/1", Errno::ENOSPC);
            assert_eq!(error.limit(), Some(limit));
            assert!(!error.is_full() && error.is(Errno::ENOSPC));
            assert_eq!(
                error.to_string(),
                format!(
                    "{call} /pods/1: ENOSPC: No space left on device (not a full disk: this node's limit {limit} is reached)"
                )
            );
            let other = Error::new(call, "/pods/1", Errno::EDQUOT);
            assert_eq!(other.limit(), None);
        }
        for call in ["mkdirat", "mount", "fsconfig", "fsmount"] {
            let error = Error::new(call, "/pool", Errno::ENOSPC);
            assert!(error.is_full() && error.limit().is_none(), "{call}");
        }
    }

    #[test]
    fn a_tenants_names_neither_end_a_line_nor_steer_a_terminal_nor_fill_a_log() {
        assert_eq!(printable("go-1.24/π \"x\" \\"), "go-1.24/π \"x\" \\");
        assert_eq!(printable("a\u{202e}b\u{1b}"), "a\\u{202e}b\\u{1b}");
        assert_eq!(printable("a\nb"), "a\\nb");
        assert_eq!(printable_lines("a\u{202e}\nb\r"), "a\\u{202e}\nb\\r");
        let named = Error::new("openat", "x\nERROR all is lost", Errno::EIO).to_string();
        assert!(
            named.starts_with(r"openat x\nERROR all is lost: EIO"),
            "{named}"
        );
        let long = printable("ä".repeat(5000));
        assert_eq!(long.chars().count(), LONGEST_SHOWN + 1);
        assert!(long.ends_with('…'));
    }
}
