//! `export` and `import`: archives between the driver and files or pipes.
//!
//! Files are read and written by a thread of their own, with a bounded channel to the driver's
//! stream: a slow reader of the output slows the driver down, and ^C works during a long read or
//! write. `archive_file` has the files.

use std::fs::File;
use std::io::{self, ErrorKind, Read as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use clap::{Args, ValueEnum};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;

use super::answer::{self, Done};
use super::archive_file::{Failure, Output, Sink, WAITING, Writer, input};
use super::human::{bytes, counted, took};
use super::namespace::Namespace;
use super::progress::{Bar, Done as Far};
use super::show::Thing;
use crate::model::{Reference, Sha256};
use crate::proto::admin::v1 as admin;
use crate::sys::printable;
use crate::{admin as socket, config};

/// How many bytes are read from a file at a time.
const CHUNK: usize = 128 << 10;
/// What a header takes in an archive, about.
const HEADER: u64 = 1024;

/// How an archive is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Format {
    /// Not at all
    Tar,
    /// By gzip
    #[value(name = "tar.gz")]
    TarGz,
    /// By zstd
    #[value(name = "tar.zst")]
    TarZst,
}

impl Format {
    /// What the end of a file's name says.
    fn of(path: &Path) -> Self {
        let name = path.as_os_str().as_encoded_bytes().to_ascii_lowercase();
        let ends = |ends: &[&str]| ends.iter().any(|end| name.ends_with(end.as_bytes()));
        if ends(&[".tar.gz", ".tgz"]) {
            Self::TarGz
        } else if ends(&[".tar.zst", ".tzst"]) {
            Self::TarZst
        } else {
            Self::Tar
        }
    }
}

impl From<Format> for admin::Format {
    fn from(format: Format) -> Self {
        match format {
            Format::Tar => Self::Tar,
            Format::TarGz => Self::TarGz,
            Format::TarZst => Self::TarZst,
        }
    }
}

#[derive(Debug, Args)]
pub(super) struct Export {
    /// artifact/NAME, resource-cache/KEY, task-cache/KEY, volume/ID, or an id as `inspect` takes
    /// it; the beginning of an id will do
    #[arg(value_name = "REFERENCE", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub(super) what: String,
    #[command(flatten)]
    pub(super) namespace: Namespace,
    /// Where the archive goes; `-` is stdout, unless that is a terminal
    #[arg(short, long, value_name = "FILE|-", default_value = "-")]
    pub(super) output: PathBuf,
    /// How it is compressed. Without this flag the end of FILE's name decides, and else it is not
    #[arg(long, value_name = "FORMAT")]
    pub(super) format: Option<Format>,
    /// Replace FILE if it is there
    #[arg(long)]
    pub(super) force: bool,
    #[command(flatten)]
    pub(super) pool: config::Pool,
}

#[derive(Debug, Args)]
#[command(mut_arg("tenant", |arg| arg.required(true).help("The namespace it will belong to")))]
pub(super) struct Import {
    /// The archive; `-` is stdin
    #[arg(value_name = "FILE|-")]
    pub(super) file: PathBuf,
    /// The name of the result: artifact/NAME, task-cache/KEY or resource-cache/KEY
    #[arg(long = "as", value_name = "REFERENCE")]
    pub(super) reference: Reference,
    #[command(flatten)]
    pub(super) namespace: Namespace,
    /// Import it only if it has this digest: the archive as it is, or the tar stream in it
    #[arg(long, value_name = "sha256:DIGITS")]
    pub(super) digest: Option<Sha256>,
    /// Delete it after this time: an artifact after the import, a cache after its last use. Without
    /// this flag it stays until the pool needs the space
    #[arg(long, value_name = "DURATION", value_parser = config::parse_duration)]
    pub(super) ttl: Option<Duration>,
    #[command(flatten)]
    pub(super) pool: config::Pool,
}

