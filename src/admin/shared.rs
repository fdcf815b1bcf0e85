//! The shared tier in the answers of the admin service: waiting uploads, running transfers, errors.
//! Also the number that an import or a rollback follows, and `destroy`, which clears a name in the
//! tier before it deletes the content on this node.

use tonic::{Code, Status};

use super::service::{failed, reference_of, time};
use crate::distribution::{self, Distribution, Moving, WaitingVolume};
use crate::engine::{self, ContentSource, Engine};
use crate::model::{Name, Origin, Reference, Sharing, Tenant};
use crate::proto::admin::v1 as admin;

/// The state of a volume that waits for content of a peer or the tier; programs read it.
const FETCHING: &str = "fetching";

/// The word for an artifact's place in the tier, or for its damage; programs read it.
pub(super) fn word(sharing: Sharing, is_too_large: bool) -> &'static str {
    if sharing.damaged {
        "damaged"
    } else if sharing.number.is_some() {
        "yes"
    } else if sharing.never {
        "never"
    } else if sharing.refused {
        "refused"
    } else if is_too_large {
        "too-large"
    } else {
        "waiting"
    }
}

pub(super) fn status(status: distribution::Status) -> admin::SharedTier {
    let (at, last_error) = status.last_error.unzip();
    admin::SharedTier {
        url: status.url,
        permanent_error: status.permanent_error.unwrap_or_default(),
        last_error: last_error.unwrap_or_default(),
        last_error_unix_ms: at.map(time),
        uploads_waiting: status.uploads_waiting,
        bytes_waiting: status.bytes_waiting,
        uploads_without_space: status.uploads_without_space,
        uploading: status.uploading.map(moving),
        fetching: status.fetching.into_iter().map(moving).collect(),
    }
}

fn moving(moving: Moving) -> admin::Moving {
    admin::Moving {
        tenant: moving.tenant.into(),
        reference: moving.reference.to_string(),
        bytes: moving.bytes,
        of: moving.of,
        from: moving.from.unwrap_or_default(),
        since_unix_ms: time(moving.since),
    }
}

/// The counters of peers, if there are some.
pub(super) fn peers(metrics: &distribution::Metrics) -> Option<admin::Peers> {
    let figures = metrics.peers?;
    let fetched = metrics.fetches.from(ContentSource::Peer);
    Some(admin::Peers {
        peers: figures.peers,
        questions: figures.questions,
        questions_failed: figures.questions_failed,
        fetches: fetched.artifacts,
        fetched_bytes: fetched.bytes,
        received_bytes: figures.received_bytes,
        offered: figures.offered,
        sent_bytes: figures.sent_bytes,
        refused: figures.refused,
        damaged: figures.damaged,
        located: figures.located,
        catalog: figures.connected,
    })
}

/// Adds the volumes that the engine does not know yet, since their content is not here.
pub(super) fn add_waiting(
    distribution: &Distribution,
    tenant: Option<&Tenant>,
    volumes: &mut Vec<admin::Volume>,
) {
    let waiting = distribution.waiting().list(tenant);
    if waiting.is_empty() {
        return;
    }
    let fetching = distribution.fetching();
    for volume in waiting {
        if volumes.iter().all(|row| row.id != volume.id.as_str()) {
            volumes.push(waiting_row(volume, &fetching));
        }
    }
    volumes.sort_by(|a, b| (&a.tenant, &a.id).cmp(&(&b.tenant, &b.id)));
}

fn waiting_row(volume: WaitingVolume, fetching: &[Moving]) -> admin::Volume {
    let reference = reference_of(&volume.spec.kind);
    // It may be the content of a restore key.
    let wanted = volume.spec.kind.starts_from();
    let fetch = fetching.iter().find(|fetch| {
        let is_it = |origin: &Origin| origin.may_be(&fetch.reference);
        fetch.tenant == volume.tenant && wanted.iter().any(is_it)
    });
    admin::Volume {
        id: volume.id.into(),
        tenant: volume.tenant.into(),
        pod_name: volume.pod.name,
        pod_uid: volume.pod.uid.to_string(),
        r#type: volume.spec.kind.type_name().to_owned(),
        fetch: fetch.cloned().map(moving),
        reference,
        state: FETCHING.to_owned(),
        read_only: volume.read_only,
        created_unix_ms: time(volume.since),
        size_limit: volume.spec.size_limit,
        ..admin::Volume::default()
    }
}

