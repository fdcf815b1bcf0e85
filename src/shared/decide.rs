//! The decisions of the protocol, without I/O and without a clock: whether a commit gets a name,
//! whether a publication is in time, what the collector does with an object. `docs/shared-tier.md`
//! argues why they are right.

use std::time::Duration;

use super::record::{NameRecord, NameState};
use crate::model::Reference;

/// A publication writes its manifest at most this long after it looked, and its name at most this
/// long after that.
pub const PUBLISH_WITHIN: Duration = Duration::from_hours(4);
/// How old something without references is when it gets a marker, and how old the marker is at the
/// deletion.
pub const GRACE: Duration = Duration::from_hours(24);
/// A list that took longer is not used: too much changed meanwhile.
pub const LIST_WITHIN: Duration = Duration::from_hours(1);
/// How long the record of a name stays that was cleared or evicted. A step that runs longer may
/// bring old content back. A node may upload evicted content again after that.
pub const KEEP_CLEARED: Duration = Duration::from_hours(30 * 24);

/// A collector sends the deletion of a record at most this long after it began to mark it.
pub const DELETE_WITHIN: Duration = Duration::from_hours(1);
/// How old a mark is when no deletion of its collector can still take effect. A writer may write
/// over the record then, and another collector may mark it again.
pub const DELETED_BY: Duration = Duration::from_hours(3);

/// What a writer of a name knows when it writes.
#[derive(Debug, Clone, Copy, Default)]
pub struct Writer {
    /// The number of the name when the volume's fork began, 0 if there was no record then, `None`
    /// if that is not known.
    pub base: Option<u64>,
    /// The highest [fence](crate::model::Fence) that covers the name, as its node knows; 0: none.
    /// The writer's content is not older.
    pub fence: u64,
    /// The name's number, 0 without a record, before an earlier attempt to write it that may have
    /// succeeded: its acknowledgement was lost. `None`: there was none.
    pub attempted: Option<u64>,
}

/// What a commit does to a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// It writes a record with this number, and this number of the last clear.
    Write {
        /// The record's.
        number: u64,
        /// The last clear's.
        cleared: u64,
    },
    /// Nothing: the first writer of a resource cache keeps the name.
    KeepsFirst,
    /// Nothing: another commit came after an attempt that may have succeeded.
    KeepsNewer,
    /// Nothing: the name was cleared after the fork began, or it is unknown when the fork began.
    Cleared,
}

/// Whether a commit gets a name that shows other content, or none. `is_old`: the record shows
/// content from before the writer's fence, which counts as none. `fresh`: the number of a new
/// record.
///
/// An attempt whose acknowledgement was lost may have written the name. Another writer may have
/// replaced it since, and it must not come back. So content that came after the attempt stays: the
/// commit counts as written at the time of the attempt.
///
/// The commit enters the writer's fence as a clear. So a writer that has not heard of the fence
/// does not bring back content from before it.
#[must_use]
pub fn commit(
    current: Option<&NameRecord>,
    reference: &Reference,
    writer: Writer,
    is_old: bool,
    fresh: u64,
) -> Decision {
    let Writer {
        base,
        fence,
        attempted,
    } = writer;
    let (number, cleared) = current.map_or((0, 0), |it| (it.number, it.cleared));
    let shows = !is_old && current.is_some_and(|it| it.content().is_some());
    if shows && reference.first_writer_wins() {
        return Decision::KeepsFirst;
    }
    if cleared > base.unwrap_or(0).max(fence) {
        return Decision::Cleared;
    }
    if shows && attempted.is_some_and(|before| number > before) {
        return Decision::KeepsNewer;
    }
    let cleared = if shows {
        cleared
    } else {
        self::cleared(number, cleared, fence)
    };
    let next = current.map_or(fresh, |_| number.saturating_add(1));
    Decision::Write {
        number: next.max(cleared),
        cleared,
    }
}

/// The number of the last clear of a name once a fence is entered in its record. Fences and records
/// share their numbers: content of a node that knows the fence follows the fence's number.
#[must_use]
pub fn cleared(number: u64, cleared: u64, fence: u64) -> u64 {
    if cleared >= fence {
        return cleared;
    }
    // A fork from before the fence may have seen this record.
    fence.max(number.saturating_add(1))
}

