//! The Controller service: persistent volumes and their snapshots, in a store
//! ([`Claims`](crate::engine::claims::Claims)).
//!
//! Each RPC parses, calls the store and renders. The store chooses the node of a volume; this
//! module limits the attachments of a node.
//!
//! CreateVolume returns ABORTED or UNAVAILABLE only while it runs, or may run on a node. After
//! these codes the provisioner assumes that a volume may be coming: it keeps the claim's node, and
//! deletes the volume if the claim is deleted. After others it forgets the claim
//! ([`Failure::not_begun`]).

pub(super) mod parse;
#[cfg(test)]
pub(super) mod tests;

use std::sync::Arc;

use tokio::sync::Mutex;
use tonic::{Request, Response, Status};

use super::context::{Features, FindClaims};
use super::parse::{Invalid, bounded, given, publish_context};
use super::status::{Failure, advertised, answer};
use super::token::List;
use super::{health, render, topology};
use crate::engine;
use crate::engine::claims::{Capacity, Claims, SnapshotFilter};
use crate::model::{ClaimSource, PersistentVolume, Placed, Snapshot, VolumeId};
use crate::proto::csi::v1 as csi;
use crate::server::Rpc;
use csi::controller_server::Controller;
use csi::controller_service_capability::{Rpc as Capability, Type, rpc};

/// The number of volumes per call to the store, where the answer may need all.
const STRIDE: usize = 1000;

pub(super) struct Service {
    features: Features,
    claims: FindClaims,
    /// Attachments are counted and added one at a time. Otherwise two could both be the last one.
    attaching: Mutex<()>,
}

impl Service {
    pub(super) fn new(features: Features, claims: FindClaims) -> Self {
        Self {
            features,
            claims,
            attaching: Mutex::default(),
        }
    }

    fn claims(&self) -> Result<Arc<dyn Claims>, Failure> {
        (self.claims)()
    }

    /// The nodes to which ControllerPublishVolume attached the volume.
    fn attached_to(&self, claim: &PersistentVolume) -> Vec<String> {
        if !self.features.attach {
            return Vec::new();
        }
        claim.attached.iter().map(|one| one.node.clone()).collect()
    }

    fn snapshot(&self, snapshot: &Placed<Snapshot>) -> csi::Snapshot {
        let node = self.features.told_of_snapshots(&snapshot.node);
        render::snapshot(&snapshot.what, node)
    }

    /// Fails if the node has its maximum of attached volumes.
    async fn check_limit(
        &self,
        claims: &dyn Claims,
        claim: &PersistentVolume,
        node: &str,
    ) -> Result<(), Failure> {
        let here = |claim: &PersistentVolume| claim.attached.iter().any(|one| one.node == node);
        let Some(most) = self.features.most_volumes else {
            return Ok(());
        };
        if here(claim) {
            return Ok(());
        }
        let mut count = 0_usize;
        let mut after = None;
        loop {
            let page = claims.claims(after.as_ref(), STRIDE).await?;
            count += page.items.iter().filter(|claim| here(&claim.what)).count();
            after = page.next;
            if after.is_none() {
                break;
            }
        }
        if count >= usize::try_from(most).unwrap_or(usize::MAX) {
            return Err(Failure::AllAttached(most));
        }
        Ok(())
    }
}

/// The controller's capabilities. For SINGLE_NODE_MULTI_WRITER see `node`.
fn capabilities(features: Features) -> Vec<rpc::Type> {
    let mut types = vec![
        rpc::Type::CreateDeleteVolume,
        rpc::Type::ListVolumes,
        rpc::Type::GetCapacity,
        rpc::Type::CreateDeleteSnapshot,
        rpc::Type::ListSnapshots,
        rpc::Type::CloneVolume,
        rpc::Type::ExpandVolume,
        rpc::Type::SingleNodeMultiWriter,
        rpc::Type::ModifyVolume,
    ];
    if features.attach {
        types.extend([
            rpc::Type::PublishUnpublishVolume,
            rpc::Type::PublishReadonly,
            rpc::Type::ListVolumesPublishedNodes,
        ]);
    }
    if features.alpha {
        types.extend([
            rpc::Type::GetVolume,
            rpc::Type::GetSnapshot,
            rpc::Type::GetVolumeHealth,
            rpc::Type::ListVolumeHealth,
        ]);
    }
    types
}

