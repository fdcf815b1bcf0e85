//! The Controller and GroupController services over claims on two nodes: what is made goes where it
//! is wanted, stays where it is, and every answer says where that is.

use super::super::*;
use super::fake::Fake;
use super::{ALL, attach, create, empty, made, service};
use crate::csi::group;
use csi::group_controller_server::GroupController;
use csi::volume_content_source::{SnapshotSource, Type as From, VolumeSource};
use tonic::Code;

/// Two nodes, and the service over both.
struct World {
    fake: Arc<Fake>,
    service: Service,
}

impl World {
    fn new() -> Self {
        let fake: Arc<Fake> = Arc::default();
        let service = service(&fake, ALL);
        Self { fake, service }
    }

    /// A requirement, in numbers of nodes.
    fn wanted(&self, requisite: &[usize], preferred: &[usize]) -> csi::TopologyRequirement {
        let all = |nodes: &[usize]| nodes.iter().map(|node| self.fake.at(*node)).collect();
        csi::TopologyRequirement {
            requisite: all(requisite),
            preferred: all(preferred),
        }
    }

    async fn ask(&self, request: csi::CreateVolumeRequest) -> Result<csi::Volume, Status> {
        let answer = self.service.create_volume(Request::new(request)).await?;
        Ok(answer.into_inner().volume.expect("required"))
    }

    /// Makes a volume, and says on which node it is.
    async fn make(
        &self,
        name: &str,
        at: csi::TopologyRequirement,
        source: Option<From>,
    ) -> Result<(String, usize), Status> {
        let request = csi::CreateVolumeRequest {
            accessibility_requirements: Some(at),
            volume_content_source: source.map(|source| csi::VolumeContentSource {
                r#type: Some(source),
            }),
            ..create(name)
        };
        let volume = self.ask(request).await?;
        Ok((volume.volume_id, self.node(&volume.accessible_topology)))
    }

    /// Makes an empty volume on a node.
    async fn on(&self, node: usize, name: &str) -> String {
        let made = self.make(name, self.wanted(&[node], &[]), None).await;
        let (id, at) = made.expect(name);
        assert_eq!(at, node);
        id
    }

    fn node(&self, topology: &[csi::Topology]) -> usize {
        let node = (0..2).find(|node| [self.fake.at(*node)] == topology);
        node.expect("one of the two nodes")
    }

    async fn snapshot(
        &self,
        name: &str,
        source: &str,
        at: Option<csi::TopologyRequirement>,
    ) -> Result<csi::Snapshot, Status> {
        let request = csi::CreateSnapshotRequest {
            name: name.into(),
            source_volume_id: source.into(),
            accessibility_requirements: at,
            ..Default::default()
        };
        let answer = self.service.create_snapshot(Request::new(request)).await?;
        Ok(answer.into_inner().snapshot.expect("required"))
    }
}

fn of_volume(id: &str) -> From {
    From::Volume(VolumeSource {
        volume_id: id.into(),
    })
}

fn of_snapshot(id: &str) -> From {
    From::Snapshot(SnapshotSource {
        snapshot_id: id.into(),
    })
}

fn assert_elsewhere<T: std::fmt::Debug>(answer: Result<T, Status>, wanted: &str, possible: &str) {
    assert_refused(answer, Code::ResourceExhausted, wanted, possible);
}

fn assert_refused<T: std::fmt::Debug>(
    answer: Result<T, Status>,
    code: Code,
    wanted: &str,
    possible: &str,
) {
    let status = answer.expect_err("elsewhere");
    assert_eq!(status.code(), code, "{status}");
    let (asked, rest) = status.message().split_once(", and ").expect("two parts");
    assert!(
        asked.contains(wanted) && rest.contains(possible),
        "{status}"
    );
}

