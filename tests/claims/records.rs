//! The records of claims: sizes, names, pages, attachments, time to live.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::time::{Duration, Instant};

use baggageclaim::engine::Error;
use baggageclaim::engine::claims::{CreateClaim, MountClaim, SnapshotFilter};
use baggageclaim::model::{
    Attachment, ClaimParameters, ClaimSource, LiveClone, MutableChange, MutableParameters,
    PersistentVolume, Snapshot, SnapshotGroup, Ttl,
};
use baggageclaim::store::{Change, Index};
use baggageclaim::sys::Dir;

use super::bench::{ALL, BTRFS, Bench, OVERLAY, again, request, say};
use super::common::bench::eventually;
use super::common::kernel_is;

const MIB: u64 = 1 << 20;

fn of_size(name: &str, required: u64, limit: Option<u64>) -> CreateClaim {
    CreateClaim {
        required_bytes: required,
        limit_bytes: limit,
        ..request(name)
    }
}

#[tokio::test(flavor = "multi_thread")]
#[expect(clippy::too_many_lines, reason = "one scenario, told in order")]
async fn sizes_are_kept_within_what_was_asked_and_what_there_is() {
    let Some(bench) = Bench::new(OVERLAY).await else {
        return;
    };
    let engine = &bench.engine;
    let claim = engine
        .create_claim(of_size("c", 10 * MIB, Some(20 * MIB)))
        .await
        .expect("made");
    assert_eq!(claim.capacity, 10 * MIB);
    for same in [
        of_size("c", 10 * MIB, None),
        of_size("c", 5 * MIB, Some(10 * MIB)),
        request("c"),
    ] {
        assert_eq!(engine.create_claim(same).await.expect("the same"), claim);
    }
    // Without a size, the limit is the size, also where it is more than the pool has.
    for (name, limit) in [("limit", 9 * MIB), ("high", 1 << 50)] {
        let claim = engine.create_claim(of_size(name, 0, Some(limit))).await;
        assert_eq!(claim.expect("made").capacity, limit);
        let again = engine.create_claim(of_size(name, 0, Some(limit))).await;
        assert_eq!(again.expect("the same").capacity, limit);
    }
    let mut others = vec![of_size("c", 11 * MIB, None), of_size("c", 0, Some(9 * MIB))];
    others.push(CreateClaim {
        source: Some(ClaimSource::Claim(claim.id.clone())),
        ..request("c")
    });
    others.push(CreateClaim {
        parameters: ClaimParameters {
            live_clone: LiveClone::Copy,
            ..ClaimParameters::default()
        },
        ..of_size("c", 10 * MIB, None)
    });
    for other in others {
        let made = engine.create_claim(other).await;
        assert!(matches!(made, Err(Error::Exists { .. })), "{made:?}");
    }
    for absurd in [1 << 40, u64::MAX] {
        let made = engine.create_claim(of_size("absurd", absurd, None)).await;
        assert!(matches!(made, Err(Error::TooLarge { .. })), "{made:?}");
        let grown = engine.expand_claim(claim.id.as_str(), absurd, None).await;
        assert!(matches!(grown, Err(Error::OutOfRange { .. })), "{grown:?}");
    }
    let id = claim.id.as_str();
    assert_eq!(
        engine
            .expand_claim(id, 5 * MIB, None)
            .await
            .expect("ok")
            .capacity,
        10 * MIB
    );
    assert_eq!(
        engine
            .expand_claim(id, 15 * MIB, Some(20 * MIB))
            .await
            .expect("ok")
            .capacity,
        15 * MIB
    );
    let shrunk = engine.expand_claim(id, 5 * MIB, Some(10 * MIB)).await;
    assert!(
        matches!(shrunk, Err(Error::OutOfRange { .. })),
        "{shrunk:?}"
    );
    let unknown = engine.expand_claim("vol-nobody", 1, None).await;
    assert!(matches!(unknown, Err(Error::NoSuchClaim(_))), "{unknown:?}");

    let source = Some(ClaimSource::Claim(claim.id.clone()));
    let clone = |name, required, limit| CreateClaim {
        source: source.clone(),
        ..of_size(name, required, limit)
    };
    assert_eq!(
        engine
            .create_claim(clone("same size", 0, None))
            .await
            .expect("made")
            .capacity,
        15 * MIB
    );
    assert_eq!(
        engine
            .create_claim(clone("larger", 16 * MIB, None))
            .await
            .expect("made")
            .capacity,
        16 * MIB
    );
    for (required, limit) in [(14 * MIB, None), (0, Some(14 * MIB))] {
        let made = engine.create_claim(clone("smaller", required, limit)).await;
        assert!(matches!(made, Err(Error::OutOfRange { .. })), "{made:?}");
    }
    let bench = bench.restart().await;
    let claim = bench.engine.claim(claim.id.as_str()).expect("there");
    assert_eq!(claim.capacity, 15 * MIB);
    bench.finish().await;
}

