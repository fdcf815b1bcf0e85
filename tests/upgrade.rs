//! A driver takes over an older version's pool: mounts keep working, promises are kept, and
//! artifacts are there.
//!
//! The older version is today's driver, killed while pods use its volumes. The test then removes
//! from the pool what later versions added ([`older`] has the list).
//! `BAGGAGECLAIM_TEST_OLDER=PROGRAM` runs a real older driver instead; then nothing is removed, and
//! the test also verifies its assumptions about the older version.
//!
//! | in `tests/upgrade/` | |
//! |---|---|
//! | `driver` | drivers, one after the other on one pool, and the calls to them |
//! | `older` | a pool as an older version left it |

#![expect(
    clippy::disallowed_types,
    clippy::print_stderr,
    reason = "drivers are started; on which ground a test was is said where a failure is said"
)]

mod common;

#[path = "upgrade/driver.rs"]
mod driver;
#[path = "upgrade/older.rs"]
mod older;

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use baggageclaim::kubelet_double::{NO_ATTRIBUTES, Pod, PublishOptions};
use baggageclaim::proto::csi::v1 as csi;
use common::{Fs, Lab};
use csi::volume_capability::access_mode::Mode;
use driver::{Driver, PersistentVolume, Place};
use older::Age;
use tonic::Code;

/// A backend, where it is at home.
const GROUNDS: [(&str, Fs); 3] = [
    ("overlay", Fs::Ext4),
    ("btrfs", Fs::Btrfs),
    ("copy", Fs::XfsReflink),
];

const OPTIONS: PublishOptions = PublishOptions {
    read_only: false,
    fs_group: None,
};
const READING: PublishOptions = PublishOptions {
    read_only: true,
    ..OPTIONS
};
const SRC: [(&str, &str); 2] = [("type", "input"), ("from", "artifact/src")];
const TREE: [(&str, &str); 2] = [("type", "input"), ("from", "task-cache/tree")];
const CACHE: [(&str, &str); 3] = [
    ("type", "task-cache"),
    ("key", "tree"),
    ("commit", "always"),
];
/// Such a root has no other volume here: there is no mount of it that was made beforehand, as older
/// versions made none.
const LATER: [(&str, &str); 4] = [
    ("type", "output"),
    ("name", "later"),
    ("commit", "always"),
    ("mode", "0750"),
];

