//! The controllers, the API server's fences and the streams of the simulation. A stream keeps its
//! order, but either side may lose it at any time, and the other side may learn of it much later.

use std::collections::VecDeque;

use baggageclaim::catalog::{
    Answer, Asked, Catalog, Changes, Hello, Report, SessionId, Supersede, WaitingQuestions,
};
use baggageclaim::model::{
    Clear, ClusterClock, CutOff, Fence, Fences, Name, NamespaceUsage, Timestamp,
};

use crate::common::random::Random;
use crate::node::{Clears, Content, Node};

#[path = "steps.rs"]
mod steps;

pub(crate) const NODES: [&str; 3] = ["node-1", "node-2", "node-3"];
const NAMES: [&str; 4] = [
    "artifact/out",
    "resource-cache/git",
    "task-cache/pr-1",
    "task-cache/main",
];
const BEGAN: u64 = 1_795_400_000_000;

/// A rule that a schedule breaks on purpose. The checks must see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// A fence does not mark the volumes of running pods.
    MarksNoWriters,
    /// A node uses all content that arrives.
    UsesWhatArrives,
    /// After an older etcd was put back, nothing is fenced once more.
    MendsNothing,
    /// Stamps are local times.
    LocalStamps,
    /// A controller does not continue the time of the one before.
    AdoptsNoTime,
    /// What is not known is said not to be there.
    NothingTooEarly,
    /// The stream that says Hello last counts.
    LastHelloCounts,
    /// A cut-off does not see what is in use.
    EvictsWhatIsUsed,
    /// Newer outputs do not take their names from other nodes.
    SupersedesNothing,
}

#[derive(Debug)]
enum Up {
    Hello(u64, Fences),
    Report(Report),
    Usage(NamespaceUsage),
    Beat(Timestamp, Option<Timestamp>),
    Applied(u64),
}

#[derive(Debug)]
enum Down {
    Fence(Fence),
    /// The fences are sent; the account may begin.
    Welcome,
    Supersede(Supersede),
    Beat(Timestamp, Timestamp),
    CutOff(CutOff),
}

#[derive(Debug)]
struct Stream {
    node: usize,
    controller: usize,
    up: VecDeque<Up>,
    down: VecDeque<Down>,
    /// Whether each side holds it to be open.
    node_end: bool,
    controller_end: bool,
    session: Option<SessionId>,
    attempt: u64,
    phase: Phase,
}

/// How far a stream is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    /// The node measures the controller's time.
    Measured,
    /// It has said Hello.
    Greeted,
    /// It has the fences that it lacked, and has sent its account.
    Welcomed,
    /// The account has arrived.
    Accounted,
}

impl Stream {
    fn is_quiet(&self) -> bool {
        self.node_end
            && self.controller_end
            && self.phase == Phase::Accounted
            && self.up.is_empty()
            && self.down.is_empty()
    }
}

#[derive(Debug)]
struct Controller {
    skew: i64,
    began: u64,
    /// The nodes whose account has arrived since.
    accounts: [bool; NODES.len()],
    clock: ClusterClock,
    catalog: Catalog,
    held: WaitingQuestions<u64>,
    /// Each with its first answer, and the end of its time.
    questions: Vec<(u64, Asked, Answer, Timestamp)>,
    hellos: u64,
    asked: u64,
}

/// What a schedule did, so that a test can see that it reached what it is about.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Done {
    pub(crate) commits: u64,
    pub(crate) settled: u64,
    pub(crate) clears: u64,
    pub(crate) owed: u64,
    pub(crate) found: u64,
    pub(crate) nothing: u64,
    pub(crate) fetched: u64,
    pub(crate) refused: u64,
    pub(crate) superseded: u64,
    pub(crate) evicted: u64,
    pub(crate) woken: u64,
}

impl Done {
    pub(crate) fn add(&mut self, other: &Self) {
        self.commits += other.commits;
        self.settled += other.settled;
        self.clears += other.clears;
        self.owed += other.owed;
        self.found += other.found;
        self.nothing += other.nothing;
        self.fetched += other.fetched;
        self.refused += other.refused;
        self.superseded += other.superseded;
        self.evicted += other.evicted;
        self.woken += other.woken;
    }
}

