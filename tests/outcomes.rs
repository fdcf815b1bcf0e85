//! How pods end: from the fake API server to the fate of their volumes and to their events.
//!
//! Only the API server is fake: the engine uses a real filesystem, and `node` runs the same
//! `k8s::run`. The fake can go away, fall silent, cut connections, forget history and send no
//! events.

mod common;

use std::sync::Arc;
use std::time::Duration;

use baggageclaim::engine::{Notices, VolumeState};
use baggageclaim::k8s;
use baggageclaim::kubelet_double::PublishOptions;
use serde_json::json;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;

use common::api::{Api, Mood, Pod, Watches};
use common::bench::{Bench, eventually, soon};
use common::log::Log;
use common::process::NodeProcess;
use common::{Fs, require_bench, require_lab};

const OUTPUT: &[(&str, &str)] = &[("type", "output"), ("name", "o")];

/// The tasks that run beside the engine in `node`.
struct Kube {
    stop: oneshot::Sender<()>,
    watched: watch::Receiver<bool>,
    answers: watch::Receiver<bool>,
    ran: JoinHandle<()>,
}

impl Kube {
    /// As `node` starts it. Asks often where the watch did not tell, so that no test has to wait
    /// for it.
    fn start(
        bench: &Bench,
        api: &Api,
        heard: Option<tokio::sync::mpsc::Receiver<baggageclaim::engine::Notice>>,
    ) -> Self {
        Self::start_asking(bench, api, heard, Duration::from_millis(20))
    }

    fn start_asking(
        bench: &Bench,
        api: &Api,
        heard: Option<tokio::sync::mpsc::Receiver<baggageclaim::engine::Notice>>,
        look_again: Duration,
    ) -> Self {
        Self::start_knowing(bench, api, heard, look_again, Arc::default())
    }

    fn start_knowing(
        bench: &Bench,
        api: &Api,
        heard: Option<tokio::sync::mpsc::Receiver<baggageclaim::engine::Notice>>,
        look_again: Duration,
        known: Arc<k8s::PodOutcomes>,
    ) -> Self {
        let config = k8s::Config {
            node: "here".to_owned(),
            kubeconfig: Some(api.kubeconfig(&bench.lab.run_dir())),
            look_again,
            watched: watch::Sender::new(false),
            answers: watch::Sender::new(false),
            known,
        };
        let (watched, answers) = (config.watched.subscribe(), config.answers.subscribe());
        let heard = heard.unwrap_or_else(|| Notices::channel(1).1);
        let (stop, stopped) = oneshot::channel();
        let ran = tokio::spawn(k8s::run(config, bench.engine.clone(), heard, async {
            let _ = stopped.await;
        }));
        Self {
            stop,
            watched,
            answers,
            ran,
        }
    }

    /// Waits until it is told whether the watch runs.
    async fn tells(&mut self, watched: bool) {
        let told = self.watched.wait_for(|told| *told == watched);
        soon("it is told", told).await.expect("it runs");
    }

    async fn stop(self) {
        drop(self.stop);
        soon("the end of the watch", self.ran)
            .await
            .expect("no panic");
    }
}

/// An API server that is watched, and its pod `a`, which runs and has its [`OUTPUT`] published as
/// `v`.
async fn with_a_running_pod(bench: &Bench) -> (Api, Kube) {
    let api = Api::start().await;
    let kube = Kube::start(bench, &api, None);
    watched(&api).await;
    api.put(&Pod::new("a").phase("Running"));
    bench.publish("a", "v", OUTPUT).await;
    (api, kube)
}

/// The rounds that ask are this far apart where only the watch is to be seen working.
const NO_ROUNDS: Duration = Duration::from_secs(3600);

async fn gone(bench: &Bench, volume: &str) {
    eventually(&format!("the end of {volume}"), || {
        bench.row(volume).is_none()
    })
    .await;
}

async fn committed(bench: &Bench, name: &str) {
    eventually(&format!("{name} is committed"), || {
        bench.artifact(name).is_some_and(|row| row.durable)
    })
    .await;
}

async fn watched(api: &Api) {
    eventually("the watch runs", || api.watches() == 1).await;
}

