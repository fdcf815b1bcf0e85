//! Archives on real filesystems, against GNU tar and Go's reader, and from a hostile sender.
//!
//! [`tar`] builds hand-made streams block by block and shares no code with the product.

#![expect(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "what the product does safely, a test of it does in the plain way; other programs are run"
)]

#[path = "archives/backends.rs"]
mod backends;
#[path = "archives/bad.rs"]
mod bad;
#[path = "archives/bounds.rs"]
mod bounds;
mod common;
#[path = "archives/finishing.rs"]
mod finishing;
#[path = "archives/go.rs"]
mod go;
#[path = "archives/layers.rs"]
mod layers;
#[path = "archives/peers.rs"]
mod peers;
#[path = "archives/races.rs"]
mod races;
#[path = "archives/tar.rs"]
mod tar;
#[path = "archives/transfer.rs"]
mod transfer;
#[path = "archives/trips.rs"]
mod trips;

use std::path::Path;

use baggageclaim::archive::{self, Codec, Hashing, Pack, Packed, Progress, Unpack, Unpacked};
use baggageclaim::sys::Dir;
use common::{Lab, Snapshot};

/// Each codec, at the level that the command line takes.
const CODECS: [Codec; 3] = [Codec::Plain, Codec::Gzip(1), Codec::Zstd(1)];

fn open(path: &Path) -> Dir {
    Dir::open(path).expect("open")
}

fn pack(lab: &Lab, from: &Path, codec: Codec, devices: bool) -> archive::Result<(Vec<u8>, Packed)> {
    let temporary = lab.dir("temporary");
    let mut bytes = Vec::new();
    let how = Pack {
        codec,
        devices,
        hashing: Hashing::Both,
        temporary: &open(&temporary),
    };
    let packed = archive::pack(&open(from), &mut bytes, how, &Progress::default(), &|| {
        false
    })?;
    assert_eq!(packed.digests.packed.bytes, bytes.len() as u64);
    Ok((bytes, packed))
}

fn unpack(bytes: &[u8], to: &Path, devices: bool) -> archive::Result<Unpacked> {
    let how = Unpack {
        devices,
        ..Unpack::default()
    };
    archive::unpack(bytes, &open(to), how, &Progress::default(), &|| false)
}

/// What an archive keeps of a tree: all but sockets and foreign attributes.
fn kept(mut snapshot: Snapshot, devices: bool) -> Snapshot {
    let gone = |kind| kind == 's' || (!devices && matches!(kind, 'b' | 'c'));
    snapshot.entries.retain(|_, entry| !gone(entry.kind));
    for entry in snapshot.entries.values_mut() {
        entry
            .xattrs
            .retain(|name, _| !name.starts_with(b"trusted."));
    }
    snapshot
}

/// A tree that was unpacked, without what xfs adds to it: the ACLs once more, in another form.
fn found(tree: &Path) -> Snapshot {
    let mut snapshot = Snapshot::of(tree);
    for entry in snapshot.entries.values_mut() {
        let added = |name: &[u8]| name.starts_with(b"trusted.SGI_ACL_");
        entry.xattrs.retain(|name, _| !added(name));
    }
    snapshot
}
