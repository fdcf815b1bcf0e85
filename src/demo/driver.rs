//! The driver's process and its log: the same binary, started as a user starts it and stopped as an
//! orchestrator stops it.

#![expect(
    clippy::disallowed_types,
    reason = "the driver under demonstration is a process: this one starts it, as systemd or a \
              runtime would"
)]

use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::error::Error;
use super::options::Options;
use super::sandbox::Paths;
use baggageclaim::kubelet_double::Kubelet;

/// The longest wait for a large pool to open.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long the driver may take to end.
const GRACE: Duration = Duration::from_secs(20);

/// The running driver.
#[derive(Debug)]
pub(super) struct Driver {
    child: Child,
    log: PathBuf,
}

impl Driver {
    /// Starts it, and connects to it as kubelet does.
    pub(super) async fn start(
        paths: &Paths,
        node: &str,
        options: &Options,
    ) -> Result<(Self, Kubelet), Error> {
        let log = paths.log.clone();
        let failed = |source| Error::io("write", &log, source);
        let file = File::create(&log).map_err(failed)?;
        let child = Command::new(&options.program)
            .arg("standalone")
            .arg("--pool")
            .arg(&paths.pool)
            .arg("--socket")
            .arg(&paths.socket)
            .args(["--node-id", node, "--end-with-parent"])
            .args(paths.tier.as_ref().map(|tier| format!("--shared={tier}")))
            .args(&paths.peers)
            .stdin(Stdio::null())
            .stdout(file.try_clone().map_err(failed)?)
            .stderr(file)
            .spawn()
            .map_err(|source| Error::io("start", &options.program, source))?;
        let mut driver = Self { child, log };
        let connected = tokio::select! {
            connected = Kubelet::connect_when_ready(&paths.socket, &paths.kubelet, PATIENCE) => connected,
            how = driver.ended() => {
                let log = driver.last_words();
                return Err(Error::Driver { how, log });
            }
        };
        match connected {
            Ok(kubelet) => Ok((driver, kubelet)),
            Err(source) => Err(Error::Connect {
                source,
                log: driver.last_words(),
            }),
        }
    }

    /// Returns how the driver ended, if it ends by itself.
    async fn ended(&mut self) -> String {
        loop {
            match self.child.try_wait() {
                Ok(None) => tokio::time::sleep(Duration::from_millis(20)).await,
                Ok(Some(status)) => return status.to_string(),
                Err(error) => return error.to_string(),
            }
        }
    }

    /// Stops it and waits for its end.
    pub(super) fn stop(mut self) -> Result<(), Error> {
        let status = self.end();
        match status {
            Some(status) if status.success() => Ok(()),
            Some(status) => Err(Error::Driver {
                how: status.to_string(),
                log: self.last_words(),
            }),
            None => Err(Error::Driver {
                how: format!("it did not end within {GRACE:?}"),
                log: self.last_words(),
            }),
        }
    }

    fn end(&mut self) -> Option<std::process::ExitStatus> {
        if let Ok(Some(status)) = self.child.try_wait() {
            return Some(status);
        }
        if let Some(pid) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            // The child is not waited for yet, so the pid cannot be reused.
            let _ = kill_process(pid, Signal::TERM);
        }
        let began = Instant::now();
        while began.elapsed() < GRACE {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Some(status);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
        None
    }

    /// The end of its log.
    fn last_words(&self) -> String {
        let log = std::fs::read(&self.log).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(12)..].join("\n")
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.end();
    }
}
