//! The messages of a node's stream (`proto/hub.proto`) as the types of `catalog` and `model`, and
//! back: reports, orders, fences, and what namespaces use. What the other side sent is checked
//! here. `find` has the calls beside the stream.

use std::cmp::Reverse;

use prost::Message as _;

use crate::catalog::{Author, Entry, NameHash, Report, State, Supersede, ToldCache, Version};
use crate::engine::NameState;
use crate::model::{
    ArtifactId, Bucket, CacheKey, Coverage, CutOff, Fence, Fences, MAX_BUCKETS, Name, NameError,
    NameKind, NamespaceUsage, NodeId, Reference, Tenant, Timestamp,
};
use crate::proto::hub::v1 as wire;

/// The highest number of a fence that a node may have applied: there is room for later ones.
const MOST_FENCE: u64 = 1 << 62;

/// How many bytes each fence takes beside its own: its field and its length.
const OF_ONE: usize = 8;

/// What decides between two commits of one millisecond.
pub(super) fn tie(artifact: ArtifactId) -> u32 {
    u32::try_from(artifact.bits() >> 96).unwrap_or(u32::MAX)
}

pub(super) fn kind(kind: NameKind) -> wire::Kind {
    match kind {
        NameKind::Artifact => wire::Kind::Artifact,
        NameKind::ResourceCache => wire::Kind::ResourceCache,
        NameKind::TaskCache => wire::Kind::TaskCache,
    }
}

/// A tenant that was received. The error names the field.
pub(super) fn tenant(text: &str) -> Result<Tenant, String> {
    let tenant = text.parse();
    tenant.map_err(|error: NameError| format!("tenant: {error}"))
}

/// A name that was received; `None`: it is malformed.
pub(super) fn name(tenant: &str, reference: &str) -> Option<Name> {
    Some(Name {
        tenant: tenant.parse().ok()?,
        reference: reference.parse().ok()?,
    })
}

/// `None`: there is none, or one of a later version.
fn received_kind(kind: wire::Kind) -> Option<NameKind> {
    match kind {
        wire::Kind::Artifact => Some(NameKind::Artifact),
        wire::Kind::ResourceCache => Some(NameKind::ResourceCache),
        wire::Kind::TaskCache => Some(NameKind::TaskCache),
        wire::Kind::Unspecified => None,
    }
}

/// What this node has under a name, for a report.
pub(super) fn entry(name: &Name, state: &NameState) -> wire::Entry {
    let mut entry = wire::Entry {
        name: NameHash::of(name).0.to_vec(),
        kind: kind(name.reference.kind()).into(),
        ..wire::Entry::default()
    };
    match state {
        NameState::Durable(content) => {
            entry.state = wire::State::Durable.into();
            entry.stamp = content.created.0;
            entry.tie = tie(content.artifact);
            entry.bytes = content.bytes;
            entry.layers = u32::try_from(content.layers).unwrap_or(u32::MAX);
            entry.fence = content.fence;
            if let Reference::TaskCache(_) = name.reference {
                entry.used = content.used.0;
                // The controller takes no other text. One that is long could make the report too
                // large, and no stream would reach its end.
                let sent = |text: Option<&str>| -> String {
                    text.and_then(object_name).unwrap_or_default().into()
                };
                let maker = content.made_by.as_deref();
                let pod = maker.map(|maker| &maker.pod);
                entry.service_account = sent(pod.and_then(|pod| pod.service_account.as_deref()));
                entry.pod = sent(pod.map(|pod| pod.name.as_str()));
                let node = maker.and_then(|maker| maker.node.as_ref());
                entry.node = sent(node.map(NodeId::as_str));
            }
        }
        NameState::Coming { fence } => {
            entry.state = wire::State::Coming.into();
            entry.fence = *fence;
        }
    }
    if let Some((_, key)) = name.reference.cache() {
        entry.tenant = name.tenant.to_string();
        entry.key = key.to_string();
    }
    entry
}

fn name_hash(bytes: &[u8]) -> Result<NameHash, &'static str> {
    let hash = bytes.try_into().map(NameHash);
    hash.map_err(|_| "the digest of a name has 16 bytes")
}

/// The name of an object of Kubernetes; `None` if it is none. Records that came from elsewhere may
/// have any text.
fn object_name(text: &str) -> Option<Box<str>> {
    let fits = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'.';
    let is_name = (1..=253).contains(&text.len()) && text.bytes().all(fits);
    is_name.then(|| text.into())
}

