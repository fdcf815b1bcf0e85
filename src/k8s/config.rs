//! The parameters of the watch over this node's pods.
//! Only values are here.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use super::outcomes::PodOutcomes;

/// The default interval for outcomes that the watch did not report.
pub const LOOK_AGAIN: Duration = Duration::from_secs(10);

/// The module's parameters.
#[derive(Debug, Clone)]
pub struct Config {
    /// This node's name in Kubernetes.
    pub node: String,
    /// A kubeconfig; `None`: the pod's service account.
    pub kubeconfig: Option<PathBuf>,
    /// The interval to check for outcomes that the watch did not report.
    pub look_again: Duration,
    /// Receives whether the watch over this node's pods works. A few seconds late: a watch that is
    /// cut at once does not count.
    pub watched: watch::Sender<bool>,
    /// Receives whether the API server answers, even if it refuses the watch. Equally late.
    pub answers: watch::Sender<bool>,
    /// Receives the state of this node's pods.
    pub known: Arc<PodOutcomes>,
}
