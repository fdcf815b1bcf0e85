//! The decisions of controllers and nodes against each other, without a network: each schedule
//! delays what nodes see, loses answers, lets time run out, and kills either side between any two
//! steps. Rough schedules have more: two controllers, deleted objects, an older etcd, nodes that
//! are gone and back, other disks. Afterwards everything runs, and the invariants must hold.
//!
//! - Data that a PersistentVolume names is never deleted, and never made again empty.
//! - At the end, each Volume object of a node that is there is named by a PersistentVolume, and is
//!   Ready if the data is in the node's pool. That of a node that is gone is Lost.
//! - A call that makes a volume never orders the deletion of data that was Ready.
//! - No snapshot is left of a clone on another node.
//! - Without rough steps the claims in the engines, the Ready volumes and the PersistentVolumes are
//!   the same.
//!
//! `BAGGAGECLAIM_TEST_SCHEDULES=100000` runs that many of each kind.

mod clones;
mod end;
mod node;
mod rough;
mod server;

use std::collections::BTreeSet;
use std::sync::Arc;

use super::claims::decide::{self, Asked, Candidate, Creation, Deletion};
use super::claims::leaks::{ApiClaims, is_leak};
use super::claims::order::Order as _;
use super::claims::{name_on, orphans};
use crate::api::{Phase, Snapshot, Volume, VolumeSpec, Wanted, number};
use crate::engine::Error;
use crate::engine::claims::{CreateClaim, claim_id};
use crate::model::{
    ClaimParameters, MutableParameters, NODE_LABEL, Node as ModelNode, NodeId, Requirement,
    Topology,
};
use crate::server::{code_of, may_go_on};
use node::Node;
use tonic::Code;

use server::{Server, Stored};

const NODES: [&str; 3] = ["node-1", "node-2", "node-3"];
const CLAIMS: usize = 4;
const STEPS: usize = 120;
const SCHEDULES: u64 = 2_000;
const ROUGH_SCHEDULES: u64 = 1_500;
/// Beyond these, schedules that have found something once.
const FOUND: [u64; 1] = [43_269];

/// A small generator: the seed is the whole schedule.
struct Random(u64);

impl Random {
    fn below(&mut self, most: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % u64::try_from(most).expect("small")).expect("small")
    }
}

/// What becomes of a claim.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    Stays,
    /// It is deleted after it is bound.
    Deleted,
    /// It is deleted before it is bound, and the provisioner forgets it.
    GivenUp,
}

/// A PersistentVolume.
#[derive(Clone, PartialEq, Eq)]
struct Bound {
    id: String,
    node: String,
    /// The data when it was bound; `None`: it was not there, so no pod can have written to it.
    content: Option<u64>,
}

/// A claim's life as the provisioner drives it.
#[derive(Clone)]
struct Life {
    request: CreateClaim,
    node: usize,
    /// The life whose volume it is a clone of.
    source: Option<usize>,
    /// What each controller has read and not acted on yet.
    read: [Option<Vec<Volume>>; 2],
    /// The order for a clone for which each controller has a snapshot taken.
    order: [Option<Volume>; 2],
    overdue: bool,
    bound: Option<Bound>,
    fate: Fate,
    done: bool,
}

struct World {
    server: Server,
    nodes: Vec<Node>,
    lives: Vec<Life>,
    /// How many contents were made.
    contents: u64,
    backup: Option<(Stored, Vec<Life>)>,
    is_rough: bool,
    has_clones: bool,
    seed: u64,
}

/// A kind of schedules.
#[derive(Clone, Copy)]
struct Kind {
    is_rough: bool,
    has_clones: bool,
}

fn candidate(name: &str) -> Candidate {
    Candidate {
        node: Arc::new(ModelNode {
            id: NodeId::new(name).expect("an id"),
            topology: Topology([(NODE_LABEL.to_owned(), name.to_owned())].into()),
        }),
        bytes: 100,
        available: 50,
        peer: true,
        takes_pods: true,
    }
}

fn life(number: usize) -> Life {
    Life {
        request: CreateClaim {
            name: format!("pvc-{}", uid(number)),
            required_bytes: 1,
            limit_bytes: None,
            parameters: ClaimParameters::default(),
            mutable: MutableParameters::default(),
            source: None,
        },
        node: 0,
        source: None,
        read: [None, None],
        order: [None, None],
        overdue: false,
        bound: None,
        fate: match number {
            1 => Fate::Deleted,
            3 => Fate::GivenUp,
            _ => Fate::Stays,
        },
        done: false,
    }
}

