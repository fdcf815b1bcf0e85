//! The client of the API server, from the pod's service account or from a kubeconfig. It refuses a
//! kubeconfig that runs a program for credentials: the driver executes no program. A person's own
//! kubeconfig may do that, as with kubectl.
//!
//! Also what an answer of the API server says, the parameters of a deletion by uid, the pages of a
//! live list, conditional writes, and the length of watches.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kube::api::{DeleteParams, ListParams, ObjectList, Patch, PatchParams, Preconditions};
use kube::config::{AuthInfo, KubeConfigOptions, Kubeconfig};
use kube::runtime::watcher;
use kube::{Api, Client, Resource};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::link::Backoff;

/// The longest time for which the API server is asked to watch. A connection can die without a
/// sign, and until the watch should have ended, that looks like no news. Less than the API server's
/// history under load (75 s), so a watch that died can resume at its last version.
pub(super) const LONGEST_WATCH: Duration = Duration::from_secs(60);

/// The configuration of a watch of kube-runtime, which gives up a silent one 5 seconds after
/// [`LONGEST_WATCH`]. It begins the next one at the last version.
pub(super) fn watch_config() -> watcher::Config {
    let seconds = u32::try_from(LONGEST_WATCH.as_secs()).unwrap_or(u32::MAX);
    watcher::Config::default().timeout(seconds)
}

/// The parameters that delete the object with this uid only, in any version.
pub(super) fn deletion_of(uid: Option<String>) -> DeleteParams {
    DeleteParams {
        preconditions: Some(Preconditions {
            uid,
            resource_version: None,
        }),
        ..DeleteParams::default()
    }
}

/// The parameters that delete an object only as it was read.
pub(super) fn deletion_as_read(object: &impl Resource) -> DeleteParams {
    let meta = object.meta();
    DeleteParams {
        preconditions: Some(Preconditions {
            uid: meta.uid.clone(),
            resource_version: meta.resource_version.clone(),
        }),
        ..DeleteParams::default()
    }
}

/// Whether the API server has answered with this HTTP status.
pub(super) fn has_code(error: &kube::Error, code: u16) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == code)
}

/// How many objects of a live list are in memory at once. Users may write 256 KiB of annotations
/// into each of their objects.
const PAGE: u32 = 100;

/// The first page of a live list.
pub(super) fn first_page() -> ListParams {
    ListParams::default().limit(PAGE)
}

/// The page after this one; `None`: it is the last.
pub(super) fn page_after<K: Clone>(page: &ObjectList<K>) -> Option<ListParams> {
    let token = page.metadata.continue_.as_deref();
    let token = token.filter(|token| !token.is_empty())?;
    Some(first_page().continue_token(token))
}

/// Changes fields of an object. `None`: the object was changed or deleted since it was read.
pub(super) async fn patch_as_read<K>(
    api: &Api<K>,
    object: &K,
    fields: Value,
) -> kube::Result<Option<K>>
where
    K: Resource + Clone + fmt::Debug + DeserializeOwned,
{
    let name = object.meta().name.as_deref().unwrap_or_default();
    let (params, patch) = (PatchParams::default(), if_as_read(object, fields));
    unless_changed(api.patch(name, &params, &patch).await)
}

/// Changes fields of an object's `status`, likewise.
pub(super) async fn patch_status_as_read<K>(
    api: &Api<K>,
    object: &K,
    status: impl Serialize,
) -> kube::Result<Option<K>>
where
    K: Resource + Clone + fmt::Debug + DeserializeOwned,
{
    let name = object.meta().name.as_deref().unwrap_or_default();
    let patch = if_as_read(object, json!({ "status": status }));
    let params = PatchParams::default();
    unless_changed(api.patch_status(name, &params, &patch).await)
}

/// A patch that the API server refuses if the object is another one, or of another version.
fn if_as_read(object: &impl Resource, mut fields: Value) -> Patch<Value> {
    let meta = object.meta();
    fields["metadata"]["resourceVersion"] = json!(meta.resource_version);
    fields["metadata"]["uid"] = json!(meta.uid);
    Patch::Merge(fields)
}

fn unless_changed<K>(patched: kube::Result<K>) -> kube::Result<Option<K>> {
    match patched {
        Ok(written) => Ok(Some(written)),
        Err(error) if has_code(&error, 404) || has_code(&error, 409) => Ok(None),
        Err(error) => Err(error),
    }
}

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("this pod's service account: {0}")]
    InCluster(#[from] kube::config::InClusterError),
    #[error("kubeconfig: {0}")]
    Kubeconfig(#[from] kube::config::KubeconfigError),
    #[error(
        "kubeconfig: user {0:?} gets its credentials from a program, and this driver executes no \
         programs; use a token or a certificate"
    )]
    Program(String),
    #[error(transparent)]
    Client(#[from] kube::Error),
}