/// The number of a name in the tier, which content follows that gets the name now.
pub(super) async fn base(
    distribution: Option<&Distribution>,
    tenant: &Tenant,
    reference: &Reference,
) -> Result<Option<u64>, Status> {
    let Some(distribution) = distribution else {
        return Ok(None);
    };
    let base = distribution.base(tenant, reference).await;
    base.map_err(|why| {
        Status::unavailable(format!(
            "{reference} of namespace {tenant} is not changed: the shared tier does not tell \
             whether the name was cleared ({why}); try again when it does"
        ))
    })
}

/// Clears a name in the tier, and deletes its content on this node. In this order: otherwise a pod
/// that starts in between would fetch the content again.
pub(super) async fn destroy(
    engine: &Engine,
    distribution: &Distribution,
    tenant: &Tenant,
    reference: &Reference,
) -> Result<(), Status> {
    // A name that no node ever committed is a mistake of the caller.
    let is_here = engine.local(tenant, reference).is_some();
    if !is_here && distribution.base(tenant, reference).await == Ok(Some(0)) {
        let name = Name {
            tenant: tenant.clone(),
            reference: reference.clone(),
        };
        return Err(failed(&engine::Error::NoSuchName(name)));
    }
    // The engine would refuse it after the tier has forgotten the name.
    let forks = engine
        .artifacts(Some(tenant))
        .into_iter()
        .find(|row| row.name.as_ref() == Some(reference))
        .map_or(0, |row| row.in_use_by);
    let is_refused = forks > 0 && reference.cache().is_none();
    if !is_refused {
        let cleared = distribution.clear(tenant, reference).await;
        cleared.map_err(|error| {
            let code = if error.is_temporary() {
                Code::Unavailable
            } else {
                Code::FailedPrecondition
            };
            let what = format!("{reference} is not cleared in the shared tier, and not deleted");
            Status::new(code, format!("{what}: {error}"))
        })?;
    }
    match engine.destroy(tenant, reference).await {
        // The tier alone had it.
        Err(engine::Error::NoSuchName(_)) if !is_refused => Ok(()),
        done => done.map_err(|error| failed(&error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Pod, Timestamp, VolumeSpec};

    #[test]
    fn a_volume_that_waits_shows_the_fetch_of_its_restore_key_and_where_it_comes_from() {
        let attributes = [
            ("type", "task-cache"),
            ("key", "pr-7"),
            ("restoreKeys", "old-*, main"),
        ];
        let attributes = attributes.map(|(key, value)| (key.to_owned(), value.to_owned()));
        let tenant: Tenant = "ci".parse().expect("a tenant");
        let volume = WaitingVolume {
            id: "csi-1".parse().expect("an id"),
            tenant: tenant.clone(),
            pod: Pod {
                uid: "uid".parse().expect("a uid"),
                name: "pod".to_owned(),
                service_account: None,
            },
            spec: VolumeSpec::parse(&attributes.into()).expect("attributes"),
            read_only: false,
            since: Timestamp(1),
        };
        let of = |reference: &str| Moving {
            tenant: tenant.clone(),
            reference: reference.parse().expect("a reference"),
            bytes: 1,
            of: 2,
            from: Some("peer node-2".to_owned()),
            since: Timestamp(1),
        };
        let row = waiting_row(
            volume.clone(),
            &[of("task-cache/other"), of("task-cache/main")],
        );
        assert_eq!(
            (&*row.reference, &*row.state),
            ("task-cache/pr-7", "fetching")
        );
        let fetch = row.fetch.expect("its fetch is shown");
        assert_eq!(
            (&*fetch.reference, &*fetch.from),
            ("task-cache/main", "peer node-2")
        );
        let row = waiting_row(volume.clone(), &[of("task-cache/old-9")]);
        let fetch = row.fetch.expect("that of a key that begins so, too");
        assert_eq!(&*fetch.reference, "task-cache/old-9");
        assert_eq!(
            waiting_row(volume, &[of("task-cache/other")]).fetch,
            None,
            "another volume's"
        );
    }

    #[test]
    fn the_word_says_whether_other_nodes_can_have_it() {
        let waiting = Sharing::default();
        assert_eq!(word(waiting, false), "waiting");
        assert_eq!(word(waiting, true), "too-large");
        let refused = Sharing {
            refused: true,
            ..waiting
        };
        assert_eq!(word(refused, true), "refused");
        let never = Sharing {
            never: true,
            ..waiting
        };
        assert_eq!(word(never, true), "never");
        let number = Some(7);
        assert_eq!(word(Sharing { number, ..waiting }, true), "yes");
        let damaged = Sharing {
            number,
            damaged: true,
            ..waiting
        };
        assert_eq!(word(damaged, true), "damaged");
    }
}
