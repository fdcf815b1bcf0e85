//! The verbs that ask the controller of a cluster, at its CSI socket: `caches --cluster`, `explain`
//! and `clear`. `clear` also gives its order through the API server, with the rights of its user.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use serde_json::{Value, json};

use super::answer::{Done, Failure, now, print, say_none, wait_for_next_look};
use super::human::bytes;
use super::namespace::Namespace;
use super::rows::{Now, Row, time};
use super::show::{self, Reader, data};
use super::table::Table;
use crate::admin as socket;
use crate::config::{Output, PlainOutput};
use crate::k8s::ask::{self, Order};
use crate::k8s::{UserError, connect_as_user};
use crate::model::{Reference, Tenant};
use crate::proto::admin::v1 as admin;
use crate::sys::printable;
use admin::{ClusterAnswer, NodeContentState};

/// Where the controller serves in its pod.
const SOCKET: &str = "/run/csi/csi.sock";

/// The socket of the controller.
#[derive(Debug, Args)]
pub(super) struct Controller {
    /// The CSI socket of the controller
    #[arg(
        long,
        value_name = "PATH",
        env = "BAGGAGECLAIM_SOCKET",
        hide_env_values = true,
        default_value = SOCKET
    )]
    pub(super) socket: PathBuf,
}

/// Who gets an order: the controller itself, or the API server.
#[derive(Debug, Args)]
struct Through {
    /// Give the order to the controller at this CSI socket. Without this and --kubeconfig:
    /// /run/csi/csi.sock if it is there
    #[arg(
        long,
        value_name = "PATH",
        env = "BAGGAGECLAIM_SOCKET",
        hide_env_values = true
    )]
    socket: Option<PathBuf>,
    /// Give the order through the API server, with the rights of this file's user. Without any of
    /// these: KUBECONFIG, ~/.kube/config, or the pod's service account
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
}

impl Through {
    /// The socket of the controller; `None`: the API server.
    fn socket(&self) -> Option<&Path> {
        let usual = Path::new(SOCKET);
        match (&self.kubeconfig, &self.socket) {
            (Some(_), _) => None,
            (None, Some(socket)) => Some(socket),
            (None, None) => usual.exists().then_some(usual),
        }
    }
}

#[derive(Debug, Args)]
#[command(mut_arg("tenant", |arg| arg.required(true).help("The namespace it belongs to")))]
pub(super) struct Explain {
    /// artifact/NAME, resource-cache/KEY or task-cache/KEY
    reference: Reference,
    #[command(flatten)]
    namespace: Namespace,
    /// The output format
    #[arg(short, long, value_name = "FORMAT", default_value = "text")]
    output: PlainOutput,
    #[command(flatten)]
    controller: Controller,
}

#[derive(Debug, Args)]
#[command(mut_arg("tenant", |arg| arg.required(true).help("The namespace it belongs to")))]
pub(super) struct Clear {
    /// artifact/NAME, resource-cache/KEY or task-cache/KEY
    reference: Reference,
    #[command(flatten)]
    namespace: Namespace,
    /// Clear all caches of this kind whose key begins with KEY
    #[arg(long)]
    prefix: bool,
    #[command(flatten)]
    through: Through,
}

