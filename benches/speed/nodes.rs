//! What the rows of the tier and of peers have in common: their trees, waits for a state of
//! content, and the way of a commit to another node. Where content goes is `tier` and `peers`.

#![expect(
    clippy::disallowed_methods,
    reason = "what is removed is the bench's own"
)]

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use baggageclaim::proto::admin::v1 as api;

use crate::archives::Words;
use crate::driver::{Driver, prepare};

/// Bytes of a file.
pub const SIZE: usize = 25_000;
const PER_DIR: usize = 40;
/// Of this many files, one changes.
pub const UNCHANGED: usize = 100;
/// Files of the commit that goes to another node: 100 MB.
pub const HANDED: usize = 4_000;
pub const CACHE: [(&str, &str); 2] = [("type", "task-cache"), ("key", "tree")];
/// The same for a reader.
pub const READS: [(&str, &str); 3] = [("type", "task-cache"), ("key", "tree"), ("commit", "never")];

pub fn tree(root: &Path, files: usize) {
    let mut words = Words(1);
    for index in 0..files {
        let path = file(root, index);
        if index % PER_DIR == 0 {
            fs::create_dir_all(path.parent().expect("a directory")).expect("mkdir");
        }
        fs::write(path, words.text(SIZE)).expect("write");
    }
}

pub fn file(root: &Path, index: usize) -> PathBuf {
    let dir = index / PER_DIR;
    root.join(format!("{}/{dir}/{index}", dir / 20))
}

pub fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}

/// Waits until content of this reference is in a state.
pub async fn until(driver: &mut Driver, reference: &str, is_it: impl Fn(&api::Artifact) -> bool) {
    let until = Instant::now() + Duration::from_secs(120);
    loop {
        let request = api::ListArtifactsRequest { tenant: None };
        let rows = driver.admin.list_artifacts(request).await.expect("a list");
        let rows = rows.into_inner().artifacts;
        let mut rows = rows.iter().filter(|row| row.reference == reference);
        if rows.any(&is_it) {
            return;
        }
        assert!(Instant::now() < until, "{reference} does not get there");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Gives one in [`UNCHANGED`] files new content, each its own; `content` is that of the last one.
/// It does not compress, so bytes on the way can be compared with bytes in files.
pub fn change(dir: &Path, changed: usize, content: &mut [u8]) {
    for number in 0..changed {
        getrandom::fill(content).expect("random bytes");
        fs::write(file(dir, number * UNCHANGED), &*content).expect("write");
    }
}

/// Has a pod of another node wait for an output of 100 MB while it is made. From the unpublish of
/// the maker's pod until the other one has it.
pub async fn hand_over(maker: &mut Driver, other: &Driver, name: &str) -> Duration {
    let pod = maker.pod();
    let (target, _) = maker.publish(&pod, &[("type", "output"), ("name", name)]);
    let (waiting, mut caller) = (other.pod(), other.caller());
    prepare(&waiting);
    let (for_it, from) = (waiting.clone(), format!("artifact/{name}"));
    let waiter = std::thread::spawn(move || {
        caller.publish(&for_it, &[("type", "input"), ("from", &from)]);
        Instant::now()
    });
    tree(&target, HANDED);
    maker.outcome(&pod, api::Outcome::Succeeded, false).await;
    let began = Instant::now();
    maker.unpublish(&pod);
    let usable = waiter.join().expect("it is published") - began;
    maker.settled(&pod).await;
    other.unpublish(&waiting);
    usable
}

/// The fetch alone, by a node that need not wait for it and then goes: milliseconds.
pub fn fetch_once(node: Driver, name: &str) -> f64 {
    let (pod, from) = (node.pod(), format!("artifact/{name}"));
    let (_, took) = node.publish(&pod, &[("type", "input"), ("from", &from)]);
    node.unpublish(&pod);
    remove(node);
    millis(took)
}

/// Ends a node, and deletes its pool.
pub fn remove(node: Driver) {
    let pool = node.pool.clone();
    node.stop();
    fs::remove_dir_all(pool).expect("remove");
}
