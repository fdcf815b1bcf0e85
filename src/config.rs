//! Every flag, every name of the environment and every default of the command line.
//! What a flag does is done elsewhere; here is only what it is called, what it means, and what it is when not given.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use clap::builder::BoolishValueParser;
use clap::{Args, ValueEnum};
use tokio::sync::watch;

use crate::backend::{BackendKind, MountApi};
use crate::csi;
use crate::model::{NodeId, NodeIdError};
use crate::telemetry::metrics::Rpcs;
use crate::{driver, engine, k8s, node, telemetry};

/// Where a pool is when nobody says so.
const DEFAULT_POOL: &str = "/var/lib/baggageclaim";

/// Which pool.
#[derive(Debug, Clone, Args)]
pub struct Pool {
    /// The pool: the directory that holds all content of this node
    #[arg(long, value_name = "DIR", env = "BAGGAGECLAIM_POOL", hide_env_values = true, default_value = DEFAULT_POOL)]
    pub pool: PathBuf,
}

/// How the driver talks of what it does.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Log")]
pub struct Log {
    /// How lines look: text for people, json for programs
    #[arg(
        long,
        value_name = "FORMAT",
        env = "BAGGAGECLAIM_LOG_FORMAT",
        hide_env_values = true,
        default_value = "text"
    )]
    pub log_format: LogFormat,
    /// What is logged: error, warn, info, debug or trace, also for a part only: `warn,baggageclaim::engine=debug`
    #[arg(
        long,
        value_name = "FILTER",
        env = "BAGGAGECLAIM_LOG",
        hide_env_values = true,
        default_value = "info"
    )]
    pub log: String,
}

/// How log lines look.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum LogFormat {
    /// A line of text.
    Text,
    /// A line of JSON.
    Json,
}

impl From<LogFormat> for telemetry::LogFormat {
    fn from(format: LogFormat) -> Self {
        match format {
            LogFormat::Text => Self::Text,
            LogFormat::Json => Self::Json,
        }
    }
}

/// Which way of copy-on-write.
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
    /// What older kernels have.
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

/// Whether something is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    /// It is.
    On,
    /// It is not.
    Off,
}

/// How lists look.
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
    /// Names alone, one a line, as `inspect` takes them.
    Name,
}

/// How one thing looks.
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
    /// The form for programs, if it is one.
    #[must_use]
    pub fn data(self) -> Option<Data> {
        match self {
            Self::Text => None,
            Self::Json => Some(Data::Json),
            Self::Yaml => Some(Data::Yaml),
        }
    }
}

/// How something looks that is shown whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Data {
    /// JSON; its form is stable (docs/cli.md).
    Json,
    /// The same as YAML.
    Yaml,
}

/// What `standalone` is told.
#[derive(Debug, Clone, Args)]
pub struct Standalone {
    /// The pool.
    #[command(flatten)]
    pub pool: Pool,
    /// Where the CSI services are: a unix socket, made here (mode 0600), at most 107 bytes long
    #[arg(
        long,
        value_name = "PATH",
        env = "BAGGAGECLAIM_SOCKET",
        hide_env_values = true,
        default_value = "/run/baggageclaim/csi.sock"
    )]
    pub socket: PathBuf,
    /// Whether the Controller services are on the same socket: PersistentVolumeClaims, their clones and snapshots
    #[arg(
        long,
        value_name = "SWITCH",
        env = "BAGGAGECLAIM_CONTROLLER",
        hide_env_values = true,
        default_value = "on"
    )]
    pub controller: Switch,
    /// Serve ControllerPublishVolume, for a CSIDriver object that says `attachRequired: true`
    #[arg(long, env = "BAGGAGECLAIM_ATTACH", hide_env_values = true, value_parser = BoolishValueParser::new())]
    pub attach: bool,
    /// What every role is told.
    #[command(flatten)]
    pub driver: Driver,
}

/// Where kubelet is when nobody says so.
const DEFAULT_KUBELET: &str = "/var/lib/kubelet";

/// What `node` is told.
#[derive(Debug, Clone, Args)]
pub struct Node {
    /// The pool.
    #[command(flatten)]
    pub pool: Pool,
    /// The root directory of this node's kubelet, at the path by which kubelet knows it
    #[arg(long, value_name = "DIR", env = "BAGGAGECLAIM_KUBELET_DIR", hide_env_values = true, default_value = DEFAULT_KUBELET)]
    pub kubelet_dir: PathBuf,
    /// Where the CSI services are: a unix socket, made here (mode 0600), at most 107 bytes long, at the path by which
    /// kubelet reaches it [default: plugins/baggageclaim.csi.concourse-ci.org/csi.sock in kubelet's directory]
    #[arg(
        long,
        value_name = "PATH",
        env = "BAGGAGECLAIM_SOCKET",
        hide_env_values = true
    )]
    pub socket: Option<PathBuf>,
    /// Where /healthz, /readyz and /metrics are, ADDRESS:PORT; [::] is every address, of IPv4 too. `off`: nowhere; then take
    /// the pod's probes away as well, or kubelet kills it again and again
    #[arg(
        long,
        value_name = "ADDR",
        env = "BAGGAGECLAIM_HTTP",
        hide_env_values = true,
        default_value = "[::]:9808"
    )]
    pub http: Http,
    /// Whether there is an API server to ask how pods ended, and to tell them what became of their volumes
    #[arg(
        long,
        value_name = "SWITCH",
        env = "BAGGAGECLAIM_KUBERNETES",
        hide_env_values = true,
        default_value = "on"
    )]
    pub kubernetes: Switch,
    /// How to reach the API server [default: as this pod's service account]
    #[arg(long, value_name = "PATH", env = "KUBECONFIG", hide_env_values = true)]
    pub kubeconfig: Option<PathBuf>,
    /// What every role is told.
    #[command(flatten)]
    pub driver: Driver,
}

