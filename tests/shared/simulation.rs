//! The protocol without storage: publications and collectors take the product's own decisions in
//! random schedules, with lists that are stale, requests that take effect late, and stalls of hours
//! and days. What a name shows must never be missing. Variants that break one rule must be caught.

use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::time::Duration;

use crate::common::random::Random;
use baggageclaim::shared::decide::{self, GRACE, PUBLISH_WITHIN, Seen, Verdict};

const SCHEDULES: u64 = 100_000;
/// How stale a list may be, and how late a request may take effect, in minutes.
const STALE: u64 = 60;
const DAYS: u64 = 6;

/// What the actors do, and in broken variants what they should not.
#[derive(Debug, Clone, Copy)]
struct Rules {
    grace: Duration,
    reuses_marked: bool,
    publishes_late: bool,
    deletes_at_once: bool,
}

const RIGHT: Rules = Rules {
    grace: GRACE,
    reuses_marked: false,
    publishes_late: false,
    deletes_at_once: false,
};

/// Minutes between two steps: near the limits that matter.
fn pause(random: &mut Random) -> u64 {
    const PAUSES: [u64; 12] = [0, 1, 5, 30, 60, 119, 239, 241, 600, 1439, 1441, 2900];
    // Mostly short: a long one ends the publication.
    let most = if random.below(3) == 0 {
        PAUSES.len()
    } else {
        6
    };
    PAUSES[random.index(most)]
}

#[derive(Debug, Clone, Copy)]
struct Object {
    written: u64,
    deleted: Option<u64>,
}

impl Object {
    fn new(written: u64) -> Self {
        Self {
            written,
            deleted: None,
        }
    }

    /// Whether a list at this time may show it, and whether it must.
    fn is_listed(&self, now: u64, random: &mut Random) -> bool {
        if let Some(deleted) = self.deleted {
            return now < deleted + STALE && random.below(2) == 0;
        }
        now >= self.written + STALE || (now >= self.written && random.below(2) == 0)
    }
}

struct Manifest {
    object: Object,
    marker: Option<Object>,
    layers: Vec<usize>,
}

struct Layer {
    object: Object,
    marker: Option<Object>,
    digest: u64,
}

enum Step {
    Look,
    Layers(Publication),
    Manifest(Publication),
    Name(Publication, usize, u64),
    Effect(u64, usize),
    Withdraw(u64, usize),
    Begin,
    Manifests(Collection),
    LayersOf(Collection),
    Act(Vec<Action>),
}

struct Publication {
    name: u64,
    looked: u64,
    shown: Vec<usize>,
    layers: Vec<usize>,
}

struct Collection {
    clock: u64,
    shown: BTreeSet<usize>,
    used: BTreeSet<usize>,
    actions: Vec<Action>,
}

#[derive(Clone, Copy)]
enum Action {
    MarkManifest(usize),
    MarkLayer(usize),
    DeleteManifest(usize),
    DeleteLayer(usize),
}

struct World {
    now: u64,
    random: Random,
    rules: Rules,
    names: BTreeMap<u64, usize>,
    manifests: Vec<Manifest>,
    layers: Vec<Layer>,
    queue: BinaryHeap<std::cmp::Reverse<(u64, usize)>>,
    steps: Vec<Option<Step>>,
    deletions: u64,
    reuses: u64,
    withdrawals: u64,
}

fn minutes(minutes: u64) -> Duration {
    Duration::from_secs(60 * minutes)
}

impl World {
    fn new(seed: u64, rules: Rules) -> Self {
        let mut world = Self {
            now: 0,
            random: Random::new(seed),
            rules,
            names: BTreeMap::new(),
            manifests: Vec::new(),
            layers: Vec::new(),
            queue: BinaryHeap::new(),
            steps: Vec::new(),
            deletions: 0,
            reuses: 0,
            withdrawals: 0,
        };
        for _ in 0..2 {
            world.after(0, Step::Look);
        }
        for _ in 0..2 {
            world.after(0, Step::Begin);
        }
        world
    }

