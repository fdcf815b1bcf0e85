//! Fetches: content of the tier or of peers becomes an artifact of this node. One fetch of an
//! artifact at a time. It goes on when its callers give up, until another pod needs its place. It
//! ends with the distribution or for lack of space.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::ask::{Answer, Asker, Detail};
use super::context::{Context, value};
use super::decide::{self, Here, Progress, There, has_stalled, is_replaced};
use super::flight::{Callers, Flights};
use super::health::Access;
use super::offered::Offered;
use super::peers::Patience as Asking;
use super::places::PlacesOfEach;
use super::resume::{Readers, UNAWAITED, of_peers};
use super::roster::Reader;
use super::search::{AGAIN, search};
use super::turns::{Place, Turns};
use super::types::Moving;
use super::work::{Free, Workers};
use crate::archive;
use crate::archive::toc::{Patience, Table};
use crate::engine::{self, LayerPlace, ReceiveError, ReceiveLayer, ReceiveRequest};
use crate::model::{ArtifactId, Name, Tenant, Timestamp, readable_bytes};
use crate::shared::{
    Destination, Error, Fetched as FetchedLayer, LayerRef, NameState, Result, Source, content_of,
    fetch, fresh_id, now, report_damage,
};

/// How many artifacts are fetched at once, and how many of them for the pods of one namespace: with
/// large inputs it would keep the content of all others from this node for hours.
const AT_ONCE: usize = OF_ONE + 1;
const OF_ONE: usize = 4;
/// How often a layer whose transfer failed is taken up where it ended, and the first pause.
const RETRIES: u32 = 5;
pub(super) const PAUSE: Duration = Duration::from_millis(500);
/// How often a name is resolved again because a layer vanished in the middle.
const RESOLVES: u32 = 3;
/// How long a pod waits for a place before a fetch without a pod ends for it. The other fetch has
/// begun by the end of this time, so no second one ends for the same pod.
const TURN: Duration = Duration::from_secs(10);
/// How long a record of the format and its frame may take.
const PATIENCE: Patience = Patience(Duration::from_secs(120));

/// The result of a fetch: an error in words.
pub(super) type Fetched = std::result::Result<(), Arc<str>>;

/// Fetches artifacts.
#[derive(Debug)]
pub(super) struct Fetcher {
    context: Arc<Context>,
    asker: Arc<Asker>,
    workers: Workers,
    of_one: PlacesOfEach<Tenant>,
    flights: Flights<ArtifactId, Fetched>,
    /// The pods that wait for fetches.
    readers: Readers,
    /// The fetches that wait for a place.
    turns: Turns<Fetched>,
    /// When a fetch last gave its place to another one.
    gave_way: Mutex<Option<Instant>>,
    /// For `status`.
    running: Mutex<HashMap<ArtifactId, Arc<Running>>>,
}

/// A fetch that runs.
#[derive(Debug)]
struct Running {
    name: Name,
    /// The namespace whose place it has: that of its first pod.
    tenant: Tenant,
    /// Its place among the fetches that run. Another one has it during pauses.
    thread: Free,
    callers: Callers<ArtifactId, Fetched>,
    /// When [`Fetcher::gives_way`] first saw that no pod waits for it, since one did.
    unawaited: Mutex<Option<Instant>>,
    since: Timestamp,
    of: AtomicU64,
    bytes: AtomicU64,
    /// Bytes that came, of tables and of packed content.
    moved: AtomicU64,
    /// From where, as a message says it.
    from: Mutex<String>,
}

impl Running {
    /// Shows what is fetched.
    fn shows(&self, found: &Offered) {
        let of = content_of(&found.manifest.layers);
        self.of.store(of, Ordering::Relaxed);
        *self.from.lock() = found.from();
    }

    fn progress(&self) -> Progress {
        Progress {
            moved: value(&self.moved),
            bytes: value(&self.bytes),
            of: value(&self.of),
        }
    }
}