/// A cache that a node reports, with its name. It must be the name of the entry: lists show it, and
/// beginnings of keys find it.
fn cache(entry: &wire::Entry) -> Result<ToldCache, &'static str> {
    let malformed = "the name of a cache is malformed";
    let name = Name {
        tenant: entry.tenant.parse().map_err(|_| malformed)?,
        reference: reference(entry.kind(), &entry.key).map_err(|_| malformed)?,
    };
    let is_cache = name.reference.cache().is_some();
    if !is_cache || NameHash::of(&name).0[..] != entry.name[..] {
        return Err("an entry is not of the name that it gives");
    }
    let author = object_name(&entry.pod).map(|pod| Author {
        account: object_name(&entry.service_account),
        pod,
        node: object_name(&entry.node),
    });
    Ok(ToldCache {
        name,
        tie: entry.tie,
        author: author.map(Box::new),
        used: Timestamp(entry.used),
    })
}

/// What a node reports.
pub(super) fn report(report: &wire::Report) -> Result<Report, &'static str> {
    let put = report.put.iter().map(|entry| {
        Ok(Entry {
            name: name_hash(&entry.name)?,
            kind: received_kind(entry.kind()).ok_or("an entry has no kind")?,
            state: match entry.state() {
                wire::State::Coming => State::Coming,
                wire::State::Durable => State::Durable,
                wire::State::Unspecified => return Err("an entry has no state"),
            },
            version: Version {
                stamp: Timestamp(entry.stamp),
                tie: entry.tie,
            },
            bytes: entry.bytes,
            layers: u16::try_from(entry.layers).unwrap_or(u16::MAX),
            fence: entry.fence,
        })
    });
    let caches = report.put.iter().filter(|entry| !entry.key.is_empty());
    Ok(Report {
        put: put.collect::<Result<_, _>>()?,
        caches: caches.map(cache).collect::<Result<_, _>>()?,
        drop: report
            .drop
            .iter()
            .map(|name| name_hash(name))
            .collect::<Result<_, _>>()?,
        complete: report.complete,
    })
}

/// The order that a node loses a name.
pub(super) fn supersede(order: &Supersede) -> wire::ToNode {
    let superseded = wire::Superseded {
        name: order.name.0.to_vec(),
        stamp: order.version.stamp.0,
        tie: order.version.tie,
        fence: order.fence,
        tenant: String::new(),
        reference: String::new(),
    };
    to_node(wire::to_node::Kind::Superseded(superseded))
}

/// The name and the version of such an order. The name is whole after a rollback.
pub(super) fn superseded(
    order: &wire::Superseded,
) -> Result<(NameHash, Version, Option<Name>), &'static str> {
    let version = Version {
        stamp: Timestamp(order.stamp),
        tie: order.tie,
    };
    let whole = (!order.reference.is_empty()).then(|| {
        let whole = name(&order.tenant, &order.reference);
        whole.ok_or("the name of an order is malformed")
    });
    Ok((name_hash(&order.name)?, version, whole.transpose()?))
}

/// What a namespace uses on this node.
pub(super) fn usage(tenant: &Tenant, usage: &NamespaceUsage) -> wire::Usage {
    let unused = usage.unused.iter().map(|bucket| wire::Bucket {
        last_used_before: bucket.last_used_before.0,
        bytes: bucket.bytes,
        artifacts: bucket.artifacts,
    });
    wire::Usage {
        tenant: tenant.to_string(),
        bytes: usage.bytes,
        artifacts: usage.artifacts,
        oldest: usage.oldest.0,
        unused: unused.collect(),
        fence: usage.fence,
    }
}

/// What a namespace uses on a node, as it was received. The error names the field.
pub(super) fn received_usage(usage: &wire::Usage) -> Result<(Tenant, NamespaceUsage), String> {
    let tenant = tenant(&usage.tenant)?;
    let unused = usage.unused.iter().map(|bucket| Bucket {
        last_used_before: Timestamp(bucket.last_used_before),
        bytes: bucket.bytes,
        artifacts: bucket.artifacts,
    });
    let unused: Vec<Bucket> = unused.collect();
    let is_sorted = unused.is_sorted_by_key(|bucket| bucket.last_used_before);
    if !is_sorted || unused.len() > MAX_BUCKETS {
        return Err("unused: too many buckets, or in the wrong order".to_owned());
    }
    let sum = |of: fn(&Bucket) -> u64| unused.iter().map(of).try_fold(0, u64::checked_add);
    let fits = |sum: Option<u64>, all: u64| sum.is_some_and(|sum| sum <= all);
    if !fits(sum(|it| it.bytes), usage.bytes) || !fits(sum(|it| it.artifacts), usage.artifacts) {
        return Err("unused: more than there is".to_owned());
    }
    let usage = NamespaceUsage {
        bytes: usage.bytes,
        artifacts: usage.artifacts,
        unused,
        oldest: Timestamp(usage.oldest),
        fence: applied(usage.fence)?,
    };
    Ok((tenant, usage))
}

