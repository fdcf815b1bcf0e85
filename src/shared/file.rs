//! A directory of a shared filesystem as an object store. The crate's one cannot replace
//! conditionally. Every write and every deletion takes a lock. The ETag of a small object is the
//! hash of its content.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use futures_util::stream::BoxStream;
use futures_util::{StreamExt as _, TryStreamExt as _};
use hyper::body::Bytes;
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload,
    ObjectMeta, ObjectStore, ObjectStoreExt as _, PutMode, PutMultipartOptions, PutOptions,
    PutPayload, PutResult, Result, UpdateVersion,
};

use super::keys::Keys;
use super::record::sha256;
use crate::sys::{self, Dir, Lock};

/// The file that is locked.
const LOCK: &str = ".lock";
/// The mode of the directory that all objects are in.
const PRIVATE: u32 = 0o700;
/// Objects of at most so many bytes have an ETag and can be replaced conditionally.
const SMALL: u64 = 64 << 10;
/// How long a writer waits for the lock. Each holder has it for one small write.
const PATIENCE: Duration = Duration::from_secs(20);
const PAUSE: Duration = Duration::from_millis(3);

/// The store.
#[derive(Debug)]
pub(super) struct Directory {
    inner: LocalFileSystem,
    root: Arc<Dir>,
}

impl Directory {
    /// Opens the directory, which must exist.
    pub(super) fn open(path: &std::path::Path) -> Result<Self> {
        let root = Dir::open(path).map_err(|error| generic(&error))?;
        // A bucket has no empty directories, either.
        let inner = LocalFileSystem::new_with_prefix(path)?
            .with_fsync(true)
            .with_automatic_cleanup(true);
        let root = Arc::new(root);
        Ok(Self { inner, root })
    }
}

/// Makes sure that only this user can reach the objects. The crate makes files and directories with
/// all permissions that the umask permits, and a driver has none. It also deletes the directory
/// with its last object.
fn close_to_others(root: &Dir) -> Result<()> {
    let close = || {
        loop {
            if root.ensure_dir(Keys::tenants(), PRIVATE)? {
                return root.sync();
            }
            let Some(all) = root.open_if_there(Keys::tenants())? else {
                continue;
            };
            let stat = all.stat_self()?;
            let is_own = stat.st_uid == rustix::process::geteuid().as_raw();
            if is_own && stat.st_mode & 0o077 != 0 {
                all.set_mode(PRIVATE)?;
            }
            return Ok(());
        }
    };
    close().map_err(|error| generic(&error))
}

/// Waits for the lock, on a thread of its own. A lock that comes after the caller gave up is free
/// again at once.
async fn lock(root: &Arc<Dir>) -> Result<Lock> {
    let root = Arc::clone(root);
    let wait = move || {
        let until = Instant::now() + PATIENCE;
        loop {
            match root.try_lock(LOCK) {
                Ok(Some(lock)) => return Ok(lock),
                Ok(None) if Instant::now() < until => std::thread::sleep(PAUSE),
                Ok(None) => return Err(not_free()),
                Err(error) => return Err(generic(&error)),
            }
        }
    };
    apart(wait).await?
}

fn not_free() -> Error {
    Error::Generic {
        store: "file",
        source: Box::new(std::io::Error::new(
            std::io::ErrorKind::TimedOut,
            "the lock of the directory is not free",
        )),
    }
}

/// Makes a change with the lock. A caller may give up, but a change of a file that has begun goes
/// on. So it keeps the lock until its end: the next writer's condition must see it.
async fn with_lock<T: Send + 'static>(
    root: &Arc<Dir>,
    change: impl Future<Output = Result<T>> + Send + 'static,
) -> Result<T> {
    let lock = lock(root).await?;
    let change = tokio::spawn(async move {
        let changed = change.await;
        // Where no thread can be started, the lock is given back here.
        let _freed = apart(move || drop(lock)).await;
        changed
    });
    change.await.unwrap_or_else(|error| Err(error.into()))
}

