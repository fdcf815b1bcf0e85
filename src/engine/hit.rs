//! A hit: a new volume starts from existing content. Collects the facts for the pod's event and for
//! the metrics; `publish` decides what a volume starts from.

use super::notice::{Forked, What};
use super::shared::Inner;
use super::state::State;
use super::types::{ContentSource, PublishRequest};
use crate::model::{Artifact, NodeId, Reference, VolumeRecord};

/// What there is to tell of a hit.
#[derive(Debug)]
pub(super) struct Hit {
    source: ContentSource,
    forked: Forked,
}

impl Hit {
    /// The facts about an artifact that a volume starts from, found under this name.
    pub(super) fn of(
        inner: &Inner,
        state: &State,
        request: &PublishRequest,
        found: &Reference,
        artifact: &Artifact,
    ) -> Self {
        let fetched = request.fetched.as_ref();
        let fetched = fetched.filter(|fetched| fetched.artifact == artifact.id);
        // New layers are not measured yet.
        let measured = state.catalog.usage_of(&artifact.layers);
        let bytes = measured.map(|usage| usage.bytes);
        let bytes = bytes.or(fetched.map(|fetched| fetched.bytes));
        let asked = request.spec.kind.asks_for();
        Self {
            source: fetched.map_or(ContentSource::Local, |fetched| fetched.source),
            forked: Forked {
                reference: found.clone(),
                instead_of: asked.filter(|asked| asked != found),
                bytes,
                age: inner.time().since(artifact.created),
                made_on: made_on(artifact, inner.config.node.as_ref()),
                fetched_from: fetched.map(|fetched| fetched.from.clone()),
            },
        }
    }

    /// Counts it, and tells the pod.
    pub(super) fn tell(self, inner: &Inner, record: &VolumeRecord) {
        let kind = record.spec.kind.type_name();
        let bytes = self.forked.bytes;
        inner.counters().hit(kind, self.source, bytes);
        inner.say(record, || What::Forked(self.forked));
    }
}

/// The node that committed an artifact, as a message says it. `None`: not known.
fn made_on(artifact: &Artifact, here: Option<&NodeId>) -> Option<String> {
    let maker = artifact.made_by.as_ref();
    let node = maker.and_then(|maker| maker.node.as_ref());
    let sharing = artifact.sharing;
    match node {
        Some(node) if Some(node) == here => Some("this node".to_owned()),
        Some(node) => Some(node.as_str().to_owned()),
        None if sharing.copied => Some("another node".to_owned()),
        // It may have come from the shared tier.
        None if sharing.number.is_some() => None,
        None => Some("this node".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Maker, Pod, Sharing};

    const ARTIFACT: &str = r#"{"id":"00000000000000000000000000000001","tenant":"ci",
        "reference":"task-cache/k","layers":[],"created":1,"lastUsed":1}"#;

    #[test]
    fn the_node_that_made_content_is_named_as_far_as_it_is_known() {
        let node = |name: &str| NodeId::new(name).expect("a name");
        let here = node("here");
        let pod = Pod {
            uid: "uid".parse().expect("a uid"),
            name: "pod".to_owned(),
            service_account: None,
        };
        let by = |node| Some(Box::new(Maker::new(pod.clone(), Vec::new(), node)));
        let copied = Sharing {
            copied: true,
            ..Sharing::default()
        };
        let shared = Sharing {
            number: Some(1),
            ..Sharing::default()
        };
        for (made_by, sharing, expected) in [
            (by(Some(node("far"))), copied, Some("far")),
            (by(Some(node("here"))), shared, Some("this node")),
            (by(None), copied, Some("another node")),
            (by(None), shared, None),
            (by(None), Sharing::default(), Some("this node")),
            // Imported.
            (None, Sharing::default(), Some("this node")),
        ] {
            let artifact = Artifact {
                made_by,
                sharing,
                ..serde_json::from_str(ARTIFACT).expect("an artifact")
            };
            let made_on = made_on(&artifact, Some(&here));
            assert_eq!(made_on.as_deref(), expected, "{artifact:?}");
        }
    }
}