/// Removes a fetch from the running ones.
struct Ends<'a>(&'a Fetcher, ArtifactId, Arc<Running>);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        let mut running = self.0.running.lock();
        // After a fetch that gave way, another one of the artifact may have begun.
        let own = running.get(&self.1);
        if own.is_some_and(|own| Arc::ptr_eq(own, &self.2)) {
            running.remove(&self.1);
        }
    }
}

type Failure = ReceiveError<Error>;

/// Asks the sources, one after the other, for the missing part of a layer. `replaces_slow`: goes on
/// to the next source when one is slow, not only when one fails.
pub(super) fn try_layer(
    context: &Context,
    sources: &[&dyn Source],
    (tenant, layer): (&Tenant, &LayerRef),
    place: &LayerPlace<'_>,
    moved: &AtomicU64,
    replaces_slow: bool,
) -> Result<FetchedLayer> {
    let destination = Destination {
        into: place.into,
        temporary: place.temporary,
        limits: place.limits,
        devices: false,
        patience: PATIENCE,
        progress: place.progress,
        moved,
        replaces_slow,
    };
    let stop = || context.is_stopping() || (place.stop)();
    let fetched = fetch(sources, tenant, layer, destination, &stop);
    if matches!(fetched, Err(Error::Layer(_) | Error::System(_))) {
        // Not what a source sent was at fault, but the disk here or the layer that was made.
        place.is_spoilt.set(true);
    }
    fetched
}

impl Fetcher {
    pub(super) fn new(context: Arc<Context>, asker: Arc<Asker>) -> Self {
        Self {
            workers: context.workers("shared-fetch", AT_ONCE),
            of_one: PlacesOfEach::new(OF_ONE),
            flights: context.flights(),
            readers: Readers::default(),
            turns: Turns::new(),
            gave_way: Mutex::default(),
            running: Mutex::default(),
            asker,
            context,
        }
    }

    /// Fetches what a name shows, for a pod. The caller limits how long it waits. A pod that can
    /// start without it (`is_needed` is false) waits no longer when no node has the rest; the fetch
    /// goes on.
    pub(super) async fn fetch(
        self: &Arc<Self>,
        name: &Name,
        found: &Arc<Offered>,
        reader: Reader,
        is_needed: bool,
    ) -> Fetched {
        let artifact = found.manifest.artifact;
        let tenant = reader.tenant.clone();
        let waits = self.readers.wait(name, artifact, reader);
        let fetched = self.flights.join(artifact, |callers| {
            let (fetcher, name, found) = (Arc::clone(self), name.clone(), Arc::clone(found));
            async move {
                let turn = fetcher.turns.wait(&callers, &tenant, Place::OfNamespace);
                let own = fetcher.of_one.take(&tenant).await;
                drop(turn);
                let turn = fetcher.turns.wait(&callers, &tenant, Place::Thread);
                let free = fetcher.workers.free().await;
                drop(turn);
                // One that was given up before it began is not begun.
                let free = free.filter(|_| !callers.give_up());
                let abandoned = || Err("the fetch was abandoned".into());
                let Some(free) = free else { return abandoned() };
                // The caller may have asked just before an earlier fetch ended.
                if fetcher.is_here(&name, artifact) {
                    return Ok(());
                }
                let (this, thread) = (Arc::clone(&fetcher), free.clone());
                let call = move || {
                    let _own = own;
                    this.fetch_now(&name, tenant, found, thread, callers)
                };
                let result = fetcher.workers.run_on(free, call).await;
                result.unwrap_or_else(abandoned)
            }
        });
        tokio::select! {
            biased;
            // The fetch goes on until the content is durable.
            () = self.context.engine.shows(name, artifact) => Ok(()),
            fetched = fetched.answer() => {
                fetched.unwrap_or_else(|| Err("the fetch ended in a panic".into()))
            }
            () = waits.gone(), if !is_needed => {
                let far = self.progress(artifact).unwrap_or_default();
                Err(format!("no node that has the rest answers any more; {far}").into())
            }
        }
    }

    /// Whether the name shows this artifact on this node.
    fn is_here(&self, name: &Name, artifact: ArtifactId) -> bool {
        let local = self.context.engine.local(&name.tenant, &name.reference);
        local.is_some_and(|local| local.id == artifact)
    }