/// The failure of CreateVolume after an error of the store. If only the source is busy, the volume
/// was not begun. If a write to the index is in doubt, the next start may find the volume. In a
/// cluster, a node may be making the volume. The cluster's codes say that
/// ([`engine::Error::Remote`]).
fn not_created(error: engine::Error, source: Option<&ClaimSource>) -> Failure {
    let begun = match (&error, source) {
        (engine::Error::Busy(id), Some(ClaimSource::Snapshot(from) | ClaimSource::Claim(from))) => {
            id != from
        }
        (engine::Error::Busy(_), None)
        | (
            engine::Error::Remote { .. } | engine::Error::Index(_) | engine::Error::Degraded(_),
            _,
        ) => true,
        _ => false,
    };
    let failure = Failure::from(error);
    if begun { failure } else { failure.not_begun() }
}

#[tonic::async_trait]
impl Controller for Service {
    async fn create_volume(
        &self,
        request: Request<csi::CreateVolumeRequest>,
    ) -> Result<Response<csi::CreateVolumeResponse>, Status> {
        let rpc = Rpc::of(&request);
        rpc.record("volume.name", &request.get_ref().name);
        answer(async {
            let wanted = parse::create(request.into_inner())?;
            let claims = self.claims().map_err(|failure| match failure {
                // A node may be making it since before the controller started.
                Failure::Listing => failure,
                other => other.not_begun(),
            })?;
            let source = wanted.claim.source.clone();
            let created = claims.create_claim(wanted.claim, &wanted.at).await;
            let claim = created.map_err(|error| not_created(error, source.as_ref()))?;
            rpc.volume(claim.what.id.as_str());
            Ok(csi::CreateVolumeResponse {
                volume: Some(render::volume(&claim)),
            })
        })
        .await
    }

    async fn delete_volume(
        &self,
        request: Request<csi::DeleteVolumeRequest>,
    ) -> Result<Response<csi::DeleteVolumeResponse>, Status> {
        Rpc::of(&request).volume(&request.get_ref().volume_id);
        answer(async {
            let id = given("volume_id", &request.get_ref().volume_id)?;
            self.claims()?.delete_claim(id).await?;
            Ok(csi::DeleteVolumeResponse {})
        })
        .await
    }

    async fn controller_publish_volume(
        &self,
        request: Request<csi::ControllerPublishVolumeRequest>,
    ) -> Result<Response<csi::ControllerPublishVolumeResponse>, Status> {
        Rpc::of(&request).volume(&request.get_ref().volume_id);
        answer(async {
            advertised(self.features.attach, "ControllerPublishVolume")?;
            let wanted = parse::attach(request.into_inner())?;
            let (volume, attachment) = (wanted.volume, wanted.attachment);
            let claims = self.claims()?;
            let _alone = self.attaching.lock().await;
            let claim = claims.claim(&volume).await?.what;
            self.check_limit(&*claims, &claim, &attachment.node).await?;
            let publish_context = publish_context(attachment.read_only);
            claims.attach_claim(&volume, attachment).await?;
            Ok(csi::ControllerPublishVolumeResponse { publish_context })
        })
        .await
    }

    /// Succeeds for a volume or a node that does not exist.
    async fn controller_unpublish_volume(
        &self,
        request: Request<csi::ControllerUnpublishVolumeRequest>,
    ) -> Result<Response<csi::ControllerUnpublishVolumeResponse>, Status> {
        Rpc::of(&request).volume(&request.get_ref().volume_id);
        answer(async {
            advertised(self.features.attach, "ControllerUnpublishVolume")?;
            let request = request.into_inner();
            let id = given("volume_id", &request.volume_id)?;
            let node = Some(request.node_id.as_str()).filter(|node| !node.is_empty());
            self.claims()?.detach_claim(id, node).await?;
            Ok(csi::ControllerUnpublishVolumeResponse {})
        })
        .await
    }

