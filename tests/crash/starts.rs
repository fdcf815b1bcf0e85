//! Points that no act passes: a first start, recovery, a full disk, one that loses writes. A
//! process dies at each point; the next one has the state from before, and nothing more.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use baggageclaim::engine::failpoint::Point;
use rustix::fs::FallocateFlags;

use super::common::disk::SmallDisk;
use super::common::{self, Fs, Lab, require_lab};
use super::driver::{Call, Connection, Driver, Place};
use super::world::{
    World, assert_no_findings, assert_nothing_left, entries, outcome, publish, unpublish,
};
use super::{OVERLAY, TO_THE_POINT, settle_in};

/// The start dies there.
fn dies_at(place: &Place, point: Point) {
    let mut driver = place.start(Some((point.name(), 1)));
    assert!(
        driver.dies_within(TO_THE_POINT),
        "{} is not visited",
        point.name()
    );
}

/// A start that lives.
fn starts(place: &Place) -> (Driver, Connection) {
    let mut driver = place.start(None);
    let on = driver.connect().expect("it starts");
    (driver, on)
}

fn arm(on: &mut Connection, point: Point) {
    on.must(&Call::Arm {
        point: point.name().to_owned(),
        visit: 1,
    });
}

#[test]
fn a_first_start_that_dies_at_any_point_leaves_a_pool_that_the_next_one_completes() {
    let mut place = Place::new(require_lab!(Fs::Ext4), OVERLAY);
    for point in [
        Point::OpenLocked,
        Point::OpenSwept,
        Point::OpenFounded,
        Point::OpenIndexed,
        Point::RecoverSwept,
        Point::ReserveMade,
    ] {
        place.pool = place.lab.path().join(point.name());
        dies_at(&place, point);
        let (driver, mut on) = starts(&place);
        assert_nothing_left(&place, &mut on);
        assert!(place.pool.join("reserve").exists(), "{}", point.name());
        driver.shut_down();
    }
}

/// The names in `layers/`.
fn layers(place: &Place) -> BTreeSet<String> {
    entries(&place.pool.join("layers")).into_iter().collect()
}

/// A pool with something for each step of recovery, and the parts that must exist afterwards. The
/// outcome of one ended pod is unknown.
fn left_behind(place: &Place) -> World {
    let (driver, mut on) = starts(place);
    let mut world = settle_in(place, &mut on);
    let output = [("type", "output"), ("name", "waiting")];
    let becomes = Some("artifact/waiting");
    world.start_pod(place, &mut on, "waiting", becomes, &output);
    on.must(&unpublish(place, "waiting"));
    world.pod_ended("waiting");
    on.must(&Call::Reap);
    let before = layers(place);
    let output = [("type", "output"), ("name", "lost")];
    world.start_pod(place, &mut on, "lost", Some("artifact/lost"), &output);
    world.end_pod(place, &mut on, "lost");
    on.must(&Call::Reap);
    driver.kill();
    // An administrator deleted its layer.
    let lost: Vec<String> = layers(place).difference(&before).cloned().collect();
    assert_eq!(lost.len(), 1);
    fs::rename(
        place.pool.join("layers").join(&lost[0]),
        place.lab.path().join("lost"),
    )
    .expect("rename");
    world.sealed.remove("artifact/lost");
    // Older versions prepared directories there.
    fs::create_dir_all(place.pool.join("spares")).expect("mkdir");
    // The remains of a process that dies half-way.
    let id = |digit: char| String::from(digit).repeat(32);
    for half_made in [
        Path::new("volumes").join("csi-half-made"),
        Path::new("pending").join(id('a')),
        Path::new("layers").join(id('b')),
        Path::new("incoming").join(id('c')),
        Path::new("spares").join(id('d')),
    ] {
        fs::create_dir(place.pool.join(half_made)).expect("mkdir");
    }
    world
}

#[test]
fn recovery_that_dies_at_any_point_is_done_by_the_next_start() {
    for (point, deaths) in [
        (Point::OpenLocked, 1),
        (Point::OpenSwept, 1),
        (Point::OpenIndexed, 1),
        (Point::RecoverSwept, 1),
        // A volume, a promise and a layer: each process throws one of them away.
        (Point::RecoverThrownAway, 3),
        (Point::RecoverIndexed, 1),
    ] {
        let place = Place::new(require_lab!(Fs::Ext4), OVERLAY);
        let mut world = left_behind(&place);
        for _ in 0..deaths {
            dies_at(&place, point);
            world.check_live(&place);
        }
        let is_passed_once = [Point::RecoverThrownAway, Point::RecoverIndexed].contains(&point);
        if is_passed_once {
            let mut driver = place.start(Some((point.name(), 1)));
            assert!(driver.connect().is_ok(), "{} again", point.name());
            driver.kill();
        }
        let (driver, mut on) = starts(&place);
        world.check_live(&place);
        on.must(&outcome("waiting", true));
        on.must(&Call::Settle);
        on.must(&Call::Reap);
        assert_no_findings(&mut on);
        world.check_sealed(&place, &mut on);
        on.must(&Call::Settle);
        world.end(&place, &mut on);
        driver.shut_down();
    }
}

/// Takes all that is free on the filesystem of the pool.
fn fill(place: &Place) -> PathBuf {
    let ballast = place.lab.path().join("ballast");
    let file = fs::File::create(&ballast).expect("create");
    let free = rustix::fs::fstatvfs(&file).expect("statvfs");
    let (mut at, mut size) = (0, free.f_bavail * free.f_frsize);
    while size > 0 {
        match rustix::fs::fallocate(&file, FallocateFlags::empty(), at, size) {
            Ok(()) => at += size,
            Err(_) => size /= 2,
        }
    }
    ballast
}

