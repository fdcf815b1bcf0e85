//! Debian's kernels and qemu, downloaded by apt and unpacked below `target/guests`; nothing is
//! installed. An earlier run's downloads are reused: each kernel's directory is named after its
//! release, and gets that name once it is complete.
//!
//! The kernel of an older Debian comes from this machine's mirror, by a sources list below
//! `target/guests`. The machine's own sources stay unchanged.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The missing thing, in words.
pub(crate) type Result<T> = std::result::Result<T, String>;

/// A kernel, unpacked.
#[derive(Debug, Clone)]
pub(crate) struct Kernel {
    /// The beginning of its release: `6.1`.
    pub(crate) series: &'static str,
    pub(crate) image: PathBuf,
    /// Where its modules are: the directory `kernel` is in it.
    pub(crate) modules: PathBuf,
}

impl Kernel {
    /// Whether it has `quotactl_fd` (Linux 5.14), by which the driver sets limits.
    pub(crate) fn has_project_quotas(&self) -> bool {
        self.series != "5.10"
    }
}

/// Where everything is kept.
pub(crate) fn kept() -> PathBuf {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent();
    target.expect("it is in target/").join("guests")
}

/// Series that this machine's own Debian does not offer, and the release whose kernel each is.
const OLDER: [(&str, &str); 1] = [("5.10", "bullseye")];

/// Whether a series is of an older Debian, which a mirror may drop.
pub(crate) fn is_older(series: &str) -> bool {
    OLDER.iter().any(|(older, _)| *older == series)
}

/// The newest cloud kernel of a series that Debian offers, or the one that is kept.
pub(crate) fn kernel(series: &'static str) -> Result<Kernel> {
    let kernels = kept().join("kernels");
    make_dir(&kernels)?;
    let is_of_series = |release: &str| {
        let rest = release.strip_prefix(series);
        rest.is_some_and(|rest| rest.starts_with(['.', '-', '+']))
    };
    let known = names(&kernels)?.into_iter().find(|name| is_of_series(name));
    let release = match known {
        Some(release) => release,
        None => fetch_kernel(series, &kernels)?,
    };
    let root = kernels.join(&release);
    Ok(Kernel {
        series,
        image: root.join(format!("boot/vmlinuz-{release}")),
        modules: root.join(format!("lib/modules/{release}")),
    })
}

fn fetch_kernel(series: &str, kernels: &Path) -> Result<String> {
    let release = OLDER.iter().find(|(older, _)| *older == series);
    let apt = match release {
        Some((_, release)) => Apt::of_release(release)?,
        None => Apt::default(),
    };
    let prefix = format!("linux-image-{series}.");
    let mut offered = apt.offered(&prefix)?;
    if offered.is_empty() {
        let updated = run(apt.command("apt-get").args(["update", "-q"]));
        offered = apt.offered(&prefix)?;
        if offered.is_empty() {
            updated?;
        }
    }
    let newest = offered.into_iter().max_by_key(|name| numbers(name));
    let package = newest.ok_or_else(|| format!("apt offers no {prefix}*-cloud-amd64"))?;
    let release = package["linux-image-".len()..].to_owned();
    let fresh = kernels.join(format!("new-{release}"));
    clear(&fresh)?;
    let packages = fresh.join("packages");
    make_dir(&packages)?;
    run(apt
        .command("apt-get")
        .args(["download", "-q", &package])
        .current_dir(&packages))?;
    unpack(&packages, &fresh)?;
    place(&fresh, &kernels.join(&release))?;
    Ok(release)
}

/// How apt is asked.
#[derive(Debug, Default)]
struct Apt {
    /// `-o` of each; none: as this machine asks it.
    options: Vec<String>,
}

impl Apt {
    /// For another release, from this machine's mirrors. Its lists are kept apart from the
    /// machine's.
    fn of_release(release: &str) -> Result<Self> {
        const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
        let signed = if Path::new(KEYRING).exists() {
            format!("[signed-by={KEYRING}] ")
        } else {
            String::new()
        };
        let targets = [
            "indextargets",
            "--format",
            "$(REPO_URI)",
            "Created-By: Packages",
        ];
        let listed = run(Command::new("apt-get").args(targets))?;
        let mirrors: BTreeSet<&str> = listed.lines().collect();
        let sources = mirrors.iter().filter_map(|uri| {
            let suite = match uri.trim_end_matches('/').rsplit('/').next()? {
                "debian" => release.to_owned(),
                "debian-security" => format!("{release}-security"),
                _ => return None,
            };
            Some(format!("deb {signed}{uri} {suite} main\n"))
        });
        let sources: String = sources.collect();
        if sources.is_empty() {
            return Err("apt has no mirror of Debian".to_owned());
        }
        let root = kept().join("apt").join(release);
        for dir in ["lists/partial", "cache/archives/partial"] {
            make_dir(&root.join(dir))?;
        }
        let list = root.join("sources.list");
        fs::write(&list, sources).map_err(|error| format!("{}: {error}", list.display()))?;
        let options = [
            format!("Dir::Etc::SourceList={}", list.display()),
            "Dir::Etc::SourceParts=-".to_owned(),
            format!("Dir::State::Lists={}", root.join("lists").display()),
            format!("Dir::Cache={}", root.join("cache").display()),
            "Acquire::Languages=none".to_owned(),
            // An old release is signed and not signed again.
            "Acquire::Check-Valid-Until=false".to_owned(),
        ];
        Ok(Self {
            options: options.to_vec(),
        })
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        for option in &self.options {
            command.args(["-o", option]);
        }
        command
    }

