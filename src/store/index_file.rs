//! The index's file, as redb's storage backend.
//!
//! It takes no lock. The process that writes the index holds the pool's lock.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use redb::StorageBackend;

use crate::sys::{Dir, Space};

/// The number of zeros written per call.
const BLOCK: u64 = 256 << 10;
/// Growth may take at most 1/16 of the free space with zeros: the rest is needed for volumes.
const PARTS: u64 = 16;

/// A file that is filled with zeros where it grows, if there is space. In a sparse file, each write
/// allocates and `fdatasync` waits for the journal: twice as long on ext4 and xfs.
#[derive(Debug)]
pub(super) struct IndexFile {
    file: File,
    /// The directory of the file.
    dir: Dir,
}

impl IndexFile {
    pub(super) fn new(file: File, dir: Dir) -> Self {
        Self { file, dir }
    }

    /// Whether to fill with zeros. Never on btrfs, where each write of a page allocates again.
    fn is_to_be_filled(&self, size: u64) -> bool {
        let space = self.dir.space();
        space.is_ok_and(|space| space.magic != Space::BTRFS && size < space.bytes_available / PARTS)
    }

    fn fill(&self, mut from: u64, to: u64) -> io::Result<()> {
        let zeros = vec![0; usize::try_from(BLOCK.min(to - from)).unwrap_or_default()];
        while from < to {
            let size = usize::try_from(to - from).map_or(zeros.len(), |left| left.min(zeros.len()));
            self.file.write_all_at(&zeros[..size], from)?;
            from += size as u64;
        }
        Ok(())
    }
}

impl StorageBackend for IndexFile {
    fn len(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(out, offset)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let end = self.len()?;
        // One call: after a crash the file must have a length that redb requested.
        self.file.set_len(len)?;
        if end < len && self.is_to_be_filled(len - end) && self.fill(end, len).is_err() {
            // Other writers took the space. Free the zeros, then extend the file without them.
            self.file.set_len(end)?;
            self.file.set_len(len)?;
        }
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.file.write_all_at(data, offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn what_it_grows_by_is_zero_and_has_its_place_on_the_disk() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("index");
        let dir = Dir::open(folder.path()).expect("it opens");
        let index = IndexFile::new(File::create_new(&path).expect("made"), dir);
        for (len, word) in [(10, "ab"), (BLOCK * 2 + 5000, "cd"), (4096, "ef")] {
            index.set_len(len).expect("set");
            assert_eq!(index.len().expect("known"), len);
            index.write(8, word.as_bytes()).expect("written");
        }
        index.set_len(BLOCK * 3).expect("set");
        index.sync_data().expect("on the disk");
        let stat = std::fs::metadata(&path).expect("there");
        assert_eq!(stat.len(), BLOCK * 3);
        assert!(stat.blocks() * 512 >= BLOCK * 3, "{} blocks", stat.blocks());
        let mut bytes = std::fs::read(&path).expect("read");
        assert_eq!(bytes.drain(8..10).collect::<Vec<_>>(), b"ef");
        assert!(bytes.iter().all(|byte| *byte == 0));
    }
}
