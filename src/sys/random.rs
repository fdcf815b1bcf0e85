//! Random bytes of the kernel, for ids and numbers that no other process makes. They are good for
//! keys, too.

/// Random bytes.
///
/// # Panics
/// If the kernel has none. Linux has had getrandom(2) since 3.17, and it only fails before that.
#[must_use]
pub fn random_bytes<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).expect("Linux has had getrandom(2) since 3.17");
    bytes
}

/// 128 random bits.
///
/// # Panics
/// As [`random_bytes`].
#[must_use]
pub fn random() -> u128 {
    u128::from_le_bytes(random_bytes())
}
