//! Archives whose headers have right checksums, made into trees and layers. The first byte of an
//! input chooses how.

#![no_main]

mod common;

use std::fs;
use std::sync::LazyLock;

use baggageclaim::archive::{self, LayerMarks, Progress};
use baggageclaim::sys::Dir;
use common::tar::{Tar, seal};
use common::{HOW, Place, never};

static PLACE: LazyLock<Place> = LazyLock::new(Place::new);
/// A layer below the one that is unpacked.
static BELOW: LazyLock<[Dir; 1]> = LazyLock::new(|| {
    let below = PLACE.file("below");
    fs::create_dir_all(below.join("e")).expect("mkdir");
    fs::write(below.join("e/other"), "below").expect("write");
    std::os::unix::fs::symlink("../../outside", below.join("d")).expect("symlink");
    [Dir::open(&below).expect("open")]
});

libfuzzer_sys::fuzz_target!(init: common::plant(seeds), |input: &[u8]| {
    let Some((how, bytes)) = input.split_first() else {
        return;
    };
    let mut bytes = bytes.to_vec();
    for block in bytes.chunks_exact_mut(512) {
        if block[257..262] == *b"ustar" {
            seal(block);
        }
    }
    let marks = [LayerMarks::Records, LayerMarks::Oci][usize::from(how & 1)];
    let (bytes, progress) = (&bytes[..], Progress::default());
    PLACE.unpack(|to| {
        let _ = match how / 2 % 3 {
            0 => archive::unpack(bytes, to, HOW, &progress, &never),
            1 => archive::unpack_layer(bytes, to, &*BELOW, marks, HOW, &progress, &never),
            _ => archive::unpack_onto(bytes, to, marks, HOW, &progress, &never),
        };
    });
});

fn seeds() -> Vec<Vec<u8>> {
    let tree = Tar::new()
        .special(b'g', &common::tar::record("comment", b"x"))
        .special(b'L', b"a/long/name\0")
        .file("x", b"content")
        .symlink("s", "../outside")
        .file("s/f", b"through")
        .end();
    let attributes = Tar::new()
        .pax(&[
            ("GNU.sparse.map", b"0,2,9,3"),
            ("GNU.sparse.size", b"20"),
            ("SCHILY.acl.access", b"user::rwx,group::r-x,other::r-x"),
            ("SCHILY.xattr.user.x", b"y"),
        ])
        .file("sparse", b"abcde")
        .hard("h", "sparse")
        .end();
    let layer = Tar::new()
        .pax(&[("BAGGAGECLAIM.layer", b"whiteout")])
        .file("d/file", b"")
        .pax(&[("BAGGAGECLAIM.layer", b"opaque")])
        .dir("o")
        .hard("h", "e/other")
        .end();
    let oci = Tar::new()
        .file("e/.wh.file", b"")
        .file("p/.wh..wh..opq", b"")
        .hard("h", "e/other")
        .end();
    let choices = [
        (0, tree),
        (0, attributes),
        (2, layer.clone()),
        (4, layer),
        (3, oci.clone()),
        (5, oci),
    ];
    let seeds = choices.map(|(how, bytes)| [&[how], &bytes[..]].concat());
    seeds.to_vec()
}
