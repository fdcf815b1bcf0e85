//! The driver under trial: the real program on a pool of a lab, its sockets, and its end by any
//! means. The trials decide about calls and expected answers.

use std::error::Error as _;
use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use baggageclaim::admin;
use baggageclaim::kubelet_double::Kubelet;
use baggageclaim::proto::admin::v1 as api;
use rustix::process::{Pid, Signal, kill_process};
use tonic::{Code, Status};

use crate::common::{Fs, Lab};
use crate::figures::{Fault, Figures, Stop, count};

/// Longer than anything here takes, on a machine that does much else and is stopped for a minute
/// now and then.
pub(crate) const PATIENCE: Duration = Duration::from_secs(150);

/// A pool's filesystem, and how the driver is told to use it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ground {
    pub(crate) backend: &'static str,
    pub(crate) fs: Fs,
    pub(crate) api: &'static str,
    pub(crate) mib: u64,
}

impl Ground {
    pub(crate) const fn new(backend: &'static str, fs: Fs, mib: u64) -> Self {
        Self {
            backend,
            fs,
            api: "auto",
            mib,
        }
    }

    pub(crate) fn name(self) -> String {
        format!("{} on {}", self.backend, self.fs.name())
    }
}

/// Where drivers live, one after the other: a filesystem for the pool and a kubelet's root.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) lab: Lab,
    pub(crate) ground: Ground,
    pub(crate) pool: PathBuf,
    pub(crate) figures: Arc<Figures>,
    /// The name of the node.
    pub(crate) node: &'static str,
    arguments: Vec<String>,
}

impl Place {
    pub(crate) fn new(
        ground: Ground,
        arguments: &[&str],
        figures: &Arc<Figures>,
    ) -> Result<Self, Fault> {
        let lab = Lab::try_sized(ground.fs, ground.mib << 20).map_err(Fault::wrong)?;
        lab.kubelet_dir();
        Ok(Self {
            pool: lab.path().join("pool"),
            lab,
            ground,
            figures: figures.clone(),
            node: "torture",
            arguments: arguments.iter().map(|&one| one.to_owned()).collect(),
        })
    }

    fn log(&self) -> PathBuf {
        self.lab.run_dir().join("log")
    }

    /// All that the drivers here have said.
    pub(crate) fn said(&self) -> String {
        let bytes = fs::read(self.log()).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Whether a driver has said that it is wrong itself.
    pub(crate) fn admits_no_defect(&self) -> Result<(), Fault> {
        let text = self.said();
        match text.lines().find(|line| line.contains("panicked at")) {
            Some(line) => Err(Fault::wrong(format!("the driver says: {line}"))),
            None => Ok(()),
        }
    }

    /// Notes between the driver's lines what is done to it.
    pub(crate) fn note(&self, line: &str) {
        let log = File::options().create(true).append(true).open(self.log());
        let _noted = log.and_then(|mut log| writeln!(log, "=== {line}"));
    }

    /// Saves the log and the notes where a person can read them.
    pub(crate) fn keep_log(&self, path: &Path) {
        let _kept = fs::copy(self.log(), path);
    }

    /// Starts a driver, which may have been told where to die.
    pub(crate) fn start(&self, crash_at: Option<&str>) -> Driver {
        let log = File::options()
            .create(true)
            .append(true)
            .open(self.log())
            .expect("a log");
        let socket = self.lab.run_dir().join("csi.sock");
        let mut command = Command::new(env!("CARGO_BIN_EXE_baggageclaim"));
        command
            .arg("standalone")
            .arg("--pool")
            .arg(&self.pool)
            .arg("--socket")
            .arg(&socket)
            .args(["--backend", self.ground.backend])
            .args(["--mount-api", self.ground.api])
            .args(["--node-id", self.node, "--end-with-parent"])
            .args(&self.arguments)
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a log"))
            .stderr(log);
        if let Some(point) = crash_at {
            command.env("BAGGAGECLAIM_CRASH_AT", point);
        }
        Driver {
            child: command.spawn().expect("the driver starts"),
            socket,
            root: self.lab.kubelet_dir(),
            pool: self.pool.clone(),
            figures: self.figures.clone(),
        }
    }

    /// `baggageclaim check` of a pool that no driver has open.
    pub(crate) fn check_offline(&self) -> Result<(), Fault> {
        let output = Command::new(env!("CARGO_BIN_EXE_baggageclaim"))
            .args(["check", "--pool"])
            .arg(&self.pool)
            .output()
            .expect("the program runs");
        if output.status.success() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let complained = String::from_utf8_lossy(&output.stderr).into_owned();
        Err(Fault::leaked(format!(
            "baggageclaim check: {said}{complained}"
        )))
    }
}

/// A running driver; killed when it is dropped.
#[derive(Debug)]
pub(crate) struct Driver {
    child: Child,
    socket: PathBuf,
    root: PathBuf,
    pool: PathBuf,
    figures: Arc<Figures>,
}

impl Driver {
    /// A line to it, once it serves.
    pub(crate) async fn connect(&mut self) -> Result<Wire, Stop> {
        let began = Instant::now();
        loop {
            let soon = Duration::from_millis(30);
            let tried = Kubelet::connect_when_ready(&self.socket, &self.root, soon).await;
            if let Ok(kubelet) = tried
                && let Ok(admin) = admin::connect(&self.pool).await
            {
                return Ok(Wire {
                    kubelet,
                    admin,
                    figures: self.figures.clone(),
                });
            }
            if let Some(status) = self.ended() {
                return Err(self.took_its_leave(status));
            }
            if began.elapsed() > PATIENCE {
                return Err(Fault::wrong("the driver does not get ready").into());
            }
        }
    }

