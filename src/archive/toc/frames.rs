//! Where the frames of a stream are: noted while a holder writes it, so that a part can be read
//! later. The bytes around a frame are `record`'s. The caller stores the list of frames.

use std::io::{self, Write};

use super::piece::{CHUNK, MOST_HOLES};
use super::record::{self, FRAME_RECORD, Frame};
use super::send::{LEAST_FRAME, Want};

/// One frame of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameAt {
    /// The index of the first file in it.
    pub file: u64,
    /// The offset in that file.
    pub offset: u64,
    /// Plain bytes.
    pub plain: u32,
    /// Bytes of the zstd frame, without its record.
    pub packed: u32,
}

impl FrameAt {
    /// How many bytes of the stream it takes, with its record.
    #[must_use]
    pub fn length(&self) -> u64 {
        FRAME_RECORD as u64 + u64::from(self.packed)
    }

    /// Whether the record of a frame could say this.
    #[must_use]
    pub fn is_possible(&self) -> bool {
        let plain = u64::from(self.plain);
        self.offset.is_multiple_of(CHUNK)
            && (1..=CHUNK).contains(&plain)
            && u64::from(self.packed) <= record::most_packed(plain)
    }
}

/// The record that ends a stream of so many frames.
#[must_use]
pub fn end_record(frames: u64) -> Vec<u8> {
    record::end(frames)
}

/// The most frames that a holder divides so many bytes of content into.
///
/// A frame has less than 256 KiB for one of two reasons: it ends a large file, or the next file did
/// not fit into it. Then the frame before it or behind it has so much more that both have 512 KiB.
/// Only a file with a piece of zeros may lack that frame. Two small frames are beside such a file.
#[must_use]
pub fn most_frames(content: u64) -> u64 {
    content / LEAST_FRAME as u64 + 2 * MOST_HOLES + 1
}

/// The frames, by their places in a list sorted as the table is, that hold what is wanted.
/// `wants` are sorted, as [`super::Receiver::missing`] gives them.
#[must_use]
pub fn frames_of(frames: &[FrameAt], wants: &[Want]) -> Vec<usize> {
    let mut found: Vec<usize> = Vec::new();
    for want in wants {
        let (begin, end) = match *want {
            Want::Files { first, count } => ((first, 0), (first.saturating_add(count), 0)),
            Want::Part {
                file,
                offset,
                length,
            } => ((file, offset), (file, offset.saturating_add(length))),
        };
        let after = frames.partition_point(|frame| (frame.file, frame.offset) <= begin);
        let from = after
            .saturating_sub(1)
            .max(found.last().map_or(0, |last| last + 1));
        let to = frames.partition_point(|frame| (frame.file, frame.offset) < end);
        found.extend(from..to.max(from));
    }
    found
}

/// Output that passes a stream on and notes its frames.
#[derive(Debug)]
pub struct Noted<W> {
    inner: W,
    frames: Vec<FrameAt>,
    /// The record that is being written, as far as it is known.
    head: Vec<u8>,
    /// Bytes that still belong to the last record or frame.
    pass: u64,
    written: u64,
}

impl<W: Write> Noted<W> {
    /// Notes what is written to `inner` from now on.
    pub fn new(inner: W) -> Self {
        Self {
            inner,
            frames: Vec::new(),
            head: Vec::new(),
            pass: 0,
            written: 0,
        }
    }

    /// The output, the frames that were written to it, and the bytes of all of it.
    pub fn into_parts(self) -> (W, Vec<FrameAt>, u64) {
        (self.inner, self.frames, self.written)
    }

    fn note(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            if self.pass > 0 {
                let skipped =
                    usize::try_from(self.pass).map_or(bytes.len(), |n| n.min(bytes.len()));
                self.pass -= skipped as u64;
                bytes = &bytes[skipped..];
                continue;
            }
            let needed = record::head_length(&self.head);
            let taken = needed.saturating_sub(self.head.len()).min(bytes.len());
            self.head.extend(&bytes[..taken]);
            bytes = &bytes[taken..];
            if self.head.len() < record::head_length(&self.head) {
                continue;
            }
            match record::noted(&self.head) {
                Ok((frame, pass)) => {
                    self.frames.extend(frame.map(|frame: Frame| FrameAt {
                        file: frame.file,
                        offset: frame.offset,
                        plain: frame.plain,
                        packed: frame.packed,
                    }));
                    self.pass = pass;
                }
                Err(why) => return Err(io::Error::new(io::ErrorKind::InvalidData, why)),
            }
            self.head.clear();
        }
        Ok(())
    }
}

impl<W: Write> Write for Noted<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(bytes)?;
        self.written += written as u64;
        self.note(&bytes[..written])?;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(file: u64, offset: u64, packed: u32) -> Frame {
        Frame {
            table: [1; 32],
            file,
            offset,
            plain: 10,
            packed,
        }
    }

    #[test]
    fn frames_are_noted_however_the_stream_is_cut_into_writes() {
        let mut stream = Vec::new();
        for (index, packed) in [(0, 7), (3, 0), (9, 300)] {
            stream.extend(frame(index, 0, packed).encode());
            stream.extend(vec![0xaa; usize::try_from(packed).expect("small")]);
        }
        stream.extend(record::end(3));
        for step in [1, 2, 9, 64, 65, 66, 1000] {
            let mut noted = Noted::new(Vec::new());
            for part in stream.chunks(step) {
                noted.write_all(part).expect("it is a stream");
            }
            let (copy, frames, written) = noted.into_parts();
            assert_eq!((copy.len(), written), (stream.len(), stream.len() as u64));
            let found: Vec<(u64, u32)> = frames.iter().map(|at| (at.file, at.packed)).collect();
            assert_eq!(found, [(0, 7), (3, 0), (9, 300)], "step {step}");
            let all: u64 = frames.iter().map(FrameAt::length).sum();
            assert_eq!(all + record::end(3).len() as u64, written);
        }
        Noted::new(Vec::new())
            .write_all(b"no record at all, in any way")
            .expect_err("it is no stream");
    }

    #[test]
    fn what_is_wanted_is_found_in_the_frames_that_hold_it() {
        let at = |file, offset| FrameAt {
            file,
            offset,
            plain: 1,
            packed: 1,
        };
        let frames = [at(0, 0), at(5, 0), at(6, 0), at(6, CHUNK), at(9, 0)];
        let files = |first, count| Want::Files { first, count };
        let found = |wants: &[Want]| frames_of(&frames, wants);
        assert_eq!(found(&[files(0, u64::MAX)]), [0, 1, 2, 3, 4]);
        assert_eq!(found(&[files(4, 1)]), [0]);
        assert_eq!(found(&[files(1, 1), files(3, 1)]), [0]);
        assert_eq!(found(&[files(4, 2)]), [0, 1]);
        let part = Want::Part {
            file: 6,
            offset: CHUNK,
            length: CHUNK,
        };
        assert_eq!(found(&[part]), [3]);
        assert_eq!(found(&[files(20, 1)]), [4]);
        assert_eq!(frames_of(&[], &[files(0, 1)]), [0; 0]);
    }
}
