//! Two nodes that share content, killed at random: by a shared tier whose collector of garbage runs
//! with a short grace, as peers, or both. What a node mounts is what a step committed under that
//! name, bit for bit, and never from before a clear that was answered. At the end a node that has
//! nothing reads every name.

use std::fmt;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use baggageclaim::kubelet_double::{Pod, PublishOptions};
use baggageclaim::proto::admin::v1 as api;
use baggageclaim::shared::{Collector, Error, ObjectId, Store, Times, Url, verify};
use baggageclaim::sys::Dir;
use tempfile::TempDir;
use tokio::runtime::Handle;
use tonic::Code;

use crate::caller::{again_at, cannot};
use crate::common::Fs;
use crate::common::peer_keys::PeerKeys;
use crate::common::random::Random;
use crate::content;
use crate::driver::{Ground, PATIENCE, Place, Wire, entries, nothing_left};
use crate::figures::{Fault, Figures, Stop, add, count};
use crate::kills::Life;
use crate::tier_model::{KEYS, Model, NODES, Since, Written};

const GROUNDS: [Ground; 3] = [
    Ground::new("overlay", Fs::Ext4, 512),
    Ground::new("btrfs", Fs::Btrfs, 512),
    Ground::new("copy", Fs::XfsReflink, 512),
];
const FRESH: &str = "torture-three";
const WORKERS: usize = 2;
const LIVES: usize = 10;
/// Short enough that objects are deleted in an episode. It is more than both halves of a
/// publication may take (`PUBLISH_WITHIN`), as for the real collector.
const GRACE: Duration = Duration::from_secs(6);
const PUBLISH_WITHIN: &str = "--publish-within=2s";
const TENANT: &str = "ci";
const VOLUME: &str = "v";

/// A step that has not ended.
struct Running {
    pod: Pod,
    key: usize,
    writes: bool,
    /// The serial that its success promises.
    promises: Option<u64>,
}

/// One source of calls at a node: a step at a time.
struct Worker {
    node: usize,
    index: usize,
    /// A clear reaches the other node: by the tier.
    clears: bool,
    random: Random,
    running: Option<Running>,
}

impl Worker {
    async fn work(&mut self, model: &Model, wire: &Wire, place: &Place) -> Result<(), Stop> {
        loop {
            self.end(model, wire).await?;
            let key = usize::try_from(self.random.below(KEYS.len() as u64)).expect("small");
            let line = match self.random.below(100) {
                0..=54 => self.step(model, wire, key, true).await?,
                55..=87 => self.step(model, wire, key, false).await?,
                88..=93 if self.clears && KEYS[key].is_cleared => {
                    self.clear(model, wire, key).await?
                }
                _ => {
                    let promised = model.promised(self.node);
                    wire.settle().await?;
                    model.settled(self.node, &promised);
                    continue;
                }
            };
            place.note(&line);
        }
    }

    /// Publishes, checks, and perhaps writes; `end` does the rest.
    async fn step(
        &mut self,
        model: &Model,
        wire: &Wire,
        key: usize,
        writes: bool,
    ) -> Result<String, Stop> {
        {
            let mut known = model.keys[key].lock();
            // Commits of one node to one name have an order.
            if writes && known.running[self.node] > 0 {
                return Ok("another step commits to it".to_owned());
            }
            known.running[self.node] += u32::from(writes);
        }
        let since = model.since(self.node, key);
        let uid = format!("{}-{}-{}", self.node, self.index, model.serial());
        let pod = wire.kubelet.pod_with_uid(TENANT, &uid, &uid);
        self.running = Some(Running {
            pod: pod.clone(),
            key,
            writes,
            promises: None,
        });
        let reference = KEYS[key].reference();
        let Some(shown) = publish(wire, &pod, model, (key, writes, &since)).await? else {
            return Ok(format!("{uid}: {reference} is not there"));
        };
        // The fork may have begun after a clear that began during the call.
        let epoch = model.keys[key].lock().clears;
        let tag = shown.as_ref().map(|written| written.serial);
        // A resource cache that was found is complete.
        if !writes || (!KEYS[key].last_wins() && shown.is_some()) {
            return Ok(format!("{uid}: {reference} shows {tag:?}"));
        }
        let serial = model.serial();
        let newest = format!("{uid}-{serial}");
        let target = pod.target(VOLUME);
        let written = content::change(&target, self.random.next(), &newest).and_then(|()| {
            // A layer that is worth a question whether the tier has it.
            let is_large = self.random.percent(10);
            let bytes = newest.repeat((1 << 20) / newest.len() + 1);
            if is_large {
                fs::write(target.join("large"), bytes)
            } else {
                Ok(())
            }
        });
        written.map_err(cannot("write into a volume"))?;
        let written = Written {
            node: self.node,
            serial,
            epoch: shown.map_or(epoch, |parent| parent.epoch.min(epoch)),
            snapshot: Arc::new(content::read(&target)?),
        };
        // From here on other nodes may see it.
        model.keys[key].lock().written.insert(newest, written);
        if let Some(running) = &mut self.running {
            running.promises = Some(serial);
        }
        Ok(format!("{uid}: {reference} shows {tag:?}, gets {serial}"))
    }

