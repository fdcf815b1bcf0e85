//! Tables of attributes that are valid, refused, and explained.
//! The parser itself is `attributes`.

use super::*;

fn parse(pairs: &[(&str, &str)]) -> Result<VolumeSpec, AttributeError> {
    VolumeSpec::parse(
        &pairs
            .iter()
            .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
            .collect(),
    )
}

fn problem(pairs: &[(&str, &str)]) -> String {
    parse(pairs).expect_err("must be refused").to_string()
}

#[test]
fn nothing_said_is_scratch() {
    assert_eq!(parse(&[]).expect("ok").kind, VolumeKind::Scratch);
}

#[test]
fn every_type_parses_and_survives_its_record() {
    let digest = format!("sha256:{}", "0".repeat(64));
    let specs = [
        parse(&[
            ("type", "scratch"),
            ("sizeLimit", "1Gi"),
            ("mode", "1777"),
            ("uid", "1000"),
            ("gid", "0"),
        ]),
        parse(&[("type", "input"), ("from", "artifact/src")]),
        parse(&[
            ("type", "input"),
            ("from", "artifact/src"),
            ("fromNamespace", "ci"),
        ]),
        parse(&[
            ("type", "output"),
            ("name", "bin"),
            ("commit", "always"),
            ("ttl", "7d"),
        ]),
        parse(&[
            ("type", "resource-cache"),
            ("key", "../git\u{1f511}"),
            ("commit", "on-marker"),
        ]),
        parse(&[
            ("type", "task-cache"),
            ("key", "k"),
            ("restoreKeys", "a, b/c,ü, main-*"),
            ("share", "never"),
            ("freshness", "local"),
        ]),
        parse(&[
            ("type", "import"),
            ("source", "oci://r/x@y"),
            ("digest", &digest),
        ]),
    ];
    for spec in specs {
        let spec = spec.expect("it parses");
        let json = serde_json::to_string(&spec).expect("json");
        assert_eq!(
            serde_json::from_str::<VolumeSpec>(&json).expect(&json),
            spec
        );
    }
}

#[test]
fn outputs_live_twelve_hours_unless_they_say_otherwise() {
    let spec = parse(&[("type", "output"), ("name", "a")]).expect("ok");
    let (reference, keep) = spec.kind.committed_as().expect("sealed");
    assert_eq!(
        (reference.to_string().as_str(), keep.ttl),
        ("artifact/a", Some(DEFAULT_OUTPUT_TTL))
    );
    assert_eq!(keep.commit, Commit::OnSuccess);
}

#[test]
fn sharing_is_the_nodes_choice_unless_the_pod_says() {
    let asked = |pairs: &[(&str, &str)]| {
        let output = [("type", "task-cache"), ("key", "k")];
        let spec = parse(&[&output, pairs].concat()).expect("ok");
        (spec.share, spec.freshness)
    };
    assert_eq!(asked(&[]), (None, None));
    let (share, freshness) = (("share", "auto"), ("freshness", "tier"));
    assert_eq!(asked(&[share]), (Some(Share::Auto), None));
    assert_eq!(asked(&[freshness]), (None, Some(Freshness::Tier)));
}

#[test]
fn a_task_cache_starts_from_its_key_then_from_its_restore_keys() {
    let spec = parse(&[("type", "task-cache"), ("key", "k"), ("restoreKeys", "a,b")]).expect("ok");
    let from: Vec<String> = spec
        .kind
        .starts_from()
        .iter()
        .map(ToString::to_string)
        .collect();
    assert_eq!(from, ["task-cache/k", "task-cache/a", "task-cache/b"]);
}

