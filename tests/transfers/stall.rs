//! Callers of export and import that stall: each is let go after a while, and the others get their
//! turn.

use std::fs;
use std::time::Duration;

use baggageclaim::admin;
use baggageclaim::engine::Source;
use baggageclaim::proto::admin::v1 as api;
use baggageclaim::server::Drain;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Code;

use crate::common::bench::{Ground, eventually, names, soon};
use crate::engine::{bench, request};

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
    let export = || api::ExportRequest {
        format: api::Format::Tar.into(),
        source: Some(api::export_request::Source::ArtifactId(id.to_string())),
    };
    let socket = admin::bind(&bench.pool()).await.expect("bind");
    let drain = Drain::new(Duration::ZERO);
    let stall = Duration::from_millis(300);
    let serving = admin::serve(socket, bench.engine.clone(), drain.clone(), stall);
    let serving = tokio::spawn(serving);
    let client = admin::connect(&bench.pool()).await.expect("connect");

    // Half of them take nothing, the others send nothing.
    let mut exports = Vec::new();
    let mut imports = Vec::new();
    let mut senders = Vec::new();
    for number in 0..AT_A_TIME / 2 {
        // One connection each: a full window of one must not stop another.
        let mut client = admin::connect(&bench.pool()).await.expect("connect");
        exports.push(
            client
                .export(export())
                .await
                .expect("it begins")
                .into_inner(),
        );
        let mut client = admin::connect(&bench.pool()).await.expect("connect");
        let (parts, sent) = mpsc::channel(1);
        let part = head(&format!("artifact/stalls-{number}"));
        parts.send(part).await.expect("sent");
        senders.push(parts);
        let answers = client.import(ReceiverStream::new(sent)).await;
        imports.push(answers.expect("it begins").into_inner());
    }
    let incoming = bench.pool().join("incoming");
    eventually("all of them run", || names(&incoming).len() == AT_A_TIME).await;

    // The next one waits for its turn, and gets it.
    let opened = bench
        .engine
        .export(Source::Artifact(id))
        .await
        .expect("open");
    let packed = bench.engine.pack(
        opened,
        baggageclaim::archive::Codec::Plain,
        std::io::sink(),
        std::sync::Arc::default(),
    );
    soon("its turn", packed).await.expect("it is packed");

    for mut answers in imports {
        let status = loop {
            match soon("an answer", answers.message()).await {
                Ok(Some(_)) => {}
                Ok(None) => panic!("it ended without an error"),
                Err(status) => break status,
            }
        };
        assert!(
            status
                .message()
                .contains("the caller sent nothing for 300ms"),
            "{status}"
        );
        assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
    }
    for mut answers in exports {
        // It reads again, and is told.
        let status = loop {
            match soon("an answer", answers.message()).await {
                Ok(Some(_)) => {}
                Ok(None) => panic!("it ended without an error"),
                Err(status) => break status,
            }
        };
        assert!(
            status
                .message()
                .contains("the caller took nothing for 300ms"),
            "{status}"
        );
        assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
    }
    // One that goes on, however slowly, is not ended.
    let (parts, sent) = mpsc::channel(1);
    let slow = tokio::spawn({
        let mut client = client.clone();
        async move {
            let answers = client.import(ReceiverStream::new(sent)).await;
            let mut answers = answers.expect("it begins").into_inner();
            let mut end = None;
            while let Some(answer) = answers.message().await.expect("it is imported") {
                end = answer.end.or(end);
            }
            end
        }
    });
    parts.send(head("artifact/slow")).await.expect("sent");
    let zeros = vec![0; 1024];
    for byte in zeros.chunks(256) {
        tokio::time::sleep(stall / 2).await;
        let part = api::ImportPart {
            data: byte.to_vec(),
            ..api::ImportPart::default()
        };
        parts.send(part).await.expect("sent");
    }
    let end = api::ImportPart {
        end: true,
        ..api::ImportPart::default()
    };
    parts.send(end).await.expect("sent");
    assert!(slow.await.expect("no panic").expect("an end").named);
    assert!(
        bench
            .artifact(&request("artifact/slow").reference.to_string())
            .is_some()
    );
    drop((client, senders));
    drain.begin();
    drain.close();
    soon("the end of the service", serving)
        .await
        .expect("no panic")
        .expect("it is served");
    bench.finish().await;
}
