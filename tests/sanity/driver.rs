//! The process under test: `baggageclaim standalone` with every option or with none, on a pool of
//! the lab. It can be killed and restarted; nothing here knows the calls.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use baggageclaim::proto::csi::v1 as csi;
use csi::identity_client::IdentityClient;
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint, Uri};

use super::common::Lab;

/// Longer than a start takes on a machine that does much else.
const PATIENCE: Duration = Duration::from_secs(60);

/// How the driver is started, each time the same.
#[derive(Debug, Clone)]
pub(crate) struct Setup {
    pub(crate) pool: PathBuf,
    pub(crate) socket: PathBuf,
    log: PathBuf,
    backend: String,
    options: &'static [&'static str],
}

impl Setup {
    pub(crate) fn new(lab: &Lab, backend: &str) -> Self {
        let run = lab.run_dir();
        Self {
            pool: lab.path().join("pool"),
            socket: run.join("csi.sock"),
            log: run.join("driver.log"),
            backend: backend.to_owned(),
            options: &["--alpha", "--attach", "--max-volumes", "4"],
        }
    }

    /// The same driver without any option.
    pub(crate) fn without_options(self) -> Self {
        Self {
            options: &[],
            ..self
        }
    }

    /// Starts the driver and waits until it serves.
    pub(crate) fn start(&self) -> Driver {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        let driver = self.spawn();
        runtime.block_on(self.connect());
        driver
    }

    /// Starts the driver.
    pub(crate) fn spawn(&self) -> Driver {
        let log = File::options().create(true).append(true).open(&self.log);
        let child = Command::new(env!("CARGO_BIN_EXE_baggageclaim"))
            .arg("standalone")
            .arg("--pool")
            .arg(&self.pool)
            .arg("--socket")
            .arg(&self.socket)
            .args(["--backend", &self.backend, "--node-id", "node-1"])
            .args(self.options)
            .args(["--log", "info,baggageclaim=debug"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log.expect("a file for what the driver says"))
            .spawn();
        Driver(child.expect("the driver starts"))
    }

    /// A connection to a driver that serves.
    pub(crate) async fn connect(&self) -> Channel {
        let started = Instant::now();
        loop {
            if let Ok(channel) = channel(&self.socket).await {
                let mut identity = IdentityClient::new(channel.clone());
                let probe = identity.probe(csi::ProbeRequest {}).await;
                if probe.is_ok_and(|answer| answer.into_inner().ready == Some(true)) {
                    return channel;
                }
            }
            assert!(
                started.elapsed() < PATIENCE,
                "the driver does not serve\n{}",
                self.tail()
            );
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    /// All that the driver said.
    pub(crate) fn log(&self) -> String {
        let bytes = std::fs::read(&self.log).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The end of it, for the message of a test that fails.
    pub(crate) fn tail(&self) -> String {
        let log = self.log();
        let lines: Vec<&str> = log.lines().collect();
        let from = lines.len().saturating_sub(80);
        format!("the driver's log ends:\n{}", lines[from..].join("\n"))
    }
}

async fn channel(socket: &Path) -> Result<Channel, tonic::transport::Error> {
    let socket = socket.to_owned();
    Endpoint::from_static("http://localhost")
        .connect_with_connector(tower::service_fn(move |_: Uri| {
            let socket = socket.clone();
            async move { UnixStream::connect(socket).await.map(TokioIo::new) }
        }))
        .await
}

/// The process. Killed when it is dropped, with SIGKILL as ever.
#[derive(Debug)]
pub(crate) struct Driver(Child);

impl Driver {
    pub(crate) fn kill(&mut self) {
        let _ = self.0.kill();
        self.0.wait().expect("it can be waited for");
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.kill();
    }
}
