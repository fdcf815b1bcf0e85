//! One upload: the layers of an artifact that the tier lacks, its manifest, and its name. Notes the
//! answer in the engine's index. `queue` decides which artifact is next.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::context::{Context, value};
use super::decide::loses_name;
use super::health::{Access, say};
use super::pace::Pace;
use super::types::Moving;
use crate::archive;
use crate::engine::notice::What;
use crate::engine::{self, OpenArtifact, OpenLayer};
use crate::model::{Artifact, LayerId, Sha256, Sharing, Timestamp};
use crate::shared::{
    Commit, Committed, Error, Keys, LayerRef, NameRecord, ObjectId, Publication, Upload, decide,
    fresh_id, look, now, upload,
};

/// How often an upload looks whether its artifact still has its name.
const LOOK: Duration = Duration::from_millis(500);

/// The result of an upload.
#[derive(Debug)]
pub(super) enum Outcome {
    /// The tier has the artifact, or refused it for good.
    Done,
    /// The artifact is gone, or newer content has its name.
    Gone,
    /// A layer has no table of contents yet.
    NotReady,
    /// The tier, or a layer, failed.
    Failed(Error),
    /// The engine failed.
    Engine(engine::Error),
}

impl From<Error> for Outcome {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

impl From<engine::Error> for Outcome {
    fn from(error: engine::Error) -> Self {
        Self::Engine(error)
    }
}

/// Uploads artifacts, one at a time.
#[derive(Debug)]
pub(super) struct Uploader {
    context: Arc<Context>,
    pace: Pace,
    /// For `status`.
    running: Mutex<Option<Arc<Running>>>,
}

#[derive(Debug)]
struct Running {
    artifact: Artifact,
    since: Timestamp,
    of: AtomicU64,
    bytes: AtomicU64,
}

/// Ends the entry for `status`.
struct Ends<'a>(&'a Uploader);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        *self.0.running.lock() = None;
    }
}

/// What the tier shows under the name of an upload.
struct Shown<'a> {
    record: Option<&'a NameRecord>,
    /// When its content was sealed.
    made: Option<Timestamp>,
    /// Its content is from before a fence.
    is_old: bool,
}

/// The tier's answer to a publication.
enum Answer {
    Named(u64),
    KeptFirst,
    /// The name shows a newer commit.
    KeptNewer,
    /// With the number of the clear.
    Cleared(u64),
}

impl Uploader {
    pub(super) fn new(context: Arc<Context>) -> Self {
        Self {
            pace: Pace::new(context.settings.bandwidth),
            running: Mutex::default(),
            context,
        }
    }

    /// The upload that runs.
    pub(super) fn running(&self) -> Option<Moving> {
        let running = self.running.lock().clone()?;
        Some(Moving {
            tenant: running.artifact.tenant.clone(),
            reference: running.artifact.reference.clone(),
            bytes: value(&running.bytes),
            of: value(&running.of),
            from: None,
            since: running.since,
        })
    }

    /// Uploads one artifact. Blocks.
    pub(super) fn upload(&self, artifact: &Artifact) -> Outcome {
        let engine = &self.context.engine;
        let open = match engine.open_layers(artifact.id) {
            Ok(Some(open)) => open,
            Ok(None) if self.has_name(artifact) => return Outcome::NotReady,
            Ok(None) => return Outcome::Gone,
            Err(error) => return Outcome::Engine(error),
        };
        let running = Arc::new(Running {
            artifact: artifact.clone(),
            since: now(),
            of: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
        });
        *self.running.lock() = Some(Arc::clone(&running));
        let _ends = Ends(self);
        let began = Instant::now();
        let answer = match self.publish(artifact, &open, &running) {
            Ok(answer) => Ok(answer),
            Err(Outcome::Failed(error)) => Err(error),
            Err(outcome) => return outcome,
        };
        drop(open);
        let health = &self.context.health;
        // A commit that is refused may have written nothing.
        let access = match &answer {
            Ok(Answer::Named(_)) | Err(_) => Access::Write,
            Ok(_) => Access::Read,
        };
        health.note(&artifact.tenant, access, &answer);
        match answer {
            Ok(answer) => match self.enter(artifact, &answer) {
                Ok(()) => {
                    self.tell(artifact, &answer, value(&running.bytes), began.elapsed());
                    Outcome::Done
                }
                Err(error) => Outcome::Engine(error),
            },
            Err(Error::Stopped) if !self.context.is_stopping() => Outcome::Gone,
            Err(error) => Outcome::Failed(error),
        }
    }

