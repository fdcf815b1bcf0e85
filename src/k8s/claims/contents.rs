//! Which snapshots VolumeSnapshotContents and VolumeGroupSnapshotContents name. Their definitions
//! are not part of Kubernetes: a cluster may have neither.

use std::collections::HashMap;
use std::sync::Arc;

use kube::api::DynamicObject;
use kube::discovery::{self, Scope};
use kube::error::DiscoveryError;
use kube::{Api, Client, ResourceExt as _};
use serde_json::Value;
use tokio::sync::Mutex;
use tokio::time::{Instant, timeout};
use tonic::Code;

use super::cluster::LONGEST;
use super::decide::refusal;
use super::objects::failed;
use crate::engine::Result;
use crate::k8s::client::{first_page, has_code, page_after};
use crate::model::DRIVER_NAME;

/// The kind of the content of a group.
pub(super) const OF_GROUP: &str = "VolumeGroupSnapshotContent";

/// The API groups and kinds. If contents of both kinds name an id, that of the last is told.
const KINDS: [(&str, &str); 2] = [
    ("snapshot.storage.k8s.io", "VolumeSnapshotContent"),
    ("groupsnapshot.storage.k8s.io", OF_GROUP),
];

/// A content that names a snapshot or a group. Contents of a group's members name the group, too.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Content {
    pub(super) kind: &'static str,
    pub(super) name: String,
}

/// Where a content has the id of its snapshot, or of its group.
const HANDLES: [&str; 5] = [
    "/status/snapshotHandle",
    "/spec/source/snapshotHandle",
    "/status/volumeGroupSnapshotHandle",
    "/spec/source/groupSnapshotHandles/volumeGroupSnapshotHandle",
    "/spec/source/volumeGroupSnapshotHandle",
];

/// Adds the ids that a content of the driver names. One that is being deleted names none.
fn add(kind: &'static str, content: &DynamicObject, named: &mut HashMap<String, Content>) {
    let data = &content.data;
    let of = data.pointer("/spec/driver").and_then(Value::as_str);
    if of != Some(DRIVER_NAME) || content.metadata.deletion_timestamp.is_some() {
        return;
    }
    let ids = HANDLES.iter().filter_map(|path| data.pointer(path));
    let ids = ids.filter_map(Value::as_str);
    named.extend(ids.map(|id| {
        let name = content.name_any();
        (id.to_owned(), Content { kind, name })
    }));
}

/// The ids of all snapshots and groups that contents name, each with such a content.
pub(super) type Named = HashMap<String, Content>;

/// The contents of the driver.
pub(super) struct Contents {
    client: Client,
    /// The last list, and when it was begun. Held while one is read.
    last: Mutex<Option<(Instant, Arc<Named>)>>,
}

impl Contents {
    pub(super) fn new(client: Client) -> Self {
        let last = Mutex::default();
        Self { client, last }
    }

    /// What they name, read live: the list begins after the call. Calls that come while a list is
    /// read share the next one, since a namespace may have thousands of snapshots to delete.
    pub(super) async fn named(&self) -> Result<Arc<Named>> {
        let called = Instant::now();
        let mut last = self.last.lock().await;
        if let Some((began, named)) = &*last
            && *began > called
        {
            return Ok(Arc::clone(named));
        }
        let began = Instant::now();
        // Others wait for it.
        let read = timeout(LONGEST, list(&self.client)).await;
        let late = |_| {
            let message = "the API server does not list the contents of snapshots in time";
            refusal(Code::Unavailable, message.to_owned())
        };
        let named = Arc::new(read.map_err(late)??);
        *last = Some((began, Arc::clone(&named)));
        Ok(named)
    }
}

async fn list(client: &Client) -> Result<Named> {
    let mut named = HashMap::new();
    for (group, kind) in KINDS {
        let found = match discovery::group(client, group).await {
            Ok(group) => group.recommended_kind(kind),
            Err(kube::Error::Discovery(DiscoveryError::MissingApiGroup(_))) => None,
            Err(error) => return Err(failed(&error)),
        };
        let Some((resource, _)) = found.filter(|(_, can)| can.scope == Scope::Cluster) else {
            continue;
        };
        let contents: Api<DynamicObject> = Api::all_with(client.clone(), &resource);
        let mut next = Some(first_page());
        while let Some(params) = next {
            let page = match contents.list(&params).await {
                Ok(page) => page,
                // Its definition was deleted meanwhile.
                Err(error) if has_code(&error, 404) => break,
                Err(error) => return Err(failed(&error)),
            };
            page.iter().for_each(|one| add(kind, one, &mut named));
            next = page_after(&page);
        }
    }
    Ok(named)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contents_name_snapshots_and_groups_unless_they_are_being_deleted() {
        let mut named = HashMap::new();
        for text in [
            "{metadata: {name: one}, spec: {driver: baggageclaim.csi.concourse-ci.org}, \
             status: {snapshotHandle: a, volumeGroupSnapshotHandle: g}}",
            "{metadata: {name: two}, spec: {driver: baggageclaim.csi.concourse-ci.org, source: {snapshotHandle: b}}}",
            "{metadata: {name: three}, spec: {driver: baggageclaim.csi.concourse-ci.org, \
             source: {groupSnapshotHandles: {volumeGroupSnapshotHandle: h}}}}",
            "{metadata: {}, spec: {driver: other}, status: {snapshotHandle: c}}",
            "{metadata: {deletionTimestamp: '2026-01-01T00:00:00Z'}, spec: {driver: baggageclaim.csi.concourse-ci.org}, status: {snapshotHandle: d}}",
        ] {
            let content = serde_saphyr::from_str(text).expect("YAML");
            add("VolumeSnapshotContent", &content, &mut named);
        }
        let expected = [("a", "one"), ("b", "two"), ("g", "one"), ("h", "three")];
        let mut named: Vec<_> = named.iter().map(|(id, it)| (&**id, &*it.name)).collect();
        named.sort_unstable();
        assert_eq!(named, expected);
    }
}
