//! A disk that refuses to write for a while (`dm-flakey` with `error_writes`), below a busy pool.
//!
//! If the whole disk refuses, the filesystem shuts down: failures must be reported, and earlier
//! promises hold after the next mount. If only file content is refused (an xfs with a data disk of
//! its own, its "realtime" device), the filesystem stays up. Nothing written meanwhile is sealed.
//! Once the disk works, the driver continues. It asks for a restart if it could not read its index.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rustix::mount::{MountFlags, UnmountFlags};

use super::cuts::{attach, dmsetup, look, mkfs, mount, runtime};
use super::debian::run;
use super::facts::{Fact, Promised, Random};
use super::init::tell;
use super::job::{Report, Shaken};
use super::work::{Ground, Place, Unproven, Work};

const DEVICE: &str = "shaky";
const AT: &str = "/tmp/disk";
/// No operation may take longer, however broken the disk.
const PATIENCE: Duration = Duration::from_secs(100);

/// A disk that can be told to refuse.
struct Shaky {
    under: PathBuf,
    sectors: u64,
}

impl Shaky {
    fn new(bytes: u64) -> Self {
        let shaky = Self {
            under: disk("shaky", bytes),
            sectors: bytes / 512,
        };
        dmsetup(&["create", DEVICE, "--table", &shaky.well()]);
        shaky
    }

    fn device() -> PathBuf {
        format!("/dev/mapper/{DEVICE}").into()
    }

    fn well(&self) -> String {
        format!("0 {} linear {} 0", self.sectors, self.under.display())
    }

    fn become_what(table: &str) {
        dmsetup(&["suspend", "--noflush", "--nolockfs", DEVICE]);
        dmsetup(&["load", DEVICE, "--table", table]);
        dmsetup(&["resume", DEVICE]);
    }

    fn refuse(&self) {
        let under = self.under.display();
        let table = format!("0 {} flakey {under} 0 0 3600 1 error_writes", self.sectors);
        Self::become_what(&table);
    }

    fn recover(&self) {
        Self::become_what(&self.well());
    }
}

fn disk(name: &str, bytes: u64) -> PathBuf {
    let image = Path::new("/dev/shm").join(name);
    File::create(&image)
        .and_then(|file| file.set_len(bytes))
        .expect("a disk");
    attach(&image)
}

/// The filesystem on it, and how it is mounted.
struct Under {
    shaken: Shaken,
    ground: Ground,
    /// Where xfs has its metadata, if elsewhere.
    metadata: Option<PathBuf>,
}

impl Under {
    fn make(ground: Ground, shaken: Shaken) -> Self {
        let metadata = match shaken {
            Shaken::All => {
                mkfs(ground, &Shaky::device());
                None
            }
            Shaken::Data => {
                let metadata = disk("metadata", ground.disk());
                let arguments = ["-q", "-f", "-K", "-m", "reflink=0,rmapbt=0"];
                run(Command::new("mkfs.xfs")
                    .args(arguments)
                    .args(["-d", "rtinherit=1", "-r"])
                    .arg(format!("rtdev={}", Shaky::device().display()))
                    .arg(&metadata))
                .expect("mkfs");
                Some(metadata)
            }
        };
        Self {
            shaken,
            ground,
            metadata,
        }
    }

    fn mount(&self) {
        let at = Path::new(AT);
        match &self.metadata {
            None => mount(self.ground, &Shaky::device(), at),
            Some(metadata) => {
                let none = MountFlags::empty();
                let options = format!("rtdev={}", Shaky::device().display());
                let options = std::ffi::CString::new(options).expect("text");
                rustix::mount::mount(metadata, at, "xfs", none, Some(options.as_c_str()))
            }
        }
        .expect("it mounts");
    }
}

