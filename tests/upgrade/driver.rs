//! Drivers on one pool, one after the other, with the calls of kubelet, the sidecars and an
//! operator. The tests decide what is right.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::future::Future;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use baggageclaim::admin;
use baggageclaim::kubelet_double::{Kubelet, Pod};
use baggageclaim::proto::admin::v1 as api;
use baggageclaim::proto::csi::v1 as csi;
use csi::volume_capability::access_mode::Mode;
use csi::volume_capability::{AccessMode, AccessType, MountVolume};
use csi::volume_content_source::{SnapshotSource, Type};
use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use rustix::process::{Pid, Signal, kill_process};
use tonic::{Code, Status};

use crate::common::Lab;

/// Longer than anything here takes, on a machine that does much else.
const PATIENCE: Duration = Duration::from_secs(60);

/// An older driver, if there is one to play itself.
pub(crate) fn older() -> Option<OsString> {
    std::env::var_os("BAGGAGECLAIM_TEST_OLDER")
}

/// Where the drivers live.
pub(crate) struct Place {
    pub(crate) lab: Lab,
    pub(crate) pool: PathBuf,
    backend: &'static str,
}

impl Place {
    pub(crate) fn new(lab: Lab, backend: &'static str) -> Self {
        Self {
            pool: lab.path().join("pool"),
            lab,
            backend,
        }
    }

    pub(crate) fn is_overlay(&self) -> bool {
        self.backend == "overlay"
    }

    fn log(&self) -> PathBuf {
        self.lab.run_dir().join("log")
    }

    /// Starts the driver that is to be taken over from.
    pub(crate) async fn start_older(&self) -> Driver {
        let today = OsString::from(env!("CARGO_BIN_EXE_baggageclaim"));
        self.start_program(&older().unwrap_or(today)).await
    }

    /// Starts today's.
    pub(crate) async fn start(&self) -> Driver {
        self.start_program(env!("CARGO_BIN_EXE_baggageclaim").as_ref())
            .await
    }

    async fn start_program(&self, program: &OsStr) -> Driver {
        let log = File::options().create(true).append(true).open(self.log());
        let socket = self.lab.run_dir().join("csi.sock");
        let child = Command::new(program)
            .arg("standalone")
            .arg("--pool")
            .arg(&self.pool)
            .arg("--socket")
            .arg(&socket)
            .args(["--backend", self.backend, "--node-id", "node-1"])
            .args(["--log", "info,baggageclaim=debug"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log.expect("a file for what the driver says"))
            .spawn();
        let child = Process(child.expect("the driver starts"));
        let root = self.lab.kubelet_dir();
        let kubelet = Kubelet::connect_when_ready(&socket, root, PATIENCE).await;
        // It comes after the other socket.
        let admin = patiently(async || admin::connect(&self.pool).await, |_| true).await;
        Driver {
            kubelet: kubelet.expect("the driver becomes ready"),
            admin: admin.expect("the driver answers"),
            root: self.lab.kubelet_dir(),
            child,
        }
    }

    /// Nothing is wrong with a pool that no driver has.
    pub(crate) fn check(&self) {
        let mut check = Command::new(env!("CARGO_BIN_EXE_baggageclaim"));
        let said = check.arg("check").arg("--pool").arg(&self.pool).output();
        let said = said.expect("it runs");
        assert!(said.status.success(), "{}", said.stdout.escape_ascii());
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let said = fs::read_to_string(self.log()).unwrap_or_default();
            eprintln!("the drivers said:\n{said}");
        }
    }
}

/// Killed when it is dropped.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ended_already = self.0.kill();
        let _reaped = self.0.wait();
    }
}

/// A driver that runs.
pub(crate) struct Driver {
    pub(crate) kubelet: Kubelet,
    admin: admin::Client,
    root: PathBuf,
    child: Process,
}

/// A PersistentVolumeClaim's volume, and where it is staged and published.
pub(crate) struct PersistentVolume {
    pub(crate) id: String,
    pub(crate) target: PathBuf,
    staging: PathBuf,
}

impl Driver {
    /// Ends it as by `kill -9`.
    pub(crate) fn kill(self) {
        drop(self.child);
    }

