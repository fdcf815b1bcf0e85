//! One function per verb: ask the driver, show the answer, return the exit code.
//! Everything that can go wrong is a [`Failure`], which has the exit code.

use std::io::{self, ErrorKind, Write};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::CommandFactory as _;
use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::Status;

use super::rows::{Cache, Now, Row};
use super::show::{self, Thing};
use super::status as status_answer;
use super::{
    Caches, Check, Cli, Destroy, Inspect, List, Outcome, OutcomeWord, Plain, RunDemo, Verb,
    cluster, generations, shared, transfer,
};
use crate::config::{self, Output};
use crate::engine::{self, Engine};
use crate::model::{PodUid, Tenant};
use crate::proto::admin::v1 as admin;
use crate::server::message_of;
use crate::sys::printable;
use crate::{
    admin as socket, api, controller, driver, link, locality, node, standalone, telemetry,
};

/// Exit code: the verb failed.
const FAILED: u8 = 1;
/// Exit code: the command line is wrong.
const USAGE: u8 = 2;
/// Exit code: there is no driver to ask.
const NO_DRIVER: u8 = 3;

/// The most threads of the async runtime. Few: system calls run on the engine's own threads.
const WORKERS: usize = 4;

/// How often `--watch` asks for the list.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
/// How many matches a message names.
const MOST_NAMED: usize = 5;

