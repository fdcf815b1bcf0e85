//! What another node holds, as a source of content: its tables, its content, reports of damage. It
//! believes nothing that a peer sends; `shared::fetch` verifies it.

use std::fs::File;
use std::io::{self, Read};
use std::sync::Arc;
use std::time::Instant;

use prost::bytes::Bytes;
use tokio::time::timeout;
use tonic::{Code, Status, Streaming};

use super::client::{Client, Node, SILENT, say};
use super::messages;
use crate::archive::toc::{Table, Want};
use crate::model::{ArtifactId, NodeId, Reference, Tenant};
use crate::proto::peer::v1 as wire;
use crate::shared::{Content, Error, Flow, Frames, LayerRef, Resolved, Result, Source};
use crate::tree::Stop;
use wire::get_layer_request::Part;

/// What a peer must send in 5 s of waiting. A peer that sends nothing is given up by then, too.
const LEAST: u64 = 32 << 10;

/// An artifact or a snapshot of another node, as a source.
#[derive(Debug, Clone)]
pub(super) struct PeerSource {
    pub(super) client: Arc<Client>,
    /// Its name. A node that restarts gets another key, and mostly another address.
    pub(super) node: NodeId,
    /// The artifact. `None`: `ask` names a snapshot.
    pub(super) artifact: Option<ArtifactId>,
    pub(super) ask: wire::Ask,
}

impl PeerSource {
    /// The artifact's id, as a request has it: empty for a snapshot.
    fn id(&self) -> String {
        let id = self.artifact.as_ref();
        id.map_or_else(String::new, ToString::to_string)
    }

    /// The node as it can be asked now.
    fn now(&self, layer: &LayerRef) -> Result<Arc<Node>> {
        self.client.named(&self.node).map_err(|cause| Error::Away {
            object: self.object(layer),
            cause,
        })
    }

    fn object(&self, layer: &LayerRef) -> String {
        format!("layer {} of {}", layer.digest, self.name())
    }

    fn error(&self, layer: &LayerRef, status: &Status) -> Error {
        let (object, cause) = (self.object(layer), say(status));
        match status.code() {
            Code::NotFound => Error::Missing { object },
            Code::PermissionDenied | Code::Unauthenticated | Code::InvalidArgument => {
                Error::Permanent { object, cause }
            }
            Code::ResourceExhausted => Error::SlowDown { object, cause },
            _ => Error::Away { object, cause },
        }
    }

    /// Begins a stream. Blocks.
    fn get(&self, layer: &LayerRef, part: Part) -> Result<Incoming> {
        let request = wire::GetLayerRequest {
            ask: Some(self.ask.clone()),
            artifact: self.id(),
            layer: layer.digest.0.to_vec(),
            part: Some(part),
        };
        let node = self.now(layer)?;
        let mut client = node.client();
        let begun = async { timeout(SILENT, client.get_layer(request)).await };
        let begun = node.runtime.block_on(begun);
        let silent = |_| Error::Away {
            object: self.object(layer),
            cause: "no answer in time".to_owned(),
        };
        let stream = begun
            .map_err(silent)?
            .map_err(|status| self.error(layer, &status))?;
        Ok(Incoming {
            held: self.clone(),
            node,
            layer: *layer,
            stream: stream.into_inner(),
            flow: Flow::new(LEAST),
            rest: Bytes::new(),
        })
    }
}

impl Source for PeerSource {
    fn name(&self) -> String {
        format!("peer {}", self.node.as_str())
    }

    /// What it had when it was asked is what it is a source of.
    fn resolve(
        &self,
        _tenant: &Tenant,
        reference: &Reference,
        _has: Option<ArtifactId>,
    ) -> Result<Resolved> {
        Err(Error::Missing {
            object: format!("{reference} of {}", self.name()),
        })
    }

    fn open(
        &self,
        _tenant: &Tenant,
        layer: &LayerRef,
        table: &File,
        stop: Stop<'_>,
    ) -> Result<Box<dyn Content>> {
        if let Some(artifact) = self.artifact
            && self.client.is_damaged(self.now(layer)?.key, artifact)
        {
            let object = self.object(layer);
            return Err(Error::Missing { object });
        }
        let input = self.get(layer, Part::Table(wire::Table {}))?;
        Table::receive(input, table, layer.table, stop)
            .map_err(|error| self.refused(layer, error))?;
        // A stream that ends early is no damage.
        let length = table.metadata().map(|found| found.len());
        if length.is_ok_and(|length| length < layer.table) {
            return Err(self.cut(layer));
        }
        Ok(Box::new(HeldLayer {
            held: self.clone(),
            layer: *layer,
        }))
    }

