//! Reports the outcomes of this node's pods to the engine.
//!
//! A watch brings most outcomes, one or two seconds before kubelet unpublishes. For the others the driver
//! polls: every few seconds it gets the pods whose outcome the engine awaits and the watch does not know
//! ([`Outcomes::look_again`]). So nothing depends on one event, and an outcome that is known before a
//! volume exists reaches it too.
//!
//! # What may be missed, and what follows
//!
//! - The watch is cut, or dies silently. It goes on from its last resource version. A pod that a get by name
//!   does not find is gone unseen, and so did not succeed, only under one condition: a watch that began after
//!   the get has not reported its end either. That watch must have lived long enough to report what came
//!   before it. (Another API server than the one whose watch died may have answered the get.) The watch itself
//!   reports, as its last event, that it has caught up. So nothing is decided while other events wait.
//! - The API server has no history of what the watch missed, or the driver was down. A list replaces it, and
//!   the same get decides about the rest.
//! - The API server is away, or allows `get` but not `watch`. Nothing is decided. The engine waits for a
//!   limited time.
//! - Kubelet deletes a pod from the API only after its volumes were unpublished. So without force a pod
//!   cannot vanish while the driver is down.
//!
//! The get by name is answered by the API server itself, never from a cache, so "not found" is reliable.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod as ApiPod;
use kube::Client;
use kube::api::{Api, ApiResource};
use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};
use tokio::time::MissedTickBehavior;

use super::Config;
use super::events::Saying;
use super::pod::{Decision, Pod, decide, images};
use super::watcher::{self, Event, Watch};
use crate::engine::{Awaited, Engine, Pods, Told};
use crate::model::{Outcome, PodUid};

/// How long a request to the API server may take.
const ANSWER: Duration = Duration::from_secs(10);
/// How many events of the watch may wait.
const MOST_EVENTS: usize = 64;
/// How long the outcome of a deleted pod is remembered: its volumes may be sealed much later, and their
/// events give the reason.
const REMEMBERED: Duration = Duration::from_secs(60 * 60);
/// The most deleted pods to remember.
const MOST_REMEMBERED: usize = 4096;

/// Why a pod whose end was not seen did not succeed.
pub(super) const UNSEEN: &str = "the pod is gone, and its end was not seen";

/// What is known about the pods of this node.
#[derive(Debug, Default)]
pub struct Known {
    pods: Mutex<HashMap<PodUid, Entry>>,
}

#[derive(Debug)]
struct Entry {
    /// The first that was made counts.
    decision: Decision,
    problem: Option<String>,
    problem_said: bool,
    gone: Option<Instant>,
    images: Vec<String>,
}

impl Pods for Known {
    fn images(&self, pod: &PodUid) -> Vec<String> {
        let pods = self.pods.lock();
        let known = pods.get(pod).map(|entry| entry.images.clone());
        known.unwrap_or_default()
    }
}

impl Known {
    /// Why a pod did not succeed.
    pub(super) fn why_failed(&self, pod: &PodUid) -> Option<String> {
        match &self.pods.lock().get(pod)?.decision {
            Decision::Decided(Outcome::Failed, why) => Some(why.clone()),
            _ => None,
        }
    }

    /// Notes what an object told; what has been decided stays. Returns what counts.
    fn note(&self, uid: &PodUid, pod: &Pod, gone: bool) -> Option<Outcome> {
        let told = decide(pod, gone);
        let mut pods = self.pods.lock();
        let entry = pods.entry(uid.clone()).or_insert_with(|| Entry {
            decision: Decision::Undecided,
            problem: None,
            problem_said: false,
            gone: None,
            images: Vec::new(),
        });
        if entry.problem != told.problem {
            entry.problem = told.problem;
            entry.problem_said = false;
        }
        if entry.decision == Decision::Undecided {
            if let Decision::Decided(outcome, why) = &told.decision {
                tracing::debug!(pod.uid = %uid, %outcome, why, "a pod's outcome is known");
            }
            entry.decision = told.decision;
        }
        entry.gone = gone.then(Instant::now);
        entry.images = images(pod);
        match entry.decision {
            Decision::Decided(outcome, _) => Some(outcome),
            Decision::Undecided => None,
        }
    }

    /// Notes that there is no such pod any more, and that its end was not seen. Returns what counts.
    fn note_unseen(&self, uid: &PodUid) -> Outcome {
        let mut pods = self.pods.lock();
        let entry = pods.entry(uid.clone()).or_insert_with(|| Entry {
            decision: Decision::Undecided,
            problem: None,
            problem_said: false,
            gone: None,
            images: Vec::new(),
        });
        entry.gone = Some(Instant::now());
        if let Decision::Decided(outcome, _) = entry.decision {
            return outcome;
        }
        entry.decision = Decision::Decided(Outcome::Failed, UNSEEN.to_owned());
        Outcome::Failed
    }

