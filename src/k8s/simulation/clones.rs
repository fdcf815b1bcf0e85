//! Clones on other nodes than their source's: what a call for one does beyond that for an empty
//! volume, and what becomes of the snapshots that they are made of.

use std::sync::Arc;

use super::node::Answer;
use super::{Fate, Life, Random, World, candidate, life};
use crate::api::{Fetch, Phase, Snapshot, SnapshotSpec, Volume, Wanted};
use crate::engine::Error;
use crate::engine::claims::snapshot_id;
use crate::k8s::claims::decide::{self, Taking};
use crate::k8s::claims::{orphans, temporary};
use crate::model::{ClaimParameters, ClaimSource, Node as ModelNode};

/// The clones of a world: which life has the source of each, and its fate.
const CLONES: [(usize, Fate); 4] = [
    (0, Fate::Stays),
    (0, Fate::GivenUp),
    // Its source is deleted some time.
    (1, Fate::Stays),
    (2, Fate::Deleted),
];

/// The lives of the clones, which follow those of their sources.
pub(super) fn lives(first: usize) -> impl Iterator<Item = Life> {
    let clones = CLONES.into_iter().enumerate();
    clones.map(move |(number, (source, fate))| {
        let mut clone = life(first + number);
        clone.request.parameters = ClaimParameters {
            clone_elsewhere: true,
            ..ClaimParameters::default()
        };
        (clone.source, clone.fate) = (Some(source), fate);
        clone.node = 1 + number % 2;
        clone
    })
}

impl World {
    /// Whether a claim can be asked for: that of a clone names its source, which is bound.
    pub(super) fn has_source(&mut self, number: usize) -> bool {
        let life = &self.lives[number];
        let Some(source) = life.source else {
            return true;
        };
        if life.request.source.is_some() {
            return true;
        }
        let source = &self.lives[source];
        let (bound, is_over) = (source.bound.clone(), source.done);
        let life = &mut self.lives[number];
        if let Some(bound) = bound {
            let id = bound.id.parse().expect("an id");
            life.request.source = Some(ClaimSource::Claim(id));
            return true;
        }
        if is_over {
            (life.fate, life.done) = (Fate::GivenUp, true);
        }
        false
    }

    /// The volume that a clone is made of, read live.
    fn wanted_source(&self, id: &str) -> Result<&Volume, Error> {
        let volume = self.server.now.volumes.get(id);
        let volume = volume.filter(|volume| volume.spec.wanted != Wanted::Absent);
        let volume = volume.ok_or_else(|| Error::NoSuchClaim(id.to_owned()))?;
        decide::check_source(volume)?;
        Ok(volume)
    }

    /// The node of a clone's source, as `Cluster::node_of_source` finds it.
    pub(super) fn node_of_source(
        &mut self,
        number: usize,
        read: &[Volume],
    ) -> Result<Option<Arc<ModelNode>>, Error> {
        let Some(ClaimSource::Claim(id)) = self.lives[number].request.source.clone() else {
            return Ok(None);
        };
        let mut volumes = read.iter();
        let begun = volumes.find(|volume| volume.spec.wanted != Wanted::Absent);
        let node = match begun {
            Some(begun) => match &begun.spec.fetch {
                Some(fetch) => fetch.node_name.clone(),
                None => begun.spec.node_name.clone(),
            },
            None => self.wanted_source(id.as_str())?.spec.node_name.clone(),
        };
        if self.server.now.pools.contains_key(&node) {
            return Ok(Some(candidate(&node).node));
        }
        if let Some(begun) = begun.filter(|it| it.phase() == Some(Phase::Ready)) {
            return Ok(Some(candidate(&begun.spec.node_name).node));
        }
        if !self.server.is_given_up(&node) {
            return Ok(Some(candidate(&node).node));
        }
        if let Some(begun) = begun.filter(|it| decide::lacks_content(it)) {
            self.abandon(number, begun);
        }
        Err(decide::given_up(id.as_str(), &node))
    }

    /// Makes the object of an order. For a clone on another node than its source's, the snapshot
    /// comes first: later steps of the call go on with it.
    pub(super) fn make_order(
        &mut self,
        number: usize,
        controller: usize,
        order: Volume,
        source: Option<&ModelNode>,
    ) {
        let is_here = |source: &ModelNode| source.id.as_str() == order.spec.node_name.as_str();
        if order.spec.wanted == Wanted::Present && source.is_some_and(|it| !is_here(it)) {
            self.lives[number].order[controller] = Some(order);
        } else {
            self.server.create(order);
        }
    }

