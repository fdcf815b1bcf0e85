//! Crashes without a single point: a reboot, files open across a restart, a killed start, and
//! states between two points that are arranged by hand.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use baggageclaim::engine::failpoint::Point;
use serde_json::Value;

use super::common::{Fs, Snapshot, require_lab};
use super::driver::{Call, Connection, Place};
use super::world::{
    World, assert_no_findings, assert_nothing_left, entries, names, outcome, publish, publish_also,
    unpublish,
};
use super::{BTRFS, OVERLAY, TO_THE_POINT, settle_in};

fn arm(on: &mut Connection, point: &str) {
    on.must(&Call::Arm {
        point: point.to_owned(),
        visit: 1,
    });
}

/// Where the volume of a promised seal lies, found by whose it is.
fn pending(place: &Place, volume: &str) -> PathBuf {
    let pending = place.pool.join("pending");
    let is_its = |name: &String| record(&pending.join(name))["id"] == place.id(volume);
    let name = entries(&pending).into_iter().find(is_its);
    pending.join(name.expect("it is pending"))
}

fn record(directory: &Path) -> Value {
    let bytes = fs::read(directory.join("volume.json")).expect("a record");
    serde_json::from_slice(&bytes).expect("JSON")
}

/// The parts of a reboot that a test can do: no process, no mount, no page cache, and records of an
/// earlier boot.
fn reboot(place: &Place) {
    place.lab.remount();
    for directory in ["volumes", "pending", "trash"] {
        let directory = place.pool.join(directory);
        for name in entries(&directory) {
            let file = directory.join(name).join("volume.json");
            let Ok(bytes) = fs::read(&file) else { continue };
            let mut record: Value = serde_json::from_slice(&bytes).expect("JSON");
            record["boot"] = "another-boot".into();
            fs::write(&file, record.to_string()).expect("write");
        }
    }
}

fn comes_back_after_a_reboot(place: &Place) {
    let mut driver = place.start(None);
    let mut on = driver.connect().expect("a process");
    let mut world = settle_in(place, &mut on);
    let waiting = [("type", "output"), ("name", "waiting")];
    world.start_pod(
        place,
        &mut on,
        "waiting",
        Some("artifact/waiting"),
        &waiting,
    );
    on.must(&unpublish(place, "waiting"));
    on.must(&Call::Settle);
    let thrown = [("type", "output"), ("name", "thrown")];
    world.start_pod(place, &mut on, "thrown", None, &thrown);
    on.must(&outcome("thrown", false));
    on.must(&unpublish(place, "thrown"));
    // Its content is in its layer and can be forked, and nothing of it is durable.
    let cut = [("type", "output"), ("name", "cut")];
    world.start_pod(place, &mut on, "cut", Some("artifact/cut"), &cut);
    on.must(&outcome("cut", true));
    arm(&mut on, "commit-synced");
    // It may die before the answer.
    let _answer = on.call(&unpublish(place, "cut"));
    assert!(driver.dies_within(TO_THE_POINT));

    reboot(place);
    world.live.clear();
    let mut driver = place.start(None);
    let mut on = driver.connect().expect("it starts");
    assert_eq!(on.must(&Call::Volumes), Value::Array(Vec::new()));
    on.must(&Call::Settle);
    on.must(&Call::Reap);
    for directory in ["volumes", "pending", "incoming", "trash"] {
        assert_eq!(entries(&place.pool.join(directory)), [""; 0], "{directory}");
    }
    assert_eq!(entries(&place.pool.join("layers")).len(), 2, "base and t");
    assert_no_findings(&mut on);
    world.check_sealed(place, &mut on);
    let told = on.must(&outcome("waiting", true));
    assert_eq!(told["news"], 0, "a pod of another boot is unknown");

    // The same pods, the same volume ids, the same targets, which are empty directories now.
    let fork = [("type", "input"), ("from", "artifact/base")];
    on.must(&publish(place, "bystander-fork", &fork));
    world.note_live(place, "bystander-fork", None);
    let content = world.sealed["artifact/base"].clone();
    world.live.get_mut("bystander-fork").expect("live").content = content;
    world.check_live(place);
    let output = [("type", "output"), ("name", "later")];
    on.must(&publish(place, "bystander-maker", &output));
    let found = Snapshot::of(&place.target("bystander-maker"));
    assert!(found.is_empty(), "it starts again: {found}");
    world.note_live(place, "bystander-maker", Some("artifact/later"));
    world.use_live(place);
    // And a pod that does not come back: kubelet unpublishes a volume that the driver does not
    // know.
    on.must(&unpublish(place, "bystander-scratch"));
    on.must(&unpublish(place, "never-heard-of"));
    world.end(place, &mut on);
    driver.shut_down();
}

