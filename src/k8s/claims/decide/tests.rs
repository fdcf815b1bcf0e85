//! Tables of the controller's decisions: objects in, step out.
//! No I/O, and no API server.

use kube::ResourceExt as _;

use super::*;
use crate::api::{BOUND, Fetch};
use crate::model::{
    ClaimParameters, ClaimSource, MutableParameters, NODE_LABEL, NodeId, Topology, Ttl,
};
use crate::server::code_of;

fn node(name: &str) -> Arc<Node> {
    Arc::new(Node {
        id: NodeId::new(name).expect("an id"),
        topology: topology(name),
    })
}

fn topology(node: &str) -> Topology {
    Topology([(NODE_LABEL.to_owned(), node.to_owned())].into())
}

fn candidates() -> Vec<Candidate> {
    let candidate = |(name, bytes, available)| Candidate {
        node: node(name),
        bytes,
        available,
        peer: name != "c",
        takes_pods: true,
    };
    [("a", 100, 10), ("b", 100, 90), ("c", 10, 95)]
        .map(candidate)
        .into()
}

fn request() -> CreateClaim {
    CreateClaim {
        name: "pvc".to_owned(),
        required_bytes: 50,
        limit_bytes: None,
        parameters: ClaimParameters::default(),
        mutable: MutableParameters::default(),
        source: None,
    }
}

/// What the scheduler selected, among these nodes.
fn selected(nodes: &[&str]) -> Requirement {
    let all: Vec<Topology> = nodes.iter().map(|name| topology(name)).collect();
    Requirement {
        requisite: all.clone(),
        preferred: all,
    }
}

/// A volume on a node: wanted, and what the node says of which generation (1 is the present one).
fn volume(at: &str, wanted: Wanted, status: Option<(Phase, i64)>) -> Volume {
    let mut volume = Volume::new(
        &format!("vol-{at}"),
        VolumeSpec {
            capacity: 50,
            ..VolumeSpec::empty("pvc", at, wanted)
        },
    );
    volume.metadata.generation = Some(1);
    volume.status = status.map(|(phase, observed_generation)| VolumeStatus {
        observed_generation,
        phase,
        pool: "pool".to_owned(),
        capacity: 50,
        mutable: Mutable::default(),
        error: (phase == Phase::Failed).then(full),
    });
    volume
}

fn full() -> Refusal {
    Refusal {
        code: "RESOURCE_EXHAUSTED".to_owned(),
        message: "no room".to_owned(),
    }
}

/// The step in one word and a node; a refusal in its code.
fn word(asked: &Asked<'_>, volumes: &[Volume]) -> String {
    match asked.next(volumes) {
        Ok(Creation::Done(volume)) => format!("done {}", volume.spec.node_name),
        Ok(Creation::Make(node)) => format!("make {}", node.id.as_str()),
        Ok(Creation::Wait(volume)) => format!("wait {}", volume.spec.node_name),
        Ok(Creation::Abandon(volume)) => format!("abandon {}", volume.spec.node_name),
        Ok(Creation::Withdraw(volume, error)) => {
            format!("withdraw {}: {:?}", volume.spec.node_name, code_of(&error))
        }
        Err(error) => format!("{:?}", code_of(&error)),
    }
}

