//! The cache policies on their way to the nodes: all of them when a stream begins, then those of
//! each namespace that changes. All streams share the messages until these are sent. `k8s` reads
//! and compiles the policies; `model::Policies` decides.

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::sync::Arc;

use prost::Message as _;

use super::handle::Handle;
use super::messages::{tenant, to_node};
use super::serve::{State, WAITING};
use crate::catalog::SessionId;
use crate::model::{NamespacePolicy, Rule, Tenant};
use crate::proto::hub::v1 as wire;
use wire::to_node::Kind as To;

/// A part of all policies is sent as soon as it is so large. A namespace adds at most as much
/// (`NamespacePolicy::MOST_BYTES`), so a part is smaller than a message may be.
const PART: usize = 256 << 10;
/// With more changed namespaces than this, all policies are sent: a part has many of them, and a
/// stream takes [`WAITING`] messages only.
const MOST_CHANGES: usize = WAITING / 8;

/// The highest format of a namespace's policies that this version knows, and the one that it sends.
/// One that needs a new field has a higher one: without that field it might allow too much.
const FORMAT: u32 = 0;

/// The policies that the nodes should have.
#[derive(Debug)]
pub(super) struct PolicySet {
    policies: BTreeMap<Tenant, NamespacePolicy>,
    /// All of them as messages, once a stream needed that.
    parts: OnceCell<Vec<Arc<wire::ToNode>>>,
}

impl PolicySet {
    fn new(policies: BTreeMap<Tenant, NamespacePolicy>) -> Self {
        Self {
            policies,
            parts: OnceCell::new(),
        }
    }

    /// All of them, as messages that streams share.
    fn parts(&self) -> Vec<Arc<wire::ToNode>> {
        let parts = || parts(&self.policies).into_iter().map(Arc::new).collect();
        self.parts.get_or_init(parts).clone()
    }
}

impl Handle {
    /// The policies of all namespaces that have some, each within
    /// [`NamespacePolicy::MOST_BYTES`]. The nodes keep the ones that they have until the first
    /// call. After that they get what changed.
    pub fn set_policies(&self, policies: BTreeMap<Tenant, NamespacePolicy>) {
        let mut state = self.0.state.lock();
        let now = PolicySet::new(policies);
        let before = state.policies.take();
        let changed = before.map(|it| changes(&it.policies, &now.policies));
        let messages = match changed {
            Some(changed) if changed.len() <= MOST_CHANGES => {
                changed.into_iter().map(Arc::new).collect()
            }
            _ => now.parts(),
        };
        state.policies = Some(now);
        // The others get them with their Welcome.
        for message in messages {
            state.send_all(message);
        }
    }
}

impl State {
    /// Sends all policies to a stream that begins, if they are known. Else it gets them later.
    pub(super) fn send_policies(&mut self, session: SessionId) {
        let parts = self.policies.as_ref().map(PolicySet::parts);
        for part in parts.unwrap_or_default() {
            self.send(session, part);
        }
    }
}

/// All policies, in messages of a bounded size.
fn parts(policies: &BTreeMap<Tenant, NamespacePolicy>) -> Vec<wire::ToNode> {
    let (mut parts, mut part, mut size) = (Vec::new(), Vec::new(), 0);
    for (tenant, policy) in policies {
        let policy = sent(tenant, policy);
        size += policy.encoded_len();
        part.push(policy);
        if size >= PART {
            parts.push((std::mem::take(&mut part), false));
            size = 0;
        }
    }
    parts.push((part, true));
    let parts = parts.into_iter();
    let parts = parts.map(|(policies, complete)| wire::Policies { policies, complete });
    parts.map(|part| to_node(To::Policies(part))).collect()
}

/// The policies of the namespaces for which they changed.
fn changes(
    before: &BTreeMap<Tenant, NamespacePolicy>,
    now: &BTreeMap<Tenant, NamespacePolicy>,
) -> Vec<wire::ToNode> {
    let gone = before.keys().filter(|tenant| !now.contains_key(*tenant));
    let gone = gone.map(|tenant| sent(tenant, &NamespacePolicy::default()));
    let changed = now.iter();
    let changed = changed.filter(|(tenant, policy)| before.get(*tenant) != Some(*policy));
    let changed = changed.map(|(tenant, policy)| sent(tenant, policy));
    let all = gone.chain(changed);
    all.map(|policy| to_node(To::Policy(policy))).collect()
}

