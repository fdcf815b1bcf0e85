//! Shows the driver's answers: tables for people; JSON, YAML or names for programs. `rows` defines
//! the rows.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io::{self, IsTerminal as _, Write};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use serde_json::{Value, json};

use super::human::bytes;
use super::rows::{Now, Row, digits};
use super::table::Table;
use crate::config::{Data, Output, PlainOutput};
use crate::engine::Rebuilt;
use crate::model::layout;
use crate::proto::admin::v1 as admin;
use crate::sys::printable;

/// How wide a table may be that is not `wide`.
pub(super) const WIDTH: usize = 120;

pub(super) fn data(to: &mut impl Write, value: &Value, form: Data) -> io::Result<()> {
    match form {
        Data::Json => {
            serde_json::to_writer_pretty(&mut *to, value)?;
            writeln!(to)
        }
        Data::Yaml => {
            // A reader of YAML 1.1 takes a plain `2026-01-01`, `12:30:45`, `1__2` or `<<` for a
            // date, numbers or a merge. Tenants choose such keys.
            let options = serde_saphyr::ser_options! { quote_all: true };
            let text = serde_saphyr::to_string_with_options(value, options);
            let text = text.map_err(io::Error::other)?;
            writeln!(to, "{}", text.trim_end())
        }
    }
}

/// Who reads stdout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reader {
    /// A terminal, which may obey characters in a name.
    Terminal,
    /// A file or a pipe.
    Program,
}

impl Reader {
    pub(super) fn of_stdout() -> Self {
        if io::stdout().is_terminal() {
            Self::Terminal
        } else {
            Self::Program
        }
    }
}

/// A list.
pub(super) fn list<R: Row>(
    to: &mut impl Write,
    rows: &[R],
    output: Output,
    reader: Reader,
    now: Now,
) -> io::Result<()> {
    match output {
        Output::Json => data(to, &shown(rows), Data::Json),
        Output::Yaml => data(to, &shown(rows), Data::Yaml),
        Output::Name => names(to, rows.iter(), reader),
        Output::Table | Output::Wide => {
            let mut table = Table::new(header::<R>(output), width(output));
            for row in rows {
                table.row(cells(row, output, now));
            }
            table.write(to)
        }
    }
}

fn shown<R: Row>(rows: &[R]) -> Value {
    rows.iter().map(Row::shown).collect()
}

/// A program gets each name as `inspect` takes it. No name has a line break.
fn names<'a, R: Row + 'a>(
    to: &mut impl Write,
    mut rows: impl Iterator<Item = &'a R>,
    reader: Reader,
) -> io::Result<()> {
    rows.try_for_each(|row| match reader {
        Reader::Terminal => writeln!(to, "{}", printable(row.name())),
        Reader::Program => writeln!(to, "{}", row.name()),
    })
}

fn width(output: Output) -> Option<usize> {
    (output != Output::Wide).then_some(WIDTH)
}

/// The columns, and which of them are cut where a line would be too long.
fn header<R: Row>(output: Output) -> Vec<(&'static str, bool)> {
    let mut header = R::COLUMNS.to_vec();
    if output == Output::Wide {
        header.extend(R::MORE.iter().map(|name| (*name, false)));
    }
    header
}

fn cells<R: Row>(row: &R, output: Output, now: Now) -> Vec<String> {
    let is_wide = output == Output::Wide;
    let mut cells = vec![row.first(is_wide).to_owned()];
    cells.extend(row.cells(now));
    if is_wide {
        cells.extend(row.more(now));
    }
    cells
}

/// The change of a row in a watched list.
#[derive(Debug, Clone, Copy)]
enum Event {
    Added,
    Changed,
    Gone,
}

/// A list that is watched: each look shows what differs from the look before.
pub(super) struct Watch<R> {
    output: Output,
    reader: Reader,
    known: BTreeMap<String, R>,
    table: Table,
}

impl<R: Row> Watch<R> {
    pub(super) fn new(output: Output, reader: Reader) -> Self {
        let mut columns = vec![("EVENT", false)];
        columns.extend(header::<R>(output));
        Self {
            output,
            reader,
            known: BTreeMap::new(),
            table: Table::new(columns, width(output)),
        }
    }

