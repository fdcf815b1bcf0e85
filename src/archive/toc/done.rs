//! Which pieces of a layer were verified: one bit each, in a file, so that a transfer goes on after
//! the process was killed. The file names the table that it belongs to.
//!
//! Bits are set in memory, and written with [`Done::write`] once for many pieces.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use super::piece::Sha256Sum;
use crate::sys::{self, Dir, Errno};

const HEADER: u64 = 32;
const PAGE: u64 = 4096;

/// The list.
#[derive(Debug)]
pub(super) struct Done {
    file: File,
    dir: Dir,
    name: &'static str,
    /// The part of the list that was looked at last, and where it begins.
    page: Vec<u8>,
    from: Option<u64>,
    /// The bytes of it that are not written yet.
    unwritten: Range<usize>,
}

impl Done {
    /// Opens the list, or makes an empty one. EEXIST: it belongs to another table.
    pub(super) fn open(dir: &Dir, name: &'static str, table: Sha256Sum) -> sys::Result<Self> {
        let fd = match dir.create_file(name) {
            Err(error) if error.is(Errno::EEXIST) => {
                dir.open_file_beneath(name, rustix::fs::OFlags::RDWR, 0)
            }
            fd => fd,
        }?;
        let file = File::from(fd);
        let failed = |error: std::io::Error| dir.error("pread", name, error);
        let mut there = [0; 32];
        let read = file.read_at(&mut there, 0).map_err(failed)?;
        if read < there.len() {
            file.write_all_at(&table, 0).map_err(failed)?;
        } else if there != table {
            return Err(dir
                .error("open", name, Errno::EEXIST)
                .with_detail("it belongs to another layer"));
        }
        Ok(Self {
            file,
            dir: dir.try_clone()?,
            name,
            page: Vec::new(),
            from: None,
            unwritten: 0..0,
        })
    }

    fn load(&mut self, piece: u64) -> sys::Result<(usize, u8)> {
        let byte = piece / 8;
        let from = byte / PAGE * PAGE;
        if self.from != Some(from) {
            self.write()?;
            self.page.clear();
            self.page.resize(usize::try_from(PAGE).expect("4 KiB"), 0);
            let mut filled = 0;
            while filled < self.page.len() {
                let at = HEADER + from + filled as u64;
                let read = self.file.read_at(&mut self.page[filled..], at);
                match read.map_err(|error| self.dir.error("pread", self.name, error))? {
                    0 => break,
                    read => filled += read,
                }
            }
            self.from = Some(from);
        }
        let at = usize::try_from(byte - from).expect("below 4 KiB");
        Ok((at, 1 << (piece % 8)))
    }

    pub(super) fn has(&mut self, piece: u64) -> sys::Result<bool> {
        let (at, bit) = self.load(piece)?;
        Ok(self.page[at] & bit != 0)
    }

    /// Sets the bit of a piece, in memory.
    pub(super) fn set(&mut self, piece: u64) -> sys::Result<()> {
        let (at, bit) = self.load(piece)?;
        self.page[at] |= bit;
        let Range { start, end } = self.unwritten;
        self.unwritten = if start == end {
            at..at + 1
        } else {
            start.min(at)..end.max(at + 1)
        };
        Ok(())
    }

    /// Writes the bits that were set.
    pub(super) fn write(&mut self) -> sys::Result<()> {
        let unwritten = std::mem::take(&mut self.unwritten);
        let (Some(from), false) = (self.from, unwritten.is_empty()) else {
            return Ok(());
        };
        let at = HEADER + from + unwritten.start as u64;
        self.file
            .write_all_at(&self.page[unwritten], at)
            .map_err(|error| self.dir.error("pwrite", self.name, error))
    }
}
