//! Exports and imports as the engine does them: what comes back is what left, and what fails leaves
//! nothing. What a stream holds is tested in `tests/archives`.

use std::fs;
use std::io::{self, Cursor, Read, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use baggageclaim::archive::{self, Codec};
use baggageclaim::engine::{
    Config, Error, Export, ImportRequest, Imported, PublishRequest, Source, View,
};
use baggageclaim::model::{Outcome, Sha256};
use parking_lot::Mutex;

use crate::common::bench::{Bench, Ground, eventually, names};
use crate::common::{Fs, Lab, Snapshot, assert_same, tree};

const CODECS: [Codec; 3] = [Codec::Plain, Codec::Gzip(1), Codec::Zstd(1)];

/// An output that is kept after its test.
#[derive(Debug, Clone, Default)]
struct Buffer(Arc<Mutex<Vec<u8>>>);

impl Write for Buffer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

async fn open(bench: &Bench, name: &str) -> Export {
    let id = bench.artifact(name).expect("it is there").id;
    let export = bench.engine.export(Source::Artifact(id)).await;
    export.expect("it opens")
}

/// The archive, and the digest of the tar stream in it.
async fn pack(bench: &Bench, export: Export, codec: Codec) -> Result<(Vec<u8>, Sha256), Error> {
    let out = Buffer::default();
    let packed = bench
        .engine
        .pack(export, codec, out.clone(), Arc::default());
    let digests = packed.await?.packed.digests;
    let bytes = std::mem::take(&mut *out.0.lock());
    assert_eq!(digests.packed.bytes, bytes.len() as u64);
    let plain = digests.plain.sha256.expect("an export computes it");
    Ok((bytes, Sha256(plain)))
}

pub(crate) async fn exported(bench: &Bench, name: &str, codec: Codec) -> (Vec<u8>, Sha256) {
    let export = open(bench, name).await;
    assert_eq!(export.view(), View::Sealed);
    pack(bench, export, codec).await.expect("it is packed")
}

pub(crate) fn request(name: &str) -> ImportRequest {
    ImportRequest {
        tenant: "ci".parse().expect("a tenant"),
        reference: name.parse().expect("a reference"),
        digest: None,
        size: None,
        ttl: None,
        base: None,
    }
}

pub(crate) async fn import(
    bench: &Bench,
    request: ImportRequest,
    archive: impl Read + Send + 'static,
) -> Result<Imported, Error> {
    bench
        .engine
        .import(request, archive, Arc::default(), || true)
        .await
}

/// What a fork of it shows.
pub(crate) async fn shown(bench: &Bench, volume: &str, name: &str) -> Snapshot {
    let fork = [("type", "input"), ("from", name)];
    let pod = format!("looks-at-{volume}");
    let (target, _) = bench.publish(&pod, volume, &fork).await;
    let mut content = Snapshot::of(&target);
    for entry in content.entries.values_mut() {
        // What xfs shows of ACLs once more.
        let added = |name: &[u8]| name.starts_with(b"trusted.SGI_ACL_");
        entry.xattrs.retain(|name, _| !added(name));
    }
    bench.unpublish(volume).await;
    content
}

/// Whether nothing is left but these layers.
pub(crate) async fn assert_left(bench: &Bench, layers: usize, after: &str) {
    bench.engine.reap().await.expect("reap");
    for directory in ["incoming", "pending", "trash"] {
        let left = names(&bench.pool().join(directory));
        assert_eq!(left, [""; 0], "{after}: {directory}");
    }
    let left = names(&bench.pool().join("layers"));
    assert_eq!(left.len(), layers, "{after}: {left:?}");
    bench.assert_whole().await;
}

macro_rules! bench {
    ($ground:expr) => {
        match $ground.bench().await {
            Ok(bench) => bench,
            Err(reason) => {
                crate::common::skip(&reason);
                return;
            }
        }
    };
}

pub(crate) use bench;

const OUTPUT: [(&str, &str); 2] = [("type", "output"), ("name", "odd")];

#[tokio::test]
async fn what_comes_back_is_what_left() {
    for ground in Ground::ALL {
        let bench = bench!(ground);
        bench.step("maker", &OUTPUT, tree::odd).await;
        let before = shown(&bench, "before", "artifact/odd").await;
        let mut first = None;
        for (number, codec) in CODECS.into_iter().enumerate() {
            let (bytes, digest) = exported(&bench, "artifact/odd", codec).await;
            let first = *first.get_or_insert(digest);
            assert_eq!(digest, first, "{ground:?}: {codec:?}");
            let name = format!("artifact/copy-{number}");
            let wanted = ImportRequest {
                digest: Some(digest),
                size: Some(bytes.len() as u64),
                ..request(&name)
            };
            let imported = import(&bench, wanted, Cursor::new(bytes)).await;
            let imported = imported.expect("it is imported");
            assert!(imported.named);
            let row = bench.artifact(&name).expect("it is there");
            assert_eq!((row.id, row.layers), (imported.artifact, 1));
            assert!(row.durable);
            assert_eq!(row.digests.imported, Some(digest));
            assert_eq!(row.digests.content, None, "before its first export");
            let after = shown(&bench, &format!("after-{number}"), &name).await;
            assert_same(&before.clone().archived(), &after);
            let (_, again) = exported(&bench, &name, Codec::Plain).await;
            assert_eq!(again, digest);
        }
        // The digest is kept with the artifact, whatever happens.
        let bench = bench.restart().await;
        let digests = |name: &str| bench.artifact(name).expect("it is there").digests;
        assert_eq!(digests("artifact/odd").content, first);
        assert_eq!(digests("artifact/odd").imported, None);
        assert_eq!(digests("artifact/copy-2").content, first);
        assert_eq!(digests("artifact/copy-2").imported, first);
        bench.finish().await;
    }
}

/// A stack of layers with deletions leaves as one tree.
#[tokio::test]
async fn a_stack_of_layers_leaves_as_what_it_shows() {
    let cache = [("type", "task-cache"), ("key", "k")];
    for ground in Ground::ALL {
        let bench = bench!(ground);
        bench
            .step("first", &cache, |root| {
                tree::files(root, 300);
                fs::write(root.join("gone"), "soon").expect("write");
                fs::create_dir(root.join("replaced")).expect("mkdir");
                fs::write(root.join("replaced/below"), "hidden later").expect("write");
            })
            .await;
        bench
            .step("second", &cache, |root| {
                fs::remove_file(root.join("gone")).expect("rm");
                fs::remove_file(root.join("replaced/below")).expect("rm");
                fs::remove_dir(root.join("replaced")).expect("rmdir");
                fs::create_dir(root.join("replaced")).expect("mkdir");
                fs::write(root.join("replaced/new"), "new").expect("write");
                fs::hard_link(root.join("d0000/f000001"), root.join("linked")).expect("link");
            })
            .await;
        let before = shown(&bench, "before", "task-cache/k").await;
        let (bytes, _) = exported(&bench, "task-cache/k", Codec::Zstd(1)).await;
        let imported = import(&bench, request("artifact/flat"), Cursor::new(bytes)).await;
        imported.expect("it is imported");
        let after = shown(&bench, "after", "artifact/flat").await;
        assert_same(&before, &after);
        bench.finish().await;
    }
}

async fn some_archive(bench: &Bench, text: &'static str) -> Vec<u8> {
    let output = [("type", "output"), ("name", "some")];
    let volume = format!("some-{text}");
    bench
        .step(&volume, &output, |root| {
            fs::write(root.join("file"), text).expect("write");
        })
        .await;
    exported(bench, "artifact/some", Codec::Plain).await.0
}

async fn file_of(bench: &Bench, volume: &str, name: &str) -> Option<String> {
    let fork = [("type", "input"), ("from", name)];
    bench.look(volume, &fork, "file").await
}

#[tokio::test]
async fn names_follow_the_rules_of_commits() {
    let bench = bench!(Ground::ALL[0]);
    let one = some_archive(&bench, "one").await;
    let two = some_archive(&bench, "two").await;
    for name in ["task-cache/k", "artifact/a"] {
        for archive in [&one, &two] {
            let archive = Cursor::new(archive.clone());
            let imported = import(&bench, request(name), archive).await;
            assert!(imported.expect("imported").named);
        }
        let shown = file_of(&bench, &format!("sees-{}", &name[..4]), name).await;
        assert_eq!(shown.as_deref(), Some("two"), "{name}: the last one wins");
    }
    let name = "resource-cache/r";
    let first = import(&bench, request(name), Cursor::new(one.clone())).await;
    first.expect("imported");
    // It need not even be looked at.
    let second = import(&bench, request(name), Cursor::new(b"no archive")).await;
    assert!(matches!(second, Err(Error::NameTaken(_))), "{second:?}");
    let shown = file_of(&bench, "sees-r", name).await;
    assert_eq!(shown.as_deref(), Some("one"), "the first one wins");
    assert_left(&bench, 4, "names").await;
    bench.finish().await;
}

/// Goes on when it is told to.
struct Waits(std::sync::mpsc::Receiver<()>, Cursor<Vec<u8>>);

impl Read for Waits {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.1.position() > 0 {
            let _told = self.0.recv();
        }
        let most = into.len().min(512);
        self.1.read(&mut into[..most])
    }
}

