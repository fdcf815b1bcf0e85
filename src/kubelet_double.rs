//! A double of kubelet: pods without containers, whose inline volumes are asked for exactly as kubelet does.
//!
//! The tests, the bench and the binary's `demo` share it. It is a client only: it knows the protocol and
//! kubelet's habits, never the driver's types, so that a mistake in the driver cannot hide in code that
//! both share. It prints nothing.
//!
//! # What is like kubelet
//!
//! The directories and their modes, `vol_data.json`, the volume's id, the keys written over the user's, the
//! access mode, the deadline, and what is removed after an answer (`csi_mounter.go`, `csi_client.go`,
//! `csi_util.go` in Kubernetes 1.37.1).
//!
//! # What is not
//!
//! Kubelet opens a connection for every operation and asks for the capabilities each time; this keeps one
//! connection and asks once, so that what is measured is the driver. Kubelet retries with back-off; this
//! leaves that to the caller.

use std::collections::BTreeMap;
use std::fmt::Write as _;
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

use crate::proto::csi::v1 as csi;
use csi::controller_client::ControllerClient;
use csi::identity_client::IdentityClient;
use csi::node_client::NodeClient;
use csi::node_service_capability::{Type, rpc};
use csi::volume_capability::{AccessMode, AccessType, MountVolume, access_mode};

/// How long kubelet waits for an answer.
pub const DEADLINE: Duration = Duration::from_secs(120);

/// No attributes, for the type that needs none.
pub const NO_ATTRIBUTES: [(&str, &str); 0] = [];

/// Why there is nobody to talk to.
#[derive(Debug, Error)]
pub enum ConnectError {
    /// The socket does not answer.
    #[error("cannot connect to {socket}")]
    Socket {
        /// Where it should be.
        socket: PathBuf,
        /// What the transport says.
        source: tonic::transport::Error,
    },
    /// The driver does not say who it is, or what it can do.
    #[error("{method} at {socket} failed: {status}")]
    Rpc {
        /// Where the driver is.
        socket: PathBuf,
        /// What it was asked.
        method: &'static str,
        /// What it answered.
        status: Box<Status>,
    },
    /// It answers, but was not ready in time.
    #[error("the driver at {socket} was not ready within {waited:?}")]
    NotReady {
        /// Where the driver is.
        socket: PathBuf,
        /// How long it was given.
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

/// What a pod's spec says beside the attributes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PublishOptions {
    /// `volumes[].csi.readOnly`.
    pub read_only: bool,
    /// `securityContext.fsGroup`.
    pub fs_group: Option<u32>,
}

/// A volume that is there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Published {
    /// Where its content is.
    pub target: PathBuf,
    /// How the driver knows it.
    pub volume_id: String,
    /// How long the driver took to answer.
    pub took: Duration,
}

impl Kubelet {
    /// Connects to the driver at `socket`; pods live in `root`, which kubelet calls its root directory
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

    /// Connects as soon as the driver says that it is ready, asking every few milliseconds until `patience`
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

