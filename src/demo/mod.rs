//! The product shown at work on one machine: a pipeline of steps over the real socket. It is a module of
//! the binary, and a client of the library: what it needs from the driver it asks for as an orchestrator
//! would, through the kubelet double and the admin verbs, from a driver that is a process of its own.
//!
//! - `stage`: where it runs; a mount namespace of its own, a filesystem, everything gone at the end;
//! - `driver`: the driver's process;
//! - `step`: what runs in a pod, seeing its volumes where a container would;
//! - `tree`, `project`: what the steps work on;
//! - `story`: the pipeline itself, and what it has to prove; `story/transfer`: its part in another pool;
//! - `report`: how that looks.

mod driver;
mod error;
mod project;
mod report;
mod stage;
mod step;
mod story;
mod tree;

use std::path::PathBuf;

use baggageclaim::config::{self, DemoFilesystem as Filesystem};

use error::Error;

/// The settings of one run.
#[derive(Debug, Clone)]
struct Options {
    /// The binary that is the driver.
    program: PathBuf,
    /// Where to make the pool; `None`: on a filesystem of the demo's own.
    pool: Option<PathBuf>,
    /// The filesystem of its own to make.
    filesystem: Filesystem,
    /// Leave the pool, or the image that holds it, and the driver's log.
    keep: bool,
    /// How many compilers may run at once; `None`: as cargo likes.
    jobs: Option<u16>,
    /// What the `get` step fetches beside the crates; `None`: what this machine has.
    tree: Option<PathBuf>,
    /// Cargo's home, where the sources of this project's dependencies are.
    cargo_home: Option<PathBuf>,
    /// Whether the screen may be coloured.
    colour: bool,
}

impl Options {
    fn resolve(flags: config::Demo, program: PathBuf) -> Self {
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

/// Runs the pipeline and shows it. An error when something could not be done, or was done and not proved.
///
/// It runs on a thread of its own with a private mount namespace, which that thread's children share.
/// Nothing is left of the mounts when the last of these is gone, however they end.
pub(crate) fn run(flags: config::Demo) -> Result<(), Box<dyn std::error::Error>> {
    if !rustix::process::geteuid().is_root() {
        return Err(Error::NeedsRoot.into());
    }
    let options = Options::resolve(flags, std::env::current_exe()?);
    let thread = std::thread::Builder::new()
        .name("demo".to_owned())
        .spawn(move || play(&options))
        .map_err(|source| Error::io("start a thread for", "/proc/self/task", source))?;
    thread.join().unwrap_or(Err(Error::Panicked))?;
    Ok(())
}

fn play(options: &Options) -> Result<(), Error> {
    let stage = stage::Stage::set(options)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(|source| Error::io("start threads for", "/proc/self/task", source))?;
    let result = runtime.block_on(async {
        tokio::select! {
            result = story::tell(&stage, options) => result,
            signal = interrupted() => signal.and(Err(Error::Interrupted)),
        }
    });
    // A step that is being interrupted may still be in a system call; only that is waited for.
    stage.end_steps();
    runtime.shutdown_timeout(std::time::Duration::from_secs(5));
    match (result, stage.clear()) {
        (Err(failed), Err(left)) => {
            // The first is the cause; the second is still to be known.
            stage::say(&left.to_string());
            Err(failed)
        }
        (result, cleared) => result.and(cleared),
    }
}

/// Ready when a signal asks the demo to end.
async fn interrupted() -> Result<(), Error> {
    use tokio::signal::unix::{SignalKind, signal};
    let listen = |kind| {
        signal(kind).map_err(|source| Error::io("listen for signals of", "/proc/self", source))
    };
    let mut terminate = listen(SignalKind::terminate())?;
    let mut hang_up = listen(SignalKind::hangup())?;
    let mut interrupt = listen(SignalKind::interrupt())?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = hang_up.recv() => {}
        _ = interrupt.recv() => {}
    }
    Ok(())
}
