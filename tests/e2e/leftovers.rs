//! What a case must not leave, on any node: the check after each case, and the removal of what an
//! interrupted run has left.

use crate::cluster::{Cluster, eventually, succeed};
use crate::env::{Env, LABEL, items};

/// Takes away what an earlier run has left on nodes that stayed up, because it was ended in the
/// middle.
pub(crate) fn sweep(cluster: &Cluster) {
    succeed(&mut cluster.kubectl(&[
        "delete",
        "namespaces",
        "--selector",
        LABEL,
        "--wait",
        "--timeout=120s",
    ]));
    for node in cluster.nodes() {
        forget(&node, &["artifacts"]);
    }
}

/// Forgets what was sealed on a node, as far as a list of the driver's goes.
pub(crate) fn forget(node: &Cluster, list: &[&str]) {
    for artifact in node.driver_list(list) {
        if let (Some(reference), Some(tenant)) =
            (artifact["reference"].as_str(), artifact["tenant"].as_str())
        {
            let output = node.driver(&["destroy", reference, "--tenant", tenant]);
            assert!(
                output.status.success(),
                "{reference}: {}",
                String::from_utf8_lossy(&output.stderr)
            );
        }
    }
    eventually("all artifacts are gone", || {
        let _ = node.driver(&["reap"]);
        node.driver_list(list).is_empty().then_some(())
    });
}

impl Env<'_> {
    /// Checks that the case leaves nothing once its pods are gone: no mount, no directory, no
    /// record. Sealed content is meant to stay, so it is checked and then destroyed.
    pub(crate) fn assert_nothing_left(&self) {
        self.settled();
        for node in self.cluster.nodes() {
            self.assert_nothing_left_on(&node);
        }
    }

    fn assert_nothing_left_on(&self, node: &Cluster) {
        let name = node.name();
        let mounts = node.volume_mounts();
        assert!(mounts.is_empty(), "mounts are left on {name}: {mounts:#?}");
        for directory in ["volumes", "pending", "incoming"] {
            let left = node.in_pool(directory);
            assert!(
                left.is_empty(),
                "left in the {directory} of {name}'s pool: {left:?}"
            );
        }
        // kubelet removes them after it has let the API forget the pod.
        eventually("no directory is left of a pod", || {
            let pods = node.get(&["pods", "--all-namespaces"]);
            let alive: Vec<&str> = items(&pods)
                .filter_map(|pod| pod["metadata"]["uid"].as_str())
                .collect();
            let directories = node.pod_directories();
            directories
                .iter()
                .all(|uid| alive.contains(&uid.as_str()))
                .then_some(())
        });
        forget(node, &["artifacts", "--tenant", self.namespace()]);
        eventually("the trash is empty", || {
            node.in_pool("trash").is_empty().then_some(())
        });
        let check = node.driver(&["check", "--output=json"]);
        assert!(
            check.status.success(),
            "the pool of {name} is not sound: {}{}",
            String::from_utf8_lossy(&check.stdout),
            String::from_utf8_lossy(&check.stderr)
        );
    }

    /// Prints the first things that a person would look at.
    pub(crate) fn explain(&self) {
        let within = self.within();
        for arguments in [
            &["get", "pods", "--output=wide", &within][..],
            &["get", "events", "--sort-by=.lastTimestamp", &within],
            &["get", "pods", "--namespace=baggageclaim", "--output=wide"],
            &[
                "logs",
                "--namespace=baggageclaim",
                "--selector=app.kubernetes.io/name=baggageclaim",
                "--prefix",
                "--all-containers",
                "--tail=20",
            ],
        ] {
            eprintln!("$ kubectl {}", arguments.join(" "));
            let _ = self
                .cluster
                .kubectl(arguments)
                .stdout(std::io::stderr())
                .status();
        }
        for node in self.cluster.nodes() {
            eprintln!("{}$ baggageclaim volumes --output=wide", node.name());
            let volumes = node.driver(&["volumes", "--output=wide"]);
            eprintln!("{}", String::from_utf8_lossy(&volumes.stdout));
        }
    }
}
