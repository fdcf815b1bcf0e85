//! Which parts of a file are data and which are holes: found in a file, written as a map, read from
//! a map and checked. Maps only; the bytes themselves are moved by who packs and unpacks.

use std::os::fd::AsFd;

use rustix::fs::SeekFrom;
use rustix::io::Errno;

use super::header::{self, BLOCK, GnuSparseHeader, padding};
use super::pax::{self, Record};

/// A hole begins and ends at multiples of this. Nothing smaller is worth an entry in a map.
pub(super) const GRAIN: u64 = 64 * 1024;
/// How many runs of data are written at most.
const MOST_WRITTEN: usize = 16_384;
/// How many are read.
const MOST_READ: usize = 65_536;
/// How much of a grain is looked at first: nearly all data shows itself there.
const GLANCE: usize = 512;

/// A part of a file that is data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) offset: u64,
    pub(super) length: u64,
}

/// The runs of data of a file without holes.
pub(super) fn whole(size: u64) -> Vec<Run> {
    let run = Run {
        offset: 0,
        length: size,
    };
    Vec::from_iter((size > 0).then_some(run))
}

/// The runs of data of an open file of `size` bytes, by its content alone. `scratch` has at least a
/// grain.
pub(super) fn find(file: impl AsFd, size: u64, scratch: &mut [u8]) -> Result<Vec<Run>, Errno> {
    let mut runs: Vec<Run> = Vec::new();
    let mut start = 0;
    let mut at = 0;
    while at + GRAIN <= size {
        match look(&file, at, scratch)? {
            Grain::Data => {
                at += GRAIN;
                continue;
            }
            // The rest is data that the reader will miss.
            Grain::Short => break,
            Grain::Zeros => {}
        }
        if start < at {
            runs.push(Run {
                offset: start,
                length: at - start,
            });
        }
        at = zeros_end(&file, at + GRAIN, size, scratch)?;
        start = at;
        if runs.len() + 1 == MOST_WRITTEN {
            break;
        }
    }
    if start < size {
        runs.push(Run {
            offset: start,
            length: size - start,
        });
    }
    Ok(runs)
}

/// Where the hole ends that goes on at `at`, if it does. Where the filesystem knows of a hole,
/// nothing is read.
fn zeros_end(file: impl AsFd, mut at: u64, size: u64, scratch: &mut [u8]) -> Result<u64, Errno> {
    while at + GRAIN <= size {
        let data = match rustix::fs::seek(&file, SeekFrom::Data(at)) {
            Ok(data) => data,
            Err(Errno::NXIO) => size,
            Err(Errno::INVAL) => at,
            Err(errno) => return Err(errno),
        };
        at = (data.min(size) / GRAIN * GRAIN).max(at);
        if at + GRAIN > size || look(&file, at, scratch)? != Grain::Zeros {
            break;
        }
        at += GRAIN;
    }
    Ok(at)
}

#[derive(PartialEq, Eq)]
enum Grain {
    Data,
    Zeros,
    /// The file has shrunk, and ends within it.
    Short,
}

/// Looks at a grain.
fn look(file: impl AsFd, at: u64, scratch: &mut [u8]) -> Result<Grain, Errno> {
    let grain = &mut scratch[..usize::try_from(GRAIN).expect("it is small")];
    for part in [0..GLANCE, GLANCE..grain.len()] {
        let (mut from, to) = (part.start, part.end);
        while from < to {
            let read = rustix::io::pread(&file, &mut grain[from..to], at + from as u64);
            let read = match read {
                Ok(read) => read,
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(errno),
            };
            if read == 0 {
                return Ok(Grain::Short);
            }
            if grain[from..from + read].iter().any(|&byte| byte != 0) {
                return Ok(Grain::Data);
            }
            from += read;
        }
    }
    Ok(Grain::Zeros)
}

/// Whether these runs leave anything of the file out.
pub(super) fn has_holes(runs: &[Run], size: u64) -> bool {
    runs.iter().map(|run| run.length).sum::<u64>() < size
}

