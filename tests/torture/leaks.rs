//! Publish and unpublish, many times: after a hundred thousand rounds the driver holds what it held
//! after a few. Memory, descriptors, threads, mounts, inodes of the pool, the size of the index.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use baggageclaim::kubelet_double::PublishOptions;
use baggageclaim::proto::admin::v1 as api;
use rustix::fs::statvfs;
use tokio::runtime::Handle;

use crate::caller::cannot;
use crate::common::Fs;
use crate::common::random::Random;
use crate::driver::{Ground, Place, Wire, nothing_left};
use crate::figures::{Fault, Figures, Stop, count};

/// The largest requested number.
const MOST: u64 = 100_000;
const CALLERS: u64 = 3;
/// After so many a caller waits until all that left is gone.
const TURN: u64 = 20;
/// One in so many is sealed, over the one before.
const SEALED: u64 = 40;
/// The memory that the allocator may keep however often it is asked: usage is not flat to the page.
const MEMORY: f64 = 6.0 * 1024.0;

const GROUNDS: [Ground; 3] = [
    Ground::new("overlay", Fs::Ext4, 512),
    // Deleted content frees space with the filesystem's next transaction, up to 30 s later. With
    // hundreds of subvolumes a second, 512 MiB have no space for the trees until then, and the base
    // is evicted for callers that need some.
    Ground::new("btrfs", Fs::Btrfs, 4096),
    Ground::new("copy", Fs::XfsReflink, 512),
];

/// The resources held at one moment.
#[derive(Debug, Clone, Copy)]
struct Held {
    cycles: u64,
    memory_kib: f64,
    descriptors: usize,
    threads: usize,
    mounts: usize,
    inodes: u64,
    index: u64,
}

/// Cycles on one ground after the other; the first has most of the time.
pub(crate) fn trial(mut random: Random, until: Instant, on: &Handle, figures: &Arc<Figures>) {
    for (number, ground) in GROUNDS.into_iter().enumerate() {
        let share = if number + 1 < GROUNDS.len() { 0.6 } else { 1.0 };
        let until = Instant::now() + crate::left(until).mul_f64(share);
        let seed = random.next();
        if let Err(fault) = one(ground, seed, until, on, figures) {
            figures.note(format!("leaks: {}", ground.name()), &fault);
        }
    }
}

fn one(
    ground: Ground,
    seed: u64,
    until: Instant,
    on: &Handle,
    figures: &Arc<Figures>,
) -> Result<(), Fault> {
    let arguments = ["--threads=3", "--reap-interval=1s", "--log=warn"];
    let place = Place::new(ground, &arguments, figures)?;
    let mut driver = place.start(None);
    let stop = AtomicBool::new(false);
    let cycles = AtomicU64::new(0);
    let connected = on.block_on(driver.connect());
    let wire = connected.map_err(|_| Fault::wrong("it does not start"))?;
    on.block_on(base(&wire)).map_err(told)?;
    let mut samples: Vec<Held> = Vec::new();
    let worked = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..CALLERS)
            .map(|index| {
                let (wire, stop, cycles) = (wire.clone(), &stop, &cycles);
                let random = Random::new(seed ^ (index + 1));
                let work = move || on.block_on(cycle(&wire, index, random, stop, cycles));
                scope.spawn(work)
            })
            .collect();
        let began = Instant::now();
        let length = until.saturating_duration_since(began);
        let mut next = length / 50;
        while Instant::now() < until && cycles.load(Ordering::Relaxed) < MOST {
            if workers
                .iter()
                .any(std::thread::ScopedJoinHandle::is_finished)
            {
                break;
            }
            std::thread::sleep(Duration::from_millis(20));
            if began.elapsed() > next {
                samples.push(look(&place, driver.pid(), cycles.load(Ordering::Relaxed)));
                next += length / 50;
            }
        }
        stop.store(true, Ordering::Relaxed);
        let ends = workers.into_iter().map(|worker| match worker.join() {
            Ok(end) => end.map_err(told),
            Err(_) => Err(Fault::wrong("a panic")),
        });
        ends.collect::<Result<Vec<()>, Fault>>()
    });
    worked?;
    figures
        .cycles
        .fetch_add(cycles.load(Ordering::Relaxed), Ordering::Relaxed);
    judge(ground, &samples)?;
    on.block_on(async {
        // A promise takes the name again.
        wire.settle().await?;
        let request = api::DestroyRequest {
            tenant: "ci".to_owned(),
            reference: "task-cache/turned".to_owned(),
        };
        let _may_never_have_been = wire.admin.clone().destroy(request).await;
        let request = api::DestroyRequest {
            tenant: "ci".to_owned(),
            reference: "artifact/base".to_owned(),
        };
        let answer = wire.admin.clone().destroy(request).await;
        wire.must("destroy", answer)?;
        nothing_left(&place, &wire).await
    })
    .map_err(told)?;
    driver.stop()?;
    place.admits_no_defect()
}

fn told(stop: Stop) -> Fault {
    match stop {
        Stop::Fault(fault) => fault,
        Stop::Died => Fault::wrong("the driver died"),
    }
}

async fn base(wire: &Wire) -> Result<(), Stop> {
    let pod = wire.kubelet.pod_with_uid("ci", "base", "base");
    let attributes = [("type", "output"), ("name", "base"), ("commit", "always")];
    let answer = pod
        .publish("v", attributes, PublishOptions::default())
        .await;
    wire.must("publish", answer)?;
    for number in 0..20 {
        let file = pod.target("v").join(format!("f{number}"));
        fs::write(file, "base").map_err(cannot("write"))?;
    }
    wire.must("unpublish", pod.unpublish("v").await)?;
    pod.remove().map_err(cannot("remove a pod"))?;
    wire.settle().await
}

