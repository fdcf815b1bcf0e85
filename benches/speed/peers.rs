//! Content from a peer: a cold node, a new commit, the way of a commit to another node, and
//! publishes of local content beside peers. Two network namespaces of this machine are the nodes'.

#![expect(
    clippy::disallowed_methods,
    reason = "what is removed is the bench's own"
)]

use std::fmt::Write as _;
use std::fs;
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use baggageclaim::link::Key;
use baggageclaim::proto::admin::v1 as api;

use crate::archives::{bound, timed};
use crate::cases::{Bench, make_files};
use crate::driver::{DRIVER, Driver};
use crate::link::{Link, Side};
use crate::nodes::{
    CACHE, READS, SIZE, UNCHANGED, change, fetch_once, file, hand_over, millis, remove, tree, until,
};
use crate::table::{Goal, median};

/// What others run on the two nodes.
const SENDS: &str = "tar -cf - -C \"$0\" . | zstd -1 -q";
const UNPACKS: &str = "zstd -d -q | tar -xf - -C \"$0\"";
const SYNCS: &str = "sync -f \"$0\"";

/// A part of the rival: a script with one end of a connection.
fn runs(script: &str, at: &Path, input: Stdio, output: Stdio) -> Child {
    let mut shell = Command::new("sh");
    shell.arg("-c").arg(script).arg(at);
    let child = shell.stdin(input).stdout(output).spawn();
    child.expect("sh starts")
}

fn ends(mut child: Child, script: &str) {
    let ended = child.wait().expect("it ends");
    assert!(ended.success(), "{script}");
}

/// Copies a tree over the link as others do. Milliseconds, until all is there and until all is on
/// the disk.
fn rival(link: &Link, from: &Path, to: &Path) -> (f64, f64) {
    let (near, far) = link.connection();
    let of = |stream: TcpStream| Stdio::from(OwnedFd::from(stream));
    let copied = timed(|| {
        let sends = runs(SENDS, from, Stdio::null(), of(near));
        let unpacks = runs(UNPACKS, to, of(far), Stdio::null());
        ends(sends, SENDS);
        ends(unpacks, UNPACKS);
    });
    let synced = timed(|| ends(runs(SYNCS, to, Stdio::null(), Stdio::null()), SYNCS));
    (copied, copied + synced)
}

/// Nodes that know each other.
pub struct Nodes {
    pub link: Link,
    /// The list of all, and the keys beside it.
    dir: PathBuf,
    /// The name, the side and the address of each.
    places: Vec<(String, Side, String)>,
}

impl Nodes {
    /// Nodes of these names: the first one is on the near side of a link, and the others on the far
    /// side. A node of the list that is `silent` takes connections there, and never answers.
    fn new(dir: PathBuf, names: &[String], silent: bool) -> (Self, Option<TcpListener>) {
        let link = Link::new();
        let (mut list, mut places) = (String::new(), Vec::new());
        for (number, name) in names.iter().enumerate() {
            let side = if number == 0 { Side::Near } else { Side::Far };
            let key = Key::open(&dir.join(name)).expect("a key").name();
            let address = link.address(side);
            let _ = writeln!(list, "{name} {address} {key}");
            places.push((name.clone(), side, address));
        }
        let silent = silent.then(|| link.listen(Side::Far));
        if let Some(silent) = &silent {
            let key = Key::generate().expect("a key").name();
            let address = silent.local_addr().expect("an address");
            let _ = writeln!(list, "silent {address} {key}");
        }
        fs::write(dir.join("list"), list).expect("write");
        (Self { link, dir, places }, silent)
    }

    pub async fn start(&self, bench: &Bench<'_>, name: &str) -> Driver {
        let (_, side, address) = self
            .places
            .iter()
            .find(|(it, ..)| it == name)
            .expect("it is in the list");
        let text = |name: &str| self.dir.join(name).to_str().expect("text").to_owned();
        let (list, key) = (text("list"), text(name));
        let arguments = [
            "--peers",
            &list,
            "--peer-key",
            &key,
            "--peer-listen",
            address,
        ];
        let command = self.link.command(*side, DRIVER);
        Driver::by(command, bench.lab, name, &arguments, &[]).await
    }
}