/// The number of the record that clears a name. A fork that began before may follow the number
/// that [`cleared`] gives for a fence: this number is higher.
#[must_use]
pub fn clear(current: Option<&NameRecord>, fence: u64, fresh: u64) -> u64 {
    let next = current.map_or(0, |current| current.number.saturating_add(2));
    fresh.max(next).max(fence.saturating_add(1))
}

/// Whether a manifest may be written so long after the look, or a name so long after its manifest.
/// `within`: [`PUBLISH_WITHIN`], or less in tests.
#[must_use]
pub fn in_time(elapsed: Duration, within: Duration) -> bool {
    elapsed <= within
}

/// What the collector does with a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NameVerdict {
    /// Nothing.
    Keep,
    /// Writes that it is expired.
    Expire,
    /// Deletes the record.
    Delete,
}

/// What the collector does with a name, given its record's age by the storage's clock.
#[must_use]
pub fn judge_name(record: &NameRecord, age: Duration) -> NameVerdict {
    let keep = if record.cleared > 0 || record.evicted {
        KEEP_CLEARED
    } else {
        GRACE
    };
    if record.deleting {
        return if age >= DELETED_BY {
            NameVerdict::Delete
        } else {
            NameVerdict::Keep
        };
    }
    match &record.state {
        NameState::Content { ttl_seconds, .. } => {
            let over = ttl_seconds.is_some_and(|ttl| age >= Duration::from_secs(ttl));
            if over {
                NameVerdict::Expire
            } else {
                NameVerdict::Keep
            }
        }
        NameState::Cleared | NameState::Expired if age >= keep => NameVerdict::Delete,
        NameState::Cleared | NameState::Expired => NameVerdict::Keep,
    }
}

/// Whether a publication is not begun, given the age of the name's record by the writer's clock. It
/// saves an upload; [`may_write_over_mark`] decides.
#[must_use]
pub fn is_being_deleted(record: &NameRecord, age: Duration) -> bool {
    record.deleting && age < DELETED_BY
}

/// The age of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Age {
    /// By the storage's clock, when the writer last wrote something.
    ByStorage(Duration),
    /// By the writer's own clock, which may be wrong.
    ByWriter(Duration),
}

/// Whether a writer may write over a record that is marked as `deleting`. It is left to its
/// collector, unless that was killed: the deletion would take what was written meanwhile.
#[must_use]
pub fn may_write_over_mark(age: Age) -> bool {
    match age {
        Age::ByStorage(age) => age >= DELETED_BY,
        // The longer time leaves room for a clock that is wrong.
        Age::ByWriter(age) => age >= GRACE,
    }
}

/// A manifest or a layer, as one list showed it. Ages are by the storage's clock, from before the
/// list began.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seen {
    /// Its age; `None`: only its marker is there.
    pub age: Option<Duration>,
    /// The age of its marker.
    pub marker: Option<Duration>,
    /// Whether a name shows this manifest, or a manifest this layer.
    pub shown: bool,
}

/// What the collector does with a manifest or a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing.
    Keep,
    /// Writes a marker.
    Condemn,
    /// Deletes the object, then the marker.
    Delete,
    /// Deletes the marker of an object that no longer exists.
    Unmark,
}

/// What the collector does with an object, given its findings.
#[must_use]
pub fn judge(seen: Seen, grace: Duration) -> Verdict {
    match (seen.age, seen.marker) {
        (None, Some(_)) => Verdict::Unmark,
        // A marker stays on what is shown: no publication begins to use it any more.
        _ if seen.shown => Verdict::Keep,
        (Some(age), None) if age >= grace => Verdict::Condemn,
        (Some(_), Some(marker)) if marker >= grace => Verdict::Delete,
        _ => Verdict::Keep,
    }
}

