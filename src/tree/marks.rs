//! Overlayfs's marks in a layer: what is deleted, and what hides lower layers
//! (Documentation/filesystems/overlayfs.rst).

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use rustix::fs::Stat;

use crate::sys::{self, Dir, FileKind, Xattrs};

/// The prefix of overlay's own attributes when root mounts it.
const PREFIX: &[u8] = b"trusted.overlay.";
/// How Linux 6.7 stores a `trusted.overlay.*` that is set *through* an overlay.
const ESCAPED: &[u8] = b"trusted.overlay.overlay.";
/// On a directory: `y` hides lower layers; `x`: whiteouts in it may be files with [`WHITEOUT`].
pub const OPAQUE: &str = "trusted.overlay.opaque";
/// On a copied-up entry: its origin. Empty: unknown origin.
pub const ORIGIN: &str = "trusted.overlay.origin";
/// On an empty regular file in a directory marked `x`: the file is a whiteout (Linux 6.8).
const WHITEOUT: &str = "trusted.overlay.whiteout";

/// The meaning of an attribute's name in a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mark {
    /// Content: not overlay's own, or escaped.
    Content,
    /// Valid wherever the layer goes: opaque directories, whiteouts, flags that chattr(1) set
    /// through overlay.
    Lasting,
    /// The origin of a copied-up file and the like: meaningless or wrong in another layer.
    Passing,
}

impl Mark {
    /// The meaning of the attribute `name`.
    #[must_use]
    pub fn of(name: &OsStr) -> Self {
        let name = name.as_bytes();
        if name.starts_with(ESCAPED) {
            return Self::Content;
        }
        match name.strip_prefix(PREFIX) {
            None => Self::Content,
            Some(b"opaque" | b"whiteout" | b"protattr") => Self::Lasting,
            Some(_) => Self::Passing,
        }
    }
}

/// Whether an `lstat` shows a whiteout: a character device 0:0.
#[must_use]
pub fn is_whiteout(stat: &Stat) -> bool {
    FileKind::of_mode(stat.st_mode) == FileKind::CharacterDevice && stat.st_rdev == 0
}

/// Whether a name of a layer is a whiteout: a character device 0:0, or, if `xattr_whiteouts`, an
/// empty file with the attribute. A missing name is no whiteout.
pub fn is_whiteout_at(dir: &Dir, name: &OsStr, xattr_whiteouts: bool) -> sys::Result<bool> {
    let Some(stat) = dir.stat_if_there(name)? else {
        return Ok(false);
    };
    if is_whiteout(&stat) {
        return Ok(true);
    }
    let may_be = xattr_whiteouts && FileKind::of_mode(stat.st_mode) == FileKind::File;
    Ok(may_be && stat.st_size == 0 && has_whiteout_xattr(&dir.node(name)?)?)
}

/// How a directory of a layer relates to the same directory in lower layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Opacity {
    /// Merged with them.
    Merged,
    /// Merged with them; its whiteouts may be files with an attribute.
    WithXattrWhiteouts,
    /// Hides them.
    Opaque,
}

impl Opacity {
    /// The meaning of a directory's attribute.
    pub fn of(dir: &impl Xattrs) -> sys::Result<Self> {
        Ok(match dir.xattr(OPAQUE)?.as_deref() {
            Some(b"y") => Self::Opaque,
            Some(b"x") => Self::WithXattrWhiteouts,
            _ => Self::Merged,
        })
    }
}

/// Whether a pinned empty regular file, in a directory marked `x`, is a whiteout.
pub(super) fn has_whiteout_xattr(file: &impl Xattrs) -> sys::Result<bool> {
    Ok(file.xattr(WHITEOUT)?.is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_overlays_own_attributes_are_marks() {
        let of = |name: &str| Mark::of(OsStr::new(name));
        assert_eq!(of("user.overlay.opaque"), Mark::Content);
        assert_eq!(of("trusted.overlay.overlay.opaque"), Mark::Content);
        assert_eq!(of("trusted.overlay.opaque"), Mark::Lasting);
        assert_eq!(of("trusted.overlay.protattr"), Mark::Lasting);
        assert_eq!(of("trusted.overlay.origin"), Mark::Passing);
        assert_eq!(of("trusted.overlayx"), Mark::Content);
    }
}
