//! zstd frames that hold their bytes as they are: uncompressed, for links that are faster than the
//! processor compresses (RFC 8878, section 3.1.1).

const MAGIC: u32 = 0xFD2F_B528;
/// The frame is one segment, its length is known in 4 bytes, and it has no checksum.
const DESCRIPTOR: u8 = 0b1010_0000;
/// The longest block.
const BLOCK: usize = 128 << 10;

/// Appends a frame of these bytes. They are at most 4 MiB, and not none.
pub(super) fn store(plain: &[u8], into: &mut Vec<u8>) {
    let length = u32::try_from(plain.len()).expect("at most 4 MiB");
    into.extend(MAGIC.to_le_bytes());
    into.push(DESCRIPTOR);
    into.extend(length.to_le_bytes());
    let mut left = plain.chunks(BLOCK).len();
    for block in plain.chunks(BLOCK) {
        left -= 1;
        let is_last = u32::from(left == 0);
        // The type of a block that is not compressed is 0.
        let header = is_last | u32::try_from(block.len()).expect("128 KiB") << 3;
        into.extend(&header.to_le_bytes()[..3]);
        into.extend(block);
    }
}

#[cfg(test)]
mod tests {
    use super::super::record::most_packed;
    use super::*;

    #[test]
    fn zstd_reads_frames_of_any_length() {
        for length in [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 4 << 20] {
            let bytes = (0..length).map(|index| (index >> 3).to_le_bytes()[0]);
            let plain: Vec<u8> = bytes.collect();
            let mut packed = Vec::new();
            store(&plain, &mut packed);
            assert!(packed.len() as u64 <= most_packed(length as u64));
            let read = zstd::bulk::decompress(&packed, length).expect("zstd reads it");
            assert!(read == plain, "{length}");
        }
    }
}
