//! btrfs ioctls for subvolumes, snapshots and simple quotas (btrfs-ioctl(2), `linux/btrfs_tree.h`).
//!
//! Queries on the whole filesystem (nested subvolumes, quota group usage) read its trees with
//! `TREE_SEARCH_V2`. That call needs CAP_SYS_ADMIN and takes about a microsecond.

#![expect(
    unsafe_code,
    reason = "asserts that structures match the kernel's layout, and opens one by its handle"
)]

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use linux_raw_sys::btrfs::{
    btrfs_ioctl_ino_lookup_args, btrfs_ioctl_qgroup_assign_args, btrfs_ioctl_qgroup_create_args,
    btrfs_ioctl_qgroup_limit_args, btrfs_ioctl_quota_ctl_args, btrfs_ioctl_search_key,
    btrfs_qgroup_limit,
};
use linux_raw_sys::ioctl as request;
use nix::errno::Errno;
use nix::libc;

use super::dir::Dir;
use super::error::{Error, IntoErrno, Result};
use super::ioctl::{Plain, ioctl};
use super::statfs::Space;

/// `BTRFS_FIRST_FREE_OBJECTID`: the inode of every subvolume's root.
const SUBVOLUME_ROOT: u64 = 256;
/// `BTRFS_ROOT_TREE_OBJECTID`
const ROOT_TREE: u64 = 1;
/// `BTRFS_QUOTA_TREE_OBJECTID`
const QUOTA_TREE: u64 = 8;
/// `BTRFS_ROOT_REF_KEY`: an item that links a subvolume to a subvolume nested in it.
const ROOT_REF: u32 = 156;
/// `BTRFS_QGROUP_STATUS_KEY`
const QGROUP_STATUS: u32 = 240;
/// `BTRFS_QGROUP_INFO_KEY`
const QGROUP_INFO: u32 = 242;
/// `BTRFS_QGROUP_RELATION_KEY`
const QGROUP_RELATION: u32 = 246;
/// `BTRFS_QGROUP_STATUS_FLAG_SIMPLE_MODE`
const SIMPLE_MODE: u64 = 1 << 3;
/// `BTRFS_QUOTA_CTL_ENABLE_SIMPLE_QUOTA` (Linux 6.7)
const ENABLE_SIMPLE_QUOTA: u64 = 4;
/// `BTRFS_SUBVOL_RDONLY`
const READ_ONLY: u64 = 1 << 1;
/// `BTRFS_SUBVOL_SPEC_BY_ID` (Linux 5.7)
const BY_ID: u64 = 1 << 4;
/// `BTRFS_QGROUP_LIMIT_MAX_RFER`
const MAX_REFERENCED: u64 = 1;

/// The argument of `SUBVOL_SETFLAGS`.
#[repr(C)]
struct Flags(u64);
/// `struct btrfs_ioctl_vol_args`: a name.
#[repr(C)]
struct Named {
    fd: i64,
    name: [u8; 4088],
}
/// `struct btrfs_ioctl_vol_args_v2`: a name, or a subvolume's id in its first eight bytes.
#[repr(C)]
struct NamedV2 {
    fd: i64,
    transaction: u64,
    flags: u64,
    unused: [u64; 4],
    name: [u8; 4040],
}
/// `struct btrfs_ioctl_search_args_v2` with a buffer for the results.
#[repr(C)]
struct Search {
    key: btrfs_ioctl_search_key,
    size: u64,
    items: [u8; SEARCH_ROOM],
}
/// `struct file_handle` with the first fields of `struct btrfs_fid`.
#[repr(C)]
struct Handle {
    /// The length of what follows `kind`, without padding.
    bytes: u32,
    kind: i32,
    inode: u64,
    subvolume: u64,
    /// 0: any.
    generation: u32,
}
/// `FILEID_BTRFS_WITHOUT_PARENT`, and its length.
const WITHOUT_PARENT: i32 = 0x4d;
const HANDLE_BYTES: u32 = 20;
const SEARCH_ROOM: usize = 16 * 1024;
/// `struct btrfs_ioctl_search_header`: transaction, objectid, offset, type, length.
const SEARCH_HEADER: usize = 32;

