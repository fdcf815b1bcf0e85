//! deploy/ on different platforms: kubelet's directory, the parts of it that the driver sees, and
//! the permissions that it needs. `make e2e` checks that the API server accepts the overlays.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use super::{Manifest, help, kustomize, manifests, root};

/// Where kubelet is when no overlay says otherwise.
const KUBELET: &str = "/var/lib/kubelet";

/// The overlays for a kubelet that is elsewhere, and where.
const ELSEWHERE: &[(&str, &str)] = &[
    ("k0s", "/var/lib/k0s/kubelet"),
    ("microk8s", "/var/snap/microk8s/common/var/lib/kubelet"),
];

#[test]
fn the_driver_is_shown_three_parts_of_kubelets_directory() {
    let daemons = read("node/daemonset.yaml");
    let pod = &daemons["spec"]["template"]["spec"];
    let volumes = list(&pod["volumes"]);
    let paths = volumes.iter().map(|volume| &volume["hostPath"]["path"]);
    let paths: BTreeSet<&str> = paths.map(|path| path.as_str().expect("a path")).collect();
    // Not the whole of it: kubelet's client key is in pki/.
    let parts = ["pods", "plugins", "plugins_registry"].map(|part| format!("{KUBELET}/{part}"));
    let mut expected: BTreeSet<&str> = parts.iter().map(String::as_str).collect();
    expected.insert("/var/lib/baggageclaim");
    assert_eq!(paths, expected);
    for mount in list(&pod["containers"][0]["volumeMounts"]) {
        let name = &mount["name"];
        let path = mount["mountPath"].as_str().expect("a path");
        let volume = volumes.iter().find(|volume| volume["name"] == *name);
        let volume = volume.unwrap_or_else(|| panic!("{name} is no volume"));
        // Kubelet says paths as it sees them.
        assert_eq!(volume["hostPath"]["path"], path, "{name}");
        // The node must see mounts that are made there, and the container must lose mounts that are
        // removed there.
        let is_mounted_in = parts[..2].iter().any(|part| part == path);
        let propagation = &mount["mountPropagation"];
        assert_eq!(propagation == "Bidirectional", is_mounted_in, "{name}");
    }
}

#[test]
fn where_kubelet_is_elsewhere_an_overlay_says_so_in_every_place() {
    let base = read("node/daemonset.yaml");
    let base = &base["spec"]["template"]["spec"];
    assert!(help("node").contains("[env: BAGGAGECLAIM_KUBELET_DIR]"));
    for (overlay, directory) in ELSEWHERE {
        let kustomization = read(&format!("overlays/{overlay}/kustomization.yaml"));
        assert_eq!(
            kustomization["resources"],
            json!(["../../base"]),
            "{overlay}"
        );
        assert_eq!(kustomization["patches"], json!([{"path": "kubelet.yaml"}]));
        let differs = read(&format!("overlays/{overlay}/kubelet.yaml"));
        let pod = &differs["spec"]["template"]["spec"];
        let container = &pod["containers"][0];
        assert_eq!(container["name"], base["containers"][0]["name"]);
        let told = json!([{"name": "BAGGAGECLAIM_KUBELET_DIR", "value": directory}]);
        assert_eq!(container["env"], told, "{overlay}");
        // The base's, with the one directory in place of the other.
        let moved = |mut object: Value, field: &str| {
            let path = object.pointer(field).and_then(Value::as_str);
            let path = path.expect("a path").replace(KUBELET, directory);
            *object.pointer_mut(field).expect("it is there") = path.into();
            object
        };
        let mounts = list(&base["containers"][0]["volumeMounts"]);
        let mut expected = vec![json!({"$patch": "replace"})];
        expected.extend(mounts.into_iter().map(|mount| moved(mount, "/mountPath")));
        assert_eq!(list(&container["volumeMounts"]), expected, "{overlay}");
        let volumes = list(&base["volumes"]);
        let volumes = volumes.into_iter().filter(|each| each["name"] != "pool");
        let expected: Vec<Value> = volumes
            .map(|mut volume| {
                // That kubelet's directories must be there is said in the base.
                let path = volume["hostPath"].as_object_mut().expect("an object");
                path.remove("type");
                moved(volume, "/hostPath/path")
            })
            .collect();
        assert_eq!(list(&pod["volumes"]), expected, "{overlay}");
    }
}

/// The overlays.
pub(super) fn overlays() -> Vec<String> {
    let overlays = fs::read_dir(root().join("deploy/overlays")).expect("overlays");
    let names = overlays.map(|overlay| overlay.expect("an entry").file_name());
    names
        .map(|name| name.into_string().expect("text"))
        .collect()
}

#[test]
fn every_overlay_names_the_image_itself() {
    // The `images` of an overlay of an overlay find nothing: kustomize compares whole names, and
    // the inner one has changed this one.
    let mut found = 0;
    for Manifest { place, object } in manifests() {
        let resources = object["resources"].as_array().into_iter().flatten();
        let resources: Vec<&str> = resources.filter_map(Value::as_str).collect();
        if object["kind"] != "Kustomization" || place == "deploy/base/kustomization.yaml" {
            continue;
        }
        assert!(!resources.contains(&"../host"), "{place}: {resources:?}");
        if resources.contains(&"../../base") || resources.contains(&"../../node") {
            assert_eq!(object["images"][0]["name"], "baggageclaim-csi", "{place}");
            found += 1;
        }
    }
    // Pages show some, too.
    assert!(found > overlays().len(), "only {found} were found");
}

