//! Very deep and very wide trees: published, sealed, forked and deleted like any other. With
//! `BAGGAGECLAIM_TEST_MILLION` set, the wide one has a million names. Not by default: overlay
//! alone, one of three backends, takes most of a minute of system time to make them.

use std::fs;
use std::path::Path;
use std::time::Instant;

use rustix::fs::{FileType, Mode, OFlags};

use baggageclaim::backend::BackendKind;

use crate::common::bench::{Bench, Ground, NEVER};
use crate::common::{Fs, Lab, require_bench, skip, tree};
use crate::{INPUT, OUTPUT, destroy};

/// How many levels of `d` there are, and whether the last holds the file.
fn depth(root: &Path) -> (usize, bool) {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY;
    let mut dir = rustix::fs::open(root, flags, Mode::empty()).expect("open");
    for level in 0.. {
        let Ok(next) = rustix::fs::openat(&dir, "d", flags, Mode::empty()) else {
            let bottom = rustix::fs::openat(&dir, "bottom", OFlags::RDONLY, Mode::empty());
            return (level, bottom.is_ok());
        };
        dir = next;
    }
    unreachable!("no tree is endless")
}

#[tokio::test(flavor = "multi_thread")]
async fn three_thousand_levels_live_as_any_tree() {
    for ground in Ground::ALL {
        let bench = require_bench!(on ground);
        bench.step("v", OUTPUT, |at| tree::deep(at, 3000)).await;
        let (at, _) = bench.publish("user", "in", INPUT).await;
        assert_eq!(depth(&at), (3000, true), "{}", ground.name());
        bench.unpublish("in").await;
        bench.quiet().await;
        let (at, _) = bench.publish("user", "scratch", &[]).await;
        tree::deep(&at, 3000);
        bench.unpublish("scratch").await;
        destroy(&bench, "artifact/o").await;
        bench.finish().await;
    }
}

fn count(path: &Path) -> usize {
    fs::read_dir(path).expect("list").count()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_directory_of_very_many_names_lives_as_any_tree() {
    let million = std::env::var_os("BAGGAGECLAIM_TEST_MILLION").is_some();
    let many = if million { 1_000_000 } else { 100_000 };
    for (Ground(backend, fs), names) in [
        (Ground(BackendKind::Overlay, Fs::Ext4), many),
        (Ground(BackendKind::Btrfs, Fs::Btrfs), many),
        (Ground(BackendKind::Copy, Fs::XfsReflink), many / 5),
    ] {
        // ext4 has an inode for each 16 KiB; an image is as large as what is written.
        let lab = match Lab::try_sized(fs, (names as u64 + 20_000) << 15) {
            Ok(lab) => lab,
            Err(reason) => return skip(&reason),
        };
        let bench = Bench::with(lab, |config| config.backend = Some(backend)).await;
        bench
            .step("v", OUTPUT, |at| {
                fs::create_dir(at.join("wide")).expect("mkdir");
                let flags = OFlags::RDONLY | OFlags::DIRECTORY;
                let wide = rustix::fs::open(at.join("wide"), flags, Mode::empty()).expect("open");
                for number in 0..names {
                    let name = format!("{number:07}");
                    rustix::fs::mknodat(&wide, &name, FileType::RegularFile, Mode::RUSR, 0)
                        .expect("create");
                }
            })
            .await;
        let (at, _) = bench.publish("user", "in", INPUT).await;
        assert_eq!(count(&at.join("wide")), names, "{backend}");
        fs::remove_file(at.join("wide/0000007")).expect("unlink");
        assert_eq!(count(&at.join("wide")), names - 1, "{backend}");
        bench.unpublish("in").await;
        bench.quiet().await;
        destroy(&bench, "artifact/o").await;
        // A million may take a busy machine longer than `finish` waits for anything.
        let deadline = Instant::now() + NEVER * 10;
        while bench.engine.reap().await.expect("reap").held > 0 {
            assert!(Instant::now() < deadline, "{names} names are never gone");
            tokio::task::yield_now().await;
        }
        bench.finish().await;
    }
}
