//! Seals whose last steps fail after the index commit: a layer that cannot be marked as named, an
//! intent that cannot be withdrawn. Other seals still become durable, and nothing deleted returns.

use std::io::{Seek as _, Write as _};

use common::bench::soon;

use super::held::Held;
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
        failpoint::at(Point::CommitIndexed, 1, move || {
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

/// It needs only a few blocks. A copy takes space that others need, and is given up.
#[tokio::test(flavor = "multi_thread")]
async fn a_seal_that_copies_nothing_waits_for_space_for_as_long_as_it_takes() {
    let _mine = my_turn().await;
    let bench = require_bench!(|config| config.room_wait = Duration::ZERO);
    let (at, _) = bench.publish("made", "made", &output("made")).await;
    let held = fs::File::create(at.join("held")).expect("create");
    bench.unpublish("made").await;
    // There is space for the layer's directory, and none for the record in it.
    let layer = names(&bench.pool().join("pending")).remove(0);
    fs::create_dir(bench.pool().join("layers").join(layer)).expect("mkdir");
    let filler = bench.lab.dir("filler");
    space::fill_up(&filler);
    let before = failpoint::visits(Point::SealLayerMade);
    drop(held);
    eventually("it is tried a third time", || {
        failpoint::visits(Point::SealLayerMade) >= before + 3
    })
    .await;
    fs::remove_file(filler.join("big")).expect("space again");
    eventually("it is durable", || is_durable(&bench, "artifact/made")).await;
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_promise_that_cannot_be_taken_back_keeps_what_it_was_for_and_nothing_else() {
    let _mine = my_turn().await;
    let bench = require_bench!();
    let (sender, fixed) = mpsc::channel();
    let pending = bench.pool().join("pending");
    failpoint::at(Point::CommitIndexed, 1, move || {
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
        let destroyed = soon("it is refused", destroy(bench, "artifact/bad")).await;
        let is_refused = matches!(destroyed, Err(Error::SealIntentStays(_)));
        assert!(is_refused, "{destroyed:?}");
        assert!(
            bench.artifact("artifact/bad").is_some(),
            "it is not deleted"
        );
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
    // Nor is it tried again before the next start.
    is_kept(&bench).await;
    let bench = bench.restart().await;
    eventually("it is taken back", || is_durable(&bench, "artifact/bad")).await;
    let destroyed = destroy(&bench, "artifact/bad").await;
    destroyed.expect("deleted");
    let bench = bench.restart().await;
    bench.quiet().await;
    assert!(bench.artifact("artifact/bad").is_none(), "it is back");
    bench.finish().await;
}

/// A commit that stops after its `syncfs` until a later seal of the same name can be forked. Then
/// the index is copied: a power cut leaves this.
struct Overtaken {
    synced: mpsc::Receiver<()>,
    go_on: mpsc::Sender<()>,
    indexed: mpsc::Receiver<()>,
}

impl Overtaken {
    /// Stops the next commit. The copy of the index goes to `aside`.
    fn arm(pool: &Path, aside: &Path) -> Self {
        let (say_synced, synced) = mpsc::channel();
        let (go_on, may_go_on) = mpsc::channel::<()>();
        let (say_indexed, indexed) = mpsc::channel();
        let (index, aside) = (pool.join("index.redb"), aside.to_owned());
        failpoint::at(Point::CommitSynced, 1, move || {
            say_synced.send(()).expect("it is waited for");
            may_go_on.recv_timeout(NEVER).expect("it goes on");
            failpoint::at(Point::CommitIndexed, 1, move || {
                fs::copy(index, aside).expect("copy");
                say_indexed.send(()).expect("it is waited for");
            });
        });
        Self {
            synced,
            go_on,
            indexed,
        }
    }

    /// Waits for the first commit, starts the later seal with `leave`, and ends the first commit
    /// when the later artifact can be forked.
    #[expect(
        clippy::disallowed_methods,
        reason = "a test waits for the driver's thread, which is no task"
    )]
    async fn by(self, bench: &Bench, leave: impl AsyncFnOnce()) {
        let soon = |told: &mpsc::Receiver<()>| told.recv_timeout(NEVER).expect("it comes");
        tokio::task::block_in_place(|| soon(&self.synced));
        let first = bench.artifact(CACHE).expect("it can be forked").id;
        leave().await;
        eventually("the later one can be forked", || {
            bench.artifact(CACHE).is_some_and(|row| row.id != first)
        })
        .await;
        self.go_on.send(()).expect("it waits");
        tokio::task::block_in_place(|| soon(&self.indexed));
    }
}

const CACHE: &str = "task-cache/k";

/// Committed whatever the pod's outcome is.
const ALWAYS: [(&str, &str); 3] = [("type", "task-cache"), ("key", "k"), ("commit", "always")];

/// The same cache, to look at.
const LOOK: [(&str, &str); 3] = [("type", "task-cache"), ("key", "k"), ("commit", "never")];

/// The artifact that the cache's name points at in the index.
fn named_in(index: &Path) -> Option<String> {
    let folder = tempfile::tempdir().expect("a folder");
    fs::copy(index, folder.path().join("index.redb")).expect("copy");
    let contents = Index::read_only(&Dir::open(folder.path()).expect("open")).expect("read");
    let mut names = contents.names.into_iter();
    let (_, id) = names.find(|(name, _)| name.reference.to_string() == CACHE)?;
    let mut artifacts = contents.artifacts.into_iter();
    artifacts
        .find(|artifact| artifact.id == id)
        .map(|artifact| artifact.id.to_string())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_committed_has_its_name_after_a_power_cut_though_a_later_one_took_it() {
    let _mine = my_turn().await;
    for older in [false, true] {
        let bench = require_bench!();
        let write = |at: &Path, text: &str| fs::write(at.join("f"), text).expect("write");
        if older {
            let base = |at: &Path| write(at, "base");
            bench.step("base", &ALWAYS, base).await;
            soon("all is settled", bench.engine.settled()).await;
        }
        for pod in ["first", "later"] {
            let (at, _) = bench.publish(pod, pod, &ALWAYS).await;
            write(&at, pod);
        }
        let aside = bench.lab.path().join("aside");
        let overtaken = Overtaken::arm(&bench.pool(), &aside);
        bench.unpublish("first").await;
        let leave = async || {
            // A fork keeps the first one's layer, which a power cut would leave in its place.
            let input = [("type", "input"), ("from", CACHE)];
            bench.publish("fork", "fork", &input).await;
            bench.unpublish("later").await;
        };
        overtaken.by(&bench, leave).await;
        soon("all is settled", bench.engine.settled()).await;
        assert_eq!(
            bench.look("look", &LOOK, "f").await.as_deref(),
            Some("later")
        );

        // The power fails when the first is durable and the later one is not.
        let bench = bench
            .restart_after(|pool| {
                fs::rename(&aside, pool.join("index.redb")).expect("rename");
            })
            .await;
        bench.engine.reap().await.expect("reap");
        let found = bench.look("look", &LOOK, "f").await;
        assert_eq!(
            found.as_deref(),
            Some("first"),
            "there was an older one: {older}"
        );
        assert_eq!(bench.engine.artifacts(None).len(), 1);
        bench.unpublish("fork").await;
        bench.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_committed_has_its_name_after_the_disk_lost_a_later_one() {
    let _mine = my_turn().await;
    let (disk, bench) = require_small_disk!();
    for pod in ["base", "first", "later"] {
        let (at, _) = bench.publish(pod, pod, &ALWAYS).await;
        fs::write(at.join("f"), pod).expect("write");
    }
    bench.unpublish("base").await;
    soon("all is settled", bench.engine.settled()).await;
    let mut file = fs::File::create_new(bench.target("later").join("big")).expect("create");
    file.write_all(&vec![1; 1 << 20]).expect("write");
    rustix::fs::syncfs(fs::File::open(bench.pool()).expect("open")).expect("all is well yet");
    let broken = disk.breaks_at(&bench.pool().join("volumes/later/top/big"));

    let folder = tempfile::tempdir().expect("a folder");
    let aside = folder.path().join("aside");
    let overtaken = Overtaken::arm(&bench.pool(), &aside);
    bench.unpublish("first").await;
    let lose = async || {
        file.rewind().expect("seek");
        file.write_all(&vec![2; 1 << 20])
            .expect("the page cache takes it");
        drop(file);
        bench.unpublish("later").await;
    };
    overtaken.by(&bench, lose).await;
    eventually("the disk says that it failed", || {
        bench.pool().join("doomed").exists()
    })
    .await;
    eventually("the later one is gone", || bench.row("later").is_none()).await;
    broken.works_again();

    let named = bench.artifact(CACHE).expect("the first has its name again");
    assert!(named.durable);
    let in_index = named_in(&bench.pool().join("index.redb"));
    assert_eq!(in_index, Some(named.id.to_string()), "memory and index");
    let bench = bench.restart().await;
    bench.engine.reap().await.expect("reap");
    let found = bench.look("look", &LOOK, "f").await;
    assert_eq!(found.as_deref(), Some("first"));
    assert_eq!(bench.artifact(CACHE).expect("it is there").id, named.id);
    bench.finish().await;
    assert_eq!(disk.close(), Vec::<PathBuf>::new());
}

/// The seal of another volume hears of the failure, after this one was found to be sound.
#[tokio::test(flavor = "multi_thread")]
async fn a_seal_during_which_the_disk_loses_a_write_is_given_up() {
    let _mine = my_turn().await;
    let (disk, bench) = require_small_disk!();
    let (at, _) = bench.publish("victim", "victim", &output("victim")).await;
    let mut file = fs::File::create_new(at.join("big")).expect("create");
    file.write_all(&vec![1; 1 << 20]).expect("write");
    let pool = fs::File::open(bench.pool()).expect("open");
    rustix::fs::syncfs(pool).expect("all is well yet");
    let held = Held::at(Point::SealContentMoved);
    let broken = disk.breaks_at(&bench.pool().join("volumes/victim/top/big"));
    file.rewind().expect("seek");
    let written = file.write_all(&vec![2; 1 << 20]);
    written.expect("the page cache takes it");
    drop(file);
    bench.unpublish("victim").await;
    held.comes().await;
    leaves(&bench, "other").await;
    let is_noted = || {
        let noted = Dir::open(&bench.pool()).and_then(|pool| pool.has("doomed"));
        noted.expect("stat") && bench.row("other").is_none()
    };
    eventually("the disk says that it failed", is_noted).await;
    broken.works_again();
    held.goes_on();
    eventually("it is given up", || bench.row("victim").is_none()).await;
    for name in ["artifact/victim", "artifact/other"] {
        assert!(bench.artifact(name).is_none(), "{name} may have lost bytes");
    }
    bench.finish().await;
    assert_eq!(disk.close(), Vec::<PathBuf>::new());
}
