//! The engine on real filesystems, asked as the room above asks it: what a pod writes comes back where it should and
//! nowhere else, and nothing is left behind.
//!
//! | file | says |
//! |---|---|
//! | `names` | who gets a name: caches, outcomes, markers |
//! | `waiting` | outputs that become inputs, and publishes that wait for them |
//! | `content` | what a fork sees: isolation, owners, limits, read-only views |
//! | `targets` | what happens at target paths: repeats, second targets, things behind our back |
//! | `races` | many callers at once |
//! | `spares` | volumes that were mounted before anybody asked |
//! | `ends` | how volumes end when something is not as it should be |
//! | `notices` | what a pod's people are told, and whose outcome is awaited |
//! | `garbage` | what goes: expiry, destroy, eviction, flattening |
//! | `watch` | what the engine finds out about its pool without being asked |

mod common;

#[path = "engine/content.rs"]
mod content;
#[path = "engine/ends.rs"]
mod ends;
#[path = "engine/garbage.rs"]
mod garbage;
#[path = "engine/names.rs"]
mod names;
#[path = "engine/notices.rs"]
mod notices;
#[path = "engine/races.rs"]
mod races;
#[path = "engine/spares.rs"]
mod spares;
#[path = "engine/targets.rs"]
mod targets;
#[path = "engine/waiting.rs"]
mod waiting;
#[path = "engine/watch.rs"]
mod watch;
