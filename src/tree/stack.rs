//! What a stack of layers has under a path, by the rules by which overlayfs looks names up
//! (Documentation/filesystems/overlayfs.rst). For single names; whole trees are merged in
//! `flatten`.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

use rustix::fs::Stat;

use super::marks::{Opacity, is_whiteout_at};
use crate::sys::{self, Dir, FileKind};

/// A name that was found in a layer.
#[derive(Debug)]
pub struct Found {
    /// Which layer: the first is 0.
    pub layer: usize,
    /// The directory that has the name.
    pub dir: Dir,
    /// The name.
    pub name: OsString,
    /// What it is.
    pub stat: Stat,
}

/// Finds `path` (relative, not empty) in `layers`, newest first; `None`: no layer has it, or one
/// hides it. No symlink is followed. Of a directory the topmost is returned.
pub fn find(layers: &[&Dir], path: &OsStr) -> sys::Result<Option<Found>> {
    'layers: for (layer, root) in layers.iter().enumerate() {
        let mut dir = root.try_clone()?;
        let mut opacity = Opacity::of(&dir)?;
        let mut hides_below = false;
        let mut names = path.as_bytes().split(|&byte| byte == b'/').peekable();
        while let Some(name) = names.next() {
            let name = OsStr::from_bytes(name);
            let Some(stat) = dir.stat_if_there(name)? else {
                if hides_below {
                    return Ok(None);
                }
                continue 'layers;
            };
            if is_whiteout_at(&dir, name, opacity == Opacity::WithXattrWhiteouts)? {
                return Ok(None);
            }
            if names.peek().is_none() {
                let name = name.to_owned();
                return Ok(Some(Found {
                    layer,
                    dir,
                    name,
                    stat,
                }));
            }
            if FileKind::of_mode(stat.st_mode) != FileKind::Directory {
                return Ok(None);
            }
            dir = dir.open_beneath(name)?;
            opacity = Opacity::of(&dir)?;
            hides_below |= opacity == Opacity::Opaque;
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::Xattrs;
    use crate::tree::OPAQUE;

    #[test]
    fn the_newest_layer_that_has_or_hides_a_name_decides() {
        if !crate::sys::is_root_or_skip() {
            return;
        }
        let folder = tempfile::tempdir().expect("a temporary folder");
        let root = Dir::open(folder.path()).expect("open");
        let layers: Vec<Dir> = ["new", "old"]
            .into_iter()
            .map(|name| {
                root.create_dir(name, 0o700).expect("mkdir");
                root.open_beneath(name).expect("open")
            })
            .collect();
        let [new, old] = &layers[..] else {
            unreachable!()
        };
        for dir in ["merged", "opaque", "file"] {
            old.create_dir(dir, 0o700).expect("mkdir");
            let dir = old.open_beneath(dir).expect("open");
            dir.write_new("f", b"").expect("write");
            dir.write_new("gone", b"").expect("write");
        }
        for dir in ["merged", "opaque"] {
            new.create_dir(dir, 0o700).expect("mkdir");
        }
        new.write_new("file", b"").expect("write");
        let merged = new.open_beneath("merged").expect("open");
        merged.make_node("gone", 0o020_000, 0).expect("mknod");
        let opaque = new.open_beneath("opaque").expect("open");
        opaque.set_xattr(OPAQUE, b"y").expect("setxattr");
        let layers: Vec<&Dir> = layers.iter().collect();
        let found = |path: &str| {
            let found = find(&layers, OsStr::new(path)).expect("find");
            found.map(|found| found.layer)
        };
        assert_eq!(found("merged"), Some(0));
        assert_eq!(found("merged/f"), Some(1));
        assert_eq!(found("merged/gone"), None);
        assert_eq!(found("opaque/f"), None);
        assert_eq!(found("file"), Some(0));
        assert_eq!(found("file/f"), None);
        assert_eq!(found("nothing"), None);
    }
}
