//! The steps of a schedule, and the checks.
//! What each step does to a node is in `node`, to streams and controllers in `world`.

use baggageclaim::catalog::{Answer, Asked, State};
use baggageclaim::model::{CacheKind, Coverage, Fence, Limits, Timestamp};

use super::{Content, Down, Fault, NAMES, NODES, Phase, Stream, Up, World};

/// The length of a schedule.
const STEPS: usize = 100;

/// Two commits that are further apart than this are ordered, whichever nodes make them.
const ORDERED_MS: u64 = 2_000;

impl World {
    pub(crate) fn run(&mut self) {
        for _ in 0..STEPS {
            let wait = match self.random.below(100) {
                0..70 => self.random.below(50),
                70..90 => self.random.below(2_000),
                90..98 => self.random.below(10_000),
                _ => self.random.below(150_000),
            };
            self.now += wait;
            self.step();
        }
        self.current = self.random.index(2);
        self.settle(None);
        self.check_end();
    }

    fn step(&mut self) {
        let node = self.random.index(NODES.len());
        let name = self.random.index(NAMES.len());
        let stream = self.random.index(self.streams.len().max(1));
        let controller = self.random.index(2);
        match self.random.below(100) {
            0..8 => self.deliver_up(stream),
            8..16 => self.deliver_down(stream),
            16..30 => {
                self.drain_up(stream);
                self.drain_down(stream);
            }
            30..41 => {
                self.nodes[node].publish(&self.clears, name, self.now);
                self.send(node, &[name]);
            }
            41..55 => self.end(node),
            55..67 => self.ask(node, name),
            67..76 => self.fetch(node),
            76..81 => self.beat(node),
            81..83 => self.break_stream(stream),
            83..87 => self.attach_somewhere(node),
            87..90 => self.clear(controller, name),
            90..92 => self.read(controller),
            92 => self.restart(controller),
            93 => self.current = controller,
            94 => self.restore(),
            95 => self.prune(),
            96 => self.repeat(stream),
            97 => self.tick(controller),
            _ => self.collect(controller),
        }
    }

    fn end(&mut self, node: usize) {
        let settled = self.is_settled();
        let volume = self.random.index(8);
        if let Some(name) = self.nodes[node].end(&self.clears, volume, self.now, settled) {
            self.done.commits += 1;
            self.done.settled += u64::from(settled);
            self.send(node, &[name]);
        }
    }

    /// Whether all clocks agree. Two controllers with different clocks, or a controller that has
    /// just begun on another machine, disturb that until every node has measured again.
    fn is_settled(&self) -> bool {
        let times = self.nodes.iter().map(|node| node.time(self.now).0);
        let (first, last) = (times.clone().min(), times.max());
        last.zip(first)
            .is_some_and(|(last, first)| last - first <= ORDERED_MS / 2)
    }

    /// A node asks, and the answer is checked against the truth.
    fn ask(&mut self, node: usize, name: usize) {
        let Some(stream) = self.stream(node) else {
            return;
        };
        let (controller, is_open) = {
            let stream = &self.streams[stream];
            (
                stream.controller,
                stream.controller_end && stream.phase == Phase::Accounted,
            )
        };
        if !is_open {
            return;
        }
        let time = self.local(controller);
        let asked = Asked::new(self.names[name].clone(), "b");
        let it = &mut self.controllers[controller];
        let mut answer = it.catalog.find(&asked, time);
        if self.fault == Some(Fault::NothingTooEarly) && answer == Answer::Incomplete {
            answer = Answer::Nothing;
        }
        self.check_answer(controller, name, &answer);
        match answer {
            Answer::Found(found) => {
                self.done.found += 1;
                self.nodes[node].fetch = Some((name, found));
            }
            first => {
                self.done.nothing += u64::from(first == Answer::Nothing);
                let it = &mut self.controllers[controller];
                it.asked += 1;
                if self.fault.is_some() {
                    return;
                }
                let now = it.held.ask(&it.catalog, asked.clone(), it.asked, time);
                // A node asks its peers while accounts are missing.
                let is_held = first != Answer::Incomplete;
                assert_eq!(now.is_none(), is_held);
                if is_held {
                    let until = Timestamp(time.0 + 90_000);
                    it.questions.push((it.asked, asked, first, until));
                }
            }
        }
    }

