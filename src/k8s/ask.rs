//! Orders that a person gives through the API server, with the person's own rights:
//! `baggageclaim clear`. An order to clear is a `Cache` that is made with its finalizer and deleted
//! at once. The deletion is the order; `orders` carries it out in the controller.
//!
//! Each order has an object of its own. An object that is there already may belong to an order that
//! is just ending, so its deletion might be no new order.
//!
//! It needs `create` and `delete` on `caches` in the namespace. With `watch` it also sees that the
//! order is carried out.

use std::time::Duration;

use futures_util::{StreamExt as _, TryStreamExt as _};
use kube::api::{ObjectMeta, PostParams, WatchEvent, WatchParams};
use kube::{Api, Client, ResourceExt as _};

use super::client::{deletion_of, has_code};
use crate::api::{CLEAR, Cache, CacheSpec, NameKind};
use crate::model::{CacheKind, Reference, Tenant};
use crate::sys::printable;

/// How long an order is watched. With the requests before, the whole takes less than a second.
const WATCHED: Duration = Duration::from_millis(600);

/// The state of an order when the command ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Order {
    /// The controller has carried it out.
    Done,
    /// It is in the API server, and the controller will carry it out.
    Given {
        /// The object, which is gone then.
        object: String,
    },
}

/// Why an order was not given.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// Users have a right to caches only.
    #[error(
        "{} is an output, and through the API server only caches are cleared; an administrator \
         clears it in the controller's pod: kubectl exec -n baggageclaim \
         deploy/baggageclaim-controller -c controller -- /baggageclaim clear ...", printable(.0)
    )]
    Output(Reference),
    /// The user lacks a right.
    #[error(
        "you may not {verb} caches in namespace {namespace}: {why}; ask for the role edit or admin \
         there, or for a binding of the ClusterRole baggageclaim-clear"
    )]
    NoRight {
        /// The verb.
        verb: &'static str,
        /// The namespace.
        namespace: Tenant,
        /// What the API server says.
        why: String,
    },
    /// There is no such namespace.
    #[error("there is no namespace {0}")]
    NoNamespace(Tenant),
    /// The namespace is being deleted.
    #[error("namespace {0} is being deleted, and the controller clears all its names with it")]
    Ending(Tenant),
    /// Our kinds are not defined.
    #[error(
        "the cluster has no Cache objects: install deploy/crds, and the component peers of the \
         controller (docs/peers.md)"
    )]
    NoKind,
    /// The object was made, and the deletion failed.
    #[error(
        "the order may not be given, and the Cache {object} may be left in namespace {namespace}; \
         delete it, or repeat the command: {source}"
    )]
    Half {
        /// The object.
        object: String,
        /// Its namespace.
        namespace: Tenant,
        /// The cause.
        source: Box<AskError>,
    },
    /// Another answer, or none.
    #[error("the API server: {0}")]
    Api(kube::Error),
}

/// Orders to clear a cache, or with `prefix` all caches of its kind whose key begins so.
pub async fn clear(
    client: Client,
    namespace: &Tenant,
    reference: &Reference,
    prefix: bool,
) -> Result<Order, AskError> {
    let caches: Api<Cache> = Api::namespaced(client, namespace.as_str());
    let cache = object(reference, prefix)?;
    let made = caches.create(&PostParams::default(), &cache).await;
    let made = made.map_err(|error| said("create", namespace, error))?;
    let object = made.name_any();
    let deleted = match caches.delete(&object, &deletion_of(made.uid())).await {
        Ok(deleted) => deleted,
        // With its finalizer, it goes only when the order is carried out.
        Err(error) if has_code(&error, 404) => return Ok(Order::Done),
        Err(error) => {
            return Err(AskError::Half {
                object,
                namespace: namespace.clone(),
                source: Box::new(said("delete", namespace, error)),
            });
        }
    };
    let Some(deleted) = deleted.left() else {
        return Ok(Order::Done);
    };
    let version = deleted.resource_version().unwrap_or_default();
    let gone = tokio::time::timeout(WATCHED, is_gone(&caches, &object, &version));
    Ok(match gone.await {
        Ok(Ok(true)) => Order::Done,
        // Without the right to watch, too: the order is given.
        _ => Order::Given { object },
    })
}

