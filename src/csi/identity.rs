//! The Identity service: who this is, what it can do, and whether it can do it now.
//! It asks nobody: Probe must answer while everything else is busy or broken.

use std::collections::BTreeMap;

use tokio::sync::watch;
use tonic::{Request, Response, Status};

use super::status::{Failure, answer};
use super::{DRIVER_NAME, Readiness};
use crate::proto::csi::v1 as csi;
use csi::identity_server::Identity;
use csi::plugin_capability::{Service as Offer, Type, service};

pub(super) struct Service {
    readiness: watch::Receiver<Readiness>,
}

impl Service {
    pub(super) fn new(readiness: watch::Receiver<Readiness>) -> Self {
        Self { readiness }
    }
}

#[tonic::async_trait]
impl Identity for Service {
    async fn get_plugin_info(
        &self,
        _: Request<csi::GetPluginInfoRequest>,
    ) -> Result<Response<csi::GetPluginInfoResponse>, Status> {
        Ok(Response::new(csi::GetPluginInfoResponse {
            name: DRIVER_NAME.to_owned(),
            vendor_version: env!("CARGO_PKG_VERSION").to_owned(),
            manifest: BTreeMap::new(),
        }))
    }

    async fn get_plugin_capabilities(
        &self,
        _: Request<csi::GetPluginCapabilitiesRequest>,
    ) -> Result<Response<csi::GetPluginCapabilitiesResponse>, Status> {
        // NodeGetInfo tells a topology, which only a plugin with this capability may.
        let offer = Offer {
            r#type: service::Type::VolumeAccessibilityConstraints.into(),
        };
        Ok(Response::new(csi::GetPluginCapabilitiesResponse {
            capabilities: vec![csi::PluginCapability {
                r#type: Some(Type::Service(offer)),
            }],
        }))
    }

    /// Cheap: it looks at a value, and waits for nobody. Not ready is no failure: after one, an orchestrator may
    /// restart the driver, which would begin to recover from the start.
    async fn probe(
        &self,
        _: Request<csi::ProbeRequest>,
    ) -> Result<Response<csi::ProbeResponse>, Status> {
        let ready = match &*self.readiness.borrow() {
            Readiness::Recovering => Ok(false),
            Readiness::Ready(_) => Ok(true),
            Readiness::Failed(why) => Err(Failure::CannotServe(why.clone())),
        };
        answer(async {
            Ok(csi::ProbeResponse {
                ready: Some(ready?),
            })
        })
        .await
    }
}