/// The reserve is given back when a seal finds no space, and made again by a start that finds some:
/// the process dies right after each.
#[test]
fn a_reserve_that_was_given_back_by_a_process_that_dies_is_made_again() {
    let place = Place::new(require_lab!(Fs::Ext4), OVERLAY);
    let reserve = place.pool.join("reserve");
    let (mut driver, mut on) = starts(&place);
    let mut world = settle_in(&place, &mut on);
    // Unused content may be evicted when space is short.
    let fork = [("type", "input"), ("from", "task-cache/t")];
    world.start_pod(&place, &mut on, "user", None, &fork);
    let output = [("type", "output"), ("name", "made")];
    world.start_pod(&place, &mut on, "maker", Some("artifact/made"), &output);
    on.must(&outcome("maker", true));
    world.pod_ended("maker");
    assert!(reserve.exists());
    let ballast = fill(&place);
    arm(&mut on, Point::ReserveGivenBack);
    // It may die before the answer.
    let _answer = on.call(&unpublish(&place, "maker"));
    assert!(driver.dies_within(TO_THE_POINT), "there was room");
    assert!(!reserve.exists());
    world.check_live(&place);

    fs::remove_file(ballast).expect("rm");
    dies_at(&place, Point::ReserveMade);
    assert!(reserve.exists());

    let (driver, mut on) = starts(&place);
    world.check_live(&place);
    on.must(&unpublish(&place, "maker"));
    on.must(&Call::Settle);
    on.must(&Call::Reap);
    assert_no_findings(&mut on);
    world.check_sealed(&place, &mut on);
    on.must(&Call::Settle);
    world.end(&place, &mut on);
    driver.shut_down();
}

/// The disk loses what a pod writes, and the process that hears of it dies before it has done all
/// that follows.
#[test]
fn a_lost_write_is_handled_by_the_process_that_lives_long_enough() {
    for point in [
        Point::WritebackFailureHeard,
        Point::WritebackFailureNoted,
        Point::WritebackFailureMarked,
        Point::WritebackFailureFinished,
    ] {
        let (disk, lab): (SmallDisk, Lab) = match SmallDisk::make() {
            Ok(made) => made,
            Err(reason) => return common::skip(&reason),
        };
        let place = Place::new(lab, OVERLAY);
        let (mut driver, mut on) = starts(&place);
        let mut world = World::default();
        let sealed = [("type", "output"), ("name", "sealed")];
        world.start_pod(&place, &mut on, "sealed", Some("artifact/sealed"), &sealed);
        world.end_pod(&place, &mut on, "sealed");
        on.must(&Call::Reap);
        // One that is there, and one whose seal hears of it.
        let older = [("type", "output"), ("name", "older"), ("commit", "always")];
        on.must(&publish(&place, "older", &older));
        let hears = [("type", "output"), ("name", "hears"), ("commit", "always")];
        on.must(&publish(&place, "hears", &hears));
        let file = place.target("older").join("file");
        fs::write(&file, vec![1; 1 << 14]).expect("write");
        fs::File::open(&file)
            .and_then(|file| file.sync_all())
            .expect("sync");
        rustix::fs::syncfs(fs::File::open(place.lab.path()).expect("open")).expect("syncfs");
        let lies_at = place
            .pool
            .join("volumes")
            .join(place.id("older"))
            .join("top/file");
        let broken = disk.breaks_at(&lies_at);
        arm(&mut on, point);
        // Where it lies: another place is not broken.
        let over = fs::File::options().write(true).open(&file).expect("open");
        over.write_all_at(&[2; 1 << 14], 0)
            .expect("the page cache takes it");
        drop(over);
        // It may die before the answer.
        let _answer = on.call(&unpublish(&place, "hears"));
        assert!(
            driver.dies_within(TO_THE_POINT),
            "{} is not visited",
            point.name()
        );
        broken.heals();
        let doomed = place.pool.join("doomed");
        let unfinished = if point == Point::WritebackFailureHeard {
            // The kernel does not say it again; the overlay that is mounted still remembers it.
            assert!(!doomed.exists());
            dies_at(&place, Point::WritebackFailureHeard);
            true
        } else {
            let doomed = fs::read_to_string(doomed).expect("it is written down");
            doomed.contains("\"unfinished\":true")
        };
        assert_eq!(unfinished, point != Point::WritebackFailureFinished);
        if unfinished {
            // The start that goes on with it may die, too.
            dies_at(&place, Point::WritebackFailureMarked);
        }

        let (driver, mut on) = starts(&place);
        let doomed = fs::read_to_string(place.pool.join("doomed")).expect("it stays");
        assert!(!doomed.contains("\"unfinished\":true"), "{doomed}");
        on.must(&unpublish(&place, "older"));
        on.must(&unpublish(&place, "hears"));
        on.must(&Call::Settle);
        on.must(&Call::Reap);
        // Neither was sealed, and what is made from now on is.
        world.check_sealed(&place, &mut on);
        let output = [("type", "output"), ("name", "later")];
        world.start_pod(&place, &mut on, "later", Some("artifact/later"), &output);
        world.end_pod(&place, &mut on, "later");
        on.must(&Call::Reap);
        world.check_sealed(&place, &mut on);
        on.must(&Call::Settle);
        world.end(&place, &mut on);
        driver.shut_down();
        drop(place);
        assert_eq!(disk.close(), Vec::<PathBuf>::new());
    }
}
