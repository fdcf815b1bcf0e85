//! Eviction continues during long work whose duration a tenant decides: measuring, merging or
//! deleting a volume. A publish that finds the pool full is served all the same.

use common::bench::soon;

use super::*;

/// Within which time such a publish is served.
const SOON: Duration = Duration::from_secs(2);
/// How many trees there are.
const TREES: usize = 6;
/// How many names a tree has, if `BAGGAGECLAIM_TEST_FILES` does not say.
const FILES: usize = 100_000;
/// The number of unused caches, and the bytes of each.
const CACHES: usize = 8;
const BYTES: usize = 8 << 20;

#[expect(
    clippy::disallowed_methods,
    reason = "a name of the test's, not the driver's"
)]
fn files() -> usize {
    let told = std::env::var("BAGGAGECLAIM_TEST_FILES");
    told.map_or(FILES, |told| told.parse().expect("a number"))
}

/// Makes a tree of so many names, and of few inodes: it is soon made, and takes as long as any
/// other to walk.
fn grow(at: &Path, files: usize) {
    const LINKS: usize = 50_000;
    let directory = Dir::open(at).expect("open");
    let name = |number: usize| format!("{number}");
    for number in 0..files {
        let first = number - number % LINKS;
        if number == first {
            directory.write_new(name(number), b"x").expect("write");
        } else {
            let (from, to) = (name(first), name(number));
            let linked = rustix::fs::linkat(
                &directory,
                from,
                &directory,
                to,
                rustix::fs::AtFlags::empty(),
            );
            linked.expect("link");
        }
    }
}

/// A pool with unused caches, the first of which is a tree.
async fn with_unused_caches(trees: usize) -> Result<Bench, String> {
    let bytes = (256 << 20) + trees * files() * 64;
    let lab = Lab::try_sized(Fs::Ext4, bytes as u64)?;
    let bench = Bench::with(lab, |config| {
        config.backend = Some(BackendKind::Overlay);
        config.high_watermark = 95;
        // Some of the unused ones are enough for it.
        config.low_watermark = 90;
    });
    let bench = bench.await;
    for number in 0..CACHES {
        let key = format!("unused-{number}");
        let cache = [("type", "task-cache"), ("key", key.as_str())];
        let fill = |at: &Path| match number {
            0 if trees > 0 => grow(at, files()),
            _ => fs::write(at.join("f"), vec![1; BYTES]).expect("write"),
        };
        bench.step(&key, &cache, fill).await;
    }
    bench.engine.reap().await.expect("reap");
    Ok(bench)
}

/// Leaves no space in the pool.
pub(super) fn fill_up(at: &Path) {
    use std::io::Write as _;
    let mut file = fs::File::create(at.join("big")).expect("create");
    let mut size = 1 << 20;
    while size > 0 {
        if file.write_all(&vec![1; size]).is_err() {
            size /= 2;
        }
    }
}

/// Publishes until space was made for it; how long the longest took.
async fn publish_until_space_is_freed(bench: &Bench) -> Duration {
    let mut longest = Duration::ZERO;
    for number in 0.. {
        if bench.artifact("task-cache/unused-1").is_none() {
            break;
        }
        let volume = format!("next-{number}");
        let began = Instant::now();
        let published = bench.try_publish("next", &volume, &[]).await;
        let took = began.elapsed();
        published.unwrap_or_else(|error| panic!("{volume} after {took:?}: {error}"));
        longest = longest.max(took);
    }
    longest
}

