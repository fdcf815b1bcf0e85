//! Volumes whose content comes from another node. `distribution` fetches it; this file tells in the
//! `Volume` how far that is.
//!
//! A job waits a moment only, and then tells how far the fetch is. A fetch goes on between two
//! jobs. It ends before its volume is deleted, and looks at the order once more before the volume
//! appears.

use std::sync::Arc;
use std::time::Duration;

use kube::Api;
use kube::runtime::controller::Action;

use super::{Agent, Error, TRY_AGAIN, decide, refusal};
use crate::api::{Phase, Refusal, Volume, Wanted};
use crate::distribution::roster::AskedClone;
use crate::distribution::{CloneRequest, Cloned, IsWanted};
use crate::engine::claims::CreateClaim;
use crate::model::{NodeId, VolumeId};
use crate::server::{code_of, may_go_on};

/// How long a job waits for a fetch.
const MOMENT: Duration = Duration::from_secs(1);

/// How long the API server may take to answer a read of a `Volume`.
const ANSWER: Duration = Duration::from_secs(10);

/// Has the content fetched, and reports how far that is.
pub(super) async fn create(
    volume: &Arc<Volume>,
    request: CreateClaim,
    agent: &Arc<Agent>,
) -> Result<Action, Error> {
    let cloned = match (
        clone_request(volume, request, agent),
        (agent.distribution)(),
    ) {
        (Err(refusal), _) => Err(refusal),
        (Ok(_), None) => Err(Refusal::new(
            "RESOURCE_EXHAUSTED",
            "this node is no peer of the others (--peer-listen), so no volume can be cloned from \
             another node",
        )),
        (Ok(request), Some(distribution)) => Ok(distribution.clone_volume(request, MOMENT).await),
    };
    let pool = &agent.pool;
    let (status, action) = match cloned {
        Err(refusal) => {
            let status = decide::created(volume, pool, Err(&refusal));
            (status, Action::await_change())
        }
        Ok(Cloned::Made(made)) => {
            let status = decide::created(volume, pool, Ok(&*made));
            (status, Action::await_change())
        }
        Ok(Cloned::Failed(error)) if may_go_on(code_of(&error)) => {
            let why = refusal(&error).message;
            (
                decide::fetching(volume, pool, why),
                Action::requeue(TRY_AGAIN),
            )
        }
        Ok(Cloned::Failed(error)) => {
            let status = decide::created(volume, pool, Err(&refusal(&error)));
            (status, Action::await_change())
        }
        Ok(Cloned::Runs(now)) => (decide::fetching(volume, pool, now), Action::requeue(MOMENT)),
    };
    agent.report(&**volume, &status).await?;
    Ok(action)
}

/// Ends the fetch for a volume that is to be deleted.
pub(super) async fn stop(id: &str, agent: &Agent) {
    if let (Ok(id), Some(distribution)) = (id.parse(), (agent.distribution)()) {
        distribution.stop_clone(&id).await;
    }
}

fn clone_request(
    volume: &Volume,
    claim: CreateClaim,
    agent: &Agent,
) -> Result<CloneRequest, Refusal> {
    let invalid = |why: String| Refusal::new("INVALID_ARGUMENT", format!("spec.fetch: {why}"));
    let name = volume.metadata.name.as_deref().unwrap_or_default();
    let id: VolumeId = name.parse().map_err(|error| invalid(format!("{error}")))?;
    let fetch = volume.spec.fetch.as_ref();
    let fetch = fetch.ok_or_else(|| invalid("absent".to_owned()))?;
    let snapshot = fetch.snapshot.parse();
    Ok(CloneRequest {
        claim,
        asked: AskedClone {
            snapshot: snapshot.map_err(|error| invalid(format!("snapshot: {error}")))?,
            volume: id,
        },
        node: NodeId::new(&*fetch.node_name)
            .map_err(|error| invalid(format!("nodeName: {error}")))?,
        wanted: is_wanted(volume, agent),
    })
}

/// Whether the object is there, the same, and orders the volume.
fn is_wanted(volume: &Volume, agent: &Agent) -> IsWanted {
    let volumes: Api<Volume> = Api::all(agent.client.clone());
    let (name, uid) = (volume.metadata.name.clone(), volume.metadata.uid.clone());
    Arc::new(move || {
        let (volumes, name, uid) = (volumes.clone(), name.clone(), uid.clone());
        Box::pin(async move {
            let found = volumes.get_opt(name.as_deref().unwrap_or_default());
            let found = tokio::time::timeout(ANSWER, found).await.ok()?.ok()?;
            Some(found.is_some_and(|volume| {
                volume.metadata.uid == uid
                    && volume.spec.wanted == Wanted::Present
                    && matches!(volume.phase(), None | Some(Phase::Fetching))
            }))
        })
    })
}
