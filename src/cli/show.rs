//! What the driver answers, as a table for people or as JSON for programs.
//!
//! The JSON is an interface (docs/cli.md): fields are added, never renamed or removed. Times are RFC 3339 in UTC,
//! sizes are bytes, what is not known is null.

use std::ffi::OsStr;
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt as _;
use std::time::{Duration, UNIX_EPOCH};

use serde::Serialize;

use super::human::{age, bytes, cut};
use super::table::Table;
use crate::config::{Output, PlainOutput};
use crate::engine::Rebuilt;
use crate::proto::admin::v1 as admin;
use crate::sys::printable;

/// How wide a name may be in a table that is not `wide`.
const NAME_WIDTH: usize = 48;

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Volume<'a> {
    id: &'a str,
    tenant: &'a str,
    pod: Pod<'a>,
    r#type: &'a str,
    reference: Option<&'a str>,
    parent: Option<&'a str>,
    layers: u64,
    state: &'a str,
    read_only: bool,
    targets: &'a [String],
    created: String,
    usage: Option<Usage>,
    size_limit: Option<u64>,
    limit_unenforced: Option<&'a str>,
}

#[derive(Serialize)]
struct Pod<'a> {
    name: &'a str,
    uid: &'a str,
}

#[derive(Serialize)]
struct Usage {
    bytes: u64,
    files: u64,
    directories: u64,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Artifact<'a> {
    id: &'a str,
    tenant: &'a str,
    reference: Option<&'a str>,
    layers: u64,
    usage: Option<Usage>,
    created: String,
    last_used: String,
    expires: Option<String>,
    in_use_by: u64,
    durable: bool,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Cache<'a> {
    tenant: &'a str,
    kind: &'a str,
    key: &'a str,
    artifact: &'a str,
    layers: u64,
    usage: Option<Usage>,
    updated: String,
    last_used: String,
    expires: Option<String>,
    in_use_by: u64,
    durable: bool,
}

#[derive(Serialize)]
struct Finding<'a> {
    kind: &'a str,
    path: String,
    detail: &'a str,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Reaped {
    expired: u64,
    evicted: u64,
    deleted: u64,
    held: u64,
    flattened: u64,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Status<'a> {
    version: &'a str,
    pool: &'a str,
    pool_id: &'a str,
    backend: &'a str,
    reason: &'a str,
    total_bytes: u64,
    available_bytes: u64,
    total_inodes: u64,
    available_inodes: u64,
    volumes: u64,
    artifacts: u64,
    caches: u64,
    seals_pending: u64,
    damaged: u64,
}

fn some(text: &str) -> Option<&str> {
    (!text.is_empty()).then_some(text)
}

fn time(unix_ms: i64) -> String {
    // What is before 1970, or after 9999 and so no RFC 3339, is a clock gone wrong; a list must still be shown.
    let millis = u64::try_from(unix_ms).unwrap_or(0).min(253_402_300_799_000);
    let at = UNIX_EPOCH + Duration::from_millis(millis);
    humantime::format_rfc3339_millis(at).to_string()
}

fn usage(usage: Option<&admin::Usage>) -> Option<Usage> {
    usage.map(|usage| Usage {
        bytes: usage.bytes,
        files: usage.files,
        directories: usage.directories,
    })
}

fn size(usage: Option<&admin::Usage>) -> String {
    usage.map(|usage| bytes(usage.bytes)).unwrap_or_default()
}

fn files(usage: Option<&admin::Usage>) -> String {
    usage
        .map(|usage| usage.files.to_string())
        .unwrap_or_default()
}

fn json(to: &mut impl Write, value: &impl Serialize) -> io::Result<()> {
    serde_json::to_writer_pretty(&mut *to, value)?;
    writeln!(to)
}

/// The current time, as the ages in a table count from it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Now(pub(super) i64);

impl Now {
    fn since(self, unix_ms: i64) -> String {
        age(Duration::from_millis(
            u64::try_from(self.0.saturating_sub(unix_ms)).unwrap_or(0),
        ))
    }

