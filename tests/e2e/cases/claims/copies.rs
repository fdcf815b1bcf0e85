//! Copies of claims: clones of claims that are mounted or not, clones of clones, snapshots that
//! outlive their claim, groups of snapshots, and generic ephemeral volumes, one per job.

use serde_json::{Value, json};

use super::snapshots::{SNAPSHOTS, Snapshots, snapshot};
use super::{AT_ONCE, Controller, Extra, LATE, bound, claim, class, pod, run};
use crate::cluster::eventually;
use crate::env::{Env, items};

/// A class whose claims are copied while pods write to them.
const LIVE: &str = "case-live";

pub(in super::super) fn copies(env: &Env) {
    let controller = Controller::of(env);
    // The driver works without them, and finds them when they come.
    let snapshots = Snapshots::install(&controller);
    let live = class(LIVE, &json!({"parameters": {"liveClone": "copy"}}));
    let _class = Extra::apply(env.cluster, live);

    while_pods_write(env);
    of_claims_at_rest(env);
    let says = |claim: &str| run(env, &[claim], "cat /claim/0/text");
    for (claim, text) in [
        ("copied", "live\n"),
        ("refused", "base\n"),
        ("restored", "base\n"),
        ("again", "live\n"),
        ("member", "right\n"),
    ] {
        assert_eq!(says(claim), text, "{claim}");
    }
    warm_workspaces(env);
    controller.agrees();

    // The members of a group are deleted with it.
    env.clear();
    snapshots.delete_all(env);
    controller.nothing_is_left();
    let contents = env.cluster.get(&["volumesnapshotcontents"]);
    assert_eq!(items(&contents).count(), 0, "{contents}");
}

/// Clones of claims that a pod has mounted: one is made from a copy, the other waits for the pod's
/// end.
fn while_pods_write(env: &Env) {
    claim(env, "base", LATE, &Value::Null);
    claim(env, "live", LIVE, &Value::Null);
    let write = "echo base > /claim/0/text; echo live > /claim/1/text; sleep 1000000";
    env.apply_text(&pod("writer", &["base", "live"], write));
    env.ready("writer");
    clone(env, "copied", "live");
    clone(env, "refused", "base");
    bound(env, "copied");
    env.claim_event("refused", &["liveClone: copy"]);
    env.delete("pod/writer");
}

/// Snapshots, alone and as a group, and clones of clones. The sources are deleted before there is
/// a copy.
fn of_claims_at_rest(env: &Env) {
    for side in ["left", "right"] {
        claim(env, side, AT_ONCE, &Value::Null);
    }
    env.kubectl(&[
        "label",
        "persistentvolumeclaims",
        "left",
        "right",
        "both=yes",
    ]);
    let write = "echo left > /claim/0/text; echo right > /claim/1/text";
    run(env, &["left", "right"], write);
    snapshot(
        env,
        "VolumeSnapshot",
        "shot",
        &json!({"persistentVolumeClaimName": "base"}),
    );
    let both = json!({"selector": {"matchLabels": {"both": "yes"}}});
    snapshot(env, "VolumeGroupSnapshot", "shot", &both);
    // It is tried again.
    bound(env, "refused");
    clone(env, "again", "copied");
    bound(env, "again");
    let delete = ["delete", "persistentvolumeclaims", "--wait"];
    env.kubectl(&[&delete[..], &["base", "right", "live"]].concat());
    eventually("their volumes are gone", || {
        let left = env.cluster.get(&["persistentvolumes"]);
        let gone = items(&left).all(|volume| {
            let of = volume["spec"]["claimRef"]["name"].as_str();
            !["base", "right", "live"].map(Some).contains(&of)
        });
        gone.then_some(())
    });
    restore(env, "restored", "shot");
    restore(env, "member", &member_of(env, "right"));
    for claim in ["restored", "member"] {
        bound(env, claim);
    }
}

fn clone(env: &Env, name: &str, of: &str) {
    let source = json!({"dataSource": {"kind": "PersistentVolumeClaim", "name": of}});
    claim(env, name, AT_ONCE, &source);
}

fn restore(env: &Env, name: &str, of: &str) {
    let source = json!({"apiGroup": SNAPSHOTS, "kind": "VolumeSnapshot", "name": of});
    claim(env, name, AT_ONCE, &json!({"dataSource": source}));
}

/// The snapshot of a claim in the group.
fn member_of(env: &Env, claim: &str) -> String {
    eventually("the member knows its claim", || {
        let all = env.get("volumesnapshots");
        let mut all = items(&all);
        let its = |snapshot: &&Value| {
            snapshot["spec"]["source"]["persistentVolumeClaimName"] == claim
                || snapshot["metadata"]["annotations"]
                    .to_string()
                    .contains(claim)
        };
        let member = all.find(its)?;
        Some(member["metadata"]["name"].as_str()?.to_owned())
    })
}

/// The example: each job has a copy of the workspace for itself, which ends with its pod.
fn warm_workspaces(env: &Env) {
    env.apply("../../../examples/warm-workspace/1-prepare.yaml");
    let prepared = env.only_pod("batch.kubernetes.io/job-name=prepare");
    env.succeeded(&prepared);
    env.kubectl(&["delete", "job", "prepare", "--wait"]);
    env.gone(&prepared);
    env.apply("../../../examples/warm-workspace/2-jobs.yaml");
    for job in ["unit-tests", "lint"] {
        let pod = env.only_pod(&format!("batch.kubernetes.io/job-name={job}"));
        env.succeeded(&pod);
        assert_eq!(env.logs(&pod), format!("warm\nleft by {job}\n"));
        env.kubectl(&["delete", "job", job, "--wait", "--cascade=foreground"]);
    }
    eventually("their copies are gone with them", || {
        let claims = env.get("persistentvolumeclaims");
        let mut claims = items(&claims).map(|claim| claim["metadata"].clone());
        claims
            .all(|claim| claim.get("ownerReferences").is_none())
            .then_some(())
    });
}
