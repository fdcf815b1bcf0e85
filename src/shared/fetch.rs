//! One engine for every source: a layer's table is verified, its pieces are verified one by one, a
//! transfer that was cut goes on, and the next source is asked for what the last one did not give.
//! Single flight is the caller's: two fetches into one directory at once are not allowed.

use std::cell::Cell;
use std::fs::File;
use std::io::{self, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use rustix::fs::{Mode, OFlags};

use super::error::{Error, Result, is_of_the_source};
use super::flow::Flow;
use super::record::LayerRef;
use super::source::Source;
use super::upload::ours;
use crate::archive::toc::{Patience, Receiver, Table};
use crate::archive::{self, Limits};
use crate::model::Tenant;
use crate::sys::Dir;
use crate::tree::Stop;

/// How many wants are asked for at once.
const WANTS: usize = 4096;
/// How often a source is asked again after it gave something new and then failed.
const RETRIES: u32 = 3;
/// What a source must send in 5 s of waiting, if another one can take its place: 1 MiB/s.
const LEAST: u64 = 5 << 20;

/// Where a layer is made, and how.
#[derive(Clone, Copy)]
pub struct Destination<'a> {
    /// The directory of this layer: empty, or of an earlier fetch of the same layer.
    pub into: &'a Dir,
    /// May hold temporary files.
    pub temporary: &'a Dir,
    /// The limits of imports.
    pub limits: Limits,
    /// Whether device nodes are made.
    pub devices: bool,
    /// How long a record and its frame may take.
    pub patience: Patience,
    /// Verified bytes are added to this.
    pub progress: &'a AtomicU64,
    /// Bytes of tables and content are added to this as they come, before they are verified.
    pub moved: &'a AtomicU64,
    /// Whether the next source takes the place of one that is slow.
    pub replaces_slow: bool,
}

/// A layer that was fetched.
#[derive(Debug)]
pub struct Fetched {
    /// Its root, `fs` in the directory.
    pub root: Dir,
    /// Its table.
    pub table: Arc<Table>,
    /// Bytes of content that came.
    pub bytes: u64,
    /// The place of the source that gave the last of it. Those before it did not give all.
    pub source: usize,
}

/// Fetches a layer. The sources are asked in order, each for the parts that are still missing.
/// Returns the first error that no later source made up for, a temporary one if there is one.
pub fn fetch(
    sources: &[&dyn Source],
    tenant: &Tenant,
    layer: &LayerRef,
    destination: Destination<'_>,
    stop: Stop<'_>,
) -> Result<Fetched> {
    if layer.content > destination.limits.bytes {
        return Err(archive::Error::Limit {
            what: "the content of its files",
            limit: destination.limits.bytes,
        }
        .into());
    }
    let mut job = Job {
        tenant,
        layer,
        destination,
        stop,
        receiver: None,
        bytes: 0,
    };
    let mut first: Option<Error> = None;
    for (index, source) in sources.iter().enumerate() {
        let is_last = index + 1 == sources.len();
        match job.from(*source, is_last) {
            Ok(()) => return job.finish(index),
            Err(error) if error.is_of_the_source() => {
                if matches!(error, Error::Corrupt { .. }) {
                    source.damaged(tenant, layer, &error);
                }
                // The caller may try again for as long as one source may recover.
                first = Some(match first {
                    Some(first) if first.is_temporary() || !error.is_temporary() => first,
                    _ => error,
                });
            }
            Err(error) => return Err(error),
        }
    }
    Err(first.unwrap_or_else(|| Error::Missing {
        object: format!("layer {}", layer.digest),
    }))
}

/// A stream whose bytes are counted as they come.
struct Counted<'a> {
    stream: Box<dyn Read + Send>,
    moved: &'a AtomicU64,
    object: String,
    /// The stream fails if it is slow. `None`: it may be slow.
    flow: Option<Flow>,
}

impl Read for Counted<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let began = Instant::now();
        let read = self.stream.read(into)?;
        self.moved.fetch_add(read as u64, Ordering::Relaxed);
        if let Some(flow) = self.flow.as_mut().filter(|_| read > 0) {
            flow.came(read as u64, began.elapsed()).map_err(|slow| {
                let cause = format!("{slow}, and another source may be faster");
                io::Error::other(Error::away(&self.object, cause))
            })?;
        }
        Ok(read)
    }
}

