//! The parts that all targets share: a directory with something precious beside it, and seeds.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use baggageclaim::archive::{Hashing, Limits, Unpack};
use baggageclaim::sys::Dir;

#[allow(dead_code, reason = "each target builds archives of its own")]
#[path = "../archives/tar.rs"]
pub(crate) mod tar;

/// Small, so that one input takes little time.
pub(crate) const LIMITS: Limits = Limits {
    bytes: 16 << 20,
    entries: 1000,
    path: 64 << 10,
    ratio: 2000,
};
pub(crate) const HOW: Unpack = Unpack {
    limits: LIMITS,
    devices: true,
    hashing: Hashing::Both,
};

pub(crate) fn never() -> bool {
    false
}

/// A directory to unpack in, between others that must stay as they are.
pub(crate) struct Place {
    root: PathBuf,
    before: Looks,
}

/// How a directory and its one file look, content included.
type Looks = ([u64; 10], Vec<u8>);

impl Place {
    /// Makes it in the directory that TMPDIR names.
    pub(crate) fn new() -> Self {
        let root = std::env::temp_dir().join(format!("fuzz-{}", std::process::id()));
        let outside = root.join("outside");
        fs::create_dir_all(&outside).expect("mkdir");
        fs::create_dir(root.join("temporary")).expect("mkdir");
        fs::write(outside.join("precious"), "as it was").expect("write");
        let before = looks(&outside);
        Self { root, before }
    }

    /// A directory for temporary files.
    pub(crate) fn temporary(&self) -> Dir {
        Dir::open(&self.root.join("temporary")).expect("open")
    }

    /// A file in it.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.root.join("temporary").join(name)
    }

    /// Has something unpacked into an empty directory.
    pub(crate) fn unpack(&self, act: impl FnOnce(&Dir)) {
        let to = self.root.join("to");
        fs::create_dir(&to).expect("mkdir");
        act(&Dir::open(&to).expect("open"));
        fs::remove_dir_all(&to).expect("remove");
        assert_eq!(
            self.before,
            looks(&self.root.join("outside")),
            "it went outside"
        );
        let names = fs::read_dir(&self.root).expect("list").count();
        assert_eq!(names, 2, "something appeared outside");
    }
}

fn looks(outside: &Path) -> Looks {
    let file = outside.join("precious");
    let (dir, content) = (fs::symlink_metadata(outside), fs::symlink_metadata(&file));
    let (dir, content) = (dir.expect("stat"), content.expect("stat"));
    let numbers = [dir, content].map(|of| {
        let (seconds, nanoseconds) = (of.ctime().cast_unsigned(), of.ctime_nsec().cast_unsigned());
        [
            of.mode().into(),
            of.nlink(),
            of.uid().into(),
            seconds,
            nanoseconds,
        ]
    });
    let numbers = numbers.concat().try_into().expect("ten numbers");
    (numbers, fs::read(&file).expect("read"))
}

/// Writes seeds into the directory of inputs, the first argument, if that is empty.
pub(crate) fn plant(seeds: impl FnOnce() -> Vec<Vec<u8>>) {
    let Some(corpus) = std::env::args_os().nth(1).map(PathBuf::from) else {
        return;
    };
    if !fs::read_dir(&corpus).is_ok_and(|mut found| found.next().is_none()) {
        return;
    }
    for (number, seed) in seeds().into_iter().enumerate() {
        fs::write(corpus.join(format!("seed-{number}")), seed).expect("write");
    }
}
