//! Data that outlives pods: resource caches, task caches, outputs, and pipelines of them. The
//! pipelines are those of `examples/`, unchanged.

use std::fs::File;

use crate::env::Env;
use crate::step::Step;

pub(super) fn pipeline_of_pods(env: &Env) {
    let build = |number: usize| {
        env.apply("../../../examples/pipeline/pods/1-get.yaml");
        env.succeeded("get");
        env.apply("../../../examples/pipeline/pods/2-build.yaml");
        env.succeeded("build-amd64");
        env.succeeded("build-arm64");
        env.apply("../../../examples/pipeline/pods/3-test.yaml");
        env.succeeded("test");
        assert_eq!(
            env.logs("test"),
            "hello from amd64\nhello from arm64\n",
            "build {number}"
        );
        (env.logs("get"), env.logs("build-amd64"))
    };
    assert_eq!(
        build(1),
        ("fetching\n".into(), "the cache holds 0 objects\n".into())
    );
    // Each author gets an event about the content that the author made.
    env.event(
        "build-amd64",
        &[
            "artifact/hello-amd64",
            "task-cache/hello/amd64",
            "committed",
        ],
    );
    env.clear();
    env.settled();
    assert_eq!(
        build(2),
        (
            "the sources are there already\n".into(),
            "the cache holds 1 objects\n".into()
        )
    );
}

pub(super) fn pipeline_of_jobs(env: &Env) {
    for (file, step) in [("1-get", "get"), ("2-build", "build"), ("3-test", "test")] {
        env.apply(&format!("../../../examples/pipeline/jobs/{file}.yaml"));
        env.kubectl(&[
            "wait",
            "--for=condition=complete",
            "job",
            "--selector",
            &format!("step={step}"),
            "--timeout=120s",
        ]);
    }
    assert_eq!(
        env.kubectl(&["logs", "job/test"]),
        "hello from amd64\nhello from arm64\n"
    );
}

/// The event on a volume whose pod was deleted while it ran.
const DELETED: &str = "deleted before it had ended";

pub(super) fn task_cache(env: &Env) {
    // A step that adds a line to its cache, shows it, and ends as it is told.
    let step = |name: &str, then: &str| {
        env.apply_with("task-cache.yaml", &[("NAME", name), ("THEN", then)]);
    };
    let content = |name: &str| env.logs(name);

    step("first", "exit 0");
    env.succeeded("first");
    assert_eq!(content("first"), "first\n");
    env.event("first", &["task-cache/steps", "is committed"]);

    step("fails", "exit 1");
    env.failed("fails");
    assert_eq!(content("fails"), "first\nfails\n");
    env.event("fails", &["task-cache/steps is not committed"]);

    env.apply("failing-job.yaml");
    env.kubectl(&[
        "wait",
        "--for=condition=failed",
        "job/job",
        "--timeout=120s",
    ]);
    let job = env.only_pod("job-name=job");
    assert_eq!(content(&job), "first\njob\n");
    let verdict = "task-cache/steps is not committed: container step exited with 3";
    env.event(&job, &[verdict]);

    // It is ready when its line is there.
    step("deleted", "exec sleep 1000");
    env.ready("deleted");
    assert_eq!(content("deleted"), "first\ndeleted\n");
    env.delete("pod/deleted");
    env.event("deleted", &["task-cache/steps is not committed", DELETED]);
    env.settled();

    step("last", "exit 0");
    env.succeeded("last");
    assert_eq!(content("last"), "first\nlast\n");
}

pub(super) fn deleted_maker(env: &Env) {
    let then = "exec sleep 1000";
    env.apply_with("maker.yaml", &[("NAME", "made"), ("THEN", then)]);
    env.ready("made");
    env.delete("pod/made");
    for kind in ["artifact", "task-cache", "resource-cache"] {
        let verdict = format!("{kind}/made is not committed");
        env.event("made", &[&verdict, DELETED]);
    }
    env.settled();
    assert!(env.artifacts().is_empty(), "{:?}", env.artifacts());
    // The next pod finds nothing (the maker ensures that), and is the first.
    let text = env.make("made");
    env.hold(&[("resource-cache/made", "text", &text)]);
}

pub(super) fn waiting_for_input(env: &Env) {
    let mut maker = Step::runs(env, "maker");
    maker.works();
    let comes = |name: &str, why: &str| {
        let from = "artifact/maker";
        env.apply_with("reader.yaml", &[("NAME", name), ("FROM", from)]);
        env.event(name, &["waiting up to ", from, why]);
    };
    comes("early", "pod maker is still making it");
    // Its step is over, but not all that writes there.
    let output = env.volume_from_outside(maker.uid(), "out").join("more");
    let held = File::options().append(true).open(&output);
    let held = held.unwrap_or_else(|error| panic!("{}: {error}", output.display()));
    maker.told_to_end();
    env.succeeded("maker");
    comes("late", "a process of pod maker still holds it open");
    assert!(!env.artifacts().contains(&"artifact/maker".to_owned()));
    drop(held);
    for name in ["early", "late"] {
        env.succeeded(name);
        assert_eq!(
            env.logs(name),
            "==> ./begun <==\nbegun\n\n==> ./more <==\n1\n"
        );
        // It waited, and was not refused and tried again. Kubelet tells things in their order.
        env.event(name, &["ontainer started"]);
        assert_eq!(env.warnings(name), [""; 0]);
    }
    maker.ended();
}