    /// Forgets those that are not in a complete list, unless it is known how they ended.
    fn keep(&self, listed: &HashSet<PodUid>) {
        self.pods.lock().retain(|uid, entry| {
            if listed.contains(uid) {
                return true;
            }
            entry.gone.get_or_insert_with(Instant::now);
            entry.decision != Decision::Undecided
        });
    }

    /// Forgets outcomes that are not needed any more.
    fn tidy(&self, awaited: &[Awaited]) {
        let mut pods = self.pods.lock();
        let mut gone = pods.values().filter(|entry| entry.gone.is_some()).count();
        let awaited: HashSet<&PodUid> = awaited.iter().map(|awaited| &awaited.pod.uid).collect();
        pods.retain(|uid, entry| {
            let Some(since) = entry.gone else { return true };
            let keep =
                awaited.contains(uid) || (gone <= MOST_REMEMBERED && since.elapsed() < REMEMBERED);
            gone -= usize::from(!keep);
            keep
        });
    }

    fn look(&self, uid: &PodUid) -> Look {
        let mut pods = self.pods.lock();
        let Some(entry) = pods.get_mut(uid) else {
            return Look::Unknown;
        };
        match entry.decision {
            Decision::Decided(outcome, _) => Look::Decided(outcome),
            Decision::Undecided => {
                let said = std::mem::replace(&mut entry.problem_said, true);
                Look::Undecided(entry.problem.clone().filter(|_| !said))
            }
        }
    }
}

/// What is known of one pod.
enum Look {
    Unknown,
    /// It has not ended; and a mistake in its annotations that was not reported yet.
    Undecided(Option<String>),
    Decided(Outcome),
}

/// Watches, asks and tells, for ever.
pub(super) async fn watch(
    config: &Config,
    client: &Client,
    engine: &Engine,
    known: &Known,
    sayings: &mpsc::Sender<Saying>,
) {
    let kind = ApiResource::erase::<ApiPod>(&());
    let (doubted, doubts) = watch::channel(None);
    let (told, mut events) = mpsc::channel(MOST_EVENTS);
    let watch = Watch::new(client, &config.node, config.look_again, doubts, told).run();
    let mut outcomes = Outcomes {
        config,
        client,
        kind: &kind,
        engine,
        known,
        sayings,
        listed: false,
        away: false,
        misnamed: false,
        doubted: &doubted,
        missed: HashMap::new(),
    };
    let hear = async {
        let mut again = tokio::time::interval(config.look_again);
        again.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                // What the watch tells goes before what a round would ask: it knows how a pod ended that is gone.
                biased;
                event = events.recv() => match event {
                    Some(event) => outcomes.take(event).await,
                    // It has no end while it is heard.
                    None => return,
                },
                _ = again.tick() => outcomes.look_again().await,
            }
        }
    };
    tokio::join!(watch, hear);
}

struct Outcomes<'a> {
    config: &'a Config,
    client: &'a Client,
    kind: &'a ApiResource,
    engine: &'a Engine,
    known: &'a Known,
    sayings: &'a mpsc::Sender<Saying>,
    /// Whether there was a complete list.
    listed: bool,
    /// Whether the watch is broken.
    away: bool,
    /// Whether it was told that the node's name is wrong.
    misnamed: bool,
    /// Starts the watch again if it began before this moment.
    doubted: &'a watch::Sender<Option<Instant>>,
    /// Pods that were not there when they were asked for: the watch may be about to tell how they ended.
    missed: HashMap<PodUid, Missed>,
}

/// A pod that was not there.
struct Missed {
    /// When it was first asked for in vain.
    at: Instant,
    /// Whether a watch that was begun after that has told all that came before it. What becomes of the watch later changes nothing.
    watched: bool,
}

