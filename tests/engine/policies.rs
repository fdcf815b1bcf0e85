//! Cache policies on a node: who commits which names, what a change of the policies does to a
//! volume in use, and what a restart knows of them.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use baggageclaim::engine::notice::{NotCommitted, Notice, What};
use baggageclaim::engine::{Error, NameState, Notices, PublishRequest, VolumeState};
use baggageclaim::model::{Name, NamespacePolicy, Outcome, Policies, Rule, Tenant, layout};
use tokio::sync::mpsc::Receiver;

use crate::common::bench::{Bench, eventually, soon};
use crate::common::{Snapshot, assert_same, require_bench, tree};

const TASK: &[(&str, &str)] = &[("type", "task-cache"), ("key", "k")];
const RELEASE: Option<&str> = Some("release");

type Attributes<'a> = &'a [(&'a str, &'a str)];

fn tenant(name: &str) -> Tenant {
    name.parse().expect("a label")
}

/// A rule for these names. `accounts`: those that may commit; `None`: it does not say.
fn rule(names: &[&str], accounts: Option<&[&str]>, readers: &[&str]) -> Rule {
    let accounts = accounts.map(|it| it.iter().map(ToString::to_string).collect());
    Rule {
        names: names.iter().map(|name| name.parse().expect(name)).collect(),
        commit: accounts,
        read: readers
            .iter()
            .map(|name| tenant(name))
            .collect::<BTreeSet<_>>(),
    }
}

fn of_ci(rules: Vec<Rule>) -> Policies {
    let policy = NamespacePolicy {
        rules,
        ..NamespacePolicy::default()
    };
    Policies::known([(tenant("ci"), policy)])
}

async fn set(bench: &Bench, policies: Policies) {
    let change = |it: &mut Policies| *it = policies;
    bench.engine.change_policies(change).await;
}

fn request(
    bench: &Bench,
    volume: &str,
    attributes: &[(&str, &str)],
    account: Option<&str>,
) -> PublishRequest {
    let mut request = bench.request(volume, volume, attributes);
    request.pod.service_account = account.map(str::to_owned);
    request
}

/// A step of a pod with this account that writes its own name, and succeeds.
async fn step(bench: &Bench, volume: &str, attributes: &[(&str, &str)], account: Option<&str>) {
    let request = request(bench, volume, attributes, account);
    bench.engine.publish(request).await.expect("published");
    fs::write(bench.target(volume).join("f"), volume).expect("write");
    bench.outcome(volume, Outcome::Succeeded).await;
    bench.unpublish(volume).await;
}

async fn said(heard: &mut Receiver<Notice>, pod: &str) -> Option<NotCommitted> {
    loop {
        let notice = soon("a notice", heard.recv()).await.expect("it lives");
        match notice.what {
            _ if notice.pod.name != pod => {}
            What::NotCommitted { why, .. } => return Some(why),
            What::Committed { .. } => return None,
            _ => {}
        }
    }
}

fn refused(account: Option<&str>) -> NotCommitted {
    let account = account.map(str::to_owned);
    NotCommitted::NotAllowed { account }
}

