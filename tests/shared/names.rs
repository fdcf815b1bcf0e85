//! Names: two writers at once, first and last writer, clears, lost acknowledgements, races that
//! never end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use baggageclaim::model::{Sha256, Timestamp};
use baggageclaim::shared::{
    Committed, Error, LayerRef, ObjectId, Publication, Resolved, Source as _, Store, Times, clear,
    look,
};

use crate::failing::{Failing, Fault, Op};
use crate::server::Server;
use crate::tier::{NOW, TIMES, Tier, bucket, commit, id, reference, tenant};

/// A layer that no test here reads.
fn some_layer() -> LayerRef {
    LayerRef {
        digest: Sha256([3; 32]),
        upload: ObjectId::from_bits(1),
        bytes: 1000,
        tail: 100,
        content: 5,
        table: 600,
    }
}

fn write(store: &Store, name: &str, base: Option<u64>) -> Result<Committed, Error> {
    let publication = Publication::resume(store, &tenant(), id());
    let mut commit = commit(name, vec![some_layer()]);
    commit.writer.base = base;
    publication.commit(commit, NOW)
}

fn number(store: &Store, name: &str) -> u64 {
    let record = look(store, &tenant(), &reference(name)).expect("look");
    record.map_or(0, |record| record.number)
}

#[test]
fn two_nodes_commit_one_name_at_once() {
    const WRITERS: u64 = 6;
    for tier in Tier::both() {
        for name in ["task-cache/x", "resource-cache/x", "artifact/x"] {
            let results: Vec<Committed> = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..WRITERS)
                    .map(|_| scope.spawn(|| write(&tier.store, name, None).expect("commit")))
                    .collect();
                threads
                    .into_iter()
                    .map(|thread| thread.join().expect("join"))
                    .collect()
            });
            let mut numbers: Vec<u64> = results
                .iter()
                .filter_map(|it| match it {
                    Committed::Named(number) => Some(*number),
                    _ => None,
                })
                .collect();
            numbers.sort_unstable();
            if name.starts_with("resource") {
                assert_eq!(numbers.len(), 1, "{results:?}");
                let kept = results
                    .iter()
                    .filter(|it| **it == Committed::KeptFirst)
                    .count() as u64;
                assert_eq!(kept, WRITERS - 1);
            } else {
                // No write was lost: each one has a number of its own.
                let expected: Vec<u64> = (0..WRITERS).map(|more| NOW.0 + more).collect();
                assert_eq!(numbers, expected);
            }
            assert_eq!(number(&tier.store, name), numbers[numbers.len() - 1]);
        }
    }
}

#[test]
fn what_was_cleared_does_not_come_back() {
    for tier in Tier::both() {
        for name in ["task-cache/x", "resource-cache/x"] {
            let store = &tier.store;
            write(store, name, Some(0)).expect("commit");
            let before = number(store, name);
            let cleared = clear(store, &tenant(), &reference(name), 0, id(), NOW).expect("clear");
            assert!(cleared > before + 1, "a fork may follow the next number");
            let nothing = bucket(store).resolve(&tenant(), &reference(name), None);
            assert!(
                matches!(nothing.expect("resolve"), Resolved::Nothing { number, cleared: last, .. } if number == cleared && last == cleared)
            );
            for base in [None, Some(0), Some(before)] {
                assert_eq!(
                    write(store, name, base).expect("decide"),
                    Committed::Cleared
                );
            }
            let written = write(store, name, Some(cleared)).expect("commit");
            assert_eq!(written, Committed::Named(cleared + 1));
            // Nor after that.
            let late = write(store, name, Some(before)).expect("decide");
            assert!(
                matches!(late, Committed::Cleared | Committed::KeptFirst),
                "{late:?}"
            );
            // A name that never was can be cleared, and twice.
            let other = reference("task-cache/never");
            let first = clear(store, &tenant(), &other, 0, id(), NOW).expect("clear");
            let second = clear(store, &tenant(), &other, 0, id(), NOW).expect("clear");
            assert!(second > first);
        }
    }
}

#[test]
fn a_write_whose_acknowledgement_is_lost_was_made() {
    for tier in Tier::both() {
        for op in [Op::Create, Op::Replace] {
            if op == Op::Replace && tier.server.is_none() {
                // The failing store wraps the crate's directory, which cannot replace.
                continue;
            }
            let lost = AtomicBool::new(false);
            let (store, _) = tier.failing(move |it, path| {
                let is_it = it == op && path.contains("/names/");
                if is_it && !lost.swap(true, Ordering::Relaxed) {
                    return Fault::LostAnswer;
                }
                Fault::None
            });
            let committed = write(&store, "task-cache/lost", None).expect("commit");
            assert_eq!(
                committed,
                Committed::Named(number(&tier.store, "task-cache/lost"))
            );
        }
    }
}