#[test]
#[expect(clippy::too_many_lines, reason = "it is a table")]
fn an_empty_volume_goes_to_the_selected_node_and_moves_only_before_it_is_ready() {
    use Phase::{Failed, Gone, Lost, Ready};
    use Wanted::{Absent, Kept, Present};
    let anywhere = Requirement::default();
    let cases = [
        // The selected node, or nowhere; without one, the pool with most room that can hold it.
        (selected(&["a"]), vec![], false, "make a"),
        (selected(&["a", "b"]), vec![], false, "make a"),
        (selected(&["z", "a"]), vec![], false, "ResourceExhausted"),
        (anywhere.clone(), vec![], false, "make b"),
        // An attempt that has begun.
        (
            selected(&["a"]),
            vec![volume("a", Present, None)],
            false,
            "wait a",
        ),
        (
            selected(&["a"]),
            vec![volume("a", Present, None)],
            true,
            "abandon a",
        ),
        (
            selected(&["b"]),
            vec![volume("a", Present, None)],
            false,
            "abandon a",
        ),
        (
            selected(&["a"]),
            vec![volume("a", Present, Some((Failed, 1)))],
            false,
            "withdraw a: ResourceExhausted",
        ),
        // An attempt that was abandoned, or is being deleted there.
        (
            selected(&["a"]),
            vec![volume("a", Absent, None)],
            false,
            "ResourceExhausted",
        ),
        (
            selected(&["a"]),
            vec![volume("a", Absent, Some((Gone, 1)))],
            false,
            "ResourceExhausted",
        ),
        (
            selected(&["b"]),
            vec![volume("a", Absent, None)],
            false,
            "make b",
        ),
        (
            selected(&["b"]),
            vec![volume("a", Absent, None)],
            true,
            "ResourceExhausted",
        ),
        (
            anywhere.clone(),
            vec![volume("b", Absent, None)],
            false,
            "make a",
        ),
        // One that is there.
        (
            selected(&["a"]),
            vec![volume("a", Present, Some((Ready, 1)))],
            false,
            "done a",
        ),
        (
            selected(&["a"]),
            vec![volume("a", Present, Some((Ready, 0)))],
            true,
            "done a",
        ),
        (
            selected(&["b"]),
            vec![volume("a", Present, Some((Ready, 1)))],
            false,
            "AlreadyExists",
        ),
        (
            anywhere,
            vec![
                volume("b", Absent, None),
                volume("a", Present, Some((Ready, 1))),
            ],
            false,
            "done a",
        ),
        // One whose object was lost: a PersistentVolume names it, so it is never given up.
        (
            selected(&["a"]),
            vec![volume("a", Kept, None)],
            false,
            "wait a",
        ),
        (
            selected(&["a"]),
            vec![volume("a", Kept, None)],
            true,
            "Aborted",
        ),
        (
            selected(&["b"]),
            vec![volume("a", Kept, None)],
            true,
            "Aborted",
        ),
        (
            selected(&["a"]),
            vec![volume("a", Kept, Some((Ready, 1)))],
            false,
            "done a",
        ),
        // One that was there is never made again.
        (
            selected(&["a"]),
            vec![volume("a", Present, Some((Lost, 1)))],
            false,
            "FailedPrecondition",
        ),
        (
            selected(&["b"]),
            vec![volume("a", Present, Some((Lost, 1)))],
            true,
            "FailedPrecondition",
        ),
    ];
    let (request, candidates) = (request(), candidates());
    for (at, volumes, overdue, expected) in cases {
        let asked = Asked {
            request: &request,
            at: &at,
            candidates: &candidates,
            source: None,
            overdue,
        };
        assert_eq!(
            word(&asked, &volumes),
            expected,
            "{at:?} {overdue} {volumes:?}"
        );
    }
}

#[test]
fn a_clone_goes_to_its_source_and_never_elsewhere() {
    let source = ClaimSource::Claim("vol-source".parse().expect("an id"));
    let request = CreateClaim {
        source: Some(source.clone()),
        ..request()
    };
    let mut begun = volume("b", Wanted::Present, None);
    begun.spec.source = Some(Source::from(&source));
    let candidates = candidates();
    let cases = [
        (Requirement::default(), vec![], false, "make b"),
        // Without `--strict-topology`: the selected node first, then the others.
        (selected(&["a", "b"]), vec![], false, "make b"),
        (selected(&["a"]), vec![], false, "ResourceExhausted"),
        (selected(&["b"]), vec![begun.clone()], false, "wait b"),
        (selected(&["b"]), vec![begun.clone()], true, "Aborted"),
        (selected(&["a"]), vec![begun], false, "abandon b"),
        (
            selected(&["b"]),
            vec![volume("b", Wanted::Present, None)],
            false,
            "AlreadyExists",
        ),
    ];
    for (at, volumes, overdue, expected) in cases {
        let asked = Asked {
            request: &request,
            at: &at,
            candidates: &candidates,
            source: Some(node("b")),
            overdue,
        };
        assert_eq!(
            word(&asked, &volumes),
            expected,
            "{at:?} {overdue} {volumes:?}"
        );
    }
}

