//! `baggageclaim-csi`: copy-on-write volumes for CI steps on Kubernetes.

pub mod backend;
pub mod demo;
pub mod engine;
pub mod model;
pub mod proto;
pub mod store;
pub mod sys;
