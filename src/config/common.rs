//! The flags that several roles have, and how values are read from the command line. A flag of one
//! role is in the file of that role.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::builder::{BoolishValueParser, OsStringValueParser, TypedValueParser};
use clap::{Arg, Args};

use crate::telemetry;

/// Help names the environment variable of a flag, and never its value.
pub(super) fn hide_env_value(arg: Arg) -> Arg {
    arg.hide_env_values(true)
}

/// The flags of the log.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Log")]
pub struct Log {
    /// The format of log lines: text for people, json for programs
    #[arg(
        long,
        value_name = "FORMAT",
        env = "BAGGAGECLAIM_LOG_FORMAT",
        default_value = "text"
    )]
    pub log_format: telemetry::LogFormat,
    /// The least level to log: error, warn, info, debug or trace; per module:
    /// `warn,baggageclaim::engine=debug`
    #[arg(
        long,
        value_name = "FILTER",
        env = "BAGGAGECLAIM_LOG",
        default_value = "info"
    )]
    pub log: String,
}

/// The flag that says how to reach the API server.
#[derive(Debug, Clone, Args)]
pub struct ApiServer {
    /// The kubeconfig for the API server [default: the service account of this pod]
    #[arg(long, value_name = "PATH", env = "KUBECONFIG", value_parser = path_or_empty())]
    pub kubeconfig: Option<PathBuf>,
}

impl ApiServer {
    /// The kubeconfig. An empty variable is as good as none.
    pub(super) fn kubeconfig(self) -> Option<PathBuf> {
        self.kubeconfig.filter(|path| !path.as_os_str().is_empty())
    }
}

/// The address of the HTTP port, or `off`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Http(pub(super) Option<SocketAddr>);

impl FromStr for Http {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "off" {
            return Ok(Self(None));
        }
        let address = text.parse().map(|address| Self(Some(address)));
        address.map_err(
            |_| "expected an address such as [::]:9808, 0.0.0.0:9808 or 127.0.0.1:9808, or `off`",
        )
    }
}

/// The flags of every process that serves.
#[derive(Debug, Clone, Args)]
pub struct Process {
    /// End with the parent process, for tests and the demo.
    #[arg(long, hide = true, env = "BAGGAGECLAIM_END_WITH_PARENT",
        value_parser = BoolishValueParser::new())]
    pub end_with_parent: bool,
    /// The log.
    #[command(flatten)]
    pub log: Log,
}

/// A path, or nothing: clap itself refuses an empty variable for a path.
pub(super) fn path_or_empty() -> impl TypedValueParser<Value = PathBuf> {
    OsStringValueParser::new().map(PathBuf::from)
}

/// A duration such as 90s.
pub(crate) fn parse_duration(text: &str) -> Result<Duration, &'static str> {
    humantime::parse_duration(text).map_err(|_| "expected a duration such as 90s, 5m or 1h30m")
}

pub(super) fn parse_bytes(text: &str) -> Result<u64, &'static str> {
    crate::model::parse_bytes(text).ok_or("expected a quantity such as 64Mi, 1G or 5000000")
}
