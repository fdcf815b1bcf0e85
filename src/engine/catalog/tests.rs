//! What the catalog in memory promises about names, without a disk. Tests of `catalog` only.
//! Each builds a catalog by hand, changes it as the engine does, and looks at what is found.

use std::cell::RefCell;
use std::collections::HashSet;

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
        sharing: crate::model::Sharing::default(),
        fence: 0,
    }
}

/// Makes artifacts durable, as a commit does.
fn commit(catalog: &mut Catalog, ids: &[&Artifact]) {
    let batch = ids.iter().map(|artifact| artifact.id).collect();
    let names = catalog.names_of(&batch);
    catalog.indexed(&batch, names);
    for id in &batch {
        catalog.artifacts.set_durable(id, true);
    }
}

/// The owner of the name after a write-back error has taken everything that is not durable.
fn holder_after_failure(catalog: &mut Catalog, name: &Name) -> Option<ArtifactId> {
    let artifacts = catalog.artifacts.values();
    let tainted = artifacts.filter(|sealed| !sealed.durable);
    let tainted: Vec<ArtifactId> = tainted.map(|sealed| sealed.artifact.id).collect();
    for id in &tainted {
        catalog.remove_artifact(*id).expect("it was added");
    }
    catalog.owner_id(name)
}

#[test]
fn a_use_of_a_task_cache_is_news_once_in_ten_minutes() {
    let task = artifact(1);
    let resource = Artifact {
        reference: "resource-cache/k".parse().expect("reference"),
        ..artifact(2)
    };
    let mut catalog = Catalog::default();
    for artifact in [&task, &resource] {
        catalog.add_artifact(artifact.clone());
        commit(&mut catalog, &[artifact]);
    }
    catalog.changes().watch(std::sync::Arc::default());
    let mut touched = |id: u128, seconds: u64| {
        assert!(catalog.touch(ArtifactId::from_bits(id), Timestamp(seconds * 1000)));
        let names = catalog.changes().take();
        names.into_iter().next()
    };
    assert_eq!(touched(1, 599), None);
    assert_eq!(touched(1, 600), Some(task.name()));
    assert_eq!(touched(1, 1199), None);
    assert_eq!(touched(2, 1200), None, "no other name");
    assert_eq!(touched(1, 9000), Some(task.name()));
    assert!(!catalog.touch(ArtifactId::from_bits(3), Timestamp(1)));
}

