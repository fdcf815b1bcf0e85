//! What a pod's spec can say about its volumes and users: read-only, subPath, groups and users,
//! init containers, and many volumes at once.

use std::fmt::Write as _;

use crate::crowd::{Volumes, follow, make_inputs, pod};
use crate::env::Env;

/// How many pods come at once.
const CROWD: usize = 100;

pub(super) fn read_only(env: &Env) {
    let made = env.make("made");
    let cache = env.sealed("task-cache/made")["id"].clone();
    env.apply("read-only.yaml");
    env.ready("read-only");
    for volume in ["input", "cache", "view"] {
        assert_eq!(env.exec("read-only", &format!("cat /{volume}/text")), made);
        for change in [
            "echo x > FILE",
            "rm FILE",
            "chmod 600 FILE",
            "touch FILE.new",
        ] {
            let change = change.replace("FILE", &format!("/{volume}/text"));
            let why = env.fails("read-only", &change);
            assert!(why.contains("Read-only file system"), "{change}: {why}");
        }
    }
    // Only the mount of that container, or the volume of that pod, is read-only.
    env.exec_in("read-only", "writes", "echo changed > /view/text");
    assert_eq!(env.exec("read-only", "cat /view/text"), "changed\n");
    env.delete("pod/read-only");
    // `commit: always` is about content, and a view that cannot be changed has none of its own.
    env.settled();
    assert_eq!(env.sealed("task-cache/made")["id"], cache);
    env.hold(&[("artifact/made", "text", &made)]);
}

pub(super) fn sub_path(env: &Env) {
    let made = env.make("made");
    env.apply("sub-path.yaml");
    // The other two containers have ended, with their mounts, while this one goes on.
    for container in ["first", "second"] {
        env.until("pods", "sub-path", "past its parts", |pod| {
            let statuses = pod["status"]["containerStatuses"].as_array();
            statuses.into_iter().flatten().any(|status| {
                status["name"] == container && status["state"]["terminated"]["exitCode"] == 0
            })
        });
    }
    assert_eq!(
        env.kubectl(&["logs", "--container=first", "sub-path"]),
        made
    );
    let parts = env.exec_in("sub-path", "whole", "cd /out && cat parts/*/file");
    assert_eq!(parts, "first\nsecond\n");
    env.exec_in("sub-path", "whole", "touch /out/end");
    env.succeeded("sub-path");
    env.sealed("artifact/sub-path");
    assert_eq!(
        env.read("artifact/sub-path"),
        "==> ./end <==\n\n==> ./parts/first/file <==\nfirst\n\n==> ./parts/second/file <==\nsecond\n"
    );
}

pub(super) fn fs_group(env: &Env) {
    let made = env.make("made");
    env.apply("fs-group.yaml");
    env.ready("fs-group");
    let step = |command: &str| env.exec("fs-group", command);
    assert_eq!(step("id -u; id -G"), "1000\n1000 2000 3000\n");

    // A new volume is as an emptyDir: the group's, which may write, and so is what is made in it.
    let new = "0:2000:2777\n";
    assert_eq!(step("stat -c %u:%g:%a /empty-dir"), new);
    assert_eq!(step("stat -c %u:%g:%a /scratch"), new);
    // Also where the volume itself says less of its mode.
    assert_eq!(step("stat -c %u:%g:%a /output"), "0:2000:2775\n");
    for volume in ["empty-dir", "scratch", "output"] {
        let made = format!(
            "cd /{volume}; mkdir -p a/b; echo x > a/b/file; stat -c %u:%g a a/b a/b/file; stat -c %a a/b"
        );
        assert_eq!(
            step(&made),
            "1000:2000\n1000:2000\n1000:2000\n2755\n",
            "{volume}"
        );
    }
    // A supplementary group of the step, and a group that does not exist here.
    assert_eq!(step("stat -c %u:%g:%a /closed"), "0:3000:770\n");
    step("echo x > /closed/file");
    let why = env.fails("fs-group", "ls /foreign");
    assert!(why.contains("Permission denied"), "{why}");

    // In a fork only the root changes: files keep their owners. New files can be made, and old ones
    // replaced.
    assert_eq!(
        step("stat -c %u:%g:%a /input; stat -c %u:%g /input/text"),
        format!("{new}0:0\n")
    );
    assert_eq!(step("cat /input/text"), made);
    let why = env.fails("fs-group", "echo x >> /input/text");
    assert!(why.contains("Permission denied"), "{why}");
    assert_eq!(
        step("cd /input; echo x > new; mv new text; stat -c %u:%g text"),
        "1000:2000\n"
    );
    // A step that wants to write in them names their owner.
    assert_eq!(
        step("stat -c %u:%g /owned /owned/text"),
        "1000:1000\n1000:1000\n"
    );
    step("echo mine >> /owned/text && chmod 600 /owned/text");
    assert_eq!(step("cat /owned/text"), format!("{made}mine\n"));
    // The user of the volume, and the group of the pod.
    assert_eq!(
        step("stat -c %u:%g /cache /cache/text"),
        "1000:2000\n1000:0\n"
    );
    env.delete("pod/fs-group");
}

