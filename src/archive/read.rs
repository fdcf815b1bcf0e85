//! A tar stream as entries, one after the other: pax, GNU, ustar, v7. Anything ambiguous is an
//! error.
//!
//! This module creates no files, and checks only the form of a path.

mod records;

use self::records::{Facts, id, optional, time};
use super::error::{Error, Result, refused, shown};
use super::header::{
    BLOCK, Block, EntryType, GnuExtSparseHeader, Header, flag, malformed, number, padding, unsigned,
};
use super::marks::Mark;
use super::pax::{self, Record};
use super::pipe::{Drain, Lent};
use super::progress::Limits;
use super::sparse::{self, MapReader, Run};
use super::walk::Look;

/// The longest extended header, and the longest of GNU's long names.
const MOST_SPECIAL: u64 = 1 << 20;
/// The longest name between slashes, and the longest target of a symlink: what Linux has.
const MOST_NAME: usize = 255;
const MOST_TARGET: usize = 4095;
/// To chown(2) this means "leave it".
const NO_ID: u32 = u32::MAX;

/// What an entry is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Kind {
    File,
    Directory,
    Symlink(Vec<u8>),
    /// The path of the file whose other name this is.
    HardLink(Vec<u8>),
    Fifo,
    Character(u32, u32),
    Block(u32, u32),
}

/// One entry, with all that the headers say about it.
#[derive(Debug)]
pub(super) struct Entry {
    /// Relative, without `.` and `..`; empty: the root.
    pub(super) path: Vec<u8>,
    pub(super) kind: Kind,
    pub(super) look: Look,
    /// Of a file.
    pub(super) size: u64,
    /// Of a file: where the bytes go that follow.
    pub(super) runs: Vec<Run>,
    /// Attributes that are taken, ACLs among them, by the kernel's names.
    pub(super) xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    /// How many attributes are not.
    pub(super) left_out: u64,
    /// Its meaning in a layer, from a `BAGGAGECLAIM.` record.
    pub(super) mark: Option<Mark>,
}

/// Owner and time from a global header, for all later entries.
#[derive(Default)]
struct Defaults {
    uid: Option<u32>,
    gid: Option<u32>,
    mtime: Option<(i64, u32)>,
}

/// The facts from the headers before an entry's own.
#[derive(Default)]
struct Said {
    pax: Option<Vec<u8>>,
    name: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
}

pub(super) struct Reader {
    drain: Drain,
    limits: Limits,
    /// Bytes of the entry's content that were not read, and of what fills its last block.
    left: u64,
    fill: u64,
    defaults: Defaults,
    entries: u64,
}

impl Reader {
    pub(super) fn new(drain: Drain, limits: Limits) -> Self {
        Self {
            drain,
            limits,
            left: 0,
            fill: 0,
            defaults: Defaults::default(),
            entries: 0,
        }
    }

    /// The next entry; `None` after the end mark, when nothing but zeros followed it.
    pub(super) fn next(&mut self) -> Result<Option<Entry>> {
        self.skip(self.left + self.fill)?;
        (self.left, self.fill) = (0, 0);
        let mut said = Said::default();
        loop {
            let at = self.drain.total();
            let block = self.block()?;
            if is_zero(&block) {
                if said.pax.is_some() || said.name.is_some() || said.link.is_some() {
                    return Err(malformed(at, "an extended header belongs to no entry"));
                }
                return self.end().map(|()| None);
            }
            let header = Header::parse(&block);
            let header = header.ok_or_else(|| malformed(at, "a header's checksum is wrong"))?;
            let once = |slot: &mut Option<Vec<u8>>, content| {
                let again = slot.replace(content).is_some();
                let two = || malformed(at, "an entry has two extended headers of one kind");
                (!again).then_some(()).ok_or_else(two)
            };
            match header.kind() {
                EntryType::XHeader => once(&mut said.pax, self.special(&header, at)?)?,
                EntryType::XGlobalHeader => {
                    let content = self.special(&header, at)?;
                    self.global(&content).map_err(|why| malformed(at, why))?;
                }
                EntryType::GNULongName => once(&mut said.name, self.special(&header, at)?)?,
                EntryType::GNULongLink => once(&mut said.link, self.special(&header, at)?)?,
                _ => {
                    self.entries += 1;
                    if self.entries > self.limits.entries {
                        return Err(limit("the number of its entries", self.limits.entries));
                    }
                    return self.entry(&header, &said, at).map(Some);
                }
            }
        }
    }

