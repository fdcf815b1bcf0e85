//! The clock of a cluster: every node gives its stamps in the controller's time, however wrong its
//! own clock is. Pure: the caller reads the local clock, and passes what it read.

use super::time::Timestamp;

/// A measurement with a longer round trip is not used: its error is up to half of the round trip.
pub const MAX_ROUND_TRIP_MS: u64 = 1_000;

/// A stamp that is further ahead of the cluster's time than this counts as now.
pub const MAX_AHEAD_MS: u64 = 60_000;

/// A controller follows a node's clock that is further away than this. It is at least the largest
/// error of two measurements. Otherwise two clocks could drive each other forward.
const ADOPT_ABOVE_MS: u64 = 1_000;

/// No clock follows another one that is further away from its own than this: that one is wrong. So
/// a wrong or hostile clock can move the others by so much at most, and what has a time to live
/// goes by so much too early at most.
const MAX_OFFSET_MS: u64 = 30 * 60 * 1000;

/// Why a measurement of the controller's time is not used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Unmeasured {
    /// The answer took too long.
    #[error("the controller's time came late")]
    Late,
    /// One of the two clocks is wrong.
    #[error(
        "the controller's time is more than 30 minutes away from this machine's: compare their \
         clocks"
    )]
    Far,
}

/// A hybrid clock: the local clock, plus the measured offset to the cluster's time.
///
/// On the controller the local clock runs evenly: the wall clock at the start, plus the monotonic
/// time since. A node measures with its wall clock, since NTP may have corrected that since the
/// boot. Its engine goes on evenly from each measurement (`engine::clock`). So a wall clock that is
/// set while the process runs changes no stamp.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClusterClock {
    offset: Option<i64>,
    last: Timestamp,
}

impl ClusterClock {
    /// The clock after a restart: the stored offset, and the newest stamp that is remembered.
    #[must_use]
    pub fn restored(offset: Option<i64>, last: Timestamp) -> Self {
        Self { offset, last }
    }

    /// The measured offset in milliseconds, to be stored. `None`: never measured, so a stamp is as
    /// wrong as the local clock.
    #[must_use]
    pub fn offset(&self) -> Option<i64> {
        self.offset
    }

    /// The cluster's time.
    #[must_use]
    pub fn time(&self, local: Timestamp) -> Timestamp {
        Timestamp(local.0.saturating_add_signed(self.offset.unwrap_or(0)))
    }

    /// A stamp: the cluster's time, but later than every stamp given or seen before.
    pub fn stamp(&mut self, local: Timestamp) -> Timestamp {
        self.last = Timestamp(self.time(local).0.max(self.last.0 + 1));
        self.last
    }

    /// Gives later stamps than this one from now on. A stamp far ahead is ignored.
    pub fn seen(&mut self, stamp: Timestamp, local: Timestamp) {
        if stamp == counted(stamp, self.time(local)) {
            self.last = self.last.max(stamp);
        }
    }

    /// Measures the offset: the controller's time in an answer, and the local times at which the
    /// question was sent and the answer came.
    ///
    /// # Errors
    ///
    /// The measurement is not used.
    pub fn answered(
        &mut self,
        sent: Timestamp,
        theirs: Timestamp,
        received: Timestamp,
    ) -> Result<(), Unmeasured> {
        let round_trip = received.0.checked_sub(sent.0);
        let in_time = round_trip.filter(|round_trip| *round_trip <= MAX_ROUND_TRIP_MS);
        let round_trip = in_time.ok_or(Unmeasured::Late)?;
        let offset = difference(theirs.0, sent.0 + round_trip / 2);
        if offset.unsigned_abs() > MAX_OFFSET_MS {
            return Err(Unmeasured::Far);
        }
        self.offset = Some(offset);
        Ok(())
    }

    /// The controller's side: follows a node whose clock continues the time of an earlier
    /// controller. `node` is the node's time, if the node has ever measured an offset.
    ///
    /// The first node decides, also back: a machine whose clock is ahead must not make all content
    /// older. After that, time goes forward only. Stamps of a node never go back.
    pub fn adopt(&mut self, node: Timestamp, local: Timestamp) {
        let offset = difference(node.0, local.0);
        if offset.unsigned_abs() > MAX_OFFSET_MS {
            return;
        }
        let ahead = difference(node.0, self.time(local).0);
        let follows = match self.offset {
            None => ahead.unsigned_abs() > ADOPT_ABOVE_MS,
            Some(_) => ahead > ADOPT_ABOVE_MS.cast_signed(),
        };
        let own = self.offset.unwrap_or(0);
        self.offset = Some(if follows { offset } else { own });
    }
}

