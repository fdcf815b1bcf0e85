//! Rollbacks: the controller tells a node to commit an earlier generation of a name once more, and
//! the nodes with older content to drop the name. The node carries it out in its engine.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tonic::Status;

use super::asked::RollbackRefusal;
use super::handle::Handle;
use super::messages;
use super::serve::Attached;
use crate::catalog::{NameHash, OfNode, SessionId, State, Version};
use crate::distribution::FindDistribution;
use crate::engine::{self, Engine};
use crate::model::{ArtifactId, Name, NodeId, Timestamp, counted};
use crate::proto::hub::v1 as wire;
use crate::server::message_of;
use wire::from_node::Kind as From;
use wire::to_node::Kind as To;

/// How long the node may take. It may ask the shared tier.
const WAIT: Duration = Duration::from_secs(10);
/// The longest reason of a node.
const MOST_REASON: usize = 1024;

/// A user's order to put an earlier generation of a name back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RollbackOrder {
    /// The name.
    pub name: Name,
    /// The id of the generation on the node that gets the order.
    pub to: ArtifactId,
    /// The id of the new artifact. An order that is repeated has the same one.
    pub id: ArtifactId,
    /// When the new artifact counts as committed.
    pub stamp: Timestamp,
    /// The user.
    pub by: String,
}

impl Handle {
    /// A time for a new commit of this name: now, or after all content that is known. `told`: when
    /// the newest generation was committed, as the nodes say. If that is far ahead, it does not
    /// count, as in the catalog: a wrong stamp must not put a commit into the far future.
    #[must_use]
    pub fn commit_time(&self, name: &Name, told: Timestamp) -> Timestamp {
        let now = self.0.now();
        let state = self.0.state.lock();
        let time = state.clock.time(now);
        let known = state.catalog.on_nodes(name).into_iter();
        let stamps = known.map(|of| of.entry.version.stamp);
        let stamps = stamps.chain([counted(told, time)]);
        let after = stamps.map(|stamp| Timestamp(stamp.0.saturating_add(1)));
        after.fold(time, Timestamp::max)
    }

    /// Orders a rollback of this node, and waits a few seconds. The error says why the node did
    /// nothing. `None`: it has not answered, or cannot say yet. Order it again.
    pub async fn roll_back(
        &self,
        node: &NodeId,
        order: &RollbackOrder,
    ) -> Option<Result<(), RollbackRefusal>> {
        let mut answers = {
            let mut state = self.0.state.lock();
            // The newest stream: after a reconnect an earlier one is about to end.
            let mut streams = state.streams.iter().rev();
            let (session, _) = streams.find(|(_, way)| way.is_welcome && way.node == *node)?;
            let session = *session;
            let (question, answers) = state.rollbacks.ask([node.clone()].into());
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
        answer.ok()?.map(|(_, answer)| answer)
    }

    /// Orders the nodes that have content of this name which is older than this commit to drop the
    /// name, if that commit or newer content is on some node. The commit counts as the catalog
    /// dates it, and not later than `stamp`.
    pub fn withdraw_older(&self, name: &Name, stamp: Timestamp, artifact: ArtifactId) {
        let tie = messages::tie(artifact);
        let state = self.0.state.lock();
        let mut durable = state.catalog.on_nodes(name);
        durable.retain(|of| of.entry.state == State::Durable);
        let of_commit = durable.iter().map(|of| of.entry.version);
        let dated = of_commit.filter(|it| it.tie == tie).map(|it| it.stamp);
        let stamp = dated.max().map_or(stamp, |dated| dated.min(stamp));
        let rolled_back = Version { stamp, tie };
        // A copy of the commit may have another stamp.
        let is_later = |of: &&OfNode| {
            let version = of.entry.version;
            version.tie == tie || version >= rolled_back
        };
        let (later, older): (Vec<_>, Vec<_>) = durable.iter().partition(is_later);
        let mut counts = later.into_iter().filter(|of| !of.is_cleared);
        let Some(fence) = counts.next().map(|of| of.entry.fence) else {
            return;
        };
        let older: BTreeSet<&str> = older.into_iter().map(|of| &*of.node).collect();
        let sessions: Vec<SessionId> = state
            .streams
            .iter()
            .filter(|(_, way)| older.contains(way.node.as_str()))
            .map(|(session, _)| *session)
            .collect();
        let message = Arc::new(messages::to_node(To::Superseded(wire::Superseded {
            name: NameHash::of(name).0.to_vec(),
            stamp: rolled_back.stamp.0,
            tie: rolled_back.tie,
            fence,
            tenant: name.tenant.to_string(),
            reference: name.reference.to_string(),
        })));
        for session in sessions {
            state.send(session, Arc::clone(&message));
        }
    }
}

impl Attached {
    /// An answer of the node.
    pub(super) fn rolled_back(&self, answer: wire::RolledBack) -> Result<(), Status> {
        let (why, is_gone) = (answer.refused, answer.gone);
        if why.len() > MOST_REASON {
            return Err(Status::invalid_argument("the reason is too long"));
        }
        let done = if why.is_empty() {
            Ok(())
        } else {
            Err(RollbackRefusal { why, is_gone })
        };
        let mut state = self.inner.state.lock();
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
        let done = match parsed(order) {
            Ok((name, to, order)) => roll_back(&engine, &tier, name, to, order).await,
            Err(why) => Err(Some(why.into())),
        };
        let (mut refused, gone) = match done {
            Ok(()) => (String::new(), false),
            Err(Some(refusal)) => (refusal.why, refusal.is_gone),
            // Without an answer the controller repeats the order.
            Err(None) => return,
        };
        refused.truncate(refused.floor_char_boundary(MOST_REASON));
        let answer = wire::RolledBack {
            question,
            refused,
            gone,
        };
        // The stream may have ended.
        let _sent = to.send(messages::from_node(From::RolledBack(answer))).await;
    });
}