    /// The cloud kernels that it knows, signed or not where there is no other.
    fn offered(&self, prefix: &str) -> Result<Vec<String>> {
        let listed = run(self.command("apt-cache").args(["pkgnames", prefix]))?;
        let all = listed.lines().map(str::to_owned);
        Ok(all.filter(|name| name.ends_with("-cloud-amd64")).collect())
    }
}

/// The numbers in a name, by which versions are in order.
fn numbers(name: &str) -> Vec<u64> {
    let words = name.split(|c: char| !c.is_ascii_digit());
    words.filter_map(|word| word.parse().ok()).collect()
}

/// Programs that a guest or this program needs and that may not be installed: where they are, with
/// their libraries.
#[derive(Debug)]
pub(crate) struct Tools {
    root: PathBuf,
}

impl Tools {
    /// Those that are installed already stay where they are; the others are fetched.
    pub(crate) fn find() -> Result<Self> {
        let tools = Self {
            root: kept().join("tools"),
        };
        let wanted = [
            ("qemu-system-x86_64", "qemu-system-x86"),
            ("dmsetup", "dmsetup"),
        ];
        let missing: Vec<&str> = wanted
            .iter()
            .filter(|(program, _)| tools.program(program).is_err())
            .map(|(_, package)| *package)
            .collect();
        if !missing.is_empty() {
            let fresh = kept().join("tools.new");
            clear(&fresh)?;
            let packages = fresh.join("packages");
            make_dir(&packages.join("partial"))?;
            let fetch = || {
                run(Command::new("apt-get")
                    .args(["install", "-y", "-q", "--download-only"])
                    .args(["--no-install-recommends", "-o"])
                    .arg(format!("Dir::Cache::archives={}", packages.display()))
                    .args(&missing))
            };
            if fetch().is_err() {
                run(Command::new("apt-get").args(["update", "-q"]))?;
                fetch()?;
            }
            unpack(&packages, &fresh)?;
            clear(&tools.root)?;
            place(&fresh, &tools.root)?;
        }
        Ok(tools)
    }

    /// Where a program is.
    pub(crate) fn program(&self, name: &str) -> Result<PathBuf> {
        let installed = ["/usr/sbin", "/usr/bin", "/sbin", "/bin"];
        let places = installed
            .iter()
            .map(PathBuf::from)
            .chain(["usr/sbin", "usr/bin", "sbin", "bin"].map(|place| self.root.join(place)));
        let mut found = places.map(|place| place.join(name));
        found
            .find(|path| path.is_file())
            .ok_or_else(|| format!("{name} is missing"))
    }

    /// Where the loader finds the libraries of what was fetched.
    pub(crate) fn libraries(&self) -> String {
        let places = ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"];
        let places = places.map(|place| self.root.join(place).display().to_string());
        places.join(":")
    }

    /// Where qemu finds its firmware.
    pub(crate) fn firmware(&self) -> [PathBuf; 2] {
        ["usr/share/qemu", "usr/share/seabios"].map(|place| self.root.join(place))
    }
}

fn unpack(packages: &Path, into: &Path) -> Result<()> {
    for name in names(packages)? {
        let package = packages.join(name);
        if package
            .extension()
            .is_some_and(|extension| extension == "deb")
        {
            run(Command::new("dpkg-deb").arg("-x").arg(package).arg(into))?;
        }
    }
    clear(packages)
}

fn place(fresh: &Path, at: &Path) -> Result<()> {
    fs::rename(fresh, at).map_err(|error| format!("{}: {error}", at.display()))
}

#[expect(
    clippy::disallowed_methods,
    reason = "what is removed is a directory below target/ that this file alone makes"
)]
fn clear(dir: &Path) -> Result<()> {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(format!("{}: {error}", dir.display()))
        }
        _ => Ok(()),
    }
}

fn make_dir(dir: &Path) -> Result<()> {
    fs::create_dir_all(dir).map_err(|error| format!("{}: {error}", dir.display()))
}

fn names(dir: &Path) -> Result<BTreeSet<String>> {
    let entries = fs::read_dir(dir).map_err(|error| format!("{}: {error}", dir.display()))?;
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    Ok(names.collect())
}

/// Runs a program to its end; what it wrote.
pub(crate) fn run(command: &mut Command) -> Result<String> {
    let output = command
        .output()
        .map_err(|error| format!("cannot run {command:?}: {error}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(format!("{command:?}: {}: {}", output.status, said.trim()))
}