#[test]
fn after_a_reboot_sealed_content_exists_and_the_same_pods_start_again() {
    comes_back_after_a_reboot(&Place::new(require_lab!(Fs::Ext4), OVERLAY));
}

#[test]
fn after_a_reboot_on_btrfs_too() {
    comes_back_after_a_reboot(&Place::new(require_lab!(Fs::Btrfs), BTRFS));
}

fn state_of(place: &Place, on: &mut Connection, volume: &str) -> Option<String> {
    let rows = on.must(&Call::Volumes);
    let rows = rows.as_array().expect("rows");
    let row = rows.iter().find(|row| row["id"] == place.id(volume))?;
    Some(row["state"].as_str().expect("a state").to_owned())
}

/// Waits until it is so; what is waited for comes by itself within seconds.
fn until(what: &str, mut so: impl FnMut() -> bool) {
    let started = Instant::now();
    while !so() {
        assert!(started.elapsed() < TO_THE_POINT, "{what}: not in time");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn what_is_held_open_over_a_restart_is_sealed_when_it_is_let_go_and_as_it_is_then() {
    let place = Place::new(require_lab!(Fs::Ext4), OVERLAY);
    let mut driver = place.start(None);
    let mut on = driver.connect().expect("a process");
    let mut world = World::default();
    let output = [("type", "output"), ("name", "held")];
    world.start_pod(&place, &mut on, "held", Some("artifact/held"), &output);
    // This process is the pod's that will not die. The volume's root shows what is written when it
    // is not mounted.
    let root = fs::File::open(place.target("held")).expect("the root");
    let mut file = fs::File::create(place.target("held").join("log")).expect("a file");
    file.write_all(b"before the end, ").expect("write");
    on.must(&outcome("held", true));
    on.must(&unpublish(&place, "held"));
    driver.kill();

    let mut driver = place.start(None);
    let mut on = driver.connect().expect("it starts");
    until("in use", || {
        state_of(&place, &mut on, "held").as_deref() == Some("InUse")
    });
    file.write_all(b"after the restart").expect("it is a pod's");
    assert_eq!(names(&on.must(&Call::Artifacts)), [""; 0], "not sealed yet");
    let seen = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&root));
    let content = Snapshot::of(&Path::new(&seen).join("."));
    drop((file, root));
    until("sealed", || !names(&on.must(&Call::Artifacts)).is_empty());
    world.live.get_mut("held").expect("live").content = content;
    world.pod_ended("held");
    world.check_sealed(&place, &mut on);
    on.must(&Call::Settle);
    world.end(&place, &mut on);
    driver.shut_down();
}

/// The marker is taken away before the content moves; the process may die in between.
#[test]
fn a_seal_that_took_its_marker_away_already_goes_on() {
    let place = Place::new(require_lab!(Fs::Ext4), OVERLAY);
    let mut driver = place.start(None);
    let mut on = driver.connect().expect("a process");
    let mut world = World::default();
    let output = [("type", "output"), ("name", "a"), ("commit", "on-marker")];
    world.start_pod(&place, &mut on, "maker", Some("artifact/a"), &output);
    let marker = baggageclaim::model::layout::COMMIT_MARKER;
    fs::write(place.target("maker").join(marker), "").expect("the marker");
    let live = world.live.get_mut("maker").expect("live");
    live.content = super::world::without_root_time(live.content.clone());
    arm(&mut on, "seal-layer-recorded");
    // It may die before the answer.
    let _answer = on.call(&unpublish(&place, "maker"));
    assert!(driver.dies_within(TO_THE_POINT));
    fs::remove_file(pending(&place, "maker").join("top").join(marker)).expect("rm");
    world.pod_ended("maker");

    let mut driver = place.start(None);
    let mut on = driver.connect().expect("it starts");
    on.must(&Call::Settle);
    world.check_sealed(&place, &mut on);
    on.must(&Call::Settle);
    world.end(&place, &mut on);
    driver.shut_down();
}

