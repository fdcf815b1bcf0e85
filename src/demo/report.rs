//! The output: lines of progress during the run, then a table of volumes, the builds, and the
//! claims.

use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write as _};
use std::time::{Duration, Instant};

/// The widest line.
const WIDTH: usize = 100;

/// A volume, as the table shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Row {
    /// The step that had it.
    pub(super) step: String,
    /// Its type and its name.
    pub(super) volume: String,
    /// The duration of its publish, as kubelet saw it.
    pub(super) took: Duration,
    /// Whether the publish waited for the content to be sealed.
    pub(super) waited: bool,
    /// The files that the step saw at its end.
    pub(super) files: u64,
    /// The bytes that the step saw at its end.
    pub(super) bytes: u64,
    /// The disk space that it alone takes; `None` on a backend that shares blocks, where a walk
    /// cannot tell.
    pub(super) cost: Option<u64>,
}

/// A build, as the comparison shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Build {
    /// The cache that it used.
    pub(super) label: &'static str,
    /// How long it took.
    pub(super) took: Duration,
    /// The number of crates that it compiled.
    pub(super) compiled: usize,
}

/// A claim, and whether this run proved it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Claim {
    /// The claim.
    pub(super) text: String,
    /// The evidence.
    pub(super) seen: String,
    /// Whether the evidence proves it.
    pub(super) proved: bool,
}

/// The screen.
#[derive(Debug)]
pub(super) struct Screen {
    colour: bool,
    live: bool,
}

impl Screen {
    pub(super) fn new(colour: bool) -> Self {
        let live = io::stdout().is_terminal();
        Self {
            colour: colour && live,
            live,
        }
    }

    /// Prints a paragraph. Ignores a closed pipe: the demo runs on to its exit code.
    pub(super) fn print(text: &str) {
        let mut out = io::stdout().lock();
        let _ = writeln!(out, "{text}").and_then(|()| out.flush());
    }

    /// Prints the table, the builds and the claims.
    pub(super) fn report(&self, rows: &[Row], builds: &[Build], claims: &[Claim]) {
        Self::print(&format!(
            "\n{}\n{}\n{}",
            table(rows),
            comparison(builds),
            checklist(claims, self.colour)
        ));
    }

    /// Begins a line of progress.
    pub(super) fn begin(&self, step: &str, what: &str) -> Line {
        let text = format!("  {step:<10}  {what}");
        if self.live {
            let mut out = io::stdout().lock();
            let _ = write!(out, "{text} …").and_then(|()| out.flush());
        }
        Line {
            text,
            live: self.live,
            began: Instant::now(),
        }
    }
}

/// A line of progress.
#[derive(Debug)]
#[must_use]
pub(super) struct Line {
    text: String,
    live: bool,
    began: Instant,
}

impl Line {
    /// Completes the line; returns how long it took.
    pub(super) fn done(self, what: &str) -> Duration {
        let took = self.began.elapsed();
        let mut out = io::stdout().lock();
        let start = if self.live { "\r\x1b[K" } else { "" };
        let time = seconds(took);
        let mut text = self.text;
        if !what.is_empty() {
            let _ = write!(text, ": {what}");
        }
        let text = cut(&text, WIDTH - 10);
        let space = " ".repeat((WIDTH - 2 - time.len()).saturating_sub(text.chars().count()));
        let _ = writeln!(out, "{start}{text}{space}{time}").and_then(|()| out.flush());
        took
    }
}

