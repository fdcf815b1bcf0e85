//! Names and keys that nothing has. They are asked about in the place of those that a volume may
//! not read, so that the answer, its time and all messages are those of missing content.

use crate::model::{CacheKey, Name, Reference};
use crate::sys;

/// A key that nothing has.
pub(super) fn none_key() -> CacheKey {
    let key = format!("none-{:032x}", sys::random()).parse();
    key.expect("digits after a word")
}

/// A name of the same kind and tenant that nothing has.
pub(super) fn decoy(name: &Name) -> Name {
    let reference = Reference::new(name.reference.kind(), none_key().as_str());
    Name {
        tenant: name.tenant.clone(),
        reference: reference.expect("a label of 37 bytes"),
    }
}
