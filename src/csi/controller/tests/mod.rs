//! The Controller and GroupController services over claims in memory: what they advertise, answer
//! and refuse. Parsing and rendering have tests of their own beside them.

pub(in crate::csi) mod fake;
mod places;

use std::sync::Arc;

use tonic::Code;

use super::*;
use crate::csi::group;
use csi::group_controller_server::GroupController;
use csi::volume_capability::access_mode::Mode;
use csi::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume};
use fake::Fake;

const ALL: Features = Features {
    controller: true,
    alpha: true,
    attach: true,
    share: crate::model::Share::Auto,
    most_volumes: None,
};

fn service(fake: &Arc<Fake>, features: Features) -> Service {
    Service::new(features, fake.found())
}

fn wanted(mode: Mode) -> csi::VolumeCapability {
    csi::VolumeCapability {
        access_mode: Some(AccessMode { mode: mode.into() }),
        access_type: Some(AccessType::Mount(MountVolume::default())),
    }
}

fn create(name: &str) -> csi::CreateVolumeRequest {
    csi::CreateVolumeRequest {
        name: name.into(),
        volume_capabilities: vec![wanted(Mode::SingleNodeWriter)],
        ..Default::default()
    }
}

async fn made(service: &Service, name: &str) -> csi::Volume {
    let answer = service.create_volume(Request::new(create(name))).await;
    answer.expect(name).into_inner().volume.expect("required")
}

fn empty<T: Default>() -> Request<T> {
    Request::new(T::default())
}

fn code<T>(answer: Result<Response<T>, Status>) -> Code {
    answer.map_or_else(|status| status.code(), |_| Code::Ok)
}

fn attach(volume: &str, node: &str) -> csi::ControllerPublishVolumeRequest {
    csi::ControllerPublishVolumeRequest {
        volume_id: volume.into(),
        node_id: node.into(),
        volume_capability: Some(wanted(Mode::SingleNodeWriter)),
        ..Default::default()
    }
}

#[tokio::test]
async fn the_same_request_again_is_the_same_volume_and_another_one_is_refused() {
    let service = service(&Arc::default(), ALL);
    let mut request = create("pvc-1");
    request.capacity_range = Some(csi::CapacityRange {
        required_bytes: 5,
        limit_bytes: 5,
    });
    let answer = service.create_volume(Request::new(request.clone())).await;
    let first = answer.expect("made").into_inner();
    let answer = service.create_volume(Request::new(request.clone())).await;
    assert_eq!(answer.expect("there").into_inner(), first);
    let volume = first.volume.expect("required");
    assert_eq!(volume.capacity_bytes, 5);
    assert_eq!(volume.accessible_topology.len(), 1);

    request.capacity_range = Some(csi::CapacityRange {
        required_bytes: 6,
        limit_bytes: 6,
    });
    let answer = service.create_volume(Request::new(request)).await;
    assert_eq!(code(answer), Code::AlreadyExists);
}

#[tokio::test]
async fn a_creation_that_did_not_begin_never_answers_as_if_it_ran() {
    let fake: Arc<Fake> = Arc::default();
    let service = service(&fake, ALL);
    let source: VolumeId = "vol-1".parse().expect("an id");
    let clone = csi::CreateVolumeRequest {
        volume_content_source: Some(csi::VolumeContentSource {
            r#type: Some(csi::volume_content_source::Type::Volume(
                csi::volume_content_source::VolumeSource {
                    volume_id: source.to_string(),
                },
            )),
        }),
        ..create("clone")
    };
    let other: VolumeId = "vol-2".parse().expect("an id");
    for (request, error, expected) in [
        (
            create("a"),
            engine::Error::ShuttingDown,
            Code::FailedPrecondition,
        ),
        (
            create("a"),
            engine::Error::Full("x".to_owned().into()),
            Code::ResourceExhausted,
        ),
        (
            create("a"),
            engine::Error::Busy(other.clone()),
            Code::Aborted,
        ),
        // The write that is in doubt may have made the volume.
        (
            create("a"),
            engine::Error::Degraded("a write is in doubt".into()),
            Code::Unavailable,
        ),
        (clone.clone(), engine::Error::Busy(other), Code::Aborted),
        (clone, engine::Error::Busy(source), Code::FailedPrecondition),
    ] {
        let what = error.to_string();
        fake.fail(error);
        let answer = service.create_volume(Request::new(request)).await;
        assert_eq!(code(answer), expected, "{what}");
    }
}

