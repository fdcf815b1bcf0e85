//! The system calls of one publish and one unpublish of a fork: no flush, no exec, no read of the
//! mount table, no walk. strace observes the real process.
//!
//! A publish of a prewarmed volume has one `fsync`, of the overlay's root. It flushes nothing; it
//! asks for a write-back error since the mount.
//!
//! The bench measures times; this file only checks which calls must not occur.

#![expect(
    clippy::disallowed_types,
    reason = "the driver under test is a process, and strace is a program"
)]

mod common;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use baggageclaim::admin;
use baggageclaim::kubelet_double::{Kubelet, Pod, PublishOptions};
use baggageclaim::model::layout;
use baggageclaim::proto::admin::v1 as api;
use common::bench::{eventually, names};
use common::{Fs, Lab};
use rustix::process::{Pid, Signal, kill_process};

/// Ends with the test.
struct Process(Child);

impl Process {
    fn end(&mut self, signal: Signal) {
        let pid = i32::try_from(self.0.id()).ok().and_then(Pid::from_raw);
        if let (Some(pid), Ok(None)) = (pid, self.0.try_wait()) {
            let _ = kill_process(pid, signal);
        }
        let _ = self.0.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.end(Signal::TERM);
    }
}

fn start_driver(lab: &Lab) -> Process {
    let log = File::create(lab.run_dir().join("log")).expect("a log");
    let child = Command::new(env!("CARGO_BIN_EXE_baggageclaim"))
        .arg("standalone")
        .arg("--pool")
        .arg(lab.path().join("pool"))
        .arg("--socket")
        .arg(lab.run_dir().join("csi.sock"))
        .args(["--node-id", "test", "--end-with-parent"])
        .stdin(Stdio::null())
        .stdout(log.try_clone().expect("a log"))
        .stderr(log)
        .spawn()
        .expect("the driver starts");
    Process(child)
}

/// Attaches strace to every thread of a process; returns when it has.
fn trace(driver: &Process, output: &Path) -> Option<Process> {
    let mut child = Command::new("strace")
        .args(["-f", "-y", "-o"])
        .arg(output)
        .args(["-p", &driver.0.id().to_string()])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .ok()?;
    let mut said = BufReader::new(child.stderr.take().expect("it is piped")).lines();
    let strace = Process(child);
    let first = said.next()?.ok()?;
    assert!(first.contains("attached"), "strace: {first}");
    // With several threads that first line counts them, and comes after the last.
    let deadline = Instant::now() + Duration::from_secs(10);
    let traced = || {
        let tasks = fs::read_dir(format!("/proc/{}/task", driver.0.id())).expect("it runs");
        tasks.flatten().all(|task| {
            let status = fs::read_to_string(task.path().join("status")).unwrap_or_default();
            !status.contains("TracerPid:\t0\n")
        })
    };
    while !traced() {
        assert!(Instant::now() < deadline, "strace does not attach");
        std::thread::sleep(Duration::from_millis(5));
    }
    // Its later output is not read, but it must not get a broken pipe.
    std::thread::spawn(move || said.for_each(drop));
    Some(strace)
}

async fn outcome(client: &mut admin::Client, pod: &Pod) {
    let request = api::ReportOutcomeRequest {
        pod_uid: pod.uid().to_owned(),
        outcome: api::Outcome::Succeeded.into(),
        wait: true,
    };
    client.report_outcome(request).await.expect("outcome");
}

/// Calls that must never occur: waits for the disk, and other programs.
const NEVER: [&str; 10] = [
    "fsync",
    "fdatasync",
    "syncfs",
    "sync",
    "msync",
    "sync_file_range",
    "execve",
    "execveat",
    "fork",
    "vfork",
];

const FORK: [(&str, &str); 2] = [("type", "input"), ("from", "artifact/tree")];

/// A driver that can be traced, the caller that calls it, and its filesystem.
struct Traceable {
    driver: Process,
    kubelet: Kubelet,
    client: admin::Client,
    lab: Lab,
}

