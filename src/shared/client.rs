//! The client of a store, opened by its first request, and by the next one if that failed.
//!
//! A driver starts and serves pods also when its tier cannot be opened: a directory that is not
//! mounted yet, or a configuration without certificates. Each request then fails with the reason.

use std::sync::{Arc, OnceLock};

use object_store::{ObjectStore, Result};

type Open = dyn Fn() -> Result<Arc<dyn ObjectStore>> + Send + Sync;

/// A client. A clone shares it.
#[derive(Clone)]
pub(super) struct Client {
    opened: Arc<OnceLock<Arc<dyn ObjectStore>>>,
    open: Arc<Open>,
}

impl Client {
    pub(super) fn new(
        open: impl Fn() -> Result<Arc<dyn ObjectStore>> + Send + Sync + 'static,
    ) -> Self {
        Self {
            opened: Arc::default(),
            open: Arc::new(open),
        }
    }

    pub(super) fn get(&self) -> Result<&Arc<dyn ObjectStore>> {
        if let Some(objects) = self.opened.get() {
            return Ok(objects);
        }
        let objects = (self.open)()?;
        // Another request may have been faster; one store has the connections of all.
        Ok(self.opened.get_or_init(|| objects))
    }
}
