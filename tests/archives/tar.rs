//! Hand-made tar streams, valid and invalid. Nothing is checked here: the test gives every byte.

/// A stream that grows.
#[derive(Clone, Default)]
pub(crate) struct Tar {
    pub(crate) bytes: Vec<u8>,
}

/// Sets the checksum of a header block.
pub(crate) fn seal(block: &mut [u8]) {
    block[148..156].fill(b' ');
    let sum: u64 = block.iter().map(|&byte| u64::from(byte)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
}

impl Tar {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// A header block, changed before its checksum is made.
    pub(crate) fn block(
        &mut self,
        name: &[u8],
        kind: u8,
        size: u64,
        change: impl FnOnce(&mut [u8]),
    ) {
        let mut block = [0; 512];
        block[..name.len().min(100)].copy_from_slice(&name[..name.len().min(100)]);
        block[100..108].copy_from_slice(b"0000644\0");
        block[108..116].copy_from_slice(b"0000000\0");
        block[116..124].copy_from_slice(b"0000000\0");
        block[124..136].copy_from_slice(format!("{size:011o}\0").as_bytes());
        block[136..148].copy_from_slice(b"00000000000\0");
        block[156] = kind;
        block[257..265].copy_from_slice(b"ustar\x0000");
        change(&mut block);
        seal(&mut block);
        self.bytes.extend_from_slice(&block);
    }

    /// Content, padded to a block.
    pub(crate) fn content(&mut self, content: &[u8]) {
        self.bytes.extend_from_slice(content);
        let length = self.bytes.len().next_multiple_of(512);
        self.bytes.resize(length, 0);
    }

    pub(crate) fn file(mut self, name: &str, content: &[u8]) -> Self {
        self.block(name.as_bytes(), b'0', content.len() as u64, |_| {});
        self.content(content);
        self
    }

    pub(crate) fn dir(mut self, name: &str) -> Self {
        self.block(name.as_bytes(), b'5', 0, |block| {
            block[100..108].copy_from_slice(b"0000755\0");
        });
        self
    }

    pub(crate) fn link(mut self, kind: u8, name: &str, target: &str) -> Self {
        self.block(name.as_bytes(), kind, 0, |block| {
            block[157..157 + target.len()].copy_from_slice(target.as_bytes());
        });
        self
    }

    pub(crate) fn symlink(self, name: &str, target: &str) -> Self {
        self.link(b'2', name, target)
    }

    pub(crate) fn hard(self, name: &str, target: &str) -> Self {
        self.link(b'1', name, target)
    }

    /// A header of another kind with content: `x`, `g`, `L`, `K`.
    pub(crate) fn special(mut self, kind: u8, content: &[u8]) -> Self {
        self.block(b"special", kind, content.len() as u64, |_| {});
        self.content(content);
        self
    }

    pub(crate) fn pax(self, records: &[(&str, &[u8])]) -> Self {
        let content: Vec<u8> = records.iter().flat_map(|(k, v)| record(k, v)).collect();
        self.special(b'x', &content)
    }

    pub(crate) fn end(mut self) -> Vec<u8> {
        self.bytes.extend_from_slice(&[0; 1024]);
        self.bytes
    }
}

/// A record that counts itself.
pub(crate) fn record(key: &str, value: &[u8]) -> Vec<u8> {
    let rest = key.len() + value.len() + 3;
    let length = (rest..rest + 20).find(|length| *length == rest + length.to_string().len());
    let head = format!("{} {key}=", length.expect("there is one"));
    [head.as_bytes(), value, b"\n"].concat()
}
