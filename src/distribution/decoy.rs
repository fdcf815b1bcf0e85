//! Names and keys that nothing has. They are asked about in the place of those that a volume may
//! not read, so that the answer, its time and all messages are those of missing content.

use crate::model::{CacheKey, Name, Reference};

/// A key that nothing has. Without randomness it is one that nothing is likely to have.
pub(super) fn none_key() -> CacheKey {
    let mut random = [0; 16];
    let _ = getrandom::fill(&mut random);
    let key = format!("none-{:032x}", u128::from_ne_bytes(random)).parse();
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
