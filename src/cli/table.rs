//! Tables as kubectl prints them: a header, columns as wide as their widest cell, three spaces
//! between. It knows nothing of what is in them.

use std::io::{self, Write};

use super::human::cut;

/// Between two columns.
const GAP: usize = 3;
/// No column is cut to less.
const NARROWEST: usize = 12;

/// A table of text, written at once or piece by piece.
pub(super) struct Table {
    /// The rows to write, the header first.
    rows: Vec<Vec<String>>,
    /// Whether a column may be cut.
    flexible: Vec<bool>,
    widths: Vec<usize>,
    width: Option<usize>,
}

impl Table {
    /// The name of each column, and whether it may be cut so that a line fits into `width`
    /// characters.
    pub(super) fn new(columns: Vec<(&str, bool)>, width: Option<usize>) -> Self {
        let (header, flexible): (Vec<String>, Vec<bool>) = columns
            .into_iter()
            .map(|(name, flexible)| (name.to_owned(), flexible))
            .unzip();
        Self {
            widths: vec![0; header.len()],
            rows: vec![header],
            flexible,
            width,
        }
    }

    /// Adds a row; an empty cell is shown as `-`, so that columns can be counted.
    pub(super) fn row(&mut self, cells: Vec<String>) {
        let shown = cells
            .into_iter()
            .map(|cell| if cell.is_empty() { "-".into() } else { cell });
        self.rows.push(shown.collect());
    }

    /// Writes what was not written yet.
    pub(super) fn write(&mut self, to: &mut impl Write) -> io::Result<()> {
        for row in &self.rows {
            for (width, cell) in self.widths.iter_mut().zip(row) {
                *width = (*width).max(cell.chars().count());
            }
        }
        self.fit();
        for row in self.rows.drain(..) {
            let mut line = String::new();
            for (cell, width) in row.iter().zip(&self.widths) {
                let cell = cut(cell, *width);
                line.push_str(&cell);
                line.extend(std::iter::repeat_n(' ', width + GAP - cell.chars().count()));
            }
            writeln!(to, "{}", line.trim_end())?;
        }
        Ok(())
    }

    /// Cuts the widest of those columns that may be cut until a line fits.
    fn fit(&mut self) {
        let Some(width) = self.width else { return };
        let gaps = GAP * self.widths.len().saturating_sub(1);
        while self.widths.iter().sum::<usize>() + gaps > width {
            let cuttable = self.widths.iter_mut().zip(&self.flexible);
            let cuttable = cuttable.filter(|(width, flexible)| **flexible && **width > NARROWEST);
            match cuttable.map(|(width, _)| width).max() {
                Some(widest) => *widest -= 1,
                None => return,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(table: &mut Table) -> String {
        let mut text = Vec::new();
        table.write(&mut text).expect("a Vec takes all");
        String::from_utf8(text).expect("text")
    }

    #[test]
    fn columns_are_aligned_by_characters() {
        let mut table = Table::new(vec![("KEY", false), ("SIZE", false)], None);
        table.row(vec!["größer".into(), "1 B".into()]);
        table.row(vec![String::new(), "10 MiB".into()]);
        assert_eq!(
            written(&mut table),
            "KEY      SIZE\ngrößer   1 B\n-        10 MiB\n"
        );
        // Later rows continue the table.
        table.row(vec!["a".into(), "2 B".into()]);
        assert_eq!(written(&mut table), "a        2 B\n");
        assert_eq!(written(&mut table), "");
    }

    #[test]
    fn the_widest_columns_that_may_be_cut_are() {
        let columns = vec![("ID", false), ("POD", true), ("NAME", true)];
        let mut table = Table::new(columns, Some(40));
        table.row(vec!["0123456789".into(), "short".into(), "n".repeat(50)]);
        table.row(vec!["1".into(), "p".repeat(30), "name".into()]);
        let text = written(&mut table);
        let longest = text.lines().map(|line| line.chars().count()).max();
        assert_eq!(longest, Some(40), "{text}");
        assert!(
            text.contains("0123456789") && text.contains("short"),
            "{text}"
        );
        assert!(text.contains("ppp…") && text.contains("nnn…"), "{text}");
        // Where nothing can be cut any more it is as wide as it is.
        let mut table = Table::new(vec![("ID", false), ("POD", true)], Some(20));
        table.row(vec!["i".repeat(20), "p".repeat(20)]);
        assert!(written(&mut table).contains(&"i".repeat(20)));
    }
}
