//! Malicious archives: each is refused, and changes nothing outside the target tree. They cover
//! RUSTSEC-2026-0067 and -0068, GHSA-3pv8-6f4r-ffg2, CVE-2025-62518, CVE-2025-45582 and others.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};

use baggageclaim::archive::{self, Codec, Error, Limits, Progress, Unpack};

use crate::common::{Fs, Lab, Snapshot, assert_same, require_lab};
use crate::tar::{Tar, record};
use crate::{open, pack, unpack};

/// Unpacks beside something precious, which must stay as it is.
fn beside(lab: &Lab, name: &str, bytes: &[u8]) -> archive::Result<Snapshot> {
    let place = lab.dir(name);
    let (to, outside) = (place.join("to"), place.join("outside"));
    fs::create_dir(&to).expect("mkdir");
    fs::create_dir(&outside).expect("mkdir");
    fs::write(outside.join("precious"), "as it was").expect("write");
    fs::set_permissions(&outside, fs::Permissions::from_mode(0o711)).expect("chmod");
    let before = Snapshot::of(&outside);
    let result = unpack(bytes, &to, false);
    assert_same(&before, &Snapshot::of(&outside));
    assert_eq!(fs::read_dir(&place).expect("list").count(), 2, "{name}");
    result.map(|_| Snapshot::of(&to))
}

#[test]
#[expect(clippy::too_many_lines, reason = "it is a list")]
fn what_leads_out_or_goes_through_something_is_refused() {
    let lab = require_lab!(Fs::Ext4);
    let new = Tar::new;
    let long_name = "n".repeat(256);
    let cases = [
        (
            "symlink, then below it",
            new().symlink("a", "../outside").file("a/f", b"x").end(),
        ),
        (
            "absolute symlink, then below it",
            new().symlink("a", "/tmp").file("a/f", b"x").end(),
        ),
        (
            "symlink to symlink",
            new()
                .symlink("a", ".")
                .symlink("a/b", "..")
                .file("a/b/outside/f", b"x")
                .end(),
        ),
        (
            "two symlinks, then below them",
            new()
                .symlink("a", "b")
                .symlink("b", "../outside")
                .file("a/f", b"x")
                .end(),
        ),
        (
            "below a file",
            new().file("a", b"x").file("a/f", b"x").end(),
        ),
        (
            "below a hard link to a file",
            new().file("a", b"x").hard("b", "a").dir("b/c").end(),
        ),
        ("dot dot", new().file("../outside/f", b"x").end()),
        (
            "dot dot inside",
            new().dir("a").file("a/../../outside/f", b"x").end(),
        ),
        ("dot dot only", new().dir("..").end()),
        ("absolute", new().file("/outside/f", b"x").end()),
        ("empty", new().file("", b"x").end()),
        ("slashes", new().dir("//").end()),
        ("root as a file", new().link(b'2', "./", "x").end()),
        ("root as a FIFO", new().link(b'6', ".", "").end()),
        (
            "NUL in pax path",
            new().pax(&[("path", b"a\0b")]).file("a", b"x").end(),
        ),
        (
            "dot dot in pax path",
            new()
                .pax(&[("path", b"../outside/f")])
                .file("a", b"x")
                .end(),
        ),
        (
            "absolute in a long name",
            new().special(b'L', b"/outside/f\0").file("a", b"x").end(),
        ),
        (
            "dot dot in a sparse name",
            new()
                .pax(&[
                    ("GNU.sparse.major", b"0"),
                    ("GNU.sparse.minor", b"1"),
                    ("GNU.sparse.name", b"../outside/f"),
                    ("GNU.sparse.size", b"0"),
                    ("GNU.sparse.map", b""),
                ])
                .file("a", b"")
                .end(),
        ),
        (
            "a long part",
            new()
                .pax(&[("path", long_name.as_bytes())])
                .file("a", b"x")
                .end(),
        ),
        (
            "hard link out",
            new().hard("a", "../outside/precious").end(),
        ),
        (
            "hard link to absolute",
            new().hard("a", "/etc/passwd").end(),
        ),
        (
            "hard link through a symlink",
            new()
                .symlink("s", "../outside")
                .hard("a", "s/precious")
                .end(),
        ),
        ("hard link to nothing", new().hard("a", "b").end()),
        (
            "hard link to itself",
            new().file("a", b"x").hard("a", "./a").end(),
        ),
        (
            "hard link to a directory",
            new().dir("d").hard("a", "d").end(),
        ),
        ("hard link to the root", new().hard("a", ".").end()),
        (
            "file over a directory",
            new().dir("d").file("d", b"x").end(),
        ),
        (
            "symlink over a directory",
            new().dir("d").file("d/f", b"x").symlink("d", "..").end(),
        ),
        (
            "hard link over a directory",
            new().file("f", b"x").dir("d").hard("d", "f").end(),
        ),
        ("empty symlink", new().symlink("a", "").end()),
    ];
    for (name, bytes) in cases {
        let error = beside(&lab, name, &bytes).expect_err(name);
        let told = matches!(
            error,
            Error::Refused { .. } | Error::Malformed { .. } | Error::Limit { .. }
        );
        assert!(told, "{name}: {error}");
    }
}

