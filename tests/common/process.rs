//! `baggageclaim node` as a process, and kubelet's side of its registration: a watched directory,
//! the calls that kubelet makes when a socket appears there, and calls that wait in a driver.
//!
//! It waits for events, never for a time. `PATIENCE` is only for an event that does not come.

use std::io::BufRead as _;
use std::net::SocketAddr;
use std::os::fd::AsFd as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::task::{Context, Waker};
use std::time::Duration;

use baggageclaim::csi::DRIVER_NAME;
use baggageclaim::kubelet_double::Kubelet;
use baggageclaim::proto::csi::v1 as csi;
use baggageclaim::proto::pluginregistration as registration;
use baggageclaim::sys::DirWatch;
use hyper_util::rt::TokioIo;
use registration::registration_client::RegistrationClient;
use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process, prlimit};
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tonic::transport::{Channel, Endpoint, Uri};

use super::Lab;
use super::api::Api;

/// The timeout for events that are immediate on an idle machine.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Makes a call, and returns once the driver has received it; it must not be answered before. The
/// first poll sends the request, and the next answer on the same connection comes after it.
pub async fn arrived<T: Send + 'static>(
    kubelet: &Kubelet,
    call: impl Future<Output = T> + Send + 'static,
) -> JoinHandle<T> {
    let mut call = Box::pin(call);
    let sent = call.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    assert!(sent.is_pending(), "it did not wait");
    let call = tokio::spawn(call);
    let probed = kubelet.identity_client().probe(csi::ProbeRequest {}).await;
    probed.expect("Probe waits for no volume and no disk");
    call
}

/// A node's driver as a process; `Drop` kills it if it still runs.
pub struct NodeProcess {
    child: Child,
    log: watch::Receiver<String>,
    pub kubelet_dir: PathBuf,
    pub pool: PathBuf,
    pub socket: PathBuf,
}

impl NodeProcess {
    /// Starts it on the lab, with kubelet's directories made first, and with these flags.
    pub fn start(lab: &Lab, flags: &[&str]) -> Self {
        Self::start_at(lab, lab.kubelet_dir(), flags)
    }

    /// Like `start`, for a kubelet with another directory.
    pub fn start_at(lab: &Lab, kubelet_dir: PathBuf, flags: &[&str]) -> Self {
        Self::spawn(lab, kubelet_dir, &[], flags)
    }

    /// Like `start`, with these variables in its environment.
    pub fn start_with_env(lab: &Lab, env: &[(&str, &Path)], flags: &[&str]) -> Self {
        Self::spawn(lab, lab.kubelet_dir(), env, flags)
    }

    fn spawn(lab: &Lab, kubelet_dir: PathBuf, env: &[(&str, &Path)], flags: &[&str]) -> Self {
        std::fs::create_dir_all(kubelet_dir.join("plugins")).expect("mkdir");
        let pool = lab.path().join("pool");
        let mut child = Command::new(env!("CARGO_BIN_EXE_baggageclaim"))
            .arg("node")
            .arg("--pool")
            .arg(&pool)
            .arg("--kubelet-dir")
            .arg(&kubelet_dir)
            .args(["--node-id", "here"])
            .args((!flags.contains(&"--grace")).then_some("--grace=10s"))
            .args((!flags.contains(&"--kubernetes")).then_some("--kubernetes=off"))
            .args(["--end-with-parent", "--log-format", "json"])
            .args(flags)
            // Any free port; a flag wins.
            .env("BAGGAGECLAIM_HTTP", "127.0.0.1:0")
            .envs(env.iter().copied())
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary runs");
        let stderr = child.stderr.take().expect("it is piped");
        let (written, log) = watch::channel(String::new());
        // Up to the end of file, which comes when the process ends.
        std::thread::spawn(move || {
            for line in std::io::BufReader::new(stderr).lines() {
                let line = line.expect("text") + "\n";
                written.send_modify(|log| log.push_str(&line));
            }
        });
        let socket = kubelet_dir.join("plugins").join(DRIVER_NAME);
        Self {
            child,
            log,
            pool,
            socket: socket.join("csi.sock"),
            kubelet_dir,
        }
    }

