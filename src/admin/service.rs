//! The server side: calls the engine and converts its rows to messages.
//! `proto/admin.proto` documents the messages; nothing is computed here.

use std::os::unix::ffi::OsStrExt as _;
use std::sync::Arc;
use std::time::Duration;

use crate::server::Drain;
use tonic::{Code, Request, Response, Status, Streaming};

use super::shared;
use super::transfer::{self, Answers};
use crate::backend;
use crate::distribution::Distribution;
use crate::engine::{self, ArtifactRow, Engine, VolumeRow, VolumeState};
use crate::model::{
    ArtifactId, Maker, Name, Outcome, PodUid, Reference, Sha256, Tenant, Timestamp, VolumeKind,
};
use crate::proto::admin::v1 as admin;
use crate::server::{Rpc, code_of, message_of};
use admin::admin_server::Admin;

pub(super) struct Service {
    engine: Engine,
    /// The shared tier, if there is one.
    distribution: Option<Arc<Distribution>>,
    /// The driver ends.
    ending: Drain,
    /// How long a transfer waits for its caller.
    stall: Duration,
}

impl Service {
    pub(super) fn new(
        engine: Engine,
        distribution: Option<Arc<Distribution>>,
        ending: Drain,
        stall: Duration,
    ) -> Self {
        Self {
            engine,
            distribution,
            ending,
            stall,
        }
    }

    /// The distribution, where there is a shared tier.
    fn tier(&self) -> Option<&Arc<Distribution>> {
        let distribution = self.distribution.as_ref();
        distribution.filter(|distribution| distribution.has_tier())
    }

    /// What ends a transfer before its end.
    fn ends(&self) -> transfer::Ends {
        transfer::Ends {
            closing: self.ending.clone(),
            stall: self.stall,
        }
    }
}

#[tonic::async_trait]
impl Admin for Service {
    async fn list_volumes(
        &self,
        request: Request<admin::ListVolumesRequest>,
    ) -> Result<Response<admin::ListVolumesResponse>, Status> {
        let tenant = tenant_filter(request.into_inner().tenant.as_deref())?;
        let rows = self.engine.volumes(tenant.as_ref());
        // For the next call.
        self.engine.measure_volumes();
        let mut volumes: Vec<_> = rows.into_iter().map(volume).collect();
        if let Some(distribution) = &self.distribution {
            shared::add_waiting(distribution, tenant.as_ref(), &mut volumes);
        }
        Ok(Response::new(admin::ListVolumesResponse { volumes }))
    }

    async fn list_artifacts(
        &self,
        request: Request<admin::ListArtifactsRequest>,
    ) -> Result<Response<admin::ListArtifactsResponse>, Status> {
        let tenant = tenant_filter(request.into_inner().tenant.as_deref())?;
        let rows = self.engine.artifacts(tenant.as_ref());
        let has_tier = self.tier().is_some();
        let artifacts = rows.into_iter().map(|row| artifact(row, has_tier));
        let artifacts = artifacts.collect();
        Ok(Response::new(admin::ListArtifactsResponse { artifacts }))
    }

    async fn destroy(
        &self,
        request: Request<admin::DestroyRequest>,
    ) -> Result<Response<admin::DestroyResponse>, Status> {
        let rpc = Rpc::of(&request);
        let request = request.into_inner();
        let tenant: Tenant = parse("tenant", &request.tenant)?;
        let reference: Reference = parse("reference", &request.reference)?;
        rpc.record("tenant", &tenant);
        rpc.record("reference", &reference);
        if let Some(tier) = self.tier() {
            shared::destroy(&self.engine, tier, &tenant, &reference).await?;
        } else {
            let done = self.engine.destroy(&tenant, &reference).await;
            done.map_err(|error| failed(&error))?;
        }
        Ok(Response::new(admin::DestroyResponse {}))
    }

    async fn rollback(
        &self,
        request: Request<admin::RollbackRequest>,
    ) -> Result<Response<admin::RollbackResponse>, Status> {
        let rpc = Rpc::of(&request);
        let request = request.into_inner();
        let tenant: Tenant = parse("tenant", &request.tenant)?;
        let reference: Reference = parse("reference", &request.reference)?;
        let to: ArtifactId = parse("artifact_id", &request.artifact_id)?;
        rpc.record("tenant", &tenant);
        rpc.record("reference", &reference);
        if reference.first_writer_wins() {
            return Err(Status::invalid_argument(
                "a resource cache keeps its first content: there is nothing to go back to",
            ));
        }
        let base = shared::base(self.tier().map(|tier| &**tier), &tenant, &reference).await?;
        let name = Name { tenant, reference };
        let made = self.engine.rollback(name, to, base, None).await;
        let made = made.map_err(|error| failed(&error))?;
        let artifact_id = made.to_string();
        Ok(Response::new(admin::RollbackResponse { artifact_id }))
    }

