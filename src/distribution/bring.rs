//! Brings the content that a volume starts from. Follows the decisions of `decide`, and limits each
//! wait. A call that gives up leaves fetches running for the next one.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::{Instant, timeout, timeout_at};

use super::ask::{Answer, Asker, Detail};
use super::context::Context;
use super::decide::{Here, Step, There, Want, base, decide, is_asked};
use super::decoy::{decoy, none_key};
use super::fetch::{Fetched, Fetcher};
use super::flight::Flights;
use super::health::say;
use super::offered::Offered;
use super::peers::Patience;
use super::queue::Queue;
use super::roster::Reader;
use super::search::{self, search};
use super::sources::Sources;
use crate::engine::notice::What;
use crate::engine::{self, Error, PublishRequest};
use crate::model::{
    CacheKey, Commit, Freshness, Name, NodeId, Origin, Reference, Tenant, TenantOrigin, VolumeKind,
};
use crate::shared::content_of;

/// The shortest and the longest pause between two questions about an input. In between it is a
/// twentieth of the time waited so far.
const FIRST: Duration = Duration::from_millis(20);
const LONGEST: Duration = Duration::from_secs(2);
/// A question that took longer was held by the controller until something changed.
const HELD: Duration = Duration::from_millis(500);

/// Brings content.
#[derive(Debug)]
pub(super) struct Bringer {
    context: Arc<Context>,
    asker: Arc<Asker>,
    fetcher: Arc<Fetcher>,
    queue: Arc<Queue>,
    /// Pods of a namespace that wait for one input ask together.
    rounds: Flights<(Name, Tenant, IsFirst), search::Found>,
}

/// Whether a pod asks for the first time: then it does not wait for the pause of the others.
type IsFirst = bool;

/// A reference that a cache may start from, with what is known of it.
struct Candidate {
    name: Name,
    here: Option<Here>,
    /// Other keys on this node may begin so, too, and are older.
    is_newest_here: bool,
    answer: Answer,
    /// What the tier says.
    tier: There,
}

impl Candidate {
    /// The content that can be fetched.
    fn offered(&self) -> Option<&Arc<Offered>> {
        match &self.answer {
            Answer::Content { found, .. } => found.as_ref(),
            Answer::Failed(_) | Answer::Nothing { .. } => None,
        }
    }
}

/// Where content is that a cache may start from.
enum StartFrom {
    /// It has this name.
    Name(Name),
    /// It has this name: that of the newest content on this node of the keys that begin so.
    Newest(Name),
    /// No key on this node begins so.
    Elsewhere(Tenant, CacheKey),
}

/// How long a pod waits for a fetch.
#[derive(Debug, Clone, Copy)]
struct Limits {
    until: Instant,
    /// The longest time without a byte; `None`: any time.
    stall: Option<Duration>,
    /// Whether the pod cannot start without it.
    is_needed: bool,
}

/// The result of a search that did not take place.
fn nothing() -> search::Found {
    search::Found {
        answer: Answer::Failed(unasked_state().into()),
        tier: There::Unknown,
        makers: Vec::new(),
    }
}

fn reader(request: &PublishRequest) -> Reader {
    Reader {
        tenant: request.tenant.clone(),
        pod: request.pod.clone(),
    }
}

/// What a volume needs of each name that it may start from.
fn want(request: &PublishRequest, sources: Sources) -> Option<Want> {
    match &request.spec.kind {
        VolumeKind::Scratch | VolumeKind::Import { .. } => None,
        VolumeKind::Input { .. } => Some(Want::Input),
        VolumeKind::ResourceCache { .. } => Some(Want::ResourceCache),
        VolumeKind::TaskCache { .. } if !sources.has_tier() => {
            Some(Want::TaskCache(Freshness::Local))
        }
        VolumeKind::TaskCache { .. } => {
            Some(Want::TaskCache(request.spec.freshness.unwrap_or_default()))
        }
        VolumeKind::Output { keep, .. } => {
            let is_shared = request.share && !request.read_only && keep.commit != Commit::Never;
            is_shared.then_some(Want::Number)
        }
    }
}

