//! Layers up and down: ten generations, a layer in parts, one that is cut at many bytes, and the
//! next source.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use baggageclaim::archive::toc::Want;
use baggageclaim::model::{ArtifactId, Reference, Tenant};
use baggageclaim::shared::{
    Committed, Content, Error, Frames, LayerRef, Publication, Resolved, Result, Source,
};
use rustix::fs::{CWD, FileType, Mode, XattrFlags};

use crate::common::random::Random;
use crate::common::{Fs, Lab, assert_same, require_lab, tree as made};
use crate::failing::{Fault, Op};
use crate::tier::{
    Held, Tier, bucket, commit, down, hold, id, never, publish, reference, shown, small_parts,
    tenant,
};

fn whiteout(path: &Path) {
    rustix::fs::mknodat(CWD, path, FileType::CharacterDevice, Mode::empty(), 0).expect("mknod");
}

/// The layers of ten generations, oldest first: each changes, adds and deletes.
fn generations(lab: &Lab) -> Vec<PathBuf> {
    (0..10)
        .map(|number| {
            let layer = lab.dir(&format!("generation-{number}"));
            if number == 0 {
                made::odd(&layer);
                made::files(&layer, 300);
                return layer;
            }
            fs::create_dir(layer.join("d0000")).expect("mkdir");
            let text = format!("generation {number}");
            fs::write(layer.join(format!("d0000/f{number:06}")), &text).expect("write");
            fs::write(layer.join(format!("new-{number}")), text.repeat(1000)).expect("write");
            whiteout(&layer.join(format!("d0000/f{:06}", 50 + number)));
            if number % 3 == 0 {
                let opaque = layer.join(format!("d000{number}"));
                fs::create_dir_all(&opaque).expect("mkdir");
                let name = "trusted.overlay.opaque";
                rustix::fs::lsetxattr(&opaque, name, b"y", XattrFlags::empty()).expect("xattr");
            }
            if number == 5 {
                // A name that is no text, and a file with a hole.
                fs::write(layer.join(OsStr::from_bytes(b"\xff\n")), "x").expect("write");
                let file = fs::File::create(layer.join("holes")).expect("create");
                file.write_all_at(b"far away", 9 << 20).expect("write");
            }
            layer
        })
        .collect()
}

#[test]
fn ten_generations_go_up_and_come_down_as_they_were() {
    let lab = require_lab!(Fs::Ext4);
    let layers = generations(&lab);
    let held: Vec<Held> = layers.iter().map(|layer| hold(&lab, layer)).collect();
    for (round, tier) in Tier::both().into_iter().enumerate() {
        for number in 0..10 {
            let newest_first: Vec<&Held> = held[..=number].iter().rev().collect();
            let committed = publish(&tier.store, "task-cache/go/build", &newest_first);
            assert!(matches!(committed.expect("publish"), Committed::Named(_)));
        }
        let source = bucket(&tier.store);
        let name = reference("task-cache/go/build");
        let Resolved::Found(found) = source.resolve(&tenant(), &name, None).expect("resolve")
        else {
            panic!("it is not found");
        };
        assert_eq!(found.manifest.layers.len(), 10);
        // Each generation uploaded one layer: the others are its parent's.
        let usage = baggageclaim::shared::usage(&tier.store, &tenant(), &never).expect("usage");
        assert_eq!((usage.layers, usage.manifests, usage.names), (10, 10, 1));
        for (layer, original) in found.manifest.layers.iter().zip(layers.iter().rev()) {
            let name = original
                .file_name()
                .expect("a name")
                .to_string_lossy()
                .into_owned();
            let into = lab.dir(&format!("down-{round}-{name}"));
            let fetched = down(&lab, &[&source], layer, &into).expect("fetch");
            assert_eq!(fetched.bytes, layer.content);
            assert_same(&shown(original), &shown(&into.join("fs")));
        }
        // A node that has the artifact needs no manifest; another one does.
        for (has, is_same) in [
            (found.manifest.artifact, true),
            (ArtifactId::from_bits(1), false),
        ] {
            let again = source.resolve(&tenant(), &name, Some(has));
            let again = again.expect("resolve");
            let same = matches!(&again, Resolved::Same(record) if **record == found.record);
            assert_eq!(same, is_same, "{again:?}");
        }
        let other = "other".parse().expect("a label");
        let none = source.resolve(&other, &name, None).expect("resolve");
        assert!(
            matches!(
                none,
                Resolved::Nothing {
                    number: 0,
                    cleared: 0,
                    evicted: false
                }
            ),
            "{none:?}"
        );
    }
}

