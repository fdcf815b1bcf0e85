//! Objects that Kubernetes and its sidecars would make: claims, PersistentVolumes, Nodes, snapshot
//! contents.

use crate::plane::ControlPlane;

/// Makes a claim, and says the name that csi-provisioner gives its volume.
pub(crate) fn claim(plane: &ControlPlane, name: &str) -> String {
    let text = format!(
        "{{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {{name: {name}}}, \
         spec: {{accessModes: [ReadWriteOnce], resources: {{requests: {{storage: 1Mi}}}}}}}}"
    );
    plane.apply(name, &text);
    let uid = plane.kubectl(&["get", "pvc", name, "-o=jsonpath={.metadata.uid}"]);
    format!("pvc-{uid}")
}

/// Makes the PersistentVolume of a claim, as csi-provisioner does. It is Bound, as the controller
/// manager would say.
pub(crate) fn persistent(plane: &ControlPlane, name: &str, id: &str, claim: &str, policy: &str) {
    persistent_on(plane, name, id, claim, policy, "node-1");
}

/// The same, with the node of its affinity.
pub(crate) fn persistent_on(
    plane: &ControlPlane,
    name: &str,
    id: &str,
    claim: &str,
    policy: &str,
    node: &str,
) {
    let text = format!(
        "{{apiVersion: v1, kind: PersistentVolume, metadata: {{name: {name}}}, \
         spec: {{accessModes: [ReadWriteOnce], capacity: {{storage: 1Mi}}, \
         persistentVolumeReclaimPolicy: {policy}, \
         claimRef: {{apiVersion: v1, kind: PersistentVolumeClaim, namespace: default, name: {claim}}}, \
         nodeAffinity: {{required: {{nodeSelectorTerms: [{{matchExpressions: [{{\
         key: topology.baggageclaim.csi.concourse-ci.org/node, operator: In, values: [{node}]}}]}}]}}}}, \
         csi: {{driver: baggageclaim.csi.concourse-ci.org, volumeHandle: {id}}}}}}}"
    );
    plane.apply(name, &text);
    phase(plane, name, "Bound");
}

/// Sets the phase of a PersistentVolume.
pub(crate) fn phase(plane: &ControlPlane, name: &str, phase: &str) {
    let patch = format!("--patch={{\"status\": {{\"phase\": \"{phase}\"}}}}");
    plane.kubectl(&[
        "patch",
        "pv",
        name,
        "--subresource=status",
        "--type=merge",
        &patch,
    ]);
}

/// Makes a Node object.
pub(crate) fn node_object(plane: &ControlPlane, name: &str) {
    let text = format!("{{apiVersion: v1, kind: Node, metadata: {{name: {name}}}}}");
    plane.apply(&format!("node-object-{name}"), &text);
}

/// Defines the kinds of snapshot contents, with any fields.
pub(crate) fn define_contents(plane: &ControlPlane) {
    for (group, version, kind) in [
        ("snapshot.storage.k8s.io", "v1", "VolumeSnapshotContent"),
        (
            "groupsnapshot.storage.k8s.io",
            "v1beta1",
            "VolumeGroupSnapshotContent",
        ),
    ] {
        let singular = kind.to_lowercase();
        let text = format!(
            "{{apiVersion: apiextensions.k8s.io/v1, kind: CustomResourceDefinition, \
             metadata: {{name: {singular}s.{group}, annotations: {{\
             api-approved.kubernetes.io: 'https://github.com/kubernetes-csi/external-snapshotter'}}}}, \
             spec: {{group: {group}, scope: Cluster, names: {{plural: {singular}s, \
             singular: {singular}, kind: {kind}, listKind: {kind}List}}, versions: [{{\
             name: {version}, served: true, storage: true, schema: {{openAPIV3Schema: {{\
             type: object, x-kubernetes-preserve-unknown-fields: true}}}}}}]}}}}"
        );
        plane.apply(&singular, &text);
        let name = format!("crd/{singular}s.{group}");
        plane.kubectl(&[
            "wait",
            "--for=condition=Established",
            "--timeout=60s",
            &name,
        ]);
    }
}

/// Makes the content of a snapshot, or of a group.
pub(crate) fn content(plane: &ControlPlane, group: bool, name: &str, handle: &str) {
    let (version, kind, field) = if group {
        (
            "groupsnapshot.storage.k8s.io/v1beta1",
            "VolumeGroupSnapshotContent",
            "volumeGroupSnapshotHandle",
        )
    } else {
        (
            "snapshot.storage.k8s.io/v1",
            "VolumeSnapshotContent",
            "snapshotHandle",
        )
    };
    let text = format!(
        "{{apiVersion: {version}, kind: {kind}, metadata: {{name: {name}}}, \
         spec: {{driver: baggageclaim.csi.concourse-ci.org}}, status: {{{field}: {handle}}}}}"
    );
    plane.apply(name, &text);
}

/// The name of the object and the reason of each event.
pub(crate) fn events(plane: &ControlPlane) -> String {
    let path = "-o=jsonpath={range .items[*]}{.involvedObject.name} {.reason};{end}";
    plane.kubectl(&["get", "events", path])
}
