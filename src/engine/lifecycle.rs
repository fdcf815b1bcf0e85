//! The life of an inline volume: its states, what can be observed of it, and what follows.
//!
//! Pure: no I/O, no clock, no lock. `volumes` holds the state of each volume. The modules that act
//! on volumes report an [`Observation`] and do the [`Action`] that [`step`] answers. The test below
//! holds the table of all transitions.
//!
//! ```text
//! Preparing -> Published <-> Unpublished <-> TeardownDeferred       its directory is in volumes/
//!                                |
//!                            Quiescing -> Sealing <-> Undecided                   in pending/
//!                                |           `----> Sealed
//!                                `------> Discarding                              in trash/
//! ```

use super::types::VolumeState;

/// How far a volume is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lifecycle {
    /// A publish is making it. Its parent's layers must stay.
    Preparing,
    /// It is mounted at its target.
    Published {
        /// The id of the mount.
        mount: u64,
    },
    /// It is mounted nowhere; its pod may come for it again.
    Unpublished,
    /// Its pod is done with it, but its directory could not be moved out of `volumes/`.
    TeardownDeferred,
    /// Its pod is done with it, and a process may still change its content.
    Quiescing {
        /// What becomes of it when no process can.
        goal: Goal,
        /// Whether a process is known to hold its files open.
        held: bool,
    },
    /// Its content is final. Whether it is sealed depends on what this node does not know yet.
    Undecided(Missing),
    /// Its content is final. It is being decided whether it is sealed, or it is being sealed.
    Sealing,
    /// It became an artifact that is not durable yet.
    Sealed,
    /// No process holds it, and it is being deleted.
    Discarding,
}

/// How a volume ends after its pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Goal {
    /// It is sealed if its pod's outcome allows that. Its directory is in `pending/`.
    Seal,
    /// It is deleted. Its directory is in `trash/`.
    Discard,
}

/// What this node must know to decide whether a volume is sealed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Missing {
    /// Its pod's outcome.
    Outcome,
    /// The cache policies of the cluster.
    Policies,
}

/// What was observed of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Observation {
    /// A publish attached this mount at its target.
    Mounted(u64),
    /// The first publish failed, and everything that it made is gone again.
    PublishFailed,
    /// Its pod is done with it, and it is mounted nowhere.
    Unmounted,
    /// Its directory was moved to where this goal is pursued.
    Retired(Goal),
    /// Its directory could not be moved: the pool is full, read-only or failing.
    RetireFailed,
    /// A process still holds or writes it.
    Held,
    /// No process can change it any more.
    Quiet,
    /// It cannot be decided yet whether its content is sealed.
    Undecided(Missing),
    /// It can be decided now.
    Decidable,
    /// Its artifact can be found by its name.
    Visible,
    /// The index names its artifact.
    Durable,
    /// Its content is not sealed, and its directory lies in the trash for the collector.
    GivenUp,
    /// Its directory is deleted, or vanished.
    Gone,
}

/// What is to be done next about a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    /// Nothing.
    Nothing,
    /// Move its directory out of `volumes/`.
    Retire,
    /// Wait until no process can change its content.
    Quiesce,
    /// Say that a process holds it: at once in the log, and later to the pod's owners.
    ReportHeld,
    /// Decide whether it is sealed, and seal it or give it up.
    Seal,
    /// Make its artifact durable.
    MakeDurable,
    /// Delete its directory.
    Delete,
    /// Forget it: its life is over.
    Forget,
    /// The observation cannot be made in this state. The state stays.
    Refuse,
}

impl Lifecycle {
    /// How a retired volume ends; `None` before it is retired.
    pub(super) fn goal(self) -> Option<Goal> {
        match self {
            Self::Preparing
            | Self::Published { .. }
            | Self::Unpublished
            | Self::TeardownDeferred => None,
            Self::Quiescing { goal, .. } => Some(goal),
            Self::Undecided(_) | Self::Sealing | Self::Sealed => Some(Goal::Seal),
            Self::Discarding => Some(Goal::Discard),
        }
    }

    /// What lists and metrics show.
    pub(super) fn shown(self) -> VolumeState {
        match self {
            Self::Preparing => VolumeState::Preparing,
            Self::Published { .. } => VolumeState::Published,
            Self::Unpublished | Self::TeardownDeferred => VolumeState::Unpublished,
            Self::Quiescing { held: true, .. } => VolumeState::InUse,
            Self::Undecided(_) => VolumeState::AwaitingOutcome,
            Self::Quiescing { held: false, .. }
            | Self::Sealing
            | Self::Sealed
            | Self::Discarding => VolumeState::Sealing,
        }
    }
}

