//! A node as seen from the host: kubectl, its daemons, its mount table and directories, the
//! driver's own verbs. It does not know the cases.

use std::fs;
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant, SystemTime};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::NamedTempFile;

/// How long something may take that takes seconds when all is well. The machine may be busy with
/// other things.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

/// Where deploy/ puts the pool, on the node.
pub(crate) const POOL: &str = "/var/lib/baggageclaim";

/// The cluster that `cluster.sh` has brought up, and one of its nodes: most verbs are about that.
#[derive(Clone)]
pub(crate) struct Cluster {
    home: PathBuf,
    number: usize,
}

impl Cluster {
    /// Finds it where `cluster.sh` keeps it.
    pub(crate) fn find() -> Result<Self, String> {
        let repository = Path::new(env!("CARGO_MANIFEST_DIR"));
        let home = std::env::var_os("E2E_HOME")
            .map_or_else(|| repository.join("target/e2e"), PathBuf::from);
        let cluster = Self { home, number: 1 };
        if cluster.home.join("node/kubeconfig").exists() {
            Ok(cluster)
        } else {
            Err("there is no node: `make e2e` brings one up for all cases, `make e2e-up` for playing".into())
        }
    }

    /// All nodes. The first has the control plane.
    pub(crate) fn nodes(&self) -> Vec<Self> {
        let mut nodes = vec![self.node(1)];
        loop {
            let next = self.node(nodes.len() + 1);
            if !next.directory().exists() {
                return nodes;
            }
            nodes.push(next);
        }
    }

    /// A node by its number, from 1.
    pub(crate) fn node(&self, number: usize) -> Self {
        let home = self.home.clone();
        Self { home, number }
    }

    /// The name of its Node object.
    pub(crate) fn name(&self) -> String {
        format!("node-{}", self.number)
    }

    /// The node's own directory in `cluster.sh`'s.
    fn directory(&self) -> PathBuf {
        match self.number {
            1 => self.home.join("node"),
            other => self.home.join(format!("node-{other}")),
        }
    }

    /// A text that was built for the cluster, beside its programs.
    pub(crate) fn built(&self, file: &str) -> String {
        let file = self.home.join("bin").join(file);
        fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
    }

    /// A command of what was built for the node, on the host.
    fn program(&self, name: &str) -> Command {
        let mut command = Command::new(self.home.join("bin").join(name));
        command
            .env("KUBECONFIG", self.home.join("node/kubeconfig"))
            .env("KUBECACHEDIR", self.home.join("node/kubectl"))
            .stdin(Stdio::null());
        command
    }

    /// kubectl with these arguments.
    pub(crate) fn kubectl(&self, arguments: &[&str]) -> Command {
        let mut command = self.program("kubectl");
        command.args(arguments);
        command
    }

    /// An object, or a list of objects.
    pub(crate) fn get(&self, arguments: &[&str]) -> Value {
        let output = succeed(
            self.kubectl(&["get", "--output=json"])
                .args(arguments)
                .stderr(Stdio::inherit()),
        );
        serde_json::from_str(&output).expect("kubectl prints JSON")
    }

    /// Follows objects from how they are now: every change is an event with `type` and `object`.
    pub(crate) fn watch(&self, arguments: &[&str]) -> Watch {
        let mut child = self
            .kubectl(&["get", "--watch", "--output-watch-events", "--output=json"])
            .args(arguments)
            .stdout(Stdio::piped())
            .spawn()
            .expect("kubectl starts");
        let stdout = child.stdout.take().expect("it is piped");
        let (sender, changes) = mpsc::channel();
        std::thread::spawn(move || {
            for event in serde_json::Deserializer::from_reader(stdout).into_iter::<Value>() {
                // A text that ends in the middle is that of a kubectl that was ended.
                let Ok(mut event) = event else { return };
                let change = Change {
                    seen: SystemTime::now(),
                    kind: event["type"].as_str().unwrap_or_default().to_owned(),
                    object: event["object"].take(),
                };
                if sender.send(change).is_err() {
                    return;
                }
            }
        });
        Watch { child, changes }
    }

    /// The first process of the node. A reboot makes another one.
    fn init(&self) -> u32 {
        fs::read_to_string(self.directory().join("init.pid"))
            .expect("the node is up")
            .trim()
            .parse()
            .expect("a pid")
    }

    /// One of the driver's own verbs. It is asked from the host, whose paths lead to the node's as
    /// well.
    pub(crate) fn driver(&self, arguments: &[&str]) -> Output {
        self.program("baggageclaim")
            .args(arguments)
            .arg("--pool")
            .arg(self.on_node(POOL))
            .output()
            .expect("it starts")
    }