    /// Starts it with an API server and these flags.
    pub fn start_with_api(lab: &Lab, api: &Api, flags: &[&str]) -> Self {
        let kubeconfig = api.kubeconfig(&lab.run_dir());
        let kubeconfig = kubeconfig.to_str().expect("text");
        let with_api = ["--kubernetes", "on", "--kubeconfig", kubeconfig];
        Self::start(lab, &[&with_api, flags].concat())
    }

    /// A fake kubelet, once the driver is ready.
    pub async fn kubelet(&self) -> Kubelet {
        Kubelet::connect_when_ready(&self.socket, &self.kubelet_dir, PATIENCE)
            .await
            .expect("the driver becomes ready")
    }

    /// The address of health and metrics.
    pub async fn http(&self) -> SocketAddr {
        self.logged("health and metrics", 1).await;
        let log = self.log.borrow();
        let line = log.lines().find(|line| line.contains("health and metrics"));
        let line: serde_json::Value =
            serde_json::from_str(line.expect("it is there")).expect("JSON");
        let address = line["address"].as_str().expect("an address");
        address.parse().expect("an address")
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("kill");
    }

    /// Lowers its limit of descriptors (RLIMIT_NOFILE).
    pub fn limit_descriptors(&self, most: u64) {
        let limit = Rlimit {
            current: Some(most),
            maximum: Some(most),
        };
        prlimit(Some(Pid::from_child(&self.child)), Resource::Nofile, limit).expect("prlimit");
    }

    /// The states of its threads ([`states`]).
    pub fn states(&self) -> Vec<char> {
        states(self.child.id())
    }

    /// Waits until the log contains `what` this many times.
    pub async fn logged(&self, what: &str, times: usize) {
        let mut log = self.log.clone();
        let said = log.wait_for(|log| log.matches(what).count() >= times);
        let said = tokio::time::timeout(PATIENCE, said).await;
        let said = said.is_ok_and(|said| said.is_ok());
        assert!(said, "{what:?} not {times} times: {}", *self.log.borrow());
    }

    /// Waits for its end; its exit code unless it was killed, and its log.
    pub async fn ended(mut self) -> (Option<i32>, String) {
        // The log is closed when the process ends.
        let closed = async { while self.log.changed().await.is_ok() {} };
        let closed = tokio::time::timeout(PATIENCE, closed).await;
        closed.unwrap_or_else(|_| panic!("it does not end: {}", *self.log.borrow()));
        let status = self.child.wait().expect("wait");
        (status.code(), self.log.borrow().clone())
    }

    /// Sends SIGTERM as an orchestrator does; returns its log.
    pub async fn terminate(self) -> String {
        self.signal(Signal::TERM);
        let (code, log) = self.ended().await;
        assert_eq!(code, Some(0), "{log}");
        log
    }

    /// Kills it at an arbitrary instruction; returns its log.
    pub async fn kill(self) -> String {
        self.signal(Signal::KILL);
        let (code, log) = self.ended().await;
        assert_eq!(code, None, "it ended before");
        log
    }
}

impl Drop for NodeProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The state letters of a process's threads, as in proc(5), by thread id: that of the process's
/// first thread comes first. It is `Z` for a process that has ended, but has threads that the
/// kernel cannot end yet.
pub fn states(pid: u32) -> Vec<char> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).expect("it is ours");
    let mut threads: Vec<_> = threads.map(|thread| thread.expect("an entry")).collect();
    // As a number: as text, thread 1000 would come before thread 999.
    threads.sort_by_key(|thread| thread.file_name().to_string_lossy().parse::<u32>().ok());
    // A thread that ends meanwhile has none.
    let lines = threads
        .iter()
        .filter_map(|thread| std::fs::read_to_string(thread.path().join("stat")).ok());
    let letter = |line: String| line.rsplit(')').next()?.trim().chars().next();
    lines.filter_map(letter).collect()
}

