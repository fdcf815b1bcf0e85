//! What the controller does next for one call, given the objects as they are. Pure: no I/O, no
//! clock.
//!
//! The caller does one step, looks at the objects again, and decides again. So a lost answer, a
//! conflict, or a restart of the controller needs no code of its own.
//!
//! A call that ends in a final error leaves no volume that is wanted: the object is withdrawn
//! before the error is answered. An empty volume that its node does not make in time is abandoned
//! by an explicit order to delete it. A volume that was Ready never moves.

use std::cmp::Reverse;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;

use tonic::Code;

use crate::api::{
    Mutable, Parameters, Phase, Refusal, Snapshot, Source, Volume, VolumeSpec, VolumeStatus,
    Wanted, bytes, number,
};
use crate::engine::claims::CreateClaim;
use crate::engine::{Error, Result};
use crate::model::{MutableChange, Node, Requirement};
use crate::server::code_named;

/// A node that can make volumes.
#[derive(Debug, Clone)]
pub(in crate::k8s) struct Candidate {
    pub(in crate::k8s) node: Arc<Node>,
    /// The size of its pool.
    pub(in crate::k8s) bytes: u64,
    /// How much can be written there.
    pub(in crate::k8s) available: u64,
    /// Whether it is a peer of the others.
    pub(in crate::k8s) peer: bool,
    /// Whether its pods can start, as far as is known: it has a Node object, and was not found
    /// NotReady or cordoned.
    pub(in crate::k8s) takes_pods: bool,
}

