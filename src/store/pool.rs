//! A pool's directories by their descriptors, its lock, and its identity.
//!
//! Making a pool is repeatable: a crash in the middle leaves something that the next start completes. Who only looks at one
//! has a [`PoolView`] and changes nothing.

use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::error::{Error, Result};
use crate::model::layout;
use crate::sys::{Dir, Errno, Lock};

/// `pool.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolIdentity {
    /// The version of the pool's form.
    pub format: u64,
    /// 32 hex digits, chosen when the pool was made.
    pub id: String,
    /// The backend whose volumes and layers it holds, by name.
    pub backend: String,
}

/// The directories of a pool, and the lock that makes it ours.
#[derive(Debug)]
#[expect(missing_docs, reason = "`model::layout` has the words")]
pub struct PoolDirs {
    pub root: Dir,
    pub volumes: Dir,
    pub pending: Dir,
    pub layers: Dir,
    pub incoming: Dir,
    pub spares: Dir,
    pub trash: Dir,
    _lock: Lock,
}

impl PoolDirs {
    /// Opens the pool at `path`, making what is missing of it but not the directory above, and locks it.
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
            // Tenants' content lies below; nobody but root may even look for names.
            root.set_mode(0o700)?;
        }
        for name in [
            layout::VOLUMES,
            layout::PENDING,
            layout::LAYERS,
            layout::INCOMING,
            layout::SPARES,
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
            spares: below(layout::SPARES)?,
            trash: below(layout::TRASH)?,
            root,
            _lock: lock,
        })
    }

    /// The same for a pool that must exist.
    pub fn open_existing(path: &Path) -> Result<Self> {
        drop(existing(path)?);
        Self::open(path)
    }

    /// Reads `pool.json`; `None` in a pool that is new.
    pub fn identity(&self) -> Result<Option<PoolIdentity>> {
        PoolIdentity::read(&self.root)
    }

    /// Writes `pool.json`, durably: from here on the pool exists.
    pub fn set_identity(&self, identity: &PoolIdentity) -> Result<()> {
        let mut bytes = serde_json::to_vec(identity).expect("plain data serialises");
        bytes.push(b'\n');
        self.root.replace(layout::POOL_JSON, &bytes)?;
        self.root.sync_filesystem()?;
        Ok(())
    }
}

impl PoolIdentity {
    /// The form that this version reads and writes.
    pub const FORMAT: u64 = 1;

    /// Reads that of the pool in this directory; `None`: there is none yet.
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
}

/// A pool as it is found: nothing is made and nothing is written, so that its filesystem may be mounted read-only. `None` is
/// a directory that is not there.
#[derive(Debug)]
#[expect(missing_docs, reason = "`model::layout` has the words")]
pub struct PoolView {
    pub root: Dir,
    pub volumes: Option<Dir>,
    pub pending: Option<Dir>,
    pub layers: Option<Dir>,
    pub trash: Option<Dir>,
    /// No driver gets the pool while somebody looks at it. `None`: there is nothing to lock, so nobody has it.
    _lock: Option<Lock>,
}

impl PoolView {
    /// Opens a pool that must exist, and that no driver has.
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
        why: "this is no pool; a driver makes one when it starts".to_owned(),
    })
}

fn lock(root: &Dir) -> Result<Lock> {
    root.try_lock(layout::LOCK)?.ok_or_else(|| locked(root))
}

/// It names who has the pool if that is one process that the kernel tells of: a file with its pid would be written after the lock is
/// taken, not be the one's who only looks, and tell nothing to another pid namespace.
fn locked(root: &Dir) -> Error {
    let holders = root.lock_holders(layout::LOCK).unwrap_or_default();
    let mut holders = holders.iter();
    let holder = match (holders.next(), holders.next()) {
        (Some(pid), None) => format!(" (pid {pid})"),
        // Nobody, or no longer; or several who look.
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
        assert!(error.to_string().contains("this is no pool"), "{error}");
        std::fs::write(folder.path().join(layout::POOL_JSON), "{}").expect("written");
        let view = PoolView::open(folder.path()).expect("nothing to lock");
        assert!(view.layers.is_none());
        assert_eq!(view.root.entries().expect("names").len(), 1);

        let pool = PoolDirs::open(folder.path()).expect("made");
        let error = PoolView::open(folder.path()).expect_err("a driver has it");
        assert!(matches!(error, Error::Locked { .. }), "{error}");
        drop(pool);
        let view = PoolView::open(folder.path()).expect("nobody has it");
        assert!(view.layers.is_some());
        let _another = PoolView::open(folder.path()).expect("both only look");
        let error = PoolDirs::open(folder.path()).expect_err("somebody looks");
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
        let error = PoolView::open(folder.path()).expect_err("somebody starts");
        assert!(error.to_string().contains(&us), "{error}");
        drop(lock);
        let _view = PoolView::open(folder.path()).expect("nobody has it");
        let error = PoolDirs::open(folder.path()).expect_err("somebody looks");
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
