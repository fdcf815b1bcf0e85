//! The expected state: volumes whose publish was answered and artifacts whose seal was promised,
//! with their exact content. The checks: all of that is there, and nothing else.
//!
//! They look from outside: through mounts, lists and the pool's directories.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use serde_json::Value;

use super::common::{Snapshot, assert_same};
use super::driver::{Call, Connection, Place};

/// A published volume.
#[derive(Debug, Clone)]
pub(crate) struct Live {
    /// The name of what it is sealed as when its pod succeeds.
    pub(crate) becomes: Option<String>,
    pub(crate) content: Snapshot,
}

/// The expected state.
#[derive(Debug, Default)]
pub(crate) struct World {
    /// By volume.
    pub(crate) live: BTreeMap<String, Live>,
    /// By name.
    pub(crate) sealed: BTreeMap<String, Snapshot>,
    /// For volumes that only look.
    probes: usize,
}

pub(crate) fn attributes(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    let own = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
    pairs.iter().map(own).collect()
}

pub(crate) fn pod_of(volume: &str) -> String {
    format!("pod-of-{volume}")
}

pub(crate) fn publish(place: &Place, volume: &str, pairs: &[(&str, &str)]) -> Call {
    Call::Publish {
        pod: pod_of(volume),
        volume: place.id(volume),
        target: place.target(volume),
        attributes: attributes(pairs),
        shared: false,
    }
}

/// The same volume at another target.
pub(crate) fn publish_also(place: &Place, volume: &str, pairs: &[(&str, &str)], at: &Path) -> Call {
    let mut call = publish(place, volume, pairs);
    if let Call::Publish { target, shared, .. } = &mut call {
        at.clone_into(target);
        *shared = true;
    }
    call
}

pub(crate) fn unpublish(place: &Place, volume: &str) -> Call {
    Call::Unpublish {
        volume: place.id(volume),
        target: place.target(volume),
    }
}

pub(crate) fn outcome(volume: &str, succeeded: bool) -> Call {
    Call::Outcome {
        pod: pod_of(volume),
        succeeded,
    }
}

/// Writes a few files of every plain sort, and changes what is there already.
pub(crate) fn write(root: &Path, tag: &str) {
    let dir = root.join(format!("dir-{tag}"));
    fs::create_dir_all(dir.join("below")).expect("mkdir");
    fs::write(dir.join("below/file"), tag.repeat(50)).expect("write");
    fs::write(dir.join("tool"), format!("#!/bin/{tag}")).expect("write");
    fs::set_permissions(dir.join("tool"), fs::Permissions::from_mode(0o755)).expect("chmod");
    fs::hard_link(dir.join("tool"), dir.join("linked")).expect("link");
    symlink(tag, dir.join("symlink")).expect("symlink");
    // Over and over: a copy-up, a whiteout and an opaque directory in a fork.
    fs::write(root.join("newest"), tag).expect("write");
    let gone = root.join("gone");
    if gone.exists() {
        fs::remove_file(gone.join("file")).expect("rm");
        fs::remove_dir(&gone).expect("rmdir");
    }
    fs::create_dir(&gone).expect("mkdir");
    fs::write(gone.join("file"), tag).expect("write");
}

/// Leaves out what a marker changes: it is made and removed in the root, whose time that is.
pub(crate) fn without_root_time(mut content: Snapshot) -> Snapshot {
    if let Some(root) = content.entries.get_mut(&Vec::new()) {
        root.mtime = (0, 0);
    }
    content
}

#[track_caller]
fn assert_content(expected: &Snapshot, found: &Snapshot) {
    let timeless = expected
        .entries
        .get(&Vec::new())
        .is_some_and(|root| root.mtime == (0, 0));
    if timeless {
        assert_same(expected, &without_root_time(found.clone()));
    } else {
        assert_same(expected, found);
    }
}

/// Every path on which something is mounted, once for each mount.
fn mount_points() -> Vec<String> {
    let table = fs::read_to_string("/proc/self/mountinfo").expect("mountinfo");
    let point = |line: &str| line.split(' ').nth(4).expect("a mount point").to_owned();
    table.lines().map(point).collect()
}

/// The names in a list of artifacts, each as often as it is there; without those that lost theirs
/// and are still in use.
pub(crate) fn names(rows: &Value) -> Vec<String> {
    let counts = |row: &&Value| !row["name"].is_null() || row["inUseBy"] == 0;
    let name = |row: &Value| row["name"].as_str().unwrap_or("(no name)").to_owned();
    let rows = rows.as_array().expect("rows");
    rows.iter().filter(counts).map(name).collect()
}

impl World {
    /// Publishes a volume that can be sealed, or not (`becomes`), and writes into it.
    pub(crate) fn start_pod(
        &mut self,
        place: &Place,
        connection: &mut Connection,
        volume: &str,
        becomes: Option<&str>,
        pairs: &[(&str, &str)],
    ) {
        connection.must(&publish(place, volume, pairs));
        write(&place.target(volume), volume);
        self.note_live(place, volume, becomes);
    }