    fn took_its_leave(&self, status: ExitStatus) -> Stop {
        if status.signal() == Some(Signal::KILL.as_raw()) {
            return Stop::Died;
        }
        let pool = self.pool.display();
        Fault::wrong(format!("the driver of {pool} ended by itself: {status}")).into()
    }

    fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("it is our child")
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// SIGKILL, and the kernel has put it away when this returns.
    pub(crate) fn kill(&mut self) {
        // It may just have died by its own hand.
        let _killed = self.child.kill();
        self.child.wait().expect("it is our child");
    }

    /// Waits until it has died by its own hand; `false` when it lives on.
    pub(crate) fn dies_within(&mut self, patience: Duration) -> bool {
        let began = Instant::now();
        while self.ended().is_none() {
            if began.elapsed() > patience {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        true
    }

    /// Ends it as an orchestrator does.
    pub(crate) fn stop(mut self) -> Result<(), Fault> {
        self.terminate()
    }

    /// The same of one that others still ask.
    pub(crate) fn terminate(&mut self) -> Result<(), Fault> {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        kill_process(pid.expect("a child has an id"), Signal::TERM).expect("it is ours");
        if !self.dies_within(PATIENCE) {
            return Err(Fault::wrong("the driver does not end at SIGTERM"));
        }
        let status = self.child.wait().expect("it is our child");
        if status.success() {
            Ok(())
        } else {
            Err(Fault::wrong(format!(
                "the driver's end in order was {status}"
            )))
        }
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            let _killed = self.child.kill();
        }
        let _reaped = self.child.wait();
    }
}

/// A line to a driver: what kubelet asks, and what an administrator does.
#[derive(Debug, Clone)]
pub(crate) struct Wire {
    pub(crate) kubelet: Kubelet,
    pub(crate) admin: admin::Client,
    pub(crate) figures: Arc<Figures>,
}

/// Whether this is what a caller sees when the driver is gone, and not what a driver says.
pub(crate) fn is_death(status: &Status) -> bool {
    let broken = ["transport error", "Missing response message", "h2 protocol"];
    status.source().is_some() || broken.iter().any(|part| status.message().contains(part))
}

/// An answer that nothing excuses.
pub(crate) fn unexpected(operation: &str, status: &Status) -> Stop {
    if is_death(status) {
        return Stop::Died;
    }
    let (code, message) = (status.code(), status.message());
    Fault::wrong(format!("{operation}: {code:?}: {message}")).into()
}

impl Wire {
    /// Counts an answer; one that is no success must have one of these codes.
    pub(crate) fn answered<T>(
        &self,
        operation: &str,
        answer: Result<T, Status>,
        excused: &[Code],
    ) -> Result<Result<T, Code>, Stop> {
        match answer {
            Ok(value) => {
                count(&self.figures.operations);
                Ok(Ok(value))
            }
            Err(status) if !is_death(&status) && excused.contains(&status.code()) => {
                count(&self.figures.operations);
                Ok(Err(status.code()))
            }
            Err(status) => Err(unexpected(operation, &status)),
        }
    }

    /// The same for what must succeed.
    pub(crate) fn must<T>(&self, operation: &str, answer: Result<T, Status>) -> Result<T, Stop> {
        let answer = self.answered(operation, answer, &[])?;
        Ok(answer.unwrap_or_else(|_| unreachable!("no code is excused")))
    }

    pub(crate) async fn outcome(&self, pod: &str, succeeded: bool) -> Result<(), Stop> {
        let outcome = if succeeded {
            api::Outcome::Succeeded
        } else {
            api::Outcome::Failed
        };
        let request = api::ReportOutcomeRequest {
            pod_uid: pod.to_owned(),
            outcome: outcome.into(),
            wait: false,
        };
        let answer = self.admin.clone().report_outcome(request).await;
        self.must("ReportOutcome", answer).map(drop)
    }

    pub(crate) async fn volumes(&self) -> Result<Vec<api::Volume>, Stop> {
        let request = api::ListVolumesRequest { tenant: None };
        let answer = self.admin.clone().list_volumes(request).await;
        Ok(self.must("ListVolumes", answer)?.into_inner().volumes)
    }

