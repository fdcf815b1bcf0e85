//! Steps of rough schedules: deleted objects, an older etcd, nodes that are gone and back, other
//! disks.

use super::{NODES, Random, World};
use crate::api::{Snapshot, Volume};

impl World {
    /// A node comes back; `replaced`: with its other disk.
    pub(super) fn power_on(&mut self, number: usize, replaced: bool) {
        let node = &mut self.nodes[number];
        if replaced {
            std::mem::swap(&mut node.disk, &mut node.other);
        }
        node.is_on = true;
        node.restart(&mut self.server);
        self.server.now.nodes.insert(node.name.to_owned());
        node.publish(&mut self.server);
    }

    pub(super) fn rough_step(&mut self, node: usize, random: &mut Random) {
        match random.below(8) {
            // `kubectl delete volumes`.
            0 => {
                let which = random.below(3);
                self.server
                    .remove_all(|one: &Volume| which == 0 || one.spec.node_name == NODES[which]);
                self.server
                    .remove_all(|one: &Snapshot| which == 0 || one.spec.node_name == NODES[which]);
            }
            1 => self.backup = Some((self.server.now.clone(), self.lives.clone())),
            2 => {
                let Some((stored, lives)) = self.backup.take() else {
                    return;
                };
                // All that watches is restarted after that.
                self.server.now = stored;
                self.lives = lives;
                (0..2).for_each(|controller| self.kill_controller(controller));
                for number in 0..NODES.len() {
                    if self.nodes[number].is_on {
                        self.power_on(number, false);
                    }
                }
            }
            3 => self.nodes[node].is_on = false,
            4 => {
                self.nodes[node].is_on = false;
                self.server.now.nodes.remove(NODES[node]);
            }
            5 => self.give_up(),
            6 if !self.nodes[node].is_on => self.power_on(node, random.below(3) == 0),
            7 => self.server.now.pools.clear(),
            _ => {}
        }
    }
}
