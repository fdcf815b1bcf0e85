//! Tables as kubectl prints them: a header, columns as wide as their widest cell, three spaces between.
//! It knows nothing of what is in them.

use std::io::{self, Write};

/// A table of text.
pub(super) struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(super) fn new(header: &[&str]) -> Self {
        Self {
            rows: vec![header.iter().map(|cell| (*cell).to_owned()).collect()],
        }
    }

    /// Adds a row; an empty cell is shown as `-`, so that columns can be counted.
    pub(super) fn row(&mut self, cells: Vec<String>) {
        let shown = cells
            .into_iter()
            .map(|cell| if cell.is_empty() { "-".into() } else { cell });
        self.rows.push(shown.collect());
    }

    pub(super) fn write(&self, to: &mut impl Write) -> io::Result<()> {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        for row in &self.rows {
            let mut line = String::new();
            for (cell, width) in row.iter().zip(&widths) {
                line.push_str(cell);
                line.extend(std::iter::repeat_n(' ', width + 3 - cell.chars().count()));
            }
            writeln!(to, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_by_characters() {
        let mut table = Table::new(&["KEY", "SIZE"]);
        table.row(vec!["größer".into(), "1 B".into()]);
        table.row(vec![String::new(), "10 MiB".into()]);
        let mut text = Vec::new();
        table.write(&mut text).expect("a Vec takes all");
        assert_eq!(
            String::from_utf8(text).expect("text"),
            "KEY      SIZE\ngrößer   1 B\n-        10 MiB\n"
        );
    }
}
