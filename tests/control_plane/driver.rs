//! The driver's processes: the controller, and nodes with pools. Each can be killed and started
//! again.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use baggageclaim::csi::{DRIVER_NAME, probe};
use baggageclaim::kubelet_double::Kubelet;
use baggageclaim::proto::csi::v1 as csi;
use csi::controller_client::ControllerClient;
use rustix::process::{Pid, Signal, kill_process};
use tonic::transport::Channel;

use crate::plane::{ControlPlane, Daemon};
use crate::setting;

const PATIENCE: Duration = Duration::from_secs(60);

/// A process of the driver.
pub(crate) struct Process {
    arguments: Vec<String>,
    environment: Vec<(&'static str, String)>,
    log: PathBuf,
    pub(crate) socket: PathBuf,
    daemon: Option<Daemon>,
}

impl Process {
    fn new(plane: &ControlPlane, name: &str, socket: PathBuf, arguments: Vec<String>) -> Self {
        let mut process = Self {
            arguments,
            environment: Vec::new(),
            log: plane.directory.path().join(format!("{name}.log")),
            socket,
            daemon: None,
        };
        process.start();
        process
    }

    /// Starts it.
    pub(crate) fn start(&mut self) {
        let log = File::options().create(true).append(true).open(&self.log);
        let built = env!("CARGO_BIN_EXE_baggageclaim").to_owned();
        let child = Command::new(setting("BAGGAGECLAIM_TEST_PROGRAM", built))
            .args(&self.arguments)
            .args(["--end-with-parent", "--grace=5s"])
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stderr(log.expect("a log"))
            .spawn();
        self.daemon = Some(Daemon(child.expect("the driver starts")));
    }

    /// Starts it again with a wrong clock. A file says how wrong it is at each moment, such as
    /// `+10m`. Only its wall clock is wrong.
    pub(crate) fn restart_by(&mut self, library: &Path, file: &Path) {
        self.kill();
        self.environment = vec![
            ("LD_PRELOAD", library.display().to_string()),
            ("FAKETIME_TIMESTAMP_FILE", file.display().to_string()),
            ("FAKETIME_NO_CACHE", "1".to_owned()),
            ("FAKETIME_DONT_FAKE_MONOTONIC", "1".to_owned()),
            ("NO_FAKE_STAT", "1".to_owned()),
        ];
        self.start();
    }

    /// Starts it again. With a point, it dies when it first passes that (`engine::failpoint`).
    pub(crate) fn restart_with_point(&mut self, point: Option<&str>) {
        self.kill();
        let point = point.map(|point| ("BAGGAGECLAIM_CRASH_AT", point.to_owned()));
        self.environment = point.into_iter().collect();
        self.start();
    }

    /// Waits until it has ended by itself.
    pub(crate) async fn ended(&mut self) {
        let began = std::time::Instant::now();
        let daemon = self.daemon.as_mut().expect("it runs");
        while daemon.0.try_wait().expect("it is a child").is_none() {
            assert!(
                began.elapsed() < PATIENCE,
                "it goes on: {:?}",
                self.environment
            );
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        self.daemon = None;
    }

    /// All that it said.
    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// The end of what it said.
    pub(crate) fn tail(&self) -> String {
        let log = self.log();
        let lines: Vec<&str> = log.lines().collect();
        let from = lines.len().saturating_sub(60);
        lines[from..].join("\n")
    }

    /// Kills it, and waits until it is gone.
    pub(crate) fn kill(&mut self) {
        self.daemon = None;
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let daemon = self.daemon.as_ref().expect("it runs");
        kill_process(Pid::from_child(&daemon.0), signal).expect("kill");
    }

    /// Its process id.
    pub(crate) fn id(&self) -> u32 {
        self.daemon.as_ref().expect("it runs").0.id()
    }

    /// Waits until it says that it is ready.
    pub(crate) async fn ready(&self) {
        let began = std::time::Instant::now();
        while !probe(&self.socket, PATIENCE).await.is_ok_and(|ready| ready) {
            assert!(began.elapsed() < PATIENCE, "not ready:\n{}", self.log());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// The arguments of every role.
fn arguments(plane: &ControlPlane, role: &[&str]) -> Vec<String> {
    let kubeconfig = plane.kubeconfig.to_str().expect("text");
    let is_http = |flag: &&str| flag.starts_with("--http");
    let http = if role.iter().any(is_http) {
        None
    } else {
        Some("--http=off")
    };
    let all = [role, &["--kubeconfig", kubeconfig]].concat();
    all.into_iter().chain(http).map(str::to_owned).collect()
}

pub(crate) fn controller(plane: &ControlPlane) -> Process {
    controller_with(plane, &[])
}

/// A controller with more flags.
pub(crate) fn controller_with(plane: &ControlPlane, flags: &[&str]) -> Process {
    controller_named(plane, "controller", flags)
}

/// One of several controllers.
pub(crate) fn controller_named(plane: &ControlPlane, name: &str, flags: &[&str]) -> Process {
    let socket = plane.directory.path().join(format!("{name}.sock"));
    let text = socket.to_str().expect("text").to_owned();
    let arguments = arguments(plane, &[&["controller", "--socket", &text], flags].concat());
    Process::new(plane, name, socket, arguments)
}

/// The Controller service of a controller that is ready.
pub(crate) async fn client(controller: &Process) -> ControllerClient<Channel> {
    controller.ready().await;
    ControllerClient::new(crate::common::driver::channel(&controller.socket).await)
}

/// A node with a pool at `pool`.
pub(crate) fn node(plane: &ControlPlane, name: &str, pool: &Path) -> Process {
    node_with(plane, name, pool, &[])
}

/// A node with more flags.
pub(crate) fn node_with(plane: &ControlPlane, name: &str, pool: &Path, flags: &[&str]) -> Process {
    let kubelet = kubelet_dir(plane, name);
    std::fs::create_dir_all(kubelet.join("plugins")).expect("mkdir");
    std::fs::create_dir_all(kubelet.join("plugins_registry")).expect("mkdir");
    let socket = kubelet.join("plugins").join(DRIVER_NAME).join("csi.sock");
    let (pool, kubelet) = (
        pool.to_str().expect("text"),
        kubelet.to_str().expect("text"),
    );
    let role = [
        "node",
        "--cluster=on",
        "--node-id",
        name,
        "--pool",
        pool,
        "--kubelet-dir",
        kubelet,
    ];
    let arguments = arguments(plane, &[&role[..], flags].concat());
    Process::new(plane, name, socket, arguments)
}

pub(crate) fn kubelet_dir(plane: &ControlPlane, name: &str) -> PathBuf {
    plane.directory.path().join(format!("kubelet-{name}"))
}

/// A kubelet for the node, which is ready.
pub(crate) async fn kubelet(plane: &ControlPlane, name: &str, node: &Process) -> Kubelet {
    let kubelet = Kubelet::connect_when_ready(&node.socket, kubelet_dir(plane, name), PATIENCE);
    kubelet.await.expect("the node answers")
}
