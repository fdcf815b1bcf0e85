//! How an overlay is put together from open directories, by either mount API, with the same result: a detached mount,
//! in no peer group, `nosuid,nodev`.

use std::fmt::Write as _;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use crate::sys::{self, ClassicMount, Dir, Errno, Error, FsContext, MountAttrFlags, Result, Room};

/// Always written out, because parameters of the kernel module change the defaults. No metacopy: its uppers hold stubs
/// without data. No redirects, neither made nor followed: a layer must be a plain diff. No index and no xino: they tie a
/// top to the layers that it was first mounted with.
pub(super) const OPTIONS: [(&str, &str); 4] = [
    ("metacopy", "off"),
    ("redirect_dir", "nofollow"),
    ("index", "off"),
    ("xino", "off"),
];

/// The most that mount(2) takes as options, the final NUL included.
const PAGE: usize = 4096;

/// What an overlay is made of. All of it is opened through mounts of the namespace that it is mounted in.
pub(super) struct Parts<'a> {
    pub(super) source: &'a str,
    /// Newest first, at least one.
    pub(super) lowers: &'a [Dir],
    pub(super) top: &'a Dir,
    pub(super) work: &'a Dir,
    pub(super) volatile: bool,
    pub(super) read_only: bool,
}

/// How many layers surely fit into the 255 bytes that `fsconfig` takes as a string: `1048575:` each, where nobody allowed more descriptors than Linux
/// does by itself (`fs.nr_open`).
pub(super) const STRING_LAYERS: usize = 31;

/// By which calls.
#[derive(Clone, Copy)]
pub(super) enum How<'a> {
    /// `fsopen`, each layer for itself (where [`takes_descriptors`]).
    Descriptors,
    /// `fsopen`, all layers in one string (at most [`STRING_LAYERS`]).
    Strings,
    /// mount(2) in this room, where the mounts are attached through which the parts were opened.
    Classic(&'a Room),
}

/// A detached mount of `parts`.
pub(super) fn assemble(parts: &Parts<'_>, how: How<'_>) -> Result<OwnedFd> {
    match how {
        How::Classic(room) => classic(parts, room),
        How::Descriptors => {
            let context = begin(parts.top, parts.work, parts.volatile)?;
            finish(&context, parts.source, parts.lowers, parts.read_only)
        }
        How::Strings => {
            let context = FsContext::open("overlay")?;
            let lowers: Vec<String> = parts.lowers.iter().map(number).collect();
            sys::among_descriptors(|| {
                context.string("lowerdir", &lowers.join(":"))?;
                context.string("upperdir", &number(parts.top))?;
                context.string("workdir", &number(parts.work))?;
                options(&context, parts.volatile)?;
                // Before 6.5 the kernel looks for the directories only now.
                create(&context, parts.source, parts.read_only)
            })
        }
    }
}

/// Whether this kernel takes directories by descriptor (Linux 6.13): an error that says what it does not.
pub(super) fn takes_descriptors(dir: &Dir) -> Result<()> {
    FsContext::open("overlay")?.descriptor("workdir", dir)
}

/// The first half by descriptors, which knows nothing of the content below.
///
/// They are given as text: the mount table shows a descriptor as the whole path, to the pod and to everybody who reads the table.
pub(super) fn begin(top: &Dir, work: &Dir, volatile: bool) -> Result<FsContext> {
    let context = FsContext::open("overlay")?;
    // A kernel that has this API (6.13) looks for each directory when it is told.
    sys::among_descriptors(|| {
        context.string("workdir", &number(work))?;
        context.string("upperdir", &number(top))
    })?;
    options(&context, volatile)?;
    Ok(context)
}

/// The second half: over these layers, newest first.
pub(super) fn finish(
    context: &FsContext,
    source: &str,
    lowers: &[Dir],
    read_only: bool,
) -> Result<OwnedFd> {
    sys::among_descriptors(|| {
        let mut lowers = lowers.iter().map(number);
        lowers.try_for_each(|lower| context.string("lowerdir+", &lower))
    })?;
    create(context, source, read_only)
}

/// An open directory as a path from where the descriptors are.
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

fn classic(parts: &Parts<'_>, room: &Room) -> Result<OwnedFd> {
    let mut options = String::with_capacity(512);
    // Writing to a String cannot fail. The numbers are relative to /proc/self/fd, where the room is.
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
        // The kernel would cut it off without a word.
        return Err(Error::new("mount", parts.source, Errno::E2BIG)
            .with_detail(format!("{} layers", parts.lowers.len())));
    }
    room.mount_classic(ClassicMount {
        filesystem: "overlay",
        source: parts.source.to_owned(),
        options,
        read_only: parts.read_only,
    })
}
