//! Checks that the fake kubelet sends kubelet's requests, against a driver that records them.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use baggageclaim::kubelet_double::{ConnectError, Kubelet, NO_ATTRIBUTES, PublishOptions};
use baggageclaim::proto::csi::v1 as csi;
use csi::identity_server::{Identity, IdentityServer};
use csi::node_server::{Node, NodeServer};
use csi::volume_capability::{AccessType, access_mode::Mode};
use parking_lot::Mutex;
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::body::Body;
use tonic::codegen::http;
use tonic::{Code, Request, Response, Status};
use tower::ServiceExt as _;

type Answer<T> = Result<Response<T>, Status>;

/// A driver that makes directories and remembers what it was asked.
#[derive(Clone, Default)]
struct Notebook(Arc<Notes>);

#[derive(Default)]
struct Notes {
    capable: bool,
    /// How often Probe still answers that it is not ready.
    not_ready: Mutex<u32>,
    refuse: Mutex<Option<Code>>,
    published: Mutex<Vec<csi::NodePublishVolumeRequest>>,
    unpublished: Mutex<Vec<csi::NodeUnpublishVolumeRequest>>,
    deadlines: Mutex<Vec<String>>,
}

#[tonic::async_trait]
impl Identity for Notebook {
    async fn get_plugin_info(
        &self,
        _: Request<csi::GetPluginInfoRequest>,
    ) -> Answer<csi::GetPluginInfoResponse> {
        Ok(Response::new(csi::GetPluginInfoResponse {
            name: "notebook.example".to_owned(),
            vendor_version: "1".to_owned(),
            manifest: BTreeMap::new(),
        }))
    }

    async fn get_plugin_capabilities(
        &self,
        _: Request<csi::GetPluginCapabilitiesRequest>,
    ) -> Answer<csi::GetPluginCapabilitiesResponse> {
        Ok(Response::new(csi::GetPluginCapabilitiesResponse::default()))
    }

    async fn probe(&self, _: Request<csi::ProbeRequest>) -> Answer<csi::ProbeResponse> {
        let mut left = self.0.not_ready.lock();
        let ready = *left == 0;
        *left = left.saturating_sub(1);
        Ok(Response::new(csi::ProbeResponse { ready: Some(ready) }))
    }
}

macro_rules! unimplemented_rpcs {
    ($($name:ident: $request:ident -> $response:ident),* $(,)?) => {
        #[tonic::async_trait]
        impl Node for Notebook {
            $(async fn $name(&self, _: Request<csi::$request>) -> Answer<csi::$response> {
                Err(Status::unimplemented(stringify!($name)))
            })*

            async fn node_get_capabilities(
                &self,
                _: Request<csi::NodeGetCapabilitiesRequest>,
            ) -> Answer<csi::NodeGetCapabilitiesResponse> {
                use csi::node_service_capability::{Rpc, Type, rpc};
                let types: &[rpc::Type] = if self.0.capable {
                    &[rpc::Type::VolumeMountGroup, rpc::Type::SingleNodeMultiWriter]
                } else {
                    &[]
                };
                let capabilities = types
                    .iter()
                    .map(|&kind| csi::NodeServiceCapability {
                        r#type: Some(Type::Rpc(Rpc { r#type: kind.into() })),
                    })
                    .collect();
                Ok(Response::new(csi::NodeGetCapabilitiesResponse { capabilities }))
            }

            async fn node_get_info(
                &self,
                _: Request<csi::NodeGetInfoRequest>,
            ) -> Answer<csi::NodeGetInfoResponse> {
                Ok(Response::new(csi::NodeGetInfoResponse {
                    node_id: "node-1".to_owned(),
                    ..Default::default()
                }))
            }

            async fn node_publish_volume(
                &self,
                request: Request<csi::NodePublishVolumeRequest>,
            ) -> Answer<csi::NodePublishVolumeResponse> {
                let deadline = request.metadata().get("grpc-timeout").expect("a deadline");
                let deadline = deadline.to_str().expect("text").to_owned();
                self.0.deadlines.lock().push(deadline);
                let request = request.into_inner();
                let target = request.target_path.clone();
                self.0.published.lock().push(request);
                fs::create_dir_all(target)?;
                match *self.0.refuse.lock() {
                    Some(code) => Err(Status::new(code, "refused")),
                    None => Ok(Response::new(csi::NodePublishVolumeResponse {})),
                }
            }

            async fn node_unpublish_volume(
                &self,
                request: Request<csi::NodeUnpublishVolumeRequest>,
            ) -> Answer<csi::NodeUnpublishVolumeResponse> {
                let request = request.into_inner();
                fs::remove_dir(&request.target_path)?;
                self.0.unpublished.lock().push(request);
                Ok(Response::new(csi::NodeUnpublishVolumeResponse {}))
            }

            async fn node_get_volume_stats(
                &self,
                request: Request<csi::NodeGetVolumeStatsRequest>,
            ) -> Answer<csi::NodeGetVolumeStatsResponse> {
                let path = request.into_inner().volume_path;
                let usage = csi::VolumeUsage {
                    used: i64::from(Path::new(&path).is_dir()),
                    ..Default::default()
                };
                Ok(Response::new(csi::NodeGetVolumeStatsResponse { usage: vec![usage] }))
            }
        }
    };
}

