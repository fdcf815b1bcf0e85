//! The state of the pool, as its `Pool` shows it: whether it takes changes and new volumes.
//! Here it is found; `pool` reports it.

use std::time::Duration;

use crate::api::PoolState;
use crate::engine::claims::Capacity;
use crate::engine::{self, Engine, Status};
use crate::server::message_of;

/// How long the pool may take to accept a change. A disk that hangs must not delay the report.
const PATIENCE: Duration = Duration::from_secs(5);

/// What was found when the pool was last looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Health {
    pub(super) state: PoolState,
    /// Why it is not Ready.
    pub(super) reason: Option<String>,
    /// The room; none if the pool does not tell it.
    pub(super) capacity: Capacity,
}

/// Looks at the pool. An error says that the engine ends.
pub(super) async fn look(engine: &Engine) -> engine::Result<Health> {
    let look = async {
        // The same check as /readyz: statfs(2) succeeds on a pool that accepts no changes.
        engine.takes_writes().await?;
        Ok((engine.capacity().await?, engine.status().await?))
    };
    let why = match tokio::time::timeout(PATIENCE, look).await {
        Ok(Ok((capacity, status))) => return Ok(judge(capacity, &status)),
        Ok(Err(error @ engine::Error::ShuttingDown)) => return Err(error),
        Ok(Err(error)) => message_of(&error),
        Err(_) => format!("the pool does not answer within {PATIENCE:?}: look at its disk"),
    };
    Ok(Health {
        state: PoolState::NotReady,
        reason: Some(why),
        capacity: Capacity::default(),
    })
}

/// The state of a pool that takes changes. The reasons have no numbers that change all the time.
fn judge(capacity: Capacity, status: &Status) -> Health {
    let few_inodes = status.available_inodes < status.total_inodes.div_ceil(100);
    let reason = if capacity.lacks().is_some() {
        Some("too little can be written for new empty volumes: delete claims or their content")
    } else if few_inodes {
        Some("less than 1 % of the inodes are left: delete claims or files in them")
    } else {
        None
    };
    Health {
        state: if reason.is_some() {
            PoolState::Full
        } else {
            PoolState::Ready
        },
        reason: reason.map(str::to_owned),
        capacity,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::BackendKind;

    #[test]
    fn a_pool_is_full_when_it_refuses_empty_volumes_or_has_no_inodes() {
        let state = |available: u64, (inodes, of_inodes): (u64, u64)| {
            let status = Status {
                pool: "/pool".into(),
                pool_id: "0".repeat(32),
                backend: BackendKind::Overlay,
                reason: String::new(),
                total_bytes: 1600,
                available_bytes: available,
                total_inodes: of_inodes,
                available_inodes: inodes,
                volumes: 0,
                artifacts: 0,
                caches: 0,
                seals_pending: 0,
                damaged: 0,
            };
            let capacity = Capacity {
                available,
                largest: 1600,
            };
            let found = judge(capacity, &status);
            assert_eq!(found.reason.is_some(), found.state != PoolState::Ready);
            found.state
        };
        assert_eq!(state(100, (500, 1000)), PoolState::Ready);
        assert_eq!(state(99, (500, 1000)), PoolState::Full);
        assert_eq!(state(100, (10, 1000)), PoolState::Ready);
        assert_eq!(state(100, (9, 1000)), PoolState::Full);
        // Btrfs counts no inodes.
        assert_eq!(state(100, (0, 0)), PoolState::Ready);
    }
}
