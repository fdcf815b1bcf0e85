//! The product shown at work on one machine: a pipeline of steps over the real socket.
//!
//! This is the top floor. It may use every other room and none may use it: what it needs from the driver it
//! asks for as an orchestrator would, through [`kubelet`] and the admin verbs, from a driver that runs as a process
//! of its own. What is here:
//!
//! - `stage`: where it plays; a mount namespace of its own, a filesystem, everything gone at the end;
//! - `driver`: the driver's process;
//! - `step`: what runs in a pod, seeing its volumes where a container would;
//! - `tree`, `project`: what the steps work on;
//! - `story`: the pipeline itself, and what it has to prove; `story/transfer`: its part in another pool;
//! - `report`: how that looks.

mod driver;
mod error;
pub mod kubelet;
mod project;
mod report;
mod stage;
mod step;
mod story;
mod tree;

use std::path::PathBuf;

pub use error::Error;

/// What the demo was told.
#[derive(Debug, Clone)]
pub struct Options {
    /// The binary that is the driver.
    pub program: PathBuf,
    /// Where to make the pool; `None`: on a filesystem of the demo's own.
    pub pool: Option<PathBuf>,
    /// The filesystem of its own to make.
    pub filesystem: Filesystem,
    /// Leave the pool, or the image that holds it, and the driver's log.
    pub keep: bool,
    /// How many compilers may run at once; `None`: as cargo likes.
    pub jobs: Option<u16>,
    /// What the `get` step fetches beside the crates; `None`: what this machine has.
    pub tree: Option<PathBuf>,
    /// Cargo's home, where the sources of this project's dependencies are.
    pub cargo_home: Option<PathBuf>,
    /// Whether the screen may be coloured.
    pub colour: bool,
}

/// A filesystem that the demo can make.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Filesystem {
    /// The first that this machine can.
    #[default]
    Auto,
    /// ext4 with a journal.
    Ext4,
    /// xfs with reflinks.
    Xfs,
    /// btrfs.
    Btrfs,
}

/// Plays the pipeline and shows it. An error when something could not be done, or was done and not proved.
///
/// It runs on a thread of its own, whose mounts nobody else sees; that thread's children see them, and nothing of them
/// is left when the last of these is gone, however they end.
pub async fn run(options: Options) -> Result<(), Error> {
    if !rustix::process::geteuid().is_root() {
        return Err(Error::NeedsRoot);
    }
    let (answer, answered) = tokio::sync::oneshot::channel();
    let spawned = std::thread::Builder::new()
        .name("demo".to_owned())
        .spawn(move || drop(answer.send(play(&options))));
    spawned.map_err(|source| Error::io("start a thread for", "/proc/self/task", source))?;
    answered.await.unwrap_or(Err(Error::Panicked))
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
    // A step that is being interrupted may still be in a system call; nobody waits for more than that.
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

/// Ready when somebody wants the demo to end.
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
