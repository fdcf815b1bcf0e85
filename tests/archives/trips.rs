//! Round trips: unpacked content equals packed content, byte for byte, on every filesystem and with
//! every codec. `peers` and `bad` check the streams themselves.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, lchown, symlink};
use std::path::Path;

use baggageclaim::archive::{self, Codec, Error, Hashing, Pack, Progress, Unpack};
use baggageclaim::sys::Errno;
use rustix::fs::XattrFlags;
use sha2::{Digest as _, Sha256};

use crate::common::{Fs, Lab, Snapshot, assert_same, require_lab, skip, tree};
use crate::{CODECS, found, kept, pack, unpack};

/// An ACL: what the owner, user 1000, the group, all (a mask) and the others may.
pub(crate) fn acl(entries: &[(u16, u16, u32)]) -> Vec<u8> {
    let mut value = 2_u32.to_le_bytes().to_vec();
    for (tag, bits, id) in entries {
        value.extend_from_slice(&tag.to_le_bytes());
        value.extend_from_slice(&bits.to_le_bytes());
        value.extend_from_slice(&id.to_le_bytes());
    }
    value
}

const NOBODY: u32 = u32::MAX;

pub(crate) fn set(path: &Path, name: &str, value: &[u8]) {
    rustix::fs::lsetxattr(path, name, value, XattrFlags::empty())
        .unwrap_or_else(|error| panic!("{name} of {}: {error}", path.display()));
}

/// `tree::odd`, and what only archives care for: ACLs, holes of all kinds, long paths, FIFOs and
/// symlinks with two names.
pub(crate) fn odd(root: &Path) {
    tree::odd(root);
    let file = root.join("shared");
    fs::write(&file, "by an ACL").expect("write");
    fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).expect("chmod");
    let access = acl(&[
        (1, 6, NOBODY),
        (2, 4, 54_321),
        (4, 4, NOBODY),
        (8, 6, 4_000_000_000),
        (0x10, 4, NOBODY),
        (0x20, 0, NOBODY),
    ]);
    set(&file, "system.posix_acl_access", &access);
    let dir = root.join("inherits");
    fs::create_dir(&dir).expect("mkdir");
    fs::write(dir.join("plain"), "made before the ACL").expect("write");
    fs::create_dir(dir.join("below")).expect("mkdir");
    set(&dir, "system.posix_acl_default", &access);
    tree::times(&dir, 1_111_111_111, 5);

    let holes = File::create(root.join("holes")).expect("create");
    for at in [0, 200_000, 1 << 20, (1 << 20) + 65_536, 5 << 20] {
        holes.write_all_at(b"data", at).expect("write");
    }
    holes.set_len(7 << 20).expect("truncate");
    let empty = File::create(root.join("only a hole")).expect("create");
    empty.set_len(1 << 20).expect("truncate");
    fs::write(root.join("only zeros"), vec![0; 300_000]).expect("write");
    fs::hard_link(root.join("holes"), root.join("holes too")).expect("link");
    fs::hard_link(root.join("dangling"), root.join("dangling too")).expect("link");
    fs::hard_link(root.join("fifo"), root.join("fifo too")).expect("link");

    let mut long = root.to_owned();
    for level in 0..6 {
        long.push(format!("{level}{}", "y".repeat(90)));
        fs::create_dir(&long).expect("mkdir");
    }
    fs::write(long.join("deep"), "far down").expect("write");
    symlink("z".repeat(500), root.join("far")).expect("symlink");
    let old = root.join("old");
    fs::write(&old, "before 1970").expect("write");
    tree::times(&old, -2, 500_000_000);
    tree::times(root, 1_234_567_890, 987_654_321);
}