    /// The nodes from which all has arrived at this controller.
    fn quiet(&self, controller: usize) -> Vec<usize> {
        let streams = self.streams.iter();
        let quiet = streams.filter(|one| one.controller == controller && one.is_quiet());
        quiet.map(|stream| stream.node).collect()
    }

    fn check_answer(&self, controller: usize, name: usize, answer: &Answer) {
        let it = &self.controllers[controller];
        let covering = it.catalog.fences().covering(&self.names[name]);
        let quiet = self.quiet(controller);
        let mut contents = Vec::new();
        for node in &quiet {
            let Some(entry) = self.nodes[*node].entry(&self.clears, name) else {
                continue;
            };
            if entry.fence < covering {
                continue;
            }
            assert_ne!(
                *answer,
                Answer::Nothing,
                "{:?} has {}",
                NODES[*node],
                NAMES[name]
            );
            if entry.state == State::Durable {
                contents.extend(self.nodes[*node].names[name]);
            }
        }
        let owed = it.catalog.owed();
        let is_owed = owed
            .iter()
            .any(|owed| owed.covers.covers(&self.names[name]));
        let Answer::Found(found) = answer else {
            assert!(contents.is_empty() || is_owed, "{answer:?}: {contents:?}");
            // A controller that has just begun does not know.
            let knows = it.accounts == [true; NODES.len()] || self.now - it.began >= 60_000;
            assert!(*answer != Answer::Nothing || knows, "{:?}", it.accounts);
            return;
        };
        assert!(found.fence >= covering);
        let first_wins = NAMES[name].starts_with("resource");
        let is_it = |content: &&Content| content.version == found.version;
        let of_all = self.nodes.iter().filter_map(|node| node.names[name]);
        let time = of_all
            .filter(|content| is_it(&content))
            .map(|it| (it.time, it.settled))
            .next();
        for content in contents {
            let is_right = if first_wins {
                found.version <= content.version
            } else {
                found.version >= content.version
            };
            assert!(is_right, "{found:?} {content:?}");
            // The order of stamps is the order of commits.
            if let Some((time, true)) = time
                && content.settled
            {
                let (early, late) = if first_wins {
                    (time, content.time)
                } else {
                    (content.time, time)
                };
                assert!(early <= late + ORDERED_MS, "{found:?} {time} {content:?}");
            }
        }
    }

    fn fetch(&mut self, node: usize) {
        let Some((name, found)) = self.nodes[node].fetch.take() else {
            return;
        };
        let holder = found.holders[self.random.index(found.holders.len())].clone();
        let holder = self
            .nodes
            .iter()
            .find(|node| *node.name == *holder)
            .expect("a node");
        let content = holder.names[name].filter(|content| content.version == found.version);
        let Some(content) = content else {
            return;
        };
        if self.nodes[node].receive(&self.clears, name, content, self.now) {
            self.done.fetched += 1;
            self.nodes[node].publish(&self.clears, name, self.now);
            self.send(node, &[name]);
        } else {
            self.done.refused += 1;
        }
    }

    /// The node asks for the controller's time.
    pub(super) fn measure(&mut self, number: usize) {
        let stream = &mut self.streams[number];
        let it = &self.nodes[stream.node];
        let time = it.clock.offset().map(|_| it.time(self.now));
        stream.up.push_back(Up::Beat(it.local(self.now), time));
    }

    /// The same, mostly with an answer at once, sometimes behind what is under way.
    fn beat(&mut self, node: usize) {
        let Some(number) = self.stream(node) else {
            return;
        };
        self.measure(number);
        if self.random.percent(70) {
            self.drain_up(number);
            self.now += self.random.below(900);
            self.drain_down(number);
        }
    }

