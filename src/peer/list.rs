//! The file of a standalone driver: who the peers are, what their keys are, and what each may read.
//! In Kubernetes the API server tells that (`k8s::peers`).

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use async_trait::async_trait;

use crate::distribution::roster::{Access, Asked, Peer, Refusal, Roster};
use crate::model::{NodeId, Sha256, Tenant};

/// Why a list of peers cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ListError {
    /// The file cannot be read.
    #[error("the list of peers {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// A line is wrong.
    #[error(
        "the list of peers {}, line {line}: {cause}; expected NAME HOST:PORT sha256:DIGITS [NAMESPACE,…] [zone=ZONE]",
        path.display()
    )]
    Line {
        /// The file.
        path: PathBuf,
        /// The line's number, from 1.
        line: usize,
        /// What is wrong with it.
        cause: String,
    },
}

/// A line of the file.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Line {
    peer: Peer,
    /// The tenants whose content moves between this node and the peer; `None`: all.
    tenants: Option<BTreeSet<Tenant>>,
    /// Where it is; `None`: in a zone of its own.
    zone: Option<String>,
}

impl Line {
    fn covers(&self, tenant: &Tenant) -> bool {
        let tenants = self.tenants.as_ref();
        tenants.is_none_or(|tenants| tenants.contains(tenant))
    }
}

/// The peers of a file: those of this node's zone first, else in the order of the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerList(Vec<Line>);

impl PeerList {
    /// Reads a file. The line of `own`, the key of this node, is passed over, so that all nodes can
    /// have the same file.
    pub fn read(path: &Path, own: &Sha256) -> Result<Self, ListError> {
        let text = std::fs::read_to_string(path).map_err(|source| ListError::Io {
            path: path.to_owned(),
            source,
        })?;
        Self::parse(&text, own).map_err(|(line, cause)| ListError::Line {
            path: path.to_owned(),
            line,
            cause,
        })
    }

    fn parse(text: &str, own: &Sha256) -> Result<Self, (usize, String)> {
        let mut lines: Vec<Line> = Vec::new();
        for (number, line) in (1..).zip(text.lines()) {
            let line = line.split('#').next().unwrap_or_default();
            let words: Vec<&str> = line.split_whitespace().collect();
            if words.is_empty() {
                continue;
            }
            let line = parse_line(&words).map_err(|cause| (number, cause))?;
            let is_same =
                |it: &Line| it.peer.key == line.peer.key || it.peer.name == line.peer.name;
            if lines.iter().any(is_same) {
                return Err((number, "its name or key is in an earlier line".to_owned()));
            }
            lines.push(line);
        }
        let here = lines.iter().find(|line| line.peer.key == *own);
        let here = here.and_then(|line| line.zone.clone());
        lines.retain(|line| line.peer.key != *own);
        lines.sort_by_key(|line| line.zone.is_none() || line.zone != here);
        Ok(Self(lines))
    }
}

fn parse_line(words: &[&str]) -> Result<Line, String> {
    let zone = words.last().and_then(|word| word.strip_prefix("zone="));
    let (name, address, key, tenants) = match words[..words.len() - usize::from(zone.is_some())] {
        [name, address, key] => (name, address, key, None),
        [name, address, key, tenants] => (name, address, key, Some(tenants)),
        _ => return Err(format!("it has {} words", words.len())),
    };
    if zone.is_some_and(str::is_empty) {
        return Err("its zone has no name".to_owned());
    }
    let port = address.rsplit_once(':').map(|(_, port)| port.parse());
    if !matches!(port, Some(Ok(1_u16..))) {
        return Err(format!("`{address}` is no address with a port"));
    }
    let tenants = tenants.map(|tenants| tenants.split(',').map(str::parse).collect());
    Ok(Line {
        peer: Peer {
            name: NodeId::new(name).map_err(|error| error.to_string())?,
            address: address.to_owned(),
            key: key.parse().map_err(|_| format!("`{key}` is no key"))?,
        },
        tenants: tenants
            .transpose()
            .map_err(|_| "its namespaces are not DNS labels".to_owned())?,
        zone: zone.map(str::to_owned),
    })
}

