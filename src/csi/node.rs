//! The Node service: stages, publishes, unpublishes, measures and expands inline and persistent
//! volumes. It connects `parse`, the engine and `render`.

use std::path::PathBuf;

use tokio::sync::watch;
use tonic::{Request, Response, Status};

use super::context::{Features, Readiness, engine, serving};
use super::status::{Failure, advertised, answer};
use super::{health, parse, render, topology};
use crate::distribution::Distribution;
use crate::engine::{self, Engine, PublishRequest, Published};
use crate::model::{self, NodeId, Share};
use crate::proto::csi::v1 as csi;
use crate::server::{Rpc, message_of};
use csi::node_server::Node;
use csi::node_service_capability::{Rpc as Capability, Type, rpc};

pub(super) struct Service {
    node: NodeId,
    features: Features,
    readiness: watch::Receiver<Readiness>,
}

impl Service {
    pub(super) fn new(
        node: NodeId,
        features: Features,
        readiness: watch::Receiver<Readiness>,
    ) -> Self {
        Self {
            node,
            features,
            readiness,
        }
    }

    fn engine(&self) -> Result<Engine, Failure> {
        engine(&self.readiness)
    }

    /// Publishes a volume. Content that only the shared tier has comes first.
    async fn publish(&self, mut wanted: PublishRequest) -> Result<Published, Failure> {
        wanted.share = wanted.spec.share.unwrap_or(self.features.share) == Share::Auto;
        let (engine, distribution) = serving(&self.readiness)?;
        let Some(distribution) = distribution else {
            return Ok(engine.publish(wanted).await?);
        };
        // Until the end of the publish: an unpublish must not overtake it.
        let entered = distribution.waiting().enter(&wanted);
        let entered = entered.ok_or_else(|| engine::Error::Busy(wanted.volume.clone()))?;
        distribution.bring(&mut wanted).await?;
        entered.brought();
        Ok(engine.publish(wanted).await?)
    }

    /// Whether there is no engine, but volumes can be unmounted.
    fn unmounts_only(&self) -> bool {
        matches!(&*self.readiness.borrow(), Readiness::UnmountsOnly(_))
    }

    /// This node with its labels, even if the pool cannot be opened. The label of a backend that is
    /// unknown is left out: kubelet keeps the node's own.
    fn place(&self) -> Result<model::Node, Failure> {
        let labelled = |backend| topology::node(&self.node, backend);
        if let Readiness::UnmountsOnly(pool) = &*self.readiness.borrow() {
            let backend = pool.backend.map(labelled);
            return Ok(backend.unwrap_or_else(|| model::Node::place(&self.node)));
        }
        Ok(labelled(self.engine()?.backend()))
    }
}

/// The node's capabilities. SINGLE_NODE_MULTI_WRITER is alpha in the specification, but
/// ReadWriteOncePod of Kubernetes needs it, so it is always on.
fn capabilities(features: Features) -> Vec<rpc::Type> {
    let mut types = vec![
        rpc::Type::StageUnstageVolume,
        rpc::Type::GetVolumeStats,
        rpc::Type::ExpandVolume,
        rpc::Type::SingleNodeMultiWriter,
        rpc::Type::VolumeMountGroup,
    ];
    if features.alpha {
        types.extend([rpc::Type::GetVolumeHealth, rpc::Type::GetStorageHealth]);
    }
    types
}

