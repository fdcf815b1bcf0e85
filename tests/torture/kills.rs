//! Random operations from several callers, and SIGKILL at random moments: after each start, driver
//! and model agree.
//!
//! A seed gives a [`Program`], which has everything of an episode: each caller's operations in
//! order, and the end of each driver process. Each caller's order is the same in every run. The
//! interleaving of callers and the moment of the kill depend on the machine, so a replay is a best
//! effort. A minimised program is one that failed again within three runs.

use std::fmt::Write as _;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baggageclaim::engine::failpoint::Point;
use serde::{Deserialize, Serialize};
use tokio::runtime::Handle;

use crate::caller::{self, Caller, Op, Together};
use crate::claims;
use crate::common::Fs;
use crate::common::random::Random;
use crate::driver::{Driver, Ground, PATIENCE, Place, Wire, nothing_left};
use crate::figures::{Fault, Figures, Stop, count};

/// The grounds; the first ones more often, see [`Program::of`].
const GROUNDS: [Ground; 5] = [
    Ground::new("overlay", Fs::Ext4, 512),
    Ground::new("btrfs", Fs::Btrfs, 512),
    Ground::new("copy", Fs::XfsReflink, 512),
    Ground {
        api: "classic",
        ..Ground::new("overlay", Fs::XfsReflink, 512)
    },
    Ground::new("copy", Fs::Ext4, 512),
];

const CALLERS: usize = 4;
const OPS: usize = 500;
const LIVES: usize = 24;

/// How a driver ends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Life {
    /// Killed so many microseconds after it serves.
    Serving(u64),
    /// Killed so many microseconds after it was started, which may be before it serves.
    Starting(u64),
    /// It dies at a named point, at this visit; killed if it does not come there soon.
    At(String, u64),
    /// Ended in order.
    Stopped(u64),
}

impl Life {
    fn any(random: &mut Random) -> Self {
        match random.below(100) {
            0..=59 => Self::Serving(random.below(300_000)),
            60..=71 => Self::Starting(random.below(200_000)),
            72..=96 => {
                let point = random.pick(Point::ALL);
                let visit = 1 + random.below(4);
                Self::At(point.name().to_owned(), visit)
            }
            _ => Self::Stopped(random.below(200_000)),
        }
    }

    /// The same for a driver that uploads and fetches, which takes longer.
    pub(crate) fn of_tier(random: &mut Random) -> Self {
        let moves = |point: &&Point| {
            let name = point.name();
            name.starts_with("receive") || name.starts_with("sharing") || name.starts_with("seal")
        };
        let points: Vec<Point> = Point::ALL.iter().filter(moves).copied().collect();
        match random.below(100) {
            0..=64 => Self::Serving(random.below(1_500_000)),
            65..=94 => {
                let visit = 1 + random.below(4);
                Self::At(random.pick(&points).name().to_owned(), visit)
            }
            _ => Self::Stopped(random.below(500_000)),
        }
    }

    /// Where the driver is told to die.
    pub(crate) fn armed(&self) -> Option<String> {
        match self {
            Self::At(point, visit) => Some(format!("{point}:{visit}")),
            _ => None,
        }
    }

    /// Waits for the end of the driver, or makes it. `idle`: no caller has anything to do.
    pub(crate) fn end(&self, driver: &mut Driver, idle: &dyn Fn() -> bool) -> Result<(), Stop> {
        let began = Instant::now();
        match self {
            Self::Serving(after) | Self::Stopped(after) => {
                let after = Duration::from_micros(*after);
                while began.elapsed() < after && !idle() {
                    std::thread::sleep(Duration::from_micros(500));
                }
            }
            Self::At(..) => {
                let patience = Duration::from_millis(400);
                while !driver.dies_within(Duration::from_millis(2))
                    && began.elapsed() < patience
                    && !idle()
                {}
            }
            Self::Starting(_) => {}
        }
        if let Self::Stopped(_) = self {
            return driver.terminate().map_err(Stop::Fault);
        }
        driver.kill();
        Ok(())
    }
}

/// All that an episode does.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Program {
    seed: u64,
    ground: usize,
    /// Unused content is evicted in every garbage collection.
    evicting: bool,
    callers: Vec<Vec<Op>>,
    lives: Vec<Life>,
}

impl Program {
    /// The program of a seed.
    pub(crate) fn of(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let ground = *random.pick(&[0, 0, 0, 0, 0, 1, 1, 2, 3, 4]);
        let evicting = random.percent(15);
        let callers = (0..CALLERS)
            .map(|_| {
                let mut own = random.fork();
                (0..OPS).map(|_| Op::any(&mut own)).collect()
            })
            .collect();
        let lives = (0..LIVES).map(|_| Life::any(&mut random)).collect();
        Self {
            seed,
            ground,
            evicting,
            callers,
            lives,
        }
    }

