//! The claims of one caller: created, mounted, written, cloned, snapshotted, deleted, and what must
//! be true of them. After a kill, it first repeats the interrupted call, with the same name.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use baggageclaim::proto::csi::v1 as csi;
use csi::volume_capability::access_mode::Mode;
use csi::volume_capability::{AccessMode, AccessType, MountVolume};
use csi::volume_content_source::{SnapshotSource, Type, VolumeSource};
use serde::{Deserialize, Serialize};
use tonic::{Code, Status};

use crate::caller::cannot;
use crate::common::random::Random;
use crate::content::{self, Seen};
use crate::driver::{Wire, is_death};
use crate::figures::{Fault, Stop, count};

const CLAIMS: u8 = 3;
const SNAPSHOTS: u8 = 2;

/// The actions of a caller with its claims.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum ClaimOp {
    Create(u8),
    Clone(u8, u8),
    Restore(u8, u8),
    Mount(u8),
    Write(u8, u64),
    Unmount(u8),
    Snapshot(u8, u8),
    DropSnapshot(u8),
    Delete(u8),
}

impl ClaimOp {
    pub(crate) fn any(random: &mut Random) -> Self {
        let claim = u8::try_from(random.below(CLAIMS.into())).expect("small");
        let other = u8::try_from(random.below(CLAIMS.into())).expect("small");
        let snapshot = u8::try_from(random.below(SNAPSHOTS.into())).expect("small");
        match random.below(16) {
            0..=1 => Self::Create(claim),
            2..=3 => Self::Clone(claim, other),
            4 => Self::Restore(claim, snapshot),
            5..=7 => Self::Mount(claim),
            8..=9 => Self::Write(claim, random.next()),
            10..=11 => Self::Unmount(claim),
            12 => Self::Snapshot(claim, snapshot),
            13 => Self::DropSnapshot(snapshot),
            _ => Self::Delete(claim),
        }
    }
}

