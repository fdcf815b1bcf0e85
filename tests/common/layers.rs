//! Layers between two engines of one process, without a network: a holder's frames go through
//! memory. Also layers that no engine made.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use baggageclaim::archive::toc::{Holder, Packing, Patience, Receiver, Table, scan};
use baggageclaim::archive::{Limits, Progress, Result};
use baggageclaim::engine::LayerPlace;
use baggageclaim::sys::Dir;
use rustix::fs::{CWD, Mode, OFlags};

use super::Snapshot;

const FLAGS: OFlags = OFlags::TMPFILE.union(OFlags::RDWR);

/// A file without a name.
fn temporary(dir: &Path) -> File {
    let file = rustix::fs::openat(CWD, dir, FLAGS, Mode::RUSR | Mode::WUSR);
    File::from(file.expect("a temporary file"))
}

/// Makes the holder's layer at a place of a receiving engine.
pub fn make(table: &Table, holder: &Holder, place: &LayerPlace<'_>) -> Result<Arc<Table>> {
    let mut file = temporary(place.temporary.path());
    table.write_to(&mut file)?;
    let digest = Some(table.digest().sha256);
    let table = Table::open(file, digest, place.temporary, place.limits, place.stop)?;
    let mut receiver = Receiver::open(place.into, Arc::clone(&table), false, place.stop)?;
    loop {
        let wants = receiver.missing(4)?;
        if wants.is_empty() {
            break;
        }
        let mut frames = Vec::new();
        holder.send(
            &wants,
            &mut frames,
            Packing::at(1),
            &mut |_| Ok(true),
            &|| false,
        )?;
        let patience = Patience(Duration::from_secs(60));
        receiver.take(&frames[..], patience, place.progress, place.stop)?;
    }
    receiver.finish(place.stop)?;
    Ok(table)
}

/// The holder of a layer that is a directory in overlayfs' form.
pub fn holder(layer: &Path) -> (Arc<Table>, Holder) {
    let parent = layer.parent().expect("a parent");
    let dir = |path: &Path| Dir::open(path).expect("it opens");
    let (root, beside) = (dir(layer), dir(parent));
    let file = temporary(parent);
    let (progress, stop) = (Progress::default(), || false);
    scan(&root, &file, false, &beside, &progress, &stop).expect("it is read");
    let table = Table::open(file, None, &beside, Limits::default(), &stop).expect("a table");
    let holder = Holder::new(Arc::clone(&table), &root).expect("it opens");
    (table, holder)
}

/// Runs a job that blocks on a thread that belongs to no runtime.
pub async fn apart<T: Send + 'static>(job: impl FnOnce() -> T + Send + 'static) -> T {
    let (answer, answered) = tokio::sync::oneshot::channel();
    std::thread::spawn(move || drop(answer.send(job())));
    answered.await.expect("it did not panic")
}

/// Makes two layers of a stack in this directory, which is new. Returns them, newest first, and
/// what they show.
pub fn two(at: &Path, text: &str) -> (Vec<PathBuf>, Snapshot) {
    let [old, new, shown] = ["old", "new", "shown"].map(|name| at.join(name));
    fs::create_dir_all(old.join("directory")).expect("mkdir");
    fs::write(old.join("directory/below"), text).expect("write");
    fs::write(old.join("hidden"), "soon").expect("write");
    fs::create_dir_all(&new).expect("mkdir");
    fs::write(new.join("hidden"), text).expect("write");
    fs::write(new.join("above"), text).expect("write");
    for layer in [&old, &new] {
        let copied = Command::new("cp")
            .arg("-aT")
            .arg(layer)
            .arg(&shown)
            .status();
        assert!(copied.expect("it starts").success());
    }
    (vec![new, old], Snapshot::of(&shown))
}
