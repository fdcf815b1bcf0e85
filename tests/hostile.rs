//! A hostile pod: root in a container changes nothing outside its volumes. It blocks no unpublish,
//! seal or deletion forever, and its content never takes effect as overlay marks.
//!
//! | file | content |
//! |---|---|
//! | `links` | symlinks on every path that the driver reads, also made meanwhile |
//! | `mounts` | the pod's own mounts below a target, here and in another mount namespace |
//! | `marks` | overlayfs's own marks, odd names, flags |
//! | `holders` | files that a process holds open and mapped after its pod has ended |
//! | `sizes` | very deep and very wide trees |

#![allow(
    clippy::disallowed_types,
    reason = "a pod is a process of its own: this program, started again"
)]

mod common;

#[path = "hostile/holders.rs"]
mod holders;
#[path = "hostile/links.rs"]
mod links;
#[path = "hostile/marks.rs"]
mod marks;
#[path = "hostile/mounts.rs"]
mod mounts;
#[path = "hostile/sizes.rs"]
mod sizes;

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Arc, LazyLock};

use common::Snapshot;
use common::bench::Bench;
use parking_lot::Mutex;

const OUTPUT: &[(&str, &str)] = &[("type", "output"), ("name", "o"), ("commit", "always")];
const INPUT: &[(&str, &str)] = &[("type", "input"), ("from", "artifact/o")];

/// A foreign tree on the pool's filesystem, with the names that the pods here use.
struct Victim {
    path: PathBuf,
    before: Snapshot,
}

const CANARY: &str = "of somebody else";

impl Victim {
    fn of(bench: &Bench) -> Self {
        let path = bench.lab.dir("victim");
        for dir in ["", "d", "d/below", "mnt"] {
            fs::create_dir_all(path.join(dir)).expect("mkdir");
            for name in ["f0", "f1", "f2"] {
                fs::write(path.join(dir).join(name), CANARY).expect("write");
            }
        }
        let before = Snapshot::of(&path);
        Self { path, before }
    }

    #[track_caller]
    fn is_untouched(&self) {
        common::assert_same(&self.before, &Snapshot::of(&self.path));
    }

    /// That a tree holds nothing of it.
    #[track_caller]
    fn is_not_in(&self, seen: &Snapshot) {
        let canary = &self.before.get("f0").expect("there").sha256;
        for (path, entry) in &seen.entries {
            let path = path.escape_ascii();
            assert!(entry.sha256 != *canary, "{path} came from the victim");
        }
    }
}

/// The content of a new fork of an artifact.
async fn seen(bench: &Bench, volume: &str, attributes: &[(&str, &str)]) -> Snapshot {
    let (at, _) = bench.publish(volume, volume, attributes).await;
    let snapshot = Snapshot::of(&at);
    bench.unpublish(volume).await;
    bench.quiet().await;
    snapshot
}

async fn destroy(bench: &Bench, name: &str) {
    let (tenant, name) = ("ci".parse().expect("label"), name.parse().expect("name"));
    bench
        .engine
        .destroy(&tenant, &name)
        .await
        .expect("destroyed");
}

/// A process of a pod. It does as it is told, a word and a path at a time.
struct Process {
    child: Child,
    say: ChildStdin,
    hear: BufReader<ChildStdout>,
}

const PLAYED: &str = "BAGGAGECLAIM_TEST_POD";
const DONE: &str = "pod: done";

impl Process {
    fn start() -> Self {
        let mut child = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "a_pod_is_played", "--nocapture"])
            .env(PLAYED, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a pod starts");
        Self {
            say: child.stdin.take().expect("piped"),
            hear: BufReader::new(child.stdout.take().expect("piped")),
            child,
        }
    }

    fn tell(&mut self, verb: &str, path: &Path) {
        writeln!(self.say, "{verb} {}", path.display()).expect("it listens");
        let mut line = String::new();
        while !line.ends_with(&format!("{DONE}\n")) {
            line.clear();
            let read = self.hear.read_line(&mut line).expect("it answers");
            assert!(read > 0, "the pod did not survive `{verb}`");
        }
    }

    fn kill(mut self) {
        self.child.kill().expect("killed");
        self.child.wait().expect("waited for");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// No test: the other side of [`Process`].
#[test]
fn a_pod_is_played() {
    if std::env::var_os(PLAYED).is_none() {
        return;
    }
    let mut played = holders::Played::default();
    for line in std::io::stdin().lines() {
        let line = line.expect("a line");
        let (verb, path) = line.split_once(' ').expect("a verb and a path");
        let path = Path::new(path);
        match verb {
            "unshare" => mounts::unshare(path),
            "tmpfs" => mounts::tmpfs(path),
            "bind-below" => mounts::bind_below(path),
            "sit" => std::env::set_current_dir(path).expect("chdir"),
            verb => played.act(verb, path),
        }
        println!("{DONE}");
    }
}

static LOG: LazyLock<Log> = LazyLock::new(|| {
    let log = Log::default();
    let writer = log.clone();
    tracing_subscriber::fmt()
        .with_ansi(false)
        .with_max_level(tracing::Level::INFO)
        .with_writer(move || writer.clone())
        .init();
    log
});

/// All that the engines here have said.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    /// Whether one line has all these words.
    fn says(&self, words: &[&str]) -> bool {
        let log = self.0.lock();
        let text = String::from_utf8_lossy(&log);
        text.lines()
            .any(|line| words.iter().all(|word| line.contains(word)))
    }
}

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
