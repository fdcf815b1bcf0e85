//! Tries every feature that overlay needs on a pool. Kernel versions say little: features are
//! backported, not built, switched off, or not supported by the pool's filesystem.

use std::os::fd::AsFd;
use std::path::Path;

use rustix::fs::OFlags;

use super::assemble::OPTIONS;
use super::{Lowers, Overlay, root};
use crate::backend::error::{Error, Result};
use crate::backend::method::Backend;
use crate::backend::types::{Freeze, Start};
use crate::model::RootAttributes;
use crate::model::layout::{INCOMING, TOP};
use crate::sys::{Dir, Errno, Xattrs};
use crate::tree;

/// In `incoming/`, which is swept at start. The next self-test sweeps a killed one too.
const NAME: &str = "overlay-trial";
/// The content of the file that must be copied up whole.
const CONTENT: &[u8] = b"a layer is a plain diff";

/// The value of a forged mark. No kernel writes it; 5.10 marks each new directory as opaque.
const FORGED: &[u8] = b"forged";

/// The parameters of the self-test's volumes.
const START: Start<'static> = Start {
    layers: &[],
    root: RootAttributes {
        mode: None,
        uid: None,
        gid: None,
        mount_group: None,
    },
    size_limit: None,
    sealable: true,
    owner: None,
    durable: false,
};

/// Tries every feature once, in 2 ms, and cleans up.
pub(super) fn run(overlay: &Overlay, pool: &Dir) -> Result<()> {
    let incoming = pool.open_beneath(INCOMING)?;
    tree::delete(&incoming, Path::new(NAME), &|| false)?;
    let result = attempt(overlay, pool, &incoming);
    let swept = tree::delete(&incoming, Path::new(NAME), &|| false);
    result?;
    Ok(swept?)
}

fn attempt(overlay: &Overlay, pool: &Dir, incoming: &Dir) -> Result<()> {
    let base = incoming.make_dir(NAME, 0o700)?;
    let lower = base.make_dir("lower", 0o755)?;
    lower.write_new("removed", CONTENT)?;
    lower.write_new("changed", CONTENT)?;
    lower.create_dir("moved", 0o755)?;

    let path = |name: &str| format!("{INCOMING}/{NAME}/{name}");
    first(overlay, pool, &base, &[&path("lower")])?;
    base.open_beneath("first")?.rename(TOP, &base, "layer")?;
    second(overlay, pool, &base, &[&path("layer"), &path("lower")])
}

/// Mounts, writes, freezes and unmounts a volume. Its upper directory must be a plain diff.
fn first(overlay: &Overlay, pool: &Dir, base: &Dir, lowers: &[&str]) -> Result<()> {
    let volume = base.make_dir("first", 0o700)?;
    root::make(&volume, None, &START.root)?;
    let mount = overlay.mount_over(
        &volume,
        "trial",
        &Lowers::SelfTest(pool, lowers, false),
        &START,
        false,
    )?;
    let seen = Dir::from_fd(mount, "the self-test's mount");
    if !overlay.in_use(&volume)? {
        return Err(broken(
            "the kernel does not report a mounted upper directory as in use (index=on)",
        ));
    }

    seen.write_new("written", CONTENT)?;
    seen.remove_file("removed")?;
    seen.node("changed")?.set_mode(0o600)?;
    let top = volume.open_beneath(TOP)?;
    if !tree::is_whiteout(&top.stat("removed")?) {
        return Err(broken("a removed file leaves no whiteout"));
    }
    let copied = top.read("changed", CONTENT.len());
    if !copied.is_ok_and(|bytes| bytes == CONTENT)
        || top
            .node("changed")?
            .xattr("trusted.overlay.metacopy")?
            .is_some()
    {
        return Err(broken(
            "a changed file is not copied up whole (metacopy=off)",
        ));
    }
    match seen.rename("moved", &seen, "elsewhere") {
        Err(error) if error.is(Errno::EXDEV) => {}
        _ => {
            return Err(broken(
                "a renamed directory becomes a redirect (redirect_dir=nofollow)",
            ));
        }
    }

    // A hostile pod's attempts. Linux before 6.7 refuses the attribute; later ones rename it.
    if seen
        .make_node(
            "device",
            rustix::fs::FileType::CharacterDevice.as_raw_mode() | 0o600,
            0,
        )
        .is_ok()
    {
        return Err(broken("whiteouts can be made from inside a volume"));
    }
    let _ = seen
        .make_dir("directory", 0o755)?
        .set_xattr("trusted.overlay.opaque", FORGED);
    if top
        .open_beneath("directory")?
        .xattr("trusted.overlay.opaque")?
        .is_some_and(|value| value == FORGED)
    {
        return Err(broken(
            "overlay's own attributes can be set from inside a volume",
        ));
    }

    freezes(overlay, &volume, seen)
}