#[test]
fn what_meets_something_replaces_it_and_never_goes_through() {
    let lab = require_lab!(Fs::Ext4);
    let new = Tar::new;
    let tree = beside(
        &lab,
        "dir over symlink",
        &new()
            .symlink("a", "../outside")
            .dir("a")
            .file("a/f", b"x")
            .end(),
    );
    let tree = tree.expect("the symlink is replaced");
    assert_eq!(tree.get("a").expect("a").kind, 'd');
    assert_eq!(tree.get("a/f").expect("f").kind, 'f');
    let tree = beside(
        &lab,
        "file over symlink",
        &new()
            .symlink("a", "../outside/precious")
            .file("a", b"mine")
            .end(),
    );
    assert_eq!(tree.expect("replaced").get("a").expect("a").size, 4);
    // Written through, the second would change the first.
    let twice = new()
        .file("a", b"first")
        .hard("b", "a")
        .file("a", b"second")
        .end();
    let tree = beside(&lab, "file over a linked one", &twice).expect("replaced");
    assert_eq!(tree.get("b").expect("b").size, 5);
    assert_eq!(tree.get("a").expect("a").size, 6);
    let twice = new()
        .file("a", b"1")
        .file("b", b"22")
        .hard("b", "a")
        .hard("b", "a")
        .end();
    let tree = beside(&lab, "a link over a file, twice", &twice).expect("replaced");
    assert_eq!(
        tree.get("b").expect("b").same_as.as_deref(),
        Some(&b"a"[..])
    );
    let mut again = new().dir("d").file("d/f", b"x");
    again.block(b"d/", b'5', 0, |block| {
        block[100..108].copy_from_slice(b"0000700\0");
    });
    let tree = beside(&lab, "directory twice", &again.end()).expect("merged");
    assert_eq!(tree.get("d").expect("d").mode, 0o700);
    assert!(tree.get("d/f").is_some());
    // Names that mean something elsewhere are names here.
    let names = new()
        .file(".wh.x", b"")
        .file("d/.wh..wh..opq", b"")
        .file(".wh.", b"")
        .end();
    let tree = beside(&lab, "whiteout names", &names).expect("plain names");
    assert_eq!(tree.len(), 4);
    let parents = new().file("./a//b/./c", b"x").end();
    let tree = beside(&lab, "parents without entries", &parents).expect("made");
    let a = tree.get("a").expect("a");
    assert_eq!(
        (a.kind, a.mode, a.mtime, tree.get("a/b/c").expect("c").size),
        ('d', 0o755, (0, 0), 1)
    );
}