/// Writes something as an archive.
pub(super) async fn export(flags: Export) -> Done {
    let format = flags.format.unwrap_or_else(|| Format::of(&flags.output));
    let mut client = socket::connect(&flags.pool.pool).await?;
    let (source, what) = find(&mut client, &flags).await?;
    let pipe = Output::pipe(&flags.output)?;
    // Signals are handled from here on: from here on there is a file to remove. A pipe that waits
    // for its reader is opened before, so that a signal ends that.
    let interrupted = interrupted()?;
    let output = match pipe {
        Some(pipe) => pipe,
        None => Output::temporary(&flags.output, flags.force)?,
    };
    let is_stdout = matches!(output.sink, Sink::Stdout);
    let if_interrupted = output.interrupted();
    let mut bar = Bar::new(None);
    bar.say(&format!("exporting {what}"));
    let request = admin::ExportRequest {
        source: Some(source),
        format: admin::Format::from(format).into(),
    };
    let end = tokio::select! {
        end = receive(&mut client, request, output, &mut bar) => end?,
        () = interrupted => return Err(if_interrupted.into()),
    };
    let place = if is_stdout {
        "stdout".to_owned()
    } else {
        printable(flags.output.display())
    };
    bar.say(&format!(
        "{}, {} in {}, to {place}{}",
        contents(end.files, end.directories),
        bytes(end.plain_bytes),
        took(bar.took()),
        packed(format, end.packed_bytes),
    ));
    if end.left_out > 0 {
        bar.say(&format!(
            "left out: {} sockets, device nodes and attributes, which an archive does not have",
            end.left_out
        ));
    }
    bar.say(&format!("digest of the content   {}", end.digest));
    if format != Format::Tar {
        bar.say(&format!("digest of the archive   {}", end.packed_digest));
    }
    Ok(ExitCode::SUCCESS)
}

fn contents(files: u64, directories: u64) -> String {
    let files = counted(files, "file", "files");
    let directories = counted(directories, "directory", "directories");
    format!("{files} and {directories}")
}

fn packed(format: Format, size: u64) -> String {
    match format {
        Format::Tar => String::new(),
        _ => format!(" ({} compressed)", bytes(size)),
    }
}

/// Finds what is to be exported, as `inspect` does; and what it is called.
async fn find(
    client: &mut socket::Client,
    flags: &Export,
) -> Result<(admin::export_request::Source, String), answer::Failure> {
    use admin::export_request::Source;
    let tenant = flags.namespace.tenant.as_ref();
    let volumes = answer::volumes(client, tenant).await?;
    let artifacts = answer::artifacts(client, tenant).await?;
    let (name, may_be_artifact) = match flags.what.strip_prefix("volume/") {
        Some(name) => (name, false),
        None => (flags.what.as_str(), true),
    };
    let all = volumes.iter().map(Thing::Volume);
    let artifacts = artifacts.iter().filter(|_| may_be_artifact);
    let all = all.chain(artifacts.map(Thing::Artifact));
    let found: Vec<Thing<'_>> = all.filter(|thing| thing.is_called(name)).collect();
    Ok(match answer::only(&found, &flags.what)? {
        Thing::Volume(row) => (
            Source::VolumeId(row.id.clone()),
            format!("volume {} of namespace {}", row.id, row.tenant),
        ),
        Thing::Artifact(row) => {
            let name = if row.reference.is_empty() {
                String::new()
            } else {
                format!("{}, ", printable(&row.reference))
            };
            (
                Source::ArtifactId(row.id.clone()),
                format!("{name}artifact {} of namespace {}", row.id, row.tenant),
            )
        }
    })
}

/// Receives an archive, and puts it where it belongs when it is complete.
async fn receive(
    client: &mut socket::Client,
    request: admin::ExportRequest,
    output: Output,
    bar: &mut Bar,
) -> Result<admin::ExportEnd, answer::Failure> {
    let mut parts = client.export(request).await?.into_inner();
    let mut writer = Writer::start(&output)?;
    while let Some(part) = parts.message().await? {
        if let Some(head) = &part.head {
            begin(bar, head);
        }
        if !part.data.is_empty() && writer.parts.send(part.data).await.is_err() {
            // It has failed, and says why.
            break;
        }
        bar.show(Far {
            bytes: part.plain_bytes,
            entries: part.entries,
        });
        if let Some(end) = part.end {
            writer.end().await.map_err(|source| output.failed(source))?;
            output.complete()?;
            return Ok(end);
        }
    }
    writer.end().await.map_err(|source| output.failed(source))?;
    Err(Failure::Incomplete.into())
}

/// Says what is being exported.
fn begin(bar: &mut Bar, head: &admin::ExportHead) {
    let size = |usage: &admin::Usage| usage.bytes + HEADER * (usage.files + usage.directories);
    bar.expect(head.usage.as_ref().map(size));
    match head.view() {
        admin::View::Snapshot => bar.say("the volume is live: the archive shows it at this moment"),
        admin::View::Live => bar.say(
            "the volume is live: its pod may change it meanwhile, and the archive has each file as \
             it was when it was read",
        ),
        admin::View::Sealed | admin::View::Unspecified => {}
    }
}