    pub(crate) fn name(&self) -> String {
        let ground = GROUNDS[self.ground].name();
        let evicting = if self.evicting { ", evicting" } else { "" };
        format!("{ground}{evicting}, seed {}", self.seed)
    }

    fn size(&self) -> usize {
        self.lives.len() + self.callers.iter().map(Vec::len).sum::<usize>()
    }

    fn arguments(&self) -> Vec<&'static str> {
        let mut arguments = vec![
            "--threads=2",
            "--input-wait=300ms",
            "--outcome-wait=1h",
            "--reserve=1Mi",
            "--grace=20s",
        ];
        arguments.extend(if self.evicting {
            [
                "--high-watermark=1",
                "--low-watermark=0",
                "--reap-interval=50ms",
            ]
        } else {
            [
                "--high-watermark=99",
                "--low-watermark=98",
                "--reap-interval=700ms",
            ]
        });
        arguments
    }

    /// Runs it; what is wrong, with the end of the driver's log.
    pub(crate) fn run(&self, on: &Handle, figures: &Arc<Figures>) -> Result<(), Fault> {
        let place = Place::new(GROUNDS[self.ground], &self.arguments(), figures)?;
        let run = AssertUnwindSafe(|| Episode::new(self, &place, on).run());
        let result = std::panic::catch_unwind(run).unwrap_or_else(|panic| {
            let said = panic.downcast_ref::<String>().cloned();
            let said = said.or_else(|| panic.downcast_ref::<&str>().map(|&text| text.to_owned()));
            Err(Fault::wrong(format!(
                "a panic: {}",
                said.unwrap_or_default()
            )))
        });
        let result = result.and_then(|()| place.admits_no_defect());
        result.map_err(|mut fault| {
            let log = std::env::temp_dir().join(format!("torture-{}.log", self.seed));
            place.keep_log(&log);
            // Writing to a String cannot fail.
            let _ = write!(fault.what, "\n--- the whole log: {}", log.display());
            fault.at(self.name())
        })
    }
}

/// A program that is being run.
struct Episode<'a> {
    program: &'a Program,
    place: &'a Place,
    on: &'a Handle,
    callers: Vec<Caller>,
    done: Vec<usize>,
}

impl<'a> Episode<'a> {
    fn new(program: &'a Program, place: &'a Place, on: &'a Handle) -> Self {
        let together = Arc::new(Together {
            evicting: program.evicting,
            ..Together::default()
        });
        let live_clones = place.ground.backend == "btrfs";
        let callers = (0..program.callers.len())
            .map(|index| Caller::new(index, &together, live_clones))
            .collect();
        Self {
            program,
            place,
            on,
            callers,
            done: vec![0; program.callers.len()],
        }
    }

    fn run(&mut self) -> Result<(), Fault> {
        for (number, life) in self.program.lives.iter().enumerate() {
            let idle = |(index, done): (usize, &usize)| self.program.callers[index].len() <= *done;
            if self.done.iter().enumerate().all(idle) {
                break;
            }
            self.live(life)
                .map_err(|fault| fault.at(format!("life {number}, {life:?}")))?;
        }
        self.end().map_err(|fault| fault.at("at the end"))
    }

    /// One driver, from its start to its end.
    fn live(&mut self, life: &Life) -> Result<(), Fault> {
        let armed = life.armed();
        self.place.note(&format!("{life:?}"));
        let mut driver = self.place.start(armed.as_deref());
        if let Life::Starting(after) = life {
            std::thread::sleep(Duration::from_micros(*after));
            driver.kill();
            count(&self.place.figures.kills);
            return Ok(());
        }
        let begun = self.on.block_on(async {
            let wire = driver.connect().await?;
            self.check(&wire).await?;
            Ok(wire)
        });
        let wire = match begun {
            Ok(wire) => wire,
            Err(Stop::Fault(fault)) => return Err(fault),
            Err(Stop::Died) => return self.died(&mut driver, armed.is_some()),
        };
        let stops = self.work(&wire, &mut driver, life);
        let ended_in_order = matches!(life, Life::Stopped(_));
        for stop in stops {
            match stop {
                Err(Stop::Fault(fault)) => {
                    // An answer of a driver that is stopping does not count.
                    if ended_in_order && fault.what.contains("shutting down") {
                        continue;
                    }
                    return Err(fault);
                }
                Ok(()) | Err(Stop::Died) => {}
            }
        }
        if !ended_in_order {
            count(&self.place.figures.kills);
        }
        Ok(())
    }

