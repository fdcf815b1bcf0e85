//! Any bytes as an archive: the recognition of compression, the decoders, the headers.

#![no_main]

mod common;

use std::sync::LazyLock;

use baggageclaim::archive::{self, Codec, Pack, Progress};
use baggageclaim::sys::Dir;
use common::tar::Tar;
use common::{HOW, Place, never};

static PLACE: LazyLock<Place> = LazyLock::new(Place::new);

libfuzzer_sys::fuzz_target!(init: common::plant(seeds), |bytes: &[u8]| {
    PLACE.unpack(|to| {
        let _ = archive::unpack(bytes, to, HOW, &Progress::default(), &never);
    });
});

fn seeds() -> Vec<Vec<u8>> {
    let mut seeds = vec![
        Tar::new().dir("d").file("d/f", b"content").end(),
        include_bytes!("../archives/s2-best.bin").to_vec(),
        include_bytes!("../archives/s2-fast.bin").to_vec(),
        include_bytes!("../archives/snappy.bin").to_vec(),
    ];
    for codec in [Codec::Gzip(1), Codec::Zstd(1)] {
        PLACE.unpack(|tree| seeds.push(packed(tree, codec)));
    }
    seeds
}

fn packed(tree: &Dir, codec: Codec) -> Vec<u8> {
    let file = Tar::new().file("f", b"content").end();
    archive::unpack(&file[..], tree, HOW, &Progress::default(), &never).expect("unpack");
    let how = Pack {
        codec,
        devices: false,
        hashing: archive::Hashing::Both,
        temporary: &PLACE.temporary(),
    };
    let mut bytes = Vec::new();
    archive::pack(tree, &mut bytes, how, &Progress::default(), &never).expect("pack");
    bytes
}