/// Two steps fetched the same; the first to be sealed dies half-way, and the other takes the name
/// meanwhile.
#[test]
fn the_loser_of_a_resource_cache_lets_go_of_the_layer_that_it_began() {
    let place = Place::new(require_lab!(Fs::Ext4), OVERLAY);
    let mut driver = place.start(None);
    let mut on = driver.connect().expect("a process");
    let mut world = World::default();
    let cache = [("type", "resource-cache"), ("key", "r")];
    world.start_pod(&place, &mut on, "first", None, &cache);
    world.start_pod(&place, &mut on, "second", Some("resource-cache/r"), &cache);
    on.must(&unpublish(&place, "first"));
    on.must(&unpublish(&place, "second"));
    arm(&mut on, "seal-layer-recorded");
    // It may die before the answer.
    let _answer = on.call(&outcome("first", true));
    assert!(driver.dies_within(TO_THE_POINT));
    // As if the word had not come through: the second is sealed first.
    fs::remove_file(pending(&place, "first").join("outcome")).expect("rm");
    world.pod_ended("first");
    world.pod_ended("second");

    let mut driver = place.start(None);
    let mut on = driver.connect().expect("it starts");
    on.must(&outcome("second", true));
    on.must(&Call::Settle);
    on.must(&outcome("first", true));
    on.must(&Call::Settle);
    on.must(&Call::Reap);
    world.check_sealed(&place, &mut on);
    on.must(&Call::Settle);
    world.end(&place, &mut on);
    driver.shut_down();
}

/// A second target is refused, kubelet unpublishes it, and the process dies.
#[test]
fn a_volume_stays_at_its_target_when_a_refused_one_is_unpublished() {
    let place = Place::new(require_lab!(Fs::Ext4), OVERLAY);
    let mut driver = place.start(None);
    let mut on = driver.connect().expect("a process");
    let mut world = World::default();
    let output = [("type", "output"), ("name", "both")];
    world.start_pod(&place, &mut on, "both", Some("artifact/both"), &output);
    let target = place.target("second-target");
    let refused = on.call(&publish_also(&place, "both", &output, &target));
    let refused = refused.expect("it lives").expect_err("one target only");
    assert!(refused.contains("PublishedElsewhere"), "{refused}");
    assert_no_findings(&mut on);
    let leave = Call::Unpublish {
        volume: place.id("both"),
        target,
    };
    on.must(&leave);
    assert_no_findings(&mut on);
    driver.kill();
    let mut driver = place.start(None);
    let mut on = driver.connect().expect("it starts");
    on.must(&leave);
    world.check_live(&place);
    assert_no_findings(&mut on);
    world.end(&place, &mut on);
    driver.shut_down();
}

/// A new pool is made by the first start, which may be killed at any instruction.
#[test]
fn a_first_start_that_is_killed_leaves_a_pool_that_the_next_one_completes() {
    let mut place = Place::new(require_lab!(Fs::Ext4), OVERLAY);
    for attempt in 0..24 {
        place.pool = place.lab.path().join(format!("pool-{attempt}"));
        let driver = place.start(None);
        // The binary needs a few milliseconds to get there.
        std::thread::sleep(Duration::from_millis(4 + 2 * attempt));
        driver.kill();
        // The state that a kill between two instructions leaves, whether or not this kill did.
        if place.pool.is_dir() {
            for name in [".reserve.new", ".index.redb.new", ".doomed.new"] {
                fs::write(place.pool.join(name), "half").expect("write");
            }
        }
        let mut driver = place.start(None);
        let mut on = driver.connect().expect("it starts");
        assert_nothing_left(&place, &mut on);
        let reserve = fs::metadata(place.pool.join("reserve")).expect("a reserve");
        assert_eq!(reserve.len(), 1 << 20);
        driver.shut_down();
    }
}

