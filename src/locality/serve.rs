//! The webhook's HTTPS port. Any pod may connect, often, and send nothing: connections are bounded,
//! and one more closes the oldest. Without the secret path there is no answer but 404.
//!
//! An answer never waits for the catalog. What is not known within [`LIMIT`] is left out, and the
//! pod is created as it is.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::{BodyExt as _, Full, LengthLimitError, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::header::{ALLOW, CONNECTION, CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_rustls::TlsAcceptor;

use super::identity::Identity;
use super::policy::{self, Content, Preferred};
use super::review::{self, Question};
use crate::catalog::Found;
use crate::model::TenantOrigin;
use crate::server::{self, Connections, Drain};
use crate::telemetry::metrics::{Counter, Registry};

/// The longest that an answer takes, from the request's header on.
pub(super) const LIMIT: Duration = Duration::from_millis(200);
/// The largest request. A pod is some kilobytes; the API server takes up to 3 MiB.
pub(super) const MOST_BYTES: usize = 1 << 20;
/// How many requests are read at once. With the size this bounds their memory.
const AT_ONCE: usize = 32;
/// The largest head of a request. A client sends it before it has shown that it knows the path.
const MOST_HEAD: usize = 16 << 10;
/// The most connections at a time.
const CONNECTIONS: usize = 256;
/// How long a handshake may take.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// How long a connection waits for the next request. The API server gives it up before that, after
/// 90 s, so that no request meets a connection that is about to close.
const IDLE: Duration = Duration::from_secs(120);
/// How often the file of the identity is read.
const LOOK: Duration = Duration::from_secs(5);

/// Asks the catalog which content a pod would start from: for each volume what it tries.
/// `None`: no answer in this time.
pub type Find = Arc<dyn Fn(&[Vec<TenantOrigin>], Duration) -> Option<Vec<Found>> + Send + Sync>;

/// Why the webhook cannot be served.
#[derive(Debug, thiserror::Error)]
#[error("--webhook-listen {0}")]
pub struct Error(#[from] server::ListenError);

/// What happened since the start. Clones share the counters.
#[derive(Debug, Clone, Default)]
pub struct Counters {
    requests: Counter,
    patched: Counter,
    late: Counter,
    refused: Counter,
}

impl Counters {
    /// Adds them to the controller's metrics.
    pub fn register(&self, registry: &mut Registry) {
        for (name, help, counter) in [
            (
                "locality_requests",
                "Questions of the API server about a new pod",
                &self.requests,
            ),
            (
                "locality_patched",
                "Pods that prefer nodes by the answer",
                &self.patched,
            ),
            (
                "locality_late",
                "Questions without an answer within 200 ms",
                &self.late,
            ),
            (
                "locality_refused",
                "Requests to the webhook without its secret path",
                &self.refused,
            ),
        ] {
            registry.register(name, help, counter.clone());
        }
    }
}

/// The webhook, bound to its port.
pub struct Webhook {
    listener: TcpListener,
    /// The file of the identity. It may be missing, and change.
    file: PathBuf,
    context: Arc<Context>,
}

struct Context {
    find: Find,
    places: Semaphore,
    counters: Counters,
}

impl Webhook {
    /// Binds the address.
    pub async fn bind(address: SocketAddr, file: PathBuf, find: Find) -> Result<Self, Error> {
        let listener = server::listen(address).await?;
        let context = Arc::new(Context {
            find,
            places: Semaphore::new(AT_ONCE),
            counters: Counters::default(),
        });
        Ok(Self {
            listener,
            file,
            context,
        })
    }

    /// The port that is served.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// The counters.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.context.counters.clone()
    }

    /// Serves until the services close.
    pub async fn serve(self, drain: Drain) {
        let mut file = File::new(self.file);
        file.is_changed();
        let mut look = tokio::time::interval(LOOK);
        let mut connections = Connections::new(CONNECTIONS);
        loop {
            let (stream, client) = tokio::select! {
                () = drain.closing() => return,
                _ = look.tick() => {
                    if file.is_changed() {
                        // Else the old path would still be good there.
                        connections.clear();
                    }
                    continue;
                }
                accepted = server::accept(&self.listener, "the webhook") => accepted,
            };
            // Without an identity there is no TLS.
            if let Some(identity) = &file.identity {
                let (identity, context) = (Arc::clone(identity), Arc::clone(&self.context));
                connections.spawn(client.ip(), serve_connection(stream, identity, context));
            }
        }
    }
}

/// The file of the identity, as it was read last.
#[derive(Debug)]
struct File {
    path: PathBuf,
    /// Its content. `None`: it could not be read, and this was logged.
    content: Option<Result<Vec<u8>, io::ErrorKind>>,
    identity: Option<Arc<Identity>>,
}

impl File {
    fn new(path: PathBuf) -> Self {
        Self {
            path,
            content: None,
            identity: None,
        }
    }

