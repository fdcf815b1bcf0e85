//! The recent errors of the tier. An error that lasts until a person changes something is kept by
//! tenant, since a credential may be valid for some prefixes only. The log has it once for each
//! tenant and kind of access, and one pod of the tenant is told. The next success of that kind ends
//! it. A full storage ends for all tenants with the first write of any.

use std::collections::BTreeMap;

use parking_lot::Mutex;

use crate::engine::notice::{Notice, What};
use crate::engine::{Notices, PublishRequest};
use crate::model::{Pod, Tenant, Timestamp};
use crate::shared::{Error, Result, now};

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
    /// By access: whether the last call of any tenant failed.
    failing: [bool; 2],
    /// The tenants that have an error that lasts.
    tenants: BTreeMap<Tenant, Part>,
    /// Whether an error that lasts began after the last success of any tenant. A full storage is
    /// none: reading works.
    is_unusable: bool,
    last: Option<(Timestamp, String)>,
}

/// The part of one tenant.
#[derive(Debug, Default)]
struct Part {
    /// By access: the error that lasts.
    permanent: [Option<Lasting>; 2],
    /// Whether a pod was told.
    told: bool,
}

/// An error that lasts.
#[derive(Debug, Clone)]
struct Lasting {
    text: String,
    /// The storage is full. Reading works.
    is_full: bool,
}

impl Part {
    /// That of reading first.
    fn error(&self) -> Option<&Lasting> {
        self.permanent.iter().flatten().next()
    }
}

impl Health {
    /// Notes the result of a call for a tenant.
    pub(super) fn note<T>(&self, tenant: &Tenant, access: Access, result: &Result<T>) {
        match result {
            Ok(_) => self.succeeded(tenant, access),
            Err(
                error @ (Error::Permanent { .. }
                | Error::Full { .. }
                | Error::Away { .. }
                | Error::Stalled { .. }
                | Error::SlowDown { .. }),
            ) => self.failed(tenant, access, error),
            // The content of the tier is wrong; the storage works.
            Err(error @ (Error::Corrupt { .. } | Error::Missing { .. } | Error::Newer { .. })) => {
                self.0.lock().last = Some((now(), error.to_string()));
            }
            Err(
                Error::Stopped
                | Error::Layer(_)
                | Error::System(_)
                | Error::Late { .. }
                | Error::TooSlow { .. }
                | Error::Conflict { .. }
                | Error::Deleting { .. }
                | Error::Leased { .. },
            ) => {}
        }
    }

    fn succeeded(&self, tenant: &Tenant, access: Access) {
        let mut state = self.0.lock();
        state.is_unusable = false;
        let mut was_permanent = false;
        state.tenants.retain(|of, part| {
            let error = &mut part.permanent[access as usize];
            // A storage that takes something is not full for the others, either. They may have
            // nothing to upload any more.
            if of == tenant || error.as_ref().is_some_and(|it| it.is_full) {
                was_permanent |= error.take().is_some();
            }
            part.error().is_some()
        });
        let was_failing = std::mem::take(&mut state.failing[access as usize]);
        drop(state);
        if was_permanent || was_failing {
            tracing::info!(%tenant, ?access, "the shared tier works again");
        }
    }

    fn failed(&self, tenant: &Tenant, access: Access, error: &Error) {
        let text = error.to_string();
        let mut state = self.0.lock();
        state.last = Some((now(), text.clone()));
        let was_failing = std::mem::replace(&mut state.failing[access as usize], true);
        let mut is_news = false;
        let is_full = matches!(error, Error::Full { .. });
        if is_full || matches!(error, Error::Permanent { .. }) {
            let part = state.tenants.entry(tenant.clone()).or_default();
            let permanent = &mut part.permanent[access as usize];
            is_news = permanent.is_none();
            permanent.get_or_insert(Lasting { text, is_full });
            state.is_unusable |= is_news && !is_full;
        }
        drop(state);
        if is_news {
            tracing::error!(
                %tenant, ?access, %error,
                "the shared tier cannot be used until a person corrects this"
            );
        } else if !was_failing {
            tracing::warn!(%tenant, ?access, %error, "the shared tier failed; retrying");
        } else {
            tracing::debug!(%tenant, ?access, %error, "the shared tier still fails");
        }
    }

