//! Whether content is from before its namespace was made: then a namespace of the same name was
//! deleted while no controller ran, and the content is not the new one's.
//!
//! **Clocks.** Content is dated by the cluster's time, a namespace by the API server's clock. The
//! two may differ, so ages are compared, each by the clock that gave the date. A new controller on
//! another machine continues the cluster's time from what the nodes say. What remains is a clock
//! that was set meanwhile, another API server, or a controller that no node tells the time.
//! [`SKEW`] is the margin for that.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::jiff::Timestamp;
use k8s_openapi::jiff::fmt::rfc2822::DateTimeParser;
use kube::client::Body;
use kube::core::PartialObjectMeta;
use kube::{Client, ResourceExt as _};

use super::fences::{Error, failed};

/// How much older than its namespace content must be. Kubernetes allows for as much between the
/// clocks of its machines: its controller dates the certificates that it signs 5 minutes back. What
/// is cleared wrongly is lost. What is cleared too late is content of the last minutes of a
/// namespace that had no older content.
const SKEW: Duration = Duration::from_secs(5 * 60);

/// A point in time by the API server's clock.
pub(in crate::k8s) type ApiTime = Timestamp;

/// When a namespace was made.
pub(super) fn birth(namespace: &PartialObjectMeta<Namespace>) -> Option<ApiTime> {
    let made = namespace.metadata.creation_timestamp.as_ref();
    made.map(|made| made.0)
}

/// When the namespaces were made that a watch shows. `None`: it shows none yet.
pub(super) fn births(
    namespaces: &[Arc<PartialObjectMeta<Namespace>>],
) -> Option<HashMap<String, ApiTime>> {
    let births = namespaces.iter();
    let births = births.filter_map(|it| Some((it.name_any(), birth(it)?)));
    // There is always one: that of the controller.
    (!namespaces.is_empty()).then(|| births.collect())
}

/// Whether content of this age is from before its namespace was made. `None`: there is no such
/// namespace.
pub(super) fn is_older(content: Duration, born: Option<ApiTime>, now: ApiTime) -> bool {
    let Some(born) = born else {
        return true;
    };
    let age = Duration::try_from(now.duration_since(born)).unwrap_or_default();
    content > age.saturating_add(SKEW)
}

/// What the API server's clock says, to the second: the date of an answer. It needs no right that
/// `clears` does not have.
pub(in crate::k8s) async fn api_time(client: &Client) -> Result<ApiTime, Error> {
    let request = hyper::Request::get("/api/v1/namespaces?limit=1").body(Body::empty());
    let request = request.map_err(|error| Error::Time(error.to_string()))?;
    let answer = client.send(request).await;
    let answer = answer.map_err(failed("list a namespace"))?;
    let date = answer.headers().get(hyper::header::DATE);
    let date = date.ok_or_else(|| Error::Time("its answer has no date".to_owned()))?;
    parse(date.as_bytes()).map_err(Error::Time)
}

fn parse(date: &[u8]) -> Result<ApiTime, String> {
    let time = DateTimeParser::new().parse_timestamp(date);
    time.map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    fn at(seconds: i64) -> ApiTime {
        Timestamp::from_second(1_795_400_000 + seconds).expect("a time")
    }

    #[test]
    fn content_is_older_than_its_namespace_by_more_than_clocks_may_differ() {
        // The namespace is 10 minutes old.
        for (minutes, expected) in [(0, false), (10, false), (15, false), (16, true)] {
            let older = is_older(minutes * MINUTE, Some(at(0)), at(600));
            assert_eq!(older, expected, "{minutes}");
        }
        assert!(is_older(Duration::ZERO, None, at(600)));
        // The answer of another API server, whose clock is behind.
        assert!(!is_older(5 * MINUTE, Some(at(0)), at(-60)));
    }

    #[test]
    fn the_date_of_an_answer_is_read() {
        let date = parse(b"Wed, 25 Nov 2026 17:08:07 GMT");
        assert_eq!(date.expect("a date").as_second(), 1_795_626_487);
        parse(b"yesterday").expect_err("no date");
    }
}
