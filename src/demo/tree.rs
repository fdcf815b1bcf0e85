//! Trees of files: the one that the `get` step fetches, and fingerprints and sizes of any tree.
//! Walks with the standard library only: a proof must share no code with the driver.

use std::collections::BTreeMap;
use std::fs::{self, Metadata};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::error::Error;

/// Tens of thousands of files, yet fetched in seconds.
const ENOUGH_FILES: u64 = 30_000;
const ENOUGH_BYTES: u64 = 450 << 20;

/// The size of a tree.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Size {
    /// Everything but directories.
    pub(super) files: u64,
    /// Directories below the root.
    pub(super) directories: u64,
    /// Lengths of files.
    pub(super) bytes: u64,
    /// Allocated blocks, also of directories.
    pub(super) blocks: u64,
}

/// A digest of names, kinds, modes, owners, times and content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Fingerprint {
    pub(super) files: u64,
    pub(super) bytes: u64,
    digest: [u8; 32],
}

/// Counts a tree; zero if it does not exist.
pub(super) fn size(root: &Path) -> Result<Size, Error> {
    let mut size = Size::default();
    let mut todo = vec![root.to_owned()];
    while let Some(dir) = todo.pop() {
        let entries = match fs::read_dir(&dir) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            result => result.map_err(|source| Error::io("read", &dir, source))?,
        };
        for entry in entries {
            let entry = entry.map_err(|source| Error::io("read", &dir, source))?;
            let path = entry.path();
            let found = look(&path)?;
            size.blocks += found.blocks() * 512;
            if found.is_dir() {
                size.directories += 1;
                todo.push(path);
            } else {
                size.files += 1;
                size.bytes += found.len();
            }
        }
    }
    Ok(size)
}

/// Reads every byte of a tree.
pub(super) fn fingerprint(root: &Path) -> Result<Fingerprint, Error> {
    let mut hasher = Sha256::new();
    let (mut files, mut bytes) = (0, 0);
    let mut todo = vec![PathBuf::new()];
    while let Some(relative) = todo.pop() {
        // A path joined with nothing ends in a slash and so would name a directory.
        let path = if relative.as_os_str().is_empty() {
            root.to_owned()
        } else {
            root.join(&relative)
        };
        let found = look(&path)?;
        let mut note = |part: &[u8]| {
            hasher.update((part.len() as u64).to_le_bytes());
            hasher.update(part);
        };
        note(relative.as_os_str().as_bytes());
        note(&found.mode().to_le_bytes());
        note(&found.uid().to_le_bytes());
        note(&found.gid().to_le_bytes());
        if found.is_dir() {
            let mut names = Vec::new();
            for entry in fs::read_dir(&path).map_err(|source| Error::io("read", &path, source))? {
                let entry = entry.map_err(|source| Error::io("read", &path, source))?;
                names.push(entry.file_name());
            }
            names.sort_unstable();
            todo.extend(names.iter().rev().map(|name| relative.join(name)));
            continue;
        }
        files += 1;
        note(&found.mtime().to_le_bytes());
        note(&found.mtime_nsec().to_le_bytes());
        if found.is_symlink() {
            let target = fs::read_link(&path).map_err(|source| Error::io("read", &path, source))?;
            note(target.as_os_str().as_bytes());
        } else if found.is_file() {
            let content = fs::read(&path).map_err(|source| Error::io("read", &path, source))?;
            bytes += content.len() as u64;
            note(&content);
        }
    }
    Ok(Fingerprint {
        files,
        bytes,
        digest: hasher.finalize().into(),
    })
}

