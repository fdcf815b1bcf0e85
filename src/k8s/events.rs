//! Sends events on pods. `pod_event` has what an event says.
//!
//! Events are few and bounded. Notices for one pod and reason within a moment become one event. A
//! repeated event is counted, like kubelet's. The rate is limited. Events are dropped if the API
//! server refuses them, if it takes none of them for an hour, or if too many wait (the oldest
//! first). Events of hits are dropped before all others. No caller waits for an event.
//!
//! The API server may answer with an error that passes, such as that of an admission webhook of one
//! namespace. Then only the events of that namespace wait. If it does not answer, all wait.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use kube::Client;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use tokio::sync::mpsc;

use super::config::Config;
use super::pod::cut;
use super::pod_event::PodEvent;
use crate::engine::notice::Notice;
use crate::link::Backoff;
use crate::model::{DRIVER_NAME, Tenant};

/// The most waiting events.
pub(super) const MOST_WAITING: usize = 1024;
/// The most waiting events to which one of a hit is added. So it delays others by seconds, and the
/// burst still suffices for all pods that start at once.
const MOST_BEFORE_HIT: usize = BURST as usize;
/// How long to gather notices for one pod and reason.
const GATHER: Duration = Duration::from_millis(500);
/// The age at which a waiting event is dropped.
const OLDEST: Duration = Duration::from_secs(60 * 60);
/// The number of events that may be sent at once …
const BURST: u32 = 50;
/// … and then one per this interval.
const ONE_EVERY: Duration = Duration::from_millis(200);
/// The timeout of a request. An admission webhook has 10 seconds by default, and after them the
/// API server answers.
const ANSWER: Duration = Duration::from_secs(12);
/// The most notes in one event. It counts further ones.
const MOST_NOTES: usize = 8;
/// The number of sent texts to remember, so that a repeated one is counted.
const MOST_NOTED: usize = 256;
/// The API's limit for an event's text.
const LONGEST_NOTE: usize = 1024;

/// Notices that become one event.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Waiting {
    pod_event: PodEvent,
    notes: Vec<String>,
    more: usize,
    since: Instant,
}

impl Waiting {
    fn event(&self) -> Event {
        let mut note = self.notes.join("; ");
        if self.more > 0 {
            note = format!("{note}; and {} more", self.more);
        }
        note.truncate(cut(&note, LONGEST_NOTE).len());
        Event {
            type_: if self.pod_event.warns {
                EventType::Warning
            } else {
                EventType::Normal
            },
            reason: self.pod_event.reason.to_owned(),
            note: Some(note),
            action: self.pod_event.action.to_owned(),
            secondary: None,
        }
    }
}

/// The waiting events, and when the next may be sent.
#[derive(Debug)]
struct Queue {
    waiting: VecDeque<Waiting>,
    /// When the rate limit allows the next event. It lies in the past by the unused burst.
    free: Instant,
    not_before: Instant,
    /// The namespaces whose last event was answered with an error, and when the next may be sent.
    paused: HashMap<Tenant, (Backoff, Instant)>,
    dropped: u64,
}

impl Queue {
    fn new(now: Instant) -> Self {
        Self {
            waiting: VecDeque::new(),
            free: now,
            not_before: now,
            paused: HashMap::new(),
            dropped: 0,
        }
    }

    fn add(&mut self, pod_event: PodEvent, now: Instant) {
        let mut waiting = self.waiting.iter_mut();
        if let Some(same) = waiting.find(|waiting| waiting.pod_event.is_one_event_with(&pod_event))
        {
            if same.notes.contains(&pod_event.note) {
                return;
            }
            if same.notes.len() < MOST_NOTES {
                same.notes.push(pod_event.note);
            } else {
                same.more += 1;
            }
            return;
        }
        // The metrics count the hits.
        if pod_event.gives_way {
            let others = self.waiting.iter().filter(|it| !self.is_paused(it));
            let is_paused = self.paused.contains_key(&pod_event.tenant);
            if is_paused || others.count() >= MOST_BEFORE_HIT {
                return;
            }
        }
        if self.waiting.len() >= MOST_WAITING {
            let first = |which: &dyn Fn(&Waiting) -> bool| self.waiting.iter().position(which);
            let hit = first(&|it| it.pod_event.gives_way);
            let least = hit.or_else(|| first(&|it| self.is_paused(it)));
            self.waiting.remove(least.unwrap_or(0));
            self.dropped += 1;
        }
        self.waiting.push_back(Waiting {
            notes: vec![pod_event.note.clone()],
            pod_event,
            more: 0,
            since: now,
        });
    }

