//! The verb `shared`: the names in a shared tier, its used space, its damage, and the collection of
//! garbage. It works on the bucket itself; no driver takes part.

use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use clap::{Args, Subcommand};
use serde_json::{Value, json};
use tokio::runtime::Builder;

use super::answer::{Done, FAILED, print};
use super::human::{age, bytes};
use super::namespace::Namespace;
use super::progress::Bar;
use super::rows::time;
use super::show::data;
use super::table::Table;
use crate::config::PlainOutput;
use crate::model::Tenant;
use crate::shared::{
    Collected, Collector, NameRecord, NameState, Store, Times, Url, UrlError, Verified, fresh_id,
    list, now, usage, verify,
};
use crate::sys::{Dir, printable};
use crate::{shared, sys};

/// Why the verb did not do what it should.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    #[error("the URL of --shared {0}")]
    Url(#[from] UrlError),
    #[error(transparent)]
    Tier(#[from] shared::Error),
    #[error(transparent)]
    System(#[from] sys::Error),
    #[error("cannot start: {0}")]
    Start(io::Error),
}

#[derive(Debug, Args)]
#[command(
    subcommand_value_name = "VERB",
    subcommand_help_heading = "Verbs",
    disable_help_subcommand = true
)]
pub(super) struct Shared {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// List the names
    ///
    /// STATE is content, cleared (by a person: content from before is refused), expired (its time
    /// to live is over, or an object was damaged) or evicted (by the sharedBudget of a
    /// CachePolicy).
    #[command(after_long_help = "\
Example:
  baggageclaim shared ls --shared s3://ci-cache/prod -n ci")]
    Ls(Tier),
    /// Show the space that each namespace uses
    ///
    /// CONDEMNED is the part that has no use any more and will be deleted.
    #[command(after_long_help = "\
Example:
  baggageclaim shared du --shared s3://ci-cache/prod")]
    Du(Tier),
    /// Follow every name and check what it shows
    ///
    /// Checks the digest of each manifest, and of each layer the length, the index and the digest
    /// of its table. Does not read the content, which is verified whenever it is fetched. Exits
    /// with 1 if something is damaged. It changes nothing. A node that reads a damaged object
    /// reports it, and a node that has the content uploads it again.
    #[command(after_long_help = "\
Example:
  baggageclaim shared verify --shared s3://ci-cache/prod -n ci")]
    Verify(Tier),
    /// Delete what no name shows
    ///
    /// Expires names whose time to live is over. Marks manifests and layers that nothing shows once
    /// they are a day old, and deletes them a day after that. So the first runs delete nothing. It
    /// is safe while nodes upload, and while another collector runs. Run it once a day.
    ///
    /// Exits with 1 if a namespace cannot be collected. It collects the others all the same.
    #[command(after_long_help = "\
Example:
  baggageclaim shared gc --shared s3://ci-cache/prod --dry-run")]
    Gc(Gc),
}

#[derive(Debug, Args)]
struct Tier {
    /// The tier: s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or file:///DIR.
    /// Options follow a `?`: endpoint=URL, region=NAME, path-style=true|false, allow-http=true,
    /// account=NAME. Credentials come from the environment or the machine's identity, never from
    /// here
    #[arg(
        long,
        value_name = "URL",
        env = "BAGGAGECLAIM_SHARED",
        hide_env_values = true
    )]
    shared: String,
    #[command(flatten)]
    namespace: Namespace,
    /// The output format
    #[arg(short, long, value_name = "FORMAT", default_value = "text")]
    output: PlainOutput,
}

#[derive(Debug, Args)]
struct Gc {
    #[command(flatten)]
    tier: Tier,
    /// Show what would be done, and write nothing
    #[arg(long)]
    dry_run: bool,
}

pub(super) fn run(shared: &Shared) -> Done {
    let tier = match &shared.verb {
        Verb::Ls(tier) | Verb::Du(tier) | Verb::Verify(tier) => tier,
        Verb::Gc(gc) => &gc.tier,
    };
    // Not by clap, whose message would repeat a URL that holds a password.
    let url: Url = tier.shared.parse().map_err(Failure::Url)?;
    let runtime = Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(Failure::Start)?;
    let store = url
        .open(runtime.handle().clone(), Times::default())
        .map_err(Failure::Tier)?;
    let tenants = match &tier.namespace.tenant {
        Some(tenant) => vec![tenant.clone()],
        None => store.tenants().map_err(Failure::Tier)?,
    };
    let done = match &shared.verb {
        Verb::Ls(tier) => ls(&store, &tenants, tier.output),
        Verb::Du(tier) => du(&store, &tenants, tier.output),
        Verb::Verify(tier) => self::verify_all(&store, &tenants, tier.output),
        Verb::Gc(gc) => collect(&store, &tenants, gc),
    };
    // A request that hangs does not keep the process.
    runtime.shutdown_background();
    done
}

