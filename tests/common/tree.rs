//! Trees of files for tests: many plain files, or a few odd ones.
//!
//! The content depends on a file's index only, so two calls make the same tree.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, PermissionsExt, lchown, symlink};
use std::os::unix::net::UnixListener;
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode, Timespec, Timestamps, XattrFlags};

/// The bytes of all files below a directory.
pub fn bytes_below(directory: &Path) -> u64 {
    let entries = fs::read_dir(directory).expect("a directory");
    let bytes = entries.map(|entry| {
        let entry = entry.expect("an entry");
        let found = entry.metadata().expect("it is there");
        if found.is_dir() {
            bytes_below(&entry.path())
        } else {
            found.len()
        }
    });
    bytes.sum()
}

/// Makes `count` small files below `root`, a hundred per directory.
pub fn files(root: &Path, count: usize) {
    fill(root, count, 100, 32);
}

/// Makes `count` files of `size` bytes below `root`, `per_dir` per directory (`d0000/f000000` …).
pub fn fill(root: &Path, count: usize, per_dir: usize, size: usize) {
    let mut content = vec![b'.'; size];
    for index in 0..count {
        let dir = root.join(format!("d{:04}", index / per_dir));
        if index % per_dir == 0 {
            fs::create_dir_all(&dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
        }
        let name = format!("f{index:06}");
        let head = size.min(name.len());
        content[..head].copy_from_slice(&name.as_bytes()[..head]);
        let path = dir.join(name);
        fs::write(&path, &content).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    }
}

/// Makes a chain of `depth` directories with one file at its end. Each is made from its parent's
/// descriptor, because the whole path may exceed PATH_MAX.
pub fn deep(root: &Path, depth: usize) {
    let mut dir: rustix::fd::OwnedFd = File::open(root).expect("the root is there").into();
    for _ in 0..depth {
        rustix::fs::mkdirat(&dir, "d", Mode::RWXU).expect("mkdir");
        dir = rustix::fs::openat(
            &dir,
            "d",
            rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::RDONLY,
            Mode::empty(),
        )
        .expect("open");
    }
    let file = rustix::fs::openat(
        &dir,
        "bottom",
        rustix::fs::OFlags::CREATE | rustix::fs::OFlags::WRONLY,
        Mode::RUSR,
    )
    .expect("create");
    rustix::io::write(&file, b"the bottom").expect("write");
}

/// Makes one of every kind of file that a volume must give back unchanged. Needs root.
///
/// Overlayfs's own marks are left out (see [`whiteout_like`]).
pub fn odd(root: &Path) {
    let at = |name: &str| root.join(name);
    let check = |what: &str, result: rustix::io::Result<()>| {
        result.unwrap_or_else(|e| panic!("{what} in {}: {e}", root.display()));
    };

    fs::create_dir_all(at("bin")).expect("mkdir");
    fs::write(at("bin/tool"), b"#!/bin/true\n").expect("write");
    fs::set_permissions(at("bin/tool"), fs::Permissions::from_mode(0o4755)).expect("chmod");
    fs::create_dir(at("sticky")).expect("mkdir");
    fs::set_permissions(at("sticky"), fs::Permissions::from_mode(0o1777)).expect("chmod");
    fs::create_dir(at("setgid")).expect("mkdir");
    lchown(at("setgid"), Some(1234), Some(5678)).expect("chown");
    fs::set_permissions(at("setgid"), fs::Permissions::from_mode(0o2770)).expect("chmod");
    // What is made in it inherits its group and that bit, until it has its own.
    fs::create_dir(at("setgid/private")).expect("mkdir");
    lchown(at("setgid/private"), Some(1000), Some(100)).expect("chown");
    fs::set_permissions(at("setgid/private"), fs::Permissions::from_mode(0o700)).expect("chmod");
    fs::create_dir(at("empty")).expect("mkdir");
    fs::create_dir(at("closed")).expect("mkdir");
    fs::write(at("closed/inside"), b"nobody may read this").expect("write");
    fs::set_permissions(at("closed/inside"), fs::Permissions::from_mode(0o000)).expect("chmod");
    fs::set_permissions(at("closed"), fs::Permissions::from_mode(0o000)).expect("chmod");

    fs::write(at("zero"), b"").expect("write");
    fs::write(at("owned"), b"of somebody").expect("write");
    lchown(at("owned"), Some(4_000_000_000), Some(4_000_000_001)).expect("chown");
    fs::write(at("one"), b"one inode, two names").expect("write");
    fs::hard_link(at("one"), at("bin/two")).expect("link");
    let sparse = File::create(at("sparse")).expect("create");
    sparse.write_all_at(b"far away", 8 << 20).expect("write");
    sparse.set_len(16 << 20).expect("truncate");

    symlink("bin/tool", at("relative")).expect("symlink");
    symlink("/nowhere/at/all", at("dangling")).expect("symlink");
    symlink("../../../../../../etc/passwd", at("outside")).expect("symlink");
    lchown(at("dangling"), Some(77), Some(88)).expect("chown");

    let node = |name: &str, kind, device| {
        check(
            name,
            rustix::fs::mknodat(CWD, at(name), kind, Mode::RUSR | Mode::WUSR, device),
        );
    };
    node("fifo", FileType::Fifo, 0);
    node("null", FileType::CharacterDevice, rustix::fs::makedev(1, 3));
    node("disk", FileType::BlockDevice, rustix::fs::makedev(7, 200));
    drop(UnixListener::bind(at("socket")).expect("bind"));

    for name in [
        &b"white space\tand\nnewlines"[..],
        b"\xff\xfe not text \x80",
        b"back\\slash and \"quotes\"",
        b".wh.not-a-whiteout",
        b".wh..wh..opq",
        "na\u{ef}ve \u{1f9f3} \u{5d0}".as_bytes(),
        &[b'x'; 255],
    ] {
        fs::write(root.join(OsStr::from_bytes(name)), name).expect("write");
    }

    let xattr = |name: &str, key: &str, value: &[u8]| {
        check(
            key,
            rustix::fs::lsetxattr(at(name), key, value, XattrFlags::empty()),
        );
    };
    // tmpfs has user.* attributes since 6.6.
    if rustix::fs::lsetxattr(
        at("zero"),
        "user.note",
        b"\x00binary\xff",
        XattrFlags::empty(),
    )
    .is_ok()
    {
        xattr("empty", "user.of-a-directory", b"");
    }
    xattr("owned", "trusted.note", b"for root");
    // cap_net_bind_service, effective and permitted: vfs_cap_data, revision 2, little endian.
    let capability = [1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    xattr("one", "security.capability", &capability);

    // Times last: new entries change the times of their directory.
    for (index, name) in ["zero", "dangling", "fifo", "null", "empty", "setgid", "bin"]
        .iter()
        .enumerate()
    {
        let seconds = 1_000_000_000 + i64::try_from(index).expect("few");
        times(&at(name), seconds, 123_456_789);
    }
    times(root, 1_234_567_890, 987_654_321);
}

/// Makes overlayfs's marks. A volume must give them back unchanged or leave them out; they must
/// never take effect. Returns the names of those made; an overlay mount refuses some.
pub fn whiteout_like(root: &Path) -> Vec<&'static str> {
    let mut made = Vec::new();
    let whiteout = rustix::fs::mknodat(
        CWD,
        root.join("whiteout"),
        FileType::CharacterDevice,
        Mode::empty(),
        0,
    );
    if whiteout.is_ok() {
        made.push("whiteout");
    }
    fs::create_dir_all(root.join("opaque")).expect("mkdir");
    for (name, key) in [
        ("trusted.overlay.opaque", "trusted.overlay.opaque"),
        ("user.overlay.opaque", "user.overlay.opaque"),
        ("trusted.overlay.redirect", "trusted.overlay.redirect"),
    ] {
        if rustix::fs::lsetxattr(root.join("opaque"), key, b"y", XattrFlags::empty()).is_ok() {
            made.push(name);
        }
    }
    made
}

/// Sets access and modification time; of a symlink, its own.
pub fn times(path: &Path, seconds: i64, nanoseconds: i64) {
    let time = Timespec {
        tv_sec: seconds,
        tv_nsec: nanoseconds,
    };
    let times = Timestamps {
        last_access: time,
        last_modification: time,
    };
    rustix::fs::utimensat(CWD, path, &times, rustix::fs::AtFlags::SYMLINK_NOFOLLOW)
        .unwrap_or_else(|e| panic!("{}: {e}", path.display()));
}
