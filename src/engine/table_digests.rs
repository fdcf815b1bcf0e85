//! The digests of the layers' tables of contents, as far as the running driver knows them.
//!
//! A table lies beside the layer's content, as `layers/<id>/table`. Its SHA-256 names the layer
//! between nodes and is an attribute of that file. `tables` makes them; here they are looked up.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::os::fd::OwnedFd;

use parking_lot::Mutex;
use rustix::fs::OFlags;
use tokio::sync::Notify;

use super::backoff::Setbacks;
use crate::archive::toc;
use crate::model::{LayerId, Sha256, layout};
use crate::sys::{self, Dir, Errno, OpenFile, Xattrs};

/// The attribute of a table's file that has the table's digest.
pub(super) const DIGEST: &str = "trusted.baggageclaim.sha256";

/// The known digests, and what the background job needs to make the others.
#[derive(Debug, Default)]
pub(super) struct TableDigests {
    known: Mutex<HashMap<LayerId, Sha256>>,
    /// A layer may have become durable.
    pub(super) wanted: Notify,
    /// Layers whose table could not be made.
    pub(super) failed: Setbacks<LayerId>,
}

impl TableDigests {
    /// The digest of a layer's table; `None`: it is not made yet.
    pub(super) fn get(&self, layer: &LayerId) -> Option<Sha256> {
        self.known.lock().get(layer).copied()
    }

    pub(super) fn insert(&self, layer: LayerId, digest: Sha256) {
        self.known.lock().insert(layer, digest);
    }

    /// Forgets all layers but these.
    pub(super) fn retain(&self, layers: &HashSet<LayerId>) {
        self.known.lock().retain(|layer, _| layers.contains(layer));
    }

    /// Lets the background job look for layers without a table.
    pub(super) fn wake(&self) {
        self.wanted.notify_one();
    }
}

/// What lies beside a layer's content under the name of its table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Recorded {
    /// Nothing.
    Missing,
    /// A table without its digest, of another length than its header says, or no table at all.
    Damaged,
    /// The table with this digest.
    Whole(Sha256),
}

/// Looks at the table of the layer in this directory. Does not read all of it: a transfer does.
pub(super) fn recorded(layer: &Dir) -> sys::Result<Recorded> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let fd = match layer.open_file_beneath(layout::TABLE, flags, 0) {
        Err(error) if error.is(Errno::ENOENT) => return Ok(Recorded::Missing),
        Err(error) if error.is(Errno::ELOOP) || error.is(Errno::ENXIO) => {
            return Ok(Recorded::Damaged);
        }
        fd => OpenFile::new(fd?, layer.path().join(layout::TABLE)),
    };
    let digest = fd.xattr(DIGEST)?;
    let digest = digest.and_then(|text| String::from_utf8(text).ok()?.parse().ok());
    let file = File::from(OwnedFd::from(fd));
    Ok(match digest {
        Some(digest) if toc::has_whole_length(&file) => Recorded::Whole(digest),
        _ => Recorded::Damaged,
    })
}
