//! Namespaces that have ended: all their names are cleared, once for each namespace, whichever part
//! of the controller notices first. A second fence would also clear what the next namespace of that
//! name has made meanwhile.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Namespace;
use kube::core::PartialObjectMeta;
use kube::{Api, Client};
use tokio::sync::Mutex;

use super::fencer::Fencer;
use super::fences::{Error, failed};
use crate::model::{Coverage, Tenant};

/// How many fences are remembered. After a restart a namespace may be cleared twice in any case.
const REMEMBERED: usize = 1000;

/// Clears namespaces.
pub(super) struct Ended {
    client: Client,
    fencer: Arc<Fencer>,
    done: Mutex<VecDeque<Done>>,
}

/// A fence of a whole namespace that this process has made.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Done {
    tenant: Tenant,
    /// The uid of the namespace that had ended; `None`: not known.
    ended: Option<String>,
    /// The uid of the namespace that was there then; `None`: there was none.
    there: Option<String>,
}

impl Done {
    /// Whether the fence cleared all that was made in the namespace `ended`, when there is a
    /// namespace `there` now.
    fn is_of(&self, tenant: &Tenant, ended: &str, there: Option<&str>) -> bool {
        let has_ended = self.ended.as_deref() == Some(ended);
        let is_later = self.there.is_some() && self.there.as_deref() == there;
        self.tenant == *tenant && (has_ended || is_later)
    }

    /// Whether the namespace that had ended is there, by the uids of those that are.
    fn has_come_back(&self, namespaces: &BTreeMap<String, String>) -> bool {
        let now = namespaces.get(&self.tenant.to_string());
        now.is_some() && now == self.ended.as_ref()
    }
}

impl Ended {
    pub(super) fn new(client: Client, fencer: Arc<Fencer>) -> Self {
        Self {
            client,
            fencer,
            done: Mutex::default(),
        }
    }

    /// Forgets the fences of namespaces that are there: an older etcd brings them back, and what is
    /// made in them from then on needs another fence when they end.
    pub(super) async fn forget_restored(&self, namespaces: &BTreeMap<String, String>) {
        let mut done = self.done.lock().await;
        done.retain(|it| !it.has_come_back(namespaces));
    }

    /// The namespace of this name, from the API server itself.
    pub(super) async fn live(
        &self,
        name: &str,
    ) -> Result<Option<PartialObjectMeta<Namespace>>, Error> {
        let live: Api<PartialObjectMeta<Namespace>> = Api::all(self.client.clone());
        let found = live.get_opt(name).await;
        found.map_err(failed("read a namespace"))
    }

    /// Clears all content of the tenant that was made before now. `there`: the uid of the namespace
    /// that exists now, if there is one. `ended`: the uid of the namespace that has ended; it is
    /// not cleared twice.
    ///
    /// Returns whether it made a fence.
    pub(super) async fn clear(
        &self,
        tenant: Tenant,
        ended: Option<String>,
        there: Option<String>,
    ) -> Result<bool, Error> {
        let mut done = self.done.lock().await;
        let is_done = |ended: &String| {
            let mut done = done.iter();
            done.any(|it| it.is_of(&tenant, ended, there.as_deref()))
        };
        if ended.as_ref().is_some_and(is_done) {
            return Ok(false);
        }
        let covers = Coverage::Namespace(tenant.clone());
        self.fencer.make(covers.into()).await?;
        if done.len() >= REMEMBERED {
            done.pop_front();
        }
        done.push_back(Done {
            tenant,
            ended,
            there,
        });
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_is_cleared_once_and_the_next_one_too() {
        let tenant = |name: &str| name.parse::<Tenant>().expect("a label");
        let done = |ended: Option<&str>, there: Option<&str>| Done {
            tenant: tenant("ci"),
            ended: ended.map(str::to_owned),
            there: there.map(str::to_owned),
        };
        let ci = tenant("ci");
        // Its end was seen.
        assert!(done(Some("1"), None).is_of(&ci, "1", None));
        assert!(done(Some("1"), None).is_of(&ci, "1", Some("2")));
        assert!(!done(Some("1"), None).is_of(&ci, "2", None));
        assert!(!done(Some("1"), None).is_of(&tenant("other"), "1", None));
        // A fence while the next one was there covers all before.
        assert!(done(None, Some("2")).is_of(&ci, "1", Some("2")));
        assert!(done(Some("1"), Some("2")).is_of(&ci, "0", Some("2")));
        assert!(!done(None, Some("2")).is_of(&ci, "2", Some("3")));
        // An older etcd was put back.
        let there = |uid: &str| BTreeMap::from([("ci".to_owned(), uid.to_owned())]);
        assert!(done(Some("1"), None).has_come_back(&there("1")));
        assert!(!done(Some("1"), None).has_come_back(&there("2")));
        assert!(!done(None, Some("1")).has_come_back(&there("1")));
        assert!(!done(Some("1"), None).has_come_back(&BTreeMap::new()));
        // "None" may have been before the one that has ended now.
        assert!(!done(None, None).is_of(&ci, "1", None));
    }
}
