//! The node's side: one stream to the controller. The node reports its names as they change, and
//! now and then what namespaces use. It follows the controller's time, applies its clears and cache
//! policies, and evicts what the controller orders. It gives up outputs that another node made
//! again, and task caches that were rolled back. It carries out rollbacks. It also asks the
//! controller where the content of a name is.
//!
//! Without a controller nothing here fails: the node asks all its peers.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use async_trait::async_trait;
use futures_util::future::{Fuse, FusedFuture as _, FutureExt as _};
use tokio::sync::{mpsc, watch};
use tokio::time::{MissedTickBehavior, interval_at, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Status, Streaming};

use super::limits::USAGE;
use super::limits::{BEAT, MOST_MESSAGE, MOST_TOLD, SENT_ENTRIES};
use super::{find, generations, messages, policies, rollbacks};
use crate::catalog::{NameHash, Version, supersedes};
use crate::distribution::FindDistribution;
use crate::distribution::roster::{Controller, Directory, Located};
use crate::engine::{Engine, NameState, NameWatch};
use crate::link::{Backoff, Key, connect};
use crate::model::{
    CacheKey, ClusterClock, Name, NamespacePolicy, NamespaceUsage, NodeId, Origin, Policies,
    Reference, Tenant, TenantOrigin, Timestamp, Unmeasured,
};
use crate::proto::hub::v1 as wire;
use wire::from_node::Kind as From;
use wire::hub_client::HubClient;
use wire::to_node::Kind as To;

/// How long the controller may take for its part of the beginning.
const ANSWER: Duration = Duration::from_secs(5);
/// How much longer than its wait the answer to a question may take.
const LATE: Duration = Duration::from_secs(1);
/// How long an order may take. Reports and beats wait for it.
const TO_SUPERSEDE: Duration = Duration::from_secs(10);
/// How many fences are applied in one transaction.
const MOST_FENCES: usize = 1_000;
/// How many messages wait for the controller.
const WAITING: usize = 4;

/// This node, as the controller's catalog knows it.
#[derive(Debug)]
pub struct Node {
    id: NodeId,
    key: Key,
    controller: watch::Receiver<Option<Controller>>,
    /// The controller, while a stream to it has sent its account.
    attached: watch::Sender<Option<HubClient<Channel>>>,
}

impl Node {
    /// A node with this key. `controller` tells where the controller is. [`Node::run`] has to run.
    #[must_use]
    pub fn new(id: NodeId, key: Key, controller: watch::Receiver<Option<Controller>>) -> Arc<Self> {
        Arc::new(Self {
            id,
            key,
            controller,
            attached: watch::Sender::default(),
        })
    }

    /// Waits until a stream has sent this node's account: then it has applied the clears that it
    /// missed while it was away. It waits no longer than this, since there may be no controller.
    pub async fn caught_up(&self, at_most: Duration) {
        let mut attached = self.attached.subscribe();
        let _no_controller = timeout(at_most, attached.wait_for(Option::is_some)).await;
    }