#[tokio::test]
async fn a_creation_that_a_node_goes_on_with_is_never_forgotten() {
    let fake: Arc<Fake> = Arc::default();
    let in_a_cluster = service(&fake, ALL);
    for code_of_it in [Code::Aborted, Code::Unavailable, Code::ResourceExhausted] {
        fake.fail(engine::Error::Remote {
            code: code_of_it.into(),
            message: "node b has not made the clone yet".to_owned(),
        });
        let answer = in_a_cluster.create_volume(Request::new(create("a"))).await;
        let status = answer.expect_err("it fails");
        assert_eq!(status.code(), code_of_it);
        assert_eq!(status.message(), "node b has not made the clone yet");
    }
    let listing: FindClaims = Arc::new(|| Err(Failure::Listing));
    let restarted = Service::new(ALL, listing);
    let answer = restarted.create_volume(Request::new(create("a"))).await;
    assert_eq!(code(answer), Code::Unavailable);
}

#[tokio::test]
async fn while_the_pool_is_being_opened_nothing_is_parked() {
    let recovering: FindClaims = Arc::new(|| Err(Failure::Recovering));
    let service = Service::new(ALL, recovering);
    let answer = service.create_volume(Request::new(create("a"))).await;
    assert_eq!(code(answer), Code::FailedPrecondition);
    let delete = csi::DeleteVolumeRequest {
        volume_id: "vol-1".into(),
        ..Default::default()
    };
    let answer = service.delete_volume(Request::new(delete)).await;
    assert_eq!(code(answer), Code::Unavailable);
}

#[tokio::test]
async fn capacity_is_what_can_be_made_and_where() {
    let fake: Arc<Fake> = Arc::default();
    let service = service(&fake, ALL);
    let ask = async |request| {
        let answer = service.get_capacity(Request::new(request)).await?;
        let answer = answer.into_inner();
        let largest = answer.maximum_volume_size.expect("told");
        Ok::<_, Status>((answer.available_capacity, largest))
    };
    let within = |topology| csi::GetCapacityRequest {
        accessible_topology: Some(topology),
        ..Default::default()
    };
    let anywhere = ask(csi::GetCapacityRequest::default()).await;
    assert_eq!(anywhere.expect("numbers"), (30, 200));
    assert_eq!(ask(within(fake.at(0))).await.expect("numbers"), (10, 100));
    assert_eq!(ask(within(fake.at(1))).await.expect("numbers"), (20, 200));
    let mut nowhere = fake.at(0);
    nowhere.segments.extend(fake.at(1).segments);
    nowhere.segments.extend([("zone".into(), "z".into())]);
    assert_eq!(ask(within(nowhere)).await.expect("numbers"), (0, 0));
    let mut block = csi::GetCapacityRequest {
        volume_capabilities: vec![wanted(Mode::SingleNodeWriter)],
        ..Default::default()
    };
    block.volume_capabilities[0].access_type = Some(AccessType::Block(BlockVolume {}));
    assert_eq!(ask(block).await.expect("numbers"), (0, 0));
    let unknown = csi::GetCapacityRequest {
        parameters: [("x".to_owned(), "y".to_owned())].into(),
        ..Default::default()
    };
    let refused = ask(unknown).await.expect_err("unknown");
    assert_eq!(refused.code(), Code::InvalidArgument);
}

