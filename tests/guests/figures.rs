//! The counters of a run, and its last line of output, which `make torture` adds up.

use std::fmt;

use super::verdict::Verdict;

/// The counts, and what was found in words.
#[derive(Debug, Default)]
pub(crate) struct Figures {
    pub(crate) operations: u64,
    pub(crate) kills: u64,
    pub(crate) cuts: u64,
    pub(crate) full_disks: u64,
    imports: u64,
    cut_imports: u64,
    lost: usize,
    leaked: usize,
    wrong: usize,
    pub(crate) found: Vec<String>,
    pub(crate) missing: Vec<String>,
}

impl Figures {
    /// The findings after a cut.
    pub(crate) fn hear(&mut self, what: &str, verdict: &Verdict) {
        self.imports += verdict.imports;
        self.cut_imports += verdict.cut_imports;
        self.lost += verdict.lost.len();
        self.leaked += verdict.leaked.len();
        self.wrong += verdict.wrong.len();
        if !verdict.is_good() {
            eprintln!("FAULT     {what}: {verdict:?}");
            self.found.push(format!("{what}: {verdict:?}"));
        }
    }

    /// Something else that is not as it should be.
    pub(crate) fn failed(&mut self, what: &str) {
        eprintln!("FAULT     {what}");
        self.wrong += 1;
        self.found.push(what.to_owned());
    }

    /// Tests that this machine cannot run. On CI they are failures: there, everything runs.
    pub(crate) fn missing(&mut self, what: &str, why: &str) {
        if std::env::var_os("CI").is_some() {
            self.failed(&format!("CI is set, so {what} has to run: {why}"));
        } else {
            self.missing.push(format!("{what}: {why}"));
        }
    }

    /// Features that no kernel promises. They are reported, also on CI, and are no failure.
    pub(crate) fn not_offered(&mut self, what: &str, why: &str) {
        self.missing.push(format!("{what}: {why}"));
    }
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "figures: operations={} kills={} cuts={} full_disks={} imports={} cut_imports={} \
             lost={} leaked={} wrong={}",
            self.operations,
            self.kills,
            self.cuts,
            self.full_disks,
            self.imports,
            self.cut_imports,
            self.lost,
            self.leaked,
            self.wrong
        )
    }
}
