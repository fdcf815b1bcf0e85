//! A node of the simulation: its agent, and its disk. A disk survives all; a restart of the driver
//! forgets the rest.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::server::{Reported, Server, Watch};
use crate::api::{
    Fetch, OrphanSnapshot, OrphanVolume, Phase, Refusal, Snapshot, SnapshotStatus, Volume,
    VolumeStatus, Wanted, number,
};
use crate::engine::Error;
use crate::engine::claims::{CreateClaim, claim_id, snapshot_id};
use crate::k8s::agent::decide as agent;
use crate::k8s::agent::decide::{SnapshotStep, VolumeStep};
use crate::k8s::claims::decide::refusal;
use crate::model::{self, ClaimSource, OwnerView, PersistentVolume, Timestamp};
use crate::server::{code_name, code_of, may_go_on, message_of};
use tonic::Code;

/// A disk with a pool.
#[derive(Default)]
pub(super) struct Disk {
    pub(super) pool: String,
    pub(super) claims: BTreeMap<String, PersistentVolume>,
    pub(super) snapshots: BTreeMap<String, model::Snapshot>,
}

/// How many steps the volume takes to appear. An order may come meanwhile.
const ENTRY: u32 = 3;

/// How far the content of a clone on another node is.
enum Stage {
    /// The other node is asked for the snapshot.
    Asks,
    /// Layers come.
    Comes,
    /// All are here, and the volume was still wanted a moment ago. It appears after so many steps.
    Enters(u32),
    /// It waits for a job.
    Done(Result<Box<PersistentVolume>, Arc<Error>>),
}

/// The fetch for a clone, as `distribution::clones` has it: a job joins the one that there is.
struct Run {
    order: Volume,
    request: CreateClaim,
    stage: Stage,
}

/// What another node says of a snapshot.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Answer {
    Silent,
    Gone,
    Here,
}

/// A node.
pub(super) struct Node {
    pub(super) name: &'static str,
    pub(super) is_on: bool,
    pub(super) disk: Disk,
    /// Another disk, which is not in the node.
    pub(super) other: Disk,
    volumes: Watch<Volume>,
    snapshots: Watch<Snapshot>,
    /// Volumes with a job that is due when the others are done.
    later: BTreeSet<String>,
    /// The order that it has carried out, and the status that it has not written yet.
    unwritten: Option<(Volume, VolumeStatus)>,
    /// The order for a snapshot that it has carried out, and the status not written yet.
    unsaid: Option<(Snapshot, SnapshotStatus)>,
    runs: BTreeMap<String, Run>,
}

/// A claim in an engine. `content` tells its data from that of any other.
fn claim(request: &CreateClaim, content: u64) -> PersistentVolume {
    PersistentVolume {
        id: claim_id(&request.name),
        name: request.name.clone(),
        created: Timestamp(content),
        last_used: Timestamp(1),
        capacity: request.required_bytes,
        parameters: request.parameters,
        mutable: request.mutable,
        made_with: Some(request.mutable),
        source: request.source.clone(),
        layers: Vec::new(),
        made: false,
        view: OwnerView::default(),
        attached: Vec::new(),
    }
}

fn refused(error: &Error) -> Refusal {
    Refusal {
        code: code_name(code_of(error)).to_owned(),
        message: message_of(error),
    }
}

/// Whether this object orders its node to make the volume. See `agent::fetch`.
fn is_wanted(server: &Server, order: &Volume) -> bool {
    let name = order.metadata.name.as_ref().expect("a name");
    server.now.volumes.get(name).is_some_and(|now| {
        now.metadata.uid == order.metadata.uid
            && now.spec.wanted == Wanted::Present
            && matches!(now.phase(), None | Some(Phase::Fetching))
    })
}

impl Node {
    pub(super) fn new(name: &'static str) -> Self {
        let disk = |number: u32| Disk {
            pool: format!("pool {number} of {name}"),
            ..Disk::default()
        };
        Self {
            name,
            is_on: true,
            disk: disk(1),
            other: disk(2),
            volumes: Watch::default(),
            snapshots: Watch::default(),
            later: BTreeSet::new(),
            unwritten: None,
            unsaid: None,
            runs: BTreeMap::new(),
        }
    }

