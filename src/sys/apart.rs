//! A thread for one piece of work that may block without end, as on a disk that does not answer.
//! The pools of threads of the engine are in `engine`.

use std::future::Future;
use std::io;

use tokio::sync::oneshot;

/// Runs work that may block for as long as a disk does, on a thread of its own. A caller that stops
/// waiting leaves nothing locked that others need.
pub async fn apart<T: Send + 'static>(
    name: &str,
    job: impl Future<Output = T> + Send + 'static,
) -> io::Result<T> {
    let runtime = tokio::runtime::Handle::current();
    on_thread(name, move || runtime.block_on(job)).await
}

/// The same for a call. It runs to its end, also without its caller.
pub async fn on_thread<T: Send + 'static>(
    name: &str,
    call: impl FnOnce() -> T + Send + 'static,
) -> io::Result<T> {
    let (answer, answered) = oneshot::channel();
    std::thread::Builder::new()
        .name(name.to_owned())
        .spawn(move || drop(answer.send(call())))?;
    // The panic was printed where it happened.
    answered
        .await
        .map_err(|_| io::Error::other("the thread panicked"))
}
