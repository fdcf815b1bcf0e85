//! The Registration service: answers kubelet's two calls and passes its results on.
//! The caller decides what follows from a refusal.

use tokio::sync::mpsc::UnboundedSender;
use tonic::{Request, Response, Status};

use crate::proto::pluginregistration as kubelet;
use kubelet::registration_server::Registration;

/// The plugin type for CSI drivers.
const CSI_PLUGIN: &str = "CSIPlugin";
/// The CSI versions that the driver supports, in kubelet's terms: 1.0.0 and later are CSI 1.
const VERSIONS: [&str; 1] = ["1.0.0"];

/// Kubelet's answer to an offer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Answer {
    Registered,
    /// With the reason.
    Refused(String),
}

pub(super) struct Service {
    driver: &'static str,
    endpoint: String,
    said: UnboundedSender<Answer>,
}

impl Service {
    pub(super) fn new(
        driver: &'static str,
        endpoint: String,
        said: UnboundedSender<Answer>,
    ) -> Self {
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
            Answer::Registered
        } else {
            Answer::Refused(status.error)
        };
        // The receiver is gone when the offer is being withdrawn.
        let _ = self.said.send(told);
        Ok(Response::new(kubelet::RegistrationStatusResponse {}))
    }
}
