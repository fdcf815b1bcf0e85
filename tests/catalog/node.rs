//! A node of the simulation: content, volumes, fences and a clock, which survive a restart of its
//! driver. It decides with the product's functions, and keeps the truth beside them for the checks.

use baggageclaim::catalog::{
    Entry, Found, NameHash, Report, State, Supersede, Version, supersedes,
};
use baggageclaim::model::{
    ClusterClock, CutOff, Evictable, Fence, FenceStep, Fences, Name, NamespaceUsage, Timestamp,
    Unused, buckets,
};

use crate::world::Fault;

/// Content. `mask` is the truth: the clears that had reached its makers before they began.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Content {
    pub(crate) version: Version,
    fence: u64,
    mask: u64,
    /// When it was committed, in true time, and whether all clocks agreed then.
    pub(crate) time: u64,
    pub(crate) settled: bool,
    last_used: Timestamp,
}

impl Content {
    pub(crate) fn is_clean_of(&self, clears: u64) -> bool {
        clears & !self.mask == 0
    }
}

/// A volume whose content will be committed under a name.
#[derive(Debug, Clone, Copy)]
struct Volume {
    name: usize,
    fence: u64,
    mask: u64,
    cleared: bool,
    from: Option<Version>,
}

/// Which clears there were, as bits: the truth of the simulation.
#[derive(Debug, Default)]
pub(crate) struct Clears {
    events: Vec<(Fence, u64)>,
    /// For each name, the events that cover it.
    pub(crate) of_name: Vec<u64>,
    names: Vec<(Name, NameHash)>,
}

impl Clears {
    pub(crate) fn new(names: Vec<Name>) -> Self {
        Self {
            events: Vec::new(),
            of_name: vec![0; names.len()],
            names: names
                .into_iter()
                .map(|name| (name.clone(), NameHash::of(&name)))
                .collect(),
        }
    }

    pub(crate) fn count(&self) -> usize {
        self.events.len()
    }

    /// A fence was made. A node that applies it has also done what earlier fences for these names
    /// want.
    pub(crate) fn add(&mut self, fence: &Fence) {
        let bit = 1 << self.events.len();
        let mut includes = bit;
        let covered = |covers: &Fence, name: &Name| covers.covers.covers(name);
        for (index, (earlier, _)) in self.events.iter().enumerate() {
            let mut names = self.names.iter();
            if names.all(|(name, _)| covered(fence, name) || !covered(earlier, name)) {
                includes |= 1 << index;
            }
        }
        for (index, (name, _)) in self.names.iter().enumerate() {
            if covered(fence, name) {
                self.of_name[index] |= bit;
            }
        }
        self.events.push((fence.clone(), includes));
    }

    fn of(&self, fence: &Fence) -> u64 {
        let of = self.events.iter().filter(|(event, _)| event == fence);
        of.fold(0, |bits, (_, includes)| bits | includes)
    }

    fn all(&self) -> u64 {
        (1 << self.events.len()) - 1
    }
}

#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) name: &'static str,
    pub(crate) skew: i64,
    pub(crate) clock: ClusterClock,
    pub(crate) fences: Fences,
    pub(crate) names: Vec<Option<Content>>,
    volumes: Vec<Volume>,
    /// Clears that it has applied: its content must be clean of them.
    pub(crate) must: u64,
    /// Clears that its own content is clean of.
    clean: u64,
    /// An answer that it has not acted on yet.
    pub(crate) fetch: Option<(usize, Found)>,
    fault: Option<Fault>,
}

/// Decides between two commits of one millisecond on two nodes. In a cluster, the artifacts' ids
/// do.
fn tie(node: &str) -> u32 {
    node.bytes().map(u32::from).sum()
}

impl Node {
    pub(crate) fn new(name: &'static str, skew: i64, names: usize, fault: Option<Fault>) -> Self {
        Self {
            name,
            skew,
            clock: ClusterClock::default(),
            fences: Fences::default(),
            names: vec![None; names],
            volumes: Vec::new(),
            must: 0,
            clean: 0,
            fetch: None,
            fault,
        }
    }

