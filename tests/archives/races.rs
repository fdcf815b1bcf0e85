//! A tree that changes while it is packed or unpacked, and randomly damaged archives. The driver
//! never reads or writes outside the tree, and never panics.

use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use baggageclaim::archive::{self, Codec, Error, LayerMarks, Progress, Unpack};
use rustix::fs::{CWD, RenameFlags};
use sha2::{Digest as _, Sha256};

use crate::common::{Fs, Snapshot, assert_same, require_lab};
use crate::tar::Tar;
use crate::transfer::{hold, try_scan};
use crate::{CODECS, open, pack, unpack};

/// How many exchanges there are while packing, and as many while unpacking.
const SWAPS: u64 = 100_000;

/// Exchanges two names again and again while something is done, until it was done often enough and
/// so were they.
fn swapping(one: &Path, other: &Path, least: u64, mut act: impl FnMut()) {
    let (stop, swaps) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                rustix::fs::renameat_with(CWD, one, CWD, other, RenameFlags::EXCHANGE)
                    .expect("exchange");
                swaps.fetch_add(1, Ordering::Relaxed);
            }
        });
        let mut acts = 0;
        while acts < least || swaps.load(Ordering::Relaxed) < SWAPS {
            act();
            acts += 1;
        }
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn swaps_of_directories_and_symlinks_lead_nowhere() {
    let lab = require_lab!(Fs::Ext4);
    let place = lab.dir("place");
    let (from, outside) = (place.join("from"), place.join("outside"));
    fs::create_dir_all(from.join("d/e")).expect("mkdir");
    fs::create_dir_all(outside.join("e")).expect("mkdir");
    for number in 0..20 {
        fs::write(from.join(format!("d/e/{number}")), "inside").expect("write");
        fs::write(outside.join(format!("e/{number}")), "SECRET").expect("write");
    }
    symlink("../outside", from.join("s")).expect("symlink");
    let mut packs = 0;
    swapping(&from.join("d"), &from.join("s"), 100, || {
        // It may find its directory moved, and say so; it never packs what is outside.
        if let Ok((bytes, _)) = pack(&lab, &from, Codec::Plain, false) {
            let secret = bytes.windows(6).any(|bytes| bytes == b"SECRET");
            assert!(!secret, "it went outside");
            packs += 1;
        }
    });
    assert!(packs > 0, "none succeeded");

    let before = Snapshot::of(&outside);
    let to = place.join("to");
    fs::create_dir_all(to.join("d/e")).expect("mkdir");
    symlink("../outside", to.join("s")).expect("symlink");
    let mut tar = Tar::new();
    for number in 0..200 {
        tar = tar
            .file(&format!("d/e/{number}"), b"inside")
            .file("f", b"")
            .symlink(&format!("d/{number}"), "x")
            .hard(&format!("d/e/h{number}"), "f");
    }
    let bytes = tar.end();
    swapping(&to.join("d"), &to.join("s"), 20, || {
        let _ = unpack(&bytes, &to, false);
    });
    assert_same(&before, &Snapshot::of(&outside));
}

#[test]
fn swaps_while_a_table_is_made_lead_nowhere() {
    let lab = require_lab!(Fs::Ext4);
    let place = lab.dir("place");
    let (from, outside) = (place.join("from"), place.join("outside"));
    fs::create_dir_all(from.join("d/e")).expect("mkdir");
    fs::create_dir_all(outside.join("e")).expect("mkdir");
    for number in 0..20 {
        fs::write(from.join(format!("d/e/{number}")), "inside").expect("write");
        fs::write(outside.join(format!("e/{number}")), "SECRET").expect("write");
    }
    fs::write(outside.join("e/a secret name"), "").expect("write");
    symlink("../outside", from.join("s")).expect("symlink");
    let secret: [u8; 32] = Sha256::digest("SECRET").into();
    let inside: [u8; 32] = Sha256::digest("inside").into();
    let has = |bytes: &[u8], part: &[u8]| bytes.windows(part.len()).any(|there| there == part);
    let (mut tables, mut seen) = (0, 0);
    swapping(&from.join("d"), &from.join("s"), 300, || {
        // It may find its directory moved, and say so; it never lists what is outside.
        let (path, scanned) = try_scan(&lab, &from, "table", &|| false);
        let table = fs::read(&path).expect("read");
        fs::remove_file(&path).expect("remove");
        assert!(!has(&table, &secret), "it read outside");
        assert!(!has(&table, b"a secret name"), "it listed what is outside");
        tables += u64::from(scanned.is_ok());
        seen += u64::from(has(&table, &inside));
    });
    println!("{tables} tables, {seen} with content");
    // How many of these scans see a directory is chance; without swaps one sees all.
    let (path, scanned) = try_scan(&lab, &from, "table", &|| false);
    scanned.expect("scan");
    assert!(has(&fs::read(&path).expect("read"), &inside));
}

