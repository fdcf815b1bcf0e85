//! The driver under measurement: a real process, called through its real sockets, ended in `Drop`.
//! The measurements are in `cases`.

use std::cell::RefCell;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use baggageclaim::admin;
use baggageclaim::csi::DRIVER_NAME;
use baggageclaim::kubelet_double::{Kubelet, Pod, PublishOptions};
use baggageclaim::proto::admin::v1 as api;
use baggageclaim::proto::csi::v1 as csi;
use prost::Message;
use rustix::process::{Pid, Signal, kill_process};

use crate::common::Lab;
use crate::wire::Wire;

/// The program under measurement.
pub const DRIVER: &str = env!("CARGO_BIN_EXE_baggageclaim");

/// The kernel tells programs times in hundredths of a second.
const MILLIS_PER_TICK: f64 = 10.0;

/// A driver with its pool on a lab's filesystem.
pub struct Driver {
    child: Child,
    /// Makes the pods.
    pub kubelet: Kubelet,
    socket: PathBuf,
    log: PathBuf,
    caller: RefCell<Caller>,
    /// Its admin verbs.
    pub admin: admin::Client,
    /// Its pool.
    pub pool: PathBuf,
    /// From exec to the first Probe that reports ready.
    pub started: Duration,
}

impl Driver {
    /// Starts one on the pool of this name, and creates the pool if it is new.
    pub async fn start(lab: &Lab, pool: &str) -> Self {
        Self::with(lab, pool, &[], &[]).await
    }

    /// The same with further arguments and environment variables.
    pub async fn with(
        lab: &Lab,
        pool: &str,
        arguments: &[&str],
        variables: &[(&str, &str)],
    ) -> Self {
        Self::by(Command::new(DRIVER), lab, pool, arguments, variables).await
    }

    /// The same by a command that runs the driver with what is added to it.
    pub async fn by(
        mut command: Command,
        lab: &Lab,
        pool: &str,
        arguments: &[&str],
        variables: &[(&str, &str)],
    ) -> Self {
        let socket = lab.run_dir().join(format!("{pool}.sock"));
        command
            .arg("standalone")
            .arg("--socket")
            .arg(&socket)
            .args(["--node-id", "bench"])
            .args(arguments)
            .envs(variables.iter().copied());
        Self::run(lab, pool, command, socket, lab.kubelet_dir()).await
    }

    /// Starts one as on a node of a cluster, on the pool of this name, which is the node's, too.
    pub async fn node(lab: &Lab, name: &str, kubeconfig: &Path, arguments: &[&str]) -> Self {
        let kubelet = lab.run_dir().join(name);
        let plugin = kubelet.join("plugins").join(DRIVER_NAME);
        for dir in [&plugin, &kubelet.join("plugins_registry")] {
            fs::create_dir_all(dir).expect("mkdir");
        }
        let mut command = Command::new(DRIVER);
        command
            .args(["node", "--http", "off", "--node-id", name, "--kubeconfig"])
            .arg(kubeconfig)
            .arg("--kubelet-dir")
            .arg(&kubelet)
            .args(arguments);
        Self::run(lab, name, command, plugin.join("csi.sock"), kubelet).await
    }

    async fn run(
        lab: &Lab,
        pool: &str,
        mut command: Command,
        socket: PathBuf,
        kubelet: PathBuf,
    ) -> Self {
        let log_path = lab.run_dir().join(format!("{pool}.log"));
        let log = File::create(&log_path).expect("a log");
        let pool = lab.path().join(pool);
        let began = Instant::now();
        let child = command
            .arg("--pool")
            .arg(&pool)
            // Watermarks that a small image does not reach by accident.
            .args(["--end-with-parent", "--high-watermark", "99"])
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a log"))
            .stderr(log)
            .spawn()
            .expect("the driver starts");
        let patience = Duration::from_secs(60);
        let kubelet = Kubelet::connect_when_ready(&socket, kubelet, patience)
            .await
            .unwrap_or_else(|error| {
                let log = fs::read_to_string(&log_path).unwrap_or_default();
                panic!("{error}\n{log}")
            });
        let started = began.elapsed();
        let admin = admin::connect(&pool).await.expect("the admin socket");
        Self {
            child,
            kubelet,
            caller: RefCell::new(Caller::new(&socket)),
            socket,
            log: log_path,
            admin,
            pool,
            started,
        }
    }

    /// The path of its log.
    pub fn log(&self) -> PathBuf {
        self.log.clone()
    }

    /// Lets `VmHWM`, the highest resident memory, begin at the memory of this moment (proc(5)).
    pub fn forget_peak(&self) {
        let path = format!("/proc/{}/clear_refs", self.child.id());
        fs::write(path, "5").expect("clear_refs");
    }

    /// A field of `/proc/PID/status`, in KiB.
    pub fn status_kib(&self, field: &str) -> f64 {
        let path = format!("/proc/{}/status", self.child.id());
        let status = fs::read_to_string(path).expect("it runs");
        let line = status.lines().find_map(|line| line.strip_prefix(field));
        let number = line.and_then(|rest| rest.trim_start_matches(':').split_whitespace().next());
        number
            .and_then(|number| number.parse().ok())
            .expect("a number")
    }