/// Whether a publication may use a layer's object that a list of that layer showed: never one with
/// a marker.
#[must_use]
pub fn may_reuse(has_marker: bool) -> bool {
    !has_marker
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{ArtifactId, Sha256, Timestamp};
    use crate::shared::ObjectId;

    fn record(number: u64, state: NameState) -> NameRecord {
        NameRecord {
            format: 1,
            tenant: "ci".parse().expect("a label"),
            reference: "task-cache/x".parse().expect("a reference"),
            number,
            cleared: 0,
            evicted: false,
            deleting: false,
            write: ObjectId::from_bits(1),
            committed: Timestamp(0),
            state,
        }
    }

    fn content(ttl_seconds: Option<u64>) -> NameState {
        NameState::Content {
            artifact: ArtifactId::from_bits(1),
            publication: ObjectId::from_bits(1),
            manifest: Sha256([0; 32]),
            ttl_seconds,
        }
    }

    fn writer(base: Option<u64>) -> Writer {
        Writer {
            base,
            ..Writer::default()
        }
    }

    fn try_commit(
        current: Option<&NameRecord>,
        reference: &Reference,
        writer: Writer,
        is_old: bool,
    ) -> Decision {
        commit(current, reference, writer, is_old, 100)
    }

    fn write(number: u64, cleared: u64) -> Decision {
        Decision::Write { number, cleared }
    }

    #[test]
    fn who_gets_a_name() {
        let last: Reference = "task-cache/x".parse().expect("a reference");
        let first: Reference = "resource-cache/x".parse().expect("a reference");
        let output: Reference = "artifact/x".parse().expect("a reference");
        for reference in [&last, &first, &output] {
            for base in [None, Some(0), Some(9)] {
                let decided = try_commit(None, reference, writer(base), false);
                assert_eq!(decided, write(100, 0));
                let expired = record(5, NameState::Expired);
                let decided = try_commit(Some(&expired), reference, writer(base), false);
                assert_eq!(decided, write(6, 0));
            }
            for state in [NameState::Cleared, NameState::Expired, content(None)] {
                let shows = matches!(state, NameState::Content { .. });
                if shows && reference.first_writer_wins() {
                    continue;
                }
                // Content that came after the clear does not let older content in.
                let after = NameRecord {
                    cleared: 5,
                    ..record(7, state)
                };
                for (base, decision) in [
                    (None, Decision::Cleared),
                    (Some(0), Decision::Cleared),
                    (Some(4), Decision::Cleared),
                    (Some(5), write(8, 5)),
                    (Some(7), write(8, 5)),
                ] {
                    let decided = try_commit(Some(&after), reference, writer(base), false);
                    assert_eq!(decided, decision);
                }
            }
        }
        let taken = record(5, content(None));
        for (reference, base, decision) in [
            (&first, Some(0), Decision::KeepsFirst),
            (&last, Some(0), write(6, 0)),
            (&output, None, write(6, 0)),
        ] {
            let decided = try_commit(Some(&taken), reference, writer(base), false);
            assert_eq!(decided, decision);
        }
    }

    #[test]
    fn a_writer_enters_the_fence_that_it_knows_and_others_do_not_pass_it() {
        let first: Reference = "resource-cache/x".parse().expect("a reference");
        let knows = |base, fence| Writer {
            fence,
            ..writer(base)
        };
        let old = record(5, content(None));
        for (current, is_old, fence, decision) in [
            (None, false, 50, write(100, 50)),
            (None, false, 500, write(500, 500)),
            (Some(&old), true, 50, write(50, 50)),
            // The clock of the record's writer was ahead.
            (Some(&old), true, 3, write(6, 6)),
            (Some(&old), false, 50, Decision::KeepsFirst),
        ] {
            for base in [None, Some(0), Some(5)] {
                let decided = try_commit(current, &first, knows(base, fence), is_old);
                assert_eq!(decided, decision, "{current:?} {fence} {base:?}");
            }
        }
        let entered = NameRecord {
            cleared: 50,
            ..record(70, NameState::Cleared)
        };
        // Those that know the fence pass, whatever the tier answered when their forks began.
        for base in [None, Some(5), Some(70)] {
            let decided = try_commit(Some(&entered), &first, knows(base, 50), false);
            assert_eq!(decided, write(71, 50));
        }
        for base in [None, Some(5), Some(49)] {
            let decided = try_commit(Some(&entered), &first, knows(base, 0), false);
            assert_eq!(decided, Decision::Cleared);
            let decided = try_commit(Some(&entered), &first, knows(base, 40), false);
            assert_eq!(decided, Decision::Cleared, "it knows an older fence");
        }
    }

    #[test]
    fn content_that_came_after_an_attempt_in_doubt_stays() {
        let last: Reference = "task-cache/x".parse().expect("a reference");
        let attempted = |before| Writer {
            attempted: Some(before),
            ..writer(Some(5))
        };
        let shown = record(6, content(None));
        for (before, is_old, decision) in [
            (0, false, Decision::KeepsNewer),
            (5, false, Decision::KeepsNewer),
            // Nothing was written since.
            (6, false, write(7, 0)),
            (5, true, write(7, 0)),
        ] {
            let decided = try_commit(Some(&shown), &last, attempted(before), is_old);
            assert_eq!(decided, decision, "{before}");
        }
        // The content was lost: a node that has some uploads it.
        let gone = record(7, NameState::Expired);
        for current in [None, Some(&gone)] {
            let decided = try_commit(current, &last, attempted(5), false);
            assert!(matches!(decided, Decision::Write { .. }), "{decided:?}");
        }
        let cleared = NameRecord {
            cleared: 6,
            ..record(7, content(None))
        };
        let decided = try_commit(Some(&cleared), &last, attempted(5), false);
        assert_eq!(decided, Decision::Cleared);
    }

    #[test]
    fn a_clear_is_above_all_numbers_that_earlier_forks_may_follow() {
        for current in [None, Some(record(5, content(None)))] {
            for fence in [0, 3, 50, 500] {
                let (number, cleared) = current.as_ref().map_or((0, 0), |it| (it.number, 0));
                let base = number.max(super::cleared(number, cleared, fence));
                let clear = clear(current.as_ref(), fence, 100);
                assert!(clear > base && clear >= 100, "{current:?} {fence}: {clear}");
            }
        }
        let later = record(200, NameState::Expired);
        assert_eq!(clear(Some(&later), 0, 100), 202);
    }

    #[test]
    fn what_the_collector_does() {
        let (young, old) = (
            GRACE
                .checked_sub(Duration::from_secs(1))
                .expect("it is longer"),
            GRACE,
        );
        for (age, marker, shown, verdict) in [
            (Some(old), None, false, Verdict::Condemn),
            (Some(young), None, false, Verdict::Keep),
            (Some(old), None, true, Verdict::Keep),
            (Some(old), Some(young), false, Verdict::Keep),
            (Some(old), Some(old), false, Verdict::Delete),
            (Some(old), Some(old), true, Verdict::Keep),
            (None, Some(young), false, Verdict::Unmark),
            (None, None, false, Verdict::Keep),
        ] {
            let seen = Seen { age, marker, shown };
            assert_eq!(judge(seen, GRACE), verdict, "{seen:?}");
        }
        let day = Duration::from_hours(24);
        for (state, cleared, days, verdict) in [
            (content(None), 0, 1000, NameVerdict::Keep),
            (content(Some(86_400)), 0, 1, NameVerdict::Expire),
            (content(Some(86_401)), 0, 1, NameVerdict::Keep),
            (NameState::Cleared, 3, 29, NameVerdict::Keep),
            (NameState::Cleared, 3, 30, NameVerdict::Delete),
            (NameState::Expired, 0, 1, NameVerdict::Delete),
            (NameState::Expired, 3, 29, NameVerdict::Keep),
        ] {
            let record = NameRecord {
                cleared,
                ..record(7, state)
            };
            assert_eq!(judge_name(&record, day * days), verdict, "{record:?}");
        }
        let evicted = NameRecord {
            evicted: true,
            ..record(7, NameState::Expired)
        };
        assert_eq!(judge_name(&evicted, day * 29), NameVerdict::Keep);
        assert_eq!(judge_name(&evicted, day * 30), NameVerdict::Delete);
        let deleting = NameRecord {
            deleting: true,
            ..evicted
        };
        let hour = Duration::from_hours(1);
        assert_eq!(judge_name(&deleting, hour * 2), NameVerdict::Keep);
        assert_eq!(judge_name(&deleting, hour * 3), NameVerdict::Delete);
        assert!(is_being_deleted(&deleting, hour * 2));
        assert!(!is_being_deleted(&deleting, hour * 3));
        assert!(!is_being_deleted(
            &record(7, NameState::Expired),
            Duration::ZERO
        ));
        assert!(!may_write_over_mark(Age::ByStorage(hour * 2)));
        assert!(may_write_over_mark(Age::ByStorage(hour * 3)));
        assert!(!may_write_over_mark(Age::ByWriter(hour * 23)));
        assert!(may_write_over_mark(Age::ByWriter(hour * 24)));
        // The bounds that the proof in docs/shared-tier.md needs.
        assert!(GRACE >= 2 * PUBLISH_WITHIN + 4 * LIST_WITHIN);
        // The mark may take effect as late as it was sent, the deletion an hour after it was.
        assert!(DELETED_BY > DELETE_WITHIN + hour && GRACE > DELETED_BY);
    }
}
