//! Sealed content: artifacts, names and layers, and the pure decisions about them. Garbage
//! collection, eviction and flattening are decided here from values alone.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::digest::Sha256;
use super::id::{ArtifactId, LayerId, VolumeId};
use super::name::{Name, Reference, Tenant};
use super::place::NodeId;
use super::time::Timestamp;
use super::volume::Pod;

/// Sealed, immutable content: a stack of layers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Artifact {
    /// Its id.
    pub id: ArtifactId,
    /// The tenant that may see it.
    pub tenant: Tenant,
    /// The name under which it was sealed. The index says whether the name still points here.
    pub reference: Reference,
    /// Its layers, newest first; never empty.
    pub layers: Vec<LayerId>,
    /// When its commit became due, or when it was imported or received. The order of commits to one
    /// name.
    pub created: Timestamp,
    /// Its time to live: since `created` (output) or last use (cache). `None`: until space is
    /// needed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_seconds: Option<u64>,
    /// When it was last forked or sealed.
    pub last_used: Timestamp,
    /// Its origin. Older records lack it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub made_by: Option<Box<Maker>>,
    /// The known digests. Records from before this field lack it.
    #[serde(default, skip_serializing_if = "Digests::is_empty")]
    pub digests: Digests,
    /// Its place in the shared tier. Records from before this field lack it.
    #[serde(default, skip_serializing_if = "Sharing::is_default")]
    pub sharing: Sharing,
    /// The highest [fence](super::Fence) that its maker's node had applied when the volume was
    /// published. Copies keep it. 0: there was none, or the record is from before this field.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub fence: u64,
}

/// The known facts about an artifact and the shared tier.
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is a field of the record"
)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Sharing {
    /// It never leaves this node.
    #[serde(skip_serializing_if = "is_false")]
    pub never: bool,
    /// The number of its name in the tier when the fork began. `None`: the tier was not asked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub base: Option<u64>,
    /// The number with which its name in the tier showed it. `None`: it is not in the tier.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub number: Option<u64>,
    /// The number of its name in the tier, 0 without a record, before the first attempt to write
    /// it. `None`: there was none, or its result is in the other fields.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attempted: Option<u64>,
    /// The tier refused it for good: an older resource cache or a newer commit has the name, or the
    /// name was cleared.
    #[serde(skip_serializing_if = "is_false")]
    pub refused: bool,
    /// It came from a peer, and was not in the tier then. Only its maker uploads it.
    #[serde(skip_serializing_if = "is_false")]
    pub copied: bool,
    /// A peer found this node's copy damaged. It does not leave this node any more.
    #[serde(skip_serializing_if = "is_false")]
    pub damaged: bool,
}

impl Sharing {
    /// Whether nothing is known.
    #[must_use]
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// Whether it may still be uploaded.
    #[must_use]
    pub fn is_wanted(&self) -> bool {
        self.may_leave() && !self.refused && !self.copied && self.number.is_none()
    }

    /// Whether peers and the tier may get it from this node.
    #[must_use]
    pub fn may_leave(&self) -> bool {
        !self.never && !self.damaged
    }

    /// Whether another place is known to have it, so that it can come back.
    #[must_use]
    pub fn is_elsewhere(&self) -> bool {
        self.copied || self.number.is_some()
    }

    /// The newest number of its name in the tier that its content is known to follow. `None`: none
    /// is known.
    #[must_use]
    pub fn follows(&self) -> Option<u64> {
        self.number.max(self.base)
    }

    /// Whether its content began before the clear of its name that has this number. 0: the name was
    /// never cleared. Content that follows no known number counts as older: a clear of another node
    /// must reach content from before the tier was known. Content that is never shared is this
    /// node's own, so no clear in the tier is about it.
    #[must_use]
    pub fn is_older_than_clear(&self, cleared: u64) -> bool {
        let follows_it = self.follows().is_some_and(|number| number >= cleared);
        !self.never && cleared > 0 && !follows_it
    }
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "the signature is serde's"
)]
pub(crate) fn is_false(value: &bool) -> bool {
    !value
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "the signature is serde's"
)]
pub(crate) fn is_zero(value: &u64) -> bool {
    *value == 0
}

/// The digests of an artifact's content, as far as they are known.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Digests {
    /// The digest of the tar stream that an export writes. The same content gives the same stream.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content: Option<Sha256>,
    /// The digest of the tar stream that was imported. Another program may have written the same
    /// content differently.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub imported: Option<Sha256>,
}

