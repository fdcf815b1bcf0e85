//! The whole of csi-sanity on each backend: once, again on the same pool, and again while the
//! driver is killed between calls and in the middle of them. A failed or skipped spec fails the
//! test. Without options, the driver skips the specs for these, and no other.
//!
//! | in `tests/sanity/` | |
//! |---|---|
//! | `driver` | the process under test |
//! | `proxy` | the proxy between both in the third run, which kills the driver |
//! | `tool` | csi-sanity: a Go program, built from `csi-sanity/` once for all tests |
//! | `report` | csi-sanity's report |
//!
//! `tests/control_plane` runs it against the plugins of a cluster.

#![expect(
    clippy::disallowed_types,
    clippy::print_stderr,
    reason = "the process under test and csi-sanity are started; the result is printed where no harness captures it"
)]

mod common;

#[path = "sanity/driver.rs"]
mod driver;
#[path = "sanity/proxy.rs"]
mod proxy;
#[path = "sanity/report.rs"]
mod report;
#[path = "sanity/tool.rs"]
mod tool;

use std::io::Write as _;
use std::path::Path;

use baggageclaim::engine::Engine;
use common::{Fs, Lab, require_lab, skip};
use driver::Setup;
use proxy::Proxy;
use report::{Report, WITHOUT_OPTIONS};
use tool::Target;

/// The content of `csi-sanity/secrets.yaml`.
const CANARY: &str = "hunter2-the-canary";

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

/// The specs that the test of a cluster may skip are those that this skips.
#[test]
fn without_options() {
    let lab = require_lab!(Fs::Ext4);
    let tool = match tool::tool() {
        Ok(tool) => tool,
        Err(reason) => return skip(reason),
    };
    let setup = Setup::new(&lab, "overlay").without_options();
    let _kept = Kept(&setup);
    let _driver = setup.start();
    let report = run(tool, &lab, &setup.socket);
    report.must_be_whole("without options", WITHOUT_OPTIONS, &|| setup.tail());
}

fn on(fs: Fs, backend: &str) {
    let lab = require_lab!(fs);
    let tool = match tool::tool() {
        Ok(tool) => tool,
        Err(reason) => return skip(reason),
    };
    let setup = Setup::new(&lab, backend);
    let _kept = Kept(&setup);
    let specs = {
        let driver = setup.start();
        let first = run(tool, &lab, &setup.socket);
        first.must_be_whole("first run", &[], &|| setup.tail());
        let second = run(tool, &lab, &setup.socket);
        second.must_be_whole("again on the same pool", &[], &|| setup.tail());
        drop(driver);
        first.passed()
    };
    let kills = {
        let proxy = Proxy::start(setup.clone(), lab.run_dir().join("proxy.sock"));
        let third = run(tool, &lab, &proxy.socket);
        third.must_be_whole("with the driver killed between calls", &[], &|| {
            setup.tail()
        });
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

/// Runs all of csi-sanity against a socket that serves everything.
fn run(tool: &Path, lab: &Lab, socket: &Path) -> Report {
    let target = Target {
        node: socket,
        controller: None,
        pods: &lab.kubelet_dir(),
        report: &lab.run_dir().join("report.json"),
    };
    target.ask_all(tool)
}