    /// A capability that the volume lacks is a message, not an error (CSI specification,
    /// "ValidateVolumeCapabilities").
    async fn validate_volume_capabilities(
        &self,
        request: Request<csi::ValidateVolumeCapabilitiesRequest>,
    ) -> Result<Response<csi::ValidateVolumeCapabilitiesResponse>, Status> {
        Rpc::of(&request).volume(&request.get_ref().volume_id);
        answer(async {
            let request = request.into_inner();
            parse::confirmed(&request)?;
            let claim = self.claims()?.claim(&request.volume_id).await?;
            Ok(match confirm(&claim.what, &request) {
                Ok(()) => csi::ValidateVolumeCapabilitiesResponse {
                    confirmed: Some(csi::validate_volume_capabilities_response::Confirmed {
                        volume_context: request.volume_context,
                        volume_capabilities: request.volume_capabilities,
                        parameters: request.parameters,
                        mutable_parameters: request.mutable_parameters,
                    }),
                    message: String::new(),
                },
                Err(message) => csi::ValidateVolumeCapabilitiesResponse {
                    confirmed: None,
                    message,
                },
            })
        })
        .await
    }

    async fn list_volumes(
        &self,
        request: Request<csi::ListVolumesRequest>,
    ) -> Result<Response<csi::ListVolumesResponse>, Status> {
        answer(async {
            let request = request.get_ref();
            let most = parse::page(request.max_entries)?;
            let after = List::Volumes.after(&request.starting_token)?;
            let page = self.claims()?.claims(after.as_ref(), most).await?;
            let entry = |claim: &Placed<PersistentVolume>| csi::list_volumes_response::Entry {
                volume: Some(render::volume(claim)),
                status: Some(csi::list_volumes_response::VolumeStatus {
                    published_node_ids: self.attached_to(&claim.what),
                }),
            };
            Ok(csi::ListVolumesResponse {
                entries: page.items.iter().map(entry).collect(),
                next_token: List::Volumes.token(page.next.as_ref()),
            })
        })
        .await
    }

    /// Lists only volumes with problems. A page ends when it is full, or with the last volume.
    async fn controller_list_volume_health(
        &self,
        request: Request<csi::ControllerListVolumeHealthRequest>,
    ) -> Result<Response<csi::ControllerListVolumeHealthResponse>, Status> {
        answer(async {
            advertised(self.features.alpha, "ControllerListVolumeHealth")?;
            let request = request.get_ref();
            let most = parse::page(request.max_entries)?;
            let mut after = List::Health.after(&request.starting_token)?;
            let claims = self.claims()?;
            let mut entries = Vec::new();
            loop {
                let page = claims.claims(after.as_ref(), STRIDE).await?;
                for Placed { what: claim, .. } in &page.items {
                    let used = match claims.claim_use(claim.id.as_str()).await {
                        Ok(used) => used,
                        // It was deleted since the page was made.
                        Err(engine::Error::NoSuchClaim(_)) => continue,
                        Err(error) => return Err(error.into()),
                    };
                    if used.problems.is_empty() {
                        continue;
                    }
                    if entries.len() == most {
                        let last: &csi::VolumeHealth = &entries[most - 1];
                        let last: Option<VolumeId> = last.volume_id.parse().ok();
                        return Ok(csi::ControllerListVolumeHealthResponse {
                            next_token: List::Health.token(last.as_ref()),
                            entries,
                        });
                    }
                    entries.push(health::of_claim(claim.id.as_str(), &used));
                }
                after = page.next;
                if after.is_none() {
                    let next_token = String::new();
                    return Ok(csi::ControllerListVolumeHealthResponse {
                        entries,
                        next_token,
                    });
                }
            }
        })
        .await
    }

