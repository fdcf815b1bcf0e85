//! One publication of an artifact: layers that are missing, the manifest, and the name by a
//! conditional write. The order makes it safe: nothing is referred to before it is there. The
//! decisions are `decide`'s.

use std::time::Duration;

use super::clock::Since;
use super::decide::{self, Age, Decision, Writer};
use super::error::{Error, Result};
use super::keys::{Keys, Listed};
use super::object::{FOOTER_BYTES, Footer};
use super::record::{
    FORMAT, Format, LayerRef, MOST_MANIFEST, MOST_NAME, Manifest, NameRecord, NameState, ObjectId,
    encode, sha256,
};
use super::retire::withdraw;
use super::store::{Item, Store, Version};
use super::upload::{Upload, upload};
use crate::archive::toc::{Holder, Table};
use crate::model::{ArtifactId, Maker, Reference, Sha256, Tenant, Timestamp};
use crate::tree::Stop;

/// A layer with less content is uploaded without asking whether another node did so: a list costs
/// as much.
const WORTH_A_LIST: u64 = 1 << 20;
/// How often a name is read again because another writer was faster.
const ATTEMPTS: u32 = 20;
/// How often a write of a name is tried whose answer is an error of the storage.
const FAILURES: u32 = 4;

/// What is committed.
#[derive(Debug, Clone)]
pub struct Commit {
    /// The reference.
    pub reference: Reference,
    /// The artifact.
    pub artifact: ArtifactId,
    /// Its layers, newest first, as [`Publication::layer`] gave them.
    pub layers: Vec<LayerRef>,
    /// When it was sealed.
    pub made: Timestamp,
    /// Its origin.
    pub made_by: Option<Maker>,
    /// What the writer knows of the name.
    pub writer: Writer,
    /// How long the name lives.
    pub ttl_seconds: Option<u64>,
    /// The artifact's fence.
    pub fence: u64,
}

/// The result of a commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Committed {
    /// The name shows the artifact; its record has this number.
    Named(u64),
    /// The name shows older content, which keeps it: first writer wins.
    KeptFirst,
    /// The name shows a commit that was built on this one. Or it shows one that came after an
    /// attempt to write this one, whose acknowledgement was lost.
    KeptNewer,
    /// The name was cleared after the fork began, or that is not known.
    Cleared,
}

/// A publication. It must end within [`decide::PUBLISH_WITHIN`], or begin again.
#[derive(Debug)]
pub struct Publication<'a> {
    store: &'a Store,
    tenant: Tenant,
    keys: Keys,
    /// Random: of the manifest and of all layers that it uploads.
    id: ObjectId,
    looked: Since,
    seen: Option<Seen>,
}

/// What a publication saw when it looked.
#[derive(Debug)]
struct Seen {
    reference: Reference,
    current: Current,
    /// Of the content that the name showed. Its layers can be used without asking.
    manifest: Option<Manifest>,
}

impl<'a> Publication<'a> {
    /// Begins one with a fresh random id. Checks the format of the tenant's part of the tier.
    pub fn begin(store: &'a Store, tenant: &Tenant, id: ObjectId) -> Result<Self> {
        check_format(store, &Keys::new(tenant), true)?;
        Ok(Self::resume(store, tenant, id))
    }

    /// Does the same for a tenant whose format this process has checked before.
    #[must_use]
    pub fn resume(store: &'a Store, tenant: &Tenant, id: ObjectId) -> Self {
        Self {
            store,
            tenant: tenant.clone(),
            keys: Keys::new(tenant),
            id,
            looked: Since::now(),
            seen: None,
        }
    }

