//! Archives over the admin socket: the engine's threads on one side, streams of messages on the
//! other.
//!
//! Between them are bounded channels, so the slower side slows the other. A caller that goes away,
//! or a driver that ends, is an error of the engine's input or output, which then leaves nothing
//! behind.

use std::io::{self, ErrorKind, Read, Write};
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::{Stream, stream};
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tonic::{Status, Streaming};

use super::service::{failed, parse, usage};
use super::shared;
use crate::archive::{Codec, Measured, Progress};
use crate::distribution::Distribution;
use crate::engine::{Engine, Exported, ImportRequest, Imported, Source, View};
use crate::model::{Reference, Sha256, Tenant};
use crate::proto::admin::v1 as admin;
use crate::server::{Drain, Rpc};

/// How long an export or import waits for its caller to take or send a byte. Each has one of a few
/// threads, so a caller that stalled for ever would keep others from theirs.
pub const STALL: Duration = Duration::from_secs(5 * 60);

/// How many bytes go in one message.
const CHUNK: usize = 128 << 10;
/// How many messages wait between the two sides.
const WAITING: usize = 4;
/// How often an importer gets progress.
const TELL: Duration = Duration::from_millis(200);
/// How soon an import that waits for its caller sees that it has failed.
const LOOK: Duration = Duration::from_millis(50);

/// What ends a transfer before its end.
#[derive(Debug, Clone)]
pub(super) struct Ends {
    /// The driver ends.
    pub(super) closing: Drain,
    /// The caller neither takes nor sends a byte for so long.
    pub(super) stall: Duration,
}

impl Ends {
    /// The error of a caller that `does` nothing.
    fn stalled(&self, does: &str) -> io::Error {
        let stall = humantime::format_duration(self.stall);
        let why = format!("the caller {does} nothing for {stall}");
        io::Error::new(ErrorKind::TimedOut, why)
    }
}

/// Messages to a caller.
pub(super) type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;
type Sender<T> = mpsc::Sender<Result<T, Status>>;

/// The messages of a channel, until the driver ends.
fn answers<T: Send + 'static>(
    from: mpsc::Receiver<Result<T, Status>>,
    ending: &Drain,
) -> Answers<T> {
    let state = Some((from, ending.clone()));
    Box::pin(stream::unfold(state, async |state| {
        let (mut from, ending) = state?;
        tokio::select! {
            biased;
            () = ending.closing() => {
                // The engine's side finds that there is no one to write to.
                drop(from);
                Some((Err(ends()), None))
            }
            answer = from.recv() => Some((answer?, Some((from, ending)))),
        }
    }))
}

fn ends() -> Status {
    failed(&crate::engine::Error::ShuttingDown)
}

/// Opens the source of an export and sends it.
pub(super) async fn export(
    engine: &Engine,
    ends: Ends,
    request: &admin::ExportRequest,
) -> Result<Answers<admin::ExportPart>, Status> {
    use admin::export_request::Source as Asked;
    let source = match &request.source {
        Some(Asked::ArtifactId(id)) => Source::Artifact(parse("artifact_id", id)?),
        Some(Asked::VolumeId(id)) => Source::Volume(parse("volume_id", id)?),
        None => {
            let what = "one of artifact_id and volume_id is required";
            return Err(Status::invalid_argument(what));
        }
    };
    let codec = match request.format() {
        admin::Format::Unspecified => {
            let what = "format must be FORMAT_TAR, FORMAT_TAR_GZ or FORMAT_TAR_ZST";
            return Err(Status::invalid_argument(what));
        }
        admin::Format::Tar => Codec::Plain,
        admin::Format::TarGz => Codec::Gzip(1),
        admin::Format::TarZst => Codec::Zstd(1),
    };
    let export = engine.export(source).await;
    let export = export.map_err(|error| failed(&error))?;
    let head = admin::ExportHead {
        view: match export.view() {
            View::Sealed => admin::View::Sealed,
            View::Snapshot => admin::View::Snapshot,
            View::Live => admin::View::Live,
        }
        .into(),
        usage: export.usage().map(usage),
    };
    let (sender, parts) = mpsc::channel(WAITING);
    let head = admin::ExportPart {
        head: Some(head),
        ..admin::ExportPart::default()
    };
    // There is space for the first of them.
    let _sent = sender.try_send(Ok(head));
    let engine = engine.clone();
    let closing = ends.closing.clone();
    tokio::spawn(async move {
        let ending = ends.closing.clone();
        let progress = Arc::new(Progress::default());
        let out = Parts {
            sender: sender.clone(),
            progress: progress.clone(),
            buffer: Vec::with_capacity(CHUNK),
            ends,
            runtime: Handle::current(),
        };
        let packed = engine.pack(export, codec, out, progress).await;
        let last = packed.map(end_of_export).map_err(|error| failed(&error));
        // A caller that is gone needs no answer.
        tokio::select! {
            _sent = sender.send(last) => {}
            () = ending.closing() => {}
        }
    });
    Ok(answers(parts, &closing))
}

