//! The unix socket of a server: how it is bound and how it is removed.
//!
//! - A file in its place is removed only if it is a socket that no process serves.
//! - The mode is set on the descriptor before `bind`, which applies it (`unix_bind`, minus the
//!   umask). So the mode is never wider than 0600. No client can connect before `listen`.
//! - At the end the name is removed only if it is still the same inode: a successor may have
//!   replaced it.
//! - The directory may be on a disk that hangs, so each access to it has a thread of its own.

use std::ffi::{OsStr, OsString};
use std::io::ErrorKind;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::Mode;
use tokio::net::{UnixListener, UnixSocket, UnixStream};

use super::{Error, Result};
use crate::sys::{self, Dir, FileKind};

/// The longest path of a socket: `sun_path` has 108 bytes and ends with a NUL.
pub(super) const LONGEST_PATH: usize = 107;

/// How many connections may wait to be accepted. Kubelet opens one per operation, and a node starts
/// its pods together.
const BACKLOG: u32 = 1024;

/// How long to wait for the process that serves an existing socket. After that it counts as
/// running.
const PATIENCE: Duration = Duration::from_secs(1);

/// A socket that listens and has its name.
#[derive(Debug)]
pub struct Socket {
    listener: UnixListener,
    name: SocketName,
}

impl Socket {
    /// Checks that a path is valid for a socket. Returns its directory and its name there.
    pub fn check_path(path: &Path) -> Result<(&Path, &OsStr)> {
        if path.as_os_str().len() > LONGEST_PATH {
            return Err(Error::TooLong {
                path: path.to_owned(),
            });
        }
        match (path.parent(), path.file_name(), path.is_absolute()) {
            (Some(parent), Some(name), true) => Ok((parent, name)),
            _ => Err(Error::NoName {
                path: path.to_owned(),
            }),
        }
    }

    /// Listens at `path`, which must fit a socket's address, since clients use it as it is. Makes
    /// the directory (0755) if only that is missing.
    pub async fn bind(path: &Path) -> Result<Self> {
        let (parent, name) = Self::check_path(path)?;
        let (parent, name) = (parent.to_owned(), name.to_owned());
        apart(path, async move {
            match rustix::fs::mkdir(&parent, Mode::from(0o755)) {
                // If it cannot be used, opening it gives the better error.
                Ok(()) | Err(_) => {}
            }
            Self::bind_now(&parent, &name).await
        })
        .await
    }

    /// Listens at `name` in the directory `parent`, whose path may have any length. Clients use
    /// [`connect`].
    pub async fn bind_in(parent: &Path, name: &OsStr) -> Result<Self> {
        let path = parent.join(name);
        let (parent, name) = (parent.to_owned(), name.to_owned());
        apart(&path, async move { Self::bind_now(&parent, &name).await }).await
    }

    async fn bind_now(parent: &Path, name: &OsStr) -> Result<Self> {
        let path = parent.join(name);
        let directory = |source| {
            let path = path.clone();
            Error::Directory { path, source }
        };
        let io = |operation| {
            let path = path.clone();
            move |source| Error::Io {
                path,
                operation,
                source,
            }
        };
        let dir = Dir::open(parent).map_err(directory)?;
        remove_stale(&dir, name, &path).await?;
        let socket = UnixSocket::new_stream().map_err(io("socket"))?;
        rustix::fs::fchmod(socket.as_fd(), Mode::from(0o600))
            .map_err(|errno| io("fchmod")(errno.into()))?;
        socket.bind(through(&dir, name)).map_err(io("bind"))?;
        let inode = inode_of(&dir, name).map_err(directory)?;
        let name = SocketName {
            path: path.clone(),
            inode,
            held: Some(Entry {
                dir,
                name: name.to_owned(),
            }),
        };
        let listener = socket.listen(BACKLOG).map_err(io("listen"))?;
        Ok(Self { listener, name })
    }

    /// A handle that shows, while the socket is served, whether it still has its name.
    #[must_use]
    pub fn place(&self) -> SocketPlace {
        SocketPlace {
            path: self.name.path.clone(),
            inode: self.name.inode,
        }
    }

    /// Stops listening and removes the name, however long the disk takes.
    pub async fn close(self) {
        self.name.remove().await;
    }

