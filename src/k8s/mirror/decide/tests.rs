//! Tests of the plan: limits, turns, whose objects are changed, and the names of objects. A test
//! may carry the plan out on a list of objects.

use std::collections::BTreeSet;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::*;
use crate::catalog::{Entry, State, Version};
use crate::model::{self, Name};

const ALL: Limits = Limits { each: 3, all: 100 };

fn cache(namespace: &str, key: &str, stamp: u64) -> Listed {
    let name = Name {
        tenant: namespace.parse().expect("a label"),
        reference: format!("task-cache/{key}").parse().expect("a reference"),
    };
    let content = Entry {
        name: NameHash::of(&name),
        kind: model::NameKind::TaskCache,
        state: State::Durable,
        version: Version {
            stamp: Timestamp(stamp * 1000),
            tie: 1,
        },
        bytes: 5 << 20,
        layers: 1,
        fence: 0,
    };
    let author = Author {
        account: Some("builder".into()),
        pod: "tests-7".into(),
        node: Some("node-2".into()),
    };
    Listed {
        name,
        content: Some(content),
        nodes: BTreeSet::from(["node-1".into(), "node-2".into()]),
        author: Some(Box::new(author)),
        used: Some(Timestamp(stamp * 1000)),
    }
}

fn caches(namespace: &str, keys: &[(&str, u64)]) -> Vec<Listed> {
    let keys = keys.iter();
    keys.map(|(key, stamp)| cache(namespace, key, *stamp))
        .collect()
}

/// The plan as words, such as `create ci/go`.
fn said(writes: &[Write]) -> Vec<String> {
    let said = writes.iter().map(|write| {
        let (verb, cache) = match write {
            Write::Create(cache) => ("create", &**cache),
            Write::Tell {
                cache,
                status: Some(_),
            } => ("tell", &**cache),
            Write::Tell { cache, .. } => ("untell", &**cache),
            Write::Remove(cache) => ("remove", &**cache),
        };
        format!("{verb} {}/{}", write.namespace(), cache.name_any())
    });
    said.collect()
}

/// Does what was planned.
fn carry_out(objects: &mut Vec<Arc<Cache>>, writes: Vec<Write>) {
    for write in writes {
        match write {
            Write::Create(mut cache) => {
                cache.metadata.uid = Some(format!("uid-{}", objects.len()));
                objects.push(Arc::new(*cache));
            }
            Write::Tell { cache, status } => {
                objects.retain(|it| !Arc::ptr_eq(it, &cache));
                let mut cache = Arc::unwrap_or_clone(cache);
                cache.status = status;
                objects.push(Arc::new(cache));
            }
            Write::Remove(cache) => objects.retain(|it| !Arc::ptr_eq(it, &cache)),
        }
    }
}

fn change(cache: &mut Arc<Cache>, change: impl FnOnce(&mut Cache)) {
    change(Arc::make_mut(cache));
}

fn of_user(name: &str, spec: CacheSpec) -> Arc<Cache> {
    let mut cache = Cache::new(name, spec);
    cache.metadata.namespace = Some("ci".to_owned());
    cache.metadata.finalizers = Some(vec![CLEAR.to_owned()]);
    Arc::new(cache)
}

fn spec(kind: NameKind, key: Option<&str>, prefix: Option<&str>) -> CacheSpec {
    CacheSpec {
        kind,
        key: key.map(str::to_owned),
        prefix: prefix.map(str::to_owned),
    }
}

#[test]
fn the_newest_caches_of_a_namespace_have_objects_and_others_lose_theirs() {
    let mut objects = Vec::new();
    let listed = caches("ci", &[("a", 1), ("b", 2), ("c", 3), ("d", 4)]);
    let first = plan(&listed, &objects, ALL, "");
    assert_eq!(said(&first), ["create ci/d", "create ci/c", "create ci/b"]);
    let Write::Create(made) = &first[0] else {
        panic!("it is made");
    };
    assert!(made.is_mirrored() && made.orders());
    assert_eq!(made.task_key(), Some("d"));
    let status = made.status.clone().expect("it is told");
    let newest = status.newest.expect("it is known");
    assert_eq!((status.bytes, status.nodes), (Some(5 << 20), 2));
    assert_eq!(status.size.as_deref(), Some("5.0 MiB"));
    assert_eq!(newest.at, "1970-01-01T00:00:04Z");
    assert_eq!(newest.author.as_deref(), Some("builder/tests-7"));
    assert_eq!(newest.node.as_deref(), Some("node-2"));
    assert_eq!(status.last_use.as_deref(), Some("1970-01-01T00:00:04Z"));
    carry_out(&mut objects, first);
    assert_eq!(said(&plan(&listed, &objects, ALL, "")), [""; 0]);

    // A new key, a commit of an old one, and a cache that no node has any more.
    let listed = caches("ci", &[("a", 9), ("c", 3), ("d", 4), ("e", 5)]);
    let next = plan(&listed, &objects, ALL, "");
    let expected = ["remove ci/b", "create ci/a", "remove ci/c", "create ci/e"];
    assert_eq!(said(&next), expected);
    carry_out(&mut objects, next);
    let listed = caches("ci", &[("a", 10), ("d", 4), ("e", 11)]);
    let next = plan(&listed, &objects, ALL, "");
    // The one that shows the older commit comes first.
    assert_eq!(said(&next), ["tell ci/e", "tell ci/a"]);
    carry_out(&mut objects, next);

    // No mirror any more.
    let none = Limits { each: 0, all: 100 };
    let last = plan(&[], &objects, none, "");
    assert_eq!(said(&last).len(), 3);
    assert!(last.iter().all(|write| matches!(write, Write::Remove(_))));
}

