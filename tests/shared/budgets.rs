//! The budget of a namespace on real objects: which names go, what readers and writers meet
//! meanwhile, and a collector that ends at any of its writes.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use baggageclaim::model::{Coverage, Fence, Fences, Name, Tenant, Timestamp};
use baggageclaim::shared::{
    Budget, Collected, Collector, Error, Found, LayerRef, NameState, Publication, Resolved, Result,
    Source as _, Store, TierUse, list, usage,
};

use crate::collect::{HOUR, age, now};
use crate::common::{Fs, Lab, require_lab};
use crate::failing::{Fault, Op};
use crate::tier::{Held, Tier, bucket, commit, down, hold, id, never, reference, small_parts};

const NAMES: usize = 12;
const CONTENT: usize = 20 << 10;

fn tenant(name: &str) -> Tenant {
    name.parse().expect("a label")
}

/// A layer that does not compress.
fn held(lab: &Lab, number: usize) -> Held {
    let dir = lab.dir(&format!("layer-{}", id()));
    let mut random = crate::common::random::Random::new(number as u64 + 1);
    let byte = |_| u8::try_from(random.below(256)).expect("below 256");
    let bytes: Vec<u8> = (0..CONTENT).map(byte).collect();
    fs::write(dir.join("file"), bytes).expect("write");
    hold(lab, &dir)
}

/// Commits a layer under a name.
fn publish(store: &Store, of: &Tenant, name: &str, held: &Held) -> LayerRef {
    let publication = Publication::begin(store, of, id()).expect("begin");
    let layer = publication.layer((&held.table, &held.holder), small_parts(), &never);
    let layer = layer.expect("upload");
    let commit = commit(name, vec![layer]);
    publication.commit(commit, now()).expect("commit");
    layer
}

/// Commits a layer that is in the tier already under a name.
fn show(store: &Store, of: &Tenant, name: &str, layer: LayerRef) {
    let publication = Publication::begin(store, of, id()).expect("begin");
    let commit = commit(name, vec![layer]);
    publication.commit(commit, now()).expect("commit");
}

fn key(number: usize) -> String {
    format!("task-cache/k{number:02}")
}

/// Sets the time at which the storage wrote each name's record: the first is the oldest, and none
/// is recent.
fn order(tier: &Tier, of: &Tenant, names: usize) {
    for number in 0..names {
        let path = format!("v1/{of}/names/{}", key(number));
        let file = File::options().append(true).open(tier.files.join(path));
        let hours = u32::try_from(names - number).expect("small") + 1;
        let file = file.expect("open");
        file.set_modified(SystemTime::now() - HOUR * hours)
            .expect("utimes");
    }
}

fn budget(bytes: u64) -> Budget {
    Budget {
        bytes: Some(bytes),
        artifacts: None,
    }
}

fn collect(store: &Store, of: &Tenant, budget: Budget, at: Timestamp) -> Result<Collected> {
    let collector = Collector {
        budget: Some(budget),
        ..Collector::new(store, of, id())
    };
    collector.run(at, &never)
}

fn kept(collected: &Collected) -> TierUse {
    collected.kept.expect("there is a budget")
}

/// The names that show content.
fn shown(store: &Store, of: &Tenant) -> BTreeSet<String> {
    let (names, damage) = list(store, of).expect("list");
    assert!(damage.is_empty(), "{damage:?}");
    let names = names.into_iter().map(|name| name.record);
    let names = names.filter(|record| record.content().is_some());
    names.map(|record| record.reference.to_string()).collect()
}

fn keys(numbers: std::ops::Range<usize>) -> BTreeSet<String> {
    numbers.map(key).collect()
}

fn found(store: &Store, of: &Tenant, name: &str) -> Found {
    let resolved = bucket(store).resolve(of, &reference(name), None);
    match resolved.expect("resolve") {
        Resolved::Found(found) => *found,
        other => panic!("{name}: {other:?}"),
    }
}

