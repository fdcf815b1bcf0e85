//! Names as digests of 16 bytes, so that an entry of the catalog has no strings. Nodes and the
//! controller compute them in the same way.

use sha2::{Digest as _, Sha256};

use crate::model::Name;

/// The first 16 bytes of the SHA-256 of namespace, 0, kind, 0, key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NameHash(pub [u8; 16]);

impl NameHash {
    /// The digest of this name.
    #[must_use]
    pub fn of(name: &Name) -> Self {
        let (kind, key) = (name.reference.kind().as_str(), name.reference.key());
        let mut hash = Sha256::new();
        // No part has a control character, so the zeros divide them.
        for part in [name.tenant.as_str(), "\0", kind, "\0", key] {
            hash.update(part);
        }
        let digest: [u8; 32] = hash.finalize().into();
        let mut first = [0; 16];
        first.copy_from_slice(&digest[..16]);
        Self(first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_depends_on_each_part() {
        let hash = |tenant: &str, reference: &str| {
            NameHash::of(&Name {
                tenant: tenant.parse().expect("a label"),
                reference: reference.parse().expect("a reference"),
            })
        };
        let all = [
            hash("a", "artifact/b"),
            hash("b", "artifact/b"),
            hash("a", "artifact/c"),
            hash("a", "task-cache/b"),
            hash("a", "resource-cache/b"),
        ];
        for (index, one) in all.iter().enumerate() {
            assert!(!all[..index].contains(one));
        }
        // Fixed: printf 'ci\0task-cache\0main' | sha256sum
        let main = hash("ci", "task-cache/main");
        assert_eq!(main.0[..4], SUM_OF_MAIN);
    }

    const SUM_OF_MAIN: [u8; 4] = [0x42, 0x12, 0x6d, 0xce];
}
