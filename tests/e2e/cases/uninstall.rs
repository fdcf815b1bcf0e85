//! The driver is uninstalled by the exact commands of docs/install.md, from a node with a used
//! pool: nothing is left. Then it is installed again in the same way, for the next cases.

use std::fs;
use std::path::Path;

use tempfile::TempDir;

use crate::cluster::{Cluster, POOL, eventually, succeed};
use crate::env::{Env, items};

/// The manifest that people copy, and the driver's name in it.
const PAGE: &str = "docs/install.md";
const DRIVER: &str = "baggageclaim.csi.concourse-ci.org";
/// The mount of the overlay for trials.
const POOL_IMAGE: &str = "/var/lib/baggageclaim.img";
/// Kubelet's directory, on the page.
const KUBELET: &str = "/var/lib/kubelet";
/// The labels of a node that say where its volumes can be used.
const TOPOLOGY: [&str; 2] = [
    "topology.baggageclaim.csi.concourse-ci.org/backend",
    "topology.baggageclaim.csi.concourse-ci.org/node",
];

/// A policy for another name than the case uses.
const POLICY: &str = "apiVersion: baggageclaim.concourse-ci.org/v1alpha1
kind: CachePolicy
metadata: {name: main}
spec:
  rules:
  - names: [task-cache/main-*]
    commit: {serviceAccounts: [release]}
";

#[expect(
    clippy::too_many_lines,
    reason = "the uninstallation, in the order of the documentation"
)]
pub(super) fn uninstalled(env: &Env) {
    let cluster = env.cluster;
    env.make("made");
    env.apply("scratch.yaml");
    env.ready("scratch");

    // Only existing things can be missed at the end.
    let nodes = cluster.get(&["csinodes"]);
    for node in items(&nodes) {
        let drivers = node["spec"]["drivers"].as_array().into_iter().flatten();
        let mut ours = drivers.filter(|driver| driver["name"] == DRIVER);
        let ours = ours.next().unwrap_or_else(|| panic!("registered: {node}"));
        let keys = ours["topologyKeys"].as_array().into_iter().flatten();
        let mut keys: Vec<&str> = keys.filter_map(|key| key.as_str()).collect();
        keys.sort_unstable();
        assert_eq!(keys, TOPOLOGY, "{node}");
    }

    let mut commands = commands("Uninstall");
    let [
        users,
        claims,
        volumes,
        no_mirror,
        mirror,
        caches,
        bindings,
        save,
        delete,
        definitions,
        established,
        policies,
        on_nodes @ ..,
        labels,
    ] = &mut commands[..]
    else {
        panic!("{PAGE} tells too little: {commands:?}");
    };
    // The refusal names the pods that still need the driver. Pods that have ended are not in the
    // way.
    env.delete("pod/made");
    assert_eq!(users.run(cluster), format!("{}/scratch\n", env.namespace()));
    env.delete("pod/scratch");
    assert_eq!(users.run(cluster), "");
    let claim = Env::filled("claim.yaml", &[("NAME", "workspace")]);
    env.apply_text(&claim);
    env.ready("workspace");
    assert_eq!(
        claims.run(cluster),
        format!("{}/workspace\n", env.namespace())
    );
    env.delete("pod/workspace");
    env.delete("persistentvolumeclaim/workspace");
    eventually("no claim has data", || {
        claims.run(cluster).is_empty().then_some(())
    });
    // It was deleted without grace, so kubelet may not have heard of it yet; without the driver its
    // volume would stay.
    assert!(
        volumes.text.contains("/baggageclaim volumes"),
        "{volumes:?}"
    );
    eventually("no node has a volume", || {
        volumes.run(cluster).is_empty().then_some(())
    });
    assert_eq!(cluster.volume_mounts(), [""; 0]);

    // The caches of the namespace above, and others, may be shown.
    assert!(
        no_mirror.text.contains("BAGGAGECLAIM_MIRROR_CACHES=0"),
        "{no_mirror:?}"
    );
    no_mirror.run(cluster);
    assert!(mirror.text.contains("/mirrored"), "{mirror:?}");
    mirror.run(cluster);
    assert!(
        caches.text.starts_with("kubectl delete caches."),
        "{caches:?}"
    );
    caches.run(cluster);
    assert!(
        bindings.text.contains("validatingadmissionpolicybindings"),
        "{bindings:?}"
    );
    bindings.run(cluster);
    env.apply_text(POLICY);
    let saved = TempDir::new().expect("a temporary directory");
    let saved = saved.path().join("cachepolicies.yaml");
    for command in [&mut *save, &mut *policies] {
        assert!(command.text.contains(" cachepolicies.yaml"), "{command:?}");
        let file = format!(" '{}'", saved.display());
        command.text = command.text.replace(" cachepolicies.yaml", &file);
    }
    save.run(cluster);
    assert!(delete.text.starts_with("kubectl delete -k "), "{delete:?}");
    // The overlay that was installed.
    let installed = format!("overlays/{}", cluster.overlay());
    delete.text = delete.text.replace("overlays/host", &installed);
    delete.run(cluster);
    let namespaced = "pods,daemonsets,deployments,serviceaccounts,networkpolicies";
    for (kinds, selector) in [
        ("csidrivers", ""),
        ("storageclasses", ""),
        ("customresourcedefinitions", ""),
        ("validatingadmissionpolicies", ""),
        ("validatingadmissionpolicybindings", ""),
        ("namespaces", ""),
        ("clusterroles", ""),
        ("clusterrolebindings", ""),
        (namespaced, "--all-namespaces"),
    ] {
        let words = ["get", kinds, "--output=name", selector];
        let words = words.into_iter().filter(|word| !word.is_empty());
        let left = succeed(&mut cluster.kubectl(&words.collect::<Vec<_>>()));
        let ours = |name: &&str| name.contains("baggageclaim");
        assert_eq!(left.lines().find(ours), None, "{kinds}");
    }
    eventually("kubelet knows no such driver any more", || {
        let nodes = cluster.get(&["csinodes"]);
        let mut drivers =
            items(&nodes).flat_map(|node| node["spec"]["drivers"].as_array().into_iter().flatten());
        drivers.all(|driver| driver["name"] != DRIVER).then_some(())
    });
    assert_eq!(cluster.driver_processes(), [0; 0]);
    let mounts = cluster.volume_mounts();
    assert!(mounts.is_empty(), "mounts are left: {mounts:#?}");
    // In case it returns.
    assert!(cluster.on_node(POOL).join("pool.json").exists());
    assert!(!cluster.in_pool("layers").is_empty());

    let overlay = cluster.overlay();
    for command in on_nodes {
        assert!(command.on_node, "{command:?}");
        command.text = command.text.replace(KUBELET, cluster.kubelet());
        let is_due = match command.only.as_deref() {
            None => true,
            Some("overlays/loop only") => overlay == "loop",
            Some("not where a filesystem of its own is mounted") => !is_mounted(cluster, POOL),
            Some(other) => panic!("{PAGE} has a condition that this test cannot check: {other}"),
        };
        if is_due {
            command.run(cluster);
        }
    }
    // Kubelet leaves them, or the command would not be needed.
    for label in TOPOLOGY {
        let nodes = cluster.get(&["nodes"]);
        let mut nodes = items(&nodes).map(|node| &node["metadata"]["labels"]);
        assert!(nodes.all(|labels| labels[label].is_string()), "{label}");
    }
    labels.run(cluster);
    assert_none_left(cluster);

    definitions.run(cluster);
    established.run(cluster);
    policies.run(cluster);
    let found = env.get("cachepolicies.baggageclaim.concourse-ci.org/main");
    assert_eq!(
        found["spec"]["rules"][0]["names"][0], "task-cache/main-*",
        "{found}"
    );
    for mut command in installation() {
        command.text = command.text.replace("overlays/host", &installed);
        command.run(cluster);
    }
    cluster.driver_ready();
    assert!(env.artifacts().is_empty(), "{:?}", env.artifacts());
    env.make("made");
}

