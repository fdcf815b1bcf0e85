//! How far something is: a line on a terminal that is written again and again; for an export or
//! import plain lines now and then elsewhere. All of it goes to stderr. The caller says what it
//! counts.

use std::cell::Cell;
use std::fmt::Write as _;
use std::io::{self, IsTerminal as _, Write as _};
use std::time::{Duration, Instant};

use super::human::{age, bytes, counted};

/// How often a terminal's line is written again.
const REDRAW: Duration = Duration::from_millis(100);
/// How often a line is written elsewhere.
const REPEAT: Duration = Duration::from_secs(10);
/// How many cells a bar has.
const CELLS: usize = 20;

/// How much is done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Done {
    /// Bytes.
    pub(super) bytes: u64,
    /// Names, directories too.
    pub(super) entries: u64,
}

/// Shows how far something is.
#[derive(Debug)]
pub(super) struct Bar {
    /// How many bytes there will be, as far as that is known.
    total: Option<u64>,
    began: Instant,
    shown: Cell<Instant>,
    on_terminal: bool,
}

impl Bar {
    pub(super) fn new(total: Option<u64>) -> Self {
        let now = Instant::now();
        Self {
            total,
            began: now,
            shown: Cell::new(now),
            on_terminal: io::stderr().is_terminal(),
        }
    }

    /// Sets the expected number of bytes.
    pub(super) fn expect(&mut self, total: Option<u64>) {
        self.total = total;
    }

    /// Shows how far it is, if it is time to.
    pub(super) fn show(&mut self, done: Done) {
        if !self.is_time() {
            return;
        }
        let line = line(done, self.total, self.began.elapsed());
        if self.on_terminal {
            redraw(&line);
        } else {
            // Ignore a closed stderr.
            let _shown = writeln!(io::stderr(), "{line}");
        }
    }

    /// Shows this on a terminal, if it is time to; elsewhere nothing.
    pub(super) fn line(&self, line: &str) {
        if self.on_terminal && self.is_time() {
            redraw(line);
        }
    }

    fn is_time(&self) -> bool {
        let pause = if self.on_terminal { REDRAW } else { REPEAT };
        let is_time = self.shown.get().elapsed() >= pause;
        if is_time {
            self.shown.set(Instant::now());
        }
        is_time
    }

    /// Writes a separate line.
    pub(super) fn say(&self, line: &str) {
        self.clear();
        let _said = writeln!(io::stderr(), "{line}");
    }

    /// How long it took until now.
    pub(super) fn took(&self) -> Duration {
        self.began.elapsed()
    }

    /// Takes the line away.
    fn clear(&self) {
        if self.on_terminal {
            let _cleared = write!(io::stderr(), "\r\x1b[K");
        }
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.clear();
    }
}

fn redraw(line: &str) {
    // A narrow terminal cuts the line. One that is wrapped could not be cleared. Ignore a closed
    // stderr.
    let _shown = write!(io::stderr(), "\r\x1b[K\x1b[?7l{line}\x1b[?7h");
}

fn line(done: Done, total: Option<u64>, took: Duration) -> String {
    let millis = u64::try_from(took.as_millis()).unwrap_or(u64::MAX).max(1);
    let rate = u64::try_from(u128::from(done.bytes) * 1000 / u128::from(millis));
    let rate = rate.unwrap_or(u64::MAX);
    let mut line = String::new();
    let total = total.filter(|total| *total > 0);
    if let Some(total) = total {
        // An estimate may be too small.
        let done = u128::from(done.bytes.min(total));
        let percent = done * 100 / u128::from(total);
        let full = usize::try_from(done * CELLS as u128 / u128::from(total)).unwrap_or(CELLS);
        let (full, empty) = ("#".repeat(full), ".".repeat(CELLS - full));
        line = format!("[{full}{empty}] {percent:>3}%  ");
    }
    let (size, rate_of) = (bytes(done.bytes), bytes(rate));
    let files = counted(done.entries, "file", "files");
    // Writing to a String cannot fail.
    let _ = write!(line, "{size}, {rate_of}/s, {files}");
    if let (Some(total), 1..) = (total, rate) {
        let left = total.saturating_sub(done.bytes).div_ceil(rate);
        if left > 0 {
            let left = age(Duration::from_secs(left));
            let _ = write!(line, ", about {left} left");
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_bytes_rate_files_and_the_time_left_where_the_size_is_known() {
        let done = |bytes, entries| Done { bytes, entries };
        let ten = Duration::from_secs(10);
        assert_eq!(
            line(done(50 << 20, 1200), Some(100 << 20), ten),
            "[##########..........]  50%  50 MiB, 5.0 MiB/s, 1200 files, about 10s left"
        );
        assert_eq!(
            line(done(50 << 20, 1200), None, ten),
            "50 MiB, 5.0 MiB/s, 1200 files"
        );
        assert_eq!(
            line(done(150, 1), Some(100), ten),
            "[####################] 100%  150 B, 15 B/s, 1 file"
        );
        assert_eq!(
            line(done(0, 0), Some(100), Duration::ZERO),
            "[....................]   0%  0 B, 0 B/s, 0 files"
        );
    }
}
