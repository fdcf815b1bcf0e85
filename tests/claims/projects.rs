//! Limits of claims whose tenant changes the projects of its files. Only on kernels with quotas: in
//! the guests.

use std::path::Path;

use baggageclaim::backend::BackendKind;
use baggageclaim::engine::claims::CreateClaim;
use baggageclaim::model::PersistentVolume;
use baggageclaim::sys::Dir;

use super::bench::{Bench, request, say};
use super::common::bench::eventually;
use super::common::{Fs, Lab, has_project_quotas, skip_outside_guests, too_old};

const MIB: u64 = 1 << 20;

/// A bench on this filesystem with project quotas. `None`: there is none here, and the test says so.
async fn bench_with_quota(fs: Fs) -> Option<Bench> {
    if !has_project_quotas() {
        too_old("limits on projects");
        return None;
    }
    if let Err(reason) = Lab::try_sized(fs, 320 * MIB) {
        skip_outside_guests(&reason);
        return None;
    }
    let ground = (BackendKind::Overlay, fs);
    say(ground);
    Bench::new(ground).await
}

/// A start sets the limits of all claims, and sets none but theirs.
#[tokio::test(flavor = "multi_thread")]
async fn a_restart_and_a_delete_change_no_limit_but_their_own_with_quota() {
    for fs in Fs::WITH_QUOTA {
        let Some(bench) = bench_with_quota(fs).await else {
            return;
        };
        let pool = Dir::open(&bench.config.pool).expect("open");
        let limit_of = |project| pool.project_usage(project).map_or(0, |usage| usage.limit);
        let project_of = |claim: &PersistentVolume| {
            let top = format!("volumes/{}/top", claim.id);
            pool.open_beneath(top)
                .expect("open")
                .project()
                .expect("asked")
        };
        let made = async |bench: &Bench, name: &str, bytes| {
            let sized = CreateClaim {
                required_bytes: bytes,
                ..request(name)
            };
            let claim = bench.engine.create_claim(sized).await.expect("made");
            bench.write(&claim, "f", "x").await;
            claim
        };
        let neighbour = made(&bench, "neighbour", 16 * MIB).await;
        let neighbours = project_of(&neighbour);
        pool.set_project_limit(4711, 3 * MIB)
            .expect("the administrator may");
        let mut bench = bench;
        for target in [0, neighbours, 4711] {
            let hostile = made(&bench, "hostile", 8 * MIB).await;
            let own = project_of(&hostile);
            bench
                .inside(&hostile, |root| {
                    let root = Dir::open(root).expect("open");
                    root.set_project(target).expect("its owner may");
                })
                .await;
            let others_are_as_they_were = |when: &str| {
                assert_eq!(limit_of(neighbours), 16 * MIB, "{when}, project {target}");
                assert_eq!(limit_of(4711), 3 * MIB, "{when}, project {target}");
            };
            bench = bench.restart().await;
            others_are_as_they_were("restarted");
            assert_eq!(limit_of(own), 8 * MIB);
            let id = hostile.id.as_str();
            let grown = bench.engine.expand_claim(id, 12 * MIB, None).await;
            grown.expect("grown");
            others_are_as_they_were("expanded");
            assert_eq!(limit_of(own), 12 * MIB);
            let deleted = bench.engine.delete_claim(id).await;
            deleted.expect("deleted");
            bench.engine.reap().await.expect("reap");
            eventually("its limit is gone", || limit_of(own) == 0).await;
            others_are_as_they_were("deleted");
        }
        pool.set_project_limit(4711, 0)
            .expect("the administrator may");
        drop(pool);
        bench.finish().await;
    }
}

/// The kernel makes directories for a mount, which count. A full volume can be mounted again, so
/// that files in it can be deleted, and its limit still holds. So can one with a tiny limit.
#[tokio::test(flavor = "multi_thread")]
async fn a_claim_at_its_limit_can_be_mounted_and_emptied_with_quota() {
    for fs in Fs::WITH_QUOTA {
        let Some(bench) = bench_with_quota(fs).await else {
            return;
        };
        let made = async |name: &str, bytes| {
            let sized = CreateClaim {
                required_bytes: bytes,
                ..request(name)
            };
            bench.engine.create_claim(sized).await.expect("made")
        };
        let overrun = |root: &Path| {
            let path = root.join("full");
            // On ext4 a program with CAP_SYS_RESOURCE passes the limit, but not in an overlay.
            let written = std::fs::write(&path, vec![1; 16 << 20]);
            let written = written.and_then(|()| std::fs::File::open(&path)?.sync_all());
            written.expect_err("the limit holds");
        };
        let full = made("full", 8 * MIB).await;
        bench.inside(&full, overrun).await;
        let remove = |root: &Path| std::fs::remove_file(root.join("full")).expect("rm");
        bench.inside(&full, remove).await;
        bench.inside(&full, overrun).await;
        let tiny = made("tiny", 1024).await;
        let read = |root: &Path| std::fs::read_dir(root).expect("it is mounted").count();
        assert_eq!(bench.inside(&tiny, read).await, 0);
        bench.finish().await;
    }
}