    fn after(&mut self, pause: u64, step: Step) {
        self.queue
            .push(std::cmp::Reverse((self.now + pause, self.steps.len())));
        self.steps.push(Some(step));
    }

    fn later(&mut self, step: Step) {
        let pause = pause(&mut self.random);
        self.after(pause, step);
    }

    /// Runs to the end; `Err` says what is missing.
    fn run(&mut self) -> Result<(), String> {
        while let Some(std::cmp::Reverse((at, step))) = self.queue.pop() {
            if at > DAYS * 24 * 60 {
                return Ok(());
            }
            self.now = at;
            let step = self.steps[step].take().expect("a step is taken once");
            self.step(step);
            self.check()?;
        }
        Ok(())
    }

    fn check(&self) -> Result<(), String> {
        for (name, manifest) in &self.names {
            let shown = &self.manifests[*manifest];
            if shown.object.deleted.is_some() {
                return Err(format!(
                    "at {}: manifest {manifest} of name {name}",
                    self.now
                ));
            }
            let missing = shown
                .layers
                .iter()
                .find(|layer| self.layers[**layer].object.deleted.is_some());
            if let Some(layer) = missing {
                return Err(format!("at {}: layer {layer} of name {name}", self.now));
            }
        }
        Ok(())
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Look => {
                let name = self.random.below(3);
                let shown = self
                    .names
                    .get(&name)
                    .map(|it| self.manifests[*it].layers.clone());
                let publication = Publication {
                    name,
                    looked: self.now,
                    shown: shown.unwrap_or_default(),
                    layers: Vec::new(),
                };
                self.later(Step::Layers(publication));
            }
            Step::Layers(publication) => self.layer(publication),
            Step::Manifest(publication) => self.manifest(publication),
            Step::Name(publication, manifest, written) => {
                if self.is_in_time(written) {
                    // It takes effect late, or never.
                    let delay = self.random.below(STALE);
                    if self.random.below(8) > 0 {
                        self.after(delay, Step::Effect(publication.name, manifest));
                    }
                }
                self.later(Step::Look);
            }
            Step::Effect(name, manifest) => drop(self.names.insert(name, manifest)),
            // Conditional: a commit that came meanwhile stays.
            Step::Withdraw(name, manifest) => {
                if self.names.get(&name) == Some(&manifest) {
                    self.names.remove(&name);
                    self.withdrawals += 1;
                }
            }
            Step::Begin => self.begin(),
            Step::Manifests(collection) => self.list_manifests(collection),
            Step::LayersOf(collection) => self.list_layers(collection),
            Step::Act(actions) => self.act(actions),
        }
    }

    fn is_in_time(&self, since: u64) -> bool {
        self.rules.publishes_late || decide::in_time(minutes(self.now - since), PUBLISH_WITHIN)
    }

    /// Adds a layer: of the parent, found by a list, or uploaded.
    fn layer(&mut self, mut publication: Publication) {
        let choice = self.random.below(3);
        let found = match choice {
            0 if !publication.shown.is_empty() => {
                let place = self.random.index(publication.shown.len());
                Some(publication.shown[place])
            }
            // A list shows this moment, so it is a new look only for this layer: the time of the
            // first counts.
            1 => self.find(),
            _ => None,
        };
        let layer = found.unwrap_or_else(|| {
            let digest = self.random.below(3);
            self.layers.push(Layer {
                object: Object::new(self.now),
                marker: None,
                digest,
            });
            self.layers.len() - 1
        });
        publication.layers.push(layer);
        if self.random.below(2) == 0 {
            self.later(Step::Layers(publication));
        } else {
            self.later(Step::Manifest(publication));
        }
    }

    fn find(&mut self) -> Option<usize> {
        let digest = self.random.below(3);
        let mut found = None;
        for place in 0..self.layers.len() {
            let layer = &self.layers[place];
            let marker = layer.marker;
            if layer.digest != digest || !layer.object.is_listed(self.now, &mut self.random) {
                continue;
            }
            let condemned = marker.is_some_and(|it| it.is_listed(self.now, &mut self.random));
            // The footer is read: what is gone is not used.
            let is_there = self.layers[place].object.deleted.is_none();
            if is_there && (self.rules.reuses_marked || decide::may_reuse(condemned)) {
                found = Some(place);
            }
        }
        self.reuses += u64::from(found.is_some());
        found
    }

    fn manifest(&mut self, publication: Publication) {
        if !self.is_in_time(publication.looked) {
            return self.later(Step::Look);
        }
        let delay = self.random.below(STALE);
        // The request may take effect late; the name is written after its answer.
        self.manifests.push(Manifest {
            object: Object::new(self.now + delay),
            marker: None,
            layers: publication.layers.clone(),
        });
        let written = self.now + delay;
        let pause = delay + pause(&mut self.random);
        let place = self.manifests.len() - 1;
        self.after(pause, Step::Name(publication, place, written));
    }

    fn begin(&mut self) {
        // A name is listed late, but what it shows is read as it is.
        let mut shown = BTreeSet::new();
        for (_, manifest) in self.names.clone() {
            shown.insert(manifest);
        }
        // A time to live is over, or a budget evicts it.
        let place = self.random.below(3);
        if let Some(manifest) = self.names.get(&place)
            && self.random.below(4) == 0
        {
            let step = Step::Withdraw(place, *manifest);
            self.later(step);
        }
        let collection = Collection {
            clock: self.now,
            shown,
            used: BTreeSet::new(),
            actions: Vec::new(),
        };
        let pause = self.random.below(30);
        self.after(pause, Step::Manifests(collection));
    }

    fn seen(&mut self, object: Object, marker: Option<Object>, shown: bool, clock: u64) -> Verdict {
        let is_there = object.is_listed(self.now, &mut self.random);
        let marker = marker.filter(|it| it.is_listed(self.now, &mut self.random));
        let age = |it: Object| minutes(clock.saturating_sub(it.written));
        let seen = Seen {
            age: is_there.then(|| age(object)),
            marker: marker.map(age),
            shown,
        };
        decide::judge(seen, self.rules.grace)
    }

    fn list_manifests(&mut self, mut collection: Collection) {
        for place in 0..self.manifests.len() {
            let manifest = &self.manifests[place];
            let (object, marker) = (manifest.object, manifest.marker);
            let listed = object.is_listed(self.now, &mut self.random);
            if listed && self.manifests[place].object.deleted.is_none() {
                collection.used.extend(&self.manifests[place].layers);
            }
            if !listed {
                continue;
            }
            let shown = collection.shown.contains(&place);
            match self.seen(object, marker, shown, collection.clock) {
                Verdict::Condemn if self.rules.deletes_at_once => {
                    collection.actions.push(Action::DeleteManifest(place));
                }
                Verdict::Condemn => collection.actions.push(Action::MarkManifest(place)),
                Verdict::Delete => collection.actions.push(Action::DeleteManifest(place)),
                _ => {}
            }
        }
        let pause = self.random.below(30);
        self.after(pause, Step::LayersOf(collection));
    }

    fn list_layers(&mut self, mut collection: Collection) {
        for place in 0..self.layers.len() {
            let (object, marker) = (self.layers[place].object, self.layers[place].marker);
            let shown = collection.used.contains(&place);
            match self.seen(object, marker, shown, collection.clock) {
                Verdict::Condemn if self.rules.deletes_at_once => {
                    collection.actions.push(Action::DeleteLayer(place));
                }
                Verdict::Condemn => collection.actions.push(Action::MarkLayer(place)),
                Verdict::Delete => collection.actions.push(Action::DeleteLayer(place)),
                _ => {}
            }
        }
        self.later(Step::Act(collection.actions));
    }

    /// Does one action, then the next after a pause: a collector may stall for days.
    fn act(&mut self, mut actions: Vec<Action>) {
        let Some(action) = actions.pop() else {
            let pause = 60 + pause(&mut self.random);
            return self.after(pause, Step::Begin);
        };
        let now = self.now;
        match action {
            Action::MarkManifest(place) => {
                self.manifests[place].marker.get_or_insert(Object::new(now));
            }
            Action::MarkLayer(place) => {
                self.layers[place].marker.get_or_insert(Object::new(now));
            }
            Action::DeleteManifest(place) => {
                self.manifests[place].object.deleted.get_or_insert(now);
                self.deletions += 1;
            }
            Action::DeleteLayer(place) => {
                self.layers[place].object.deleted.get_or_insert(now);
                self.deletions += 1;
            }
        }
        let pause = if self.random.below(6) == 0 {
            pause(&mut self.random)
        } else {
            0
        };
        self.after(pause, Step::Act(actions));
    }
}

