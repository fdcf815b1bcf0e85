//! The newest of all task caches whose key begins in one way: a restore key that ends in `*`.
//!
//! The catalog knows the keys of [`MAX_NAMED`](super::MAX_NAMED) caches; others are not found so.
//! The index of keys has a version of each that is never lower than that of the content that
//! counts, if its commit time is known. It may be higher: content may be gone with its node, or be
//! cleared. So the highest one is looked up, and corrected if it is too high, until one is right.
//! Each is corrected once, and one question corrects [`MOST`] at most.

use crate::model::{CacheKey, Name, Reference, Tenant, Timestamp};

use super::find::current;
use super::name::NameHash;
use super::state::Catalog;

/// The most versions that one question corrects: 2 ms.
const MOST: usize = 1_000;

/// The name of the newest content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Newest {
    /// It has this name, and a node has it.
    Of(Name),
    /// No key that is known begins so and has content.
    Nothing,
    /// Not known yet: accounts are missing, a clear is being repeated, or very much content is
    /// gone.
    Incomplete,
}

impl Catalog {
    /// The name of the newest content of all task caches whose key begins so.
    pub fn newest(&mut self, tenant: &Tenant, prefix: &CacheKey, now: Timestamp) -> Newest {
        for _ in 0..MOST {
            let Some((key, highest)) = self.names.newest(tenant, prefix) else {
                return if self.is_incomplete(now) {
                    Newest::Incomplete
                } else {
                    Newest::Nothing
                };
            };
            let name = Name {
                tenant: tenant.clone(),
                reference: Reference::TaskCache(key),
            };
            if self.owed.iter().any(|owed| owed.covers.covers(&name)) {
                return Newest::Incomplete;
            }
            let current = current(&name, &self.valid(NameHash::of(&name), &name));
            let version = current.first().map(|(_, entry)| entry.version);
            if version >= Some(highest) {
                return Newest::Of(name);
            }
            self.names.lower(&name, version);
        }
        Newest::Incomplete
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{Nodes, entry, name};
    use super::super::{Entry, State};
    use super::*;
    use crate::model::{Coverage, Fence};

    impl Nodes {
        fn newest(&mut self, prefix: &str) -> Newest {
            let tenant = name("task-cache/x").tenant;
            let prefix = prefix.parse().expect("a key");
            self.catalog.newest(&tenant, &prefix, self.now)
        }
    }

    fn of(reference: &str) -> Newest {
        Newest::Of(name(reference))
    }

    #[test]
    fn the_last_commit_of_all_keys_that_begin_so_is_found() {
        let mut nodes = Nodes::complete(&["n1", "n2"]);
        assert_eq!(nodes.newest("main-"), Newest::Nothing);
        for (node, reference, stamp) in [
            (0, "task-cache/main-1", 5),
            (1, "task-cache/main-2", 9),
            (0, "task-cache/main-3", 7),
            (0, "task-cache/other", 99),
            (0, "resource-cache/main-4", 99),
        ] {
            nodes.put_named(node, reference, State::Durable, stamp);
        }
        // What is coming is no content, and no reason to wait.
        nodes.put_named(0, "task-cache/main-5", State::Coming, 0);
        assert_eq!(nodes.newest("main-"), of("task-cache/main-2"));
        assert_eq!(nodes.newest("main-3"), of("task-cache/main-3"));
        assert_eq!(nodes.newest("main-5"), Newest::Nothing);
        nodes.put_named(0, "task-cache/main-5", State::Durable, 10);
        assert_eq!(nodes.newest("main-"), of("task-cache/main-5"));
        // A copy has the stamp of the original.
        nodes.put_named(1, "task-cache/main-1", State::Durable, 5);
        assert_eq!(nodes.newest("main-"), of("task-cache/main-5"));
        let others = "other".parse().expect("a tenant");
        let prefix = "main-".parse().expect("a key");
        let found = nodes.catalog.newest(&others, &prefix, nodes.now);
        assert_eq!(found, Newest::Nothing);
    }

    #[test]
    fn content_that_is_gone_or_cleared_is_found_no_more() {
        let mut nodes = Nodes::complete(&["n1", "n2"]);
        nodes.put_named(0, "task-cache/main-1", State::Durable, 5);
        nodes.put_named(1, "task-cache/main-2", State::Durable, 9);
        nodes.put_named(0, "task-cache/main-2", State::Durable, 4);
        // The newer one of two nodes goes: the older one counts, and another key is newer.
        nodes.remove(1, "task-cache/main-2");
        assert_eq!(nodes.newest("main-"), of("task-cache/main-1"));
        nodes.remove(0, "task-cache/main-1");
        assert_eq!(nodes.newest("main-"), of("task-cache/main-2"));
        nodes.put_named(1, "task-cache/main-3", State::Durable, 10);
        nodes.lose(1);
        assert_eq!(nodes.newest("main-"), of("task-cache/main-3"), "for 2 min");
        nodes.forget_lost();
        assert_eq!(nodes.newest("main-"), of("task-cache/main-2"));
        nodes.catalog.fence(Fence {
            number: 50,
            previous: 0,
            id: 1,
            covers: Coverage::Name(name("task-cache/main-2")),
            repeats: Vec::new(),
        });
        assert_eq!(nodes.newest("main-"), Newest::Nothing);
        // Made again, after the clear.
        let again = Entry {
            fence: 50,
            ..entry("task-cache/main-2", State::Durable, 3)
        };
        nodes.put_entry(0, again, "task-cache/main-2");
        assert_eq!(nodes.newest("main-"), of("task-cache/main-2"));
    }

    #[test]
    fn there_is_none_only_when_all_accounts_have_come() {
        let mut nodes = Nodes::complete(&["n1"]);
        nodes.put_named(0, "task-cache/main-1", State::Durable, 5);
        nodes.restart(0);
        assert_eq!(nodes.newest("main-"), of("task-cache/main-1"));
        assert_eq!(nodes.newest("x"), Newest::Incomplete);
    }

    /// Commits, losses, accounts that begin again, and clears, in 200 random schedules. The answer
    /// is compared with that for each name.
    #[test]
    fn in_every_schedule_it_is_what_the_names_themselves_tell() {
        for seed in 0..200_u64 {
            let mut state = seed;
            let mut below = |limit: u64| {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1);
                (state >> 33) % limit
            };
            let mut nodes = Nodes::complete(&["n1", "n2", "n3"]);
            let mut fence = 0;
            for stamp in 1..100 {
                let node = usize::try_from(below(3)).expect("small");
                let reference = format!("task-cache/main-{}", below(8));
                match below(12) {
                    0 => nodes.remove(node, &reference),
                    1 => drop(nodes.lose(node)),
                    2 => nodes.restart(node),
                    3 => nodes.forget_lost(),
                    4 => drop(nodes.account(node)),
                    5 => {
                        let (number, previous) = (fence + 10, fence);
                        fence = number;
                        nodes.catalog.fence(Fence {
                            number,
                            previous,
                            id: number,
                            covers: Coverage::Name(name(&reference)),
                            repeats: Vec::new(),
                        });
                    }
                    6 => nodes.put_named(node, &reference, State::Coming, 0),
                    _ => {
                        let entry = Entry {
                            fence: below(2) * fence,
                            ..entry(&reference, State::Durable, below(2) * stamp + below(50))
                        };
                        nodes.put_entry(node, entry, &reference);
                    }
                }
                let all = (0..8).map(|number| format!("task-cache/main-{number}"));
                let versions = all.filter_map(|reference| {
                    let name = name(&reference);
                    let entries = nodes.catalog.valid(NameHash::of(&name), &name);
                    let current = current(&name, &entries);
                    Some((current.first()?.1.version, reference))
                });
                let newest = versions.map(|(version, _)| version).max();
                let found = match nodes.newest("main-") {
                    Newest::Of(name) => {
                        let entries = nodes.catalog.valid(NameHash::of(&name), &name);
                        Some(current(&name, &entries)[0].1.version)
                    }
                    Newest::Nothing | Newest::Incomplete => None,
                };
                assert_eq!(found, newest, "seed {seed}, step {stamp}");
            }
        }
    }

    #[test]
    fn very_much_that_is_gone_is_corrected_in_steps() {
        let mut nodes = Nodes::complete(&["n1", "n2"]);
        let count = u64::try_from(MOST).expect("it fits") + 10;
        nodes.put_named(1, "task-cache/main-old", State::Durable, 1);
        // So many that the entries of the other node are not swept at once.
        for number in 0..4 * count {
            nodes.put_named(1, &format!("task-cache/x-{number}"), State::Durable, 2);
        }
        for number in 0..count {
            nodes.put_named(
                0,
                &format!("task-cache/main-{number}"),
                State::Durable,
                2 + number,
            );
        }
        nodes.lose(0);
        nodes.forget_lost();
        assert_eq!(nodes.newest("main-"), Newest::Incomplete);
        assert_eq!(nodes.newest("main-"), of("task-cache/main-old"));
    }
}