impl Bringer {
    pub(super) fn new(
        context: Arc<Context>,
        asker: Arc<Asker>,
        fetcher: Arc<Fetcher>,
        queue: Arc<Queue>,
    ) -> Self {
        Self {
            rounds: context.flights(),
            context,
            asker,
            fetcher,
            queue,
        }
    }

    pub(super) async fn bring(&self, request: &mut PublishRequest) -> engine::Result<()> {
        // A volume that exists is mounted again, whatever the tier has by now.
        if self.context.engine.has_volume(&request.volume) {
            return Ok(());
        }
        let notices = self.context.settings.notices.as_ref();
        self.context.health.tell(notices, request);
        match want(request, self.context.settings.sources) {
            None => Ok(()),
            Some(Want::Input) => self.bring_input(request).await,
            Some(Want::Number) => {
                if let Some((reference, _)) = request.spec.kind.committed_as() {
                    let name = request.name(&reference);
                    let number = self.number(&name, self.context.settings.fresh_wait).await;
                    request.base = number.ok().flatten();
                }
                Ok(())
            }
            Some(want @ (Want::ResourceCache | Want::TaskCache(_))) => {
                self.bring_cache(request, want).await
            }
        }
    }

    /// Whether the volume may read this name now.
    fn may_read(&self, name: &Name, request: &PublishRequest) -> bool {
        let policies = self.context.engine.policies();
        policies.may_read(name, &request.tenant)
    }

    /// The number of a name at this moment. The error says why the tier does not tell it in this
    /// time.
    pub(super) async fn number(
        &self,
        name: &Name,
        within: Duration,
    ) -> Result<Option<u64>, Arc<str>> {
        let answer = timeout(within, self.asker.ask(name, Detail::Number)).await;
        match answer {
            Ok(Answer::Failed(why)) => Err(why),
            Ok(answer) => Ok(base(
                None,
                answer.there(),
                self.context.engine.covering(name),
            )),
            Err(_elapsed) => Err("it did not answer in time".into()),
        }
    }

    fn here(&self, name: &Name) -> Option<Here> {
        let local = self.context.engine.local(&name.tenant, &name.reference);
        local.as_ref().map(Here::of)
    }
}

/// Caches.
impl Bringer {
    async fn bring_cache(&self, request: &mut PublishRequest, want: Want) -> engine::Result<()> {
        let until = Instant::now() + self.context.settings.fetch_wait;
        // Each round takes a name from content on this node, so there is a last one.
        while !self.bring_first(request, want, until).await? && Instant::now() < until {}
        Ok(())
    }

