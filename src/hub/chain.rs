//! The fences on their way to the nodes: the chain of the API server, as the hub knows it, and what
//! each stream has of it. `model::Fences` decides what a fence does; `k8s` makes and reads them.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use tokio::sync::{oneshot, watch};
use tonic::Status;

use super::handle::Handle;
use super::messages;
use super::serve::{Attached, State};
use crate::catalog::{Changes, SessionId};
use crate::model::{Clear, Coverage, Fence, Fences, Tenant};
use crate::proto::hub::v1 as wire;
use crate::sys;
use wire::to_node::Kind as To;

/// A person's order to clear names on all nodes.
#[derive(Debug)]
pub struct ClearOrder {
    /// The names.
    pub covers: Coverage,
    /// Gets an answer when the order is in the API server, or why it may not be.
    pub done: oneshot::Sender<Result<(), String>>,
}

/// The chain of fences.
impl Handle {
    /// Whether the fences of the API server are known.
    #[must_use]
    pub fn knows_fences(&self) -> bool {
        self.0.state.lock().is_loaded
    }

    /// The fences of the API server, as they are listed. Until the first call no node's account
    /// begins. Another call is for a chain that was set back: all nodes begin again, so that they
    /// show their fences.
    pub fn load_fences(&self, fences: Fences) {
        let now = self.0.now();
        let mut state = self.0.state.lock();
        state.catalog.begin_again(fences, now);
        for stream in std::mem::take(&mut state.streams).into_values() {
            stream.ends.cancel();
        }
        state.unsent.clear();
        state.is_loaded = true;
        let changes = Changes {
            all: true,
            ..Changes::default()
        };
        self.0.follow(&mut state, &changes, now);
        drop(state);
        self.0.chain.send_replace(());
    }

    /// A fence of the API server, new or known. It counts at once. The nodes get it when nothing
    /// is [owed](Self::owed).
    pub fn learn_fence(&self, fence: Fence) {
        let now = self.0.now();
        let mut state = self.0.state.lock();
        if state.catalog.fences().knows(&fence) {
            return;
        }
        let changes = state.catalog.fence(fence.clone());
        self.0.follow(&mut state, &changes, now);
        state.unsent.push(fence);
        state.send_fences();
        drop(state);
        self.0.chain.send_replace(());
    }

    /// Fences up to this number are deleted, because all nodes have applied them. The nodes forget
    /// them, too.
    pub fn forget_fences(&self, up_to: u64) {
        let now = self.0.now();
        let mut state = self.0.state.lock();
        if up_to > state.catalog.fences().forgotten() {
            let changes = state.catalog.forget_fences(up_to);
            self.0.follow(&mut state, &changes, now);
            // A stream may live for months. The others get the number with their first Welcome.
            state.send_all(messages::to_node(To::Welcome(wire::Welcome {
                forgotten: up_to,
                usage_ms: 0,
            })));
        }
    }

    /// The next fence, to be made at the API server.
    #[must_use]
    pub fn next_fence(&self, clear: Clear) -> Fence {
        let id = u64::from_ne_bytes(sys::random_bytes());
        let now = self.0.now();
        let state = self.0.state.lock();
        let (time, applied) = (state.clock.time(now), state.catalog.applied());
        let fences = state.catalog.fences();
        fences.next(clear, time, applied, id)
    }

    /// The fences that are known.
    #[must_use]
    pub fn fences(&self) -> Fences {
        self.0.state.lock().catalog.fences().clone()
    }

    /// What must be fenced once more before any node gets a fence, or its account begins.
    #[must_use]
    pub fn owed(&self) -> Vec<Clear> {
        self.0.state.lock().catalog.owed().to_vec()
    }

    /// So many objects of the API server are malformed, for a metric.
    pub fn set_malformed_fences(&self, count: usize) {
        self.0.state.lock().malformed = count;
    }

    /// Tells that what is owed may have changed.
    #[must_use]
    pub fn owed_changes(&self) -> watch::Receiver<()> {
        self.0.chain.subscribe()
    }

    /// How old the oldest name of each namespace is that has names, by the cluster's time. Names
    /// that a fence of the whole namespace is about to clear are left out.
    #[must_use]
    pub fn ages(&self) -> BTreeMap<Tenant, Duration> {
        let now = self.0.now();
        let state = self.0.state.lock();
        let time = state.clock.time(now);
        let oldest = state.catalog.oldest().into_iter();
        oldest
            .map(|(tenant, stamp)| (tenant, time.since(stamp)))
            .collect()
    }

    /// The highest fence that each node with a stream has applied.
    #[must_use]
    pub fn applied_fences(&self) -> BTreeMap<String, u64> {
        let state = self.0.state.lock();
        let streams = state.streams.values().filter(|stream| stream.is_welcome);
        let applied = streams.map(|it| (it.node.as_str().to_owned(), it.applied));
        applied.collect()
    }
}

impl State {
    /// Sends new fences to all streams, in their order, unless something is owed: that comes first.
    fn send_fences(&mut self) {
        if !self.catalog.owed().is_empty() {
            return;
        }
        let mut fences = std::mem::take(&mut self.unsent);
        fences.sort_by_key(|fence| fence.number);
        // The others get them before their Welcome.
        for fence in fences {
            self.send_all(messages::to_node(To::Fence(messages::fence(&fence))));
        }
    }
}

impl Attached {
    /// Waits until the fences of the API server are known.
    pub(super) async fn fences_are_loaded(&self) {
        let mut changes = self.inner.chain.subscribe();
        while !self.inner.state.lock().is_loaded {
            if changes.changed().await.is_err() {
                return;
            }
        }
    }

    /// Sends a node the fences that it lacks, then Welcome. From there on it gets each new one.
    /// `newest`: the highest number that it has applied.
    pub(super) async fn welcome(&self, session: SessionId, newest: u64) -> Result<(), Status> {
        let mut changes = self.inner.chain.subscribe();
        let mut sent = HashSet::new();
        loop {
            let mut missing: Vec<Fence> = {
                let mut state = self.inner.state.lock();
                let fences = state.catalog.fences();
                let missing = fences.all().filter(|fence| {
                    fence.number > newest && !sent.contains(&(fence.number, fence.id))
                });
                let mut missing: Vec<Fence> = missing.cloned().collect();
                let forgotten = fences.forgotten();
                if !state.catalog.owed().is_empty() {
                    missing.clear();
                } else if missing.is_empty() {
                    let Some(stream) = state.streams.get_mut(&session) else {
                        return Err(Status::aborted("a later stream began"));
                    };
                    stream.is_welcome = true;
                    state.send_policies(session);
                    let usage_ms = self.inner.usage.as_millis().try_into().unwrap_or(u32::MAX);
                    let welcome = To::Welcome(wire::Welcome {
                        forgotten,
                        usage_ms,
                    });
                    state.send(session, messages::to_node(welcome));
                    return Ok(());
                }
                missing
            };
            if missing.is_empty() {
                // What is owed is being made.
                let made = changes.changed().await;
                made.map_err(|_| Status::unavailable("the controller ends"))?;
            }
            missing.sort_by_key(|fence| fence.number);
            for fence in missing {
                let message = messages::to_node(To::Fence(messages::fence(&fence)));
                let done = self.orders.send(Ok(message.into())).await;
                done.map_err(|_| Status::cancelled("the node is gone"))?;
                sent.insert((fence.number, fence.id));
            }
        }
    }
}
