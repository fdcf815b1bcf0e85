//! Every visible property of a tree of files, as a value: taken once, compared later.
//!
//! Names and contents are bytes. Left out is what is not content: ctime, inode numbers, sizes of
//! directories and link counts (but it records which names share an inode).

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::fmt::{self, Write as _};
use std::io::Read as _;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use sha2::{Digest, Sha256};

/// One tree. The root itself is the entry with the empty path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// By path below the root.
    pub entries: BTreeMap<Vec<u8>, Entry>,
}

/// One name in the tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// As in `find -type` and `ls`: `f d l p s c b`.
    pub kind: char,
    /// The permission bits, with setuid, setgid and sticky.
    pub mode: u32,
    /// The owner.
    pub uid: u32,
    /// The group.
    pub gid: u32,
    /// Seconds and nanoseconds of the modification time.
    pub mtime: (i64, i64),
    /// The size of a file or symlink, else 0.
    pub size: u64,
    /// The SHA-256 of a file's content.
    pub sha256: Option<String>,
    /// The target of a symlink.
    pub target: Option<Vec<u8>>,
    /// Major and minor number of a device.
    pub device: Option<(u32, u32)>,
    /// The first path (in order) with the same inode, for later ones.
    pub same_as: Option<Vec<u8>>,
    /// All attributes that are listed, except `security.selinux`.
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

impl Snapshot {
    /// Reads the tree below `root`, which must not change meanwhile.
    pub fn of(root: &Path) -> Self {
        let mut snapshot = Self {
            entries: BTreeMap::new(),
        };
        let mut paths = Vec::new();
        list(root, Vec::new(), &mut paths);
        paths.sort();
        let mut inodes: HashMap<(u64, u64), Vec<u8>> = HashMap::new();
        for path in paths {
            let full = join(root, &path);
            let entry = read(&full, &path, &mut inodes);
            snapshot.entries.insert(path, entry);
        }
        snapshot
    }

    /// The same without times: for trees from a tool that does not keep them.
    #[must_use]
    pub fn without_times(mut self) -> Self {
        for entry in self.entries.values_mut() {
            entry.mtime = (0, 0);
        }
        self
    }

    /// What an archive keeps of it.
    #[must_use]
    pub fn archived(mut self) -> Self {
        let gone = |kind| matches!(kind, 's' | 'b' | 'c');
        self.entries.retain(|_, entry| !gone(entry.kind));
        for entry in self.entries.values_mut() {
            let is_kept = |name: &[u8]| !name.starts_with(b"trusted.");
            entry.xattrs.retain(|name, _| is_kept(name));
        }
        self
    }

    /// The same without the root's own mode, owner, times and attributes.
    #[must_use]
    pub fn without_root(mut self) -> Self {
        self.entries.remove(&Vec::new());
        self
    }

    /// The number of names, without the root.
    pub fn len(&self) -> usize {
        self.entries.keys().filter(|path| !path.is_empty()).count()
    }

    /// Whether there is nothing but the root.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The entry at a path.
    pub fn get(&self, path: impl AsRef<Path>) -> Option<&Entry> {
        self.entries.get(path.as_ref().as_os_str().as_bytes())
    }

    /// The differences, one line each: `-` only in self, `+` only in `other`, `!` changed.
    pub fn diff(&self, other: &Self) -> Vec<String> {
        let mut lines = Vec::new();
        for (path, here) in &self.entries {
            let name = display(path);
            match other.entries.get(path) {
                None => lines.push(format!("- {name} ({here})")),
                Some(there) if here != there => {
                    lines.push(format!("! {name}: {}", here.differences(there).join(", ")));
                }
                Some(_) => {}
            }
        }
        for (path, there) in &other.entries {
            if !self.entries.contains_key(path) {
                lines.push(format!("+ {} ({there})", display(path)));
            }
        }
        lines
    }
}

impl fmt::Display for Snapshot {
    /// One line for each name.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (path, entry) in &self.entries {
            writeln!(f, "{} {entry}", display(path))?;
        }
        Ok(())
    }
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} {:04o} {}:{}",
            self.kind, self.mode, self.uid, self.gid
        )?;
        write!(
            f,
            " {}.{:09} {} bytes",
            self.mtime.0, self.mtime.1, self.size
        )?;
        if let Some(target) = &self.target {
            write!(f, " -> {}", display(target))?;
        }
        if let Some((major, minor)) = self.device {
            write!(f, " device {major}:{minor}")?;
        }
        for (key, value) in &self.xattrs {
            write!(f, " {}={}", display(key), display(value))?;
        }
        Ok(())
    }
}

