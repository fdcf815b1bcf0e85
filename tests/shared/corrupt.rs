//! Damage in every part of every object: refused, told, and mended by a node that has the content
//! whole. Objects that were made to exhaust a node are refused, too.

use std::cell::Cell;
use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};

use baggageclaim::model::Sha256;
use baggageclaim::shared::{
    Error, LayerRef, Publication, Resolved, Source as _, look, report_damage, verify,
};

use crate::common::{Fs, Lab, assert_same, require_lab, tree as made};
use crate::tier::{
    Held, Tier, bucket, commit, down, hold, id, never, open, publish, reference, shown,
    small_parts, tenant,
};

const NAME: &str = "task-cache/x";

struct World {
    lab: Lab,
    tier: Tier,
    original: PathBuf,
    held: Held,
    layer: LayerRef,
}

impl World {
    fn new(lab: Lab) -> Self {
        let original = lab.dir("original");
        made::odd(&original);
        made::files(&original, 120);
        let held = hold(&lab, &original);
        let tier = Tier::file();
        publish(&tier.store, NAME, &[&held]).expect("publish");
        let layer = Self::resolve(&tier).expect("resolve");
        Self {
            lab,
            tier,
            original,
            held,
            layer,
        }
    }

    fn resolve(tier: &Tier) -> Result<LayerRef, Error> {
        match bucket(&tier.store).resolve(&tenant(), &reference(NAME), None)? {
            Resolved::Found(found) => Ok(found.manifest.layers[0]),
            other => panic!("{other:?}"),
        }
    }

    fn fetch(&self, layer: &LayerRef) -> Result<(), Error> {
        let into = self.lab.dir(&format!("down-{}", id()));
        let fetched = down(&self.lab, &[&bucket(&self.tier.store)], layer, &into);
        // Nothing of what was refused is shown as the layer.
        fetched.map(|_| assert_same(&shown(&self.original), &shown(&into.join("fs"))))
    }

    fn object(&self) -> PathBuf {
        only(&only(&self.tier.files.join("v1/ci/layers")))
    }
}

/// The only entry of a directory.
fn only(dir: &Path) -> PathBuf {
    let mut entries = fs::read_dir(dir)
        .expect("list")
        .map(|entry| entry.expect("entry").path());
    let found = entries.next().expect("there is one");
    assert!(entries.next().is_none());
    found
}

fn is_refused(error: &Error) -> bool {
    matches!(
        error,
        Error::Corrupt { .. } | Error::Away { .. } | Error::Permanent { .. }
    )
}

#[test]
fn a_layers_object_is_refused_whichever_byte_of_it_is_wrong() {
    let world = World::new(require_lab!(Fs::Ext4));
    let path = world.object();
    let whole = fs::read(&path).expect("read");
    let (tail, end) = (
        usize::try_from(world.layer.tail).expect("small"),
        whole.len(),
    );
    let end_record = tail - 17..tail;
    // Every byte of the tail, and some of the frames; frames' ends and records among them.
    let places = (0..tail)
        .step_by(97)
        .chain(0..70)
        .chain(tail - 30..end.min(tail + 40));
    let places = places.chain((tail..end).step_by(11)).chain(end - 121..end);
    let (mut refused, mut harmless) = (0, 0);
    for place in places {
        let mut bad = whole.clone();
        bad[place] ^= 0x10;
        fs::write(&path, &bad).expect("write");
        if let Err(error) = world.fetch(&world.layer) {
            assert!(is_refused(&error), "byte {place}: {error:?}");
            refused += 1;
        } else {
            // The content is the same: a bit that zstd ignores, or the end record, which a fetch by
            // ranges makes itself.
            assert!(place < end - 121, "byte {place}");
            harmless += usize::from(!end_record.contains(&place));
        }
    }
    // How many bits zstd ignores depends on the times of the files, which are in what is
    // compressed.
    assert!(
        refused > 300 && harmless * 25 < refused,
        "{refused} {harmless}"
    );
    for length in [0, 1, tail, end - 121, end - 1] {
        fs::write(&path, &whole[..length]).expect("write");
        let error = world.fetch(&world.layer).expect_err("it is cut");
        assert!(
            matches!(error, Error::Corrupt { .. }),
            "{length}: {error:?}"
        );
    }
    fs::write(&path, &whole).expect("write");
    world.fetch(&world.layer).expect("it is whole again");
}

