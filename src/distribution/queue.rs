//! The queue of uploads: which artifact is next, and what waits after an error. The queue itself is
//! what the engine's index says; only the waiting times are kept here.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::{Notify, watch};

use super::context::{Context, random};
use super::decide::{UploadRetry, pause, setback};
use super::types::Drained;
use super::upload::{Outcome, Uploader};
use super::work::Workers;
use crate::engine::Tables;
use crate::model::{Artifact, ArtifactId, Name, Tenant, Timestamp};

/// How often the queue is checked if no event reports a change.
const LOOK: Duration = Duration::from_secs(30);
/// How long an artifact waits that changed before its upload began.
const CHANGED: Duration = Duration::from_secs(1);
/// The longest pause while the driver ends.
const WHILE_DRAINING: Duration = Duration::from_secs(1);

/// Uploads everything, one artifact after the other.
#[derive(Debug)]
pub(super) struct Queue {
    context: Arc<Context>,
    pub(super) uploader: Arc<Uploader>,
    workers: Workers,
    counts: Workers,
    /// Writes into the engine's index.
    notes: Workers,
    memory: Mutex<Memory>,
    draining: AtomicBool,
    /// How often `drain` began.
    drains: AtomicU64,
    /// The queue is to be looked at.
    look: Notify,
    /// The last drain that the queue took notice of, and whether the queue can do nothing more at
    /// this moment.
    turn: watch::Sender<(u64, bool)>,
}

/// An artifact that was not uploaded.
#[derive(Debug)]
struct Waiting {
    failures: u32,
    /// It is not tried before. Later it is tried after all artifacts that did not fail, unless it
    /// is the oldest one.
    until: Instant,
}

/// The memory of the loop.
#[derive(Debug, Default)]
struct Memory {
    waiting: HashMap<ArtifactId, Waiting>,
    /// Tenants whose part of the tier a person must mend, or one object in it.
    tenants: HashMap<Tenant, Instant>,
    /// Failures of the storage in a row.
    failures: u32,
    /// Whether the oldest artifact is next.
    takes_oldest: bool,
    /// The last drain that was taken notice of.
    drain: u64,
}

/// What a look at the queue found.
#[derive(Debug, Default)]
struct Looked {
    next: Option<Artifact>,
    /// When the first of the artifacts that wait may be tried.
    again: Option<Instant>,
    /// An artifact waits for a table of contents that is being made.
    lacks_tables: bool,
    /// The last drain that had begun before.
    drain: u64,
}

/// Until when an artifact waited after a failure, and its age.
type Place = (Option<Instant>, (Timestamp, ArtifactId));

/// Whether an artifact is uploaded before another one.
fn is_before((waited, age): Place, (other_waited, other_age): Place, takes_oldest: bool) -> bool {
    if takes_oldest {
        age < other_age
    } else {
        (waited, Reverse(age)) < (other_waited, Reverse(other_age))
    }
}

impl Queue {
    pub(super) fn new(context: Arc<Context>) -> Self {
        Self {
            uploader: Arc::new(Uploader::new(Arc::clone(&context))),
            workers: context.workers("shared-upload", 1),
            counts: context.workers("shared-count", 1),
            notes: context.workers("shared-note", 1),
            memory: Mutex::default(),
            draining: AtomicBool::new(false),
            drains: AtomicU64::new(0),
            look: Notify::new(),
            turn: watch::Sender::new((0, false)),
            context,
        }
    }

    /// Has the queue looked at.
    pub(super) fn look(&self) {
        self.look.notify_one();
    }

    /// Has an artifact uploaded again that the tier lost or evicted.
    pub(super) async fn share_again(&self, name: &Name, artifact: ArtifactId) {
        tracing::info!(
            tenant = %name.tenant, reference = %name.reference, %artifact,
            "the shared tier no longer has this content; it is uploaded again"
        );
        let engine = self.context.engine.clone();
        let note = move || {
            engine.set_sharing(artifact, |sharing| {
                sharing.base = sharing.follows();
                sharing.number = None;
            })
        };
        match self.notes.run(|| true, note).await {
            Some(Err(error)) => tracing::warn!(%error,
                "content could not be queued for another upload"),
            _ => self.look(),
        }
    }