    /// A driver that was told to die did so on its own, while it was looked at.
    fn died(&self, driver: &mut Driver, armed: bool) -> Result<(), Fault> {
        if !driver.dies_within(PATIENCE) {
            return Err(Fault::wrong("a driver that lives does not answer"));
        }
        if !armed {
            return Err(Fault::wrong("the driver died of itself"));
        }
        count(&self.place.figures.kills);
        Ok(())
    }

    /// All callers at once, until the driver dies.
    fn work(&mut self, wire: &Wire, driver: &mut Driver, life: &Life) -> Vec<Result<(), Stop>> {
        let (on, place, programs) = (self.on, self.place, &self.program.callers);
        std::thread::scope(|scope| {
            let each = self.callers.iter_mut().zip(&mut self.done).zip(programs);
            let callers: Vec<_> = each
                .map(|((caller, done), ops)| {
                    let wire = wire.clone();
                    scope.spawn(move || {
                        on.block_on(async {
                            while let Some(op) = ops.get(*done) {
                                *done += 1;
                                let at = format!("caller {} at {done}, {op:?}", caller.index);
                                place.note(&at);
                                caller.act(&wire, *op).await.map_err(|stop| match stop {
                                    Stop::Fault(fault) => Stop::Fault(fault.at(at)),
                                    Stop::Died => Stop::Died,
                                })?;
                            }
                            Ok(())
                        })
                    })
                })
                .collect();
            let idle = || {
                callers
                    .iter()
                    .all(std::thread::ScopedJoinHandle::is_finished)
            };
            let stopped = life.end(driver, &idle);
            let ends = callers.into_iter().map(|caller| match caller.join() {
                Ok(end) => end,
                Err(panic) => std::panic::resume_unwind(panic),
            });
            let mut ends: Vec<_> = ends.collect();
            ends.push(stopped);
            ends
        })
    }

    /// Right after a start, without any call.
    async fn check(&mut self, wire: &Wire) -> Result<(), Stop> {
        for caller in &self.callers {
            caller.check_live()?;
        }
        self.check_mounts()?;
        wire.settle().await?;
        for caller in &mut self.callers {
            caller.settled();
        }
        let listed = wire.artifacts().await?;
        for caller in &self.callers {
            caller.check_names(&listed)?;
        }
        for row in &listed {
            if !self.callers.iter().any(|caller| caller.knows(row)) {
                return Err(
                    Fault::leaked(format!("an artifact that no commit made: {row:?}")).into(),
                );
            }
        }
        self.check_volumes(wire).await?;
        let (mut claims, mut snapshots) = claims::lists(wire).await?;
        let mut open = 0;
        for caller in &self.callers {
            open += caller.claims.check_lists(&mut claims, &mut snapshots)?;
        }
        if claims.len() + snapshots.len() > open {
            let what = format!("claims that no caller has: {claims:?} {snapshots:?}");
            return Err(Fault::leaked(what).into());
        }
        let open = self.callers.iter().flat_map(Caller::open_volumes);
        wire.check_but(&open.collect::<Vec<_>>()).await
    }

    fn check_mounts(&self) -> Result<(), Fault> {
        let mut found = self.place.lab.leftovers();
        let (mut must, mut may) = (Vec::new(), Vec::new());
        for caller in &self.callers {
            let (more, maybe) = caller.mounts();
            must.extend(more);
            may.extend(maybe);
        }
        for path in must {
            let Some(at) = found.iter().position(|mount| *mount == path) else {
                let what = format!("{} is not mounted", path.display());
                return Err(Fault::lost(what));
            };
            found.swap_remove(at);
        }
        for path in may {
            if let Some(at) = found.iter().position(|mount| *mount == path) {
                found.swap_remove(at);
            }
        }
        if found.is_empty() {
            return Ok(());
        }
        Err(Fault::leaked(format!("mounts of no volume: {found:?}")))
    }

    async fn check_volumes(&self, wire: &Wire) -> Result<(), Stop> {
        let mut listed = wire.volumes().await?;
        for caller in &self.callers {
            let (must, may) = caller.pods();
            for pod in must {
                let Some(at) = listed.iter().position(|row| row.pod_uid == pod) else {
                    return Err(Fault::lost(format!("the volume of {pod} is not listed")).into());
                };
                let row = listed.swap_remove(at);
                if row.state != "published" {
                    return Err(Fault::wrong(format!("published and listed so: {row:?}")).into());
                }
            }
            listed.retain(|row| !may.contains(&row.pod_uid));
        }
        if listed.is_empty() {
            return Ok(());
        }
        Err(Fault::leaked(format!("volumes that no caller has: {listed:?}")).into())
    }

