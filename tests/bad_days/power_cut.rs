//! What a power cut leaves of a file that was replaced: the old content or the new, never none. On
//! xfs a rename can be on the disk before the content of the renamed file.

use std::fs::{self, File};
use std::path::Path;

use baggageclaim::backend::BackendKind;
use baggageclaim::store;
use baggageclaim::sys::Dir;

use crate::common::bench::{Bench, names};
use crate::common::disk::sync;
use crate::common::{Fs, Lab};

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
