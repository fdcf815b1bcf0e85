//! `baggageclaim-csi`: copy-on-write volumes for CI steps on Kubernetes.
//!
//! The pod of a step names content in its volume spec: a cache, the output of another step, or an
//! empty volume whose content outlives the pod. It gets a private, writable view of that content at
//! once, whatever its size. A **volume** is a working copy; an **artifact** is sealed content. To
//! **fork** is to make a volume from an artifact; to **seal** is to make an artifact from a volume.
//! Each takes a few system calls.
//!
//! ```text
//!    kubelet ── CSI ──▶ csi ─┐                  ┌─▶ backend ─▶ sys ─▶ the kernel
//!                            ├─▶ engine ────────┤   overlay, btrfs, copy
//!  baggageclaim volumes ▶ admin                 └─▶ store ───▶ sys ─▶ the pool's index and records
//! ```
//!
//! | module | content |
//! |---|---|
//! | [`model`] | the domain's types: ids, names, attributes, artifacts; pure decisions |
//! | [`sys`] | system calls, one idea a file; the only `unsafe` |
//! | [`tree`] | whole trees of files: walked, copied, measured, merged, deleted |
//! | [`archive`] | trees as tar streams: packed, read, unpacked |
//! | [`shared`] | content in object storage: uploaded, found, fetched, collected |
//! | [`backend`] | how copy-on-write is done on one pool |
//! | [`store`] | a pool's database: index and records |
//! | [`engine`] | volumes and artifacts: published, committed, evicted, deleted |
//! | [`catalog`] | which nodes of a cluster have which content; pure |
//! | [`distribution`] | fetches, uploads and clears between this node, peers and the shared tier |
//! | [`csi`] | the only code that sees `csi.v1` |
//! | [`api`] | the objects by which the controller and the nodes talk |
//! | [`hub`] | nodes report their content to the controller, and ask where content is |
//! | [`locality`] | a pod prefers the nodes that have its content: a webhook of the controller |
//! | [`link`] | connections between nodes: TLS with a key for each side |
//! | [`peer`] | content from node to node: server and client |
//! | [`kubelet`] | registration with kubelet |
//! | [`http`] | health checks and metrics of a node |
//! | [`k8s`] | pods' outcomes and events, persistent volumes of a cluster |
//! | [`admin`] | the commands of users, over the pool's own socket |
//! | [`server`] | what every gRPC server here shares: sockets, spans, codes |
//! | [`driver`] | what a role with a pool does, from start to end; roles: [`standalone`], [`node`] |
//! | [`controller`] | the role without a pool: a cluster's persistent volumes, catalog, policies |
//! | [`kubelet_double`] | a client that calls the driver as kubelet does, for tests, bench and demo |
//!
//! Imports point down: `tests/architecture.rs` fails on one that does not.
//!
//! # Invariants
//!
//! - A sealed artifact never changes.
//! - A write in a volume is visible in that volume only.
//! - After `kill -9` at any instruction, nothing published is lost, nothing incomplete is visible,
//!   and nothing leaks.
//! - Referenced content is never deleted.
//! - No name or path reaches outside its volume or its tenant.
//! - Unpublish always converges. Every call can be repeated, and can race itself.
//!
//! `docs/on-disk.md` describes the disk at each step. CONTRIBUTING.md maps common changes to files.

pub mod admin;
pub mod api;
pub mod archive;
pub mod backend;
pub mod catalog;
pub mod cli;
pub mod config;
pub mod controller;
pub mod csi;
pub mod distribution;
pub mod driver;
pub mod engine;
pub mod http;
pub mod hub;
pub mod k8s;
pub mod kubelet;
pub mod kubelet_double;
pub mod link;
pub mod locality;
pub mod model;
pub mod node;
pub mod peer;
pub mod proto;
pub mod server;
pub mod shared;
pub mod standalone;
pub mod store;
pub mod sys;
pub mod telemetry;
pub mod tree;
