//! The rows of lists: what each kind shows in a table, in JSON and YAML, and as a name.
//!
//! The fields of JSON and YAML are an interface (docs/cli.md): fields are added, never renamed or
//! removed. Times are RFC 3339 in UTC, sizes are bytes, and unknown values are null.

use std::time::Duration;

use serde_json::{Value, json};

use super::human::{age, bytes};
use crate::model::Timestamp;
use crate::proto::admin::v1 as admin;
use crate::sys::printable;

/// How many digits of an id a short table shows.
const ID_DIGITS: usize = 12;

/// The current time, as the ages in a table count from it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Now(pub(super) i64);

impl Now {
    pub(super) fn since(self, unix_ms: i64) -> String {
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

/// A row of a list.
pub(super) trait Row: PartialEq {
    /// The columns of a short table. Those with `true` hold names, which are cut if a line is too
    /// long.
    const COLUMNS: &'static [(&'static str, bool)];
    /// The further columns of a wide table.
    const MORE: &'static [&'static str];

    /// The id.
    fn id(&self) -> &str;
    /// What no other row of the list has.
    fn key(&self) -> String {
        self.id().to_owned()
    }
    /// The first cell: the id, which a short table shortens.
    fn first(&self, is_wide: bool) -> &str {
        if is_wide { self.id() } else { short(self.id()) }
    }
    /// The name that `inspect` accepts, and `destroy` if possible.
    fn name(&self) -> &str;
    /// The cells of [`Row::COLUMNS`] but for the first.
    fn cells(&self, now: Now) -> Vec<String>;
    /// The cells of [`Row::MORE`].
    fn more(&self, now: Now) -> Vec<String>;
    /// Its form in JSON and YAML.
    fn shown(&self) -> Value;
}

/// An id as short tables show it: the first digits, as git and docker do.
pub(super) fn short(id: &str) -> &str {
    let digits = digits(id);
    digits.get(..ID_DIGITS).unwrap_or(digits)
}

/// An id without what all ids of its kind begin with.
pub(super) fn digits(id: &str) -> &str {
    let kinds = ["csi-", "vol-"].iter();
    let mut digits = kinds.filter_map(|kind| id.strip_prefix(kind));
    digits.next().unwrap_or(id)
}

fn some(text: &str) -> Option<&str> {
    (!text.is_empty()).then_some(text)
}

pub(super) fn time(unix_ms: i64) -> String {
    // After a clock error, times before 1970 or after 9999 must not break the list.
    let at = Timestamp(u64::try_from(unix_ms).unwrap_or(0));
    humantime::format_rfc3339_millis(at.calendar()).to_string()
}

fn pod(name: &str, uid: &str) -> Value {
    json!({"name": name, "uid": uid})
}

fn size(usage: Option<&admin::Usage>) -> String {
    usage.map(|usage| bytes(usage.bytes)).unwrap_or_default()
}

fn files(usage: Option<&admin::Usage>) -> String {
    let files = usage.map(|usage| usage.files.to_string());
    files.unwrap_or_default()
}

fn yes(yes: bool) -> String {
    if yes { "yes" } else { "no" }.to_owned()
}

/// How much of moving content is there.
pub(super) fn percent(moving: &admin::Moving) -> String {
    match moving.of {
        0 => "0 %".to_owned(),
        of => format!("{} %", moving.bytes.min(of).saturating_mul(100) / of),
    }
}

/// Moving content for programs.
pub(super) fn moving(moving: &admin::Moving) -> Value {
    json!({
        "tenant": moving.tenant,
        "reference": moving.reference,
        "bytes": moving.bytes,
        "of": moving.of,
        "from": some(&moving.from),
        "since": time(moving.since_unix_ms),
    })
}

impl Row for admin::Volume {
    const COLUMNS: &'static [(&'static str, bool)] = &[
        ("ID", false),
        ("TENANT", true),
        ("POD", true),
        ("TYPE", false),
        ("REFERENCE", true),
        ("STATE", false),
        ("SIZE", false),
        ("AGE", false),
    ];
    const MORE: &'static [&'static str] = &[
        "FROM", "LAYERS", "LIMIT", "WRITABLE", "POD-UID", "PARENT", "TARGET",
    ];

    fn id(&self) -> &str {
        &self.id
    }

    fn name(&self) -> &str {
        &self.id
    }

    fn cells(&self, now: Now) -> Vec<String> {
        vec![
            self.tenant.clone(),
            printable(&self.pod_name),
            self.r#type.clone(),
            printable(&self.reference),
            self.fetch.as_ref().map_or_else(
                || self.state.clone(),
                |fetch| format!("{} {}", self.state, percent(fetch)),
            ),
            size(self.usage.as_ref()),
            now.since(self.created_unix_ms),
        ]
    }

    fn more(&self, _now: Now) -> Vec<String> {
        let mut limit = self.size_limit.map(bytes).unwrap_or_default();
        if !self.limit_unenforced.is_empty() {
            limit.push_str(" (not enforced)");
        }
        let fetch = self.fetch.as_ref();
        vec![
            fetch.map_or_else(String::new, |fetch| printable(&fetch.from)),
            self.layers.to_string(),
            limit,
            yes(!self.read_only),
            self.pod_uid.clone(),
            self.parent_artifact_id.clone(),
            printable(self.target_paths.join(",")),
        ]
    }

    fn shown(&self) -> Value {
        json!({
            "id": self.id,
            "tenant": self.tenant,
            "pod": pod(&self.pod_name, &self.pod_uid),
            "type": self.r#type,
            "reference": some(&self.reference),
            "parent": some(&self.parent_artifact_id),
            "layers": self.layers,
            "state": self.state,
            "readOnly": self.read_only,
            "targets": self.target_paths,
            "created": time(self.created_unix_ms),
            "usage": self.usage,
            "sizeLimit": self.size_limit,
            "limitUnenforced": some(&self.limit_unenforced),
            "fetch": self.fetch.as_ref().map(moving),
        })
    }
}

