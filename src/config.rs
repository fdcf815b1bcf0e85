//! Every flag of the command line, its name in the environment, its meaning and its default. Other
//! modules implement the flags.

mod common;
mod controller;
mod demo;
mod error;
mod peers;
mod shared;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::builder::BoolishValueParser;
use clap::{Args, ValueEnum};
use tokio::sync::watch;

use crate::backend::{BackendKind, MountApi};
use crate::csi;
use crate::model::{NodeId, NodeIdError};
use crate::telemetry::metrics::Rpcs;
use crate::{driver, engine, k8s, node};

pub(crate) use common::parse_duration;
pub use common::{ApiServer, Http, Log, Process};
use common::{hide_env_value, parse_bytes};
pub use controller::Controller;
pub use demo::{Demo, DemoFilesystem};
pub use error::Error;
pub use peers::{NodePeers, PeerBandwidth, PeerKey, Peers};
use shared::check_sources;
pub use shared::{Share, Shared};

/// The default of `--pool`.
const DEFAULT_POOL: &str = "/var/lib/baggageclaim";

/// The flag that names a pool.
#[derive(Debug, Clone, Args)]
#[command(mut_args(hide_env_value))]
pub struct Pool {
    /// The pool: the directory that holds all content of this node
    #[arg(long, value_name = "DIR", env = "BAGGAGECLAIM_POOL", default_value = DEFAULT_POOL)]
    pub pool: PathBuf,
}

/// How copy-on-write is done.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Backend {
    /// The best that works on the pool.
    Auto,
    /// overlayfs over plain directories.
    Overlay,
    /// btrfs subvolumes and snapshots.
    Btrfs,
    /// Copies: reflinks where the filesystem has them.
    Copy,
}

impl From<Backend> for Option<BackendKind> {
    fn from(backend: Backend) -> Self {
        match backend {
            Backend::Auto => None,
            Backend::Overlay => Some(BackendKind::Overlay),
            Backend::Btrfs => Some(BackendKind::Btrfs),
            Backend::Copy => Some(BackendKind::Copy),
        }
    }
}

/// Which system calls mount an overlay.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Api {
    /// The newest that works here.
    Auto,
    /// `fsopen` with descriptors (Linux 6.13).
    Descriptors,
    /// `mount` or `fsopen` with strings, for older kernels.
    Classic,
}

impl From<Api> for Option<MountApi> {
    fn from(api: Api) -> Self {
        match api {
            Api::Auto => None,
            Api::Descriptors => Some(MountApi::Descriptors),
            Api::Classic => Some(MountApi::Classic),
        }
    }
}

/// Whether a feature is on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    /// On.
    On,
    /// Off.
    Off,
}

/// The format of a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// A table for people.
    Table,
    /// The table with all columns.
    Wide,
    /// JSON for programs; its form is stable (docs/cli.md).
    Json,
    /// The same as YAML.
    Yaml,
    /// Only names, one per line, as `inspect` takes them.
    Name,
}

/// The format of one answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PlainOutput {
    /// Text for people.
    Text,
    /// JSON for programs; its form is stable (docs/cli.md).
    Json,
    /// The same as YAML.
    Yaml,
}

impl PlainOutput {
    /// The format for programs; `None` for text.
    #[must_use]
    pub fn data(self) -> Option<Data> {
        match self {
            Self::Text => None,
            Self::Json => Some(Data::Json),
            Self::Yaml => Some(Data::Yaml),
        }
    }
}

/// A format for programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Data {
    /// JSON; its form is stable (docs/cli.md).
    Json,
    /// The same as YAML.
    Yaml,
}