const _: () = assert!(size_of::<Named>() == 4096 && size_of::<NamedV2>() == 4096);
const _: () = assert!(size_of::<Handle>() == 32 && std::mem::offset_of!(Handle, generation) == 24);
const _: () = assert!(size_of::<btrfs_ioctl_search_key>() == 104);
const _: () = assert!(size_of::<Search>() == 112 + SEARCH_ROOM);
const _: () = assert!(size_of::<btrfs_ioctl_ino_lookup_args>() == 4096);
const _: () = assert!(size_of::<btrfs_ioctl_qgroup_limit_args>() == 48);

// SAFETY: only integers and arrays of integers, in the kernel header's layout (sizes above).
unsafe impl Plain for Named {}
// SAFETY: one integer.
unsafe impl Plain for Flags {}
// SAFETY: as above.
unsafe impl Plain for NamedV2 {}
// SAFETY: as above.
unsafe impl Plain for Search {}
// SAFETY: generated from the kernel's header; only integers.
unsafe impl Plain for btrfs_ioctl_ino_lookup_args {}
// SAFETY: as above.
unsafe impl Plain for btrfs_ioctl_quota_ctl_args {}
// SAFETY: as above.
unsafe impl Plain for btrfs_ioctl_qgroup_create_args {}
// SAFETY: as above.
unsafe impl Plain for btrfs_ioctl_qgroup_assign_args {}
// SAFETY: as above.
unsafe impl Plain for btrfs_ioctl_qgroup_limit_args {}

/// A quota group: a level and a number. Each subvolume has one of level 0, numbered by its id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuotaGroup(u64);

impl QuotaGroup {
    /// The level 0 group of one subvolume.
    #[must_use]
    pub const fn of_subvolume(id: u64) -> Self {
        Self(id)
    }

    /// The level 1 group for a subvolume and all subvolumes nested in it.
    #[must_use]
    pub const fn around_subvolume(id: u64) -> Self {
        // BTRFS_QGROUP_LEVEL_SHIFT
        Self((1 << 48) | id)
    }
}

/// Whether and how a filesystem counts quotas.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quotas {
    /// Quotas are off.
    Off,
    /// Simple quotas: an extent counts for the subvolume that wrote it. This is cheap.
    Simple,
    /// Full quotas: btrfs tracks all owners of each extent. A snapshot costs tens of milliseconds.
    Full,
}

/// A subvolume nested in another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NestedSubvolume {
    /// The subvolume's id.
    pub id: u64,
    /// The inode of the directory that holds it.
    directory: u64,
    /// Its name in that directory.
    pub name: OsString,
}

/// One item of a btrfs tree: the offset from its key, and its data.
struct Item {
    offset: u64,
    data: Vec<u8>,
}

fn little_endian(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    if let Some(bytes) = bytes.get(at..at + 8) {
        word.copy_from_slice(bytes);
    }
    u64::from_le_bytes(word)
}

fn native(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    if let Some(bytes) = bytes.get(at..at + 8) {
        word.copy_from_slice(bytes);
    }
    u64::from_ne_bytes(word)
}

/// Each method acts on the filesystem or subvolume that contains this directory.
impl Dir {
    fn btrfs_error(&self, call: &'static str, errno: impl IntoErrno) -> Error {
        Error::new(call, self.path(), errno)
    }

    /// Whether this directory is the root of a btrfs subvolume.
    pub fn is_subvolume(&self) -> Result<bool> {
        Ok(self.stat_self()?.st_ino == SUBVOLUME_ROOT && self.space()?.magic == Space::BTRFS)
    }

