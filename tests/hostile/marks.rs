//! Overlayfs's own marks written into a volume, odd names, and flags that forbid changes. Such
//! content comes back unchanged, or is refused with a message; no mark takes effect.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use baggageclaim::backend::BackendKind;
use baggageclaim::engine::Notices;
use baggageclaim::engine::notice::What;
use baggageclaim::model::{Outcome, layout};
use rustix::fs::{CWD, FileType, IFlags, Mode, RenameFlags, XattrFlags};

use crate::common::bench::{Bench, Ground, empty_claim, mount_request, soon};
use crate::common::{Fs, Snapshot, assert_same, require_bench};
use crate::{INPUT, LOG, OUTPUT, destroy, seen};

const MARKS: [&str; 10] = [
    "opaque",
    "redirect",
    "metacopy",
    "whiteout",
    "whiteouts",
    "origin",
    "impure",
    "nlink",
    "upper",
    "protattr",
];

fn base(at: &Path) {
    for dir in ["opaque", "marked", "other"] {
        fs::create_dir(at.join(dir)).expect("mkdir");
        for file in ["below", "gone", "kept"] {
            fs::write(at.join(dir).join(file), "of below").expect("write");
        }
    }
}

/// Puts marks of one kind; returns how many could be put.
fn mark(at: &Path, kind: &str) -> usize {
    let mut made = 0;
    let mut note = |result: rustix::io::Result<()>| made += usize::from(result.is_ok());
    if kind == "devices" {
        for place in ["opaque/below", "marked/gone", "new"] {
            let place = at.join(place);
            let _ = fs::remove_file(&place);
            let device = FileType::CharacterDevice;
            note(rustix::fs::mknodat(CWD, &place, device, Mode::RUSR, 0));
        }
        // An operation that leaves one behind.
        let flags = RenameFlags::WHITEOUT;
        note(rustix::fs::renameat_with(
            CWD,
            at.join("other/gone"),
            CWD,
            at.join("moved"),
            flags,
        ));
    } else {
        for name in MARKS {
            for value in [&b"y"[..], b"/other", b""] {
                for place in ["opaque", "marked", "marked/kept", "."] {
                    let key = format!("{kind}.overlay.{name}");
                    note(rustix::fs::lsetxattr(
                        at.join(place),
                        &*key,
                        value,
                        XattrFlags::empty(),
                    ));
                }
            }
        }
    }
    made
}

#[tokio::test(flavor = "multi_thread")]
async fn marks_of_overlay_come_back_as_they_were_or_are_refused_aloud() {
    let log = &*LOG;
    let mut made = BTreeSet::new();
    for ground in Ground::ALL {
        for kind in ["devices", "trusted", "user"] {
            let what = format!("{kind}, {}", ground.name());
            let bench = require_bench!(on ground);
            let task = [("type", "task-cache"), ("key", "k")];
            bench.step("base", &task, base).await;
            let volume = format!("marks-{kind}-{}", ground.0);
            let (count, left) = bench
                .step(&volume, &task, |at| (mark(at, kind), Snapshot::of(at)))
                .await;
            if count > 0 {
                made.insert((ground.0.to_string(), kind));
            }
            assert!(
                left.get("opaque/kept").is_some(),
                "{what}: it acted at once"
            );
            let (at, published) = bench.publish("look", "look", &task).await;
            let look = Snapshot::of(&at);
            bench.unpublish("look").await;
            bench.outcome("look", Outcome::Failed).await;
            let refused = log.says(&[&volume, "cannot be sealed"]);
            if look.get("new").is_some()
                || look.get("opaque/below") == left.get("opaque/below") && !refused
            {
                assert_same(&left, &look);
            } else {
                assert!(refused, "{what}: it is not sealed, and no reason is given");
            }
            if refused {
                assert_eq!(ground.0, BackendKind::Copy, "{what}");
                assert!(count > 0);
                assert!(
                    look.get("opaque/below")
                        .is_some_and(|entry| entry.kind == 'f')
                );
            } else if ground.0 == BackendKind::Overlay {
                // Stacked, merged, and a fork of that.
                assert_eq!(published.layers, 2, "{what}");
                for round in 0..16 {
                    bench
                        .step(&format!("more{round}"), &task, |at| {
                            let place = at.join(format!("more{round}"));
                            fs::write(place, "").expect("write");
                        })
                        .await;
                    bench.engine.reap().await.expect("reap");
                }
                let layers = bench.artifact("task-cache/k").expect("there").layers;
                assert!(layers < 18, "{what}: nothing was merged");
                let mut look = seen_and_failed(&bench, &task).await;
                look.entries
                    .retain(|name, _| !name.starts_with(b"more") && !name.is_empty());
                assert_same(&left.without_root(), &look);
            }
            bench.finish().await;
        }
    }
    // This test would say nothing where nothing can be put.
    for (backend, kind) in [
        ("btrfs", "devices"),
        ("btrfs", "trusted"),
        ("copy", "devices"),
        ("copy", "trusted"),
    ] {
        assert!(made.contains(&(backend.to_owned(), kind)), "{made:?}");
    }
    assert!(
        !made.contains(&("overlay".to_owned(), "devices")),
        "{made:?}"
    );
}

