//! One caller: a kubelet worker with a few pods, and a small model of what must be true of them.
//!
//! An answered call took effect. An unanswered one, because the driver died, took effect completely
//! or not at all. The caller repeats it, as kubelet does, before any other call for that volume.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use baggageclaim::kubelet_double::{Pod, PublishOptions};
use baggageclaim::proto::admin::v1 as api;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tonic::Code;

use crate::claims::{self, ClaimOp, Claims};
use crate::common::Snapshot;
use crate::common::random::Random;
use crate::content::{self, Seen};
use crate::driver::{Wire, unexpected};
use crate::figures::{Fault, Stop, count};

/// How many volumes a caller has at once; one more only looks.
pub(crate) const SLOTS: u8 = 3;
const LOOKING: u8 = SLOTS;
/// The names that a caller has for itself: outputs, task caches, a resource cache; and one that is
/// everybody's.
pub(crate) const NAMES: u8 = 6;
pub(crate) const SHARED: u8 = NAMES;

/// When a volume is sealed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Commit {
    OnSuccess,
    Always,
    OnMarker,
    Never,
}

impl Commit {
    fn word(self) -> &'static str {
        match self {
            Self::OnSuccess => "on-success",
            Self::Always => "always",
            Self::OnMarker => "on-marker",
            Self::Never => "never",
        }
    }
}

/// The kind of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum What {
    Scratch,
    Input(u8),
    Made(u8, Commit),
}

/// One action of a caller. An action that does not fit the state does nothing, so any list of
/// actions is a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Op {
    Publish(u8, What),
    /// Kubelet was restarted and publishes existing volumes again.
    Again(u8),
    Write(u8, u64),
    Outcome(u8, bool),
    /// With the marker, if it is one that wants it.
    Unpublish(u8, bool),
    /// Tells how a pod ended that has long gone.
    Late(bool),
    Look(u8),
    Destroy(u8),
    Settle,
    Reap,
    Lists,
    /// Exports what a name holds, and imports it under the same name.
    Copy(u8),
    Claim(ClaimOp),
}

impl Op {
    pub(crate) fn any(random: &mut Random) -> Self {
        let slot = u8::try_from(random.below(SLOTS.into())).expect("small");
        let name = u8::try_from(random.below(u64::from(NAMES) + 1)).expect("small");
        let commits = [
            Commit::OnSuccess,
            Commit::OnSuccess,
            Commit::Always,
            Commit::OnMarker,
            Commit::Never,
        ];
        let commit = *random.pick(&commits);
        match random.below(100) {
            0..=3 => Self::Publish(slot, What::Scratch),
            4..=9 => Self::Publish(slot, What::Input(name)),
            10..=27 => Self::Publish(slot, What::Made(name, commit)),
            28..=30 => Self::Again(slot),
            31..=38 => Self::Write(slot, random.next()),
            39..=45 => Self::Outcome(slot, random.percent(80)),
            46..=59 => Self::Unpublish(slot, random.percent(70)),
            60..=62 => Self::Late(random.percent(80)),
            63..=69 => Self::Look(name),
            70..=72 => Self::Destroy(name),
            73 => Self::Settle,
            74 => Self::Reap,
            75 => Self::Lists,
            76..=77 => Self::Copy(name),
            _ => Self::Claim(ClaimOp::any(random)),
        }
    }
}

/// The state that all callers know.
#[derive(Debug, Default)]
pub(crate) struct Together {
    /// By tenant: what the cache that everybody commits to may hold, by what its file `newest`
    /// says.
    pub(crate) generations: Mutex<BTreeMap<(String, String), Arc<Snapshot>>>,
    /// Unused content may be evicted at any time.
    pub(crate) evicting: bool,
}

/// Content that may become what a name holds.
#[derive(Debug)]
struct Coming {
    id: u64,
    seen: Seen,
    /// It was promised.
    certain: bool,
    /// The call that promises it is not answered yet.
    open: bool,
    /// All was settled meanwhile: it may have come, and gone again, before it is answered.
    overtaken: bool,
}

/// The allowed content of a name.
#[derive(Debug)]
struct Name {
    now: Vec<Seen>,
    coming: Vec<Coming>,
}