    /// A start: everything is listed. Partial clones are deleted.
    pub(super) fn restart(&mut self, server: &mut Server) {
        self.volumes.restart(server, self.name);
        self.snapshots.restart(server, self.name);
        self.later.clear();
        self.unwritten = None;
        self.unsaid = None;
        self.runs.clear();
    }

    /// Takes the next event of its watch of volumes.
    pub(super) fn see(&mut self, server: &Server) {
        self.volumes.see(server, self.name);
    }

    /// Takes the next event of its watch of snapshots.
    pub(super) fn see_snapshots(&mut self, server: &Server) {
        self.snapshots.see(server, self.name);
    }

    /// One step of a job.
    pub(super) fn work(&mut self, server: &mut Server, content: u64) {
        if let Some((volume, status)) = self.unwritten.take() {
            server.report(&volume, |volume| volume.status = Some(status));
            return;
        }
        if self.volumes.queue.is_empty() {
            self.volumes.queue.append(&mut self.later);
        }
        let Some(volume) = self.volumes.next() else {
            return;
        };
        let name = volume.metadata.name.clone().expect("a name");
        let Disk { pool, claims, .. } = &mut self.disk;
        let status = match agent::volume(&volume, pool, claims.get(&name)) {
            VolumeStep::Nothing => return,
            VolumeStep::Report(status) => status,
            VolumeStep::Create(request) if volume.spec.fetch.is_some() => {
                let Some(status) = self.fetch(&volume, request) else {
                    return;
                };
                status
            }
            VolumeStep::Create(request) => {
                if let Some(ClaimSource::Claim(source)) = &request.source
                    && !claims.contains_key(source.as_str())
                {
                    let gone = Error::NoSuchClaim(source.to_string());
                    agent::created(&volume, pool, Err(&refused(&gone)))
                } else {
                    // The engine makes a claim of a name once.
                    let made = claims.entry(name.clone());
                    let made = made.or_insert_with(|| claim(&request, content));
                    assert_eq!(made.id.as_str(), name);
                    agent::created(&volume, pool, Ok(&*made))
                }
            }
            VolumeStep::Change { .. } => unreachable!("no call changes a volume here"),
            VolumeStep::Delete => {
                // A fetch ends first.
                self.runs.remove(&name);
                claims.remove(&name);
                agent::deleted(&volume, pool, None)
            }
        };
        self.unwritten = Some((volume, status));
    }

    /// A job for a clone: begins its fetch or joins it, and tells how far it is. `None`: as before.
    fn fetch(&mut self, volume: &Volume, request: CreateClaim) -> Option<VolumeStatus> {
        let name = volume.metadata.name.clone().expect("a name");
        let pool = &self.disk.pool;
        let run = self.runs.remove(&name).unwrap_or_else(|| Run {
            order: volume.clone(),
            request,
            stage: Stage::Asks,
        });
        let status = match &run.stage {
            Stage::Done(Ok(made)) => agent::created(volume, pool, Ok(made)),
            Stage::Done(Err(error)) if !may_go_on(code_of(error)) => {
                agent::created(volume, pool, Err(&refused(error)))
            }
            stage => {
                if !matches!(stage, Stage::Done(_)) {
                    self.runs.insert(name.clone(), run);
                }
                self.later.insert(name);
                agent::fetching(volume, pool, "it comes".to_owned())
            }
        };
        (volume.status.as_ref() != Some(&status)).then_some(status)
    }

