//! A full disk, to the last block, by the writes of pods or by other files, during every operation.
//!
//! Failures are reported, answered calls hold, and unpublish always works. With free space, all
//! continues without a restart. Unused artifacts may be evicted, and each eviction is logged.

use std::fs::{self, File};
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use baggageclaim::kubelet_double::{Pod, PublishOptions};
use baggageclaim::proto::admin::v1 as api;
use rustix::fs::{FallocateFlags, fallocate, statvfs};
use tokio::runtime::Handle;
use tonic::Code;

use crate::caller::{again_at, cannot};
use crate::common::random::Random;
use crate::common::{Fs, Snapshot};
use crate::content::{self, Seen};
use crate::driver::{Driver, Ground, PATIENCE, Place, Wire, nothing_left};
use crate::figures::{Fault, Figures, Stop, count};

const GROUNDS: [Ground; 4] = [
    Ground::new("overlay", Fs::Ext4, 96),
    Ground::new("btrfs", Fs::Btrfs, 160),
    Ground::new("overlay", Fs::XfsReflink, 320),
    Ground::new("copy", Fs::Ext4, 96),
];

const FULL: &[Code] = &[Code::ResourceExhausted];
const VOLUME: &str = "v";

/// The user of the space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Filler {
    /// A program beside the pool that leaves this many blocks.
    Beside(u64),
    /// A pod, with bytes in its scratch volume.
    Pod,
    /// A pod, with names of empty files.
    Names,
}

/// An artifact that was promised, or made durable, before or during the flood.
struct Promised {
    name: String,
    content: Arc<Snapshot>,
}

/// A pool for one day, and what is known of it.
struct Day<'a> {
    place: &'a Place,
    wire: Wire,
    random: Random,
    promised: Vec<Promised>,
    /// Forks of what may not be evicted.
    pinned: Vec<(Pod, Arc<Snapshot>)>,
    claim: Option<(String, Vec<u8>)>,
    next: u64,
}

/// Runs day after day until it is time.
pub(crate) fn trial(mut random: Random, until: Instant, on: &Handle, figures: &Arc<Figures>) {
    let mut number = 0;
    while Instant::now() < until && figures.faults() < 3 {
        let ground = GROUNDS[number % GROUNDS.len()];
        number += 1;
        let seed = random.next();
        crate::say(&format!("full: {}, seed {seed}", ground.name()));
        if let Err(fault) = day(ground, seed, until, on, figures) {
            figures.note(format!("full: {}: seed {seed}", ground.name()), &fault);
        }
    }
}

fn day(
    ground: Ground,
    seed: u64,
    until: Instant,
    on: &Handle,
    figures: &Arc<Figures>,
) -> Result<(), Fault> {
    let mut random = Random::new(seed);
    let reserve = *random.pick(&["--reserve=4Mi", "--reserve=0"]);
    let arguments = [
        reserve,
        "--threads=3",
        "--input-wait=300ms",
        "--high-watermark=100",
        "--low-watermark=90",
        "--reap-interval=300ms",
    ];
    let place = Place::new(ground, &arguments, figures)?;
    let mut driver = place.start(None);
    let result = on.block_on(async {
        let wire = driver.connect().await?;
        let mut day = Day {
            place: &place,
            wire,
            random,
            promised: Vec::new(),
            pinned: Vec::new(),
            claim: None,
            next: 0,
        };
        day.live(&mut driver, until).await
    });
    let result = match result {
        Ok(()) => driver.stop().and_then(|()| place.check_offline()),
        Err(Stop::Fault(fault)) => Err(fault),
        Err(Stop::Died) => Err(Fault::wrong("the driver died")),
    };
    result
        .and_then(|()| place.admits_no_defect())
        .map_err(|fault| {
            let log = std::env::temp_dir().join(format!("torture-full-{seed}.log"));
            place.keep_log(&log);
            fault.at(format!("{reserve}, the log is {}", log.display()))
        })
}