#[test]
fn the_image_that_an_overlay_names_is_that_of_every_pod() {
    let collector = "components: [../../components/shared-tier]\n";
    for overlay in overlays() {
        let file = format!("deploy/overlays/{overlay}/kustomization.yaml");
        let text = fs::read_to_string(root().join(&file)).expect(&file);
        let name = "newName: docker.io/library/baggageclaim-csi\n";
        assert_eq!(text.matches(name).count(), 1, "{file}");
        let ours = "registry.example.org/driver";
        let text = text.replace(name, &format!("newName: {ours}\n")) + collector;
        let Some(built) = kustomize::built(&overlay, &[("kustomization.yaml", &text)]) else {
            println!("skipped: there is no kubectl to build the overlays with");
            return;
        };
        let built = Value::from(built).to_string();
        // Both plugins and the collector.
        let pods = if overlay == "node" { 2 } else { 3 };
        assert_eq!(built.matches(ours).count(), pods, "{overlay}");
        let image = "\"image\":\"";
        let other = built.split(image).skip(1).find(|rest| {
            let image = rest.split('"').next().unwrap_or_default();
            image.contains("baggageclaim")
        });
        assert_eq!(other, None, "{overlay}");
    }
}

#[test]
fn every_overlay_is_on_the_page_about_installing() {
    let page = fs::read_to_string(root().join("docs/install.md")).expect("a page");
    let mut found = 0;
    for name in overlays() {
        let row = |line: &str| line.starts_with("| ") && line.contains(&format!("`{name}`"));
        assert!(page.lines().any(row), "{name} is in no table");
        found += 1;
    }
    assert!(found >= 2 + ELSEWHERE.len(), "only {found} were found");
    for (overlay, directory) in ELSEWHERE {
        let row = |line: &str| line.contains(&format!("`{overlay}`")) && line.contains(directory);
        assert!(page.lines().any(row), "{overlay}: {directory}");
    }
}

#[test]
fn openshift_admits_the_driver_and_the_pods_that_use_it() {
    // Its admission would let only privileged namespaces have inline volumes of a driver that does
    // not say so.
    let driver = read("node/csidriver.yaml");
    let label = "security.openshift.io/csi-ephemeral-volume-profile";
    assert_eq!(driver["metadata"]["labels"][label], "restricted");

    let text = fs::read_to_string(root().join("deploy/overlays/openshift/scc.yaml"));
    let objects: Vec<Value> = serde_saphyr::from_multiple(&text.expect("a file")).expect("objects");
    let [privileged, _, nonroot, _] = &objects[..] else {
        panic!("two roles, each with its binding: {objects:?}");
    };
    for pair in objects.chunks(2) {
        let [role, binding] = pair else {
            unreachable!("there are four");
        };
        assert_eq!(role["kind"], "Role");
        assert_eq!(binding["kind"], "RoleBinding");
        assert_eq!(binding["roleRef"]["name"], role["metadata"]["name"]);
        for object in [role, binding] {
            assert_eq!(object["metadata"]["namespace"], "baggageclaim");
        }
    }
    for (role, scc) in [(privileged, "privileged"), (nonroot, "nonroot-v2")] {
        // One verb on one object: the right to use it, in the driver's namespace.
        let right = json!([{
            "apiGroups": ["security.openshift.io"],
            "resources": ["securitycontextconstraints"],
            "resourceNames": [scc],
            "verbs": ["use"],
        }]);
        assert_eq!(role["rules"], right);
        let mut bindings = objects.iter();
        let binding = bindings.find(|it| it["roleRef"]["name"] == role["metadata"]["name"]);
        let subjects = list(&binding.expect("a binding")["subjects"]).into_iter();
        let accounts = subjects.map(|subject| {
            assert_eq!(subject["kind"], "ServiceAccount");
            assert_eq!(subject["namespace"], "baggageclaim");
            subject["name"].as_str().expect("a name").to_owned()
        });
        assert_eq!(accounts.collect::<BTreeSet<_>>(), accounts_for(scc));
    }
}

/// The service accounts whose pods in deploy/ need an SCC. `restricted-v2`, which every account may
/// use, allows neither privileged containers nor a user that the pod chooses.
fn accounts_for(scc: &str) -> BTreeSet<String> {
    let mut accounts = BTreeSet::new();
    for Manifest { place, object } in manifests() {
        let spec = &object["spec"];
        for spec in [spec, &spec["jobTemplate"]["spec"]] {
            let pod = &spec["template"]["spec"];
            let account = pod["serviceAccountName"].as_str();
            let Some(account) = account.filter(|_| place.starts_with("deploy/")) else {
                continue;
            };
            let contexts = list(&pod["containers"]).into_iter();
            let contexts = contexts.map(|container| container["securityContext"].clone());
            let contexts: Vec<Value> = contexts.chain([pod["securityContext"].clone()]).collect();
            let needed = if contexts.iter().any(|it| it["privileged"] == true) {
                "privileged"
            } else if contexts.iter().any(|it| it["runAsUser"].is_number()) {
                "nonroot-v2"
            } else {
                continue;
            };
            if needed == scc {
                accounts.insert(account.to_owned());
            }
        }
    }
    assert!(!accounts.is_empty(), "{scc}");
    accounts
}

fn read(file: &str) -> Value {
    let path = Path::new("deploy").join(file);
    let text = fs::read_to_string(root().join(&path));
    let text = text.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_saphyr::from_str(&text).expect(file)
}

fn list(value: &Value) -> Vec<Value> {
    value.as_array().expect("a list").clone()
}