#[test]
fn a_name_goes_back_to_the_owner_before_and_never_to_one_that_lost_it() {
    let (a, b, c) = (artifact(1), artifact(2), artifact(3));
    let name = a.name();
    let holder = |added: &[(&Artifact, bool)], destroyed_after: Option<usize>| {
        let mut catalog = Catalog::default();
        for (number, (artifact, durable)) in added.iter().enumerate() {
            assert!(catalog.add_artifact((*artifact).clone()));
            if *durable {
                commit(&mut catalog, &[artifact]);
            }
            if destroyed_after == Some(number) {
                assert_eq!(catalog.take_name(&name), Some(artifact.id));
            }
        }
        holder_after_failure(&mut catalog, &name)
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
                let mut catalog = Catalog::default();
                for id in added {
                    catalog.add_artifact(made(*id));
                }
                assert_eq!(catalog.owner_id(&name), newest(added));
                let mut index = None;
                for (number, id) in committed[..durable].iter().enumerate() {
                    let batch = HashSet::from([ArtifactId::from_bits(*id)]);
                    index = catalog.names_of(&batch).get(&name).copied().or(index);
                    commit(&mut catalog, &[&made(*id)]);
                    let what = format!("{reference} {added:?} {committed:?} {number}");
                    assert_eq!(index, newest(&committed[..=number]), "{what}");
                    assert!(catalog.is_name_indexed(&name));
                    let is_superseded = |id: u128| catalog.is_superseded(&made(id));
                    assert!(!is_superseded(index.expect("some").bits()), "{what}");
                }
                let holder = holder_after_failure(&mut catalog, &name);
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
    let mut catalog = Catalog::default();
    for artifact in [&a, &b, &c] {
        catalog.add_artifact(artifact.clone());
    }
    let batch = HashSet::from([a.id, b.id]);
    let names = catalog.names_of(&batch);
    assert_eq!(names, HashMap::from([(a.name(), b.id)]));
    catalog.indexed(&batch, names);
    assert!(catalog.is_superseded(&a) && !catalog.is_superseded(&b) && catalog.is_named(&c));
    // A deleted artifact takes the index's name with it, though a later one owns the name here.
    catalog.remove_artifact(b.id);
    assert!(catalog.is_named(&c) && !catalog.is_name_indexed(&b.name()));
}

#[test]
fn what_could_not_be_deleted_has_its_name_again_if_it_had_it() {
    let (old, new) = (artifact(1), artifact(2));
    let name = old.name();
    let mut catalog = Catalog::default();
    catalog.add_artifact(old.clone());
    commit(&mut catalog, &[&old]);
    let (taken, had_name) = catalog.take_out(old.id).expect("it is there");
    assert!(had_name && catalog.names.is_empty());
    catalog.put_back(taken, had_name);
    assert!(catalog.is_named(&old));
    // Without its name it comes back without it, though that is free.
    catalog.take_name(&name);
    let (taken, had_name) = catalog.take_out(old.id).expect("it is there");
    catalog.put_back(taken, had_name);
    assert!(!catalog.is_named(&old) && catalog.artifacts.contains_key(&old.id));
    // Who took a name while it was to be deleted keeps it, as long as it is not tainted.
    catalog.put_name_back(name.clone(), old.id);
    let deleted = catalog.take_name(&name).expect("it has it");
    catalog.add_artifact(new.clone());
    catalog.put_name_back(name.clone(), deleted);
    assert!(catalog.is_named(&new));
    catalog.remove_artifact(new.id);
    assert!(catalog.is_named(&old));
}

#[test]
fn an_artifact_is_superseded_only_by_one_that_survives_a_power_cut() {
    let (old, new) = (artifact(1), artifact(2));
    let mut catalog = Catalog::default();
    assert!(catalog.add_artifact(old.clone()) && !catalog.is_superseded(&old));
    commit(&mut catalog, &[&old]);
    assert!(catalog.add_artifact(new.clone()) && !catalog.is_superseded(&old));
    commit(&mut catalog, &[&new]);
    assert!(catalog.is_superseded(&old) && !catalog.is_superseded(&new));
    catalog.names.clear();
    assert!(catalog.is_superseded(&new), "its name was deleted");
}

#[test]
fn an_import_takes_its_name_in_the_index_from_no_later_owner_there() {
    let named = |reference: &str, id| Artifact {
        reference: reference.parse().expect("reference"),
        ..artifact(id)
    };
    for (reference, sealed, imported) in [("task-cache/k", 3, 2), ("resource-cache/k", 2, 3)] {
        let (sealed, imported) = (named(reference, sealed), named(reference, imported));
        let mut catalog = Catalog::default();
        assert!(catalog.may_take_name(&imported));
        assert!(
            catalog.owner(&imported.name()).is_none(),
            "it was only asked"
        );
        // A seal that the index does not have yet may be lost: then the name is the import's.
        assert!(catalog.add_artifact(sealed.clone()));
        assert!(catalog.may_take_name(&imported));
        catalog.add_artifact(imported.clone());
        commit(&mut catalog, &[&imported]);
        assert!(catalog.is_named(&sealed) && catalog.is_name_indexed(&sealed.name()));
        assert_eq!(
            holder_after_failure(&mut catalog, &sealed.name()),
            Some(imported.id)
        );
        // A later owner that the index has keeps it.
        let mut catalog = Catalog::default();
        catalog.add_artifact(sealed.clone());
        commit(&mut catalog, &[&sealed]);
        assert!(!catalog.may_take_name(&imported));
        assert!(!catalog.add_artifact(imported.clone()));
        commit(&mut catalog, &[&imported]);
        assert!(catalog.is_named(&sealed) && catalog.contains(&imported.id));
    }
}

#[test]
fn a_fence_looks_once_at_each_name_of_its_namespace_and_at_no_other() {
    let tenants = ["ch", "ci", "ci-0", "cia", "d"].map(|it| it.parse::<Tenant>().expect("label"));
    let references = [
        "artifact/0",
        "artifact/x",
        "resource-cache/ ",
        "task-cache/k",
    ];
    let mut catalog = Catalog::default();
    let mut id = 0;
    for tenant in &tenants {
        for reference in references {
            id += 1;
            let one = Artifact {
                tenant: tenant.clone(),
                reference: reference.parse().expect("reference"),
                // The last one is newer than the fence.
                fence: if reference == references[3] { 7 } else { 6 },
                ..artifact(id)
            };
            catalog.add_artifact(one.clone());
            commit(&mut catalog, &[&one]);
        }
    }
    let all: Vec<Name> = catalog.names.keys().cloned().collect();
    let of_one: Vec<Name> = all[4..8].to_vec();
    let looked = RefCell::new(Vec::new());
    let least = |name: &Name| {
        looked.borrow_mut().push(name.clone());
        7
    };
    let one = Some(&tenants[1..2]);
    assert_eq!(catalog.indexed_names(one, least), of_one[..3]);
    assert_eq!(looked.take(), of_one);
    catalog.clear(one, least);
    assert_eq!(looked.take(), of_one);
    let mut left = all.clone();
    left.retain(|name| !of_one[..3].contains(name));
    assert!(catalog.names.keys().eq(&left));
    // Fences of two namespaces, and those that were missed.
    let two = Some(&tenants[3..]);
    assert_eq!(catalog.indexed_names(two, least).len(), 6);
    assert_eq!(looked.take(), all[12..]);
    assert_eq!(catalog.indexed_names(None, |_| u64::MAX), left);
    catalog.clear(None, |_| u64::MAX);
    assert!(catalog.names.is_empty());
}

/// Whatever happens to names, a beginning of keys finds the newest of those that are there.
#[test]
fn the_newest_of_all_keys_that_begin_so_is_always_one_that_has_its_name() {
    let tenant = artifact(1).tenant;
    for seed in 0..50_u64 {
        let mut state = seed;
        let mut below = |limit: usize| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            usize::try_from(state >> 33).expect("small") % limit
        };
        let keys = ["main-1", "main-2", "main", "pr-1", "pr-"];
        let mut catalog = Catalog::default();
        let mut out: Vec<(Artifact, bool)> = Vec::new();
        for id in 1..200_u128 {
            let all: Vec<Artifact> = catalog
                .artifacts
                .values()
                .map(|it| it.artifact.clone())
                .collect();
            let some = (!all.is_empty()).then(|| all[below(all.len())].clone());
            match (below(8), some) {
                (0, Some(some)) => drop(catalog.take_name(&some.name())),
                (1, Some(some)) => drop(catalog.remove_artifact(some.id)),
                (2, Some(some)) => out.extend(catalog.take_out(some.id)),
                (3, _) => {
                    if let Some((artifact, had_name)) = out.pop() {
                        catalog.put_back(artifact, had_name);
                    }
                }
                (5, Some(some)) => commit(&mut catalog, &[&some]),
                (6, Some(some)) => {
                    let name = some.name();
                    let least = |it: &Name| u64::from(*it == name) * (some.fence + 1);
                    catalog.clear(None, least);
                }
                _ => {
                    let mut new = artifact(id);
                    // Two commits of one millisecond, and late ones of slow volumes.
                    new.created = Timestamp(below(50) as u64);
                    new.fence = below(3) as u64;
                    let key = keys[below(keys.len())];
                    new.reference = format!("task-cache/{key}").parse().expect("a reference");
                    if below(9) == 0 {
                        new.reference = format!("resource-cache/{key}")
                            .parse()
                            .expect("a reference");
                    }
                    catalog.add_artifact(new);
                }
            }
            for prefix in ["m", "main", "main-", "main-1", "pr", "pr-1", "x"] {
                let names = catalog.names().filter(|(name, _)| {
                    name.reference
                        .to_string()
                        .starts_with(&format!("task-cache/{prefix}"))
                });
                let there = names.filter_map(|(_, id)| catalog.get(&id));
                let newest = there.map(|it| (it.artifact.created, it.artifact.id)).max();
                let found = catalog.newest(&tenant, &prefix.parse().expect("a key"));
                let found = found.map(|it| (it.artifact.created, it.artifact.id));
                assert_eq!(found, newest, "seed {seed}, {prefix}");
            }
        }
    }
}
