//! Orders that a person gives through the API server, with the person's own rights:
//! `baggageclaim clear` and `baggageclaim rollback --cluster`. An order to clear is a `Cache` that
//! is made with its finalizer and deleted at once. The deletion is the order; `orders` carries it
//! out in the controller.
//!
//! Each order has an object of its own. An object that is there already may belong to an order that
//! is just ending, so its deletion might be no new order.
//!
//! It needs `create` and `delete` on `caches` in the namespace. With `list` and `watch` it also
//! sees that the order is carried out.
//!
//! An order to roll back is a `Rollback`, which stays. It needs `create` on `rollbacks`, and `list`
//! and `watch` to see the result.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use k8s_openapi::api::authentication::v1::SelfSubjectReview;
use kube::api::{ObjectMeta, PostParams};
use kube::runtime::wait::conditions::is_deleted;
use kube::runtime::wait::{Condition as _, await_condition};
use kube::{Api, Client, ResourceExt as _};

use super::client::{deletion_of, has_code};
use crate::api::{CLEAR, Cache, CacheSpec, Rollback, RollbackPhase, RollbackSpec};
use crate::model::{Reference, Tenant};
use crate::sys::printable;

/// How long an order is watched. With the requests before, the whole takes less than a second.
const WATCHED: Duration = Duration::from_millis(600);
/// The same for an order to roll back. The nodes are asked, and one of them carries it out.
const ROLLBACK_WATCHED: Duration = Duration::from_secs(20);

/// The state of an order when the command ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Order {
    /// The controller has carried it out.
    Done,
    /// It is in the API server, and the controller will carry it out.
    Given {
        /// The object, which is gone then.
        object: String,
        /// Whether it was seen to be still there. Otherwise it may be carried out by now.
        is_seen: bool,
    },
}

/// The objects of an order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kind {
    name: &'static str,
    plural: &'static str,
    /// The roles of Kubernetes that have the right.
    roles: &'static str,
    /// Our own.
    role: &'static str,
}

const CACHE: Kind = Kind {
    name: "Cache",
    plural: "caches",
    roles: "edit or admin",
    role: "baggageclaim-clear",
};
const ROLLBACK: Kind = Kind {
    name: "Rollback",
    plural: "rollbacks",
    roles: "admin",
    role: "baggageclaim-rollback",
};

/// The state of an order to roll back when the command ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RollbackResult {
    /// It is done, and the controller says so.
    Done(String),
    /// The controller has refused it, or no node could do it, and says why.
    Failed(String),
    /// It is in the API server.
    Given {
        /// The object, which tells the result later.
        object: String,
        /// How far it is, as the controller says.
        state: Option<String>,
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
        "you may not {verb} {} in namespace {namespace}: {why}; ask for the role {} there, or for \
         a binding of the ClusterRole {}", .of.plural, .of.roles, .of.role
    )]
    NoRight {
        /// The verb.
        verb: &'static str,
        /// What it is about.
        of: Kind,
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
        "the cluster has no {} objects: install deploy/crds, and the component peers of the \
         controller (docs/peers.md)", .0.name
    )]
    NoKind(Kind),
    /// A resource cache is asked for.
    #[error("{} keeps its first content, so there is nothing to go back to", printable(.0))]
    FirstStays(Reference),
    /// The API server does not say who the user is.
    #[error("the API server does not say who you are: {0}")]
    NoName(String),
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
    let made = made.map_err(|error| said("create", CACHE, namespace, error))?;
    let object = made.name_any();
    let deleted = match caches.delete(&object, &deletion_of(made.uid())).await {
        Ok(deleted) => deleted,
        // With its finalizer, it goes only when the order is carried out.
        Err(error) if has_code(&error, 404) => return Ok(Order::Done),
        Err(error) => {
            return Err(AskError::Half {
                object,
                namespace: namespace.clone(),
                source: Box::new(said("delete", CACHE, namespace, error)),
            });
        }
    };
    if deleted.is_right() {
        return Ok(Order::Done);
    }
    let uid = made.uid().unwrap_or_default();
    let is_seen = AtomicBool::new(false);
    let is_gone = |cache: Option<&Cache>| {
        is_seen.store(cache.is_some(), Ordering::Relaxed);
        is_deleted(&uid).matches_object(cache)
    };
    let gone = await_condition(caches, &object, is_gone);
    let watched = tokio::time::timeout(WATCHED, gone).await;
    Ok(match watched {
        Ok(Ok(_)) => Order::Done,
        // Without the right to watch, too: the order is given.
        _ => Order::Given {
            object,
            is_seen: watched.is_err() && is_seen.into_inner(),
        },
    })
}

