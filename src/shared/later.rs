//! A store that is opened by its first request, and again by the next one if that failed.
//!
//! A driver starts and serves pods also when its tier cannot be opened: a directory that is not
//! mounted yet, or a configuration without certificates. Each request then fails with the reason.

use std::fmt;
use std::sync::{Arc, OnceLock};

use async_trait::async_trait;
use futures_util::StreamExt as _;
use futures_util::stream::{self, BoxStream};
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result, RetryConfig,
};

use super::patient::Patient;
use super::url::Url;

/// The store behind a URL.
#[derive(Debug)]
pub(super) struct Later {
    url: Url,
    retry: RetryConfig,
    patient: Patient,
    opened: OnceLock<Arc<dyn ObjectStore>>,
}

impl Later {
    /// `retry`: how often its client repeats a request. `patient`: how it waits for the storage.
    pub(super) fn new(url: Url, retry: RetryConfig, patient: Patient) -> Self {
        Self {
            url,
            retry,
            patient,
            opened: OnceLock::new(),
        }
    }

    fn open(&self) -> Result<Arc<dyn ObjectStore>> {
        if let Some(objects) = self.opened.get() {
            return Ok(objects.clone());
        }
        let objects = self.url.objects(self.retry.clone(), self.patient.clone())?;
        // Another request may have been faster; one store has the connections of all.
        Ok(self.opened.get_or_init(|| objects).clone())
    }
}

impl fmt::Display for Later {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.url.fmt(f)
    }
}

#[async_trait]
impl ObjectStore for Later {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> Result<PutResult> {
        self.open()?.put_opts(location, payload, options).await
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.open()?.put_multipart_opts(location, options).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        self.open()?.get_opts(location, options).await
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        match self.open() {
            Ok(objects) => objects.delete_stream(locations),
            Err(error) => stream::once(async { Err(error) }).boxed(),
        }
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        match self.open() {
            Ok(objects) => objects.list(prefix),
            Err(error) => stream::once(async { Err(error) }).boxed(),
        }
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.open()?.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.open()?.copy_opts(from, to, options).await
    }
}
