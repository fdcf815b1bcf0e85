//! Prewarming: directories of future volumes, made before a pod asks for one.
//!
//! A third of a publish makes directories and files that are the same for every volume. In another
//! third the kernel builds an overlay that is the same for every volume of one content. So a few
//! plain spares are kept ready. Of volumes that were published twice lately, a few spares are already
//! mounted, attached nowhere. A publish takes one by a rename. Without one (a burst of pods, a full
//! disk, a volume with a size limit) it makes everything itself.
//!
//! Only the process that made the spares knows them, by descriptors that it keeps open. A start
//! deletes the spares of an earlier process in `spares/`.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::error::{Context, Result};
use super::failpoint::{Point, point};
use super::pool::{Pool, random, throw_away};
use super::threads::Threads;
use crate::backend::{self, Prepared, Start};
use crate::model::{LayerId, RootAttributes, VolumeRecord};
use crate::store::{self, BlankRecord};
use crate::sys::{self, Dir};

/// How many plain spares are kept ready: a pod has a few volumes, and a few pods come at a time.
/// Each costs four inodes.
const MOST: usize = 32;

/// With so few left, more are made. Many at a time: publishes seldom meet the thread that makes them.
const FEW: usize = 16;

/// Of how many shapes mounted spares are kept: the steps of one pipeline ask for so many at a time.
const SHAPES: usize = 8;

/// How many spares of a shape are kept mounted at most. Each costs a superblock in the kernel's
/// memory, some kilobytes.
const MOST_MOUNTED: usize = 8;

/// The properties of a volume on which its mount depends.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Shape {
    layers: Vec<LayerId>,
    root: RootAttributes,
    sealable: bool,
    read_only: bool,
}

impl Shape {
    /// The shape of this volume; `None`: there can be no spares of it.
    fn of(record: &VolumeRecord) -> Option<Self> {
        let Start {
            root,
            size_limit,
            sealable,
            ..
        } = Start::of(record);
        // A limit is set before anything is made in the directory. The root of an empty volume gets
        // the time of its publish, which cannot be written through a read-only mount.
        let possible = size_limit.is_none() && !(record.layers.is_empty() && record.read_only);
        possible.then(|| Self {
            layers: record.layers.clone(),
            root,
            sealable,
            read_only: record.read_only,
        })
    }

    fn start<'a>(&'a self, prepared: Option<&'a Prepared>) -> Start<'a> {
        Start {
            layers: &self.layers,
            root: self.root,
            size_limit: None,
            sealable: self.sealable,
            owner: None,
            durable: false,
            prepared,
        }
    }
}

/// How far a spare is made.
#[derive(Debug)]
pub(super) enum Stage {
    /// It has what every volume begins with.
    Plain(Option<Prepared>),
    /// It has all of its content, and is mounted, attached nowhere.
    Mounted {
        mount: OwnedFd,
        id: u64,
        /// Its label in the kernel's mount table.
        label: String,
    },
}

/// A directory that will be a volume's.
#[derive(Debug)]
pub(super) struct Spare {
    /// Its name in `spares/`.
    pub(super) name: String,
    pub(super) dir: Dir,
    pub(super) record: BlankRecord,
    pub(super) stage: Stage,
}

impl Spare {
    fn make(pool: &Pool, shape: Option<&Shape>) -> backend::Result<Self> {
        let name = LayerId::from_bits(random()).to_string();
        pool.dirs.spares.create_dir(&name, 0o700)?;
        let made = Self::furnish(pool, &name, shape);
        if made.is_err() {
            // On a full disk, say. What cannot be deleted is swept at the next start.
            let _ = pool
                .backend
                .delete(&pool.dirs.spares, name.as_ref(), &|| false);
        }
        made
    }

    fn furnish(pool: &Pool, name: &str, shape: Option<&Shape>) -> backend::Result<Self> {
        let dir = pool.dirs.spares.open_beneath(name)?;
        let prepared = pool.backend.prepare(&dir)?;
        point(Point::SparePrepared);
        let stage = match shape {
            None => Stage::Plain(prepared),
            Some(shape) => {
                let start = shape.start(prepared.as_ref());
                pool.backend.create(&dir, &start)?;
                let mount = pool.backend.mount(&dir, name, &start, shape.read_only)?;
                point(Point::SpareMounted);
                Stage::Mounted {
                    id: sys::mount_point(mount.as_fd())?.id,
                    mount,
                    label: name.to_owned(),
                }
            }
        };
        Ok(Self {
            record: store::blank_volume(&dir)?,
            name: name.to_owned(),
            dir,
            stage,
        })
    }

    /// Unmounts and deletes it. It is small, and no pod has seen it.
    fn delete(self, pool: &Pool) {
        drop(self.stage);
        if let Err(error) = pool
            .backend
            .delete(&pool.dirs.spares, self.name.as_ref(), &|| false)
        {
            tracing::debug!(%error, "a spare volume is left for the next start");
        }
    }

