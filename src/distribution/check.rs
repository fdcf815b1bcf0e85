//! Checks that the tier still has the outputs and resource caches that this node uploaded or
//! fetched. Their pods do not ask the tier, so no question tells this node of a loss or of a clear.
//! A task cache needs no check: its next pod asks.

use std::sync::Arc;
use std::time::Duration;

use super::ask::{Asker, Detail};
use super::context::{Context, random};
use super::decide::{Here, Step, check};
use super::queue::Queue;
use super::work::Workers;
use crate::engine::ArtifactRow;
use crate::model::{Name, Reference};
use crate::shared::now;

/// In how many parts an interval is split: an empty node looks for content after one part.
const PARTS: u32 = 24;

/// Checks each name once in an interval.
#[derive(Debug)]
pub(super) struct Checker {
    context: Arc<Context>,
    asker: Arc<Asker>,
    queue: Arc<Queue>,
    workers: Workers,
}

/// The name of content that the tier had, and that no pod of this node asks about.
fn unasked(row: ArtifactRow) -> Option<Name> {
    let reference = row.name?;
    let is_asked = matches!(reference, Reference::TaskCache(_));
    // Its name in the tier expires for the same reason.
    let is_over = row.expires.is_some_and(|expires| expires <= now());
    let is_there = row.sharing.number.is_some();
    (is_there && !is_asked && !is_over).then_some(Name {
        tenant: row.tenant,
        reference,
    })
}

impl Checker {
    pub(super) fn new(context: Arc<Context>, asker: Arc<Asker>, queue: Arc<Queue>) -> Self {
        Self {
            workers: context.workers("shared-check", 1),
            context,
            asker,
            queue,
        }
    }

    /// Checks until everything stops.
    pub(super) async fn run(self) {
        let stop = self.context.stop.clone();
        // Content may have expired, or moved on, since the last round.
        let rounds = async {
            loop {
                self.round().await;
            }
        };
        stop.run_until_cancelled(rounds).await;
    }

    /// Checks all names, spread over the interval.
    async fn round(&self) {
        let every = self.context.settings.check_every;
        let engine = self.context.engine.clone();
        let look = move || engine.artifacts(None).into_iter().filter_map(unasked);
        let names = self.workers.run(|| true, move || look().collect()).await;
        let mut names: Vec<Name> = names.unwrap_or_default();
        let Ok(count @ 1..) = u32::try_from(names.len()) else {
            return tokio::time::sleep(every / PARTS).await;
        };
        let pause = every / count;
        // Nodes that started together do not ask together, and a node that restarts often does
        // not check the same names each time.
        let chance = random();
        let mut wait = first_pause(pause, chance);
        let first = usize::try_from(chance).unwrap_or_default() % names.len();
        names.rotate_left(first);
        for name in names {
            tokio::time::sleep(wait).await;
            self.check(&name).await;
            wait = pause;
        }
    }

    async fn check(&self, name: &Name) {
        let local = self.context.engine.local(&name.tenant, &name.reference);
        let Some(here) = local.as_ref().map(Here::of) else {
            return;
        };
        let detail = Detail::Manifest(Some(here.artifact));
        let answer = self.asker.ask(name, detail).await;
        let covering = self.context.engine.covering(name);
        let decision = check(&here, here.of_tier(answer.there(), covering));
        // The record of a clear is deleted some day. Then the content here would look lost.
        if let Err(error) = self.context.discard(name, decision).await {
            tracing::warn!(tenant = %name.tenant, reference = %name.reference, %error,
                "the name was cleared in the shared tier; this node's content keeps it for now");
        }
        if decision.step == Step::UseAndShare {
            self.queue.share_again(name, here.artifact).await;
        }
    }
}

/// The pause before the first check: one part of the pause, or more.
fn first_pause(pause: Duration, chance: u64) -> Duration {
    let parts = chance % u64::from(PARTS) + 1;
    pause / PARTS * u32::try_from(parts).unwrap_or(PARTS)
}
