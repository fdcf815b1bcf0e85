//! Content of the shared tier whose namespace was deleted while no controller ran. Nodes may have
//! none of it any more, so the tier itself says whose it is: below each tenant's prefix the
//! controller keeps the uid of its cluster's namespace (`shared::ClusterUid`). If the namespace has
//! another uid, or is gone, its names are cleared as with each deletion of a namespace.
//!
//! A tenant without a record of this cluster is never cleared: another cluster may have written it,
//! or this cluster itself before it was set up again. If there is such a namespace, it gets the
//! record, and the content is its own.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kube::ResourceExt as _;

use super::ended::Ended;
use super::fencer::Fencer;
use super::fences::Error;
use crate::k8s::watched::Namespaces;
use crate::model::Tenant;
use crate::shared::{self, ClusterUid, Store};
use crate::sys;

/// How often the tenants are listed.
const LOOK: Duration = Duration::from_secs(30);
/// The namespace whose uid is the cluster's. It lives as long as the cluster.
const OF_CLUSTER: &str = "kube-system";
/// How many namespaces are cleared in one look.
const MOST_CLEARED: usize = 16;

/// Compares the tenants of the tier with the namespaces.
pub(super) struct Tenants {
    store: Store,
    fencer: Arc<Fencer>,
    ended: Arc<Ended>,
    namespaces: Namespaces,
    /// The records of this cluster, as far as they were read; `None`: there is none.
    recorded: BTreeMap<Tenant, Option<String>>,
}

/// What is done with a tenant.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    Nothing,
    /// The namespace takes the content as its own.
    Record,
    /// The namespace of the record has ended: its names are cleared.
    Clear,
}

/// What is done with a tenant. `recorded` and `there` are uids: that of the record of this cluster,
/// and that of the namespace.
fn judge(recorded: Option<&str>, there: Option<&str>) -> Step {
    match (recorded, there) {
        (None, None) => Step::Nothing,
        (None, Some(_)) => Step::Record,
        (Some(recorded), Some(there)) if recorded == there => Step::Nothing,
        (Some(_), _) => Step::Clear,
    }
}

impl Tenants {
    pub(super) fn new(
        store: Store,
        fencer: Arc<Fencer>,
        ended: Arc<Ended>,
        namespaces: Namespaces,
    ) -> Self {
        Self {
            store,
            fencer,
            ended,
            namespaces,
            recorded: BTreeMap::new(),
        }
    }