    /// Whether a volume may still be made of it.
    fn is_sound(&self, pool: &Pool, volume: &VolumeRecord) -> bool {
        match &self.stage {
            Stage::Plain(_) => true,
            Stage::Mounted { mount, .. } => {
                let start = Start::of(volume);
                let lost = pool.backend.write_back_error(mount.as_fd(), &start);
                lost.is_none()
            }
        }
    }
}

/// A shape that was published lately, and what there is of it.
#[derive(Debug)]
struct Batch {
    shape: Shape,
    /// How often it was published. Most shapes are published once.
    asked: usize,
    ready: Vec<Spare>,
}

impl Batch {
    /// How many should be ready.
    fn wanted(&self) -> usize {
        self.asked.saturating_sub(1).min(MOST_MOUNTED)
    }
}

/// The spares that are ready.
#[derive(Debug, Default)]
struct Stock {
    plain: Vec<Spare>,
    /// The one published last comes first.
    mounted: VecDeque<Batch>,
    /// Those of shapes that are not kept any more. They are to be deleted.
    discarded: Vec<Spare>,
}

impl Stock {
    /// Whether there is something to do.
    fn is_low(&self) -> bool {
        let few = |batch: &Batch| batch.ready.len() < batch.wanted().div_ceil(2);
        self.plain.len() < FEW || !self.discarded.is_empty() || self.mounted.iter().any(few)
    }

    /// The next piece of work; `None`: there are enough spares of all shapes.
    fn next(&mut self) -> Option<Work> {
        if let Some(spare) = self.discarded.pop() {
            return Some(Work::Discard(spare));
        }
        if self.plain.len() < FEW {
            return Some(Work::Make(None));
        }
        let wanted = |batch: &&Batch| batch.ready.len() < batch.wanted();
        if let Some(batch) = self.mounted.iter().find(wanted) {
            return Some(Work::Make(Some(batch.shape.clone())));
        }
        (self.plain.len() < MOST).then_some(Work::Make(None))
    }

    /// Takes the spares of these shapes out, and those that are to be deleted anyway.
    fn take_where(&mut self, gone: impl Fn(&Shape) -> bool) -> Vec<Spare> {
        let mut taken = std::mem::take(&mut self.discarded);
        self.mounted.retain_mut(|batch| {
            let goes = gone(&batch.shape);
            if goes {
                taken.append(&mut batch.ready);
            }
            !goes
        });
        taken
    }
}

/// A piece of work for the thread.
enum Work {
    Make(Option<Shape>),
    Discard(Spare),
}

/// Those that are ready, and the thread that makes them.
#[derive(Debug)]
pub(super) struct Spares {
    making: Arc<Making>,
    thread: Threads,
    being_filled: Arc<AtomicBool>,
}

/// Those that are ready, and what more are made of.
#[derive(Debug)]
struct Making {
    pool: Pool,
    stock: Mutex<Stock>,
}

impl Spares {
    pub(super) fn new(pool: Pool, thread: Threads) -> Self {
        let stock = Mutex::default();
        Self {
            making: Arc::new(Making { pool, stock }),
            thread,
            being_filled: Arc::default(),
        }
    }

    /// Deletes the spares of an earlier process. At once and not through the trash: otherwise a driver
    /// that is killed again and again before it empties the trash would fill the pool.
    pub(super) fn sweep(&self) -> Result<()> {
        let pool = &self.making.pool;
        let spares = &pool.dirs.spares;
        for entry in spares.entries().context("read spares/")? {
            let name = entry.name.as_ref();
            if let Err(error) = pool.backend.delete(spares, name, &|| false) {
                tracing::debug!(%error, "a spare volume goes to the trash");
                if let Err(error) = throw_away(&pool.dirs, spares, name) {
                    // It blocks nothing: each spare has a name of its own.
                    tracing::error!(%error,
                        "a spare volume of an earlier process stays until the next start");
                }
            }
        }
        Ok(())
    }

    /// One for this volume, if there is one: the nearest to what it has to become.
    pub(super) fn take(&self, volume: &VolumeRecord) -> Option<Spare> {
        let spare = self.nearest(volume)?;
        if spare.is_sound(&self.making.pool, volume) {
            return Some(spare);
        }
        // Nor is any other that was mounted before, and there is none any more now.
        self.making.delete(vec![spare]);
        self.forget_mounted();
        self.nearest(volume)
    }

    fn nearest(&self, volume: &VolumeRecord) -> Option<Spare> {
        if volume.spec.size_limit.is_some() {
            return None;
        }
        let shape = Shape::of(volume);
        let mut stock = self.making.stock.lock();
        let mut batches = stock.mounted.iter_mut();
        let batch = batches.find(|batch| Some(&batch.shape) == shape.as_ref());
        let mounted = batch.and_then(|batch| batch.ready.pop());
        mounted.or_else(|| stock.plain.pop())
    }