pub(crate) struct World {
    random: Random,
    fault: Option<Fault>,
    now: u64,
    names: Vec<Name>,
    nodes: Vec<Node>,
    controllers: Vec<Controller>,
    /// The controller in the ConfigMap.
    current: usize,
    streams: Vec<Stream>,
    attempt: u64,
    /// Objects of the API server, and its older states.
    api: Vec<Fence>,
    backups: Vec<Vec<Fence>>,
    was_restored: bool,
    was_away: bool,
    clears: Clears,
    pub(crate) done: Done,
}

fn name(text: &str) -> Name {
    Name {
        tenant: "ci".parse().expect("a label"),
        reference: text.parse().expect("a reference"),
    }
}

/// A schedule without faults at first: one controller, and every node has a stream.
impl World {
    pub(crate) fn new(seed: u64, fault: Option<Fault>) -> Self {
        let mut random = Random::new(seed);
        let names: Vec<Name> = NAMES.iter().map(|text| name(text)).collect();
        let skew = |random: &mut Random| 600_000 - random.below(1_200_001).cast_signed();
        let nodes = NODES
            .iter()
            .map(|name| Node::new(name, skew(&mut random), NAMES.len(), fault))
            .collect();
        let mut world = Self {
            now: BEGAN,
            clears: Clears::new(names.clone()),
            names,
            nodes,
            controllers: Vec::new(),
            current: 0,
            streams: Vec::new(),
            attempt: 0,
            api: Vec::new(),
            backups: vec![Vec::new()],
            was_restored: false,
            was_away: false,
            done: Done::default(),
            random,
            fault,
        };
        for _ in 0..2 {
            let skew = 600_000 - world.random.below(1_200_001).cast_signed();
            let controller = world.controller(skew);
            world.controllers.push(controller);
        }
        for node in 0..NODES.len() {
            world.attach(node, 0);
        }
        world.settle(None);
        world
    }

    fn controller(&self, skew: i64) -> Controller {
        let mut fences = Fences::default();
        let mut sorted = self.api.clone();
        sorted.sort_by_key(|fence| fence.number);
        if let Some(oldest) = sorted.iter().map(|fence| fence.previous).min() {
            fences.forget(oldest);
        }
        for fence in sorted {
            fences.insert(fence);
        }
        let clock = ClusterClock::default();
        let now = Timestamp(self.now.saturating_add_signed(skew));
        let mut catalog = Catalog::new(fences, now);
        catalog.expect(NODES.iter().map(ToString::to_string).collect(), now);
        Controller {
            skew,
            began: self.now,
            accounts: [false; NODES.len()],
            clock,
            catalog,
            held: WaitingQuestions::default(),
            questions: Vec::new(),
            hellos: 0,
            asked: 0,
        }
    }

    fn local(&self, controller: usize) -> Timestamp {
        Timestamp(
            self.now
                .saturating_add_signed(self.controllers[controller].skew),
        )
    }

    fn time(&self, controller: usize) -> Timestamp {
        self.controllers[controller]
            .clock
            .time(self.local(controller))
    }

    fn attach(&mut self, node: usize, controller: usize) {
        for stream in self.streams.iter_mut().filter(|stream| stream.node == node) {
            stream.node_end = false;
        }
        self.attempt += 1;
        self.nodes[node].fetch = None;
        self.streams.push(Stream {
            node,
            controller,
            up: VecDeque::new(),
            down: VecDeque::new(),
            node_end: true,
            controller_end: true,
            session: None,
            attempt: self.attempt,
            phase: Phase::Measured,
        });
        self.measure(self.streams.len() - 1);
    }

    /// The node's open stream.
    fn stream(&self, node: usize) -> Option<usize> {
        let mut streams = self.streams.iter();
        streams.position(|stream| stream.node == node && stream.node_end)
    }

    fn send(&mut self, node: usize, names: &[usize]) {
        if let Some(stream) = self.stream(node)
            && self.streams[stream].phase >= Phase::Welcomed
            && !names.is_empty()
        {
            let report = self.nodes[node].report(&self.clears, names);
            self.streams[stream].up.push_back(Up::Report(report));
        }
    }

