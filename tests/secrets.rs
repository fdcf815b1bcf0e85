//! Data that must never be logged: secrets, service account tokens, mount flags. The descriptor
//! says which fields those are. Each RPC is sent with a canary in each of them, which no log line
//! and no answer may contain. These calls are refused; another test publishes and searches what is
//! stored.
//!
//! Only one test reads the log of this process; the other test's driver is another process.

#![expect(
    clippy::disallowed_types,
    reason = "what the driver tells people is asked as they ask, by its binary"
)]

mod common;

use std::path::{Path, PathBuf};
use std::process::Command;

use baggageclaim::csi::Readiness;
use prost_reflect::prost::Message as _;
use prost_reflect::{
    DescriptorPool, DynamicMessage, FieldDescriptor, Kind, MapKey, ReflectMessage as _, Value,
};
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::Channel;
use tonic::{Request, Status};

use common::calls::OPTIONS;
use common::log::Log;
use common::process::NodeProcess;
use common::raw::Raw;
use common::{Fs, require_lab};

const CANARY: &str = "hunter2-the-canary";
const TOKENS: &str = "csi.storage.k8s.io/serviceAccount.tokens";

/// Whether a field's value must not be seen.
fn is_secret(field: &FieldDescriptor) -> bool {
    let pool = field.parent_pool();
    let mark = pool
        .get_extension_by_name("csi.v1.csi_secret")
        .expect("the option is declared");
    let marked = field.options().get_extension(&mark).as_bool() == Some(true);
    marked || field.name() == "secrets" || field.name() == "mount_flags"
}

/// Fills every field: what is secret with the canary, other text with `plain`; returns how many
/// were secret.
fn fill(message: &mut DynamicMessage, depth: usize) -> usize {
    let mut secrets = 0;
    for field in message.descriptor().fields() {
        let text = if is_secret(&field) { CANARY } else { "plain" };
        let value = if field.is_map() {
            let mut map = std::collections::HashMap::from([(
                MapKey::String("key".into()),
                Value::String(text.into()),
            )]);
            if field.name() == "volume_context" {
                let key = MapKey::String(TOKENS.into());
                map.insert(key, Value::String(CANARY.into()));
                secrets += 1;
            }
            Value::Map(map)
        } else {
            let one = match field.kind() {
                Kind::String => Value::String(text.into()),
                Kind::Message(descriptor) if depth < 4 => {
                    let mut inner = DynamicMessage::new(descriptor);
                    secrets += fill(&mut inner, depth + 1);
                    Value::Message(inner)
                }
                Kind::Enum(_) => Value::EnumNumber(1),
                _ => continue,
            };
            if field.is_list() {
                Value::List(vec![one])
            } else {
                one
            }
        };
        secrets += usize::from(is_secret(&field));
        // The last member of a oneof stays: `mount` comes after `block`.
        message.set_field(&field, value);
    }
    secrets
}

async fn call(channel: &Channel, path: &str, message: Vec<u8>) -> Result<Vec<u8>, Status> {
    let mut grpc = tonic::client::Grpc::new(channel.clone());
    grpc.ready().await.expect("the driver is there");
    let path: PathAndQuery = path.parse().expect("a path");
    let answer = grpc.unary(Request::new(message), path, Raw).await;
    answer.map(tonic::Response::into_inner)
}

#[tokio::test]
async fn secrets_are_in_no_line_and_no_answer() {
    let log = Log::default();
    let writer = log.clone();
    tracing_subscriber::fmt()
        .with_max_level(tracing::Level::TRACE)
        .with_writer(move || writer.clone())
        .with_ansi(false)
        .init();
    let (_ready, readiness) = tokio::sync::watch::channel(Readiness::Recovering);
    let (_dir, channel) = common::driver::serve_without_engine(readiness).await;

    let pool = DescriptorPool::decode(baggageclaim::proto::DESCRIPTOR).expect("it decodes");
    let (mut methods, mut secrets) = (0, 0);
    for service in pool.services().filter(|s| s.package_name() == "csi.v1") {
        for method in service.methods() {
            let mut message = DynamicMessage::new(method.input());
            secrets += fill(&mut message, 0);
            let name = method.name();
            let path = format!("/{}/{name}", service.full_name());
            let answer = call(&channel, &path, message.encode_to_vec()).await;
            let answered = match &answer {
                Ok(bytes) => String::from_utf8_lossy(bytes).into_owned(),
                Err(status) => format!("{status:?}"),
            };
            assert!(!answered.contains(CANARY), "{name}: {answered}");
            let lines = log.text();
            assert!(!lines.contains(CANARY), "{name}: {lines}");
            methods += 1;
        }
    }
    assert!(
        methods >= 30 && secrets > 20,
        "{methods} methods with {secrets} secrets are too few to prove anything"
    );

    // And the log does say what it should, once for every call.
    let lines = log.text();
    let rpcs = lines.lines().filter(|line| line.contains("duration_us="));
    assert_eq!(rpcs.count(), methods, "{lines}");
    let publish: Vec<&str> = lines
        .lines()
        .filter(|line| line.contains("duration_us=") && line.contains("\"NodePublishVolume\""))
        .collect();
    assert_eq!(publish.len(), 1, "{lines}");
    for part in [
        "WARN",
        "volume.id=\"plain\"",
        "code=\"INVALID_ARGUMENT\"",
        "error=",
    ] {
        assert!(publish[0].contains(part), "{part}: {}", publish[0]);
    }
}

