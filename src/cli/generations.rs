//! The verbs about the generations of a name, on this node or in a cluster: `log` lists them, and
//! `rollback` commits an earlier one once more.

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use serde_json::{Value, json};

use super::answer::{Done, Failure, artifacts, now, only, print};
use super::cluster::Controller;
use super::human::bytes;
use super::namespace::Namespace;
use super::rows::{Now, Row as _, digits, made_by, short, time};
use super::show::{Thing, WIDTH, data};
use super::table::Table;
use crate::admin as socket;
use crate::config::{self, PlainOutput};
use crate::k8s::ask::{self, RollbackResult};
use crate::k8s::connect_as_user;
use crate::model::Reference;
use crate::proto::admin::v1 as admin;
use crate::sys::printable;

#[derive(Debug, Args)]
#[command(mut_arg("tenant", |arg| arg.required(true).help("The namespace it belongs to")))]
pub(super) struct Log {
    /// artifact/NAME, resource-cache/KEY or task-cache/KEY
    reference: Reference,
    #[command(flatten)]
    namespace: Namespace,
    /// The output format
    #[arg(short, long, value_name = "FORMAT", default_value = "text")]
    output: PlainOutput,
    /// Show those of all nodes of the cluster
    #[arg(long)]
    cluster: bool,
    #[command(flatten)]
    pool: config::Pool,
    #[command(flatten)]
    controller: Controller,
}

#[derive(Debug, Args)]
#[command(mut_arg("tenant", |arg| arg.required(true).help("The namespace it belongs to")))]
pub(super) struct Rollback {
    /// artifact/NAME or task-cache/KEY
    reference: Reference,
    /// The id of the generation, as `log` shows it, or its first digits
    #[arg(long, value_name = "ID")]
    to: String,
    #[command(flatten)]
    namespace: Namespace,
    /// Roll back on all nodes of the cluster, through the API server: with the rights of the user
    /// of --kubeconfig, KUBECONFIG, ~/.kube/config, or the pod's service account. A generation that
    /// was cleared is refused
    #[arg(long)]
    cluster: bool,
    /// The same, with the rights of this file's user
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    #[command(flatten)]
    pool: config::Pool,
}

/// The artifacts that were sealed under a name, the newest first.
fn generations(mut all: Vec<admin::Artifact>, reference: &Reference) -> Vec<admin::Artifact> {
    let name = reference.to_string();
    // An older driver tells the name only of the artifact that has it.
    all.retain(|row| row.sealed_as == name || row.reference == name);
    all.sort_by(|one, other| {
        (other.created_unix_ms, &other.id).cmp(&(one.created_unix_ms, &one.id))
    });
    all
}