/// Content that does not compress: 24 MiB in files of all sizes.
pub(crate) fn large(lab: &Lab) -> PathBuf {
    let layer = lab.dir("large");
    let mut random = Random::new(1);
    for (number, size) in [300, 70_000, 900_000, 3 << 20, 9 << 20, 11 << 20]
        .into_iter()
        .enumerate()
    {
        fs::write(layer.join(format!("f{number}")), random.bytes(size)).expect("write");
    }
    layer
}

pub(crate) fn upload(tier: &Tier, held: &Held) -> LayerRef {
    let publication = Publication::begin(&tier.store, &tenant(), id()).expect("begin");
    let layer = publication.layer((&held.table, &held.holder), small_parts(), &never);
    layer.expect("upload")
}

#[test]
fn a_large_layer_travels_in_parts_and_ranges_and_is_uploaded_once() {
    let lab = require_lab!(Fs::Ext4);
    let original = large(&lab);
    let held = hold(&lab, &original);
    for (round, tier) in Tier::both().into_iter().enumerate() {
        let layer = upload(&tier, &held);
        assert!(layer.bytes > 20 << 20, "{layer:?}");
        // Another node finds it by its digest, and uploads nothing.
        assert_eq!(upload(&tier, &held), layer);
        let into = lab.dir(&format!("down-{round}"));
        let (store, requests) = tier.failing(|_, _| Fault::None);
        down(&lab, &[&bucket(&store)], &layer, &into).expect("fetch");
        assert_same(&shown(&original), &shown(&into.join("fs")));
        // The tail, and one for each range of 16 MiB.
        assert_eq!(
            requests.load(Ordering::Relaxed),
            1 + layer.bytes.div_ceil(16 << 20)
        );
        // The object is valid zstd, and its plain bytes are the content.
        let key = format!(
            "{}/{}",
            &layer.digest.to_string()["sha256:".len()..],
            layer.upload
        );
        let object = fs::File::open(tier.files.join("v1/ci/layers").join(key)).expect("open");
        let mut plain = zstd::stream::read::Decoder::new(object).expect("zstd");
        let bytes = std::io::copy(&mut plain, &mut std::io::sink()).expect("decompress");
        assert_eq!(bytes, layer.content);
    }
}

#[test]
fn an_upload_that_fails_leaves_nothing_and_a_lost_answer_is_no_failure() {
    let lab = require_lab!(Fs::Ext4);
    let held = hold(&lab, &large(&lab));
    for tier in Tier::both() {
        let (store, _) = tier.failing(|op, _| match op {
            Op::Multipart => Fault::Cut(0),
            _ => Fault::None,
        });
        let publication = Publication::resume(&store, &tenant(), id());
        let failed = publication.layer((&held.table, &held.holder), small_parts(), &never);
        assert!(matches!(failed, Err(Error::Away { .. })), "{failed:?}");
        let usage = baggageclaim::shared::usage(&tier.store, &tenant(), &never).expect("usage");
        assert_eq!(usage.layers, 0);
        // Nor do the parts stay, in the form that a directory has them.
        if tier.server.is_none() {
            let left = files_below(&tier.files);
            assert!(left.iter().all(|path| !path.contains('#')), "{left:?}");
        }
        let (store, _) = tier.failing(|op, _| match op {
            Op::Multipart => Fault::LostAnswer,
            _ => Fault::None,
        });
        let publication = Publication::resume(&store, &tenant(), id());
        let uploaded = publication.layer((&held.table, &held.holder), small_parts(), &never);
        let layer = uploaded.expect("the object is there");
        down(
            &lab,
            &[&bucket(&tier.store)],
            &layer,
            &lab.dir(&format!("down-{}", id())),
        )
        .expect("fetch");
    }
}

fn files_below(root: &Path) -> Vec<String> {
    let (mut found, mut waiting) = (Vec::new(), vec![root.to_owned()]);
    while let Some(dir) = waiting.pop() {
        for entry in fs::read_dir(dir).expect("list") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                waiting.push(path);
            } else {
                found.push(path.display().to_string());
            }
        }
    }
    found
}