#[tokio::test]
async fn of_two_imports_of_a_resource_cache_the_first_that_is_done_wins() {
    for ground in Ground::ALL {
        let bench = bench!(ground);
        let slow = some_archive(&bench, "slow").await;
        let fast = some_archive(&bench, "fast").await;
        let (go_on, told) = std::sync::mpsc::channel();
        let name = "resource-cache/r";
        let engine = bench.engine.clone();
        let waiting = Waits(told, Cursor::new(slow));
        let slow = tokio::spawn(async move {
            engine
                .import(request(name), waiting, Arc::default(), || true)
                .await
        });
        let incoming = bench.pool().join("incoming");
        eventually("it has begun", || !names(&incoming).is_empty()).await;
        let fast = import(&bench, request(name), Cursor::new(fast)).await;
        assert!(fast.expect("imported").named);
        drop(go_on);
        let slow = slow.await.expect("no panic");
        assert!(matches!(slow, Err(Error::NameTaken(_))), "{slow:?}");
        let shown = file_of(&bench, "sees", name).await;
        assert_eq!(shown.as_deref(), Some("fast"));
        assert_left(&bench, 2, "two imports").await;
        bench.finish().await;
    }
}

/// The archive is whole, and its caller does not wait any more.
#[tokio::test]
async fn what_is_not_wanted_any_more_is_not_imported() {
    let bench = bench!(Ground::ALL[0]);
    let archive = Cursor::new(some_archive(&bench, "late").await);
    let request = request("resource-cache/r");
    let imported = bench
        .engine
        .import(request, archive, Arc::default(), || false)
        .await;
    let Err(Error::Archive {
        source: archive::Error::Read(gone),
        ..
    }) = imported
    else {
        panic!("{imported:?}");
    };
    assert_eq!(gone.kind(), io::ErrorKind::ConnectionAborted);
    assert!(bench.artifact("resource-cache/r").is_none());
    assert_left(&bench, 1, "an import that is not wanted").await;
    bench.finish().await;
}

