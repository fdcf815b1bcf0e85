//! The GroupController service: snapshots of several volumes at one moment. The snapshots of a
//! group are deleted only with the group.

use tonic::{Request, Response, Status};

use super::context::{Features, FindClaims};
use super::controller::parse;
use super::parse::{Invalid, given};
use super::render;
use super::status::{Failure, answer};
use crate::engine;
use crate::engine::claims::Group;
use crate::model::{Placed, SnapshotGroup, SnapshotId};
use crate::proto::csi::v1 as csi;
use crate::server::Rpc;
use csi::group_controller_server::GroupController;
use csi::group_controller_service_capability::{Rpc as Capability, Type, rpc};

pub(super) struct Service {
    features: Features,
    claims: FindClaims,
}

impl Service {
    pub(super) fn new(features: Features, claims: FindClaims) -> Self {
        Self { features, claims }
    }

    fn render(&self, group: &Placed<Group>) -> csi::VolumeGroupSnapshot {
        render::group(&group.what, self.features.told_of_snapshots(&group.node))
    }
}

/// Checks the snapshots that the caller names against the group (CSI specification, "Snapshot list
/// mismatch"). An empty list is not checked.
fn same(group: &SnapshotGroup, named: &[String]) -> Result<(), Invalid> {
    let mut ours: Vec<&str> = group.snapshots.iter().map(SnapshotId::as_str).collect();
    let mut theirs: Vec<&str> = named.iter().map(String::as_str).collect();
    ours.sort_unstable();
    theirs.sort_unstable();
    theirs.dedup();
    if theirs.is_empty() || ours == theirs {
        return Ok(());
    }
    Err(Invalid::OtherSnapshots {
        group: group.id.to_string(),
        snapshots: ours.into_iter().map(str::to_owned).collect(),
    })
}

#[tonic::async_trait]
impl GroupController for Service {
    async fn group_controller_get_capabilities(
        &self,
        _: Request<csi::GroupControllerGetCapabilitiesRequest>,
    ) -> Result<Response<csi::GroupControllerGetCapabilitiesResponse>, Status> {
        let capability = csi::GroupControllerServiceCapability {
            r#type: Some(Type::Rpc(Capability {
                r#type: rpc::Type::CreateDeleteGetVolumeGroupSnapshot.into(),
            })),
        };
        Ok(Response::new(csi::GroupControllerGetCapabilitiesResponse {
            capabilities: vec![capability],
        }))
    }

    async fn create_volume_group_snapshot(
        &self,
        request: Request<csi::CreateVolumeGroupSnapshotRequest>,
    ) -> Result<Response<csi::CreateVolumeGroupSnapshotResponse>, Status> {
        let rpc = Rpc::of(&request);
        rpc.record("group.name", &request.get_ref().name);
        answer(async {
            let (name, sources) = parse::group(request.into_inner())?;
            let group = (self.claims)()?.create_group(&name, &sources).await?;
            rpc.record("group.id", group.what.0.id.as_str());
            Ok(csi::CreateVolumeGroupSnapshotResponse {
                group_snapshot: Some(self.render(&group)),
            })
        })
        .await
    }

    async fn delete_volume_group_snapshot(
        &self,
        request: Request<csi::DeleteVolumeGroupSnapshotRequest>,
    ) -> Result<Response<csi::DeleteVolumeGroupSnapshotResponse>, Status> {
        let id = &request.get_ref().group_snapshot_id;
        Rpc::of(&request).record("group.id", id);
        answer(async {
            let id = given("group_snapshot_id", id)?;
            let claims = (self.claims)()?;
            let named = &request.get_ref().snapshot_ids;
            if !named.is_empty() {
                match claims.group(id).await {
                    Ok(group) => same(&group.what.0, named)?,
                    // A group that does not exist counts as deleted.
                    Err(engine::Error::NoSuchSnapshot(_)) => {}
                    Err(error) => return Err(error.into()),
                }
            }
            claims.delete_group(id).await?;
            Ok(csi::DeleteVolumeGroupSnapshotResponse {})
        })
        .await
    }

    async fn get_volume_group_snapshot(
        &self,
        request: Request<csi::GetVolumeGroupSnapshotRequest>,
    ) -> Result<Response<csi::GetVolumeGroupSnapshotResponse>, Status> {
        let id = &request.get_ref().group_snapshot_id;
        Rpc::of(&request).record("group.id", id);
        answer(async {
            let id = given("group_snapshot_id", id)?;
            let group = (self.claims)()?.group(id).await?;
            same(&group.what.0, &request.get_ref().snapshot_ids).map_err(Failure::from)?;
            Ok(csi::GetVolumeGroupSnapshotResponse {
                group_snapshot: Some(self.render(&group)),
            })
        })
        .await
    }
}