    pub(crate) fn local(&self, now: u64) -> Timestamp {
        Timestamp(now.saturating_add_signed(self.skew))
    }

    pub(crate) fn time(&self, now: u64) -> Timestamp {
        self.clock.time(self.local(now))
    }

    /// What it reports of a name.
    pub(crate) fn entry(&self, clears: &Clears, name: usize) -> Option<Entry> {
        let (full, hash) = &clears.names[name];
        let kind = full.reference.kind();
        let entry = |state, version, fence| Entry {
            name: *hash,
            kind,
            state,
            version,
            bytes: 10,
            layers: 1,
            fence,
        };
        if let Some(content) = &self.names[name] {
            return Some(entry(State::Durable, content.version, content.fence));
        }
        let writers = self.volumes.iter().filter(|volume| volume.name == name);
        let fence = writers
            .filter(|volume| !volume.cleared)
            .map(|volume| volume.fence)
            .max()?;
        let version = Version {
            stamp: Timestamp(0),
            tie: 0,
        };
        Some(entry(State::Coming, version, fence))
    }

    /// The report about these names.
    pub(crate) fn report(&self, clears: &Clears, names: &[usize]) -> Report {
        let mut report = Report::default();
        for name in names {
            match self.entry(clears, *name) {
                Some(entry) => report.put.push(entry),
                None => report.drop.push(clears.names[*name].1),
            }
        }
        report
    }

    /// A pod starts with this name, and its content if it is here.
    pub(crate) fn publish(&mut self, clears: &Clears, name: usize, now: u64) {
        let time = self.time(now);
        let mut mask = self.clean;
        let mut from = None;
        if let Some(content) = &mut self.names[name] {
            let covering = clears.of_name[name];
            assert_eq!(
                self.must & covering & !content.mask,
                0,
                "{}: cleared content of {} is forked",
                self.name,
                clears.names[name].0,
            );
            content.last_used = time;
            mask &= content.mask | !covering;
            from = Some(content.version);
        }
        self.volumes.push(Volume {
            name,
            fence: self.fences.newest(),
            mask,
            cleared: false,
            from,
        });
    }

    /// A pod ends. Returns the name of its volume.
    pub(crate) fn end(
        &mut self,
        clears: &Clears,
        volume: usize,
        now: u64,
        settled: bool,
    ) -> Option<usize> {
        if self.volumes.is_empty() {
            return None;
        }
        let volume = self.volumes.swap_remove(volume % self.volumes.len());
        let name = volume.name;
        if volume.cleared {
            return Some(name);
        }
        let covering = self.must & clears.of_name[name];
        assert_eq!(
            covering & !volume.mask,
            0,
            "{}: a writer from before a clear commits {}",
            self.name,
            clears.names[name].0
        );
        let last_used = self.time(now);
        let local = self.local(now);
        let stamp = if self.fault == Some(Fault::LocalStamps) {
            local
        } else {
            self.clock.stamp(local)
        };
        let version = Version {
            stamp,
            tie: tie(self.name),
        };
        self.take(
            clears,
            name,
            Content {
                version,
                fence: volume.fence,
                mask: volume.mask,
                time: now,
                settled,
                last_used,
            },
        );
        Some(name)
    }

    /// Content gets its name, unless other content keeps it.
    fn take(&mut self, clears: &Clears, name: usize, content: Content) {
        let first_wins = clears.names[name].0.reference.first_writer_wins();
        let keeps = self.names[name].is_some_and(|held| {
            if first_wins {
                held.version <= content.version
            } else {
                held.version >= content.version
            }
        });
        if !keeps {
            self.names[name] = Some(content);
        }
    }

