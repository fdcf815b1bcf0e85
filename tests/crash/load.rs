//! Eight concurrent callers, each with its own volumes and names, and one cache to which all
//! commit. When the process dies, they remember their answers and repeat the same call with the
//! next one.
//!
//! A seed decides each caller's next call, and the time of the kill as far as possible.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::mount::{UnmountFlags, unmount};

use super::acts::receive;
use super::common::random::Random;
use super::common::{Snapshot, assert_same};
use super::driver::{Call, Connection, Died, Place};
use super::world::{World, names, outcome, publish, unpublish, write};

/// The cache that everybody commits to.
pub(crate) const SHARED: &str = "task-cache/shared";

/// The state that all callers share.
#[derive(Debug, Default)]
pub(crate) struct Together {
    /// The allowed content of the shared cache, by its file `newest`.
    generations: Mutex<BTreeMap<String, Snapshot>>,
    /// Whether a commit of it was promised.
    promised: AtomicBool,
    /// Rounds that are begun are brought to their end, and no more.
    pub(crate) finish: AtomicBool,
}

#[derive(Debug, Clone)]
enum Step {
    /// Repeated until it is answered.
    Call(Call),
    /// Another program unmounts the volume.
    Vanish { volume: String },
    /// The pod writes.
    Write {
        volume: String,
        becomes: Option<String>,
    },
    /// The mount shows exactly this artifact.
    Compare { volume: String, name: String },
    /// The mount shows some whole generation of the shared cache; the next one is written.
    Continue { volume: String, slot: u64 },
    /// The pod is about to go.
    Leave { volume: String },
    /// All that the seal needs was answered.
    Promised { name: String },
    /// The shared cache has a commit.
    SharedPromised,
    /// A name is about to be deleted …
    Forget { name: String },
    /// … and was.
    Forgotten,
    /// A copy of an artifact is about to be imported …
    Copy { name: String },
    /// … and was.
    Copied { from: String, name: String },
    /// An artifact came from another node.
    Received { name: String, content: Snapshot },
}

/// One caller.
#[derive(Debug)]
pub(crate) struct Caller {
    index: usize,
    random: Random,
    round: usize,
    script: VecDeque<Step>,
    world: World,
    /// Names whose seal was promised.
    promised: BTreeSet<String>,
    /// A name that may be there or not.
    going: Option<String>,
}

impl Caller {
    pub(crate) fn new(index: usize, seed: u64) -> Self {
        Self {
            index,
            random: Random::new(seed ^ (index as u64 + 1) << 32),
            round: 0,
            script: VecDeque::new(),
            world: World::default(),
            promised: BTreeSet::new(),
            going: None,
        }
    }

    pub(crate) fn rounds(&self) -> usize {
        self.round
    }

    /// Goes on until the process dies, or the rounds are over.
    pub(crate) fn run(
        &mut self,
        place: &Place,
        on: &mut Connection,
        together: &Together,
    ) -> Result<(), Died> {
        loop {
            if self.script.is_empty() {
                if together.finish.load(Ordering::SeqCst) {
                    return Ok(());
                }
                self.plan(place);
            }
            let step = self.script.front().expect("a script").clone();
            self.step(place, on, together, step)?;
            self.script.pop_front();
        }
    }

    /// The plan of the next round.
    fn plan(&mut self, place: &Place) {
        self.round += 1;
        let volume = format!("c{}-{}", self.index, self.round);
        let any_promised = self.any_promised();
        let steps = match (self.random.below(12), any_promised) {
            (0..=1, Some(name)) => look(place, &volume, name),
            (2..=3, Some(name)) => vec![
                Step::Call(Call::Settle),
                Step::Forget { name: name.clone() },
                Step::Call(Call::Destroy { reference: name }),
                Step::Forgotten,
            ],
            (8, Some(name)) => copy(place, &volume, name),
            (10, Some(name)) => vec![
                Step::Call(Call::Settle),
                Step::Call(Call::Share { reference: name }),
            ],
            (11, _) => receive_new(place, &volume),
            (4..=6, _) => self.commit_shared(place, &volume),
            (7, _) => {
                let mut steps = vanish(place, &volume, &[]).to_vec();
                steps.extend([
                    Step::Write {
                        volume: volume.clone(),
                        becomes: None,
                    },
                    Step::Leave {
                        volume: volume.clone(),
                    },
                    Step::Call(unpublish(place, &volume)),
                ]);
                steps
            }
            _ => self.make_output(place, &volume),
        };
        self.script.extend(steps);
    }

    fn any_promised(&mut self) -> Option<String> {
        let count = self.promised.len() as u64;
        let at = (count > 0).then(|| self.random.below(count))?;
        let at = usize::try_from(at).expect("few names");
        self.promised.iter().nth(at).cloned()
    }

