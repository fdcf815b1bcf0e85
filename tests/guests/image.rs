//! The initial file system of a guest: programs with their libraries, and kernel modules, in the
//! cpio format that the kernel unpacks (`newc`,
//! Documentation/driver-api/early-userspace/buffer-format.rst).
//!
//! The programs are this machine's own files, stripped.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::debian::{Kernel, Result, Tools, run};

/// Where modules are in a guest, and what says which need which: a line for each, the module and
/// then what it needs.
pub(crate) const MODULES: &str = "modules";
pub(crate) const NEEDS: &str = "modules/needs";
/// Where Debian's loader looks for libraries.
const LIBRARIES: &str = "lib/x86_64-linux-gnu";

/// An image that is being put together.
#[derive(Debug, Default)]
pub(crate) struct Image {
    files: BTreeMap<PathBuf, Vec<u8>>,
    libraries: BTreeSet<PathBuf>,
}

impl Image {
    /// A file with this content.
    pub(crate) fn file(&mut self, at: &str, content: Vec<u8>) {
        self.files.insert(at.into(), content);
    }

    /// A program, stripped, and the libraries that it needs.
    pub(crate) fn program(&mut self, tools: &Tools, program: &Path, at: &str) -> Result<()> {
        let stripped = tempfile::NamedTempFile::new().map_err(|error| error.to_string())?;
        run(Command::new("strip")
            .arg("-o")
            .arg(stripped.path())
            .arg(program))?;
        self.file(at, read(stripped.path())?);
        let needs = run(Command::new("ldd")
            .arg(program)
            .env("LD_LIBRARY_PATH", tools.libraries()))?;
        for line in needs.lines() {
            let words: Vec<&str> = line.split_whitespace().collect();
            match words[..] {
                [_, "=>", path, ..] if path.starts_with('/') => {
                    self.libraries.insert(path.into());
                }
                [path, _] if path.starts_with('/') => {
                    self.file(path.trim_start_matches('/'), read(Path::new(path))?);
                }
                [_, "=>", "not", ..] => return Err(format!("{}: {line}", program.display())),
                _ => {}
            }
        }
        Ok(())
    }

    /// Modules with their dependencies. A built-in module needs no file.
    pub(crate) fn modules(&mut self, kernel: &Kernel, wanted: &[&str]) -> Result<()> {
        let mut found = BTreeMap::new();
        find_modules(&kernel.modules.join("kernel"), &mut found)?;
        let builtin = fs::read_to_string(kernel.modules.join("modules.builtin"));
        let builtin: BTreeSet<String> = builtin
            .unwrap_or_default()
            .lines()
            .filter_map(|line| module_name(Path::new(line)))
            .collect();
        let mut waiting: Vec<String> = wanted.iter().map(|name| (*name).to_owned()).collect();
        let mut needs = BTreeMap::new();
        while let Some(name) = waiting.pop() {
            if needs.contains_key(&name) || builtin.contains(&name) {
                continue;
            }
            let path = found
                .get(&name)
                .ok_or_else(|| format!("Linux {} has no module {name}", kernel.series))?;
            let bytes = unpacked(path)?;
            let needed = needed_by(&bytes);
            self.file(&format!("{MODULES}/{name}.ko"), bytes);
            waiting.extend(needed.iter().cloned());
            needs.insert(name, needed);
        }
        let mut text = String::new();
        for (name, needed) in &needs {
            let _ = writeln!(text, "{name} {}", needed.join(" "));
        }
        self.file(NEEDS, text.into_bytes());
        Ok(())
    }

    /// Writes it.
    pub(crate) fn write(mut self, path: &Path) -> Result<()> {
        for library in std::mem::take(&mut self.libraries) {
            let name = library.file_name().expect("a library has a name");
            let at = Path::new(LIBRARIES).join(name);
            self.files.insert(at, read(&library)?);
        }
        let mut archive = Archive::default();
        let mut made = BTreeSet::new();
        let always = ["dev", "proc", "sys", "tmp", "run", "etc", "root"].map(PathBuf::from);
        let parents = self.files.keys().flat_map(|file| {
            let above: Vec<PathBuf> = file.ancestors().skip(1).map(Path::to_owned).collect();
            above.into_iter().rev()
        });
        for dir in always.into_iter().chain(parents) {
            if !dir.as_os_str().is_empty() && made.insert(dir.clone()) {
                archive.add(&dir, 0o040_755, (0, 0), &[]);
            }
        }
        // The kernel opens it for init before init can make it.
        archive.add(Path::new("dev/console"), 0o020_600, (5, 1), &[]);
        for (file, content) in &self.files {
            archive.add(file, 0o100_755, (0, 0), content);
        }
        archive.add(Path::new("TRAILER!!!"), 0, (0, 0), &[]);
        fs::write(path, archive.bytes).map_err(|error| format!("{}: {error}", path.display()))
    }
}

/// The bytes of a `newc` archive.
#[derive(Debug, Default)]
struct Archive {
    bytes: Vec<u8>,
    inode: usize,
}

impl Archive {
    fn add(&mut self, name: &Path, mode: usize, device: (usize, usize), content: &[u8]) {
        let name = name.to_str().expect("names here are text");
        self.inode += 1;
        let mut header = "070701".to_owned();
        for field in [
            self.inode,
            mode,
            0,
            0,
            1,
            0,
            content.len(),
            0,
            0,
            device.0,
            device.1,
            name.len() + 1,
            0,
        ] {
            let _ = write!(header, "{field:08x}");
        }
        self.bytes.extend(header.into_bytes());
        self.bytes.extend(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

/// The modules below a directory, by name.
fn find_modules(dir: &Path, found: &mut BTreeMap<String, PathBuf>) -> Result<()> {
    let entries = fs::read_dir(dir).map_err(|error| format!("{}: {error}", dir.display()))?;
    for entry in entries.flatten() {
        let path = entry.path();
        if path.is_dir() {
            find_modules(&path, found)?;
        } else if let Some(name) = module_name(&path) {
            found.insert(name, path);
        }
    }
    Ok(())
}

/// `…/dm-mod.ko.xz` is `dm_mod`, as other modules call it.
fn module_name(path: &Path) -> Option<String> {
    let (name, end) = path.file_name()?.to_str()?.split_once(".ko")?;
    ["", ".xz"].contains(&end).then(|| name.replace('-', "_"))
}

fn unpacked(path: &Path) -> Result<Vec<u8>> {
    if path.extension().is_some_and(|extension| extension == "xz") {
        let output = Command::new("xz").arg("-dc").arg(path).output();
        let output = output.map_err(|error| format!("xz: {error}"))?;
        if !output.status.success() {
            return Err(format!("xz -dc {}: {}", path.display(), output.status));
        }
        return Ok(output.stdout);
    }
    read(path)
}

/// The section `.modinfo` of a module, which is text: `depends=a,b`.
fn needed_by(module: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let at = module.windows(KEY.len()).position(|window| window == KEY);
    let Some(at) = at else { return Vec::new() };
    let text = module[at + KEY.len()..].split(|byte| *byte == 0).next();
    let text = String::from_utf8_lossy(text.unwrap_or_default()).into_owned();
    let names = text.split(',').filter(|name| !name.is_empty());
    names.map(|name| name.replace('-', "_")).collect()
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).map_err(|error| format!("{}: {error}", path.display()))
}