    /// Keeps a stream to the controller, until it is dropped. When a name is rolled back, the
    /// shared tier is asked.
    pub async fn run(self: Arc<Self>, engine: Engine, tier: FindDistribution) {
        let mut controller = self.controller.clone();
        let mut clock = ClusterClock::default();
        let mut backoff = Backoff::default();
        let mut is_told = false;
        loop {
            let known = controller.borrow_and_update().clone();
            let Some(known) = known else {
                if controller.changed().await.is_err() {
                    // No controller will ever be known.
                    return std::future::pending().await;
                }
                continue;
            };
            let ended = tokio::select! {
                ended = self.attach(&engine, &tier, &known, &mut clock) => Some(ended),
                // Without a sender, this controller stays.
                Ok(()) = controller.changed() => None,
            };
            let was_attached = self.attached.send_replace(None).is_some();
            if let Some(Err(status)) = ended {
                let (address, why) = (&known.address, messages::say(&status));
                if was_attached {
                    tracing::warn!(%address, %why, "the stream to the controller ended; retrying");
                } else if backoff.is_longest() && !is_told {
                    tracing::warn!(%address, %why, "no stream to the controller; retrying");
                    is_told = true;
                } else {
                    tracing::debug!(%address, %why, "no stream to the controller; retrying");
                }
            }
            let pause = backoff.after_failure(Instant::now());
            is_told &= backoff.is_longest();
            // Another controller is tried at once, but not by all nodes in the same moment.
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                Ok(()) = controller.changed() => {}
            }
        }
    }

    /// One stream, from its beginning to its end.
    async fn attach(
        &self,
        engine: &Engine,
        tier: &FindDistribution,
        controller: &Controller,
        clock: &mut ClusterClock,
    ) -> Result<(), Status> {
        let channel = connect(&self.key, controller.key, controller.address.clone());
        let channel = channel.map_err(|error| Status::internal(error.to_string()))?;
        let mut client = HubClient::new(channel).max_decoding_message_size(MOST_MESSAGE);
        let (to, sent) = mpsc::channel(WAITING);
        let from = async {
            let answer = client.attach(ReceiverStream::new(sent)).await?;
            Ok::<_, Status>(answer.into_inner())
        };
        let from = timeout(ANSWER, from).await;
        let from = from.map_err(|_| Status::deadline_exceeded("no answer in time"))??;
        let watch = engine.watch_names();
        let outputs = HashMap::new();
        let mut stream = Stream {
            engine,
            tier,
            to,
            from,
            watch,
            clock,
            outputs,
            policies: Vec::new(),
            used: BTreeMap::new(),
            usage: USAGE,
        };
        stream.measure().await?;
        stream.begin(&self.id).await?;
        self.attached.send_replace(Some(client));
        tracing::info!(address = %controller.address, "the controller has this node's account");
        stream.keep().await
    }
}

/// A stream whose controller has answered.
struct Stream<'a> {
    engine: &'a Engine,
    tier: &'a FindDistribution,
    to: mpsc::Sender<wire::FromNode>,
    from: Streaming<wire::ToNode>,
    watch: NameWatch,
    clock: &'a mut ClusterClock,
    /// The outputs that were reported, to know those that the controller names.
    outputs: HashMap<NameHash, Name>,
    /// The parts of all cache policies that have come, until the last one does.
    policies: Vec<(Tenant, NamespacePolicy)>,
    /// What namespaces use, as it was reported.
    used: BTreeMap<Tenant, NamespaceUsage>,
    /// The time between two looks at it.
    usage: Duration,
}

