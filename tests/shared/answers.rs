//! Real responses of a server that fails, as the crate reads them, and what becomes of them in a
//! message.

use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;

use baggageclaim::shared::{Collector, Error, Store, look};
use object_store::aws::AmazonS3Builder;
use object_store::{ClientOptions, RetryConfig};

use tokio::runtime::Runtime;

use crate::collect::now;
use crate::server::{KEY, SECRET, Server};
use crate::tier::{TIMES, id, never, reference, runtime, tenant};

/// A server that answers each request by its method, until the test ends.
fn server(answer: impl Fn(&str) -> String + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            if let Ok(first) = request(&stream) {
                let _written = stream.write_all(answer(&first).as_bytes());
            }
        }
    });
    format!("http://{address}")
}

/// Reads a request to its end. Returns its first line.
fn request(stream: &TcpStream) -> io::Result<String> {
    let mut input = BufReader::new(stream);
    let (mut first, mut body) = (String::new(), 0);
    input.read_line(&mut first)?;
    loop {
        let mut line = String::new();
        input.read_line(&mut line)?;
        let line = line.trim().to_ascii_lowercase();
        if line.is_empty() {
            break;
        }
        if let Some(length) = line.strip_prefix("content-length:") {
            body = length.trim().parse().map_err(io::Error::other)?;
        }
    }
    io::copy(&mut input.take(body), &mut io::sink())?;
    Ok(first)
}

fn answer(status: &str, more: &str, body: &str) -> String {
    let length = body.len();
    let head = format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n");
    format!("{head}{more}\r\n{body}")
}

const WRITTEN: &str = "ETag: \"x\"\r\nLast-Modified: Mon, 02 Jan 2023 03:04:05 GMT\r\n";

fn store(endpoint: &str, secret: &str, bucket: &str) -> (Arc<Runtime>, Store) {
    let _chosen = rustls::crypto::ring::default_provider().install_default();
    let retry = RetryConfig {
        max_retries: 1,
        ..RetryConfig::default()
    };
    let store = AmazonS3Builder::new()
        .with_bucket_name(bucket)
        .with_endpoint(endpoint)
        .with_region("us-east-1")
        .with_access_key_id(KEY)
        .with_secret_access_key(secret)
        .with_retry(retry)
        .with_client_options(ClientOptions::new().with_allow_http(true))
        .build()
        .expect("a store");
    let runtime = runtime();
    let handle = runtime.handle().clone();
    let store = Store::new(Arc::new(store), "p", "s3://bucket/p", handle, TIMES);
    (runtime, store)
}

fn ask(endpoint: &str, secret: &str, bucket: &str) -> Error {
    let (_runtime, store) = store(endpoint, secret, bucket);
    look(&store, &tenant(), &reference("task-cache/x")).expect_err("it fails")
}

#[test]
fn every_answer_has_its_kind_and_its_message_no_secret() {
    let forbidden = "<Error><Code>AccessDenied</Code><AWSAccessKeyId>tests-key</AWSAccessKeyId>\
                     <StringToSign>hunter2</StringToSign></Error>";
    let forbidden = answer("403 Forbidden", "", forbidden);
    let busy = answer(
        "503 Slow Down",
        "Retry-After: 1\r\n",
        "<Code>SlowDown</Code>hunter2",
    );
    let cut = answer("200 OK", WRITTEN, &" ".repeat(100));
    let cut = cut[..cut.len() - 50].to_owned();
    for (answer, kind) in [
        (forbidden, "permanent"),
        (answer("500 Internal Server Error", "", ""), "away"),
        (answer("501 Not Implemented", "", ""), "permanent"),
        // A proxy's, which has lost its route. A storage names the key that it lacks.
        (answer("404 Not Found", "", "404 page not found"), "away"),
        (busy, "slow down"),
        (cut, "away"),
        ("hello\r\n\r\n".to_owned(), "away"),
    ] {
        let always = answer.clone();
        let error = ask(&server(move |_| always.clone()), SECRET, "bucket");
        let found = match error {
            Error::Permanent { .. } => "permanent",
            Error::Away { .. } => "away",
            Error::SlowDown { .. } => "slow down",
            _ => "other",
        };
        assert_eq!(found, kind, "{answer}: {error:?}");
        let text = format!("{error:?} {error}");
        for secret in ["hunter2", KEY, "127.0.0.1"] {
            assert!(!text.contains(secret), "{text}");
        }
        assert!(
            text.contains("s3://bucket/p/v1/ci/names/task-cache/x"),
            "{text}"
        );
    }
    // Nothing listens.
    let free = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = free.local_addr().expect("an address");
    drop(free);
    let error = ask(&format!("http://{address}"), SECRET, "bucket");
    assert!(matches!(error, Error::Away { .. }), "{error:?}");
    assert!(error.to_string().contains("Connection refused"), "{error}");
}

/// S3 deletes with a request for many objects. Its answer is 200, also if it deletes nothing.
#[test]
fn a_collector_that_may_not_delete_is_told_so() {
    let endpoint = server(|request| match request.split(' ').next() {
        Some("GET") if request.contains("list-type") => answer("200 OK", "", "<ListBucketResult/>"),
        Some("GET") => answer("404 Not Found", "", "<Error><Code>NoSuchKey</Code></Error>"),
        Some("POST") => answer(
            "200 OK",
            "",
            "<DeleteResult><Error><Key>p/v1/ci/format</Key><Code>AccessDenied</Code>\
             <Message>Access Denied</Message></Error></DeleteResult>",
        ),
        _ => answer("200 OK", WRITTEN, ""),
    });
    let (_runtime, store) = store(&endpoint, SECRET, "bucket");
    // It finds nothing, so it deletes the last records.
    let error = Collector::new(&store, &tenant(), id()).run(now(), &never);
    let error = error.expect_err("it may not");
    let told = matches!(&error, Error::Permanent { cause, .. } if cause.contains("is denied"));
    assert!(told && !error.is_temporary(), "{error:?}");
}

#[test]
fn a_real_server_refuses_a_wrong_key_and_a_wrong_bucket() {
    let server = match Server::start() {
        Ok(server) => server,
        Err(reason) => return crate::common::skip(reason),
    };
    let error = ask(&server.endpoint, "wrong", "bucket");
    assert!(matches!(error, Error::Permanent { .. }), "{error:?}");
    let error = ask(&server.endpoint, SECRET, "no-such-bucket");
    assert!(matches!(error, Error::Permanent { .. }), "{error:?}");
    assert!(
        error.to_string().contains("bucket does not exist"),
        "{error}"
    );
}