    /// The same, for a list in JSON.
    pub(crate) fn driver_list(&self, arguments: &[&str]) -> Vec<Value> {
        let output = self.driver(&[arguments, &["--output=json"]].concat());
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| {
            panic!(
                "baggageclaim {arguments:?}: {error}: {}",
                String::from_utf8_lossy(&output.stderr)
            )
        })
    }

    /// The mounts of pods' volumes on the node, of any driver: lines of the mount table.
    pub(crate) fn volume_mounts(&self) -> Vec<String> {
        self.mount_table()
            .lines()
            // The second is where kubelet mounts a part of a volume for a container.
            .filter(|line| {
                line.contains("/kubernetes.io~csi/") || line.contains("/volume-subpaths/")
            })
            .map(str::to_owned)
            .collect()
    }

    /// Which overlay of deploy/ is installed.
    pub(crate) fn overlay(&self) -> String {
        let overlay = fs::read_to_string(self.home.join("node/overlay"));
        overlay.expect("cluster.sh wrote it").trim().to_owned()
    }

    /// The directory of the overlay that is installed on several nodes (`updown.sh`).
    pub(crate) fn installed_overlay(&self) -> PathBuf {
        self.home.join("node/overlay-of-several")
    }

    /// Kubelet's directory on the node: elsewhere where an overlay is for such a one (`lib.sh`).
    pub(crate) fn kubelet(&self) -> &'static str {
        match &*self.overlay() {
            "k0s" => "/var/lib/k0s/kubelet",
            _ => "/var/lib/kubelet",
        }
    }

    /// All that is mounted on the node.
    pub(crate) fn mount_table(&self) -> String {
        fs::read_to_string(format!("/proc/{}/mountinfo", self.init()))
            .expect("the node's mount table")
    }

    /// Runs a command of the documentation as it stands there: in the repository, or on the node.
    /// It has to succeed.
    pub(crate) fn shell(&self, command: &str, on_node: bool) -> String {
        let repository = Path::new(env!("CARGO_MANIFEST_DIR"));
        let shell = ["bash", "-o", "pipefail", "-euc", command];
        let mut command = if on_node {
            let mut enter = Command::new(repository.join("tests/e2e/cluster.sh"));
            enter.args(["on", &self.number.to_string(), "enter"]);
            enter.args(shell);
            enter
        } else {
            let mut here = Command::new(shell[0]);
            here.args(&shell[1..]);
            here
        };
        let path = std::env::var_os("PATH").unwrap_or_default();
        let path = std::iter::once(self.home.join("bin")).chain(std::env::split_paths(&path));
        succeed(
            command
                .current_dir(repository)
                .env("E2E_HOME", &self.home)
                .env("KUBECONFIG", self.home.join("node/kubeconfig"))
                .env("KUBECACHEDIR", self.home.join("node/kubectl"))
                .env("PATH", std::env::join_paths(path).expect("plain paths"))
                .stdin(Stdio::null()),
        )
    }

    /// The uids of the pods that have a directory on the node.
    pub(crate) fn pod_directories(&self) -> Vec<String> {
        names(&self.on_node(&format!("{}/pods", self.kubelet())))
    }

    /// The entries of a directory of the pool.
    pub(crate) fn in_pool(&self, directory: &str) -> Vec<String> {
        names(&self.on_node(POOL).join(directory))
    }

    /// A path of the node's as the host sees it.
    pub(crate) fn on_node(&self, path: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root{path}", self.init()))
    }

    /// Starts, stops (SIGTERM) or kills (SIGKILL) one of the node's daemons, or anything else that
    /// `cluster.sh` can.
    pub(crate) fn script(&self, arguments: &[&str]) {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/e2e/cluster.sh");
        succeed(
            Command::new(script)
                .args(["on", &self.number.to_string()])
                .args(arguments)
                .env("E2E_HOME", &self.home)
                .stderr(Stdio::inherit()),
        );
    }

    /// Kills one of the node's daemons. It is started again when what is returned is dropped, also
    /// by a case that fails: the next one needs it.
    pub(crate) fn without<'a>(&'a self, daemon: &'a str) -> Undo<'a> {
        self.for_now(&["daemon", "kill", daemon], vec!["daemon", "start", daemon])
    }

    /// Pulls the node's cable until what is returned is dropped.
    pub(crate) fn cut_off(&self) -> Undo<'_> {
        self.for_now(&["partition"], vec!["heal"])
    }

    /// Cuts the node's power until what is returned is dropped.
    pub(crate) fn off(&self) -> Undo<'_> {
        self.for_now(&["off"], vec!["start"])
    }

    /// Cuts the node's power and deletes its Node object. It is back when what is returned is
    /// dropped.
    pub(crate) fn removed(&self) -> Undo<'_> {
        self.for_now(&["remove"], vec!["start"])
    }

    fn for_now<'a>(&'a self, verb: &[&str], undo: Vec<&'a str>) -> Undo<'a> {
        self.script(verb);
        Undo {
            cluster: self,
            verb: undo,
        }
    }

    /// Gives kubelet a static pod, until what is returned is dropped.
    pub(crate) fn static_pod(&self, name: &str, manifest: &str) -> StaticPod {
        // Kubelet reads a file as soon as it is there, so it must be whole then.
        let etc = self.directory().join("etc");
        let (new, path) = (etc.join("new"), etc.join(format!("static/{name}.yaml")));
        fs::write(&new, manifest).expect("write");
        fs::rename(new, &path).expect("rename");
        StaticPod(path)
    }

    /// All that kubelet has logged.
    pub(crate) fn kubelet_log(&self) -> String {
        let log = fs::read(self.directory().join("log/kubelet.log")).expect("kubelet's log");
        String::from_utf8_lossy(&log).into_owned()
    }

    /// The pid of the driver's process as the host sees it. Its container is known by the cgroup
    /// that all of the node's are below, so another checkout's driver is not meant.
    pub(crate) fn driver_process(&self) -> u32 {
        let mut found = self.driver_processes();
        assert_eq!(found.len(), 1, "driver processes: {found:?}");
        found.remove(0)
    }

    /// All of them, and none when it is not installed.
    pub(crate) fn driver_processes(&self) -> Vec<u32> {
        let cgroup =
            fs::read_to_string(self.directory().join("cgroup")).expect("cluster.sh wrote it");
        fs::read_dir("/proc")
            .expect("/proc")
            .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
            .filter(|pid| {
                // The controller and the tier's collector are the same program.
                fs::read_link(format!("/proc/{pid}/exe"))
                    .is_ok_and(|exe| exe == Path::new("/baggageclaim"))
                    && fs::read_to_string(format!("/proc/{pid}/cmdline"))
                        .is_ok_and(|words| words.split('\0').nth(1) == Some("node"))
                    && fs::read_to_string(format!("/proc/{pid}/cgroup"))
                        .is_ok_and(|its| its.contains(cgroup.trim()))
            })
            .collect()
    }

    /// Kills the driver. kubelet starts another one.
    pub(crate) fn kill_driver(&self) {
        kill(self.driver_process());
    }

    /// Kills the driver at the moment when something is seen, and waits until there is another one.
    pub(crate) fn kill_driver_when(&self, what: &str, mut seen: impl FnMut(&Self) -> bool) {
        let driver = self.driver_process();
        as_soon_as(what, || seen(self).then_some(()));
        self.replace(driver);
    }

    /// Kills the driver, and waits until there is another one.
    pub(crate) fn replace_driver(&self) {
        self.replace(self.driver_process());
    }

    fn replace(&self, driver: u32) {
        kill(driver);
        eventually("there is another driver", || {
            let found = self.driver_processes();
            (found.len() == 1 && found[0] != driver).then_some(())
        });
    }

    /// The driver's log since then.
    pub(crate) fn driver_log(&self, since: SystemTime) -> String {
        self.log("--previous=false", since)
    }

    /// The log since then of the driver that was killed last.
    pub(crate) fn last_driver_log(&self, since: SystemTime) -> String {
        self.log("--previous", since)
    }

    /// Follows the log of the running driver from now on. After its end the API no longer has the
    /// log.
    pub(crate) fn follow_driver_log(&self) -> Followed {
        let log = NamedTempFile::new().expect("a temporary file");
        let child = self
            .kubectl(&[
                "logs",
                "--namespace=baggageclaim",
                "daemonset/baggageclaim-node",
                "--follow",
                "--since=1s",
            ])
            .stdout(log.reopen().expect("it is there"))
            .spawn()
            .expect("kubectl starts");
        Followed { child, log }
    }

    /// Whether the running driver has logged this, read on the node, for cases without an API
    /// server.
    pub(crate) fn has_logged(&self, what: &str) -> bool {
        // There may be directories of pods that were there before it, and kubelet removes those
        // when it likes.
        let ours = format!("_{}", self.driver_pod());
        let pods = self.on_node("/var/log/pods");
        let mut found = names_if_any(&pods).into_iter();
        let Some(pod) = found.find(|name| name.ends_with(&ours)) else {
            return false;
        };
        // A file for each container that there was, by number.
        let logs = pods.join(pod).join("driver");
        let number = |log: &String| log.trim_end_matches(".log").parse().unwrap_or(0u32);
        let newest = names_if_any(&logs).into_iter().max_by_key(number);
        newest.is_some_and(|log| {
            fs::read_to_string(logs.join(log)).is_ok_and(|text| text.contains(what))
        })
    }

    /// The uid of the driver's pod, as its process tells it.
    fn driver_pod(&self) -> String {
        let cgroup = format!("/proc/{}/cgroup", self.driver_process());
        let cgroup = fs::read_to_string(&cgroup).expect("it runs");
        // Below the node's own one: `…/kubepods/burstable/pod<uid>/<container>`.
        let mut uids = cgroup.lines().filter_map(|line| {
            let (_, below) = line.rsplit_once("/pod")?;
            Some(below.split_once('/')?.0.to_owned())
        });
        uids.next().unwrap_or_else(|| panic!("no pod: {cgroup}"))
    }

    fn log(&self, which: &str, since: SystemTime) -> String {
        succeed(&mut self.kubectl(&[
            "logs",
            "--namespace=baggageclaim",
            "daemonset/baggageclaim-node",
            which,
            &format!("--since-time={}", humantime::format_rfc3339(since)),
        ]))
    }

    /// Waits until the driver answers, whatever Kubernetes knows of it.
    pub(crate) fn driver_answers(&self) {
        eventually("the driver answers", || {
            self.driver(&["status"]).status.success().then_some(())
        });
    }

    /// Waits until the driver says that it is ready.
    pub(crate) fn driver_ready(&self) {
        succeed(&mut self.kubectl(&[
            "rollout",
            "status",
            "--namespace=baggageclaim",
            "daemonset/baggageclaim-node",
            "--timeout=120s",
        ]));
        self.driver_answers();
    }
}

