//! What the driver says while it runs: logs, and what it counts ([`metrics`]).
//! It is seen by all that runs and knows none of it; what a line says is decided where it is said.

pub mod metrics;

use std::io::IsTerminal as _;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::ParseError;

/// Where the client of the Kubernetes API calls every attempt that fails an error. Trying again is what we do then, and what
/// comes of it is told once, as a warning, by whoever asked (`k8s`): an API server that is upgraded is no error of ours.
const TOLD_ELSEWHERE: &str = "kube_client::client::builder";

/// How log lines look.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// For people: a line of text.
    #[default]
    Text,
    /// For programs: a line of JSON.
    Json,
}

/// Why there is no log.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The filter cannot be understood.
    #[error(
        "the log filter {filter:?} is not understood: {source}; say for example `info` or `warn,baggageclaim::engine=debug`"
    )]
    Filter {
        /// The filter.
        filter: String,
        /// What is wrong with it.
        source: ParseError,
    },
    /// Somebody set one up before.
    #[error("the log is set up already")]
    Twice,
}

/// Sends the log of this process to stderr: what `filter` lets through, in `format`.
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
    // Who names the client wants to hear it.
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