/// The table of volumes.
pub(super) fn table(rows: &[Row]) -> String {
    let head = ["STEP", "VOLUME", "PUBLISH", "FILES", "SHOWS", "ON DISK"];
    let mut cells = vec![head.map(str::to_owned)];
    let mut last = "";
    for row in rows {
        let step = if row.step == last { "" } else { &row.step };
        last = &row.step;
        cells.push([
            step.to_owned(),
            cut(&row.volume, 34),
            format!(
                "{}{}",
                if row.waited { "waited " } else { "" },
                micros(row.took)
            ),
            thousands(row.files),
            bytes(row.bytes),
            row.cost.map_or_else(|| "shared".to_owned(), bytes),
        ]);
    }
    let width = |column: usize| cells.iter().map(|row| row[column].chars().count()).max();
    let widths: Vec<usize> = (0..head.len())
        .map(|column| width(column).unwrap_or(0))
        .collect();
    let mut text = String::new();
    for row in &cells {
        let mut line = String::from(" ");
        for (column, cell) in row.iter().enumerate() {
            let space = " ".repeat(widths[column] - cell.chars().count());
            if column < 2 {
                let _ = write!(line, " {cell}{space} ");
            } else {
                let _ = write!(line, " {space}{cell} ");
            }
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text.push_str(
        "  PUBLISH is NodePublishVolume as kubelet sees it; SHOWS and ON DISK are as the step left \
         them.\n",
    );
    text
}

/// The builds, and how much faster each was than the first.
pub(super) fn comparison(builds: &[Build]) -> String {
    const BAR: f64 = 24.0;
    let Some(first) = builds.first() else {
        return String::new();
    };
    let longest = builds
        .iter()
        .map(|build| build.took)
        .max()
        .unwrap_or_default();
    let longest = longest.as_secs_f64().max(1e-9);
    let mut text = String::new();
    for build in builds {
        let share = build.took.as_secs_f64() / longest * BAR;
        let blocks = (1..=24).filter(|n| f64::from(*n) <= share.max(1.0)).count();
        let factor = first.took.as_secs_f64() / build.took.as_secs_f64().max(1e-9);
        let factor = if std::ptr::eq(build, first) {
            String::new()
        } else {
            format!(", {factor:.1} times as fast")
        };
        let crates = if build.compiled == 1 {
            "crate"
        } else {
            "crates"
        };
        let _ = writeln!(
            text,
            "  {:<19} {:<24} {} ({} {crates} compiled{factor})",
            build.label,
            "#".repeat(blocks),
            seconds(build.took),
            build.compiled,
        );
    }
    text
}

/// The claims, proved or not.
pub(super) fn checklist(claims: &[Claim], colour: bool) -> String {
    let paint = |text: &str, code: &str| {
        if colour {
            format!("\x1b[{code}m{text}\x1b[0m")
        } else {
            text.to_owned()
        }
    };
    let mut text = String::from("  What this run proved:\n");
    for claim in claims {
        let mark = if claim.proved {
            paint("  ok  ", "32")
        } else {
            paint("FAILED", "1;31")
        };
        let _ = writeln!(text, "  {mark} {}", claim.text);
        let _ = writeln!(text, "         {}", claim.seen);
    }
    let failed = claims.iter().filter(|claim| !claim.proved).count();
    if failed > 0 {
        let _ = writeln!(text, "\n  {failed} of {} not proved.", claims.len());
    }
    text
}

/// Microseconds below 10 ms, milliseconds above.
pub(super) fn micros(duration: Duration) -> String {
    let micros = duration.as_micros();
    if micros < 10_000 {
        format!("{micros} µs")
    } else {
        format!("{} ms", duration.as_millis())
    }
}

/// Seconds with as many digits as matter.
pub(super) fn seconds(duration: Duration) -> String {
    let seconds = duration.as_secs_f64();
    if seconds < 10.0 {
        format!("{seconds:.2} s")
    } else {
        format!("{seconds:.1} s")
    }
}

/// Bytes in powers of 1000, as disks are sold.
pub(super) fn bytes(bytes: u64) -> String {
    let mut unit = "B";
    let mut tenths = u128::from(bytes) * 10;
    for next in ["kB", "MB", "GB", "TB"] {
        if tenths < 10_000 {
            break;
        }
        tenths /= 1000;
        unit = next;
    }
    if unit == "B" {
        format!("{bytes} B")
    } else {
        format!("{}.{} {unit}", tenths / 10, tenths % 10)
    }
}

/// A number with commas.
pub(super) fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

fn cut(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    let mut shorter: String = text.chars().take(width - 1).collect();
    shorter.push('…');
    shorter
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(
        step: &str,
        volume: &str,
        micros: u64,
        files: u64,
        bytes: u64,
        cost: Option<u64>,
    ) -> Row {
        Row {
            step: step.to_owned(),
            volume: volume.to_owned(),
            took: Duration::from_micros(micros),
            waited: false,
            files,
            bytes,
            cost,
        }
    }

    #[test]
    fn the_report_fits_a_terminal_and_reads_well() {
        let mut waited = row(
            "test",
            "input artifact/program",
            1_234_567,
            1,
            4_100_000,
            Some(8192),
        );
        waited.waited = true;
        let rows = [
            row(
                "get",
                "resource-cache sources",
                391,
                30_012,
                301_200_000,
                Some(322_000_000),
            ),
            row(
                "build 1",
                "input resource-cache/sources",
                402,
                30_012,
                301_200_000,
                Some(24_576),
            ),
            row(
                "build 1",
                "task-cache build",
                377,
                612,
                88_000_000,
                Some(92_100_000),
            ),
            row("build 1", "scratch", 9_999, 0, 0, Some(0)),
            waited,
            row("odd", &"x".repeat(80), 1, 999, 999, None),
        ];
        let builds = [
            Build {
                label: "cold",
                took: Duration::from_millis(14_230),
                compiled: 22,
            },
            Build {
                label: "with the task cache",
                took: Duration::from_millis(810),
                compiled: 1,
            },
        ];
        let claims = [
            Claim {
                text: "a fork is a view, not a copy".into(),
                seen: "3 forks show 903.6 MB and take 73.7 kB".into(),
                proved: true,
            },
            Claim {
                text: "nothing is left".into(),
                seen: "1 mount".into(),
                proved: false,
            },
        ];
        let text = format!(
            "{}\n{}\n{}",
            table(&rows),
            comparison(&builds),
            checklist(&claims, false)
        );
        assert!(
            text.lines().all(|line| line.chars().count() <= WIDTH),
            "{text}"
        );
        insta::assert_snapshot!(text);
    }

    #[test]
    fn numbers_are_short() {
        assert_eq!(thousands(0), "0");
        assert_eq!(thousands(999), "999");
        assert_eq!(thousands(1_234_567), "1,234,567");
        assert_eq!(bytes(999), "999 B");
        assert_eq!(bytes(1000), "1.0 kB");
        assert_eq!(bytes(999_949), "999.9 kB");
        assert_eq!(bytes(1_500_000_000), "1.5 GB");
        assert_eq!(micros(Duration::from_micros(9_999)), "9999 µs");
        assert_eq!(micros(Duration::from_millis(10)), "10 ms");
        assert_eq!(seconds(Duration::from_millis(10)), "0.01 s");
        assert_eq!(seconds(Duration::from_millis(12_340)), "12.3 s");
    }

    #[test]
    fn colours_are_only_where_they_are_wanted() {
        let claims = [Claim {
            text: "x".into(),
            seen: "y".into(),
            proved: true,
        }];
        assert!(!checklist(&claims, false).contains('\x1b'));
        assert!(checklist(&claims, true).contains("\x1b[32m"));
    }
}
