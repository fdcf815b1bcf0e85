//! The verbs `export` and `import` as people run them, with a driver of its own process: GNU tar at
//! the other end, files and pipes, ^C, readers that go away, and processes that are killed in the
//! middle.

#![expect(
    clippy::disallowed_types,
    reason = "the binary is run as people run it, and GNU tar with it"
)]

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Output, Stdio};
use std::time::{Duration, Instant};

use baggageclaim::kubelet_double::{Kubelet, PublishOptions};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::process::{Pid, Signal, kill_process};

use crate::common::bench::names;
use crate::common::{Fs, Lab, Snapshot, assert_same, require_lab, tree};

const PATIENCE: Duration = Duration::from_secs(60);

/// A driver in its own process; killed in `Drop`.
struct Driver {
    child: Child,
    pool: PathBuf,
    socket: PathBuf,
}

impl Driver {
    fn start(lab: &Lab, backend: &str) -> Self {
        let pool = lab.path().join("pool");
        let socket = lab.run_dir().join("driver/csi.sock");
        let child = Command::new(env!("CARGO_BIN_EXE_baggageclaim"))
            .arg("standalone")
            .arg("--pool")
            .arg(&pool)
            .arg("--socket")
            .arg(&socket)
            .args(["--backend", backend, "--node-id", "here"])
            .args(["--end-with-parent", "--grace", "10s"])
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("the binary runs");
        Self {
            child,
            pool,
            socket,
        }
    }

    async fn ready(lab: &Lab, backend: &str) -> (Self, Kubelet) {
        let driver = Self::start(lab, backend);
        let kubelet = Kubelet::connect_when_ready(&driver.socket, lab.kubelet_dir(), PATIENCE);
        let kubelet = kubelet.await.expect("the driver becomes ready");
        (driver, kubelet)
    }

    fn verb(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_baggageclaim"));
        command.env("BAGGAGECLAIM_POOL", &self.pool).args(arguments);
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let mut command = self.verb(arguments);
        command.output().expect("the binary runs")
    }

    /// What a verb prints that goes well, and what it says beside.
    fn answer(&self, arguments: &[&str]) -> (String, String) {
        let output = self.run(arguments);
        let (out, err) = (text(&output.stdout), text(&output.stderr));
        assert!(output.status.success(), "{arguments:?}: {out}{err}");
        (out, err)
    }

    /// What a verb says that fails.
    fn failure(&self, arguments: &[&str]) -> (i32, String) {
        let output = self.run(arguments);
        let code = output.status.code().expect("an exit code");
        (code, text(&output.stderr))
    }

    fn json(&self, arguments: &[&str]) -> serde_json::Value {
        serde_json::from_str(&self.answer(arguments).0).expect("JSON")
    }

    fn artifacts(&self) -> Vec<String> {
        let (names, _) = self.answer(&["artifacts", "-o", "name"]);
        names.lines().map(str::to_owned).collect()
    }

    /// Waits until nothing of an import or export is left in the pool.
    fn left_nothing(&self, layers: usize, after: &str) {
        until(&format!("nothing is left after {after}"), || {
            self.answer(&["reap"]);
            let count = |directory: &str| names(&self.pool.join(directory)).len();
            count("incoming") + count("trash") == 0 && count("layers") == layers
        });
        assert_eq!(
            self.json(&["check", "-o", "json"]),
            serde_json::json!([]),
            "{after}"
        );
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("kill");
    }