/// Another writer replaces it before this one has read the record back. It must not come back: not
/// in this publication, nor in the next one, nor with a number that only the caller's notes have.
#[test]
fn a_write_whose_acknowledgement_is_lost_does_not_come_back_over_its_successor() {
    const NAME: &str = "task-cache/lost";
    let Some(tier) = Tier::s3() else { return };
    write(&tier.store, NAME, None).expect("commit");
    let before = number(&tier.store, NAME);
    // The first name's write is done, and its answer lost. A commit comes before the next read.
    let (other, state) = (tier.store.clone(), AtomicU64::new(0));
    let (store, _) = tier.failing(move |op, path| {
        if !path.contains("/names/") {
            return Fault::None;
        }
        let at = state.load(Ordering::Relaxed);
        if op == Op::Replace && at == 0 {
            state.store(1, Ordering::Relaxed);
            return Fault::LostAnswer;
        }
        if op == Op::Get && at == 1 {
            state.store(2, Ordering::Relaxed);
            let other = other.clone();
            let came = std::thread::spawn(move || write(&other, NAME, None));
            let came = came.join().expect("join").expect("commit");
            assert_eq!(came, Committed::Named(before + 2));
        }
        Fault::None
    });
    let lost = commit(NAME, vec![some_layer()]);
    let successor = || {
        let record = look(&tier.store, &tenant(), &reference(NAME)).expect("look");
        let record = record.expect("it is there");
        assert_eq!(record.number, before + 2);
        let (shown, ..) = record.content().expect("it shows content");
        assert_ne!(shown, lost.artifact);
    };
    let attempt =
        |store: &Store, commit| Publication::resume(store, &tenant(), id()).commit(commit, NOW);
    let committed = attempt(&store, lost.clone()).expect("decide");
    assert_eq!(committed, Committed::KeptNewer);
    successor();
    let mut again = lost.clone();
    again.writer.attempted = Some(before);
    let committed = attempt(&tier.store, again).expect("decide");
    assert_eq!(committed, Committed::KeptNewer);
    successor();
    // A commit whose attempt was refused for certain is written, as ever.
    let mut refused = commit(NAME, vec![some_layer()]);
    refused.writer.attempted = Some(before + 2);
    let committed = attempt(&tier.store, refused).expect("commit");
    assert_eq!(committed, Committed::Named(before + 3));
}

/// A node takes a commit from the node that made it, builds on it, and uploads first. The upload of
/// the older commit follows.
#[test]
fn a_commit_does_not_replace_one_that_was_built_on_it() {
    for tier in Tier::both() {
        let sealed = |name: &str, digests: &[u8], made: u64| {
            let layer = |digest: &u8| LayerRef {
                digest: Sha256([*digest; 32]),
                ..some_layer()
            };
            let mut commit = commit(name, digests.iter().map(layer).collect());
            commit.made = Timestamp(made);
            commit
        };
        let publish = |commit, looks: bool| {
            let mut publication = Publication::resume(&tier.store, &tenant(), id());
            if looks {
                let name = reference("task-cache/x");
                publication.look(&name, NOW).expect("look");
            }
            publication.commit(commit, NOW).expect("decide")
        };
        let named = |committed| matches!(committed, Committed::Named(_));
        let name = "task-cache/x";
        assert!(named(publish(sealed(name, &[3, 2, 1], 30), true)));
        for older in [&[1][..], &[2, 1]] {
            for looks in [false, true] {
                let kept = publish(sealed(name, older, 20), looks);
                assert_eq!(kept, Committed::KeptNewer, "{older:?}");
            }
        }
        // It came between the look and the write.
        let mut late = Publication::resume(&tier.store, &tenant(), id());
        late.look(&reference(name), NOW).expect("look");
        assert!(named(publish(sealed(name, &[4, 3, 2, 1], 40), true)));
        let kept = late.commit(sealed(name, &[3, 2, 1], 30), NOW);
        assert_eq!(kept.expect("decide"), Committed::KeptNewer);
        // The same layers, made later; and content that shares only a part of them.
        assert!(named(publish(sealed(name, &[1], 50), true)));
        assert!(named(publish(sealed(name, &[3, 2, 1], 60), true)));
        assert!(named(publish(sealed(name, &[9, 1], 20), true)));
        assert!(named(publish(sealed(name, &[5, 9, 1], 70), true)));
        assert!(named(publish(sealed(name, &[7, 9, 1], 65), true)));
        // A writer that has seen the newer content replaces it: a rollback.
        assert!(named(publish(sealed(name, &[6, 7, 9, 1], 90), true)));
        let mut back = sealed(name, &[7, 9, 1], 85);
        back.writer.base = Some(number(&tier.store, name) - 1);
        let kept = publish(back.clone(), true);
        assert_eq!(kept, Committed::KeptNewer);
        back.writer.base = Some(number(&tier.store, name));
        assert!(named(publish(back, true)));
        // What a fence has cleared counts as nothing.
        let mut fenced = sealed(name, &[9, 1], 20);
        (fenced.fence, fenced.writer.fence) = (80, 80);
        assert!(named(publish(fenced, true)));
    }
}

