//! Rollbacks over the whole cluster: `Rollback` objects, which users create. The controller asks
//! the nodes for the generations of the name, orders a node that still has the wanted one to commit
//! it once more, and says in the status what happened. `choose` decides, without I/O.
//!
//! An order has one effect, however often it is repeated: before the node gets it, the status holds
//! the node and the time of the new commit, and the id of the new artifact follows from the
//! object's uid. So an order that is repeated replaces no content that was committed since. Nothing
//! begins later than [`PATIENCE`] after the object was made. An order without an answer until then
//! is done if any node has the new artifact. It has failed if its node says that it has none, or if
//! the node has left the cluster. A node that is away may have carried the order out.
//!
//! Nodes use their own content of a cache without asking. So for as long as the object is there,
//! nodes with content from before the rollback are told to drop it, also those that were away.
//!
//! A namespace with many objects keeps no other waiting: a look takes the oldest few of each.
//!
//! It needs `get`, `list`, `watch` and `delete` on `rollbacks`, and `patch` on `rollbacks/status`.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use kube::{Api, Client, ResourceExt as _};
use sha2::{Digest as _, Sha256};
use tokio::time::{MissedTickBehavior, interval};

use super::clears::{ApiTime, Error, api_time, do_all, failed};
use super::client::{deletion_of, has_code, patch_status_as_read};
use super::watched::Watched;
use crate::api::{self, Rollback, RollbackPhase, RollbackStatus};
use crate::hub::{self, Generation, Generations, RollbackOrder, RollbackRefusal};
use crate::model::{ArtifactId, Name, NodeId, Timestamp};

/// How often the objects are looked at without a change, and the pause between two looks.
const LOOK: Duration = Duration::from_secs(10);
const MOMENT: Duration = Duration::from_millis(100);
/// How long after its creation an order may begin.
const PATIENCE: Duration = Duration::from_mins(5);
/// How long after its creation an object that has ended is looked at with each change: its commit
/// may be in the catalog a moment after the answer of its node.
const YOUNG: Duration = Duration::from_mins(1);
/// How long an object stays.
const KEEP: Duration = Duration::from_hours(7 * 24);
/// How many objects of a namespace that have not ended a look takes.
const MOST_OF_NAMESPACE: usize = 16;
/// How many generations a message names.
const MOST_NAMED: usize = 5;

/// Carries out rollbacks, until it is dropped.
pub async fn keep(client: Client, catalog: hub::Handle) {
    let (objects, watch) = Watched::open(client.clone(), "Rollbacks");
    let keeper = Keeper {
        client,
        catalog,
        objects,
    };
    tokio::join!(watch, keeper.run());
}

struct Keeper {
    client: Client,
    catalog: hub::Handle,
    objects: Watched<Rollback>,
}

/// What the controller does with an order that it has not given to a node.
#[derive(Debug, PartialEq, Eq)]
enum Choice {
    /// This node commits this generation. The newest one was committed at this time.
    Order(NodeId, ArtifactId, Timestamp),
    /// It was done before, by an object of this name.
    Done(String, ArtifactId),
    /// Nodes are away that may have the generation.
    Wait(String),
    Fail(String),
}

impl Keeper {
    async fn run(&self) {
        let mut changes = self.objects.changes();
        let mut looks = interval(LOOK);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut is_tick = false;
        loop {
            changes.mark_unchanged();
            if let Err(error) = self.look(is_tick).await {
                tracing::warn!(%error, "a Rollback could not be carried out yet; retrying. The \
                    controller may watch and delete rollbacks, and patch rollbacks/status \
                    (deploy/components/peers)");
            }
            tokio::time::sleep(MOMENT).await;
            is_tick = tokio::select! {
                biased;
                _ = looks.tick() => true,
                _ = changes.changed() => false,
            };
        }
    }

    /// Looks at the objects. One that cannot be changed does not keep the others waiting.
    /// `is_tick`: also at all that have ended.
    async fn look(&self, is_tick: bool) -> Result<(), Error> {
        let all = self.objects.all();
        if all.is_empty() {
            return Ok(());
        }
        let now = api_time(&self.client).await?;
        let steps = to_look_at(all).into_iter().map(|it| async move {
            if it.has_ended() {
                if is_tick || age(&it, now) <= YOUNG {
                    self.follow_up(&it, now).await?;
                }
                Ok(())
            } else {
                self.step(&it, now).await
            }
        });
        do_all(steps).await
    }

