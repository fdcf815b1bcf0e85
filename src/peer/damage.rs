//! Damage: a peer, or a stream to one, found that content of this node is not what its table says.
//! The marks that keep such content on this node are the engine's.

use tokio::runtime::Handle;
use tonic::{Response, Status};

use super::messages;
use super::sent::Sent;
use super::serve::Inner;
use crate::archive;
use crate::engine::ArtifactRow;
use crate::link::Who;
use crate::model::{ArtifactId, NodeId, Sha256};
use crate::proto::peer::v1 as wire;

impl Inner {
    /// Marks the artifact that a peer found damaged, and all others that stack the same layer.
    pub(super) async fn report_damage(
        &self,
        peer: &NodeId,
        who: Who,
        request: wire::ReportDamageRequest,
    ) -> Result<Response<wire::ReportDamageResponse>, Status> {
        let clone = request.ask.as_ref().and_then(|ask| ask.clone.as_ref());
        if let Some(clone) = clone {
            let asked = self.admit_clone(peer, who, clone).await?;
            self.damaged_snapshot(peer, &asked, &request.cause);
            return Ok(Response::new(wire::ReportDamageResponse {}));
        }
        let asked = self.admit(peer, who, request.ask.clone()).await?;
        let id: ArtifactId = request
            .artifact
            .parse()
            .map_err(|_| Status::invalid_argument("artifact"))?;
        let layer = messages::digest(&request.layer).map_err(Status::invalid_argument)?;
        let name = &asked.name;
        // Only what this peer may read.
        let rows = self.engine.artifacts(Some(&name.tenant));
        let is_it = |row: &&ArtifactRow| row.id == id && row.reference == name.reference;
        // A second report changes nothing.
        if rows
            .iter()
            .find(is_it)
            .is_some_and(|row| !row.sharing.damaged)
        {
            let cause: String = request.cause.chars().take(300).collect();
            self.counters.figures.lock().damaged += 1;
            tracing::error!(
                peer = peer.as_str(), tenant = %name.tenant, reference = %name.reference,
                artifact = %id, %layer, cause = crate::sys::printable(&cause),
                "a peer found this artifact damaged; neither peers nor the shared tier get it any \
                 more. Volumes on this node still start from it: if the disk is at fault, delete \
                 it with `baggageclaim destroy`"
            );
            self.mark_damaged(id, layer).await?;
        }
        Ok(Response::new(wire::ReportDamageResponse {}))
    }

    /// Marks content that a stream could not read whole. Blocks.
    pub(super) fn found_damaged(
        &self,
        content: &Sent,
        layer: Sha256,
        error: &archive::Error,
        runtime: &Handle,
    ) {
        tracing::error!(%content, %layer, %error,
            "this content is damaged on this node; peers do not get it any more. Check the disk. \
             Volumes on this node still start from it: delete it with `baggageclaim destroy`");
        self.counters.figures.lock().damaged += 1;
        match content {
            // A failure is logged.
            Sent::Artifact(open) => {
                let _marked = runtime.block_on(self.mark_damaged(open.artifact.id, layer));
            }
            Sent::Snapshot(open) => self.snapshots.end(&open.snapshot.id),
        }
    }

    /// Marks them in their records. Streams of them that run end by themselves.
    async fn mark_damaged(&self, id: ArtifactId, layer: Sha256) -> Result<(), Status> {
        let marked = self.engine.mark_damaged(id, layer).await;
        let marked = marked.map_err(|error| {
            tracing::error!(artifact = %id, %error, "the damage could not be recorded");
            Status::unavailable("the damage could not be recorded")
        })?;
        for marked in marked {
            if marked != id {
                tracing::error!(artifact = %marked, %layer,
                    "this artifact has the damaged layer, too: neither peers nor the shared tier \
                     get it any more");
            }
            self.leases.end(&marked);
        }
        Ok(())
    }
}