#[derive(Debug, Clone)]
struct Held {
    name: String,
    id: String,
    content: Seen,
    mounted: Mounted,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mounted {
    No,
    Yes,
    /// Asked for, or given up, and not answered.
    Maybe,
}

#[derive(Debug, Clone)]
struct Kept {
    name: String,
    id: String,
    content: Seen,
}

/// Calls that are not answered yet.
#[derive(Debug, Clone)]
enum Open {
    Create {
        claim: u8,
        name: String,
        source: Option<Type>,
        content: Seen,
    },
    Mount(u8),
    Unmount(u8),
    Snapshot {
        snapshot: u8,
        name: String,
        source: String,
        content: Seen,
    },
    DropSnapshot(u8),
    Delete(u8),
}

/// The claims and snapshots of one caller.
#[derive(Debug)]
pub(crate) struct Claims {
    index: usize,
    /// Whether what is mounted can be frozen.
    live_clones: bool,
    next: u64,
    held: Vec<Option<Held>>,
    snapshots: Vec<Option<Kept>>,
    open: Option<Open>,
    root: PathBuf,
}

fn capability() -> csi::VolumeCapability {
    csi::VolumeCapability {
        access_mode: Some(AccessMode {
            mode: Mode::SingleNodeWriter.into(),
        }),
        access_type: Some(AccessType::Mount(MountVolume::default())),
    }
}

/// The request of CreateVolume.
pub(crate) fn create_request(name: &str, source: Option<Type>) -> csi::CreateVolumeRequest {
    csi::CreateVolumeRequest {
        name: name.to_owned(),
        volume_capabilities: vec![capability()],
        volume_content_source: source.map(|source| csi::VolumeContentSource {
            r#type: Some(source),
        }),
        ..Default::default()
    }
}

/// As the source of a claim.
pub(crate) fn from_snapshot(snapshot_id: String) -> Type {
    Type::Snapshot(SnapshotSource { snapshot_id })
}

/// The request of CreateSnapshot.
pub(crate) fn snapshot_request(name: &str, claim: &str) -> csi::CreateSnapshotRequest {
    csi::CreateSnapshotRequest {
        source_volume_id: claim.to_owned(),
        name: name.to_owned(),
        ..Default::default()
    }
}

/// The request of NodeStageVolume.
pub(crate) fn stage_request(claim: &str, staging: &Path) -> csi::NodeStageVolumeRequest {
    csi::NodeStageVolumeRequest {
        volume_id: claim.to_owned(),
        staging_target_path: staging.to_str().expect("text").to_owned(),
        volume_capability: Some(capability()),
        ..Default::default()
    }
}

/// The request of NodeUnstageVolume.
pub(crate) fn unstage_request(claim: &str, staging: &Path) -> csi::NodeUnstageVolumeRequest {
    csi::NodeUnstageVolumeRequest {
        volume_id: claim.to_owned(),
        staging_target_path: staging.to_str().expect("text").to_owned(),
    }
}

/// Both lists, whole.
pub(crate) async fn lists(wire: &Wire) -> Result<(Vec<String>, Vec<String>), Stop> {
    let mut controller = wire.kubelet.controller_client();
    let answer = controller
        .list_volumes(csi::ListVolumesRequest::default())
        .await;
    let listed = wire.must("ListVolumes", answer)?.into_inner().entries;
    let volumes = listed.into_iter().filter_map(|entry| entry.volume);
    let answer = controller
        .list_snapshots(csi::ListSnapshotsRequest::default())
        .await;
    let listed = wire.must("ListSnapshots", answer)?.into_inner().entries;
    let snapshots = listed.into_iter().filter_map(|entry| entry.snapshot);
    Ok((
        volumes.map(|volume| volume.volume_id).collect(),
        snapshots.map(|snapshot| snapshot.snapshot_id).collect(),
    ))
}

/// Repeats what another operation, or a program that is being started beside it, was in the way of.
async fn patiently<T, F: Future<Output = Result<T, Status>>>(
    call: impl Fn() -> F,
) -> Result<T, Status> {
    let began = Instant::now();
    loop {
        match call().await {
            Err(status)
                if !is_death(&status)
                    && (status.code() == Code::Aborted
                        || status.message().contains("nothing was begun")
                        || status.message().contains("a process"))
                    && began.elapsed() < Duration::from_secs(20) =>
            {
                tokio::time::sleep(Duration::from_millis(3)).await;
            }
            answer => return answer,
        }
    }
}

impl Claims {
    pub(crate) fn new(index: usize, live_clones: bool) -> Self {
        Self {
            index,
            live_clones,
            next: 0,
            held: (0..CLAIMS).map(|_| None).collect(),
            snapshots: (0..SNAPSHOTS).map(|_| None).collect(),
            open: None,
            root: PathBuf::new(),
        }
    }

    fn name(&mut self, what: &str) -> String {
        self.next += 1;
        format!("{what}-c{}-{}", self.index, self.next)
    }

    /// Kubelet's own directory of a claim.
    fn dir(&self, claim: u8) -> PathBuf {
        self.root.join(format!("pods/claim-{}-{claim}", self.index))
    }

    fn staging(&self, claim: u8) -> PathBuf {
        self.dir(claim).join("globalmount")
    }

    fn target(&self, claim: u8) -> PathBuf {
        self.dir(claim).join("mount")
    }

    fn at(&self, claim: u8) -> Option<&Held> {
        self.held[usize::from(claim)].as_ref()
    }

    /// A claim that can be frozen now.
    fn source(&self, claim: u8) -> Option<&Held> {
        self.at(claim)
            .filter(|held| held.mounted == Mounted::No || self.live_clones)
    }