/// Waits until content is durable, with its table of contents: then peers get it.
pub async fn offered(driver: &mut Driver, reference: &str) {
    let is_ready = |row: &api::Artifact| {
        let tables = &row.table_digests;
        row.durable && !tables.is_empty() && tables.iter().all(|digest| !digest.is_empty())
    };
    until(driver, reference, is_ready).await;
}

impl Bench<'_> {
    /// All rows of peers.
    pub async fn peers(&mut self) {
        self.local_beside_peers().await;
        self.local_in_a_cluster().await;
        self.cold_from_a_peer().await;
        self.handed_to_a_peer().await;
    }

    pub fn nodes(&self, names: &[&str]) -> Nodes {
        self.nodes_beside(names, false).0
    }

    /// The same, and perhaps a node that never answers.
    fn nodes_beside(&self, names: &[&str], silent: bool) -> (Nodes, Option<TcpListener>) {
        let dir = self.lab.run_dir().join(format!("peers-{}", names[0]));
        fs::create_dir_all(&dir).expect("a directory");
        let rounds = 0..self.plan.rounds;
        let of_round = rounds.map(|round| format!("{}-{round}", names[names.len() - 1]));
        let names = names.iter().map(ToString::to_string);
        let names: Vec<String> = names.chain(of_round).collect();
        Nodes::new(dir, &names, silent)
    }

    /// Publishes of content on this node: without peers, with one, and with one that hangs.
    async fn local_beside_peers(&mut self) {
        let nodes = self.nodes(&["beside", "neighbour"]);
        let (hanging, _silent) = self.nodes_beside(&["hanging"], true);
        let neighbour = nodes.start(self, "neighbour").await;
        let mut drivers = [
            Driver::start(self.lab, "alone").await,
            nodes.start(self, "beside").await,
            hanging.start(self, "hanging").await,
        ];
        for driver in &mut drivers {
            let output = [("type", "output"), ("name", "kept")];
            driver.seal(&output, |dir| make_files(dir, 1)).await;
        }
        let input = [("type", "input"), ("from", "artifact/kept")];
        let took = self.in_turns(&mut drivers, &input, self.plan.turn).await;
        for (what, ours) in [("a peer", took[1]), ("a peer that hangs", took[2])] {
            let name = format!("publish of an input on this node, with {what}");
            self.row(&name, "us", ours, Some(took[0]), Goal::Ratio(1.02));
        }
        drivers.into_iter().for_each(Driver::stop);
        neighbour.stop();
    }

    /// A node that has nothing, and then a node that lacks the last commit.
    async fn cold_from_a_peer(&mut self) {
        let files = self.plan.walked;
        let nodes = self.nodes(&["holder", "cold"]);
        let mut holder = nodes.start(self, "holder").await;
        holder.seal(&CACHE, |dir| tree(dir, files)).await;
        offered(&mut holder, "task-cache/tree").await;
        let lower = holder.lower("task-cache/tree").await;
        let (mut ours, mut floor) = (Vec::new(), Vec::new());
        let (mut copied, mut synced, mut worked) = (Vec::new(), Vec::new(), Vec::new());
        let mut last: Option<Driver> = None;
        for round in 0..self.plan.rounds {
            let node = nodes.start(self, &format!("cold-{round}")).await;
            let pod = node.pod();
            let both = || holder.worked() + node.worked();
            let before = both();
            let (target, took) = node.publish(&pod, &READS);
            ours.push(millis(took));
            worked.push(both() - before);
            assert!(file(&target, files - 1).is_file(), "the content is there");
            node.unpublish(&pod);
            if let Some(node) = last.replace(node) {
                remove(node);
            }
            let to = self.lab.dir("peers/rival");
            let (until_there, until_durable) = rival(&nodes.link, &lower, &to);
            copied.push(until_there);
            synced.push(until_durable);
            fs::remove_dir_all(&to).expect("remove");
            let to = self.lab.dir("peers/bound");
            floor.push(bound(&lower, &to, (files, SIZE)));
            fs::remove_dir_all(&to).expect("remove");
        }
        let (ours, floor) = (median(ours), median(floor));
        let size = format!("{files} files, {} MB", files * SIZE / 1_000_000);
        let name = format!("cold node from a peer, {size}, against tar | zstd over the link");
        self.row(&name, "ms", ours, Some(median(copied)), Goal::None);
        let name = "the same against tar | zstd and a sync";
        self.row(name, "ms", ours, Some(median(synced)), Goal::None);
        let name = "the same against the processors' bound";
        self.row(name, "ms", ours, Some(floor), Goal::Ratio(1.25));
        let name = "its processors' time on both nodes, against that of the bound";
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let work = floor * cores as f64;
        self.row(name, "ms", median(worked), Some(work), Goal::None);
        let reader = last.expect("there are rounds");
        self.changed_at_a_peer(&mut holder, &reader, (files, ours))
            .await;
        holder.stop();
        reader.stop();
    }

    /// The node has the parent, and one percent of its files changed.
    async fn changed_at_a_peer(
        &mut self,
        holder: &mut Driver,
        reader: &Driver,
        (files, cold): (usize, f64),
    ) {
        let (mut took, mut bytes) = (Vec::new(), Vec::new());
        let mut content = vec![0; SIZE];
        let changed = files / UNCHANGED;
        for round in 0..self.plan.rounds {
            // A cache that is here is used as it is, so each commit has a name of its own.
            let key = format!("tree-{round}");
            let named = [
                ("type", "task-cache"),
                ("key", &key),
                ("restoreKeys", "tree"),
            ];
            let write = |dir: &Path| change(dir, changed, &mut content);
            holder.seal(&named, write).await;
            offered(holder, &format!("task-cache/{key}")).await;
            let before = sent(holder).await;
            let pod = reader.pod();
            let [kind, key, restore] = named;
            let reads = [kind, key, restore, ("commit", "never")];
            let (target, publish) = reader.publish(&pod, &reads);
            took.push(millis(publish));
            let newest = file(&target, (changed - 1) * UNCHANGED);
            assert_eq!(fs::read(newest).expect("read"), content, "the last commit");
            reader.unpublish(&pod);
            bytes.push((sent(holder).await - before) as f64 / 1e6);
        }
        let name = "the parent is here, 1 % changed, against a cold node";
        self.row(name, "ms", median(took), Some(cold), Goal::Ratio(0.03));
        let all = (changed * SIZE) as f64 / 1e6;
        let name = "its bytes against the changed ones";
        self.row(name, "MB", median(bytes), Some(all), Goal::Ratio(1.5));
    }

    /// A pod of another node waits for an output of 100 MB while it is made.
    async fn handed_to_a_peer(&mut self) {
        let nodes = self.nodes(&["giver", "taker", "third"]);
        let mut giver = nodes.start(self, "giver").await;
        let taker = nodes.start(self, "taker").await;
        let (mut all, mut waits) = (Vec::new(), Vec::new());
        for round in 0..self.plan.rounds {
            let name = format!("handed-{round}");
            let usable = hand_over(&mut giver, &taker, &name).await;
            let fetch = fetch_once(nodes.start(self, &format!("third-{round}")).await, &name);
            all.push(millis(usable));
            waits.push(millis(usable) - fetch);
        }
        let name = "commit until usable at a peer, 100 MB";
        self.row(name, "ms", median(all), None, Goal::None);
        let name = "of this, without a fetch";
        self.row(name, "ms", median(waits), None, Goal::AtMost(100.0));
        giver.stop();
        taker.stop();
    }
}

/// Bytes that a node has sent to peers.
async fn sent(driver: &mut Driver) -> u64 {
    let status = driver.admin.status(api::StatusRequest {}).await;
    let status = status.expect("a status").into_inner();
    status.peers.expect("it has peers").sent_bytes
}
