//! Artifacts that come from another node, layer by layer: round trips between two engines, names,
//! layers that are here already, and failures.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use baggageclaim::archive;
use baggageclaim::engine::{
    Engine, Error, LayerPlace, OpenArtifact, ReceiveError, ReceiveLayer, ReceiveRequest, Received,
};
use baggageclaim::model::{ArtifactId, Name, Outcome, Sha256, Sharing, Timestamp};

use crate::common::bench::{Bench, Ground, NEVER, names, waits};
use crate::common::{Fs, Lab, assert_same, layers, tree};
use crate::engine::{MIB, assert_left, bench, shown};
use crate::tables::tables;

pub(crate) const CACHE: [(&str, &str); 2] = [("type", "task-cache"), ("key", "k")];
pub(crate) const NAME: &str = "task-cache/k";
pub(crate) const OVERLAY: Ground = Ground::ALL[0];

type Answer = Result<Received, ReceiveError<archive::Error>>;

/// What a node sends.
pub(crate) async fn opened(bench: &Bench, name: &str) -> Arc<OpenArtifact> {
    tables(bench, name).await;
    let id = bench.artifact(name).expect("it is there").id;
    let engine = bench.engine.clone();
    let opened = layers::apart(move || engine.open_layers(id)).await;
    let opened = opened.expect("it opens");
    Arc::new(opened.expect("all layers have tables"))
}

/// The request for it.
fn request(open: &OpenArtifact, number: u64) -> ReceiveRequest {
    let layers = open.layers.iter().map(|layer| ReceiveLayer {
        digest: Sha256(layer.table.digest().sha256),
        bytes: layer.table.bytes(),
    });
    ReceiveRequest {
        name: open.artifact.name(),
        artifact: open.artifact.id,
        created: open.artifact.created,
        made_by: open.artifact.made_by.clone(),
        ttl: None,
        sharing: Sharing {
            number: Some(number),
            ..Sharing::default()
        },
        fence: open.artifact.fence,
        layers: layers.collect(),
    }
}

/// Another engine receives it; `broken` of the layers cannot be made.
async fn receive_but(
    to: &Bench,
    open: &Arc<OpenArtifact>,
    request: ReceiveRequest,
    broken: Option<usize>,
) -> Answer {
    let (engine, open) = (to.engine.clone(), Arc::clone(open));
    let job = move || {
        engine.receive(
            &request,
            &AtomicU64::new(0),
            |layer, place| {
                let source = &open.layers[layer];
                if broken == Some(layer) {
                    return Err(archive::Error::Cut);
                }
                layers::make(&source.table, &source.holder, place)
            },
            || Ok(()),
        )
    };
    layers::apart(job).await
}

async fn receive(to: &Bench, open: &Arc<OpenArtifact>, number: u64) -> Received {
    let received = receive_but(to, open, request(open, number), None).await;
    received.expect("it is received")
}

/// What each commit of a cache does.
#[expect(
    clippy::disallowed_methods,
    reason = "a pod deletes what it likes in its volume"
)]
fn generation(root: &Path, number: usize) {
    let at = |name: String| root.join(name);
    if number == 0 {
        tree::odd(root);
        for dir in ["goes", "replaced", "stays"] {
            tree::files(&at(dir.to_owned()), 150);
        }
        for file in 0..12 {
            fs::write(at(format!("file-{file}")), file.to_string()).expect("write");
        }
        return;
    }
    fs::remove_file(at(format!("file-{number}"))).expect("rm");
    fs::write(at(format!("new-{number}")), vec![7; 1000 * number]).expect("write");
    fs::hard_link(
        at("stays/d0000/f000001".to_owned()),
        at(format!("link-{number}")),
    )
    .expect("link");
    fs::write(at("stays/d0001/f000120".to_owned()), number.to_string()).expect("write");
    match number {
        3 => fs::remove_dir_all(at("goes".to_owned())).expect("rm"),
        5 => {
            fs::remove_dir_all(at("replaced".to_owned())).expect("rm");
            fs::create_dir(at("replaced".to_owned())).expect("mkdir");
            fs::write(at("replaced/other".to_owned()), "new").expect("write");
        }
        7 => fs::create_dir_all(at("goes/again".to_owned())).expect("mkdir"),
        _ => {}
    }
}