/// Fetches a layer. The helper of the other tests asks for the tenant `ci`.
fn fetches(lab: &Lab, store: &Store, layer: &LayerRef) -> Result<()> {
    let into = lab.dir(&format!("down-{}", id()));
    down(lab, &[&bucket(store)], layer, &into)?;
    let bytes = fs::metadata(into.join("fs/file")).expect("stat").len();
    assert_eq!(bytes, CONTENT as u64);
    Ok(())
}

#[test]
fn names_that_nodes_use_stay_although_they_were_written_first() {
    let lab = require_lab!(Fs::Ext4);
    let tier = Tier::file();
    let (store, ci) = (&tier.store, tenant("ci"));
    for number in 0..4 {
        publish(store, &ci, &key(number), &held(&lab, number));
    }
    order(&tier, &ci, 4);
    let two = Budget {
        bytes: None,
        artifacts: Some(2),
    };
    let used = |number: usize, ago: Duration| (reference(&key(number)), ago);
    let collector = Collector {
        budget: Some(two),
        // An older use than its write, and a name that is not in the tier.
        uses: [used(0, HOUR), used(3, HOUR * 9), used(7, HOUR)].into(),
        ..Collector::new(store, &ci, id())
    };
    let done = collector.run(now(), &never).expect("collect");
    assert_eq!(done.evicted, 2);
    assert_eq!(shown(store, &ci), [key(0), key(3)].into());
}

#[test]
fn a_name_that_a_fence_cleared_takes_no_part_of_the_budget() {
    let lab = require_lab!(Fs::Ext4);
    let tier = Tier::file();
    let (store, ci) = (&tier.store, tenant("ci"));
    for number in 0..2 {
        publish(store, &ci, &key(number), &held(&lab, number));
    }
    order(&tier, &ci, 2);
    let mut fences = Fences::default();
    fences.insert(Fence {
        number: 1,
        previous: 0,
        id: 7,
        covers: Coverage::Name(Name {
            tenant: ci.clone(),
            reference: reference(&key(1)),
        }),
        repeats: Vec::new(),
    });
    for dry_run in [true, false] {
        let collector = Collector {
            dry_run,
            fences: fences.clone(),
            budget: Some(Budget {
                bytes: None,
                artifacts: Some(1),
            }),
            ..Collector::new(store, &ci, id())
        };
        let done = collector.run(now(), &never).expect("collect");
        assert_eq!((done.expired, done.evicted), (1, 0), "dry run: {dry_run}");
        assert_eq!(kept(&done).artifacts, 1);
    }
    assert_eq!(shown(store, &ci), keys(0..1));
}

