//! A store that fails as it is told: it wraps a good one, and asks a function before each request.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::StreamExt as _;
use futures_util::stream::BoxStream;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload,
    ObjectMeta, ObjectStore, PutMode, PutMultipartOptions, PutOptions, PutPayload, PutResult,
    Result,
};

/// What a request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Op {
    Get,
    Put,
    Create,
    Replace,
    Multipart,
    Delete,
    List,
}

/// What happens to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    None,
    /// It is not done; the answer has this status.
    Status(u16),
    /// It is done, and the answer is lost.
    LostAnswer,
    /// It is done later.
    Slow(Duration),
    /// The answer to a read ends after so many bytes.
    Cut(u64),
    /// A list has nothing of what is there.
    Empty,
}

pub(crate) type Plan = Arc<dyn Fn(Op, &str) -> Fault + Send + Sync>;

pub(crate) struct Failing {
    inner: Arc<dyn ObjectStore>,
    plan: Plan,
    pub(crate) requests: Arc<AtomicU64>,
}

impl Failing {
    pub(crate) fn new(
        inner: Arc<dyn ObjectStore>,
        plan: impl Fn(Op, &str) -> Fault + Send + Sync + 'static,
    ) -> Self {
        Self {
            inner,
            plan: Arc::new(plan),
            requests: Arc::default(),
        }
    }

    async fn before(&self, op: Op, path: &str) -> Result<Fault> {
        self.requests.fetch_add(1, Ordering::Relaxed);
        let fault = (self.plan)(op, path);
        match fault {
            Fault::Status(status) => return Err(error(status, path)),
            Fault::Slow(pause) => tokio::time::sleep(pause).await,
            _ => {}
        }
        Ok(fault)
    }
}

/// As the crate tells of a response.
pub(crate) fn error(status: u16, path: &str) -> Error {
    let text = format!("Server returned non-2xx status code: {status} X: <Code>Test</Code>");
    let (path, source) = (path.to_owned(), text.into());
    match status {
        403 => Error::PermissionDenied { path, source },
        404 => Error::NotFound { path, source },
        412 => Error::Precondition { path, source },
        _ => Error::Generic {
            store: "S3",
            source,
        },
    }
}

impl fmt::Debug for Failing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Failing")
    }
}

impl fmt::Display for Failing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Failing")
    }
}

#[async_trait]
impl ObjectStore for Failing {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> Result<PutResult> {
        let op = match options.mode {
            PutMode::Overwrite => Op::Put,
            PutMode::Create => Op::Create,
            PutMode::Update(_) => Op::Replace,
        };
        let fault = self.before(op, location.as_ref()).await?;
        let put = self.inner.put_opts(location, payload, options).await?;
        if fault == Fault::LostAnswer {
            return Err(error(500, location.as_ref()));
        }
        Ok(put)
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        let fault = self.before(Op::Multipart, location.as_ref()).await?;
        let inner = self.inner.put_multipart_opts(location, options).await?;
        Ok(Box::new(Upload {
            inner,
            fault,
            parts: 0,
        }))
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let fault = self.before(Op::Get, location.as_ref()).await?;
        let answer = self.inner.get_opts(location, options).await?;
        let Fault::Cut(most) = fault else {
            return Ok(answer);
        };
        let (meta, range, attributes) = (
            answer.meta.clone(),
            answer.range.clone(),
            answer.attributes.clone(),
        );
        let whole = answer.bytes().await?;
        let length = usize::try_from(most).expect("small").min(whole.len());
        let cut = error(500, location.as_ref());
        let stream = futures_util::stream::iter([Ok(whole.slice(..length)), Err(cut)]).boxed();
        Ok(GetResult {
            payload: GetResultPayload::Stream(stream),
            meta,
            range,
            attributes,
            extensions: object_store::Extensions::default(),
        })
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        let plan = Arc::clone(&self.plan);
        let asked = locations.map(move |location| {
            let path = location?;
            match plan(Op::Delete, path.as_ref()) {
                Fault::Status(status) => Err(error(status, path.as_ref())),
                _ => Ok(path),
            }
        });
        self.inner.delete_stream(asked.boxed())
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.requests.fetch_add(1, Ordering::Relaxed);
        let path = prefix.map_or("", |path| path.as_ref());
        match (self.plan)(Op::List, path) {
            Fault::Empty => futures_util::stream::empty().boxed(),
            Fault::Status(status) => {
                let error = error(status, path);
                futures_util::stream::once(async { Err(error) }).boxed()
            }
            _ => self.inner.list(prefix),
        }
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.inner.copy_opts(from, to, options).await
    }
}

#[derive(Debug)]
struct Upload {
    inner: Box<dyn MultipartUpload>,
    fault: Fault,
    parts: u64,
}

#[async_trait]
impl MultipartUpload for Upload {
    fn put_part(&mut self, data: PutPayload) -> object_store::UploadPart {
        self.parts += 1;
        // The second part fails.
        if self.parts == 2 && matches!(self.fault, Fault::Cut(_)) {
            return Box::pin(async { Err(error(500, "part 2")) });
        }
        self.inner.put_part(data)
    }

    async fn complete(&mut self) -> Result<PutResult> {
        let put = self.inner.complete().await?;
        if self.fault == Fault::LostAnswer {
            return Err(error(500, "complete"));
        }
        Ok(put)
    }

    async fn abort(&mut self) -> Result<()> {
        self.inner.abort().await
    }
}