async fn seen_and_failed(bench: &Bench, attributes: &[(&str, &str)]) -> Snapshot {
    let look = seen(bench, "look", attributes).await;
    bench.outcome("look", Outcome::Failed).await;
    bench.quiet().await;
    look
}

#[tokio::test(flavor = "multi_thread")]
async fn names_of_any_bytes_and_full_length_come_back() {
    for ground in Ground::ALL {
        let bench = require_bench!(on ground);
        let left = bench
            .step("v", OUTPUT, |at| {
                // Every byte that may be in a name, at the begin and in the middle of names as long
                // as may be.
                let bytes = (1..=255_u8).filter(|byte| *byte != b'/');
                for byte in bytes {
                    let mut name = [byte; 255];
                    name[..4].copy_from_slice(&[byte, 0xff, b'\n', byte]);
                    fs::write(at.join(OsStr::from_bytes(&name)), [byte]).expect("write");
                }
                for name in [
                    ".wh..wh..opq",
                    ".wh.f",
                    "work",
                    "index",
                    "#1",
                    "...",
                    " ",
                    "-rf",
                ] {
                    fs::write(at.join(name), name).expect("write");
                }
                let mut place = at.to_owned();
                for _ in 0..12 {
                    place.push(OsStr::from_bytes(&[0xfe; 255]));
                    fs::create_dir(&place).expect("mkdir");
                }
                fs::write(place.join("end"), "").expect("write");
                Snapshot::of(at)
            })
            .await;
        assert_eq!(left.len(), 254 + 8 + 13);
        assert_same(&left, &seen(&bench, "in", INPUT).await);
        destroy(&bench, "artifact/o").await;
        bench.finish().await;
    }
}

