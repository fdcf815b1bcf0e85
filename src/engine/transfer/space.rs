//! Space for content that is being received: requested first, and checked again while it arrives.
//! The gate that checks it also starts the write-back of received data while the transfer goes on,
//! if a caller waits until that is durable.
//!
//! An import never takes the last space of the disk, because running pods need some. While there is
//! too little, unused caches are evicted and the import waits for a limited time. An import that is
//! too large for the pool is refused at once.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::engine::error::{Context, Error, Result, Shortage};
use crate::engine::shared::Inner;
use crate::engine::threads::Pool;
use crate::sys::Space;

/// How long an import waits for eviction each time that it finds too little space.
const PATIENCE: Duration = Duration::from_secs(30);
/// How often the space is looked at where it comes back later than what was deleted is gone
/// (btrfs).
const LOOK_AGAIN: Duration = Duration::from_millis(100);
/// The space is looked at each time that so many plain bytes came in, which may take twice as many
/// on disk.
const STEP: u64 = 8 << 20;
/// It is also looked at after so many entries, which take inodes and blocks however little content
/// they have.
const ENTRIES: u64 = 1024;
/// What came in is written back each time that it is so many plain bytes more. Otherwise all of it
/// waits for the `syncfs` at the end: the kernel begins by itself at a tenth of the memory
/// (`vm.dirty_background_ratio`).
const WRITE_BACK: u64 = 128 << 20;

/// The space that a transfer leaves free when it begins: a thirty-second of the pool, and at most
/// 64 MiB.
fn margin(space: &Space) -> u64 {
    (space.bytes / 32).min(64 << 20)
}

/// What it leaves free while it runs: files take more on disk than their bytes.
fn least(space: &Space) -> u64 {
    margin(space) / 2
}

/// The inodes that it leaves free: a thirty-second of them, and at most 4,096.
fn least_inodes(space: &Space) -> u64 {
    (space.inodes / 32).min(4096)
}

/// Waits until `needs` bytes are free beside the margin, and has unused caches evicted for them.
/// Blocks.
pub(super) fn ask(inner: &Inner, needs: u64) -> Result<()> {
    ask_beside(inner, needs, margin)
}

fn ask_beside(inner: &Inner, needs: u64, stays_free: fn(&Space) -> u64) -> Result<()> {
    let began = Instant::now();
    loop {
        let space = inner
            .dirs
            .root
            .space()
            .context("ask for the pool's space")?;
        let wanted = needs.saturating_add(stays_free(&space));
        let has_inodes = space.inodes == 0 || space.inodes_free >= least_inodes(&space);
        let has_bytes = wanted <= space.bytes_available;
        if has_bytes && has_inodes {
            return Ok(());
        }
        if wanted > space.bytes {
            return Err(Error::TooLarge {
                wanted: needs,
                pool: space.bytes,
            });
        }
        let (what, needs) = if has_bytes {
            let what = format!(
                "{} of the pool's {} inodes are free",
                space.inodes_free, space.inodes
            );
            (what, 0)
        } else {
            let what = format!(
                "the archive needs {needs} bytes more, and {} of the pool's {} bytes are free",
                space.bytes_available, space.bytes
            );
            // The collector counts the share that the filesystem reserves for root as free.
            let reserved = space.bytes_free.saturating_sub(space.bytes_available);
            (what, wanted.saturating_add(reserved))
        };
        let full = Error::Full(Shortage { what, needs });
        let left = PATIENCE.saturating_sub(began.elapsed());
        if left.is_zero() || inner.lifetime.is_stopping() || !evicts(inner, needs, left) {
            return Err(full);
        }
    }
}

/// Has unused caches evicted after a transfer that failed because the disk was full. Where it knew
/// how many bytes it needed, it has asked for them; caches do not go for what cannot fit.
pub(super) fn ask_for_some(inner: &Inner, failed: &Error) {
    if matches!(failed, Error::Full(shortage) if shortage.needs == 0) {
        inner.ask_for_room(0);
    }
}

/// The error of a transfer that failed where the pool has no space or no inodes left; `None`: it
/// has some.
pub(in crate::engine) fn shortage(inner: &Inner) -> Option<Error> {
    let space = inner.dirs.root.space().ok()?;
    let has_inodes = space.inodes == 0 || space.inodes_free > 0;
    if space.bytes_available >= least(&space) && has_inodes {
        return None;
    }
    let what = format!(
        "{} of the pool's {} bytes are free, and {} inodes",
        space.bytes_available, space.bytes, space.inodes_free
    );
    Some(Error::Full(what.into()))
}