    /// Whether the name's content still has this layer: the artifact has the name, or a newer
    /// commit that stacks the layer. So an upload that is replaced leaves the next one less to do.
    /// Otherwise commits that come faster than they are uploaded would each begin from zero.
    fn is_wanted(&self, artifact: &Artifact, layer: &LayerId) -> bool {
        let engine = &self.context.engine;
        let stacks = || engine.layers_of(&artifact.tenant, &artifact.reference);
        self.has_name(artifact) || stacks().contains(layer)
    }

    /// Whether the artifact's name still points at it. A newer commit is uploaded instead.
    fn has_name(&self, artifact: &Artifact) -> bool {
        let local = self
            .context
            .engine
            .local(&artifact.tenant, &artifact.reference);
        local.is_some_and(|local| local.id == artifact.id)
    }

    fn publish(
        &self,
        artifact: &Artifact,
        open: &OpenArtifact,
        running: &Running,
    ) -> Result<Answer, Outcome> {
        let (store, tenant, id) = (self.context.store(), &artifact.tenant, fresh_id());
        let (publication, record) = self.context.look(tenant, &artifact.reference, id)?;
        let covering = self.context.engine.covering(&artifact.name());
        if artifact.fence < covering {
            return Err(Error::Stopped.into());
        }
        let writer = decide::Writer {
            base: artifact.sharing.base,
            fence: covering,
            attempted: artifact.sharing.attempted,
        };
        let shown = Shown {
            record: record.as_ref(),
            made: publication.made(),
            is_old: publication.is_older(covering),
        };
        if let Some(answer) = known_answer(artifact, &shown, writer) {
            return Ok(answer);
        }
        let looked = Cell::new(Instant::now());
        let is_gone = Cell::new(false);
        let stop = |layer: &LayerId| {
            if looked.get().elapsed() >= LOOK {
                looked.set(Instant::now());
                is_gone.set(!self.is_wanted(artifact, layer));
            }
            is_gone.get() || self.context.is_stopping()
        };
        let layers = self.layers(&publication, id, open, running, &stop)?;
        if !self.has_name(artifact) {
            return Err(Error::Stopped.into());
        }
        // The acknowledgement may be lost, and this process killed. Then the next attempt must not
        // bring the artifact back over a newer one that replaced it.
        if writer.attempted.is_none() {
            let before = record.map_or(0, |record| record.number);
            let note = |sharing: &mut Sharing| sharing.attempted = Some(before);
            self.context.engine.set_sharing(artifact.id, note)?;
        }
        let commit = Commit {
            reference: artifact.reference.clone(),
            artifact: artifact.id,
            layers,
            made: artifact.created,
            made_by: artifact.made_by.as_deref().cloned(),
            writer,
            ttl_seconds: artifact.ttl_seconds,
            fence: artifact.fence,
        };
        Ok(match publication.commit(commit, now())? {
            Committed::Named(number) => Answer::Named(number),
            Committed::KeptFirst => Answer::KeptFirst,
            Committed::KeptNewer => Answer::KeptNewer,
            Committed::Cleared => {
                let record = look(store, tenant, &artifact.reference)?;
                Answer::Cleared(record.map_or(0, |record| record.cleared))
            }
        })
    }

