//! The connections of a server on a port that any client may reach, at most so many at once: the
//! health port, the webhook, and handshakes of nodes.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;

use tokio_util::task::AbortOnDropHandle;

/// Tasks that serve a connection each. With one too many, the address that has the most loses its
/// oldest. So a client that opens connections without end keeps no other client out. Dropping this
/// ends all.
#[derive(Debug)]
pub struct Connections {
    /// The oldest first.
    tasks: VecDeque<(IpAddr, AbortOnDropHandle<()>)>,
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

    /// Serves one more, for a client at this address.
    pub fn spawn(&mut self, client: IpAddr, serve: impl Future<Output = ()> + Send + 'static) {
        if self.tasks.len() >= self.most {
            self.tasks.retain(|(_, task)| !task.is_finished());
        }
        if self.tasks.len() >= self.most {
            self.end_one();
        }
        let task = tokio::spawn(serve);
        self.tasks.push_back((client, AbortOnDropHandle::new(task)));
    }

    fn end_one(&mut self) {
        let mut counts = HashMap::new();
        for (client, _) in &self.tasks {
            *counts.entry(*client).or_insert(0) += 1;
        }
        let most = counts.values().max().copied();
        let is_one = |(client, _): &(IpAddr, _)| counts.get(client).copied() == most;
        if let Some(oldest) = self.tasks.iter().position(is_one) {
            self.tasks.remove(oldest);
        }
    }

    /// Ends all.
    pub fn clear(&mut self) {
        self.tasks.clear();
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test]
    async fn the_client_with_the_most_connections_loses_its_oldest() {
        let mut connections = Connections::new(4);
        let mut open = |client: u8| {
            let (end, ended) = oneshot::channel::<()>();
            connections.spawn(IpAddr::from([10, 0, 0, client]), async move {
                let _until_dropped = end;
                std::future::pending::<()>().await;
            });
            ended
        };
        let mut kubelet = open(1);
        let first = open(2);
        let mut others = vec![open(2), open(2)];
        others.push(open(2));
        assert!(first.await.is_err(), "it was the oldest of the busiest");
        for _ in 0..20 {
            others.push(open(2));
        }
        let mut newest = others.pop().expect("20");
        tokio::task::yield_now().await;
        assert!(kubelet.try_recv() == Err(oneshot::error::TryRecvError::Empty));
        assert!(newest.try_recv() == Err(oneshot::error::TryRecvError::Empty));
    }
}
