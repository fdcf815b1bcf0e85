//! The results of checks of pods that were made within the last minute. A peer asks for a table and
//! for some content of each layer, and each of these calls is checked: without this memory, one
//! fetch would be many questions to the API server.
//!
//! A result holds for one peer, pod and name. Only permissions are remembered, never refusals. The
//! key of the peer is checked before, at each call. So the permission of a pod can outlast the pod
//! by up to a minute.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::sync::OwnedSemaphorePermit;

use crate::distribution::PlacesOfEach;
use crate::distribution::roster::{Access, Asked, AskedClone, Refusal};
use crate::model::{Name, NodeId, PodUid, Tenant};

/// How long a result holds.
const HOLDS: Duration = Duration::from_secs(60);
/// How many questions to the API server run at once because of one peer: a refusal is not
/// remembered. What is remembered is answered without a place: the API server may be away, and a
/// transfer goes on.
const CHECKS: usize = 8;
/// How many results are remembered; with more, all are forgotten.
const REMEMBERED: usize = 4096;

/// The rights of peers, each checked once in a minute.
#[derive(Debug)]
pub struct Checked {
    access: Arc<dyn Access>,
    recent: Mutex<Recent>,
    checks: PlacesOfEach<NodeId>,
}

impl Checked {
    /// `access` checks.
    #[must_use]
    pub fn new(access: Arc<dyn Access>) -> Self {
        Self {
            access,
            recent: Mutex::default(),
            checks: PlacesOfEach::new(CHECKS),
        }
    }

    async fn place(&self, peer: &NodeId) -> Result<OwnedSemaphorePermit, Refusal> {
        let place = self.checks.take(peer).await;
        place.map_err(|_| Refusal::Unknown("the driver ends".to_owned()))
    }

    /// `now`: when it is asked. What the API server tells then is at least as new.
    async fn check_at(&self, peer: &NodeId, asked: &Asked, now: Instant) -> Result<(), Refusal> {
        let check = check_of(peer, asked);
        if self.recent.lock().holds(&check, now) {
            return Ok(());
        }
        let _place = self.place(peer).await?;
        // Another call of the peer may have asked the same meanwhile.
        if self.recent.lock().holds(&check, now) {
            return Ok(());
        }
        self.access.check(peer, asked).await?;
        self.recent.lock().note(check, now);
        Ok(())
    }
}

#[async_trait]
impl Access for Checked {
    async fn check(&self, peer: &NodeId, asked: &Asked) -> Result<(), Refusal> {
        self.check_at(peer, asked, Instant::now()).await
    }

    /// Never remembered: the right ends when the volume is made, and it asks seldom.
    async fn check_clone(&self, peer: &NodeId, asked: &AskedClone) -> Result<(), Refusal> {
        let _place = self.place(peer).await?;
        self.access.check_clone(peer, asked).await
    }
}

/// What was checked. A right is that of the pod with this namespace, this name and this uid.
type Check = (NodeId, Name, Tenant, String, PodUid);

fn check_of(peer: &NodeId, asked: &Asked) -> Check {
    let Asked { name, reader, pod } = asked.clone();
    (peer.clone(), name, reader, pod.name, pod.uid)
}

/// The recent checks, each with its time.
#[derive(Debug, Default)]
struct Recent(HashMap<Check, Instant>);

impl Recent {
    fn holds(&self, check: &Check, now: Instant) -> bool {
        self.0.get(check).is_some_and(|at| is_fresh(*at, now))
    }

    fn note(&mut self, check: Check, now: Instant) {
        self.0.retain(|_, at| is_fresh(*at, now));
        if self.0.len() >= REMEMBERED {
            // They are checked once more.
            self.0.clear();
        }
        // Another call may have checked the same meanwhile: the minute is that of the first.
        self.0.entry(check).or_insert(now);
    }
}