/// The stamp, or now if the stamp is more than a minute ahead.
#[must_use]
pub fn counted(stamp: Timestamp, now: Timestamp) -> Timestamp {
    if stamp.0 > now.0.saturating_add(MAX_AHEAD_MS) {
        now
    } else {
        stamp
    }
}

fn difference(a: u64, b: u64) -> i64 {
    i64::try_from(i128::from(a) - i128::from(b)).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const T: u64 = 1_795_400_000_000;

    #[test]
    fn nodes_with_clocks_ten_minutes_wrong_order_their_commits() {
        let mut clocks = [0_i64, 600_000, -600_000].map(|skew| (skew, ClusterClock::default()));
        let read = |skew: i64, at: u64| Timestamp((T + at).saturating_add_signed(skew));
        for (skew, clock) in &mut clocks {
            // The way there takes 300 ms, the way back none.
            let answered = clock.answered(read(*skew, 0), Timestamp(T + 300), read(*skew, 300));
            assert_eq!(answered, Ok(()));
        }
        let mut before = Timestamp(0);
        for at in 1..60 {
            let (skew, clock) = &mut clocks[at % 3];
            let stamp = clock.stamp(read(*skew, 1_000 * at as u64));
            assert!(stamp > before, "{at}");
            before = stamp;
        }
    }

    #[test]
    fn stamps_never_go_back_and_follow_what_was_seen() {
        let mut clock = ClusterClock::restored(Some(600_000), Timestamp(0));
        let first = clock.stamp(Timestamp(T));
        assert_eq!(first, Timestamp(T + 600_000));
        let answered = clock.answered(Timestamp(T), Timestamp(T), Timestamp(T));
        assert_eq!(answered, Ok(()));
        assert_eq!(clock.stamp(Timestamp(T)), Timestamp(first.0 + 1));
        let mut clock = ClusterClock::default();
        clock.seen(Timestamp(T + MAX_AHEAD_MS), Timestamp(T));
        assert_eq!(clock.stamp(Timestamp(T)), Timestamp(T + MAX_AHEAD_MS + 1));
        let mut clock = ClusterClock::default();
        clock.seen(Timestamp(T + MAX_AHEAD_MS + 1), Timestamp(T));
        assert_eq!(clock.stamp(Timestamp(T)), Timestamp(T));
    }

    #[test]
    fn a_slow_or_impossible_measurement_is_not_used() {
        let mut clock = ClusterClock::default();
        for received in [T + 1_001, T - 1] {
            let answered = clock.answered(Timestamp(T), Timestamp(T), Timestamp(received));
            assert_eq!(answered, Err(Unmeasured::Late));
        }
        for far in [T + MAX_OFFSET_MS + 1, T - MAX_OFFSET_MS - 1, u64::MAX] {
            let answered = clock.answered(Timestamp(T), Timestamp(far), Timestamp(T));
            assert_eq!(answered, Err(Unmeasured::Far));
        }
        assert_eq!(clock.offset(), None);
    }

    #[test]
    fn a_controller_with_a_fast_clock_goes_back_to_the_time_of_the_first_node_only() {
        let mut controller = ClusterClock::default();
        // Such a clock is wrong.
        controller.adopt(Timestamp(T - MAX_OFFSET_MS - 1), Timestamp(T));
        controller.adopt(Timestamp(T - 1_200_000), Timestamp(T));
        assert_eq!(controller.time(Timestamp(T)), Timestamp(T - 1_200_000));
        controller.adopt(Timestamp(T - 1_500_000), Timestamp(T));
        assert_eq!(controller.time(Timestamp(T)), Timestamp(T - 1_200_000));
        controller.adopt(Timestamp(T - 600_000), Timestamp(T));
        assert_eq!(controller.time(Timestamp(T)), Timestamp(T - 600_000));
        // The first node agrees with this controller.
        let mut controller = ClusterClock::default();
        controller.adopt(Timestamp(T - 1_000), Timestamp(T));
        controller.adopt(Timestamp(T - 600_000), Timestamp(T));
        assert_eq!(controller.time(Timestamp(T)), Timestamp(T));
    }

    #[test]
    fn a_controller_with_a_slow_clock_continues_the_time_that_nodes_have() {
        let mut controller = ClusterClock::default();
        controller.adopt(Timestamp(T + 1_000), Timestamp(T));
        assert_eq!(controller.time(Timestamp(T)), Timestamp(T));
        controller.adopt(Timestamp(T + 600_000), Timestamp(T));
        assert_eq!(controller.time(Timestamp(T + 5)), Timestamp(T + 600_005));
        // A node that is ahead again and again moves it no further than that.
        for minutes in (10..1_000).step_by(10) {
            controller.adopt(Timestamp(T + minutes * 60_000), Timestamp(T));
        }
        assert_eq!(controller.time(Timestamp(T)), Timestamp(T + MAX_OFFSET_MS));
    }
}