    async fn controller_get_volume_health(
        &self,
        request: Request<csi::ControllerGetVolumeHealthRequest>,
    ) -> Result<Response<csi::ControllerGetVolumeHealthResponse>, Status> {
        Rpc::of(&request).volume(&request.get_ref().volume_id);
        answer(async {
            advertised(self.features.alpha, "ControllerGetVolumeHealth")?;
            let id = given("volume_id", &request.get_ref().volume_id)?;
            let used = self.claims()?.claim_use(id).await?;
            Ok(csi::ControllerGetVolumeHealthResponse {
                volume_health: Some(health::of_claim(id, &used)),
            })
        })
        .await
    }

    /// The space for a volume with these capabilities, parameters and topology; 0 if one of them is
    /// not possible.
    async fn get_capacity(
        &self,
        request: Request<csi::GetCapacityRequest>,
    ) -> Result<Response<csi::GetCapacityResponse>, Status> {
        answer(async {
            let request = request.into_inner();
            bounded(&[("parameters", &request.parameters)])?;
            parse::parameters(request.parameters)?;
            let wanted = request.volume_capabilities;
            let claims = self.claims()?;
            let capacity = if wanted.is_empty() || parse::capabilities(wanted).is_ok() {
                let within = topology::topology(request.accessible_topology);
                claims.capacity(&within).await?
            } else {
                Capacity::default()
            };
            Ok(csi::GetCapacityResponse {
                available_capacity: render::number(capacity.available),
                maximum_volume_size: Some(render::number(capacity.largest)),
                minimum_volume_size: None,
            })
        })
        .await
    }

