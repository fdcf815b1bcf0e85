//! The calls of `Find` (`proto/hub.proto`): a node's questions where content is, and the answers,
//! as the types of `catalog` and `distribution`, and back. What the other side sent is checked
//! here.

use super::messages::{key, kind, reference};
use crate::catalog::{Answer, Found};
use crate::distribution::roster::Located;
use crate::model::{CacheKey, Name, NodeId, Reference, Tenant};
use crate::proto::hub::v1 as wire;

/// The most names in a question.
const MOST_KEYS: usize = 64;

/// A question about one name.
pub(super) fn question(name: &Name, wait_ms: u32) -> wire::FindRequest {
    wire::FindRequest {
        tenant: name.tenant.to_string(),
        kind: kind(&name.reference).into(),
        keys: vec![key(&name.reference)],
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
    let mut names = names(request)?.into_iter();
    match (names.next(), names.next()) {
        (Some(Name { tenant, reference }), None) => match reference {
            Reference::TaskCache(key) => Ok((tenant, key)),
            _ => Err("prefix: only of task caches".to_owned()),
        },
        _ => Err("keys: expected one with prefix".to_owned()),
    }
}

/// The key that an answer to such a question names. An older controller, which knows no prefixes,
/// names the prefix itself.
pub(super) fn newest(response: &wire::FindResponse, prefix: &CacheKey) -> Option<CacheKey> {
    let is_found = response.answer() == wire::Answer::Found;
    let key = is_found.then(|| response.key.parse().ok()).flatten();
    key.filter(|key: &CacheKey| key.as_str().starts_with(prefix.as_str()))
}

/// The names that a question is about. The error names the field.
pub(super) fn names(request: &wire::FindRequest) -> Result<Vec<Name>, String> {
    if request.keys.is_empty() || request.keys.len() > MOST_KEYS {
        return Err(format!("keys: expected 1 to {MOST_KEYS}"));
    }
    let tenant = request.tenant.parse();
    let tenant: Tenant = tenant.map_err(|error| format!("tenant: {error}"))?;
    let name = |key: &String| {
        let reference = reference(request.kind(), key);
        Ok(Name {
            tenant: tenant.clone(),
            reference: reference.map_err(|error| format!("keys: {error}"))?,
        })
    };
    request.keys.iter().map(name).collect()
}

/// The answer to a question about these names.
pub(super) fn response(names: &[Name], answer: &Answer) -> wire::FindResponse {
    let nothing = |answer: wire::Answer| wire::FindResponse {
        answer: answer.into(),
        ..wire::FindResponse::default()
    };
    match answer {
        Answer::Nothing => nothing(wire::Answer::Nothing),
        Answer::Coming(makers) => wire::FindResponse {
            holders: makers.iter().map(ToString::to_string).collect(),
            ..nothing(wire::Answer::Coming)
        },
        Answer::Incomplete => nothing(wire::Answer::Incomplete),
        Answer::Found(found) => self::found(names, found),
    }
}

fn found(names: &[Name], found: &Found) -> wire::FindResponse {
    let name = names.get(found.which);
    wire::FindResponse {
        answer: wire::Answer::Found.into(),
        key: name.map(|name| key(&name.reference)).unwrap_or_default(),
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
        let name = Name {
            tenant: "ci".parse().expect("a label"),
            reference: "task-cache/b".parse().expect("a reference"),
        };
        let asked = question(&name, 5);
        assert_eq!(names(&asked).expect("it is valid"), [name]);
        let wrong = |change: fn(&mut wire::FindRequest)| {
            let mut asked = asked.clone();
            change(&mut asked);
            names(&asked).expect_err("it is refused")
        };
        wrong(|asked| asked.kind = 0);
        wrong(|asked| asked.keys.clear());
        wrong(|asked| asked.keys = vec!["k".to_owned(); MOST_KEYS + 1]);
        wrong(|asked| asked.keys = vec!["../x\n".to_owned()]);
        wrong(|asked| asked.tenant = "A/B".to_owned());
    }
}