/// The digest of a stream; empty: it was not computed.
fn text(stream: Measured) -> String {
    let digest = stream.digest();
    digest.map(|it| it.to_string()).unwrap_or_default()
}

fn end_of_export(Exported { packed }: Exported) -> admin::ExportPart {
    let (digests, counts) = (packed.digests, packed.counts);
    let left_out = counts.sockets_left_out + counts.devices_left_out + counts.attributes_left_out;
    let end = admin::ExportEnd {
        digest: text(digests.plain),
        packed_digest: text(digests.packed),
        plain_bytes: digests.plain.bytes,
        packed_bytes: digests.packed.bytes,
        files: counts.files,
        directories: counts.directories,
        left_out,
    };
    admin::ExportPart {
        plain_bytes: digests.plain.bytes,
        entries: counts.files + counts.directories,
        end: Some(end),
        ..admin::ExportPart::default()
    }
}

/// The output of an export, on a thread of the engine: messages to the caller.
struct Parts {
    sender: Sender<admin::ExportPart>,
    progress: Arc<Progress>,
    buffer: Vec<u8>,
    ends: Ends,
    runtime: Handle,
}

impl Parts {
    fn send(&mut self) -> io::Result<()> {
        let data = std::mem::replace(&mut self.buffer, Vec::with_capacity(CHUNK));
        let part = admin::ExportPart {
            data,
            plain_bytes: self.progress.plain(),
            entries: self.progress.entries(),
            ..admin::ExportPart::default()
        };
        // A caller that takes nothing more must not hold the end of the driver up.
        let sent = self.runtime.block_on(async {
            let sending = tokio::time::timeout(self.ends.stall, self.sender.send(Ok(part)));
            tokio::select! {
                sent = sending => sent.map(|sent| sent.is_ok()),
                () = self.ends.closing.closing() => Ok(false),
            }
        });
        match sent {
            Ok(true) => Ok(()),
            Ok(false) => Err(io::Error::new(ErrorKind::BrokenPipe, "the caller is gone")),
            Err(_elapsed) => Err(self.ends.stalled("took")),
        }
    }
}

impl Write for Parts {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let fits = bytes.len().min(CHUNK - self.buffer.len());
        self.buffer.extend_from_slice(&bytes[..fits]);
        if self.buffer.len() == CHUNK {
            self.send()?;
        }
        Ok(fits)
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        self.send()
    }
}

/// Reads what the archive is to become, and imports it.
pub(super) async fn import(
    engine: &Engine,
    distribution: Option<&Distribution>,
    ends: Ends,
    rpc: &Rpc,
    mut parts: Streaming<admin::ImportPart>,
) -> Result<Answers<admin::ImportProgress>, Status> {
    let first = parts.message().await?.unwrap_or_default();
    let Some(head) = first.head else {
        let what = "the first part must say what the archive is to become (head)";
        return Err(Status::invalid_argument(what));
    };
    let mut request = request(&head)?;
    rpc.record("tenant", &request.tenant);
    rpc.record("reference", &request.reference);
    request.base = shared::base(distribution, &request.tenant, &request.reference).await?;
    let (sender, answered) = mpsc::channel(WAITING);
    let (bytes, received) = mpsc::channel(WAITING);
    let progress = Arc::new(Progress::default());
    let closing = ends.closing.clone();
    let input = Input {
        runtime: Handle::current(),
        received,
        ends,
        progress: progress.clone(),
        part: Vec::new(),
        at: 0,
        ended: false,
    };
    let feeding = feed(parts, bytes, closing.clone());
    let imported = {
        let (engine, progress, caller) = (engine.clone(), progress.clone(), sender.clone());
        let is_wanted = move || !caller.is_closed();
        async move { engine.import(request, input, progress, is_wanted).await }
    };
    let finished = async move {
        tokio::pin!(imported, feeding);
        tokio::select! {
            imported = &mut imported => imported,
            // All of it is there, or no more will come.
            () = &mut feeding => imported.await,
        }
    };
    tokio::spawn(async move {
        tokio::pin!(finished);
        let imported = loop {
            tokio::select! {
                imported = &mut finished => break imported,
                // A caller that misses this message gets the next one.
                () = tokio::time::sleep(TELL) => drop(sender.try_send(Ok(so_far(&progress)))),
            }
        };
        let last = imported.map(|imported| end_of_import(&progress, &imported));
        // A caller that is gone needs no answer.
        let _sent = sender.send(last.map_err(|error| failed(&error))).await;
    });
    Ok(answers(answered, &closing))
}

