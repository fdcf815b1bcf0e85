//! The budget of a tenant in the tier: what its names show together, and which of them show nothing
//! any more if that is too much. Pure; `collect` reads and writes the records.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::time::Duration;

use super::record::ObjectId;
use crate::model::{ArtifactId, excess, smaller_limit};

/// Content of a name that was committed so recently stays: a step may wait for it.
pub const RECENT: Duration = Duration::from_hours(1);

/// The most that the names of a tenant may show.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Budget {
    /// Bytes of layers, as they are stored.
    pub bytes: Option<u64>,
    /// Names with content.
    pub artifacts: Option<u64>,
}

/// What the names of a tenant show.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TierUse {
    /// Bytes of layers, as they are stored. A layer of several names counts once.
    pub bytes: u64,
    /// Names with content.
    pub artifacts: u64,
    /// It is more than the budget: the rest is recent, or was committed meanwhile.
    pub over_budget: bool,
}

/// A layer: the digest of its table, and its upload.
pub(super) type Layer = ([u8; 32], ObjectId);

/// A name with content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Shown {
    /// The key of its record.
    pub(super) key: String,
    /// Its manifest.
    pub(super) manifest: (ArtifactId, ObjectId),
    /// How long ago its record was written, by the storage's clock.
    pub(super) age: Duration,
    /// How long ago a node of the cluster used it last. Writing is a use.
    pub(super) unused: Duration,
    /// Its layers and their bytes. Empty: its manifest is missing or damaged.
    pub(super) layers: Vec<(Layer, u64)>,
}

/// The sum of some names.
#[derive(Debug, Default)]
struct Sum {
    /// How many names show the layer, and its bytes.
    layers: HashMap<Layer, (u64, u64)>,
    kept: TierUse,
}

impl Budget {
    /// The smaller of each: what two policies of a namespace allow together.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            bytes: smaller_limit(self.bytes, other.bytes),
            artifacts: smaller_limit(self.artifacts, other.artifacts),
        }
    }

    /// What these names show together.
    pub(super) fn kept<'a>(&self, shown: impl IntoIterator<Item = &'a Shown>) -> TierUse {
        let mut sum = Sum::default();
        for name in shown {
            sum.add(name);
        }
        let exceeds = |used: u64, limit: Option<u64>| limit.is_some_and(|limit| used > limit);
        let over_budget =
            exceeds(sum.kept.bytes, self.bytes) || exceeds(sum.kept.artifacts, self.artifacts);
        TierUse {
            over_budget,
            ..sum.kept
        }
    }

    /// Which names go, least recently used first, until 95 % of an exceeded limit are left. None of
    /// them was written recently.
    pub(super) fn evicted<'a>(&self, shown: &'a [Shown]) -> Vec<&'a Shown> {
        let mut sum = Sum::default();
        for name in shown {
            sum.add(name);
        }
        let bytes = sum.kept.bytes - excess(sum.kept.bytes, self.bytes);
        let artifacts = sum.kept.artifacts - excess(sum.kept.artifacts, self.artifacts);
        let mut oldest: Vec<&Shown> = shown.iter().filter(|name| name.age >= RECENT).collect();
        // Two collectors choose the same names.
        let order = |name: &Shown| (Reverse(name.unused), Reverse(name.age));
        oldest.sort_by(|a, b| order(a).cmp(&order(b)).then_with(|| a.key.cmp(&b.key)));
        let mut evicted = Vec::new();
        for name in oldest {
            if sum.kept.bytes <= bytes && sum.kept.artifacts <= artifacts {
                break;
            }
            sum.remove(name);
            evicted.push(name);
        }
        evicted
    }
}

impl Sum {
    fn add(&mut self, name: &Shown) {
        self.kept.artifacts += 1;
        for (layer, bytes) in &name.layers {
            let (names, bytes) = self.layers.entry(*layer).or_insert((0, *bytes));
            if *names == 0 {
                self.kept.bytes = self.kept.bytes.saturating_add(*bytes);
            }
            *names += 1;
        }
    }