fn freezes(overlay: &Overlay, volume: &Dir, seen: Dir) -> Result<()> {
    let writer = seen.open_file_beneath("written", OFlags::WRONLY, 0)?;
    let pin = || {
        seen.as_fd()
            .try_clone_to_owned()
            .map_err(|error| seen.error("fcntl", "", error))
    };
    let Freeze::Busy(_) = overlay.freeze(volume, Some(pin()?))? else {
        return Err(broken("a volume that is being written to can be frozen"));
    };
    drop(writer);
    if !eventually(|| {
        Ok(matches!(
            overlay.freeze(volume, Some(pin()?))?,
            Freeze::Held(_)
        ))
    })? {
        return Err(broken("a volume without writers cannot be frozen"));
    }
    match seen.write_new("late", CONTENT) {
        Err(error) if error.is(Errno::EROFS) => {}
        _ => return Err(broken("a frozen volume can be written to")),
    }
    drop(seen);
    if eventually(|| Ok(!overlay.in_use(volume)?))? {
        return Ok(());
    }
    Err(broken(
        "the kernel reports an upper directory as in use after its mount is gone (index=on)",
    ))
}

/// Waits up to a second. A superblock may outlive its last user for a moment. And a child process
/// of this program holds copies of all descriptors until its exec.
fn eventually(mut is_so: impl FnMut() -> Result<bool>) -> Result<bool> {
    for _ in 0..2000 {
        if is_so()? {
            return Ok(true);
        }
        std::thread::sleep(std::time::Duration::from_micros(500));
    }
    Ok(false)
}

/// Mounts the first volume's upper directory as a layer: it must hide and show the same names.
fn second(overlay: &Overlay, pool: &Dir, base: &Dir, lowers: &[&str]) -> Result<()> {
    let volume = base.make_dir("second", 0o700)?;
    root::make(&volume, Some(&pool.open_beneath(lowers[0])?), &START.root)?;
    let mount = overlay.mount_over(
        &volume,
        "trial",
        &Lowers::SelfTest(pool, lowers, true),
        &START,
        true,
    )?;
    let seen = Dir::from_fd(mount, "the self-test's mount");
    if seen.has("removed")? || !seen.has("written")? || !seen.has("moved")? {
        return Err(broken("a renamed upper directory is not a layer"));
    }
    match seen.create_dir("new", 0o755) {
        Err(error) if error.is(Errno::EROFS) => {}
        _ => return Err(broken("a read-only mount can be written to")),
    }
    let mount = seen
        .as_fd()
        .try_clone_to_owned()
        .map_err(|error| seen.error("fcntl", "", error))?;
    drop(seen);
    options_hold(&overlay.views.mount_ns().shown_options(mount)?)
}

/// Whether the mount has the requested options. The kernel shows no module defaults, so those are
/// read from the module's parameters (if `/sys` is mounted).
fn options_hold(shown: &str) -> Result<()> {
    let shown: Vec<&str> = shown.split(',').collect();
    // Newer kernels show it as "fsync=volatile".
    if !shown
        .iter()
        .any(|option| matches!(*option, "volatile" | "fsync=volatile"))
    {
        return Err(broken("the option volatile is not in force"));
    }
    for (key, value) in OPTIONS {
        let found = shown
            .iter()
            .find_map(|option| option.strip_prefix(key)?.strip_prefix('='));
        let holds = found.map_or_else(|| module_default(key) != Some(true), |found| found == value);
        if !holds {
            return Err(broken(&format!("the option {key}={value} is not in force")));
        }
    }
    Ok(())
}

/// Whether a parameter of the overlay module is on.
fn module_default(key: &str) -> Option<bool> {
    let parameter = match key {
        "xino" => "xino_auto",
        // Shown as "off" if following is the default; the rename above has tested it.
        "redirect_dir" => return None,
        key => key,
    };
    let text = std::fs::read(format!("/sys/module/overlay/parameters/{parameter}")).ok()?;
    Some(text.first() == Some(&b'Y'))
}

fn broken(why: &str) -> Error {
    Error::Unsupported {
        what: "the overlay backend",
        why: why.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_that_contradict_are_found() {
        options_hold("rw,lowerdir=1,redirect_dir=nofollow,uuid=on,volatile").expect("as asked");
        options_hold("rw,fsync=volatile,index=off,metacopy=off,xino=off").expect("as asked");
        for bad in [
            "rw,lowerdir=1",
            "rw,volatile,index=on",
            "rw,volatile,metacopy=on",
            "rw,volatile,redirect_dir=follow",
            "rw,volatile,xino=auto",
        ] {
            let error = options_hold(bad).expect_err(bad);
            assert!(error.to_string().contains("not in force"), "{error}");
        }
    }
}