#[test]
fn what_a_node_has_not_measured_or_does_not_know_is_left_out() {
    let mut listed = cache("ci", "a", 1);
    listed.author = None;
    listed.used = None;
    listed.content.as_mut().expect("there").bytes = 0;
    let told = status(&listed);
    assert_eq!((told.bytes, told.size, told.last_use), (None, None, None));
    let newest = told.newest.expect("there");
    assert_eq!((newest.author, newest.node), (None, None));
    let author = Author {
        account: None,
        pod: "p".into(),
        node: None,
    };
    assert_eq!(said_author(&author), "-/p");
    // A clock that is out of its mind is no panic.
    listed.used = Some(Timestamp(u64::MAX));
    let told = status(&listed).last_use;
    assert_eq!(told.as_deref(), Some("9999-12-31T23:59:59Z"));
}

fn said_author(author: &Author) -> String {
    super::said(author)
}

#[test]
fn only_its_own_objects_are_removed_and_none_that_is_being_deleted() {
    let listed = caches("ci", &[("a", 1)]);
    let task = NameKind::TaskCache;
    let users = [
        of_user("mine", spec(task, Some("a"), None)),
        of_user("gone", spec(task, Some("z"), None)),
        of_user("many", spec(task, None, Some("p"))),
        of_user("other", spec(NameKind::ResourceCache, Some("a"), None)),
    ];
    // A user's object of that key is enough, and shows the same.
    let first = plan(&listed, &users, ALL, "");
    assert_eq!(said(&first), ["tell ci/mine"]);
    let mut objects = users.to_vec();
    carry_out(&mut objects, first);
    assert_eq!(said(&plan(&listed, &objects, ALL, "")), [""; 0]);
    // Nothing is shown of a cache that no node has.
    assert_eq!(said(&plan(&[], &objects, ALL, "")), ["untell ci/mine"]);

    let mut ours = Vec::new();
    carry_out(&mut ours, plan(&listed, &[], ALL, ""));
    // Its deletion is an order: neither is it removed, nor made again, nor is the name taken.
    let at = k8s_openapi::jiff::Timestamp::UNIX_EPOCH;
    change(&mut ours[0], |cache| {
        cache.metadata.deletion_timestamp = Some(Time(at));
    });
    assert_eq!(said(&plan(&listed, &ours, ALL, "")), [""; 0]);
    assert_eq!(said(&plan(&[], &ours, ALL, "")), [""; 0]);
    // A controller ended before it deleted the object: until it has its finalizer again, its
    // deletion would be no order.
    change(&mut ours[0], |cache| {
        cache.metadata.deletion_timestamp = None;
        cache.metadata.finalizers = None;
    });
    assert_eq!(said(&plan(&listed, &ours, ALL, "")), [""; 0]);
    assert_eq!(said(&plan(&[], &ours, ALL, "")), [""; 0]);
    change(&mut ours[0], |cache| {
        cache.metadata.finalizers = Some(vec![CLEAR.to_owned()]);
    });
    assert_eq!(said(&plan(&[], &ours, ALL, "")), ["remove ci/a"]);
}

#[test]
fn namespaces_take_turns_and_share_what_there_is() {
    let mut listed = Vec::new();
    for namespace in ["one", "three", "two"] {
        listed.extend(caches(namespace, &[("a", 1), ("b", 2), ("c", 3)]));
    }
    let writes = plan(&listed, &[], Limits { each: 3, all: 7 }, "one");
    let expected = [
        "create three/c",
        "create two/c",
        "create one/c",
        "create three/b",
        "create two/b",
        "create one/b",
        "create one/a",
    ];
    assert_eq!(said(&writes), expected);
}

#[test]
fn a_flood_of_keys_never_makes_more_objects_than_the_limit() {
    let mut objects = Vec::new();
    for round in 0..50 {
        let keys: Vec<String> = (round..round + 10).map(|it| format!("k{it}")).collect();
        let keys = keys.iter().zip(round..).map(|(key, at)| (&**key, at));
        let listed = caches("ci", &keys.collect::<Vec<_>>());
        for write in plan(&listed, &objects, ALL, "") {
            carry_out(&mut objects, vec![write]);
            assert!(objects.len() <= ALL.each + 1, "{}", objects.len());
        }
        assert_eq!(objects.len(), ALL.each);
    }
}

#[test]
fn every_key_has_a_name_that_the_api_server_takes() {
    let names = |key: &str| object_names(&cache("ci", key, 1));
    assert_eq!(names("unit-tests")[0], "unit-tests");
    let long = "x".repeat(256);
    for (key, beginning) in [
        ("Go Tests/main", "go-tests-main-"),
        ("unit-tests", "unit-tests-"),
        ("a.b", "a-b-"),
        ("--", "cache-"),
        ("ü", "cache-"),
        (&long, &long[..40]),
    ] {
        let name = names(key).pop().expect("one");
        assert!(name.starts_with(beginning), "{name}");
        assert!(name.parse::<ArtifactName>().is_ok(), "{name}");
    }
    assert_ne!(names("A b"), names("a B"));

    // A user's object has the name, and is about something else.
    let other = of_user("go", spec(NameKind::TaskCache, None, Some("go")));
    let listed = caches("ci", &[("go", 1)]);
    let [write] = &plan(&listed, &[other], ALL, "")[..] else {
        panic!("one write");
    };
    assert!(said(std::slice::from_ref(write))[0].starts_with("create ci/go-"));
}
