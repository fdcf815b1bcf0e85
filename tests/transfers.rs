//! Content that leaves the pool as an archive and comes back: on every backend, by the engine and
//! by the command line.
//!
//! | in `tests/transfers/` | |
//! |---|---|
//! | `engine` | round trips, names, bad archives, full disks, content that is in use |
//! | `receive` | artifacts of another node, layer by layer |
//! | `sharing` | what is known of an artifact in the shared tier is not lost |
//! | `stall` | callers that stall |
//! | `tables` | tables of contents of layers |
//! | `command` | `export` and `import`: GNU tar, files and pipes, signals, killed processes |

mod common;

#[path = "transfers/command.rs"]
mod command;
#[path = "transfers/engine.rs"]
mod engine;
#[path = "transfers/receive.rs"]
mod receive;
#[path = "transfers/sharing.rs"]
mod sharing;
#[path = "transfers/stall.rs"]
mod stall;
#[path = "transfers/tables.rs"]
mod tables;
