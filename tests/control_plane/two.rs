//! Two controllers at once, as after a node of the first became unreachable: either is stopped
//! while the other works, and then goes on with what it had read before.

use std::collections::BTreeSet;
use std::time::Duration;

use baggageclaim::api::Phase;
use futures_util::future::{join_all, select};
use rustix::process::Signal;

use crate::calls::{Client, create, delete, request, selected};
use crate::common::{Fs, require_lab};
use crate::driver::{client, controller_named, node};
use crate::objects::{claim, persistent_on, phase};
use crate::plane::ControlPlane;
use crate::{await_pools, eventually, standard, volumes};

const CLAIMS: usize = 10;
const STOPS: usize = 12;

/// Repeats a call until it succeeds, on this node and then on the other.
async fn insist(mut client: Client, name: &str, first: usize) -> (String, String) {
    let nodes = ["node-1", "node-2"];
    for number in first.. {
        let asked = request(name, Some(selected(nodes[number % 2])), None);
        match create(&mut client, asked).await {
            Ok(made) => return made,
            Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    }
    unreachable!("it has no end")
}

#[tokio::test]
async fn two_controllers_leave_one_volume_for_a_name() {
    let Some(plane) = ControlPlane::start().await else {
        return;
    };
    let lab = require_lab!(Fs::Ext4);
    let flags = ["--leak-grace=2s"];
    let controllers = ["first", "second"].map(|name| controller_named(&plane, name, &flags));
    let mut one = node(&plane, "node-1", &lab.dir("one"));
    let mut two = node(&plane, "node-2", &lab.dir("two"));
    let [first, second] = &controllers;
    let (first_client, second_client) = (client(first).await, client(second).await);
    for controller in [&first_client, &second_client] {
        await_pools(controller, 2).await;
    }
    let names: Vec<(String, String)> = (0..CLAIMS)
        .map(|number| format!("claim-{number}"))
        .map(|of| (claim(&plane, &of), of))
        .collect();

    let make = async |number: usize| {
        let (name, of) = &names[number];
        // Each on another node.
        let here = Box::pin(insist(first_client.clone(), name, number));
        let there = Box::pin(insist(second_client.clone(), name, number + 1));
        let (id, at) = select(here, there).await.factor_first().0;
        persistent_on(&plane, name, &id, of, "Delete", &at);
        (name.clone(), id, at)
    };
    let stop = async {
        for number in 0..STOPS {
            let stopped = &controllers[number % 2];
            stopped.signal(Signal::STOP);
            tokio::time::sleep(Duration::from_millis(150)).await;
            stopped.signal(Signal::CONT);
        }
    };
    let (answers, ()) = tokio::join!(join_all((0..CLAIMS).map(make)), stop);

    let expected: BTreeSet<String> = answers.iter().map(|(_, id, _)| id.clone()).collect();
    let is_one_each = async || {
        let volumes = volumes(&plane).await;
        let ready = |phase| phase == Some(Phase::Ready);
        let ids: BTreeSet<String> = volumes.iter().map(kube::ResourceExt::name_any).collect();
        volumes.iter().all(|one| ready(one.phase())) && ids == expected
    };
    eventually(
        "each name has the volume of its PersistentVolume only",
        is_one_each,
    )
    .await;

    // The caches of a controller that was stopped are old when it goes on.
    let (name, id, at) = &answers[0];
    first.signal(Signal::STOP);
    let mut awake = second_client.clone();
    phase(&plane, name, "Released");
    delete(&mut awake, id).await.expect("deleted");
    plane.delete("pv", name);
    let asked = request(name, Some(selected(at)), None);
    let again = create(&mut awake, asked.clone()).await.expect("made again");
    first.signal(Signal::CONT);
    let stale = create(&mut first_client.clone(), asked).await;
    assert_eq!(stale.expect("the same"), again);
    assert_eq!(volumes(&plane).await.len(), CLAIMS);

    one.kill();
    two.kill();
    let mut held = BTreeSet::new();
    for pool in ["one", "two"] {
        held.extend(standard::held(&lab.dir(pool)).await);
    }
    assert_eq!(held, expected);
}
