//! What the protocol needs of a storage: conditional writes and reads, uploads in parts, ranges,
//! lists and deletions. It runs on a directory, on the real S3 server, on a double of Google Cloud
//! Storage (`tests/gcs-double/`), and on the tier whose URL is in `BAGGAGECLAIM_TEST_TIER`: a
//! storage of one's own, with its credentials in the environment. Each run has a prefix of its own
//! there.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use baggageclaim::shared::{
    Collector, Committed, Error, Publication, Resolved, Source as _, Store, Url, clear, look, usage,
};

use object_store::ClientOptions;
use object_store::gcp::GoogleCloudStorageBuilder;

use crate::collect::now;
use crate::common::{Fs, Lab, assert_same, go, require_lab, skip};
use crate::tier::{
    Held, TIMES, Tier, bucket, commit, down, hold, id, never, publish, reference, runtime, shown,
    small_parts, tenant,
};
use crate::trips::large;

/// `scheme://bucket/path?options`, a prefix deeper.
fn deeper(url: &str) -> String {
    let (place, options) = url.split_once('?').unwrap_or((url, ""));
    let place = place.trim_end_matches('/');
    let unique = format!("{}-{}", std::process::id(), now().0);
    format!("{place}/{unique}?{options}")
}

/// A service account without a key, for whom no token is asked for.
const ACCOUNT: &str =
    r#"{"client_email":"","private_key":"","private_key_id":"","disable_oauth":true}"#;

/// The double, which ends with this.
struct Google {
    child: Child,
    store: Store,
    _runtime: Arc<tokio::runtime::Runtime>,
}

impl Drop for Google {
    fn drop(&mut self) {
        let _killed = self.child.kill();
        let _waited = self.child.wait();
    }
}

fn google() -> Result<Google, String> {
    let program = go::build("gcs-double", ".", "gcs-double")?;
    let mut child = Command::new(program)
        .stdout(Stdio::piped())
        .spawn()
        .expect("it starts");
    let mut address = String::new();
    let stdout = child.stdout.take().expect("it is piped");
    let read = BufReader::new(stdout).read_line(&mut address);
    assert!(read.expect("read") > 0, "it has an address");
    let _chosen = rustls::crypto::ring::default_provider().install_default();
    let objects = GoogleCloudStorageBuilder::new()
        .with_bucket_name("bucket")
        .with_base_url(&format!("http://{}", address.trim()))
        .with_service_account_key(ACCOUNT)
        .with_client_options(ClientOptions::new().with_allow_http(true))
        .build()
        .expect("a store");
    let runtime = runtime();
    let handle = runtime.handle().clone();
    let store = Store::new(
        Arc::new(objects),
        "some/prefix",
        "gs://bucket",
        handle,
        TIMES,
    );
    Ok(Google {
        child,
        store,
        _runtime: runtime,
    })
}

#[test]
fn a_storage_has_what_the_protocol_needs() {
    let lab = require_lab!(Fs::Ext4);
    let layer = large(&lab);
    let held = hold(&lab, &layer);
    for tier in Tier::both() {
        protocol(&lab, &tier.store, &held, &layer);
    }
    match google() {
        Ok(google) => protocol(&lab, &google.store, &held, &layer),
        Err(reason) => skip(&reason),
    }
    if let Some(url) = std::env::var_os("BAGGAGECLAIM_TEST_TIER") {
        let url: Url = deeper(url.to_str().expect("text")).parse().expect("a URL");
        let runtime = runtime();
        let store = url.open(runtime.handle().clone(), TIMES).expect("open");
        println!("{store}");
        protocol(&lab, &store, &held, &layer);
    }
}

fn protocol(lab: &Lab, store: &Store, held: &Held, layer: &std::path::Path) {
    let first = Publication::begin(store, &tenant(), id()).expect("begin");
    let up = first.layer((&held.table, &held.holder), small_parts(), &never);
    let up = up.expect("upload");
    assert!(up.bytes > 20 << 20, "{up:?}");
    // Both have looked before one of them writes: create-only, then compare-and-swap.
    for (name, second) in [
        ("resource-cache/x", Committed::KeptFirst),
        ("task-cache/x", Committed::Named(now().0)),
    ] {
        let mut one = Publication::resume(store, &tenant(), id());
        let mut other = Publication::resume(store, &tenant(), id());
        for publication in [&mut one, &mut other] {
            publication
                .look(&reference(name), crate::tier::NOW)
                .expect("look");
        }
        let written = one.commit(commit(name, vec![up]), now()).expect("commit");
        let Committed::Named(number) = written else {
            panic!("{name}: {written:?}");
        };
        let late = other.commit(commit(name, vec![up]), now()).expect("commit");
        match second {
            Committed::Named(_) => assert_eq!(late, Committed::Named(number + 1), "{name}"),
            other => assert_eq!(late, other, "{name}"),
        }
    }
    // Ranges, and a read of a name that has not changed, and has.
    let (source, name) = (bucket(store), reference("task-cache/x"));
    let Resolved::Found(found) = source.resolve(&tenant(), &name, None).expect("resolve") else {
        panic!("it is not found");
    };
    let into = lab.dir(&format!("down-{}", id()));
    let fetched = down(lab, &[&source], &found.manifest.layers[0], &into).expect("fetch");
    assert_eq!(fetched.bytes, up.content);
    assert_same(&shown(layer), &shown(&into.join("fs")));
    let has = Some(found.manifest.artifact);
    let again = source.resolve(&tenant(), &name, has).expect("resolve");
    assert!(matches!(again, Resolved::Same(_)), "{again:?}");
    publish(store, "task-cache/x", &[held]).expect("publish");
    let again = source.resolve(&tenant(), &name, has).expect("resolve");
    assert!(matches!(again, Resolved::Found(_)), "{again:?}");

    // The layer is found by a list, so there is one. A cleared name shows nothing.
    let used = usage(store, &tenant(), &never).expect("usage");
    assert_eq!((used.names, used.manifests, used.layers), (2, 5, 1));
    let before = look(store, &tenant(), &name)
        .expect("look")
        .expect("it is there");
    let cleared = clear(store, &tenant(), &name, 0, id(), now()).expect("clear");
    assert!(cleared > before.number);
    let collect = || {
        let ci = tenant();
        let collector = Collector {
            grace: Duration::ZERO,
            ..Collector::new(store, &ci, id())
        };
        collector.run(now(), &never).expect("collect")
    };
    // A collector that works has the lease.
    let ci = tenant();
    let nested = Collector {
        progress: &|_| {
            let second = std::thread::scope(|scope| {
                let second = || Collector::new(store, &ci, id()).run(now(), &never);
                scope.spawn(second).join().expect("no panic")
            });
            let error = second.expect_err("there is another one");
            assert!(matches!(error, Error::Leased { .. }), "{error}");
        },
        ..Collector::new(store, &ci, id())
    };
    nested.run(now(), &never).expect("collect");
    let marked = collect();
    assert_eq!((marked.condemned, marked.deleted), (4, 0), "{marked:?}");
    let deleted = collect();
    assert_eq!((deleted.condemned, deleted.deleted), (0, 4), "{deleted:?}");
    let left = usage(store, &tenant(), &never).expect("usage");
    // The cleared name's record stays for 30 days.
    assert_eq!((left.names, left.manifests, left.layers), (2, 1, 1));
}
