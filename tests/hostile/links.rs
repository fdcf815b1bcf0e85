//! Symlinks on every path that the driver reads, made before or meanwhile: at the commit marker, in
//! place of directories, under the pool's own names. None is followed.

use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;

use baggageclaim::backend::BackendKind;
use baggageclaim::model::{Outcome, layout};
use rustix::fs::{CWD, FileType, Mode, OFlags, RenameFlags};

use crate::common::bench::{Bench, Ground, eventually, soon};
use crate::common::{Snapshot, assert_same, require_bench};
use crate::{INPUT, OUTPUT, Victim, destroy, seen};

/// Takes a tree away, as `rm -r` does.
#[allow(clippy::disallowed_methods, reason = "a pod deletes what is its own")]
fn remove(path: &Path) {
    fs::remove_dir_all(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
}

fn link(to: impl AsRef<Path>, at: impl AsRef<Path>) {
    let at = at.as_ref();
    symlink(to, at).unwrap_or_else(|e| panic!("{}: {e}", at.display()));
}

/// Links to the victim and to everything else, under every name that a program may look for.
fn links_everywhere(at: &Path, victim: &Victim) {
    for name in ["top", "fs", "fs.new", "work.1", "work", "layers", "trash"] {
        link(&victim.path, at.join(name));
    }
    for name in [
        "volume.json",
        "layer.json",
        "sealing.json",
        "index.redb",
        "lock",
        "reserve",
    ] {
        link(victim.path.join("f0"), at.join(name));
    }
    fs::create_dir_all(at.join("sub/d")).expect("mkdir");
    for (to, name) in [
        ("/", "root"),
        ("/proc/self/root", "proc"),
        ("/proc/self/fd", "fds"),
        ("..", "up"),
        ("../../../../../victim", "relative"),
        (".", "self"),
        ("loop", "loop"),
        ("sub", "inside"),
    ] {
        link(to, at.join(name));
        link(to, at.join("sub/d").join(name));
    }
    for number in 0..50 {
        link(
            format!("chain{}", number + 1),
            at.join(format!("chain{number}")),
        );
    }
    link(&victim.path, at.join("chain50"));
}

#[tokio::test(flavor = "multi_thread")]
async fn links_are_content_and_lead_nowhere() {
    for ground in Ground::ALL {
        let bench = require_bench!(on ground);
        let victim = Victim::of(&bench);
        bench
            .step("base", OUTPUT, |at| {
                for dir in ["d/below", "e/below", "g"] {
                    fs::create_dir_all(at.join(dir)).expect("mkdir");
                    fs::write(at.join(dir).join("f0"), "own").expect("write");
                }
            })
            .await;
        // A fork, in which directories of below become links, is committed; and thrown away; and
        // never committed.
        let task = [("type", "task-cache"), ("key", "k")];
        for (volume, outcome, attributes) in [
            ("committed", Outcome::Succeeded, &task[..]),
            ("failed", Outcome::Failed, &task),
            ("scratch", Outcome::Succeeded, &[][..]),
            ("input", Outcome::Succeeded, INPUT),
        ] {
            let (at, _) = bench.publish(volume, volume, attributes).await;
            for dir in ["d", "e", "g"] {
                if at
                    .join(dir)
                    .symlink_metadata()
                    .is_ok_and(|found| found.is_dir())
                {
                    remove(&at.join(dir));
                } else if at.join(dir).symlink_metadata().is_ok() {
                    continue;
                }
                link(
                    if dir == "e" {
                        Path::new("/")
                    } else {
                        &victim.path
                    },
                    at.join(dir),
                );
            }
            if at.join("top").symlink_metadata().is_err() {
                links_everywhere(&at, &victim);
            }
            let left = Snapshot::of(&at);
            victim.is_not_in(&left);
            let id = volume.parse().expect("id");
            bench.engine.stats(&id, &at).await.expect("stats");
            eventually("it is measured", || {
                bench.row(volume).is_some_and(|row| row.usage.is_some())
            })
            .await;
            bench.outcome(volume, outcome).await;
            bench.unpublish(volume).await;
            bench.quiet().await;
            if volume == "committed" {
                assert_same(&left, &seen(&bench, "look", &task).await);
            }
            bench.engine.reap().await.expect("reap");
            victim.is_untouched();
        }
        // The looking fork awaits an outcome.
        bench.outcome("look", Outcome::Failed).await;
        bench.quiet().await;
        destroy(&bench, "task-cache/k").await;
        bench.engine.reap().await.expect("reap");
        victim.is_untouched();
        bench.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_commit_marker_is_a_file_and_nothing_else_is_one() {
    const MARKER: &str = layout::COMMIT_MARKER;
    type Make = fn(&Path, &Victim);
    let shapes: [(&str, Make); 8] = [
        ("file", |at, _| fs::write(at, "").expect("write")),
        ("link-inside", |at, _| {
            fs::write(at.with_file_name("real"), "").expect("write");
            link("real", at);
        }),
        ("link-outside", |at, victim| {
            link(victim.path.join("f0"), at);
        }),
        ("link-nowhere", |at, _| link("/nowhere", at)),
        ("directory", |at, victim| {
            fs::create_dir(at).expect("mkdir");
            link(&victim.path, at.join("l"));
        }),
        ("fifo", |at, _| {
            rustix::fs::mknodat(CWD, at, FileType::Fifo, Mode::RUSR, 0).expect("mkfifo");
        }),
        ("socket", |at, _| {
            drop(UnixListener::bind(at).expect("bind"));
        }),
        ("device", |at, _| {
            let zero = rustix::fs::makedev(1, 5);
            rustix::fs::mknodat(CWD, at, FileType::CharacterDevice, Mode::RUSR, zero)
                .expect("mknod");
        }),
    ];
    for ground in Ground::ALL {
        let bench = require_bench!(on ground);
        let victim = Victim::of(&bench);
        for (shape, make) in shapes {
            let marked = [("type", "output"), ("name", shape), ("commit", "on-marker")];
            let always = [("type", "output"), ("name", shape), ("commit", "always")];
            let name = format!("artifact/{shape}");
            let (at, _) = bench.publish("pod", "v", &marked).await;
            // By a short path: that of a socket has less than 108 bytes.
            let dir = fs::File::open(&at).expect("open");
            let short = format!("/proc/self/fd/{}/", std::os::fd::AsRawFd::as_raw_fd(&dir));
            make(&Path::new(&short).join(MARKER), &victim);
            drop(dir);
            bench.unpublish("v").await;
            soon("its end", bench.quiet()).await;
            let what = format!("{shape}, {}", ground.name());
            assert_eq!(bench.artifact(&name).is_some(), shape == "file", "{what}");
            // Content that is committed anyway keeps it, except for a real marker.
            let (at, _) = bench.publish("pod", "w", &always).await;
            let dir = fs::File::open(&at).expect("open");
            let short = format!("/proc/self/fd/{}/", std::os::fd::AsRawFd::as_raw_fd(&dir));
            make(&Path::new(&short).join(MARKER), &victim);
            drop(dir);
            let mut left = Snapshot::of(&at);
            bench.unpublish("w").await;
            soon("its end", bench.quiet()).await;
            if shape == "file" {
                left.entries.remove(MARKER.as_bytes());
            }
            let input = [("type", "input"), ("from", name.as_str())];
            assert_same(&left, &seen(&bench, "in", &input).await);
            victim.is_untouched();
        }
        bench.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn stacks_in_which_directories_and_links_take_turns_are_merged_to_what_they_showed() {
    let bench = require_bench!();
    let victim = Victim::of(&bench);
    let task = [("type", "task-cache"), ("key", "k")];
    let mut left = None;
    for round in 0..19 {
        let volume = format!("v{round}");
        let now = bench
            .step(&volume, &task, |at| {
                if let Some(left) = &left {
                    assert_same(left, &Snapshot::of(at));
                }
                // Each stays what it is for another number of rounds, below links and above them.
                for (name, every) in [("d", 1), ("e", 2), ("g", 3)] {
                    if round % every != 0 {
                        continue;
                    }
                    let place = at.join(name);
                    if round > 0 {
                        if place.symlink_metadata().expect("there").is_dir() {
                            remove(&place);
                        } else {
                            fs::remove_file(&place).expect("unlink");
                        }
                    }
                    if (round / every) % 2 == 0 {
                        link(&victim.path, &place);
                    } else {
                        fs::create_dir_all(place.join("below")).expect("mkdir");
                        fs::write(place.join("f0"), format!("round {round}")).expect("write");
                        link(&victim.path, place.join("below/l"));
                    }
                }
                fs::write(at.join(format!("r{round}")), "").expect("write");
                Snapshot::of(at)
            })
            .await;
        left = Some(now);
        bench.engine.reap().await.expect("reap");
        victim.is_untouched();
    }
    let (at, published) = bench.publish("last", "last", &task).await;
    assert!(published.layers < 19, "nothing was merged");
    let now = Snapshot::of(&at);
    assert_same(&left.expect("rounds"), &now);
    victim.is_not_in(&now);
    bench.unpublish("last").await;
    bench.outcome("last", Outcome::Failed).await;
    bench.finish().await;
}

/// Threads that swap directories of a volume with links to the victim, as fast as they can, until
/// they are stopped.
struct Swapping {
    done: Arc<AtomicBool>,
    swaps: Arc<AtomicUsize>,
    threads: Vec<JoinHandle<()>>,
}

impl Swapping {
    fn start(at: &Path, victim: &Victim) -> Self {
        let (done, swaps) = (
            Arc::new(AtomicBool::new(false)),
            Arc::new(AtomicUsize::new(0)),
        );
        for place in ["", "d", "d/below"] {
            let place = at.join(place);
            for name in ["d", "below", "e"] {
                fs::create_dir_all(place.join(name)).expect("mkdir");
            }
            for number in 0..20 {
                fs::write(place.join(format!("e/f{number}")), "own").expect("write");
            }
            for name in ["to-d", "to-below", "to-e"] {
                link(&victim.path, place.join(name));
            }
        }
        // All are opened before the first swap.
        let dirs = ["", "d", "d/below"].map(|place| {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY;
            rustix::fs::open(at.join(place), flags, Mode::empty()).expect("open")
        });
        let threads = dirs.map(|dir| {
            let (done, swaps) = (done.clone(), swaps.clone());
            std::thread::spawn(move || {
                while !done.load(Ordering::Relaxed) {
                    for name in ["d", "below", "e"] {
                        let to = format!("to-{name}");
                        if rustix::fs::renameat_with(&dir, name, &dir, &to, RenameFlags::EXCHANGE)
                            .is_ok()
                        {
                            swaps.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                    // Refills an emptied directory as long as it exists.
                    let _ = rustix::fs::mkdirat(&dir, "e", Mode::RWXU);
                    let _ = rustix::fs::symlinkat("../../../../../victim", &dir, "to-e");
                    std::thread::yield_now();
                }
            })
        });
        Self {
            done,
            swaps,
            threads: threads.into(),
        }
    }

    async fn goes_on(&self) {
        let before = self.swaps.load(Ordering::Relaxed);
        eventually("it swaps", || {
            self.swaps.load(Ordering::Relaxed) > before + 50
        })
        .await;
    }

    fn stop(self) {
        self.done.store(true, Ordering::Relaxed);
        for thread in self.threads {
            thread.join().expect("a swapping thread");
        }
    }
}

/// One volume's life under swapping hands.
async fn swapped(bench: &Bench, victim: &Victim, volume: &str, attributes: &[(&str, &str)]) {
    let (at, _) = bench.publish(volume, volume, attributes).await;
    let swapping = Swapping::start(&at, victim);
    swapping.goes_on().await;
    let id = volume.parse().expect("id");
    bench.engine.stats(&id, &at).await.expect("stats");
    eventually("it is measured", || {
        bench.row(volume).is_some_and(|row| row.usage.is_some())
    })
    .await;
    // A repetition, and a second way to it.
    bench.publish(volume, volume, attributes).await;
    bench.unpublish(volume).await;
    // Let it begin, and go on as far as it can, under those hands.
    let mut swaps = usize::MAX;
    for _ in 0..20 {
        bench.engine.reap().await.expect("reap");
        let now = swapping.swaps.load(Ordering::Relaxed);
        if bench.row(volume).is_none() && now == swaps {
            break;
        }
        swaps = now;
    }
    swapping.stop();
    bench.quiet().await;
    bench.engine.reap().await.expect("reap");
    victim.is_untouched();
}

#[tokio::test(flavor = "multi_thread")]
async fn directories_swapped_with_links_at_any_moment_lead_nowhere() {
    for ground in Ground::ALL {
        let bench = require_bench!(on ground);
        let victim = Victim::of(&bench);
        for round in 0..3 {
            swapped(&bench, &victim, &format!("scratch{round}"), &[]).await;
            let never = [("type", "output"), ("name", "n"), ("commit", "never")];
            swapped(&bench, &victim, &format!("never{round}"), &never).await;
            let name = format!("o{round}");
            let output = [
                ("type", "output"),
                ("name", name.as_str()),
                ("commit", "always"),
            ];
            swapped(&bench, &victim, &format!("output{round}"), &output).await;
            let from = format!("artifact/{name}");
            let is_sealed = bench.artifact(&from).is_some();
            assert!(is_sealed, "{}", ground.name());
            let input = [("type", "input"), ("from", from.as_str())];
            let look = seen(&bench, &format!("in{round}"), &input).await;
            victim.is_not_in(&look);
            // Content sealed under them is no longer theirs.
            assert_same(&look, &seen(&bench, &format!("again{round}"), &input).await);
            if ground.0 == BackendKind::Overlay {
                assert!(look.len() > 60, "{look}");
            }
            destroy(&bench, &from).await;
        }
        victim.is_untouched();
        bench.finish().await;
    }
}
