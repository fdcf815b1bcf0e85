//! The pax records of an extended header, for one entry. This module decides which records are
//! accepted and which are errors. `read` applies them to the entry.

use super::{MOST_NAME, NO_ID};
use crate::archive::acl;
use crate::archive::marks::{self, Mark};
use crate::archive::pax;
use crate::archive::walk::MOST_ATTRIBUTES;

/// What the records of an extended header say.
#[derive(Default)]
pub(super) struct Facts {
    pub(super) path: Option<Vec<u8>>,
    pub(super) link: Option<Vec<u8>>,
    pub(super) size: Option<u64>,
    pub(super) uid: Option<u32>,
    pub(super) gid: Option<u32>,
    pub(super) mtime: Option<(i64, u32)>,
    pub(super) sparse: bool,
    pub(super) sparse_version: (Option<u64>, Option<u64>),
    pub(super) sparse_name: Option<Vec<u8>>,
    pub(super) sparse_size: Option<u64>,
    pub(super) xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    /// After the others: the mode and the owner are settled then.
    pub(super) acls: Vec<(Vec<u8>, Vec<u8>)>,
    pub(super) left_out: u64,
    pub(super) mark: Option<Mark>,
}

impl Facts {
    /// Takes a record in.
    pub(super) fn take(&mut self, key: &[u8], value: &[u8]) -> Result<(), &'static str> {
        match key {
            b"path" => self.path = text(value)?,
            b"linkpath" => self.link = text(value)?,
            b"size" => self.size = optional(value, number)?,
            b"uid" => self.uid = optional(value, id)?,
            b"gid" => self.gid = optional(value, id)?,
            b"mtime" => self.mtime = optional(value, time)?,
            b"GNU.sparse.name" => {
                self.sparse = true;
                self.sparse_name = text(value)?;
            }
            b"GNU.sparse.major" => {
                self.sparse = true;
                self.sparse_version.0 = Some(number(value)?);
            }
            b"GNU.sparse.minor" => {
                self.sparse = true;
                self.sparse_version.1 = Some(number(value)?);
            }
            b"GNU.sparse.realsize" | b"GNU.sparse.size" => {
                self.sparse = true;
                self.sparse_size = Some(number(value)?);
            }
            key if key.starts_with(b"GNU.sparse.") => self.sparse = true,
            // star's own way of sparse files.
            b"SCHILY.realsize" => return Err("it is sparse in an unknown format"),
            marks::RECORD => self.mark = optional(value, Mark::parse)?,
            key if key.starts_with(b"BAGGAGECLAIM.") => {
                return Err("it is a record without a version");
            }
            b"SCHILY.acl.access" => self.acl(b"system.posix_acl_access", value)?,
            b"SCHILY.acl.default" => self.acl(b"system.posix_acl_default", value)?,
            key => {
                if let Some(name) = key.strip_prefix(b"SCHILY.xattr.") {
                    self.attribute(pax::unescape(name), value)?;
                }
            }
        }
        Ok(())
    }

    fn acl(&mut self, name: &[u8], value: &[u8]) -> Result<(), &'static str> {
        replace(&mut self.acls, name.to_vec(), acl::from_text(value)?)
    }

    fn attribute(&mut self, name: Vec<u8>, value: &[u8]) -> Result<(), &'static str> {
        if name.len() > MOST_NAME || name.contains(&0) {
            return Err("an attribute's name is too long or has a NUL");
        }
        match &*name {
            // Not an empty name behind the dot.
            [b'u', b's', b'e', b'r', b'.', _, ..] | b"security.capability" => {
                replace(&mut self.xattrs, name, value.to_vec())?;
            }
            b"system.posix_acl_access" | b"system.posix_acl_default" => {
                replace(&mut self.acls, name, value.to_vec())?;
            }
            _ => self.left_out += 1,
        }
        Ok(())
    }
}

/// The last of several records of a key counts (POSIX, pax Header Block).
fn replace(
    list: &mut Vec<(Vec<u8>, Vec<u8>)>,
    name: Vec<u8>,
    value: Vec<u8>,
) -> Result<(), &'static str> {
    list.retain(|(there, _)| *there != name);
    list.push((name, value));
    let fits = list.len() <= MOST_ATTRIBUTES;
    fits.then_some(()).ok_or("it has too many attributes")
}

/// An empty value cancels an earlier record.
pub(super) fn optional<T>(
    value: &[u8],
    parse: impl Fn(&[u8]) -> Result<T, &'static str>,
) -> Result<Option<T>, &'static str> {
    (!value.is_empty()).then(|| parse(value)).transpose()
}

fn text(value: &[u8]) -> Result<Option<Vec<u8>>, &'static str> {
    if value.contains(&0) {
        return Err("it has a NUL");
    }
    Ok((!value.is_empty()).then(|| value.to_vec()))
}

fn number(value: &[u8]) -> Result<u64, &'static str> {
    pax::parse_number(value).ok_or("it is not a number, or negative or too large")
}

pub(super) fn id(value: &[u8]) -> Result<u32, &'static str> {
    let id = u32::try_from(number(value)?).ok();
    id.filter(|&id| id != NO_ID).ok_or("it is too large")
}

pub(super) fn time(value: &[u8]) -> Result<(i64, u32), &'static str> {
    pax::parse_time(value).ok_or("it is not a time")
}
