//! The whole driver in one process on one machine, without Kubernetes.
//! A library function, so that tests and the demo run what people run; the driver itself is in `driver`.

use std::future::Future;

use tokio::sync::watch;

pub use crate::driver::{Config, Error, prepare_process};

use crate::csi::Readiness;
use crate::driver;

/// Serves a pool until `shutdown` is ready and all is put away.
pub async fn run(config: Config, shutdown: impl Future<Output = ()>) -> Result<(), Error> {
    let (ready, _) = watch::channel(Readiness::Recovering);
    driver::run(
        config,
        ready,
        |_, stopping| stopping.cancelled_owned(),
        shutdown,
    )
    .await
}
