//! Kills of the controller, the node plugins and the sidecars while users create, clone, snapshot,
//! restore, grow and delete claims.
//!
//! `BAGGAGECLAIM_TEST_KILLS=1000` kills that often, and `BAGGAGECLAIM_TEST_SEED` chooses the order.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use baggageclaim::kubelet_double::Kubelet;
use futures_util::future::join_all;
use tokio::sync::watch;

use crate::calls::{try_mount, try_unmount};
use crate::common::random::Random;
use crate::common::{Fs, require_lab};
use crate::driver::{Process, client, controller_with, kubelet, node};
use crate::plane::ControlPlane;
use crate::programs::{Program, controller_manager, sidecar, snapshot_controller};
use crate::standard::{
    ask, assert_no_snapshots, assert_only, bound, define, delete_claim, delete_snapshot, grow,
    held, of_claim, of_snapshot, register, snapshot,
};
use crate::{await_pools, insist, setting};

const USERS: usize = 20;
const NODES: [&str; 2] = ["node-1", "node-2"];

/// The longest that the users take for the steps between two kills.
const PATIENCE: Duration = Duration::from_secs(120);

/// What the users share.
struct World {
    plane: ControlPlane,
    kubelets: Vec<Kubelet>,
    /// How many steps all users have done.
    steps: watch::Sender<u64>,
}

impl World {
    fn step(&self) {
        self.steps.send_modify(|steps| *steps += 1);
    }

    /// A pod of the claim that was just bound runs and ends.
    async fn pod(&self, (id, node): &(String, String), act: impl Fn(&Path)) {
        let at = NODES.iter().position(|name| name == node);
        let kubelet = &self.kubelets[at.expect("one of them")];
        let target = insist(async || try_mount(kubelet, id).await).await;
        act(&target.join("file"));
        insist(async || try_unmount(kubelet, id).await).await;
        self.step();
    }

    async fn claim(
        &self,
        name: &str,
        node: Option<&str>,
        source: Option<serde_json::Value>,
    ) -> (String, String) {
        ask(&self.plane, name, node, source).await;
        let made = bound(&self.plane, name, node).await;
        self.step();
        made
    }

    /// One round of a user. Leaves the claim `restored-<user>`; returns the id of its volume.
    async fn round(&self, user: usize) -> String {
        let plane = &self.plane;
        let [made, clone, taken, restored] =
            ["made", "clone", "taken", "restored"].map(|what| format!("{what}-{user}"));
        let node = NODES.get(user % 4).copied();
        let original = self.claim(&made, node, None).await;
        let writes = user.is_multiple_of(2);
        if writes {
            let write = |file: &Path| fs::write(file, &made).expect("write");
            self.pod(&original, write).await;
        }
        let is_there = |file: &Path| assert_eq!(fs::read_to_string(file).expect("read"), made);
        let cloned = self.claim(&clone, None, Some(of_claim(&made))).await;
        assert_eq!(cloned.1, original.1);
        snapshot(plane, &taken, &made).await;
        self.step();
        delete_claim(plane, &made).await;
        self.step();
        let back = self.claim(&restored, None, Some(of_snapshot(&taken))).await;
        assert_eq!(back.1, original.1);
        if writes {
            self.pod(&cloned, is_there).await;
            self.pod(&back, is_there).await;
        }
        grow(plane, &restored, "2Mi").await;
        self.step();
        delete_snapshot(plane, &taken).await;
        delete_claim(plane, &clone).await;
        self.step();
        back.0
    }

    /// Rounds until no more processes are killed, at least one.
    async fn user(&self, user: usize, kills: &watch::Receiver<bool>) -> String {
        loop {
            let left = self.round(user).await;
            if *kills.borrow() {
                return left;
            }
            delete_claim(&self.plane, &format!("restored-{user}")).await;
            self.step();
        }
    }
}

/// The processes that are killed.
struct Victims {
    drivers: [Process; 3],
    sidecars: [Program; 4],
}

