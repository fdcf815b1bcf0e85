//! The end of a schedule: everything runs until nothing is left to do, and then the invariants
//! must hold.

use std::collections::BTreeSet;

use super::{NODES, Random, World};
use crate::api::{Phase, Volume};
use crate::model::PersistentVolume;

impl World {
    /// Has everything run until nothing is left to do.
    pub(super) fn settle(&mut self, random: &mut Random) {
        for (number, name) in NODES.iter().enumerate() {
            // A node whose Node object is there works. Another one may stay away.
            let has_node = self.server.now.nodes.contains(*name);
            if !self.nodes[number].is_on && (has_node || random.below(2) == 0) {
                self.power_on(number, random.below(4) == 0);
            }
        }
        if !self.nodes.iter().any(|node| node.is_on) {
            self.power_on(0, false);
        }
        self.kill_controller(1);
        for _ in 0..120 {
            for node in 0..NODES.len() {
                for what in [0, 0, 1, 1, 2, 4, 4, 5, 5, 6] {
                    self.node(node, what);
                }
            }
            for life in 0..self.lives.len() {
                let is_called = self.lives[life].order[0].is_some();
                if is_called || !self.lives[life].done {
                    self.call(life, 0, random);
                }
            }
            self.keep_orphans();
            self.delete_leaks();
            self.end_temporary(0);
            self.end_orphans();
            self.give_up();
            self.server.sweep();
        }
    }

    /// Checks the invariants.
    pub(super) fn check(&self) {
        let seed = self.seed;
        let undone = self.lives.iter().filter(|life| !life.done).count();
        assert_eq!(undone, 0, "seed {seed}: calls never end");
        let bound = self.lives.iter().filter_map(|life| life.bound.as_ref());
        let named: BTreeSet<&String> = bound.clone().map(|bound| &bound.id).collect();
        for (id, volume) in &self.server.now.volumes {
            assert!(named.contains(id), "seed {seed}: not needed: {volume:?}");
            let has_node = self.server.now.nodes.contains(&volume.spec.node_name);
            assert_ne!(has_node, volume.is_node_gone(), "seed {seed}: {volume:?}");
        }
        for bound in bound {
            let mut nodes = self.nodes.iter();
            let node = nodes.find(|node| node.name == bound.node).expect("one");
            let held = node.disk.claims.get(&bound.id);
            let content = |claim: &PersistentVolume| Some(claim.created.0) == bound.content;
            let other = node.other.claims.get(&bound.id);
            assert!(
                // An older disk may have older data of the claim. It is not empty then.
                bound.content.is_none() || held.is_none_or(content) || other.is_some_and(content),
                "seed {seed}: {} was made again empty",
                bound.id
            );
            let volume = self.server.now.volumes.get(&bound.id);
            let phase = volume.and_then(Volume::phase);
            let status = volume.and_then(|volume| volume.status.as_ref());
            let is_of_other = status.is_some_and(|status| status.pool == node.other.pool);
            if node.is_on && held.is_some() && !is_of_other {
                assert_eq!(phase, Some(Phase::Ready), "seed {seed}: {volume:?}");
            } else if node.is_on {
                assert!(
                    volume.is_none() || phase == Some(Phase::Lost),
                    "seed {seed}"
                );
            }
        }
        if !self.is_rough {
            let held = self.nodes.iter().flat_map(|one| one.disk.claims.keys());
            let held: BTreeSet<&String> = held.collect();
            let ready: BTreeSet<&String> = self.server.now.volumes.keys().collect();
            assert_eq!(held, ready, "seed {seed}: engines and Volumes");
            assert_eq!(ready, named, "seed {seed}: Volumes and PersistentVolumes");
        }
        self.check_snapshots();
    }
}
