//! The first process of a guest: sets the machine up, does its job, reports, and powers off.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write as _;
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rustix::mount::{MountFlags, mount};

use super::cuts::{self, Field};
use super::image::{MODULES, NEEDS};
use super::job::{Job, Report};
use super::{kills, shakes, suites};

/// The first disk that is plugged in.
const DISK: &str = "/dev/vda";

/// The port of reports.
static REPORTS: Mutex<Option<File>> = Mutex::new(None);

/// After this long without a report, the console shows where each thread waits. The process that
/// started the guest waits longer, and shows the end of the console.
const SILENCE: Duration = Duration::from_secs(90);

/// How many calls of a thread are shown, the innermost first.
const DEEP: usize = 12;

/// When the last report was sent.
static TOLD: Mutex<Option<Instant>> = Mutex::new(None);

/// Reports to the process that started the guest.
pub(crate) fn tell(report: &Report) {
    let mut line = serde_json::to_vec(report).expect("plain data serialises");
    line.push(b'\n');
    let mut port = REPORTS.lock().expect("no thread panicked with this lock");
    *TOLD.lock().expect("nothing panics with this lock") = Some(Instant::now());
    if let Some(port) = port.as_mut() {
        port.write_all(&line).expect("the port takes it");
        // A power-off would not wait for what the port has not sent yet.
        let _ = rustix::termios::tcdrain(port);
    }
}

/// Shows on the console where threads wait, once in each silence.
fn watch_for_silence() {
    let mut shown = None;
    loop {
        std::thread::sleep(SILENCE / 10);
        let told = *TOLD.lock().expect("nothing panics with this lock");
        if told != shown && told.is_some_and(|told| told.elapsed() > SILENCE) {
            shown = told;
            eprintln!(
                "silent for {SILENCE:?}; the threads wait here:\n{}",
                threads()
            );
        }
    }
}

/// Where each thread of this process, and each thread of the kernel that is blocked, waits.
pub(crate) fn threads() -> String {
    let mut text = String::new();
    let own = fs::read_dir("/proc/self/task").expect("proc").flatten();
    let all = fs::read_dir("/proc").expect("proc").flatten();
    let read = |path: &Path, name: &str| fs::read_to_string(path.join(name)).unwrap_or_default();
    for thread in own.chain(all) {
        let path = thread.path();
        let stat = read(&path, "stat");
        let fields = stat.rsplit(')').next().unwrap_or_default();
        let state = fields.split_whitespace().next().unwrap_or_default();
        let is_own = path.starts_with("/proc/self/task");
        if is_own || state == "D" {
            let name = read(&path, "comm");
            let stack = read(&path, "stack");
            let frames = stack
                .lines()
                .filter_map(|line| line.split([' ', '+']).nth(1));
            let stack: Vec<_> = frames.take(DEEP).collect();
            let what = format!("{} ({state}): {}\n", name.trim(), stack.join(" < "));
            text.push_str(&what);
        }
    }
    text
}

/// All of a guest's life.
pub(crate) fn live() -> ! {
    std::panic::set_hook(Box::new(|info| {
        eprintln!("{info}\n{}", std::backtrace::Backtrace::force_capture());
        tell(&Report::Failed(info.to_string()));
    }));
    let worked = std::panic::catch_unwind(|| {
        prepare();
        std::thread::spawn(watch_for_silence);
        let line = fs::read_to_string("/proc/cmdline").expect("the command line");
        let job = Job::from_command_line(&line).expect("a job on the command line");
        work(job);
    });
    if worked.is_ok() {
        tell(&Report::Done);
    }
    let off = rustix::system::RebootCommand::PowerOff;
    let error = rustix::system::reboot(off);
    panic!("the machine stays on: {error:?}");
}

