//! The tokens by which a list goes on: which list, and the id after which the next page begins.
//!
//! Lists are in the order of ids, so a token stays good whatever is made or deleted meanwhile, its own id included. To a
//! caller it is an opaque text; one that this driver did not make for that list is ABORTED (CSI specification,
//! "ListVolumes Errors").

use super::hex;
use super::status::Failure;
use crate::model::VolumeId;

/// Which list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum List {
    Volumes,
    Snapshots,
    Health,
}

impl List {
    fn prefix(self) -> &'static str {
        match self {
            Self::Volumes => "volumes/",
            Self::Snapshots => "snapshots/",
            Self::Health => "health/",
        }
    }

    /// The token of a page's end; empty when there is no next page.
    pub(super) fn token(self, after: Option<&VolumeId>) -> String {
        after.map_or_else(String::new, |id| {
            hex(format!("{}{id}", self.prefix()).as_bytes())
        })
    }

    /// The id after which to begin; `None`: at the beginning.
    pub(super) fn after(self, token: &str) -> Result<Option<VolumeId>, Failure> {
        if token.is_empty() {
            return Ok(None);
        }
        let id = unhex(token)
            .and_then(|bytes| String::from_utf8(bytes).ok())
            .and_then(|text| text.strip_prefix(self.prefix())?.parse().ok());
        match id {
            Some(id) => Ok(Some(id)),
            None => Err(Failure::BadToken),
        }
    }
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    let digit = |b: u8| match b {
        b'0'..=b'9' => Some(b - b'0'),
        b'a'..=b'f' => Some(b - b'a' + 10),
        _ => None,
    };
    let (pairs, []) = text.as_bytes().as_chunks::<2>() else {
        return None;
    };
    pairs
        .iter()
        .map(|[high, low]| Some(digit(*high)? << 4 | digit(*low)?))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LISTS: [List; 3] = [List::Volumes, List::Snapshots, List::Health];

    #[test]
    fn a_token_is_good_for_its_own_list_only() {
        let id: VolumeId = "vol-0123".parse().expect("an id");
        for list in LISTS {
            let token = list.token(Some(&id));
            for other in LISTS {
                let after = other.after(&token);
                if other == list {
                    assert_eq!(after.expect("its own"), Some(id.clone()));
                } else {
                    assert!(
                        matches!(after, Err(Failure::BadToken)),
                        "{list:?} {other:?}"
                    );
                }
            }
            assert_eq!(list.token(None), "");
            assert_eq!(list.after("").expect("the beginning"), None);
        }
    }

    #[test]
    fn what_nobody_gave_out_is_aborted() {
        let inside = |text: &str| hex(text.as_bytes());
        for bad in [
            "invalid-token".to_owned(),
            "0".to_owned(),
            "zz".to_owned(),
            "ü".to_owned(),
            inside("volumes/"),
            inside("volumes/../x"),
            inside("volumes"),
            inside("volumes/x").to_uppercase(),
            "ff".repeat(9),
        ] {
            assert!(
                matches!(List::Volumes.after(&bad), Err(Failure::BadToken)),
                "{bad}"
            );
        }
    }
}
