//! What the state in memory promises about names and layers, without a disk. Tests of `state.rs` only.
//! Each builds a state by hand, changes it as the engine does, and looks at what is found.

use super::*;
use crate::model::Artifact;

fn artifact(id: u128) -> Artifact {
    Artifact {
        id: ArtifactId::from_bits(id),
        tenant: "ci".parse().expect("label"),
        reference: "task-cache/k".parse().expect("reference"),
        layers: vec![LayerId::from_bits(id)],
        created: Timestamp(u64::try_from(id).expect("small")),
        ttl_seconds: None,
        last_used: Timestamp(1),
        made_by: None,
        digests: crate::model::Digests::default(),
    }
}

/// Makes artifacts durable, as a commit does.
fn commit(state: &mut State, ids: &[&Artifact]) {
    let batch = ids.iter().map(|artifact| artifact.id).collect();
    let names = state.names_of(&batch);
    state.indexed(&batch, names);
    for id in &batch {
        state.artifacts.set_durable(id, true);
    }
}

/// The owner of the name after a write-back error has taken everything that is not durable.
fn holder_after_doom(state: &mut State, name: &Name) -> Option<ArtifactId> {
    let artifacts = state.artifacts.values();
    let doomed = artifacts.filter(|sealed| !sealed.durable);
    let doomed: Vec<ArtifactId> = doomed.map(|sealed| sealed.artifact.id).collect();
    for id in &doomed {
        state.remove_artifact(*id).expect("it was added");
    }
    state.give_name_back(name);
    state.names.get(name).copied()
}

#[test]
fn a_name_goes_back_to_whom_it_was_taken_from_and_to_nobody_who_lost_it() {
    let (a, b, c) = (artifact(1), artifact(2), artifact(3));
    let name = a.name();
    let holder = |added: &[(&Artifact, bool)], destroyed_after: Option<usize>| {
        let mut state = State::default();
        for (number, (artifact, durable)) in added.iter().enumerate() {
            assert!(state.add_artifact((*artifact).clone()));
            if *durable {
                commit(&mut state, &[artifact]);
            }
            if destroyed_after == Some(number) {
                assert_eq!(state.take_name(&name), Some(artifact.id));
            }
        }
        holder_after_doom(&mut state, &name)
    };
    let whose = holder(&[(&a, true), (&b, false)], None);
    assert_eq!(whose, Some(a.id));
    let whose = holder(&[(&a, true), (&b, false), (&c, false)], None);
    assert_eq!(whose, Some(a.id));
    let whose = holder(&[(&a, true), (&b, true), (&c, false)], None);
    assert_eq!(whose, Some(b.id));
    let whose = holder(&[(&a, true), (&b, false)], Some(0));
    assert_eq!(whose, None, "it was destroyed, and is here for its forks");
    let whose = holder(&[(&a, true), (&b, true), (&c, false)], Some(1));
    assert_eq!(whose, None, "nor is it his who lost it to that one");
}

#[test]
fn the_index_names_the_newest_that_is_durable_in_whatever_order_they_are_made() {
    let orders = [
        [1, 2, 3],
        [1, 3, 2],
        [2, 1, 3],
        [2, 3, 1],
        [3, 1, 2],
        [3, 2, 1],
    ];
    for reference in ["task-cache/k", "resource-cache/k"] {
        let made = |id| Artifact {
            reference: reference.parse().expect("reference"),
            ..artifact(id)
        };
        let name = made(1).name();
        // The first writer keeps a resource cache.
        let newest = |ids: &[u128]| {
            let ids = ids.iter().copied();
            let newest = if made(1).reference.first_writer_wins() {
                ids.min()
            } else {
                ids.max()
            };
            newest.map(ArtifactId::from_bits)
        };
        for (added, committed) in orders
            .iter()
            .flat_map(|a| orders.iter().map(move |b| (a, b)))
        {
            for durable in 1..=3 {
                let mut state = State::default();
                for id in added {
                    state.add_artifact(made(*id));
                }
                assert_eq!(state.names.get(&name).copied(), newest(added));
                let mut index = None;
                for (number, id) in committed[..durable].iter().enumerate() {
                    let batch = HashSet::from([ArtifactId::from_bits(*id)]);
                    index = state.names_of(&batch).get(&name).copied().or(index);
                    commit(&mut state, &[&made(*id)]);
                    let what = format!("{reference} {added:?} {committed:?} {number}");
                    assert_eq!(index, newest(&committed[..=number]), "{what}");
                    assert!(state.is_name_indexed(&name));
                    let is_superseded = |id: u128| state.is_superseded(&made(id));
                    assert!(!is_superseded(index.expect("some").bits()), "{what}");
                }
                let holder = holder_after_doom(&mut state, &name);
                assert_eq!(
                    holder, index,
                    "{reference} {added:?} {committed:?} {durable}"
                );
            }
        }
    }
}

#[test]
fn of_those_that_become_durable_together_the_newest_has_the_name() {
    let (a, b, c) = (artifact(1), artifact(2), artifact(3));
    let mut state = State::default();
    for artifact in [&a, &b, &c] {
        state.add_artifact(artifact.clone());
    }
    let batch = HashSet::from([a.id, b.id]);
    let names = state.names_of(&batch);
    assert_eq!(names, HashMap::from([(a.name(), b.id)]));
    state.indexed(&batch, names);
    assert!(state.is_superseded(&a) && !state.is_superseded(&b) && state.is_named(&c));
    // A deleted artifact takes the index's name with it, though a later one owns the name here.
    state.remove_artifact(b.id);
    assert!(state.is_named(&c) && !state.is_name_indexed(&b.name()));
}

#[test]
fn what_could_not_be_deleted_has_its_name_again_if_it_had_it() {
    let (old, new) = (artifact(1), artifact(2));
    let name = old.name();
    let mut state = State::default();
    state.add_artifact(old.clone());
    commit(&mut state, &[&old]);
    let (taken, had_name) = state.take_out(old.id).expect("it is there");
    assert!(had_name && state.names.is_empty());
    state.put_back(taken, had_name);
    assert!(state.is_named(&old));
    // Without its name it comes back without it, though that is free.
    state.take_name(&name);
    let (taken, had_name) = state.take_out(old.id).expect("it is there");
    state.put_back(taken, had_name);
    assert!(!state.is_named(&old) && state.artifacts.contains_key(&old.id));
    // Who took a name while it was to be deleted keeps it, as long as he is not doomed.
    state.put_name_back(name.clone(), old.id);
    let deleted = state.take_name(&name).expect("it has it");
    state.add_artifact(new.clone());
    state.put_name_back(name.clone(), deleted);
    assert!(state.is_named(&new));
    state.remove_artifact(new.id);
    state.give_name_back(&name);
    assert!(state.is_named(&old));
}

#[test]
fn an_artifact_is_superseded_only_by_one_that_survives_a_power_cut() {
    let (old, new) = (artifact(1), artifact(2));
    let mut state = State::default();
    assert!(state.add_artifact(old.clone()) && !state.is_superseded(&old));
    commit(&mut state, &[&old]);
    assert!(state.add_artifact(new.clone()) && !state.is_superseded(&old));
    commit(&mut state, &[&new]);
    assert!(state.is_superseded(&old) && !state.is_superseded(&new));
    state.names.clear();
    assert!(state.is_superseded(&new), "its name was deleted");
}
