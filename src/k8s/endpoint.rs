//! Where the controller is: it publishes its address and its key in a ConfigMap of its namespace,
//! which the nodes watch. Both change together, and with each start of the controller. A controller
//! that ends removes them, so that another one that runs takes the nodes.
//!
//! The controller needs `get` and `patch` on that ConfigMap, a node `get`, `list` and `watch`.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, Client};
use serde_json::json;
use tokio::sync::watch;

use super::client::{self, patch_as_read};
use crate::distribution::roster::Controller;

/// The ConfigMap. deploy/ makes it, without data.
const NAME: &str = "baggageclaim-controller";
const ADDRESS: &str = "address";
const KEY: &str = "key";
/// When the controller began, in milliseconds since 1970: of two controllers, the nodes follow the
/// later one.
const BEGAN: &str = "began";
/// How often the controller looks whether its entry is still there, and tries again after an error.
const LOOK: Duration = Duration::from_secs(30);
const TRY_AGAIN: Duration = Duration::from_secs(1);
/// How long the end of the controller waits for the API server.
const WITHDRAW: Duration = Duration::from_secs(2);

type Data = BTreeMap<String, String>;

/// What the nodes read of an entry; `None`: it has none, or one that is malformed.
fn read(data: Option<&Data>) -> Option<Controller> {
    let data = data?;
    Some(Controller {
        address: data.get(ADDRESS)?.parse::<SocketAddr>().ok()?.to_string(),
        key: data.get(KEY)?.parse().ok()?,
    })
}

/// When the controller of an entry began; 0: the entry does not say.
fn stamp(data: Option<&Data>) -> u64 {
    let began = data.and_then(|data| data.get(BEGAN));
    began.and_then(|began| began.parse().ok()).unwrap_or(0)
}

/// Whether a controller that began then writes its entry over this one.
fn writes(ours: &Controller, began: u64, data: Option<&Data>) -> bool {
    match read(data) {
        None => true,
        Some(theirs) => theirs != *ours && stamp(data) <= began,
    }
}

/// Publishes where this controller is, and repairs the entry. Does not end.
pub async fn publish(client: Client, ours: Controller, began: u64) {
    let maps: Api<ConfigMap> = Api::default_namespaced(client);
    // Later than the controller before, whatever the clocks say.
    let mut began_after = None;
    loop {
        let next = async {
            let map = maps.get(NAME).await?;
            let data = map.data.as_ref();
            let began =
                *began_after.get_or_insert_with(|| began.max(stamp(data).saturating_add(1)));
            if !writes(&ours, began, data) {
                return Ok(true);
            }
            let entry = json!({ "data": {
                ADDRESS: ours.address, KEY: ours.key.to_string(), BEGAN: began.to_string(),
            }});
            // Not over the entry of a later controller, which may have come meanwhile.
            let written = patch_as_read(&maps, &map, entry).await?;
            Ok::<_, kube::Error>(written.is_some())
        };
        let pause = match next.await {
            Ok(true) => LOOK,
            Ok(false) => TRY_AGAIN,
            Err(error) => {
                tracing::warn!(%error,
                    "could not publish where the controller is in the ConfigMap {NAME}; retrying");
                TRY_AGAIN
            }
        };
        tokio::time::sleep(pause).await;
    }
}

/// Removes the entry of this controller, which ends. When it began stays: the next one is later.
pub async fn withdraw(client: Client, ours: &Controller) {
    let maps: Api<ConfigMap> = Api::default_namespaced(client);
    let work = async {
        let map = maps.get(NAME).await?;
        if read(map.data.as_ref()).as_ref() == Some(ours) {
            let none = json!({ "data": { ADDRESS: null, KEY: null } });
            patch_as_read(&maps, &map, none).await?;
        }
        Ok::<_, kube::Error>(())
    };
    if !matches!(tokio::time::timeout(WITHDRAW, work).await, Ok(Ok(()))) {
        tracing::warn!("the ConfigMap {NAME} still names this controller, which ends");
    }
}

