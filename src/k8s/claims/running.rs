//! The calls that run: at most one for each id (CSI specification, "Error Scheme").

use std::collections::HashSet;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::engine::{Error, Result};
use crate::model::VolumeId;

/// The ids that a call has.
#[derive(Debug, Default)]
pub(super) struct Running(Arc<Mutex<HashSet<VolumeId>>>);

/// One call's hold on an id, until it is dropped.
#[derive(Debug)]
pub(super) struct Hold {
    running: Arc<Mutex<HashSet<VolumeId>>>,
    id: VolumeId,
}

impl Running {
    /// Takes an id. `Error::Busy` if another call has it.
    pub(super) fn take(&self, id: VolumeId) -> Result<Hold> {
        if !self.0.lock().insert(id.clone()) {
            return Err(Error::Busy(id));
        }
        let running = self.0.clone();
        Ok(Hold { running, id })
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.running.lock().remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_call_for_an_id_is_refused_until_the_first_has_ended() {
        let running = Running::default();
        let id = |text: &str| -> VolumeId { text.parse().expect("an id") };
        let first = running.take(id("vol-1")).expect("free");
        let second = running.take(id("vol-1"));
        assert!(matches!(second, Err(Error::Busy(_))), "{second:?}");
        let _other = running.take(id("vol-2")).expect("another id is free");
        drop(first);
        running.take(id("vol-1")).expect("free again");
    }
}
