//! Health: whether the engine still takes operations and changes of the pool.
//! Each question is asked under the lock of the state, where the operation begins.

use super::error::{Error, Result};

/// Whether the engine closes or is degraded.
#[derive(Debug, Default)]
pub(super) struct Health {
    closing: bool,
    degraded: Option<String>,
}

impl Health {
    /// No new operations from here on.
    pub(super) fn close(&mut self) {
        self.closing = true;
    }

    pub(super) fn is_closing(&self) -> bool {
        self.closing
    }

    /// It is not known what the index has: nothing changes in the pool until the next start.
    pub(super) fn degrade(&mut self, why: String) {
        self.degraded = Some(why);
    }

    pub(super) fn is_degraded(&self) -> bool {
        self.degraded.is_some()
    }

    pub(super) fn refuse_closing(&self) -> Result<()> {
        if self.closing {
            return Err(Error::ShuttingDown);
        }
        Ok(())
    }

    pub(super) fn refuse_degraded(&self) -> Result<()> {
        let degraded = self.degraded.clone();
        degraded.map_or(Ok(()), |why| Err(Error::Degraded(why)))
    }

    /// For an operation that changes the pool.
    pub(super) fn refuse_changes(&self) -> Result<()> {
        self.refuse_closing()?;
        self.refuse_degraded()
    }
}