    /// Ends it in order.
    pub(crate) fn end(mut self) {
        let pid = Pid::from_child(&self.child.0);
        kill_process(pid, Signal::TERM).expect("it runs");
        assert!(self.child.0.wait().expect("wait").success());
    }

    /// The pod of an earlier driver.
    pub(crate) fn again(&self, pod: &Pod) -> Pod {
        (self.kubelet).pod_with_uid(pod.namespace(), pod.name(), pod.uid())
    }

    /// Publishes something as kubelet would not ask for it.
    pub(crate) async fn ask(&self, request: csi::NodePublishVolumeRequest) -> Result<(), Status> {
        let mut node = self.kubelet.node_client();
        node.node_publish_volume(request).await.map(drop)
    }

    /// Says how a pod ended; for how many volumes that is news.
    pub(crate) async fn succeeded(&self, uid: &str) -> u64 {
        let request = api::ReportOutcomeRequest {
            pod_uid: uid.to_owned(),
            outcome: api::Outcome::Succeeded.into(),
            wait: false,
        };
        let told = self.admin.clone().report_outcome(request).await;
        told.expect("told").into_inner().volumes
    }

    pub(crate) async fn artifacts(&self) -> Vec<String> {
        let request = api::ListArtifactsRequest::default();
        let listed = self.admin.clone().list_artifacts(request).await;
        let artifacts = listed.expect("listed").into_inner().artifacts;
        artifacts.into_iter().map(|one| one.reference).collect()
    }

