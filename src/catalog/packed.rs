//! An entry in 45 bytes: the catalog's memory is what limits the cluster's size. Bytes only, so
//! nothing is lost to alignment.

use crate::model::{NameKind, Timestamp};

use super::entry::{Entry, SessionId, State, Version};
use super::name::NameHash;

/// A name in a session. All entries of a name are neighbours, those of newer sessions last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    name: NameHash,
    session: [u8; 4],
}

impl Key {
    pub(super) const LOWEST: Self = Self {
        name: NameHash([0; 16]),
        session: [0; 4],
    };

    pub(super) fn new(name: NameHash, session: SessionId) -> Self {
        Self {
            name,
            session: session.0.to_be_bytes(),
        }
    }

    pub(super) fn session(self) -> SessionId {
        SessionId(u32::from_be_bytes(self.session))
    }
}

/// The rest of an entry. Numbers have 48 bits: milliseconds for 8,900 years, 256 TiB.
#[derive(Debug, Clone, Copy)]
pub(super) struct Packed {
    stamp: [u8; 6],
    tie: [u8; 4],
    bytes: [u8; 6],
    fence: [u8; 6],
    layers: [u8; 2],
    kind_and_state: u8,
}

impl Packed {
    pub(super) fn new(entry: &Entry) -> Self {
        let kind = match entry.kind {
            NameKind::Artifact => 0,
            NameKind::ResourceCache => 1,
            NameKind::TaskCache => 2,
        };
        let state = match entry.state {
            State::Coming => 0,
            State::Durable => 4,
        };
        Self {
            stamp: pack(entry.version.stamp.0),
            tie: entry.version.tie.to_be_bytes(),
            bytes: pack(entry.bytes),
            fence: pack(entry.fence),
            layers: entry.layers.to_be_bytes(),
            kind_and_state: kind | state,
        }
    }

    /// This entry, marked: its stamp was too far ahead, and counts as now.
    pub(super) fn lowered(mut self) -> Self {
        self.kind_and_state |= 8;
        self
    }

    pub(super) fn is_coming(self) -> bool {
        self.kind_and_state & 4 == 0
    }

    pub(super) fn is_lowered(self) -> bool {
        self.kind_and_state & 8 != 0
    }

    pub(super) fn entry(&self, name: NameHash) -> Entry {
        Entry {
            name,
            kind: match self.kind_and_state & 3 {
                0 => NameKind::Artifact,
                1 => NameKind::ResourceCache,
                _ => NameKind::TaskCache,
            },
            state: if self.is_coming() {
                State::Coming
            } else {
                State::Durable
            },
            version: Version {
                stamp: Timestamp(unpack(self.stamp)),
                tie: u32::from_be_bytes(self.tie),
            },
            bytes: unpack(self.bytes),
            layers: u16::from_be_bytes(self.layers),
            fence: unpack(self.fence),
        }
    }
}

/// The number, or the highest one that fits.
fn pack(number: u64) -> [u8; 6] {
    let [_, _, bytes @ ..] = number.min((1 << 48) - 1).to_be_bytes();
    bytes
}

fn unpack(bytes: [u8; 6]) -> u64 {
    bytes
        .iter()
        .fold(0, |number, byte| number << 8 | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_45_bytes_and_comes_out_as_it_went_in() {
        assert_eq!(size_of::<Key>() + size_of::<Packed>(), 45);
        for (kind, state) in [
            (NameKind::Artifact, State::Coming),
            (NameKind::ResourceCache, State::Durable),
            (NameKind::TaskCache, State::Durable),
        ] {
            let entry = Entry {
                name: NameHash([7; 16]),
                kind,
                state,
                version: Version {
                    stamp: Timestamp(1_795_400_000_123),
                    tie: 0xdead_beef,
                },
                bytes: (1 << 48) - 1,
                layers: u16::MAX,
                fence: 1_795_400_000_122,
            };
            assert_eq!(Packed::new(&entry).entry(entry.name), entry);
            let large = Entry {
                bytes: u64::MAX,
                ..entry
            };
            assert_eq!(Packed::new(&large).entry(entry.name), entry);
        }
    }
}