    /// Makes the space of deleted files available: btrfs frees it when it commits a transaction,
    /// each 30 seconds by itself. Does nothing on other filesystems. It may take seconds.
    ///
    /// Unlike `syncfs(2)`, the ioctl also starts the thread that removes deleted files and unused
    /// block groups (`fs/btrfs/ioctl.c`).
    pub fn free_deleted(&self) -> Result<()> {
        if self.space()?.magic != Space::BTRFS {
            return Ok(());
        }
        ioctl(self, request::BTRFS_IOC_SYNC, &mut Flags(0))
            .map(drop)
            .map_err(|errno| self.btrfs_error("BTRFS_IOC_SYNC", errno))
    }

    /// The id of the subvolume that contains this directory.
    pub fn subvolume_id(&self) -> Result<u64> {
        let mut lookup = btrfs_ioctl_ino_lookup_args {
            treeid: 0,
            objectid: SUBVOLUME_ROOT,
            name: [0; 4080],
        };
        ioctl(self, request::BTRFS_IOC_INO_LOOKUP, &mut lookup)
            .map_err(|errno| self.btrfs_error("BTRFS_IOC_INO_LOOKUP", errno))?;
        Ok(lookup.treeid)
    }

    /// Clears `chattr +i` and `+a` on the root of a read-only subvolume. The subvolume is writable
    /// meanwhile, so no other process may have access to it.
    pub fn unguard_subvolume(&self) -> Result<()> {
        match self.clear_guard_flags() {
            Err(error) if error.is(Errno::EROFS) => {}
            result => return result.map(drop),
        }
        self.set_subvolume_read_only(false)?;
        let cleared = self.clear_guard_flags();
        self.set_subvolume_read_only(true)?;
        cleared.map(drop)
    }

    /// Makes a subvolume read-only or writable. Its owner may do so without privilege.
    pub fn set_subvolume_read_only(&self, read_only: bool) -> Result<()> {
        let mut flags = Flags(if read_only { READ_ONLY } else { 0 });
        ioctl(self, request::BTRFS_IOC_SUBVOL_SETFLAGS, &mut flags)
            .map(drop)
            .map_err(|errno| self.btrfs_error("BTRFS_IOC_SUBVOL_SETFLAGS", errno))
    }

    /// Creates an empty subvolume `name`, owned by the caller, with mode 0777 less the umask.
    pub fn create_subvolume(&self, name: impl AsRef<OsStr>) -> Result<()> {
        let mut arguments = Named {
            fd: 0,
            name: [0; 4088],
        };
        let name = name.as_ref();
        fill(&mut arguments.name, name)
            .and_then(|()| ioctl(self, request::BTRFS_IOC_SUBVOL_CREATE, &mut arguments))
            .map(drop)
            .map_err(|errno| self.error("BTRFS_IOC_SUBVOL_CREATE", name, errno))
    }

    /// Snapshots the subvolume with the root `source` as `name` in this directory.
    ///
    /// The snapshot is atomic and may or may not include concurrent writes. A subvolume nested in
    /// `source` appears in it as an empty directory.
    pub fn create_snapshot(
        &self,
        name: impl AsRef<OsStr>,
        source: &Self,
        read_only: bool,
    ) -> Result<()> {
        let mut arguments = NamedV2 {
            fd: i64::from(source.as_fd().as_raw_fd()),
            transaction: 0,
            flags: if read_only { READ_ONLY } else { 0 },
            unused: [0; 4],
            name: [0; 4040],
        };
        let name = name.as_ref();
        fill(&mut arguments.name, name)
            .and_then(|()| ioctl(self, request::BTRFS_IOC_SNAP_CREATE_V2, &mut arguments))
            .map(drop)
            .map_err(|errno| self.error("BTRFS_IOC_SNAP_CREATE_V2", name, errno))
    }