#[test]
fn attributes_and_devices_that_are_never_taken() {
    let lab = require_lab!(Fs::Ext4);
    let taken = Tar::new()
        .pax(&[
            ("SCHILY.xattr.trusted.overlay.opaque", b"y"),
            ("SCHILY.xattr.trusted.x", b"y"),
            ("SCHILY.xattr.security.selinux", b"y"),
            ("SCHILY.xattr.security.evil", b"y"),
            ("SCHILY.xattr.system.evil", b"y"),
            ("SCHILY.xattr.user.", b"y"),
            ("SCHILY.xattr.user.kept", b"a\n=b"),
            ("RHT.security.selinux", b"y"),
            ("LIBARCHIVE.xattr.user.x", b"eQ=="),
        ])
        .dir("d")
        .link(b'3', "null", "")
        .link(b'4', "disk", "")
        .end();
    let to = lab.dir("taken");
    let unpacked = unpack(&taken, &to, false).expect("unpack");
    assert_eq!(
        (
            unpacked.made.attributes_left_out,
            unpacked.made.devices_left_out
        ),
        (6, 2)
    );
    let tree = Snapshot::of(&to);
    assert_eq!(tree.len(), 1);
    let attributes = &tree.get("d").expect("d").xattrs;
    assert_eq!(attributes.len(), 1, "{attributes:?}");
    assert_eq!(attributes[&b"user.kept"[..]], b"a\n=b");
    // What overlay takes for a deletion is never made, devices or not.
    let whiteout = Tar::new().link(b'3', "w", "").end();
    let error = unpack(&whiteout, &lab.dir("whiteout"), true).expect_err("refused");
    assert!(error.to_string().contains("0:0"), "{error}");
    for acl in ["user:joe:rwx", "nonsense", "user::rwx,mask:1:r"] {
        let bytes = Tar::new()
            .pax(&[("SCHILY.acl.access", acl.as_bytes())])
            .file("f", b"")
            .end();
        unpack(&bytes, &lab.dir("acl"), false).expect_err(acl);
    }
}