    /// One step of the call that has a snapshot taken for this order, and then makes the object.
    pub(super) fn take(
        &mut self,
        number: usize,
        controller: usize,
        mut order: Volume,
        late: bool,
        random: &mut Random,
    ) {
        if order.spec.fetch.is_some() {
            return self.server.create(order);
        }
        let Some(ClaimSource::Claim(source)) = self.lives[number].request.source.clone() else {
            unreachable!("it is a clone");
        };
        let name = temporary::name_for(order.metadata.name.as_ref().expect("a name"));
        let id = snapshot_id(&name);
        let sources = [source.to_string()];
        let Some(object) = self.server.now.snapshots.get(id.as_str()).cloned() else {
            match self.node_to_freeze_on(source.as_str()) {
                Ok(node_name) => {
                    let spec = SnapshotSpec {
                        name,
                        node_name,
                        sources: sources.to_vec(),
                        group: false,
                        wanted: Wanted::Present,
                    };
                    self.server.create(Snapshot::new(id.as_str(), spec));
                    self.lives[number].order[controller] = Some(order);
                }
                Err(error) => self.is_refused(number, &error, random),
            }
            return;
        };
        match decide::take(&object, &sources, false) {
            Ok(Taking::Done) => {
                let source = self.server.now.volumes.get(source.as_str());
                // The call knows the node of the source from before.
                let node_name = source.map_or(&object.spec.node_name, |it| &it.spec.node_name);
                order.spec.fetch = Some(Fetch {
                    node_name: node_name.clone(),
                    snapshot: id.to_string(),
                });
                self.lives[number].order[controller] = Some(order);
            }
            Ok(Taking::Wait) if late => {}
            Ok(Taking::Wait) => self.lives[number].order[controller] = Some(order),
            Ok(Taking::Withdraw(error)) => {
                if self.server.remove(&object) {
                    self.is_refused(number, &error, random);
                }
            }
            Err(error) => self.is_refused(number, &error, random),
        }
    }

    fn node_to_freeze_on(&self, source: &str) -> Result<String, Error> {
        let node = self.wanted_source(source)?.spec.node_name.clone();
        if self.server.is_given_up(&node) {
            return Err(decide::given_up(source, &node));
        }
        Ok(node)
    }

    /// Orders the deletion of the snapshot of a volume whose object is deleted.
    pub(super) fn end_temporary_of(&mut self, volume: &Volume) {
        if volume.spec.fetch.is_some() {
            let name = temporary::name_for(volume.metadata.name.as_ref().expect("a name"));
            let now = self.server.now.snapshots.get(snapshot_id(&name).as_str());
            if let Some(snapshot) = now.cloned() {
                self.server.order_absent(&snapshot);
            }
        }
    }

    /// Orders the deletion of snapshots that are needed no more. The grace of those without a
    /// volume is over.
    pub(super) fn end_temporary(&mut self, controller: usize) {
        let all: Vec<Snapshot> = self.server.now.snapshots.values().cloned().collect();
        for snapshot in all {
            let volume = temporary::volume_of(&snapshot.spec.name).expect("for a clone");
            let mut orders = self
                .lives
                .iter()
                .filter_map(|life| life.order[controller].as_ref());
            let is_held = orders.any(|order| order.metadata.name.as_deref() == Some(volume));
            let live = self.server.now.volumes.get(volume);
            let is_over = match live {
                Some(volume) => temporary::is_over(volume),
                None => snapshot.status.is_some(),
            };
            if snapshot.spec.wanted != Wanted::Absent && is_over && !is_held {
                self.server.order_absent(&snapshot);
            }
        }
    }

    /// Orders the deletion of snapshots that have no object, from reports that may be old.
    pub(super) fn end_orphans(&mut self) {
        for (node, reported) in self.server.now.pools.clone() {
            for orphan in reported.snapshots {
                let order = orphans::snapshot_order(&node, &orphan, Wanted::Absent);
                self.server.create(order.expect("its own"));
            }
        }
    }

    /// One step of each fetch of a node.
    pub(super) fn advance(&mut self, number: usize) {
        self.contents += 1;
        let held = self.nodes.iter().map(|node| {
            let snapshots = node.disk.snapshots.keys().cloned();
            (node.name, node.is_on, snapshots.collect::<Vec<String>>())
        });
        let held: Vec<_> = held.collect();
        let ask = |fetch: &Fetch| {
            let other = held.iter().find(|(name, ..)| *name == fetch.node_name);
            match other.expect("a node") {
                (_, false, _) => Answer::Silent,
                (_, true, snapshots) if snapshots.contains(&fetch.snapshot) => Answer::Here,
                (_, true, _) => Answer::Gone,
            }
        };
        self.nodes[number].advance(&self.server, self.contents, ask);
    }

    /// At the end, no snapshot is left of a clone.
    pub(super) fn check_snapshots(&self) {
        let seed = self.seed;
        let objects = &self.server.now.snapshots;
        assert!(objects.is_empty(), "seed {seed}: not needed: {objects:?}");
        for node in self.nodes.iter().filter(|node| node.is_on) {
            let held = &node.disk.snapshots;
            assert!(held.is_empty(), "seed {seed}: {} has {held:?}", node.name);
        }
    }

    pub(super) fn clone_step(&mut self, node: usize, controller: usize, what: usize) {
        match what {
            0..=2 => self.node(node, 4),
            3..=5 => self.node(node, 5),
            6..=9 => self.node(node, 6),
            10 => self.end_temporary(controller),
            _ => self.end_orphans(),
        }
    }
}