/// The next step for CreateVolume.
#[derive(Debug)]
pub(in crate::k8s) enum Creation<'a> {
    /// Answer with this volume.
    Done(&'a Volume),
    /// Make the object, on this node.
    Make(Arc<Node>),
    /// Wait until the node answers, or time is up.
    Wait(&'a Volume),
    /// Order this volume to be deleted, and decide again.
    Abandon(&'a Volume),
    /// Nothing is left of this volume: delete the object, then answer with the error.
    Withdraw(&'a Volume, Error),
}

/// A request for a volume, and what is known beside the objects of its name.
#[derive(Debug)]
pub(in crate::k8s) struct Asked<'a> {
    pub(in crate::k8s) request: &'a CreateClaim,
    pub(in crate::k8s) at: &'a Requirement,
    pub(in crate::k8s) candidates: &'a [Candidate],
    /// The node of the source, for a clone.
    pub(in crate::k8s) source: Option<Arc<Node>>,
    /// Whether time is up.
    pub(in crate::k8s) overdue: bool,
}

pub(in crate::k8s) fn refusal(code: Code, message: String) -> Error {
    let code = code.into();
    Error::Remote { code, message }
}

/// The error that a node reported.
pub(in crate::k8s) fn of_node(node: &str, error: &Refusal) -> Error {
    let message = format!("node {node}: {}", error.message);
    refusal(code_named(&error.code), message)
}

impl Asked<'_> {
    /// Decides, given all volumes of the request's name.
    pub(in crate::k8s) fn next<'v>(&self, volumes: &'v [Volume]) -> Result<Creation<'v>> {
        let wanted = |volume: &&Volume| volume.spec.wanted != Wanted::Absent;
        let mut live = volumes.iter().filter(wanted);
        let ready = live.clone().find(|one| one.phase() == Some(Phase::Ready));
        if let Some(ready) = ready {
            self.compare(&ready.spec, Some(ready))?;
            self.check_place(ready)?;
            return Ok(Creation::Done(ready));
        }
        let Some(volume) = live.next() else {
            return self.first(volumes).map(Creation::Make);
        };
        self.pending(volume)
    }

    /// For a volume that is wanted and not Ready.
    fn pending<'v>(&self, volume: &'v Volume) -> Result<Creation<'v>> {
        let node = &volume.spec.node_name;
        if volume.phase() == Some(Phase::Lost) {
            return Err(lost(volume));
        }
        if let Some(status) = volume.answer()
            && status.phase == Phase::Failed
        {
            let error = status.error.as_ref().map_or_else(
                || refusal(Code::Internal, format!("node {node} gives no reason")),
                |error| of_node(node, error),
            );
            return Ok(Creation::Withdraw(volume, error));
        }
        self.compare(&volume.spec, None)?;
        let is_allowed = self
            .allowed_nodes()
            .is_ok_and(|all| all.iter().any(|one| one.id.as_str() == node));
        if volume.spec.wanted == Wanted::Kept && self.overdue {
            return Err(is_kept(volume));
        }
        if (is_allowed || volume.spec.wanted == Wanted::Kept) && !self.overdue {
            return Ok(Creation::Wait(volume));
        }
        if is_allowed && self.request.source.is_some() {
            // It goes on there.
            let status = volume
                .status
                .as_ref()
                .filter(|_| volume.spec.fetch.is_some());
            let now = status.and_then(|status| status.error.as_ref());
            let now = now
                .map(|now| format!(": {}", now.message))
                .unwrap_or_default();
            return Err(refusal(
                Code::Aborted,
                format!("node {node} has not made the clone yet{now}; try again"),
            ));
        }
        Ok(Creation::Abandon(volume))
    }

    /// The node for a new volume.
    fn first(&self, volumes: &[Volume]) -> Result<Arc<Node>> {
        let nodes = self.allowed_nodes()?;
        let is_free = |node: &&Arc<Node>| {
            let id = node.id.as_str();
            !volumes.iter().any(|volume| volume.spec.node_name == id)
        };
        let free = nodes.iter().find(is_free).cloned();
        if let (Some(node), Some(source)) = (&free, &self.source) {
            self.refuse_no_peers(node, source)?;
        }
        let (Some(node), false) = (free, self.overdue) else {
            let nodes: Vec<&str> = nodes.iter().map(|node| node.id.as_str()).collect();
            return Err(refusal(
                Code::ResourceExhausted,
                format!(
                    "the driver on node {} did not make the volume in time; look at its pod in the \
                     namespace of the driver",
                    nodes.join(", ")
                ),
            ));
        };
        Ok(node)
    }

    /// The nodes that may have the volume, the best first.
    ///
    /// The node that the scheduler selected for the pod is the only one for an empty volume: on
    /// another, the pod may be forbidden. A clone is made where its source is, and the scheduler
    /// follows; unless its class allows other nodes. Then it is as an empty volume, and where no
    /// node was selected its source's node is the best.
    fn allowed_nodes(&self) -> Result<Vec<Arc<Node>>> {
        if let Some(source) = &self.source {
            let here = self.at.choose([source]);
            if !self.request.parameters.clone_elsewhere {
                here.map_err(|_| not_at_source(source))?;
                return Ok(vec![source.clone()]);
            }
            let selected = self.at.selected();
            if here.is_ok() && selected.is_none_or(|node| source.topology.is_in(node)) {
                return Ok(vec![source.clone()]);
            }
        }
        let Some(selected) = self.at.selected() else {
            let nodes = self.by_room();
            return Ok(self.at.choose(nodes)?.into_iter().cloned().collect());
        };
        let nodes = self.candidates.iter().map(|candidate| &candidate.node);
        let only = Requirement {
            requisite: vec![selected.clone()],
            preferred: Vec::new(),
        };
        Ok(only.choose(nodes)?.into_iter().cloned().collect())
    }

    /// The nodes without regard to the request's topology: those with most room first. Where a pod
    /// cannot start, or the pool is too small, comes last. Among pools whose room is within an
    /// eighth of the best, a hash of the claim's name chooses: their reports are rough and late, so
    /// many claims at once would all go to one node.
    fn by_room(&self) -> Vec<&Arc<Node>> {
        let required = self.request.required_bytes;
        let class = |candidate: &Candidate| (candidate.bytes < required, !candidate.takes_pods);
        let mut candidates: Vec<&Candidate> = self.candidates.iter().collect();
        let allowed = candidates.iter();
        let allowed = allowed.filter(|candidate| self.at.choose([&candidate.node]).is_ok());
        let best = allowed.map(|candidate| (class(candidate), Reverse(candidate.available)));
        let most = best.min().map_or(0, |(_, Reverse(most))| most);
        candidates.sort_by_cached_key(|candidate| {
            let lacks = most.saturating_sub(candidate.available);
            let lacks = if lacks <= most / 8 { 0 } else { lacks };
            let mut turn = DefaultHasher::new();
            (&self.request.name, candidate.node.id.as_str()).hash(&mut turn);
            (class(candidate), lacks, turn.finish())
        });
        candidates
            .into_iter()
            .map(|candidate| &candidate.node)
            .collect()
    }

    /// Whether another node may be better than this one, if its pods cannot start now.
    pub(in crate::k8s) fn may_pass_over(&self, node: &Node) -> bool {
        let mut candidates = self.candidates.iter();
        self.request.source.is_none()
            && self.at.selected().is_none()
            && candidates.any(|candidate| candidate.node.id == node.id && candidate.takes_pods)
    }

    /// Refuses a clone that would have to be fetched between nodes of which one is no peer. After
    /// this error the pod is scheduled again, maybe where the source is.
    fn refuse_no_peers(&self, node: &Node, source: &Node) -> Result<()> {
        if node.id == source.id {
            return Ok(());
        }
        let is_peer = |node: &Node| {
            let mut candidates = self.candidates.iter();
            candidates.any(|candidate| candidate.node.id == node.id && candidate.peer)
        };
        match [node, source].into_iter().find(|node| !is_peer(node)) {
            None => Ok(()),
            Some(other) => Err(no_peer(node, source, other)),
        }
    }

    /// Refuses a volume whose node the request does not allow.
    fn check_place(&self, ready: &Volume) -> Result<()> {
        let id = ready.spec.node_name.as_str();
        let mut candidates = self.candidates.iter();
        // Without a pool, its labels are unknown and cannot be compared.
        let Some(candidate) = candidates.find(|candidate| candidate.node.id.as_str() == id) else {
            return Ok(());
        };
        let name = ready.spec.name.clone();
        let chosen = self.at.choose([&candidate.node]);
        chosen
            .map(drop)
            .map_err(|elsewhere| Error::ExistsElsewhere { name, elsewhere })
    }

    /// Refuses a volume that another request made.
    fn compare(&self, spec: &VolumeSpec, ready: Option<&Volume>) -> Result<()> {
        let request = self.request;
        let source = request.source.as_ref().map(Source::from);
        let mutable = Mutable::from(request.mutable);
        let status = ready.and_then(|ready| ready.status.as_ref());
        let capacity = bytes(status.map_or(spec.capacity, |status| status.capacity));
        let too_large = request.limit_bytes.is_some_and(|limit| capacity > limit);
        let what = if spec.source != source {
            "source"
        } else if spec.parameters != Parameters::from(request.parameters) {
            "parameters"
        } else if spec.made_with != mutable && spec.mutable != mutable {
            "mutable_parameters"
        } else if capacity < request.required_bytes || too_large {
            "capacity"
        } else {
            return Ok(());
        };
        let name = request.name.clone();
        Err(Error::Exists { name, what })
    }
}