fn uid(number: usize) -> String {
    format!("00000000-0000-0000-0000-{number:012}")
}

/// The order for a claim on a node.
fn order(request: &CreateClaim, node: &str, wanted: Wanted) -> Volume {
    let spec = VolumeSpec {
        name: request.name.clone(),
        node_name: node.to_owned(),
        parameters: request.parameters.into(),
        made_with: request.mutable.into(),
        source: request.source.as_ref().map(Into::into),
        fetch: None,
        wanted,
        capacity: number(request.required_bytes),
        limit: 0,
        mutable: request.mutable.into(),
    };
    Volume::new(claim_id(&name_on(node, &request.name)).as_str(), spec)
}

impl World {
    fn new(seed: u64, kind: Kind) -> Self {
        let mut world = Self {
            server: Server::default(),
            nodes: NODES.iter().map(|name| Node::new(name)).collect(),
            lives: (0..CLAIMS).map(life).collect(),
            contents: 0,
            backup: None,
            is_rough: kind.is_rough,
            has_clones: kind.has_clones,
            seed,
        };
        if kind.has_clones {
            world.lives.extend(clones::lives(CLAIMS));
        }
        for node in &world.nodes {
            world.server.now.nodes.insert(node.name.to_owned());
            node.publish(&mut world.server);
        }
        world
    }

    /// One step of the call for a claim: a read, or what was decided on it.
    fn call(&mut self, number: usize, controller: usize, random: &mut Random) {
        let life = &mut self.lives[number];
        // A call goes on when its claim is deleted.
        if let Some(order) = life.order[controller].take() {
            let late = std::mem::take(&mut life.overdue);
            return self.take(number, controller, order, late, random);
        }
        if life.done && !(self.is_rough && life.bound.is_some()) {
            return;
        }
        if !self.has_source(number) {
            return;
        }
        let life = &mut self.lives[number];
        let Some(read) = life.read[controller].take() else {
            let all = self.server.now.volumes.values();
            let all = all.filter(|volume| volume.spec.name == life.request.name);
            life.read[controller] = Some(all.cloned().collect());
            return;
        };
        match life.bound.clone() {
            // A provisioner with a late watch asks again for what is bound.
            Some(_) if life.done => self.create(number, controller, &read, random),
            Some(bound) => self.delete(number, &bound, &read),
            None => self.create(number, controller, &read, random),
        }
    }

    fn delete(&mut self, number: usize, bound: &Bound, read: &[Volume]) {
        let is_given_up = self.server.is_given_up(&bound.node);
        let life = &mut self.lives[number];
        let volume = read
            .iter()
            .find(|one| one.metadata.name.as_ref() == Some(&bound.id));
        let is_over = match volume {
            None if self.server.now.volumes.contains_key(&bound.id) => false,
            // Its object is lost, or a call before this one deleted it.
            None if is_given_up => true,
            None => {
                let order = order(&life.request, &bound.node, Wanted::Absent);
                self.server.create(order);
                false
            }
            Some(volume) => match decide::delete(volume.spec.wanted, volume.reply()) {
                Deletion::Done => {
                    self.server.remove(volume);
                    true
                }
                _ if is_given_up => self.server.remove(volume),
                Deletion::Order => {
                    self.server.order_absent(volume);
                    false
                }
                Deletion::Wait => false,
                Deletion::Refused(error) => panic!("{error:?}"),
            },
        };
        if is_over {
            life.done = true;
            life.bound = None;
        }
    }

    fn create(&mut self, number: usize, controller: usize, read: &[Volume], random: &mut Random) {
        let source = match self.node_of_source(number, read) {
            Ok(source) => source,
            Err(error) => return self.is_refused(number, &error, random),
        };
        let life = &self.lives[number];
        let selected = candidate(NODES[life.node]).node.topology.clone();
        let at = Requirement {
            requisite: vec![selected.clone()],
            preferred: vec![selected],
        };
        let candidates: Vec<Candidate> = self
            .server
            .now
            .pools
            .keys()
            .map(|name| candidate(name))
            .collect();
        let asked = Asked {
            request: &life.request,
            at: &at,
            candidates: &candidates,
            source,
            overdue: life.overdue,
        };
        match asked.next(read) {
            Ok(Creation::Done(volume)) => self.bind(number, volume),
            Ok(Creation::Make(node)) => {
                let order = match &life.bound {
                    Some(bound) => order(&life.request, &bound.node, Wanted::Kept),
                    None => order(&life.request, node.id.as_str(), Wanted::Present),
                };
                let source = asked.source.clone();
                self.make_order(number, controller, order, source.as_deref());
            }
            Ok(Creation::Wait(_)) => {}
            Ok(Creation::Abandon(volume)) => self.abandon(number, volume),
            Ok(Creation::Withdraw(volume, _)) => {
                if self.server.remove(volume) {
                    self.end_temporary_of(volume);
                }
            }
            Err(error) => self.is_refused(number, &error, random),
        }
    }

