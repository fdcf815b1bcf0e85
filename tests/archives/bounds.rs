//! The memory of packing, unpacking and transferring a tree, and the system calls of unpacking. A
//! process of its own does the work, so that nothing of another test is counted.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use baggageclaim::archive::toc::{Holder, Packing, Patience, Receiver, Table, Want, scan};
use baggageclaim::archive::{self, Codec, Hashing, Limits, Pack, Progress, Unpack};

use crate::common::{Fs, Lab, require_lab, skip};
use crate::open;
use crate::tar::Tar;

/// What the process does, and in which directory.
const TASK: &str = "BAGGAGECLAIM_TEST_ARCHIVES_TASK";
const PLACE: &str = "BAGGAGECLAIM_TEST_ARCHIVES_PLACE";
const ENTRY: &str = "bounds::the_process_that_is_measured";

/// How many directories, and how many files with two names each, the large tree has. One more
/// directory has as many names as there are directories. The names are long, so that a table of any
/// of them would exceed the limit.
const DIRECTORIES: usize = 25_000;
const FILES: usize = 50_000;
const LONG: usize = 250;
/// By how much the memory for the large tree may exceed that for the small one.
const MOST: u64 = 32 << 20;

fn never() -> bool {
    false
}

/// `from` as an archive, and the archive as `to`.
fn pack_and_unpack(place: &Path) {
    let path = place.join("archive");
    let temporary = open(&place.join("temporary"));
    let how = Pack {
        // The memory of zstd grows with the number of cores.
        codec: Codec::Plain,
        devices: false,
        hashing: Hashing::Both,
        temporary: &temporary,
    };
    let (from, progress) = (open(&place.join("from")), Progress::default());
    let file = File::create(&path).expect("create");
    archive::pack(&from, file, how, &progress, &never).expect("pack");
    unpack(place);
}

fn unpack(place: &Path) {
    let file = File::open(place.join("archive")).expect("open");
    let (to, progress) = (open(&place.join("to")), Progress::default());
    archive::unpack(file, &to, Unpack::default(), &progress, &never).expect("unpack");
}

/// The table of `from`, its frames in a file, and the layer that they make.
fn send_and_receive(place: &Path) {
    let temporary = open(&place.join("temporary"));
    let from = open(&place.join("from"));
    let mut options = File::options();
    let options = options.read(true).write(true).create_new(true);
    let table = options.open(place.join("table")).expect("create");
    scan(
        &from,
        &table,
        false,
        &temporary,
        &Progress::default(),
        &never,
    )
    .expect("scan");
    let table = Table::open(table, None, &temporary, Limits::default(), &never).expect("table");
    let holder = Holder::new(Arc::clone(&table), &from).expect("holder");
    let wants = [Want::Files {
        first: 0,
        count: table.files(),
    }];
    let out = File::create(place.join("frames")).expect("create");
    let mut all = |_| Ok(true);
    let sent = holder.send(&wants, out, Packing::at(1), &mut all, &never);
    sent.expect("send");
    let to = open(&place.join("to"));
    let mut receiver = Receiver::open(&to, table, false, &never).expect("receiver");
    let frames = File::open(place.join("frames")).expect("open");
    let patience = Patience(Duration::from_secs(60));
    let taken = receiver.take(frames, patience, &AtomicU64::default(), &never);
    taken.expect("take");
    receiver.finish(&never).expect("finish");
}

/// Bytes by which the resident memory was higher at its peak than before.
fn rise(act: impl FnOnce()) -> u64 {
    let field = |name: &str| {
        let status = fs::read_to_string("/proc/self/status").expect("status");
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        let number = line.and_then(|line| line.split_whitespace().next());
        number
            .expect("it is there")
            .parse::<u64>()
            .expect("a number")
            << 10
    };
    // Resets the peak (proc(5)).
    fs::write("/proc/self/clear_refs", "5").expect("clear_refs");
    let before = field("VmRSS:");
    act();
    field("VmHWM:").saturating_sub(before)
}

/// The other process. Without a task there is nothing to do.
#[test]
fn the_process_that_is_measured() {
    let (Some(task), Some(place)) = (std::env::var_os(TASK), std::env::var_os(PLACE)) else {
        return;
    };
    let place = PathBuf::from(place);
    let rise = match task.to_str() {
        Some("pack and unpack") => rise(|| pack_and_unpack(&place)),
        Some("send and receive") => rise(|| send_and_receive(&place)),
        Some("unpack") => rise(|| unpack(&place)),
        other => panic!("{other:?}"),
    };
    fs::write(place.join("rise"), rise.to_string()).expect("write");
}