/// Whether a volume waits for content of another node, or has failed to get it. A volume that was
/// made does not, even if its disk is away now.
pub(in crate::k8s) fn lacks_content(volume: &Volume) -> bool {
    volume.spec.fetch.is_some()
        && matches!(volume.phase(), None | Some(Phase::Fetching | Phase::Failed))
}

/// Refuses to abandon a volume that a PersistentVolume names; `named` is read just before. It was
/// Ready once: its object was deleted by hand then, and another controller made it again.
pub(in crate::k8s) fn check_abandon(volume: &Volume, named: Option<&str>) -> Result<()> {
    if named.is_some() && volume.metadata.name.as_deref() == named {
        return Err(is_kept(volume));
    }
    Ok(())
}

/// The error for a volume that a PersistentVolume names and that its node has not told of yet. The
/// data is there, and never given up.
fn is_kept(volume: &Volume) -> Error {
    let node = &volume.spec.node_name;
    let message = format!("node {node} has the volume and has not answered yet; try again");
    refusal(Code::Aborted, message)
}

/// The error for a clone that may not be where its source is. Only the class can help: after this
/// error the pod is scheduled again, and the scheduler does not know of the source.
fn not_at_source(source: &Node) -> Error {
    refusal(
        Code::ResourceExhausted,
        format!(
            "a clone is created on the node of its source, {}, and the request asks for another \
             node. Use a StorageClass with volumeBindingMode: Immediate for clones, such as \
             baggageclaim-clone: pods then follow the clone",
            source.id.as_str()
        ),
    )
}