#[tokio::test]
async fn ten_generations_arrive_on_every_backend() {
    for from in Ground::ALL {
        let source = bench!(from);
        let mut others = Vec::new();
        for to in Ground::ALL {
            others.push((to, bench!(to)));
        }
        let is_stack = from == OVERLAY;
        for number in 0..if is_stack { 10 } else { 2 } {
            let volume = format!("step-{number}");
            source
                .step(&volume, &CACHE, |root| generation(root, number))
                .await;
            let expected = shown(&source, &format!("before-{number}"), NAME)
                .await
                .archived();
            let open = opened(&source, NAME).await;
            let sent: Vec<Sha256> = tables(&source, NAME).await;
            assert_eq!(open.layers.len(), if is_stack { number + 1 } else { 1 });
            for (to, other) in &others {
                println!("{from:?} to {to:?}, generation {number}");
                let received = receive(other, &open, number as u64 + 1).await;
                assert!(received.named);
                let stacks = is_stack && *to == OVERLAY;
                assert_eq!(received.reused, if stacks { number } else { 0 });
                let after = shown(other, &format!("after-{number}"), NAME).await;
                assert_same(&expected, &after);
                if *to == OVERLAY {
                    assert_eq!(tables(other, NAME).await, sent);
                }
            }
        }
        for (_, other) in others {
            other.engine.reap().await.expect("reap");
            let other = other.restart().await;
            let last = other.artifact(NAME).expect("it is there");
            assert!(last.durable);
            other.finish().await;
        }
        source.finish().await;
    }
}

/// The cache is committed on the one node and received by the other.
async fn two_nodes() -> Option<(Bench, Bench, Arc<OpenArtifact>)> {
    let (source, other) = (OVERLAY.bench().await, OVERLAY.bench().await);
    let (source, other) = match (source, other) {
        (Ok(source), Ok(other)) => (source, other),
        (Err(reason), _) | (_, Err(reason)) => {
            crate::common::skip(&reason);
            return None;
        }
    };
    write(&source, "first", "first").await;
    write(&source, "second", "second").await;
    let open = opened(&source, NAME).await;
    Some((source, other, open))
}

pub(crate) async fn write(bench: &Bench, volume: &str, text: &str) {
    let work = |root: &Path| fs::write(root.join(text), text).expect("write");
    bench.step(volume, &CACHE, work).await;
}

async fn sees(bench: &Bench, volume: &str, file: &str) -> bool {
    let fork = [("type", "input"), ("from", NAME)];
    bench.look(volume, &fork, file).await.is_some()
}

#[tokio::test]
async fn a_rebuilt_index_knows_what_was_received() {
    let Some((source, other, open)) = two_nodes().await else {
        return;
    };
    receive(&other, &open, 7).await;
    let other = other
        .restart_after(|pool| {
            let rebuilt = Engine::rebuild_index(pool).expect("it is rebuilt");
            assert_eq!((rebuilt.artifacts, rebuilt.nameless), (1, vec![]));
        })
        .await;
    assert!(sees(&other, "looks", "second").await);
    let local = local(&other).expect("it is there");
    assert_eq!(local.sharing.number, Some(7));
    assert!(other.engine.to_share().is_empty());
    drop(open);
    source.finish().await;
    other.finish().await;
}

pub(crate) fn local(bench: &Bench) -> Option<baggageclaim::engine::LocalArtifact> {
    let tenant = "ci".parse().expect("a tenant");
    let reference = NAME.parse().expect("a reference");
    bench.engine.local(&tenant, &reference)
}

#[tokio::test]
async fn a_failure_in_the_middle_leaves_nothing() {
    for to in Ground::ALL {
        let (source, other) = (bench!(OVERLAY), bench!(to));
        write(&source, "first", "first").await;
        write(&source, "second", "second").await;
        let open = opened(&source, NAME).await;
        for broken in [0, 1] {
            let failed = receive_but(&other, &open, request(&open, 1), Some(broken)).await;
            let is_ours = |error: &ReceiveError<archive::Error>| matches!(error, ReceiveError::Layer { layer, .. } if *layer == broken);
            assert!(failed.as_ref().is_err_and(is_ours), "{failed:?}");
            assert_left(&other, 0, "a failure").await;
        }
        let other_table = ReceiveRequest {
            layers: vec![ReceiveLayer {
                digest: Sha256([1; 32]),
                bytes: 0,
            }],
            ..request(&open, 1)
        };
        let refused = receive_but(&other, &open, other_table, None).await;
        assert!(
            matches!(refused, Err(ReceiveError::Engine(Error::Defect))),
            "{refused:?}"
        );
        assert_left(&other, 0, "another table").await;
        assert!(receive(&other, &open, 1).await.named);
        drop(open);
        source.finish().await;
        other.finish().await;
    }
}

