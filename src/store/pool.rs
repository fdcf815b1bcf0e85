//! A pool's directories by their descriptors, its lock, and its identity.
//!
//! Making a pool is repeatable: a crash in the middle leaves something that the next start completes.

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

impl PoolIdentity {
    /// The form that this version reads and writes.
    pub const FORMAT: u64 = 1;
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

    /// Opens a pool that must exist, and locks it; makes nothing.
    pub fn open_existing(path: &Path) -> Result<Self> {
        let root = Dir::open(path)?;
        if !root.has(layout::POOL_JSON)? {
            let why = "this is no pool; a driver makes one when it starts".to_owned();
            return Err(Error::Damaged {
                path: path.join(layout::POOL_JSON),
                why,
            });
        }
        drop(root);
        Self::open(path)
    }

    /// Reads `pool.json`; `None` in a pool that is new.
    pub fn identity(&self) -> Result<Option<PoolIdentity>> {
        #[derive(Deserialize)]
        struct Version {
            format: u64,
        }
        let path = self.root.path().join(layout::POOL_JSON);
        let bytes = match self.root.read(layout::POOL_JSON, 4096) {
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

    /// Writes `pool.json`, durably: from here on the pool exists.
    pub fn set_identity(&self, identity: &PoolIdentity) -> Result<()> {
        let mut bytes = serde_json::to_vec(identity).expect("plain data serialises");
        bytes.push(b'\n');
        self.root.replace(layout::POOL_JSON, &bytes)?;
        self.root.sync_filesystem()?;
        Ok(())
    }
}

/// Locks the pool and leaves our pid for whoever comes second.
fn lock(root: &Dir) -> Result<Lock> {
    const HOLDER: &str = "lock.pid";
    if let Some(lock) = root.try_lock(layout::LOCK)? {
        // For a message only; a full disk must not keep the driver from starting.
        let _unimportant = root.replace(HOLDER, std::process::id().to_string().as_bytes());
        return Ok(lock);
    }
    let holder = root
        .read(HOLDER, 32)
        .ok()
        .and_then(|bytes| String::from_utf8(bytes).ok());
    let holder = holder
        .map(|pid| format!(" (pid {pid})"))
        .unwrap_or_default();
    Err(Error::Locked {
        path: root.path().to_owned(),
        holder,
    })
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