impl Name {
    fn forget_settled(&mut self) {
        self.coming.retain(|coming| coming.open);
        for coming in &mut self.coming {
            coming.overtaken = true;
        }
    }
}

#[derive(Debug)]
enum Slot {
    Empty,
    /// Asked for and not answered; it may start from any of these.
    Asked {
        pod: Pod,
        what: What,
        allowed: Vec<Seen>,
    },
    Live(Live),
    Leaving(Leaving),
}

/// A volume that a pod has.
#[derive(Debug)]
struct Live {
    pod: Pod,
    what: What,
    content: Arc<Snapshot>,
    /// The content that will be sealed.
    becomes: Option<u8>,
    told: Option<bool>,
    /// That was asked and not answered.
    telling: Option<bool>,
}

/// A volume whose unpublish was not answered yet.
#[derive(Debug)]
struct Leaving {
    pod: Pod,
    /// Its promise.
    promises: Vec<u64>,
    certain: bool,
    /// It waits for a word: for which name, and what it holds.
    awaits: Option<(u8, Arc<Snapshot>)>,
    /// The pod never had it, so no one will report success.
    disowned: bool,
}

/// A pod that has gone and has not been said to have succeeded or failed.
#[derive(Debug)]
struct Awaiting {
    uid: String,
    name: u8,
    content: Arc<Snapshot>,
    /// The report in progress, and its promise.
    telling: Option<(bool, Option<u64>)>,
}

/// One caller.
#[derive(Debug)]
pub(crate) struct Caller {
    pub(crate) index: usize,
    together: Arc<Together>,
    next: u64,
    slots: Vec<Slot>,
    names: Vec<Name>,
    awaiting: Vec<Awaiting>,
    pub(crate) claims: Claims,
}

const VOLUME: &str = "v";

impl Caller {
    pub(crate) fn new(index: usize, together: &Arc<Together>, live_clones: bool) -> Self {
        let fresh = || Name {
            now: vec![Seen::Absent],
            coming: Vec::new(),
        };
        Self {
            index,
            together: together.clone(),
            next: 0,
            slots: (0..=SLOTS).map(|_| Slot::Empty).collect(),
            names: (0..NAMES).map(|_| fresh()).collect(),
            awaiting: Vec::new(),
            claims: Claims::new(index, live_clones),
        }
    }

