//! Outputs that become inputs, and publishes that wait for content that is about to be sealed. The
//! tests poll the publish's future to see whether it waits; no clock decides.

use std::fs;
use std::time::Duration;

use baggageclaim::engine::{Error, VolumeState};
use baggageclaim::model::Outcome;

use crate::common::bench::{Bench, Ground, eventually, request, soon, waits};
use crate::common::require_bench;

const OUTPUT: &[(&str, &str)] = &[("type", "output"), ("name", "o")];
const INPUT: &[(&str, &str)] = &[("type", "input"), ("from", "artifact/o")];

/// That a publish which failed left nothing.
async fn assert_nothing_of(bench: &Bench, volume: &str) {
    assert!(bench.row(volume).is_none(), "{volume} is still known");
    assert!(!bench.target(volume).exists(), "{volume} has a target");
    assert!(!bench.pool().join("volumes").join(volume).exists());
    bench.assert_whole().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_input_waits_for_its_maker_and_sees_all_that_it_wrote() {
    for ground in Ground::ALL {
        let bench = require_bench!(on ground);
        let (target, _) = bench.publish("maker", "out", OUTPUT).await;
        let mut coming = Box::pin(bench.try_publish("user", "in", INPUT));
        assert!(waits(&mut coming).await, "its maker still writes");
        fs::write(target.join("f"), "made").expect("write");
        bench.unpublish("out").await;
        assert!(waits(&mut coming).await, "its outcome is not known");
        bench.outcome("maker", Outcome::Succeeded).await;
        let published = soon("the input", &mut coming).await.expect("published");
        assert!(published.waited > Duration::ZERO);
        assert_eq!(
            fs::read_to_string(bench.target("in").join("f")).expect("read"),
            "made"
        );
        drop(coming);
        bench.unpublish("in").await;
        bench.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_input_that_does_not_come_in_time_is_coming_and_leaves_nothing() {
    let bench = require_bench!(|config| config.input_wait = Duration::from_millis(20));
    bench.publish("maker", "out", OUTPUT).await;
    let error = soon("an answer", bench.try_publish("user", "in", INPUT))
        .await
        .expect_err("late");
    assert!(matches!(&error, Error::Coming { .. }), "{error}");
    assert!(
        error.to_string().contains("pod maker is still making it"),
        "{error}"
    );
    bench.unpublish("out").await;
    eventually("its outcome is awaited", || {
        bench
            .row("out")
            .is_some_and(|row| row.state == VolumeState::AwaitingOutcome)
    })
    .await;
    let error = soon("an answer", bench.try_publish("user", "in", INPUT))
        .await
        .expect_err("late");
    assert!(
        error
            .to_string()
            .contains("the outcome of pod maker is not known yet"),
        "{error}"
    );
    assert_nothing_of(&bench, "in").await;
    // Asked again when it is there, it is there.
    bench.outcome("maker", Outcome::Succeeded).await;
    bench.quiet().await;
    bench.publish("user", "in", INPUT).await;
    bench.unpublish("in").await;
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_input_whose_maker_fails_is_told_so_at_once() {
    let bench = require_bench!();
    bench.publish("maker", "out", OUTPUT).await;
    let mut coming = Box::pin(bench.try_publish("user", "in", INPUT));
    assert!(waits(&mut coming).await);
    bench.outcome("maker", Outcome::Failed).await;
    bench.unpublish("out").await;
    let error = soon("the news", coming)
        .await
        .expect_err("it will never come");
    assert!(matches!(&error, Error::NoSuchContent(_)), "{error}");
    assert_nothing_of(&bench, "in").await;

    // Two makers: as long as one may succeed the input waits.
    for maker in ["a", "b"] {
        bench.publish(maker, maker, OUTPUT).await;
    }
    let mut coming = Box::pin(bench.try_publish("user", "in", INPUT));
    assert!(waits(&mut coming).await);
    bench.unpublish("a").await;
    bench.outcome("a", Outcome::Failed).await;
    bench.quiet().await;
    assert!(waits(&mut coming).await, "b still makes it");
    bench.outcome("b", Outcome::Succeeded).await;
    bench.unpublish("b").await;
    soon("the input", coming).await.expect("b made it");
    bench.unpublish("in").await;
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_nobody_makes_is_not_waited_for() {
    let bench = require_bench!();
    let missing = |error: Result<_, Error>| match error {
        Err(Error::NoSuchContent(_)) => {}
        other => panic!("{other:?}"),
    };
    missing(soon("never heard of", bench.try_publish("user", "in", INPUT)).await);
    // A pod does not wait for itself.
    bench.publish("maker", "out", OUTPUT).await;
    missing(soon("its own output", bench.try_publish("maker", "in", INPUT)).await);
    // Nor one tenant for another.
    let other = request(&bench.target("in"), "other", "user", "in", INPUT);
    missing(soon("another's output", bench.engine.publish(other)).await);
    // Nor anybody for what will never be sealed.
    let never = [("type", "output"), ("name", "p"), ("commit", "never")];
    bench.publish("maker", "never", &never).await;
    let input = [("type", "input"), ("from", "artifact/p")];
    missing(soon("never sealed", bench.try_publish("user", "in", &input)).await);
    let mut read_only = bench.request("maker", "read", &[("type", "output"), ("name", "q")]);
    read_only.read_only = true;
    bench.engine.publish(read_only).await.expect("publish");
    let input = [("type", "input"), ("from", "artifact/q")];
    missing(soon("read-only", bench.try_publish("user", "in", &input)).await);
    assert_nothing_of(&bench, "in").await;
    for volume in ["out", "never", "read"] {
        bench.unpublish(volume).await;
    }
    bench.outcome("maker", Outcome::Failed).await;
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_that_hangs_up_while_it_waits_leaves_nothing() {
    let bench = require_bench!();
    bench.publish("maker", "out", OUTPUT).await;
    let mut coming = Box::pin(bench.try_publish("user", "in", INPUT));
    assert!(waits(&mut coming).await);
    let error = bench
        .try_publish("user", "in", INPUT)
        .await
        .expect_err("one at a time");
    assert!(matches!(error, Error::Busy(_)), "{error}");
    drop(coming);
    assert_nothing_of(&bench, "in").await;
    // The same volume can be asked for again, and unpublished, at once.
    let mut coming = Box::pin(bench.try_publish("user", "in", INPUT));
    assert!(waits(&mut coming).await);
    drop(coming);
    bench.unpublish("in").await;
    bench.outcome("maker", Outcome::Succeeded).await;
    bench.unpublish("out").await;
    bench.quiet().await;
    assert_nothing_of(&bench, "in").await;
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_that_hangs_up_while_it_mounts_gets_a_whole_volume_or_none() {
    let bench = require_bench!();
    for round in 0..40 {
        let volume = format!("v{round}");
        let mut publish = Box::pin(bench.try_publish("user", &volume, &[]));
        let _given_up = waits(&mut publish).await;
        drop(publish);
        // How far it came is unknown; the next caller finds out.
        loop {
            match bench.try_publish("user", &volume, &[]).await {
                Err(Error::Busy(_)) => tokio::task::yield_now().await,
                result => {
                    result.expect("published");
                    break;
                }
            }
        }
        fs::write(bench.target(&volume).join("f"), "").expect("write");
        bench.unpublish(&volume).await;
    }
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shutdown_does_not_wait_for_who_waits() {
    let bench = require_bench!();
    bench.publish("maker", "out", OUTPUT).await;
    let mut coming = Box::pin(bench.try_publish("user", "in", INPUT));
    assert!(waits(&mut coming).await);
    let both = async { tokio::join!(bench.engine.shutdown(), coming) };
    match soon("both", both).await.1 {
        Err(Error::ShuttingDown) => {}
        other => panic!("{other:?}"),
    }
    let bench = bench.restart().await;
    assert_nothing_of(&bench, "in").await;
    bench.outcome("maker", Outcome::Succeeded).await;
    bench.unpublish("out").await;
    bench.quiet().await;
    bench.publish("user", "in", INPUT).await;
    bench.unpublish("in").await;
    bench.finish().await;
}