    fn ends(mut self) {
        self.signal(Signal::TERM);
        let status = self.child.wait().expect("wait");
        assert!(status.success(), "{status}");
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("text")
}

fn until(what: &str, so: impl Fn() -> bool) {
    let began = Instant::now();
    while !so() {
        assert!(began.elapsed() < PATIENCE, "never: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn path(path: &Path) -> &str {
    path.to_str().expect("text")
}

const GROUNDS: [(Fs, &str); 3] = [
    (Fs::Ext4, "overlay"),
    (Fs::Btrfs, "btrfs"),
    (Fs::XfsReflink, "copy"),
];

fn tar(arguments: &[&str]) -> Output {
    let output = Command::new("tar").args(arguments).output();
    let output = output.expect("GNU tar");
    assert!(output.status.success(), "{}", text(&output.stderr));
    output
}

/// What a fork shows.
async fn shown(kubelet: &Kubelet, name: &str) -> Snapshot {
    let pod = kubelet.pod("ci", "looks");
    let fork = [("type", "input"), ("from", name)];
    let published = pod.publish("src", fork, PublishOptions::default()).await;
    let content = Snapshot::of(&published.expect("publish").target);
    pod.unpublish("src").await.expect("unpublish");
    pod.remove().expect("its directory goes");
    content
}

#[tokio::test]
async fn gnu_tar_reads_what_is_exported_and_what_it_writes_is_imported() {
    for (fs, backend) in GROUNDS {
        let lab = require_lab!(fs);
        let (driver, kubelet) = Driver::ready(&lab, backend).await;
        let from = lab.dir("from");
        tree::files(&from, 250);
        fs::write(from.join("owned"), "by a user").expect("write");
        std::os::unix::fs::lchown(from.join("owned"), Some(12_345), Some(54_321)).expect("chown");
        fs::hard_link(from.join("owned"), from.join("linked")).expect("link");
        std::os::unix::fs::symlink("owned", from.join("symlink")).expect("symlink");
        tree::times(&from, 1_234_567_890, 500_000_000);
        let before = Snapshot::of(&from);
        let at = |name: &str| lab.path().join(name);
        let (gnu, back) = (at("gnu.tar.gz"), at("back.tar.zst"));
        tar(&[
            "--format=pax",
            "--xattrs",
            "-C",
            path(&from),
            "-czf",
            path(&gnu),
            ".",
        ]);
        let as_gnu = ["--as", "artifact/gnu", "-n", "ci"];
        let (said, _) = driver.answer(&[&["import", path(&gnu)], &as_gnu[..]].concat());
        assert!(
            said.starts_with("artifact/gnu of namespace ci is artifact "),
            "{said}"
        );
        assert_same(&before, &shown(&kubelet, "artifact/gnu").await);

        let export = ["export", "artifact/gnu", "-n", "ci"];
        let (out, said) = driver.answer(&[&export[..], &["-o", path(&back)]].concat());
        assert_eq!(out, "");
        let inspected = driver.json(&["inspect", "artifact/gnu", "-o", "json"]);
        let digest = inspected["digest"].as_str().expect("a digest");
        assert!(said.contains(digest), "{said}");
        assert!(inspected["importedDigest"].is_string());
        assert_ne!(
            inspected["importedDigest"], digest,
            "GNU tar writes it differently"
        );
        let to = lab.dir("to");
        tar(&["--zstd", "--xattrs", "-C", path(&to), "-xpf", path(&back)]);
        assert_same(&before, &Snapshot::of(&to));

        // By a pipe, and by its digest.
        let plain = driver.run(&export);
        assert!(plain.status.success(), "{}", text(&plain.stderr));
        let mut again = driver.verb(&["import", "-", "--as", "task-cache/again", "-n", "ci"]);
        again.args(["--digest", digest]);
        let mut again = again.stdin(Stdio::piped()).stdout(Stdio::null()).spawn();
        let again = again.as_mut().expect("the binary runs");
        let mut pipe = again.stdin.take().expect("piped");
        pipe.write_all(&plain.stdout).expect("it reads all");
        drop(pipe);
        assert!(again.wait().expect("wait").success());
        assert_same(&before, &shown(&kubelet, "task-cache/again").await);
        driver.left_nothing(2, backend);
        drop(kubelet);
        driver.ends();
        assert_eq!(lab.close(), [""; 0].map(PathBuf::from));
    }
}

#[tokio::test]
async fn what_cannot_be_done_is_said_and_leaves_nothing() {
    let lab = require_lab!(Fs::Ext4);
    let (driver, _kubelet) = Driver::ready(&lab, "overlay").await;
    let at = |name: &str| lab.path().join(name);
    let archive = at("some.tar");
    let from = lab.dir("from");
    tree::files(&from, 20);
    tar(&["-C", path(&from), "-cf", path(&archive), "."]);
    let import = |file: &str, more: &[&str]| {
        let asked = ["import", file, "--as", "resource-cache/r", "-n", "ci"];
        driver.failure(&[&asked[..], more].concat())
    };
    let other = format!("sha256:{}", "0".repeat(64));
    let (code, said) = import(path(&archive), &["--digest", &other]);
    assert_eq!(code, 1, "{said}");
    assert!(
        said.contains("nothing was imported") && said.contains(&other),
        "{said}"
    );
    let (code, said) = import(path(&archive), &["--digest", "sha256:123"]);
    assert_eq!(code, 2, "{said}");
    let whole = fs::read(&archive).expect("read");
    let cut = at("cut.tar");
    fs::write(&cut, &whole[..whole.len() / 2]).expect("write");
    let (code, said) = import(path(&cut), &[]);
    assert_eq!(code, 1, "{said}");
    assert!(said.contains("incomplete"), "{said}");
    let (code, said) = import(path(&from), &[]);
    assert!(code == 1 && said.contains("cannot read"), "{said}");
    let (code, said) = import("/nowhere/at/all", &[]);
    assert!(code == 1 && said.contains("cannot read"), "{said}");
    driver.left_nothing(0, "failures");

    let asked = [
        "import",
        path(&archive),
        "--as",
        "resource-cache/r",
        "-n",
        "ci",
    ];
    driver.answer(&asked);
    let (code, said) = driver.failure(&asked);
    assert_eq!(code, 1, "{said}");
    assert!(said.contains("keeps its first"), "{said}");
    driver.left_nothing(1, "a second import");

    let (code, said) = driver.failure(&["export", "artifact/none", "-n", "ci"]);
    assert!(
        code == 1 && said.contains("has the name or id artifact/none"),
        "{said}"
    );
    // A file is not replaced without a word, and nothing but it is there afterwards.
    let directory = lab.dir("exports");
    let file = directory.join("r.tar.gz");
    fs::write(&file, "precious").expect("write");
    let export = ["export", "resource-cache/r", "-n", "ci", "-o", path(&file)];
    let (code, said) = driver.failure(&export);
    assert!(code == 1 && said.contains("--force"), "{said}");
    assert_eq!(fs::read(&file).expect("read"), b"precious");
    driver.answer(&[&export[..], &["--force"]].concat());
    assert_eq!(names(&directory), ["r.tar.gz"]);
    tar(&["-tzf", path(&file)]);
    // The end of the pool's own disk is no matter of the file's.
    let (code, said) = driver.failure(&["export", "resource-cache/r", "-o", "/dev/full"]);
    assert!(
        code == 1 && said.contains("cannot write /dev/full"),
        "{said}"
    );
    driver.left_nothing(1, "exports");
    driver.ends();
}

/// As on NFS.
#[tokio::test]
async fn a_filesystem_that_cannot_rename_without_replacing_takes_an_archive() {
    if Command::new("strace").arg("-V").output().is_err() {
        return crate::common::skip("strace is not there");
    }
    let lab = require_lab!(Fs::Ext4);
    let (driver, _kubelet) = Driver::ready(&lab, "overlay").await;
    let archive = large(&lab, 1 << 10);
    let reference = ["--as", "artifact/a", "-n", "ci"];
    driver.answer(&[&["import", path(&archive)][..], &reference].concat());
    let directory = lab.dir("exports");
    let file = directory.join("a.tar");
    let export = || {
        let mut strace = Command::new("strace");
        strace
            .args([
                "-f",
                "-qq",
                "-o",
                "/dev/null",
                "-e",
                "inject=renameat2:error=EINVAL",
            ])
            .arg(env!("CARGO_BIN_EXE_baggageclaim"))
            .args(["export", "artifact/a", "-n", "ci", "-o", path(&file)])
            .env("BAGGAGECLAIM_POOL", &driver.pool);
        strace.output().expect("strace runs")
    };
    let first = export();
    assert!(first.status.success(), "{}", text(&first.stderr));
    tar(&["-tf", path(&file)]);
    let second = export();
    let told = text(&second.stderr);
    assert!(told.contains("exists already"), "{told}");
    assert_eq!(names(&directory), ["a.tar"]);
    driver.ends();
}

/// The number of the system call.
const OPENAT: u32 = if cfg!(target_arch = "x86_64") {
    257
} else {
    56
};

#[tokio::test]
async fn an_export_that_waits_for_the_reader_of_its_pipe_can_be_interrupted() {
    let lab = require_lab!(Fs::Ext4);
    let (driver, _kubelet) = Driver::ready(&lab, "overlay").await;
    let archive = large(&lab, 1 << 10);
    let reference = ["--as", "artifact/a", "-n", "ci"];
    driver.answer(&[&["import", path(&archive)][..], &reference].concat());
    let fifo = lab.path().join("fifo");
    mknodat(CWD, &fifo, FileType::Fifo, Mode::RWXU, 0).expect("mkfifo");
    let mut export = driver.verb(&["export", "artifact/a", "-n", "ci", "-o", path(&fifo)]);
    let mut export = export.stderr(Stdio::null()).spawn().expect("it runs");
    let call = format!("/proc/{}/syscall", export.id());
    let openat = format!("{OPENAT} ");
    until("it waits", || {
        fs::read_to_string(&call).is_ok_and(|call| call.starts_with(&openat))
    });
    // Not INT: a shell's background job inherits that as ignored.
    kill_process(Pid::from_child(&export), Signal::TERM).expect("kill");
    let status = export.wait().expect("wait");
    assert!(!status.success(), "{status}");
    driver.ends();
}

#[tokio::test]
async fn an_import_into_a_pool_above_its_high_watermark_is_warned_of() {
    let lab = require_lab!(Fs::Ext4, 64 << 20);
    let (driver, _kubelet) = Driver::ready(&lab, "overlay").await;
    let archive = large(&lab, 1 << 10);
    let import = |name| {
        let reference = ["--as", name, "-n", "ci"];
        let (_, told) = driver.answer(&[&["import", path(&archive)][..], &reference].concat());
        told.contains("warning: the pool is above its high watermark")
    };
    assert!(!import("artifact/early"));
    // Another program fills the disk.
    let status = driver.json(&["status", "-o", "json"]);
    let bytes = |field: &str| status[field].as_u64().expect("a number");
    let (total, available) = (bytes("totalBytes"), bytes("availableBytes"));
    let filler = fs::File::create(lab.path().join("filler")).expect("made");
    let rest = total / 10;
    let flags = rustix::fs::FallocateFlags::empty();
    rustix::fs::fallocate(&filler, flags, 0, available - rest).expect("there is space");
    assert!(import("artifact/late"));
    driver.ends();
}

/// An archive that takes a while: one file of so many bytes without a pattern.
fn large(lab: &Lab, bytes: usize) -> PathBuf {
    let from = lab.dir("large");
    let mut noise = vec![0; bytes];
    let mut random = fs::File::open("/dev/urandom").expect("open");
    random.read_exact(&mut noise).expect("read");
    fs::write(from.join("noise"), noise).expect("write");
    let archive = lab.path().join("large.tar");
    tar(&["-C", path(&from), "-cf", path(&archive), "."]);
    archive
}

/// An import from a pipe, of which the first half has arrived in the pool.
fn half_imported(driver: &Driver, archive: &Path) -> (Child, ChildStdin) {
    let mut import = driver.verb(&["import", "-", "--as", "artifact/half", "-n", "ci"]);
    let import = import.stdin(Stdio::piped()).stdout(Stdio::null());
    let mut import = import.stderr(Stdio::piped()).spawn().expect("it runs");
    let mut pipe = import.stdin.take().expect("piped");
    let whole = fs::read(archive).expect("read");
    pipe.write_all(&whole[..whole.len() / 2]).expect("it reads");
    let incoming = driver.pool.join("incoming");
    until("the half is there", || !names(&incoming).is_empty());
    (import, pipe)
}

fn said(child: &mut Child) -> String {
    let mut said = String::new();
    let mut stderr = child.stderr.take().expect("piped");
    stderr.read_to_string(&mut said).expect("text");
    said
}

#[tokio::test]
async fn an_import_that_is_interrupted_leaves_nothing() {
    for (fs, backend) in GROUNDS {
        let lab = require_lab!(fs);
        let (driver, _kubelet) = Driver::ready(&lab, backend).await;
        let archive = large(&lab, 8 << 20);
        for signal in [Signal::INT, Signal::TERM, Signal::KILL] {
            let (mut import, pipe) = half_imported(&driver, &archive);
            kill_process(Pid::from_child(&import), signal).expect("kill");
            let status = import.wait().expect("wait");
            if signal == Signal::KILL {
                assert_eq!(status.code(), None);
            } else {
                assert_eq!(status.code(), Some(1));
                assert!(said(&mut import).contains("interrupted; nothing was imported"));
            }
            drop(pipe);
            driver.left_nothing(0, "an interrupted import");
        }
        // The other end of the pipe goes away: that is an end, too soon.
        let (mut import, pipe) = half_imported(&driver, &archive);
        drop(pipe);
        assert_eq!(import.wait().expect("wait").code(), Some(1));
        assert!(said(&mut import).contains("incomplete"));
        driver.left_nothing(0, "a pipe that ends");
        assert_eq!(driver.artifacts(), [""; 0]);
        driver.ends();
    }
}

/// The driver does not see the end of the archive before it sees that its sender is gone, or it
/// does. The message does not promise either.
#[tokio::test]
async fn an_import_that_is_interrupted_after_its_last_byte_says_that_it_may_be_done() {
    let lab = require_lab!(Fs::Ext4);
    let (driver, _kubelet) = Driver::ready(&lab, "overlay").await;
    let archive = large(&lab, 32 << 10);
    let (mut import, mut pipe) = half_imported(&driver, &archive);
    driver.signal(Signal::STOP);
    let whole = fs::read(&archive).expect("read");
    pipe.write_all(&whole[whole.len() / 2..]).expect("it reads");
    drop(pipe);
    let threads = PathBuf::from(format!("/proc/{}/task", import.id()));
    until("all is read", || {
        let mut threads = names(&threads).into_iter();
        !threads.any(|id| {
            let name = fs::read_to_string(format!("/proc/{}/task/{id}/comm", import.id()));
            name.is_ok_and(|name| name == "read\n")
        })
    });
    kill_process(Pid::from_child(&import), Signal::INT).expect("kill");
    assert_eq!(import.wait().expect("wait").code(), Some(1));
    let told = said(&mut import);
    let hint = "`baggageclaim artifacts -n ci` shows it";
    assert!(told.contains(hint), "{told}");
    driver.signal(Signal::CONT);
    until("it is whole or absent", || {
        names(&driver.pool.join("incoming")).is_empty()
    });
    driver.left_nothing(driver.artifacts().len(), "a late interrupt");
    driver.ends();
}

#[tokio::test]
async fn a_driver_that_ends_ends_imports_and_leaves_nothing() {
    for (fs, backend) in GROUNDS {
        let lab = require_lab!(fs);
        let (driver, kubelet) = Driver::ready(&lab, backend).await;
        drop(kubelet);
        let archive = large(&lab, 8 << 20);
        // In order, long before its grace period is over …
        let (mut import, pipe) = half_imported(&driver, &archive);
        driver.ends();
        assert_eq!(import.wait().expect("wait").code(), Some(1));
        let told = said(&mut import);
        assert!(told.contains("shutting down"), "{told}");
        drop(pipe);
        // … and at an instruction that no one chose.
        let (driver, kubelet) = Driver::ready(&lab, backend).await;
        drop(kubelet);
        driver.left_nothing(0, "the end of a driver");
        let (mut import, pipe) = half_imported(&driver, &archive);
        driver.signal(Signal::KILL);
        assert_eq!(import.wait().expect("wait").code(), Some(3));
        let told = said(&mut import);
        assert!(told.contains("ended before it answered"), "{told}");
        drop(pipe);
        drop(driver);
        let (driver, kubelet) = Driver::ready(&lab, backend).await;
        drop(kubelet);
        driver.left_nothing(0, "the death of a driver");
        assert_eq!(driver.artifacts(), [""; 0]);
        driver.ends();
    }
}

#[tokio::test]
async fn an_export_whose_reader_goes_away_or_that_is_interrupted_leaves_nothing() {
    for (fs, backend) in GROUNDS {
        let lab = require_lab!(fs);
        let (driver, _kubelet) = Driver::ready(&lab, backend).await;
        let archive = large(&lab, 24 << 20);
        driver.answer(&[
            "import",
            path(&archive),
            "--as",
            "artifact/large",
            "-n",
            "ci",
        ]);
        let start = || {
            let mut export = driver.verb(&["export", "artifact/large", "-n", "ci"]);
            let export = export.stdout(Stdio::piped()).stderr(Stdio::piped());
            export.spawn().expect("it runs")
        };
        // Its reader has seen enough.
        let mut export = start();
        let mut pipe = BufReader::new(export.stdout.take().expect("piped"));
        assert!(!pipe.fill_buf().expect("read").is_empty());
        drop(pipe);
        assert_eq!(export.wait().expect("wait").code(), Some(1));
        let told = said(&mut export);
        assert!(told.contains("incomplete"), "{told}");
        driver.left_nothing(1, "a broken pipe");
        // Its reader does not read, so all of it waits: the command, the driver, the engine's
        // thread.
        for signal in [Signal::INT, Signal::KILL] {
            let mut export = start();
            let mut pipe = BufReader::new(export.stdout.take().expect("piped"));
            assert!(!pipe.fill_buf().expect("read").is_empty());
            kill_process(Pid::from_child(&export), signal).expect("kill");
            let status = export.wait().expect("wait");
            if signal == Signal::INT {
                assert_eq!(status.code(), Some(1));
                let told = said(&mut export);
                assert!(
                    told.contains("the archive on stdout is incomplete"),
                    "{told}"
                );
            }
            drop(pipe);
            driver.left_nothing(1, "an interrupted export");
        }
        // To a file.
        let directory = lab.dir("exports");
        let file = directory.join("large.tar.zst");
        let export = ["export", "artifact/large", "-n", "ci", "-o", path(&file)];
        let mut export = driver.verb(&export);
        let mut export = export.stderr(Stdio::piped()).spawn().expect("it runs");
        until("it has begun", || !names(&directory).is_empty());
        kill_process(Pid::from_child(&export), Signal::INT).expect("kill");
        let status = export.wait().expect("wait");
        // It may have been done already.
        if status.success() {
            assert_eq!(names(&directory), ["large.tar.zst"]);
        } else {
            assert_eq!(names(&directory), [""; 0], "{}", said(&mut export));
        }
        driver.left_nothing(1, "an export to a file");
        // To a named pipe, whose reader has got something.
        let fifo = lab.path().join("fifo");
        mknodat(CWD, &fifo, FileType::Fifo, Mode::RWXU, 0).expect("mkfifo");
        let export = ["export", "artifact/large", "-n", "ci", "-o", path(&fifo)];
        let mut export = driver.verb(&export);
        let mut export = export.stderr(Stdio::piped()).spawn().expect("it runs");
        let mut pipe = BufReader::new(fs::File::open(&fifo).expect("open"));
        assert!(!pipe.fill_buf().expect("read").is_empty());
        kill_process(Pid::from_child(&export), Signal::TERM).expect("kill");
        assert_eq!(export.wait().expect("wait").code(), Some(1));
        let told = said(&mut export);
        let expected = format!("the archive that {} got is incomplete", fifo.display());
        assert!(told.contains(&expected), "{told}");
        drop(pipe);
        driver.left_nothing(1, "an export to a pipe");
        // The driver ends, and its end does not wait for a reader that reads nothing: nothing of
        // the export is left in the pool.
        let mut export = start();
        let mut pipe = BufReader::new(export.stdout.take().expect("piped"));
        assert!(!pipe.fill_buf().expect("read").is_empty());
        let incoming = driver.pool.join("incoming");
        driver.ends();
        assert_eq!(names(&incoming), [""; 0]);
        drop(pipe);
        // The driver's last word may come before its end, or not.
        let status = export.wait().expect("wait");
        assert!(matches!(status.code(), Some(1 | 3)), "{status}");
    }
}

/// A pod's volume, by its id, while its pod writes to it.
#[tokio::test]
async fn a_live_volume_is_exported_and_the_command_says_so() {
    for (fs, backend) in GROUNDS {
        let lab = require_lab!(fs);
        let (driver, kubelet) = Driver::ready(&lab, backend).await;
        let pod = kubelet.pod("ci", "writes");
        let output = [("type", "output"), ("name", "later")];
        let published = pod.publish("out", output, PublishOptions::default()).await;
        let published = published.expect("publish");
        tree::files(&published.target, 30);
        tree::times(&published.target, 1_000_000_000, 0);
        let before = Snapshot::of(&published.target);
        let archive = lab.path().join("live.tgz");
        for named in [
            format!("volume/{}", published.volume_id),
            published.volume_id.clone(),
        ] {
            let (_, said) = driver.answer(&["export", &named, "-o", path(&archive), "--force"]);
            let expected = if backend == "btrfs" {
                "the archive shows it at this moment"
            } else {
                "its pod may change it meanwhile"
            };
            assert!(said.contains(expected), "{said}");
        }
        let to = lab.dir("to");
        tar(&["-C", path(&to), "-xpzf", path(&archive)]);
        assert_same(&before, &Snapshot::of(&to));
        pod.unpublish("out").await.expect("unpublish");
        driver.left_nothing(0, "the export of a live volume");
    }
}