    fn is_paused(&self, waiting: &Waiting) -> bool {
        self.paused.contains_key(&waiting.pod_event.tenant)
    }

    /// When an event may be sent, as far as its namespace is concerned.
    fn ready(&self, waiting: &Waiting) -> Instant {
        let gathered = waiting.since + GATHER;
        let paused = self.paused.get(&waiting.pod_event.tenant);
        paused.map_or(gathered, |(_, until)| gathered.max(*until))
    }

    /// When to send the next event; `None` if none waits.
    fn due(&self) -> Option<Instant> {
        let ready = self.waiting.iter().map(|waiting| self.ready(waiting));
        Some(ready.min()?.max(self.not_before).max(self.free))
    }

    /// The next event that is not too old.
    fn take(&mut self, now: Instant) -> Option<Waiting> {
        let before = self.waiting.len();
        let is_new = |it: &Waiting| now.saturating_duration_since(it.since) < OLDEST;
        self.waiting.retain(is_new);
        self.dropped += u64::try_from(before - self.waiting.len()).unwrap_or(u64::MAX);
        let waiting = self.waiting.iter().enumerate();
        let (next, _) = waiting.min_by_key(|(_, waiting)| self.ready(waiting))?;
        let at_once = ONE_EVERY * (BURST - 1);
        let free = self.free.max(now.checked_sub(at_once).unwrap_or(self.free));
        self.free = free + ONE_EVERY;
        self.waiting.remove(next)
    }

    /// Puts an event back that was answered with an error. Its namespace waits.
    fn pause(&mut self, waiting: Waiting, now: Instant) {
        // By then its events are too old.
        let is_over = |until: Instant| now.saturating_duration_since(until) >= OLDEST;
        self.paused.retain(|_, (_, until)| !is_over(*until));
        let paused = self.paused.entry(waiting.pod_event.tenant.clone());
        let (backoff, until) = paused.or_insert_with(|| (Backoff::default(), now));
        *until = now + backoff.after_failure(now);
        self.waiting.push_back(waiting);
    }

    /// An event of this namespace was sent, or dropped.
    fn resume(&mut self, tenant: &Tenant) {
        self.paused.remove(tenant);
    }

    /// Puts an event back for a later attempt. All wait.
    fn put_back(&mut self, waiting: Waiting, not_before: Instant) {
        self.not_before = not_before;
        self.waiting.push_front(waiting);
    }
}

/// Sends events for ever. `count_lost` returns how many notices a full queue has lost.
pub(super) async fn say(
    config: &Config,
    client: Client,
    notices: &mut mpsc::Receiver<Notice>,
    mut pod_events: mpsc::Receiver<PodEvent>,
    count_lost: impl Fn() -> u64,
) {
    let reporter = Reporter {
        controller: DRIVER_NAME.to_owned(),
        instance: Some(config.node.clone()),
    };
    let mut recorders = Recorders::new(client, reporter);
    let mut queue = Queue::new(Instant::now());
    let mut backoff = Backoff::default();
    let mut dropped = 0;
    let mut lost_before = 0;
    loop {
        let due = queue.due();
        tokio::select! {
            notice = next(notices) => queue.add(PodEvent::of(notice, &config.known), Instant::now()),
            pod_event = next(&mut pod_events) => queue.add(pod_event, Instant::now()),
            () = until(due) => {
                let Some(waiting) = queue.take(Instant::now()) else { continue };
                let delivery = tell(&mut recorders, &waiting).await;
                let now = Instant::now();
                match delivery {
                    Delivery::Once => queue.resume(&waiting.pod_event.tenant),
                    Delivery::Answered => queue.pause(waiting, now),
                    Delivery::Later => queue.put_back(waiting, now + backoff.after_failure(now)),
                }
            }
        }
        if queue.dropped > dropped {
            tracing::warn!(
                events = queue.dropped - dropped,
                "events on pods were dropped: the API server did not take them for too long"
            );
            dropped = queue.dropped;
        }
        // A full queue had notices, so this loop runs again.
        let lost_now = count_lost();
        if lost_now > lost_before {
            tracing::warn!(
                notices = lost_now - lost_before,
                "notices for events on pods were lost: the queue was full"
            );
            lost_before = lost_now;
        }
    }
}

