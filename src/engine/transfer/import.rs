//! Import: an archive becomes an artifact of one layer, which appears whole, or not at all. The
//! caller gets its answer when it is durable.
//!
//! | step | on disk |
//! |---|---|
//! | space is asked for | nothing |
//! | `incoming/<layer id>` made, the archive unpacked there | incomplete: swept at a start |
//! | digest compared, `sealing.json` written | the same |
//! | rename to `layers/<layer id>` (pinned) | not in the index: discarded at start |
//! | it gets its name in memory | the same: **volumes can be forks of it** |
//! | `syncfs` | durable, and not in the index |
//! | index transaction | **an artifact** |
//! | `sealing.json` → `layer.json` | the same |
//!
//! That is the order of a seal (`commit`) and of a merge (`flatten`). The rules of names are those
//! of commits: a resource cache keeps its first content, all else has the newest.

use std::io::{self, ErrorKind, Read};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{Timespec, Timestamps};

use super::half::{self, Half};
use super::space::{self, Gate};
use crate::archive::{self, Hashing, Limits, Progress, Unpack, Unpacked};
use crate::engine::error::{Context, Error, Result};
use crate::engine::failpoint::{Point, point};
use crate::engine::policies;
use crate::engine::shared::Inner;
use crate::engine::space::is_nearly_full;
use crate::engine::state::State;
use crate::engine::threads::Pool;
use crate::model::{
    Artifact, ArtifactId, Digests, LayerId, Name, Reference, Sha256, Sharing, Tenant, Timestamp,
};
use crate::sys::{self, Dir};

/// The target of an import.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImportRequest {
    /// Whose it will be.
    pub tenant: Tenant,
    /// Its name.
    pub reference: Reference,
    /// The digest that the archive must have: as it is received, or of the tar stream in it.
    pub digest: Option<Sha256>,
    /// How many bytes it has, as it is received. `None`: not known.
    pub size: Option<u64>,
    /// How long it is kept, as of an output or cache. `None`: until room is needed.
    pub ttl: Option<Duration>,
    /// The number of its name in the shared tier. `None`: the tier was not asked.
    pub base: Option<u64>,
}

impl ImportRequest {
    fn name(&self) -> Name {
        Name {
            tenant: self.tenant.clone(),
            reference: self.reference.clone(),
        }
    }
}

/// The result of an import.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Imported {
    /// The artifact.
    pub artifact: ArtifactId,
    /// Counts of the archive's content, and its digests.
    pub unpacked: Unpacked,
    /// Whether the name points at it. If not, newer content took the name meanwhile.
    pub named: bool,
    /// Whether the pool is above its high watermark, so that the next collection of garbage may
    /// evict it.
    pub nearly_full: bool,
}

/// Imports an archive.
pub(in crate::engine) async fn import(
    inner: &Arc<Inner>,
    request: ImportRequest,
    input: impl Read + Send + 'static,
    progress: Arc<Progress>,
    is_wanted: impl Fn() -> bool + Send + 'static,
) -> Result<Imported> {
    let job = move |inner: &Arc<Inner>| {
        let imported = import_now(inner, &request, input, &progress, is_wanted);
        if let Err(error) = &imported {
            space::ask_for_some(inner, error);
        }
        imported
    };
    inner.run(Pool::Transfers, job).await
}

fn import_now(
    inner: &Arc<Inner>,
    request: &ImportRequest,
    input: impl Read + Send,
    progress: &Progress,
    is_wanted: impl Fn() -> bool,
) -> Result<Imported> {
    let fence = {
        let state = inner.state.lock();
        refuse(&state, request)?;
        state.fences.newest()
    };
    space::ask(inner, request.size.unwrap_or(0))?;
    let began = inner.now();
    let (mut half, dir) = Half::make(inner)?;
    // The digest that was asked for may be that of the archive as it is.
    let hashing = if request.digest.is_some() {
        Hashing::Both
    } else {
        Hashing::Plain
    };
    let unpacked = receive(inner, &dir, input, hashing, progress)?;
    point(Point::ImportUnpacked);
    compare(request, &unpacked)?;
    inner
        .backend
        .received(&dir)
        .context("complete the archive's content")?;
    let artifact = describe(inner, request, half.id, fence, &unpacked);
    half.record(&dir, Some(&artifact), None)?;
    point(Point::ImportRecorded);
    half.place()?;
    point(Point::ImportPlaced);
    let described = |state: &State| {
        refuse(state, request)?;
        if fence < state.fences.least(&request.name()) {
            return Err(Error::Cleared(request.name()));
        }
        if !is_wanted() {
            return Err(abandoned());
        }
        Ok(artifact.clone())
    };
    let named = half::enter(inner, vec![half], began, described)?;
    tracing::info!(artifact.id = %artifact.id, name = %artifact.name(), named,
        digest = imported(&unpacked).map(tracing::field::display), "imported");
    if named {
        let policies = Arc::clone(&inner.state.lock().policies);
        policies::audit_import(&policies, &artifact);
    }
    let nearly_full = is_nearly_full(inner);
    // The previous owner of the name may be deleted.
    inner.wake_reaper();
    Ok(Imported {
        artifact: artifact.id,
        unpacked,
        named,
        nearly_full,
    })
}

