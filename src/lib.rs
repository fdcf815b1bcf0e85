//! `baggageclaim-csi`: copy-on-write volumes for CI steps on Kubernetes.
//!
//! A step pod names what it wants in its volume spec (a cache, another step's output, an empty place whose content outlives
//! the pod) and gets a private, writable view of it, at once and whatever its size. Two nouns and two verbs make all of
//! it: a **volume** is a working copy, an **artifact** is sealed content; to **fork** is to make a volume from an artifact,
//! to **seal** is to make an artifact from a volume. Both take the time of a few system calls.
//!
//! ```text
//!    kubelet ── CSI ──▶ csi ─┐                  ┌─▶ backend ─▶ sys ─▶ the kernel
//!                            ├─▶ engine ────────┤   overlay, btrfs, copy
//!  baggageclaim volumes ▶ admin                 └─▶ store ───▶ sys ─▶ the pool's index and records
//! ```
//!
//! | module | content |
//! |---|---|
//! | [`model`] | the words as types: ids, names, attributes, artifacts; pure decisions |
//! | [`sys`] | system calls, one idea a file; the only `unsafe` |
//! | [`tree`] | whole trees of files: walked, copied, measured, merged, deleted |
//! | [`archive`] | trees as tar streams: packed, read, unpacked |
//! | [`backend`] | how copy-on-write is done on one pool |
//! | [`store`] | what a pool remembers: index and records |
//! | [`engine`] | the heart: whether and when something is published, sealed, collected |
//! | [`csi`] | the only code that sees `csi.v1` |
//! | [`kubelet`] | registration with kubelet |
//! | [`http`] | health and metrics, for those who look after a node |
//! | [`k8s`] | how this node's pods end, and events on them |
//! | [`admin`] | the verbs for people, over the pool's own socket |
//! | [`server`] | what every gRPC server here shares: sockets, spans, codes |
//! | [`driver`] | what every role does, from start to end; roles: [`standalone`], [`node`] |
//! | [`kubelet_double`] | a client that calls the driver as kubelet does, for tests, bench and demo |
//!
//! Imports point down: `tests/architecture.rs` fails on one that does not.
//!
//! What must never break: a sealed artifact never changes; what is written in a volume is seen in that volume only; after
//! `kill -9` at any instruction nothing published is lost, nothing half-made is visible and nothing leaks; what is
//! referenced is never deleted; no name or path reaches outside its volume or its tenant; unpublish always converges; every
//! call can be repeated and can race itself. How the disk looks at each step is in `docs/on-disk.md`.

pub mod admin;
pub mod archive;
pub mod backend;
pub mod cli;
pub mod config;
pub mod csi;
pub mod driver;
pub mod engine;
pub mod http;
pub mod k8s;
pub mod kubelet;
pub mod kubelet_double;
pub mod model;
pub mod node;
pub mod proto;
pub mod server;
pub mod standalone;
pub mod store;
pub mod sys;
pub mod telemetry;
pub mod tree;