    /// Takes a name away that was added.
    fn remove(&mut self, name: &Shown) {
        self.kept.artifacts -= 1;
        for (layer, _) in &name.layers {
            let Some((names, bytes)) = self.layers.get_mut(layer) else {
                continue;
            };
            *names -= 1;
            if *names == 0 {
                self.kept.bytes = self.kept.bytes.saturating_sub(*bytes);
                self.layers.remove(layer);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_hours(1);

    /// A name that was written so many hours ago, with layers of these numbers and bytes.
    fn name(number: u128, hours: u32, layers: &[(u8, u64)]) -> Shown {
        let layers = layers.iter();
        let layers = layers.map(|(layer, bytes)| (([*layer; 32], ObjectId::from_bits(1)), *bytes));
        Shown {
            key: format!("name-{number:03}"),
            manifest: (ArtifactId::from_bits(number), ObjectId::from_bits(number)),
            age: HOUR * hours,
            unused: HOUR * hours,
            layers: layers.collect(),
        }
    }

    fn bytes(bytes: u64) -> Budget {
        Budget {
            bytes: Some(bytes),
            artifacts: None,
        }
    }

    fn keys(evicted: &[&Shown]) -> Vec<String> {
        evicted.iter().map(|name| name.key.clone()).collect()
    }

    #[test]
    fn the_oldest_names_go_until_95_percent_are_left() {
        let names: Vec<Shown> = (0..100_u8)
            .map(|number| name(number.into(), 200 - u32::from(number), &[(number, 10)]))
            .collect();
        for (budget, gone) in [
            (Budget::default(), 0),
            (bytes(1000), 0),
            // 949 is the target: 94 names.
            (bytes(999), 5),
            (bytes(500), 53),
            (bytes(0), 100),
            (
                Budget {
                    artifacts: Some(50),
                    bytes: Some(900),
                },
                52,
            ),
        ] {
            let evicted = budget.evicted(&names);
            let expected: Vec<&Shown> = names.iter().take(gone).collect();
            assert_eq!(keys(&evicted), keys(&expected), "{budget:?}");
            let kept = budget.kept(&names[gone..]);
            assert!(!kept.over_budget, "{budget:?} {kept:?}");
        }
        let is_over = |budget: Budget| budget.kept(&names).over_budget;
        assert!(is_over(bytes(999)) && !is_over(bytes(1000)) && !is_over(Budget::default()));
    }

    #[test]
    fn a_layer_of_several_names_counts_once_and_goes_with_the_last() {
        let names = [
            name(1, 9, &[(1, 100), (9, 1000)]),
            name(2, 8, &[(2, 100), (9, 1000)]),
            // A manifest that shows a layer twice.
            name(3, 7, &[(3, 100), (3, 100)]),
            name(4, 6, &[]),
        ];
        let kept = bytes(1).kept(&names);
        assert_eq!((kept.bytes, kept.artifacts), (1300, 4));
        // The first frees 100 only.
        assert_eq!(keys(&bytes(1250).evicted(&names)).len(), 2);
        let evicted = bytes(200).evicted(&names);
        assert_eq!(keys(&evicted), ["name-001", "name-002"]);
        assert_eq!(bytes(200).kept(&names[2..]).bytes, 100);
        let evicted = bytes(0).evicted(&names);
        assert_eq!(evicted.len(), 3, "the last one has no bytes");
    }

    #[test]
    fn recent_content_stays_and_equal_ages_go_in_the_order_of_keys() {
        let mut names = vec![
            name(2, 1, &[(2, 10)]),
            name(1, 1, &[(1, 10)]),
            name(3, 0, &[(3, 10)]),
        ];
        assert_eq!(keys(&bytes(20).evicted(&names)), ["name-001", "name-002"]);
        let evicted = bytes(0).evicted(&names);
        assert_eq!(evicted.len(), 2);
        let kept = bytes(0).kept(&names[2..]);
        assert!(kept.over_budget && kept.bytes == 10);
        names.reverse();
        assert_eq!(keys(&bytes(20).evicted(&names)), ["name-001", "name-002"]);
        let two = Budget {
            bytes: Some(7),
            artifacts: None,
        };
        let both = two.and(Budget {
            bytes: Some(9),
            artifacts: Some(3),
        });
        assert_eq!((both.bytes, both.artifacts), (Some(7), Some(3)));
    }

    #[test]
    fn a_name_that_was_used_since_its_write_goes_after_those_that_were_not() {
        let used = |number: u128, hours: u32, unused: u32| Shown {
            unused: HOUR * unused,
            ..name(number, hours, &[])
        };
        let names = [used(1, 90, 2), used(2, 9, 9), used(3, 8, 3), used(4, 7, 7)];
        let most = |artifacts| Budget {
            bytes: None,
            artifacts: Some(artifacts),
        };
        for (left, gone) in [
            (4, &[][..]),
            (3, &["name-002"]),
            (1, &["name-002", "name-004", "name-003"]),
        ] {
            assert_eq!(keys(&most(left).evicted(&names)), gone, "{left}");
        }
        // What is in use all the time does not make a budget fail: only a recent write does.
        let busy = [used(1, 2, 0), used(2, 2, 0)];
        assert_eq!(keys(&most(0).evicted(&busy)), ["name-001", "name-002"]);
    }

    #[test]
    fn what_goes_frees_little_more_than_it_must() {
        let mut random = 12_345_u64;
        let mut next = |below: u64| {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (random >> 33) % below
        };
        for _ in 0..200 {
            let names: Vec<Shown> = (0..60_u128)
                .map(|number| {
                    let age = u32::try_from(next(50)).expect("small");
                    let layers: Vec<(u8, u64)> = (0..next(4))
                        .map(|_| u8::try_from(next(40)).expect("small"))
                        .map(|layer| (layer, u64::from(layer) + 1))
                        .collect();
                    name(number, age, &layers)
                })
                .collect();
            let budget = Budget {
                bytes: Some(next(900)),
                artifacts: Some(next(70)),
            };
            let before = budget.kept(&names);
            let evicted = budget.evicted(&names);
            let is_left = |name: &&Shown| !evicted.contains(name);
            let left: Vec<&Shown> = names.iter().filter(is_left).collect();
            let kept = budget.kept(left.iter().copied());
            if !before.over_budget {
                assert!(evicted.is_empty());
                continue;
            }
            // Each older name goes first.
            let youngest = evicted.iter().map(|name| name.age).min();
            let oldest_left = left.iter().map(|name| name.age).max();
            assert!(youngest >= oldest_left.filter(|age| *age >= RECENT));
            let is_recent = left.iter().all(|name| name.age < RECENT);
            assert!(!kept.over_budget || is_recent);
            // Without the last of them it would still be too much.
            let Some((_, all_but_last)) = evicted.split_last() else {
                assert!(is_recent);
                continue;
            };
            let is_left = |name: &&Shown| !all_but_last.contains(name);
            let kept = budget.kept(names.iter().filter(is_left));
            let is_above =
                |used: u64, before: u64, limit: Option<u64>| used > before - excess(before, limit);
            assert!(
                is_above(kept.bytes, before.bytes, budget.bytes)
                    || is_above(kept.artifacts, before.artifacts, budget.artifacts)
            );
        }
    }
}
