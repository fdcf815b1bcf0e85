//! `kill -9` at every visit of every step of every operation on claims, snapshots and groups, then
//! a restart. Answered operations are there. Unanswered ones can be repeated with the same result.
//! Nothing half-made is visible, nothing is left behind, and each claim has its record's limit.
//!
//! The process under test is this test binary, started again. It runs operations on a few claims,
//! and writes the expected lists down after each step. The test continues where it died. A first
//! run, without a kill, counts the visits of each point and records the lists after each step.

#![expect(
    clippy::disallowed_types,
    clippy::print_stderr,
    reason = "the process under test is started; where a test was when it failed is said where the failure is said"
)]

mod common;

#[path = "claims/bench.rs"]
#[allow(dead_code, reason = "tests/claims.rs uses the rest")]
mod bench;

use std::fs;
use std::future::Future;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::AtomicU64;
use std::time::Instant;

use baggageclaim::backend::BackendKind;
use baggageclaim::engine::claims::{CreateClaim, MountClaim, ReceiveClaim, SnapshotFilter};
use baggageclaim::engine::failpoint::{self, Point};
use baggageclaim::engine::{Config, Engine, Error, LayerPlace, ReceiveError, ReceiveLayer};
use baggageclaim::model::{
    Attachment, ClaimParameters, ClaimSource, LiveClone, MutableChange, OwnerView,
    PersistentVolume, Sha256, Snapshot, SnapshotId, VolumeId,
};
use baggageclaim::sys::{self, Dir};
use bench::{BTRFS, Bench, COPY, Ground, OVERLAY, request, say};
use common::bench::{NEVER, names, open_again};
use common::{Fs, Lab, layers};
use rustix::process::{Signal, getpid, kill_process};
use serde::{Deserialize, Serialize};

/// Makes this test binary the process under test.
const LAUNCH: &str = "BAGGAGECLAIM_CLAIMS_CRASH_LAUNCH";

/// How many processes die at a time on one ground. Mostly they wait for the disk.
const AT_ONCE: usize = 4;

const MIB: u64 = 1 << 20;

