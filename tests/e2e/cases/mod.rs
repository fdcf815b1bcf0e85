//! The cases. A new one is a function in one of these files, a line in the list below, and a
//! manifest in `manifests/`. It uses the verbs of `env`, which also checks for leftovers.

mod caches;
mod claims;
mod nodes;
mod outcomes;
mod pods;
mod policy;
mod reboot;
mod shared;
mod specs;
mod tenants;
mod trouble;
mod uninstall;
mod upgrade;

use crate::Case;
pub(crate) use nodes::report as report_of_several_nodes;

/// Those that need several nodes, which have the controller plugin. The others are played on one
/// node.
pub(crate) fn of_several_nodes() -> Vec<Case> {
    let case = |name, play| Case { name, play };
    vec![
        case(
            "a StatefulSet over three nodes: each claim is where its pod is",
            nodes::stateful_set,
        ),
        case(
            "50 clones and restores at once: their pods run where the source is",
            nodes::clones_follow,
        ),
        case(
            "a clone in the class of empty claims tells the class for clones",
            nodes::clone_in_the_other_class,
        ),
        case(
            "two clones from two nodes in one pod: the pod tells why it waits",
            nodes::two_nodes_in_one_pod,
        ),
        case(
            "a pod with nodeName: kubelet tells why its claim cannot be used there",
            nodes::without_scheduler,
        ),
        case(
            "a workspace that is cloned for one pod, and ends with it",
            nodes::cloned_workspace,
        ),
        case(
            "a driver's token writes the status of its own node's objects, and nothing else",
            nodes::one_nodes_token,
        ),
        case(
            "peers: a pod starts from another node's cache, and no bucket exists",
            nodes::peers,
        ),
        case(
            "a cache policy: who commits, who reads, what the log tells, and a rollback",
            nodes::policies,
        ),
        case(
            "namespaces are deleted while a node is off: none of their content is left",
            nodes::deleted_namespaces,
        ),
        case(
            "a full node refuses a claim, and its pod runs elsewhere",
            nodes::full_node,
        ),
        case(
            "one tier: what a node committed outlives its power cut, on another node",
            nodes::one_tier,
        ),
        case(
            "a node is cut off: its pods go on, and a new claim is made elsewhere",
            nodes::cut_off,
        ),
        case(
            "a node loses its power: its claims keep their data",
            nodes::power_cut,
        ),
        case(
            "a node comes back with another disk: its claims are lost, not empty",
            nodes::another_disk,
        ),
        case(
            "a node is deleted: what is bound stays for its return, and nothing else",
            nodes::deleted,
        ),
    ]
}

/// All of one node, in the order in which they are played: what others build on comes first.
#[expect(clippy::too_many_lines, reason = "a list is as long as it is")]
pub(crate) fn all() -> Vec<Case> {
    let case = |name, play| Case { name, play };
    vec![
        case(
            "deploy/, examples/ and what docs/ shows pass the API server's own checks",
            pods::dry_run,
        ),
        case(
            "scratch is empty, writable and gone with its pod",
            pods::scratch,
        ),
        case(
            "the driver is shown three parts of kubelet's directory, its key not among them",
            pods::kubelets_directory,
        ),
        case(
            "a pipeline as pods, and again with what the first has left",
            caches::pipeline_of_pods,
        ),
        case("a pipeline as jobs", caches::pipeline_of_jobs),
        case(
            "a task cache is committed on success only",
            caches::task_cache,
        ),
        case(
            "a pod that is deleted leaves no output and no cache of any kind",
            caches::deleted_maker,
        ),
        case(
            "a pod whose input is still being made waits, and starts",
            caches::waiting_for_input,
        ),
        case(
            "a mistake in an attribute is told on the pod; mended, it runs",
            pods::mistake,
        ),
        case(
            "kubelet refuses a static pod with a volume of a driver, and says why",
            pods::static_pods,
        ),
        case(
            "readOnly: what cannot be written to is read",
            specs::read_only,
        ),
        case("subPath: parts of a volume", specs::sub_path),
        case(
            "fsGroup and supplementary groups: steps that are not root",
            specs::fs_group,
        ),
        case(
            "a restricted namespace: other users, and caches that they share",
            specs::restricted,
        ),
        case(
            "init containers and a sidecar fill what the step uses",
            specs::init_containers,
        ),
        case("a pod with 20 volumes of all types", specs::many_volumes),
        case("100 pods at once", specs::crowd),
        case(
            "an annotation tells the outcome of a pod that is deleted",
            outcomes::annotation,
        ),
        case(
            "one container's end is the pod's, by annotation",
            outcomes::outcome_container,
        ),
        case(
            "on-marker: what is marked is kept, and nothing else",
            outcomes::marker,
        ),
        case("two namespaces use the same names", tenants::same_names),
        case(
            "a namespace that is made again finds what the one of its name has kept",
            tenants::same_name_again,
        ),
        case(
            "the write policy refuses what an account may not write or tell, and allows the rest",
            policy::write_policy,
        ),
        case(
            "a pod that forges kubelet's keys gets no other's",
            tenants::forged,
        ),
        case(
            "the driver is killed while pods run",
            trouble::driver_killed,
        ),
        case("the driver is upgraded while pods run", upgrade::upgraded),
        case(
            "kubelet is restarted while pods run",
            trouble::kubelet_restarted,
        ),
        case(
            "the driver is killed again and again while pods start and end",
            trouble::driver_killed_again_and_again,
        ),
        case(
            "containerd is restarted while pods run",
            trouble::containerd_restarted,
        ),
        case(
            "the API server is away while pods end",
            trouble::api_server_away,
        ),
        case(
            "pods are deleted by force while their files are open",
            trouble::force_deleted,
        ),
        case(
            "the shared tier: content outlives the node's disk, and a wrong key harms no pod",
            shared::shared_tier,
        ),
        case(
            "claims: made, cloned, enlarged and deleted, while controller and driver are killed",
            claims::claims,
        ),
        case(
            "copies of claims: clones, snapshots, groups, and a warm workspace per job",
            claims::copies,
        ),
        case(
            "a claim's life: 50 at once, other attributes, and deletions in any order",
            claims::life,
        ),
        case(
            "objects, definitions and the installation are deleted, and no claim's data",
            claims::removed,
        ),
        case(
            "an installation of the node plugin alone gets the controller while pods run",
            claims::upgraded,
        ),
        case("the node is switched off and on", reboot::reboot),
        case(
            "uninstalled as docs/install.md tells, nothing is left; and installed again",
            uninstall::uninstalled,
        ),
    ]
}