/// The error for a clone that cannot be fetched, because a node is no peer.
fn no_peer(node: &Node, source: &Node, other: &Node) -> Error {
    refusal(
        Code::ResourceExhausted,
        format!(
            "a clone on node {} has to fetch its content from node {}, and node {} is no peer. Add \
             the component deploy/components/peers, or use a StorageClass without cloneElsewhere",
            node.id.as_str(),
            source.id.as_str(),
            other.id.as_str()
        ),
    )
}

/// The error for a volume without an object: NOT_FOUND only if no PersistentVolume needs it.
/// `named` is the name of one that does.
pub(in crate::k8s) fn no_object(id: &str, named: Option<&str>) -> Error {
    let Some(named) = named else {
        return Error::NoSuchClaim(id.to_owned());
    };
    refusal(
        Code::Unavailable,
        format!(
            "volume {id} has no Volume object, and PersistentVolume {named:?} names it; the object \
             is created again when the volume's node reports the data"
        ),
    )
}

fn why_lost(is_node_gone: bool) -> &'static str {
    if is_node_gone {
        "which was deleted from the cluster"
    } else {
        "whose pool does not have it any more"
    }
}

/// The error for a volume whose data its node does not have any more.
fn lost(volume: &Volume) -> Error {
    let id = volume.metadata.name.as_deref().unwrap_or_default();
    let node = &volume.spec.node_name;
    let gone = why_lost(volume.is_node_gone());
    refusal(
        Code::FailedPrecondition,
        format!(
            "the data of volume {id} was on node {node}, {gone}; the volume is not created again \
             empty. Delete the claim, or bring back the disk"
        ),
    )
}

/// The error for a source on a node that was given up.
pub(in crate::k8s) fn given_up(source: &str, node: &str) -> Error {
    let message = format!(
        "the source {source} is on node {node}, which was deleted from the cluster; it can be \
         copied again when the node is back with its disk"
    );
    refusal(Code::FailedPrecondition, message)
}

/// Refuses to copy a volume that its node does not have.
pub(in crate::k8s) fn check_source(volume: &Volume) -> Result<()> {
    if volume.is_node_gone() {
        let id = volume.metadata.name.as_deref().unwrap_or_default();
        return Err(given_up(id, &volume.spec.node_name));
    }
    ready(volume).map(drop)
}

/// Refuses to restore a snapshot that its node does not have.
pub(in crate::k8s) fn check_snapshot(snapshot: &Snapshot) -> Result<()> {
    if snapshot.is_node_gone() {
        let id = snapshot.metadata.name.as_deref().unwrap_or_default();
        return Err(given_up(id, &snapshot.spec.node_name));
    }
    if snapshot.phase() == Some(Phase::Lost) {
        return Err(lost_snapshot(snapshot));
    }
    Ok(())
}

/// The error for a snapshot whose data its node does not have any more.
fn lost_snapshot(snapshot: &Snapshot) -> Error {
    let id = snapshot.metadata.name.as_deref().unwrap_or_default();
    let node = &snapshot.spec.node_name;
    let gone = why_lost(snapshot.is_node_gone());
    refusal(
        Code::FailedPrecondition,
        format!("snapshot {id} was on node {node}, {gone}"),
    )
}

/// The next step for DeleteVolume and DeleteSnapshot.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::k8s) enum Deletion {
    /// Answer: the data is gone. The object may go.
    Done,
    /// Order it.
    Order,
    /// Wait until the node answers.
    Wait,
    /// The node refuses. The order stays, and the node tries again by itself.
    Refused(Refusal),
}

/// Decides, given the order and the answer of the node, if it has answered the present order.
pub(in crate::k8s) fn delete(
    wanted: Wanted,
    answer: Option<(Phase, Option<&Refusal>)>,
) -> Deletion {
    match (wanted, answer) {
        (Wanted::Absent, Some((Phase::Gone, _))) => Deletion::Done,
        (Wanted::Absent, Some((_, Some(error)))) => Deletion::Refused(error.clone()),
        (Wanted::Absent, _) => Deletion::Wait,
        _ => Deletion::Order,
    }
}

/// What ControllerExpandVolume or ControllerModifyVolume wants of a volume. A call compares and
/// writes its own field only: a late call must not undo one of the other kind.
#[derive(Debug, Clone, Copy)]
pub(in crate::k8s) enum Aim {
    /// At least so many bytes, and at most the limit.
    Capacity {
        required: u64,
        limit: Option<u64>,
    },
    Mutable(MutableChange),
}

