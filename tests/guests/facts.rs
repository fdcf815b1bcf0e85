//! The answers that a workload got, in order, and the state that must follow from them.
//!
//! Content is a function of its name, so any content that is found can be checked.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Something that the engine, or a filesystem, has promised; or is about to undo.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Fact {
    /// An output, or an import, is durable.
    Sealed(String),
    /// An import begins. Until it is sealed, it may exist whole, or not at all.
    Importing(String),
    /// From here on it may be gone …
    Destroying(String),
    /// … and from here on it is.
    Destroyed(String),
    /// This commit of the cache is durable.
    Cached(u64),
    /// A claim was made.
    Claimed(String),
    /// It may be gone, and is.
    Unclaiming(String),
    Unclaimed(String),
    /// A pod has fsynced this generation of its file, name and all.
    Synced(String, u64),
    /// A snapshot, of this claim with this generation.
    Snapshot(String, String, u64),
}

/// The content that must exist.
#[derive(Debug, Clone, Default)]
pub(crate) struct Promised {
    pub(crate) outputs: BTreeSet<String>,
    /// Imports that began and did not end: each is whole, or not there.
    pub(crate) importing: BTreeSet<String>,
    /// Imports that ended and were not destroyed since.
    pub(crate) imported: BTreeSet<String>,
    pub(crate) destroyed: BTreeSet<String>,
    pub(crate) cached: Option<u64>,
    /// Claims, and the generation that was synced last.
    pub(crate) claims: BTreeMap<String, Option<u64>>,
    pub(crate) unclaimed: BTreeSet<String>,
    /// Snapshots: of which claim, and of which generation.
    pub(crate) snapshots: BTreeMap<String, (String, u64)>,
}

impl Promised {
    pub(crate) fn by<'a>(facts: impl IntoIterator<Item = &'a Fact>) -> Self {
        let mut promised = Self::default();
        for fact in facts {
            promised.hear(fact);
        }
        promised
    }

    fn hear(&mut self, fact: &Fact) {
        match fact.clone() {
            Fact::Sealed(name) => {
                if self.importing.remove(&name) {
                    self.imported.insert(name.clone());
                }
                self.outputs.insert(name);
            }
            Fact::Importing(name) => drop(self.importing.insert(name)),
            Fact::Destroying(name) => {
                self.imported.remove(&name);
                self.outputs.remove(&name);
            }
            Fact::Destroyed(name) => drop(self.destroyed.insert(name)),
            Fact::Cached(generation) => self.cached = self.cached.max(Some(generation)),
            Fact::Claimed(name) => drop(self.claims.insert(name, None)),
            Fact::Unclaiming(name) => drop(self.claims.remove(&name)),
            Fact::Unclaimed(name) => drop(self.unclaimed.insert(name)),
            Fact::Synced(name, generation) => {
                self.claims.insert(name, Some(generation));
            }
            Fact::Snapshot(name, claim, generation) => {
                self.snapshots.insert(name, (claim, generation));
            }
        }
    }
}

/// Numbers that are the same for the same seed (splitmix64).
#[derive(Debug, Clone)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
}

/// The bytes of the file with this name.
pub(crate) fn bytes(tag: &str) -> Vec<u8> {
    let seed = tag.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let mut random = Random::new(seed);
    let most = if random.below(6) == 0 { 90_000 } else { 6000 };
    let words = random.below(most) / 8;
    (0..words)
        .flat_map(|_| random.next().to_le_bytes())
        .collect()
}

/// The content of an output with this name.
fn output(name: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let count = 3 + bytes(name).len() % 7;
    (0..count)
        .map(|number| {
            let path = PathBuf::from(format!("d{}/f{number}", number % 3));
            (path, bytes(&format!("{name}/{number}")))
        })
        .collect()
}

/// Writes it, as a pod would.
pub(crate) fn write_output(root: &Path, name: &str) -> std::io::Result<()> {
    for (path, content) in output(name) {
        let path = root.join(path);
        fs::create_dir_all(path.parent().expect("it has one"))?;
        fs::write(&path, content)?;
    }
    Ok(())
}