#[tokio::test]
async fn the_parts_of_a_failed_transfer_count_as_free_for_new_volumes() {
    let (source, other) = (bench!(OVERLAY), bench!(OVERLAY));
    let large = |root: &Path| fs::write(root.join("large"), vec![7; 16 << 20]).expect("write");
    source.step("large", &CACHE, large).await;
    write(&source, "small", "small").await;
    let open = opened(&source, NAME).await;
    let available = async || {
        other
            .engine
            .capacity()
            .await
            .expect("it is known")
            .available
    };
    let before = available().await;
    let failed = receive_but(&other, &open, request(&open, 1), Some(0)).await;
    failed.expect_err("the newer layer is broken");
    let after = available().await;
    let less = before.saturating_sub(after);
    assert!(less < MIB, "{less} bytes less than {before}");
    let kept = receive(&other, &open, 1).await.kept;
    assert_eq!(kept, 16 * MIB, "the large layer is still there");
    drop(open);
    source.finish().await;
    other.finish().await;
}

#[tokio::test]
async fn what_was_cleared_meanwhile_gets_no_name() {
    let Some((source, other, open)) = two_nodes().await else {
        return;
    };
    let (engine, sent, request) = (other.engine.clone(), Arc::clone(&open), request(&open, 1));
    let job = move || {
        let make = |layer: usize, place: &LayerPlace<'_>| {
            let source = &sent.layers[layer];
            layers::make(&source.table, &source.holder, place)
        };
        let cleared = || Err(Error::Cleared(request.name.clone()));
        engine.receive(&request, &AtomicU64::new(0), make, cleared)
    };
    let refused = layers::apart(job).await;
    assert!(
        matches!(refused, Err(ReceiveError::Engine(Error::Cleared(_)))),
        "{refused:?}"
    );
    assert!(local(&other).is_none());
    assert_left(&other, 0, "a clear").await;
    assert!(receive(&other, &open, 1).await.named);
    drop(open);
    source.finish().await;
    other.finish().await;
}

#[tokio::test]
async fn another_tenants_artifact_is_neither_replaced_nor_used() {
    let Some((source, other, open)) = two_nodes().await else {
        return;
    };
    receive(&other, &open, 1).await;
    let name = Name {
        tenant: "other".parse().expect("a tenant"),
        ..open.artifact.name()
    };
    let same_id = ReceiveRequest {
        name: name.clone(),
        ..request(&open, 1)
    };
    let refused = receive_but(&other, &open, same_id.clone(), None).await;
    assert!(
        matches!(refused, Err(ReceiveError::Taken(_))),
        "{refused:?}"
    );
    let another = ReceiveRequest {
        artifact: ArtifactId::from_bits(7),
        ..same_id
    };
    let received = receive_but(&other, &open, another, None).await;
    assert_eq!(received.expect("it is received").reused, 0);
    assert_eq!(names(&other.pool().join("layers")).len(), 4);
    // Of the same tenant, nothing is made.
    let again = ReceiveRequest {
        artifact: ArtifactId::from_bits(8),
        name: Name {
            reference: "task-cache/other".parse().expect("a reference"),
            ..open.artifact.name()
        },
        ..request(&open, 1)
    };
    let received = receive_but(&other, &open, again.clone(), Some(0)).await;
    assert_eq!(received.expect("it is received").reused, 2);
    // Nothing is made of content that a peer found damaged.
    let damaged = [request(&open, 1).artifact, again.artifact];
    let engine = other.engine.clone();
    let marked = layers::apart(move || {
        damaged.map(|id| engine.set_sharing(id, |sharing| sharing.damaged = true))
    });
    for marked in marked.await {
        assert!(marked.expect("it is marked"));
    }
    let fresh = ReceiveRequest {
        artifact: ArtifactId::from_bits(9),
        ..again
    };
    let received = receive_but(&other, &open, fresh, None).await;
    assert_eq!(received.expect("it is received").reused, 0);
    drop(open);
    source.finish().await;
    other.finish().await;
}