/// The content and the version of a small object.
async fn small(inner: &LocalFileSystem, location: &Path) -> Result<Option<(Bytes, ObjectMeta)>> {
    let answer = inner.get(location).await?;
    let mut meta = answer.meta.clone();
    if meta.size > SMALL {
        return Ok(None);
    }
    let bytes = answer.bytes().await?;
    meta.e_tag = Some(etag(&bytes));
    Ok(Some((bytes, meta)))
}

/// Writes an object. The caller has the lock.
async fn put_locked(
    inner: &LocalFileSystem,
    location: &Path,
    payload: PutPayload,
    options: PutOptions,
) -> Result<PutResult> {
    if let PutMode::Update(UpdateVersion { e_tag, .. }) = &options.mode {
        let current = match small(inner, location).await {
            Ok(current) => current.and_then(|(_, meta)| meta.e_tag),
            Err(Error::NotFound { .. }) => None,
            Err(error) => return Err(error),
        };
        if current.is_none() || current != *e_tag {
            return Err(Error::Precondition {
                path: location.to_string(),
                source: "there is another version".into(),
            });
        }
    }
    let mode = match options.mode {
        PutMode::Create => PutMode::Create,
        PutMode::Update(_) | PutMode::Overwrite => PutMode::Overwrite,
    };
    let length = payload.content_length() as u64;
    let e_tag = (length <= SMALL).then(|| {
        let bytes: Vec<u8> = payload
            .iter()
            .flat_map(|part| part.iter().copied())
            .collect();
        etag(&bytes)
    });
    let put = inner
        .put_opts(location, payload, PutOptions::from(mode))
        .await?;
    Ok(PutResult { e_tag, ..put })
}

fn etag(bytes: &[u8]) -> String {
    format!("\"{}\"", sha256(bytes))
}

/// Makes a call that may wait for the server of the directory, which may be away.
async fn apart<T: Send + 'static>(call: impl FnOnce() -> T + Send + 'static) -> Result<T> {
    let called = sys::on_thread("file-tier", call).await;
    called.map_err(|error| Error::Generic {
        store: "file",
        source: Box::new(error),
    })
}

fn generic(error: &sys::Error) -> Error {
    let kind: std::io::Error = error.errno().into();
    Error::Generic {
        store: "file",
        source: Box::new(std::io::Error::new(kind.kind(), error.to_string())),
    }
}

impl fmt::Display for Directory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

#[async_trait]
impl ObjectStore for Directory {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> Result<PutResult> {
        let (root, inner) = (Arc::clone(&self.root), self.inner.clone());
        let location = location.clone();
        let put = async move {
            apart(move || close_to_others(&root)).await??;
            put_locked(&inner, &location, payload, options).await
        };
        with_lock(&self.root, put).await
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        let root = Arc::clone(&self.root);
        apart(move || close_to_others(&root)).await??;
        self.inner.put_multipart_opts(location, options).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let whole = options.range.is_none() && !options.head;
        if whole && let Some((bytes, meta)) = small(&self.inner, location).await? {
            options.check_preconditions(&meta)?;
            let range = 0..meta.size;
            let stream = futures_util::stream::once(async { Ok(bytes) }).boxed();
            return Ok(GetResult {
                payload: GetResultPayload::Stream(stream),
                meta,
                range,
                attributes: object_store::Attributes::default(),
                extensions: object_store::Extensions::default(),
            });
        }
        self.inner.get_opts(location, options).await
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        let (inner, root) = (self.inner.clone(), Arc::clone(&self.root));
        let deleted = locations.then(move |location| {
            let (inner, root) = (inner.clone(), Arc::clone(&root));
            async move {
                let location = location?;
                let delete = async move { inner.delete(&location).await.map(|()| location) };
                with_lock(&root, delete).await
            }
        });
        deleted.boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.inner.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        let mut listed = self.inner.list_with_delimiter(prefix).await?;
        // An upload that ended early leaves directories. A bucket has no prefix without an object.
        let mut prefixes = Vec::new();
        for prefix in std::mem::take(&mut listed.common_prefixes) {
            if self.inner.list(Some(&prefix)).try_next().await?.is_some() {
                prefixes.push(prefix);
            }
        }
        listed.common_prefixes = prefixes;
        Ok(listed)
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.inner.copy_opts(from, to, options).await
    }
}

