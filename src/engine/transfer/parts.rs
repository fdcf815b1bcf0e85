//! Parts of layers whose fetch failed, in `incoming/`: they are kept, and deleted. `engine::parts`
//! knows them.

use std::time::Instant;

use crate::engine::parts::Part;
use crate::engine::shared::Inner;

/// Keeps a part for the next fetch.
pub(super) fn keep(inner: &Inner, part: Part) {
    tracing::debug!(layer = %part.id, bytes = part.bytes, "what came is kept for the next fetch");
    let gone = inner.collector.parts.keep(part);
    delete(inner, &gone);
}

/// Deletes the parts that are too old. Returns how many.
pub(in crate::engine) fn delete_old(inner: &Inner) -> usize {
    delete(inner, &inner.collector.parts.old(Instant::now()))
}

/// Deletes all parts. Returns how many.
pub(in crate::engine) fn delete_all(inner: &Inner) -> usize {
    delete(inner, &inner.collector.parts.all())
}

fn delete(inner: &Inner, parts: &[Part]) -> usize {
    for part in parts {
        let name = part.id.to_string();
        if let Err(error) = inner.throw_away(&inner.dirs.incoming, name.as_ref()) {
            tracing::error!(layer = %part.id, %error,
                "an incomplete layer could not be moved to trash/; it stays until the next start");
        }
    }
    parts.len()
}