#[test]
#[expect(clippy::too_many_lines, reason = "it is a list")]
fn headers_that_lie_or_can_be_read_in_two_ways_are_refused() {
    let lab = require_lab!(Fs::Ext4);
    let new = Tar::new;
    let sized = |kind, size: &[u8; 12]| {
        let mut tar = new();
        tar.block(b"a", kind, 0, |block| block[124..136].copy_from_slice(size));
        tar.content(b"xxxx");
        tar.end()
    };
    let sparse =
        |records: &[(&str, &[u8])], content: &[u8]| new().pax(records).file("a", content).end();
    let v1: [(&str, &[u8]); 3] = [
        ("GNU.sparse.major", b"1"),
        ("GNU.sparse.minor", b"0"),
        ("GNU.sparse.realsize", b"100"),
    ];
    let mut wrong_sum = new().file("a", b"x").end();
    wrong_sum[0] ^= 1;
    let mut old = new();
    old.block(b"a", b'S', 4, |block| {
        block[257..265].copy_from_slice(b"ustar  \0");
        for (at, number) in [(386, 10), (398, 4), (410, 5), (422, 4), (483, 100)] {
            block[at..at + 12].copy_from_slice(format!("{number:011o}\0").as_bytes());
        }
    });
    old.content(b"xxxx");
    let cases = [
        ("checksum", wrong_sum),
        (
            "negative size",
            sized(b'0', b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xfc"),
        ),
        (
            "giant size",
            sized(b'0', b"\x80\0\0\0\xff\xff\xff\xff\xff\xff\xff\xff"),
        ),
        (
            "largest size",
            sized(b'0', b"\x80\0\0\0\x7f\xff\xff\xff\xff\xff\xff\xff"),
        ),
        ("no number", sized(b'0', b"0000000000x\0")),
        ("directory with content", sized(b'5', b"00000000004\0")),
        ("symlink with content", sized(b'2', b"00000000004\0")),
        ("hard link with content", sized(b'1', b"00000000004\0")),
        ("FIFO with content", sized(b'6', b"00000000004\0")),
        ("unknown kind", sized(b'Z', b"00000000004\0")),
        ("volume", sized(b'V', b"00000000000\0")),
        ("part of a volume", sized(b'M', b"00000000004\0")),
        ("dump", sized(b'D', b"00000000004\0")),
        (
            "Solaris",
            new()
                .special(b'X', &record("path", b"b"))
                .file("a", b"x")
                .end(),
        ),
        ("sparse without GNU", sized(b'S', b"00000000004\0")),
        ("pax without entry", new().pax(&[("path", b"a")]).end()),
        (
            "two pax headers",
            new()
                .pax(&[("path", b"a")])
                .pax(&[("path", b"b")])
                .file("c", b"x")
                .end(),
        ),
        (
            "two long names",
            new()
                .special(b'L', b"a")
                .special(b'L', b"b")
                .file("c", b"x")
                .end(),
        ),
        (
            "giant record",
            new()
                .special(b'x', &record("comment", &vec![b'x'; 1 << 20]))
                .file("a", b"x")
                .end(),
        ),
        (
            "record longer than its header",
            new().special(b'x', b"99 path=a\n").file("a", b"x").end(),
        ),
        (
            "record without newline",
            new().special(b'x', b"9 path=ab").file("a", b"x").end(),
        ),
        (
            "record without length",
            new().special(b'x', b"path=abcd\n").file("a", b"x").end(),
        ),
        (
            "pax size of a directory",
            new()
                .pax(&[("size", b"512")])
                .dir("d")
                .file("f", b"x")
                .end(),
        ),
        (
            "pax size too large",
            new()
                .pax(&[("size", b"99999999999999999999")])
                .file("a", b"x")
                .end(),
        ),
        (
            "pax size negative",
            new().pax(&[("size", b"-1")]).file("a", b"x").end(),
        ),
        (
            "uid that means none",
            new().pax(&[("uid", b"4294967295")]).file("a", b"x").end(),
        ),
        (
            "time",
            new().pax(&[("mtime", b"now")]).file("a", b"x").end(),
        ),
        (
            "global path",
            new()
                .special(b'g', &record("path", b"a"))
                .file("b", b"x")
                .end(),
        ),
        (
            "global size",
            new()
                .special(b'g', &record("size", b"512"))
                .file("b", b"x")
                .end(),
        ),
        (
            "global sparse",
            new()
                .special(b'g', &record("GNU.sparse.major", b"1"))
                .file("b", b"x")
                .end(),
        ),
        (
            "global attribute",
            new()
                .special(b'g', &record("SCHILY.xattr.user.x", b"1"))
                .file("b", b"x")
                .end(),
        ),
        (
            "star's sparse",
            new()
                .pax(&[("SCHILY.realsize", b"100")])
                .file("a", b"x")
                .end(),
        ),
        (
            "overlapping map",
            sparse(
                &[
                    ("GNU.sparse.map", b"0,3,2,2"),
                    ("GNU.sparse.size", b"9"),
                    ("GNU.sparse.numblocks", b"2"),
                ],
                b"xxxxx",
            ),
        ),
        (
            "unordered map",
            sparse(
                &[("GNU.sparse.map", b"5,2,0,3"), ("GNU.sparse.size", b"9")],
                b"xxxxx",
            ),
        ),
        (
            "map beyond the size",
            sparse(
                &[("GNU.sparse.map", b"0,5"), ("GNU.sparse.size", b"4")],
                b"xxxxx",
            ),
        ),
        (
            "map too short",
            sparse(
                &[("GNU.sparse.map", b"0,4"), ("GNU.sparse.size", b"9")],
                b"xxxxx",
            ),
        ),
        (
            "map that overflows",
            sparse(
                &[
                    ("GNU.sparse.map", b"9223372036854775807,5"),
                    ("GNU.sparse.size", b"9223372036854775807"),
                ],
                b"xxxxx",
            ),
        ),
        (
            "map of a wrong count",
            sparse(
                &[
                    ("GNU.sparse.map", b"0,5"),
                    ("GNU.sparse.size", b"9"),
                    ("GNU.sparse.numblocks", b"2"),
                ],
                b"xxxxx",
            ),
        ),
        (
            "half a pair",
            sparse(
                &[("GNU.sparse.map", b"0"), ("GNU.sparse.size", b"9")],
                b"xxxxx",
            ),
        ),
        (
            "numbers in a wrong order",
            sparse(
                &[
                    ("GNU.sparse.numbytes", b"5"),
                    ("GNU.sparse.offset", b"0"),
                    ("GNU.sparse.size", b"9"),
                ],
                b"xxxxx",
            ),
        ),
        (
            "sparse without size",
            sparse(&[("GNU.sparse.map", b"0,5")], b"xxxxx"),
        ),
        (
            "unknown version",
            sparse(
                &[
                    ("GNU.sparse.major", b"2"),
                    ("GNU.sparse.minor", b"0"),
                    ("GNU.sparse.realsize", b"5"),
                ],
                b"xxxxx",
            ),
        ),
        (
            "map in the content that is no number",
            sparse(&v1, &[b'x'; 512]),
        ),
        (
            "map in the content that is too long",
            sparse(&v1, format!("{:<512}", "99999999\n0\n").as_bytes()),
        ),
        ("map in the content that is cut", sparse(&v1, b"1\n")),
        ("sparse symlink", new().pax(&v1).symlink("a", "b").end()),
        ("old map in a wrong order", old.end()),
        (
            "one block of zeros",
            [
                &new().file("a", b"x").bytes[..],
                &[0; 512],
                &new().file("b", b"x").end(),
            ]
            .concat(),
        ),
        (
            "something behind the end",
            [new().file("a", b"x").end(), b"more".to_vec()].concat(),
        ),
        (
            "an archive behind the end",
            [new().file("a", b"x").end(), new().file("b", b"x").end()].concat(),
        ),
        (
            "no archive",
            b"this is a text and no archive, whatever its name says".repeat(20),
        ),
        ("nothing", Vec::new()),
    ];
    for (name, bytes) in cases {
        let error = beside(&lab, name, &bytes).expect_err(name);
        let told = !matches!(error, Error::System(_) | Error::Read(_) | Error::Cut);
        assert!(told, "{name}: {error}");
    }
}

/// CVE-2025-62518 and RUSTSEC-2026-0068: what follows an entry is where the pax size says, and
/// nowhere else.
#[test]
fn the_pax_size_decides_where_the_next_header_is() {
    let lab = require_lab!(Fs::Ext4);
    let hidden = Tar::new().file("hidden", b"x").end();
    for stated in [0, 512] {
        let mut tar = Tar::new().pax(&[("size", hidden.len().to_string().as_bytes())]);
        tar.block(b"outer", b'0', stated, |_| {});
        tar.content(&hidden);
        let tree = beside(
            &lab,
            &format!("stated {stated}"),
            &tar.file("after", b"y").end(),
        )
        .expect("unpack");
        assert_eq!(tree.get("outer").expect("outer").size, hidden.len() as u64);
        assert!(tree.get("hidden").is_none() && tree.get("after").is_some());
    }
    // The size is the file's, not that of the long name between.
    let mut tar = Tar::new()
        .pax(&[("size", b"1024")])
        .special(b'L', b"name\0");
    tar.block(b"x", b'0', 0, |_| {});
    tar.content(&[b'c'; 1024]);
    let tree = beside(&lab, "long name between", &tar.file("after", b"y").end()).expect("unpack");
    assert_eq!(tree.get("name").expect("name").size, 1024);
    assert!(tree.get("after").is_some());
    // An empty value takes a record back, and the last of several counts.
    let records: [(&str, &[u8]); 4] = [
        ("path", b"no"),
        ("path", b""),
        ("mtime", b"1"),
        ("mtime", b"2.5"),
    ];
    let tree = beside(
        &lab,
        "records twice",
        &Tar::new().pax(&records).file("yes", b"").end(),
    );
    assert_eq!(
        tree.expect("unpack").get("yes").expect("yes").mtime,
        (2, 500_000_000)
    );
}

#[test]
fn an_archive_cut_at_any_block_is_incomplete() {
    let lab = require_lab!(Fs::Ext4);
    let from = lab.dir("from");
    crate::trips::odd(&from);
    let (bytes, _) = pack(&lab, &from, Codec::Plain, true).expect("pack");
    for cut in (0..bytes.len())
        .step_by(512)
        .chain((1..bytes.len()).step_by(4001))
        .chain([bytes.len() - 1])
    {
        let to = lab.dir(&format!("cut-{cut}"));
        let error = unpack(&bytes[..cut], &to, false).expect_err("it is cut");
        assert!(
            matches!(error, Error::Truncated { at } if at <= cut as u64),
            "{cut}: {error}"
        );
        fs::remove_dir_all(&to).expect("remove");
    }
}

#[test]
fn limits_hold() {
    let lab = require_lab!(Fs::Tmpfs);
    let limited = |bytes: &[u8], change: &dyn Fn(&mut Limits)| {
        let mut how = Unpack::default();
        change(&mut how.limits);
        archive::unpack(
            bytes,
            &open(&lab.dir("to")),
            how,
            &Progress::default(),
            &|| false,
        )
    };
    let is_limit = |result: archive::Result<_>| matches!(result, Err(Error::Limit { .. }));
    let two = Tar::new().file("a", b"12345").file("b", b"12345").end();
    limited(&two, &|limits| (limits.bytes, limits.entries) = (10, 2)).expect("it fits");
    assert!(is_limit(limited(&two, &|limits| limits.bytes = 9)));
    assert!(is_limit(limited(&two, &|limits| limits.entries = 1)));
    assert!(is_limit(limited(
        &Tar::new().file("abcdef", b"").end(),
        &|limits| limits.path = 5
    )));
    // 80 MiB of one byte, in a few KiB of zstd.
    let bomb = Tar::new().file("bomb", &vec![b'x'; 80 << 20]).end();
    let packed = zstd::encode_all(&bomb[..], 1).expect("zstd");
    assert!(packed.len() < 40 << 10, "{}", packed.len());
    assert!(is_limit(limited(&packed, &|_| {})));
    limited(&packed, &|limits| limits.ratio = 1 << 30).expect("allowed");
    // A path as deep as the limit lets it be, and one beyond it.
    let deep = |levels: usize| {
        Tar::new()
            .pax(&[("path", &b"d/".repeat(levels))])
            .dir("x")
            .end()
    };
    let to = lab.dir("deep");
    unpack(&deep(32_768), &to, false).expect("64 KiB of path");
    assert!(is_limit(unpack(&deep(32_769), &to, false)));
}

#[test]
fn owners_and_modes_are_set_and_nothing_else_is() {
    let lab = require_lab!(Fs::Ext4);
    let to = lab.dir("to");
    let mut tar = Tar::new();
    tar.block(b"suid", b'0', 0, |block| {
        block[100..108].copy_from_slice(b"0104755\0");
        block[108..116].copy_from_slice(b"\x80\0\0\0\xee\x6b\x28\0");
    });
    unpack(&tar.end(), &to, false).expect("unpack");
    let stat = fs::symlink_metadata(to.join("suid")).expect("stat");
    assert_eq!((stat.mode() & 0o7777, stat.uid()), (0o4755, 4_000_000_000));
}