/// One with an artifact of 500 files in its pool; an error is why there is none.
async fn traceable() -> Result<Traceable, String> {
    let version = Command::new("strace")
        .arg("-V")
        .stdout(Stdio::null())
        .status();
    if !version.is_ok_and(|status| status.success()) {
        return Err("strace is not there".to_owned());
    }
    let lab = Lab::try_new(Fs::Ext4)?;
    let driver = start_driver(&lab);
    let socket = lab.run_dir().join("csi.sock");
    let kubelet = Kubelet::connect_when_ready(&socket, lab.kubelet_dir(), Duration::from_secs(30))
        .await
        .expect("the driver is ready");
    let mut client = admin::connect(&lab.path().join("pool"))
        .await
        .expect("admin");
    let maker = kubelet.pod("ci", "maker");
    let output = [("type", "output"), ("name", "tree")];
    let made = maker
        .publish("v", output, PublishOptions::default())
        .await
        .expect("published");
    for number in 0..500 {
        let dir = made.target.join(format!("d{}", number / 50));
        fs::create_dir_all(&dir).expect("a directory");
        fs::write(dir.join(format!("f{number}")), "x").expect("a file");
    }
    maker.unpublish("v").await.expect("unpublished");
    outcome(&mut client, &maker).await;
    // The table of contents is made once in a layer's life, and reads all of it.
    let layers = lab.path().join("pool").join(layout::LAYERS);
    eventually("the table of contents is made", || {
        let made = |layer: &String| layers.join(layer).join(layout::TABLE).exists();
        let sealed = names(&layers);
        !sealed.is_empty() && sealed.iter().all(made)
    })
    .await;
    Ok(Traceable {
        driver,
        kubelet,
        client,
        lab,
    })
}

#[tokio::test]
async fn a_publish_and_an_unpublish_flush_nothing_and_walk_nothing() {
    let made = traceable().await;
    let Traceable {
        mut driver,
        kubelet,
        mut client,
        lab,
    } = match made {
        Ok(made) => made,
        Err(reason) => return common::skip(&reason),
    };
    let options = PublishOptions::default();
    // The first one of all may still learn something once.
    let warm = kubelet.pod("ci", "warm");
    warm.publish("v", FORK, options).await.expect("published");
    warm.unpublish("v").await.expect("unpublished");
    client.reap(api::ReapRequest {}).await.expect("reap");

    let trace_path = lab.run_dir().join("trace");
    let mut strace = trace(&driver, &trace_path).expect("strace attaches");
    let pod = kubelet.pod("ci", "measured");
    pod.publish("v", FORK, options).await.expect("published");
    pod.unpublish("v").await.expect("unpublished");
    // Deferred work runs here, and must be as frugal.
    tokio::time::sleep(Duration::from_millis(300)).await;
    strace.end(Signal::INT);

    let scratch_path = lab.run_dir().join("trace-of-scratch");
    let mut strace = trace(&driver, &scratch_path).expect("strace attaches");
    let pod = kubelet.pod("ci", "scratch");
    let scratch = [("type", "scratch")];
    pod.publish("v", scratch, options).await.expect("published");
    pod.unpublish("v").await.expect("unpublished");
    client.reap(api::ReapRequest {}).await.expect("reap");
    strace.end(Signal::INT);
    driver.end(Signal::TERM);
    let scratch = fs::read_to_string(&scratch_path).expect("a trace");
    assert!(scratch.contains("umount2"), "{scratch}");
    // An overlay that is only tried leaves a line in the kernel's log, and that may be slow. What
    // is configured for a volume to come is not tried.
    assert!(!scratch.contains("FSCONFIG_CMD_CREATE"), "{scratch}");

    let trace = fs::read_to_string(&trace_path).expect("a trace");
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    let mut banned = Vec::new();
    for line in trace.lines() {
        let Some(call) = name_of(line) else { continue };
        *counts.entry(call).or_default() += 1;
        // The background adds none either. The volume is unchanged, so it is deleted by its known
        // names. Nothing became unreferenced, so no garbage collection runs.
        let walks = call == "getdents64";
        let mounts = line.contains("mountinfo") || line.contains("/proc/mounts");
        if NEVER.contains(&call) || walks || mounts {
            banned.push(line);
        }
    }
    println!("{trace}\n{counts:#?}");
    assert!(
        counts.contains_key("fsmount") || counts.contains_key("mount"),
        "a mount was seen:\n{trace}"
    );
    assert!(counts.contains_key("umount2"), "its end was seen:\n{trace}");
    assert!(banned.is_empty(), "{}\n\nof\n\n{trace}", banned.join("\n"));
    let left = lab.close();
    assert!(left.is_empty(), "{left:?}");
}

/// The call at the start of a line of strace: `123 openat(AT_FDCWD…`. The rest of an interrupted
/// call is in another line, which does not count.
fn name_of(line: &str) -> Option<&str> {
    let rest = line
        .trim_start_matches(|c: char| c.is_ascii_digit())
        .trim_start();
    let name = rest.split('(').next()?;
    let is_name = !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
    is_name.then_some(name)
}