    /// The layers in the tier, newest first. Uploads those that it lacks.
    fn layers(
        &self,
        publication: &Publication<'_>,
        id: ObjectId,
        open: &OpenArtifact,
        running: &Running,
        stop: &dyn Fn(&LayerId) -> bool,
    ) -> Result<Vec<LayerRef>, Error> {
        let mut found = Vec::with_capacity(open.layers.len());
        for layer in &open.layers {
            let digest = Sha256(layer.table.digest().sha256);
            let there = publication.find(&digest, layer.table.bytes())?;
            if there.is_none() {
                let bytes = layer.table.bytes();
                running.of.fetch_add(bytes, Ordering::Relaxed);
            }
            found.push(there);
        }
        let pace = |bytes: usize| {
            self.pace.wait(bytes, &self.context);
            let bytes = bytes as u64;
            running.bytes.fetch_add(bytes, Ordering::Relaxed);
            self.context.counters.lock().uploaded_bytes += bytes;
        };
        let how = Upload {
            parallel: self.context.settings.uploads,
            pace: &pace,
            ..Upload::default()
        };
        let keys = Keys::new(&open.artifact.tenant);
        let mut layers = Vec::with_capacity(found.len());
        let ids = &open.artifact.layers;
        for ((layer, id_here), found) in open.layers.iter().zip(ids).zip(found) {
            let layer = if let Some(found) = found {
                found
            } else {
                let (store, stop) = (self.context.store(), || stop(id_here));
                let uploaded = upload(store, &keys, (&layer.table, &layer.holder), id, how, &stop);
                uploaded.or_else(|error| self.refuse_damage(&open.artifact, layer, error))?
            };
            layers.push(layer);
        }
        Ok(layers)
    }

    /// Marks the artifact, and all others that stack this layer, if the upload found that the layer
    /// is damaged on this node: it would fail each time. Returns why it ends.
    fn refuse_damage<T>(
        &self,
        artifact: &Artifact,
        layer: &OpenLayer,
        error: Error,
    ) -> Result<T, Error> {
        let is_damage = matches!(
            error,
            Error::Layer(archive::Error::Damaged { .. } | archive::Error::Shrunk { .. })
        );
        if !is_damage {
            return Err(error);
        }
        let layer = Sha256(layer.table.digest().sha256);
        tracing::error!(
            tenant = %artifact.tenant, reference = %artifact.reference, artifact = %artifact.id,
            %layer, %error,
            "this artifact is damaged on this node; neither peers nor the shared tier get it any \
             more. Volumes on this node still start from it: if the disk is at fault, delete it \
             with `baggageclaim destroy`"
        );
        let marked = self.context.engine.mark_damaged(artifact.id, layer);
        match self.context.block_on(marked) {
            Ok(marked) => {
                for other in marked.iter().filter(|it| **it != artifact.id) {
                    tracing::error!(artifact = %other, %layer,
                        "this artifact has the damaged layer, too: neither peers nor the shared \
                         tier get it any more");
                }
                Err(Error::Stopped)
            }
            Err(failed) => {
                tracing::warn!(artifact = %artifact.id, error = %failed,
                    "the damage could not be recorded");
                Err(error)
            }
        }
    }

    /// Writes the answer into the index. The name goes first: once the refusal is in the index, the
    /// artifact is not tried again.
    fn enter(&self, artifact: &Artifact, answer: &Answer) -> engine::Result<()> {
        let engine = &self.context.engine;
        if let Answer::Cleared(cleared) = *answer
            && loses_name(&artifact.reference, &artifact.sharing, cleared)
            && self.has_name(artifact)
        {
            let name = artifact.name();
            let discarded = engine.discard_cleared(&name, cleared);
            self.context.block_on(discarded)?;
        }
        let change = |sharing: &mut Sharing| {
            sharing.attempted = None;
            match *answer {
                Answer::Named(number) => sharing.number = Some(number),
                Answer::KeptFirst | Answer::KeptNewer | Answer::Cleared(_) => {
                    sharing.refused = true;
                }
            }
        };
        engine.set_sharing(artifact.id, change)?;
        Ok(())
    }

    fn tell(&self, artifact: &Artifact, answer: &Answer, bytes: u64, took: Duration) {
        let reference = artifact.reference.clone();
        let refused = |why: &str| What::NotShared {
            reference: artifact.reference.clone(),
            why: why.to_owned(),
        };
        let what = match answer {
            Answer::Named(number) => {
                self.context.counters.lock().uploads += 1;
                tracing::info!(
                    tenant = %artifact.tenant, %reference, artifact = %artifact.id, number, bytes,
                    ?took, "uploaded to the shared tier"
                );
                What::Shared { reference }
            }
            Answer::KeptFirst => refused(
                "the name has content of another node in the shared tier already, and a resource \
                 cache keeps its first content",
            ),
            Answer::KeptNewer => refused("the shared tier has a newer commit of this name"),
            Answer::Cleared(_) => refused(
                "the name was cleared in the shared tier after this step began, or the tier did \
                 not answer when it began",
            ),
        };
        if let What::NotShared { reference, why } = &what {
            self.context.counters.lock().uploads_refused += 1;
            tracing::info!(tenant = %artifact.tenant, %reference, why, "not uploaded");
        }
        if let Some(maker) = &artifact.made_by {
            let notices = self.context.settings.notices.as_ref();
            say(notices, &artifact.tenant, &maker.pod, what);
        }
    }
}

