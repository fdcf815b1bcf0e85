//! The decisions of the distribution, without I/O and without a clock: whether the tier is asked,
//! which content a volume starts from, which number its commit follows, and what an error means for
//! the queue of uploads.

use std::time::Duration;

use crate::engine::LocalArtifact;
use crate::model::{ArtifactId, Freshness, Reference, Sharing, Timestamp};
use crate::shared::{self, Error};

/// What a volume needs of a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Want {
    /// Content; without it the volume cannot exist.
    Input,
    /// The first content of a name, if there is some.
    ResourceCache,
    /// The newest content of a name, if there is some.
    TaskCache(Freshness),
    /// Only the number of the name: the volume starts empty, and commits to it.
    Number,
}

/// The content on this node that has the name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Here {
    pub(super) artifact: ArtifactId,
    pub(super) sharing: Sharing,
    /// The newest fence that its node knew when its volume was forked; 0: none.
    pub(super) fence: u64,
}

impl Here {
    pub(super) fn of(local: &LocalArtifact) -> Self {
        Self {
            artifact: local.id,
            sharing: local.sharing,
            fence: local.fence,
        }
    }

    /// What the tier says about this content. `covering`: the highest fence that covers the name on
    /// this node. Content that knows the fence is newer than it.
    pub(super) fn of_tier(&self, there: There, covering: u64) -> There {
        if covering <= self.fence {
            there.after(covering)
        } else {
            there
        }
    }
}

/// What the tier says of a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum There {
    /// It was not asked, did not answer in time, or failed.
    Unknown,
    /// No content. `evicted`: the namespace exceeded its budget there.
    Nothing {
        number: u64,
        cleared: u64,
        evicted: bool,
    },
    /// Content.
    Content {
        number: u64,
        cleared: u64,
        artifact: ArtifactId,
    },
}

impl There {
    /// The same for content that no clear up to this number is about.
    pub(super) fn after(mut self, number: u64) -> Self {
        if let Self::Nothing { cleared, .. } | Self::Content { cleared, .. } = &mut self
            && *cleared <= number
        {
            *cleared = 0;
        }
        self
    }
}

/// What the volume does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// It starts from the content on this node.
    Use,
    /// It starts from the content on this node, which is uploaded again: the tier lost or evicted
    /// it.
    UseAndShare,
    /// It fetches what the tier shows.
    Fetch,
    /// It asks again.
    Wait,
    /// It starts without this name: from its next restore key, or empty.
    Without,
}

/// The step of the volume, and what happens before to the content on this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Decision {
    /// The name is taken from the content on this node: the tier cleared it with this number,
    /// after that content began.
    pub(super) discard: Option<u64>,
    pub(super) step: Step,
}

/// Whether peers and the tier are asked about a name.
pub(super) fn is_asked(want: Want, is_here: bool) -> bool {
    !is_here || matches!(want, Want::Number | Want::TaskCache(Freshness::Tier))
}

/// What a volume does about one name.
pub(super) fn decide(want: Want, here: Option<&Here>, there: There) -> Decision {
    let cleared = match there {
        There::Unknown => 0,
        There::Nothing { cleared, .. } | There::Content { cleared, .. } => cleared,
    };
    let stays = here.filter(|here| !here.sharing.is_older_than_clear(cleared));
    let discard = (here.is_some() && stays.is_none()).then_some(cleared);
    let step = match (stays, there) {
        (None, There::Content { .. }) => Step::Fetch,
        (None, There::Unknown | There::Nothing { .. }) if want == Want::Input => Step::Wait,
        (None, There::Unknown | There::Nothing { .. }) => Step::Without,
        (
            Some(here),
            There::Nothing {
                number, evicted, ..
            },
        ) if is_last_lost(here, number) && (want != Want::Number || !evicted) => Step::UseAndShare,
        (
            Some(here),
            There::Content {
                number, artifact, ..
            },
        ) if is_newer(here, number, artifact) => Step::Fetch,
        (Some(_), _) => Step::Use,
    };
    Decision { discard, step }
}

/// What happens to content on this node that no pod asks about. `UseAndShare`: the tier lost it.
/// What a budget took away is uploaded again when a pod uses it: else it would come back each day.
pub(super) fn check(here: &Here, there: There) -> Decision {
    decide(Want::Number, Some(here), there)
}