#[test]
fn swaps_while_a_layer_is_received_lead_nowhere() {
    let lab = require_lab!(Fs::Ext4);
    let from = lab.dir("from");
    fs::create_dir_all(from.join("d/e/deep")).expect("mkdir");
    crate::trips::set(&from.join("d/e"), "user.note", b"x");
    for number in 0..50 {
        fs::write(from.join(format!("d/e/{number}")), "inside").expect("write");
        fs::hard_link(from.join("d/e/0"), from.join(format!("d/h{number}"))).expect("link");
        symlink("x", from.join(format!("d/e/s{number}"))).expect("symlink");
    }
    open(&from.join("d"))
        .make_node("gone", 0o020_000, 0)
        .expect("mknod");
    let held = hold(&lab, &from, "table");

    let place = lab.dir("place");
    let outside = place.join("outside");
    fs::create_dir_all(outside.join("e/deep")).expect("mkdir");
    for name in ["0", "1", "s0"] {
        fs::write(outside.join("e").join(name), "as it was").expect("write");
    }
    fs::write(outside.join("h0"), "as it was").expect("write");
    let before = Snapshot::of(&outside);
    let to = place.join("to");
    fs::create_dir_all(to.join("fs/d")).expect("mkdir");
    // It has the names of the directory that it takes the place of.
    symlink("../../outside", to.join("fs/s")).expect("symlink");
    let whole = std::cell::Cell::new(0);
    swapping(&to.join("fs/d"), &to.join("fs/s"), 300, || {
        // A receiver that has forgotten what it verified makes every name again.
        match fs::remove_file(to.join("done")) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => panic!("{error}"),
            _ => {}
        }
        whole.set(whole.get() + u64::from(held.try_receive(&to).is_ok()));
    });
    assert_same(&before, &Snapshot::of(&outside));
    let made = [to.join("fs/d/e/0"), to.join("fs/s/e/0")];
    assert!(made.iter().any(|path| path.exists()), "nothing was made");
    println!("{} layers were received", whole.get());
    // How many of these come to their end is chance; without swaps one does.
    held.try_receive(&lab.dir("quiet")).expect("receive");
}

#[test]
fn a_file_that_shrinks_while_it_is_packed_fails_the_stream() {
    use std::sync::mpsc;
    /// Shortens the file once some of it has come out, when the packer waits for room.
    struct Shortens(Vec<u8>, Option<mpsc::SyncSender<()>>, mpsc::Receiver<()>);
    impl std::io::Write for Shortens {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            if self.0.is_empty()
                && let Some(sender) = self.1.take()
            {
                sender.send(()).expect("it is waited for");
                self.2.recv().expect("it is shorter");
            }
            self.0.extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let lab = require_lab!(Fs::Ext4);
    let (from, temporary) = (lab.dir("from"), open(&lab.dir("temporary")));
    for holes in [false, true] {
        let path = from.join("file");
        let mut content = vec![7; 16 << 20];
        if holes {
            content[8 << 20..].fill(0);
            content[0] = 1;
        }
        fs::write(&path, &content).expect("write");
        let (begun, begins) = mpsc::sync_channel(0);
        let (done, is_done) = mpsc::sync_channel(0);
        let mut out = Shortens(Vec::new(), Some(begun), is_done);
        let result = std::thread::scope(|scope| {
            let path = &path;
            scope.spawn(move || {
                begins.recv().expect("it begins");
                let file = fs::OpenOptions::new().write(true).open(path).expect("open");
                file.set_len(if holes { 12 << 20 } else { 1 << 20 })
                    .expect("truncate");
                done.send(()).expect("it is waited for");
            });
            let how = baggageclaim::archive::Pack {
                codec: Codec::Plain,
                devices: false,
                hashing: baggageclaim::archive::Hashing::None,
                temporary: &temporary,
            };
            let progress = baggageclaim::archive::Progress::default();
            baggageclaim::archive::pack(&open(&from), &mut out, how, &progress, &|| false)
        });
        let error = result.expect_err("it has shrunk");
        assert!(
            matches!(&error, Error::Shrunk { path } if path == "file"),
            "{error}"
        );
        let error = unpack(&out.0, &lab.dir("to"), false).expect_err("it has no end");
        assert!(matches!(error, Error::Truncated { .. }), "{error}");
    }
}

/// How long damaged input is tried, and the seed, which is printed: with it a run can be repeated.
#[expect(
    clippy::print_stdout,
    reason = "a test that fails shows what it printed"
)]
pub(crate) fn mutation() -> (Duration, Random) {
    let number = |name: &str| std::env::var_os(name)?.to_str()?.parse::<u64>().ok();
    let seconds = number("BAGGAGECLAIM_MUTATION_SECONDS").unwrap_or(30);
    let seed = number("BAGGAGECLAIM_MUTATION_SEED");
    let seed = seed.unwrap_or_else(|| u64::from(std::process::id()) << 20 | 1);
    println!("BAGGAGECLAIM_MUTATION_SEED={seed}");
    (Duration::from_secs(seconds), Random(seed | 1))
}

/// xorshift64*.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub(crate) fn below(&mut self, most: usize) -> usize {
        usize::try_from(self.next() % most as u64).expect("it is small")
    }
}

