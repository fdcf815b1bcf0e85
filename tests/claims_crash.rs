//! `kill -9` at every step of every operation on claims, then a restart: what was answered is there, what was not can be
//! asked for again, nothing half-made is visible and nothing is left behind.
//!
//! The process under test is this test binary once more. It goes through the life of a claim and says after each step that it
//! was answered; the test takes over where it died.

#![expect(
    clippy::disallowed_types,
    clippy::print_stderr,
    reason = "the process under test is started; where a test was when it failed is said where the failure is said"
)]

mod common;

#[path = "claims/bench.rs"]
#[allow(dead_code, reason = "tests/claims.rs uses the rest")]
mod bench;

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use baggageclaim::backend::BackendKind;
use baggageclaim::engine::claims::{Claims, CreateClaim, MountClaim, SnapshotFilter};
use baggageclaim::engine::crash::{self, Point};
use baggageclaim::engine::{Config, Engine};
use baggageclaim::model::{Claim, ClaimSource};
use bench::{BTRFS, Bench, COPY, Ground, OVERLAY, again, request, say};
use common::Lab;

/// What makes this test binary the process under test: pool, place for targets, file for answers, backend, point, visit.
const LAUNCH: &str = "BAGGAGECLAIM_CLAIMS_CRASH_LAUNCH";

/// How many steps the life of a claim has.
const STEPS: usize = 12;

/// The life of a claim: one step of it, that can be repeated.
async fn step(engine: &Engine, targets: &Path, number: usize) {
    let made =
        |name: &'static str| async move { engine.create_claim(request(name)).await.expect("made") };
    let clone = |name: &'static str, source: Claim| async move {
        let request = CreateClaim {
            source: Some(ClaimSource::Claim(source.id)),
            ..request(name)
        };
        let cloned = again(|| engine.create_claim(request.clone()));
        cloned.await.expect("cloned")
    };
    let staging = targets.join("globalmount");
    let published = targets.join("mount");
    let mount = |claim: &Claim, staged: bool| MountClaim {
        claim: claim.id.clone(),
        target: if staged {
            staging.clone()
        } else {
            published.clone()
        },
        staging: staged,
        staged_at: (!staged).then(|| staging.clone()),
        read_only: false,
        multiple_targets: false,
        mount_group: None,
    };
    let claim = || made("c");
    match number {
        0 => drop(claim().await),
        1 | 6 => {
            fs::create_dir_all(&staging).expect("the staging path");
            let request = mount(&claim().await, true);
            let staged = again(|| engine.mount_claim(request.clone()));
            staged.await.expect("staged");
        }
        2 | 7 => {
            let claim = claim().await;
            engine
                .mount_claim(mount(&claim, false))
                .await
                .expect("published");
            let file = if number == 2 { "one" } else { "two" };
            fs::write(published.join(file), file).expect("written");
        }
        3 | 8 => {
            let claim = claim().await;
            engine
                .unmount_claim(claim.id.as_str(), &published, false)
                .await
                .expect("unpublished");
        }
        4 | 9 => {
            let claim = claim().await;
            engine
                .unmount_claim(claim.id.as_str(), &staging, true)
                .await
                .expect("unstaged");
        }
        5 => {
            let claim = claim().await;
            let taken = again(|| engine.create_snapshot("s", claim.id.as_str()));
            taken.await.expect("taken");
        }
        10 => drop(clone("d", claim().await).await),
        // The name says which it was, also when it is gone.
        11 => {
            let all = engine.claims(None, 100).await.expect("list").items;
            if let Some(claim) = all.iter().find(|claim| claim.name == "c") {
                engine
                    .delete_claim(claim.id.as_str())
                    .await
                    .expect("deleted");
            }
        }
        _ => unreachable!("there are {STEPS} steps"),
    }
}

