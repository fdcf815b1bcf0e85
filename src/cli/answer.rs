//! What the verbs share: why one fails and with which exit code, the lists that a driver answers,
//! and the writes to stdout.

use std::error::Error as _;
use std::io::{self, ErrorKind, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use tonic::Status;

use super::rows::Now;
use super::show::Thing;
use super::{archive_file, shared};
use crate::model::{PodUid, Tenant};
use crate::proto::admin::v1 as admin;
use crate::server::message_of;
use crate::sys::printable;
use crate::{
    admin as socket, config, controller, driver, engine, k8s, link, locality, node, telemetry,
};

/// Exit code: the verb failed.
pub(super) const FAILED: u8 = 1;
/// Exit code: the command line is wrong.
const USAGE: u8 = 2;
/// Exit code: there is no driver to ask.
const NO_DRIVER: u8 = 3;

/// How long `--watch` waits between two looks.
const LOOK_AGAIN: Timespec = Timespec {
    tv_sec: 1,
    tv_nsec: 0,
};

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
    #[error(
        "{} can be read, by this version of the driver or a newer one. A rebuild would only lose \
         what no record beside the layers has: `check --rebuild --dry-run` names that, and --force \
         replaces the index all the same",
        printable(.0.display())
    )]
    ReadableIndex(PathBuf),
    #[error("ended at once by a second signal")]
    Interrupted,
    #[error(transparent)]
    NoDriver(#[from] socket::ClientError),
    #[error(transparent)]
    NoUser(#[from] k8s::UserError),
    #[error("{0}, or run this in the controller's pod")]
    NoUserToClear(k8s::UserError),
    #[error(transparent)]
    Order(#[from] k8s::ask::AskError),
    #[error("{}", .0.message())]
    Refused(Box<Status>),
    #[error("the driver or controller ended before it answered, or it hangs; see its log")]
    NoAnswer,
    #[error(
        "pod {0} has no volumes here that are published or wait for an outcome; compare the uid \
         with `baggageclaim volumes -o wide`, and report again after its volumes are published"
    )]
    NoVolumes(PodUid),
    #[error("pod {pod} was already reported as {before}; the first report wins")]
    ToldOtherwise { pod: PodUid, before: &'static str },
    #[error("no volume or artifact here has the name or id {}", printable(.0))]
    NothingCalled(String),
    #[error("no node that has answered has content of the name {}", printable(.0))]
    NoGeneration(String),
    #[error("nothing was rolled back: {}", printable(.0))]
    NotRolledBack(String),
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
    Transfer(#[from] archive_file::Failure),
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
        // A status with a source was made on this side, from an error of the connection.
        if status.source().is_some() {
            return Self::NoAnswer;
        }
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
            | Self::Transfer(archive_file::Failure::Terminal { .. })
            | Self::Shared(shared::Failure::Url(_)) => USAGE,
            Self::NoDriver(_) | Self::NoAnswer => NO_DRIVER,
            _ => FAILED,
        })
    }
}

pub(super) type Done = Result<ExitCode, Failure>;
pub(super) type Listed<R> = Result<Vec<R>, Failure>;

/// Writes to stdout; nothing else in this process does.
pub(super) fn print(show: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    let mut stdout = io::BufWriter::new(io::stdout().lock());
    show(&mut stdout)?;
    stdout.flush()
}

/// Waits until `--watch` looks again. Fails with a broken pipe as soon as stdout has no reader: a
/// look without changes writes nothing, and so would never find out.
pub(super) fn wait_for_next_look() -> io::Result<()> {
    let stdout = io::stdout();
    // A lost reader is an error condition, which is reported without being requested.
    let mut ends = [PollFd::new(&stdout, PollFlags::empty())];
    match poll(&mut ends, Some(&LOOK_AGAIN)) {
        Ok(0) | Err(Errno::INTR) => Ok(()),
        Ok(_) => Err(ErrorKind::BrokenPipe.into()),
        Err(error) => Err(error.into()),
    }
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
