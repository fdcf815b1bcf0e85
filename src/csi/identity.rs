//! The Identity service: the driver's name, its capabilities, and whether it is ready.
//! It waits for nothing: Probe must answer while everything else is busy or broken.

use std::collections::BTreeMap;
use std::sync::Arc;

use tonic::{Request, Response, Status};

use super::context::Features;
use crate::model::DRIVER_NAME;
use crate::proto::csi::v1 as csi;
use csi::identity_server::Identity;
use csi::plugin_capability::{Service as Offer, Type, VolumeExpansion, service, volume_expansion};

/// Whether calls can be served. It waits for nothing.
pub(super) type IsReady = Arc<dyn Fn() -> bool + Send + Sync>;

pub(super) struct Service {
    features: Features,
    ready: IsReady,
}

impl Service {
    pub(super) fn new(features: Features, ready: IsReady) -> Self {
        Self { features, ready }
    }
}

fn capabilities(features: Features) -> Vec<csi::PluginCapability> {
    let service = |kind: service::Type| {
        Type::Service(Offer {
            r#type: kind.into(),
        })
    };
    // NodeGetInfo returns a topology, which requires this capability.
    let mut types = vec![service(service::Type::VolumeAccessibilityConstraints)];
    if features.controller {
        types.push(service(service::Type::ControllerService));
        types.push(service(service::Type::GroupControllerService));
        // The limit is a number in the pool, so it can change while the volume is mounted.
        types.push(Type::VolumeExpansion(VolumeExpansion {
            r#type: volume_expansion::Type::Online.into(),
        }));
        if features.alpha {
            types.push(service(service::Type::SnapshotAccessibilityConstraints));
        }
    }
    let capability = |kind| csi::PluginCapability { r#type: Some(kind) };
    types.into_iter().map(capability).collect()
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
        Ok(Response::new(csi::GetPluginCapabilitiesResponse {
            capabilities: capabilities(self.features),
        }))
    }

    /// Reads a value and waits for nothing.
    ///
    /// A driver that recovers answers "not ready" instead of an error: after an error an
    /// orchestrator may restart it, and recovery would begin again.
    ///
    /// A pool that accepts no changes is not FAILED_PRECONDITION either, although the specification
    /// names it for that. Sidecars that get it exit (`ProbeForever` of csi-lib-utils) or restart
    /// the driver (livenessprobe), which repairs no disk. Volumes can still be unpublished.
    /// NodeGetStorageHealth and /readyz report the pool.
    async fn probe(
        &self,
        _: Request<csi::ProbeRequest>,
    ) -> Result<Response<csi::ProbeResponse>, Status> {
        let ready = (self.ready)();
        Ok(Response::new(csi::ProbeResponse { ready: Some(ready) }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_offers_what_is_switched_on() {
        let names = |controller, alpha| -> Vec<String> {
            let features = Features {
                controller,
                alpha,
                ..Features::default()
            };
            let name = |capability: csi::PluginCapability| match capability.r#type {
                Some(Type::Service(offer)) => offer.r#type().as_str_name().to_owned(),
                Some(Type::VolumeExpansion(expansion)) => {
                    expansion.r#type().as_str_name().to_owned()
                }
                None => panic!("an empty capability"),
            };
            capabilities(features).into_iter().map(name).collect()
        };
        assert_eq!(names(false, true), ["VOLUME_ACCESSIBILITY_CONSTRAINTS"]);
        let stable = names(true, false);
        assert_eq!(
            stable,
            [
                "VOLUME_ACCESSIBILITY_CONSTRAINTS",
                "CONTROLLER_SERVICE",
                "GROUP_CONTROLLER_SERVICE",
                "ONLINE"
            ]
        );
        let all = names(true, true);
        assert_eq!(
            all.last().map(String::as_str),
            Some("SNAPSHOT_ACCESSIBILITY_CONSTRAINTS")
        );
    }
}
