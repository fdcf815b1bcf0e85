//! The messages of the gRPC services, which `build.rs` generates from `proto/*.proto`.
//!
//! Only `csi`, `admin`, `hub`, `peer`, `kubelet` and `kubelet_double` use them. Lower tiers do not,
//! so that the engine can be read and tested without gRPC.

/// The Container Storage Interface.
pub mod csi {
    /// Version 1.13 of the interface, package `csi.v1`.
    #[allow(
        missing_docs,
        clippy::pedantic,
        reason = "generated; documented in proto/csi.proto"
    )]
    pub mod v1 {
        tonic::include_proto!("csi.v1");
    }
}

/// The driver's own administrative interface.
pub mod admin {
    /// Package `baggageclaim.admin.v1`.
    #[allow(
        missing_docs,
        clippy::pedantic,
        reason = "generated; documented in proto/admin.proto"
    )]
    pub mod v1 {
        tonic::include_proto!("baggageclaim.admin.v1");
    }
}

/// Nodes and the controller of a cluster.
pub mod hub {
    /// Package `baggageclaim.hub.v1`.
    #[allow(
        missing_docs,
        clippy::pedantic,
        reason = "generated; documented in proto/hub.proto"
    )]
    pub mod v1 {
        tonic::include_proto!("baggageclaim.hub.v1");
    }
}

/// Content from node to node.
pub mod peer {
    /// Package `baggageclaim.peer.v1`.
    #[allow(
        missing_docs,
        clippy::pedantic,
        reason = "generated; documented in proto/peer.proto"
    )]
    pub mod v1 {
        tonic::include_proto!("baggageclaim.peer.v1");
    }
}

/// Plugin registration with kubelet, package `pluginregistration`.
#[allow(
    missing_docs,
    clippy::pedantic,
    reason = "generated; documented in proto/pluginregistration.proto"
)]
pub mod pluginregistration {
    tonic::include_proto!("pluginregistration");
}

/// The encoded `FileDescriptorSet` of all packages and their imports, with custom options. It marks
/// the fields that are secrets.
pub const DESCRIPTOR: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptor.bin"));
