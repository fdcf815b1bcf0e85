//! Hundreds of power cuts: `dm-log-writes` records the writes of one run, each with the promises
//! before it. The test recreates the disk between any two of them.
//!
//! It proves: what was reported durable, by the engine or by fsync, is there after a cut at any
//! moment. That holds even if the disk kept as little as allowed, or an arbitrary part, of the
//! unflushed writes. It does not cover disks that lose flushed writes.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::mount::{MountFlags, UnmountFlags};

use super::debian::run;
use super::facts::{Fact, Promised, Random};
use super::init::tell;
use super::job::Report;
use super::log_writes::{Cut, Disk, Entry, Log, Replay};
use super::verdict::{self, Verdict};
use super::work::{Ground, Place, Work};

const DEVICE: &str = "logged";
/// Made when the filesystem is: cuts before it are of no interest.
const FORMATTED: &str = "formatted";

/// A loop device on a file.
pub(crate) fn attach(file: &Path) -> PathBuf {
    let shown = run(Command::new("losetup").args(["--find", "--show"]).arg(file));
    shown.expect("losetup").trim().into()
}

pub(crate) fn detach(device: &Path) {
    run(Command::new("losetup").arg("--detach").arg(device)).expect("losetup");
}

pub(crate) fn dmsetup(arguments: &[&str]) {
    let mut command = Command::new("dmsetup");
    command.args(arguments).env("DM_DISABLE_UDEV", "1");
    run(&mut command).expect("dmsetup");
}

pub(crate) fn mkfs(ground: Ground, device: &Path) {
    let (program, arguments) = ground.mkfs();
    run(Command::new(program).args(arguments).arg(device)).expect("mkfs");
}

pub(crate) fn mount(ground: Ground, device: &Path, at: &Path) -> rustix::io::Result<()> {
    let none = MountFlags::empty();
    rustix::mount::mount(device, at, ground.filesystem(), none, None)
}

pub(crate) fn unmount(at: &Path) {
    let started = Instant::now();
    loop {
        match rustix::mount::unmount(at, UnmountFlags::NOFOLLOW) {
            Err(rustix::io::Errno::BUSY) if started.elapsed() < Duration::from_secs(30) => {
                // The last descriptor of a detached mount goes a moment after its holder.
                std::thread::sleep(Duration::from_millis(10));
            }
            result => return result.unwrap_or_else(|e| panic!("umount {}: {e}", at.display())),
        }
    }
}

pub(crate) fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime")
}

/// Records a life of `steps` steps on `log`, a disk.
pub(crate) fn record(ground: Ground, seed: u64, steps: u64, log: &Path) {
    let image = Path::new("/dev/shm/disk");
    File::create(image)
        .and_then(|file| file.set_len(ground.disk()))
        .expect("a disk");
    let under = attach(image);
    let table = format!(
        "0 {} log-writes {} {}",
        ground.disk() / 512,
        under.display(),
        log.display()
    );
    dmsetup(&["create", DEVICE, "--table", &table]);
    let device = PathBuf::from(format!("/dev/mapper/{DEVICE}"));
    mkfs(ground, &device);
    let mark = |text: &str| dmsetup(&["message", DEVICE, "0", "mark", text]);
    mark(FORMATTED);
    let at = Path::new("/tmp/disk");
    fs::create_dir(at).expect("mkdir");
    mount(ground, &device, at).expect("mount");
    let place = Place {
        ground,
        pool: at.join("pool"),
        targets: "/tmp/targets".into(),
        seed,
    };
    let note = |fact: Fact| mark(&serde_json::to_string(&fact).expect("plain data serialises"));
    runtime().block_on(async {
        let mut work = Work::begin(&place, &note).await;
        for _ in 0..steps {
            work.step().await.expect("the disk is well");
        }
        work.end().await;
    });
    tell(&Report::Worked(steps));
    unmount(at);
    dmsetup(&["remove", DEVICE]);
    detach(&under);
}

/// Where cuts are tried.
pub(crate) struct Field<'a> {
    /// The log that was recorded.
    pub(crate) log: &'a Path,
    pub(crate) ground: Ground,
    /// By which the moments are chosen.
    pub(crate) seed: u64,
    /// By which the life was.
    pub(crate) life: u64,
    /// A directory in memory.
    pub(crate) room: &'a Path,
}

