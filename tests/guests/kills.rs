//! Power cuts of whole machines: a busy guest is killed at a random moment. Its disk has a volatile
//! write cache and loses any part of the unflushed writes. The next guest checks the rest.
//!
//! It proves the same as [`super::cuts`], also with a kernel that died at that moment, and with its
//! own journal replay. All reports before its death count as promises.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use super::cuts::{look, mkfs, mount, runtime, unmount};
use super::debian::Result;
use super::facts::{Fact, Promised, Random};
use super::figures::Figures;
use super::guest::{Machine, Next, drive};
use super::init::tell;
use super::job::{Job, Report};
use super::nbd::VolatileDisk;
use super::work::{Ground, Place, Work};

/// In the guest: where the disk is, what was promised of it, and where it is mounted.
const DISK: &str = "/dev/vda";
const PROMISED: &str = "/dev/vdb";
const AT: &str = "/tmp/disk";
/// Room for what was promised.
const FACTS: u64 = 4 << 20;

/// In the guest: looks at what a life left, if there was one, and lives the next until the machine
/// dies.
pub(crate) fn live(ground: Ground, seed: u64, before: Option<u64>) {
    fs::create_dir(AT).expect("mkdir");
    let (disk, at) = (Path::new(DISK), Path::new(AT));
    let targets = Path::new("/tmp/targets");
    if before.is_none() {
        mkfs(ground, disk);
    }
    mount(ground, disk, at).expect("the filesystem mounts");
    if let Some(before) = before {
        let text = fs::read(PROMISED).expect("what was promised");
        let end = text
            .iter()
            .position(|byte| *byte == 0)
            .unwrap_or(text.len());
        let facts: Vec<Fact> = serde_json::from_slice(&text[..end]).expect("facts");
        let verdict = look(ground, before, at, targets, &Promised::by(&facts));
        let what = format!("{ground:?}, seed {before}, {} promises", facts.len());
        tell(&Report::Looked(what, verdict));
        // A pool that was found bad is of no use to the next life.
        unmount(at);
        mkfs(ground, disk);
        mount(ground, disk, at).expect("a new filesystem mounts");
    }
    let place = Place {
        ground,
        pool: at.join("pool"),
        targets: targets.to_owned(),
        seed,
    };
    let note = |fact: Fact| tell(&Report::Promised(fact));
    runtime().block_on(async {
        let mut work = Work::begin(&place, &note).await;
        loop {
            tell(&Report::Working);
            work.step().await.expect("the disk is well");
        }
    });
}

/// Kills machines until `enough`, and looks at each one's disk.
pub(crate) fn kill_again_and_again(
    machine: &Machine<'_>,
    ground: Ground,
    seed: u64,
    enough: &dyn Fn(usize) -> bool,
    figures: &mut Figures,
) -> Result<()> {
    let series = machine.kernel.series;
    eprintln!("Linux {series}: {ground:?}: kills: BAGGAGECLAIM_GUESTS_SEED={seed}");
    let place = tempfile::tempdir().map_err(|error| error.to_string())?;
    let disk = VolatileDisk::serve(&place.path().join("disk"), ground.disk());
    let disk = disk.map_err(|error| error.to_string())?;
    let facts_file = place.path().join("promised");
    let mut random = Random::new(seed);
    let mut before: Option<(u64, Vec<Fact>)> = None;
    let mut done = 0;
    while before.is_none() || !enough(done) {
        let life = random.next();
        let known = before.take();
        let (old, facts) = known.map_or((None, Vec::new()), |(old, facts)| (Some(old), facts));
        let text = serde_json::to_vec(&facts).expect("plain data serialises");
        let file = fs::File::create(&facts_file).map_err(|error| error.to_string())?;
        file.set_len(FACTS).map_err(|error| error.to_string())?;
        std::os::unix::fs::FileExt::write_all_at(&file, &text, 0).map_err(|e| e.to_string())?;
        let job = Job::Live {
            ground,
            seed: life,
            before: old,
        };
        let mut guest = machine.start(&job, &[disk.drive(), drive(&facts_file)])?;
        let mut facts = Vec::new();
        let mut deadline = None;
        loop {
            match guest.next_before(deadline)? {
                Next::Report(Report::Working) => {
                    figures.operations += 1;
                    if deadline.is_none() {
                        let moment = Duration::from_millis(random.below(9000));
                        deadline = Some(Instant::now() + moment);
                    }
                }
                Next::Report(Report::Promised(fact)) => facts.push(fact),
                Next::Report(Report::Looked(what, verdict)) => {
                    done += 1;
                    figures.cuts += 1;
                    figures.hear(&format!("Linux {series}: kill: {what}"), &verdict);
                }
                Next::Report(Report::Failed(why)) => {
                    figures.failed(&format!("Linux {series}: kill: {why}\n{}", guest.console()));
                }
                Next::Report(_) => {}
                Next::Late => break,
                Next::Off => {
                    return Err(format!("the guest ended by itself\n{}", guest.console()));
                }
            }
        }
        figures.kills += 1;
        // Output on its way out of the machine had been promised.
        facts.extend(guest.kill().into_iter().filter_map(|report| match report {
            Report::Promised(fact) => Some(fact),
            _ => None,
        }));
        let (all, kept) = disk.lose_power(&mut random);
        eprintln!(
            "      killed with {} promises; {kept} of {all} unflushed writes stay",
            facts.len()
        );
        before = Some((life, facts));
    }
    Ok(())
}