    pub(crate) async fn act(&mut self, wire: &Wire, op: ClaimOp) -> Result<(), Stop> {
        wire.kubelet.root().clone_into(&mut self.root);
        self.finish(wire).await?;
        self.open = match op {
            ClaimOp::Create(claim) if self.at(claim).is_none() => Some(Open::Create {
                claim,
                name: self.name("pvc"),
                source: None,
                content: Seen::Empty,
            }),
            ClaimOp::Clone(claim, from) if self.at(claim).is_none() => {
                self.source(from).cloned().map(|from| Open::Create {
                    claim,
                    name: self.name("clone"),
                    source: Some(Type::Volume(VolumeSource { volume_id: from.id })),
                    content: from.content,
                })
            }
            ClaimOp::Restore(claim, from) if self.at(claim).is_none() => {
                let from = self.snapshots[usize::from(from)].clone();
                from.map(|from| Open::Create {
                    claim,
                    name: self.name("restored"),
                    source: Some(from_snapshot(from.id)),
                    content: from.content,
                })
            }
            ClaimOp::Mount(claim) => self
                .at(claim)
                .is_some_and(|held| held.mounted == Mounted::No)
                .then_some(Open::Mount(claim)),
            ClaimOp::Write(claim, seed) => {
                self.write(wire, claim, seed)?;
                None
            }
            ClaimOp::Unmount(claim) => self
                .at(claim)
                .is_some_and(|held| held.mounted == Mounted::Yes)
                .then_some(Open::Unmount(claim)),
            ClaimOp::Snapshot(claim, snapshot)
                if self.snapshots[usize::from(snapshot)].is_none() =>
            {
                self.source(claim).cloned().map(|from| Open::Snapshot {
                    snapshot,
                    name: self.name("snapshot"),
                    source: from.id,
                    content: from.content,
                })
            }
            ClaimOp::DropSnapshot(snapshot) => self.snapshots[usize::from(snapshot)]
                .is_some()
                .then_some(Open::DropSnapshot(snapshot)),
            ClaimOp::Delete(claim) => self
                .at(claim)
                .is_some_and(|held| held.mounted == Mounted::No)
                .then_some(Open::Delete(claim)),
            ClaimOp::Create(_)
            | ClaimOp::Clone(..)
            | ClaimOp::Restore(..)
            | ClaimOp::Snapshot(..) => None,
        };
        self.finish(wire).await
    }

    /// Asks for what is open, and notes the answer.
    pub(crate) async fn finish(&mut self, wire: &Wire) -> Result<(), Stop> {
        let Some(open) = self.open.clone() else {
            return Ok(());
        };
        match open {
            Open::Create {
                claim,
                name,
                source,
                content,
            } => {
                let id = create(wire, &name, source).await?;
                self.held[usize::from(claim)] = Some(Held {
                    name,
                    id,
                    content,
                    mounted: Mounted::No,
                });
            }
            Open::Mount(claim) => self.mount(wire, claim).await?,
            Open::Unmount(claim) => self.unmount(wire, claim).await?,
            Open::Snapshot {
                snapshot,
                name,
                source,
                content,
            } => {
                let ask = || {
                    let request = snapshot_request(&name, &source);
                    let mut controller = wire.kubelet.controller_client();
                    async move { controller.create_snapshot(request).await }
                };
                let operation = format!("CreateSnapshot {name}");
                let made = wire.must(&operation, patiently(ask).await)?.into_inner();
                let id = made.snapshot.map(|made| made.snapshot_id);
                let id = id.unwrap_or_default();
                self.snapshots[usize::from(snapshot)] = Some(Kept { name, id, content });
            }
            Open::DropSnapshot(snapshot) => {
                let at = usize::from(snapshot);
                if let Some(kept) = &self.snapshots[at] {
                    let request = csi::DeleteSnapshotRequest {
                        snapshot_id: kept.id.clone(),
                        ..Default::default()
                    };
                    let ask = || {
                        let (mut controller, request) =
                            (wire.kubelet.controller_client(), request.clone());
                        async move { controller.delete_snapshot(request).await }
                    };
                    let operation = format!("DeleteSnapshot {}", kept.name);
                    wire.must(&operation, patiently(ask).await)?;
                }
                self.snapshots[at] = None;
            }
            Open::Delete(claim) => {
                let at = usize::from(claim);
                if let Some(held) = &self.held[at] {
                    let request = csi::DeleteVolumeRequest {
                        volume_id: held.id.clone(),
                        ..Default::default()
                    };
                    let ask = || {
                        let (mut controller, request) =
                            (wire.kubelet.controller_client(), request.clone());
                        async move { controller.delete_volume(request).await }
                    };
                    let operation = format!("DeleteVolume {}", held.name);
                    wire.must(&operation, patiently(ask).await)?;
                }
                self.held[at] = None;
            }
        }
        self.open = None;
        Ok(())
    }