/// GNU's map 1.0: a count, then offsets and lengths, a line each, padded to a block.
pub(super) fn map(runs: &[Run], size: u64) -> Vec<u8> {
    let end = runs.last().map_or(0, |run| run.offset + run.length);
    let tail = (end < size).then_some(Run {
        offset: size,
        length: 0,
    });
    let count = runs.len() + usize::from(tail.is_some());
    let mut text = format!("{count}\n").into_bytes();
    for run in runs.iter().chain(&tail) {
        text.extend_from_slice(format!("{}\n{}\n", run.offset, run.length).as_bytes());
    }
    text.resize(text.len() + padding(text.len() as u64), 0);
    text
}

/// The runs that a map told, checked: in order, apart, within the file, and as long together as
/// what follows.
pub(super) fn checked(
    mut runs: Vec<Run>,
    size: u64,
    stored: u64,
) -> Result<Vec<Run>, &'static str> {
    let (mut end, mut sum) = (0, 0_u64);
    for run in &runs {
        if run.offset < end {
            return Err("its sparse map is not in order, or overlaps");
        }
        end = run.offset.saturating_add(run.length);
        if end > size {
            return Err("its sparse map goes beyond the file's size");
        }
        sum += run.length;
    }
    if sum != stored {
        return Err("its sparse map does not add up to what is stored");
    }
    runs.retain(|run| run.length > 0);
    Ok(runs)
}

/// Reads GNU's map 1.0, a block at a time.
#[derive(Default)]
pub(super) struct MapReader {
    line: Vec<u8>,
    count: Option<u64>,
    numbers: Vec<u64>,
}

impl MapReader {
    /// Takes a block. Returns whether it was the last one.
    pub(super) fn block(&mut self, block: &[u8; BLOCK]) -> Result<bool, &'static str> {
        for &byte in block {
            if byte != b'\n' {
                self.line.push(byte);
                if self.line.len() > 20 {
                    return Err("its sparse map has a line that is not a number");
                }
                continue;
            }
            let number = pax::parse_number(&self.line);
            let number = number.ok_or("its sparse map has a line that is not a number")?;
            self.line.clear();
            let Some(count) = self.count else {
                if number > MOST_READ as u64 {
                    return Err("its sparse map is too long");
                }
                self.count = Some(number);
                if number == 0 {
                    return Ok(true);
                }
                continue;
            };
            self.numbers.push(number);
            if self.numbers.len() as u64 == 2 * count {
                return Ok(true);
            }
        }
        Ok(false)
    }

    pub(super) fn runs(self) -> Vec<Run> {
        pairs(&self.numbers)
    }
}

fn pairs(numbers: &[u64]) -> Vec<Run> {
    let (pairs, _) = numbers.as_chunks::<2>();
    let run = |&[offset, length]: &[u64; 2]| Run { offset, length };
    pairs.iter().map(run).collect()
}

