//! A walk's path from the tree's root to its current directory, with few open directories.
//!
//! Only the lowest [`OPEN`] levels keep a descriptor. On the way up, a closed level is opened as
//! `..` of the level below. It must be the directory that the walk came through. If a process has
//! moved that directory away, the walk fails with ESTALE and does not follow it.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};

use crate::sys::{self, Dir, Errno};

/// How many levels keep their descriptor. A deeper tree costs one more `openat` per directory.
const OPEN: usize = 32;

/// A walk's position in one tree.
#[derive(Debug)]
pub struct DirStack {
    /// The lowest levels, the current directory last. The root leaves when the walk is deep.
    open: VecDeque<Dir>,
    /// (device, inode) of each level from the root to the current directory.
    identities: Vec<(u64, u64)>,
    /// The names of all levels except the root.
    names: Vec<OsString>,
    root: PathBuf,
}

impl DirStack {
    /// A walk that begins at `root`.
    pub fn new(root: &Dir) -> sys::Result<Self> {
        let stat = root.stat_self()?;
        // `root` may be O_PATH, so this opens a descriptor that can be read.
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        let dir = Dir::from_fd(root.open_file_beneath(".", flags, 0)?, root.path());
        Ok(Self {
            open: VecDeque::from([dir]),
            identities: vec![(stat.st_dev, stat.st_ino)],
            names: Vec::new(),
            root: root.path().to_owned(),
        })
    }

    /// The current directory.
    #[must_use]
    pub fn here(&self) -> &Dir {
        self.open
            .back()
            .expect("descend adds one, and ascend opens the parent before it takes one away")
    }

    /// The number of levels below the root.
    #[must_use]
    pub fn depth(&self) -> usize {
        self.names.len()
    }

    /// The path of `name` here, from the tree's root. Long paths are shortened in the middle.
    #[must_use]
    pub fn relative(&self, name: impl AsRef<Path>) -> PathBuf {
        let mut path = PathBuf::new();
        let skip = self.names.len().saturating_sub(16);
        if skip > 0 {
            path.extend(self.names.iter().take(4));
            path.push("…");
        }
        path.extend(
            self.names
                .iter()
                .skip(skip.max(if skip > 0 { 4 } else { 0 })),
        );
        path.push(name);
        path
    }

    /// Enters the directory `name`.
    pub fn descend(&mut self, name: impl AsRef<Path>) -> sys::Result<()> {
        let name = name.as_ref();
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW;
        let fd = self.here().open_file_beneath(name, flags, 0)?;
        let path = self.root.join(self.relative(name));
        let dir = Dir::from_fd(fd, path);
        let stat = dir.stat_self()?;
        self.identities.push((stat.st_dev, stat.st_ino));
        self.names.push(name.as_os_str().to_owned());
        self.open.push_back(dir);
        if self.open.len() > OPEN {
            self.open.pop_front();
        }
        Ok(())
    }

    /// Returns to the parent, and returns the directory left and its name; `None` at the root.
    pub fn ascend(&mut self) -> sys::Result<Option<(OsString, Dir)>> {
        if self.names.is_empty() {
            return Ok(None);
        }
        if self.open.len() == 1 {
            let parent = self.parent()?;
            self.open.push_front(parent);
        }
        let left = self.open.pop_back().zip(self.names.pop());
        self.identities.pop();
        Ok(left.map(|(dir, name)| (name, dir)))
    }

    /// Opens the parent of the only open level.
    fn parent(&self) -> sys::Result<Dir> {
        let here = self.here();
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(here, "..", flags, Mode::empty())
            .map_err(|errno| here.error("openat", "..", errno))?;
        let path = here.path().parent().unwrap_or(&self.root);
        let parent = Dir::from_fd(fd, path);
        let stat = parent.stat_self()?;
        let expected = self.identities[self.identities.len() - 2];
        if (stat.st_dev, stat.st_ino) != expected {
            return Err(here
                .error("openat", "..", Errno::ESTALE)
                .with_detail("the directory was moved while its tree was being walked"));
        }
        Ok(parent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_walk_goes_as_deep_as_it_likes_and_comes_back() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let root = Dir::open(folder.path()).expect("it opens");
        let mut stack = DirStack::new(&root).expect("stack");
        for level in 0..OPEN * 4 {
            let name = format!("level-{level}");
            stack.here().create_dir(&name, 0o700).expect("mkdir");
            stack.descend(&name).expect("descend");
            assert!(stack.open.len() <= OPEN);
        }
        let shortened = stack.relative("f");
        assert!(shortened.starts_with("level-0/level-1/level-2/level-3/…/level-112"));
        assert!(shortened.ends_with("level-127/f"));
        for level in (0..OPEN * 4).rev() {
            let (name, dir) = stack.ascend().expect("ascend").expect("not the root yet");
            assert_eq!(name, *format!("level-{level}"));
            drop(dir);
            stack.here().remove_dir(&name).expect("rmdir");
        }
        assert!(stack.ascend().expect("ascend").is_none());
        assert_eq!(stack.relative("f"), Path::new("f"));
    }

    #[test]
    fn a_directory_that_was_moved_away_is_not_followed() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let root = Dir::open(folder.path()).expect("it opens");
        root.create_dir("elsewhere", 0o700).expect("mkdir");
        root.create_dir("tree", 0o700).expect("mkdir");
        let mut stack = DirStack::new(&root.open_beneath("tree").expect("tree")).expect("stack");
        for _ in 0..=OPEN {
            stack.here().create_dir("d", 0o700).expect("mkdir");
            stack.descend("d").expect("descend");
        }
        let moved = root.open_beneath("tree/d").expect("open");
        let to = root.open_beneath("elsewhere").expect("open");
        moved.rename("d", &to, "d").expect("rename");
        let result = (0..=OPEN).try_for_each(|_| stack.ascend().map(drop));
        assert!(result.expect_err("it was moved").is(Errno::ESTALE));
    }
}
