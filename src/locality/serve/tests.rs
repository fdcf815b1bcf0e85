//! The webhook over real connections: asked as the API server asks it, and as hostile pods might.
//! Only the catalog is replaced, by a function.

use std::fs;

use k8s_openapi::ByteString;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_util::task::AbortOnDropHandle;

use super::*;
use crate::catalog::{Found, Version};
use crate::locality::identity::{self, New};
use crate::model::Timestamp;
use crate::telemetry::metrics;

const DNS: &str = "baggageclaim-controller.baggageclaim.svc";
/// No answer takes so long.
const NEVER: Duration = Duration::from_secs(60);

/// A webhook that runs.
struct Server {
    address: SocketAddr,
    new: New,
    counters: Counters,
    _directory: tempfile::TempDir,
    _serving: AbortOnDropHandle<()>,
}

impl Server {
    async fn start(
        find: impl Fn(&[Vec<TenantOrigin>], Duration) -> Option<Vec<Found>> + Send + Sync + 'static,
    ) -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let file = directory.path().join("identity.pem");
        let new = identity::make(DNS).expect("made");
        fs::write(&file, &new.file).expect("write");
        let any = "127.0.0.1:0".parse().expect("an address");
        let webhook = Webhook::bind(any, file, Arc::new(find)).await;
        let webhook = webhook.expect("bound");
        Self {
            address: webhook.address().expect("an address"),
            new,
            counters: webhook.counters(),
            _directory: directory,
            _serving: AbortOnDropHandle::new(tokio::spawn(webhook.serve(Drain::new(NEVER)))),
        }
    }

    /// Connects as the API server does: it trusts this certificate alone, for this name.
    async fn connect(&self) -> TlsStream<TcpStream> {
        let mut roots = RootCertStore::empty();
        let certificate = CertificateDer::from_pem_slice(self.new.certificate.as_bytes());
        roots.add(certificate.expect("PEM")).expect("a certificate");
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_root_certificates(roots)
            .with_no_client_auth();
        let stream = TcpStream::connect(self.address).await.expect("connected");
        let name = ServerName::try_from(DNS).expect("a name");
        let connected = TlsConnector::from(Arc::new(config)).connect(name, stream);
        connected.await.expect("the certificate is good")
    }

    /// The counters `requests`, `patched`, `late` and `refused`.
    fn counted(&self) -> [u64; 4] {
        let it = &self.counters;
        [&it.requests, &it.patched, &it.late, &it.refused].map(Counter::get)
    }

    /// Asks over a new connection.
    async fn ask(&self, review: &Value) -> Value {
        let mut stream = self.connect().await;
        let path = self.new.path.clone() + "?timeout=1s";
        let (status, body) = send(&mut stream, "POST", &path, review.to_string().as_bytes()).await;
        assert_eq!(status, 200, "{}", String::from_utf8_lossy(&body));
        let answer: Value = serde_json::from_slice(&body).expect("JSON");
        answer["response"].clone()
    }
}

fn header(method: &str, path: &str, length: usize) -> String {
    format!(
        "{method} {path} HTTP/1.1\r\nHost: {DNS}\r\nContent-Type: application/json\r\n\
         Content-Length: {length}\r\n\r\n"
    )
}

async fn send(
    stream: &mut TlsStream<TcpStream>,
    method: &str,
    path: &str,
    body: &[u8],
) -> (u16, Vec<u8>) {
    let header = header(method, path, body.len());
    stream.write_all(header.as_bytes()).await.expect("sent");
    // A server that refuses does not read all.
    let _ = stream.write_all(body).await;
    receive(stream).await
}

/// The status and the body of an answer.
async fn receive(stream: &mut TlsStream<TcpStream>) -> (u16, Vec<u8>) {
    let mut all = Vec::new();
    loop {
        if let Some(at) = all.windows(4).position(|it| it == b"\r\n\r\n") {
            let head = String::from_utf8_lossy(&all[..at]).to_lowercase();
            let (_, length) = head.split_once("content-length: ").expect("a length");
            let length = length.split("\r\n").next().expect("a line");
            let length: usize = length.parse().expect("a number");
            if all.len() >= at + 4 + length {
                let status = head.split(' ').nth(1).expect("a status");
                return (status.parse().expect("a number"), all.split_off(at + 4));
            }
        }
        let mut more = [0; 4096];
        let read = timeout(NEVER, stream.read(&mut more)).await;
        let read = read.expect("in time").expect("an answer");
        assert!(read > 0, "no answer: {}", String::from_utf8_lossy(&all));
        all.extend_from_slice(&more[..read]);
    }
}