    /// Reads what the name shows, so that its layers need not be uploaded. A name or manifest that
    /// is damaged counts as none. Fails at once while a collector deletes the record: no commit
    /// could write it.
    pub fn look(&mut self, reference: &Reference, now: Timestamp) -> Result<Option<NameRecord>> {
        let current = read_current(self.store, &self.keys, &self.tenant, reference)?;
        if let (Some(record), Some(version)) = &current
            && decide::is_being_deleted(record, now.since(version.modified()))
        {
            let object = self.keys.name(reference);
            return Err(Error::Deleting { object });
        }
        let record = current.0.clone();
        let manifest = read_shown(self.store, &self.keys, &self.tenant, record.as_ref())?;
        self.seen = Some(Seen {
            reference: reference.clone(),
            current,
            manifest,
        });
        Ok(record)
    }

    fn shown(&self) -> Option<&Manifest> {
        self.seen.as_ref()?.manifest.as_ref()
    }

    /// When the content that the name showed was sealed; `None`: it showed none, or it is damaged.
    #[must_use]
    pub fn made(&self) -> Option<Timestamp> {
        self.shown().map(|manifest| manifest.made)
    }

    /// Whether the name showed content from before this fence.
    #[must_use]
    pub fn is_older(&self, fence: u64) -> bool {
        self.shown().is_some_and(|manifest| manifest.fence < fence)
    }

    /// The object of this layer if the tier has one that may be used. `content`: its bytes.
    pub fn find(&self, digest: &Sha256, content: u64) -> Result<Option<LayerRef>> {
        let mut shown = self.shown().into_iter().flat_map(|shown| &shown.layers);
        if let Some(layer) = shown.find(|layer| layer.digest == *digest) {
            return Ok(Some(*layer));
        }
        if content < WORTH_A_LIST {
            return Ok(None);
        }
        let mut items: Vec<Item> = Vec::new();
        self.store.list(&self.keys.layers_of(digest), &mut |item| {
            items.push(item);
            Ok(())
        })?;
        let Some((item, upload)) = newest_unmarked(&self.keys, &items) else {
            return Ok(None);
        };
        let Some(start) = item.bytes.checked_sub(FOOTER_BYTES) else {
            return Ok(None);
        };
        let bytes = match self.store.range(&item.key, start..item.bytes) {
            Ok(bytes) => bytes,
            Err(Error::Missing { .. } | Error::Corrupt { .. }) => return Ok(None),
            Err(error) => return Err(error),
        };
        let footer = Footer::parse(&bytes, item.bytes).ok();
        let footer = footer.filter(|footer| footer.digest == *digest);
        Ok(footer.map(|footer| LayerRef {
            digest: *digest,
            upload,
            bytes: item.bytes,
            tail: footer.tail,
            content,
            table: footer.table,
        }))
    }

    /// A layer in the tier: one that is there, or the upload of this one.
    pub fn layer(
        &self,
        (table, holder): (&Table, &Holder),
        how: Upload<'_>,
        stop: Stop<'_>,
    ) -> Result<LayerRef> {
        let digest = Sha256(table.digest().sha256);
        match self.find(&digest, table.bytes())? {
            Some(layer) => Ok(layer),
            None => upload(self.store, &self.keys, (table, holder), self.id, how, stop),
        }
    }