#[tonic::async_trait]
impl Node for Service {
    async fn node_publish_volume(
        &self,
        request: Request<csi::NodePublishVolumeRequest>,
    ) -> Result<Response<csi::NodePublishVolumeResponse>, Status> {
        let rpc = Rpc::of(&request);
        rpc.volume(&request.get_ref().volume_id);
        answer(async {
            match parse::publish(request.into_inner())? {
                parse::Publish::Inline(wanted) => {
                    note_wanted(&rpc, &wanted);
                    let published = self.publish(wanted).await?;
                    note_published(&rpc, &published);
                }
                parse::Publish::Claim(mount) => {
                    if mount.staged_at.is_none() {
                        return Err(Failure::NotStaged);
                    }
                    self.engine()?.mount_claim(mount).await?;
                }
            }
            Ok(csi::NodePublishVolumeResponse {})
        })
        .await
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<csi::NodeUnpublishVolumeRequest>,
    ) -> Result<Response<csi::NodeUnpublishVolumeResponse>, Status> {
        Rpc::of(&request).volume(&request.get_ref().volume_id);
        answer(async {
            let (volume, target) = parse::unpublish(request.into_inner())?;
            if self.unmounts_only() {
                Engine::unmount_offline(&target, false).await?;
                return Ok(csi::NodeUnpublishVolumeResponse {});
            }
            let (engine, distribution) = serving(&self.readiness)?;
            if parse::is_claim(&volume) {
                engine.unmount_claim(&volume, &target, false).await?;
            } else {
                refuse_waiting(distribution.as_deref(), &volume)?;
                engine.unpublish(&volume, &target).await?;
            }
            Ok(csi::NodeUnpublishVolumeResponse {})
        })
        .await
    }

    async fn node_get_volume_stats(
        &self,
        request: Request<csi::NodeGetVolumeStatsRequest>,
    ) -> Result<Response<csi::NodeGetVolumeStatsResponse>, Status> {
        Rpc::of(&request).volume(&request.get_ref().volume_id);
        answer(async {
            let (volume, path) = parse::stats(request.get_ref())?;
            let absent = |_| Failure::NotFound("volume", volume.to_owned());
            let id = volume.parse().map_err(absent)?;
            let stats = self.engine()?.stats(&id, &path).await?;
            Ok(render::stats(&stats))
        })
        .await
    }

