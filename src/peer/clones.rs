//! Snapshots of persistent volumes for peers: the part of the server that a clone on another node
//! asks. `serve` sends the layers. No policy and no pod is looked at: a peer gets a snapshot only
//! for a volume that the controller ordered it to make of that snapshot ([`Access::check_clone`]).
//!
//! [`Access::check_clone`]: crate::distribution::roster::Access::check_clone

use std::sync::Arc;

use tonic::{Response, Status};

use super::messages;
use super::sent::Sent;
use super::serve::{Inner, apart, gone, status};
use crate::distribution::roster::AskedClone;
use crate::engine::{Error, OpenSnapshot, Opened};
use crate::link::Who;
use crate::model::NodeId;
use crate::proto::peer::v1 as wire;
use wire::get_artifact_response::State;

/// A snapshot that a peer may have.
enum Found {
    Gone,
    Coming,
    Here(Arc<OpenSnapshot>),
}

impl Inner {
    /// The peer that calls, if it may have this snapshot. A refusal is logged, once a minute for
    /// each peer, volume and reason.
    pub(super) async fn admit_clone(
        &self,
        peer: &NodeId,
        who: Who,
        clone: &wire::Clone,
    ) -> Result<AskedClone, Status> {
        let asked = messages::asked_clone(clone).map_err(Status::invalid_argument)?;
        match self.access.check_clone(peer, &asked).await {
            Ok(()) => Ok(asked),
            Err(refusal) => {
                self.counters.figures.lock().refused += 1;
                let of = (peer.as_str(), &asked.volume);
                if self.refusals.is_news(format!("{of:?}: {refusal}")) {
                    tracing::warn!(
                        peer = peer.as_str(), address = %who.address, volume = %asked.volume,
                        snapshot = %asked.snapshot, why = %refusal,
                        "refused: the peer may not have this snapshot"
                    );
                }
                Err(status(refusal))
            }
        }
    }

    /// What this node has of a snapshot.
    pub(super) async fn get_snapshot(
        &self,
        peer: &NodeId,
        asked: &AskedClone,
    ) -> Result<Response<wire::GetArtifactResponse>, Status> {
        let (state, snapshot) = match self.find(peer, asked).await? {
            Found::Gone => (State::Nothing, None),
            Found::Coming => (State::Coming, None),
            Found::Here(open) => {
                self.counters.figures.lock().offered += 1;
                tracing::info!(peer = peer.as_str(), snapshot = %asked.snapshot,
                    volume = %asked.volume, "a peer makes a volume of this snapshot");
                (State::Here, Some(messages::snapshot(&open)))
            }
        };
        Ok(Response::new(wire::GetArtifactResponse {
            state: state.into(),
            artifact: None,
            snapshot,
        }))
    }

    /// The snapshot, to send a part of it.
    pub(super) async fn sent_snapshot(
        &self,
        peer: &NodeId,
        asked: &AskedClone,
    ) -> Result<Sent, Status> {
        match self.find(peer, asked).await? {
            Found::Here(open) => Ok(Sent::Snapshot(open)),
            Found::Gone | Found::Coming => Err(gone()),
        }
    }

    /// Opens a snapshot, on a thread that may block, and keeps it.
    async fn find(&self, peer: &NodeId, asked: &AskedClone) -> Result<Found, Status> {
        let id = asked.snapshot.clone();
        if let Some(open) = self.snapshots.get(&id) {
            return Ok(Found::Here(open));
        }
        let places = self.place_to_open(peer).await?;
        if let Some(open) = self.snapshots.get(&id) {
            return Ok(Found::Here(open));
        }
        let (engine, leases) = (self.engine.clone(), Arc::clone(&self.snapshots));
        let opened = apart("peer-open", places, move || {
            Ok(match engine.open_snapshot(&id)? {
                Opened::Gone => Found::Gone,
                Opened::Coming => Found::Coming,
                Opened::Open(open) => Found::Here(leases.keep(id, *open)),
            })
        });
        opened.await?.map_err(|error: Error| {
            tracing::warn!(snapshot = %asked.snapshot, %error,
                "a snapshot cannot be opened for a peer");
            Status::unavailable("the snapshot cannot be opened")
        })
    }

    /// A peer found a layer of a snapshot damaged.
    pub(super) fn damaged_snapshot(&self, peer: &NodeId, asked: &AskedClone, cause: &str) {
        let cause: String = cause.chars().take(300).collect();
        self.counters.figures.lock().damaged += 1;
        tracing::error!(
            peer = peer.as_str(), snapshot = %asked.snapshot, volume = %asked.volume,
            cause = crate::sys::printable(&cause),
            "a peer found this snapshot damaged; check the disk of this node"
        );
        self.snapshots.end(&asked.snapshot);
    }
}
