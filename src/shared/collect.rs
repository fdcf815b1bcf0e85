//! The collector of one tenant's part of the tier: what it reads, writes and deletes, and in which
//! order. `decide` has its decisions. `docs/shared-tier.md` says why they are right with any number
//! of collectors.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use serde::Serialize;

use super::budget::{Budget, RECENT, Shown, TierUse};
use super::clock::Since;
use super::commit::check_format;
use super::decide::{self, GRACE, LIST_WITHIN, NameVerdict, Seen, Verdict};
use super::error::{Error, Result};
use super::keys::{Keys, Listed};
use super::lease::{self, End};
use super::record::{MOST_MANIFEST, MOST_NAME, Manifest, NameRecord, NameState, ObjectId};
use super::retire::{delete, enter, evict, withdraw};
use super::store::{Store, Version};
use crate::model::{ArtifactId, Fences, Name, Reference, Tenant, Timestamp};
use crate::tree::Stop;

/// How long ago names of a tenant were used last.
pub type Uses = HashMap<Reference, Duration>;

/// The findings and deletions of a collection. In a dry run: what it would do.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Collected {
    /// Names that show content.
    pub names: u64,
    /// Manifests.
    pub manifests: u64,
    /// Objects of layers.
    pub layers: u64,
    /// Bytes of these.
    pub bytes: u64,
    /// Names that expired now, of age or by a fence.
    pub expired: u64,
    /// Names that the budget evicted now.
    #[serde(skip)]
    pub evicted: u64,
    /// Records of names that were deleted.
    pub deleted_names: u64,
    /// Objects that got a marker now.
    pub condemned: u64,
    /// Bytes of these.
    pub condemned_bytes: u64,
    /// Manifests and layers that were deleted.
    pub deleted: u64,
    /// Bytes of these.
    pub deleted_bytes: u64,
    /// Records that cannot be read; `verify` names them.
    pub unreadable: u64,
    /// Objects that this version does not know. It leaves them alone.
    pub unknown: u64,
    /// With a budget: what the names show after the collection.
    #[serde(skip)]
    pub kept: Option<TierUse>,
}

/// A collection of one tenant.
pub struct Collector<'a> {
    /// The tier.
    pub store: &'a Store,
    /// The tenant.
    pub tenant: &'a Tenant,
    /// Only tells what it would do; writes nothing.
    pub dry_run: bool,
    /// A fresh random id.
    pub id: ObjectId,
    /// [`GRACE`], except in tests.
    pub grace: Duration,
    /// The budget of the tenant, if it has one.
    pub budget: Option<Budget>,
    /// What was cleared in the cluster. A name expires if its content came before a fence that
    /// covers it.
    pub fences: Fences,
    /// How long ago nodes of the cluster used names last, as far as that is known. For the budget.
    pub uses: Uses,
    /// Called now and then with what was done so far.
    pub progress: &'a dyn Fn(&Collected),
}

/// What the lists showed.
#[derive(Default)]
struct Lists {
    /// Records that expire or are deleted.
    names: Vec<Judged>,
    /// Names that a fence covers, by the manifest that they show.
    covered: HashMap<(ArtifactId, ObjectId), Judged>,
    /// With a budget: the names that show content and do not expire.
    contents: Vec<Shown>,
    /// Manifests and layers.
    objects: BTreeMap<Listed, Object>,
}

/// A record of a name that does not stay as it is.
struct Judged {
    key: String,
    /// The write that was judged.
    write: ObjectId,
    verdict: NameVerdict,
    /// The fence that cleared it; 0: its time is over.
    fence: u64,
}

/// What is done with the objects in one walk over them.
#[derive(Clone, Copy)]
enum Pass {
    Delete,
    Condemn,
}