    pub(crate) fn tenant(&self) -> String {
        format!("tenant-{}", self.index % 2)
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// As an input writes it.
    pub(crate) fn reference(&self, name: u8) -> String {
        let index = self.index;
        match name {
            SHARED => "task-cache/shared".to_owned(),
            3 => format!("task-cache/c{index}-key"),
            4 => format!("task-cache/c{index}-other"),
            5 => format!("resource-cache/c{index}"),
            name => format!("artifact/c{index}-n{name}"),
        }
    }

    fn attributes(&self, what: What) -> Vec<(&'static str, String)> {
        let (name, commit) = match what {
            What::Scratch => return Vec::new(),
            What::Input(name) => {
                return vec![("type", "input".into()), ("from", self.reference(name))];
            }
            What::Made(name, commit) => (name, commit),
        };
        let reference = self.reference(name);
        let (kind, word) = reference.split_once('/').expect("a reference");
        let (kind, key) = match kind {
            "artifact" => ("output", "name"),
            kind => (kind, "key"),
        };
        let mut attributes = vec![
            ("type", kind.to_owned()),
            (key, word.to_owned()),
            ("commit", commit.word().to_owned()),
        ];
        if name == 4 {
            attributes.push(("restoreKeys", format!("c{}-key", self.index)));
        }
        attributes
    }

    /// The content that a name may have now. Not for the shared one.
    fn possible(&self, name: u8) -> Vec<Seen> {
        let known = &self.names[usize::from(name)];
        let mut possible = known.now.clone();
        possible.extend(known.coming.iter().map(|coming| coming.seen.clone()));
        if self.together.evicting {
            possible.push(Seen::Absent);
        }
        possible
    }

    /// The possible parents of a volume.
    fn starts_from(&self, what: What) -> Vec<Seen> {
        match what {
            What::Scratch | What::Made(0..=2, _) => vec![Seen::Empty],
            What::Input(SHARED) | What::Made(SHARED, _) => {
                let generations = self.together.generations.lock();
                let mine = self.tenant();
                let of_ours = generations
                    .iter()
                    .filter(|((tenant, _), _)| *tenant == mine);
                let seen = of_ours.map(|(_, content)| Seen::Exactly(content.clone()));
                // That a commit was promised once is checked in the lists.
                seen.chain([Seen::Absent, Seen::Empty]).collect()
            }
            What::Made(4, _) => {
                let mut possible = self.possible(4);
                if possible.iter().any(|seen| matches!(seen, Seen::Absent)) {
                    possible.extend(self.possible(3));
                }
                possible
            }
            What::Input(name) | What::Made(name, _) => self.possible(name),
        }
    }

    /// The content of a name after a promise in progress.
    fn comes(&mut self, name: u8, seen: Seen) -> Option<u64> {
        if name == SHARED {
            return None;
        }
        let id = self.number();
        self.names[usize::from(name)].coming.push(Coming {
            id,
            seen,
            certain: false,
            open: true,
            overtaken: false,
        });
        Some(id)
    }

    fn answered(&mut self, ids: &[u64], certain: bool) {
        for coming in self.names.iter_mut().flat_map(|name| &mut name.coming) {
            if ids.contains(&coming.id) {
                coming.open = false;
                coming.certain = certain && !coming.overtaken;
            }
        }
    }

    /// All that was promised is sealed now.
    pub(crate) fn settled(&mut self) {
        for (index, name) in self.names.iter_mut().enumerate() {
            let mut next: Vec<Seen> = Vec::new();
            let any_certain = name.coming.iter().any(|coming| coming.certain);
            let first_wins = index == 5;
            let held = |seen: &&Seen| !matches!(seen, Seen::Absent);
            // One that was evicted has another first writer.
            let evicting = self.together.evicting;
            if first_wins && !evicting && name.now.iter().all(|seen| held(&seen)) {
                name.forget_settled();
                continue;
            }
            if !any_certain {
                next.extend(name.now.iter().cloned());
            } else if first_wins {
                next.extend(name.now.iter().filter(held).cloned());
            }
            next.extend(name.coming.iter().map(|coming| coming.seen.clone()));
            name.now = next;
            name.forget_settled();
        }
    }

    /// Does one thing; what an earlier death has left open on the same volume is brought to its end
    /// first.
    pub(crate) async fn act(&mut self, wire: &Wire, op: Op) -> Result<(), Stop> {
        match op {
            Op::Publish(slot, what) => {
                self.finish(wire, slot, true).await?;
                if matches!(self.slots[usize::from(slot)], Slot::Empty) {
                    self.publish(wire, slot, what).await?;
                }
            }
            Op::Again(slot) => {
                self.finish(wire, slot, true).await?;
                self.again(wire, slot).await?;
            }
            Op::Write(slot, seed) => {
                self.finish(wire, slot, true).await?;
                self.write(wire, slot, seed)?;
            }
            Op::Outcome(slot, succeeded) => {
                self.finish(wire, slot, true).await?;
                if let Slot::Live(live) = &mut self.slots[usize::from(slot)]
                    && live.told.is_none()
                {
                    live.telling = Some(succeeded);
                    self.tell(wire, slot).await?;
                }
            }
            Op::Unpublish(slot, marked) => {
                self.finish(wire, slot, false).await?;
                self.leave(slot, marked)?;
                self.finish(wire, slot, false).await?;
            }
            Op::Late(succeeded) => {
                if let Some(awaiting) = self.awaiting.first() {
                    if awaiting.telling.is_none() {
                        let (name, content) = (awaiting.name, awaiting.content.clone());
                        let id = if succeeded {
                            self.comes(name, Seen::Exactly(content))
                        } else {
                            None
                        };
                        self.awaiting[0].telling = Some((succeeded, id));
                    }
                    self.tell_late(wire).await?;
                }
            }
            Op::Look(name) => {
                self.finish(wire, LOOKING, false).await?;
                self.leave(LOOKING, false)?;
                self.finish(wire, LOOKING, false).await?;
                self.publish(wire, LOOKING, What::Input(name)).await?;
                self.leave(LOOKING, false)?;
                self.finish(wire, LOOKING, false).await?;
            }
            Op::Destroy(name) if name != SHARED => self.destroy(wire, name).await?,
            Op::Destroy(_) => {}
            Op::Settle => {
                wire.settle().await?;
                self.settled();
            }
            Op::Reap => wire.reap().await?,
            Op::Lists => {
                wire.volumes().await?;
                wire.artifacts().await?;
                claims::lists(wire).await?;
            }
            Op::Copy(name) => self.copy(wire, name).await?,
            Op::Claim(op) => self.claims.act(wire, op).await?,
        }
        Ok(())
    }

    /// Completes an operation that a death interrupted; a publish only if the volume is still
    /// wanted.
    async fn finish(&mut self, wire: &Wire, slot: u8, wanted: bool) -> Result<(), Stop> {
        match &self.slots[usize::from(slot)] {
            Slot::Asked { .. } if wanted => self.ask(wire, slot).await,
            Slot::Live(live) if live.telling.is_some() => self.tell(wire, slot).await,
            Slot::Leaving(_) => self.finish_leaving(wire, slot).await,
            Slot::Empty | Slot::Asked { .. } | Slot::Live(_) => Ok(()),
        }
    }

    async fn publish(&mut self, wire: &Wire, slot: u8, what: What) -> Result<(), Stop> {
        // One that is everybody's is always committed: what it may hold is known by what was
        // written.
        let what = match what {
            What::Made(SHARED, _) => What::Made(SHARED, Commit::Always),
            // A resource cache may only narrow when it is sealed.
            What::Made(5, Commit::Always) => What::Made(5, Commit::OnSuccess),
            what => what,
        };
        let number = self.number();
        let uid = format!("c{}-{slot}-{number}", self.index);
        let pod = wire.kubelet.pod_with_uid(&self.tenant(), &uid, &uid);
        self.slots[usize::from(slot)] = Slot::Asked {
            pod,
            what,
            allowed: Vec::new(),
        };
        self.ask(wire, slot).await
    }

    async fn ask(&mut self, wire: &Wire, slot: u8) -> Result<(), Stop> {
        let Slot::Asked { pod, what, .. } = &self.slots[usize::from(slot)] else {
            return Ok(());
        };
        let (pod, what) = (again_at(wire, pod), *what);
        let mut now = self.starts_from(what);
        if let Slot::Asked { allowed, .. } = &mut self.slots[usize::from(slot)] {
            allowed.append(&mut now);
        }
        let attributes = self.attributes(what);
        let answer = pod
            .publish(VOLUME, attributes, PublishOptions::default())
            .await;
        // Others go on writing what is everybody's.
        let mut now = self.starts_from(what);
        let Slot::Asked { allowed, .. } = &mut self.slots[usize::from(slot)] else {
            unreachable!("only this caller changes it");
        };
        allowed.append(&mut now);
        let input = matches!(what, What::Input(_));
        let absent = allowed.iter().any(|seen| matches!(seen, Seen::Absent));
        let operation = format!("publish {what:?} of {}", pod.uid());
        match wire.answered(&operation, answer, &[Code::NotFound, Code::Aborted])? {
            Ok(_) => {}
            Err(Code::NotFound) if input && absent => {
                pod.remove().map_err(cannot("remove a pod"))?;
                self.slots[usize::from(slot)] = Slot::Empty;
                return Ok(());
            }
            // Its maker was too slow. The caller repeats it, or does not.
            Err(Code::Aborted) if input => return Ok(()),
            Err(Code::NotFound) => {
                return Err(Fault::lost(format!("{operation}: NOT_FOUND")).into());
            }
            Err(code) => return Err(Fault::wrong(format!("{operation}: {code:?}")).into()),
        }
        let target = pod.target(VOLUME);
        let allowed = allowed
            .iter()
            .filter(|seen| !(input && matches!(seen, Seen::Absent)));
        let allowed: Vec<Seen> = allowed.cloned().collect();
        let content = content::expect(&target, &allowed).map_err(|fault| fault.at(&operation))?;
        let becomes = match what {
            // A resource cache that was found is complete.
            What::Made(5, _) if !content.is_empty() => None,
            What::Made(name, commit) if commit != Commit::Never => Some(name),
            _ => None,
        };
        self.slots[usize::from(slot)] = Slot::Live(Live {
            pod,
            what,
            content: Arc::new(content),
            becomes,
            told: None,
            telling: None,
        });
        if becomes.is_some() {
            let seed = self.number();
            self.write(wire, slot, seed)?;
        }
        Ok(())
    }

    async fn again(&mut self, wire: &Wire, slot: u8) -> Result<(), Stop> {
        let Slot::Live(live) = &self.slots[usize::from(slot)] else {
            return Ok(());
        };
        let (pod, attributes) = (again_at(wire, &live.pod), self.attributes(live.what));
        let answer = pod
            .republish(VOLUME, attributes, PublishOptions::default())
            .await;
        wire.must(&format!("publish {} again", pod.uid()), answer)?;
        let seen = [Seen::Exactly(live.content.clone())];
        content::expect(&pod.target(VOLUME), &seen)?;
        Ok(())
    }

    fn write(&mut self, wire: &Wire, slot: u8, seed: u64) -> Result<(), Stop> {
        let number = self.number();
        let tag = format!("c{}-{number}", self.index);
        let tenant = self.tenant();
        let Slot::Live(live) = &mut self.slots[usize::from(slot)] else {
            return Ok(());
        };
        let target = live.pod.target(VOLUME);
        content::change(&target, seed, &tag).map_err(cannot("write into a volume"))?;
        let content = content::read(&target)?;
        if std::fs::read_to_string(target.join("newest")).ok() != Some(tag.clone()) {
            let what = format!("{}: what was just written is not read", target.display());
            return Err(Fault::lost(what).into());
        }
        live.content = Arc::new(content);
        count(&wire.figures.operations);
        if live.becomes == Some(SHARED) {
            let mut generations = self.together.generations.lock();
            generations.insert((tenant, tag), live.content.clone());
        }
        Ok(())
    }

    async fn tell(&mut self, wire: &Wire, slot: u8) -> Result<(), Stop> {
        let Slot::Live(live) = &mut self.slots[usize::from(slot)] else {
            return Ok(());
        };
        let Some(succeeded) = live.telling else {
            return Ok(());
        };
        wire.outcome(live.pod.uid(), succeeded).await?;
        live.telling = None;
        live.told = Some(succeeded);
        Ok(())
    }

    async fn tell_late(&mut self, wire: &Wire) -> Result<(), Stop> {
        let Some((succeeded, id)) = self.awaiting[0].telling else {
            return Ok(());
        };
        wire.outcome(&self.awaiting[0].uid, succeeded).await?;
        self.awaiting.remove(0);
        self.answered(id.as_slice(), true);
        Ok(())
    }

    /// The pod goes: what its unpublish may promise is known before it is asked for.
    fn leave(&mut self, slot: u8, marked: bool) -> Result<(), Stop> {
        let at = usize::from(slot);
        let leaving = match std::mem::replace(&mut self.slots[at], Slot::Empty) {
            Slot::Empty => return Ok(()),
            Slot::Leaving(leaving) => leaving,
            Slot::Asked { pod, what, allowed } => {
                let mut promises = Vec::new();
                if let What::Made(name, Commit::Always) = what {
                    for seen in allowed {
                        let seen = match seen {
                            Seen::Absent => Seen::Empty,
                            seen => seen,
                        };
                        promises.extend(self.comes(name, seen));
                    }
                }
                Leaving {
                    pod,
                    promises,
                    certain: false,
                    awaits: None,
                    disowned: true,
                }
            }
            Slot::Live(live) => {
                let mut awaits = None;
                let mut promises = Vec::new();
                if let (Some(name), What::Made(_, commit)) = (live.becomes, live.what) {
                    let mut content = live.content.clone();
                    let sealed = match commit {
                        Commit::Always => true,
                        Commit::OnMarker => {
                            content = content::without_root_time(&content);
                            marked
                        }
                        Commit::OnSuccess => live.told == Some(true),
                        Commit::Never => false,
                    };
                    if commit == Commit::OnMarker && marked {
                        let path = live.pod.target(VOLUME).join(".baggageclaim-commit");
                        std::fs::write(path, "").map_err(cannot("make a marker"))?;
                    }
                    if sealed {
                        promises.extend(self.comes(name, Seen::Exactly(content)));
                    } else if commit == Commit::OnSuccess && live.told.is_none() {
                        awaits = Some((name, content));
                    }
                }
                Leaving {
                    pod: live.pod,
                    promises,
                    certain: true,
                    awaits,
                    disowned: false,
                }
            }
        };
        self.slots[at] = Slot::Leaving(leaving);
        Ok(())
    }

    async fn finish_leaving(&mut self, wire: &Wire, slot: u8) -> Result<(), Stop> {
        let at = usize::from(slot);
        let Slot::Leaving(leaving) = &self.slots[at] else {
            return Ok(());
        };
        let pod = again_at(wire, &leaving.pod);
        let answer = pod.unpublish(VOLUME).await;
        wire.must(&format!("unpublish {}", pod.uid()), answer)?;
        if pod.target(VOLUME).symlink_metadata().is_ok() {
            return Err(Fault::leaked(format!("{} is still there", pod.uid())).into());
        }
        if leaving.disowned {
            wire.outcome(pod.uid(), false).await?;
        }
        pod.remove().map_err(cannot("remove a pod"))?;
        if let Slot::Leaving(leaving) = std::mem::replace(&mut self.slots[at], Slot::Empty) {
            self.answered(&leaving.promises, leaving.certain);
            if let Some((name, content)) = leaving.awaits {
                self.awaiting.push(Awaiting {
                    uid: pod.uid().to_owned(),
                    name,
                    content,
                    telling: None,
                });
            }
        }
        Ok(())
    }

    async fn destroy(&mut self, wire: &Wire, name: u8) -> Result<(), Stop> {
        wire.settle().await?;
        self.settled();
        let reference = self.reference(name);
        let forked = |slot: &Slot| match slot {
            Slot::Empty => false,
            Slot::Asked { what, .. } => *what == What::Input(name),
            Slot::Live(live) => live.what == What::Input(name),
            // The kernel may wait for the rest of it.
            Slot::Leaving(_) => true,
        };
        let in_use = self.slots.iter().any(forked);
        let known = &mut self.names[usize::from(name)];
        let absent =
            self.together.evicting || known.now.iter().any(|seen| matches!(seen, Seen::Absent));
        let before = known.now.clone();
        known.now.push(Seen::Absent);
        let request = api::DestroyRequest {
            tenant: self.tenant(),
            reference: reference.clone(),
        };
        let answer = wire.admin.clone().destroy(request).await;
        let excused = [Code::NotFound, Code::FailedPrecondition];
        let answer = wire.answered(&format!("destroy {reference}"), answer, &excused)?;
        let known = &mut self.names[usize::from(name)];
        match answer {
            Ok(_) => known.now = vec![Seen::Absent],
            Err(Code::NotFound) if absent => known.now = vec![Seen::Absent],
            Err(Code::FailedPrecondition) if in_use => known.now = before,
            Err(Code::NotFound) => {
                return Err(Fault::lost(format!("destroy {reference}: NOT_FOUND")).into());
            }
            Err(code) => {
                return Err(Fault::wrong(format!("destroy {reference}: {code:?}")).into());
            }
        }
        Ok(())
    }

    /// Where something must be mounted, once; and where it may.
    pub(crate) fn mounts(&self) -> (Vec<PathBuf>, Vec<PathBuf>) {
        let (mut must, mut may) = self.claims.mounts();
        for slot in &self.slots {
            match slot {
                Slot::Empty => {}
                Slot::Live(live) => must.push(live.pod.target(VOLUME)),
                Slot::Asked { pod, .. } | Slot::Leaving(Leaving { pod, .. }) => {
                    may.push(pod.target(VOLUME));
                }
            }
        }
        (must, may)
    }

    /// Each volume that a pod has shows what the pod knows.
    pub(crate) fn check_live(&self) -> Result<(), Fault> {
        for slot in &self.slots {
            let Slot::Live(live) = slot else { continue };
            let target = live.pod.target(VOLUME);
            content::expect(&target, &[Seen::Exactly(live.content.clone())])?;
        }
        self.claims.check_live()
    }

    /// Pods whose volumes must be listed, and pods whose may.
    pub(crate) fn pods(&self) -> (Vec<String>, Vec<String>) {
        let (mut must, mut may) = (Vec::new(), Vec::new());
        for slot in &self.slots {
            match slot {
                Slot::Empty => {}
                Slot::Live(live) => must.push(live.pod.uid().to_owned()),
                Slot::Asked { pod, .. } | Slot::Leaving(Leaving { pod, .. }) => {
                    may.push(pod.uid().to_owned());
                }
            }
        }
        may.extend(self.awaiting.iter().map(|one| one.uid.clone()));
        (must, may)
    }

    /// The ids of volumes that are on their way to a target or away from it.
    pub(crate) fn open_volumes(&self) -> Vec<String> {
        let open = self.slots.iter().filter_map(|slot| match slot {
            Slot::Asked { pod, .. } | Slot::Leaving(Leaving { pod, .. }) => {
                Some(pod.volume_id(VOLUME))
            }
            Slot::Empty | Slot::Live(_) => None,
        });
        open.chain(self.claims.open_volumes()).collect()
    }

    /// The artifacts of this caller are those that must be; right after all is settled.
    pub(crate) fn check_names(&self, listed: &[api::Artifact]) -> Result<(), Fault> {
        for name in 0..NAMES {
            let reference = self.reference(name);
            let tenant = self.tenant();
            let rows = listed
                .iter()
                .filter(|row| row.reference == reference && row.tenant == tenant);
            let possible = self.possible(name);
            let absent = possible.iter().any(|seen| matches!(seen, Seen::Absent));
            let present = possible.iter().any(|seen| !matches!(seen, Seen::Absent));
            match rows.count() {
                0 if absent => {}
                0 => return Err(Fault::lost(format!("{reference} was promised"))),
                1 if present => {}
                1 => {
                    return Err(Fault::leaked(format!(
                        "{reference} is listed, and no caller made it"
                    )));
                }
                more => return Err(Fault::wrong(format!("{reference} is listed {more} times"))),
            }
        }
        Ok(())
    }

    /// Whether a listed name is one of this caller's, or everybody's.
    pub(crate) fn knows(&self, row: &api::Artifact) -> bool {
        let own = (0..=NAMES).any(|name| self.reference(name) == row.reference);
        // One whose name has moved on waits to be collected.
        (own || row.reference.is_empty()) && row.tenant == self.tenant()
    }

    /// Ends all that is open, and says to everybody who waits for a word that it failed.
    pub(crate) async fn end(&mut self, wire: &Wire) -> Result<(), Stop> {
        for slot in 0..=SLOTS {
            self.finish(wire, slot, false).await?;
            self.leave(slot, true)?;
            self.finish(wire, slot, false).await?;
        }
        while !self.awaiting.is_empty() {
            if self.awaiting[0].telling.is_none() {
                self.awaiting[0].telling = Some((false, None));
            }
            self.tell_late(wire).await?;
        }
        Ok(())
    }

    /// Looks at each name, and deletes it.
    pub(crate) async fn clear(&mut self, wire: &Wire) -> Result<(), Stop> {
        for name in 0..NAMES {
            self.act(wire, Op::Look(name)).await?;
            self.destroy(wire, name).await?;
        }
        self.claims.clear(wire).await
    }
}

/// The same pod, on the driver that is there now.
pub(crate) fn again_at(wire: &Wire, pod: &Pod) -> Pod {
    wire.kubelet
        .pod_with_uid(pod.namespace(), pod.name(), pod.uid())
}

/// Failures in a pod, or in kubelet's own directories.
pub(crate) fn cannot(what: &'static str) -> impl Fn(std::io::Error) -> Stop {
    move |error| Fault::wrong(format!("cannot {what}: {error}")).into()
}

/// The common cache exists if a pod has committed to it, and is deleted.
pub(crate) async fn clear_shared(wire: &Wire) -> Result<(), Stop> {
    for row in wire.artifacts().await? {
        if row.reference != "task-cache/shared" {
            continue;
        }
        let request = api::DestroyRequest {
            tenant: row.tenant,
            reference: row.reference,
        };
        match wire.admin.clone().destroy(request).await {
            Err(status) if status.code() != Code::NotFound => {
                return Err(unexpected("destroy what is shared", &status));
            }
            _ => {}
        }
    }
    Ok(())
}
