//! A guest's job and its reports: plain values, as JSON, known to both sides.

use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

use super::facts::Fact;
use super::verdict::Verdict;
use super::work::Ground;

/// The word of the kernel's command line that has the job.
const KEY: &str = "guest.job=";

/// The task of a guest.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum Job {
    /// Runs test programs that are in its image.
    Suites(Vec<Suite>),
    /// Records the writes of a life on the first disk.
    Record {
        ground: Ground,
        seed: u64,
        steps: u64,
    },
    /// Looks at what the life with the seed `before` left on the first disk, and lives until the
    /// machine dies.
    Live {
        ground: Ground,
        seed: u64,
        before: Option<u64>,
    },
    /// Has a disk refuse to write for a while, and looks at what it does to the pool on it.
    Shake {
        ground: Ground,
        shaken: Shaken,
        seed: u64,
    },
    /// Cuts what was recorded on the first disk.
    Sweep {
        ground: Ground,
        seed: u64,
        count: u64,
    },
}

/// The parts of a filesystem on the disk that refuses writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Shaken {
    /// All of it.
    All,
    /// The content of files (xfs).
    Data,
}

/// One test program.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Suite {
    /// Its name, as cargo knows it.
    pub(crate) name: String,
    /// The arguments: tests to run or to skip.
    pub(crate) arguments: Vec<String>,
}

/// The reports of a guest.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum Report {
    /// The kernel is up; the job begins.
    Up,
    /// A line for a person who watches.
    Said(String),
    /// A test ended.
    Test {
        suite: String,
        name: String,
        passed: bool,
    },
    /// Something is durable, or about to go.
    Promised(Fact),
    /// The next operation begins.
    Working,
    /// So many operations were done.
    Worked(u64),
    /// The power was cut, so and so, and this was found.
    Looked(String, Verdict),
    /// A failed operation with its details.
    Failed(String),
    /// All is done.
    Done,
}

impl Job {
    /// For the kernel's command line, in which blanks and quotes have a meaning.
    pub(crate) fn argument(&self) -> String {
        let json = serde_json::to_vec(self).expect("plain data serialises");
        let mut text = KEY.to_owned();
        for byte in json {
            let _ = write!(text, "{byte:02x}");
        }
        text
    }

    /// From the kernel's command line.
    pub(crate) fn from_command_line(line: &str) -> Option<Self> {
        let word = line.split_whitespace().find_map(|w| w.strip_prefix(KEY))?;
        let bytes: Option<Vec<u8>> = (0..word.len() / 2)
            .map(|at| u8::from_str_radix(word.get(2 * at..2 * at + 2)?, 16).ok())
            .collect();
        serde_json::from_slice(&bytes?).ok()
    }
}