/// Not a test: the life of the process under test. In the test run it returns at once.
#[tokio::test(flavor = "multi_thread")]
async fn the_process_under_test() {
    #[expect(
        clippy::disallowed_methods,
        reason = "how the parent tells its child what to do"
    )]
    let Ok(launch) = std::env::var(LAUNCH) else {
        return;
    };
    let (pool, targets, answers, backend, point, visit): (
        PathBuf,
        PathBuf,
        PathBuf,
        BackendKind,
        String,
        usize,
    ) = serde_json::from_str(&launch).expect("a launch");
    let mut config = Config::new(pool);
    config.backend = Some(backend);
    let engine = Engine::open(config).await.expect("it opens");
    assert!(crash::arm(&point, visit), "no point is called {point}");
    let mut answers = fs::File::create(answers).expect("answers");
    for number in 0..STEPS {
        step(&engine, &targets, number).await;
        answers.write_all(b".").expect("answered");
    }
    engine.shutdown().await;
}

/// Whether the process dies at the visit of the point; then everything is looked at, and gone on with.
async fn visit(ground: Ground, point: Point, visit: usize) -> bool {
    let lab = match Lab::try_sized(ground.1, 512 << 20) {
        Ok(lab) => lab,
        Err(reason) => {
            common::skip(&reason);
            return false;
        }
    };
    let mut config = Config::new(lab.path().join("pool"));
    config.backend = Some(ground.0);
    let (pods, answers) = (
        lab.kubelet_dir().join("pods"),
        lab.run_dir().join("answers"),
    );
    let launch = (&config.pool, &pods, &answers, ground.0, point.name(), visit);
    let output = Command::new(std::env::current_exe().expect("this binary"))
        .args(["--exact", "the_process_under_test", "--nocapture"])
        .env(LAUNCH, serde_json::to_string(&launch).expect("plain data"))
        .output()
        .expect("it runs");
    let died = output.status.code().is_none();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        died || output.status.success(),
        "{said}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let answered = fs::read(&answers).expect("answers").len();
    assert_eq!(died, answered < STEPS, "{}: {answered}", point.name());

    let engine = Engine::open(config.clone()).await.expect("it opens again");
    engine.reap().await.expect("reap");
    let findings = engine.check().await.expect("check");
    assert_eq!(findings, [], "{} after {answered}", point.name());
    for number in answered.saturating_sub(1)..STEPS {
        step(&engine, &pods, number).await;
    }
    let bench = Bench {
        lab,
        engine,
        config,
    };
    let snapshot = bench
        .engine
        .snapshots(&SnapshotFilter::default(), None, 9)
        .await
        .expect("list")
        .items;
    assert_eq!(snapshot.len(), 1);
    let restored = bench.restore("restored", &snapshot[0]).await;
    assert_eq!(bench.read(&restored, "one").await.expect("one"), "one");
    assert!(bench.read(&restored, "two").await.is_err());
    let claims = bench.engine.claims(None, 9).await.expect("list").items;
    let names: Vec<&str> = claims.iter().map(|claim| claim.name.as_str()).collect();
    assert!(names.len() == 2 && names.contains(&"d"), "{names:?}");
    let clone = claims.iter().find(|claim| claim.name == "d").expect("it");
    for file in ["one", "two"] {
        assert_eq!(
            bench.read(clone, file).await.expect(file),
            file,
            "{}",
            point.name()
        );
    }
    bench.finish().await;
    died
}

async fn visit_all(ground: Ground) {
    say(ground);
    if let Err(reason) = Lab::try_sized(ground.1, 512 << 20) {
        return common::skip(&reason);
    }
    let of_claims = |point: &&Point| {
        let name = point.name();
        name.starts_with("claim-") || name.starts_with("freeze-")
    };
    for point in Point::ALL.iter().copied().filter(|point| of_claims(&point)) {
        let moves = ground.0 == BackendKind::Overlay;
        let passed = moves || point != Point::FreezeMarked;
        assert_eq!(visit(ground, point, 1).await, passed, "{}", point.name());
        visit(ground, point, 2).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_point_of_claims_on_overlay() {
    visit_all(OVERLAY).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_point_of_claims_on_btrfs() {
    visit_all(BTRFS).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_point_of_claims_by_copies() {
    visit_all(COPY).await;
}
