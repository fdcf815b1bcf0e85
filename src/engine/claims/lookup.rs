//! The first steps of operations on claims: derive an id from a name, look a claim up.
//! Nothing here touches the pool.

use sha2::{Digest, Sha256};

use super::entries::VolumeEntry;
use super::types::Capacity;
use crate::engine::error::{Context, Error, Result, Shortage};
use crate::engine::shared::Inner;
use crate::engine::space;
use crate::engine::state::State;
use crate::model::{PersistentVolume, VolumeId, hex};

/// The prefix of a claim's id.
pub(super) const CLAIM: &str = "vol-";
/// The prefix of a snapshot's id.
pub(super) const SNAPSHOT: &str = "snap-";
/// The prefix of the id of a group's member. It differs from that of a single snapshot, whose name
/// may be any text, also a name that a group gives a member. (Older versions used one prefix for
/// both; such groups keep their ids.)
pub(super) const MEMBER: &str = "member-";
/// The prefix of a group's id.
pub(super) const GROUP: &str = "group-";

/// The message for a claim that may be damaged, so it cannot be snapshotted or cloned.
pub(super) const DAMAGED: &str = "possibly damaged, so it cannot be snapshotted or cloned: the \
                                  disk failed to write back data while the volume had unsaved \
                                  content";

/// The id for a name. A name always gives the same id, so a repeated request finds the object of
/// the first one.
pub(super) fn id_of(prefix: &str, name: &str) -> VolumeId {
    let digest = Sha256::digest(name.as_bytes());
    let id = format!("{prefix}{}", hex(&digest[..16]));
    id.parse().expect("a word and hexadecimal digits are an id")
}

/// The id of the claim that a request of this name makes.
#[must_use]
pub fn claim_id(name: &str) -> VolumeId {
    id_of(CLAIM, name)
}

/// The id of the snapshot that a request of this name takes.
#[must_use]
pub fn snapshot_id(name: &str) -> VolumeId {
    id_of(SNAPSHOT, name)
}

/// The id of the group of snapshots that a request of this name takes.
#[must_use]
pub fn group_id(name: &str) -> VolumeId {
    id_of(GROUP, name)
}

/// The id that a caller names, if it can be one.
pub(super) fn parse(id: &str) -> Result<VolumeId> {
    id.parse().map_err(|_| Error::NoSuchClaim(id.to_owned()))
}

/// The claim as it is now.
pub(super) fn claim(inner: &Inner, id: &VolumeId) -> Result<PersistentVolume> {
    known(&inner.state.lock(), id).map(|held| held.claim.clone())
}

/// The claim.
pub(super) fn known<'a>(state: &'a State, id: &VolumeId) -> Result<&'a VolumeEntry> {
    let held = state.claims.get(id);
    held.ok_or_else(|| Error::NoSuchClaim(id.to_string()))
}

/// Refuses a claim that cannot be used.
pub(super) fn refuse_broken(held: &VolumeEntry) -> Result<()> {
    match &held.problem {
        None => Ok(()),
        Some(problem) => Err(Error::ClaimInUse {
            claim: held.claim.id.clone(),
            how: format!("not usable: {}", problem.why()),
        }),
    }
}

/// The error for a persistent volume that is not mounted, while a process still holds its files.
/// No operation runs on it, so the caller is told to try again, not to wait. The driver's container
/// cannot see which process it is.
pub(super) fn held_open(id: &VolumeId) -> Error {
    Error::ClaimInUse {
        claim: id.clone(),
        how: "no longer mounted, but a process still holds files of it open (often of a pod that \
              was deleted by force); try again when that process has ended"
            .to_owned(),
    }
}

/// Claims may together promise more than there is, but none alone.
pub(super) fn refuse_too_large(inner: &Inner, wanted: u64) -> Result<()> {
    let space = inner.dirs.root.space().context("ask for the pool's room")?;
    if wanted > space.bytes {
        return Err(Error::TooLarge {
            wanted,
            pool: space.bytes,
        });
    }
    Ok(())
}

/// Refuses an empty claim on a full pool: less can be written than its size, than 1 GiB and than a
/// sixteenth of the pool ([`Capacity::needed`]). Its size reserves nothing, so a larger claim needs
/// no more. What eviction would free can be written. Caches that are not measured yet count as
/// enough.
pub(super) fn refuse_full(inner: &Inner, wanted: u64) -> Result<()> {
    let space = inner.dirs.root.space().context("ask for the pool's room")?;
    let needs = Capacity::needed(space.bytes, wanted);
    let mut free = space.bytes_available;
    if free < needs {
        free = free.saturating_add(space::evictable(inner, needs));
    }
    if free < needs {
        let what = format!(
            "{free} bytes can be written, and a new volume of {wanted} bytes needs {needs}"
        );
        return Err(Error::Full(Shortage { what, needs }));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_has_one_id_and_another_name_another() {
        let id = id_of(CLAIM, "pvc-1");
        assert_eq!(id, id_of(CLAIM, "pvc-1"));
        assert_ne!(id, id_of(CLAIM, "pvc-2"));
        assert_eq!(id.as_str().len(), CLAIM.len() + 32);
        assert!(
            id_of(GROUP, "\u{1f980} any text")
                .as_str()
                .starts_with(GROUP)
        );
    }
}
