//! The flags of the shared tier, and the settings that they mean.
//! All other flags are in `config`.

use std::num::NonZeroU64;
use std::time::Duration;

use clap::{Args, ValueEnum};

use super::common::{parse_bytes, parse_duration};
use super::error::Error;
use crate::distribution::Sources;
use crate::shared::Url;
use crate::shared::decide::PUBLISH_WITHIN;
use crate::{driver, model};

/// Whether content may leave its node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Share {
    /// What is committed here is uploaded, unless its volume says `share: never`.
    Auto,
    /// Only content of volumes that say `share: auto` is uploaded.
    Never,
}

impl From<Share> for model::Share {
    fn from(share: Share) -> Self {
        match share {
            Share::Auto => Self::Auto,
            Share::Never => Self::Never,
        }
    }
}

/// The flags of the shared tier, and of waiting for it and for peers.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Shared tier")]
pub struct Shared {
    /// Also keep committed content in this shared tier, and fetch from there what this node lacks:
    /// s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or file:///DIR. Options follow
    /// a `?`: endpoint=URL, region=NAME, path-style=true|false, allow-http=true, account=NAME.
    /// Credentials come from the environment or the machine's identity, never from here [default:
    /// no tier]
    #[arg(long, value_name = "URL", env = "BAGGAGECLAIM_SHARED")]
    pub shared: Option<String>,
    /// Whether a volume's content is uploaded if its attribute `share` does not say. A node with
    /// `never` still fetches
    #[arg(
        long,
        value_name = "WHEN",
        env = "BAGGAGECLAIM_SHARE",
        default_value = "auto"
    )]
    pub share: Share,
    /// The most bytes per second that this node uploads, a quantity such as 100Mi [default: no
    /// limit]
    #[arg(long, value_name = "BYTES", env = "BAGGAGECLAIM_SHARED_BANDWIDTH",
        value_parser = parse_bandwidth)]
    pub shared_bandwidth: Option<NonZeroU64>,
    /// How long the driver goes on when it is told to end, to upload the content that waits. The
    /// grace period begins after that
    #[arg(long, value_name = "TIME", env = "BAGGAGECLAIM_SHARED_DRAIN", default_value = "30s",
        value_parser = parse_duration)]
    pub shared_drain: Duration,
    /// Where content comes from that is not on this node, the preferred source first:
    /// `peers,shared`, `shared,peers`, or one of the two. If both have the same content, it comes
    /// from the first, and from the other one what is missing. The order does not decide which
    /// content is the newest: both are asked at the same time. A source that is left out is not
    /// asked for content. The tier still gets commits, and peers still get content of this node
    #[arg(
        long,
        value_name = "ORDER",
        env = "BAGGAGECLAIM_SOURCES",
        default_value = "peers,shared"
    )]
    pub sources: Sources,
    /// How long a publish of a cache waits for an answer of the tier or of peers. Without one, the
    /// cache begins with what is on this node, or empty
    #[arg(long, value_name = "TIME", env = "BAGGAGECLAIM_ASK", default_value = "2s",
        value_parser = parse_duration)]
    pub ask: Duration,
    /// How long a publish of a cache waits until its content is fetched. Then it begins without
    /// that, and the fetch goes on. Kubelet waits two minutes for a publish
    #[arg(long, value_name = "TIME", env = "BAGGAGECLAIM_FETCH_WAIT", default_value = "90s",
        value_parser = parse_duration)]
    pub fetch_wait: Duration,
    /// Less time for publications, for tests whose collector deletes early
    #[arg(long, hide = true, env = "BAGGAGECLAIM_PUBLISH_WITHIN", value_parser = parse_duration)]
    pub publish_within: Option<Duration>,
}

impl Shared {
    /// The tier, if one is named.
    pub(super) fn resolve(self) -> Result<Option<driver::Shared>, Error> {
        let Some(url) = url(self.shared)? else {
            return Ok(None);
        };
        Ok(Some(driver::Shared {
            url,
            bandwidth: self.shared_bandwidth,
            drain: self.shared_drain,
            // More would let the collector delete what is being published.
            publish_within: self
                .publish_within
                .map_or(PUBLISH_WITHIN, |within| within.min(PUBLISH_WITHIN)),
        }))
    }
}

