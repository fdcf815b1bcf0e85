//! The kernels of production: Debian's, booted in a virtual machine that runs these tests.
//!
//! One program has two roles. Under cargo it downloads, packs, boots and listens; under a guest's
//! kernel it is the first process. It needs a Debian with apt on x86-64, and only apt's privilege;
//! it installs nothing. A missing part (a kernel, the network) is NOT RUN, which fails if CI is
//! set. Mirrors drop an older Debian's kernel some day: it must run only if `…_KERNELS` names it.
//!
//! | file | |
//! |---|---|
//! | `debian` | the kernels, qemu, and their cache |
//! | `image` | the initial file system of a guest |
//! | `guest` | a running machine, and its messages |
//! | `job` | the messages in both directions |
//! | `init` | its first process |
//! | `suites` | the test programs in it |
//! | `work`, `facts`, `verdict` | a workload, its promises, and the check afterwards |
//! | `cuts`, `log_writes` | power cuts between any two writes |
//! | `kills`, `nbd` | killed machines, and their disk with a volatile cache |
//! | `shakes` | a disk that refuses to write for a while |
//! | `figures` | the counters of a run |
//!
//! Environment variables: `BAGGAGECLAIM_GUESTS` the parts (`suites,cuts,kills,shakes`; default
//! all), `…_KERNELS` and `…_SUITES` which of these, `…_SHORT` a few minutes only, `…_SEED` the
//! first seed, `…_CONSOLE` to see the consoles, `BAGGAGECLAIM_TORTURE_MINUTES` how long cuts, kills
//! and shakes continue with new seeds.

#![allow(
    clippy::disallowed_types,
    clippy::print_stderr,
    clippy::print_stdout,
    reason = "this program starts virtual machines, and prints its progress"
)]

#[path = "../common/mod.rs"]
mod common;

mod cuts;
mod debian;
mod facts;
mod figures;
mod guest;
mod image;
mod init;
mod job;
mod kills;
mod log_writes;
mod nbd;
mod shakes;
mod suites;
mod verdict;
mod work;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use debian::{Kernel, Result, Tools};
use facts::Random;
use figures::Figures;
use guest::Machine;
use image::Image;
use job::{Job, Report, Shaken, Suite};
use work::Ground;

/// Set for the tests in a guest: there, what a test needs is there.
pub(crate) const IN_A_GUEST: &str = "BAGGAGECLAIM_IN_A_GUEST";

/// The kernels, oldest first.
const SERIES: [&str; 3] = ["5.10", "6.1", "6.12"];

/// The features of a kernel that the tests use.
const MODULES: [&str; 11] = [
    "virtio_pci",
    "virtio_blk",
    "virtio_rng",
    "loop",
    "overlay",
    "ext4",
    "xfs",
    "btrfs",
    "quota_v2",
    "dm_flakey",
    "dm_log_writes",
];

/// The features of a system that the tests use.
const PROGRAMS: [&str; 8] = [
    "mount",
    "losetup",
    "mkfs.ext4",
    "mkfs.xfs",
    "mkfs.btrfs",
    "filefrag",
    "sh",
    "dmsetup",
];

/// The test programs that run in guests, all of each.
const SUITES: [&str; 5] = ["conformance", "overlay", "engine", "claims", "claims_crash"];

/// The parts of all this.
const PARTS: [&str; 4] = ["suites", "cuts", "kills", "shakes"];

/// The tests of a short run: what only these kernels can show. The last is everything on
/// filesystems with quota, and is left to the oldest kernel that can set limits there.
const SHORT: [&str; 3] = ["limit", "the_probe", "with_quota"];

/// The suite that a short run has all of: calls that each kernel understands in a way of its own.
const WHOLE: &str = "overlay";