impl Outcomes<'_> {
    async fn take(&mut self, event: Event) {
        match event {
            Event::Listed(pods) => {
                let listed = pods.iter().filter_map(uid).collect();
                for pod in &pods {
                    if let Some(uid) = uid(pod) {
                        self.note(&uid, pod, false).await;
                    }
                }
                self.known.keep(&listed);
                self.listed = true;
                self.look_again().await;
            }
            Event::CaughtUp(since) => {
                self.note_back();
                for missed in self.missed.values_mut() {
                    missed.watched |= missed.at <= since;
                }
            }
            Event::Changed(pod) => {
                if let Some(uid) = uid(&pod) {
                    self.note(&uid, &pod, false).await;
                }
            }
            Event::Deleted(pod) => {
                if let Some(uid) = uid(&pod) {
                    self.note(&uid, &pod, true).await;
                }
            }
            Event::Failed(error) => self.note_away(&error),
        }
    }

    async fn note(&self, uid: &PodUid, pod: &Pod, gone: bool) {
        if let Some(outcome) = self.known.note(uid, pod, gone) {
            self.tell(uid, outcome).await;
        }
    }

    /// Tells the engine. Repeated as long as the engine awaits it, so a failure is only logged.
    async fn tell(&self, uid: &PodUid, outcome: Outcome) {
        let told = self.engine.report_outcome(uid, outcome).await;
        match told {
            Ok(Told { news: 0, .. }) => {}
            Ok(Told { news: volumes, .. }) => {
                tracing::info!(pod.uid = %uid, %outcome, volumes, "the outcome of a pod was reported to its volumes");
            }
            Err(error) => {
                tracing::warn!(pod.uid = %uid, %outcome, %error, "the outcome of a pod could not be recorded yet");
            }
        }
    }

    /// Settles what the watch did not.
    async fn look_again(&mut self) {
        if !self.listed {
            return;
        }
        let awaited = self.engine.awaited_outcomes();
        self.known.tidy(&awaited);
        self.missed
            .retain(|uid, _| awaited.iter().any(|awaited| awaited.pod.uid == *uid));
        self.ask_for(&awaited).await;
        let unwatched = self.missed.values().filter(|missed| !missed.watched);
        if let Some(last) = unwatched.map(|missed| missed.at).max() {
            self.doubted.send_replace(Some(last));
        }
    }

    async fn ask_for(&mut self, awaited: &[Awaited]) {
        for awaited in awaited {
            let uid = &awaited.pod.uid;
            match self.known.look(uid) {
                Look::Decided(outcome) => self.tell(uid, outcome).await,
                Look::Undecided(problem) => {
                    if let Some(problem) = problem {
                        // Lost when the queue is full, as every event is.
                        let _ = self
                            .sayings
                            .try_send(Saying::bad_annotation(awaited, problem));
                    }
                    // Kubelet unpublishes when a pod has ended: the watch is late, or dead without having noticed.
                    if awaited.unpublished && !self.ask(awaited).await {
                        return;
                    }
                }
                Look::Unknown => {
                    if !self.ask(awaited).await {
                        return;
                    }
                }
            }
        }
    }

    /// Asks for one pod by name. `false`: there is no answer to be had now.
    async fn ask(&mut self, awaited: &Awaited) -> bool {
        let (uid, name) = (&awaited.pod.uid, &awaited.pod.name);
        let api: Api<Pod> =
            Api::namespaced_with(self.client.clone(), awaited.tenant.as_str(), self.kind);
        let answer = match tokio::time::timeout(ANSWER, api.get_opt(name)).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(error)) => {
                tracing::debug!(pod.uid = %uid, %error, "the API server does not say what became of a pod");
                return false;
            }
            Err(_) => return false,
        };
        match answer.filter(|pod| self::uid(pod).as_ref() == Some(uid)) {
            None if !self.is_gone_unseen(uid) => {}
            None => {
                let outcome = self.known.note_unseen(uid);
                tracing::warn!(pod.uid = %uid, pod = %name, tenant = %awaited.tenant,
                    "a pod is gone, and its end was not seen; it counts as not succeeded");
                self.tell(uid, outcome).await;
            }
            Some(pod) => {
                self.missed.remove(uid);
                let node = pod.spec.node_name.as_deref().unwrap_or_default();
                let here = &self.config.node;
                if node != here && !std::mem::replace(&mut self.misnamed, true) {
                    tracing::error!(pod = %name, "this node is called {node:?} by Kubernetes and {here:?} here (--node-id): \
                        the watch sees no pods, and each is asked for");
                }
                if decide(&pod, false).decision != Decision::Undecided {
                    self.note(uid, &pod, false).await;
                }
            }
        }
        true
    }

    /// Whether a pod that is not there now was not there before either, and no watch that was begun since has told of its end.
    /// No clock is asked: a question takes its time, and what the watch has told meanwhile is not heard before the round is over.
    fn is_gone_unseen(&mut self, uid: &PodUid) -> bool {
        let missed = self.missed.entry(uid.clone()).or_insert_with(|| Missed {
            at: Instant::now(),
            watched: false,
        });
        missed.watched
    }

    fn note_away(&mut self, error: &watcher::Error) {
        self.config.watched.send_replace(false);
        self.config.answers.send_replace(is_answer(error));
        if std::mem::replace(&mut self.away, true) {
            tracing::debug!(%error, "the watch over pods is still broken");
        } else {
            tracing::warn!(%error, "the watch over pods is broken; outcomes wait for it");
        }
    }

    fn note_back(&mut self) {
        // First, so that the log has it before what others then do.
        if std::mem::take(&mut self.away) {
            tracing::info!("the watch over pods works again");
        }
        self.config.watched.send_replace(true);
        self.config.answers.send_replace(true);
    }
}

/// Whether it was the API server that said so, and not that nobody answers: of somebody whom it knows too little or who asks too much. All
/// else may be said by what stands before an API server that is away, and by one that is not up yet.
fn is_answer(error: &watcher::Error) -> bool {
    match error {
        watcher::Error::NoVersion => true,
        _ => matches!(error.code(), Some(401 | 403 | 410 | 429)),
    }
}

fn uid(pod: &Pod) -> Option<PodUid> {
    pod.metadata.uid.as_ref()?.parse().ok()
}
