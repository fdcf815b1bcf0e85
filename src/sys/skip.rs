//! How a unit test reports that it cannot run here: it prints so, and on CI it fails. For unit
//! tests of all modules. The tests in `tests/` have their own copy.

/// Whether the process is root, which most calls in this module need.
#[must_use]
pub fn is_root_or_skip() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        skip(&"needs root");
    }
    root
}

/// Prints that this test did not run, and why. Fails on CI, where every test must run.
pub fn skip(reason: &dyn std::fmt::Display) {
    assert!(
        std::env::var_os("CI").is_none(),
        "CI is set, so nothing may be skipped: {reason}"
    );
    let test = std::thread::current();
    eprintln!("SKIPPED: {:?}: {reason}", test.name().unwrap_or("?"));
}
