//! What a power cut leaves. Of a file that was replaced: the old content or the new, never none. On
//! xfs a rename can be on the disk before the content of the renamed file. Of a claim: what its pod
//! has fsynced.

use std::fs::{self, File};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use baggageclaim::backend::BackendKind;
use baggageclaim::store;
use baggageclaim::sys::Dir;

use crate::common::bench::{Bench, Ground, empty_claim, mount_request, names};
use crate::common::disk::sync;
use crate::common::{Fs, Lab, kernel_is};

#[tokio::test(flavor = "multi_thread")]
async fn the_record_of_a_layer_survives_a_power_cut_after_its_upload() {
    for disk in [Fs::Ext4, Fs::XfsReflink] {
        let lab = match Lab::try_sized(disk, 320 << 20) {
            Ok(lab) => lab,
            Err(reason) => return crate::common::skip(&reason),
        };
        let overlay = Some(BackendKind::Overlay);
        let bench = Bench::with(lab, |config| config.backend = overlay).await;
        let output = [("type", "output"), ("name", "o")];
        let write = |at: &Path| fs::write(at.join("f"), "content").expect("write");
        bench.step("maker", &output, write).await;
        // The layer gets its name `layer.json`.
        bench.engine.reap().await.expect("reap");
        sync(&bench.pool());
        let artifact = bench.artifact("artifact/o").expect("sealed").id;
        let noted = bench
            .engine
            .set_sharing(artifact, |sharing| sharing.number = Some(7));
        assert!(noted.expect("noted"));
        // Any program on that filesystem makes the journal durable, and so the rename.
        let other = File::create(bench.lab.path().join("other")).expect("create");
        other.sync_all().expect("fsync");

        let cut = bench.lab.cut();
        let layers = cut.path().join("pool/layers");
        let layer = Dir::open(&layers.join(&names(&layers)[0])).expect("open");
        let record = store::read_layer(&layer).expect("read");
        let record = record.unwrap_or_else(|why| panic!("{}: {why}", disk.name()));
        let sharing = record.artifact.expect("its artifact").sharing;
        assert_eq!(sharing.number, Some(7), "{}", disk.name());
        drop(layer);
        assert!(cut.close().is_empty());
        bench.finish().await;
    }
}

/// btrfs writes a transaction now and then, also one that has a claim's directory in `incoming/`.
/// An fsync of a file in it names only the directories that the next transaction made.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_pod_fsynced_in_a_new_claim_survives_a_power_cut_on_btrfs() {
    if !kernel_is(6, 7) {
        return crate::common::skip("before Linux 6.7 a copy of a mounted btrfs cannot be mounted");
    }
    for backend in [BackendKind::Overlay, BackendKind::Copy, BackendKind::Btrfs] {
        let bench = match Ground(backend, Fs::Btrfs).bench().await {
            Ok(bench) => bench,
            Err(reason) => return crate::common::skip(&reason),
        };
        for number in 0..8 {
            let name = format!("claim-{number}");
            let claim = bench.engine.create_claim(empty_claim(&name)).await;
            let claim = claim.expect("made");
            let incoming = bench.pool().join("incoming");
            let ended = Arc::new(AtomicBool::new(false));
            let is_mounted = Arc::clone(&ended);
            let committing = std::thread::spawn(move || {
                while !is_mounted.load(Ordering::Relaxed) {
                    if !names(&incoming).is_empty() {
                        return sync(&incoming);
                    }
                }
            });
            let target = bench.target(claim.id.as_str());
            let mounted = bench.engine.mount_claim(mount_request(&claim, &target));
            mounted.await.expect("mounted");
            ended.store(true, Ordering::Relaxed);
            committing.join().expect("no panic");
            let db = File::create(target.join("db")).expect("create");
            db.sync_all().expect("fsync");

            let cut = bench.lab.cut();
            let volumes = cut.path().join("pool/volumes").join(claim.id.as_str());
            let found = ["top/db", "fs/db"].map(|db| volumes.join(db).exists());
            assert!(found.contains(&true), "{}: {}", backend, volumes.display());
            assert!(cut.close().is_empty());
            drop(db);
            let unmounted = bench
                .engine
                .unmount_claim(claim.id.as_str(), &target, false);
            unmounted.await.expect("unmounted");
            let deleted = bench.engine.delete_claim(claim.id.as_str());
            deleted.await.expect("deleted");
        }
        bench.finish().await;
    }
}