fn never() -> bool {
    false
}

/// Does this for each namespace. One that fails does not keep the others from it: stderr says why.
/// Returns the results, and whether one failed.
fn each<'a, T>(
    tenants: &'a [Tenant],
    progress: &Bar,
    mut work: impl FnMut(&Tenant) -> shared::Result<T>,
) -> (Vec<(&'a Tenant, T)>, bool) {
    let (mut rows, mut has_failed) = (Vec::new(), false);
    for tenant in tenants {
        match work(tenant) {
            Ok(row) => rows.push((tenant, row)),
            Err(error) => {
                progress.say(&format!("baggageclaim: namespace {tenant}: {error}"));
                has_failed = true;
            }
        }
    }
    (rows, has_failed)
}

/// The exit code of a verb that has printed what it could.
fn code(has_failed: bool) -> ExitCode {
    if has_failed {
        FAILED.into()
    } else {
        ExitCode::SUCCESS
    }
}

fn state(record: &NameRecord) -> &'static str {
    match record.state {
        NameState::Content { .. } => "content",
        NameState::Cleared => "cleared",
        NameState::Expired if record.evicted => "evicted",
        NameState::Expired => "expired",
    }
}

fn ls(store: &Store, tenants: &[Tenant], output: PlainOutput) -> Done {
    let (mut records, mut unreadable): (Vec<NameRecord>, u64) = (Vec::new(), 0);
    let bar = Bar::new(None);
    let (lists, has_failed) = each(tenants, &bar, |tenant| list(store, tenant));
    for (_, (names, damage)) in lists {
        records.extend(names.into_iter().map(|name| name.record));
        unreadable += damage.len() as u64;
    }
    if unreadable > 0 {
        let _said = writeln!(
            io::stderr(),
            "{unreadable} records cannot be read; `baggageclaim shared verify` names them."
        );
    }
    if let Some(form) = output.data() {
        let rows: Value = records.iter().map(row).collect();
        print(|mut to| data(&mut to, &rows, form))?;
        return Ok(code(has_failed));
    }
    if records.is_empty() {
        if !has_failed {
            let _said = writeln!(io::stderr(), "No names.");
        }
        return Ok(code(has_failed));
    }
    let columns = ["NAMESPACE", "REFERENCE", "STATE", "NUMBER", "AGE"];
    let mut table = Table::new(columns.map(|name| (name, false)).to_vec(), None);
    let now = now();
    for record in &records {
        table.row(vec![
            record.tenant.to_string(),
            printable(&record.reference),
            state(record).to_owned(),
            record.number.to_string(),
            age(now.since(record.committed)),
        ]);
    }
    print(|mut to| table.write(&mut to))?;
    Ok(code(has_failed))
}

/// A name for programs.
fn row(record: &NameRecord) -> Value {
    let (artifact, ttl) = match &record.state {
        NameState::Content {
            artifact,
            ttl_seconds,
            ..
        } => (Some(artifact), *ttl_seconds),
        NameState::Cleared | NameState::Expired => (None, None),
    };
    let committed = i64::try_from(record.committed.0).unwrap_or(i64::MAX);
    json!({
        "tenant": record.tenant,
        "reference": record.reference,
        "state": state(record),
        "number": record.number,
        "artifact": artifact,
        "ttlSeconds": ttl,
        "committed": time(committed),
    })
}

/// An object for programs: the fields of a value and its namespace.
fn of_tenant(tenant: &Tenant, value: &impl serde::Serialize) -> io::Result<Value> {
    let mut row = serde_json::to_value(value)?;
    row["tenant"] = json!(tenant);
    Ok(row)
}

fn du(store: &Store, tenants: &[Tenant], output: PlainOutput) -> Done {
    let bar = Bar::new(None);
    let (rows, has_failed) = each(tenants, &bar, |tenant| usage(store, tenant, &never));
    if let Some(form) = output.data() {
        let rows: io::Result<Vec<Value>> = rows
            .iter()
            .map(|(tenant, usage)| of_tenant(tenant, usage))
            .collect();
        let rows = Value::from(rows?);
        print(|mut to| data(&mut to, &rows, form))?;
        return Ok(code(has_failed));
    }
    let columns = [
        "NAMESPACE",
        "NAMES",
        "MANIFESTS",
        "LAYERS",
        "SIZE",
        "CONDEMNED",
    ];
    let mut table = Table::new(columns.map(|name| (name, false)).to_vec(), None);
    for (tenant, usage) in &rows {
        table.row(vec![
            tenant.to_string(),
            usage.names.to_string(),
            usage.manifests.to_string(),
            usage.layers.to_string(),
            bytes(usage.bytes),
            bytes(usage.condemned_bytes),
        ]);
    }
    print(|mut to| table.write(&mut to))?;
    Ok(code(has_failed))
}

