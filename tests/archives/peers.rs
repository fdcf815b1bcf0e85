//! GNU tar, gzip and zstd as the other end, in both directions. Only what they cannot express is
//! not compared: fractions of seconds and attributes.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};

use baggageclaim::archive::Codec;

use crate::common::{Fs, Snapshot, assert_same, require_lab, tree};
use crate::trips::{acl, odd, set};
use crate::{CODECS, kept, pack, unpack};

fn run(command: &mut Command) -> Vec<u8> {
    let output = command.stderr(Stdio::piped()).output().expect("it starts");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{command:?}: {said}");
    output.stdout
}

fn tar() -> Command {
    let mut tar = Command::new("tar");
    tar.args([
        "--acls",
        "--xattrs",
        "--xattrs-include=*",
        "--numeric-owner",
    ]);
    tar
}

#[test]
fn gnu_tar_unpacks_what_was_packed() {
    for fs in [Fs::Ext4, Fs::Btrfs] {
        let lab = require_lab!(fs);
        let from = lab.dir("from");
        odd(&from);
        for (codec, option) in CODECS
            .into_iter()
            .zip(["--no-auto-compress", "-z", "--zstd"])
        {
            let (bytes, _) = pack(&lab, &from, codec, true).expect("pack");
            let archive = lab.dir("archives").join("archive");
            fs::write(&archive, &bytes).expect("write");
            let to = lab.dir(&format!("{codec:?}"));
            run(tar()
                .arg(option)
                .arg("-xpf")
                .arg(&archive)
                .arg("-C")
                .arg(&to));
            assert_same(&kept(Snapshot::of(&from), true), &Snapshot::of(&to));
        }
    }
}

/// GNU tar 1.34 writes the names of users into ACLs, whatever it is told of owners; as attributes
/// it writes numbers.
#[test]
fn acls_of_users_that_have_names_here() {
    let lab = require_lab!(Fs::Ext4);
    let (from, archives) = (lab.dir("from"), lab.dir("archives"));
    fs::write(from.join("f"), "").expect("write");
    let nobody = u32::MAX;
    let value = acl(&[
        (1, 6, nobody),
        (2, 6, 1),
        (4, 4, nobody),
        (0x10, 6, nobody),
        (0x20, 4, nobody),
    ]);
    set(&from.join("f"), "system.posix_acl_access", &value);
    let archive = archives.join("archive");
    let mut tar = Command::new("tar");
    tar.args([
        "--format=posix",
        "--xattrs",
        "--xattrs-include=system.posix_acl_*",
        "-cf",
    ]);
    run(tar.arg(&archive).arg("-C").arg(&from).arg("."));
    let to = lab.dir("to");
    unpack(&fs::read(&archive).expect("read"), &to, false).expect("unpack");
    assert_same(&Snapshot::of(&from), &Snapshot::of(&to));
    // User 1 is called daemon on most machines. Where it has no name it is a number here, too.
    let bytes = pack_by_tar(&from, &archives, &["--format=posix"]);
    if bytes.windows(12).any(|bytes| bytes == b"user:daemon:") {
        let error = unpack(&bytes, &to, false).expect_err("it is refused");
        assert!(error.to_string().contains("gives no number"), "{error}");
    }
}

/// Without what a format cannot say.
fn coarse(mut snapshot: Snapshot, xattrs: bool) -> Snapshot {
    for entry in snapshot.entries.values_mut() {
        entry.mtime.1 = 0;
        if !xattrs {
            entry.xattrs.clear();
        }
    }
    snapshot
}

fn pack_by_tar(from: &Path, to: &Path, arguments: &[&str]) -> Vec<u8> {
    let archive = to.join("archive");
    run(tar()
        .args(arguments)
        .arg("-cf")
        .arg(&archive)
        .arg("-C")
        .arg(from)
        .arg("."));
    fs::read(&archive).expect("read")
}

#[test]
fn what_gnu_tar_packed_is_unpacked() {
    let lab = require_lab!(Fs::Ext4);
    let (from, archives) = (lab.dir("from"), lab.dir("archives"));
    odd(&from);
    // GNU tar does not see that two names are one FIFO.
    fs::remove_file(from.join("fifo too")).expect("remove");
    let exact = kept(Snapshot::of(&from), true);
    for (number, arguments) in [
        &["--format=posix"][..],
        &["--format=posix", "--sparse", "--sparse-version=0.0"],
        &["--format=posix", "--sparse", "--sparse-version=0.1"],
        &["--format=posix", "--sparse", "--sparse-version=1.0"],
        &["--format=posix", "-z"],
        &["--format=posix", "--zstd"],
    ]
    .into_iter()
    .enumerate()
    {
        let bytes = pack_by_tar(&from, &archives, arguments);
        let to = lab.dir(&format!("posix-{number}"));
        unpack(&bytes, &to, true).unwrap_or_else(|error| panic!("{arguments:?}: {error}"));
        assert_same(&exact, &Snapshot::of(&to));
    }
    for (number, arguments) in [
        &["--format=gnu"][..],
        &["--format=gnu", "--sparse"],
        &["--format=oldgnu", "--sparse"],
    ]
    .into_iter()
    .enumerate()
    {
        let archive = archives.join("archive");
        let mut tar = Command::new("tar");
        tar.args(arguments)
            .arg("-cf")
            .arg(&archive)
            .arg("-C")
            .arg(&from);
        run(tar.args(["--numeric-owner", "."]));
        let bytes = fs::read(&archive).expect("read");
        let to = lab.dir(&format!("gnu-{number}"));
        unpack(&bytes, &to, true).unwrap_or_else(|error| panic!("{arguments:?}: {error}"));
        // The time before 1970 is rounded by GNU tar to the second below.
        assert_same(
            &coarse(exact.clone(), false),
            &coarse(Snapshot::of(&to), false),
        );
    }
}

