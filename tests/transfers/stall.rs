//! Callers of export and import that stall: each is let go after a while, and the others get their
//! turn.

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use baggageclaim::admin;
use baggageclaim::archive::Codec;
use baggageclaim::engine::Source;
use baggageclaim::proto::admin::v1 as api;
use baggageclaim::server::Drain;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Streaming};

use crate::common::bench::{Bench, Ground, soon};
use crate::engine::bench;

/// How many transfers have a thread.
const AT_A_TIME: usize = 4;

fn head(reference: &str) -> api::ImportPart {
    api::ImportPart {
        head: Some(api::ImportHead {
            tenant: "ci".to_owned(),
            reference: reference.to_owned(),
            ..api::ImportHead::default()
        }),
        ..api::ImportPart::default()
    }
}

/// A service that waits this long for its callers.
struct Served {
    bench: Bench,
    drain: Drain,
    serving: JoinHandle<baggageclaim::server::Result<()>>,
}

const STALL: Duration = Duration::from_millis(300);

impl Served {
    async fn new(bench: Bench) -> Self {
        Self::waiting(bench, STALL).await
    }

    async fn waiting(bench: Bench, stall: Duration) -> Self {
        let socket = admin::bind(&bench.pool()).await.expect("bind");
        let drain = Drain::new(Duration::ZERO);
        let serving = admin::serve(socket, bench.engine.clone(), None, drain.clone(), stall);
        let serving = tokio::spawn(serving);
        Self {
            bench,
            drain,
            serving,
        }
    }

    /// A connection of its own: a full window of one must not stop another.
    async fn connect(&self) -> admin::Client {
        admin::connect(&self.bench.pool()).await.expect("connect")
    }

    async fn finish(self) {
        self.drain.begin();
        self.drain.close();
        let served = soon("the end of the service", self.serving).await;
        served.expect("no panic").expect("it is served");
        self.bench.finish().await;
    }
}

/// Reads until the error that ends the stream.
async fn ends_with<T>(mut answers: Streaming<T>, why: &str) {
    let status = loop {
        match soon("an answer", answers.message()).await {
            Ok(Some(_)) => {}
            Ok(None) => panic!("it ended without an error"),
            Err(status) => break status,
        }
    };
    assert!(status.message().contains(why), "{status}");
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
}

#[tokio::test(flavor = "multi_thread")]
async fn callers_that_stall_do_not_keep_others_from_their_turn() {
    let bench = bench!(Ground::ALL[0]);
    let output = [("type", "output"), ("name", "large")];
    // More than all buffers on the way hold.
    bench
        .step("maker", &output, |root| {
            fs::write(root.join("file"), vec![7; 64 << 20]).expect("write");
        })
        .await;
    let id = bench.artifact("artifact/large").expect("it is there").id;
    let served = Served::new(bench).await;
    // Half of them take nothing, the others send nothing.
    let (mut exports, mut imports, mut senders) = (Vec::new(), Vec::new(), Vec::new());
    for number in 0..AT_A_TIME / 2 {
        let request = api::ExportRequest {
            format: api::Format::Tar.into(),
            source: Some(api::export_request::Source::ArtifactId(id.to_string())),
        };
        let answers = served.connect().await.export(request).await;
        exports.push(answers.expect("it begins").into_inner());
        let (parts, sent) = mpsc::channel(1);
        let part = head(&format!("artifact/stalls-{number}"));
        parts.send(part).await.expect("sent");
        senders.push(parts);
        let sent = ReceiverStream::new(sent);
        let answers = served.connect().await.import(sent).await;
        imports.push(answers.expect("it begins").into_inner());
    }
    let engine = &served.bench.engine;
    // The next one waits for its turn, and gets it.
    let opened = engine.export(Source::Artifact(id)).await.expect("open");
    let packed = engine.pack(opened, Codec::Plain, std::io::sink(), Arc::default());
    soon("its turn", packed).await.expect("it is packed");
    for answers in imports {
        ends_with(answers, "the caller sent nothing for 300ms").await;
    }
    for answers in exports {
        // It reads again, and is told.
        ends_with(answers, "the caller took nothing for 300ms").await;
    }
    drop(senders);
    served.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_that_is_slow_does_not_stall() {
    // So long that a busy machine does not make it longer.
    let stall = Duration::from_secs(2);
    let served = Served::waiting(bench!(Ground::ALL[0]), stall).await;
    let (parts, sent) = mpsc::channel(1);
    let mut client = served.connect().await;
    let importing = tokio::spawn(async move {
        let answers = client.import(ReceiverStream::new(sent)).await;
        let mut answers = answers.expect("it begins").into_inner();
        let mut end = None;
        while let Some(answer) = answers.message().await.expect("it is imported") {
            end = answer.end.or(end);
        }
        end
    });
    parts.send(head("artifact/slow")).await.expect("sent");
    // The end of an archive, which takes longer than a caller may say nothing.
    for part in [0; 1024].chunks(256) {
        tokio::time::sleep(stall / 3).await;
        let data = part.to_vec();
        let part = api::ImportPart {
            data,
            ..api::ImportPart::default()
        };
        parts.send(part).await.expect("sent");
    }
    let end = api::ImportPart {
        end: true,
        ..api::ImportPart::default()
    };
    parts.send(end).await.expect("sent");
    let end = importing.await.expect("no panic").expect("an end");
    assert!(end.named && served.bench.artifact("artifact/slow").is_some());
    served.finish().await;
}
