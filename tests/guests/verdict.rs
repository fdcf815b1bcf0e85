//! The check of a pool after a power cut: it finds broken promises, and content that is there in
//! part.

use std::fs;
use std::time::{Duration, Instant};

use baggageclaim::engine::claims::SnapshotFilter;
use baggageclaim::engine::{Engine, Error};
use baggageclaim::model::{ClaimSource, Outcome};
use serde::{Deserialize, Serialize};

use super::common::bench::request;
use super::facts::{self, Promised};
use super::work::{self, CACHE, Place, claim, mount, unmount};

/// How long something is waited for before it counts as never coming, and how often it is tried at
/// least: a machine may stand still for so long.
const NEVER: Duration = Duration::from_secs(120);
const TRIES: usize = 5;

/// Content that should not be there, or that is missing.
#[derive(Debug, Default, Clone, Serialize, Deserialize)]
pub(crate) struct Verdict {
    pub(crate) lost: Vec<String>,
    pub(crate) leaked: Vec<String>,
    pub(crate) wrong: Vec<String>,
    /// Imports that were sealed before the cut, and are whole.
    pub(crate) imports: u64,
    /// Imports that the cut interrupted, and that are whole or not there.
    pub(crate) cut_imports: u64,
}

impl Verdict {
    pub(crate) fn is_good(&self) -> bool {
        self.lost.is_empty() && self.leaked.is_empty() && self.wrong.is_empty()
    }
}

/// Looks at a pool whose machine lost power; empties it, and sees that nothing is left over.
pub(crate) async fn look(place: &Place, promised: &Promised) -> Verdict {
    let mut verdict = Verdict::default();
    let engine = match place.open().await {
        Ok(engine) => engine,
        Err(error) => {
            verdict
                .lost
                .push(format!("the pool does not open: {error}"));
            return verdict;
        }
    };
    if let Err(error) = look_at(place, promised, &engine, &mut verdict).await {
        verdict.wrong.push(error.to_string());
    }
    engine.shutdown().await;
    drop(engine);
    match Engine::check_offline(&place.pool) {
        Ok(findings) => {
            let findings = findings.iter().map(|finding| format!("{finding:?}"));
            verdict.leaked.extend(findings);
        }
        Err(error) => verdict.wrong.push(format!("check: {error}")),
    }
    verdict
}

async fn look_at(
    place: &Place,
    promised: &Promised,
    engine: &Engine,
    verdict: &mut Verdict,
) -> Result<(), Error> {
    engine.settled().await;
    engine.reap().await?;
    let findings = engine.check().await?;
    let findings = findings.iter().map(|finding| format!("{finding:?}"));
    verdict.leaked.extend(findings);

    look_at_outputs(place, promised, engine, verdict).await?;
    look_at_claims(place, promised, engine, verdict).await?;

    // It works as a new one does.
    if !work::one_more_day(place, engine).await? {
        verdict.wrong.push("a new output is not sealed".to_owned());
    }
    empty(place, engine, verdict).await
}

async fn look_at_outputs(
    place: &Place,
    promised: &Promised,
    engine: &Engine,
    verdict: &mut Verdict,
) -> Result<(), Error> {
    let mut names: Vec<String> = Vec::new();
    for row in engine.artifacts(None) {
        let Some(name) = row.name else { continue };
        if !row.durable {
            let found = format!("{name} is not durable after a start");
            verdict.wrong.push(found);
        }
        names.push(name.to_string());
    }
    for name in &promised.outputs {
        if !names.contains(&format!("artifact/{name}")) {
            verdict.lost.push(format!("{name} was durable"));
        }
    }
    if promised.cached.is_some() && !names.iter().any(|name| name == CACHE) {
        verdict.lost.push("the cache was durable".to_owned());
    }
    let is_there = |name: &&String| names.contains(&format!("artifact/{name}"));
    let absent = promised.importing.iter().filter(|name| !is_there(name));
    verdict.cut_imports += absent.count() as u64;
    for (number, reference) in names.iter().enumerate() {
        let volume = format!("look-{number}");
        let target = place.target(&volume);
        let attributes = [("type", "input"), ("from", reference.as_str())];
        let pod = format!("pod-{volume}");
        let asked = request(&target, "ci", &pod, &volume, &attributes);
        engine.publish(asked).await?;
        if reference == CACHE {
            match facts::cache_generation(&target, place.seed) {
                Ok(generation) if Some(generation) >= promised.cached => {}
                Ok(generation) => verdict.lost.push(format!(
                    "the cache has generation {generation}, and {:?} was durable",
                    promised.cached
                )),
                Err(why) => verdict.wrong.push(format!("the cache: {why}")),
            }
        } else {
            let name = reference.trim_start_matches("artifact/");
            if promised.destroyed.contains(name) {
                verdict.wrong.push(format!("{name} was destroyed"));
            }
            // An import that was cut is here, too, if it is there at all: it must be whole.
            let wrong = facts::wrong_with_output(&target, name);
            verdict.imports += u64::from(wrong.is_none() && promised.imported.contains(name));
            let interrupted = promised.importing.contains(name);
            verdict.cut_imports += u64::from(wrong.is_none() && interrupted);
            verdict.wrong.extend(wrong);
        }
        engine.unpublish(&volume, &target).await?;
        engine
            .report_outcome(&pod.parse().expect("a uid"), Outcome::Failed)
            .await?;
    }
    Ok(())
}

