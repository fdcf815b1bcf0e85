//! The format between nodes: tables, frames, holders that stall, are cut, lie or differ.

use std::cell::Cell;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, lchown, symlink};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use baggageclaim::archive::toc::{
    Holder, Packing, Patience, Receiver, Scanned, Table, Taken, Want, scan,
};
use baggageclaim::archive::{
    self, Codec, Error, Hashing, LayerMarks, Limits, Pack, Packed, Progress,
};
use baggageclaim::tree;
use sha2::{Digest as _, Sha256};

use crate::common::{Fs, Lab, Snapshot, assert_same, require_lab, tree as made};
use crate::layers::{compare_stack, stack};
use crate::races::{Random, mutation};
use crate::trips::{odd, set};
use crate::{found, kept, open};

const ALL: Want = Want::Files {
    first: 0,
    count: u64::MAX,
};
const PATIENT: Patience = Patience(Duration::from_secs(60));

fn never() -> bool {
    false
}

/// Makes the table of a layer in a file of this name.
fn scanned(lab: &Lab, layer: &Path, name: &str) -> (PathBuf, Scanned) {
    let (path, scanned) = try_scan(lab, layer, name, &never);
    (path, scanned.expect("scan"))
}

pub(crate) fn try_scan(
    lab: &Lab,
    layer: &Path,
    name: &str,
    stop: &dyn Fn() -> bool,
) -> (PathBuf, archive::Result<Scanned>) {
    let path = lab.dir("tables").join(name);
    let mut options = File::options();
    let file = options
        .read(true)
        .write(true)
        .create_new(true)
        .open(&path)
        .expect("create");
    let (root, temporary) = (open(layer), open(&lab.dir("temporary")));
    let scanned = scan(&root, &file, true, &temporary, &Progress::default(), stop);
    (path, scanned)
}

fn table(lab: &Lab, path: &Path, expected: Option<[u8; 32]>) -> archive::Result<Arc<Table>> {
    let file = File::open(path).expect("open");
    let temporary = open(&lab.dir("temporary"));
    Table::open(file, expected, &temporary, Limits::default(), &never)
}

/// A layer, its table and who holds it.
pub(crate) struct Held {
    table: Arc<Table>,
    holder: Holder,
}

pub(crate) fn hold(lab: &Lab, layer: &Path, name: &str) -> Held {
    let (path, scanned) = scanned(lab, layer, name);
    let table = table(lab, &path, Some(scanned.digest.sha256)).expect("table");
    assert_eq!(table.digest(), scanned.digest);
    let holder = Holder::new(Arc::clone(&table), &open(layer)).expect("holder");
    Held { table, holder }
}

impl Held {
    fn send(&self, wants: &[Want], level: i32) -> Vec<u8> {
        self.send_packed(wants, Packing::at(level))
    }

    fn send_packed(&self, wants: &[Want], packing: Packing<'_>) -> Vec<u8> {
        let wants: Vec<Want> = wants.iter().map(|want| self.bounded(*want)).collect();
        let mut out = Vec::new();
        let mut all = |_| Ok(true);
        self.holder
            .send(&wants, &mut out, packing, &mut all, &never)
            .expect("send");
        out
    }

    fn bounded(&self, want: Want) -> Want {
        if want == ALL {
            let count = self.table.files();
            return Want::Files { first: 0, count };
        }
        want
    }

    fn receiver(&self, to: &Path) -> Receiver {
        Receiver::open(&open(to), Arc::clone(&self.table), true, &never).expect("receiver")
    }

    pub(crate) fn receive(&self, to: &Path) {
        let taken = self.try_receive(to).expect("receive");
        assert_eq!((taken.bytes, taken.repeated), (self.table.bytes(), 0));
    }

    /// All of the layer, in one stream.
    pub(crate) fn try_receive(&self, to: &Path) -> archive::Result<Taken> {
        let mut receiver = Receiver::open(&open(to), Arc::clone(&self.table), true, &never)?;
        let bytes = self.send(&[ALL], 1);
        let taken = receiver.take(&bytes[..], PATIENT, &AtomicU64::default(), &never)?;
        receiver.finish(&never)?;
        Ok(taken)
    }
}