/// Whether the tier lost exactly this content: its bucket was wiped, or the next record of the name
/// withdrew it. Older content must not take the place of newer content that was lost.
fn is_last_lost(here: &Here, number: u64) -> bool {
    let shown = here.sharing.number;
    shown.is_some_and(|shown| number == 0 || number == shown.saturating_add(1))
}

/// Whether the tier shows a commit that is newer than the content on this node.
fn is_newer(here: &Here, number: u64, artifact: ArtifactId) -> bool {
    // Content that waits for its upload will be the last commit: this node reads its own writes.
    let is_last = here.artifact == artifact || here.sharing.is_wanted();
    let follows = here.sharing.follows();
    let is_older = follows.map_or(here.sharing.copied, |it| number > it);
    !is_last && (here.sharing.refused || is_older)
}

/// Whether content that this node fetches takes the name from the content that has it by now.
/// Commits of this node may have come since the volume's question.
pub(super) fn is_replaced(here: &Here, there: There) -> bool {
    decide(Want::Input, Some(here), there).step == Step::Fetch
}

/// Whether content that the tier refused as cleared loses its name on this node. Without a known
/// number an output keeps it: a step of this node may wait for it, and it is in no other place.
pub(super) fn loses_name(reference: &Reference, sharing: &Sharing, cleared: u64) -> bool {
    let may_be_newer = matches!(reference, Reference::Artifact(_)) && sharing.follows().is_none();
    sharing.is_older_than_clear(cleared) && !may_be_newer
}

/// The number that the volume's commit follows. `here`: the content that has the committed name.
/// A lower number than the true one is safe: at most a commit is refused that need not be.
/// `fence`: the highest that covers the name on this node. The volume begins after it. So its
/// commit also follows the number with which another writer enters this fence in the record.
pub(super) fn base(here: Option<&Here>, there: There, fence: u64) -> Option<u64> {
    match there {
        There::Nothing {
            number, cleared, ..
        }
        | There::Content {
            number, cleared, ..
        } => Some(number.max(shared::decide::cleared(number, cleared, fence))),
        There::Unknown => here.and_then(|here| here.sharing.follows()),
    }
}

/// The time of making with which the engine enters fetched content. The engine orders commits by
/// it, and the clock of the other node may be wrong: it is never later than now, later than the
/// content that it replaces, and earlier than content that keeps the name. `here`: the time of the
/// content that has the name, and whether it is replaced.
pub(super) fn created(
    reference: &Reference,
    made: Timestamp,
    here: Option<(Timestamp, bool)>,
    now: Timestamp,
) -> Timestamp {
    let made = made.min(now);
    match here.filter(|_| !reference.first_writer_wins()) {
        None => made,
        Some((older, true)) => made.max(Timestamp(older.0 + 1)),
        Some((newer, false)) => made.min(Timestamp(newer.0.saturating_sub(1))),
    }
}

/// How far a fetch is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Progress {
    /// Bytes that came, of tables and of packed content.
    pub(super) moved: u64,
    /// Content that was verified, of so much.
    pub(super) bytes: u64,
    pub(super) of: u64,
}

/// Whether a fetch brought nothing between two looks at it, and something has yet to come. The node
/// may take its time to write and sync what came. `None`: it waits for its place.
pub(super) fn has_stalled(before: Option<Progress>, after: Option<Progress>) -> bool {
    let has_come = |it: Progress| it.bytes > 0 && it.bytes >= it.of;
    before == after && !after.is_some_and(has_come)
}

/// What an error means for the queue of uploads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum UploadRetry {
    /// The publication begins again at once.
    Again,
    /// The storage is away: all uploads wait.
    Storage,
    /// The storage asks for fewer requests: all uploads wait longer.
    Busy,
    /// A person must change something: all uploads wait for minutes.
    Permanent,
    /// This artifact waits.
    Artifact,
    /// The upload was stopped on purpose.
    Stopped,
}

pub(super) fn setback(error: &Error) -> UploadRetry {
    match error {
        Error::Late { .. } => UploadRetry::Again,
        Error::Away { .. }
        | Error::TooSlow { .. }
        | Error::Stalled { .. }
        | Error::Full { .. }
        | Error::Conflict { .. }
        | Error::Leased { .. } => UploadRetry::Storage,
        Error::SlowDown { .. } => UploadRetry::Busy,
        Error::Permanent { .. } => UploadRetry::Permanent,
        Error::Missing { .. }
        | Error::Deleting { .. }
        | Error::Corrupt { .. }
        | Error::Newer { .. }
        | Error::Layer(_)
        | Error::System(_) => UploadRetry::Artifact,
        Error::Stopped => UploadRetry::Stopped,
    }
}