#[test]
fn the_documents_test_vector() {
    let lab = require_lab!(Fs::Tmpfs);
    let root = lab.dir("tree");
    let at = |name: &str| root.join(name);
    let look = |name: &str, mode, owner: (u32, u32), time: (i64, i64)| {
        lchown(at(name), Some(owner.0), Some(owner.1)).expect("chown");
        fs::set_permissions(at(name), fs::Permissions::from_mode(mode)).expect("chmod");
        tree::times(&at(name), time.0, time.1);
    };
    fs::create_dir(at("a")).expect("mkdir");
    fs::write(at("a/hello"), "hello\n").expect("write");
    symlink("hello", at("a/link")).expect("symlink");
    fs::hard_link(at("a/hello"), at("b")).expect("link");
    fs::write(at("holes"), [&vec![0; 65_536][..], b"tail"].concat()).expect("write");
    fs::write(at("z"), "").expect("write");
    look("a/hello", 0o644, (1000, 100), (1_000_000_000, 500_000_000));
    look("holes", 0o600, (0, 0), (1_000_000_000, 0));
    set(&at("z"), "user.note", b"x\ny");
    look("z", 0o640, (4_000_000_000, 0), (-2, 500_000_000));
    let access = acl(&[
        (1, 6, NOBODY),
        (2, 4, 1000),
        (4, 4, NOBODY),
        (0x10, 4, NOBODY),
        (0x20, 0, NOBODY),
    ]);
    set(&at("z"), "system.posix_acl_access", &access);
    tree::times(&at("a/link"), 1_000_000_000, 0);
    look("a", 0o750, (0, 0), (1_000_000_000, 0));
    look(".", 0o755, (0, 0), (0, 0));
    let (bytes, packed) = pack(&lab, &root, Codec::Plain, false).expect("pack");
    let page = include_str!("../../docs/archives.md");
    let digest = packed
        .digests
        .plain
        .digest()
        .expect("it was asked for")
        .to_string();
    assert_eq!(bytes.len(), 10_240);
    assert!(page.contains(&format!("`{}`", &digest[7..])), "{digest}");
    assert_eq!(packed.digests.packed, packed.digests.plain);
}

#[test]
fn what_is_unpacked_is_what_was_packed() {
    for fs in [Fs::Ext4, Fs::Xfs, Fs::Btrfs, Fs::Tmpfs] {
        let lab = require_lab!(fs);
        let (from, temporary) = (lab.dir("from"), lab.dir("temporary"));
        odd(&from);
        let before = Snapshot::of(&from);
        for codec in CODECS {
            for devices in [false, true] {
                let (bytes, packed) = pack(&lab, &from, codec, devices).expect("pack");
                let to = lab.dir(&format!("{codec:?}-{devices}"));
                let unpacked = unpack(&bytes, &to, devices).expect("unpack");
                assert_same(&kept(before.clone(), devices), &found(&to));
                assert_eq!(unpacked.digests, packed.digests);
                let sha: [u8; 32] = Sha256::digest(&bytes).into();
                assert_eq!(packed.digests.packed.sha256, Some(sha));
                assert_eq!(packed.counts.sockets_left_out, 1);
                assert_eq!(packed.counts.attributes_left_out, 1);
                assert_eq!(packed.counts.devices_left_out, if devices { 0 } else { 2 });
                assert_eq!(unpacked.made.files, packed.counts.files);
                assert_eq!(unpacked.made.directories, packed.counts.directories);
                assert_eq!(unpacked.made.bytes, packed.counts.bytes);
                for (name, most) in [("sparse", 256), ("holes", 1280), ("only a hole", 16)] {
                    let blocks = fs::metadata(to.join(name)).expect("stat").blocks();
                    assert!(blocks <= most, "{fs:?}: {name} has {blocks} blocks");
                }
            }
        }
        assert_same(&before, &Snapshot::of(&from));
        assert_eq!(fs::read_dir(temporary).expect("list").count(), 0);
    }
}

