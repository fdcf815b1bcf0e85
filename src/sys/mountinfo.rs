//! Reads the kernel's whole mount table. This costs 1 ms per 1,000 mounts, so callers use it at
//! start and in checks, never in an RPC.

use std::ffi::OsString;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

use super::error::{Error, Result};

/// One line of `/proc/self/mountinfo` (proc(5)), with octal escapes decoded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountEntry {
    /// The mount's id. The kernel reuses it later.
    pub id: u64,
    /// The filesystem's device (major, minor): `st_dev` of its files, except on btrfs subvolumes.
    pub device: (u32, u32),
    /// The path inside the filesystem that is the mount's root.
    pub root: PathBuf,
    /// The mount point in this namespace.
    pub mount_point: PathBuf,
    /// The filesystem type.
    pub filesystem: String,
    /// The source shown for the mount.
    pub source: OsString,
}

/// Reads the mount table of this mount namespace.
pub fn mount_table() -> Result<Vec<MountEntry>> {
    const PATH: &str = "/proc/thread-self/mountinfo";
    let text = std::fs::read(PATH).map_err(|error| Error::new("read", PATH, error))?;
    Ok(text
        .split(|&byte| byte == b'\n')
        .filter_map(parse)
        .collect())
}

/// The mount through which a file was opened; `None` if it is not in this mount namespace.
pub fn mount_of(file: BorrowedFd<'_>) -> Result<Option<MountEntry>> {
    let path = format!("/proc/thread-self/fdinfo/{}", file.as_raw_fd());
    let facts = std::fs::read_to_string(&path).map_err(|error| Error::new("read", &path, error))?;
    // The id of statx(2) may be another one, which is never reused.
    let id = facts.lines().find_map(|line| line.strip_prefix("mnt_id:"));
    let id = id.and_then(|id| id.trim().parse::<u64>().ok());
    let mut table = mount_table()?.into_iter();
    Ok(table.find(|entry| Some(entry.id) == id))
}

fn parse(line: &[u8]) -> Option<MountEntry> {
    let mut fields = line.split(|&byte| byte == b' ');
    let mut number = || std::str::from_utf8(fields.next()?).ok()?.parse().ok();
    let (id, _parent): (_, u64) = (number()?, number()?);
    let device = std::str::from_utf8(fields.next()?).ok()?.split_once(':')?;
    let device = (device.0.parse().ok()?, device.1.parse().ok()?);
    let root = unescape(fields.next()?).into();
    let mount_point = unescape(fields.next()?).into();
    let mut rest = fields.skip_while(|&field| field != b"-").skip(1);
    let filesystem = std::str::from_utf8(rest.next()?).ok()?.to_owned();
    let source = unescape(rest.next()?);
    Some(MountEntry {
        id,
        device,
        root,
        mount_point,
        filesystem,
        source,
    })
}

/// Decodes escapes such as `\040`.
fn unescape(field: &[u8]) -> OsString {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&byte, tail)) = rest.split_first() {
        let octal = (byte == b'\\').then(|| tail.get(..3)).flatten();
        let value =
            octal.and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok());
        if let Some(value) = value {
            bytes.push(value);
            rest = &tail[3..];
        } else {
            bytes.push(byte);
            rest = tail;
        }
    }
    OsString::from_vec(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn a_line_with_spaces_and_optional_fields_is_read() {
        let line = br"36 35 98:0 /a\040b /mnt\134x rw,noatime master:1 shared:2 - overlay baggageclaim:csi-1 rw,errors=continue";
        let entry = parse(line).expect("it parses");
        assert_eq!((entry.id, entry.device), (36, (98, 0)));
        assert_eq!(entry.root, Path::new("/a b"));
        assert_eq!(entry.mount_point, Path::new("/mnt\\x"));
        assert_eq!(
            (entry.filesystem.as_str(), entry.source.to_str()),
            ("overlay", Some("baggageclaim:csi-1"))
        );
        assert!(parse(b"").is_none());
    }

    #[test]
    fn the_real_table_has_a_root() {
        let table = mount_table().expect("it is read");
        assert!(
            table
                .iter()
                .any(|entry| entry.mount_point == Path::new("/"))
        );
    }
}