/// The order to evict content of a namespace.
pub(super) fn cut_off(tenant: &Tenant, cut: &CutOff) -> wire::ToNode {
    to_node(wire::to_node::Kind::CutOff(wire::CutOff {
        tenant: tenant.to_string(),
        unused_before: cut.unused_before.0,
        caches_before: cut.task_caches_before.min(cut.resource_caches_before).0,
        outputs_before: cut.outputs_before.0,
        task_caches_before: cut.task_caches_before.0,
        resource_caches_before: cut.resource_caches_before.0,
    }))
}

/// The namespace and the points in time of such an order. The error names the field.
pub(super) fn received_cut_off(cut: &wire::CutOff) -> Result<(Tenant, CutOff), String> {
    let tenant = tenant(&cut.tenant)?;
    // An older controller tells one time for both kinds of caches.
    let caches = |before: u64| Timestamp(before.max(cut.caches_before));
    let cut = CutOff {
        unused_before: Timestamp(cut.unused_before),
        task_caches_before: caches(cut.task_caches_before),
        resource_caches_before: caches(cut.resource_caches_before),
        outputs_before: Timestamp(cut.outputs_before),
        over_budget: false,
    };
    Ok((tenant, cut))
}

/// A fence, from either side to the other.
pub(super) fn fence(fence: &Fence) -> wire::Fence {
    let (of, key, prefix) = match &fence.covers {
        Coverage::Namespace(_) => (wire::Kind::Unspecified, String::new(), false),
        Coverage::Name(Name { reference, .. }) => {
            (kind(reference.kind()), reference.key().to_owned(), false)
        }
        Coverage::Prefix {
            kind: of, prefix, ..
        } => (kind((*of).into()), prefix.to_string(), true),
    };
    wire::Fence {
        number: fence.number,
        previous: fence.previous,
        id: fence.id,
        tenant: fence.covers.tenant().to_string(),
        kind: of.into(),
        key,
        prefix,
        repeats: fence.repeats.clone(),
    }
}

/// A fence that was received. The error names the field.
pub(super) fn received_fence(fence: &wire::Fence) -> Result<Fence, String> {
    let tenant = tenant(&fence.tenant)?;
    let covers = match (received_kind(fence.kind()), fence.prefix) {
        // Also a kind of a later version, which this one cannot clear.
        (None, _) if fence.kind != 0 => {
            return Err(format!("kind: {} is not known", fence.kind));
        }
        (None, _) => Coverage::Namespace(tenant),
        // The API server counts characters, and keeps no longer one.
        (Some(_), true) if fence.key.chars().count() > CacheKey::MAX_LEN => {
            return Err("prefix: it is too long".to_owned());
        }
        (Some(of), true) => Coverage::Prefix {
            tenant,
            kind: of.cache().ok_or("prefix: only of caches")?,
            prefix: fence.key.as_str().into(),
        },
        (Some(of), false) => {
            let reference = Reference::new(of, &fence.key);
            let reference = reference.map_err(|error| format!("key: {error}"))?;
            Coverage::Name(Name { tenant, reference })
        }
    };
    if fence.number == 0 || fence.number > MOST_FENCE || fence.previous >= fence.number {
        return Err("number: it does not follow its predecessor".to_owned());
    }
    Ok(Fence {
        number: fence.number,
        previous: fence.previous,
        id: fence.id,
        covers,
        repeats: fence.repeats.clone(),
    })
}

/// The newest fences of a node that have room in so many bytes, and the highest number of the
/// others; 0: there are no others.
pub(super) fn newest_fences(fences: &Fences, most: usize) -> (Vec<wire::Fence>, u64) {
    let mut all: Vec<&Fence> = fences.all().collect();
    all.sort_by_key(|fence| Reverse(fence.number));
    let (mut told, mut bytes) = (Vec::new(), 0);
    for one in all {
        let message = fence(one);
        bytes += message.encoded_len() + OF_ONE;
        if bytes > most {
            return (told, one.number);
        }
        told.push(message);
    }
    (told, 0)
}

