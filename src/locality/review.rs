//! The API server's question about a pod, and the answer: AdmissionReview of `admission.k8s.io/v1`.
//! Pure: bytes in, values and bytes out.
//!
//! The answer always allows the pod. It only adds terms to
//! `preferredDuringSchedulingIgnoredDuringExecution`, each for one node by `matchFields`.
//! Kubernetes (1.37, `ValidateNodeFieldSelectorRequirement`) allows one value in such a term.
//!
//! A pod is left alone if it names a node (`nodeName`), or if any of its terms selects nodes by
//! name. Such a pod was placed by its author, by the controller of a DaemonSet, or by an earlier
//! answer. So a pod that is reviewed twice does not get terms twice.

use std::collections::BTreeSet;

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{CSIVolumeSource, NodeAffinity, NodeSelectorTerm, PodSpec};
use serde::Deserialize;
use serde_json::{Value, json};

use super::policy::Preferred;
use crate::model::{DRIVER_NAME, KUBELET, Tenant, TenantOrigin, VolumeSpec};

/// The most volumes that count. A step has a few; more are an attempt to keep the controller busy.
const MOST_VOLUMES: usize = 128;

const VERSION: &str = "admission.k8s.io/v1";
const KIND: &str = "AdmissionReview";
const AFFINITY: &str = "/spec/affinity";
const PREFERRED: &str = "preferredDuringSchedulingIgnoredDuringExecution";