/// All of it, in a guest.
pub(crate) fn shake(ground: Ground, shaken: Shaken, seed: u64) {
    fs::create_dir(AT).expect("mkdir");
    let shaky = Shaky::new(ground.disk());
    let under = Under::make(ground, shaken);
    under.mount();
    let place = Place {
        ground,
        pool: Path::new(AT).join("pool"),
        targets: "/tmp/targets".into(),
        seed,
    };
    let facts = std::cell::RefCell::new(Vec::<Fact>::new());
    let note = |fact: Fact| facts.borrow_mut().push(fact);
    let mut random = Random::new(seed ^ 0xbad);
    let (mut operations, mut refusals) = (0, 0);
    runtime().block_on(async {
        let mut work = Work::begin(&place, &note).await;
        let rounds = if under.shaken == Shaken::Data { 3 } else { 1 };
        for _ in 0..rounds {
            for _ in 0..6 + random.below(8) {
                work.step().await.expect("the disk is well");
                operations += 1;
            }
            shaky.refuse();
            let mut heard = |done: Result<Result<(), String>, _>| {
                operations += 1;
                if let Err(why) = done.expect("it fails rather than hangs") {
                    refusals += 1;
                    tell(&Report::Said(format!("refused: {why}")));
                }
            };
            for _ in 0..5 + random.below(8) {
                heard(tokio::time::timeout(PATIENCE, work.step()).await);
            }
            // The content of a filesystem that has shut down may exist only in memory (ext4, Linux
            // 6.1: unwritable pages stay dirty). A claim is one transaction of the index; its
            // promises are checked afterwards.
            heard(tokio::time::timeout(PATIENCE, work.one_more_claim()).await);
            shaky.recover();
            if under.shaken == Shaken::Data {
                // Writes during the failure may still be reported as lost; after that everything
                // works.
                let mut tries = 0;
                loop {
                    let proof = tokio::time::timeout(PATIENCE, work.prove());
                    let why = match proof.await.expect("it fails rather than hangs") {
                        Ok(()) => break,
                        Err(Unproven::Refused(why)) => why,
                        Err(Unproven::Degraded(why)) => {
                            let restart = tokio::time::timeout(PATIENCE, work.restarted());
                            work = restart.await.expect("it restarts rather than hangs");
                            why
                        }
                    };
                    tries += 1;
                    tell(&Report::Said(format!("not well yet: {why}")));
                    assert!(tries < 12, "it does not work again: {why}");
                }
            }
        }
        if under.shaken == Shaken::Data {
            for _ in 0..10 {
                work.step().await.expect("the disk is well again");
                operations += 1;
            }
        }
        let end = tokio::time::timeout(PATIENCE, work.end());
        end.await.expect("it ends, however broken the disk is");
    });
    tell(&Report::Worked(operations));
    tell(&Report::Said(format!("{refusals} operations were refused")));
    let facts = facts.into_inner();
    another_boot();
    under.mount();
    let promised = Promised::by(&facts);
    let after = Path::new("/tmp/targets-after");
    let verdict = look(ground, seed, Path::new(AT), after, &promised);
    let what = format!(
        "{ground:?}, {shaken:?} refused, seed {seed}, {} promises",
        facts.len()
    );
    tell(&Report::Looked(what, verdict));
}

/// As after a reboot: nothing is mounted, the page cache is gone, and the kernel's boot has another
/// name.
fn another_boot() {
    for _ in 0..100 {
        let mounts = baggageclaim::sys::mount_table().expect("the mount table");
        let mut ours = mounts
            .iter()
            .map(|mount| &mount.mount_point)
            .filter(|at| at.starts_with("/tmp/targets") || at.starts_with(AT));
        let Some(last) = ours.next_back() else { break };
        let how = UnmountFlags::NOFOLLOW | UnmountFlags::DETACH;
        rustix::mount::unmount(last, how).expect("umount");
    }
    fs::write("/tmp/boot", "00000000-0000-4000-8000-000000000001\n").expect("write");
    let boot = "/proc/sys/kernel/random/boot_id";
    rustix::mount::mount_bind("/tmp/boot", boot).expect("another boot");
}
