//! The lower layers of an overlay: how many there are, and their directories, newest first.
//! Only paths and descriptors; `assemble` mounts them.

use super::assemble::STRING_LAYERS;
use super::{Overlay, idmapped};
use crate::backend::error::Result;
use crate::model::LayerId;
use crate::model::layout::FS;
use crate::sys::{self, Dir};

/// The layers of a volume, newest first: the pool's, or the self-test's directories.
pub(super) enum Lowers<'a> {
    Layers(&'a [LayerId]),
    /// The self-test's paths in the pool, and whether the classic API must use mount(2).
    SelfTest(&'a Dir, &'a [&'a str], bool),
}

impl Lowers<'_> {
    /// Whether they are too many for one `fsconfig` string.
    pub(super) fn need_mount_ns(&self) -> bool {
        match self {
            Self::Layers(ids) => ids.len() > STRING_LAYERS,
            Self::SelfTest(.., in_mount_ns) => *in_mount_ns,
        }
    }

    pub(super) fn newest(&self, overlay: &Overlay) -> Result<Option<Dir>> {
        Ok(match self {
            Self::Layers([newest, ..]) => Some(overlay.layers.open_beneath(layer_fs(newest))?),
            Self::SelfTest(pool, [newest, ..], _) => Some(pool.open_beneath(newest)?),
            Self::Layers([]) | Self::SelfTest(_, [], _) => None,
        })
    }

    /// Opens all of them.
    pub(super) fn open(
        &self,
        overlay: &Overlay,
        view: Option<&idmapped::View>,
    ) -> Result<Vec<Dir>> {
        let opened: sys::Result<Vec<Dir>> = match self {
            Self::Layers(ids) => {
                let layers = view.map_or(&overlay.layers, idmapped::View::layers);
                let open = |id| layers.open_beneath(layer_fs(id));
                ids.iter().map(open).collect()
            }
            Self::SelfTest(pool, paths, _) => {
                let pool = view.map_or(*pool, idmapped::View::root);
                paths.iter().map(|path| pool.open_beneath(path)).collect()
            }
        };
        Ok(opened?)
    }
}

/// The content of a layer, relative to `layers/`.
pub(super) fn layer_fs(id: &LayerId) -> String {
    format!("{id}/{FS}")
}
