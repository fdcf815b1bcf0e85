//! The driver in this process: a pool on a lab, the real services on a real socket, and a fake
//! kubelet. It can check that nothing is left behind.

use std::path::{Path, PathBuf};
use std::time::Duration;

use baggageclaim::backend::BackendKind;
use baggageclaim::csi::{self, Readiness};
use baggageclaim::engine::{Config, Engine};
use baggageclaim::kubelet_double::Kubelet;
use baggageclaim::model::NodeId;
use baggageclaim::server::{self, Drain, Socket};
use baggageclaim::standalone;
use baggageclaim::telemetry::metrics::Rpcs;
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tonic::transport::{Channel, Endpoint, Uri};

use super::Lab;

/// A driver that runs until it is dropped or stopped.
pub struct Driver {
    pub lab: Lab,
    pub engine: Engine,
    pub kubelet: Kubelet,
    pub socket: PathBuf,
    drain: Drain,
    served: JoinHandle<server::Result<()>>,
}

impl Driver {
    /// Creates a pool on the lab, with a backend.
    pub async fn start(lab: Lab, backend: Option<BackendKind>) -> Self {
        Self::start_with(lab, |config| config.backend = backend).await
    }

    /// Creates a pool on the lab, configured by `change`.
    pub async fn start_with(lab: Lab, change: impl FnOnce(&mut Config)) -> Self {
        standalone::prepare_process();
        let mut config = Config::new(lab.path().join("pool"));
        config.input_wait = Duration::from_secs(5);
        change(&mut config);
        let engine = Engine::open(config).await.expect("the pool opens");
        let path = lab.run_dir().join("csi.sock");
        let socket = Socket::bind(&path).await.expect("the socket is free");
        let drain = Drain::new(Duration::from_secs(10));
        let served = tokio::spawn(csi::serve(
            socket,
            csi::Config {
                node: NodeId::new("node-1").expect("a node id"),
                features: csi::Features::default(),
                rpcs: Rpcs::default(),
            },
            Readiness::ready(engine.clone()),
            drain.clone(),
        ));
        let kubelet = Kubelet::connect(&path, lab.kubelet_dir())
            .await
            .expect("the driver answers");
        Self {
            lab,
            engine,
            kubelet,
            socket: path,
            drain,
            served,
        }
    }

    /// The directory for targets of hand-made requests.
    pub fn pods(&self) -> PathBuf {
        self.lab.kubelet_dir().join("pods")
    }

    /// Checks that no volume, mount or volume directory is left, and that the pool is sound.
    pub async fn assert_nothing_left(&self, after: &str) {
        self.engine.settled().await;
        let volumes = self.engine.volumes(None);
        assert!(volumes.is_empty(), "{after}: {volumes:?}");
        let mounts = self.lab.leftovers();
        assert!(mounts.is_empty(), "{after}: {mounts:?}");
        let directories = entries(&self.lab.path().join("pool/volumes"));
        assert!(directories.is_empty(), "{after}: {directories:?}");
        self.assert_sound(after).await;
    }

    /// Checks that the pool is sound.
    pub async fn assert_sound(&self, after: &str) {
        let findings = self.engine.check().await.expect("check");
        assert!(findings.is_empty(), "{after}: {findings:?}");
    }

    /// Says that it is time to stop.
    pub fn begin_to_stop(&self) {
        self.drain.close();
    }

    /// Stops serving, and says how that ended; the engine goes too.
    pub async fn stop(self) -> Lab {
        self.begin_to_stop();
        self.served
            .await
            .expect("no panic")
            .expect("served to the end");
        self.engine.shutdown().await;
        assert!(!self.socket.exists(), "the socket is still there");
        self.lab
    }
}

/// The services without an engine, on a socket in a temporary directory, and a connection to them.
pub async fn serve_without_engine(
    readiness: watch::Receiver<Readiness>,
) -> (tempfile::TempDir, Channel) {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("csi.sock");
    let socket = Socket::bind(&path).await.expect("bind");
    let config = csi::Config {
        node: NodeId::new("node-1").expect("a node id"),
        features: csi::Features::default(),
        rpcs: Rpcs::default(),
    };
    let served = csi::serve(socket, config, readiness, Drain::new(Duration::ZERO));
    tokio::spawn(served);
    let channel = channel(&path).await;
    (dir, channel)
}

/// A connection to a socket.
pub async fn channel(socket: &Path) -> Channel {
    let path = socket.to_owned();
    Endpoint::from_static("http://localhost")
        .connect_with_connector(tower::service_fn(move |_: Uri| {
            let path = path.clone();
            async move { UnixStream::connect(path).await.map(TokioIo::new) }
        }))
        .await
        .expect("connect")
}

/// The names in a directory.
pub fn entries(dir: &Path) -> Vec<std::ffi::OsString> {
    std::fs::read_dir(dir)
        .unwrap_or_else(|error| panic!("{}: {error}", dir.display()))
        .map(|entry| entry.expect("an entry").file_name())
        .collect()
}