    /// Writes the manifest and then the name. `now`: this node's clock. [`Error::Late`]: begin
    /// again.
    pub fn commit(self, commit: Commit, now: Timestamp) -> Result<Committed> {
        let manifest = Manifest {
            format: FORMAT,
            tenant: self.tenant.clone(),
            reference: commit.reference.clone(),
            artifact: commit.artifact,
            publication: self.id,
            layers: commit.layers,
            made: commit.made,
            made_by: commit.made_by,
            fence: commit.fence,
        };
        let bytes = encode(&manifest);
        let state = NameState::Content {
            artifact: commit.artifact,
            publication: self.id,
            manifest: sha256(&bytes),
            ttl_seconds: commit.ttl_seconds,
        };
        let key = self.keys.manifest(commit.artifact, self.id);
        let within = self.store.publish_within();
        in_time(&key, self.looked, within)?;
        if bytes.len() as u64 > MOST_MANIFEST {
            return Err(Error::corrupt(key, "the manifest would be too large"));
        }
        self.store.write(&key, bytes)?;
        let written = Since::now();
        let name = Name {
            store: self.store,
            keys: &self.keys,
            tenant: &self.tenant,
            reference: &commit.reference,
            write: self.id,
            now,
            written: Some(&key),
        };
        // The record that was read before may be old. Then the conditional write fails, and the
        // record is read again.
        let seen = self.seen.filter(|seen| seen.reference == commit.reference);
        let first = seen.as_ref().map(|seen| seen.current.clone());
        name.write(first, &|current, attempted| {
            in_time(&key, written, within)?;
            // An earlier publication of it may take effect late.
            let shows_it =
                |it: &&NameRecord| it.content().is_some_and(|it| it.0 == commit.artifact);
            if let Some(record) = current.filter(shows_it) {
                return Ok(Err(Committed::Named(record.number)));
            }
            let shown = match &seen {
                Some(seen) if seen.current.0.as_ref() == current => seen.manifest.clone(),
                _ => read_shown(self.store, &self.keys, &self.tenant, current)?,
            };
            let is_old = (shown.as_ref()).is_some_and(|shown| shown.fence < commit.writer.fence);
            // A writer that has seen that content replaces it on purpose.
            let saw = |it: &NameRecord| commit.writer.base.is_some_and(|base| base >= it.number);
            let keeps = !is_old
                && !current.is_some_and(saw)
                && shown.is_some_and(|shown| shown.follows(&manifest));
            let fresh = now.0.max(1);
            let writer = Writer {
                attempted: commit.writer.attempted.or(attempted),
                ..commit.writer
            };
            Ok(
                match decide::commit(current, name.reference, writer, is_old, fresh) {
                    Decision::Write { .. } if keeps => Err(Committed::KeptNewer),
                    Decision::Write { number, cleared } => Ok((number, cleared, state.clone())),
                    Decision::KeepsFirst => Err(Committed::KeptFirst),
                    Decision::KeepsNewer => Err(Committed::KeptNewer),
                    Decision::Cleared => Err(Committed::Cleared),
                },
            )
        })
    }
}

fn in_time(object: &str, since: Since, within: Duration) -> Result<()> {
    if decide::in_time(since.elapsed(), within) {
        return Ok(());
    }
    Err(Error::Late {
        object: object.to_owned(),
    })
}

/// Clears a name: what was committed before it, or forked before it, never comes back. `fence`: the
/// highest that covers the name, as this node knows; 0: none. `write` is a fresh random id. Returns
/// the record's number.
pub fn clear(
    store: &Store,
    tenant: &Tenant,
    reference: &Reference,
    fence: u64,
    write: ObjectId,
    now: Timestamp,
) -> Result<u64> {
    let keys = Keys::new(tenant);
    check_format(store, &keys, true)?;
    let name = Name {
        store,
        keys: &keys,
        tenant,
        reference,
        write,
        now,
        written: None,
    };
    let committed = name.write(None, &|current, _| {
        let number = decide::clear(current, fence, now.0.max(1));
        Ok(Ok((number, number, NameState::Cleared)))
    })?;
    match committed {
        Committed::Named(number) => Ok(number),
        Committed::KeptFirst | Committed::KeptNewer | Committed::Cleared => Err(Error::Conflict {
            object: keys.name(reference),
        }),
    }
}

/// Reports that the object of a layer is damaged: no commit uses it from now on, and the name shows
/// nothing, so that a node that has the content uploads it again. `record` is what the reader
/// followed, `write` a fresh random id. Returns whether the name still showed it.
pub fn report_damage(
    store: &Store,
    record: &NameRecord,
    layer: &LayerRef,
    write: ObjectId,
    now: Timestamp,
) -> Result<bool> {
    let keys = Keys::new(&record.tenant);
    let object = keys.layer(&layer.digest, layer.upload);
    store.write(&Keys::marker(&object), Vec::new())?;
    let current = read_name(store, &keys, &record.tenant, &record.reference)?;
    let Some((current, version)) = current.filter(|(current, _)| current == record) else {
        return Ok(false);
    };
    withdraw(store, current, &version, write, now)
}

