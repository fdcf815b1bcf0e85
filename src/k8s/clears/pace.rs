//! The pauses between two looks of one task: a long one without a change, and after failures one
//! that grows. It does not know what is looked at.

use std::time::{Duration, Instant};

use super::fences::Error;
use crate::link::Backoff;

/// How often the controller looks without a change.
pub(super) const LOOK: Duration = Duration::from_secs(60);
/// The shortest pause after a failure, and between two looks of the keeper, however many changes
/// there are.
pub(super) const AGAIN: Duration = Duration::from_secs(1);

/// The longest pause after a look, without a change. A change may be all that a failed look needs,
/// so that ends it.
pub(super) fn pause_after(done: &Result<(), Error>, backoff: &mut Backoff) -> Duration {
    if done.is_err() {
        return backoff.after_failure(Instant::now());
    }
    *backoff = Backoff::default();
    LOOK
}

#[cfg(test)]
mod tests {
    use super::super::fences::failed;
    use super::*;

    #[test]
    fn each_failure_makes_the_pause_longer_until_a_look_succeeds() {
        let mut backoff = Backoff::default();
        let failure = || Err(failed("read a Cache")(kube::Error::TlsRequired));
        let first = pause_after(&failure(), &mut backoff);
        let last = (0..9).map(|_| pause_after(&failure(), &mut backoff)).last();
        assert!(
            first < AGAIN && last > Some(AGAIN * 5),
            "{first:?} {last:?}"
        );
        assert_eq!(pause_after(&Ok(()), &mut backoff), LOOK);
        assert!(pause_after(&failure(), &mut backoff) < AGAIN);
    }
}
