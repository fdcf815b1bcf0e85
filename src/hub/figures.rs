//! The figures of the catalog, and the metrics that they become. `serve` counts.
//! `docs/metrics.md` says what each means.

use crate::telemetry::metrics::{Registry, counters, gauges};

/// The catalog's figures at this moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Figures {
    /// Nodes with a stream.
    pub nodes: u64,
    /// Names with content, each node counted.
    pub names: u64,
    /// Names without content that a node may commit, each node counted.
    pub coming: u64,
    /// Clears that are known: those of the last week.
    pub fences: u64,
    /// The number of the newest clear.
    pub fence: u64,
    /// The highest clear that all nodes with a stream have applied.
    pub fence_applied: u64,
    /// Questions since the start.
    pub questions: u64,
    /// Questions that wait for content.
    pub waiting: u64,
    /// Orders to nodes to give up a name, since the start.
    pub superseded: u64,
}

impl Figures {
    /// Adds them to the controller's metrics.
    pub fn register(&self, registry: &mut Registry) {
        let now = [
            (
                "catalog_nodes",
                "Nodes that report what they have",
                self.nodes,
            ),
            (
                "catalog_names",
                "Names with content on a node, each node counted",
                self.names,
            ),
            (
                "catalog_names_coming",
                "Names without content that a pod may commit, each node counted",
                self.coming,
            ),
            (
                "catalog_fences",
                "Clears that are kept until all nodes have applied them",
                self.fences,
            ),
            (
                "catalog_fence",
                "The number of the newest clear; 0: none",
                self.fence,
            ),
            (
                "catalog_fence_applied",
                "The number of the newest clear that all nodes which report have applied",
                self.fence_applied,
            ),
            (
                "catalog_questions_waiting",
                "Questions of nodes that wait for content",
                self.waiting,
            ),
        ];
        gauges(registry, &now);
        let since_start = [
            (
                "catalog_questions",
                "Questions of nodes where content is",
                self.questions,
            ),
            (
                "catalog_superseded",
                "Orders to a node to give up an output that another node made again",
                self.superseded,
            ),
        ];
        counters(registry, &since_start);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::metrics;

    #[test]
    fn the_page_of_metrics_names_the_figures() {
        let mut registry = metrics::registry();
        Figures::default().register(&mut registry);
        metrics::assert_documented(&registry, "catalog_");
    }
}
