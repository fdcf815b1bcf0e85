//! Writing a layer as one object, in parts, with bounded memory. Where the bytes come from is a
//! holder's business.

use std::collections::VecDeque;
use std::io::{self, Write};

use hyper::body::Bytes;
use object_store::{MultipartUpload, PutPayload};
use tokio_util::task::AbortOnDropHandle;

use super::error::{Error, Result};
use super::keys::Keys;
use super::object::{FOOTER_BYTES, Footer, INDEX, Index, MOST_FRAMES, TABLE, head, may_unpack};
use super::record::{LayerRef, ObjectId};
use super::store::Store;
use crate::archive;
use crate::archive::toc::{Holder, Noted, Packing, Table, Want};
use crate::model::Sha256;
use crate::tree::Stop;

/// A storage takes at most 10,000 parts.
const MOST_PARTS: u64 = 9000;
/// The level at which tables are compressed.
const TABLE_LEVEL: i32 = 3;

/// How many bytes travel at once, if no part is larger.
const MOST_TRAVELLING: usize = 32 << 20;

/// How a layer is uploaded. Memory: the parts that travel, the next one, the index and two frames.
#[derive(Clone, Copy)]
pub struct Upload<'a> {
    /// The level of zstd for frames.
    pub level: i32,
    /// Bytes of a part, at least 5 MiB. Larger for layers that would have too many.
    pub part: usize,
    /// How many parts travel at once. Fewer if they would have more than 32 MiB.
    pub parallel: usize,
    /// Called before each part with its length: it may wait, to limit the bandwidth.
    pub pace: &'a dyn Fn(usize),
}

impl Default for Upload<'_> {
    fn default() -> Self {
        Self {
            level: 1,
            part: 8 << 20,
            parallel: 3,
            pace: &|_| {},
        }
    }
}

/// Writes the layer of this holder, whose table this is, as the object `id`. Verifies each piece:
/// [`archive::Error::Damaged`]. A failed upload leaves no object. A killed process may leave parts,
/// which a lifecycle rule of the bucket removes.
pub fn upload(
    store: &Store,
    keys: &Keys,
    (table, holder): (&Table, &Holder),
    id: ObjectId,
    how: Upload<'_>,
    stop: Stop<'_>,
) -> Result<LayerRef> {
    let digest = Sha256(table.digest().sha256);
    let key = keys.layer(&digest, id);
    let expected = (table.bytes() + table.digest().bytes).div_ceil(MOST_PARTS);
    let parts = Parts {
        store,
        key: &key,
        part: how
            .part
            .max(usize::try_from(expected).unwrap_or(usize::MAX)),
        how,
        buffer: Vec::new(),
        upload: None,
        running: VecDeque::new(),
    };
    let mut out = Noted::new(parts);
    let all = Want::Files {
        first: 0,
        count: table.files(),
    };
    let mut has = |_| Ok(true);
    // Readers refuse damage, but they cannot tell it to this node.
    let packing = Packing {
        verifies: true,
        ..Packing::at(how.level)
    };
    holder
        .send(&[all], &mut out, packing, &mut has, stop)
        .map_err(ours)?;
    let (mut parts, frames, tail) = out.into_parts();
    let index = Index::new(frames);
    let footer = write_tail(&mut parts, table, &index, tail)?;
    parts.finish(&footer)?;
    Ok(LayerRef {
        digest,
        upload: id,
        bytes: footer.object().expect("it was written"),
        tail,
        content: table.bytes(),
        table: table.digest().bytes,
    })
}

fn write_tail(parts: &mut Parts<'_>, table: &Table, index: &Index, tail: u64) -> Result<Footer> {
    let packed = packed_length(table)?;
    let plain = table.digest().bytes;
    let compressed = packed < plain && may_unpack(packed, plain);
    let mut footer = Footer {
        compressed,
        tail,
        packed: if compressed { packed } else { plain },
        table: plain,
        frames: index.frames().len() as u64,
        digest: Sha256(table.digest().sha256),
        index: Sha256([0; 32]),
    };
    let limit = || archive::Error::Limit {
        what: "the length of its table or index",
        limit: u64::from(u32::MAX) - 1,
    };
    if footer.frames > MOST_FRAMES {
        let what = "the number of its frames";
        let limit = MOST_FRAMES;
        return Err(archive::Error::Limit { what, limit }.into());
    }
    let write = |result: io::Result<()>| result.map_err(|error| ours(archive::Error::Write(error)));
    write(parts.write_all(&head(TABLE, footer.packed).ok_or_else(limit)?))?;
    if compressed {
        let mut encoder = encoder(&mut *parts)?;
        table.write_to(&mut encoder).map_err(ours)?;
        write(encoder.finish().map(|_| ()))?;
    } else {
        table.write_to(parts).map_err(ours)?;
    }
    write(parts.write_all(&head(INDEX, index.bytes()).ok_or_else(limit)?))?;
    let written = index.write_to(parts);
    footer.index = written.map_err(|error| ours(archive::Error::Write(error)))?;
    write(parts.write_all(&footer.encode()))?;
    Ok(footer)
}

