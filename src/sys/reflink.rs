//! Copying the content of one regular file into another: by sharing extents, or by bytes with the holes kept.
//! Content only: modes, owners and the walk over a tree belong to who copies.

use std::os::fd::AsFd;

use rustix::fs::SeekFrom;
use rustix::io::Errno as RawErrno;

/// Makes `to`, an empty file, share all of `from`'s extents (`FICLONE`, ioctl_ficlonerange(2)): O(extents), no data copied.
///
/// EOPNOTSUPP or ENOTTY: this filesystem has no reflinks. EXDEV: not one filesystem. EINVAL, ETXTBSY: not this file
/// (checksums switched off on btrfs, a swap file).
pub fn clone_file(from: impl AsFd, to: impl AsFd) -> std::result::Result<(), nix::errno::Errno> {
    rustix::fs::ioctl_ficlone(to, from)
        .map_err(|errno| nix::errno::Errno::from_raw(errno.raw_os_error()))
}

/// Copies the first `length` bytes of `from` into `to`, an empty file, leaving holes where `from` has holes.
///
/// A `from` that shrinks meanwhile leaves a hole at the end; one that grows is cut at `length`. Both are moved along
/// their file positions. Returns how many bytes were really copied.
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

/// How many bytes [`copy_sparse`] would copy: neither holes nor what was allocated and never written to.
pub fn data_length(from: impl AsFd, length: u64) -> std::result::Result<u64, nix::errno::Errno> {
    each_data(&from, length, |start, end| Ok(end - start))
        .map_err(|errno| nix::errno::Errno::from_raw(errno.raw_os_error()))
}

/// Does something with each stretch of data, which tells how many bytes there were; none: that was the last. Adds them up.
fn each_data(
    from: impl AsFd,
    length: u64,
    mut act: impl FnMut(u64, u64) -> std::result::Result<u64, RawErrno>,
) -> std::result::Result<u64, RawErrno> {
    let (mut position, mut all) = (0, 0);
    while position < length {
        let data = match rustix::fs::seek(&from, SeekFrom::Data(position)) {
            Ok(data) => data,
            // Nothing but a hole from here on, or the file has shrunk.
            Err(RawErrno::NXIO) => break,
            // A filesystem that does not know its holes: it is all data.
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
        // Somebody may punch the file while we read it: never stand still.
        position = hole.max(data + 1);
        if done == 0 {
            break;
        }
    }
    Ok(all)
}

/// Copies `start..end`; returns how many bytes there were.
fn copy_range(
    from: impl AsFd,
    to: impl AsFd,
    start: u64,
    end: u64,
) -> std::result::Result<u64, RawErrno> {
    let (mut input, mut output) = (start, start);
    while input < end {
        // The kernel takes at most 2 GiB per call (MAX_RW_COUNT); asking for 1 GiB keeps each call interruptible soon.
        let wanted = usize::try_from((end - input).min(1 << 30)).unwrap_or(1 << 30);
        match rustix::fs::copy_file_range(&from, Some(&mut input), &to, Some(&mut output), wanted) {
            Ok(0) => break,
            Ok(_) | Err(RawErrno::INTR) => {}
            // Not between these two filesystems, or not for files such as those in /proc: by hand.
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
