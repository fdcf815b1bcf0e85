//! The whole of csi-sanity on each backend: once, again on the same pool, and again while the
//! driver is killed between calls and in the middle of them. A failed or skipped spec fails the
//! test.
//!
//! | in `tests/sanity/` | |
//! |---|---|
//! | `driver` | the process under test |
//! | `proxy` | the proxy between both in the third run, which kills the driver |
//! | `report` | csi-sanity's report |
//!
//! csi-sanity is a Go program, built here from `csi-sanity/`, once for all tests.

#![expect(
    clippy::disallowed_types,
    clippy::print_stderr,
    reason = "the process under test and csi-sanity are started; how it went is said where nobody swallows it"
)]

mod common;

#[path = "sanity/driver.rs"]
mod driver;
#[path = "sanity/proxy.rs"]
mod proxy;
#[path = "sanity/report.rs"]
mod report;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use baggageclaim::engine::Engine;
use common::{Fs, Lab, require_lab, skip};
use driver::Setup;
use proxy::Proxy;
use report::Report;

const MIB: u64 = 1 << 20;
/// The content of `csi-sanity/secrets.yaml`.
const CANARY: &str = "hunter2-the-canary";

/// The specs that upstream has switched off. A test of this project covers them; see
/// `csi-sanity/README.md`.
const PENDING: [&str; 1] = [
    "Controller Service [Controller Server] ListVolumes pagination should detect volumes added between pages and accept \
     tokens when the last volume from a page is deleted",
];

#[test]
fn overlay() {
    on(Fs::Ext4, "overlay");
}

#[test]
fn btrfs() {
    on(Fs::Btrfs, "btrfs");
}

#[test]
fn copy() {
    on(Fs::XfsReflink, "copy");
}

fn on(fs: Fs, backend: &str) {
    let lab = require_lab!(fs);
    let tool = match tool() {
        Ok(tool) => tool,
        Err(reason) => return skip(reason),
    };
    let setup = Setup::new(&lab, backend);
    let _kept = Kept(&setup);
    let specs = {
        let driver = setup.start();
        let first = run(tool, &lab, &setup.socket);
        first.must_be_whole(&setup, "first run");
        let second = run(tool, &lab, &setup.socket);
        second.must_be_whole(&setup, "again on the same pool");
        drop(driver);
        first.passed()
    };
    let kills = {
        let proxy = Proxy::start(setup.clone(), lab.run_dir().join("proxy.sock"));
        let third = run(tool, &lab, &proxy.socket);
        third.must_be_whole(&setup, "with the driver killed between calls");
        proxy.end()
    };
    let left = lab.leftovers();
    assert!(
        left.is_empty(),
        "mounts were left: {left:?}\n{}",
        setup.tail()
    );
    let findings = Engine::check_offline(&setup.pool).expect("check");
    assert!(findings.is_empty(), "{findings:?}\n{}", setup.tail());
    assert!(!setup.log().contains(CANARY), "a secret is in the log");
    say(&format!(
        "{backend} on {}: {specs} specs passed, 0 skipped; the same on a used pool; the same with the driver killed {kills} times",
        fs.name()
    ));
}

/// The driver's log, kept after a failure if a place is given.
struct Kept<'a>(&'a Setup);

impl Drop for Kept<'_> {
    fn drop(&mut self) {
        if let Some(place) = std::env::var_os("BAGGAGECLAIM_SANITY_LOG")
            && std::thread::panicking()
        {
            let kept = std::fs::write(&place, self.0.log());
            eprintln!("the whole log: {}: {kept:?}", place.display());
        }
    }
}

/// Not through the test harness, which keeps what a test that passes says to itself.
fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "sanity: {line}");
}

/// csi-sanity, built; or why not, in a line.
fn tool() -> Result<&'static Path, &'static str> {
    static TOOL: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let built = TOOL.get_or_init(|| {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("csi-sanity");
        let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("csi-sanity");
        let built = Command::new("go")
            .args(["build", "-trimpath", "-mod=readonly", "-o"])
            .arg(&program)
            .arg(".")
            .current_dir(source)
            .output();
        match built {
            Err(error) => Err(format!(
                "csi-sanity needs Go 1.25 or newer (https://go.dev/dl) to be built, and `go` does not run: {error}"
            )),
            Ok(output) if !output.status.success() => Err(format!(
                "csi-sanity cannot be built: {}",
                String::from_utf8_lossy(&output.stderr).trim()
            )),
            Ok(_) => Ok(program),
        }
    });
    built.as_deref().map_err(String::as_str)
}

/// Runs all of csi-sanity against a socket.
fn run(tool: &Path, lab: &Lab, socket: &Path) -> Report {
    let told = Path::new(env!("CARGO_MANIFEST_DIR")).join("csi-sanity");
    let pods = lab.kubelet_dir();
    let report = lab.run_dir().join("report.json");
    let path = |name: &str, path: &Path| {
        let mut flag = std::ffi::OsString::from(format!("-csi.{name}="));
        flag.push(path);
        flag
    };
    let output = Command::new(tool)
        .arg(path("endpoint", socket))
        .arg(path("mountdir", &pods.join("mount")))
        .arg(path("stagingdir", &pods.join("staging")))
        .arg(path("testvolumeparameters", &told.join("parameters.yaml")))
        .arg(path(
            "testvolumemutableparameters",
            &told.join("mutable-parameters.yaml"),
        ))
        .arg(path(
            "testsnapshotparameters",
            &told.join("snapshot-parameters.yaml"),
        ))
        .arg(path("secrets", &told.join("secrets.yaml")))
        .arg(format!("-csi.testvolumesize={}", 16 * MIB))
        .arg(format!("-csi.testvolumeexpandsize={}", 32 * MIB))
        .args([
            "-ginkgo.no-color",
            "-ginkgo.timeout=15m",
            "-ginkgo.silence-skips",
        ])
        .arg(format!("-ginkgo.json-report={}", report.display()))
        .output()
        .expect("csi-sanity runs");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    Report::read(&report, output.status.success(), said)
}
