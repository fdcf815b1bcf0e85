//! A table of contents, and a stream of frames for it. An input is the table's length in two bytes,
//! the table, and the stream.

#![no_main]

mod common;

use std::fs::{self, File};
use std::path::Path;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use baggageclaim::archive::toc::{Holder, Packing, Patience, Receiver, Table, Want, scan};
use baggageclaim::archive::{self, Progress};
use baggageclaim::sys::Dir;
use common::tar::Tar;
use common::{HOW, LIMITS, Place, never};

/// The length of a table's header, which says how long the entries are.
const HEADER: usize = 64;
/// How a record of a frame begins; the digest of its table follows.
const FRAME: [u8; 9] = [0x5b, 0x2a, 0x4d, 0x18, 57, 0, 0, 0, 2];
const PATIENCE: Patience = Patience(Duration::from_secs(60));

static PLACE: LazyLock<Place> = LazyLock::new(Place::new);

libfuzzer_sys::fuzz_target!(init: common::plant(seeds), |input: &[u8]| {
    let Some((length, bytes)) = input.split_first_chunk::<2>() else {
        return;
    };
    let length = usize::from(u16::from_le_bytes(*length)).min(bytes.len());
    let (table, stream) = bytes.split_at(length);
    let mut table = table.to_vec();
    // As a header whose checksum is right: a longer or a shorter table is looked at, too.
    let entries = table.len().saturating_sub(HEADER) as u64;
    if let Some(length) = table.get_mut(16..24) {
        length.copy_from_slice(&entries.to_le_bytes());
    }
    let path = PLACE.file("table");
    fs::write(&path, table).expect("write");
    let Ok(table) = open(&path) else {
        return;
    };
    // As if a holder had named the table that it sends.
    let mut stream = stream.to_vec();
    let name = table.digest().sha256;
    let end = stream.len().saturating_sub(FRAME.len() + name.len());
    for at in 0..end {
        if stream[at..at + FRAME.len()] == FRAME {
            let at = at + FRAME.len();
            stream[at..at + name.len()].copy_from_slice(&name);
        }
    }
    PLACE.unpack(|to| {
        if let Ok(mut receiver) = Receiver::open(to, table, true, &never) {
            let _ = receiver.take(&stream[..], PATIENCE, &AtomicU64::default(), &never);
            let _ = receiver.missing(1000);
            let _ = receiver.finish(&never);
        }
    });
});

fn open(path: &Path) -> archive::Result<Arc<Table>> {
    let file = File::open(path).expect("open");
    Table::open(file, None, &PLACE.temporary(), LIMITS, &never)
}

fn seeds() -> Vec<Vec<u8>> {
    let small = Tar::new()
        .pax(&[("SCHILY.xattr.user.x", b"y")])
        .file("d/f", b"content")
        .hard("h", "d/f")
        .symlink("s", "../outside")
        .link(b'6', "p", "")
        .file("g", b"more")
        .end();
    // Two chunks, and one of zeros.
    let large = Tar::new().file("l", &vec![1; (4 << 20) + 1]).end();
    let holes = Tar::new().file("z", &vec![0; (4 << 20) + 9]).end();
    [small, large, holes]
        .map(|tar| {
            let mut seed = Vec::new();
            PLACE.unpack(|tree| seed = of(tree, &tar));
            seed
        })
        .to_vec()
}

fn of(tree: &Dir, tar: &[u8]) -> Vec<u8> {
    let how = archive::Unpack {
        limits: archive::Limits::default(),
        ..HOW
    };
    archive::unpack(tar, tree, how, &Progress::default(), &never).expect("unpack");
    let path = PLACE.file("table");
    let mut options = File::options();
    let options = options.read(true).write(true).create(true).truncate(true);
    let file = options.open(&path).expect("create");
    scan(
        tree,
        &file,
        true,
        &PLACE.temporary(),
        &Progress::default(),
        &never,
    )
    .expect("scan");
    let table = Table::open(
        file,
        None,
        &PLACE.temporary(),
        archive::Limits::default(),
        &never,
    );
    let table = table.expect("table");
    let count = table.files();
    let holder = Holder::new(table, tree).expect("holder");
    let mut stream = Vec::new();
    let mut all = |_| Ok(true);
    let wants = [Want::Files { first: 0, count }];
    holder
        .send(&wants, &mut stream, Packing::at(1), &mut all, &never)
        .expect("send");
    let table = fs::read(&path).expect("read");
    let length = u16::try_from(table.len()).expect("it is small");
    [&length.to_le_bytes()[..], &table, &stream].concat()
}