    /// Delivers one message to the controller.
    fn deliver_up(&mut self, number: usize) {
        let Some(stream) = self.streams.get_mut(number) else {
            return;
        };
        let (node, controller) = (stream.node, stream.controller);
        if !stream.controller_end {
            return;
        }
        let Some(message) = stream.up.pop_front() else {
            return;
        };
        let session = stream.session;
        let local = self.local(controller);
        match message {
            Up::Hello(attempt, fences) => {
                let it = &mut self.controllers[controller];
                it.hellos += 1;
                let hello = Hello {
                    node: NODES[node],
                    zone: if node == 0 { "a" } else { "b" },
                    attempt: match self.fault {
                        Some(Fault::LastHelloCounts) => it.hellos,
                        _ => attempt,
                    },
                    fences: &fences,
                };
                let id = it.catalog.hello(&hello, local);
                if id.is_none() {
                    self.streams[number].controller_end = false;
                    return;
                }
                self.mend(controller);
                if !self.streams[number].controller_end {
                    return;
                }
                // From here on it gets new fences, behind those that it lacks.
                self.streams[number].session = id;
                let mut missing: Vec<Fence> = self.controllers[controller]
                    .catalog
                    .fences()
                    .all()
                    .filter(|fence| fence.number > fences.newest())
                    .cloned()
                    .collect();
                missing.sort_by_key(|fence| fence.number);
                let down = &mut self.streams[number].down;
                down.extend(missing.into_iter().map(Down::Fence));
                down.push_back(Down::Welcome);
            }
            Up::Report(report) => {
                let id = session.expect("Hello came first");
                let time = self.time(controller);
                let it = &mut self.controllers[controller];
                let changes = it.catalog.report(id, &report, local, time);
                if self.random.percent(5) {
                    // Repeated.
                    it.catalog.report(id, &report, local, time);
                }
                if report.complete {
                    it.accounts[node] = true;
                    self.streams[number].phase = Phase::Accounted;
                }
                self.changed(controller, &changes);
            }
            Up::Usage(usage) => {
                let id = session.expect("Hello came first");
                let catalog = &mut self.controllers[controller].catalog;
                assert!(catalog.used(id, self.names[0].tenant.clone(), usage));
            }
            Up::Beat(sent, time) => {
                let it = &mut self.controllers[controller];
                if let Some(time) = time
                    && self.fault != Some(Fault::AdoptsNoTime)
                {
                    it.clock.adopt(time, local);
                }
                let answer = it.clock.time(local);
                self.streams[number]
                    .down
                    .push_back(Down::Beat(sent, answer));
            }
            Up::Applied(number) => self.controllers[controller].catalog.fence_applied(number),
        }
    }

    /// Sends orders and answers, and checks that no question waits whose answer has changed.
    fn changed(&mut self, controller: usize, changes: &Changes) {
        let orders = if self.fault == Some(Fault::SupersedesNothing) {
            &[][..]
        } else {
            &changes.supersede[..]
        };
        for order in orders {
            let mut streams = self.streams.iter_mut();
            let of_session = |stream: &&mut Stream| {
                stream.controller == controller && stream.session == Some(order.session)
            };
            if let Some(stream) = streams.find(of_session) {
                stream.down.push_back(Down::Supersede(*order));
            }
        }
        let time = self.local(controller);
        let it = &mut self.controllers[controller];
        let mut answers = it.held.changed(&it.catalog, changes, time);
        // Time changes answers too.
        let passed = it.catalog.tick(time);
        answers.extend(it.held.changed(&it.catalog, &passed, time));
        self.done.woken += answers.len() as u64;
        for (id, _) in answers {
            it.questions.retain(|(other, ..)| *other != id);
        }
        it.questions.retain(|(.., until)| *until > time);
        let waiting = &it.questions;
        it.held
            .retain(|id| waiting.iter().any(|(other, ..)| other == id));
        assert_eq!(it.questions.len(), it.held.len());
        for (_, asked, first, _) in &it.questions {
            let answer = it.catalog.find(asked, time);
            let is_same = std::mem::discriminant(&answer) == std::mem::discriminant(first)
                || answer == Answer::Incomplete;
            assert!(is_same, "a question waits: {first:?} became {answer:?}");
        }
    }