    /// What remains to do after an order was carried out.
    async fn follow_up(&self, object: &Rollback, now: ApiTime) -> Result<(), Error> {
        if age(object, now) > KEEP {
            let params = deletion_of(object.uid());
            return match self.api(object).delete(&object.name_any(), &params).await {
                Err(error) if has_code(&error, 404) || has_code(&error, 409) => Ok(()),
                done => done.map(drop).map_err(failed("delete a Rollback")),
            };
        }
        let status = object.status.clone().unwrap_or_default();
        let artifact = status.artifact.and_then(|id| id.parse().ok());
        if let (RollbackPhase::Done, Ok(name), Some(stamp), Some(artifact)) =
            (status.phase, object.name(), status.stamp, artifact)
        {
            let stamp = Timestamp(api::bytes(stamp));
            self.catalog.withdraw_older(&name, stamp, artifact);
        }
        Ok(())
    }

    async fn step(&self, object: &Rollback, now: ApiTime) -> Result<(), Error> {
        if object.metadata.deletion_timestamp.is_some() {
            return Ok(());
        }
        let is_late = age(object, now) > PATIENCE;
        let mut status = object.status.clone().unwrap_or_default();
        match object.name() {
            Err(why) => {
                self.end(object, status, Err(why)).await?;
            }
            Ok(_) if is_late && status.phase != RollbackPhase::Ordered => {
                let was = status.message.take().map_or_else(
                    || "no controller with connected nodes ran".to_owned(),
                    |was| format!("the last state was: {was}"),
                );
                let why = format!("not carried out within 5 minutes, so it is given up; {was}");
                self.end(object, status, Err(why)).await?;
            }
            // Another controller may have the nodes.
            Ok(_) if !self.catalog.has_nodes() => {}
            Ok(name) if status.phase == RollbackPhase::Ordered => {
                self.order(object, name, status, is_late).await?;
            }
            Ok(name) => self.begin(object, name, status).await?,
        }
        Ok(())
    }

    /// Looks for a node that has the generation.
    async fn begin(
        &self,
        object: &Rollback,
        name: Name,
        mut status: RollbackStatus,
    ) -> Result<(), Error> {
        let told = self.catalog.generations(&name).await;
        let others = self.objects.all();
        let is_incomplete = self.catalog.is_incomplete();
        match choose(object, &told, is_incomplete, &others) {
            Choice::Order(node, generation, newest) => {
                // An earlier order keeps its time: what was committed since must not be replaced.
                let ordered = status.stamp.map(|stamp| Timestamp(api::bytes(stamp)));
                let stamp = ordered.unwrap_or_else(|| self.catalog.commit_time(&name, newest));
                status.phase = RollbackPhase::Ordered;
                status.node = Some(node.as_str().to_owned());
                status.generation = Some(generation.to_string());
                status.stamp = Some(api::number(stamp.0));
                status.message = None;
                // If another controller was first, the next look shows its choice.
                if let Some(object) = self.tell(object, &status).await? {
                    self.order(&object, name, status, false).await?;
                }
                Ok(())
            }
            Choice::Done(by, artifact) => {
                status.artifact = Some(artifact.to_string());
                let said = format!(
                    "{} has this content already, by Rollback {by}",
                    name.reference
                );
                self.end(object, status, Ok(said)).await
            }
            Choice::Fail(why) => self.end(object, status, Err(why)).await,
            Choice::Wait(why) => {
                status.message = Some(why);
                self.tell(object, &status).await.map(drop)
            }
        }
    }

