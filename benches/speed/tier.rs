//! The shared tier, on an S3 server that runs on this machine: publishes of local content beside a
//! tier, a cold node, a new commit, the way of a commit to another node, requests and memory.

#![expect(
    clippy::disallowed_methods,
    reason = "what is removed is the bench's own"
)]

use std::fs;
use std::io::Write as _;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use baggageclaim::proto::admin::v1 as api;
use futures_util::StreamExt as _;
use object_store::{ObjectStore, ObjectStoreExt as _};

use crate::archives::{Held, shell, timed};
use crate::cases::{Bench, make_files};
use crate::common::tree::bytes_below;
use crate::driver::Driver;
use crate::nodes::{
    CACHE, READS, SIZE, UNCHANGED, change, fetch_once, file, hand_over, millis, remove, tree, until,
};
use crate::server::{KEY, SECRET, Server};
use crate::table::{Goal, median};

/// Publishes of a task cache in a turn: with a tier that hangs, each waits.
const ASKED: usize = 10;
/// A fetch may read so many bytes in a request, as docs/shared-tier.md says.
const RANGE: u64 = 16 << 20;

/// The server, and the URL of a tier on it.
struct Tier {
    server: Server,
    url: String,
    /// A line for each request.
    log: PathBuf,
}

impl Tier {
    fn start(log: PathBuf) -> Result<Self, &'static str> {
        let log_text = log.to_str().expect("text");
        // Storage of a cloud keeps connections.
        let server = Server::with(&["--keep-alive", "--quiet", "--access-log", log_text])?;
        let endpoint = &server.endpoint;
        let url = format!("s3://bucket/tier?endpoint={endpoint}&allow-http=true&region=us-east-1");
        Ok(Self { server, url, log })
    }

    async fn node(&self, bench: &Bench<'_>, pool: &str) -> Driver {
        node(bench, pool, &self.url).await
    }

    /// How many requests the server has answered.
    async fn requests(&self) -> usize {
        // The server writes a line after its answer.
        tokio::time::sleep(Duration::from_millis(100)).await;
        let log = fs::read_to_string(&self.log).expect("the access log");
        log.lines().count()
    }

    /// The bytes of all layers.
    fn layers(&self) -> u64 {
        bytes_below(&self.server.bucket().join("tier/v1/bench/layers"))
    }
}

async fn node(bench: &Bench<'_>, pool: &str, url: &str) -> Driver {
    let keys = [
        ("AWS_ACCESS_KEY_ID", KEY),
        ("AWS_SECRET_ACCESS_KEY", SECRET),
    ];
    Driver::with(bench.lab, pool, &["--shared", url], &keys).await
}

/// Waits until the tier has what this reference names.
async fn shared(driver: &mut Driver, reference: &str) {
    until(driver, reference, |row| row.shared == "yes").await;
}