impl Digests {
    /// Whether none is known.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// The origin of an artifact, only for display. No decision uses it. [`Maker::new`] makes each one,
/// also that of a record. It bounds the text: records of other nodes and of the tier may have text
/// of any size, and this node's reports repeat it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", from = "Unbounded")]
pub struct Maker {
    /// The pod whose volume was sealed. Its name is empty if it was too long.
    pub pod: Pod,
    /// The images of the pod's containers that were known at the seal.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub images: Vec<String>,
    /// The node that sealed it. Older records lack it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<NodeId>,
    /// The artifact that the volume was a fork of. Older records and copies of peers lack it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parent: Option<ArtifactId>,
}

/// A maker as a record has it.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Unbounded {
    pod: Pod,
    #[serde(default)]
    images: Vec<String>,
    #[serde(default)]
    node: Option<NodeId>,
    #[serde(default)]
    parent: Option<ArtifactId>,
}

impl From<Unbounded> for Maker {
    fn from(read: Unbounded) -> Self {
        Self::new(read.pod, read.images, read.node).of_fork(read.parent)
    }
}

impl Maker {
    /// The most images in a record. Tenants choose them, and the record must stay small.
    const MOST_IMAGES: usize = 16;
    /// The longest image name in bytes. A longer one is omitted: cut, it names another image.
    const LONGEST_IMAGE: usize = 512;
    /// The longest name of a pod or service account in Kubernetes, in bytes. A longer one is
    /// omitted.
    const LONGEST_NAME: usize = 253;

    /// The origin for a pod with these container images.
    #[must_use]
    pub fn new(mut pod: Pod, images: Vec<String>, node: Option<NodeId>) -> Self {
        let fits = |name: &String| name.len() <= Self::LONGEST_NAME;
        if !fits(&pod.name) {
            pod.name = String::new();
        }
        pod.service_account = pod.service_account.filter(fits);
        Self {
            pod,
            images: Self::bounded(images),
            node,
            parent: None,
        }
    }

    /// The same, of a fork of this artifact.
    #[must_use]
    pub fn of_fork(self, parent: Option<ArtifactId>) -> Self {
        Self { parent, ..self }
    }

    /// The images to keep: each once, in their order.
    #[must_use]
    pub fn bounded(images: impl IntoIterator<Item = String>) -> Vec<String> {
        let mut kept: Vec<String> = Vec::new();
        for image in images {
            let fits = (1..=Self::LONGEST_IMAGE).contains(&image.len());
            if fits && kept.len() < Self::MOST_IMAGES && !kept.contains(&image) {
                kept.push(image);
            }
        }
        kept
    }
}

impl Artifact {
    /// Its tenant and reference.
    #[must_use]
    pub fn name(&self) -> Name {
        Name {
            tenant: self.tenant.clone(),
            reference: self.reference.clone(),
        }
    }

    /// When it expires.
    #[must_use]
    pub fn expires(&self) -> Option<Timestamp> {
        let since = if self.reference.cache().is_some() {
            self.last_used
        } else {
            self.created
        };
        self.ttl_seconds
            .map(|seconds| since.after(Duration::from_secs(seconds)))
    }
}

/// The record in a layer's directory from which `check --rebuild` restores the index.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LayerRecord {
    /// The version of this record's format: [`LayerRecord::FORMAT`].
    pub format: u32,
    /// The layer's id.
    pub id: LayerId,
    /// The artifact whose newest layer this is, as it was when the layer was made. `None` for a
    /// layer of a claim or snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub artifact: Option<Artifact>,
    /// The owner of a claim's layer, for display.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claim: Option<VolumeId>,
}

impl LayerRecord {
    /// The format that this version reads and writes.
    pub const FORMAT: u32 = 1;

    /// The record of a layer that belongs to this artifact, as its newest layer, or to this claim.
    #[must_use]
    pub fn of(id: LayerId, artifact: Option<Artifact>, claim: Option<VolumeId>) -> Self {
        Self {
            format: Self::FORMAT,
            id,
            artifact,
            claim,
        }
    }
}

/// Whether `candidate` takes a name from the artifact that has it.
///
/// The first writer of a resource cache wins; the last writer of any other name wins. Ties are
/// decided by the id, so that the order of two seals after a crash does not matter.
#[must_use]
pub fn takes_name(candidate: &Artifact, holder: &Artifact) -> bool {
    let order = |artifact: &Artifact| (artifact.created, artifact.id);
    if candidate.reference.first_writer_wins() {
        order(candidate) < order(holder)
    } else {
        order(candidate) > order(holder)
    }
}