    /// Gives the order to its node.
    async fn order(
        &self,
        object: &Rollback,
        name: Name,
        mut status: RollbackStatus,
        is_late: bool,
    ) -> Result<(), Error> {
        let node = status.node.clone().map(NodeId::new).and_then(Result::ok);
        let generation = status.generation.as_ref().and_then(|id| id.parse().ok());
        let (Some(node), Some(to), Some(stamp)) = (node, generation, status.stamp) else {
            let why = "its status was changed by hand".to_owned();
            return self.end(object, status, Err(why)).await;
        };
        let order = RollbackOrder {
            name,
            to,
            id: made_for(&object.uid().unwrap_or_default()),
            stamp: Timestamp(api::bytes(stamp)),
            by: object.spec.by.clone(),
        };
        let answer = if is_late {
            let told = self.catalog.generations(&order.name).await;
            let ended = late(&order, &node, &told, self.catalog.is_incomplete());
            ended.map(|ended| ended.map_err(RollbackRefusal::from))
        } else {
            let answer = self.catalog.roll_back(&node, &order).await;
            let said = |refusal: RollbackRefusal| RollbackRefusal {
                why: format!("node {} did nothing: {}", node.as_str(), refusal.why),
                ..refusal
            };
            answer.map(|done| done.map_err(said))
        };
        let (reference, node) = (&order.name.reference, node.as_str());
        match answer {
            Some(Ok(())) => {
                self.catalog
                    .withdraw_older(&order.name, order.stamp, order.id);
                tracing::info!(
                    tenant = %order.name.tenant, name = %reference, node, by = order.by,
                    earlier.id = %to, artifact.id = %order.id, "a Rollback is carried out");
                status.artifact = Some(order.id.to_string());
                let said = format!(
                    "{reference} has the content of {to} again, as artifact {} of node {node}",
                    order.id
                );
                self.end(object, status, Ok(said)).await
            }
            Some(Err(refusal)) if refusal.is_gone => {
                let status = looked_for_again(status, &refusal.why);
                self.tell(object, &status).await.map(drop)
            }
            Some(Err(refusal)) => self.end(object, status, Err(refusal.why)).await,
            None => {
                status.message = Some(format!(
                    "node {node} has not confirmed the order: it has no connection to the \
                     controller, an older driver, or an error that its log shows"
                ));
                self.tell(object, &status).await.map(drop)
            }
        }
    }

    /// Says how it ended. Nothing more happens then.
    async fn end(
        &self,
        object: &Rollback,
        mut status: RollbackStatus,
        ended: Result<String, String>,
    ) -> Result<(), Error> {
        let (phase, message) = match ended {
            Ok(said) => (RollbackPhase::Done, said),
            Err(why) => (RollbackPhase::Failed, why),
        };
        status.phase = phase;
        status.message = Some(message);
        self.tell(object, &status).await.map(drop)
    }

    /// Writes the status of an object that is as it was seen. `None`: it was changed meanwhile, or
    /// is as it should be.
    async fn tell(
        &self,
        object: &Rollback,
        status: &RollbackStatus,
    ) -> Result<Option<Rollback>, Error> {
        if object.status.as_ref() == Some(status) {
            return Ok(None);
        }
        let written = patch_status_as_read(&self.api(object), object, status).await;
        written.map_err(failed("write the status of a Rollback"))
    }

    fn api(&self, object: &Rollback) -> Api<Rollback> {
        Api::namespaced(self.client.clone(), &object.namespace().unwrap_or_default())
    }
}

/// How old an object is by the API server's clock.
fn age(object: &Rollback, now: ApiTime) -> Duration {
    let made = object.metadata.creation_timestamp.as_ref();
    let age = made.map(|made| now.duration_since(made.0));
    age.and_then(|age| Duration::try_from(age).ok())
        .unwrap_or_default()
}

/// All that have ended, and the oldest others of each namespace.
fn to_look_at(mut all: Vec<Arc<Rollback>>) -> Vec<Arc<Rollback>> {
    all.sort_by_cached_key(|it| {
        let made = it.metadata.creation_timestamp.as_ref().map(|made| made.0);
        (made, it.name_any())
    });
    let mut taken: HashMap<Option<String>, usize> = HashMap::new();
    all.retain(|it| {
        it.has_ended() || {
            let taken = taken.entry(it.namespace()).or_default();
            *taken += 1;
            *taken <= MOST_OF_NAMESPACE
        }
    });
    all
}

/// The status of an order whose node has no such generation any more: the next look finds another
/// node that has it, or says that there is none. The generation and the time of the commit stay.
fn looked_for_again(mut status: RollbackStatus, why: &str) -> RollbackStatus {
    status.phase = RollbackPhase::Waiting;
    status.node = None;
    status.message = Some(format!(
        "{why}; the controller looks for another node that has it"
    ));
    status
}