#[test]
fn a_download_that_is_cut_anywhere_is_taken_up_again() {
    let lab = require_lab!(Fs::Ext4);
    let original = large(&lab);
    let held = hold(&lab, &original);
    let tier = Tier::file();
    let layer = upload(&tier, &held);
    // Each answer ends after so many bytes; a large object is read in ranges.
    for most in [200_000_u64, 1_000_003, 5 << 20] {
        let (store, requests) = tier.failing(move |op, _| match op {
            Op::Get => Fault::Cut(most),
            _ => Fault::None,
        });
        let into = lab.dir(&format!("cut-{most}"));
        down(&lab, &[&bucket(&store)], &layer, &into).expect("fetch");
        assert_same(&shown(&original), &shown(&into.join("fs")));
        assert!(
            requests.load(Ordering::Relaxed) >= layer.bytes / most,
            "it was cut"
        );
    }
    // An answer without any byte is no progress: it ends.
    let (store, _) = tier.failing(|op, _| match op {
        Op::Get => Fault::Cut(0),
        _ => Fault::None,
    });
    let failed = down(&lab, &[&bucket(&store)], &layer, &lab.dir("never"));
    assert!(matches!(failed, Err(Error::Away { .. })), "{failed:?}");
}

/// A source that gives up after some streams, each cut after so many bytes.
struct Weak<S> {
    inner: S,
    streams: AtomicU64,
}

struct WeakContent<'a>(Box<dyn Content + 'a>, &'a AtomicU64);

impl<S: Source> Source for Weak<S> {
    fn name(&self) -> String {
        "a weak source".to_owned()
    }

    fn resolve(
        &self,
        tenant: &Tenant,
        name: &Reference,
        has: Option<ArtifactId>,
    ) -> Result<Resolved> {
        self.inner.resolve(tenant, name, has)
    }

    fn open(
        &self,
        tenant: &Tenant,
        layer: &LayerRef,
        table: &fs::File,
        stop: &dyn Fn() -> bool,
    ) -> Result<Box<dyn Content>> {
        // The stream count lives as long as the test.
        let inner = self.inner.open(tenant, layer, table, stop)?;
        let left = Box::leak(Box::new(AtomicU64::new(
            self.streams.load(Ordering::Relaxed),
        )));
        Ok(Box::new(WeakContent(inner, left)))
    }
}

impl Content for WeakContent<'_> {
    fn frames(&self, wants: &[Want]) -> Result<Frames> {
        if self.1.fetch_sub(1, Ordering::Relaxed) == 0 {
            return Err(Error::Away {
                object: "a layer".to_owned(),
                cause: "the source is gone".to_owned(),
            });
        }
        let frames = self.0.frames(wants)?;
        let stream = std::io::Read::take(frames.stream, 6 << 20);
        Ok(Frames {
            stream: Box::new(stream),
            bytes: frames.bytes,
        })
    }
}

#[test]
fn what_one_source_does_not_give_the_next_one_does() {
    let lab = require_lab!(Fs::Ext4);
    let original = large(&lab);
    let held = hold(&lab, &original);
    let tier = Tier::file();
    let layer = upload(&tier, &held);
    let weak = Weak {
        inner: bucket(&tier.store),
        streams: AtomicU64::new(2),
    };
    let into = lab.dir("into");
    let failed = down(&lab, &[&weak], &layer, &into);
    assert!(matches!(failed, Err(Error::Away { .. })), "{failed:?}");
    // What was verified is kept, and only the rest comes from the next source, in another process,
    // too.
    let (store, _) = tier.failing(|_, _| Fault::None);
    let fetched = down(&lab, &[&bucket(&store)], &layer, &into).expect("fetch");
    assert!(
        fetched.bytes < layer.content,
        "{} of {}",
        fetched.bytes,
        layer.content
    );
    assert_same(&shown(&original), &shown(&into.join("fs")));
    // In one fetch, too.
    let into = lab.dir("both");
    down(&lab, &[&weak, &bucket(&tier.store)], &layer, &into).expect("fetch");
    assert_same(&shown(&original), &shown(&into.join("fs")));
}