    /// One that was not used after all.
    pub(super) fn give_back(&self, spare: Spare, volume: &VolumeRecord) {
        let mut stock = self.making.stock.lock();
        if matches!(spare.stage, Stage::Plain(_)) {
            stock.plain.push(spare);
            return;
        }
        let shape = Shape::of(volume);
        let mut batches = stock.mounted.iter_mut();
        match batches.find(|batch| Some(&batch.shape) == shape.as_ref()) {
            Some(batch) => batch.ready.push(spare),
            None => stock.discarded.push(spare),
        }
    }

    /// Another program deleted the directory of this spare: no volume is made of it.
    pub(super) fn is_missing(&self, spare: Spare, error: &sys::Error) {
        tracing::warn!(%error,
            "a spare volume is missing: the publish goes on without it; only the driver may delete \
             files in the pool");
        // Its mount, if it has one.
        self.making.delete(vec![spare]);
    }

    /// Counts a published volume. A shape that was published twice is likely to be published again.
    pub(super) fn note(&self, volume: &VolumeRecord) {
        let mounts = self.making.pool.backend.mounts_beforehand();
        let Some(shape) = Shape::of(volume).filter(|_| mounts) else {
            return;
        };
        let mut stock = self.making.stock.lock();
        let known = stock.mounted.iter().position(|batch| batch.shape == shape);
        let batch = match known.and_then(|known| stock.mounted.remove(known)) {
            Some(batch) => Batch {
                asked: batch.asked + 1,
                ..batch
            },
            None => Batch {
                shape,
                asked: 1,
                ready: Vec::new(),
            },
        };
        stock.mounted.push_front(batch);
        if stock.mounted.len() > SHAPES
            && let Some(last) = stock.mounted.pop_back()
        {
            stock.discarded.extend(last.ready);
        }
    }

    /// Unmounts the spares over this layer, which is about to be deleted. A spare that is just being
    /// mounted goes a moment later.
    pub(super) fn forget(&self, layer: &LayerId) {
        self.making
            .delete_where(|shape| shape.layers.contains(layer));
    }

    /// Unmounts all spares. Either space is short, or there was a write-back error: then every fsync
    /// of a `volatile` overlay that was mounted before fails.
    pub(super) fn forget_mounted(&self) {
        self.making.delete_where(|_| true);
    }

    /// Has more of them made if there are few. Costs nothing where there are enough.
    pub(super) fn fill(&self) {
        let low = self.making.stock.lock().is_low();
        if !low || self.being_filled.swap(true, Ordering::SeqCst) {
            return;
        }
        let (making, being_filled) = (self.making.clone(), self.being_filled.clone());
        // If no job is accepted any more, no spare is needed.
        drop(self.thread.run(move || {
            making.fill();
            being_filled.store(false, Ordering::SeqCst);
            // A publish that found too few before the store was ignored.
            making.fill();
        }));
    }

    /// Deletes all spares: the next start may need the space on a full disk. Blocks until the thread
    /// has ended.
    pub(super) fn finish(&self) {
        self.thread.finish();
        let stock = std::mem::take(&mut *self.making.stock.lock());
        let mounted = stock.mounted.into_iter().flat_map(|batch| batch.ready);
        let unmounted = stock.plain.into_iter().chain(stock.discarded);
        self.making.delete(unmounted.chain(mounted).collect());
    }
}

impl Making {
    fn fill(&self) {
        while !self.pool.stop.is_cancelled() {
            let next = self.stock.lock().next();
            let Some(work) = next else { break };
            if let Err(error) = self.work(work) {
                tracing::debug!(%error, "no spare volume was made");
                break;
            }
        }
    }

    fn work(&self, work: Work) -> backend::Result<()> {
        let shape = match work {
            Work::Discard(spare) => {
                self.delete(vec![spare]);
                return Ok(());
            }
            Work::Make(None) => {
                let spare = Spare::make(&self.pool, None)?;
                self.stock.lock().plain.push(spare);
                return Ok(());
            }
            Work::Make(Some(shape)) => shape,
        };
        let made = Spare::make(&self.pool, Some(&shape));
        let mut stock = self.stock.lock();
        let Some(batch) = stock.mounted.iter_mut().find(|batch| batch.shape == shape) else {
            // Forgotten meanwhile, perhaps because a layer goes.
            stock.discarded.extend(made.ok());
            return Ok(());
        };
        match made {
            Ok(spare) => batch.ready.push(spare),
            Err(error) => {
                // Not tried again with each plain spare.
                batch.asked = 0;
                return Err(error);
            }
        }
        Ok(())
    }

    /// Deletes the spares of these shapes.
    fn delete_where(&self, gone: impl Fn(&Shape) -> bool) {
        let taken = self.stock.lock().take_where(gone);
        self.delete(taken);
    }

    fn delete(&self, spares: Vec<Spare>) {
        for spare in spares {
            spare.delete(&self.pool);
        }
    }
}