/// The flags of `standalone`.
#[derive(Debug, Clone, Args)]
#[command(mut_args(hide_env_value))]
pub struct Standalone {
    /// The pool.
    #[command(flatten)]
    pub pool: Pool,
    /// The unix socket of the CSI services. The driver makes it, with mode 0600. The path has at
    /// most 107 bytes
    #[arg(
        long,
        value_name = "PATH",
        env = "BAGGAGECLAIM_SOCKET",
        default_value = "/run/baggageclaim/csi.sock"
    )]
    pub socket: PathBuf,
    /// Serve the Controller services on the same socket: PersistentVolumeClaims, their clones and
    /// snapshots
    #[arg(
        long,
        value_name = "SWITCH",
        env = "BAGGAGECLAIM_CONTROLLER",
        default_value = "on"
    )]
    pub controller: Switch,
    /// Serve ControllerPublishVolume, for a CSIDriver object with `attachRequired: true`
    #[arg(long, env = "BAGGAGECLAIM_ATTACH", value_parser = BoolishValueParser::new())]
    pub attach: bool,
    /// The flags of every role.
    #[command(flatten)]
    pub driver: Driver,
    /// Other nodes.
    #[command(flatten)]
    pub peers: Peers,
}

/// The default of `--kubelet-dir`.
const DEFAULT_KUBELET: &str = "/var/lib/kubelet";

/// The flags of `node`.
#[derive(Debug, Clone, Args)]
#[command(mut_args(hide_env_value))]
pub struct Node {
    /// The pool.
    #[command(flatten)]
    pub pool: Pool,
    /// The root directory of this node's kubelet, at the path by which kubelet knows it
    #[arg(long, value_name = "DIR", env = "BAGGAGECLAIM_KUBELET_DIR",
        default_value = DEFAULT_KUBELET)]
    pub kubelet_dir: PathBuf,
    /// The unix socket of the CSI services, at the path by which kubelet reaches it. The driver
    /// makes it, with mode 0600. The path has at most 107 bytes [default:
    ///   plugins/baggageclaim.csi.concourse-ci.org/csi.sock in kubelet's directory]
    #[arg(long, value_name = "PATH", env = "BAGGAGECLAIM_SOCKET")]
    pub socket: Option<PathBuf>,
    /// ADDRESS:PORT that serves /healthz, /readyz and /metrics; [::] is every address, also of
    /// IPv4. With `off`, remove the probes from the pod too, or kubelet restarts it again and again
    #[arg(
        long,
        value_name = "ADDR",
        env = "BAGGAGECLAIM_HTTP",
        default_value = "[::]:9808"
    )]
    pub http: Http,
    /// Watch the pods of this node in the API server, to learn their outcomes, and report events on
    /// them
    #[arg(
        long,
        value_name = "SWITCH",
        env = "BAGGAGECLAIM_KUBERNETES",
        default_value = "on"
    )]
    pub kubernetes: Switch,
    /// The API server.
    #[command(flatten)]
    pub api_server: ApiServer,
    /// Make and delete persistent volumes by order of `baggageclaim controller`, and publish this
    /// node's Pool. Needs `--kubernetes on` and the definitions in deploy/crds
    #[arg(
        long,
        value_name = "SWITCH",
        env = "BAGGAGECLAIM_CLUSTER",
        default_value = "off"
    )]
    pub cluster: Switch,
    /// The flags of every role.
    #[command(flatten)]
    pub driver: Driver,
    /// The other nodes.
    #[command(flatten)]
    pub peers: NodePeers,
}