/// Whether bytes are somewhere in a file below a directory, or in the name of one.
fn is_in_files(dir: &Path, text: &str) -> bool {
    std::fs::read_dir(dir).expect("a directory").any(|entry| {
        let entry = entry.expect("an entry");
        let kind = entry.file_type().expect("a kind");
        let path = entry.path();
        let name = entry.file_name();
        name.to_string_lossy().contains(text)
            || kind.is_dir() && is_in_files(&path, text)
            || kind.is_file() && {
                let bytes = std::fs::read(&path).expect("read");
                bytes
                    .windows(text.len())
                    .any(|part| part == text.as_bytes())
            }
    })
}

/// All that people are told of a pool.
fn told(pool: &Path) -> String {
    let ask = |question: &[&str]| {
        let answer = Command::new(env!("CARGO_BIN_EXE_baggageclaim"))
            .args(question)
            .arg("--pool")
            .arg(pool)
            .output()
            .expect("the binary runs");
        assert!(answer.status.success(), "{question:?}: {answer:?}");
        String::from_utf8([answer.stdout, answer.stderr].concat()).expect("text")
    };
    let lists = ["volumes", "artifacts", "caches"].into_iter();
    let lists = lists.flat_map(|verb| ["wide", "json"].map(|form| ask(&[verb, "-o", form])));
    let rest = ["status", "check"].map(|verb| ask(&[verb, "-o", "json"]));
    lists.chain(rest).collect()
}

#[tokio::test]
async fn what_a_published_volume_came_with_is_kept_and_told_nowhere() {
    let lab = require_lab!(Fs::Ext4);
    let node = NodeProcess::start(&lab, &["--log", "trace", "--reserve", "0"]);
    let kubelet = node.kubelet().await;
    let pod = kubelet.pod("ci", "build");
    pod.prepare("out").expect("prepare");
    let output = [("type", "output"), ("name", "o"), ("commit", "always")];
    let mut request = pod.publish_request("out", output, OPTIONS);
    let tokens =
        format!(r#"{{"":{{"token":"{CANARY}","expirationTimestamp":"2026-01-01T10:00:00Z"}}}}"#);
    request
        .volume_context
        .insert(TOKENS.to_owned(), tokens.clone());
    request.secrets.insert(TOKENS.to_owned(), tokens);
    request
        .secrets
        .insert("password".to_owned(), CANARY.to_owned());
    let id = request.volume_id.clone();
    let mut client = kubelet.node_client();
    // Twice: what is there already is looked at another way.
    for _ in 0..2 {
        let answer = client.node_publish_volume(request.clone()).await;
        answer.expect("published");
    }
    std::fs::write(pod.target("out").join("file"), "content").expect("write");

    // Where it looks, what is known to be there is found.
    let assert_nowhere = |listed: &str, kept: &str| {
        let text = told(&node.pool);
        assert!(text.contains(listed) && !text.contains(CANARY), "{text}");
        assert!(is_in_files(&node.pool, kept), "it looks elsewhere: {kept}");
        assert!(!is_in_files(&node.pool, CANARY), "kept in the pool");
    };
    assert_nowhere(&id, pod.uid());
    pod.unpublish("out").await.expect("unpublish");
    node.logged("\"sealed\"", 1).await;
    assert_nowhere("artifact/o", "content");
    let log = node.terminate().await;
    for line in log.lines() {
        assert!(!line.contains(CANARY), "{line}");
    }
    for part in [&id, "\"level\":\"DEBUG\"", "NodePublishVolume"] {
        assert!(log.contains(part), "{part}: {log}");
    }
    assert_eq!(lab.close(), Vec::<PathBuf>::new());
}