fn encoder<W: Write>(out: W) -> Result<zstd::stream::write::Encoder<'static, W>> {
    zstd::stream::write::Encoder::new(out, TABLE_LEVEL)
        .map_err(|error| archive::Error::Write(error).into())
}

/// The length of the compressed table. It is compressed twice: a record begins with its length.
fn packed_length(table: &Table) -> Result<u64> {
    let mut encoder = encoder(Counter(0))?;
    table.write_to(&mut encoder)?;
    let counter = encoder.finish().map_err(archive::Error::Write)?;
    Ok(counter.0)
}

struct Counter(u64);

impl Write for Counter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// An error of the storage that came through a holder or a receiver is itself again.
pub(super) fn ours(error: archive::Error) -> Error {
    match error {
        archive::Error::Stopped => Error::Stopped,
        archive::Error::Write(error) | archive::Error::Read(error) if is_ours(&error) => {
            let inner = error.into_inner().expect("it is ours");
            *inner.downcast::<Error>().expect("it is ours")
        }
        error => error.into(),
    }
}

fn is_ours(error: &io::Error) -> bool {
    matches!(error.get_ref(), Some(inner) if inner.is::<Error>())
}

/// How many parts of so many bytes travel at once.
fn at_once(parallel: usize, part: usize) -> usize {
    parallel.min(MOST_TRAVELLING / part).max(1)
}

/// Output that becomes one object: in one request if it is small, else in parts.
struct Parts<'a> {
    store: &'a Store,
    key: &'a str,
    part: usize,
    how: Upload<'a>,
    buffer: Vec<u8>,
    upload: Option<Box<dyn MultipartUpload>>,
    /// A part that is given up ends, or it would keep its connection.
    running: VecDeque<AbortOnDropHandle<object_store::Result<()>>>,
}

impl Parts<'_> {
    /// Sends the buffer as a part.
    fn send(&mut self) -> Result<()> {
        while self.running.len() >= at_once(self.how.parallel, self.part) {
            self.wait_for_one()?;
        }
        (self.how.pace)(self.buffer.len());
        let bytes = std::mem::take(&mut self.buffer);
        let upload = match &mut self.upload {
            Some(upload) => upload,
            none => none.insert(self.store.multipart(self.key)?),
        };
        let part = upload.put_part(PutPayload::from(Bytes::from(bytes)));
        let part = self.store.runtime().spawn(part);
        self.running.push_back(AbortOnDropHandle::new(part));
        Ok(())
    }

    fn wait_for_one(&mut self) -> Result<()> {
        let Some(part) = self.running.pop_front() else {
            return Ok(());
        };
        self.store.transfer(self.key, async {
            part.await.unwrap_or_else(|error| Err(error.into()))
        })
    }

    /// Completes the object, which ends with this footer.
    fn finish(mut self, footer: &Footer) -> Result<()> {
        if self.upload.is_none() {
            (self.how.pace)(self.buffer.len());
            let bytes = std::mem::take(&mut self.buffer);
            return self.store.write(self.key, bytes);
        }
        if !self.buffer.is_empty() {
            self.send()?;
        }
        while !self.running.is_empty() {
            self.wait_for_one()?;
        }
        let Some(mut upload) = self.upload.take() else {
            return Ok(());
        };
        let length = footer.object().expect("it was written");
        match self.store.transfer(self.key, upload.complete()) {
            Ok(_) => Ok(()),
            // The acknowledgement may be lost: the object is there if its end is.
            Err(error) => match self.store.range(self.key, length - FOOTER_BYTES..length) {
                Ok(bytes) if bytes == footer.encode() => Ok(()),
                _ => {
                    self.upload = Some(upload);
                    Err(error)
                }
            },
        }
    }
}

impl Write for Parts<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let room = self.part - self.buffer.len();
        let taken = bytes.len().min(room);
        self.buffer.extend(&bytes[..taken]);
        if self.buffer.len() == self.part {
            self.send().map_err(io::Error::other)?;
        }
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Parts<'_> {
    fn drop(&mut self) {
        self.running.clear();
        if let Some(mut upload) = self.upload.take() {
            // If the abort fails, the lifecycle rule of the bucket removes the parts.
            let _aborted = self
                .store
                .transfer(self.key, async { upload.abort().await });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_parts_do_not_travel_all_at_once() {
        let how = Upload::default();
        assert_eq!(at_once(how.parallel, how.part), how.parallel);
        // Of the largest layer: 1 TiB.
        let part = usize::try_from((1_u64 << 40).div_ceil(MOST_PARTS)).expect("small");
        for part in (how.part..=part).step_by(1 << 20) {
            let travelling = at_once(how.parallel, part) * part;
            assert!(travelling <= MOST_TRAVELLING.max(part), "{part}");
        }
        assert_eq!(at_once(0, how.part), 1);
    }
}