    /// Destroys a subvolume of this filesystem by its id. btrfs frees its space in the background.
    ///
    /// ENOTEMPTY if it contains another subvolume. Open descriptors in it stay usable. Linux 5.7.
    pub fn destroy_subvolume(&self, id: u64) -> Result<()> {
        let mut arguments = NamedV2 {
            fd: 0,
            transaction: 0,
            flags: BY_ID,
            unused: [0; 4],
            name: [0; 4040],
        };
        // A union in the kernel's structure: with `BY_ID`, this is the subvolume's id.
        arguments.name[..8].copy_from_slice(&id.to_ne_bytes());
        ioctl(self, request::BTRFS_IOC_SNAP_DESTROY_V2, &mut arguments)
            .map(drop)
            .map_err(|errno| {
                self.btrfs_error("BTRFS_IOC_SNAP_DESTROY_V2", errno)
                    .with_detail(format!("subvolume {id}"))
            })
    }

    /// Opens the root of a subvolume of this filesystem by its id.
    pub fn open_subvolume(&self, id: u64) -> Result<Self> {
        self.open_inode(id, SUBVOLUME_ROOT)
    }

    /// Opens a directory of a subvolume by its inode, however long its path is.
    fn open_inode(&self, subvolume: u64, inode: u64) -> Result<Self> {
        let mut handle = Handle {
            bytes: HANDLE_BYTES,
            kind: WITHOUT_PARENT,
            inode,
            subvolume,
            generation: 0,
        };
        // SAFETY: the descriptor is open, and the structure is a handle with its length.
        let opened = unsafe {
            libc::syscall(
                libc::SYS_open_by_handle_at,
                self.as_fd().as_raw_fd(),
                std::ptr::from_mut(&mut handle),
                libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC,
            )
        };
        let place = format!("inode {inode} of subvolume {subvolume}");
        let opened = Errno::result(opened).and_then(|fd| {
            // The kernel returns an int.
            i32::try_from(fd).map_err(|_| Errno::EBADF)
        });
        let opened = opened.map_err(|errno| {
            let error = self.btrfs_error("open_by_handle_at", errno);
            error.with_detail(place.clone())
        })?;
        // SAFETY: it was just opened, and has no other owner.
        let fd = unsafe { OwnedFd::from_raw_fd(opened) };
        Ok(Self::from_fd(fd, self.path().join(place)))
    }

    /// Opens the directory that holds a subvolume nested in subvolume `within`.
    pub fn open_directory_of(&self, within: u64, nested: &NestedSubvolume) -> Result<Self> {
        self.open_inode(within, nested.directory)
    }

    /// Destroys a subvolume nested in subvolume `within`, like [`Self::destroy_subvolume`]. That
    /// fails if the path is longer than 4,095 bytes.
    pub fn destroy_nested_subvolume(&self, within: u64, nested: &NestedSubvolume) -> Result<()> {
        let directory = self.open_directory_of(within, nested)?;
        let mut arguments = Named {
            fd: 0,
            name: [0; 4088],
        };
        fill(&mut arguments.name, &nested.name)
            .and_then(|()| ioctl(&directory, request::BTRFS_IOC_SNAP_DESTROY, &mut arguments))
            .map(drop)
            .map_err(|errno| directory.error("BTRFS_IOC_SNAP_DESTROY", &nested.name, errno))
    }

    /// The first subvolume of those nested directly in subvolume `id` whose own id is at least
    /// `from`.
    pub fn nested_subvolume(&self, id: u64, from: u64) -> Result<Option<NestedSubvolume>> {
        let found = self.search_range(ROOT_TREE, id, ROOT_REF, (from, u64::MAX), 1)?;
        Ok(found.into_iter().next().map(|item| NestedSubvolume {
            id: item.offset,
            // `struct btrfs_root_ref`: dirid, sequence, name_len, then the name.
            directory: little_endian(&item.data, 0),
            name: OsString::from_vec(item.data.get(18..).unwrap_or_default().to_vec()),
        }))
    }

