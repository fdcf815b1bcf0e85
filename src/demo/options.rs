//! The settings of one run of the demo, from its flags and the environment.
//! Nothing here runs a step.

use std::path::PathBuf;

use baggageclaim::config::{self, DemoFilesystem as Filesystem};

/// The settings of one run.
#[derive(Debug, Clone)]
pub(super) struct Options {
    /// The binary that is the driver.
    pub(super) program: PathBuf,
    /// Where to make the pool; `None`: on a filesystem that the demo makes.
    pub(super) pool: Option<PathBuf>,
    /// The filesystem that the demo makes.
    pub(super) filesystem: Filesystem,
    /// Keep the pool, or the image that holds it, and the driver's log.
    pub(super) keep: bool,
    /// The most compilers at once; `None`: cargo's default.
    pub(super) jobs: Option<u16>,
    /// What the `get` step fetches besides the crates; `None`: directories of this machine.
    pub(super) tree: Option<PathBuf>,
    /// Cargo's home, where the sources of this project's dependencies are.
    pub(super) cargo_home: Option<PathBuf>,
    /// Whether the output may have colours.
    pub(super) colour: bool,
}

impl Options {
    pub(super) fn resolve(flags: config::Demo, program: PathBuf) -> Self {
        let set = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        let cargo_home = flags
            .cargo_home
            .or_else(|| set("HOME").map(|home| PathBuf::from(home).join(".cargo")));
        Self {
            program,
            pool: flags.pool,
            filesystem: flags.fs,
            keep: flags.keep,
            jobs: flags.jobs,
            tree: flags.tree,
            cargo_home,
            colour: !flags.no_color && set("NO_COLOR").is_none(),
        }
    }
}