/// Refuses a single source that there is not.
pub(super) fn check_sources(
    sources: Sources,
    has_tier: bool,
    (has_peers, peers): (bool, &'static str),
) -> Result<(), Error> {
    let needs = match sources {
        Sources::Shared if !has_tier => "--shared URL",
        Sources::Peers if !has_peers => peers,
        _ => return Ok(()),
    };
    Err(Error::Sources { sources, needs })
}

/// The tier that a flag names. An empty variable is as good as none. The URL is not parsed by clap,
/// whose message would repeat one that holds a password.
pub(super) fn url(flag: Option<String>) -> Result<Option<Url>, Error> {
    let url = flag.filter(|url| !url.is_empty());
    url.map(|url| url.parse().map_err(Error::Shared))
        .transpose()
}

pub(super) fn parse_bandwidth(text: &str) -> Result<NonZeroU64, &'static str> {
    let bytes = parse_bytes(text)?;
    NonZeroU64::new(bytes).ok_or("expected more than 0; without the flag there is no limit")
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Flags {
        #[command(flatten)]
        shared: Shared,
    }

    /// Without the environment, which other tests read, too.
    fn resolve(flags: &[&str]) -> Result<Option<driver::Shared>, Error> {
        let flags = std::iter::once(&"baggageclaim").chain(flags);
        Flags::parse_from(flags).shared.resolve()
    }

    #[test]
    fn there_is_no_tier_unless_one_is_named() {
        assert!(resolve(&[]).expect("no flags").is_none());
        let some = ["--shared=", "--share=never", "--shared-drain=1s"];
        assert!(resolve(&some).expect("an empty URL").is_none());
        let flags = ["--shared=s3://b/p?region=r", "--shared-bandwidth=100Mi"];
        let tier = resolve(&flags).expect("a URL").expect("a tier");
        assert_eq!(tier.url.to_string(), "s3://b/p");
        assert_eq!(tier.bandwidth.map(NonZeroU64::get), Some(100 << 20));
        assert_eq!(tier.drain, Duration::from_secs(30));
    }

    #[test]
    fn a_source_that_there_is_not_cannot_be_the_only_one() {
        let sources = |flags: &[&str]| {
            let flags = std::iter::once(&"baggageclaim").chain(flags);
            Flags::try_parse_from(flags).map(|flags| flags.shared.sources)
        };
        let default = sources(&[]).expect("no flag");
        assert_eq!(default, Sources::PeersThenShared);
        let other = sources(&["--sources=shared,peers"]).expect("an order");
        assert_eq!(other, Sources::SharedThenPeers);
        let wrong = sources(&["--sources=tier"]).expect_err("no source");
        assert!(
            wrong.to_string().contains("expected `peers,shared`"),
            "{wrong}"
        );
        for (sources, has_tier, has_peers, needs) in [
            (Sources::Shared, false, true, Some("--shared URL")),
            (Sources::Shared, true, false, None),
            (Sources::Peers, true, false, Some("--peers FILE")),
            (Sources::Peers, false, true, None),
            // An order of both says nothing about which there are.
            (Sources::PeersThenShared, false, false, None),
            (Sources::SharedThenPeers, false, false, None),
        ] {
            let checked = check_sources(sources, has_tier, (has_peers, "--peers FILE"));
            let needed = checked.err().map(|error| error.to_string());
            let expected = needs.map(|needs| {
                format!(
                    "--sources {sources} needs {needs}; without it no content comes to this node"
                )
            });
            assert_eq!(needed, expected);
        }
    }

    #[test]
    fn a_password_in_the_url_is_refused_and_not_repeated() {
        let refused = resolve(&["--shared=s3://key:hunter2@b/p"]).expect_err("a password");
        let said = refused.to_string();
        assert!(
            said.starts_with("the URL of --shared must not hold"),
            "{said}"
        );
        assert!(!said.contains("hunter2"), "{said}");
        assert!(parse_bandwidth("0").is_err());
        assert!(parse_bandwidth("fast").is_err());
    }
}
