//! Reports about the tier: its names, the used space, and damage.
//! Everything here only reads.

use std::collections::{BTreeMap, HashSet};
use std::fs::File;

use rustix::fs::{Mode, OFlags};
use serde::Serialize;

use super::commit::{check_format, read_manifest};
use super::error::{Error, Result, is_of_the_source};
use super::keys::{Keys, Listed as Key};
use super::record::{LayerRef, MOST_NAME, NameRecord};
use super::source::{Bucket, Source as _};
use super::store::Store;
use crate::archive::Limits;
use crate::archive::toc::Table;
use crate::model::Tenant;
use crate::sys::Dir;
use crate::tree::Stop;

/// A name of the tier.
#[derive(Debug)]
pub struct Listed {
    /// Its record.
    pub record: NameRecord,
}

/// The space that a tenant uses.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Usage {
    /// Records of names.
    pub names: u64,
    /// Manifests.
    pub manifests: u64,
    /// Objects of layers.
    pub layers: u64,
    /// Bytes of these.
    pub bytes: u64,
    /// Bytes of manifests and layers with a marker: the collector deletes them when their grace is
    /// over.
    pub condemned_bytes: u64,
}

/// Something that is not as it should be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Damage {
    /// The object.
    pub object: String,
    /// What is wrong with it.
    pub cause: String,
}

/// What a verification found.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct Verified {
    /// Names that were followed.
    pub names: u64,
    /// Layers whose table, index and length were checked.
    pub layers: u64,
    /// What is wrong.
    pub damage: Vec<Damage>,
}

impl Store {
    /// The tenants that have something in the tier.
    pub fn tenants(&self) -> Result<Vec<Tenant>> {
        let mut tenants: Vec<Tenant> = self
            .children(Keys::tenants())?
            .iter()
            .filter_map(|name| name.parse().ok())
            .collect();
        tenants.sort();
        Ok(tenants)
    }
}

/// The names of a tenant, and the records that cannot be read.
pub fn list(store: &Store, tenant: &Tenant) -> Result<(Vec<Listed>, Vec<Damage>)> {
    let keys = Keys::new(tenant);
    check_format(store, &keys, false)?;
    let mut found = Vec::new();
    store.list(&keys.names(), &mut |item| {
        if keys.parse(&item.key) == Some(Key::Name) {
            found.push(item.key);
        }
        Ok(())
    })?;
    let (mut names, mut damage) = (BTreeMap::new(), Vec::new());
    store.get_many(
        found.into_iter(),
        MOST_NAME,
        &|| false,
        &mut |key, bytes| {
            let record = bytes.and_then(|bytes| NameRecord::parse(key, &bytes, tenant, None));
            match record {
                // A record in another name's place is never followed.
                Ok(record) if keys.name(&record.reference) != key => damage.push(Damage {
                    object: key.to_owned(),
                    cause: format!("it is the record of {}", record.reference),
                }),
                Ok(record) => drop(names.insert(key.to_owned(), Listed { record })),
                Err(error @ Error::Corrupt { .. }) => damage.push(Damage {
                    object: key.to_owned(),
                    cause: error.to_string(),
                }),
                Err(error) => return Err(error),
            }
            Ok(())
        },
    )?;
    damage.sort_by(|one: &Damage, other| one.object.cmp(&other.object));
    Ok((names.into_values().collect(), damage))
}

/// The space that a tenant uses.
pub fn usage(store: &Store, tenant: &Tenant, stop: Stop<'_>) -> Result<Usage> {
    let keys = Keys::new(tenant);
    check_format(store, &keys, false)?;
    let mut usage = Usage::default();
    let mut sizes: BTreeMap<String, u64> = BTreeMap::new();
    let mut marked: HashSet<String> = HashSet::new();
    store.list(keys.base(), &mut |item| {
        if stop() {
            return Err(Error::Stopped);
        }
        match keys.parse(&item.key) {
            Some(Key::Name) => usage.names += 1,
            Some(Key::Manifest(..)) => {
                usage.manifests += 1;
                sizes.insert(item.key, item.bytes);
            }
            Some(Key::Layer(..)) => {
                usage.layers += 1;
                usage.bytes += item.bytes;
                sizes.insert(item.key, item.bytes);
            }
            Some(Key::Marker(_)) => {
                marked.extend(Keys::marked(&item.key).map(str::to_owned));
            }
            None => {}
        }
        Ok(())
    })?;
    let condemned = marked.iter().filter_map(|key| sizes.get(key));
    usage.condemned_bytes = condemned.sum();
    Ok(usage)
}

/// Follows every name of a tenant: its manifest's digest, and of each layer the length, footer,
/// index and the digest of the table. Content is verified when it is fetched. `temporary` may hold
/// temporary files.
pub fn verify(
    store: &Store,
    tenant: &Tenant,
    temporary: &Dir,
    progress: &dyn Fn(&Verified),
    stop: Stop<'_>,
) -> Result<Verified> {
    let keys = Keys::new(tenant);
    let (names, damage) = list(store, tenant)?;
    let mut found = Verified {
        damage,
        ..Verified::default()
    };
    let bucket = Bucket::new(store.clone());
    let mut seen = HashSet::new();
    for name in names {
        if stop() {
            return Err(Error::Stopped);
        }
        found.names += 1;
        let object = format!("{} of namespace {tenant}", name.record.reference);
        let manifest = match read_manifest(store, &keys, tenant, &name.record) {
            Ok(Some(manifest)) => manifest,
            Ok(None) => continue,
            Err(error) => {
                note(&mut found, object, error)?;
                continue;
            }
        };
        for layer in manifest.layers {
            if !seen.insert((layer.digest, layer.upload)) {
                continue;
            }
            found.layers += 1;
            if let Err(error) = verify_layer(&bucket, tenant, &layer, temporary, stop) {
                note(&mut found, object.clone(), error)?;
            }
            progress(&found);
        }
        progress(&found);
    }
    Ok(found)
}

/// Notes what is damaged. Passes on what says nothing about the object, such as a layer's table
/// that has no space on this machine.
fn note(found: &mut Verified, object: String, error: Error) -> Result<()> {
    match error {
        Error::Corrupt { .. } | Error::Missing { .. } => {
            let cause = error.to_string();
            found.damage.push(Damage { object, cause });
            Ok(())
        }
        error => Err(error),
    }
}

fn verify_layer(
    bucket: &Bucket,
    tenant: &Tenant,
    layer: &LayerRef,
    temporary: &Dir,
    stop: Stop<'_>,
) -> Result<()> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let fd = rustix::fs::openat(temporary, ".", flags, Mode::from_raw_mode(0o600))
        .map_err(|errno| temporary.error("openat", ".", errno))?;
    let file = File::from(fd);
    let table = file
        .try_clone()
        .map_err(|error| temporary.error("dup", ".", error))?;
    bucket.open(tenant, layer, &file, stop)?;
    let limits = Limits::default();
    match Table::open(table, Some(layer.digest.0), temporary, limits, stop) {
        Ok(_) => Ok(()),
        Err(error) if is_of_the_source(&error) => {
            Err(Error::corrupt(format!("layer {}", layer.digest), error))
        }
        Err(error) => Err(error.into()),
    }
}