    fn make_output(&mut self, place: &Place, volume: &str) -> Vec<Step> {
        let name = format!("artifact/{volume}");
        let always = self.random.percent(20);
        let succeeds = self.random.percent(80);
        let commit = if always { "always" } else { "on-success" };
        let output = [("type", "output"), ("name", volume), ("commit", commit)];
        let told = Step::Call(outcome(volume, succeeds));
        let gone = [
            Step::Leave {
                volume: volume.to_owned(),
            },
            Step::Call(unpublish(place, volume)),
        ];
        let mut steps = vec![Step::Call(publish(place, volume, &output))];
        if self.random.percent(30) {
            steps.extend(vanish(place, volume, &output));
        }
        steps.extend([Step::Write {
            volume: volume.to_owned(),
            becomes: (succeeds || always).then(|| name.clone()),
        }]);
        if self.random.percent(50) {
            steps.push(told);
            steps.extend(gone);
        } else {
            steps.extend(gone);
            steps.push(told);
        }
        if succeeds || always {
            steps.push(Step::Promised { name: name.clone() });
        }
        if self.random.percent(20) {
            steps.push(Step::Call(Call::Settle));
        }
        if self.random.percent(10) {
            steps.push(Step::Call(Call::Reap));
        }
        steps
    }

    fn commit_shared(&mut self, place: &Place, volume: &str) -> Vec<Step> {
        let cache = [
            ("type", "task-cache"),
            ("key", "shared"),
            ("commit", "always"),
        ];
        vec![
            Step::Call(publish(place, volume, &cache)),
            Step::Continue {
                volume: volume.to_owned(),
                slot: self.random.below(5),
            },
            Step::Leave {
                volume: volume.to_owned(),
            },
            Step::Call(unpublish(place, volume)),
            Step::SharedPromised,
        ]
    }

    fn step(
        &mut self,
        place: &Place,
        on: &mut Connection,
        together: &Together,
        step: Step,
    ) -> Result<(), Died> {
        let mut held = 0;
        match step {
            Step::Call(call) => loop {
                match (on.call(&call)?, &call) {
                    (Ok(_), _) => break,
                    // The kernel closes a mount that vanished a little later, or a program that is
                    // being started has its descriptors for a moment. Kubelet tries again, too.
                    (Err(error), Call::Publish { .. }) if error.contains("HeldOpen") => {
                        held += 1;
                        assert!(held < 10_000, "{call:?}: {error}");
                        std::thread::sleep(Duration::from_millis(3));
                    }
                    // It was done, and the answer was lost.
                    (Err(error), Call::Destroy { .. }) if error.contains("NoSuchName") => break,
                    // A fork of ours is gone, and not yet deleted.
                    (Err(error), Call::Destroy { .. }) if error.contains("InUse") => {
                        drop(on.call(&Call::Settle)?);
                    }
                    (Err(error), _) => panic!("{call:?}: {error}"),
                }
            },
            Step::Vanish { volume } => {
                let target = place.target(&volume);
                // A step is repeated if the process dies meanwhile.
                let _mounted_no_more = unmount(&target, UnmountFlags::NOFOLLOW);
            }
            Step::Write { volume, becomes } => {
                write(&place.target(&volume), &volume);
                self.world.note_live(place, &volume, becomes.as_deref());
            }
            Step::Compare { volume, name } => {
                let found = Snapshot::of(&place.target(&volume));
                assert_same(&self.world.sealed[&name], &found);
            }
            Step::Continue { volume, slot } => {
                let target = place.target(&volume);
                together.assert_whole(&target);
                write_slot(&target, &volume, slot);
                self.world.note_live(place, &volume, None);
                let content = self.world.live[&volume].content.clone();
                let mut generations = together.generations.lock().expect("no caller panicked");
                generations.insert(volume, content);
            }
            Step::Leave { volume } => self.world.pod_ended(&volume),
            Step::Promised { name } => drop(self.promised.insert(name)),
            Step::SharedPromised => together.promised.store(true, Ordering::SeqCst),
            Step::Forget { name } => {
                self.promised.remove(&name);
                self.world.sealed.remove(&name);
                self.going = Some(name);
            }
            Step::Copy { name } => self.going = Some(name),
            Step::Copied { from, name } => {
                let content = self.world.sealed[&from].clone();
                self.world.sealed.insert(name.clone(), content);
                self.promised.insert(name);
                self.going = None;
            }
            Step::Received { name, content } => {
                self.world.sealed.insert(name.clone(), content);
                self.promised.insert(name);
                self.going = None;
            }
            Step::Forgotten => self.going = None,
        }
        Ok(())
    }
}

/// An artifact leaves as an archive, and comes back under another name.
fn copy(place: &Place, volume: &str, from: String) -> Vec<Step> {
    let name = format!("artifact/{volume}");
    let file = place.lab.run_dir().join(format!("{volume}.tar.zst"));
    vec![
        Step::Call(Call::Export {
            reference: from.clone(),
            file: file.clone(),
        }),
        Step::Copy { name: name.clone() },
        Step::Call(Call::Import {
            reference: name.clone(),
            file,
        }),
        Step::Copied { from, name },
    ]
}