/// The differences between an output and its expected content.
pub(crate) fn wrong_with_output(root: &Path, name: &str) -> Option<String> {
    let mut found = BTreeMap::new();
    if let Err(error) = collect(root, root, &mut found) {
        return Some(format!("{name}: {error}"));
    }
    let expected: BTreeMap<PathBuf, Vec<u8>> = output(name).into_iter().collect();
    differ(name, &expected, &found)
}

/// How many of the newest generations a cache keeps.
const KEPT: u64 = 3;

/// The next generation of the cache: its file is made, the oldest goes.
pub(crate) fn write_cache(root: &Path, seed: u64, generation: u64) -> std::io::Result<()> {
    if let Some(old) = generation.checked_sub(KEPT) {
        match fs::remove_file(root.join(format!("g{old}"))) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    let tag = format!("{seed}-g{generation}");
    fs::write(root.join(format!("g{generation}")), bytes(&tag))?;
    fs::write(root.join("newest"), generation.to_string())
}

/// The generation of a cache, if it is whole.
pub(crate) fn cache_generation(root: &Path, seed: u64) -> Result<u64, String> {
    let newest = fs::read_to_string(root.join("newest")).map_err(|e| format!("newest: {e}"))?;
    let generation: u64 = newest.parse().map_err(|_| format!("newest: {newest:?}"))?;
    let mut found = BTreeMap::new();
    collect(root, root, &mut found).map_err(|error| error.to_string())?;
    found.remove(Path::new("newest"));
    let oldest = (generation + 1).saturating_sub(KEPT);
    let expected: BTreeMap<PathBuf, Vec<u8>> = (oldest..=generation)
        .map(|number| {
            let content = bytes(&format!("{seed}-g{number}"));
            (format!("g{number}").into(), content)
        })
        .collect();
    match differ(&format!("generation {generation}"), &expected, &found) {
        Some(why) => Err(why),
        None => Ok(generation),
    }
}

/// A pod's file in a claim: replaced whole, and durable when this returns.
pub(crate) fn write_claim(root: &Path, claim: &str, generation: u64) -> std::io::Result<()> {
    use std::io::Write as _;
    let new = root.join("new");
    let mut file = fs::File::create(&new)?;
    file.write_all(&generation.to_le_bytes())?;
    file.write_all(&bytes(&format!("{claim}-{generation}")))?;
    file.sync_all()?;
    fs::rename(new, root.join("current"))?;
    fs::File::open(root)?.sync_all()
}

/// Its generation, if it is whole; `None`: it is not there.
pub(crate) fn claim_generation(root: &Path, claim: &str) -> Result<Option<u64>, String> {
    let content = match fs::read(root.join("current")) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        content => content.map_err(|error| format!("{claim}: {error}"))?,
    };
    let Some((head, rest)) = content.split_first_chunk::<8>() else {
        return Err(format!("{claim}: {} bytes", content.len()));
    };
    let generation = u64::from_le_bytes(*head);
    if rest == bytes(&format!("{claim}-{generation}")) {
        return Ok(Some(generation));
    }
    Err(format!("{claim}: generation {generation} has other bytes"))
}

fn collect(root: &Path, dir: &Path, found: &mut BTreeMap<PathBuf, Vec<u8>>) -> std::io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            collect(root, &path, found)?;
        } else {
            let relative = path.strip_prefix(root).expect("it is below").to_owned();
            found.insert(relative, fs::read(&path)?);
        }
    }
    Ok(())
}

fn differ(
    what: &str,
    expected: &BTreeMap<PathBuf, Vec<u8>>,
    found: &BTreeMap<PathBuf, Vec<u8>>,
) -> Option<String> {
    if expected == found {
        return None;
    }
    let sizes = |files: &BTreeMap<PathBuf, Vec<u8>>| {
        let all = files
            .iter()
            .map(|(path, content)| format!("{} ({})", path.display(), content.len()));
        all.collect::<Vec<_>>().join(", ")
    };
    Some(format!(
        "{what}: expected {}; found {}",
        sizes(expected),
        sizes(found)
    ))
}