impl Victims {
    /// Kills one after the other, each after a few more steps of the users.
    async fn kill(&mut self, world: &World, random: &mut Random, times: u64) {
        let mut steps = world.steps.subscribe();
        for _ in 0..times {
            let enough = *steps.borrow() + 4 + random.below(9);
            let waited = tokio::time::timeout(PATIENCE, steps.wait_for(|steps| *steps >= enough));
            let moves = waited.await.is_ok();
            assert!(
                moves,
                "the users wait\n{}",
                crate::standard::all(&world.plane)
            );
            // Not only just after a step.
            tokio::time::sleep(Duration::from_millis(random.below(200))).await;
            let victim = random.index(self.drivers.len() + self.sidecars.len());
            if let Some(driver) = self.drivers.get_mut(victim) {
                driver.kill();
                driver.start();
            } else {
                self.sidecars[victim - self.drivers.len()].kill().await;
            }
        }
    }
}

#[tokio::test]
async fn kills_of_any_process_leave_no_claim_stuck_leaked_or_lost() {
    let Some(plane) = ControlPlane::start().await else {
        return;
    };
    let lab = require_lab!(Fs::Ext4);
    let kills = setting("BAGGAGECLAIM_TEST_KILLS", 15);
    let seed = setting("BAGGAGECLAIM_TEST_SEED", u64::from(std::process::id()));
    println!("BAGGAGECLAIM_TEST_SEED={seed} BAGGAGECLAIM_TEST_KILLS={kills}");
    let pools = NODES.map(|name| lab.dir(name));
    let controller = controller_with(&plane, &["--leak-grace=2s"]);
    let nodes = [0, 1].map(|at| node(&plane, NODES[at], &pools[at]));
    define(&plane, true);
    for name in NODES {
        register(&plane, name);
    }
    let _manager = controller_manager(&plane);
    let socket = controller.socket.to_str().expect("text");
    let sidecars = [
        // It takes a finalizer of its own off a snapshot that it did not finish to restore.
        sidecar(
            &plane,
            socket,
            "csi-provisioner",
            &["--snapshot-orphan-sweep-interval=2s"],
        ),
        sidecar(&plane, socket, "csi-resizer", &[]),
        sidecar(&plane, socket, "csi-snapshotter", &[]),
        snapshot_controller(&plane),
    ];
    await_pools(&client(&controller).await, 2).await;
    let mut kubelets = Vec::new();
    for (name, node) in NODES.iter().zip(&nodes) {
        kubelets.push(kubelet(&plane, name, node).await);
    }
    let world = World {
        plane,
        kubelets,
        steps: watch::channel(0).0,
    };
    let [one, two] = nodes;
    let drivers = [controller, one, two];
    let mut victims = Victims { drivers, sidecars };

    // One is mounted all the time, and another is not.
    let mut kept = Vec::new();
    for name in ["mounted", "kept"] {
        kept.push(world.claim(name, Some(NODES[0]), None).await.0);
    }
    let kubelet = &world.kubelets[0];
    for id in &kept {
        let target = try_mount(kubelet, id).await.expect("mounted");
        fs::write(target.join("file"), id).expect("write");
    }
    try_unmount(kubelet, &kept[1]).await.expect("unmounted");

    let began = Instant::now();
    let (ended, kills_ended) = watch::channel(false);
    let mut random = Random::new(seed);
    let users = join_all((0..USERS).map(|user| world.user(user, &kills_ended)));
    let kill = async {
        victims.kill(&world, &mut random, kills).await;
        ended.send_replace(true);
    };
    let (left, ()) = tokio::join!(users, kill);
    println!(
        "kills={kills} steps={} seconds={:.1}",
        *world.steps.borrow(),
        began.elapsed().as_secs_f64()
    );

    let ids: BTreeSet<String> = left.into_iter().chain(kept.iter().cloned()).collect();
    assert_eq!(ids.len(), USERS + kept.len());
    assert_only(&world.plane, &ids).await;
    assert_no_snapshots(&world.plane).await;
    for id in &kept {
        let target = insist(async || try_mount(kubelet, id).await).await;
        assert_eq!(fs::read_to_string(target.join("file")).expect("read"), *id);
        insist(async || try_unmount(kubelet, id).await).await;
    }
    let mut on_disk = BTreeSet::new();
    let [_controller, mut one, mut two] = victims.drivers;
    for (node, pool) in [&mut one, &mut two].into_iter().zip(&pools) {
        node.kill();
        on_disk.extend(held(pool).await);
    }
    assert_eq!(on_disk, ids);
}
