//! One span and one log line per RPC: method, volume, code, duration, and the message of a failure.
//! At the default level, a success of a method that programs poll and that changes nothing has no
//! line.
//!
//! A request is never printed. This layer sees only the path and the status of the answer. A
//! service adds by hand the fields that may be logged ([`Rpc`]). So secrets,
//! `serviceAccount.tokens` and mount flags cannot get here (CSI specification, "Secrets
//! Requirements"); `tests/secrets.rs` proves it.
//!
//! An RPC whose caller goes away, or whose deadline passes, is dropped in the middle. It has a line
//! too, with the code CANCELLED.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fmt::Display;
use std::future::Future;
use std::path::Path;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tonic::body::Body;
use tonic::codegen::http;
use tonic::{Code, Status};
use tower::{Layer, Service};
use tracing::{Instrument as _, Span};

use super::codes::code_name;
use crate::telemetry::metrics::Rpcs;

/// The most bytes of a field of a request in a span; longer ones are cut.
const LONGEST_FIELD: usize = 256;

/// The layer. Clones share the list of running RPCs.
#[derive(Debug, Clone)]
pub struct Trace {
    new_span: fn(&str) -> Span,
    polled: &'static [&'static str],
    running: Arc<Mutex<BTreeMap<u64, Rpc>>>,
    next: Arc<AtomicU64>,
    counted: Option<(Rpcs, &'static [&'static str])>,
}

impl Trace {
    /// `new_span` makes the span of an RPC from the name of its method, with an empty field for
    /// each value that a service adds later. The span has level ERROR, so that every filter lets it
    /// through. Successes are logged at INFO, those of `polled` methods at DEBUG, because these
    /// would be most of the log.
    #[must_use]
    pub fn new(new_span: fn(&str) -> Span, polled: &'static [&'static str]) -> Self {
        Self {
            new_span,
            polled,
            running: Arc::default(),
            next: Arc::default(),
            counted: None,
        }
    }

    /// Counts the RPCs by `methods`. Any other method counts as `other`, so that no caller can make
    /// a new series. Codes that an alert may watch begin at 0.
    #[must_use]
    pub fn counting(mut self, rpcs: Rpcs, methods: &'static [&'static str]) -> Self {
        let wakes = [
            Code::Internal,
            Code::Unknown,
            Code::DataLoss,
            Code::ResourceExhausted,
        ];
        rpcs.begin(methods, &wakes.map(code_name));
        self.counted = Some((rpcs, methods));
        self
    }

    fn begin(&self, method: &str) -> Guard {
        let span = (self.new_span)(method);
        let rpc = Rpc::new(method, span, self.polled.contains(&method));
        let key = self.next.fetch_add(1, Ordering::Relaxed);
        self.running.lock().insert(key, rpc.clone());
        Guard {
            trace: self.clone(),
            key,
            rpc,
            ended: None,
        }
    }

    /// Ready when no RPC has been running for `quiet`.
    pub(super) async fn idle(&self, quiet: Duration) {
        const STEP: Duration = Duration::from_millis(10);
        let mut since = Instant::now();
        while since.elapsed() < quiet {
            tokio::time::sleep(STEP).await;
            if !self.running.lock().is_empty() {
                since = Instant::now();
            }
        }
    }

    /// Names the RPCs that are not answered yet in the log.
    pub(super) fn name_the_late(&self, socket: &Path) {
        for rpc in self.running.lock().values() {
            let _in = rpc.0.span.enter();
            tracing::warn!(
                socket = %socket.display(),
                method = rpc.0.method,
                volume = rpc.0.volume.get().map_or("", String::as_str),
                running_ms = millis(rpc.0.began),
                "late: not answered within the grace period; the caller must call again"
            );
        }
    }
}

fn millis(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX)
}

/// A running RPC. A service finds it among the extensions of its request.
#[derive(Debug, Clone)]
pub struct Rpc(Arc<Facts>);

#[derive(Debug)]
struct Facts {
    method: String,
    span: Span,
    volume: OnceLock<String>,
    began: Instant,
    polled: bool,
}

