//! `/healthz`, `/readyz` and `/metrics` of the real binary: while it starts, serves, hangs on its
//! disk and ends. Each metric moves by exactly the work done, and has no names in its labels.

#![expect(
    clippy::disallowed_types,
    clippy::float_cmp,
    reason = "a filesystem is frozen by the program that does so; what is compared are whole numbers"
)]

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use baggageclaim::csi::METHODS;
use baggageclaim::kubelet_double::{Kubelet, NO_ATTRIBUTES, PublishOptions};
use common::api::{Api, Mood};
use common::disk::Frozen;
use common::process::{NodeProcess, PATIENCE, Registry, arrived};
use common::{Fs, require_lab};
use hyper_util::rt::TokioIo;
use k8s_openapi::api::apps::v1::DaemonSet;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream, UnixStream};
use tonic::transport::{Endpoint, Uri};

/// How many threads of the driver make system calls for RPCs (`--threads`).
const THREADS: usize = 4;

/// An answer: its status, its head, its body.
struct Answer(u16, String, String);

async fn request(address: SocketAddr, head: &str) -> Answer {
    let mut stream = TcpStream::connect(address).await.expect("it listens");
    let request = format!("{head}\r\nHost: node\r\n\r\n");
    stream
        .write_all(request.as_bytes())
        .await
        .expect("it takes it");
    let mut text = String::new();
    let answer = tokio::time::timeout(PATIENCE, stream.read_to_string(&mut text));
    let answer = answer.await.unwrap_or_else(|_| panic!("no answer: {head}"));
    answer.expect("it answers");
    let (head, body) = text.split_once("\r\n\r\n").expect("head and body");
    let status = head.split(' ').nth(1).expect("a status");
    let status = status.parse().expect("a number");
    Answer(status, head.to_lowercase(), body.to_owned())
}

async fn get(address: SocketAddr, path: &str) -> (u16, String) {
    let Answer(status, _, body) = request(address, &format!("GET {path} HTTP/1.1")).await;
    (status, body)
}

/// The series of a page of metrics. Every line must be one of the format.
fn series(text: &str) -> BTreeMap<String, f64> {
    let mut series = BTreeMap::new();
    let mut family = String::new();
    let word = |text: &str| {
        let mut chars = text.chars();
        chars
            .next()
            .is_some_and(|c| c.is_ascii_alphabetic() || c == '_')
            && chars.all(|c| c.is_ascii_alphanumeric() || c == '_')
    };
    assert!(text.ends_with("# EOF\n"), "cut off: {text}");
    for line in text.lines().filter(|line| *line != "# EOF") {
        if let Some(comment) = line.strip_prefix("# ") {
            let mut parts = comment.splitn(3, ' ');
            let (kind, name, rest) = (parts.next(), parts.next(), parts.next());
            let (Some(name), Some(rest)) = (name, rest) else {
                panic!("{line}")
            };
            match kind {
                Some("HELP") => assert!(!rest.is_empty(), "{line}"),
                Some("TYPE") => {
                    assert!(["counter", "gauge", "histogram"].contains(&rest), "{line}");
                }
                Some("UNIT") => assert!(name.ends_with(&format!("_{rest}")), "{line}"),
                _ => panic!("{line}"),
            }
            assert!(name.starts_with("baggageclaim_") && word(name), "{line}");
            name.clone_into(&mut family);
            continue;
        }
        let (id, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("{line}"));
        let (name, labels) = id.split_once('{').unwrap_or((id, "}"));
        assert!(
            name.starts_with(&family) && word(name),
            "{line} in {family}"
        );
        let labels = labels.strip_suffix('}').unwrap_or_else(|| panic!("{line}"));
        for label in labels.split(',').filter(|label| !label.is_empty()) {
            let (key, value) = label.split_once('=').unwrap_or_else(|| panic!("{line}"));
            assert!(word(key), "{line}");
            let quoted = value.strip_prefix('"').and_then(|v| v.strip_suffix('"'));
            let value = quoted.unwrap_or_else(|| panic!("{line}"));
            assert!(allowed(key, value), "{line}: a label that is not defined");
        }
        let value = value.parse().unwrap_or_else(|_| panic!("{line}"));
        assert!(
            series.insert(id.to_owned(), value).is_none(),
            "twice: {line}"
        );
    }
    series
}

