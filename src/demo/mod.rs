//! `baggageclaim demo`: runs a pipeline on one machine and shows what each step cost. It starts a
//! driver as a process, and calls it through the kubelet double and the admin verbs. It belongs to
//! the binary and uses the library only as a client.
//!
//! - `sandbox`: a private mount namespace with a filesystem of its own;
//! - `driver`: the driver's process;
//! - `step`: runs work as in a pod's container;
//! - `tree`, `project`: the files that the steps work on;
//! - `pipeline`: the steps and what each proves;
//! - `report`: the output.

mod driver;
mod error;
mod options;
mod pipeline;
mod project;
mod report;
mod sandbox;
mod step;
mod tree;

use baggageclaim::config;

use error::Error;
use options::Options;

/// Runs the pipeline and prints the report. Returns an error if a step fails or a claim is not
/// proved.
///
/// Runs on a thread with a private mount namespace, which the thread's children share. The kernel
/// removes the mounts when the last of these processes ends.
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
    let sandbox = sandbox::Sandbox::make(options)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(|source| Error::io("start threads for", "/proc/self/task", source))?;
    let result = runtime.block_on(async {
        tokio::select! {
            result = pipeline::run(&sandbox, options) => result,
            signal = interrupted() => signal.and(Err(Error::Interrupted)),
        }
    });
    // A step may still be in a system call; wait for no more than that.
    sandbox.end_steps();
    runtime.shutdown_timeout(std::time::Duration::from_secs(5));
    match (result, sandbox.clear()) {
        (Err(failed), Err(left)) => {
            // The first error is the cause; print the second one, too.
            sandbox::say(&left.to_string());
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