/// A daemon, a cable or a node that is not there now. Dropping it brings it back.
pub(crate) struct Undo<'a> {
    cluster: &'a Cluster,
    verb: Vec<&'a str>,
}

impl Drop for Undo<'_> {
    fn drop(&mut self) {
        self.cluster.script(&self.verb);
    }
}

/// The manifest of a static pod. Dropping it ends the pod.
pub(crate) struct StaticPod(PathBuf);

impl Drop for StaticPod {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// A driver's log. Dropping it ends the reader.
pub(crate) struct Followed {
    child: Child,
    log: NamedTempFile,
}

impl Followed {
    /// As much of it as has arrived.
    pub(crate) fn so_far(&self) -> String {
        let log = fs::read(self.log.path()).expect("it is there");
        String::from_utf8_lossy(&log).into_owned()
    }
}

impl Drop for Followed {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A change of an object, and when it arrived here.
pub(crate) struct Change {
    pub(crate) seen: SystemTime,
    pub(crate) kind: String,
    pub(crate) object: Value,
}

/// A stream of changes. It is over when this is dropped.
pub(crate) struct Watch {
    child: Child,
    changes: Receiver<Change>,
}

impl Watch {
    /// The next change, if there is one before the deadline.
    pub(crate) fn next(&self, deadline: Instant) -> Option<Change> {
        let left = deadline.saturating_duration_since(Instant::now());
        match self.changes.recv_timeout(left) {
            Ok(change) => Some(change),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => panic!("kubectl has ended its watch"),
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs a command that has to succeed, and says what it printed.
pub(crate) fn succeed(command: &mut Command) -> String {
    let output = command.output().expect("it starts");
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).expect("text")
}

/// Runs a command with a text on its standard input.
pub(crate) fn feed(command: &mut Command, text: &str) -> Output {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    child
        .stdin
        .take()
        .expect("it is piped")
        .write_all(text.as_bytes())
        .expect("it reads");
    child.wait_with_output().expect("it ends")
}

/// Asks again and again, where nothing would tell: what the kernel or the driver has finished in
/// the background.
pub(crate) fn eventually<T>(what: &str, look: impl FnMut() -> Option<T>) -> T {
    ask(what, Duration::from_millis(50), look)
}

/// The same for what is over in an instant, and is asked of the kernel alone.
pub(crate) fn as_soon_as<T>(what: &str, look: impl FnMut() -> Option<T>) -> T {
    ask(what, Duration::from_millis(1), look)
}

fn ask<T>(what: &str, every: Duration, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "in vain: {what}");
        std::thread::sleep(every);
    }
}

fn kill(pid: u32) {
    let process = Pid::from_raw(pid.cast_signed()).expect("no pid is 0");
    kill_process(process, Signal::KILL).expect("it runs");
}

fn names(directory: &Path) -> Vec<String> {
    read_names(directory).unwrap_or_else(|error| panic!("{}: {error}", directory.display()))
}

/// The same for a directory that may be gone.
fn names_if_any(directory: &Path) -> Vec<String> {
    match read_names(directory) {
        Err(error) if error.kind() == ErrorKind::NotFound => Vec::new(),
        names => names.unwrap_or_else(|error| panic!("{}: {error}", directory.display())),
    }
}

fn read_names(directory: &Path) -> std::io::Result<Vec<String>> {
    let entries = fs::read_dir(directory)?;
    let mut names = entries
        .map(|entry| Ok(entry?.file_name().into_string().expect("a plain name")))
        .collect::<std::io::Result<Vec<String>>>()?;
    names.sort();
    Ok(names)
}