/// One caller's pods, one after the other.
async fn cycle(
    wire: &Wire,
    index: u64,
    mut random: Random,
    stop: &AtomicBool,
    cycles: &AtomicU64,
) -> Result<(), Stop> {
    let mut number = 0;
    while !stop.load(Ordering::Relaxed) {
        number += 1;
        let uid = format!("leak-{index}-{number}");
        let pod = wire.kubelet.pod_with_uid("ci", &uid, &uid);
        let seals = random.below(SEALED) == 0;
        let attributes: &[(&str, &str)] = if seals {
            &[
                ("type", "task-cache"),
                ("key", "turned"),
                ("commit", "always"),
            ]
        } else if random.percent(70) {
            &[("type", "input"), ("from", "artifact/base")]
        } else {
            &[("type", "scratch")]
        };
        let options = PublishOptions::default();
        let answer = pod.publish("v", attributes.iter().copied(), options).await;
        wire.must("publish", answer)?;
        if seals || random.percent(20) {
            fs::write(pod.target("v").join("f1"), &uid).map_err(cannot("write"))?;
        }
        wire.must("unpublish", pod.unpublish("v").await)?;
        pod.remove().map_err(cannot("remove a pod"))?;
        count(cycles);
        // The remains are deleted in the background, slower than a fast caller can unpublish. A
        // queue is no leak, but hides one.
        if number % TURN == 0 {
            wire.settle().await?;
        }
    }
    Ok(())
}

fn look(place: &Place, pid: u32, cycles: u64) -> Held {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        let number = line.and_then(|rest| rest.split_whitespace().next());
        number
            .and_then(|text| text.parse::<u32>().ok())
            .unwrap_or(0)
    };
    let space = statvfs(place.lab.path()).ok();
    Held {
        cycles,
        memory_kib: f64::from(field("VmRSS:")),
        descriptors: fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count),
        threads: usize::try_from(field("Threads:")).unwrap_or(0),
        mounts: place.lab.leftovers().len(),
        inodes: space.map_or(0, |space| space.f_files - space.f_ffree),
        index: fs::metadata(place.pool.join("index.redb")).map_or(0, |data| data.len()),
    }
}

/// The middle one, which a moment with much under way does not move.
fn median(samples: &[Held], of: impl Fn(&Held) -> f64) -> f64 {
    let mut values: Vec<f64> = samples.iter().map(of).collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

/// Growth of something per cycle, by least squares.
fn slope(samples: &[Held], of: impl Fn(&Held) -> f64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "a hundred thousand at most")]
    let points: Vec<(f64, f64)> = samples
        .iter()
        .map(|one| (one.cycles as f64, of(one)))
        .collect();
    #[expect(clippy::cast_precision_loss, reason = "fifty at most")]
    let many = points.len() as f64;
    let (x, y) = points
        .iter()
        .fold((0.0, 0.0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
    let (x, y) = (x / many, y / many);
    let up: f64 = points.iter().map(|one| (one.0 - x) * (one.1 - y)).sum();
    let across: f64 = points.iter().map(|one| (one.0 - x).powi(2)).sum();
    if across == 0.0 { 0.0 } else { up / across }
}

/// After a warm-up of two fifths, the first and the last part of what is left are compared.
fn judge(ground: Ground, samples: &[Held]) -> Result<(), Fault> {
    let warm = &samples[samples.len() * 2 / 5..];
    if warm.len() < 6 {
        return Err(Fault::wrong("too few cycles to say anything"));
    }
    let third = warm.len() / 3;
    let (first, last) = (&warm[..third], &warm[warm.len() - third..]);
    let of = |what: &dyn Fn(&Held) -> f64| (median(first, what), median(last, what));
    let memory = of(&|held| held.memory_kib);
    let cycles = last[third - 1].cycles - first[0].cycles;
    #[expect(clippy::cast_precision_loss, reason = "small numbers")]
    let figures: [(&str, (f64, f64), f64); 5] = [
        ("descriptors", of(&|held| held.descriptors as f64), 24.0),
        ("threads", of(&|held| held.threads as f64), 4.0),
        ("mounts", of(&|held| held.mounts as f64), 6.0),
        ("inodes", of(&|held| held.inodes as f64), 300.0),
        ("bytes of the index", of(&|held| held.index as f64), 4.2e6),
    ];
    let grown = slope(warm, |held| held.memory_kib) * 1024.0;
    crate::say(&format!(
        "leaks: {}: {} cycles, {cycles} of them watched: memory {:.0} -> {:.0} KiB ({grown:.1} bytes a cycle); {}",
        ground.name(),
        samples.last().map_or(0, |held| held.cycles),
        memory.0,
        memory.1,
        figures
            .map(|(what, (a, b), _)| format!("{what} {a:.0} -> {b:.0}"))
            .join(", ")
    ));
    if memory.1 - memory.0 > MEMORY {
        return Err(Fault::leaked(format!(
            "memory grew from {} to {} KiB in {cycles} cycles",
            memory.0, memory.1
        )));
    }
    for (what, (before, after), slack) in figures {
        if after - before > slack {
            return Err(Fault::leaked(format!(
                "{what} grew from {before} to {after} in {cycles} cycles"
            )));
        }
    }
    Ok(())
}