unimplemented_rpcs! {
    node_stage_volume: NodeStageVolumeRequest -> NodeStageVolumeResponse,
    node_unstage_volume: NodeUnstageVolumeRequest -> NodeUnstageVolumeResponse,
    node_get_volume_health: NodeGetVolumeHealthRequest -> NodeGetVolumeHealthResponse,
    node_get_storage_health: NodeGetStorageHealthRequest -> NodeGetStorageHealthResponse,
    node_expand_volume: NodeExpandVolumeRequest -> NodeExpandVolumeResponse,
}

fn serve(socket: &Path, capable: bool) -> Notebook {
    let notebook = Notebook(Arc::new(Notes {
        capable,
        ..Default::default()
    }));
    let listener = UnixListener::bind(socket).expect("bind");
    let (identity, node) = (
        IdentityServer::new(notebook.clone()),
        NodeServer::new(notebook.clone()),
    );
    let both = tower::service_fn(move |request: http::Request<Body>| {
        let (identity, node) = (identity.clone(), node.clone());
        async move {
            if request.uri().path().starts_with("/csi.v1.Identity/") {
                identity.oneshot(request).await
            } else {
                node.oneshot(request).await
            }
        }
    });
    tokio::spawn(
        tonic::transport::Server::builder()
            .serve_with_incoming(both, UnixListenerStream::new(listener)),
    );
    notebook
}

#[tokio::test]
#[expect(clippy::too_many_lines, reason = "one scenario, told in order")]
async fn an_inline_volume_is_published_and_unpublished_as_kubelet_does() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let socket = dir.path().join("csi.sock");
    let driver = serve(&socket, true);
    let kubelet = Kubelet::connect(&socket, dir.path())
        .await
        .expect("connects");
    let pod = kubelet.pod_with_uid("ci", "step-1", "0a0b0c0d-0000-4000-8000-000000000001");

    let attributes = [
        ("type", "output"),
        ("csi.storage.k8s.io/pod.namespace", "kube-system"),
        ("csi.storage.k8s.io/ephemeral", "false"),
    ];
    let options = PublishOptions {
        read_only: true,
        fs_group: Some(2000),
    };
    let published = pod
        .publish("out", attributes, options)
        .await
        .expect("publishes");
    let volumes = pod.dir().join("volumes/kubernetes.io~csi");
    assert_eq!(published.target, volumes.join("out/mount"));
    // printf '%s' 0a0b0c0d-0000-4000-8000-000000000001out | sha256sum
    let id = "csi-9b19a271dcd16b87908aaac5833f8947450e5285c996995556ab5b55f6586cf5";
    assert_eq!(published.volume_id, id);

    let request = driver.0.published.lock()[0].clone();
    assert_eq!(request.volume_id, id);
    assert_eq!(
        request.target_path,
        published.target.to_str().expect("text")
    );
    assert_eq!(request.staging_target_path, "");
    assert!(request.readonly && request.secrets.is_empty() && request.publish_context.is_empty());
    let context: Vec<(&str, &str)> = request
        .volume_context
        .iter()
        .map(|(key, value)| (key.as_str(), value.as_str()))
        .collect();
    assert_eq!(
        context,
        [
            ("csi.storage.k8s.io/ephemeral", "true"),
            ("csi.storage.k8s.io/pod.name", "step-1"),
            ("csi.storage.k8s.io/pod.namespace", "ci"),
            ("csi.storage.k8s.io/pod.uid", pod.uid()),
            ("csi.storage.k8s.io/serviceAccount.name", "default"),
            ("type", "output"),
        ]
    );
    let capability = request.volume_capability.expect("a capability");
    assert_eq!(
        capability.access_mode.expect("a mode").mode(),
        Mode::SingleNodeMultiWriter
    );
    let Some(AccessType::Mount(mount)) = capability.access_type else {
        panic!("not a mount");
    };
    assert_eq!(
        (mount.volume_mount_group.as_str(), mount.fs_type.as_str()),
        ("2000", "")
    );
    assert!(mount.mount_flags.is_empty());
    assert_eq!(*driver.0.deadlines.lock(), ["120000m"]);

    let data = fs::read_to_string(volumes.join("out/vol_data.json")).expect("read");
    let data: BTreeMap<String, String> = serde_json::from_str(&data).expect("json");
    assert_eq!(data["specVolID"], "out");
    assert_eq!(data["volumeHandle"], id);
    assert_eq!(data["driverName"], "notebook.example");
    assert_eq!(data["nodeName"], "node-1");
    assert_eq!(data["volumeLifecycleMode"], "Ephemeral");
    assert_eq!(data["attachmentID"].len(), 4 + 64);
    let mode = fs::metadata(volumes.join("out")).expect("stat").mode();
    assert_eq!(mode & 0o7777 & !0o750, 0, "{mode:o}");

    assert_eq!(pod.stats("out").await.expect("stats").usage[0].used, 1);
    pod.unpublish("out").await.expect("unpublishes");
    let request = driver.0.unpublished.lock()[0].clone();
    assert_eq!(request.volume_id, id);
    assert_eq!(
        request.target_path,
        published.target.to_str().expect("text")
    );
    assert!(!volumes.join("out").exists());
    pod.remove().expect("nothing is left");
    assert!(!pod.dir().exists());
}