#[test]
fn what_is_older_than_pax_is_unpacked() {
    let lab = require_lab!(Fs::Ext4);
    let (from, archives) = (lab.dir("from"), lab.dir("archives"));
    tree::files(&from, 300);
    fs::create_dir_all(from.join("a".repeat(90)).join("b".repeat(90))).expect("mkdir");
    let before = coarse(Snapshot::of(&from), false);
    for format in ["--format=ustar", "--format=v7"] {
        if format == "--format=v7" {
            // Paths have 99 bytes there.
            fs::remove_dir_all(from.join("a".repeat(90))).expect("remove");
        }
        let archive = archives.join("archive");
        let mut tar = Command::new("tar");
        run(tar
            .arg(format)
            .arg("-cf")
            .arg(&archive)
            .arg("-C")
            .arg(&from)
            .arg("."));
        let to = lab.dir(&format[2..]);
        unpack(&fs::read(&archive).expect("read"), &to, false).expect(format);
        if format == "--format=ustar" {
            assert_same(&before, &coarse(Snapshot::of(&to), false));
        } else {
            assert_same(
                &coarse(Snapshot::of(&from), false),
                &coarse(Snapshot::of(&to), false),
            );
        }
    }
}

#[test]
fn joined_members_and_frames_are_one_stream() {
    let lab = require_lab!(Fs::Tmpfs);
    let (from, parts) = (lab.dir("from"), lab.dir("parts"));
    tree::files(&from, 2000);
    let (plain, packed) = pack(&lab, &from, Codec::Plain, false).expect("pack");
    let squeeze = |program: &str, arguments: &[&str], bytes: &[u8]| {
        let path = parts.join("part");
        fs::write(&path, bytes).expect("write");
        run(Command::new(program)
            .args(arguments)
            .stdin(File::open(&path).expect("open")))
    };
    let skippable = [&[0x53, 0x2a, 0x4d, 0x18, 5, 0, 0, 0][..], b"extra"].concat();
    let halves = plain.split_at(plain.len() / 3);
    let gzip = |bytes: &[u8]| squeeze("gzip", &["-c"], bytes);
    let zstd = |bytes: &[u8]| squeeze("zstd", &["-c", "-q"], bytes);
    let wide = squeeze("zstd", &["-c", "-q", "--long=27", "--ultra", "-20"], &plain);
    for (what, stream) in [
        ("gzip", [gzip(halves.0), gzip(halves.1)].concat()),
        ("gzip and zeros", [gzip(&plain), vec![0; 3000]].concat()),
        ("zstd", [zstd(halves.0), zstd(halves.1)].concat()),
        (
            "skippable",
            [
                skippable.clone(),
                zstd(halves.0),
                skippable.clone(),
                zstd(halves.1),
                skippable.clone(),
            ]
            .concat(),
        ),
        ("wide", wide),
    ] {
        let to = lab.dir(what);
        let unpacked = unpack(&stream, &to, false).unwrap_or_else(|e| panic!("{what}: {e}"));
        assert_eq!(unpacked.digests.plain, packed.digests.plain, "{what}");
        assert_eq!(unpacked.digests.packed.bytes, stream.len() as u64, "{what}");
        assert_same(&Snapshot::of(&from), &Snapshot::of(&to));
    }
    let mut large = vec![0; 300 << 20];
    large[..plain.len()].copy_from_slice(&plain);
    for (what, stream) in [
        ("gzip and more", [gzip(&plain), b"more".to_vec()].concat()),
        ("zstd and more", [zstd(&plain), b"more".to_vec()].concat()),
        ("gzip cut", gzip(&plain)[..1000].to_vec()),
        ("zstd cut", zstd(&plain)[..1000].to_vec()),
        (
            "window",
            squeeze("zstd", &["-c", "-q", "-1", "--long=28"], &large),
        ),
    ] {
        let to = lab.dir(what);
        let error = unpack(&stream, &to, false).expect_err(what);
        assert!(error.to_string().contains("damaged"), "{what}: {error}");
    }
}

/// The streams hold the document's test vector. Go's `s2` wrote them: as fast as it can, as small
/// as it can (with an index and padding), and so that Snappy reads it.
#[test]
fn what_s2_writes_is_read() {
    let lab = require_lab!(Fs::Tmpfs);
    for (name, stream) in [
        ("fast", &include_bytes!("s2-fast.bin")[..]),
        ("best", include_bytes!("s2-best.bin")),
        ("snappy", include_bytes!("snappy.bin")),
    ] {
        let to = lab.dir(name);
        let unpacked = unpack(stream, &to, false).expect(name);
        let digest = unpacked.digests.plain.digest().expect("it was asked for");
        let page = include_str!("../../docs/archives.md");
        assert!(page.contains(&digest.to_string()[7..]), "{name}: {digest}");
        assert_eq!(fs::read_to_string(to.join("b")).expect("read"), "hello\n");
        for at in (10..stream.len()).step_by(7) {
            let mut damaged = stream.to_vec();
            damaged[at] ^= 0x10;
            let to = lab.dir("damaged");
            let same = |unpacked: baggageclaim::archive::Unpacked| {
                // What may be left out may be damaged.
                assert_eq!(
                    unpacked.digests.plain.digest(),
                    Some(digest),
                    "{name} at {at}"
                );
            };
            let _ = unpack(&damaged, &to, false).map(same);
        }
    }
}