/// Whether a killable process waits for a disk that does not answer: one thread stays in that state
/// for a while. A thread that waits for a page of the binary soon leaves it.
pub fn hangs(pid: u32) -> bool {
    const LOOKS: usize = 20;
    let is_told = || {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it is ours");
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
        let caught = caught.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
        caught.is_some_and(|mask| mask >> (Signal::TERM.as_raw() - 1) & 1 != 0)
    };
    is_told()
        && (0..LOOKS).all(|_| {
            std::thread::sleep(Duration::from_millis(10));
            states(pid).contains(&'D')
        })
}

/// Kubelet's side: the directory that it watches.
pub struct Registry {
    dir: PathBuf,
    watch: DirWatch,
}

impl Registry {
    /// Makes and watches the directory, as kubelet does at its start.
    pub fn new(kubelet_dir: &Path) -> Self {
        let dir = kubelet_dir.join("plugins_registry");
        std::fs::create_dir_all(&dir).expect("mkdir");
        let watched = std::fs::File::open(&dir).expect("open");
        let watch = DirWatch::new(watched.as_fd()).expect("watch");
        Self { dir, watch }
    }

    /// The path of the driver's socket.
    pub fn socket(&self) -> PathBuf {
        self.dir.join(format!("{DRIVER_NAME}@reg.sock"))
    }

    /// The inode of the driver's socket, if it is there.
    pub fn inode(&self) -> Option<u64> {
        let metadata = std::fs::symlink_metadata(self.socket()).ok()?;
        assert!(metadata.file_type().is_socket());
        assert_eq!(metadata.permissions().mode() & 0o7777, 0o600);
        Some(metadata.ino())
    }

    /// Waits until the condition holds for the directory.
    pub async fn until(&self, what: &str, mut so: impl FnMut(&Self) -> bool) {
        let wait = async {
            while !so(self) {
                self.watch.changed().await.expect("it is watched");
            }
        };
        let waited = tokio::time::timeout(PATIENCE, wait).await;
        waited.unwrap_or_else(|_| panic!("not within {PATIENCE:?}: {what}"));
    }

    /// Connects to the driver's socket once it answers: between `bind` and `listen` it does not.
    pub async fn connect(&self) -> RegistrationClient<Channel> {
        self.until("a socket", |registry| registry.inode().is_some())
            .await;
        let path = self.socket();
        // Kubelet's gRPC library uses the path as the host name.
        let host = path.to_str().expect("text").replace('/', "%2F");
        let channel = Endpoint::from_shared(format!("http://{host}"))
            .expect("it passes for a host")
            .connect_with_connector(tower::service_fn(move |_: Uri| {
                let path = path.clone();
                async move {
                    loop {
                        match UnixStream::connect(&path).await {
                            Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => {
                                tokio::task::yield_now().await;
                            }
                            connected => return connected.map(TokioIo::new),
                        }
                    }
                }
            }))
            .await;
        RegistrationClient::new(channel.expect("the registration's socket answers"))
    }

    /// Calls GetInfo.
    pub async fn info(&self) -> registration::PluginInfo {
        let mut client = self.connect().await;
        let info = client.get_info(registration::InfoRequest {}).await;
        info.expect("an answer").into_inner()
    }

    /// Calls NotifyRegistrationStatus.
    pub async fn notify(&self, error: Option<&str>) {
        let mut client = self.connect().await;
        let status = registration::RegistrationStatus {
            plugin_registered: error.is_none(),
            error: error.unwrap_or_default().to_owned(),
        };
        let told = client.notify_registration_status(status).await;
        told.expect("an answer");
    }
}
