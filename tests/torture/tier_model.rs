//! The model of the trial with a shared tier: the contents that steps wrote under each name, each
//! with its epoch, which counts the clears of the name that had begun when the step had its volume.
//! A mount shows one of them, bit for bit, and none from before a clear that was answered.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::common::Snapshot;
use crate::content;
use crate::figures::Fault;

pub(crate) const NODES: [&str; 2] = ["torture-one", "torture-two"];

/// A name that steps commit to.
pub(crate) struct Key {
    pub(crate) kind: &'static str,
    pub(crate) name: &'static str,
    /// Whether it is cleared now and then.
    pub(crate) is_cleared: bool,
}

const fn key(kind: &'static str, name: &'static str, is_cleared: bool) -> Key {
    Key {
        kind,
        name,
        is_cleared,
    }
}

pub(crate) const KEYS: [Key; 6] = [
    key("task-cache", "kept", false),
    key("task-cache", "cleared", true),
    key("resource-cache", "kept", false),
    key("resource-cache", "cleared", true),
    key("artifact", "kept", false),
    key("artifact", "cleared", true),
];

impl Key {
    pub(crate) fn reference(&self) -> String {
        format!("{}/{}", self.kind, self.name)
    }

    pub(crate) fn attributes(&self, writes: bool) -> Vec<(&'static str, String)> {
        match self.kind {
            "artifact" if writes => vec![("type", "output".into()), ("name", self.name.into())],
            "artifact" => vec![("type", "input".into()), ("from", self.reference())],
            kind => {
                let commit = if writes { "on-success" } else { "never" };
                vec![
                    ("type", kind.into()),
                    ("key", self.name.into()),
                    ("commit", commit.into()),
                ]
            }
        }
    }

    /// The last commit has the name, and a step of it replaces the content.
    pub(crate) fn last_wins(&self) -> bool {
        self.kind != "resource-cache"
    }
}

/// A content that a step wrote.
#[derive(Clone)]
pub(crate) struct Written {
    pub(crate) node: usize,
    /// Orders the contents of a node.
    pub(crate) serial: u64,
    /// That of its parent if that is lower: a clear removes what follows older content.
    pub(crate) epoch: u64,
    pub(crate) snapshot: Arc<Snapshot>,
}

/// What is known of a name.
#[derive(Default)]
pub(crate) struct Known {
    /// By the text of the file `newest`: all contents whose success was reported, or may have been.
    pub(crate) written: BTreeMap<String, Written>,
    /// How many clears began.
    pub(crate) clears: u64,
    /// By node: the epoch of its last clear that was answered.
    pub(crate) cleared: [u64; NODES.len()],
    /// By node: the last content whose step has ended, and the last of these that is durable.
    pub(crate) promised: [u64; NODES.len()],
    pub(crate) durable: [u64; NODES.len()],
    /// By node: how many steps run that commit to it.
    pub(crate) running: [u32; NODES.len()],
}

pub(crate) struct Model {
    /// By node: its unused content is evicted all the time.
    pub(crate) evicting: [bool; NODES.len()],
    pub(crate) keys: Vec<Mutex<Known>>,
    pub(crate) serial: Mutex<u64>,
}

impl Model {
    pub(crate) fn new(evicting: [bool; NODES.len()]) -> Self {
        Self {
            evicting,
            keys: KEYS.iter().map(|_| Mutex::default()).collect(),
            serial: Mutex::default(),
        }
    }

    pub(crate) fn serial(&self) -> u64 {
        let mut serial = self.serial.lock();
        *serial += 1;
        *serial
    }

    /// All that was promised on a node before this call is durable.
    pub(crate) fn settled(&self, node: usize, promised: &[u64]) {
        for (key, promised) in self.keys.iter().zip(promised) {
            let durable = &mut key.lock().durable[node];
            *durable = (*durable).max(*promised);
        }
    }

    pub(crate) fn promised(&self, node: usize) -> Vec<u64> {
        let promised = |key: &Mutex<Known>| key.lock().promised[node];
        self.keys.iter().map(promised).collect()
    }

    /// The content that a mount shows; `None`: it is empty. `since`: what was known before the
    /// publish.
    pub(crate) fn look(
        &self,
        key: usize,
        found: &Snapshot,
        newest: Option<&str>,
        since: &Since,
    ) -> Result<Option<Written>, Fault> {
        let what = KEYS[key].reference();
        let Some(newest) = newest.filter(|_| !found.is_empty()) else {
            if !found.is_empty() {
                return Err(Fault::wrong(format!("{what} shows what no step wrote")));
            }
            return if since.must_be {
                Err(Fault::lost(format!("{what} is empty; {since:?}")))
            } else {
                Ok(None)
            };
        };
        let written = self.keys[key].lock().written.get(newest).cloned();
        let Some(written) = written else {
            let what = format!("{what} shows {newest}, which no step committed");
            return Err(Fault::wrong(what));
        };
        let differences = content::differences(&written.snapshot, found);
        if !differences.is_empty() {
            let lines = differences.join("; ");
            return Err(Fault::wrong(format!("{what}, {newest}: {lines}")));
        }
        if written.epoch < since.epoch {
            let epoch = written.epoch;
            let what = format!("{what} shows {newest} of epoch {epoch}; {since:?}");
            return Err(Fault::leaked(what));
        }
        if KEYS[key].last_wins() && written.serial < since.durable[written.node] {
            let what = format!("{what} shows {newest}, a later one was durable; {since:?}");
            return Err(Fault::lost(what));
        }
        Ok(Some(written))
    }
}

/// What a publish must show at least.
#[derive(Debug)]
pub(crate) struct Since {
    pub(crate) epoch: u64,
    /// Not empty.
    pub(crate) must_be: bool,
    /// By node: the oldest of its contents.
    pub(crate) durable: [u64; NODES.len()],
}

impl Model {
    /// For a node that had the content itself.
    pub(crate) fn since(&self, node: usize, key: usize) -> Since {
        let known = self.keys[key].lock();
        let mut durable = [0; NODES.len()];
        // Content that was evicted before its upload is lost, and a clear removes it.
        if !self.evicting[node] && !KEYS[key].is_cleared {
            durable[node] = known.durable[node];
        }
        Since {
            epoch: known.cleared[node],
            must_be: durable[node] > 0,
            durable,
        }
    }

    /// For a node that has nothing, after all that is durable was uploaded.
    pub(crate) fn since_uploaded(&self, key: usize) -> Since {
        let known = self.keys[key].lock();
        let mut durable = [0; NODES.len()];
        for (node, durable) in durable.iter_mut().enumerate() {
            if !self.evicting[node] && !KEYS[key].is_cleared {
                *durable = known.durable[node];
            }
        }
        Since {
            epoch: known.cleared.into_iter().max().unwrap_or_default(),
            must_be: durable.iter().any(|serial| *serial > 0),
            durable,
        }
    }
}