impl Stream<'_> {
    async fn send(&self, message: From) -> Result<(), Status> {
        let sent = self.to.send(messages::from_node(message)).await;
        sent.map_err(|_| Status::unavailable("the stream is closed"))
    }

    async fn next(&mut self) -> Result<To, Status> {
        loop {
            let message = self.from.message().await?;
            let message = message.ok_or_else(|| Status::unavailable("the stream was closed"))?;
            if let Some(kind) = message.kind {
                return Ok(kind);
            }
        }
    }

    /// Waits for a message of the beginning.
    async fn answer<T>(&mut self, wanted: impl Fn(To) -> Option<T>) -> Result<T, Status> {
        let answer = async {
            loop {
                if let Some(answer) = wanted(self.next().await?) {
                    return Ok(answer);
                }
            }
        };
        let answer = timeout(ANSWER, answer).await;
        answer.map_err(|_| Status::deadline_exceeded("no answer in time"))?
    }

    async fn beat(&self) -> Result<(), Status> {
        let sent = wall().0;
        let told = self.clock.offset().map(|_| self.engine.time());
        let time = told.unwrap_or_default().0;
        self.send(From::Beat(wire::Beat { sent, time })).await
    }

    /// The controller's time has come.
    fn heard_beat(&mut self, beat: &wire::Beat) -> Result<(), Unmeasured> {
        let (sent, theirs, now) = (Timestamp(beat.sent), Timestamp(beat.time), wall());
        let answered = self.clock.answered(sent, theirs, now);
        if answered == Err(Unmeasured::Far) {
            self.engine.doubt_time();
        }
        answered?;
        self.engine.set_time(self.clock.time(now));
        Ok(())
    }

    /// Measures the controller's time. What is committed from here on is dated by it.
    async fn measure(&mut self) -> Result<(), Status> {
        self.beat().await?;
        let beat = self.answer(|kind| match kind {
            To::Beat(beat) => Some(beat),
            _ => None,
        });
        let beat = beat.await?;
        self.heard_beat(&beat).map_err(unmeasured)
    }

    /// Says which node this is, and all that it has.
    async fn begin(&mut self, id: &NodeId) -> Result<(), Status> {
        let (fences, omitted) = messages::newest_fences(&self.engine.fences(), MOST_TOLD);
        let hello = wire::Hello {
            node: id.as_str().to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            attempt: self.engine.now().0,
            fences,
            applied: self.engine.fences().newest(),
            omitted,
        };
        self.send(From::Hello(hello)).await?;
        self.clear_until_welcome().await?;
        let used = count(self.engine.clone()).await?;
        self.report_usage(used).await?;
        let all = self.watch.all();
        for part in all.chunks(SENT_ENTRIES) {
            let put = part.iter().map(|(name, state)| self.entry(name, state));
            let put = put.collect();
            self.report(put, Vec::new(), false).await?;
        }
        self.report(Vec::new(), Vec::new(), true).await
    }

    /// Applies the fences that this node lacks.
    async fn clear_until_welcome(&mut self) -> Result<(), Status> {
        let mut fences = Vec::new();
        loop {
            let next = timeout(ANSWER, self.next()).await;
            match next.map_err(|_| Status::deadline_exceeded("no answer in time"))?? {
                To::Fence(fence) => {
                    fences.push(fence);
                    if fences.len() == MOST_FENCES {
                        self.clear(&std::mem::take(&mut fences)).await?;
                    }
                }
                To::Welcome(welcome) => {
                    self.clear(&fences).await?;
                    if welcome.usage_ms > 0 {
                        self.usage = Duration::from_millis(welcome.usage_ms.into());
                    }
                    self.forget(&welcome).await?;
                    return self.say_applied().await;
                }
                To::Policies(part) => self.heard_policies(part)?,
                To::Policy(policy) => self.heard_policy(policy)?,
                _ => {}
            }
        }
    }

    /// Clears names. A fence that cannot be applied ends the stream: what this node has does not
    /// count without it.
    async fn clear(&self, fences: &[wire::Fence]) -> Result<(), Status> {
        let fences = fences.iter().map(messages::received_fence);
        let fences = fences.collect::<Result<Vec<_>, _>>();
        let fences =
            fences.map_err(|why| Status::internal(format!("a fence is malformed: {why}")))?;
        match self.engine.apply_fences(fences).await {
            Ok(true) => Ok(()),
            Ok(false) => Err(Status::aborted("the fences of the cluster were set back")),
            Err(error) => Err(Status::internal(format!(
                "names that were cleared in the cluster could not be cleared here: {error}"
            ))),
        }
    }

    /// Forgets the fences that are deleted.
    async fn forget(&self, welcome: &wire::Welcome) -> Result<(), Status> {
        let forgotten = self.engine.forget_fences(welcome.forgotten).await;
        forgotten.map_err(|error| Status::internal(error.to_string()))
    }

    async fn say_applied(&self) -> Result<(), Status> {
        let fence = self.engine.fences().newest();
        self.send(From::Applied(wire::Applied { fence })).await
    }

    fn entry(&mut self, name: &Name, state: &NameState) -> wire::Entry {
        if let Reference::Artifact(_) = name.reference {
            self.outputs.insert(NameHash::of(name), name.clone());
        }
        messages::entry(name, state)
    }

    async fn report(
        &self,
        put: Vec<wire::Entry>,
        drop: Vec<Vec<u8>>,
        complete: bool,
    ) -> Result<(), Status> {
        let report = wire::Report {
            put,
            drop,
            complete,
        };
        self.send(From::Report(report)).await
    }

    /// Reports changes, and does what the controller says, until the stream ends.
    async fn keep(&mut self) -> Result<(), Status> {
        let mut beats = tokio::time::interval(BEAT);
        let mut looks = interval_at(tokio::time::Instant::now() + self.usage, self.usage);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // Names are reported while it counts.
        let counting = Fuse::terminated();
        tokio::pin!(counting);
        loop {
            tokio::select! {
                message = self.from.message() => {
                    let message = message?;
                    let message =
                        message.ok_or_else(|| Status::unavailable("the stream was closed"))?;
                    self.heard(message.kind).await?;
                }
                () = self.watch.changed() => self.report_changes().await?,
                _ = beats.tick() => self.beat().await?,
                _ = looks.tick(), if counting.is_terminated() => {
                    counting.set(count(self.engine.clone()).fuse());
                }
                used = &mut counting => self.report_usage(used?).await?,
            }
        }
    }

    async fn report_changes(&mut self) -> Result<(), Status> {
        let changes = self.watch.take();
        for part in changes.chunks(SENT_ENTRIES) {
            let (mut put, mut drop) = (Vec::new(), Vec::new());
            for (name, state) in part {
                if let Some(state) = state {
                    put.push(self.entry(name, state));
                } else {
                    let hash = NameHash::of(name);
                    self.outputs.remove(&hash);
                    drop.push(hash.0.to_vec());
                }
            }
            self.report(put, drop, false).await?;
        }
        Ok(())
    }

    /// Reports what namespaces use, as far as it changed.
    async fn report_usage(&mut self, now: BTreeMap<Tenant, NamespaceUsage>) -> Result<(), Status> {
        let before = std::mem::take(&mut self.used);
        let nothing = NamespaceUsage::default();
        let gone = before.keys().filter(|tenant| !now.contains_key(*tenant));
        let gone = gone.map(|tenant| (tenant, &nothing));
        let changed = now
            .iter()
            .filter(|(tenant, usage)| before.get(tenant) != Some(*usage));
        for (tenant, usage) in changed.chain(gone) {
            let usage = messages::usage(tenant, usage);
            self.send(From::Usage(usage)).await?;
        }
        self.used = now;
        Ok(())
    }

    async fn heard(&mut self, message: Option<To>) -> Result<(), Status> {
        match message {
            Some(To::Beat(beat)) => match self.heard_beat(&beat) {
                Ok(()) | Err(Unmeasured::Late) => {}
                Err(why @ Unmeasured::Far) => return Err(unmeasured(why)),
            },
            Some(To::Superseded(order)) => match messages::superseded(&order) {
                Ok((hash, version, name)) => {
                    let name = name.or_else(|| self.outputs.get(&hash).cloned());
                    if let Some(name) = name {
                        self.supersede(&name, version, order.fence).await?;
                    }
                }
                Err(why) => tracing::warn!(why, "an order of the controller is malformed"),
            },
            Some(To::Fence(fence)) => {
                self.clear(&[fence]).await?;
                self.say_applied().await?;
            }
            Some(To::Policies(part)) => self.heard_policies(part)?,
            Some(To::Policy(policy)) => self.heard_policy(policy)?,
            Some(To::CutOff(order)) => match messages::received_cut_off(&order) {
                Ok((tenant, cut)) => self.engine.cut_off(tenant, cut),
                Err(why) => tracing::warn!(why, "an order of the controller is malformed"),
            },
            Some(To::Log(question)) => generations::answer(self.engine, &self.to, question),
            Some(To::RollBack(order)) => {
                rollbacks::obey(self.engine, self.tier, &self.to, order);
            }
            // More fences are deleted.
            Some(To::Welcome(welcome)) => self.forget(&welcome).await?,
            // Of a later version.
            None => {}
        }
        Ok(())
    }

    /// A part of all cache policies has come. They count when the last one has.
    fn heard_policies(&mut self, part: wire::Policies) -> Result<(), Status> {
        for policy in part.policies {
            self.policies.push(received_policy(policy)?);
        }
        if part.complete {
            let all = Policies::known(std::mem::take(&mut self.policies));
            // The stream does not wait for the disk.
            tokio::spawn(self.engine.change_policies(|policies| *policies = all));
            tracing::info!("the controller has told this node the cache policies");
        }
        Ok(())
    }

    /// The policies of a namespace have changed.
    fn heard_policy(&mut self, policy: wire::NamespacePolicy) -> Result<(), Status> {
        let (tenant, policy) = received_policy(policy)?;
        tracing::info!(%tenant, "the cache policies of a namespace have changed");
        let change = |policies: &mut Policies| policies.put(tenant, policy);
        tokio::spawn(self.engine.change_policies(change));
        Ok(())
    }

    /// Another node has newer content of a name. An order that cannot be carried out ends the
    /// stream: the next account makes the controller repeat it.
    async fn supersede(&mut self, name: &Name, newer: Version, fence: u64) -> Result<(), Status> {
        // It does not change meanwhile: only this stream brings fences.
        let covering = self.engine.covering(name);
        let is_older = move |created: Timestamp, artifact| {
            let own = Version {
                stamp: created,
                tie: messages::tie(artifact),
            };
            supersedes((newer, fence), own, covering)
        };
        let done = timeout(TO_SUPERSEDE, self.engine.supersede(name, is_older)).await;
        let failed = |why: String| {
            Status::internal(format!(
                "another node has made {name} again, but this node's content could not lose the \
                 name: {why}"
            ))
        };
        let done = done.map_err(|_| failed("the disk is too slow".to_owned()))?;
        if done.map_err(|error| failed(error.to_string()))? {
            tracing::info!(
                tenant = %name.tenant, reference = %name.reference,
                "another node has newer content of this name; this node's content loses the name"
            );
        }
        Ok(())
    }
}

