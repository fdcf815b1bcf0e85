//! Rollbacks: the controller tells a node to commit an earlier generation of a name once more, and
//! the nodes with older content to drop the name. The node carries it out in its engine.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tonic::Status;

use super::messages;
use super::serve::{Attached, Inner};
use crate::catalog::{NameHash, State, Version};
use crate::distribution::Distribution;
use crate::distribution::roster::RollbackOrder;
use crate::engine::{self, Engine};
use crate::model::{ArtifactId, Name, NodeId, Timestamp};
use crate::proto::hub::v1 as wire;
use crate::server::message_of;
use wire::from_node::Kind as From;
use wire::to_node::Kind as To;

/// How long the node may take. It may ask the shared tier.
const WAIT: Duration = Duration::from_secs(10);
/// The longest reason of a node.
const MOST_REASON: usize = 1024;

/// Finds the shared tier and the peers of this node, once there is an engine.
pub type FindDistribution = Arc<dyn Fn() -> Option<Arc<Distribution>> + Send + Sync>;

impl Inner {
    /// A time for a new commit of a name: now, or after all content that is known.
    pub(super) fn after(&self, name: &Name) -> Timestamp {
        let now = self.now();
        let state = self.state.lock();
        let known = state.catalog.explain(name, now).nodes.into_iter();
        let stamps = known.map(|of| of.entry.version.stamp.0.saturating_add(1));
        let time = state.clock.time(now);
        stamps.map(Timestamp).fold(time, Timestamp::max)
    }

    /// Orders a rollback of a node. `None`: it has not answered.
    pub(super) async fn roll_back(
        &self,
        node: &NodeId,
        order: &RollbackOrder,
    ) -> Option<Result<(), String>> {
        let mut answers = {
            let mut state = self.state.lock();
            let mut streams = state.streams.iter();
            let (session, _) = streams.find(|(_, way)| way.is_welcome && way.node == *node)?;
            let session = *session;
            let (question, answers) = state.rollbacks.ask(1);
            let order = wire::RollBack {
                question,
                tenant: order.name.tenant.to_string(),
                reference: order.name.reference.to_string(),
                to: order.to.to_string(),
                id: order.id.to_string(),
                stamp: order.stamp.0,
                by: order.by.clone(),
            };
            state.send(session, messages::to_node(To::RollBack(order)));
            answers
        };
        let answer = tokio::time::timeout(WAIT, answers.recv()).await;
        let (of, answer) = answer.ok()??;
        (of == *node).then_some(answer)
    }

    /// Orders nodes with content from before a commit to drop the name. Nothing is ordered unless
    /// that commit or newer content is on some node.
    pub(super) fn withdraw_older(&self, name: &Name, stamp: Timestamp, artifact: ArtifactId) {
        let rolled_back = Version {
            stamp,
            tie: messages::tie(artifact),
        };
        let now = self.now();
        let mut state = self.state.lock();
        let explained = state.catalog.explain(name, now).nodes;
        let durable = explained
            .iter()
            .filter(|of| of.entry.state == State::Durable);
        let (later, older): (Vec<_>, Vec<_>) =
            durable.partition(|of| of.entry.version >= rolled_back);
        let mut counts = later.into_iter().filter(|of| !of.is_cleared);
        let Some(fence) = counts.next().map(|of| of.entry.fence) else {
            return;
        };
        let sessions: Vec<_> = state
            .streams
            .iter()
            .filter(|(_, way)| older.iter().any(|of| *of.node == *way.node.as_str()))
            .map(|(session, _)| *session)
            .collect();
        for session in sessions {
            let message = wire::Superseded {
                name: NameHash::of(name).0.to_vec(),
                stamp: rolled_back.stamp.0,
                tie: rolled_back.tie,
                fence,
                tenant: name.tenant.to_string(),
                reference: name.reference.to_string(),
            };
            state.send(session, messages::to_node(To::Superseded(message)));
        }
    }
}

impl Attached {
    /// An answer of the node.
    pub(super) fn rolled_back(&self, answer: wire::RolledBack) -> Result<(), Status> {
        let why = answer.refused;
        if why.len() > MOST_REASON {
            return Err(Status::invalid_argument("the reason is too long"));
        }
        let done = if why.is_empty() { Ok(()) } else { Err(why) };
        let state = self.inner.state.lock();
        let answer_of = (self.node.clone(), done);
        state.rollbacks.answered(answer.question, answer_of);
        Ok(())
    }
}

/// Carries out an order of the controller. The stream does not wait for it.
pub(super) fn obey(
    engine: &Engine,
    tier: &FindDistribution,
    to: &mpsc::Sender<wire::FromNode>,
    order: wire::RollBack,
) {
    let (engine, tier, to) = (engine.clone(), Arc::clone(tier), to.clone());
    tokio::spawn(async move {
        let question = order.question;
        let done = roll_back(&engine, &tier, order).await;
        let mut refused = done.err().unwrap_or_default();
        refused.truncate(refused.floor_char_boundary(MOST_REASON));
        let answer = wire::RolledBack { question, refused };
        // The stream may have ended.
        let _sent = to.send(messages::from_node(From::RolledBack(answer))).await;
    });
}

/// The error says why nothing was changed.
async fn roll_back(
    engine: &Engine,
    tier: &FindDistribution,
    order: wire::RollBack,
) -> Result<(), String> {
    let malformed = "the order is malformed";
    let name = Name {
        tenant: order.tenant.parse().map_err(|_| malformed)?,
        reference: order.reference.parse().map_err(|_| malformed)?,
    };
    let to: ArtifactId = order.to.parse().map_err(|_| malformed)?;
    let ordered = engine::RollbackOrder {
        id: order.id.parse().map_err(|_| malformed)?,
        created: Timestamp(order.stamp),
        by: order.by,
    };
    let base = match tier() {
        Some(tier) => tier.base(&name.tenant, &name.reference).await,
        None => None,
    };
    let done = engine.rollback(name, to, base, Some(ordered)).await;
    done.map(drop).map_err(|error| match error {
        engine::Error::NoSuchName(_) => "the node no longer has this generation".to_owned(),
        engine::Error::NameTaken(name) => {
            format!("newer content of {name} was committed since the order was given")
        }
        engine::Error::Cleared(name) => {
            format!("{name} was cleared after this generation began, so it does not come back")
        }
        error => message_of(&error),
    })
}