/// An address to serve HTTP at, or none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Http(Option<SocketAddr>);

impl FromStr for Http {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "off" {
            return Ok(Self(None));
        }
        let address = text.parse().map(|address| Self(Some(address)));
        address.map_err(
            |_| "expected an address such as [::]:9808, 0.0.0.0:9808 or 127.0.0.1:9808, or `off`",
        )
    }
}

/// What every role of the driver is told.
#[derive(Debug, Clone, Args)]
pub struct Driver {
    /// The name of this node [default: its host name]
    #[arg(long, value_name = "NAME", env = "BAGGAGECLAIM_NODE_ID", hide_env_values = true, value_parser = parse_node)]
    pub node_id: Option<NodeId>,
    /// How copy-on-write is done; a pool keeps the backend it was made with
    #[arg(
        long,
        value_name = "KIND",
        env = "BAGGAGECLAIM_BACKEND",
        hide_env_values = true,
        default_value = "auto"
    )]
    pub backend: Backend,
    /// Which system calls mount an overlay; for trying the other path on this machine
    #[arg(
        long,
        value_name = "API",
        env = "BAGGAGECLAIM_MOUNT_API",
        hide_env_values = true,
        default_value = "auto"
    )]
    pub mount_api: Api,
    /// Size limits on btrfs need simple quotas: let the driver switch them on where no quotas are. They are the whole
    /// filesystem's, not the pool's, and Linux before 6.7 will not mount it any more, also when they are off again
    #[arg(long, env = "BAGGAGECLAIM_BTRFS_QUOTA", hide_env_values = true, value_parser = BoolishValueParser::new())]
    pub btrfs_quota: bool,
    /// How many threads do what is not done where a call was received: what takes long, and what came together with
    /// others. More than a few only wait for each other in the kernel
    #[arg(long, value_name = "NUMBER", env = "BAGGAGECLAIM_THREADS", hide_env_values = true, default_value = "4", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub threads: u16,
    /// How long a publish waits for an input whose maker is about to finish
    #[arg(long, value_name = "TIME", env = "BAGGAGECLAIM_INPUT_WAIT", hide_env_values = true, default_value = "90s", value_parser = parse_duration)]
    pub input_wait: Duration,
    /// How long a finished volume waits for its pod's outcome before it is thrown away
    #[arg(long, value_name = "TIME", env = "BAGGAGECLAIM_OUTCOME_WAIT", hide_env_values = true, default_value = "1h", value_parser = parse_duration)]
    pub outcome_wait: Duration,
    /// Percent of the pool in use above which unused content is evicted, least recently used first …
    #[arg(long, value_name = "PERCENT", env = "BAGGAGECLAIM_HIGH_WATERMARK", hide_env_values = true, default_value = "85", value_parser = clap::value_parser!(u8).range(1..=100))]
    pub high_watermark: u8,
    /// … down to this
    #[arg(long, value_name = "PERCENT", env = "BAGGAGECLAIM_LOW_WATERMARK", hide_env_values = true, default_value = "70", value_parser = clap::value_parser!(u8).range(0..=99))]
    pub low_watermark: u8,
    /// How often garbage is looked for
    #[arg(long, value_name = "TIME", env = "BAGGAGECLAIM_REAP_INTERVAL", hide_env_values = true, default_value = "1m", value_parser = parse_duration)]
    pub reap_interval: Duration,
    /// Room held back for the day the disk is full, a quantity like 64Mi; 0: none
    #[arg(long, value_name = "BYTES", env = "BAGGAGECLAIM_RESERVE", hide_env_values = true, default_value = "64Mi", value_parser = parse_bytes)]
    pub reserve: u64,
    /// Serve what is alpha in CSI 1.13: health of volumes and storage; where there is a Controller (`standalone`) also
    /// GetSnapshot, ControllerGetVolume and snapshots with a topology
    #[arg(long, env = "BAGGAGECLAIM_ALPHA", hide_env_values = true, value_parser = BoolishValueParser::new())]
    pub alpha: bool,
    /// How many claims this node may have attached [default: as many as the orchestrator likes]
    #[arg(long, value_name = "NUMBER", env = "BAGGAGECLAIM_MAX_VOLUMES", hide_env_values = true, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_volumes: Option<u32>,
    /// How long the end may take: running calls are answered and the pool is put away; what is not done then, the next start does
    #[arg(long, value_name = "TIME", env = "BAGGAGECLAIM_GRACE", hide_env_values = true, default_value = "25s", value_parser = parse_duration)]
    pub grace: Duration,
    /// End when the process that started this one does, whatever ends it: for tests and the demo.
    #[arg(long, hide = true, env = "BAGGAGECLAIM_END_WITH_PARENT", value_parser = BoolishValueParser::new())]
    pub end_with_parent: bool,
    /// The log.
    #[command(flatten)]
    pub log: Log,
}