/// The flags of every role of the driver.
#[derive(Debug, Clone, Args)]
pub struct Driver {
    /// The name of this node [default: its host name]
    #[arg(long, value_name = "NAME", env = "BAGGAGECLAIM_NODE_ID", value_parser = parse_node)]
    pub node_id: Option<NodeId>,
    /// How copy-on-write is done. A pool keeps the backend it was made with
    #[arg(
        long,
        value_name = "KIND",
        env = "BAGGAGECLAIM_BACKEND",
        default_value = "auto"
    )]
    pub backend: Backend,
    /// Which system calls mount an overlay, to test the other ones on this machine
    #[arg(
        long,
        value_name = "API",
        env = "BAGGAGECLAIM_MOUNT_API",
        default_value = "auto"
    )]
    pub mount_api: Api,
    /// Let the driver switch on simple quotas, which size limits on btrfs need, if the filesystem
    /// has no quotas. They apply to the whole filesystem. Linux before 6.7 cannot mount it any
    /// more, even after they are switched off
    #[arg(long, env = "BAGGAGECLAIM_BTRFS_QUOTA", value_parser = BoolishValueParser::new())]
    pub btrfs_quota: bool,
    /// How many threads make the system calls of RPCs. More than a few only wait for each other in
    /// the kernel
    #[arg(long, value_name = "NUMBER", env = "BAGGAGECLAIM_THREADS", default_value = "4",
        value_parser = clap::value_parser!(u16).range(1..=256))]
    pub threads: u16,
    /// How long a publish waits for an input that is being made or fetched, on this node or another
    #[arg(long, value_name = "TIME", env = "BAGGAGECLAIM_INPUT_WAIT", default_value = "90s",
        value_parser = parse_duration)]
    pub input_wait: Duration,
    /// How long a finished volume waits for the outcome of its pod before it is discarded
    #[arg(long, value_name = "TIME", env = "BAGGAGECLAIM_OUTCOME_WAIT", default_value = "1h",
        value_parser = parse_duration)]
    pub outcome_wait: Duration,
    /// Evict unused content, least recently used first, when more than this percentage of the pool
    /// is in use
    #[arg(long, value_name = "PERCENT", env = "BAGGAGECLAIM_HIGH_WATERMARK", default_value = "85",
        value_parser = clap::value_parser!(u8).range(1..=100))]
    pub high_watermark: u8,
    /// Evict until at most this percentage of the pool is in use
    #[arg(long, value_name = "PERCENT", env = "BAGGAGECLAIM_LOW_WATERMARK", default_value = "70",
        value_parser = clap::value_parser!(u8).range(0..=99))]
    pub low_watermark: u8,
    /// How often the garbage collector runs; more than 0
    #[arg(long, value_name = "TIME", env = "BAGGAGECLAIM_REAP_INTERVAL", default_value = "1m",
        value_parser = parse_interval)]
    pub reap_interval: Duration,
    /// Space in reserve for deletions on a full disk, a quantity such as 64Mi; 0 for none
    #[arg(long, value_name = "BYTES", env = "BAGGAGECLAIM_RESERVE", default_value = "64Mi",
        value_parser = parse_bytes)]
    pub reserve: u64,
    /// Serve the alpha features of CSI 1.13: health of volumes and storage; with a Controller
    /// (`standalone`) also GetSnapshot, ControllerGetVolume and snapshots with a topology
    #[arg(long, env = "BAGGAGECLAIM_ALPHA", value_parser = BoolishValueParser::new())]
    pub alpha: bool,
    /// How many persistent volumes this node may have attached [default: no limit]
    #[arg(long, value_name = "NUMBER", env = "BAGGAGECLAIM_MAX_VOLUMES",
        value_parser = clap::value_parser!(u32).range(1..))]
    pub max_volumes: Option<u32>,
    /// How long shutdown may take, to answer running calls and close the pool. The next start does
    /// what is left
    #[arg(long, value_name = "TIME", env = "BAGGAGECLAIM_GRACE", default_value = "25s",
        value_parser = parse_duration)]
    pub grace: Duration,
    /// The shared tier.
    #[command(flatten)]
    pub shared: Shared,
    /// The flags of every process that serves.
    #[command(flatten)]
    pub process: Process,
}

/// In debug builds, `BAGGAGECLAIM_CRASH_AT=point[:visit]` names the point where the process dies
/// (`engine::failpoint`). `false` if there is no such point.
#[cfg(debug_assertions)]
fn crash_where_told() -> bool {
    let Some(told) = std::env::var_os("BAGGAGECLAIM_CRASH_AT") else {
        return true;
    };
    let told = told.to_str().unwrap_or_default();
    let (point, visit) = told.split_once(':').unwrap_or((told, "1"));
    visit
        .parse()
        .is_ok_and(|visit| engine::failpoint::arm(point, visit))
}

