//! The status of a `CachePolicy`. Two parts of the controller write it: `policies` and `budgets`.
//! Each has conditions of its own, and leaves all others as they are. A round of writes ends early
//! if the API server does not answer: `budgets` waits for the round before it looks again.

use std::sync::Arc;
use std::time::Duration;

use futures_util::{StreamExt as _, stream};
use k8s_openapi::jiff::Timestamp;
use kube::{Api, Client, ResourceExt as _};

use super::client::patch_status_as_read;
use crate::api::{CachePolicy, CachePolicyStatus, PolicyCondition};

/// How many statuses are written at once, and how long one may take.
const AT_ONCE: usize = 8;
const WRITE: Duration = Duration::from_secs(10);
/// The longest message of a condition, in bytes.
const MOST_MESSAGE: usize = 1024;

/// What this machine's clock says, to the second, as conditions have it.
pub(super) fn now() -> String {
    let now = Timestamp::from_second(Timestamp::now().as_second());
    now.unwrap_or_default().to_string()
}

/// A condition of a policy as it is now.
pub(super) fn condition(
    policy: &CachePolicy,
    of: &str,
    is_true: bool,
    reason: &str,
    message: &str,
    now: &str,
) -> PolicyCondition {
    PolicyCondition {
        of: of.to_owned(),
        status: if is_true { "True" } else { "False" }.to_owned(),
        reason: reason.to_owned(),
        message: super::pod::cut(message, MOST_MESSAGE).to_owned(),
        last_transition_time: now.to_owned(),
        observed_generation: policy.metadata.generation.unwrap_or_default(),
    }
}

/// Puts a condition in the place of the one of its type. It keeps the time of that one if `status`
/// is the same.
pub(super) fn set(all: &mut Vec<PolicyCondition>, mut new: PolicyCondition) {
    let Some(old) = all.iter_mut().find(|it| it.of == new.of) else {
        all.push(new);
        return;
    };
    if old.status == new.status {
        new.last_transition_time
            .clone_from(&old.last_transition_time);
    }
    *old = new;
}

/// Writes statuses of policies, and returns those policies whose status was written. The next round
/// writes the others: a policy that was changed since the watch has shown it, one whose write
/// failed, and all that are left when the API server does not answer.
pub(super) async fn write_all(
    client: &Client,
    all: Vec<(Arc<CachePolicy>, CachePolicyStatus)>,
) -> Vec<Arc<CachePolicy>> {
    let writes = all.into_iter().map(|(policy, status)| {
        let client = client.clone();
        async move {
            let written = tokio::time::timeout(WRITE, write(&client, &policy, &status)).await;
            (policy, written)
        }
    });
    let writes: Vec<_> = writes.collect();
    let mut writes = stream::iter(writes).buffer_unordered(AT_ONCE);
    let mut done = Vec::new();
    while let Some((policy, written)) = writes.next().await {
        let (why, is_answer) = match written {
            Ok(Ok(true)) => {
                done.push(policy);
                continue;
            }
            Ok(Ok(false)) => continue,
            Ok(Err(error)) => (error.to_string(), matches!(error, kube::Error::Api(_))),
            Err(_) => ("the API server does not answer".to_owned(), false),
        };
        tracing::warn!(
            namespace = policy.namespace(),
            name = policy.name_any(),
            error = why,
            "the status of a CachePolicy could not be written; retrying"
        );
        if !is_answer {
            break;
        }
    }
    done
}

/// Writes the status of a policy. Returns whether it was written: not if the policy was changed or
/// deleted since the watch has shown it. The next event shows it again.
async fn write(
    client: &Client,
    policy: &CachePolicy,
    status: &CachePolicyStatus,
) -> kube::Result<bool> {
    let namespace = policy.namespace().unwrap_or_default();
    let policies: Api<CachePolicy> = Api::namespaced(client.clone(), &namespace);
    // The other part writes conditions, too, and a list is written as a whole.
    let written = patch_status_as_read(&policies, policy, status).await?;
    Ok(written.is_some())
}
