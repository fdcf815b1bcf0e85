//! The shared tier on a directory, on a real S3 server, and on a store of ours that fails.
//!
//! | in `tests/shared/` | |
//! |---|---|
//! | `tier` | a tier, layers, and what goes up and down |
//! | `server` | versitygw, built from `tests/s3-server/` |
//! | `failing` | a store that is slow, cuts, refuses, races, loses acknowledgements and lists late |
//! | `any` | what the protocol needs of a storage, on any kind of it |
//! | `trips` | layers up and down, resumed, from the next source |
//! | `frames` | frames in another order, twice, of another layer, cut; a tier that stalls |
//! | `hangs` | connections to the server that hang |
//! | `names` | two writers, lost acknowledgements, clears |
//! | `corrupt` | damage in every part of every object |
//! | `cli` | the verb `shared` as a process |
//! | `collect` | the collector on real objects |
//! | `bounds` | the memory of the collector |
//! | `budgets` | the budget of a namespace on real objects |
//! | `answers` | real responses of a server that fails |
//! | `deletions` | the deletion of a name's record in random schedules |
//! | `attempts` | the commits of one name in random schedules |
//! | `simulation` | the protocol's decisions in random schedules |

#![expect(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "the server is a process; a test does in the plain way what the product does safely"
)]

mod common;

#[path = "shared/answers.rs"]
mod answers;
#[path = "shared/any.rs"]
mod any;
#[path = "shared/attempts.rs"]
mod attempts;
#[path = "shared/bounds.rs"]
mod bounds;
#[path = "shared/budgets.rs"]
mod budgets;
#[path = "shared/cli.rs"]
mod cli;
#[path = "shared/collect.rs"]
mod collect;
#[path = "shared/corrupt.rs"]
mod corrupt;
#[path = "shared/deletions.rs"]
mod deletions;
#[path = "shared/failing.rs"]
mod failing;
#[path = "shared/frames.rs"]
mod frames;
#[path = "shared/hangs.rs"]
mod hangs;
#[path = "shared/names.rs"]
mod names;
#[path = "shared/server.rs"]
mod server;
#[path = "shared/simulation.rs"]
mod simulation;
#[path = "shared/tier.rs"]
mod tier;
#[path = "shared/trips.rs"]
mod trips;