/// What the lists showed of a manifest or a layer. There can be millions, so it has no key: the
/// map's key tells it.
#[derive(Default)]
struct Object {
    /// Its bytes, and when it was written.
    stored: Option<(u64, Timestamp)>,
    /// When its marker was written.
    marker: Option<Timestamp>,
    /// Whether a name shows this manifest, or a manifest this layer.
    shown: bool,
}

impl<'a> Collector<'a> {
    /// A collector with the usual grace period and without progress.
    #[must_use]
    pub fn new(store: &'a Store, tenant: &'a Tenant, id: ObjectId) -> Self {
        Self {
            store,
            tenant,
            dry_run: false,
            id,
            grace: GRACE,
            budget: None,
            fences: Fences::default(),
            uses: Uses::default(),
            progress: &|_| {},
        }
    }

    /// Collects. `now` is this machine's clock: it decides only whether a lease is over, and what a
    /// full storage may lose.
    pub fn run(&self, now: Timestamp, stop: Stop<'_>) -> Result<Collected> {
        let (store, keys) = (self.store, Keys::new(self.tenant));
        let has_format = check_format(store, &keys, false)?;
        if self.dry_run {
            return self.collect(&keys, (now, now), stop);
        }
        let mut freed = Collected::default();
        let clock = match lease::take(store, &keys, self.id, now) {
            Err(Error::Full { .. }) => {
                freed = self.free(&keys, now, stop)?;
                lease::take(store, &keys, self.id, now)?
            }
            taken => taken?,
        };
        let mut done = match self.collect(&keys, (now, clock), stop) {
            // Only a failure that would come again makes others wait for the end of the lease.
            Err(error) if matches!(error, Error::Stopped) || error.is_temporary() => {
                drop(lease::end(store, &keys, self.id, End::Stopped));
                return Err(error);
            }
            done => done?,
        };
        done.deleted += freed.deleted;
        done.deleted_bytes += freed.deleted_bytes;
        if done.manifests > 0 && !has_format {
            // Another collector found nothing else, and a node published meanwhile.
            check_format(store, &keys, true)?;
        }
        let is_empty = done.names + done.manifests + done.layers + done.unknown == 0;
        if !is_empty || !lease::removes_the_rest(store, &keys, self.grace, clock)? {
            lease::end(store, &keys, self.id, End::Complete)?;
        }
        Ok(done)
    }

    /// Deletes what already has a marker from a storage that is too full for a lease. Without a
    /// lease, the storage's time is unknown, so the collector uses this machine's clock minus one
    /// day. This is safe while that clock is wrong by less than a day.
    fn free(&self, keys: &Keys, now: Timestamp, stop: Stop<'_>) -> Result<Collected> {
        let mut done = Collected::default();
        let clock = now.before(GRACE);
        let lists = self.lists_in_time(keys, clock, &mut done, stop)?;
        self.objects(&lists, Pass::Delete, clock, &mut done, stop)?;
        tracing::warn!(tenant = %self.tenant, deleted = done.deleted, bytes = done.deleted_bytes,
            "the shared tier is full: garbage that had a marker was deleted before anything else");
        Ok(done)
    }

    /// Collects under the lease. `clock`: the time of the lease.
    fn collect(
        &self,
        keys: &Keys,
        (now, clock): (Timestamp, Timestamp),
        stop: Stop<'_>,
    ) -> Result<Collected> {
        let mut done = Collected::default();
        let lists = self.lists_in_time(keys, clock, &mut done, stop)?;
        // First what makes room: a full storage refuses the writes.
        self.objects(&lists, Pass::Delete, clock, &mut done, stop)?;
        self.names(&lists, (now, clock), &mut done, stop)?;
        if let Some(budget) = self.budget {
            self.evict(&lists, budget, (now, clock), &mut done, stop)?;
        }
        self.objects(&lists, Pass::Condemn, clock, &mut done, stop)?;
        Ok(done)
    }

