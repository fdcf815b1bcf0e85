//! Desks: threads that serve nothing but connections. Each has a runtime of its own, and a short call that came alone runs on the
//! thread that read it and writes its answer: a wake-up of another thread and one back cost more than most system calls.
//!
//! Kubelet opens a connection for each call. A new connection goes to a desk at which no job runs, and of these to the one that has
//! the fewest calls under way. So one that blocks for long keeps nobody waiting but those whose connections it has already: calls that
//! wait are no measure for that, as the desk that does not block may have more of them than those that do.

use std::convert::Infallible;
use std::future::Future;
use std::os::unix::net::UnixStream as StdStream;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::body::Body;
use tonic::codegen::http;
use tower::{Layer, Service};

use super::routes::Routes;
use super::trace::Trace;
use crate::engine::{AtWork, CallHere, others_first, say_at_work};

/// Some desks. Dropped, they leave whatever they serve.
#[derive(Debug)]
pub(super) struct Desks {
    all: Vec<Desk>,
    close: CancellationToken,
    leave: CancellationToken,
}

#[derive(Debug)]
struct Desk {
    connections: mpsc::UnboundedSender<StdStream>,
    load: Load,
    ended: oneshot::Receiver<Result<(), tonic::transport::Error>>,
}

impl Desks {
    /// Starts `count` of them.
    pub(super) fn start(count: usize, routes: &Routes, trace: &Trace) -> std::io::Result<Self> {
        let close = CancellationToken::new();
        let leave = CancellationToken::new();
        let start = |_| Desk::start(routes.clone(), trace.clone(), close.clone(), leave.clone());
        Ok(Self {
            all: (0..count).map(start).collect::<std::io::Result<_>>()?,
            close,
            leave,
        })
    }

    /// Gives a connection to the desk that has least to do.
    pub(super) fn serve(&self, connection: UnixStream) -> std::io::Result<()> {
        let connection = connection.into_std()?;
        let desk = self.all.iter().min_by_key(|desk| desk.load.rank());
        if let Some(desk) = desk {
            desk.load.connections.fetch_add(1, Ordering::Relaxed);
            // A desk that has ended closes it, as a server that has ended would.
            let _ = desk.connections.send(connection);
        }
        Ok(())
    }

    /// Serves what was sent to the end of the calls under way, and no more; ready when all have ended.
    pub(super) async fn close(&mut self) -> Result<(), tonic::transport::Error> {
        self.close.cancel();
        for desk in &mut self.all {
            // A thread that panicked has said so, and ended.
            (&mut desk.ended).await.unwrap_or(Ok(()))?;
        }
        Ok(())
    }
}

impl Drop for Desks {
    fn drop(&mut self) {
        self.leave.cancel();
    }
}

impl Desk {
    fn start(
        routes: Routes,
        trace: Trace,
        close: CancellationToken,
        leave: CancellationToken,
    ) -> std::io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let (connections, incoming) = mpsc::unbounded_channel::<StdStream>();
        let (end, ended) = oneshot::channel();
        let load = Load::default();
        let counted = load.clone();
        let serve = async move {
            let incoming = UnboundedReceiverStream::new(incoming).map(UnixStream::from_std);
            tonic::transport::Server::builder()
                .layer(trace)
                .layer(counted)
                .serve_with_incoming_shutdown(routes, incoming, close.cancelled_owned())
                .await
        };
        let at_work = load.at_work.clone();
        std::thread::Builder::new()
            .name("desk".to_owned())
            .spawn(move || {
                say_at_work(at_work);
                let result = runtime.block_on(leave.run_until_cancelled_owned(serve));
                // Nobody waits for it any more when it was told to leave.
                let _ = end.send(result.unwrap_or(Ok(())));
                // A task that does not end must not keep the thread.
                runtime.shutdown_background();
            })?;
        Ok(Self {
            connections,
            load,
            ended,
        })
    }
}

/// What a desk has to do; also the layer that counts its calls.
#[derive(Debug, Clone, Default)]
struct Load {
    at_work: AtWork,
    calls: Arc<AtomicUsize>,
    connections: Arc<AtomicUsize>,
}

impl Load {
    /// What it is at, calls under way, then how much it was ever given: desks that are equally busy take turns.
    fn rank(&self) -> (u8, usize, usize) {
        let of = |count: &AtomicUsize| count.load(Ordering::Relaxed);
        let at_work = self.at_work.load(Ordering::Relaxed);
        (at_work, of(&self.calls), of(&self.connections))
    }
}

/// A call under way at a desk.
struct Counted(Arc<AtomicUsize>, CallHere);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[derive(Debug, Clone)]
struct Counting<S> {
    inner: S,
    calls: Arc<AtomicUsize>,
}

impl<S> Layer<S> for Load {
    type Service = Counting<S>;

    fn layer(&self, inner: S) -> Counting<S> {
        Counting {
            inner,
            calls: self.calls.clone(),
        }
    }
}

impl<S> Service<http::Request<Body>> for Counting<S>
where
    S: Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible>,
    S::Future: Send + 'static,
{
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let counted = Counted(self.calls.clone(), CallHere::begin());
        let answer = self.inner.call(request);
        Box::pin(async move {
            let _counted = counted;
            // Calls that came together are all counted before the first of them runs.
            others_first().await;
            answer.await
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_goes_to_whoever_hears_of_it_soonest() {
        let desk = |at_work: u8, calls: usize, connections: usize| {
            let load = Load::default();
            load.at_work.store(at_work, Ordering::Relaxed);
            load.calls.store(calls, Ordering::Relaxed);
            load.connections.store(connections, Ordering::Relaxed);
            load.rank()
        };
        // Idle, with calls that wait elsewhere; writing its log; hanging in a job.
        assert!(desk(0, 5, 9) < desk(1, 0, 0));
        assert!(desk(1, 5, 9) < desk(2, 1, 1));
        assert!(desk(0, 0, 9) < desk(0, 1, 0));
        assert!(desk(0, 1, 3) < desk(0, 1, 4));
    }
}