#[tokio::test]
async fn what_is_not_what_was_asked_for_leaves_nothing() {
    for ground in Ground::ALL {
        let bench = bench!(ground);
        let output = [("type", "output"), ("name", "files")];
        bench
            .step("maker", &output, |root| tree::files(root, 40))
            .await;
        let (bytes, digest) = exported(&bench, "artifact/files", Codec::Zstd(1)).await;
        let other = ImportRequest {
            digest: Some(Sha256([7; 32])),
            ..request("artifact/other")
        };
        let refused = import(&bench, other, Cursor::new(bytes.clone())).await;
        match refused {
            Err(Error::OtherDigest { plain, .. }) => assert_eq!(plain, digest),
            refused => panic!("{refused:?}"),
        }
        let (plain, _) = exported(&bench, "artifact/files", Codec::Plain).await;
        for whole in [&bytes, &plain] {
            for part in [0, 1, 3, 5, 7] {
                let cut = Cursor::new(whole[..whole.len() * part / 8].to_vec());
                let refused = import(&bench, request("artifact/cut"), cut).await;
                assert!(
                    matches!(refused, Err(Error::Archive { .. })),
                    "{part}: {refused:?}"
                );
            }
        }
        // Its sender goes away.
        let broken = Cursor::new(plain[..4096].to_vec()).chain(Broken);
        let refused = import(&bench, request("artifact/broken"), broken).await;
        let is_read = |error: &archive::Error| matches!(error, archive::Error::Read(_));
        assert!(
            matches!(&refused, Err(Error::Archive { source, .. }) if is_read(source)),
            "{refused:?}"
        );
        assert_left(&bench, 1, "bad archives").await;
        assert_eq!(bench.engine.artifacts(None).len(), 1);
        bench.finish().await;
    }
}