#[tokio::test]
async fn lists_go_on_where_they_stopped_whatever_is_made_or_deleted() {
    let service = service(&Arc::default(), ALL);
    let mut ids = Vec::new();
    for name in ["a", "b", "c", "d", "e"] {
        ids.push(made(&service, name).await.volume_id);
    }
    ids.sort();
    let list = async |max_entries, token: &str| {
        let request = csi::ListVolumesRequest {
            max_entries,
            starting_token: token.to_owned(),
        };
        let answer = service.list_volumes(Request::new(request)).await;
        answer.map(|answer| {
            let answer = answer.into_inner();
            let ids: Vec<String> = answer
                .entries
                .into_iter()
                .map(|entry| entry.volume.expect("required").volume_id)
                .collect();
            (ids, answer.next_token)
        })
    };
    let (first, token) = list(2, "").await.expect("a page");
    assert_eq!(first, ids[..2]);
    for gone in [&ids[1], &ids[2]] {
        let delete = csi::DeleteVolumeRequest {
            volume_id: gone.clone(),
            ..Default::default()
        };
        service
            .delete_volume(Request::new(delete))
            .await
            .expect("deleted");
    }
    let (rest, end) = list(0, &token).await.expect("a page");
    assert_eq!((rest.as_slice(), end.as_str()), (&ids[3..], ""));
    let (exact, end) = list(3, "").await.expect("a page");
    assert_eq!(
        (exact.len(), end.as_str()),
        (3, ""),
        "a full last page has no next"
    );

    assert_eq!(
        list(0, "invalid-token").await.expect_err("no token").code(),
        Code::Aborted
    );
    assert_eq!(
        list(-1, "").await.expect_err("negative").code(),
        Code::InvalidArgument
    );
    let other = csi::ListSnapshotsRequest {
        starting_token: token,
        ..Default::default()
    };
    let answer = service.list_snapshots(Request::new(other)).await;
    assert_eq!(code(answer), Code::Aborted, "a token of another list");
}

#[tokio::test]
async fn an_attachment_is_of_a_known_volume_to_a_known_node_and_the_same_each_time() {
    let service = service(&Arc::default(), ALL);
    let id = made(&service, "pvc-1").await.volume_id;
    let publish = async |request| {
        code(
            service
                .controller_publish_volume(Request::new(request))
                .await,
        )
    };
    assert_eq!(publish(attach("vol-none", "node-1")).await, Code::NotFound);
    assert_eq!(publish(attach(&id, "node-9")).await, Code::NotFound);
    assert_eq!(publish(attach(&id, "node-1")).await, Code::Ok);
    assert_eq!(publish(attach(&id, "node-1")).await, Code::Ok);
    let mut reading = attach(&id, "node-1");
    reading.readonly = true;
    assert_eq!(publish(reading).await, Code::AlreadyExists);
    for (name, readonly) in [("pvc-2", true), ("pvc-3", false)] {
        let id = made(&service, name).await.volume_id;
        for _ in 0..2 {
            let request = csi::ControllerPublishVolumeRequest {
                readonly,
                ..attach(&id, "node-1")
            };
            let answer = service.controller_publish_volume(Request::new(request));
            let context = answer.await.expect("attached").into_inner().publish_context;
            let said = context.get("readOnly").map(String::as_str);
            assert_eq!(said, readonly.then_some("true"), "{context:?}");
        }
    }

    let get = csi::ControllerGetVolumeRequest {
        volume_id: id.clone(),
    };
    let answer = service.controller_get_volume(Request::new(get)).await;
    let status = answer
        .expect("there")
        .into_inner()
        .status
        .expect("required");
    assert_eq!(status.published_node_ids, ["node-1"]);
    for (volume, node) in [(id.as_str(), ""), (&id, "node-9"), ("vol-none", "node-1")] {
        let request = csi::ControllerUnpublishVolumeRequest {
            volume_id: volume.into(),
            node_id: node.into(),
            ..Default::default()
        };
        let answer = service
            .controller_unpublish_volume(Request::new(request))
            .await;
        assert_eq!(code(answer), Code::Ok, "{volume} {node}");
    }
}

#[tokio::test]
async fn a_node_has_no_more_attachments_than_it_may() {
    let features = Features {
        most_volumes: Some(2),
        ..ALL
    };
    let service = service(&Arc::default(), features);
    let mut answers = Vec::new();
    for name in ["a", "b", "c", "a"] {
        let id = made(&service, name).await.volume_id;
        let request = Request::new(attach(&id, "node-1"));
        answers.push(code(service.controller_publish_volume(request).await));
    }
    let (ok, full) = (Code::Ok, Code::ResourceExhausted);
    assert_eq!(
        answers,
        [ok, ok, full, ok],
        "what is attached already stays so"
    );
}

