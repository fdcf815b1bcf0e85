//! The keys and the list of drivers that are peers on this machine.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use tempfile::TempDir;

use crate::common::random::Random;

/// Nodes that know each other. Each has a loopback address of its own, so no port is taken by other
/// programs.
pub(crate) struct Peers {
    dir: TempDir,
    nodes: Vec<(&'static str, String)>,
}

impl Peers {
    pub(crate) fn new(names: &[&'static str], random: &mut Random) -> Self {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let (second, third) = (1 + random.below(254), random.below(255));
        let address = |index| format!("127.{second}.{third}.{}:9810", index + 1);
        let addresses = (0..names.len()).map(address);
        let peers = Self {
            dir,
            nodes: names.iter().copied().zip(addresses).collect(),
        };
        let lines = peers.nodes.iter().map(|(node, address)| {
            let made = Command::new(env!("CARGO_BIN_EXE_baggageclaim"))
                .args(["peer-key", "--peer-key"])
                .arg(peers.key(node))
                .output();
            let made = made.expect("the program runs");
            assert!(made.status.success(), "{made:?}");
            let key = String::from_utf8(made.stdout).expect("text");
            format!("{node} {address} {key}")
        });
        let list: String = lines.collect();
        fs::write(peers.dir.path().join("peers"), list).expect("write");
        peers
    }

    fn key(&self, node: &str) -> PathBuf {
        self.dir.path().join(node)
    }

    /// What the driver of this node is told.
    pub(crate) fn arguments(&self, node: &str) -> Vec<String> {
        let of_node = self.nodes.iter().filter(|(name, _)| *name == node);
        let listen = of_node.map(|(_, address)| format!("--peer-listen={address}"));
        let files = [
            format!("--peers={}", self.dir.path().join("peers").display()),
            format!("--peer-key={}", self.key(node).display()),
        ];
        listen.chain(files).collect()
    }
}