/// Cuts at `count` moments, and looks at what is left each time. Every third moment is within an
/// import; the others are spread over the whole life. `tell` hears of each: the moment, and what
/// was found.
pub(crate) fn sweep(field: &Field<'_>, count: u64, tell: &mut dyn FnMut(String, Verdict)) {
    let log = Log::read(File::open(field.log).expect("the log")).expect("a log");
    let first = log.after(FORMATTED).expect("the mark");
    let mut random = Random::new(field.seed ^ 0x5eed);
    let last = log.entries.len();
    let imports = during_imports(&log);
    let mut below = |end: usize| usize::try_from(random.below(end as u64)).expect("it is below");
    let mut moments: Vec<usize> = (0..count)
        .map(|number| match imports.len() {
            1.. if number % 3 == 0 => imports[below(imports.len())],
            _ => first + below(last - first + 1),
        })
        .collect();
    moments.sort_unstable();
    let mut replay = Replay::new(&log);
    if let Some(first) = moments.first() {
        // A check that misses nothing here would never find anything: content that is promised only
        // later is not there yet.
        let disk = replay
            .disk(*first, Cut::Whole)
            .expect("the log can be read");
        let promised: Vec<Fact> = facts(&log, last);
        let verdict = check(field, &disk, &Promised::by(&promised));
        let found = !verdict.lost.is_empty() || promised.len() == facts(&log, *first).len();
        assert!(
            found,
            "what is promised later is there already: {verdict:?}"
        );
    }
    for moment in moments {
        let cut = match random.below(4) {
            0 => Cut::Bare,
            1 => Cut::Whole,
            _ => Cut::Some(random.next()),
        };
        let disk = replay.disk(moment, cut).expect("the log can be read");
        let facts = facts(&log, moment);
        let verdict = check(field, &disk, &Promised::by(&facts));
        let writes = |entries: &[Entry]| {
            let writes = entries.iter().filter(|e| matches!(e, Entry::Write { .. }));
            writes.count()
        };
        tell(
            format!(
                "{:?}, seed {} of life {}, before entry {moment} of {last} (write {} of {}), {cut:?}, {} promises",
                field.ground,
                field.seed,
                field.life,
                writes(&log.entries[..moment]),
                writes(&log.entries),
                facts.len()
            ),
            verdict,
        );
    }
}

/// The moments, as numbers of the next entry, at which an import was under way. A life does one
/// thing at a time, so that the next fact ends the import.
fn during_imports(log: &Log) -> Vec<usize> {
    let mut moments = Vec::new();
    let mut under_way = false;
    for (number, entry) in log.entries.iter().enumerate() {
        if let Entry::Mark(mark) = entry
            && let Ok(fact) = serde_json::from_str(mark)
        {
            under_way = matches!(fact, Fact::Importing(_));
        }
        if under_way {
            moments.push(number + 1);
        }
    }
    moments
}

/// The promises before an entry.
fn facts(log: &Log, moment: usize) -> Vec<Fact> {
    let marks = log.marks(moment);
    marks
        .filter_map(|mark| serde_json::from_str(mark).ok())
        .collect()
}

/// Mounts a disk that lost power and looks at the pool.
fn check(field: &Field<'_>, disk: &Disk, promised: &Promised) -> Verdict {
    let image = field.room.join("cut");
    let file = File::create(&image).expect("a file");
    disk.write_to(&file, field.ground.disk()).expect("written");
    drop(file);
    let device = attach(&image);
    let at = field.room.join("fs");
    fs::create_dir_all(&at).expect("mkdir");
    let mounted = mount(field.ground, &device, &at);
    let verdict = mounted.map(|()| {
        let targets = field.room.join("targets");
        let verdict = look(field.ground, field.life, &at, &targets, promised);
        unmount(&at);
        verdict
    });
    let verdict = verdict.unwrap_or_else(|error| Verdict {
        lost: vec![format!("the filesystem does not mount: {error}")],
        ..Verdict::default()
    });
    detach(&device);
    verdict
}

/// Looks at the pool of a filesystem that is mounted again.
pub(crate) fn look(
    ground: Ground,
    seed: u64,
    at: &Path,
    targets: &Path,
    promised: &Promised,
) -> Verdict {
    let place = Place {
        ground,
        pool: at.join("pool"),
        targets: targets.to_owned(),
        seed,
    };
    runtime().block_on(verdict::look(&place, promised))
}
