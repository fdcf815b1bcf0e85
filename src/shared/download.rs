//! A part of an object as a stream: a download that runs ahead of its reader, and that is taken up
//! again where it was cut.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use futures_util::TryStreamExt as _;
use hyper::body::Bytes;
use object_store::path::Path;
use tokio::sync::{Semaphore, SemaphorePermit, mpsc};

use super::error::{Error, Result};
use super::store::Store;

/// The most bytes of a download that travel between two threads at once.
const PIECE: usize = 256 << 10;

impl Store {
    /// Reads a part of an object as a stream that runs ahead by at most `ahead` bytes. A stream
    /// that is cut is taken up again where it ended.
    pub(super) fn stream(&self, key: &str, range: Range<u64>, ahead: usize) -> Download {
        // A connection gives pieces of any length, so the permits are bytes.
        let (sender, receiver) = mpsc::unbounded_channel();
        let permits = Arc::new(Semaphore::new(ahead.max(PIECE)));
        let job = Job {
            store: self.clone(),
            path: self.path(key),
            object: self.shown(key),
            range,
            sender,
            permits: Arc::clone(&permits),
        };
        self.runtime().spawn(job.run());
        Download {
            receiver,
            permits,
            piece: Bytes::new(),
        }
    }
}

/// A part of an object that is being read. Dropping it ends the download.
pub(super) struct Download {
    receiver: mpsc::UnboundedReceiver<Result<Bytes>>,
    /// How many more bytes may wait in the receiver.
    permits: Arc<Semaphore>,
    piece: Bytes,
}

impl Drop for Download {
    fn drop(&mut self) {
        self.permits.close();
    }
}

impl io::Read for Download {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while self.piece.is_empty() {
            match self.receiver.blocking_recv() {
                None => return Ok(0),
                Some(Ok(piece)) => {
                    self.permits.add_permits(piece.len());
                    self.piece = piece;
                }
                Some(Err(error)) => return Err(io::Error::other(error)),
            }
        }
        let length = self.piece.len().min(into.len());
        into[..length].copy_from_slice(&self.piece.split_to(length));
        Ok(length)
    }
}

struct Job {
    store: Store,
    path: Path,
    object: String,
    range: Range<u64>,
    sender: mpsc::UnboundedSender<Result<Bytes>>,
    permits: Arc<Semaphore>,
}

impl Job {
    async fn run(mut self) {
        let mut left = self.store.times.retries;
        loop {
            let before = self.range.start;
            let Err(error) = self.attempt().await else {
                return;
            };
            if self.range.start > before {
                left = self.store.times.retries;
            }
            if matches!(error, Error::Stalled { .. }) {
                left = left.min(1);
            }
            if left == 0 || !error.is_temporary() {
                let _gone = self.sender.send(Err(error));
                return;
            }
            left -= 1;
            tokio::time::sleep(self.store.times.pause).await;
        }
    }

    /// Sends what comes. [`Error::Stopped`]: the reader is gone.
    async fn attempt(&mut self) -> Result<()> {
        if self.range.is_empty() {
            return Ok(());
        }
        let (store, object) = (&self.store, &self.object);
        let answer = store.ask(&self.path, object, self.range.clone()).await?;
        let mut pieces = answer.into_stream();
        while !self.range.is_empty() {
            let next = store.soon(object, pieces.try_next()).await?;
            let Some(mut piece) = next else {
                return Err(Error::away(object, "it ended before its end"));
            };
            let wanted = self.range.end - self.range.start;
            if piece.len() as u64 > wanted {
                piece.truncate(usize::try_from(wanted).expect("it is less than a length"));
            }
            while !piece.is_empty() {
                let part = piece.split_to(piece.len().min(PIECE));
                self.range.start += part.len() as u64;
                let length = u32::try_from(part.len()).expect("it is at most a piece");
                let permits = self.permits.acquire_many(length).await;
                permits
                    .map(SemaphorePermit::forget)
                    .map_err(|_| Error::Stopped)?;
                let sent = self.sender.send(Ok(part));
                sent.map_err(|_| Error::Stopped)?;
            }
        }
        Ok(())
    }
}