    /// Shows the list's changes since the last call.
    pub(super) fn look(&mut self, to: &mut impl Write, rows: Vec<R>, now: Now) -> io::Result<()> {
        let mut before = std::mem::take(&mut self.known);
        let mut events = Vec::new();
        for row in &rows {
            match before.remove(&row.key()) {
                None => events.push((Event::Added, row)),
                Some(known) if known != *row => events.push((Event::Changed, row)),
                Some(_) => {}
            }
        }
        events.extend(before.values().map(|row| (Event::Gone, row)));
        match self.output {
            Output::Table | Output::Wide => {
                for (event, row) in events {
                    let mut line = vec![format!("{event:?}").to_uppercase()];
                    line.extend(cells(row, self.output, now));
                    self.table.row(line);
                }
                self.table.write(to)?;
            }
            Output::Name => {
                let rows = events.into_iter().map(|(_, row)| row);
                names(to, rows, self.reader)?;
            }
            Output::Json | Output::Yaml => {
                for (event, row) in events {
                    let event = format!("{event:?}").to_lowercase();
                    let happened = json!({"event": event, "object": row.shown()});
                    if self.output == Output::Json {
                        serde_json::to_writer(&mut *to, &happened)?;
                        writeln!(to)?;
                    } else {
                        writeln!(to, "---")?;
                        data(to, &happened, Data::Yaml)?;
                    }
                }
            }
        }
        let rows = rows.into_iter().map(|row| (row.key(), row));
        self.known = rows.collect();
        Ok(())
    }
}

/// The object that `inspect` shows.
#[derive(Debug, Clone, Copy)]
pub(super) enum Thing<'a> {
    Volume(&'a admin::Volume),
    Artifact(&'a admin::Artifact),
}

impl Thing<'_> {
    /// Its namespace and its id.
    pub(super) fn place(&self) -> (&str, &str) {
        match self {
            Self::Volume(row) => (&row.tenant, &row.id),
            Self::Artifact(row) => (&row.tenant, &row.id),
        }
    }

    /// Whether this is its name, its id, or the beginning of its id.
    pub(super) fn is_called(&self, name: &str) -> bool {
        let (_, id) = self.place();
        let reference = match self {
            Self::Volume(_) => None,
            Self::Artifact(row) => Some(&row.reference),
        };
        let is_named = reference.is_some_and(|reference| reference == name);
        is_named || id.starts_with(name) || digits(id).starts_with(name)
    }
}

pub(super) fn one(to: &mut impl Write, thing: Thing<'_>, form: Data) -> io::Result<()> {
    let (kind, fields) = match thing {
        Thing::Volume(row) => ("volume", row.shown()),
        Thing::Artifact(row) => ("artifact", row.shown()),
    };
    let mut object = json!({"kind": kind});
    if let (Value::Object(object), Value::Object(fields)) = (&mut object, fields) {
        object.extend(fields);
    }
    data(to, &object, form)
}

/// Shows what `destroy` would delete.
pub(super) fn destroyed(to: &mut impl Write, row: &admin::Artifact) -> io::Result<()> {
    let size = row
        .usage
        .as_ref()
        .map_or_else(|| "not measured yet".to_owned(), |usage| bytes(usage.bytes));
    writeln!(
        to,
        "{} of namespace {} would be deleted: artifact {}, {size}, layers: {}.",
        printable(&row.reference),
        row.tenant,
        row.id,
        row.layers
    )?;
    if row.in_use_by > 0 {
        writeln!(
            to,
            "Its content would stay until the volumes that are forks of it ({}) are gone.",
            row.in_use_by
        )?;
    }
    Ok(())
}

