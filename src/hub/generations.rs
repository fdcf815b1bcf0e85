//! The generations of a name on all nodes, for a person who asks the controller: each node is asked
//! over its stream, and answers from its engine. Nothing is kept of it.

use std::collections::{BTreeSet, HashSet};
use std::time::Duration;

use tokio::sync::mpsc;
use tonic::Status;

use super::asked::Generation;
use super::handle::Handle;
use super::messages;
use super::serve::Attached;
use crate::catalog::SessionId;
use crate::engine::{ArtifactRow, Engine};
use crate::model::{Maker, Name, NodeId, Pod, Timestamp};
use crate::proto::hub::v1 as wire;
use wire::from_node::Kind as From;
use wire::to_node::Kind as To;

/// How long the nodes may take.
const WAIT: Duration = Duration::from_secs(5);
/// What a node answers.
type Answer = (NodeId, Vec<Generation>);
/// The most generations of a node that are told. Then an answer fits in a message.
const MOST: usize = 100;

/// The generations of a name on all nodes.
#[derive(Debug, Default)]
pub struct Generations {
    /// With the node that has each.
    pub found: Vec<(NodeId, Generation)>,
    /// The nodes that have not answered.
    pub silent: BTreeSet<String>,
}

impl Handle {
    /// The generations of a name. Asks all nodes with a stream, and waits a few seconds for them.
    /// The others are silent, as are older ones.
    pub async fn generations(&self, name: &Name) -> Generations {
        let mut silent = self.0.members.expected().unwrap_or_default();
        let (asked, mut answers) = self.ask(name);
        silent.extend(asked.iter().map(|node| node.as_str().to_owned()));
        let mut found = Vec::new();
        let collect = async {
            while let Some((node, of_node)) = answers.recv().await {
                silent.remove(node.as_str());
                found.extend(of_node.into_iter().map(|it| (node.clone(), it)));
            }
        };
        // Those that are late are silent.
        let _late = tokio::time::timeout(WAIT, collect).await;
        found.sort_by(|(one, a), (other, b)| {
            (b.created, one.as_str(), a.id).cmp(&(a.created, other.as_str(), b.id))
        });
        Generations { found, silent }
    }

    /// Sends the question; returns the nodes that get it, and their answers.
    fn ask(&self, name: &Name) -> (HashSet<NodeId>, mpsc::Receiver<Answer>) {
        let mut state = self.0.state.lock();
        let streams = state.streams.iter().filter(|(_, way)| way.is_welcome);
        let (sessions, nodes): (Vec<SessionId>, HashSet<NodeId>) = streams
            .map(|(session, way)| (*session, way.node.clone()))
            .unzip();
        let (question, received) = state.questions.ask(nodes.clone());
        for session in sessions {
            let log = wire::Log {
                question,
                tenant: name.tenant.to_string(),
                reference: name.reference.to_string(),
            };
            state.send(session, messages::to_node(To::Log(log)));
        }
        (nodes, received)
    }
}

impl Attached {
    /// An answer of the node.
    pub(super) fn generations(&self, answer: wire::Generations) -> Result<(), Status> {
        if answer.generations.len() > MOST {
            return Err(Status::invalid_argument("too many generations"));
        }
        let generations = answer.generations.into_iter().map(received);
        let generations = generations.collect::<Result<Vec<_>, _>>();
        let generations = generations.map_err(Status::invalid_argument)?;
        let mut state = self.inner.state.lock();
        let answer_of = (self.node.clone(), generations);
        state.questions.answered(answer.question, answer_of);
        Ok(())
    }
}

/// Answers the controller. The stream does not wait for it.
pub(super) fn answer(engine: &Engine, to: &mpsc::Sender<wire::FromNode>, question: wire::Log) {
    let (engine, to) = (engine.clone(), to.clone());
    tokio::spawn(async move {
        let name = messages::name(&question.tenant, &question.reference);
        let generations = name.map(|name| of_node(&engine, &name));
        let answer = wire::Generations {
            question: question.question,
            generations: generations.unwrap_or_default(),
        };
        // The stream may have ended.
        let _sent = to
            .send(messages::from_node(From::Generations(answer)))
            .await;
    });
}

/// The generations of a name on this node, the newest first.
fn of_node(engine: &Engine, name: &Name) -> Vec<wire::Generation> {
    let mut rows = engine.artifacts(Some(&name.tenant));
    rows.retain(|row| row.reference == name.reference);
    rows.sort_by_key(|row| std::cmp::Reverse((row.created, row.id)));
    rows.into_iter().take(MOST).map(told).collect()
}

fn told(row: ArtifactRow) -> wire::Generation {
    let mut told = wire::Generation {
        id: row.id.to_string(),
        stamp: row.created.0,
        current: row.name.is_some(),
        bytes: row.usage.map(|usage| usage.bytes),
        in_use_by: u64::try_from(row.in_use_by).unwrap_or(u64::MAX),
        ..wire::Generation::default()
    };
    if let Some(maker) = row.made_by {
        told.pod = maker.pod.name;
        told.pod_uid = maker.pod.uid.to_string();
        told.service_account = maker.pod.service_account.unwrap_or_default();
        told.images = maker.images;
        told.node = maker.node.map(String::from).unwrap_or_default();
        told.parent = maker.parent.map(|id| id.to_string()).unwrap_or_default();
    }
    told
}

/// What a node has told. The error says which field is wrong.
fn received(told: wire::Generation) -> Result<Generation, String> {
    let some = |text: String| (!text.is_empty()).then_some(text);
    let id = told.id.parse().map_err(|error| format!("id: {error}"))?;
    let node = some(told.node).map(NodeId::new).transpose();
    let node = node.map_err(|error| format!("node: {error}"))?;
    let parent = some(told.parent).map(|id| id.parse()).transpose();
    let parent = parent.map_err(|error| format!("parent: {error}"))?;
    let uid = some(told.pod_uid).map(|uid| uid.parse()).transpose();
    let uid = uid.map_err(|error| format!("pod uid: {error}"))?;
    let made_by = uid.map(|uid| {
        let pod = Pod {
            uid,
            name: told.pod,
            service_account: some(told.service_account),
        };
        Maker::new(pod, told.images, node).of_fork(parent)
    });
    Ok(Generation {
        id,
        created: Timestamp(told.stamp),
        is_current: told.current,
        bytes: told.bytes,
        in_use_by: told.in_use_by,
        made_by,
    })
}