async fn event(api: &Api, pod: &str, kind: &str, reason: &str, note: &str) {
    let is_told = || {
        let events = api.events(pod);
        events
            .iter()
            .any(|(k, r, n, _)| k == kind && r == reason && n == note)
    };
    let deadline = std::time::Instant::now() + common::bench::NEVER;
    while !is_told() {
        assert!(
            std::time::Instant::now() < deadline,
            "{reason} {note:?} is not among {:#?}",
            api.events(pod)
        );
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn notices_that_a_full_queue_lost_are_counted_in_the_log() {
    let (notices, heard) = Notices::channel(1);
    let bench = require_bench!(|config| config.notices = Some(notices));
    for name in ["a", "b", "c"] {
        let kept = [("type", "output"), ("name", name), ("commit", "always")];
        bench.publish(name, name, &kept).await;
        bench.unpublish(name).await;
    }
    // No receiver exists yet.
    eventually("all but one are lost", || bench.engine.lost_notices() == 2).await;
    let (log, _here) = Log::begin();
    let api = Api::start().await;
    let kube = Kube::start(&bench, &api, Some(heard));
    eventually("it is said", || {
        log.says("notices=2") && log.says("the queue was full")
    })
    .await;
    kube.stop().await;
    bench.finish().await;
}

fn output(name: &str) -> [(&str, &str); 2] {
    [("type", "output"), ("name", name)]
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pods_phase_decides_before_and_after_its_volumes_left() {
    let (notices, heard) = Notices::channel(64);
    let bench = require_bench!(|config| config.notices = Some(notices));
    let api = Api::start().await;
    let kube = Kube::start_asking(&bench, &api, Some(heard), NO_ROUNDS);
    watched(&api).await;
    for pod in ["early", "late", "fails"] {
        api.put(&Pod::new(pod));
        bench.publish(pod, pod, &output(pod)).await;
        api.put(&Pod::new(pod).phase("Running"));
    }
    api.put(&Pod::new("early").succeeded());
    eventually("the word has come", || {
        bench.engine.awaited_outcomes().len() == 2
    })
    .await;
    assert_eq!(
        bench.row("early").expect("published").state,
        VolumeState::Published
    );
    bench.unpublish("early").await;
    committed(&bench, "artifact/early").await;

    bench.unpublish("late").await;
    bench.unpublish("fails").await;
    let awaits = |volume| {
        bench
            .row(volume)
            .is_some_and(|row| row.state == VolumeState::AwaitingOutcome)
    };
    eventually("they wait", || awaits("late") && awaits("fails")).await;
    api.put(&Pod::new("late").succeeded());
    committed(&bench, "artifact/late").await;
    api.put(&Pod::new("fails").failed(2));
    gone(&bench, "fails").await;
    assert!(bench.artifact("artifact/fails").is_none());

    event(
        &api,
        "early",
        "Normal",
        "Committed",
        "artifact/early is committed",
    )
    .await;
    let why = "artifact/fails is not committed: container main exited with 2";
    event(&api, "fails", "Normal", "NotCommitted", why).await;
    // No round took part in this.
    assert_eq!(api.asked("GET /api/v1/namespaces/ci/"), 0);
    kube.stop().await;
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_is_told_what_its_volumes_started_from_in_one_event() {
    let (notices, heard) = Notices::channel(64);
    let bench = require_bench!(|config| config.notices = Some(notices));
    let api = Api::start().await;
    for name in ["a", "b"] {
        let kept = [&output(name)[..], &[("commit", "always")]].concat();
        bench.publish("maker", name, &kept).await;
        bench.unpublish(name).await;
        committed(&bench, &format!("artifact/{name}")).await;
        let from = format!("artifact/{name}");
        let input = [("type", "input"), ("from", &from)];
        bench.publish("reader", &format!("in-{name}"), &input).await;
    }
    // It hears of both at once.
    let kube = Kube::start(&bench, &api, Some(heard));
    eventually("it is told", || !api.events("reader").is_empty()).await;
    let events = api.events("reader");
    let [(kind, reason, note, _)] = &events[..] else {
        panic!("{events:?}");
    };
    assert_eq!((&**kind, &**reason), ("Normal", "Forked"));
    for name in ["a", "b"] {
        let forked = format!("forked artifact/{name}, ");
        assert!(
            note.contains(&forked) && note.contains(" ago on this node"),
            "{note}"
        );
        bench.unpublish(&format!("in-{name}")).await;
    }
    kube.stop().await;
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_artifact_says_which_images_made_it_where_the_watch_has_told() {
    let known = Arc::<k8s::PodOutcomes>::default();
    let pods = known.clone();
    let bench = require_bench!(|config| config.pods = Some(pods));
    let api = Api::start().await;
    let kube = Kube::start_knowing(&bench, &api, None, NO_ROUNDS, known);
    watched(&api).await;
    let images = |name: &str| {
        let maker = bench.artifact(name).expect("it is there").made_by;
        let maker = maker.expect("it says who made it");
        assert_eq!(maker.pod.service_account.as_deref(), Some("builder"));
        (maker.pod.name, maker.images)
    };
    let publish = async |pod: &str, attributes: &[(&str, &str)]| {
        let mut request = bench.request(pod, pod, attributes);
        request.pod.service_account = Some("builder".to_owned());
        bench.engine.publish(request).await.expect("publish");
    };

    let mut pod = Pod::new("a").succeeded();
    pod.0["spec"]["containers"][0]["image"] = json!("golang:1.25");
    pod.0["spec"]["initContainers"] = json!([{"name": "fetch", "image": "git"}]);
    pod.0["status"]["containerStatuses"][0]["imageID"] =
        json!("docker.io/library/golang@sha256:0123");
    publish("a", &output("a")).await;
    api.put(&pod);
    bench.unpublish("a").await;
    committed(&bench, "artifact/a").await;
    let expected = ["golang:1.25@sha256:0123", "git"].map(str::to_owned);
    assert_eq!(images("artifact/a"), ("a".to_owned(), expected.to_vec()));

    // No one waits for a pod that the API server never reported.
    let always = [("type", "output"), ("name", "b"), ("commit", "always")];
    publish("b", &always).await;
    bench.unpublish("b").await;
    committed(&bench, "artifact/b").await;
    assert_eq!(images("artifact/b"), ("b".to_owned(), Vec::new()));
    kube.stop().await;
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watch_that_is_cut_goes_on_where_it_was() {
    let bench = require_bench!();
    let api = Api::start().await;
    let kube = Kube::start_asking(&bench, &api, None, NO_ROUNDS);
    watched(&api).await;
    api.put(&Pod::new("a"));
    bench.publish("a", "v", OUTPUT).await;
    bench.unpublish("v").await;
    api.be(Mood::Away);
    // It ends and is deleted unobserved: the history has both.
    api.put(&Pod::new("a").succeeded());
    api.remove(&Pod::new("a"));
    api.be(Mood::Serving);
    committed(&bench, "artifact/o").await;
    assert_eq!(api.asked("GET /api/v1/namespaces/ci/"), 0);
    kube.stop().await;
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watch_resumes_after_any_outage_of_the_api_server() {
    let bench = require_bench!();
    let (api, kube) = with_a_running_pod(&bench).await;
    bench.unpublish("v").await;
    api.be(Mood::Away);
    api.put(&Pod::new("a").succeeded());
    api.remove(&Pod::new("a"));
    // Many rounds long, and so long that the watch comes back a good while after the first that
    // finds no such pod.
    eventually("it was tried again and again", || api.turned_away() >= 4).await;
    api.be(Mood::Serving);
    committed(&bench, "artifact/o").await;
    assert_eq!(api.asked("GET /api/v1/namespaces/default/pods"), 1);
    kube.stop().await;
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watch_of_an_api_server_that_lost_its_power_costs_no_outcome_while_another_answers() {
    let bench = require_bench!();
    let api = Api::start().await;
    let kube = Kube::start(&bench, &api, None);
    watched(&api).await;
    for pod in ["marked", "done"] {
        api.put(&Pod::new(pod).phase("Running"));
        bench.publish(pod, pod, &output(pod)).await;
    }
    api.be(Mood::Dead);
    api.be(Mood::Serving);
    // Deleted as always, with a word before; and by who is quick.
    let marked = Pod::new("marked").annotated("outcome", "succeeded");
    api.put(&marked);
    api.put(&Pod::new("done").succeeded());
    for pod in ["marked", "done"] {
        api.remove(&Pod::new(pod));
        bench.unpublish(pod).await;
    }
    committed(&bench, "artifact/marked").await;
    committed(&bench, "artifact/done").await;
    kube.stop().await;
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_list_and_a_watch_without_answers_time_out() {
    let bench = require_bench!();
    let api = Api::start().await;
    api.be(Mood::Dead);
    let mut kube = Kube::start(&bench, &api, None);
    eventually("another list is asked for", || api.turned_away() >= 2).await;
    assert!(!*kube.watched.borrow());
    api.be(Mood::Serving);
    kube.tells(true).await;
    watched(&api).await;
    // A watch that runs; and the begin of the next.
    api.be(Mood::Dead);
    let before = api.turned_away();
    kube.tells(false).await;
    eventually("it is begun twice", || api.turned_away() >= before + 2).await;
    api.be(Mood::Serving);
    kube.tells(true).await;
    watched(&api).await;
    kube.stop().await;
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_api_server_that_was_put_back_to_an_earlier_state_is_heard_again() {
    let bench = require_bench!();
    let api = Api::start().await;
    for pod in ["x", "y", "z"] {
        api.put(&Pod::new(pod));
    }
    let kube = Kube::start_asking(&bench, &api, None, NO_ROUNDS);
    watched(&api).await;
    bench.publish("a", "v", OUTPUT).await;
    bench.unpublish("v").await;
    api.be(Mood::Away);
    api.be_restored();
    api.put(&Pod::new("a").phase("Running"));
    api.be(Mood::Serving);
    watched(&api).await;
    api.put(&Pod::new("a").succeeded());
    committed(&bench, "artifact/o").await;
    kube.stop().await;
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn whether_it_watches_is_told_also_where_nothing_happens() {
    let bench = require_bench!();
    let api = Api::start().await;
    api.be(Mood::Away);
    let mut kube = Kube::start(&bench, &api, None);
    eventually("it was tried", || api.turned_away() > 0).await;
    assert!(!*kube.watched.borrow());
    for _ in 0..2 {
        api.be(Mood::Serving);
        // No pod comes or goes, so that a watch that goes on says nothing.
        kube.tells(true).await;
        watched(&api).await;
        api.be(Mood::Away);
        kube.tells(false).await;
    }
    kube.stop().await;
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_gap_the_list_tells_and_who_is_missing_there_did_not_succeed() {
    let (notices, heard) = Notices::channel(64);
    let bench = require_bench!(|config| config.notices = Some(notices));
    let api = Api::start().await;
    let kube = Kube::start(&bench, &api, Some(heard));
    watched(&api).await;
    for pod in ["there", "missing", "running"] {
        api.put(&Pod::new(pod).phase("Running"));
        bench.publish(pod, pod, &output(pod)).await;
    }
    api.be(Mood::Away);
    api.put(&Pod::new("there").succeeded());
    // It succeeded, but no one will ever know.
    api.put(&Pod::new("missing").succeeded());
    api.remove(&Pod::new("missing"));
    // Another pod of the same name is not the same pod.
    let mut other = Pod::new("missing").succeeded();
    other.0["metadata"]["uid"] = "another".into();
    api.put(&other);
    api.forget_history();
    for volume in ["there", "missing"] {
        bench.unpublish(volume).await;
    }
    api.be(Mood::Serving);
    committed(&bench, "artifact/there").await;
    gone(&bench, "missing").await;
    assert!(bench.artifact("artifact/missing").is_none());
    let why = "artifact/missing is not committed: the pod is gone, and its end was not observed";
    event(&api, "missing", "Warning", "NotCommitted", why).await;
    // A running pod stays undecided.
    assert_eq!(bench.engine.awaited_outcomes().len(), 1);
    api.put(&Pod::new("running").succeeded());
    bench.unpublish("running").await;
    committed(&bench, "artifact/running").await;
    kube.stop().await;
    bench.finish().await;
}

/// Pods that have ended stay in the API, and each may have 1.5 MiB.
#[tokio::test(flavor = "multi_thread")]
async fn the_pods_are_listed_in_pages_and_all_pages_count() {
    let bench = require_bench!();
    let api = Api::start().await;
    for number in 100..160 {
        api.put(&Pod::new(&format!("{number}")).succeeded());
    }
    bench.publish("159", "last", &output("last")).await;
    bench.publish("160", "new", &output("new")).await;
    let kube = Kube::start_asking(&bench, &api, None, NO_ROUNDS);
    watched(&api).await;
    assert_eq!(api.asked("GET /api/v1/pods"), 4, "three pages and a watch");
    bench.unpublish("last").await;
    committed(&bench, "artifact/last").await;
    api.put(&Pod::new("160").succeeded());
    bench.unpublish("new").await;
    committed(&bench, "artifact/new").await;
    kube.stop().await;
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_an_api_server_publishing_goes_on_and_seals_wait_until_it_is_back() {
    let bench = require_bench!();
    let api = Api::start().await;
    api.be(Mood::Away);
    let kube = Kube::start(&bench, &api, None);
    bench.publish("a", "v", OUTPUT).await;
    bench.unpublish("v").await;
    eventually("it waits", || {
        bench
            .row("v")
            .is_some_and(|row| row.state == VolumeState::AwaitingOutcome)
    })
    .await;
    bench.publish("b", "w", &[]).await;
    bench.unpublish("w").await;
    api.put(&Pod::new("a").succeeded());
    assert!(bench.artifact("artifact/o").is_none());
    api.be(Mood::Serving);
    committed(&bench, "artifact/o").await;
    kube.stop().await;
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_api_server_that_is_away_for_too_long_costs_the_commit_and_hears_of_it_when_it_is_back()
{
    let (notices, heard) = Notices::channel(64);
    let bench = require_bench!(|config| {
        config.notices = Some(notices);
        config.outcome_wait = Duration::from_millis(100);
    });
    let api = Api::start().await;
    let kube = Kube::start(&bench, &api, Some(heard));
    watched(&api).await;
    api.put(&Pod::new("a").phase("Running"));
    bench.publish("a", "v", OUTPUT).await;
    api.be(Mood::Silent);
    api.put(&Pod::new("a").succeeded());
    bench.unpublish("v").await;
    gone(&bench, "v").await;
    assert!(bench.artifact("artifact/o").is_none());
    api.be(Mood::Serving);
    let why = "artifact/o is not committed: the outcome of its pod was not reported within 100ms";
    event(&api, "a", "Warning", "NotCommitted", why).await;
    assert!(
        bench.artifact("artifact/o").is_none(),
        "too late is too late"
    );
    kube.stop().await;
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watch_that_says_nothing_any_more_costs_no_outcome() {
    let bench = require_bench!();
    let (api, kube) = with_a_running_pod(&bench).await;
    api.go_deaf();
    api.put(&Pod::new("a").succeeded());
    bench.unpublish("v").await;
    committed(&bench, "artifact/o").await;
    kube.stop().await;
    bench.finish().await;
}

/// A pod succeeds and is gone while those who would watch get this, and others ask by name and are
/// answered.
async fn costs_no_outcome(bench: Bench, watches: Watches) {
    let api = Api::start().await;
    let mut kube = Kube::start(&bench, &api, None);
    kube.tells(true).await;
    api.put(&Pod::new("a").phase("Running"));
    bench.publish("a", "v", OUTPUT).await;
    api.answer_watches(watches);
    api.put(&Pod::new("a").succeeded());
    api.remove(&Pod::new("a"));
    bench.unpublish("v").await;
    // Longer than a watch is given to tell what came before it.
    tokio::time::sleep(Duration::from_secs(4)).await;
    let row = bench.row("v").expect("it waits for a watch that tells");
    assert_eq!(row.state, VolumeState::AwaitingOutcome);
    assert!(!*kube.watched.borrow());
    // The API server may have been restored: that is checked only after a failure.
    assert!(api.asked("GET /api/v1/namespaces/default/pods") > 0);
    api.answer_watches(Watches::Served);
    committed(&bench, "artifact/o").await;
    kube.tells(true).await;
    kube.stop().await;
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watch_that_a_proxy_refuses_is_none() {
    let words = "<html>\n<h1>Bad Gateway</h1>\n</html>\n".to_owned();
    costs_no_outcome(require_bench!(), Watches::Refused(502, words)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watch_that_is_refused_without_a_word_is_none() {
    costs_no_outcome(require_bench!(), Watches::Refused(500, String::new())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watch_that_is_cut_before_it_says_anything_is_none() {
    costs_no_outcome(require_bench!(), Watches::Cut).await;
}

#[tokio::test]
async fn a_watch_that_is_refused_again_and_again_is_broken_once() {
    let bench = require_bench!();
    let (log, _here) = Log::begin();
    let api = Api::start().await;
    for (refused, answers) in [
        (Watches::forbidden(), true),
        (Watches::Refused(401, "who are you?".to_owned()), true),
        (Watches::Refused(500, "an error\n".to_owned()), false),
        (Watches::Cut, false),
    ] {
        api.answer_watches(Watches::Served);
        // One after the other would wait the longer the more failed before it.
        let mut kube = Kube::start(&bench, &api, None);
        kube.tells(true).await;
        log.forget();
        api.answer_watches(refused.clone());
        kube.tells(false).await;
        let before = api.asked("GET /api/v1/pods");
        eventually("it is tried again and again", || {
            assert!(!*kube.watched.borrow(), "{refused:?}");
            api.asked("GET /api/v1/pods") >= before + 3
        })
        .await;
        assert_eq!(*kube.answers.borrow(), answers, "{refused:?}");
        assert!(log.says("the watch over pods is broken"), "{refused:?}");
        assert!(!log.says("works again"), "{refused:?}");
        kube.stop().await;
    }
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_api_server_that_has_too_much_to_do_answers() {
    let bench = require_bench!();
    let api = Api::start().await;
    api.be(Mood::Busy);
    let mut kube = Kube::start(&bench, &api, None);
    let told = kube.answers.wait_for(|answers| *answers);
    soon("it is told", told).await.expect("it runs");
    // Until then each refusal was heard by who had asked, and not tried again beneath them.
    assert_eq!(api.asked("GET"), 1);
    assert!(!*kube.watched.borrow());
    api.be(Mood::Serving);
    kube.tells(true).await;
    kube.stop().await;
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_watch_tells_while_it_is_asked_by_name_is_heard_first() {
    let bench = require_bench!();
    let (api, kube) = with_a_running_pod(&bench).await;
    // The running watch reports nothing; the next one does, at the last moment, during a query.
    api.go_deaf();
    api.be_slow(Duration::from_millis(1450), Duration::from_millis(1600));
    api.put(&Pod::new("a").succeeded());
    api.remove(&Pod::new("a"));
    bench.unpublish("v").await;
    committed(&bench, "artifact/o").await;
    kube.stop().await;
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_decided_survives_the_driver_and_the_list_stands_for_what_it_missed() {
    let bench = require_bench!();
    let api = Api::start().await;
    let kube = Kube::start(&bench, &api, None);
    watched(&api).await;
    for pod in ["decided", "listed", "vanished", "waits"] {
        api.put(&Pod::new(pod).phase("Running"));
        bench.publish(pod, pod, &output(pod)).await;
    }
    api.put(&Pod::new("decided").succeeded());
    eventually("the word has come", || {
        bench.engine.awaited_outcomes().len() == 3
    })
    .await;
    bench.unpublish("waits").await;
    kube.stop().await;
    let bench = bench.restart().await;
    // Without a watch: one pod ended and exists, two are deleted, and one of those had reported its
    // end before.
    api.remove(&Pod::new("decided"));
    api.put(&Pod::new("listed").succeeded());
    api.remove(&Pod::new("vanished"));
    api.put(&Pod::new("waits").succeeded());
    for volume in ["decided", "listed", "vanished"] {
        bench.unpublish(volume).await;
    }
    // The outcome of one is on disk, so no query is needed.
    committed(&bench, "artifact/decided").await;
    let kube = Kube::start(&bench, &api, None);
    for name in ["artifact/listed", "artifact/waits"] {
        committed(&bench, name).await;
    }
    gone(&bench, "vanished").await;
    assert!(bench.artifact("artifact/vanished").is_none());
    // Twice restarted, the same again.
    kube.stop().await;
    let bench = bench.restart().await;
    let kube = Kube::start(&bench, &api, None);
    watched(&api).await;
    assert!(
        bench.artifact("artifact/listed").is_some()
            && bench.artifact("artifact/vanished").is_none()
    );
    kube.stop().await;
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn annotations_decide_and_one_with_a_mistake_is_told_and_is_no_success() {
    let (notices, heard) = Notices::channel(64);
    let bench = require_bench!(|config| config.notices = Some(notices));
    let api = Api::start().await;
    // Said before there is any volume.
    api.put(&Pod::new("first").annotated("outcome", "succeeded"));
    let kube = Kube::start(&bench, &api, Some(heard));
    watched(&api).await;
    for pod in [
        "first", "execed", "refused", "typo", "mended", "step", "nobody",
    ] {
        if pod != "first" {
            api.put(&Pod::new(pod).phase("Running"));
        }
        bench.publish(pod, pod, &output(pod)).await;
    }
    api.put(&Pod::new("execed").annotated("outcome", "succeeded"));
    // The end of a pod that only slept.
    api.put(
        &Pod::new("execed")
            .annotated("outcome", "succeeded")
            .deleted(5)
            .failed(137),
    );
    api.remove(&Pod::new("execed"));
    api.put(
        &Pod::new("refused")
            .annotated("outcome", "failed")
            .succeeded(),
    );
    let typo = "the annotation baggageclaim.concourse-ci.org/outcome holds \"Succeeded\"; it must be succeeded or failed";
    for pod in ["typo", "mended"] {
        api.put(&Pod::new(pod).annotated("outcome", "Succeeded"));
        event(&api, pod, "Warning", "BadAnnotation", typo).await;
    }
    api.put(
        &Pod::new("typo")
            .annotated("outcome", "Succeeded")
            .succeeded(),
    );
    api.put(&Pod::new("mended").annotated("outcome", "succeeded"));
    let step = Pod::new("step").annotated("outcome-container", "main");
    // Others of the pod still run.
    api.put(&step.exited("main", 0, 10).phase("Running"));
    api.put(&Pod::new("nobody").annotated("outcome-container", "mian"));
    let mian = "the annotation baggageclaim.concourse-ci.org/outcome-container names \"mian\", and the pod has no such container";
    event(&api, "nobody", "Warning", "BadAnnotation", mian).await;
    api.put(
        &Pod::new("nobody")
            .annotated("outcome-container", "mian")
            .succeeded(),
    );
    for volume in [
        "first", "execed", "refused", "typo", "mended", "step", "nobody",
    ] {
        bench.unpublish(volume).await;
    }
    for name in [
        "artifact/first",
        "artifact/execed",
        "artifact/mended",
        "artifact/step",
    ] {
        committed(&bench, name).await;
    }
    for volume in ["refused", "typo", "nobody"] {
        gone(&bench, volume).await;
        assert!(bench.artifact(&format!("artifact/{volume}")).is_none());
    }
    event(
        &api,
        "typo",
        "Normal",
        "NotCommitted",
        &format!("artifact/typo is not committed: {typo}"),
    )
    .await;
    kube.stop().await;
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_that_was_told_to_end_did_not_succeed_whatever_it_exits_with() {
    let (notices, heard) = Notices::channel(64);
    let bench = require_bench!(|config| config.notices = Some(notices));
    let api = Api::start().await;
    // Both is past when the driver comes: then the times decide.
    api.put(
        &Pod::new("before")
            .exited("main", 0, 10)
            .phase("Succeeded")
            .deleted(12),
    );
    api.put(
        &Pod::new("after")
            .exited("main", 0, 13)
            .phase("Succeeded")
            .deleted(12),
    );
    let kube = Kube::start(&bench, &api, Some(heard));
    watched(&api).await;
    for pod in ["before", "after"] {
        bench.publish(pod, pod, &output(pod)).await;
    }
    for pod in ["cancelled", "forced", "evicted", "done"] {
        api.put(&Pod::new(pod).phase("Running"));
        bench.publish(pod, pod, &output(pod)).await;
    }
    // It was asked to end, and exits with 0. Its clock is slow; no one reads it.
    api.put(&Pod::new("cancelled").phase("Running").deleted(20));
    api.put(
        &Pod::new("cancelled")
            .exited("main", 0, 1)
            .phase("Succeeded")
            .deleted(20),
    );
    api.remove(&Pod::new("cancelled"));
    // Deleted with grace 0: gone from one moment to the next.
    api.remove(&Pod::new("forced"));
    // Kubelet ends it, and it exits with 0. It is not deleted.
    api.put(&Pod::new("evicted").succeeded().evicted());
    // Deleted after its end, as CI systems do.
    api.put(&Pod::new("done").succeeded());
    api.put(&Pod::new("done").succeeded().deleted(10));
    api.remove(&Pod::new("done"));
    for volume in ["before", "after", "cancelled", "forced", "evicted", "done"] {
        bench.unpublish(volume).await;
    }
    for name in ["artifact/before", "artifact/done"] {
        committed(&bench, name).await;
    }
    for volume in ["after", "cancelled", "forced", "evicted"] {
        gone(&bench, volume).await;
        assert!(bench.artifact(&format!("artifact/{volume}")).is_none());
    }
    let why = "artifact/cancelled is not committed: the pod was deleted before it had ended";
    event(&api, "cancelled", "Normal", "NotCommitted", why).await;
    let why = "artifact/forced is not committed: the pod is gone, and had not ended when it was last seen";
    event(&api, "forced", "Normal", "NotCommitted", why).await;
    let why = "artifact/evicted is not committed: the pod was told to end: TerminationByKubelet";
    event(&api, "evicted", "Normal", "NotCommitted", why).await;
    kube.stop().await;
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn events_that_fail_are_told_later_and_those_refused_are_dropped_and_neither_holds_up_an_outcome()
 {
    let (notices, heard) = Notices::channel(64);
    let bench = require_bench!(|config| config.notices = Some(notices));
    let api = Api::start().await;
    api.refuse_events(Some(403));
    let kube = Kube::start(&bench, &api, Some(heard));
    watched(&api).await;
    let posts = || api.asked("POST");
    let step = async |pod: &str| {
        api.put(&Pod::new(pod).phase("Running"));
        bench.publish(pod, pod, &output(pod)).await;
        api.put(&Pod::new(pod).succeeded());
        bench.unpublish(pod).await;
        committed(&bench, &format!("artifact/{pod}")).await;
    };
    step("refused").await;
    eventually("it was tried", || posts() == 1).await;
    api.refuse_events(Some(500));
    step("later").await;
    eventually("it was tried twice more", || posts() >= 3).await;
    api.refuse_events(None);
    event(
        &api,
        "later",
        "Normal",
        "Committed",
        "artifact/later is committed",
    )
    .await;
    assert_eq!(api.events("later").len(), 1);
    assert_eq!(api.events("refused"), []);
    kube.stop().await;
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_again_is_counted_and_what_comes_together_is_one_event() {
    let (notices, heard) = Notices::channel(64);
    let bench = require_bench!(|config| {
        config.notices = Some(notices);
        config.input_wait = Duration::from_millis(700);
    });
    let api = Api::start().await;
    let kube = Kube::start(&bench, &api, Some(heard));
    watched(&api).await;
    api.put(&Pod::new("maker").phase("Running"));
    bench.publish("maker", "one", &output("one")).await;
    bench.publish("maker", "two", &output("two")).await;
    api.put(&Pod::new("user"));
    let input = &[("type", "input"), ("from", "artifact/one")];
    // Kubelet asks again and again.
    for times in 1..=3 {
        soon("an answer", bench.try_publish("user", "in", input))
            .await
            .expect_err("its maker still runs");
        eventually("it is told", || {
            api.events("user").iter().map(|event| event.3).sum::<u64>() >= times
        })
        .await;
    }
    let note = "waiting up to 700ms for artifact/one: pod maker is still making it".to_owned();
    assert_eq!(
        api.events("user"),
        [("Normal".to_owned(), "WaitingForInput".to_owned(), note, 3)]
    );
    api.put(&Pod::new("maker").succeeded());
    bench.unpublish("one").await;
    bench.unpublish("two").await;
    committed(&bench, "artifact/one").await;
    committed(&bench, "artifact/two").await;
    eventually("it is told", || !api.events("maker").is_empty()).await;
    let events = api.events("maker");
    assert_eq!(events.len(), 1, "{events:?}");
    assert_eq!(events[0].1, "Committed");
    // And what is another thing is another event, though the pod and the reason are the same.
    for name in ["early", "late"] {
        api.put(&Pod::new("both").phase("Running"));
        bench.publish("both", name, &output(name)).await;
    }
    api.put(&Pod::new("both").succeeded());
    for name in ["early", "late"] {
        bench.unpublish(name).await;
        let note = format!("artifact/{name} is committed");
        event(&api, "both", "Normal", "Committed", &note).await;
    }
    kube.stop().await;
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_binary_serves_without_an_api_server_and_remembers_over_kill_9_what_it_still_has_to_learn()
 {
    let lab = require_lab!(Fs::Ext4);
    let api = Api::start().await;
    api.be(Mood::Away);
    let node = NodeProcess::start_with_api(&lab, &api, &[]);
    let kubelet = node.kubelet().await;
    let pod = kubelet.pod_with_uid("ci", "a", "a");
    pod.publish("out", output("o"), PublishOptions::default())
        .await
        .expect("publish");
    pod.unpublish("out").await.expect("unpublish");
    // Once, and calmly: it is waited for.
    node.logged("the watch over pods is broken", 1).await;
    let log = node.kill().await;
    assert!(log.contains("WARN") && !log.contains("ERROR"), "{log}");

    let node = NodeProcess::start_with_api(&lab, &api, &[]);
    node.kubelet().await;
    api.put(&Pod::new("a").succeeded());
    api.be(Mood::Serving);
    event(&api, "a", "Normal", "Committed", "artifact/o is committed").await;
    // Committed content exists for the next driver, and unknown content is refused as before.
    let user = kubelet.pod_with_uid("ci", "user", "user");
    let input = [("type", "input"), ("from", "artifact/o")];
    user.publish("in", input, PublishOptions::default())
        .await
        .expect("publish");
    user.unpublish("in").await.expect("unpublish");
    let log = node.terminate().await;
    assert!(
        !log.contains("panicked") && !log.contains("the-driver"),
        "{log}"
    );
    assert_eq!(lab.close(), [""; 0].map(std::path::PathBuf::from));
}