#[tokio::test(flavor = "multi_thread")]
async fn what_was_there_before_claims_goes_on() {
    for (backend, fs) in GROUNDS {
        eprintln!("{backend} on {}", fs.name());
        let Some(place) = place(backend, fs) else {
            return;
        };
        let old = place.start_older().await;
        let pods = Pods::settle_in(&place, &old).await;
        old.kill();
        older::make(&place, Age::BeforeClaims);
        let new = place.start().await;
        new.sound().await;
        pods.go_on(&new).await;
        // It can have claims now.
        let claim = new.create("claim", &[]).await.expect("create");
        new.mount(&claim).await;
        write(&claim.target, "file", "claimed");
        new.unmount(&claim).await;
        new.delete(&claim).await;
        finish(&place, new).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn claims_and_their_snapshots_go_on() {
    for (backend, fs) in GROUNDS {
        eprintln!("{backend} on {}", fs.name());
        let Some(place) = place(backend, fs) else {
            return;
        };
        let old = place.start_older().await;
        let pods = Pods::settle_in(&place, &old).await;
        let claims = Claims::settle_in(&old).await;
        old.kill();
        older::make(&place, Age::FirstClaims);
        let new = place.start().await;
        new.sound().await;
        claims.go_on(&new).await;
        pods.go_on(&new).await;
        finish(&place, new).await;
    }
}

fn place(backend: &'static str, fs: Fs) -> Option<Place> {
    match Lab::try_new(fs) {
        Ok(lab) => Some(Place::new(lab, backend)),
        Err(reason) => {
            common::skip(&reason);
            None
        }
    }
}

/// Nothing is wrong, with the driver and without; and nothing is mounted any more.
async fn finish(place: &Place, driver: Driver) {
    driver.sound().await;
    driver.end();
    place.check();
    assert_eq!(place.lab.leftovers(), Vec::<PathBuf>::new());
}

fn write(dir: &Path, file: &str, text: &str) {
    let path = dir.join(file);
    fs::write(&path, text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
}

fn read(dir: &Path, file: &str) -> String {
    let path = dir.join(file);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Pods that have volumes when the older version ends.
struct Pods {
    /// It runs on.
    runs: Pod,
    /// It has ended, and its outcome is not reported.
    ended: Pod,
    /// The output of an ended pod, open in a process of none of its containers: overlay seals only
    /// a volume without writers.
    held: Option<File>,
}

impl Pods {
    async fn settle_in(place: &Place, driver: &Driver) -> Self {
        let maker = driver.kubelet.pod("ci", "maker");
        let src = [("type", "output"), ("name", "src"), ("commit", "always")];
        step(&maker, &src, |dir| write(dir, "file", "src")).await;
        driver.settled().await;
        // A stack of two.
        for text in ["one", "two"] {
            let maker = driver.kubelet.pod("ci", text);
            step(&maker, &CACHE, |dir| write(dir, text, text)).await;
            driver.settled().await;
        }

        let runs = driver.kubelet.pod("ci", "runs");
        publish(&runs, "scratch", &NO_ATTRIBUTES, OPTIONS).await;
        publish(&runs, "later", &LATER, OPTIONS).await;
        publish(&runs, "cache", &CACHE, OPTIONS).await;
        publish(&runs, "src", &SRC, READING).await;
        for volume in ["scratch", "later", "cache"] {
            write(&runs.target(volume), "before", volume);
        }

        let ended = driver.kubelet.pod("ci", "ended");
        let promised = [("type", "output"), ("name", "promised")];
        step(&ended, &promised, |dir| write(dir, "file", "promised")).await;
        let holding = driver.kubelet.pod("ci", "holding");
        let output = [("type", "output"), ("name", "held"), ("commit", "always")];
        let held = step(&holding, &output, |dir| {
            let mut file = File::create(dir.join("file")).expect("made");
            if place.is_overlay() {
                return Some(file);
            }
            file.write_all(b"held").expect("written");
            None
        });
        let held = held.await;
        driver.leaving(1 + usize::from(held.is_some())).await;
        Self { runs, ended, held }
    }

    async fn go_on(self, driver: &Driver) {
        let runs = driver.again(&self.runs);
        // Kubelet asks again for all of them, and finds what is there. (The one that runs has
        // written meanwhile.)
        for (volume, attributes, options) in [
            ("scratch", &NO_ATTRIBUTES[..], OPTIONS),
            ("later", &LATER, OPTIONS),
            ("cache", &CACHE, OPTIONS),
            ("src", &SRC, READING),
        ] {
            let mount = driver::mount_id(&runs.target(volume));
            publish(&runs, volume, attributes, options).await;
            assert_eq!(driver::mount_id(&runs.target(volume)), mount, "{volume}");
            // Its access mode was not written down, and so is not compared; the rest always was.
            let mut other = runs.publish_request(volume, attributes.iter().copied(), options);
            let capability = other.volume_capability.as_mut().expect("a capability");
            capability.access_mode.as_mut().expect("a mode").mode =
                Mode::SingleNodeSingleWriter.into();
            driver.ask(other.clone()).await.expect(volume);
            other.readonly = !other.readonly;
            let refused = driver.ask(other).await.expect_err("it is different");
            assert_eq!(refused.code(), Code::AlreadyExists, "{volume}: {refused}");
        }
        for volume in ["scratch", "later", "cache"] {
            assert_eq!(read(&runs.target(volume), "before"), volume);
            write(&runs.target(volume), "after", volume);
        }
        for (volume, file) in [("cache", "one"), ("cache", "two"), ("src", "file")] {
            let text = if volume == "src" { "src" } else { file };
            assert_eq!(read(&runs.target(volume), file), text);
        }
        for volume in ["scratch", "later", "cache", "src"] {
            runs.unpublish(volume).await.expect(volume);
            assert!(!runs.target(volume).exists());
        }
        runs.remove().expect("its directories are empty");

        // Promises are kept as soon as the pod's outcome is known and no process writes any more.
        let waits = 1 + usize::from(self.held.is_some());
        driver.leaving(waits).await;
        assert_eq!(driver.succeeded(self.ended.uid()).await, 1);
        if let Some(mut held) = self.held {
            driver.leaving(1).await;
            held.write_all(b"held").expect("the file is still there");
        }
        driver.leaving(0).await;
        let artifacts = driver.artifacts().await;
        let all = ["later", "held", "promised", "src"].map(|name| format!("artifact/{name}"));
        for name in all.iter().map(String::as_str).chain(["task-cache/tree"]) {
            assert!(
                artifacts.iter().any(|found| found == name),
                "{name}: {artifacts:?}"
            );
        }

        let reader = driver.kubelet.pod("ci", "reader");
        for (volume, files) in [
            ("later", &["before", "after"][..]),
            ("held", &["file"]),
            ("promised", &["file"]),
            ("src", &["file"]),
        ] {
            let from = format!("artifact/{volume}");
            let input = [("type", "input"), ("from", from.as_str())];
            let target = publish(&reader, volume, &input, OPTIONS).await;
            for file in files {
                assert_eq!(read(&target, file), volume, "{file}");
            }
            write(&target, "mine", "alone");
        }
        let target = publish(&reader, "cache", &TREE, OPTIONS).await;
        for (file, text) in [
            ("one", "one"),
            ("two", "two"),
            ("before", "cache"),
            ("after", "cache"),
        ] {
            assert_eq!(read(&target, file), text);
        }
        for volume in ["later", "held", "promised", "src", "cache"] {
            reader.unpublish(volume).await.expect(volume);
        }
        driver.leaving(0).await;
    }
}

/// A pod has one volume, and ends.
async fn step<T>(pod: &Pod, attributes: &[(&str, &str)], work: impl FnOnce(&Path) -> T) -> T {
    let done = work(&publish(pod, "volume", attributes, OPTIONS).await);
    pod.unpublish("volume").await.expect("unpublish");
    pod.remove().expect("its directories are empty");
    done
}

async fn publish(
    pod: &Pod,
    volume: &str,
    attributes: &[(&str, &str)],
    options: PublishOptions,
) -> PathBuf {
    let published = pod.publish(volume, attributes.iter().copied(), options);
    published.await.expect(volume).target
}

/// Claims that are there when the older version ends.
struct Claims {
    /// It is mounted.
    mounted: PersistentVolume,
    /// It has content of its own over layers that a snapshot holds, too.
    frozen: PersistentVolume,
    snapshot: String,
}

/// The parameters of two VolumeAttributesClasses.
const TTL: [(&str, &str); 1] = [("ttl", "1h")];
const OTHER_TTL: [(&str, &str); 1] = [("ttl", "2h")];

impl Claims {
    async fn settle_in(driver: &Driver) -> Self {
        let mounted = driver.create("mounted", &TTL).await.expect("create");
        driver.mount(&mounted).await;
        write(&mounted.target, "before", "mounted");
        let frozen = driver.create("frozen", &[]).await.expect("create");
        driver.mount(&frozen).await;
        write(&frozen.target, "below", "frozen");
        driver.unmount(&frozen).await;
        let snapshot = driver.snapshot("snapshot", &frozen).await;
        driver.mount(&frozen).await;
        write(&frozen.target, "above", "frozen");
        driver.unmount(&frozen).await;
        Self {
            mounted,
            frozen,
            snapshot,
        }
    }

    async fn go_on(self, driver: &Driver) {
        let Self {
            mounted,
            frozen,
            snapshot,
        } = self;
        // Its original parameters were not recorded, so they are not compared; nor is its requested
        // size.
        for class in [&TTL, &OTHER_TTL] {
            let again = driver.create("mounted", class).await.expect("the same");
            assert_eq!(again.id, mounted.id);
        }
        let mount = driver::mount_id(&mounted.target);
        driver.mount(&mounted).await;
        driver
            .mount_as(&mounted, Mode::SingleNodeMultiWriter)
            .await
            .expect("not compared");
        assert_eq!(driver::mount_id(&mounted.target), mount);
        assert_eq!(read(&mounted.target, "before"), "mounted");
        write(&mounted.target, "after", "mounted");
        driver.unmount(&mounted).await;
        driver.mount(&mounted).await;
        for file in ["before", "after"] {
            assert_eq!(read(&mounted.target, file), "mounted");
        }
        driver.unmount(&mounted).await;

        driver.mount(&frozen).await;
        for file in ["below", "above"] {
            assert_eq!(read(&frozen.target, file), "frozen");
        }
        driver.unmount(&frozen).await;
        let restored = driver.restore("restored", &snapshot).await;
        driver.mount(&restored).await;
        assert_eq!(read(&restored.target, "below"), "frozen");
        assert!(!restored.target.join("above").exists());
        driver.unmount(&restored).await;
        let again = driver.snapshot("snapshot", &frozen).await;
        assert_eq!(again, snapshot);
        let new = driver.snapshot("new", &mounted).await;
        for id in [&snapshot, &new] {
            driver.delete_snapshot(id).await;
        }
        for claim in [mounted, frozen, restored] {
            driver.delete(&claim).await;
        }
    }
}
