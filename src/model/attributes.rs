//! The attribute table: parses a pod's `volumeAttributes` into one typed value.
//!
//! An unknown attribute, a bad value, or one that is not valid for the type is an error that names
//! the attribute and the valid values. A typo must never create a new cache.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::digest::Sha256;
use super::name::{ArtifactName, CacheKey, Reference, Tenant};
use super::origin::{Origin, RestoreKey, TenantOrigin};
use super::quantity;
use super::root::RootAttributes;

/// The prefix of the keys that kubelet adds to a pod's attributes, and sidecars to parameters.
pub const KUBELET: &str = "csi.storage.k8s.io/";

/// A volume's type and the attributes of that type.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "kebab-case")]
pub enum VolumeKind {
    /// Empty; deleted with its pod.
    Scratch,
    /// A copy-on-write view of existing content.
    Input {
        /// The content's reference.
        from: Reference,
    },
    /// Starts empty; its content outlives the pod under a name.
    Output {
        /// The artifact's name.
        name: ArtifactName,
        /// When it is sealed, and for how long it is kept.
        #[serde(flatten)]
        keep: Keep,
    },
    /// Fetched once, then immutable. The first writer wins.
    ResourceCache {
        /// The cache's key.
        key: CacheKey,
        /// When it is sealed, and for how long it is kept.
        #[serde(flatten)]
        keep: Keep,
    },
    /// Forks the last commit and commits back. The last writer wins.
    TaskCache {
        /// The cache's key.
        key: CacheKey,
        /// Tried in their order while `key` has no commit.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        restore_keys: Vec<RestoreKey>,
        /// When it is sealed, and for how long it is kept.
        #[serde(flatten)]
        keep: Keep,
    },
    /// The content of an external archive or image.
    Import {
        /// The origin: `oci://…` or `https://….tar.zst`.
        source: String,
        /// `sha256:` and 64 hex digits; checked if present.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        digest: Option<String>,
    },
}

impl VolumeKind {
    /// The value of the attribute `type`.
    #[must_use]
    pub fn type_name(&self) -> &'static str {
        match self {
            Self::Scratch => "scratch",
            Self::Input { .. } => "input",
            Self::Output { .. } => "output",
            Self::ResourceCache { .. } => "resource-cache",
            Self::TaskCache { .. } => "task-cache",
            Self::Import { .. } => "import",
        }
    }

    /// Its content's name after the seal, and when to seal and keep it. `None` if never sealed.
    #[must_use]
    pub fn committed_as(&self) -> Option<(Reference, Keep)> {
        match self {
            Self::Output { name, keep } => Some((Reference::Artifact(name.clone()), *keep)),
            Self::ResourceCache { key, keep } => {
                Some((Reference::ResourceCache(key.clone()), *keep))
            }
            Self::TaskCache { key, keep, .. } => Some((Reference::TaskCache(key.clone()), *keep)),
            Self::Scratch | Self::Input { .. } | Self::Import { .. } => None,
        }
    }

    /// The name that it asks for: its content if there is some, without restore keys. `None`: it
    /// starts empty.
    #[must_use]
    pub fn asks_for(&self) -> Option<Reference> {
        match self {
            Self::Input { from } => Some(from.clone()),
            Self::ResourceCache { key, .. } => Some(Reference::ResourceCache(key.clone())),
            Self::TaskCache { key, .. } => Some(Reference::TaskCache(key.clone())),
            Self::Scratch | Self::Output { .. } | Self::Import { .. } => None,
        }
    }

    /// The content to fork: the first that exists is used. Empty if it starts empty.
    #[must_use]
    pub fn starts_from(&self) -> Vec<Origin> {
        let first = self.asks_for().map(Origin::Name);
        let others: &[RestoreKey] = match self {
            Self::TaskCache { restore_keys, .. } => restore_keys,
            _ => &[],
        };
        let others = others.iter().cloned().map(Origin::from);
        first.into_iter().chain(others).collect()
    }
}

/// When to seal content, and how long to keep it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Keep {
    /// The condition for the seal.
    pub commit: Commit,
    /// The time to live: since the seal (output) or last use (cache); `None`: by policy.
    #[serde(
        default,
        with = "ttl_seconds",
        rename = "ttlSeconds",
        skip_serializing_if = "Option::is_none"
    )]
    pub ttl: Option<Duration>,
}

/// The condition for sealing a volume's content at the end of its pod.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Commit {
    /// If the pod succeeded.
    #[default]
    OnSuccess,
    /// Without a condition.
    Always,
    /// Never.
    Never,
    /// If the volume's root contains a regular file `.baggageclaim-commit`.
    OnMarker,
}

/// The default time to live of an output.
pub const DEFAULT_OUTPUT_TTL: Duration = Duration::from_secs(12 * 60 * 60);

