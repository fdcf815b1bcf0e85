//! A place in a layer that is being received: the directory in which files are made. A thread has
//! its own. Only how to get there, and how a file is created there.

use std::ffi::OsStr;
use std::os::fd::OwnedFd;

use rustix::fs::OFlags;

use super::super::error::Result;
use crate::archive::unpack::open_below;
use crate::sys::{Dir, Errno};

/// A directory below the root of the layer.
#[derive(Debug)]
pub(super) struct Place {
    root: Dir,
    here: Option<(Vec<u8>, Dir)>,
}

impl Place {
    pub(super) fn new(root: Dir) -> Self {
        Self { root, here: None }
    }

    /// Another place in the same layer.
    pub(super) fn again(&self) -> Result<Self> {
        Ok(Self::new(self.root.try_clone()?))
    }

    pub(super) fn root(&self) -> &Dir {
        &self.root
    }

    pub(super) fn into_root(self) -> Dir {
        self.root
    }

    /// Goes to the directory at this path.
    pub(super) fn enter(&mut self, path: &[u8]) -> Result<()> {
        if self.here.as_ref().is_some_and(|(there, _)| there == path) {
            return Ok(());
        }
        let there = self.here.as_ref().map(|(path, dir)| (&**path, dir));
        let dir = open_below(&self.root, there, path)?;
        self.here = Some((path.to_vec(), dir));
        Ok(())
    }

    pub(super) fn here(&self) -> &Dir {
        let here = self.here.as_ref();
        &here.expect("a directory is entered before it is used").1
    }

    /// Opens a file for writing. One that is to hold a single piece is created again: what may be
    /// there was left by a process that was killed.
    pub(super) fn create(&self, name: &OsStr, mode: u32, whole: bool) -> Result<OwnedFd> {
        loop {
            match self.here().create_file_with(name, mode & 0o777) {
                Err(error) if error.is(Errno::EEXIST) && whole => self.here().remove_file(name)?,
                Err(error) if error.is(Errno::EEXIST) => {
                    let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK;
                    return Ok(self.here().open_file_beneath(name, flags, 0)?);
                }
                file => return Ok(file?),
            }
        }
    }
}