pub(super) fn findings(
    to: &mut impl Write,
    rows: &[admin::Finding],
    output: PlainOutput,
) -> io::Result<()> {
    let path = |row: &admin::Finding| OsStr::from_bytes(&row.path).display().to_string();
    if let Some(form) = output.data() {
        let rows = rows
            .iter()
            .map(|row| json!({"kind": row.kind, "path": path(row), "detail": row.detail}));
        return data(to, &rows.collect(), form);
    }
    if rows.is_empty() {
        return writeln!(to, "The index agrees with the files on disk.");
    }
    let columns = ["FINDING", "PATH", "MEANS"].map(|name| (name, false));
    let mut table = Table::new(columns.to_vec(), None);
    for row in rows {
        table.row(vec![
            row.kind.clone(),
            printable(path(row)),
            printable(&row.detail),
        ]);
    }
    table.write(to)
}

/// Shows what a rebuild of the index in this pool made, or would make.
pub(super) fn rebuilt(
    to: &mut impl Write,
    pool: &Path,
    rebuilt: &Rebuilt,
    is_dry_run: bool,
) -> io::Result<()> {
    let plural = |count: usize| if count == 1 { "" } else { "s" };
    let (artifacts, claims) = (rebuilt.artifacts, rebuilt.claims);
    writeln!(
        to,
        "The new index {} {artifacts} artifact{} and {claims} persistent volume{}.",
        if is_dry_run { "would name" } else { "names" },
        plural(artifacts),
        plural(claims),
    )?;
    if let Some(kept) = &rebuilt.kept {
        writeln!(to, "The old index is kept: {}", printable(kept.display()))?;
    }
    if is_dry_run {
        writeln!(to, "Nothing is changed.")?;
    }
    if rebuilt.nameless.is_empty() && rebuilt.unreadable.is_empty() {
        return Ok(());
    }
    let (knows, deletes) = if is_dry_run {
        ("knows", "The first start of the driver after a rebuild")
    } else {
        ("knew", "The next start of the driver")
    };
    writeln!(
        to,
        "Only the old index {knows} the owners of the directories below: snapshots, persistent \
         volumes that were not mounted since they were cloned or snapshotted, or persistent \
         volumes with a damaged record. {deletes} deletes them; copy what you need before:"
    )?;
    let layers = pool.join(layout::LAYERS);
    for layer in &rebuilt.nameless {
        let layer = layers.join(layer.to_string());
        writeln!(to, "  {}", printable(layer.display()))?;
    }
    let volumes = pool.join(layout::VOLUMES);
    for volume in &rebuilt.unreadable {
        writeln!(to, "  {}", printable(volumes.join(volume).display()))?;
    }
    Ok(())
}

pub(super) fn reaped(
    to: &mut impl Write,
    reaped: &admin::ReapResponse,
    output: PlainOutput,
) -> io::Result<()> {
    if let Some(form) = output.data() {
        return data(to, &json!(reaped), form);
    }
    lines(
        to,
        &[
            ("expired artifacts", reaped.expired.to_string()),
            ("evicted artifacts", reaped.evicted.to_string()),
            ("deleted directories", reaped.deleted.to_string()),
            ("held open by a process", reaped.held.to_string()),
            ("merged stacks", reaped.flattened.to_string()),
        ],
    )
}

