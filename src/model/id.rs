//! Ids that become path components: each is checked once, where it enters, and is safe from then on.
//! Only ids live here; names that people choose are in `name`.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Why a text is not an id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum IdError {
    /// Nothing there.
    #[error("is empty")]
    Empty,
    /// Longer than the CSI specification allows.
    #[error("is {0} bytes long, at most 128 are allowed")]
    TooLong(usize),
    /// Something that has no place in a file's name of ours.
    #[error("holds {0:?}; only letters, digits, '-', '_' and '.' are allowed, and no leading '.'")]
    Character(char),
    /// Not 32 hexadecimal digits.
    #[error("is not 32 lower-case hexadecimal digits")]
    NotHex,
}

/// The id of a volume, chosen by the caller: kubelet's `csi-` + 64 hex digits for inline volumes.
///
/// 1 to 128 bytes of `A-Z a-z 0-9 - _ .`, not beginning with `.`; so it is one path component that is neither
/// hidden nor `..`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct VolumeId(Box<str>);

impl VolumeId {
    /// The longest id that the CSI specification allows, in bytes.
    pub const MAX_LEN: usize = 128;

    /// The id as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for VolumeId {
    type Err = IdError;

    fn from_str(text: &str) -> Result<Self, IdError> {
        if text.is_empty() {
            return Err(IdError::Empty);
        }
        if text.len() > Self::MAX_LEN {
            return Err(IdError::TooLong(text.len()));
        }
        let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if let Some(c) = text.chars().find(|&c| !allowed(c)) {
            return Err(IdError::Character(c));
        }
        if text.starts_with('.') {
            return Err(IdError::Character('.'));
        }
        Ok(Self(text.into()))
    }
}

impl TryFrom<String> for VolumeId {
    type Error = IdError;

    fn try_from(text: String) -> Result<Self, IdError> {
        text.parse()
    }
}

impl From<VolumeId> for String {
    fn from(id: VolumeId) -> Self {
        id.0.into()
    }
}

impl fmt::Display for VolumeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl AsRef<std::path::Path> for VolumeId {
    fn as_ref(&self) -> &std::path::Path {
        std::path::Path::new(&*self.0)
    }
}

/// Defines an id of 128 random bits, written as 32 lower-case hexadecimal digits.
macro_rules! random_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(u128);

        impl $name {
            /// The id with these bits; the caller brings the randomness.
            #[must_use]
            pub const fn from_bits(bits: u128) -> Self {
                Self(bits)
            }

            /// Its bits.
            #[must_use]
            pub const fn bits(self) -> u128 {
                self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:032x}", self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({:032x})"), self.0)
            }
        }

        impl FromStr for $name {
            type Err = IdError;

            fn from_str(text: &str) -> Result<Self, IdError> {
                let digit = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
                if text.len() != 32 || !text.bytes().all(digit) {
                    return Err(IdError::NotHex);
                }
                u128::from_str_radix(text, 16).map(Self).map_err(|_| IdError::NotHex)
            }
        }

        impl TryFrom<String> for $name {
            type Error = IdError;

            fn try_from(text: String) -> Result<Self, IdError> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> Self {
                id.to_string()
            }
        }
    };
}

random_id! {
    /// The id of an artifact: sealed, immutable content.
    ArtifactId
}
random_id! {
    /// The id of a layer: one immutable directory in the pool, `layers/<id>`.
    LayerId
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volume_ids_are_single_visible_path_components() {
        for good in ["csi-0123456789abcdef", "pvc-1", "A_b.c", &"x".repeat(128)] {
            assert_eq!(good.parse::<VolumeId>().expect(good).as_str(), good);
        }
        for bad in [
            "",
            ".",
            "..",
            ".x",
            "a/b",
            "../x",
            "a\0b",
            "a\nb",
            "ü",
            " ",
            &"x".repeat(129),
        ] {
            assert!(bad.parse::<VolumeId>().is_err(), "{bad:?} must be refused");
        }
    }

    #[test]
    fn random_ids_keep_their_leading_zeros() {
        let id = LayerId::from_bits(0xa);
        assert_eq!(id.to_string(), "0000000000000000000000000000000a");
        assert_eq!(id.to_string().parse::<LayerId>(), Ok(id));
        for bad in [
            "",
            "a",
            "0000000000000000000000000000000A",
            "+000000000000000000000000000000a",
        ] {
            assert_eq!(bad.parse::<LayerId>(), Err(IdError::NotHex));
        }
    }
}
