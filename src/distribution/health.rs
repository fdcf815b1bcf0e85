//! The recent errors of the tier. An error that lasts until a person changes something is told once
//! for each kind of access: in the log, and to one pod. The next success of that kind ends it.

use std::time::{SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;

use crate::engine::notice::{Notice, What};
use crate::engine::{Notices, PublishRequest};
use crate::model::{Pod, Tenant, Timestamp};
use crate::shared::{Error, Result};

/// A kind of access. A credential may permit one and not the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    Read,
    Write,
}

/// What is known of the tier.
#[derive(Debug, Default)]
pub(super) struct Health(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// By access.
    failing: [Failing; 2],
    last: Option<(Timestamp, String)>,
}

#[derive(Debug, Default)]
struct Failing {
    /// Whether the last call failed.
    now: bool,
    /// An error that lasts, and whether a pod was told.
    permanent: Option<(String, bool)>,
}

/// The wall clock.
pub(super) fn now() -> Timestamp {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    Timestamp(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}

impl Health {
    /// Notes the result of a call of the tier.
    pub(super) fn note<T>(&self, access: Access, result: &Result<T>) {
        match result {
            Ok(_) => self.succeeded(access),
            Err(
                error @ (Error::Permanent { .. } | Error::Away { .. } | Error::SlowDown { .. }),
            ) => self.failed(access, error),
            // The content of the tier is wrong; the storage works.
            Err(error @ (Error::Corrupt { .. } | Error::Missing { .. } | Error::Newer { .. })) => {
                self.0.lock().last = Some((now(), error.to_string()));
            }
            Err(
                Error::Stopped
                | Error::Layer(_)
                | Error::System(_)
                | Error::Late { .. }
                | Error::Conflict { .. }
                | Error::Leased { .. },
            ) => {}
        }
    }

    fn succeeded(&self, access: Access) {
        let mut state = self.0.lock();
        let failing = &mut state.failing[access as usize];
        if !failing.now {
            return;
        }
        *failing = Failing::default();
        drop(state);
        tracing::info!(?access, "the shared tier works again");
    }

    fn failed(&self, access: Access, error: &Error) {
        let text = error.to_string();
        let is_permanent = matches!(error, Error::Permanent { .. });
        let mut state = self.0.lock();
        state.last = Some((now(), text.clone()));
        let failing = &mut state.failing[access as usize];
        let was_failing = std::mem::replace(&mut failing.now, true);
        let is_news = is_permanent && failing.permanent.is_none();
        if is_news {
            failing.permanent = Some((text, false));
        }
        drop(state);
        if is_news {
            tracing::error!(?access, %error, "the shared tier cannot be used until a person corrects this");
        } else if !was_failing {
            tracing::warn!(?access, %error, "the shared tier failed; it is tried again");
        } else {
            tracing::debug!(?access, %error, "the shared tier still fails");
        }
    }

    /// The error that lasts, if there is one: that of reading first.
    pub(super) fn permanent(&self) -> Option<String> {
        let state = self.0.lock();
        let mut errors = state.failing.iter();
        errors.find_map(|failing| Some(failing.permanent.as_ref()?.0.clone()))
    }

    /// The last error, and when it happened.
    pub(super) fn last(&self) -> Option<(Timestamp, String)> {
        self.0.lock().last.clone()
    }

    /// Tells this pod of an error that lasts, unless a pod was told before.
    pub(super) fn tell(&self, notices: Option<&Notices>, request: &PublishRequest) {
        let Some(notices) = notices else { return };
        let mut state = self.0.lock();
        let mut untold = None;
        for failing in &mut state.failing {
            if let Some((text, told @ false)) = &mut failing.permanent {
                *told = true;
                untold = untold.or(Some(text.clone()));
            }
        }
        drop(state);
        if let Some(why) = untold {
            let what = What::SharedTierUnusable { why };
            say(Some(notices), &request.tenant, &request.pod, what);
        }
    }
}

/// Sends a notice about a pod.
pub(super) fn say(notices: Option<&Notices>, tenant: &Tenant, pod: &Pod, what: What) {
    if let Some(notices) = notices {
        notices.say(Notice {
            tenant: tenant.clone(),
            pod: pod.clone(),
            what,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn permanent() -> Result<()> {
        Err(Error::Permanent {
            object: "s3://bucket".to_owned(),
            cause: "access is denied".to_owned(),
        })
    }

    fn away() -> Result<()> {
        Err(Error::Away {
            object: "s3://bucket".to_owned(),
            cause: "no answer".to_owned(),
        })
    }

    #[test]
    fn reading_does_not_end_an_error_of_writing() {
        let health = Health::default();
        assert!(health.permanent().is_none() && health.last().is_none());
        health.note(Access::Read, &away());
        assert!(health.permanent().is_none() && health.last().is_some());
        health.note(Access::Write, &permanent());
        health.note(Access::Read, &Ok(()));
        health.note(Access::Write, &away());
        let text = health.permanent().expect("it lasts");
        assert!(text.contains("access is denied"), "{text}");
        health.note(Access::Write, &Ok(()));
        assert!(health.permanent().is_none() && health.last().is_some());
    }
}