impl Day<'_> {
    async fn live(&mut self, driver: &mut Driver, until: Instant) -> Result<(), Stop> {
        self.prepare().await?;
        let names = self.place.ground.fs == Fs::Ext4;
        for round in 0..14 {
            if Instant::now() > until && round > 3 {
                break;
            }
            let filler = match self.random.below(10) {
                0..=4 => Filler::Beside(self.random.below(48)),
                5..=6 if names => Filler::Names,
                _ => Filler::Pod,
            };
            let killed = filler != Filler::Names && self.random.percent(25);
            self.place
                .note(&format!("round {round}: {filler:?}, killed {killed}"));
            let round = self.round(driver, filler, killed).await;
            round.map_err(|stop| match stop {
                Stop::Fault(fault) => Stop::Fault(fault.at(format!("{filler:?}, killed {killed}"))),
                Stop::Died => Stop::Died,
            })?;
            count(&self.place.figures.full_disks);
        }
        self.end().await
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn pod(&mut self) -> Pod {
        let uid = format!("full-{}", self.number());
        self.wire.kubelet.pod_with_uid("ci", &uid, &uid)
    }

    /// Sealed things, some of them in use, and a claim.
    async fn prepare(&mut self) -> Result<(), Stop> {
        for index in 0..4 {
            let made = self.make(400_000).await?;
            if !made {
                return Err(Fault::wrong("no room on an empty disk").into());
            }
            if index < 2 {
                self.wire.settle().await?;
                self.pin(self.promised.len() - 1).await?;
            }
        }
        let mut controller = self.wire.kubelet.controller_client();
        let answer = controller.create_volume(claim_request("kept", None)).await;
        let made = self.wire.must("CreateVolume", answer)?.into_inner();
        let id = made.volume.map(|made| made.volume_id).unwrap_or_default();
        let bytes = vec![7; 100_000];
        self.stage(&id).await?;
        let mut file = File::create(self.staging().join("kept")).map_err(cannot("make a file"))?;
        file.write_all(&bytes).map_err(cannot("write"))?;
        file.sync_all().map_err(cannot("fsync"))?;
        self.unstage(&id).await?;
        self.claim = Some((id, bytes));
        Ok(())
    }

    fn staging(&self) -> PathBuf {
        self.place.lab.kubelet_dir().join("staging")
    }

    /// Whether there was space for it.
    async fn stage(&self, id: &str) -> Result<bool, Stop> {
        fs::create_dir_all(self.staging()).map_err(cannot("make a staging path"))?;
        let request = crate::claims::stage_request(id, &self.staging());
        let mut node = self.wire.kubelet.node_client();
        let answer = node.node_stage_volume(request).await;
        Ok(self.wire.answered("stage", answer, FULL)?.is_ok())
    }

    async fn unstage(&self, id: &str) -> Result<(), Stop> {
        let request = crate::claims::unstage_request(id, &self.staging());
        let mut node = self.wire.kubelet.node_client();
        let answer = node.node_unstage_volume(request).await;
        self.wire.must("unstage", answer)?;
        fs::remove_dir(self.staging()).map_err(cannot("remove a staging path"))
    }

    /// A whole step: returns whether it found all the space that it needs. Promises are noted.
    async fn make(&mut self, bytes: usize) -> Result<bool, Stop> {
        let pod = self.pod();
        let name = format!("o{}", self.next);
        let output = [("type", "output"), ("name", name.as_str())];
        let answer = pod.publish(VOLUME, output, PublishOptions::default()).await;
        if self
            .wire
            .answered("publish an output", answer, FULL)?
            .is_err()
        {
            // RESOURCE_EXHAUSTED is not final to kubelet: it comes to unpublish.
            self.unpublish(&pod).await?;
            return Ok(false);
        }
        let target = pod.target(VOLUME);
        let written = fs::write(target.join("big"), vec![self.next.to_le_bytes()[0]; bytes])
            .and_then(|()| content::change(&target, self.next, &name));
        let written = room(written)?;
        let content = Arc::new(content::read(&target)?);
        let told = if written {
            let request = api::ReportOutcomeRequest {
                pod_uid: pod.uid().to_owned(),
                outcome: api::Outcome::Succeeded.into(),
                wait: false,
            };
            let answer = self.wire.admin.clone().report_outcome(request).await;
            self.wire.answered("ReportOutcome", answer, FULL)?.is_ok()
        } else {
            false
        };
        self.unpublish(&pod).await?;
        if !told {
            self.report_when_there_is_space(&pod).await?;
            return Ok(false);
        }
        self.promised.push(Promised {
            name: format!("artifact/{name}"),
            content,
        });
        Ok(true)
    }

    /// Says that a pod failed, as often as it takes.
    async fn report_when_there_is_space(&self, pod: &Pod) -> Result<(), Stop> {
        let request = api::ReportOutcomeRequest {
            pod_uid: pod.uid().to_owned(),
            outcome: api::Outcome::Failed.into(),
            wait: false,
        };
        let answer = self.wire.admin.clone().report_outcome(request).await;
        // One that cannot be told now ends when its time is over; here the day ends with it being
        // told again.
        self.wire.answered("ReportOutcome", answer, FULL).map(drop)
    }

    /// Always possible.
    async fn unpublish(&self, pod: &Pod) -> Result<(), Stop> {
        let pod = again_at(&self.wire, pod);
        let answer = pod.unpublish(VOLUME).await;
        self.wire.must("unpublish on a full disk", answer)?;
        pod.remove().map_err(cannot("remove a pod"))
    }

    async fn pin(&mut self, index: usize) -> Result<(), Stop> {
        let (from, expected) = {
            let promised = &self.promised[index];
            (promised.name.clone(), promised.content.clone())
        };
        let pod = self.pod();
        let input = [("type", "input"), ("from", from.as_str())];
        let answer = pod.publish(VOLUME, input, PublishOptions::default()).await;
        self.wire.must("publish an input", answer)?;
        content::expect(&pod.target(VOLUME), &[Seen::Exactly(expected.clone())])?;
        self.pinned.push((pod, expected));
        Ok(())
    }

    fn check_pinned(&self) -> Result<(), Fault> {
        for (pod, expected) in &self.pinned {
            content::expect(&pod.target(VOLUME), &[Seen::Exactly(expected.clone())])?;
        }
        Ok(())
    }

    /// The disk fills up; everything is tried; there is space again; all works.
    async fn round(
        &mut self,
        driver: &mut Driver,
        filler: Filler,
        killed: bool,
    ) -> Result<(), Stop> {
        let scratch = self.pod();
        let answer = scratch
            .publish(VOLUME, [("type", "scratch")], PublishOptions::default())
            .await;
        self.wire.must("publish a scratch", answer)?;
        let beside = self.place.lab.dir("beside");
        let at = match filler {
            Filler::Beside(_) => beside.clone(),
            Filler::Pod | Filler::Names => scratch.target(VOLUME),
        };
        for _ in 0..6 {
            fill(&at, filler).map_err(cannot("fill the disk"))?;
            self.everything().await?;
            self.check_pinned()?;
        }
        if killed {
            fill(&at, filler).map_err(cannot("fill the disk"))?;
            driver.kill();
            count(&self.place.figures.kills);
            // A driver cannot start without any space: what it tries before it believes in overlay
            // needs some.
            content::remove(&at.join("big")).map_err(cannot("make room"))?;
            *driver = self.place.start(None);
            self.wire = driver.connect().await?;
            self.check_pinned()?;
            fill(&at, filler).map_err(cannot("fill the disk"))?;
            self.everything().await?;
        }
        content::remove(&beside).map_err(cannot("make room"))?;
        self.unpublish(&scratch).await?;
        self.all_works_again().await
    }

    /// One of each thing that takes space, each of which may find none; and of each that gives it
    /// back, which must not.
    async fn everything(&mut self) -> Result<(), Stop> {
        let bytes = *self.random.pick(&[0, 5_000, 300_000]);
        self.make(bytes).await?;
        let reaped = self.wire.admin.clone().reap(api::ReapRequest {}).await;
        let _either = self.wire.answered("Reap", reaped, FULL)?;
        let Some((id, bytes)) = self.claim.clone() else {
            return Ok(());
        };
        let mut controller = self.wire.kubelet.controller_client();
        let number = self.number();
        let name = format!("snapshot-{number}");
        let request = crate::claims::snapshot_request(&name, &id);
        let answer = controller.create_snapshot(request).await;
        let taken = self.wire.answered("CreateSnapshot", answer, FULL)?;
        if let Ok(taken) = taken {
            let taken = taken.into_inner().snapshot;
            let snapshot = taken.map(|taken| taken.snapshot_id).unwrap_or_default();
            let request = claim_request(&format!("clone-{number}"), Some(snapshot.clone()));
            let answer = controller.create_volume(request).await;
            if let Ok(made) = self.wire.answered("CreateVolume", answer, FULL)? {
                let made = made.into_inner().volume;
                let clone = made.map(|made| made.volume_id).unwrap_or_default();
                self.use_claim(&clone, &bytes).await?;
                self.delete(&clone).await?;
            }
            self.drop_snapshot(&snapshot).await?;
        }
        self.use_claim(&id, &bytes).await
    }

    /// Content that was fsynced before the flood exists, if the claim can be mounted at all.
    async fn use_claim(&self, id: &str, bytes: &[u8]) -> Result<(), Stop> {
        if self.stage(id).await? {
            let found = fs::read(self.staging().join("kept")).map_err(cannot("read a claim"))?;
            if found != bytes {
                return Err(Fault::lost("a claim's fsynced bytes").into());
            }
            // Two names that take turns, so that it does not grow.
            room(fs::write(self.staging().join("more"), [1; 5000]))?;
            room(fs::remove_file(self.staging().join("more")))?;
            self.unstage(id).await?;
        }
        content::remove(&self.staging()).map_err(cannot("remove a staging path"))
    }

    /// Repeated until there is space for the change of the index, which the reserve, or eviction,
    /// makes.
    async fn delete(&self, id: &str) -> Result<(), Stop> {
        let request = baggageclaim::proto::csi::v1::DeleteVolumeRequest {
            volume_id: id.to_owned(),
            ..Default::default()
        };
        let mut controller = self.wire.kubelet.controller_client();
        let answer = controller.delete_volume(request).await;
        self.wire.answered("DeleteVolume", answer, FULL).map(drop)
    }

    async fn drop_snapshot(&self, id: &str) -> Result<(), Stop> {
        let request = baggageclaim::proto::csi::v1::DeleteSnapshotRequest {
            snapshot_id: id.to_owned(),
            ..Default::default()
        };
        let mut controller = self.wire.kubelet.controller_client();
        let answer = controller.delete_snapshot(request).await;
        self.wire.answered("DeleteSnapshot", answer, FULL).map(drop)
    }

    /// Without a restart: a step finds space, what was promised is there or was evicted, nothing is
    /// left of the rest.
    async fn all_works_again(&mut self) -> Result<(), Stop> {
        let began = Instant::now();
        while !self.make(300_000).await? {
            if began.elapsed() > PATIENCE {
                return Err(Fault::wrong("there is room, and the driver finds none").into());
            }
            // btrfs gives space back when a transaction ends: by itself every 30 s, which is all
            // the time that there is.
            let ended = File::open(self.place.lab.path())
                .and_then(|dir| rustix::fs::syncfs(dir).map_err(Into::into));
            ended.map_err(cannot("end a transaction"))?;
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        self.wire.settle().await?;
        self.check_pinned()?;
        let listed = self.wire.artifacts().await?;
        let log = self.place.said();
        let mut kept = Vec::new();
        for promised in std::mem::take(&mut self.promised) {
            if listed.iter().any(|row| row.reference == promised.name) {
                kept.push(promised);
                continue;
            }
            let evicted = format!("name={} of namespace", promised.name);
            let says_so =
                |line: &str| line.contains("deleting artifact") && line.contains(&evicted);
            if !log.lines().any(says_so) {
                return Err(Fault::lost(format!("{} was promised", promised.name)).into());
            }
        }
        self.promised = kept;
        for index in 0..self.promised.len() {
            let pinned = self.pinned.len();
            self.pin(index).await?;
            while self.pinned.len() > pinned {
                if let Some((pod, _)) = self.pinned.pop() {
                    self.unpublish(&pod).await?;
                }
            }
        }
        // All but what is pinned goes, so that each round has the same space.
        self.wire.settle().await?;
        let mut kept = Vec::new();
        for (index, promised) in std::mem::take(&mut self.promised).into_iter().enumerate() {
            if index < self.pinned.len() {
                kept.push(promised);
            } else {
                self.destroy(&promised.name).await?;
            }
        }
        self.promised = kept;
        self.clear_claims(true).await?;
        // An unmount on a full disk may not have been recorded: this mount is.
        if let Some((id, bytes)) = self.claim.clone() {
            self.use_claim(&id, &bytes).await?;
        }
        self.wire.check().await
    }

    async fn destroy(&self, reference: &str) -> Result<(), Stop> {
        let request = api::DestroyRequest {
            tenant: "ci".to_owned(),
            reference: reference.to_owned(),
        };
        let answer = self.wire.admin.clone().destroy(request).await;
        // It may just have been evicted.
        let answer = self.wire.answered("Destroy", answer, &[Code::NotFound])?;
        drop(answer);
        Ok(())
    }

    /// Deletes claims and snapshots that could not be deleted when there was no space.
    async fn clear_claims(&self, but_ours: bool) -> Result<(), Stop> {
        let (claims, snapshots) = crate::claims::lists(&self.wire).await?;
        for snapshot in snapshots {
            self.drop_snapshot(&snapshot).await?;
        }
        for claim in claims {
            let ours = self.claim.as_ref().is_some_and(|(id, _)| *id == claim);
            if !(ours && but_ours) {
                self.delete(&claim).await?;
            }
        }
        Ok(())
    }

    async fn end(&mut self) -> Result<(), Stop> {
        if let Some((id, bytes)) = self.claim.clone() {
            self.use_claim(&id, &bytes).await?;
        }
        for (pod, _) in std::mem::take(&mut self.pinned) {
            self.unpublish(&pod).await?;
        }
        // Pods whose outcome could not be reported without space.
        for volume in self.wire.volumes().await? {
            self.wire.outcome(&volume.pod_uid, false).await?;
        }
        self.wire.settle().await?;
        self.clear_claims(false).await?;
        for promised in std::mem::take(&mut self.promised) {
            self.destroy(&promised.name).await?;
        }
        for row in self.wire.artifacts().await? {
            self.destroy(&row.reference).await?;
        }
        nothing_left(self.place, &self.wire).await?;
        let space = statvfs(self.place.lab.path()).map_err(|e| cannot("ask for room")(e.into()))?;
        if self.place.ground.fs == Fs::Ext4 && space.f_files - space.f_ffree > 200 {
            let used = space.f_files - space.f_ffree;
            return Err(Fault::leaked(format!("{used} inodes are still in use")).into());
        }
        Ok(())
    }
}

fn claim_request(
    name: &str,
    snapshot: Option<String>,
) -> baggageclaim::proto::csi::v1::CreateVolumeRequest {
    crate::claims::create_request(name, snapshot.map(crate::claims::from_snapshot))
}

/// Whether there was space; any other failure is one.
fn room(result: std::io::Result<()>) -> Result<bool, Stop> {
    match result {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::StorageFull => Ok(false),
        // A file that could not be made does not exist.
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(cannot("write")(error)),
    }
}

/// Takes all the space there is, or all but what is to be left.
fn fill(at: &Path, filler: Filler) -> std::io::Result<()> {
    fs::create_dir_all(at)?;
    if filler == Filler::Names {
        return fill_names(at);
    }
    let big = at.join("big");
    let file = File::options().create(true).append(true).open(&big)?;
    let mut size: u64 = 32 << 20;
    let mut end = file.metadata()?.len();
    while size >= 4096 {
        match fallocate(&file, FallocateFlags::empty(), end, size) {
            Ok(()) => end += size,
            Err(rustix::io::Errno::NOSPC | rustix::io::Errno::DQUOT) => size /= 2,
            Err(error) => return Err(error.into()),
        }
    }
    // Space that only small files find.
    for number in 0..64 {
        match fs::write(at.join(format!("small-{number}")), [1; 4096]) {
            Err(error) if error.kind() == ErrorKind::StorageFull => break,
            other => other?,
        }
    }
    if let Filler::Beside(blocks) = filler {
        file.set_len(end.saturating_sub(blocks * 4096))?;
    }
    Ok(())
}

fn fill_names(at: &Path) -> std::io::Result<()> {
    for number in 0..1_000_000 {
        let dir = at.join(format!("d{}", number / 1000));
        if number % 1000 == 0
            && let Err(error) = fs::create_dir(&dir)
            && error.kind() == ErrorKind::StorageFull
        {
            return Ok(());
        }
        match File::create(dir.join(format!("{number}"))) {
            Err(error) if error.kind() == ErrorKind::StorageFull => return Ok(()),
            other => drop(other?),
        }
    }
    Ok(())
}