fn volume(number: usize, attributes: &Value) -> Value {
    json!({"name": format!("v{number}"), "csi": {"driver": crate::model::DRIVER_NAME, "volumeAttributes": attributes}})
}

fn review(volumes: &[Value]) -> Value {
    json!({
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": "0f8fad5b",
            "kind": {"group": "", "version": "v1", "kind": "Pod"},
            "operation": "CREATE",
            "namespace": "ci",
            "object": {"spec": {"volumes": volumes}},
        },
    })
}

fn cache() -> Value {
    review(&[volume(0, &json!({"type": "task-cache", "key": "go"}))])
}

fn found(mebibytes: u64, holders: &[&str]) -> Found {
    Found {
        version: Version {
            stamp: Timestamp(5),
            tie: 0,
        },
        bytes: mebibytes << 20,
        layers: 1,
        fence: 0,
        holders: holders.iter().map(|node| Arc::from(*node)).collect(),
    }
}

/// The nodes and weights of an answer.
fn terms(response: &Value) -> Vec<(String, u64)> {
    assert_eq!(response["allowed"], true);
    let Some(patch) = response.get("patch") else {
        return Vec::new();
    };
    let ByteString(patch) = serde_json::from_value(patch.clone()).expect("base64");
    let patch: Value = serde_json::from_slice(&patch).expect("JSON");
    let terms = &patch[0]["value"]["nodeAffinity"];
    let terms = &terms["preferredDuringSchedulingIgnoredDuringExecution"];
    let of_term = |term: &Value| {
        let field = &term["preference"]["matchFields"][0];
        let node = field["values"][0].as_str().expect("a node").to_owned();
        (node, term["weight"].as_u64().expect("a weight"))
    };
    terms
        .as_array()
        .expect("a list")
        .iter()
        .map(of_term)
        .collect()
}

#[tokio::test]
async fn a_pod_prefers_the_holders_and_a_connection_serves_many_requests() {
    let server = Server::start(|volumes, _| {
        assert_eq!(volumes[0][0].to_string(), "task-cache/go of namespace ci");
        Some(vec![found(100, &["n2", "n1"])])
    })
    .await;
    let mut stream = server.connect().await;
    for _ in 0..3 {
        let body = cache().to_string();
        let path = server.new.path.clone() + "?timeout=1s";
        let (status, body) = send(&mut stream, "POST", &path, body.as_bytes()).await;
        assert_eq!(status, 200);
        let answer: Value = serde_json::from_slice(&body).expect("JSON");
        assert_eq!(answer["response"]["uid"], "0f8fad5b");
        let expected = [("n1".to_owned(), 100), ("n2".to_owned(), 100)];
        assert_eq!(terms(&answer["response"]), expected);
    }
    assert_eq!(server.counted(), [3, 3, 0, 0]);
}

#[tokio::test]
async fn content_that_is_not_there_gives_no_preference() {
    let server = Server::start(|_, _| Some(Vec::new())).await;
    assert_eq!(terms(&server.ask(&cache()).await), []);
    assert_eq!(server.counted(), [1, 0, 0, 0]);
}

#[tokio::test]
async fn a_pod_with_a_hundred_volumes_prefers_few_nodes() {
    let server = Server::start(|volumes, _| {
        assert_eq!(volumes.len(), 100);
        let of = |wanted: &Vec<TenantOrigin>| {
            let key = wanted[0].origin.to_string();
            let number = key.rsplit('-').next().and_then(|it| it.parse::<u64>().ok());
            let number = number.expect("a number") % 10;
            found(1 + number, &[&format!("n{number}")])
        };
        Some(volumes.iter().map(of).collect())
    })
    .await;
    let volumes: Vec<Value> = (0..100)
        .map(|number| {
            let key = format!("key-{number}");
            volume(number, &json!({"type": "resource-cache", "key": key}))
        })
        .collect();
    let terms = terms(&server.ask(&review(&volumes)).await);
    // n9 has 10 times 10 MiB of 550.
    let expected = [("n9", 18), ("n8", 16), ("n7", 15), ("n6", 13), ("n5", 11)];
    let expected = expected.map(|(node, weight)| (node.to_owned(), weight));
    assert_eq!(terms, expected);
}

#[tokio::test]
async fn a_catalog_that_is_busy_delays_no_pod() {
    let server = Server::start(|_, limit| {
        assert!(limit <= LIMIT);
        None
    })
    .await;
    assert_eq!(terms(&server.ask(&cache()).await), []);
    assert_eq!(server.counted(), [1, 0, 1, 0]);
}

