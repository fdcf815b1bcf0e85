//! A real S3 server for the tests: versitygw over a directory, one process for all of them.
//! It is built from `tests/s3-server/` through Go's module proxy, and stays in `target/tmp`.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use object_store::aws::AmazonS3Builder;
use object_store::{ClientOptions, ObjectStore};

use crate::common::go;

pub(crate) const KEY: &str = "tests-key";
pub(crate) const SECRET: &str = "hunter2-the-canary";

/// The running server. The process ends when this is dropped.
pub(crate) struct Server {
    child: Child,
    pub(crate) endpoint: String,
    root: tempfile::TempDir,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _killed = self.child.kill();
        let _waited = self.child.wait();
    }
}

fn program() -> Result<&'static Path, &'static str> {
    static PROGRAM: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let built = PROGRAM.get_or_init(|| {
        let package = "github.com/versity/versitygw/cmd/versitygw";
        go::build("s3-server", package, "versitygw")
    });
    built.as_deref().map_err(String::as_str)
}

impl Server {
    /// Starts a server with the bucket `bucket`. The error is a sentence.
    pub(crate) fn start() -> Result<Self, &'static str> {
        Self::with(&[])
    }

    /// The same with further arguments of the program.
    pub(crate) fn with(arguments: &[&str]) -> Result<Self, &'static str> {
        let program = program()?;
        let root = tempfile::tempdir().expect("a directory");
        std::fs::create_dir_all(root.path().join("data/bucket")).expect("mkdir");
        // Another process may take the port in between; then the server ends, and the next port is
        // tried.
        for _ in 0..5 {
            let free = TcpListener::bind("127.0.0.1:0").expect("a port");
            let address = free.local_addr().expect("an address").to_string();
            drop(free);
            let mut child = Command::new(program)
                .args(arguments)
                .args(["--port", &address, "posix"])
                .arg(root.path().join("data"))
                .env("ROOT_ACCESS_KEY", KEY)
                .env("ROOT_SECRET_KEY", SECRET)
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .expect("it starts");
            if answers(&mut child, &address) {
                return Ok(Self {
                    child,
                    endpoint: format!("http://{address}"),
                    root,
                });
            }
            let _killed = child.kill();
            let _waited = child.wait();
        }
        panic!("versitygw does not answer");
    }

    /// Where the bucket's objects are files.
    pub(crate) fn bucket(&self) -> PathBuf {
        self.root.path().join("data/bucket")
    }

    pub(crate) fn store(&self) -> Arc<dyn ObjectStore> {
        store_at(&self.endpoint)
    }
}

/// The bucket of the server, which is also at this endpoint. The client has no limit of its own.
pub(crate) fn store_at(endpoint: &str) -> Arc<dyn ObjectStore> {
    let _chosen = rustls::crypto::ring::default_provider().install_default();
    let options = ClientOptions::new().with_allow_http(true);
    let store = AmazonS3Builder::new()
        .with_bucket_name("bucket")
        .with_endpoint(endpoint)
        .with_region("us-east-1")
        .with_access_key_id(KEY)
        .with_secret_access_key(SECRET)
        .with_client_options(options.with_timeout_disabled())
        .build();
    Arc::new(store.expect("a store"))
}

/// Whether the server takes connections, before it ends or 20 seconds are over. No event tells when
/// it does.
fn answers(child: &mut Child, address: &str) -> bool {
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(20) {
        if std::net::TcpStream::connect(address).is_ok() {
            return true;
        }
        if child.try_wait().expect("wait").is_some() {
            return false;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    false
}