#[tokio::test]
async fn a_driver_without_capabilities_is_asked_less() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let socket = dir.path().join("csi.sock");
    let driver = serve(&socket, false);
    let kubelet = Kubelet::connect(&socket, dir.path())
        .await
        .expect("connects");
    let options = PublishOptions {
        fs_group: Some(2000),
        ..Default::default()
    };
    kubelet
        .pod("ci", "x")
        .publish("v", NO_ATTRIBUTES, options)
        .await
        .expect("publishes");
    let capability = driver.0.published.lock()[0]
        .volume_capability
        .clone()
        .expect("there");
    assert_eq!(
        capability.access_mode.expect("a mode").mode(),
        Mode::SingleNodeWriter
    );
    let Some(AccessType::Mount(mount)) = capability.access_type else {
        panic!("not a mount");
    };
    assert_eq!(mount.volume_mount_group, "");
}

#[tokio::test]
async fn only_a_final_error_lets_kubelet_clean_up() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let socket = dir.path().join("csi.sock");
    let driver = serve(&socket, true);
    let kubelet = Kubelet::connect(&socket, dir.path())
        .await
        .expect("connects");
    for (code, stays) in [
        (Code::InvalidArgument, false),
        (Code::Aborted, true),
        (Code::ResourceExhausted, true),
        (Code::NotFound, false),
    ] {
        *driver.0.refuse.lock() = Some(code);
        let pod = kubelet.pod("ci", "x");
        let status = pod
            .publish("v", NO_ATTRIBUTES, PublishOptions::default())
            .await
            .expect_err("it is refused");
        assert_eq!(status.code(), code);
        assert_eq!(pod.target("v").exists(), stays, "{code:?}");
        assert_eq!(
            pod.target("v").with_file_name("vol_data.json").exists(),
            stays,
            "{code:?}"
        );
    }
    *driver.0.refuse.lock() = None;
    let pod = kubelet.pod("ci", "x");
    let options = PublishOptions::default();
    pod.publish("v", NO_ATTRIBUTES, options)
        .await
        .expect("publishes");
    *driver.0.refuse.lock() = Some(Code::InvalidArgument);
    pod.republish("v", NO_ATTRIBUTES, options)
        .await
        .expect_err("it is refused");
    assert!(pod.target("v").exists(), "a pod that runs keeps its volume");
}

#[tokio::test]
async fn every_pod_has_a_uid_of_its_own() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let socket = dir.path().join("csi.sock");
    let _driver = serve(&socket, true);
    let kubelet = Kubelet::connect(&socket, dir.path())
        .await
        .expect("connects");
    let (a, b) = (kubelet.pod("ci", "x"), kubelet.pod("ci", "x"));
    assert_ne!(a.volume_id("v"), b.volume_id("v"));
    let dashes: Vec<usize> = a.uid().match_indices('-').map(|(index, _)| index).collect();
    assert_eq!((a.uid().len(), dashes), (36, vec![8, 13, 18, 23]));
}

#[tokio::test]
async fn a_driver_that_is_late_is_waited_for() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let socket = dir.path().join("csi.sock");
    let patience = Duration::from_millis(50);
    let error = Kubelet::connect_when_ready(&socket, dir.path(), patience)
        .await
        .expect_err("no driver is there");
    assert!(matches!(error, ConnectError::Socket { .. }), "{error}");

    let driver = serve(&socket, true);
    *driver.0.not_ready.lock() = 3;
    Kubelet::connect_when_ready(&socket, dir.path(), Duration::from_secs(10))
        .await
        .expect("it gets ready");
    assert_eq!(*driver.0.not_ready.lock(), 0);

    *driver.0.not_ready.lock() = u32::MAX;
    let error = Kubelet::connect_when_ready(&socket, dir.path(), patience)
        .await
        .expect_err("it is never ready");
    assert!(matches!(error, ConnectError::NotReady { .. }), "{error}");
}