fn take(receiver: &mut Receiver, bytes: &[u8]) -> archive::Result<u64> {
    let taken = receiver.take(bytes, PATIENT, &AtomicU64::default(), &never);
    taken.map(|taken| taken.pieces)
}

/// Otherwise a check for space would count bytes twice: as used space, and as still to come.
#[test]
fn bytes_count_as_received_before_they_take_space() {
    let lab = require_lab!(Fs::Ext4);
    let from = lab.dir("from");
    for number in 0..500 {
        // Many share a frame, and some have frames of their own.
        let size = if number % 50 == 0 { 900 << 10 } else { 3000 };
        fs::write(from.join(number.to_string()), vec![1; size]).expect("write");
    }
    let held = hold(&lab, &from, "one");
    let to = lab.dir("to");
    let mut receiver = held.receiver(&to);
    let (progress, most_missing) = (AtomicU64::default(), AtomicU64::default());
    let look = || {
        let there = made::bytes_below(&to);
        let missing = there.saturating_sub(progress.load(Ordering::Relaxed));
        most_missing.fetch_max(missing, Ordering::Relaxed);
        false
    };
    let frames = held.send(&[ALL], 1);
    receiver
        .take(&frames[..], PATIENT, &progress, &look)
        .expect("take");
    assert_eq!(progress.load(Ordering::Relaxed), held.table.bytes());
    // What is there beside the files: the receiver's own list of pieces.
    let own = made::bytes_below(&to) - held.table.bytes();
    assert!(most_missing.into_inner() <= own, "{own}");
}

/// What arrives is compared with this: as archives keep it.
fn shown(tree: &Path) -> Snapshot {
    kept(found(tree), true)
}

/// Small files, and large ones with zeros of all kinds.
fn content(root: &Path) {
    made::files(root, 300);
    for (name, size) in [
        ("a", 300 << 10),
        ("b", 900 << 10),
        ("c", 2 << 20),
        ("d", 5 << 20),
    ] {
        let bytes: Vec<u8> = (0..size)
            .map(|n: u32| ((n * 31) >> 7).to_le_bytes()[0])
            .collect();
        fs::write(root.join(name), bytes).expect("write");
    }
    let file = File::create(root.join("e")).expect("create");
    for at in [0, 9 << 20, 13_000_000, 20 << 20] {
        file.write_all_at(b"data", at).expect("write");
    }
    file.set_len(30 << 20).expect("truncate");
    fs::write(root.join("zeros"), vec![0; 100]).expect("write");
    fs::write(root.join("empty"), "").expect("write");
    fs::hard_link(root.join("e"), root.join("f")).expect("link");
    made::times(root, 1_000_000_000, 7);
}

#[test]
fn the_pages_test_vector() {
    let lab = require_lab!(Fs::Tmpfs);
    let root = lab.dir("layer");
    let at = |name: &str| root.join(name);
    let look = |name: &str, mode, owner: (u32, u32), time: (i64, i64)| {
        lchown(at(name), Some(owner.0), Some(owner.1)).expect("chown");
        fs::set_permissions(at(name), fs::Permissions::from_mode(mode)).expect("chmod");
        made::times(&at(name), time.0, time.1);
    };
    fs::create_dir(at("a")).expect("mkdir");
    set(&at("a"), "trusted.overlay.opaque", b"y");
    fs::write(at("a/hello"), "hello\n").expect("write");
    symlink("hello", at("a/link")).expect("symlink");
    fs::hard_link(at("a/hello"), at("b")).expect("link");
    open(&root).make_node("gone", 0o020_000, 0).expect("mknod");
    let large = File::create(at("large")).expect("create");
    large.write_all_at(b"tail", 4 << 20).expect("write");
    fs::write(at("z"), "").expect("write");
    look("a/hello", 0o644, (1000, 100), (1_000_000_000, 500_000_000));
    look("large", 0o600, (0, 0), (1_000_000_000, 0));
    set(&at("z"), "user.note", b"x\ny");
    look("z", 0o640, (4_000_000_000, 0), (-2, 500_000_000));
    made::times(&at("a/link"), 1_000_000_000, 0);
    look("a", 0o750, (0, 0), (1_000_000_000, 0));
    look(".", 0o755, (0, 0), (0, 0));
    let (path, scanned) = scanned(&lab, &root, "vector");
    let page = include_str!("../../docs/layer-format.md");
    // The digest of a file of two chunks is that of their digests, which stand together.
    let chunks = [[0; 32], Sha256::digest(b"tail").into()].concat();
    let bytes = fs::read(path).expect("read");
    assert!(bytes.windows(chunks.len()).any(|there| there == chunks));
    let of_large = archive::Digest {
        bytes: chunks.len() as u64,
        sha256: Sha256::digest(&chunks).into(),
    };
    let of_large = of_large.to_string();
    assert!(
        page.contains(&format!("`{}`", &of_large[7..])),
        "{of_large}"
    );
    let digest = scanned.digest.to_string();
    assert!(page.contains(&format!("`{}`", &digest[7..])), "{digest}");
    assert!(page.contains(&format!("a table of {} bytes", scanned.digest.bytes)));
}