/// An artifact as garbage collection sees it.
#[derive(Debug, Clone, Copy)]
pub struct Candidate<'a> {
    /// The artifact.
    pub artifact: &'a Artifact,
    /// Whether its name points at it.
    pub named: bool,
}

/// The artifacts to delete now: without a name, or expired, but not the parents of volumes
/// (`in_use`).
#[must_use]
pub fn garbage<'a>(
    artifacts: impl Iterator<Item = Candidate<'a>>,
    in_use: &HashSet<ArtifactId>,
    now: Timestamp,
) -> Vec<ArtifactId> {
    artifacts
        .filter(|candidate| !in_use.contains(&candidate.artifact.id))
        .filter(|candidate| {
            !candidate.named || candidate.artifact.expires().is_some_and(|at| at <= now)
        })
        .map(|candidate| candidate.artifact.id)
        .collect()
}

/// The artifacts to evict to free `bytes`: first those that the shared tier or a peer has, which
/// can come back, then the others; least recently used first, none in use. The last artifact with a
/// shared layer counts it.
#[must_use]
pub fn evict<'a>(
    artifacts: impl Iterator<Item = &'a Artifact>,
    in_use: &HashSet<ArtifactId>,
    layer_bytes: impl Fn(LayerId) -> u64,
    bytes: u64,
) -> Vec<ArtifactId> {
    let all: Vec<&Artifact> = artifacts.collect();
    let mut holders: HashMap<LayerId, usize> = HashMap::new();
    for layer in all.iter().flat_map(|artifact| &artifact.layers) {
        *holders.entry(*layer).or_default() += 1;
    }
    let mut candidates: Vec<&Artifact> = all
        .into_iter()
        .filter(|artifact| !in_use.contains(&artifact.id))
        .collect();
    let is_only_here = |artifact: &Artifact| !artifact.sharing.is_elsewhere();
    candidates.sort_by_key(|artifact| (is_only_here(artifact), artifact.last_used, artifact.id));
    let mut freed = 0u64;
    let mut chosen = Vec::new();
    for artifact in candidates {
        if freed >= bytes {
            break;
        }
        for layer in &artifact.layers {
            if let Some(count) = holders.get_mut(layer) {
                *count -= 1;
                if *count == 0 {
                    freed = freed.saturating_add(layer_bytes(*layer));
                }
            }
        }
        chosen.push(artifact.id);
    }
    chosen
}

/// Stacks of more layers are flattened.
pub const FLATTEN_ABOVE_LAYERS: usize = 16;
/// Stacks are flattened if Σ(directories × layers) exceeds the merged tree's by this factor.
const FLATTEN_ABOVE_SPREAD: u64 = 8;

