//! The keys of drivers that are peers, and the list that all of them have, made with the program as
//! a person makes them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

/// In a directory of their own.
pub struct PeerKeys {
    dir: TempDir,
    nodes: Vec<(String, String)>,
}

impl PeerKeys {
    /// Makes a key for each node: its name and its address.
    pub fn new(binary: &Path, nodes: Vec<(String, String)>) -> Self {
        let keys = Self {
            dir: tempfile::tempdir().expect("a temporary directory"),
            nodes,
        };
        let lines = keys.nodes.iter().map(|(node, address)| {
            let made = Command::new(binary)
                .args(["peer-key", "--peer-key"])
                .arg(keys.path(node))
                .output();
            let made = made.expect("the program runs");
            assert!(made.status.success(), "{made:?}");
            let key = String::from_utf8(made.stdout).expect("text");
            format!("{node} {address} {key}")
        });
        let list: String = std::iter::once("# all nodes\n".to_owned())
            .chain(lines)
            .collect();
        fs::write(keys.dir.path().join("peers"), list).expect("write");
        keys
    }

    fn path(&self, node: &str) -> PathBuf {
        self.dir.path().join(node)
    }

    /// What the driver of this node is told.
    pub fn arguments(&self, node: &str) -> Vec<String> {
        let of_node = self.nodes.iter().filter(|(name, _)| name == node);
        let listen = of_node.map(|(_, address)| format!("--peer-listen={address}"));
        let files = [
            format!("--peers={}", self.dir.path().join("peers").display()),
            format!("--peer-key={}", self.path(node).display()),
        ];
        listen.chain(files).collect()
    }
}
