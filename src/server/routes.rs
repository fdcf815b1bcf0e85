//! Finds the service of a request by the first part of its path.
//! tonic's own router would bring an HTTP framework along.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http;
use tonic::server::NamedService;
use tower::util::BoxCloneSyncService;
use tower::{Service, ServiceExt as _};

type Boxed = BoxCloneSyncService<http::Request<Body>, http::Response<Body>, Infallible>;

/// The services of one socket.
#[derive(Debug, Clone, Default)]
pub struct Routes(Arc<Vec<(&'static str, Boxed)>>);

impl Routes {
    /// Routes without a service.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a service.
    #[must_use]
    pub fn with<S>(mut self, service: S) -> Self
    where
        S: Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible>
            + NamedService
            + Clone
            + Send
            + Sync
            + 'static,
        S::Future: Send + 'static,
    {
        Arc::make_mut(&mut self.0).push((S::NAME, BoxCloneSyncService::new(service)));
        self
    }
}

impl Service<http::Request<Body>> for Routes {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        // A service that tonic made is always ready.
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        // "/csi.v1.Node/NodePublishVolume"
        let mut parts = request.uri().path().split('/');
        let wanted = parts.nth(1).unwrap_or_default();
        let found = self.0.iter().find(|(name, _)| *name == wanted);
        if let Some((_, service)) = found {
            return Box::pin(service.clone().oneshot(request));
        }
        let status = Status::unimplemented("this socket does not serve that service");
        Box::pin(std::future::ready(Ok(status.into_http())))
    }
}