    /// Uploads until everything stops.
    pub(super) async fn run(self: Arc<Self>) {
        while !self.context.is_stopping() {
            let queue = Arc::clone(&self);
            let looked = self.workers.run(|| true, move || queue.next()).await;
            let looked = looked.unwrap_or_default();
            let Some(artifact) = looked.next else {
                self.idle(&looked).await;
                continue;
            };
            let uploader = Arc::clone(&self.uploader);
            let next = artifact.clone();
            let call = move || uploader.upload(&next);
            let outcome = self.workers.run(|| true, call).await;
            if let Some(pause) = self.after(&artifact, outcome) {
                self.pause(pause).await;
            }
        }
    }

    /// Looks for the artifact that is next: the newest one that did not fail, else the one that
    /// waited for the longest time. Every second time it is the oldest one: else commits that come
    /// faster than they are uploaded would keep it waiting for ever. Takes as long as a walk over
    /// all artifacts.
    fn next(&self) -> Looked {
        let mut memory = self.memory.lock();
        let memory = &mut *memory;
        let drain = self.drains.load(Ordering::Relaxed);
        if memory.drain < drain {
            // A person may have mended it, and this is the last chance of this process.
            memory.tenants.clear();
            memory.drain = drain;
        }
        let mut looked = Looked {
            drain,
            ..Looked::default()
        };
        let now = Instant::now();
        let mut wanted = HashSet::new();
        let mut without = Vec::new();
        let mut first = None;
        let engine = &self.context.engine;
        engine.each_to_share(|artifact, tables| {
            let waiting = memory.waiting.get(&artifact.id).map(|it| it.until);
            if waiting.is_some() {
                wanted.insert(artifact.id);
            }
            let until = waiting.max(memory.tenants.get(&artifact.tenant).copied());
            if tables != Tables::Made {
                looked.lacks_tables |= tables == Tables::Coming;
                without.extend_from_slice(&artifact.layers);
            } else if let Some(until) = until.filter(|until| *until > now) {
                let again = looked.again.map_or(until, |again| again.min(until));
                looked.again = Some(again);
            } else {
                let place = (waiting, (artifact.created, artifact.id));
                if first.is_none_or(|first| is_before(place, first, memory.takes_oldest)) {
                    first = Some(place);
                    looked.next = Some(artifact.clone());
                }
            }
        });
        if looked.next.is_some() {
            memory.takes_oldest = !memory.takes_oldest;
        }
        engine.wait_for_tables(&without);
        memory.waiting.retain(|id, _| wanted.contains(id));
        memory.tenants.retain(|_, until| *until > now);
        looked
    }

    /// Records the result of an upload. Returns how long all uploads wait.
    fn after(&self, artifact: &Artifact, outcome: Option<Outcome>) -> Option<Duration> {
        let mut memory = self.memory.lock();
        let error = match outcome {
            Some(Outcome::Done) => {
                memory.failures = 0;
                memory.waiting.remove(&artifact.id);
                return None;
            }
            // It is not in the queue any more, lacks tables by now, or is tried again.
            Some(Outcome::Gone | Outcome::NotReady) => {
                memory.wait(artifact, CHANGED);
                return None;
            }
            Some(Outcome::Failed(error)) => error,
            Some(Outcome::Engine(error)) => {
                tracing::warn!(artifact = %artifact.id, %error,
                    "an artifact could not be uploaded; retrying");
                memory.put_off(artifact);
                return None;
            }
            None => {
                memory.put_off(artifact);
                return None;
            }
        };
        let setback = setback(&error);
        if !matches!(setback, UploadRetry::Stopped | UploadRetry::Again) {
            self.context.counters.lock().upload_failures += 1;
        }
        match setback {
            UploadRetry::Again | UploadRetry::Stopped => None,
            UploadRetry::Artifact => {
                tracing::warn!(
                    tenant = %artifact.tenant, reference = %artifact.reference, %error,
                    "an artifact could not be uploaded; retrying"
                );
                memory.put_off(artifact);
                None
            }
            UploadRetry::Permanent => {
                // A credential may be valid for some tenants only.
                let until = Instant::now() + pause(setback, 0, random());
                memory.tenants.insert(artifact.tenant.clone(), until);
                // Only this artifact's objects may be at fault: the others go first.
                memory.wait(artifact, Duration::ZERO);
                None
            }
            UploadRetry::Storage | UploadRetry::Busy => {
                let pause = pause(setback, memory.failures, random());
                memory.failures += 1;
                memory.wait(artifact, Duration::ZERO);
                Some(pause)
            }
        }
    }

