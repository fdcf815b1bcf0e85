//! A pool's directories, lock and identity.
//!
//! Creating a pool is idempotent: the next start completes one that a crash interrupted. Read-only
//! tools use a [`PoolView`], which changes nothing.

use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::error::{Error, Result};
use super::records::json;
use crate::model::layout;
use crate::sys::{Dir, Errno, Lock};

/// `pool.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolIdentity {
    /// The version of the pool's on-disk format.
    pub format: u64,
    /// 32 hex digits, chosen when the pool was created.
    pub id: String,
    /// The name of the backend that made its volumes and layers.
    pub backend: String,
}

/// A pool's directories and its exclusive lock.
#[derive(Debug)]
#[expect(missing_docs, reason = "documented in `model::layout`")]
pub struct PoolDirs {
    pub root: Dir,
    pub volumes: Dir,
    pub pending: Dir,
    pub layers: Dir,
    pub incoming: Dir,
    pub trash: Dir,
    _lock: Lock,
}

impl PoolDirs {
    /// Opens and locks the pool at `path`. Creates missing parts, but not the parent directory.
    pub fn open(path: &Path) -> Result<Self> {
        match std::fs::DirBuilder::new().mode(0o700).create(path) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                return Err(crate::sys::Error::new("mkdir", path, error).into());
            }
            _ => {}
        }
        let root = Dir::open(path)?;
        let lock = lock(&root)?;
        if root.stat_self()?.st_mode & 0o077 != 0 {
            // The pool holds tenants' content. Only root may list it.
            root.set_mode(0o700)?;
        }
        for name in [
            layout::VOLUMES,
            layout::PENDING,
            layout::LAYERS,
            layout::INCOMING,
            layout::TRASH,
            layout::EMPTY,
        ] {
            root.ensure_dir(name, 0o700)?;
        }
        let below = |name| root.open_beneath(name);
        Ok(Self {
            volumes: below(layout::VOLUMES)?,
            pending: below(layout::PENDING)?,
            layers: below(layout::LAYERS)?,
            incoming: below(layout::INCOMING)?,
            trash: below(layout::TRASH)?,
            root,
            _lock: lock,
        })
    }

    /// Like [`PoolDirs::open`], for a pool that must exist.
    pub fn open_existing(path: &Path) -> Result<Self> {
        drop(existing(path)?);
        Self::open(path)
    }

    /// Reads `pool.json`; `None` in a new pool.
    pub fn identity(&self) -> Result<Option<PoolIdentity>> {
        PoolIdentity::read(&self.root)
    }

    /// Writes `pool.json` durably. From then on the pool exists.
    pub fn set_identity(&self, identity: &PoolIdentity) -> Result<()> {
        let mut bytes = json(identity);
        bytes.push(b'\n');
        self.root.replace(layout::POOL_JSON, &bytes)?;
        self.root.sync_filesystem()?;
        Ok(())
    }
}

impl PoolIdentity {
    /// The format that this version reads and writes.
    pub const FORMAT: u64 = 1;