/// The longest time to live: ten years. A longer one is a typo.
const MAX_TTL: Duration = Duration::from_secs(10 * 365 * 24 * 60 * 60);

/// The most restore keys of a task cache.
const MAX_RESTORE_KEYS: usize = 16;

/// All attributes of a pod's volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeSpec {
    /// Its type.
    #[serde(flatten)]
    pub kind: VolumeKind,
    /// The namespace whose content it starts from. `None`: the pod's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from_namespace: Option<Tenant>,
    /// The owner and mode of its root directory.
    #[serde(default)]
    pub root: RootAttributes,
    /// The limit for its private content, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_limit: Option<u64>,
    /// Whether its content goes to the shared tier. `None`: the node's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share: Option<Share>,
    /// Whether the shared tier is asked for newer content. `None`: the default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub freshness: Option<Freshness>,
}

/// Whether committed content goes to the shared tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Share {
    /// It does where the node has a tier.
    Auto,
    /// It stays on its node.
    Never,
}

/// Where a task cache that this node has is looked for before it is used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Freshness {
    /// In the shared tier, which may have a newer commit.
    #[default]
    Tier,
    /// Only on this node.
    Local,
}

/// An invalid attribute.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("volume attribute {attribute:?} {problem}")]
pub struct AttributeError {
    /// Its name.
    pub attribute: String,
    /// The problem and the valid values. Continues the sentence.
    pub problem: String,
}

impl AttributeError {
    fn new(attribute: &str, problem: impl fmt::Display) -> Self {
        // Truncate: a hostile name or value must not fill the log.
        let attribute = attribute.chars().take(64).collect();
        Self {
            attribute,
            problem: problem.to_string(),
        }
    }

    /// A value that is not what the attribute takes.
    fn expected(attribute: &str, value: &str, expected: &str) -> Self {
        let problem = format_args!("is {}; expected {expected}", quote(value));
        Self::new(attribute, problem)
    }
}

const ALL: &[&str] = &[
    "scratch",
    "input",
    "output",
    "resource-cache",
    "task-cache",
    "import",
];
const KEPT: &[&str] = &["output", "resource-cache", "task-cache"];
const READ: &[&str] = &["input", "resource-cache", "task-cache"];
const CACHES: &[&str] = &["resource-cache", "task-cache"];

/// Each attribute and the types for which it is valid.
const TABLE: &[(&str, &[&str])] = &[
    ("type", ALL),
    ("from", &["input"]),
    ("name", &["output"]),
    ("key", CACHES),
    ("restoreKeys", &["task-cache"]),
    ("fromNamespace", READ),
    ("commit", KEPT),
    ("ttl", KEPT),
    ("share", KEPT),
    ("freshness", &["task-cache"]),
    ("source", &["import"]),
    ("digest", &["import"]),
    ("uid", ALL),
    ("gid", ALL),
    ("mode", ALL),
    ("sizeLimit", ALL),
];

impl VolumeSpec {
    /// What it may start from, in the order in which it is tried, for a volume of the namespace
    /// `own`. With `fromNamespace`: a cache's own key in its own namespace, since it is committed
    /// there; then everything in the other one.
    #[must_use]
    pub fn origins(&self, own: &Tenant) -> Vec<TenantOrigin> {
        let origins = self.kind.starts_from();
        let committed = self.kind.committed_as().is_some();
        let kept = origins.first().filter(|_| committed).cloned();
        let (kept, other) = match &self.from_namespace {
            Some(other) if other != own => (kept, other),
            _ => (None, own),
        };
        let of = |tenant: &Tenant, origin| TenantOrigin {
            tenant: tenant.clone(),
            origin,
        };
        let kept = kept.into_iter().map(|origin| of(own, origin));
        let rest = origins.into_iter().map(|origin| of(other, origin));
        kept.chain(rest).collect()
    }