    async fn mount(&mut self, wire: &Wire, claim: u8) -> Result<(), Stop> {
        let (staging, target) = (self.staging(claim), self.target(claim));
        fs::create_dir_all(&staging).map_err(cannot("make a staging path"))?;
        let Some(held) = &mut self.held[usize::from(claim)] else {
            return Ok(());
        };
        held.mounted = Mounted::Maybe;
        let path = |path: &PathBuf| path.to_str().expect("text").to_owned();
        let request = stage_request(&held.id, &staging);
        let ask = || {
            let (mut node, request) = (wire.kubelet.node_client(), request.clone());
            async move { node.node_stage_volume(request).await }
        };
        wire.must(&format!("stage {}", held.name), patiently(ask).await)?;
        let request = csi::NodePublishVolumeRequest {
            volume_id: held.id.clone(),
            staging_target_path: path(&staging),
            target_path: path(&target),
            volume_capability: Some(capability()),
            ..Default::default()
        };
        let ask = || {
            let (mut node, request) = (wire.kubelet.node_client(), request.clone());
            async move { node.node_publish_volume(request).await }
        };
        wire.must(&format!("publish {}", held.name), patiently(ask).await)?;
        let found = content::expect(&target, std::slice::from_ref(&held.content));
        let found = found.map_err(|fault| fault.at(&held.name))?;
        held.content = Seen::Exactly(Arc::new(found));
        held.mounted = Mounted::Yes;
        Ok(())
    }

    async fn unmount(&mut self, wire: &Wire, claim: u8) -> Result<(), Stop> {
        let (staging, target) = (self.staging(claim), self.target(claim));
        let dir = self.dir(claim);
        let Some(held) = &mut self.held[usize::from(claim)] else {
            return Ok(());
        };
        held.mounted = Mounted::Maybe;
        let request = csi::NodeUnpublishVolumeRequest {
            volume_id: held.id.clone(),
            target_path: target.to_str().expect("text").to_owned(),
        };
        let mut node = wire.kubelet.node_client();
        let answer = node.node_unpublish_volume(request).await;
        wire.must(&format!("unpublish {}", held.name), answer)?;
        let request = unstage_request(&held.id, &staging);
        let answer = node.node_unstage_volume(request).await;
        wire.must(&format!("unstage {}", held.name), answer)?;
        held.mounted = Mounted::No;
        fs::remove_dir(&staging).map_err(cannot("remove a staging path"))?;
        fs::remove_dir(&dir).map_err(cannot("remove a claim's directory"))?;
        Ok(())
    }

    fn write(&mut self, wire: &Wire, claim: u8, seed: u64) -> Result<(), Stop> {
        let target = self.target(claim);
        let tag = self.name("w");
        let Some(held) = &mut self.held[usize::from(claim)] else {
            return Ok(());
        };
        if held.mounted != Mounted::Yes {
            return Ok(());
        }
        content::change(&target, seed, &tag).map_err(cannot("write into a claim"))?;
        held.content = Seen::Exactly(Arc::new(content::read(&target)?));
        count(&wire.figures.operations);
        Ok(())
    }

