//! The process under test: the test binary, started again with an engine; and the connection to it.
//!
//! It is a real process, because the kernel decides what a crash leaves behind: mounts, locks,
//! descriptors, page cache. Any number of callers send calls over a unix socket, one line of JSON
//! each. Nothing here knows the right answers.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use baggageclaim::archive::Codec;
use baggageclaim::backend::{BackendKind, MountApi};
use baggageclaim::engine::{
    ArtifactRow, Config, Engine, Error, Finding, ImportRequest, PublishRequest, ReceiveError,
    ReceiveLayer, ReceiveRequest, Source, VolumeRow, failpoint,
};
use baggageclaim::model::{
    ArtifactId, Coverage, Fence, Name, NamespacePolicy, Outcome, Pod, Policies, Rule, Sha256,
    Sharing, Tenant, Timestamp, VolumeSpec,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::common::{Lab, layers};

/// Makes this test binary the process under test: a [`Launch`] in JSON.
const LAUNCH: &str = "BAGGAGECLAIM_CRASH_TEST_LAUNCH";
/// The test that is the process under test.
const ENTRY: &str = "the_process_under_test";
/// Longer than anything here takes, on a machine that does much else.
const PATIENCE: Duration = Duration::from_secs(30);

/// How an engine is set up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Way {
    /// Its backend.
    pub(crate) backend: BackendKind,
    /// Its mount API, if that is to be forced.
    pub(crate) api: Option<MountApi>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Launch {
    pool: PathBuf,
    socket: PathBuf,
    way: Way,
    uses_unwritten: Option<Duration>,
    policies: bool,
    armed: Option<(String, usize)>,
    /// Rebuilds the index and ends.
    rebuilds: bool,
}

/// The requests to the process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Call {
    Publish {
        pod: String,
        volume: String,
        target: PathBuf,
        attributes: BTreeMap<String, String>,
        /// Whether it may be published at several targets.
        shared: bool,
    },
    Unpublish {
        volume: String,
        target: PathBuf,
    },
    Outcome {
        pod: String,
        succeeded: bool,
    },
    Destroy {
        reference: String,
    },
    /// In the whole cluster.
    Clear {
        reference: String,
    },
    Export {
        reference: String,
        file: PathBuf,
    },
    Import {
        reference: String,
        file: PathBuf,
    },
    /// These layers, newest first, come from another node.
    Receive {
        reference: String,
        layers: Vec<PathBuf>,
    },
    /// It is in the shared tier now.
    Share {
        reference: String,
    },
    /// A cache policy selects the name, and lets all pods commit it.
    Select {
        reference: String,
    },
    Settle,
    Reap,
    Check,
    Artifacts,
    Volumes,
    /// Die at this point, at this visit from now on.
    Arm {
        point: String,
        visit: usize,
    },
    Shutdown,
}

/// The process is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Died;

/// An answer: what the engine said, or why it did not.
pub(crate) type Answer = Result<Value, String>;

/// How many places this process has made.
static PLACES: AtomicU32 = AtomicU32::new(0);

/// A pool to run processes on, and a place for targets.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) lab: Lab,
    pub(crate) way: Way,
    /// How long the index may not know of a use, if not as long as usual.
    pub(crate) uses_unwritten: Option<Duration>,
    /// Whether it is a node of a cluster that has cache policies.
    pub(crate) policies: bool,
    pub(crate) pool: PathBuf,
    pub(crate) targets: PathBuf,
    logs: PathBuf,
    run: PathBuf,
    next: AtomicU32,
    /// Which of the places of this process it is.
    number: u32,
}

impl Place {
    pub(crate) fn new(lab: Lab, way: Way) -> Self {
        let targets = lab.kubelet_dir().join("pods");
        let run = lab.run_dir();
        let logs = run.join("log");
        let pool = lab.path().join("pool");
        Self {
            lab,
            way,
            uses_unwritten: None,
            policies: false,
            pool,
            targets,
            logs,
            run,
            next: AtomicU32::new(0),
            number: PLACES.fetch_add(1, Ordering::Relaxed),
        }
    }