fn sent(tenant: &Tenant, policy: &NamespacePolicy) -> wire::NamespacePolicy {
    let rule = |rule: &Rule| wire::Rule {
        names: rule.names.iter().map(ToString::to_string).collect(),
        commit: rule.commit.as_ref().map(|accounts| wire::Accounts {
            names: accounts.iter().cloned().collect(),
        }),
        read: rule.read.iter().map(ToString::to_string).collect(),
    };
    wire::NamespacePolicy {
        tenant: tenant.to_string(),
        rules: policy.rules.iter().map(rule).collect(),
        cache_limit: policy.cache_limit,
        output_limit: policy.output_limit,
        format: FORMAT,
    }
}

/// The policy of a namespace that was received. One that this version does not understand lets no
/// pod commit: its rules must not be dropped.
pub(super) fn received(policy: wire::NamespacePolicy) -> Result<(Tenant, NamespacePolicy), String> {
    let tenant = tenant(&policy.tenant)?;
    let limits = (policy.cache_limit, policy.output_limit);
    let rules = match policy.format {
        0..=FORMAT => policy.rules.into_iter().map(rule).collect(),
        format => Err(format!("format {format}")),
    };
    let policy = match rules {
        Ok(rules) => NamespacePolicy {
            rules,
            cache_limit: limits.0,
            output_limit: limits.1,
        },
        Err(why) => {
            tracing::error!(%tenant, why,
                "the controller sent a cache policy that this version does not understand: no pod \
                 of the namespace may commit on this node");
            NamespacePolicy::closed()
        }
    };
    Ok((tenant, policy))
}

