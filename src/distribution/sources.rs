//! Which other places content is fetched from, and in which order: the flag `--sources`. This node
//! always comes first, and is not a part of it.

use std::fmt;
use std::str::FromStr;

/// The places that a node without the content asks, the preferred one first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Sources {
    /// Both. Content that both have comes from peers, and from the tier what no peer gives.
    #[default]
    PeersThenShared,
    /// Both. Content that both have comes from the tier, and from peers what it does not give.
    SharedThenPeers,
    /// Only peers. The tier gets commits, and gives nothing.
    Peers,
    /// Only the tier. Peers get content from this node, and give nothing.
    Shared,
}

/// The words of the flag.
const WORDS: [(&str, Sources); 4] = [
    ("peers,shared", Sources::PeersThenShared),
    ("shared,peers", Sources::SharedThenPeers),
    ("peers", Sources::Peers),
    ("shared", Sources::Shared),
];

impl Sources {
    /// Whether peers are asked.
    #[must_use]
    pub fn has_peers(self) -> bool {
        self != Self::Shared
    }

    /// Whether the shared tier is asked.
    #[must_use]
    pub fn has_tier(self) -> bool {
        self != Self::Peers
    }

    /// Whether content that both have comes from the tier.
    pub(super) fn prefers_tier(self) -> bool {
        self == Self::SharedThenPeers
    }
}

impl FromStr for Sources {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        // Blanks are allowed behind the comma.
        let words: Vec<&str> = text.split(',').map(str::trim).collect();
        let text = words.join(",");
        let found = WORDS.iter().find(|(word, _)| *word == text);
        found.map(|(_, sources)| *sources).ok_or(
            "expected `peers,shared` or `shared,peers`, or one of the two words for one source",
        )
    }
}

impl fmt::Display for Sources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = WORDS.iter().find(|(_, sources)| sources == self);
        f.write_str(word.map_or("", |(word, _)| word))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_are_an_order_of_one_or_both() {
        for (text, peers, tier, prefers_tier) in [
            ("peers,shared", true, true, false),
            ("shared, peers", true, true, true),
            ("peers", true, false, false),
            (" shared ", false, true, false),
        ] {
            let sources: Sources = text.parse().expect(text);
            let told = (
                sources.has_peers(),
                sources.has_tier(),
                sources.prefers_tier(),
            );
            assert_eq!(told, (peers, tier, prefers_tier), "{text}");
            assert_eq!(sources.to_string().parse(), Ok(sources));
        }
        for wrong in [
            "",
            ",",
            "peers,",
            "peers,peers",
            "peers shared",
            "tier",
            "local,peers",
            "Peers",
        ] {
            wrong.parse::<Sources>().expect_err(wrong);
        }
        assert_eq!(Sources::default().to_string(), "peers,shared");
    }
}