    fn until(self, unix_ms: Option<i64>) -> String {
        let Some(at) = unix_ms else {
            return "never".to_owned();
        };
        match u64::try_from(at.saturating_sub(self.0)) {
            Ok(left) if left > 0 => format!("in {}", age(Duration::from_millis(left))),
            _ => "now".to_owned(),
        }
    }
}

fn name(text: &str, output: Output) -> String {
    let text = printable(text);
    if output == Output::Wide {
        text
    } else {
        cut(&text, NAME_WIDTH)
    }
}

fn yes(yes: bool) -> String {
    if yes { "yes" } else { "no" }.to_owned()
}

pub(super) fn volumes(
    to: &mut impl Write,
    rows: &[admin::Volume],
    output: Output,
    now: Now,
) -> io::Result<()> {
    if output == Output::Json {
        let rows = rows.iter().map(|row| Volume {
            id: &row.id,
            tenant: &row.tenant,
            pod: Pod {
                name: &row.pod_name,
                uid: &row.pod_uid,
            },
            r#type: &row.r#type,
            reference: some(&row.reference),
            parent: some(&row.parent_artifact_id),
            layers: row.layers,
            state: &row.state,
            read_only: row.read_only,
            targets: &row.target_paths,
            created: time(row.created_unix_ms),
            usage: usage(row.usage.as_ref()),
            size_limit: row.size_limit,
            limit_unenforced: some(&row.limit_unenforced),
        });
        return json(to, &rows.collect::<Vec<_>>());
    }
    let mut header = vec!["TENANT", "POD", "TYPE", "REFERENCE", "STATE", "SIZE", "AGE"];
    if output == Output::Wide {
        header.extend([
            "LAYERS", "LIMIT", "WRITABLE", "POD-UID", "ID", "PARENT", "TARGET",
        ]);
    }
    let mut table = Table::new(&header);
    for row in rows {
        let mut cells = vec![
            row.tenant.clone(),
            name(&row.pod_name, output),
            row.r#type.clone(),
            name(&row.reference, output),
            row.state.clone(),
            size(row.usage.as_ref()),
            now.since(row.created_unix_ms),
        ];
        if output == Output::Wide {
            let mut limit = row.size_limit.map(bytes).unwrap_or_default();
            if !row.limit_unenforced.is_empty() {
                limit.push_str(" (not enforced)");
            }
            cells.extend([
                row.layers.to_string(),
                limit,
                yes(!row.read_only),
                row.pod_uid.clone(),
                row.id.clone(),
                row.parent_artifact_id.clone(),
                printable(row.target_paths.join(",")),
            ]);
        }
        table.row(cells);
    }
    table.write(to)
}

pub(super) fn artifacts(
    to: &mut impl Write,
    rows: &[admin::Artifact],
    output: Output,
    now: Now,
) -> io::Result<()> {
    if output == Output::Json {
        let rows = rows.iter().map(|row| Artifact {
            id: &row.id,
            tenant: &row.tenant,
            reference: some(&row.reference),
            layers: row.layers,
            usage: usage(row.usage.as_ref()),
            created: time(row.created_unix_ms),
            last_used: time(row.last_used_unix_ms),
            expires: row.expires_unix_ms.map(time),
            in_use_by: row.in_use_by,
            durable: row.durable,
        });
        return json(to, &rows.collect::<Vec<_>>());
    }
    let mut header = vec![
        "TENANT",
        "REFERENCE",
        "LAYERS",
        "SIZE",
        "FILES",
        "USED-BY",
        "AGE",
        "EXPIRES",
    ];
    if output == Output::Wide {
        header.extend(["LAST-USED", "DURABLE", "ID"]);
    }
    let mut table = Table::new(&header);
    for row in rows {
        let mut cells = vec![
            row.tenant.clone(),
            name(&row.reference, output),
            row.layers.to_string(),
            size(row.usage.as_ref()),
            files(row.usage.as_ref()),
            row.in_use_by.to_string(),
            now.since(row.created_unix_ms),
            now.until(row.expires_unix_ms),
        ];
        if output == Output::Wide {
            cells.extend([
                now.since(row.last_used_unix_ms),
                yes(row.durable),
                row.id.clone(),
            ]);
        }
        table.row(cells);
    }
    table.write(to)
}