impl Rpc {
    /// The RPC of a request. If the request did not pass the layer, as in unit tests, it is in no
    /// span.
    pub fn of<T>(request: &tonic::Request<T>) -> Self {
        let known = request.extensions().get::<Self>().cloned();
        known.unwrap_or_else(|| Self::new("", Span::none(), false))
    }

    fn new(method: &str, span: Span, polled: bool) -> Self {
        Self(Arc::new(Facts {
            method: method.to_owned(),
            span,
            volume: OnceLock::new(),
            began: Instant::now(),
            polled,
        }))
    }

    /// Adds the id of the volume, if it is given.
    pub fn volume(&self, id: &str) {
        if !id.is_empty() {
            let id = self.0.volume.get_or_init(|| cut(id));
            self.0.span.record("volume.id", id.as_str());
        }
    }

    /// Adds a field to the span, if its value is given.
    pub fn record(&self, field: &str, value: impl Display) {
        let value = value.to_string();
        if !value.is_empty() {
            self.0.span.record(field, cut(&value));
        }
    }
}

/// Cuts and escapes a caller's text to one short line.
fn cut(text: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b" -_./:,".contains(&byte);
    if text.len() <= LONGEST_FIELD && text.bytes().all(is_plain) {
        return text.to_owned();
    }
    text.chars()
        .flat_map(char::escape_debug)
        .take(LONGEST_FIELD)
        .collect()
}

/// Logs the RPC when it ends, also when it is cancelled.
struct Guard {
    trace: Trace,
    key: u64,
    rpc: Rpc,
    /// How it ended, and how long that took.
    ended: Option<(Status, Duration)>,
}

impl Guard {
    fn end(&mut self, status: Status) {
        let elapsed = self.rpc.0.began.elapsed();
        if let Some((rpcs, methods)) = &self.trace.counted {
            let method = methods.iter().find(|known| **known == self.rpc.0.method);
            rpcs.count(
                method.unwrap_or(&"other"),
                code_name(status.code()),
                elapsed,
            );
        }
        self.ended = Some((status, elapsed));
    }

    fn log(&self, status: &Status, elapsed: Duration) {
        let _in = self.rpc.0.span.enter();
        let code = code_name(status.code());
        let duration_us = u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX);
        match status.code() {
            Code::Ok if self.rpc.0.polled => tracing::debug!(code, duration_us, "answered"),
            Code::Ok => tracing::info!(code, duration_us, "answered"),
            Code::Internal | Code::Unknown | Code::DataLoss => {
                tracing::error!(code, duration_us, error = status.message(), "failed");
            }
            _ => tracing::warn!(code, duration_us, error = status.message(), "refused"),
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.trace.running.lock().remove(&self.key);
        if self.ended.is_none() {
            self.end(Status::cancelled("the caller went away"));
        }
        if let Some((status, elapsed)) = &self.ended {
            self.log(status, *elapsed);
        }
    }
}

impl<S> Layer<S> for Trace {
    type Service = Traced<S>;

    fn layer(&self, inner: S) -> Traced<S> {
        Traced {
            inner,
            trace: self.clone(),
        }
    }
}

/// A service behind the layer.
#[derive(Debug, Clone)]
pub struct Traced<S> {
    inner: S,
    trace: Trace,
}

type Answer = Result<http::Response<Body>, Infallible>;

impl<S> Service<http::Request<Body>> for Traced<S>
where
    S: Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible>,
    S::Future: Send + 'static,
{
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Answer> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, mut request: http::Request<Body>) -> Self::Future {
        // "/csi.v1.Node/NodePublishVolume"
        let path = request.uri().path();
        let method = path.rsplit('/').next().unwrap_or(path).to_owned();
        let mut guard = self.trace.begin(&cut(&method));
        let span = guard.rpc.0.span.clone();
        request.extensions_mut().insert(guard.rpc.clone());
        let answer = span.in_scope(|| self.inner.call(request));
        Box::pin(async move {
            let response = answer.instrument(span).await?;
            // A unary answer with an error has its status in the headers; without one it is OK,
            // which comes in the trailers, after the message.
            let status = Status::from_header_map(response.headers());
            guard.end(status.unwrap_or_else(|| Status::new(Code::Ok, "")));
            Ok(response)
        })
    }
}
