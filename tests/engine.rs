//! The engine on real filesystems, called as the CSI services call it. A pod's writes show up where
//! they should and nowhere else, and nothing is left behind.
//!
//! | file | content |
//! |---|---|
//! | `names` | which volume gets a name: caches, outcomes, markers |
//! | `waiting` | outputs that become inputs, and publishes that wait for them |
//! | `content` | the content of a fork: isolation, owners, limits, read-only views |
//! | `targets` | target paths: repeats, second targets, mounts made or removed by others |
//! | `races` | many concurrent callers |
//! | `ends` | the end of volumes after an error |
//! | `notices` | events for a pod, and pods whose outcome is awaited |
//! | `garbage` | expiry, destroy, eviction, flattening |
//! | `watch` | faults that the engine finds in its pool by itself |
//! | `generations` | earlier content of a name, and going back to it |
//! | `fences` | names that are cleared in the whole cluster |
//! | `policies` | cache policies: who commits which names |
//! | `budgets` | what a namespace uses, and what goes for its limits |

mod common;

#[path = "engine/budgets.rs"]
mod budgets;
#[path = "engine/content.rs"]
mod content;
#[path = "engine/ends.rs"]
mod ends;
#[path = "engine/fences.rs"]
mod fences;
#[path = "engine/garbage.rs"]
mod garbage;
#[path = "engine/generations.rs"]
mod generations;
#[path = "engine/names.rs"]
mod names;
#[path = "engine/notices.rs"]
mod notices;
#[path = "engine/policies.rs"]
mod policies;
#[path = "engine/races.rs"]
mod races;
#[path = "engine/targets.rs"]
mod targets;
#[path = "engine/waiting.rs"]
mod waiting;
#[path = "engine/watch.rs"]
mod watch;