/// All allowed values of labels: any other value would be a name.
fn allowed(key: &str, value: &str) -> bool {
    let one_of = |words: &[&str]| words.contains(&value);
    match key {
        "method" => one_of(&METHODS) || value == "other",
        "code" => value.bytes().all(|b| b.is_ascii_uppercase() || b == b'_'),
        "type" => one_of(&[
            "scratch",
            "input",
            "output",
            "resource-cache",
            "task-cache",
            "import",
        ]),
        "state" => one_of(&[
            "preparing",
            "published",
            "unpublished",
            "awaiting-outcome",
            "in-use",
            "sealing",
        ]),
        "kind" => one_of(&["output", "resource-cache", "task-cache", "resource", "task"]),
        "source" => one_of(&["local", "peer", "shared"]),
        "result" => one_of(&["sealed", "given-up"]),
        "reason" => one_of(&["space", "ttl", "budget"]),
        "backend" => one_of(&["overlay", "btrfs", "copy"]),
        "version" => value == env!("CARGO_PKG_VERSION"),
        "le" => value == "+Inf" || value.parse::<f64>().is_ok(),
        _ => false,
    }
}

async fn metrics(address: SocketAddr) -> BTreeMap<String, f64> {
    let (status, body) = get(address, "/metrics").await;
    assert_eq!(status, 200, "{body}");
    series(&body)
}