    /// Content arrives from a holder. Returns whether it is used.
    pub(crate) fn receive(
        &mut self,
        clears: &Clears,
        name: usize,
        content: Content,
        now: u64,
    ) -> bool {
        let is_cleared = self.fault != Some(Fault::UsesWhatArrives)
            && content.fence < self.fences.covering(&clears.names[name].0);
        if !is_cleared {
            let local = self.local(now);
            self.clock.seen(content.version.stamp, local);
            self.take(clears, name, content);
        }
        !is_cleared
    }

    /// A fence arrives. Returns the names to report, or `None` if the stream must begin again.
    pub(crate) fn fence(&mut self, clears: &Clears, fence: &Fence) -> Option<Vec<usize>> {
        let step = self.fences.step(fence);
        match step {
            FenceStep::Known => return Some(Vec::new()),
            FenceStep::Rejoin => return None,
            FenceStep::Apply => self.clean |= clears.of(fence),
            FenceStep::Missed => self.clean = clears.all(),
        }
        self.must |= clears.of(fence);
        let mut changed = Vec::new();
        for (name, content) in self.names.iter_mut().enumerate() {
            let full = &clears.names[name].0;
            if content.is_some_and(|content| fence.clears(step, full, content.fence)) {
                *content = None;
                changed.push(name);
            }
        }
        for volume in &mut self.volumes {
            let name = &clears.names[volume.name].0;
            let is_marked = self.fault != Some(Fault::MarksNoWriters);
            if is_marked && fence.clears(step, name, volume.fence) {
                volume.cleared = true;
                changed.push(volume.name);
            }
        }
        self.fences.insert(fence.clone());
        changed.sort_unstable();
        changed.dedup();
        Some(changed)
    }

    /// Newer content is elsewhere. Returns whether the name is gone.
    pub(crate) fn supersede(&mut self, clears: &Clears, order: &Supersede) -> Option<usize> {
        let name = clears
            .names
            .iter()
            .position(|(_, hash)| *hash == order.name)?;
        let content = self.names[name]?;
        let covering = self.fences.covering(&clears.names[name].0);
        let newer = (order.version, order.fence);
        let is_taken = supersedes(newer, content.version, covering);
        is_taken.then(|| {
            self.names[name] = None;
            name
        })
    }

    fn is_in_use(&self, name: usize, content: &Content) -> bool {
        let mut volumes = self.volumes.iter();
        volumes.any(|volume| volume.name == name && volume.from == Some(content.version))
    }

    pub(crate) fn usage(&self) -> NamespaceUsage {
        let mut unused = Vec::new();
        let mut usage = NamespaceUsage {
            fence: self.fences.newest(),
            ..NamespaceUsage::default()
        };
        let stamps = self.names.iter().flatten();
        let oldest = stamps.map(|content| content.version.stamp).min();
        usage.oldest = oldest.unwrap_or_default();
        for (name, content) in self.names.iter().enumerate() {
            let Some(content) = content else { continue };
            usage.bytes += 10;
            usage.artifacts += 1;
            if !self.is_in_use(name, content) {
                unused.push(Unused {
                    last_used: content.last_used,
                    bytes: 10,
                });
            }
        }
        usage.unused = buckets(unused);
        usage
    }

    /// Returns the names that are gone.
    pub(crate) fn cut_off(&mut self, clears: &Clears, cut: &CutOff) -> Vec<usize> {
        let mut gone = Vec::new();
        for name in 0..self.names.len() {
            let Some(content) = self.names[name] else {
                continue;
            };
            let in_use = self.is_in_use(name, &content);
            let evictable = Evictable {
                cache: clears.names[name].0.reference.cache().map(|it| it.0),
                in_use: in_use && self.fault != Some(Fault::EvictsWhatIsUsed),
                last_used: content.last_used,
                sealed: content.version.stamp,
            };
            if cut.evicts(&evictable).is_some() {
                assert!(!in_use, "{}: content in use is evicted", self.name);
                self.names[name] = None;
                gone.push(name);
            }
        }
        gone
    }
}
