//! Files that a process holds open for writing, and mapped, after its pod has ended. They are
//! sealed only after it ends, with all of its writes.

#![allow(unsafe_code, reason = "a mapping is memory, shared with a file")]

use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::os::fd::AsRawFd;
use std::path::Path;

use baggageclaim::engine::VolumeState;
use nix::libc;

use crate::common::bench::{Ground, eventually};
use crate::common::{assert_same, require_bench};
use crate::{INPUT, OUTPUT, Process, seen};

/// The thing that a simulated pod holds.
#[derive(Default)]
pub(crate) struct Played {
    file: Option<File>,
    memory: Option<*mut u8>,
}

impl Played {
    pub(crate) fn act(&mut self, verb: &str, path: &Path) {
        match verb {
            "open" => {
                let file = OpenOptions::new().append(true).create(true).open(path);
                self.file = Some(file.expect("open"));
            }
            // It writes the name of the given path.
            "write" => {
                let mut file = self.file.as_ref().expect("opened before");
                let name = path.as_os_str().as_encoded_bytes();
                file.write_all(name).expect("write");
            }
            "map" => {
                let file = OpenOptions::new().read(true).write(true).open(path);
                let file = file.expect("open");
                // SAFETY: a new mapping of one page of a file that has one, used within it only.
                let memory = unsafe {
                    let protection = libc::PROT_READ | libc::PROT_WRITE;
                    let fd = file.as_raw_fd();
                    libc::mmap(
                        std::ptr::null_mut(),
                        4096,
                        protection,
                        libc::MAP_SHARED,
                        fd,
                        0,
                    )
                };
                assert_ne!(memory, libc::MAP_FAILED);
                self.memory = Some(memory.cast());
            }
            "store" => {
                let memory = self.memory.expect("mapped before");
                let name = path.as_os_str().as_encoded_bytes();
                assert!(name.len() < 4096);
                // SAFETY: within the page mapped above, which stays until this process ends.
                unsafe { std::ptr::copy_nonoverlapping(name.as_ptr(), memory, name.len()) };
            }
            "close" => self.file = None,
            _ => panic!("what is `{verb}`?"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_process_holds_is_sealed_when_it_is_gone_as_it_left_it() {
    for ground in Ground::ALL {
        let bench = require_bench!(on ground);
        let (at, _) = bench.publish("pod", "v", OUTPUT).await;
        fs::write(at.join("map"), vec![b'.'; 4096]).expect("write");
        let mut process = Process::start();
        process.tell("open", &at.join("log"));
        process.tell("write", Path::new("early,"));
        process.tell("map", &at.join("map"));
        process.tell("store", Path::new("early"));
        bench.unpublish("v").await;
        let in_use = || {
            bench
                .row("v")
                .is_some_and(|row| row.state == VolumeState::InUse)
        };
        eventually("it is found in use", in_use).await;
        process.tell("write", Path::new("late"));
        process.tell("close", Path::new("/"));
        // The mapping alone, too.
        bench.engine.reap().await.expect("reap");
        process.tell("store", Path::new("later"));
        assert!(in_use() && bench.artifact("artifact/o").is_none());
        // An engine that ends does not seal what it waits for, nor does the next one.
        let bench = bench.restart().await;
        let in_use = || {
            bench
                .row("v")
                .is_some_and(|row| row.state == VolumeState::InUse)
        };
        eventually("it is found in use again", in_use).await;
        assert!(bench.artifact("artifact/o").is_none());
        process.kill();
        bench.quiet().await;
        let content = seen(&bench, "in", INPUT).await;
        let (at, _) = bench.publish("user", "in2", INPUT).await;
        assert_eq!(fs::read(at.join("log")).expect("read"), b"early,late");
        let map = fs::read(at.join("map")).expect("read");
        assert_eq!((map.len(), &map[..6]), (4096, &b"later."[..]));
        bench.unpublish("in2").await;
        assert_same(&content, &seen(&bench, "in3", INPUT).await);
        bench.finish().await;
    }
}