    /// The path of a nested subvolume, relative to the root of subvolume `within`. For messages.
    #[must_use]
    pub fn path_of_nested(&self, within: u64, nested: &NestedSubvolume) -> PathBuf {
        let mut lookup = btrfs_ioctl_ino_lookup_args {
            treeid: within,
            objectid: nested.directory,
            name: [0; 4080],
        };
        // The path is longer than 4,080 bytes, or the directory is gone: return only the name.
        let directory = match ioctl(self, request::BTRFS_IOC_INO_LOOKUP, &mut lookup) {
            Ok(_) => lookup
                .name
                .iter()
                .take_while(|&&byte| byte != 0)
                .map(|byte| byte.to_ne_bytes()[0])
                .collect(),
            Err(_) => Vec::new(),
        };
        PathBuf::from(OsString::from_vec(directory)).join(&nested.name)
    }

    /// Whether and how this filesystem counts quotas.
    pub fn quotas(&self) -> Result<Quotas> {
        let status = self.search_quotas(0, QGROUP_STATUS, (0, 0))?;
        Ok(match status.first() {
            None => Quotas::Off,
            // `struct btrfs_qgroup_status_item`: version, generation, flags.
            Some(item) if little_endian(&item.data, 16) & SIMPLE_MODE != 0 => Quotas::Simple,
            Some(_) => Quotas::Full,
        })
    }

    /// Enables simple quotas, permanently and for the whole filesystem. EINVAL before Linux 6.7.
    pub fn enable_simple_quotas(&self) -> Result<()> {
        let mut arguments = btrfs_ioctl_quota_ctl_args {
            cmd: ENABLE_SIMPLE_QUOTA,
            status: 0,
        };
        ioctl(self, request::BTRFS_IOC_QUOTA_CTL, &mut arguments)
            .map(drop)
            .map_err(|errno| self.btrfs_error("BTRFS_IOC_QUOTA_CTL", errno))
    }

    /// Creates a quota group, or removes it (EBUSY while it has members).
    pub fn set_quota_group(&self, group: QuotaGroup, exists: bool) -> Result<()> {
        let mut arguments = btrfs_ioctl_qgroup_create_args {
            create: u64::from(exists),
            qgroupid: group.0,
        };
        ioctl(self, request::BTRFS_IOC_QGROUP_CREATE, &mut arguments)
            .map(drop)
            .map_err(|errno| self.btrfs_error("BTRFS_IOC_QGROUP_CREATE", errno))
    }

    /// Adds a quota group to one of a higher level, or removes it from there.
    pub fn assign_quota_group(
        &self,
        member: QuotaGroup,
        group: QuotaGroup,
        inside: bool,
    ) -> Result<()> {
        let mut arguments = btrfs_ioctl_qgroup_assign_args {
            assign: u64::from(inside),
            src: member.0,
            dst: group.0,
        };
        ioctl(self, request::BTRFS_IOC_QGROUP_ASSIGN, &mut arguments)
            .map(drop)
            .map_err(|errno| self.btrfs_error("BTRFS_IOC_QGROUP_ASSIGN", errno))
    }

    /// Limits the bytes that a quota group may reference; `None` removes the limit.
    pub fn limit_quota_group(&self, group: QuotaGroup, bytes: Option<u64>) -> Result<()> {
        let mut arguments = btrfs_ioctl_qgroup_limit_args {
            qgroupid: group.0,
            lim: btrfs_qgroup_limit {
                flags: MAX_REFERENCED,
                // CLEAR_VALUE of fs/btrfs/qgroup.c: -1.
                max_rfer: bytes.unwrap_or(u64::MAX),
                max_excl: 0,
                rsv_rfer: 0,
                rsv_excl: 0,
            },
        };
        ioctl(self, request::BTRFS_IOC_QGROUP_LIMIT, &mut arguments)
            .map(drop)
            .map_err(|errno| self.btrfs_error("BTRFS_IOC_QGROUP_LIMIT", errno))
    }

    /// The bytes that a quota group references, as of the last write-back; `None`: no such group.
    pub fn quota_group_usage(&self, group: QuotaGroup) -> Result<Option<u64>> {
        let found = self.search_quotas(0, QGROUP_INFO, (group.0, group.0))?;
        // `struct btrfs_qgroup_info_item`: generation, referenced, …
        Ok(found.first().map(|item| little_endian(&item.data, 8)))
    }

