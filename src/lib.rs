//! `baggageclaim-csi`: copy-on-write volumes for CI steps on Kubernetes.
//!
//! Each room says in its own first lines what may live in it; `tests/house.rs` says who may use whom.

pub mod admin;
pub mod backend;
pub mod cli;
pub mod config;
pub mod csi;
pub mod demo;
pub mod engine;
pub mod model;
pub mod proto;
pub mod server;
pub mod standalone;
pub mod store;
pub mod sys;
pub mod telemetry;