/// Clears names on all nodes.
pub(super) async fn clear(what: Clear) -> Done {
    let Clear {
        reference,
        namespace,
        prefix,
        through,
    } = what;
    let tenant = namespace.required();
    let mut is_known = None;
    let order = if let Some(socket) = through.socket() {
        let mut client = socket::connect_to_controller(socket).await?;
        // Asked before: a node with the content may clear it at once.
        is_known = is_on_a_node(&mut client, &tenant, &reference, prefix).await;
        let request = admin::ClearRequest {
            tenant: tenant.to_string(),
            reference: reference.to_string(),
            prefix,
        };
        client.clear(request).await?;
        Order::Done
    } else {
        let client = connect_as_user(through.kubeconfig.as_deref()).await;
        let client = client.map_err(|error| match error {
            // The account of the controller may give this order.
            UserError::Unknown(_) => Failure::NoUserToClear(error),
            error => error.into(),
        })?;
        ask::clear(client, &tenant, &reference, prefix).await?
    };
    let all = if prefix { "…" } else { "" };
    let name = format!("{}{all} of namespace {tenant}", printable(&reference));
    print(|mut to| {
        cleared(&mut to, &name, &tenant, &order)?;
        if is_known == Some(false) {
            let what = if prefix { "such a name" } else { "that name" };
            writeln!(to, "No node was known to have content of {what}.")?;
        }
        Ok(())
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Says how far an order to clear is.
fn cleared(to: &mut impl Write, name: &str, tenant: &Tenant, order: &Order) -> io::Result<()> {
    let (object, far) = match order {
        Order::Done => {
            return writeln!(
                to,
                "{name} is cleared.\n\
                 Nodes that are away clear it before their content counts again."
            );
        }
        Order::Given {
            object,
            is_seen: true,
        } => (
            object,
            "The controller has not carried it out yet. It does when it runs, and when the \
             namespace has not cleared too many names lately.",
        ),
        Order::Given {
            object,
            is_seen: false,
        } => (
            object,
            "Whether the controller has carried it out is not known: that needs the right to list \
             and watch caches, and an answer of the API server.",
        ),
    };
    writeln!(
        to,
        "The order to clear {name} is given. {far}\n\
         When it is done, this object is gone: kubectl get cache {object} -n {tenant}"
    )
}

/// Whether a node has content of a name, or may commit some; with `prefix`, of any cache whose key
/// begins so. `None`: not known.
async fn is_on_a_node(
    client: &mut socket::ClusterClient,
    tenant: &Tenant,
    reference: &Reference,
    prefix: bool,
) -> Option<bool> {
    let name = reference.to_string();
    let (is_there, is_incomplete) = if prefix {
        let (rows, is_incomplete) = all_caches(client, Some(tenant)).await.ok()?;
        let is_there = rows.iter().any(|row| row.reference.starts_with(&name));
        (is_there, is_incomplete)
    } else {
        let request = admin::ExplainRequest {
            tenant: tenant.to_string(),
            reference: name,
        };
        let answer = client.explain(request).await.ok()?.into_inner();
        let is_incomplete = answer.answer() == ClusterAnswer::Incomplete;
        (!answer.nodes.is_empty(), is_incomplete)
    };
    (is_there || !is_incomplete).then_some(is_there)
}

/// Lists the caches of all nodes, and with `watch` their changes.
pub(super) async fn caches(
    namespace: &Namespace,
    output: Output,
    watch: bool,
    controller: &Controller,
) -> Done {
    let mut client = socket::connect_to_controller(&controller.socket).await?;
    let tenant = namespace.tenant.as_ref();
    let for_people = matches!(output, Output::Table | Output::Wide);
    let reader = Reader::of_stdout();
    let mut watched = watch.then(|| show::Watch::new(output, reader));
    let mut is_told = false;
    loop {
        let (rows, is_incomplete) = all_caches(&mut client, tenant).await?;
        match &mut watched {
            Some(watched) => print(|mut to| watched.look(&mut to, rows, now()))?,
            None if rows.is_empty() && for_people => say_none("caches", tenant),
            None => print(|mut to| show::list(&mut to, &rows, output, reader, now()))?,
        }
        if is_incomplete && !is_told {
            let _ = writeln!(io::stderr(), "{INCOMPLETE}");
            is_told = true;
        }
        if !watch {
            return Ok(ExitCode::SUCCESS);
        }
        wait_for_next_look()?;
    }
}

/// The caches of all nodes, by namespace and name, and whether some nodes have still to report.
async fn all_caches(
    client: &mut socket::ClusterClient,
    tenant: Option<&Tenant>,
) -> Result<(Vec<admin::ClusterCache>, bool), Failure> {
    let request = admin::ListCachesRequest {
        tenant: tenant.map(ToString::to_string),
    };
    let mut parts = client.list_caches(request).await?.into_inner();
    let (mut rows, mut is_incomplete) = (Vec::new(), false);
    while let Some(part) = parts.message().await? {
        rows.extend(part.caches);
        is_incomplete |= part.incomplete;
    }
    rows.sort_by(|one, other| {
        (&one.tenant, &one.reference).cmp(&(&other.tenant, &other.reference))
    });
    Ok((rows, is_incomplete))
}

const INCOMPLETE: &str = "Some nodes have not reported all that they have yet.";

impl Row for admin::ClusterCache {
    const COLUMNS: &'static [(&'static str, bool)] = &[
        ("NAMESPACE", false),
        ("NAME", true),
        ("SIZE", false),
        ("AGE", false),
        ("NODES", true),
    ];
    const MORE: &'static [&'static str] = &[];

    fn id(&self) -> &str {
        &self.reference
    }

    fn key(&self) -> String {
        format!("{}/{}", self.tenant, self.reference)
    }

    fn first(&self, _is_wide: bool) -> &str {
        &self.tenant
    }

    fn name(&self) -> &str {
        &self.reference
    }

    fn cells(&self, now: Now) -> Vec<String> {
        let content = self.content.as_ref();
        let coming = if content.is_none() { " (coming)" } else { "" };
        let size = content.map(|it| bytes(it.bytes));
        let age = content.map(|it| now.since(it.created_unix_ms));
        vec![
            printable(&self.reference),
            size.unwrap_or_default(),
            age.unwrap_or_default(),
            format!("{}{coming}", self.nodes.join(",")),
        ]
    }

    fn more(&self, _now: Now) -> Vec<String> {
        Vec::new()
    }

    fn shown(&self) -> Value {
        json!({
            "tenant": self.tenant,
            "reference": self.reference,
            "content": content(self.content.as_ref()),
            "nodes": self.nodes,
        })
    }
}

