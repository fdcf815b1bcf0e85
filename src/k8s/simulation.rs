//! The decisions of the controller and of the nodes against each other, without a network: each
//! schedule delays what nodes see, loses answers, lets time run out, and kills either side between
//! any two steps. Afterwards everything runs, and the invariant must hold: the claims in the
//! engines, the Ready volumes and the PersistentVolumes are the same.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::agent::decide as agent;
use super::agent::decide::VolumeStep;
use super::claims::decide::{self, Asked, Creation, Deletion, Place};
use super::claims::leaks::{Known, is_leak};
use super::claims::name_on;
use crate::api::{Phase, Volume, VolumeSpec, VolumeStatus, Wanted, number};
use crate::engine::Error;
use crate::engine::claims::{CreateClaim, claim_id};
use crate::model::{
    ClaimParameters, MutableParameters, NODE_LABEL, Node, NodeId, OwnerView, PersistentVolume,
    Requirement, Timestamp, Topology,
};
use crate::server::{code_of, may_go_on};

const NODES: [&str; 3] = ["node-1", "node-2", "node-3"];
const CLAIMS: usize = 4;
const STEPS: usize = 120;
const SCHEDULES: u64 = 5_000;

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

/// The API server.
#[derive(Default)]
struct Server {
    volumes: BTreeMap<String, Volume>,
    version: u64,
    /// Each change, in order; `None`: deleted.
    log: Vec<(String, Option<Volume>)>,
}

impl Server {
    fn put(&mut self, mut volume: Volume) {
        self.version += 1;
        let name = volume.metadata.name.clone().expect("a name");
        volume.metadata.resource_version = Some(self.version.to_string());
        self.log.push((name.clone(), Some(volume.clone())));
        self.volumes.insert(name, volume);
    }

    fn create(&mut self, mut volume: Volume) {
        let name = volume.metadata.name.clone().expect("a name");
        if !self.volumes.contains_key(&name) {
            volume.metadata.generation = Some(1);
            self.put(volume);
        }
    }

    /// The stored volume, if it is still the one that was read.
    fn unchanged(&self, read: &Volume) -> Option<Volume> {
        let stored = self.volumes.get(read.metadata.name.as_deref()?)?;
        let is_same = stored.metadata.resource_version == read.metadata.resource_version;
        is_same.then(|| stored.clone())
    }

    fn order_absent(&mut self, read: &Volume) {
        if let Some(mut volume) = self.unchanged(read) {
            volume.spec.wanted = Wanted::Absent;
            volume.metadata.generation = volume.metadata.generation.map(|number| number + 1);
            self.put(volume);
        }
    }

    fn report(&mut self, read: &Volume, status: VolumeStatus) {
        if let Some(mut volume) = self.unchanged(read) {
            volume.status = Some(status);
            self.put(volume);
        }
    }

    fn remove(&mut self, read: &Volume) -> bool {
        let name = read.metadata.name.clone().expect("a name");
        if self.unchanged(read).is_some() {
            self.volumes.remove(&name);
            self.log.push((name.clone(), None));
        }
        !self.volumes.contains_key(&name)
    }

    fn sweep(&mut self) {
        let is_gone = |volume: &&Volume| {
            volume.spec.wanted == Wanted::Absent && volume.phase() == Some(Phase::Gone)
        };
        let gone: Vec<Volume> = self.volumes.values().filter(is_gone).cloned().collect();
        for volume in gone {
            self.remove(&volume);
        }
    }
}

/// A node: its engine survives a kill, all else does not.
#[derive(Default)]
struct Agent {
    claims: BTreeMap<String, PersistentVolume>,
    /// How much of the log it has seen.
    seen: usize,
    cache: BTreeMap<String, Volume>,
    queue: BTreeSet<String>,
    /// The order that it has carried out, and the status that it has not written yet.
    unwritten: Option<(Volume, VolumeStatus)>,
}

