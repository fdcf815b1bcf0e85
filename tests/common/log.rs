//! What is logged, for tests to read: by one thread, or by the whole program through a subscriber
//! of the test.

use std::io;
use std::sync::{Arc, LazyLock};

use parking_lot::Mutex;
use tracing::Dispatch;
use tracing::subscriber::DefaultGuard;

/// With one subscriber alone, tracing asks that of the thread which logs a line first, and
/// remembers its answer. Other threads of a test program have none.
static ANOTHER: LazyLock<Dispatch> = LazyLock::new(|| {
    let subscriber = tracing_subscriber::fmt().with_writer(io::sink);
    Dispatch::new(subscriber.finish())
});

/// What was written since [`Log::begin`] or [`Log::forget`].
#[derive(Clone, Default)]
pub struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Log {
    /// The log of this thread, while the guard lives.
    pub fn begin() -> (Self, DefaultGuard) {
        LazyLock::force(&ANOTHER);
        let log = Self::default();
        let writer = log.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_ansi(false)
            .with_writer(move || writer.clone())
            .finish();
        (log, tracing::subscriber::set_default(subscriber))
    }

    pub fn forget(&self) {
        self.0.lock().clear();
    }

    pub fn text(&self) -> String {
        String::from_utf8(self.0.lock().clone()).expect("log lines are text")
    }

    /// How many lines contain this text.
    pub fn count(&self, text: &str) -> usize {
        let log = self.text();
        log.lines().filter(|line| line.contains(text)).count()
    }

    pub fn says(&self, text: &str) -> bool {
        self.count(text) > 0
    }
}