/// CSI specification, "CreateVolume": a repeated request is compared by its `mutable_parameters`,
/// too.
#[tokio::test(flavor = "multi_thread")]
async fn a_repeated_request_may_bring_what_the_claim_was_made_with_or_what_it_has() {
    let Some(mut bench) = Bench::new(OVERLAY).await else {
        return;
    };
    let with = |ttl_seconds| CreateClaim {
        mutable: MutableParameters {
            size_limit: None,
            ttl_seconds,
        },
        ..request("c")
    };
    let (first, now) = (with(Some(3600)), with(Some(7200)));
    let claim = bench
        .engine
        .create_claim(first.clone())
        .await
        .expect("made");
    let early = bench.engine.create_claim(now.clone()).await;
    assert!(matches!(early, Err(Error::Exists { .. })), "{early:?}");
    let later = MutableChange {
        size_limit: None,
        ttl: Some(Ttl::Seconds(7200)),
    };
    let modified = bench.engine.modify_claim(claim.id.as_str(), later);
    modified.await.expect("modified");
    for _ in 0..2 {
        for same in [&first, &now] {
            let again = bench.engine.create_claim(same.clone()).await;
            assert_eq!(again.expect("the same").mutable, now.mutable);
        }
        let other = bench.engine.create_claim(with(Some(7))).await;
        let what = match &other {
            Err(Error::Exists { what, .. }) => what,
            _ => "",
        };
        assert_eq!(what, "mutable_parameters", "{other:?}");
        bench = bench.restart().await;
    }
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_largest_claim_that_is_told_can_be_made_and_one_byte_more_cannot() {
    for ground in [OVERLAY, BTRFS] {
        let Some(bench) = Bench::new(ground).await else {
            return;
        };
        let engine = &bench.engine;
        let told = engine.capacity().await.expect("capacity");
        assert!(told.available > 100 * MIB && told.available <= told.largest);
        let largest = of_size("largest", told.largest, None);
        let claim = engine.create_claim(largest).await.expect("made");
        assert_eq!(claim.capacity, told.largest);
        let more = told.largest + 1;
        let made = engine.create_claim(of_size("more", more, None)).await;
        assert!(matches!(made, Err(Error::TooLarge { .. })), "{made:?}");
        let id = claim.id.as_str();
        let grown = engine.expand_claim(id, more, None).await;
        assert!(matches!(grown, Err(Error::OutOfRange { .. })), "{grown:?}");
        // Nothing is set aside.
        let again = engine.capacity().await.expect("capacity").largest;
        assert_eq!(again, told.largest);
        let other = of_size("as large", told.largest, None);
        engine.create_claim(other).await.expect("made");
        bench.finish().await;
    }
}

/// A pool on btrfs whose limits hold. Before Linux 6.7 there are no simple quotas, and no limit
/// holds; conformance has a test of that.
async fn with_btrfs_limits() -> Option<Bench> {
    if !kernel_is(6, 7) {
        return None;
    }
    let mut bench = Bench::new(BTRFS).await?;
    bench.config.btrfs_quota = true;
    Some(bench.restart().await)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_size_limit_above_the_size_holds_once_the_claim_has_grown_beyond_it() {
    let Some(bench) = with_btrfs_limits().await else {
        return;
    };
    let limited = MutableParameters {
        size_limit: Some(20 * MIB),
        ttl_seconds: None,
    };
    let asked = CreateClaim {
        mutable: limited,
        ..of_size("c", 10 * MIB, None)
    };
    let claim = bench.engine.create_claim(asked).await.expect("made");
    let (id, target) = (claim.id.as_str(), bench.mount(&claim).await);
    let holds = async || {
        let stats = bench.engine.stats(&claim.id, &target).await;
        stats.expect("mounted").total_bytes / MIB
    };
    assert_eq!(holds().await, 10, "its size is less");
    for (size, expected) in [(15, 15), (30, 20)] {
        let grown = bench.engine.expand_claim(id, size * MIB, None).await;
        assert_eq!(grown.expect("grown").capacity, size * MIB);
        assert_eq!(holds().await, expected);
    }
    for (limit, expected) in [(40, 30), (25, 25)] {
        let limited = MutableChange {
            size_limit: Some(limit * MIB),
            ttl: None,
        };
        let modified = bench.engine.modify_claim(id, limited).await;
        let modified = modified.expect("modified").mutable;
        assert_eq!(modified.size_limit, limited.size_limit);
        assert_eq!(holds().await, expected);
    }
    bench.unmount(&claim).await;
    bench.finish().await;
}

/// At its limit, a btrfs subvolume refuses each change, also of its owner.
#[tokio::test(flavor = "multi_thread")]
async fn a_claim_at_its_limit_is_given_to_the_group_of_a_pod() {
    let Some(bench) = with_btrfs_limits().await else {
        return;
    };
    let tiny = bench.engine.create_claim(of_size("c", 1, None));
    let claim = tiny.await.expect("made");
    let request = MountClaim {
        mount_group: Some(2000),
        ..bench.stage_request(&claim)
    };
    let staged = request.target.clone();
    fs::create_dir_all(&staged).expect("the staging path");
    let mounted = bench.engine.mount_claim(request).await;
    mounted.expect("staged");
    assert_eq!(fs::metadata(&staged).expect("stat").gid(), 2000);
    fs::write(staged.join("f"), "x").expect_err("the limit holds again");
    let unstaged = bench
        .engine
        .unmount_claim(claim.id.as_str(), &staged, true)
        .await;
    unstaged.expect("unstaged");
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_limit_that_does_not_hold_is_said_in_the_health_of_the_claim() {
    // No quotas there.
    let Some(bench) = Bench::new(OVERLAY).await else {
        return;
    };
    let sized = of_size("sized", 10 * MIB, None);
    let sized = bench.engine.create_claim(sized).await.expect("made");
    let other = bench.create("other").await;
    let is_said = async |bench: &Bench, claim: &PersistentVolume| {
        let used = bench.engine.claim_use(claim.id.as_str()).await;
        let problems = used.expect("there").problems;
        assert!(problems.len() < 2, "{problems:?}");
        let said = |problem: &String| problem.contains("size limit is not enforced");
        assert!(problems.iter().all(said), "{problems:?}");
        !problems.is_empty()
    };
    assert!(!is_said(&bench, &sized).await, "nothing is there to bound");
    for claim in [&sized, &other] {
        bench.mount(claim).await;
    }
    assert!(is_said(&bench, &sized).await && !is_said(&bench, &other).await);
    let limited = MutableChange {
        size_limit: Some(MIB),
        ttl: None,
    };
    let modified = bench.engine.modify_claim(other.id.as_str(), limited).await;
    modified.expect("modified");
    assert!(is_said(&bench, &other).await, "it has a limit now");
    let bench = bench.restart().await;
    assert!(is_said(&bench, &sized).await && is_said(&bench, &other).await);
    for claim in [&sized, &other] {
        bench.unmount(claim).await;
    }
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_that_is_named_as_a_member_of_a_group_is_another_one() {
    let Some(bench) = Bench::new(OVERLAY).await else {
        return;
    };
    let claim = bench.create("claim").await;
    let name = format!("g/{}", claim.id);
    bench.write(&claim, "file", "first").await;
    let single = bench.snapshot(&name, &claim).await;
    bench.write(&claim, "file", "second").await;
    let sources = [claim.id.to_string()];
    let taken = again(|| bench.engine.create_group("g", &sources)).await;
    let (group, members) = taken.expect("taken");
    bench.engine.reap().await.expect("reap");
    let bench = bench.restart().await;
    assert_eq!(bench.snapshot(&name, &claim).await, single, "asked again");
    let repeated = bench.engine.create_group("g", &sources).await;
    assert_eq!(repeated.expect("the same"), (group, members.clone()));
    for (snapshot, text) in [(&single, "first"), (&members[0], "second")] {
        let restored = bench.restore(text, snapshot).await;
        assert_eq!(bench.read(&restored, "file").await.expect("file"), text);
    }
    bench.finish().await;
}

/// It gave members the ids that single snapshots of their names have.
#[tokio::test(flavor = "multi_thread")]
async fn a_group_that_an_older_version_took_keeps_the_ids_of_its_snapshots() {
    let Some(bench) = Bench::new(OVERLAY).await else {
        return;
    };
    let claim = bench.create("claim").await;
    bench.write(&claim, "file", "text").await;
    let name = format!("g/{}", claim.id);
    let single = bench.snapshot(&name, &claim).await.id;
    let deleted = bench.engine.delete_snapshot(single.as_str()).await;
    deleted.expect("deleted");
    let sources = [claim.id.to_string()];
    let taken = bench.engine.create_group("g", &sources).await;
    let (group, mut members) = taken.expect("taken");
    let today = members.remove(0);
    let older = Snapshot {
        id: single.clone(),
        ..today.clone()
    };
    let group = SnapshotGroup {
        snapshots: vec![single.clone()],
        ..group
    };
    let pool = bench.config.pool.clone();
    let changes = [
        Change::RemoveSnapshot(today.id),
        Change::PutSnapshot(older.clone()),
        Change::PutGroup(group.clone()),
    ];
    let bench = bench
        .restart_after(|| {
            let root = Dir::open(&pool).expect("the pool");
            let (index, _) = Index::open_existing(&root).expect("the index");
            index.commit(&changes).expect("as it left it");
        })
        .await;
    let repeated = bench.engine.create_group("g", &sources).await;
    assert_eq!(repeated.expect("the same"), (group.clone(), vec![older]));
    let taken = bench.engine.create_snapshot(&name, claim.id.as_str()).await;
    assert!(matches!(taken, Err(Error::Exists { .. })), "{taken:?}");
    let alone = bench.engine.delete_snapshot(single.as_str()).await;
    assert!(matches!(alone, Err(Error::OfGroup { .. })), "{alone:?}");
    let deleted = bench.engine.delete_group(group.id.as_str()).await;
    deleted.expect("deleted");
    assert_eq!(bench.snapshot(&name, &claim).await.id, single);
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn attachments_are_remembered_and_hold_a_claim() {
    let Some(bench) = Bench::new(OVERLAY).await else {
        return;
    };
    let claim = bench.create("c").await;
    let id = claim.id.as_str();
    let attachment = |read_only| Attachment {
        node: "node-1".to_owned(),
        read_only,
        access_mode: 1,
    };
    for _ in 0..2 {
        bench
            .engine
            .attach_claim(id, attachment(false))
            .await
            .expect("attached");
    }
    let other = bench.engine.attach_claim(id, attachment(true)).await;
    assert!(matches!(other, Err(Error::Exists { .. })), "{other:?}");
    let bench = bench.restart().await;
    assert_eq!(
        bench.engine.claim(id).expect("there").attached,
        [attachment(false)]
    );
    let deleted = bench.engine.delete_claim(id).await;
    assert!(
        matches!(deleted, Err(Error::ClaimInUse { .. })),
        "{deleted:?}"
    );
    bench
        .engine
        .detach_claim(id, Some("node-2"))
        .await
        .expect("nothing to do");
    assert_eq!(bench.engine.claim(id).expect("there").attached.len(), 1);
    bench
        .engine
        .detach_claim(id, Some("node-1"))
        .await
        .expect("detached");
    bench
        .engine
        .attach_claim(id, attachment(true))
        .await
        .expect("attached");
    bench
        .engine
        .detach_claim(id, None)
        .await
        .expect("detached from all");
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_unused_for_its_ttl_goes_and_one_in_use_stays() {
    let Some(bench) = Bench::new(OVERLAY).await else {
        return;
    };
    let short = MutableChange {
        size_limit: Some(MIB),
        ttl: Some(Ttl::Seconds(1)),
    };
    let shortly = short.over(MutableParameters::default());
    let unused = bench.create("unused").await;
    let used = bench.create("used").await;
    let kept = bench.create("kept").await;
    for claim in [&unused, &used] {
        let modified = bench
            .engine
            .modify_claim(claim.id.as_str(), short)
            .await
            .expect("modified");
        assert_eq!(modified.mutable, shortly);
        let nothing = bench
            .engine
            .modify_claim(claim.id.as_str(), MutableChange::default());
        let modified = nothing.await.expect("nothing to change");
        assert_eq!(modified.mutable, shortly, "what is not named stays");
    }
    let never = MutableChange {
        size_limit: None,
        ttl: Some(Ttl::Never),
    };
    for to in [short, never] {
        let modified = bench.engine.modify_claim(kept.id.as_str(), to).await;
        assert_eq!(modified.expect("modified").mutable, to.over(shortly));
    }
    bench.mount(&used).await;
    tokio::time::sleep(Duration::from_millis(1100)).await;
    bench.engine.reap().await.expect("reap");
    assert!(matches!(
        bench.engine.claim(unused.id.as_str()),
        Err(Error::NoSuchClaim(_))
    ));
    // Long enough for whatever else the machine has to do meanwhile.
    let long = MutableChange {
        size_limit: None,
        ttl: Some(Ttl::Seconds(3600)),
    };
    let modify = async |bench: &Bench, to| {
        let modified = bench.engine.modify_claim(used.id.as_str(), to).await;
        let modified = modified.expect("modified");
        assert_eq!(modified.mutable, to.over(shortly));
        assert_eq!(modified.mutable.size_limit, Some(MIB));
        modified.last_used
    };
    let began_to_be_used = modify(&bench, long).await;
    bench.unmount(&used).await;
    let bench = bench.restart().await;
    bench.engine.reap().await.expect("reap");
    for claim in [&used, &kept] {
        let found = bench.engine.claim(claim.id.as_str());
        found.expect("used a moment ago, or kept for ever again");
    }
    let ceased_to_be_used = modify(&bench, short).await;
    let lasted = ceased_to_be_used.0 - began_to_be_used.0;
    assert!(lasted >= 1100, "its last use is when it ended: {lasted} ms");
    tokio::time::sleep(Duration::from_millis(1100)).await;
    bench.engine.reap().await.expect("reap");
    assert!(matches!(
        bench.engine.claim(used.id.as_str()),
        Err(Error::NoSuchClaim(_))
    ));
    bench.finish().await;
}

/// As of an artifact a fork is: what is only cloned does not go.
#[tokio::test(flavor = "multi_thread")]
async fn a_clone_and_a_snapshot_are_uses_of_their_source() {
    for ground in ALL {
        say(ground);
        let Some(mut bench) = Bench::new(ground).await else {
            return;
        };
        let long = MutableChange {
            size_limit: None,
            ttl: Some(Ttl::Seconds(3600)),
        };
        let (empty, full) = (bench.create("empty").await, bench.create("full").await);
        for claim in [&empty, &full] {
            let modified = bench.engine.modify_claim(claim.id.as_str(), long).await;
            modified.expect("modified");
        }
        for claim in [&empty, &full] {
            let last_used = |bench: &Bench| {
                let claim = bench.engine.claim(claim.id.as_str());
                claim.expect("there").last_used
            };
            if claim.id == full.id {
                bench.write(claim, "file", "text").await;
            }
            let before = last_used(&bench);
            bench.clone_of(&format!("of {}", claim.name), claim).await;
            let cloned = last_used(&bench);
            assert!(cloned > before, "{} was cloned", claim.name);
            bench.snapshot(&format!("of {}", claim.name), claim).await;
            let snapshotted = last_used(&bench);
            assert!(snapshotted > cloned, "{} was snapshotted", claim.name);
            let sources = [claim.id.to_string()];
            let group = format!("of {}", claim.name);
            let taken = again(|| bench.engine.create_group(&group, &sources)).await;
            taken.expect("taken");
            let grouped = last_used(&bench);
            assert!(grouped > snapshotted, "{} is one of a group", claim.name);

            // The driver is killed after a round of garbage collection. That leaves out what is
            // still being put away after an answer, which this waits for.
            let waits = bench
                .engine
                .modify_claim(claim.id.as_str(), MutableChange::default());
            waits.await.expect("nothing to change");
            bench.engine.reap().await.expect("reap");
            let index = bench.config.pool.join("index.redb");
            let as_killed = bench.lab.path().join("as-killed.redb");
            fs::copy(&index, &as_killed).expect("as the kill leaves it");
            bench = bench
                .restart_after(|| fs::rename(&as_killed, &index).expect("in its place"))
                .await;
            // A start asks whether a process still holds its files: the answer that none does is no
            // use.
            bench.engine.reap().await.expect("reap");
            assert_eq!(last_used(&bench), grouped, "{}", claim.name);
        }
        bench.finish().await;
    }
}

/// A driver that is killed has not told the index when claims were last used; their own records
/// know. A record that a power cut has emptied knows nothing: such a claim counts as used.
#[tokio::test(flavor = "multi_thread")]
async fn a_killed_driver_does_not_forget_what_was_used() {
    let Some(bench) = Bench::new(OVERLAY).await else {
        return;
    };
    let (idle, emptied, mounted, vanished) = (
        bench.create("idle").await,
        bench.create("emptied").await,
        bench.create("mounted").await,
        bench.create("vanished").await,
    );
    let index = bench.config.pool.join("index.redb");
    let as_killed = bench.lab.path().join("as-killed.redb");
    let created = vanished.created;
    tokio::time::sleep(Duration::from_millis(20)).await;
    bench.write(&idle, "f", "x").await;
    bench.write(&emptied, "f", "x").await;
    let record = bench.config.pool.join("volumes");
    let record = record.join(emptied.id.as_str()).join("claim.json");
    let there = bench.mount(&mounted).await;
    let gone = bench.mount(&vanished).await;
    fs::copy(&index, &as_killed).expect("as the kill leaves it");
    let staged = bench.staging(&vanished);
    let bench = bench
        .restart_after(|| {
            fs::rename(&as_killed, &index).expect("in its place");
            fs::metadata(&record).expect("a record");
            fs::write(&record, "").expect("emptied");
            for path in [&gone, &staged] {
                rustix::mount::unmount(path, rustix::mount::UnmountFlags::NOFOLLOW)
                    .expect("umount");
            }
        })
        .await;
    for claim in [&idle, &emptied, &mounted, &vanished] {
        let found = bench.engine.claim(claim.id.as_str()).expect("there");
        assert!(found.last_used > created, "{}", claim.name);
    }
    assert!(there.join("..").exists());
    bench.unmount(&mounted).await;
    bench.unmount(&vanished).await;
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
#[expect(clippy::too_many_lines, reason = "one scenario, told in order")]
async fn ten_thousand_claims_are_paged_while_others_come_and_go() {
    const MANY: usize = 10_000;
    let Some(bench) = Bench::new(OVERLAY).await else {
        return;
    };
    let started = Instant::now();
    let makers: Vec<_> = (0..8)
        .map(|maker| {
            let engine = bench.engine.clone();
            tokio::spawn(async move {
                for number in (maker..MANY).step_by(8) {
                    engine
                        .create_claim(request(&format!("stays-{number}")))
                        .await
                        .expect("made");
                }
            })
        })
        .collect();
    for maker in makers {
        maker.await.expect("made");
    }
    eprintln!("{MANY} claims in {:?}", started.elapsed());
    let engine = bench.engine.clone();
    let stirring = tokio::spawn(async move {
        for number in 0..200 {
            let claim = engine
                .create_claim(request(&format!("passes-{number}")))
                .await
                .expect("made");
            engine
                .delete_claim(claim.id.as_str())
                .await
                .expect("deleted");
        }
    });
    let (mut seen, mut after, mut longest) = (Vec::new(), None, Duration::ZERO);
    loop {
        let started = Instant::now();
        let page = bench.engine.claims(after.as_ref(), 500);
        longest = longest.max(started.elapsed());
        assert!(page.items.len() <= 500);
        seen.extend(
            page.items
                .into_iter()
                .filter(|claim| claim.name.starts_with("stays-"))
                .map(|claim| claim.id),
        );
        after = page.next;
        tokio::time::sleep(Duration::from_millis(2)).await;
        if after.is_none() {
            break;
        }
    }
    eprintln!("the slowest page took {longest:?}");
    stirring.await.expect("no failure");
    let distinct: BTreeSet<_> = seen.iter().collect();
    assert_eq!((seen.len(), distinct.len()), (MANY, MANY), "each once");

    let source = bench.engine.claims(None, 1).items.remove(0);
    for name in ["a", "b", "c"] {
        bench.snapshot(name, &source).await;
    }
    let of = |filter: SnapshotFilter| {
        let engine = bench.engine.clone();
        async move { engine.snapshots(&filter, None, 2).expect("a page") }
    };
    let by_source = |source: &str| SnapshotFilter {
        source: Some(source.to_owned()),
        id: None,
    };
    let page = of(by_source(source.id.as_str())).await;
    assert_eq!((page.items.len(), page.next.is_some()), (2, true));
    assert!(of(by_source("vol-nobody")).await.items.is_empty());
    let id = page.items[1].id.to_string();
    let page = of(SnapshotFilter {
        source: None,
        id: Some(id),
    })
    .await;
    assert_eq!((page.items.len(), page.next), (1, None));
    let started = Instant::now();
    let bench = bench.restart().await;
    eprintln!("restart with {MANY} claims: {:?}", started.elapsed());
    assert_eq!(bench.engine.claims(None, usize::MAX).items.len(), MANY);
    bench.assert_sound().await;
    bench.engine.shutdown().await;
    drop(bench.engine);
    assert!(bench.lab.close().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_index_forgets_the_layers_of_a_deleted_snapshot() {
    let Some(bench) = Bench::new(OVERLAY).await else {
        return;
    };
    let pool = Dir::open(&bench.config.pool).expect("the pool");
    let measured = || {
        let contents = Index::read_only(&pool).expect("read");
        let layers = contents.layers.into_iter().map(|(layer, _)| layer);
        layers.collect::<BTreeSet<_>>()
    };
    let snapshot = async |name: &str| {
        let claim = bench.create(name).await;
        bench.write(&claim, "file", name).await;
        let snapshot = bench.snapshot(name, &claim).await;
        bench.delete(claim.id.as_str()).await;
        snapshot
    };
    let first = snapshot("first").await;
    let layers = |snapshot: &Snapshot| snapshot.layers.iter().copied().collect();
    eventually("it is measured", || measured() == layers(&first)).await;
    let deleted = bench.engine.delete_snapshot(first.id.as_str()).await;
    deleted.expect("deleted");
    let second = snapshot("second").await;
    eventually("the other one is, and no more", || {
        measured() == layers(&second)
    })
    .await;
    bench.finish().await;
}
