//! The controller's catalog, its fences, budgets and clocks: pure code, tried from outside.
//!
//! | in `tests/catalog/` | |
//! |---|---|
//! | `simulation` | nodes, controllers and an API server in random schedules, and what must hold |
//! | `world` | their states and messages |
//! | `node` | a node's part of it |
//! | `size` | memory of a million entries; a measurement of a large cluster |

#![expect(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "a test reads its own variables of the environment, and runs itself"
)]

mod common;

#[path = "catalog/node.rs"]
mod node;
#[path = "catalog/simulation.rs"]
mod simulation;
#[path = "catalog/size.rs"]
mod size;
#[path = "catalog/world.rs"]
mod world;