pub(super) fn restricted(env: &Env) {
    let policy = "pod-security.kubernetes.io/enforce=restricted";
    env.kubectl(&["label", "namespace", env.namespace(), policy]);
    let run = |uid: &str| {
        let pod = format!("user-{uid}");
        env.apply_with("restricted.yaml", &[("UID", uid)]);
        env.succeeded(&pod);
        for reference in [
            &format!("artifact/{pod}"),
            "task-cache/open",
            "task-cache/owned",
        ] {
            env.event(&pod, &[&format!("{reference} is committed")]);
        }
        env.logs(&pod)
    };
    assert_eq!(run("1000"), "1000\n1000:1000:700\n1000:1000:600\n0:0:777\n");
    assert_eq!(
        run("1001"),
        "1000\n1001\n1001:1001:700\n1001:1001:600\n0:0:777\n"
    );
}

pub(super) fn init_containers(env: &Env) {
    env.apply_with("init.yaml", &[("NAME", "good"), ("THEN", "exit 0")]);
    env.succeeded("good");
    assert_eq!(
        env.kubectl(&["logs", "--container=build", "good"]),
        "sources\ngot\nprepared\n"
    );
    env.settled();
    env.hold(&[
        ("artifact/good", "file", "sources\ngot\nbuilt\n"),
        ("resource-cache/sources-good", "file", "sources\n"),
        ("task-cache/good", "file", "prepared\n"),
    ]);
    assert_eq!(
        env.artifacts(),
        [
            "artifact/good",
            "resource-cache/sources-good",
            "task-cache/good"
        ]
    );
    // The first has succeeded, but the pod has not.
    env.apply_with("init.yaml", &[("NAME", "bad"), ("THEN", "exit 7")]);
    env.failed("bad");
    let why = env.event("bad", &["artifact/bad", "not committed"]);
    assert!(why.contains("container prepare exited with 7"), "{why}");
    env.settled();
    assert_eq!(env.artifacts().len(), 3, "{:?}", env.artifacts());
}

pub(super) fn many_volumes(env: &Env) {
    let made = env.make("made");
    env.apply("many.yaml");
    env.ready("many");
    let volumes = env.list("volumes");
    assert_eq!(volumes.len(), 20, "{volumes:#?}");
    assert!(
        volumes.iter().all(|volume| volume["state"] == "published"),
        "{volumes:#?}"
    );
    assert_eq!(env.cluster.volume_mounts().len(), 20);
    assert_eq!(
        env.logs("many"),
        format!(
            "{}700 0\n1777 1000\n777 1000\n644 1000\n750 0\n",
            made.repeat(10)
        )
    );
    env.exec("many", "touch /new/1/end");
    env.succeeded("many");
    env.settled();
    assert_eq!(
        env.artifacts(),
        [
            "artifact/made",
            "artifact/many",
            "artifact/many-always",
            "resource-cache/made",
            "resource-cache/many",
            "task-cache/made",
            "task-cache/many",
            "task-cache/many-restored",
            "task-cache/many: ä, /../ or anything",
        ]
    );
    // Of two volumes of one cache, the allowed one was committed, with its content.
    let text = format!("==> ./own <==\n8\n\n==> ./text <==\n{made}8\n");
    assert_eq!(env.read("task-cache/made"), text);
    env.hold(&[("artifact/made", "text", &made)]);
}

pub(super) fn crowd(env: &Env) {
    make_inputs(env);
    let pods: Vec<String> = (0..CROWD)
        .map(|number| {
            let volumes = 1 + number % 2;
            // All write the same names, at the same time, in views of the same content.
            let mut script = "[sh, -ceu]\n    args:\n    - |\n".to_owned();
            for volume in 0..volumes {
                let _ = writeln!(
                    script,
                    "      cd /v{volume}; [ $(ls | wc -l) = 300 ]; [ $(cat 7) = 7 ]
      for file in $(seq 30); do echo {number} > $file; done"
                );
            }
            for volume in 0..volumes {
                let _ = writeln!(
                    script,
                    "      for file in $(seq 30); do read its < /v{volume}/$file; [ $its = {number} ]; done"
                );
            }
            let name = format!("crowd-{number}");
            pod("crowd", &name, volumes, Volumes::Ours, &script)
        })
        .collect();
    let watch = env.watch("pods", &[]);
    env.apply_text(&pods.join("---\n"));
    assert_eq!(follow(&watch, CROWD).len(), CROWD);
    env.clear();
    // No view's changes are visible in another view.
    env.apply_text(&pod(
        "after",
        "after",
        2,
        Volumes::Ours,
        "[sh, -ceu, 'for v in 0 1; do cd /v$v; [ $(cat * | sort -n | tr -d \"\\n\") = $(seq 300 | tr -d \"\\n\") ]; done']",
    ));
    env.succeeded("after");
}
