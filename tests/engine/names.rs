//! Which volume gets a name: a resource cache's first writer, everything else's last writer, and
//! only a step whose outcome or marker allows it.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use baggageclaim::engine::{Engine, OutcomeReport, Pods};
use baggageclaim::model::{Outcome, PodUid};

use crate::common::bench::{Bench, Ground, eventually};
use crate::common::require_bench;

const TASK: &[(&str, &str)] = &[("type", "task-cache"), ("key", "k")];
const RESOURCE: &[(&str, &str)] = &[("type", "resource-cache"), ("key", "k")];

/// Says of every pod that it ran the same.
#[derive(Debug)]
struct SameImages;

impl Pods for SameImages {
    fn images(&self, _pod: &PodUid) -> Vec<String> {
        vec!["golang:1.25".to_owned()]
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_made_an_artifact_is_known_after_a_restart_a_merge_and_a_rebuild() {
    for ground in Ground::ALL {
        let bench = require_bench!(on ground, |config| config.pods = Some(Arc::new(SameImages)));
        // As many as are merged where commits are stacked.
        for round in 0..20 {
            let volume = format!("v{round}");
            let mut request = bench.request(&volume, &volume, TASK);
            request.pod.service_account = Some("builder".to_owned());
            bench.engine.publish(request).await.expect("publish");
            let file = bench.target(&volume).join(&volume);
            fs::write(file, "made").expect("write");
            bench.outcome(&volume, Outcome::Succeeded).await;
            bench.unpublish(&volume).await;
            bench.quiet().await;
        }
        bench.engine.reap().await.expect("reap");
        let is_known = |bench: &Bench, when: &str| {
            let row = bench.artifact("task-cache/k").expect("it is there");
            let layers = row.layers;
            assert!(layers < 20, "{layers} layers {when}");
            let maker = row.made_by;
            let maker = maker.unwrap_or_else(|| panic!("{}: no maker {when}", ground.name()));
            assert_eq!((maker.pod.uid.as_str(), &*maker.pod.name), ("v19", "v19"));
            assert_eq!(maker.pod.service_account.as_deref(), Some("builder"));
            assert_eq!(maker.images, ["golang:1.25"], "{}: {when}", ground.name());
        };
        is_known(&bench, "after a merge");
        let bench = bench.restart().await;
        is_known(&bench, "after a restart");
        let rebuild = |pool: &Path| {
            Engine::rebuild_index(pool).expect("rebuilt");
        };
        let bench = bench.restart_after(rebuild).await;
        is_known(&bench, "after a rebuild");
        bench.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_cache_comes_back_when_its_pod_succeeded_and_only_then() {
    for ground in Ground::ALL {
        let bench = require_bench!(on ground);
        let (target, published) = bench.publish("pod-1", "v1", TASK).await;
        assert_eq!((published.parent, published.from), (None, None));
        fs::write(target.join("file"), "one").expect("write");
        bench.unpublish("v1").await;
        bench.outcome("pod-1", Outcome::Succeeded).await;
        bench.quiet().await;

        let (target, published) = bench.publish("pod-2", "v2", TASK).await;
        assert!(published.parent.is_some(), "{}: a fork", ground.name());
        assert_eq!(
            fs::read_to_string(target.join("file")).expect("read"),
            "one"
        );
        fs::write(target.join("file"), "two").expect("write");
        bench.outcome("pod-2", Outcome::Failed).await;
        bench.unpublish("v2").await;
        bench.quiet().await;
        assert_eq!(
            bench.look("v3", TASK, "file").await.as_deref(),
            Some("one"),
            "a failed pod commits nothing"
        );
        bench.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_writer_of_a_resource_cache_keeps_it_whoever_began_first() {
    for ground in Ground::ALL {
        let bench = require_bench!(on ground);
        for pod in ["a", "b", "c"] {
            let (target, published) = bench.publish(pod, &format!("v-{pod}"), RESOURCE).await;
            assert_eq!(
                published.parent, None,
                "nothing is there yet: all three fetch"
            );
            fs::write(target.join("by"), pod).expect("write");
        }
        // The first that ends does not succeed, and leaves the key free.
        bench.unpublish("v-c").await;
        bench.outcome("c", Outcome::Failed).await;
        bench.quiet().await;
        assert!(bench.artifact("resource-cache/k").is_none());
        for pod in ["b", "a"] {
            bench.unpublish(&format!("v-{pod}")).await;
            bench.outcome(pod, Outcome::Succeeded).await;
            bench.quiet().await;
        }
        assert_eq!(bench.engine.artifacts(None).len(), 1, "{}", ground.name());

        // From here on it is immutable: what a step does to its view is the step's own affair.
        let (target, published) = bench.publish("d", "v-d", RESOURCE).await;
        assert_eq!(
            published.from,
            Some("resource-cache/k".parse().expect("reference"))
        );
        assert_eq!(fs::read_to_string(target.join("by")).expect("read"), "b");
        fs::write(target.join("by"), "d").expect("a step may change its view");
        bench.outcome("d", Outcome::Succeeded).await;
        bench.unpublish("v-d").await;
        bench.quiet().await;
        assert_eq!(
            bench.look("v-e", RESOURCE, "by").await.as_deref(),
            Some("b")
        );
        let bench = bench.restart().await;
        assert_eq!(
            bench.look("v-f", RESOURCE, "by").await.as_deref(),
            Some("b")
        );
        bench.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_last_writer_of_a_task_cache_wins_whoever_began_last() {
    for ground in Ground::ALL {
        let bench = require_bench!(on ground);
        bench
            .step("base", TASK, |at| {
                fs::write(at.join("by"), "base").expect("write");
            })
            .await;
        for pod in ["a", "b"] {
            let (target, published) = bench.publish(pod, &format!("v-{pod}"), TASK).await;
            assert!(published.parent.is_some());
            fs::write(target.join("by"), pod).expect("write");
            fs::write(target.join(format!("only-{pod}")), pod).expect("write");
        }
        for pod in ["b", "a"] {
            bench.outcome(pod, Outcome::Succeeded).await;
            bench.unpublish(&format!("v-{pod}")).await;
            bench.quiet().await;
        }
        assert_eq!(bench.look("v1", TASK, "by").await.as_deref(), Some("a"));
        assert_eq!(
            bench.look("v2", TASK, "only-b").await,
            None,
            "writers are not merged"
        );
        let bench = bench.restart().await;
        assert_eq!(bench.look("v3", TASK, "by").await.as_deref(), Some("a"));
        bench.engine.reap().await.expect("reap");
        assert_eq!(
            bench.engine.artifacts(None).len(),
            1,
            "what lost its name is garbage"
        );
        bench.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn restore_keys_are_tried_in_order_and_only_while_the_key_has_nothing() {
    let bench = require_bench!();
    for key in ["old", "older"] {
        bench
            .step(
                &format!("v-{key}"),
                &[("type", "task-cache"), ("key", key)],
                |at| {
                    fs::write(at.join("by"), key).expect("write");
                },
            )
            .await;
    }
    let new = [
        ("type", "task-cache"),
        ("key", "new"),
        ("restoreKeys", "missing, old, older"),
    ];
    let (target, published) = bench.publish("pod", "v-new", &new).await;
    assert_eq!(
        published.from,
        Some("task-cache/old".parse().expect("reference"))
    );
    assert_eq!(fs::read_to_string(target.join("by")).expect("read"), "old");
    fs::write(target.join("by"), "new").expect("write");
    bench.outcome("pod", Outcome::Succeeded).await;
    bench.unpublish("v-new").await;
    bench.quiet().await;
    assert_eq!(bench.look("v1", &new, "by").await.as_deref(), Some("new"));
    let old = [("type", "task-cache"), ("key", "old")];
    assert_eq!(
        bench.look("v2", &old, "by").await.as_deref(),
        Some("old"),
        "what was restored from stays as it was"
    );
    let none = [
        ("type", "task-cache"),
        ("key", "none"),
        ("restoreKeys", "missing"),
    ];
    let (_, published) = bench.publish("pod", "v3", &none).await;
    assert_eq!((published.from, published.parent), (None, None));
    bench.unpublish("v3").await;
    bench.outcome("pod", Outcome::Failed).await;
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restore_key_with_a_star_finds_the_last_commit_of_all_keys_that_begin_so() {
    for ground in Ground::ALL {
        let bench = require_bench!(on ground);
        let task = |key| [("type", "task-cache"), ("key", key)];
        // The last commit is not that of the last key. A star in a key is a letter.
        for (round, key) in ["main-1", "main-2", "main-*", "main-1", "m", "other"]
            .into_iter()
            .enumerate()
        {
            let write = |at: &Path| fs::write(at.join("by"), key).expect("write");
            bench.step(&format!("v-{round}"), &task(key), write).await;
        }
        let new = [
            ("type", "task-cache"),
            ("key", "new"),
            ("restoreKeys", "missing-*, main-*, m"),
        ];
        let started_from = |published: &baggageclaim::engine::Published| {
            published.from.as_ref().map(ToString::to_string)
        };
        let starts = async |bench: &Bench, volume: &str, attributes: &[(&str, &str)]| {
            let (target, published) = bench.publish("look", volume, attributes).await;
            let by = fs::read_to_string(target.join("by")).ok();
            bench.outcome("look", Outcome::Failed).await;
            bench.unpublish(volume).await;
            bench.quiet().await;
            let from = started_from(&published);
            assert_eq!(from, by.map(|key| format!("task-cache/{key}")));
            from
        };
        let of = |key: &str| Some(format!("task-cache/{key}"));
        assert_eq!(starts(&bench, "v1", &new).await, of("main-1"));
        let bench = bench.restart().await;
        assert_eq!(starts(&bench, "v2", &new).await, of("main-1"));
        // An earlier entry of the list wins over newer content of a later one.
        let other = [new[0], new[1], ("restoreKeys", "m, main-*")];
        assert_eq!(starts(&bench, "v3", &other).await, of("m"));
        let destroy = async |key: &str| {
            let reference = format!("task-cache/{key}").parse().expect("a reference");
            let tenant = "ci".parse().expect("a tenant");
            let destroyed = bench.engine.destroy(&tenant, &reference).await;
            destroyed.expect("it is destroyed");
        };
        destroy("main-1").await;
        assert_eq!(starts(&bench, "v4", &new).await, of("main-*"));
        destroy("main-*").await;
        // Another namespace has no such key.
        let mut request = bench.request("other", "v5", &new);
        request.tenant = "other".parse().expect("a tenant");
        let published = bench.engine.publish(request).await.expect("publish");
        assert_eq!(published.from, None);
        bench.outcome("other", Outcome::Failed).await;
        bench.unpublish("v5").await;
        // What the pod leaves goes to its own key, and that comes first from then on.
        let (target, published) = bench.publish("pod", "v6", &new).await;
        assert_eq!(started_from(&published), of("main-2"));
        fs::write(target.join("by"), "new").expect("write");
        bench.outcome("pod", Outcome::Succeeded).await;
        bench.unpublish("v6").await;
        bench.quiet().await;
        assert_eq!(starts(&bench, "v7", &new).await, of("new"));
        assert_eq!(starts(&bench, "v8", &task("main-2")).await, of("main-2"));
        destroy("main-2").await;
        destroy("new").await;
        assert_eq!(starts(&bench, "v9", &new).await, of("m"));
        bench.finish().await;
    }
}

const MARKER: &str = ".baggageclaim-commit";

#[tokio::test(flavor = "multi_thread")]
async fn commit_decides_with_outcome_and_marker() {
    use Outcome::{Failed, Succeeded};
    let cases = [
        ("on-success", Some(Succeeded), false, true),
        ("on-success", Some(Failed), false, false),
        ("on-success", Some(Failed), true, false),
        ("always", None, false, true),
        ("always", Some(Failed), false, true),
        ("never", Some(Succeeded), true, false),
        ("on-marker", None, true, true),
        ("on-marker", Some(Failed), true, true),
        ("on-marker", Some(Succeeded), false, false),
    ];
    let grounds = Ground::ALL;
    for ground in grounds {
        let bench = require_bench!(on ground);
        for (index, (commit, outcome, marked, _)) in cases.into_iter().enumerate() {
            let name = format!("o{index}");
            let output = [("type", "output"), ("name", &*name), ("commit", commit)];
            let (target, _) = bench.publish(&name, &name, &output).await;
            fs::write(target.join("file"), &name).expect("write");
            if marked {
                fs::write(target.join(MARKER), "").expect("write");
            }
            if let Some(outcome) = outcome {
                bench.outcome(&name, outcome).await;
            }
            bench.unpublish(&name).await;
        }
        bench.quiet().await;
        for (index, (commit, outcome, marked, sealed)) in cases.into_iter().enumerate() {
            let name = format!("artifact/o{index}");
            let what = format!("{}: {commit} {outcome:?} {marked}", ground.name());
            assert_eq!(bench.artifact(&name).is_some(), sealed, "{what}");
            if sealed {
                let input = [("type", "input"), ("from", &*name)];
                let (target, _) = bench.publish("in", "in", &input).await;
                assert!(target.join("file").exists(), "{what}");
                assert!(
                    !target.join(MARKER).exists(),
                    "the marker is not content: {what}"
                );
                bench.unpublish("in").await;
                bench.quiet().await;
            }
        }
        bench.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_marker_counts_for_the_step_that_made_it() {
    for ground in Ground::ALL {
        let bench = require_bench!(on ground);
        let task = [
            ("type", "task-cache"),
            ("key", "k"),
            ("commit", "on-marker"),
        ];
        let always = [("type", "task-cache"), ("key", "k"), ("commit", "always")];
        bench
            .step("v1", &task, |at| {
                fs::write(at.join("by"), "one").expect("write");
                fs::write(at.join(MARKER), "").expect("write");
            })
            .await;
        bench
            .step("v2", &task, |at| {
                fs::write(at.join("by"), "two").expect("write");
            })
            .await;
        assert_eq!(bench.look("v3", &task, "by").await.as_deref(), Some("one"));
        // A commit for another reason takes no marker along either.
        bench
            .step("v4", &always, |at| {
                fs::write(at.join("by"), "four").expect("write");
                fs::write(at.join(MARKER), "left lying around").expect("write");
            })
            .await;
        bench
            .step("v5", &task, |at| {
                fs::write(at.join("by"), "five").expect("write");
            })
            .await;
        assert_eq!(bench.look("v6", &task, "by").await.as_deref(), Some("four"));
        // What is called so and is no file says nothing.
        bench
            .step("v7", &task, |at| {
                fs::write(at.join("by"), "seven").expect("write");
                fs::create_dir(at.join(MARKER)).expect("mkdir");
            })
            .await;
        bench
            .step("v8", &task, |at| {
                fs::write(at.join("by"), "eight").expect("write");
                std::os::unix::fs::symlink("by", at.join(MARKER)).expect("symlink");
            })
            .await;
        assert_eq!(bench.look("v9", &task, "by").await.as_deref(), Some("four"));
        bench.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outcome_counts_once_whenever_it_comes() {
    use Outcome::{Failed, Succeeded};
    let bench = require_bench!();
    let output = |name| [("type", "output"), ("name", name)];
    // Before the unpublish, twice, and then the opposite.
    bench.publish("early", "v1", &output("one")).await;
    bench.publish("early", "v2", &output("two")).await;
    bench.publish("early", "s", &[]).await;
    let told = |news, same, other| OutcomeReport { news, same, other };
    assert_eq!(bench.told("nobody", Succeeded).await, told(0, 0, 0));
    assert_eq!(bench.told("early", Succeeded).await, told(3, 0, 0));
    assert_eq!(bench.told("early", Succeeded).await, told(0, 3, 0));
    assert_eq!(bench.told("early", Failed).await, told(0, 0, 3), "too late");
    for volume in ["v1", "v2", "s"] {
        bench.unpublish(volume).await;
    }
    bench.quiet().await;
    assert!(bench.artifact("artifact/one").is_some() && bench.artifact("artifact/two").is_some());

    // After the unpublish; failed first, and then the opposite.
    bench.publish("late", "v1", &output("three")).await;
    bench.unpublish("v1").await;
    eventually("its outcome is awaited", || {
        bench
            .row("v1")
            .is_some_and(|row| row.state == baggageclaim::engine::VolumeState::AwaitingOutcome)
    })
    .await;
    assert!(bench.artifact("artifact/three").is_none());
    assert_eq!(bench.outcome("late", Failed).await, 1);
    bench.outcome("late", Succeeded).await;
    bench.quiet().await;
    assert!(bench.artifact("artifact/three").is_none());
    let gone = bench.told("late", Succeeded).await;
    assert_eq!(gone, told(0, 0, 0), "it is gone");

    // One word before and one after a restart.
    bench.publish("told", "v1", &output("four")).await;
    bench.publish("untold", "v2", &output("five")).await;
    bench.outcome("told", Succeeded).await;
    bench.unpublish("v2").await;
    let bench = bench.restart().await;
    let late = bench.told("told", Failed).await;
    assert_eq!(late, told(0, 0, 1), "it is remembered");
    assert_eq!(bench.outcome("untold", Succeeded).await, 1);
    bench.unpublish("v1").await;
    bench.quiet().await;
    assert!(bench.artifact("artifact/four").is_some() && bench.artifact("artifact/five").is_some());
    bench.finish().await;
}

/// The pod's volume came back while its predecessor, which has the same id, was held open.
#[tokio::test(flavor = "multi_thread")]
async fn an_outcome_counts_for_a_volume_and_for_its_predecessor() {
    let bench = require_bench!();
    let output = |name| [("type", "output"), ("name", name)];
    let (at, _) = bench.publish("pod", "v", &output("first")).await;
    let held = fs::File::create(at.join("held")).expect("create");
    bench.unpublish("v").await;
    bench.publish("pod", "v", &output("second")).await;
    assert_eq!(bench.outcome("pod", Outcome::Succeeded).await, 2);
    drop(held);
    bench.unpublish("v").await;
    bench.quiet().await;
    for name in ["artifact/first", "artifact/second"] {
        assert!(bench.artifact(name).is_some(), "{name} is not sealed");
    }
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outcome_that_does_not_come_in_time_is_no_success() {
    let bench: Bench = require_bench!(|config| config.outcome_wait = Duration::from_millis(30));
    let output = [("type", "output"), ("name", "o")];
    bench.publish("pod", "v", &output).await;
    bench.unpublish("v").await;
    eventually("it is given up", || bench.row("v").is_none()).await;
    assert_eq!(
        bench.outcome("pod", Outcome::Succeeded).await,
        0,
        "too late"
    );
    assert!(bench.artifact("artifact/o").is_none());
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retried_output_moves_its_name_to_the_newest_success() {
    let bench = require_bench!();
    let output = [("type", "output"), ("name", "o")];
    let input = [("type", "input"), ("from", "artifact/o")];
    for text in ["one", "two"] {
        bench
            .step(&format!("v-{text}"), &output, |at| {
                fs::write(at.join("f"), text).expect("write");
            })
            .await;
        assert_eq!(bench.look("in", &input, "f").await.as_deref(), Some(text));
    }
    // An output starts empty, whatever its name holds.
    assert_eq!(bench.look("v3", &output, "f").await, None);
    assert_eq!(bench.look("in", &input, "f").await.as_deref(), Some("two"));
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tenants_neither_share_nor_hear_of_each_other() {
    let bench = require_bench!();
    let publish = |tenant: &'static str, volume: &'static str, attributes: &[(&str, &str)]| {
        let request = crate::common::bench::request(
            &bench.target(volume),
            tenant,
            volume,
            volume,
            attributes,
        );
        bench.engine.publish(request)
    };
    let output = [("type", "output"), ("name", "o"), ("commit", "always")];
    let task = [("type", "task-cache"), ("key", "k"), ("commit", "always")];
    for (volume, attributes) in [("t1", &task[..]), ("r1", RESOURCE), ("o1", &output)] {
        publish("one", volume, attributes).await.expect("publish");
        fs::write(bench.target(volume).join("f"), "of one").expect("write");
        bench.outcome(volume, Outcome::Succeeded).await;
        bench.unpublish(volume).await;
    }
    bench.quiet().await;
    for (volume, attributes) in [("t2", &task[..]), ("r2", RESOURCE)] {
        let published = publish("two", volume, attributes).await.expect("publish");
        assert_eq!(published.parent, None, "{volume}");
        fs::write(bench.target(volume).join("f"), "of two").expect("write");
        bench.outcome(volume, Outcome::Succeeded).await;
        bench.unpublish(volume).await;
    }
    bench.quiet().await;
    // An input of what another tenant has reads as one that does not exist.
    let mut words = Vec::new();
    for from in ["artifact/o", "artifact/p"] {
        let input = [("type", "input"), ("from", from)];
        let error = publish("two", "i", &input).await.expect_err("not theirs");
        words.push(error.to_string().replace(from, "X"));
    }
    assert_eq!(words[0], words[1]);
    let task = [("type", "task-cache"), ("key", "k")];
    publish("one", "t3", &task).await.expect("publish");
    assert_eq!(
        fs::read_to_string(bench.target("t3").join("f")).expect("read"),
        "of one"
    );
    bench.unpublish("t3").await;
    bench.outcome("t3", Outcome::Failed).await;
    let tenant = "two".parse().expect("tenant");
    assert_eq!(bench.engine.artifacts(Some(&tenant)).len(), 2);
    bench.finish().await;
}