#[test]
fn another_request_of_the_same_name_is_told_what_differs() {
    let (at, candidates) = (Requirement::default(), candidates());
    let ready = [volume("a", Wanted::Present, Some((Phase::Ready, 1)))];
    let mutable = MutableParameters {
        ttl_seconds: Some(1),
        ..MutableParameters::default()
    };
    let source = Some(ClaimSource::Claim("vol-1".parse().expect("an id")));
    let cases = [
        (
            CreateClaim {
                required_bytes: 51,
                ..request()
            },
            "capacity",
        ),
        (
            CreateClaim {
                required_bytes: 1,
                limit_bytes: Some(49),
                ..request()
            },
            "capacity",
        ),
        (
            CreateClaim {
                mutable,
                ..request()
            },
            "mutable_parameters",
        ),
        (
            CreateClaim {
                source,
                ..request()
            },
            "source",
        ),
    ];
    for (request, differs) in cases {
        let asked = Asked {
            request: &request,
            at: &at,
            candidates: &candidates,
            source: None,
            overdue: false,
        };
        match asked.next(&ready) {
            Err(Error::Exists { what, .. }) => assert_eq!(what, differs),
            other => panic!("{differs}: {other:?}"),
        }
    }
}

#[test]
fn a_deletion_is_ordered_once_and_done_when_the_node_says_so() {
    let refused = Some((Phase::Ready, Some(full())));
    let cases = [
        (Wanted::Present, None, Deletion::Order),
        (Wanted::Present, Some((Phase::Ready, None)), Deletion::Order),
        (Wanted::Kept, Some((Phase::Lost, None)), Deletion::Order),
        (Wanted::Absent, None, Deletion::Wait),
        (Wanted::Absent, refused, Deletion::Refused(full())),
        (Wanted::Absent, Some((Phase::Gone, None)), Deletion::Done),
    ];
    for (wanted, answer, expected) in cases {
        let answer = answer
            .as_ref()
            .map(|(phase, error)| (*phase, error.as_ref()));
        assert_eq!(delete(wanted, answer), expected, "{wanted:?} {answer:?}");
    }
}

fn at_least(required: u64, limit: Option<u64>) -> Aim {
    Aim::Capacity { required, limit }
}

#[test]
fn a_refused_size_is_taken_back_before_it_is_answered() {
    let mut volume = volume("a", Wanted::Present, Some((Phase::Ready, 1)));
    let aim = at_least(70, None);
    let step = change(&volume, aim);
    assert!(
        matches!(step, Ok(Change::Write(Field::Capacity(70)))),
        "{step:?}"
    );
    volume.spec.capacity = 70;
    volume.metadata.generation = Some(2);
    assert!(matches!(change(&volume, aim), Ok(Change::Wait)));
    let status = volume.status.as_mut().expect("it has one");
    status.observed_generation = 2;
    status.error = Some(full());
    match change(&volume, aim) {
        Ok(Change::Restore(before, error)) => {
            assert_eq!(before, Field::Capacity(50));
            assert_eq!(code_of(&error), Code::ResourceExhausted);
            assert_eq!(error.to_string(), "node a: no room");
        }
        other => panic!("{other:?}"),
    }
    let status = volume.status.as_mut().expect("it has one");
    (status.error, status.capacity) = (None, 70);
    assert!(matches!(change(&volume, aim), Ok(Change::Done)));
    let smaller = change(&volume, at_least(1, None));
    assert!(matches!(smaller, Ok(Change::Done)), "{smaller:?}");
    let bounded = change(&volume, at_least(80, Some(75))).expect_err("bounded");
    assert_eq!(code_of(&bounded), Code::OutOfRange);
    volume.spec.wanted = Wanted::Absent;
    let gone = change(&volume, at_least(80, None)).expect_err("deleted");
    assert_eq!(code_of(&gone), Code::NotFound);
}

#[test]
fn a_late_call_does_not_undo_one_of_the_other_kind() {
    let [earlier, later] = [60, 3600].map(|ttl| Mutable {
        ttl_seconds: Some(ttl),
        ..Mutable::default()
    });
    let expand = at_least(70, None);
    let modify = Aim::Mutable(MutableChange {
        ttl: Some(Ttl::Seconds(60)),
        ..MutableChange::default()
    });
    // The other call has ordered, and the node has not answered it.
    let mut volume = volume("a", Wanted::Present, Some((Phase::Ready, 1)));
    volume.spec.mutable = later;
    volume.metadata.generation = Some(2);
    let step = change(&volume, expand);
    assert!(
        matches!(step, Ok(Change::Write(Field::Capacity(70)))),
        "{step:?}"
    );
    volume.spec.capacity = 70;
    let step = change(&volume, modify);
    assert!(
        matches!(step, Ok(Change::Write(Field::Mutable(it))) if it == earlier),
        "{step:?}"
    );
    // Another controller has expanded the volume further, and written a smaller size again.
    let status = volume.status.as_mut().expect("it has one");
    status.capacity = 90;
    let step = change(&volume, expand);
    assert!(matches!(step, Ok(Change::Done)), "{step:?}");
    // The node refuses.
    let status = volume.status.as_mut().expect("it has one");
    (status.observed_generation, status.error) = (2, Some(full()));
    volume.spec.mutable = earlier;
    let step = change(&volume, modify);
    let before = Field::Mutable(Mutable::default());
    assert!(
        matches!(step, Ok(Change::Restore(field, _)) if field == before),
        "{step:?}"
    );
}