#[test]
fn a_namespace_over_its_budget_by_half_loses_what_was_written_first() {
    let lab = require_lab!(Fs::Ext4);
    for tier in Tier::both() {
        let (ci, other, store) = (tenant("ci"), tenant("other"), &tier.store);
        let held: Vec<Held> = (0..NAMES).map(|number| held(&lab, number)).collect();
        let layers: Vec<LayerRef> = held
            .iter()
            .enumerate()
            .map(|(number, held)| publish(store, &ci, &key(number), held))
            .collect();
        for (number, held) in held.iter().enumerate() {
            publish(store, &other, &key(number), held);
        }
        order(&tier, &ci, NAMES);
        order(&tier, &other, NAMES);
        let others = list(store, &other).expect("list").0;
        let whole: u64 = layers.iter().map(|layer| layer.bytes).sum();
        let limit = budget(whole * 2 / 3);
        let before: Vec<Found> = (0..NAMES)
            .map(|number| found(store, &ci, &key(number)))
            .collect();

        let dry = Collector {
            budget: Some(limit),
            dry_run: true,
            ..Collector::new(store, &ci, id())
        };
        let would = dry.run(now(), &never).expect("collect");
        assert_eq!(shown(store, &ci), keys(0..NAMES));
        let done = collect(store, &ci, limit, now()).expect("collect");
        assert_eq!((would.evicted, would.kept), (done.evicted, done.kept));
        let gone = usize::try_from(done.evicted).expect("small");
        // All of the evicted bytes were written before all others.
        assert_eq!(shown(store, &ci), keys(gone..NAMES));
        let left: u64 = layers[gone..].iter().map(|layer| layer.bytes).sum();
        assert_eq!(kept(&done).bytes, left);
        assert_eq!(kept(&done).artifacts, (NAMES - gone) as u64);
        assert!(!kept(&done).over_budget);
        // The step of one name at most goes beyond 95 %.
        assert!(
            left <= whole * 2 / 3 * 95 / 100 && left > whole / 2,
            "{left} of {whole}"
        );

        for (number, before) in before.iter().enumerate() {
            let resolved = bucket(store).resolve(&ci, &reference(&key(number)), None);
            let resolved = resolved.expect("resolve");
            let is_evicted = matches!(resolved, Resolved::Nothing { evicted: true, .. });
            assert_eq!(is_evicted, number < gone, "{resolved:?}");
            // A reader that asked before goes on.
            let layer = before.manifest.layers[0];
            fetches(&lab, store, &layer).expect("fetch");
        }
        // Another namespace, and the same one again.
        let again = collect(store, &ci, limit, now()).expect("collect");
        assert_eq!((again.evicted, kept(&again).bytes), (0, left));
        let unlimited = collect(store, &other, Budget::default(), now()).expect("collect");
        assert_eq!((unlimited.evicted, kept(&unlimited).bytes), (0, whole));
        let records = |names: &[baggageclaim::shared::Listed]| -> Vec<String> {
            names
                .iter()
                .map(|name| format!("{:?}", name.record))
                .collect()
        };
        let others_now = list(store, &other).expect("list").0;
        assert_eq!(records(&others_now), records(&others));

        // A commit brings a name back.
        publish(store, &ci, &key(0), &held[0]);
        fetches(&lab, store, &found(store, &ci, &key(0)).manifest.layers[0]).expect("fetch");
        the_space_is_free_later(&lab, &tier, limit, &before[1]);
    }
}

/// Days later the objects are gone, and a reader that is as slow misses cleanly.
fn the_space_is_free_later(lab: &Lab, tier: &Tier, limit: Budget, reader: &Found) {
    let (ci, store) = (tenant("ci"), &tier.store);
    for _ in 0..6 {
        age(tier, 25 * HOUR);
        collect(store, &ci, limit, now()).expect("collect");
    }
    let left = usage(store, &ci, &never).expect("usage");
    assert!(Some(left.bytes) <= limit.bytes, "{left:?}");
    let error = fetches(lab, store, &reader.manifest.layers[0]).expect_err("it is gone");
    assert!(matches!(error, Error::Missing { .. }), "{error:?}");
    for name in shown(store, &ci) {
        let layer = found(store, &ci, &name).manifest.layers[0];
        fetches(lab, store, &layer).expect("fetch");
    }
    // The record of an evicted name stays for 30 days, so that nodes do not upload it again.
    age(tier, 20 * 24 * HOUR);
    let records = |tier: &Tier| list(&tier.store, &ci).expect("list").0.len();
    let before = records(tier);
    collect(store, &ci, limit, now()).expect("collect");
    assert_eq!(records(tier), before);
    age(tier, 10 * 24 * HOUR);
    let done = collect(store, &ci, limit, now()).expect("collect");
    assert!(done.deleted_names > 0);
    assert_eq!(shown(store, &ci).len(), records(tier));
}