/// What some schedules did, and the first of them that went wrong.
#[derive(Default)]
struct Searched {
    wrong: Option<(u64, String)>,
    deletions: u64,
    reuses: u64,
    withdrawals: u64,
}

fn search(rules: Rules, seeds: impl Iterator<Item = u64>) -> Searched {
    let mut searched = Searched::default();
    for seed in seeds {
        let mut world = World::new(seed, rules);
        let ended = world.run();
        searched.deletions += world.deletions;
        searched.reuses += world.reuses;
        searched.withdrawals += world.withdrawals;
        if let Err(missing) = ended {
            searched.wrong = Some((seed, missing));
            break;
        }
    }
    searched
}

#[test]
fn what_a_name_shows_is_never_missing() {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let searched: Vec<Searched> = std::thread::scope(|scope| {
        let seeds = |thread: usize| (1..=SCHEDULES).skip(thread).step_by(threads);
        let jobs: Vec<_> = (0..threads)
            .map(|thread| scope.spawn(move || search(RIGHT, seeds(thread))))
            .collect();
        let jobs = jobs.into_iter();
        jobs.map(|job| job.join().expect("join")).collect()
    });
    for searched in &searched {
        assert_eq!(searched.wrong, None);
    }
    // The schedules must reach what they are about.
    let deletions: u64 = searched.iter().map(|it| it.deletions).sum();
    let reuses: u64 = searched.iter().map(|it| it.reuses).sum();
    let withdrawals: u64 = searched.iter().map(|it| it.withdrawals).sum();
    assert!(
        deletions > SCHEDULES && reuses > SCHEDULES / 4 && withdrawals > SCHEDULES / 4,
        "{deletions} deletions, {reuses} reuses, {withdrawals} withdrawals"
    );
}

#[test]
fn broken_variants_are_caught() {
    let hours = |hours: u64| Duration::from_secs(3600 * hours);
    for (what, rules) in [
        (
            "no grace",
            Rules {
                grace: hours(0),
                ..RIGHT
            },
        ),
        (
            "a grace shorter than a publication",
            Rules {
                grace: hours(3),
                ..RIGHT
            },
        ),
        (
            "a publication uses what has a marker",
            Rules {
                reuses_marked: true,
                ..RIGHT
            },
        ),
        (
            "a publication may take any time",
            Rules {
                publishes_late: true,
                ..RIGHT
            },
        ),
        (
            "no second phase",
            Rules {
                deletes_at_once: true,
                ..RIGHT
            },
        ),
    ] {
        let wrong = search(rules, 1..=SCHEDULES).wrong;
        let (seed, missing) = wrong.unwrap_or_else(|| panic!("{what}: not caught"));
        println!("{what}: caught by schedule {seed}: {missing} is missing");
    }
}