    fn lists_in_time(
        &self,
        keys: &Keys,
        clock: Timestamp,
        done: &mut Collected,
        stop: Stop<'_>,
    ) -> Result<Lists> {
        let begun = Since::now();
        let is_late = || begun.elapsed() > LIST_WITHIN;
        match self.lists(keys, clock, done, &|| stop() || is_late()) {
            Ok(_) | Err(Error::Stopped) if is_late() => Err(Error::TooSlow {
                prefix: format!("{}/{}", self.store, keys.base()),
                minutes: LIST_WITHIN.as_secs() / 60,
            }),
            lists => lists,
        }
    }

    fn lists(
        &self,
        keys: &Keys,
        clock: Timestamp,
        done: &mut Collected,
        stop: Stop<'_>,
    ) -> Result<Lists> {
        let mut lists = Lists::default();
        self.list_names(keys, clock, &mut lists, done, stop)?;
        let list = |prefix: String, lists: &mut Lists, done: &mut Collected| {
            self.store.list(&prefix, &mut |item| {
                if stop() {
                    return Err(Error::Stopped);
                }
                match keys.parse(&item.key) {
                    Some(Listed::Marker(object)) => {
                        let object = lists.objects.entry(*object).or_default();
                        object.marker = Some(item.modified);
                    }
                    Some(object @ (Listed::Manifest(..) | Listed::Layer(..))) => {
                        let object = lists.objects.entry(object).or_default();
                        object.stored = Some((item.bytes, item.modified));
                    }
                    Some(Listed::Name) | None => done.unknown += 1,
                }
                (self.progress)(done);
                Ok(())
            })
        };
        list(keys.manifests(), &mut lists, done)?;
        self.read_manifests(keys, &mut lists, done, stop)?;
        list(keys.layers(), &mut lists, done)?;
        for (listed, object) in &lists.objects {
            if let (Listed::Layer(..), Some((bytes, _))) = (listed, object.stored) {
                done.layers += 1;
                done.bytes += bytes;
            }
        }
        Ok(lists)
    }

    fn list_names(
        &self,
        keys: &Keys,
        clock: Timestamp,
        lists: &mut Lists,
        done: &mut Collected,
        stop: Stop<'_>,
    ) -> Result<()> {
        let mut items: BTreeMap<String, Timestamp> = BTreeMap::new();
        self.store.list(&keys.names(), &mut |item| {
            if stop() {
                return Err(Error::Stopped);
            }
            match keys.parse(&item.key) {
                Some(Listed::Name) => drop(items.insert(item.key, item.modified)),
                _ => done.unknown += 1,
            }
            Ok(())
        })?;
        let found = items.keys().cloned();
        self.store
            .get_many(found, MOST_NAME, stop, &mut |key, bytes| {
                let record =
                    bytes.and_then(|bytes| NameRecord::parse(key, &bytes, self.tenant, None));
                let record = match record {
                    Ok(record) => record,
                    // Readers refuse it, so it shows nothing.
                    Err(Error::Corrupt { .. }) => {
                        done.unreadable += 1;
                        return Ok(());
                    }
                    Err(error) => return Err(error),
                };
                if let Some((artifact, publication, _)) = record.content() {
                    let manifest = Listed::Manifest(artifact, publication);
                    lists.objects.entry(manifest).or_default().shown = true;
                    done.names += 1;
                }
                let age = clock.since(items.get(key).copied().unwrap_or(clock));
                match decide::judge_name(&record, age) {
                    NameVerdict::Keep => {
                        self.note_covered(key, &record, lists);
                        if let (Some(_), Some((artifact, publication, _))) =
                            (self.budget, record.content())
                        {
                            lists.contents.push(Shown {
                                key: key.to_owned(),
                                manifest: (artifact, publication),
                                age,
                                unused: self
                                    .uses
                                    .get(&record.reference)
                                    .map_or(age, |it| age.min(*it)),
                                layers: Vec::new(),
                            });
                        }
                    }
                    verdict => lists.names.push(Judged {
                        key: key.to_owned(),
                        write: record.write,
                        verdict,
                        fence: 0,
                    }),
                }
                (self.progress)(done);
                Ok(())
            })
    }