/// Has caches evicted for so many bytes; whether that may have helped.
fn evicts(inner: &Inner, bytes: u64, left: Duration) -> bool {
    let gone = inner.collector.rounds.gone();
    let next = inner.collector.rounds.next();
    inner.ask_for_room(bytes);
    let waited = async {
        tokio::select! {
            waited = tokio::time::timeout(left, next) => waited.is_ok(),
            () = inner.lifetime.stopping() => false,
        }
    };
    let helped = inner.lifetime.block_on(waited) && inner.collector.rounds.gone() > gone;
    if helped {
        wait_for_btrfs(inner, bytes, left);
    }
    helped
}

/// btrfs gives the space of a deleted subvolume back later, without an event. Another round would
/// evict more than is needed.
fn wait_for_btrfs(inner: &Inner, bytes: u64, left: Duration) {
    let began = Instant::now();
    let is_waited_for = || {
        let space = inner.dirs.root.space();
        space.is_ok_and(|space| space.magic == Space::BTRFS && space.bytes_free < bytes)
    };
    while is_waited_for() && began.elapsed() < left && !inner.lifetime.is_stopping() {
        std::thread::sleep(LOOK_AGAIN);
    }
}

/// Checks the space while an archive arrives, and stops the import if none can be made.
pub(super) struct Gate<'a> {
    inner: &'a Arc<Inner>,
    plain: &'a dyn Fn() -> u64,
    all: Option<u64>,
    writes_back: bool,
    looked_at: Cell<u64>,
    /// Entries since then.
    entries: Cell<u64>,
    written_back: Cell<u64>,
    is_writing: Arc<AtomicBool>,
    failed: RefCell<Option<Error>>,
}

impl<'a> Gate<'a> {
    /// `plain`: how many bytes came in until now. `all`: how many will come, if that is known.
    /// `writes_back`: the write-back begins early, for a caller that waits for its end. It takes
    /// processor time from the transfer.
    pub(super) fn new(
        inner: &'a Arc<Inner>,
        plain: &'a dyn Fn() -> u64,
        all: Option<u64>,
        writes_back: bool,
    ) -> Self {
        Self {
            inner,
            plain,
            all,
            writes_back,
            looked_at: Cell::new(0),
            entries: Cell::new(0),
            written_back: Cell::new(0),
            is_writing: Arc::default(),
            failed: RefCell::default(),
        }
    }

    /// Whether the import is to stop here. Asked at each entry.
    pub(super) fn stops(&self) -> bool {
        if self.inner.lifetime.is_stopping() {
            return true;
        }
        let plain = (self.plain)();
        let entries = self.entries.get() + 1;
        self.entries.set(entries);
        if plain < self.looked_at.get().saturating_add(STEP) && entries < ENTRIES {
            return false;
        }
        self.looked_at.set(plain);
        self.entries.set(0);
        if self.writes_back {
            self.write_back(plain);
        }
        let rest = self.all.map_or(u64::MAX, |all| all.saturating_sub(plain));
        match ask_beside(self.inner, rest.min(2 * STEP), least) {
            Ok(()) => false,
            Err(error) => {
                self.failed.replace(Some(error));
                true
            }
        }
    }

    /// Begins a write-back of what came in until now, if it is enough and none runs.
    fn write_back(&self, plain: u64) {
        let is_little = plain < self.written_back.get().saturating_add(WRITE_BACK);
        if is_little || self.is_writing.swap(true, Ordering::AcqRel) {
            return;
        }
        self.written_back.set(plain);
        let (inner, is_writing) = (Arc::clone(self.inner), Arc::clone(&self.is_writing));
        let job = move || {
            // A failure taints what comes in, so the transfer fails at its end.
            let _tainted = inner.sync(&inner.durability.lock());
            is_writing.store(false, Ordering::Release);
        };
        drop(self.inner.threads.run(Pool::Syncs, job));
    }

    /// Why it stopped, if space was the reason.
    pub(super) fn why(&self) -> Option<Error> {
        self.failed.take()
    }
}
