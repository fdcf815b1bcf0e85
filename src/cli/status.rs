//! The answer of the verb `status`: the pool, what is in it, the shared tier, and the peers.
//! For people as lines, for programs as data.

use std::io::{self, Write};

use serde_json::{Value, json};

use super::human::bytes;
use super::rows::{moving, percent, time};
use super::show::{data, lines};
use crate::config::PlainOutput;
use crate::proto::admin::v1 as admin;
use crate::sys::printable;

pub(super) fn show(
    to: &mut impl Write,
    status: &admin::StatusResponse,
    output: PlainOutput,
) -> io::Result<()> {
    if let Some(form) = output.data() {
        let mut fields = json!({
            "version": status.version,
            "pool": status.pool_path,
            "poolId": status.pool_id,
            "backend": status.backend,
            "reason": status.backend_reason,
            "totalBytes": status.total_bytes,
            "availableBytes": status.available_bytes,
            "totalInodes": status.total_inodes,
            "availableInodes": status.available_inodes,
            "volumes": status.volumes,
            "artifacts": status.artifacts,
            "caches": status.caches,
            "sealsPending": status.seals_pending,
            "damaged": status.damaged,
            "shared": status.shared.as_ref().map(shared),
        });
        if let Some(counts) = &status.peers {
            fields["peers"] = json!(counts);
        }
        return data(to, &fields, form);
    }
    let inodes = if status.total_inodes == 0 {
        "made as needed".to_owned()
    } else {
        format!(
            "{} of {} free",
            status.available_inodes, status.total_inodes
        )
    };
    let damaged = match status.damaged {
        0 => "none".to_owned(),
        many => format!("{many} that may be in use: baggageclaim check"),
    };
    let mut rows = vec![
        ("pool", printable(&status.pool_path)),
        ("pool id", status.pool_id.clone()),
        ("driver", format!("baggageclaim {}", status.version)),
        ("backend", status.backend.clone()),
        ("reason", printable(&status.backend_reason)),
        (
            "space",
            format!(
                "{} of {} free",
                bytes(status.available_bytes),
                bytes(status.total_bytes)
            ),
        ),
        ("inodes", inodes),
        ("volumes", status.volumes.to_string()),
        ("artifacts", status.artifacts.to_string()),
        ("caches", status.caches.to_string()),
        ("seals pending", status.seals_pending.to_string()),
        ("damaged", damaged),
    ];
    if let Some(tier) = &status.shared {
        rows.extend(shared_lines(tier));
    }
    if let Some(counts) = &status.peers {
        rows.extend(peers_lines(counts));
    }
    lines(to, &rows)
}

/// The peers for people: since the start, and only what there is.
fn peers_lines(peers: &admin::Peers) -> Vec<(&'static str, String)> {
    let mut rows = vec![
        ("peers", peers.peers.to_string()),
        (
            "from peers",
            format!(
                "{} artifacts, {} ({} received over the network)",
                peers.fetches,
                bytes(peers.fetched_bytes),
                bytes(peers.received_bytes)
            ),
        ),
        ("to peers", bytes(peers.sent_bytes)),
    ];
    for (what, count) in [
        ("located", peers.located),
        ("unanswered", peers.questions_failed),
        ("refused", peers.refused),
        ("damage found", peers.damaged),
    ] {
        if count > 0 {
            rows.push((what, count.to_string()));
        }
    }
    rows
}

/// The shared tier for programs.
fn shared(tier: &admin::SharedTier) -> Value {
    let text = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    json!({
        "url": tier.url,
        "permanentError": text(&tier.permanent_error),
        "lastError": text(&tier.last_error),
        "lastErrorAt": tier.last_error_unix_ms.map(time),
        "uploadsWaiting": tier.uploads_waiting,
        "bytesWaiting": tier.bytes_waiting,
        "uploadsWithoutSpace": tier.uploads_without_space,
        "uploading": tier.uploading.as_ref().map(moving),
        "fetching": tier.fetching.iter().map(moving).collect::<Vec<_>>(),
    })
}

/// The shared tier for people: errors first, and only what there is.
fn shared_lines(tier: &admin::SharedTier) -> Vec<(&'static str, String)> {
    let moves = |row: &admin::Moving| {
        let (reference, tenant) = (printable(&row.reference), &row.tenant);
        let (of, done) = (bytes(row.of), percent(row));
        let from = printable(&row.from);
        let from = if from.is_empty() {
            from
        } else {
            format!(" from {from}")
        };
        format!("{reference} of namespace {tenant}, {done} of {of}{from}")
    };
    let mut rows = vec![("shared tier", printable(&tier.url))];
    if !tier.permanent_error.is_empty() {
        rows.push(("cannot be used", printable(&tier.permanent_error)));
    } else if let Some(at) = tier.last_error_unix_ms {
        let error = printable(&tier.last_error);
        rows.push(("last error", format!("{error} ({})", time(at))));
    }
    rows.push((
        "uploads",
        match tier.uploads_waiting {
            0 => "none wait".to_owned(),
            many => format!("{many} wait, at most {}", bytes(tier.bytes_waiting)),
        },
    ));
    if tier.uploads_without_space > 0 {
        let many = tier.uploads_without_space;
        let text = format!("{many} of them, for their tables of contents: make room in the pool");
        rows.push(("lack space", text));
    }
    rows.extend(tier.uploading.iter().map(|row| ("uploading", moves(row))));
    rows.extend(tier.fetching.iter().map(|row| ("fetching", moves(row))));
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT: i64 = 1_800_000_000_000;

    fn text(tier: admin::SharedTier, output: PlainOutput) -> String {
        let status = admin::StatusResponse {
            pool_path: "/var/lib/baggageclaim".into(),
            shared: Some(tier),
            ..Default::default()
        };
        let mut text = Vec::new();
        show(&mut text, &status, output).expect("a Vec takes all");
        String::from_utf8(text).expect("text")
    }

    #[test]
    fn the_shared_tier_says_what_is_wrong_what_waits_and_what_moves() {
        let moving = |key: &str, bytes| admin::Moving {
            tenant: "ci".into(),
            reference: format!("task-cache/{key}"),
            bytes,
            of: 700 << 20,
            from: String::new(),
            since_unix_ms: AT,
        };
        let fetching = |key: &str, bytes| admin::Moving {
            from: "the shared tier".into(),
            ..moving(key, bytes)
        };
        let tier = admin::SharedTier {
            url: "s3://ci-cache/prod".into(),
            last_error: "s3://ci-cache/prod/v1/ci/format cannot be reached: no connection".into(),
            last_error_unix_ms: Some(AT),
            uploads_waiting: 3,
            bytes_waiting: 1 << 30,
            uploads_without_space: 2,
            uploading: Some(moving("go", 70 << 20)),
            fetching: vec![fetching("npm", 699 << 20), fetching("a\u{202e}b", 0)],
            ..Default::default()
        };
        let unusable = admin::SharedTier {
            url: "file:///tier".into(),
            permanent_error: "file:///tier cannot be used: No such file or directory".into(),
            last_error: "the same".into(),
            last_error_unix_ms: Some(AT),
            ..Default::default()
        };
        insta::assert_snapshot!("tier", text(tier.clone(), PlainOutput::Text));
        insta::assert_snapshot!("tier-json", text(tier, PlainOutput::Json));
        insta::assert_snapshot!("tier-unusable", text(unusable, PlainOutput::Text));
    }
}