/// Makes a client and retries until it succeeds. Does not test whether the API server answers.
pub async fn connect(kubeconfig: Option<&Path>) -> Client {
    let mut backoff = Backoff::default();
    loop {
        match try_connect(kubeconfig).await {
            Ok(client) => return client,
            Err(error) => {
                let retry = backoff.after_failure(Instant::now());
                tracing::error!(%error, ?retry,
                    "no client for the API server can be created: check the service account of this \
                     pod, or --kubeconfig; retrying");
                tokio::time::sleep(retry).await;
            }
        }
    }
}

async fn try_connect(kubeconfig: Option<&Path>) -> Result<Client, Error> {
    let mut config = match kubeconfig {
        None => kube::Config::incluster()?,
        Some(path) => {
            let kubeconfig = Kubeconfig::read_from(path)?;
            let mut users = kubeconfig.auth_infos.iter();
            let runs_program =
                |auth: &AuthInfo| auth.exec.is_some() || auth.auth_provider.is_some();
            if let Some(user) = users.find(|user| user.auth_info.as_ref().is_some_and(runs_program))
            {
                return Err(Error::Program(user.name.clone()));
            }
            kube::Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?
        }
    };
    config.connect_timeout = Some(Duration::from_secs(5));
    // Without a limit, a request that is not answered never ends, such as the list or the start of
    // a watch. The API server ends all others after 60 seconds, and a watch after `LONGEST_WATCH`.
    config.read_timeout = Some(Duration::from_secs(90));
    // Callers retry and need the error. With retries in the client, an API server that is
    // overloaded (429) would look for minutes like one that does not answer.
    config.default_retry = false;
    Ok(Client::try_from(config)?)
}

/// Why a person has no client.
#[derive(Debug, thiserror::Error)]
pub enum UserError {
    /// The file cannot be used.
    #[error("kubeconfig {}: {source}", path.display())]
    Kubeconfig {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: kube::config::KubeconfigError,
    },
    /// No file is named.
    #[error("no API server is known: {0}; name a kubeconfig with --kubeconfig or KUBECONFIG")]
    Unknown(#[from] kube::config::InferConfigError),
    /// What the kubeconfig says cannot be used, such as a missing certificate.
    #[error("the credentials of the kubeconfig: {0}")]
    Client(#[from] kube::Error),
}

/// Makes a client with the rights of a person: from this kubeconfig, else from `KUBECONFIG`,
/// `~/.kube/config`, or the service account of the pod. Does not test whether the API server
/// answers.
pub async fn connect_as_user(kubeconfig: Option<&Path>) -> Result<Client, UserError> {
    let mut config = match kubeconfig {
        None => kube::Config::infer().await?,
        Some(path) => {
            let failed = |source| {
                let path = path.to_owned();
                UserError::Kubeconfig { path, source }
            };
            let read = Kubeconfig::read_from(path).map_err(failed)?;
            let options = KubeConfigOptions::default();
            let config = kube::Config::from_custom_kubeconfig(read, &options).await;
            config.map_err(failed)?
        }
    };
    config.connect_timeout = Some(Duration::from_secs(5));
    config.read_timeout = Some(Duration::from_secs(10));
    config.default_retry = false;
    Ok(Client::try_from(config)?)
}

/// A client of an API server that answers with this status and body; `None`: it never answers.
#[cfg(test)]
pub(super) fn client_of(
    answer: impl Fn(&hyper::Request<kube::client::Body>) -> Option<(u16, Value)> + Send + 'static,
) -> Client {
    let service = tower::service_fn(move |request| {
        let answer = answer(&request);
        async move {
            let Some((status, body)) = answer else {
                return std::future::pending().await;
            };
            let body = kube::client::Body::from(body.to_string().into_bytes());
            hyper::Response::builder().status(status).body(body)
        }
    });
    Client::new(service, "default")
}

/// Whether a request to such a server begins a watch.
#[cfg(test)]
pub(super) fn is_watch(request: &hyper::Request<kube::client::Body>) -> bool {
    let query = request.uri().query().unwrap_or_default();
    query.contains("watch=true")
}

/// A list, as an API server answers it.
#[cfg(test)]
pub(super) fn list_of(items: &Value) -> Value {
    serde_json::json!({"metadata": {"resourceVersion": "1"}, "items": items})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_kubeconfig_that_runs_a_program_is_refused() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("config");
        let text = "
apiVersion: v1
kind: Config
current-context: c
contexts: [{name: c, context: {cluster: c, user: somebody}}]
clusters: [{name: c, cluster: {server: 'http://127.0.0.1:1'}}]
users: [{name: somebody, user: {exec: {apiVersion: client.authentication.k8s.io/v1, command: touch, args: [/tmp/x]}}}]
";
        std::fs::write(&path, text).expect("write");
        let refused = try_connect(Some(&path)).await.err().expect("refused");
        assert!(
            refused
                .to_string()
                .contains("\"somebody\" gets its credentials from a program"),
            "{refused}"
        );
        std::fs::write(&path, text.replace("exec: {apiVersion: client.authentication.k8s.io/v1, command: touch, args: [/tmp/x]}", "token: t"))
            .expect("write");
        try_connect(Some(&path)).await.expect("a client");
    }
}