/// What `demo` is told.
#[derive(Debug, Clone, Args)]
pub struct Demo {
    /// Where to make the pool [default: on a filesystem of its own, an image in the temporary directory]
    #[arg(long, value_name = "DIR")]
    pub pool: Option<PathBuf>,
    /// The filesystem to make
    #[arg(
        long,
        value_name = "KIND",
        default_value = "auto",
        conflicts_with = "pool"
    )]
    pub fs: DemoFilesystem,
    /// What to fetch beside the sources of this project's dependencies [default: what lies in /usr]
    #[arg(long, value_name = "DIR")]
    pub tree: Option<PathBuf>,
    /// How many compilers may run at once [default: as cargo likes]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub jobs: Option<u16>,
    /// Leave the pool and the driver's log
    #[arg(long)]
    pub keep: bool,
    /// Where cargo unpacked those sources [default: ~/.cargo]
    #[arg(long, value_name = "DIR", env = "CARGO_HOME", hide_env_values = true)]
    pub cargo_home: Option<PathBuf>,
    /// No colours [any value of NO_COLOR but an empty one means the same]
    #[arg(long)]
    pub no_color: bool,
}

/// A filesystem that the demo can make.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DemoFilesystem {
    /// The first that this machine can make.
    Auto,
    /// ext4.
    Ext4,
    /// xfs with reflinks.
    Xfs,
    /// btrfs.
    Btrfs,
}

/// What is wrong with the flags together.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Eviction would never end, or never begin.
    #[error("--low-watermark {low} must be below --high-watermark {high}")]
    Watermarks {
        /// As given.
        low: u8,
        /// As given.
        high: u8,
    },
    /// A test named no point.
    #[cfg(debug_assertions)]
    #[error("BAGGAGECLAIM_CRASH_AT names no point of engine::crash")]
    CrashAt,
    /// The machine's name cannot be a node's.
    #[error("this machine's host name cannot be a node's name: {0}; give one with --node-id")]
    HostName(NodeIdError),
}

/// For tests of what `kill -9` leaves, in debug builds only: `BAGGAGECLAIM_CRASH_AT=point[:visit]` names where the process
/// dies (`engine::crash`). `false` when there is no such point.
#[cfg(debug_assertions)]
fn crash_where_told() -> bool {
    let Some(told) = std::env::var_os("BAGGAGECLAIM_CRASH_AT") else {
        return true;
    };
    let told = told.to_str().unwrap_or_default();
    let (point, visit) = told.split_once(':').unwrap_or((told, "1"));
    visit
        .parse()
        .is_ok_and(|visit| engine::crash::arm(point, visit))
}

impl Standalone {
    /// The flags as what runs takes them.
    pub fn resolve(self) -> Result<driver::Config, Error> {
        let features = csi::Features {
            controller: self.controller == Switch::On,
            attach: self.attach,
            ..csi::Features::default()
        };
        self.driver.resolve(self.pool, self.socket, features)
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
        let driver = self.driver.resolve(self.pool, socket, features)?;
        let kubernetes = (self.kubernetes == Switch::On).then(|| k8s::Config {
            node: driver.csi.node.as_str().to_owned(),
            reporter: csi::DRIVER_NAME.to_owned(),
            // An empty variable is as good as none.
            kubeconfig: self.kubeconfig.filter(|path| !path.as_os_str().is_empty()),
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
                    ..features
                },
            },
            engine,
            grace: self.grace,
        })
    }
}

fn host_name() -> Result<NodeId, NodeIdError> {
    let name = rustix::system::uname();
    NodeId::new(name.nodename().to_str().map_err(|_| NodeIdError)?)
}

fn parse_node(text: &str) -> Result<NodeId, NodeIdError> {
    NodeId::new(text)
}

fn parse_duration(text: &str) -> Result<Duration, &'static str> {
    humantime::parse_duration(text).map_err(|_| "expected a duration such as 90s, 5m or 1h30m")
}

fn parse_bytes(text: &str) -> Result<u64, &'static str> {
    crate::model::parse_bytes(text).ok_or("expected a quantity such as 64Mi, 1G or 5000000")
}