/// An attempt that is done late, when its writer has begun another publication.
#[test]
fn a_write_that_takes_effect_late_is_found_by_the_next_publication() {
    let Some(tier) = Tier::s3() else { return };
    let lost = commit("task-cache/late", vec![some_layer()]);
    let mut publication = Publication::resume(&tier.store, &tenant(), id());
    let seen = publication.look(&reference("task-cache/late"), NOW);
    assert_eq!(seen.expect("look"), None);
    let early = Publication::resume(&tier.store, &tenant(), id());
    let written = early.commit(lost.clone(), NOW).expect("commit");
    let again = publication.commit(lost, NOW).expect("commit");
    assert_eq!(again, written);
    assert_eq!(
        again,
        Committed::Named(number(&tier.store, "task-cache/late"))
    );
}

/// The tier through a store of which each half of a publication may take `publish`.
fn limited(
    tier: &Tier,
    publish: Duration,
    plan: impl Fn(Op, &str) -> Fault + Send + Sync + 'static,
) -> Store {
    let failing = Arc::new(Failing::new(Arc::clone(&tier.objects), plan));
    let times = Times {
        publish,
        // A write of a name that fails takes all of the time.
        pause: publish,
        ..TIMES
    };
    let handle = tier.runtime.handle().clone();
    Store::new(failing, "", "test://limited", handle, times)
}

#[test]
fn a_publication_that_is_late_after_its_look_writes_nothing() {
    let tier = Tier::file();
    let written = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&written);
    let store = limited(&tier, Duration::ZERO, move |op, _| {
        counter.fetch_add(u64::from(op != Op::Get), Ordering::Relaxed);
        Fault::None
    });
    let mut publication = Publication::resume(&store, &tenant(), id());
    let seen = publication.look(&reference("task-cache/x"), NOW);
    assert_eq!(seen.expect("look"), None);
    let late = publication.commit(commit("task-cache/x", vec![some_layer()]), NOW);
    assert!(matches!(late, Err(Error::Late { .. })), "{late:?}");
    assert_eq!(written.load(Ordering::Relaxed), 0);
}

/// The collector may have deleted the manifest meanwhile.
#[test]
fn a_publication_that_is_late_after_its_manifest_writes_no_name() {
    let tier = Tier::file();
    let is_reached = Arc::new(AtomicBool::new(false));
    let reached = Arc::clone(&is_reached);
    let store = limited(&tier, Duration::from_millis(200), move |op, path| {
        let is_first =
            op == Op::Create && path.contains("/names/") && !reached.swap(true, Ordering::Relaxed);
        if is_first {
            return Fault::Status(500);
        }
        Fault::None
    });
    // On a slow machine it is late before that.
    while !is_reached.load(Ordering::Relaxed) {
        let late = write(&store, "task-cache/x", None);
        assert!(matches!(late, Err(Error::Late { .. })), "{late:?}");
    }
    assert_eq!(number(&tier.store, "task-cache/x"), 0);
}