    /// Takes what is mounted there now as what should be there.
    pub(crate) fn note_live(&mut self, place: &Place, volume: &str, becomes: Option<&str>) {
        let live = Live {
            becomes: becomes.map(str::to_owned),
            content: Snapshot::of(&place.target(volume)),
        };
        self.live.insert(volume.to_owned(), live);
    }

    /// The pod of a volume succeeds and goes; its seal is waited for.
    pub(crate) fn end_pod(&mut self, place: &Place, connection: &mut Connection, volume: &str) {
        self.pod_ended(volume);
        connection.must(&outcome(volume, true));
        connection.must(&unpublish(place, volume));
        connection.must(&Call::Settle);
    }

    /// The difference after a pod succeeded and its volume is unpublished.
    pub(crate) fn pod_ended(&mut self, volume: &str) {
        let live = self
            .live
            .remove(volume)
            .expect("a volume that is published");
        if let Some(name) = live.becomes {
            self.sealed.insert(name, live.content);
        }
    }

    /// Each volume whose publish was answered is mounted, once, with exactly its content.
    pub(crate) fn check_live(&self, place: &Place) {
        let mounts = mount_points();
        for (volume, live) in &self.live {
            let target = place.target(volume);
            let count = mounts
                .iter()
                .filter(|point| Path::new(point) == target)
                .count();
            assert_eq!(count, 1, "{volume} is mounted once");
            assert_content(&live.content, &Snapshot::of(&target));
        }
    }

    /// Pods go on writing into what they have.
    pub(crate) fn use_live(&mut self, place: &Place) {
        for (volume, live) in &mut self.live {
            let target = place.target(volume);
            fs::write(target.join("after-the-crash"), volume).expect("it can be written to");
            live.content = Snapshot::of(&target);
        }
    }

    /// Nothing is listed but what may be there: half-made things have no name.
    pub(crate) fn check_names_are_among(&self, connection: &mut Connection, more: &[String]) {
        for name in names(&connection.must(&Call::Artifacts)) {
            assert!(
                self.sealed.contains_key(&name) || more.contains(&name) || name == "(no name)",
                "{name} is listed"
            );
        }
    }

    /// Each artifact is there once with exactly its content, and nothing else is.
    pub(crate) fn check_sealed(&mut self, place: &Place, connection: &mut Connection) {
        let expected: Vec<String> = self.sealed.keys().cloned().collect();
        let mut found = names(&connection.must(&Call::Artifacts));
        found.sort();
        assert_eq!(found, expected, "the artifacts");
        for name in expected {
            self.check_content(place, connection, &name);
        }
    }

    /// A fork of an artifact shows exactly its content.
    pub(crate) fn check_content(&mut self, place: &Place, connection: &mut Connection, name: &str) {
        self.probes += 1;
        let probe = format!("probe-{}", self.probes);
        connection.must(&publish(
            place,
            &probe,
            &[("type", "input"), ("from", name)],
        ));
        assert_content(&self.sealed[name], &Snapshot::of(&place.target(&probe)));
        connection.must(&unpublish(place, &probe));
    }

    /// Ends every pod with success, looks at what they sealed, deletes all of it, and makes sure
    /// that nothing is left.
    pub(crate) fn end(mut self, place: &Place, connection: &mut Connection) {
        let volumes: Vec<String> = self.live.keys().cloned().collect();
        for volume in volumes {
            self.end_pod(place, connection, &volume);
        }
        connection.must(&Call::Reap);
        self.check_sealed(place, connection);
        connection.must(&Call::Settle);
        assert_no_findings(connection);
        for name in self.sealed.keys() {
            connection.must(&Call::Destroy {
                reference: name.clone(),
            });
        }
        assert_nothing_left(place, connection);
    }
}

pub(crate) fn assert_no_findings(connection: &mut Connection) {
    let findings = connection.must(&Call::Check);
    assert_eq!(findings, Value::Array(Vec::new()), "findings");
}

/// No volume, no layer, no mount, no target.
pub(crate) fn assert_nothing_left(place: &Place, connection: &mut Connection) {
    connection.must(&Call::Settle);
    connection.must(&Call::Reap);
    assert_no_findings(connection);
    assert_eq!(connection.must(&Call::Volumes), Value::Array(Vec::new()));
    assert_eq!(connection.must(&Call::Artifacts), Value::Array(Vec::new()));
    for directory in ["volumes", "pending", "incoming", "trash", "layers"] {
        assert_eq!(entries(&place.pool.join(directory)), [""; 0], "{directory}");
    }
    assert_eq!(entries(&place.targets), [""; 0], "targets");
    assert_eq!(
        place.lab.leftovers(),
        Vec::<std::path::PathBuf>::new(),
        "mounts"
    );
}

pub(crate) fn entries(path: &Path) -> Vec<String> {
    let entries = fs::read_dir(path).expect("a directory");
    let name = |entry: std::io::Result<fs::DirEntry>| {
        let name = entry.expect("an entry").file_name();
        name.into_string().expect("names here are text")
    };
    entries.map(name).collect()
}
