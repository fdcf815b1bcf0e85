//! The driver is upgraded like docs/install.md says, while pods run: deploy/ gets another image and
//! another setting, and is applied again. Then the way back.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde_json::Value;
use tempfile::TempDir;

use crate::cluster::{Cluster, eventually, succeed};
use crate::env::{Env, items};
use crate::step::Step;

const IMAGE: &str = "docker.io/library/baggageclaim-csi";
const OLD: &str = env!("CARGO_PKG_VERSION");
const NEW: &str = "next";
/// A setting that can be seen from outside.
const SETTING: [&str; 2] = ["BAGGAGECLAIM_INPUT_WAIT", "44s"];

pub(super) fn upgraded(env: &Env) {
    let cluster = env.cluster;
    let mut before = Step::runs(env, "before");
    let old = cluster.driver_process();
    assert_eq!(image(cluster), format!("{IMAGE}:{OLD}"));

    let (begin, followed) = (SystemTime::now(), cluster.follow_driver_log());
    let upgrade = Upgrade::begin(cluster);
    // A pod that comes in the middle of it starts, whichever of the two drivers is there when
    // kubelet has got so far.
    let mut meanwhile = Step::comes(env, "meanwhile");
    cluster.driver_ready();
    assert_ne!(cluster.driver_process(), old);
    assert_eq!(image(cluster), format!("{IMAGE}:{NEW}"));
    env.ready("meanwhile");
    eventually("it is logged who has given it its volumes", || {
        let logs = [followed.so_far(), cluster.driver_log(begin)];
        let published = logs.iter().any(|log| has_published(log, env, "meanwhile"));
        published.then_some(())
    });
    drop(followed);
    meanwhile.works();
    before.works();
    // The new setting applies even to volumes that the last driver published.
    env.apply_with(
        "reader.yaml",
        &[("NAME", "asks"), ("FROM", "artifact/before")],
    );
    env.event("asks", &[SETTING[1], "pod before is still making it"]);
    before.ends();
    env.succeeded("asks");

    drop(upgrade);
    assert_eq!(image(cluster), format!("{IMAGE}:{OLD}"));
    meanwhile.works();
    meanwhile.ends();
    set_by_hand(cluster);
}

/// A variable that docs/troubleshooting.md sets stays when deploy/ is applied again, until it is
/// removed as the page says.
fn set_by_hand(cluster: &Cluster) {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/troubleshooting.md");
    let page = fs::read_to_string(page).expect("a page");
    let commands = page.lines().filter_map(|line| line.strip_prefix("$ "));
    let commands = commands.filter(|line| line.contains(" set env daemonset/baggageclaim-node "));
    let [set, remove] = commands.collect::<Vec<_>>()[..] else {
        panic!("a command and the way back");
    };
    let is_set = || {
        let daemons = ["daemonset/baggageclaim-node", "--namespace=baggageclaim"];
        let daemons = cluster.get(&daemons);
        let variables = &daemons["spec"]["template"]["spec"]["containers"][0]["env"];
        let mut variables = variables.as_array().into_iter().flatten();
        variables.any(|variable| variable["name"] == "BAGGAGECLAIM_LOG")
    };
    assert!(!is_set());
    cluster.shell(set, false);
    apply(cluster, &overlay(cluster));
    assert!(is_set());
    cluster.shell(remove, false);
    assert!(!is_set());
    cluster.driver_ready();
}

/// Whether a log has a publish for a pod that succeeded.
fn has_published(log: &str, env: &Env, pod: &str) -> bool {
    let lines = log.lines().map(serde_json::from_str::<Value>);
    // The last one may not be whole yet.
    let mut answers = lines.filter_map(Result::ok).filter(|line| {
        let span = &line["span"];
        line["code"] == "OK" && span["csi.method"] == "NodePublishVolume"
    });
    answers.any(|line| {
        let span = &line["span"];
        span["tenant"] == *env.namespace() && span["pod"] == *pod
    })
}

/// The spec of the driver's pod.
fn image(cluster: &Cluster) -> String {
    let selector = "--selector=app.kubernetes.io/component=node";
    let pods = cluster.get(&["pods", "--namespace=baggageclaim", selector]);
    let [pod] = &items(&pods).collect::<Vec<_>>()[..] else {
        panic!("one driver: {pods}");
    };
    let image = pod["spec"]["containers"][0]["image"].as_str();
    image.expect("it has one").to_owned()
}

/// Another version of the driver is installed. When this is dropped it is the old one again: the
/// next case needs it.
struct Upgrade<'a>(&'a Cluster);

impl<'a> Upgrade<'a> {
    fn begin(cluster: &'a Cluster) -> Self {
        // The same image under another name: there is no other version.
        ctr(
            cluster,
            &["tag", &format!("{IMAGE}:{OLD}"), &format!("{IMAGE}:{NEW}")],
        );
        let upgrade = Self(cluster);
        let copy = TempDir::new().expect("a temporary directory");
        cluster.shell(&format!("cp -r deploy '{}'", copy.path().display()), false);
        let deploy = copy.path().join("deploy");
        let overlay = format!("overlays/{}", cluster.overlay());
        let tag = format!("newTag: {OLD}\n");
        edit(
            &deploy.join(&overlay).join("kustomization.yaml"),
            &tag,
            &tag.replace(OLD, NEW),
        );
        let [name, value] = SETTING;
        edit(
            &deploy.join("node/daemonset.yaml"),
            "        env:\n",
            &format!("        env:\n        - {{name: {name}, value: {value}}}\n"),
        );
        apply(cluster, &deploy.join(overlay));
        upgrade
    }
}

impl Drop for Upgrade<'_> {
    fn drop(&mut self) {
        apply(self.0, &overlay(self.0));
        self.0.driver_ready();
        ctr(self.0, &["rm", &format!("{IMAGE}:{NEW}")]);
    }
}

/// The overlay that is installed.
fn overlay(cluster: &Cluster) -> PathBuf {
    let overlays = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/overlays");
    overlays.join(cluster.overlay())
}

fn apply(cluster: &Cluster, overlay: &Path) {
    succeed(cluster.kubectl(&["apply", "--kustomize"]).arg(overlay));
}

/// Something is done with the images on the node.
fn ctr(cluster: &Cluster, arguments: &[&str]) {
    let ctr = [
        "enter",
        "ctr",
        "--address=/run/containerd.sock",
        "--namespace=k8s.io",
        "images",
    ];
    cluster.script(&[&ctr, arguments].concat());
}

fn edit(file: &Path, old: &str, new: &str) {
    let text =
        fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    assert_eq!(text.matches(old).count(), 1, "{}: {old}", file.display());
    fs::write(file, text.replace(old, new)).expect("it can be written");
}
