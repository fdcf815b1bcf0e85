//! Unpacks a layer where nothing is stacked: on a tree that is a snapshot or copy of all below it.
//! The layer is made beside the tree (`unpack`), and then applied to it (`tree::apply`).

use std::ffi::OsStr;
use std::io::Read;
use std::path::Path;

use super::error::Result;
use super::marks::LayerMarks;
use super::progress::Progress;
use super::unpack::{Unpack, Unpacked, unpack_layer};
use crate::sys::{self, Dir};
use crate::tree::{self, Stop};

/// Unpacks one layer onto `tree`, a snapshot or copy of all that is below it: the tree is then what
/// overlayfs shows of the stack. No mark stays in it.
///
/// The layer is unpacked beside and then moved into its place, so `tree` is one filesystem (on
/// btrfs: one subvolume). On an error `tree` is neither the old nor the new one.
pub fn unpack_onto(
    input: impl Read + Send,
    tree: &Dir,
    marks: LayerMarks,
    how: Unpack,
    progress: &Progress,
    stop: Stop<'_>,
) -> Result<Unpacked> {
    // A name that no archive can guess: the directory must not be a part of the layer.
    let name = format!(".layer-{:032x}", sys::random());
    let times = tree::times_of(&tree.stat_self()?);
    tree.create_dir(&name, 0o700)?;
    // The new layer's root begins as a copy of this one.
    tree.set_times(&times)?;
    let (layer, below) = (tree.open_beneath(&name)?, [tree.try_clone()?]);
    let unpacked = unpack_layer(input, &layer, &below, marks, how, progress, stop);
    let result = unpacked.and_then(|unpacked| {
        tree::apply(tree, OsStr::new(&name), stop)?;
        Ok(unpacked)
    });
    if result.is_err() {
        // The first error is the one to tell.
        let _ = tree::delete(tree, Path::new(&name), &|| false);
    }
    result
}