fn work(job: Job) {
    match job {
        Job::Suites(suites) => suites::run_all(&suites),
        Job::Record {
            ground,
            seed,
            steps,
        } => cuts::record(ground, seed, steps, Path::new(DISK)),
        Job::Live {
            ground,
            seed,
            before,
        } => kills::live(ground, seed, before),
        Job::Shake {
            ground,
            shaken,
            seed,
        } => shakes::shake(ground, shaken, seed),
        Job::Sweep {
            ground,
            seed,
            count,
        } => {
            let field = Field {
                log: Path::new(DISK),
                ground,
                seed,
                life: seed,
                room: Path::new("/dev/shm"),
            };
            let tell_all = &mut |cut, verdict| tell(&Report::Looked(cut, verdict));
            cuts::sweep(&field, count, tell_all);
        }
    }
}

fn prepare() {
    leave_the_initial_root();
    let none = MountFlags::empty();
    for (kind, at) in [
        ("proc", "/proc"),
        ("sysfs", "/sys"),
        ("devtmpfs", "/dev"),
        ("tmpfs", "/tmp"),
        ("tmpfs", "/run"),
    ] {
        mount(kind, at, kind, none, None).unwrap_or_else(|e| panic!("mount {at}: {e}"));
    }
    fs::create_dir("/dev/shm").expect("mkdir");
    mount("tmpfs", "/dev/shm", "tmpfs", none, Some(c"size=100%")).expect("mount /dev/shm");
    let port = File::options().write(true).open("/dev/ttyS1");
    *REPORTS.lock().expect("no panic yet") = Some(port.expect("the port of reports"));
    let needs = fs::read_to_string(Path::new("/").join(NEEDS)).expect("what modules need");
    let mut modules: BTreeMap<&str, Vec<&str>> = needs
        .lines()
        .map(|line| {
            let mut words = line.split_whitespace();
            (words.next().expect("a name"), words.collect())
        })
        .collect();
    while let Some((&name, _)) = modules.first_key_value() {
        load(name, &mut modules);
    }
    tell(&Report::Up);
}

/// Moves everything to another file system, which becomes the root: `pivot_root(2)`, by which a
/// program gets a place of its own, does not work where the root is what the kernel began with.
fn leave_the_initial_root() {
    const NEW: &str = "/new";
    let old: Vec<_> = fs::read_dir("/").expect("the root").flatten().collect();
    fs::create_dir(NEW).expect("mkdir");
    let none = MountFlags::empty();
    mount("root", NEW, "tmpfs", none, Some(c"mode=755,size=100%")).expect("a new root");
    for entry in old {
        move_tree(&entry.path(), &Path::new(NEW).join(entry.file_name()));
    }
    std::env::set_current_dir(NEW).expect("chdir");
    rustix::mount::mount_move(".", "/").expect("the new root takes its place");
    rustix::process::chroot(".").expect("chroot");
    std::env::set_current_dir("/").expect("chdir");
}

fn move_tree(from: &Path, to: &Path) {
    let kind = fs::symlink_metadata(from).expect("stat").file_type();
    if kind.is_dir() {
        fs::create_dir(to).expect("mkdir");
        for entry in fs::read_dir(from).expect("readdir").flatten() {
            move_tree(&entry.path(), &to.join(entry.file_name()));
        }
        fs::remove_dir(from).expect("rmdir");
    } else if kind.is_file() {
        fs::copy(from, to).unwrap_or_else(|error| panic!("{}: {error}", to.display()));
        fs::remove_file(from).expect("unlink");
    } else {
        fs::remove_file(from).expect("unlink");
    }
}

/// Loads a module after its dependencies. A module that is not listed is built in, or loaded
/// already.
fn load<'a>(name: &'a str, modules: &mut BTreeMap<&'a str, Vec<&'a str>>) {
    let Some(needs) = modules.remove(name) else {
        return;
    };
    for needed in needs {
        load(needed, modules);
    }
    let bytes = fs::read(format!("/{MODULES}/{name}.ko")).expect("a module");
    if let Err(error) = rustix::system::init_module(&bytes, c"") {
        panic!("module {name}: {error}");
    }
}