    /// Where something must be mounted, once; and where it may.
    pub(crate) fn mounts(&self) -> (Vec<PathBuf>, Vec<PathBuf>) {
        let (mut must, mut may) = (Vec::new(), Vec::new());
        for claim in 0..CLAIMS {
            let places = [self.staging(claim), self.target(claim)];
            match self.at(claim).map(|held| held.mounted) {
                Some(Mounted::Yes) => must.extend(places),
                Some(Mounted::Maybe) => may.extend(places),
                Some(Mounted::No) | None => {}
            }
        }
        (must, may)
    }

    /// The ids of claims that are on their way to a target or away from it.
    pub(crate) fn open_volumes(&self) -> Vec<String> {
        let held = self.held.iter().flatten();
        let open = held.filter(|held| held.mounted == Mounted::Maybe);
        open.map(|held| held.id.clone()).collect()
    }

    pub(crate) fn check_live(&self) -> Result<(), Fault> {
        for claim in 0..CLAIMS {
            if let Some(held) = self.at(claim)
                && held.mounted == Mounted::Yes
            {
                content::expect(&self.target(claim), std::slice::from_ref(&held.content))
                    .map_err(|fault| fault.at(&held.name))?;
            }
        }
        Ok(())
    }

    /// Ids that must be listed, and whether something more may be there, or less: what is open.
    pub(crate) fn check_lists(
        &self,
        claims: &mut Vec<String>,
        snapshots: &mut Vec<String>,
    ) -> Result<usize, Fault> {
        let deleting = |at: u8| matches!(&self.open, Some(Open::Delete(claim)) if *claim == at);
        let dropping =
            |at: u8| matches!(&self.open, Some(Open::DropSnapshot(snapshot)) if *snapshot == at);
        let take = |listed: &mut Vec<String>, id: &str, name: &str, optional: bool| {
            if let Some(at) = listed.iter().position(|one| one == id) {
                listed.swap_remove(at);
                return Ok(());
            }
            if optional {
                return Ok(());
            }
            Err(Fault::lost(format!("{name} is not listed")))
        };
        for at in 0..CLAIMS {
            if let Some(held) = self.at(at) {
                take(claims, &held.id, &held.name, deleting(at))?;
            }
        }
        for at in 0..SNAPSHOTS {
            if let Some(kept) = &self.snapshots[usize::from(at)] {
                take(snapshots, &kept.id, &kept.name, dropping(at))?;
            }
        }
        let being_made = matches!(
            &self.open,
            Some(Open::Create { .. } | Open::Snapshot { .. })
        );
        Ok(usize::from(being_made))
    }

    /// Mounts every claim and a volume of each snapshot once more, and deletes all of it.
    pub(crate) async fn clear(&mut self, wire: &Wire) -> Result<(), Stop> {
        wire.kubelet.root().clone_into(&mut self.root);
        self.finish(wire).await?;
        for claim in 0..CLAIMS {
            for op in [
                ClaimOp::Mount(claim),
                ClaimOp::Unmount(claim),
                ClaimOp::Delete(claim),
            ] {
                self.act(wire, op).await?;
            }
        }
        for snapshot in 0..SNAPSHOTS {
            for op in [
                ClaimOp::Restore(0, snapshot),
                ClaimOp::Mount(0),
                ClaimOp::DropSnapshot(snapshot),
                ClaimOp::Unmount(0),
                ClaimOp::Delete(0),
            ] {
                self.act(wire, op).await?;
            }
        }
        Ok(())
    }
}

async fn create(wire: &Wire, name: &str, source: Option<Type>) -> Result<String, Stop> {
    let ask = || {
        let request = create_request(name, source.clone());
        let mut controller = wire.kubelet.controller_client();
        async move { controller.create_volume(request).await }
    };
    let operation = format!("CreateVolume {name}");
    let made = wire.must(&operation, patiently(ask).await)?.into_inner();
    Ok(made.volume.map(|made| made.volume_id).unwrap_or_default())
}
