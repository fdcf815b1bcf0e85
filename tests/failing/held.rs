//! What these tests share: a thread that waits at a point, and an archive that is imported then.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc;

use baggageclaim::archive::Codec;
use baggageclaim::engine::failpoint::{self, Point};
use baggageclaim::engine::{Error, ImportRequest, Imported, Source};
use baggageclaim::model::Name;

use super::common::bench::{Bench, NEVER, eventually};

/// The name of the cache `TASK`.
pub(super) fn name() -> Name {
    Name {
        tenant: "ci".parse().expect("a label"),
        reference: "task-cache/k".parse().expect("a reference"),
    }
}

/// A thread that comes to a point and waits there.
pub(super) struct Held {
    come: mpsc::Receiver<()>,
    go_on: mpsc::Sender<()>,
}

impl Held {
    pub(super) fn at(point: Point) -> Self {
        let (say, come) = mpsc::channel();
        let (go_on, may_go_on) = mpsc::channel::<()>();
        failpoint::at(point, 1, move || {
            say.send(()).expect("it is waited for");
            may_go_on.recv_timeout(NEVER).expect("it goes on");
        });
        Self { come, go_on }
    }

    pub(super) async fn comes(&self) {
        eventually("the point is reached", || self.come.try_recv().is_ok()).await;
    }

    pub(super) fn goes_on(self) {
        self.go_on.send(()).expect("it waits");
    }
}

/// An archive of the content that has the name.
pub(super) async fn archive_of(bench: &Bench) -> PathBuf {
    let id = bench.artifact("task-cache/k").expect("it is there").id;
    let export = bench
        .engine
        .export(Source::Artifact(id))
        .await
        .expect("open");
    let path = bench.lab.path().join("archive");
    let file = fs::File::create(&path).expect("create");
    let packed = bench
        .engine
        .pack(export, Codec::Zstd(1), file, <_>::default());
    packed.await.expect("packed");
    path
}

/// Imports it under the name.
pub(super) async fn import(bench: &Bench, archive: &Path) -> Result<Imported, Error> {
    let request = ImportRequest {
        tenant: name().tenant,
        reference: name().reference,
        digest: None,
        size: None,
        ttl: None,
        base: None,
    };
    let file = fs::File::open(archive).expect("open");
    bench
        .engine
        .import(request, file, <_>::default(), || true)
        .await
}
