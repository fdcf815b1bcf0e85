//! The Node service: publish, unpublish and measure the volumes of pods.
//! What came in is `parse`'s business, what becomes of it the engine's; here is only how they meet, and how it is said.

use std::collections::BTreeMap;

use tokio::sync::watch;
use tonic::{Request, Response, Status};

use super::status::{Failure, answer};
use super::{NodeId, Readiness, parse};
use crate::backend::BackendKind;
use crate::engine::{Engine, PublishRequest, Published, VolumeStats};
use crate::proto::csi::v1 as csi;
use crate::server::Rpc;
use csi::node_server::Node;
use csi::node_service_capability::{Rpc as Capability, Type, rpc};
use csi::volume_usage::Unit;

/// The prefix of the topology's keys.
const TOPOLOGY: &str = "topology.baggageclaim.csi.concourse-ci.org";

pub(super) struct Service {
    node: NodeId,
    readiness: watch::Receiver<Readiness>,
}

impl Service {
    pub(super) fn new(node: NodeId, readiness: watch::Receiver<Readiness>) -> Self {
        Self { node, readiness }
    }

    fn engine(&self) -> Result<Engine, Failure> {
        match &*self.readiness.borrow() {
            Readiness::Recovering => Err(Failure::Recovering),
            Readiness::Ready(engine) => Ok(engine.clone()),
            Readiness::Failed(why) => Err(Failure::CannotServe(why.clone())),
        }
    }
}

#[tonic::async_trait]
impl Node for Service {
    async fn node_publish_volume(
        &self,
        request: Request<csi::NodePublishVolumeRequest>,
    ) -> Result<Response<csi::NodePublishVolumeResponse>, Status> {
        let rpc = Rpc::of(&request).cloned();
        note_volume(rpc.as_ref(), &request.get_ref().volume_id);
        answer(async {
            let wanted = parse::publish(request.into_inner())?;
            note_wanted(rpc.as_ref(), &wanted);
            let published = self.engine()?.publish(wanted).await?;
            note_published(rpc.as_ref(), &published);
            Ok(csi::NodePublishVolumeResponse {})
        })
        .await
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<csi::NodeUnpublishVolumeRequest>,
    ) -> Result<Response<csi::NodeUnpublishVolumeResponse>, Status> {
        note_volume(Rpc::of(&request), &request.get_ref().volume_id);
        answer(async {
            let (volume, target) = parse::unpublish(request.into_inner())?;
            self.engine()?.unpublish(&volume, &target).await?;
            Ok(csi::NodeUnpublishVolumeResponse {})
        })
        .await
    }

    async fn node_get_volume_stats(
        &self,
        request: Request<csi::NodeGetVolumeStatsRequest>,
    ) -> Result<Response<csi::NodeGetVolumeStatsResponse>, Status> {
        note_volume(Rpc::of(&request), &request.get_ref().volume_id);
        answer(async {
            let (volume, path) = parse::stats(request.get_ref())?;
            let stats = self.engine()?.stats(&volume, &path).await?;
            Ok(render_stats(&stats))
        })
        .await
    }

    async fn node_get_capabilities(
        &self,
        _: Request<csi::NodeGetCapabilitiesRequest>,
    ) -> Result<Response<csi::NodeGetCapabilitiesResponse>, Status> {
        let capabilities = [
            rpc::Type::GetVolumeStats,
            rpc::Type::SingleNodeMultiWriter,
            rpc::Type::VolumeMountGroup,
        ]
        .map(|kind| csi::NodeServiceCapability {
            r#type: Some(Type::Rpc(Capability {
                r#type: kind.into(),
            })),
        });
        Ok(Response::new(csi::NodeGetCapabilitiesResponse {
            capabilities: capabilities.into(),
        }))
    }

    async fn node_get_info(
        &self,
        _: Request<csi::NodeGetInfoRequest>,
    ) -> Result<Response<csi::NodeGetInfoResponse>, Status> {
        answer(async {
            let backend = self.engine()?.backend();
            Ok(render_info(&self.node, backend))
        })
        .await
    }

    async fn node_stage_volume(
        &self,
        _: Request<csi::NodeStageVolumeRequest>,
    ) -> Result<Response<csi::NodeStageVolumeResponse>, Status> {
        Err(Failure::NotServed("NodeStageVolume").into())
    }

    async fn node_unstage_volume(
        &self,
        _: Request<csi::NodeUnstageVolumeRequest>,
    ) -> Result<Response<csi::NodeUnstageVolumeResponse>, Status> {
        Err(Failure::NotServed("NodeUnstageVolume").into())
    }

    async fn node_expand_volume(
        &self,
        _: Request<csi::NodeExpandVolumeRequest>,
    ) -> Result<Response<csi::NodeExpandVolumeResponse>, Status> {
        Err(Failure::NotServed("NodeExpandVolume").into())
    }

    async fn node_get_volume_health(
        &self,
        _: Request<csi::NodeGetVolumeHealthRequest>,
    ) -> Result<Response<csi::NodeGetVolumeHealthResponse>, Status> {
        Err(Failure::NotServed("NodeGetVolumeHealth").into())
    }

    async fn node_get_storage_health(
        &self,
        _: Request<csi::NodeGetStorageHealthRequest>,
    ) -> Result<Response<csi::NodeGetStorageHealthResponse>, Status> {
        Err(Failure::NotServed("NodeGetStorageHealth").into())
    }
}