/// That nothing on the node tells that the driver was there, but an empty disk where it had one of
/// its own.
fn assert_none_left(cluster: &Cluster) {
    for directory in ["plugins", "plugins_registry"] {
        let path = cluster.on_node(&format!("{}/{directory}", cluster.kubelet()));
        let mut names = fs::read_dir(&path).expect("kubelet's").map(|entry| {
            let name = entry.expect("an entry").file_name();
            name.to_string_lossy().into_owned()
        });
        assert_eq!(
            names.find(|name| name.contains("baggageclaim")),
            None,
            "{directory}"
        );
    }
    assert!(!cluster.on_node(POOL_IMAGE).exists());
    if is_mounted(cluster, POOL) {
        assert_eq!(cluster.in_pool(""), [""; 0]);
    } else {
        assert!(!cluster.on_node(POOL).exists());
    }
    let nodes = cluster.get(&["nodes"]);
    for node in items(&nodes) {
        let labels = node["metadata"]["labels"].to_string();
        assert!(!labels.contains("baggageclaim"), "{labels}");
    }
}

fn is_mounted(cluster: &Cluster, path: &str) -> bool {
    let table = cluster.mount_table();
    table
        .lines()
        .any(|line| line.split(' ').nth(4) == Some(path))
}

/// A command of the page.
#[derive(Debug)]
struct Told {
    text: String,
    /// Lines after the prompt `#` are for root on each node, lines after `$` for a user of kubectl.
    on_node: bool,
    /// When it is to be run, in the page's words.
    only: Option<String>,
}

impl Told {
    fn run(&self, cluster: &Cluster) -> String {
        cluster.shell(&self.text, self.on_node)
    }
}

/// The commands of a section, in order.
fn commands(section: &str) -> Vec<Told> {
    blocks(section).into_iter().flatten().collect()
}

/// The commands that install the driver once its image is where nodes find it.
fn installation() -> Vec<Told> {
    blocks("Install")
        .into_iter()
        .find(|block| block[0].text.starts_with("kubectl apply -k "))
        .expect("the page tells how")
}

/// The same, block by block.
fn blocks(section: &str) -> Vec<Vec<Told>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(PAGE);
    let page = fs::read_to_string(path).expect(PAGE);
    let heading = format!("\n## {section}\n");
    let (_, text) = page.split_once(&heading).expect(section);
    let text = text.split("\n## ").next().unwrap_or_default();
    text.split("```console\n").skip(1).map(block).collect()
}

fn block(text: &str) -> Vec<Told> {
    let text = text.split("```").next().unwrap_or_default();
    let mut found: Vec<Told> = Vec::new();
    for line in text.lines() {
        let (prompt, rest) = line.split_at(line.len().min(2));
        if !matches!(prompt, "$ " | "# ") {
            let command = found.last_mut().expect("a block begins with a prompt");
            command.text = format!("{}\n{line}", command.text);
            continue;
        }
        let (text, only) = match rest.split_once(" # ") {
            Some((text, only)) => (text, Some(only.trim().to_owned())),
            None => (rest, None),
        };
        found.push(Told {
            text: text.trim().to_owned(),
            on_node: prompt == "# ",
            only,
        });
    }
    found
}
