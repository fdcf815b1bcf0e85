//! The proxy between csi-sanity and the driver in the third run: it forwards each call, and kills
//! the driver before some and in the middle of others.
//!
//! Like an orchestrator, it repeats a call verbatim if the answer was lost with the driver. It
//! forwards each answer unchanged. So csi-sanity, which knows no crashes, sees the final result.

use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::net::UnixListener;
use tokio::sync::{Mutex, oneshot};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::body::Body;
use tonic::codegen::http;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::Channel;
use tonic::{Code, Request, Response, Status};

use super::driver::{Driver, Setup};
use crate::common::random::Random;
use crate::common::raw::Raw;

/// The same fates in every run: what fails once fails again.
const SEED: u64 = 0x5eed_ca5e;

/// A proxy that serves until it is ended.
pub(crate) struct Proxy {
    pub(crate) socket: PathBuf,
    stop: oneshot::Sender<()>,
    served: JoinHandle<u32>,
}

impl Proxy {
    /// Starts the driver and the proxy before it.
    pub(crate) fn start(setup: Setup, socket: PathBuf) -> Self {
        let (stop, stopped) = oneshot::channel::<()>();
        let (ready, is_ready) = std::sync::mpsc::channel();
        let path = socket.clone();
        let served = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("a runtime");
            runtime.block_on(async {
                let driver = setup.spawn();
                let channel = setup.connect().await;
                let world = Arc::new(Mutex::new(World {
                    setup,
                    driver,
                    channel,
                    random: Random::new(SEED),
                    kills: 0,
                }));
                let listener = UnixListener::bind(&path).expect("the path is free");
                ready.send(()).expect("somebody waits");
                tonic::transport::Server::builder()
                    .serve_with_incoming_shutdown(
                        Forward(world.clone()),
                        UnixListenerStream::new(listener),
                        async {
                            let _ = stopped.await;
                        },
                    )
                    .await
                    .expect("served to the end");
                world.lock().await.kills
            })
        });
        is_ready.recv().expect("the proxy starts");
        Self {
            socket,
            stop,
            served,
        }
    }

    /// Ends, and says how often the driver was killed.
    pub(crate) fn end(self) -> u32 {
        drop(self.stop);
        self.served.join().expect("no panic")
    }
}

struct World {
    setup: Setup,
    driver: Driver,
    channel: Channel,
    random: Random,
    kills: u32,
}

impl World {
    async fn restart(&mut self) {
        self.driver.kill();
        self.kills += 1;
        self.driver = self.setup.spawn();
        self.channel = self.setup.connect().await;
    }

    async fn call(&mut self, path: PathAndQuery, message: Vec<u8>) -> Result<Vec<u8>, Status> {
        match self.random.below(3) {
            0 => self.restart().await,
            1 => {
                let delay = Duration::from_micros(self.random.below(4_000));
                let asked = ask(self.channel.clone(), path.clone(), message.clone());
                let answer = tokio::time::timeout(delay, asked).await;
                self.restart().await;
                if let Ok(answer) = answer {
                    return answer;
                }
            }
            _ => {}
        }
        ask(self.channel.clone(), path, message).await
    }
}

async fn ask(channel: Channel, path: PathAndQuery, message: Vec<u8>) -> Result<Vec<u8>, Status> {
    let mut client = tonic::client::Grpc::new(channel);
    let broken = |error| Status::new(Code::Unavailable, format!("proxy: {error}"));
    client.ready().await.map_err(broken)?;
    let answer = client.unary(Request::new(message), path, Raw).await?;
    Ok(answer.into_inner())
}

/// Every method of every service, one call at a time.
#[derive(Clone)]
struct Forward(Arc<Mutex<World>>);

impl tonic::server::NamedService for Forward {
    const NAME: &'static str = "any";
}

type Answer<T, E> = Pin<Box<dyn Future<Output = Result<T, E>> + Send>>;

impl tower::Service<http::Request<Body>> for Forward {
    type Response = http::Response<Body>;
    type Error = std::convert::Infallible;
    type Future = Answer<Self::Response, Self::Error>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let path = request.uri().path_and_query().expect("a path").clone();
        let one = One(self.0.clone(), path);
        Box::pin(async move { Ok(tonic::server::Grpc::new(Raw).unary(one, request).await) })
    }
}

/// One call.
struct One(Arc<Mutex<World>>, PathAndQuery);

impl tonic::server::UnaryService<Vec<u8>> for One {
    type Response = Vec<u8>;
    type Future = Answer<Response<Vec<u8>>, Status>;

    fn call(&mut self, request: Request<Vec<u8>>) -> Self::Future {
        let (world, path) = (self.0.clone(), self.1.clone());
        Box::pin(async move {
            let mut world = world.lock().await;
            world
                .call(path, request.into_inner())
                .await
                .map(Response::new)
        })
    }
}
