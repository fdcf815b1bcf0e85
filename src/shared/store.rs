//! The requests that the tier makes: each with a time limit, each error translated, all below one
//! prefix. The content of the objects is unknown here.

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{StreamExt as _, TryStreamExt as _};
use hyper::body::Bytes;
use object_store::path::Path;
use object_store::{
    GetOptions, GetResult, MultipartUpload, ObjectStore, ObjectStoreExt as _, PutMode,
    PutMultipartOptions, PutOptions, PutPayload, UpdateVersion,
};
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::time::timeout;

use super::client::Client;
use super::decide::PUBLISH_WITHIN;
use super::error::{Error, Result};
use crate::model::Timestamp;
use crate::tree::Stop;

/// How long requests may take, the crate's own retries included.
#[derive(Debug, Clone, Copy)]
pub struct Times {
    /// A request with a small answer, or the next bytes of a download.
    pub request: Duration,
    /// A part of an upload with its answer, or the next part of a list.
    pub transfer: Duration,
    /// How often a download that was cut is taken up again without new bytes. If it hangs: once.
    pub retries: u32,
    /// The pause before that.
    pub pause: Duration,
    /// How long each half of a publication may take: [`PUBLISH_WITHIN`], or less in tests.
    pub publish: Duration,
}

impl Default for Times {
    fn default() -> Self {
        Self {
            request: Duration::from_secs(30),
            transfer: Duration::from_secs(120),
            retries: 3,
            pause: Duration::from_millis(200),
            publish: PUBLISH_WITHIN,
        }
    }
}

/// One version of an object, for a conditional request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Version {
    of_store: UpdateVersion,
    modified: Timestamp,
}

impl Version {
    /// When it was written, by the storage's clock.
    pub(super) fn modified(&self) -> Timestamp {
        self.modified
    }
}

/// An object in a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Item {
    /// The key, relative to the tier's URL.
    pub key: String,
    /// Bytes.
    pub bytes: u64,
    /// When it was last written, by the storage's clock.
    pub modified: Timestamp,
}

/// A bucket, or a directory of a shared filesystem. A clone shares the connections.
#[derive(Clone)]
pub struct Store {
    client: Client,
    /// The same, but it sends each request once.
    once: Client,
    prefix: Path,
    /// As messages may show it.
    name: Arc<str>,
    runtime: Handle,
    pub(super) times: Times,
    /// The last answers of [`Store::get_again`], by their keys.
    known: Arc<Mutex<HashMap<String, Whole>>>,
}

/// An object's content and its version.
type Whole = (Bytes, Version);

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Store").field(&self.name).finish()
    }
}

impl fmt::Display for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

impl Store {
    /// The part of a store below a prefix. `name` is shown in messages. The requests run on
    /// `runtime`.
    pub fn new(
        objects: Arc<dyn ObjectStore>,
        prefix: &str,
        name: &str,
        runtime: Handle,
        times: Times,
    ) -> Self {
        let client = Client::new(move || Ok(Arc::clone(&objects)));
        Self::over([client.clone(), client], prefix, name, runtime, times)
    }

    /// The second client sends each request once.
    pub(super) fn over(
        [client, once]: [Client; 2],
        prefix: &str,
        name: &str,
        runtime: Handle,
        times: Times,
    ) -> Self {
        Self {
            client,
            once,
            prefix: prefix.trim_matches('/').into(),
            name: name.trim_end_matches('/').into(),
            runtime,
            times,
            known: Arc::default(),
        }
    }

    /// Opens the clients now. Asks nothing of the storage.
    pub(super) fn open(&self) -> Result<()> {
        let opened = self.client.get().and_then(|_| self.once.get());
        let failed = |error| Error::of_store(&self.name, &error);
        opened.map(drop).map_err(failed)
    }

    pub(super) fn path(&self, key: &str) -> Path {
        key.split('/').fold(self.prefix.clone(), Path::join)
    }

    /// The object as a message names it.
    pub(super) fn shown(&self, key: &str) -> String {
        format!("{}/{key}", self.name)
    }

