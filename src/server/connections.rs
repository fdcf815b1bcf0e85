//! The connections of a server that speaks HTTP itself, at most so many at once. The health port
//! and the webhook use it.

use std::collections::VecDeque;

use tokio_util::task::AbortOnDropHandle;

/// Tasks that serve a connection each. With one too many, the oldest is dropped: a client that
/// opens connections and says nothing must not keep others out. Dropping this ends all.
#[derive(Debug)]
pub struct Connections {
    /// The oldest first.
    tasks: VecDeque<AbortOnDropHandle<()>>,
    most: usize,
}

impl Connections {
    /// None yet.
    #[must_use]
    pub fn new(most: usize) -> Self {
        Self {
            tasks: VecDeque::new(),
            most,
        }
    }

    /// Serves one more.
    pub fn spawn(&mut self, serve: impl Future<Output = ()> + Send + 'static) {
        if self.tasks.len() >= self.most {
            self.tasks.retain(|task| !task.is_finished());
        }
        if self.tasks.len() >= self.most {
            self.tasks.pop_front();
        }
        let task = tokio::spawn(serve);
        self.tasks.push_back(AbortOnDropHandle::new(task));
    }

    /// Ends all.
    pub fn clear(&mut self) {
        self.tasks.clear();
    }
}
