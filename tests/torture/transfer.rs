//! Content that leaves as an archive and comes back under its own name: whatever dies in between,
//! the name holds the same.

use baggageclaim::proto::admin::v1 as api;
use tokio_stream::iter;
use tonic::{Code, Request, Status};

use crate::caller::{Caller, SHARED};
use crate::driver::Wire;
use crate::figures::{Fault, Stop};

/// The allowed refusals: content that is evicted or destroyed during the call, a cache that keeps
/// its first content, a full disk.
const EXCUSED: [Code; 4] = [
    Code::NotFound,
    Code::AlreadyExists,
    Code::ResourceExhausted,
    Code::Aborted,
];

impl Caller {
    /// Exports what a name of this caller's holds, and imports it as what it is.
    pub(crate) async fn copy(&mut self, wire: &Wire, name: u8) -> Result<(), Stop> {
        if name == SHARED {
            return Ok(());
        }
        wire.settle().await?;
        self.settled();
        let (tenant, reference) = (self.tenant(), self.reference(name));
        let rows = wire.artifacts().await?;
        let is_it = |row: &api::Artifact| row.tenant == tenant && row.reference == reference;
        let Some(row) = rows.into_iter().find(is_it) else {
            return Ok(());
        };
        let operation = format!("export {reference}");
        let exported = wire.answered(&operation, export(wire, row.id).await, &EXCUSED)?;
        let Ok((archive, digest)) = exported else {
            return Ok(());
        };
        let head = api::ImportHead {
            tenant,
            reference: reference.clone(),
            digest: digest.clone(),
            size: Some(archive.len() as u64),
            ttl_seconds: None,
        };
        let operation = format!("import {reference}");
        let imported = wire.answered(&operation, import(wire, head, archive).await, &EXCUSED)?;
        match imported {
            Ok(end) if end.digest != digest => {
                Err(Fault::wrong(format!("{operation}: {} became {}", digest, end.digest)).into())
            }
            _ => Ok(()),
        }
    }
}

/// The archive, and its digest.
async fn export(wire: &Wire, id: String) -> Result<(Vec<u8>, String), Status> {
    let request = api::ExportRequest {
        source: Some(api::export_request::Source::ArtifactId(id)),
        format: api::Format::Tar.into(),
    };
    let mut parts = wire.admin.clone().export(request).await?.into_inner();
    let mut archive = Vec::new();
    while let Some(part) = parts.message().await? {
        archive.extend_from_slice(&part.data);
        if let Some(end) = part.end {
            return Ok((archive, end.digest));
        }
    }
    Err(Status::unavailable("the archive is incomplete"))
}

async fn import(
    wire: &Wire,
    head: api::ImportHead,
    archive: Vec<u8>,
) -> Result<api::ImportEnd, Status> {
    let first = api::ImportPart {
        head: Some(head),
        ..api::ImportPart::default()
    };
    let mut parts = vec![first];
    parts.extend(archive.chunks(100_000).map(|data| api::ImportPart {
        data: data.to_vec(),
        ..api::ImportPart::default()
    }));
    parts.push(api::ImportPart {
        end: true,
        ..api::ImportPart::default()
    });
    let asked = wire.admin.clone().import(Request::new(iter(parts))).await;
    let mut answers = asked?.into_inner();
    while let Some(answer) = answers.message().await? {
        if let Some(end) = answer.end {
            return Ok(end);
        }
    }
    Err(Status::unavailable("there is no answer"))
}
