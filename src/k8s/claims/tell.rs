//! Events on claims that say what a user can do: the data is lost, or its node is gone; and that
//! it is back.
//!
//! Each change of state is one event. Its name is a function of the change, so a restart or a
//! second controller does not repeat it while it exists (an hour). An event of a state that lasts
//! is made again after it has expired. A claim that is not bound needs none: csi-provisioner puts
//! the controller's error into its own event.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use k8s_openapi::api::core::v1::{Event, EventSource, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use k8s_openapi::jiff::Timestamp;
use kube::api::PostParams;
use kube::{Api, ResourceExt as _};
use sha2::{Digest as _, Sha256};
use tokio::time::{Instant, sleep, timeout};

use super::cluster::Cluster;
use super::persistent::Named;
use crate::api::{Phase, Volume, Wanted};
use crate::model::{DRIVER_NAME, hex};

/// The most events of one look.
const MOST: usize = 50;
/// The pause after a look that had more to say.
const LATER: Duration = Duration::from_secs(10);
/// The least time between two looks otherwise.
const PAUSE: Duration = Duration::from_secs(1);
/// The longest: a claim can be bound later than its volume is lost.
const AGAIN: Duration = Duration::from_secs(30);

/// How often an event is sent again while its state lasts. The API server refuses it while the last
/// one exists.
const REPEAT: Duration = Duration::from_mins(30);

/// Whether an event is due, given the last one that was sent, and when.
fn is_due(told: Option<&(Trouble, Instant)>, trouble: Option<Trouble>, now: Instant) -> bool {
    match (told, trouble) {
        (Some((told, at)), Some(trouble)) if *told == trouble => now.duration_since(*at) >= REPEAT,
        (told, trouble) => told.is_some() || trouble.is_some(),
    }
}

/// What is wrong with a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Trouble {
    /// Its node has not got the data any more.
    Lost,
    /// Its node was given up.
    NodeGone,
}

impl Trouble {
    fn of(volume: &Volume) -> Option<Self> {
        match (volume.spec.wanted, volume.phase()) {
            (Wanted::Absent, _) => None,
            (_, Some(Phase::Lost)) if volume.is_node_gone() => Some(Self::NodeGone),
            (_, Some(Phase::Lost)) => Some(Self::Lost),
            _ => None,
        }
    }

    fn reason(self) -> &'static str {
        match self {
            Self::Lost => "VolumeLost",
            Self::NodeGone => "NodeGone",
        }
    }

    fn message(self, id: &str, node: &str) -> String {
        match self {
            Self::Lost => format!(
                "the data of volume {id} is no longer in the pool of node {node}: the pool or its \
                 disk was replaced, or the claim's ttl has expired. The volume is not created \
                 again empty. Bring the disk back, or delete the claim and its pods to begin empty"
            ),
            Self::NodeGone => format!(
                "node {node}, which has the data of volume {id}, was deleted from the cluster. The \
                 claim works again when a node of this name is back with the same disk. Otherwise \
                 delete the claim and its pods to begin empty"
            ),
        }
    }
}

/// An event on a claim. `change` tells this change of state from all others.
fn event(
    claim: &ObjectReference,
    (reason, message): (&str, String),
    warns: bool,
    change: &str,
) -> Event {
    let digest = Sha256::digest(format!("{reason} {change}"));
    let name = format!("baggageclaim.{}", hex(&digest[..16]));
    let now = Time(Timestamp::now());
    Event {
        metadata: ObjectMeta {
            name: Some(name),
            namespace: claim.namespace.clone(),
            ..ObjectMeta::default()
        },
        involved_object: ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("PersistentVolumeClaim".to_owned()),
            ..claim.clone()
        },
        reason: Some(reason.to_owned()),
        message: Some(message),
        type_: Some(if warns { "Warning" } else { "Normal" }.to_owned()),
        source: Some(EventSource {
            component: Some(DRIVER_NAME.to_owned()),
            host: None,
        }),
        first_timestamp: Some(now.clone()),
        last_timestamp: Some(now),
        count: Some(1),
        ..Event::default()
    }
}

