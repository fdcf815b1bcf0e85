//! Overlays as kubectl builds them. `make e2e` has a kubectl; the tests here skip without one.

use std::fs;
use std::process::Command;

use serde_json::Value;

use super::root;

/// Has kubectl build an overlay in a copy of deploy/, with these files in it: name and text.
/// `None`: there is no kubectl.
pub(super) fn built(overlay: &str, files: &[(&str, &str)]) -> Option<Vec<Value>> {
    if Command::new("kubectl").arg("help").output().is_err() {
        return None;
    }
    let copy = tempfile::tempdir().expect("a temporary directory");
    let copied = Command::new("cp")
        .arg("-r")
        .arg(root().join("deploy"))
        .arg(copy.path())
        .status()
        .expect("cp");
    assert!(copied.success());
    let overlay = copy.path().join("deploy/overlays").join(overlay);
    fs::create_dir_all(&overlay).expect("a directory");
    for (name, text) in files {
        fs::write(overlay.join(name), text).expect("write");
    }
    let built = Command::new("kubectl")
        .arg("kustomize")
        .arg(&overlay)
        .output()
        .expect("kubectl starts");
    let complaint = String::from_utf8_lossy(&built.stderr);
    assert!(built.status.success(), "{complaint}");
    let built = serde_saphyr::from_multiple(&String::from_utf8_lossy(&built.stdout));
    Some(built.expect("YAML"))
}