    /// How long processors have worked for its process, in milliseconds (proc(5)).
    pub fn worked(&self) -> f64 {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.child.id()));
        let stat = stat.expect("it runs");
        let (_, fields) = stat.rsplit_once(')').expect("a name in parentheses");
        let times = fields.split_whitespace().skip(11).take(2);
        let ticks: f64 = times
            .map(|ticks| ticks.parse::<f64>().expect("a number"))
            .sum();
        ticks * MILLIS_PER_TICK
    }

    /// A new pod.
    pub fn pod(&self) -> Pod {
        self.kubelet.pod("bench", "step")
    }

    /// Another caller.
    pub fn caller(&self) -> Caller {
        Caller::new(&self.socket)
    }

    /// Makes a pod's directories and publishes its volume.
    pub fn publish(&self, pod: &Pod, attributes: &[(&str, &str)]) -> (PathBuf, Duration) {
        prepare(pod);
        let took = self.caller.borrow_mut().publish(pod, attributes);
        (pod.target("v"), took)
    }

    /// Unpublishes it and removes the pod.
    pub fn unpublish(&self, pod: &Pod) -> Duration {
        let took = self.caller.borrow_mut().unpublish(pod);
        remove(pod);
        took
    }

    /// See [`Wire::call`].
    pub fn call<Answer: Message + Default>(
        &self,
        method: &str,
        request: &impl Message,
    ) -> (Answer, Duration) {
        self.caller.borrow_mut().wire.call(method, request)
    }

    /// Reports a pod's outcome; `wait`: until the seal is done.
    pub async fn outcome(&mut self, pod: &Pod, outcome: api::Outcome, wait: bool) {
        let request = api::ReportOutcomeRequest {
            pod_uid: pod.uid().to_owned(),
            outcome: outcome.into(),
            wait,
        };
        self.admin.report_outcome(request).await.expect("outcome");
    }

    /// Fills a volume with these attributes and seals it; the duration of the unpublish.
    pub async fn seal(
        &mut self,
        attributes: &[(&str, &str)],
        fill: impl FnOnce(&Path),
    ) -> Duration {
        let pod = self.pod();
        self.seal_as(&pod, attributes, fill).await
    }

    /// The same for a volume of this pod.
    pub async fn seal_as(
        &mut self,
        pod: &Pod,
        attributes: &[(&str, &str)],
        fill: impl FnOnce(&Path),
    ) -> Duration {
        let (target, _) = self.publish(pod, attributes);
        fill(&target);
        self.outcome(pod, api::Outcome::Succeeded, false).await;
        let took = self.unpublish(pod);
        self.settled(pod).await;
        took
    }

    /// Waits until nothing is being sealed.
    pub async fn settled(&mut self, pod: &Pod) {
        self.outcome(pod, api::Outcome::Succeeded, true).await;
    }

    /// Collects garbage now, so that its work is in no figure.
    pub async fn reap(&mut self) {
        self.admin.reap(api::ReapRequest {}).await.expect("reap");
    }

    /// The content of a one-layer artifact, as the lower directory of a hand-made mount.
    pub async fn lower(&mut self, reference: &str) -> PathBuf {
        let request = api::ListArtifactsRequest { tenant: None };
        let rows = self.admin.list_artifacts(request).await.expect("a list");
        let rows = rows.into_inner().artifacts;
        let id = rows.into_iter().find(|row| row.reference == reference);
        let id = id.expect("it was sealed").id;
        for entry in fs::read_dir(self.pool.join("layers"))
            .expect("layers")
            .flatten()
        {
            let record = fs::read_to_string(entry.path().join("layer.json")).unwrap_or_default();
            if record.contains(&id) {
                return entry.path().join("fs");
            }
        }
        panic!("{reference} has no layer of its own")
    }

    /// Sends SIGTERM, as an orchestrator does.
    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        if let (Some(pid), Ok(None)) = (pid, self.child.try_wait()) {
            let _ = kill_process(pid, Signal::TERM);
        }
        let _ = self.child.wait();
    }
}

/// Sends kubelet's calls on its own connection, and times them. A wrong answer ends the bench.
#[derive(Debug)]
pub struct Caller {
    wire: Wire,
}

impl Caller {
    fn new(socket: &Path) -> Self {
        Self {
            wire: Wire::connect(socket),
        }
    }

    /// Publishes the volume of a pod with existing directories.
    pub fn publish(&mut self, pod: &Pod, attributes: &[(&str, &str)]) -> Duration {
        let attributes = attributes.iter().copied();
        let request = pod.publish_request("v", attributes, PublishOptions::default());
        let method = "/csi.v1.Node/NodePublishVolume";
        let (csi::NodePublishVolumeResponse {}, took) = self.wire.call(method, &request);
        took
    }

    /// Unpublishes it.
    pub fn unpublish(&mut self, pod: &Pod) -> Duration {
        let method = "/csi.v1.Node/NodeUnpublishVolume";
        let request = pod.unpublish_request("v");
        let (csi::NodeUnpublishVolumeResponse {}, took) = self.wire.call(method, &request);
        took
    }
}

/// Makes kubelet's directories for a pod with one volume, `v`.
pub fn prepare(pod: &Pod) {
    pod.prepare("v").expect("the pod's directories");
}

/// Removes them.
pub fn remove(pod: &Pod) {
    pod.clean("v").expect("nothing is mounted any more");
    pod.remove().expect("the pod's directories are empty");
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.end();
    }
}
