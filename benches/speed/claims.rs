//! Claims: creating one, cloning and snapshotting one of any size, listing many. The baseline of a
//! snapshot waits for the disk, renames an upper directory and makes a record durable, and adds an
//! empty call through the socket. `cp` is measured too.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use baggageclaim::proto::csi::v1 as csi;
use csi::volume_capability::access_mode::Mode;
use csi::volume_capability::{AccessMode, AccessType, MountVolume};
use csi::volume_content_source::{Type, VolumeSource};

use crate::cases::{Bench, make_files, micros, write_bytes};
use crate::driver::Driver;
use crate::table::{Goal, median};

/// Concurrent clones, one per thread.
const JOBS: usize = 8;

/// Entries per page.
const PAGE: i32 = 500;

fn capability() -> csi::VolumeCapability {
    csi::VolumeCapability {
        access_mode: Some(AccessMode {
            mode: Mode::SingleNodeWriter.into(),
        }),
        access_type: Some(AccessType::Mount(MountVolume::default())),
    }
}

fn create(driver: &Driver, name: &str, source: Option<&str>) -> (String, f64) {
    let request = csi::CreateVolumeRequest {
        name: name.to_owned(),
        volume_capabilities: vec![capability()],
        volume_content_source: source.map(|id| csi::VolumeContentSource {
            r#type: Some(Type::Volume(VolumeSource {
                volume_id: id.to_owned(),
            })),
        }),
        ..Default::default()
    };
    let (answer, took) = driver.call("/csi.v1.Controller/CreateVolume", &request);
    let csi::CreateVolumeResponse { volume } = answer;
    (volume.expect("required").volume_id, micros(took))
}

fn delete(driver: &Driver, id: &str) {
    let request = csi::DeleteVolumeRequest {
        volume_id: id.to_owned(),
        ..Default::default()
    };
    let (csi::DeleteVolumeResponse {}, _) =
        driver.call("/csi.v1.Controller/DeleteVolume", &request);
}

fn snapshot(driver: &Driver, name: &str, source: &str) -> (String, f64) {
    let request = csi::CreateSnapshotRequest {
        name: name.to_owned(),
        source_volume_id: source.to_owned(),
        ..Default::default()
    };
    let (answer, took) = driver.call("/csi.v1.Controller/CreateSnapshot", &request);
    let csi::CreateSnapshotResponse { snapshot } = answer;
    (snapshot.expect("required").snapshot_id, micros(took))
}

/// Changes a claim's content like a pod: stages it, and unstages it. Waits for the deferred end of
/// the unmount, which writes the pod's data back.
fn change(driver: &Driver, id: &str, staging: &Path, change: impl FnOnce(&Path)) {
    fs::create_dir_all(staging).expect("a directory");
    let path = staging.to_str().expect("text").to_owned();
    let request = csi::NodeStageVolumeRequest {
        volume_id: id.to_owned(),
        staging_target_path: path.clone(),
        volume_capability: Some(capability()),
        ..Default::default()
    };
    let (csi::NodeStageVolumeResponse {}, _) =
        driver.call("/csi.v1.Node/NodeStageVolume", &request);
    change(staging);
    let request = csi::NodeUnstageVolumeRequest {
        volume_id: id.to_owned(),
        staging_target_path: path,
    };
    let (csi::NodeUnstageVolumeResponse {}, _) =
        driver.call("/csi.v1.Node/NodeUnstageVolume", &request);
    // Not larger than before, so nothing changes. But the call waits for the end of the unmount.
    let request = csi::ControllerExpandVolumeRequest {
        volume_id: id.to_owned(),
        capacity_range: Some(csi::CapacityRange {
            required_bytes: 1,
            limit_bytes: 0,
        }),
        ..Default::default()
    };
    let (csi::ControllerExpandVolumeResponse { .. }, _) =
        driver.call("/csi.v1.Controller/ControllerExpandVolume", &request);
}

/// Waits until all dirty data is written.
fn sync(path: &Path) {
    let dir = File::open(path).expect("a directory");
    rustix::fs::syncfs(&dir).expect("room for it");
}

/// Waits until the filesystem's journal is empty too: 100,000 new files take a while to reach their
/// place.
fn settle(path: &Path) {
    sync(path);
    for how in ["--freeze", "--unfreeze"] {
        let done = Command::new("fsfreeze").arg(how).arg(path).status();
        assert!(done.expect("fsfreeze runs").success(), "{how}");
    }
}

/// A hand-made snapshot: waits for the disk, renames an upper directory, makes a record durable.
fn bare(dir: &Path, number: usize) -> f64 {
    let top = dir.join(format!("top-{number}"));
    fs::create_dir_all(&top).expect("a directory");
    fs::write(top.join("changed"), b"content\n").expect("a file");
    let began = Instant::now();
    sync(dir);
    fs::rename(&top, dir.join(format!("layer-{number}"))).expect("renamed");
    record(dir, number);
    micros(began.elapsed())
}

/// A hand-made clone of frozen content: makes a record durable.
fn record(dir: &Path, number: usize) {
    let mut file = File::create(dir.join(format!("record-{number}"))).expect("a file");
    file.write_all(&[1; 4096]).expect("room for it");
    file.sync_data().expect("room for it");
}

