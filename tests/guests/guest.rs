//! One guest: a qemu process, its messages, and its end.
//!
//! It has two serial ports: the console, and one for [`Report`]s, a line of JSON each. A guest that
//! is silent for long hangs: it is killed, and the end of its console is the message.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use super::debian::{Kernel, Result, Tools};
use super::job::{Job, Report};

/// For how long a guest may say nothing: an emulated processor is slow, and this machine may do
/// much else.
const SILENCE: Duration = Duration::from_secs(300);
/// How often a machine is switched on before it is given up.
const BOOTS: usize = 3;
/// How much of the console is kept for a message.
const CONSOLE_LINES: usize = 120;

/// The parts to start guests of one kernel.
#[derive(Debug)]
pub(crate) struct Machine<'a> {
    pub(crate) tools: &'a Tools,
    pub(crate) kernel: &'a Kernel,
    pub(crate) image: PathBuf,
    pub(crate) mebibytes: u32,
}

/// A machine that runs. Killed when it is dropped.
pub(crate) struct Guest {
    child: Child,
    console: Arc<Mutex<VecDeque<String>>>,
    reports: mpsc::Receiver<Event>,
    started: Instant,
    _place: tempfile::TempDir,
}

#[derive(Debug)]
enum Event {
    Report(Report),
    /// Something was written to the console.
    Life,
    /// The port of reports is closed.
    End,
}

impl Machine<'_> {
    /// Starts a guest that does `job`; `drives` are what qemu's `-drive` takes.
    ///
    /// A kernel that rewrites its own code while it starts can trip over that in an emulated
    /// machine on a busy host. Nothing of ours has run by then and no disk was touched: it is
    /// switched on again, and said so.
    pub(crate) fn start(&self, job: &Job, drives: &[String]) -> Result<Guest> {
        for _ in 0..BOOTS {
            let mut guest = self.switch_on(job, drives)?;
            let why = match guest.next() {
                Ok(Some(Report::Up)) => return Ok(guest),
                Ok(Some(other)) => return Err(format!("{other:?} before the machine is up")),
                Ok(None) => guest.console(),
                Err(why) => why,
            };
            let series = self.kernel.series;
            eprintln!("guests: Linux {series} did not come up:\n{why}");
        }
        Err(format!("Linux {} does not come up", self.kernel.series))
    }

    fn switch_on(&self, job: &Job, drives: &[String]) -> Result<Guest> {
        let place = tempfile::tempdir().map_err(|error| error.to_string())?;
        let socket = place.path().join("reports");
        let listener = UnixListener::bind(&socket).map_err(|error| error.to_string())?;
        // It dies with this process, however that dies.
        let mut command = Command::new("setpriv");
        command
            .args(["--pdeathsig", "KILL", "nice", "-n", "10"])
            .arg(self.tools.program("qemu-system-x86_64")?)
            .env("LD_LIBRARY_PATH", self.tools.libraries());
        for firmware in self.tools.firmware() {
            if firmware.is_dir() {
                command.arg("-L").arg(firmware);
            }
        }
        command
            .args(["-nodefaults", "-no-user-config", "-display", "none"])
            .args(["-no-reboot", "-accel", "tcg,thread=multi", "-cpu", "max"])
            .args(["-smp", "2", "-m", &self.mebibytes.to_string()])
            .arg("-kernel")
            .arg(&self.kernel.image)
            .arg("-initrd")
            .arg(&self.image)
            .arg("-append")
            .arg(format!(
                // Whether its clocks are good is tried in real time, which an emulated machine has
                // not got. A kernel that finds one bad rewrites its own code, and the emulator may
                // run what is half rewritten (int3 in sched_clock_…).
                "console=ttyS0 panic=-1 loglevel=3 no_timer_check tsc=reliable {}",
                job.argument()
            ))
            .args(["-chardev", "stdio,id=console,signal=off"])
            .args(["-serial", "chardev:console", "-chardev"])
            .arg(format!("socket,id=reports,path={}", socket.display()))
            .args(["-serial", "chardev:reports"]);
        for drive in drives {
            command.args(["-drive", drive]);
        }
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| format!("qemu: {error}"))?;

        let (sender, reports) = mpsc::channel();
        let console = Arc::new(Mutex::new(VecDeque::new()));
        let pipes: [Box<dyn std::io::Read + Send>; 2] = [
            Box::new(child.stdout.take().expect("piped")),
            Box::new(child.stderr.take().expect("piped")),
        ];
        for pipe in pipes {
            let (console, sender) = (console.clone(), sender.clone());
            std::thread::spawn(move || follow(pipe, &console, &sender));
        }
        std::thread::spawn(move || {
            // A qemu that does not come this far ends, and closes its console.
            if let Ok((stream, _)) = listener.accept() {
                for line in BufReader::new(stream).lines() {
                    let Ok(line) = line else { break };
                    // An unfinished line of the killed machine is no report.
                    if let Ok(report) = serde_json::from_str(line.trim())
                        && sender.send(Event::Report(report)).is_err()
                    {
                        break;
                    }
                }
            }
            let _ = sender.send(Event::End);
        });
        Ok(Guest {
            child,
            console,
            reports,
            started: Instant::now(),
            _place: place,
        })
    }
}

