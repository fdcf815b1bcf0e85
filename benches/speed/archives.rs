//! Archives: packing and unpacking in this process, compared with GNU tar and the compressors that
//! CI systems pipe together. Both take turns within a run. The driver itself takes no part. Neither
//! side hashes, except where a table of contents verifies each piece.

#![expect(
    clippy::disallowed_methods,
    reason = "what is removed is the bench's own"
)]

use std::fs;
use std::io::{Read as _, Write as _};
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use baggageclaim::archive::toc::{Holder, Packing, Patience, Receiver, Table, Want, scan};
use baggageclaim::archive::{Codec, Hashing, Limits, Pack, Progress, Unpack, pack, unpack};
use baggageclaim::sys::Dir;

use crate::cases::Bench;
use crate::table::{Goal, median};

/// The number of small files, and the size of each.
const FILES: usize = 20_000;
const SIZE: usize = 15_000;
const PER_DIR: usize = 40;

impl Bench<'_> {
    /// All rows of archives.
    pub fn archives(&mut self) {
        let tree = self.lab.dir("archives/tree");
        let large = self.lab.dir("archives/large");
        let mut words = Words(1);
        for index in 0..FILES {
            let dir = tree.join(format!("{}/{}", index / PER_DIR / 20, index / PER_DIR));
            if index % PER_DIR == 0 {
                fs::create_dir_all(&dir).expect("mkdir");
            }
            fs::write(dir.join(index.to_string()), words.text(SIZE)).expect("write");
        }
        let mut file = fs::File::create(large.join("file")).expect("create");
        for _ in 0..self.plan.large >> 20 {
            file.write_all(&words.text(1 << 20)).expect("write");
        }
        self.packs(&tree);
        self.unpacks(&tree);
        self.both_ends("20,000 files", &tree, 0.65);
        self.both_ends("one large file", &large, 0.6);
        self.both_ends_and_bound(&tree);
        self.by_table("20,000 files", &tree);
        self.by_table("one large file", &large);
        self.memory_of_archives(&tree);
        fs::remove_dir_all(self.lab.path().join("archives")).expect("remove");
    }

    fn packs(&mut self, tree: &Path) {
        // Through `cat`: GNU tar does not read the files if it writes to /dev/null.
        for (name, codec, rival, goal) in [
            ("plain", Codec::Plain, "tar -cf - -C \"$0\" . | cat", 0.45),
            (
                "zstd 1",
                Codec::Zstd(1),
                "tar -cf - -C \"$0\" . | zstd -1 -T2 -q",
                0.9,
            ),
            (
                "gzip 1",
                Codec::Gzip(1),
                "tar -czf - -C \"$0\" . | cat",
                0.25,
            ),
        ] {
            let turn = || {
                let ours = timed(|| ours(tree, codec, std::io::sink()));
                let rival = timed(|| shell(&format!("{rival} > /dev/null"), &[tree]));
                (ours, rival)
            };
            self.turns(&format!("pack 20,000 files, {name}"), goal, turn);
        }
    }

    fn unpacks(&mut self, tree: &Path) {
        for (name, codec, rival, goal) in [
            ("plain", Codec::Plain, "tar -xf \"$0\" -C \"$1\"", 0.75),
            (
                "zstd",
                Codec::Zstd(1),
                "zstd -d -q -c \"$0\" | tar -xf - -C \"$1\"",
                0.6,
            ),
        ] {
            let archive = self.lab.dir("archives").join("archive");
            ours(tree, codec, fs::File::create(&archive).expect("create"));
            let (lab, path) = (self.lab, archive.clone());
            let turn = || {
                let to = lab.dir("archives/ours");
                let file = fs::File::open(&path).expect("open");
                let ours = timed(|| from(file, &to));
                fs::remove_dir_all(&to).expect("remove");
                let to = lab.dir("archives/rival");
                let rival = timed(|| shell(rival, &[&path, &to]));
                fs::remove_dir_all(&to).expect("remove");
                (ours, rival)
            };
            self.turns(&format!("unpack 20,000 files, {name}"), goal, turn);
        }
    }

    fn both_ends(&mut self, what: &str, tree: &Path, goal: f64) {
        const RIVAL: &str = "tar -cf - -C \"$0\" . | zstd -3 -q | zstd -d -q | tar -xf - -C \"$1\"";
        let lab = self.lab;
        let turn = || {
            let to = lab.dir("archives/ours");
            let ours = timed(|| through_socket(tree, &to));
            fs::remove_dir_all(&to).expect("remove");
            let to = lab.dir("archives/rival");
            let rival = timed(|| shell(RIVAL, &[tree, &to]));
            fs::remove_dir_all(&to).expect("remove");
            (ours, rival)
        };
        let name = format!("both ends with zstd, {what}");
        self.turns(&name, goal, turn);
    }

    /// Export and import, compared with the least processor time that their work needs: reading,
    /// compressing, decompressing and creating, spread over all cores.
    fn both_ends_and_bound(&mut self, tree: &Path) {
        let lab = self.lab;
        let turn = || {
            let to = lab.dir("archives/ours");
            let ours = timed(|| through_socket(tree, &to));
            fs::remove_dir_all(&to).expect("remove");
            let to = lab.dir("archives/bound");
            let bound = bound(tree, &to, (FILES, SIZE));
            fs::remove_dir_all(&to).expect("remove");
            (ours, bound)
        };
        let name = "both ends with zstd, 20,000 files, against the processors' bound";
        self.turns(name, 1.25, turn);
    }

    /// With a table of contents, which the driver has made in the background: against a tar stream
    /// between the same two ends, without sha256.
    fn by_table(&mut self, what: &str, tree: &Path) {
        let lab = self.lab;
        let held = Held::of(lab.dir("archives"), tree);
        let turn = || {
            let to = lab.dir("archives/ours");
            let ours = timed(|| {
                let (sender, receiver) = UnixStream::pair().expect("a socket");
                std::thread::scope(|scope| {
                    scope.spawn(|| held.send(sender));
                    held.receive(receiver, &to);
                });
            });
            fs::remove_dir_all(&to).expect("remove");
            let to = lab.dir("archives/stream");
            let stream = timed(|| through_socket(tree, &to));
            fs::remove_dir_all(&to).expect("remove");
            (ours, stream)
        };
        let name = format!("both ends, sha256 and table, against a tar stream without, {what}");
        self.turns(&name, 1.25, turn);
        fs::remove_file(&held.path).expect("remove");
    }

    /// How far the resident memory rises at each end alone, in a process of its own: the memory
    /// that other rows gave back would hide it.
    fn memory_of_archives(&mut self, tree: &Path) {
        let place = self.lab.dir("archives");
        let _table = Held::of(place.clone(), tree);
        for what in ENDS {
            let program = std::env::current_exe().expect("this program");
            let mut alone = Command::new(program);
            let alone = alone.arg(MEMORY_OF).arg(what).arg(&place).output();
            let told = alone.expect("the program");
            assert!(told.status.success(), "{told:?}");
            let rise = String::from_utf8_lossy(&told.stdout).trim().parse();
            let name = format!("memory above idle, {what} 20,000 files");
            let rise = rise.expect("a number");
            self.row(&name, "MiB", rise, None, Goal::AtMost(32.0));
        }
    }

    fn turns(&mut self, name: &str, goal: f64, turn: impl Fn() -> (f64, f64)) {
        // The first fills the page cache.
        turn();
        let rounds: Vec<_> = (0..self.plan.rounds).map(|_| turn()).collect();
        let ours = median(rounds.iter().map(|round| round.0));
        let rival = median(rounds.iter().map(|round| round.1));
        self.row(name, "ms", ours, Some(rival), Goal::Ratio(goal));
    }
}

