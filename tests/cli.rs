//! The binary as people and programs use it: a driver process, the verbs that call it, and how both
//! end. The tables' layout is in the snapshots of `src/cli`.

#![expect(
    clippy::disallowed_types,
    reason = "the binary is run as people run it"
)]

mod common;

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use baggageclaim::kubelet_double::{Kubelet, PublishOptions};
use baggageclaim::proto::admin::v1 as admin;
use baggageclaim::proto::admin::v1::cluster_server::{Cluster, ClusterServer};
use baggageclaim::proto::csi::v1 as csi;
use common::disk::Frozen;
use common::process::{hangs, states};
use common::{Fs, Lab, Snapshot, assert_same, require_lab};

const BINARY: &str = env!("CARGO_BIN_EXE_baggageclaim");
const PATIENCE: Duration = Duration::from_secs(20);

fn command(pool: &Path) -> Command {
    let mut command = Command::new(BINARY);
    command.env("BAGGAGECLAIM_POOL", pool);
    command
}

fn ask(pool: &Path, arguments: &[&str]) -> Output {
    let mut command = command(pool);
    command.args(arguments).output().expect("the binary runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("text")
}

/// The output of a successful verb.
fn answer(pool: &Path, arguments: &[&str]) -> String {
    let output = ask(pool, arguments);
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{arguments:?}: {out}{err}");
    out
}

fn json(pool: &Path, arguments: &[&str]) -> serde_json::Value {
    serde_json::from_str(&answer(pool, arguments)).expect("JSON")
}

/// The stderr and the exit code of a failed verb.
fn failure(pool: &Path, arguments: &[&str]) -> (i32, String) {
    let output = ask(pool, arguments);
    let code = output.status.code().expect("an exit code");
    (code, text(&output.stderr))
}

/// A driver in its own process; killed in `Drop` if it still runs.
struct Standalone {
    child: Child,
    pool: PathBuf,
    socket: PathBuf,
}

impl Standalone {
    fn start(lab: &Lab) -> Self {
        Self::start_with(lab, &["--grace", "5s"])
    }

    fn start_with(lab: &Lab, flags: &[&str]) -> Self {
        Self::start_at(lab, &lab.run_dir(), flags)
    }

    /// One whose socket is below `place`.
    fn start_at(lab: &Lab, place: &Path, flags: &[&str]) -> Self {
        let pool = lab.path().join("pool");
        let socket = place.join("driver/csi.sock");
        let child = command(&pool)
            .arg("standalone")
            .arg("--socket")
            .arg(&socket)
            .args(["--log-format", "json", "--node-id", "here"])
            .args(flags)
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary runs");
        Self {
            child,
            pool,
            socket,
        }
    }

    async fn kubelet(&self, lab: &Lab) -> Kubelet {
        Kubelet::connect_when_ready(&self.socket, lab.kubelet_dir(), PATIENCE)
            .await
            .expect("the driver becomes ready")
    }

    /// Waits until it has ended; its exit code and its log.
    fn ended(mut self) -> (i32, String) {
        let began = Instant::now();
        let status = loop {
            match self.child.try_wait().expect("wait") {
                Some(status) => break status,
                None if began.elapsed() > PATIENCE => panic!("it does not end"),
                None => std::thread::sleep(Duration::from_millis(10)),
            }
        };
        let mut log = String::new();
        let stderr = self.child.stderr.as_mut().expect("it is piped");
        std::io::Read::read_to_string(stderr, &mut log).expect("read");
        (status.code().expect("an exit code"), log)
    }

    fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).expect("kill");
    }
}