    /// A name for messages.
    pub(crate) fn name(&self) -> String {
        format!("{} on {}", self.way.backend, self.lab.fs().name())
    }

    /// The id of a volume that the tests call `volume`. The driver finds a mount of a volume by its
    /// id, and the mounts of all tests that run at the same time are in one mount table.
    pub(crate) fn id(&self, volume: &str) -> String {
        format!("{volume}-{}", self.number)
    }

    pub(crate) fn target(&self, volume: &str) -> PathBuf {
        self.targets.join(volume)
    }

    /// Starts a process, which may have been told where to die.
    pub(crate) fn start(&self, armed: Option<(&str, usize)>) -> Driver {
        self.launch(armed, false)
    }

    /// Starts a process that rebuilds the index.
    pub(crate) fn rebuild(&self, armed: Option<(&str, usize)>) -> Driver {
        self.launch(armed, true)
    }

    fn launch(&self, armed: Option<(&str, usize)>, rebuilds: bool) -> Driver {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let socket = self.run.join(format!("{number}.sock"));
        let launch = Launch {
            pool: self.pool.clone(),
            socket: socket.clone(),
            way: self.way,
            uses_unwritten: self.uses_unwritten,
            policies: self.policies,
            armed: armed.map(|(point, visit)| (point.to_owned(), visit)),
            rebuilds,
        };
        let log = std::fs::File::options()
            .create(true)
            .append(true)
            .open(&self.logs);
        let log = log.expect("a file for what the process says");
        writeln!(&log, "=== process {number}, armed {:?}", launch.armed).expect("write");
        let program = std::env::current_exe().expect("the path of this test binary");
        let child = Command::new(program)
            .args([ENTRY, "--exact", "--nocapture"])
            .env(
                LAUNCH,
                serde_json::to_string(&launch).expect("plain data serialises"),
            )
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn();
        Driver {
            child: child.expect("the test binary starts"),
            socket,
        }
    }

    /// How many lines with all these parts the processes have said.
    pub(crate) fn lines_with(&self, parts: &[&str]) -> usize {
        let log = std::fs::read_to_string(&self.logs).expect("text");
        let has_all = |line: &&str| parts.iter().all(|part| line.contains(part));
        log.lines().filter(has_all).count()
    }

    /// The end of what the processes said, for the message of a test that fails.
    pub(crate) fn tail(&self) -> String {
        let bytes = std::fs::read(&self.logs).unwrap_or_default();
        let from = bytes.len().saturating_sub(12_000);
        String::from_utf8_lossy(&bytes[from..]).into_owned()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}: what the processes said:\n{}", self.name(), self.tail());
        }
    }
}

/// A process. Killed when it is dropped.
#[derive(Debug)]
pub(crate) struct Driver {
    child: Child,
    socket: PathBuf,
}

