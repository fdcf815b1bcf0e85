//! Shared code of the integration tests: filesystems, trees of files, comparisons of trees.
//!
//! - [`driver`]: the driver in this process, and a fake kubelet that calls it.
//! - [`process`]: a node's driver as a process, and its registration with kubelet.
//! - [`go`]: programs in Go, built for the tests.
//! - [`disk`]: a disk that loses writes, one that does not answer, and a slow one.
//! - [`lab`]: a filesystem of some kind in an image in memory, removed after the test.
//! - [`layers`]: layers that go from one engine to another.
//! - [`log`]: what is logged.
//! - [`net`]: network namespaces.
//! - [`peer_keys`]: the keys of drivers that are peers.
//! - [`tree`]: trees of files, plain and odd.
//! - [`snapshot`]: every visible property of a tree, as a value to compare.
//! - [`api`]: a fake API server.
//! - [`random`]: numbers that are the same for the same seed.
//! - [`raw`]: calls whose messages are bytes.
//! - [`bench`]: an engine on such a filesystem, with short method names.
//!
//! Only the bench and the layers know the product. The rest is tested on its own (`tests/lab.rs`).

#![allow(
    dead_code,
    unused_macros,
    unused_imports,
    unreachable_pub,
    clippy::print_stderr,
    clippy::disallowed_types,
    reason = "every test binary compiles this module and uses a part of it; \
              a skipped test must say so; a lab runs mkfs and mount"
)]

use std::io::Write as _;

pub mod api;
pub mod bench;
pub mod calls;
pub mod disk;
pub mod driver;
pub mod go;
pub mod lab;
pub mod layers;
pub mod log;
pub mod net;
pub mod peer_keys;
pub mod process;
pub mod random;
pub mod raw;
pub mod snapshot;
pub mod tree;

pub use driver::Driver;
pub use lab::{Fs, Lab};
pub use snapshot::{Snapshot, assert_same};

/// Reports on stderr that a test did not run, and why. In CI, where all must run, it fails.
pub fn skip(reason: &str) {
    assert!(
        std::env::var_os("CI").is_none(),
        "CI is set, so nothing may be skipped: {reason}"
    );
    let test = std::thread::current().name().unwrap_or("?").to_owned();
    // eprintln! would not show: the test harness captures it when a test passes.
    let _ = writeln!(std::io::stderr(), "SKIPPED: {test}: {reason}");
}

/// Whether this test runs in a guest (tests/guests): a slow virtual machine with another kernel.
pub fn in_a_guest() -> bool {
    std::env::var_os("BAGGAGECLAIM_IN_A_GUEST").is_some()
}

/// Reports in a guest how far a long test is. A silent guest is taken to hang after some minutes.
pub fn say_in_a_guest(how_far: &str) {
    if in_a_guest() {
        // Not eprintln!, which the test harness captures.
        let _ = writeln!(std::io::stderr(), "{how_far}");
    }
}

/// Reports that a test did not run because it needs a guest's features; in a guest it must run.
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

/// Reports that a test did not run in a guest, since nothing in it depends on the kernel.
pub fn not_in_guests(reason: &str) {
    let test = std::thread::current().name().unwrap_or("?").to_owned();
    let _ = writeln!(
        std::io::stderr(),
        "NOT IN GUESTS, but in `make test`: {test}: {reason}"
    );
}

/// Whether the kernel has at least this version: for tests that know what must be detected.
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

/// Whether project limits can be set: by `quotactl_fd` (Linux 5.14).
pub fn has_project_quotas() -> bool {
    kernel_is(5, 14)
}

/// Reports that a test did not run because this kernel is too old for it, which is no failure.
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

/// Skips the test with a message if it does not run as root.
macro_rules! require_root {
    () => {
        if !$crate::common::is_root() {
            $crate::common::skip("needs root");
            return;
        }
    };
}

/// A [`Lab`] of a kind; skips the test with a message if this machine cannot make one.
macro_rules! require_lab {
    ($fs:expr) => {
        require_lab!(made $crate::common::Lab::try_new($fs))
    };
    ($fs:expr, $bytes:expr) => {
        require_lab!(made $crate::common::Lab::try_sized($fs, $bytes))
    };
    (made $lab:expr) => {
        match $lab {
            Ok(lab) => lab,
            Err(reason) => {
                $crate::common::skip(&reason);
                return;
            }
        }
    };
}

/// A [`Lab`] with enforced project quotas; skips the test in a guest whose kernel has no quotas.
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