/// What is wrong with a volume, in words.
pub(super) fn problem(volume: &Volume) -> Option<String> {
    let (id, node) = (volume.name_any(), &volume.spec.node_name);
    Trouble::of(volume).map(|trouble| trouble.message(&id, node))
}

impl Cluster {
    /// Tells users of claims what became of their volumes.
    pub(super) async fn tell_forever(&self) {
        self.ready().await;
        let mut told: HashMap<String, (Trouble, Instant)> = HashMap::new();
        let mut volumes = self.seen_volumes.changes();
        loop {
            let has_more = self.tell(&mut told).await;
            sleep(if has_more { LATER } else { PAUSE }).await;
            if !has_more && let Ok(Err(_)) = timeout(AGAIN, volumes.changed()).await {
                return;
            }
        }
    }

    /// One look; whether more is to be told.
    async fn tell(&self, told: &mut HashMap<String, (Trouble, Instant)>) -> bool {
        let now = Instant::now();
        let volumes = self.seen_volumes.all();
        if !told.is_empty() {
            let uids: HashSet<String> = volumes.iter().filter_map(|one| one.uid()).collect();
            told.retain(|uid, _| uids.contains(uid));
        }
        let changed = volumes.iter().filter_map(|volume| {
            let uid = volume.uid()?;
            let trouble = Trouble::of(volume);
            is_due(told.get(&uid), trouble, now).then_some((volume, uid, trouble))
        });
        let mut changed: Vec<_> = changed.collect();
        if changed.is_empty() {
            return false;
        }
        let Some(named) = self.persistent.all() else {
            return true;
        };
        let named = named.into_iter().map(|one| (one.id.clone(), one));
        let named: HashMap<String, Named> = named.collect();
        // Those that the API server refuses again and again leave a place for the others.
        fastrand::shuffle(&mut changed);
        let (mut said, mut has_more) = (0, false);
        for (volume, uid, trouble) in changed {
            let named = named.get(&volume.name_any());
            let Some(claim) = named.and_then(|named| named.claim.as_ref()) else {
                if trouble.is_none() {
                    told.remove(&uid);
                }
                continue;
            };
            if said == MOST {
                return true;
            }
            said += 1;
            match self.say(volume, claim, trouble).await {
                Ok(()) => {}
                // It refuses this event. The webhook of a namespace may be down.
                Err(kube::Error::Api(_)) => {
                    has_more = true;
                    continue;
                }
                Err(_) => return true,
            }
            match trouble {
                Some(trouble) => drop(told.insert(uid, (trouble, now))),
                None => drop(told.remove(&uid)),
            }
        }
        has_more
    }