#[test]
fn recent_content_and_a_shared_layer_stay() {
    let lab = require_lab!(Fs::Ext4);
    let tier = Tier::file();
    let (ci, store) = (tenant("ci"), &tier.store);
    let layer = publish(store, &ci, &key(0), &held(&lab, 0));
    show(store, &ci, &key(1), layer);
    let done = collect(store, &ci, budget(0), now()).expect("collect");
    assert_eq!(done.evicted, 0, "both are recent");
    assert!(kept(&done).over_budget);
    assert_eq!(kept(&done).bytes, layer.bytes, "it counts once");
    order(&tier, &ci, 1);
    let one = Budget {
        bytes: None,
        artifacts: Some(1),
    };
    let done = collect(store, &ci, one, now()).expect("collect");
    assert_eq!((done.evicted, shown(store, &ci)), (1, keys(1..2)));
    assert_eq!(kept(&done).bytes, layer.bytes);
    age(&tier, 60 * HOUR);
    collect(store, &ci, one, now()).expect("collect");
    age(&tier, 60 * HOUR);
    collect(store, &ci, one, now()).expect("collect");
    fetches(&lab, store, &layer).expect("the other name shows it");
    // A cleared name stays cleared.
    let cleared = baggageclaim::shared::clear(store, &ci, &reference(&key(1)), 0, id(), now());
    let cleared = cleared.expect("clear");
    show_after_clear(store, &ci, &key(1), layer, cleared);
    age(&tier, 2 * HOUR);
    let done = collect(store, &ci, budget(0), now()).expect("collect");
    assert_eq!(done.evicted, 1);
    let record = baggageclaim::shared::look(store, &ci, &reference(&key(1)));
    let record = record.expect("look").expect("a record");
    assert_eq!(
        (record.cleared, record.state),
        (cleared, NameState::Expired)
    );
}

fn show_after_clear(store: &Store, of: &Tenant, name: &str, layer: LayerRef, base: u64) {
    let publication = Publication::begin(store, of, id()).expect("begin");
    let mut commit = commit(name, vec![layer]);
    commit.writer.base = Some(base);
    publication.commit(commit, now()).expect("commit");
}

#[test]
fn a_collector_that_ends_at_any_eviction_leaves_the_rest_to_the_next() {
    let lab = require_lab!(Fs::Ext4);
    let Some(tier) = Tier::s3() else { return };
    let held = held(&lab, 0);
    let after_lease = Timestamp(now().0 + 3 * 3_600_000);
    for (case, fault) in [Fault::Status(500), Fault::LostAnswer]
        .into_iter()
        .enumerate()
    {
        for ends_at in 0..3_u64 {
            let of = tenant(&format!("ci-{case}-{ends_at}"));
            let layer = publish(&tier.store, &of, &key(0), &held);
            for number in 1..6 {
                let layer = LayerRef {
                    upload: id(),
                    ..layer
                };
                show(&tier.store, &of, &key(number), layer);
            }
            order(&tier, &of, 6);
            let evictions = AtomicU64::new(0);
            let (dies, _) = tier.failing(move |op, path| {
                // It cannot give its lease back.
                if op == Op::Replace && path.ends_with("/gc") {
                    return Fault::Status(500);
                }
                let is_eviction = op == Op::Replace && path.contains("/names/");
                if is_eviction && evictions.fetch_add(1, Ordering::SeqCst) == ends_at {
                    return fault;
                }
                Fault::None
            });
            // Three of six must go.
            let limit = budget(layer.bytes * 7 / 2);
            let error = collect(&dies, &of, limit, now()).expect_err("it ends");
            assert!(matches!(error, Error::Away { .. }), "{error:?}");
            let done = usize::try_from(ends_at).expect("small");
            let lost = usize::from(fault == Fault::LostAnswer);
            assert_eq!(shown(&tier.store, &of), keys(done + lost..6));
            // Its lease is over later.
            let leased = collect(&tier.store, &of, limit, now());
            assert!(matches!(leased, Err(Error::Leased { .. })), "{leased:?}");
            let rest = collect(&tier.store, &of, limit, after_lease).expect("collect");
            assert_eq!(rest.evicted, (3 - done - lost) as u64);
            assert_eq!(shown(&tier.store, &of), keys(3..6));
            assert!(!kept(&rest).over_budget);
        }
    }
}

