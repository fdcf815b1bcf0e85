//! Mounts an overlay from open directories, in one of three ways ([`How`]).
//! Each gives a detached mount in no peer group, `nosuid,nodev`.

use std::fmt::Write as _;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use crate::sys::{
    self, ClassicMount, Dir, Errno, Error, FsContext, MountAttrFlags, PrivateMountNs, Result,
};

/// Explicit, because parameters of the kernel module change the defaults. No metacopy: it leaves
/// stubs without data in the upper directory. Redirects are neither made nor followed: a layer must
/// be a plain diff. No index and no xino: they tie an upper directory to its first layers.
pub(super) const OPTIONS: [(&str, &str); 4] = [
    ("metacopy", "off"),
    ("redirect_dir", "nofollow"),
    ("index", "off"),
    ("xino", "off"),
];

/// The size limit of mount(2)'s options, with the final NUL.
const PAGE: usize = 4096;

/// The parts of an overlay, all opened through mounts of the namespace that it is mounted in.
pub(super) struct Parts<'a> {
    pub(super) source: &'a str,
    /// Newest first, at least one.
    pub(super) lowers: &'a [Dir],
    pub(super) top: &'a Dir,
    pub(super) work: &'a Dir,
    pub(super) volatile: bool,
    pub(super) read_only: bool,
}

/// How many layers surely fit into the 255 bytes of a `fsconfig` string. Each takes up to
/// `1048575:`, the default limit of descriptors (`fs.nr_open`).
pub(super) const STRING_LAYERS: usize = 31;

/// The system calls to use.
#[derive(Clone, Copy)]
pub(super) enum How<'a> {
    /// `fsopen`, one call per layer (if [`takes_descriptors`]).
    Descriptors,
    /// `fsopen`, all layers in one string (at most [`STRING_LAYERS`]).
    Strings,
    /// mount(2) in this namespace; the parts were opened through mounts in it.
    MountCall(&'a PrivateMountNs),
}

/// A detached mount of `parts`.
pub(super) fn assemble(parts: &Parts<'_>, how: How<'_>) -> Result<OwnedFd> {
    match how {
        How::MountCall(mount_ns) => by_mount_call(parts, mount_ns),
        How::Descriptors => {
            let context = FsContext::open("overlay")?;
            // As text: the mount table shows a descriptor as a whole path, to the pod and all its
            // readers. A kernel with this API (6.13) resolves each directory in its own call.
            sys::with_fd_cwd(|| {
                context.string("workdir", &number(parts.work))?;
                context.string("upperdir", &number(parts.top))?;
                let mut lowers = parts.lowers.iter().map(number);
                lowers.try_for_each(|lower| context.string("lowerdir+", &lower))
            })?;
            options(&context, parts.volatile)?;
            create(&context, parts.source, parts.read_only)
        }
        How::Strings => {
            let context = FsContext::open("overlay")?;
            let lowers: Vec<String> = parts.lowers.iter().map(number).collect();
            sys::with_fd_cwd(|| {
                context.string("lowerdir", &lowers.join(":"))?;
                context.string("upperdir", &number(parts.top))?;
                context.string("workdir", &number(parts.work))?;
                options(&context, parts.volatile)?;
                // Before 6.5 the kernel resolves the directories only in this call.
                create(&context, parts.source, parts.read_only)
            })
        }
    }
}

/// Fails if this kernel takes no directories by descriptor (before Linux 6.13).
pub(super) fn takes_descriptors(dir: &Dir) -> Result<()> {
    FsContext::open("overlay")?.descriptor("workdir", dir)
}

/// An open directory as a path relative to `/proc/self/fd`.
fn number(dir: &Dir) -> String {
    dir.as_fd().as_raw_fd().to_string()
}

fn options(context: &FsContext, volatile: bool) -> Result<()> {
    for (key, value) in OPTIONS {
        context.string(key, value)?;
    }
    if volatile {
        context.flag("volatile")?;
    }
    Ok(())
}

fn create(context: &FsContext, source: &str, read_only: bool) -> Result<OwnedFd> {
    context.string("source", source)?;
    context.create()?;
    let mut attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
    if read_only {
        attributes |= MountAttrFlags::MOUNT_ATTR_RDONLY;
    }
    context.mount(attributes)
}

fn by_mount_call(parts: &Parts<'_>, mount_ns: &PrivateMountNs) -> Result<OwnedFd> {
    let mut options = String::with_capacity(512);
    // Writing to a String cannot fail. The numbers are relative to `/proc/self/fd`.
    for (index, lower) in parts.lowers.iter().enumerate() {
        let separator = if index == 0 { "lowerdir=" } else { ":" };
        let _ = write!(options, "{separator}{}", number(lower));
    }
    let (top, work) = (number(parts.top), number(parts.work));
    let _ = write!(options, ",upperdir={top},workdir={work}");
    for (key, value) in OPTIONS {
        let _ = write!(options, ",{key}={value}");
    }
    if parts.volatile {
        options.push_str(",volatile");
    }
    if options.len() >= PAGE {
        // The kernel would silently cut it off.
        return Err(Error::new("mount", parts.source, Errno::E2BIG)
            .with_detail(format!("{} layers", parts.lowers.len())));
    }
    mount_ns.mount_classic(ClassicMount {
        filesystem: "overlay",
        source: parts.source.to_owned(),
        options,
        read_only: parts.read_only,
    })
}