/// The next item of a channel. Waits for ever after its end.
async fn next<T>(channel: &mut mpsc::Receiver<T>) -> T {
    match channel.recv().await {
        Some(said) => said,
        None => std::future::pending().await,
    }
}

async fn until(due: Option<Instant>) {
    match due {
        Some(due) => tokio::time::sleep_until(due.into()).await,
        None => std::future::pending().await,
    }
}

/// A recorder per text. A single one only counts further events of a pod and reason, so the text of
/// a second volume would be lost.
struct Recorders {
    client: Client,
    reporter: Reporter,
    /// The most recently used is last.
    by_note: VecDeque<(Option<String>, Recorder)>,
}

impl Recorders {
    fn new(client: Client, reporter: Reporter) -> Self {
        Self {
            client,
            reporter,
            by_note: VecDeque::new(),
        }
    }

    fn new_one(&self) -> Recorder {
        Recorder::new(self.client.clone(), self.reporter.clone())
    }

    fn of(&mut self, event: &Event) -> &Recorder {
        let known = self
            .by_note
            .iter()
            .position(|(note, _)| *note == event.note);
        let known = known.and_then(|known| self.by_note.remove(known));
        let recorder = known.unwrap_or_else(|| (event.note.clone(), self.new_one()));
        if self.by_note.len() >= MOST_NOTED {
            self.by_note.pop_front();
        }
        self.by_note.push_back(recorder);
        &self.by_note[self.by_note.len() - 1].1
    }
}

enum Delivery {
    /// It was sent, or dropped.
    Once,
    /// The API server answered with an error that may pass.
    Answered,
    /// It did not answer, or does not know the driver.
    Later,
}

async fn tell(recorders: &mut Recorders, waiting: &Waiting) -> Delivery {
    let (pod_event, event) = (&waiting.pod_event, waiting.event());
    let regarding = pod_event.regarding();
    // The text of a hit is hardly ever the same again, so its recorder is not kept.
    let once = pod_event.gives_way.then(|| recorders.new_one());
    let recorder = once.as_ref().unwrap_or_else(|| recorders.of(&event));
    let telling = recorder.publish(&event, &regarding);
    let error = match tokio::time::timeout(ANSWER, telling).await {
        Ok(Ok(())) => return Delivery::Once,
        Ok(Err(error)) => error,
        Err(_) => return Delivery::Later,
    };
    if is_final(&error) {
        // The namespace is being deleted, or the driver lacks permission: a retry does not help.
        tracing::warn!(pod = %pod_event.pod.name, tenant = %pod_event.tenant,
            reason = pod_event.reason, %error,
            "the API server refused an event; it is dropped");
        return Delivery::Once;
    }
    tracing::debug!(tenant = %pod_event.tenant, %error, "an event could not be sent; retrying");
    match &error {
        // It does not know the driver, or something between is in the way. A 429 may be about one
        // namespace (EventRateLimit).
        kube::Error::Api(status) if matches!(status.code, 401 | 503 | 504) => Delivery::Later,
        kube::Error::Api(_) => Delivery::Answered,
        _ => Delivery::Later,
    }
}

