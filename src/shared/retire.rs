//! Writes after which a name shows nothing: it is over, cleared by a fence, evicted, or deleted.
//! Each is conditional: a commit that comes meanwhile stays. `decide` says when they are made.

use super::clock::Since;
use super::commit::look;
use super::decide;
use super::error::{Error, Result};
use super::keys::Keys;
use super::record::{NameRecord, NameState, ObjectId, encode};
use super::store::{Store, Version};
use crate::model::Timestamp;

/// Lets a name show nothing, as if it had expired. Returns `false` if another writer was faster.
pub(super) fn withdraw(
    store: &Store,
    record: NameRecord,
    version: &Version,
    write: ObjectId,
    now: Timestamp,
) -> Result<bool> {
    let expired = NameRecord {
        number: record.number.saturating_add(1),
        write,
        committed: now,
        state: NameState::Expired,
        ..record
    };
    replace(store, &expired, version)
}

/// Lets a name show nothing, because the tenant exceeds its budget. Returns `false` if another
/// writer was faster.
pub(super) fn evict(
    store: &Store,
    record: NameRecord,
    version: &Version,
    write: ObjectId,
    now: Timestamp,
) -> Result<bool> {
    let evicted = NameRecord {
        evicted: true,
        ..record
    };
    withdraw(store, evicted, version, write, now)
}

/// Lets a name show nothing, because a fence cleared what it shows. What forked from that does not
/// come back. Returns `false` if another writer was faster.
pub(super) fn enter(
    store: &Store,
    record: NameRecord,
    version: &Version,
    fence: u64,
    write: ObjectId,
    now: Timestamp,
) -> Result<bool> {
    let cleared = decide::cleared(record.number, record.cleared, fence);
    let cleared = NameRecord {
        number: record.number.saturating_add(1).max(cleared),
        cleared,
        write,
        committed: now,
        state: NameState::Cleared,
        ..record
    };
    replace(store, &cleared, version)
}

/// Marks the record of a name that shows nothing, and deletes it. Returns `false` if another writer
/// was faster. No writer writes over the mark, so the deletion meets nothing newer.
pub(super) fn delete(
    store: &Store,
    record: NameRecord,
    version: &Version,
    write: ObjectId,
    now: Timestamp,
) -> Result<bool> {
    let key = Keys::new(&record.tenant).name(&record.reference);
    let begun = Since::now();
    let marked = NameRecord {
        number: record.number.saturating_add(1),
        deleting: true,
        write,
        committed: now,
        ..record
    };
    let is_ours = replace(store, &marked, version)?
        // The acknowledgement of the first attempt may be lost.
        || look(store, &marked.tenant, &marked.reference)?.as_ref() == Some(&marked);
    if !is_ours || !decide::in_time(begun.elapsed(), decide::DELETE_WITHIN) {
        return Ok(false);
    }
    store.delete_once(&key)?;
    Ok(true)
}

/// Returns `false` if another writer was faster.
fn replace(store: &Store, record: &NameRecord, version: &Version) -> Result<bool> {
    let key = Keys::new(&record.tenant).name(&record.reference);
    match store.replace(&key, encode(record), version) {
        Ok(()) => Ok(true),
        Err(Error::Conflict { .. }) => Ok(false),
        Err(error) => Err(error),
    }
}
