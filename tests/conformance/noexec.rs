//! A pool on a filesystem mounted `noexec`, like `/var` on nodes with Google's COS: a pod can still
//! run programs from its volume.

use std::fs;
use std::io::{ErrorKind, Result};
use std::os::fd::AsFd as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

use baggageclaim::backend::Start;
use baggageclaim::model::RootAttributes;
use baggageclaim::sys;

use super::common::bench::maps_owners;
use super::common::lab::output;
use super::{Bench, Lab, Open};

const PROGRAM: &str = "program";

fn put(root: &Path) {
    let path = root.join(PROGRAM);
    fs::write(&path, "#!/bin/sh\nexit 0\n").expect("write");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("chmod");
}

fn run(root: &Path) -> Result<()> {
    for _ in 0..1000 {
        match output(&mut Command::new(root.join(PROGRAM))) {
            // A process that another test is making holds the file as it was written, until it
            // execs.
            Err(error) if error.kind() == ErrorKind::ExecutableFileBusy => {
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
            Err(error) => return Err(error),
            Ok(output) => {
                assert!(output.status.success(), "{output:?}");
                return Ok(());
            }
        }
    }
    panic!("a process writes to it");
}

/// In volumes, in forks of what they became, read-only or with another owner, and in scratch
/// volumes.
pub(super) fn programs_run_in_volumes(lab: &Lab, open: Open) {
    lab.forbid_programs();
    let plain = lab.dir("plain");
    put(&plain);
    let refused = run(&plain).expect_err("the filesystem is mounted noexec");
    assert_eq!(refused.kind(), ErrorKind::PermissionDenied);

    let bench = Bench::new(lab, open);
    let layers = bench.artifact(|root| {
        put(root);
        run(root).expect("a volume");
    });
    let fork = bench.fork(&layers);
    bench.mounted(&fork, true, run).expect("a read-only fork");
    bench.within(&fork, run).expect("a fork");
    if maps_owners(bench.backend.kind(), lab.fs().name()) {
        let root = RootAttributes {
            uid: Some(1000),
            ..RootAttributes::default()
        };
        let other = bench.create(&layers, root, None);
        bench.within(&other, run).expect("a fork of another owner");
    }

    let scratch = bench.fork(&[]);
    let start = Start {
        sealable: false,
        ..scratch.start()
    };
    let mount = bench
        .backend
        .mount(&scratch.dir, scratch.id.as_str(), &start, false)
        .expect("mounted");
    bench.targets.create_dir("scratch", 0o755).expect("mkdir");
    sys::move_mount_onto(mount.as_fd(), &bench.targets, "scratch").expect("attached");
    let root = bench.targets_path.join("scratch");
    put(&root);
    run(&root).expect("a scratch volume");
    sys::detach(&bench.targets, "scratch").expect("detached");
    drop(mount);
    bench.empty();
}
