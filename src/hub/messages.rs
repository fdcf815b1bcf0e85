//! The messages of `proto/hub.proto` as the types of `catalog`, and back. What the other side sent
//! is checked here.

use crate::catalog::{Answer, Entry, Found, Kind, NameHash, Report, State, Supersede, Version};
use crate::distribution::roster::Located;
use crate::engine::NamedContent;
use crate::model::{ArtifactId, Name, NodeId, Reference, Timestamp};
use crate::proto::hub::v1 as wire;

/// The most names in a question.
const MOST_KEYS: usize = 64;

/// What decides between two commits of one millisecond.
pub(super) fn tie(artifact: ArtifactId) -> u32 {
    u32::try_from(artifact.bits() >> 96).unwrap_or(u32::MAX)
}

fn kind(reference: &Reference) -> wire::Kind {
    match Kind::of(reference) {
        Kind::Output => wire::Kind::Artifact,
        Kind::ResourceCache => wire::Kind::ResourceCache,
        Kind::TaskCache => wire::Kind::TaskCache,
    }
}

/// What this node has under a name, for a report.
pub(super) fn entry(content: &NamedContent) -> wire::Entry {
    wire::Entry {
        name: NameHash::of(&content.name).0.to_vec(),
        kind: kind(&content.name.reference).into(),
        state: wire::State::Durable.into(),
        stamp: content.created.0,
        tie: tie(content.artifact),
        bytes: content.bytes,
        layers: u32::try_from(content.layers).unwrap_or(u32::MAX),
        fence: content.fence,
        tenant: String::new(),
        key: String::new(),
    }
}

fn name_hash(bytes: &[u8]) -> Result<NameHash, &'static str> {
    let hash = bytes.try_into().map(NameHash);
    hash.map_err(|_| "the digest of a name has 16 bytes")
}

/// What a node reports.
pub(super) fn report(report: &wire::Report) -> Result<Report, &'static str> {
    let put = report.put.iter().map(|entry| {
        Ok(Entry {
            name: name_hash(&entry.name)?,
            kind: match entry.kind() {
                wire::Kind::Artifact => Kind::Output,
                wire::Kind::ResourceCache => Kind::ResourceCache,
                wire::Kind::TaskCache => Kind::TaskCache,
                wire::Kind::Unspecified => return Err("an entry has no kind"),
            },
            state: match entry.state() {
                wire::State::Coming => State::Coming,
                wire::State::Durable => State::Durable,
                wire::State::Unspecified => return Err("an entry has no state"),
            },
            version: Version {
                stamp: Timestamp(entry.stamp),
                tie: entry.tie,
            },
            bytes: entry.bytes,
            layers: u16::try_from(entry.layers).unwrap_or(u16::MAX),
            fence: entry.fence,
        })
    });
    Ok(Report {
        put: put.collect::<Result<_, _>>()?,
        drop: report
            .drop
            .iter()
            .map(|name| name_hash(name))
            .collect::<Result<_, _>>()?,
        complete: report.complete,
    })
}

/// The order that a node loses a name.
pub(super) fn supersede(order: &Supersede) -> wire::ToNode {
    let superseded = wire::Superseded {
        name: order.name.0.to_vec(),
        stamp: order.version.stamp.0,
        tie: order.version.tie,
        fence: order.fence,
    };
    to_node(wire::to_node::Kind::Superseded(superseded))
}

/// The name and the version of such an order.
pub(super) fn superseded(order: &wire::Superseded) -> Result<(NameHash, Version), &'static str> {
    let version = Version {
        stamp: Timestamp(order.stamp),
        tie: order.tie,
    };
    Ok((name_hash(&order.name)?, version))
}

pub(super) fn to_node(kind: wire::to_node::Kind) -> wire::ToNode {
    wire::ToNode { kind: Some(kind) }
}

pub(super) fn from_node(kind: wire::from_node::Kind) -> wire::FromNode {
    wire::FromNode { kind: Some(kind) }
}

/// A question about one name.
pub(super) fn question(name: &Name, wait_ms: u32) -> wire::FindRequest {
    let key = match &name.reference {
        Reference::Artifact(name) => name.to_string(),
        Reference::ResourceCache(key) | Reference::TaskCache(key) => key.to_string(),
    };
    wire::FindRequest {
        tenant: name.tenant.to_string(),
        kind: kind(&name.reference).into(),
        keys: vec![key],
        wait_ms,
    }
}

