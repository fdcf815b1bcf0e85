//! The lease of a tenant's part of the tier: which collector works on it, and when one of them was
//! complete. It saves double work; the safety of a collection does not depend on it. The last lease
//! goes with the rest of a part that has no content any more.

use std::time::Duration;

use super::error::{Error, Result};
use super::keys::Keys;
use super::record::{FORMAT, Lease, MOST_NAME, ObjectId, encode};
use super::store::Store;
use crate::model::Timestamp;

/// How long a collector has the lease.
const LEASE: Duration = Duration::from_hours(2);

/// How a collection ended, for the next collector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// It is complete.
    Complete,
    /// It was stopped, or the storage failed: the next collector need not wait, and repeats it.
    Stopped,
}

impl End {
    /// The seconds of the lease from then on.
    fn seconds(self) -> u64 {
        match self {
            Self::Complete => 0,
            Self::Stopped => 1,
        }
    }
}

fn lease(holder: ObjectId, seconds: u64) -> Vec<u8> {
    encode(&Lease {
        format: FORMAT,
        holder,
        seconds,
    })
}

/// Takes the lease. Returns the time at which the storage wrote it: a time by the storage's clock.
/// `now`: this machine's clock, which decides only whether an earlier lease is over.
pub(super) fn take(
    store: &Store,
    keys: &Keys,
    holder: ObjectId,
    now: Timestamp,
) -> Result<Timestamp> {
    let key = keys.lease();
    let leased = |left: Duration| Error::Leased {
        object: format!("{store}/{key}"),
        minutes: left.as_secs().div_ceil(60),
    };
    let ours = lease(holder, LEASE.as_secs());
    let taken = match store.get(&key, MOST_NAME)? {
        None => store.create(&key, ours),
        Some((bytes, version)) => {
            // An unreadable lease does not count.
            let seconds = match Lease::parse(&key, &bytes) {
                Ok(lease) => lease.seconds.min(LEASE.as_secs()),
                Err(error @ Error::Newer { .. }) => return Err(error),
                Err(_) => 0,
            };
            let age = now.since(version.modified());
            let left = Duration::from_secs(seconds).saturating_sub(age);
            if !left.is_zero() {
                return Err(leased(left));
            }
            store.replace(&key, ours, &version)
        }
    };
    let Err(error) = taken else {
        return store.modified(&key);
    };
    // The answer was lost, or this is the answer to a repeated request: the lease may be ours.
    match store.get(&key, MOST_NAME) {
        Ok(Some((bytes, version))) if is_of(&key, &bytes, holder) => Ok(version.modified()),
        _ if matches!(error, Error::Conflict { .. }) => Err(leased(LEASE)),
        _ => Err(error),
    }
}

/// Whether a lease is this collector's.
fn is_of(key: &str, bytes: &[u8], holder: ObjectId) -> bool {
    Lease::parse(key, bytes).is_ok_and(|lease| lease.holder == holder)
}

/// Ends the lease, if this collector has it.
pub(super) fn end(store: &Store, keys: &Keys, holder: ObjectId, end: End) -> Result<()> {
    let key = keys.lease();
    let Some((bytes, version)) = store.get(&key, MOST_NAME)? else {
        return Ok(());
    };
    if !is_of(&key, &bytes, holder) {
        return Ok(());
    }
    match store.replace(&key, lease(holder, end.seconds()), &version) {
        Err(Error::Conflict { .. }) => Ok(()),
        result => result,
    }
}

/// Removes the tenant's last records, the lease among them, if it has nothing else. Then its
/// namespace has ended, or used the tier long ago. A node that publishes at this moment writes them
/// again; see `Collector::run`.
pub(super) fn removes_the_rest(
    store: &Store,
    keys: &Keys,
    grace: Duration,
    clock: Timestamp,
) -> Result<bool> {
    let (format, lease) = (keys.format(), keys.lease());
    let mut is_rest = true;
    store.list(keys.base(), &mut |item| {
        let is_old = clock.since(item.modified) >= grace;
        is_rest &= item.key == lease || (item.key == format && is_old);
        Ok(())
    })?;
    if is_rest {
        // Others may write them again meanwhile: a repeated request would delete what is new.
        store.delete_once(&format)?;
        store.delete_once(&lease)?;
    }
    Ok(is_rest)
}

/// How long ago a collection was complete, if it was the last one, by any process.
pub(super) fn complete_since(
    store: &Store,
    keys: &Keys,
    now: Timestamp,
) -> Result<Option<Duration>> {
    let key = keys.lease();
    let Some((bytes, version)) = store.get(&key, MOST_NAME)? else {
        return Ok(None);
    };
    let is_complete =
        Lease::parse(&key, &bytes).is_ok_and(|lease| lease.seconds == End::Complete.seconds());
    Ok(is_complete.then(|| now.since(version.modified())))
}