/// How an order has ended that its node has not answered in time. `None`: its node is away, and may
/// have carried it out; or other nodes that may tell have not connected yet.
fn late(
    order: &RollbackOrder,
    node: &NodeId,
    told: &Generations,
    is_incomplete: bool,
) -> Option<Result<(), String>> {
    if told.found.iter().any(|(_, it)| it.id == order.id) {
        return Some(Ok(()));
    }
    let why = || {
        format!(
            "node {} did not confirm the order within 5 minutes; if artifact {} exists, it did \
             carry the order out: see baggageclaim log --cluster",
            node.as_str(),
            order.id
        )
    };
    let is_away = told.silent.contains(node.as_str());
    (!is_away && !is_incomplete).then(|| Err(why()))
}

/// The id of the artifact that is made for an object.
fn made_for(uid: &str) -> ArtifactId {
    let digest = Sha256::digest(uid);
    let bits = digest.first_chunk().copied().unwrap_or_default();
    ArtifactId::from_bits(u128::from_be_bytes(bits))
}

/// What to do with an order, given the generations on the nodes and all other objects.
fn choose(
    object: &Rollback,
    told: &Generations,
    is_incomplete: bool,
    others: &[Arc<Rollback>],
) -> Choice {
    let spec = &object.spec;
    if let Some(done) = done_before(object, told, others) {
        return done;
    }
    // One that was ordered before, of a node that lost it.
    let status = object.status.as_ref();
    let whole = status.and_then(|status| status.generation.as_ref());
    let to = whole.unwrap_or(&spec.to);
    let is_wanted = |id: ArtifactId| id.to_string().starts_with(to);
    let mut matching = told.found.iter().filter(|(_, it)| is_wanted(it.id));
    if let Some((node, wanted)) = matching.next() {
        if matching.any(|(_, other)| other.id != wanted.id) {
            let why = format!("several generations begin with {}", spec.to);
            return Choice::Fail(format!("{why}; {}", named(&told.found)));
        }
        let newest = told.found.iter().map(|(_, it)| it.created.0).max();
        let newest = Timestamp(newest.unwrap_or_default());
        return Choice::Order(node.clone(), wanted.id, newest);
    }
    if told.silent.is_empty() && !is_incomplete {
        let why = format!("no node has generation {} any more", spec.to);
        return Choice::Fail(format!("{why}; {}", named(&told.found)));
    }
    let mut silent: Vec<&str> = told.silent.iter().map(String::as_str).collect();
    if silent.is_empty() {
        silent.push("nodes that have not connected since the controller's start");
    }
    Choice::Wait(format!(
        "no connected node has generation {}, and these do not answer: {}; {}",
        spec.to,
        silent.join(", "),
        named(&told.found)
    ))
}

/// Whether an earlier object of the same order was carried out, and its content still counts. The
/// generation itself may be gone by then.
fn done_before(object: &Rollback, told: &Generations, others: &[Arc<Rollback>]) -> Option<Choice> {
    // The newest is the first. Others may be copies of it.
    let newest = told.found.first()?.1.created;
    let newest = told.found.iter().take_while(|(_, it)| it.created == newest);
    let current = newest.filter(|(_, it)| it.is_current).map(|(_, it)| it.id);
    let current: Vec<ArtifactId> = current.collect();
    let made = |other: &Rollback| {
        let artifact = other.status.as_ref()?.artifact.as_ref()?;
        artifact.parse().ok().filter(|id| current.contains(id))
    };
    let is_same = |other: &&Arc<Rollback>| {
        let status = other.status.as_ref();
        let generation = status.and_then(|status| status.generation.as_deref());
        other.phase() == RollbackPhase::Done
            && other.metadata.namespace == object.metadata.namespace
            && (other.spec.kind, &other.spec.key) == (object.spec.kind, &object.spec.key)
            && generation.is_some_and(|id| id.starts_with(&object.spec.to))
    };
    let mut before = others.iter().filter(is_same);
    before.find_map(|before| Some(Choice::Done(before.name_any(), made(before)?)))
}