    /// Everything is brought to its end, looked at, deleted; then nothing may be left.
    fn end(&mut self) -> Result<(), Fault> {
        let mut driver = self.place.start(None);
        let ended = self.on.block_on(async {
            let wire = driver.connect().await?;
            self.check(&wire).await?;
            for caller in &mut self.callers {
                caller.end(&wire).await?;
            }
            wire.settle().await?;
            for caller in &mut self.callers {
                caller.settled();
            }
            for caller in &mut self.callers {
                caller.clear(&wire).await?;
            }
            caller::clear_shared(&wire).await?;
            nothing_left(self.place, &wire).await
        });
        match ended {
            Ok(()) => {}
            Err(Stop::Fault(fault)) => return Err(fault),
            Err(Stop::Died) => return self.died(&mut driver, false),
        }
        driver.stop()?;
        self.place.check_offline()?;
        Ok(())
    }
}

/// How long a smaller program that fails is looked for.
const SHRINKING: Duration = Duration::from_secs(90);

/// A smaller program that fails too, as small as it gets in the time there is.
fn shrink(program: &Program, fault: Fault, on: &Handle) -> (Program, Fault) {
    let began = Instant::now();
    // A smaller trial's actions do not count in the figures.
    let fails = |smaller: &Program| {
        (0..3).find_map(|_| {
            let late = began.elapsed() > SHRINKING;
            let run = || smaller.run(on, &Arc::default()).err();
            (!late).then(run).flatten()
        })
    };
    let mut best = (program.clone(), fault);
    let mut chunk = 8;
    while chunk > 0 && began.elapsed() < SHRINKING {
        let before = best.0.size();
        for smaller in best.0.without_parts(chunk) {
            if smaller.size() < best.0.size()
                && let Some(fault) = fails(&smaller)
            {
                best = (smaller, fault);
                break;
            }
        }
        if best.0.size() == before {
            // Nothing could be left out: smaller parts, until they are single operations.
            chunk = if chunk > 128 { 0 } else { chunk * 4 };
        }
    }
    best
}

impl Program {
    /// The program without each of so many parts.
    fn without_parts(&self, parts: usize) -> Vec<Self> {
        let mut all = Vec::new();
        for index in 0..self.callers.len() {
            let mut smaller = self.clone();
            // The number of a caller is in its names and tenant: it stays, and does nothing.
            smaller.callers[index].clear();
            all.push(smaller);
        }
        let cut = |length: usize| {
            let size = length.div_ceil(parts).max(1);
            (0..length).step_by(size).map(move |from| (from, size))
        };
        for (from, size) in cut(self.lives.len()) {
            let mut smaller = self.clone();
            let to = (from + size).min(smaller.lives.len());
            smaller.lives.drain(from..to);
            all.push(smaller);
        }
        for index in 0..self.callers.len() {
            for (from, size) in cut(self.callers[index].len()) {
                let mut smaller = self.clone();
                let to = (from + size).min(smaller.callers[index].len());
                smaller.callers[index].drain(from..to);
                all.push(smaller);
            }
        }
        all
    }
}

/// Episode after episode, until it is time.
pub(crate) fn trial(mut seeds: Random, until: Instant, on: &Handle, figures: &Arc<Figures>) {
    while Instant::now() < until && figures.faults() < 3 {
        let program = Program::of(seeds.next());
        crate::say(&format!("kills: {}", program.name()));
        let Err(fault) = program.run(on, figures) else {
            continue;
        };
        figures.note(format!("kills: {}", program.name()), &fault);
        let (small, fault) = shrink(&program, fault, on);
        let path = std::env::temp_dir().join(format!("torture-{}.json", program.seed));
        let text = serde_json::to_string(&small).expect("plain data serialises");
        std::fs::write(&path, text).expect("write the program");
        crate::say(&format!(
            "kills: smaller, {} of {} operations and lives: {fault}\nreplay: BAGGAGECLAIM_TORTURE_REPLAY={} (smaller) or \
             BAGGAGECLAIM_TORTURE_SEED={} (as it was)",
            small.size(),
            program.size(),
            path.display(),
            program.seed
        ));
    }
}

/// One program again and again, until it fails or it is time.
pub(crate) fn replay(program: &Program, until: Instant, on: &Handle, figures: &Arc<Figures>) {
    loop {
        crate::say(&format!("replay: {}", program.name()));
        if let Err(fault) = program.run(on, figures) {
            return figures.note("replay", &fault);
        }
        if Instant::now() > until {
            return;
        }
    }
}