async fn look_at_claims(
    place: &Place,
    promised: &Promised,
    engine: &Engine,
    verdict: &mut Verdict,
) -> Result<(), Error> {
    let claims = engine.claims(None, usize::MAX).items;
    for (name, generation) in &promised.claims {
        let Some(claim) = claims.iter().find(|claim| claim.name == *name) else {
            verdict.lost.push(format!("{name} was made"));
            continue;
        };
        let target = mount(engine, place, claim).await?;
        match facts::claim_generation(&target, name) {
            Ok(found) if found >= *generation => {}
            Ok(found) => {
                let said = format!("{name}: {found:?} is there, {generation:?} was synced");
                verdict.lost.push(said);
            }
            Err(why) => verdict.wrong.push(why),
        }
        unmount(engine, place, claim).await?;
    }
    for claim in &claims {
        if promised.unclaimed.contains(&claim.name) {
            verdict.wrong.push(format!("{} was deleted", claim.name));
        }
    }
    let all = SnapshotFilter::default();
    let snapshots = engine.snapshots(&all, None, usize::MAX)?.items;
    for (name, (of, generation)) in &promised.snapshots {
        let Some(snapshot) = snapshots.iter().find(|snapshot| snapshot.name == *name) else {
            verdict.lost.push(format!("{name} was taken"));
            continue;
        };
        let source = ClaimSource::Snapshot(snapshot.id.clone());
        let clone = engine
            .create_claim(claim(&format!("of-{name}"), Some(source)))
            .await?;
        let target = mount(engine, place, &clone).await?;
        match facts::claim_generation(&target, of) {
            Ok(found) if found == Some(*generation) => {}
            found => {
                let said = format!("{name}: {found:?} is there, {generation} was");
                verdict.wrong.push(said);
            }
        }
        unmount(engine, place, &clone).await?;
    }
    Ok(())
}

/// Deletes everything, and says what is left.
async fn empty(place: &Place, engine: &Engine, verdict: &mut Verdict) -> Result<(), Error> {
    let all = SnapshotFilter::default();
    for snapshot in engine.snapshots(&all, None, usize::MAX)?.items {
        engine.delete_snapshot(snapshot.id.as_str()).await?;
    }
    for claim in engine.claims(None, usize::MAX).items {
        engine.delete_claim(claim.id.as_str()).await?;
    }
    engine.settled().await;
    let tenant = "ci".parse().expect("a tenant");
    for row in engine.artifacts(None) {
        if let Some(reference) = row.name {
            engine.destroy(&tenant, &reference).await?;
        }
    }
    let deadline = Instant::now() + NEVER;
    let mut reaped = engine.reap().await?;
    let mut tries = 1;
    while reaped.held > 0 && (tries < TRIES || Instant::now() < deadline) {
        tokio::time::sleep(Duration::from_millis(10)).await;
        reaped = engine.reap().await?;
        tries += 1;
    }
    if reaped.held > 0 {
        let volumes = engine.volumes(None);
        let threads = super::init::threads();
        let why = format!("the last of {tries} reaps: {reaped:?}; volumes: {volumes:?}\n{threads}");
        verdict.leaked.push(why);
    }
    for room in ["volumes", "pending", "layers", "incoming", "trash"] {
        for entry in fs::read_dir(place.pool.join(room))
            .expect("a room")
            .flatten()
        {
            let inside = fs::read_dir(entry.path()).into_iter().flatten().flatten();
            let inside: Vec<_> = inside.map(|entry| entry.file_name()).collect();
            let name = entry.file_name();
            let leaked = format!("{room}/{}: {inside:?}", name.display());
            verdict.leaked.push(leaked);
        }
    }
    for entry in fs::read_dir(&place.targets).expect("targets").flatten() {
        let name = entry.file_name();
        verdict.leaked.push(format!("target {}", name.display()));
    }
    Ok(())
}
