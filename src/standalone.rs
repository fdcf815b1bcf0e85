//! The whole driver in one process on one machine, without Kubernetes.
//! A library function, so that tests run what users run; the driver itself is in `driver`.

use std::future::Future;

use tokio::sync::watch;

pub use crate::driver::{Config, Error, prepare_process};

use crate::csi::Readiness;
use crate::driver;
use crate::server::Drain;

/// Serves a pool until `shutdown` is ready and the drain is over.
pub async fn run(config: Config, shutdown: impl Future<Output = ()>) -> Result<(), Error> {
    let (ready, _) = watch::channel(Readiness::Recovering);
    let drain = Drain::new(config.grace);
    driver::run(config, drain, ready, |_, _| Vec::new(), shutdown).await
}
