//! `CachePolicy`: what a namespace may keep over all nodes, and who may commit and read its names.
//! Users write `spec`, the controller `status`. Several policies of a namespace hold together: the
//! smallest value of each limit counts, and a pod may do what any rule allows.

#![expect(
    unreachable_pub,
    reason = "kube's derive makes a public item in a module of its own"
)]

use std::collections::BTreeMap;

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Limits of a namespace's content over all nodes, and rights to its names.
#[derive(
    Debug, Clone, Default, PartialEq, Eq, CustomResource, KubeSchema, Serialize, Deserialize,
)]
#[kube(
    group = "baggageclaim.concourse-ci.org",
    version = "v1alpha1",
    kind = "CachePolicy",
    plural = "cachepolicies",
    category = "baggageclaim",
    namespaced,
    status = "CachePolicyStatus",
    derive = "PartialEq",
    doc = "Limits of a namespace's content over all nodes, and rights to its names.",
    printcolumn = r#"{"name":"Budget","type":"string","jsonPath":".spec.budget.storage","description":"The most that the namespace may keep on all nodes"}"#,
    printcolumn = r#"{"name":"Used","type":"string","jsonPath":".status.used.storage","description":"What the namespace keeps on all nodes"}"#,
    printcolumn = r#"{"name":"Artifacts","type":"integer","jsonPath":".status.used.artifacts","description":"How many artifacts that is"}"#,
    printcolumn = r#"{"name":"Shared","type":"string","jsonPath":".status.sharedUsed.storage","description":"What the namespace has in the shared tier, if it has a budget there"}"#,
    printcolumn = r#"{"name":"Valid","type":"string","jsonPath":".status.conditions[?(@.type==\"Valid\")].status","description":"False: a limit has no effect; the condition says which"}"#,
    printcolumn = r#"{"name":"Rules","type":"string","jsonPath":".status.conditions[?(@.type==\"RulesValid\")].status","description":"False: a rule or size limit has no effect; the condition says which"}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct CachePolicySpec {
    /// The most that the namespace may keep on all nodes together
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub budget: Option<Budget>,
    /// The most that the names of the namespace may show in the shared tier. Empty: only counted
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared_budget: Option<Budget>,
    /// The longest time that content stays
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl: Option<Ttl>,
    /// The `sizeLimit` of volumes that give none
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_limit: Option<SizeLimit>,
    /// Who may commit and read which names. A name that no rule selects is open to its namespace
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 100))]
    pub rules: Vec<PolicyRule>,
}

/// The most that a namespace may keep. The least recently used content goes first.
#[derive(Debug, Clone, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct Budget {
    /// Bytes, as a quantity: 200Gi
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), regex(pattern = QUANTITY))]
    pub storage: Option<String>,
    /// How many artifacts
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub artifacts: Option<i64>,
}

/// Upper bounds of the `ttl` of volumes.
#[derive(Debug, Clone, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Ttl {
    /// Since the last use of a cache, of a kind without a bound of its own: 14d
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), regex(pattern = DURATION))]
    pub caches: Option<String>,
    /// Since the last use of a task cache: 30d
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), regex(pattern = DURATION))]
    pub task_caches: Option<String>,
    /// Since the last use of a resource cache: 7d
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), regex(pattern = DURATION))]
    pub resource_caches: Option<String>,
    /// Since an output was sealed: 24h
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), regex(pattern = DURATION))]
    pub outputs: Option<String>,
}

/// The `sizeLimit` of volumes that give none.
#[derive(Debug, Clone, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct SizeLimit {
    /// Of a cache, as a quantity: 5Gi
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), regex(pattern = QUANTITY))]
    pub caches: Option<String>,
    /// Of an output, as a quantity: 2Gi
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), regex(pattern = QUANTITY))]
    pub outputs: Option<String>,
}

/// Rights to the names that a rule selects.
#[derive(Debug, Clone, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PolicyRule {
    /// Names such as task-cache/main. A star at the end stands for any rest
    #[schemars(
        length(min = 1, max = 64),
        inner(length(max = 280), regex(pattern = NAMES))
    )]
    pub names: Vec<String>,
    /// Who may commit them; without it, the rule says nothing about commits
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commit: Option<CommitRule>,
    /// Which other namespaces may read them
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read: Option<ReadRule>,
}

/// Who may commit.
#[derive(Debug, Clone, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CommitRule {
    /// Service accounts of this namespace. Empty: none
    #[schemars(length(max = 100), inner(length(min = 1, max = 253)))]
    pub service_accounts: Vec<String>,
}

/// Which other namespaces may read: those that are listed, and those that are selected.
#[derive(Debug, Clone, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ReadRule {
    /// Their names
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 100), inner(length(min = 1, max = 63)))]
    pub namespaces: Vec<String>,
    /// Their labels. An empty selector selects all namespaces
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace_selector: Option<NamespaceSelector>,
}

/// A selector of namespaces. All parts of it must fit.
#[derive(Debug, Clone, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NamespaceSelector {
    /// Labels and their values
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 32))]
    pub match_labels: BTreeMap<String, String>,
    /// Requirements of labels
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    pub match_expressions: Vec<LabelRequirement>,
}

/// A requirement of one label.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct LabelRequirement {
    /// The label
    #[schemars(length(min = 1, max = 317))]
    pub key: String,
    /// How its value is compared
    pub operator: LabelOperator,
    /// The values of `In` and `NotIn`
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), inner(length(max = 63)))]
    pub values: Vec<String>,
}

/// How the value of a label is compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub enum LabelOperator {
    /// It is one of the values.
    In,
    /// It is none of the values, or there is no such label.
    NotIn,
    /// There is such a label.
    Exists,
    /// There is no such label.
    DoesNotExist,
}

/// What the controller says of a policy.
// A merge keeps what is not written. So what is not known is written as null.
#[derive(Debug, Clone, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CachePolicyStatus {
    /// What the namespace keeps on all nodes
    #[serde(default)]
    pub used: Option<Used>,
    /// What its names show in the shared tier, if it has a sharedBudget
    #[serde(default)]
    pub shared_used: Option<Used>,
    /// `RulesValid`: whether all rules and size limits have effect. `Valid`: whether the budgets
    /// and ttl have. `OverBudget`: whether content in use exceeds a budget. `SharedOverBudget`:
    /// whether recent content exceeds the sharedBudget
    #[serde(default)]
    #[schemars(length(max = 16))]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<PolicyCondition>,
}

/// What a namespace keeps.
#[derive(Debug, Clone, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct Used {
    /// Bytes, as a quantity
    pub storage: String,
    /// How many artifacts
    pub artifacts: i64,
}

/// A condition, as other objects of Kubernetes have it.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PolicyCondition {
    /// Its type
    #[serde(rename = "type")]
    pub of: String,
    /// True, False or Unknown
    pub status: String,
    /// The reason, in one word
    pub reason: String,
    /// The reason, for people
    pub message: String,
    /// When `status` changed
    pub last_transition_time: String,
    /// The generation of the policy that it is about
    #[serde(default)]
    pub observed_generation: i64,
}

/// A quantity without sign and exponent.
const QUANTITY: &str = r"^[0-9]{1,19}(\.[0-9]{1,9})?(k|[MGTPE]|[KMGTPE]i)?$";
/// Whole seconds, in units.
const DURATION: &str = "^([0-9]{1,9} ?(s|m|h|d|w) ?)+$";
/// A kind, and a name or, with a star (x2a), the beginning of names.
const NAMES: &str = r"^(artifact/[-a-z0-9]{0,63}|(resource|task)-cache/[^\x2a]{0,256})\x2a?$";