/// Makes something of an archive.
pub(super) async fn import(flags: Import) -> Done {
    let mut client = socket::connect(&flags.pool.pool).await?;
    let (file, size) = input(&flags.file)?;
    let tenant = flags.namespace.required();
    let head = admin::ImportHead {
        tenant: tenant.to_string(),
        reference: flags.reference.to_string(),
        digest: flags.digest.map(String::from).unwrap_or_default(),
        size,
        ttl_seconds: flags.ttl.map(|ttl| ttl.as_secs()),
    };
    let mut bar = Bar::new(size);
    let name = printable(&flags.reference);
    bar.say(&format!("importing {name} of namespace {tenant}"));
    let is_sent = Arc::new(AtomicBool::new(false));
    let source = Source {
        file,
        path: &flags.file,
        is_sent: Arc::clone(&is_sent),
    };
    let end = tokio::select! {
        end = send(&mut client, head, source, &mut bar) => end?,
        () = interrupted()? => {
            let why = if is_sent.load(Ordering::Acquire) {
                Failure::InterruptedLate(tenant.clone())
            } else {
                Failure::InterruptedImport
            };
            return Err(why.into());
        }
    };
    if end.left_out > 0 {
        bar.say(&format!(
            "left out: {} device nodes and attributes, which are not taken from an archive",
            end.left_out
        ));
    }
    if !end.named {
        bar.say(&format!(
            "{name} got newer content during the import, and keeps that"
        ));
    }
    if end.nearly_full {
        bar.say(
            "warning: the pool is above its high watermark, so the driver may evict this at once; \
             `baggageclaim status` shows the space, and `baggageclaim artifacts` what is left",
        );
    }
    let took = took(bar.took());
    drop(bar);
    answer::print(|to| {
        writeln!(
            to,
            "{name} of namespace {tenant} is artifact {}: {}, {}, in {took}.",
            end.artifact_id,
            contents(end.files, end.directories),
            bytes(end.bytes)
        )?;
        writeln!(to, "digest of the tar stream   {}", end.digest)
    })?;
    Ok(ExitCode::SUCCESS)
}

/// The archive that is imported.
struct Source<'a> {
    file: File,
    path: &'a Path,
    /// The driver may have all of it.
    is_sent: Arc<AtomicBool>,
}

/// Sends an archive; what became of it.
async fn send(
    client: &mut socket::Client,
    head: admin::ImportHead,
    source: Source<'_>,
    bar: &mut Bar,
) -> Result<admin::ImportEnd, answer::Failure> {
    let Source {
        file,
        path,
        is_sent,
    } = source;
    let (parts, outgoing) = mpsc::channel(WAITING);
    let (end, ended) = oneshot::channel();
    let read = move || {
        // Where it ends without the last part, the driver knows that it is incomplete.
        let _told = end.send(read_all(file, head, &parts, &is_sent));
    };
    let thread = std::thread::Builder::new().name("read".to_owned());
    let failed = |source| Failure::Read {
        path: path.to_owned(),
        source,
    };
    thread.spawn(read).map_err(failed)?;
    let answered = async {
        let mut answers = client
            .import(ReceiverStream::new(outgoing))
            .await?
            .into_inner();
        while let Some(far) = answers.message().await? {
            bar.show(Far {
                bytes: far.packed_bytes,
                entries: far.entries,
            });
            if let Some(end) = far.end {
                return Ok(end);
            }
        }
        Err(Failure::Incomplete.into())
    };
    let answered: Result<_, answer::Failure> = answered.await;
    let mut ended = ended;
    match (answered, ended.try_recv()) {
        // What the driver says of it follows from this.
        (Err(_), Ok(Err(source))) => Err(failed(source).into()),
        (answered, _) => answered,
    }
}

/// Sends all of a file, until the other side takes no more.
fn read_all(
    mut file: File,
    head: admin::ImportHead,
    parts: &mpsc::Sender<admin::ImportPart>,
    is_sent: &AtomicBool,
) -> io::Result<()> {
    let send = |part| parts.blocking_send(part).is_ok();
    let mut taken = send(admin::ImportPart {
        head: Some(head),
        ..admin::ImportPart::default()
    });
    while taken {
        let mut data = vec![0; CHUNK];
        let read = match file.read(&mut data) {
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            read => read?,
        };
        data.truncate(read);
        if read == 0 {
            is_sent.store(true, Ordering::Release);
        }
        taken = send(admin::ImportPart {
            end: data.is_empty(),
            data,
            head: None,
        });
        if read == 0 {
            break;
        }
    }
    Ok(())
}

/// Ready when this process is told to end.
fn interrupted() -> io::Result<impl Future<Output = ()>> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut hang_up = signal(SignalKind::hangup())?;
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hang_up.recv() => {}
        }
    })
}
