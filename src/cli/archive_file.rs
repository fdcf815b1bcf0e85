//! The file or pipe at this end of an `export` or `import`.
//!
//! A file gets its name when it is complete. Before that it has a temporary name, which is always
//! removed. A thread of its own writes, so that ^C works during a long write.

use std::fs::File;
use std::io::{self, ErrorKind, IsTerminal as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags};
use rustix::io::Errno;
use tokio::sync::{mpsc, oneshot};

use crate::model::Tenant;
use crate::sys::printable;

/// How many parts wait between a file and the driver.
pub(super) const WAITING: usize = 4;

/// Why an archive did not arrive.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    #[error("{0} is a terminal, and an archive is binary data: {1}")]
    Terminal(&'static str, &'static str),
    #[error("{} exists already; --force replaces it", .0.display())]
    Exists(PathBuf),
    #[error("cannot read {}: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("cannot write {}: {source}", path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error("the reader of stdout closed the pipe early; the archive that it got is incomplete")]
    Cut,
    #[error("interrupted; the archive on stdout is incomplete")]
    InterruptedStdout,
    #[error("interrupted; the archive that {} got is incomplete", printable(.0.display()))]
    InterruptedPipe(PathBuf),
    #[error("interrupted; no file was written")]
    InterruptedFile,
    #[error("interrupted; nothing was imported")]
    InterruptedImport,
    #[error(
        "interrupted when the driver had the whole archive, so it may be imported: \
         `baggageclaim artifacts -n {0}` shows it"
    )]
    InterruptedLate(Tenant),
    #[error("the driver ended before the archive was complete; its log says why")]
    Incomplete,
}

/// Where an archive goes.
pub(super) struct Output {
    path: PathBuf,
    pub(super) sink: Sink,
}

pub(super) enum Sink {
    Stdout,
    /// A pipe or a device that is there.
    AsItIs(File),
    /// A file under another name, until it is complete.
    Temporary {
        file: File,
        path: PathBuf,
        replaces: bool,
    },
}

impl Output {
    /// Standard output, or the pipe or device that is there.
    pub(super) fn pipe(path: &Path) -> Result<Option<Self>, Failure> {
        let opened = |sink| Self {
            path: path.to_owned(),
            sink,
        };
        if path == Path::new("-") {
            if io::stdout().is_terminal() {
                let hint = "give a file with -o, or a pipe";
                return Err(Failure::Terminal("stdout", hint));
            }
            return Ok(Some(opened(Sink::Stdout)));
        }
        let there = std::fs::metadata(path).map(|there| there.file_type());
        if !there.is_ok_and(|there| there.is_fifo() || there.is_char_device()) {
            return Ok(None);
        }
        let file = File::options().write(true).open(path);
        let file = file.map_err(|source| Failure::Write {
            path: path.to_owned(),
            source,
        })?;
        Ok(Some(opened(Sink::AsItIs(file))))
    }

    /// A file that gets this name when it is complete.
    pub(super) fn temporary(path: &Path, force: bool) -> Result<Self, Failure> {
        let write = |source| Failure::Write {
            path: path.to_owned(),
            source,
        };
        match std::fs::metadata(path) {
            Ok(there) if there.is_file() && !force => {
                return Err(Failure::Exists(path.to_owned()));
            }
            Ok(there) if there.is_dir() => {
                return Err(write(ErrorKind::IsADirectory.into()));
            }
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(write(error)),
            Ok(_) | Err(_) => {}
        }
        let name = path.file_name();
        let name = name.ok_or_else(|| write(ErrorKind::InvalidInput.into()))?;
        let mut hidden = std::ffi::OsString::from(".");
        hidden.push(name);
        hidden.push(format!(".{}.part", std::process::id()));
        let temporary = path.with_file_name(hidden);
        let file = File::create_new(&temporary).map_err(write)?;
        Ok(Self {
            path: path.to_owned(),
            sink: Sink::Temporary {
                file,
                path: temporary,
                replaces: force,
            },
        })
    }