impl Bench<'_> {
    pub async fn claims(&mut self, driver: &mut Driver) {
        self.creation(driver);
        let small = self.copies(driver, 1, 0).await;
        let large = self.copies(driver, self.plan.many, self.plan.claimed);
        let large = large.await;
        for (what, small, large) in [("snapshot", small.0, large.0), ("clone", small.1, large.1)] {
            let name = format!("{what} of the larger against the smaller");
            self.row(&name, "us", large, Some(small), Goal::Ratio(1.2));
        }
        self.pages(driver);
    }

    fn creation(&mut self, driver: &Driver) {
        let mut took = Vec::new();
        for number in 0..self.plan.turn {
            let (id, micros) = create(driver, &format!("new-{number}"), None);
            took.push(micros);
            delete(driver, &id);
        }
        self.row(
            "CreateVolume",
            "us",
            median(took),
            None,
            Goal::AtMost(1000.0),
        );
    }

    /// Snapshots and clones of a claim of this size; their medians.
    async fn copies(&mut self, driver: &mut Driver, files: usize, bytes: u64) -> (f64, f64) {
        let size = format!("{files} files and {} MB", bytes >> 20);
        let staging = self.lab.kubelet_dir().join("staging");
        let by_hand = self.lab.dir(&format!("by-hand-{files}"));
        let (source, _) = create(driver, &format!("source-{files}"), None);
        change(driver, &source, &staging, |dir| {
            make_files(dir, files);
            write_bytes(&dir.join("bytes"), bytes);
        });
        let (twin, _) = create(driver, &format!("twin-{files}"), None);
        let touch = |dir: &Path| fs::write(dir.join("changed"), b"content\n").expect("a file");
        change(driver, &twin, &staging, touch);
        settle(&self.lab.path());
        let (mut snapshots, mut clones) = (Vec::new(), Vec::new());
        let (mut bare_snapshots, mut bare_clones) = (Vec::new(), Vec::new());
        for round in 0..self.plan.rounds {
            // A pod wrote before each of the two, so both wait until the disk has its data.
            change(driver, &twin, &staging, touch);
            let empty = self.empty_call(driver);
            bare_snapshots.push(bare(&by_hand, round) + empty);
            change(driver, &source, &staging, touch);
            let (_, took) = snapshot(driver, &format!("snap-{files}-{round}"), &source);
            snapshots.push(took);
            for job in 0..JOBS {
                let name = format!("clone-{files}-{round}-{job}");
                clones.push(create(driver, &name, Some(&source)).1);
                let began = Instant::now();
                record(&by_hand, 1000 + round * JOBS + job);
                bare_clones.push(micros(began.elapsed()) + empty);
            }
            // The engine measures the frozen layer before the next round.
            driver.reap().await;
        }
        let (snapshots, clones) = (median(snapshots), median(clones));
        let name = format!("snapshot of a claim of {size}");
        self.row(
            &name,
            "us",
            snapshots,
            Some(median(bare_snapshots)),
            Goal::Ratio(2.0),
        );
        let name = format!("clone of a claim of {size}");
        self.row(
            &name,
            "us",
            clones,
            Some(median(bare_clones)),
            Goal::Ratio(2.0),
        );
        if files > 1 {
            let content = largest(&driver.pool.join("layers"));
            for how in ["-a", "--reflink=always"] {
                let Some(took) = copy(how, &content, &by_hand.join("copy")) else {
                    continue;
                };
                let name = format!("clone of it, beside cp {how}");
                self.row(&name, "us", clones, Some(took), Goal::Ratio(0.1));
            }
        }
        (snapshots, clones)
    }

    fn pages(&mut self, driver: &Driver) {
        for number in 0..self.plan.volumes {
            create(driver, &format!("listed-{number}"), None);
        }
        let mut took = Vec::new();
        let mut starting_token = String::new();
        loop {
            let request = csi::ListVolumesRequest {
                max_entries: PAGE,
                starting_token,
            };
            let (answer, page) = driver.call("/csi.v1.Controller/ListVolumes", &request);
            took.push(micros(page));
            let csi::ListVolumesResponse { next_token, .. } = answer;
            starting_token = next_token;
            if starting_token.is_empty() {
                break;
            }
        }
        let name = format!("ListVolumes, a page of {PAGE} of {}", self.plan.volumes);
        self.row(&name, "us", median(took), None, Goal::AtMost(2000.0));
    }
}

/// The layer with the many files and the bytes.
fn largest(layers: &Path) -> PathBuf {
    let entries = fs::read_dir(layers).expect("layers").flatten();
    let mut found = entries.map(|entry| entry.path().join("fs"));
    found
        .find(|layer| layer.join("1/100").is_file() && layer.join("bytes").is_file())
        .expect("it was frozen")
}

/// A copy by `cp`; `None` if the filesystem cannot.
fn copy(how: &str, from: &Path, to: &Path) -> Option<f64> {
    let began = Instant::now();
    let mut command = Command::new("cp");
    command.arg(how);
    if how != "-a" {
        command.arg("-a");
    }
    let done = command.arg(from).arg(to).output().expect("cp runs");
    sync(to.parent().expect("a directory"));
    let took = micros(began.elapsed());
    #[expect(
        clippy::disallowed_methods,
        reason = "the bench's own copy, in which nothing is mounted"
    )]
    let _ = fs::remove_dir_all(to);
    done.status.success().then_some(took)
}