    /// A new pod, with a uid that no other has.
    ///
    /// # Panics
    /// When the kernel has no random bytes, which is not a state that a booted Linux can be in.
    #[must_use]
    pub fn pod(&self, namespace: &str, name: &str) -> Pod {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes).expect("a booted Linux has random bytes");
        bytes[6] = bytes[6] & 0x0f | 0x40;
        bytes[8] = bytes[8] & 0x3f | 0x80;
        let mut uid = String::with_capacity(36);
        for (index, byte) in bytes.iter().enumerate() {
            if matches!(index, 4 | 6 | 8 | 10) {
                uid.push('-');
            }
            push_hex(&mut uid, *byte);
        }
        self.pod_with_uid(namespace, name, uid)
    }

    /// A pod that was there before: after a restart of kubelet or of the machine it is the same one.
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

    /// The bare Node service, for requests that kubelet would never make.
    #[must_use]
    pub fn node_client(&self) -> NodeClient<Channel> {
        NodeClient::new(self.channel.clone())
    }

    /// The bare Controller service, which kubelet itself never asks.
    #[must_use]
    pub fn controller_client(&self) -> ControllerClient<Channel> {
        ControllerClient::new(self.channel.clone())
    }

    /// The bare Identity service.
    #[must_use]
    pub fn identity_client(&self) -> IdentityClient<Channel> {
        IdentityClient::new(self.channel.clone())
    }

    /// Kubelet's root directory.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The driver's name, as it said itself.
    #[must_use]
    pub fn driver(&self) -> &str {
        &self.driver
    }

    /// The node's id, as the driver said.
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

    /// Where the pod's files are.
    #[must_use]
    pub fn dir(&self) -> PathBuf {
        self.kubelet.root.join("pods").join(&self.uid)
    }

    /// Where a volume is mounted.
    #[must_use]
    pub fn target(&self, volume: &str) -> PathBuf {
        self.volume_dir(volume).join("mount")
    }

    /// The id under which the driver knows a volume of this pod.
    #[must_use]
    pub fn volume_id(&self, volume: &str) -> String {
        format!("csi-{}", sha256(&[&self.uid, volume]))
    }

    /// The request that [`Pod::publish`] sends, to be spoilt before it is sent through
    /// [`Kubelet::node_client`].
    pub fn publish_request<K, V>(
        &self,
        volume: &str,
        attributes: impl IntoIterator<Item = (K, V)>,
        options: PublishOptions,
    ) -> csi::NodePublishVolumeRequest
    where
        K: Into<String>,
        V: Into<String>,
    {
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

    /// Makes what has to be there before the driver is called: the volume's directory and `vol_data.json`.
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

    /// Publishes a volume of the pod. After an answer that is final, what [`Pod::prepare`] made is removed.
    ///
    /// What fails on this side of the socket is `UNKNOWN`, which the driver never answers.
    pub async fn publish<K, V>(
        &self,
        volume: &str,
        attributes: impl IntoIterator<Item = (K, V)>,
        options: PublishOptions,
    ) -> Result<Published, Status>
    where
        K: Into<String>,
        V: Into<String>,
    {
        let answer = self.republish(volume, attributes, options).await;
        if let Err(status) = &answer
            && is_final(status.code())
            && !is_broken(status)
        {
            // As kubelet does, whose own failure here goes to its log only.
            let _ = self.clean(volume);
        }
        answer
    }

    /// What kubelet does after its own restart: publishes a volume that may be published already, and leaves
    /// everything where it is when that fails.
    pub async fn republish<K, V>(
        &self,
        volume: &str,
        attributes: impl IntoIterator<Item = (K, V)>,
        options: PublishOptions,
    ) -> Result<Published, Status>
    where
        K: Into<String>,
        V: Into<String>,
    {
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

    /// Unpublishes a volume and removes what [`Pod::prepare`] made; says how long the driver took.
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

    /// Asks how full a volume is.
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

    /// Removes the pod's own directories once all its volumes are unpublished. What is not empty stays, as an
    /// error.
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

    /// Kubelet's own cleaning after an unpublish: nothing at all while the target is a mount; never more than empty directories
    /// and its own file.
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

/// Whether kubelet believes after an error that nothing runs any more on the driver's side. If not, an
/// unpublish will come. RESOURCE_EXHAUSTED is kubelet's own addition to those that CSI names.
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

/// Whether this is no answer but the end of a connection, which is UNAVAILABLE to kubelet whatever it is called here: the
/// driver was killed, and may have done what it was asked to.
fn is_broken(status: &Status) -> bool {
    std::error::Error::source(status).is_some()
}

/// A connection that is made anew by itself after the driver was restarted.
async fn channel(socket: &Path) -> Result<Channel, ConnectError> {
    let path = socket.to_owned();
    let connector = tower::service_fn(move |_: Uri| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    // The address is never looked up, and what it says is what gRPC over a unix socket says as its authority.
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

/// Paths are strings in the protocol. Kubelet's root is chosen by who runs this, its other parts are text.
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
    let mut hex = String::with_capacity(64);
    for byte in hasher.finalize() {
        push_hex(&mut hex, byte);
    }
    hex
}

fn push_hex(text: &mut String, byte: u8) {
    // Writing to a String cannot fail.
    let _ = write!(text, "{byte:02x}");
}
