//! Configures and creates a filesystem: `fsopen` or `fspick`, `fsconfig`, `fsmount` (Linux 5.2).
//! Callers choose the filesystem and its options.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::mount::{FsMountFlags, FsOpenFlags, FsPickFlags, MountAttrFlags};

use crate::sys::error::{Error, IntoErrno, Result};

/// A filesystem context. The kernel's log of a failure becomes the error's detail.
///
/// Before 6.5 overlay accepts any key and any string, and fails only in [`FsContext::create`]. So a
/// probe must call it. A string has at most 255 bytes (EINVAL).
#[derive(Debug)]
pub struct FsContext {
    fd: OwnedFd,
    filesystem: &'static str,
}

impl FsContext {
    /// `fsopen`: a new instance of a filesystem type.
    pub fn open(filesystem: &'static str) -> Result<Self> {
        let fd = rustix::mount::fsopen(filesystem, FsOpenFlags::FSOPEN_CLOEXEC)
            .map_err(|errno| Error::new("fsopen", filesystem, errno))?;
        Ok(Self { fd, filesystem })
    }

    /// `fspick`: the instance behind a mount (attached or not, `O_PATH` or not), to reconfigure it.
    pub fn pick(mount: BorrowedFd<'_>) -> Result<Self> {
        const WHAT: &str = "a mounted filesystem";
        let flags = FsPickFlags::FSPICK_CLOEXEC | FsPickFlags::FSPICK_EMPTY_PATH;
        let fd = rustix::mount::fspick(mount, "", flags)
            .map_err(|errno| Error::new("fspick", WHAT, errno))?;
        Ok(Self {
            fd,
            filesystem: WHAT,
        })
    }

    /// Sets an option that has no value.
    pub fn flag(&self, key: &str) -> Result<()> {
        rustix::mount::fsconfig_set_flag(&self.fd, key).map_err(|errno| self.error(key, errno))
    }

    /// Sets an option to a string of at most 255 bytes.
    pub fn string(&self, key: &str, value: &str) -> Result<()> {
        rustix::mount::fsconfig_set_string(&self.fd, key, value)
            .map_err(|errno| self.error(key, errno))
    }

    /// Sets an option to an open file.
    pub fn descriptor(&self, key: &str, value: impl AsFd) -> Result<()> {
        rustix::mount::fsconfig_set_fd(&self.fd, key, value).map_err(|errno| self.error(key, errno))
    }

    /// Creates the filesystem instance.
    pub fn create(&self) -> Result<()> {
        rustix::mount::fsconfig_create(&self.fd).map_err(|errno| self.error("create", errno))
    }

    /// Applies the options to the picked instance.
    pub fn reconfigure(&self) -> Result<()> {
        rustix::mount::fsconfig_reconfigure(&self.fd)
            .map_err(|errno| self.error("reconfigure", errno))
    }

    /// `fsmount`: a detached mount of the created instance, in no peer group. The mount lives while
    /// its `O_PATH` descriptor is open.
    pub fn mount(&self, attributes: MountAttrFlags) -> Result<OwnedFd> {
        rustix::mount::fsmount(&self.fd, FsMountFlags::FSMOUNT_CLOEXEC, attributes)
            .map_err(|errno| Error::new("fsmount", self.filesystem, errno).with_detail(self.log()))
    }

    fn error(&self, key: &str, errno: impl IntoErrno) -> Error {
        let subject = format!("{}: {key}", self.filesystem);
        Error::new("fsconfig", subject, errno).with_detail(self.log())
    }

    /// The kernel's messages, oldest first. Each read returns one; ENODATA ends the log.
    fn log(&self) -> String {
        let mut messages = Vec::new();
        let mut buffer = [0; 1024];
        while let Ok(length @ 1..) = rustix::io::read(&self.fd, &mut buffer) {
            let text = String::from_utf8_lossy(&buffer[..length]);
            // The prefix is "e ", "w " or "i ": error, warning, information.
            let text = text.trim_end();
            messages.push(text.get(2..).unwrap_or(text).to_owned());
        }
        messages.join("; ")
    }
}