#[test]
fn only_the_digests_that_are_asked_for_are_computed() {
    let lab = require_lab!(Fs::Tmpfs);
    let (from, temporary) = (lab.dir("from"), lab.dir("temporary"));
    odd(&from);
    for codec in CODECS {
        let (all, packed) = pack(&lab, &from, codec, false).expect("pack");
        let whole = packed.digests;
        assert!(whole.plain.sha256.is_some() && whole.packed.sha256.is_some());
        for hashing in [Hashing::None, Hashing::Plain, Hashing::Both] {
            let how = Pack {
                codec,
                devices: false,
                hashing,
                temporary: &crate::open(&temporary),
            };
            let (root, progress) = (crate::open(&from), Progress::default());
            let mut bytes = Vec::new();
            let packed = archive::pack(&root, &mut bytes, how, &progress, &|| false);
            assert!(bytes == all, "{codec:?} {hashing:?}");
            let how = Unpack {
                hashing,
                ..Unpack::default()
            };
            let to = crate::open(&lab.dir(&format!("{codec:?}-{hashing:?}")));
            let unpacked = archive::unpack(&bytes[..], &to, how, &progress, &|| false);
            let ends = [
                packed.expect("pack").digests,
                unpacked.expect("unpack").digests,
            ];
            for digests in ends {
                // Of what is not compressed both are one.
                let is_one = codec == Codec::Plain && hashing == Hashing::Plain;
                for (stream, whole, is_known) in [
                    (digests.plain, whole.plain, hashing != Hashing::None),
                    (
                        digests.packed,
                        whole.packed,
                        hashing == Hashing::Both || is_one,
                    ),
                ] {
                    assert_eq!(stream.bytes, whole.bytes, "{codec:?} {hashing:?}");
                    let expected = whole.sha256.filter(|_| is_known);
                    assert_eq!(stream.sha256, expected, "{codec:?} {hashing:?}");
                }
            }
        }
    }
}

#[test]
fn the_same_content_is_the_same_bytes_everywhere() {
    let mut first = None;
    for fs in [Fs::Ext4, Fs::Xfs, Fs::XfsReflink, Fs::Btrfs, Fs::Tmpfs] {
        let lab = require_lab!(fs);
        let from = lab.dir("from");
        odd(&from);
        // Made now, where the others have times of their own.
        let fixed = Snapshot::of(&from);
        for path in fixed.entries.keys().rev() {
            tree::times(&from.join(OsStr::from_bytes(path)), 1_000_000_000, 1);
        }
        let (bytes, packed) = pack(&lab, &from, Codec::Zstd(1), true).expect("pack");
        let (again, _) = pack(&lab, &from, Codec::Zstd(1), true).expect("pack");
        assert!(bytes == again, "{fs:?}: compressed differently");
        let digests = *first.get_or_insert(packed.digests);
        assert_eq!(digests, packed.digests, "{fs:?}");
    }
}

#[test]
fn thousands_of_levels_and_many_names() {
    let lab = require_lab!(Fs::Tmpfs);
    let (from, to) = (lab.dir("from"), lab.dir("to"));
    tree::deep(&from, 10_000);
    fs::create_dir(from.join("wide")).expect("mkdir");
    for number in 0..20_000 {
        fs::write(from.join(format!("wide/{number}")), "").expect("write");
    }
    let (bytes, packed) = pack(&lab, &from, Codec::Zstd(1), false).expect("pack");
    let unpacked = unpack(&bytes, &to, false).expect("unpack");
    assert_eq!(
        (packed.counts.files, packed.counts.directories),
        (20_001, 10_002)
    );
    assert_eq!(unpacked.made.files, 20_001);
    let (again, _) = pack(&lab, &to, Codec::Zstd(1), false).expect("pack");
    assert!(bytes == again);
    // Such a tree cannot be removed by its path, and goes with the lab.
}