/// The answer, if the record of the name tells it already: nothing is uploaded then. An upload
/// whose end this node did not note, because it was killed, finds its own artifact.
fn known_answer(artifact: &Artifact, shown: &Shown<'_>, writer: decide::Writer) -> Option<Answer> {
    let Shown {
        record,
        made,
        is_old,
    } = *shown;
    let record = record?;
    if record.content().is_some_and(|(id, ..)| id == artifact.id) {
        return Some(Answer::Named(record.number));
    }
    // It was sealed while the tier was not known or did not answer. A newer commit stays.
    if writer.base.is_none() && !is_old && made.is_some_and(|made| made > artifact.created) {
        return Some(Answer::KeptNewer);
    }
    match decide::commit(Some(record), &artifact.reference, writer, is_old, 1) {
        decide::Decision::Write { .. } => None,
        decide::Decision::KeepsFirst => Some(Answer::KeptFirst),
        decide::Decision::KeepsNewer => Some(Answer::KeptNewer),
        decide::Decision::Cleared => Some(Answer::Cleared(record.cleared)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{ArtifactId, Digests, LayerId};
    use crate::shared::NameState;

    fn sealed(id: u128, base: Option<u64>) -> Artifact {
        Artifact {
            id: ArtifactId::from_bits(id),
            tenant: "ci".parse().expect("a tenant"),
            reference: "task-cache/key".parse().expect("a reference"),
            layers: vec![LayerId::from_bits(1)],
            created: Timestamp(200),
            ttl_seconds: None,
            last_used: Timestamp(200),
            made_by: None,
            digests: Digests::default(),
            sharing: Sharing {
                base,
                ..Sharing::default()
            },
            fence: 0,
        }
    }

    #[test]
    fn a_commit_that_follows_no_number_yields_to_content_that_was_sealed_later() {
        let mine = sealed(1, None);
        let record = NameRecord {
            format: 1,
            tenant: mine.tenant.clone(),
            reference: mine.reference.clone(),
            number: 4,
            cleared: 0,
            evicted: false,
            deleting: false,
            write: fresh_id(),
            // It was uploaded last. That says nothing of when it was sealed.
            committed: Timestamp(900),
            state: NameState::Content {
                artifact: ArtifactId::from_bits(2),
                publication: fresh_id(),
                manifest: Sha256([0; 32]),
                ttl_seconds: None,
            },
        };
        let shown = |made, is_old| Shown {
            record: Some(&record),
            made,
            is_old,
        };
        let knows = |artifact: &Artifact, fence| decide::Writer {
            base: artifact.sharing.base,
            fence,
            attempted: artifact.sharing.attempted,
        };
        let answer = |artifact: &Artifact, made| {
            known_answer(artifact, &shown(made, false), knows(artifact, 0))
        };
        let newer = answer(&mine, Some(Timestamp(201)));
        assert!(matches!(newer, Some(Answer::KeptNewer)));
        let older = answer(&mine, Some(Timestamp(199)));
        assert!(older.is_none(), "it is uploaded");
        assert!(answer(&mine, None).is_none(), "the manifest is damaged");
        let fenced = known_answer(&mine, &shown(Some(Timestamp(201)), true), knows(&mine, 900));
        assert!(fenced.is_none(), "what a fence cleared counts as nothing");
        let follows = sealed(1, Some(4));
        assert!(answer(&follows, Some(Timestamp(201))).is_none());
        let own = sealed(2, None);
        let named = answer(&own, Some(Timestamp(200)));
        assert!(matches!(named, Some(Answer::Named(4))));
    }
}
