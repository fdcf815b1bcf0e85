//! The calls of `Find` (`proto/hub.proto`): a node's questions where content is, and the answers,
//! as the types of `catalog` and `distribution`, and back. What the other side sent is checked
//! here.

use super::messages::{kind, reference, tenant};
use crate::catalog::{Answer, Found};
use crate::distribution::roster::Located;
use crate::model::{CacheKey, Name, NodeId, Reference, Tenant};
use crate::proto::hub::v1 as wire;

/// A question about one name.
pub(super) fn question(name: &Name, wait_ms: u32) -> wire::FindRequest {
    wire::FindRequest {
        tenant: name.tenant.to_string(),
        kind: kind(name.reference.kind()).into(),
        keys: vec![name.reference.key().to_owned()],
        wait_ms,
        prefix: false,
    }
}

/// A question about the task caches whose key begins so.
pub(super) fn question_of_prefix(tenant: &Tenant, prefix: &CacheKey) -> wire::FindRequest {
    wire::FindRequest {
        tenant: tenant.to_string(),
        kind: wire::Kind::TaskCache.into(),
        keys: vec![prefix.to_string()],
        wait_ms: 0,
        prefix: true,
    }
}

/// What a question with a prefix is about. The error names the field.
pub(super) fn prefix(request: &wire::FindRequest) -> Result<(Tenant, CacheKey), String> {
    let Name { tenant, reference } = name(request)?;
    match reference {
        Reference::TaskCache(key) => Ok((tenant, key)),
        _ => Err("prefix: only of task caches".to_owned()),
    }
}

/// The key that an answer to such a question names. An older controller, which knows no prefixes,
/// names the prefix itself.
pub(super) fn newest(response: &wire::FindResponse, prefix: &CacheKey) -> Option<CacheKey> {
    let is_found = response.answer() == wire::Answer::Found;
    let key = is_found.then(|| response.key.parse().ok()).flatten();
    key.filter(|key: &CacheKey| key.as_str().starts_with(prefix.as_str()))
}

/// The name that a question is about. The error names the field.
pub(super) fn name(request: &wire::FindRequest) -> Result<Name, String> {
    let [key] = &request.keys[..] else {
        return Err("keys: expected one".to_owned());
    };
    let reference = reference(request.kind(), key);
    Ok(Name {
        tenant: tenant(&request.tenant)?,
        reference: reference.map_err(|error| format!("keys: {error}"))?,
    })
}

/// An answer without content.
pub(super) fn nothing(answer: wire::Answer) -> wire::FindResponse {
    wire::FindResponse {
        answer: answer.into(),
        ..wire::FindResponse::default()
    }
}

/// The answer to a question about this name.
pub(super) fn response(name: &Name, answer: &Answer) -> wire::FindResponse {
    match answer {
        Answer::Nothing => nothing(wire::Answer::Nothing),
        Answer::Coming(makers) => wire::FindResponse {
            holders: makers.iter().map(ToString::to_string).collect(),
            ..nothing(wire::Answer::Coming)
        },
        Answer::Incomplete => nothing(wire::Answer::Incomplete),
        Answer::Found(found) => self::found(name, found),
    }
}

fn found(name: &Name, found: &Found) -> wire::FindResponse {
    wire::FindResponse {
        answer: wire::Answer::Found.into(),
        key: name.reference.key().to_owned(),
        stamp: found.version.stamp.0,
        tie: found.version.tie,
        bytes: found.bytes,
        layers: found.layers.into(),
        fence: found.fence,
        holders: found.holders.iter().map(ToString::to_string).collect(),
    }
}

/// What an answer says to the asking node.
pub(super) fn located(response: &wire::FindResponse) -> Located {
    let nodes = response.holders.iter();
    let nodes = nodes.filter_map(|node| NodeId::new(node).ok());
    match response.answer() {
        wire::Answer::Found => Located::At(nodes.collect()),
        wire::Answer::Coming => Located::Coming(nodes.collect()),
        wire::Answer::Nothing => Located::Nothing,
        wire::Answer::Incomplete | wire::Answer::Unspecified => Located::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_question_about_a_beginning_of_keys_is_about_one_and_its_answer_begins_so() {
        let tenant: Tenant = "ci".parse().expect("a label");
        let main: CacheKey = "main-".parse().expect("a key");
        let question = question_of_prefix(&tenant, &main);
        assert_eq!(prefix(&question), Ok((tenant, main.clone())));
        let wrong = |change: fn(&mut wire::FindRequest)| {
            let mut question = question.clone();
            change(&mut question);
            prefix(&question).expect_err("it is refused")
        };
        wrong(|it| it.keys.clear());
        wrong(|it| it.keys.push("other".to_owned()));
        wrong(|it| it.keys[0].clear());
        wrong(|it| it.keys[0] = "x".repeat(257));
        wrong(|it| it.kind = wire::Kind::ResourceCache.into());
        wrong(|it| it.kind = 99);
        wrong(|it| it.tenant = "A".to_owned());
        let answer = |answer: wire::Answer, key: &str| wire::FindResponse {
            answer: answer.into(),
            key: key.to_owned(),
            ..wire::FindResponse::default()
        };
        let found = |key: &str| newest(&answer(wire::Answer::Found, key), &main);
        assert_eq!(found("main-7"), "main-7".parse().ok());
        // An older controller has looked for this very name.
        assert_eq!(found("main-"), Some(main.clone()));
        for key in ["", "other", "main", "a\nb"] {
            assert_eq!(found(key), None);
        }
        let none = answer(wire::Answer::Nothing, "main-7");
        assert_eq!(newest(&none, &main), None);
    }

    #[test]
    fn a_question_arrives_as_it_was_sent_and_others_are_refused() {
        let go = Name {
            tenant: "ci".parse().expect("a label"),
            reference: "task-cache/b".parse().expect("a reference"),
        };
        let asked = question(&go, 5);
        assert_eq!(name(&asked), Ok(go));
        let wrong = |change: fn(&mut wire::FindRequest)| {
            let mut asked = asked.clone();
            change(&mut asked);
            name(&asked).expect_err("it is refused")
        };
        wrong(|asked| asked.kind = 0);
        wrong(|asked| asked.keys.clear());
        wrong(|asked| asked.keys.push("other".to_owned()));
        wrong(|asked| asked.keys = vec!["../x\n".to_owned()]);
        wrong(|asked| asked.tenant = "A/B".to_owned());
    }
}