#[test]
fn what_is_there_already_stays_or_is_replaced() {
    let lab = require_lab!(Fs::Ext4);
    let (from, to) = (lab.dir("from"), lab.dir("to"));
    odd(&from);
    let (bytes, _) = pack(&lab, &from, Codec::Plain, false).expect("pack");
    fs::write(to.join("own"), "stays").expect("write");
    unpack(&bytes, &to, false).expect("unpack");
    // A second time everything meets itself.
    unpack(&bytes, &to, false).expect("unpack");
    assert_eq!(fs::read_to_string(to.join("own")).expect("read"), "stays");
    fs::remove_file(to.join("own")).expect("remove");
    tree::times(&to, 1_234_567_890, 987_654_321);
    assert_same(&kept(Snapshot::of(&from), false), &Snapshot::of(&to));
}

#[test]
fn an_output_that_fails_and_a_stop_end_a_pack() {
    struct Full(usize);
    impl std::io::Write for Full {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0 = self
                .0
                .checked_sub(bytes.len())
                .ok_or(std::io::ErrorKind::StorageFull)?;
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let lab = require_lab!(Fs::Tmpfs);
    let (from, temporary) = (lab.dir("from"), lab.dir("temporary"));
    fs::write(from.join("large"), vec![7; 8 << 20]).expect("write");
    let temporary = crate::open(&temporary);
    for codec in CODECS {
        let how = baggageclaim::archive::Pack {
            codec,
            devices: false,
            hashing: baggageclaim::archive::Hashing::Both,
            temporary: &temporary,
        };
        let root = crate::open(&from);
        let progress = baggageclaim::archive::Progress::default();
        let result = baggageclaim::archive::pack(&root, Full(100), how, &progress, &|| false);
        assert!(matches!(result, Err(Error::Write(_))), "{result:?}");
        let mut out = Vec::new();
        let result = baggageclaim::archive::pack(&root, &mut out, how, &progress, &|| true);
        assert!(matches!(result, Err(Error::Stopped)), "{result:?}");
        let to = lab.dir(&format!("{codec:?}"));
        unpack(&out, &to, false).expect_err("it has no end");
    }
}

/// Files of both sizes are written by different threads, and both tell what failed.
#[test]
fn a_full_disk_is_the_error_of_an_unpack() {
    for (count, size) in [(400, 64 << 10), (4, 8 << 20)] {
        let mut archive = crate::tar::Tar::new();
        for number in 0..count {
            archive = archive.file(&format!("f{number}"), &vec![7; size]);
        }
        let lab = match Lab::try_sized(Fs::Tmpfs, 4 << 20) {
            Ok(lab) => lab,
            Err(reason) => return skip(&reason),
        };
        let result = unpack(&archive.end(), &lab.dir("to"), false);
        let Err(Error::System(error)) = result else {
            panic!("{result:?}");
        };
        assert!(error.is(Errno::ENOSPC), "{error}");
    }
}

/// A tenant can make a file of any apparent size, which costs nothing.
#[test]
fn a_hole_of_an_exabyte_takes_no_time() {
    let lab = require_lab!(Fs::Xfs);
    let (from, to, size) = (lab.dir("from"), lab.dir("to"), 7 << 60);
    let file = File::create(from.join("hole")).expect("create");
    file.set_len(size).expect("truncate");
    file.write_all_at(b"data", size / 2).expect("write");
    let (bytes, _) = pack(&lab, &from, Codec::Plain, true).expect("pack");
    assert!(bytes.len() < 200 << 10, "{}", bytes.len());
    unpack(&bytes, &to, true).expect("unpack");
    let there = File::open(to.join("hole")).expect("open");
    assert_eq!(there.metadata().expect("stat").len(), size);
    let mut data = [0; 4];
    there.read_exact_at(&mut data, size / 2).expect("read");
    assert_eq!(&data, b"data");
    // What a map has no place for would be written as zeros.
    for number in 0..16_400 {
        file.write_all_at(b"x", number << 17).expect("write");
    }
    let error = pack(&lab, &from, Codec::Plain, true).expect_err("it is refused");
    assert!(matches!(error, Error::Unpackable { .. }), "{error}");
}
