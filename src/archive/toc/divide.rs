//! Divides a frame into pieces: a frame has only its bytes, and the table says where they belong.
//! Only the division: `take` verifies the pieces and writes them.

use std::sync::Arc;

use super::super::error::{Error, Result};
use super::piece::{CHUNK, Sha256Sum, ZEROS, pieces};
use super::record::Frame;
use super::row::{Kind, Row};
use super::table::{Cursor, Table};

/// A piece of a file, and where it belongs.
pub(super) struct Piece<'a> {
    /// The path of its file.
    pub(super) path: &'a [u8],
    pub(super) row: &'a Row,
    /// Bytes of its file.
    pub(super) size: u64,
    /// Its place in its file, and among all pieces of the layer.
    pub(super) place: u64,
    pub(super) number: u64,
    /// What the table says of it.
    pub(super) digest: Sha256Sum,
    pub(super) bytes: &'a [u8],
}

/// Divides frames of one layer. It is fast where they come in the order of the table.
#[derive(Debug)]
pub(super) struct Divider {
    files: u64,
    cursor: Cursor<Arc<Table>>,
    /// The file at the cursor, and its index.
    row: Option<(u64, Row)>,
}

impl Divider {
    pub(super) fn new(table: Arc<Table>) -> Self {
        Self {
            files: table.files(),
            cursor: Cursor::new(table),
            row: None,
        }
    }

    /// Goes to the file of this index.
    fn seek(&mut self, file: u64) -> Result<()> {
        if self.row.as_ref().is_none_or(|(there, _)| *there != file) {
            self.row = None;
            self.row = Some((file, self.cursor.seek(file)?));
        }
        Ok(())
    }

    /// Calls `each` for each piece of a frame whose bytes are `plain`. A frame that does not
    /// consist of whole pieces of the layer is refused, perhaps after some calls.
    pub(super) fn divide(
        &mut self,
        frame: &Frame,
        mut plain: &[u8],
        mut each: impl FnMut(&Piece<'_>) -> Result<()>,
    ) -> Result<()> {
        let (mut file, mut offset) = (frame.file, frame.offset);
        loop {
            self.seek(file)?;
            let size = match self.row {
                Some((
                    _,
                    Row {
                        kind: Kind::File { size },
                        ..
                    },
                )) => size,
                _ => 0,
            };
            if offset % CHUNK != 0 || (offset >= size && offset > 0) {
                return Err(wrong(frame, "it does not begin with a piece of a file"));
            }
            for place in offset / CHUNK..pieces(size) {
                if plain.is_empty() {
                    break;
                }
                let digest = self.cursor.digest(place)?;
                if digest == ZEROS {
                    continue;
                }
                let length = (size - place * CHUNK).min(CHUNK);
                let length = usize::try_from(length).expect("at most 4 MiB");
                let (bytes, rest) = plain
                    .split_at_checked(length)
                    .ok_or_else(|| wrong(frame, "it does not end with a piece of a file"))?;
                plain = rest;
                let (_, row) = self.row.as_ref().expect("it was read");
                each(&Piece {
                    path: self.cursor.path(),
                    row,
                    size,
                    place,
                    number: self.cursor.piece() + place,
                    digest,
                    bytes,
                })?;
            }
            if plain.is_empty() {
                return Ok(());
            }
            (file, offset) = (file + 1, 0);
            if file == self.files {
                return Err(wrong(frame, "it has more than the layer"));
            }
        }
    }
}

pub(super) fn wrong(frame: &Frame, why: &str) -> Error {
    Error::Refused {
        path: format!("the frame of file {} at {}", frame.file, frame.offset),
        why: why.to_owned(),
    }
}
