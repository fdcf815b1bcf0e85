//! Partial layers of failed fetches. They stay in `incoming/`, and the next fetch of the same
//! layers goes on with them.
//!
//! This process verified and wrote each piece. The list is in memory alone: a start deletes all of
//! `incoming/`. Partial layers are deleted after some minutes, and before anything else when the
//! pool needs space.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::model::{LayerId, Sha256, Tenant, Timestamp};

/// How long a part is kept after its last byte came, and how many are.
const AGE: Duration = Duration::from_secs(10 * 60);
const MOST: usize = 256;

/// A directory in `incoming/` in which layers are made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Part {
    /// The layers that it is made of, oldest first. Only the last one can be incomplete.
    pub(super) digests: Vec<Sha256>,
    /// The directory.
    pub(super) id: LayerId,
    /// Where in it the last layer is being made; `None`: all of it came.
    pub(super) filling: Option<String>,
    /// Verified bytes in it.
    pub(super) bytes: u64,
    /// When the first byte came, for what a failed write-back may have lost since.
    pub(super) began: Timestamp,
    /// When the last byte came.
    pub(super) last: Instant,
}

/// The parts that no fetch fills at the moment. Content is not given from one tenant to another.
#[derive(Debug, Default)]
pub(super) struct Parts(Mutex<Vec<(Tenant, Part)>>);

impl Parts {
    /// Keeps a part. Returns those that are to be deleted for it.
    pub(super) fn keep(&self, tenant: Tenant, part: Part) -> Vec<Part> {
        let mut all = self.0.lock();
        all.push((tenant, part));
        let more = all.len().saturating_sub(MOST);
        all.drain(..more).map(|(_, part)| part).collect()
    }

    /// Takes a part of a tenant. The caller fills it, keeps it again, or deletes it.
    pub(super) fn take(&self, tenant: &Tenant, is_it: impl Fn(&Part) -> bool) -> Option<Part> {
        let mut all = self.0.lock();
        let found = all
            .iter()
            .rposition(|(owner, part)| owner == tenant && is_it(part))?;
        Some(all.remove(found).1)
    }

    /// Takes those that are too old at this moment.
    pub(super) fn old(&self, now: Instant) -> Vec<Part> {
        let mut all = self.0.lock();
        let is_old = |(_, part): &mut (_, Part)| now.saturating_duration_since(part.last) >= AGE;
        let old = all.extract_if(.., is_old);
        old.map(|(_, part)| part).collect()
    }

    /// The verified bytes in all of them.
    pub(super) fn bytes(&self) -> u64 {
        let all = self.0.lock();
        all.iter()
            .fold(0, |sum, (_, part)| sum.saturating_add(part.bytes))
    }

    /// Takes all.
    pub(super) fn all(&self) -> Vec<Part> {
        let all = std::mem::take(&mut *self.0.lock());
        all.into_iter().map(|(_, part)| part).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(id: u128, last: Instant) -> Part {
        Part {
            digests: vec![Sha256([1; 32])],
            id: LayerId::from_bits(id),
            filling: None,
            bytes: 1,
            began: Timestamp(1),
            last,
        }
    }

    #[test]
    fn a_part_is_given_once_to_its_tenant_and_goes_when_it_is_old() {
        let (parts, now) = (Parts::default(), Instant::now());
        let [ci, web]: [Tenant; 2] = ["ci", "web"].map(|tenant| tenant.parse().expect("a label"));
        assert_eq!(parts.keep(ci.clone(), part(1, now)), []);
        assert_eq!(parts.keep(ci.clone(), part(2, now + AGE)), []);
        assert_eq!(parts.take(&web, |_| true), None);
        assert_eq!(parts.take(&ci, |it| it.digests.len() == 2), None);
        let old = |at| -> Vec<u128> {
            let old: Vec<Part> = parts.old(at);
            old.iter().map(|it| it.id.bits()).collect()
        };
        assert_eq!(
            old(now + AGE.saturating_sub(Duration::from_nanos(1))),
            [0; 0]
        );
        assert_eq!(old(now + AGE), [1]);
        let taken = parts.take(&ci, |_| true).map(|it| it.id.bits());
        assert_eq!((taken, parts.all()), (Some(2), Vec::new()));
    }

    #[test]
    fn the_oldest_part_goes_for_one_too_many() {
        let (parts, now) = (Parts::default(), Instant::now());
        let ci: Tenant = "ci".parse().expect("a label");
        for id in 0..MOST as u128 {
            assert_eq!(parts.keep(ci.clone(), part(id, now)), []);
        }
        let gone = parts.keep(ci, part(1000, now));
        assert_eq!(gone, [part(0, now)]);
    }
}
