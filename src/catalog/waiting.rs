//! Questions that wait: an answer without content is held until it changes. Only reads the catalog;
//! the hub calls it after each change, and has the clocks that end a wait.

use std::collections::{BTreeMap, HashMap};
use std::mem::discriminant;

use crate::model::Timestamp;

use super::apply::Changes;
use super::find::{Answer, Asked};
use super::name::NameHash;
use super::state::Catalog;

/// Questions that wait for another answer. `T` is how the hub knows the asking node.
#[derive(Debug)]
pub struct WaitingQuestions<T> {
    questions: BTreeMap<u64, Question<T>>,
    by_name: HashMap<NameHash, Vec<u64>>,
    last: u64,
}

#[derive(Debug)]
struct Question<T> {
    asked: Asked,
    /// The answer when it was asked.
    first: Answer,
    node: T,
}

impl<T> Default for WaitingQuestions<T> {
    fn default() -> Self {
        Self {
            questions: BTreeMap::new(),
            by_name: HashMap::new(),
            last: 0,
        }
    }
}

impl<T> WaitingQuestions<T> {
    /// Answers now if there is content, or if accounts are missing. Else the question is held.
    pub fn ask(
        &mut self,
        catalog: &Catalog,
        asked: Asked,
        node: T,
        now: Timestamp,
    ) -> Option<Answer> {
        let first = catalog.find(&asked, now);
        // Without all accounts the asking node can ask the others itself.
        if matches!(first, Answer::Found(_) | Answer::Incomplete) {
            return Some(first);
        }
        self.last += 1;
        let of_name = self.by_name.entry(asked.hash).or_default();
        of_name.push(self.last);
        let question = Question { asked, first, node };
        self.questions.insert(self.last, question);
        None
    }

    /// The questions whose answer is another one now. Call it after each change of the catalog.
    pub fn changed(
        &mut self,
        catalog: &Catalog,
        changes: &Changes,
        now: Timestamp,
    ) -> Vec<(T, Answer)> {
        let mut asked: Vec<u64> = if changes.all {
            self.questions.keys().copied().collect()
        } else {
            let names = changes
                .names
                .iter()
                .filter_map(|name| self.by_name.get(name));
            names.flatten().copied().collect()
        };
        asked.sort_unstable();
        asked.dedup();
        let mut answers = Vec::new();
        for id in asked {
            let Some(question) = self.questions.get(&id) else {
                continue;
            };
            let answer = catalog.find(&question.asked, now);
            // That accounts are awaited again tells the asking node nothing.
            let is_other = discriminant(&answer) != discriminant(&question.first)
                && answer != Answer::Incomplete;
            if is_other && let Some(question) = self.remove(id) {
                answers.push((question.node, answer));
            }
        }
        answers
    }

    /// Forgets questions whose time is over, or whose node went away.
    pub fn retain(&mut self, mut is_wanted: impl FnMut(&T) -> bool) {
        let gone = self.questions.iter();
        let gone = gone.filter(|(_, question)| !is_wanted(&question.node));
        let gone: Vec<u64> = gone.map(|(id, _)| *id).collect();
        for id in gone {
            self.remove(id);
        }
    }

    /// The number of questions that wait.
    #[must_use]
    pub fn len(&self) -> usize {
        self.questions.len()
    }

    /// Whether none waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.questions.is_empty()
    }

    fn remove(&mut self, id: u64) -> Option<Question<T>> {
        let question = self.questions.remove(&id)?;
        let name = question.asked.hash;
        if let Some(of_name) = self.by_name.get_mut(&name) {
            of_name.retain(|other| *other != id);
            if of_name.is_empty() {
                self.by_name.remove(&name);
            }
        }
        Some(question)
    }
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::super::tests::{Nodes, entry, name};
    use super::*;

    #[test]
    fn a_question_is_held_until_its_answer_changes_or_it_is_forgotten() {
        let mut nodes = Nodes::complete(&["n1", "n2"]);
        let mut held = WaitingQuestions::default();
        let asked = || Asked::new(name("artifact/a"), "");
        let at_once = held.ask(&nodes.catalog, asked(), 1, nodes.now);
        assert_eq!(at_once, None);

        // Another name changes nothing.
        let changes = nodes.put(0, entry("artifact/b", State::Durable, 1));
        assert_eq!(held.changed(&nodes.catalog, &changes, nodes.now), []);
        let changes = nodes.put(0, entry("artifact/a", State::Coming, 0));
        let answers = held.changed(&nodes.catalog, &changes, nodes.now);
        assert_eq!(answers, [(1, Answer::Coming(vec!["n1".into()]))]);
        assert!(held.is_empty() && held.by_name.is_empty());

        let at_once = held.ask(&nodes.catalog, asked(), 3, nodes.now);
        assert_eq!(at_once, None);
        let changes = nodes.put(1, entry("artifact/a", State::Coming, 0));
        assert_eq!(held.changed(&nodes.catalog, &changes, nodes.now), []);
        let changes = nodes.put(1, entry("artifact/a", State::Durable, 5));
        let answers = held.changed(&nodes.catalog, &changes, nodes.now);
        assert!(matches!(answers[..], [(3, Answer::Found(_))]));

        let other = Asked::new(name("artifact/c"), "");
        let at_once = held.ask(&nodes.catalog, asked(), 4, nodes.now);
        assert!(matches!(at_once, Some(Answer::Found(_))));
        for node in [4, 5] {
            let at_once = held.ask(&nodes.catalog, other.clone(), node, nodes.now);
            assert_eq!(at_once, None);
        }
        held.retain(|node| *node != 5);
        assert_eq!(held.len(), 1);
        held.retain(|node| *node != 4);
        assert!(held.is_empty() && held.by_name.is_empty());
    }
}