async fn count(engine: Engine) -> Result<BTreeMap<Tenant, NamespaceUsage>, Status> {
    let used = engine.namespaces().await;
    used.map_err(|error| Status::internal(error.to_string()))
}

#[async_trait]
impl Directory for Node {
    fn is_connected(&self) -> bool {
        self.attached.borrow().is_some()
    }

    async fn locate(&self, name: &Name, wait: Duration) -> Located {
        let wait_ms = u32::try_from(wait.as_millis()).unwrap_or(u32::MAX);
        let answer = self.find(find::question(name, wait_ms), name, wait);
        let located = answer.await.map(|answer| find::located(&answer));
        located.unwrap_or(Located::Unknown)
    }

    async fn newest(&self, tenant: &Tenant, prefix: &CacheKey) -> Option<CacheKey> {
        let wanted = TenantOrigin {
            tenant: tenant.clone(),
            origin: Origin::Newest(prefix.clone()),
        };
        let question = find::question_of_prefix(tenant, prefix);
        let answer = self.find(question, &wanted, Duration::ZERO).await?;
        find::newest(&answer, prefix)
    }
}

impl Node {
    /// The controller's answer, if there is one in time. `about`: for the log.
    async fn find(
        &self,
        question: wire::FindRequest,
        about: &impl std::fmt::Display,
        wait: Duration,
    ) -> Option<wire::FindResponse> {
        let mut client = self.attached.borrow().clone()?;
        match timeout(wait + LATE, client.find(question)).await {
            Ok(Ok(answer)) => Some(answer.into_inner()),
            Ok(Err(status)) => {
                tracing::warn!(%about, why = messages::say(&status),
                    "the controller did not say where content is");
                None
            }
            Err(_) => {
                tracing::warn!(%about, "the controller did not say in time where content is");
                None
            }
        }
    }
}

fn received_policy(policy: wire::NamespacePolicy) -> Result<(Tenant, NamespacePolicy), Status> {
    let policy = policies::received(policy);
    policy.map_err(|why| Status::internal(format!("a cache policy is malformed: {why}")))
}

/// The controller's time is not known.
fn unmeasured(why: Unmeasured) -> Status {
    Status::failed_precondition(why.to_string())
}

/// This machine's clock, by which the controller's time is measured. It may be set at any time.
fn wall() -> Timestamp {
    SystemTime::now().into()
}