    /// Reads the identity of the pool in this directory; `None` if it has none yet.
    pub fn read(root: &Dir) -> Result<Option<Self>> {
        #[derive(Deserialize)]
        struct Version {
            format: u64,
        }
        let path = root.path().join(layout::POOL_JSON);
        let bytes = match root.read(layout::POOL_JSON, 4096) {
            Ok(bytes) => bytes,
            Err(error) if error.is(Errno::ENOENT) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let damaged = |error: serde_json::Error| Error::Damaged {
            path: path.clone(),
            why: error.to_string(),
        };
        let Version { format } = serde_json::from_slice(&bytes).map_err(damaged)?;
        if format != PoolIdentity::FORMAT {
            return Err(Error::Format {
                path,
                found: format,
                known: PoolIdentity::FORMAT,
            });
        }
        serde_json::from_slice(&bytes).map(Some).map_err(damaged)
    }

    /// The name of the backend, also from `pool.json` of another format; `None`: it does not say.
    #[must_use]
    pub fn read_backend(root: &Dir) -> Option<String> {
        #[derive(Deserialize)]
        struct Recorded {
            backend: String,
        }
        let bytes = root.read(layout::POOL_JSON, 4096).ok()?;
        let recorded: Recorded = serde_json::from_slice(&bytes).ok()?;
        Some(recorded.backend)
    }
}

/// A read-only view of a pool. It creates and writes nothing, so the filesystem may be mounted
/// read-only. A missing directory is `None`.
#[derive(Debug)]
#[expect(missing_docs, reason = "documented in `model::layout`")]
pub struct PoolView {
    pub root: Dir,
    pub volumes: Option<Dir>,
    pub pending: Option<Dir>,
    pub layers: Option<Dir>,
    pub trash: Option<Dir>,
    /// Keeps drivers out while the view is open. `None` if there is no lock file, so no driver.
    _lock: Option<Lock>,
}

impl PoolView {
    /// Opens a pool that must exist and that no driver uses.
    pub fn open(path: &Path) -> Result<Self> {
        let root = existing(path)?;
        let lock = match root.try_share_lock(layout::LOCK) {
            Ok(Some(lock)) => Some(lock),
            Ok(None) => return Err(locked(&root)),
            Err(error) if error.is(Errno::ENOENT) => None,
            Err(error) => return Err(error.into()),
        };
        let below = |name| root.open_if_there(name);
        Ok(Self {
            volumes: below(layout::VOLUMES)?,
            pending: below(layout::PENDING)?,
            layers: below(layout::LAYERS)?,
            trash: below(layout::TRASH)?,
            root,
            _lock: lock,
        })
    }
}

/// The root of a pool that must exist.
fn existing(path: &Path) -> Result<Dir> {
    let root = Dir::open(path)?;
    if root.has(layout::POOL_JSON)? {
        return Ok(root);
    }
    Err(Error::Damaged {
        path: path.join(layout::POOL_JSON),
        why: "this is not a pool; a driver creates one when it starts".to_owned(),
    })
}

fn lock(root: &Dir) -> Result<Lock> {
    root.try_lock(layout::LOCK)?.ok_or_else(|| locked(root))
}

/// Names the pool's owner if the kernel reports exactly one process. A pid file would be written
/// after the lock, would not cover read-only views, and means nothing in another pid namespace.
fn locked(root: &Dir) -> Error {
    let holders = root.lock_holders(layout::LOCK).unwrap_or_default();
    let mut holders = holders.iter();
    let holder = match (holders.next(), holders.next()) {
        (Some(pid), None) => format!(" (pid {pid})"),
        // No owner any more, or several views.
        _ => String::new(),
    };
    Error::Locked {
        path: root.path().to_owned(),
        holder,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_is_made_once_and_owned_by_one() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("pool");
        let pool = PoolDirs::open(&path).expect("made");
        assert_eq!(pool.identity().expect("none yet"), None);
        let identity = PoolIdentity {
            format: PoolIdentity::FORMAT,
            id: "0".repeat(32),
            backend: "overlay".to_owned(),
        };
        pool.set_identity(&identity).expect("written");
        let error = PoolDirs::open(&path).expect_err("it is locked").to_string();
        assert!(
            error.contains(&format!("(pid {})", std::process::id())),
            "{error}"
        );
        drop(pool);
        assert_eq!(
            PoolDirs::open(&path)
                .expect("again")
                .identity()
                .expect("read"),
            Some(identity)
        );
    }

    #[test]
    fn who_looks_makes_nothing_and_keeps_drivers_out_but_not_others_who_look() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let error = PoolView::open(folder.path()).expect_err("no pool");
        assert!(error.to_string().contains("this is not a pool"), "{error}");
        std::fs::write(folder.path().join(layout::POOL_JSON), "{}").expect("written");
        let view = PoolView::open(folder.path()).expect("nothing to lock");
        assert!(view.layers.is_none());
        assert_eq!(view.root.entries().expect("names").len(), 1);

        let pool = PoolDirs::open(folder.path()).expect("made");
        let error = PoolView::open(folder.path()).expect_err("a driver has it");
        assert!(matches!(error, Error::Locked { .. }), "{error}");
        drop(pool);
        let view = PoolView::open(folder.path()).expect("no process has it");
        assert!(view.layers.is_some());
        let _another = PoolView::open(folder.path()).expect("both only look");
        let error = PoolDirs::open(folder.path()).expect_err("a view has it");
        assert!(matches!(error, Error::Locked { .. }), "{error}");
    }

    #[test]
    fn who_has_the_pool_is_named_and_not_who_had_it() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        drop(PoolDirs::open(folder.path()).expect("made"));
        let root = Dir::open(folder.path()).expect("it opens");
        root.replace(layout::POOL_JSON, b"{}").expect("written");
        // As an earlier version left it.
        root.replace("lock.pid", b"1").expect("written");
        let us = format!(" (pid {}); ", std::process::id());
        let lock = root.try_lock(layout::LOCK).expect("flock");
        let error = PoolView::open(folder.path()).expect_err("a driver has it");
        assert!(error.to_string().contains(&us), "{error}");
        drop(lock);
        let _view = PoolView::open(folder.path()).expect("no process has it");
        let error = PoolDirs::open(folder.path()).expect_err("a view has it");
        assert!(error.to_string().contains(&us), "{error}");
    }

    #[test]
    fn a_pool_of_a_newer_form_is_not_touched() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let pool = PoolDirs::open(folder.path()).expect("made");
        pool.root
            .write_new(layout::POOL_JSON, br#"{"format":2,"shape":"round"}"#)
            .expect("written");
        let error = pool.identity().expect_err("too new").to_string();
        assert!(
            error.contains("has format 2, this version knows 1"),
            "{error}"
        );
        pool.root
            .replace(layout::POOL_JSON, b"{\"form")
            .expect("written");
        assert!(matches!(pool.identity(), Err(Error::Damaged { .. })));
    }
}
