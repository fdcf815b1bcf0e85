//! A slow disk: operations that wait for it delay no operation that need not.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use baggageclaim::engine::PublishRequest;
use baggageclaim::model::{Outcome, PersistentVolume, PodUid};
use baggageclaim::sys;
use futures_util::future::{Either, join_all, select};

use super::bench::{Bench, OVERLAY, again};
use super::common::bench::{self, eventually};
use super::common::disk::Slow;
use super::common::{in_a_guest, not_in_guests, skip};

const MIB: usize = 1 << 20;
/// More than there are threads that seal.
const CLAIMS: usize = 4;
/// How many outputs are sealed meanwhile.
const SEALS: usize = 5;
/// How many seconds the disk takes for all that is written here.
const SECONDS: usize = 10;

/// How much is written in all: `BAGGAGECLAIM_TEST_DIRTY_MIB` says, up to some thousands.
#[expect(
    clippy::disallowed_methods,
    reason = "a name of the test's, not the driver's"
)]
fn dirty() -> usize {
    let told = std::env::var("BAGGAGECLAIM_TEST_DIRTY_MIB");
    told.map_or(40, |told| told.parse().expect("a number")) * MIB
}

fn fill(path: &Path, bytes: usize) {
    let block: Vec<u8> = (0..MIB).map(|n| n.to_le_bytes()[n % 3]).collect();
    let mut file = fs::File::create(path).expect("create");
    for _ in 0..bytes / MIB {
        std::io::Write::write_all(&mut file, &block).expect("written");
    }
}

/// Publishes an output whose pod succeeds, and waits until it can be forked.
async fn step(bench: &Bench, name: &str) {
    let (engine, at) = (&bench.engine, bench.at(name));
    let output = [("type", "output"), ("name", name)];
    let request: PublishRequest = bench::request(&at, "ci", name, name, &output);
    engine.publish(request).await.expect("published");
    fs::write(at.join("f"), "some").expect("written");
    let pod: PodUid = name.parse().expect("a uid");
    let told = engine.report_outcome(&pod, Outcome::Succeeded).await;
    told.expect("told");
    engine.unpublish(name, &at).await.expect("unpublished");
    let is_sealed = || {
        let mut rows = engine.artifacts(None).into_iter();
        rows.any(|row| {
            row.name
                .is_some_and(|found| found.to_string().ends_with(name))
        })
    };
    eventually("it is sealed", is_sealed).await;
}

/// The end of a claim's overlay writes back all that the pool holds.
#[tokio::test(flavor = "multi_thread")]
async fn claims_whose_unmount_waits_for_the_disk_hold_up_no_seal() {
    if in_a_guest() {
        return not_in_guests("an emulated machine is slower than the disk would be");
    }
    let size = 512 * MIB + 2 * dirty();
    let Some(bench) = Bench::sized(OVERLAY, size as u64).await else {
        return;
    };
    let mut made = Vec::new();
    for number in 0..CLAIMS {
        let claim = bench.create(&format!("claim-{number}")).await;
        fill(&bench.mount(&claim).await.join("f"), dirty() / CLAIMS);
        made.push(claim);
    }
    let slow = match Slow::new(&bench.lab, (dirty() / SECONDS) as u64) {
        Ok(slow) => slow,
        Err(reason) => return skip(&reason),
    };
    let began = Instant::now();
    // The next call for a claim waits until it is on disk.
    let closed = made.iter().map(|claim| async {
        bench.unmount(claim).await;
        again(|| bench.stage(claim)).await.expect("staged");
    });
    let closed = join_all(closed);
    let seals = async {
        let is_mounted = |claim: &&PersistentVolume| {
            let staging = bench.staging(claim);
            let table = sys::mount_table().expect("mounts");
            table.iter().any(|mount| mount.mount_point == staging)
        };
        eventually("claims are unmounted", || {
            made.iter().filter(is_mounted).count() <= CLAIMS - 2
        })
        .await;
        let mut longest = Duration::ZERO;
        for number in 0..SEALS {
            let began = Instant::now();
            step(&bench, &format!("output-{number}")).await;
            longest = longest.max(began.elapsed());
        }
        longest
    };
    let Either::Right((longest, closed)) = select(Box::pin(closed), Box::pin(seals)).await else {
        panic!("seals waited for the disk: {:?}", began.elapsed());
    };
    let sealed = began.elapsed();
    closed.await;
    eprintln!(
        "{} MiB: {SEALS} seals in {sealed:?}, the longest {longest:?}; the claims are closed after {:?}",
        dirty() / MIB,
        began.elapsed()
    );
    drop(slow);
    for claim in &made {
        let staging = bench.staging(claim);
        let unstaged = bench
            .engine
            .unmount_claim(claim.id.as_str(), &staging, true);
        unstaged.await.expect("unstaged");
    }
    bench.engine.settled().await;
    for number in 0..SEALS {
        let tenant = "ci".parse().expect("a tenant");
        let name = format!("artifact/output-{number}").parse().expect("a name");
        let destroyed = bench.engine.destroy(&tenant, &name).await;
        destroyed.expect("destroyed");
    }
    bench.finish().await;
}