#[tokio::test]
async fn without_the_secret_path_nothing_is_told() {
    let server = Server::start(|_, _| panic!("the catalog is asked")).await;
    let body = cache().to_string();
    let longer = server.new.path.clone() + "0";
    for (count, path) in ["/", "/locality", &longer].into_iter().enumerate() {
        let mut stream = server.connect().await;
        let (status, told) = send(&mut stream, "POST", path, body.as_bytes()).await;
        assert_eq!((status, told), (404, Vec::new()), "{path}");
        assert_eq!(server.counted(), [0, 0, 0, count as u64 + 1]);
    }
}

#[tokio::test]
async fn what_is_no_question_is_refused_and_the_next_one_is_answered() {
    let server = Server::start(|_, _| Some(vec![found(100, &["n1"])])).await;
    let large = vec![b' '; MOST_BYTES + 1];
    let other = json!({"apiVersion": "v1", "kind": "Pod"}).to_string();
    for (method, body, expected) in [
        ("GET", &b""[..], 405),
        ("POST", b"", 400),
        ("POST", b"{\"kind\": ", 400),
        ("POST", other.as_bytes(), 400),
        ("POST", &large, 413),
    ] {
        let mut stream = server.connect().await;
        let (status, told) = send(&mut stream, method, &server.new.path, body).await;
        assert_eq!((status, told), (expected, Vec::new()), "{method}");
    }
    let mut deployment = cache();
    deployment["request"]["kind"] = json!({"group": "apps", "version": "v1", "kind": "Deployment"});
    assert_eq!(terms(&server.ask(&deployment).await), []);
    assert_eq!(terms(&server.ask(&cache()).await).len(), 1);
}

#[tokio::test]
async fn a_slow_client_is_told_so_and_holds_up_no_other() {
    let server = Server::start(|_, _| Some(vec![found(100, &["n1"])])).await;
    let began = Instant::now();
    let mut slow = Vec::new();
    for _ in 0..AT_ONCE {
        let mut stream = server.connect().await;
        let header = header("POST", &server.new.path, 1000);
        stream.write_all(header.as_bytes()).await.expect("sent");
        stream.write_all(b"{").await.expect("sent");
        slow.push(stream);
    }
    let (status, _) = receive(&mut slow[0]).await;
    assert_eq!(status, 408);
    assert!(began.elapsed() >= LIMIT);
    for stream in &mut slow[1..] {
        assert_eq!(receive(stream).await.0, 408);
    }
    assert_eq!(server.counted(), [AT_ONCE as u64, 0, AT_ONCE as u64, 0]);
    assert_eq!(terms(&server.ask(&cache()).await).len(), 1);
}

#[tokio::test]
async fn connections_that_say_nothing_hold_up_no_other() {
    let server = Server::start(|_, _| Some(vec![found(100, &["n1"])])).await;
    let mut idle = Vec::new();
    for _ in 0..CONNECTIONS + 10 {
        idle.push(TcpStream::connect(server.address).await.expect("connected"));
    }
    assert_eq!(terms(&server.ask(&cache()).await).len(), 1);
    // The oldest ones were closed for it.
    let mut byte = [0];
    let read = timeout(NEVER, idle[0].read(&mut byte)).await;
    assert!(matches!(read.expect("in time"), Ok(0) | Err(_)));
}

#[test]
fn an_identity_that_changes_or_goes_is_noticed() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = directory.path().join("identity.pem");
    let mut file = File::new(path.clone());
    let serves = |file: &File, new: &New| {
        let identity = file.identity.as_ref();
        identity.is_some_and(|identity| identity.is_path(&new.path))
    };
    let (one, two) = (identity::make(DNS), identity::make(DNS));
    let (one, two) = (one.expect("made"), two.expect("made"));
    assert!(file.is_changed(), "it was not read before");
    assert!(!file.is_changed() && file.identity.is_none());
    fs::write(&path, &one.file).expect("write");
    assert!(file.is_changed() && serves(&file, &one));
    assert!(!file.is_changed() && serves(&file, &one));
    fs::write(&path, &two.file).expect("write");
    assert!(file.is_changed() && serves(&file, &two));
    fs::write(&path, "damaged").expect("write");
    assert!(file.is_changed() && file.identity.is_none());
    assert!(!file.is_changed());
    fs::remove_file(&path).expect("removed");
    assert!(file.is_changed() && file.identity.is_none());
}

#[test]
fn the_page_of_metrics_names_the_counters() {
    let mut registry = metrics::registry();
    Counters::default().register(&mut registry);
    metrics::assert_documented(&registry, "locality_");
}
