//! Volumes whose claim was given up, and those that must stay.

use std::collections::BTreeSet;

use baggageclaim::api::{BOUND, Phase};
use baggageclaim::engine::{Config, Engine};

use crate::calls::{create, request};
use crate::common::{Fs, require_lab};
use crate::driver::{client, controller_with, node};
use crate::plane::ControlPlane;
use crate::{await_pools, eventually, volumes};

/// Makes a claim, and says the name that csi-provisioner gives its volume.
fn claim(plane: &ControlPlane, name: &str) -> String {
    let text = format!(
        "{{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {{name: {name}}}, \
         spec: {{accessModes: [ReadWriteOnce], resources: {{requests: {{storage: 1Mi}}}}}}}}"
    );
    plane.apply(name, &text);
    let uid = plane.kubectl(&["get", "pvc", name, "-o=jsonpath={.metadata.uid}"]);
    format!("pvc-{uid}")
}

/// Makes the PersistentVolume, as csi-provisioner does.
fn persistent(plane: &ControlPlane, name: &str, id: &str) {
    let text = format!(
        "{{apiVersion: v1, kind: PersistentVolume, metadata: {{name: {name}}}, \
         spec: {{accessModes: [ReadWriteOnce], capacity: {{storage: 1Mi}}, \
         persistentVolumeReclaimPolicy: Retain, \
         csi: {{driver: baggageclaim.csi.concourse-ci.org, volumeHandle: {id}}}}}}}"
    );
    plane.apply(name, &text);
}

#[tokio::test]
async fn a_volume_whose_claim_was_given_up_is_deleted_and_no_other() {
    let Some(plane) = ControlPlane::start().await else {
        return;
    };
    let lab = require_lab!(Fs::Ext4);
    let controller = controller_with(&plane, &["--leak-grace=2s"]);
    let mut one = node(&plane, "node-1", &lab.dir("one"));
    let mut client = client(&controller).await;
    await_pools(&plane, 1).await;
    let mut make = async |name: &str| {
        let made = create(&mut client, request(name, None, None)).await;
        made.expect("made").0
    };
    let retained_name = claim(&plane, "retained");
    let retained = make(&retained_name).await;
    let named_name = claim(&plane, "named");
    let named = make(&named_name).await;
    let pending = make(&claim(&plane, "pending")).await;
    let other = make("not-of-a-claim").await;
    let given_up = make(&claim(&plane, "given-up")).await;

    // A PersistentVolume that was deleted by hand: its data stays.
    persistent(&plane, &retained_name, &retained);
    persistent(&plane, &named_name, &named);
    let marked = async || {
        let volumes = volumes(&plane).await;
        let marked = volumes.iter().filter(|volume| {
            let marks = volume.metadata.annotations.as_ref();
            marks.is_some_and(|marks| marks.contains_key(BOUND))
        });
        marked.count() == 2
    };
    eventually("volumes with a PersistentVolume are marked", marked).await;
    plane.delete("pv", &retained_name);
    plane.delete("pvc", "retained");
    plane.delete("pvc", "named");

    plane.delete("pvc", "given-up");
    let is_gone = async || {
        let volumes = volumes(&plane).await;
        let gone = Some(&given_up);
        !volumes.iter().any(|one| one.metadata.name.as_ref() == gone)
    };
    eventually("the volume that was given up is deleted", is_gone).await;
    let left = volumes(&plane).await;
    let is_ready = |phase| phase == Some(Phase::Ready);
    assert!(left.iter().all(|one| is_ready(one.phase())), "{left:?}");
    one.kill();
    let engine = Engine::open(Config::new(lab.dir("one")))
        .await
        .expect("it opens");
    let held = engine.claims(None, usize::MAX).items;
    let held: BTreeSet<String> = held.iter().map(|claim| claim.id.to_string()).collect();
    engine.shutdown().await;
    assert_eq!(held, BTreeSet::from([retained, named, pending, other]));
}