    /// Notes a name that a fence covers. Its manifest says whether its content came before that.
    fn note_covered(&self, key: &str, record: &NameRecord, lists: &mut Lists) {
        let Some((artifact, publication, _)) = record.content() else {
            return;
        };
        let name = Name {
            tenant: self.tenant.clone(),
            reference: record.reference.clone(),
        };
        let fence = self.fences.covering(&name);
        if fence > 0 {
            let judged = Judged {
                key: key.to_owned(),
                write: record.write,
                verdict: NameVerdict::Expire,
                fence,
            };
            lists.covered.insert((artifact, publication), judged);
        }
    }

    fn read_manifests(
        &self,
        keys: &Keys,
        lists: &mut Lists,
        done: &mut Collected,
        stop: Stop<'_>,
    ) -> Result<()> {
        let found = lists.objects.iter();
        let found: Vec<_> = found
            .filter_map(|(listed, object)| match listed {
                Listed::Manifest(artifact, publication) if object.stored.is_some() => {
                    Some((*artifact, *publication))
                }
                _ => None,
            })
            .collect();
        done.manifests = found.len() as u64;
        let found = found
            .into_iter()
            .map(|(artifact, id)| keys.manifest(artifact, id));
        let mut cleared = HashSet::new();
        let contents = lists.contents.iter_mut();
        let mut contents: HashMap<_, _> = contents.map(|name| (name.manifest, name)).collect();
        self.store
            .get_many(found, MOST_MANIFEST, stop, &mut |key, bytes| {
                let Some(Listed::Manifest(artifact, publication)) = keys.parse(key) else {
                    return Ok(());
                };
                let id = (artifact, publication);
                let parsed =
                    bytes.and_then(|bytes| Manifest::parse(key, &bytes, self.tenant, id, None));
                match parsed {
                    Ok(manifest) => {
                        let layers = manifest.layers.iter();
                        let layers = layers.map(|it| ((it.digest.0, it.upload), it.bytes));
                        if let Some(judged) = lists.covered.remove(&id)
                            && manifest.fence < judged.fence
                        {
                            lists.names.push(judged);
                            cleared.insert(id);
                        }
                        if let Some(name) = contents.get_mut(&id) {
                            name.layers = layers.clone().collect();
                        }
                        for ((digest, upload), _) in layers {
                            let layer = Listed::Layer(digest, upload);
                            lists.objects.entry(layer).or_default().shown = true;
                        }
                    }
                    Err(Error::Corrupt { .. }) => done.unreadable += 1,
                    Err(error) => return Err(error),
                }
                (self.progress)(done);
                Ok(())
            })?;
        lists.contents.retain(|it| !cleared.contains(&it.manifest));
        Ok(())
    }

    /// Expires names and deletes records.
    fn names(
        &self,
        lists: &Lists,
        (now, clock): (Timestamp, Timestamp),
        done: &mut Collected,
        stop: Stop<'_>,
    ) -> Result<()> {
        for Judged {
            key,
            write,
            verdict,
            fence,
        } in &lists.names
        {
            if stop() {
                return Err(Error::Stopped);
            }
            if self.dry_run {
                match verdict {
                    NameVerdict::Expire => done.expired += 1,
                    _ => done.deleted_names += 1,
                }
                continue;
            }
            let Some((record, version)) = self.read_again(key)? else {
                continue;
            };
            // A commit may have come since the list, which told the age of the record before it.
            let is_due = match *fence {
                0 => decide::judge_name(&record, clock.since(version.modified())) == *verdict,
                _ => record.write == *write,
            };
            if !is_due {
                continue;
            }
            match (verdict, &record.state) {
                (NameVerdict::Expire, NameState::Content { .. }) => {
                    let is_done = match *fence {
                        0 => withdraw(self.store, record, &version, self.id, now)?,
                        fence => enter(self.store, record, &version, fence, self.id, now)?,
                    };
                    done.expired += u64::from(is_done);
                }
                (NameVerdict::Delete, NameState::Cleared | NameState::Expired) => {
                    let is_done = delete(self.store, record, &version, self.id, now)?;
                    done.deleted_names += u64::from(is_done);
                }
                _ => {}
            }
            (self.progress)(done);
        }
        Ok(())
    }