struct Broken;

impl Read for Broken {
    fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
        Err(io::ErrorKind::ConnectionReset.into())
    }
}

pub(crate) const MIB: u64 = 1 << 20;

/// A bench with a small disk.
pub(crate) async fn small(ground: Ground) -> Result<Bench, String> {
    let lab = Lab::try_sized(ground.1, 320 * MIB)?;
    let change = |config: &mut Config| {
        config.backend = Some(ground.0);
        // What goes, goes for want of space only.
        config.high_watermark = 100;
        config.low_watermark = 99;
    };
    Ok(Bench::with(lab, change).await)
}

/// The header of a file in a tar stream.
fn header(name: &str, bytes: u64) -> [u8; 512] {
    let mut header = [0_u8; 512];
    header[..name.len()].copy_from_slice(name.as_bytes());
    header[100..107].copy_from_slice(b"0000644");
    header[108..115].copy_from_slice(b"0000000");
    header[116..123].copy_from_slice(b"0000000");
    header[124..135].copy_from_slice(format!("{bytes:011o}").as_bytes());
    header[136..147].copy_from_slice(b"00000000000");
    header[156] = b'0';
    header[257..263].copy_from_slice(b"ustar\0");
    header[263..265].copy_from_slice(b"00");
    header[148..156].fill(b' ');
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    header
}

/// A tar stream with one file of so many bytes that no filesystem makes smaller.
fn large(bytes: u64) -> impl Read + Send + 'static {
    let noise = Noise(1).take(bytes);
    Cursor::new(header("file", bytes).to_vec())
        .chain(noise)
        .chain(Cursor::new(vec![0; 1024]))
}

/// Bytes without a pattern.
struct Noise(u64);

impl Read for Noise {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        for chunk in into.chunks_mut(8) {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            chunk.copy_from_slice(&self.0.to_le_bytes()[..chunk.len()]);
        }
        Ok(into.len())
    }
}

#[tokio::test]
async fn a_full_disk_says_so_and_keeps_nothing() {
    for ground in Ground::ALL {
        let bench = match small(ground).await {
            Ok(bench) => bench,
            Err(reason) => return crate::common::skip(&reason),
        };
        let free = || rustix::fs::statvfs(bench.pool()).expect("statvfs");
        let bytes = |stat: rustix::fs::StatVfs| stat.f_bavail * stat.f_frsize;
        // What is known to be too much is refused before a byte of it is read.
        let too_large = ImportRequest {
            size: Some(1 << 40),
            ..request("artifact/large")
        };
        let refused = import(&bench, too_large, Broken).await;
        assert!(
            matches!(refused, Err(Error::TooLarge { .. })),
            "{refused:?}"
        );
        // What is not known, once there is no space left.
        let before = bytes(free());
        let total = free().f_blocks * free().f_frsize;
        let refused = import(&bench, request("artifact/large"), large(total - MIB)).await;
        assert!(
            matches!(refused, Err(Error::Full(_))),
            "{ground:?}: {refused:?}"
        );
        assert_left(&bench, 0, "a full disk").await;
        // btrfs gives the space of a deleted subvolume back two transactions later, each of which
        // comes within 30 s by itself. A small btrfs also says that nothing is available while its
        // metadata cannot grow, so free blocks are counted.
        let pool = std::fs::File::open(bench.pool()).expect("open");
        let free_blocks = || {
            rustix::fs::syncfs(&pool).expect("syncfs");
            free().f_bfree * free().f_frsize
        };
        let back = format!("{ground:?}: the space is back");
        eventually(&back, || free_blocks() > before / 4 * 3).await;
        drop(pool);
        if ground.1 == Fs::Btrfs {
            // An import does not wait that long for evicted caches, and can be tried again.
            bench.finish().await;
            continue;
        }
        // Unused caches go for it.
        let cache = import(&bench, request("task-cache/old"), large(120 * MIB)).await;
        cache.expect("there is space for this one");
        bench.engine.reap().await.expect("it is measured");
        // xfs allocates space ahead of a file that grows.
        let size = before - 80 * MIB;
        let sized = ImportRequest {
            size: Some(size),
            ..request("artifact/large")
        };
        let imported = import(&bench, sized, large(size)).await;
        assert!(imported.expect("there is space for it").named);
        assert!(bench.artifact("task-cache/old").is_none(), "it went");
        assert_left(&bench, 1, "eviction").await;
        bench.finish().await;
    }
}