#[tokio::test]
async fn a_volume_is_made_where_it_is_preferred_and_only_where_it_is_requisite() {
    let world = World::new();
    let cases: [(&[usize], &[usize], usize); 7] = [
        (&[], &[], 0),
        (&[], &[1], 1),
        (&[], &[1, 0], 1),
        (&[1], &[], 1),
        (&[0, 1], &[1, 0], 1),
        (&[0, 1], &[0], 0),
        (&[1], &[0], 1),
    ];
    for (requisite, preferred, expected) in cases {
        let name = format!("{requisite:?} {preferred:?}");
        let made = world.make(&name, world.wanted(requisite, preferred), None);
        assert_eq!(made.await.expect("made").1, expected, "{name}");
    }
    let mut both = world.fake.at(0);
    both.segments.extend([("zone".into(), "z".into())]);
    let nowhere = csi::TopologyRequirement {
        requisite: vec![both],
        preferred: Vec::new(),
    };
    let made = world.make("nowhere", nowhere, None).await;
    assert_elsewhere(made, "zone: z", "node: node-2");
}

#[tokio::test]
async fn a_node_that_is_too_small_is_passed_over_and_what_none_can_hold_is_refused() {
    let world = World::new();
    let mut request = create("large");
    request.accessibility_requirements = Some(world.wanted(&[0, 1], &[0]));
    let mut sized = async |name: &str, bytes| {
        request.name = name.into();
        request.capacity_range = Some(csi::CapacityRange {
            required_bytes: bytes,
            limit_bytes: 0,
        });
        let volume = world.ask(request.clone()).await?;
        Ok::<_, Status>(world.node(&volume.accessible_topology))
    };
    assert_eq!(sized("fits", 100).await.expect("made"), 0);
    assert_eq!(sized("does not", 101).await.expect("made"), 1);
    let none = sized("nowhere", 201).await.expect_err("too large");
    assert_eq!(none.code(), Code::ResourceExhausted);
}

#[tokio::test]
async fn what_is_there_already_is_found_where_it_is() {
    let world = World::new();
    let id = world.on(1, "pvc").await;
    let again = world.make("pvc", world.wanted(&[], &[0]), None).await;
    assert_eq!(again.expect("there"), (id, 1));
    let elsewhere = world.make("pvc", world.wanted(&[0], &[]), None).await;
    let (wanted, possible) = ("node: node-1", "node: node-2");
    assert_refused(elsewhere, Code::AlreadyExists, wanted, possible);
}

#[tokio::test]
async fn a_clone_is_made_where_its_source_is_and_nowhere_else() {
    let world = World::new();
    for node in [0, 1] {
        let other = 1 - node;
        let source = world.on(node, &format!("source-{node}")).await;
        let snapshot = world.snapshot(&format!("s-{node}"), &source, None).await;
        let snapshot = snapshot.expect("taken").snapshot_id;
        for (kind, from) in [
            ("volume", of_volume(&source)),
            ("snapshot", of_snapshot(&snapshot)),
        ] {
            let clone = async |what: &str, requisite: &[usize], preferred: &[usize]| {
                let name = format!("{kind}-{node}-{what}");
                let at = world.wanted(requisite, preferred);
                world.make(&name, at, Some(from.clone())).await
            };
            for (what, requisite, preferred) in [
                ("anywhere", vec![], vec![]),
                ("preferred elsewhere", vec![], vec![other]),
                ("allowed", vec![other, node], vec![other, node]),
            ] {
                let made = clone(what, &requisite, &preferred).await;
                assert_eq!(made.expect(what).1, node, "{kind} {what}");
            }
            let refused = clone("not allowed", &[other], &[other]).await;
            let name = |node: usize| format!("node: node-{}", node + 1);
            assert_elsewhere(refused, &name(other), &name(node));
        }
        let at = world.wanted(&[other], &[]);
        let refused = world.snapshot("elsewhere", &source, Some(at)).await;
        assert_eq!(
            refused.expect_err("elsewhere").code(),
            Code::ResourceExhausted
        );
        let at = world.wanted(&[other, node], &[other]);
        let taken = world
            .snapshot(&format!("t-{node}"), &source, Some(at))
            .await;
        let taken = taken.expect("taken").accessible_topology;
        assert_eq!(world.node(&taken), node);
    }
}