/// Both calls begin before either attachment is noted.
#[tokio::test]
async fn two_attachments_at_once_do_not_both_become_the_last_one() {
    let features = Features {
        most_volumes: Some(1),
        ..ALL
    };
    let service = service(&Arc::default(), features);
    let (a, b) = (made(&service, "a").await, made(&service, "b").await);
    let publish = async |volume: &csi::Volume| {
        let request = Request::new(attach(&volume.volume_id, "node-1"));
        code(service.controller_publish_volume(request).await)
    };
    let answers = tokio::join!(publish(&a), publish(&b));
    assert_eq!(answers, (Code::Ok, Code::ResourceExhausted));
}

#[tokio::test]
async fn what_is_not_advertised_is_not_served() {
    let features = Features {
        alpha: false,
        attach: false,
        ..ALL
    };
    let fake: Arc<Fake> = Arc::default();
    let plain = service(&fake, features);
    let id = made(&plain, "pvc-1").await.volume_id;
    let get = |id: &str| csi::ControllerGetVolumeRequest {
        volume_id: id.into(),
    };
    let codes = [
        code(plain.controller_get_volume(Request::new(get(&id))).await),
        code(plain.controller_get_volume_health(empty()).await),
        code(plain.controller_list_volume_health(empty()).await),
        code(plain.get_snapshot(empty()).await),
        code(plain.controller_publish_volume(empty()).await),
        code(plain.controller_unpublish_volume(empty()).await),
    ];
    assert_eq!(codes, [Code::Unimplemented; 6]);
    let (few, all) = (capabilities(features), capabilities(ALL));
    assert!(!few.contains(&rpc::Type::PublishUnpublishVolume));
    assert_eq!(all.len(), few.len() + 7);
    let with_topology = async |features| {
        let request = csi::CreateSnapshotRequest {
            name: "s".into(),
            source_volume_id: id.clone(),
            ..Default::default()
        };
        let service = service(&fake, features);
        let answer = service.create_snapshot(Request::new(request)).await;
        let snapshot = answer.expect("taken").into_inner().snapshot;
        snapshot.expect("required").accessible_topology.len()
    };
    assert_eq!(
        (with_topology(features).await, with_topology(ALL).await),
        (0, 1)
    );
}

type Change = fn(&mut csi::ValidateVolumeCapabilitiesRequest);

