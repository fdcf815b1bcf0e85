//! A node of the simulation: its agent, and its disk. A disk survives all; a restart of the driver
//! forgets the rest.

use std::collections::{BTreeMap, BTreeSet};

use super::server::Server;
use crate::api::{OrphanVolume, Volume, VolumeStatus, number};
use crate::engine::claims::{CreateClaim, claim_id};
use crate::k8s::agent::decide as agent;
use crate::k8s::agent::decide::VolumeStep;
use crate::model::{OwnerView, PersistentVolume, Timestamp};

/// A disk with a pool.
#[derive(Default)]
pub(super) struct Disk {
    pub(super) pool: String,
    pub(super) claims: BTreeMap<String, PersistentVolume>,
}

/// A node.
pub(super) struct Node {
    pub(super) name: &'static str,
    pub(super) is_on: bool,
    pub(super) disk: Disk,
    /// Another disk, which is not in the node.
    pub(super) other: Disk,
    /// How much of the log it has seen.
    seen: usize,
    cache: BTreeMap<String, Volume>,
    queue: BTreeSet<String>,
    /// The order that it has carried out, and the status that it has not written yet.
    unwritten: Option<(Volume, VolumeStatus)>,
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
        source: None,
        layers: Vec::new(),
        made: false,
        view: OwnerView::default(),
        attached: Vec::new(),
    }
}

impl Node {
    pub(super) fn new(name: &'static str) -> Self {
        let disk = |number: u32| Disk {
            pool: format!("pool {number} of {name}"),
            claims: BTreeMap::new(),
        };
        Self {
            name,
            is_on: true,
            disk: disk(1),
            other: disk(2),
            seen: 0,
            cache: BTreeMap::new(),
            queue: BTreeSet::new(),
            unwritten: None,
        }
    }

    /// A start: everything is listed.
    pub(super) fn restart(&mut self, server: &Server) {
        let ours = server.now.volumes.iter();
        let ours = ours.filter(|(_, volume)| volume.spec.node_name == self.name);
        self.cache = ours
            .map(|(name, volume)| (name.clone(), volume.clone()))
            .collect();
        self.queue = self.cache.keys().cloned().collect();
        self.seen = server.log.len();
        self.unwritten = None;
    }

    /// Takes the next event of its watch.
    pub(super) fn see(&mut self, server: &Server) {
        let Some((name, volume)) = server.log.get(self.seen) else {
            return;
        };
        self.seen += 1;
        match volume {
            Some(volume) if volume.spec.node_name == self.name => {
                self.cache.insert(name.clone(), volume.clone());
                self.queue.insert(name.clone());
            }
            Some(_) => {}
            None => drop(self.cache.remove(name)),
        }
    }

    /// One step of a job.
    pub(super) fn work(&mut self, server: &mut Server, content: u64) {
        if let Some((volume, status)) = self.unwritten.take() {
            server.report(&volume, status);
            return;
        }
        let Some(name) = self.queue.pop_first() else {
            return;
        };
        let Some(volume) = self.cache.get(&name).cloned() else {
            return;
        };
        let Disk { pool, claims } = &mut self.disk;
        let status = match agent::volume(&volume, pool, claims.get(&name)) {
            VolumeStep::Nothing => return,
            VolumeStep::Report(status) => status,
            VolumeStep::Create(request) => {
                // The engine makes a claim of a name once.
                let made = claims.entry(name.clone());
                let made = made.or_insert_with(|| claim(&request, content));
                assert_eq!(made.id.as_str(), name);
                agent::created(&volume, pool, Ok(&*made))
            }
            VolumeStep::Change { .. } => unreachable!("no call changes a volume here"),
            VolumeStep::Delete => {
                claims.remove(&name);
                agent::deleted(&volume, pool, None)
            }
        };
        self.unwritten = Some((volume, status));
    }

    /// Publishes its pool, with what its own watch does not name.
    pub(super) fn publish(&self, server: &mut Server) {
        let lonely = self.disk.claims.values();
        let lonely = lonely.filter(|claim| !self.cache.contains_key(claim.id.as_str()));
        let suffix = format!("@{}", self.name);
        let orphan = |claim: &PersistentVolume| OrphanVolume {
            id: claim.id.to_string(),
            name: claim.name.strip_suffix(&suffix).expect("ours").to_owned(),
            parameters: claim.parameters.into(),
            made_with: claim.mutable.into(),
            source: None,
            capacity: number(claim.capacity),
            mutable: claim.mutable.into(),
        };
        let pools = &mut server.now.pools;
        pools.insert(self.name.to_owned(), lonely.map(orphan).collect());
    }
}
