//! The flags of the controller plugin, and the settings that they mean. All other flags are in
//! `config`.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::common::{ApiServer, Http, Process, parse_duration};
use super::error::Error;
use super::shared;
use crate::controller;

/// Nodes count all their artifacts for a report.
const LEAST_USAGE: Duration = Duration::from_secs(1);

/// The flags of `controller`.
#[derive(Debug, Clone, Args)]
#[command(mut_args(super::common::hide_env_value))]
pub struct Controller {
    /// The unix socket of the CSI services, which the controller makes. At most 107 bytes
    #[arg(
        long,
        value_name = "PATH",
        env = "BAGGAGECLAIM_SOCKET",
        default_value = "/run/baggageclaim/csi.sock"
    )]
    pub socket: PathBuf,
    /// ADDRESS:PORT that serves /healthz, /readyz and /metrics, or `off`
    #[arg(
        long,
        value_name = "ADDR",
        env = "BAGGAGECLAIM_HTTP",
        default_value = "[::]:9808"
    )]
    pub http: Http,
    /// The API server.
    #[command(flatten)]
    pub api_server: ApiServer,
    /// How long a volume stays whose claim was given up before it had a PersistentVolume
    #[arg(long, value_name = "TIME", env = "BAGGAGECLAIM_LEAK_GRACE", default_value = "10m",
        value_parser = parse_duration)]
    pub leak_grace: Duration,
    /// How long a Node object must be missing before the controller gives the node up
    #[arg(long, value_name = "TIME", env = "BAGGAGECLAIM_NODE_GRACE", default_value = "10m",
        value_parser = parse_duration)]
    pub node_grace: Duration,
    /// Collect the garbage of this shared tier once a day, as `baggageclaim shared gc` does. The
    /// URL is that of the nodes; the identity needs the right to delete objects [default: no tier]
    #[arg(long, value_name = "URL", env = "BAGGAGECLAIM_SHARED")]
    pub shared: Option<String>,
    /// Serve the catalog to the nodes at this ADDRESS:PORT, such as [::]:9809: which node has which
    /// content. The nodes find it by the ConfigMap baggageclaim-controller [default: no catalog]
    #[arg(long, value_name = "ADDR", env = "BAGGAGECLAIM_HUB_LISTEN")]
    pub hub_listen: Option<SocketAddr>,
    /// The IP address that nodes connect to [default: that of `--hub-listen`]
    #[arg(long, value_name = "IP", env = "BAGGAGECLAIM_HUB_ADDRESS")]
    pub hub_address: Option<IpAddr>,
    /// Show the N newest task caches of each namespace as Cache objects, 5000 in all. 0: none, and
    /// those that are there are deleted without clearing the caches
    #[arg(
        long,
        value_name = "N",
        env = "BAGGAGECLAIM_MIRROR_CACHES",
        default_value_t = 100
    )]
    pub mirror_caches: usize,
    /// How often the nodes report what each namespace uses, at most; at least 1s. The controller
    /// compares it with the budgets of CachePolicies four times as often
    #[arg(long, value_name = "TIME", env = "BAGGAGECLAIM_USAGE_INTERVAL", default_value = "1m",
        value_parser = parse_duration)]
    pub usage_interval: Duration,
    /// Serve the locality webhook to the API server at this ADDRESS:PORT, such as [::]:9443: new
    /// pods then prefer the nodes that have their content. Needs --hub-listen, and the output of
    /// `baggageclaim locality` in the cluster [default: no webhook]
    #[arg(
        long,
        value_name = "ADDR",
        env = "BAGGAGECLAIM_WEBHOOK_LISTEN",
        requires = "hub_listen"
    )]
    pub webhook_listen: Option<SocketAddr>,
    /// The file with the key and the certificate of the webhook. It may come and change at any time
    #[arg(
        long,
        value_name = "FILE",
        env = "BAGGAGECLAIM_WEBHOOK_IDENTITY",
        default_value = "/etc/baggageclaim/locality/identity.pem"
    )]
    pub webhook_identity: PathBuf,
    /// How long shutdown may take, to answer running calls
    #[arg(long, value_name = "TIME", env = "BAGGAGECLAIM_GRACE", default_value = "25s",
        value_parser = parse_duration)]
    pub grace: Duration,
    /// The flags of every process that serves.
    #[command(flatten)]
    pub process: Process,
}

impl Controller {
    /// The flags as what runs takes them.
    pub fn resolve(self) -> Result<controller::Config, Error> {
        let hub = self.hub_listen.map(|listen| controller::Hub {
            listen,
            ip: self.hub_address,
            mirror_caches: self.mirror_caches,
            usage_interval: self.usage_interval.max(LEAST_USAGE),
        });
        if let Some(hub) = &hub {
            let address = SocketAddr::new(hub.ip.unwrap_or(hub.listen.ip()), hub.listen.port());
            if address.ip().is_unspecified() || address.port() == 0 {
                return Err(Error::HubAddress(address));
            }
        }
        let identity = self.webhook_identity;
        let webhook = self.webhook_listen;
        Ok(controller::Config {
            hub,
            webhook: webhook.map(|listen| controller::Webhook { listen, identity }),
            socket: self.socket,
            http: self.http.0,
            kubeconfig: self.api_server.kubeconfig(),
            leak_grace: self.leak_grace,
            shared: shared::url(self.shared)?,
            node_grace: self.node_grace,
            grace: self.grace,
        })
    }
}
