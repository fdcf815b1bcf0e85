//! Limits the threads that compress with zstd, for all streams of this process together, to one per
//! core. A stream of an archive always gets at least one. All frames between nodes together get at
//! least one.

use std::sync::OnceLock;

use parking_lot::{Condvar, Mutex};

/// The cores of this machine.
pub(super) static CORES: Cores = Cores::new();

/// The threads in use.
pub(super) struct Cores {
    used: Mutex<Used>,
    freed: Condvar,
}

#[derive(Default)]
struct Used {
    /// Workers of zstd that streams of archives have.
    streams: u32,
    /// Frames that are being compressed.
    frames: u32,
}

/// The workers of one stream of an archive. Given back when it is dropped.
pub(super) struct Workers<'a> {
    of: &'a Cores,
    pub(super) count: u32,
}

impl Cores {
    const fn new() -> Self {
        Self {
            used: Mutex::new(Used {
                streams: 0,
                frames: 0,
            }),
            freed: Condvar::new(),
        }
    }

    /// How many cores there are. Asked once: each question reads files of the kernel.
    pub(super) fn all() -> u32 {
        static ALL: OnceLock<u32> = OnceLock::new();
        *ALL.get_or_init(|| {
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            u32::try_from(cores).unwrap_or(1)
        })
    }

    /// Workers for a stream of an archive: one for each of `cores` that no other stream has, and at
    /// least one. The stream has them as long as it lasts, so it never waits for others.
    pub(super) fn workers(&self, cores: u32) -> Workers<'_> {
        let mut used = self.used.lock();
        let count = cores.saturating_sub(used.streams).max(1);
        used.streams += count;
        Workers { of: self, count }
    }

    /// Compresses a frame once a core is free.
    pub(super) fn frame<T>(&self, cores: u32, compress: impl FnOnce() -> T) -> T {
        let full = |used: &mut Used| used.frames >= cores.saturating_sub(used.streams).max(1);
        let mut used = self.used.lock();
        self.freed.wait_while(&mut used, full);
        used.frames += 1;
        drop(used);
        let _core = FrameCore(self);
        compress()
    }
}

/// The core of one frame. Given back when it is dropped, also after a panic.
struct FrameCore<'a>(&'a Cores);

impl Drop for FrameCore<'_> {
    fn drop(&mut self) {
        self.0.used.lock().frames -= 1;
        self.0.freed.notify_one();
    }
}

impl Drop for Workers<'_> {
    fn drop(&mut self) {
        self.of.used.lock().streams -= self.count;
        self.of.freed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[test]
    fn streams_at_once_share_the_cores() {
        let cores = Cores::new();
        let first = cores.workers(4);
        let second = cores.workers(4);
        assert_eq!((first.count, second.count), (4, 1));
        drop(first);
        let third = cores.workers(4);
        assert_eq!((third.count, cores.used.lock().streams), (3, 4));
        drop((second, third));
        assert_eq!(cores.used.lock().streams, 0);
    }

    #[test]
    fn frames_are_compressed_on_the_cores_that_streams_leave() {
        let cores = Cores::new();
        for (streams, most) in [(0, 3), (1, 2), (3, 1), (5, 1)] {
            cores.used.lock().streams = streams;
            let (running, peak) = (AtomicU32::new(0), AtomicU32::new(0));
            std::thread::scope(|scope| {
                for _ in 0..8 {
                    scope.spawn(|| {
                        for _ in 0..50 {
                            cores.frame(3, || {
                                let now = running.fetch_add(1, Ordering::SeqCst) + 1;
                                peak.fetch_max(now, Ordering::SeqCst);
                                std::thread::yield_now();
                                running.fetch_sub(1, Ordering::SeqCst);
                            });
                        }
                    });
                }
            });
            let peak = peak.into_inner();
            assert!((1..=most).contains(&peak), "{streams}: {peak}");
        }
    }
}