    /// Brings the first content that there is. `false`: the newest of several keys on this node was
    /// cleared in the tier and is gone, so the next newest of them is to be looked for.
    async fn bring_first(
        &self,
        request: &mut PublishRequest,
        want: Want,
        until: Instant,
    ) -> engine::Result<bool> {
        let options = self.look(request, want).await;
        // It is the name that is committed.
        if let Some(first) = options.first() {
            let fence = self.context.engine.covering(&first.name);
            request.base = base(first.here.as_ref(), first.tier, fence);
            let tier = first.tier.after(fence);
            if let There::Nothing { cleared, .. } | There::Content { cleared, .. } = tier {
                request.cleared = cleared;
            }
        }
        for option in &options {
            let name = &option.name;
            let here = option.here.as_ref();
            let covering = self.context.engine.covering(name);
            let there = option.answer.there();
            let there = here.map_or(there, |here| here.of_tier(there, covering));
            let decision = decide(want, here, there);
            self.context.discard(name, decision).await?;
            match decision.step {
                Step::Use => return Ok(true),
                Step::UseAndShare => {
                    self.share_again(name, option);
                    return Ok(true);
                }
                Step::Fetch => {
                    let is_here = self.here(name).is_some();
                    let stall = is_here.then_some(self.context.settings.stall);
                    let limits = Limits {
                        until,
                        stall,
                        is_needed: false,
                    };
                    if self.fetch(request, option, limits).await {
                        let found = option.offered();
                        request.fetched = found.map(|found| Box::new(found.fetched()));
                        return Ok(true);
                    }
                    if self.here(name).is_some() {
                        return Ok(true);
                    }
                }
                Step::Without | Step::Wait => {}
            }
            if option.is_newest_here && decision.discard.is_some() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// What the volume may start from, up to the first that is on this node, with the answers of
    /// the peers and the tier. All questions are asked at once.
    async fn look(&self, request: &PublishRequest, want: Want) -> Vec<Candidate> {
        let mut options = Vec::new();
        for origin in request.origins() {
            let (place, here) = self.place_of(request, origin);
            let is_last = here.is_some();
            options.push((place, here));
            if is_last {
                break;
            }
        }
        let settings = &self.context.settings;
        let starts_here = options.first().is_some_and(|(_, here)| here.is_some());
        let patience = if starts_here {
            settings.fresh_wait
        } else {
            settings.ask
        };
        let until = Instant::now() + patience;
        let reader = &reader(request);
        let questions = options.into_iter().map(|(place, here)| async move {
            let is_newest_here = matches!(place, StartFrom::Newest(_));
            let name = match place {
                StartFrom::Name(name) | StartFrom::Newest(name) => name,
                StartFrom::Elsewhere(tenant, prefix) => self.newest(tenant, &prefix, until).await?,
            };
            let found = if is_asked(want, here.is_some()) {
                let here = here.map(|here| here.artifact);
                search(
                    &self.context,
                    &self.asker,
                    &name,
                    reader,
                    here,
                    until,
                    Patience::Now,
                )
                .await
            } else {
                nothing()
            };
            Some(Candidate {
                name,
                here,
                is_newest_here,
                answer: found.answer,
                tier: found.tier,
            })
        });
        let options = join_all(questions).await;
        options.into_iter().flatten().collect()
    }

    /// Where an origin is: under which name, and the content on this node if there is some.
    fn place_of(
        &self,
        request: &PublishRequest,
        TenantOrigin { tenant, origin }: TenantOrigin,
    ) -> (StartFrom, Option<Here>) {
        match origin {
            Origin::Name(reference) => {
                let mut name = Name { tenant, reference };
                if !self.may_read(&name, request) {
                    name = decoy(&name);
                }
                let here = self.here(&name);
                (StartFrom::Name(name), here)
            }
            Origin::Newest(prefix) => {
                let policies = self.context.engine.policies();
                if !policies.may_read_all(&tenant, &prefix, &request.tenant) {
                    return (StartFrom::Elsewhere(tenant, none_key()), None);
                }
                let newest = self.context.engine.newest(&tenant, &prefix);
                match newest {
                    Some((name, local)) => (StartFrom::Newest(name), Some(Here::of(&local))),
                    None => (StartFrom::Elsewhere(tenant, prefix), None),
                }
            }
        }
    }

    /// The name of the newest commit of all task caches whose key begins so, on other nodes.
    /// `None`: there is none, or none is known in time.
    async fn newest(&self, tenant: Tenant, prefix: &CacheKey, until: Instant) -> Option<Name> {
        let peers = self.context.asked_peers()?;
        let newest = peers.newest(&tenant, prefix);
        let key = timeout_at(until, newest).await.ok().flatten()?;
        let reference = Reference::TaskCache(key);
        Some(Name { tenant, reference })
    }

    /// Fetches what the tier shows. `false`: it did not come in time, or not at all.
    async fn fetch(&self, request: &PublishRequest, option: &Candidate, limits: Limits) -> bool {
        let Some(found) = option.offered() else {
            return false;
        };
        let why = match self.fetched(request, &option.name, found, limits).await {
            Some(Ok(())) => return true,
            Some(Err(error)) => error.to_string(),
            None => self.how_far(found),
        };
        let notices = self.context.settings.notices.as_ref();
        let reference = option.name.reference.clone();
        let from = found.from();
        let what = What::NotFetched {
            reference,
            from,
            why,
        };
        say(notices, &request.tenant, &request.pod, what);
        false
    }

    /// Has content uploaded again that the tier lost or evicted. The pod does not wait for that.
    fn share_again(&self, name: &Name, option: &Candidate) {
        let Some(here) = option.here else { return };
        let (queue, name) = (Arc::clone(&self.queue), name.clone());
        let again = async move { queue.share_again(&name, here.artifact).await };
        self.context.tasks.spawn(again);
    }

    /// Waits for a fetch. `None`: the pod waits no longer, and the fetch goes on.
    async fn fetched(
        &self,
        request: &PublishRequest,
        name: &Name,
        found: &Arc<Offered>,
        limits: Limits,
    ) -> Option<Fetched> {
        let what = What::Fetching {
            reference: name.reference.clone(),
            bytes: content_of(&found.manifest.layers),
            from: found.from(),
        };
        let notices = self.context.settings.notices.as_ref();
        say(notices, &request.tenant, &request.pod, what);
        let stalls = async {
            match limits.stall {
                Some(limit) => self.fetcher.stalls(found.manifest.artifact, limit).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            fetched = self.fetcher.fetch(name, found, reader(request), limits.is_needed) => {
                Some(fetched)
            }
            () = stalls => None,
            () = tokio::time::sleep_until(limits.until) => None,
        }
    }

    fn how_far(&self, found: &Offered) -> String {
        let progress = self.fetcher.progress(found.manifest.artifact);
        progress.unwrap_or_else(|| {
            format!(
                "its fetch from {} waits for other fetches to end",
                found.from()
            )
        })
    }
}

/// Inputs.
impl Bringer {
    async fn bring_input(&self, request: &mut PublishRequest) -> engine::Result<()> {
        let VolumeKind::Input { from } = &request.spec.kind else {
            return Ok(());
        };
        let (source, reference) = (request.source(from), from.clone());
        let (mut none, reader) = (None, reader(request));
        let waited = self.context.settings.input_wait;
        let began = Instant::now();
        let until = began + waited;
        let mut pause = Duration::ZERO;
        let mut state = unasked_state();
        let mut told = false;
        loop {
            // The policies may change meanwhile.
            let may_read = self.may_read(&source, request);
            let name = if may_read {
                &source
            } else {
                none.get_or_insert_with(|| decoy(&source))
            };
            // The engine itself waits for what a volume on this node becomes.
            if self.here(name).is_some() || self.context.engine.is_coming(request) {
                request.waited = began.elapsed();
                return Ok(());
            }
            if Instant::now() >= until || self.context.is_stopping() {
                return self.gives_up(reference, state, began);
            }
            let asked = Instant::now();
            let round = self.round(name, &reader, pause);
            let answer = timeout_at(until, round).await;
            let took = asked.elapsed();
            if let Ok(search::Found { answer, makers, .. }) = answer {
                state = self.state_of(&answer, &makers);
                let has_failed = matches!(answer, Answer::Failed(_));
                let is_alone = self.context.asked_peers().is_none();
                if has_failed && is_alone && self.context.health.permanent_of(&name.tenant) {
                    // Asking again is of no use until a person changes something.
                    return self.gives_up(reference, state, began);
                }
                let decision = decide(Want::Input, None, answer.there());
                if let (
                    Step::Fetch,
                    Answer::Content {
                        found: Some(found), ..
                    },
                ) = (decision.step, &answer)
                {
                    let limits = Limits {
                        until,
                        stall: None,
                        is_needed: true,
                    };
                    match self.fetched(request, name, found, limits).await {
                        Some(Ok(())) => request.fetched = Some(Box::new(found.fetched())),
                        Some(Err(error)) => state = error.to_string(),
                        None => state = self.how_far(found),
                    }
                } else if !told {
                    told = true;
                    self.say_waiting(request, &reference, &state);
                }
            }
            // A question that the controller has held for a while needs no pause after it.
            let is_told = self.context.asked_peers().is_some_and(|it| it.is_told());
            let was_held = is_told && took >= pause + HELD;
            let longest = if was_held { FIRST } else { LONGEST };
            pause = (began.elapsed() / 20).clamp(FIRST, longest);
        }
    }

    fn gives_up(&self, reference: Reference, state: String, began: Instant) -> engine::Result<()> {
        self.context.engine.counters().missed("input");
        Err(Error::Coming {
            reference,
            state,
            waited: Duration::from_secs(began.elapsed().as_secs()),
        })
    }

    /// A pause, and then a question, for all pods that wait for this name.
    async fn round(&self, name: &Name, reader: &Reader, pause: Duration) -> search::Found {
        let together = (name.clone(), reader.tenant.clone(), pause.is_zero());
        let found = self.rounds.join(together, |callers| {
            let (context, asker) = (Arc::clone(&self.context), Arc::clone(&self.asker));
            let (name, reader) = (name.clone(), reader.clone());
            async move {
                tokio::time::sleep(pause).await;
                if callers.give_up() {
                    return nothing();
                }
                // Each caller limits how long it waits. A tier that hangs must not keep the
                // peers from being asked again.
                let settings = &context.settings;
                let limit = match context.asked_peers() {
                    None => settings.input_wait,
                    Some(_) => settings.ask,
                };
                let until = Instant::now() + limit;
                // The first answer tells the pod at once what it waits for.
                let patience = match pause {
                    Duration::ZERO => Patience::Now,
                    _ => Patience::Waits,
                };
                search(&context, &asker, &name, &reader, None, until, patience).await
            }
        });
        found.answer().await.unwrap_or_else(nothing)
    }

    /// How far the search for an input is, in words.
    fn state_of(&self, answer: &Answer, makers: &[NodeId]) -> String {
        let context = &self.context;
        let (tier, peers) = (context.asked_tier(), context.asked_peers());
        let is_there = matches!(answer, Answer::Content { .. });
        if let (Some(maker), false) = (makers.first(), is_there) {
            return format!("a step on node {} is making it", maker.as_str());
        }
        let text = match (answer, tier, peers) {
            (Answer::Failed(_), None, _) | (Answer::Nothing { .. }, None, Some(_)) => {
                "no peer has it yet, and no step on this node makes it"
            }
            (Answer::Failed(error), Some(_), None) => return error.to_string(),
            (Answer::Failed(error), Some(_), Some(_)) => {
                return format!("no peer has it yet; {error}");
            }
            (Answer::Nothing { .. }, _, None) => {
                "no node has put it into the shared tier yet, and no step on this node makes it"
            }
            (Answer::Nothing { .. }, _, Some(_)) => {
                "neither a peer nor the shared tier has it yet, and no step on this node makes it"
            }
            (Answer::Content { found: None, .. }, ..) => {
                "the content in the shared tier is damaged, or too large for this node"
            }
            (
                Answer::Content {
                    found: Some(found), ..
                },
                ..,
            ) => {
                return format!("it is being fetched from {}", found.from());
            }
        };
        text.to_owned()
    }

    fn say_waiting(&self, request: &PublishRequest, reference: &Reference, state: &str) {
        let what = What::WaitingForInput {
            reference: reference.clone(),
            state: state.to_owned(),
            at_most: self.context.settings.input_wait,
        };
        let notices = self.context.settings.notices.as_ref();
        say(notices, &request.tenant, &request.pod, what);
    }
}

fn unasked_state() -> String {
    "neither the shared tier nor a peer answered in time".to_owned()
}