    /// What is written to.
    fn file(&self) -> io::Result<File> {
        match &self.sink {
            Sink::Stdout => io::stdout().as_fd().try_clone_to_owned().map(File::from),
            Sink::AsItIs(file) | Sink::Temporary { file, .. } => file.try_clone(),
        }
    }

    /// What is left if the command is interrupted.
    pub(super) fn interrupted(&self) -> Failure {
        match &self.sink {
            Sink::Stdout => Failure::InterruptedStdout,
            Sink::AsItIs(_) => Failure::InterruptedPipe(self.path.clone()),
            Sink::Temporary { .. } => Failure::InterruptedFile,
        }
    }

    pub(super) fn failed(&self, source: io::Error) -> Failure {
        match self.sink {
            Sink::Stdout if source.kind() == ErrorKind::BrokenPipe => Failure::Cut,
            _ => Failure::Write {
                path: self.path.clone(),
                source,
            },
        }
    }

    /// Gives the file its name.
    pub(super) fn complete(self) -> Result<(), Failure> {
        let Sink::Temporary {
            file,
            path,
            replaces,
        } = &self.sink
        else {
            return Ok(());
        };
        let named = file.sync_all().and_then(|()| {
            let named = if *replaces {
                rustix::fs::rename(path, &self.path)
            } else {
                name_new(path, &self.path)
            };
            named.map_err(io::Error::from)
        });
        named.map_err(|source| match source.kind() {
            ErrorKind::AlreadyExists => Failure::Exists(self.path.clone()),
            _ => self.failed(source),
        })
    }
}

/// Gives a file its name if nothing has it. The file may keep its old name, too.
fn name_new(old: &Path, new: &Path) -> Result<(), Errno> {
    match rustix::fs::renameat_with(CWD, old, CWD, new, RenameFlags::NOREPLACE) {
        // NFS and some FUSE filesystems cannot rename without replacing. They can link.
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => rustix::fs::link(old, new),
        renamed => renamed,
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        if let Sink::Temporary { path, .. } = &self.sink {
            // It has its name, or is not wanted.
            let _gone = std::fs::remove_file(path);
        }
    }
}

/// The thread that writes.
pub(super) struct Writer {
    pub(super) parts: mpsc::Sender<Vec<u8>>,
    ended: oneshot::Receiver<io::Result<()>>,
}

impl Writer {
    pub(super) fn start(output: &Output) -> Result<Self, Failure> {
        let mut file = output.file().map_err(|source| output.failed(source))?;
        let (parts, mut received) = mpsc::channel::<Vec<u8>>(WAITING);
        let (end, ended) = oneshot::channel();
        let write = move || {
            let mut written = Ok(());
            while let (Ok(()), Some(part)) = (&written, received.blocking_recv()) {
                written = file.write_all(&part);
            }
            drop(received);
            let _told = end.send(written);
        };
        let thread = std::thread::Builder::new().name("write".to_owned());
        let started = thread.spawn(write);
        started.map_err(|source| output.failed(source))?;
        Ok(Self { parts, ended })
    }

    /// Waits until all is written; why not, if it is not.
    pub(super) async fn end(&mut self) -> io::Result<()> {
        let (closed, _) = mpsc::channel(1);
        drop(std::mem::replace(&mut self.parts, closed));
        let ended = (&mut self.ended).await;
        ended.unwrap_or_else(|_| Err(ErrorKind::BrokenPipe.into()))
    }
}

/// What is read, and its size if it has one.
pub(super) fn input(path: &Path) -> Result<(File, Option<u64>), Failure> {
    let read = |source| Failure::Read {
        path: path.to_owned(),
        source,
    };
    let file = if path == Path::new("-") {
        let stdin = io::stdin();
        if stdin.is_terminal() {
            let hint = "give a file, or a pipe";
            return Err(Failure::Terminal("stdin", hint));
        }
        stdin.as_fd().try_clone_to_owned().map(File::from)
    } else {
        File::open(path)
    };
    let file = file.map_err(read)?;
    let about = file.metadata().map_err(read)?;
    if about.is_dir() {
        return Err(read(ErrorKind::IsADirectory.into()));
    }
    Ok((file, about.is_file().then_some(about.len())))
}