async fn until(what: &str, mut so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !so() {
        assert!(began.elapsed() < PATIENCE, "never: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

impl Drop for Standalone {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn without_a_driver_one_line_says_what_to_do() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let missing = dir.path().join("nowhere");
    for verb in ["volumes", "artifacts", "caches", "reap", "status", "check"] {
        let (code, said) = failure(&missing, &[verb]);
        assert_eq!((code, said.lines().count()), (3, 1), "{verb}: {said}");
        assert!(said.contains("there is no pool at"), "{verb}: {said}");
    }
    for verb in ["volumes", "reap", "status"] {
        let (code, said) = failure(dir.path(), &[verb]);
        assert_eq!((code, said.lines().count()), (3, 1), "{verb}: {said}");
        assert!(said.contains("admin.sock"), "{verb}: {said}");
        assert!(
            said.contains("baggageclaim standalone --pool"),
            "{verb}: {said}"
        );
    }
}

/// Its output, if it ends in time.
fn output(mut child: Child) -> Output {
    let began = Instant::now();
    while child.try_wait().expect("wait").is_none() {
        if began.elapsed() > PATIENCE {
            child.kill().expect("it runs");
            panic!("it does not end: {:?}", child.wait_with_output());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    child.wait_with_output().expect("it has ended")
}

#[test]
fn a_driver_that_hangs_or_ends_at_once_is_none() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let socket = dir.path().join("admin.sock");
    // The kernel accepts connections for a process that never does.
    let listener = UnixListener::bind(&socket).expect("bind");
    let start = |arguments: &[&str]| {
        let mut command = command(dir.path());
        let command = command.args(arguments).env("BAGGAGECLAIM_SOCKET", &socket);
        let command = command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().expect("the binary runs")
    };
    let verbs: [&[&str]; 6] = [
        &["status"],
        &["check"],
        &["volumes", "--watch"],
        &["export", "artifact/x", "-n", "ci", "-o", "x.tar"],
        &["caches", "--cluster"],
        &["explain", "artifact/x", "-n", "ci"],
    ];
    let is_told = |arguments: &[&str], ended: &Output| {
        let said = text(&ended.stderr);
        assert_eq!(ended.status.code(), Some(3), "{arguments:?}: {said}");
        assert_eq!(said.lines().count(), 1, "{arguments:?}: {said}");
        assert!(said.contains("see its log"), "{arguments:?}: {said}");
    };
    let hanging = verbs.map(start);
    for (arguments, child) in verbs.into_iter().zip(hanging) {
        is_told(arguments, &output(child));
    }
    // This thread ends with the test.
    std::thread::spawn(move || listener.incoming().for_each(drop));
    for arguments in verbs {
        is_told(arguments, &output(start(arguments)));
    }
}

#[tokio::test]
async fn a_watch_ends_with_its_reader_and_with_its_driver() {
    let lab = require_lab!(Fs::Ext4);
    let driver = Standalone::start(&lab);
    let _ = driver.kubelet(&lab).await;
    let watch = || {
        let mut command = command(&driver.pool);
        let command = command.args(["volumes", "-w"]);
        let command = command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("the binary runs");
        let mut header = String::new();
        let mut stdout = BufReader::new(child.stdout.take().expect("piped"));
        stdout.read_line(&mut header).expect("it is read");
        assert!(header.starts_with("EVENT"), "{header}");
        (child, stdout)
    };
    // Nothing changes, so it writes nothing after the header.
    let (child, stdout) = watch();
    drop(stdout);
    let ended = output(child);
    assert_eq!(ended.status.code(), Some(0), "{}", text(&ended.stderr));
    assert_eq!(text(&ended.stderr), "");

    let (child, stdout) = watch();
    driver.signal(rustix::process::Signal::KILL);
    let ended = output(child);
    drop(stdout);
    assert_eq!(ended.status.code(), Some(3), "{}", text(&ended.stderr));
    assert!(text(&ended.stderr).contains("see its log"));
}

/// Starts a driver by another program; its exit code and what it says before it ends.
fn refused(lab: &Lab, by: &[&str], flags: &[&str]) -> (i32, String) {
    let (program, arguments) = by.split_first().expect("a program");
    let output = Command::new(program)
        .args(arguments)
        .arg(BINARY)
        .arg("standalone")
        .arg("--pool")
        .arg(lab.path().join("pool"))
        .arg("--socket")
        .arg(lab.run_dir().join("csi.sock"))
        .args(["--node-id", "here", "--end-with-parent"])
        .args(flags)
        .stdin(Stdio::null())
        .output()
        .unwrap_or_else(|error| panic!("{program}: {error}"));
    let code = output.status.code().expect("an exit code");
    (code, text(&output.stderr))
}

/// In its own user namespace a process may not clear flags that the owner of the mount has set.
#[test]
fn a_noexec_pool_whose_flag_may_not_be_cleared_is_refused() {
    for (fs, backend) in [
        (Fs::Ext4, "copy"),
        (Fs::Btrfs, "btrfs"),
        (Fs::Ext4, "overlay"),
    ] {
        let lab = require_lab!(fs);
        lab.forbid_programs();
        lab.kubelet_dir();
        let by = [
            "timeout",
            "120",
            "unshare",
            "--user",
            "--map-root-user",
            "--mount",
        ];
        let (code, said) = refused(&lab, &by, &["--backend", backend]);
        assert_eq!(code, 1, "{backend}: {said}");
        let why =
            "it lies on a filesystem that is mounted noexec, and this process may not change that";
        assert!(said.contains(why), "{backend}: {said}");
        assert!(lab.close().is_empty());
    }
}

/// As NFS does: renameat2(2) has no flags there.
#[test]
fn a_filesystem_that_cannot_rename_without_replacing_is_refused() {
    let lab = require_lab!(Fs::Ext4);
    if Command::new("strace").arg("-V").output().is_err() {
        return common::skip("strace is not there");
    }
    let rename = "inject=renameat2:error=EINVAL";
    let by = [
        "timeout",
        "120",
        "strace",
        "-f",
        "-qq",
        "-o",
        "/dev/null",
        "-e",
        rename,
    ];
    let (code, said) = refused(&lab, &by, &["--backend", "copy"]);
    assert_eq!(code, 1, "{said}");
    let why = "the filesystem cannot rename without replacing (RENAME_NOREPLACE), as NFS cannot";
    assert!(said.contains(why), "{said}");
    assert!(lab.close().is_empty());
}

#[test]
fn a_wrong_command_line_is_told_from_a_failure() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    for arguments in [
        &["volumes", "--colour"][..],
        &[
            "standalone",
            "--high-watermark",
            "50",
            "--low-watermark",
            "60",
        ],
        &["standalone", "--log", "no=such=filter"],
        &["destroy", "artifact/x"],
    ] {
        let (code, said) = failure(dir.path(), arguments);
        assert_eq!(code, 2, "{arguments:?}: {said}");
        assert!(!said.is_empty());
    }
    assert_eq!(
        common::driver::entries(dir.path()),
        [""; 0],
        "something was made"
    );
    assert!(answer(dir.path(), &["--help"]).contains("Examples:"));
    assert!(answer(dir.path(), &["--version"]).starts_with("baggageclaim "));
}

#[test]
fn every_flag_without_a_value_can_be_said_in_the_environment() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let pool = dir.path().join("pool");
    for verb in ["standalone", "node"] {
        let help = answer(&pool, &[verb, "--help"]);
        // Its line has no <VALUE>; the next that has brackets names it in the environment.
        let mut flags = vec!["BAGGAGECLAIM_END_WITH_PARENT"];
        let mut has_value = true;
        for line in help.lines().map(str::trim) {
            if line.starts_with("--") {
                has_value = line.contains('<');
            } else if let Some(env) = line.strip_prefix("[env: ")
                && !has_value
            {
                flags.push(env.trim_end_matches(']'));
            }
        }
        assert!(flags.contains(&"BAGGAGECLAIM_ALPHA"), "{verb}: {flags:?}");
        for flag in flags {
            // All flags are read before these two are found not to go together; nothing is made.
            let said = |word: &str| {
                let output = command(&pool)
                    .args([verb, "--high-watermark=50", "--low-watermark=60"])
                    .env(flag, word)
                    .output()
                    .expect("the binary runs");
                assert_eq!(output.status.code(), Some(2));
                text(&output.stderr)
            };
            for word in ["1", "on", "yes", "true", "0", "off", "no", "false"] {
                let said = said(word);
                assert!(said.contains("must be below"), "{flag}={word}: {said}");
            }
            let said = said("perhaps");
            assert!(said.contains("invalid value 'perhaps'"), "{flag}: {said}");
        }
    }
    assert!(!pool.exists());
}

#[tokio::test]
async fn an_output_is_made_listed_and_forgotten() {
    let lab = require_lab!(Fs::Ext4);
    let driver = Standalone::start(&lab);
    let kubelet = driver.kubelet(&lab).await;
    let pool = driver.pool.clone();
    assert_eq!(
        json(&pool, &["volumes", "-o", "json"]),
        serde_json::json!([])
    );
    assert_eq!(answer(&pool, &["volumes"]), "");

    let pod = kubelet.pod("ci", "build-42");
    let output = [("type", "output"), ("name", "binaries")];
    let published = pod
        .publish("out", output, PublishOptions::default())
        .await
        .expect("publish");
    std::fs::write(published.target.join("file"), "made").expect("write");
    let volumes = json(&pool, &["volumes", "-n", "ci", "-o", "json"]);
    let volume = &volumes[0];
    assert_eq!(volume["id"], published.volume_id.as_str());
    assert_eq!(volume["reference"], "artifact/binaries");
    assert_eq!(volume["state"], "published");
    assert_eq!(volume["pod"]["uid"], pod.uid());
    assert!(answer(&pool, &["volumes"]).contains("build-42"));
    assert_eq!(answer(&pool, &["volumes", "-n", "other"]), "");

    let (code, said) = failure(&pool, &["check", "--rebuild"]);
    assert_eq!(code, 1, "{said}");
    assert!(said.contains("a driver runs on this pool"), "{said}");

    // Only a list of volumes requests their sizes here.
    let size = || json(&pool, &["volumes", "-o", "json"])[0]["usage"]["bytes"].as_u64();
    until("its size is known", || size().is_some()).await;
    pod.unpublish("out").await.expect("unpublish");
    assert!(size().is_some(), "a volume that leaves keeps its size");
    let said = answer(&pool, &["outcome", pod.uid(), "succeeded", "--wait"]);
    assert_eq!(said, "Reported for 1 volume.\n");
    let artifacts = json(&pool, &["artifacts", "-o", "json"]);
    assert_eq!(artifacts[0]["reference"], "artifact/binaries");
    assert_eq!(artifacts[0]["durable"], true);
    let maker = &artifacts[0]["madeBy"];
    assert_eq!(maker["pod"]["name"], "build-42");
    assert_eq!(maker["pod"]["uid"], pod.uid());
    assert_eq!(maker["serviceAccount"], "default");
    // Only the API server knows them, and this driver has none.
    assert_eq!(maker["images"], serde_json::json!([]));
    let wide = answer(&pool, &["artifacts", "-o", "wide"]);
    assert!(
        wide.contains("SERVICE-ACCOUNT") && wide.contains(pod.uid()),
        "{wide}"
    );
    assert_eq!(
        json(&pool, &["caches", "-o", "json"]),
        serde_json::json!([])
    );
    let status = json(&pool, &["status", "-o", "json"]);
    assert_eq!(status["artifacts"], 1);
    assert_eq!(json(&pool, &["check", "-o", "json"]), serde_json::json!([]));

    let (code, said) = failure(&pool, &["destroy", "artifact/other", "-n", "ci"]);
    assert_eq!(code, 1, "{said}");
    assert!(said.contains("there is no artifact/other"), "{said}");
    answer(&pool, &["destroy", "artifact/binaries", "-n", "ci"]);
    assert_eq!(
        json(&pool, &["artifacts", "-o", "json"]),
        serde_json::json!([])
    );
    answer(&pool, &["reap"]);

    let socket = driver.socket.clone();
    driver.signal(rustix::process::Signal::TERM);
    let (code, log) = driver.ended();
    assert_eq!(code, 0, "{log}");
    assert!(!socket.exists() && !pool.join("admin.sock").exists());
    for line in log.lines() {
        serde_json::from_str::<serde_json::Value>(line).expect("each line is JSON");
    }
    // Without a driver it looks itself.
    assert_eq!(json(&pool, &["check", "-o", "json"]), serde_json::json!([]));
    assert_eq!(lab.close(), [""; 0].map(PathBuf::from));
}

#[tokio::test]
#[expect(clippy::too_many_lines, reason = "one scenario, told in order")]
async fn lists_and_single_things_come_in_the_usual_forms() {
    let lab = require_lab!(Fs::Ext4);
    let driver = Standalone::start(&lab);
    let kubelet = driver.kubelet(&lab).await;
    let pool = driver.pool.clone();
    let output = [
        ("type", "output"),
        ("name", "binaries"),
        ("commit", "always"),
    ];
    let maker = kubelet.pod("ci", "maker");
    let published = maker.publish("out", output, PublishOptions::default());
    published.await.expect("publish");
    maker.unpublish("out").await.expect("unpublish");
    let artifacts = || json(&pool, &["artifacts", "-o", "json"]);
    // Both come in the background, and change the answer.
    until("it is durable and has a table", || {
        let row = &artifacts()[0];
        row["durable"] == true && row["tableDigests"][0].is_string()
    })
    .await;
    let id = artifacts()[0]["id"].as_str().expect("an id").to_owned();

    // Names, the same as YAML, and ids: short, or in full.
    let named = answer(&pool, &["artifacts", "--namespace", "ci", "-o", "name"]);
    assert_eq!(named, "artifact/binaries\n");
    assert_eq!(answer(&pool, &["artifacts", "--tenant", "other"]), "");
    let yaml = answer(&pool, &["artifacts", "-o", "yaml"]);
    let yaml: serde_json::Value = serde_saphyr::from_str(&yaml).expect("YAML");
    assert_eq!(yaml, artifacts());
    let table = answer(&pool, &["artifacts"]);
    assert!(
        table.contains(&id[..12]) && !table.contains(&id[..13]),
        "{table}"
    );
    assert!(answer(&pool, &["artifacts", "-o", "wide"]).contains(&id));

    // One thing, by its name or the beginning of its id.
    for name in ["artifact/binaries", &id, &id[..12]] {
        let one = json(&pool, &["inspect", name, "-n", "ci", "-o", "json"]);
        assert_eq!(
            (&one["kind"], &one["id"]),
            (&"artifact".into(), &id.as_str().into())
        );
        assert_eq!(one["madeBy"]["pod"]["name"], "maker");
    }
    for nothing in ["artifact/binary", "volume"] {
        let (code, said) = failure(&pool, &["inspect", nothing]);
        assert_eq!(code, 1, "{said}");
        assert!(
            said.contains("no volume or artifact here has the name or id"),
            "{said}"
        );
    }
    let reader = kubelet.pod("ci", "reader");
    for volume in ["one", "two"] {
        let input = [("type", "input"), ("from", "artifact/binaries")];
        let published = reader.publish(volume, input, PublishOptions::default());
        published.await.expect("publish");
    }
    let (code, said) = failure(&pool, &["inspect", "csi-"]);
    assert_eq!(code, 1, "{said}");
    assert!(
        said.contains("2 volumes and artifacts here match csi-"),
        "{said}"
    );

    // The dry run of destroy, and destroy.
    let destroy = ["destroy", "artifact/binaries", "-n", "ci"];
    let try_it = [&destroy[..], &["--dry-run"]].concat();
    let (code, said) = failure(&pool, &try_it);
    assert_eq!(code, 1, "{said}");
    assert!(said.contains("volumes are forks of it (2)"), "{said}");
    assert_eq!(
        failure(&pool, &destroy).0,
        1,
        "it is refused in earnest, too"
    );
    for volume in ["one", "two"] {
        reader.unpublish(volume).await.expect("unpublish");
    }
    until("no volume uses it", || artifacts()[0]["inUseBy"] == 0).await;
    let said = answer(&pool, &try_it);
    assert!(
        said.contains("would be deleted") && said.contains(&id),
        "{said}"
    );
    let mut watch = command(&pool);
    watch.args(["artifacts", "-w", "-o", "json"]);
    let mut watch = watch.stdout(Stdio::piped()).spawn().expect("it starts");
    let mut lines = BufReader::new(watch.stdout.take().expect("piped")).lines();
    let mut next = || -> serde_json::Value {
        let line = lines.next().expect("a line").expect("it is read");
        serde_json::from_str(&line).expect("JSON")
    };
    let added = next();
    assert_eq!(
        (&added["event"], &added["object"]["id"]),
        (&"added".into(), &id.as_str().into())
    );
    answer(&pool, &destroy);
    // It may be measured meanwhile.
    let mut event = next();
    while event["event"] == "changed" {
        event = next();
    }
    assert_eq!(event["event"], "gone");
    watch.kill().expect("it runs");
    watch.wait().expect("it ends");
    drop(driver);
}

#[test]
fn a_shell_is_told_every_verb() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let script = answer(dir.path(), &["completion", "bash"]);
    for word in [
        "artifacts",
        "inspect",
        "completion",
        "--namespace",
        "--dry-run",
    ] {
        assert!(script.contains(word), "{word}");
    }
}

/// At the default level, for every method that there is.
#[tokio::test]
async fn each_call_is_one_line_of_the_log_but_what_programs_ask_again_and_again() {
    // These change nothing. Programs call them at intervals or before each mount.
    const POLLED: [&str; 10] = [
        "ControllerGetVolume",
        "ControllerGetVolumeHealth",
        "ControllerListVolumeHealth",
        "GetCapacity",
        "ListVolumes",
        "NodeGetCapabilities",
        "NodeGetStorageHealth",
        "NodeGetVolumeHealth",
        "NodeGetVolumeStats",
        "Probe",
    ];
    let lab = require_lab!(Fs::Ext4);
    let driver = Standalone::start_with(&lab, &["--alpha"]);
    let pool = driver.pool.clone();
    until("it is ready", || ask(&pool, &["status"]).status.success()).await;
    let channel = common::driver::channel(&driver.socket).await;
    let known = prost_reflect::DescriptorPool::decode(baggageclaim::proto::DESCRIPTOR);
    let known = known.expect("it decodes");
    let mut expected = BTreeMap::new();
    for service in known.services().filter(|s| s.package_name() == "csi.v1") {
        for method in service.methods() {
            let (service, name) = (service.full_name(), method.name());
            let path = format!("/{service}/{name}").parse().expect("a path");
            let mut grpc = tonic::client::Grpc::new(channel.clone());
            grpc.ready().await.expect("the driver is there");
            let empty = tonic::Request::new(Vec::new());
            let answer = grpc.unary(empty, path, common::raw::Raw).await;
            let lines = usize::from(answer.is_err() || !POLLED.contains(&name));
            expected.insert(name.to_owned(), lines);
        }
    }
    assert!(expected.len() > 30, "{expected:?}");
    driver.signal(rustix::process::Signal::TERM);
    let (code, log) = driver.ended();
    assert_eq!(code, 0, "{log}");
    let mut found: BTreeMap<String, usize> =
        expected.keys().map(|name| (name.clone(), 0)).collect();
    let mut asked = 0;
    for line in log.lines() {
        let line: serde_json::Value = serde_json::from_str(line).expect("each line is JSON");
        if line["duration_us"].is_null() {
            continue;
        }
        if let Some(name) = line["span"]["csi.method"].as_str() {
            *found.get_mut(name).expect("a known method") += 1;
        }
        asked += usize::from(line["span"]["admin.method"] == "Status");
    }
    assert_eq!(found, expected);
    assert_eq!(asked, 1, "each caller of the status is in the log");
    assert_eq!(lab.close(), [""; 0].map(PathBuf::from));
}

#[tokio::test]
async fn an_outcome_of_an_unknown_pod_is_an_error() {
    let lab = require_lab!(Fs::Ext4);
    let driver = Standalone::start(&lab);
    let kubelet = driver.kubelet(&lab).await;
    let pool = driver.pool.clone();
    let pod = kubelet.pod("ci", "build-43");
    // A uid that is wrong, or the right one too early.
    let (code, said) = failure(&pool, &["outcome", pod.uid(), "failed"]);
    assert_eq!(code, 1, "{said}");
    assert!(said.contains("has no volumes here"), "{said}");

    let options = PublishOptions::default();
    let none: [(&str, &str); 0] = [];
    pod.publish("tmp", none, options).await.expect("publish");
    let said = answer(&pool, &["outcome", pod.uid(), "failed"]);
    assert_eq!(said, "Reported for 1 volume.\n");
    let said = answer(&pool, &["outcome", pod.uid(), "failed"]);
    assert_eq!(said, "Already reported.\n");
    let (code, said) = failure(&pool, &["outcome", pod.uid(), "succeeded"]);
    assert_eq!(code, 1, "{said}");
    assert!(said.contains("already reported as failed"), "{said}");

    pod.unpublish("tmp").await.expect("unpublish");
    driver.signal(rustix::process::Signal::TERM);
    let (code, log) = driver.ended();
    assert_eq!(code, 0, "{log}");
    assert_eq!(lab.close(), [""; 0].map(PathBuf::from));
}

#[tokio::test]
async fn what_is_mounted_outlives_the_driver_and_is_taken_up_again() {
    let lab = require_lab!(Fs::Ext4);
    let driver = Standalone::start(&lab);
    let kubelet = driver.kubelet(&lab).await;
    let pod = kubelet.pod("ci", "build");
    let attributes = [("type", "task-cache"), ("key", "k"), ("commit", "always")];
    let published = pod
        .publish("cache", attributes, PublishOptions::default())
        .await
        .expect("publish");
    std::fs::write(published.target.join("file"), "kept").expect("write");
    driver.signal(rustix::process::Signal::KILL);
    drop(driver);
    assert!(published.target.join("file").exists(), "the mount went");

    // The sockets still exist, and no process answers at them.
    let driver = Standalone::start(&lab);
    let _ = driver.kubelet(&lab).await;
    let volumes = json(&driver.pool, &["volumes", "-o", "json"]);
    assert_eq!(volumes[0]["state"], "published");
    // A second process is refused, and does no harm.
    let second = command(&driver.pool)
        .args(["standalone", "--socket"])
        .arg(lab.run_dir().join("second.sock"))
        .output()
        .expect("the binary runs");
    assert_eq!(second.status.code(), Some(1));
    let said = text(&second.stderr);
    assert!(said.contains("in use by another process"), "{said}");
    let second = command(&driver.pool.with_file_name("other"))
        .args(["standalone", "--socket"])
        .arg(&driver.socket)
        .output()
        .expect("the binary runs");
    let said = text(&second.stderr);
    assert!(said.contains("another process already serves"), "{said}");
    assert_eq!(second.status.code(), Some(1));

    pod.unpublish("cache").await.expect("unpublish");
    let sealed = || json(&driver.pool, &["caches", "-o", "json"])[0]["durable"] == true;
    until("the cache is sealed", sealed).await;
    let caches = json(&driver.pool, &["caches", "-o", "json"]);
    assert_eq!(
        (&caches[0]["kind"], &caches[0]["key"]),
        (&"task".into(), &"k".into())
    );
    driver.signal(rustix::process::Signal::INT);
    let pool = driver.pool.clone();
    let (code, log) = driver.ended();
    assert_eq!(code, 0, "{log}");
    // The index can be rebuilt, too, but not by mistake.
    let before = Snapshot::of(&pool);
    let (code, said) = failure(&pool, &["check", "--rebuild"]);
    let index = pool.join("index.redb");
    let can_be_read = format!("{} can be read", index.display());
    assert!(code == 1 && said.contains(&can_be_read), "{said}");
    let said = answer(&pool, &["check", "--rebuild", "--dry-run"]);
    assert!(said.contains("would name 1 artifact and"), "{said}");
    assert_same(&before, &Snapshot::of(&pool));
    for old in ["index.redb.old", "index.redb.old.1"] {
        let said = answer(&pool, &["check", "--rebuild", "--force"]);
        assert!(said.contains("names 1 artifact"), "{said}");
        let kept = format!("kept: {}\n", pool.join(old).display());
        assert!(said.ends_with(&kept) && pool.join(old).exists(), "{said}");
    }
    std::fs::write(&index, "torn").expect("written");
    let said = answer(&pool, &["check", "--rebuild"]);
    assert!(said.contains("names 1 artifact"), "{said}");
    assert_eq!(json(&pool, &["check", "-o", "json"]), serde_json::json!([]));
    assert_eq!(lab.close(), [""; 0].map(PathBuf::from));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_does_not_answer_keeps_the_driver_from_ending_no_longer_than_its_grace() {
    let lab = require_lab!(Fs::Ext4);
    let driver = Standalone::start_with(&lab, &["--grace", "1s"]);
    let kubelet = driver.kubelet(&lab).await;
    let pod = kubelet.pod("ci", "build");
    let attributes = [("type", "task-cache"), ("key", "k"), ("commit", "always")];
    let published = pod.publish("cache", attributes, PublishOptions::default());
    let published = published.await.expect("publish");
    std::fs::write(published.target.join("file"), "kept").expect("write");

    let frozen = Frozen::new(lab.path());
    let unpublish = tokio::spawn({
        let pod = pod.clone();
        async move { pod.unpublish("cache").await }
    });
    let pid = driver.child.id();
    until("a call waits for the disk", || hangs(pid)).await;
    driver.signal(rustix::process::Signal::TERM);
    // Its parent hears of it when the kernel has ended the thread that waits for the disk. The disk
    // answers only after that: without a grace period the driver would never end.
    until("the driver has ended", || states(pid)[0] == 'Z').await;
    drop(frozen);
    let (code, log) = driver.ended();
    assert_eq!(code, 0, "{log}");
    let left = log
        .lines()
        .filter(|line| line.contains("left to the next start"));
    assert_eq!(left.count(), 1, "{log}");
    let answered = unpublish.await.expect("no panic");
    assert!(answered.is_err(), "no driver was there to answer");

    // The same while it opens the pool. In this order, the disk is thawed before the test waits for
    // the process.
    let (driver, frozen) = {
        let frozen = Frozen::new(lab.path());
        (Standalone::start_with(&lab, &["--grace", "1s"]), frozen)
    };
    let pid = driver.child.id();
    until("the start waits for the disk", || hangs(pid)).await;
    driver.signal(rustix::process::Signal::TERM);
    until("the driver has ended", || states(pid)[0] == 'Z').await;
    drop(frozen);
    let (code, log) = driver.ended();
    assert_eq!(code, 0, "{log}");
    assert!(log.contains("\"part\":\"opening the pool\""), "{log}");

    // All that was promised is kept.
    let driver = Standalone::start(&lab);
    let _ = driver.kubelet(&lab).await;
    pod.unpublish("cache").await.expect("unpublish");
    let sealed = || json(&driver.pool, &["caches", "-o", "json"])[0]["durable"] == true;
    until("the cache is sealed", sealed).await;
    assert_eq!(
        json(&driver.pool, &["check", "-o", "json"]),
        serde_json::json!([])
    );
    driver.signal(rustix::process::Signal::TERM);
    let (code, log) = driver.ended();
    assert_eq!(code, 0, "{log}");
    assert!(!log.contains("left to the next start"), "{log}");
    assert_eq!(lab.close(), [""; 0].map(PathBuf::from));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_socket_whose_disk_does_not_answer_keeps_the_driver_from_ending_no_longer_than_its_grace()
{
    let lab = require_lab!(Fs::Ext4);
    let sockets = Lab::sized(Fs::Ext4, 16 << 20);
    let start = || Standalone::start_at(&lab, &sockets.path(), &["--grace", "1s"]);
    let ends = async |driver: &Standalone| {
        let pid = driver.child.id();
        driver.signal(rustix::process::Signal::TERM);
        until("the driver has ended", || states(pid)[0] == 'Z').await;
    };
    let driver = start();
    let _ = driver.kubelet(&lab).await;
    let frozen = Frozen::new(sockets.path());
    ends(&driver).await;
    let pid = driver.child.id();
    assert!(states(pid).contains(&'D'), "nothing waits for the disk");
    drop(frozen);
    let (code, log) = driver.ended();
    assert_eq!(code, 0, "{log}");
    assert!(log.contains("\"part\":\"CSI services\""), "{log}");

    // The same while it makes the socket. In this order, the disk is thawed before the test waits
    // for the process.
    let (driver, frozen) = {
        let frozen = Frozen::new(sockets.path());
        (start(), frozen)
    };
    let pid = driver.child.id();
    until("the start waits for the disk", || hangs(pid)).await;
    ends(&driver).await;
    drop(frozen);
    let (code, log) = driver.ended();
    assert_eq!(code, 0, "{log}");
    assert!(log.contains("\"part\":\"making the CSI socket\""), "{log}");

    // Neither left anything in the way of the other.
    let driver = start();
    let _ = driver.kubelet(&lab).await;
    driver.signal(rustix::process::Signal::TERM);
    let socket = driver.socket.clone();
    let (code, log) = driver.ended();
    assert_eq!(code, 0, "{log}");
    assert!(!socket.exists());
    for lab in [lab, sockets] {
        assert_eq!(lab.close(), [""; 0].map(PathBuf::from));
    }
}

/// A claim's volume at its staging path and at a pod's, with the publish context that the
/// controller gave.
async fn stage_and_publish(
    kubelet: &Kubelet,
    volume: &csi::Volume,
    context: BTreeMap<String, String>,
    at: [&Path; 2],
) -> Result<(), tonic::Status> {
    let [staging, target] = at.map(|path| path.to_str().expect("text").to_owned());
    let mut node = kubelet.node_client();
    let staged = csi::NodeStageVolumeRequest {
        volume_id: volume.volume_id.clone(),
        publish_context: context.clone(),
        staging_target_path: staging.clone(),
        volume_capability: Some(writer()),
        ..Default::default()
    };
    node.node_stage_volume(staged).await?;
    let published = csi::NodePublishVolumeRequest {
        volume_id: volume.volume_id.clone(),
        publish_context: context,
        staging_target_path: staging,
        target_path: target,
        volume_capability: Some(writer()),
        ..Default::default()
    };
    node.node_publish_volume(published).await.map(drop)
}

fn writer() -> csi::VolumeCapability {
    use csi::volume_capability::access_mode::Mode;
    use csi::volume_capability::{AccessMode, AccessType, MountVolume};
    csi::VolumeCapability {
        access_mode: Some(AccessMode {
            mode: Mode::SingleNodeWriter.into(),
        }),
        access_type: Some(AccessType::Mount(MountVolume::default())),
    }
}

#[tokio::test]
async fn a_claim_that_is_attached_for_reading_only_cannot_be_written() {
    let lab = require_lab!(Fs::Ext4);
    let driver = Standalone::start_with(&lab, &["--grace", "5s", "--attach"]);
    let kubelet = driver.kubelet(&lab).await;
    let mut controller = kubelet.controller_client();
    for readonly in [true, false] {
        let made = csi::CreateVolumeRequest {
            name: format!("claim-{readonly}"),
            volume_capabilities: vec![writer()],
            ..Default::default()
        };
        let made = controller.create_volume(made).await.expect("made");
        let volume = made.into_inner().volume.expect("a volume");
        let attach = csi::ControllerPublishVolumeRequest {
            volume_id: volume.volume_id.clone(),
            node_id: "here".to_owned(),
            volume_capability: Some(writer()),
            readonly,
            ..Default::default()
        };
        let attached = controller.controller_publish_volume(attach).await;
        let context = attached.expect("attached").into_inner().publish_context;
        let staging = lab.kubelet_dir().join(format!("stage-{readonly}"));
        let target = lab.kubelet_dir().join(format!("pod-{readonly}"));
        std::fs::create_dir(&staging).expect("the orchestrator's");
        let made_up = BTreeMap::from([("readOnly".to_owned(), "perhaps".to_owned())]);
        for (context, code) in [
            (made_up, Some(tonic::Code::InvalidArgument)),
            (context.clone(), None),
            (context, None),
        ] {
            let answer = stage_and_publish(&kubelet, &volume, context, [&staging, &target]).await;
            assert_eq!(answer.err().map(|status| status.code()), code);
        }
        for place in [&staging, &target] {
            let written = std::fs::write(place.join("file"), "text");
            let refused = written.err().map(|error| error.kind());
            let expected = readonly.then_some(std::io::ErrorKind::ReadOnlyFilesystem);
            assert_eq!(refused, expected, "{}", place.display());
        }
        let mut node = kubelet.node_client();
        let unpublish = csi::NodeUnpublishVolumeRequest {
            volume_id: volume.volume_id.clone(),
            target_path: target.to_str().expect("text").to_owned(),
        };
        let unpublished = node.node_unpublish_volume(unpublish).await;
        unpublished.expect("unpublished");
        let unstage = csi::NodeUnstageVolumeRequest {
            volume_id: volume.volume_id.clone(),
            staging_target_path: staging.to_str().expect("text").to_owned(),
        };
        node.node_unstage_volume(unstage).await.expect("unstaged");
    }
    driver.signal(rustix::process::Signal::TERM);
    let (code, log) = driver.ended();
    assert_eq!(code, 0, "{log}");
    assert_eq!(lab.close(), [""; 0].map(PathBuf::from));
}

#[tokio::test]
async fn a_check_without_a_driver_changes_nothing_and_needs_nothing_that_can_be_written() {
    let lab = require_lab!(Fs::Ext4);
    let driver = Standalone::start(&lab);
    let kubelet = driver.kubelet(&lab).await;
    let pod = kubelet.pod("ci", "build");
    let attributes = [("type", "output"), ("name", "o"), ("commit", "always")];
    let published = pod.publish("o", attributes, PublishOptions::default());
    let published = published.await.expect("publish");
    std::fs::write(published.target.join("file"), "kept").expect("write");
    pod.unpublish("o").await.expect("unpublish");
    let sealed = || json(&driver.pool, &["artifacts", "-o", "json"])[0]["durable"] == true;
    until("the output is sealed", sealed).await;
    // As a crash leaves it, the index has to be repaired before it is used.
    driver.signal(rustix::process::Signal::KILL);
    let pool = driver.pool.clone();
    drop(driver);
    for name in ["trash", "empty"] {
        std::fs::rename(pool.join(name), lab.path().join(name)).expect("it was there");
    }
    let before = Snapshot::of(&pool);
    for read_only in [false, true] {
        lab.set_read_only(read_only);
        let found = ask(&pool, &["check", "-o", "json"]);
        assert_eq!(found.status.code(), Some(1), "{}", text(&found.stderr));
        let found: serde_json::Value = serde_json::from_slice(&found.stdout).expect("JSON");
        assert_eq!(found.as_array().map(Vec::len), Some(1), "{found}");
        assert_eq!(found[0]["kind"], "missing-directory", "{found}");
        assert_eq!(found[0]["path"], "trash", "{found}");
        assert_same(&before, &Snapshot::of(&pool));
    }
    lab.set_read_only(false);
    // A pool without a lock file has no owner, and a check makes no lock file.
    std::fs::remove_file(pool.join("lock")).expect("it was there");
    let before = Snapshot::of(&pool);
    let found = ask(&pool, &["check"]);
    assert_eq!(found.status.code(), Some(1), "{}", text(&found.stderr));
    assert_same(&before, &Snapshot::of(&pool));
    // A repair may write.
    let said = answer(&pool, &["check", "--rebuild", "--force"]);
    assert!(said.contains("names 1 artifact"), "{said}");
    assert_eq!(json(&pool, &["check", "-o", "json"]), serde_json::json!([]));
    assert_eq!(lab.close(), [""; 0].map(PathBuf::from));
}

/// The account of the controller may clear, and may not make a Rollback.
#[test]
fn the_pod_of_the_controller_is_a_hint_for_clear_only() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let clear = ["clear", "task-cache/k", "-n", "ci"];
    let rollback = [
        "rollback",
        "--cluster",
        "task-cache/k",
        "--to",
        "4f",
        "-n",
        "ci",
    ];
    for (order, is_hint) in [(&clear[..], true), (&rollback, false)] {
        let mut command = command(dir.path());
        let command = command.args(order).env("HOME", dir.path());
        for name in ["KUBECONFIG", "KUBERNETES_SERVICE_HOST"] {
            command.env_remove(name);
        }
        let output = command.output().expect("the binary runs");
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("name a kubeconfig"), "{said}");
        assert_eq!(said.contains("controller's pod"), is_hint, "{said}");
    }
}

/// A controller that has just started: it knows nothing yet, and says so.
struct NewController;

#[tonic::async_trait]
impl Cluster for NewController {
    type ListCachesStream = tokio_stream::Once<Result<admin::ListCachesResponse, tonic::Status>>;

    async fn list_caches(
        &self,
        _: tonic::Request<admin::ListCachesRequest>,
    ) -> Result<tonic::Response<Self::ListCachesStream>, tonic::Status> {
        let answer = admin::ListCachesResponse {
            caches: Vec::new(),
            incomplete: true,
        };
        Ok(tonic::Response::new(tokio_stream::once(Ok(answer))))
    }

    /// Nothing is complete but what it says of one name.
    async fn explain(
        &self,
        request: tonic::Request<admin::ExplainRequest>,
    ) -> Result<tonic::Response<admin::ExplainResponse>, tonic::Status> {
        let answer = if request.into_inner().reference == "task-cache/known" {
            admin::ClusterAnswer::Nothing
        } else {
            admin::ClusterAnswer::Incomplete
        };
        Ok(tonic::Response::new(admin::ExplainResponse {
            answer: answer.into(),
            nodes: Vec::new(),
        }))
    }

    async fn log(
        &self,
        request: tonic::Request<admin::LogRequest>,
    ) -> Result<tonic::Response<admin::LogResponse>, tonic::Status> {
        let reference = request.into_inner().reference;
        let why = format!("{reference} is not known\nhere");
        Err(tonic::Status::failed_precondition(why))
    }

    async fn clear(
        &self,
        _: tonic::Request<admin::ClearRequest>,
    ) -> Result<tonic::Response<admin::ClearResponse>, tonic::Status> {
        Ok(tonic::Response::new(admin::ClearResponse {}))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_controller_that_does_not_know_all_yet_is_not_taken_to() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let socket = dir.path().join("csi.sock");
    let listener = tokio::net::UnixListener::bind(&socket).expect("bind");
    let incoming = tokio_stream::wrappers::UnixListenerStream::new(listener);
    let service = ClusterServer::new(NewController);
    let serving = tonic::transport::Server::builder().serve_with_incoming(service, incoming);
    let serving = tokio::spawn(serving);
    // Another thread serves.
    let asked = |arguments: &[&str]| {
        let mut command = command(dir.path());
        command.args(arguments).env("BAGGAGECLAIM_SOCKET", &socket);
        let output = command.output().expect("the binary runs");
        (text(&output.stdout), text(&output.stderr))
    };
    for format in ["table", "wide", "name", "json", "yaml"] {
        let (out, err) = asked(&["caches", "--cluster", "-o", format]);
        let incomplete = "Some nodes have not reported all that they have yet.";
        assert!(err.contains(incomplete), "{format}: {err}");
        assert!(!out.contains(incomplete), "{format}: {out}");
    }
    for (order, is_known) in [
        (&["task-cache/known"][..], true),
        (&["task-cache/other"], false),
        (&["task-cache/known", "--prefix"], false),
    ] {
        let (out, _) = asked(&[&["clear", "-n", "ci"], order].concat());
        assert!(out.contains("is cleared.\nNodes"), "{order:?}: {out}");
        let says = out.contains("No node was known to have content of that name.");
        assert_eq!(says, is_known, "{order:?}: {out}");
    }
    let (_, err) = asked(&["log", "--cluster", "task-cache/\u{202e}x", "-n", "ci"]);
    assert_eq!(
        err,
        "baggageclaim: task-cache/\\u{202e}x is not known\nhere\n"
    );
    serving.abort();
}

#[test]
fn a_reader_that_has_seen_enough_is_no_error() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let mut child = command(dir.path())
        .arg("--help")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary runs");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("wait");
    assert_eq!(text(&output.stderr), "");
}