    /// Orders the deletion of a volume that is not made in time, or never will be.
    fn abandon(&mut self, number: usize, volume: &Volume) {
        let named = self.lives[number].bound.as_ref().map(|bound| &*bound.id);
        if decide::check_abandon(volume, named).is_ok() {
            let is_ordered = self.order_absent(volume);
            let was_ready = matches!(volume.phase(), Some(Phase::Ready | Phase::Lost));
            assert!(
                !(was_ready && is_ordered),
                "seed {}: a call orders the deletion of what was Ready: {volume:?}",
                self.seed
            );
        }
    }

    /// A call has ended with an error.
    fn is_refused(&mut self, number: usize, error: &Error, random: &mut Random) {
        let is_final = !may_go_on(code_of(error));
        let stays = matches!(error, Error::ExistsElsewhere { .. });
        assert!(
            self.is_rough || !stays,
            "seed {}: a repeated request is refused: {error}",
            self.seed
        );
        let life = &mut self.lives[number];
        life.overdue = false;
        // The data is lost before it is bound, or that of the source of a clone.
        let is_lost = match code_of(error) {
            Code::FailedPrecondition => true,
            Code::NotFound => life.source.is_some(),
            _ => false,
        };
        if is_lost && life.bound.is_none() {
            // The user deletes the claim.
            (life.fate, life.done) = (Fate::GivenUp, true);
        } else if is_final {
            // The pod is scheduled again.
            life.node = random.below(NODES.len());
        }
    }

    /// The provisioner makes the PersistentVolume, unless it is there.
    fn bind(&mut self, number: usize, volume: &Volume) {
        let life = &mut self.lives[number];
        if life.bound.is_some() {
            return;
        }
        if life.fate == Fate::GivenUp {
            // The answer is lost, and so is the provisioner.
            life.done = true;
            return;
        }
        let id = volume.metadata.name.clone().expect("a name");
        let mut nodes = self.nodes.iter();
        let node = nodes.find(|node| node.name == volume.spec.node_name);
        let claim = node.and_then(|node| node.disk.claims.get(&id));
        life.done = life.fate != Fate::Deleted;
        life.bound = Some(Bound {
            content: claim.map(|claim| claim.created.0),
            node: volume.spec.node_name.clone(),
            id,
        });
    }

    /// Orders the deletion of what calls have left behind.
    fn delete_leaks(&mut self) {
        let claims = self.lives.iter().enumerate();
        let claims = claims.filter(|(_, life)| !(life.fate != Fate::Stays && life.done));
        let bound = self.lives.iter();
        let bound =
            bound.filter_map(|life| Some((life.request.name.clone(), life.bound.clone()?.id)));
        let known = ApiClaims {
            claims: claims.map(|(number, _)| uid(number)).collect(),
            persistent: bound.collect(),
        };
        let leaks = self.server.now.volumes.values();
        let leaks: Vec<Volume> = leaks.filter(|one| is_leak(one, &known)).cloned().collect();
        for leak in leaks {
            self.order_absent(&leak);
        }
    }

    /// Makes objects of orphans again, from reports that may be old.
    fn keep_orphans(&mut self) {
        for (node, orphans) in self.server.now.pools.clone() {
            for orphan in orphans.volumes {
                let mut lives = self.lives.iter();
                let is_needed = lives.any(|life| {
                    let bound = life.bound.as_ref();
                    life.fate == Fate::Stays && bound.is_some_and(|bound| bound.id == orphan.id)
                });
                let order = orphans::volume_order(&node, &orphan, Wanted::Kept);
                if is_needed {
                    self.server.create(order.expect("its own"));
                }
            }
        }
        let lives = self.lives.iter();
        let named: BTreeSet<&String> = lives
            .filter_map(|life| Some(&life.bound.as_ref()?.id))
            .collect();
        self.server.remove_all(|volume: &Volume| {
            let id = volume.metadata.name.as_ref().expect("a name");
            volume.is_empty_handed() && !named.contains(id)
        });
    }