#[test]
fn a_size_that_was_refused_is_no_error_of_a_ttl() {
    let ttl = |seconds| Mutable {
        ttl_seconds: Some(seconds),
        ..Mutable::default()
    };
    let modify = Aim::Mutable(MutableChange {
        ttl: Some(Ttl::Seconds(3600)),
        ..MutableChange::default()
    });
    // The controller ended before it took the size back. The node has the new `ttl`.
    let mut volume = volume("a", Wanted::Present, Some((Phase::Ready, 2)));
    volume.metadata.generation = Some(2);
    (volume.spec.capacity, volume.spec.mutable) = (70, ttl(3600));
    let status = volume.status.as_mut().expect("it has one");
    (status.mutable, status.error) = (ttl(3600), Some(full()));
    let step = change(&volume, modify);
    assert!(matches!(step, Ok(Change::Done)), "{step:?}");
    // The call for the size still takes that back, and nothing else.
    let step = change(&volume, at_least(70, None));
    assert!(
        matches!(step, Ok(Change::Restore(Field::Capacity(50), _))),
        "{step:?}"
    );
    // The `ttl` was refused, too.
    let status = volume.status.as_mut().expect("it has one");
    status.mutable = ttl(60);
    let step = change(&volume, modify);
    assert!(
        matches!(step, Ok(Change::Restore(Field::Mutable(it), _)) if it == ttl(60)),
        "{step:?}"
    );
    // A size limit was noted and could not be set.
    let status = volume.status.as_mut().expect("it has one");
    status.mutable = ttl(3600);
    volume.spec.capacity = 50;
    let step = change(&volume, modify);
    assert!(matches!(step, Ok(Change::Restore(..))), "{step:?}");
}

#[test]
fn a_volume_that_exists_is_not_answered_as_not_found() {
    let code = |volume: &Volume| code_of(&check_source(volume).expect_err("no answer"));
    let kept = volume("a", Wanted::Kept, None);
    assert_eq!(code(&kept), Code::Aborted);
    let step = change(&kept, at_least(70, None)).expect_err("no answer");
    assert_eq!(code_of(&step), Code::Aborted);
    // From a backup.
    let mut bound = volume("a", Wanted::Present, None);
    assert_eq!(code(&bound), Code::NotFound);
    let mark = (BOUND.to_owned(), "true".to_owned());
    bound.annotations_mut().extend([mark]);
    assert_eq!(code(&bound), Code::Aborted);
    bound.spec.wanted = Wanted::Absent;
    assert_eq!(code(&bound), Code::NotFound);
    // The object is missing.
    assert_eq!(code_of(&no_object("vol-1", None)), Code::NotFound);
    assert_eq!(
        code_of(&no_object("vol-1", Some("pvc-1"))),
        Code::Unavailable
    );
}

#[test]
fn only_a_clone_without_its_content_is_given_up_with_its_source() {
    let clone = |phase: Option<Phase>| {
        let mut volume = volume("b", Wanted::Present, phase.map(|phase| (phase, 1)));
        volume.spec.fetch = Some(Fetch {
            node_name: "a".to_owned(),
            snapshot: "snap-1".to_owned(),
        });
        volume
    };
    for phase in [None, Some(Phase::Fetching), Some(Phase::Failed)] {
        assert!(lacks_content(&clone(phase)), "{phase:?}");
        assert!(!lacks_content(&volume(
            "b",
            Wanted::Present,
            phase.map(|phase| (phase, 1))
        )));
    }
    for phase in [Phase::Ready, Phase::Lost, Phase::Gone] {
        assert!(!lacks_content(&clone(Some(phase))), "{phase:?}");
    }
}