/// Why a verb did not do what it should.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    #[error(transparent)]
    Usage(#[from] config::Error),
    #[error(transparent)]
    Log(#[from] telemetry::Error),
    #[error("cannot start: {0}")]
    Runtime(io::Error),
    #[error(transparent)]
    Driver(#[from] driver::Error),
    #[error(transparent)]
    Node(#[from] node::Error),
    #[error(transparent)]
    Controller(#[from] controller::Error),
    #[error("{}", message_of(.0))]
    Engine(#[from] engine::Error),
    #[error("a driver runs on this pool; stop it before you rebuild the index")]
    Running,
    #[error("ended at once by a second signal")]
    Interrupted,
    #[error(transparent)]
    NoDriver(#[from] socket::ClientError),
    #[error("{}", .0.message())]
    Refused(Box<Status>),
    #[error(
        "pod {0} has no volumes here that are published or wait for an outcome; compare the uid \
         with `baggageclaim volumes -o wide`, and report again after its volumes are published"
    )]
    NoVolumes(PodUid),
    #[error("pod {pod} was already reported as {before}; the first report wins")]
    ToldOtherwise { pod: PodUid, before: &'static str },
    #[error("no volume or artifact here has the name or id {}", printable(.0))]
    NothingCalled(String),
    #[error(
        "{count} volumes and artifacts here match {}: {some}; choose one with -n or a longer id",
        printable(what)
    )]
    ManyCalled {
        what: String,
        count: usize,
        some: String,
    },
    #[error(
        "{} of namespace {} would be refused: volumes are forks of it ({})",
        printable(&.0.reference), .0.tenant, .0.in_use_by
    )]
    WouldBeRefused(Box<admin::Artifact>),
    #[error("{0}")]
    Demo(Box<dyn std::error::Error>),
    #[error(transparent)]
    Transfer(#[from] transfer::Failure),
    #[error(transparent)]
    Shared(#[from] shared::Failure),
    #[error(transparent)]
    PeerKey(#[from] link::KeyError),
    #[error("the objects for locality: {0}")]
    Locality(#[from] locality::IdentityError),
    #[error("cannot write: {0}")]
    Output(#[from] io::Error),
}

impl From<Status> for Failure {
    fn from(status: Status) -> Self {
        Self::Refused(Box::new(status))
    }
}

impl Failure {
    /// Whether the reader of the output is gone.
    pub(super) fn is_broken_pipe(&self) -> bool {
        matches!(self, Self::Output(error) if error.kind() == ErrorKind::BrokenPipe)
    }

    pub(super) fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            Self::Usage(_)
            | Self::Log(telemetry::Error::Filter { .. })
            | Self::Transfer(transfer::Failure::Terminal { .. })
            | Self::Shared(shared::Failure::Url(_)) => USAGE,
            Self::NoDriver(_) => NO_DRIVER,
            _ => FAILED,
        })
    }
}

pub(super) type Done = Result<ExitCode, Failure>;
pub(super) type Listed<R> = Result<Vec<R>, Failure>;

pub(super) fn run(verb: Verb, demo: RunDemo) -> Done {
    match verb {
        Verb::Standalone(flags) => standalone(*flags),
        Verb::Node(flags) => self::node(*flags),
        Verb::Controller(flags) => self::controller(*flags),
        Verb::Crds => crds(),
        Verb::Locality(flags) => self::locality(flags.namespace.as_str()),
        Verb::Demo(flags) => self::demo(flags, demo),
        Verb::Volumes(flags) => asking(list(flags, "volumes", volumes)),
        Verb::Artifacts(flags) => asking(list(flags, "artifacts", artifacts)),
        Verb::Caches(flags) => asking(self::caches(flags)),
        Verb::Explain(what) => asking(cluster::explain(what)),
        Verb::Clear(what) => asking(cluster::clear(what)),
        Verb::Inspect(what) => asking(inspect(what)),
        Verb::Outcome(said) => asking(outcome(said)),
        Verb::Destroy(what) => asking(destroy(what)),
        Verb::Log(what) => asking(generations::log(what)),
        Verb::Rollback(what) => asking(generations::rollback(what)),
        Verb::Export(flags) => asking(transfer::export(flags)),
        Verb::Import(flags) => asking(transfer::import(flags)),
        Verb::Reap(plain) => asking(reap(plain)),
        Verb::Check(check) => asking(self::check(check)),
        Verb::Status(plain) => asking(status(plain)),
        Verb::PeerKey(flags) => peer_key(&flags),
        Verb::Shared(flags) => shared::run(&flags),
        Verb::Completion(flags) => completion(flags.shell),
    }
}

fn standalone(flags: config::Standalone) -> Done {
    let process = flags.driver.process.clone();
    let config = flags.resolve()?;
    serve(&process, async |shutdown| {
        standalone::run(config, shutdown)
            .await
            .map_err(Failure::from)
    })
}

fn node(flags: config::Node) -> Done {
    let process = flags.driver.process.clone();
    let config = flags.resolve()?;
    serve(&process, async |shutdown| {
        node::run(config, shutdown).await.map_err(Failure::from)
    })
}

fn controller(flags: config::Controller) -> Done {
    let process = flags.process.clone();
    let config = flags.resolve()?;
    serve(&process, async |shutdown| {
        controller::run(config, shutdown)
            .await
            .map_err(Failure::from)
    })
}

/// Prints the definitions of the objects.
fn crds() -> Done {
    print(|to| to.write_all(api::definitions_text().as_bytes()))?;
    Ok(ExitCode::SUCCESS)
}

/// Prints what turns locality on.
fn locality(namespace: &str) -> Done {
    let objects = locality::objects(namespace)?;
    print(|to| writeln!(to, "{objects:#}"))?;
    Ok(ExitCode::SUCCESS)
}

/// Runs a role of the driver with its log, its runtime, and the signals that end it.
fn serve<Role>(
    process: &config::Process,
    role: impl FnOnce(WaitForCancellationFutureOwned) -> Role,
) -> Done
where
    Role: Future<Output = Result<(), Failure>>,
{
    if process.end_with_parent {
        let signal = Some(rustix::process::Signal::TERM);
        rustix::process::set_parent_process_death_signal(signal).map_err(io::Error::from)?;
    }
    telemetry::init(process.log.log_format, &process.log.log)?;
    driver::prepare_process();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let runtime = Builder::new_multi_thread()
        .worker_threads(cores.min(WORKERS))
        .enable_all()
        .build()
        .map_err(Failure::Runtime)?;
    let ended = runtime.block_on(async {
        let mut terminate = signal(SignalKind::terminate()).map_err(Failure::Runtime)?;
        let mut interrupt = signal(SignalKind::interrupt()).map_err(Failure::Runtime)?;
        let mut next = async || {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
        };
        let stop = CancellationToken::new();
        let driver = role(stop.clone().cancelled_owned());
        tokio::pin!(driver);
        tokio::select! {
            ended = &mut driver => return ended,
            () = next() => {}
        }
        stop.cancel();
        tokio::select! {
            ended = &mut driver => ended,
            () = next() => Err(Failure::Interrupted),
        }
    });
    // Late tasks were named in the log; the process does not wait for them any longer.
    runtime.shutdown_background();
    ended.map(|()| ExitCode::SUCCESS)
}

fn demo(flags: config::Demo, run: RunDemo) -> Done {
    run(flags).map_err(Failure::Demo)?;
    Ok(ExitCode::SUCCESS)
}

/// Runs a verb that asks the driver.
fn asking(verb: impl Future<Output = Done>) -> Done {
    let runtime: Runtime = Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(Failure::Runtime)?;
    runtime.block_on(verb)
}

/// Writes to stdout; nothing else in this process does.
pub(super) fn print(show: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    let mut stdout = io::BufWriter::new(io::stdout().lock());
    show(&mut stdout)?;
    stdout.flush()
}

/// Prints on stderr that a list is empty, so that stdout stays empty for programs.
pub(super) fn say_none(what: &str, tenant: Option<&Tenant>) {
    let place = tenant.map_or(String::new(), |tenant| format!(" in namespace {tenant}"));
    let _ = writeln!(io::stderr(), "No {what}{place}.");
}

pub(super) fn now() -> Now {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    let millis = since.map_or(0, |since| since.as_millis());
    Now(i64::try_from(millis).unwrap_or(i64::MAX))
}

/// The volumes of one namespace or of all.
pub(super) async fn volumes(
    client: &mut socket::Client,
    tenant: Option<&Tenant>,
) -> Listed<admin::Volume> {
    let tenant = tenant.map(ToString::to_string);
    let answer = client.list_volumes(admin::ListVolumesRequest { tenant });
    Ok(answer.await?.into_inner().volumes)
}

pub(super) async fn artifacts(
    client: &mut socket::Client,
    tenant: Option<&Tenant>,
) -> Listed<admin::Artifact> {
    let tenant = tenant.map(ToString::to_string);
    let answer = client.list_artifacts(admin::ListArtifactsRequest { tenant });
    Ok(answer.await?.into_inner().artifacts)
}

async fn caches(flags: Caches) -> Done {
    let Caches {
        list,
        cluster,
        controller,
    } = flags;
    if cluster {
        return cluster::caches(&list.namespace, list.output, &controller).await;
    }
    self::list(list, "caches", async |client, tenant| {
        Ok(Cache::among(artifacts(client, tenant).await?))
    })
    .await
}

/// Shows the list that `ask` returns, and with `--watch` its changes.
async fn list<R: Row>(
    list: List,
    what: &str,
    ask: impl AsyncFn(&mut socket::Client, Option<&Tenant>) -> Listed<R>,
) -> Done {
    let mut client = socket::connect(&list.pool.pool).await?;
    let tenant = list.namespace.tenant.as_ref();
    if list.watch {
        let mut watch = show::Watch::new(list.output);
        loop {
            let rows = ask(&mut client, tenant).await?;
            print(|mut to| watch.look(&mut to, rows, now()))?;
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }
    let rows = ask(&mut client, tenant).await?;
    let for_people = matches!(list.output, Output::Table | Output::Wide);
    if rows.is_empty() && for_people {
        say_none(what, tenant);
    } else {
        print(|mut to| show::list(&mut to, &rows, list.output, now()))?;
    }
    Ok(ExitCode::SUCCESS)
}

async fn inspect(what: Inspect) -> Done {
    let mut client = socket::connect(&what.pool.pool).await?;
    let tenant = what.namespace.tenant.as_ref();
    let volumes = volumes(&mut client, tenant).await?;
    let artifacts = artifacts(&mut client, tenant).await?;
    let all = volumes.iter().map(Thing::Volume);
    let all = all.chain(artifacts.iter().map(Thing::Artifact));
    let found: Vec<Thing<'_>> = all.filter(|thing| thing.is_called(&what.what)).collect();
    let thing = only(&found, &what.what)?;
    print(|mut to| show::one(&mut to, thing, what.output))?;
    Ok(ExitCode::SUCCESS)
}

/// The one thing that was found under a name.
pub(super) fn only<'a>(found: &[Thing<'a>], what: &str) -> Result<Thing<'a>, Failure> {
    match *found {
        [] => Err(Failure::NothingCalled(what.to_owned())),
        [thing] => Ok(thing),
        _ => {
            let places = found.iter().take(MOST_NAMED).map(Thing::place);
            let places = places.map(|(tenant, id)| format!("{id} of namespace {tenant}"));
            let mut some = places.collect::<Vec<_>>().join(", ");
            if found.len() > MOST_NAMED {
                some.push_str(", …");
            }
            Err(Failure::ManyCalled {
                what: what.to_owned(),
                count: found.len(),
                some,
            })
        }
    }
}

/// Prints a shell's completions.
fn peer_key(flags: &config::PeerKey) -> Done {
    let key = link::Key::open(&flags.peer_key)?;
    print(|to| writeln!(to, "{}", key.name()))?;
    Ok(ExitCode::SUCCESS)
}

fn completion(shell: clap_complete::Shell) -> Done {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "baggageclaim", &mut script);
    print(|to| to.write_all(&script))?;
    Ok(ExitCode::SUCCESS)
}

