//! The memory of a collection. A process of its own collects, so that nothing of another test is
//! counted.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use baggageclaim::model::{ArtifactId, Tenant};
use baggageclaim::shared::{Collector, ObjectId, Url};
use serde_json::{Value, json};

use crate::collect::now;
use crate::common::{Fs, require_lab};
use crate::tier::{TIMES, id, never, runtime};

/// The directory in which the process collects.
const PLACE: &str = "BAGGAGECLAIM_TEST_SHARED_PLACE";
const ENTRY: &str = "bounds::the_process_that_is_measured";

const NAMES: u64 = 5000;
/// The layers of each name.
const LAYERS: u64 = 4;
/// The most bytes of memory for each name, with its manifest and its layers.
const MOST: u64 = 1700;

/// Bytes by which the resident memory was higher at its peak than before.
fn rise(act: impl FnOnce()) -> u64 {
    let field = |name: &str| {
        let status = fs::read_to_string("/proc/self/status").expect("status");
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        let number = line.and_then(|line| line.split_whitespace().next());
        let number = number.expect("it is there").parse::<u64>();
        number.expect("a number") << 10
    };
    // Resets the peak (proc(5)).
    fs::write("/proc/self/clear_refs", "5").expect("clear_refs");
    let before = field("VmRSS:");
    act();
    field("VmHWM:").saturating_sub(before)
}

/// The other process. Without a place there is nothing to do.
#[test]
fn the_process_that_is_measured() {
    let Some(place) = std::env::var_os(PLACE).map(PathBuf::from) else {
        return;
    };
    let url = format!("file://{}", place.join("tier").display());
    let url: Url = url.parse().expect("a URL");
    let runtime = runtime();
    let store = url.open(runtime.handle().clone(), TIMES).expect("open");
    let collect = |tenant: &str, names: u64| {
        let tenant: Tenant = tenant.parse().expect("a label");
        let collector = Collector {
            dry_run: true,
            ..Collector::new(&store, &tenant, id())
        };
        let done = collector.run(now(), &never).expect("collect");
        let found = (done.names, done.manifests, done.layers, done.unreadable);
        assert_eq!(found, (names, names, names * LAYERS, 0), "{done:?}");
    };
    // The program's own pages and threads.
    collect("small", NAMES / 50);
    let rise = rise(|| collect("large", NAMES));
    fs::write(place.join("rise"), rise.to_string()).expect("write");
}

/// Names that each show their own manifest, with its own layers.
fn fill(tenant: &Path, names: u64) {
    let write = |key: &str, bytes: &[u8]| {
        let path = tenant.join(key);
        fs::create_dir_all(path.parent().expect("it has one")).expect("mkdir");
        fs::write(path, bytes).expect("write");
    };
    let label = tenant.file_name().and_then(|name| name.to_str());
    for number in 0..names {
        let artifact = ArtifactId::from_bits(u128::from(number));
        let publication = ObjectId::from_bits(u128::from(number));
        let name = json!({
            "format": 1, "tenant": label, "reference": format!("task-cache/{number}"),
            "number": 1, "write": publication, "committed": 1, "state": "content",
            "artifact": artifact, "publication": publication,
            "manifest": format!("sha256:{number:064x}"),
        });
        let name = serde_json::to_vec(&name).expect("JSON");
        write(&format!("names/task-cache/{number}"), &name);
        let layers = (number * LAYERS..(number + 1) * LAYERS).map(|layer| {
            write(&format!("layers/{layer:064x}/{publication}"), b"layer");
            json!({
                "digest": format!("sha256:{layer:064x}"), "upload": publication,
                "bytes": 5, "tail": 4, "content": 3, "table": 1,
            })
        });
        let layers: Vec<Value> = layers.collect();
        let manifest = json!({
            "format": 1, "tenant": label, "reference": format!("task-cache/{number}"),
            "artifact": artifact, "publication": publication, "layers": layers, "made": 1,
        });
        let manifest = serde_json::to_vec(&manifest).expect("JSON");
        write(&format!("manifests/{artifact}-{publication}"), &manifest);
    }
}

#[test]
fn a_collection_needs_little_memory_for_a_name() {
    let lab = require_lab!(Fs::Tmpfs);
    fill(&lab.path().join("tier/v1/small"), NAMES / 50);
    fill(&lab.path().join("tier/v1/large"), NAMES);
    let output = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", ENTRY, "--nocapture"])
        .env(PLACE, lab.path())
        .stdin(Stdio::null())
        .output()
        .expect("it starts");
    let said = [output.stdout, output.stderr].concat();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&said)
    );
    let rise = fs::read_to_string(lab.path().join("rise")).expect("read");
    let rise: u64 = rise.parse().expect("a number");
    println!("{} bytes for each of {NAMES} names", rise / NAMES);
    assert!(rise < NAMES * MOST, "{rise} bytes for {NAMES} names");
}