/// The caches among artifacts, with kind and key.
pub(super) fn only_caches(rows: &[admin::Artifact]) -> Vec<(&'static str, &str, &admin::Artifact)> {
    rows.iter()
        .filter_map(|row| {
            let (kind, key) = row.reference.split_once('/')?;
            match kind {
                "resource-cache" => Some(("resource", key, row)),
                "task-cache" => Some(("task", key, row)),
                _ => None,
            }
        })
        .collect()
}

pub(super) fn caches(
    to: &mut impl Write,
    rows: &[(&'static str, &str, &admin::Artifact)],
    output: Output,
    now: Now,
) -> io::Result<()> {
    if output == Output::Json {
        let rows = rows.iter().map(|(kind, key, row)| Cache {
            tenant: &row.tenant,
            kind,
            key,
            artifact: &row.id,
            layers: row.layers,
            usage: usage(row.usage.as_ref()),
            updated: time(row.created_unix_ms),
            last_used: time(row.last_used_unix_ms),
            expires: row.expires_unix_ms.map(time),
            in_use_by: row.in_use_by,
            durable: row.durable,
        });
        return json(to, &rows.collect::<Vec<_>>());
    }
    let mut header = vec![
        "TENANT",
        "KIND",
        "KEY",
        "SIZE",
        "FILES",
        "LAST-USED",
        "AGE",
        "EXPIRES",
    ];
    if output == Output::Wide {
        header.extend(["LAYERS", "USED-BY", "DURABLE", "ARTIFACT"]);
    }
    let mut table = Table::new(&header);
    for (kind, key, row) in rows {
        let mut cells = vec![
            row.tenant.clone(),
            (*kind).to_owned(),
            name(key, output),
            size(row.usage.as_ref()),
            files(row.usage.as_ref()),
            now.since(row.last_used_unix_ms),
            now.since(row.created_unix_ms),
            now.until(row.expires_unix_ms),
        ];
        if output == Output::Wide {
            cells.extend([
                row.layers.to_string(),
                row.in_use_by.to_string(),
                yes(row.durable),
                row.id.clone(),
            ]);
        }
        table.row(cells);
    }
    table.write(to)
}

pub(super) fn findings(
    to: &mut impl Write,
    rows: &[admin::Finding],
    output: PlainOutput,
) -> io::Result<()> {
    let path = |row: &admin::Finding| OsStr::from_bytes(&row.path).display().to_string();
    if output == PlainOutput::Json {
        let rows = rows.iter().map(|row| Finding {
            kind: &row.kind,
            path: path(row),
            detail: &row.detail,
        });
        return json(to, &rows.collect::<Vec<_>>());
    }
    if rows.is_empty() {
        return writeln!(to, "The index and what is on disk agree.");
    }
    let mut table = Table::new(&["FINDING", "PATH", "MEANS"]);
    for row in rows {
        table.row(vec![
            row.kind.clone(),
            printable(path(row)),
            printable(&row.detail),
        ]);
    }
    table.write(to)
}

pub(super) fn rebuilt(to: &mut impl Write, rebuilt: &Rebuilt) -> io::Result<()> {
    let plural = |count: usize| if count == 1 { "" } else { "s" };
    let (artifacts, claims) = (rebuilt.artifacts, rebuilt.claims);
    writeln!(
        to,
        "The index was made anew and names {artifacts} artifact{} and {claims} persistent volume{}; the old one is kept beside it.",
        plural(artifacts),
        plural(claims),
    )?;
    if rebuilt.nameless.is_empty() && rebuilt.unreadable.is_empty() {
        return Ok(());
    }
    writeln!(
        to,
        "What follows is of snapshots, of persistent volumes that were not mounted since they were cloned or snapshotted, or of some \
         whose record is torn: only the old index knew of which. The driver deletes it when it starts next, so copy what you need before:"
    )?;
    for layer in &rebuilt.nameless {
        writeln!(to, "  layers/{layer}")?;
    }
    for volume in &rebuilt.unreadable {
        writeln!(to, "  volumes/{}", printable(volume.display()))?;
    }
    Ok(())
}

pub(super) fn reaped(
    to: &mut impl Write,
    reaped: &admin::ReapResponse,
    output: PlainOutput,
) -> io::Result<()> {
    if output == PlainOutput::Json {
        return json(
            to,
            &Reaped {
                expired: reaped.expired,
                evicted: reaped.evicted,
                deleted: reaped.deleted,
                held: reaped.held,
                flattened: reaped.flattened,
            },
        );
    }
    lines(
        to,
        &[
            ("expired artifacts", reaped.expired.to_string()),
            ("evicted artifacts", reaped.evicted.to_string()),
            ("deleted directories", reaped.deleted.to_string()),
            ("held open by somebody", reaped.held.to_string()),
            ("merged stacks", reaped.flattened.to_string()),
        ],
    )
}

pub(super) fn status(
    to: &mut impl Write,
    status: &admin::StatusResponse,
    output: PlainOutput,
) -> io::Result<()> {
    if output == PlainOutput::Json {
        return json(
            to,
            &Status {
                version: &status.version,
                pool: &status.pool_path,
                pool_id: &status.pool_id,
                backend: &status.backend,
                reason: &status.backend_reason,
                total_bytes: status.total_bytes,
                available_bytes: status.available_bytes,
                total_inodes: status.total_inodes,
                available_inodes: status.available_inodes,
                volumes: status.volumes,
                artifacts: status.artifacts,
                caches: status.caches,
                seals_pending: status.seals_pending,
                damaged: status.damaged,
            },
        );
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
    lines(
        to,
        &[
            ("pool", printable(&status.pool_path)),
            ("pool id", status.pool_id.clone()),
            ("driver", format!("baggageclaim {}", status.version)),
            ("backend", status.backend.clone()),
            ("because", printable(&status.backend_reason)),
            (
                "room",
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
        ],
    )
}

fn lines(to: &mut impl Write, lines: &[(&str, String)]) -> io::Result<()> {
    let width = lines.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    for (name, value) in lines {
        writeln!(to, "{name:<width$}   {value}")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Now = Now(1_800_000_000_000);
    const HOUR: i64 = 3_600_000;

    fn shown(show: impl FnOnce(&mut Vec<u8>) -> io::Result<()>) -> String {
        let mut text = Vec::new();
        show(&mut text).expect("a Vec takes all");
        String::from_utf8(text).expect("text")
    }

    fn some_volumes() -> Vec<admin::Volume> {
        let id = |digit: &str| format!("csi-{}", digit.repeat(64));
        let target = "/var/lib/kubelet/pods/0f8f/volumes/kubernetes.io~csi/src/mount";
        vec![
            admin::Volume {
                id: id("1"),
                tenant: "ci".into(),
                pod_name: "build-42".into(),
                pod_uid: "0f8fad5b-d9cb-469f-a165-70867728950e".into(),
                r#type: "input".into(),
                reference: "artifact/build-42-src".into(),
                parent_artifact_id: "a".repeat(32),
                layers: 3,
                state: "published".into(),
                read_only: true,
                target_paths: vec![target.into()],
                created_unix_ms: NOW.0 - 90_000,
                usage: Some(admin::Usage {
                    bytes: 12_345_678,
                    files: 17,
                    directories: 4,
                }),
                size_limit: Some(5 << 30),
                limit_unenforced: "ext4 is mounted without prjquota".into(),
            },
            admin::Volume {
                id: id("2"),
                tenant: "ci".into(),
                pod_name: "build-42-a-very-long-name-that-goes-on-and-on-and-on".into(),
                pod_uid: "7c9e6679-7425-40de-944b-e07fc1f90ae7".into(),
                r#type: "task-cache".into(),
                reference: "task-cache/go \u{202e}evil".into(),
                state: "awaiting-outcome".into(),
                created_unix_ms: NOW.0 - 5 * HOUR,
                ..Default::default()
            },
            admin::Volume {
                id: id("3"),
                tenant: "other".into(),
                pod_name: "x".into(),
                pod_uid: "x".into(),
                r#type: "scratch".into(),
                state: "published".into(),
                created_unix_ms: NOW.0 + HOUR, // the clock was set back
                ..Default::default()
            },
        ]
    }

    fn some_artifacts() -> Vec<admin::Artifact> {
        vec![
            admin::Artifact {
                id: "a".repeat(32),
                tenant: "ci".into(),
                reference: "artifact/build-42-src".into(),
                layers: 1,
                usage: Some(admin::Usage {
                    bytes: 700 << 20,
                    files: 50_000,
                    directories: 4_000,
                }),
                created_unix_ms: NOW.0 - 30 * HOUR,
                last_used_unix_ms: NOW.0 - 60_000,
                expires_unix_ms: Some(NOW.0 + 12 * HOUR),
                in_use_by: 2,
                durable: true,
            },
            admin::Artifact {
                id: "b".repeat(32),
                tenant: "ci".into(),
                reference: "task-cache/go/build: π".into(),
                layers: 7,
                created_unix_ms: NOW.0 - HOUR,
                last_used_unix_ms: NOW.0 - HOUR,
                ..Default::default()
            },
            admin::Artifact {
                id: "c".repeat(32),
                tenant: "ci".into(),
                reference: "resource-cache/git:abc".into(),
                layers: 1,
                created_unix_ms: NOW.0 - HOUR,
                last_used_unix_ms: NOW.0,
                expires_unix_ms: Some(NOW.0 - 1),
                durable: true,
                ..Default::default()
            },
            admin::Artifact {
                id: "d".repeat(32),
                tenant: "ci".into(),
                layers: 2,
                in_use_by: 1,
                created_unix_ms: NOW.0 - 400 * 24 * HOUR,
                last_used_unix_ms: NOW.0,
                ..Default::default()
            },
        ]
    }

    #[test]
    fn lists_for_people() {
        let (volumes, artifacts) = (some_volumes(), some_artifacts());
        let caches = only_caches(&artifacts);
        for output in [Output::Table, Output::Wide] {
            let suffix = if output == Output::Wide { "-wide" } else { "" };
            insta::assert_snapshot!(
                format!("volumes{suffix}"),
                shown(|to| super::volumes(to, &volumes, output, NOW))
            );
            insta::assert_snapshot!(
                format!("artifacts{suffix}"),
                shown(|to| super::artifacts(to, &artifacts, output, NOW))
            );
            insta::assert_snapshot!(
                format!("caches{suffix}"),
                shown(|to| super::caches(to, &caches, output, NOW))
            );
        }
    }

    #[test]
    fn lists_for_programs() {
        let (volumes, artifacts) = (some_volumes(), some_artifacts());
        let caches = only_caches(&artifacts);
        insta::assert_snapshot!(
            "volumes-json",
            shown(|to| super::volumes(to, &volumes, Output::Json, NOW))
        );
        insta::assert_snapshot!(
            "artifacts-json",
            shown(|to| super::artifacts(to, &artifacts, Output::Json, NOW))
        );
        insta::assert_snapshot!(
            "caches-json",
            shown(|to| super::caches(to, &caches, Output::Json, NOW))
        );
        let none = shown(|to| super::volumes(to, &[], Output::Json, NOW));
        assert_eq!(none, "[]\n");
    }

    #[test]
    fn the_pool() {
        let status = admin::StatusResponse {
            version: "0.1.0".into(),
            pool_path: "/var/lib/baggageclaim".into(),
            pool_id: "0".repeat(32),
            backend: "overlay".into(),
            backend_reason: "it works here, and forks share page cache".into(),
            total_bytes: 500 << 30,
            available_bytes: 123 << 30,
            volumes: 3,
            artifacts: 4,
            caches: 2,
            damaged: 1,
            ..Default::default()
        };
        let findings = [admin::Finding {
            kind: "missing-layer".into(),
            path: b"layers/\xff".to_vec(),
            detail: "artifact/src of namespace ci cannot be forked".into(),
        }];
        let reaped = admin::ReapResponse {
            expired: 3,
            deleted: 5,
            held: 1,
            ..Default::default()
        };
        for output in [PlainOutput::Text, PlainOutput::Json] {
            let suffix = if output == PlainOutput::Json {
                "-json"
            } else {
                ""
            };
            insta::assert_snapshot!(
                format!("pool{suffix}"),
                shown(|to| {
                    super::status(to, &status, output)?;
                    super::findings(to, &findings, output)?;
                    super::findings(to, &[], output)?;
                    super::reaped(to, &reaped, output)
                })
            );
        }
    }
}