#[tokio::test]
async fn every_answer_says_where_each_thing_is() {
    let world = World::new();
    let mut volumes = Vec::new();
    let mut snapshots = Vec::new();
    for (name, node) in [("a", 0), ("b", 1), ("c", 1), ("d", 0)] {
        let id = world.on(node, name).await;
        let snapshot = world.snapshot(name, &id, None).await.expect("taken");
        snapshots.push((snapshot.snapshot_id, node));
        volumes.push((id, node));
    }
    for (id, node) in &volumes {
        let get = csi::ControllerGetVolumeRequest {
            volume_id: id.clone(),
        };
        let answer = world.service.controller_get_volume(Request::new(get)).await;
        let volume = answer
            .expect("there")
            .into_inner()
            .volume
            .expect("required");
        assert_eq!(world.node(&volume.accessible_topology), *node);
    }
    for (id, node) in &snapshots {
        let get = csi::GetSnapshotRequest {
            snapshot_id: id.clone(),
            ..Default::default()
        };
        let answer = world.service.get_snapshot(Request::new(get)).await;
        let snapshot = answer.expect("there").into_inner().snapshot;
        let topology = snapshot.expect("required").accessible_topology;
        assert_eq!(world.node(&topology), *node);
    }
    volumes.sort();
    snapshots.sort();
    let list = world.service.list_volumes(empty()).await;
    let entries = list.expect("a list").into_inner().entries.into_iter();
    let listed: Vec<(String, usize)> = entries
        .map(|entry| {
            let volume = entry.volume.expect("required");
            (volume.volume_id, world.node(&volume.accessible_topology))
        })
        .collect();
    assert_eq!(listed, volumes);
    let list = world.service.list_snapshots(empty()).await;
    let entries = list.expect("a list").into_inner().entries.into_iter();
    let listed: Vec<(String, usize)> = entries
        .map(|entry| {
            let snapshot = entry.snapshot.expect("required");
            let node = world.node(&snapshot.accessible_topology);
            (snapshot.snapshot_id, node)
        })
        .collect();
    assert_eq!(listed, snapshots);
}

#[tokio::test]
async fn a_volume_is_attached_to_its_own_node_and_nodes_are_counted_apart() {
    let mut world = World::new();
    let id = world.on(1, "pvc").await;
    let publish = async |world: &World, id: &str, node: &str| {
        let request = Request::new(attach(id, node));
        let answer = world.service.controller_publish_volume(request).await;
        answer.map_or_else(
            |status| (status.code(), status.message().to_owned()),
            |_| (Code::Ok, String::new()),
        )
    };
    let (code, why) = publish(&world, &id, "node-1").await;
    assert_eq!(code, Code::FailedPrecondition, "{why}");
    assert!(why.contains("on node node-2"), "{why}");
    assert_eq!(publish(&world, &id, "node-9").await.0, Code::NotFound);

    let features = Features {
        most_volumes: Some(1),
        ..ALL
    };
    world.service = service(&world.fake, features);
    let other = world.on(0, "other").await;
    let more = world.on(1, "more").await;
    assert_eq!(publish(&world, &id, "node-2").await.0, Code::Ok);
    assert_eq!(publish(&world, &other, "node-1").await.0, Code::Ok);
    let full = publish(&world, &more, "node-2").await.0;
    assert_eq!(full, Code::ResourceExhausted);
}

#[tokio::test]
async fn a_group_is_on_one_node_and_says_on_which() {
    let world = World::new();
    let service = group::Service::new(ALL, world.fake.found());
    let (a, b, c) = (
        made(&world.service, "a").await.volume_id,
        world.on(1, "b").await,
        world.on(1, "c").await,
    );
    let take = async |name: &str, sources: [&String; 2]| {
        let request = csi::CreateVolumeGroupSnapshotRequest {
            name: name.into(),
            source_volume_ids: sources.map(String::clone).into(),
            ..Default::default()
        };
        let request = Request::new(request);
        service.create_volume_group_snapshot(request).await
    };
    let across = take("across", [&a, &b]).await.expect_err("two nodes");
    assert_eq!(across.code(), Code::FailedPrecondition);
    let taken = take("one", [&b, &c]).await.expect("taken").into_inner();
    let taken = taken.group_snapshot.expect("required");
    let get = csi::GetVolumeGroupSnapshotRequest {
        group_snapshot_id: taken.group_snapshot_id.clone(),
        ..Default::default()
    };
    let got = service.get_volume_group_snapshot(Request::new(get)).await;
    let got = got.expect("there").into_inner().group_snapshot;
    assert_eq!(got.as_ref(), Some(&taken));
    assert_eq!(taken.snapshots.len(), 2);
    for snapshot in taken.snapshots {
        assert_eq!(world.node(&snapshot.accessible_topology), 1);
    }
}