/// The argument of a process that measures its memory. The end and the directory follow it.
pub const MEMORY_OF: &str = "--memory-of";
/// In this order: each uses what an earlier one wrote.
const ENDS: [&str; 4] = ["packing", "unpacking", "sending", "receiving"];

/// Prints by how many MiB the resident memory of this process rises at one end.
pub fn memory_of(end: &str, place: &Path) {
    let (tree, tar, frames) = (place.join("tree"), place.join("tar"), place.join("frames"));
    let create = |path: &Path| fs::File::create(path).expect("create");
    let open = |path: &Path| fs::File::open(path).expect("open");
    let to = |name: &str| {
        let path = place.join(name);
        fs::create_dir(&path).expect("mkdir");
        path
    };
    let held = || Held::open(place.to_owned(), &tree);
    let rise = match end {
        "packing" => rise(|| ours(&tree, Codec::Zstd(1), create(&tar))),
        "unpacking" => rise(|| from(open(&tar), &to("memory-tar"))),
        "sending" => rise(|| held().send(create(&frames))),
        "receiving" => rise(|| held().receive(open(&frames), &to("memory"))),
        other => panic!("{other:?}"),
    };
    println!("{rise}");
}

/// A tree and its table.
pub struct Held {
    table: Arc<Table>,
    holder: Holder,
    place: PathBuf,
    path: PathBuf,
}