struct Job<'a> {
    tenant: &'a Tenant,
    layer: &'a LayerRef,
    destination: Destination<'a>,
    stop: Stop<'a>,
    /// Once the table was verified.
    receiver: Option<(Arc<Table>, Receiver)>,
    bytes: u64,
}

impl Job<'_> {
    /// Takes what is missing from one source. After a failure that may pass, the next one is asked
    /// at once; the last one is asked again.
    fn from(&mut self, source: &dyn Source, is_last: bool) -> Result<()> {
        let file = self.temporary()?;
        // A source asks before each read of the table.
        let came = Cell::new(0);
        let stop = || {
            let length = rustix::fs::fstat(&file).map_or(0, |found| found.st_size.unsigned_abs());
            let new = length.saturating_sub(came.replace(length));
            self.destination.moved.fetch_add(new, Ordering::Relaxed);
            (self.stop)()
        };
        let content = source.open(self.tenant, self.layer, &file, &stop)?;
        let (layer, stop) = (self.layer, self.stop);
        let object = || format!("layer {} of {}", layer.digest, source.name());
        let wrong = |error: archive::Error| match ours(error) {
            Error::Layer(
                error @ (archive::Error::Truncated { .. } | archive::Error::Stalled { .. }),
            ) => Error::away(object(), error),
            // A limit is this node's own: other nodes may take the layer.
            error @ Error::Layer(archive::Error::Limit { .. }) => error,
            Error::Layer(error) if is_of_the_source(&error) => Error::corrupt(object(), error),
            error => error,
        };
        let (_, receiver) = match &mut self.receiver {
            Some(receiver) => receiver,
            none => {
                let (limits, digest) = (self.destination.limits, layer.digest.0);
                let table =
                    Table::open(file, Some(digest), self.destination.temporary, limits, stop);
                let table = table.map_err(wrong)?;
                if table.bytes() != layer.content || table.digest().bytes != layer.table {
                    return Err(Error::corrupt(
                        object(),
                        "its size differs from the manifest",
                    ));
                }
                let devices = self.destination.devices;
                let receiver =
                    Receiver::open(self.destination.into, Arc::clone(&table), devices, stop);
                none.insert((table, receiver.map_err(ours)?))
            }
        };
        let mut left = RETRIES;
        loop {
            let wants = receiver.missing(WANTS).map_err(ours)?;
            if wants.is_empty() {
                return Ok(());
            }
            let frames = content.frames(&wants)?;
            let Destination {
                moved,
                progress,
                patience,
                ..
            } = self.destination;
            let before = progress.load(Ordering::Relaxed);
            let stream = Counted {
                stream: frames.stream,
                moved,
                object: object(),
                flow: (self.destination.replaces_slow && !is_last).then(|| Flow::new(LEAST)),
            };
            let taken = receiver.take(stream, patience, progress, stop);
            let progressed = progress.load(Ordering::Relaxed) - before;
            self.bytes += progressed;
            match taken.map_err(wrong) {
                Ok(_) if progressed > 0 => left = RETRIES,
                Ok(_) => {
                    return Err(Error::corrupt(object(), "it lacks some of its content"));
                }
                Err(error @ Error::Stalled { .. }) => return Err(error),
                Err(error) if error.is_temporary() && is_last && left > 0 => left -= 1,
                Err(error) => return Err(error),
            }
        }
    }

    fn temporary(&self) -> Result<File> {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let dir = self.destination.temporary;
        let fd = rustix::fs::openat(dir, ".", flags, Mode::from_raw_mode(0o600))
            .map_err(|errno| dir.error("openat", ".", errno))?;
        Ok(File::from(fd))
    }

    fn finish(self, source: usize) -> Result<Fetched> {
        let (table, receiver) = self.receiver.ok_or(Error::Stopped)?;
        let root = receiver.finish(self.stop).map_err(ours)?;
        Ok(Fetched {
            root,
            table,
            bytes: self.bytes,
            source,
        })
    }
}