    /// Waits until so many volumes are on their way out, and all others published.
    pub(crate) async fn leaving(&self, wanted: usize) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let request = api::ListVolumesRequest::default();
            let listed = self.admin.clone().list_volumes(request).await;
            let volumes = listed.expect("listed").into_inner().volumes;
            let leaving = volumes.iter().filter(|volume| volume.state != "published");
            if leaving.count() == wanted {
                return;
            }
            assert!(Instant::now() < deadline, "not {wanted}: {volumes:?}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Waits until no volume is left.
    pub(crate) async fn settled(&self) {
        self.leaving(0).await;
    }

    /// Nothing is wrong with the pool.
    pub(crate) async fn sound(&self) {
        let said = self.admin.clone().check(api::CheckRequest {}).await;
        assert_eq!(said.expect("checked").into_inner().findings, []);
    }

    pub(crate) async fn create(
        &self,
        name: &str,
        class: &[(&str, &str)],
    ) -> Result<PersistentVolume, Status> {
        let class = class.iter().map(|&(key, value)| (key.into(), value.into()));
        self.create_from(csi::CreateVolumeRequest {
            name: name.to_owned(),
            mutable_parameters: class.collect(),
            ..Default::default()
        })
        .await
    }

    pub(crate) async fn restore(&self, name: &str, snapshot: &str) -> PersistentVolume {
        let snapshot_id = snapshot.to_owned();
        let made = self.create_from(csi::CreateVolumeRequest {
            name: name.to_owned(),
            volume_content_source: Some(csi::VolumeContentSource {
                r#type: Some(Type::Snapshot(SnapshotSource { snapshot_id })),
            }),
            ..Default::default()
        });
        made.await.expect(name)
    }

    async fn create_from(
        &self,
        mut request: csi::CreateVolumeRequest,
    ) -> Result<PersistentVolume, Status> {
        request.volume_capabilities = vec![capability(Mode::SingleNodeWriter)];
        let made = busily(|| {
            let (mut controller, request) = (self.kubelet.controller_client(), request.clone());
            async move { controller.create_volume(request).await }
        });
        let id = made.await?.into_inner().volume.expect("a volume").volume_id;
        let at = |what: &str| self.root.join(format!("{id}-{what}"));
        Ok(PersistentVolume {
            target: at("target"),
            staging: at("staging"),
            id,
        })
    }

    /// Stages and publishes it.
    pub(crate) async fn mount(&self, claim: &PersistentVolume) {
        let mounted = self.mount_as(claim, Mode::SingleNodeWriter).await;
        mounted.unwrap_or_else(|status| panic!("{}: {status}", claim.id));
    }

    pub(crate) async fn mount_as(
        &self,
        claim: &PersistentVolume,
        mode: Mode,
    ) -> Result<(), Status> {
        fs::create_dir_all(&claim.staging).expect("a staging path");
        let request = csi::NodeStageVolumeRequest {
            volume_id: claim.id.clone(),
            staging_target_path: text(&claim.staging),
            volume_capability: Some(capability(mode)),
            ..Default::default()
        };
        let staged = busily(|| {
            let (mut node, request) = (self.kubelet.node_client(), request.clone());
            async move { node.node_stage_volume(request).await }
        });
        staged.await?;
        self.ask(csi::NodePublishVolumeRequest {
            volume_id: claim.id.clone(),
            staging_target_path: text(&claim.staging),
            target_path: text(&claim.target),
            volume_capability: Some(capability(mode)),
            ..Default::default()
        })
        .await
    }

    /// Unpublishes and unstages it.
    pub(crate) async fn unmount(&self, claim: &PersistentVolume) {
        let mut node = self.kubelet.node_client();
        let request = csi::NodeUnpublishVolumeRequest {
            volume_id: claim.id.clone(),
            target_path: text(&claim.target),
        };
        node.node_unpublish_volume(request).await.expect(&claim.id);
        assert!(!claim.target.exists());
        let request = csi::NodeUnstageVolumeRequest {
            volume_id: claim.id.clone(),
            staging_target_path: text(&claim.staging),
        };
        node.node_unstage_volume(request).await.expect(&claim.id);
    }

    pub(crate) async fn snapshot(&self, name: &str, claim: &PersistentVolume) -> String {
        let request = csi::CreateSnapshotRequest {
            source_volume_id: claim.id.clone(),
            name: name.to_owned(),
            ..Default::default()
        };
        let taken = busily(|| {
            let (mut controller, request) = (self.kubelet.controller_client(), request.clone());
            async move { controller.create_snapshot(request).await }
        });
        let taken = taken.await.expect(name).into_inner();
        taken.snapshot.expect("a snapshot").snapshot_id
    }

    pub(crate) async fn delete(&self, claim: &PersistentVolume) {
        let request = csi::DeleteVolumeRequest {
            volume_id: claim.id.clone(),
            ..Default::default()
        };
        let deleted = busily(|| {
            let (mut controller, request) = (self.kubelet.controller_client(), request.clone());
            async move { controller.delete_volume(request).await }
        });
        deleted.await.expect(&claim.id);
    }

    pub(crate) async fn delete_snapshot(&self, snapshot: &str) {
        let request = csi::DeleteSnapshotRequest {
            snapshot_id: snapshot.to_owned(),
            ..Default::default()
        };
        let mut controller = self.kubelet.controller_client();
        controller.delete_snapshot(request).await.expect(snapshot);
    }
}

fn capability(mode: Mode) -> csi::VolumeCapability {
    csi::VolumeCapability {
        access_mode: Some(AccessMode { mode: mode.into() }),
        access_type: Some(AccessType::Mount(MountVolume::default())),
    }
}

fn text(path: &Path) -> String {
    path.to_str().expect("text").to_owned()
}

/// The kernel's id of the mount there.
pub(crate) fn mount_id(path: &Path) -> u64 {
    let seen = statx(CWD, path, AtFlags::empty(), StatxFlags::MNT_ID);
    seen.expect("it is there").stx_mnt_id
}

/// Repeats what something on its way out is in the way of: the sidecars do, and other tests start
/// programs, which hold all that this process has open until they are executed.
async fn busily<T, F: Future<Output = Result<T, Status>>>(
    call: impl Fn() -> F,
) -> Result<T, Status> {
    let busy = |status: &Status| {
        let said = status.message();
        status.code() == Code::Aborted || said.contains("a process") || said.contains("no process")
    };
    patiently(call, busy).await
}

async fn patiently<T, E, F: Future<Output = Result<T, E>>>(
    call: impl Fn() -> F,
    again: impl Fn(&E) -> bool,
) -> Result<T, E> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match call().await {
            Err(error) if again(&error) && Instant::now() < deadline => {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            answer => return answer,
        }
    }
}