    fn wait<T>(
        &self,
        key: &str,
        most: Duration,
        request: impl Future<Output = object_store::Result<T>>,
    ) -> Result<T> {
        let answer = async { timeout(most, request).await };
        match self.runtime.block_on(answer) {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(error)) => Err(Error::of_store(&self.shown(key), &error)),
            Err(_) => Err(Error::away(self.shown(key), "no answer in time")),
        }
    }

    /// Reads an object of at most `most` bytes, if it exists.
    pub(super) fn get(&self, key: &str, most: u64) -> Result<Option<Whole>> {
        self.get_unless(key, most, None)
    }

    /// Reads an object that this process may have read before. If it is still the same, the storage
    /// does not send it again.
    pub(super) fn get_again(&self, key: &str, most: u64) -> Result<Option<Whole>> {
        let known = self.known.lock().get(key).cloned();
        let read = self.get_unless(key, most, known)?;
        let mut known = self.known.lock();
        if known.len() >= KNOWN {
            known.clear();
        }
        match &read {
            // Received bytes may be a part of a long buffer.
            Some((bytes, version)) if bytes.len() <= SHORT => {
                let read = (Bytes::copy_from_slice(bytes), version.clone());
                known.insert(key.to_owned(), read);
            }
            _ => drop(known.remove(key)),
        }
        Ok(read)
    }

    /// Reads an object, unless it is what is known.
    fn get_unless(&self, key: &str, most: u64, known: Option<Whole>) -> Result<Option<Whole>> {
        let path = self.path(key);
        let tag = known
            .as_ref()
            .and_then(|known| known.1.of_store.e_tag.clone());
        let is_known = tag.is_some();
        let options = GetOptions {
            if_none_match: tag,
            ..GetOptions::default()
        };
        let request = async {
            let answer = match self.client.get()?.get_opts(&path, options).await {
                Err(object_store::Error::NotModified { .. }) if is_known => return Ok(None),
                answer => answer?,
            };
            let version = version_of(&answer);
            let length = answer.meta.size;
            if length > most {
                return Ok(Some((None, length, version)));
            }
            Ok(Some((Some(answer.bytes().await?), length, version)))
        };
        let answer = match self.wait(key, self.times.request, request) {
            Ok(answer) => answer,
            Err(Error::Missing { .. }) => return Ok(None),
            Err(error) => return Err(error),
        };
        match answer {
            None => Ok(known),
            Some((Some(bytes), _, version)) => Ok(Some((bytes, version))),
            // Like any other that cannot be read: its reader finds nothing in it.
            Some((None, length, version)) => {
                tracing::debug!(
                    object = self.shown(key),
                    length,
                    most,
                    "too large to be read"
                );
                Ok(Some((Bytes::new(), version)))
            }
        }
    }

    /// Reads many objects of at most `most` bytes each, some at once, and reports each that exists,
    /// in any order. Keys are asked for as the reads need them, so that they take no memory.
    pub(super) fn get_many(
        &self,
        keys: impl Iterator<Item = String>,
        most: u64,
        stop: Stop<'_>,
        each: &mut dyn FnMut(&str, Result<Bytes>) -> Result<()>,
    ) -> Result<()> {
        let read = |key: String| async move {
            let request = async { self.client.get()?.get(&self.path(&key)).await };
            let shown = self.shown(&key);
            let bytes = match self.soon(&shown, request).await {
                Ok(answer) if answer.meta.size > most => {
                    Err(Error::corrupt(shown, "it is too large"))
                }
                Ok(answer) => self.soon(&shown, answer.bytes()).await,
                Err(error) => Err(error),
            };
            (key, bytes)
        };
        let reads = futures_util::stream::iter(keys).map(read);
        let mut reads = pin!(reads.buffer_unordered(AT_ONCE));
        while let Some((key, bytes)) = self.runtime.block_on(reads.next()) {
            if stop() {
                return Err(Error::Stopped);
            }
            if !matches!(bytes, Err(Error::Missing { .. })) {
                each(&key, bytes)?;
            }
        }
        Ok(())
    }

    /// Reads a part of an object into memory. If nothing comes for a while, it begins once more.
    pub(super) fn range(&self, key: &str, range: Range<u64>) -> Result<Bytes> {
        let (path, object) = (self.path(key), self.shown(key));
        let whole = async || {
            let mut pieces = self.ask(&path, &object, range.clone()).await?.into_stream();
            let mut bytes = Vec::new();
            while let Some(piece) = self.soon(&object, pieces.try_next()).await? {
                bytes.extend(piece);
            }
            Ok(Bytes::from(bytes))
        };
        let within = self.times.transfer;
        let late = |_| Err(Error::away(&object, "no answer in time"));
        let read = || {
            let read = async { timeout(within, whole()).await };
            self.runtime.block_on(read).unwrap_or_else(late)
        };
        let bytes = match read() {
            Err(Error::Stalled { .. }) => read()?,
            bytes => bytes?,
        };
        if bytes.len() as u64 != range.end - range.start {
            return Err(Error::corrupt(object, "it is shorter than it should be"));
        }
        Ok(bytes)
    }

    /// Asks for a part of an object.
    pub(super) async fn ask(
        &self,
        path: &Path,
        object: &str,
        range: Range<u64>,
    ) -> Result<GetResult> {
        let end = range.end;
        let options = GetOptions {
            range: Some(range.into()),
            ..GetOptions::default()
        };
        let request = async { self.client.get()?.get_opts(path, options).await };
        let answer = self.soon(object, request).await?;
        if answer.meta.size < end {
            return Err(Error::corrupt(object, "it is shorter than it should be"));
        }
        Ok(answer)
    }

    /// Waits for the answer to a request, or for the next bytes of a download.
    pub(super) async fn soon<T>(
        &self,
        object: &str,
        next: impl Future<Output = object_store::Result<T>>,
    ) -> Result<T> {
        let next = timeout(self.times.request, next).await;
        let next = next.map_err(|_| Error::stalled(object))?;
        next.map_err(|error| Error::of_store(object, &error))
    }

    /// Writes an object that must not exist. [`Error::Conflict`]: it does.
    pub(super) fn create(&self, key: &str, bytes: Vec<u8>) -> Result<()> {
        self.put(&self.client, key, bytes, PutMode::Create)
    }

    /// Writes over this version of an object. [`Error::Conflict`]: it is another one by now.
    pub(super) fn replace(&self, key: &str, bytes: Vec<u8>, version: &Version) -> Result<()> {
        self.put(&self.client, key, bytes, over(Some(version)))
    }

    /// Writes over this version of an object, or an object that must not exist, with one request.
    /// [`Error::Conflict`]: it is another one by now, and nothing was written. A client that sends
    /// the request again after an error gets that answer also for what it wrote itself.
    pub(super) fn write_once(
        &self,
        key: &str,
        bytes: Vec<u8>,
        version: Option<&Version>,
    ) -> Result<()> {
        self.put(&self.once, key, bytes, over(version))
    }

    /// Writes an object unconditionally: no other writer has its key, or the last one counts.
    pub(super) fn write(&self, key: &str, bytes: Vec<u8>) -> Result<()> {
        self.put(&self.client, key, bytes, PutMode::Overwrite)
    }

    fn put(&self, client: &Client, key: &str, bytes: Vec<u8>, mode: PutMode) -> Result<()> {
        let (path, options) = (self.path(key), PutOptions::from(mode));
        let most = if bytes.len() < 1 << 20 {
            self.times.request
        } else {
            self.times.transfer
        };
        let payload = PutPayload::from(bytes);
        let request = async { client.get()?.put_opts(&path, payload, options).await };
        self.wait(key, most, request).map(|_| ())
    }

    /// Deletes an object; that it does not exist is no error.
    pub(super) fn delete(&self, key: &str) -> Result<()> {
        self.delete_by(&self.client, key)
    }

    /// Deletes an object with one request. A client that sends it again after an error could delete
    /// what was written after the first request had its effect.
    pub(super) fn delete_once(&self, key: &str) -> Result<()> {
        self.delete_by(&self.once, key)
    }

    fn delete_by(&self, client: &Client, key: &str) -> Result<()> {
        let path = self.path(key);
        let request = async { client.get()?.delete(&path).await };
        match self.wait(key, self.times.request, request) {
            Err(Error::Missing { .. }) => Ok(()),
            result => result,
        }
    }

    /// When an object was last written, by the storage's clock.
    pub(super) fn modified(&self, key: &str) -> Result<Timestamp> {
        let path = self.path(key);
        let request = async { self.client.get()?.head(&path).await };
        let meta = self.wait(key, self.times.request, request)?;
        Ok(timestamp(meta.last_modified.timestamp_millis()))
    }

    /// Reports every object below a prefix, in any order.
    pub(super) fn list(
        &self,
        prefix: &str,
        each: &mut dyn FnMut(Item) -> Result<()>,
    ) -> Result<()> {
        let path = self.path(prefix);
        let failed = |error| Error::of_store(&self.shown(prefix), &error);
        let mut items = self.client.get().map_err(failed)?.list(Some(&path));
        loop {
            let next = self.wait(prefix, self.times.transfer, items.try_next());
            let Some(meta) = next? else {
                return Ok(());
            };
            let Some(parts) = meta.location.prefix_match(&self.prefix) else {
                continue;
            };
            let parts: Vec<String> = parts.map(|part| part.as_ref().to_owned()).collect();
            each(Item {
                key: parts.join("/"),
                bytes: meta.size,
                modified: timestamp(meta.last_modified.timestamp_millis()),
            })?;
        }
    }

    /// The names directly below a prefix that have something below them.
    pub(super) fn children(&self, prefix: &str) -> Result<Vec<String>> {
        let path = self.path(prefix);
        let request = async { self.client.get()?.list_with_delimiter(Some(&path)).await };
        let listed = self.wait(prefix, self.times.transfer, request)?;
        let names = listed.common_prefixes.iter();
        Ok(names
            .filter_map(|path| path.filename().map(str::to_owned))
            .collect())
    }

    /// Begins an upload in parts.
    pub(super) fn multipart(&self, key: &str) -> Result<Box<dyn MultipartUpload>> {
        let path = self.path(key);
        let options = PutMultipartOptions::default();
        let request = async { self.client.get()?.put_multipart_opts(&path, options).await };
        self.wait(key, self.times.request, request)
    }

    /// Waits for what an upload does.
    pub(super) fn transfer<T>(
        &self,
        key: &str,
        request: impl Future<Output = object_store::Result<T>>,
    ) -> Result<T> {
        self.wait(key, self.times.transfer, request)
    }

    /// Waits before something is tried again.
    pub(super) fn pause(&self) {
        std::thread::sleep(self.times.pause);
    }

    pub(super) fn publish_within(&self) -> Duration {
        self.times.publish
    }

    pub(super) fn runtime(&self) -> &Handle {
        &self.runtime
    }
}

fn over(version: Option<&Version>) -> PutMode {
    version.map_or(PutMode::Create, |it| PutMode::Update(it.of_store.clone()))
}

fn timestamp(millis: i64) -> Timestamp {
    Timestamp(u64::try_from(millis).unwrap_or(0))
}

fn version_of(answer: &GetResult) -> Version {
    Version {
        of_store: UpdateVersion {
            e_tag: answer.meta.e_tag.clone(),
            version: answer.meta.version.clone(),
        },
        modified: timestamp(answer.meta.last_modified.timestamp_millis()),
    }
}

/// How many objects are remembered that may be read again.
const KNOWN: usize = 4096;
/// A longer one is not remembered.
const SHORT: usize = 2048;
/// How many small objects are read at once.
const AT_ONCE: usize = 32;