#[test]
fn a_layer_arrives_whole_and_has_one_name_everywhere() {
    let mut first = None;
    for fs in [Fs::Ext4, Fs::XfsReflink, Fs::Btrfs, Fs::Tmpfs] {
        let lab = require_lab!(fs);
        let from = lab.dir("from");
        odd(&from);
        fs::create_dir(from.join("content")).expect("mkdir");
        content(&from.join("content"));
        for path in Snapshot::of(&from).entries.keys().rev() {
            made::times(&from.join(OsStr::from_bytes(path)), 1_000_000_000, 1);
        }
        let held = hold(&lab, &from, "one");
        let name = *first.get_or_insert(held.table.digest());
        assert_eq!(name, held.table.digest(), "{fs:?}");
        let to = lab.dir("to");
        held.receive(&to);
        assert_same(&shown(&from), &shown(&to.join("fs")));
        // Holes are holes, and the copy has the same name.
        let blocks = fs::metadata(to.join("fs/content/e"))
            .expect("stat")
            .blocks();
        assert!(blocks <= 4 * 8 * 16, "{fs:?}: {blocks} blocks");
        assert_eq!(hold(&lab, &to.join("fs"), "two").table.digest(), name);
    }
}

#[test]
fn a_stack_of_ten_generations_survives_by_tables() {
    let lab = require_lab!(Fs::Ext4);
    let (layers, snapshots) = stack(&lab, LayerMarks::Records);
    let mut received = Vec::new();
    let full = lab.dir("full");
    for (number, layer) in layers.iter().enumerate() {
        let held = hold(&lab, layer, &number.to_string());
        let to = lab.dir(&format!("to-{number}"));
        held.receive(&to);
        assert_eq!(
            hold(&lab, &to.join("fs"), &format!("again-{number}"))
                .table
                .digest(),
            held.table.digest()
        );
        received.push(to.join("fs"));
        // And onto a full tree.
        let again = lab.dir(&format!("onto-{number}"));
        held.receive(&again);
        fs::rename(again.join("fs"), full.join("a new layer")).expect("rename");
        tree::apply(&open(&full), "a new layer".as_ref(), &never).expect("apply");
        assert_same(&snapshots[number], &shown(&full));
    }
    compare_stack(&lab, &received, &snapshots);
}

#[test]
fn order_repetition_and_compression_do_not_matter() {
    let lab = require_lab!(Fs::Ext4);
    let from = lab.dir("from");
    content(&from);
    let (one, other) = (hold(&lab, &from, "one"), hold(&lab, &from, "two"));
    let to = lab.dir("to");
    let mut receiver = one.receiver(&to);
    let wants = receiver.missing(1000).expect("missing");
    assert!(wants.len() > 3, "{wants:?}");
    // Backwards, one half of each holder, the last want of both.
    for (number, want) in wants.iter().enumerate().rev() {
        let (holder, level) = if number % 2 == 0 {
            (&one, 1)
        } else {
            (&other, 9)
        };
        assert!(take(&mut receiver, &holder.send(&[*want], level)).expect("take") > 0);
    }
    assert_eq!(receiver.missing(1).expect("missing"), []);
    let again = receiver
        .take(
            &other.send(&[ALL], 3)[..],
            PATIENT,
            &AtomicU64::default(),
            &never,
        )
        .expect("twice");
    assert_eq!(again.pieces, 0);
    assert!(again.repeated > 0);
    receiver.finish(&never).expect("finish");
    assert_same(&shown(&from), &shown(&to.join("fs")));
}

