//! Content that this node can fetch: what a name shows, and the sources that have it, in the order
//! in which they are asked.

use std::fmt;
use std::fs::File;
use std::ops::Deref;
use std::sync::Arc;

use super::peers::Holding;
use crate::engine::{ContentSource, FetchedContent};
use crate::model::{ArtifactId, Reference, Sharing, Tenant};
use crate::shared::{
    Bucket, Content, Error, Found, LayerRef, Resolved, Result, Source, content_of,
};
use crate::tree::Stop;

/// Content that can be fetched.
pub(super) struct Offered {
    found: Found,
    /// Whether `found` is the tier's.
    is_of_tier: bool,
    /// The content's state in the tier, as this node will record it.
    pub(super) sharing: Sharing,
    /// Whether the tier is asked before the peers.
    prefers_tier: bool,
    /// The peers that have it, with their names.
    holders: Vec<(String, Arc<dyn Source>)>,
}

impl Deref for Offered {
    type Target = Found;

    fn deref(&self) -> &Found {
        &self.found
    }
}

impl fmt::Debug for Offered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} from {}", self.manifest.artifact, self.from())
    }
}

impl Offered {
    /// What the tier shows.
    pub(super) fn of_tier(found: Found) -> Self {
        let sharing = Sharing {
            number: Some(found.record.number),
            ..Sharing::default()
        };
        Self {
            found,
            is_of_tier: true,
            prefers_tier: false,
            sharing,
            holders: Vec::new(),
        }
    }

    /// The peers' content; the first peer describes it. `None`: no peer has this artifact.
    pub(super) fn of_peers(mut holdings: Vec<Holding>, artifact: ArtifactId) -> Option<Self> {
        holdings.sort_by_key(|it| it.rank);
        let has_it = |it: &Holding| it.found.manifest.artifact == artifact;
        let mut holdings = holdings.into_iter().filter(has_it);
        let first = holdings.next()?;
        let sharing = Sharing {
            copied: first.sharing.number.is_none(),
            never: false,
            ..first.sharing
        };
        let mut offered = Self {
            found: first.found,
            is_of_tier: false,
            prefers_tier: false,
            sharing,
            holders: vec![(first.node, first.source)],
        };
        let others: Vec<Holding> = holdings.filter(|it| offered.is_held(it)).collect();
        let others = others.into_iter().map(|it| (it.node, it.source));
        offered.holders.extend(others);
        Some(offered)
    }

    /// Whether a peer has this content, in these layers. The id of an artifact is the same on all
    /// nodes. Its layers are, too, unless a node merged some. A peer that says another length for a
    /// layer is no holder of it: none is measured by what another one says.
    pub(super) fn is_held(&self, holding: &Holding) -> bool {
        let theirs = &holding.found.manifest;
        let same = |layer: &LayerRef| (layer.digest, layer.content, layer.table);
        let layers = theirs.layers.iter().map(same);
        theirs.artifact == self.manifest.artifact
            && layers.eq(self.manifest.layers.iter().map(same))
    }

    /// The tier shows it, too, with this number. `prefers_tier`: it is asked before the peers.
    pub(super) fn is_shown(&mut self, number: u64, prefers_tier: bool) {
        self.sharing.number = Some(number);
        self.sharing.copied = false;
        self.prefers_tier = prefers_tier;
    }

    /// Whether no peer offers it.
    pub(super) fn is_only_in_tier(&self) -> bool {
        self.holders.is_empty()
    }

    /// Where it comes from: the source that is asked first.
    pub(super) fn source(&self) -> ContentSource {
        if self.is_only_in_tier() || self.prefers_tier {
            ContentSource::Shared
        } else {
            ContentSource::Peer
        }
    }

    /// Where it comes from, for messages. The first peers are the ones that are asked first.
    pub(super) fn from(&self) -> String {
        if self.source() == ContentSource::Shared {
            return "the shared tier".to_owned();
        }
        let names: Vec<&str> = self.holders.iter().map(|(name, _)| &**name).collect();
        match names[..] {
            [name] => format!("peer {name}"),
            [one, two, _, _, ..] => format!("peers {one}, {two} and {} more", names.len() - 2),
            _ => format!("peers {}", names.join(", ")),
        }
    }

    /// What the engine notes of it for a volume, after its fetch.
    pub(super) fn fetched(&self) -> FetchedContent {
        FetchedContent {
            artifact: self.manifest.artifact,
            source: self.source(),
            from: self.from(),
            bytes: content_of(&self.manifest.layers),
        }
    }

    /// The sources, in their order. `newer`: the peers that were found since. They come before
    /// those that had it when it was offered.
    pub(super) fn sources(
        &self,
        newer: Vec<Holding>,
        bucket: Option<Bucket>,
    ) -> Vec<Arc<dyn Source>> {
        let is_newer = |name: &str| newer.iter().any(|it| it.node == name);
        let older = self.holders.iter().filter(|(name, _)| !is_newer(name));
        let older: Vec<_> = older.map(|(_, source)| Arc::clone(source)).collect();
        let mut sources: Vec<_> = newer.into_iter().map(|it| it.source).collect();
        sources.extend(older);
        if let Some(bucket) = bucket {
            let tier: Arc<dyn Source> = if self.is_of_tier {
                Arc::new(bucket)
            } else {
                let reference = self.record.reference.clone();
                Arc::new(Shown { bucket, reference })
            };
            let place = if self.prefers_tier { 0 } else { sources.len() };
            sources.insert(place, tier);
        }
        sources
    }
}

/// The tier as a source of what peers offered. It is asked where it has a layer only when that is
/// needed.
struct Shown {
    bucket: Bucket,
    reference: Reference,
}

impl Source for Shown {
    fn name(&self) -> String {
        self.bucket.name()
    }

    fn resolve(
        &self,
        tenant: &Tenant,
        reference: &Reference,
        has: Option<ArtifactId>,
    ) -> Result<Resolved> {
        self.bucket.resolve(tenant, reference, has)
    }

    fn open(
        &self,
        tenant: &Tenant,
        layer: &LayerRef,
        table: &File,
        stop: Stop<'_>,
    ) -> Result<Box<dyn Content>> {
        let resolved = self.bucket.resolve(tenant, &self.reference, None)?;
        let found = match &resolved {
            Resolved::Found(found) => {
                let layers = &found.manifest.layers;
                // Space was asked for by the lengths of the layer that was offered.
                let is_it = |it: &&LayerRef| {
                    let lengths = (it.content, it.table) == (layer.content, layer.table);
                    it.digest == layer.digest && lengths
                };
                layers.iter().find(is_it)
            }
            _ => None,
        };
        match found {
            Some(found) => self.bucket.open(tenant, found, table, stop),
            None => Err(Error::Missing {
                object: format!("layer {} in {}", layer.digest, self.name()),
            }),
        }
    }
}