#[tokio::test]
#[expect(clippy::too_many_lines, reason = "one scenario, told in order")]
async fn what_a_volume_is_not_is_told_and_no_error() {
    let service = service(&Arc::default(), ALL);
    let id = made(&service, "pvc-1").await.volume_id;
    let ask = async |change: fn(&mut csi::ValidateVolumeCapabilitiesRequest)| {
        let mut request = csi::ValidateVolumeCapabilitiesRequest {
            volume_id: id.clone(),
            volume_capabilities: vec![wanted(Mode::SingleNodeWriter)],
            ..Default::default()
        };
        change(&mut request);
        let answer = service
            .validate_volume_capabilities(Request::new(request))
            .await;
        answer.map(Response::into_inner)
    };
    let confirmed = ask(|_| {})
        .await
        .expect("an answer")
        .confirmed
        .expect("confirmed");
    assert_eq!(confirmed.volume_capabilities.len(), 1);
    let others: &[(Change, &str)] = &[
        (
            |r| {
                let many = wanted(Mode::MultiNodeMultiWriter);
                r.volume_capabilities.push(many);
            },
            "MULTI_NODE_MULTI_WRITER",
        ),
        (
            |r| {
                r.parameters.insert("uid".into(), "7".into());
            },
            "made with other parameters",
        ),
        (
            |r| {
                r.mutable_parameters.insert("ttl".into(), "1h".into());
            },
            "has other mutable parameters",
        ),
        (
            |r| {
                r.volume_context.insert("type".into(), "input".into());
            },
            "has no attributes",
        ),
    ];
    for (change, expected) in others {
        let answer = ask(*change).await.expect("an answer");
        assert_eq!(answer.confirmed, None);
        assert!(answer.message.contains(expected), "{}", answer.message);
    }
    for (key, value) in [("sizeLimit", "1Gi"), ("ttl", "1h")] {
        let class = csi::ControllerModifyVolumeRequest {
            volume_id: id.clone(),
            mutable_parameters: [(key.to_owned(), value.to_owned())].into(),
            ..Default::default()
        };
        let modified = service.controller_modify_volume(Request::new(class));
        modified.await.expect("modified");
    }
    let each_class: [Change; 2] = [
        |r| {
            r.mutable_parameters
                .insert("sizeLimit".into(), "1Gi".into());
        },
        |r| {
            r.mutable_parameters.insert("ttl".into(), "1h".into());
        },
    ];
    for class in each_class {
        let answer = ask(class).await.expect("an answer");
        assert!(answer.confirmed.is_some(), "{}", answer.message);
    }
    let never = csi::ControllerModifyVolumeRequest {
        volume_id: id.clone(),
        mutable_parameters: [("ttl".to_owned(), "never".to_owned())].into(),
        ..Default::default()
    };
    let modified = service.controller_modify_volume(Request::new(never));
    modified.await.expect("modified");
    let has_never = ask(|r| drop(r.mutable_parameters.insert("ttl".into(), "never".into())));
    assert!(has_never.await.expect("an answer").confirmed.is_some());
    let has_hour = ask(|r| drop(r.mutable_parameters.insert("ttl".into(), "1h".into())));
    assert!(has_hour.await.expect("an answer").confirmed.is_none());
    let none = ask(|r| r.volume_capabilities.clear()).await;
    assert_eq!(none.expect_err("none").code(), Code::InvalidArgument);
    let unknown = ask(|r| r.volume_id = "vol-none".into()).await;
    assert_eq!(unknown.expect_err("unknown").code(), Code::NotFound);
}

#[tokio::test]
async fn only_what_is_not_well_is_listed_page_by_page() {
    let fake: Arc<Fake> = Arc::default();
    let service = service(&fake, ALL);
    let mut ids = Vec::new();
    for name in ["a", "b", "c", "d"] {
        ids.push(made(&service, name).await.volume_id);
    }
    ids.sort();
    for id in &ids[1..] {
        fake.spoil(id, "a layer is missing");
    }
    let list = async |max_entries, starting_token| {
        let request = csi::ControllerListVolumeHealthRequest {
            max_entries,
            starting_token,
            ..Default::default()
        };
        let answer = service
            .controller_list_volume_health(Request::new(request))
            .await;
        let answer = answer.expect("a page").into_inner();
        let ids: Vec<String> = answer
            .entries
            .into_iter()
            .map(|entry| entry.volume_id)
            .collect();
        (ids, answer.next_token)
    };
    let (first, token) = list(2, String::new()).await;
    assert_eq!(first, ids[1..3]);
    assert_eq!(list(2, token).await, (ids[3..].to_vec(), String::new()));
    assert_eq!(
        list(3, String::new()).await,
        (ids[1..].to_vec(), String::new())
    );
    let get = csi::ControllerGetVolumeHealthRequest {
        volume_id: ids[0].clone(),
        ..Default::default()
    };
    let answer = service
        .controller_get_volume_health(Request::new(get))
        .await;
    let health = answer
        .expect("there")
        .into_inner()
        .volume_health
        .expect("required");
    assert!(health.health_statuses.is_empty());
}