/// Orders to put the generation `to` of a name back; `to` may be the first digits of its id.
pub async fn roll_back(
    client: Client,
    namespace: &Tenant,
    reference: &Reference,
    to: &str,
) -> Result<RollbackResult, AskError> {
    if reference.first_writer_wins() {
        return Err(AskError::FirstStays(reference.clone()));
    }
    let spec = RollbackSpec {
        kind: reference.kind().into(),
        key: reference.key().to_owned(),
        to: to.to_owned(),
        by: own_name(&client).await?,
    };
    let mut order = Rollback::new("", spec);
    order.metadata.generate_name = Some("rollback-".to_owned());
    let orders: Api<Rollback> = Api::namespaced(client, namespace.as_str());
    let made = orders.create(&PostParams::default(), &order).await;
    let made = made.map_err(|error| said("create", ROLLBACK, namespace, error))?;
    let object = made.name_any();
    // With a message, it has ended, or waits for a node.
    let is_answered = |order: Option<&Rollback>| {
        let status = order.and_then(|order| order.status.as_ref());
        status.is_some_and(|status| status.message.is_some())
    };
    let answered = await_condition(orders, &object, is_answered);
    let answered = tokio::time::timeout(ROLLBACK_WATCHED, answered).await;
    let answer = answered.ok().and_then(Result::ok).flatten();
    let status = answer.and_then(|order| order.status).unwrap_or_default();
    let said = status.message;
    Ok(match status.phase {
        RollbackPhase::Done => RollbackResult::Done(said.unwrap_or_default()),
        RollbackPhase::Failed => RollbackResult::Failed(said.unwrap_or_default()),
        // Without the right to watch, too: the order is given.
        _ => RollbackResult::Given {
            object,
            state: said,
        },
    })
}

/// The user's name, as the API server knows it. Each user may ask for that.
async fn own_name(client: &Client) -> Result<String, AskError> {
    let reviews: Api<SelfSubjectReview> = Api::all(client.clone());
    let review = reviews
        .create(&PostParams::default(), &SelfSubjectReview::default())
        .await;
    let review = review.map_err(|error| AskError::NoName(error.to_string()))?;
    let user = review.status.and_then(|status| status.user_info);
    let name = user.and_then(|user| user.username);
    name.ok_or_else(|| AskError::NoName("its answer has no name".to_owned()))
}

/// The object of an order, without its name.
fn object(reference: &Reference, prefix: bool) -> Result<Cache, AskError> {
    let Some((_, key)) = reference.cache() else {
        return Err(AskError::Output(reference.clone()));
    };
    let key = Some(key.to_string());
    let (key, prefix) = if prefix { (None, key) } else { (key, None) };
    let kind = reference.kind().into();
    let mut cache = Cache::new("", CacheSpec { kind, key, prefix });
    cache.metadata = ObjectMeta {
        generate_name: Some("clear-".to_owned()),
        finalizers: Some(vec![CLEAR.to_owned()]),
        ..ObjectMeta::default()
    };
    Ok(cache)
}

/// What an answer means.
fn said(verb: &'static str, of: Kind, namespace: &Tenant, error: kube::Error) -> AskError {
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
            of,
            namespace: namespace.clone(),
            why: status.message.clone(),
        },
        404 if is_named => AskError::NoNamespace(namespace.clone()),
        404 => AskError::NoKind(of),
        _ => AskError::Api(error),
    }
}

#[cfg(test)]
mod tests {
    use kube::core::Status;
    use serde_json::json;

    use super::super::client::{client_of, is_watch, list_of};
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

    #[tokio::test]
    async fn an_order_that_cannot_be_watched_is_not_said_to_wait() {
        let ci: Tenant = "ci".parse().expect("a label");
        for may_watch in [true, false] {
            let client = client_of(move |request| {
                let cache = json!({
                    "apiVersion": "baggageclaim.concourse-ci.org/v1alpha1",
                    "kind": "Cache",
                    "metadata": {"name": "clear-1", "namespace": "ci", "uid": "1"},
                    "spec": {"kind": "TaskCache", "key": "a"},
                });
                match request.method().as_str() {
                    "GET" if !may_watch => Some((403, json!({"code": 403, "reason": "Forbidden"}))),
                    "GET" if is_watch(request) => None,
                    "GET" => Some((200, list_of(&json!([cache])))),
                    _ => Some((200, cache)),
                }
            });
            let order = clear(client, &ci, &reference("task-cache/a"), false).await;
            let expected = Order::Given {
                object: "clear-1".to_owned(),
                is_seen: may_watch,
            };
            assert_eq!(order.expect("given"), expected);
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
            said("create", CACHE, &ci, kube::Error::Api(status.boxed())).to_string()
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
