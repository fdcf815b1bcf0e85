//! The Node service on its real socket, with kubelet's calls: once, repeated, concurrent, at the
//! end. Wrong requests are in `bad_requests.rs`.

mod common;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use baggageclaim::backend::BackendKind;
use baggageclaim::csi::Readiness;
use baggageclaim::kubelet_double::{NO_ATTRIBUTES, Pod, PublishOptions};
use baggageclaim::model::Outcome;
use baggageclaim::proto::csi::v1 as csi;
use common::calls::{OPTIONS, Publish, mode, mount, send, text, unpublish};
use common::disk::Frozen;
use common::process::{NodeProcess, arrived};
use common::{Driver, Fs, require_lab};
use csi::StorageHealthErrorType;
use csi::volume_capability::access_mode::Mode;
use csi::volume_usage::Unit;
use futures_util::future::join_all;
use tonic::Code;

#[tokio::test]
async fn every_call_twice_is_the_same_as_once() {
    for (fs, backend) in [
        (Fs::Ext4, BackendKind::Overlay),
        (Fs::Btrfs, BackendKind::Btrfs),
        (Fs::Tmpfs, BackendKind::Copy),
    ] {
        let driver = Driver::start(require_lab!(fs), Some(backend)).await;
        let pod = driver.kubelet.pod("ci", "build");
        for _ in 0..10 {
            pod.publish("src", NO_ATTRIBUTES, OPTIONS)
                .await
                .expect("publish");
        }
        assert_eq!(
            driver.lab.leftovers(),
            [pod.target("src")],
            "mounts stacked"
        );
        assert_eq!(driver.engine.volumes(None).len(), 1);
        for _ in 0..2 {
            let usage = pod.stats("src").await.expect("stats").usage;
            assert_eq!(usage[0].unit(), Unit::Bytes);
            assert!(usage[0].total > 0 && usage[0].available > 0);
        }
        pod.unpublish("src").await.expect("unpublish");
        pod.unpublish("src").await.expect("unpublish again");
        driver.assert_nothing_left("twice").await;
        driver.stop().await;
    }
}

#[tokio::test]
async fn a_fork_that_is_a_copy_says_in_the_log_how_it_was_made() {
    for (fs, method) in [(Fs::Ext4, "Bytes"), (Fs::XfsReflink, "Reflink")] {
        let lab = require_lab!(fs);
        let node = NodeProcess::start(&lab, &["--backend", "copy"]);
        let kubelet = node.kubelet().await;
        let pod = kubelet.pod("ci", "build");
        let output = [("type", "output"), ("name", "o"), ("commit", "always")];
        let made = pod.publish("out", output, OPTIONS).await.expect("publish");
        std::fs::write(made.target.join("file"), "made").expect("write");
        pod.unpublish("out").await.expect("unpublish");
        let input = [("type", "input"), ("from", "artifact/o")];
        let user = kubelet.pod("ci", "user");
        user.publish("in", input, OPTIONS).await.expect("publish");
        user.unpublish("in").await.expect("unpublish");
        let log = node.terminate().await;
        let copied: Vec<&str> = log
            .lines()
            // A seal copies into `layers/`.
            .filter(|line| line.contains("\"copied\"") && line.contains("/volumes/"))
            .collect();
        let [copied] = copied[..] else {
            panic!("once: {log}");
        };
        let copied: serde_json::Value = serde_json::from_str(copied).expect("JSON");
        assert_eq!(copied["method"], method, "{copied}");
        assert_eq!(copied["files"], 1, "{copied}");
        assert_eq!(lab.close(), [""; 0].map(std::path::PathBuf::from));
    }
}

type Spoil = fn(&mut Publish);

#[tokio::test]
async fn the_same_target_with_other_parameters_already_exists() {
    let driver = Driver::start(require_lab!(Fs::Ext4), Some(BackendKind::Overlay)).await;
    let pod = driver.kubelet.pod("ci", "build");
    let first = pod
        .publish("src", NO_ATTRIBUTES, OPTIONS)
        .await
        .expect("publish");
    std::fs::write(first.target.join("work"), "").expect("write");
    let spoilt: [(&str, Spoil); 4] = [
        ("readOnly", |r| r.readonly = true),
        ("type", |r| {
            r.volume_context.insert("type".into(), "output".into());
            r.volume_context.insert("name".into(), "x".into());
        }),
        ("sizeLimit", |r| {
            r.volume_context.insert("sizeLimit".into(), "1Gi".into());
        }),
        ("group", |r| mount(r).volume_mount_group = "5".into()),
    ];
    for (what, spoil) in spoilt {
        let mut request = pod.publish_request("src", NO_ATTRIBUTES, OPTIONS);
        spoil(&mut request);
        let status = send(&driver, request).await.expect_err(what);
        assert_eq!(status.code(), Code::AlreadyExists, "{what}: {status}");
        assert!(
            first.target.join("work").exists(),
            "{what}: the live mount was torn down"
        );
    }
    pod.unpublish("src").await.expect("unpublish");
    driver.assert_nothing_left("other parameters").await;
    driver.stop().await;
}

