//! csi-sanity's report: its specs and how each ended, from ginkgo's JSON. Passed specs are counted;
//! all others must be known by name.

use std::path::Path;

use serde::Deserialize;

/// The specs that upstream has switched off. A test of this project covers them; see
/// `csi-sanity/README.md`.
const PENDING: [&str; 1] = [
    "Controller Service [Controller Server] ListVolumes pagination should detect volumes added between pages and accept \
     tokens when the last volume from a page is deleted",
];

/// The groups of specs for what is served only with `--attach` and `--alpha`: attaching volumes,
/// and what is alpha in CSI 1.13. A cluster has neither.
pub(crate) const WITHOUT_OPTIONS: &[&str] = &[
    "Controller Service [Controller Server] ControllerPublishVolume",
    "Controller Service [Controller Server] ControllerUnpublishVolume",
    "Controller Service [Controller Server] volume lifecycle",
    "ControllerGetVolumeHealth [Controller Server]",
    "ControllerListVolumeHealth [Controller Server]",
    "CreateSnapshot [Controller Server] should succeed when creating a snapshot with accessibility",
    "GetSnapshot [Controller Server]",
    "Node Service NodeGetStorageHealth",
    "Node Service NodeGetVolumeHealth",
];

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

    /// Whether everything ran and passed but for what upstream switched off, and for the groups of
    /// specs that these begin with: a capability that the driver does not have.
    pub(crate) fn must_be_whole(&self, what: &str, without: &[&str], log: &dyn Fn() -> String) {
        let is_known = |spec: &&Spec| {
            let name = spec.name();
            spec.state == "skipped" && without.iter().any(|group| name.starts_with(group))
        };
        let wrong: Vec<String> = self
            .in_state(|state| !matches!(state, "passed" | "pending"))
            .filter(|spec| !is_known(spec))
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
            log()
        );
        for group in without {
            let mut skipped = self.in_state(|state| state == "skipped");
            let is_used = skipped.any(|spec| spec.name().starts_with(group));
            assert!(is_used, "{what}: no spec is skipped: {group}");
        }
        let pending: Vec<String> = self
            .in_state(|state| state == "pending")
            .map(Spec::name)
            .collect();
        assert_eq!(
            pending, PENDING,
            "{what}: what upstream switched off is another"
        );
        assert!(
            self.passed() > 60,
            "{what}: only {} specs ran",
            self.passed()
        );
        assert!(self.succeeded, "{what}: csi-sanity failed:\n{}", self.said);
    }
}