    /// Parses the user's attributes. The caller removes kubelet's keys first.
    pub fn parse(attributes: &BTreeMap<String, String>) -> Result<Self, AttributeError> {
        let get = |name: &str| attributes.get(name).map(String::as_str);
        let names: Vec<&str> = TABLE.iter().map(|(name, _)| *name).collect();
        if let Some(name) = attributes
            .keys()
            .find(|name| !names.contains(&name.as_str()))
        {
            return Err(AttributeError::new(name, unknown(name, &names)));
        }
        let type_name = get("type").unwrap_or("scratch");
        if !ALL.contains(&type_name) {
            return Err(AttributeError::new(
                "type",
                format_args!("is {}; allowed are {}", quote(type_name), list(ALL)),
            ));
        }
        for (name, types) in TABLE {
            if attributes.contains_key(*name) && !types.contains(&type_name) {
                let hint = if get("type").is_none() {
                    ", which is the default when `type` is not given"
                } else {
                    ""
                };
                return Err(AttributeError::new(
                    name,
                    format_args!(
                        "is not valid for type {type_name:?}{hint}; it is valid for {}",
                        list(types)
                    ),
                ));
            }
        }
        let required = |name: &'static str| {
            get(name).ok_or_else(|| {
                AttributeError::new(
                    name,
                    format_args!("is missing; type {type_name:?} needs it"),
                )
            })
        };
        let kind = match type_name {
            "input" => VolumeKind::Input {
                from: parse_name("from", required("from")?)?,
            },
            "output" => {
                let name = parse_name("name", required("name")?)?;
                let keep = parse_keep(get("commit"), get("ttl"), COMMITS)?;
                let ttl = keep.ttl.or(Some(DEFAULT_OUTPUT_TTL));
                VolumeKind::Output {
                    name,
                    keep: Keep { ttl, ..keep },
                }
            }
            "resource-cache" => VolumeKind::ResourceCache {
                key: parse_name("key", required("key")?)?,
                // A partial fetch must not become immutable, so `always` is not valid here.
                keep: parse_keep(get("commit"), get("ttl"), NARROWING_COMMITS)?,
            },
            "task-cache" => VolumeKind::TaskCache {
                key: parse_name("key", required("key")?)?,
                restore_keys: parse_restore_keys(get("restoreKeys"))?,
                keep: parse_keep(get("commit"), get("ttl"), COMMITS)?,
            },
            "import" => VolumeKind::Import {
                source: parse_source(required("source")?)?,
                digest: get("digest").map(parse_digest).transpose()?,
            },
            _ => VolumeKind::Scratch,
        };
        let from_namespace = get("fromNamespace");
        let from_namespace = from_namespace.map(|text| parse_name("fromNamespace", text));
        let root = parse_root(attributes)?;
        let size_limit = get("sizeLimit").map(parse_size_limit).transpose()?;
        Ok(Self {
            kind,
            from_namespace: from_namespace.transpose()?,
            root,
            size_limit,
            share: parse_choice("share", get("share"), SHARES)?,
            freshness: parse_choice("freshness", get("freshness"), FRESHNESSES)?,
        })
    }
}

const SHARES: &[(&str, Share)] = &[("auto", Share::Auto), ("never", Share::Never)];
const FRESHNESSES: &[(&str, Freshness)] = &[("tier", Freshness::Tier), ("local", Freshness::Local)];

/// The value that this text names, if there is one.
fn parse_choice<T: Copy>(
    attribute: &str,
    text: Option<&str>,
    allowed: &[(&str, T)],
) -> Result<Option<T>, AttributeError> {
    let Some(text) = text else { return Ok(None) };
    let found = allowed.iter().find(|(name, _)| *name == text);
    found.map(|(_, value)| Some(*value)).ok_or_else(|| {
        let names: Vec<&str> = allowed.iter().map(|(name, _)| *name).collect();
        let problem = format_args!("is {}; allowed here are {}", quote(text), list(&names));
        AttributeError::new(attribute, problem)
    })
}

const COMMITS: &[(&str, Commit)] = &[
    ("on-success", Commit::OnSuccess),
    ("always", Commit::Always),
    ("never", Commit::Never),
    ("on-marker", Commit::OnMarker),
];
const NARROWING_COMMITS: &[(&str, Commit)] = &[
    ("on-success", Commit::OnSuccess),
    ("never", Commit::Never),
    ("on-marker", Commit::OnMarker),
];

fn parse_keep(
    commit: Option<&str>,
    ttl: Option<&str>,
    allowed: &[(&str, Commit)],
) -> Result<Keep, AttributeError> {
    let commit = parse_choice("commit", commit, allowed)?.unwrap_or_default();
    let ttl = ttl.map(parse_ttl).transpose()?;
    Ok(Keep { commit, ttl })
}

pub(super) fn parse_ttl(text: &str) -> Result<Duration, AttributeError> {
    let wrong = || {
        let expected = "a duration such as 30m, 12h or 7d, from 1s to ten years";
        AttributeError::expected("ttl", text, expected)
    };
    let ttl = humantime::parse_duration(text).map_err(|_| wrong())?;
    let whole_seconds = Duration::from_secs(ttl.as_secs());
    if whole_seconds.is_zero() || ttl != whole_seconds || ttl > MAX_TTL {
        Err(wrong())
    } else {
        Ok(ttl)
    }
}

fn parse_name<T: std::str::FromStr<Err: fmt::Display>>(
    attribute: &str,
    text: &str,
) -> Result<T, AttributeError> {
    text.parse()
        .map_err(|error| AttributeError::new(attribute, error))
}