/// Shows the generations of a name.
pub(super) async fn log(what: Log) -> Done {
    if what.cluster {
        return log_of_cluster(what).await;
    }
    let mut client = socket::connect(&what.pool.pool).await?;
    let tenant = what.namespace.required();
    let all = artifacts(&mut client, Some(&tenant)).await?;
    let rows = generations(all, &what.reference);
    if rows.is_empty() {
        return Err(Failure::NothingCalled(what.reference.to_string()));
    }
    print(|mut to| {
        if let Some(form) = what.output.data() {
            return data(&mut to, &rows.iter().map(shown).collect(), form);
        }
        let rows: Vec<_> = rows.iter().map(generation).collect();
        table(&mut to, &rows, false, now())
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Shows the generations of a name on all nodes.
async fn log_of_cluster(what: Log) -> Done {
    let mut client = socket::connect_to_controller(&what.controller.socket).await?;
    let request = admin::LogRequest {
        tenant: what.namespace.required().to_string(),
        reference: what.reference.to_string(),
    };
    let answer = client.log(request).await?.into_inner();
    if !answer.silent.is_empty() {
        let nodes = printable(answer.silent.join(", "));
        let _ = writeln!(
            io::stderr(),
            "No answer of {nodes}: no connection to the controller, or an older driver."
        );
    }
    let rows = answer.generations;
    if rows.is_empty() {
        return Err(Failure::NoGeneration(what.reference.to_string()));
    }
    print(|mut to| match what.output.data() {
        Some(form) => data(&mut to, &rows.iter().map(shown_of_cluster).collect(), form),
        None => table(&mut to, &rows, true, now()),
    })?;
    Ok(ExitCode::SUCCESS)
}

fn shown_of_cluster(row: &admin::Generation) -> Value {
    json!({
        "node": row.node,
        "current": row.current,
        "id": row.id,
        "created": time(row.created_unix_ms),
        "bytes": row.bytes,
        "inUseBy": row.in_use_by,
        "madeBy": row.made_by.as_ref().map(made_by),
    })
}

/// The columns of a table, and which of them are cut where a line would be too long.
const COLUMNS: [(&str, bool); 11] = [
    ("ON", true),
    ("ID", false),
    ("CURRENT", false),
    ("COMMITTED", false),
    ("SIZE", false),
    ("USED BY", false),
    ("ACCOUNT", true),
    ("POD", true),
    ("NODE", true),
    ("PARENT", false),
    ("IMAGES", true),
];
/// The columns that only the table of a cluster has.
const OF_CLUSTER: [&str; 2] = ["ON", "PARENT"];

fn table(
    to: &mut impl Write,
    rows: &[admin::Generation],
    of_cluster: bool,
    now: Now,
) -> io::Result<()> {
    let has = |name: &str| of_cluster || !OF_CLUSTER.contains(&name);
    let columns = COLUMNS.into_iter().filter(|(name, _)| has(name));
    let mut table = Table::new(columns.collect(), Some(WIDTH));
    for row in rows {
        let maker = row.made_by.clone().unwrap_or_default();
        let cells = [
            printable(&row.node),
            short(&row.id).to_owned(),
            if row.current { "yes" } else { "no" }.to_owned(),
            format!("{} ago", now.since(row.created_unix_ms)),
            row.bytes.map(bytes).unwrap_or_default(),
            row.in_use_by.to_string(),
            printable(&maker.service_account),
            printable(&maker.pod_name),
            printable(&maker.node),
            short(&maker.parent).to_owned(),
            printable(maker.images.join(",")),
        ];
        let cells = COLUMNS.iter().zip(cells).filter(|((name, _), _)| has(name));
        table.row(cells.map(|(_, cell)| cell).collect());
    }
    table.write(to)
}

/// Commits an earlier generation once more.
pub(super) async fn rollback(what: Rollback) -> Done {
    if what.cluster || what.kubeconfig.is_some() {
        return rollback_in_cluster(what).await;
    }
    let mut client = socket::connect(&what.pool.pool).await?;
    let tenant = what.namespace.required();
    let all = artifacts(&mut client, Some(&tenant)).await?;
    let mut rows = generations(all, &what.reference);
    rows.retain(|row| row.id.starts_with(&what.to) || digits(&row.id).starts_with(&what.to));
    let found: Vec<Thing<'_>> = rows.iter().map(Thing::Artifact).collect();
    let earlier = only(&found, &what.to)?;
    let (_, earlier) = earlier.place();
    let request = admin::RollbackRequest {
        tenant: tenant.to_string(),
        reference: what.reference.to_string(),
        artifact_id: earlier.to_owned(),
    };
    let made = client.rollback(request).await?.into_inner();
    let name = printable(&what.reference);
    print(|to| {
        writeln!(
            to,
            "{name} of namespace {tenant} has the content of {} again, as artifact {}.",
            short(earlier),
            short(&made.artifact_id)
        )
    })?;
    Ok(ExitCode::SUCCESS)
}

/// The same on all nodes, by an order in the API server.
async fn rollback_in_cluster(what: Rollback) -> Done {
    let tenant = what.namespace.required();
    let name = printable(&what.reference);
    let client = connect_as_user(what.kubeconfig.as_deref()).await?;
    match ask::roll_back(client, &tenant, &what.reference, &what.to).await? {
        RollbackResult::Done(said) => print(|to| writeln!(to, "{}.", printable(said)))?,
        RollbackResult::Failed(why) => return Err(Failure::NotRolledBack(why)),
        RollbackResult::Given { object, state } => print(|to| {
            writeln!(
                to,
                "The order to roll {name} of namespace {tenant} back is given."
            )?;
            if let Some(state) = state {
                writeln!(to, "So far: {}.", printable(state))?;
            }
            writeln!(
                to,
                "The controller gives the order up after 5 minutes. See the result with: \
                 kubectl get rollback {object} -n {tenant} -o wide"
            )
        })?,
    }
    Ok(ExitCode::SUCCESS)
}

fn is_current(row: &admin::Artifact) -> bool {
    !row.reference.is_empty()
}

fn shown(row: &admin::Artifact) -> Value {
    let mut object = json!({"current": is_current(row)});
    if let (Value::Object(object), Value::Object(fields)) = (&mut object, row.shown()) {
        object.extend(fields);
    }
    object
}

/// An artifact of this node, as a cluster's log has it.
fn generation(row: &admin::Artifact) -> admin::Generation {
    admin::Generation {
        node: String::new(),
        id: row.id.clone(),
        created_unix_ms: row.created_unix_ms,
        current: is_current(row),
        bytes: row.usage.as_ref().map(|usage| usage.bytes),
        in_use_by: row.in_use_by,
        made_by: row.made_by.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Now = Now(1_795_400_000_000);

    fn row(id: &str, sealed_as: &str, age: i64, pod: &str) -> admin::Artifact {
        admin::Artifact {
            id: id.repeat(32),
            tenant: "ci".to_owned(),
            sealed_as: sealed_as.to_owned(),
            created_unix_ms: NOW.0 - age,
            made_by: Some(admin::Maker {
                pod_name: pod.to_owned(),
                service_account: "builder".to_owned(),
                node: "node-1".to_owned(),
                images: vec!["golang:1.25".to_owned()],
                ..Default::default()
            }),
            ..Default::default()
        }
    }

    #[test]
    fn generations_of_a_name_are_shown_the_newest_first() {
        let mut newest = row("b", "task-cache/k", 60_000, "build-2");
        newest.reference = newest.sealed_as.clone();
        newest.usage = Some(admin::Usage {
            bytes: 700 << 20,
            ..Default::default()
        });
        let mut earlier = row("a", "task-cache/k", 3_600_000, "build-1");
        earlier.in_use_by = 2;
        let other = row("c", "task-cache/other", 5, "build-3");
        let reference = "task-cache/k".parse().expect("a reference");
        let rows = generations(vec![earlier, newest, other], &reference);
        let mut text = Vec::new();
        let here: Vec<_> = rows.iter().map(generation).collect();
        table(&mut text, &here, false, NOW).expect("memory takes it");
        let text = String::from_utf8(text).expect("text");
        insta::assert_snapshot!("generations", text);
        let of_cluster = |row: &admin::Artifact, node: &str| admin::Generation {
            node: node.to_owned(),
            made_by: row.made_by.clone().map(|maker| admin::Maker {
                parent: "d".repeat(32),
                ..maker
            }),
            ..generation(row)
        };
        let all = [
            of_cluster(&rows[0], "node-2"),
            of_cluster(&rows[1], "node-1"),
        ];
        let mut text = Vec::new();
        table(&mut text, &all, true, NOW).expect("memory takes it");
        let text = String::from_utf8(text).expect("text");
        insta::assert_snapshot!("generations-of-cluster", text);
        let shown_there = shown_of_cluster(&all[0]);
        assert_eq!(shown_there["node"], "node-2");
        assert_eq!(shown_there["madeBy"]["parent"], "d".repeat(32));
        assert_eq!(shown(&rows[0])["current"], true);
        assert_eq!(shown(&rows[1])["current"], false);
        assert_eq!(shown(&rows[1])["id"], "a".repeat(32));
    }
}
