//! The measurements: one function per row or family of rows. Driver and baseline take turns within
//! a run, so that other load affects both. A figure is the median, over the turns, of each turn's
//! median.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Write as _;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use baggageclaim::kubelet_double::Pod;
use baggageclaim::model::{
    Artifact, ArtifactId, LayerId, LayerRecord, Reference, Tenant, Timestamp, Usage, layout,
};
use baggageclaim::proto::admin::v1 as api;
use baggageclaim::proto::csi::v1 as csi;
use baggageclaim::store::{Change, Index, PoolDirs, confirm_layer, write_sealing};

use crate::Plan;
use crate::bare::Volume;
use crate::common::Lab;
use crate::driver::{Driver, prepare, remove};
use crate::table::{Goal, Row, median};

pub const CALLERS: usize = 16;

/// A bench on one filesystem.
pub struct Bench<'a> {
    pub lab: &'a Lab,
    pub plan: &'a Plan,
    pub rows: Vec<Row>,
    /// The medians of the turns' empty calls, in microseconds.
    pub empty: Vec<f64>,
}

/// Makes hand-made volumes, each with its own number.
struct Bare {
    pool: std::path::PathBuf,
    pods: std::path::PathBuf,
    next: AtomicU64,
}

impl Bare {
    fn new(lab: &Lab) -> Self {
        let pods = lab.kubelet_dir().join("bare");
        fs::create_dir_all(&pods).expect("a directory");
        Self {
            pool: lab.dir("bare"),
            pods,
            next: AtomicU64::new(0),
        }
    }

    fn volume(&self) -> Volume {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        Volume::new(&self.pool, &self.pods, number)
    }

    fn fork(&self, lower: &Path) -> f64 {
        let volume = self.volume();
        let took = volume.fork(lower).expect("the bare calls work");
        volume.leave().expect("the bare calls work");
        volume.delete();
        micros(took)
    }

    fn scratch(&self) -> f64 {
        let volume = self.volume();
        let took = volume.scratch().expect("the bare calls work");
        volume.leave().expect("the bare calls work");
        volume.delete();
        micros(took)
    }
}

