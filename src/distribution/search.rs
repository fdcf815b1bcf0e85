//! One search for content under a name that is not on this node: the peers and the shared tier are
//! asked at the same time, and `peers::choose` decides between their answers.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep_until, timeout_at};

use super::ask::{Answer, Asker, Detail};
use super::context::Context;
use super::decide::There;
use super::offered::Offered;
use super::peers::{Candidate, Choice, Holding, Patience, PeerAnswer, choose};
use super::roster::Reader;
use super::sources::Sources;
use crate::model::{ArtifactId, Name, NodeId};

/// How long peers have at most to say whether they have content whose fetch has begun.
pub(super) const AGAIN: Duration = Duration::from_secs(2);
/// For how many pods they are asked. The others most likely have the same rights.
const READERS: usize = 4;

/// What a search found.
#[derive(Debug, Clone)]
pub(super) struct Found {
    /// What to start from.
    pub(super) answer: Answer,
    /// What the tier says: commits follow its number.
    pub(super) tier: There,
    /// The nodes where a volume may become the content.
    pub(super) makers: Vec<NodeId>,
}

fn unasked() -> Answer {
    Answer::Failed("the shared tier did not answer in time".into())
}

/// Asks about a name until `until`. `here`: the content on this node that has the name. With some,
/// no peer is asked: a peer must not delay a pod whose content is here. `patience`: what peers do
/// if there is no content.
pub(super) async fn search(
    context: &Context,
    asker: &Arc<Asker>,
    name: &Name,
    reader: &Reader,
    here: Option<ArtifactId>,
    until: Instant,
    patience: Patience,
) -> Found {
    let sources = context.settings.sources;
    // Commits follow the tier's number, and its clears count, even if it gives no content.
    let detail = if sources.has_tier() {
        Detail::Manifest(here)
    } else {
        Detail::Number
    };
    let ask = asker.ask(name, detail);
    let peers = context.asked_peers().filter(|_| here.is_none());
    let Some(peers) = peers else {
        let answer = timeout_at(until, ask).await.unwrap_or_else(|_| unasked());
        let tier = answer.there();
        return Found {
            answer: given(answer, sources),
            tier,
            makers: Vec::new(),
        };
    };
    let within = until.saturating_duration_since(Instant::now());
    let (mut holdings, mut makers) = (Vec::new(), Vec::new());
    let mut answers = peers.find(name, reader, within.min(context.settings.ask), patience);
    let mut ask = pin!(ask);
    let (mut tier, mut asked_all, mut until) = (None, false, until);
    // Once there is content, the others have only a moment left.
    let moment = |until: Instant| until.min(Instant::now() + context.settings.fresh_wait);
    while tier.is_none() || !asked_all {
        tokio::select! {
            told = answers.recv(), if !asked_all => match told {
                Some(PeerAnswer::Holds(holding)) => {
                    holdings.push(*holding);
                    until = moment(until);
                }
                Some(PeerAnswer::Makes(node)) => makers.push(node),
                None => asked_all = true,
            },
            answer = &mut ask, if tier.is_none() => {
                if matches!(answer, Answer::Content { .. }) {
                    until = moment(until);
                }
                tier = Some(answer);
            }
            () = sleep_until(until) => break,
        }
    }
    // What the whole cluster cleared, on a peer that has not heard of that.
    let covering = context.engine.covering(name);
    holdings.retain(|holding: &Holding| holding.found.manifest.fence >= covering);
    let of_tier = tier.unwrap_or_else(unasked);
    let tier = of_tier.there();
    Found {
        answer: decided(name, holdings, given(of_tier, sources), sources, covering),
        tier,
        makers,
    }
}

/// What peers have of content whose fetch has begun.
#[derive(Debug, Default)]
pub(super) struct Rest {
    /// Those that can give the rest, the best one first.
    pub(super) holders: Vec<Holding>,
    /// Whether one has the artifact in other layers: some nodes have merged them.
    pub(super) in_other_layers: bool,
}

/// Asks the peers which of them give the rest of a fetch, for one waiting pod after the other,
/// until at least one peer gives it to a pod.
pub(super) async fn rest(
    context: &Context,
    name: &Name,
    offered: &Offered,
    readers: &[Reader],
) -> Rest {
    let mut rest = Rest::default();
    let Some(peers) = context.asked_peers() else {
        return rest;
    };
    let settings = &context.settings;
    let within = settings.ask.min(AGAIN);
    for reader in readers.iter().take(READERS) {
        let mut until = Instant::now() + within;
        let mut answers = peers.find(name, reader, within, Patience::Now);
        while let Ok(Some(told)) = timeout_at(until, answers.recv()).await {
            let PeerAnswer::Holds(holding) = told else {
                continue;
            };
            if offered.is_held(&holding) {
                rest.holders.push(*holding);
                until = until.min(Instant::now() + settings.fresh_wait);
            } else if holding.found.manifest.artifact == offered.manifest.artifact {
                rest.in_other_layers = true;
            }
        }
        if !rest.holders.is_empty() {
            rest.holders.sort_by_key(|it| it.rank);
            break;
        }
    }
    rest
}

/// What the tier gives: nothing, if it is no source.
fn given(of_tier: Answer, sources: Sources) -> Answer {
    match of_tier {
        Answer::Content {
            number, cleared, ..
        } if !sources.has_tier() => Answer::Nothing {
            number,
            cleared,
            evicted: false,
        },
        answer => answer,
    }
}

/// `covering`: the highest fence that covers the name. The holdings are not older.
fn decided(
    name: &Name,
    holdings: Vec<Holding>,
    of_tier: Answer,
    sources: Sources,
    covering: u64,
) -> Answer {
    let tier = of_tier.there();
    let candidates: Vec<Candidate> = holdings.iter().map(Candidate::of).collect();
    let artifact = match choose(&name.reference, &candidates, tier.after(covering)) {
        Choice::Tier => None,
        Choice::Peers(artifact) => Some(artifact),
    };
    let offered = artifact.and_then(|artifact| Offered::of_peers(holdings, artifact));
    match offered {
        None => of_tier,
        Some(mut offered) => {
            let (number, cleared) = match tier {
                There::Unknown => (offered.record.number, 0),
                There::Nothing {
                    number, cleared, ..
                } => (number, cleared),
                There::Content {
                    number,
                    cleared,
                    artifact,
                } => {
                    if artifact == offered.manifest.artifact {
                        offered.is_shown(number, sources.prefers_tier());
                    }
                    (number, cleared)
                }
            };
            Answer::Content {
                number,
                cleared,
                artifact: offered.manifest.artifact,
                found: Some(Arc::new(offered)),
            }
        }
    }
}
