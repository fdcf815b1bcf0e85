//! A hostile tenant: root in its own volumes, racing everything that the driver does with them.
//! Nothing outside changes, is read, or vanishes, and no other tenant waits for it.

use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use baggageclaim::kubelet_double::{Pod, PublishOptions};
use baggageclaim::proto::admin::v1 as api;
use rustix::fs::{CWD, FileType, IFlags, Mode, RenameFlags, XattrFlags};
use rustix::mount::{MountFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags};
use tokio::runtime::Handle;
use tonic::Code;

use crate::caller::cannot;
use crate::common::random::Random;
use crate::common::{Fs, Snapshot};
use crate::content::{self, Seen};
use crate::driver::{Ground, Place, Wire, nothing_left};
use crate::figures::{Fault, Figures, Stop, count};

const GROUNDS: [Ground; 3] = [
    Ground::new("overlay", Fs::Ext4, 1024),
    Ground::new("btrfs", Fs::Btrfs, 512),
    Ground::new("copy", Fs::XfsReflink, 512),
];

/// The content of every file of the victim, which no other file may have.
const CANARY: &str = "canary: of somebody else";
const VOLUME: &str = "v";
const HOSTILE: &str = "hostile";
const GOOD: &str = "good";

/// Attack after attack on one ground after the other.
pub(crate) fn trial(mut random: Random, until: Instant, on: &Handle, figures: &Arc<Figures>) {
    for (number, ground) in GROUNDS.into_iter().enumerate() {
        // The first is what most pools are: it has half of the time, and the others half of what is
        // left, or all of it.
        let share = if number + 1 < GROUNDS.len() { 0.5 } else { 1.0 };
        let until = Instant::now() + crate::left(until).mul_f64(share);
        let seed = random.next();
        crate::say(&format!("tenant: {}, seed {seed}", ground.name()));
        if let Err(fault) = one(ground, &Random::new(seed), until, on, figures) {
            figures.note(format!("tenant: {}", ground.name()), &fault);
        }
    }
}

/// Foreign trees: beside the pool, in kubelet's directory, in a volume, and sealed.
struct Victim {
    trees: Vec<(PathBuf, Snapshot)>,
    pod: Pod,
    sealed: Arc<Snapshot>,
}

fn one(
    ground: Ground,
    random: &Random,
    until: Instant,
    on: &Handle,
    figures: &Arc<Figures>,
) -> Result<(), Fault> {
    let arguments = ["--threads=4", "--reap-interval=500ms", "--log=warn"];
    let place = Place::new(ground, &arguments, figures)?;
    let mut driver = place.start(None);
    let mut trial = || {
        let (wire, victim) = on.block_on(async {
            let wire = driver.connect().await?;
            let victim = prepare(&place, &wire).await?;
            Ok::<_, Stop>((wire, victim))
        })?;
        let most = Instant::now() + crate::left(until).mul_f64(0.6);
        attacks(&place, &wire, &victim, random.clone(), most, on)?;
        // Created files must be deleted, too.
        let most = Instant::now() + crate::left(until).mul_f64(0.5);
        many(&place, &wire, most, on)?;
        victim.is_untouched()?;
        on.block_on(finish(&place, &wire, victim))
    };
    let trial = trial().map_err(|stop| {
        let log = std::env::temp_dir().join(format!("torture-tenant-{}.log", driver.pid()));
        place.keep_log(&log);
        match stop {
            Stop::Fault(fault) => fault.at(format!("the log is {}", log.display())),
            Stop::Died => Fault::wrong("the driver died"),
        }
    });
    trial?;
    driver.stop()?;
    place.admits_no_defect()
}