    /// The next bytes of the entry's content, at most so many and some at least; `None`: that was
    /// all.
    pub(super) fn content(&mut self, most: u64) -> Result<Option<Lent>> {
        let most = most.min(self.left);
        if most == 0 {
            return Ok(None);
        }
        let at = self.drain.total();
        let there = self.drain.fill()?.len();
        if there == 0 {
            return Err(Error::Truncated { at });
        }
        let length = usize::try_from(most).map_or(there, |most| most.min(there));
        self.left -= length as u64;
        Ok(Some(self.drain.lend(length)))
    }

    /// The content that comes next is long and goes to `at` of a file: see [`Drain::align`].
    pub(super) fn align(&self, at: u64) {
        self.drain.align(at);
    }

    fn block(&mut self) -> Result<Block> {
        let mut block = [0; BLOCK];
        self.exact(&mut block)?;
        Ok(block)
    }

    fn exact(&mut self, into: &mut [u8]) -> Result<()> {
        let mut done = 0;
        while done < into.len() {
            let at = self.drain.total();
            let bytes = self.drain.fill()?;
            if bytes.is_empty() {
                return Err(Error::Truncated { at });
            }
            let fits = bytes.len().min(into.len() - done);
            into[done..done + fits].copy_from_slice(&bytes[..fits]);
            self.drain.consume(fits);
            done += fits;
        }
        Ok(())
    }

    fn skip(&mut self, mut bytes: u64) -> Result<()> {
        while bytes > 0 {
            let at = self.drain.total();
            let there = self.drain.fill()?.len();
            if there == 0 {
                return Err(Error::Truncated { at });
            }
            let fits = there.min(usize::try_from(bytes).unwrap_or(usize::MAX));
            self.drain.consume(fits);
            bytes -= fits as u64;
        }
        Ok(())
    }

    /// After the first block of zeros: another, and then only zeros.
    fn end(&mut self) -> Result<()> {
        let at = self.drain.total();
        if !is_zero(&self.block()?) {
            return Err(malformed(at, "there is only one block of zeros at its end"));
        }
        loop {
            let at = self.drain.total();
            let bytes = self.drain.fill()?;
            if bytes.is_empty() {
                return Ok(());
            }
            if !is_zero(bytes) {
                return Err(malformed(at, "there is data after its end mark"));
            }
            let length = bytes.len();
            self.drain.consume(length);
        }
    }

    /// The content of an extended header. Its size is that of its own block, whatever other headers
    /// said.
    fn special(&mut self, header: &Header, at: u64) -> Result<Vec<u8>> {
        let size = unsigned(&header.fields().size, "size", at)?;
        if size > MOST_SPECIAL {
            return Err(limit("an extended header's size", MOST_SPECIAL));
        }
        let mut content = vec![0; usize::try_from(size).expect("it is below the limit")];
        self.exact(&mut content)?;
        self.skip(padding(size) as u64)?;
        Ok(content)
    }

