//! Runs a step as its container would: on a thread with a mount namespace in which the pod's
//! volumes have fixed paths, because build tools remember paths. Only this module of the binary
//! executes programs.

#![expect(
    clippy::disallowed_types,
    reason = "a step is the user's work: it compiles. The driver itself executes nothing"
)]

use std::ffi::OsString;
use std::io::ErrorKind;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use rustix::mount::MountPropagationFlags;
use rustix::process::Pid;

use super::error::Error;
use super::sandbox::{Groups, Sandbox};

/// A step's container: where the step sees its volumes.
#[derive(Debug, Clone)]
pub(super) struct Container {
    root: PathBuf,
    groups: Groups,
}

impl Container {
    /// A volume of the step.
    pub(super) fn volume(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }

    /// Runs a program to its end and returns its output.
    pub(super) fn run(
        &self,
        program: &str,
        configure: impl FnOnce(&mut Command),
    ) -> Result<Output, Error> {
        let mut command = Command::new(program);
        configure(&mut command);
        let shown = shown(&command);
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // A process group, so that its compilers can be killed with it.
            .process_group(0);
        let child = command.spawn().map_err(|source| not_run(program, source))?;
        let leader = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        if let Some(leader) = leader {
            self.groups.add(leader);
        }
        let output = child.wait_with_output();
        if let Some(leader) = leader {
            self.groups.remove(leader);
        }
        let output = output.map_err(|source| not_run(program, source))?;
        if output.status.success() {
            return Ok(output);
        }
        Err(failed(shown, &output))
    }
}

/// Runs `work` on a thread with a private mount namespace, in which the volumes are bound to the
/// names that the step uses.
pub(super) async fn in_container<T: Send + 'static>(
    sandbox: &Sandbox,
    volumes: Vec<(String, PathBuf)>,
    work: impl FnOnce(&Container) -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    let container = Container {
        root: sandbox.step_root(),
        groups: sandbox.groups.clone(),
    };
    on_thread(move || {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS).map_err(Error::NeedsMounts)?;
        let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
        rustix::mount::mount_change("/", private)
            .map_err(|errno| Error::io("make private", "/", errno))?;
        for (name, target) in &volumes {
            let seen = container.volume(name);
            std::fs::create_dir_all(&seen).map_err(|source| Error::io("make", &seen, source))?;
            rustix::mount::mount_bind(target, &seen)
                .map_err(|errno| Error::io("bind", &seen, errno))?;
        }
        work(&container)
    })
    .await
}

/// Runs blocking work on a thread.
pub(super) async fn on_thread<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    let (answer, answered) = tokio::sync::oneshot::channel();
    std::thread::Builder::new()
        .name("step".to_owned())
        .spawn(move || drop(answer.send(work())))
        .map_err(|source| Error::io("start a thread for", "/proc/self/task", source))?;
    answered.await.unwrap_or(Err(Error::Panicked))
}

/// Runs a program that prepares the sandbox. Also looks in the directories of root's programs.
pub(super) fn run_program(program: &str, arguments: &[&str], paths: &[&Path]) -> Result<(), Error> {
    for prefix in ["", "/usr/sbin/", "/sbin/"] {
        let mut command = Command::new(format!("{prefix}{program}"));
        command.args(arguments).args(paths).stdin(Stdio::null());
        match command.output() {
            Ok(output) if output.status.success() => return Ok(()),
            Ok(output) => return Err(failed(shown(&command), &output)),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(source) => return Err(not_run(program, source)),
        }
    }
    Err(Error::Missing(format!("{program} (`make deps`)")))
}

/// Runs a command, which must succeed.
pub(super) fn output(command: &mut Command) -> Result<Output, Error> {
    let output = command.stdin(Stdio::null()).output();
    let output = output.map_err(|source| not_run("baggageclaim", source))?;
    if output.status.success() {
        return Ok(output);
    }
    Err(failed(shown(command), &output))
}

fn not_run(program: &str, source: std::io::Error) -> Error {
    if source.kind() == ErrorKind::NotFound {
        Error::Missing(format!("{program} in PATH"))
    } else {
        Error::io("run", program, source)
    }
}

fn failed(program: String, output: &Output) -> Error {
    let said = String::from_utf8_lossy(&output.stderr);
    let lines: Vec<&str> = said.trim().lines().collect();
    let last = lines[lines.len().saturating_sub(8)..].join("\n");
    Error::Program {
        program,
        detail: format!("{}: {last}", output.status),
    }
}

fn shown(command: &Command) -> String {
    let words: Vec<OsString> = std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(OsString::from)
        .collect();
    words.join(" ".as_ref()).display().to_string()
}