/// The generations for people.
fn named(found: &[(NodeId, Generation)]) -> String {
    if found.is_empty() {
        return "no connected node has any generation of this name".to_owned();
    }
    let mut text = "there are:".to_owned();
    for (node, generation) in found.iter().take(MOST_NAMED) {
        let at = humantime::format_rfc3339_seconds(generation.created.calendar());
        let maker = generation.made_by.as_ref();
        let pod = maker.map_or("-", |maker| maker.pod.name.as_str());
        let _written = write!(
            text,
            " {} ({at}, pod {pod}, on {})",
            generation.id,
            node.as_str()
        );
    }
    if found.len() > MOST_NAMED {
        let _written = write!(text, " and {} more", found.len() - MOST_NAMED);
    }
    text
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

    use super::*;
    use crate::api::{NameKind, RollbackSpec};

    const A: &str = "aa000000000000000000000000000001";
    const B: &str = "aab00000000000000000000000000002";

    fn object(to: &str) -> Rollback {
        let spec = RollbackSpec {
            kind: NameKind::TaskCache,
            key: "go".to_owned(),
            to: to.to_owned(),
            by: "jane".to_owned(),
        };
        let mut object = Rollback::new("r", spec);
        object.metadata.namespace = Some("ci".to_owned());
        object
    }

    fn told(all: &[(&str, &str, u64, bool)], silent: &[&str]) -> Generations {
        let found = all.iter().map(|(node, id, created, is_current)| {
            let generation = Generation {
                id: id.parse().expect("an id"),
                created: Timestamp(*created),
                is_current: *is_current,
                bytes: None,
                in_use_by: 0,
                made_by: None,
            };
            (NodeId::new(*node).expect("a name"), generation)
        });
        Generations {
            found: found.collect(),
            silent: silent
                .iter()
                .map(ToString::to_string)
                .collect::<BTreeSet<_>>(),
        }
    }

    fn fails(choice: Choice) -> String {
        match choice {
            Choice::Fail(why) => why,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_node_that_has_the_generation_gets_the_order() {
        let all = told(&[("n2", B, 9, true), ("n1", A, 5, false)], &["n3"]);
        let node = NodeId::new("n1").expect("a name");
        let expected = Choice::Order(node, A.parse().expect("an id"), Timestamp(9));
        assert_eq!(choose(&object("aa00"), &all, false, &[]), expected);
        // The first digits must be those of one generation; a copy on another node is the same.
        assert!(fails(choose(&object("aa"), &all, false, &[])).contains("several generations"));
        let copies = told(&[("n2", A, 5, true), ("n1", A, 5, true)], &[]);
        assert!(matches!(
            choose(&object("aa"), &copies, false, &[]),
            Choice::Order(..)
        ));
    }

    #[test]
    fn an_order_whose_node_lost_the_generation_goes_to_the_next_holder() {
        let mut order = object("aa");
        let ordered = RollbackStatus {
            phase: RollbackPhase::Ordered,
            node: Some("n1".to_owned()),
            generation: Some(A.to_owned()),
            stamp: Some(7),
            ..RollbackStatus::default()
        };
        let again = looked_for_again(ordered, "node n1 did nothing");
        assert_eq!((again.phase, &again.node), (RollbackPhase::Waiting, &None));
        assert_eq!(again.stamp, Some(7), "a repeated order has the same effect");
        order.status = Some(again);
        // Another one that begins so came meanwhile.
        let left = told(&[("n3", B, 9, true), ("n2", A, 5, true)], &[]);
        let Choice::Order(node, generation, _) = choose(&order, &left, false, &[]) else {
            panic!("another node has it");
        };
        assert_eq!(
            (node.as_str(), generation.to_string()),
            ("n2", A.to_owned())
        );
        let why = fails(choose(&order, &told(&[], &[]), false, &[]));
        assert!(why.contains("no connected node has any"), "{why}");
    }

    #[test]
    fn a_generation_that_is_gone_is_an_error_unless_a_node_is_away() {
        let all = told(&[("n2", B, 9, true)], &[]);
        let why = fails(choose(&object(A), &all, false, &[]));
        assert!(
            why.contains("no node has generation") && why.contains(B),
            "{why}"
        );
        let none = fails(choose(&object(A), &told(&[], &[]), false, &[]));
        assert!(none.contains("no connected node has any"), "{none}");
        let away = told(&[("n2", B, 9, true)], &["n3"]);
        let Choice::Wait(why) = choose(&object(A), &away, false, &[]) else {
            panic!("it must wait");
        };
        assert!(why.contains("n3"), "{why}");
        // Nor does it fail before all nodes have connected.
        let early = choose(&object(A), &all, true, &[]);
        assert!(matches!(early, Choice::Wait(_)), "{early:?}");
    }

    #[test]
    fn a_look_takes_the_oldest_objects_of_each_namespace_and_all_that_have_ended() {
        let object = |namespace: &str, name: usize, phase| {
            let mut object = object(A);
            object.metadata.namespace = Some(namespace.to_owned());
            object.metadata.name = Some(format!("r{name}"));
            let second = i64::try_from(100 - name).expect("small");
            let at = k8s_openapi::jiff::Timestamp::from_second(second).expect("a time");
            object.metadata.creation_timestamp = Some(Time(at));
            object.status = Some(RollbackStatus {
                phase,
                ..RollbackStatus::default()
            });
            Arc::new(object)
        };
        let waiting = (0..50).map(|name| object("many", name, RollbackPhase::Waiting));
        let ended = (50..60).map(|name| object("many", name, RollbackPhase::Failed));
        let other = object("other", 0, RollbackPhase::Ordered);
        let taken = to_look_at(waiting.chain(ended).chain([other]).collect());
        let of = |namespace: &str| {
            let of = |it: &&Arc<Rollback>| it.metadata.namespace.as_deref() == Some(namespace);
            let of = taken.iter().filter(of).filter(|it| !it.has_ended());
            of.map(|it| it.name_any()).collect::<Vec<_>>()
        };
        let oldest: Vec<String> = (34..50).rev().map(|name| format!("r{name}")).collect();
        assert_eq!(of("many"), oldest);
        assert_eq!(of("other"), ["r0"]);
        assert_eq!(taken.len(), MOST_OF_NAMESPACE + 1 + 10);
    }

    #[test]
    fn an_order_without_an_answer_is_done_if_a_node_has_its_artifact() {
        let order = RollbackOrder {
            name: object(A).name().expect("a name"),
            to: A.parse().expect("an id"),
            id: B.parse().expect("an id"),
            stamp: Timestamp(10),
            by: "jane".to_owned(),
        };
        let node = NodeId::new("n1").expect("a name");
        let there = told(&[("n2", B, 10, false)], &["n1"]);
        assert_eq!(late(&order, &node, &there, true), Some(Ok(())));
        let nowhere = told(&[("n1", A, 5, true)], &[]);
        assert_eq!(late(&order, &node, &nowhere, true), None);
        let away = |silent: &str| told(&[("n2", A, 5, true)], &[silent]);
        assert_eq!(late(&order, &node, &away("n1"), false), None);
        let another = late(&order, &node, &away("n3"), false);
        assert!(matches!(another, Some(Err(_))), "{another:?}");
        let why = late(&order, &node, &nowhere, false).expect("it ends");
        let why = why.expect_err("it is not confirmed");
        assert!(
            why.contains("node n1 did not confirm") && why.contains(B),
            "{why}"
        );
    }

    #[test]
    fn the_same_order_once_more_is_done_while_its_content_counts() {
        let id = made_for("uid");
        assert_ne!(id, made_for("another"));
        let made = id.to_string();
        let mut before = object(A);
        before.status = Some(RollbackStatus {
            phase: RollbackPhase::Done,
            generation: Some(A.to_owned()),
            artifact: Some(made.clone()),
            ..RollbackStatus::default()
        });
        let others = [Arc::new(before)];
        let counts = told(&[("n1", &made, 10, true), ("n2", B, 9, false)], &[]);
        let expected = Choice::Done("r".to_owned(), id);
        assert_eq!(choose(&object("aa00"), &counts, false, &others), expected);
        // Another commit came since: the generation is looked for again.
        let newer = told(&[("n2", B, 11, true), ("n1", &made, 10, false)], &[]);
        fails(choose(&object("aa00"), &newer, false, &others));
        fails(choose(&object("ab"), &counts, false, &others));
    }
}
