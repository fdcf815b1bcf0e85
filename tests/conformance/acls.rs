//! ACLs that a directory got after its children were made: no copy may give them to the children. A
//! default ACL affects everything made in its directory, and so a copy that is made name by name.

use std::fs;
use std::path::Path;

use rustix::fs::XattrFlags;

use super::common::{Snapshot, assert_same, tree as trees};
use super::{Bench, default_acl};

const ACCESS: &str = "system.posix_acl_access";
const DEFAULT: &str = "system.posix_acl_default";

/// A tree whose directories, the root included, have a default ACL that none of their children has.
fn late_acls(root: &Path) {
    fs::create_dir_all(root.join("d/sub")).expect("mkdir");
    fs::create_dir(root.join("none")).expect("mkdir");
    for file in ["f", "d/f", "d/sub/f", "none/f"] {
        fs::write(root.join(file), file).expect("write");
    }
    fs::hard_link(root.join("f"), root.join("d/sub/linked")).expect("link");
    std::os::unix::fs::symlink("f", root.join("d/link")).expect("symlink");
    for dir in ["", "d"] {
        set(&root.join(dir), DEFAULT);
    }
    set(&root.join("d/sub"), ACCESS);
    for (index, name) in ["d/sub", "d", "none", ""].into_iter().enumerate() {
        let seconds = 1_100_000_000 + i64::try_from(index).expect("small");
        trees::times(&root.join(name), seconds, 42);
    }
}

fn set(path: &Path, name: &str) {
    rustix::fs::setxattr(path, name, &default_acl(), XattrFlags::empty()).expect("acl");
}

/// A fork, a sealed fork, a live copy and a merge of it show the same.
pub(super) fn acls_that_came_late_are_not_inherited(bench: &Bench) {
    let volume = bench.fork(&[]);
    let before = bench.within(&volume, |root| {
        late_acls(root);
        Snapshot::of(root)
    });
    let copied = |volume: &super::Volume| {
        let (id, dir) = bench.layer();
        bench.backend.copy(&volume.dir, &dir).expect("copied");
        let mut layers = vec![id];
        if bench.backend.stacks() {
            layers.extend(&volume.layers);
        }
        layers
    };
    assert_same(&before, &bench.shown(&copied(&volume)));
    let layers = bench.seal(&volume);
    assert_same(&before, &bench.shown(&layers));
    bench.discard(volume);

    let fork = bench.fork(&layers);
    let after = bench.within(&fork, |root| {
        // Through overlay: the directory is copied up before its new children are made.
        fs::write(root.join("none/new"), "new").expect("write");
        fs::create_dir(root.join("d/new")).expect("mkdir");
        fs::remove_file(root.join("d/sub/f")).expect("unlink");
        set(&root.join("none"), DEFAULT);
        trees::times(&root.join("none"), 1_100_000_010, 42);
        Snapshot::of(root)
    });
    let new = &after.get("d/new").expect("it was made").xattrs;
    assert!(
        [ACCESS, DEFAULT]
            .iter()
            .all(|name| new.contains_key(name.as_bytes()))
    );
    let copy = copied(&fork);
    assert_same(&after, &bench.shown(&copy));
    let sealed = bench.seal(&fork);
    assert_same(&after, &bench.shown(&sealed));
    bench.discard(fork);
    if bench.backend.stacks() {
        let (id, dir) = bench.layer();
        let merged = bench.backend.flatten(&sealed, &dir, true, &|| false);
        merged.expect("flattened");
        assert_same(&after, &bench.shown(&[id]));
    }
}