/// What the rules say of the names of a row of the matrix. The pod has the account `release`.
fn row(row: &str, names: &[&str]) -> Policies {
    match row {
        "no policy" => Policies::known([]),
        "selected" => of_ci(vec![rule(names, None, &[])]),
        "listed" => of_ci(vec![rule(names, Some(&["release"]), &["other"])]),
        _ => of_ci(vec![rule(names, Some(&["nightly"]), &["another"])]),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_accounts_that_rules_list_commit_a_name_and_others_run_all_the_same() {
    let (notices, mut heard) = Notices::channel(1000);
    let bench = require_bench!(|config| config.notices = Some(notices));
    let kinds: [(&str, Attributes, Attributes); 3] = [
        (
            "task-cache",
            &[("type", "task-cache"), ("key", "own")],
            &[
                ("type", "task-cache"),
                ("key", "own"),
                ("restoreKeys", "restore"),
            ],
        ),
        (
            "resource-cache",
            &[("type", "resource-cache"), ("key", "own")],
            &[],
        ),
        ("artifact", &[("type", "output"), ("name", "own")], &[]),
    ];
    let mut number = 0;
    for (kind, own, by_restore_key) in kinds {
        let name = format!("{kind}/own");
        let all = format!("{kind}/*");
        for names in [vec![name.as_str()], vec![all.as_str()]] {
            for case in ["no policy", "selected", "listed", "not listed"] {
                for attributes in [own, by_restore_key] {
                    if attributes.is_empty() {
                        continue;
                    }
                    number += 1;
                    let context = format!("{case} {names:?} {attributes:?}");
                    set(&bench, Policies::known([])).await;
                    if attributes == by_restore_key {
                        let restore = [("type", "task-cache"), ("key", "restore")];
                        let maker = format!("restore-{number}");
                        step(&bench, &maker, &restore, None).await;
                        assert_eq!(said(&mut heard, &maker).await, None, "{context}");
                    }
                    set(&bench, row(case, &names)).await;
                    let volume = format!("v-{number}");
                    step(&bench, &volume, attributes, RELEASE).await;
                    let expected = (case == "not listed").then(|| refused(RELEASE));
                    assert_eq!(said(&mut heard, &volume).await, expected, "{context}");
                    bench.quiet().await;
                    let row = bench.artifact(&name);
                    assert_eq!(row.is_some(), expected.is_none(), "{context}");
                    if let Some(row) = row {
                        let maker = row.made_by.expect("it is recorded");
                        assert_eq!(maker.pod.service_account.as_deref(), RELEASE);
                        let is_fork = attributes == by_restore_key;
                        assert_eq!(maker.parent.is_some(), is_fork, "{context}");
                        let reference = name.parse().expect("a reference");
                        let ci = tenant("ci");
                        bench.engine.destroy(&ci, &reference).await.expect("gone");
                    }
                    // Each of the two runs begins without content.
                    let restore = "task-cache/restore".parse().expect("a reference");
                    let _none = bench.engine.destroy(&tenant("ci"), &restore).await;
                }
            }
        }
    }
    // An input reads in its own namespace whatever the rules say of commits.
    set(&bench, Policies::known([])).await;
    for (volume, attributes) in [
        ("made", &[("type", "output"), ("name", "made")][..]),
        ("kept", &[("type", "task-cache"), ("key", "made")]),
        ("fetched", &[("type", "resource-cache"), ("key", "made")]),
    ] {
        step(&bench, volume, attributes, None).await;
        assert_eq!(said(&mut heard, volume).await, None);
    }
    bench.quiet().await;
    for case in ["no policy", "selected", "listed", "not listed"] {
        for (kind, text) in [
            ("artifact", "made"),
            ("task-cache", "kept"),
            ("resource-cache", "fetched"),
        ] {
            number += 1;
            set(&bench, row(case, &[&format!("{kind}/*")])).await;
            let from = format!("{kind}/made");
            let input = [("type", "input"), ("from", from.as_str())];
            let seen = bench.look(&format!("input-{number}"), &input, "f").await;
            assert_eq!(seen.as_deref(), Some(text), "{case} {from}");
        }
    }
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rules_are_of_one_namespace_and_a_pod_without_an_account_is_not_listed() {
    let (notices, mut heard) = Notices::channel(100);
    let bench = require_bench!(|config| config.notices = Some(notices));
    set(
        &bench,
        of_ci(vec![rule(&["task-cache/*"], Some(&["release"]), &[])]),
    )
    .await;
    step(&bench, "unknown", TASK, None).await;
    assert_eq!(said(&mut heard, "unknown").await, Some(refused(None)));
    let mut elsewhere = request(&bench, "elsewhere", TASK, None);
    elsewhere.tenant = tenant("other");
    bench.engine.publish(elsewhere).await.expect("published");
    bench.outcome("elsewhere", Outcome::Succeeded).await;
    bench.unpublish("elsewhere").await;
    assert_eq!(said(&mut heard, "elsewhere").await, None);
    bench.finish().await;
}

/// A release build's fork of the cache, as a tree.
async fn release_build(bench: &Bench, volume: &str) -> Snapshot {
    let never = [TASK, &[("commit", "never")]].concat();
    let request = request(bench, volume, &never, RELEASE);
    bench.engine.publish(request).await.expect("published");
    let fork = Snapshot::of(&bench.target(volume));
    bench.unpublish(volume).await;
    fork
}

#[tokio::test(flavor = "multi_thread")]
async fn a_release_builds_fork_is_the_same_before_and_after_each_of_100_pull_requests() {
    let (notices, mut heard) = Notices::channel(1000);
    let bench = require_bench!(|config| config.notices = Some(notices));
    set(
        &bench,
        of_ci(vec![rule(&["task-cache/*"], Some(&["release"]), &[])]),
    )
    .await;
    let first = request(&bench, "first", TASK, RELEASE);
    bench.engine.publish(first).await.expect("published");
    tree::odd(&bench.target("first").join("tree"));
    // It takes long to read.
    fs::remove_file(bench.target("first").join("tree/sparse")).expect("remove");
    tree::files(&bench.target("first").join("more"), 20);
    bench.outcome("first", Outcome::Succeeded).await;
    bench.unpublish("first").await;
    assert_eq!(said(&mut heard, "first").await, None);
    bench.quiet().await;
    let artifact = bench.artifact("task-cache/k").expect("it is there");
    let before = release_build(&bench, "release").await;
    assert!(before.entries.len() > 20);
    for number in 0..100 {
        let volume = format!("pr-{number}");
        let pull_request = request(&bench, &volume, TASK, Some("pr"));
        bench.engine.publish(pull_request).await.expect("published");
        // It adds a file, changes one and its mode, and moves and removes others.
        let root = bench.target(&volume);
        fs::write(root.join("f"), &volume).expect("write");
        let file = root.join("more/d0000").join(format!("f{:06}", number % 20));
        fs::write(&file, &volume).expect("write");
        fs::set_permissions(&file, fs::Permissions::from_mode(0o777)).expect("chmod");
        fs::rename(root.join("tree/one"), root.join("moved")).expect("rename");
        fs::remove_file(root.join("tree/bin/tool")).expect("remove");
        bench.outcome(&volume, Outcome::Succeeded).await;
        bench.unpublish(&volume).await;
        assert_eq!(said(&mut heard, &volume).await, Some(refused(Some("pr"))));
        let after = release_build(&bench, &format!("release-{number}")).await;
        assert_same(&before, &after);
    }
    let after = bench.artifact("task-cache/k").expect("it is there");
    assert_eq!((after.id, after.layers), (artifact.id, artifact.layers));
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_newer_policy_decides_about_a_volume_in_use() {
    let (notices, mut heard) = Notices::channel(100);
    let bench = require_bench!(|config| config.notices = Some(notices));
    let only = |account| of_ci(vec![rule(&["task-cache/*"], Some(&[account]), &[])]);
    for (volume, first, then, expected) in [
        ("taken", "release", "nightly", Some(refused(RELEASE))),
        ("given", "nightly", "release", None),
    ] {
        set(&bench, only(first)).await;
        let request = request(&bench, volume, TASK, RELEASE);
        bench.engine.publish(request).await.expect("published");
        set(&bench, only(then)).await;
        bench.outcome(volume, Outcome::Succeeded).await;
        bench.unpublish(volume).await;
        assert_eq!(said(&mut heard, volume).await, expected, "{volume}");
    }
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fresh_node_holds_commits_until_it_knows_the_policies() {
    let (notices, mut heard) = Notices::channel(100);
    let bench = require_bench!(|config| {
        config.notices = Some(notices);
        config.policies = true;
    });
    let always = [
        ("type", "task-cache"),
        ("key", "always"),
        ("commit", "always"),
    ];
    step(&bench, "listed", TASK, RELEASE).await;
    step(&bench, "always", &always, RELEASE).await;
    let other = [("type", "task-cache"), ("key", "other")];
    step(&bench, "unlisted", &other, Some("pr")).await;
    let waits = |bench: &Bench| {
        let rows = bench.engine.volumes(None);
        let held = rows.iter();
        held.filter(|row| row.state == VolumeState::AwaitingOutcome)
            .count()
    };
    eventually("all three wait", || waits(&bench) == 3).await;
    // A pod that waits for content of such a volume does not wait for an outcome.
    assert!(bench.artifact("task-cache/k").is_none());
    // Also after a restart, however long ago their outcomes were missing.
    let missed = |pool: &std::path::Path| {
        for entry in fs::read_dir(pool.join("pending")).expect("it is there") {
            let volume = entry.expect("an entry").path();
            fs::write(volume.join("awaited"), "0\n").expect("noted");
        }
    };
    let bench = bench.restart_after(missed).await;
    eventually("all three wait again", || waits(&bench) == 3).await;
    // A change of one namespace is not all there is to know.
    let change = |it: &mut Policies| it.put(tenant("ci"), NamespacePolicy::default());
    bench.engine.change_policies(change).await;
    assert!(!bench.engine.policies().are_known());
    set(
        &bench,
        of_ci(vec![rule(&["task-cache/*"], Some(&["release"]), &[])]),
    )
    .await;
    bench.quiet().await;
    eventually("nothing waits", || waits(&bench) == 0).await;
    bench.quiet().await;
    assert!(bench.artifact("task-cache/k").is_some());
    assert!(bench.artifact("task-cache/always").is_some());
    assert!(bench.artifact("task-cache/other").is_none());
    assert_eq!(
        said(&mut heard, "unlisted").await,
        Some(refused(Some("pr")))
    );
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_that_waits_for_the_policies_shows_that_also_after_its_outcome() {
    let bench = require_bench!(|config| config.policies = true);
    let always = [TASK, &[("commit", "always")]].concat();
    bench.publish("always", "always", &always).await;
    bench.unpublish("always").await;
    let waits = |bench: &Bench| {
        let row = bench.row("always");
        row.is_some_and(|row| row.state == VolumeState::AwaitingOutcome)
    };
    eventually("it waits", || waits(&bench)).await;
    bench.outcome("always", Outcome::Failed).await;
    assert!(waits(&bench), "{:?}", bench.row("always"));
    set(&bench, Policies::known([])).await;
    bench.quiet().await;
    assert!(bench.artifact("task-cache/k").is_some());
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_that_is_held_for_too_long_is_given_up() {
    let (notices, mut heard) = Notices::channel(100);
    let wait = std::time::Duration::from_millis(1);
    let bench = require_bench!(|config| {
        config.notices = Some(notices);
        config.policies = true;
        config.outcome_wait = wait;
    });
    step(&bench, "held", TASK, None).await;
    let why = said(&mut heard, "held").await;
    assert_eq!(why, Some(NotCommitted::PoliciesUnknown { waited: wait }));
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_knows_yesterdays_policies_and_a_damaged_file_is_none() {
    let (notices, mut heard) = Notices::channel(100);
    let bench = require_bench!(|config| {
        config.notices = Some(notices);
        config.policies = true;
    });
    let policies = of_ci(vec![rule(&["task-cache/*"], Some(&["release"]), &["pr"])]);
    set(&bench, policies.clone()).await;
    let bench = bench.restart().await;
    assert_eq!(bench.engine.policies().all(), policies.all());
    step(&bench, "pr", TASK, Some("pr")).await;
    assert_eq!(said(&mut heard, "pr").await, Some(refused(Some("pr"))));
    step(&bench, "release", TASK, RELEASE).await;
    assert_eq!(said(&mut heard, "release").await, None);
    bench.assert_whole().await;

    let damage = |pool: &std::path::Path| {
        let path = pool.join(layout::POLICIES_JSON);
        let text = fs::read_to_string(&path).expect("it is there");
        fs::write(path, &text[..text.len() / 2]).expect("damaged");
    };
    let bench = bench.restart_after(damage).await;
    assert!(!bench.engine.policies().are_known());
    let gone = |pool: &std::path::Path| {
        fs::remove_file(pool.join(layout::POLICIES_JSON)).expect("it is gone");
    };
    let mut bench = bench.restart_after(gone).await;
    assert!(!bench.engine.policies().are_known());
    // A node without a controller has no policies, whatever the file says.
    set(&bench, policies).await;
    bench.config.policies = false;
    let bench = bench.restart().await;
    assert_eq!(bench.engine.policies().all(), Some([].into()));
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn volumes_without_a_limit_get_the_one_of_their_policy() {
    let bench = require_bench!();
    let policy = NamespacePolicy {
        cache_limit: Some(8 << 20),
        output_limit: Some(4 << 20),
        ..NamespacePolicy::default()
    };
    set(&bench, Policies::known([(tenant("ci"), policy)])).await;
    let own = [("type", "task-cache"), ("key", "own"), ("sizeLimit", "1Mi")];
    let input = [("type", "scratch")];
    for (volume, attributes, expected) in [
        ("cache", TASK, Some(8 << 20)),
        ("own", &own[..], Some(1 << 20)),
        (
            "output",
            &[("type", "output"), ("name", "o")][..],
            Some(4 << 20),
        ),
        ("scratch", &input[..], None),
    ] {
        bench.publish(volume, volume, attributes).await;
        let row = bench.row(volume).expect("it is published");
        assert_eq!(row.spec.size_limit, expected, "{volume}");
        // A repeated call is the same call, also after a restart.
        bench.publish(volume, volume, attributes).await;
    }
    set(&bench, Policies::known([])).await;
    let bench = bench.restart().await;
    bench.publish("cache", "cache", TASK).await;
    let row = bench.row("cache").expect("it is published");
    assert_eq!(row.spec.size_limit, Some(8 << 20), "it was made with that");
    for volume in ["cache", "own", "output", "scratch"] {
        bench.outcome(volume, Outcome::Failed).await;
        bench.unpublish(volume).await;
    }
    bench.finish().await;
}

/// A volume of a pod in the namespace `other`, which reads in `ci`.
async fn from_other(
    bench: &Bench,
    volume: &str,
    attributes: &[(&str, &str)],
) -> Result<Option<String>, Error> {
    let attributes = [attributes, &[("fromNamespace", "ci")]].concat();
    let mut request = request(bench, volume, &attributes, RELEASE);
    request.tenant = tenant("other");
    bench.engine.publish(request).await?;
    let target = bench.target(volume);
    let seen = fs::read_to_string(target.join("f")).ok();
    fs::write(target.join("g"), volume).expect("write");
    bench.outcome(volume, Outcome::Succeeded).await;
    bench.unpublish(volume).await;
    bench.quiet().await;
    Ok(seen)
}

fn names_of(bench: &Bench, namespace: &str) -> Vec<String> {
    let rows = bench.engine.artifacts(Some(&tenant(namespace)));
    let names = rows.iter().filter_map(|row| row.name.as_ref());
    names.map(ToString::to_string).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn its_own_key_comes_first_then_the_newest_of_the_other_namespace() {
    let bench = require_bench!();
    for key in ["main-1", "main-2", "mine"] {
        step(&bench, key, &[("type", "task-cache"), ("key", key)], None).await;
    }
    bench.quiet().await;
    let attributes = [
        ("type", "task-cache"),
        ("key", "pr-7"),
        ("restoreKeys", "main-*"),
    ];
    // A rule for some of them is none for the pattern: the answer would tell of the others.
    set(
        &bench,
        of_ci(vec![rule(&["task-cache/main-2"], None, &["other"])]),
    )
    .await;
    let read = from_other(&bench, "some", &attributes).await;
    assert_eq!(read.expect("it starts"), None);
    let pr = "task-cache/pr-7".parse().expect("a reference");
    bench
        .engine
        .destroy(&tenant("other"), &pr)
        .await
        .expect("gone");

    set(
        &bench,
        of_ci(vec![rule(&["task-cache/main-*"], None, &["other"])]),
    )
    .await;
    let read = from_other(&bench, "first", &attributes).await;
    assert_eq!(read.expect("it starts").as_deref(), Some("main-2"));
    // What it has committed is its own, and is found without a right in the other namespace.
    set(&bench, Policies::known([])).await;
    let read = from_other(&bench, "second", &attributes).await;
    assert_eq!(read.expect("it starts").as_deref(), Some("main-2"));
    let target = bench.target("third");
    let request = {
        let mut request = request(&bench, "third", &attributes, RELEASE);
        request.tenant = tenant("other");
        request
    };
    bench.engine.publish(request).await.expect("it starts");
    let last = fs::read_to_string(target.join("g"));
    assert_eq!(last.expect("it is its own commit"), "second");
    bench.outcome("third", Outcome::Failed).await;
    bench.unpublish("third").await;
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn another_namespace_reads_what_rules_let_it_and_commits_in_its_own() {
    let bench = require_bench!();
    let restore = [("type", "task-cache"), ("key", "restore")];
    let resource = [("type", "resource-cache"), ("key", "own")];
    let output = [("type", "output"), ("name", "made")];
    let own = [("type", "task-cache"), ("key", "own")];
    for attributes in [restore, resource, output, own] {
        step(&bench, attributes[1].1, &attributes, None).await;
    }
    bench.quiet().await;
    assert_eq!(names_of(&bench, "ci").len(), 4);
    let by_restore_key = [
        ("type", "task-cache"),
        ("key", "x"),
        ("restoreKeys", "restore"),
    ];
    let empty_task = [("type", "task-cache"), ("key", "y")];
    let empty_resource = [("type", "resource-cache"), ("key", "y")];
    let all = ["task-cache/*", "resource-cache/*", "artifact/*"];
    let mut number = 0;
    for case in ["no policy", "selected", "listed", "not listed"] {
        set(&bench, row(case, &all)).await;
        let reads = case == "listed";
        // With its text, and the name that it has in its own namespace afterwards.
        for (attributes, text, committed) in [
            (&own[..], Some("own"), Some("task-cache/own")),
            (&by_restore_key[..], Some("restore"), Some("task-cache/x")),
            // Without content there.
            (&empty_task[..], None, Some("task-cache/y")),
            (&empty_resource[..], None, Some("resource-cache/y")),
            // One that was found is complete, and is committed nowhere.
            (
                &resource[..],
                Some("own"),
                (!reads).then_some("resource-cache/own"),
            ),
        ] {
            number += 1;
            let context = format!("{case} {attributes:?}");
            let seen = from_other(&bench, &format!("v-{number}"), attributes).await;
            let expected = text.filter(|_| reads);
            let seen = seen.expect("it starts");
            assert_eq!(seen.as_deref(), expected, "{context}");
            let names = names_of(&bench, "other");
            assert_eq!(names, Vec::from_iter(committed), "{context}");
            if let Some(name) = committed {
                let reference = name.parse().expect("a reference");
                let other = tenant("other");
                bench
                    .engine
                    .destroy(&other, &reference)
                    .await
                    .expect("gone");
            }
        }
        for (kind, name) in [
            ("artifact", "made"),
            ("task-cache", "own"),
            ("resource-cache", "own"),
        ] {
            number += 1;
            let (from, none) = (format!("{kind}/{name}"), format!("{kind}/none"));
            let input = |from| [("type", "input"), ("from", from)];
            let seen = from_other(&bench, &format!("v-{number}"), &input(&from)).await;
            // It fails as if there were no such content, and there is none of this name.
            let missing = from_other(&bench, "missing", &input(&none)).await;
            let missing = missing.expect_err("there is none");
            assert!(matches!(&missing, Error::NoSuchContent(_)), "{missing}");
            if reads {
                let seen = seen.expect("it starts");
                assert_eq!(seen.as_deref(), Some(name), "{case} {from}");
            } else {
                let unreadable = seen.expect_err("it may not read");
                assert!(matches!(&unreadable, Error::NoSuchContent(_)));
                let missing = missing.to_string().replace("none", name);
                assert_eq!(unreadable.to_string(), missing, "{case} {from}");
            }
            assert_eq!(names_of(&bench, "other"), [""; 0], "{case} {from}");
        }
    }
    assert_eq!(names_of(&bench, "ci").len(), 4, "nothing was changed there");
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_input_does_not_wait_for_a_volume_whose_pod_may_not_commit() {
    let bench = require_bench!();
    let output = [("type", "output"), ("name", "made")];
    let input = [("type", "input"), ("from", "artifact/made")];
    let listing = |account| of_ci(vec![rule(&["artifact/*"], Some(&[account]), &[])]);
    set(&bench, listing("pr")).await;
    let watch = bench.engine.watch_names();
    let maker = request(&bench, "maker", &output, Some("pr"));
    bench.engine.publish(maker).await.expect("published");
    let is_coming = |told: Vec<(Name, Option<NameState>)>| {
        assert_eq!(told.len(), 1, "it has changed");
        matches!(told[0].1, Some(NameState::Coming { .. }))
    };
    assert!(is_coming(watch.take()) && watch.all().len() == 1);

    set(&bench, listing("release")).await;
    assert!(!is_coming(watch.take()) && watch.all().is_empty());
    let published = soon("an answer", bench.try_publish("user", "in", &input)).await;
    let error = published.expect_err("it is missing");
    assert!(matches!(&error, Error::NoSuchContent(_)), "{error}");

    set(&bench, listing("pr")).await;
    assert!(is_coming(watch.take()) && watch.all().len() == 1);
    drop(watch);
    bench.outcome("maker", Outcome::Succeeded).await;
    bench.unpublish("maker").await;
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_engine_works_while_policies_are_changed() {
    let bench = require_bench!();
    let engine = bench.engine.clone();
    let changing = tokio::spawn(async move {
        let other = engine.clone();
        let kept = engine.change_policies(move |it| {
            // It needs the lock of the state.
            assert!(other.policies().are_known());
            *it = Policies::known([(tenant("ci"), NamespacePolicy::closed())]);
        });
        assert!(engine.policies().all().is_some_and(|all| all.len() == 1));
        kept.await;
    });
    soon("the change", changing).await.expect("it ends");
    bench.finish().await;
}