#[tokio::test]
async fn snapshots_are_found_by_id_and_by_source() {
    let service = service(&Arc::default(), ALL);
    let volume = made(&service, "pvc-1").await.volume_id;
    let request = csi::CreateSnapshotRequest {
        name: "s".into(),
        source_volume_id: volume.clone(),
        ..Default::default()
    };
    let answer = service.create_snapshot(Request::new(request)).await;
    let id = answer
        .expect("taken")
        .into_inner()
        .snapshot
        .expect("required")
        .snapshot_id;
    let found = async |source_volume_id: &str, snapshot_id: &str| {
        let request = csi::ListSnapshotsRequest {
            source_volume_id: source_volume_id.into(),
            snapshot_id: snapshot_id.into(),
            ..Default::default()
        };
        let answer = service.list_snapshots(Request::new(request)).await;
        answer.expect("a list").into_inner().entries.len()
    };
    assert_eq!(found("", "").await, 1);
    assert_eq!(found(&volume, "").await, 1);
    assert_eq!(found("", &id).await, 1);
    assert_eq!(found("", "../odd").await, 0);
    assert_eq!(found(&id, "").await, 0, "an id of another kind");
    let get = async |id: &str| {
        let request = csi::GetSnapshotRequest {
            snapshot_id: id.into(),
            ..Default::default()
        };
        code(service.get_snapshot(Request::new(request)).await)
    };
    assert_eq!(get(&id).await, Code::Ok);
    assert_eq!(get(&volume).await, Code::NotFound);
    assert_eq!(get("").await, Code::InvalidArgument);
}

#[tokio::test]
async fn a_group_is_one_thing_and_who_names_others_is_wrong() {
    let fake: Arc<Fake> = Arc::default();
    let controller = service(&fake, ALL);
    let group = group::Service::new(ALL, fake.found());
    let mut sources = Vec::new();
    for name in ["a", "b"] {
        sources.push(made(&controller, name).await.volume_id);
    }
    let request = csi::CreateVolumeGroupSnapshotRequest {
        name: "g".into(),
        source_volume_ids: sources.clone(),
        ..Default::default()
    };
    let answer = group
        .create_volume_group_snapshot(Request::new(request.clone()))
        .await;
    let first = answer
        .expect("taken")
        .into_inner()
        .group_snapshot
        .expect("required");
    assert_eq!(first.snapshots.len(), 2);
    assert!(first.ready_to_use);
    let mut again = request.clone();
    again.source_volume_ids.reverse();
    let answer = group
        .create_volume_group_snapshot(Request::new(again))
        .await;
    assert_eq!(
        answer.expect("there").into_inner().group_snapshot,
        Some(first.clone())
    );
    let mut other = request;
    other.source_volume_ids.pop();
    let answer = group
        .create_volume_group_snapshot(Request::new(other))
        .await;
    assert_eq!(code(answer), Code::AlreadyExists);

    let id = first.group_snapshot_id.clone();
    let ids: Vec<String> = first
        .snapshots
        .iter()
        .map(|one| one.snapshot_id.clone())
        .collect();
    let get = async |id: &str, ids: &[String]| {
        let request = csi::GetVolumeGroupSnapshotRequest {
            group_snapshot_id: id.into(),
            snapshot_ids: ids.to_vec(),
            ..Default::default()
        };
        code(group.get_volume_group_snapshot(Request::new(request)).await)
    };
    let delete = async |id: &str, ids: &[String]| {
        let request = csi::DeleteVolumeGroupSnapshotRequest {
            group_snapshot_id: id.into(),
            snapshot_ids: ids.to_vec(),
            ..Default::default()
        };
        code(
            group
                .delete_volume_group_snapshot(Request::new(request))
                .await,
        )
    };
    assert_eq!(get(&id, &[]).await, Code::Ok);
    assert_eq!(get(&id, &ids).await, Code::Ok);
    assert_eq!(get(&id, &ids[..1]).await, Code::InvalidArgument);
    assert_eq!(get("", &ids).await, Code::InvalidArgument);
    assert_eq!(get("group-none", &ids).await, Code::NotFound);
    assert_eq!(delete(&id, &sources).await, Code::InvalidArgument);
    assert_eq!(delete(&id, &ids).await, Code::Ok);
    assert_eq!(delete(&id, &ids).await, Code::Ok);
    assert_eq!(delete("", &[]).await, Code::InvalidArgument);
    assert_eq!(get(&id, &[]).await, Code::NotFound);
}
