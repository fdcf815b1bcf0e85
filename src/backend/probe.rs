//! Picks the best backend that works on a pool. It tries them and ignores version numbers.
//!
//! Overlay beats btrfs, even on btrfs: forks that share an inode share page cache. Copy is last.

use std::fmt;
use std::sync::Arc;

use super::btrfs::Btrfs;
use super::copy::Copy;
use super::error::{Error, Result};
use super::method::Backend;
use super::overlay::{MountApi, Overlay};
use super::types::BackendKind;
use crate::model::layout::{EMPTY, INCOMING, LAYERS, TRASH};
use crate::sys::{self, Dir, Errno};

/// The backend that works.
#[derive(Debug)]
pub struct Chosen {
    /// The backend.
    pub backend: Arc<dyn Backend>,
    /// Its kind.
    pub kind: BackendKind,
    /// Why it was chosen: a sentence for the log and for `status`.
    pub reason: String,
}

/// One attempt to open a backend.
struct Attempt {
    kind: BackendKind,
    api: Option<MountApi>,
    /// How it ended: the rest of a sentence.
    result: String,
}

impl fmt::Display for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.kind)?;
        if let Some(api) = self.api {
            write!(f, " ({api})")?;
        }
        f.write_str(&self.result)
    }
}

/// The order of preference.
const CANDIDATES: [(BackendKind, Option<MountApi>); 4] = [
    (BackendKind::Overlay, Some(MountApi::Descriptors)),
    (BackendKind::Overlay, Some(MountApi::Classic)),
    (BackendKind::Btrfs, None),
    (BackendKind::Copy, None),
];

/// The administrator's constraints on the choice.
#[derive(Debug, Clone, Copy, Default)]
pub struct Wanted {
    /// Only this kind.
    pub kind: Option<BackendKind>,
    /// Overlay only with this API.
    pub api: Option<MountApi>,
    /// Whether btrfs's simple quotas may be enabled, permanently, for the whole filesystem.
    pub btrfs_quota: bool,
    /// A disk that is too full for a self-test does not matter. For a pool that had this backend:
    /// only a driver that starts can free space there.
    pub untested: bool,
}

/// Tries the backends that `wanted` allows on `pool` until one works.
///
/// The choice is permanent, so only a lasting reason skips a backend, not a full disk.
///
/// Creates the pool directories that a self-test needs. It cleans up after itself, and after a
/// killed one. It changes nothing outside the pool.
pub fn choose(pool: &Dir, wanted: Wanted) -> Result<Chosen> {
    for name in [LAYERS, EMPTY, INCOMING, TRASH] {
        pool.ensure_dir(name, 0o700)?;
    }
    refuse_noexec(pool)?;
    let mut tried: Vec<Attempt> = Vec::new();
    for (kind, candidate) in CANDIDATES {
        let is_wanted = wanted.kind.is_none_or(|wanted| wanted == kind)
            && (candidate.is_none() || wanted.api.is_none() || candidate == wanted.api);
        if !is_wanted {
            continue;
        }
        let mut works = " works";
        let mut opened = open(pool, kind, candidate, wanted.btrfs_quota, true);
        if let Err(Error::System(error)) = &opened
            && error.is_full()
            && wanted.untested
        {
            tracing::warn!(%error, "the disk is too full to test the pool's backend again");
            works = ", untested because the disk was full";
            opened = open(pool, kind, candidate, wanted.btrfs_quota, false);
        }
        let opened = match opened {
            // The choice is permanent. On a full disk no other mount API works either.
            Err(Error::System(error))
                if error.is_full() || wanted.kind.is_none() && is_of_today(&error) =>
            {
                return Err(error.into());
            }
            opened => opened,
        };
        tried.push(Attempt {
            kind,
            api: candidate,
            result: match &opened {
                Ok(_) => works.to_owned(),
                Err(error) => format!(": {error}"),
            },
        });
        if let Ok(backend) = opened {
            let reason = reason(pool, wanted.kind.is_some(), &tried, &*backend)?;
            return Ok(Chosen {
                backend,
                kind,
                reason,
            });
        }
    }
    let failures: Vec<String> = tried.iter().map(ToString::to_string).collect();
    Err(Error::Unsupported {
        what: match wanted.kind {
            None => "copy-on-write",
            Some(BackendKind::Overlay) => "the overlay backend",
            Some(BackendKind::Btrfs) => "the btrfs backend",
            Some(BackendKind::Copy) => "the copy backend",
        },
        why: failures.join("; "),
    })
}

/// Fails on noexec: volumes shown by bind mounts, as some are on every backend, run no programs.
fn refuse_noexec(pool: &Dir) -> Result<()> {
    // Each backend finds other faults of the pool itself.
    let may_not_clear = sys::bind(pool, false).is_err_and(|error| error.is(Errno::EPERM));
    if !may_not_clear || !pool.is_noexec()? {
        return Ok(());
    }
    Err(Error::Unsupported {
        what: "a volume from which programs can be run",
        why:
            "it lies on a filesystem that is mounted noexec, and this process may not change that \
              for its own mounts; mount the filesystem without noexec, or run the driver outside \
              of user namespaces"
                .to_owned(),
    })
}

fn open(
    pool: &Dir,
    kind: BackendKind,
    api: Option<MountApi>,
    btrfs_quota: bool,
    test: bool,
) -> Result<Arc<dyn Backend>> {
    let api = api.unwrap_or(MountApi::Classic);
    Ok(match kind {
        BackendKind::Overlay if test => Arc::new(Overlay::open(pool, api)?),
        BackendKind::Overlay => Arc::new(Overlay::open_untested(pool, api)?),
        // It has no self-test.
        BackendKind::Btrfs => Arc::new(Btrfs::open(pool, btrfs_quota)?),
        BackendKind::Copy if test => Arc::new(Copy::open(pool)?),
        BackendKind::Copy => Arc::new(Copy::open_untested(pool)?),
    })
}

/// Whether the failure of a self-test is temporary and says nothing about kernel and filesystem.
fn is_of_today(error: &sys::Error) -> bool {
    // EIO also reports an earlier write-back error that no process has seen yet (`volatile`).
    let of_today = [Errno::EIO, Errno::EMFILE, Errno::ENFILE, Errno::ENOMEM];
    error.is_full() || error.limit().is_some() || of_today.contains(&error.errno())
}

fn reason(
    pool: &Dir,
    was_wanted: bool,
    tried: &[Attempt],
    backend: &dyn Backend,
) -> Result<String> {
    let (chosen, failed) = tried
        .split_last()
        .expect("a backend was chosen, so one was tried");
    let uname = rustix::system::uname();
    let kernel = uname.release().to_string_lossy();
    let space = pool.space()?;
    let filesystem = space.filesystem().unwrap_or("an unknown filesystem");
    let mut text = format!("{chosen} on {filesystem}, Linux {kernel}");
    if was_wanted {
        text.push_str(", and was asked for");
    }
    for attempt in failed {
        text.push_str("; ");
        text.push_str(&attempt.to_string());
    }
    match backend.why_no_limits() {
        None => text.push_str("; size limits are enforced"),
        Some(why) => {
            text.push_str("; size limits are not enforced: ");
            text.push_str(&why);
        }
    }
    Ok(text)
}