async fn prepare(place: &Place, wire: &Wire) -> Result<Victim, Stop> {
    let plant = |root: &Path| -> std::io::Result<()> {
        for dir in ["", "d", "d/below", "mnt"] {
            fs::create_dir_all(root.join(dir))?;
            for name in ["f0", "f1", "newest"] {
                fs::write(root.join(dir).join(name), CANARY)?;
            }
        }
        Ok(())
    };
    let output = [("type", "output"), ("name", "secret"), ("commit", "always")];
    let maker = wire.kubelet.pod_with_uid(GOOD, "maker", "maker");
    wire.must(
        "publish",
        maker
            .publish(VOLUME, output, PublishOptions::default())
            .await,
    )?;
    plant(&maker.target(VOLUME)).map_err(cannot("plant"))?;
    let sealed = Arc::new(content::read(&maker.target(VOLUME))?);
    wire.must("unpublish", maker.unpublish(VOLUME).await)?;
    maker.remove().map_err(cannot("remove a pod"))?;
    wire.settle().await?;
    let input = [("type", "input"), ("from", "artifact/secret")];
    let pod = wire.kubelet.pod_with_uid(GOOD, "holder", "holder");
    wire.must(
        "publish",
        pod.publish(VOLUME, input, PublishOptions::default()).await,
    )?;
    let mut trees = Vec::new();
    for root in [
        place.lab.dir("victim"),
        place.lab.kubelet_dir().join("run/victim"),
        pod.target(VOLUME),
    ] {
        fs::create_dir_all(&root).map_err(cannot("plant"))?;
        plant(&root).map_err(cannot("plant"))?;
        let snapshot = content::read(&root)?;
        trees.push((root, snapshot));
    }
    Ok(Victim { trees, pod, sealed })
}

impl Victim {
    fn is_untouched(&self) -> Result<(), Fault> {
        for (root, before) in &self.trees {
            let now = content::read(root)?;
            let lines = before.diff(&now);
            if !lines.is_empty() {
                let what = format!("{} was changed from outside: {lines:?}", root.display());
                return Err(Fault::wrong(what));
            }
        }
        Ok(())
    }
}

/// One process of the tenant, on a thread of its own whose root is the volume's: as in a container,
/// an absolute link leads nowhere else, for itself. It goes on when the volume is unpublished.
struct Attacker {
    victims: Vec<PathBuf>,
    /// Something to mount, from outside.
    bait: OwnedFd,
    random: Random,
}