async fn outcome(said: Outcome) -> Done {
    let mut client = socket::connect(&said.pool.pool).await?;
    let outcome = match said.ended {
        OutcomeWord::Succeeded => admin::Outcome::Succeeded,
        OutcomeWord::Failed => admin::Outcome::Failed,
    };
    let answer = client.report_outcome(admin::ReportOutcomeRequest {
        pod_uid: said.pod_uid.to_string(),
        outcome: outcome.into(),
        wait: said.wait,
    });
    let told = answer.await?.into_inner();
    match (told.volumes, told.told_the_same, told.told_otherwise) {
        (0, 0, 0) => return Err(Failure::NoVolumes(said.pod_uid)),
        (0, 0, _) => {}
        (0, _, _) => print(|to| writeln!(to, "Already reported."))?,
        (1, _, _) => print(|to| writeln!(to, "Reported for 1 volume."))?,
        (news, _, _) => print(|to| writeln!(to, "Reported for {news} volumes."))?,
    }
    if told.told_otherwise > 0 {
        let before = match said.ended {
            OutcomeWord::Succeeded => "failed",
            OutcomeWord::Failed => "succeeded",
        };
        return Err(Failure::ToldOtherwise {
            pod: said.pod_uid,
            before,
        });
    }
    Ok(ExitCode::SUCCESS)
}

