//! The flags by which a driver is a peer of others, standalone or in a cluster, and the settings
//! that they mean. All other flags are in `config`.

use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU64;
use std::path::PathBuf;

use clap::Args;

use super::error::Error;
use crate::{node, peer};

/// The default of `--peer-key`.
const DEFAULT_KEY: &str = "/etc/baggageclaim/peer.key";

/// The flags of peers of a standalone driver.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Peers")]
pub struct Peers {
    /// Ask these other nodes for content that is not on this one, and give them what they ask for.
    /// The file has a line NAME HOST:PORT sha256:DIGITS for each node. After that may come
    /// NAMESPACE,… to which the line is limited, and zone=ZONE. `baggageclaim peer-key` prints the
    /// key of a node. The line of this node is passed over, so all nodes can have the same file. It
    /// is read at the start [default: no peers]
    #[arg(long, value_name = "FILE", env = "BAGGAGECLAIM_PEERS",
        value_parser = super::common::path_or_empty())]
    pub peers: Option<PathBuf>,
    /// ADDRESS:PORT that serves content to the nodes of `--peers`, such as [::]:9810 [default: this
    /// node only asks]
    #[arg(long, value_name = "ADDR", env = "BAGGAGECLAIM_PEER_LISTEN")]
    pub peer_listen: Option<SocketAddr>,
    /// The key of this node
    #[command(flatten)]
    pub key: PeerKey,
    /// The limit of what it sends.
    #[command(flatten)]
    pub bandwidth: PeerBandwidth,
}

/// The flag that limits what this node sends.
#[derive(Debug, Clone, Args)]
pub struct PeerBandwidth {
    /// The most bytes per second that this node sends to all peers, a quantity such as 100Mi; at
    /// least 1Mi. With a limit, all content is compressed [default: no limit]
    #[arg(long, value_name = "BYTES", env = "BAGGAGECLAIM_PEER_BANDWIDTH",
        value_parser = parse_bandwidth)]
    pub peer_bandwidth: Option<NonZeroU64>,
}

/// The flags of peers of a node of a cluster.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Peers")]
pub struct NodePeers {
    /// Ask the other nodes of the cluster for content that is not on this one, and give them what
    /// their pods ask for, at this ADDRESS:PORT, such as [::]:9810. Nodes find each other by their
    /// Pool objects. Needs `--cluster on` [default: no peers]
    #[arg(long, value_name = "ADDR", env = "BAGGAGECLAIM_PEER_LISTEN")]
    pub peer_listen: Option<SocketAddr>,
    /// The IP address of this node that others connect to [default: that of `--peer-listen`]
    #[arg(long, value_name = "IP", env = "BAGGAGECLAIM_PEER_ADDRESS")]
    pub peer_address: Option<IpAddr>,
    /// The limit of what it sends.
    #[command(flatten)]
    pub bandwidth: PeerBandwidth,
}

impl NodePeers {
    /// How this node is a peer, if it is one. `in_cluster`: it publishes its Pool.
    pub(super) fn resolve(self, in_cluster: bool) -> Result<Option<node::Peers>, Error> {
        let Some(listen) = self.peer_listen else {
            return Ok(None);
        };
        if !in_cluster {
            return Err(Error::NoCluster);
        }
        let ip = self.peer_address.unwrap_or(listen.ip());
        let address = SocketAddr::new(ip, listen.port());
        if ip.is_unspecified() || address.port() == 0 {
            return Err(Error::PeerAddress(address));
        }
        Ok(Some(node::Peers {
            listen,
            address,
            bandwidth: self.bandwidth.peer_bandwidth,
        }))
    }
}

/// The flag that names the key of this node.
#[derive(Debug, Clone, Args)]
#[command(mut_args(super::common::hide_env_value))]
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
            members: peer::Members::Files {
                list,
                key: self.key.peer_key,
            },
            bandwidth: self.bandwidth.peer_bandwidth,
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
        let peer::Members::Files { key, .. } = config.members else {
            panic!("a standalone driver has files");
        };
        assert_eq!(key, PathBuf::from(DEFAULT_KEY));
        parse_bandwidth("1Ki").expect_err("a peer would give up");
    }

    #[derive(Debug, Parser)]
    struct NodeFlags {
        #[command(flatten)]
        peers: NodePeers,
    }

    #[test]
    fn a_node_of_a_cluster_publishes_an_address_that_others_can_reach() {
        let resolve = |flags: &[&str], in_cluster| {
            let flags = std::iter::once(&"baggageclaim").chain(flags);
            NodeFlags::parse_from(flags).peers.resolve(in_cluster)
        };
        assert!(resolve(&[], false).expect("no flags").is_none());
        let any = "--peer-listen=[::]:9810";
        let alone = resolve(&[any, "--peer-address=10.0.0.1"], false);
        assert_eq!(alone.expect_err("no Pool"), Error::NoCluster);
        for wrong in ["--peer-listen=127.0.0.1:0", any] {
            let error = resolve(&[wrong], true).expect_err(wrong);
            assert!(matches!(error, Error::PeerAddress(_)), "{error}");
        }
        let address = |flags: &[&str]| {
            let peers = resolve(flags, true).expect("flags").expect("peers");
            peers.address.to_string()
        };
        assert_eq!(address(&[any, "--peer-address=10.0.0.1"]), "10.0.0.1:9810");
        assert_eq!(address(&["--peer-listen=10.0.0.2:1"]), "10.0.0.2:1");
        assert_eq!(address(&[any, "--peer-address=fd00::1"]), "[fd00::1]:9810");
    }
}
