//! Copies the content of a regular file: by shared extents, or by bytes with holes preserved.
//! Callers copy modes and owners and walk the tree.

use std::os::fd::AsFd;

use rustix::fs::SeekFrom;
use rustix::io::Errno as RawErrno;

/// Makes the empty file `to` share all extents of `from` (`FICLONE`, ioctl_ficlonerange(2)).
/// O(extents); copies no data.
///
/// EOPNOTSUPP or ENOTTY: the filesystem has no reflinks. EXDEV: two filesystems. EINVAL, ETXTBSY:
/// not for this file (no checksums on btrfs, a swap file).
pub fn clone_file(from: impl AsFd, to: impl AsFd) -> std::result::Result<(), nix::errno::Errno> {
    rustix::fs::ioctl_ficlone(to, from)
        .map_err(|errno| nix::errno::Errno::from_raw(errno.raw_os_error()))
}

/// Copies the first `length` bytes of `from` into the empty file `to` and preserves holes.
///
/// If `from` shrinks meanwhile, `to` ends with a hole; if it grows, the copy stops at `length`.
/// Moves both file positions. Returns the number of bytes copied.
pub fn copy_sparse(
    from: impl AsFd,
    to: impl AsFd,
    length: u64,
) -> std::result::Result<u64, nix::errno::Errno> {
    sparse(from, to, length).map_err(|errno| nix::errno::Errno::from_raw(errno.raw_os_error()))
}

fn sparse(from: impl AsFd, to: impl AsFd, length: u64) -> std::result::Result<u64, RawErrno> {
    let copied = each_data(&from, length, |start, end| {
        copy_range(&from, &to, start, end)
    })?;
    rustix::fs::ftruncate(&to, length)?;
    Ok(copied)
}

/// The number of bytes that [`copy_sparse`] would copy: no holes and no unwritten extents.
pub fn data_length(from: impl AsFd, length: u64) -> std::result::Result<u64, nix::errno::Errno> {
    each_data(&from, length, |start, end| Ok(end - start))
        .map_err(|errno| nix::errno::Errno::from_raw(errno.raw_os_error()))
}

/// Calls `act` for each data extent and returns the sum of its results. Stops when `act` returns 0.
fn each_data(
    from: impl AsFd,
    length: u64,
    mut act: impl FnMut(u64, u64) -> std::result::Result<u64, RawErrno>,
) -> std::result::Result<u64, RawErrno> {
    let (mut position, mut all) = (0, 0);
    while position < length {
        let data = match rustix::fs::seek(&from, SeekFrom::Data(position)) {
            Ok(data) => data,
            // Only a hole follows, or the file has shrunk.
            Err(RawErrno::NXIO) => break,
            // The filesystem does not report holes: treat all as data.
            Err(RawErrno::INVAL) => position,
            Err(errno) => return Err(errno),
        };
        let hole = match rustix::fs::seek(&from, SeekFrom::Hole(data)) {
            Ok(hole) => hole.min(length),
            Err(RawErrno::INVAL | RawErrno::NXIO) => length,
            Err(errno) => return Err(errno),
        };
        if data >= length {
            break;
        }
        let done = act(data, hole)?;
        all += done;
        // Another process may punch holes meanwhile: always advance.
        position = hole.max(data + 1);
        if done == 0 {
            break;
        }
    }
    Ok(all)
}

/// Copies `start..end`; returns the number of bytes.
fn copy_range(
    from: impl AsFd,
    to: impl AsFd,
    start: u64,
    end: u64,
) -> std::result::Result<u64, RawErrno> {
    let (mut input, mut output) = (start, start);
    while input < end {
        // 1 GiB keeps each call interruptible. The kernel's maximum is 2 GiB (MAX_RW_COUNT).
        let wanted = usize::try_from((end - input).min(1 << 30)).unwrap_or(1 << 30);
        match rustix::fs::copy_file_range(&from, Some(&mut input), &to, Some(&mut output), wanted) {
            Ok(0) => break,
            Ok(_) | Err(RawErrno::INTR) => {}
            // Not supported between these filesystems or for such files (/proc): read and write.
            Err(RawErrno::XDEV | RawErrno::INVAL | RawErrno::OPNOTSUPP | RawErrno::NOSYS) => {
                return Ok(input - start + by_hand(&from, &to, input, end)?);
            }
            Err(errno) => return Err(errno),
        }
    }
    Ok(input - start)
}

fn by_hand(
    from: impl AsFd,
    to: impl AsFd,
    start: u64,
    end: u64,
) -> std::result::Result<u64, RawErrno> {
    let mut buffer = vec![0; 256 * 1024];
    let mut position = start;
    while position < end {
        let wanted =
            usize::try_from(end - position).map_or(buffer.len(), |left| left.min(buffer.len()));
        let read = rustix::io::retry_on_intr(|| {
            rustix::io::pread(&from, &mut buffer[..wanted], position)
        })?;
        if read == 0 {
            break;
        }
        let mut rest = &buffer[..read];
        while !rest.is_empty() {
            let written = rustix::io::retry_on_intr(|| rustix::io::pwrite(&to, rest, position))?;
            rest = &rest[written..];
            position += written as u64;
        }
    }
    Ok(position - start)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Seek, Write};
    use std::os::unix::fs::{FileExt, MetadataExt};

    #[test]
    fn holes_stay_holes_and_bytes_stay_bytes() {
        let mut from = tempfile::tempfile().expect("from");
        from.write_all(b"head").expect("write");
        from.seek(std::io::SeekFrom::Start(8 << 20)).expect("seek");
        from.write_all(b"middle").expect("write");
        from.set_len(32 << 20).expect("a hole at the end");
        let to = tempfile::tempfile().expect("to");
        copy_sparse(&from, &to, 32 << 20).expect("copy");
        let metadata = to.metadata().expect("metadata");
        assert_eq!(metadata.len(), 32 << 20);
        assert!(
            metadata.blocks() * 512 < 1 << 20,
            "{} blocks",
            metadata.blocks()
        );
        let mut bytes = [1; 6];
        to.read_exact_at(&mut bytes, 8 << 20).expect("read");
        assert_eq!(&bytes, b"middle");
        to.read_exact_at(&mut bytes, 0).expect("read");
        assert_eq!(&bytes, b"head\0\0");
    }

    #[test]
    fn a_file_that_has_shrunk_ends_in_a_hole() {
        let mut from = tempfile::tempfile().expect("from");
        from.write_all(b"short").expect("write");
        let to = tempfile::tempfile().expect("to");
        assert_eq!(copy_sparse(&from, &to, 1 << 20).expect("copy"), 5);
        assert_eq!(to.metadata().expect("metadata").len(), 1 << 20);
    }
}