async fn destroy(what: Destroy) -> Done {
    let mut client = socket::connect(&what.pool.pool).await?;
    let tenant = what.namespace.required();
    if what.dry_run {
        // Decided here: an older driver would ignore the flag and delete.
        let all = artifacts(&mut client, Some(&tenant)).await?;
        let name = what.reference.to_string();
        let row = all.into_iter().find(|row| row.reference == name);
        let row = row.ok_or(Failure::NothingCalled(name))?;
        if row.in_use_by > 0 && what.reference.cache().is_none() {
            return Err(Failure::WouldBeRefused(Box::new(row)));
        }
        print(|mut to| show::destroyed(&mut to, &row))?;
        return Ok(ExitCode::SUCCESS);
    }
    let answer = client.destroy(admin::DestroyRequest {
        tenant: tenant.to_string(),
        reference: what.reference.to_string(),
    });
    answer.await?;
    let name = printable(&what.reference);
    print(|to| writeln!(to, "{name} of namespace {tenant} is deleted."))?;
    Ok(ExitCode::SUCCESS)
}

async fn reap(plain: Plain) -> Done {
    let mut client = socket::connect(&plain.pool.pool).await?;
    let reaped = client.reap(admin::ReapRequest {}).await?.into_inner();
    print(|mut to| show::reaped(&mut to, &reaped, plain.output))?;
    Ok(ExitCode::SUCCESS)
}

async fn check(check: Check) -> Done {
    let pool = &check.pool.pool;
    if check.rebuild {
        return rebuild(pool).await;
    }
    let findings = match socket::connect(pool).await {
        Ok(mut client) => {
            let answer = client.check(admin::CheckRequest {}).await?;
            answer.into_inner().findings
        }
        // The pool's lock keeps a driver from starting during the check.
        Err(socket::ClientError::NotRunning { .. }) => {
            let findings = Engine::check_offline(pool)?;
            findings.iter().map(admin::Finding::from).collect()
        }
        Err(error) => return Err(error.into()),
    };
    print(|mut to| show::findings(&mut to, &findings, check.output))?;
    Ok(if findings.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(FAILED)
    })
}

async fn rebuild(pool: &Path) -> Done {
    match socket::connect(pool).await {
        Ok(_) => return Err(Failure::Running),
        Err(socket::ClientError::NotRunning { .. }) => {}
        Err(error) => return Err(error.into()),
    }
    let rebuilt = Engine::rebuild_index(pool)?;
    print(|mut to| show::rebuilt(&mut to, &rebuilt))?;
    Ok(ExitCode::SUCCESS)
}

async fn status(plain: Plain) -> Done {
    let mut client = socket::connect(&plain.pool.pool).await?;
    let status = client.status(admin::StatusRequest {}).await?.into_inner();
    print(|mut to| status_answer::show(&mut to, &status, plain.output))?;
    Ok(ExitCode::SUCCESS)
}