/// Whether the API server processed the request and refused it.
fn is_final(error: &kube::Error) -> bool {
    match error {
        kube::Error::Api(status) => {
            (400..500).contains(&status.code) && ![401, 408, 429].contains(&status.code)
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::json;
    use tokio::sync::watch;

    use super::*;
    use crate::k8s::client::client_of;
    use crate::k8s::outcomes::PodOutcomes;
    use crate::model::Pod;

    fn pod_event(pod: &str, reason: &'static str, note: &str) -> PodEvent {
        PodEvent {
            tenant: "ci".parse().expect("a label"),
            pod: Pod {
                uid: pod.parse().expect("a uid"),
                name: pod.to_owned(),
                service_account: None,
            },
            warns: false,
            reason,
            action: "Commit",
            note: note.to_owned(),
            gives_way: reason == "Forked",
        }
    }

    #[test]
    fn events_of_hits_delay_others_by_seconds_and_take_the_place_of_none() {
        let now = Instant::now();
        let mut queue = Queue::new(now);
        for pod in 0..1000 {
            queue.add(pod_event(&format!("h{pod}"), "Forked", "x"), now);
        }
        assert_eq!(queue.waiting.len(), MOST_BEFORE_HIT);
        // Another volume of a pod whose event waits needs no event of its own.
        queue.add(pod_event("h0", "Forked", "y"), now);
        assert_eq!(queue.waiting[0].notes, ["x", "y"]);
        for pod in 0..MOST_WAITING {
            queue.add(pod_event(&format!("p{pod}"), "Committed", "x"), now);
        }
        let all = |waiting: &Waiting| !waiting.pod_event.gives_way;
        assert!(queue.waiting.iter().all(all), "a hit took a place");
        assert_eq!(queue.waiting.len(), MOST_WAITING);
        assert_eq!(queue.waiting[0].pod_event.pod.name, "p0");
    }

    #[test]
    fn what_is_said_of_one_pod_for_one_reason_is_one_event() {
        let now = Instant::now();
        let mut queue = Queue::new(now);
        for artifact in 0..12 {
            queue.add(
                pod_event(
                    "a",
                    "Committed",
                    &format!("artifact/{artifact} is committed"),
                ),
                now,
            );
            queue.add(pod_event("b", "Committed", "artifact/o is committed"), now);
            queue.add(
                pod_event("a", "NotCommitted", "artifact/x is not committed: y"),
                now,
            );
        }
        assert_eq!(queue.due(), Some(now + GATHER));
        let notes: Vec<String> = std::iter::from_fn(|| queue.take(now))
            .map(|waiting| waiting.event().note.expect("a note"))
            .collect();
        assert_eq!(notes.len(), 3);
        assert!(
            notes[0].starts_with("artifact/0 is committed; artifact/1 "),
            "{notes:?}"
        );
        assert!(
            notes[0].ends_with("artifact/7 is committed; and 4 more"),
            "{notes:?}"
        );
        assert_eq!(
            notes[1..],
            ["artifact/o is committed", "artifact/x is not committed: y"]
        );
        assert_eq!(queue.due(), None);
    }

    #[test]
    fn a_burst_is_let_through_and_then_slowed_down() {
        let start = Instant::now();
        let mut queue = Queue::new(start);
        let mut now = start + Duration::from_secs(3600);
        for pod in 0..200 {
            queue.add(pod_event(&format!("p{pod}"), "Committed", "x"), now);
        }
        now += GATHER;
        let began = now;
        let mut at = Vec::new();
        while let Some(due) = queue.due() {
            now = now.max(due);
            queue.take(now).expect("one waits");
            at.push(now - began);
        }
        assert_eq!(at.len(), 200);
        let at_once = at.iter().filter(|at| at.is_zero()).count();
        assert_eq!(at_once, usize::try_from(BURST).expect("small"));
        assert_eq!(at[199], ONE_EVERY * 150);
    }

    #[test]
    fn the_oldest_is_dropped_when_too_much_waits_and_so_is_what_is_too_old() {
        let now = Instant::now();
        let mut queue = Queue::new(now);
        for pod in 0..=MOST_WAITING {
            queue.add(pod_event(&format!("p{pod}"), "Committed", "x"), now);
        }
        assert_eq!((queue.waiting.len(), queue.dropped), (MOST_WAITING, 1));
        assert_eq!(queue.waiting[0].pod_event.pod.name, "p1");
        let first = queue.take(now).expect("one waits");
        let later = now + Duration::from_secs(30);
        queue.put_back(first.clone(), later);
        assert_eq!(queue.due(), Some(later));
        assert_eq!(queue.take(later), Some(first));
        assert_eq!(queue.take(now + OLDEST), None);
        assert_eq!(
            queue.dropped,
            1 + u64::try_from(MOST_WAITING - 1).expect("small")
        );
    }

    #[tokio::test]
    async fn a_namespace_whose_events_are_answered_with_an_error_holds_up_no_other() {
        let (seen, mut posts) = mpsc::unbounded_channel();
        let client = client_of(move |request| {
            let path = request.uri().path();
            let is_bad = path.contains("/namespaces/bad/");
            // The test may have ended.
            let _gone = seen.send(if is_bad { "bad" } else { "ci" });
            if is_bad {
                let message = "failed calling webhook";
                return Some((
                    500,
                    json!({"status": "Failure", "code": 500, "message": message}),
                ));
            }
            Some((201, json!({"metadata": {}, "eventTime": null})))
        });
        let config = Config {
            node: "node-1".to_owned(),
            kubeconfig: None,
            look_again: Duration::from_secs(1),
            watched: watch::Sender::new(true),
            answers: watch::Sender::new(true),
            known: Arc::new(PodOutcomes::default()),
        };
        let (_notices, mut no_notices) = mpsc::channel(1);
        let (send, pod_events) = mpsc::channel(MOST_WAITING);
        let of = |tenant: &str, pod: usize| PodEvent {
            tenant: tenant.parse().expect("a label"),
            ..pod_event(&format!("{tenant}{pod}"), "Committed", "x")
        };
        let (bad, good) = (20, 3);
        for pod in 0..bad {
            send.try_send(of("bad", pod)).expect("room");
        }
        for pod in 0..good {
            send.try_send(of("ci", pod)).expect("room");
        }
        let saying = say(&config, client, &mut no_notices, pod_events, || 0);
        let mut order = Vec::new();
        let heard = async {
            let is_all = |order: &[&str]| order.iter().filter(|it| **it == "ci").count() == good;
            while !is_all(&order) {
                order.extend(posts.recv().await);
            }
        };
        tokio::select! {
            () = saying => {}
            heard = tokio::time::timeout(Duration::from_secs(10), heard) => {
                heard.expect("the others are sent");
            }
        }
        assert!(
            order.len() < good + bad,
            "a namespace is tried at its own pace"
        );
        assert_eq!(order[0], "bad", "it was the first one");
    }

    #[test]
    fn an_event_that_was_answered_with_an_error_goes_after_those_of_its_namespace() {
        let now = Instant::now();
        let mut queue = Queue::new(now);
        for pod in ["a", "b"] {
            queue.add(pod_event(pod, "Committed", "x"), now);
        }
        let first = queue.take(now).expect("one waits");
        queue.pause(first, now);
        queue.add(pod_event("c", "Forked", "x"), now);
        assert_eq!(queue.waiting.len(), 2, "no hit waits");
        let due = queue.due().expect("they wait");
        assert!(due > now && due < now + Duration::from_secs(1));
        let second = queue.take(due).expect("one waits");
        assert_eq!(second.pod_event.pod.name, "b");
        queue.resume(&second.pod_event.tenant);
        assert_eq!(queue.due(), Some(now + GATHER));
        assert_eq!(queue.take(due).expect("one waits").pod_event.pod.name, "a");
    }

    #[test]
    fn a_text_is_cut_where_the_api_would_refuse_it() {
        let now = Instant::now();
        let mut queue = Queue::new(now);
        queue.add(pod_event("a", "Committed", &"ä".repeat(1000)), now);
        let note = queue.take(now).expect("one").event().note.expect("a note");
        assert_eq!(note.len(), LONGEST_NOTE);
    }
}