/// The number of newest layers to merge into one; `None` to merge none.
///
/// A walk costs 2.8 µs for each directory in each layer; disjoint layers are nearly free. Small new
/// layers merge first, so that a commit does not link a large base again. The run of newest layers
/// grows while the next layer is not larger than it. It takes at least half of the stack, so that
/// the next flattening is half a stack away.
///
/// `directories` has each layer's count, newest first.
#[must_use]
pub fn flatten_plan(directories: &[u64]) -> Option<usize> {
    let layers = directories.len();
    if layers < 2 {
        return None;
    }
    let largest = directories.iter().copied().max().unwrap_or(0).max(1);
    let sum: u64 = directories.iter().sum();
    if layers <= FLATTEN_ABOVE_LAYERS && sum <= FLATTEN_ABOVE_SPREAD * largest {
        return None;
    }
    let mut taken = layers.div_ceil(2).max(2);
    let mut merged: u64 = directories[..taken].iter().sum();
    while taken < layers && directories[taken] <= merged {
        merged += directories[taken];
        taken += 1;
    }
    Some(taken)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn artifact(id: u128, reference: &str, created: u64, layers: &[u128]) -> Artifact {
        Artifact {
            id: ArtifactId::from_bits(id),
            tenant: "ci".parse().expect("label"),
            reference: reference.parse().expect("reference"),
            layers: layers.iter().copied().map(LayerId::from_bits).collect(),
            created: Timestamp(created),
            ttl_seconds: None,
            last_used: Timestamp(created),
            made_by: None,
            digests: Digests::default(),
            sharing: Sharing::default(),
            fence: 0,
        }
    }

    #[test]
    fn what_a_tenant_calls_images_cannot_make_a_record_large() {
        let long = "x".repeat(513);
        let images = ["a", "a", "", long.as_str(), "b"].map(str::to_owned);
        assert_eq!(Maker::bounded(images), ["a", "b"]);
        let many = (0..1000).map(|number| format!("image-{number}"));
        assert_eq!(Maker::bounded(many).len(), 16);
    }

    #[test]
    fn text_in_a_record_of_another_machine_cannot_make_a_maker_large() {
        let read = |name: usize, account: usize, images: usize| {
            let record = serde_json::json!({
                "pod": {
                    "uid": "u",
                    "name": "p".repeat(name),
                    "serviceAccount": "a".repeat(account),
                },
                "images": vec!["i".repeat(images), "small".to_owned()],
                "node": "node-1",
                "parent": ArtifactId::from_bits(7),
            });
            serde_json::from_value::<Maker>(record).expect("it is valid")
        };
        let whole = read(253, 253, 512);
        assert_eq!(whole.pod.name.len(), 253);
        assert_eq!(
            whole.pod.service_account.as_ref().map(String::len),
            Some(253)
        );
        assert_eq!(whole.images.len(), 2);
        let bounded = read(254, 254, 513);
        let expected = Maker {
            pod: Pod {
                name: String::new(),
                service_account: None,
                ..whole.pod.clone()
            },
            images: vec!["small".to_owned()],
            ..whole.clone()
        };
        assert_eq!(bounded, expected);
        // What is written is read as it was.
        for maker in [whole, bounded] {
            let record = serde_json::to_vec(&maker).expect("JSON");
            let read: Maker = serde_json::from_slice(&record).expect("it is valid");
            assert_eq!(read, maker);
        }
    }

    #[test]
    fn first_writer_keeps_a_resource_cache_and_last_writer_takes_the_rest() {
        let (old, new) = (
            artifact(1, "resource-cache/k", 1, &[1]),
            artifact(2, "resource-cache/k", 2, &[2]),
        );
        assert!(!takes_name(&new, &old) && takes_name(&old, &new));
        let (old, new) = (
            artifact(1, "task-cache/k", 1, &[1]),
            artifact(2, "task-cache/k", 2, &[2]),
        );
        assert!(takes_name(&new, &old) && !takes_name(&old, &new));
        // In the same millisecond one of them wins in either order.
        let (a, b) = (
            artifact(1, "artifact/k", 1, &[1]),
            artifact(2, "artifact/k", 1, &[2]),
        );
        assert!(takes_name(&a, &b) != takes_name(&b, &a));
    }

    #[test]
    fn outputs_expire_from_their_seal_and_caches_from_their_last_use() {
        let mut output = artifact(1, "artifact/a", 1_000, &[1]);
        let mut cache = artifact(2, "task-cache/a", 1_000, &[2]);
        for artifact in [&mut output, &mut cache] {
            artifact.ttl_seconds = Some(10);
            artifact.last_used = Timestamp(5_000);
        }
        assert_eq!(output.expires(), Some(Timestamp(11_000)));
        assert_eq!(cache.expires(), Some(Timestamp(15_000)));
    }

    #[test]
    fn what_is_in_use_is_never_garbage() {
        let (a, b, c) = (
            artifact(1, "task-cache/a", 1, &[1]),
            artifact(2, "task-cache/a", 2, &[2]),
            {
                let mut c = artifact(3, "artifact/c", 1, &[3]);
                c.ttl_seconds = Some(1);
                c
            },
        );
        let all = || {
            [(&a, false), (&b, true), (&c, true)]
                .into_iter()
                .map(|(artifact, named)| Candidate { artifact, named })
        };
        assert_eq!(
            garbage(all(), &HashSet::new(), Timestamp(5_000)),
            [a.id, c.id]
        );
        assert_eq!(
            garbage(all(), &HashSet::from([a.id]), Timestamp(5_000)),
            [c.id]
        );
        assert_eq!(garbage(all(), &HashSet::new(), Timestamp(1_000)), [a.id]);
    }

    #[test]
    fn eviction_takes_the_least_recently_used_and_counts_shared_layers_once() {
        let base = artifact(1, "task-cache/a", 1, &[1]);
        let child = artifact(2, "task-cache/b", 2, &[2, 1]);
        let other = artifact(3, "task-cache/c", 3, &[3]);
        let all = [base.clone(), child.clone(), other.clone()];
        let bytes = |_| 10;
        let chosen = |in_use: &[ArtifactId], wanted| {
            evict(all.iter(), &in_use.iter().copied().collect(), bytes, wanted)
        };
        assert_eq!(
            chosen(&[], 1),
            [base.id, child.id],
            "the shared layer comes free with the child only"
        );
        assert_eq!(chosen(&[], 21), [base.id, child.id, other.id]);
        assert_eq!(chosen(&[child.id, base.id], 100), [other.id]);
        assert!(chosen(&[], 0).is_empty());
    }

    #[test]
    fn eviction_takes_first_what_the_shared_tier_or_a_peer_has() {
        let held = |id, used, number, copied| {
            let mut artifact = artifact(id, "task-cache/a", used, &[id]);
            artifact.sharing.number = number;
            artifact.sharing.copied = copied;
            artifact
        };
        let all = [
            held(1, 1, None, false),
            held(2, 4, Some(9), false),
            held(3, 3, Some(8), false),
            held(4, 2, None, false),
            held(5, 6, None, true),
            held(6, 5, None, true),
        ];
        let chosen = evict(all.iter(), &HashSet::new(), |_| 10, 100);
        assert_eq!(chosen, [3, 2, 6, 5, 1, 4].map(ArtifactId::from_bits));
        // Originals stay as long as copies suffice.
        let chosen = evict(all.iter(), &HashSet::new(), |_| 10, 40);
        assert_eq!(chosen, [3, 2, 6, 5].map(ArtifactId::from_bits));
    }

    #[test]
    fn a_record_from_before_sharing_is_read_and_nothing_known_is_not_written() {
        let plain = artifact(1, "task-cache/a", 1, &[1]);
        let json = serde_json::to_string(&plain).expect("plain data serialises");
        assert!(!json.contains("sharing"), "{json}");
        let read: Artifact = serde_json::from_str(&json).expect("an older record");
        assert_eq!(read, plain);
        let known = Artifact {
            sharing: Sharing {
                never: false,
                base: Some(3),
                number: Some(5),
                attempted: Some(4),
                refused: true,
                copied: false,
                damaged: true,
            },
            ..plain
        };
        let json = serde_json::to_string(&known).expect("plain data serialises");
        let written =
            r#""sharing":{"base":3,"number":5,"attempted":4,"refused":true,"damaged":true}"#;
        assert!(json.contains(written), "{json}");
        let read: Artifact = serde_json::from_str(&json).expect("it is read");
        assert_eq!(read, known);
        assert!(!known.sharing.is_wanted() && Sharing::default().is_wanted());
        assert_eq!(known.sharing.follows(), Some(5));
    }

    #[test]
    fn an_origin_from_before_nodes_is_read_and_an_unknown_node_is_not_written() {
        let older = r#"{"pod":{"uid":"u","name":"p"},"images":["i"]}"#;
        let mut maker: Maker = serde_json::from_str(older).expect("an older record");
        assert_eq!(maker.node, None);
        let json = serde_json::to_string(&maker).expect("plain data serialises");
        assert_eq!(json, older);
        maker.node = NodeId::new("node-2").ok();
        let json = serde_json::to_string(&maker).expect("plain data serialises");
        assert!(json.ends_with(r#""node":"node-2"}"#), "{json}");
        assert_eq!(serde_json::from_str::<Maker>(&json).expect("read"), maker);
    }

    #[test]
    fn a_record_from_before_digests_is_read_and_unknown_ones_are_not_written() {
        let plain = artifact(1, "task-cache/a", 1, &[1]);
        let json = serde_json::to_string(&plain).expect("plain data serialises");
        assert!(!json.contains("digests"), "{json}");
        let read: Artifact = serde_json::from_str(&json).expect("an older record");
        assert_eq!(read, plain);
        let known = Artifact {
            digests: Digests {
                content: Some(Sha256([1; 32])),
                imported: None,
            },
            ..plain
        };
        let json = serde_json::to_string(&known).expect("plain data serialises");
        assert!(
            json.contains(r#""digests":{"content":"sha256:0101"#),
            "{json}"
        );
        let read: Artifact = serde_json::from_str(&json).expect("it is read");
        assert_eq!(read, known);
    }

    #[test]
    fn long_or_spread_out_stacks_are_flattened_small_new_layers_first() {
        assert_eq!(flatten_plan(&[1]), None);
        assert_eq!(
            flatten_plan(&[1; 16]),
            Some(16),
            "each layer holds the whole tree: sixteen times its directories"
        );
        let mut base_and_small = vec![1u64; 15];
        base_and_small.push(10_000);
        assert_eq!(
            flatten_plan(&base_and_small),
            None,
            "cheap to walk, and not too long"
        );
        base_and_small.insert(0, 1);
        assert_eq!(
            flatten_plan(&base_and_small),
            Some(16),
            "the base stays as it is"
        );
        assert_eq!(flatten_plan(&[1000; 9]), Some(9));
        assert_eq!(flatten_plan(&[1000; 8]), None);
    }
}