    pub(crate) async fn artifacts(&self) -> Result<Vec<api::Artifact>, Stop> {
        let request = api::ListArtifactsRequest { tenant: None };
        let answer = self.admin.clone().list_artifacts(request).await;
        Ok(self.must("ListArtifacts", answer)?.into_inner().artifacts)
    }

    pub(crate) async fn reap(&self) -> Result<(), Stop> {
        let answer = self.admin.clone().reap(api::ReapRequest {}).await;
        self.must("Reap", answer).map(drop)
    }

    /// Waits until all promises are sealed durably, or gone. A program that starts beside it holds
    /// volumes open until its exec, which delays some.
    pub(crate) async fn settle(&self) -> Result<(), Stop> {
        let began = Instant::now();
        loop {
            let request = api::ReportOutcomeRequest {
                pod_uid: "nobody".to_owned(),
                outcome: api::Outcome::Failed.into(),
                wait: true,
            };
            let mut admin = self.admin.clone();
            // It answers when all is settled, however long that takes.
            let answer = tokio::time::timeout(PATIENCE, admin.report_outcome(request)).await;
            let Ok(answer) = answer else {
                return Err(self.never_settles().await);
            };
            self.must("ReportOutcome", answer)?;
            let moving = |row: &api::Volume| matches!(&*row.state, "sealing" | "in-use");
            if !self.volumes().await?.iter().any(moving) {
                return Ok(());
            }
            if began.elapsed() > PATIENCE {
                return Err(self.never_settles().await);
            }
            tokio::time::sleep(Duration::from_millis(3)).await;
        }
    }

    /// Operations that still run when none should.
    async fn never_settles(&self) -> Stop {
        match self.volumes().await {
            Ok(volumes) => {
                Fault::wrong(format!("what was promised is never sealed: {volumes:?}")).into()
            }
            Err(stop) => stop,
        }
    }

    /// No finding.
    pub(crate) async fn check(&self) -> Result<(), Stop> {
        self.check_but(&[]).await
    }

    /// No finding except that one of these volumes is not mounted where it is recorded: the caller
    /// that began or ended that has no answer yet, and will repeat the call.
    pub(crate) async fn check_but(&self, open: &[String]) -> Result<(), Stop> {
        let began = Instant::now();
        loop {
            let findings = self.findings(open).await?;
            if findings.is_empty() {
                return Ok(());
            }
            // A thread that the machine stops between two steps leaves a finding that goes again.
            if began.elapsed() > Duration::from_secs(10) {
                return Err(Fault::leaked(format!("check: {}", findings.join("; "))).into());
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    async fn findings(&self, open: &[String]) -> Result<Vec<String>, Stop> {
        let answer = self.admin.clone().check(api::CheckRequest {}).await;
        let mut findings = self.must("Check", answer)?.into_inner().findings;
        findings.retain(|one| {
            let path = String::from_utf8_lossy(&one.path);
            one.kind != "unmounted-volume" || !open.iter().any(|id| path.contains(id))
        });
        let say = |one: &api::Finding| {
            let path = one.path.escape_ascii();
            format!("{} {path}: {}", one.kind, one.detail)
        };
        Ok(findings.iter().map(say).collect())
    }
}

/// The names in a directory, as text for messages.
pub(crate) fn entries(path: &Path) -> Vec<String> {
    let Ok(found) = fs::read_dir(path) else {
        return Vec::new();
    };
    let name = |entry: std::io::Result<fs::DirEntry>| {
        let name = entry.expect("an entry").file_name();
        name.into_encoded_bytes().escape_ascii().to_string()
    };
    found.map(name).collect()
}

/// That nothing at all is left: no volume, no artifact, no directory, no mount. The driver works on
/// in the background, also for pods that are gone: a leak is what stays.
pub(crate) async fn nothing_left(place: &Place, wire: &Wire) -> Result<(), Stop> {
    let began = Instant::now();
    loop {
        wire.settle().await?;
        wire.reap().await?;
        let rest = rest(place, wire).await?;
        if rest.is_empty() {
            return wire.check().await;
        }
        if began.elapsed() > PATIENCE {
            return Err(Fault::leaked(format!("it never goes: {}", rest.join("; "))).into());
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Everything that there is.
async fn rest(place: &Place, wire: &Wire) -> Result<Vec<String>, Stop> {
    let volumes = wire.volumes().await?;
    let volumes = volumes.iter().map(|one| format!("volume {one:?}"));
    let artifacts = wire.artifacts().await?;
    let artifacts = artifacts.iter().map(|one| format!("artifact {one:?}"));
    let mut rest: Vec<String> = volumes.chain(artifacts).collect();
    for directory in ["volumes", "pending", "incoming", "layers", "trash"] {
        let found = entries(&place.pool.join(directory));
        rest.extend(found.iter().map(|name| format!("{directory}/{name}")));
    }
    for mount in place.lab.leftovers() {
        rest.push(format!("mount {}", mount.display()));
    }
    let pods = entries(&place.lab.kubelet_dir().join("pods"));
    rest.extend(pods.iter().map(|name| format!("directory of pod {name}")));
    Ok(rest)
}