/// The command that starts it, behind `before`.
fn command(before: &[&str], task: &str, place: &Path) -> Command {
    let this = std::env::current_exe().expect("this program");
    let this = this.to_str().expect("text");
    let words: Vec<&str> = before.iter().copied().chain([this]).collect();
    let mut command = Command::new(words[0]);
    command
        .args(&words[1..])
        .args(["--exact", ENTRY, "--nocapture"])
        .env(TASK, task)
        .env(PLACE, place)
        .stdin(Stdio::null());
    command
}

fn run(command: &mut Command) {
    let output = command.output().expect("it starts");
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    assert!(output.status.success(), "{said}");
}

fn place(lab: &Lab, name: &str) -> PathBuf {
    let place = lab.dir(name);
    for name in ["from", "to", "temporary"] {
        fs::create_dir(place.join(name)).expect("mkdir");
    }
    place
}

/// Directories, names and files with two names, as many as are told.
fn fill(root: &Path, directories: usize, files: usize) {
    for part in ["nested", "first", "second", "wide"] {
        fs::create_dir(root.join(part)).expect("mkdir");
    }
    for number in 0..directories {
        // All of a level are open to more names until the last of them is done.
        let nested = format!("nested/{}/{number:0>LONG$}", number % 100);
        fs::create_dir_all(root.join(nested)).expect("mkdir");
        let long = format!("wide/{number:0>LONG$}");
        std::os::unix::fs::symlink("x", root.join(long)).expect("symlink");
    }
    for number in 0..files {
        // Both names are far from each other, so nearly all files wait for their second one.
        let first = root.join(format!("first/{number:0>LONG$}"));
        fs::write(&first, "content").expect("write");
        fs::hard_link(&first, root.join(format!("second/{number}"))).expect("link");
    }
}

#[test]
fn memory_does_not_grow_with_the_tree() {
    let lab = match Lab::try_sized(Fs::Tmpfs, 4 << 30) {
        Ok(lab) => lab,
        Err(reason) => return skip(&reason),
    };
    for task in ["pack and unpack", "send and receive"] {
        let measured = [(100, 100), (DIRECTORIES, FILES)].map(|(directories, files)| {
            let place = place(&lab, &format!("{task} {files}"));
            fill(&place.join("from"), directories, files);
            run(&mut command(&[], task, &place));
            let rise = fs::read_to_string(place.join("rise")).expect("read");
            fs::remove_dir_all(&place).expect("remove");
            rise.parse::<u64>().expect("a number")
        });
        let [small, large] = measured;
        println!("{task}: {} and {} KiB", small >> 10, large >> 10);
        assert!(large < small + MOST, "{task}: {small} became {large} bytes");
    }
}

#[test]
fn a_change_of_parent_is_one_openat2() {
    let lab = require_lab!(Fs::Ext4);
    let version = Command::new("strace").arg("-V").output();
    if !version.is_ok_and(|output| output.status.success()) {
        return skip("strace is not there");
    }
    let place = place(&lab, "place");
    // Deep parents that alternate, so that each entry changes the parent, and a file that does not.
    let (one, other) = ("a/b/c/d/e/f/g/h", "a/b/c/d/e/f/g/i");
    let mut tar = Tar::new();
    let mut directories = 0;
    for (at, _) in one.match_indices('/') {
        tar = tar.dir(&one[..at]);
        directories += 1;
    }
    tar = tar.dir(one).dir(other);
    directories += 2;
    // Each but the first two has another parent than the entry before it.
    let mut changes = directories - 2;
    for number in 0..100 {
        for parent in [one, other] {
            tar = tar
                .file(&format!("{parent}/f{number}"), b"content")
                .file(&format!("{parent}/g{number}"), b"content");
            changes += 1;
        }
    }
    fs::write(place.join("archive"), tar.end()).expect("write");
    let trace = place.join("trace");
    let strace = ["strace", "-f", "-e", "trace=openat2", "-o"];
    let strace = [&strace[..], &[trace.to_str().expect("text")]].concat();
    run(&mut command(&strace, "unpack", &place));
    let trace = fs::read_to_string(trace).expect("a trace");
    let calls: Vec<&str> = trace
        .lines()
        .filter(|line| line.contains("openat2("))
        .collect();
    let is_guarded = |line: &&&str| {
        ["RESOLVE_BENEATH", "RESOLVE_NO_SYMLINKS", "RESOLVE_NO_XDEV"]
            .iter()
            .all(|flag| line.contains(flag))
    };
    assert_eq!(calls.iter().filter(is_guarded).count(), calls.len());
    let opened = calls.iter().filter(|line| line.contains("O_DIRECTORY"));
    // A directory is opened when it is made, to set its attributes, and when it becomes the parent.
    assert_eq!(opened.count(), directories + changes, "{trace}");
    assert!(place.join("to").join(other).join("g99").exists());
}