fn follow(
    pipe: impl std::io::Read,
    console: &Mutex<VecDeque<String>>,
    sender: &mpsc::Sender<Event>,
) {
    let mut reader = BufReader::new(pipe);
    let mut line = Vec::new();
    while matches!(reader.read_until(b'\n', &mut line), Ok(read) if read > 0) {
        let text = String::from_utf8_lossy(&line).trim_end().to_owned();
        line.clear();
        if std::env::var_os("BAGGAGECLAIM_GUESTS_CONSOLE").is_some() {
            eprintln!("    | {text}");
        }
        let mut console = console.lock().expect("no reader panicked");
        console.push_back(text);
        if console.len() > CONSOLE_LINES {
            console.pop_front();
        }
        drop(console);
        let _ = sender.send(Event::Life);
    }
}

impl Guest {
    /// The next report; `None` when the machine is off.
    pub(crate) fn next(&mut self) -> Result<Option<Report>> {
        self.next_before(None).map(|report| match report {
            Next::Report(report) => Some(report),
            Next::Off | Next::Late => None,
        })
    }

    /// The same, waiting no longer than until a moment.
    pub(crate) fn next_before(&mut self, moment: Option<Instant>) -> Result<Next> {
        let mut heard = Instant::now();
        loop {
            let silence = (heard + SILENCE).saturating_duration_since(Instant::now());
            let left = moment.map(|moment| moment.saturating_duration_since(Instant::now()));
            match self
                .reports
                .recv_timeout(left.map_or(silence, |left| left.min(silence)))
            {
                Ok(Event::Report(report)) => return Ok(Next::Report(report)),
                Ok(Event::Life) => heard = Instant::now(),
                Ok(Event::End) | Err(mpsc::RecvTimeoutError::Disconnected) => {
                    return Ok(Next::Off);
                }
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    if moment.is_some_and(|moment| Instant::now() >= moment) {
                        return Ok(Next::Late);
                    }
                    return Err(format!(
                        "the guest hangs: nothing was heard of it for {SILENCE:?}\n{}",
                        self.console()
                    ));
                }
            }
        }
    }

    /// The last lines of the console.
    pub(crate) fn console(&self) -> String {
        let console = self.console.lock().expect("no reader panicked");
        let lines: Vec<&str> = console.iter().map(String::as_str).collect();
        lines.join("\n")
    }

    pub(crate) fn age(&self) -> Duration {
        self.started.elapsed()
    }

    /// Cuts the power; returns the lines that were not read yet.
    pub(crate) fn kill(mut self) -> Vec<Report> {
        self.child.kill().expect("kill");
        self.child.wait().expect("wait");
        let mut unheard = Vec::new();
        while let Ok(Next::Report(report)) = self.next_before(None) {
            unheard.push(report);
        }
        unheard
    }
}

/// The lines that arrived.
#[derive(Debug)]
pub(crate) enum Next {
    Report(Report),
    /// The machine is off.
    Off,
    /// Nothing came in time.
    Late,
}

impl Drop for Guest {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            let _gone = self.child.kill();
        }
        let _reaped = self.child.wait();
    }
}

/// A drive of qemu on a plain file.
pub(crate) fn drive(path: &Path) -> String {
    format!("if=virtio,format=raw,file={}", path.display())
}