impl Entry {
    fn differences(&self, other: &Self) -> Vec<String> {
        let mut lines = Vec::new();
        let mut note = |what: &str, here: &dyn fmt::Debug, there: &dyn fmt::Debug| {
            let (here, there) = (format!("{here:?}"), format!("{there:?}"));
            if here != there {
                lines.push(format!("{what} {here} became {there}"));
            }
        };
        let text = |bytes: &Option<Vec<u8>>| bytes.as_deref().map(display);
        let octal = |mode: u32| format!("{mode:04o}");
        note("kind", &self.kind, &other.kind);
        note("mode", &octal(self.mode), &octal(other.mode));
        note("owner", &(self.uid, self.gid), &(other.uid, other.gid));
        note("mtime", &self.mtime, &other.mtime);
        note("size", &self.size, &other.size);
        note("content", &self.sha256, &other.sha256);
        note("target", &text(&self.target), &text(&other.target));
        note("device", &self.device, &other.device);
        note("same inode as", &text(&self.same_as), &text(&other.same_as));
        let keys: std::collections::BTreeSet<_> =
            self.xattrs.keys().chain(other.xattrs.keys()).collect();
        for key in keys {
            let here = self.xattrs.get(key).map(|value| display(value));
            let there = other.xattrs.get(key).map(|value| display(value));
            note(&display(key), &here, &there);
        }
        lines
    }
}

/// Fails with the first forty differences if two trees differ.
#[track_caller]
pub fn assert_same(before: &Snapshot, after: &Snapshot) {
    let lines = before.diff(after);
    if lines.is_empty() {
        return;
    }
    let mut message = format!("{} differences:\n", lines.len());
    for line in lines.iter().take(40) {
        let _ = writeln!(message, "  {line}");
    }
    panic!("{message}");
}

fn join(root: &Path, path: &[u8]) -> std::path::PathBuf {
    if path.is_empty() {
        root.to_owned()
    } else {
        root.join(OsStr::from_bytes(path))
    }
}

fn display(bytes: &[u8]) -> String {
    if bytes.is_empty() {
        return ".".to_owned();
    }
    bytes.escape_ascii().to_string()
}

fn list(root: &Path, path: Vec<u8>, into: &mut Vec<Vec<u8>>) {
    let mut waiting = vec![path];
    while let Some(path) = waiting.pop() {
        let full = join(root, &path);
        let kind = std::fs::symlink_metadata(&full)
            .unwrap_or_else(|e| panic!("{}: {e}", full.display()))
            .file_type();
        if kind.is_dir() {
            let children =
                std::fs::read_dir(&full).unwrap_or_else(|e| panic!("{}: {e}", full.display()));
            for child in children {
                let child = child.unwrap_or_else(|e| panic!("{}: {e}", full.display()));
                let mut below = path.clone();
                if !below.is_empty() {
                    below.push(b'/');
                }
                below.extend_from_slice(child.file_name().as_bytes());
                waiting.push(below);
            }
        }
        into.push(path);
    }
}

fn read(full: &Path, path: &[u8], inodes: &mut HashMap<(u64, u64), Vec<u8>>) -> Entry {
    let data =
        std::fs::symlink_metadata(full).unwrap_or_else(|e| panic!("{}: {e}", full.display()));
    let file_type = data.file_type();
    let kind = match () {
        () if file_type.is_file() => 'f',
        () if file_type.is_dir() => 'd',
        () if file_type.is_symlink() => 'l',
        () if file_type.is_fifo() => 'p',
        () if file_type.is_socket() => 's',
        () if file_type.is_char_device() => 'c',
        () if file_type.is_block_device() => 'b',
        () => '?',
    };
    let same_as = if kind != 'd' && data.nlink() > 1 {
        let first = inodes
            .entry((data.dev(), data.ino()))
            .or_insert_with(|| path.to_owned());
        (first != path).then(|| first.clone())
    } else {
        None
    };
    let rdev = data.rdev();
    Entry {
        kind,
        mode: data.mode() & 0o7777,
        uid: data.uid(),
        gid: data.gid(),
        mtime: (data.mtime(), data.mtime_nsec()),
        size: if matches!(kind, 'f' | 'l') {
            data.len()
        } else {
            0
        },
        sha256: (kind == 'f').then(|| hash(full)),
        target: (kind == 'l').then(|| {
            let target =
                std::fs::read_link(full).unwrap_or_else(|e| panic!("{}: {e}", full.display()));
            target.as_os_str().as_bytes().to_owned()
        }),
        device: matches!(kind, 'c' | 'b')
            .then(|| (rustix::fs::major(rdev), rustix::fs::minor(rdev))),
        same_as,
        xattrs: xattrs(full),
    }
}

fn hash(path: &Path) -> String {
    let mut file = std::fs::File::open(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 16];
    loop {
        let read = file
            .read(&mut buffer)
            .unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        if read == 0 {
            break;
        }
        hasher.update(&buffer[..read]);
    }
    hasher
        .finalize()
        .iter()
        .fold(String::new(), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        })
}

fn xattrs(path: &Path) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let mut names = vec![0; 1 << 16];
    let length = match rustix::fs::llistxattr(path, &mut names[..]) {
        Ok(length) => length,
        Err(rustix::io::Errno::NOTSUP) => 0,
        Err(error) => panic!("xattrs of {}: {error}", path.display()),
    };
    let mut found = BTreeMap::new();
    for name in names[..length].split(|&byte| byte == 0) {
        if name.is_empty() || name == b"security.selinux" {
            continue;
        }
        let mut value = vec![0; 1 << 16];
        match rustix::fs::lgetxattr(path, OsStr::from_bytes(name), &mut value[..]) {
            Ok(length) => value.truncate(length),
            Err(error) => panic!("{} of {}: {error}", display(name), path.display()),
        }
        found.insert(name.to_owned(), value);
    }
    found
}