#[tokio::test]
async fn the_tiers_number_decides_where_it_is_known_and_else_the_time() {
    let Some((source, other, open)) = two_nodes().await else {
        return;
    };
    let as_of = |id: u128, number: u64, created: u64| ReceiveRequest {
        artifact: ArtifactId::from_bits(id),
        created: Timestamp(created),
        ..request(&open, number)
    };
    let named = async |request: ReceiveRequest| {
        let received = receive_but(&other, &open, request, None).await;
        received.expect("it is received").named
    };
    // The clock of the first one's node is years ahead.
    assert!(named(as_of(1, 1, u64::MAX / 4)).await);
    assert!(named(as_of(2, 2, 1000)).await);
    let holder = local(&other).expect("it is there");
    assert_eq!(holder.id, ArtifactId::from_bits(2));
    // This node's own commit is newer than what another one made before.
    write(&other, "own", "own").await;
    assert!(!named(as_of(3, 3, 2000)).await);
    assert!(sees(&other, "looks", "own").await);
    assert!(named(as_of(4, 4, u64::MAX / 4)).await);
    assert!(!sees(&other, "looks-again", "own").await);
    // What is here already is not received again.
    let again = receive_but(&other, &open, as_of(4, 4, 0), Some(0)).await;
    assert_eq!(again.expect("it is here").reused, 2);
    drop(open);
    source.finish().await;
    other.finish().await;
}

#[tokio::test]
async fn the_first_writer_keeps_a_resource_cache() {
    let (source, other) = (bench!(OVERLAY), bench!(OVERLAY));
    let cache = [("type", "resource-cache"), ("key", "r")];
    let name = "resource-cache/r";
    for bench in [&source, &other] {
        let work = |root: &Path| fs::write(root.join("file"), "x").expect("write");
        bench.step("maker", &cache, work).await;
    }
    let open = opened(&source, name).await;
    let own = other.artifact(name).expect("it is there").id;
    let later = ReceiveRequest {
        created: Timestamp(u64::MAX / 4),
        ..request(&open, 1)
    };
    let received = receive_but(&other, &open, later, Some(0)).await;
    assert!(!received.expect("nothing is made").named);
    assert_eq!(other.artifact(name).expect("it is there").id, own);
    // The source was first.
    assert!(receive(&other, &open, 1).await.named);
    assert_eq!(
        other.artifact(name).expect("it is there").id,
        open.artifact.id
    );
    drop(open);
    source.finish().await;
    other.finish().await;
}