    /// The members and the parents of a quota group. btrfs stores the relation in both directions.
    pub fn related_quota_groups(&self, group: QuotaGroup) -> Result<Vec<QuotaGroup>> {
        let found = self.search_quotas(group.0, QGROUP_RELATION, (0, u64::MAX))?;
        Ok(found
            .into_iter()
            .map(|item| QuotaGroup(item.offset))
            .collect())
    }

    /// Searches the quota tree. Returns nothing if that tree does not exist: Linux 6.1 answers
    /// ENOENT, newer kernels an empty result.
    fn search_quotas(&self, object: u64, kind: u32, offsets: (u64, u64)) -> Result<Vec<Item>> {
        match self.search_range(QUOTA_TREE, object, kind, offsets, u32::MAX) {
            Err(error) if error.is(Errno::ENOENT) => Ok(Vec::new()),
            found => found,
        }
    }

    /// The first `most` items of one object and type whose offset is in the range (both ends
    /// inclusive).
    fn search_range(
        &self,
        tree: u64,
        object: u64,
        kind: u32,
        (first, last): (u64, u64),
        most: u32,
    ) -> Result<Vec<Item>> {
        let mut found = Vec::new();
        let mut next = first;
        loop {
            let mut search = Search {
                key: btrfs_ioctl_search_key {
                    tree_id: tree,
                    min_objectid: object,
                    max_objectid: object,
                    min_offset: next,
                    max_offset: last,
                    min_transid: 0,
                    max_transid: u64::MAX,
                    min_type: kind,
                    max_type: kind,
                    nr_items: most,
                    unused: 0,
                    unused1: 0,
                    unused2: 0,
                    unused3: 0,
                    unused4: 0,
                },
                size: SEARCH_ROOM as u64,
                items: [0; SEARCH_ROOM],
            };
            ioctl(self, request::BTRFS_IOC_TREE_SEARCH_V2, &mut search)
                .map_err(|errno| self.btrfs_error("BTRFS_IOC_TREE_SEARCH_V2", errno))?;
            if search.key.nr_items == 0 {
                return Ok(found);
            }
            let mut rest = &search.items[..];
            for _ in 0..search.key.nr_items {
                let offset = native(rest, 16);
                let length = usize::try_from(native(rest, 24) >> 32).unwrap_or(0);
                // Type and length are two 32-bit integers; their order depends on endianness.
                let length = if cfg!(target_endian = "little") {
                    length
                } else {
                    usize::try_from(native(rest, 24) & 0xffff_ffff).unwrap_or(0)
                };
                let Some(data) = rest.get(SEARCH_HEADER..SEARCH_HEADER + length) else {
                    break;
                };
                found.push(Item {
                    offset,
                    data: data.to_vec(),
                });
                rest = &rest[SEARCH_HEADER + length..];
                next = offset;
            }
            if next >= last || found.len() >= most as usize {
                return Ok(found);
            }
            next += 1;
        }
    }
}

/// Copies a name into an ioctl's field and leaves space for the final NUL.
fn fill(field: &mut [u8], name: &OsStr) -> std::result::Result<(), Errno> {
    let name = name.as_bytes();
    if name.len() >= field.len() {
        return Err(Errno::ENAMETOOLONG);
    }
    field[..name.len()].copy_from_slice(name);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_btrfs_is_no_subvolume() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let dir = Dir::open(folder.path()).expect("it opens");
        if dir.space().expect("statfs").magic != Space::BTRFS {
            assert!(!dir.is_subvolume().expect("asked"));
            assert!(dir.create_subvolume("s").is_err());
            dir.free_deleted().expect("nothing to do");
        }
        let long = OsString::from("x".repeat(5000));
        let error = dir.create_subvolume(&long).expect_err("too long");
        assert!(error.is(Errno::ENAMETOOLONG));
    }
}
