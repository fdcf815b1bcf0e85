//! The rows of the table: results, goals, and their output. Nothing is measured here.
//! `target/bench.json` is the same table for programs.

use std::fmt::{self, Write as _};

use serde::Serialize;

/// The goal of a row.
#[derive(Debug, Clone, Copy)]
pub enum Goal {
    /// The result divided by the baseline is at most this.
    Ratio(f64),
    /// The result divided by the baseline is at least this.
    Share(f64),
    /// The result is at most this, in the row's unit.
    AtMost(f64),
    /// None: the row reports.
    None,
}

/// A row.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    name: String,
    unit: &'static str,
    ours: f64,
    baseline: Option<f64>,
    ratio: Option<f64>,
    goal: String,
    met: bool,
}

impl Row {
    /// A row, with or without a baseline from the same run.
    pub fn new(
        name: impl Into<String>,
        unit: &'static str,
        ours: f64,
        baseline: Option<f64>,
        goal: Goal,
    ) -> Self {
        let ratio = baseline.map(|baseline| ours / baseline);
        let compared = ratio.unwrap_or(f64::NAN);
        let (goal, met) = match goal {
            Goal::Ratio(most) => (format!("<= {most} x"), compared <= most),
            Goal::Share(least) => (format!(">= {:.0} %", least * 100.0), compared >= least),
            Goal::AtMost(most) => (format!("<= {most} {unit}"), ours <= most),
            Goal::None => ("-".to_owned(), true),
        };
        Self {
            name: name.into(),
            unit,
            ours,
            baseline,
            ratio,
            goal,
            met,
        }
    }

    /// Whether it reached its goal.
    pub fn met(&self) -> bool {
        self.met
    }
}

/// A line of the table.
impl fmt::Display for Row {
    fn fmt(&self, text: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = |value: f64| {
            let digits = usize::from(value < 10.0) + usize::from(value < 1.0) * 2;
            format!("{value:.digits$} {}", self.unit)
        };
        let dash = || "-".to_owned();
        write!(
            text,
            "{:<58} {:>11} {:>11} {:>6}  {:<11} {}",
            self.name,
            number(self.ours),
            self.baseline.map_or_else(dash, number),
            self.ratio.map_or_else(dash, |ratio| format!("{ratio:.2}")),
            self.goal,
            if self.met { "yes" } else { "NO" }
        )
    }
}

/// The table as text.
pub fn render(rows: &[Row]) -> String {
    let mut text = format!(
        "{:<58} {:>11} {:>11} {:>6}  {:<11} {}\n",
        "ROW", "OURS", "BASELINE", "RATIO", "GOAL", "MET"
    );
    for row in rows {
        let _ = writeln!(text, "{row}");
    }
    text
}

/// The median.
pub fn median(figures: impl IntoIterator<Item = f64>) -> f64 {
    let mut figures: Vec<f64> = figures.into_iter().collect();
    figures.sort_by(f64::total_cmp);
    figures.get(figures.len() / 2).copied().unwrap_or(f64::NAN)
}