    type ExportStream = Answers<admin::ExportPart>;

    async fn export(
        &self,
        request: Request<admin::ExportRequest>,
    ) -> Result<Response<Self::ExportStream>, Status> {
        let request = request.into_inner();
        let parts = transfer::export(&self.engine, self.ends(), &request).await?;
        Ok(Response::new(parts))
    }

    type ImportStream = Answers<admin::ImportProgress>;

    async fn import(
        &self,
        request: Request<Streaming<admin::ImportPart>>,
    ) -> Result<Response<Self::ImportStream>, Status> {
        let rpc = Rpc::of(&request);
        let parts = request.into_inner();
        let progress = transfer::import(
            &self.engine,
            self.tier().map(|tier| &**tier),
            self.ends(),
            &rpc,
            parts,
        )
        .await?;
        Ok(Response::new(progress))
    }

    async fn report_outcome(
        &self,
        request: Request<admin::ReportOutcomeRequest>,
    ) -> Result<Response<admin::ReportOutcomeResponse>, Status> {
        let rpc = Rpc::of(&request);
        let request = request.into_inner();
        let pod: PodUid = parse("pod_uid", &request.pod_uid)?;
        rpc.record("pod.uid", &pod);
        let outcome = match request.outcome() {
            admin::Outcome::Unspecified => {
                return Err(Status::invalid_argument(
                    "outcome must be OUTCOME_SUCCEEDED or OUTCOME_FAILED",
                ));
            }
            admin::Outcome::Succeeded => Outcome::Succeeded,
            admin::Outcome::Failed => Outcome::Failed,
        };
        let reported = self.engine.report_outcome(&pod, outcome).await;
        let told = reported.map_err(|error| failed(&error))?;
        if request.wait {
            self.engine.settled().await;
        }
        Ok(Response::new(admin::ReportOutcomeResponse {
            volumes: count(told.news),
            told_the_same: count(told.same),
            told_otherwise: count(told.other),
        }))
    }

    async fn check(
        &self,
        _: Request<admin::CheckRequest>,
    ) -> Result<Response<admin::CheckResponse>, Status> {
        let findings = self.engine.check().await.map_err(|error| failed(&error))?;
        let findings = findings.iter().map(admin::Finding::from).collect();
        Ok(Response::new(admin::CheckResponse { findings }))
    }

    async fn reap(
        &self,
        _: Request<admin::ReapRequest>,
    ) -> Result<Response<admin::ReapResponse>, Status> {
        let reaped = self.engine.reap().await.map_err(|error| failed(&error))?;
        Ok(Response::new(admin::ReapResponse {
            expired: count(reaped.expired),
            evicted: count(reaped.evicted),
            deleted: count(reaped.deleted),
            held: count(reaped.held),
            flattened: count(reaped.flattened),
        }))
    }

    async fn status(
        &self,
        _: Request<admin::StatusRequest>,
    ) -> Result<Response<admin::StatusResponse>, Status> {
        let status = self.engine.status().await.map_err(|error| failed(&error))?;
        let shared = match self.tier() {
            Some(tier) => tier.apart(Distribution::status).await.map(shared::status),
            None => None,
        };
        let peers = match &self.distribution {
            Some(distribution) => {
                let metrics = distribution.apart(Distribution::metrics).await;
                metrics.as_ref().and_then(shared::peers)
            }
            None => None,
        };
        Ok(Response::new(admin::StatusResponse {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pool_path: status.pool.display().to_string(),
            pool_id: status.pool_id,
            backend: status.backend.to_string(),
            backend_reason: status.reason,
            total_bytes: status.total_bytes,
            available_bytes: status.available_bytes,
            total_inodes: status.total_inodes,
            available_inodes: status.available_inodes,
            volumes: count(status.volumes),
            artifacts: count(status.artifacts),
            caches: count(status.caches),
            seals_pending: count(status.seals_pending),
            damaged: count(status.damaged),
            shared,
            peers,
        }))
    }
}

pub(super) fn failed(error: &engine::Error) -> Status {
    Status::new(code_of(error), message_of(error))
}