#[test]
fn frames_that_are_awaited_are_not_compressed() {
    let lab = require_lab!(Fs::Tmpfs);
    let from = lab.dir("from");
    content(&from);
    let held = hold(&lab, &from, "one");
    let stored = Packing {
        level: 1,
        is_awaited: &|| true,
        verifies: false,
    };
    let count = Cell::new(0);
    let half = Packing {
        level: 1,
        is_awaited: &|| count.replace(count.get() + 1) % 2 == 0,
        verifies: true,
    };
    let packed = held.send(&[ALL], 1).len();
    let [stored, half] = [stored, half].map(|packing| held.send_packed(&[ALL], packing));
    assert!(stored.len() as u64 > held.table.bytes(), "{}", stored.len());
    assert!(
        packed < half.len() && half.len() < stored.len(),
        "{}",
        half.len()
    );
    for (number, stream) in [stored, half].iter().enumerate() {
        let plain = zstd::decode_all(&stream[..]).expect("it is zstd");
        assert_eq!(plain.len() as u64, held.table.bytes());
        let to = lab.dir(&format!("to-{number}"));
        let mut receiver = held.receiver(&to);
        take(&mut receiver, stream).expect("take");
        receiver.finish(&never).expect("finish");
        assert_same(&shown(&from), &shown(&to.join("fs")));
    }
}

#[test]
fn a_stream_that_is_cut_anywhere_is_resumed_from_another_holder() {
    let lab = require_lab!(Fs::Tmpfs);
    let from = lab.dir("from");
    content(&from);
    let (one, other) = (hold(&lab, &from, "one"), hold(&lab, &from, "two"));
    let stream = one.send(&[ALL], 1);
    let before = shown(&from);
    for number in 0..100 {
        let cut = stream.len() * number / 100;
        let to = lab.dir("to");
        let mut receiver = one.receiver(&to);
        let error = take(&mut receiver, &stream[..cut]).expect_err("it is cut");
        assert!(matches!(error, Error::Truncated { .. }), "{cut}: {error}");
        let error = one
            .receiver(&to)
            .finish(&never)
            .expect_err("it is not whole");
        assert!(matches!(error, Error::Incomplete { .. }), "{cut}: {error}");
        // Another process goes on where this one was killed.
        let mut receiver = one.receiver(&to);
        let wants = receiver.missing(1000).expect("missing");
        let taken = receiver
            .take(
                &other.send(&wants, 3)[..],
                PATIENT,
                &AtomicU64::default(),
                &never,
            )
            .expect("take");
        assert_eq!(taken.repeated, 0, "{cut}: only what was missing is sent");
        receiver.finish(&never).expect("finish");
        assert_same(&before, &shown(&to.join("fs")));
        fs::remove_dir_all(&to).expect("remove");
    }
}

#[test]
fn a_holder_that_stalls_meets_the_deadline() {
    let lab = require_lab!(Fs::Tmpfs);
    let from = lab.dir("from");
    content(&from);
    let held = hold(&lab, &from, "one");
    let stream = held.send(&[ALL], 1);
    let to = lab.dir("to");
    // At once, within a record, within a frame.
    for part in [0, 30, stream.len() / 2] {
        let (mut sender, socket) = UnixStream::pair().expect("a socket");
        socket
            .set_read_timeout(Some(Duration::from_millis(50)))
            .expect("timeout");
        let mut receiver = held.receiver(&to);
        let begun = Instant::now();
        let result = std::thread::scope(|scope| {
            let stream = &stream;
            let sending = scope.spawn(move || {
                // The receiver may have given up.
                let _ = sender.write_all(&stream[..part]);
                sender
            });
            let patience = Patience(Duration::from_millis(300));
            let result = receiver.take(socket, patience, &AtomicU64::default(), &never);
            drop(sending.join().expect("no panic"));
            result
        });
        let error = result.expect_err("it stalls");
        assert!(matches!(error, Error::Stalled { .. }), "{part}: {error}");
        assert!(begun.elapsed() < Duration::from_secs(30));
    }
    let mut receiver = held.receiver(&to);
    take(&mut receiver, &stream).expect("the rest");
    receiver.finish(&never).expect("finish");
    assert_same(&shown(&from), &shown(&to.join("fs")));
}

