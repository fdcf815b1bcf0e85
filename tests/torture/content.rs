//! The content of pods: small trees that change at random, and the content that a new mount may
//! show. Trees stay small despite many writes, because they are compared all the time.

use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;
use std::sync::Arc;

use crate::common::Snapshot;
use crate::common::random::Random;
use crate::figures::Fault;

/// The allowed content of a name or a volume.
#[derive(Debug, Clone)]
pub(crate) enum Seen {
    /// There is no such name; what starts from it starts empty.
    Absent,
    /// It holds nothing.
    Empty,
    /// It holds this.
    Exactly(Arc<Snapshot>),
}

/// A marker is made and removed in the root, whose time that is; a content with a time of 0 is
/// compared without it.
pub(crate) fn without_root_time(content: &Snapshot) -> Arc<Snapshot> {
    let mut content = content.clone();
    if let Some(root) = content.entries.get_mut(&Vec::new()) {
        root.mtime = (0, 0);
    }
    Arc::new(content)
}

/// The differences, one per line; none if both are equal.
pub(crate) fn differences(expected: &Snapshot, found: &Snapshot) -> Vec<String> {
    let root = expected.entries.get(&Vec::new());
    if root.is_some_and(|root| root.mtime == (0, 0)) {
        expected.diff(&without_root_time(found))
    } else {
        expected.diff(found)
    }
}

impl Seen {
    /// Whether a fork of it would show this.
    pub(crate) fn shows(&self, found: &Snapshot) -> bool {
        match self {
            Self::Absent | Self::Empty => found.is_empty(),
            Self::Exactly(content) => differences(content, found).is_empty(),
        }
    }
}

/// Reads a tree that may turn out not to be readable, which is a failure and not the end of the
/// trial.
pub(crate) fn read(root: &Path) -> Result<Snapshot, Fault> {
    let result = std::panic::catch_unwind(|| Snapshot::of(root));
    result.map_err(|panic| {
        let said = panic.downcast_ref::<String>().cloned().unwrap_or_default();
        Fault::wrong(format!("{} cannot be read: {said}", root.display()))
    })
}

/// Whether what is there is one of these.
pub(crate) fn expect(root: &Path, allowed: &[Seen]) -> Result<Snapshot, Fault> {
    let found = read(root)?;
    if allowed.iter().any(|seen| seen.shows(&found)) {
        return Ok(found);
    }
    let mut what = format!(
        "{} shows none of {} contents that it may:",
        root.display(),
        allowed.len()
    );
    for seen in allowed {
        let lines = match seen {
            Seen::Absent | Seen::Empty => vec![format!("not empty: {} names", found.len())],
            Seen::Exactly(content) => differences(content, &found),
        };
        what.push_str("\n  one differs by ");
        what.push_str(&lines.into_iter().take(8).collect::<Vec<_>>().join("; "));
    }
    Err(Fault::wrong(what))
}

/// A few changes of every plain sort. `newest` says `tag` afterwards.
pub(crate) fn change(root: &Path, seed: u64, tag: &str) -> io::Result<()> {
    let mut random = Random::new(seed);
    for _ in 0..=random.below(4) {
        one_change(root, &mut random, tag)?;
    }
    fs::write(root.join("newest"), tag)
}

fn one_change(root: &Path, random: &mut Random, tag: &str) -> io::Result<()> {
    let dir = root.join(format!("d{}", random.below(3)));
    let file = dir.join(format!("f{}", random.below(3)));
    let other = root.join(format!("g{}", random.below(3)));
    match random.below(10) {
        // A directory goes, and something else takes its name.
        0 => {
            remove(&dir)?;
            if random.percent(50) {
                symlink(tag, &dir)?;
            }
            return Ok(());
        }
        1 => return remove(&other),
        _ => {}
    }
    if !dir.symlink_metadata().is_ok_and(|found| found.is_dir()) {
        remove(&dir)?;
        fs::create_dir(&dir)?;
    }
    if file.symlink_metadata().is_err() {
        let pages = usize::try_from(random.below(3)).expect("small");
        fs::write(&file, tag.repeat(1 + pages * 300))?;
        return Ok(());
    }
    match random.below(8) {
        0 => fs::remove_file(&file),
        1 => {
            remove(&other)?;
            fs::rename(&file, &other)
        }
        2 => {
            remove(&other)?;
            fs::hard_link(&file, &other)
        }
        3 => fs::set_permissions(
            &file,
            fs::Permissions::from_mode(*random.pick(&[0o600, 0o644, 0o4755])),
        ),
        4 => {
            rustix::fs::lsetxattr(
                &file,
                "user.tag",
                tag.as_bytes(),
                rustix::fs::XattrFlags::empty(),
            )?;
            Ok(())
        }
        5 => fs::File::options().write(true).open(&file)?.set_len(17),
        _ => fs::write(&file, format!("{tag} again")),
    }
}

/// Takes whatever has this name away.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    match path.symlink_metadata() {
        Ok(found) if found.is_dir() =>
        {
            #[expect(
                clippy::disallowed_methods,
                reason = "a pod deletes what is its own, and nothing is mounted in there"
            )]
            fs::remove_dir_all(path)
        }
        Ok(_) => fs::remove_file(path),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}