impl Bench<'_> {
    /// All rows.
    pub async fn run(&mut self) {
        let bare = Bare::new(self.lab);
        let mut driver = Driver::start(self.lab, "pool").await;
        self.empty_call(&driver);
        if self.wants("fork") {
            self.forks(&mut driver, &bare).await;
        }
        if self.wants("scratch") {
            self.scratch(&mut driver, &bare).await;
        }
        if self.wants("unpublish") {
            self.unpublish(&mut driver, &bare).await;
        }
        if self.wants("commit") {
            self.commit(&mut driver).await;
        }
        if self.wants("chain") {
            self.hundred_commits(&mut driver).await;
        }
        if self.wants("callers") {
            self.throughput(&mut driver, &bare).await;
        }
        if self.wants("claims") {
            self.claims(&mut driver).await;
        }
        driver.stop();
        self.clear();
        if self.wants("commits") {
            self.commits().await;
            self.clear();
        }
        if self.wants("archives") {
            self.archives();
            self.clear();
        }
        if self.wants("tier") {
            self.tier().await;
            self.clear();
        }
        if self.wants("peers") {
            self.peers().await;
            self.clear();
        }
        if self.wants("policies") {
            self.policies().await;
            self.clear();
        }
        if self.wants("headline") {
            self.headline().await;
            self.clear();
        }
        if self.wants("start") {
            self.start().await;
            self.clear();
        }
        if self.wants("memory") {
            self.memory().await;
            self.clear();
        }
    }

    /// Deletes what a family has left. A driver makes no tables of contents on a full filesystem.
    #[expect(
        clippy::disallowed_methods,
        reason = "what is removed is the bench's own"
    )]
    fn clear(&self) {
        for left in fs::read_dir(self.lab.path()).expect("a list") {
            let path = left.expect("an entry").path();
            if path.file_name() != Some(OsStr::new("lost+found")) {
                fs::remove_dir_all(path).expect("remove");
            }
        }
    }

    /// The time of an empty call through the socket. Every row that measures a single call has it
    /// in its baseline, since a call waits for it whatever the driver does. These rows alternate
    /// call by call: a loop of empty calls finds warm caches, and a call of kubelet does not.
    pub fn empty_call(&mut self, driver: &Driver) -> f64 {
        let (answer, took) = driver.call("/csi.v1.Identity/Probe", &csi::ProbeRequest {});
        let csi::ProbeResponse { .. } = answer;
        let took = micros(took);
        self.empty.push(took);
        took
    }

    /// Whether this family of rows was requested.
    fn wants(&self, family: &str) -> bool {
        self.plan.only.is_empty() || self.plan.only.iter().any(|only| only == family)
    }

    pub fn row(
        &mut self,
        name: &str,
        unit: &'static str,
        ours: f64,
        baseline: Option<f64>,
        goal: Goal,
    ) {
        let name = format!("{}: {name}", self.lab.fs().name());
        let row = Row::new(name, unit, ours, baseline, goal);
        // It takes long, and may fail later.
        eprintln!("  {row}");
        self.rows.push(row);
    }

    /// One turn of the driver; the median time of a publish.
    pub async fn ours(
        &self,
        driver: &mut Driver,
        attributes: &[(&str, &str)],
        count: usize,
    ) -> f64 {
        let mut took = Vec::with_capacity(count);
        for _ in 0..count {
            let pod = driver.pod();
            let (_, publish) = driver.publish(&pod, attributes);
            took.push(micros(publish));
            driver.unpublish(&pod);
            // No figure here includes deferred work, and neither does the baseline. The rows with
            // many callers include it in both. It begins 5 ms after the answer. Until then a timer
            // runs, which costs 20 us for each wake-up of that thread.
            driver.settled(&pod).await;
            driver.reap().await;
        }
        median(took)
    }

    async fn forks(&mut self, driver: &mut Driver, bare: &Bare) {
        let mut parents = Vec::new();
        for files in [1, 1_000, self.plan.many] {
            let name = format!("parent-{files}");
            driver
                .seal(&[("type", "output"), ("name", &name)], |dir| {
                    make_files(dir, files)
                })
                .await;
            let reference = format!("artifact/{name}");
            let lower = driver.lower(&reference).await;
            parents.push((files, reference, lower, Vec::new(), Vec::new()));
        }
        for _ in 0..self.plan.rounds * self.plan.turn {
            for (_, reference, lower, ours, baseline) in &mut parents {
                baseline.push(self.empty_call(driver) + bare.fork(lower));
                let attributes = [("type", "input"), ("from", reference.as_str())];
                ours.push(self.ours(driver, &attributes, 1).await);
            }
        }
        let mut medians = Vec::new();
        for (files, _, _, ours, baseline) in parents {
            let (ours, baseline) = (median(ours), median(baseline));
            medians.push(ours);
            let name = format!("publish of a fork of {files} files");
            self.row(&name, "us", ours, Some(baseline), Goal::Ratio(2.0));
        }
        let least = medians.iter().copied().fold(f64::INFINITY, f64::min);
        let most = medians.iter().copied().fold(0.0, f64::max);
        let name = "the slowest of these against the fastest";
        self.row(name, "us", most, Some(least), Goal::Ratio(1.2));
    }

    async fn scratch(&mut self, driver: &mut Driver, bare: &Bare) {
        let (mut ours, mut baseline) = (Vec::new(), Vec::new());
        for _ in 0..self.plan.rounds * self.plan.turn {
            baseline.push(self.empty_call(driver) + bare.scratch());
            ours.push(self.ours(driver, &[("type", "scratch")], 1).await);
        }
        let (ours, baseline) = (median(ours), median(baseline));
        self.row(
            "publish of an empty scratch",
            "us",
            ours,
            Some(baseline),
            Goal::Ratio(4.0),
        );
    }

    /// Unpublish after a pod has walked its tree and left much dirty.
    async fn unpublish(&mut self, driver: &mut Driver, bare: &Bare) {
        let (files, dirty) = (self.plan.walked, self.plan.dirty);
        driver
            .seal(&[("type", "output"), ("name", "walked")], |dir| {
                make_files(dir, files)
            })
            .await;
        let lower = driver.lower("artifact/walked").await;
        driver
            .seal(&[("type", "task-cache"), ("key", "walked")], |dir| {
                make_files(dir, files)
            })
            .await;
        let use_it = |dir: &Path| {
            walk(dir);
            write_bytes(&dir.join("dirty"), dirty);
        };
        let (mut ours, mut baseline) = (Vec::new(), Vec::new());
        for _ in 0..self.plan.rounds {
            let pod = driver.pod();
            let (target, _) = driver.publish(&pod, &[("type", "task-cache"), ("key", "walked")]);
            use_it(&target);
            ours.push(micros(driver.unpublish(&pod)));
            // Without a commit: every round starts with the same cache.
            driver.outcome(&pod, api::Outcome::Failed, true).await;
            driver.reap().await;

            let volume = bare.volume();
            volume.fork(&lower).expect("the bare calls work");
            use_it(volume.target());
            let (took, pin) = volume.leave().expect("the bare calls work");
            baseline.push(micros(took) + self.empty_call(driver));
            drop(pin);
            volume.delete();
        }
        let (ours, baseline) = (median(ours), median(baseline));
        let name = format!(
            "unpublish after a walk of {files} files, {} MB dirty",
            dirty >> 20
        );
        self.row(&name, "us", ours, Some(baseline), Goal::Ratio(3.0));
    }

    /// The foreground of a commit: the unpublish of a task cache whose step has succeeded.
    async fn commit(&mut self, driver: &mut Driver) {
        let (mut one, mut many, mut baseline) = (Vec::new(), Vec::new(), Vec::new());
        let files = self.plan.committed;
        let by_hand = self.lab.dir("by-hand");
        fs::create_dir_all(by_hand.join("a")).expect("a directory");
        make_files(&by_hand.join("a"), files);
        for round in 0..self.plan.rounds {
            for (count, figures) in [(1, &mut one), (files, &mut many)] {
                let key = format!("commit-{count}-{round}");
                let attributes = [("type", "task-cache"), ("key", key.as_str())];
                let took = driver.seal(&attributes, |dir| make_files(dir, count)).await;
                figures.push(micros(took));
                // Committed caches are no longer needed, and small images fill up soon.
                let request = api::DestroyRequest {
                    tenant: "bench".to_owned(),
                    reference: format!("task-cache/{key}"),
                };
                driver.admin.destroy(request).await.expect("destroy");
                driver.reap().await;
            }
            let began = Instant::now();
            fs::rename(by_hand.join("a"), by_hand.join("b")).expect("rename");
            let renamed = micros(began.elapsed());
            baseline.push(renamed + self.empty_call(driver));
            fs::rename(by_hand.join("b"), by_hand.join("a")).expect("rename");
        }
        let (one, many) = (median(one), median(many));
        let name = format!("commit of {files} files, in the foreground");
        self.row(
            &name,
            "us",
            many,
            Some(median(baseline)),
            Goal::AtMost(1000.0),
        );
        let name = "the same against a commit of 1 file";
        self.row(name, "us", many, Some(one), Goal::Ratio(1.5));
    }

    async fn hundred_commits(&mut self, driver: &mut Driver) {
        let cache = [("type", "task-cache"), ("key", "chain")];
        driver
            .seal(&[("type", "output"), ("name", "chain")], |dir| {
                make_files(dir, 1_000)
            })
            .await;
        for number in 0..self.plan.commits {
            let count = if number == 0 { 1_000 } else { 1 };
            let write = |dir: &Path| {
                let dir = dir.join(format!("commit-{number}"));
                fs::create_dir(&dir).expect("a directory");
                make_files(&dir, count);
            };
            driver.seal(&cache, write).await;
        }
        driver.reap().await;
        let first = [("type", "input"), ("from", "artifact/chain")];
        let last = [("type", "input"), ("from", "task-cache/chain")];
        let (mut ours, mut baseline) = (Vec::new(), Vec::new());
        for _ in 0..self.plan.rounds {
            ours.push(self.ours(driver, &last, self.plan.turn).await);
            baseline.push(self.ours(driver, &first, self.plan.turn).await);
        }
        let name = format!("publish of a fork after {} commits", self.plan.commits);
        self.row(
            &name,
            "us",
            median(ours),
            Some(median(baseline)),
            Goal::Ratio(1.2),
        );
    }

    /// Publish and unpublish with many concurrent callers, also in a pool with many artifacts.
    async fn throughput(&mut self, driver: &mut Driver, bare: &Bare) {
        let count = self.plan.sealed;
        Driver::start(self.lab, "crowded").await.stop();
        make_sealed(&self.lab.path().join("crowded"), count);
        let mut crowded = Driver::start(self.lab, "crowded").await;
        for driver in [&mut *driver, &mut crowded] {
            let output = [("type", "output"), ("name", "called")];
            driver.seal(&output, |dir| make_files(dir, 1)).await;
        }
        let lower = driver.lower("artifact/called").await;
        let (mut ours, mut there, mut baseline) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..self.plan.rounds {
            ours.push(self.cycles(driver).await);
            there.push(self.cycles(&mut crowded).await);
            baseline.push(self.bare_cycles(bare, &lower));
        }
        crowded.stop();
        let (ours, baseline) = (median(ours), median(baseline));
        let name = format!("publish + unpublish, {CALLERS} callers");
        self.row(&name, "/s", ours, Some(baseline), Goal::Share(0.5));
        let name = format!("the same in a pool of {count} artifacts");
        self.row(&name, "/s", median(there), Some(ours), Goal::Share(0.9));
    }

    /// Cycles per second of all callers together: publish a fork, unpublish it, until the last
    /// volume is deleted. The pods' directories exist already, as after a restart of the pod. They
    /// are kubelet's work, five times as many directories as ours.
    async fn cycles(&self, driver: &mut Driver) -> f64 {
        let attributes = [("type", "input"), ("from", "artifact/called")];
        let pods: Vec<Pod> = (0..CALLERS).map(|_| driver.pod()).collect();
        pods.iter().for_each(prepare);
        let callers = pods.iter().map(|pod| (driver.caller(), pod));
        let (cycles, began) = self.all_at_once(callers, |(caller, pod)| {
            caller.publish(pod, &attributes);
            caller.unpublish(pod);
        });
        for pod in &pods {
            driver.settled(pod).await;
        }
        let took = began.elapsed();
        pods.iter().for_each(remove);
        driver.reap().await;
        f64::from(cycles) / took.as_secs_f64()
    }

    /// The same with the bare calls.
    fn bare_cycles(&self, bare: &Bare, lower: &Path) -> f64 {
        let (cycles, began) = self.all_at_once(0..CALLERS, |_| {
            let volume = bare.volume();
            volume.fork(lower).expect("the bare calls work");
            volume.leave().expect("the bare calls work");
            volume.delete();
        });
        f64::from(cycles) / began.elapsed().as_secs_f64()
    }

    /// How many cycles these callers complete together, each on its own thread, and since when.
    pub fn all_at_once<T: Send>(
        &self,
        callers: impl Iterator<Item = T>,
        cycle: impl Fn(&mut T) + Sync,
    ) -> (u32, Instant) {
        let began = Instant::now();
        let until = began + self.plan.burst;
        let call = |mut caller: T| {
            let mut cycles = 0;
            while Instant::now() < until {
                cycle(&mut caller);
                cycles += 1;
            }
            cycles
        };
        let cycles = std::thread::scope(|scope| {
            let threads: Vec<_> = callers.map(|caller| scope.spawn(|| call(caller))).collect();
            let ended = threads
                .into_iter()
                .map(|thread| thread.join().expect("it ended"));
            ended.sum()
        });
        (cycles, began)
    }

    /// From exec to ready, with a freshly mounted pool: nothing of it is in the page cache.
    async fn start(&mut self) {
        Driver::start(self.lab, "sealed").await.stop();
        let count = self.plan.sealed;
        make_sealed(&self.lab.path().join("sealed"), count);
        let mut took = Vec::new();
        for _ in 0..self.plan.rounds {
            self.lab.remount();
            fs::create_dir_all(self.lab.run_dir()).expect("a directory");
            let mut driver = Driver::start(self.lab, "sealed").await;
            took.push(micros(driver.started) / 1000.0);
            let request = api::StatusRequest {};
            let status = driver.admin.status(request).await.expect("status");
            let artifacts = usize::try_from(status.into_inner().artifacts).expect("a count");
            assert_eq!(artifacts, count, "what was sealed is there");
            driver.stop();
        }
        let name = format!("start with {count} sealed artifacts, cold");
        self.row(&name, "ms", median(took), None, Goal::AtMost(100.0));
    }

    /// The process's memory with many published forks.
    async fn memory(&mut self) {
        let mut driver = Driver::start(self.lab, "many").await;
        driver
            .seal(&[("type", "output"), ("name", "parent")], |dir| {
                make_files(dir, 10)
            })
            .await;
        let attributes = [("type", "input"), ("from", "artifact/parent")];
        let mut pods = Vec::new();
        for _ in 0..self.plan.volumes {
            let pod = driver.pod();
            driver.publish(&pod, &attributes);
            pods.push(pod);
        }
        let published = driver.status_kib("VmRSS") / 1024.0;
        // Mounts outlive the driver; the next one takes them over.
        driver.stop();
        let driver = Driver::start(self.lab, "many").await;
        let recovered = driver.status_kib("VmRSS") / 1024.0;
        for pod in &pods {
            driver.unpublish(pod);
        }
        let count = pods.len();
        driver.stop();
        let goal = Goal::AtMost(64.0);
        let name = format!("resident with {count} forks published");
        self.row(&name, "MiB", published, None, goal);
        let name = format!("resident with {count} forks taken up at start");
        self.row(&name, "MiB", recovered, None, goal);
    }
}

