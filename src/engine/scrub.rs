//! Scrub: runs `fsck` periodically in the background, and reports findings in the log and in a
//! metric.
//!
//! It runs on the thread for walks, where measuring waits for it. So it runs seldom, and ends at
//! once when the engine does.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use super::error::{Error, Result};
use super::shared::Config;
use super::shared::Inner;
use super::threads::Pool;
use super::types::Finding;
use super::{fsck, reap};

/// How many findings are logged at a time; an emptied pool has one for each layer.
const MOST_TOLD: usize = 100;

/// Compares some minutes after the start, when leftovers are cleaned up, and then seldom.
pub(super) async fn watch_loop(inner: Arc<Inner>) {
    let mut told = HashSet::new();
    let mut wait = inner.config.first_check;
    loop {
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            () = inner.lifetime.stopping() => return,
        }
        let looked = look(&inner).await;
        wait = until_next(&inner.config, &looked);
        match looked {
            Ok(found) => {
                tell(&told, &found);
                inner.counters().found(found.len());
                told = found;
            }
            Err(Error::ShuttingDown) => return,
            Err(error) => {
                tracing::warn!(%error,
                    "the index could not be compared with the directories; retrying later");
            }
        }
    }
}

/// How long until the next look.
fn until_next(config: &Config, looked: &Result<HashSet<Finding>>) -> Duration {
    match looked {
        Ok(found) if found.is_empty() => config.check_interval,
        // After a repair the operator wants a good result soon. A failed comparison says nothing.
        _ => config.check_interval.min(config.first_check),
    }
}

/// Compares twice, with a round of the collector in between.
async fn look(inner: &Arc<Inner>) -> Result<HashSet<Finding>> {
    let found = compare(inner, async || {
        // What else failed in it is the collector's to tell, and it went on after that.
        match reap::reap(inner).await {
            Err(Error::ShuttingDown) => Err(Error::ShuttingDown),
            _ => Ok(()),
        }
    });
    Ok(found.await?.into_iter().collect())
}

/// Compares twice.
pub(super) async fn check(inner: &Arc<Inner>) -> Result<Vec<Finding>> {
    compare(inner, async || Ok(())).await
}

/// Returns the findings that two comparisons have in common. Volumes change between the looks at
/// memory, the mount table and the disk. A finding from such a change is in one comparison only.
async fn compare(
    inner: &Arc<Inner>,
    between: impl AsyncFnOnce() -> Result<()>,
) -> Result<Vec<Finding>> {
    let once = || inner.run(Pool::Walks, |inner| fsck::check(inner));
    let mut found = once().await?;
    if !found.is_empty() {
        between().await?;
        // An emptied pool has a finding for each layer.
        let again: HashSet<Finding> = once().await?.into_iter().collect();
        found.retain(|finding| again.contains(finding));
    }
    Ok(found)
}

/// Says each finding that is new once. One that went and comes back is new.
fn tell(told: &HashSet<Finding>, found: &HashSet<Finding>) {
    let mut new: Vec<&Finding> = found.difference(told).collect();
    new.sort_by(|a, b| (&a.path, a.kind).cmp(&(&b.path, b.kind)));
    for finding in new.iter().take(MOST_TOLD) {
        tracing::warn!(
            kind = finding.kind,
            path = %finding.path.display(),
            detail = finding.detail,
            "index and directories disagree"
        );
    }
    if let Some(more @ 1..) = new.len().checked_sub(MOST_TOLD) {
        tracing::warn!(
            more,
            "index and directories disagree in more places: `baggageclaim check` lists all"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_all_is_not_known_to_be_well_the_next_look_comes_soon() {
        let config = Config::new("pool");
        let finding = Finding {
            kind: "empty-layer",
            path: "layers/1".into(),
            detail: String::new(),
        };
        for (looked, wait) in [
            (Ok(HashSet::new()), config.check_interval),
            (Ok(HashSet::from([finding])), config.first_check),
            (Err(Error::WritebackFailed), config.first_check),
        ] {
            assert_eq!(until_next(&config, &looked), wait, "{looked:?}");
        }
        let often = Config {
            check_interval: Duration::from_millis(1),
            ..config
        };
        assert_eq!(
            until_next(&often, &Err(Error::WritebackFailed)),
            often.check_interval
        );
    }
}