    async fn node_get_capabilities(
        &self,
        _: Request<csi::NodeGetCapabilitiesRequest>,
    ) -> Result<Response<csi::NodeGetCapabilitiesResponse>, Status> {
        let capability = |kind: rpc::Type| csi::NodeServiceCapability {
            r#type: Some(Type::Rpc(Capability {
                r#type: kind.into(),
            })),
        };
        let types = capabilities(self.features);
        Ok(Response::new(csi::NodeGetCapabilitiesResponse {
            capabilities: types.into_iter().map(capability).collect(),
        }))
    }

    async fn node_get_info(
        &self,
        _: Request<csi::NodeGetInfoRequest>,
    ) -> Result<Response<csi::NodeGetInfoResponse>, Status> {
        answer(async {
            let node = self.place()?;
            Ok(csi::NodeGetInfoResponse {
                node_id: self.node.as_str().to_owned(),
                max_volumes_per_node: self.features.most_volumes.map_or(0, i64::from),
                accessible_topology: Some(topology::message(&node)),
            })
        })
        .await
    }

    async fn node_stage_volume(
        &self,
        request: Request<csi::NodeStageVolumeRequest>,
    ) -> Result<Response<csi::NodeStageVolumeResponse>, Status> {
        Rpc::of(&request).volume(&request.get_ref().volume_id);
        answer(async {
            let wanted = parse::stage(request.into_inner())?;
            self.engine()?.mount_claim(wanted).await?;
            Ok(csi::NodeStageVolumeResponse {})
        })
        .await
    }

    async fn node_unstage_volume(
        &self,
        request: Request<csi::NodeUnstageVolumeRequest>,
    ) -> Result<Response<csi::NodeUnstageVolumeResponse>, Status> {
        Rpc::of(&request).volume(&request.get_ref().volume_id);
        answer(async {
            let (volume, target) = parse::unstage(request.get_ref())?;
            if self.unmounts_only() {
                Engine::unmount_offline(&target, true).await?;
                return Ok(csi::NodeUnstageVolumeResponse {});
            }
            self.engine()?.unmount_claim(volume, &target, true).await?;
            Ok(csi::NodeUnstageVolumeResponse {})
        })
        .await
    }

    /// ControllerExpandVolume has raised the limit on this node. This only verifies it.
    async fn node_expand_volume(
        &self,
        request: Request<csi::NodeExpandVolumeRequest>,
    ) -> Result<Response<csi::NodeExpandVolumeResponse>, Status> {
        Rpc::of(&request).volume(&request.get_ref().volume_id);
        answer(async {
            let wanted = parse::expand(request.get_ref())?;
            let engine = self.engine()?;
            let claim = engine.claim(wanted.volume)?;
            let targets = engine.claim_use(wanted.volume).await?.targets;
            let path = PathBuf::from(wanted.path);
            if !targets.contains(&path) {
                let volume = wanted.volume.to_owned();
                return Err(engine::Error::NotPublished { volume, path }.into());
            }
            let (required, capacity) = (wanted.required, claim.capacity);
            if required > capacity && capacity > 0 {
                return Err(Failure::NotGrown { required, capacity });
            }
            Ok(csi::NodeExpandVolumeResponse {
                capacity_bytes: render::number(capacity),
            })
        })
        .await
    }

    async fn node_get_volume_health(
        &self,
        request: Request<csi::NodeGetVolumeHealthRequest>,
    ) -> Result<Response<csi::NodeGetVolumeHealthResponse>, Status> {
        Rpc::of(&request).volume(&request.get_ref().volume_id);
        answer(async {
            advertised(self.features.alpha, "NodeGetVolumeHealth")?;
            let volume = parse::health(request.get_ref())?;
            let health = if parse::is_claim(volume) {
                let used = self.engine()?.claim_use(volume).await?;
                health::of_claim(volume, &used)
            } else {
                let rows = self.engine()?.volumes(None);
                let row = rows.iter().find(|row| row.id.as_str() == volume);
                let row = row.ok_or_else(|| Failure::NotFound("volume", volume.to_owned()))?;
                health::of_volume(row)
            };
            Ok(csi::NodeGetVolumeHealthResponse {
                volume_health: Some(health),
            })
        })
        .await
    }

    async fn node_get_storage_health(
        &self,
        _: Request<csi::NodeGetStorageHealthRequest>,
    ) -> Result<Response<csi::NodeGetStorageHealthResponse>, Status> {
        answer(async {
            advertised(self.features.alpha, "NodeGetStorageHealth")?;
            let engine = self.engine()?;
            // The same check as /readyz: statfs(2) succeeds on a pool that accepts no changes.
            let look = async {
                engine.takes_writes().await?;
                engine.status().await
            };
            let status = match tokio::time::timeout(health::PATIENCE, look).await {
                Ok(Err(error @ engine::Error::ShuttingDown)) => return Err(error.into()),
                Ok(answer) => answer.map_err(|error| message_of(&error)),
                Err(_) => Err(format!(
                    "the pool does not answer within {:?}",
                    health::PATIENCE
                )),
            };
            Ok(csi::NodeGetStorageHealthResponse {
                backend_health: health::of_pool(&status),
            })
        })
        .await
    }
}

/// Refuses to unpublish a volume whose publish waits for content. The engine does not know it yet.
fn refuse_waiting(distribution: Option<&Distribution>, volume: &str) -> Result<(), engine::Error> {
    let waiting = distribution.map(Distribution::waiting);
    match volume.parse() {
        Ok(id) if waiting.is_some_and(|waiting| waiting.has(&id)) => Err(engine::Error::Busy(id)),
        _ => Ok(()),
    }
}

fn note_wanted(rpc: &Rpc, wanted: &PublishRequest) {
    rpc.record("volume.type", wanted.spec.kind.type_name());
    rpc.record("tenant", &wanted.tenant);
    rpc.record("pod", &wanted.pod.name);
}