/// An inline volume belongs to one pod, and kubelet names one target for it. Another target beside
/// the mounted one is refused, also in the modes that allow several writers. The target path holds
/// the pod's uid and the volume's name, so the second one is under another kubelet root.
#[tokio::test]
async fn a_second_target_is_refused_in_every_mode() {
    let driver = Driver::start(require_lab!(Fs::Ext4), Some(BackendKind::Overlay)).await;
    for wanted in [
        Mode::SingleNodeMultiWriter,
        Mode::SingleNodeSingleWriter,
        Mode::SingleNodeWriter,
    ] {
        let pod = driver.kubelet.pod("ci", "build");
        pod.prepare("src").expect("prepare");
        let mut request = pod.publish_request("src", NO_ATTRIBUTES, OPTIONS);
        mode(&mut request, wanted);
        send(&driver, request.clone()).await.expect("first");
        std::fs::write(pod.target("src").join("file"), "").expect("write");

        let mut second = request.clone();
        let root = driver.lab.kubelet_dir();
        let beneath = pod.target("src");
        let beneath = beneath.strip_prefix(&root).expect("below the root");
        let other = root.join("second").join(beneath);
        std::fs::create_dir_all(other.parent().expect("it has one")).expect("mkdir");
        second.target_path = text(&other);
        let answer = send(&driver, second.clone()).await;
        let status = answer.expect_err("one target");
        let code = status.code();
        assert_eq!(code, Code::FailedPrecondition, "{wanted:?}: {status}");
        assert!(!other.exists(), "{wanted:?}: the target was made");
        assert!(
            pod.target("src").join("file").exists(),
            "{wanted:?}: the mounted target lost its content"
        );
        pod.unpublish("src").await.expect("unpublish");
        driver.assert_nothing_left("two targets").await;
    }
    driver.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn publishes_that_race_make_one_volume() {
    let driver = Driver::start(require_lab!(Fs::Ext4), Some(BackendKind::Overlay)).await;
    for _ in 0..20 {
        let pod = driver.kubelet.pod("ci", "build");
        pod.prepare("src").expect("prepare");
        let request = pod.publish_request("src", NO_ATTRIBUTES, OPTIONS);
        let racers = (0..6).map(|_| {
            let (mut client, request) = (driver.kubelet.node_client(), request.clone());
            tokio::spawn(async move { client.node_publish_volume(request).await.map(drop) })
        });
        let racers: Vec<_> = racers.collect();
        let mut won = 0;
        for racer in racers {
            match racer.await.expect("no panic") {
                Ok(()) => won += 1,
                Err(status) => assert_eq!(status.code(), Code::Aborted, "{status}"),
            }
        }
        assert!(won > 0, "no caller won");
        assert_eq!(driver.lab.leftovers(), [pod.target("src")]);
        pod.unpublish("src").await.expect("unpublish");
        driver.assert_nothing_left("a race of publishes").await;
    }
    driver.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_publish_that_races_its_unpublish_leaves_all_or_nothing() {
    let driver = Driver::start(require_lab!(Fs::Ext4), Some(BackendKind::Overlay)).await;
    for _ in 0..30 {
        let pod = driver.kubelet.pod("ci", "build");
        pod.prepare("src").expect("prepare");
        let request = pod.publish_request("src", NO_ATTRIBUTES, OPTIONS);
        let mut client = driver.kubelet.node_client();
        let (id, target) = (request.volume_id.clone(), request.target_path.clone());
        let publish =
            tokio::spawn(async move { client.node_publish_volume(request).await.map(drop) });
        let unpublished = unpublish(&driver, &id, &target).await;
        let published = publish.await.expect("no panic");
        for status in [&published, &unpublished]
            .into_iter()
            .filter_map(|r| r.as_ref().err())
        {
            assert_eq!(status.code(), Code::Aborted, "{status}");
        }
        driver.engine.settled().await;
        let volumes = driver.engine.volumes(None).len();
        assert_eq!(
            volumes,
            driver.lab.leftovers().len(),
            "a volume without its mount, or the opposite"
        );
        unpublish_until_done(&driver, &pod).await;
        driver.assert_nothing_left("a race").await;
    }
    driver.stop().await;
}

/// As kubelet does: again, while the answer is ABORTED.
async fn unpublish_until_done(driver: &Driver, pod: &Pod) {
    for _ in 0..100 {
        match unpublish(driver, &pod.volume_id("src"), &text(&pod.target("src"))).await {
            Ok(()) => return,
            Err(status) => assert_eq!(status.code(), Code::Aborted, "{status}"),
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("unpublish does not converge");
}

#[tokio::test]
async fn stats_are_for_a_volume_where_it_is_published() {
    let driver = Driver::start(require_lab!(Fs::Ext4), Some(BackendKind::Overlay)).await;
    let pod = driver.kubelet.pod("ci", "build");
    let status = pod.stats("src").await.expect_err("unknown volume");
    assert_eq!(status.code(), Code::NotFound, "{status}");
    let first = pod
        .publish("src", NO_ATTRIBUTES, OPTIONS)
        .await
        .expect("publish");
    let client = driver.kubelet.node_client();
    let measure = |id: &str, path: &Path| {
        let request = csi::NodeGetVolumeStatsRequest {
            volume_id: id.to_owned(),
            volume_path: text(path),
            staging_target_path: String::new(),
        };
        let mut client = client.clone();
        async move { client.node_get_volume_stats(request).await }
    };
    let id = &first.volume_id;
    for (id, path) in [
        (id.as_str(), first.target.with_file_name("other")),
        ("csi-0", first.target.clone()),
        // An invalid id is no volume's, in every query.
        ("../../x", first.target.clone()),
        ("a b", first.target.clone()),
        (&"x".repeat(500), first.target.clone()),
    ] {
        let status = measure(id, &path).await.expect_err("not there");
        assert_eq!(status.code(), Code::NotFound, "{status}");
    }
    for (id, path) in [("", first.target.as_path()), (id, Path::new(""))] {
        let status = measure(id, path).await.expect_err("incomplete");
        assert_eq!(status.code(), Code::InvalidArgument, "{status}");
    }
    let usage = measure(id, &first.target)
        .await
        .expect("stats")
        .into_inner()
        .usage;
    let units: Vec<Unit> = usage.iter().map(csi::VolumeUsage::unit).collect();
    assert_eq!(units, [Unit::Bytes, Unit::Inodes]);
    pod.unpublish("src").await.expect("unpublish");
    let status = pod.stats("src").await.expect_err("unpublished");
    assert_eq!(status.code(), Code::NotFound, "{status}");

    driver.stop().await;
}

#[tokio::test]
async fn an_input_that_is_about_to_be_sealed_is_waited_for() {
    let driver = Driver::start(require_lab!(Fs::Ext4), Some(BackendKind::Overlay)).await;
    let maker = driver.kubelet.pod("ci", "maker");
    let output = [("type", "output"), ("name", "src")];
    let made = maker
        .publish("out", output, OPTIONS)
        .await
        .expect("publish");
    std::fs::write(made.target.join("file"), "made").expect("write");
    maker.unpublish("out").await.expect("unpublish");

    let user = driver.kubelet.pod("ci", "user");
    let input = [("type", "input"), ("from", "artifact/src")];
    let waiting = arrived(&driver.kubelet, {
        let user = user.clone();
        async move { user.publish("in", input, OPTIONS).await }
    })
    .await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(!waiting.is_finished(), "it did not wait");
    // A second call on the same volume meanwhile is told so at once.
    let status = user.publish("in", input, OPTIONS).await.expect_err("busy");
    assert_eq!(status.code(), Code::Aborted, "{status}");

    let uid = maker.uid().parse().expect("a uid");
    let news = driver.engine.report_outcome(&uid, Outcome::Succeeded).await;
    assert_eq!(news.expect("report").news, 1);
    let published = waiting.await.expect("no panic").expect("publish");
    let seen = std::fs::read_to_string(published.target.join("file")).expect("read");
    assert_eq!(seen, "made");
    // Another tenant cannot even learn that it exists.
    let stranger = driver.kubelet.pod("other", "user");
    let status = stranger
        .publish("in", input, OPTIONS)
        .await
        .expect_err("another tenant");
    assert_eq!(status.code(), Code::NotFound, "{status}");
    user.unpublish("in").await.expect("unpublish");
    driver.assert_nothing_left("an input").await;
    driver.stop().await;
}

#[tokio::test]
async fn an_input_that_does_not_come_in_time_is_aborted() {
    let lab = require_lab!(Fs::Ext4);
    let driver =
        Driver::start_with(lab, |config| config.input_wait = Duration::from_millis(300)).await;
    let maker = driver.kubelet.pod("ci", "maker");
    let output = [("type", "output"), ("name", "src")];
    maker
        .publish("out", output, OPTIONS)
        .await
        .expect("publish");
    let user = driver.kubelet.pod("ci", "user");
    let input = [("type", "input"), ("from", "artifact/src")];
    for _ in 0..2 {
        let status = user
            .publish("in", input, OPTIONS)
            .await
            .expect_err("it does not come");
        assert_eq!(status.code(), Code::Aborted, "{status}");
        assert!(
            status.message().contains("artifact/src is not sealed yet"),
            "{status}"
        );
        assert!(!user.target("in").exists());
    }
    maker.unpublish("out").await.expect("unpublish");
    driver.stop().await;
}

#[tokio::test]
async fn a_pods_group_may_write_into_a_new_volume() {
    use std::os::unix::fs::MetadataExt;
    let driver = Driver::start(require_lab!(Fs::Ext4), Some(BackendKind::Overlay)).await;
    let pod = driver.kubelet.pod("ci", "build");
    let options = PublishOptions {
        fs_group: Some(2000),
        ..OPTIONS
    };
    let published = pod
        .publish(
            "src",
            [("type", "output"), ("name", "x"), ("mode", "700")],
            options,
        )
        .await
        .expect("publish");
    let root = std::fs::metadata(&published.target).expect("stat");
    assert_eq!(root.gid(), 2000);
    assert_eq!(root.mode() & 0o2070, 0o2070, "{:o}", root.mode());
    pod.unpublish("src").await.expect("unpublish");
    driver.stop().await;
}

#[tokio::test]
async fn a_running_call_is_answered_at_the_end() {
    let driver = Driver::start(require_lab!(Fs::Ext4), Some(BackendKind::Overlay)).await;
    let maker = driver.kubelet.pod("ci", "maker");
    let output = [("type", "output"), ("name", "src"), ("commit", "always")];
    maker
        .publish("out", output, OPTIONS)
        .await
        .expect("publish");
    let user = driver.kubelet.pod("ci", "user");
    user.prepare("in").expect("prepare");
    let request =
        user.publish_request("in", [("type", "input"), ("from", "artifact/src")], OPTIONS);
    let mut client = driver.kubelet.node_client();
    let waiting = arrived(&driver.kubelet, async move {
        client.node_publish_volume(request).await.map(drop)
    })
    .await;
    driver.begin_to_stop();
    tokio::time::sleep(Duration::from_millis(100)).await;
    // Straight to the engine: the socket takes no new calls any more, and the running one still
    // waits.
    driver
        .engine
        .unpublish(&maker.volume_id("out"), &maker.target("out"))
        .await
        .expect("unpublish");
    waiting.await.expect("no panic").expect("it is answered");
    driver
        .engine
        .unpublish(&user.volume_id("in"), &user.target("in"))
        .await
        .expect("unpublish");
    driver.stop().await;
}

#[tokio::test]
async fn the_driver_says_what_it_is_and_can() {
    let driver = Driver::start(require_lab!(Fs::Ext4), Some(BackendKind::Overlay)).await;
    let mut identity = driver.kubelet.identity_client();
    let info = identity.get_plugin_info(csi::GetPluginInfoRequest {}).await;
    let info = info.expect("info").into_inner();
    assert_eq!(info.name, "baggageclaim.csi.concourse-ci.org");
    assert_eq!(info.vendor_version, env!("CARGO_PKG_VERSION"));
    let probe = identity.probe(csi::ProbeRequest {}).await.expect("probe");
    assert_eq!(probe.into_inner().ready, Some(true));
    let mut node = driver.kubelet.node_client();
    let info = node.node_get_info(csi::NodeGetInfoRequest {}).await;
    let info = info.expect("info").into_inner();
    assert_eq!(
        (info.node_id.as_str(), info.max_volumes_per_node),
        ("node-1", 0)
    );
    let topology: BTreeMap<String, String> = info.accessible_topology.expect("topology").segments;
    assert_eq!(topology.len(), 2);
    let status = node
        .node_get_volume_health(csi::NodeGetVolumeHealthRequest::default())
        .await
        .expect_err("alpha, and not switched on");
    assert_eq!(status.code(), Code::Unimplemented);
    assert!(!status.message().is_empty());
    driver.stop().await;
}

/// The kernel takes its time to put away what was unmounted, and until then each volume has a
/// descriptor.
#[tokio::test(flavor = "multi_thread")]
async fn however_many_volumes_leave_at_once_no_call_lacks_a_descriptor() {
    const MANY: usize = 1500;
    let lab = require_lab!(Fs::Ext4);
    let node = NodeProcess::start(&lab, &[]);
    let kubelet = node.kubelet().await;
    let maker = kubelet.pod("ci", "maker");
    let output = [("type", "output"), ("name", "o"), ("commit", "always")];
    maker.publish("o", output, OPTIONS).await.expect("publish");
    maker.unpublish("o").await.expect("unpublish");
    let pod = kubelet.pod("ci", "step");
    let volumes: Vec<String> = (0..MANY).map(|n| format!("v{n}")).collect();
    for volume in &volumes {
        let fork = [("type", "input"), ("from", "artifact/o")];
        pod.publish(volume, fork, OPTIONS).await.expect("publish");
    }
    node.limit_descriptors(1000);
    let unpublished = volumes.iter().map(|volume| pod.unpublish(volume));
    for unpublished in join_all(unpublished).await {
        unpublished.expect("unpublish");
    }
    node.terminate().await;
    assert!(lab.leftovers().is_empty(), "something is mounted");
}

#[tokio::test]
async fn until_the_pool_is_open_probe_answers_and_nothing_else() {
    let (_ready, readiness) = tokio::sync::watch::channel(Readiness::Recovering);
    let (_dir, channel) = common::driver::serve_without_engine(readiness).await;

    let mut identity = csi::identity_client::IdentityClient::new(channel.clone());
    let mut node = csi::node_client::NodeClient::new(channel.clone());
    let probe = identity.probe(csi::ProbeRequest {}).await.expect("probe");
    assert_eq!(probe.into_inner().ready, Some(false));
    let unpublish = csi::NodeUnpublishVolumeRequest {
        volume_id: "x".into(),
        target_path: "/x".into(),
    };
    let status = node.node_unpublish_volume(unpublish).await;
    let status = status.expect_err("recovering");
    assert_eq!(status.code(), Code::Unavailable, "{status}");
    assert!(status.message().contains("recovering"), "{status}");
}

/// The pool's problems: reason and message of each.
async fn storage_health(node: &NodeProcess) -> Vec<(StorageHealthErrorType, String, String)> {
    let mut client = node.kubelet().await.node_client();
    let request = csi::NodeGetStorageHealthRequest::default();
    let health = client.node_get_storage_health(request).await;
    let entries = health.expect("health").into_inner().backend_health;
    let told = entries
        .into_iter()
        .map(|entry| (entry.status(), entry.reason, entry.message));
    told.collect()
}

/// Storage health reports it, and Probe stays as it is: a restarted driver could not start.
#[tokio::test]
async fn a_pool_that_takes_no_changes_is_unreachable_storage_and_no_reason_to_restart() {
    let lab = require_lab!(Fs::Ext4);
    let node = NodeProcess::start(&lab, &["--alpha"]);
    assert_eq!(storage_health(&node).await, []);
    let assert_unreachable = async |why: &str| {
        let told = storage_health(&node).await;
        let [(status, reason, message)] = &told[..] else {
            panic!("{told:?}");
        };
        assert_eq!(*status, StorageHealthErrorType::StorageUnreachable);
        assert_eq!(reason, "PoolTakesNoChanges");
        assert!(message.contains(why), "{message}");
        let mut identity = node.kubelet().await.identity_client();
        let probe = identity.probe(csi::ProbeRequest {}).await.expect("probe");
        assert_eq!(probe.into_inner().ready, Some(true));
    };
    let frozen = Frozen::new(lab.path());
    assert_unreachable("does not answer within").await;
    drop(frozen);
    assert_eq!(storage_health(&node).await, []);
    lab.disk_fails();
    assert_unreachable("EROFS").await;
    node.kill().await;
    assert_eq!(lab.close(), [""; 0].map(std::path::PathBuf::from));
}
