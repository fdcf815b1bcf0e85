//! The tokens of paged lists: the name of the list, and the id after which the next page begins.
//!
//! Lists are in the order of ids. So a token stays valid when objects are created or deleted, even
//! the one with its id. A token of another list, or of another driver, is ABORTED (CSI
//! specification, "ListVolumes Errors").

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

    /// The token for the page after this id; empty if there is no next page.
    pub(super) fn token(self, after: Option<&VolumeId>) -> String {
        after.map_or_else(String::new, |id| format!("{}{id}", self.prefix()))
    }

    /// The id after which the page begins; `None` for the first page.
    pub(super) fn after(self, token: &str) -> Result<Option<VolumeId>, Failure> {
        if token.is_empty() {
            return Ok(None);
        }
        let id = token.strip_prefix(self.prefix());
        let id = id.and_then(|id| id.parse().ok());
        id.map(Some).ok_or(Failure::BadToken)
    }
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
    fn a_token_of_another_driver_is_aborted() {
        for bad in [
            "invalid-token",
            "0",
            "ü",
            "volumes",
            "volumes/",
            "volumes/../x",
            "VOLUMES/x",
            "766f6c756d65732f78",
        ] {
            assert!(
                matches!(List::Volumes.after(bad), Err(Failure::BadToken)),
                "{bad}"
            );
        }
    }
}