/// `chattr`; false where the filesystem has no such flag.
fn flag(path: &Path, flags: IFlags) -> bool {
    let file = fs::File::open(path).expect("open");
    let have = rustix::fs::ioctl_getflags(&file).unwrap_or(IFlags::empty());
    rustix::fs::ioctl_setflags(&file, have | flags).is_ok()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_may_not_be_changed_is_sealed_forked_and_deleted() {
    for ground in Ground::ALL {
        let bench = require_bench!(on ground);
        let make = |at: &Path| {
            fs::create_dir_all(at.join("i/below")).expect("mkdir");
            fs::create_dir_all(at.join("a/below")).expect("mkdir");
            for name in [
                "i/f",
                "i/below/f",
                "a/f",
                "a/below/f",
                layout::COMMIT_MARKER,
            ] {
                fs::write(at.join(name), "x").expect("write");
            }
            for name in ["i/f", "i/below", "i", "a/f", layout::COMMIT_MARKER] {
                assert!(flag(&at.join(name), IFlags::IMMUTABLE), "{name}");
            }
            for name in ["a/below/f", "a/below", "a"] {
                assert!(flag(&at.join(name), IFlags::APPEND), "{name}");
            }
            let mut left = Snapshot::of(at);
            assert!(flag(at, IFlags::IMMUTABLE), "the root");
            left.entries.remove(layout::COMMIT_MARKER.as_bytes());
            left
        };
        let (at, _) = bench.publish("pod", "scratch", &[]).await;
        make(&at);
        bench.unpublish("scratch").await;
        let marked = [("type", "output"), ("name", "o"), ("commit", "on-marker")];
        let (at, _) = bench.publish("pod", "v", &marked).await;
        let left = make(&at);
        bench.unpublish("v").await;
        soon("its end", bench.quiet()).await;
        assert!(bench.artifact("artifact/o").is_some(), "{}", ground.name());
        assert_same(&left, &seen(&bench, "in", INPUT).await);
        // Its root is given as it is asked for, all the same.
        let other = [INPUT, &[("mode", "0700")]].concat();
        let look = seen(&bench, "in2", &other).await;
        assert_eq!(look.get("").expect("the root").mode, 0o700);
        assert_same(&left.without_root(), &look.without_root());
        destroy(&bench, "artifact/o").await;
        bench.finish().await;
    }
}

/// xfs takes any number of attributes; listxattr(2) fails with more than 64 KiB of names. A seal
/// that copies gives up, instead of copying again and again.
#[tokio::test(flavor = "multi_thread")]
async fn more_names_of_attributes_than_the_kernel_lists_are_refused_by_a_copy() {
    let (notices, mut heard) = Notices::channel(16);
    let bench = require_bench!(
        on Ground(BackendKind::Copy, Fs::XfsReflink), |config| config.notices = Some(notices)
    );
    for (volume, place) in [("file", "below/f"), ("dir", "below"), ("root", "")] {
        let (at, _) = bench.publish("pod", volume, OUTPUT).await;
        fs::create_dir(at.join("below")).expect("mkdir");
        fs::write(at.join("below/f"), "x").expect("write");
        for number in 0..400 {
            let key = format!("user.{}{number}", "n".repeat(240));
            let flags = XattrFlags::empty();
            rustix::fs::lsetxattr(at.join(place), &*key, b"v", flags).expect("setxattr");
        }
        bench.unpublish(volume).await;
        soon("its end", bench.quiet()).await;
        assert!(bench.artifact("artifact/o").is_none(), "{volume}");
        let why = loop {
            let notice = soon("a notice", heard.recv()).await.expect("one");
            if let What::NotCommitted { why, .. } = notice.what {
                break why.to_string();
            }
        };
        let place = if place.is_empty() { "." } else { place };
        let named = why.contains(place) && why.contains("names of attributes");
        assert!(named, "{volume}: {why}");
    }
    bench.finish().await;
}

/// A process that still has the root runs `chattr +i` during the snapshot: a file with the flag can
/// be neither renamed nor deleted. A snapshot of a mounted claim contains the flag whenever it was
/// set.
#[tokio::test(flavor = "multi_thread")]
async fn a_root_that_may_not_be_changed_when_it_is_snapshotted_stops_nothing() {
    let bench = require_bench!(on Ground(BackendKind::Btrfs, Fs::Btrfs));
    let request = empty_claim("c");
    let claim = bench.engine.create_claim(request).await.expect("made");
    let target = bench.target("claim");
    let mount = mount_request(&claim, &target);
    bench.engine.mount_claim(mount).await.expect("mounted");
    fs::write(target.join("f"), "x").expect("write");
    assert!(flag(&target, IFlags::IMMUTABLE), "the root");
    let taken = bench.engine.create_snapshot("s", claim.id.as_str()).await;
    let taken = taken.expect("taken");
    let id = claim.id.as_str();
    let unmounted = bench.engine.unmount_claim(id, &target, false).await;
    unmounted.expect("unmounted");
    let dropped = bench.engine.delete_snapshot(taken.id.as_str()).await;
    dropped.expect("deleted");
    bench.engine.delete_claim(id).await.expect("deleted");
    bench.finish().await;
}