    /// Gives up each node that is missing.
    fn give_up(&mut self) {
        let stored = &self.server.now;
        let missing = NODES.iter().filter(|name| !stored.nodes.contains(**name));
        let missing: Vec<&str> = missing.copied().collect();
        for node in missing {
            self.server.give_up_all::<Volume>(node);
            self.server.give_up_all::<Snapshot>(node);
            self.server.now.pools.remove(node);
        }
    }

    /// Orders the deletion of a volume, unless it was changed. That of a named one only as its own
    /// DeleteVolume does. Whether it is ordered now.
    fn order_absent(&mut self, volume: &Volume) -> bool {
        let id = volume.metadata.name.as_ref();
        let mut lives = self.lives.iter();
        let is_named = lives.any(|life| {
            let bound = life.bound.as_ref();
            life.fate == Fate::Stays && bound.is_some_and(|bound| Some(&bound.id) == id)
        });
        let is_ordered = self.server.order_absent(volume);
        assert!(
            !(is_named && is_ordered),
            "seed {}: the deletion of what a PersistentVolume names is ordered",
            self.seed
        );
        is_ordered
    }

    fn node(&mut self, number: usize, what: usize) {
        if !self.nodes[number].is_on {
            return;
        }
        match what {
            0 => self.nodes[number].see(&self.server),
            1 => {
                self.contents += 1;
                self.nodes[number].work(&mut self.server, self.contents);
            }
            2 => self.nodes[number].publish(&mut self.server),
            3 => self.nodes[number].restart(&mut self.server),
            4 => self.nodes[number].see_snapshots(&self.server),
            5 => self.nodes[number].work_snapshots(&mut self.server),
            _ => self.advance(number),
        }
    }

    /// A controller is killed: the calls are repeated.
    fn kill_controller(&mut self, controller: usize) {
        for life in &mut self.lives {
            (life.read[controller], life.overdue) = (None, false);
            life.order[controller] = None;
        }
    }

    fn step(&mut self, random: &mut Random) {
        let (node, life) = (random.below(NODES.len()), random.below(self.lives.len()));
        let controller = if self.is_rough { random.below(2) } else { 0 };
        if self.is_rough && random.below(6) == 0 {
            return self.rough_step(node, random);
        }
        if self.has_clones && random.below(3) == 0 {
            return self.clone_step(node, controller, random.below(12));
        }
        match random.below(24) {
            0..=5 => self.node(node, 0),
            6..=10 => self.node(node, 1),
            11 => self.node(node, 3),
            12 => self.lives[life].overdue = true,
            13 => self.kill_controller(controller),
            14 => self.server.sweep(),
            15 => self.delete_leaks(),
            16 if self.lives[life].fate == Fate::GivenUp && self.lives[life].bound.is_none() => {
                self.lives[life].done = true;
            }
            17 => self.node(node, 2),
            18 => self.keep_orphans(),
            _ => self.call(life, controller, random),
        }
    }
}

/// Runs one schedule for each seed.
#[expect(clippy::disallowed_methods, reason = "a setting of this test only")]
fn run(kind: Kind) {
    let schedules = std::env::var("BAGGAGECLAIM_TEST_SCHEDULES").ok();
    let schedules = schedules.map(|text| text.parse().expect("a number"));
    let usual = if kind.is_rough {
        ROUGH_SCHEDULES
    } else {
        SCHEDULES
    };
    for seed in (1..=schedules.unwrap_or(usual)).chain(FOUND) {
        let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let mut world = World::new(seed, kind);
        let steps = if kind.has_clones { 12 * STEPS } else { STEPS };
        for _ in 0..steps {
            world.step(&mut random);
        }
        world.settle(&mut random);
        world.check();
    }
}

const CALM: Kind = Kind {
    is_rough: false,
    has_clones: false,
};

#[test]
fn no_schedule_leaks_or_loses_a_claim() {
    run(CALM);
}

#[test]
fn no_rough_schedule_deletes_or_empties_what_a_persistent_volume_names() {
    run(Kind {
        is_rough: true,
        ..CALM
    });
}

#[test]
fn no_schedule_leaks_or_loses_a_clone_on_another_node() {
    run(Kind {
        has_clones: true,
        ..CALM
    });
}

#[test]
fn no_rough_schedule_deletes_a_clone_that_was_ready_or_leaves_its_snapshot() {
    run(Kind {
        is_rough: true,
        has_clones: true,
    });
}