/// The object of an order, without its name.
fn object(reference: &Reference, prefix: bool) -> Result<Cache, AskError> {
    let Some((kind, key)) = reference.cache() else {
        return Err(AskError::Output(reference.clone()));
    };
    let key = Some(key.to_string());
    let (key, prefix) = if prefix { (None, key) } else { (key, None) };
    let kind = match kind {
        CacheKind::Resource => NameKind::ResourceCache,
        CacheKind::Task => NameKind::TaskCache,
    };
    let mut cache = Cache::new("", CacheSpec { kind, key, prefix });
    cache.metadata = ObjectMeta {
        generate_name: Some("clear-".to_owned()),
        finalizers: Some(vec![CLEAR.to_owned()]),
        ..ObjectMeta::default()
    };
    Ok(cache)
}

/// Waits for the end of an object. `false`: the watch has ended before.
async fn is_gone(caches: &Api<Cache>, object: &str, version: &str) -> Result<bool, kube::Error> {
    let params = WatchParams::default().fields(&format!("metadata.name={object}"));
    let events = caches.watch(&params, version).await?;
    let mut events = events.boxed();
    while let Some(event) = events.try_next().await? {
        if matches!(event, WatchEvent::Deleted(_)) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// What an answer means.
fn said(verb: &'static str, namespace: &Tenant, error: kube::Error) -> AskError {
    let kube::Error::Api(status) = &error else {
        return AskError::Api(error);
    };
    let details = status.details.as_ref();
    let mut causes = details.iter().flat_map(|details| &details.causes);
    let is_ending = causes.any(|cause| cause.reason == "NamespaceTerminating");
    // Without a name it is the definition that is not there.
    let is_named = details.is_some_and(|details| !details.name.is_empty());
    match status.code {
        _ if is_ending => AskError::Ending(namespace.clone()),
        403 => AskError::NoRight {
            verb,
            namespace: namespace.clone(),
            why: status.message.clone(),
        },
        404 if is_named => AskError::NoNamespace(namespace.clone()),
        404 => AskError::NoKind,
        _ => AskError::Api(error),
    }
}

#[cfg(test)]
mod tests {
    use kube::core::Status;
    use serde_json::json;

    use super::*;

    fn reference(text: &str) -> Reference {
        text.parse().expect("a reference")
    }

    #[test]
    fn an_order_covers_what_it_says() {
        let covers = |text: &str, prefix| {
            let mut cache = object(&reference(text), prefix).expect("a cache");
            assert!(cache.orders(), "its deletion is an order from the first");
            assert!(!cache.is_mirrored());
            cache.metadata.namespace = Some("ci".to_owned());
            format!("{:?}", cache.covers().expect("it names something"))
        };
        assert_ne!(covers("task-cache/a", false), covers("task-cache/a", true));
        assert_ne!(
            covers("task-cache/a", true),
            covers("resource-cache/a", true)
        );
        for prefix in [false, true] {
            let refused = object(&reference("artifact/a"), prefix).expect_err("no cache");
            assert!(refused.to_string().contains("artifact/a"), "{refused}");
        }
    }

    #[test]
    fn each_refusal_says_what_is_missing() {
        let ci: Tenant = "ci".parse().expect("a label");
        let answer = |code, name: &str, cause: &str| {
            let status = json!({
                "code": code,
                "details": {"name": name, "causes": [{"reason": cause}]},
            });
            let status: Status = serde_json::from_value(status).expect("a status");
            said("create", &ci, kube::Error::Api(status.boxed())).to_string()
        };
        for (code, name, cause, expected) in [
            (403, "", "", "may not create caches in namespace ci"),
            (403, "ci", "NamespaceTerminating", "is being deleted"),
            (404, "ci", "", "there is no namespace ci"),
            (404, "", "", "install deploy/crds"),
            (500, "", "", "the API server"),
        ] {
            let text = answer(code, name, cause);
            assert!(text.contains(expected), "{code} {name} {cause}: {text}");
        }
    }
}