/// The fences of a node that says Hello.
pub(super) fn fences_of(hello: &wire::Hello) -> Result<Fences, String> {
    let mut fences = Fences::default();
    for fence in &hello.fences {
        let fence = received_fence(fence).map_err(|why| format!("fences: {why}"))?;
        fences.insert(fence);
    }
    fences.forget(applied(hello.omitted)?);
    fences.note_applied(applied(hello.applied)?);
    Ok(fences)
}

/// The number of a fence that a node has applied.
pub(super) fn applied(number: u64) -> Result<u64, String> {
    if number > MOST_FENCE {
        return Err(format!("{number} is the number of no fence"));
    }
    Ok(number)
}

pub(super) fn to_node(kind: wire::to_node::Kind) -> wire::ToNode {
    wire::ToNode { kind: Some(kind) }
}

pub(super) fn from_node(kind: wire::from_node::Kind) -> wire::FromNode {
    wire::FromNode { kind: Some(kind) }
}

pub(super) fn reference(kind: wire::Kind, key: &str) -> Result<Reference, String> {
    let kind = received_kind(kind).ok_or("its kind is missing")?;
    Reference::new(kind, key).map_err(|error| error.to_string())
}

/// A failed call, for the log.
pub(super) fn say(status: &tonic::Status) -> String {
    let code = crate::server::code_name(status.code());
    format!("{code}: {}", crate::sys::printable(status.message()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::NamedContent;

    use super::super::limits::{MOST_HELLO, MOST_MESSAGE, MOST_TOLD, SENT_ENTRIES};
    use crate::model::{CacheKind, Maker, Pod};

    fn name(reference: &str) -> Name {
        Name {
            tenant: "ci".parse().expect("a label"),
            reference: reference.parse().expect("a reference"),
        }
    }

    fn content() -> NameState {
        NameState::Durable(NamedContent {
            artifact: ArtifactId::from_bits(7 << 96 | 1),
            created: Timestamp(1_795_400_000_000),
            bytes: 100,
            layers: 2,
            fence: 9,
            used: Timestamp(1_795_400_000_700),
            made_by: Some(Box::new(Maker::new(
                Pod {
                    uid: "u".parse().expect("a uid"),
                    name: "unit-tests-7".to_owned(),
                    service_account: Some("builder".to_owned()),
                },
                Vec::new(),
                NodeId::new("node-1").ok(),
            ))),
        })
    }

    #[test]
    fn a_task_cache_arrives_with_its_author_and_last_use_and_what_is_no_name_is_left_out() {
        let sent = entry(&name("task-cache/b"), &content());
        let told = cache(&sent).expect("it is valid");
        let author = told.author.expect("it is known");
        assert_eq!(told.tie, 7);
        assert_eq!(author.account.as_deref(), Some("builder"));
        assert_eq!(&*author.pod, "unit-tests-7");
        assert_eq!(author.node.as_deref(), Some("node-1"));
        assert_eq!(told.used, Timestamp(1_795_400_000_700));
        // Who writes outputs is told to no other machine.
        let output = entry(&name("artifact/a"), &content());
        assert_eq!((output.used, &*output.pod), (0, ""));
        let odd = |account: &str, pod: &str| {
            let odd = wire::Entry {
                service_account: account.to_owned(),
                pod: pod.to_owned(),
                ..sent.clone()
            };
            cache(&odd).expect("it is valid").author
        };
        assert_eq!(odd("a", "x\u{1b}[2J"), None);
        assert_eq!(odd("a", &"x".repeat(254)), None);
        assert_eq!(odd("A B", "pod").expect("a pod").account, None);
    }

    #[test]
    fn a_report_fits_in_a_message_whatever_the_text_in_records() {
        let name = Name {
            tenant: "t".repeat(63).parse().expect("a label"),
            reference: format!("task-cache/{}", "k".repeat(CacheKey::MAX_LEN))
                .parse()
                .expect("a reference"),
        };
        for bytes in [253, 1 << 20] {
            let NameState::Durable(mut content) = content() else {
                panic!("content");
            };
            let maker = content.made_by.as_mut().expect("it is known");
            maker.pod.name = "p".repeat(bytes);
            maker.pod.service_account = Some("a".repeat(bytes));
            maker.node = NodeId::new("n".repeat(256)).ok();
            let entry = entry(&name, &NameState::Durable(content));
            assert_eq!(entry.pod.len(), if bytes == 253 { 253 } else { 0 });
            let report = wire::Report {
                put: vec![entry; SENT_ENTRIES],
                ..wire::Report::default()
            };
            assert!(report.encoded_len() < MOST_MESSAGE, "{bytes}");
        }
    }

    #[test]
    fn a_report_arrives_as_it_was_sent() {
        for reference in ["artifact/a", "task-cache/b", "resource-cache/c"] {
            let name = name(reference);
            let sent = wire::Report {
                put: vec![
                    entry(&name, &content()),
                    entry(&name, &NameState::Coming { fence: 3 }),
                ],
                drop: vec![NameHash::of(&name).0.to_vec()],
                complete: true,
            };
            let report = report(&sent).expect("it is valid");
            let [put, coming] = report.put[..] else {
                panic!("two entries");
            };
            assert_eq!(put.name, NameHash::of(&name));
            assert_eq!(put.kind, name.reference.kind());
            assert_eq!(put.version.stamp, Timestamp(1_795_400_000_000));
            assert_eq!((put.version.tie, put.bytes, put.layers), (7, 100, 2));
            assert_eq!((put.state, put.fence), (State::Durable, 9));
            let of_cache = name.reference.cache().map(|_| name.clone());
            let told = report.caches.first().map(|told| &told.name);
            assert_eq!(told, of_cache.as_ref());
            let expected = (put.name, put.kind, State::Coming);
            assert_eq!((coming.name, coming.kind, coming.state), expected);
            assert_eq!((report.drop, report.complete), (vec![put.name], true));
        }
    }

    #[test]
    fn a_fence_arrives_as_it_was_sent_and_others_are_refused() {
        let tenant: crate::model::Tenant = "ci".parse().expect("a label");
        let prefix = |kind, prefix: &str| Coverage::Prefix {
            tenant: tenant.clone(),
            kind,
            prefix: prefix.into(),
        };
        for covers in [
            Coverage::Namespace(tenant.clone()),
            Coverage::Name(name("artifact/a")),
            Coverage::Name(name("task-cache/b/c")),
            Coverage::Name(name("resource-cache/b")),
            prefix(CacheKind::Task, ""),
            prefix(CacheKind::Resource, "pr-"),
        ] {
            let sent = Fence {
                number: 9,
                previous: 5,
                id: 77,
                covers,
                repeats: vec![3, 4],
            };
            assert_eq!(received_fence(&fence(&sent)), Ok(sent));
        }
        let good = fence(&Fence {
            number: 9,
            previous: 5,
            id: 77,
            covers: Coverage::Name(name("artifact/a")),
            repeats: Vec::new(),
        });
        let wrong = |change: fn(&mut wire::Fence)| {
            let mut fence = good.clone();
            change(&mut fence);
            received_fence(&fence).expect_err("it is refused");
            let hello = wire::Hello {
                fences: vec![fence],
                ..wire::Hello::default()
            };
            fences_of(&hello).expect_err("it is refused");
        };
        wrong(|fence| fence.kind = 9);
        wrong(|fence| fence.prefix = true);
        wrong(|fence| {
            fence.kind = wire::Kind::TaskCache.into();
            (fence.key, fence.prefix) = ("x".repeat(257), true);
        });
        wrong(|fence| fence.key = "A_B".to_owned());
        wrong(|fence| fence.tenant = String::new());
        wrong(|fence| fence.number = 5);
        wrong(|fence| fence.number = MOST_FENCE + 1);
        let hello = wire::Hello {
            applied: 12,
            fences: vec![good],
            ..wire::Hello::default()
        };
        let fences = fences_of(&hello).expect("it is valid");
        assert_eq!((fences.newest(), fences.all().count()), (12, 1));
        applied(u64::MAX).expect_err("it is refused");
    }

    #[test]
    fn hello_has_room_however_many_fences_there_are_and_those_left_out_are_not_repeated() {
        let mut chain = Fences::default();
        for number in 1..=20_000 {
            chain.insert(Fence {
                number,
                previous: number - 1,
                id: u64::MAX - number,
                covers: Coverage::Prefix {
                    tenant: "x".repeat(63).parse().expect("a label"),
                    kind: CacheKind::Task,
                    // The longest one that the API server keeps.
                    prefix: "\u{1f600}".repeat(256).into(),
                },
                repeats: Vec::new(),
            });
        }
        let (fences, omitted) = newest_fences(&chain, MOST_TOLD);
        assert_eq!(omitted + fences.len() as u64, 20_000);
        let hello = wire::Hello {
            node: "x".repeat(253),
            fences,
            applied: 20_000,
            omitted,
            ..wire::Hello::default()
        };
        let size = from_node(wire::from_node::Kind::Hello(hello.clone())).encoded_len();
        assert!(
            (MOST_TOLD - MOST_MESSAGE..MOST_HELLO).contains(&size),
            "{size}"
        );
        let told = fences_of(&hello).expect("it is valid");
        assert_eq!(told.newest(), 20_000);
        assert_eq!(chain.owed_to(&told), []);
        // What is told still restores a chain that was set back.
        let mut older = chain.clone();
        older.forget(19_998);
        assert_eq!(Fences::default().owed_to(&older)[0].repeats.len(), 2);
        let few = newest_fences(&older, MOST_TOLD);
        assert_eq!((few.0.len(), few.1), (2, 0));
    }

    #[test]
    fn what_a_namespace_uses_and_must_evict_arrives_as_it_was_sent() {
        let tenant: Tenant = "ci".parse().expect("a label");
        let bucket = |time, bytes| Bucket {
            last_used_before: Timestamp(time),
            bytes,
            artifacts: 1,
        };
        let sent = NamespaceUsage {
            bytes: 100,
            artifacts: 3,
            unused: vec![bucket(5, 40), bucket(7, 60)],
            oldest: Timestamp(4),
            fence: 9,
        };
        let good = usage(&tenant, &sent);
        assert_eq!(received_usage(&good), Ok((tenant.clone(), sent)));
        let wrong = |change: fn(&mut wire::Usage)| {
            let mut usage = good.clone();
            change(&mut usage);
            received_usage(&usage).expect_err("it is refused");
        };
        wrong(|usage| usage.tenant = "A/B".to_owned());
        wrong(|usage| usage.bytes = 99);
        wrong(|usage| usage.artifacts = 1);
        wrong(|usage| usage.unused.reverse());
        wrong(|usage| usage.unused[0].bytes = u64::MAX);
        wrong(|usage| usage.unused = vec![wire::Bucket::default(); MAX_BUCKETS + 1]);
        wrong(|usage| usage.fence = u64::MAX);

        let cut = CutOff {
            unused_before: Timestamp(1),
            task_caches_before: Timestamp(2),
            resource_caches_before: Timestamp(4),
            outputs_before: Timestamp(3),
            over_budget: false,
        };
        let Some(wire::to_node::Kind::CutOff(sent)) = cut_off(&tenant, &cut).kind else {
            panic!("a cut-off");
        };
        assert_eq!(received_cut_off(&sent), Ok((tenant.clone(), cut)));
        // An older node evicts nothing that may stay.
        assert_eq!(sent.caches_before, 2);
        let of_older = wire::CutOff {
            task_caches_before: 0,
            resource_caches_before: 0,
            ..sent
        };
        let of_older = received_cut_off(&of_older);
        let both = CutOff {
            resource_caches_before: Timestamp(2),
            ..cut
        };
        assert_eq!(of_older, Ok((tenant, both)));
        received_cut_off(&wire::CutOff::default()).expect_err("it is refused");
    }

    #[test]
    fn what_is_malformed_is_refused() {
        let good = entry(&name("artifact/a"), &content());
        let wrong = |change: fn(&mut wire::Entry)| {
            let mut entry = good.clone();
            change(&mut entry);
            let put = vec![entry];
            report(&wire::Report {
                put,
                ..wire::Report::default()
            })
            .expect_err("it is refused")
        };
        wrong(|entry| entry.kind = 0);
        wrong(|entry| entry.state = 9);
        wrong(|entry| entry.name.truncate(15));
        wrong(|entry| entry.key = "a".to_owned());
        wrong(|entry| {
            *entry = super::entry(&name("task-cache/b"), &NameState::Coming { fence: 3 });
            entry.key = "c".to_owned();
        });
        let short = wire::Report {
            drop: vec![vec![0; 17]],
            ..wire::Report::default()
        };
        report(&short).expect_err("it is refused");
    }
}
