//! The shared tier: deploy/ with the component, as docs/share-content.md shows it, and a real S3
//! server on the node. Content outlives the node's disk; a wrong key harms no pod.

use std::fs;
use std::path::Path;

use serde_json::Value;
use tempfile::TempDir;

use crate::cluster::{Cluster, eventually, succeed};
use crate::env::{Env, items};

const PAGE: &str = "docs/share-content.md";
const COMPONENT: &str = "deploy/components/shared-tier";
/// The server's name in `cluster/daemons.sh`, its address and its directory there.
const SERVER: &str = "versitygw";
const ADDRESS: &str = "10.99.0.1/7070";
const DATA: &str = "/var/lib/s3";
/// The key in `cluster/daemons.sh`.
pub(super) const KEY: [&str; 2] = ["e2e", "e2e-secret"];
const KINDS: [&str; 3] = ["artifact/made", "task-cache/made", "resource-cache/made"];

pub(super) fn shared_tier(env: &Env) {
    let cluster = env.cluster;
    let storage = Storage::start(cluster);
    let tier = Tier::install(cluster, &storage, "not-the-secret");

    // The storage refuses the key. Pods run, and one of them is told.
    let made = env.make("made");
    env.apply_with("reader.yaml", &[("NAME", "second"), ("FROM", KINDS[0])]);
    env.succeeded("second");
    let told = || {
        let pods = ["made", "second"].iter();
        let told = pods.flat_map(|pod| env.warnings(pod));
        told.filter(|told| told.contains("neither fetched nor shared"))
            .collect::<Vec<_>>()
    };
    eventually("a pod is told", || (!told().is_empty()).then_some(()));
    env.apply_with("reader.yaml", &[("NAME", "third"), ("FROM", KINDS[0])]);
    env.succeeded("third");
    assert_eq!(env.warnings("third"), [""; 0]);
    let warnings = told();
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert!(warnings[0].contains("access is denied"), "{warnings:?}");
    let status = tier.exec(&["status"]);
    assert!(status.contains("access is denied"), "{status}");
    assert_eq!(tier.metric("shared_usable"), "0");

    // With the right key, the driver uploads what the node has.
    tier.key(KEY[1]);
    tier.restart();
    for reference in KINDS {
        env.event("made", &[reference, "is in the shared tier"]);
    }
    assert_eq!(tier.metric("shared_usable"), "1");
    assert_eq!(tier.metric("shared_uploads_total"), "3");
    let shown = tier.exec(&["artifacts", "-o", "wide"]);
    assert!(shown.contains("SHARED"), "{shown}");
    for artifact in env.list("artifacts") {
        assert_eq!(artifact["shared"], "yes", "{artifact}");
    }
    // The image has nothing but the program.
    let listed = tier.exec(&["shared", "ls", "-n", env.namespace()]);
    for reference in KINDS {
        assert!(listed.contains(reference), "{listed}");
    }
    let verified = tier.exec(&["shared", "verify", "-n", env.namespace()]);
    assert_eq!(verified, "3 names and 3 layers checked, 0 damaged.\n");
    tier.collect();

    let last = ends_while_uploads_wait(env, &storage, &tier);
    // A node that has nothing.
    tier.new_node();
    assert_eq!(env.artifacts(), [""; 0]);
    let reference = "artifact/last";
    assert_eq!(env.read(reference), format!("==> ./text <==\n{last}"));
    env.apply_with("reader.yaml", &[("NAME", "elsewhere"), ("FROM", KINDS[0])]);
    env.succeeded("elsewhere");
    assert_eq!(
        env.logs("elsewhere"),
        format!("==> ./text <==\n{made}"),
        "the content of the first node"
    );
    env.event("elsewhere", &["fetching", KINDS[0]]);
    let forked = format!("forked {}", KINDS[0]);
    env.event("elsewhere", &[&forked, "fetched from the shared tier"]);
    env.hold(&KINDS.map(|reference| (reference, "text", &*made)));
    for (kind, fetched) in [
        ("output", "2"),
        ("resource-cache", "1"),
        ("task-cache", "1"),
    ] {
        let fetches = format!("fetches_total{{kind=\"{kind}\",source=\"shared\"}}");
        assert_eq!(tier.metric(&fetches), fetched, "{kind}");
    }
    let status = tier.exec(&["status"]);
    assert!(!status.contains("denied"), "{status}");
}