/// A directory for temporary files. The image has no `/tmp`, and each container has memory there.
fn temporary() -> sys::Result<Dir> {
    match Dir::open(&std::env::temp_dir()) {
        Err(error) if error.is(sys::Errno::ENOENT) => Dir::open(Path::new("/dev/shm")),
        opened => opened,
    }
}

fn verify_all(store: &Store, tenants: &[Tenant], output: PlainOutput) -> Done {
    let temporary = temporary().map_err(Failure::System)?;
    let mut all = Verified::default();
    let progress = Bar::new(None);
    let (rows, has_failed) = each(tenants, &progress, |tenant| {
        let told = |so_far: &Verified| {
            let (names, layers) = (so_far.names, so_far.layers);
            progress.line(&format!("{tenant}: {names} names, {layers} layers"));
        };
        verify(store, tenant, &temporary, &told, &never)
    });
    for (_, found) in rows {
        all.names += found.names;
        all.layers += found.layers;
        all.damage.extend(found.damage);
    }
    drop(progress);
    if let Some(form) = output.data() {
        let value = serde_json::to_value(&all).map_err(io::Error::from)?;
        print(|mut to| data(&mut to, &value, form))?;
    } else {
        print(|to| {
            for damage in &all.damage {
                writeln!(
                    to,
                    "{}: {}",
                    printable(&damage.object),
                    printable(&damage.cause)
                )?;
            }
            let (names, layers, damaged) = (all.names, all.layers, all.damage.len());
            writeln!(
                to,
                "{names} names and {layers} layers checked, {damaged} damaged."
            )
        })?;
    }
    Ok(code(has_failed || !all.damage.is_empty()))
}

fn collect(store: &Store, tenants: &[Tenant], gc: &Gc) -> Done {
    let progress = Bar::new(None);
    let (rows, has_failed) = each(tenants, &progress, |tenant| {
        let told = |so_far: &Collected| {
            let (names, layers) = (so_far.names, so_far.layers);
            let (marked, deleted) = (so_far.condemned, so_far.deleted);
            progress.line(&format!(
                "{tenant}: {names} names, {layers} layers; {marked} marked, {deleted} deleted"
            ));
        };
        let collector = Collector {
            dry_run: gc.dry_run,
            progress: &told,
            ..Collector::new(store, tenant, fresh_id())
        };
        collector.run(now(), &never)
    });
    drop(progress);
    if let Some(form) = gc.tier.output.data() {
        let rows: io::Result<Vec<Value>> = rows
            .iter()
            .map(|(tenant, done)| of_tenant(tenant, done))
            .collect();
        let rows = Value::from(rows?);
        print(|mut to| data(&mut to, &rows, form))?;
        return Ok(code(has_failed));
    }
    print(|to| {
        rows.iter()
            .try_for_each(|(tenant, done)| summary(to, tenant, done, gc.dry_run))
    })?;
    Ok(code(has_failed))
}

fn summary(to: &mut dyn Write, tenant: &Tenant, done: &Collected, dry: bool) -> io::Result<()> {
    let (would, size) = (if dry { "would be " } else { "" }, bytes(done.bytes));
    writeln!(
        to,
        "{tenant}: {} names, {} manifests, {} layers with {size}.",
        done.names, done.manifests, done.layers
    )?;
    writeln!(
        to,
        "  {} objects with {} {would}deleted, {} with {} {would}marked for deletion.",
        done.deleted,
        bytes(done.deleted_bytes),
        done.condemned,
        bytes(done.condemned_bytes)
    )?;
    writeln!(
        to,
        "  {} names {would}expired, {} old records of names {would}deleted.",
        done.expired, done.deleted_names
    )?;
    if done.unreadable > 0 {
        let count = done.unreadable;
        writeln!(
            to,
            "  {count} records cannot be read; `baggageclaim shared verify` names them."
        )?;
    }
    if done.unknown > 0 {
        writeln!(to, "  {} unknown objects were left alone.", done.unknown)?;
    }
    Ok(())
}