impl Bench<'_> {
    /// All rows of the tier.
    pub async fn tier(&mut self) {
        fs::create_dir_all(self.lab.run_dir()).expect("a directory");
        let tier = match Tier::start(self.lab.run_dir().join("requests")) {
            Ok(tier) => tier,
            Err(reason) => {
                eprintln!("bench: nothing measured of the tier: {reason}");
                return;
            }
        };
        self.beside(&tier).await;
        self.requests(&tier).await;
        self.cold(&tier).await;
        self.handed_over(&tier).await;
    }

    /// Publishes of content on this node: without a tier, with one, and with one that hangs.
    async fn beside(&mut self, tier: &Tier) {
        // It takes connections, and never answers.
        let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = silent.local_addr().expect("an address");
        let hangs = format!("s3://bucket?endpoint=http://{address}&allow-http=true&region=x");
        let mut drivers = [
            Driver::start(self.lab, "alone").await,
            tier.node(self, "beside").await,
            node(self, "hangs", &hangs).await,
        ];
        let cache = [("type", "task-cache"), ("key", "kept")];
        for driver in &mut drivers {
            let output = [("type", "output"), ("name", "kept")];
            driver.seal(&output, |dir| make_files(dir, 1)).await;
            driver.seal(&cache, |dir| make_files(dir, 1)).await;
        }
        for reference in ["artifact/kept", "task-cache/kept"] {
            shared(&mut drivers[1], reference).await;
        }
        let input = [("type", "input"), ("from", "artifact/kept")];
        let alone = self.in_turns(&mut drivers, &input, self.plan.turn).await;
        for (what, ours) in [("a tier", alone[1]), ("a tier that hangs", alone[2])] {
            let name = format!("publish of an input on this node, with {what}");
            self.row(&name, "us", ours, Some(alone[0]), Goal::Ratio(1.02));
        }
        let cache = [cache[0], cache[1], ("commit", "never")];
        let asked = self.in_turns(&mut drivers, &cache, ASKED).await;
        for (what, ours) in [("a tier", asked[1]), ("a tier that hangs", asked[2])] {
            let name = format!("wait of a task cache on this node for {what}");
            let waits = (ours - asked[0]) / 1000.0;
            // The limit, and the wake-up of its timer.
            self.row(&name, "ms", waits, None, Goal::AtMost(205.0));
        }
        drivers.into_iter().for_each(Driver::stop);
    }

    /// Publishes by each driver, one after the other; the medians.
    pub async fn in_turns<const N: usize>(
        &self,
        drivers: &mut [Driver; N],
        attributes: &[(&str, &str)],
        turn: usize,
    ) -> [f64; N] {
        let mut medians = [const { Vec::new() }; N];
        for _ in 0..self.plan.rounds {
            let mut took = [const { Vec::new() }; N];
            for number in 0..turn {
                for place in 0..N {
                    let which = (number + place) % N;
                    let publish = self.ours(&mut drivers[which], attributes, 1).await;
                    took[which].push(publish);
                }
            }
            for (took, medians) in took.into_iter().zip(&mut medians) {
                medians.push(median(took));
            }
        }
        medians.map(median)
    }

    /// Requests of one small commit, and of its fetch.
    async fn requests(&mut self, tier: &Tier) {
        let mut maker = tier.node(self, "maker").await;
        let other = tier.node(self, "other").await;
        let (mut commits, mut fetches, mut asked) = (Vec::new(), Vec::new(), Vec::new());
        // The first operation in a namespace reads its format.
        for round in 0..=self.plan.rounds {
            let small = [("type", "task-cache"), ("key", "small")];
            let before = tier.requests().await;
            let pod = maker.pod();
            let (target, _) = maker.publish(&pod, &small);
            let published = tier.requests().await;
            fs::write(target.join("file"), format!("{round}")).expect("write");
            maker.outcome(&pod, api::Outcome::Succeeded, false).await;
            maker.unpublish(&pod);
            maker.settled(&pod).await;
            shared(&mut maker, "task-cache/small").await;
            let committed = tier.requests().await;
            let pod = other.pod();
            other.publish(&pod, &[small[0], small[1], ("commit", "never")]);
            let after = tier.requests().await;
            other.unpublish(&pod);
            if round > 0 {
                asked.push((published - before) as f64);
                commits.push((committed - published) as f64);
                fetches.push((after - committed) as f64);
            }
        }
        let goal = Goal::AtMost(5.0);
        self.row(
            "requests of a commit of one small layer",
            "req",
            median(commits),
            None,
            goal,
        );
        let goal = Goal::AtMost(5.0);
        self.row(
            "requests of the fetch of that layer",
            "req",
            median(fetches),
            None,
            goal,
        );
        let goal = Goal::AtMost(1.0);
        self.row(
            "requests of a publish after an own commit",
            "req",
            median(asked),
            None,
            goal,
        );
        maker.stop();
        other.stop();
    }

    /// A node that has nothing, and then a node that lacks the last commit.
    async fn cold(&mut self, tier: &Tier) {
        let files = self.plan.walked;
        let size = format!("{files} files, {} MB", files * SIZE / 1_000_000);
        let mut maker = tier.node(self, "maker").await;
        let (idle, before) = (maker.status_kib("VmRSS"), tier.layers());
        maker.forget_peak();
        maker.seal(&CACHE, |dir| tree(dir, files)).await;
        shared(&mut maker, "task-cache/tree").await;
        let uploading = (maker.status_kib("VmHWM") - idle) / 1024.0;
        let most = 4 + (tier.layers() - before).div_ceil(RANGE);
        let lower = maker.lower("task-cache/tree").await;

        let place = self.lab.dir("tier");
        let (archive, frames) = (place.join("tar.zst"), place.join("frames"));
        shell(
            "tar -cf - -C \"$0\" . | zstd -3 -T2 -q > \"$1\"",
            &[&lower, &archive],
        );
        let store = tier.server.store();
        let object = object_store::path::Path::from("rival/tar.zst");
        let bytes = fs::read(&archive).expect("read");
        store.put(&object, bytes.into()).await.expect("put");
        fs::remove_file(&archive).expect("remove");
        let held = Held::of(place.clone(), &lower);
        held.send(fs::File::create(&frames).expect("create"));

        let (mut ours, mut rival, mut bound) = (Vec::new(), Vec::new(), Vec::new());
        let (mut fetching, mut requests) = (Vec::new(), Vec::new());
        let mut last = None;
        for round in 0..self.plan.rounds {
            let pool = format!("cold-{round}");
            let node = tier.node(self, &pool).await;
            let (idle, before) = (node.status_kib("VmRSS"), tier.requests().await);
            node.forget_peak();
            let pod = node.pod();
            let (target, took) = node.publish(&pod, &READS);
            ours.push(millis(took));
            fetching.push((node.status_kib("VmHWM") - idle) / 1024.0);
            // The first one of a node reads the format, too.
            requests.push((tier.requests().await - before) as f64 - 1.0);
            assert!(file(&target, files - 1).is_file(), "the content is there");
            node.unpublish(&pod);
            if let Some(node) = last.replace(node) {
                remove(node);
            }

            let to = self.lab.dir("tier/rival");
            let began = Instant::now();
            download(&*store, &object, &archive).await;
            shell(
                "zstd -d -q -c \"$0\" | tar -xf - -C \"$1\"",
                &[&archive, &to],
            );
            rival.push(millis(began.elapsed()));
            fs::remove_dir_all(&to).expect("remove");
            let to = self.lab.dir("tier/bound");
            let open = fs::File::open(&frames).expect("open");
            bound.push(timed(|| held.receive(open, &to)));
            fs::remove_dir_all(&to).expect("remove");
        }
        fs::remove_dir_all(&place).expect("remove");
        let (ours, rival, bound) = (median(ours), median(rival), median(bound));
        let name = format!("cold node, {size}, against tar.zst");
        self.row(&name, "ms", ours, Some(rival), Goal::Ratio(0.5));
        let name = "the same against unpacking from this node's memory";
        self.row(name, "ms", ours, Some(bound), Goal::Ratio(1.3));
        let goal = Goal::AtMost(most as f64);
        self.row("its requests", "req", median(requests), None, goal);
        for (what, rise) in [("uploading", uploading), ("fetching", median(fetching))] {
            let name = format!("memory above idle, {what} it");
            self.row(&name, "MiB", rise, None, Goal::AtMost(48.0));
        }
        let reader = last.expect("there are rounds");
        self.changed(tier, &mut maker, &reader, (files, ours)).await;
        maker.stop();
        reader.stop();
    }

    /// The node has the parent, and one percent of its files changed.
    async fn changed(
        &mut self,
        tier: &Tier,
        maker: &mut Driver,
        reader: &Driver,
        (files, cold): (usize, f64),
    ) {
        let (mut took, mut bytes) = (Vec::new(), Vec::new());
        let mut content = vec![0; SIZE];
        let changed = files / UNCHANGED;
        for _ in 0..self.plan.rounds {
            let before = tier.layers();
            let write = |dir: &Path| change(dir, changed, &mut content);
            maker.seal(&CACHE, write).await;
            shared(maker, "task-cache/tree").await;
            bytes.push((tier.layers() - before) as f64 / 1e6);
            let pod = reader.pod();
            let (target, publish) = reader.publish(&pod, &READS);
            took.push(millis(publish));
            let newest = file(&target, (changed - 1) * UNCHANGED);
            assert_eq!(fs::read(newest).expect("read"), content, "the last commit");
            reader.unpublish(&pod);
        }
        let goal = Goal::Ratio(0.05);
        let name = "the parent is here, 1 % changed, against a cold node";
        self.row(name, "ms", median(took), Some(cold), goal);
        let all = (changed * SIZE) as f64 / 1e6;
        let goal = Goal::Ratio(1.5);
        self.row(
            "its bytes against the changed ones",
            "MB",
            median(bytes),
            Some(all),
            goal,
        );
    }

    /// A pod of another node waits for an output of 100 MB while it is made.
    async fn handed_over(&mut self, tier: &Tier) {
        let mut maker = tier.node(self, "maker").await;
        let other = tier.node(self, "other").await;
        let (mut all, mut waits) = (Vec::new(), Vec::new());
        for round in 0..self.plan.rounds {
            let name = format!("handed-{round}");
            let usable = hand_over(&mut maker, &other, &name).await;
            // The transfer alone: the upload, and a fetch.
            let fetch = fetch_once(tier.node(self, &format!("third-{round}")).await, &name);
            let upload = upload_of(&maker.log(), &format!("artifact/{name}"));
            all.push(millis(usable));
            waits.push(millis(usable) - fetch - upload);
        }
        let (all, waits) = (median(all), median(waits));
        self.row(
            "commit until usable on another node, 100 MB",
            "ms",
            all,
            None,
            Goal::None,
        );
        let name = "of this, without the upload and a fetch";
        self.row(name, "ms", waits, None, Goal::AtMost(300.0));
        maker.stop();
        other.stop();
    }
}

/// Downloads an object into a file, as a program does that cannot unpack meanwhile.
pub async fn download(store: &dyn ObjectStore, object: &object_store::path::Path, to: &Path) {
    let mut file = fs::File::create(to).expect("create");
    let mut stream = store.get(object).await.expect("get").into_stream();
    while let Some(bytes) = stream.next().await {
        file.write_all(&bytes.expect("the next bytes"))
            .expect("write");
    }
}

/// How long the upload of a reference took, as the driver's log says: milliseconds.
fn upload_of(log: &Path, reference: &str) -> f64 {
    let log = fs::read_to_string(log).expect("the log");
    let mut lines = log.lines().rev();
    let line =
        lines.find(|line| line.contains("uploaded to the shared tier") && line.contains(reference));
    let line = line.unwrap_or_else(|| panic!("no upload of {reference}:\n{log}"));
    let took = line.split("took=").nth(1).expect("it says how long");
    let took = took.split_whitespace().next().expect("a duration");
    let number = took.trim_end_matches(|letter: char| !letter.is_ascii_digit());
    let millis = match &took[number.len()..] {
        "s" => 1000.0,
        "ms" => 1.0,
        _ => 0.001,
    };
    number.parse::<f64>().expect("a number") * millis
}
