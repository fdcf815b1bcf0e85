//! The questions of users that wait for answers of nodes, and the answer that has content:
//! `generations` asks for that, and `rollbacks` for work. Who asks, and what follows from the
//! answers, is decided there.

use std::collections::{HashMap, HashSet};

use tokio::sync::mpsc;

use crate::model::{ArtifactId, Maker, NodeId, Timestamp};

/// Content that was committed under a name, and is still on a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Generation {
    /// The artifact's id on its node.
    pub id: ArtifactId,
    /// When it was committed.
    pub created: Timestamp,
    /// Whether the name points at it there.
    pub is_current: bool,
    /// Its size; `None`: not measured yet.
    pub bytes: Option<u64>,
    /// How many volumes are forks of it.
    pub in_use_by: u64,
    /// What committed it; `None`: not known.
    pub made_by: Option<Maker>,
}

/// Why a node did not carry out an order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RollbackRefusal {
    /// For people.
    pub why: String,
    /// It has no such generation any more. Another node may have it.
    pub is_gone: bool,
}

impl From<String> for RollbackRefusal {
    fn from(why: String) -> Self {
        let is_gone = false;
        Self { why, is_gone }
    }
}

/// The questions of one kind that wait for nodes.
#[derive(Debug)]
pub(super) struct Questions<T> {
    last: u64,
    waiting: HashMap<u64, Waiting<T>>,
}

/// A question that waits.
#[derive(Debug)]
struct Waiting<T> {
    /// The nodes that were asked and have not answered.
    silent: HashSet<NodeId>,
    answers: mpsc::Sender<(NodeId, T)>,
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
    /// A new question for these nodes: its number, and where their answers come. They end when all
    /// nodes have answered.
    pub(super) fn ask(&mut self, nodes: HashSet<NodeId>) -> (u64, mpsc::Receiver<(NodeId, T)>) {
        let (answers, received) = mpsc::channel(nodes.len().max(1));
        self.last += 1;
        let silent = nodes;
        if !silent.is_empty() {
            self.waiting.insert(self.last, Waiting { silent, answers });
        }
        (self.last, received)
    }

    /// An answer has come. The question may have ended. The first answer of each node that was
    /// asked counts: another node may guess the number.
    pub(super) fn answered(&mut self, question: u64, answer: (NodeId, T)) {
        if let Some(waiting) = self.waiting.get_mut(&question)
            && waiting.silent.remove(&answer.0)
        {
            // There is space for one answer of each node.
            let _ended = waiting.answers.try_send(answer);
            if waiting.silent.is_empty() {
                self.waiting.remove(&question);
            }
        }
    }

    /// Forgets those whose asker waits no longer.
    pub(super) fn forget(&mut self) {
        self.waiting.retain(|_, it| !it.answers.is_closed());
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc::error::TryRecvError;

    use super::*;

    #[test]
    fn a_question_takes_one_answer_of_each_node_that_was_asked() {
        let node = |name: &str| NodeId::new(name).expect("a name");
        let mut questions = Questions::default();
        let (first, mut answers) = questions.ask([node("a")].into());
        questions.answered(first, (node("b"), "forged"));
        questions.answered(first + 1, (node("a"), "of another question"));
        for text in ["true", "again"] {
            questions.answered(first, (node("a"), text));
        }
        assert_eq!(answers.try_recv(), Ok((node("a"), "true")));
        assert_eq!(answers.try_recv(), Err(TryRecvError::Disconnected));
        assert!(questions.waiting.is_empty());

        // The asker of this one does not wait for the second node.
        let (second, mut answers) = questions.ask([node("a"), node("b")].into());
        questions.answered(second, (node("b"), "one"));
        assert_eq!(answers.try_recv(), Ok((node("b"), "one")));
        assert_eq!(answers.try_recv(), Err(TryRecvError::Empty));
        questions.forget();
        assert_eq!(questions.waiting.len(), 1);
        drop(answers);
        questions.forget();
        assert!(questions.waiting.is_empty());

        let (_, mut answers) = questions.ask(HashSet::new());
        assert_eq!(answers.try_recv(), Err(TryRecvError::Disconnected));
    }
}