    /// Delivers one message to the node.
    fn deliver_down(&mut self, number: usize) {
        let Some(stream) = self.streams.get_mut(number) else {
            return;
        };
        let node = stream.node;
        if !stream.node_end {
            return;
        }
        let Some(message) = stream.down.pop_front() else {
            return;
        };
        let it = &mut self.nodes[node];
        match message {
            Down::Fence(fence) => {
                if let Some(names) = it.fence(&self.clears, &fence) {
                    let applied = Up::Applied(it.fences.newest());
                    stream.up.push_back(applied);
                    self.send(node, &names);
                } else {
                    let controller = stream.controller;
                    self.attach(node, controller);
                }
            }
            Down::Welcome => {
                stream.phase = Phase::Welcomed;
                let all: Vec<usize> = (0..NAMES.len()).collect();
                let (first, second) = all.split_at(2);
                let first = it.report(&self.clears, first);
                let mut second = it.report(&self.clears, second);
                second.complete = true;
                let usage = Up::Usage(it.usage());
                let reports = [Up::Report(first), Up::Report(second)];
                stream.up.extend(std::iter::once(usage).chain(reports));
            }
            Down::Supersede(order) => {
                if let Some(name) = it.supersede(&self.clears, &order) {
                    self.done.superseded += 1;
                    self.send(node, &[name]);
                }
            }
            Down::Beat(sent, theirs) => {
                let received = it.local(self.now);
                let is_used = it.clock.answered(sent, theirs, received).is_ok();
                let fences = it.fences.clone();
                if stream.phase > Phase::Measured {
                    return;
                }
                if is_used {
                    stream.phase = Phase::Greeted;
                    stream.up.push_back(Up::Hello(stream.attempt, fences));
                } else {
                    self.measure(number);
                }
            }
            Down::CutOff(cut) => {
                let gone = it.cut_off(&self.clears, &cut);
                self.done.evicted += gone.len() as u64;
                self.send(node, &gone);
            }
        }
    }

    /// Makes what the controller owes.
    fn mend(&mut self, controller: usize) {
        if self.fault == Some(Fault::MendsNothing) {
            return;
        }
        while let Some(clear) = self.controllers[controller].catalog.owed().first().cloned() {
            self.done.owed += 1;
            self.order(controller, clear);
        }
    }

    /// Makes a fence at the end of the chain, which is read just before.
    fn order(&mut self, controller: usize, clear: Clear) {
        self.read(controller);
        let (time, id) = (self.time(controller), self.random.next());
        let catalog = &self.controllers[controller].catalog;
        let fences = catalog.fences();
        let fence = fences.next(clear, time, catalog.applied(), id);
        let is_free = self
            .api
            .iter()
            .all(|other| other.previous != fence.previous);
        assert!(
            is_free,
            "the API server has a successor that its list lacks"
        );
        self.api.push(fence.clone());
        self.backups.push(self.api.clone());
        self.clears.add(&fence);
        self.learn(controller, &fence);
    }

    fn learn(&mut self, controller: usize, fence: &Fence) {
        let changes = self.controllers[controller].catalog.fence(fence.clone());
        self.changed(controller, &changes);
        let to = self.streams.iter_mut();
        let to = to.filter(|stream| stream.controller == controller && stream.controller_end);
        for stream in to.filter(|stream| stream.session.is_some()) {
            stream.down.push_back(Down::Fence(fence.clone()));
        }
    }

    /// The controller's watch of fences. It ends if the chain was set back.
    fn read(&mut self, controller: usize) {
        let oldest = self
            .api
            .iter()
            .map(|fence| fence.previous)
            .min()
            .unwrap_or(0);
        let catalog = &mut self.controllers[controller].catalog;
        let is_lost = |fence: &Fence| fence.number > oldest && !self.api.contains(fence);
        if catalog.fences().all().any(is_lost) {
            return self.restart(controller);
        }
        let changes = catalog.forget_fences(oldest);
        self.changed(controller, &changes);
        let catalog = &self.controllers[controller].catalog;
        let mut new: Vec<Fence> = self.api.clone();
        new.retain(|fence| !catalog.fences().knows(fence));
        new.sort_by_key(|fence| fence.number);
        for fence in new {
            let changes = self.controllers[controller].catalog.fence(fence.clone());
            self.changed(controller, &changes);
            self.mend(controller);
            self.learn(controller, &fence);
        }
    }

    /// The controller's process ends and begins again, perhaps on another machine.
    fn restart(&mut self, controller: usize) {
        let skew = 600_000 - self.random.below(1_200_001).cast_signed();
        let skew = if self.random.percent(50) {
            skew
        } else {
            self.controllers[controller].skew
        };
        self.controllers[controller] = self.controller(skew);
        for stream in &mut self.streams {
            if stream.controller == controller {
                (stream.controller_end, stream.session) = (false, None);
            }
        }
    }
}