impl Standalone {
    /// The flags as what runs takes them.
    pub fn resolve(self) -> Result<driver::Config, Error> {
        let features = csi::Features {
            controller: self.controller == Switch::On,
            attach: self.attach,
            ..csi::Features::default()
        };
        let mut config = self.driver.resolve(self.pool, self.socket, features)?;
        config.peers = self.peers.resolve()?;
        let peers = (config.peers.is_some(), "--peers FILE");
        check_sources(config.sources, config.shared.is_some(), peers)?;
        Ok(config)
    }
}

impl Node {
    /// The flags as what runs takes them.
    pub fn resolve(self) -> Result<node::Config, Error> {
        let socket = self.socket.unwrap_or_else(|| {
            let plugin = self.kubelet_dir.join("plugins").join(csi::DRIVER_NAME);
            plugin.join("csi.sock")
        });
        // Claims are made for a whole cluster, not by each of its nodes.
        let features = csi::Features {
            controller: false,
            ..csi::Features::default()
        };
        if self.cluster == Switch::On && self.kubernetes == Switch::Off {
            return Err(Error::ClusterAlone);
        }
        let driver = self.driver.resolve(self.pool, socket, features)?;
        let in_cluster = self.cluster == Switch::On;
        let peers = self.peers.resolve(in_cluster)?;
        let asked = (peers.is_some(), "--peer-listen ADDR");
        check_sources(driver.sources, driver.shared.is_some(), asked)?;
        let kubernetes = (self.kubernetes == Switch::On).then(|| k8s::Config {
            node: driver.csi.node.as_str().to_owned(),
            kubeconfig: self.api_server.kubeconfig(),
            look_again: k8s::LOOK_AGAIN,
            watched: watch::Sender::new(false),
            answers: watch::Sender::new(false),
            known: Arc::default(),
        });
        Ok(node::Config {
            driver,
            kubelet_dir: self.kubelet_dir,
            http: self.http.0,
            kubernetes,
            cluster: in_cluster,
            peers,
        })
    }
}

impl Driver {
    /// The flags as what runs takes them; `features` as far as the role decides.
    fn resolve(
        self,
        pool: Pool,
        socket: PathBuf,
        features: csi::Features,
    ) -> Result<driver::Config, Error> {
        let (low, high) = (self.low_watermark, self.high_watermark);
        if low >= high {
            return Err(Error::Watermarks { low, high });
        }
        #[cfg(debug_assertions)]
        if !crash_where_told() {
            return Err(Error::CrashAt);
        }
        let node = match self.node_id {
            Some(node) => node,
            None => host_name().map_err(Error::HostName)?,
        };
        let (ask, fetch_wait) = (self.shared.ask, self.shared.fetch_wait);
        let sources = self.shared.sources;
        let defaults = engine::Config::new(pool.pool);
        let engine = engine::Config {
            backend: self.backend.into(),
            mount_api: self.mount_api.into(),
            btrfs_quota: self.btrfs_quota,
            threads: self.threads.into(),
            input_wait: self.input_wait,
            outcome_wait: self.outcome_wait,
            high_watermark: high,
            low_watermark: low,
            reap_interval: self.reap_interval,
            reserve: self.reserve,
            share: self.shared.share == Share::Auto,
            node: Some(node.clone()),
            ..defaults
        };
        Ok(driver::Config {
            socket,
            csi: csi::Config {
                node,
                rpcs: Rpcs::default(),
                features: csi::Features {
                    alpha: self.alpha,
                    most_volumes: self.max_volumes,
                    share: self.shared.share.into(),
                    ..features
                },
            },
            engine,
            shared: self.shared.resolve()?,
            peers: None,
            sources,
            ask,
            fetch_wait,
            grace: self.grace,
        })
    }
}

fn host_name() -> Result<NodeId, NodeIdError> {
    let name = rustix::system::uname();
    NodeId::new(name.nodename().to_str().map_err(|_| NodeIdError)?)
}

/// A duration that is not 0.
fn parse_interval(text: &str) -> Result<Duration, &'static str> {
    match parse_duration(text)? {
        Duration::ZERO => Err("expected more than 0, such as 1m"),
        interval => Ok(interval),
    }
}

fn parse_node(text: &str) -> Result<NodeId, NodeIdError> {
    NodeId::new(text)
}
