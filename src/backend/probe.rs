//! Which backend a pool gets: the best one that truly works there, found by trying, never by version numbers.
//!
//! Overlay comes first, also where btrfs could: forks that share an inode share its page cache. Copying is what is left.

use std::fmt;
use std::sync::Arc;

use super::overlay::{MountApi, Overlay};
use super::{Backend, BackendKind, Btrfs, Copy, Error, Result};
use crate::model::layout::{EMPTY, INCOMING, LAYERS, TRASH};
use crate::sys::{self, Dir, Errno};

/// A backend that was found to work.
#[derive(Debug)]
pub struct Chosen {
    /// It.
    pub backend: Arc<dyn Backend>,
    /// Which one.
    pub kind: BackendKind,
    /// How it mounts, if that is a question of this backend.
    pub api: Option<MountApi>,
    /// Why this one: a sentence for the log and for whoever asks.
    pub reason: String,
    /// What it was found on, and how.
    pub facts: Facts,
}

/// What was seen of the machine while choosing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    /// The kernel's release, as `uname` says it.
    pub kernel: String,
    /// The pool's filesystem.
    pub filesystem: String,
    /// What was tried, in order; the last one worked.
    pub tried: Vec<Attempt>,
}

/// One backend that was tried.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attempt {
    /// Which one.
    pub kind: BackendKind,
    /// With which mount API.
    pub api: Option<MountApi>,
    /// Why it does not work, if it does not.
    pub failure: Option<String>,
}

impl fmt::Display for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.kind)?;
        if let Some(api) = self.api {
            write!(f, " ({api})")?;
        }
        match &self.failure {
            Some(failure) => write!(f, ": {failure}"),
            None => f.write_str(" works"),
        }
    }
}

/// The order of preference.
const CANDIDATES: [(BackendKind, Option<MountApi>); 4] = [
    (BackendKind::Overlay, Some(MountApi::Descriptors)),
    (BackendKind::Overlay, Some(MountApi::Classic)),
    (BackendKind::Btrfs, None),
    (BackendKind::Copy, None),
];

/// What the administrator wants of the choice.
#[derive(Debug, Clone, Copy, Default)]
pub struct Wanted {
    /// Only this one.
    pub kind: Option<BackendKind>,
    /// Overlay only through this API.
    pub api: Option<MountApi>,
    /// Whether btrfs's simple quotas may be switched on, for the whole filesystem and for good ([`Btrfs::open`]).
    pub btrfs_quota: bool,
}

/// Tries the backends on `pool` until one works; only what is wanted.
///
/// Where nothing is wanted, a backend is only passed over for what it is: not because the disk is full, say.
///
/// Makes the directories of the pool that a trial needs. A trial cleans up after itself, and after one that was killed; it
/// changes nothing outside the pool.
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
        let opened = match open(pool, kind, candidate, wanted.btrfs_quota) {
            // What is chosen is the pool's for good. On a full disk no other way to mount works either.
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
            failure: opened.as_ref().err().map(ToString::to_string),
        });
        if let Ok(backend) = opened {
            let limits = backend.why_no_limits();
            let facts = Facts {
                kernel: rustix::system::uname()
                    .release()
                    .to_string_lossy()
                    .into_owned(),
                filesystem: pool
                    .space()?
                    .filesystem()
                    .map_or_else(|| "an unknown filesystem".to_owned(), str::to_owned),
                tried,
            };
            return Ok(Chosen {
                backend,
                kind,
                api: candidate,
                reason: reason(wanted.kind.is_some(), &facts, limits.as_deref()),
                facts,
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

/// All backends show some volumes by bind mounts, in which no program could be run: an error that
/// says so.
fn refuse_noexec(pool: &Dir) -> Result<()> {
    // What else may be wrong with it each backend finds out.
    let may_not_clear = sys::bind(pool, false).is_err_and(|error| error.is(Errno::EPERM));
    if !may_not_clear || !pool.is_noexec()? {
        return Ok(());
    }
    Err(Error::Unsupported {
        what: "a volume from which programs can be run",
        why: "it lies on a filesystem that is mounted noexec, and this process may not change that for its own mounts; \
              mount the filesystem without noexec, or run the driver outside of user namespaces"
            .to_owned(),
    })
}

fn open(
    pool: &Dir,
    kind: BackendKind,
    api: Option<MountApi>,
    btrfs_quota: bool,
) -> Result<Arc<dyn Backend>> {
    Ok(match kind {
        BackendKind::Overlay => Arc::new(Overlay::open(pool, api.unwrap_or(MountApi::Classic))?),
        BackendKind::Btrfs => Arc::new(Btrfs::open(pool, btrfs_quota)?),
        BackendKind::Copy => Arc::new(Copy::open(pool)?),
    })
}

/// Whether a trial that failed so says nothing of the kernel and the filesystem, and may succeed another day.
fn is_of_today(error: &sys::Error) -> bool {
    // EIO: also where the disk failed to write something back and nobody has heard of it yet (`volatile`).
    let of_today = [Errno::EIO, Errno::EMFILE, Errno::ENFILE, Errno::ENOMEM];
    error.is_full() || error.limit().is_some() || of_today.contains(&error.errno())
}

fn reason(was_wanted: bool, facts: &Facts, no_limits: Option<&str>) -> String {
    let (chosen, failed) = facts
        .tried
        .split_last()
        .expect("a backend was chosen, so one was tried");
    let mut text = format!("{chosen} on {}, Linux {}", facts.filesystem, facts.kernel);
    if was_wanted {
        text.push_str(", and was asked for");
    }
    for attempt in failed {
        text.push_str("; ");
        text.push_str(&attempt.to_string());
    }
    match no_limits {
        None => text.push_str("; size limits are enforced"),
        Some(why) => {
            text.push_str("; size limits are not enforced: ");
            text.push_str(why);
        }
    }
    text
}
