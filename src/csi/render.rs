//! Converts the model to messages: volumes, snapshots, groups and figures.
//! Makes no decisions.

use std::collections::BTreeMap;

use super::topology;
use crate::engine::VolumeStats;
use crate::engine::claims::Group;
use crate::model::{ClaimSource, Node, PersistentVolume, Placed, Snapshot, Timestamp};
use crate::proto::csi::v1 as csi;
use csi::volume_content_source::{SnapshotSource, Type, VolumeSource};
use csi::volume_usage::Unit;

/// A number as int64, which must not be negative.
pub(super) fn number(n: u64) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

/// A persistent volume. Its id is enough, so it has no context.
pub(super) fn volume(placed: &Placed<PersistentVolume>) -> csi::Volume {
    let claim = &placed.what;
    csi::Volume {
        capacity_bytes: number(claim.capacity),
        volume_id: claim.id.to_string(),
        volume_context: BTreeMap::new(),
        content_source: claim.source.as_ref().map(content_source),
        accessible_topology: vec![topology::message(&placed.node)],
    }
}

fn content_source(source: &ClaimSource) -> csi::VolumeContentSource {
    let kind = match source {
        ClaimSource::Snapshot(id) => Type::Snapshot(SnapshotSource {
            snapshot_id: id.to_string(),
        }),
        ClaimSource::Claim(id) => Type::Volume(VolumeSource {
            volume_id: id.to_string(),
        }),
    };
    csi::VolumeContentSource { r#type: Some(kind) }
}

/// A snapshot, ready as soon as it exists. `node`: its node, if the caller gets it.
pub(super) fn snapshot(snapshot: &Snapshot, node: Option<&Node>) -> csi::Snapshot {
    csi::Snapshot {
        size_bytes: number(snapshot.size),
        snapshot_id: snapshot.id.to_string(),
        source_volume_id: snapshot.source.to_string(),
        creation_time: Some(timestamp(snapshot.created)),
        ready_to_use: true,
        group_snapshot_id: snapshot
            .group
            .as_ref()
            .map(ToString::to_string)
            .unwrap_or_default(),
        accessible_topology: node.map(topology::message).into_iter().collect(),
    }
}

/// A group and its snapshots.
pub(super) fn group((group, snapshots): &Group, node: Option<&Node>) -> csi::VolumeGroupSnapshot {
    csi::VolumeGroupSnapshot {
        group_snapshot_id: group.id.to_string(),
        snapshots: snapshots.iter().map(|one| snapshot(one, node)).collect(),
        creation_time: Some(timestamp(group.created)),
        ready_to_use: true,
    }
}

fn timestamp(time: Timestamp) -> prost_types::Timestamp {
    let Timestamp(millis) = time;
    prost_types::Timestamp {
        seconds: number(millis / 1000),
        // Less than 10⁹, so it fits.
        nanos: i32::try_from(millis % 1000 * 1_000_000).unwrap_or_default(),
    }
}

/// Bytes and inodes. `used` is the volume's own space, or 0 before its first measurement. The
/// pool's usage would be counted once per volume. So `total` minus `used` is more than `available`
/// in a shared pool.
pub(super) fn stats(stats: &VolumeStats) -> csi::NodeGetVolumeStatsResponse {
    let used = stats.usage.unwrap_or_default();
    let mut usage = vec![csi::VolumeUsage {
        unit: Unit::Bytes.into(),
        total: number(stats.total_bytes),
        available: number(stats.available_bytes),
        used: number(used.bytes),
    }];
    // A filesystem without a fixed number of inodes has no total, and the field is required.
    if stats.total_inodes > 0 {
        usage.push(csi::VolumeUsage {
            unit: Unit::Inodes.into(),
            total: number(stats.total_inodes),
            available: number(stats.available_inodes),
            used: number(used.files.saturating_add(used.directories)),
        });
    }
    csi::NodeGetVolumeStatsResponse { usage }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::{BackendKind, Usage};
    use crate::csi::controller::tests::fake::Fake;
    use crate::model::NodeId;

    #[test]
    fn stats_are_in_bytes_and_inodes_and_never_negative() {
        let mut stats = VolumeStats {
            usage: Some(Usage {
                bytes: 10,
                files: 3,
                directories: 2,
            }),
            total_bytes: u64::MAX,
            available_bytes: 90,
            total_inodes: 100,
            available_inodes: 95,
        };
        let usage = super::stats(&stats).usage;
        let seen: Vec<_> = usage
            .iter()
            .map(|u| (u.unit(), u.total, u.available, u.used))
            .collect();
        assert_eq!(
            seen,
            [(Unit::Bytes, i64::MAX, 90, 10), (Unit::Inodes, 100, 95, 5)]
        );
        stats.total_inodes = 0;
        stats.usage = None;
        let usage = super::stats(&stats).usage;
        assert_eq!((usage.len(), usage[0].used), (1, 0));
    }

    fn here() -> Node {
        topology::node(&NodeId::new("node-1").expect("an id"), BackendKind::Copy)
    }

    #[test]
    fn a_snapshot_tells_its_moment_and_where_it_is_only_to_who_asks_for_it() {
        let mut one = Fake::a_snapshot("s");
        one.created = Timestamp(1_700_000_000_123);
        let message = snapshot(&one, None);
        let time = message.creation_time.expect("required");
        assert_eq!((time.seconds, time.nanos), (1_700_000_000, 123_000_000));
        assert!(message.ready_to_use && message.accessible_topology.is_empty());
        assert_eq!(message.group_snapshot_id, "");
        one.group = Some("group-1".parse().expect("an id"));
        let message = snapshot(&one, Some(&here()));
        assert_eq!(message.accessible_topology, [topology::message(&here())]);
        assert_eq!(message.group_snapshot_id, "group-1");
    }

    #[test]
    fn a_claim_tells_its_source_and_its_place() {
        let mut claim = Placed {
            what: Fake::a_claim("c"),
            node: here().into(),
        };
        let message = volume(&claim);
        assert_eq!(message.content_source, None);
        assert_eq!(message.accessible_topology, [topology::message(&here())]);
        claim.what.source = Some(ClaimSource::Snapshot("snap-1".parse().expect("an id")));
        let source = volume(&claim)
            .content_source
            .and_then(|source| source.r#type);
        assert_eq!(
            source,
            Some(Type::Snapshot(SnapshotSource {
                snapshot_id: "snap-1".into()
            }))
        );
        claim.what.source = Some(ClaimSource::Claim("vol-1".parse().expect("an id")));
        let source = volume(&claim)
            .content_source
            .and_then(|source| source.r#type);
        assert_eq!(
            source,
            Some(Type::Volume(VolumeSource {
                volume_id: "vol-1".into()
            }))
        );
    }
}