fn claim(request: &CreateClaim) -> PersistentVolume {
    PersistentVolume {
        id: claim_id(&request.name),
        name: request.name.clone(),
        created: Timestamp(1),
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

impl Agent {
    /// A start: everything is listed.
    fn restart(&mut self, node: &str, server: &Server) {
        let ours = server.volumes.iter();
        let ours = ours.filter(|(_, volume)| volume.spec.node_name == node);
        self.cache = ours
            .map(|(name, volume)| (name.clone(), volume.clone()))
            .collect();
        self.queue = self.cache.keys().cloned().collect();
        self.seen = server.log.len();
        self.unwritten = None;
    }

    fn see(&mut self, node: &str, server: &Server) {
        let Some((name, volume)) = server.log.get(self.seen) else {
            return;
        };
        self.seen += 1;
        match volume {
            Some(volume) if volume.spec.node_name == node => {
                self.cache.insert(name.clone(), volume.clone());
                self.queue.insert(name.clone());
            }
            Some(_) => {}
            None => drop(self.cache.remove(name)),
        }
    }

    fn work(&mut self, node: &str, server: &mut Server) {
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
        let pool = format!("pool of {node}");
        let status = match agent::volume(&volume, &pool, self.claims.get(&name)) {
            VolumeStep::Nothing => return,
            VolumeStep::Report(status) => status,
            VolumeStep::Create(request) => {
                let made = claim(&request);
                assert_eq!(made.id.as_str(), name);
                let status = agent::created(&volume, &pool, Ok(&made));
                self.claims.insert(name, made);
                status
            }
            VolumeStep::Change { .. } => unreachable!("no call changes a volume here"),
            VolumeStep::Delete => {
                self.claims.remove(&name);
                agent::deleted(&volume, &pool, None)
            }
        };
        self.unwritten = Some((volume, status));
    }
}

/// A claim's life as the provisioner drives it.
struct Life {
    request: CreateClaim,
    node: usize,
    /// What the controller has read and not acted on yet.
    read: Option<Vec<Volume>>,
    overdue: bool,
    /// The volume id in the PersistentVolume.
    bound: Option<String>,
    fate: Fate,
    done: bool,
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

struct World {
    server: Server,
    agents: Vec<Agent>,
    lives: Vec<Life>,
    places: Vec<Place>,
}

impl World {
    fn new() -> Self {
        let place = |name: &&str| Place {
            node: Arc::new(Node {
                id: NodeId::new(*name).expect("an id"),
                topology: Topology([(NODE_LABEL.to_owned(), (*name).to_owned())].into()),
            }),
            bytes: 100,
            available: 50,
        };
        let life = |number: usize| Life {
            request: CreateClaim {
                name: format!("pvc-{}", uid(number)),
                required_bytes: 1,
                limit_bytes: None,
                parameters: ClaimParameters::default(),
                mutable: MutableParameters::default(),
                source: None,
            },
            node: 0,
            read: None,
            overdue: false,
            bound: None,
            fate: match number {
                1 => Fate::Deleted,
                3 => Fate::GivenUp,
                _ => Fate::Stays,
            },
            done: false,
        };
        Self {
            server: Server::default(),
            agents: NODES.iter().map(|_| Agent::default()).collect(),
            lives: (0..CLAIMS).map(life).collect(),
            places: NODES.iter().map(place).collect(),
        }
    }

    /// One step of the call for a claim: a read, or what was decided on it.
    fn call(&mut self, number: usize, random: &mut Random) {
        let life = &mut self.lives[number];
        if life.done {
            return;
        }
        let Some(read) = life.read.take() else {
            let all = self.server.volumes.values();
            let all = all.filter(|volume| volume.spec.name == life.request.name);
            life.read = Some(all.cloned().collect());
            return;
        };
        let Some(bound) = life.bound.clone() else {
            return self.create(number, &read, random);
        };
        let volume = read
            .iter()
            .find(|one| one.metadata.name.as_ref() == Some(&bound));
        let Some(volume) = volume else {
            life.done = true;
            life.bound = None;
            return;
        };
        let answer = volume.answer();
        let answer = answer.map(|status| (status.phase, status.error.as_ref()));
        match decide::delete(volume.spec.wanted, answer) {
            Deletion::Order => self.server.order_absent(volume),
            Deletion::Done => {
                self.server.remove(volume);
                life.done = true;
                life.bound = None;
            }
            Deletion::Wait => {}
            Deletion::Refused(error) => panic!("{error:?}"),
        }
    }

    fn create(&mut self, number: usize, read: &[Volume], random: &mut Random) {
        let life = &mut self.lives[number];
        let selected = self.places[life.node].node.topology.clone();
        let at = Requirement {
            requisite: vec![selected.clone()],
            preferred: vec![selected],
        };
        let asked = Asked {
            request: &life.request,
            at: &at,
            places: &self.places,
            source: None,
            overdue: life.overdue,
        };
        match asked.next(read) {
            Ok(Creation::Done(volume)) => {
                life.bound.clone_from(&volume.metadata.name);
                life.done = life.fate != Fate::Deleted;
                if life.fate == Fate::GivenUp {
                    // The answer is lost, and so is the provisioner.
                    (life.bound, life.done) = (None, true);
                }
            }
            Ok(Creation::Make(node)) => {
                let node_name = node.id.as_str().to_owned();
                let id = claim_id(&name_on(&node_name, &life.request.name));
                let spec = VolumeSpec {
                    name: life.request.name.clone(),
                    node_name,
                    parameters: life.request.parameters.into(),
                    made_with: life.request.mutable.into(),
                    source: None,
                    wanted: Wanted::Present,
                    capacity: number_of(&life.request),
                    limit: 0,
                    mutable: life.request.mutable.into(),
                };
                self.server.create(Volume::new(id.as_str(), spec));
            }
            Ok(Creation::Wait(_)) => {}
            Ok(Creation::Abandon(volume)) => self.server.order_absent(volume),
            Ok(Creation::Withdraw(volume, _)) => drop(self.server.remove(volume)),
            Err(error) => {
                life.overdue = false;
                if !may_go_on(code_of(&error)) {
                    let stays = matches!(error, Error::ExistsElsewhere { .. });
                    assert!(!stays, "a repeated request is refused: {error}");
                    // The pod is scheduled again.
                    life.node = random.below(NODES.len());
                }
            }
        }
    }

    /// Orders the deletion of what calls have left behind.
    fn delete_leaks(&mut self) {
        let claims = self.lives.iter().enumerate();
        let claims = claims.filter(|(_, life)| !(life.fate == Fate::GivenUp && life.done));
        let bound = self.lives.iter();
        let bound = bound.filter_map(|life| Some((life.request.name.clone(), life.bound.clone()?)));
        let known = Known {
            claims: claims.map(|(number, _)| uid(number)).collect(),
            persistent: bound.collect(),
        };
        let leaks = self.server.volumes.values();
        let leaks: Vec<Volume> = leaks.filter(|one| is_leak(one, &known)).cloned().collect();
        for leak in leaks {
            self.server.order_absent(&leak);
        }
    }

    fn agent(&mut self, node: usize, what: usize) {
        let (agent, name) = (&mut self.agents[node], NODES[node]);
        match what {
            0 => agent.see(name, &self.server),
            1 => agent.work(name, &mut self.server),
            _ => agent.restart(name, &self.server),
        }
    }

    fn step(&mut self, random: &mut Random) {
        let (node, life) = (random.below(NODES.len()), random.below(CLAIMS));
        match random.below(22) {
            0..=5 => self.agent(node, 0),
            6..=10 => self.agent(node, 1),
            11 => self.agent(node, 2),
            12 => self.lives[life].overdue = true,
            // The controller is killed: the calls are repeated.
            13 => {
                for life in &mut self.lives {
                    (life.read, life.overdue) = (None, false);
                }
            }
            14 => self.server.sweep(),
            15 => self.delete_leaks(),
            16 if self.lives[life].fate == Fate::GivenUp && self.lives[life].bound.is_none() => {
                self.lives[life].done = true;
            }
            _ => self.call(life, random),
        }
    }

    fn settle(&mut self, random: &mut Random) {
        for _ in 0..200 {
            for node in 0..NODES.len() {
                for what in [0, 0, 1, 1] {
                    self.agent(node, what);
                }
            }
            for life in 0..CLAIMS {
                self.call(life, random);
            }
            self.delete_leaks();
            self.server.sweep();
        }
    }

    fn check(&self, seed: u64) {
        let undone = self.lives.iter().filter(|life| !life.done).count();
        assert_eq!(undone, 0, "seed {seed}: calls never end");
        let held: BTreeSet<&String> = self
            .agents
            .iter()
            .flat_map(|one| one.claims.keys())
            .collect();
        let ready = self.server.volumes.values();
        assert!(
            ready.clone().all(|one| one.phase() == Some(Phase::Ready)),
            "seed {seed}: an object is stuck: {:?}",
            self.server.volumes
        );
        let ready: BTreeSet<&String> = self.server.volumes.keys().collect();
        let bound: BTreeSet<&String> = self
            .lives
            .iter()
            .filter_map(|life| life.bound.as_ref())
            .collect();
        assert_eq!(held, ready, "seed {seed}: engines and Volumes");
        assert_eq!(ready, bound, "seed {seed}: Volumes and PersistentVolumes");
    }
}

fn uid(number: usize) -> String {
    format!("00000000-0000-0000-0000-{number:012}")
}

fn number_of(request: &CreateClaim) -> i64 {
    number(request.required_bytes)
}

#[test]
fn no_schedule_leaks_or_loses_a_claim() {
    for seed in 1..=SCHEDULES {
        let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let mut world = World::new();
        for _ in 0..STEPS {
            world.step(&mut random);
        }
        world.settle(&mut random);
        world.check(seed);
    }
}