    /// Sends one event. After an error it is to be tried again.
    async fn say(
        &self,
        volume: &Volume,
        claim: &ObjectReference,
        trouble: Option<Trouble>,
    ) -> kube::Result<()> {
        let (id, node) = (volume.name_any(), &volume.spec.node_name);
        let text = if let Some(trouble) = trouble {
            (trouble.reason(), trouble.message(&id, node))
        } else {
            let message = format!("the data of volume {id} is on node {node} again");
            ("VolumeBack", message)
        };
        // The version changes with each report of the node.
        let version = volume.resource_version().unwrap_or_default();
        let change = format!("{id} {} {version}", volume.uid().unwrap_or_default());
        let event = event(claim, text, trouble.is_some(), &change);
        let namespace = claim.namespace.as_deref().unwrap_or_default();
        let events: Api<Event> = Api::namespaced(self.client.clone(), namespace);
        match events.create(&PostParams::default(), &event).await {
            Ok(_) => Ok(()),
            // It was said before, or its namespace is being deleted.
            Err(kube::Error::Api(status)) if [403, 404, 409].contains(&status.code) => Ok(()),
            Err(error) => {
                tracing::warn!(volume = %id, %error,
                    "an event on its claim could not be sent; trying again");
                Err(error)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use tokio::sync::mpsc;

    use super::*;
    use crate::api::{Mutable, VolumeSpec, VolumeStatus};
    use crate::k8s::client::{client_of, is_watch, list_of};

    fn lost(number: usize) -> Volume {
        let spec = VolumeSpec::empty(format!("pvc-{number}"), "node-1", Wanted::Present);
        let mut volume = Volume::new(&format!("vol-{number}"), spec);
        volume.metadata.uid = Some(format!("uid-{number}"));
        volume.status = Some(VolumeStatus {
            observed_generation: 1,
            phase: Phase::Lost,
            pool: "pool".to_owned(),
            capacity: 0,
            mutable: Mutable::default(),
            error: None,
        });
        volume
    }

    fn bound(number: usize, namespace: &str) -> Value {
        json!({
            "metadata": {"name": format!("pv-{number}"), "uid": format!("pv-{number}")},
            "spec": {
                "csi": {"driver": DRIVER_NAME, "volumeHandle": format!("vol-{number}")},
                "claimRef": {"namespace": namespace, "name": format!("claim-{number}")},
            },
            "status": {"phase": "Bound"},
        })
    }

    #[tokio::test]
    async fn an_event_that_is_refused_keeps_no_other_claim_from_its_own() {
        const CLAIMS: usize = 40;
        let (told, mut events) = mpsc::unbounded_channel();
        let client = client_of(move |request| {
            let uri = request.uri();
            if is_watch(request) {
                return None;
            }
            let numbers = 0..CLAIMS;
            let items = match uri.path().rsplit('/').next()? {
                "volumes" => numbers.map(lost).map(|lost| json!(lost)).collect(),
                "persistentvolumes" => {
                    let namespace = |number| if number == 0 { "open" } else { "closed" };
                    numbers
                        .map(|number| bound(number, namespace(number)))
                        .collect()
                }
                "events" if uri.path().contains("/closed/") => {
                    let refused = json!({"status": "Failure", "message": "a policy", "code": 422});
                    return Some((422, refused));
                }
                "events" => {
                    told.send(()).ok()?;
                    return Some((201, json!({"metadata": {}, "involvedObject": {}})));
                }
                _ => json!([]),
            };
            Some((200, list_of(&items)))
        });
        let _cluster = Cluster::of_server(client).await;
        let event = tokio::time::timeout(Duration::from_secs(60), events.recv()).await;
        event
            .expect("a claim waits for those that are refused")
            .expect("an event");
    }

    #[test]
    fn a_state_that_lasts_is_told_again_and_one_that_ended_once() {
        let begin = Instant::now();
        let told = (Trouble::NodeGone, begin);
        let (soon, later) = (begin + REPEAT / 2, begin + REPEAT);
        assert!(!is_due(None, None, later));
        assert!(is_due(None, Some(Trouble::Lost), begin));
        assert!(is_due(Some(&told), Some(Trouble::Lost), soon));
        assert!(is_due(Some(&told), None, soon));
        assert!(!is_due(Some(&told), Some(Trouble::NodeGone), soon));
        assert!(is_due(Some(&told), Some(Trouble::NodeGone), later));
    }

    #[test]
    fn a_change_has_one_event_and_another_change_has_another() {
        let claim = ObjectReference {
            namespace: Some("ci".to_owned()),
            name: Some("workspace".to_owned()),
            uid: Some("u".to_owned()),
            ..ObjectReference::default()
        };
        let made = |change: &str| {
            let text = ("VolumeLost", Trouble::Lost.message("vol-1", "node-1"));
            event(&claim, text, true, change)
        };
        assert_eq!(made("1").metadata.name, made("1").metadata.name);
        assert_ne!(made("1").metadata.name, made("2").metadata.name);
        let one = made("1");
        assert_eq!(
            one.involved_object.kind.as_deref(),
            Some("PersistentVolumeClaim")
        );
        assert_eq!(one.metadata.namespace.as_deref(), Some("ci"));
        let message = one.message.expect("a message");
        assert!(message.contains("vol-1") && message.contains("node-1"));
        assert!(message.len() < 1024, "the API's limit");
    }
}