/// Why a body is no question. The API server then creates the pod as it is.
#[derive(Debug, thiserror::Error)]
pub(super) enum Malformed {
    /// Not JSON, or of another form.
    #[error("the request is no {KIND}: {0}")]
    Json(#[from] serde_json::Error),
    /// Of another kind, or another version.
    #[error("the request is {0:?} of {1:?}, and not {KIND} of {VERSION}")]
    Kind(String, String),
    /// The part with the question is missing.
    #[error("the {KIND} has no request")]
    Empty,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Review {
    api_version: String,
    kind: String,
    request: Option<Question>,
}

/// A question of the API server. Every field of the pod may be missing or null: the pod is
/// validated only afterwards.
#[derive(Debug, Deserialize)]
pub(super) struct Question {
    uid: String,
    kind: Kind,
    operation: String,
    namespace: Option<String>,
    object: Option<Object>,
}

#[derive(Debug, Deserialize)]
struct Kind {
    group: String,
    kind: String,
}

#[derive(Debug, Deserialize)]
struct Object {
    spec: Option<PodSpec>,
}

/// Whether a term selects nodes by name, the one field that Kubernetes knows.
fn is_by_name(term: &NodeSelectorTerm) -> bool {
    term.match_fields.as_ref().is_some_and(|it| !it.is_empty())
}

fn node_affinity(spec: &PodSpec) -> Option<&NodeAffinity> {
    spec.affinity.as_ref()?.node_affinity.as_ref()
}

/// Whether the pod's node was chosen already.
fn is_placed(spec: &PodSpec) -> bool {
    let is_bound = spec.node_name.as_ref().is_some_and(|name| !name.is_empty());
    is_bound
        || node_affinity(spec).is_some_and(|affinity| {
            let required = &affinity.required_during_scheduling_ignored_during_execution;
            let required = required.iter().flat_map(|it| &it.node_selector_terms);
            let preferred = &affinity.preferred_during_scheduling_ignored_during_execution;
            let preferred = preferred.iter().flatten().map(|it| &it.preference);
            required.chain(preferred).any(is_by_name)
        })
}

/// Reads a question.
pub(super) fn read(body: &[u8]) -> Result<Question, Malformed> {
    let review: Review = serde_json::from_slice(body)?;
    if review.kind != KIND || review.api_version != VERSION {
        let cut = |text: &str| text.chars().take(80).collect();
        return Err(Malformed::Kind(cut(&review.kind), cut(&review.api_version)));
    }
    review.request.ok_or(Malformed::Empty)
}

impl Question {
    /// The specification of the pod, if the question is about a new pod that may prefer nodes.
    fn pod(&self) -> Option<&PodSpec> {
        let is_new_pod =
            self.kind.group.is_empty() && self.kind.kind == "Pod" && self.operation == "CREATE";
        let spec = self.object.as_ref()?.spec.as_ref()?;
        (is_new_pod && !is_placed(spec)).then_some(spec)
    }

    /// What distinguishes this question from others.
    pub(super) fn uid(&self) -> &str {
        &self.uid
    }

    /// The content that the volumes of this driver start from, for each volume in the order in
    /// which it is tried. Each list is there once. A volume with wrong attributes has none: the
    /// node refuses it later, with the reason.
    pub(super) fn origins(&self) -> BTreeSet<Vec<TenantOrigin>> {
        let tenant = self.namespace.as_deref().and_then(|it| it.parse().ok());
        let (Some(spec), Some(tenant)) = (self.pod(), tenant) else {
            return BTreeSet::new();
        };
        let volumes = spec.volumes.iter().flatten();
        let ours = volumes.filter_map(|volume| volume.csi.as_ref());
        let ours = ours.filter(|csi| csi.driver == DRIVER_NAME);
        let ours = ours.take(MOST_VOLUMES);
        let origins = ours.filter_map(|csi| origins_of(csi, &tenant));
        origins.filter(|origins| !origins.is_empty()).collect()
    }

    /// The answer. It allows the pod, with these nodes as its preferred ones.
    pub(super) fn answer(&self, preferred: &[Preferred]) -> Vec<u8> {
        let mut response = json!({"uid": self.uid, "allowed": true});
        if let Some(spec) = self.pod().filter(|_| !preferred.is_empty()) {
            let patch = ByteString(Value::from(patch(spec, preferred)).to_string().into());
            response["patchType"] = "JSONPatch".into();
            response["patch"] = json!(patch);
        }
        let review = json!({"apiVersion": VERSION, "kind": KIND, "response": response});
        review.to_string().into()
    }
}

fn origins_of(csi: &CSIVolumeSource, tenant: &Tenant) -> Option<Vec<TenantOrigin>> {
    let mut attributes = csi.volume_attributes.clone().unwrap_or_default();
    attributes.retain(|key, _| !key.starts_with(KUBELET));
    let spec = VolumeSpec::parse(&attributes).ok()?;
    // Of another namespace the answer would tell whether a name exists that the pod may not read.
    let all = spec.origins(tenant).into_iter();
    Some(all.filter(|origin| origin.tenant == *tenant).collect())
}

/// The operations of a JSON patch (RFC 6902) that adds the terms behind those of the pod. A null
/// stands for a missing field: `add` replaces it.
fn patch(spec: &PodSpec, preferred: &[Preferred]) -> Vec<Value> {
    let terms = preferred.iter().map(|Preferred { node, weight }| {
        let by_name = json!({"key": "metadata.name", "operator": "In", "values": [&**node]});
        json!({"weight": weight, "preference": {"matchFields": [by_name]}})
    });
    let terms: Vec<Value> = terms.collect();
    let add = |path: String, value: Value| json!({"op": "add", "path": path, "value": value});
    let list = format!("{AFFINITY}/nodeAffinity/{PREFERRED}");
    match (&spec.affinity, node_affinity(spec)) {
        (None, _) => {
            let affinity = json!({"nodeAffinity": {PREFERRED: terms}});
            vec![add(AFFINITY.to_owned(), affinity)]
        }
        (Some(_), None) => {
            let affinity = json!({PREFERRED: terms});
            vec![add(format!("{AFFINITY}/nodeAffinity"), affinity)]
        }
        (Some(_), Some(affinity))
            if affinity
                .preferred_during_scheduling_ignored_during_execution
                .is_none() =>
        {
            vec![add(list, terms.into())]
        }
        (Some(_), Some(_)) => {
            let terms = terms.into_iter();
            terms.map(|term| add(format!("{list}/-"), term)).collect()
        }
    }
}

#[cfg(test)]
mod tests;