/// The fingerprint without the root directory, whose mode and times are the volume's own.
pub(super) fn content(root: &Path) -> Result<Fingerprint, Error> {
    let mut parts = BTreeMap::new();
    for entry in fs::read_dir(root).map_err(|source| Error::io("read", root, source))? {
        let entry = entry.map_err(|source| Error::io("read", root, source))?;
        parts.insert(entry.file_name(), fingerprint(&entry.path())?);
    }
    let mut hasher = Sha256::new();
    let (mut files, mut bytes) = (0, 0);
    for (name, part) in parts {
        hasher.update(name.as_bytes());
        hasher.update([0]);
        hasher.update(part.digest);
        files += part.files;
        bytes += part.bytes;
    }
    Ok(Fingerprint {
        files,
        bytes,
        digest: hasher.finalize().into(),
    })
}

/// Directories of this machine from which a real tree is copied.
#[derive(Debug, Clone)]
pub(super) struct Source {
    /// The crates of cargo's registry by `name-version`.
    pub(super) crates: BTreeMap<String, PathBuf>,
    /// Other directories with their names in the copy, used in this order until there is enough.
    others: Vec<(&'static str, PathBuf)>,
}

impl Source {
    /// Finds the sources that cargo unpacked to build this project, and directories that fill up
    /// the tree.
    pub(super) fn find(cargo_home: Option<&Path>, more: Option<&Path>) -> Result<Self, Error> {
        let mut crates = BTreeMap::new();
        if let Some(home) = cargo_home {
            // One directory per registry.
            for registry in children(&home.join("registry/src")) {
                for path in children(&registry) {
                    if let Some(name) = path.file_name().and_then(|name| name.to_str()) {
                        crates.insert(name.to_owned(), path.clone());
                    }
                }
            }
        }
        if crates.is_empty() {
            let home = cargo_home.map_or_else(|| "~/.cargo".into(), Path::to_owned);
            return Err(Error::Missing(format!(
                "the unpacked sources of this project's dependencies in {}/registry/src: build it \
                 there once, or set CARGO_HOME",
                home.display()
            )));
        }
        let others = match more {
            Some(tree) if tree.is_dir() => vec![("tree", tree.to_owned())],
            Some(tree) => {
                let source = std::io::ErrorKind::NotADirectory;
                return Err(Error::io("fetch", tree, source));
            }
            None => ["include", "share", "lib"]
                .map(|name| (name, Path::new("/usr").join(name)))
                .into(),
        };
        Ok(Self { crates, others })
    }

    /// Copies the crates into `crates/`, then the other directories until there is enough. Always
    /// includes the crates named in `first`.
    pub(super) fn fetch(&self, to: &Path, first: &[String]) -> Result<Size, Error> {
        let mut copied = Size::default();
        let crates = to.join("crates");
        make_dir(&crates)?;
        let wanted = |name: &String| first.contains(name);
        let firsts = self.crates.iter().filter(|(name, _)| wanted(name));
        let rest = self.crates.iter().filter(|(name, _)| !wanted(name));
        for (index, (name, from)) in firsts.chain(rest).enumerate() {
            if index >= first.len() && enough(copied) {
                break;
            }
            let to = crates.join(name);
            copy(from, &to, &mut copied, &|_| false)?;
            // As `cargo vendor` writes it, without the checksums.
            let checksums = to.join(".cargo-checksum.json");
            let text = br#"{"files":{}}"#;
            fs::write(&checksums, text).map_err(|source| Error::io("write", &checksums, source))?;
        }
        for (name, from) in &self.others {
            if enough(copied) {
                break;
            }
            // These directories may change meanwhile; files that vanish are skipped.
            copy(from, &to.join(name), &mut copied, &enough)?;
        }
        Ok(copied)
    }
}

fn enough(size: Size) -> bool {
    size.files >= ENOUGH_FILES || size.bytes >= ENOUGH_BYTES
}

fn children(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.path())
        .filter(|path| path.is_dir())
        .collect()
}

