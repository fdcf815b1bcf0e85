//! The pieces that a large file is sent in, and the limits of a table: constants that all parts of
//! the format share.

/// A chunk of a large file, the longest piece and the longest frame.
pub(super) const CHUNK: u64 = 4 << 20;
/// The largest table.
pub(super) const MOST_TABLE: u64 = 4 << 30;
/// The most pieces of zeros in files of several pieces that a table is made for: 512 GiB, in 4 MiB
/// of digests. A hole takes no space in its layer, and 32 bytes for each 4 MiB in the table.
pub(super) const MOST_HOLES: u64 = 128 << 10;
/// A SHA-256. Of a piece that is all zeros it is all zeros.
pub(super) type Sha256Sum = [u8; 32];
pub(super) const ZEROS: Sha256Sum = [0; 32];

/// How many pieces a file of so many bytes has.
pub(super) fn pieces(size: u64) -> u64 {
    size.div_ceil(CHUNK)
}
