//! A test double of kubelet: pods without containers, and exactly kubelet's calls for their inline
//! volumes.
//!
//! The tests, the bench and `demo` share it. It is only a client: it knows the protocol and
//! kubelet's habits, and none of the driver's types. So a mistake in the driver cannot hide in
//! shared code. It prints nothing.
//!
//! # Same as kubelet
//!
//! The directories and their modes, `vol_data.json`, the volume's id, the keys that overwrite the
//! user's, the access mode, the deadline, and the cleanup after an answer (`csi_mounter.go`,
//! `csi_client.go`, `csi_util.go` in Kubernetes 1.37.1).
//!
//! # Different from kubelet
//!
//! Kubelet opens a connection and asks for the capabilities in every operation. The double does
//! both once, so that a bench measures the driver. Kubelet retries with back-off; here the caller
//! retries.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use hyper_util::rt::TokioIo;
use rustix::fs::{AtFlags, CWD, StatxAttributes, StatxFlags};
use sha2::{Digest, Sha256};
use thiserror::Error;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Request, Status};

use crate::model::hex;
use crate::proto::csi::v1 as csi;
use crate::sys;
use csi::controller_client::ControllerClient;
use csi::identity_client::IdentityClient;
use csi::node_client::NodeClient;
use csi::node_service_capability::{Type, rpc};
use csi::volume_capability::{AccessMode, AccessType, MountVolume, access_mode};

/// Kubelet's deadline for a call.
pub const DEADLINE: Duration = Duration::from_secs(120);

/// For a volume that needs no attributes.
pub const NO_ATTRIBUTES: [(&str, &str); 0] = [];

/// Why the double cannot connect.
#[derive(Debug, Error)]
pub enum ConnectError {
    /// No process answers at the socket.
    #[error("cannot connect to {socket}")]
    Socket {
        /// The socket.
        socket: PathBuf,
        /// The cause.
        source: tonic::transport::Error,
    },
    /// The driver does not return its name or its capabilities.
    #[error("{method} at {socket} failed: {status}")]
    Rpc {
        /// The socket.
        socket: PathBuf,
        /// The method.
        method: &'static str,
        /// The driver's answer.
        status: Box<Status>,
    },
    /// The driver answers, but was not ready in time.
    #[error("the driver at {socket} was not ready within {waited:?}")]
    NotReady {
        /// The socket.
        socket: PathBuf,
        /// The timeout.
        waited: Duration,
    },
}

/// A node's kubelet, connected to one driver.
#[derive(Debug, Clone)]
pub struct Kubelet {
    channel: Channel,
    root: PathBuf,
    driver: String,
    node: String,
    mount_group: bool,
    multi_writer: bool,
}

/// A pod of this kubelet. It exists as long as its directories do.
#[derive(Debug, Clone)]
pub struct Pod {
    kubelet: Kubelet,
    namespace: String,
    name: String,
    uid: String,
    service_account: String,
}

/// The fields of a pod's spec beside the attributes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PublishOptions {
    /// `volumes[].csi.readOnly`.
    pub read_only: bool,
    /// `securityContext.fsGroup`.
    pub fs_group: Option<u32>,
}

/// A published volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Published {
    /// Its mount point.
    pub target: PathBuf,
    /// Its id.
    pub volume_id: String,
    /// The duration of the call.
    pub took: Duration,
}