fn note_published(rpc: &Rpc, published: &Published) {
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

#[cfg(test)]
mod tests {
    use std::path::Path;

    use tonic::Code;

    use super::*;
    use crate::engine::claims::{CreateClaim, MountClaim};
    use csi::volume_capability::access_mode::Mode;
    use csi::volume_capability::{AccessMode, AccessType, MountVolume};

    const NODE: &str = "node";

    #[tokio::test]
    async fn a_persistent_volume_is_staged_before_it_is_published() {
        let node = NodeId::new(NODE).expect("an id");
        let (_recovering, readiness) = watch::channel(Readiness::Recovering);
        let service = Service::new(node, Features::default(), readiness);
        let publish = async |staging: &str| {
            let request = csi::NodePublishVolumeRequest {
                volume_id: "vol-0123456789abcdef0123456789abcdef".to_owned(),
                staging_target_path: staging.to_owned(),
                target_path: "/pods/1".to_owned(),
                volume_capability: Some(csi::VolumeCapability {
                    access_mode: Some(AccessMode {
                        mode: Mode::SingleNodeWriter.into(),
                    }),
                    access_type: Some(AccessType::Mount(MountVolume::default())),
                }),
                ..Default::default()
            };
            let published = service.node_publish_volume(Request::new(request)).await;
            published.expect_err("nothing is there").code()
        };
        assert_eq!(publish("").await, Code::FailedPrecondition);
        // This would be a request for the engine.
        assert_eq!(publish("/staged/1").await, Code::Unavailable);
    }

    #[tokio::test]
    async fn an_expansion_is_confirmed_where_the_volume_is_mounted_and_as_large() {
        const SIZE: u64 = 1 << 20;
        if !crate::sys::is_root_or_skip() {
            return;
        }
        let folder = tempfile::tempdir().expect("a temporary folder");
        let config = engine::Config::of_copies(folder.path());
        let engine = Engine::open(config).await.expect("it opens");
        let sized = CreateClaim {
            required_bytes: SIZE,
            ..CreateClaim::empty("claim")
        };
        let claim = engine.create_claim(sized).await.expect("made").id;
        let staged = folder.path().join("staged");
        std::fs::create_dir(&staged).expect("mkdir");
        let mount = MountClaim {
            claim: claim.clone(),
            target: staged.clone(),
            staging: true,
            staged_at: None,
            read_only: false,
            multiple_targets: false,
            mount_group: None,
        };
        engine.mount_claim(mount).await.expect("staged");
        let node = NodeId::new(NODE).expect("an id");
        let readiness = Readiness::ready(engine.clone());
        let service = Service::new(node, Features::default(), readiness);
        let expand = async |path: &Path, required: u64| {
            let request = csi::NodeExpandVolumeRequest {
                volume_id: claim.to_string(),
                volume_path: path.to_str().expect("text").to_owned(),
                capacity_range: Some(csi::CapacityRange {
                    required_bytes: render::number(required),
                    limit_bytes: 0,
                }),
                ..Default::default()
            };
            let expanded = service.node_expand_volume(Request::new(request)).await;
            let capacity = expanded.map(|answer| answer.into_inner().capacity_bytes);
            capacity.map_err(|status| status.code())
        };
        assert_eq!(expand(&staged, SIZE).await, Ok(render::number(SIZE)));
        assert_eq!(expand(&staged, SIZE + 1).await, Err(Code::OutOfRange));
        let elsewhere = folder.path().join("elsewhere");
        assert_eq!(expand(&elsewhere, SIZE).await, Err(Code::NotFound));
        let unmounted = engine.unmount_claim(claim.as_str(), &staged, true).await;
        unmounted.expect("unmounted");
        engine.shutdown().await;
    }

    #[test]
    fn what_is_alpha_is_advertised_only_when_it_is_switched_on() {
        let alpha = [rpc::Type::GetVolumeHealth, rpc::Type::GetStorageHealth];
        let mut features = Features::default();
        let plain = capabilities(features);
        assert!(!alpha.iter().any(|kind| plain.contains(kind)));
        assert!(plain.contains(&rpc::Type::StageUnstageVolume));
        features.alpha = true;
        let all = capabilities(features);
        assert!(alpha.iter().all(|kind| all.contains(kind)));
    }
}