#[tokio::test]
async fn a_full_disk_stops_what_comes_and_unused_caches_go_for_it() {
    let source = bench!(OVERLAY);
    let other = match Lab::try_sized(Fs::Ext4, 320 * MIB) {
        Ok(lab) => lab,
        Err(reason) => return crate::common::skip(&reason),
    };
    let other = Bench::with(other, |config| {
        config.backend = Some(OVERLAY.0);
        config.high_watermark = 100;
        config.low_watermark = 50;
    })
    .await;
    let output = [("type", "output"), ("name", "large")];
    let noise = |root: &Path| {
        for number in 0..20 {
            let mut bytes = vec![0; 8 << 20];
            getrandom::fill(&mut bytes).expect("random bytes");
            fs::write(root.join(number.to_string()), bytes).expect("write");
        }
    };
    source.step("maker", &output, noise).await;
    let open = opened(&source, "artifact/large").await;
    // The other node's disk is full of something that stays.
    let (target, _) = other.publish("pod", "busy", &[]).await;
    fs::write(target.join("ballast"), vec![1; 180 << 20]).expect("write");
    let honest = request(&open, 1);
    let mut dishonest = honest.clone();
    dishonest.layers[0].bytes = 0;
    // No cache goes for what cannot fit.
    let little = |root: &Path| fs::write(root.join("x"), vec![1; 8 << 20]).expect("write");
    other.step("little", &CACHE, little).await;
    other.engine.reap().await.expect("it is measured");
    let refused = receive_but(&other, &open, honest.clone(), None).await;
    let is_full = matches!(refused, Err(ReceiveError::Engine(Error::Full(_))));
    assert!(is_full, "{refused:?}");
    other.engine.reap().await.expect("reap");
    assert!(other.artifact(NAME).is_some(), "it stays");
    let (tenant, name) = (
        "ci".parse().expect("a label"),
        NAME.parse().expect("a name"),
    );
    let destroyed = other.engine.destroy(&tenant, &name).await;
    destroyed.expect("destroyed");
    other.engine.reap().await.expect("reap");
    for request in [honest.clone(), dishonest] {
        let refused = receive_but(&other, &open, request, None).await;
        let is_full = matches!(refused, Err(ReceiveError::Engine(Error::Full(_))));
        assert!(is_full, "{refused:?}");
        assert_eq!(names(&other.pool().join("layers")), [""; 0]);
    }
    other.outcome("pod", Outcome::Succeeded).await;
    other.unpublish("busy").await;
    other.quiet().await;
    // An unused cache takes its place, and goes.
    let cache = |root: &Path| fs::write(root.join("x"), vec![1; 180 << 20]).expect("write");
    other.step("cache", &CACHE, cache).await;
    other.engine.reap().await.expect("it is measured");
    assert!(
        receive_but(&other, &open, honest, None)
            .await
            .expect("there is space")
            .named
    );
    assert!(other.artifact(NAME).is_none(), "it went");
    assert!(open.layers[0].table.bytes() > 150 * MIB);
    drop(open);
    source.finish().await;
    other.finish().await;
}

#[tokio::test]
async fn what_the_tier_knows_of_an_artifact_is_kept() {
    let Some((source, other, open)) = two_nodes().await else {
        return;
    };
    let id = open.artifact.id;
    let wanted: Vec<ArtifactId> = source.engine.to_share().iter().map(|it| it.id).collect();
    assert_eq!(wanted, [id], "the older commit lost its name");
    let engine = source.engine.clone();
    let set = layers::apart(move || {
        let unknown = ArtifactId::from_bits(1);
        assert!(!engine.set_sharing(unknown, |_| {}).expect("it answers"));
        engine.set_sharing(id, |sharing| sharing.number = Some(5))
    });
    assert!(set.await.expect("it is written"));
    assert!(source.engine.to_share().is_empty());
    drop(open);
    let number = |bench: &Bench| local(bench).expect("it is there").sharing.number;
    let source = source.restart().await;
    assert_eq!(number(&source), Some(5));
    let rebuild = |pool: &Path| drop(Engine::rebuild_index(pool).expect("it is rebuilt"));
    let source = source.restart_after(rebuild).await;
    assert_eq!(number(&source), Some(5));
    // A commit that follows it knows that, and may still be shared.
    write(&source, "third", "third").await;
    let follower = local(&source).expect("it is there").sharing;
    let expected = Sharing {
        base: Some(5),
        ..Sharing::default()
    };
    assert_eq!(follower, expected);
    assert_eq!(source.engine.to_share().len(), 1);
    // The next one follows both, though the tier was not asked.
    write(&source, "fourth", "fourth").await;
    assert_eq!(local(&source).expect("it is there").sharing, expected);
    source.finish().await;
    other.finish().await;
}

#[tokio::test]
async fn content_from_before_a_clear_loses_its_name_here_too() {
    let bench = bench!(OVERLAY);
    let commit = async |volume: &str, base: Option<u64>, share: bool| {
        let mut request = bench.request(volume, volume, &CACHE);
        (request.base, request.share) = (base, share);
        bench.engine.publish(request).await.expect("publish");
        fs::write(bench.target(volume).join("file"), volume).expect("write");
        bench.outcome(volume, Outcome::Succeeded).await;
        bench.unpublish(volume).await;
        bench.quiet().await;
    };
    let name = Name {
        tenant: "ci".parse().expect("a tenant"),
        reference: NAME.parse().expect("a reference"),
    };
    let discard = async |cleared| {
        let discarded = bench.engine.discard_cleared(&name, cleared).await;
        discarded.expect("it answers")
    };
    assert!(!discard(9).await, "there is none");
    commit("first", Some(3), true).await;
    assert!(!discard(3).await);
    assert!(discard(4).await);
    assert!(local(&bench).is_none());
    commit("unknown", None, true).await;
    assert!(discard(1).await, "nothing is known of when it began");
    commit("private", None, false).await;
    assert!(local(&bench).expect("it is there").sharing.never);
    assert!(bench.engine.to_share().is_empty());
    assert!(!discard(9).await, "it has nothing to do with the tier");
    commit("follower", None, true).await;
    let follower = local(&bench).expect("it is there").sharing;
    assert!(follower.never, "it has private content in it");
    bench.engine.reap().await.expect("reap");
    assert_eq!(names(&bench.pool().join("layers")).len(), 2);
    bench.finish().await;
}