/// A source that is told of damage.
struct Told<S>(S, AtomicBool);

impl<S: Source> Source for Told<S> {
    fn name(&self) -> String {
        self.0.name()
    }

    fn resolve(
        &self,
        tenant: &Tenant,
        name: &Reference,
        has: Option<ArtifactId>,
    ) -> Result<Resolved> {
        self.0.resolve(tenant, name, has)
    }

    fn open(
        &self,
        tenant: &Tenant,
        layer: &LayerRef,
        table: &fs::File,
        stop: &dyn Fn() -> bool,
    ) -> Result<Box<dyn Content>> {
        self.0.open(tenant, layer, table, stop)
    }

    fn damaged(&self, _tenant: &Tenant, _layer: &LayerRef, _error: &Error) {
        self.1.store(true, Ordering::Relaxed);
    }
}

#[test]
fn the_limits_of_imports_hold_and_what_exceeds_them_is_not_damaged() {
    let lab = require_lab!(Fs::Ext4);
    let original = lab.dir("original");
    let file = fs::File::create(original.join("holes")).expect("create");
    file.write_all_at(b"a beginning", 0).expect("write");
    file.set_len(64 << 20).expect("truncate");
    let held = hold(&lab, &original);
    let tier = Tier::file();
    let layer = upload(&tier, &held);
    let source = Told(bucket(&tier.store), AtomicBool::new(false));
    let temporary = crate::tier::open(&lab.dir("temporary"));
    // The content of the layer exceeds the limit, then only the size of its file.
    for (name, bytes) in [("content", 1 << 20), ("size", 8 << 20)] {
        let dir = crate::tier::open(&lab.dir(name));
        let destination = baggageclaim::shared::Destination {
            into: &dir,
            temporary: &temporary,
            limits: baggageclaim::archive::Limits {
                bytes,
                ..Default::default()
            },
            devices: true,
            patience: baggageclaim::archive::toc::Patience(std::time::Duration::from_secs(9)),
            moved: &AtomicU64::new(0),
            progress: &AtomicU64::new(0),
            replaces_slow: false,
        };
        let fetched =
            baggageclaim::shared::fetch(&[&source], &tenant(), &layer, destination, &never);
        let error = fetched.expect_err("it exceeds a limit");
        let is_limit = matches!(
            error,
            Error::Layer(baggageclaim::archive::Error::Limit { .. })
        );
        assert!(is_limit, "{name}: {error:?}");
    }
    assert!(!source.1.load(Ordering::Relaxed), "the layer is whole");
}

#[test]
fn an_empty_layer_and_five_requests_for_a_small_one() {
    let lab = require_lab!(Fs::Ext4);
    for tier in Tier::both() {
        let empty = lab.dir(&format!("empty-{}", id()));
        let held = hold(&lab, &empty);
        publish(&tier.store, "task-cache/x", &[&held]).expect("publish");
        let (store, requests) = tier.failing(|_, _| Fault::None);
        // On the failing store a directory has no conditional replacement, so the name is another
        // one there.
        let name = if tier.server.is_some() {
            "task-cache/x"
        } else {
            "task-cache/y"
        };
        fs::write(empty.join("file"), "content").expect("write");
        let small = hold(&lab, &empty);
        let mut publication = Publication::resume(&store, &tenant(), id());
        publication
            .look(&reference(name), crate::tier::NOW)
            .expect("look");
        let layer = publication.layer((&small.table, &small.holder), small_parts(), &never);
        let layer = layer.expect("upload");
        publication
            .commit(commit(name, vec![layer]), crate::tier::NOW)
            .expect("commit");
        // Without a parent its manifest is not read.
        let expected = if tier.server.is_some() { 5 } else { 4 };
        assert_eq!(requests.swap(0, Ordering::Relaxed), expected);
        let source = bucket(&store);
        let Resolved::Found(found) = source
            .resolve(&tenant(), &reference(name), None)
            .expect("resolve")
        else {
            panic!("it is not found");
        };
        let into = lab.dir(&format!("down-{}", id()));
        down(&lab, &[&source], &found.manifest.layers[0], &into).expect("fetch");
        assert_same(&shown(&empty), &shown(&into.join("fs")));
        assert_eq!(requests.load(Ordering::Relaxed), 3);
    }
}
