//! What the integration tests share: filesystems to try things on, trees to put there, and a way to
//! see whether two trees are the same.
//!
//! - [`driver`]: the driver in this process, and a kubelet that asks it.
//! - [`process`]: the driver of a node as a process, and how kubelet registers it.
//! - [`disk`]: a disk that loses what is written to it, and one that does not answer.
//! - [`lab`]: a filesystem of a kind in a file in memory, gone when the test is over.
//! - [`tree`]: trees of files, plain and nasty.
//! - [`snapshot`]: everything that can be seen of a tree, as a value to compare.
//! - [`api`]: a double of the API server.
//! - [`raw`]: calls whose messages are bytes.
//! - [`bench`]: an engine on such a filesystem, asked by short names.
//!
//! Nothing here but the bench knows what the product does; it must be believable on its own (`tests/lab.rs`).

#![allow(
    dead_code,
    unused_macros,
    unused_imports,
    unreachable_pub,
    clippy::print_stderr,
    clippy::disallowed_types,
    reason = "every test binary compiles this module and uses a part of it; a skipped test must say so; a lab runs mkfs and mount"
)]

use std::io::Write as _;

pub mod api;
pub mod bench;
pub mod calls;
pub mod disk;
pub mod driver;
pub mod lab;
pub mod process;
pub mod raw;
pub mod snapshot;
pub mod tree;

pub use driver::Driver;
pub use lab::{Fs, Lab};
pub use snapshot::{Snapshot, assert_same};

/// Says on stderr that a test did not run, and why. On CI that is a failure: there, everything runs.
pub fn skip(reason: &str) {
    assert!(
        std::env::var_os("CI").is_none(),
        "CI is set, so nothing may be skipped: {reason}"
    );
    let test = std::thread::current().name().unwrap_or("?").to_owned();
    // Not eprintln!, which the test harness keeps to itself when a test passes.
    let _ = writeln!(std::io::stderr(), "SKIPPED: {test}: {reason}");
}

/// Whether this test runs in a guest (tests/guests): an emulated machine with another kernel, slow, and with quotas.
pub fn in_a_guest() -> bool {
    std::env::var_os("BAGGAGECLAIM_IN_A_GUEST").is_some()
}

/// Says in a guest how far a long test is. A guest that says nothing for minutes is taken to hang.
pub fn say_in_a_guest(how_far: &str) {
    if in_a_guest() {
        // Not eprintln!, which the test harness keeps to itself.
        let _ = writeln!(std::io::stderr(), "{how_far}");
    }
}

/// Says that a test did not run for want of something that the guests have: there it runs, or fails.
pub fn skip_outside_guests(reason: &str) {
    if in_a_guest() {
        skip(reason);
    }
    let test = std::thread::current().name().unwrap_or("?").to_owned();
    let _ = writeln!(
        std::io::stderr(),
        "NOT HERE, but in `make guests`: {test}: {reason}"
    );
}

/// Says that a test did not run in a guest, since it shows nothing there that depends on the kernel.
pub fn not_in_guests(reason: &str) {
    let test = std::thread::current().name().unwrap_or("?").to_owned();
    let _ = writeln!(
        std::io::stderr(),
        "NOT IN GUESTS, but in `make test`: {test}: {reason}"
    );
}

/// Whether the kernel is this one or a newer one. What a kernel can is found by trying; this is for tests that know
/// what must be found.
pub fn kernel_is(major: u32, minor: u32) -> bool {
    let name = rustix::system::uname();
    let release = name.release().to_string_lossy().into_owned();
    let mut numbers = release
        .split(|c: char| !c.is_ascii_digit())
        .map(|word| word.parse().unwrap_or(0));
    let mut next = || numbers.next().unwrap_or(0);
    (next(), next()) >= (major, minor)
}

/// Whether overlays can be mounted by descriptors.
pub fn has_descriptors() -> bool {
    kernel_is(6, 13)
}

/// Whether limits on projects can be set: by `quotactl_fd` (Linux 5.14).
pub fn has_project_quotas() -> bool {
    kernel_is(5, 14)
}

/// Says that a test did not run because this kernel is too old for what it is about, which is as it must be.
pub fn too_old(for_what: &str) {
    let test = std::thread::current().name().unwrap_or("?").to_owned();
    let _ = writeln!(
        std::io::stderr(),
        "NOT HERE: {test}: this kernel is too old for {for_what}"
    );
}

/// Whether this process may mount things.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Ends the test, loudly, when it does not run as root.
macro_rules! require_root {
    () => {
        if !$crate::common::is_root() {
            $crate::common::skip("needs root");
            return;
        }
    };
}

/// A [`Lab`] of a kind; ends the test, loudly, when this machine cannot make one.
macro_rules! require_lab {
    ($fs:expr) => {
        match $crate::common::Lab::try_new($fs) {
            Ok(lab) => lab,
            Err(reason) => {
                $crate::common::skip(&reason);
                return;
            }
        }
    };
}

/// A [`Lab`] that enforces limits on projects; ends the test where the kernel has no quotas, which only a guest may not.
macro_rules! require_quota_lab {
    ($fs:expr) => {{
        if !$crate::common::has_project_quotas() {
            $crate::common::too_old("limits on projects");
            return;
        }
        match $crate::common::Lab::try_new($fs) {
            Ok(lab) => lab,
            Err(reason) => {
                $crate::common::skip_outside_guests(&reason);
                return;
            }
        }
    }};
}

pub(crate) use bench::require_bench;
pub(crate) use require_lab;
pub(crate) use require_quota_lab;
pub(crate) use require_root;