/// Files without content fill a disk, too. Running pods need some of the last inodes.
#[tokio::test]
async fn an_import_leaves_inodes_for_others() {
    let bench = match small(Ground::ALL[0]).await {
        Ok(bench) => bench,
        Err(reason) => return crate::common::skip(&reason),
    };
    let pool = bench.pool();
    let free = move || rustix::fs::statvfs(&pool).expect("statvfs").f_ffree;
    let many = free() + 10_000;
    let mut archive: Vec<u8> = (0..many)
        .flat_map(|number| header(&number.to_string(), 0))
        .collect();
    archive.extend([0; 1024]);
    let ended = Arc::new(AtomicBool::new(false));
    let watched = Arc::clone(&ended);
    let watching = std::thread::spawn(move || {
        let mut least = u64::MAX;
        while !watched.load(Ordering::Relaxed) {
            least = least.min(free());
        }
        least
    });
    let refused = import(&bench, request("artifact/many"), Cursor::new(archive)).await;
    ended.store(true, Ordering::Relaxed);
    assert!(matches!(refused, Err(Error::Full(_))), "{refused:?}");
    let least = watching.join().expect("no panic");
    assert!(least > 500, "{least}");
    bench.finish().await;
}

/// ext4 answers ENOSPC, and is not full.
#[tokio::test]
async fn a_filesystem_that_cannot_hold_an_attribute_is_not_taken_for_full() {
    let (other, bench) = (
        bench!(Ground(Ground::ALL[0].0, Fs::XfsReflink)),
        bench!(Ground(Ground::ALL[0].0, Fs::Ext4)),
    );
    let output = [("type", "output"), ("name", "some")];
    let write = |root: &Path| {
        let file = root.join("file");
        fs::write(&file, "content").expect("write");
        let flags = rustix::fs::XattrFlags::empty();
        rustix::fs::setxattr(&file, "user.large", &[7; 5000], flags).expect("setxattr");
    };
    other.step("maker", &output, write).await;
    let (archive, _) = exported(&other, "artifact/some", Codec::Plain).await;
    let imported = import(&bench, request("artifact/some"), Cursor::new(archive)).await;
    let error = imported.expect_err("it does not fit");
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    let told = error.to_string();
    assert!(told.contains("setxattr") && told.contains("file"), "{told}");
    assert_left(&bench, 0, "an attribute that is too large").await;
    other.finish().await;
    bench.finish().await;
}

/// A pool above its watermark takes an import, and goes on evicting.
#[tokio::test]
async fn an_import_comes_in_while_the_pool_is_nearly_full() {
    let ground = Ground::ALL[0];
    let lab = Lab::try_sized(ground.1, 320 * MIB).expect("a lab");
    let bench = Bench::with(lab, |config| {
        config.backend = Some(ground.0);
        config.high_watermark = 40;
        config.low_watermark = 20;
    })
    .await;
    for number in 0..3 {
        let name = format!("task-cache/{number}");
        let imported = import(&bench, request(&name), large(90 * MIB)).await;
        assert!(imported.expect("imported").named, "{number}");
    }
    bench.engine.reap().await.expect("reap");
    let last = bench.artifact("task-cache/2");
    assert!(bench.engine.artifacts(None).len() < 3);
    drop(last);
    bench.assert_whole().await;
    bench.finish().await;
}