    /// The fetches that run.
    pub(super) fn running(&self) -> Vec<Moving> {
        let running = self.running.lock();
        let mut moving: Vec<Moving> = running
            .values()
            .map(|running| Moving {
                tenant: running.name.tenant.clone(),
                reference: running.name.reference.clone(),
                bytes: value(&running.bytes),
                of: value(&running.of),
                from: Some(running.from.lock().clone()),
                since: running.since,
            })
            .collect();
        moving.sort_by_key(|moving| moving.since);
        moving
    }

    /// Waits until the fetch of an artifact brought no byte for this time, and lacks some.
    pub(super) async fn stalls(&self, artifact: ArtifactId, limit: Duration) {
        let progress = || {
            let running = self.running.lock();
            running.get(&artifact).map(|it| it.progress())
        };
        loop {
            let before = progress();
            tokio::time::sleep(limit).await;
            if has_stalled(before, progress()) {
                return;
            }
        }
    }

    /// How far the fetch of an artifact is, in words.
    pub(super) fn progress(&self, artifact: ArtifactId) -> Option<String> {
        let running = self.running.lock().get(&artifact).cloned()?;
        let (bytes, of) = (value(&running.bytes), value(&running.of));
        Some(format!(
            "{} of {} came from {} so far",
            readable_bytes(bytes),
            readable_bytes(of),
            running.from.lock()
        ))
    }

    fn fetch_now(
        &self,
        name: &Name,
        tenant: Tenant,
        mut found: Arc<Offered>,
        thread: Free,
        callers: Callers<ArtifactId, Fetched>,
    ) -> Fetched {
        let artifact = found.manifest.artifact;
        let running = Arc::new(Running {
            name: name.clone(),
            tenant,
            thread,
            callers,
            unawaited: Mutex::default(),
            since: now(),
            of: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            moved: AtomicU64::new(0),
            from: Mutex::default(),
        });
        running.shows(&found);
        self.running.lock().insert(artifact, Arc::clone(&running));
        let _ends = Ends(self, artifact, Arc::clone(&running));
        let mut left = RESOLVES;
        let failure = loop {
            match self.receive(name, &found, &running) {
                Ok(()) => return Ok(()),
                Err(failure) => {
                    left -= 1;
                    match self.again(name, &found, &failure).filter(|_| left > 0) {
                        Some(newer) => {
                            found = newer;
                            running.shows(&found);
                        }
                        None => break failure,
                    }
                }
            }
        };
        self.failed(name, &found, &failure);
        Err(failure.to_string().into())
    }

    /// The same artifact as it can be had now, if a layer is nowhere any more: it was published
    /// again, or the peers that are left have merged its layers.
    fn again(&self, name: &Name, found: &Offered, failure: &Failure) -> Option<Arc<Offered>> {
        let ReceiveError::Layer {
            source: Error::Missing { .. },
            ..
        } = failure
        else {
            return None;
        };
        let (context, asker, artifact) = (&self.context, &self.asker, found.manifest.artifact);
        let answer = if found.is_only_in_tier() {
            asker.ask_now(name, Detail::Manifest(None))
        } else {
            let reader = self.readers.of(name, artifact).into_iter().next()?;
            context.block_on(async {
                let until = tokio::time::Instant::now() + context.settings.ask.min(AGAIN);
                let search = search(context, asker, name, &reader, None, until, Asking::Now);
                search.await.answer
            })
        };
        let Answer::Content { found: newer, .. } = answer else {
            return None;
        };
        let is_same_publication =
            |newer: &Offered| newer.is_only_in_tier() && newer.record.write == found.record.write;
        // Another artifact has a flight of its own.
        newer.filter(|newer| newer.manifest.artifact == artifact && !is_same_publication(newer))
    }

