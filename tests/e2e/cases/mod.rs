//! The cases. A new one is a function in one of these files, a line in the list below, and a manifest in `manifests/`.
//! It says what it does in the words of the stage; that nothing is left afterwards is looked at for all of them.

mod caches;
mod pods;
mod trouble;

use crate::Case;

/// All of them, in the order in which they are played: what others build on comes first.
pub(crate) fn all() -> Vec<Case> {
    let case = |name, play| Case { name, play };
    vec![
        case(
            "deploy/ and examples/ pass the API server's own checks",
            pods::dry_run,
        ),
        case(
            "scratch is empty, writable and gone with its pod",
            pods::scratch,
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
            "a mistake in an attribute is told on the pod; mended, it runs",
            pods::mistake,
        ),
        case(
            "the driver is killed while pods run",
            trouble::driver_killed,
        ),
        case(
            "the driver is upgraded while pods run",
            trouble::driver_upgraded,
        ),
        case(
            "kubelet is restarted while pods run",
            trouble::kubelet_restarted,
        ),
        case(
            "the API server is away while pods end",
            trouble::api_server_away,
        ),
    ]
}