/// Reports that the manifest which a name shows is missing or damaged: the name shows nothing, as
/// after [`report_damage`]. Returns `false` if another writer was faster.
pub fn report_lost_manifest(
    store: &Store,
    tenant: &Tenant,
    reference: &Reference,
    write: ObjectId,
    now: Timestamp,
) -> Result<bool> {
    let keys = Keys::new(tenant);
    let Some((record, version)) = read_name(store, &keys, tenant, reference)? else {
        return Ok(false);
    };
    match read_manifest(store, &keys, tenant, &record) {
        Err(Error::Missing { .. } | Error::Corrupt { .. }) => {
            withdraw(store, record, &version, write, now)
        }
        read => read.map(|_| false),
    }
}

/// The record of a name, and so the `base` of a fork that begins now.
pub fn look(store: &Store, tenant: &Tenant, reference: &Reference) -> Result<Option<NameRecord>> {
    let record = read_name(store, &Keys::new(tenant), tenant, reference)?;
    Ok(record.map(|(record, _)| record))
}

/// A name that is being written.
struct Name<'a> {
    store: &'a Store,
    keys: &'a Keys,
    tenant: &'a Tenant,
    reference: &'a Reference,
    write: ObjectId,
    now: Timestamp,
    /// An object that this writer has just written: it shows the storage's time.
    written: Option<&'a str>,
}

/// A record that was read, and its version. A version without a record: it is damaged.
type Current = (Option<NameRecord>, Option<Version>);

/// The number of the next record, of the last clear, and what it says; or why there is none.
type Choice = Result<(u64, u64, NameState), Committed>;

/// Chooses by a record, and by the number before an attempt that is in doubt.
type Choose<'a> = dyn Fn(Option<&NameRecord>, Option<u64>) -> Result<Choice> + 'a;

impl Name<'_> {
    /// Writes what `choose` says over the record that is there, until no other writer comes
    /// between. Each attempt is one request: of two, the second could be refused because of the
    /// first.
    fn write(&self, mut seen: Option<Current>, choose: &Choose<'_>) -> Result<Committed> {
        let key = self.keys.name(self.reference);
        let mut last = Error::Conflict {
            object: key.clone(),
        };
        let (mut attempted, mut failures) = (None, 0);
        for _ in 0..ATTEMPTS {
            let (current, version) = match seen.take() {
                Some(current) => current,
                None => self.read()?,
            };
            if let Some(number) = self.is_ours(current.as_ref()) {
                return Ok(Committed::Named(number));
            }
            if let (Some(record), Some(version)) = (&current, &version)
                && record.deleting
                && !decide::may_write_over_mark(self.age(version)?)
            {
                last = Error::Deleting {
                    object: key.clone(),
                };
                self.store.pause();
                continue;
            }
            let (number, cleared, state) = match choose(current.as_ref(), attempted)? {
                Ok(choice) => choice,
                Err(refusal) => return Ok(refusal),
            };
            if failures == FAILURES {
                return Err(last);
            }
            let record = NameRecord {
                format: FORMAT,
                tenant: self.tenant.clone(),
                reference: self.reference.clone(),
                number,
                cleared,
                evicted: false,
                deleting: false,
                write: self.write,
                committed: self.now,
                state,
            };
            match self
                .store
                .write_once(&key, encode(&record), version.as_ref())
            {
                Ok(()) => return Ok(Committed::Named(number)),
                Err(error @ Error::Conflict { .. }) => last = error,
                // The acknowledgement may be lost, and the write not.
                Err(error @ (Error::Away { .. } | Error::SlowDown { .. })) => {
                    attempted = attempted.or(Some(current.map_or(0, |it| it.number)));
                    failures += 1;
                    last = error;
                    self.store.pause();
                }
                Err(error) => return Err(error),
            }
        }
        Err(last)
    }

    fn age(&self, version: &Version) -> Result<Age> {
        Ok(match self.written {
            Some(key) => {
                let now = self.store.modified(key)?;
                Age::ByStorage(now.since(version.modified()))
            }
            None => Age::ByWriter(self.now.since(version.modified())),
        })
    }

    fn is_ours(&self, current: Option<&NameRecord>) -> Option<u64> {
        current
            .filter(|record| record.write == self.write)
            .map(|record| record.number)
    }

    fn read(&self) -> Result<Current> {
        read_current(self.store, self.keys, self.tenant, self.reference)
    }
}