#[tokio::test]
async fn what_is_exported_stays_until_it_is_done() {
    for ground in Ground::ALL {
        let bench = bench!(ground);
        let output = [("type", "output"), ("name", "files")];
        bench
            .step("maker", &output, |root| tree::files(root, 300))
            .await;
        let (_, digest) = exported(&bench, "artifact/files", Codec::Plain).await;
        let held = open(&bench, "artifact/files").await;
        let tenant = "ci".parse().expect("a tenant");
        let name = "artifact/files".parse().expect("a reference");
        bench.engine.destroy(&tenant, &name).await.expect("destroy");
        bench.engine.reap().await.expect("reap");
        assert!(bench.artifact("artifact/files").is_none());
        let (_, again) = pack(&bench, held, Codec::Plain).await.expect("it is whole");
        assert_eq!(again, digest);
        assert_left(&bench, 0, "the export's end").await;
        // One that is not even begun lets go, too.
        bench
            .step("again", &output, |root| tree::files(root, 3))
            .await;
        drop(open(&bench, "artifact/files").await);
        eventually("it is let go", || {
            names(&bench.pool().join("incoming")).is_empty()
        })
        .await;
        bench.finish().await;
    }
}

#[tokio::test]
async fn a_live_volume_is_shown_as_far_as_the_backend_can() {
    for ground in Ground::ALL {
        let bench = bench!(ground);
        let (target, _) = bench.publish("pod", "live", &OUTPUT).await;
        fs::write(target.join("file"), "before").expect("write");
        let volume: PublishRequest = bench.request("pod", "live", &OUTPUT);
        let source = Source::Volume(volume.volume.clone());
        let export = bench.engine.export(source.clone()).await.expect("open");
        let is_snapshot = ground.1 == Fs::Btrfs;
        let expected = if is_snapshot {
            View::Snapshot
        } else {
            View::Live
        };
        assert_eq!(export.view(), expected, "{ground:?}");
        fs::write(target.join("later"), "after").expect("write");
        let (bytes, _) = pack(&bench, export, Codec::Plain).await.expect("packed");
        let copy = import(&bench, request("artifact/copy"), Cursor::new(bytes)).await;
        copy.expect("imported");
        assert_eq!(
            file_of(&bench, "sees", "artifact/copy").await.as_deref(),
            Some("before")
        );
        let copy = [("type", "input"), ("from", "artifact/copy")];
        let later = bench.look("sees-later", &copy, "later").await;
        assert_eq!(later.is_none(), is_snapshot, "{ground:?}");
        // The pod goes on as before, and its end does not wait for an export.
        let held = bench.engine.export(source.clone()).await.expect("open");
        fs::write(target.join("file"), "still writable").expect("write");
        bench.outcome("pod", Outcome::Succeeded).await;
        bench.unpublish("live").await;
        let ended = pack(&bench, held, Codec::Plain).await;
        if is_snapshot {
            ended.expect("a snapshot stays");
        } else {
            assert!(
                matches!(ended, Err(Error::NotExportable { .. })),
                "{ended:?}"
            );
        }
        bench.quiet().await;
        assert_eq!(
            file_of(&bench, "sees-sealed", "artifact/odd")
                .await
                .as_deref(),
            Some("still writable")
        );
        let gone = bench.engine.export(source).await;
        assert!(matches!(gone, Err(Error::NoSuchClaim(_))), "{gone:?}");
        bench.finish().await;
    }
}

/// A scratch volume on overlay is a plain directory.
#[tokio::test]
async fn a_scratch_volume_can_be_exported() {
    let bench = bench!(Ground::ALL[0]);
    let (target, _) = bench.publish("pod", "scratch", &[]).await;
    fs::write(target.join("file"), "of a scratch volume").expect("write");
    let source = Source::Volume("scratch".parse().expect("an id"));
    let export = bench.engine.export(source).await.expect("open");
    let (bytes, _) = pack(&bench, export, Codec::Gzip(1)).await.expect("packed");
    import(&bench, request("artifact/copy"), Cursor::new(bytes))
        .await
        .expect("imported");
    let file = file_of(&bench, "sees", "artifact/copy").await;
    assert_eq!(file.as_deref(), Some("of a scratch volume"));
    bench.unpublish("scratch").await;
    bench.finish().await;
}

/// What an earlier process left in `incoming/` is gone after a start.
#[tokio::test]
async fn a_start_sweeps_what_was_half_received() {
    for ground in Ground::ALL {
        let bench = bench!(ground);
        let left = |pool: &Path| {
            let half = pool.join("incoming").join("0".repeat(32)).join("fs.new");
            fs::create_dir_all(&half).expect("mkdir");
            fs::write(half.join("file"), "half").expect("write");
        };
        let bench = bench.restart_after(left).await;
        assert_left(&bench, 0, "a start").await;
        bench.finish().await;
    }
}