    fn drain_up(&mut self, number: usize) {
        let is_open = |stream: &Stream| stream.controller_end && !stream.up.is_empty();
        while self.streams.get(number).is_some_and(is_open) {
            self.deliver_up(number);
        }
    }

    fn drain_down(&mut self, number: usize) {
        let is_open = |stream: &Stream| stream.node_end && !stream.down.is_empty();
        while self.streams.get(number).is_some_and(is_open) {
            self.deliver_down(number);
        }
    }

    /// One side or both see that a stream is lost. What is under way is lost, or arrives late.
    fn break_stream(&mut self, number: usize) {
        let time = self
            .streams
            .get(number)
            .map(|stream| self.local(stream.controller));
        let (Some(stream), Some(time)) = (self.streams.get_mut(number), time) else {
            return;
        };
        let side = self.random.below(3);
        if side != 0 {
            stream.node_end = false;
            stream.down.clear();
        }
        if side != 1 && stream.controller_end {
            stream.controller_end = false;
            stream.up.clear();
            let controller = stream.controller;
            if let Some(session) = stream.session.take() {
                let changes = self.controllers[controller].catalog.lost(session, time);
                self.changed(controller, &changes);
            }
        }
        self.streams
            .retain(|stream| stream.node_end || stream.controller_end);
    }

    fn attach_somewhere(&mut self, node: usize) {
        let is_open = self.stream(node).is_some_and(|number| {
            let stream = &self.streams[number];
            stream.controller == self.current && stream.controller_end
        });
        // A node's driver restarts, or its watch of the ConfigMap is late.
        if !is_open || self.random.percent(20) {
            let is_late = self.random.percent(15);
            self.attach(
                node,
                if is_late {
                    1 - self.current
                } else {
                    self.current
                },
            );
            self.beat(node);
        }
    }

    fn clear(&mut self, controller: usize, name: usize) {
        // The masks have 64 bits, and mending makes more.
        if self.clears.count() > 16 {
            return;
        }
        self.done.clears += 1;
        let covers = match self.random.below(4) {
            0 => Coverage::Namespace(self.names[name].tenant.clone()),
            1 => Coverage::Prefix {
                tenant: self.names[name].tenant.clone(),
                kind: CacheKind::Task,
                prefix: "pr-".into(),
            },
            _ => Coverage::Name(self.names[name].clone()),
        };
        self.order(controller, covers.into());
    }

    /// An older etcd is put back. docs/catalog.md excludes that after a node was away for a week.
    fn restore(&mut self) {
        if self.clears.count() <= 16 && !self.was_away {
            self.api = self.random.pick(&self.backups).clone();
            self.was_restored = true;
        }
    }

    /// A week without faults, in which one node may be away. Then the oldest fence is deleted.
    fn prune(&mut self) {
        let away = self.random.index(NODES.len());
        let away = (!self.was_restored && self.random.percent(50)).then_some(away);
        for stream in self
            .streams
            .iter_mut()
            .filter(|stream| Some(stream.node) == away)
        {
            stream.node_end = false;
        }
        self.notice_losses();
        self.was_away |= away.is_some();
        self.settle(away);
        self.now += 7 * 24 * 60 * 60 * 1000;
        (0..2).for_each(|controller| self.tick(controller));
        if let Some(oldest) = self.api.iter().min_by_key(|fence| fence.number).cloned()
            && self.api.len() > 1
        {
            self.api.retain(|fence| *fence != oldest);
            self.backups.push(self.api.clone());
        }
    }

    /// An order is sent once more.
    fn repeat(&mut self, number: usize) {
        let Some(stream) = self.streams.get(number) else {
            return;
        };
        let fences = self.controllers[stream.controller].catalog.fences().all();
        let fences: Vec<Fence> = fences.cloned().collect();
        if stream.phase >= Phase::Welcomed && !fences.is_empty() {
            let again = self.random.pick(&fences).clone();
            self.streams[number].down.push_back(Down::Fence(again));
        }
    }

