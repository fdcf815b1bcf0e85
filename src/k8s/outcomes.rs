//! Reports the outcomes of this node's pods to the engine.
//!
//! A watch reports most of them, one or two seconds before kubelet unpublishes. For the others, a
//! round every few seconds asks for the pods that the engine waits for and the watch did not report
//! ([`Outcomes::look_again`]). So a missed event loses nothing, and an outcome that is known before
//! a volume exists still reaches it.
//!
//! # Missed events
//!
//! - The watch ends or dies unnoticed: it resumes at its last version. If a pod does not exist when
//!   asked for by name, that alone proves nothing: another API server may answer than the one whose
//!   watch died. The pod counts as failed only if a watch that began later does not report its end
//!   within its catch-up time. A watch that ends sooner does not count. The watch itself reports
//!   that it has caught up, after all its events, so no decision overtakes an event.
//! - The API server no longer has the missed events, or the driver was down: a list replaces them,
//!   and the question by name decides the rest.
//! - The API server is away, or refuses only the watch: nothing is decided. The engine's timeout
//!   ends the wait.
//! - Kubelet deletes a pod from the API only after its volumes were unpublished. Unless forced, no
//!   pod disappears while the driver is down.
//!
//! The question by name bypasses all caches, so that "not found" is reliable.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client};
use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};
use tokio::time::MissedTickBehavior;

use super::config::Config;
use super::pod::{Decision, decide, images};
use super::pod_event::PodEvent;
use super::watcher::{self, Event, Watch};
use crate::engine::{Awaited, Engine, OutcomeReport, Pods};
use crate::model::{Outcome, PodUid};

/// The timeout of a request for a pod.
const ANSWER: Duration = Duration::from_secs(10);
/// The most queued events of the watch.
const MOST_EVENTS: usize = 64;
/// How long the outcome of a deleted pod is kept. Its volumes may be sealed later.
const REMEMBERED: Duration = Duration::from_secs(60 * 60);
/// The most deleted pods that are kept.
const MOST_REMEMBERED: usize = 4096;

/// The reason of a pod whose outcome was never observed.
pub(super) const UNSEEN: &str = "the pod is gone, and its end was not observed";

/// The state of this node's pods.
#[derive(Debug, Default)]
pub struct PodOutcomes {
    pods: Mutex<HashMap<PodUid, Entry>>,
}

#[derive(Debug, Default)]
struct Entry {
    /// The first decision wins.
    decision: Decision,
    problem: Option<String>,
    problem_said: bool,
    gone: Option<Instant>,
    images: Vec<String>,
}

impl Pods for PodOutcomes {
    fn images(&self, pod: &PodUid) -> Vec<String> {
        let pods = self.pods.lock();
        let known = pods.get(pod).map(|entry| entry.images.clone());
        known.unwrap_or_default()
    }
}

impl PodOutcomes {
    /// Why a pod did not succeed.
    pub(super) fn why_failed(&self, pod: &PodUid) -> Option<String> {
        match &self.pods.lock().get(pod)?.decision {
            Decision::Decided(Outcome::Failed, why) => Some(why.clone()),
            _ => None,
        }
    }