/// The binary that people run, asked as kubelet asks.
#[tokio::test(flavor = "multi_thread")]
async fn the_driver_itself_dies_where_it_is_told_and_answers_when_kubelet_asks_again() {
    use baggageclaim::kubelet_double::{Kubelet, PublishOptions};
    let lab = require_lab!(Fs::Ext4);
    let socket = lab.run_dir().join("csi.sock");
    let start = |crash_at: &str| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_baggageclaim"));
        command.args([
            "standalone",
            "--log",
            "warn",
            "--node-id",
            "node-1",
            "--pool",
        ]);
        command
            .arg(lab.path().join("pool"))
            .arg("--socket")
            .arg(&socket);
        if !crash_at.is_empty() {
            command.env("BAGGAGECLAIM_CRASH_AT", crash_at);
            command.stderr(std::process::Stdio::null());
        }
        command.spawn().expect("the driver starts")
    };
    let connect = async || {
        let patience = TO_THE_POINT;
        let ready = Kubelet::connect_when_ready(&socket, lab.kubelet_dir(), patience).await;
        ready.expect("the driver answers")
    };
    let mut driver = start("publish-attached:2");
    let pod = connect().await.pod("ci", "step");
    let output = [("type", "output"), ("name", "a")];
    let options = PublishOptions::default();
    pod.publish("first", output, options)
        .await
        .expect("the first visit");
    let scratch = [("type", "scratch")];
    let died = pod.publish("second", scratch, options).await;
    assert!(died.is_err(), "the second visit: {died:?}");
    let status = driver.wait().expect("wait");
    let signal = std::os::unix::process::ExitStatusExt::signal(&status);
    assert_eq!(signal, Some(rustix::process::Signal::KILL.as_raw()));

    let mut driver = start("");
    let again = connect().await.pod_with_uid("ci", "step", pod.uid());
    for (volume, attributes) in [("first", &output[..]), ("second", &scratch[..])] {
        let published = again
            .republish(volume, attributes.iter().copied(), options)
            .await;
        let target = published.expect("asked again").target;
        fs::write(target.join("file"), volume).expect("it is mounted");
        again.unpublish(volume).await.expect("unpublished");
    }
    rustix::process::kill_process(
        rustix::process::Pid::from_child(&driver),
        rustix::process::Signal::TERM,
    )
    .expect("it lives");
    assert!(driver.wait().expect("wait").success(), "the end in order");
    assert_eq!(lab.leftovers(), Vec::<PathBuf>::new(), "mounts");
    let mut wrong = start("no-such-point");
    let status = wrong.wait().expect("wait");
    assert_eq!(status.code(), Some(2), "a point that is none");
}

fn last_used(on: &mut Connection, name: &str) -> u64 {
    let rows = on.must(&Call::Artifacts);
    let mut rows = rows.as_array().expect("rows").iter();
    let row = rows.find(|row| row["name"] == name).expect("it is there");
    row["lastUsed"].as_u64().expect("a time")
}

/// A node where caches are only read writes nothing else into its index, and they must not expire
/// by a use that was long ago.
#[test]
fn when_an_artifact_was_used_is_known_after_a_kill() {
    // Not in each round: only what the index has not known for long.
    for (uses_unwritten, is_known) in [(Some(Duration::ZERO), true), (None, false)] {
        let mut place = Place::new(require_lab!(Fs::Ext4), OVERLAY);
        place.uses_unwritten = uses_unwritten;
        let mut driver = place.start(None);
        let mut on = driver.connect().expect("a process");
        let mut world = settle_in(&place, &mut on);
        let before = last_used(&mut on, "artifact/base");
        let fork = [("type", "input"), ("from", "artifact/base")];
        world.start_pod(&place, &mut on, "reader", None, &fork);
        let used = last_used(&mut on, "artifact/base");
        assert!(used > before);
        on.must(&Call::Reap);
        driver.kill();

        let mut driver = place.start(None);
        let mut on = driver.connect().expect("it starts");
        let found = last_used(&mut on, "artifact/base");
        assert_eq!(found == used, is_known, "{before}, {used}, {found}");
        world.check_live(&place);
        world.end(&place, &mut on);
        driver.shut_down();
    }
}

/// Processes rebuild the index and die at each of its steps.
#[test]
fn an_index_is_rebuilt_however_often_that_is_interrupted() {
    let place = Place::new(require_lab!(Fs::Ext4), OVERLAY);
    let mut driver = place.start(None);
    let mut on = driver.connect().expect("a process");
    let mut world = settle_in(&place, &mut on);
    let steps = [
        (Point::RebuildMade, true),
        (Point::RebuildCleared, false),
        (Point::RebuildPlaced, true),
    ];
    for (point, has_index) in steps {
        driver.shut_down();
        let mut rebuilding = place.rebuild(Some((point.name(), 1)));
        assert!(rebuilding.dies_within(TO_THE_POINT), "{point:?}");
        assert_eq!(place.pool.join("index.redb").exists(), has_index);
        if !has_index {
            place.rebuild(None).ends();
        }
        driver = place.start(None);
        on = driver.connect().expect("it starts");
        world.check_live(&place);
        world.check_sealed(&place, &mut on);
        on.must(&Call::Settle);
        assert_no_findings(&mut on);
    }
    world.end(&place, &mut on);
    driver.shut_down();
}