    fn tick(&mut self, controller: usize) {
        let time = self.local(controller);
        let changes = self.controllers[controller].catalog.tick(time);
        self.changed(controller, &changes);
    }

    /// A budget of the namespace, from what the nodes have reported. Some reports are late.
    fn collect(&mut self, controller: usize) {
        for node in 0..NODES.len() {
            if let Some(number) = self.stream(node)
                && self.streams[number].phase >= Phase::Welcomed
            {
                let usage = self.nodes[node].usage();
                self.streams[number].up.push_back(Up::Usage(usage));
                if self.random.percent(70) {
                    self.drain_up(number);
                }
            }
        }
        let limits = Limits {
            bytes: Some(10 + self.random.below(100)),
            ..Limits::default()
        };
        let (tenant, time) = (&self.names[0].tenant, self.time(controller));
        let within = self.controllers[controller]
            .catalog
            .within(tenant, &limits, time);
        for stream in &mut self.streams {
            let is_concerned = |id| within.sessions.contains(&id);
            if stream.controller == controller && stream.session.is_some_and(is_concerned) {
                stream.down.push_back(Down::CutOff(within.cut_off));
            }
        }
    }

    /// Controllers notice the streams that nodes have left.
    fn notice_losses(&mut self) {
        let mut left = Vec::new();
        self.streams.retain(|stream| {
            if !stream.node_end {
                left.extend(stream.session.map(|session| (stream.controller, session)));
            }
            stream.node_end
        });
        for (controller, session) in left {
            let time = self.local(controller);
            let changes = self.controllers[controller].catalog.lost(session, time);
            self.changed(controller, &changes);
        }
    }

    /// No more faults: all nodes have a stream to the current controller, and all has arrived.
    pub(super) fn settle(&mut self, away: Option<usize>) {
        let present: Vec<usize> = (0..NODES.len())
            .filter(|node| Some(*node) != away)
            .collect();
        for controller in 0..2 {
            self.read(controller);
            self.read(controller);
        }
        for round in 0..10 {
            if round > 1 && self.quiet(self.current).len() == present.len() {
                break;
            }
            for &node in &present {
                let number = self.stream(node);
                let is_open = number.is_some_and(|number| {
                    let stream = &self.streams[number];
                    stream.controller == self.current && stream.controller_end
                });
                if !is_open {
                    self.attach(node, self.current);
                }
            }
            self.notice_losses();
            for _ in 0..4 {
                for number in 0..self.streams.len() {
                    self.drain_up(number);
                    self.drain_down(number);
                }
            }
            for &node in &present {
                let number = self.stream(node).expect("it has one");
                self.measure(number);
                self.drain_up(number);
                self.now += self.random.below(500);
                self.drain_down(number);
                self.drain_up(number);
            }
        }
    }

    fn check_end(&mut self) {
        self.tick(self.current);
        assert!(self.is_settled(), "the clocks do not agree");
        assert_eq!(self.quiet(self.current).len(), NODES.len());
        let applied = self.nodes.iter().fold(0, |all, node| all | node.must);
        for (name, text) in NAMES.iter().enumerate() {
            let asked = Asked::new(self.names[name].clone(), "");
            let catalog = &self.controllers[self.current].catalog;
            let answer = catalog.find(&asked, self.local(self.current));
            assert_ne!(answer, Answer::Incomplete);
            self.check_answer(self.current, name, &answer);
            for node in &self.nodes {
                let Some(content) = node.names[name] else {
                    continue;
                };
                // A clear that any node has applied has reached all, even if etcd has lost it.
                assert!(
                    content.is_clean_of(applied & self.clears.of_name[name]),
                    "{} has cleared content of {}",
                    node.name,
                    text
                );
                // The name of an output is on the nodes with the newest content only.
                if let Answer::Found(found) = &answer
                    && text.starts_with("artifact")
                {
                    assert_eq!(found.version, content.version);
                }
            }
        }
    }
}