impl Driver {
    /// A connection, once the engine is open.
    pub(crate) fn connect(&mut self) -> Result<Connection, Died> {
        let started = Instant::now();
        loop {
            if let Ok(stream) = UnixStream::connect(&self.socket) {
                return Ok(Connection(BufReader::new(stream)));
            }
            if let Some(status) = self.child.try_wait().expect("wait") {
                assert!(
                    killed(status),
                    "the process ended instead of serving: {status}"
                );
                return Err(Died);
            }
            assert!(
                started.elapsed() < PATIENCE,
                "the engine takes too long to open"
            );
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Kills it as by `kill -9`, and waits until the kernel has put it away.
    pub(crate) fn kill(mut self) {
        self.child.kill().expect("kill");
        assert!(killed(self.child.wait().expect("wait")));
    }

    /// Waits until it has died by its own hand; `false` when it lives on.
    pub(crate) fn dies_within(&mut self, patience: Duration) -> bool {
        let started = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().expect("wait") {
                assert!(
                    killed(status),
                    "the process did not die of SIGKILL: {status}"
                );
                return true;
            }
            if started.elapsed() > patience {
                return false;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Ends it in order.
    pub(crate) fn shut_down(mut self) {
        let mut connection = self.connect().expect("it lives");
        // It may be gone before its answer is out.
        let _answer = connection.call(&Call::Shutdown);
        self.ends();
    }

    /// Waits for its end in order.
    pub(crate) fn ends(mut self) {
        let status = self.child.wait().expect("wait");
        assert!(status.success(), "the end in order: {status}");
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            let _gone = self.child.kill();
        }
        let _reaped = self.child.wait();
    }
}

fn killed(status: ExitStatus) -> bool {
    status.signal() == Some(rustix::process::Signal::KILL.as_raw())
}

/// One caller's line to the process.
#[derive(Debug)]
pub(crate) struct Connection(BufReader<UnixStream>);

impl Connection {
    /// Asks, and waits for the answer.
    pub(crate) fn call(&mut self, call: &Call) -> Result<Answer, Died> {
        let mut line = serde_json::to_vec(call).expect("plain data serialises");
        line.push(b'\n');
        self.0.get_mut().write_all(&line).map_err(|_| Died)?;
        let mut answer = String::new();
        match self.0.read_line(&mut answer) {
            // Half a line is no answer.
            Ok(_) if answer.ends_with('\n') => {
                Ok(serde_json::from_str(&answer).expect("an answer"))
            }
            _ => Err(Died),
        }
    }

    /// The same, of a process that lives and a call that succeeds.
    #[track_caller]
    pub(crate) fn must(&mut self, call: &Call) -> Value {
        self.call(call)
            .expect("the process lives")
            .unwrap_or_else(|error| panic!("{call:?}: {error}"))
    }
}

/// The life of the process under test; returns at once in every other process.
pub(crate) fn serve_if_told_to() {
    let Some(launch) = std::env::var_os(LAUNCH) else {
        return;
    };
    // The test that started this may be killed itself; no one else would end it.
    let parent_dies = rustix::process::Signal::KILL;
    rustix::process::set_parent_process_death_signal(Some(parent_dies)).expect("prctl");
    baggageclaim::standalone::prepare_process();
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .init();
    let launch = launch.into_string().expect("JSON");
    let launch: Launch = serde_json::from_str(&launch).expect("a launch");
    if let Some((point, visit)) = &launch.armed {
        assert!(failpoint::arm(point, *visit), "no point is called {point}");
    }
    if launch.rebuilds {
        Engine::rebuild_index(&launch.pool).expect("the index is made again");
        return;
    }
    let mut config = Config::new(&launch.pool);
    config.backend = Some(launch.way.backend);
    config.mount_api = launch.way.api;
    config.input_wait = Duration::from_secs(10);
    config.reap_interval = Duration::from_secs(3600);
    config.clock_settles = Duration::ZERO;
    // Each pool is on a small filesystem in memory, whatever else fills it.
    config.high_watermark = 99;
    config.reserve = 1 << 20;
    config.policies = launch.policies;
    config.uses_unwritten = launch.uses_unwritten.unwrap_or(config.uses_unwritten);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime");
    runtime.block_on(serve(config, &launch.socket));
}

async fn serve(config: Config, socket: &Path) {
    let engine = Engine::open(config).await.expect("the engine opens");
    let listener = tokio::net::UnixListener::bind(socket).expect("a socket");
    let (stop, mut stopped) = tokio::sync::mpsc::channel::<()>(1);
    loop {
        let stream = tokio::select! {
            accepted = listener.accept() => accepted.expect("a caller").0,
            _ = stopped.recv() => break,
        };
        tokio::spawn(serve_caller(engine.clone(), stream, stop.clone()));
    }
    engine.shutdown().await;
}

async fn serve_caller(
    engine: Engine,
    stream: tokio::net::UnixStream,
    stop: tokio::sync::mpsc::Sender<()>,
) {
    let mut pending = Vec::new();
    loop {
        let line = loop {
            if let Some(end) = pending.iter().position(|byte| *byte == b'\n') {
                break pending.drain(..=end).collect::<Vec<u8>>();
            }
            stream.readable().await.expect("readable");
            let mut buffer = [0; 4096];
            match stream.try_read(&mut buffer) {
                Ok(0) => return,
                Ok(count) => pending.extend_from_slice(&buffer[..count]),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(_) => return,
            }
        };
        let call: Call = serde_json::from_slice(&line).expect("a call");
        let last = call == Call::Shutdown;
        let answer = run(&engine, call).await;
        let mut answer = serde_json::to_vec(&answer).expect("plain data serialises");
        answer.push(b'\n');
        let mut sent = 0;
        while sent < answer.len() {
            stream.writable().await.expect("writable");
            match stream.try_write(&answer[sent..]) {
                Ok(count) => sent += count,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(_) => return,
            }
        }
        if last {
            stop.send(()).await.expect("the process listens");
            return;
        }
    }
}

#[expect(clippy::too_many_lines, reason = "one entry for each case")]
async fn run(engine: &Engine, call: Call) -> Answer {
    let said = |error: baggageclaim::engine::Error| format!("{error} ({error:?})");
    let done = Ok(Value::Null);
    let tenant: Tenant = "ci".parse().expect("a tenant");
    match call {
        Call::Publish {
            pod,
            volume,
            target,
            attributes,
            shared,
        } => {
            let request = PublishRequest {
                volume: volume.parse().expect("an id"),
                target,
                tenant,
                pod: Pod {
                    uid: pod.parse().expect("a uid"),
                    name: pod,
                    service_account: None,
                },
                spec: VolumeSpec::parse(&attributes).expect("attributes"),
                read_only: false,
                multiple_targets: shared,
                base: None,
                cleared: 0,
                share: true,
                fetched: None,
                waited: Duration::ZERO,
            };
            let published = engine.publish(request).await.map_err(said)?;
            Ok(published.already.into())
        }
        Call::Unpublish { volume, target } => {
            let done_now = engine.unpublish(&volume, &target).await;
            done_now.map_err(said).and(done)
        }
        Call::Outcome { pod, succeeded } => {
            let outcome = if succeeded {
                Outcome::Succeeded
            } else {
                Outcome::Failed
            };
            let pod = pod.parse().expect("a uid");
            let told = engine.report_outcome(&pod, outcome).await.map_err(said)?;
            Ok(json!({ "news": told.news }))
        }
        Call::Destroy { reference } => {
            let reference = reference.parse().expect("a reference");
            let destroyed = engine.destroy(&tenant, &reference).await;
            destroyed.map_err(said).and(done)
        }
        Call::Export { reference, file } => {
            // It may have been promised by a process that died since.
            engine.settled().await;
            let rows = engine.artifacts(Some(&tenant));
            let named = |row: &&ArtifactRow| {
                row.name
                    .as_ref()
                    .is_some_and(|name| name.to_string() == reference)
            };
            let id = rows.iter().find(named).expect("it is there").id;
            let export = engine.export(Source::Artifact(id)).await.map_err(said)?;
            let file = std::fs::File::create(file).expect("a file");
            let packed = engine.pack(export, Codec::Zstd(1), file, Arc::default());
            packed.await.map_err(said).map(|_| Value::Null)
        }
        Call::Import { reference, file } => {
            let request = ImportRequest {
                tenant,
                reference: reference.parse().expect("a reference"),
                digest: None,
                size: None,
                ttl: None,
                base: None,
            };
            let file = std::fs::File::open(file).expect("the archive");
            let imported = engine.import(request, file, Arc::default(), || true).await;
            Ok(imported.map_err(said)?.named.into())
        }
        Call::Receive { reference, layers } => {
            let name = Name {
                tenant,
                reference: reference.parse().expect("a reference"),
            };
            let engine = engine.clone();
            let received = layers::apart(move || receive(&engine, name, &layers));
            received.await.map_err(said)?;
            done
        }
        Call::Clear { reference } => {
            let reference = reference.parse().expect("a reference");
            let fence = Fence {
                number: 7,
                previous: 0,
                id: 7,
                covers: Coverage::Name(Name { tenant, reference }),
                repeats: Vec::new(),
            };
            let goes_on = engine.apply_fences(vec![fence]).await.map_err(said)?;
            assert!(goes_on);
            done
        }
        Call::Share { reference } => {
            let reference = reference.parse().expect("a reference");
            engine.settled().await;
            let local = engine.local(&tenant, &reference).expect("it is there");
            let engine = engine.clone();
            let set = layers::apart(move || {
                engine.set_sharing(local.id, |sharing| sharing.number = Some(1))
            });
            assert!(set.await.map_err(said)?);
            done
        }
        Call::Select { reference } => {
            let rule = Rule {
                names: vec![reference.parse().expect("a pattern")],
                commit: None,
                read: BTreeSet::new(),
            };
            let policy = NamespacePolicy {
                rules: vec![rule],
                ..NamespacePolicy::default()
            };
            let known = Policies::known([(tenant, policy)]);
            engine.change_policies(|it| *it = known).await;
            done
        }
        Call::Settle => {
            engine.settled().await;
            done
        }
        Call::Reap => engine.reap().await.map_err(said).map(drop).and(done),
        Call::Check => {
            let findings = engine.check().await.map_err(said)?;
            let text = |finding: &Finding| Value::from(format!("{finding:?}"));
            Ok(findings.iter().map(text).collect())
        }
        Call::Artifacts => Ok(engine.artifacts(None).iter().map(artifact).collect()),
        Call::Volumes => Ok(engine.volumes(None).iter().map(volume).collect()),
        Call::Arm { point, visit } => {
            assert!(failpoint::arm(&point, visit), "no point is called {point}");
            done
        }
        Call::Shutdown => done,
    }
}

/// The id of the artifact is made of its name, so that a repeated call asks for the same.
fn receive(engine: &Engine, name: Name, layers: &[PathBuf]) -> Result<(), Error> {
    let holders: Vec<_> = layers.iter().map(|layer| layers::holder(layer)).collect();
    let wanted = holders.iter().map(|(table, _)| ReceiveLayer {
        digest: Sha256(table.digest().sha256),
        bytes: table.bytes(),
    });
    let text = name.to_string();
    let fold = |id: u128, byte: u8| id.wrapping_mul(257).wrapping_add(byte.into());
    let request = ReceiveRequest {
        artifact: ArtifactId::from_bits(text.bytes().fold(0, fold)),
        name,
        created: Timestamp(1),
        made_by: None,
        ttl: None,
        sharing: Sharing {
            number: Some(1),
            ..Sharing::default()
        },
        fence: 0,
        layers: wanted.collect(),
    };
    let received = engine.receive(
        &request,
        &AtomicU64::new(0),
        |layer, place| {
            let (table, holder) = &holders[layer];
            layers::make(table, holder, place)
        },
        || Ok(()),
    );
    match received {
        Ok(received) => assert!(received.named),
        Err(ReceiveError::Engine(error)) => return Err(error),
        Err(error) => panic!("{error}"),
    }
    Ok(())
}

fn artifact(row: &ArtifactRow) -> Value {
    json!({ "name": row.name, "inUseBy": row.in_use_by, "lastUsed": row.last_used })
}

fn volume(row: &VolumeRow) -> Value {
    json!({ "id": row.id, "state": format!("{:?}", row.state) })
}