/// A field of `spec`, as an [`Aim`] changes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::k8s) enum Field {
    Capacity(i64),
    Mutable(Mutable),
}

/// The answer of the node that has a volume.
fn ready(volume: &Volume) -> Result<&VolumeStatus> {
    match (&volume.status, volume.phase()) {
        (Some(status), Some(Phase::Ready)) if volume.spec.wanted != Wanted::Absent => Ok(status),
        _ => Err(not_ready(volume)),
    }
}

/// The error for a volume that its node does not report as Ready.
pub(in crate::k8s) fn not_ready(volume: &Volume) -> Error {
    match volume.phase() {
        Some(Phase::Lost) => lost(volume),
        None if volume.was_ready() && volume.spec.wanted != Wanted::Absent => is_kept(volume),
        _ => Error::NoSuchClaim(volume.metadata.name.clone().unwrap_or_default()),
    }
}

/// The next step for ControllerExpandVolume and ControllerModifyVolume.
#[derive(Debug)]
pub(in crate::k8s) enum Change {
    /// Answer.
    Done,
    /// Write this to `spec`.
    Write(Field),
    /// Wait until the node answers.
    Wait,
    /// The node refuses: write back what it has, then answer with the error.
    Restore(Field, Error),
}

/// Decides what brings a volume to an aim.
pub(in crate::k8s) fn change(volume: &Volume, aim: Aim) -> Result<Change> {
    let status = ready(volume)?;
    let [ordered, wanted, had] = match aim {
        Aim::Capacity { required, limit } => {
            let had = bytes(status.capacity);
            let wanted = had.max(required);
            if let Some(limit) = limit
                && wanted > limit
            {
                return Err(Error::OutOfRange {
                    wanted,
                    why: format!("at most {limit} are allowed, and a volume does not shrink"),
                });
            }
            // It does not shrink, whatever is ordered meanwhile.
            if wanted == had {
                return Ok(Change::Done);
            }
            [volume.spec.capacity, number(wanted), status.capacity].map(Field::Capacity)
        }
        Aim::Mutable(change) => {
            let ordered = volume.spec.mutable;
            let wanted = change.over(ordered.into()).into();
            [ordered, wanted, status.mutable].map(Field::Mutable)
        }
    };
    if ordered != wanted {
        return Ok(Change::Write(wanted));
    }
    Ok(match volume.answer() {
        None => Change::Wait,
        Some(status) => match &status.error {
            // The node changes each field that it can. It refused a size, which a call left in
            // `spec`.
            Some(_) if wanted == had && volume.spec.capacity > status.capacity => Change::Done,
            Some(error) => Change::Restore(had, of_node(&volume.spec.node_name, error)),
            None => Change::Done,
        },
    })
}

/// The next step for CreateSnapshot and CreateVolumeGroupSnapshot.
#[derive(Debug)]
pub(in crate::k8s) enum Taking {
    /// Answer with this snapshot.
    Done,
    /// Wait until the node answers.
    Wait,
    /// Nothing is left of it: delete the object, then answer with the error.
    Withdraw(Error),
}

/// Decides, given the object of the request's name.
pub(in crate::k8s) fn take(snapshot: &Snapshot, sources: &[String], group: bool) -> Result<Taking> {
    let spec = &snapshot.spec;
    if spec.sources != sources || spec.group != group {
        let name = spec.name.clone();
        let what = if group { "set of sources" } else { "source" };
        return Err(Error::Exists { name, what });
    }
    let node = &spec.node_name;
    if spec.wanted == Wanted::Absent {
        let message = format!("{:?} is being deleted on node {node}; try again", spec.name);
        return Err(refusal(Code::Aborted, message));
    }
    Ok(match snapshot.phase() {
        Some(Phase::Ready) => Taking::Done,
        Some(Phase::Lost) => {
            return Err(lost_snapshot(snapshot));
        }
        _ => match snapshot.answer().and_then(|status| status.error.as_ref()) {
            Some(error) => Taking::Withdraw(of_node(node, error)),
            None => Taking::Wait,
        },
    })
}

#[cfg(test)]
mod tests;
