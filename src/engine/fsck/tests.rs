//! Comparisons of a pool that is made by hand, without an engine. Tests of `fsck.rs` only, of what
//! leaves while it is looked at; what counts as a finding is tested in `tests/bad_days`.

use std::cell::Cell;
use std::fs;

use super::*;

#[test]
fn what_left_since_it_was_found_is_no_finding() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let root = Dir::open(folder.path()).expect("open");
    let dirs = ["volumes", "pending", "layers", "trash"].map(|name| {
        root.create_dir(name, 0o700).expect(name);
        root.open_beneath(name).expect("open")
    });
    let [volumes, pending, layers, trash] = &dirs;
    let places = Places {
        root: &root,
        volumes: Some(volumes),
        pending: Some(pending),
        layers: Some(layers),
        trash: Some(trash),
    };
    let ids = [1, 2].map(|bits| LayerId::from_bits(bits).to_string());
    for id in &ids {
        layers.create_dir(id, 0o700).expect("mkdir");
    }
    let named = Contents::default();
    let listed = layer_names(places).expect("read");
    let found_while = |second_is_looked_at: &dyn Fn()| {
        let looks = Cell::new(0);
        let stopped = || {
            looks.set(looks.get() + 1);
            if looks.get() == 2 {
                second_is_looked_at();
            }
            false
        };
        let moving = Moving::default();
        let found = compare(places, "boot", &named, &moving, &listed, &stopped);
        let found = found.expect("compared").into_iter();
        found
            .map(|finding| (finding.kind, finding.path))
            .collect::<Vec<_>>()
    };
    let unknown = |id: &String| ("unknown-layer", below(layout::LAYERS, id));
    let [first, second] = &ids;
    assert_eq!(found_while(&|| ()), [unknown(first), unknown(second)]);
    let first_leaves = || {
        let to = folder.path().join("trash").join(first);
        fs::rename(folder.path().join("layers").join(first), to).expect("rename");
    };
    assert_eq!(found_while(&first_leaves), [unknown(second)]);
}