fn request(head: &admin::ImportHead) -> Result<ImportRequest, Status> {
    let tenant: Tenant = parse("tenant", &head.tenant)?;
    let reference: Reference = parse("reference", &head.reference)?;
    let digest: Option<Sha256> = match head.digest.as_str() {
        "" => None,
        digest => Some(parse("digest", digest)?),
    };
    Ok(ImportRequest {
        tenant,
        reference,
        digest,
        size: head.size,
        ttl: head.ttl_seconds.map(Duration::from_secs),
        base: None,
    })
}

fn so_far(progress: &Progress) -> admin::ImportProgress {
    admin::ImportProgress {
        packed_bytes: progress.packed(),
        plain_bytes: progress.plain(),
        entries: progress.entries(),
        end: None,
    }
}

fn end_of_import(progress: &Progress, imported: &Imported) -> admin::ImportProgress {
    let (digests, made) = (imported.unpacked.digests, imported.unpacked.made);
    let end = admin::ImportEnd {
        artifact_id: imported.artifact.to_string(),
        digest: text(digests.plain),
        packed_digest: text(digests.packed),
        files: made.files,
        directories: made.directories,
        bytes: made.bytes,
        left_out: made.devices_left_out + made.attributes_left_out,
        named: imported.named,
        nearly_full: imported.nearly_full,
    };
    admin::ImportProgress {
        end: Some(end),
        ..so_far(progress)
    }
}

/// A message of an import.
enum Received {
    Bytes(Vec<u8>),
    /// That was all.
    End,
}

/// Hands the parts on until the last. If they end before it, or the driver does, `to` is closed
/// without it.
async fn feed(mut parts: Streaming<admin::ImportPart>, to: mpsc::Sender<Received>, ending: Drain) {
    loop {
        let part = tokio::select! {
            part = parts.message() => part,
            () = ending.closing() => return,
        };
        let Ok(Some(part)) = part else { return };
        if !part.data.is_empty() && to.send(Received::Bytes(part.data)).await.is_err() {
            // The import is over.
            return;
        }
        if part.end {
            let _sent = to.send(Received::End).await;
            return;
        }
    }
}

/// The input of an import, on a thread of the engine.
struct Input {
    received: mpsc::Receiver<Received>,
    runtime: Handle,
    ends: Ends,
    progress: Arc<Progress>,
    part: Vec<u8>,
    at: usize,
    ended: bool,
}

impl Input {
    /// The next part; waits for it, unless the archive is refused already.
    fn next(&mut self) -> io::Result<Received> {
        let began = Instant::now();
        loop {
            let received = self.received.recv();
            let waiting = async { tokio::time::timeout(LOOK, received).await };
            match self.runtime.block_on(waiting) {
                Ok(Some(part)) => return Ok(part),
                Ok(None) => {
                    let what = "its sender went away before its end";
                    return Err(io::Error::new(ErrorKind::ConnectionAborted, what));
                }
                Err(_) if self.progress.has_failed() => {
                    return Err(io::Error::other("it is refused"));
                }
                Err(_) if began.elapsed() > self.ends.stall => {
                    return Err(self.ends.stalled("sent"));
                }
                Err(_) => {}
            }
        }
    }
}

impl Read for Input {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while self.at == self.part.len() && !self.ended {
            match self.next()? {
                Received::Bytes(part) => (self.part, self.at) = (part, 0),
                Received::End => self.ended = true,
            }
        }
        let left = &self.part[self.at..];
        let fits = left.len().min(into.len());
        into[..fits].copy_from_slice(&left[..fits]);
        self.at += fits;
        Ok(fits)
    }
}