    /// Ends the step: its pod ends, and its volume is unpublished.
    async fn end(&mut self, model: &Model, wire: &Wire) -> Result<(), Stop> {
        let Some(running) = &self.running else {
            return Ok(());
        };
        let pod = again_at(wire, &running.pod);
        wire.outcome(pod.uid(), running.promises.is_some()).await?;
        let answer = pod.unpublish(VOLUME).await;
        wire.must(&format!("unpublish {}", pod.uid()), answer)?;
        pod.remove().map_err(cannot("remove a pod"))?;
        if let Some(running) = self.running.take() {
            let mut known = model.keys[running.key].lock();
            known.running[self.node] -= u32::from(running.writes);
            if let Some(serial) = running.promises {
                known.promised[self.node] = serial;
            }
        }
        Ok(())
    }

    /// Clears a name, if no step of this node commits to it: such a step may end later.
    async fn clear(&mut self, model: &Model, wire: &Wire, key: usize) -> Result<String, Stop> {
        let reference = KEYS[key].reference();
        let epoch = {
            let mut known = model.keys[key].lock();
            if known.running[self.node] > 0 {
                return Ok("a step commits to it".to_owned());
            }
            // No step begins meanwhile.
            known.running[self.node] += 1;
            known.clears += 1;
            known.clears
        };
        let cleared = self.destroy(wire, &reference).await;
        let mut known = model.keys[key].lock();
        known.running[self.node] -= 1;
        if let Ok(true) = cleared {
            known.cleared[self.node] = epoch;
        }
        cleared.map(|done| format!("{reference} is cleared: {done}, epoch {epoch}"))
    }

    async fn destroy(&self, wire: &Wire, reference: &str) -> Result<bool, Stop> {
        // Content that is being sealed would come after the clear.
        wire.settle().await?;
        let request = api::DestroyRequest {
            tenant: TENANT.to_owned(),
            reference: reference.to_owned(),
        };
        let answer = wire.admin.clone().destroy(request).await;
        let excused = [Code::NotFound, Code::FailedPrecondition];
        let answer = wire.answered(&format!("destroy {reference}"), answer, &excused)?;
        Ok(answer.is_ok())
    }
}

/// Publishes and checks what is shown. `None`: an input is not there.
async fn publish(
    wire: &Wire,
    pod: &Pod,
    model: &Model,
    (key, writes, since): (usize, bool, &Since),
) -> Result<Option<Option<Written>>, Stop> {
    let attributes = KEYS[key].attributes(writes);
    let is_input = attributes.contains(&("type", "input".to_owned()));
    let answer = pod
        .publish(VOLUME, attributes, PublishOptions::default())
        .await;
    let operation = format!("publish {} for {}", KEYS[key].reference(), pod.uid());
    let excused: &[Code] = if is_input {
        &[Code::Aborted, Code::NotFound]
    } else {
        &[]
    };
    if wire.answered(&operation, answer, excused)?.is_err() {
        if since.must_be {
            return Err(Fault::lost(format!("{operation}: it is not there; {since:?}")).into());
        }
        return Ok(None);
    }
    let target = pod.target(VOLUME);
    let found = content::read(&target)?;
    // An output begins empty.
    if KEYS[key].kind == "artifact" && !is_input {
        if !found.is_empty() {
            return Err(Fault::wrong(format!("{operation}: an output is not empty")).into());
        }
        return Ok(Some(None));
    }
    let newest = fs::read_to_string(target.join("newest")).ok();
    let shown = model.look(key, &found, newest.as_deref(), since);
    Ok(Some(shown.map_err(|fault| fault.at(operation))?))
}