impl Roster for PeerList {
    fn peers(&self, tenant: &Tenant) -> Vec<Peer> {
        let lines = self.0.iter().filter(|line| line.covers(tenant));
        lines.map(|line| line.peer.clone()).collect()
    }

    fn count(&self) -> u64 {
        self.0.len() as u64
    }

    fn named(&self, key: &Sha256) -> Option<NodeId> {
        let line = self.0.iter().find(|line| line.peer.key == *key);
        line.map(|line| line.peer.name.clone())
    }

    fn peer(&self, name: &NodeId) -> Option<Peer> {
        let line = self.0.iter().find(|line| line.peer.name == *name);
        line.map(|line| line.peer.clone())
    }
}

/// Every peer of the file is trusted with the namespaces of its line, whatever pod it names.
#[async_trait]
impl Access for PeerList {
    async fn check(&self, peer: &NodeId, asked: &Asked) -> Result<(), Refusal> {
        let tenant = &asked.name.tenant;
        let line = self.0.iter().find(|line| line.peer.name == *peer);
        match line {
            Some(line) if line.covers(tenant) => Ok(()),
            _ => Err(Refusal::Denied(format!(
                "the list of peers does not give it namespace {tenant}"
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(byte: u8) -> Sha256 {
        Sha256([byte; 32])
    }

    #[test]
    fn a_list_has_names_addresses_keys_and_perhaps_namespaces() {
        let text = format!(
            "# the nodes\n\none 10.0.0.1:9810 {}\ntwo node-2:9810 {} ci,web # of a team\nthree [::1]:1 {}\n",
            key(1),
            key(2),
            key(3)
        );
        let list = PeerList::parse(&text, &key(3)).expect("it is a list");
        let (ci, other) = (
            "ci".parse().expect("a label"),
            "x".parse().expect("a label"),
        );
        let names = |tenant| -> Vec<String> {
            let peers = list.peers(tenant).into_iter();
            peers.map(|peer| peer.name.as_str().to_owned()).collect()
        };
        assert_eq!(
            (names(&ci), names(&other)),
            (vec!["one".into(), "two".into()], vec!["one".into()])
        );
        assert_eq!(list.named(&key(2)).expect("it is there").as_str(), "two");
        assert_eq!(list.named(&key(3)), None, "that is this node");
        assert_eq!(list.named(&key(4)), None);
    }

    #[test]
    fn peers_of_the_same_zone_come_first() {
        let line = |number: u8, more: &str| {
            format!("n{number} 10.0.0.{number}:9810 {} {more}\n", key(number))
        };
        let [one, two, three, four, five] = [
            line(1, ""),
            line(2, "zone=west"),
            line(3, "ci zone=east"),
            line(4, "zone=east"),
            line(5, "zone=east"),
        ];
        let text = [one, two, three, four, five].concat();
        let ci = "ci".parse().expect("a label");
        for (own, order) in [(5, "n3 n4 n1 n2"), (1, "n2 n3 n4 n5"), (2, "n1 n3 n4 n5")] {
            let list = PeerList::parse(&text, &key(own)).expect("it is a list");
            let peers = list.peers(&ci);
            let names: Vec<&str> = peers.iter().map(|peer| peer.name.as_str()).collect();
            assert_eq!(names.join(" "), order, "of n{own}");
        }
    }

    #[test]
    fn a_wrong_line_is_named() {
        let good = format!("one 10.0.0.1:9810 {}", key(1));
        for (bad, why) in [
            ("one".to_owned(), "1 words"),
            (good.replace(":9810", ""), "no address with a port"),
            (good.replace(":9810", ":0"), "no address with a port"),
            (good.replace("sha256:", "md5:"), "is no key"),
            (format!("{good} A_B"), "namespaces"),
            (format!("{good} zone="), "zone"),
            (format!("{good} zone=east ci"), "5 words"),
            (good.replace("one", "two"), "earlier line"),
        ] {
            let text = format!("{good}\n{bad}");
            let (line, cause) = PeerList::parse(&text, &key(9)).expect_err(&bad);
            assert!(line == 2 && cause.contains(why), "{bad}: {line}: {cause}");
        }
    }
}