/// The caller sent the whole archive, and went away before it was imported.
fn abandoned() -> Error {
    let gone = io::Error::new(ErrorKind::ConnectionAborted, "the caller is gone");
    Error::Archive {
        operation: "import the archive",
        source: archive::Error::Read(gone),
    }
}

/// An import that would come to nothing need not begin.
fn refuse(state: &State, request: &ImportRequest) -> Result<()> {
    state.health.refuse_closing()?;
    let name = request.name();
    if name.reference.first_writer_wins() && state.catalog.owner(&name).is_some() {
        return Err(Error::NameTaken(name));
    }
    Ok(())
}

/// Unpacks the archive.
fn receive(
    inner: &Arc<Inner>,
    layer: &Dir,
    input: impl Read + Send,
    hashing: Hashing,
    progress: &Progress,
) -> Result<Unpacked> {
    const EPOCH: Timespec = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    let root = inner.backend.receive(layer);
    let root = root.context("make a place for the archive's content")?;
    // The root's attributes if the archive has none, independent of umask and clock.
    let dressed = root.set_mode(0o755).and_then(|()| {
        root.set_times(&Timestamps {
            last_access: EPOCH,
            last_modification: EPOCH,
        })
    });
    dressed.context("make a place for the archive's content")?;
    point(Point::ImportMade);
    let space = inner
        .dirs
        .root
        .space()
        .context("ask for the pool's space")?;
    let most = Limits::default();
    let how = Unpack {
        limits: Limits {
            bytes: most.bytes.min(space.bytes),
            ..most
        },
        devices: false,
        hashing,
    };
    let plain = || progress.plain();
    // The caller waits until all is on the disk.
    let writes_back = true;
    let gate = Gate::new(inner, &plain, None, writes_back);
    let unpacked = archive::unpack(input, &root, how, progress, &|| gate.stops());
    unpacked.or_else(|error| match (gate.why(), error) {
        (Some(error), _) => Err(error),
        (None, archive::Error::System(error)) if error.is_full() && error.sets_attribute() => {
            Err(space::shortage(inner).unwrap_or_else(|| limited(&error)))
        }
        (None, error) => Err(error).context("unpack the archive"),
    })
}

/// The disk has space. ext4, for one, answers ENOSPC for more than 4 KiB of attributes of a file.
fn limited(error: &sys::Error) -> Error {
    Error::Unsupported {
        what: "the import of this archive".to_owned(),
        why: format!(
            "{error}, and the pool has space: its filesystem limits the attributes of a file"
        ),
    }
}

/// Whether it is the archive that was asked for.
fn compare(request: &ImportRequest, unpacked: &Unpacked) -> Result<()> {
    let Some(wanted) = request.digest else {
        return Ok(());
    };
    let digests = unpacked.digests;
    let (Some(plain), Some(packed)) = (digests.plain.sha256, digests.packed.sha256) else {
        return Err(Error::Defect);
    };
    let (plain, packed) = (Sha256(plain), Sha256(packed));
    if wanted == plain || wanted == packed {
        return Ok(());
    }
    Err(Error::OtherDigest {
        wanted,
        plain,
        packed,
    })
}

/// The digest of the tar stream that was imported.
fn imported(unpacked: &Unpacked) -> Option<Sha256> {
    unpacked.digests.plain.sha256.map(Sha256)
}

fn describe(
    inner: &Inner,
    request: &ImportRequest,
    layer: LayerId,
    fence: u64,
    unpacked: &Unpacked,
) -> Artifact {
    let state = inner.state.lock();
    let holder = state.catalog.owner(&request.name());
    // Newer than the owner of the name, even if a wrong clock dated that.
    let after_holder = holder.map_or(0, |holder| holder.artifact.created.0 + 1);
    let created = Timestamp(inner.now().0.max(after_holder));
    drop(state);
    inner.saw(created);
    Artifact {
        id: ArtifactId::from_bits(sys::random()),
        tenant: request.tenant.clone(),
        reference: request.reference.clone(),
        layers: vec![layer],
        created,
        ttl_seconds: request.ttl.map(|ttl| ttl.as_secs()),
        last_used: created,
        made_by: None,
        digests: Digests {
            content: None,
            imported: imported(unpacked),
        },
        sharing: Sharing {
            never: !inner.config.share,
            base: request.base,
            ..Sharing::default()
        },
        fence,
    }
}