    /// Waits until there may be something to do.
    async fn idle(&self, looked: &Looked) {
        let now = Instant::now();
        let soon = now + WHILE_DRAINING;
        let nothing_more = !looked.lacks_tables && looked.again.is_none_or(|again| again > soon);
        self.turn.send_replace((looked.drain, nothing_more));
        let later = now + LOOK;
        let until = looked.again.map_or(later, |again| again.min(later));
        tokio::select! {
            () = self.context.engine.content_changed() => {}
            () = self.look.notified() => {}
            () = tokio::time::sleep_until(until.into()) => {}
            () = self.context.stop.cancelled() => {}
        }
    }

    /// Waits after a failure of the storage. Only `drain` shortens that.
    async fn pause(&self, pause: Duration) {
        let is_draining = || self.draining.load(Ordering::Relaxed);
        let pause = if is_draining() {
            pause.min(WHILE_DRAINING)
        } else {
            pause
        };
        let drain = async {
            while !is_draining() {
                self.look.notified().await;
            }
            // It began in this pause, or this pause is a short one.
            if pause > WHILE_DRAINING {
                return;
            }
            std::future::pending::<()>().await;
        };
        tokio::select! {
            () = drain => {}
            () = tokio::time::sleep(pause) => {}
            () = self.context.stop.cancelled() => {}
        }
    }

    async fn waiting(&self) -> u64 {
        let context = Arc::clone(&self.context);
        let counted = self.counts.run(|| true, move || context.waiting()).await;
        // A look that panicked found something.
        counted.unwrap_or(1)
    }

    /// Uploads what waits, at most for so long. Ends earlier if all is uploaded, or the rest cannot
    /// be uploaded at this moment.
    pub(super) async fn drain(&self, within: Duration) -> Drained {
        let before = self.context.counters.lock().uploads;
        let mut turns = self.turn.subscribe();
        turns.mark_unchanged();
        self.draining.store(true, Ordering::Relaxed);
        let drain = self.drains.fetch_add(1, Ordering::Relaxed) + 1;
        self.look();
        let all = async {
            while self.waiting().await > 0 {
                if turns.changed().await.is_err() {
                    return;
                }
                // An earlier look may have found less.
                let (looked, nothing_more) = *turns.borrow_and_update();
                if looked >= drain && nothing_more {
                    return;
                }
            }
        };
        // The result says how much is left.
        let _in_time = tokio::time::timeout(within, all).await;
        self.draining.store(false, Ordering::Relaxed);
        let uploaded = self.context.counters.lock().uploads - before;
        Drained {
            uploaded,
            left: self.waiting().await,
        }
    }
}

impl Memory {
    /// The artifact waits for longer after each failure.
    fn put_off(&mut self, artifact: &Artifact) {
        let failures = self.waiting.get(&artifact.id).map_or(0, |it| it.failures);
        let waiting = self.wait(artifact, pause(UploadRetry::Artifact, failures, random()));
        waiting.failures = failures + 1;
    }

    fn wait(&mut self, artifact: &Artifact, pause: Duration) -> &mut Waiting {
        let until = Instant::now() + pause;
        let waiting = self.waiting.entry(artifact.id);
        let waiting = waiting.or_insert(Waiting { failures: 0, until });
        waiting.until = until;
        waiting
    }
}