/// The record of a name for a writer. One that is damaged is written over: it shows nothing to
/// readers.
fn read_current(
    store: &Store,
    keys: &Keys,
    tenant: &Tenant,
    reference: &Reference,
) -> Result<Current> {
    let key = keys.name(reference);
    let Some((bytes, version)) = store.get_again(&key, MOST_NAME)? else {
        return Ok((None, None));
    };
    match NameRecord::parse(&key, &bytes, tenant, Some(reference)) {
        Ok(record) => Ok((Some(record), Some(version))),
        Err(Error::Corrupt { .. }) => Ok((None, Some(version))),
        Err(error) => Err(error),
    }
}

/// Which object of a layer may be used: the newest one without a marker.
fn newest_unmarked<'a>(keys: &Keys, items: &'a [Item]) -> Option<(&'a Item, ObjectId)> {
    let mut found: Option<(&Item, ObjectId)> = None;
    for item in items {
        let Some(Listed::Layer(_, upload)) = keys.parse(&item.key) else {
            continue;
        };
        let marker = Keys::marker(&item.key);
        let has_marker = items.iter().any(|other| other.key == marker);
        let is_newer = found.is_none_or(|(newest, _)| item.modified > newest.modified);
        if decide::may_reuse(has_marker) && is_newer {
            found = Some((item, upload));
        }
    }
    found
}

/// Checks the format of a tenant's part; `write`: writes it if it is not there. Returns whether it
/// is there.
pub(super) fn check_format(store: &Store, keys: &Keys, write: bool) -> Result<bool> {
    let key = keys.format();
    if let Some((bytes, _)) = store.get(&key, MOST_NAME)? {
        return Format::parse(&key, &bytes).map(|_| true);
    }
    if !write {
        return Ok(false);
    }
    match store.create(&key, encode(&Format { format: FORMAT })) {
        // Another node was faster.
        Ok(()) | Err(Error::Conflict { .. }) => Ok(true),
        Err(error) => Err(error),
    }
}

/// The record of a name and its version.
pub(super) fn read_name(
    store: &Store,
    keys: &Keys,
    tenant: &Tenant,
    reference: &Reference,
) -> Result<Option<(NameRecord, Version)>> {
    let key = keys.name(reference);
    let Some((bytes, version)) = store.get_again(&key, MOST_NAME)? else {
        return Ok(None);
    };
    let record = NameRecord::parse(&key, &bytes, tenant, Some(reference))?;
    Ok(Some((record, version)))
}

/// The manifest that a record shows to a writer; `None` if it shows nothing, or that is damaged.
fn read_shown(
    store: &Store,
    keys: &Keys,
    tenant: &Tenant,
    record: Option<&NameRecord>,
) -> Result<Option<Manifest>> {
    let Some(record) = record else {
        return Ok(None);
    };
    match read_manifest(store, keys, tenant, record) {
        Err(Error::Corrupt { .. } | Error::Missing { .. }) => Ok(None),
        read => read,
    }
}

/// The manifest that a record shows; `None` if it shows nothing.
pub(super) fn read_manifest(
    store: &Store,
    keys: &Keys,
    tenant: &Tenant,
    record: &NameRecord,
) -> Result<Option<Manifest>> {
    let Some((artifact, publication, digest)) = record.content() else {
        return Ok(None);
    };
    let key = keys.manifest(artifact, publication);
    let Some((bytes, _)) = store.get(&key, MOST_MANIFEST)? else {
        return Err(Error::Missing { object: key });
    };
    Manifest::parse(&key, &bytes, tenant, (artifact, publication), Some(digest)).map(Some)
}