    /// Records what an object shows. The first decision wins and is returned.
    fn note(&self, uid: &PodUid, pod: &Pod, gone: bool) -> Option<Outcome> {
        let told = decide(pod, gone);
        let mut pods = self.pods.lock();
        let entry = pods.entry(uid.clone()).or_default();
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

    /// Records that the pod no longer exists and its end was not observed. Returns its outcome.
    fn note_unseen(&self, uid: &PodUid) -> Outcome {
        let mut pods = self.pods.lock();
        let entry = pods.entry(uid.clone()).or_default();
        entry.gone = Some(Instant::now());
        if let Decision::Decided(outcome, _) = entry.decision {
            return outcome;
        }
        entry.decision = Decision::Decided(Outcome::Failed, UNSEEN.to_owned());
        Outcome::Failed
    }

    /// Removes pods that a complete list lacks, unless their outcome is known.
    fn keep(&self, listed: &HashSet<String>) {
        self.pods.lock().retain(|uid, entry| {
            if listed.contains(uid.as_str()) {
                return true;
            }
            entry.gone.get_or_insert_with(Instant::now);
            entry.decision != Decision::Undecided
        });
    }

    /// Removes deleted pods that are too old or too many, except those that the engine waits for.
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

    fn look(&self, uid: &PodUid) -> PodState {
        let mut pods = self.pods.lock();
        let Some(entry) = pods.get_mut(uid) else {
            return PodState::Unknown;
        };
        match entry.decision {
            Decision::Decided(outcome, _) => PodState::Decided(outcome),
            Decision::Undecided => {
                let said = std::mem::replace(&mut entry.problem_said, true);
                PodState::Undecided(entry.problem.clone().filter(|_| !said))
            }
        }
    }
}

/// The state of one pod.
enum PodState {
    Unknown,
    /// It has not ended. Contains a mistake in its annotations that was not reported yet.
    Undecided(Option<String>),
    Decided(Outcome),
}

/// Watches, asks and reports, for ever.
pub(super) async fn watch(
    config: &Config,
    client: &Client,
    engine: &Engine,
    pod_events: &mpsc::Sender<PodEvent>,
) {
    let (doubted, doubts) = watch::channel(None);
    let (told, mut events) = mpsc::channel(MOST_EVENTS);
    let watch = Watch::new(client, &config.node, config.look_again, doubts, told).run();
    let mut outcomes = Outcomes {
        config,
        client,
        engine,
        known: &config.known,
        pod_events,
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
                // The watch goes first: it knows how a deleted pod ended.
                biased;
                event = events.recv() => match event {
                    Some(event) => outcomes.take(event).await,
                    // The watch runs while this end receives.
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
    engine: &'a Engine,
    known: &'a PodOutcomes,
    pod_events: &'a mpsc::Sender<PodEvent>,
    /// Whether a complete list was received.
    listed: bool,
    /// Whether the watch is broken.
    away: bool,
    /// Whether the wrong node name was logged.
    misnamed: bool,
    /// Makes a watch that began before this moment restart.
    doubted: &'a watch::Sender<Option<Instant>>,
    /// Pods that were not found. The watch may still report how they ended.
    missed: HashMap<PodUid, Missed>,
}

/// A pod that was not found.
struct Missed {
    /// When it was first not found.
    at: Instant,
    /// Whether a watch that began later has caught up. Later failures of the watch do not matter.
    watched: bool,
}

impl Outcomes<'_> {
    async fn take(&mut self, event: Event) {
        match event {
            Event::Listed(uids) => {
                self.known.keep(&uids);
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

    /// Reports to the engine. This repeats while the engine waits, so a failure is only logged.
    async fn tell(&self, uid: &PodUid, outcome: Outcome) {
        let told = self.engine.report_outcome(uid, outcome).await;
        match told {
            Ok(OutcomeReport { news: 0, .. }) => {}
            Ok(OutcomeReport { news: volumes, .. }) => {
                tracing::info!(pod.uid = %uid, %outcome, volumes,
                    "reported a pod's outcome to its volumes");
            }
            Err(error) => {
                tracing::warn!(pod.uid = %uid, %outcome, %error,
                    "could not record a pod's outcome yet");
            }
        }
    }

    /// Decides the outcomes that the watch did not report.
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
                PodState::Decided(outcome) => self.tell(uid, outcome).await,
                PodState::Undecided(problem) => {
                    if let Some(problem) = problem {
                        // Dropped if the queue is full, like every event.
                        let _ = self
                            .pod_events
                            .try_send(PodEvent::bad_annotation(awaited, problem));
                    }
                    // Kubelet unpublishes after the pod ended, so the watch is late or dead.
                    if awaited.unpublished && !self.ask(awaited).await {
                        return;
                    }
                }
                PodState::Unknown => {
                    if !self.ask(awaited).await {
                        return;
                    }
                }
            }
        }
    }

    /// Asks for one pod by name. `false`: no answer now.
    async fn ask(&mut self, awaited: &Awaited) -> bool {
        let (uid, name) = (&awaited.pod.uid, &awaited.pod.name);
        let api: Api<Pod> = Api::namespaced(self.client.clone(), awaited.tenant.as_str());
        let answer = match tokio::time::timeout(ANSWER, api.get_opt(name)).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(error)) => {
                tracing::debug!(pod.uid = %uid, %error, "could not ask the API server for a pod");
                return false;
            }
            Err(_) => return false,
        };
        match answer.filter(|pod| self::uid(pod).as_ref() == Some(uid)) {
            None if !self.is_gone_unseen(uid) => {}
            None => {
                let outcome = self.known.note_unseen(uid);
                tracing::warn!(pod.uid = %uid, pod = %name, tenant = %awaited.tenant,
                    "a pod is gone, and its end was not observed: it counts as failed");
                self.tell(uid, outcome).await;
            }
            Some(pod) => {
                self.missed.remove(uid);
                let node = pod.spec.as_ref().and_then(|it| it.node_name.as_deref());
                let node = node.unwrap_or_default();
                let here = &self.config.node;
                if node != here && !std::mem::replace(&mut self.misnamed, true) {
                    tracing::error!(pod = %name,
                        "Kubernetes names this node {node:?}, but --node-id is {here:?}: set \
                         --node-id to that name; until then the watch sees no pods, and the driver \
                         asks for each pod by name");
                }
                if decide(&pod, false).decision != Decision::Undecided {
                    self.note(uid, &pod, false).await;
                }
            }
        }
        true
    }

    /// Whether the pod was also missing before, and a watch that began after that has caught up
    /// without its end. No clock decides: the watch's events wait until the round is over.
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
            tracing::warn!(%error, "the watch over pods is broken; outcomes will be late");
        }
    }

    fn note_back(&mut self) {
        // Log first, before the effects of the calls below.
        if std::mem::take(&mut self.away) {
            tracing::info!("the watch over pods works again");
        }
        self.config.watched.send_replace(true);
        self.config.answers.send_replace(true);
    }
}

/// Whether the API server itself refused, for lack of rights or for too many requests. Other errors
/// may come from a proxy or from an API server that is still starting.
fn is_answer(error: &watcher::Error) -> bool {
    match error {
        watcher::Error::NoVersion => true,
        _ => matches!(error.code(), Some(401 | 403 | 410 | 429)),
    }
}

fn uid(pod: &Pod) -> Option<PodUid> {
    pod.metadata.uid.as_ref()?.parse().ok()
}