/// The driver is told to end while what a pod has committed waits for a storage that is away. The
/// storage comes back then, and the driver uploads before it ends. Returns the pod's text.
fn ends_while_uploads_wait(env: &Env, storage: &Storage<'_>, tier: &Tier<'_>) -> String {
    storage.kill();
    let text = env.make("last");
    eventually("the uploads fail and wait", || {
        let failed = tier.metric("shared_upload_failures_total") != "0";
        (failed && tier.metric("shared_uploads_waiting") == "3").then_some(())
    });
    let log = env.cluster.follow_driver_log();
    tier.delete_driver(&["--wait=false"]);
    eventually("the driver is told to end", || {
        let told = log.so_far().contains("waiting content is uploaded first");
        told.then_some(())
    });
    storage.run();
    // No other driver takes its place.
    tier.delete_driver(&["--wait", "--ignore-not-found"]);
    text
}

/// An S3 server on the node, with one empty bucket. It ends when this is dropped.
pub(super) struct Storage<'a> {
    cluster: &'a Cluster,
    pub(super) url: String,
}

impl<'a> Storage<'a> {
    /// On the first node of the cluster, whose address all nodes reach.
    pub(super) fn start(cluster: &'a Cluster) -> Self {
        // A node that stayed up may have the objects of an earlier run.
        let bucket = format!("rm -rf {DATA} && mkdir -p {DATA}/ci-cache");
        cluster.shell(&bucket, true);
        let storage = Self {
            cluster,
            url: format!(
                "s3://ci-cache/prod?endpoint=http://{}&allow-http=true&region=us-east-1",
                ADDRESS.replace('/', ":")
            ),
        };
        storage.run();
        storage
    }

    fn run(&self) {
        self.cluster.script(&["daemon", "start", SERVER]);
        let answers = format!("(exec 3<>/dev/tcp/{ADDRESS}) 2>/dev/null");
        let wait =
            format!("for _ in {{1..400}}; do ! {answers} || exit 0; sleep 0.05; done; exit 1");
        self.cluster.shell(&wait, true);
    }

    fn kill(&self) {
        self.cluster.script(&["daemon", "kill", SERVER]);
    }
}

impl Drop for Storage<'_> {
    fn drop(&mut self) {
        self.kill();
        self.cluster.shell(&format!("rm -rf {DATA}"), true);
    }
}

/// The drivers with a shared tier. When this is dropped they are as they were: the next case needs
/// that.
struct Tier<'a> {
    cluster: &'a Cluster,
    deploy: TempDir,
}

impl<'a> Tier<'a> {
    /// Installs the overlay of the page, for this storage.
    fn install(cluster: &'a Cluster, storage: &Storage<'_>, secret: &str) -> Self {
        let deploy = TempDir::new().expect("a temporary directory");
        cluster.shell(
            &format!("cp -r deploy '{}'", deploy.path().display()),
            false,
        );
        let tier = Self { cluster, deploy };
        let ours = tier.overlay();
        fs::create_dir(&ours).expect("it is new");
        // The base of another platform is its overlay.
        let overlay = replaced(
            &block("# kustomization.yaml"),
            &[
                ("../../base", &format!("../{}", cluster.overlay())),
                ("registry.example.org", "docker.io/library"),
            ],
        );
        fs::write(ours.join("kustomization.yaml"), overlay).expect("write");
        let parameters = block("# tier.yaml");
        let documented = parameters
            .lines()
            .find_map(|line| line.split_once("_SHARED: "));
        let (_, documented) = documented.expect("it has the URL");
        let parameters = replaced(&parameters, &[(documented, &storage.url)]);
        fs::write(ours.join("tier.yaml"), parameters).expect("write");
        tier.key(secret);
        tier.apply();
        tier
    }

    fn overlay(&self) -> std::path::PathBuf {
        self.deploy.path().join("deploy/overlays/ours")
    }

    fn apply(&self) {
        let apply = &["apply", "--validate=strict", "--kustomize"];
        succeed(self.cluster.kubectl(apply).arg(self.overlay()));
        self.cluster.driver_ready();
    }

    fn kubectl(&self, arguments: &[&str]) -> String {
        let within = ["--namespace=baggageclaim"];
        succeed(self.cluster.kubectl(&within).args(arguments))
    }

