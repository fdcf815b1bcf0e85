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
    /// Questions since the start.
    pub questions: u64,
    /// Questions that wait for content.
    pub waiting: u64,
    /// Orders to nodes to give up a name, since the start.
    pub superseded: u64,
    /// Fences of the API server.
    pub fences: u64,
    /// Those of them that a node with a stream has not applied.
    pub fences_waiting: u64,
    /// The age of the oldest fence in seconds, without the newest one, which stays. 0: there is
    /// none.
    pub fences_oldest_seconds: u64,
    /// Fence objects that cannot be read.
    pub fences_malformed: u64,
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
                "catalog_questions_waiting",
                "Questions of nodes that wait for content",
                self.waiting,
            ),
            (
                "catalog_fences",
                "Clears of names that the API server has",
                self.fences,
            ),
            (
                "catalog_fences_waiting",
                "Clears that a connected node has not applied",
                self.fences_waiting,
            ),
            (
                "catalog_fences_oldest_seconds",
                "The age of the oldest clear that the API server keeps, in seconds",
                self.fences_oldest_seconds,
            ),
            (
                "catalog_fences_malformed",
                "Fence objects that cannot be read",
                self.fences_malformed,
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