fn note_volume(rpc: Option<&Rpc>, id: &str) {
    if let Some(rpc) = rpc {
        rpc.volume(id);
    }
}

fn note_wanted(rpc: Option<&Rpc>, wanted: &PublishRequest) {
    if let Some(rpc) = rpc {
        rpc.record("volume.type", wanted.spec.kind.type_name());
        rpc.record("tenant", &wanted.tenant);
        rpc.record("pod", &wanted.pod.name);
    }
}

fn note_published(rpc: Option<&Rpc>, published: &Published) {
    let Some(rpc) = rpc else { return };
    if let Some(from) = &published.from {
        rpc.record("volume.from", from);
        rpc.record("volume.layers", published.layers);
    }
    if published.already {
        rpc.record("volume.already", true);
    }
    if !published.waited.is_zero() {
        let waited = std::time::Duration::from_millis(
            u64::try_from(published.waited.as_millis()).unwrap_or(u64::MAX),
        );
        rpc.record("volume.waited", humantime::format_duration(waited));
    }
    if let Some(why) = &published.limit_unenforced {
        rpc.record("volume.limit_unenforced", why);
    }
}

/// Bytes and inodes. `used` is what the volume itself holds, and absent until it was measured once: a pool's figure
/// would be counted once for every volume in it. `total` minus `used` is therefore more than `available` in a pool
/// that others use too.
fn render_stats(stats: &VolumeStats) -> csi::NodeGetVolumeStatsResponse {
    // The fields are int64 and must not be negative; 0 means "not said".
    let number = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
    let used = stats.usage.unwrap_or_default();
    let mut usage = vec![csi::VolumeUsage {
        unit: Unit::Bytes.into(),
        total: number(stats.total_bytes),
        available: number(stats.available_bytes),
        used: number(used.bytes),
    }];
    // A filesystem that makes inodes as needed has no total, and the field is required.
    if stats.total_inodes > 0 {
        usage.push(csi::VolumeUsage {
            unit: Unit::Inodes.into(),
            total: number(stats.total_inodes),
            available: number(stats.available_inodes),
            used: number(used.files.saturating_add(used.directories)),
        });
    }
    csi::NodeGetVolumeStatsResponse { usage }
}

fn render_info(node: &NodeId, backend: BackendKind) -> csi::NodeGetInfoResponse {
    let segments = BTreeMap::from([
        (format!("{TOPOLOGY}/node"), node.topology_value()),
        (format!("{TOPOLOGY}/backend"), backend.to_string()),
    ]);
    csi::NodeGetInfoResponse {
        node_id: node.as_str().to_owned(),
        max_volumes_per_node: 0,
        accessible_topology: Some(csi::Topology { segments }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Usage;

    #[test]
    fn stats_are_in_bytes_and_inodes_and_never_negative() {
        let mut stats = VolumeStats {
            usage: Some(Usage {
                bytes: 10,
                files: 3,
                directories: 2,
            }),
            total_bytes: u64::MAX,
            available_bytes: 90,
            total_inodes: 100,
            available_inodes: 95,
        };
        let usage = render_stats(&stats).usage;
        let seen: Vec<_> = usage
            .iter()
            .map(|u| (u.unit(), u.total, u.available, u.used))
            .collect();
        assert_eq!(
            seen,
            [(Unit::Bytes, i64::MAX, 90, 10), (Unit::Inodes, 100, 95, 5)]
        );
        stats.total_inodes = 0;
        stats.usage = None;
        let usage = render_stats(&stats).usage;
        assert_eq!((usage.len(), usage[0].used), (1, 0));
    }

    #[test]
    fn the_topology_tells_the_node_and_its_backend() {
        let node = NodeId::new("node-1").expect("an id");
        let info = render_info(&node, BackendKind::Overlay);
        let topology = info.accessible_topology.expect("a topology").segments;
        let segments: Vec<(&str, &str)> = topology
            .iter()
            .map(|(key, value)| (key.as_str(), value.as_str()))
            .collect();
        assert_eq!(
            segments,
            [
                (
                    "topology.baggageclaim.csi.concourse-ci.org/backend",
                    "overlay"
                ),
                ("topology.baggageclaim.csi.concourse-ci.org/node", "node-1"),
            ]
        );
    }
}