fn is_fresh(at: Instant, now: Instant) -> bool {
    now.saturating_duration_since(at) < HOLDS
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use super::*;
    use crate::model::Pod;

    /// Counts the checks, and answers as it is told.
    #[derive(Debug, Default)]
    struct Counting {
        checks: AtomicUsize,
        refuses: AtomicBool,
    }

    #[async_trait]
    impl Access for Counting {
        async fn check(&self, _peer: &NodeId, _asked: &Asked) -> Result<(), Refusal> {
            self.checks.fetch_add(1, Ordering::Relaxed);
            if self.refuses.load(Ordering::Relaxed) {
                return Err(Refusal::Denied("it has ended".to_owned()));
            }
            Ok(())
        }
    }

    fn node(name: &str) -> NodeId {
        NodeId::new(name).expect("a name")
    }

    fn asked(reference: &str, pod: &str, uid: &str) -> Asked {
        Asked {
            name: Name {
                tenant: "ci".parse().expect("a label"),
                reference: reference.parse().expect("a reference"),
            },
            reader: "ci".parse().expect("a label"),
            pod: Pod {
                uid: uid.parse().expect("a uid"),
                name: pod.to_owned(),
                service_account: None,
            },
        }
    }

    #[tokio::test]
    async fn a_right_is_that_of_one_peer_name_and_pod_and_a_refusal_is_not_remembered() {
        let inner = Arc::new(Counting::default());
        let checked = Checked::new(inner.clone());
        let count = || inner.checks.swap(0, Ordering::Relaxed);
        let (peer, go) = (node("n1"), asked("task-cache/go", "pod", "uid"));
        for _ in 0..3 {
            checked.check(&peer, &go).await.expect("it may");
        }
        assert_eq!(count(), 1);
        let mut elsewhere = go.clone();
        elsewhere.name.tenant = "other".parse().expect("a label");
        let others = [
            (node("n2"), go.clone()),
            (peer.clone(), asked("task-cache/main", "pod", "uid")),
            (peer.clone(), asked("resource-cache/go", "pod", "uid")),
            (peer.clone(), asked("task-cache/go", "pod2", "uid")),
            (peer.clone(), asked("task-cache/go", "pod", "uid2")),
            (peer.clone(), elsewhere),
        ];
        inner.refuses.store(true, Ordering::Relaxed);
        for (peer, asked) in &others {
            for _ in 0..2 {
                checked.check(peer, asked).await.expect_err("it may not");
                assert_eq!(count(), 1, "{peer:?} {asked:?}");
            }
        }
        checked.check(&peer, &go).await.expect("that is known");
        inner.refuses.store(false, Ordering::Relaxed);
        for (peer, asked) in &others {
            checked.check(peer, asked).await.expect("it may now");
        }
        assert_eq!(count(), others.len());
    }

    #[tokio::test]
    async fn the_node_of_a_pod_that_ended_is_refused_after_a_minute() {
        let inner = Arc::new(Counting::default());
        let checked = Checked::new(inner.clone());
        let (peer, go) = (node("n1"), asked("task-cache/go", "pod", "uid"));
        let began = Instant::now();
        let at = |milliseconds| {
            let now = began + Duration::from_millis(milliseconds);
            checked.check_at(&peer, &go, now)
        };
        at(0).await.expect("it runs");
        inner.refuses.store(true, Ordering::Relaxed);
        at(59_999).await.expect("it ran a moment before");
        let refused = at(60_000).await.expect_err("it has ended");
        assert_eq!(refused, Refusal::Denied("it has ended".to_owned()));
        // Refusals do not make a minute longer, and are not remembered.
        at(60_001).await.expect_err("it has ended");
        inner.refuses.store(false, Ordering::Relaxed);
        at(60_002).await.expect("another pod of that name runs");
    }

    #[test]
    fn a_right_holds_for_a_minute() {
        let (began, mut recent) = (Instant::now(), Recent::default());
        let check = |reference| check_of(&node("n1"), &asked(reference, "pod", "uid"));
        let after = |milliseconds| began + Duration::from_millis(milliseconds);
        recent.note(check("task-cache/go"), began);
        recent.note(check("task-cache/main"), after(30_000));
        // Another call has checked it at the same time: the minute is that of the first.
        recent.note(check("task-cache/go"), after(40_000));
        assert!(recent.holds(&check("task-cache/go"), after(59_999)));
        assert!(!recent.holds(&check("task-cache/go"), after(60_000)));
        assert!(recent.holds(&check("task-cache/main"), after(60_000)));
        recent.note(check("task-cache/go"), after(61_000));
        assert!(recent.holds(&check("task-cache/go"), after(120_999)));
        assert!(!recent.holds(&check("task-cache/go"), after(121_000)));
        recent.note(check("task-cache/new"), after(121_000));
        assert_eq!(recent.0.len(), 1, "what is too old is forgotten");
    }

    #[test]
    fn a_peer_that_asks_for_very_much_fills_no_memory() {
        let (now, mut recent) = (Instant::now(), Recent::default());
        let check = |number: usize| {
            let reference = format!("task-cache/{number}");
            check_of(&node("n1"), &asked(&reference, "pod", "uid"))
        };
        for number in 0..REMEMBERED + 10 {
            recent.note(check(number), now);
            assert!(recent.holds(&check(number), now));
        }
        assert_eq!(recent.0.len(), 10);
        assert!(!recent.holds(&check(9), now), "all before are forgotten");
    }
}