#[test]
fn frames_that_lie_are_refused_and_leave_no_file() {
    let lab = require_lab!(Fs::Tmpfs);
    let (from, changed) = (lab.dir("from"), lab.dir("changed"));
    for (root, text) in [(&from, "right"), (&changed, "wrong")] {
        fs::write(root.join("f"), text).expect("write");
        fs::write(root.join("g"), "more").expect("write");
        made::times(root, 1, 0);
    }
    let (held, another) = (hold(&lab, &from, "one"), hold(&lab, &changed, "two"));
    let to = lab.dir("to");
    let mut receiver = held.receiver(&to);
    let right = held.send(&[ALL], 1);
    let wrong = another.send(&[ALL], 1);
    let error = take(&mut receiver, &wrong).expect_err("of another layer");
    assert!(error.to_string().contains("another layer"), "{error}");
    // With the right name and the wrong content; with other indices; with another length.
    let mut renamed = wrong.clone();
    renamed[9..41].copy_from_slice(&right[9..41]);
    let error = take(&mut receiver, &renamed).expect_err("not what the table says");
    assert!(
        error.to_string().contains("not what the table says"),
        "{error}"
    );
    for (at, byte) in [
        (41, 1),
        (41, 9),
        (48, 0x80),
        (49, 1),
        (51, 0x40),
        (57, 1),
        (61, 1),
        (8, 1),
    ] {
        let mut lies = right.clone();
        lies[at] ^= byte;
        take(&mut receiver, &lies).expect_err(&format!("byte {at}"));
    }
    for at in 0..right.len() {
        let mut damaged = right.clone();
        damaged[at] ^= 0x10;
        // Some bits of a zstd frame's header mean nothing.
        let _ = take(&mut held.receiver(&lab.dir("damaged")), &damaged);
    }
    assert_eq!(fs::read_dir(to.join("fs")).expect("list").count(), 0);
    take(&mut receiver, &right).expect("take");
    receiver.finish(&never).expect("finish");
    assert_same(&shown(&from), &shown(&to.join("fs")));
    // A receiver's directory belongs to one layer.
    let error = Receiver::open(&open(&to), Arc::clone(&another.table), false, &never);
    error.expect_err("it has another layer");
}

/// A stream that never ends.
struct Endless {
    record: Vec<u8>,
    at: usize,
}

impl Read for Endless {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let rest = &self.record[self.at..];
        let length = rest.len().min(into.len());
        into[..length].copy_from_slice(&rest[..length]);
        self.at = (self.at + length) % self.record.len();
        Ok(length)
    }
}

#[test]
fn a_stream_without_an_end_is_refused_or_stopped() {
    let lab = require_lab!(Fs::Tmpfs);
    let from = lab.dir("from");
    content(&from);
    let held = hold(&lab, &from, "one");
    let moved = AtomicU64::default();
    // Records of a kind that this version does not know, and frames, again and again.
    let unknown = [
        &0x184D_2A5B_u32.to_le_bytes()[..],
        &1_u32.to_le_bytes(),
        &[200],
    ]
    .concat();
    let mut frames = held.send(&[ALL], 1);
    frames.truncate(frames.len() - 17);
    for (record, why) in [(unknown, "no frames"), (frames, "repeats")] {
        let endless = Endless { record, at: 0 };
        let to = lab.dir(&format!("to-{}", endless.record.len()));
        let taken = held.receiver(&to).take(endless, PATIENT, &moved, &never);
        let error = taken.expect_err("it has no end").to_string();
        assert!(error.contains(why), "{error}");
    }
    // Nothing comes, and the holder lives.
    let (silent, _holder) = UnixStream::pair().expect("a pair");
    silent
        .set_read_timeout(Some(Duration::from_millis(100)))
        .expect("a timeout");
    let mut receiver = held.receiver(&lab.dir("silent"));
    let patience = Patience(Duration::from_secs(1));
    let stopped = receiver.take(silent, patience, &moved, &|| true);
    assert!(matches!(stopped, Err(Error::Stopped)), "{stopped:?}");
}