fn main() -> ExitCode {
    if std::process::id() == 1 {
        init::live();
    }
    let mut figures = Figures::default();
    if let Err(why) = keep(&mut figures) {
        figures.failed(&why);
    }
    for found in &figures.found {
        eprintln!("guests: {found}");
    }
    for missing in &figures.missing {
        eprintln!("guests: NOT RUN: {missing}");
    }
    println!("{figures}");
    if figures.found.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// All of it.
fn keep(figures: &mut Figures) -> Result<()> {
    let parts = chosen("BAGGAGECLAIM_GUESTS", &PARTS);
    let short =
        std::env::var_os("BAGGAGECLAIM_GUESTS_SHORT").is_some_and(|short| !short.is_empty());
    let minutes = number("BAGGAGECLAIM_TORTURE_MINUTES");
    let seed = number("BAGGAGECLAIM_GUESTS_SEED")
        .unwrap_or_else(|| getrandom::u64().expect("Linux has random numbers") >> 16);
    let Some((tools, kernels)) = provide(figures) else {
        return Ok(());
    };
    let place = tempfile::tempdir().map_err(|error| error.to_string())?;

    if parts.contains(&"suites") && minutes.is_none() {
        let suites = build(&chosen("BAGGAGECLAIM_GUESTS_SUITES", &SUITES))?;
        let limits = kernels.iter().find(|kernel| kernel.has_project_quotas());
        let limits = limits.map(|kernel| kernel.series);
        for kernel in &kernels {
            let image = place.path().join("suites");
            pack(&tools, kernel, &suites, &image)?;
            let machine = Machine {
                tools: &tools,
                kernel,
                image,
                mebibytes: 3072,
            };
            let arguments: Vec<String> = std::env::args().skip(1).collect();
            let most = if Some(kernel.series) == limits { 3 } else { 2 };
            let some = SHORT.iter().take(most).map(|&name| name.to_owned());
            let suites = suites.iter().map(|(name, _)| Suite {
                name: name.clone(),
                arguments: if short && arguments.is_empty() && name != WHOLE {
                    some.clone().collect()
                } else {
                    arguments.clone()
                },
            });
            run_suites(&machine, suites.collect(), figures)?;
        }
    }

    let mut machines = Vec::new();
    for kernel in &kernels {
        let image = place.path().join(kernel.series);
        pack(&tools, kernel, &[], &image)?;
        machines.push(Machine {
            tools: &tools,
            kernel,
            image,
            mebibytes: 1536,
        });
    }
    let plan = Plan {
        parts,
        short: short && minutes.is_none(),
        until: minutes.map(|minutes| Instant::now() + Duration::from_secs(60 * minutes)),
    };
    plan.follow(&machines, seed, figures)
}

/// The parts of guests, as far as this machine has them: tools, and at least one of the kernels.
fn provide(figures: &mut Figures) -> Option<(Tools, Vec<Kernel>)> {
    let found = Tools::find().and_then(|tools| {
        PROGRAMS
            .iter()
            .try_for_each(|name| tools.program(name).map(drop))?;
        Ok(tools)
    });
    let tools = found
        .map_err(|why| figures.missing("every guest", &why))
        .ok()?;
    let mut kernels = Vec::new();
    for series in chosen("BAGGAGECLAIM_GUESTS_KERNELS", &SERIES) {
        match debian::kernel(series) {
            Ok(kernel) => kernels.push(kernel),
            Err(why) => {
                let what = format!("Linux {series}");
                let is_named = std::env::var_os("BAGGAGECLAIM_GUESTS_KERNELS").is_some();
                if is_named || !debian::is_older(series) {
                    figures.missing(&what, &why);
                } else {
                    figures.not_offered(&what, &why);
                }
            }
        }
    }
    (!kernels.is_empty()).then_some((tools, kernels))
}

/// The faults for pools at work.
struct Plan {
    parts: Vec<&'static str>,
    short: bool,
    /// When it is enough; `None`: once round.
    until: Option<Instant>,
}

impl Plan {
    fn is_over(&self) -> bool {
        self.until.is_some_and(|until| Instant::now() >= until)
    }

    fn follow(&self, machines: &[Machine<'_>], seed: u64, figures: &mut Figures) -> Result<()> {
        let mut random = Random::new(seed);
        eprintln!("guests: BAGGAGECLAIM_GUESTS_SEED={seed}");
        if let (true, Some(newest)) = (self.short, machines.last()) {
            // One of them, another each time.
            let ground = random.below(Ground::ALL.len() as u64);
            let ground = Ground::ALL[usize::try_from(ground).expect("few")];
            return self.one(newest, ground, random.next() >> 16, figures);
        }
        loop {
            for machine in machines {
                for ground in Ground::ALL {
                    self.one(machine, ground, random.next() >> 16, figures)?;
                    if self.is_over() {
                        return Ok(());
                    }
                }
            }
            if self.until.is_none() {
                return Ok(());
            }
            eprintln!("guests: so far {figures}");
        }
    }

    fn one(
        &self,
        machine: &Machine<'_>,
        ground: Ground,
        seed: u64,
        figures: &mut Figures,
    ) -> Result<()> {
        if self.parts.contains(&"cuts") {
            self.cut(machine, ground, seed, figures)?;
        }
        if self.parts.contains(&"kills") && !self.is_over() {
            let most = if self.short { 1 } else { 5 };
            let enough = |done| done >= most || self.is_over();
            kills::kill_again_and_again(machine, ground, seed, &enough, figures)?;
        }
        if self.parts.contains(&"shakes") && !self.is_over() {
            let all = [Shaken::All, Shaken::Data];
            let possible = if ground == Ground::Xfs { 2 } else { 1 };
            for shaken in &all[..possible] {
                let job = Job::Shake {
                    ground,
                    shaken: *shaken,
                    seed,
                };
                listen(machine, &job, &[], figures)?;
            }
        }
        Ok(())
    }

    /// Records a life in a guest and cuts its power: in a guest, and, because that is twenty times
    /// faster, here.
    fn cut(
        &self,
        machine: &Machine<'_>,
        ground: Ground,
        seed: u64,
        figures: &mut Figures,
    ) -> Result<()> {
        let place = tempfile::tempdir().map_err(|error| error.to_string())?;
        let log = place.path().join("log");
        File::create(&log)
            .and_then(|file| file.set_len(4 << 30))
            .map_err(|error| error.to_string())?;
        let steps = if self.short { 25 } else { 50 };
        let record = Job::Record {
            ground,
            seed,
            steps,
        };
        let sweep = Job::Sweep {
            ground,
            seed,
            count: if self.short { 2 } else { 8 },
        };
        for job in [record, sweep] {
            listen(machine, &job, &[guest::drive(&log)], figures)?;
        }
        if !common::is_root() {
            common::skip("cuts on this machine itself need root");
            return Ok(());
        }
        let field = cuts::Field {
            log: &log,
            ground,
            seed: seed ^ 1,
            life: seed,
            room: place.path(),
        };
        let started = Instant::now();
        let before = figures.cuts;
        let count = if self.short { 30 } else { 100 };
        cuts::sweep(&field, count, &mut |what, verdict| {
            figures.cuts += 1;
            figures.hear(
                &format!("written by Linux {}: {what}", machine.kernel.series),
                &verdict,
            );
        });
        eprintln!(
            "{:>4} s  Linux {}: {ground:?}: {} cuts here",
            started.elapsed().as_secs(),
            machine.kernel.series,
            figures.cuts - before
        );
        Ok(())
    }
}

/// Starts a guest for a job and hears it out.
fn listen(
    machine: &Machine<'_>,
    job: &Job,
    drives: &[String],
    figures: &mut Figures,
) -> Result<()> {
    let series = machine.kernel.series;
    eprintln!("guests: Linux {series}: {job:?}");
    let mut guest = machine.start(job, drives)?;
    let mut done = false;
    while let Some(report) = guest.next()? {
        match report {
            Report::Looked(what, verdict) => {
                figures.cuts += 1;
                figures.hear(&format!("Linux {series}: {what}"), &verdict);
            }
            Report::Failed(why) => {
                figures.failed(&format!(
                    "Linux {series}: {job:?}: {why}\n{}",
                    guest.console()
                ));
            }
            Report::Worked(operations) => figures.operations += operations,
            Report::Said(line) => eprintln!("      {line}"),
            Report::Done => done = true,
            Report::Up | Report::Promised(_) | Report::Working | Report::Test { .. } => {}
        }
    }
    if !done {
        figures.failed(&format!(
            "Linux {series}: {job:?}: the guest ended early\n{}",
            guest.console()
        ));
    }
    eprintln!("{:>4} s", guest.age().as_secs());
    Ok(())
}

fn number(variable: &str) -> Option<u64> {
    std::env::var_os(variable)?.to_str()?.parse().ok()
}

/// Those that a variable of the environment names, or all.
fn chosen(variable: &str, all: &[&'static str]) -> Vec<&'static str> {
    let named = std::env::var_os(variable).and_then(|named| named.into_string().ok());
    let is_named = |name: &&'static str| {
        let named = named.as_ref();
        named.is_none_or(|named| named.split(',').any(|one| one == *name))
    };
    all.iter().copied().filter(is_named).collect()
}

/// Builds test programs; their names and where they are.
fn build(names: &[&str]) -> Result<Vec<(String, PathBuf)>> {
    let mut command = Command::new(env!("CARGO"));
    command
        .args(["test", "--locked", "--no-run", "--message-format=json"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .stderr(Stdio::inherit());
    for name in names {
        command.args(["--test", name]);
    }
    // Cargo sets them for this program. A build script that reads one of them would run again, and
    // with it all would be built again.
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        let set_by_cargo = ["CARGO_PKG_", "CARGO_MANIFEST_", "OUT_DIR"];
        if set_by_cargo.iter().any(|start| text.starts_with(start)) {
            command.env_remove(&name);
        }
    }
    let output = command
        .output()
        .map_err(|error| format!("cargo: {error}"))?;
    if !output.status.success() {
        return Err(format!("cargo: {}", output.status));
    }
    let mut built = Vec::new();
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        let Ok(message) = serde_json::from_str::<serde_json::Value>(line) else {
            continue;
        };
        let name = message["target"]["name"].as_str().unwrap_or_default();
        if let Some(program) = message["executable"].as_str()
            && names.contains(&name)
        {
            built.push((name.to_owned(), program.into()));
        }
    }
    if built.len() == names.len() {
        Ok(built)
    } else {
        Err(format!("cargo built {built:?}, and not all of {names:?}"))
    }
}

fn pack(tools: &Tools, kernel: &Kernel, suites: &[(String, PathBuf)], path: &Path) -> Result<()> {
    let mut image = Image::default();
    let this = std::env::current_exe().map_err(|error| error.to_string())?;
    image.program(tools, &this, "init")?;
    for (name, program) in suites {
        image.program(tools, program, &format!("{}/{name}", suites::PROGRAMS))?;
    }
    for name in PROGRAMS {
        // The first line of a script says where `sh` is.
        let dir = if name == "sh" { "bin" } else { "usr/bin" };
        image.program(tools, &tools.program(name)?, &format!("{dir}/{name}"))?;
    }
    image.modules(kernel, &MODULES)?;
    image.write(path)
}

/// Runs test programs in a guest.
fn run_suites(machine: &Machine<'_>, suites: Vec<Suite>, figures: &mut Figures) -> Result<()> {
    let series = machine.kernel.series;
    let mut guest = machine.start(&Job::Suites(suites), &[])?;
    let mut passed = 0;
    let mut done = false;
    while let Some(report) = guest.next()? {
        match report {
            Report::Test {
                suite,
                name,
                passed: true,
            } => {
                passed += 1;
                let age = guest.age().as_secs();
                eprintln!("{age:>4} s  Linux {series}: {suite}: {name}");
            }
            Report::Test { suite, name, .. } => {
                figures.failed(&format!("Linux {series}: {suite}: {name}"));
            }
            Report::Failed(why) => {
                figures.failed(&format!("Linux {series}: {why}\n{}", guest.console()));
            }
            Report::Done => done = true,
            _ => {}
        }
    }
    if !done {
        figures.failed(&format!(
            "Linux {series}: the guest ended early\n{}",
            guest.console()
        ));
    }
    eprintln!(
        "guests: Linux {series}: {passed} tests passed in {:?}",
        guest.age()
    );
    Ok(())
}