    fn damaged(&self, _tenant: &Tenant, layer: &LayerRef, error: &Error) {
        let peer = self.node.as_str();
        let artifact = self.id();
        tracing::error!(peer, artifact, %error,
            "a peer sent damaged content; it was refused");
        let Ok(node) = self.now(layer) else { return };
        node.counters.figures.lock().damaged += 1;
        // A snapshot has one holder, and is asked for again when that was mended.
        if let Some(artifact) = self.artifact {
            self.client.remember_damaged(node.key, artifact);
        }
        let report = wire::ReportDamageRequest {
            ask: Some(self.ask.clone()),
            artifact: self.id(),
            layer: layer.digest.0.to_vec(),
            cause: error.to_string(),
        };
        let mut client = node.client();
        let told = async { timeout(SILENT, client.report_damage(report)).await };
        if !matches!(node.runtime.block_on(told), Ok(Ok(_))) {
            tracing::warn!(peer, artifact, "the peer was not told of the damage");
        }
    }
}

impl PeerSource {
    fn cut(&self, layer: &LayerRef) -> Error {
        Error::Away {
            object: self.object(layer),
            cause: "its table was cut".to_owned(),
        }
    }

    /// A table that did not arrive, or that is wrong.
    fn refused(&self, layer: &LayerRef, error: crate::archive::Error) -> Error {
        use crate::archive::Error as Archive;
        match error {
            Archive::Stopped => Error::Stopped,
            Archive::Read(error) => match error.downcast::<Error>() {
                Ok(ours) => ours,
                Err(error) => Error::Away {
                    object: self.object(layer),
                    cause: error.to_string(),
                },
            },
            error @ (Archive::Malformed { .. } | Archive::Limit { .. }) => Error::Corrupt {
                object: self.object(layer),
                cause: error.to_string(),
            },
            error => Error::Layer(error),
        }
    }
}

/// A layer of another node.
struct HeldLayer {
    held: PeerSource,
    layer: LayerRef,
}

impl Content for HeldLayer {
    fn frames(&self, wants: &[Want]) -> Result<Frames> {
        let wants = messages::wants(wants);
        let stream = self
            .held
            .get(&self.layer, Part::Content(wire::Content { wants }))?;
        Ok(Frames {
            stream: Box::new(stream),
            bytes: 0,
        })
    }
}

/// The bytes of a stream, for a thread that may block.
struct Incoming {
    held: PeerSource,
    node: Arc<Node>,
    layer: LayerRef,
    stream: Streaming<wire::Chunk>,
    flow: Flow,
    rest: Bytes,
}

impl Incoming {
    /// The error of a stream that is given up.
    fn away(&self, cause: String) -> io::Error {
        io::Error::other(Error::Away {
            object: self.held.object(&self.layer),
            cause,
        })
    }
}

impl Read for Incoming {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while self.rest.is_empty() {
            let stream = &mut self.stream;
            let next = async { timeout(SILENT, stream.message()).await };
            let began = Instant::now();
            match self.node.runtime.block_on(next) {
                Ok(Ok(Some(chunk))) => {
                    let bytes = chunk.data.len() as u64;
                    self.node.counters.figures.lock().received_bytes += bytes;
                    self.rest = chunk.data;
                    let flow = self.flow.came(bytes, began.elapsed());
                    flow.map_err(|cause| self.away(cause))?;
                }
                Ok(Ok(None)) => return Ok(0),
                Ok(Err(status)) => {
                    return Err(io::Error::other(self.held.error(&self.layer, &status)));
                }
                Err(_) => {
                    let seconds = SILENT.as_secs();
                    return Err(self.away(format!("it sent nothing for {seconds} s")));
                }
            }
        }
        let taken = into.len().min(self.rest.len());
        into[..taken].copy_from_slice(&self.rest.split_to(taken));
        Ok(taken)
    }
}