/// The layers that have a table of contents, and the names of temporary ones.
fn tables(place: &Place) -> (usize, usize) {
    let layers = place.pool.join("layers");
    let layers: Vec<PathBuf> = entries(&layers).iter().map(|id| layers.join(id)).collect();
    let count = |name: &str| layers.iter().filter(|id| id.join(name).exists()).count();
    (count("table"), count(".table.new"))
}

/// No call waits for a table of contents. The next start makes those that are missing.
#[test]
fn a_table_of_contents_whose_making_is_cut_short_is_made_by_the_next_start() {
    for way in [OVERLAY, BTRFS] {
        let place = Place::new(require_lab!(Fs::Btrfs), way);
        let driver = place.start(None);
        driver.shut_down();
        let mut world = World::default();
        for (number, point) in [Point::TableWritten, Point::TablePlaced]
            .into_iter()
            .enumerate()
        {
            let mut driver = place.start(None);
            let mut on = driver.connect().expect("a process");
            until("all tables are made", || tables(&place) == (number, 0));
            arm(&mut on, point.name());
            let name = format!("made-{number}");
            let output = [("type", "output"), ("name", &name)];
            let becomes: &'static str = ["artifact/made-0", "artifact/made-1"][number];
            let volume: &'static str = ["maker-0", "maker-1"][number];
            world.start_pod(&place, &mut on, volume, Some(becomes), &output);
            on.must(&outcome(volume, true));
            // It may die before the answers.
            let _answer = on.call(&unpublish(&place, volume));
            assert!(driver.dies_within(TO_THE_POINT), "it was not visited");
            world.pod_ended(volume);
            let expected = if point == Point::TableWritten {
                (0, 1)
            } else {
                (2, 0)
            };
            assert_eq!(tables(&place), expected, "{}", point.name());
        }
        let mut driver = place.start(None);
        let mut on = driver.connect().expect("it starts");
        on.must(&Call::Settle);
        until("all tables are made", || tables(&place) == (2, 0));
        assert_no_findings(&mut on);
        world.check_sealed(&place, &mut on);
        world.end(&place, &mut on);
        driver.shut_down();
    }
}

/// Commits two outputs, of which a policy selects one, and dies at a point of the commit. Then the
/// machine goes on, or has another boot.
fn commits_and_dies(place: &Place, point: &str, reboots: bool) {
    let mut driver = place.start(None);
    let mut on = driver.connect().expect("a process");
    on.must(&Call::Select {
        reference: "artifact/selected".to_owned(),
    });
    let mut world = World::default();
    let other = [("type", "output"), ("name", "other")];
    world.start_pod(place, &mut on, "other", Some("artifact/other"), &other);
    world.end_pod(place, &mut on, "other");
    let selected = [("type", "output"), ("name", "selected")];
    let becomes = Some("artifact/selected");
    world.start_pod(place, &mut on, "selected", becomes, &selected);
    on.must(&outcome("selected", true));
    arm(&mut on, point);
    // It may die before the answer.
    let _answer = on.call(&unpublish(place, "selected"));
    assert!(driver.dies_within(TO_THE_POINT));
    if reboots {
        reboot(place);
    }
    let mut driver = place.start(None);
    let mut on = driver.connect().expect("it starts");
    on.must(&Call::Settle);
    let line = "committed under a cache policy";
    let of = |name: &str| place.lines_with(&[line, &format!("name=artifact/{name} ")]);
    assert_eq!((of("selected"), of("other")), (1, 0), "{}", place.tail());
    driver.kill();
    // What was said is not said at each start.
    let mut driver = place.start(None);
    driver.connect().expect("it starts").must(&Call::Settle);
    assert_eq!(of("selected"), 1, "{}", place.tail());
}

#[test]
fn a_kill_after_the_index_loses_no_line_of_the_audit() {
    for (point, reboots) in [
        ("commit-synced", false),
        ("commit-indexed", false),
        ("commit-indexed", true),
        ("commit-confirmed", false),
        ("commit-pending-trashed", false),
    ] {
        let mut place = Place::new(require_lab!(Fs::Ext4), OVERLAY);
        place.policies = true;
        commits_and_dies(&place, point, reboots);
    }
}