pub fn micros(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e6
}

/// Small files, a hundred per directory, like in source trees.
pub fn make_files(root: &Path, count: usize) {
    for number in 0..count {
        let dir = root.join(format!("{}", number / 100));
        if number % 100 == 0 {
            fs::create_dir(&dir).expect("a directory");
        }
        fs::write(dir.join(format!("{number}")), b"content\n").expect("a file");
    }
}

fn walk(root: &Path) {
    for entry in fs::read_dir(root).expect("a directory").flatten() {
        let found = entry.metadata().expect("it is there");
        if found.is_dir() {
            walk(&entry.path());
        }
    }
}

pub fn write_bytes(path: &Path, bytes: u64) {
    let mut file = File::create(path).expect("a file");
    let block = vec![1_u8; 1 << 20];
    for _ in 0..bytes >> 20 {
        file.write_all(&block).expect("room for it");
    }
}

/// Puts sealed artifacts into a closed pool, in the driver's own format.
pub fn make_sealed(pool: &Path, count: usize) {
    let dirs = PoolDirs::open(pool).expect("a pool");
    let (index, _) = Index::open(&dirs.root).expect("an index");
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .expect("after 1970");
    let now = Timestamp(u64::try_from(since.as_millis()).expect("before the year 500,000,000"));
    let tenant: Tenant = "bench".parse().expect("a label");
    let mut changes = Vec::new();
    for number in 0..count {
        let bits = u128::try_from(number).expect("it fits") + 1;
        let (id, layer) = (ArtifactId::from_bits(bits), LayerId::from_bits(bits));
        let reference: Reference = format!("artifact/a-{number}").parse().expect("a name");
        let artifact = Artifact {
            id,
            tenant: tenant.clone(),
            reference,
            layers: vec![layer],
            created: now,
            ttl_seconds: None,
            last_used: now,
            made_by: None,
            digests: baggageclaim::model::Digests::default(),
            sharing: baggageclaim::model::Sharing::default(),
            fence: 0,
        };
        let name = layer.to_string();
        dirs.layers.create_dir(&name, 0o700).expect("a directory");
        let dir = dirs.layers.open_beneath(&name).expect("a directory");
        dir.create_dir(layout::FS, 0o755).expect("a directory");
        let record = LayerRecord {
            format: LayerRecord::FORMAT,
            id: layer,
            artifact: Some(artifact.clone()),
            claim: None,
        };
        write_sealing(&dir, &record).expect("a record");
        confirm_layer(&dir).expect("confirmed");
        let usage = Usage {
            bytes: 4096,
            files: 0,
            directories: 0,
        };
        changes.push(Change::PutName(artifact.name(), id));
        changes.push(Change::PutArtifact(artifact));
        changes.push(Change::PutLayer(layer, usage));
    }
    index.commit(&changes).expect("room for it");
    dirs.root.sync_filesystem().expect("room for it");
}