/// The state that follows an observation, and what is to be done about it.
#[expect(
    clippy::match_same_arms,
    reason = "each arm has its own reason; the table in the test shows them together"
)]
pub(super) fn step(state: Lifecycle, observed: Observation) -> (Lifecycle, Action) {
    use Lifecycle::{
        Discarding, Preparing, Published, Quiescing, Sealed, Sealing, TeardownDeferred, Undecided,
        Unpublished,
    };
    match (state, observed) {
        // Its pod has it, for the first time or again.
        (
            Preparing | Published { .. } | Unpublished | TeardownDeferred,
            Observation::Mounted(mount),
        ) => (Published { mount }, Action::Nothing),
        (Preparing, Observation::PublishFailed) => (state, Action::Forget),

        // Its pod is done with it. A publish that ended by a defect leaves a volume that is
        // `Preparing`; unpublish removes that, too.
        (Preparing | Published { .. } | Unpublished, Observation::Unmounted) => {
            (Unpublished, Action::Retire)
        }
        (TeardownDeferred, Observation::Unmounted) => (TeardownDeferred, Action::Retire),
        (Unpublished | TeardownDeferred, Observation::RetireFailed) => {
            (TeardownDeferred, Action::Nothing)
        }
        (Unpublished | TeardownDeferred, Observation::Retired(goal)) => {
            (Quiescing { goal, held: false }, Action::Quiesce)
        }

        // Only content that no process can change is sealed or deleted.
        (Quiescing { goal, held: false }, Observation::Held) => {
            (Quiescing { goal, held: true }, Action::ReportHeld)
        }
        (Quiescing { held: true, .. }, Observation::Held) => (state, Action::Nothing),
        // Where the backend knows no holders, a writer is found after the decision.
        (Sealing, Observation::Held) => {
            let (goal, held) = (Goal::Seal, true);
            (Quiescing { goal, held }, Action::ReportHeld)
        }
        (Quiescing { goal, .. }, Observation::Quiet) => match goal {
            Goal::Seal => (Sealing, Action::Seal),
            Goal::Discard => (Discarding, Action::Delete),
        },

        (Sealing, Observation::Undecided(missing)) => (Undecided(missing), Action::Nothing),
        (Undecided(_), Observation::Decidable) => (Sealing, Action::Seal),

        (Sealing, Observation::Visible) => (Sealed, Action::MakeDurable),
        (Sealed, Observation::Durable) => (state, Action::Forget),
        // A write-back error takes a sealed volume back as long as it is not durable.
        (
            Quiescing {
                goal: Goal::Seal, ..
            }
            | Undecided(_)
            | Sealing
            | Sealed,
            Observation::GivenUp,
        ) => (state, Action::Forget),
        (Quiescing { .. } | Undecided(_) | Sealing | Discarding, Observation::Gone) => {
            (state, Action::Forget)
        }
        _ => (state, Action::Refuse),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The columns of the table, by what stands above them.
    const STATES: [(&str, Lifecycle); 12] = [
        ("Prep", Lifecycle::Preparing),
        ("Publ", Lifecycle::Published { mount: 1 }),
        ("Unpb", Lifecycle::Unpublished),
        ("Defr", Lifecycle::TeardownDeferred),
        ("QSea", quiescing(Goal::Seal, false)),
        ("QSe!", quiescing(Goal::Seal, true)),
        ("QDis", quiescing(Goal::Discard, false)),
        ("QDi!", quiescing(Goal::Discard, true)),
        ("Wait", Lifecycle::Undecided(Missing::Outcome)),
        ("Sing", Lifecycle::Sealing),
        ("Sled", Lifecycle::Sealed),
        ("Disc", Lifecycle::Discarding),
    ];

    const fn quiescing(goal: Goal, held: bool) -> Lifecycle {
        Lifecycle::Quiescing { goal, held }
    }

    const OBSERVATIONS: [(&str, Observation); 14] = [
        ("Mounted", Observation::Mounted(1)),
        ("PublishFailed", Observation::PublishFailed),
        ("Unmounted", Observation::Unmounted),
        ("Retired(Seal)", Observation::Retired(Goal::Seal)),
        ("Retired(Discard)", Observation::Retired(Goal::Discard)),
        ("RetireFailed", Observation::RetireFailed),
        ("Held", Observation::Held),
        ("Quiet", Observation::Quiet),
        ("Undecided", Observation::Undecided(Missing::Outcome)),
        ("Decidable", Observation::Decidable),
        ("Visible", Observation::Visible),
        ("Durable", Observation::Durable),
        ("GivenUp", Observation::GivenUp),
        ("Gone", Observation::Gone),
    ];

    /// What a cell's second word stands for.
    const ACTIONS: [(&str, Action); 8] = [
        ("", Action::Nothing),
        ("retire", Action::Retire),
        ("quiesce", Action::Quiesce),
        ("report", Action::ReportHeld),
        ("seal", Action::Seal),
        ("durable", Action::MakeDurable),
        ("delete", Action::Delete),
        ("forget", Action::Forget),
    ];

    /// Every state, each with every observation that is not refused: the next state (`=`: the same)
    /// and the action. What is not here is refused.
    const TABLE: &str = "
        Prep  Mounted           Publ
        Prep  PublishFailed     =     forget
        Prep  Unmounted         Unpb  retire

        Publ  Mounted           Publ
        Publ  Unmounted         Unpb  retire

        Unpb  Mounted           Publ
        Unpb  Unmounted         Unpb  retire
        Unpb  Retired(Seal)     QSea  quiesce
        Unpb  Retired(Discard)  QDis  quiesce
        Unpb  RetireFailed      Defr

        Defr  Mounted           Publ
        Defr  Unmounted         Defr  retire
        Defr  Retired(Seal)     QSea  quiesce
        Defr  Retired(Discard)  QDis  quiesce
        Defr  RetireFailed      Defr

        QSea  Held              QSe!  report
        QSea  Quiet             Sing  seal
        QSea  GivenUp           =     forget
        QSea  Gone              =     forget

        QSe!  Held              QSe!
        QSe!  Quiet             Sing  seal
        QSe!  GivenUp           =     forget
        QSe!  Gone              =     forget

        QDis  Held              QDi!  report
        QDis  Quiet             Disc  delete
        QDis  Gone              =     forget

        QDi!  Held              QDi!
        QDi!  Quiet             Disc  delete
        QDi!  Gone              =     forget

        Wait  Decidable         Sing  seal
        Wait  GivenUp           =     forget
        Wait  Gone              =     forget

        Sing  Held              QSe!  report
        Sing  Undecided         Wait
        Sing  Visible           Sled  durable
        Sing  GivenUp           =     forget
        Sing  Gone              =     forget

        Sled  Durable           =     forget
        Sled  GivenUp           =     forget

        Disc  Gone              =     forget
    ";

    fn named<T: Copy>(all: &[(&str, T)], name: &str) -> T {
        let found = all.iter().find(|(known, _)| *known == name);
        found.unwrap_or_else(|| panic!("{name}")).1
    }

    #[test]
    fn every_state_with_every_observation_is_as_the_table_says() {
        let rows = TABLE.lines().filter(|line| !line.trim().is_empty());
        let rows: Vec<Vec<&str>> = rows.map(|row| row.split_whitespace().collect()).collect();
        for row in &rows {
            // A word that is misspelled would be a row that is never found.
            named(&STATES, row[0]);
            named(&OBSERVATIONS, row[1]);
        }
        for (name, state) in STATES {
            for (seen, observation) in OBSERVATIONS {
                let mut found = rows.iter().filter(|row| row[..2] == [name, seen]);
                let expected = match found.next().map(|row| &row[2..]) {
                    None => (state, Action::Refuse),
                    Some(["=", action @ ..]) => {
                        (state, named(&ACTIONS, action.first().unwrap_or(&"")))
                    }
                    Some([next, action @ ..]) => {
                        let action = named(&ACTIONS, action.first().unwrap_or(&""));
                        (named(&STATES, next), action)
                    }
                    Some([]) => panic!("{name} {seen}: no next state"),
                };
                assert!(found.next().is_none(), "{name} {seen} stands there twice");
                assert_eq!(step(state, observation), expected, "{name} {seen}");
            }
        }
    }

    /// A life has no dead end: from each state the volume can still be forgotten.
    #[test]
    fn from_every_state_a_volume_can_come_to_its_end() {
        for (name, state) in STATES {
            let (mut reached, mut at) = (vec![state], 0);
            let mut ends = false;
            while let Some(state) = reached.get(at).copied() {
                at += 1;
                for (_, observation) in OBSERVATIONS {
                    let (next, action) = step(state, observation);
                    ends |= action == Action::Forget;
                    if !reached.contains(&next) {
                        reached.push(next);
                    }
                }
            }
            assert!(ends, "{name}");
        }
    }

    #[test]
    fn what_is_to_be_sealed_never_becomes_what_is_deleted() {
        for (name, state) in STATES {
            for (seen, observation) in OBSERVATIONS {
                let (next, _) = step(state, observation);
                if let Some(goal) = state.goal() {
                    assert_eq!(next.goal(), Some(goal), "{name} {seen}");
                }
            }
        }
    }
}
