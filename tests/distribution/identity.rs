//! Credentials that a driver takes from an identity: a web identity token that AWS's STS exchanges,
//! and the metadata server of Google Cloud. Doubles answer for both (`tests/sts-double/`,
//! `tests/gcs-double/`), and the driver has no other credentials.

use std::io::{BufRead as _, BufReader, Read as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Output, Stdio};

use super::{SHARED, end, step};
use crate::common::process::NodeProcess;
use crate::common::{Fs, go, require_lab, skip};
use crate::server::{KEY, SECRET, Server};

const ROLE: &str = "arn:aws:iam::123456789012:role/baggageclaim";
const TOKEN: &str = "token-canary";
/// What nothing may show: tokens before and after the exchange, and the secret key.
const SECRETS: [&str; 3] = [TOKEN, "session-canary", SECRET];

/// A double, which ends with this.
struct Double {
    child: Child,
    /// The first line that it prints.
    address: String,
    lines: BufReader<ChildStdout>,
}

impl Double {
    fn start(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().expect("it starts");
        let mut lines = BufReader::new(child.stdout.take().expect("it is piped"));
        let mut address = String::new();
        assert!(lines.read_line(&mut address).expect("read") > 0, "it ended");
        Self {
            child,
            address: address.trim().to_owned(),
            lines,
        }
    }

    /// Ends it. Returns what it printed.
    fn end(mut self) -> Vec<String> {
        self.child.kill().expect("kill");
        self.child.wait().expect("wait");
        let lines: Result<_, _> = self.lines.by_ref().lines().collect();
        lines.expect("text")
    }
}

impl Drop for Double {
    fn drop(&mut self) {
        let _killed = self.child.kill();
        let _waited = self.child.wait();
    }
}

fn is_told_no_secret(told: &str) {
    for secret in SECRETS {
        let line = told.lines().find(|line| line.contains(secret));
        assert_eq!(line, None);
    }
}

/// `shared ls`, with this environment only.
fn ls(url: &str, env: &[(&str, &Path)]) -> (Output, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_baggageclaim"))
        .args(["shared", "ls", "-n", "ci", "--shared", url])
        .env_clear()
        .envs(env.iter().copied())
        .output()
        .expect("it runs");
    let told = [&output.stdout[..], &output.stderr].concat();
    let told = String::from_utf8(told).expect("text");
    is_told_no_secret(&told);
    (output, told)
}

#[tokio::test]
async fn a_web_identity_is_exchanged_again_when_its_credentials_are_over() {
    let lab = require_lab!(Fs::Ext4);
    let server = match Server::start() {
        Ok(server) => server,
        Err(reason) => return skip(reason),
    };
    let program = match go::build("sts-double", ".", "sts-double") {
        Ok(program) => program,
        Err(reason) => return skip(&reason),
    };
    let dir = tempfile::tempdir().expect("a directory");
    let (token, authority) = (dir.path().join("token"), dir.path().join("ca.pem"));
    std::fs::write(&token, TOKEN).expect("write");
    let double = Double::start(
        Command::new(program)
            .arg(&token)
            .args([ROLE, &server.endpoint])
            .arg(&authority)
            .env("ROOT_ACCESS_KEY", KEY)
            .env("ROOT_SECRET_KEY", SECRET),
    );
    let sts = PathBuf::from(&double.address);
    let env = [
        ("AWS_WEB_IDENTITY_TOKEN_FILE", token.as_path()),
        ("AWS_ROLE_ARN", Path::new(ROLE)),
        ("AWS_ENDPOINT_URL_STS", &sts),
        ("SSL_CERT_FILE", &authority),
    ];
    let url = format!(
        "s3://bucket/prefix?endpoint={}&region=us-east-1",
        double.address
    );
    let node = NodeProcess::start_with_env(&lab, &env, &["--shared", &url, "--log", "trace"]);
    let kubelet = node.kubelet().await;
    assert_eq!(step(&kubelet, "one", b"first").await, None);
    node.logged(SHARED, 1).await;
    let log = node.terminate().await;
    is_told_no_secret(&log);
    assert_eq!(
        std::fs::read_to_string(&token).expect("read"),
        format!("{TOKEN}-rotated")
    );

    let (output, told) = ls(&url, &env);
    assert!(
        output.status.success() && told.contains("task-cache/go"),
        "{told}"
    );
    let mut other = env;
    other[1].1 = Path::new("arn:aws:iam::123456789012:role/other");
    let (output, told) = ls(&url, &other);
    assert!(!output.status.success(), "{told}");
    assert!(
        told.contains("cannot be used") && told.contains("AccessDenied"),
        "{told}"
    );
    let mut missing = env;
    let nowhere = dir.path().join("nowhere");
    missing[0].1 = &nowhere;
    let (output, told) = ls(&url, &missing);
    assert!(!output.status.success(), "{told}");
    assert!(
        told.contains("cannot be used") && told.contains("nowhere"),
        "{told}"
    );

    let lines = double.end();
    // The driver has two clients, which share no credentials: the second one repeats no request.
    let rotated = "exchanged: -rotated";
    let expected = [
        "exchanged: ",
        rotated,
        rotated,
        rotated,
        "refused: another role",
    ];
    assert_eq!(lines, expected);
    end(lab);
}

#[test]
fn a_token_of_the_metadata_server_is_sent_with_each_request() {
    let program = match go::build("gcs-double", ".", "gcs-double") {
        Ok(program) => program,
        Err(reason) => return skip(&reason),
    };
    let double = Double::start(Command::new(program).arg(TOKEN));
    let host = PathBuf::from(&double.address);
    let url = format!(
        "gs://bucket?endpoint=http://{}&allow-http=true",
        double.address
    );
    let (output, told) = ls(&url, &[("GCE_METADATA_HOST", &host)]);
    assert!(
        output.status.success() && told.contains("No names."),
        "{told}"
    );
    let lines = double.end();
    assert_eq!(lines, ["asked for a token"]);
}