fn parse_restore_keys(text: Option<&str>) -> Result<Vec<RestoreKey>, AttributeError> {
    let Some(text) = text else {
        return Ok(Vec::new());
    };
    let keys = text
        .split(',')
        .map(str::trim)
        .map(|key| parse_name("restoreKeys", key));
    let keys: Vec<RestoreKey> = keys.collect::<Result<_, _>>()?;
    if keys.len() > MAX_RESTORE_KEYS {
        let problem = format_args!(
            "names {} keys, at most {MAX_RESTORE_KEYS} are allowed",
            keys.len()
        );
        return Err(AttributeError::new("restoreKeys", problem));
    }
    Ok(keys)
}

fn parse_source(text: &str) -> Result<String, AttributeError> {
    let known =
        text.starts_with("oci://") || (text.starts_with("https://") && text.ends_with(".tar.zst"));
    let plain = text.len() <= 2048 && !text.chars().any(|c| c.is_control() || c.is_whitespace());
    if known && plain {
        Ok(text.to_owned())
    } else {
        let problem = format_args!(
            "is {}; allowed are oci://REGISTRY/NAME and https://HOST/….tar.zst",
            quote(text)
        );
        Err(AttributeError::new("source", problem))
    }
}

fn parse_digest(text: &str) -> Result<String, AttributeError> {
    let digest = text.parse::<Sha256>().ok().map(String::from);
    let digest = digest.filter(|digest| digest == text);
    digest.ok_or_else(|| {
        let expected = "sha256: and 64 lower-case hex digits";
        AttributeError::expected("digest", text, expected)
    })
}

/// The owner and mode of a volume's root, from a pod's attributes or a class's parameters.
pub(super) fn parse_root(
    attributes: &BTreeMap<String, String>,
) -> Result<RootAttributes, AttributeError> {
    let id = |name| {
        let text: Option<&String> = attributes.get(name);
        text.map(|text| parse_id(name, text)).transpose()
    };
    let mode = attributes.get("mode").map(|text| parse_mode(text));
    Ok(RootAttributes {
        mode: mode.transpose()?,
        uid: id("uid")?,
        gid: id("gid")?,
        mount_group: None,
    })
}

fn parse_mode(text: &str) -> Result<u32, AttributeError> {
    // `from_str_radix` alone would accept "+7".
    let is_octal = text.len() <= 5 && text.bytes().all(|b| (b'0'..=b'7').contains(&b));
    let mode = u32::from_str_radix(text, 8).ok();
    let mode = mode.filter(|mode| is_octal && *mode <= 0o7777);
    mode.ok_or_else(|| AttributeError::expected("mode", text, "an octal number from 0 to 7777"))
}

fn parse_id(attribute: &str, text: &str) -> Result<u32, AttributeError> {
    // 4294967295 is the kernel's invalid id; Kubernetes allows up to 2147483647.
    const MAX: u32 = 2_147_483_647;
    // `parse` alone would accept "+5".
    let is_number = text.bytes().all(|b| b.is_ascii_digit());
    let id = text.parse().ok().filter(|id| is_number && *id <= MAX);
    id.ok_or_else(|| {
        AttributeError::expected(attribute, text, &format!("a number from 0 to {MAX}"))
    })
}

pub(super) fn parse_size_limit(text: &str) -> Result<u64, AttributeError> {
    let bytes = quantity::parse_bytes(text).filter(|bytes| *bytes > 0);
    bytes.ok_or_else(|| {
        let expected = "a positive Kubernetes quantity such as 500Mi or 2Gi";
        AttributeError::expected("sizeLimit", text, expected)
    })
}

/// The problem of a name that is none of `names`.
pub(super) fn unknown(name: &str, names: &[&str]) -> String {
    let name = name.trim();
    let near = names.iter().find(|known| known.eq_ignore_ascii_case(name));
    match near {
        Some(near) => format!("is unknown; did you mean {near:?}?"),
        None => format!("is unknown; known are {}", list(names)),
    }
}

/// A value as messages quote it: escaped, and truncated if it is long.
pub(super) fn quote(text: &str) -> String {
    const MOST: usize = 80;
    let cut: String = text.chars().take(MOST).collect();
    if cut.len() < text.len() {
        format!("{cut:?}… ({} bytes)", text.len())
    } else {
        format!("{cut:?}")
    }
}

pub(super) fn list(names: &[&str]) -> String {
    names.join(", ")
}

/// Serialises a time to live as whole seconds.
mod ttl_seconds {
    use std::time::Duration;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[expect(clippy::ref_option, reason = "the signature is serde's")]
    pub(super) fn serialize<S: Serializer>(
        ttl: &Option<Duration>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        ttl.map(|ttl| ttl.as_secs()).serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<Duration>, D::Error> {
        Ok(Option::<u64>::deserialize(deserializer)?.map(Duration::from_secs))
    }
}

#[cfg(test)]
mod tests;