    /// An error that lasts, of the first tenant that has one.
    pub(super) fn permanent(&self) -> Option<String> {
        let state = self.0.lock();
        let error = state.tenants.values().find_map(Part::error);
        error.map(|it| it.text.clone())
    }

    /// Whether this tenant has an error that lasts. A full storage is none: reading works.
    pub(super) fn permanent_of(&self, tenant: &Tenant) -> bool {
        let state = self.0.lock();
        let part = state.tenants.get(tenant);
        let mut errors = part
            .into_iter()
            .flat_map(|part| part.permanent.iter().flatten());
        errors.any(|it| !it.is_full)
    }

    /// Whether there is an error that lasts, and no call of any tenant succeeded since it began. A
    /// full storage is none.
    pub(super) fn is_unusable(&self) -> bool {
        self.0.lock().is_unusable
    }

    /// The last error, and when it happened.
    pub(super) fn last(&self) -> Option<(Timestamp, String)> {
        self.0.lock().last.clone()
    }

    /// Tells this pod of an error that lasts, unless a pod of its tenant was told before.
    pub(super) fn tell(&self, notices: Option<&Notices>, request: &PublishRequest) {
        let mut state = self.0.lock();
        let Some(part) = state.tenants.get_mut(&request.tenant) else {
            return;
        };
        let error = part.error().filter(|_| !part.told).cloned();
        part.told |= error.is_some();
        drop(state);
        if let Some(Lasting {
            text: why, is_full, ..
        }) = error
        {
            let what = if is_full {
                What::SharedTierFull { why }
            } else {
                What::SharedTierUnusable { why }
            };
            say(notices, &request.tenant, &request.pod, what);
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

    fn tenant(name: &str) -> Tenant {
        name.parse().expect("a label")
    }

    #[test]
    fn reading_does_not_end_an_error_of_writing() {
        let (health, ci) = (Health::default(), tenant("ci"));
        assert!(health.permanent().is_none() && health.last().is_none());
        health.note(&ci, Access::Read, &away());
        assert!(health.permanent().is_none() && health.last().is_some());
        health.note(&ci, Access::Write, &permanent());
        health.note(&ci, Access::Read, &Ok(()));
        health.note(&ci, Access::Write, &away());
        let text = health.permanent().expect("it lasts");
        assert!(text.contains("access is denied"), "{text}");
        health.note(&ci, Access::Write, &Ok(()));
        assert!(health.permanent().is_none() && health.last().is_some());
    }

    #[test]
    fn an_error_of_one_prefix_is_not_one_of_the_whole_tier() {
        let (health, ci, other) = (Health::default(), tenant("ci"), tenant("other"));
        assert!(!health.is_unusable());
        health.note(&other, Access::Read, &permanent());
        assert!(health.is_unusable(), "no part of it is known to work");
        health.note(&ci, Access::Read, &Ok(()));
        assert!(!health.is_unusable() && health.permanent().is_some());
        assert!(health.permanent_of(&other) && !health.permanent_of(&ci));
        health.note(&ci, Access::Write, &permanent());
        assert!(health.is_unusable());
        health.note(&ci, Access::Write, &Ok(()));
        assert!(health.permanent_of(&other) && !health.permanent_of(&ci));
    }

    #[test]
    fn a_full_storage_lasts_until_a_write_of_any_tenant_succeeds_and_can_be_read() {
        let (health, ci, other) = (Health::default(), tenant("ci"), tenant("other"));
        let full: Result<()> = Err(Error::Full {
            object: "x".to_owned(),
            cause: "status 507".to_owned(),
        });
        health.note(&ci, Access::Write, &full);
        health.note(&ci, Access::Read, &Ok(()));
        let text = health.permanent().expect("it lasts");
        assert!(text.contains("the shared tier is full"), "{text}");
        assert!(!health.is_unusable() && !health.permanent_of(&ci));
        health.note(&other, Access::Write, &full);
        health.note(&other, Access::Read, &Ok(()));
        assert_eq!(health.permanent(), Some(text));
        health.note(&other, Access::Write, &Ok(()));
        assert_eq!(health.permanent(), None);
        // That it has space says nothing about permissions.
        health.note(&ci, Access::Write, &permanent());
        health.note(&other, Access::Write, &Ok(()));
        assert!(health.permanent().is_some());
    }
}
