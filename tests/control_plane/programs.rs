//! The programs around the driver that act on claims: the sidecars of the controller plugin, the
//! snapshot controller and the controller manager. Each is started again when it ends, as kubelet
//! does.

use std::ffi::OsStr;
use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::Mutex;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use serde_json::Value;
use tokio::sync::watch;

use crate::plane::{ControlPlane, program};

const SOCKET: &str = "/run/csi/csi.sock";
const PAUSES: [&str; 2] = ["--retry-interval-start=100ms", "--retry-interval-max=2s"];

/// A program that runs until this is dropped.
pub(crate) struct Program {
    running: Arc<Mutex<Running>>,
    starts: watch::Receiver<()>,
    thread: Option<JoinHandle<()>>,
}

struct Running {
    child: Child,
    /// It is not started again.
    ends: bool,
}

impl Program {
    fn start(
        plane: &ControlPlane,
        name: &str,
        arguments: impl IntoIterator<Item = impl AsRef<OsStr>>,
    ) -> Self {
        let mut command = program(plane.directory.path(), name);
        command
            .args(arguments)
            .arg(format!("--kubeconfig={}", plane.kubeconfig.display()))
            // The sidecars prefer it to their flag.
            .env_remove("KUBECONFIG");
        let log = plane.directory.path().join(format!("{name}.log"));
        let (told, starts) = watch::channel(());
        let (send, first) = std::sync::mpsc::channel();
        // The kernel kills a process when the thread that started it ends: this one stays.
        let thread = std::thread::spawn(move || {
            let running = Arc::new(Mutex::new(Running {
                child: spawn(&mut command, &log),
                ends: false,
            }));
            send.send(running.clone()).expect("it is awaited");
            keep(&running, &mut command, &log, &told);
        });
        let running = first.recv().expect("it was started");
        Self {
            running,
            starts,
            thread: Some(thread),
        }
    }

    pub(crate) fn signal(&self, signal: Signal) {
        // The lock keeps its process id from being another's.
        let running = self.running.lock();
        kill_process(Pid::from_child(&running.child), signal).expect("kill");
    }

    /// Kills it, and waits until it was started again.
    pub(crate) async fn kill(&self) {
        let mut starts = self.starts.clone();
        starts.mark_unchanged();
        self.signal(Signal::KILL);
        starts.changed().await.expect("it is kept");
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let mut running = self.running.lock();
        running.ends = true;
        // It may have ended already.
        let _ = running.child.kill();
        drop(running);
        if let Some(thread) = self.thread.take() {
            // A panic there is in the log of this test.
            let _ = thread.join();
        }
    }
}

fn spawn(command: &mut Command, log: &PathBuf) -> Child {
    let log = File::options().create(true).append(true).open(log);
    let log = log.expect("a log");
    command.stdout(log.try_clone().expect("dup")).stderr(log);
    command.spawn().expect("setpriv of util-linux")
}

/// Starts the program again whenever it ends.
fn keep(running: &Mutex<Running>, command: &mut Command, log: &PathBuf, told: &watch::Sender<()>) {
    loop {
        let id = Pid::from_child(&running.lock().child);
        // It stays a child until its exit code is read, under the lock.
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        waitid(WaitId::Pid(id), options).expect("it is a child");
        let mut running = running.lock();
        running.child.wait().expect("it is a child");
        if running.ends {
            return;
        }
        running.child = spawn(command, log);
        told.send_replace(());
    }
}

/// A sidecar with the flags of deploy/, beside the controller of `socket`.
pub(crate) fn sidecar(plane: &ControlPlane, socket: &str, name: &str, more: &[&str]) -> Program {
    let text = include_str!("../../deploy/controller/deployment.yaml");
    let deployment: Value = serde_saphyr::from_str(text).expect("YAML");
    let containers = deployment["spec"]["template"]["spec"]["containers"].as_array();
    let mut containers = containers.expect("containers").iter();
    let container = containers.find(|container| container["name"] == name);
    let flags = container.expect("a sidecar")["args"].as_array();
    let flags = flags.expect("flags").iter();
    let flags = flags.map(|flag| flag.as_str().expect("text").replace(SOCKET, socket));
    // The last value of a flag counts. The pauses are short, as after few failures.
    let more = PAUSES.iter().chain(more).map(ToString::to_string);
    Program::start(plane, name, flags.chain(more))
}

/// The snapshot controller.
pub(crate) fn snapshot_controller(plane: &ControlPlane) -> Program {
    let rates = ["--kube-api-qps=50", "--kube-api-burst=100"];
    Program::start(plane, "snapshot-controller", rates.iter().chain(&PAUSES))
}

/// The controller manager, with the controllers that claims need.
pub(crate) fn controller_manager(plane: &ControlPlane) -> Program {
    let flags = [
        "--controllers=persistentvolume-binder-controller,\
         persistentvolume-protection-controller,persistentvolumeclaim-protection-controller",
        "--leader-elect=false",
        "--secure-port=0",
        "--kube-api-qps=100",
        "--kube-api-burst=200",
    ];
    Program::start(plane, "kube-controller-manager", flags)
}