    fn global(&mut self, content: &[u8]) -> Result<(), &'static str> {
        for (key, value) in pax::records(content)? {
            match key {
                b"uid" => self.defaults.uid = optional(value, id)?,
                b"gid" => self.defaults.gid = optional(value, id)?,
                b"mtime" => self.defaults.mtime = optional(value, time)?,
                b"path" | b"linkpath" | b"size" | b"SCHILY.realsize" => {
                    return Err("a global header names a path or a size");
                }
                key if [&b"GNU.sparse."[..], b"SCHILY.", b"BAGGAGECLAIM."]
                    .iter()
                    .any(|prefix| key.starts_with(prefix)) =>
                {
                    return Err("a global header has a sparse map, an attribute or a mark");
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn entry(&mut self, header: &Header, said: &Said, at: u64) -> Result<Entry> {
        let content = said.pax.as_deref().unwrap_or_default();
        let records = pax::records(content).map_err(|why| malformed(at, why))?;
        let mut facts = Facts::default();
        for &(key, value) in &records {
            facts
                .take(key, value)
                .map_err(|why| malformed(at, format!("{}: {why}", shown(key))))?;
        }
        let long = |name: &Option<Vec<u8>>| name.as_ref().map(|name| until_nul(name).to_vec());
        let raw = facts.sparse_name.take().or(facts.path.take());
        let raw = raw.or_else(|| long(&said.name));
        let raw = raw.unwrap_or_else(|| header.path());
        let path = self.path(&raw, &raw)?;
        let link = facts.link.take().or_else(|| long(&said.link));
        let link = link.unwrap_or_else(|| header.link().to_vec());
        let stored = match facts.size {
            Some(size) => size,
            None => unsigned(&header.fields().size, "size", at)?,
        };
        let kind = self.kind(header, &raw, link, stored, at)?;
        if kind != Kind::File && stored > 0 {
            return Err(malformed(
                at,
                "an entry of a kind without content has a size",
            ));
        }
        if i64::try_from(stored).is_err() {
            return Err(malformed(at, "its size is too large"));
        }
        self.left = stored;
        self.fill = padding(stored) as u64;
        let (size, runs) = self.runs(header, &kind, &facts, &records, stored, at)?;
        let mtime = match facts.mtime.or(self.defaults.mtime) {
            Some(mtime) => mtime,
            None => (of(&header.fields().mtime, "time", at)?, 0),
        };
        let default = |said: Option<u32>, default: Option<u32>, field, what| match said.or(default)
        {
            Some(id) => Ok(id),
            None => u32::try_from(of(field, what, at)?)
                .ok()
                .filter(|&id| id != NO_ID)
                .ok_or_else(|| malformed(at, format!("its {what} is negative or too large"))),
        };
        let mode = unsigned(&header.fields().mode, "mode", at)? & 0o7777;
        let mut xattrs = facts.xattrs;
        xattrs.extend(facts.acls);
        let fits = match facts.mark {
            None => true,
            Some(_) if path.is_empty() => false,
            Some(Mark::Whiteout) => kind == Kind::File && size == 0,
            Some(Mark::Opaque) => kind == Kind::Directory,
        };
        if !fits {
            return Err(refused(&raw, "it has a mark that its kind cannot have"));
        }
        let look = Look {
            mode: u32::try_from(mode).expect("twelve bits"),
            uid: default(facts.uid, self.defaults.uid, &header.fields().uid, "owner")?,
            gid: default(facts.gid, self.defaults.gid, &header.fields().gid, "group")?,
            mtime,
        };
        Ok(Entry {
            path,
            kind,
            look,
            size,
            runs,
            xattrs,
            left_out: facts.left_out,
            mark: facts.mark,
        })
    }

    fn kind(
        &self,
        header: &Header,
        raw: &[u8],
        link: Vec<u8>,
        stored: u64,
        at: u64,
    ) -> Result<Kind> {
        let device = || -> Result<(u32, u32)> {
            let number = |field| {
                let number = unsigned(field, "device", at)?;
                u32::try_from(number).map_err(|_| malformed(at, "its device is too large"))
            };
            let (major, minor) = header.device();
            Ok((number(major)?, number(minor)?))
        };
        Ok(match header.kind() {
            // Before there were directories in tar, a slash at the end made one.
            EntryType::Regular if raw.ends_with(b"/") && stored == 0 => Kind::Directory,
            EntryType::Regular | EntryType::Continuous if !raw.ends_with(b"/") => Kind::File,
            EntryType::GNUSparse if header.gnu().is_some() => Kind::File,
            EntryType::Link => {
                let target = self.path(&link, raw)?;
                if target.is_empty() {
                    return Err(refused(raw, "it is a hard link to the root or to nothing"));
                }
                Kind::HardLink(target)
            }
            EntryType::Symlink
                if link.is_empty() || link.len() > MOST_TARGET || link.contains(&0) =>
            {
                return Err(refused(raw, "its target is empty, too long or has a NUL"));
            }
            EntryType::Symlink => Kind::Symlink(link),
            EntryType::Char => {
                let (major, minor) = device()?;
                Kind::Character(major, minor)
            }
            EntryType::Block => {
                let (major, minor) = device()?;
                Kind::Block(major, minor)
            }
            EntryType::Directory => Kind::Directory,
            EntryType::Fifo => Kind::Fifo,
            kind => {
                let kind = kind.as_byte().escape_ascii();
                return Err(malformed(at, format!("an entry is of the kind '{kind}'")));
            }
        })
    }

    /// The size of a file and where its bytes go. Reads a map that stands before them.
    fn runs(
        &mut self,
        header: &Header,
        kind: &Kind,
        facts: &Facts,
        records: &[Record<'_>],
        stored: u64,
        at: u64,
    ) -> Result<(u64, Vec<Run>)> {
        let wrong = |why: &'static str| malformed(at, why);
        let old = header
            .gnu()
            .filter(|_| header.kind() == EntryType::GNUSparse);
        if old.is_none() && !facts.sparse {
            return Ok((stored, sparse::whole(stored)));
        }
        if *kind != Kind::File || (old.is_some() && facts.sparse) {
            return Err(wrong("a sparse map belongs to no file, or there are two"));
        }
        let (size, runs) = if let Some(old) = old {
            let mut runs = Vec::new();
            sparse::old(&old.sparse, &mut runs).map_err(wrong)?;
            let mut more = flag(old.isextended);
            while more {
                let mut block = GnuExtSparseHeader::new();
                self.exact(block.as_mut_bytes())?;
                sparse::old(&block.sparse, &mut runs).map_err(wrong)?;
                more = flag(block.isextended);
            }
            (unsigned(&old.realsize, "real size", at)?, runs)
        } else {
            let runs = match facts.sparse_version {
                (None, None) | (Some(0), Some(0 | 1)) => sparse::from_records(records),
                (Some(1), Some(0)) => {
                    let mut map = MapReader::default();
                    loop {
                        if self.left < BLOCK as u64 {
                            return Err(wrong("its sparse map is not complete"));
                        }
                        let block = self.block()?;
                        self.left -= BLOCK as u64;
                        if map.block(&block).map_err(wrong)? {
                            break Ok(map.runs());
                        }
                    }
                }
                _ => Err("its sparse map is of an unknown version"),
            };
            let size = facts
                .sparse_size
                .ok_or_else(|| wrong("its real size is missing"))?;
            (size, runs.map_err(wrong)?)
        };
        if i64::try_from(size).is_err() {
            return Err(wrong("its real size is too large"));
        }
        let runs = sparse::checked(runs, size, self.left).map_err(wrong)?;
        Ok((size, runs))
    }

    /// A path without what means nothing; `of` is the entry that it is for.
    fn path(&self, raw: &[u8], of: &[u8]) -> Result<Vec<u8>> {
        if raw.is_empty() {
            return Err(refused(of, "a path is empty"));
        }
        if raw.len() > self.limits.path {
            return Err(limit("the length of a path", self.limits.path as u64));
        }
        if raw.contains(&0) {
            return Err(refused(of, "a path has a NUL"));
        }
        if raw[0] == b'/' {
            return Err(refused(of, "a path is absolute"));
        }
        let mut path = Vec::with_capacity(raw.len());
        for name in raw.split(|&byte| byte == b'/') {
            match name {
                b"" | b"." => {}
                b".." => return Err(refused(of, "a path has `..`")),
                name if name.len() > MOST_NAME => {
                    return Err(limit("the length of a name", MOST_NAME as u64));
                }
                name => {
                    if !path.is_empty() {
                        path.push(b'/');
                    }
                    path.extend_from_slice(name);
                }
            }
        }
        Ok(path)
    }
}

fn of(field: &[u8], what: &str, at: u64) -> Result<i64> {
    number(field).ok_or_else(|| malformed(at, format!("its {what} is not a number")))
}

fn until_nul(name: &[u8]) -> &[u8] {
    let end = name.iter().position(|&byte| byte == 0);
    &name[..end.unwrap_or(name.len())]
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|&byte| byte == 0)
}

pub(super) fn limit(what: &'static str, limit: u64) -> Error {
    Error::Limit { what, limit }
}