/// The collector, again and again. It counts what it deleted.
fn collect(
    store: &Store,
    until: &AtomicBool,
    deleted: &AtomicU64,
    figures: &Figures,
) -> Result<(), Fault> {
    let tenant = TENANT.parse().expect("a label");
    let mut id = 0;
    while !until.load(Ordering::Relaxed) {
        id += 1;
        let collector = Collector {
            store,
            tenant: &tenant,
            dry_run: false,
            id: ObjectId::from_bits(id),
            grace: GRACE,
            budget: None,
            fences: baggageclaim::model::Fences::default(),
            uses: baggageclaim::shared::Uses::default(),
            progress: &|_| {},
        };
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let now = u64::try_from(since.unwrap_or_default().as_millis()).unwrap_or(u64::MAX);
        let stop = || until.load(Ordering::Relaxed);
        match collector.run(baggageclaim::model::Timestamp(now), &stop) {
            Ok(done) if done.unreadable + done.unknown > 0 => {
                return Err(Fault::wrong(format!("the collector finds {done:?}")));
            }
            Ok(done) => {
                deleted.fetch_add(done.deleted, Ordering::Relaxed);
                add(&figures.collected, done.deleted);
            }
            Err(Error::Stopped) => {}
            Err(error) => return Err(Fault::wrong(format!("the collector: {error}"))),
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}

/// One node: its place, and its workers.
struct Node {
    index: usize,
    place: Place,
    random: Random,
    workers: Vec<Worker>,
}

impl Node {
    /// Driver after driver, until the collector, if there is one, has deleted something meanwhile.
    fn live(
        &mut self,
        model: &Model,
        (until, deleted): (Instant, Option<&AtomicU64>),
        on: &Handle,
    ) -> Result<(), Fault> {
        let began = Instant::now();
        for lives in 0.. {
            let is_over = lives >= LIVES || (Instant::now() > until && lives > 2);
            if is_over && deleted.is_none_or(|deleted| deleted.load(Ordering::Relaxed) > 0) {
                break;
            }
            if is_over && began.elapsed() > PATIENCE {
                let what = "the collector of the tier deletes nothing";
                return Err(Fault::leaked(what.to_owned()));
            }
            let life = Life::of_tier(&mut self.random);
            self.place.note(&format!("{life:?}"));
            let life_of = self.one_life(&life, model, on);
            life_of.map_err(|fault| fault.at(format!("{}, {life:?}", NODES[self.index])))?;
        }
        Ok(())
    }

    fn one_life(&mut self, life: &Life, model: &Model, on: &Handle) -> Result<(), Fault> {
        let mut driver = self.place.start(life.armed().as_deref());
        let wire = match on.block_on(driver.connect()) {
            Ok(wire) => wire,
            Err(Stop::Fault(fault)) => return Err(fault),
            Err(Stop::Died) => {
                count(&self.place.figures.kills);
                return Ok(());
            }
        };
        let (place, workers) = (&self.place, &mut self.workers);
        let work = |worker: &mut Worker| on.block_on(worker.work(model, &wire, place));
        let work = &work;
        let ends = std::thread::scope(|scope| {
            let all = workers.iter_mut();
            let all: Vec<_> = all.map(|it| scope.spawn(move || work(it))).collect();
            let idle = || all.iter().all(std::thread::ScopedJoinHandle::is_finished);
            let ended = life.end(&mut driver, &idle);
            let ends = all.into_iter().map(std::thread::ScopedJoinHandle::join);
            let ends = ends.map(|end| end.unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
            ends.chain([ended]).collect::<Vec<_>>()
        });
        let in_order = matches!(life, Life::Stopped(_));
        for end in ends {
            match end {
                // An answer of a driver that is stopping does not count.
                Err(Stop::Fault(fault)) if !(in_order && fault.what.contains("shutting down")) => {
                    return Err(fault);
                }
                _ => {}
            }
        }
        if !in_order {
            count(&self.place.figures.kills);
        }
        Ok(())
    }

    /// Brings everything to its end: no step runs, all is durable and uploaded, and nothing is
    /// being fetched.
    async fn settle(&mut self, model: &Model, wire: &Wire) -> Result<(), Stop> {
        for worker in &mut self.workers {
            worker.end(model, wire).await?;
        }
        let promised = model.promised(self.index);
        wire.settle().await?;
        model.settled(self.index, &promised);
        self.transfers_end(wire).await?;
        wire.check().await
    }

    /// Waits until no transfer runs: a fetch from a peer goes on after its pod has given up.
    async fn transfers_end(&self, wire: &Wire) -> Result<(), Stop> {
        let began = Instant::now();
        loop {
            let answer = wire.admin.clone().status(api::StatusRequest {}).await;
            let status = wire.must("Status", answer)?.into_inner();
            let shared = status.shared.unwrap_or_default();
            let incoming = entries(&self.place.pool.join("incoming"));
            let is_waiting = shared.uploads_waiting > 0 || !shared.fetching.is_empty();
            if !is_waiting && incoming.is_empty() {
                return Ok(());
            }
            if !is_waiting {
                // Partial layers of a failed fetch are kept for the next one.
                wire.reap().await?;
            }
            if began.elapsed() > PATIENCE {
                return Err(if is_waiting {
                    Fault::lost(format!("it is never uploaded: {shared:?}")).into()
                } else {
                    Fault::leaked(format!("incoming: {incoming:?}")).into()
                });
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Looks at every name.
    async fn look(&mut self, model: &Model, wire: &Wire) -> Result<(), Stop> {
        for key in 0..KEYS.len() {
            let worker = &mut self.workers[0];
            worker.step(model, wire, key, false).await?;
            worker.end(model, wire).await?;
        }
        Ok(())
    }

    /// Deletes every name; then nothing is left.
    async fn clear(&mut self, wire: &Wire) -> Result<(), Stop> {
        self.transfers_end(wire).await?;
        for key in &KEYS {
            self.workers[0].destroy(wire, &key.reference()).await?;
        }
        nothing_left(&self.place, wire).await
    }
}

/// The keys of all nodes. Each has a loopback address of its own, so no port is taken by other
/// programs.
fn keys(random: &mut Random) -> PeerKeys {
    let (second, third) = (1 + random.below(254), random.below(255));
    let address = |index| format!("127.{second}.{third}.{}:9810", index + 1);
    let names = NODES.into_iter().chain([FRESH]).enumerate();
    let nodes = names.map(|(index, name)| (name.to_owned(), address(index)));
    PeerKeys::new(
        Path::new(env!("CARGO_BIN_EXE_baggageclaim")),
        nodes.collect(),
    )
}

/// How the nodes of an episode share content: by a tier, as peers, or both.
struct Ties {
    tier: Option<Tier>,
    peers: Option<PeerKeys>,
}

/// A shared tier, as the test itself sees it.
struct Tier {
    _directory: TempDir,
    url: String,
    store: Store,
}

impl Tier {
    fn new(on: &Handle) -> Result<Self, Fault> {
        let wrong = |error: &dyn std::fmt::Display| Fault::wrong(format!("no tier: {error}"));
        let directory = tempfile::tempdir().map_err(|error| wrong(&error))?;
        let url = format!("file://{}", directory.path().display());
        let opened: Url = url.parse().map_err(|error| wrong(&error))?;
        let store = opened.open(on.clone(), Times::default());
        Ok(Self {
            store: store.map_err(|error| wrong(&error))?,
            _directory: directory,
            url,
        })
    }

    /// Everything that a name shows is there and whole.
    fn verify(&self) -> Result<(), Fault> {
        let temporary = Dir::open(&std::env::temp_dir());
        let temporary = temporary.map_err(|error| Fault::wrong(error.to_string()))?;
        let tenant = TENANT.parse().expect("a label");
        let found = verify(&self.store, &tenant, &temporary, &|_| {}, &|| false);
        let found = found.map_err(|error| Fault::wrong(format!("verify: {error}")))?;
        if found.damage.is_empty() {
            return Ok(());
        }
        Err(Fault::lost(format!("verify: {:?}", found.damage)))
    }
}

impl Ties {
    /// What a driver is told, so that it shares content with the others.
    fn arguments(&self, node: &str) -> Vec<String> {
        let tier = self.tier.iter().flat_map(|tier| {
            let shared = format!("--shared={}", tier.url);
            [shared, "--shared-drain=2s".into(), PUBLISH_WITHIN.into()]
        });
        let peers = self.peers.iter().flat_map(|peers| peers.arguments(node));
        tier.chain(peers).collect()
    }

    /// A place on a random ground for a node.
    fn place(
        &self,
        node: &'static str,
        evicting: bool,
        random: &mut Random,
        figures: &Arc<Figures>,
    ) -> Result<Place, Fault> {
        let ground = GROUNDS[*random.pick(&[0, 0, 0, 1, 2])];
        let ties = self.arguments(node);
        let mut arguments: Vec<&str> = ties.iter().map(String::as_str).collect();
        arguments.extend([
            "--threads=2",
            "--input-wait=300ms",
            "--outcome-wait=1h",
            "--reserve=1Mi",
            "--grace=20s",
            "--ask=20s",
            "--fetch-wait=40s",
        ]);
        arguments.extend(if evicting {
            [
                "--high-watermark=1",
                "--low-watermark=0",
                "--reap-interval=1500ms",
            ]
        } else {
            [
                "--high-watermark=99",
                "--low-watermark=98",
                "--reap-interval=200ms",
            ]
        });
        let mut place = Place::new(ground, &arguments, figures)?;
        place.node = node;
        Ok(place)
    }
}

impl fmt::Display for Ties {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match (&self.tier, &self.peers) {
            (Some(_), Some(_)) => "tier and peers",
            (Some(_), None) => "tier",
            _ => "peers",
        })
    }
}

/// Nodes, how they share content, and their model.
struct Episode<'a> {
    ties: Ties,
    model: Model,
    nodes: Vec<Node>,
    random: Random,
    on: &'a Handle,
    figures: &'a Arc<Figures>,
}

impl<'a> Episode<'a> {
    fn new(
        seed: u64,
        has_peers: bool,
        on: &'a Handle,
        figures: &'a Arc<Figures>,
    ) -> Result<Self, Fault> {
        let mut random = Random::new(seed);
        let has_tier = !has_peers || random.percent(50);
        let ties = Ties {
            tier: has_tier.then(|| Tier::new(on)).transpose()?,
            peers: has_peers.then(|| keys(&mut random)),
        };
        // A pool that counts as full makes no tables, so its node uploads nothing.
        let evicting = [false, random.percent(35)];
        let mut nodes = Vec::new();
        for (index, name) in NODES.into_iter().enumerate() {
            let worker = |number| Worker {
                node: index,
                index: number,
                clears: has_tier,
                random: Random::new(seed ^ (index * WORKERS + number + 1) as u64),
                running: None,
            };
            nodes.push(Node {
                index,
                place: ties.place(name, evicting[index], &mut random, figures)?,
                random: random.fork(),
                workers: (0..WORKERS).map(worker).collect(),
            });
        }
        Ok(Self {
            ties,
            model: Model::new(evicting),
            nodes,
            random,
            on,
            figures,
        })
    }

    fn run(&mut self, until: Instant) -> Result<(), Fault> {
        let (over, deleted) = (AtomicBool::new(false), AtomicU64::new(0));
        let (tier, model, on) = (self.ties.tier.as_ref(), &self.model, self.on);
        let (over, deleted, figures) = (&over, &deleted, self.figures);
        let mut ends = std::thread::scope(|scope| {
            let collector =
                tier.map(|tier| scope.spawn(|| collect(&tier.store, over, deleted, figures)));
            let deleted = tier.map(|_| deleted);
            let nodes = self.nodes.iter_mut();
            let nodes: Vec<_> = nodes
                .map(|node| scope.spawn(move || node.live(model, (until, deleted), on)))
                .collect();
            let mut ends: Vec<_> = nodes
                .into_iter()
                .map(std::thread::ScopedJoinHandle::join)
                .collect();
            over.store(true, Ordering::Relaxed);
            ends.extend(collector.map(std::thread::ScopedJoinHandle::join));
            ends
        });
        while let Some(end) = ends.pop() {
            end.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        }
        self.end().map_err(|fault| fault.at("at the end"))
    }

    fn end(&mut self) -> Result<(), Fault> {
        let mut drivers: Vec<_> = self.nodes.iter().map(|it| it.place.start(None)).collect();
        let ended = self.on.block_on(async {
            let mut wires = Vec::new();
            for (driver, node) in drivers.iter_mut().zip(&mut self.nodes) {
                let wire = driver.connect().await?;
                node.settle(&self.model, &wire).await?;
                wires.push(wire);
            }
            Ok(wires)
        });
        let wires = in_words(ended)?;
        if let Some(tier) = &self.ties.tier {
            tier.verify()?;
        }
        self.fresh()?;
        let cleared = self.on.block_on(async {
            for (wire, node) in wires.iter().zip(&mut self.nodes) {
                node.look(&self.model, wire).await?;
            }
            for (wire, node) in wires.iter().zip(&mut self.nodes) {
                node.clear(wire).await?;
            }
            Ok(())
        });
        in_words(cleared)?;
        for (driver, node) in drivers.into_iter().zip(&self.nodes) {
            driver.stop()?;
            node.place.check_offline()?;
            node.place.admits_no_defect()?;
            let said = node.place.said();
            let lines = |of: &str| said.matches(of).count() as u64;
            add(&self.figures.uploads, lines("uploaded to the shared tier"));
            add(&self.figures.fetches, lines("fetched from the shared tier"));
            add(&self.figures.from_peers, lines("fetched from peer"));
        }
        Ok(())
    }

    /// A node that has nothing reads every name.
    fn fresh(&mut self) -> Result<(), Fault> {
        let random = &mut self.random;
        let place = self.ties.place(FRESH, false, random, self.figures)?;
        let mut driver = place.start(None);
        let looked = self.on.block_on(async {
            let wire = driver.connect().await?;
            for (number, key) in KEYS.iter().enumerate() {
                let uid = format!("fresh-{number}");
                let pod = wire.kubelet.pod_with_uid(TENANT, &uid, &uid);
                let since = self.model.since_uploaded(number);
                let shown = publish(&wire, &pod, &self.model, (number, false, &since)).await;
                shown.map_err(|stop| match stop {
                    Stop::Fault(fault) => Stop::Fault(fault.at(key.reference())),
                    Stop::Died => Stop::Died,
                })?;
                wire.outcome(&uid, false).await?;
                let answer = pod.unpublish(VOLUME).await;
                wire.must("unpublish", answer)?;
                pod.remove().map_err(cannot("remove a pod"))?;
            }
            wire.settle().await?;
            wire.check().await
        });
        in_words(looked).map_err(|fault| fault.at("a node that has nothing"))?;
        driver.stop()
    }
}

/// Here no driver may die.
fn in_words<T>(ended: Result<T, Stop>) -> Result<T, Fault> {
    ended.map_err(|stop| match stop {
        Stop::Fault(fault) => fault,
        Stop::Died => Fault::wrong("a driver died of itself"),
    })
}

/// Episode after episode with a shared tier, until it is time.
pub(crate) fn trial(random: Random, until: Instant, on: &Handle, figures: &Arc<Figures>) {
    episodes(random, until, false, on, figures);
}

/// The same of peers, half of them with a shared tier beside.
pub(crate) fn of_peers(random: Random, until: Instant, on: &Handle, figures: &Arc<Figures>) {
    episodes(random, until, true, on, figures);
}

fn episodes(
    mut random: Random,
    until: Instant,
    has_peers: bool,
    on: &Handle,
    figures: &Arc<Figures>,
) {
    let mut is_first = true;
    while (is_first || Instant::now() < until) && figures.faults() < 3 {
        is_first = false;
        let seed = random.next();
        let mut episode = match Episode::new(seed, has_peers, on, figures) {
            Ok(episode) => episode,
            Err(fault) => {
                let ties = if has_peers { "peers" } else { "tier" };
                return figures.note(ties, &fault);
            }
        };
        let ties = episode.ties.to_string();
        let grounds = episode.nodes.iter().map(|node| node.place.ground.name());
        let grounds: Vec<String> = grounds.collect();
        let evicting = if episode.model.evicting[1] {
            " (evicting)"
        } else {
            ""
        };
        crate::say(&format!(
            "{ties}: {}{evicting}, seed {seed}",
            grounds.join(" and ")
        ));
        let Err(fault) = episode.run(until) else {
            let figure = if has_peers {
                &figures.peers
            } else {
                &figures.tiers
            };
            count(figure);
            continue;
        };
        figures.note(format!("{ties}: seed {seed}"), &fault);
        for node in &episode.nodes {
            let name = NODES[node.index];
            let log = std::env::temp_dir().join(format!("torture-tier-{seed}-{name}.log"));
            node.place.keep_log(&log);
            crate::say(&format!("{ties}: the log of {name} is {}", log.display()));
        }
    }
}