#[test]
fn a_holder_that_is_filling_sends_what_it_has() {
    let lab = require_lab!(Fs::Tmpfs);
    let from = lab.dir("from");
    content(&from);
    let held = hold(&lab, &from, "one");
    let (near, far) = (lab.dir("near"), lab.dir("far"));
    let mut filling = held.receiver(&near);
    let half = Want::Files {
        first: 0,
        count: held.table.files() / 2,
    };
    take(&mut filling, &held.send(&[half], 1)).expect("take");
    let holder = Holder::new(Arc::clone(&held.table), &open(&near.join("fs"))).expect("holder");
    let mut out = Vec::new();
    let all = held.bounded(ALL);
    let mut has = |piece| filling.has(piece);
    holder
        .send(&[all], &mut out, Packing::at(1), &mut has, &never)
        .expect("send");
    let mut receiver = held.receiver(&far);
    assert!(take(&mut receiver, &out).expect("take") > 0);
    let wants = receiver.missing(1000).expect("missing");
    assert!(!wants.is_empty());
    take(&mut receiver, &held.send(&wants, 1)).expect("take");
    receiver.finish(&never).expect("finish");
    assert_same(&shown(&from), &shown(&far.join("fs")));
}

#[test]
fn a_stream_is_zstd_and_its_table_travels_in_it() {
    let lab = require_lab!(Fs::Tmpfs);
    let from = lab.dir("from");
    content(&from);
    let held = hold(&lab, &from, "one");
    let mut stream = held.holder.offer().encode();
    held.holder.send_table(&mut stream).expect("table");
    stream.extend(held.send(&[ALL], 1));
    let mut plain = Vec::new();
    let mut decoder = zstd::Decoder::new(&stream[..]).expect("zstd");
    decoder.read_to_end(&mut plain).expect("it is zstd");
    assert_eq!(plain.len() as u64, held.table.bytes());
    let mut receiver = held.receiver(&lab.dir("to"));
    take(&mut receiver, &stream).expect("take");
    receiver.finish(&never).expect("finish");
}

#[test]
fn tables_that_lie_are_refused() {
    let lab = require_lab!(Fs::Tmpfs);
    let from = lab.dir("from");
    odd(&from);
    fs::create_dir(from.join("d")).expect("mkdir");
    open(&from).make_node("gone", 0o020_000, 0).expect("mknod");
    set(&from.join("d"), "trusted.overlay.opaque", b"y");
    let (path, scanned) = scanned(&lab, &from, "table");
    let bytes = fs::read(&path).expect("read");
    table(&lab, &path, Some([7; 32])).expect_err("another digest");
    let twin = lab.dir("tables").join("twin");
    let mut accepted = 0;
    for at in 0..bytes.len() {
        let mut damaged = bytes.clone();
        damaged[at] ^= 1 << (at % 8);
        fs::write(&twin, &damaged).expect("write");
        // With the digest it is always found; without it the form is.
        table(&lab, &twin, Some(scanned.digest.sha256)).expect_err("the digest");
        accepted += u64::from(table(&lab, &twin, None).is_ok());
        if at % 13 == 0 {
            fs::write(&twin, &bytes[..at]).expect("write");
            table(&lab, &twin, None).expect_err("it is cut");
        }
    }
    assert!(accepted > 0, "attributes may be any bytes");
    fs::write(&twin, [&bytes[..], b"\0"].concat()).expect("write");
    table(&lab, &twin, None).expect_err("something follows");
    let limited = |change: &dyn Fn(&mut Limits)| {
        let mut limits = Limits::default();
        change(&mut limits);
        let file = File::open(&path).expect("open");
        Table::open(file, None, &open(&lab.dir("temporary")), limits, &never)
    };
    limited(&|limits| limits.entries = 3).expect_err("entries");
    limited(&|limits| limits.bytes = 3).expect_err("bytes");
    limited(&|limits| limits.path = 3).expect_err("path");
    let into = File::create(lab.dir("tables").join("short")).expect("create");
    Table::receive(&bytes[..], &into, 100, &never).expect_err("longer than was said");
    Table::receive(&bytes[..], &into, bytes.len() as u64, &never).expect("receive");
}

/// A file of one hole.
fn hole(path: &Path, size: u64) {
    let file = File::create(path).expect("create");
    file.set_len(size).expect("truncate");
}