impl Kubelet {
    /// Connects to the driver at `socket`. Pods live in `root`, kubelet's root directory
    /// (`/var/lib/kubelet`).
    pub async fn connect(
        socket: impl AsRef<Path>,
        root: impl Into<PathBuf>,
    ) -> Result<Self, ConnectError> {
        let socket = socket.as_ref();
        let channel = channel(socket).await?;
        let rpc = |method| {
            move |status| ConnectError::Rpc {
                socket: socket.to_owned(),
                method,
                status: Box::new(status),
            }
        };
        let driver = IdentityClient::new(channel.clone())
            .get_plugin_info(request(csi::GetPluginInfoRequest {}))
            .await
            .map_err(rpc("GetPluginInfo"))?
            .into_inner()
            .name;
        let mut client = NodeClient::new(channel.clone());
        let node = client
            .node_get_info(request(csi::NodeGetInfoRequest {}))
            .await
            .map_err(rpc("NodeGetInfo"))?
            .into_inner()
            .node_id;
        let capabilities = client
            .node_get_capabilities(request(csi::NodeGetCapabilitiesRequest {}))
            .await
            .map_err(rpc("NodeGetCapabilities"))?
            .into_inner()
            .capabilities;
        let can = |wanted: rpc::Type| {
            capabilities.iter().any(|capability| {
                matches!(&capability.r#type, Some(Type::Rpc(rpc)) if rpc.r#type() == wanted)
            })
        };
        Ok(Self {
            channel,
            root: root.into(),
            driver,
            node,
            mount_group: can(rpc::Type::VolumeMountGroup),
            multi_writer: can(rpc::Type::SingleNodeMultiWriter),
        })
    }

    /// Connects as soon as the driver is ready. Probes it every few milliseconds until `patience`
    /// is over.
    pub async fn connect_when_ready(
        socket: impl AsRef<Path>,
        root: impl Into<PathBuf>,
        patience: Duration,
    ) -> Result<Self, ConnectError> {
        let socket = socket.as_ref();
        let root = root.into();
        let began = Instant::now();
        loop {
            let last = match probe(socket).await {
                Ok(true) => match Self::connect(socket, root.clone()).await {
                    Ok(kubelet) => return Ok(kubelet),
                    Err(error) => error,
                },
                Ok(false) => ConnectError::NotReady {
                    socket: socket.to_owned(),
                    waited: patience,
                },
                Err(error) => error,
            };
            if began.elapsed() >= patience {
                return Err(last);
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// A new pod with a unique uid.
    ///
    /// # Panics
    /// If the kernel has no random bytes, which a booted Linux always has.
    #[must_use]
    pub fn pod(&self, namespace: &str, name: &str) -> Pod {
        let mut bytes: [u8; 16] = sys::random_bytes();
        bytes[6] = bytes[6] & 0x0f | 0x40;
        bytes[8] = bytes[8] & 0x3f | 0x80;
        let mut uid = hex(&bytes);
        for at in [20, 16, 12, 8] {
            uid.insert(at, '-');
        }
        self.pod_with_uid(namespace, name, uid)
    }

    /// An existing pod, as kubelet sees it after a restart of itself or of the machine.
    #[must_use]
    pub fn pod_with_uid(&self, namespace: &str, name: &str, uid: impl Into<String>) -> Pod {
        Pod {
            kubelet: self.clone(),
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            uid: uid.into(),
            service_account: "default".to_owned(),
        }
    }

    /// The Node service, for requests that kubelet would never make.
    #[must_use]
    pub fn node_client(&self) -> NodeClient<Channel> {
        NodeClient::new(self.channel.clone())
    }

    /// The Controller service, which kubelet never calls.
    #[must_use]
    pub fn controller_client(&self) -> ControllerClient<Channel> {
        ControllerClient::new(self.channel.clone())
    }

    /// The Identity service.
    #[must_use]
    pub fn identity_client(&self) -> IdentityClient<Channel> {
        IdentityClient::new(self.channel.clone())
    }

    /// Kubelet's root directory.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The driver's name, from GetPluginInfo.
    #[must_use]
    pub fn driver(&self) -> &str {
        &self.driver
    }

    /// The node's id, from NodeGetInfo.
    #[must_use]
    pub fn node(&self) -> &str {
        &self.node
    }
}

impl Pod {
    /// The pod's namespace.
    #[must_use]
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// The pod's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The pod's uid.
    #[must_use]
    pub fn uid(&self) -> &str {
        &self.uid
    }

    /// The pod's directory.
    #[must_use]
    pub fn dir(&self) -> PathBuf {
        self.kubelet.root.join("pods").join(&self.uid)
    }

    /// The target path of a volume.
    #[must_use]
    pub fn target(&self, volume: &str) -> PathBuf {
        self.volume_dir(volume).join("mount")
    }

    /// The id of a volume of this pod.
    #[must_use]
    pub fn volume_id(&self, volume: &str) -> String {
        format!("csi-{}", sha256(&[&self.uid, volume]))
    }

    /// The request that [`Pod::publish`] sends. A test can change it and send it through
    /// [`Kubelet::node_client`].
    pub fn publish_request(
        &self,
        volume: &str,
        attributes: impl IntoIterator<Item = (impl Into<String>, impl Into<String>)>,
        options: PublishOptions,
    ) -> csi::NodePublishVolumeRequest {
        let mut volume_context: BTreeMap<String, String> = attributes
            .into_iter()
            .map(|(key, value)| (key.into(), value.into()))
            .collect();
        for (key, value) in [
            ("pod.name", self.name.as_str()),
            ("pod.namespace", &self.namespace),
            ("pod.uid", &self.uid),
            ("serviceAccount.name", &self.service_account),
            ("ephemeral", "true"),
        ] {
            volume_context.insert(format!("csi.storage.k8s.io/{key}"), value.to_owned());
        }
        let mode = if self.kubelet.multi_writer {
            access_mode::Mode::SingleNodeMultiWriter
        } else {
            access_mode::Mode::SingleNodeWriter
        };
        let group = options.fs_group.filter(|_| self.kubelet.mount_group);
        csi::NodePublishVolumeRequest {
            volume_id: self.volume_id(volume),
            target_path: text(self.target(volume)),
            volume_capability: Some(csi::VolumeCapability {
                access_mode: Some(AccessMode { mode: mode.into() }),
                access_type: Some(AccessType::Mount(MountVolume {
                    volume_mount_group: group.map(|gid| gid.to_string()).unwrap_or_default(),
                    ..MountVolume::default()
                })),
            }),
            readonly: options.read_only,
            volume_context,
            ..csi::NodePublishVolumeRequest::default()
        }
    }

    /// Makes the volume's directory and `vol_data.json`, which must exist before the call.
    pub fn prepare(&self, volume: &str) -> io::Result<()> {
        let dir = self.volume_dir(volume);
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o750)
            .create(&dir)?;
        let volume_id = self.volume_id(volume);
        let (driver, node) = (&self.kubelet.driver, &self.kubelet.node);
        let attachment = format!("csi-{}", sha256(&[&volume_id, driver, node]));
        let data = serde_json::json!({
            "attachmentID": attachment,
            "driverName": driver,
            "nodeName": node,
            "specVolID": volume,
            "volumeHandle": volume_id,
            "volumeLifecycleMode": "Ephemeral",
        });
        fs::write(dir.join("vol_data.json"), format!("{data}\n"))
    }

    /// Publishes a volume of the pod. After a final error, removes the files of [`Pod::prepare`].
    ///
    /// A failure on this side of the socket is `UNKNOWN`, which the driver never returns.
    pub async fn publish(
        &self,
        volume: &str,
        attributes: impl IntoIterator<Item = (impl Into<String>, impl Into<String>)>,
        options: PublishOptions,
    ) -> Result<Published, Status> {
        let answer = self.republish(volume, attributes, options).await;
        if let Err(status) = &answer
            && is_final(status.code())
            && !is_broken(status)
        {
            // Kubelet only logs a failure of this cleanup.
            let _ = self.clean(volume);
        }
        answer
    }

    /// Publishes as kubelet does after its restart: the volume may be published already, and after
    /// an error all files stay.
    pub async fn republish(
        &self,
        volume: &str,
        attributes: impl IntoIterator<Item = (impl Into<String>, impl Into<String>)>,
        options: PublishOptions,
    ) -> Result<Published, Status> {
        let message = self.publish_request(volume, attributes, options);
        self.prepare(volume)
            .map_err(|error| here("prepare", &self.volume_dir(volume), &error))?;
        let mut client = self.kubelet.node_client();
        let volume_id = message.volume_id.clone();
        let began = Instant::now();
        client.node_publish_volume(request(message)).await?;
        Ok(Published {
            took: began.elapsed(),
            target: self.target(volume),
            volume_id,
        })
    }

    /// The request that [`Pod::unpublish`] sends.
    #[must_use]
    pub fn unpublish_request(&self, volume: &str) -> csi::NodeUnpublishVolumeRequest {
        csi::NodeUnpublishVolumeRequest {
            volume_id: self.volume_id(volume),
            target_path: text(self.target(volume)),
        }
    }

    /// Unpublishes a volume and removes the files of [`Pod::prepare`]; returns the duration of the
    /// call.
    pub async fn unpublish(&self, volume: &str) -> Result<Duration, Status> {
        let message = self.unpublish_request(volume);
        let mut client = self.kubelet.node_client();
        let began = Instant::now();
        client.node_unpublish_volume(request(message)).await?;
        let took = began.elapsed();
        self.clean(volume)
            .map_err(|error| here("clean up", &self.volume_dir(volume), &error))?;
        Ok(took)
    }

    /// Calls NodeGetVolumeStats.
    pub async fn stats(&self, volume: &str) -> Result<csi::NodeGetVolumeStatsResponse, Status> {
        let message = csi::NodeGetVolumeStatsRequest {
            volume_id: self.volume_id(volume),
            volume_path: text(self.target(volume)),
            staging_target_path: String::new(),
        };
        let answer = self
            .kubelet
            .node_client()
            .node_get_volume_stats(request(message))
            .await?;
        Ok(answer.into_inner())
    }

    /// Removes the pod's directories after all its volumes are unpublished. A directory that is not
    /// empty is an error.
    pub fn remove(&self) -> io::Result<()> {
        let dir = self.dir();
        for part in ["volumes/kubernetes.io~csi", "volumes", ""] {
            remove_dir(&dir.join(part))?;
        }
        Ok(())
    }

    fn volume_dir(&self, volume: &str) -> PathBuf {
        self.dir().join("volumes/kubernetes.io~csi").join(volume)
    }

    /// Kubelet's cleanup after an unpublish. Removes nothing while the target is a mount, and never
    /// more than empty directories and kubelet's own file.
    pub fn clean(&self, volume: &str) -> io::Result<()> {
        let target = self.target(volume);
        if is_mount(&target)? {
            return Ok(());
        }
        remove_dir(&target)?;
        let dir = self.volume_dir(volume);
        match fs::remove_file(dir.join("vol_data.json")) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        remove_dir(&dir)
    }
}

/// Whether kubelet assumes after this error that the driver does nothing more. Otherwise it will
/// unpublish. RESOURCE_EXHAUSTED is kubelet's addition to the codes in CSI.
#[must_use]
pub fn is_final(code: Code) -> bool {
    !matches!(
        code,
        Code::Cancelled
            | Code::DeadlineExceeded
            | Code::Unavailable
            | Code::ResourceExhausted
            | Code::Aborted
    )
}

/// Whether the connection broke, which kubelet treats as UNAVAILABLE: the driver was killed, and
/// may have done the work.
fn is_broken(status: &Status) -> bool {
    std::error::Error::source(status).is_some()
}

/// A channel that reconnects by itself after a restart of the driver.
async fn channel(socket: &Path) -> Result<Channel, ConnectError> {
    let path = socket.to_owned();
    let connector = tower::service_fn(move |_: Uri| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    // The address is never resolved; it becomes the `:authority` of the requests.
    Endpoint::from_static("http://localhost")
        .connect_with_connector(connector)
        .await
        .map_err(|source| ConnectError::Socket {
            socket: socket.to_owned(),
            source,
        })
}

async fn probe(socket: &Path) -> Result<bool, ConnectError> {
    let answer = IdentityClient::new(channel(socket).await?)
        .probe(request(csi::ProbeRequest {}))
        .await
        .map_err(|status| ConnectError::Rpc {
            socket: socket.to_owned(),
            method: "Probe",
            status: Box::new(status),
        })?;
    Ok(answer.into_inner().ready.unwrap_or(true))
}

fn request<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(DEADLINE);
    request
}

fn here(action: &str, path: &Path, error: &io::Error) -> Status {
    Status::unknown(format!(
        "kubelet cannot {action} {}: {error}",
        path.display()
    ))
}

/// The protocol has paths as strings. The caller chose kubelet's root; the rest is text.
fn text(path: PathBuf) -> String {
    path.into_os_string()
        .into_string()
        .unwrap_or_else(|path| path.display().to_string())
}

fn is_mount(path: &Path) -> io::Result<bool> {
    match rustix::fs::statx(CWD, path, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::empty()) {
        Ok(seen) => Ok(seen.stx_attributes.contains(StatxAttributes::MOUNT_ROOT)),
        Err(rustix::io::Errno::NOENT) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

fn remove_dir(path: &Path) -> io::Result<()> {
    match fs::remove_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

fn sha256(parts: &[&str]) -> String {
    let mut hasher = Sha256::new();
    for part in parts {
        hasher.update(part);
    }
    hex(&hasher.finalize())
}
