//! Calls that kubelet would never make, and helpers to break valid ones. Checks no answer.

use std::path::Path;

use baggageclaim::kubelet_double::PublishOptions;
use baggageclaim::proto::csi::v1 as csi;
use csi::volume_capability::access_mode::Mode;
use csi::volume_capability::{AccessMode, AccessType, MountVolume};
use tonic::Status;

use super::Driver;

pub const OPTIONS: PublishOptions = PublishOptions {
    read_only: false,
    fs_group: None,
};

pub type Publish = csi::NodePublishVolumeRequest;

pub async fn send(driver: &Driver, request: Publish) -> Result<(), Status> {
    let mut client = driver.kubelet.node_client();
    client.node_publish_volume(request).await.map(drop)
}

pub async fn unpublish(driver: &Driver, volume: &str, target: &str) -> Result<(), Status> {
    let request = csi::NodeUnpublishVolumeRequest {
        volume_id: volume.to_owned(),
        target_path: target.to_owned(),
    };
    let mut client = driver.kubelet.node_client();
    client.node_unpublish_volume(request).await.map(drop)
}

pub fn text(path: &Path) -> String {
    path.to_str().expect("text").to_owned()
}

pub fn mount(request: &mut Publish) -> &mut MountVolume {
    match &mut request.volume_capability {
        Some(csi::VolumeCapability {
            access_type: Some(AccessType::Mount(mount)),
            ..
        }) => mount,
        other => panic!("{other:?}"),
    }
}

pub fn mode(request: &mut Publish, mode: Mode) {
    let capability = request.volume_capability.as_mut().expect("a capability");
    capability.access_mode = Some(AccessMode { mode: mode.into() });
}

pub fn key(request: &mut Publish, name: &str, value: Option<&str>) {
    let name = format!("csi.storage.k8s.io/{name}");
    match value {
        Some(value) => request.volume_context.insert(name, value.to_owned()),
        None => request.volume_context.remove(&name),
    };
}