#[test]
fn a_race_is_decided_again_and_one_that_never_ends_is_reported() {
    let Some(tier) = Tier::s3() else { return };
    write(&tier.store, "task-cache/x", None).expect("commit");
    // Another writer comes between, twice.
    let (between, count) = (tier.store.clone(), AtomicU64::new(0));
    let (store, _) = tier.failing(move |op, path| {
        let races = op == Op::Replace && path.contains("/names/");
        if races && count.fetch_add(1, Ordering::Relaxed) < 2 {
            let between = between.clone();
            let other = std::thread::spawn(move || write(&between, "task-cache/x", None));
            assert!(matches!(
                other.join().expect("join"),
                Ok(Committed::Named(_))
            ));
        }
        Fault::None
    });
    let committed = write(&store, "task-cache/x", None).expect("commit");
    assert_eq!(committed, Committed::Named(NOW.0 + 3));
    let (store, requests) = tier.failing(|op, _| match op {
        Op::Replace => Fault::Status(412),
        _ => Fault::None,
    });
    let failed = write(&store, "task-cache/x", None);
    assert!(matches!(failed, Err(Error::Conflict { .. })), "{failed:?}");
    assert!(requests.load(Ordering::Relaxed) < 100);
    // A publication after a clear that came between its look and its name is refused.
    let mut publication = Publication::resume(&tier.store, &tenant(), id());
    let seen = publication.look(&reference("task-cache/x"), NOW);
    assert!(
        matches!(seen, Ok(Some(_)) | Err(Error::Missing { .. })),
        "{seen:?}"
    );
    clear(
        &tier.store,
        &tenant(),
        &reference("task-cache/x"),
        0,
        id(),
        NOW,
    )
    .expect("clear");
    let mut late = commit("task-cache/x", vec![some_layer()]);
    late.writer.base = Some(NOW.0 + 3);
    assert_eq!(
        publication.commit(late, NOW).expect("decide"),
        Committed::Cleared
    );
}

#[test]
fn a_record_that_is_still_the_same_is_not_sent_again() {
    const NAME: &str = "task-cache/x";
    let directory = tempfile::tempdir().expect("a directory");
    let log = directory.path().join("log");
    let server = match Server::with(&["--access-log", log.to_str().expect("text")]) {
        Ok(server) => server,
        Err(reason) => return crate::common::skip(reason),
    };
    let runtime = crate::tier::runtime();
    let open = || {
        let handle = runtime.handle().clone();
        Store::new(
            server.store(),
            "p",
            "s3://bucket/p",
            handle,
            crate::tier::TIMES,
        )
    };
    let (reader, writer) = (open(), open());
    let read = || look(&reader, &tenant(), &reference(NAME)).expect("look");
    assert_eq!(read(), None);
    write(&writer, NAME, None).expect("commit");
    let first = read().expect("a record");
    assert_eq!(read().as_ref(), Some(&first));
    write(&writer, NAME, None).expect("commit");
    let second = read().expect("a record");
    assert_eq!(second.number, first.number + 1);
    assert_eq!(read(), Some(second));
    std::fs::remove_file(server.bucket().join("p/v1/ci/names/task-cache/x")).expect("unlink");
    assert_eq!(read(), None);
    let log = std::fs::read_to_string(log).expect("the log");
    let answers = |status: &str| {
        let gets = log
            .lines()
            .filter(|line| line.contains("GetObject") && line.contains("/names/"));
        gets.filter(|line| line.contains(status)).count()
    };
    assert_eq!(answers(" 304 "), 2, "{log}");
}

#[test]
fn errors_of_the_storage_have_their_kinds() {
    let tier = Tier::file();
    for status in [403_u16, 500, 503, 412] {
        let (store, _) = tier.failing(move |op, path| {
            if op == Op::Create && path.contains("/names/") {
                return Fault::Status(status);
            }
            Fault::None
        });
        let error = write(&store, "task-cache/x", None).expect_err("it fails");
        let is_right = match status {
            403 => matches!(error, Error::Permanent { .. }),
            500 => matches!(error, Error::Away { .. }),
            503 => matches!(error, Error::SlowDown { .. }),
            _ => matches!(error, Error::Conflict { .. }),
        };
        assert!(is_right, "{status}: {error:?}");
        assert_eq!(error.is_temporary(), status != 403);
        assert_eq!(number(&tier.store, "task-cache/x"), 0);
    }
    // A storage that does not answer.
    let times = baggageclaim::shared::Times {
        request: std::time::Duration::from_millis(50),
        ..crate::tier::TIMES
    };
    let hangs = crate::failing::Failing::new(std::sync::Arc::clone(&tier.objects), |_, _| {
        Fault::Slow(std::time::Duration::from_secs(3600))
    });
    let handle = tier.runtime.handle().clone();
    let store = Store::new(
        std::sync::Arc::new(hangs),
        "",
        "test://hangs",
        handle,
        times,
    );
    let error = look(&store, &tenant(), &reference("task-cache/x")).expect_err("it hangs");
    assert!(matches!(error, Error::Away { .. }), "{error:?}");
    assert!(
        error
            .to_string()
            .contains("test://hangs/v1/ci/names/task-cache/x"),
        "{error}"
    );
}