/// An artifact comes from another node.
fn receive_new(place: &Place, volume: &str) -> Vec<Step> {
    let name = format!("artifact/{volume}");
    let (call, content) = receive(place, volume);
    vec![
        Step::Copy { name: name.clone() },
        Step::Call(call),
        Step::Received { name, content },
    ]
}

/// A volume whose mount vanishes, and that is published again.
fn vanish(place: &Place, volume: &str, pairs: &[(&str, &str)]) -> [Step; 3] {
    let publish = Step::Call(publish(place, volume, pairs));
    let volume = volume.to_owned();
    [publish.clone(), Step::Vanish { volume }, publish]
}

/// A pod that only looks.
fn look(place: &Place, volume: &str, name: String) -> Vec<Step> {
    let fork = [("type", "input"), ("from", name.as_str())];
    vec![
        Step::Call(publish(place, volume, &fork)),
        Step::Compare {
            volume: volume.to_owned(),
            name,
        },
        Step::Call(unpublish(place, volume)),
    ]
}

/// Writes the next generation: bounded, however many there are.
fn write_slot(root: &Path, tag: &str, slot: u64) {
    let dir = root.join(format!("slot-{slot}"));
    if dir.exists() {
        // A deletion in a fork, and a new directory in its place.
        for entry in fs::read_dir(&dir).expect("readdir") {
            fs::remove_file(entry.expect("an entry").path()).expect("rm");
        }
        fs::remove_dir(&dir).expect("rmdir");
    }
    fs::create_dir(&dir).expect("mkdir");
    fs::write(dir.join(tag), tag.repeat(20)).expect("write");
    fs::write(root.join("newest"), tag).expect("write");
}

impl Together {
    /// A fork of the shared cache shows one of its generations, and all of it.
    fn assert_whole(&self, target: &Path) {
        let Ok(tag) = fs::read_to_string(target.join("newest")) else {
            let found = Snapshot::of(target);
            assert!(found.is_empty(), "a generation without a name: {found}");
            return;
        };
        let generation = {
            let generations = self.generations.lock().expect("no caller panicked");
            generations.get(&tag).cloned()
        };
        let generation = generation.unwrap_or_else(|| panic!("{tag} was never written"));
        assert_same(&generation, &Snapshot::of(target));
    }
}

/// Every answer holds right after a start: mounts at once, promised seals once they are settled.
pub(crate) fn check_answered(
    place: &Place,
    on: &mut Connection,
    callers: &[Caller],
    together: &Together,
) -> Result<(), Died> {
    for caller in callers {
        caller.world.check_live(place);
    }
    drop(on.call(&Call::Settle)?);
    let Ok(listed) = on.call(&Call::Artifacts)? else {
        panic!("no list of artifacts");
    };
    let listed = names(&listed);
    let distinct: BTreeSet<&String> = listed.iter().collect();
    // One without a name may wait for its collection; of the others there is one each.
    let unnamed = listed.iter().filter(|name| name.starts_with('(')).count();
    let named = listed.len() - unnamed;
    assert_eq!(
        distinct.len() - usize::from(unnamed > 0),
        named,
        "twice in {listed:?}"
    );
    for caller in callers {
        for name in &caller.promised {
            assert!(distinct.contains(name), "{name} was promised");
        }
    }
    if together.promised.load(Ordering::SeqCst) {
        assert!(listed.iter().any(|name| name == SHARED), "a cache is lost");
    }
    let known = |name: &str| {
        name == SHARED
            || name.starts_with('(')
            || callers.iter().any(|caller| {
                caller.world.sealed.contains_key(name) || caller.going.as_deref() == Some(name)
            })
    };
    for name in &listed {
        assert!(known(name), "{name} is listed, and no caller made it");
    }
    Ok(())
}

/// All rounds are over: what is there is exactly what was answered; deletes it all and sees that
/// nothing is left.
pub(crate) fn check_all(
    place: &Place,
    on: &mut Connection,
    callers: Vec<Caller>,
    together: &Together,
) {
    let mut world = World::default();
    for caller in callers {
        assert!(caller.world.live.is_empty() && caller.going.is_none());
        world.sealed.extend(caller.world.sealed);
    }
    on.must(&Call::Settle);
    on.must(&Call::Reap);
    if together.promised.load(Ordering::SeqCst) {
        let fork = [("type", "input"), ("from", SHARED)];
        on.must(&publish(place, "last-look", &fork));
        together.assert_whole(&place.target("last-look"));
        on.must(&unpublish(place, "last-look"));
        on.must(&Call::Destroy {
            reference: SHARED.to_owned(),
        });
        on.must(&Call::Settle);
        on.must(&Call::Reap);
    }
    world.end(place, on);
}