/// Copies directories, files and symbolic links with modes and times, within one filesystem.
fn copy(
    from: &Path,
    to: &Path,
    copied: &mut Size,
    stop: &dyn Fn(Size) -> bool,
) -> Result<(), Error> {
    make_dir(to)?;
    let device = look(from)?.dev();
    let mut names: Vec<PathBuf> = fs::read_dir(from)
        .map_err(|source| Error::io("read", from, source))?
        .flatten()
        .map(|entry| entry.path())
        .collect();
    names.sort_unstable();
    for path in names {
        if stop(*copied) {
            return Ok(());
        }
        let Ok(found) = look(&path) else { continue };
        let Some(name) = path.file_name() else {
            continue;
        };
        let target = to.join(name);
        if found.is_dir() {
            if found.dev() == device {
                copied.directories += 1;
                copy(&path, &target, copied, stop)?;
            }
        } else if found.is_symlink() {
            let Ok(link) = fs::read_link(&path) else {
                continue;
            };
            std::os::unix::fs::symlink(link, &target)
                .map_err(|source| Error::io("make", &target, source))?;
            copied.files += 1;
            copied.bytes += found.len();
        } else if found.is_file() {
            copy_file(&path, &target, &found)?;
            copied.files += 1;
            copied.bytes += found.len();
        }
    }
    Ok(())
}

fn copy_file(from: &Path, to: &Path, found: &Metadata) -> Result<(), Error> {
    fs::copy(from, to).map_err(|source| Error::io("copy", from, source))?;
    let mode = fs::Permissions::from_mode(found.permissions().mode() & 0o777);
    let failed = |source| Error::io("copy", from, source);
    fs::set_permissions(to, mode).map_err(failed)?;
    let file = fs::File::open(to).map_err(failed)?;
    found
        .modified()
        .and_then(|time| file.set_modified(time))
        .map_err(failed)
}

fn look(path: &Path) -> Result<Metadata, Error> {
    fs::symlink_metadata(path).map_err(|source| Error::io("look at", path, source))
}

fn make_dir(path: &Path) -> Result<(), Error> {
    fs::create_dir(path).map_err(|source| Error::io("make", path, source))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_byte_one_mode_or_one_name_changes_the_fingerprint() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let root = dir.path();
        fs::create_dir(root.join("a")).expect("made");
        fs::write(root.join("a/b"), "one").expect("written");
        let before = content(root).expect("read");
        assert_eq!((before.files, before.bytes), (1, 3));
        assert_eq!(before, content(root).expect("read"));

        let time = fs::metadata(root.join("a/b"))
            .and_then(|found| found.modified())
            .expect("a time");
        let file = fs::File::create(root.join("a/b")).expect("opened");
        std::io::Write::write_all(&mut &file, b"two").expect("written");
        file.set_modified(time).expect("set");
        assert_ne!(before, content(root).expect("read"), "other bytes");

        std::io::Write::write_all(
            &mut &fs::File::create(root.join("a/b")).expect("opened"),
            b"one",
        )
        .expect("written");
        file.set_modified(time).expect("set");
        assert_eq!(before, content(root).expect("read"), "as it was");
        let mode = fs::Permissions::from_mode(0o600);
        fs::set_permissions(root.join("a/b"), mode).expect("set");
        assert_ne!(before, content(root).expect("read"), "another mode");
    }

    #[test]
    fn a_copy_is_the_same_tree() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let from = dir.path().join("from");
        fs::create_dir_all(from.join("a/b")).expect("made");
        fs::write(from.join("a/b/c"), "text").expect("written");
        fs::write(from.join("a/program"), "#!").expect("written");
        let mode = fs::Permissions::from_mode(0o755);
        fs::set_permissions(from.join("a/program"), mode).expect("set");
        let mut copied = Size::default();
        copy(&from, &dir.path().join("to"), &mut copied, &|_| false).expect("copied");
        assert_eq!((copied.files, copied.directories), (2, 2));
        assert_eq!(
            content(&from).expect("read"),
            content(&dir.path().join("to")).expect("read")
        );
    }
}
