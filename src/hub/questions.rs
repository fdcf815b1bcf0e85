//! The controller's side: questions of nodes, and of the locality webhook, where content is. The
//! catalog decides; a question that finds nothing waits here for a change.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::oneshot;
use tonic::{Response, Status};

use super::find;
use super::handle::Handle;
use super::serve::{Inner, State};
use crate::catalog::{Answer, Asked, Found, Newest};
use crate::model::{CacheKey, NodeId, Tenant, TenantOrigin};
use crate::proto::hub::v1 as wire;

/// The longest that a question waits.
const LONGEST: Duration = Duration::from_secs(30);

impl Handle {
    /// A function that tells which content a new pod would start from, and all nodes that have it:
    /// for each volume what it tries. `None`: the catalog is busy for so long.
    pub fn finder(
        &self,
    ) -> impl Fn(&[Vec<TenantOrigin>], Duration) -> Option<Vec<Found>> + Send + Sync + 'static {
        let inner = Arc::clone(&self.0);
        move |volumes, wait| {
            let now = inner.now();
            let mut state = inner.state.try_lock_for(wait)?;
            let found = volumes
                .iter()
                .filter_map(|wanted| state.catalog.placement(wanted, now));
            Some(found.collect())
        }
    }
}

impl Inner {
    /// Answers a node.
    pub(super) async fn answer(
        &self,
        node: &NodeId,
        request: &wire::FindRequest,
    ) -> Result<Response<wire::FindResponse>, Status> {
        let nothing = |answer| Ok(Response::new(find::nothing(answer)));
        let mut wait = Duration::from_millis(request.wait_ms.into()).min(LONGEST);
        let name = if request.prefix {
            let (tenant, prefix) = find::prefix(request).map_err(Status::invalid_argument)?;
            self.questions.fetch_add(1, Ordering::Relaxed);
            wait = Duration::ZERO;
            match self.newest(&tenant, &prefix) {
                Newest::Of(name) => name,
                Newest::Nothing => return nothing(wire::Answer::Nothing),
                Newest::Incomplete => return nothing(wire::Answer::Incomplete),
            }
        } else {
            let name = find::name(request).map_err(Status::invalid_argument)?;
            self.questions.fetch_add(1, Ordering::Relaxed);
            name
        };
        let asked = Asked::new(name.clone(), &self.members.zone(node));
        let answer = self.find(asked, wait).await;
        Ok(Response::new(find::response(&name, &answer)))
    }

    fn newest(&self, tenant: &Tenant, prefix: &CacheKey) -> Newest {
        let now = self.now();
        self.state.lock().catalog.newest(tenant, prefix, now)
    }

    fn find(&self, asked: Asked, wait: Duration) -> impl Future<Output = Answer> {
        let (sender, answer) = oneshot::channel();
        let now = self.now();
        let mut state = self.state.lock();
        let State { catalog, held, .. } = &mut *state;
        let at_once = if wait.is_zero() {
            Some(catalog.find(&asked, now))
        } else {
            held.ask(catalog, asked.clone(), sender, now)
        };
        drop(state);
        async move {
            if let Some(answer) = at_once {
                return answer;
            }
            match tokio::time::timeout(wait, answer).await {
                Ok(Ok(answer)) => answer,
                _ => self.state.lock().catalog.find(&asked, self.now()),
            }
        }
    }
}