fn rule(rule: wire::Rule) -> Result<Rule, String> {
    let names = rule.names.into_iter().map(|name| {
        let pattern = name.parse();
        pattern.map_err(|error| format!("names: {error}"))
    });
    let read = rule.read.into_iter().map(|tenant| {
        let tenant = tenant.parse();
        tenant.map_err(|error| format!("read: {error}"))
    });
    Ok(Rule {
        names: names.collect::<Result<_, _>>()?,
        commit: rule
            .commit
            .map(|accounts| accounts.names.into_iter().collect()),
        read: read.collect::<Result<_, _>>()?,
    })
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc;
    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::catalog::Hello;
    use crate::distribution::roster::NoNode;
    use crate::hub::limits::{MOST_MESSAGE, USAGE};
    use crate::hub::serve::{Inner, Order, Way};
    use crate::model::{Fences, NodeId, Sha256};

    fn tenant(name: &str) -> Tenant {
        name.parse().expect("a label")
    }

    fn policy(accounts: Option<&[&str]>) -> NamespacePolicy {
        NamespacePolicy {
            rules: vec![Rule {
                names: vec!["task-cache/main*".parse().expect("a pattern")],
                commit: accounts.map(|names| names.iter().map(ToString::to_string).collect()),
                read: [tenant("pr")].into(),
            }],
            cache_limit: Some(5),
            output_limit: None,
        }
    }

    #[test]
    fn a_policy_arrives_as_it_was_sent_and_one_of_a_later_version_closes_the_namespace() {
        for accounts in [None, Some(&[][..]), Some(&["release", "nightly"][..])] {
            let policy = policy(accounts);
            let got = received(sent(&tenant("ci"), &policy)).expect("it is valid");
            assert_eq!(got, (tenant("ci"), policy));
        }
        let mut later = sent(&tenant("ci"), &policy(None));
        later.rules[0].names.push("job-cache/x".to_owned());
        let mut format = sent(&tenant("ci"), &policy(None));
        format.format += 1;
        // A rule of such a version may consist of fields that this one does not know.
        let mut without = sent(&tenant("ci"), &NamespacePolicy::default());
        without.format = u32::MAX;
        for later in [later, format, without] {
            // As it travels: an unknown field is dropped on the way.
            let later = wire::NamespacePolicy::decode(&*later.encode_to_vec()).expect("it is read");
            let got = received(later).expect("it has a namespace");
            assert_eq!(got, (tenant("ci"), NamespacePolicy::closed()));
        }
        let mut wrong = sent(&tenant("ci"), &policy(None));
        wrong.tenant = "A/B".to_owned();
        received(wrong).expect_err("no namespace");
    }

    #[test]
    fn all_policies_travel_in_parts_and_later_only_what_changed() {
        let mut all: BTreeMap<Tenant, NamespacePolicy> = BTreeMap::new();
        for number in 0..40 {
            let accounts: Vec<String> = (0..2_000).map(|it| format!("account-{it}")).collect();
            let accounts: Vec<&str> = accounts.iter().map(String::as_str).collect();
            all.insert(tenant(&format!("ci-{number}")), policy(Some(&accounts)));
        }
        let parts = parts(&all);
        assert!(parts.len() > 1);
        let (mut found, mut last) = (BTreeMap::new(), false);
        for part in parts {
            assert!(part.encoded_len() < MOST_MESSAGE && !last);
            let Some(To::Policies(part)) = part.kind else {
                panic!("policies");
            };
            last = part.complete;
            found.extend(
                part.policies
                    .into_iter()
                    .map(|it| received(it).expect("valid")),
            );
        }
        assert!(last);
        assert_eq!(found, all);

        let mut now = all.clone();
        now.remove(&tenant("ci-3"));
        now.insert(tenant("ci-5"), policy(None));
        now.insert(tenant("new"), policy(None));
        let changed: Vec<(Tenant, NamespacePolicy)> = changes(&all, &now)
            .into_iter()
            .map(|message| match message.kind {
                Some(To::Policy(policy)) => received(policy).expect("valid"),
                other => panic!("{other:?}"),
            })
            .collect();
        let expected = [
            (tenant("ci-3"), NamespacePolicy::default()),
            (tenant("ci-5"), policy(None)),
            (tenant("new"), policy(None)),
        ];
        assert_eq!(changed, expected);
        assert_eq!(changes(&now, &now), []);
    }

    /// A stream that reads nothing of what it is sent.
    fn begin(inner: &Inner, node: &str) -> (SessionId, mpsc::Receiver<Order>) {
        let (orders, sent) = mpsc::channel(WAITING);
        let hello = Hello {
            node,
            zone: "",
            attempt: 1,
            fences: &Fences::default(),
        };
        let mut state = inner.state.lock();
        let session = state.catalog.hello(&hello, inner.now()).expect("it is new");
        let way = Way {
            node: NodeId::new(node).expect("a name"),
            key: Sha256([0; 32]),
            orders,
            ends: CancellationToken::new(),
            is_welcome: true,
            applied: 0,
        };
        state.streams.insert(session, way);
        (session, sent)
    }

    #[test]
    fn all_streams_share_one_copy_of_what_waits_for_them() {
        let inner = Arc::new(Inner::new(Arc::new(NoNode), USAGE));
        let handle = Handle(Arc::clone(&inner));
        let (one, mut to_one) = begin(&inner, "node-1");
        let (two, mut to_two) = begin(&inner, "node-2");
        let mut both = |what: &str| {
            let mut next = || [&mut to_one, &mut to_two].map(mpsc::Receiver::try_recv);
            let [one, two] = next().map(|order| order.expect(what).expect("no error"));
            assert!(Arc::ptr_eq(&one, &two), "{what}");
            assert!(next().iter().all(Result::is_err), "one message");
        };
        let mut all = BTreeMap::from([(tenant("ci"), policy(None))]);
        handle.set_policies(all.clone());
        both("all policies");
        all.insert(tenant("other"), policy(None));
        handle.set_policies(all);
        both("a change");
        let mut state = inner.state.lock();
        state.send_policies(one);
        state.send_policies(two);
        drop(state);
        both("all policies, when a stream begins");
    }
}
