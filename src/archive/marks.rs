//! How a layer of a stack says in an archive what it deletes: by records of our own, or by names
//! that begin with `.wh.` towards OCI registries (image-spec, layer.md, "Whiteouts").
//!
//! Only the words are here. `pack` and `unpack::layer` write and obey them.

use super::error::{Error, Result, refused, shown};

/// How a layer's deletions are written in an archive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerMarks {
    /// As pax records of our own. Every name can be in such a layer.
    Records,
    /// As the OCI image specification has it: `.wh.NAME`, `.wh..wh..opq`.
    Oci,
}

/// The key of our own pax records, and its two values.
pub(super) const RECORD: &[u8] = b"BAGGAGECLAIM.layer";
pub(super) const WHITEOUT: &[u8] = b"whiteout";
pub(super) const OPAQUE: &[u8] = b"opaque";

const OCI_PREFIX: &[u8] = b".wh.";
/// Names of AUFS' own. Only the next of them means something.
const OCI_RESERVED: &[u8] = b".wh..wh.";
pub(super) const OCI_OPAQUE: &[u8] = b".wh..wh..opq";
/// The longest name that a filesystem takes.
const MOST_NAME: usize = 255;

/// The meaning of an entry in a layer, in addition to its header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mark {
    /// It deletes what the layers below have under its path.
    Whiteout,
    /// It is a directory, and hides what the layers below have in it.
    Opaque,
}

impl Mark {
    pub(super) fn parse(value: &[u8]) -> Result<Self, &'static str> {
        match value {
            WHITEOUT => Ok(Self::Whiteout),
            OPAQUE => Ok(Self::Opaque),
            _ => Err("it is an unknown mark of a layer"),
        }
    }
}

/// The path of the whiteout that deletes `path`.
pub(super) fn oci_whiteout(path: &[u8]) -> Result<Vec<u8>> {
    let name = last(path);
    if OCI_PREFIX.len() + name.len() > MOST_NAME {
        let why = "the name of its whiteout would be longer than 255 bytes";
        return Err(unpackable(path, why));
    }
    let parent = &path[..path.len() - name.len()];
    Ok([parent, OCI_PREFIX, name].concat())
}

/// Refuses a path that a reader would take for a whiteout.
pub(super) fn check_name(path: &[u8]) -> Result<()> {
    if last(path).starts_with(OCI_PREFIX) {
        let why = "in an OCI layer a name that begins with `.wh.` is a deletion";
        return Err(unpackable(path, why));
    }
    Ok(())
}

fn unpackable(path: &[u8], why: &'static str) -> Error {
    Error::Unpackable {
        path: shown(path),
        why,
    }
}

fn last(path: &[u8]) -> &[u8] {
    path.rsplit(|&byte| byte == b'/').next().unwrap_or(path)
}

/// The mark that an entry of an OCI layer is by its path, and the path that it is about.
pub(super) fn oci_mark(path: &[u8]) -> Result<Option<(Mark, Vec<u8>)>> {
    let name = last(path);
    let parent = &path[..path.len() - name.len()];
    let reserved = |name: &[u8]| name.starts_with(OCI_PREFIX);
    if parent.split(|&byte| byte == b'/').any(reserved) {
        return Err(refused(path, "it is below a whiteout"));
    }
    if name == OCI_OPAQUE {
        let parent = parent.strip_suffix(b"/").unwrap_or(parent);
        return Ok(Some((Mark::Opaque, parent.to_vec())));
    }
    if name.starts_with(OCI_RESERVED) {
        return Err(refused(path, "its name is reserved, and has no meaning"));
    }
    match name.strip_prefix(OCI_PREFIX) {
        None => Ok(None),
        Some(b"" | b"." | b"..") => Err(refused(path, "it is a whiteout of no name")),
        Some(name) => Ok(Some((Mark::Whiteout, [parent, name].concat()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_whiteout_is_about_the_name_behind_its_prefix() {
        let mark = |path: &[u8]| oci_mark(path).map_err(|error| error.to_string());
        let is = |mark: Mark, path: &[u8]| Ok(Some((mark, path.to_vec())));
        assert_eq!(mark(b".wh.a"), is(Mark::Whiteout, b"a"));
        assert_eq!(mark(b"d/e/.wh.a"), is(Mark::Whiteout, b"d/e/a"));
        assert_eq!(mark(b"d/e/.wh..wh..opq"), is(Mark::Opaque, b"d/e"));
        assert_eq!(mark(b".wh..wh..opq"), is(Mark::Opaque, b""));
        assert_eq!(mark(b"d/.wh"), Ok(None));
        for bad in [
            &b".wh."[..],
            b"d/.wh.",
            b".wh..",
            b"d/.wh...",
            b".wh.d/f",
            b"d/.wh..wh.plnk",
            b".wh..wh..opq/f",
        ] {
            mark(bad).expect_err(&bad.escape_ascii().to_string());
        }
        for path in [&b"a"[..], b"d/e/a", b"d/\xff"] {
            let whiteout = oci_whiteout(path).expect("it has one");
            assert_eq!(mark(&whiteout), is(Mark::Whiteout, path));
        }
        oci_whiteout(&[b'n'; 252]).expect_err("it is too long");
        check_name(b"d/.wh.x").expect_err("it would be a deletion");
    }
}