impl Held {
    pub fn of(place: PathBuf, tree: &Path) -> Self {
        let mut options = fs::File::options();
        let options = options.read(true).write(true).create(true).truncate(true);
        let file = options.open(place.join("table")).expect("create");
        let (root, temporary) = (
            Dir::open(tree).expect("open"),
            Dir::open(&place).expect("open"),
        );
        let progress = Progress::default();
        scan(&root, &file, false, &temporary, &progress, &|| false).expect("scan");
        Self::open(place, tree)
    }

    /// With the table that is there.
    fn open(place: PathBuf, tree: &Path) -> Self {
        let path = place.join("table");
        let (root, temporary) = (
            Dir::open(tree).expect("open"),
            Dir::open(&place).expect("open"),
        );
        let file = fs::File::open(&path).expect("open");
        let table = Table::open(file, None, &temporary, Limits::default(), &|| false);
        let table = table.expect("table");
        Self {
            holder: Holder::new(Arc::clone(&table), &root).expect("holder"),
            table,
            place,
            path,
        }
    }

    pub fn send(&self, out: impl std::io::Write) {
        let count = self.table.files();
        let wants = [Want::Files { first: 0, count }];
        let sent = self
            .holder
            .send(&wants, out, Packing::at(1), &mut |_| Ok(true), &|| false);
        assert!(sent.expect("send") > 0);
    }

    /// From the table on: a receiver checks it first.
    pub fn receive(&self, input: impl std::io::Read + Send, to: &Path) {
        let temporary = Dir::open(&self.place).expect("open");
        let file = fs::File::open(&self.path).expect("open");
        let name = Some(self.table.digest().sha256);
        let table = Table::open(file, name, &temporary, Limits::default(), &|| false);
        let to = Dir::open(to).expect("open");
        let receiver = Receiver::open(&to, table.expect("table"), false, &|| false);
        let mut receiver = receiver.expect("receiver");
        let patience = Patience(Duration::from_secs(60));
        receiver
            .take(input, patience, &AtomicU64::default(), &|| false)
            .expect("take");
        receiver.finish(&|| false).expect("finish");
    }
}

/// By how many MiB the resident memory of this process is higher at its peak than before.
fn rise(act: impl FnOnce()) -> f64 {
    let field = |name: &str| {
        let status = fs::read_to_string("/proc/self/status").expect("status");
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        let number = line
            .and_then(|line| line.split_whitespace().next())
            .expect("a number");
        number.parse::<f64>().expect("a number") / 1024.0
    };
    // Resets the peak (proc(5)).
    fs::write("/proc/self/clear_refs", "5").expect("clear_refs");
    let before = field("VmRSS:");
    act();
    field("VmHWM:") - before
}

/// Milliseconds.
pub fn timed(act: impl FnOnce()) -> f64 {
    let began = Instant::now();
    act();
    began.elapsed().as_secs_f64() * 1000.0
}

fn ours(tree: &Path, codec: Codec, out: impl std::io::Write + Send) {
    let temporary = Dir::open(tree).expect("open");
    let how = Pack {
        codec,
        devices: false,
        hashing: Hashing::None,
        temporary: &temporary,
    };
    pack(&temporary, out, how, &Progress::default(), &|| false).expect("pack");
}

fn from(input: impl std::io::Read + Send, to: &Path) {
    let to = Dir::open(to).expect("open");
    let how = Unpack {
        hashing: Hashing::None,
        ..Unpack::default()
    };
    unpack(input, &to, how, &Progress::default(), &|| false).expect("unpack");
}

