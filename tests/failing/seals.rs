//! Seals whose last steps fail, after the index has them: a layer that cannot say that it is named, a promise that cannot be taken
//! back. The others become durable all the same, and nothing that was deleted comes back.

use common::bench::{soon, waits};

use super::*;

fn output(name: &'static str) -> [(&'static str, &'static str); 3] {
    [("type", "output"), ("name", name), ("commit", "always")]
}

/// A volume that is sealed as this, and is not waited for.
async fn leaves(bench: &Bench, name: &'static str) {
    let (at, _) = bench.publish(name, name, &output(name)).await;
    fs::write(at.join("f"), name).expect("write");
    bench.unpublish(name).await;
}

async fn destroy(bench: &Bench, name: &str) -> Result<(), Error> {
    let (tenant, name) = ("ci".parse().expect("label"), name.parse().expect("name"));
    bench.engine.destroy(&tenant, &name).await
}

fn is_durable(bench: &Bench, name: &str) -> bool {
    bench.artifact(name).is_some_and(|row| row.durable)
}

/// Others are sealed durably, and deleted, as if nothing were the matter.
async fn others_go_on(bench: &Bench) {
    soon("all is settled", bench.engine.settled()).await;
    leaves(bench, "good").await;
    eventually("the next one is durable", || {
        is_durable(bench, "artifact/good")
    })
    .await;
    soon("all is settled", bench.engine.settled()).await;
    let destroyed = soon("it is deleted", destroy(bench, "artifact/good")).await;
    destroyed.expect("deleted");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_layer_that_cannot_be_confirmed_keeps_no_seal_from_being_durable() {
    let _mine = my_turn().await;
    for is_lost in [false, true] {
        let bench = require_bench!();
        let (sender, done) = mpsc::channel();
        let (pool, aside) = (bench.pool(), bench.lab.path().join("aside"));
        crash::at(Point::CommitIndexed, 1, move || {
            let layer = pool.join("layers").join(unconfirmed(&pool).remove(0));
            let fixed = if is_lost {
                fs::rename(layer, aside).expect("rename");
                None
            } else {
                Some(Fixed::new(layer))
            };
            sender.send(fixed).expect("it is waited for");
        });
        leaves(&bench, "bad").await;
        eventually("it is durable", || is_durable(&bench, "artifact/bad")).await;
        let fixed = done.try_recv().expect("there it happened");
        others_go_on(&bench).await;
        assert_eq!(names(&bench.pool().join("pending")), [""; 0]);
        if is_lost {
            let destroyed = destroy(&bench, "artifact/bad").await;
            destroyed.expect("deleted");
        } else {
            assert_eq!(unconfirmed(&bench.pool()).len(), 1);
            drop(fixed);
            // It is left alone for a while.
            while !unconfirmed(&bench.pool()).is_empty() {
                bench.engine.reap().await.expect("reap");
            }
        }
        bench.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_promise_that_cannot_be_taken_back_keeps_what_it_was_for_and_nothing_else() {
    let _mine = my_turn().await;
    let bench = require_bench!();
    let (sender, fixed) = mpsc::channel();
    let pending = bench.pool().join("pending");
    crash::at(Point::CommitIndexed, 1, move || {
        let promise = pending.join(names(&pending).remove(0));
        let fixed = Fixed::new(promise);
        sender.send(fixed).expect("it is waited for");
    });
    leaves(&bench, "bad").await;
    others_go_on(&bench).await;
    let promised = fixed.try_recv().expect("there it happened");
    let is_kept = async |bench: &Bench| {
        let input = [("type", "input"), ("from", "artifact/bad")];
        let seen = bench.look("look", &input, "f").await;
        assert_eq!(seen.as_deref(), Some("bad"));
        bench.engine.reap().await.expect("reap");
        // Deleted it would come back, made by the next start of what was promised.
        let mut destroyed = Box::pin(destroy(bench, "artifact/bad"));
        assert!(waits(&mut destroyed).await, "it is not deleted");
    };
    is_kept(&bench).await;

    // Nor can the next start; and what says that the index names it is as after a power cut.
    let mut layer = None;
    let bench = bench
        .restart_after(|pool| {
            let name = names(&pool.join("layers")).remove(0);
            let path = pool.join("layers").join(name);
            fs::rename(path.join("layer.json"), path.join("sealing.json")).expect("rename");
            layer = Some(Fixed::new(path));
        })
        .await;
    others_go_on(&bench).await;
    is_kept(&bench).await;
    drop(layer);
    drop(promised);
    eventually("it is taken back", || is_durable(&bench, "artifact/bad")).await;
    let destroyed = destroy(&bench, "artifact/bad").await;
    destroyed.expect("deleted");
    let bench = bench.restart().await;
    bench.quiet().await;
    assert!(bench.artifact("artifact/bad").is_none(), "it is back");
    bench.finish().await;
}