    pub(super) fn into_parts(self) -> (UnixListener, SocketName) {
        (self.listener, self.name)
    }
}

/// Runs work on the directory of a socket on a thread of its own.
async fn apart<T: Send + 'static>(
    path: &Path,
    job: impl Future<Output = Result<T>> + Send + 'static,
) -> Result<T> {
    let done = sys::apart("socket", job).await;
    done.unwrap_or_else(|source| {
        Err(Error::Io {
            path: path.to_owned(),
            operation: "start a thread",
            source,
        })
    })
}

/// The path at which clients find a socket, and its inode.
#[derive(Debug, Clone)]
pub struct SocketPlace {
    path: PathBuf,
    inode: Option<(u64, u64)>,
}

impl SocketPlace {
    /// Whether the path still leads to that socket. Looks it up by name, since the directory may
    /// have been replaced, too.
    pub async fn is_held(&self) -> bool {
        let path = self.path.clone();
        let look = async move { std::fs::symlink_metadata(path).ok() };
        let found = sys::apart("socket", look).await.ok().flatten();
        let found = found.map(|metadata| (metadata.dev(), metadata.ino()));
        found.is_some() && found == self.inode
    }
}

/// Connects to the socket `name` in `dir`, however long the directory's path is.
pub async fn connect(dir: &Dir, name: &OsStr) -> std::io::Result<UnixStream> {
    UnixStream::connect(through(dir, name)).await
}

/// A path of bounded length to a name in a directory, for a socket's address.
fn through(dir: &Dir, name: &OsStr) -> PathBuf {
    Path::new("/proc/self/fd")
        .join(dir.as_fd().as_raw_fd().to_string())
        .join(name)
}

/// Device and inode of the socket with this name; `None` if there is none.
fn inode_of(dir: &Dir, name: &OsStr) -> crate::sys::Result<Option<(u64, u64)>> {
    Ok(dir.stat_if_there(name)?.and_then(|stat| {
        let is_socket = FileKind::of_mode(stat.st_mode) == FileKind::Socket;
        is_socket.then_some((stat.st_dev, stat.st_ino))
    }))
}

async fn remove_stale(dir: &Dir, name: &OsStr, path: &Path) -> Result<()> {
    let directory = |source| Error::Directory {
        path: path.to_owned(),
        source,
    };
    let Some(stat) = dir.stat_if_there(name).map_err(directory)? else {
        return Ok(());
    };
    if FileKind::of_mode(stat.st_mode) != FileKind::Socket {
        return Err(Error::InTheWay {
            path: path.to_owned(),
        });
    }
    match tokio::time::timeout(PATIENCE, connect(dir, name)).await {
        // The process that made it is gone: a socket looks so after `kill -9`.
        Ok(Err(error)) if error.kind() == ErrorKind::ConnectionRefused => {
            dir.remove_file(name).map_err(directory)
        }
        Ok(Err(error)) if error.kind() == ErrorKind::NotFound => Ok(()),
        Ok(Err(source)) => Err(Error::Io {
            path: path.to_owned(),
            operation: "check whether another process serves it",
            source,
        }),
        Ok(Ok(_)) | Err(_) => Err(Error::Taken {
            path: path.to_owned(),
        }),
    }
}

/// The name of a socket in its directory. It is removed in `Drop`, if it is still the same inode.
#[derive(Debug)]
pub(super) struct SocketName {
    path: PathBuf,
    inode: Option<(u64, u64)>,
    /// `None` while it is being removed.
    held: Option<Entry>,
}

#[derive(Debug)]
struct Entry {
    dir: Dir,
    name: OsString,
}

impl SocketName {
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the name, and waits however long the disk takes.
    pub(super) async fn remove(mut self) {
        if let Some(removal) = self.removal()
            && let Err(error) = sys::apart("socket", async { removal() }).await
        {
            tracing::warn!(socket = %self.path.display(), %error,
                "the socket could not be removed");
        }
    }

    /// The work that removes the name; `None` the second time.
    fn removal(&mut self) -> Option<impl FnOnce() + Send + use<>> {
        let Entry { dir, name } = self.held.take()?;
        let (path, inode) = (self.path.clone(), self.inode);
        Some(move || {
            let ours =
                matches!(inode_of(&dir, &name), Ok(found) if found.is_some() && found == inode);
            if ours && let Err(error) = dir.remove_file(&name) {
                tracing::warn!(socket = %path.display(), %error, "the socket could not be removed");
            }
        })
    }
}

