//! The verb `shared` as a process: what it prints, its exit codes, and what it never prints.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::common::{Fs, Lab, require_lab};
use crate::server::{KEY, SECRET};
use crate::tier::{Tier, hold, publish};

fn baggageclaim(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_baggageclaim"));
    command.arg("shared").args(arguments);
    // Nothing of this machine's identity.
    command.env_clear().env("TMPDIR", std::env::temp_dir());
    command
}

fn text(output: &Output) -> String {
    let out = String::from_utf8(output.stdout.clone()).expect("text");
    out + &String::from_utf8(output.stderr.clone()).expect("text")
}

fn json(command: &mut Command) -> Value {
    let output = command.args(["-o", "json"]).output().expect("it runs");
    assert!(output.status.success(), "{}", text(&output));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

#[test]
fn every_verb_on_a_directory_and_on_the_server() {
    let lab = require_lab!(Fs::Ext4);
    let layer = lab.dir("layer");
    fs::write(layer.join("file"), "content").expect("write");
    let held = hold(&lab, &layer);
    for tier in Tier::both() {
        publish(&tier.store, "task-cache/go/build", &[&held]).expect("publish");
        let url = match &tier.server {
            None => format!("file://{}", tier.files.display()),
            Some(server) => {
                let endpoint = &server.endpoint;
                format!(
                    "s3://bucket/some/prefix?endpoint={endpoint}&allow-http=true&region=us-east-1"
                )
            }
        };
        let run = |verb: &str, more: &[&str]| {
            let mut command = baggageclaim(&[verb, "--shared", &url]);
            command.args(more);
            command
                .env("AWS_ACCESS_KEY_ID", KEY)
                .env("AWS_SECRET_ACCESS_KEY", SECRET);
            command
        };
        let said = |verb: &str, more: &[&str]| {
            let output = run(verb, more).output().expect("it runs");
            assert!(output.status.success(), "{}", text(&output));
            text(&output)
        };
        let listed = said("ls", &[]);
        assert!(
            listed.contains("ci          task-cache/go/build   content"),
            "{listed}"
        );
        let listed = json(&mut run("ls", &["-n", "ci"]));
        assert_eq!(listed[0]["reference"], "task-cache/go/build");
        assert_eq!(listed[0]["state"], "content");
        assert!(said("ls", &["-n", "other"]).contains("No names."));
        let used = said("du", &[]);
        assert!(used.contains("ci          1       1           1"), "{used}");
        assert_eq!(json(&mut run("du", &[]))[0]["tenant"], "ci");
        let checked = said("verify", &[]);
        assert_eq!(checked, "1 names and 1 layers checked, 0 damaged.\n");
        let dry = said("gc", &["--dry-run"]);
        assert!(dry.contains("0 objects with 0 B would be deleted"), "{dry}");
        assert!(
            !tier.files.join("v1/ci/gc").exists(),
            "a dry run writes nothing"
        );
        let done = json(&mut run("gc", &[]));
        assert_eq!(
            (&done[0]["names"], &done[0]["deleted"]),
            (&Value::from(1), &Value::from(0))
        );
        // Damage is told, with another exit code.
        fs::write(tier.files.join("v1/ci/names/task-cache/go_2Fbuild"), "{}").expect("write");
        let output = run("verify", &[]).output().expect("it runs");
        assert_eq!(output.status.code(), Some(1));
        assert!(
            text(&output).contains("names/task-cache/go_2Fbuild"),
            "{}",
            text(&output)
        );
        if tier.server.is_some() {
            let mut wrong = run("ls", &["-n", "ci"]);
            let output = wrong
                .env("AWS_SECRET_ACCESS_KEY", "hunter3")
                .output()
                .expect("it runs");
            assert_eq!(output.status.code(), Some(1));
            let told = text(&output);
            assert!(
                told.contains("access is denied") && told.contains("s3://bucket/some/prefix"),
                "{told}"
            );
            assert!(!told.contains("hunter") && !told.contains(KEY), "{told}");
        }
    }
}

#[test]
fn a_namespace_that_fails_does_not_keep_the_others_from_it() {
    let lab = require_lab!(Fs::Ext4);
    let tier = Tier::file();
    let layer = lab.dir("layer");
    fs::write(layer.join("file"), "content").expect("write");
    publish(&tier.store, "task-cache/x", &[&hold(&lab, &layer)]).expect("publish");
    // It comes before `ci`.
    fs::create_dir(tier.files.join("v1/aaa")).expect("mkdir");
    fs::write(tier.files.join("v1/aaa/format"), "{\"format\":2}").expect("write");
    let url = format!("file://{}", tier.files.display());
    for (verb, done) in [
        ("ls", "ci          task-cache/x   content"),
        ("du", "ci          1       1           1"),
        ("verify", "1 names and 1 layers checked, 0 damaged."),
        ("gc", "ci: 1 names, 1 manifests, 1 layers"),
    ] {
        let output = baggageclaim(&[verb, "--shared", &url]).output();
        let output = output.expect("it runs");
        assert_eq!(output.status.code(), Some(1), "{verb}");
        let told = text(&output);
        assert!(told.contains(done), "{told}");
        assert!(
            told.contains("namespace aaa: ") && told.contains("format 2"),
            "{told}"
        );
    }
    assert!(tier.files.join("v1/ci/gc").exists());
}

#[test]
fn a_full_temporary_directory_is_no_damage() {
    let lab = require_lab!(Fs::Ext4);
    let small = Lab::sized(Fs::Tmpfs, 16 << 10);
    let tier = Tier::file();
    let layer = lab.dir("layer");
    for number in 0..2000 {
        fs::write(layer.join(format!("file-{number}")), "content").expect("write");
    }
    publish(&tier.store, "task-cache/x", &[&hold(&lab, &layer)]).expect("publish");
    let url = format!("file://{}", tier.files.display());
    let verify = |temporary: &Path| {
        let mut command = baggageclaim(&["verify", "--shared", &url]);
        let output = command.env("TMPDIR", temporary).output().expect("it runs");
        (output.status.code(), text(&output))
    };
    let (code, told) = verify(&lab.path());
    assert_eq!(code, Some(0), "{told}");
    let (code, told) = verify(&small.path());
    assert_eq!(code, Some(1), "{told}");
    assert!(told.contains("No space left on device"), "{told}");
    assert!(!told.contains("1 damaged"), "{told}");
}

#[test]
fn a_request_is_repeated_when_the_storage_asks_for_it() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    let server = std::thread::spawn(move || {
        let answers = [
            "HTTP/1.1 503 Slow Down\r\nRetry-After: 2\r\n",
            "HTTP/1.1 403 Forbidden\r\n",
        ];
        answers.map(|answer| {
            let (mut stream, _) = listener.accept().expect("a request");
            let asked = Instant::now();
            let _read = stream.read(&mut [0; 4096]).expect("a request");
            let answer = format!("{answer}Content-Length: 0\r\nConnection: close\r\n\r\n");
            stream.write_all(answer.as_bytes()).expect("an answer");
            asked
        })
    });
    let url = format!("s3://bucket?endpoint=http://{address}&allow-http=true&region=x");
    let output = baggageclaim(&["ls", "--shared", &url, "-n", "ci"])
        .env("AWS_ACCESS_KEY_ID", KEY)
        .env("AWS_SECRET_ACCESS_KEY", SECRET)
        .output()
        .expect("it runs");
    assert!(
        text(&output).contains("access is denied"),
        "{}",
        text(&output)
    );
    let [first, second] = server.join().expect("two requests");
    let pause = second - first;
    // Without `Retry-After` the first pause is a tenth of a second.
    assert!(pause >= Duration::from_secs(2), "{pause:?}");
}

#[test]
fn mistakes_are_told_without_what_may_be_secret() {
    for (url, what) in [
        ("s3://key:hunter2@bucket", "must not hold credentials"),
        ("s3://bucket?secret=hunter2", "unknown option \"secret\""),
        ("ftp://hunter2", "must begin with s3://BUCKET"),
    ] {
        let output = baggageclaim(&["ls", "--shared", url])
            .output()
            .expect("it runs");
        let told = text(&output);
        assert_eq!(output.status.code(), Some(2), "{told}");
        assert!(told.contains(what) && !told.contains("hunter2"), "{told}");
    }
    let output = baggageclaim(&["ls", "--shared", "file:///no/such/directory"]).output();
    let told = text(&output.expect("it runs"));
    assert!(
        told.contains("/no/such/directory") && told.contains("check the URL"),
        "{told}"
    );
    let output = baggageclaim(&["ls"]).output().expect("it runs");
    assert!(
        text(&output).contains("--shared <URL>"),
        "{}",
        text(&output)
    );
}