#[test]
fn holes_that_would_make_a_huge_table_are_refused_before_it_grows() {
    let lab = require_lab!(Fs::Xfs);
    let gib = 1 << 30;
    let layers: [(&str, &[u64]); 3] = [
        ("an exabyte", &[7 << 60]),
        ("more than a reader takes", &[1025 * gib]),
        ("many", &[200 * gib, 200 * gib, 200 * gib]),
    ];
    for (name, sizes) in layers {
        let from = lab.dir(name);
        for (number, size) in sizes.iter().enumerate() {
            hole(&from.join(format!("{number}")), *size);
        }
        let (path, refused) = try_scan(&lab, &from, name, &never);
        let error = refused.expect_err("it is refused");
        assert!(matches!(error, Error::Unpackable { .. }), "{name}: {error}");
        let table = fs::metadata(&path).expect("stat").len();
        assert!(table <= 5 << 20, "{name}: {table} bytes were written");
    }
    // What is below the limits has a table, and arrives.
    let from = lab.dir("large");
    hole(&from.join("image"), 500 * gib);
    let file = File::options().write(true).open(from.join("image"));
    let file = file.expect("open");
    file.write_all_at(b"data", 300 * gib).expect("write");
    let held = hold(&lab, &from, "large");
    let to = lab.dir("to");
    held.receive(&to);
    let image = File::open(to.join("fs/image")).expect("open");
    let mut there = [0; 4];
    image.read_exact_at(&mut there, 300 * gib).expect("read");
    assert_eq!(&there, b"data");
    assert_eq!(image.metadata().expect("stat").len(), 500 * gib);
}

/// As an archive, which is thrown away.
fn packed(lab: &Lab, from: &Path) -> Result<Packed, Error> {
    let how = Pack {
        codec: Codec::Plain,
        devices: false,
        hashing: Hashing::Both,
        temporary: &open(&lab.dir("temporary")),
    };
    archive::pack(&open(from), Vec::new(), how, &Progress::default(), &never)
}

#[test]
fn attributes_that_no_reader_takes_have_no_table_and_no_archive() {
    let lab = require_lab!(Fs::Xfs);
    let long = "n".repeat(240);
    // A name for each number, how many there are, and the length of each value.
    let cases: [(&str, &str, usize, usize); 4] = [
        ("as many as readers take", "", 1024, 1),
        ("one too many", "", 1025, 1),
        ("too many bytes", "", 20, 60_000),
        ("more names than the kernel lists", &long, 400, 1),
    ];
    for (case, name, count, length) in cases {
        let from = lab.dir(case);
        fs::write(from.join("file"), "x").expect("write");
        for number in 0..count {
            let name = format!("user.{name}{number}");
            set(&from.join("file"), &name, &vec![b'v'; length]);
        }
        let (path, scanned) = try_scan(&lab, &from, case, &never);
        let packed = packed(&lab, &from);
        if count == 1024 {
            scanned.expect("it has a table");
            table(&lab, &path, None).expect("which readers take");
            packed.expect("and an archive");
            continue;
        }
        for error in [scanned.err(), packed.err()] {
            let error = error.expect("it is refused");
            let is_told = error.to_string().contains("attributes");
            let is_final = matches!(&error, Error::Unpackable { path, .. } if path == "file");
            assert!(is_final && is_told, "{case}: {error}");
        }
    }
}

/// It never will have one: an attempt must not read what lies before the path again and again.
#[test]
fn a_path_that_no_reader_takes_has_no_table_and_no_archive() {
    let lab = require_lab!(Fs::Tmpfs);
    let from = lab.dir("from");
    made::deep(&from, 33_000);
    let (_, scanned) = try_scan(&lab, &from, "table", &never);
    let packed = packed(&lab, &from);
    for error in [scanned.err(), packed.err()] {
        let error = error.expect("it is refused");
        let is_told = error.to_string().contains("its path is too long");
        assert!(
            matches!(error, Error::Unpackable { .. }) && is_told,
            "{error}"
        );
    }
}

