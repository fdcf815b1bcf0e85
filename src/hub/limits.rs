//! The limits and times of the protocol between nodes and controller: constants that both sides
//! share.

use std::time::Duration;

/// The largest message of either side.
pub(super) const MOST_MESSAGE: usize = 1 << 20;
/// The largest Hello, which has the node's fences. They are those of a week, because nodes forget a
/// fence when it is deleted.
pub(super) const MOST_HELLO: usize = 16 << 20;
/// How many bytes the fences of a Hello take: some 160,000 fences of 100 bytes. Users decide how
/// many fences there are, so a node leaves out the oldest ones. Otherwise it could not connect.
pub(super) const MOST_TOLD: usize = MOST_HELLO - MOST_MESSAGE;
/// How often a node measures the controller's time.
pub(super) const BEAT: Duration = Duration::from_secs(10);
/// How often a node reports what namespaces use, if the controller wants nothing else.
pub const USAGE: Duration = Duration::from_secs(60);
/// The most entries in a report that is sent. The controller keeps a buffer of the size of the
/// largest message for each node: with 800 entries, 1,000 nodes take 50 MiB more.
pub(super) const SENT_ENTRIES: usize = 100;
/// The most entries in a report that is read: older nodes send so many.
pub(super) const MOST_ENTRIES: usize = 2_000;
