//! The file that the index is in, as redb asks for it.
//!
//! It has no lock of its own: whoever opens the index to write to it holds the pool's.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use redb::StorageBackend;

/// So many zeros are written at once.
const BLOCK: u64 = 256 << 10;

/// A file that is written where it grows. Where a file was only made longer a filesystem looks for room for each page that is
/// written later, and `fdatasync` waits for its journal, too: twice as long.
#[derive(Debug)]
pub(super) struct IndexFile(File);

impl IndexFile {
    pub(super) fn new(file: File) -> Self {
        Self(file)
    }
}

impl StorageBackend for IndexFile {
    fn len(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.0.read_exact_at(out, offset)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let mut end = self.len()?;
        if len < end {
            return self.0.set_len(len);
        }
        let zeros = vec![0; usize::try_from(BLOCK.min(len - end)).unwrap_or_default()];
        while end < len {
            let size = usize::try_from(len - end).map_or(zeros.len(), |left| left.min(zeros.len()));
            self.0.write_all_at(&zeros[..size], end)?;
            end += size as u64;
        }
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        self.0.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.0.write_all_at(data, offset)
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
        let index = IndexFile::new(File::create_new(&path).expect("made"));
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