    /// One attempt to receive all layers that this node lacks.
    fn receive(&self, name: &Name, found: &Offered, running: &Running) -> Result<(), Failure> {
        let (context, manifest) = (&self.context, &found.manifest);
        // The tier has numbered the content, so the clocks do not decide what it replaces. Content
        // that only peers have keeps its time, so that all nodes agree which is newest.
        let created = if let Some(number) = found.sharing.number {
            let there = There::Content {
                number,
                cleared: found.record.cleared,
                artifact: manifest.artifact,
            };
            let local = context.engine.local(&name.tenant, &name.reference);
            let here = local.map(|local| {
                let here = Here::of(&local);
                let there = here.of_tier(there, context.engine.covering(name));
                (local.created, is_replaced(&here, there))
            });
            let now = context.engine.now();
            decide::created(&name.reference, manifest.made, here, now)
        } else {
            manifest.made
        };
        let ttl = match found.record.state {
            NameState::Content { ttl_seconds, .. } => ttl_seconds.map(Duration::from_secs),
            NameState::Cleared | NameState::Expired => None,
        };
        let request = ReceiveRequest {
            name: name.clone(),
            artifact: manifest.artifact,
            created,
            made_by: manifest.made_by.clone().map(Box::new),
            ttl,
            sharing: found.sharing,
            fence: manifest.fence,
            layers: manifest
                .layers
                .iter()
                .map(|layer| ReceiveLayer {
                    digest: layer.digest,
                    bytes: layer.space(),
                })
                .collect(),
        };
        running.bytes.store(0, Ordering::Relaxed);
        let mut sources = found.sources(Vec::new(), context.asked_tier());
        let mut is_first = true;
        let make = |index: usize, place: &LayerPlace<'_>| {
            if std::mem::take(&mut is_first) {
                // The older layers are on this node.
                let missing = content_of(&manifest.layers[..=index]);
                // What an earlier fetch brought counts as if it came now.
                let missing = missing.saturating_add(value(&running.bytes));
                let of = value(&running.of).min(missing);
                running.of.store(of, Ordering::Relaxed);
            }
            self.layer((name, found, index), &mut sources, place, running)
        };
        let may_enter = || match context.cleared(name) {
            // `destroy` came between the answer and now.
            Some(cleared) if request.sharing.is_older_than_clear(cleared) => {
                Err(engine::Error::Cleared(name.clone()))
            }
            _ => Ok(()),
        };
        let engine = &context.engine;
        let received = engine.receive(&request, &running.bytes, make, may_enter)?;
        let bytes = value(&running.bytes).saturating_sub(received.kept);
        let mut counters = context.counters.lock();
        let counted = counters.fetches.of(&name.reference, found.source());
        counted.artifacts += 1;
        counted.bytes += bytes;
        drop(counters);
        tracing::info!(
            tenant = %name.tenant, reference = %name.reference, artifact = %received.artifact,
            number = request.sharing.number, bytes, reused = received.reused,
            named = received.named, "fetched from {}", found.from()
        );
        Ok(())
    }

    fn layer(
        &self,
        (name, found, index): (&Name, &Offered, usize),
        sources: &mut Vec<Arc<dyn Source>>,
        place: &LayerPlace<'_>,
        running: &Running,
    ) -> Result<Arc<Table>> {
        let Self {
            context, readers, ..
        } = self;
        let (layer, moved) = (&found.manifest.layers[index], &running.moved);
        let gives_way = Cell::new(false);
        let stop = || {
            gives_way.set(gives_way.get() || self.gives_way(running));
            gives_way.get() || (place.stop)()
        };
        let place = &LayerPlace {
            stop: &stop,
            ..*place
        };
        if found.is_only_in_tier() {
            return self.of_tier((&name.tenant, layer), sources, place, moved);
        }
        let pause = |pause: Duration| {
            let pause = context.pause(pause);
            // Another fetch may have its place after the pause.
            let turns = &self.turns;
            let _turn = turns.wait(&running.callers, &running.tenant, Place::Thread);
            context.block_on(self.workers.give_way(&running.thread, pause))
        };
        let wanted = (name, found, layer);
        of_peers(context, readers, wanted, sources, place, moved, &pause)
    }

    /// Whether a fetch ends because a pod waits for its place and none for its content. What came
    /// stays for the next fetch. One fetch ends at a time: then the other one gets its place.
    fn gives_way(&self, fetch: &Running) -> bool {
        let mut unawaited = fetch.unawaited.lock();
        if !fetch.callers.are_gone() {
            *unawaited = None;
            return false;
        }
        let since = *unawaited.get_or_insert_with(Instant::now);
        if since.elapsed() < UNAWAITED || !self.turns.need(&fetch.tenant, TURN) {
            return false;
        }
        let mut last = self.gave_way.lock();
        if last.is_some_and(|last| last.elapsed() < TURN) || !fetch.callers.give_up() {
            return false;
        }
        *last = Some(Instant::now());
        tracing::info!(
            tenant = %fetch.name.tenant, reference = %fetch.name.reference,
            "no pod waits for this content any more; its fetch ends, so that another one can begin"
        );
        true
    }

    /// Fetches a layer of the tier. A transfer that fails is taken up where it ended, unless the
    /// tier hangs.
    fn of_tier(
        &self,
        wanted: (&Tenant, &LayerRef),
        sources: &[Arc<dyn Source>],
        place: &LayerPlace<'_>,
        moved: &AtomicU64,
    ) -> Result<Arc<Table>> {
        let context = &self.context;
        let sources: Vec<&dyn Source> = sources.iter().map(|source| &**source).collect();
        let stop = || context.is_stopping() || (place.stop)();
        let mut pause = PAUSE;
        let mut left = RETRIES;
        loop {
            let fetched = try_layer(context, &sources, wanted, place, moved, false);
            context.health.note(wanted.0, Access::Read, &fetched);
            match fetched {
                Ok(fetched) => return Ok(fetched.table),
                // It was tried twice. This fetch has a place that others of its namespace wait for.
                Err(error @ Error::Stalled { .. }) => return Err(error),
                Err(error) if error.is_temporary() && left > 0 && !stop() => {
                    left -= 1;
                    tracing::debug!(%error, ?pause, "resuming a fetch after a pause");
                    if !context.sleep(pause) {
                        return Err(Error::Stopped);
                    }
                    pause *= 2;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Notes why a fetch failed, and tells the other nodes of damage.
    fn failed(&self, name: &Name, found: &Offered, failure: &Failure) {
        let context = &self.context;
        let mut counters = context.counters.lock();
        let counted = counters.fetches.of(&name.reference, found.source());
        counted.failures += 1;
        drop(counters);
        tracing::warn!(
            tenant = %name.tenant, reference = %name.reference, number = found.record.number,
            error = %failure, "content was not fetched from {}", found.from()
        );
        // A peer was told by its source.
        if !found.is_only_in_tier() {
            return;
        }
        let (layer, source) = match failure {
            ReceiveError::Layer { layer, source } => (layer, source),
            // A wrong manifest stays wrong: the name gets another one with its next commit.
            ReceiveError::Taken(_)
            | ReceiveError::Engine(engine::Error::Archive {
                source: archive::Error::Limit { .. } | archive::Error::Malformed { .. },
                ..
            }) => {
                self.asker.refuse(found.record.write);
                return;
            }
            ReceiveError::Engine(_) => return,
        };
        let lasts = !matches!(
            source,
            Error::Permanent { .. } | Error::Newer { .. } | Error::Missing { .. }
        );
        if source.is_of_the_source() && !source.is_temporary() && lasts {
            self.asker.refuse(found.record.write);
        }
        let Some(layer) = found.manifest.layers.get(*layer) else {
            return;
        };
        // The name still shows an object that is missing: `again` found no newer publication.
        if !matches!(source, Error::Corrupt { .. } | Error::Missing { .. }) {
            return;
        }
        let reported = report_damage(context.store(), &found.record, layer, fresh_id(), now());
        context.health.note(&name.tenant, Access::Write, &reported);
        match reported {
            Ok(true) => context.counters.lock().damage_reported += 1,
            // The name has other content by now; its earlier content may have been collected.
            Ok(false) => {}
            Err(error) => tracing::warn!(
                digest = %layer.digest, %error,
                "damage in the shared tier could not be reported to the other nodes"
            ),
        }
    }
}