impl Row for admin::Artifact {
    const COLUMNS: &'static [(&'static str, bool)] = &[
        ("ID", false),
        ("TENANT", true),
        ("REFERENCE", true),
        ("LAYERS", false),
        ("SIZE", false),
        ("FILES", false),
        ("USED-BY", false),
        ("AGE", false),
        ("EXPIRES", false),
    ];
    const MORE: &'static [&'static str] = &[
        "LAST-USED",
        "DURABLE",
        "SHARED",
        "POD",
        "POD-UID",
        "SERVICE-ACCOUNT",
        "NODE",
        "IMAGES",
    ];

    fn id(&self) -> &str {
        &self.id
    }

    fn name(&self) -> &str {
        some(&self.reference).unwrap_or(&self.id)
    }

    fn cells(&self, now: Now) -> Vec<String> {
        vec![
            self.tenant.clone(),
            printable(&self.reference),
            self.layers.to_string(),
            size(self.usage.as_ref()),
            files(self.usage.as_ref()),
            self.in_use_by.to_string(),
            now.since(self.created_unix_ms),
            now.until(self.expires_unix_ms),
        ]
    }

    fn more(&self, now: Now) -> Vec<String> {
        let maker = self.made_by.clone().unwrap_or_default();
        vec![
            now.since(self.last_used_unix_ms),
            yes(self.durable),
            self.shared.clone(),
            printable(&maker.pod_name),
            maker.pod_uid,
            printable(&maker.service_account),
            printable(&maker.node),
            printable(maker.images.join(",")),
        ]
    }

    fn shown(&self) -> Value {
        let made_by = self.made_by.as_ref().map(made_by);
        let table_digests = self.table_digests.iter().map(|digest| some(digest));
        json!({
            "id": self.id,
            "tenant": self.tenant,
            "reference": some(&self.reference),
            "layers": self.layers,
            "usage": self.usage,
            "created": time(self.created_unix_ms),
            "lastUsed": time(self.last_used_unix_ms),
            "expires": self.expires_unix_ms.map(time),
            "inUseBy": self.in_use_by,
            "durable": self.durable,
            "madeBy": made_by,
            "digest": some(&self.digest),
            "importedDigest": some(&self.imported_digest),
            "tableDigests": table_digests.collect::<Vec<_>>(),
            "shared": some(&self.shared),
        })
    }
}

/// What committed content.
pub(super) fn made_by(maker: &admin::Maker) -> Value {
    json!({
        "pod": pod(&maker.pod_name, &maker.pod_uid),
        "serviceAccount": some(&maker.service_account),
        "images": maker.images,
        "node": some(&maker.node),
        "parent": some(&maker.parent),
    })
}

/// A cache: an artifact whose name is one.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Cache(admin::Artifact);

impl Cache {
    /// The caches among artifacts.
    pub(super) fn among(rows: Vec<admin::Artifact>) -> Vec<Self> {
        let is_cache = |row: &admin::Artifact| {
            let kind = row.reference.split_once('/').map(|(kind, _)| kind);
            matches!(kind, Some("resource-cache" | "task-cache"))
        };
        rows.into_iter().filter(is_cache).map(Self).collect()
    }

    /// `resource` or `task`, and the key.
    fn kind_and_key(&self) -> (&str, &str) {
        let (kind, key) = self.0.reference.split_once('/').unwrap_or_default();
        (kind.strip_suffix("-cache").unwrap_or(kind), key)
    }
}

impl Row for Cache {
    const COLUMNS: &'static [(&'static str, bool)] = &[
        ("ARTIFACT", false),
        ("TENANT", true),
        ("KIND", false),
        ("KEY", true),
        ("SIZE", false),
        ("FILES", false),
        ("LAST-USED", false),
        ("AGE", false),
        ("EXPIRES", false),
    ];
    const MORE: &'static [&'static str] = &["LAYERS", "USED-BY", "DURABLE", "SHARED"];

    fn id(&self) -> &str {
        &self.0.id
    }

    fn name(&self) -> &str {
        &self.0.reference
    }

    fn cells(&self, now: Now) -> Vec<String> {
        let (row, (kind, key)) = (&self.0, self.kind_and_key());
        vec![
            row.tenant.clone(),
            kind.to_owned(),
            printable(key),
            size(row.usage.as_ref()),
            files(row.usage.as_ref()),
            now.since(row.last_used_unix_ms),
            now.since(row.created_unix_ms),
            now.until(row.expires_unix_ms),
        ]
    }

    fn more(&self, _now: Now) -> Vec<String> {
        let row = &self.0;
        vec![
            row.layers.to_string(),
            row.in_use_by.to_string(),
            yes(row.durable),
            row.shared.clone(),
        ]
    }

    fn shown(&self) -> Value {
        let (row, (kind, key)) = (&self.0, self.kind_and_key());
        json!({
            "tenant": row.tenant,
            "kind": kind,
            "key": key,
            "artifact": row.id,
            "layers": row.layers,
            "usage": row.usage,
            "updated": time(row.created_unix_ms),
            "lastUsed": time(row.last_used_unix_ms),
            "expires": row.expires_unix_ms.map(time),
            "inUseBy": row.in_use_by,
            "durable": row.durable,
            "shared": some(&row.shared),
        })
    }
}