pub(super) fn lines(to: &mut impl Write, lines: &[(&str, String)]) -> io::Result<()> {
    let width = lines.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    for (name, value) in lines {
        writeln!(to, "{name:<width$}   {value}")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::rows::Cache;
    use super::super::status;
    use super::*;
    use crate::model::LayerId;

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
                fetch: None,
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
            admin::Volume {
                id: id("4"),
                tenant: "other".into(),
                pod_name: "far".into(),
                pod_uid: "far".into(),
                r#type: "input".into(),
                reference: "artifact/far".into(),
                state: "fetching".into(),
                created_unix_ms: NOW.0 - 2_000,
                fetch: Some(admin::Moving {
                    tenant: "other".into(),
                    reference: "artifact/far".into(),
                    bytes: 35 << 20,
                    of: 100 << 20,
                    from: "peer node-2".into(),
                    since_unix_ms: NOW.0 - 2_000,
                }),
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
                shared: "yes".into(),
                expires_unix_ms: Some(NOW.0 + 12 * HOUR),
                in_use_by: 2,
                durable: true,
                made_by: Some(admin::Maker {
                    pod_name: "build-42".into(),
                    pod_uid: "0f8fad5b-d9cb-469f-a165-70867728950e".into(),
                    service_account: "builder".into(),
                    images: vec![
                        format!("registry.example/go:1.25@sha256:{}", "e".repeat(64)),
                        "registry.example/proxy:1".into(),
                    ],
                    node: "node-2".into(),
                    parent: "b".repeat(32),
                }),
                digest: format!("sha256:{}", "d".repeat(64)),
                table_digests: vec![format!("sha256:{}", "f".repeat(64))],
                ..Default::default()
            },
            admin::Artifact {
                id: "b".repeat(32),
                tenant: "ci".into(),
                reference: "task-cache/go/build: π".into(),
                layers: 7,
                created_unix_ms: NOW.0 - HOUR,
                last_used_unix_ms: NOW.0 - HOUR,
                made_by: Some(admin::Maker {
                    pod_name: "build-41".into(),
                    pod_uid: "7c9e6679-7425-40de-944b-e07fc1f90ae7".into(),
                    ..Default::default()
                }),
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
        let caches = Cache::among(artifacts.clone());
        for output in [
            Output::Table,
            Output::Wide,
            Output::Name,
            Output::Json,
            Output::Yaml,
        ] {
            let suffix = match output {
                Output::Table => "",
                Output::Wide => "-wide",
                Output::Name => "-name",
                Output::Json => "-json",
                Output::Yaml => "-yaml",
            };
            insta::assert_snapshot!(
                format!("volumes{suffix}"),
                shown(|to| list(to, &volumes, output, Reader::Terminal, NOW))
            );
            insta::assert_snapshot!(
                format!("artifacts{suffix}"),
                shown(|to| list(to, &artifacts, output, Reader::Terminal, NOW))
            );
            insta::assert_snapshot!(
                format!("caches{suffix}"),
                shown(|to| list(to, &caches, output, Reader::Terminal, NOW))
            );
        }
    }

    #[test]
    fn a_program_gets_names_as_they_are() {
        let mut artifacts = some_artifacts();
        artifacts.truncate(1);
        artifacts[0].reference = "task-cache/go \u{202e}evil".to_owned();
        for (reader, name) in [
            (Reader::Program, "task-cache/go \u{202e}evil\n"),
            (Reader::Terminal, "task-cache/go \\u{202e}evil\n"),
        ] {
            let text = shown(|to| list(to, &artifacts, Output::Name, reader, NOW));
            assert_eq!(text, name);
            let mut watch = Watch::new(Output::Name, reader);
            let text = shown(|to| watch.look(to, artifacts.clone(), NOW));
            assert_eq!(text, name);
        }
    }

    #[test]
    fn a_short_table_fits_a_terminal_whatever_it_shows() {
        let mut volumes = some_volumes();
        volumes[0].tenant = "n".repeat(63);
        volumes[0].pod_name = "p".repeat(253);
        volumes[0].reference = format!("resource-cache/{}", "k".repeat(256));
        volumes[0].state = "awaiting-outcome".to_owned();
        let mut artifacts = some_artifacts();
        artifacts[2].tenant = "n".repeat(63);
        artifacts[2].reference = format!("resource-cache/{}", "k".repeat(256));
        let caches = Cache::among(artifacts.clone());
        for table in [
            shown(|to| list(to, &volumes, Output::Table, Reader::Terminal, NOW)),
            shown(|to| list(to, &artifacts, Output::Table, Reader::Terminal, NOW)),
            shown(|to| list(to, &caches, Output::Table, Reader::Terminal, NOW)),
        ] {
            let longest = table.lines().map(|line| line.chars().count()).max();
            assert!(longest.is_some_and(|longest| longest <= 120), "{table}");
        }
        assert_eq!(
            shown(|to| list(to, &volumes[..0], Output::Json, Reader::Program, NOW)),
            "[]\n"
        );
        assert_eq!(
            shown(|to| list(to, &volumes[..0], Output::Yaml, Reader::Program, NOW)),
            "[]\n"
        );
    }

    #[test]
    fn a_list_that_is_watched_tells_what_happened() {
        let before = some_volumes();
        let mut after = before.clone();
        after[0].state = "sealing".to_owned();
        after.remove(2);
        after.push(admin::Volume {
            id: format!("csi-{}", "4".repeat(64)),
            ..before[1].clone()
        });
        for output in [Output::Table, Output::Name, Output::Json, Output::Yaml] {
            let text = shown(|to| {
                let mut watch = Watch::new(output, Reader::Terminal);
                watch.look(to, before[..2].to_vec(), NOW)?;
                watch.look(to, before.clone(), NOW)?;
                watch.look(to, before.clone(), NOW)?;
                watch.look(to, after.clone(), NOW)
            });
            insta::assert_snapshot!(format!("watch-{output:?}"), text);
        }
    }

    #[test]
    fn one_thing_is_found_by_its_name_or_the_beginning_of_its_id_and_shown_whole() {
        let (volumes, artifacts) = (some_volumes(), some_artifacts());
        let volume = Thing::Volume(&volumes[0]);
        for name in ["1", "111111111111", "csi-1111"] {
            assert!(volume.is_called(name), "{name}");
        }
        // The content that it is a view of is not one of its names.
        assert!(!volume.is_called("artifact/build-42-src") && !volume.is_called("12"));
        let artifact = Thing::Artifact(&artifacts[0]);
        assert!(artifact.is_called("artifact/build-42-src") && artifact.is_called("aaaa"));
        assert!(!artifact.is_called("artifact/build"), "names are whole");
        insta::assert_snapshot!("one-volume", shown(|to| one(to, volume, Data::Yaml)));
        insta::assert_snapshot!("one-artifact", shown(|to| one(to, artifact, Data::Json)));
        insta::assert_snapshot!(
            "destroyed",
            shown(|to| {
                destroyed(to, &artifacts[0])?;
                destroyed(to, &artifacts[1])
            })
        );
    }

    #[test]
    fn a_rebuilt_index() {
        let mut made = Rebuilt {
            artifacts: 1,
            claims: 2,
            nameless: vec![LayerId::from_bits(7)],
            unreadable: vec!["vol-\u{202e}x".into()],
            kept: Some("/srv/pool/index.redb.old.1".into()),
        };
        let pool = Path::new("/srv/pool");
        let rebuilt = shown(|to| rebuilt(to, pool, &made, false));
        made.kept = None;
        let preview = shown(|to| super::rebuilt(to, pool, &made, true));
        insta::assert_snapshot!(format!("{rebuilt}---\n{preview}"));
    }

    #[test]
    fn a_key_that_looks_like_something_else_is_a_string_in_yaml() {
        for key in [
            "<<",
            "=",
            "2026-01-01",
            "12:30:45",
            "1__2",
            "0o17",
            "yes",
            "~",
            "it's",
            "a\\b",
            "- x",
            "\u{2028}",
            "",
        ] {
            let value = json!([{ "key": key }]);
            let text = shown(|to| data(to, &value, Data::Yaml));
            let quoted = text.strip_prefix("- key: ").expect("a list of one object");
            assert!(quoted.starts_with(['\'', '"']), "{text}");
            let read: Value = serde_saphyr::from_str(&text).expect("YAML");
            assert_eq!(read, value, "{text}");
        }
        let plain = json!({"number": 5, "yes": true, "nothing": null});
        let text = shown(|to| data(to, &plain, Data::Yaml));
        assert_eq!(text, "number: 5\n\"yes\": true\nnothing: null\n");
    }

    #[test]
    fn the_pool() {
        let pool = admin::StatusResponse {
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
        for output in [PlainOutput::Text, PlainOutput::Json, PlainOutput::Yaml] {
            let suffix = match output {
                PlainOutput::Text => "",
                PlainOutput::Json => "-json",
                PlainOutput::Yaml => "-yaml",
            };
            insta::assert_snapshot!(
                format!("pool{suffix}"),
                shown(|to| {
                    status::show(to, &pool, output)?;
                    super::findings(to, &findings, output)?;
                    super::findings(to, &[], output)?;
                    super::reaped(to, &reaped, output)
                })
            );
        }
    }
}