    /// Looks now and then, until it is dropped.
    pub(super) async fn run(mut self) {
        self.namespaces.listed().await;
        let mut said = None;
        loop {
            let failure = self.look().await.err().map(|error| error.to_string());
            if let Some(error) = failure.as_ref().filter(|_| failure != said) {
                tracing::warn!(tier = %self.store, %error,
                    "the namespaces of the shared tier cannot be compared with those of the \
                     cluster: content of one that was deleted may still be found; retrying");
            }
            said = failure;
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Looks at all tenants. One that fails does not stop the look at the others.
    async fn look(&mut self) -> Result<(), Error> {
        let there = self.namespaces.uids();
        let cluster = there.get(OF_CLUSTER).map(String::as_str);
        let Some(cluster) = cluster.and_then(ClusterUid::new) else {
            return Ok(());
        };
        let tenants = self.ask(Store::tenants).await?;
        self.recorded
            .retain(|it, _| tenants.binary_search(it).is_ok());
        let (mut cleared, mut failure) = (0, None);
        for tenant in tenants {
            let uid = there.get(&tenant.to_string()).cloned();
            match self.look_at(&tenant, &cluster, uid).await {
                Ok(made) => cleared += usize::from(made),
                Err(error) => failure = Some(error),
            }
            if cleared == MOST_CLEARED {
                break;
            }
        }
        failure.map_or(Ok(()), Err)
    }

    /// Returns whether the tenant was cleared. `there`: the uid of its namespace, as the watch
    /// shows it.
    async fn look_at(
        &mut self,
        tenant: &Tenant,
        cluster: &ClusterUid,
        there: Option<String>,
    ) -> Result<bool, Error> {
        let recorded = match self.recorded.get(tenant) {
            Some(recorded) => recorded.clone(),
            None => self.read(tenant, cluster).await?,
        };
        match judge(recorded.as_deref(), there.as_deref()) {
            Step::Nothing => Ok(false),
            Step::Record => {
                self.record(tenant, cluster, recorded, there).await?;
                Ok(false)
            }
            Step::Clear => self.clear(tenant, cluster, there).await,
        }
    }

    /// Clears the names of a namespace that has ended, and then records the one that is there. A
    /// crash in between clears them twice.
    async fn clear(
        &mut self,
        tenant: &Tenant,
        cluster: &ClusterUid,
        there: Option<String>,
    ) -> Result<bool, Error> {
        // Neither what this process remembers nor what a watch shows is enough.
        let live = self.ended.live(&tenant.to_string()).await?;
        let live = live.and_then(|namespace| namespace.uid());
        let recorded = self.read(tenant, cluster).await?;
        if live != there || judge(recorded.as_deref(), there.as_deref()) != Step::Clear {
            return Ok(false);
        }
        // A fence after those that an older etcd has lost would have no predecessor there.
        self.fencer.read().await?;
        self.fencer.mend().await?;
        let made = self
            .ended
            .clear(tenant.clone(), recorded.clone(), there.clone());
        let made = made.await?;
        if made {
            tracing::warn!(%tenant, is_there = there.is_some(),
                "the shared tier has content of a namespace that was deleted, or was made again, \
                 while no controller ran: it is cleared");
        }
        self.record(tenant, cluster, recorded, there).await?;
        Ok(made)
    }

    async fn read(
        &mut self,
        tenant: &Tenant,
        cluster: &ClusterUid,
    ) -> Result<Option<String>, Error> {
        let (of, by) = (tenant.clone(), cluster.clone());
        let recorded = self.ask(move |store| store.namespace_of(&of, &by)).await?;
        self.recorded.insert(tenant.clone(), recorded.clone());
        Ok(recorded)
    }

    /// Records the namespace that is there, if the record still says `recorded`.
    async fn record(
        &mut self,
        tenant: &Tenant,
        cluster: &ClusterUid,
        recorded: Option<String>,
        there: Option<String>,
    ) -> Result<(), Error> {
        // It is read again after a failure.
        self.recorded.remove(tenant);
        let (of, by, uid) = (tenant.clone(), cluster.clone(), there.clone());
        let set = move |store: &Store| {
            store.set_namespace_of(&of, &by, recorded.as_deref(), uid.as_deref())
        };
        self.ask(set).await?;
        self.recorded.insert(tenant.clone(), there);
        Ok(())
    }

    /// Asks the tier on a thread of its own: the requests block.
    async fn ask<T: Send + 'static>(
        &self,
        request: impl FnOnce(&Store) -> shared::Result<T> + Send + 'static,
    ) -> Result<T, Error> {
        let store = self.store.clone();
        let answer = sys::on_thread("shared-tenants", move || request(&store)).await;
        Ok(answer.map_err(Error::Thread)??)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_namespace_that_this_cluster_has_recorded_and_that_has_ended_is_cleared() {
        let (one, two) = (Some("1"), Some("2"));
        for (recorded, there, expected) in [
            // Of another cluster, of this one before it was set up again, or of nodes that were
            // faster than the controller.
            (None, None, Step::Nothing),
            (None, one, Step::Record),
            (one, one, Step::Nothing),
            // Deleted, and deleted and made again. Also: an older etcd was put back.
            (one, None, Step::Clear),
            (one, two, Step::Clear),
        ] {
            assert_eq!(judge(recorded, there), expected, "{recorded:?} {there:?}");
        }
    }
}
