//! Which nodes a pod prefers, and how much, from where its content is. Pure: no pod, no JSON, no
//! catalog.
//!
//! The scheduler adds up the weights of the terms that a node matches, and then scales the sums of
//! all nodes so that the best node has 100 points (Kubernetes 1.37, `NodeAffinity.NormalizeScore`).
//! So a weight says how much a node has compared with the other nodes, and with the pod's own
//! terms. It cannot say that the content is small: without other terms, weight 1 counts as much as
//! weight 100. Hence [`LEAST_BYTES`].

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;

/// The most nodes that a pod prefers. The catalog names as many for each name.
pub(super) const MOST_NODES: usize = 5;

/// A node with less of a pod's content is not preferred. To fetch so much takes some 10 ms, and a
/// worse spread over the nodes costs more.
pub(super) const LEAST_BYTES: u64 = 1 << 20;

/// What content counts whose size is not known yet. Its node measures it within a minute after the
/// commit, and the next step of a pipeline begins earlier.
pub(super) const UNMEASURED_BYTES: u64 = 64 << 20;

/// Content that a pod starts from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Content {
    /// Its size; 0: not known yet.
    pub(super) bytes: u64,
    /// The nodes that have it.
    pub(super) holders: Vec<Arc<str>>,
}

/// A preferred node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Preferred {
    /// Its name.
    pub(super) node: Arc<str>,
    /// How much of the pod's content it has, in percent: 1 to 100, as Kubernetes demands.
    pub(super) weight: u8,
}

/// The nodes that a pod prefers: those with most of its content first. Among equal ones, `pod`
/// decides: not all pods with one cache shall prefer the same few of its many holders.
pub(super) fn preferred(contents: &[Content], pod: &str) -> Vec<Preferred> {
    let mut total = 0_u64;
    let mut present = BTreeMap::<&Arc<str>, u64>::new();
    for content in contents {
        let size = match content.bytes {
            0 => UNMEASURED_BYTES,
            size => size,
        };
        total = total.saturating_add(size);
        for node in &content.holders {
            let bytes = present.entry(node).or_default();
            *bytes = bytes.saturating_add(size);
        }
    }
    let mut nodes: Vec<(&Arc<str>, u64)> = present.into_iter().collect();
    nodes.retain(|(_, bytes)| *bytes >= LEAST_BYTES);
    nodes.sort_unstable_by_key(|(node, bytes)| (Reverse(*bytes), lot(pod, node), *node));
    let nodes = nodes.into_iter().map(|(node, bytes)| Preferred {
        node: Arc::clone(node),
        weight: percent(bytes, total),
    });
    let nodes = nodes.filter(|node| node.weight > 0);
    let mut nodes: Vec<Preferred> = nodes.take(MOST_NODES).collect();
    nodes.sort_unstable_by(|one, other| {
        (Reverse(one.weight), &one.node).cmp(&(Reverse(other.weight), &other.node))
    });
    nodes
}

/// A number that is as good as random, and the same each time.
fn lot(pod: &str, node: &str) -> u64 {
    let mut hash = DefaultHasher::new();
    (pod, node).hash(&mut hash);
    hash.finish()
}

/// How much `part` is of `whole`, rounded. The part is not 0, and not more than the whole.
fn percent(part: u64, whole: u64) -> u8 {
    let (part, whole) = (u128::from(part), u128::from(whole));
    u8::try_from((part * 100 + whole / 2) / whole).unwrap_or(100)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn content(mebibytes: u64, holders: &[&str]) -> Content {
        Content {
            bytes: mebibytes * MIB,
            holders: holders.iter().map(|node| Arc::from(*node)).collect(),
        }
    }

    fn told(contents: &[Content]) -> Vec<(String, u8)> {
        let nodes = preferred(contents, "pod").into_iter();
        nodes.map(|it| (it.node.to_string(), it.weight)).collect()
    }

    fn expected(nodes: &[(&str, u8)]) -> Vec<(String, u8)> {
        let nodes = nodes.iter();
        nodes.map(|(node, it)| ((*node).to_owned(), *it)).collect()
    }

    #[test]
    fn a_node_weighs_what_it_has_of_all_content() {
        let contents = [
            content(300, &["n1", "n2"]),
            content(600, &["n2"]),
            content(100, &["n3"]),
        ];
        let nodes = expected(&[("n2", 90), ("n1", 30), ("n3", 10)]);
        assert_eq!(told(&contents), nodes);
        assert_eq!(told(&contents[..1]), expected(&[("n1", 100), ("n2", 100)]));
        assert_eq!(told(&[]), []);
    }

    #[test]
    fn little_content_decides_nothing() {
        let little = |bytes| Content {
            bytes,
            holders: vec![Arc::from("n1")],
        };
        assert_eq!(told(&[little(1)]), []);
        assert_eq!(told(&[little(LEAST_BYTES - 1)]), []);
        assert_eq!(told(&[little(LEAST_BYTES)]), expected(&[("n1", 100)]));
        // Of much content, a node has next to nothing.
        let contents = [content(1000, &["n1"]), content(4, &["n2"])];
        assert_eq!(told(&contents), expected(&[("n1", 100)]));
        let contents = [content(1000, &["n1"]), content(5, &["n2"])];
        assert_eq!(told(&contents), expected(&[("n1", 100)]), "0.4975 %");
        let contents = [content(990, &["n1"]), content(10, &["n2"])];
        assert_eq!(told(&contents), expected(&[("n1", 99), ("n2", 1)]));
    }

    #[test]
    fn content_that_was_just_made_counts_before_its_size_is_known() {
        assert_eq!(told(&[content(0, &["n1"])]), expected(&[("n1", 100)]));
        let contents = [content(0, &["n1"]), content(64 * 3, &["n2"])];
        assert_eq!(told(&contents), expected(&[("n2", 75), ("n1", 25)]));
    }

    #[test]
    fn there_are_few_nodes_and_the_best_ones() {
        let names: Vec<String> = (0..9).map(|number| format!("n{number}")).collect();
        let contents: Vec<Content> = (0..9)
            .map(|from| {
                let holders = names[from..].iter().map(|node| Arc::from(node.as_str()));
                Content {
                    bytes: MIB,
                    holders: holders.collect(),
                }
            })
            .collect();
        let nodes = preferred(&contents, "pod");
        let nodes: Vec<&str> = nodes.iter().map(|it| &*it.node).collect();
        assert_eq!(nodes, ["n8", "n7", "n6", "n5", "n4"]);
        // Of equal nodes, others for each pod.
        let all: Vec<&str> = names.iter().map(String::as_str).collect();
        let one = content(1, &all);
        let mut seen = BTreeSet::new();
        for pod in 0..20 {
            let nodes = preferred(std::slice::from_ref(&one), &format!("pod-{pod}"));
            assert_eq!(nodes.len(), MOST_NODES);
            seen.extend(nodes.into_iter().map(|it| it.node));
        }
        assert_eq!(seen.len(), 9);
    }

    #[test]
    fn no_size_breaks_the_bounds_of_kubernetes() {
        let huge = Content {
            bytes: u64::MAX,
            holders: vec![Arc::from("n1")],
        };
        let contents = [huge.clone(), huge, content(1, &["n2"])];
        assert_eq!(told(&contents), expected(&[("n1", 100)]));
        for part in [1, 7, 50, 99, 100, 250] {
            let contents = [content(part, &["n1"]), content(250, &["n1", "n2"])];
            for node in preferred(&contents, "pod") {
                assert!((1..=100).contains(&node.weight), "{node:?}");
            }
        }
    }
}