/// How long all uploads wait, or one artifact. `random`: spreads the nodes, any number.
pub(super) fn pause(setback: UploadRetry, failures: u32, random: u64) -> Duration {
    let (first, longest) = match setback {
        UploadRetry::Again | UploadRetry::Stopped => return Duration::ZERO,
        UploadRetry::Storage => (1, 60),
        UploadRetry::Busy => (5, 120),
        UploadRetry::Permanent => (300, 300),
        UploadRetry::Artifact => (5, 1800),
    };
    let whole = first * 1000 * 2_u64.saturating_pow(failures.min(16));
    let whole = whole.min(longest * 1000);
    // Permanent errors are tried again after at least that time.
    let spread = whole / 4;
    let less = if setback == UploadRetry::Permanent {
        0
    } else {
        random % spread.max(1)
    };
    Duration::from_millis(whole - less)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: ArtifactId = ArtifactId::from_bits(1);
    const OTHER: ArtifactId = ArtifactId::from_bits(2);
    const TASK: Want = Want::TaskCache(Freshness::Tier);

    fn here(base: Option<u64>, number: Option<u64>) -> Here {
        Here {
            artifact: ID,
            sharing: Sharing {
                base,
                number,
                ..Sharing::default()
            },
            fence: 0,
        }
    }

    fn never(base: Option<u64>) -> Here {
        let mut here = here(base, None);
        here.sharing.never = true;
        here
    }

    fn nothing(number: u64, cleared: u64) -> There {
        There::Nothing {
            number,
            cleared,
            evicted: false,
        }
    }

    fn evicted(number: u64, cleared: u64) -> There {
        There::Nothing {
            number,
            cleared,
            evicted: true,
        }
    }

    fn content(number: u64, cleared: u64, artifact: ArtifactId) -> There {
        There::Content {
            number,
            cleared,
            artifact,
        }
    }

    #[test]
    fn content_that_knows_a_fence_is_not_cleared_by_it() {
        let at_fence = |fence| Here {
            fence,
            ..here(None, None)
        };
        for (fence, cleared, left) in [(5, 4, 0), (5, 5, 0), (5, 6, 6), (4, 4, 4)] {
            let there = at_fence(fence).of_tier(content(9, cleared, OTHER), 5);
            assert_eq!(there, content(9, left, OTHER), "fence {fence}, {cleared}");
        }
    }

    #[test]
    fn a_copy_of_a_peer_gives_way_to_any_commit_that_it_is_not_known_to_follow() {
        let copy = |base| {
            let mut copy = here(base, None);
            copy.sharing.copied = true;
            copy
        };
        for (base, number, step) in [
            (None, 1, Step::Fetch),
            (Some(1), 1, Step::Use),
            (Some(1), 2, Step::Fetch),
        ] {
            let decided = decide(TASK, Some(&copy(base)), content(number, 0, OTHER));
            assert_eq!(decided.step, step, "{base:?}, {number}");
        }
        let unknown = decide(TASK, Some(&here(None, None)), content(1, 0, OTHER));
        assert_eq!(unknown.step, Step::Use, "it waits for its upload");
    }

    #[test]
    fn only_what_is_not_here_or_may_be_newer_elsewhere_is_asked_for() {
        let local = Want::TaskCache(Freshness::Local);
        for (want, is_here, asked) in [
            (Want::Input, true, false),
            (Want::Input, false, true),
            (Want::ResourceCache, true, false),
            (Want::ResourceCache, false, true),
            (TASK, true, true),
            (TASK, false, true),
            (local, true, false),
            (local, false, true),
            (Want::Number, true, true),
            (Want::Number, false, true),
        ] {
            assert_eq!(is_asked(want, is_here), asked, "{want:?} {is_here}");
        }
    }

    #[test]
    fn without_content_here_the_tier_decides() {
        for (want, missing) in [
            (Want::Input, Step::Wait),
            (Want::ResourceCache, Step::Without),
            (TASK, Step::Without),
        ] {
            for (there, step) in [
                (There::Unknown, missing),
                (nothing(0, 0), missing),
                (nothing(9, 9), missing),
                (content(3, 0, OTHER), Step::Fetch),
                (content(3, 2, OTHER), Step::Fetch),
            ] {
                let decision = decide(want, None, there);
                assert_eq!(
                    decision,
                    Decision {
                        discard: None,
                        step
                    },
                    "{there:?}"
                );
            }
        }
    }

    #[test]
    fn content_here_is_used_unless_the_tier_has_a_newer_commit_or_cleared_it() {
        let shared = here(Some(4), Some(5));
        let waiting = here(Some(4), None);
        let unknown = here(None, None);
        let mut refused = unknown;
        refused.sharing.refused = true;
        let fetch = (None, Step::Fetch);
        let uses = (None, Step::Use);
        for (here, there, (discard, step)) in [
            (shared, There::Unknown, uses),
            (shared, content(5, 0, ID), uses),
            // A node that reports damage, or publishes again, changes the number only.
            (shared, content(7, 0, ID), uses),
            (shared, content(6, 0, OTHER), fetch),
            // A bucket that was restored.
            (shared, content(4, 0, OTHER), uses),
            (shared, content(9, 5, OTHER), fetch),
            (shared, content(9, 6, OTHER), (Some(6), Step::Fetch)),
            (shared, nothing(6, 6), (Some(6), Step::Without)),
            // Newer commits were lost: the node that has the last one uploads it again.
            (shared, nothing(9, 5), uses),
            (shared, nothing(6, 5), (None, Step::UseAndShare)),
            (shared, nothing(0, 0), (None, Step::UseAndShare)),
            (shared, evicted(6, 5), (None, Step::UseAndShare)),
            (shared, evicted(9, 5), uses),
            (shared, evicted(9, 6), (Some(6), Step::Without)),
            (refused, There::Unknown, uses),
            (refused, content(6, 0, OTHER), fetch),
            (refused, nothing(6, 0), uses),
            (waiting, There::Unknown, uses),
            (waiting, content(4, 0, OTHER), uses),
            (waiting, content(6, 0, OTHER), uses),
            (waiting, content(6, 4, OTHER), uses),
            (waiting, content(6, 5, OTHER), (Some(5), Step::Fetch)),
            (waiting, nothing(0, 0), uses),
            (waiting, nothing(5, 5), (Some(5), Step::Without)),
            (unknown, content(6, 0, OTHER), uses),
            (unknown, nothing(6, 0), uses),
            (unknown, nothing(6, 5), (Some(5), Step::Without)),
            (never(Some(4)), content(4, 0, OTHER), uses),
            (never(Some(4)), content(5, 0, OTHER), fetch),
            (never(None), content(5, 0, OTHER), uses),
            (never(Some(4)), nothing(5, 5), uses),
        ] {
            let decision = decide(TASK, Some(&here), there);
            assert_eq!(decision, Decision { discard, step }, "{here:?} {there:?}");
        }
        let checked = |there| {
            let decision = check(&shared, there);
            (decision.discard, decision.step == Step::UseAndShare)
        };
        assert_eq!(checked(nothing(6, 5)), (None, true));
        assert_eq!(checked(evicted(6, 5)), (None, false), "no pod uses it");
        assert_eq!(checked(nothing(6, 6)), (Some(6), false));
        assert_eq!(checked(content(9, 6, OTHER)), (Some(6), false));
        let decision = decide(Want::Input, Some(&shared), nothing(6, 6));
        assert_eq!((decision.discard, decision.step), (Some(6), Step::Wait));
    }

    #[test]
    fn a_commit_follows_the_answer_or_else_the_content_here() {
        let shared = here(Some(4), Some(5));
        assert_eq!(base(Some(&shared), content(9, 0, OTHER), 0), Some(9));
        assert_eq!(base(Some(&shared), nothing(0, 0), 0), Some(0));
        assert_eq!(base(Some(&shared), There::Unknown, 0), Some(5));
        assert_eq!(base(Some(&here(Some(4), None)), There::Unknown, 0), Some(4));
        assert_eq!(base(None, There::Unknown, 0), None);
        assert_eq!(base(None, nothing(8, 8), 0), Some(8));
        // A clear that is not about the content here does not count, and the number stays.
        assert_eq!(nothing(60, 50).after(50), nothing(60, 0));
        assert_eq!(nothing(60, 51).after(50), nothing(60, 51));
        // With a fence: what another writer enters.
        assert_eq!(base(None, nothing(0, 0), 50), Some(50));
        assert_eq!(base(None, content(60, 0, OTHER), 50), Some(61));
        assert_eq!(base(None, nothing(60, 50), 50), Some(60));
    }

    #[test]
    fn only_an_output_of_unknown_age_keeps_its_name_after_a_clear() {
        let (output, cache) = ("artifact/x", "resource-cache/x");
        for (reference, follows, cleared, loses) in [
            (output, Some(4), 5, true),
            (output, Some(5), 5, false),
            (output, None, 5, false),
            (cache, None, 5, true),
            (cache, Some(4), 5, true),
            (cache, Some(4), 0, false),
        ] {
            let reference: Reference = reference.parse().expect("a reference");
            let sharing = here(follows, None).sharing;
            assert_eq!(loses_name(&reference, &sharing, cleared), loses);
        }
    }

    #[test]
    fn a_wrong_clock_elsewhere_neither_hides_fetched_content_nor_later_commits() {
        let (first, last) = ("resource-cache/x", "task-cache/x");
        for (reference, made, here, expected) in [
            (last, 50, None, 50),
            (last, 500, None, 100),
            (last, 50, Some((70, true)), 71),
            (last, 80, Some((70, true)), 80),
            (last, 500, Some((70, true)), 100),
            (last, 50, Some((70, false)), 50),
            (last, 80, Some((70, false)), 69),
            (first, 50, Some((70, true)), 50),
            (first, 80, Some((70, false)), 80),
            (first, 500, None, 100),
        ] {
            let reference: Reference = reference.parse().expect("a reference");
            let here = here.map(|(time, is_replaced)| (Timestamp(time), is_replaced));
            let found = created(&reference, Timestamp(made), here, Timestamp(100));
            assert_eq!(found, Timestamp(expected));
        }
    }

    #[test]
    fn fetched_content_takes_no_name_from_a_commit_that_came_meanwhile() {
        let shows = content(6, 0, OTHER);
        assert!(is_replaced(&here(Some(4), Some(5)), shows), "it was here");
        assert!(!is_replaced(&here(Some(4), None), shows), "it waits");
        assert!(!is_replaced(&here(Some(4), Some(7)), shows), "the last one");
        // The tier refuses that commit: its step began before a clear.
        assert!(is_replaced(&here(Some(4), None), content(6, 5, OTHER)));
    }

    #[test]
    fn a_fetch_stalls_while_nothing_comes_that_has_to_come() {
        let at = |moved, bytes| {
            let of = 100;
            Some(Progress { moved, bytes, of })
        };
        for (before, after, stalled) in [
            (None, None, true),
            (None, at(0, 0), false),
            (at(0, 0), at(0, 0), true),
            // A table comes, and content that is not verified yet.
            (at(0, 0), at(10, 0), false),
            (at(10, 0), at(20, 0), false),
            (at(50, 40), at(50, 40), true),
            (at(90, 100), at(90, 100), false),
            // It begins again.
            (at(90, 100), at(90, 0), false),
            (at(90, 0), at(90, 0), true),
        ] {
            assert_eq!(has_stalled(before, after), stalled, "{before:?} {after:?}");
        }
        let empty = Some(Progress {
            moved: 0,
            bytes: 0,
            of: 0,
        });
        assert!(has_stalled(empty, empty), "its table has to come");
    }

    #[test]
    fn pauses_grow_and_are_bounded() {
        let seconds = |setback, failures| pause(setback, failures, 0).as_secs();
        let storage: Vec<u64> = (0..8).map(|n| seconds(UploadRetry::Storage, n)).collect();
        assert_eq!(storage, [1, 2, 4, 8, 16, 32, 60, 60]);
        assert_eq!(seconds(UploadRetry::Busy, 0), 5);
        assert_eq!(seconds(UploadRetry::Artifact, 40), 1800);
        for random in [0, 1, u64::MAX] {
            assert_eq!(pause(UploadRetry::Permanent, 3, random).as_secs(), 300);
            let waited = pause(UploadRetry::Storage, 9, random);
            assert!(waited > Duration::from_secs(44) && waited <= Duration::from_secs(60));
        }
    }
}
