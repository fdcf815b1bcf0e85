//! Connections to the real server that hang in the middle, and a storage that stays silent: the
//! client gives up what travels on them in time, and closes them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use baggageclaim::shared::{Error, Publication, Store, Times, usage};
use tokio::io::{AsyncReadExt as _, copy, sink};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use crate::common::{Fs, assert_same, require_lab};
use crate::failing::{Failing, Fault, Op};
use crate::server::store_at;
use crate::tier::{TIMES, Tier, bucket, down, hold, id, never, shown, small_parts, tenant};
use crate::trips::{large, upload};

/// How many bytes each connection passes on before it hangs.
#[derive(Clone, Copy)]
struct Most {
    up: u64,
    down: u64,
}

/// Connections whose client sends more than they pass on.
#[derive(Default)]
struct Hanging {
    ever: usize,
    now: usize,
}

/// The tier, through connections that hang. Only the client ends one.
fn through(tier: &Tier, most: Most, times: Times) -> (Store, watch::Receiver<Hanging>) {
    let server = tier.server.as_ref().expect("it is on the server");
    let to = server.endpoint.trim_start_matches("http://").to_owned();
    let listener = tier.runtime.block_on(TcpListener::bind("127.0.0.1:0"));
    let listener = listener.expect("a port");
    let endpoint = format!("http://{}", listener.local_addr().expect("an address"));
    let (hanging, hangs) = watch::channel(Hanging::default());
    tier.runtime.spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let server = TcpStream::connect(&to).await.expect("the server is there");
            tokio::spawn(pass(client, server, most, hanging.clone()));
        }
    });
    let handle = tier.runtime.handle().clone();
    let objects = store_at(&endpoint);
    let store = Store::new(objects, "some/prefix", "test://hangs", handle, times);
    (store, hangs)
}

async fn pass(client: TcpStream, server: TcpStream, most: Most, hanging: watch::Sender<Hanging>) {
    let (from_client, mut to_client) = client.into_split();
    let (from_server, mut to_server) = server.into_split();
    let up = async {
        let mut from = from_client.take(most.up);
        // An error is the end of the connection, too.
        let _ended = copy(&mut from, &mut to_server).await;
        if from.limit() > 0 {
            return;
        }
        hanging.send_modify(|it| (it.ever, it.now) = (it.ever + 1, it.now + 1));
        let _ended = copy(&mut from.into_inner(), &mut sink()).await;
        hanging.send_modify(|it| it.now -= 1);
    };
    let down = async {
        let _ended = copy(&mut from_server.take(most.down), &mut to_client).await;
        std::future::pending::<()>().await;
    };
    tokio::select! {
        () = up => {}
        () = down => {}
    }
}

#[test]
fn parts_that_hang_are_given_up_with_their_connections() {
    let lab = require_lab!(Fs::Ext4);
    let Some(tier) = Tier::s3() else { return };
    let held = hold(&lab, &large(&lab));
    let times = Times {
        transfer: Duration::from_secs(2),
        ..TIMES
    };
    // Less than a part.
    let most = Most {
        up: 3 << 20,
        down: u64::MAX,
    };
    let (store, mut hangs) = through(&tier, most, times);
    let publication = Publication::resume(&store, &tenant(), id());
    let failed = publication.layer((&held.table, &held.holder), small_parts(), &never);
    assert!(matches!(failed, Err(Error::Away { .. })), "{failed:?}");
    let ends = hangs.wait_for(|it| it.ever > 0 && it.now == 0);
    let ends = async { tokio::time::timeout(Duration::from_secs(10), ends).await };
    let ended = tier.runtime.block_on(ends);
    assert!(ended.is_ok(), "a part that was given up goes on");
    let left = usage(&tier.store, &tenant(), &never).expect("usage");
    assert_eq!(left.layers, 0);
}

#[test]
fn a_download_that_hangs_is_taken_up_again_before_a_part_would_be_given_up() {
    let lab = require_lab!(Fs::Ext4);
    let Some(tier) = Tier::s3() else { return };
    let original = large(&lab);
    let layer = upload(&tier, &hold(&lab, &original));
    let times = Times {
        request: Duration::from_secs(1),
        transfer: Duration::from_secs(60),
        ..TIMES
    };
    let most = Most {
        up: u64::MAX,
        down: 6 << 20,
    };
    let (store, _) = through(&tier, most, times);
    let (into, began) = (lab.dir("down"), Instant::now());
    down(&lab, &[&bucket(&store)], &layer, &into).expect("fetch");
    assert!(began.elapsed() < times.transfer, "{:?}", began.elapsed());
    assert_same(&shown(&original), &shown(&into.join("fs")));
}

/// The tier hangs at the first read, or after the table has come.
#[test]
fn a_download_that_stays_silent_is_given_up_after_its_second_try() {
    let lab = require_lab!(Fs::Ext4);
    let tier = Tier::file();
    let layer = upload(&tier, &hold(&lab, &large(&lab)));
    let times = Times {
        request: Duration::from_secs(1),
        transfer: Duration::from_secs(60),
        retries: 3,
        ..TIMES
    };
    for well in [0, 1] {
        let asked = Arc::new(AtomicU64::new(0));
        let asks = Arc::clone(&asked);
        let plan = move |op, path: &str| match op {
            Op::Get if path.contains("/layers/") && asks.fetch_add(1, Ordering::SeqCst) >= well => {
                Fault::Slow(Duration::from_secs(3600))
            }
            _ => Fault::None,
        };
        let failing = Failing::new(Arc::clone(&tier.objects), plan);
        let handle = tier.runtime.handle().clone();
        let store = Store::new(Arc::new(failing), "", "test://silent", handle, times);
        let failed = down(&lab, &[&bucket(&store)], &layer, &lab.dir("down"));
        assert!(matches!(failed, Err(Error::Stalled { .. })), "{failed:?}");
        // Three ranges travel at once.
        let most = if well == 0 { 2 } else { 1 + 2 * 3 };
        let asked = asked.load(Ordering::SeqCst);
        assert!((2..=most).contains(&asked), "{asked} requests");
    }
}