/// The name, the generation, and the order. The error says what is wrong.
fn parsed(order: wire::RollBack) -> Result<(Name, ArtifactId, engine::RollbackOrder), String> {
    let malformed = "the order is malformed";
    let name = messages::name(&order.tenant, &order.reference).ok_or(malformed)?;
    let to = order.to.parse().map_err(|_| malformed)?;
    let order = engine::RollbackOrder {
        id: order.id.parse().map_err(|_| malformed)?,
        created: Timestamp(order.stamp),
        by: order.by,
    };
    Ok((name, to, order))
}

/// The error says why nothing was changed. `None`: that may be different soon, or is not known.
async fn roll_back(
    engine: &Engine,
    tier: &FindDistribution,
    name: Name,
    to: ArtifactId,
    order: engine::RollbackOrder,
) -> Result<(), Option<RollbackRefusal>> {
    let not_yet = |error: &dyn fmt::Display| -> Option<RollbackRefusal> {
        tracing::warn!(%name, earlier.id = %to, %error,
            "an order of the controller to roll back is not carried out yet; the controller \
             repeats it");
        None
    };
    let base = match tier() {
        Some(tier) => {
            let base = tier.base(&name.tenant, &name.reference).await;
            base.map_err(|error| not_yet(&error))?
        }
        None => None,
    };
    let done = engine.rollback(name.clone(), to, base, Some(order)).await;
    done.map(drop)
        .map_err(|error| refusal(&error).or_else(|| not_yet(&error)))
}

/// Why an order will never be carried out here. `None`: another time it may be, or it was.
fn refusal(error: &engine::Error) -> Option<RollbackRefusal> {
    let why = match error {
        engine::Error::NoSuchName(_) => Some("the node no longer has this generation".to_owned()),
        engine::Error::NameTaken(name) => Some(format!(
            "newer content of {name} was committed since the order was given"
        )),
        engine::Error::Cleared(name) => Some(format!(
            "{name} was cleared after this generation began, so it does not come back"
        )),
        engine::Error::Unsupported { .. } => Some(message_of(error)),
        _ => None,
    };
    let is_gone = matches!(error, engine::Error::NoSuchName(_));
    why.map(|why| RollbackRefusal { why, is_gone })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Error;

    #[test]
    fn an_error_that_may_pass_or_leaves_doubt_does_not_end_an_order() {
        let name = || Name {
            tenant: "ci".parse().expect("a tenant"),
            reference: "task-cache/go".parse().expect("a reference"),
        };
        for last in [
            Error::NoSuchName(name()),
            Error::NameTaken(name()),
            Error::Cleared(name()),
        ] {
            let refused = refusal(&last).expect("it ends here");
            let is_gone = matches!(last, Error::NoSuchName(_));
            assert_eq!(refused.is_gone, is_gone, "{last}");
        }
        for passing in [
            Error::Degraded("disk".to_owned()),
            Error::ShuttingDown,
            Error::WritebackFailed,
        ] {
            assert_eq!(refusal(&passing), None, "{passing}");
        }
    }
}
