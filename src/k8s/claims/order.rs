//! What a `Volume` and a `Snapshot` have in common: each is an order to a node, with its answer.
//! It makes no decisions on either.

use std::fmt::Debug;

use kube::Resource;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::api::{Phase, Refusal, Snapshot, Volume, Wanted};

/// An object that is an order to a node.
pub(in crate::k8s) trait Order:
    Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Serialize + Send + Sync + 'static
{
    fn node(&self) -> &str;
    fn wanted(&self) -> Wanted;
    fn state(&self) -> Option<Phase>;
    /// What the node answered to the present order; `None`: it has not answered yet.
    fn reply(&self) -> Option<(Phase, Option<&Refusal>)>;
    /// Whether it is Lost with its node, which was given up and has not answered since.
    fn is_lost_with_node(&self) -> bool;

    /// Whether its data is deleted, as ordered.
    fn is_deleted(&self) -> bool {
        self.wanted() == Wanted::Absent && self.state() == Some(Phase::Gone)
    }

    /// Whether it is deleted when its node is given up: its data was to be deleted, or never
    /// existed for anyone.
    fn goes(&self) -> bool {
        goes(self.wanted(), self.state())
    }

    /// Whether something is left to do when its node is given up.
    fn is_left(&self) -> bool {
        self.goes() || !self.is_lost_with_node()
    }

    /// Whether it was made of an orphan that is not there any more. A node that was given up may
    /// have it all the same.
    fn is_empty_handed(&self) -> bool {
        self.wanted() == Wanted::Kept
            && self.state() == Some(Phase::Lost)
            && !self.is_lost_with_node()
    }
}

macro_rules! order {
    ($kind:ty) => {
        impl Order for $kind {
            fn node(&self) -> &str {
                &self.spec.node_name
            }
            fn wanted(&self) -> Wanted {
                self.spec.wanted
            }
            fn state(&self) -> Option<Phase> {
                self.phase()
            }
            fn reply(&self) -> Option<(Phase, Option<&Refusal>)> {
                let answer = self.answer()?;
                Some((answer.phase, answer.error.as_ref()))
            }
            fn is_lost_with_node(&self) -> bool {
                self.is_node_gone()
            }
        }
    };
}

order!(Volume);
order!(Snapshot);

fn goes(wanted: Wanted, phase: Option<Phase>) -> bool {
    wanted == Wanted::Absent || !matches!(phase, Some(Phase::Ready | Phase::Lost))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_persistent_volume_may_name_stays() {
        use Phase::{Failed, Gone, Lost, Ready};
        for phase in [Some(Ready), Some(Lost)] {
            assert!(!goes(Wanted::Present, phase) && !goes(Wanted::Kept, phase));
            assert!(goes(Wanted::Absent, phase));
        }
        for phase in [None, Some(Failed), Some(Gone)] {
            for wanted in [Wanted::Present, Wanted::Kept, Wanted::Absent] {
                assert!(goes(wanted, phase));
            }
        }
    }
}
