//! The queue of uploads: which artifact is next, and what waits after an error. The queue itself is
//! what the engine's index says; only the waiting times are kept here.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, watch};

use super::context::{Context, count, random, value};
use super::decide::{Setback, pause, setback};
use super::types::Drained;
use super::upload::{Outcome, Uploader};
use super::work::Workers;
use crate::model::{Artifact, ArtifactId};

/// How long an artifact waits for tables of contents, if nothing tells that they were made.
const TABLES: Duration = Duration::from_secs(30);
/// The longest pause while the driver ends.
const WHILE_DRAINING: Duration = Duration::from_secs(1);

/// Uploads everything, one artifact after the other.
#[derive(Debug)]
pub(super) struct Queue {
    context: Arc<Context>,
    pub(super) uploader: Arc<Uploader>,
    workers: Workers,
    draining: AtomicBool,
    /// The queue is to be looked at.
    look: Notify,
    /// How often the queue was looked at, and whether it can do nothing more at this moment.
    turn: watch::Sender<(u64, bool)>,
}

/// An artifact that is not tried at this moment.
#[derive(Debug)]
struct Waiting {
    failures: u32,
    until: Instant,
    /// Waits for tables of contents only.
    for_tables: bool,
}

/// The memory of the loop.
#[derive(Debug, Default)]
struct Memory {
    waiting: HashMap<ArtifactId, Waiting>,
    /// Failures of the storage in a row.
    failures: u32,
}

/// The next action of the loop after an upload.
enum After {
    /// It goes on.
    Next,
    /// It waits, and then goes on. `stuck`: a person must change something.
    Pause { pause: Duration, stuck: bool },
}

impl Queue {
    pub(super) fn new(context: Arc<Context>) -> Self {
        Self {
            uploader: Arc::new(Uploader::new(Arc::clone(&context))),
            workers: context.workers("shared-upload", 1),
            draining: AtomicBool::new(false),
            look: Notify::new(),
            turn: watch::Sender::new((0, false)),
            context,
        }
    }

    /// Has the queue looked at.
    pub(super) fn look(&self) {
        self.look.notify_one();
    }

    /// Uploads until everything stops.
    pub(super) async fn run(self: Arc<Self>) {
        let mut memory = Memory::default();
        while !self.context.is_stopping() {
            match self.next(&mut memory) {
                Some(artifact) => {
                    let uploader = Arc::clone(&self.uploader);
                    let next = artifact.clone();
                    let call = move || uploader.upload(&next);
                    let outcome = self.workers.run(|| true, call).await;
                    if let After::Pause { pause, stuck } =
                        self.after(&mut memory, &artifact, outcome)
                    {
                        self.turn(stuck);
                        self.pause(pause).await;
                    }
                }
                None => self.idle(&mut memory).await,
            }
        }
    }

    /// The newest artifact that does not wait.
    fn next(&self, memory: &mut Memory) -> Option<Artifact> {
        let to_share = self.context.engine.to_share();
        let ids: Vec<ArtifactId> = to_share.iter().map(|artifact| artifact.id).collect();
        memory.waiting.retain(|id, _| ids.contains(id));
        let now = Instant::now();
        let waits = |artifact: &Artifact| {
            let waiting = memory.waiting.get(&artifact.id);
            waiting.is_some_and(|waiting| waiting.until > now)
        };
        to_share.into_iter().find(|artifact| !waits(artifact))
    }

    fn after(&self, memory: &mut Memory, artifact: &Artifact, outcome: Option<Outcome>) -> After {
        let error = match outcome {
            Some(Outcome::Done) => {
                memory.failures = 0;
                memory.waiting.remove(&artifact.id);
                return After::Next;
            }
            // Not in the queue any more; otherwise a moment later.
            Some(Outcome::Gone) => {
                memory.wait(artifact.id, Duration::from_secs(1), false);
                return After::Next;
            }
            Some(Outcome::NotReady) => {
                memory.wait(artifact.id, TABLES, true);
                return After::Next;
            }
            Some(Outcome::Failed(error)) => error,
            Some(Outcome::Engine(error)) => {
                tracing::warn!(artifact = %artifact.id, %error, "an artifact cannot be uploaded; it is tried again");
                memory.put_off(artifact);
                return After::Next;
            }
            None => {
                memory.put_off(artifact);
                return After::Next;
            }
        };
        let setback = setback(&error);
        if !matches!(setback, Setback::Stopped | Setback::Again) {
            count(&self.context.counters.upload_failures);
        }
        match setback {
            Setback::Again | Setback::Stopped => After::Next,
            Setback::Artifact => {
                tracing::warn!(
                    tenant = %artifact.tenant, reference = %artifact.reference, %error,
                    "an artifact cannot be uploaded; it is tried again"
                );
                memory.put_off(artifact);
                After::Next
            }
            Setback::Storage | Setback::Busy | Setback::Permanent => {
                let pause = pause(setback, memory.failures, random());
                memory.failures += 1;
                let stuck = setback == Setback::Permanent;
                After::Pause { pause, stuck }
            }
        }
    }

    /// Waits until there may be something to do.
    async fn idle(&self, memory: &mut Memory) {
        let tables = memory.waiting.values().any(|waiting| waiting.for_tables);
        self.turn(!tables);
        let until = memory.waiting.values().map(|waiting| waiting.until).min();
        let until = until.unwrap_or_else(|| Instant::now() + TABLES);
        tokio::select! {
            () = self.context.engine.content_changed() => {
                memory.waiting.retain(|_, waiting| !waiting.for_tables);
            }
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

    /// Tells `drain` that everything was tried once more.
    fn turn(&self, nothing_more: bool) {
        self.turn
            .send_modify(|turn| *turn = (turn.0 + 1, nothing_more));
    }

    /// Uploads what waits, at most for so long. Ends earlier if all is uploaded, or the rest cannot
    /// be uploaded at this moment.
    pub(super) async fn drain(&self, within: Duration) -> Drained {
        let before = value(&self.context.counters.uploads);
        let mut turns = self.turn.subscribe();
        let (first, _) = *turns.borrow_and_update();
        self.draining.store(true, Ordering::Relaxed);
        self.look();
        let all = async {
            while !self.context.engine.to_share().is_empty() {
                if turns.changed().await.is_err() {
                    return;
                }
                let (turn, nothing_more) = *turns.borrow_and_update();
                if turn > first && nothing_more {
                    return;
                }
            }
        };
        // The result says how much is left.
        let _in_time = tokio::time::timeout(within, all).await;
        self.draining.store(false, Ordering::Relaxed);
        Drained {
            uploaded: value(&self.context.counters.uploads) - before,
            left: self.context.engine.to_share().len() as u64,
        }
    }
}

impl Memory {
    fn put_off(&mut self, artifact: &Artifact) {
        let failures = self.waiting.get(&artifact.id).map_or(0, |it| it.failures);
        self.wait(
            artifact.id,
            pause(Setback::Artifact, failures, random()),
            false,
        );
        if let Some(waiting) = self.waiting.get_mut(&artifact.id) {
            waiting.failures = failures + 1;
        }
    }

    fn wait(&mut self, id: ArtifactId, pause: Duration, for_tables: bool) {
        let until = Instant::now() + pause;
        let waiting = self.waiting.entry(id).or_insert(Waiting {
            failures: 0,
            until,
            for_tables,
        });
        waiting.until = until;
        waiting.for_tables = for_tables;
    }
}
