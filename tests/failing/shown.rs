//! Content of an archive that pods use before it is durable. Content of another node takes the same
//! way.

use std::io::{Seek as _, Write as _};

use baggageclaim::engine::Imported;
use common::bench::soon;

use super::held::{Held, archive_of, import, name};
use super::*;

const NAME: &str = "task-cache/k";
/// The same cache, to look at.
const LOOK: [(&str, &str); 3] = [("type", "task-cache"), ("key", "k"), ("commit", "never")];

fn say(text: &'static str) -> impl FnOnce(&Path) {
    move |at| fs::write(at.join("said"), text).expect("write")
}

fn said(at: &Path) -> String {
    fs::read_to_string(at.join("said")).expect("read")
}

/// An archive of content that said `first`; nothing has its name.
async fn archive(bench: &Bench) -> PathBuf {
    bench.step("first", &TASK, say("first")).await;
    let archive = archive_of(bench).await;
    let name = name();
    let destroyed = bench.engine.destroy(&name.tenant, &name.reference).await;
    destroyed.expect("destroyed");
    bench.engine.reap().await.expect("reap");
    archive
}

/// A pod gets a fork of the content, and writes into it.
async fn fork(bench: &Bench) -> PathBuf {
    let (target, _) = bench.publish("fork", "fork", &TASK).await;
    assert_eq!(said(&target), "first");
    say("fork")(&target);
    target
}

/// The pod ends, and its volume becomes the cache, also for the next driver.
async fn becomes_the_cache(bench: Bench) {
    bench.outcome("fork", Outcome::Succeeded).await;
    bench.unpublish("fork").await;
    bench.quiet().await;
    shows_the_fork(&bench).await;
    let bench = bench.restart().await;
    shows_the_fork(&bench).await;
    bench.assert_whole().await;
    bench.finish().await;
}

async fn shows_the_fork(bench: &Bench) {
    let saw = bench.look("look", &LOOK, "said").await;
    assert_eq!(saw.as_deref(), Some("fork"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_uses_it_at_once_and_commits_on_top_of_it() {
    let _mine = my_turn().await;
    let bench = require_bench!();
    let archive = archive(&bench).await;
    let held = Held::at(Point::EntryShown);
    let (imported, ()) = tokio::join!(import(&bench, &archive), async {
        held.comes().await;
        let row = bench.artifact(NAME).expect("it is visible");
        assert!(!row.durable);
        fork(&bench).await;
        held.goes_on();
    });
    let Imported { artifact, .. } = imported.expect("imported");
    let row = bench.artifact(NAME).expect("it is there");
    assert!(row.id == artifact && row.durable);
    becomes_the_cache(bench).await;
}

/// The driver is killed before the index has it.
#[tokio::test(flavor = "multi_thread")]
async fn its_fork_survives_a_restart_that_discards_it() {
    let _mine = my_turn().await;
    let bench = require_bench!();
    let archive = archive(&bench).await;
    let (index, aside) = (
        bench.pool().join("index.redb"),
        bench.lab.path().join("aside"),
    );
    let bench = bench
        .restart_after(|_| {
            fs::copy(&index, &aside).expect("copy");
        })
        .await;
    import(&bench, &archive).await.expect("imported");
    let target = fork(&bench).await;
    let bench = bench
        .restart_after(|pool| {
            fs::copy(&aside, &index).expect("copy");
            let [layer] = &names(&pool.join("layers"))[..] else {
                panic!("it has one layer");
            };
            let layer = pool.join("layers").join(layer);
            fs::rename(layer.join("layer.json"), layer.join("sealing.json")).expect("rename");
        })
        .await;
    assert!(bench.artifact(NAME).is_none(), "it is discarded");
    assert_eq!(said(&target), "fork");
    bench.assert_whole().await;
    becomes_the_cache(bench).await;
}

/// It has the name when the commit is decided, and cannot be made durable.
#[tokio::test(flavor = "multi_thread")]
async fn a_commit_does_not_lose_its_name_to_it_while_it_may_disappear() {
    let _mine = my_turn().await;
    let bench = require_bench!();
    let archive = archive(&bench).await;
    let (target, _) = bench.publish("fork", "fork", &TASK).await;
    say("fork")(&target);
    bench.outcome("fork", Outcome::Succeeded).await;
    let seal = Held::at(Point::SealLayerMade);
    bench.unpublish("fork").await;
    seal.comes().await;
    let entry = Held::at(Point::EntryShown);
    let (imported, ()) = tokio::join!(import(&bench, &archive), async {
        entry.comes().await;
        failpoint::at(Point::EntrySynced, 1, || panic!("on purpose"));
        seal.goes_on();
        let quiet = bench.quiet();
        tokio::pin!(quiet);
        // Nothing tells that the seal waits. Without that it would be over at once.
        let early = tokio::time::timeout(Duration::from_millis(300), &mut quiet).await;
        assert!(early.is_err());
        entry.goes_on();
    });
    assert!(imported.is_err(), "{imported:?}");
    bench.quiet().await;
    shows_the_fork(&bench).await;
    bench.engine.reap().await.expect("reap");
    assert_eq!(names(&bench.pool().join("layers")).len(), 1);
    bench.assert_whole().await;
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn it_disappears_if_the_disk_loses_a_write() {
    let _mine = my_turn().await;
    let (disk, bench) = require_small_disk!();
    let archive = archive(&bench).await;
    let (at, _) = bench
        .publish("other", "other", &[("type", "scratch")])
        .await;
    let mut file = fs::File::create_new(at.join("big")).expect("create");
    file.write_all(&vec![1; 1 << 20]).expect("write");
    rustix::fs::syncfs(fs::File::open(bench.pool()).expect("open")).expect("all is well yet");
    let broken = disk.breaks_at(&bench.pool().join("volumes/other/top/big"));
    let held = Held::at(Point::EntryShown);
    let (imported, target) = tokio::join!(import(&bench, &archive), async {
        held.comes().await;
        let target = fork(&bench).await;
        file.rewind().expect("seek");
        file.write_all(&vec![2; 1 << 20])
            .expect("the page cache takes it");
        drop(file);
        held.goes_on();
        target
    });
    assert!(imported.is_err(), "{imported:?}");
    broken.works_again();
    assert!(bench.artifact(NAME).is_none());
    assert_eq!(said(&target), "fork", "the pod goes on");
    bench.outcome("fork", Outcome::Succeeded).await;
    for volume in ["fork", "other"] {
        bench.unpublish(volume).await;
    }
    soon("all is settled", bench.engine.settled()).await;
    assert!(bench.artifact(NAME).is_none(), "the fork may have lost it");
    bench.engine.reap().await.expect("reap");
    assert_eq!(bench.engine.artifacts(None).len(), 0);
    assert_eq!(names(&bench.pool().join("layers")), [""; 0]);
    let bench = bench.restart().await;
    assert_eq!(bench.engine.artifacts(None).len(), 0);
    let again = import(&bench, &archive).await.expect("imported");
    assert!(again.named);
    bench.finish().await;
    assert_eq!(disk.close(), Vec::<PathBuf>::new());
}
