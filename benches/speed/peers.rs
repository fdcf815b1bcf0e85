//! Content from a peer: a cold node, a new commit, the way of a commit to another node, and
//! publishes of local content beside peers. Both ends and their link are on this machine.

#![expect(
    clippy::disallowed_methods,
    reason = "what is removed is the bench's own"
)]

use std::fmt::Write as _;
use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};

use baggageclaim::link::Key;
use baggageclaim::proto::admin::v1 as api;

use crate::archives::{bound, shell, timed};
use crate::cases::{Bench, make_files};
use crate::driver::Driver;
use crate::nodes::{
    CACHE, READS, SIZE, UNCHANGED, change, fetch_once, file, hand_over, millis, remove, tree, until,
};
use crate::table::{Goal, median};

/// What others pipe through a shell on one machine.
const RIVAL: &str = "tar -cf - -C \"$0\" . | zstd -1 -q | zstd -d -q | tar -xf - -C \"$1\"";

/// Nodes that know each other.
pub struct Nodes {
    /// The list of all, and the keys beside it.
    dir: PathBuf,
    addresses: Vec<(String, String)>,
}

impl Nodes {
    /// Nodes of these names. Those of `silent` take connections, and never answer.
    fn new(dir: PathBuf, names: &[String], silent: &[&TcpListener]) -> Self {
        let free = || TcpListener::bind("127.0.0.1:0").expect("a port");
        // All at once, so that each has its own.
        let ports: Vec<TcpListener> = names.iter().map(|_| free()).collect();
        let address = |port: &TcpListener| port.local_addr().expect("an address").to_string();
        let (mut list, mut addresses) = (String::new(), Vec::new());
        for (name, port) in names.iter().zip(&ports) {
            let key = Key::open(&dir.join(name)).expect("a key").name();
            let address = address(port);
            let _ = writeln!(list, "{name} {address} {key}");
            addresses.push((name.clone(), address));
        }
        for (number, port) in silent.iter().enumerate() {
            let key = Key::generate().expect("a key").name();
            let _ = writeln!(list, "silent-{number} {} {key}", address(port));
        }
        fs::write(dir.join("list"), list).expect("write");
        Self { dir, addresses }
    }

    pub async fn start(&self, bench: &Bench<'_>, name: &str) -> Driver {
        let (_, address) = self
            .addresses
            .iter()
            .find(|(it, _)| it == name)
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
        Driver::with(bench.lab, name, &arguments, &[]).await
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

    pub fn nodes(&self, names: &[&str], silent: &[&TcpListener]) -> Nodes {
        let dir = self.lab.run_dir().join(format!("peers-{}", names[0]));
        fs::create_dir_all(&dir).expect("a directory");
        let rounds = 0..self.plan.rounds;
        let of_round = rounds.map(|round| format!("{}-{round}", names[names.len() - 1]));
        let names: Vec<String> = names.iter().map(ToString::to_string).collect();
        Nodes::new(
            dir,
            &names.into_iter().chain(of_round).collect::<Vec<_>>(),
            silent,
        )
    }

    /// Publishes of content on this node: without peers, with one, and with one that hangs.
    async fn local_beside_peers(&mut self) {
        let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
        let nodes = self.nodes(&["beside", "neighbour"], &[]);
        let hanging = self.nodes(&["hanging"], &[&silent]);
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
        let nodes = self.nodes(&["holder", "cold"], &[]);
        let mut holder = nodes.start(self, "holder").await;
        holder.seal(&CACHE, |dir| tree(dir, files)).await;
        offered(&mut holder, "task-cache/tree").await;
        let lower = holder.lower("task-cache/tree").await;
        let (mut ours, mut rival, mut floor) = (Vec::new(), Vec::new(), Vec::new());
        let mut last: Option<Driver> = None;
        for round in 0..self.plan.rounds {
            let node = nodes.start(self, &format!("cold-{round}")).await;
            let pod = node.pod();
            let (target, took) = node.publish(&pod, &READS);
            ours.push(millis(took));
            assert!(file(&target, files - 1).is_file(), "the content is there");
            node.unpublish(&pod);
            if let Some(node) = last.replace(node) {
                remove(node);
            }
            let to = self.lab.dir("peers/rival");
            rival.push(timed(|| shell(RIVAL, &[&lower, &to])));
            fs::remove_dir_all(&to).expect("remove");
            let to = self.lab.dir("peers/bound");
            floor.push(bound(&lower, &to, (files, SIZE)));
            fs::remove_dir_all(&to).expect("remove");
        }
        let (ours, rival, floor) = (median(ours), median(rival), median(floor));
        let size = format!("{files} files, {} MB", files * SIZE / 1_000_000);
        let name = format!("cold node from a peer, {size}, against tar | zstd");
        self.row(&name, "ms", ours, Some(rival), Goal::None);
        let name = "the same against the processors' bound";
        self.row(name, "ms", ours, Some(floor), Goal::Ratio(1.25));
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
        let nodes = self.nodes(&["giver", "taker", "third"], &[]);
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