fn content(content: Option<&admin::ClusterContent>) -> Value {
    content.map_or(Value::Null, |content| {
        json!({
            "created": time(content.created_unix_ms),
            "bytes": content.bytes,
            "layers": content.layers,
        })
    })
}

/// Shows which nodes have a name, and what a node is told that asks for it.
pub(super) async fn explain(what: Explain) -> Done {
    let mut client = socket::connect_to_controller(&what.controller.socket).await?;
    let tenant = what.namespace.required();
    let request = admin::ExplainRequest {
        tenant: tenant.to_string(),
        reference: what.reference.to_string(),
    };
    let answer = client.explain(request).await?.into_inner();
    print(|mut to| match what.output.data() {
        Some(form) => data(&mut to, &explained(&answer), form),
        None => explained_to_people(&mut to, &what.reference, &answer, now()),
    })?;
    Ok(ExitCode::SUCCESS)
}

fn state_word(state: NodeContentState) -> &'static str {
    match state {
        NodeContentState::Current => "current",
        NodeContentState::Cleared => "cleared",
        NodeContentState::Coming => "coming",
        NodeContentState::Other | NodeContentState::Unspecified => "other",
    }
}

fn explained(answer: &admin::ExplainResponse) -> Value {
    let word = match answer.answer() {
        ClusterAnswer::Found => "found",
        ClusterAnswer::Coming => "coming",
        ClusterAnswer::Nothing => "nothing",
        ClusterAnswer::Incomplete | ClusterAnswer::Unspecified => "incomplete",
    };
    let nodes = answer.nodes.iter().map(|of| {
        json!({
            "node": of.node,
            "zone": of.zone,
            "state": state_word(of.state()),
            "content": content(of.content.as_ref()),
            "away": of.away,
        })
    });
    json!({"answer": word, "nodes": nodes.collect::<Vec<_>>()})
}