#[tokio::test]
async fn what_is_about_to_be_made_here_is_known() {
    let bench = bench!(OVERLAY);
    let input = [("type", "input"), ("from", "artifact/made")];
    let asks = |pod: &str| bench.request(pod, "asks", &input);
    assert!(!bench.engine.is_coming(&asks("other")));
    let output = [("type", "output"), ("name", "made")];
    bench.publish("maker", "makes", &output).await;
    assert!(bench.engine.is_coming(&asks("other")));
    assert!(!bench.engine.is_coming(&asks("maker")), "by itself");
    let cache = bench.request("other", "cache", &CACHE);
    assert!(!bench.engine.is_coming(&cache), "it waits for nothing");
    let known = |id: &str| bench.engine.has_volume(&id.parse().expect("an id"));
    assert!(known("makes") && !known("asks"));
    let engine = bench.engine.clone();
    let mut changed = Box::pin(async move { engine.content_changed().await });
    assert!(waits(&mut changed).await);
    bench.outcome("maker", Outcome::Succeeded).await;
    bench.unpublish("makes").await;
    bench.quiet().await;
    assert!(!bench.engine.is_coming(&asks("other")) && !known("makes"));
    tokio::time::timeout(NEVER, changed)
        .await
        .expect("it is told");
    let made = bench.engine.to_share().remove(0);
    let open = loop {
        let engine = bench.engine.clone();
        let open = layers::apart(move || engine.open_layers(made.id)).await;
        if let Some(open) = open.expect("it opens") {
            break open;
        }
        // It was told that the content is durable. Its table comes later, and is told, too.
        let told = bench.engine.content_changed();
        let told = tokio::time::timeout(NEVER, told).await;
        told.expect("its table is made");
    };
    assert_eq!(open.artifact.reference.to_string(), "artifact/made");
    drop(open);
    bench.finish().await;
}

#[tokio::test]
async fn what_is_open_stays_until_it_is_sent() {
    let Some((source, other, open)) = two_nodes().await else {
        return;
    };
    let name = open.artifact.name();
    let destroyed = source.engine.destroy(&name.tenant, &name.reference).await;
    destroyed.expect("destroyed");
    source.engine.reap().await.expect("reap");
    assert!(receive(&other, &open, 1).await.named);
    assert!(sees(&other, "looks", "second").await);
    drop(open);
    assert_left(&source, 0, "the end of the upload").await;
    source.finish().await;
    other.finish().await;
}

#[tokio::test]
async fn a_damaged_table_is_noticed_and_made_again() {
    let Some((source, other, open)) = two_nodes().await else {
        return;
    };
    let id = open.artifact.id;
    let newest = open.artifact.layers[0].to_string();
    drop(open);
    let table = source.pool().join("layers").join(newest).join("table");
    let flip = |table: &Path| {
        let mut bytes = fs::read(table).expect("read");
        *bytes.last_mut().expect("a byte") ^= 1;
        // The attribute stays.
        let file = fs::File::options().write(true).open(table).expect("open");
        std::os::unix::fs::FileExt::write_all_at(&file, &bytes, 0).expect("write");
    };
    let remove = |table: &Path| fs::remove_file(table).expect("rm");
    for damage in [&flip as &dyn Fn(&Path), &remove] {
        damage(&table);
        let engine = source.engine.clone();
        let damaged = layers::apart(move || engine.open_layers(id)).await;
        assert!(damaged.expect("it answers").is_none());
        drop(opened(&source, NAME).await);
    }
    let open = opened(&source, NAME).await;
    assert!(receive(&other, &open, 1).await.named);
    drop(open);
    source.finish().await;
    other.finish().await;
}
