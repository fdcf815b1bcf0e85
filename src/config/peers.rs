//! The flags by which a standalone driver is a peer of others, and the settings that they mean.
//! All other flags are in `config`.

use std::net::SocketAddr;
use std::num::NonZeroU64;
use std::path::PathBuf;

use clap::Args;

use super::Error;
use crate::peer;

/// The default of `--peer-key`.
const DEFAULT_KEY: &str = "/etc/baggageclaim/peer.key";

/// The flags of peers.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Peers")]
pub struct Peers {
    /// Ask these other nodes for content that is not on this one, and give them what they ask for.
    /// The file has a line NAME HOST:PORT sha256:DIGITS for each node, and perhaps NAMESPACE,… to
    /// which the line is limited. `baggageclaim peer-key` prints the key of a node. The line of
    /// this node is passed over, so all nodes can have the same file. It is read at the start
    /// [default: no peers]
    #[arg(long, value_name = "FILE", env = "BAGGAGECLAIM_PEERS",
        value_parser = super::path_or_empty())]
    pub peers: Option<PathBuf>,
    /// ADDRESS:PORT that serves content to the nodes of `--peers`, such as [::]:9810 [default: this
    /// node only asks]
    #[arg(long, value_name = "ADDR", env = "BAGGAGECLAIM_PEER_LISTEN")]
    pub peer_listen: Option<SocketAddr>,
    /// The key of this node
    #[command(flatten)]
    pub key: PeerKey,
    /// The most bytes per second that this node sends to all peers, a quantity such as 100Mi; at
    /// least 1Mi [default: no limit]
    #[arg(long, value_name = "BYTES", env = "BAGGAGECLAIM_PEER_BANDWIDTH",
        value_parser = parse_bandwidth)]
    pub peer_bandwidth: Option<NonZeroU64>,
}

/// The flag that names the key of this node.
#[derive(Debug, Clone, Args)]
#[command(mut_args(super::hide_env_value))]
pub struct PeerKey {
    /// The file with the key by which other nodes know this one. It is made if it is missing;
    /// its directory must exist
    #[arg(
        long,
        value_name = "FILE",
        env = "BAGGAGECLAIM_PEER_KEY",
        default_value = DEFAULT_KEY
    )]
    pub peer_key: PathBuf,
}

impl Peers {
    /// How this node is a peer, if it is one. An empty variable is as good as none.
    pub(super) fn resolve(self) -> Result<Option<peer::Config>, Error> {
        let Some(list) = self.peers.filter(|path| !path.as_os_str().is_empty()) else {
            return match self.peer_listen {
                None => Ok(None),
                Some(_) => Err(Error::NoPeers),
            };
        };
        Ok(Some(peer::Config {
            listen: self.peer_listen,
            list,
            key: self.key.peer_key,
            bandwidth: self.peer_bandwidth,
        }))
    }
}

/// A peer gives up a holder that sends nothing for 5 seconds, so a limit must not cause that.
fn parse_bandwidth(text: &str) -> Result<NonZeroU64, &'static str> {
    let bytes = super::shared::parse_bandwidth(text)?;
    let least = bytes.get() >= 1 << 20;
    least
        .then_some(bytes)
        .ok_or("expected at least 1Mi; without the flag there is no limit")
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Flags {
        #[command(flatten)]
        peers: Peers,
    }

    fn resolve(flags: &[&str]) -> Result<Option<peer::Config>, Error> {
        let flags = std::iter::once(&"baggageclaim").chain(flags);
        Flags::parse_from(flags).peers.resolve()
    }

    #[test]
    fn there_are_no_peers_unless_a_file_is_named() {
        assert!(resolve(&[]).expect("no flags").is_none());
        assert!(resolve(&["--peers="]).expect("an empty name").is_none());
        let alone = resolve(&["--peer-listen=127.0.0.1:1"]);
        assert_eq!(alone.expect_err("for no one"), Error::NoPeers);
        let flags = [
            "--peers=p",
            "--peer-listen=[::]:9810",
            "--peer-bandwidth=1Mi",
        ];
        let config = resolve(&flags).expect("flags").expect("peers");
        assert_eq!(config.listen.map(|address| address.port()), Some(9810));
        assert_eq!(config.bandwidth.map(NonZeroU64::get), Some(1 << 20));
        assert_eq!(config.key, PathBuf::from(DEFAULT_KEY));
        parse_bandwidth("1Ki").expect_err("a peer would give up");
    }
}