    /// Reads the file. Whether it is another one than before. A Secret's file is in memory, so this
    /// does not block.
    fn is_changed(&mut self) -> bool {
        let content = std::fs::read(&self.path).map_err(|error| error.kind());
        if self.content.as_ref() == Some(&content) {
            return false;
        }
        let file = self.path.display();
        self.identity = match &content {
            Ok(content) => match Identity::read(content) {
                Ok(identity) => {
                    tracing::info!(%file, "serving the locality webhook");
                    Some(Arc::new(identity))
                }
                Err(error) => {
                    tracing::warn!(%file, %error, "the locality webhook is off: its identity \
                        cannot be used; apply the output of `baggageclaim locality`");
                    None
                }
            },
            Err(error) => {
                tracing::warn!(%file, %error, "the locality webhook is off: it has no identity; \
                    apply the output of `baggageclaim locality`");
                None
            }
        };
        self.content = Some(content);
        true
    }
}

async fn serve_connection(stream: TcpStream, identity: Arc<Identity>, context: Arc<Context>) {
    let acceptor = TlsAcceptor::from(identity.tls());
    let shaken = timeout(HANDSHAKE, acceptor.accept(stream)).await;
    let stream = match shaken {
        Ok(Ok(stream)) => stream,
        // Any pod may cause this, so it is no warning.
        Ok(Err(error)) => {
            tracing::debug!(%error, "a handshake with the webhook failed");
            return;
        }
        Err(_) => return,
    };
    let service = service_fn(|request| {
        let (identity, context) = (Arc::clone(&identity), Arc::clone(&context));
        async move { Ok::<_, Infallible>(context.answer(&identity, request).await) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(IDLE)
        .max_buf_size(MOST_HEAD)
        .serve_connection(TokioIo::new(stream), service);
    // An error is the client's.
    let _ = connection.await;
}

type Page = Response<Full<Bytes>>;

/// A page without a review. The API server then creates the pod as it is.
fn refusal(status: StatusCode) -> Page {
    let mut page = Response::new(Full::default());
    *page.status_mut() = status;
    let headers = page.headers_mut();
    headers.insert(CONNECTION, HeaderValue::from_static("close"));
    if status == StatusCode::METHOD_NOT_ALLOWED {
        headers.insert(ALLOW, HeaderValue::from_static("POST"));
    }
    page
}

impl Context {
    async fn answer(&self, identity: &Identity, request: Request<Incoming>) -> Page {
        let until = Instant::now() + LIMIT;
        if !identity.is_path(request.uri().path()) {
            self.counters.refused.inc();
            return refusal(StatusCode::NOT_FOUND);
        }
        if request.method() != Method::POST {
            return refusal(StatusCode::METHOD_NOT_ALLOWED);
        }
        self.counters.requests.inc();
        let read = async {
            let place = self.places.acquire().await;
            let body = Limited::new(request.into_body(), MOST_BYTES);
            let body = body.collect().await;
            body.map(|body| (place, body.to_bytes()))
        };
        let (_place, body) = match timeout_at(until, read).await {
            Ok(Ok(read)) => read,
            Ok(Err(error)) if error.is::<LengthLimitError>() => {
                return refusal(StatusCode::PAYLOAD_TOO_LARGE);
            }
            Ok(Err(_)) => return refusal(StatusCode::BAD_REQUEST),
            Err(_) => {
                self.counters.late.inc();
                return refusal(StatusCode::REQUEST_TIMEOUT);
            }
        };
        let question = match review::read(&body) {
            Ok(question) => question,
            Err(error) => {
                tracing::warn!(%error, "a question of the API server about a pod was not \
                    understood; the pod is created as it is");
                return refusal(StatusCode::BAD_REQUEST);
            }
        };
        let preferred = self.preferred(&question, until);
        if !preferred.is_empty() {
            self.counters.patched.inc();
        }
        let mut page = Response::new(Full::from(question.answer(&preferred)));
        let json = HeaderValue::from_static("application/json");
        page.headers_mut().insert(CONTENT_TYPE, json);
        page
    }

    /// The nodes that a pod prefers. None if the catalog is busy for too long.
    fn preferred(&self, question: &Question, until: Instant) -> Vec<Preferred> {
        let volumes: Vec<Vec<TenantOrigin>> = question.origins().into_iter().collect();
        if volumes.is_empty() {
            return Vec::new();
        }
        let rest = until.saturating_duration_since(Instant::now());
        let Some(found) = (self.find)(&volumes, rest) else {
            self.counters.late.inc();
            return Vec::new();
        };
        let contents = found.into_iter().map(|found| Content {
            bytes: found.bytes,
            holders: found.holders,
        });
        let contents: Vec<Content> = contents.collect();
        policy::preferred(&contents, question.uid())
    }
}

#[cfg(test)]
mod tests;