/// GNU's maps 0.0 (a record for each number) and 0.1 (one record with all of them).
pub(super) fn from_records(records: &[Record<'_>]) -> Result<Vec<Run>, &'static str> {
    const BAD: &str = "its sparse map has an unknown form";
    let mut numbers = Vec::new();
    let mut count = None;
    let number = |text: &[u8], numbers: &mut Vec<u64>| {
        if numbers.len() == 2 * MOST_READ {
            return Err("its sparse map is too long");
        }
        numbers.push(pax::parse_number(text).ok_or(BAD)?);
        Ok(())
    };
    for (key, value) in records {
        match *key {
            b"GNU.sparse.numblocks" => count = Some(pax::parse_number(value).ok_or(BAD)?),
            b"GNU.sparse.offset" if numbers.len() % 2 == 0 => number(value, &mut numbers)?,
            b"GNU.sparse.numbytes" if numbers.len() % 2 == 1 => number(value, &mut numbers)?,
            // Of a file that is one hole.
            b"GNU.sparse.map" if value.is_empty() => {}
            b"GNU.sparse.map" if numbers.is_empty() => {
                for text in value.split(|&byte| byte == b',') {
                    number(text, &mut numbers)?;
                }
            }
            b"GNU.sparse.offset" | b"GNU.sparse.numbytes" | b"GNU.sparse.map" => return Err(BAD),
            _ => {}
        }
    }
    if numbers.len() % 2 == 1 || count.is_some_and(|count| count != numbers.len() as u64 / 2) {
        return Err(BAD);
    }
    Ok(pairs(&numbers))
}

/// GNU's old map: adds the runs of one block, up to the first that is blank. The header has some,
/// blocks of their own have the others.
pub(super) fn old(map: &[GnuSparseHeader], runs: &mut Vec<Run>) -> Result<(), &'static str> {
    for run in map {
        if run.offset[0] == 0 {
            return Ok(());
        }
        let number = |field: &[u8]| header::number(field).and_then(|n| u64::try_from(n).ok());
        let (Some(offset), Some(length)) = (number(&run.offset), number(&run.numbytes)) else {
            return Err("its sparse map has an unknown form");
        };
        if runs.len() == MOST_READ {
            return Err("its sparse map is too long");
        }
        runs.push(Run { offset, length });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    fn runs_of(size: u64, data: &[(u64, &[u8])]) -> Vec<(u64, u64)> {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(size).expect("truncate");
        for (at, bytes) in data {
            file.write_all_at(bytes, *at).expect("write");
        }
        let found = |file: &File| {
            let mut scratch = vec![0; 65_536];
            let runs = find(file, size, &mut scratch).expect("find");
            let pair = |run: &Run| (run.offset, run.length);
            runs.iter().map(pair).collect::<Vec<_>>()
        };
        let sparse = found(&file);
        // The same with every hole allocated.
        let full = tempfile::tempfile().expect("a file");
        full.write_all_at(&vec![0; usize::try_from(size).expect("small")], 0)
            .expect("write");
        for (at, bytes) in data {
            full.write_all_at(bytes, *at).expect("write");
        }
        assert_eq!(found(&full), sparse);
        sparse
    }

    #[test]
    fn holes_are_aligned_runs_of_zeros_whatever_is_allocated() {
        let g = GRAIN;
        assert_eq!(runs_of(0, &[]), []);
        assert_eq!(runs_of(g - 1, &[]), [(0, g - 1)]);
        assert_eq!(runs_of(g, &[]), []);
        assert_eq!(runs_of(g + 1, &[]), [(g, 1)]);
        assert_eq!(runs_of(10 * g, &[(3 * g + 7, b"x")]), [(3 * g, g)]);
        assert_eq!(runs_of(10 * g, &[(4 * g - 1, b"xy")]), [(3 * g, 2 * g)]);
        assert_eq!(runs_of(3 * g + 5, &[(0, b"x")]), [(0, g), (3 * g, 5)]);
    }

    #[test]
    fn a_file_that_has_shrunk_is_not_searched_to_its_former_end() {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(GRAIN).expect("truncate");
        file.write_all_at(b"x", 0).expect("write");
        let runs = find(&file, 1 << 62, &mut vec![0; 65_536]).expect("find");
        assert_eq!(runs, whole(1 << 62));
    }

    #[test]
    fn a_map_comes_back_and_a_bad_one_does_not() {
        let run = |offset, length| Run { offset, length };
        let runs = vec![run(0, 5), run(100, 7)];
        let mut reader = MapReader::default();
        let text = map(&runs, 200);
        assert_eq!(&text[..19], b"3\n0\n5\n100\n7\n200\n0\n\0");
        let block = text.as_slice().try_into().expect("a block");
        assert!(reader.block(block).expect("read"));
        assert_eq!(checked(reader.runs(), 200, 12).as_ref(), Ok(&runs));
        for (runs, size, stored) in [
            (vec![run(5, 5), run(0, 5)], 100, 10),
            (vec![run(0, 6), run(5, 5)], 100, 11),
            (vec![run(0, 5)], 4, 5),
            (vec![run(0, 5)], 100, 6),
            (vec![run(u64::MAX, 2)], 100, 2),
            (vec![run(1, u64::MAX), run(1, 1)], u64::MAX, 0),
        ] {
            checked(runs, size, stored).expect_err("it lies");
        }
    }
}