/// The head of a record of an object.
fn head(kind: u8, body: usize) -> Vec<u8> {
    let length = u32::try_from(body + 1).expect("it is a record's");
    let mut head = 0x184D_2A5B_u32.to_le_bytes().to_vec();
    head.extend(length.to_le_bytes());
    head.push(kind);
    head
}

/// A credential of one prefix can write anything there.
#[test]
fn an_object_made_to_exhaust_a_node_is_refused_before_it_does() {
    let world = World::new(require_lab!(Fs::Ext4));
    let path = world.object();
    let whole = fs::read(&path).expect("read");
    let tail = usize::try_from(world.layer.tail).expect("small");
    let packed = u32::from_le_bytes(whole[tail + 4..tail + 8].try_into().expect("four bytes"));
    let index = tail + 8 + usize::try_from(packed).expect("small");
    let bucket = bucket(&world.tier.store);
    let opened = |object: &[u8], layer: LayerRef, stop: &dyn Fn() -> bool| {
        fs::write(&path, object).expect("write");
        let bytes = object.len() as u64;
        let layer = LayerRef { bytes, ..layer };
        let table = File::create(world.lab.dir("tables").join("poison")).expect("create");
        let error = bucket.open(&tenant(), &layer, &table, stop).err();
        let error = error.expect("it is refused");
        (error, table.metadata().expect("stat").len())
    };

    // An index of which nothing is known but that it is long.
    let list = vec![7; 32 << 20];
    let long = [
        &whole[..index],
        &head(7, list.len()),
        &list,
        &whole[index..],
    ]
    .concat();
    let layer = LayerRef {
        content: 1 << 40,
        ..world.layer
    };
    let (error, _) = opened(&long, layer, &never);
    assert!(error.to_string().contains("more frames"), "{error}");

    // A long table takes little space in an object. It has room for as many frames, but so little
    // content is never divided into them.
    let table = zstd::encode_all(std::io::repeat(0).take(60 << 20), 3).expect("compress");
    let frames = (60 << 20) / 32;
    let object = [&head(6, table.len())[..], &table, &head(7, 24 * frames)].concat();
    let layer = LayerRef {
        tail: 0,
        table: 60 << 20,
        content: 10 << 30,
        ..world.layer
    };
    let (error, _) = opened(&object, layer, &never);
    assert!(error.to_string().contains("more frames"), "{error}");

    // A table whose reader needs 128 MiB of memory.
    let mut wide = zstd::Encoder::new(Vec::new(), 3).expect("an encoder");
    wide.window_log(27).expect("a window");
    wide.write_all(&[0; 1000]).expect("write");
    let table = wide.finish().expect("compress");
    let layer = LayerRef {
        tail: 0,
        table: 1000,
        ..world.layer
    };
    let (error, _) = opened(&[&head(6, table.len())[..], &table].concat(), layer, &never);
    assert!(error.to_string().contains("too much memory"), "{error}");

    // A table of zeros, in an object of some kilobytes and in one that is not read at once.
    let zeros = std::io::repeat(0).take(1 << 30);
    let table = zstd::encode_all(zeros, 3).expect("compress");
    for frames in [0, 17 << 20] {
        let frames = vec![0; frames];
        let bomb = [&frames[..], &head(6, table.len()), &table].concat();
        let layer = LayerRef {
            tail: frames.len() as u64,
            table: 1 << 30,
            ..world.layer
        };
        let (error, written) = opened(&bomb, layer, &never);
        assert!(matches!(error, Error::Corrupt { .. }), "{error:?}");
        assert!(error.to_string().contains("compressed more"), "{error}");
        assert!(written <= 64 << 20, "{written} bytes were written");
        let asked = Cell::new(0);
        let stop = || asked.replace(asked.get() + 1) >= 10;
        let (error, written) = opened(&bomb, layer, &stop);
        assert!(matches!(error, Error::Stopped), "{error:?}");
        assert!(written <= 1 << 20, "{written} bytes were written");
    }
}

