//! Runs for clones, with peers that answer as a test says.
//! Tests of `clones` only.

use std::fs::File;
use std::sync::atomic::AtomicBool;

use async_trait::async_trait;
use tokio::sync::mpsc;

use super::*;
use crate::distribution::roster::Reader;
use crate::distribution::{Distribution, Patience, PeerAnswer, PeerFigures, Settings};
use crate::engine::{Config, Engine};
use crate::model::{ArtifactId, CacheKey, Name, OwnerView, Reference};
use crate::shared::{Content, LayerRef, Resolved, Source};
use crate::tree::Stop;

/// The longest that a test waits.
const LONG: Duration = Duration::from_secs(60);

type Answer = std::result::Result<Frozen, NoSnapshot>;

/// Peers that answer a question for a snapshot so.
struct Answers(Box<dyn Fn(&AskedClone) -> Answer + Send + Sync>);

impl fmt::Debug for Answers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Answers").finish_non_exhaustive()
    }
}

#[async_trait]
impl Peers for Answers {
    fn find(&self, _: &Name, _: &Reader, _: Duration, _: Patience) -> mpsc::Receiver<PeerAnswer> {
        mpsc::channel(1).1
    }

    async fn newest(&self, _: &Tenant, _: &CacheKey) -> Option<CacheKey> {
        None
    }

    async fn snapshot(&self, _: &NodeId, asked: &AskedClone) -> Answer {
        (self.0)(asked)
    }

    fn is_told(&self) -> bool {
        false
    }

    fn figures(&self) -> PeerFigures {
        PeerFigures::default()
    }
}

/// A node with a snapshot of an empty volume.
struct Empty;

impl Source for Empty {
    fn name(&self) -> String {
        "node-2".to_owned()
    }

    fn resolve(
        &self,
        _: &Tenant,
        _: &Reference,
        _: Option<ArtifactId>,
    ) -> shared::Result<Resolved> {
        unreachable!("a snapshot has no name")
    }

    fn open(
        &self,
        _: &Tenant,
        _: &LayerRef,
        _: &File,
        _: Stop<'_>,
    ) -> shared::Result<Box<dyn Content>> {
        unreachable!("there is no layer")
    }
}

#[expect(clippy::unnecessary_wraps, reason = "it is an answer of a peer")]
fn empty() -> Answer {
    Ok(Frozen {
        layers: Vec::new(),
        size: 0,
        view: OwnerView::default(),
        source: Arc::new(Empty),
    })
}

struct World {
    distribution: Arc<Distribution>,
    engine: Engine,
    _folder: tempfile::TempDir,
}

impl World {
    async fn new(answer: impl Fn(&AskedClone) -> Answer + Send + Sync + 'static) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let config = Config::of_copies(folder.path());
        let engine = Engine::open(config).await.expect("it opens");
        let peers: Arc<dyn Peers> = Arc::new(Answers(Box::new(answer)));
        let settings = Settings::default();
        let distribution = Distribution::start(engine.clone(), None, Some(peers), settings);
        Self {
            distribution,
            engine,
            _folder: folder,
        }
    }

    async fn end(self) {
        self.distribution.stop().await;
        self.engine.shutdown().await;
    }
}

/// A request for the volume `vol-1`, which is wanted while this says so.
fn request(snapshot: &str, wanted: &Arc<AtomicBool>) -> CloneRequest {
    let wanted = Arc::clone(wanted);
    CloneRequest {
        claim: CreateClaim::empty("clone"),
        asked: AskedClone {
            volume: "vol-1".parse().expect("an id"),
            snapshot: snapshot.parse().expect("an id"),
        },
        node: NodeId::new("node-2").expect("a name"),
        wanted: Arc::new(move || {
            let is_wanted = wanted.load(Ordering::Relaxed);
            Box::pin(async move { Some(is_wanted) })
        }),
    }
}

fn flag(is_set: bool) -> Arc<AtomicBool> {
    Arc::new(AtomicBool::new(is_set))
}

#[tokio::test]
async fn a_clone_that_ends_in_a_panic_fails_and_can_be_stopped() {
    let world = World::new(|_| panic!("a defect, for this test")).await;
    let request = request("snap-1", &flag(true));
    let failed = world.distribution.clone_volume(request.clone(), LONG).await;
    assert!(
        matches!(&failed, Cloned::Failed(error) if matches!(**error, Error::Defect)),
        "{failed:?}"
    );
    let volume = request.asked.volume.clone();
    let begun = world.distribution.clone_volume(request, Duration::ZERO);
    begun.await;
    let stopped = tokio::time::timeout(LONG, world.distribution.stop_clone(&volume));
    stopped.await.expect("it ends");
    world.end().await;
}

#[tokio::test]
async fn a_clone_goes_on_for_the_object_in_the_place_of_its_own() {
    let (asked, mut questions) = mpsc::unbounded_channel();
    let answers = flag(false);
    let is_there = Arc::clone(&answers);
    let world = World::new(move |_| {
        asked.send(()).expect("the test listens");
        if is_there.load(Ordering::Relaxed) {
            empty()
        } else {
            Err(NoSnapshot::NotYet("it copies".to_owned()))
        }
    });
    let world = world.await;
    let (first, second) = (flag(true), flag(true));
    let clone = |wanted, wait| {
        let request = request("snap-1", wanted);
        world.distribution.clone_volume(request, wait)
    };
    let begun = clone(&first, Duration::ZERO).await;
    assert!(matches!(begun, Cloned::Runs(_)), "{begun:?}");
    for _ in 0..2 {
        questions.recv().await.expect("it asks");
    }
    first.store(false, Ordering::Relaxed);
    let joined = clone(&second, Duration::ZERO).await;
    assert!(matches!(joined, Cloned::Runs(_)), "{joined:?}");
    answers.store(true, Ordering::Relaxed);
    let made = clone(&second, LONG).await;
    assert!(matches!(made, Cloned::Made(_)), "{made:?}");
    world.end().await;
}

#[tokio::test]
async fn a_clone_that_nothing_wants_ends_while_its_source_does_not_answer() {
    let world = World::new(|_| Err(NoSnapshot::NotYet("it is off".to_owned()))).await;
    let request = request("snap-1", &flag(false));
    let ended = world.distribution.clone_volume(request, LONG).await;
    assert!(matches!(&ended, Cloned::Failed(_)), "{ended:?}");
    world.end().await;
}

#[tokio::test]
async fn a_clone_of_another_snapshot_ends_the_first() {
    let world = World::new(|asked| match asked.snapshot.as_str() {
        "snap-1" => Err(NoSnapshot::NotYet("it is off".to_owned())),
        _ => empty(),
    });
    let world = world.await;
    let wanted = flag(true);
    let first = request("snap-1", &wanted);
    let begun = world.distribution.clone_volume(first, Duration::ZERO);
    assert!(matches!(begun.await, Cloned::Runs(_)));
    let second = request("snap-2", &wanted);
    let made = world.distribution.clone_volume(second, LONG).await;
    assert!(matches!(made, Cloned::Made(_)), "{made:?}");
    world.end().await;
}