    async fn controller_get_capabilities(
        &self,
        _: Request<csi::ControllerGetCapabilitiesRequest>,
    ) -> Result<Response<csi::ControllerGetCapabilitiesResponse>, Status> {
        let capability = |kind: rpc::Type| csi::ControllerServiceCapability {
            r#type: Some(Type::Rpc(Capability {
                r#type: kind.into(),
            })),
        };
        let types = capabilities(self.features);
        Ok(Response::new(csi::ControllerGetCapabilitiesResponse {
            capabilities: types.into_iter().map(capability).collect(),
        }))
    }

    async fn create_snapshot(
        &self,
        request: Request<csi::CreateSnapshotRequest>,
    ) -> Result<Response<csi::CreateSnapshotResponse>, Status> {
        let rpc = Rpc::of(&request);
        rpc.volume(&request.get_ref().source_volume_id);
        rpc.record("snapshot.name", &request.get_ref().name);
        answer(async {
            let wanted = parse::snapshot(request.into_inner())?;
            let claims = self.claims()?;
            let taken = claims.create_snapshot(&wanted.name, &wanted.source, &wanted.at);
            let snapshot = taken.await?;
            rpc.record("snapshot.id", snapshot.what.id.as_str());
            Ok(csi::CreateSnapshotResponse {
                snapshot: Some(self.snapshot(&snapshot)),
            })
        })
        .await
    }

    async fn delete_snapshot(
        &self,
        request: Request<csi::DeleteSnapshotRequest>,
    ) -> Result<Response<csi::DeleteSnapshotResponse>, Status> {
        let id = &request.get_ref().snapshot_id;
        Rpc::of(&request).record("snapshot.id", id);
        answer(async {
            let id = given("snapshot_id", id)?;
            self.claims()?.delete_snapshot(id).await?;
            Ok(csi::DeleteSnapshotResponse {})
        })
        .await
    }

    async fn list_snapshots(
        &self,
        request: Request<csi::ListSnapshotsRequest>,
    ) -> Result<Response<csi::ListSnapshotsResponse>, Status> {
        answer(async {
            let request = request.get_ref();
            let most = parse::page(request.max_entries)?;
            let after = List::Snapshots.after(&request.starting_token)?;
            let filter = parse::filter(request);
            let claims = self.claims()?;
            let page = claims.snapshots(&filter, after.as_ref(), most).await?;
            let entry = |snapshot| csi::list_snapshots_response::Entry {
                snapshot: Some(self.snapshot(snapshot)),
            };
            Ok(csi::ListSnapshotsResponse {
                entries: page.items.iter().map(entry).collect(),
                next_token: List::Snapshots.token(page.next.as_ref()),
            })
        })
        .await
    }

    async fn get_snapshot(
        &self,
        request: Request<csi::GetSnapshotRequest>,
    ) -> Result<Response<csi::GetSnapshotResponse>, Status> {
        let id = &request.get_ref().snapshot_id;
        Rpc::of(&request).record("snapshot.id", id);
        answer(async {
            advertised(self.features.alpha, "GetSnapshot")?;
            let id = given("snapshot_id", id)?;
            let filter = SnapshotFilter {
                id: Some(id.to_owned()),
                source: None,
            };
            let page = self.claims()?.snapshots(&filter, None, 1).await?;
            let found = page.items.first();
            let found = found.ok_or_else(|| Failure::NotFound("snapshot", id.to_owned()))?;
            Ok(csi::GetSnapshotResponse {
                snapshot: Some(self.snapshot(found)),
            })
        })
        .await
    }

    /// Changes the limit at once, so the node has nothing to do.
    async fn controller_expand_volume(
        &self,
        request: Request<csi::ControllerExpandVolumeRequest>,
    ) -> Result<Response<csi::ControllerExpandVolumeResponse>, Status> {
        Rpc::of(&request).volume(&request.get_ref().volume_id);
        answer(async {
            let wanted = parse::expand(request.into_inner())?;
            let claims = self.claims()?;
            let claim = claims
                .expand_claim(&wanted.volume, wanted.required, wanted.limit)
                .await?;
            Ok(csi::ControllerExpandVolumeResponse {
                capacity_bytes: render::number(claim.capacity),
                node_expansion_required: false,
            })
        })
        .await
    }

    async fn controller_get_volume(
        &self,
        request: Request<csi::ControllerGetVolumeRequest>,
    ) -> Result<Response<csi::ControllerGetVolumeResponse>, Status> {
        Rpc::of(&request).volume(&request.get_ref().volume_id);
        answer(async {
            advertised(self.features.alpha, "ControllerGetVolume")?;
            let id = given("volume_id", &request.get_ref().volume_id)?;
            let claim = self.claims()?.claim(id).await?;
            Ok(csi::ControllerGetVolumeResponse {
                volume: Some(render::volume(&claim)),
                status: Some(csi::controller_get_volume_response::VolumeStatus {
                    published_node_ids: self.attached_to(&claim.what),
                }),
            })
        })
        .await
    }

    async fn controller_modify_volume(
        &self,
        request: Request<csi::ControllerModifyVolumeRequest>,
    ) -> Result<Response<csi::ControllerModifyVolumeResponse>, Status> {
        Rpc::of(&request).volume(&request.get_ref().volume_id);
        answer(async {
            let (id, mutable) = parse::modify(request.into_inner())?;
            self.claims()?.modify_claim(&id, mutable).await?;
            Ok(csi::ControllerModifyVolumeResponse {})
        })
        .await
    }
}

/// Compares a request with the volume; the error names the difference.
fn confirm(
    claim: &PersistentVolume,
    request: &csi::ValidateVolumeCapabilitiesRequest,
) -> Result<(), String> {
    let text = |invalid: Invalid| invalid.to_string();
    parse::capabilities(request.volume_capabilities.clone()).map_err(text)?;
    super::parse::no_attributes(&request.volume_context).map_err(text)?;
    let parameters = parse::parameters(request.parameters.clone()).map_err(text)?;
    if !request.parameters.is_empty() && parameters != claim.parameters {
        return Err("the volume was made with other parameters".to_owned());
    }
    let mutable = parse::mutable(request.mutable_parameters.clone()).map_err(text)?;
    // A VolumeAttributesClass need not name all parameters of the volume.
    if mutable.over(claim.mutable) != claim.mutable {
        return Err("the volume has other mutable parameters".to_owned());
    }
    Ok(())
}
