//! Registration with kubelet, with the real binary: kubelet's plugin manager is a watched directory
//! and two calls (`tests/common/process.rs`).
//!
//! Upgrades depend on it too: mounts outlive their process, and the next one takes them over.

#![expect(
    clippy::disallowed_types,
    reason = "a filesystem is shut down, and the binary is run as an administrator runs it"
)]

mod common;

use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use baggageclaim::csi::{self, DRIVER_NAME, Readiness};
use baggageclaim::kubelet_double::{NO_ATTRIBUTES, PublishOptions};
use baggageclaim::model::NodeId;
use baggageclaim::server::{Drain, Exited};
use baggageclaim::store::PoolDirs;
use baggageclaim::telemetry::metrics::Rpcs;
use baggageclaim::{driver, engine};
use common::api::{Api, Mood};
use common::bench::eventually;
use common::disk::Frozen;
use common::process::{NodeProcess, PATIENCE, Registry};
use common::{Fs, Lab, require_lab};

#[tokio::test]
async fn it_is_offered_when_it_serves_and_withdrawn_first() {
    let lab = require_lab!(Fs::Ext4);
    let registry = Registry::new(&lab.kubelet_dir());
    let node = NodeProcess::start(&lab, &[]);
    let info = registry.info().await;
    assert_eq!(info.r#type, "CSIPlugin");
    assert_eq!(info.name, DRIVER_NAME);
    assert_eq!(info.supported_versions, ["1.0.0"]);
    assert_eq!(info.endpoint, node.socket.to_str().expect("text"));
    // Kubelet's next step, at once: the endpoint serves, and says which node this is.
    let ready = baggageclaim::csi::probe(info.endpoint.as_ref(), PATIENCE).await;
    assert!(ready.expect("the endpoint answers"));
    let kubelet = node.kubelet().await;
    assert_eq!(kubelet.node(), "here");
    registry.notify(None).await;

    // A call that runs when the end is asked for: the registration goes first, the call is
    // answered.
    let pod = kubelet.pod("ci", "maker");
    let output = [("type", "output"), ("name", "src"), ("commit", "always")];
    pod.publish("out", output, PublishOptions::default())
        .await
        .expect("publish");
    let reader = kubelet.pod("ci", "reader");
    let waits = tokio::spawn(async move {
        let input = [("type", "input"), ("from", "artifact/src")];
        reader
            .publish("in", input, PublishOptions::default())
            .await
            .map(drop)
    });
    node.logged("waiting for content", 1).await;
    node.signal(rustix::process::Signal::TERM);
    registry
        .until("no socket", |registry| registry.inode().is_none())
        .await;
    let status = waits
        .await
        .expect("no panic")
        .expect_err("its maker did not end");
    assert!(!status.to_string().is_empty());
    let (code, log) = node.ended().await;
    assert_eq!(code, Some(0), "{log}");
    let at = |what: &str| log.find(what).unwrap_or_else(|| panic!("{what}: {log}"));
    assert!(at("offered to kubelet") > at("\"ready\""), "{log}");
    assert!(
        at("registered with kubelet") < at("registration withdrawn"),
        "{log}"
    );
    assert!(
        at("registration withdrawn") < at("stopped; mounts stay"),
        "{log}"
    );
    assert!(
        log.lines()
            .all(|line| serde_json::from_str::<serde_json::Value>(line).is_ok())
    );

    // Mounts stayed; who comes next unmounts them.
    let node = NodeProcess::start(&lab, &[]);
    node.kubelet().await;
    pod.unpublish("out").await.expect("unpublish");
    node.terminate().await;
    assert_eq!(lab.close(), [""; 0].map(PathBuf::from));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kubelet_whose_disk_does_not_answer_keeps_the_driver_from_ending_no_longer_than_its_grace()
 {
    let lab = require_lab!(Fs::Ext4);
    let kubelets = Lab::sized(Fs::Ext4, 16 << 20);
    let registry = Registry::new(&kubelets.path());
    let node = NodeProcess::start_at(&lab, kubelets.path(), &["--grace", "1s"]);
    let _ = node.kubelet().await;
    registry
        .until("a socket", |registry| registry.inode().is_some())
        .await;
    node.logged("offered to kubelet", 1).await;
    let frozen = Frozen::new(kubelets.path());
    node.signal(rustix::process::Signal::TERM);
    // Its parent hears of it when the kernel has ended the threads that wait for the disk. The disk
    // answers only after that: without a grace period the driver would never end.
    let ends = async {
        while node.states()[0] != 'Z' {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let ended = tokio::time::timeout(PATIENCE, ends).await;
    let states = node.states();
    assert!(ended.is_ok(), "the driver waits for the disk: {states:?}");
    assert!(node.states().contains(&'D'), "nothing waits for the disk");
    drop(frozen);
    let (code, log) = node.ended().await;
    assert_eq!(code, Some(0), "{log}");
    assert!(
        log.contains("\"part\":\"registration with kubelet\""),
        "{log}"
    );

    // Its remains are in no one's way.
    let node = NodeProcess::start_at(&lab, kubelets.path(), &[]);
    node.logged("offered to kubelet", 1).await;
    node.terminate().await;
    assert!(registry.inode().is_none());
    drop(registry);
    for lab in [lab, kubelets] {
        assert_eq!(lab.close(), Vec::<PathBuf>::new());
    }
}

#[tokio::test]
async fn told_no_it_comes_again_and_later_each_time() {
    let lab = require_lab!(Fs::Ext4);
    let registry = Registry::new(&lab.kubelet_dir());
    let node = NodeProcess::start(&lab, &[]);
    registry.info().await;
    let mut last = registry.inode().expect("it is there");
    let mut waits = Vec::new();
    for _ in 0..2 {
        let began = std::time::Instant::now();
        registry
            .notify(Some("RegisterPlugin error: <no node>"))
            .await;
        registry
            .until("another socket", |registry| {
                registry.inode().is_some_and(|inode| inode != last)
            })
            .await;
        waits.push(began.elapsed().as_secs_f64());
        last = registry.inode().expect("it is there");
        assert_eq!(registry.info().await.name, DRIVER_NAME);
    }
    assert!(waits[0] >= 0.9 && waits[1] >= 1.9, "{waits:?}");

    // Kubelet may come back to the same socket by itself; then that one stays.
    registry.notify(Some("not yet")).await;
    registry.notify(None).await;
    node.logged("registered with kubelet", 1).await;
    let kept = tokio::time::timeout(Duration::from_secs(5), async {
        registry
            .until("never", |registry| registry.inode() != Some(last))
            .await;
    });
    assert!(kept.await.is_err(), "a registered driver was offered again");
    let log = node.terminate().await;
    assert!(log.contains("RegisterPlugin error: <no node>"), "{log}");
    assert!(registry.inode().is_none());
}

/// Kubelet's error while the API server is away.
const NO_API: &str =
    "RegisterPlugin error -- plugin registration failed with err: connection refused";

/// A driver that was started while the API server is away, was refused by kubelet for that, and
/// waits.
async fn refused_without_api(lab: &Lab, registry: &Registry) -> (Api, NodeProcess) {
    let api = Api::start().await;
    api.be(Mood::Away);
    let node = NodeProcess::start_with_api(lab, &api, &[]);
    registry.info().await;
    registry.notify(Some(NO_API)).await;
    registry
        .until("no socket", |registry| registry.inode().is_none())
        .await;
    (api, node)
}

#[tokio::test(flavor = "multi_thread")]
async fn while_the_api_server_is_away_kubelet_is_not_asked_to_fail_again() {
    let lab = require_lab!(Fs::Ext4);
    let registry = Registry::new(&lab.kubelet_dir());
    let (api, node) = refused_without_api(&lab, &registry).await;
    api.be(Mood::Serving);
    assert_eq!(registry.info().await.name, DRIVER_NAME);
    // Kubelet may be a moment later than the driver; then it is as ever.
    registry.notify(Some("not yet")).await;
    registry.notify(None).await;
    node.logged("registered with kubelet", 1).await;
    let log = node.terminate().await;
    let at = |what: &str| log.find(what).unwrap_or_else(|| panic!("{what}: {log}"));
    let offered: Vec<usize> = log
        .match_indices("offered to kubelet\"")
        .map(|(at, _)| at)
        .collect();
    // A third one where kubelet comes back later than the second, "not yet", is given.
    assert!(offered.len() >= 2, "{log}");
    assert!(offered[0] < at("connection refused"), "{log}");
    let answers = at("the API server answers");
    assert!(at("the watch over pods works again") < answers, "{log}");
    assert!(answers < offered[1], "{log}");
    // It is no failure of the driver's.
    let alarming: Vec<&str> = (log.lines())
        .filter(|line| line.contains("\"ERROR\""))
        .collect();
    assert_eq!(alarming.len(), 1, "{log}");
    assert!(alarming[0].contains("not yet"), "{log}");
    assert_eq!(lab.close(), [""; 0].map(PathBuf::from));
}

/// That the driver does not reach the API server need not mean that kubelet does not.
#[tokio::test(flavor = "multi_thread")]
async fn while_the_api_server_is_away_kubelet_is_asked_all_the_same_and_seldom() {
    let lab = require_lab!(Fs::Ext4);
    let registry = Registry::new(&lab.kubelet_dir());
    let api = Api::start().await;
    api.be(Mood::Away);
    let node = NodeProcess::start_with_api(&lab, &api, &["--log", "info,baggageclaim=debug"]);
    registry.info().await;
    let began = Instant::now();
    let refuse = async || {
        registry.notify(Some(NO_API)).await;
        registry
            .until("no socket", |registry| registry.inode().is_none())
            .await;
    };
    refuse().await;
    registry.info().await;
    let pause = began.elapsed();
    assert!(pause >= Duration::from_secs(14), "{pause:?}");
    refuse().await;
    node.logged("kubelet still does not register the driver", 1)
        .await;
    let log = node.terminate().await;
    assert_eq!(
        log.matches("\"WARN\",\"message\":\"kubelet did not")
            .count(),
        1,
        "{log}"
    );
    assert_eq!(lab.close(), [""; 0].map(PathBuf::from));
}

/// An API server that allows the driver nothing is there, and may well enter it for kubelet.
#[tokio::test(flavor = "multi_thread")]
async fn an_api_server_that_forbids_is_not_away() {
    let lab = require_lab!(Fs::Ext4);
    let registry = Registry::new(&lab.kubelet_dir());
    let (api, node) = refused_without_api(&lab, &registry).await;
    api.be(Mood::Forbidding);
    node.logged("the API server answers", 1).await;
    registry.info().await;
    // From now on an outage of the API server does not explain kubelet's error.
    registry.notify(Some("not yet")).await;
    registry.notify(None).await;
    node.logged("registered with kubelet", 1).await;
    let log = node.terminate().await;
    assert!(log.contains("offering it again"), "{log}");
    assert!(!log.contains("the watch over pods works again"), "{log}");
    assert_eq!(lab.close(), [""; 0].map(PathBuf::from));
}

#[tokio::test]
async fn what_kubelet_sweeps_away_comes_back() {
    let lab = require_lab!(Fs::Ext4);
    let registry = Registry::new(&lab.kubelet_dir());
    let node = NodeProcess::start(&lab, &[]);
    registry.info().await;
    registry.notify(None).await;

    // As when kubelet restarts: the file goes.
    std::fs::remove_file(registry.socket()).expect("unlink");
    registry
        .until("a new socket", |registry| registry.inode().is_some())
        .await;
    assert_eq!(registry.info().await.name, DRIVER_NAME);
    registry.notify(None).await;
    node.logged("registered with kubelet", 2).await;

    // As in a new installation of kubelet: the directory goes, and another comes.
    let dir = lab.kubelet_dir().join("plugins_registry");
    std::fs::rename(&dir, lab.kubelet_dir().join("old")).expect("rename");
    let registry = Registry::new(&lab.kubelet_dir());
    assert_eq!(registry.info().await.name, DRIVER_NAME);
    registry.notify(None).await;
    node.logged("registered with kubelet", 3).await;

    // A foreign file has the name: it is kept, and the name is taken when it is free.
    node.signal(rustix::process::Signal::STOP);
    std::fs::remove_file(registry.socket()).expect("unlink");
    std::fs::write(registry.socket(), "somebody's").expect("write");
    node.signal(rustix::process::Signal::CONT);
    node.logged("is not a socket", 1).await;
    assert_eq!(
        std::fs::read(registry.socket()).expect("it is still there"),
        b"somebody's"
    );
    std::fs::remove_file(registry.socket()).expect("unlink");
    assert_eq!(registry.info().await.name, DRIVER_NAME);
    node.terminate().await;
    assert!(registry.inode().is_none());
    assert_eq!(lab.close(), [""; 0].map(PathBuf::from));
}

#[tokio::test]
async fn a_killed_drivers_socket_is_replaced_and_its_mounts_are_taken_up() {
    let lab = require_lab!(Fs::Ext4);
    let registry = Registry::new(&lab.kubelet_dir());
    let node = NodeProcess::start(&lab, &[]);
    registry.info().await;
    registry.notify(None).await;
    let kubelet = node.kubelet().await;
    let pod = kubelet.pod("ci", "build");
    let cache = [("type", "task-cache"), ("key", "k"), ("commit", "always")];
    let options = PublishOptions::default();
    let published = pod.publish("cache", cache, options).await.expect("publish");
    std::fs::write(published.target.join("before"), "1").expect("write");
    let stale = registry.inode().expect("it is there");
    node.kill().await;
    assert_eq!(
        registry.inode(),
        Some(stale),
        "no process was left to remove it"
    );

    // The pod goes on meanwhile.
    std::fs::write(published.target.join("between"), "2").expect("write");
    let node = NodeProcess::start(&lab, &[]);
    registry
        .until("the successor's socket", |registry| {
            registry.inode().is_some_and(|inode| inode != stale)
        })
        .await;
    registry.info().await;
    registry.notify(None).await;
    let kubelet = node.kubelet().await;
    std::fs::write(published.target.join("after"), "3").expect("write");
    // Kubelet asks again for what is there, and unpublishes what the first one published.
    pod.publish("cache", cache, options).await.expect("again");
    assert_eq!(lab.leftovers(), [pod.target("cache")], "mounts stacked");
    pod.unpublish("cache").await.expect("unpublish");
    // Waits until it is sealed.
    let input = [("type", "input"), ("from", "task-cache/k")];
    let next = kubelet.pod("ci", "next");
    let published = next
        .publish("cache", input, options)
        .await
        .expect("publish");
    for (file, content) in [("before", "1"), ("between", "2"), ("after", "3")] {
        let found = std::fs::read_to_string(published.target.join(file));
        assert_eq!(found.expect(file), content);
    }
    next.unpublish("cache").await.expect("unpublish");
    let empty = kubelet.pod("ci", "empty");
    empty
        .publish("s", NO_ATTRIBUTES, options)
        .await
        .expect("publish");
    empty.unpublish("s").await.expect("unpublish");
    node.terminate().await;
    assert_eq!(lab.close(), [""; 0].map(PathBuf::from));
}

/// The settings of a driver in this lab.
fn settings(lab: &Lab, grace: Duration) -> driver::Config {
    driver::Config {
        socket: lab.run_dir().join("csi.sock"),
        csi: csi::Config {
            node: NodeId::new("here").expect("a node id"),
            features: csi::Features::default(),
            rpcs: Rpcs::default(),
        },
        engine: engine::Config::new(lab.path().join("pool")),
        shared: None,
        peers: None,
        sources: baggageclaim::distribution::Sources::default(),
        ask: Duration::from_secs(2),
        fetch_wait: Duration::from_secs(90),
        grace,
    }
}

/// The end has one deadline, and every task that is late then is named.
#[tokio::test]
async fn late_tasks_of_a_role_are_named_and_the_driver_ends() {
    let lab = require_lab!(Fs::Ext4);
    let config = settings(&lab, Duration::from_millis(200));
    let socket = config.socket.clone();
    let drain = Drain::new(config.grace);
    let (ready, mut readiness) = tokio::sync::watch::channel(Readiness::Recovering);
    let role = |_, drain: Drain| -> driver::Tasks {
        let ends = async move { drain.begun().await };
        vec![
            ("hangs", Box::pin(std::future::pending())),
            ("ends", Box::pin(ends)),
            ("also hangs", Box::pin(std::future::pending())),
        ]
    };
    let shutdown = async move {
        let is_ready = |it: &Readiness| matches!(it, Readiness::Ready(..));
        let ready = readiness.wait_for(is_ready).await;
        ready.expect("the driver has the sender");
    };
    let ended = driver::run(config, drain.clone(), ready, role, shutdown).await;
    ended.expect("late tasks are left to the next start");
    assert_eq!(drain.late(), ["hangs", "also hangs"]);
    assert!(!socket.exists() && !lab.path().join("pool/admin.sock").exists());
    assert_eq!(lab.close(), [""; 0].map(PathBuf::from));
}

/// A pod that has all inodes of the pool can end, and only then does the admin socket get one.
#[tokio::test(flavor = "multi_thread")]
async fn a_driver_serves_kubelet_before_there_is_an_inode_for_its_admin_socket() {
    let lab = require_lab!(Fs::Ext4FewInodes);
    let mut config = settings(&lab, Duration::from_secs(10));
    config.engine.reserve = 0;
    let engine = engine::Engine::open(config.engine.clone()).await;
    let bench = common::bench::Bench {
        targets: lab.kubelet_dir(),
        engine: engine.expect("it opens"),
        config: config.engine.clone(),
        lab,
    };
    let (scratch, _) = bench.publish("pod", "scratch", &[]).await;
    bench.engine.shutdown().await;
    let common::bench::Bench { lab, engine, .. } = bench;
    drop(engine);
    let mut files = 0..;
    while files
        .next()
        .is_some_and(|n: u32| std::fs::write(scratch.join(n.to_string()), "").is_ok())
    {}

    let admin = config.engine.pool.join("admin.sock");
    let (ready, mut readiness) = tokio::sync::watch::channel(Readiness::Recovering);
    let shutdown = async {
        let is_ready = |it: &Readiness| matches!(it, Readiness::Ready(..));
        let engine = match &*readiness.wait_for(is_ready).await.expect("it is ready") {
            Readiness::Ready(engine, _) => engine.clone(),
            other => unreachable!("{other:?}"),
        };
        assert!(!admin.exists(), "there was an inode for it");
        let unpublished = engine.unpublish("scratch", &scratch).await;
        unpublished.expect("unpublish");
        eventually("the admin socket", || admin.exists()).await;
    };
    let drain = Drain::new(config.grace);
    let ended = driver::run(config, drain, ready, |_, _| Vec::new(), shutdown).await;
    ended.expect("it was told to end");
    assert!(!admin.exists());
    assert_eq!(lab.close(), [""; 0].map(PathBuf::from));
}

/// The part of a role that runs beside the services may not end, or panic, unnoticed: the driver
/// puts all away and says so.
#[tokio::test]
async fn a_part_that_ends_by_itself_ends_the_driver() {
    for panics in [false, true] {
        let lab = require_lab!(Fs::Ext4);
        let config = settings(&lab, Duration::from_secs(5));
        let socket = config.socket.clone();
        let drain = Drain::new(config.grace);
        let (ready, _) = tokio::sync::watch::channel(Readiness::Recovering);
        let task = async move { assert!(!panics, "on purpose") };
        let role = |_, _| -> driver::Tasks { vec![("a task of the role", Box::pin(task))] };
        let ended = driver::run(config, drain, ready, role, std::future::pending()).await;
        let error = ended.expect_err("it was not told to end");
        assert!(
            matches!(error, driver::Error::Exited(Exited("a task of the role"))),
            "{error}"
        );
        assert!(!socket.exists() && !lab.path().join("pool/admin.sock").exists());
        assert_eq!(lab.close(), [""; 0].map(PathBuf::from));
    }
}

/// Kubelet unmounts what pods have that end, and starts no other: the driver has no pool.
async fn pods_end_though(lab: &Lab, breaks: impl FnOnce(&Path), says: &str) -> NodeProcess {
    let node = NodeProcess::start(lab, &[]);
    let pod = node.kubelet().await.pod("ci", "build");
    let output = [("type", "output"), ("name", "o"), ("commit", "always")];
    let options = PublishOptions::default();
    pod.publish("out", output, options).await.expect("publish");
    let made = pod.publish("scratch", NO_ATTRIBUTES, options).await;
    std::fs::write(made.expect("publish").target.join("f"), "x").expect("write");
    let pool = node.pool.clone();
    node.terminate().await;

    breaks(&pool);
    let registry = Registry::new(&lab.kubelet_dir());
    let node = NodeProcess::start(lab, &[]);
    assert_eq!(registry.info().await.name, DRIVER_NAME);
    let kubelet = node.kubelet().await;
    assert_eq!(kubelet.node(), "here");
    let other = kubelet.pod("ci", "other");
    let refused = other.publish("out", output, options).await;
    let refused = refused.expect_err("there is no pool").to_string();
    assert!(refused.contains(says), "{refused}");
    assert!(refused.contains("can only be unmounted"), "{refused}");
    other.clean("out").expect("nothing was made");
    let pod = kubelet.pod_with_uid("ci", "build", pod.uid());
    for volume in ["out", "scratch"] {
        for _ in 0..2 {
            pod.unpublish(volume).await.expect("unpublish");
            assert!(!pod.target(volume).exists());
        }
    }
    assert_eq!(lab.leftovers(), [""; 0].map(PathBuf::from));
    node
}

/// The driver ends by itself once the pool can be opened, and the next start takes the volumes up.
async fn opens_again(lab: Lab, node: NodeProcess) {
    let (code, log) = node.ended().await;
    assert_eq!(code, Some(0), "{log}");
    assert!(log.contains("the pool can be opened again"), "{log}");
    let node = NodeProcess::start(&lab, &[]);
    let before = log.matches(RETIRED).count();
    // Before that, a SIGTERM would kill it.
    node.logged("offered to kubelet", 1).await;
    node.logged(RETIRED, 2 - before).await;
    node.terminate().await;
    assert_eq!(lab.close(), [""; 0].map(PathBuf::from));
}

/// Logged of a volume that was unmounted without the engine.
const RETIRED: &str = "kubelet will no longer unpublish this volume";

#[tokio::test]
async fn pods_end_though_the_driver_starts_on_a_pool_that_takes_no_changes() {
    let lab = require_lab!(Fs::Ext4);
    let node = pods_end_though(&lab, |_| lab.set_read_only(true), "read-only filesystem").await;
    lab.set_read_only(false);
    opens_again(lab, node).await;
}

#[tokio::test]
async fn pods_end_though_a_newer_version_wrote_the_index() {
    let lab = require_lab!(Fs::Ext4);
    let set_format = |pool: &Path, format: u64| {
        let database = redb::Database::open(pool.join("index.redb")).expect("open");
        let write = database.begin_write().expect("begin");
        let meta = redb::TableDefinition::<&str, u64>::new("meta");
        let before = {
            let mut table = write.open_table(meta).expect("the table");
            let before = table.insert("format", format).expect("set");
            before.expect("it has a format").value()
        };
        write.commit().expect("written");
        before
    };
    let mut known = 0;
    let breaks = |pool: &Path| known = set_format(pool, 99);
    let node = pods_end_though(&lab, breaks, "has format 99").await;
    set_format(&node.pool, known);
    opens_again(lab, node).await;
}

#[tokio::test]
async fn pods_end_though_the_index_is_damaged() {
    let lab = require_lab!(Fs::Ext4);
    let breaks = |pool: &Path| {
        std::fs::write(pool.join("index.redb"), "torn").expect("write");
    };
    let node = pods_end_though(&lab, breaks, "index.redb cannot be read").await;
    // Refused while the driver just tries to open the pool.
    eventually("the index is rebuilt", || {
        let mut rebuild = Command::new(env!("CARGO_BIN_EXE_baggageclaim"));
        let rebuild = rebuild.args(["check", "--rebuild", "--pool"]);
        common::lab::run(rebuild.arg(&node.pool)).is_ok()
    })
    .await;
    opens_again(lab, node).await;
}

#[tokio::test]
async fn pods_end_though_a_newer_version_made_the_pool() {
    let lab = require_lab!(Fs::Ext4);
    let json = lab.path().join("pool/pool.json");
    let known = std::cell::OnceCell::new();
    let breaks = |_: &Path| {
        let text = known.get_or_init(|| std::fs::read_to_string(&json).expect("read"));
        assert!(text.contains("\"format\":1"), "{text}");
        std::fs::write(&json, text.replace("\"format\":1", "\"format\":9")).expect("write");
    };
    let node = pods_end_though(&lab, breaks, "has format 9").await;
    std::fs::write(&json, known.get().expect("read")).expect("write");
    opens_again(lab, node).await;
}

/// As after a repair of the filesystem that lost it.
#[tokio::test]
async fn pods_end_though_the_pool_does_not_say_what_it_is() {
    let lab = require_lab!(Fs::Ext4);
    let json = lab.path().join("pool/pool.json");
    let away = lab.path().join("pool.json");
    let breaks = |pool: &Path| {
        std::fs::create_dir(pool.join("layers/layer")).expect("mkdir");
        std::fs::rename(&json, &away).expect("rename");
    };
    let node = pods_end_though(&lab, breaks, "pool.json is missing").await;
    std::fs::rename(&away, &json).expect("rename");
    opens_again(lab, node).await;
}

/// Nothing on the disk can be read, on xfs not even which backend the pool has.
#[tokio::test]
async fn pods_end_though_the_pools_filesystem_shut_down() {
    for fs in [Fs::Ext4, Fs::XfsReflink] {
        let lab = require_lab!(fs);
        let breaks = |_: &Path| {
            let mut shutdown = Command::new("xfs_io");
            let shutdown = shutdown.args(["-F", "-x", "-c", "shutdown"]);
            common::lab::run(shutdown.arg(lab.path())).expect("xfs_io");
        };
        let node = pods_end_though(&lab, breaks, "EIO").await;
        node.terminate().await;
        assert_eq!(lab.close(), [""; 0].map(PathBuf::from));
    }
}

/// A driver whose container lacks kubelet's directory cannot tell whether a pod runs: its volume is
/// kept, and kubelet is not told that it was unmounted.
#[tokio::test]
async fn a_driver_that_does_not_see_kubelets_pods_takes_none_of_their_volumes_away() {
    let lab = require_lab!(Fs::Ext4);
    let node = NodeProcess::start(&lab, &[]);
    let pod = node.kubelet().await.pod("ci", "build");
    let options = PublishOptions::default();
    let made = pod.publish("scratch", NO_ATTRIBUTES, options).await;
    let target = made.expect("publish").target;
    std::fs::write(target.join("f"), "x").expect("write");
    node.terminate().await;

    // The mount moves along, as seen from the driver.
    let pods = lab.kubelet_dir().join("pods");
    let away = lab.kubelet_dir().join("away");
    std::fs::rename(&pods, &away).expect("rename");
    let node = NodeProcess::start(&lab, &[]);
    let kubelet = node.kubelet().await;
    let reaped = Command::new(env!("CARGO_BIN_EXE_baggageclaim"))
        .args(["reap", "--pool"])
        .arg(&node.pool)
        .output()
        .expect("it runs");
    assert!(reaped.status.success(), "{reaped:?}");
    let pod = kubelet.pod_with_uid("ci", "build", pod.uid());
    let refused = pod.unpublish("scratch").await;
    let refused = refused.expect_err("it is still mounted").to_string();
    let missing = format!("the driver sees no directory {}", pods.display());
    assert!(refused.contains(&missing), "{refused}");
    let file = away
        .join(target.strip_prefix(&pods).expect("below"))
        .join("f");
    assert_eq!(std::fs::read(&file).expect("it is still there"), b"x");

    std::fs::rename(&away, &pods).expect("rename");
    pod.unpublish("scratch").await.expect("unpublish");
    assert!(!target.exists());
    node.terminate().await;
    assert_eq!(lab.close(), [""; 0].map(PathBuf::from));
}

#[tokio::test]
async fn it_is_not_offered_while_it_cannot_serve() {
    let lab = require_lab!(Fs::Ext4);
    let registry = Registry::new(&lab.kubelet_dir());
    // Another process has the pool, and later there is none: neither driver unmounts anything.
    let pool = lab.path().join("pool");
    let taken = PoolDirs::open(&pool).expect("made");
    let (code, log) = NodeProcess::start(&lab, &[]).ended().await;
    assert_eq!(code, Some(1), "{log}");
    assert!(log.contains("in use by another process"), "{log}");
    assert!(!log.contains("offered to kubelet"), "{log}");
    drop(taken);
    std::fs::rename(&pool, lab.path().join("away")).expect("rename");
    std::fs::write(&pool, "").expect("write");
    let (code, log) = NodeProcess::start(&lab, &[]).ended().await;
    assert_eq!(code, Some(1), "{log}");
    assert!(log.contains("ENOTDIR"), "{log}");
    assert!(!log.contains("offered to kubelet"), "{log}");
    // A foreign live socket in the driver's place is not taken over.
    let socket = lab.kubelet_dir().join("plugins").join(DRIVER_NAME);
    std::fs::create_dir_all(&socket).expect("mkdir");
    let somebody = UnixListener::bind(socket.join("csi.sock")).expect("bind");
    let (code, log) = NodeProcess::start(&lab, &[]).ended().await;
    assert_eq!(code, Some(1), "{log}");
    assert!(log.contains("another process already serves"), "{log}");
    drop(somebody);
    assert!(registry.inode().is_none());
}
