//! Questions about names: the record that the tier has under a name at this moment. Equal questions
//! at the same time are one. `decide` says what an answer means.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::context::Context;
use super::decide::There;
use super::flight::Flights;
use super::health::Access;
use super::offered::Offered;
use super::work::Workers;
use crate::model::{ArtifactId, Name};
use crate::shared::{
    Bucket, Error, Found, NameRecord, NameState, ObjectId, Resolved, Result, Source as _, fresh_id,
    look, now, report_lost_manifest,
};

/// How many questions are asked at once. With a tier that hangs, the others wait for their turn,
/// and most of their callers give up before it comes.
const AT_ONCE: usize = 16;
/// How many refused publications are remembered.
const REMEMBERED: usize = 4096;

/// The answer to a question.
#[derive(Debug, Clone)]
pub(super) enum Answer {
    /// An error, in words.
    Failed(Arc<str>),
    /// No content.
    Nothing {
        number: u64,
        cleared: u64,
        evicted: bool,
    },
    /// Content. `found`: if it was asked for, is not what this node has, and was not refused.
    Content {
        number: u64,
        cleared: u64,
        artifact: ArtifactId,
        found: Option<Arc<Offered>>,
    },
}

impl Answer {
    /// What a record says.
    fn of(record: &NameRecord) -> Self {
        match record.content() {
            None => Self::Nothing {
                number: record.number,
                cleared: record.cleared,
                evicted: record.evicted,
            },
            Some((artifact, ..)) => Self::Content {
                number: record.number,
                cleared: record.cleared,
                artifact,
                found: None,
            },
        }
    }

    pub(super) fn there(&self) -> There {
        match *self {
            Self::Failed(_) => There::Unknown,
            Self::Nothing {
                number,
                cleared,
                evicted,
            } => There::Nothing {
                number,
                cleared,
                evicted,
            },
            Self::Content {
                number,
                cleared,
                artifact,
                ..
            } => There::Content {
                number,
                cleared,
                artifact,
            },
        }
    }
}

/// How much of the answer is needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Detail {
    /// The record of the name: one request.
    Number,
    /// The manifest, too, unless the name shows the artifact that this node has.
    Manifest(Option<ArtifactId>),
}

/// Asks the tier.
#[derive(Debug)]
pub(super) struct Asker {
    context: Arc<Context>,
    workers: Workers,
    flights: Flights<(Name, Detail), Answer>,
    /// Publications that this node refused: damaged, or beyond its limits. It does not fetch them
    /// again.
    refused: Mutex<HashSet<ObjectId>>,
}

/// Whether the time to live of an output is over.
fn expired(found: &Found) -> bool {
    let NameState::Content { ttl_seconds, .. } = found.record.state else {
        return false;
    };
    let ttl = ttl_seconds.map(Duration::from_secs);
    ttl.is_some_and(|ttl| found.manifest.made.after(ttl) <= now())
}

impl Asker {
    pub(super) fn new(context: Arc<Context>) -> Self {
        Self {
            workers: context.workers("shared-ask", AT_ONCE),
            flights: context.flights(),
            refused: Mutex::default(),
            context,
        }
    }

    /// Asks what the tier shows under a name. The caller limits how long it waits.
    pub(super) async fn ask(self: &Arc<Self>, name: &Name, detail: Detail) -> Answer {
        if self.context.store.is_none() {
            return Answer::Failed("this node uses no shared tier".into());
        }
        let answer = self.flights.join((name.clone(), detail), |callers| {
            let (asker, name) = (Arc::clone(self), name.clone());
            async move {
                let this = Arc::clone(&asker);
                let call = move || this.ask_now(&name, detail);
                let answer = asker.workers.run(|| !callers.give_up(), call).await;
                answer.unwrap_or_else(|| Answer::Failed("the look-up was abandoned".into()))
            }
        });
        let answer = answer.answer().await;
        answer.unwrap_or_else(|| Answer::Failed("the look-up ended in a panic".into()))
    }

    /// Asks on this thread.
    pub(super) fn ask_now(&self, name: &Name, detail: Detail) -> Answer {
        let context = &self.context;
        context.counters.lock().questions += 1;
        let result = match detail {
            Detail::Number => self.number(name),
            Detail::Manifest(here) => self.manifest(name, here),
        };
        context.health.note(&name.tenant, Access::Read, &result);
        result.unwrap_or_else(|error| {
            context.counters.lock().questions_failed += 1;
            Answer::Failed(error.to_string().into())
        })
    }

    fn number(&self, name: &Name) -> Result<Answer> {
        self.context.check_format(&name.tenant)?;
        let record = look(self.context.store(), &name.tenant, &name.reference)?;
        let nothing = Answer::Nothing {
            number: 0,
            cleared: 0,
            evicted: false,
        };
        Ok(record.map_or(nothing, |record| Answer::of(&record)))
    }

    fn manifest(&self, name: &Name, here: Option<ArtifactId>) -> Result<Answer> {
        self.context.check_format(&name.tenant)?;
        let bucket = Bucket::new(self.context.store().clone());
        let resolve = || bucket.resolve(&name.tenant, &name.reference, here);
        let resolved = match resolve() {
            Err(Error::Corrupt { .. }) if self.reports_lost_manifest(name) => resolve()?,
            resolved => resolved?,
        };
        Ok(match resolved {
            Resolved::Nothing {
                number,
                cleared,
                evicted,
            } => Answer::Nothing {
                number,
                cleared,
                evicted,
            },
            Resolved::Found(found) => self.found(name, *found),
            Resolved::Same(record) => Answer::of(&record),
        })
    }

    /// Tells the other nodes if the manifest that the name shows is missing or damaged. Whether the
    /// name shows nothing now.
    fn reports_lost_manifest(&self, name: &Name) -> bool {
        let (context, tenant, reference) = (&self.context, &name.tenant, &name.reference);
        let reported = report_lost_manifest(context.store(), tenant, reference, fresh_id(), now());
        context.health.note(tenant, Access::Write, &reported);
        match reported {
            Ok(true) => {
                context.counters.lock().damage_reported += 1;
                tracing::warn!(
                    %tenant, %reference,
                    "the manifest of the name is missing or damaged in the shared tier; \
                     the name shows nothing until a node uploads its content again"
                );
                true
            }
            // The record itself is damaged: the next commit writes over it.
            Ok(false) | Err(Error::Corrupt { .. }) => false,
            Err(error) => {
                tracing::warn!(
                    %tenant, %reference, %error,
                    "damage in the shared tier could not be reported to the other nodes"
                );
                false
            }
        }
    }

    fn found(&self, name: &Name, found: Found) -> Answer {
        let (number, cleared) = (found.record.number, found.record.cleared);
        let artifact = found.manifest.artifact;
        let nothing = Answer::Nothing {
            number,
            cleared,
            evicted: false,
        };
        // Any later commit replaces it.
        if found.manifest.fence < self.context.engine.covering(name) {
            return nothing;
        }
        if self.refused.lock().contains(&found.record.write) {
            return Answer::Content {
                number,
                cleared,
                artifact,
                found: None,
            };
        }
        // It would be collected as soon as it is here.
        if name.reference.cache().is_none() && expired(&found) {
            return nothing;
        }
        let found = Some(Arc::new(Offered::of_tier(found)));
        Answer::Content {
            number,
            cleared,
            artifact,
            found,
        }
    }

    /// This node cannot use a publication, and does not fetch it again.
    pub(super) fn refuse(&self, publication: ObjectId) {
        let mut refused = self.refused.lock();
        if refused.len() >= REMEMBERED {
            refused.clear();
        }
        refused.insert(publication);
    }
}