    /// The Secret of the page, with this key.
    fn key(&self, secret: &str) {
        let delete = [
            "delete",
            "secret",
            "baggageclaim-shared",
            "--ignore-not-found",
        ];
        self.kubectl(&delete);
        self.kubectl(&[
            "create",
            "secret",
            "generic",
            "baggageclaim-shared",
            &format!("--from-literal=AWS_ACCESS_KEY_ID={}", KEY[0]),
            &format!("--from-literal=AWS_SECRET_ACCESS_KEY={secret}"),
        ]);
    }

    fn restart(&self) {
        self.kubectl(&["rollout", "restart", "daemonset/baggageclaim-node"]);
        self.cluster.driver_ready();
    }

    /// A verb, run in the driver's container.
    fn exec(&self, verb: &[&str]) -> String {
        let exec = ["exec", "daemonset/baggageclaim-node", "--", "/baggageclaim"];
        self.kubectl(&[&exec, verb].concat())
    }

    /// The value of a metric of the driver.
    fn metric(&self, name: &str) -> String {
        let pods = self.cluster.get(&["pods", "--namespace=baggageclaim"]);
        let is_driver = |pod: &&Value| {
            let labels = &pod["metadata"]["labels"];
            labels["app.kubernetes.io/component"] == "node"
                && pod["metadata"]["deletionTimestamp"].is_null()
        };
        let pod = items(&pods).find(is_driver).expect("a driver");
        let pod = pod["metadata"]["name"].as_str().expect("a name");
        let page = format!("/api/v1/namespaces/baggageclaim/pods/{pod}:9808/proxy/metrics");
        let metrics = self.kubectl(&["get", "--raw", &page]);
        let line = format!("baggageclaim_{name} ");
        let found = metrics.lines().find_map(|text| text.strip_prefix(&line));
        found
            .unwrap_or_else(|| panic!("no {line}:\n{metrics}"))
            .to_owned()
    }

    /// Runs the collector as its schedule would.
    fn collect(&self) {
        let from = "--from=cronjob/baggageclaim-shared-gc";
        self.kubectl(&["create", "job", "collects", from]);
        self.kubectl(&[
            "wait",
            "--for=condition=complete",
            "job/collects",
            "--timeout=60s",
        ]);
        let told = self.kubectl(&["logs", "job/collects"]);
        assert!(told.contains("0 objects"), "{told}");
        self.kubectl(&["delete", "job", "collects", "--wait"]);
    }

    fn delete_driver(&self, how: &[&str]) {
        let delete = [
            "delete",
            "daemonset/baggageclaim-node",
            "--cascade=foreground",
        ];
        self.kubectl(&[&delete, how].concat());
    }

    /// Puts an empty disk into the node, whose driver is deleted.
    fn new_node(&self) {
        let pool = "/var/lib/baggageclaim";
        self.cluster
            .shell(&format!("find {pool} -mindepth 1 -delete"), true);
        self.apply();
    }
}

impl Drop for Tier<'_> {
    fn drop(&mut self) {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let before = root.join("deploy/overlays").join(self.cluster.overlay());
        succeed(self.cluster.kubectl(&["apply", "--kustomize"]).arg(before));
        for file in ["gc.yaml", "networkpolicy.yaml", "parameters.yaml"] {
            let file = root.join(COMPONENT).join(file);
            let delete = &["delete", "--ignore-not-found", "--wait", "--filename"];
            succeed(self.cluster.kubectl(delete).arg(file));
        }
        self.kubectl(&["delete", "secret", "baggageclaim-shared"]);
        self.cluster.driver_ready();
    }
}

/// The YAML block of the page that begins with this line.
fn block(first: &str) -> String {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join(PAGE);
    let page = fs::read_to_string(page).expect(PAGE);
    let mut blocks = page.split("```yaml\n").skip(1);
    let block = blocks.find(|block| block.starts_with(first));
    let block = block.unwrap_or_else(|| panic!("{PAGE}: no block begins with {first}"));
    block.split("```").next().expect("it ends").to_owned()
}

fn replaced(text: &str, changes: &[(&str, &str)]) -> String {
    changes.iter().fold(text.to_owned(), |text, (old, new)| {
        assert_eq!(text.matches(old).count(), 1, "{old}\n{text}");
        text.replace(old, new)
    })
}
