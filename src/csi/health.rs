//! Health, alpha in CSI 1.13: converts problems of volumes and of the pool to messages. No entry
//! means that no problem is known.

use std::time::Duration;

use crate::engine::claims::ClaimUse;
use crate::engine::{Status, VolumeRow};
use crate::proto::csi::v1 as csi;
use csi::node_get_storage_health_response::StorageBackendHealth;
use csi::volume_health::VolumeHealthEntry;
use csi::{StorageHealthErrorType, VolumeHealthErrorType};

/// How long the pool may take to accept a change. A disk that hangs must not delay the answer.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);

/// The health of a persistent volume.
pub(super) fn of_claim(id: &str, used: &ClaimUse) -> csi::VolumeHealth {
    let entry = |problem: &String| VolumeHealthEntry {
        status: VolumeHealthErrorType::Degraded.into(),
        reason: "NotWhole".to_owned(),
        message: problem.clone(),
    };
    csi::VolumeHealth {
        volume_id: id.to_owned(),
        health_statuses: used.problems.iter().map(entry).collect(),
    }
}

/// The health of an inline volume: its size limit may not be enforced.
pub(super) fn of_volume(row: &VolumeRow) -> csi::VolumeHealth {
    let entry = |why: &String| VolumeHealthEntry {
        status: VolumeHealthErrorType::Degraded.into(),
        reason: "LimitNotEnforced".to_owned(),
        message: format!("the volume's size limit is not enforced: {why}"),
    };
    csi::VolumeHealth {
        volume_id: row.id.to_string(),
        health_statuses: row.limit_unenforced.iter().map(entry).collect(),
    }
}

/// The health of the pool, or why it cannot be used.
pub(super) fn of_pool(status: &Result<Status, String>) -> Vec<StorageBackendHealth> {
    let entry =
        |status: StorageHealthErrorType, reason: &str, message: String| StorageBackendHealth {
            status: status.into(),
            reason: reason.to_owned(),
            message,
            // All kinds of volumes are in the one pool.
            volume_capability: None,
        };
    let status = match status {
        Ok(status) => status,
        Err(why) => {
            let kind = StorageHealthErrorType::StorageUnreachable;
            return vec![entry(kind, "PoolTakesNoChanges", why.clone())];
        }
    };
    let full = |available: u64, total: u64| total > 0 && available < total.div_ceil(100);
    let degraded = StorageHealthErrorType::StorageDegraded;
    let mut entries = Vec::new();
    for (reason, what, available, total) in [
        (
            "PoolFull",
            "bytes",
            status.available_bytes,
            status.total_bytes,
        ),
        (
            "PoolOutOfInodes",
            "inodes",
            status.available_inodes,
            status.total_inodes,
        ),
    ] {
        if full(available, total) {
            let message = format!(
                "{available} of the {total} {what} of {} are left",
                status.pool.display()
            );
            entries.push(entry(degraded, reason, message));
        }
    }
    entries
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::BackendKind;

    fn status(available_bytes: u64, available_inodes: u64) -> Status {
        Status {
            pool: "/pool".into(),
            pool_id: "0".repeat(32),
            backend: BackendKind::Overlay,
            reason: String::new(),
            total_bytes: 1000,
            available_bytes,
            total_inodes: 1000,
            available_inodes,
            volumes: 0,
            artifacts: 0,
            caches: 0,
            seals_pending: 0,
            damaged: 0,
        }
    }

    #[test]
    fn a_claim_without_problems_has_no_entry() {
        let mut used = ClaimUse::default();
        let health = of_claim("vol-1", &used);
        assert_eq!(
            (health.volume_id.as_str(), health.health_statuses.len()),
            ("vol-1", 0)
        );
        used.problems = vec!["a layer is missing".into()];
        let health = of_claim("vol-1", &used);
        assert_eq!(health.health_statuses[0].message, "a layer is missing");
    }

    #[test]
    fn a_full_pool_is_degraded_and_one_that_takes_no_changes_unreachable() {
        let reasons = |status: Result<Status, String>| -> Vec<(i32, String)> {
            let entries = of_pool(&status).into_iter();
            entries.map(|entry| (entry.status, entry.reason)).collect()
        };
        assert_eq!(reasons(Ok(status(500, 500))), []);
        let degraded = i32::from(StorageHealthErrorType::StorageDegraded);
        let unreachable = i32::from(StorageHealthErrorType::StorageUnreachable);
        assert_eq!(
            reasons(Ok(status(9, 0))),
            [
                (degraded, "PoolFull".to_owned()),
                (degraded, "PoolOutOfInodes".to_owned())
            ]
        );
        let mut without_inodes = status(500, 0);
        without_inodes.total_inodes = 0;
        assert_eq!(reasons(Ok(without_inodes)), []);
        assert_eq!(
            reasons(Err("broken".into())),
            [(unreachable, "PoolTakesNoChanges".to_owned())]
        );
    }
}