#[test]
fn a_scan_of_a_hole_can_be_stopped() {
    let lab = require_lab!(Fs::Xfs);
    let from = lab.dir("from");
    hole(&from.join("image"), 500 << 30);
    let asked = Cell::new(0);
    let stop = || {
        asked.set(asked.get() + 1);
        asked.get() > 1000
    };
    let (_, stopped) = try_scan(&lab, &from, "table", &stop);
    let error = stopped.expect_err("it is stopped");
    assert!(matches!(error, Error::Stopped), "{error}");
    assert_eq!(asked.get(), 1001);
}

#[test]
fn many_entries_and_deep_ones() {
    let lab = require_lab!(Fs::Tmpfs);
    let from = lab.dir("from");
    made::deep(&from, 3_000);
    made::files(&from, 5_000);
    let held = hold(&lab, &from, "one");
    let to = lab.dir("to");
    let mut receiver = held.receiver(&to);
    // Here and there, so that the table is read from many of its marks.
    let files = held.table.files();
    for number in 0..files {
        let first = number * 2_003 % files;
        take(
            &mut receiver,
            &held.send(&[Want::Files { first, count: 1 }], 1),
        )
        .expect("take");
    }
    assert_eq!(receiver.missing(1).expect("missing"), []);
    receiver.finish(&never).expect("finish");
    assert_eq!(
        hold(&lab, &to.join("fs"), "two").table.digest(),
        held.table.digest()
    );
}

/// Changes some bytes of what is no tar stream.
fn damage(bytes: &mut Vec<u8>, random: &mut Random) {
    for _ in 0..=random.below(3) {
        let at = random.below(bytes.len());
        match random.below(6) {
            0 => bytes.truncate(at + 1),
            1 => {
                let from = random.below(bytes.len());
                let length = random.below(64).min(bytes.len() - from.max(at));
                bytes.copy_within(from..from + length, at);
            }
            2 => bytes[at] = 0,
            3 => bytes[at] = 0xff,
            _ => bytes[at] ^= 1 << random.below(8),
        }
    }
}

#[test]
fn damaged_tables_and_streams_never_panic_and_never_leave_the_directory() {
    let (duration, mut random) = mutation();
    let lab = require_lab!(Fs::Tmpfs);
    let place = lab.dir("place");
    fs::create_dir(place.join("outside")).expect("mkdir");
    fs::write(place.join("outside/precious"), "as it was").expect("write");
    let before = Snapshot::of(&place.join("outside"));
    let from = lab.dir("from");
    fs::create_dir(from.join("d")).expect("mkdir");
    fs::write(from.join("d/file"), "content").expect("write");
    set(&from.join("d/file"), "user.x", b"y");
    fs::hard_link(from.join("d/file"), from.join("link")).expect("link");
    symlink("../outside", from.join("symlink")).expect("symlink");
    open(&from).make_node("gone", 0o020_000, 0).expect("mknod");
    let held = hold(&lab, &from, "table");
    let right = fs::read(lab.dir("tables").join("table")).expect("read");
    let stream = held.send(&[ALL], 1);
    let twin = lab.dir("tables").join("twin");
    let (mut tables, mut layers, mut tries) = (0, 0, 0);
    let begun = Instant::now();
    while begun.elapsed() < duration {
        tries += 1;
        let (mut bytes, mut stream) = (right.clone(), stream.clone());
        if random.below(4) > 0 {
            damage(&mut bytes, &mut random);
        }
        fs::write(&twin, &bytes).expect("write");
        // As if a holder had named the table that it sends.
        let Ok(table) = table(&lab, &twin, None) else {
            continue;
        };
        tables += 1;
        let name = table.digest().sha256;
        stream[9..41].copy_from_slice(&name);
        if random.below(2) == 0 {
            damage(&mut stream, &mut random);
        }
        let to = place.join("to");
        fs::create_dir(&to).expect("mkdir");
        if let Ok(mut receiver) = Receiver::open(&open(&to), table, true, &never) {
            let taken = take(&mut receiver, &stream).is_ok();
            layers += u64::from(receiver.finish(&never).is_ok() && taken);
        }
        fs::remove_dir_all(&to).expect("remove");
        assert_eq!(fs::read_dir(&place).expect("list").count(), 1);
    }
    assert_same(&before, &Snapshot::of(&place.join("outside")));
    let some = tables > layers && layers > 0 && tables < tries;
    assert!(
        some && tries > 100,
        "{layers} layers, {tables} tables, {tries} tries"
    );
}