    /// Lets names show nothing until the rest is within the budget. This takes nothing from readers
    /// that have resolved a name already: the objects go as after a time to live.
    fn evict(
        &self,
        lists: &Lists,
        budget: Budget,
        (now, clock): (Timestamp, Timestamp),
        done: &mut Collected,
        stop: Stop<'_>,
    ) -> Result<()> {
        let mut gone: HashSet<&str> = HashSet::new();
        for name in budget.evicted(&lists.contents) {
            if stop() {
                return Err(Error::Stopped);
            }
            let is_evicted = self.dry_run
                || match self.read_again(&name.key)? {
                    Some((record, version)) => match record.content() {
                        // The list may have told the age of a record before this one.
                        Some((artifact, publication, _))
                            if (artifact, publication) == name.manifest
                                && clock.since(version.modified()) >= RECENT =>
                        {
                            evict(self.store, record, &version, self.id, now)?
                        }
                        // A commit came meanwhile.
                        Some(_) => false,
                        None => {
                            gone.insert(&name.key);
                            false
                        }
                    },
                    None => false,
                };
            if is_evicted {
                gone.insert(&name.key);
                done.evicted += 1;
                (self.progress)(done);
            }
        }
        let left = lists.contents.iter();
        done.kept = Some(budget.kept(left.filter(|name| !gone.contains(&*name.key))));
        Ok(())
    }

    fn read_again(&self, key: &str) -> Result<Option<(NameRecord, Version)>> {
        let Some((bytes, version)) = self.store.get(key, MOST_NAME)? else {
            return Ok(None);
        };
        match NameRecord::parse(key, &bytes, self.tenant, None) {
            Ok(record) => Ok(Some((record, version))),
            Err(Error::Corrupt { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn objects(
        &self,
        lists: &Lists,
        pass: Pass,
        clock: Timestamp,
        done: &mut Collected,
        stop: Stop<'_>,
    ) -> Result<()> {
        let keys = Keys::new(self.tenant);
        for (listed, object) in &lists.objects {
            if stop() {
                return Err(Error::Stopped);
            }
            if let Some(key) = keys.of(listed) {
                self.object(&key, object, pass, clock, done)?;
            }
            (self.progress)(done);
        }
        Ok(())
    }

    fn object(
        &self,
        key: &str,
        object: &Object,
        pass: Pass,
        clock: Timestamp,
        done: &mut Collected,
    ) -> Result<()> {
        let seen = Seen {
            age: object.stored.map(|(_, written)| clock.since(written)),
            marker: object.marker.map(|written| clock.since(written)),
            shown: object.shown,
        };
        let bytes = object.stored.map_or(0, |(bytes, _)| bytes);
        match (pass, decide::judge(seen, self.grace)) {
            (Pass::Condemn, Verdict::Condemn) => {
                if !self.dry_run {
                    self.store.write(&Keys::marker(key), Vec::new())?;
                }
                done.condemned += 1;
                done.condemned_bytes += bytes;
            }
            (Pass::Delete, Verdict::Delete) => {
                if !self.dry_run {
                    self.store.delete(key)?;
                    self.store.delete(&Keys::marker(key))?;
                }
                done.deleted += 1;
                done.deleted_bytes += bytes;
            }
            (Pass::Delete, Verdict::Unmark) if !self.dry_run => {
                self.store.delete(&Keys::marker(key))?;
            }
            _ => {}
        }
        Ok(())
    }
}