#[test]
fn a_commit_between_the_list_and_the_eviction_stays() {
    let lab = require_lab!(Fs::Ext4);
    let Some(tier) = Tier::s3() else { return };
    let ci = tenant("ci");
    let layer = publish(&tier.store, &ci, &key(0), &held(&lab, 0));
    for number in 1..4 {
        let layer = LayerRef {
            upload: id(),
            ..layer
        };
        show(&tier.store, &ci, &key(number), layer);
    }
    order(&tier, &ci, 4);
    let (store, of) = (tier.store.clone(), ci.clone());
    let (asked, first) = (AtomicU64::new(0), AtomicBool::new(true));
    let (raced, _) = tier.failing(move |op, path| {
        // The collector has read both before. The second read of the first name sees the new
        // commit; the write over the second one meets it. The first read of the third one sees it,
        // after the list told the age of an older record.
        let reads = path.ends_with("k00") && op == Op::Get;
        let is_second_read = reads && asked.fetch_add(1, Ordering::SeqCst) == 1;
        let name = match op {
            Op::Get if is_second_read => key(0),
            Op::Replace if path.ends_with("k01") => key(1),
            Op::Get if path.ends_with("k02") && first.swap(false, Ordering::SeqCst) => key(2),
            _ => return Fault::None,
        };
        std::thread::scope(|scope| {
            scope.spawn(|| show(&store, &of, &name, layer));
        });
        Fault::None
    });
    let done = collect(&raced, &ci, budget(0), now()).expect("collect");
    assert_eq!(done.evicted, 1);
    assert_eq!(shown(&tier.store, &ci), keys(0..3));
    let is_new = |number| found(&tier.store, &ci, &key(number)).manifest.layers[0] == layer;
    assert!((0..3).all(is_new));
    fetches(&lab, &tier.store, &layer).expect("fetch");
}

#[test]
fn nodes_publish_while_two_collectors_keep_a_budget() {
    let lab = require_lab!(Fs::Ext4);
    let tier = Tier::file();
    let (ci, store) = (tenant("ci"), &tier.store);
    let held = [held(&lab, 0), held(&lab, 1)];
    let layer = publish(store, &ci, &key(0), &held[0]);
    for number in 1..30 {
        let layer = LayerRef {
            upload: id(),
            ..layer
        };
        show(store, &ci, &key(number), layer);
    }
    order(&tier, &ci, 30);
    let limit = budget(layer.bytes * 20);
    // The second one takes each lease, as if it were over.
    let collector = |ahead: Duration| {
        let (mut evicted, ahead) = (0, u64::try_from(ahead.as_millis()).expect("soon"));
        for _ in 0..10 {
            match collect(&tier.store, &ci, limit, Timestamp(now().0 + ahead)) {
                Ok(done) => evicted += done.evicted,
                Err(Error::Leased { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
        evicted
    };
    // The oldest names are committed again meanwhile.
    let node = |held: &Held, name: String| {
        for _ in 0..10 {
            publish(&tier.store, &ci, &name, held);
        }
    };
    let evicted: u64 = std::thread::scope(|scope| {
        let collectors = [
            scope.spawn(|| collector(Duration::ZERO)),
            scope.spawn(|| collector(3 * HOUR)),
        ];
        for (number, held) in held.iter().enumerate() {
            scope.spawn(move || node(held, key(number)));
        }
        let collectors = collectors.into_iter();
        collectors.map(|it| it.join().expect("join")).sum()
    });
    let done = collect(store, &ci, limit, Timestamp(now().0 + 6 * 3_600_000)).expect("collect");
    assert!(!kept(&done).over_budget);
    // The two do not evict more than one would: 19 stay, or 20 if a commit came between, and each
    // of the two names that are committed again may have been evicted before.
    let shown = shown(store, &ci);
    let evicted = evicted + done.evicted;
    assert!((10..=13).contains(&evicted), "{evicted}");
    assert!((18..=20).contains(&shown.len()), "{shown:?}");
    for number in 0..2 {
        assert!(shown.contains(&key(number)), "it is recent");
        fetches(
            &lab,
            store,
            &found(store, &ci, &key(number)).manifest.layers[0],
        )
        .expect("fetch");
    }
}
