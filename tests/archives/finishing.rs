//! Files whose content and attributes are written by several threads while the archive is read:
//! every byte has its place, and an error of any thread ends all of them.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt as _};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use baggageclaim::archive::{self, Error, Progress, Unpack};
use baggageclaim::sys::Errno;

use crate::common::{Fs, Lab, Snapshot, assert_same, require_lab, skip};
use crate::tar::Tar;
use crate::{CODECS, found, kept, open, pack, unpack};

/// What one buffer between the threads holds. Larger files are written by the thread that reads the
/// archive.
const CHUNK: usize = 256 << 10;

/// Bytes that differ at each place.
fn content(size: usize, seed: usize) -> Vec<u8> {
    let words = (0..size.div_ceil(8)).map(|word| (word * 2_654_435_761 + seed).to_le_bytes());
    let mut bytes: Vec<u8> = words.flatten().collect();
    bytes.truncate(size);
    bytes
}

/// Packs a tree and unpacks it, in each codec: it is the same. Then looks at the new one.
fn comes_back(lab: &Lab, from: &Path, look: impl Fn(&Path)) {
    let before = kept(Snapshot::of(from), false);
    for codec in CODECS {
        let (bytes, _) = pack(lab, from, codec, false).expect("pack");
        let to = lab.dir(&format!("{codec:?}"));
        unpack(&bytes, &to, false).expect("unpack");
        assert_same(&before, &found(&to));
        look(&to);
    }
}

#[test]
fn files_of_all_sizes_keep_every_byte() {
    let lab = require_lab!(Fs::Ext4);
    let from = lab.dir("from");
    let sizes = [
        0,
        1,
        700,
        40_000,
        CHUNK - 1,
        CHUNK,
        CHUNK + 1,
        1 << 20,
        (5 << 20) + 3,
    ];
    for number in 0..400 {
        let size = match number % 8 {
            // Large ones between small ones.
            0 => sizes[number / 8 % sizes.len()],
            small => small * 1111,
        };
        fs::write(from.join(format!("f{number:03}")), content(size, number)).expect("write");
    }
    comes_back(&lab, &from, |_| {});
}

#[test]
fn holes_stay_where_they_are_in_files_of_any_place() {
    let lab = require_lab!(Fs::Ext4);
    let from = lab.dir("from");
    // Data before and behind holes that begin and end beside the ends of buffers, in the file and
    // in the stream.
    let grain = 64 << 10;
    for (number, shift) in [0, grain, 3 * grain].into_iter().enumerate() {
        let small = content(1000 + 512 * number, number);
        fs::write(from.join(format!("{number}a")), small).expect("write");
        let file = File::create(from.join(format!("{number}b"))).expect("create");
        let mut at = shift;
        for (run, length) in [5 * CHUNK, 9 * CHUNK - grain, 6 * CHUNK + grain, grain]
            .into_iter()
            .enumerate()
        {
            let bytes = content(length, run);
            file.write_all_at(&bytes, at as u64).expect("write");
            at += length.next_multiple_of(grain) + grain + run * CHUNK;
        }
        file.set_len(at as u64).expect("truncate");
        let small = content(3000, number);
        fs::write(from.join(format!("{number}c")), small).expect("write");
    }
    comes_back(&lab, &from, |to| {
        for number in 0..3 {
            let name = format!("{number}b");
            let blocks = |root: &Path| fs::metadata(root.join(&name)).expect("stat").blocks();
            assert_eq!(blocks(&from), blocks(to), "{}: {name}", to.display());
        }
    });
}

#[test]
fn what_cannot_be_finished_is_told_with_its_path_and_ends_all() {
    const LAST: usize = 20_000;
    let lab = require_lab!(Fs::Ext4);
    for (wrong, size) in [(3, 10), (500, 10), (500, 3 * CHUNK), (LAST, 10)] {
        let mut tar = Tar::new();
        for number in 0..=LAST {
            if number == wrong {
                // The kernel looks at its form.
                tar = tar.pax(&[("SCHILY.xattr.security.capability", b"none")]);
                tar = tar.file(&format!("f{number}"), &vec![7; size]);
            } else {
                tar = tar.file(&format!("f{number}"), b"small");
            }
        }
        let to = lab.dir(&format!("{wrong} {size}"));
        let result = unpack(&tar.end(), &to, false);
        let Err(Error::System(error)) = result else {
            panic!("{result:?}");
        };
        assert!(error.is(Errno::EINVAL), "{error}");
        let path = to.join(format!("f{wrong}"));
        let path = path.display().to_string();
        assert!(error.to_string().contains(&path), "{error}");
        if wrong < LAST {
            // Some are put aside or in a buffer that was read already.
            assert!(!to.join(format!("f{}", wrong + 2000)).exists());
        }
    }
}

/// Whichever thread meets the full disk.
#[test]
fn a_full_disk_ends_all_threads() {
    for size in [100, 5000, 200_000, CHUNK + 1, 2 << 20] {
        let lab = match Lab::try_sized(Fs::Tmpfs, 4 << 20) {
            Ok(lab) => lab,
            Err(reason) => return skip(&reason),
        };
        let mut tar = Tar::new();
        for number in 0..(6 << 20_usize) / size.max(4096) {
            tar = tar.file(&format!("f{number}"), &content(size, number));
        }
        let result = unpack(&tar.end(), &lab.dir("to"), false);
        let Err(Error::System(error)) = result else {
            panic!("{result:?}");
        };
        assert!(error.is(Errno::ENOSPC), "{error}");
        assert!(error.to_string().contains("/to/f"), "{error}");
    }
}

#[test]
fn a_stop_in_the_middle_ends_all_threads() {
    let lab = require_lab!(Fs::Ext4);
    let mut tar = Tar::new();
    for number in 0..3000 {
        let size = if number % 500 == 7 { 9 * CHUNK } else { 900 };
        tar = tar.file(&format!("f{number}"), &content(size, number));
    }
    let bytes = tar.end();
    for after in [0, 1, 12, 100, 2500] {
        let to = lab.dir(&after.to_string());
        let (asked, progress) = (AtomicUsize::new(0), Progress::default());
        let stop = || asked.fetch_add(1, Ordering::Relaxed) >= after;
        let unpacked = archive::unpack(&*bytes, &open(&to), Unpack::default(), &progress, &stop);
        assert!(matches!(unpacked, Err(Error::Stopped)), "{unpacked:?}");
        assert!(progress.has_failed());
        assert!(progress.entries() <= after as u64);
        assert!(!to.join("f2999").exists());
    }
}
