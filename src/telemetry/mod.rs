//! The log's setup, and the driver's [`metrics`].
//! All modules use it; each decides what it logs.

pub mod metrics;

use std::io::IsTerminal as _;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::ParseError;

/// The Kubernetes client's log target, which logs each failed attempt as an error. The driver
/// retries, and `k8s` logs the result once as a warning: an API server upgrade is no driver error.
const TOLD_ELSEWHERE: &str = "kube_client::client::builder";

/// The format of log lines.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
pub enum LogFormat {
    /// A line of text.
    Text,
    /// A line of JSON.
    Json,
}

/// Why the log could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The filter is not valid.
    #[error(
        "the log filter {filter:?} is not valid: {source}; use for example `info` or \
         `warn,baggageclaim::engine=debug`"
    )]
    Filter {
        /// The filter.
        filter: String,
        /// The error.
        source: ParseError,
    },
    /// The log was set up before.
    #[error("the log is set up already")]
    Twice,
}

/// Sends this process's log to stderr: what `filter` selects, in `format`.
pub fn init(format: LogFormat, filter: &str) -> Result<(), Error> {
    let filter = parse(filter)?;
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false);
    let done = match format {
        LogFormat::Text => builder.try_init(),
        LogFormat::Json => builder
            .json()
            .flatten_event(true)
            .with_span_list(false)
            .try_init(),
    };
    done.map_err(|_| Error::Twice)
}

fn parse(text: &str) -> Result<EnvFilter, Error> {
    let filter = EnvFilter::try_new(text).map_err(|source| Error::Filter {
        filter: text.to_owned(),
        source,
    })?;
    // A filter that names the client enables its log.
    if text.contains("kube_client") {
        return Ok(filter);
    }
    let quiet = format!("{TOLD_ELSEWHERE}=off");
    Ok(filter.add_directive(quiet.parse().expect("a directive")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clients_own_errors_are_told_to_those_who_ask_for_them_only() {
        let quiet = format!("{TOLD_ELSEWHERE}=off");
        for text in ["info", "warn,baggageclaim::engine=debug", ""] {
            assert!(
                parse(text).expect("a filter").to_string().contains(&quiet),
                "{text}"
            );
        }
        for text in [
            "info,kube_client=debug",
            "kube_client::client::builder=warn",
        ] {
            assert!(
                !parse(text).expect("a filter").to_string().contains(&quiet),
                "{text}"
            );
        }
        assert!(matches!(parse("inf=o=o"), Err(Error::Filter { .. })));
    }
}