/// The names that a question is about. The error names the field.
pub(super) fn names(request: &wire::FindRequest) -> Result<Vec<Name>, String> {
    let kind = match request.kind() {
        wire::Kind::Artifact => "artifact",
        wire::Kind::ResourceCache => "resource-cache",
        wire::Kind::TaskCache => "task-cache",
        wire::Kind::Unspecified => return Err("kind is missing".to_owned()),
    };
    if request.keys.is_empty() || request.keys.len() > MOST_KEYS {
        return Err(format!("keys: expected 1 to {MOST_KEYS}"));
    }
    let tenant = request.tenant.parse();
    let tenant: crate::model::Tenant = tenant.map_err(|error| format!("tenant: {error}"))?;
    let name = |key: &String| {
        let reference = format!("{kind}/{key}").parse();
        Ok(Name {
            tenant: tenant.clone(),
            reference: reference.map_err(|error| format!("keys: {error}"))?,
        })
    };
    request.keys.iter().map(name).collect()
}

/// The answer to a question. `nodes`: the holders that are known.
pub(super) fn response(request: &wire::FindRequest, answer: &Answer) -> wire::FindResponse {
    let nothing = |answer: wire::Answer| wire::FindResponse {
        answer: answer.into(),
        ..wire::FindResponse::default()
    };
    match answer {
        Answer::Nothing => nothing(wire::Answer::Nothing),
        Answer::Coming => nothing(wire::Answer::Coming),
        Answer::Incomplete => nothing(wire::Answer::Incomplete),
        Answer::Found(found) => self::found(request, found),
    }
}

fn found(request: &wire::FindRequest, found: &Found) -> wire::FindResponse {
    wire::FindResponse {
        answer: wire::Answer::Found.into(),
        key: request.keys.get(found.which).cloned().unwrap_or_default(),
        stamp: found.version.stamp.0,
        tie: found.version.tie,
        bytes: found.bytes,
        layers: found.layers.into(),
        fence: found.fence,
        holders: found.holders.iter().map(ToString::to_string).collect(),
    }
}

/// What an answer says to the asking node.
pub(super) fn located(response: &wire::FindResponse) -> Located {
    match response.answer() {
        wire::Answer::Found => {
            let holders = response.holders.iter();
            Located::At(holders.filter_map(|node| NodeId::new(node).ok()).collect())
        }
        wire::Answer::Nothing | wire::Answer::Coming => Located::Nothing,
        wire::Answer::Incomplete | wire::Answer::Unspecified => Located::Unknown,
    }
}

/// A failed call, for the log.
pub(super) fn say(status: &tonic::Status) -> String {
    let code = crate::server::code_name(status.code());
    format!("{code}: {}", crate::sys::printable(status.message()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn content(reference: &str) -> NamedContent {
        NamedContent {
            name: Name {
                tenant: "ci".parse().expect("a label"),
                reference: reference.parse().expect("a reference"),
            },
            artifact: ArtifactId::from_bits(7 << 96 | 1),
            created: Timestamp(1_795_400_000_000),
            bytes: 100,
            layers: 2,
            fence: 9,
        }
    }

    #[test]
    fn a_report_arrives_as_it_was_sent() {
        for reference in ["artifact/a", "task-cache/b", "resource-cache/c"] {
            let content = content(reference);
            let sent = wire::Report {
                put: vec![entry(&content)],
                drop: vec![NameHash::of(&content.name).0.to_vec()],
                complete: true,
            };
            let report = report(&sent).expect("it is valid");
            let put = report.put[0];
            assert_eq!(put.name, NameHash::of(&content.name));
            assert_eq!(put.kind, Kind::of(&content.name.reference));
            assert_eq!(put.version.stamp, content.created);
            assert_eq!((put.version.tie, put.bytes, put.layers), (7, 100, 2));
            assert_eq!(put.fence, 9);
            assert_eq!((report.drop, report.complete), (vec![put.name], true));
        }
    }

    #[test]
    fn what_is_malformed_is_refused() {
        let good = entry(&content("artifact/a"));
        let wrong = |change: fn(&mut wire::Entry)| {
            let mut entry = good.clone();
            change(&mut entry);
            let put = vec![entry];
            report(&wire::Report {
                put,
                ..wire::Report::default()
            })
            .expect_err("it is refused")
        };
        wrong(|entry| entry.kind = 0);
        wrong(|entry| entry.state = 9);
        wrong(|entry| entry.name.truncate(15));
        let short = wire::Report {
            drop: vec![vec![0; 17]],
            ..wire::Report::default()
        };
        report(&short).expect_err("it is refused");
        let name = content("task-cache/b").name;
        let asked = question(&name, 5);
        assert_eq!(names(&asked).expect("it is valid"), [name]);
        let wrong = |change: fn(&mut wire::FindRequest)| {
            let mut asked = asked.clone();
            change(&mut asked);
            names(&asked).expect_err("it is refused")
        };
        wrong(|asked| asked.kind = 0);
        wrong(|asked| asked.keys.clear());
        wrong(|asked| asked.keys = vec!["k".to_owned(); MOST_KEYS + 1]);
        wrong(|asked| asked.keys = vec!["../x\n".to_owned()]);
        wrong(|asked| asked.tenant = "A/B".to_owned());
    }
}
