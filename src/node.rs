//! The driver of one node of a cluster: the CSI services for that node's kubelet, and registration with it.
//! What it shares with a driver on its own is in `driver`; here is only what a cluster adds, and in which order.
//!
//! Kubelet is told of the driver when it can serve, and is the first to hear that it goes.

use std::future::Future;
use std::path::PathBuf;
use std::time::Duration;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::csi::{self, Readiness};
use crate::driver;
use crate::kubelet::{self, Registration};

/// How it is set up.
#[derive(Debug, Clone)]
pub struct Config {
    /// What every driver has.
    pub driver: driver::Config,
    /// Kubelet's root directory.
    pub kubelet_dir: PathBuf,
    /// Whether there is an API server to ask and to tell.
    pub kubernetes: bool,
}

/// Why it does not run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The driver itself does not.
    #[error(transparent)]
    Driver(#[from] driver::Error),
    /// It could never be registered.
    #[error(transparent)]
    Registration(#[from] kubelet::Error),
}

/// How often the driver's own socket is tried before it is offered to kubelet.
const TRY_AGAIN: Duration = Duration::from_millis(200);

/// Serves this node until `shutdown` is ready and all is put away.
pub async fn run(config: Config, shutdown: impl Future<Output = ()>) -> Result<(), Error> {
    let socket = config.driver.socket.clone();
    let registration = Registration::new(&kubelet::Config {
        kubelet: config.kubelet_dir,
        driver: csi::DRIVER_NAME,
        endpoint: socket.clone(),
    })?;
    if config.kubernetes {
        tracing::warn!(
            "pods are not watched yet: how they ended is known from `baggageclaim outcome` only"
        );
    }
    let (ready, _) = watch::channel(Readiness::Recovering);
    let role = |_engine, stopping: CancellationToken| async move {
        tokio::select! {
            () = answers(&socket) => registration.keep(stopping).await,
            () = stopping.cancelled() => {}
        }
    };
    driver::run(config.driver, ready, role, shutdown).await?;
    Ok(())
}

/// Ready when the CSI services answer at their path that they are: what kubelet calls as soon as it hears of the driver.
async fn answers(socket: &std::path::Path) {
    loop {
        match csi::probe(socket).await {
            Ok(true) => return,
            Ok(false) => {}
            Err(error) => {
                tracing::warn!(socket = %socket.display(), %error, "the driver does not hear itself yet");
            }
        }
        tokio::time::sleep(TRY_AGAIN).await;
    }
}