#[test]
#[expect(clippy::too_many_lines, reason = "one scenario, told in order")]
fn each_mistake_has_its_own_message() {
    let cases: &[(&[(&str, &str)], &str)] = &[
        (
            &[("tpye", "input")],
            r#"volume attribute "tpye" is unknown; known are type, from"#,
        ),
        (
            &[("Key", "x")],
            r#"volume attribute "Key" is unknown; did you mean "key"?"#,
        ),
        (
            &[("type", "cache")],
            r#"volume attribute "type" is "cache"; allowed are scratch, input"#,
        ),
        (
            &[("key", "x")],
            r#""key" is not valid for type "scratch", which is the default"#,
        ),
        (
            &[("type", "input"), ("name", "x")],
            r#""name" is not valid for type "input"; it is valid for output"#,
        ),
        (
            &[("type", "input")],
            r#""from" is missing; type "input" needs it"#,
        ),
        (
            &[("type", "input"), ("from", "x")],
            r#""from" must be artifact/NAME"#,
        ),
        (
            &[("type", "output"), ("name", "A")],
            r#""name" must be a DNS label"#,
        ),
        (
            &[("type", "task-cache"), ("key", "a\nb")],
            r#""key" holds the control character '\n' at byte 1"#,
        ),
        (
            &[
                ("type", "task-cache"),
                ("key", "k"),
                ("restoreKeys", "a,,b"),
            ],
            r#""restoreKeys" must not be empty"#,
        ),
        (
            &[
                ("type", "resource-cache"),
                ("key", "k"),
                ("commit", "always"),
            ],
            "allowed here are on-success, never",
        ),
        (
            &[("type", "output"), ("name", "a"), ("ttl", "0s")],
            r#""ttl" is "0s"; expected a duration"#,
        ),
        (
            &[("type", "output"), ("name", "a"), ("ttl", "-1h")],
            r#""ttl" is "-1h""#,
        ),
        (
            &[("type", "output"), ("name", "a"), ("share", "yes")],
            r#""share" is "yes"; allowed here are auto, never"#,
        ),
        (
            &[("type", "input"), ("from", "artifact/a"), ("share", "auto")],
            r#""share" is not valid for type "input"; it is valid for output, resource-cache"#,
        ),
        (
            &[("type", "task-cache"), ("key", "k"), ("freshness", "Tier")],
            r#""freshness" is "Tier"; allowed here are tier, local"#,
        ),
        (
            &[("mode", "0o777")],
            r#""mode" is "0o777"; expected an octal number"#,
        ),
        (&[("mode", "10000")], r#""mode""#),
        (
            &[("uid", "-1")],
            r#""uid" is "-1"; expected a number from 0"#,
        ),
        (&[("gid", "2147483648")], r#""gid""#),
        (&[("sizeLimit", "0")], r#""sizeLimit" is "0"; expected a"#),
        (&[("sizeLimit", "1GiB")], r#""sizeLimit""#),
        (
            &[("type", "import"), ("source", "http://x")],
            r#""source" is "http://x"; allowed are oci://"#,
        ),
        (
            &[
                ("type", "import"),
                ("source", "oci://x"),
                ("digest", "md5:1"),
            ],
            r#""digest""#,
        ),
    ];
    for (attributes, expected) in cases {
        let message = problem(attributes);
        assert!(message.contains(expected), "{attributes:?}: {message}");
    }
}

#[test]
fn what_a_hostile_value_puts_into_a_message_is_short_and_escaped() {
    let message = problem(&[("type", &"\u{1b}[2J".repeat(3000))]);
    assert!(
        message.len() < 1000 && !message.contains('\u{1b}'),
        "{message}"
    );
    let message = problem(&[(&"x".repeat(10_000), "1")]);
    assert!(message.len() < 1000, "{message}");
}

#[test]
fn only_what_starts_from_content_reads_in_another_namespace() {
    for reader in [
        &[("type", "input"), ("from", "artifact/a")][..],
        &[("type", "resource-cache"), ("key", "a")],
        &[("type", "task-cache"), ("key", "a")],
    ] {
        let spec = parse(&[reader, &[("fromNamespace", "ci")]].concat()).expect("valid");
        let namespace = spec.from_namespace.expect("it is read");
        assert_eq!(namespace.as_str(), "ci");
        let problem = problem(&[reader, &[("fromNamespace", "C/i")]].concat());
        assert!(problem.contains("\"fromNamespace\""), "{problem}");
    }
    let output = [("type", "output"), ("name", "a"), ("fromNamespace", "ci")];
    assert!(problem(&output).contains("is not valid for type \"output\""));
}