fn explained_to_people(
    to: &mut impl Write,
    reference: &Reference,
    answer: &admin::ExplainResponse,
    now: Now,
) -> io::Result<()> {
    let says = match (answer.answer(), reference.cache()) {
        (ClusterAnswer::Found, _) => "A node without it fetches the current content.",
        (ClusterAnswer::Coming, None) => "A pod may commit it. A pod that reads it waits.",
        (ClusterAnswer::Coming, Some(_)) => "A pod may commit it. Until then it starts empty.",
        (ClusterAnswer::Nothing, None) => "No node has it. A pod that reads it waits.",
        (ClusterAnswer::Nothing, Some(_)) => "No node has it. It starts empty.",
        (ClusterAnswer::Incomplete | ClusterAnswer::Unspecified, _) => INCOMPLETE,
    };
    writeln!(to, "{says}")?;
    if answer.nodes.is_empty() {
        return Ok(());
    }
    writeln!(to)?;
    let columns = [
        "NODE",
        "STATE",
        "COMMITTED",
        "SIZE",
        "LAYERS",
        "ZONE",
        "CONNECTED",
    ];
    let mut table = Table::new(columns.map(|name| (name, false)).to_vec(), None);
    for of in &answer.nodes {
        let content = of.content.as_ref();
        let text =
            |show: &dyn Fn(&admin::ClusterContent) -> String| content.map(show).unwrap_or_default();
        table.row(vec![
            of.node.clone(),
            state_word(of.state()).to_owned(),
            text(&|it| format!("{} ago", now.since(it.created_unix_ms))),
            text(&|it| bytes(it.bytes)),
            text(&|it| it.layers.to_string()),
            of.zone.clone(),
            if of.away { "no" } else { "yes" }.to_owned(),
        ]);
    }
    table.write(to)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Data;

    const NOW: Now = Now(1_795_400_000_000);

    fn content(age: i64) -> admin::ClusterContent {
        admin::ClusterContent {
            created_unix_ms: NOW.0 - age,
            bytes: 1_300_000_000,
            layers: 3,
        }
    }

    fn written(write: impl FnOnce(&mut Vec<u8>) -> io::Result<()>) -> String {
        let mut text = Vec::new();
        write(&mut text).expect("memory takes it");
        String::from_utf8(text).expect("text")
    }

    #[test]
    fn an_order_goes_to_a_socket_that_is_named_and_a_kubeconfig_comes_first() {
        let through = |socket: Option<&str>, kubeconfig: Option<&str>| Through {
            socket: socket.map(PathBuf::from),
            kubeconfig: kubeconfig.map(PathBuf::from),
        };
        let named = through(Some("/csi.sock"), None);
        assert_eq!(named.socket(), Some(Path::new("/csi.sock")));
        assert_eq!(through(Some("/csi.sock"), Some("config")).socket(), None);
        assert_eq!(through(None, Some("config")).socket(), None);
    }

    #[test]
    fn caches_of_the_cluster_are_shown() {
        let row = |reference: &str, content, nodes: &[&str]| admin::ClusterCache {
            tenant: "ci".to_owned(),
            reference: reference.to_owned(),
            content,
            nodes: nodes.iter().map(ToString::to_string).collect(),
        };
        let rows = [
            row(
                "task-cache/main",
                Some(content(4 * 3_600_000)),
                &["node-1", "node-2"],
            ),
            row("task-cache/pr-7", None, &["node-3"]),
        ];
        let table = written(|to| show::list(to, &rows, Output::Table, Reader::Terminal, NOW));
        insta::assert_snapshot!("cluster-caches", table);
        let json = written(|to| show::list(to, &rows, Output::Json, Reader::Program, NOW));
        insta::assert_snapshot!("cluster-caches-json", json);
        // Two namespaces have the same name.
        let mut other = rows[0].clone();
        other.tenant = "a-namespace-with-a-long-name".to_owned();
        let mut watched = show::Watch::new(Output::Table, Reader::Terminal);
        let seen = [
            vec![rows[0].clone(), rows[1].clone()],
            vec![rows[0].clone(), other.clone()],
            vec![rows[0].clone(), other],
        ];
        let text = written(|to| {
            seen.into_iter()
                .try_for_each(|rows| watched.look(to, rows, NOW))
        });
        insta::assert_snapshot!("cluster-caches-watch", text);
    }

    #[test]
    fn an_order_says_how_far_it_is() {
        let tenant: Tenant = "ci".parse().expect("a label");
        let object = "clear-1".to_owned();
        let given = |is_seen| Order::Given {
            object: object.clone(),
            is_seen,
        };
        let name = "task-cache/main of namespace ci";
        let text = written(|to| {
            cleared(to, name, &tenant, &Order::Done)?;
            cleared(to, name, &tenant, &given(true))?;
            cleared(to, name, &tenant, &given(false))
        });
        insta::assert_snapshot!("cleared", text);
    }

    #[test]
    fn a_name_is_explained() {
        let of = |node: &str, state: NodeContentState, content, away| admin::NodeContent {
            node: node.to_owned(),
            zone: "eu-1".to_owned(),
            state: state.into(),
            content,
            away,
        };
        let answer = admin::ExplainResponse {
            answer: ClusterAnswer::Found.into(),
            nodes: vec![
                of(
                    "node-1",
                    NodeContentState::Current,
                    Some(content(60_000)),
                    false,
                ),
                of(
                    "node-2",
                    NodeContentState::Other,
                    Some(content(9_000_000)),
                    true,
                ),
                of("node-3", NodeContentState::Coming, None, false),
            ],
        };
        let reference: Reference = "task-cache/main".parse().expect("a reference");
        let text = written(|to| explained_to_people(to, &reference, &answer, NOW));
        insta::assert_snapshot!("explained", text);
        let json = written(|to| data(to, &explained(&answer), Data::Json));
        insta::assert_snapshot!("explained-json", json);
        let none = admin::ExplainResponse {
            answer: ClusterAnswer::Nothing.into(),
            nodes: Vec::new(),
        };
        let text = written(|to| explained_to_people(to, &reference, &none, NOW));
        assert_eq!(text, "No node has it. It starts empty.\n");
    }
}