/// Packs a tree into a socket, and unpacks it at the other end.
fn through_socket(tree: &Path, to: &Path) {
    let (mut sender, receiver) = UnixStream::pair().expect("a socket");
    std::thread::scope(|scope| {
        scope.spawn(|| from(receiver, to));
        ours(tree, Codec::Zstd(1), &mut sender);
        drop(sender);
    });
}

/// Milliseconds that the work of both ends needs at least, on all cores at once: each core reads,
/// compresses, decompresses and creates its share of the files, and waits for no other. Two cores
/// that share a processor's caches and memory do less than twice the work of one. So the time of
/// one core is not divided.
pub fn bound(tree: &Path, to: &Path, (count, size): (usize, usize)) -> f64 {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let share = count.div_ceil(cores).next_multiple_of(PER_DIR);
    let start = Barrier::new(cores);
    std::thread::scope(|scope| {
        let cores = (0..cores).map(|core| {
            let files = (core * share).min(count)..((core + 1) * share).min(count);
            let start = &start;
            scope.spawn(move || bound_of_a_core(tree, to, (files, size), start))
        });
        // All begin before one is waited for.
        let cores: Vec<_> = cores.collect();
        let took = cores.into_iter().map(|core| core.join().expect("it ended"));
        took.fold(0.0, f64::max)
    })
}

/// One thread does each step from memory to memory, without headers or digests. The memory is
/// touched before: here the first touch of a page may cost more than compressing it.
fn bound_of_a_core(
    tree: &Path,
    to: &Path,
    (files, size): (Range<usize>, usize),
    start: &Barrier,
) -> f64 {
    let mut read = Vec::with_capacity(files.len());
    // `read_to_end` looks for more behind the last byte.
    let [mut plain, mut packed, mut unpacked] = [(); 3].map(|()| {
        let mut memory = vec![1; files.len() * size + (1 << 20)];
        memory.clear();
        memory
    });
    let mut compressor = zstd::bulk::Compressor::new(1).expect("zstd");
    let mut decompressor = zstd::bulk::Decompressor::new().expect("zstd");
    start.wait();
    let took = timed(|| {
        for index in files {
            let name = format!("{}/{}/{index}", index / PER_DIR / 20, index / PER_DIR);
            let mut file = fs::File::open(tree.join(&name)).expect("open");
            let length = file.read_to_end(&mut plain).expect("read");
            read.push((index, name, length));
        }
        let packing = compressor.compress_to_buffer(&plain, &mut packed);
        packing.expect("zstd");
        let unpacking = decompressor.decompress_to_buffer(&packed, &mut unpacked);
        unpacking.expect("zstd");
        let mut rest = &unpacked[..];
        for (index, name, length) in &read {
            let path = to.join(name);
            if index % PER_DIR == 0 {
                fs::create_dir_all(path.parent().expect("it has one")).expect("mkdir");
            }
            let (bytes, further) = rest.split_at(*length);
            rest = further;
            let mut file = fs::File::create_new(path).expect("create");
            file.write_all(bytes).expect("write");
            file.set_modified(std::time::UNIX_EPOCH).expect("utimensat");
        }
    });
    assert!(plain == unpacked, "zstd gives back what it took");
    took
}

pub fn shell(script: &str, arguments: &[&Path]) {
    let mut shell = Command::new("sh");
    shell.arg("-c").arg(script).args(arguments);
    let mut child = shell.stderr(Stdio::piped()).spawn().expect("sh starts");
    let mut said = String::new();
    let mut stderr = child.stderr.take().expect("it is piped");
    stderr.read_to_string(&mut said).expect("read");
    assert!(child.wait().expect("it ends").success(), "{script}: {said}");
}

/// Text of frequent and rare words, which compresses like source code.
pub struct Words(pub u64);

impl Words {
    pub fn text(&mut self, bytes: usize) -> Vec<u8> {
        let mut text = Vec::with_capacity(bytes + 16);
        while text.len() < bytes {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            let (word, rare) = (self.0 % 61, self.0 >> 8 & 15);
            let word = if rare == 0 {
                self.0 % 65_521
            } else {
                word * word
            };
            text.extend_from_slice(format!("{word:x}_{} ", word % 7).as_bytes());
        }
        text.truncate(bytes);
        text
    }
}
