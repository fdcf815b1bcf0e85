//! Test programs in a guest: each runs to its end, and each of its tests is reported.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use super::init::tell;
use super::job::{Report, Suite};

/// Where the programs are in a guest.
pub(crate) const PROGRAMS: &str = "suites";

/// Runs them one after the other.
pub(crate) fn run_all(suites: &[Suite]) {
    for suite in suites {
        run(suite);
    }
}

fn run(suite: &Suite) {
    let mut child = Command::new(format!("/{PROGRAMS}/{}", suite.name))
        .args(&suite.arguments)
        .arg("--test-threads=2")
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        // A test that does not run here does not run anywhere.
        .env(super::IN_A_GUEST, "1")
        .env("CI", "1")
        .current_dir("/tmp")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("{}: {error}", suite.name));
    let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    let mut passed = 0;
    for line in lines.map_while(Result::ok) {
        println!("{line}");
        let Some((name, result)) = line
            .strip_prefix("test ")
            .and_then(|rest| rest.split_once(" ... "))
        else {
            continue;
        };
        if result.starts_with("ok") || result.starts_with("FAILED") {
            passed += usize::from(result.starts_with("ok"));
            tell(&Report::Test {
                suite: suite.name.clone(),
                name: name.to_owned(),
                passed: result.starts_with("ok"),
            });
        }
    }
    let status = child.wait().expect("wait");
    if !status.success() {
        let name = &suite.name;
        tell(&Report::Failed(format!(
            "{name}: {status}, {passed} tests passed"
        )));
    }
}