async fn unpublish_all(bench: &Bench) {
    for row in bench.engine.volumes(None) {
        if bench.target(row.id.as_str()).exists() {
            bench.unpublish(row.id.as_str()).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn room_is_made_while_large_trees_are_measured_and_deleted() {
    let _mine = my_turn().await;
    let bench = match with_unused_caches(TREES + 1).await {
        Ok(bench) => bench,
        Err(reason) => return common::skip(&reason),
    };
    for number in 0..TREES {
        let volume = format!("tree-{number}");
        let (at, _) = bench.publish("large", &volume, &[]).await;
        grow(&at, files());
    }
    let (at, _) = bench.publish("filler", "filler", &[]).await;
    fill_up(&at);
    assert!(bench.artifact("task-cache/unused-0").is_some());

    // As kubelet does each minute.
    for number in 1..TREES {
        let volume = format!("tree-{number}");
        let (id, at) = (volume.parse().expect("an id"), bench.target(&volume));
        let stats = bench.engine.stats(&id, &at).await.expect("stats");
        assert!(stats.usage.is_none(), "it is measured from now on");
    }
    bench.unpublish("tree-0").await;
    let longest = publish_until_space_is_freed(&bench).await;
    eprintln!(
        "{} names each: the longest publish took {longest:?}",
        files()
    );
    assert!(longest < SOON, "{longest:?}");
    if files() > FILES {
        // To delete all would take minutes.
        return bench.engine.shutdown().await;
    }
    unpublish_all(&bench).await;
    bench.finish().await;
}

/// A merge of a cache that takes until it is told to go on.
struct LongMerge {
    go_on: mpsc::Sender<()>,
    reaped: tokio::task::JoinHandle<Result<baggageclaim::engine::Reaped, Error>>,
}

impl LongMerge {
    async fn begin(bench: &Bench) -> Self {
        let (reached, merging) = mpsc::channel();
        let (go_on, told) = mpsc::channel::<()>();
        failpoint::at(Point::FlattenMerged, 1, move || {
            reached.send(()).expect("it is waited for");
            // Also when the test has failed.
            let _told_or_over = told.recv();
        });
        for number in 0..20 {
            let volume = format!("link-{number}");
            let link = |at: &Path| fs::write(at.join(&volume), "link").expect("write");
            bench.step(&volume, &TASK, link).await;
        }
        let engine = bench.engine.clone();
        let reaped = tokio::spawn(async move { engine.reap().await });
        eventually("layers are merged", || merging.try_recv().is_ok()).await;
        Self { go_on, reaped }
    }

    async fn goes_on(self) {
        self.go_on.send(()).expect("it waits");
        let reaped = soon("all is collected", self.reaped).await;
        reaped.expect("no panic").expect("reap");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn room_is_made_while_layers_are_merged() {
    let _mine = my_turn().await;
    let bench = match with_unused_caches(0).await {
        Ok(bench) => bench,
        Err(reason) => return common::skip(&reason),
    };
    let merge = LongMerge::begin(&bench).await;
    let (at, _) = bench.publish("filler", "filler", &[]).await;
    fill_up(&at);
    let longest = publish_until_space_is_freed(&bench).await;
    assert!(longest < SOON, "{longest:?}");
    merge.goes_on().await;
    unpublish_all(&bench).await;
    bench.engine.reap().await.expect("reap");
    let merged = bench.artifact("task-cache/k").expect("it was used last");
    assert!(merged.layers <= 16, "{}", merged.layers);
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn room_is_made_while_index_and_directories_are_compared() {
    let _mine = my_turn().await;
    let bench = match with_unused_caches(0).await {
        Ok(bench) => bench,
        Err(reason) => return common::skip(&reason),
    };
    let (reached, comparing) = mpsc::channel();
    let (go_on, told) = mpsc::channel::<()>();
    failpoint::at(Point::CheckListed, 1, move || {
        reached.send(()).expect("it is waited for");
        // Also when the test has failed.
        let _told_or_over = told.recv();
    });
    let engine = bench.engine.clone();
    let compared = tokio::spawn(async move { engine.check().await });
    eventually("they are compared", || comparing.try_recv().is_ok()).await;
    let (at, _) = bench.publish("filler", "filler", &[]).await;
    fill_up(&at);
    let longest = publish_until_space_is_freed(&bench).await;
    assert!(longest < SOON, "{longest:?}");
    // Its next look is at layers that were evicted meanwhile.
    go_on.send(()).expect("it waits");
    let found = soon("they are compared", compared).await;
    assert_eq!(found.expect("no panic").expect("compared"), []);
    unpublish_all(&bench).await;
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_merge_keeps_no_layers_of_what_is_deleted_meanwhile() {
    let _mine = my_turn().await;
    let bench = require_bench!();
    let merge = LongMerge::begin(&bench).await;
    let (tenant, name) = ("ci".parse().expect("label"), "task-cache/k".parse());
    let name = name.expect("name");
    let destroyed = bench.engine.destroy(&tenant, &name);
    soon("it is deleted", destroyed).await.expect("destroyed");
    // Earlier generations, too: the merge may be of the layers of one of them.
    let is_empty = || bench.engine.artifacts(None).is_empty();
    eventually("nothing stacks the layers", is_empty).await;
    let placed = failpoint::visits(Point::FlattenPlaced);
    merge.goes_on().await;
    assert_eq!(
        failpoint::visits(Point::FlattenPlaced),
        placed,
        "it went on"
    );
    bench.engine.reap().await.expect("reap");
    assert_eq!(names(&bench.pool().join("layers")), [""; 0]);
    bench.finish().await;
}
