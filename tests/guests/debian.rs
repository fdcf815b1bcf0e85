//! Debian's kernels and qemu, fetched by apt and unpacked below `target/guests`; nothing is installed. What is there from an
//! earlier run is used as it is: each kernel lies under its release, and is complete once it has that name.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What could not be had, in words.
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

/// Where everything is kept.
pub(crate) fn kept() -> PathBuf {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent();
    target.expect("it is in target/").join("guests")
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
    let prefix = format!("linux-image-{series}.");
    let mut offered = offered(&prefix)?;
    if offered.is_empty() {
        run(Command::new("apt-get").args(["update", "-q"]))?;
        offered = self::offered(&prefix)?;
    }
    let newest = offered.into_iter().max_by_key(|name| numbers(name));
    let package = newest.ok_or_else(|| format!("apt offers no {prefix}*-cloud-amd64"))?;
    let release = package["linux-image-".len()..].to_owned();
    let fresh = kernels.join(format!("new-{release}"));
    clear(&fresh)?;
    let packages = fresh.join("packages");
    make_dir(&packages)?;
    run(Command::new("apt-get")
        .args(["download", "-q", &package])
        .current_dir(&packages))?;
    unpack(&packages, &fresh)?;
    place(&fresh, &kernels.join(&release))?;
    Ok(release)
}

/// The packages that apt knows, signed or not where there is no other.
fn offered(prefix: &str) -> Result<Vec<String>> {
    let listed = run(Command::new("apt-cache").args(["pkgnames", prefix]))?;
    let all = listed.lines().map(str::to_owned);
    Ok(all.filter(|name| name.ends_with("-cloud-amd64")).collect())
}

/// The numbers in a name, by which versions are in order.
fn numbers(name: &str) -> Vec<u64> {
    let words = name.split(|c: char| !c.is_ascii_digit());
    words.filter_map(|word| word.parse().ok()).collect()
}

/// Programs that a guest or its keeper needs and that may not be installed: where they are, with their libraries.
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
