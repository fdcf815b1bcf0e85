//! The Registration service: answers kubelet, and passes on what kubelet reports.
//! The module above decides what follows from a refusal.

use tokio::sync::mpsc::UnboundedSender;
use tonic::{Request, Response, Status};

use crate::proto::pluginregistration as kubelet;
use kubelet::registration_server::Registration;

/// The part of kubelet that this is for.
const CSI_PLUGIN: &str = "CSIPlugin";
/// The versions of CSI that kubelet may speak to the driver, as it counts them: anything from 1.0.0 is CSI 1.
const VERSIONS: [&str; 1] = ["1.0.0"];

/// What kubelet made of an offer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Told {
    Registered,
    /// And why.
    Refused(String),
}

pub(super) struct Service {
    driver: &'static str,
    endpoint: String,
    said: UnboundedSender<Told>,
}

impl Service {
    pub(super) fn new(driver: &'static str, endpoint: String, said: UnboundedSender<Told>) -> Self {
        Self {
            driver,
            endpoint,
            said,
        }
    }
}

#[tonic::async_trait]
impl Registration for Service {
    async fn get_info(
        &self,
        _: Request<kubelet::InfoRequest>,
    ) -> Result<Response<kubelet::PluginInfo>, Status> {
        Ok(Response::new(kubelet::PluginInfo {
            r#type: CSI_PLUGIN.to_owned(),
            name: self.driver.to_owned(),
            endpoint: self.endpoint.clone(),
            supported_versions: VERSIONS.map(str::to_owned).into(),
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<kubelet::RegistrationStatus>,
    ) -> Result<Response<kubelet::RegistrationStatusResponse>, Status> {
        let status = request.into_inner();
        let told = if status.plugin_registered {
            Told::Registered
        } else {
            Told::Refused(status.error)
        };
        // The receiver is gone while the offer is being withdrawn.
        let _ = self.said.send(told);
        Ok(Response::new(kubelet::RegistrationStatusResponse {}))
    }
}