/// The store of a directory.
pub(super) fn open(path: &std::path::Path) -> Result<Arc<dyn ObjectStore>> {
    Ok(Arc::new(Directory::open(path)?))
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::shared::{Error, Store, Times, Url};

    #[test]
    fn a_change_that_its_caller_gave_up_keeps_the_lock_until_its_end() {
        gives_up(|late| late.write("key", b"older".to_vec()));
        gives_up(|late| late.delete("key"));
    }

    fn gives_up(change: impl FnOnce(&Store) -> crate::shared::Result<()>) {
        let runtime = |blocking| {
            tokio::runtime::Builder::new_multi_thread()
                .worker_threads(1)
                .max_blocking_threads(blocking)
                .enable_all()
                .build()
                .expect("a runtime")
        };
        let directory = tempfile::tempdir().expect("a temporary directory");
        let url: Url = format!("file://{}", directory.path().display())
            .parse()
            .expect("a URL");
        let brief = Times {
            request: Duration::from_millis(100),
            ..Times::default()
        };
        let (stalled, other) = (runtime(1), runtime(4));
        let late = url.open(stalled.handle().clone(), brief).expect("open");
        let next = url.open(other.handle().clone(), Times::default());
        let next = next.expect("open");
        next.write("key", b"first".to_vec()).expect("write");
        // Its changes wait for the only thread, as those of a filesystem that does not answer.
        let (release, held) = mpsc::channel::<()>();
        stalled.spawn_blocking(move || held.recv());
        let error = change(&late).expect_err("nothing can be changed");
        assert!(matches!(error, Error::Away { .. }), "{error:?}");
        let root = Dir::open(directory.path()).expect("open");
        assert!(
            root.try_lock(LOCK).expect("lock").is_none(),
            "it is not free"
        );
        std::thread::scope(|scope| {
            let newer = scope.spawn(|| next.write("key", b"newer".to_vec()));
            release.send(()).expect("it waits");
            newer.join().expect("no panic").expect("write");
        });
        let (bytes, _) = next.get("key", 9).expect("read").expect("an object");
        assert_eq!(bytes, b"newer".as_slice());
    }

    #[test]
    fn directories_that_an_upload_has_left_are_no_namespace() {
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        let directory = tempfile::tempdir().expect("a temporary directory");
        let url = format!("file://{}", directory.path().display());
        let url: Url = url.parse().expect("a URL");
        let store = url.open(runtime.handle().clone(), Times::default());
        let store = store.expect("open");
        store.write("v1/ci/format", b"1".to_vec()).expect("write");
        let left = directory.path().join("v1/left/layers/digest");
        std::fs::create_dir_all(&left).expect("mkdir");
        // A part of an upload that was killed.
        std::fs::write(left.join("upload#1"), "part").expect("write");
        assert_eq!(store.children("v1").expect("list"), ["ci"]);
    }

    #[test]
    fn only_the_driver_can_reach_the_objects_of_a_directory_that_all_can_enter() {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .expect("a runtime");
        let directory = tempfile::tempdir().expect("a temporary directory");
        let root = Dir::open(directory.path()).expect("open");
        root.set_mode(0o755).expect("chmod");
        let url: Url = format!("file://{}", directory.path().display())
            .parse()
            .expect("a URL");
        let store = url.open(runtime.handle().clone(), Times::default());
        let store = store.expect("open");
        let objects = || root.open_beneath("v1").expect("open");
        let mode = || objects().stat_self().expect("stat").st_mode & 0o7777;

        store.write("v1/ci/format", b"1".to_vec()).expect("write");
        assert_eq!(mode(), 0o700);
        // An earlier version made it.
        objects().set_mode(0o777).expect("chmod");
        store.write("v1/ci/format", b"1".to_vec()).expect("write");
        assert_eq!(mode(), 0o700);
        // The directory goes with its last object.
        store.delete("v1/ci/format").expect("delete");
        assert!(!root.has("v1").expect("stat"));
        let upload = store.multipart("v1/ci/layers/1");
        assert_eq!(mode(), 0o700);
        drop(upload);
    }
}
