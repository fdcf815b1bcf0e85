//! The calls that the sidecars make, and those that kubelet makes for a claim.

use std::collections::BTreeMap;
use std::path::PathBuf;

use baggageclaim::kubelet_double::Kubelet;
use baggageclaim::proto::csi::v1 as csi;
use csi::controller_client::ControllerClient;
use csi::volume_capability::access_mode::Mode;
use csi::volume_capability::{AccessMode, AccessType, MountVolume};
use csi::volume_content_source::{SnapshotSource, Type, VolumeSource};
use tonic::Status;
use tonic::transport::Channel;

pub(crate) type Client = ControllerClient<Channel>;

const PREFIX: &str = "topology.baggageclaim.csi.concourse-ci.org";

pub(crate) fn capability() -> csi::VolumeCapability {
    csi::VolumeCapability {
        access_mode: Some(AccessMode {
            mode: Mode::SingleNodeWriter.into(),
        }),
        access_type: Some(AccessType::Mount(MountVolume::default())),
    }
}

/// What csi-provisioner sends for a pod that the scheduler has put on a node.
pub(crate) fn selected(node: &str) -> csi::TopologyRequirement {
    let term = csi::Topology {
        segments: BTreeMap::from([
            (format!("{PREFIX}/node"), node.to_owned()),
            (format!("{PREFIX}/backend"), "overlay".to_owned()),
        ]),
    };
    csi::TopologyRequirement {
        requisite: vec![term.clone()],
        preferred: vec![term],
    }
}

pub(crate) fn of_volume(id: &str) -> Type {
    Type::Volume(VolumeSource {
        volume_id: id.to_owned(),
    })
}

pub(crate) fn of_snapshot(id: &str) -> Type {
    Type::Snapshot(SnapshotSource {
        snapshot_id: id.to_owned(),
    })
}

pub(crate) fn request(
    name: &str,
    at: Option<csi::TopologyRequirement>,
    source: Option<Type>,
) -> csi::CreateVolumeRequest {
    csi::CreateVolumeRequest {
        name: name.to_owned(),
        capacity_range: Some(csi::CapacityRange {
            required_bytes: 1 << 20,
            limit_bytes: 0,
        }),
        volume_capabilities: vec![capability()],
        accessibility_requirements: at,
        volume_content_source: source.map(|source| csi::VolumeContentSource {
            r#type: Some(source),
        }),
        ..Default::default()
    }
}

/// Makes a volume, and says its id and its node.
pub(crate) async fn create(
    client: &mut Client,
    request: csi::CreateVolumeRequest,
) -> Result<(String, String), Status> {
    let volume = client.create_volume(request).await?.into_inner().volume;
    let volume = volume.expect("required");
    let [topology] = &volume.accessible_topology[..] else {
        panic!("one place: {volume:?}");
    };
    let labels: Vec<(&String, &String)> = topology.segments.iter().collect();
    let [(key, node)] = labels[..] else {
        panic!("only the node's label: {volume:?}");
    };
    assert_eq!(*key, format!("{PREFIX}/node"));
    Ok((volume.volume_id, node.clone()))
}

pub(crate) async fn delete(client: &mut Client, id: &str) -> Result<(), Status> {
    let request = csi::DeleteVolumeRequest {
        volume_id: id.to_owned(),
        ..Default::default()
    };
    client.delete_volume(request).await.map(drop)
}

pub(crate) async fn snapshot(client: &mut Client, name: &str, of: &str) -> Result<String, Status> {
    let request = csi::CreateSnapshotRequest {
        name: name.to_owned(),
        source_volume_id: of.to_owned(),
        ..Default::default()
    };
    let snapshot = client.create_snapshot(request).await?.into_inner().snapshot;
    let snapshot = snapshot.expect("required");
    assert!(snapshot.ready_to_use && snapshot.creation_time.is_some());
    Ok(snapshot.snapshot_id)
}

pub(crate) async fn delete_snapshot(client: &mut Client, id: &str) -> Result<(), Status> {
    let request = csi::DeleteSnapshotRequest {
        snapshot_id: id.to_owned(),
        ..Default::default()
    };
    client.delete_snapshot(request).await.map(drop)
}

/// Mounts a claim as kubelet does.
pub(crate) async fn mount(kubelet: &Kubelet, id: &str) -> PathBuf {
    try_mount(kubelet, id).await.expect("mounted")
}

/// One attempt of it. Kubelet repeats it until it succeeds.
pub(crate) async fn try_mount(kubelet: &Kubelet, id: &str) -> Result<PathBuf, Status> {
    let (staging, target) = paths(kubelet, id);
    std::fs::create_dir_all(&staging).expect("mkdir");
    let text = |path: &PathBuf| path.to_str().expect("text").to_owned();
    let mut node = kubelet.node_client();
    let stage = csi::NodeStageVolumeRequest {
        volume_id: id.to_owned(),
        staging_target_path: text(&staging),
        volume_capability: Some(capability()),
        ..Default::default()
    };
    node.node_stage_volume(stage).await?;
    let publish = csi::NodePublishVolumeRequest {
        volume_id: id.to_owned(),
        staging_target_path: text(&staging),
        target_path: text(&target),
        volume_capability: Some(capability()),
        ..Default::default()
    };
    node.node_publish_volume(publish).await?;
    Ok(target)
}

/// Unmounts it.
pub(crate) async fn unmount(kubelet: &Kubelet, id: &str) {
    // The node may be trying again to delete it at this moment. Kubelet repeats the call, too.
    while let Err(status) = try_unmount(kubelet, id).await {
        assert_eq!(status.code(), tonic::Code::Aborted, "{status}");
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
}

/// One attempt of it.
pub(crate) async fn try_unmount(kubelet: &Kubelet, id: &str) -> Result<(), Status> {
    let (staging, target) = paths(kubelet, id);
    let text = |path: &PathBuf| path.to_str().expect("text").to_owned();
    let mut node = kubelet.node_client();
    let unpublish = csi::NodeUnpublishVolumeRequest {
        volume_id: id.to_owned(),
        target_path: text(&target),
    };
    node.node_unpublish_volume(unpublish).await?;
    let unstage = csi::NodeUnstageVolumeRequest {
        volume_id: id.to_owned(),
        staging_target_path: text(&staging),
    };
    node.node_unstage_volume(unstage).await.map(drop)
}

fn paths(kubelet: &Kubelet, id: &str) -> (PathBuf, PathBuf) {
    let at = kubelet.root().join("claims").join(id);
    (at.join("globalmount"), at.join("mount"))
}