/// Where the controller is, and the watch that tells it until it is dropped.
pub fn watch(
    kubeconfig: Option<PathBuf>,
) -> (
    watch::Receiver<Option<Controller>>,
    impl Future<Output = ()> + Send + 'static,
) {
    let (tell, told) = watch::channel(None);
    let work = async move {
        let client = client::connect(kubeconfig.as_deref()).await;
        let maps: Api<ConfigMap> = Api::default_namespaced(client);
        let only = client::watch_config().fields(&format!("metadata.name={NAME}"));
        let events = watcher(maps, only).default_backoff().touched_objects();
        let follow = events.for_each(|event| {
            match event {
                Ok(map) => {
                    let is_gone = map.metadata.deletion_timestamp.is_some();
                    let found = read(map.data.as_ref()).filter(|_| !is_gone);
                    tell.send_if_modified(|known| {
                        let is_news = found.is_some() && *known != found;
                        if is_news {
                            known.clone_from(&found);
                        }
                        is_news
                    });
                }
                Err(error) => tracing::warn!(%error,
                    "the watch over the ConfigMap {NAME} failed; until it works, this node asks \
                     all peers for content; retrying"),
            }
            std::future::ready(())
        });
        follow.await;
    };
    (told, work)
}

#[cfg(test)]
mod tests {
    use kube::client::Body;
    use serde_json::Value;
    use tokio::sync::mpsc;

    use super::*;
    use crate::model::Sha256;

    fn controller(number: u8) -> Controller {
        Controller {
            address: format!("10.0.0.{number}:9809"),
            key: Sha256([number; 32]),
        }
    }

    fn data(controller: &Controller, began: &str) -> Data {
        [
            (ADDRESS, controller.address.clone()),
            (KEY, controller.key.to_string()),
            (BEGAN, began.to_owned()),
        ]
        .map(|(key, value)| (key.to_owned(), value))
        .into()
    }

    #[test]
    fn an_entry_is_read_whole_or_not_at_all() {
        let whole = data(&controller(1), "5");
        assert_eq!(read(Some(&whole)), Some(controller(1)));
        assert_eq!(read(None), None);
        for (key, value) in [(ADDRESS, "10.0.0.1"), (KEY, "sha256:12"), (ADDRESS, "")] {
            let mut wrong = whole.clone();
            wrong.insert(key.to_owned(), value.to_owned());
            assert_eq!(read(Some(&wrong)), None, "{key} {value}");
        }
    }

    /// An API server with this entry, and the patches that it gets.
    fn server(data: Data) -> (Client, mpsc::UnboundedReceiver<Value>) {
        let (sent, patches) = mpsc::unbounded_channel();
        let service = tower::service_fn(move |request: hyper::Request<Body>| {
            let (sent, data) = (sent.clone(), data.clone());
            async move {
                if request.method() == hyper::Method::PATCH {
                    let patch = request.into_body().collect_bytes().await?;
                    let patch: Value = serde_json::from_slice(&patch).expect("JSON");
                    sent.send(patch).expect("the test waits for it");
                }
                let metadata = json!({"name": NAME, "resourceVersion": "7"});
                let map = json!({"metadata": metadata, "data": data});
                let map = Body::from(map.to_string().into_bytes());
                Ok::<_, kube::Error>(hyper::Response::new(map))
            }
        });
        (Client::new(service, "default"), patches)
    }

    #[tokio::test]
    async fn an_entry_is_not_written_over_one_that_came_meanwhile() {
        let (client, mut patches) = server(Data::new());
        let publishing = tokio::spawn(publish(client, controller(1), 5));
        let patch = patches.recv().await.expect("a patch");
        publishing.abort();
        assert_eq!(patch["data"][BEGAN], "5");
        // The API server refuses it if the map was changed since it was read.
        assert_eq!(patch["metadata"]["resourceVersion"], "7");
    }

    #[tokio::test]
    async fn a_controller_that_ends_removes_its_own_entry_only() {
        let (client, mut patches) = server(data(&controller(1), "5"));
        withdraw(client.clone(), &controller(2)).await;
        assert!(patches.try_recv().is_err(), "it is another's entry");
        withdraw(client, &controller(1)).await;
        let patch = patches.try_recv().expect("a patch");
        assert_eq!(patch["data"], json!({ADDRESS: null, KEY: null}));
        assert_eq!(patch["metadata"]["resourceVersion"], "7");
    }

    #[test]
    fn of_two_controllers_the_later_one_has_the_entry() {
        let ours = controller(1);
        for (data, expected) in [
            (None, true),
            (Some(Data::new()), true),
            (Some(data(&ours, "5")), false),
            (Some(data(&controller(2), "4")), true),
            (Some(data(&controller(2), "6")), false),
            (Some(data(&controller(2), "?")), true),
            // The later one has ended.
            (Some([(BEGAN.to_owned(), "6".to_owned())].into()), true),
        ] {
            assert_eq!(writes(&ours, 5, data.as_ref()), expected, "{data:?}");
        }
    }
}