/// Changes some bytes; most of the time inside a header, whose checksum is then made right.
pub(crate) fn mutate(bytes: &mut Vec<u8>, random: &mut Random) {
    for _ in 0..=random.below(4) {
        match random.below(8) {
            0 => bytes.truncate(random.below(bytes.len()) + 1),
            1 => {
                let (from, to) = (random.below(bytes.len()), random.below(bytes.len()));
                let length = random.below(1024).min(bytes.len() - from.max(to));
                bytes.copy_within(from..from + length, to);
            }
            2 => {
                let at = random.below(bytes.len() / 512 + 1) * 512;
                let block = vec![0; 512];
                bytes.splice(at.min(bytes.len())..at.min(bytes.len()), block);
            }
            _ => {
                let at = random.below(bytes.len());
                let byte = random.next().to_le_bytes()[3];
                bytes[at] = match random.below(3) {
                    0 => byte,
                    1 => b'0' + byte % 10,
                    _ => bytes[at] ^ (1 << (byte % 8)),
                };
                let block = at / 512 * 512;
                if let Some(block) = bytes.get_mut(block..block + 512)
                    && block[257..262] == *b"ustar"
                {
                    crate::tar::seal(block);
                }
            }
        }
    }
}

#[test]
#[expect(clippy::too_many_lines, reason = "one scenario, told in order")]
fn damaged_archives_never_panic_and_never_leave_the_tree() {
    let (duration, mut random) = mutation();
    let lab = require_lab!(Fs::Tmpfs);
    let place = lab.dir("place");
    fs::create_dir(place.join("outside")).expect("mkdir");
    fs::write(place.join("outside/precious"), "as it was").expect("write");
    let before = Snapshot::of(&place.join("outside"));
    let from = lab.dir("from");
    fs::create_dir(from.join("d")).expect("mkdir");
    fs::write(from.join("d/file"), "content").expect("write");
    crate::trips::set(&from.join("d/file"), "user.x", b"y");
    fs::write(from.join("holes"), [&vec![0; 65_536][..], b"tail"].concat()).expect("write");
    fs::hard_link(from.join("d/file"), from.join("link")).expect("link");
    symlink("../outside", from.join("symlink")).expect("symlink");
    let (own, _) = pack(&lab, &from, Codec::Plain, false).expect("pack");
    let other = Tar::new()
        .special(b'g', &crate::tar::record("comment", b"x"))
        .special(b'L', b"a/long/name\0")
        .file("x", b"content")
        .symlink("s", "../outside")
        .pax(&[
            ("GNU.sparse.map", b"0,2,9,3"),
            ("GNU.sparse.size", b"20"),
            ("SCHILY.acl.access", b"user::rwx,group::r-x,other::r-x"),
        ])
        .file("sparse", b"abcde")
        .hard("h", "sparse")
        .end();
    let layer = Tar::new()
        .pax(&[("BAGGAGECLAIM.layer", b"whiteout")])
        .file("d/file", b"")
        .pax(&[("BAGGAGECLAIM.layer", b"opaque")])
        .dir("o")
        .file("e/.wh.file", b"")
        .file("p/.wh..wh..opq", b"")
        .hard("h", "e/other")
        .end();
    let below = lab.dir("below");
    fs::create_dir(below.join("e")).expect("mkdir");
    fs::write(below.join("e/other"), "below").expect("write");
    symlink("../place/outside", below.join("d")).expect("symlink");
    let below = [open(&below)];
    let (mut whole, mut tries) = (0, 0);
    let begun = Instant::now();
    while begun.elapsed() < duration {
        let mut bytes = [&own, &other, &layer][random.below(3)].clone();
        mutate(&mut bytes, &mut random);
        let codec = CODECS[random.below(3)];
        if codec == Codec::Zstd(1) {
            bytes = zstd::encode_all(&bytes[..], 1).expect("zstd");
            if random.below(4) == 0 {
                mutate(&mut bytes, &mut random);
            }
        }
        let to = place.join("to");
        fs::create_dir(&to).expect("mkdir");
        let marks = [LayerMarks::Records, LayerMarks::Oci][random.below(2)];
        let (how, progress, into) = (Unpack::default(), Progress::default(), open(&to));
        whole += u64::from(match random.below(3) {
            0 => unpack(&bytes, &to, false).is_ok(),
            1 => {
                let bytes = &bytes[..];
                archive::unpack_layer(bytes, &into, &below, marks, how, &progress, &|| false)
                    .is_ok()
            }
            _ => archive::unpack_onto(&bytes[..], &into, marks, how, &progress, &|| false).is_ok(),
        });
        tries += 1;
        fs::remove_dir_all(&to).expect("remove");
        assert_eq!(fs::read_dir(&place).expect("list").count(), 1);
    }
    assert_same(&before, &Snapshot::of(&place.join("outside")));
    assert_eq!(
        fs::metadata(place.join("outside/precious"))
            .expect("stat")
            .nlink(),
        1
    );
    assert!(
        tries > 100 && whole > 0 && whole < tries,
        "{whole} of {tries} were whole"
    );
}
