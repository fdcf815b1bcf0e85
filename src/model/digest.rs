//! SHA-256 digests as people and programs write them: `sha256:` and 64 digits. Bytes as digits.
//! Nothing is computed here: what hashes bytes is `archive`.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

const PREFIX: &str = "sha256:";

/// Lower-case hexadecimal digits.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        for digit in [byte >> 4, byte & 0xf] {
            text.extend(char::from_digit(digit.into(), 16));
        }
        text
    })
}

/// The SHA-256 of something.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Sha256(pub [u8; 32]);

/// Why a text is no digest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("must be sha256: and 64 hexadecimal digits")]
pub struct DigestError;

impl fmt::Display for Sha256 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}", hex(&self.0))
    }
}

impl fmt::Debug for Sha256 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Sha256 {
    type Err = DigestError;

    fn from_str(text: &str) -> Result<Self, DigestError> {
        let digits = text.strip_prefix(PREFIX).ok_or(DigestError)?.as_bytes();
        let mut bytes = [0; 32];
        if digits.len() != 2 * bytes.len() {
            return Err(DigestError);
        }
        let value = |digit: u8| {
            let value = char::from(digit).to_digit(16).ok_or(DigestError)?;
            u8::try_from(value).map_err(|_| DigestError)
        };
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = value(pair[0])? << 4 | value(pair[1])?;
        }
        Ok(Self(bytes))
    }
}

impl From<Sha256> for String {
    fn from(digest: Sha256) -> Self {
        digest.to_string()
    }
}

impl TryFrom<String> for Sha256 {
    type Error = DigestError;

    fn try_from(text: String) -> Result<Self, DigestError> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_is_read_as_it_is_written_and_nothing_else_is() {
        let mut bytes = [0xa0; 32];
        bytes[31] = 7;
        let text = Sha256(bytes).to_string();
        assert_eq!(text.len(), 71);
        assert_eq!(text.parse(), Ok(Sha256(bytes)));
        assert_eq!(text.to_uppercase().parse::<Sha256>(), Err(DigestError));
        let json = serde_json::to_string(&Sha256(bytes)).expect("text");
        assert_eq!(json, format!("{text:?}"));
        assert_eq!(
            serde_json::from_str::<Sha256>(&json).ok(),
            Some(Sha256(bytes))
        );
        for wrong in ["", "sha256:", &text[7..], &text[..70], &format!("{text}0")] {
            assert_eq!(wrong.parse::<Sha256>(), Err(DigestError), "{wrong}");
        }
        assert_eq!(text.replace('7', "g").parse::<Sha256>(), Err(DigestError));
        assert_eq!(
            format!("sha256:{}", "+1".repeat(32)).parse::<Sha256>(),
            Err(DigestError)
        );
        assert_eq!(
            format!("sha256:{}", "ä".repeat(32)).parse::<Sha256>(),
            Err(DigestError)
        );
    }
}