/// One step of a life. Each can be repeated, also when it is done.
#[derive(Debug, Clone, Copy)]
enum Step {
    /// CreateVolume.
    Create(&'static str),
    /// The same, by a class with `liveClone: copy`; and a pod comes, writes many files, and stays.
    Crowd(&'static str),
    /// ControllerPublishVolume.
    Attach(&'static str),
    /// NodeStageVolume.
    Stage(&'static str),
    /// NodePublishVolume, and a pod writes a file.
    Publish(&'static str, &'static str),
    /// ControllerExpandVolume.
    Expand(&'static str, u64),
    /// ControllerModifyVolume.
    Modify(&'static str, u64),
    /// NodeUnpublishVolume.
    Unpublish(&'static str),
    /// NodeUnstageVolume.
    Unstage(&'static str),
    /// ControllerUnpublishVolume.
    Detach(&'static str),
    /// A pod comes, writes a file, and goes.
    Fill(&'static str, &'static str),
    /// CreateSnapshot, of the one by the name of the other.
    Snapshot(&'static str, &'static str),
    /// CreateVolume from a snapshot of another node.
    Receive(&'static str),
    /// CreateVolume from a volume.
    Clone(&'static str, &'static str),
    /// CreateVolume from a snapshot.
    Restore(&'static str, &'static str),
    /// CreateVolumeGroupSnapshot.
    Group([&'static str; 2], &'static str),
    /// CreateVolume from the snapshot of this volume in a group.
    RestoreOf(&'static str, &'static str),
    /// DeleteSnapshot.
    DeleteSnapshot(&'static str),
    /// DeleteVolumeGroupSnapshot.
    DeleteGroup,
    /// DeleteVolume.
    Delete(&'static str),
}

/// The life of a few claims.
const LIFE: &[Step] = &[
    Step::Create("c"),
    Step::Attach("c"),
    Step::Stage("c"),
    Step::Publish("c", "one"),
    Step::Expand("c", 24 * MIB),
    Step::Modify("c", 20 * MIB),
    Step::Unpublish("c"),
    Step::Unstage("c"),
    Step::Detach("c"),
    Step::Snapshot("c", "s"),
    Step::Fill("c", "two"),
    Step::Clone("c", "d"),
    Step::Restore("s", "e"),
    Step::Modify("c", 22 * MIB),
    Step::Fill("c", "three"),
    Step::Fill("e", "three"),
    Step::Group(["c", "e"], "g"),
    Step::RestoreOf("c", "f"),
    Step::DeleteSnapshot("s"),
    Step::DeleteGroup,
    Step::Fill("c", "four"),
    Step::Snapshot("c", "t"),
    Step::Delete("c"),
    // It is the last that has a layer.
    Step::DeleteSnapshot("t"),
    Step::Receive("r"),
    Step::Fill("r", "four"),
    Step::Crowd("w"),
    // Under its pod: by a copy, where there is no snapshot.
    Step::Snapshot("w", "l"),
    Step::Publish("w", "later"),
    Step::Unpublish("w"),
    Step::Unstage("w"),
    Step::Restore("l", "k"),
    // On overlay its directory goes with its content. A start that finds one of a claim that is
    // deleted asks by the id whether that is mounted, and lives that go on beside this one have a
    // claim of the same name mounted.
    Step::Snapshot("w", "m"),
    Step::Delete("w"),
    Step::DeleteSnapshot("m"),
    Step::DeleteSnapshot("l"),
];

/// How many files a crowd has: so many that a copy of it takes a while.
const CROWD: usize = 300;

/// The final content of the remaining claims.
const LEFT: [(&str, &[&str]); 5] = [
    ("d", &["one", "two"]),
    ("e", &["one", "three"]),
    ("f", &["one", "three", "two"]),
    ("k", &[]),
    ("r", &["four", "one", "three", "two"]),
];

/// The content of the claims of a crowd.
const CROWDED: [&str; 1] = ["k"];

fn is_of_crowd(name: &str) -> bool {
    name.starts_with("crowd-")
}

/// Repeats a busy call. Other tests start processes, and between fork and exec such a process holds
/// all descriptors of this one.
async fn patiently<T, F: Future<Output = Result<T, Error>>>(what: &str, ask: impl Fn() -> F) -> T {
    let deadline = Instant::now() + NEVER;
    loop {
        match ask().await {
            Err(Error::Busy(_) | Error::ClaimInUse { .. }) if Instant::now() < deadline => {
                tokio::time::sleep(std::time::Duration::from_millis(5)).await;
            }
            result => return result.unwrap_or_else(|error| panic!("{what}: {error}")),
        }
    }
}

/// All claims.
fn claims(engine: &Engine) -> Vec<PersistentVolume> {
    engine.claims(None, 99).items
}

fn claim(engine: &Engine, name: &str) -> Option<PersistentVolume> {
    let mut all = claims(engine).into_iter();
    all.find(|claim| claim.name == name)
}

fn snapshots(engine: &Engine) -> Vec<Snapshot> {
    let filter = SnapshotFilter::default();
    let page = engine.snapshots(&filter, None, 99);
    page.expect("a page").items
}

/// All that is listed, but for what no two lives have in common.
fn listed(engine: &Engine) -> Vec<String> {
    let claims = claims(engine).into_iter().map(|claim| {
        format!(
            "{} of {:?}: {} bytes, {:?}, {:?}",
            claim.name, claim.source, claim.capacity, claim.mutable, claim.attached
        )
    });
    let snapshots = snapshots(engine).into_iter();
    let snapshots = snapshots.map(|snapshot| {
        format!(
            "{} of {}: {} bytes, {:?}",
            snapshot.name, snapshot.source, snapshot.size, snapshot.group
        )
    });
    claims.chain(snapshots).collect()
}

/// The process under test, or its successor.
struct Actor<'a> {
    engine: &'a Engine,
    targets: &'a Path,
}

impl Actor<'_> {
    fn id(&self, name: &str) -> VolumeId {
        let claim = claim(self.engine, name);
        claim.unwrap_or_else(|| panic!("{name} is there")).id
    }

    fn staging(&self, name: &str) -> PathBuf {
        self.targets.join(format!("{name}-globalmount"))
    }

    fn published(&self, name: &str) -> PathBuf {
        self.targets.join(format!("{name}-mount"))
    }

    async fn create(&self, name: &str, source: Option<ClaimSource>) {
        let request = CreateClaim {
            required_bytes: if source.is_none() { 16 * MIB } else { 0 },
            source,
            ..request(name)
        };
        self.create_as(request).await;
    }

    async fn create_as(&self, request: CreateClaim) {
        let name = &request.name;
        patiently(name, || self.engine.create_claim(request.clone())).await;
    }

    async fn mount(&self, name: &str, staging: bool) {
        let staged = self.staging(name);
        fs::create_dir_all(&staged).expect("the staging path");
        let request = MountClaim {
            claim: self.id(name),
            target: if staging {
                staged.clone()
            } else {
                self.published(name)
            },
            staging,
            staged_at: (!staging).then_some(staged),
            read_only: false,
            multiple_targets: false,
            mount_group: None,
        };
        patiently(name, || self.engine.mount_claim(request.clone())).await;
    }

    async fn unmount(&self, name: &str, staging: bool) {
        let id = self.id(name);
        let at = if staging {
            self.staging(name)
        } else {
            self.published(name)
        };
        patiently(name, || {
            self.engine.unmount_claim(id.as_str(), &at, staging)
        })
        .await;
    }

    async fn crowd(&self, name: &str) {
        let parameters = ClaimParameters {
            live_clone: LiveClone::Copy,
            ..ClaimParameters::default()
        };
        let request = CreateClaim {
            required_bytes: 16 * MIB,
            parameters,
            ..request(name)
        };
        self.create_as(request).await;
        self.mount(name, true).await;
        for number in 0..CROWD {
            let file = format!("crowd-{number:03}");
            fs::write(self.staging(name).join(&file), &file).expect("written");
        }
    }

    async fn receive(&self, name: &str) -> Result<(), Error> {
        let claim = CreateClaim {
            source: Some(ClaimSource::Snapshot("snap-1".parse().expect("an id"))),
            ..request(name)
        };
        let (engine, held) = (self.engine.clone(), other_node(self.targets));
        let received = layers::apart(move || {
            let holders: Vec<_> = held.iter().map(|layer| layers::holder(layer)).collect();
            let wanted = holders.iter().map(|(table, _)| ReceiveLayer {
                digest: Sha256(table.digest().sha256),
                bytes: table.bytes(),
            });
            let request = ReceiveClaim {
                claim,
                layers: wanted.collect(),
                view: OwnerView::default(),
                size: 16 * MIB,
            };
            let make = |layer: usize, place: &LayerPlace<'_>| {
                let (table, holder): &(_, _) = &holders[layer];
                layers::make(table, holder, place)
            };
            engine.receive_claim(request, &AtomicU64::new(0), make, || Ok(()))
        });
        match received.await {
            Ok(_) => Ok(()),
            Err(ReceiveError::Engine(error)) => Err(error),
            Err(error) => panic!("{error}"),
        }
    }

    fn group(&self) -> Option<SnapshotId> {
        let mut snapshots = snapshots(self.engine).into_iter();
        snapshots.find_map(|snapshot| snapshot.group)
    }

    #[expect(clippy::too_many_lines, reason = "one entry for each case")]
    async fn take(&self, step: Step) {
        let engine = self.engine;
        match step {
            Step::Create(name) => self.create(name, None).await,
            Step::Crowd(name) => self.crowd(name).await,
            Step::Attach(name) => {
                let attachment = Attachment {
                    node: "n".to_owned(),
                    read_only: false,
                    access_mode: 1,
                };
                let id = self.id(name);
                let attached = || engine.attach_claim(id.as_str(), attachment.clone());
                patiently(name, attached).await;
            }
            Step::Stage(name) => self.mount(name, true).await,
            Step::Publish(name, file) => {
                self.mount(name, false).await;
                fs::write(self.published(name).join(file), file).expect("written");
            }
            Step::Expand(name, bytes) => {
                let id = self.id(name);
                patiently(name, || engine.expand_claim(id.as_str(), bytes, None)).await;
            }
            Step::Modify(name, size_limit) => {
                let id = self.id(name);
                let mutable = MutableChange {
                    size_limit: Some(size_limit),
                    ttl: None,
                };
                patiently(name, || engine.modify_claim(id.as_str(), mutable)).await;
            }
            Step::Unpublish(name) => self.unmount(name, false).await,
            Step::Unstage(name) => self.unmount(name, true).await,
            Step::Detach(name) => {
                let id = self.id(name);
                patiently(name, || engine.detach_claim(id.as_str(), Some("n"))).await;
            }
            Step::Fill(name, file) => {
                self.mount(name, true).await;
                fs::write(self.staging(name).join(file), file).expect("written");
                self.unmount(name, true).await;
            }
            Step::Snapshot(of, name) => {
                let mut all = snapshots(engine).into_iter();
                // A repeated call knows the owner, even if that is deleted.
                let id = match all.find(|snapshot| snapshot.name == name) {
                    Some(taken) => taken.source,
                    None => self.id(of),
                };
                patiently(name, || engine.create_snapshot(name, id.as_str())).await;
            }
            Step::Receive(name) => patiently(name, || self.receive(name)).await,
            Step::Clone(of, name) => {
                let source = ClaimSource::Claim(self.id(of));
                self.create(name, Some(source)).await;
            }
            Step::Restore(of, name) => {
                let mut all = snapshots(engine).into_iter();
                let snapshot = all
                    .find(|snapshot| snapshot.name == of)
                    .expect("it is there");
                self.create(name, Some(ClaimSource::Snapshot(snapshot.id)))
                    .await;
            }
            Step::Group(of, name) => {
                let mut ids = Vec::new();
                for name in of {
                    ids.push(self.id(name).to_string());
                }
                patiently(name, || engine.create_group(name, &ids)).await;
            }
            Step::RestoreOf(of, name) => {
                let group = self.group().expect("it is there");
                let (_, members) = engine.group(group.as_str()).expect("a group");
                let id = self.id(of);
                let mut members = members.into_iter();
                let member = members.find(|member| member.source == id).expect("it");
                self.create(name, Some(ClaimSource::Snapshot(member.id)))
                    .await;
            }
            Step::DeleteSnapshot(name) => {
                let mut all = snapshots(engine).into_iter();
                if let Some(snapshot) = all.find(|snapshot| snapshot.name == name) {
                    patiently(name, || engine.delete_snapshot(snapshot.id.as_str())).await;
                }
            }
            Step::DeleteGroup => {
                if let Some(group) = self.group() {
                    patiently("g", || engine.delete_group(group.as_str())).await;
                }
            }
            Step::Delete(name) => {
                if let Some(claim) = claim(engine, name) {
                    patiently(name, || engine.delete_claim(claim.id.as_str())).await;
                }
            }
        }
    }
}

/// The layers of a snapshot of another node, newest first.
fn other_node(targets: &Path) -> [PathBuf; 2] {
    ["new", "old"].map(|layer| targets.with_file_name("other-node").join(layer))
}

/// Makes them.
fn make_other_node(targets: &Path) {
    let [new, old] = other_node(targets);
    let files = [
        (&old, "one", "one"),
        (&old, "two", "old"),
        (&new, "two", "two"),
        (&new, "three", "three"),
    ];
    for (layer, name, text) in files {
        fs::create_dir_all(layer).expect("made");
        fs::write(layer.join(name), text).expect("written");
    }
}

/// The orders for the process under test.
#[derive(Debug, Serialize, Deserialize)]
struct Launch {
    pool: PathBuf,
    backend: BackendKind,
    targets: PathBuf,
    /// Where it writes down what is listed, before the first step and after each.
    answers: PathBuf,
    /// Where it dies, and at which visit; `None`: it lives, and writes down how often each point
    /// was passed.
    death: Option<(String, usize)>,
    /// Whether it dies where there is no point: in the middle of a copy.
    in_a_copy: bool,
    visits: PathBuf,
}

/// Where a life is cut short.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Death {
    /// At a visit of a point.
    At(Point, usize),
    /// While a crowd is copied.
    InACopy,
}

/// How many files of a crowd each layer has that has some.
fn crowds(layers: &Path) -> Vec<usize> {
    // Layers come and go.
    let layers = fs::read_dir(layers).into_iter().flatten().flatten();
    let count = |layer: fs::DirEntry| {
        let files = fs::read_dir(layer.path().join("fs"));
        let files = files.into_iter().flatten().flatten();
        files
            .filter(|file| file.file_name().to_str().is_some_and(is_of_crowd))
            .count()
    };
    layers.map(count).filter(|count| *count > 0).collect()
}

/// Dies as soon as the first of a crowd is in a layer.
fn die_in_a_copy(layers: &Path) {
    while crowds(layers).is_empty() {
        std::thread::yield_now();
    }
    let killed = kill_process(getpid(), Signal::KILL);
    panic!("it lives: {killed:?}");
}

fn config(pool: &Path, backend: BackendKind) -> Config {
    let mut config = Config::new(pool);
    config.backend = Some(backend);
    config.btrfs_quota = true;
    config
}

/// Not a test: the life of the process under test. In the test run it returns at once.
#[tokio::test(flavor = "multi_thread")]
async fn the_process_under_test() {
    #[expect(
        clippy::disallowed_methods,
        reason = "how the parent tells its child what to do"
    )]
    let Ok(launch) = std::env::var(LAUNCH) else {
        return;
    };
    let launch: Launch = serde_json::from_str(&launch).expect("a launch");
    let config = config(&launch.pool, launch.backend);
    if launch.in_a_copy {
        let layers = launch.pool.join("layers");
        std::thread::spawn(move || die_in_a_copy(&layers));
    }
    let arm = |in_recovery: bool| {
        if let Some((point, visit)) = &launch.death
            && in_recovery == point.starts_with("recover-")
        {
            assert!(failpoint::arm(point, *visit), "no point is called {point}");
        }
    };
    arm(true);
    let engine = Engine::open(config).await.expect("it opens");
    arm(false);
    let actor = Actor {
        engine: &engine,
        targets: &launch.targets,
    };
    let mut answers = fs::File::create(launch.answers).expect("answers");
    let mut say = |listed: &[String]| {
        let mut line = serde_json::to_vec(listed).expect("plain data");
        line.push(b'\n');
        answers.write_all(&line).expect("answered");
    };
    say(&listed(&engine));
    for step in LIFE {
        actor.take(*step).await;
        say(&listed(&engine));
    }
    engine.shutdown().await;
    let visits: Vec<usize> = Point::ALL.iter().copied().map(failpoint::visits).collect();
    let visits = serde_json::to_vec(&visits).expect("plain data");
    fs::write(launch.visits, visits).expect("written");
}

/// A process that has come to its end.
struct Ended {
    lab: Lab,
    config: Config,
    targets: PathBuf,
    died: bool,
    /// The lists before the first step and after each answered one.
    listed: Vec<Vec<String>>,
    /// How often each point was passed, if it did not die.
    visits: Vec<usize>,
}

/// Has a process live, on a filesystem of its own.
fn live(ground: Ground, death: Option<Death>) -> Result<Ended, String> {
    let lab = Lab::try_sized(ground.1, 512 * MIB)?;
    make_other_node(&lab.kubelet_dir().join("pods"));
    Ok(live_in(lab, ground, death))
}

/// The same on the filesystem of an earlier one.
fn live_in(lab: Lab, ground: Ground, death: Option<Death>) -> Ended {
    let config = config(&lab.path().join("pool"), ground.0);
    let targets = lab.kubelet_dir().join("pods");
    let launch = Launch {
        pool: config.pool.clone(),
        backend: ground.0,
        targets: targets.clone(),
        answers: lab.run_dir().join("answers"),
        death: match death {
            Some(Death::At(point, visit)) => Some((point.name().to_owned(), visit)),
            Some(Death::InACopy) | None => None,
        },
        in_a_copy: death == Some(Death::InACopy),
        visits: lab.run_dir().join("visits"),
    };
    let output = Command::new(std::env::current_exe().expect("this binary"))
        .args(["--exact", "the_process_under_test", "--nocapture"])
        .env(LAUNCH, serde_json::to_string(&launch).expect("plain data"))
        .output()
        .expect("it runs");
    let died = output.status.code().is_none();
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    assert!(died || output.status.success(), "{death:?}: {said}");
    let answers = fs::read(&launch.answers).expect("answers");
    let whole = answers.split_inclusive(|byte| *byte == b'\n');
    let whole = whole.filter(|line| line.ends_with(b"\n"));
    let listed = whole.map(|line| serde_json::from_slice(line).expect("JSON"));
    let visits = if died {
        Vec::new()
    } else {
        serde_json::from_slice(&fs::read(&launch.visits).expect("visits")).expect("JSON")
    };
    Ended {
        listed: listed.collect(),
        lab,
        config,
        targets,
        died,
        visits,
    }
}

/// The limit of a claim's content, read from the filesystem; `None` if it is not checked.
fn bound(lab: &Lab, config: &Config, claim: &VolumeId) -> Option<u64> {
    let volume = config.pool.join("volumes").join(claim.as_str());
    match (config.backend, lab.fs()) {
        // Simple quotas came with Linux 6.7; without them nothing bounds a subvolume.
        (Some(BackendKind::Btrfs), _) if common::kernel_is(6, 7) => {
            let fs = Dir::open(&volume.join("fs")).expect("open");
            let group = format!("1_{}", fs.subvolume_id().expect("an id"));
            Some(btrfs_limit(&lab.path(), &group))
        }
        (Some(BackendKind::Overlay), Fs::Ext4Quota | Fs::XfsQuota) => {
            let top = Dir::open(&volume.join("top")).expect("open");
            let project = top.project().expect("it has one");
            Some(top.project_usage(project).expect("counted").limit)
        }
        _ => None,
    }
}

/// The limit of a quota group in sysfs of btrfs.
fn btrfs_limit(root: &Path, group: &str) -> u64 {
    let table = sys::mount_table().expect("mounts");
    let mount = table.iter().find(|mount| mount.mount_point == root);
    let device = Path::new(&mount.expect("it is mounted").source).to_owned();
    let device = device.file_name().expect("/dev/loopN").to_owned();
    let known = fs::read_dir("/sys/fs/btrfs").expect("sysfs");
    let mut known = known.map(|entry| entry.expect("an entry").path());
    let this = known.find(|path| path.join("devices").join(&device).exists());
    let group = this.expect("it is one of them").join("qgroups").join(group);
    let limit = fs::read_to_string(group.join("max_referenced")).expect("a group");
    limit.trim().parse().expect("a number")
}

/// Looks at everything after a life was cut short, goes on with it, and looks again.
async fn take_over(ended: Ended, calm: &[Vec<String>], death: &str) {
    let engine = open_again(&ended.config).await;
    let answered = ended.listed.len() - 1;
    let now = listed(&engine);
    let may_be = &calm[answered..calm.len().min(answered + 2)];
    assert_eq!(ended.listed, calm[..=answered], "{death}");
    assert!(
        may_be.contains(&now),
        "{death}: {now:#?} is none of {may_be:#?}"
    );
    for claim in claims(&engine) {
        let volume = ended.config.pool.join("volumes").join(claim.id.as_str());
        if volume.exists()
            && let Some(bound) = bound(&ended.lab, &ended.config, &claim.id)
        {
            assert_eq!(Some(bound), claim.limit(), "{death}: {}", claim.name);
        }
    }
    engine.reap().await.expect("reap");
    let findings = engine.check().await.expect("check");
    assert_eq!(findings, [], "{death} after {answered} steps");
    let actor = Actor {
        engine: &engine,
        targets: &ended.targets,
    };
    for (number, step) in LIFE.iter().enumerate().skip(answered.saturating_sub(1)) {
        actor.take(*step).await;
        if number >= answered {
            assert_eq!(listed(&engine), calm[number + 1], "{death}: {step:?}");
        }
    }
    let bench = Bench {
        lab: ended.lab,
        engine,
        config: ended.config,
    };
    let left = claims(&bench.engine);
    assert_eq!(left.len(), LEFT.len(), "{death}: {left:#?}");
    for (name, files) in LEFT {
        let claim = claim(&bench.engine, name).expect(name);
        let seen = bench.inside(&claim, |path| {
            let seen = names(path);
            let is_whole =
                |file: &String| fs::read(path.join(file)).expect(file) == file.as_bytes();
            assert!(seen.iter().all(is_whole), "{death}: {name}");
            seen
        });
        let (crowd, seen): (Vec<String>, _) =
            seen.await.into_iter().partition(|file| is_of_crowd(file));
        assert_eq!(seen, files, "{death}: {name}");
        let whole = if CROWDED.contains(&name) { CROWD } else { 0 };
        assert_eq!(crowd.len(), whole, "{death}: {name}");
    }
    bench.finish().await;
}

/// Where a life is cut short, and which part of the product it is in.
fn is_of_claims(point: Point) -> bool {
    let of_claims = [
        "claim-",
        "freeze-",
        "snapshot-",
        "receive-",
        "entry-",
        "target-",
    ];
    let is_of_claims = of_claims.iter().any(|part| point.name().starts_with(part));
    // A persistent volume appears when it is durable.
    is_of_claims && point != Point::EntryShown || point == Point::CollectTrashed
}

async fn visit_all(ground: Ground) {
    say(ground);
    let began = Instant::now();
    let calm = match live(ground, None) {
        Ok(calm) => calm,
        Err(reason) => return common::skip(&reason),
    };
    assert_eq!(calm.listed.len(), LIFE.len() + 1);
    let visits = Point::ALL.iter().copied().zip(calm.visits.clone());
    let mut deaths: Vec<(Point, usize)> = Vec::new();
    for (point, visits) in visits.filter(|(point, _)| is_of_claims(*point)) {
        let moves = ground.0 == BackendKind::Overlay;
        // Only a layer of a stack is that of the other node, with its table.
        let of_stacks = [Point::FreezeMarked, Point::ReceiveTabled];
        let passed = moves || !of_stacks.contains(&point);
        assert_eq!(visits > 0, passed, "{}", point.name());
        // An emulated machine takes seconds for a death, and is taken to hang when it says nothing
        // for minutes.
        let most = if common::in_a_guest() { 1 } else { visits };
        deaths.extend((1..=visits.min(most)).map(|visit| (point, visit)));
    }
    let expected = calm.listed.clone();
    take_over(calm, &expected, "no process died").await;
    let count = deaths.len();
    let mut deaths = deaths.into_iter();
    let mut under_way = tokio::task::JoinSet::new();
    let mut failure = None;
    loop {
        while failure.is_none()
            && under_way.len() < AT_ONCE
            && let Some((point, visit)) = deaths.next()
        {
            let expected = expected.clone();
            under_way.spawn(async move {
                let death = format!("{} at visit {visit}", point.name());
                #[expect(
                    clippy::disallowed_methods,
                    reason = "the driver has no such thread; this one waits for a process"
                )]
                let ended =
                    tokio::task::block_in_place(|| live(ground, Some(Death::At(point, visit))));
                let ended = ended.unwrap_or_else(|reason| panic!("{reason}"));
                assert!(ended.died, "{death}: the point was not reached");
                take_over(ended, &expected, &death).await;
                common::say_in_a_guest(&death);
            });
        }
        match under_way.join_next().await {
            None => break,
            Some(Ok(())) => {}
            // The others end in order first, and leave nothing.
            Some(Err(failed)) => drop(failure.get_or_insert(failed)),
        }
    }
    if let Some(failed) = failure {
        std::panic::resume_unwind(failed.into_panic());
    }
    eprintln!(
        "{} on {}: {count} deaths in {:?}",
        ground.0,
        ground.1.name(),
        began.elapsed()
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn every_point_of_claims_on_overlay() {
    // Where the kernel has quotas (tests/guests): a claim is bounded there.
    let bounded = (OVERLAY.0, Fs::Ext4Quota);
    let can_bound = common::has_project_quotas() && Lab::try_sized(bounded.1, 64 * MIB).is_ok();
    assert!(
        can_bound || !common::in_a_guest() || !common::has_project_quotas(),
        "a guest's kernel has quotas"
    );
    visit_all(if can_bound { bounded } else { OVERLAY }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn every_point_of_claims_on_btrfs() {
    visit_all(BTRFS).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn every_point_of_claims_by_copies() {
    visit_all(COPY).await;
}

/// Between the points: a copy of what a pod writes to is begun and not whole, and no snapshot is
/// made of that.
#[tokio::test(flavor = "multi_thread")]
async fn a_copy_of_a_claim_under_its_pod_is_cut_short_in_the_middle() {
    const MOST: usize = 20;

    for ground in [OVERLAY, COPY] {
        say(ground);
        let calm = match live(ground, None) {
            Ok(calm) => calm.listed,
            Err(reason) => return common::skip(&reason),
        };
        let mut lives = 0;
        loop {
            lives += 1;
            let ended = live(ground, Some(Death::InACopy)).expect("as before");
            assert!(ended.died, "nothing was copied");
            let begun = crowds(&ended.config.pool.join("layers"));
            take_over(ended, &calm, "in the middle of a copy").await;
            // The kill may come late on a busy machine.
            if matches!(begun[..], [count] if count < CROWD) {
                break;
            }
            assert!(lives < MOST, "each of {lives} copies was whole: {begun:?}");
        }
        eprintln!("cut short in life {lives}");
    }
}

/// The start that takes a freeze back may be cut short, too.
#[tokio::test(flavor = "multi_thread")]
async fn a_freeze_is_taken_back_however_often_that_is_cut_short() {
    let calm = match live(OVERLAY, None) {
        Ok(calm) => calm.listed,
        Err(reason) => return common::skip(&reason),
    };
    let death = Some(Death::At(Point::FreezeContentMoved, 1));
    let first = live(OVERLAY, death).expect("as before");
    assert!(first.died, "nothing was moved");
    let death = Some(Death::At(Point::RecoverContentBack, 1));
    // It comes to no answer, so those of the first are found.
    let second = live_in(first.lab, OVERLAY, death);
    assert!(second.died, "nothing was taken back");
    take_over(second, &calm, "a freeze that is taken back").await;
}