#[test]
fn a_manifest_that_lies_about_a_layer_is_refused() {
    let world = World::new(require_lab!(Fs::Ext4));
    let lies: [fn(&mut LayerRef); 6] = [
        |layer| layer.bytes -= 1,
        |layer| layer.tail -= 1,
        |layer| layer.tail = 0,
        |layer| layer.content += 1,
        |layer| layer.table += 1,
        |layer| layer.bytes += 1,
    ];
    for (number, lie) in lies.into_iter().enumerate() {
        let mut layer = world.layer;
        lie(&mut layer);
        let error = world.fetch(&layer).expect_err("it lies");
        assert!(is_refused(&error), "{number}: {error:?}");
    }
    let mut layer = world.layer;
    layer.digest = Sha256([1; 32]);
    let error = world.fetch(&layer).expect_err("there is none");
    assert!(matches!(error, Error::Missing { .. }), "{error:?}");
    // Another layer's object in the place of this one.
    let other = world.lab.dir("other");
    fs::write(other.join("file"), "other").expect("write");
    let other = hold(&world.lab, &other);
    let publication = Publication::resume(&world.tier.store, &tenant(), id());
    let object = world.object();
    let other = publication.layer((&other.table, &other.holder), small_parts(), &never);
    let other = other.expect("upload");
    let key = format!(
        "v1/ci/layers/{}/{}",
        &other.digest.to_string()[7..],
        other.upload
    );
    fs::copy(world.tier.files.join(key), &object).expect("copy");
    let mut layer = LayerRef {
        digest: world.layer.digest,
        ..other
    };
    layer.upload = world.layer.upload;
    let error = world.fetch(&layer).expect_err("it is another layer");
    assert!(is_refused(&error), "{error:?}");
}

#[test]
fn names_and_manifests_are_refused_whichever_byte_of_them_is_wrong() {
    let world = World::new(require_lab!(Fs::Ext4));
    let manifest = only(&world.tier.files.join("v1/ci/manifests"));
    let whole = fs::read(&manifest).expect("read");
    for place in 0..whole.len() {
        let mut bad = whole.clone();
        bad[place] ^= 1;
        fs::write(&manifest, &bad).expect("write");
        let error = World::resolve(&world.tier).expect_err("its digest is another one");
        assert!(matches!(error, Error::Corrupt { .. }), "{error:?}");
    }
    fs::remove_file(&manifest).expect("remove");
    let error = World::resolve(&world.tier).expect_err("it is gone");
    assert!(matches!(error, Error::Corrupt { .. }), "{error:?}");
    fs::write(&manifest, &whole).expect("write");
    World::resolve(&world.tier).expect("it is whole again");

    let name = world.tier.files.join("v1/ci/names/task-cache/x");
    let record = fs::read_to_string(&name).expect("read");
    for (from, to) in [
        ("\"ci\"", "\"cj\""),
        ("task-cache/x", "task-cache/y"),
        ("\"format\":1", "\"format\":0"),
        ("\"state\":\"content\"", "\"state\":\"other\""),
        ("sha256:", "sha256;"),
        ("{", "["),
    ] {
        assert!(record.contains(from), "{record}");
        fs::write(&name, record.replacen(from, to, 1)).expect("write");
        let error = look(&world.tier.store, &tenant(), &reference(NAME)).expect_err("it is wrong");
        assert!(matches!(error, Error::Corrupt { .. }), "{from}: {error:?}");
    }
    let newer = record.replacen("\"format\":1", "\"format\":2", 1);
    fs::write(&name, newer).expect("write");
    let error = World::resolve(&world.tier).expect_err("it is newer");
    assert!(matches!(error, Error::Newer { .. }), "{error:?}");
    let publication = Publication::resume(&world.tier.store, &tenant(), id());
    let error = publication.commit(commit(NAME, vec![world.layer]), crate::tier::NOW);
    assert!(
        matches!(error, Err(Error::Newer { .. })),
        "a newer record is not written over: {error:?}"
    );
    // A record that is too large, and a newer layout.
    fs::write(&name, " ".repeat(20_000)).expect("write");
    let error = World::resolve(&world.tier).expect_err("it is too large");
    assert!(matches!(error, Error::Corrupt { .. }), "{error:?}");
    let publication = Publication::resume(&world.tier.store, &tenant(), id());
    let committed = publication.commit(commit(NAME, vec![world.layer]), crate::tier::NOW);
    committed.expect("it is written over");
    World::resolve(&world.tier).expect("it shows the new commit");
    fs::write(world.tier.files.join("v1/ci/format"), "{\"format\":2}").expect("write");
    let error = Publication::begin(&world.tier.store, &tenant(), id()).expect_err("it is newer");
    assert!(
        matches!(
            error,
            Error::Newer {
                found: 2,
                known: 1,
                ..
            }
        ),
        "{error:?}"
    );
}