    /// One step of each fetch. `ask` asks another node for a snapshot.
    pub(super) fn advance(
        &mut self,
        server: &Server,
        content: u64,
        ask: impl Fn(&Fetch) -> Answer,
    ) {
        let claims = &mut self.disk.claims;
        for (name, run) in &mut self.runs {
            let fetch = run.order.spec.fetch.as_ref().expect("a clone");
            let is_wanted = is_wanted(server, &run.order);
            let unwanted = || Err(Arc::new(refusal(Code::Aborted, "unwanted".to_owned())));
            run.stage = match (&run.stage, ask(fetch)) {
                (Stage::Enters(left @ 1..), _) => Stage::Enters(left - 1),
                (Stage::Enters(_), _) => {
                    let made = claims.entry(name.clone());
                    let made = made.or_insert_with(|| claim(&run.request, content));
                    Stage::Done(Ok(Box::new(made.clone())))
                }
                (Stage::Done(_), _) => continue,
                // It is asked for the right, too.
                (Stage::Asks, Answer::Here | Answer::Gone) if !is_wanted => Stage::Done(unwanted()),
                (Stage::Asks, Answer::Silent) => Stage::Asks,
                (Stage::Comes, Answer::Silent) => {
                    let away = refusal(Code::Unavailable, "away".to_owned());
                    Stage::Done(Err(Arc::new(away)))
                }
                (_, Answer::Gone) => {
                    let gone = Error::NoSuchSnapshot(fetch.snapshot.clone());
                    Stage::Done(Err(Arc::new(gone)))
                }
                (Stage::Asks, Answer::Here) => Stage::Comes,
                (Stage::Comes, Answer::Here) if is_wanted => Stage::Enters(ENTRY),
                (Stage::Comes, Answer::Here) => Stage::Done(unwanted()),
            };
        }
    }

    /// One step of a job for a snapshot.
    pub(super) fn work_snapshots(&mut self, server: &mut Server) {
        if let Some((snapshot, status)) = self.unsaid.take() {
            server.report(&snapshot, |snapshot| snapshot.status = Some(status));
            return;
        }
        let Some(object) = self.snapshots.next() else {
            return;
        };
        let id = object.metadata.name.clone().expect("a name");
        let Disk {
            pool,
            claims,
            snapshots,
        } = &mut self.disk;
        let held: Vec<model::Snapshot> = snapshots.get(&id).cloned().into_iter().collect();
        let status = match agent::snapshot(&object, pool, &held) {
            SnapshotStep::Nothing => return,
            SnapshotStep::Report(status) => status,
            SnapshotStep::Take => {
                let [source] = &object.spec.sources[..] else {
                    unreachable!("no call makes a group here")
                };
                let taken = claims.get(source).map(|source| model::Snapshot {
                    id: snapshot_id(&object.spec.name),
                    name: object.spec.name.clone(),
                    source: source.id.clone(),
                    created: source.created,
                    size: source.capacity,
                    layers: Vec::new(),
                    view: OwnerView::default(),
                    group: None,
                });
                if let Some(taken) = &taken {
                    snapshots.insert(id, taken.clone());
                }
                let gone = || refused(&Error::NoSuchClaim(source.clone()));
                let taken = taken.map(|taken| vec![taken]).ok_or_else(gone);
                agent::taken(&object, pool, taken)
            }
            SnapshotStep::Delete => {
                snapshots.remove(&id);
                agent::dropped(&object, pool, None)
            }
        };
        self.unsaid = Some((object, status));
    }

    /// Publishes its pool, with what its own watches do not name.
    pub(super) fn publish(&self, server: &mut Server) {
        let suffix = format!("@{}", self.name);
        let volume = |claim: &PersistentVolume| OrphanVolume {
            id: claim.id.to_string(),
            name: claim.name.strip_suffix(&suffix).expect("ours").to_owned(),
            parameters: claim.parameters.into(),
            made_with: claim.mutable.into(),
            source: claim.source.as_ref().map(Into::into),
            capacity: number(claim.capacity),
            mutable: claim.mutable.into(),
        };
        let lonely = self.disk.claims.values();
        let lonely = lonely.filter(|claim| !self.volumes.cache.contains_key(claim.id.as_str()));
        let snapshot = |snapshot: &model::Snapshot| OrphanSnapshot {
            id: snapshot.id.to_string(),
            name: snapshot.name.clone(),
            sources: vec![snapshot.source.to_string()],
            members: vec![snapshot.id.to_string()],
            group: false,
        };
        let frozen = self.disk.snapshots.values();
        let frozen = frozen.filter(|one| !self.snapshots.cache.contains_key(one.id.as_str()));
        let reported = Reported {
            volumes: lonely.map(volume).collect(),
            snapshots: frozen.map(snapshot).collect(),
        };
        server.now.pools.insert(self.name.to_owned(), reported);
    }
}