pub(super) fn tenant_filter(text: Option<&str>) -> Result<Option<Tenant>, Status> {
    text.map(|text| parse("tenant", text)).transpose()
}

pub(super) fn parse<T: std::str::FromStr<Err: std::fmt::Display>>(
    field: &str,
    text: &str,
) -> Result<T, Status> {
    text.parse()
        .map_err(|error| Status::new(Code::InvalidArgument, format!("{field} {error}")))
}

pub(super) fn count(n: usize) -> u64 {
    u64::try_from(n).unwrap_or(u64::MAX)
}

pub(super) fn time(at: Timestamp) -> i64 {
    i64::try_from(at.0).unwrap_or(i64::MAX)
}

pub(super) fn usage(usage: backend::Usage) -> admin::Usage {
    admin::Usage {
        bytes: usage.bytes,
        files: usage.files,
        directories: usage.directories,
    }
}

/// The word for a state; programs read it.
fn state(state: VolumeState) -> &'static str {
    match state {
        VolumeState::Preparing => "preparing",
        VolumeState::Published => "published",
        VolumeState::Unpublished => "unpublished",
        VolumeState::AwaitingOutcome => "awaiting-outcome",
        VolumeState::InUse => "in-use",
        VolumeState::Sealing => "sealing",
    }
}

fn volume(row: VolumeRow) -> admin::Volume {
    admin::Volume {
        id: row.id.into(),
        tenant: row.tenant.into(),
        pod_name: row.pod.name,
        pod_uid: row.pod.uid.to_string(),
        r#type: row.spec.kind.type_name().to_owned(),
        reference: reference_of(&row.spec.kind),
        parent_artifact_id: row.parent.map(|id| id.to_string()).unwrap_or_default(),
        layers: count(row.layers),
        state: state(row.state).to_owned(),
        read_only: row.read_only,
        // They came as text, in a message.
        target_paths: row
            .targets
            .iter()
            .map(|target| target.display().to_string())
            .collect(),
        created_unix_ms: time(row.created),
        usage: row.usage.map(usage),
        size_limit: row.spec.size_limit,
        limit_unenforced: row.limit_unenforced.unwrap_or_default(),
        fetch: None,
    }
}

/// The content that a volume starts from, or that it becomes.
pub(super) fn reference_of(kind: &VolumeKind) -> String {
    match kind {
        VolumeKind::Scratch => String::new(),
        VolumeKind::Input { from } => from.to_string(),
        VolumeKind::Import { source, .. } => source.clone(),
        kind @ (VolumeKind::Output { .. }
        | VolumeKind::ResourceCache { .. }
        | VolumeKind::TaskCache { .. }) => kind
            .committed_as()
            .map(|(reference, _)| reference.to_string())
            .unwrap_or_default(),
    }
}

fn artifact(row: ArtifactRow, has_tier: bool) -> admin::Artifact {
    let shared = match row.name {
        Some(_) if has_tier || row.sharing.damaged => shared::word(row.sharing, row.is_too_large),
        _ => "",
    };
    admin::Artifact {
        shared: shared.to_owned(),
        id: row.id.to_string(),
        tenant: row.tenant.into(),
        reference: row.name.map(String::from).unwrap_or_default(),
        sealed_as: row.reference.into(),
        layers: count(row.layers),
        usage: row.usage.map(usage),
        created_unix_ms: time(row.created),
        last_used_unix_ms: time(row.last_used),
        expires_unix_ms: row.expires.map(time),
        in_use_by: count(row.in_use_by),
        durable: row.durable,
        made_by: row.made_by.map(maker),
        digest: text(row.digests.content),
        imported_digest: text(row.digests.imported),
        table_digests: row.tables.into_iter().map(text).collect(),
    }
}

fn text(digest: Option<Sha256>) -> String {
    digest.map(String::from).unwrap_or_default()
}

pub(super) fn maker(maker: Maker) -> admin::Maker {
    admin::Maker {
        pod_name: maker.pod.name,
        pod_uid: maker.pod.uid.to_string(),
        service_account: maker.pod.service_account.unwrap_or_default(),
        images: maker.images,
        node: maker.node.map(String::from).unwrap_or_default(),
        parent: maker.parent.map(|id| id.to_string()).unwrap_or_default(),
    }
}

impl From<&engine::Finding> for admin::Finding {
    fn from(finding: &engine::Finding) -> Self {
        Self {
            kind: finding.kind.to_owned(),
            path: finding.path.as_os_str().as_bytes().to_owned(),
            detail: finding.detail.clone(),
        }
    }
}