#[test]
fn damage_is_told_and_a_node_that_has_the_content_mends_it() {
    let world = World::new(require_lab!(Fs::Ext4));
    let temporary = open(&world.lab.dir("temporary"));
    let check = || {
        let found = verify(&world.tier.store, &tenant(), &temporary, &|_| {}, &never);
        found.expect("verify").damage
    };
    assert_eq!(check(), []);
    let object = world.object();
    let mut bad = fs::read(&object).expect("read");
    let last = bad.len() - 200;
    bad[last] ^= 1;
    fs::write(&object, &bad).expect("write");
    let damage = check();
    assert_eq!(damage.len(), 1, "{damage:?}");
    assert!(
        damage[0].object.contains(NAME) && damage[0].cause.contains("damaged"),
        "{damage:?}"
    );
    // A node that finds it reports it: the name shows nothing, and no commit uses the object.
    let record = look(&world.tier.store, &tenant(), &reference(NAME)).expect("look");
    let record = record.expect("it is there");
    let report = || {
        report_damage(
            &world.tier.store,
            &record,
            &world.layer,
            id(),
            crate::tier::NOW,
        )
    };
    assert!(report().expect("report"));
    assert!(
        !report().expect("report"),
        "only what shows it is withdrawn"
    );
    let nothing = bucket(&world.tier.store).resolve(&tenant(), &reference(NAME), None);
    assert!(matches!(
        nothing.expect("resolve"),
        Resolved::Nothing { cleared: 0, .. }
    ));
    // The name's record and manifest are damaged, too: the commit writes all of it again.
    let name = world.tier.files.join("v1/ci/names/task-cache/x");
    fs::write(&name, "garbage").expect("write");
    assert_eq!(check().len(), 1);
    publish(&world.tier.store, NAME, &[&world.held]).expect("publish");
    let layer = World::resolve(&world.tier).expect("resolve");
    assert_ne!(layer.upload, world.layer.upload);
    world.fetch(&layer).expect("it is whole");
    assert_eq!(check(), []);
    // A bucket that was wiped under a node that knows a number.
    fs::remove_dir_all(world.tier.files.join("v1")).expect("wipe");
    let publication = Publication::begin(&world.tier.store, &tenant(), id()).expect("begin");
    let mut again = commit(NAME, Vec::new());
    again.writer.base = Some(7);
    let held = (&*world.held.table, &world.held.holder);
    again.layers = vec![
        publication
            .layer(held, small_parts(), &never)
            .expect("upload"),
    ];
    publication.commit(again, crate::tier::NOW).expect("commit");
    world
        .fetch(&World::resolve(&world.tier).expect("resolve"))
        .expect("fetch");
}
