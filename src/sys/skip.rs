//! What a unit test says that cannot run here: loudly, and on CI by failing. For the tests of all modules, which this one is below;
//! the tests in `tests/` have their own, of the same words.

/// Whether this is root, without whom most calls of this room cannot be tried.
#[must_use]
pub fn is_root_or_skip() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        skip(&"needs root");
    }
    root
}

/// Says loudly that this test did not run, and why. On CI that is a failure: there, everything runs.
pub fn skip(reason: &dyn std::fmt::Display) {
    assert!(
        std::env::var_os("CI").is_none(),
        "CI is set, so nothing may be skipped: {reason}"
    );
    let test = std::thread::current();
    eprintln!("SKIPPED: {:?}: {reason}", test.name().unwrap_or("?"));
}