impl Drop for SocketName {
    /// Removes the socket on a thread, since the disk may hang. If the process ends first, the
    /// socket stays and the next bind replaces it.
    fn drop(&mut self) {
        let Some(removal) = self.removal() else {
            return;
        };
        let thread = std::thread::Builder::new().name("socket".to_owned());
        if let Err(error) = thread.spawn(removal) {
            tracing::warn!(socket = %self.path.display(), %error,
                "the socket could not be removed");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileTypeExt, PermissionsExt};

    use super::*;

    fn place() -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("x.sock");
        (dir, path)
    }

    #[tokio::test]
    async fn it_is_only_ours_from_the_first_moment_and_gone_at_the_end() {
        let (_dir, path) = place();
        let socket = Socket::bind(&path).await.expect("bind");
        let metadata = std::fs::symlink_metadata(&path).expect("it is there");
        assert!(metadata.file_type().is_socket());
        assert_eq!(metadata.permissions().mode() & 0o7777, 0o600);
        UnixStream::connect(&path).await.expect("it listens");
        socket.close().await;
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
        let (_dir, path) = place();
        drop(std::os::unix::net::UnixListener::bind(&path).expect("bind")); // leaves the file
        let live = Socket::bind(&path).await.expect("the stale one goes");
        let error = Socket::bind(&path).await.expect_err("it is taken");
        assert!(matches!(error, Error::Taken { .. }), "{error}");
        UnixStream::connect(&path)
            .await
            .expect("the first still serves");
        drop(live);
    }

    #[tokio::test]
    async fn what_is_no_socket_is_left_alone() {
        let (dir, path) = place();
        for make in [
            (|path: &Path| std::fs::write(path, "precious").expect("write")) as fn(&Path),
            |path| std::fs::create_dir(path).expect("mkdir"),
            |path| std::os::unix::fs::symlink("elsewhere", path).expect("symlink"),
        ] {
            make(&path);
            let error = Socket::bind(&path).await.expect_err("in the way");
            assert!(matches!(error, Error::InTheWay { .. }), "{error}");
            assert!(path.symlink_metadata().is_ok(), "it must still be there");
            let away = dir.path().join("away");
            std::fs::rename(&path, &away).expect("rename");
            if away.symlink_metadata().expect("there").is_dir() {
                std::fs::remove_dir(&away).expect("rmdir");
            } else {
                std::fs::remove_file(&away).expect("unlink");
            }
        }
    }

    #[tokio::test]
    async fn a_successors_socket_is_not_removed() {
        let (_dir, path) = place();
        let first = Socket::bind(&path).await.expect("bind");
        let (place, _kept) = (
            first.place(),
            std::fs::hard_link(&path, path.with_extension("old")),
        );
        assert!(place.is_held().await);
        std::fs::remove_file(&path).expect("unlink");
        assert!(!place.is_held().await, "nothing is there");
        let second = Socket::bind(&path).await.expect("bind");
        assert!(!place.is_held().await, "another is there");
        assert!(second.place().is_held().await);
        first.close().await;
        assert!(path.exists(), "the second's name went with the first");
        second.close().await;
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn a_path_that_does_not_fit_is_refused_in_words_but_a_directory_may_be_long() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let deep = dir.path().join("d".repeat(120));
        std::fs::create_dir(&deep).expect("mkdir");
        let error = Socket::bind(&deep.join("s")).await.expect_err("too long");
        assert!(
            error.to_string().contains("choose a shorter one"),
            "{error}"
        );

        let name = OsStr::new("admin.sock");
        let socket = Socket::bind_in(&deep, name).await;
        let socket = socket.expect("bind by the directory's descriptor");
        connect(&Dir::open(&deep).expect("open"), name)
            .await
            .expect("connect by the directory's descriptor");
        socket.close().await;
        assert!(!deep.join(name).exists());

        for bad in ["relative.sock", "/"] {
            let error = Socket::bind(Path::new(bad)).await.expect_err(bad);
            assert!(matches!(error, Error::NoName { .. }), "{error}");
        }
    }
}
