//! The service `Cluster` of a controller: converts what the catalog says to messages.
//! `proto/admin.proto` documents the messages; nothing is decided here.

use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use super::service::{maker, parse, tenant_filter, time};
use crate::catalog::{Answer, Entry, Listed, OfNode, State};
use crate::hub::{self, ClearOrder, Generation};
use crate::model::{Coverage, Name, NodeId, Reference, Tenant};
use crate::proto::admin::v1 as admin;
use crate::server::Routes;
use admin::cluster_server::{self as wire, ClusterServer};

/// How many parts of a list wait for a slow reader.
const WAITING: usize = 4;

/// The catalog of the cluster, and where orders to clear names go.
#[derive(Debug)]
pub struct Cluster {
    /// The catalog.
    pub catalog: hub::Handle,
    /// The orders.
    pub clears: mpsc::Sender<ClearOrder>,
}

/// The service, to be served with others. `cluster`: there is none without `--hub-listen`.
#[must_use]
pub fn serve_cluster(cluster: Option<Cluster>) -> Routes {
    Routes::new().with(ClusterServer::new(Service(cluster)))
}

struct Service(Option<Cluster>);

impl Service {
    fn cluster(&self) -> Result<&Cluster, Status> {
        self.0.as_ref().ok_or_else(|| {
            Status::failed_precondition(
                "this controller has no catalog of the nodes' content: start it with --hub-listen \
                 (deploy/components/peers)",
            )
        })
    }
}

#[tonic::async_trait]
impl wire::Cluster for Service {
    type ListCachesStream = ReceiverStream<Result<admin::ListCachesResponse, Status>>;

    async fn list_caches(
        &self,
        request: Request<admin::ListCachesRequest>,
    ) -> Result<Response<Self::ListCachesStream>, Status> {
        let tenant = tenant_filter(request.into_inner().tenant.as_deref())?;
        let catalog = self.cluster()?.catalog.clone();
        let (parts, sent) = mpsc::channel(WAITING);
        tokio::spawn(async move {
            let mut after = None;
            loop {
                let part = catalog.caches(tenant.as_ref(), after);
                let answer = admin::ListCachesResponse {
                    caches: part.caches.iter().map(listed).collect(),
                    incomplete: catalog.is_incomplete(),
                };
                // The caller may have gone.
                let is_read = parts.send(Ok(answer)).await.is_ok();
                after = part.next;
                if after.is_none() || !is_read {
                    break;
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(sent)))
    }

    async fn explain(
        &self,
        request: Request<admin::ExplainRequest>,
    ) -> Result<Response<admin::ExplainResponse>, Status> {
        let request = request.into_inner();
        let tenant: Tenant = parse("tenant", &request.tenant)?;
        let reference = parse("reference", &request.reference)?;
        let explained = self.cluster()?.catalog.explain(&Name { tenant, reference });
        let answer = match explained.answer {
            Answer::Nothing => admin::ClusterAnswer::Nothing,
            Answer::Found(_) => admin::ClusterAnswer::Found,
            Answer::Coming(_) => admin::ClusterAnswer::Coming,
            Answer::Incomplete => admin::ClusterAnswer::Incomplete,
        };
        Ok(Response::new(admin::ExplainResponse {
            answer: answer.into(),
            nodes: explained.nodes.iter().map(of_node).collect(),
        }))
    }

    async fn log(
        &self,
        request: Request<admin::LogRequest>,
    ) -> Result<Response<admin::LogResponse>, Status> {
        let request = request.into_inner();
        let tenant: Tenant = parse("tenant", &request.tenant)?;
        let reference = parse("reference", &request.reference)?;
        let name = Name { tenant, reference };
        let told = self.cluster()?.catalog.generations(&name).await;
        Ok(Response::new(admin::LogResponse {
            generations: told.found.into_iter().map(generation).collect(),
            silent: told.silent.into_iter().collect(),
        }))
    }

    async fn clear(
        &self,
        request: Request<admin::ClearRequest>,
    ) -> Result<Response<admin::ClearResponse>, Status> {
        let request = request.into_inner();
        let tenant: Tenant = parse("tenant", &request.tenant)?;
        let reference: Reference = parse("reference", &request.reference)?;
        let covers = match reference.cache() {
            Some((kind, key)) if request.prefix => Coverage::Prefix {
                tenant,
                kind,
                prefix: key.as_str().into(),
            },
            None if request.prefix => {
                return Err(Status::invalid_argument(
                    "outputs are cleared one by one: only caches have a prefix",
                ));
            }
            _ => Coverage::Name(Name { tenant, reference }),
        };
        let (done, made) = oneshot::channel();
        let order = ClearOrder { covers, done };
        let ends = || Status::unavailable("the controller ends; repeat the command");
        let sent = self.cluster()?.clears.send(order).await;
        sent.map_err(|_| ends())?;
        match made.await.map_err(|_| ends())? {
            Ok(()) => Ok(Response::new(admin::ClearResponse {})),
            Err(why) => Err(Status::unavailable(format!(
                "the order may not be in the API server; repeat the command: {why}"
            ))),
        }
    }
}

fn content(entry: &Entry) -> admin::ClusterContent {
    admin::ClusterContent {
        created_unix_ms: time(entry.version.stamp),
        bytes: entry.bytes,
        layers: entry.layers.into(),
    }
}

fn generation((node, told): (NodeId, Generation)) -> admin::Generation {
    admin::Generation {
        node: node.into(),
        id: told.id.to_string(),
        created_unix_ms: time(told.created),
        current: told.is_current,
        bytes: told.bytes,
        in_use_by: told.in_use_by,
        made_by: told.made_by.map(maker),
    }
}

fn listed(listed: &Listed) -> admin::ClusterCache {
    admin::ClusterCache {
        tenant: listed.name.tenant.to_string(),
        reference: listed.name.reference.to_string(),
        content: listed.content.as_ref().map(content),
        nodes: listed.nodes.iter().map(ToString::to_string).collect(),
    }
}

fn of_node(of: &OfNode) -> admin::NodeContent {
    let is_coming = of.entry.state == State::Coming;
    let state = if is_coming {
        admin::NodeContentState::Coming
    } else if of.is_cleared {
        admin::NodeContentState::Cleared
    } else if of.is_current {
        admin::NodeContentState::Current
    } else {
        admin::NodeContentState::Other
    };
    admin::NodeContent {
        node: of.node.to_string(),
        zone: of.zone.to_string(),
        state: state.into(),
        content: (!is_coming).then(|| content(&of.entry)),
        away: of.is_away,
    }
}
