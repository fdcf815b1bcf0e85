//! The questions of users that wait for answers of nodes: `generations` asks for content, and
//! `rollbacks` for work. Who asks, and what follows from the answers, is decided there.

use std::collections::HashMap;

use tokio::sync::mpsc;

use crate::model::NodeId;

/// The questions of one kind that wait for nodes.
#[derive(Debug)]
pub(super) struct Questions<T> {
    last: u64,
    waiting: HashMap<u64, mpsc::Sender<(NodeId, T)>>,
}

impl<T> Default for Questions<T> {
    fn default() -> Self {
        Self {
            last: 0,
            waiting: HashMap::new(),
        }
    }
}

impl<T> Questions<T> {
    /// A new question for so many nodes: its number, and where their answers come.
    pub(super) fn ask(&mut self, nodes: usize) -> (u64, mpsc::Receiver<(NodeId, T)>) {
        let (answers, received) = mpsc::channel(nodes.max(1));
        self.last += 1;
        self.waiting.insert(self.last, answers);
        (self.last, received)
    }

    /// An answer has come. The question may have ended.
    pub(super) fn answered(&self, question: u64, answer: (NodeId, T)) {
        if let Some(answers) = self.waiting.get(&question) {
            // There is space for one answer of each node that was asked.
            let _answered_before = answers.try_send(answer);
        }
    }

    /// Forgets those that have ended.
    pub(super) fn forget(&mut self) {
        self.waiting.retain(|_, answers| !answers.is_closed());
    }
}
