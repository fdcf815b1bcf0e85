//! `baggageclaim-csi`: copy-on-write volumes for CI steps on Kubernetes.
#![doc = ""]
pub mod backend;
pub mod demo;
pub mod model;
pub mod proto;
pub mod sys;
