//! csi-sanity's report: its specs and how each ended, from ginkgo's JSON. Passed specs are counted;
//! all others must be known by name.

use std::path::Path;

use serde::Deserialize;

use super::driver::Setup;

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Suite {
    spec_reports: Option<Vec<Spec>>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Spec {
    #[serde(default)]
    container_hierarchy_texts: Option<Vec<String>>,
    leaf_node_type: String,
    #[serde(default)]
    leaf_node_text: String,
    state: String,
    #[serde(default)]
    failure: Failure,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct Failure {
    message: String,
}

impl Spec {
    fn name(&self) -> String {
        let parents = self.container_hierarchy_texts.iter().flatten();
        let all: Vec<&str> = parents
            .map(String::as_str)
            .chain([self.leaf_node_text.as_str()])
            .collect();
        all.join(" ")
    }
}

/// A run of csi-sanity.
#[derive(Debug)]
pub(crate) struct Report {
    specs: Vec<Spec>,
    succeeded: bool,
    said: String,
}

impl Report {
    pub(crate) fn read(path: &Path, succeeded: bool, said: String) -> Self {
        let text = std::fs::read_to_string(path).unwrap_or_else(|error| {
            panic!("csi-sanity made no report ({error}); it said:\n{said}")
        });
        let suites: Vec<Suite> = serde_json::from_str(&text).expect("ginkgo's report");
        let specs = suites.into_iter().filter_map(|suite| suite.spec_reports);
        Self {
            specs: specs.flatten().collect(),
            succeeded,
            said,
        }
    }

    fn in_state(&self, wanted: impl Fn(&str) -> bool) -> impl Iterator<Item = &Spec> {
        self.specs.iter().filter(move |spec| wanted(&spec.state))
    }

    /// How many specs passed.
    pub(crate) fn passed(&self) -> usize {
        let its = self.in_state(|state| state == "passed");
        its.filter(|spec| spec.leaf_node_type == "It").count()
    }

    /// Whether everything ran and passed but for what upstream switched off.
    pub(crate) fn must_be_whole(&self, setup: &Setup, what: &str) {
        let wrong: Vec<String> = self
            .in_state(|state| !matches!(state, "passed" | "pending"))
            .map(|spec| {
                format!(
                    "{}: {}\n    {}",
                    spec.state,
                    spec.name(),
                    spec.failure.message
                )
            })
            .collect();
        assert!(
            wrong.is_empty(),
            "{what}: {} specs did not pass:\n{}\n{}",
            wrong.len(),
            wrong.join("\n"),
            setup.tail()
        );
        let pending: Vec<String> = self
            .in_state(|state| state == "pending")
            .map(Spec::name)
            .collect();
        assert_eq!(
            pending,
            super::PENDING,
            "{what}: what upstream switched off is another"
        );
        assert!(
            self.passed() > 80,
            "{what}: only {} specs ran",
            self.passed()
        );
        assert!(self.succeeded, "{what}: csi-sanity failed:\n{}", self.said);
    }
}