/// Repeats until the metrics match. The awaited work runs in the background and signals nothing
/// outside.
async fn until(
    address: SocketAddr,
    what: &str,
    so: impl Fn(&BTreeMap<String, f64>) -> bool,
) -> BTreeMap<String, f64> {
    let began = Instant::now();
    loop {
        let now = metrics(address).await;
        if so(&now) {
            return now;
        }
        assert!(began.elapsed() < PATIENCE, "{what}: {now:#?}");
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
}

fn value(series: &BTreeMap<String, f64>, id: &str) -> f64 {
    let id = format!("baggageclaim_{id}");
    *series
        .get(&id)
        .unwrap_or_else(|| panic!("no {id}: {series:#?}"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[expect(clippy::too_many_lines, reason = "one scenario, told in order")]
async fn it_is_alive_before_it_is_ready_and_until_it_has_ended() {
    let lab = require_lab!(Fs::Ext4);
    let registry = Registry::new(&lab.kubelet_dir());
    // Making the pool waits for the disk.
    let frozen = Frozen::new(lab.path());
    let node = NodeProcess::start(&lab, &["--threads", &THREADS.to_string()]);
    let address = node.http().await;
    node.logged("\"starting\"", 1).await;
    assert_eq!(get(address, "/healthz").await, (200, "ok\n".into()));
    let (status, why) = get(address, "/readyz").await;
    assert_eq!((status, why.as_str()), (503, "the pool is being opened\n"));
    let starting = metrics(address).await;
    assert!(
        (
            value(&starting, "ready"),
            value(&starting, "kubelet_registered")
        ) == (0.0, 0.0)
    );
    assert!(!starting.contains_key("baggageclaim_pool_free_bytes"));
    assert!(registry.inode().is_none(), "offered before it can serve");
    drop(frozen);

    node.kubelet().await;
    assert_eq!(get(address, "/readyz").await, (200, "ok\n".into()));
    registry.info().await;
    registry.notify(None).await;
    until(address, "registered", |now| {
        value(now, "kubelet_registered") == 1.0
    })
    .await;
    let now = metrics(address).await;
    let expected = [
        ("ready", 1.0),
        ("build_info{version=\"0.1.0\"}", 1.0),
        ("pool_info{backend=\"overlay\"}", 1.0),
    ];
    for (id, expected) in expected {
        let found = value(&now, &id.replace("0.1.0", env!("CARGO_PKG_VERSION")));
        assert_eq!(found, expected, "{id}");
    }
    let bytes = value(&now, "pool_capacity_bytes");
    assert!(bytes > 9e8 && value(&now, "pool_free_bytes") < bytes);
    let inodes = value(&now, "pool_capacity_inodes");
    assert!(inodes > 1000.0 && value(&now, "pool_free_inodes") < inodes);

    // The disk hangs, and so do all threads for calls. More calls wait for a thread. The driver is
    // not ready, but alive: a restart would not help.
    let frozen = Frozen::new(lab.path());
    let (mut pods, mut publishes) = (Vec::new(), Vec::new());
    for number in 0..THREADS + 2 {
        // A connection of its own, made for the call, as kubelet does.
        let kubelet = node.kubelet().await;
        let pod = kubelet.pod("ci", &format!("build-{number}"));
        pods.push(pod.clone());
        let target = pod.target("s");
        let publish = arrived(&kubelet, async move {
            let options = PublishOptions::default();
            pod.publish("s", NO_ATTRIBUTES, options).await.map(drop)
        });
        publishes.push(publish.await);
        let began = Instant::now();
        while number < THREADS && !target.exists() {
            assert!(began.elapsed() < PATIENCE, "{}", target.display());
            tokio::task::yield_now().await;
        }
        assert_eq!(get(address, "/healthz").await, (200, "ok\n".into()));
    }
    let (status, why) = get(address, "/readyz").await;
    assert_eq!(status, 503, "{why}");
    assert!(why.contains("does not answer within"), "{why}");
    let hanging = metrics(address).await;
    assert!(value(&hanging, "ready") == 0.0);
    value(&hanging, "csi_rpcs_total{method=\"Probe\",code=\"OK\"}");

    // The end: running calls are answered, and until then the pages show that it is stopping.
    node.signal(rustix::process::Signal::TERM);
    registry
        .until("withdrawn", |registry| registry.inode().is_none())
        .await;
    let (status, why) = get(address, "/readyz").await;
    assert_eq!((status, why.as_str()), (503, "stopping\n"));
    assert_eq!(get(address, "/healthz").await.0, 200);
    drop(frozen);
    for publish in publishes {
        let publish = tokio::time::timeout(PATIENCE, publish);
        let answer = publish.await.expect("in time").expect("no panic");
        answer.expect("it is answered");
    }
    let (code, log) = node.ended().await;
    assert_eq!(code, Some(0), "{log}");
    TcpStream::connect(address)
        .await
        .expect_err("the server is closed");

    // The next driver has the volumes that were published meanwhile.
    let node = NodeProcess::start(&lab, &[]);
    node.kubelet().await;
    for pod in &pods {
        pod.unpublish("s").await.expect("unpublish");
    }
    node.terminate().await;
    assert_eq!(lab.close(), [""; 0].map(PathBuf::from));
}

/// Another process answers there: to kubelet it is no driver.
#[tokio::test]
async fn a_driver_that_does_not_answer_at_its_socket_is_not_alive() {
    let lab = require_lab!(Fs::Ext4);
    let node = NodeProcess::start(&lab, &[]);
    let address = node.http().await;
    node.kubelet().await;
    assert_eq!(get(address, "/healthz").await.0, 200);
    let path = node.socket.display().to_string();
    std::fs::remove_file(&node.socket).expect("unlink");
    let (status, why) = get(address, "/healthz").await;
    assert_eq!(status, 503, "{why}");
    assert!(
        why.contains(&format!("no driver answers at {path}")),
        "{why}"
    );

    // Only the kernel accepts its connections.
    let silent = UnixListener::bind(&node.socket).expect("bind");
    let began = Instant::now();
    let (status, why) = get(address, "/healthz").await;
    assert_eq!(status, 503, "{why}");
    assert!(why.contains(&format!("no answer at {path}")), "{why}");
    // Kubelet hears why.
    let took = began.elapsed().as_secs_f64();
    assert!(took < kubelets_patience(), "{took}");
    drop(silent);
    node.terminate().await;
    assert_eq!(lab.close(), [""; 0].map(PathBuf::from));
}

/// How many seconds kubelet waits for `/healthz`.
fn kubelets_patience() -> f64 {
    let daemons: DaemonSet =
        serde_saphyr::from_str(include_str!("../deploy/node/daemonset.yaml")).expect("a DaemonSet");
    let pod = daemons.spec.expect("a spec").template.spec.expect("a pod");
    let probe = pod.containers[0].liveness_probe.as_ref();
    let seconds = probe.expect("a probe").timeout_seconds;
    seconds.expect("it is given").into()
}

/// The series of a node that the documents name.
fn documented() -> BTreeSet<String> {
    include_str!("../docs/metrics.md")
        .lines()
        .filter_map(|line| {
            line.strip_prefix("| `baggageclaim_")?
                .split(['`', '{'])
                .next()
        })
        .map(|name| format!("baggageclaim_{}", name.trim_end_matches("_total")))
        .filter(|series| !is_of_the_controller(series))
        .collect()
}

/// Only `baggageclaim controller` has these. `shared::periodic`, `hub::figures`, `k8s::budgets`,
/// `locality::serve` and `tests/control_plane` compare them with the page.
fn is_of_the_controller(series: &str) -> bool {
    let of_controller = [
        "collector_",
        "catalog_",
        "cluster_",
        "locality_",
        "namespace_",
    ];
    let name = series.strip_prefix("baggageclaim_").unwrap_or(series);
    of_controller.iter().any(|it| name.starts_with(it))
}

/// The series of the page.
fn counted(page: &str) -> BTreeSet<String> {
    page.lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next())
        .map(str::to_owned)
        .collect()
}

/// Only a driver with a shared tier or with peers has these.
fn is_of_moving_content(series: &str) -> bool {
    let series = series.trim_start_matches("baggageclaim_");
    let parts = ["shared_", "peer_", "fetch"];
    parts.iter().any(|part| series.starts_with(part))
}

const EVICTED_BYTES: &str = "evicted_bytes_total{reason=\"space\"}";
const SAVED_BYTES: &str = "saved_bytes_total{type=\"input\",source=\"local\"}";
const TENANT: &str = "zebra-tenant";
const POD: &str = "yak-pod";
const KEY: &str = "xerus-key";
const NAME: &str = "walrus-artifact";

/// A little of everything; the uid of the pod that did it.
async fn work(node: &NodeProcess, kubelet: &Kubelet) -> String {
    let options = PublishOptions::default();
    let maker = kubelet.pod(TENANT, POD);
    let output = [("type", "output"), ("name", NAME), ("commit", "always")];
    let cache = [("type", "task-cache"), ("key", KEY), ("commit", "never")];
    for attributes in [output, output] {
        let published = maker.publish("out", attributes, options).await;
        published.expect("publish");
    }
    let published = maker.publish("cache", cache, options).await;
    published.expect("publish");
    let missing = [("type", "input"), ("from", "task-cache/xerus-key")];
    let answer = maker.publish("in", missing, options).await;
    answer.expect_err("not there");
    let answer = maker.publish("typo", [("type", "inputt")], options).await;
    answer.expect_err("a typo");
    nonsense(&node.socket, KEY).await;
    let during = metrics(node.http().await).await;
    for (id, count) in [
        ("volumes{type=\"output\",state=\"published\"}", 1.0),
        ("volumes{type=\"task-cache\",state=\"published\"}", 1.0),
        ("volumes{type=\"scratch\",state=\"published\"}", 0.0),
        ("seals_pending", 0.0),
        ("misses_total{type=\"task-cache\"}", 1.0),
        ("misses_total{type=\"resource-cache\"}", 0.0),
        ("misses_total{type=\"input\"}", 1.0),
        ("hits_total{type=\"input\",source=\"local\"}", 0.0),
        ("saved_bytes_total{type=\"input\",source=\"peer\"}", 0.0),
        ("content_wait_seconds_total{type=\"input\"}", 0.0),
    ] {
        assert_eq!(value(&during, id), count, "{id}: {during:#?}");
    }
    maker.unpublish("out").await.expect("unpublish");
    maker.unpublish("cache").await.expect("unpublish");
    // Waits until the output is sealed.
    let reader = kubelet.pod(TENANT, POD);
    let from = format!("artifact/{NAME}");
    let input = [("type", "input"), ("from", from.as_str())];
    let published = reader.publish("in", input, options).await;
    published.expect("publish");
    reader.unpublish("in").await.expect("unpublish");
    maker.uid().to_owned()
}

#[tokio::test]
async fn each_metric_moves_by_the_work_done_and_contains_no_names() {
    let lab = require_lab!(Fs::Ext4);
    let api = Api::start().await;
    let node = NodeProcess::start_with_api(&lab, &api, &[]);
    let address = node.http().await;
    let kubelet = node.kubelet().await;
    let before = metrics(address).await;
    let uid = work(&node, &kubelet).await;

    let idle = |now: &BTreeMap<String, f64>| {
        value(now, "seals_pending") == 0.0
            && now
                .iter()
                .filter(|(id, _)| id.starts_with("baggageclaim_volumes"))
                .all(|(_, count)| *count == 0.0)
    };
    let after = until(address, "all is put away", idle).await;
    let moved = |id: &str| {
        let full = format!("baggageclaim_{id}");
        value(&after, id) - before.get(&full).copied().unwrap_or(0.0)
    };
    for (id, by) in [
        ("hits_total{type=\"input\",source=\"local\"}", 1.0),
        ("hits_total{type=\"input\",source=\"shared\"}", 0.0),
        ("misses_total{type=\"task-cache\"}", 1.0),
        (
            "csi_rpcs_total{method=\"NodePublishVolume\",code=\"OK\"}",
            4.0,
        ),
        (
            "csi_rpcs_total{method=\"NodePublishVolume\",code=\"NOT_FOUND\"}",
            1.0,
        ),
        (
            "csi_rpcs_total{method=\"NodePublishVolume\",code=\"INVALID_ARGUMENT\"}",
            1.0,
        ),
        (
            "csi_rpcs_total{method=\"NodeUnpublishVolume\",code=\"OK\"}",
            3.0,
        ),
        (
            "csi_rpcs_total{method=\"other\",code=\"UNIMPLEMENTED\"}",
            1.0,
        ),
        (
            "csi_rpc_duration_seconds_count{method=\"NodePublishVolume\"}",
            6.0,
        ),
        (
            "csi_rpc_duration_seconds_bucket{le=\"+Inf\",method=\"NodeUnpublishVolume\"}",
            3.0,
        ),
        ("publish_duration_seconds_count{type=\"output\"}", 1.0),
        ("publish_duration_seconds_count{type=\"task-cache\"}", 1.0),
        ("publish_duration_seconds_count{type=\"input\"}", 1.0),
        ("seal_duration_seconds_count", 1.0),
        ("seals_total{result=\"sealed\"}", 1.0),
        ("commit_duration_seconds_count", 1.0),
        ("artifacts{kind=\"output\"}", 1.0),
        ("artifacts{kind=\"task-cache\"}", 0.0),
        ("caches{kind=\"task\"}", 0.0),
        ("evicted_artifacts_total{reason=\"space\"}", 0.0),
        ("freed_bytes_total", 0.0),
    ] {
        assert_eq!(moved(id), by, "{id}: {after:#?}");
    }

    let (_, page) = get(address, "/metrics").await;
    let mut expected = documented();
    expected.retain(|series| !is_of_moving_content(series));
    assert_eq!(counted(&page), expected);
    let page = page.to_lowercase();
    for secret in [TENANT, POD, KEY, NAME, &uid, "\"here\"", "nonsense"] {
        assert!(!page.contains(secret), "{secret}: {page}");
    }
    node.terminate().await;
    assert_eq!(lab.close(), [""; 0].map(PathBuf::from));
}

#[tokio::test]
async fn a_driver_with_a_shared_tier_has_its_metrics_too() {
    let lab = require_lab!(Fs::Ext4);
    let tier = lab.dir("tier");
    let url = format!("file://{}", tier.display());
    let node = NodeProcess::start(&lab, &["--shared", &url]);
    node.kubelet().await;
    let (_, page) = get(node.http().await, "/metrics").await;
    let (mut expected, mut found) = (documented(), counted(&page));
    let is_of_peers = |series: &str| series.starts_with("baggageclaim_peer_");
    expected.retain(|series| is_of_moving_content(series) && !is_of_peers(series));
    found.retain(|series| is_of_moving_content(series));
    assert_eq!(found, expected);
    node.terminate().await;
    assert_eq!(lab.close(), [""; 0].map(PathBuf::from));
}

#[tokio::test]
async fn a_driver_that_does_not_hear_how_pods_end_says_so_and_is_ready() {
    let lab = require_lab!(Fs::Ext4);
    let api = Api::start().await;
    api.be(Mood::Away);
    let node = NodeProcess::start_with_api(&lab, &api, &[]);
    let address = node.http().await;
    node.kubelet().await;
    node.logged("the watch over pods is broken", 1).await;
    assert_eq!(value(&metrics(address).await, "pods_watched"), 0.0);
    assert_eq!(get(address, "/readyz").await.0, 200);
    api.be(Mood::Serving);
    let watched = |now: &BTreeMap<String, f64>| value(now, "pods_watched") == 1.0;
    until(address, "it is watched", watched).await;
    node.terminate().await;

    let node = NodeProcess::start(&lab, &["--kubernetes", "off"]);
    let address = node.http().await;
    node.kubelet().await;
    let id = "baggageclaim_pods_watched";
    assert!(!metrics(address).await.contains_key(id), "it is not to");
    node.terminate().await;
    assert_eq!(lab.close(), [""; 0].map(PathBuf::from));
}

/// Probes come to the pod's address, of whichever family that is.
#[tokio::test]
async fn by_default_it_listens_at_every_address_of_both_families() {
    let help = Command::new(env!("CARGO_BIN_EXE_baggageclaim"))
        .args(["node", "--help"])
        .output();
    let help = String::from_utf8(help.expect("it starts").stdout).expect("text");
    assert!(help.contains("[default: [::]:9808]"), "{help}");
    let lab = require_lab!(Fs::Ext4);
    let node = NodeProcess::start(&lab, &["--http", "[::]:0"]);
    let port = node.http().await.port();
    node.kubelet().await;
    for address in [
        SocketAddr::from((Ipv4Addr::LOCALHOST, port)),
        SocketAddr::from((Ipv6Addr::LOCALHOST, port)),
    ] {
        assert_eq!(get(address, "/healthz").await.0, 200, "{address}");
    }
    node.terminate().await;
    assert_eq!(lab.close(), [""; 0].map(PathBuf::from));
}

/// Calls a method that does not exist, with a name that a caller chose.
async fn nonsense(socket: &Path, name: &str) {
    use baggageclaim::proto::csi::v1::{ProbeRequest, ProbeResponse};
    let path = socket.to_owned();
    let channel = Endpoint::from_static("http://localhost")
        .connect_with_connector(tower::service_fn(move |_: Uri| {
            let path = path.clone();
            async move { UnixStream::connect(path).await.map(TokioIo::new) }
        }))
        .await
        .expect("connect");
    let mut grpc = tonic::client::Grpc::new(channel);
    grpc.ready().await.expect("ready");
    let path = format!("/csi.v1.Node/Nonsense-{name}")
        .parse()
        .expect("a path");
    let codec = tonic_prost::ProstCodec::<ProbeRequest, ProbeResponse>::default();
    let answer = grpc
        .unary(tonic::Request::new(ProbeRequest {}), path, codec)
        .await;
    let status = answer.expect_err("there is no such method");
    assert_eq!(status.code(), tonic::Code::Unimplemented);
}

#[tokio::test]
async fn evictions_are_counted() {
    let lab = require_lab!(Fs::Ext4);
    // Every unused artifact exceeds the limit.
    let flags = ["--high-watermark", "1", "--low-watermark", "0"];
    let node = NodeProcess::start(&lab, &flags);
    let address = node.http().await;
    let kubelet = node.kubelet().await;
    let pod = kubelet.pod("ci", "build");
    let output = [("type", "output"), ("name", "big"), ("commit", "always")];
    let published = pod.publish("out", output, PublishOptions::default()).await;
    let target = published.expect("publish").target;
    std::fs::write(target.join("file"), vec![7; 1 << 20]).expect("write");
    let options = PublishOptions::default();
    let input = [("type", "input"), ("from", "artifact/big")];
    let reader = kubelet.pod("ci", "test");
    // A fork keeps it until its size is known, which the next hit counts.
    let forked = reader.publish("first", input, options);
    let (forked, unpublished) = tokio::join!(forked, pod.unpublish("out"));
    forked.expect("publish");
    unpublished.expect("unpublish");
    let began = Instant::now();
    while value(&metrics(address).await, SAVED_BYTES) == 0.0 {
        assert!(began.elapsed() < PATIENCE, "it is not measured");
        reader.publish("next", input, options).await.expect("hit");
        reader.unpublish("next").await.expect("unpublish");
    }
    reader.unpublish("first").await.expect("unpublish");
    // Otherwise the next round evicts it, within a minute.
    let reaped = Command::new(env!("CARGO_BIN_EXE_baggageclaim"))
        .args(["reap", "--pool"])
        .arg(&node.pool)
        .output()
        .expect("it runs");
    assert!(reaped.status.success(), "{reaped:?}");
    // A look that an eviction runs into sees the one and not yet the other.
    let evicted = |now: &BTreeMap<String, f64>| {
        value(now, "evicted_artifacts_total{reason=\"space\"}") == 1.0
            && value(now, "freed_bytes_total") == value(now, EVICTED_BYTES)
            && value(now, "artifacts{kind=\"output\"}") == 0.0
    };
    let now = until(address, "evicted", evicted).await;
    let bytes = value(&now, EVICTED_BYTES);
    assert!(((1 << 20).into()..1.2e6).contains(&bytes), "{now:#?}");

    // Unmarked content is discarded and was never an artifact.
    let given_up = "baggageclaim_seals_total{result=\"given-up\"}";
    assert_eq!(now[given_up], 0.0);
    let marked = [
        ("type", "task-cache"),
        ("key", "k"),
        ("commit", "on-marker"),
    ];
    pod.publish("c", marked, PublishOptions::default())
        .await
        .expect("publish");
    pod.unpublish("c").await.expect("unpublish");
    until(address, "given up", |now| now[given_up] == 1.0).await;
    node.terminate().await;
    assert_eq!(lab.close(), [""; 0].map(PathBuf::from));
}

/// After an error of its disk ext4 takes no more changes; statfs(2) does not tell.
#[tokio::test]
async fn a_failed_disk_makes_the_node_not_ready() {
    let lab = require_lab!(Fs::Ext4);
    let node = NodeProcess::start(&lab, &[]);
    let address = node.http().await;
    node.kubelet().await;
    assert_eq!(get(address, "/readyz").await.0, 200);
    let table = std::fs::read_to_string("/proc/self/mounts").expect("read");
    let path = lab.path();
    let place = path.to_str().expect("text");
    let device = table.lines().find_map(|line| {
        let (device, rest) = line.split_once(' ')?;
        (rest.split(' ').next() == Some(place)).then_some(device)
    });
    let device = device.and_then(|device| device.strip_prefix("/dev/"));
    let remounted = Command::new("mount")
        .args(["-o", "remount,errors=remount-ro", place])
        .status();
    assert!(remounted.expect("mount runs").success());
    let trigger = format!(
        "/sys/fs/ext4/{}/trigger_fs_error",
        device.expect("it is mounted")
    );
    std::fs::write(trigger, "1").expect("an error of the disk");
    let (status, why) = get(address, "/readyz").await;
    assert_eq!(status, 503, "{why}");
    assert!(why.contains("EROFS"), "{why}");
    assert_eq!(get(address, "/healthz").await.0, 200);
    assert_eq!(value(&metrics(address).await, "ready"), 0.0);
    node.kill().await;
    assert_eq!(lab.close(), [""; 0].map(PathBuf::from));
}

#[tokio::test]
async fn only_what_there_is_is_answered_and_a_taken_port_is_told() {
    let lab = require_lab!(Fs::Ext4);
    let node = NodeProcess::start(&lab, &[]);
    let address = node.http().await;
    node.kubelet().await;
    let Answer(status, _, body) = request(address, "GET / HTTP/1.1").await;
    assert_eq!(status, 404);
    assert!(body.contains("/healthz, /readyz and /metrics"), "{body}");
    let Answer(status, head, _) =
        request(address, "POST /metrics HTTP/1.1\r\nContent-Length: 0").await;
    assert_eq!(status, 405);
    assert!(head.contains("allow: get, head"), "{head}");
    let Answer(status, _, body) = request(address, "HEAD /metrics HTTP/1.1").await;
    assert_eq!((status, body.as_str()), (200, ""));
    let plain = request(address, "GET /metrics HTTP/1.1").await;
    assert!(plain.1.contains("text/plain; version=0.0.4"), "{}", plain.1);
    let accept =
        "GET /metrics HTTP/1.1\r\nAccept: application/openmetrics-text;version=1.0.0,*/*;q=0.1";
    let open = request(address, accept).await;
    assert!(
        open.1
            .contains("application/openmetrics-text; version=1.0.0"),
        "{}",
        open.1
    );
    // A silent client delays no one, and of many such the first are disconnected. An older
    // connection of another client stays.
    let mut slow = TcpStream::connect(address).await.expect("connect");
    let mut silent = Vec::new();
    for _ in 0..300 {
        let socket = TcpSocket::new_v4().expect("a socket");
        let another = SocketAddr::from(([127, 0, 0, 2], 0));
        socket.bind(another).expect("an address of this host");
        silent.push(socket.connect(address).await.expect("connect"));
    }
    let request = b"GET /healthz HTTP/1.1\r\nHost: node\r\n\r\n";
    slow.write_all(request).await.expect("it is open");
    let mut page = String::new();
    slow.read_to_string(&mut page).await.expect("an answer");
    assert!(page.starts_with("HTTP/1.1 200"), "{page}");
    let patience = Duration::from_secs_f64(kubelets_patience());
    let answer = tokio::time::timeout(patience, get(address, "/healthz")).await;
    assert_eq!(answer.expect("kubelet would end it").0, 200);
    let mut nothing = [0];
    let ended = silent[0].read(&mut nothing).await;
    assert!(matches!(ended, Ok(0) | Err(_)), "{ended:?}");
    drop(silent);

    let other = require_lab!(Fs::Ext4);
    let taken = address.to_string();
    let second = NodeProcess::start(&other, &["--http", &taken]);
    let (code, log) = second.ended().await;
    assert_eq!(code, Some(1), "{log}");
    assert!(
        log.contains(&format!("at {taken}: Address already in use")),
        "{log}"
    );
    assert!(log.contains("--http off"), "{log}");
    let off = NodeProcess::start(&other, &["--http", "off"]);
    off.kubelet().await;
    let log = off.terminate().await;
    assert!(!log.contains("health and metrics"), "{log}");
    node.terminate().await;
    assert_eq!(other.close(), [""; 0].map(PathBuf::from));
    assert_eq!(lab.close(), [""; 0].map(PathBuf::from));
}