impl Attacker {
    fn go(mut self, root: &File, stop: &AtomicBool, done: &AtomicU64) {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_FS).expect("a thread of its own");
        rustix::process::fchdir(root).expect("the volume's root");
        rustix::process::chroot(".").expect("root may");
        for dir in ["/m", "/m/x", "/n0", "/n1"] {
            drop(fs::create_dir(dir));
        }
        while !stop.load(Ordering::Relaxed) {
            self.strike();
            done.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// One of the things that root in a container may do. Whether it succeeds does not matter.
    fn strike(&mut self) {
        let random = &mut self.random;
        let victim = random.pick(&self.victims).clone();
        let here = PathBuf::from(format!("/n{}", random.below(6)));
        let other = PathBuf::from(format!("/n{}", random.below(6)));
        match random.below(20) {
            0 => drop(fs::create_dir(&here)),
            1 => drop(fs::write(here.join("f0"), "own")),
            2 => drop(fs::write(&here, "own")),
            3 => drop(symlink(&victim, &here)),
            4 => drop(symlink(victim.join("f0"), here.join("f0"))),
            5 => drop(symlink("../../../../../../../../../..", &here)),
            // Directories and links change places.
            6..=8 => drop(rustix::fs::renameat_with(
                CWD,
                &here,
                CWD,
                &other,
                RenameFlags::EXCHANGE,
            )),
            9 => drop(fs::rename(&here, other.join("deeper"))),
            10 => drop(rustix::fs::mknodat(
                CWD,
                here.join("w"),
                FileType::CharacterDevice,
                Mode::empty(),
                0,
            )),
            11 => Self::mark(&here, &victim),
            12 => {
                // chattr +i and +a, and off again.
                if let Ok(file) = File::open(&here) {
                    let flags = *random.pick(&[IFlags::IMMUTABLE, IFlags::APPEND, IFlags::empty()]);
                    let _refused = rustix::fs::ioctl_setflags(&file, flags);
                }
            }
            // Mounted in the driver's own namespace: worse than a container can. No process here
            // writes below it.
            13 => self.mount_bait(),
            14 => drop(rustix::mount::mount(
                "tenant",
                &here,
                "tmpfs",
                MountFlags::empty(),
                None,
            )),
            15 => {
                let flags = UnmountFlags::NOFOLLOW | UnmountFlags::DETACH;
                let at = if random.percent(50) {
                    Path::new("/m/x")
                } else {
                    &here
                };
                let _not_mounted = rustix::mount::unmount(at, flags);
            }
            16 => {
                let marker = Path::new("/.baggageclaim-commit");
                let _gone = fs::remove_file(marker).or_else(|_| fs::remove_dir(marker));
                match random.below(4) {
                    0 => drop(symlink(victim.join("f0"), marker)),
                    1 => drop(symlink(&victim, marker)),
                    2 => drop(fs::create_dir(marker)),
                    _ => drop(fs::write(marker, "")),
                }
            }
            17 => drop(fs::hard_link(here.join("f0"), other.join("h"))),
            18 => drop(fs::remove_file(&here)),
            _ => drop(fs::remove_dir(&here)),
        }
    }

    /// The names that overlayfs treats as its own.
    fn mark(here: &Path, victim: &Path) {
        for key in ["opaque", "redirect", "metacopy", "whiteout"] {
            for space in ["trusted", "user"] {
                let key = format!("{space}.overlay.{key}");
                let value = format!("{}/f0", victim.display());
                let value = value.as_bytes();
                let flags = XattrFlags::empty();
                let _refused = rustix::fs::lsetxattr(here, key.as_str(), value, flags);
            }
        }
    }

    fn mount_bait(&self) {
        let flags = OpenTreeFlags::OPEN_TREE_CLONE
            | OpenTreeFlags::OPEN_TREE_CLOEXEC
            | OpenTreeFlags::AT_EMPTY_PATH;
        if let Ok(tree) = rustix::mount::open_tree(&self.bait, "", flags) {
            let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
            let _refused = rustix::mount::move_mount(&tree, "", CWD, "/m/x", flags);
        }
    }
}

/// One volume after the other is attacked while the driver does all that it does with a volume.
fn attacks(
    place: &Place,
    wire: &Wire,
    victim: &Victim,
    mut random: Random,
    until: Instant,
    on: &Handle,
) -> Result<(), Stop> {
    let mut number = 0_u64;
    let done = AtomicU64::new(0);
    while Instant::now() < until {
        number += 1;
        let uid = format!("hostile-{number}");
        let pod = wire.kubelet.pod_with_uid(HOSTILE, &uid, &uid);
        let kind: &[(&str, &str)] = match number % 5 {
            0 => &[("type", "scratch")],
            1 => &[("type", "output"), ("name", "o"), ("commit", "on-marker")],
            2 => &[("type", "task-cache"), ("key", "k"), ("commit", "always")],
            _ => &[("type", "output"), ("name", "o"), ("commit", "always")],
        };
        let options = PublishOptions::default();
        let answer = on.block_on(pod.publish(VOLUME, kind.iter().copied(), options));
        wire.must("publish to the tenant", answer)?;
        let root = File::open(pod.target(VOLUME)).map_err(cannot("open a volume"))?;
        let stop = AtomicBool::new(false);
        let ended = std::thread::scope(|scope| {
            for _ in 0..3 {
                let attacker = Attacker {
                    victims: victim.trees.iter().map(|(root, _)| root.clone()).collect(),
                    bait: File::open(&victim.trees[0].0).expect("it is there").into(),
                    random: random.fork(),
                };
                let (root, stop, done) = (&root, &stop, &done);
                scope.spawn(move || attacker.go(root, stop, done));
            }
            let ended = on.block_on(race(wire, &pod, kind, &mut random));
            stop.store(true, Ordering::Relaxed);
            ended
        });
        drop(root);
        ended.map_err(|stop| match stop {
            Stop::Fault(fault) => Stop::Fault(fault.at(format!("attack {number}, {kind:?}"))),
            Stop::Died => Stop::Died,
        })?;
        pod.remove().map_err(cannot("remove a pod"))?;
        on.block_on(async {
            wire.settle().await?;
            look(wire, victim, number).await
        })?;
        if number.is_multiple_of(8) {
            victim.is_untouched()?;
            on.block_on(async {
                clear(wire).await?;
                wire.check().await
            })?;
        }
    }
    let attacks = done.load(Ordering::Relaxed);
    place.figures.attacks.fetch_add(attacks, Ordering::Relaxed);
    crate::say(&format!(
        "tenant: {}: {number} volumes were attacked, {attacks} strikes",
        place.ground.name()
    ));
    Ok(())
}

/// All actions of the driver on a volume while its pod is in it, and its end; another tenant works
/// at the same time.
async fn race(
    wire: &Wire,
    pod: &Pod,
    kind: &[(&str, &str)],
    random: &mut Random,
) -> Result<(), Stop> {
    let nap = |most: u64, random: &mut Random| {
        tokio::time::sleep(Duration::from_micros(random.below(most)))
    };
    nap(20_000, random).await;
    for _ in 0..random.below(3) {
        let options = PublishOptions::default();
        let again = pod.republish(VOLUME, kind.iter().copied(), options).await;
        // It may be measured at this moment; or the tenant mounted something over what it has,
        // which is not taken away.
        let excused = [Code::Aborted, Code::FailedPrecondition];
        let _either = wire.answered("publish again, under attack", again, &excused)?;
        // Measures, in the background.
        let stats = pod.stats(VOLUME).await;
        let excused = [Code::NotFound];
        let _either = wire.answered("NodeGetVolumeStats, under attack", stats, &excused)?;
        bystander(wire, random.next()).await?;
        nap(5_000, random).await;
    }
    wire.outcome(pod.uid(), true).await?;
    let answer = pod.unpublish(VOLUME).await;
    wire.must("unpublish, under attack", answer)?;
    nap(15_000, random).await;
    bystander(wire, random.next()).await.map(drop)
}

/// Another tenant's step works as ever, and sees the same content as ever.
async fn bystander(wire: &Wire, number: u64) -> Result<Duration, Stop> {
    let uid = format!("good-{number}");
    let pod = wire.kubelet.pod_with_uid(GOOD, &uid, &uid);
    let began = Instant::now();
    let input = [("type", "input"), ("from", "artifact/secret")];
    let answer = pod.publish(VOLUME, input, PublishOptions::default()).await;
    wire.must("publish to somebody else", answer)?;
    let took = began.elapsed();
    let found = fs::read_to_string(pod.target(VOLUME).join("d/below/f1"));
    if found.as_deref().ok() != Some(CANARY) {
        let what = format!("somebody else's artifact shows {found:?}");
        return Err(Fault::wrong(what).into());
    }
    wire.must("unpublish of somebody else", pod.unpublish(VOLUME).await)?;
    pod.remove().map_err(cannot("remove a pod"))?;
    Ok(took)
}

/// No sealed content of the tenant contains another tenant's data, and the tenant cannot read it.
async fn look(wire: &Wire, victim: &Victim, number: u64) -> Result<(), Stop> {
    let canary = victim
        .sealed
        .get("f0")
        .and_then(|entry| entry.sha256.clone());
    for (index, from) in ["artifact/o", "task-cache/k", "artifact/secret"]
        .into_iter()
        .enumerate()
    {
        let uid = format!("looking-{number}-{index}");
        let pod = wire.kubelet.pod_with_uid(HOSTILE, &uid, &uid);
        let input = [("type", "input"), ("from", from)];
        let answer = pod.publish(VOLUME, input, PublishOptions::default()).await;
        // Content with marks of overlayfs may be refused at the seal; another tenant's content is
        // not in it.
        if wire
            .answered("publish a look", answer, &[Code::NotFound])?
            .is_err()
        {
            pod.remove().map_err(cannot("remove a pod"))?;
            continue;
        }
        if index == 2 {
            return Err(Fault::wrong("another tenant's artifact was given away").into());
        }
        let seen = content::read(&pod.target(VOLUME))?;
        let escaped = seen
            .entries
            .iter()
            .find(|(_, entry)| entry.sha256 == canary);
        if let Some((path, _)) = escaped {
            let what = format!("{} of {from} is somebody else's", path.escape_ascii());
            return Err(Fault::wrong(what).into());
        }
        wire.must("unpublish a look", pod.unpublish(VOLUME).await)?;
        pod.remove().map_err(cannot("remove a pod"))?;
    }
    wire.settle().await
}

/// Deletes what the tenant has sealed.
async fn clear(wire: &Wire) -> Result<(), Stop> {
    wire.settle().await?;
    for row in wire.artifacts().await? {
        if row.tenant != HOSTILE || row.reference.is_empty() {
            continue;
        }
        let request = api::DestroyRequest {
            tenant: row.tenant,
            reference: row.reference,
        };
        let answer = wire.admin.clone().destroy(request).await;
        let _or_evicted = wire.answered("destroy", answer, &[Code::NotFound])?;
    }
    Ok(())
}

/// Caches without end, directories full of names and very deep ones; other tenants are served as
/// ever.
fn many(place: &Place, wire: &Wire, until: Instant, on: &Handle) -> Result<(), Stop> {
    let stop = AtomicBool::new(false);
    let caches = AtomicU64::new(0);
    let (served, slowest) = std::thread::scope(|scope| {
        let makers: Vec<_> = (0..3)
            .map(|index| {
                let (stop, caches) = (&stop, &caches);
                scope.spawn(move || on.block_on(make_caches(wire, index, stop, caches)))
            })
            .collect();
        let mut slowest = Duration::ZERO;
        let mut served: Result<u64, Stop> = Ok(0);
        while Instant::now() < until
            && !makers
                .iter()
                .any(std::thread::ScopedJoinHandle::is_finished)
        {
            let Ok(number) = served else { break };
            served = match on.block_on(bystander(wire, 1 << 60 | number)) {
                Ok(took) => {
                    slowest = slowest.max(took);
                    Ok(number + 1)
                }
                Err(stop) => Err(stop),
            };
            std::thread::sleep(Duration::from_millis(2));
        }
        stop.store(true, Ordering::Relaxed);
        for maker in makers {
            let ended = maker
                .join()
                .unwrap_or_else(|_| Err(Fault::wrong("a panic").into()));
            if let Err(stop) = ended {
                served = Err(stop);
            }
        }
        (served, slowest)
    });
    let served = served?;
    crate::say(&format!(
        "tenant: {}: {} caches of one tenant, {served} publishes of another meanwhile, the slowest took {slowest:?}",
        place.ground.name(),
        caches.load(Ordering::Relaxed)
    ));
    Ok(())
}

async fn make_caches(
    wire: &Wire,
    index: u64,
    stop: &AtomicBool,
    caches: &AtomicU64,
) -> Result<(), Stop> {
    let mut number = 0;
    while !stop.load(Ordering::Relaxed) {
        number += 1;
        let uid = format!("many-{index}-{number}");
        let pod = wire.kubelet.pod_with_uid(HOSTILE, &uid, &uid);
        let cache = [
            ("type", "task-cache"),
            ("key", uid.as_str()),
            ("commit", "always"),
        ];
        let answer = pod.publish(VOLUME, cache, PublishOptions::default()).await;
        // One tenant may fill a disk; what it does not use is evicted.
        let excused = [Code::ResourceExhausted];
        if wire
            .answered("publish one of many", answer, &excused)?
            .is_err()
        {
            wire.must("unpublish one of many", pod.unpublish(VOLUME).await)?;
            pod.remove().map_err(cannot("remove a pod"))?;
            continue;
        }
        let target = pod.target(VOLUME);
        let written = fs::write(target.join("f"), &uid)
            .and_then(|()| if number == 5 { litter(&target) } else { Ok(()) });
        match written {
            // The same, told to the pod.
            Err(full) if full.kind() == std::io::ErrorKind::StorageFull => {}
            written => written.map_err(cannot("write"))?,
        }
        wire.must("unpublish one of many", pod.unpublish(VOLUME).await)?;
        pod.remove().map_err(cannot("remove a pod"))?;
        count(caches);
    }
    Ok(())
}

/// Names without end.
fn litter(root: &Path) -> std::io::Result<()> {
    fs::create_dir(root.join("wide"))?;
    for number in 0..4000 {
        File::create(root.join("wide").join(format!("{number}")))?;
    }
    let mut deep = root.to_owned();
    for _ in 0..150 {
        deep.push("a-name-of-some-length");
        fs::create_dir(&deep)?;
    }
    Ok(())
}

/// Nothing is left when both are gone.
async fn finish(place: &Place, wire: &Wire, victim: Victim) -> Result<(), Stop> {
    let shown = content::read(&victim.pod.target(VOLUME))?;
    let lines = victim.trees[2].1.diff(&shown);
    if !lines.is_empty() {
        return Err(Fault::wrong(format!("somebody else's volume changed: {lines:?}")).into());
    }
    wire.must("unpublish", victim.pod.unpublish(VOLUME).await)?;
    victim.pod.remove().map_err(cannot("remove a pod"))?;
    let last = wire.kubelet.pod_with_uid(GOOD, "last", "last");
    let input = [("type", "input"), ("from", "artifact/secret")];
    let answer = last.publish(VOLUME, input, PublishOptions::default()).await;
    wire.must("publish", answer)?;
    content::expect(
        &last.target(VOLUME),
        &[Seen::Exactly(victim.sealed.clone())],
    )?;
    wire.must("unpublish", last.unpublish(VOLUME).await)?;
    last.remove().map_err(cannot("remove a pod"))?;
    clear(wire).await?;
    let request = api::DestroyRequest {
        tenant: GOOD.to_owned(),
        reference: "artifact/secret".to_owned(),
    };
    wire.must("destroy", wire.admin.clone().destroy(request).await)?;
    content::remove(&victim.trees[1].0).map_err(cannot("remove"))?;
    nothing_left(place, wire).await
}
