//! The pipeline: what its steps do, one after the other, and what each part of it proves.
//!
//! Nothing is claimed here that was not looked at: every claim compares bytes, modes, counts or times that this run
//! saw, through the mounts as a step sees them or in the pool's directories, with plain walks.

mod transfer;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::driver::Driver;
use super::report::{Build, Claim, Row, Screen, bytes, micros, seconds, thousands};
use super::stage::Stage;
use super::step::{Room, in_room, on_thread};
use super::tree::{Fingerprint, Source, content, size};
use super::{Error, Options, project};
use baggageclaim::admin;
use baggageclaim::kubelet_double::{Kubelet, Pod, PublishOptions, Published};
use baggageclaim::model::layout;
use baggageclaim::proto::admin::v1 as api;

const SOURCES: &str = "resource-cache/sources";
const CACHE: &str = "task-cache/build";
const PROGRAM: &str = "artifact/program";

/// A volume that a step has.
struct Mounted {
    /// As the step calls it.
    name: &'static str,
    /// As the table calls it.
    label: String,
    published: Published,
    waited: bool,
}

/// A step's pod and its volumes.
struct Step {
    title: String,
    pod: Pod,
    volumes: Vec<Mounted>,
}

impl Step {
    /// What its room needs.
    fn mounts(&self) -> Vec<(String, PathBuf)> {
        let mount = |volume: &Mounted| (volume.name.to_owned(), volume.published.target.clone());
        self.volumes.iter().map(mount).collect()
    }
}

/// The pipeline as it runs.
struct Pipeline<'a> {
    stage: &'a Stage,
    screen: Screen,
    kubelet: Kubelet,
    admin: admin::Client,
    namespace: String,
    /// Whether a volume's own directory holds what it costs, and nothing of what it shares.
    tops: bool,
    rows: Vec<Row>,
    builds: Vec<Build>,
    claims: Vec<Claim>,
}

/// Plays all of it.
pub(super) async fn tell(stage: &Stage, options: &Options) -> Result<(), Error> {
    let screen = Screen::new(options.colour);
    Screen::print(
        "baggageclaim demo: a pipeline whose steps get their volumes through the real CSI socket\n",
    );
    let source = Source::find(options.cargo_home.as_deref(), options.tree.as_deref())?;
    let (driver, kubelet) = Driver::start(&stage.place(), options).await?;
    let mut admin = admin::connect(&stage.pool).await?;
    let status = admin
        .status(api::StatusRequest {})
        .await
        .map_err(Error::refused("status"))?
        .into_inner();
    Screen::print(&format!(
        "  pool      {} on {}\n  because   {}\n",
        status.backend, stage.ground, status.backend_reason
    ));
    let mut pipeline = Pipeline {
        stage,
        screen,
        kubelet,
        admin,
        // A pool that others use, too, may have caches of these names.
        namespace: if options.pool.is_some() {
            format!("demo-{}", std::process::id())
        } else {
            "demo".to_owned()
        },
        tops: status.backend == "overlay",
        rows: Vec::new(),
        builds: Vec::new(),
        claims: Vec::new(),
    };
    pipeline.play(source, options).await?;
    driver.stop()?;
    pipeline
        .screen
        .report(&pipeline.rows, &pipeline.builds, &pipeline.claims);
    let failed = pipeline.claims.iter().filter(|claim| !claim.proved).count();
    if failed > 0 {
        let all = pipeline.claims.len();
        return Err(Error::NotProved { failed, all });
    }
    Ok(())
}

impl Pipeline<'_> {
    async fn play(&mut self, source: Source, options: &Options) -> Result<(), Error> {
        let fetched = self.get(source).await?;
        self.two_changes(fetched).await?;
        let (built, waited) = self.cold_build(options).await?;
        let first = self.test_step(built, waited).await?;
        self.another_pool(built, &first, options).await?;
        let committed = self.warm_build(options, &first).await?;
        self.failed_step(committed).await?;
        self.one_view_costs_nothing();
        self.nothing_is_left(options).await
    }

    fn claim(&mut self, proved: bool, text: impl Into<String>, seen: impl Into<String>) {
        self.claims.push(Claim {
            text: text.into(),
            seen: seen.into(),
            proved,
        });
    }

    /// A step fetches the tree into a resource cache.
    async fn get(&mut self, source: Source) -> Result<Fingerprint, Error> {
        let mut step = self.step("get");
        self.mount(
            &mut step,
            "sources",
            &["type=resource-cache", "key=sources"],
        )
        .await?;
        self.mount(&mut step, "scratch", &["type=scratch"]).await?;
        let line = self
            .screen
            .begin("get", "fetches real sources into a resource cache");
        let (size, fetched) = in_room(self.stage, step.mounts(), move |room| {
            let sources = room.volume("sources");
            let size = project::fetch(room, &source, &sources)?;
            Ok((size, content(&sources)?))
        })
        .await?;
        line.done(&format!(
            "{} files, {}",
            thousands(size.files),
            bytes(size.bytes)
        ));
        self.finish(step, true).await?;
        Ok(fetched)
    }

    /// Two steps change the same input at the same time.
    async fn two_changes(&mut self, fetched: Fingerprint) -> Result<(), Error> {
        let mut a = self.step("left");
        let mut b = self.step("right");
        for step in [&mut a, &mut b] {
            self.mount(step, "src", &["type=input", &format!("from={SOURCES}")])
                .await?;
        }
        let line = self
            .screen
            .begin("left+right", "change the same files of one input, at once");
        let change = |step: &Step, mine: &'static str| {
            in_room(self.stage, step.mounts(), move |room| change(room, mine))
        };
        let (left, right) = tokio::join!(change(&a, "left"), change(&b, "right"));
        let removed = left?;
        right?;
        let look = |step: &Step, mine: &'static str, other: &'static str| {
            let removed = removed.clone();
            in_room(self.stage, step.mounts(), move |room| {
                unmixed(room, mine, other, &removed)
            })
        };
        let (left, right) = tokio::join!(look(&a, "left", "right"), look(&b, "right", "left"));
        let (left, right) = (left?, right?);
        line.done("");
        let mut c = self.step("third");
        self.mount(&mut c, "src", &["type=input", &format!("from={SOURCES}")])
            .await?;
        let line = self.screen.begin("third", "reads every byte of that input");
        let third = in_room(self.stage, c.mounts(), |room| content(&room.volume("src"))).await?;
        line.done("");
        for step in [a, b, c] {
            self.finish(step, true).await?;
        }
        let seen = format!(
            "{} files, {}, with modes, owners and times",
            thousands(third.files),
            bytes(third.bytes)
        );
        self.claim(third == fetched, "a fork shows exactly what `get` fetched, and the sealed tree did not change under its forks", seen);
        self.claim(
            left && right,
            "two steps changed the same input at once, and did not see each other",
            "one file edited by both, one made by each, a directory deleted by one: each saw its own only",
        );
        Ok(())
    }

    /// A build without a cache; the step after it is asked for before this one is sealed.
    async fn cold_build(&mut self, options: &Options) -> Result<(Fingerprint, Step), Error> {
        let build = self.build_step("build 1").await?;
        let (compiled, program) = self.build(&build, "cold", 1, options).await?;
        // Kubelet publishes the next step's volumes while the last one is still being put away.
        let mut test = self.step("test");
        let (pod, early) = (test.pod.clone(), Instant::now());
        let asked = tokio::spawn(async move {
            let attributes = [("type", "input"), ("from", PROGRAM)];
            pod.publish("program", attributes, PublishOptions::default())
                .await
        });
        tokio::time::sleep(Duration::from_millis(300)).await;
        let was_early = !asked.is_finished();
        self.finish(build, true).await?;
        let sealed = early.elapsed();
        let answer = asked.await.map_err(|_| Error::Panicked)?;
        let published = answer.map_err(Error::refused(
            "publish an input that is about to be sealed",
        ))?;
        let waited = published.took;
        test.volumes.push(Mounted {
            name: "program",
            label: format!("input {PROGRAM}"),
            published,
            waited: true,
        });
        self.claim(
            was_early
                && waited > Duration::from_millis(290)
                && waited < sealed + Duration::from_secs(5),
            "an input that was asked for before its maker had ended was waited for, not refused",
            format!("asked 300 ms too early, mounted after {}", micros(waited)),
        );
        self.claim(
            compiled > 1,
            "the build was a real one",
            format!("{compiled} crates compiled from the fetched sources, without network"),
        );
        Ok((program, test))
    }

    /// The output of the build is the input of the next step, which runs it.
    async fn test_step(&mut self, built: Fingerprint, mut test: Step) -> Result<String, Error> {
        self.mount(
            &mut test,
            "src",
            &["type=input", &format!("from={SOURCES}")],
        )
        .await?;
        let line = self
            .screen
            .begin("test", "runs the program that the build left as its output");
        let (received, said) = in_room(self.stage, test.mounts(), |room| {
            Ok((
                content(&room.volume("program"))?,
                project::run(room, "program")?,
            ))
        })
        .await?;
        line.done(&format!(
            "it found {} functions",
            said.rsplit(' ').next().unwrap_or("?")
        ));
        self.finish(test, true).await?;
        self.claim(
            received == built && said.starts_with("1 "),
            "an output of one step is an input of the next, byte for byte, and the program in it runs",
            format!("{}, {}", bytes(built.bytes), if received == built { "the same digest" } else { "another digest" }),
        );
        Ok(said)
    }

    /// A second build, from the committed cache, after a change of one file.
    async fn warm_build(&mut self, options: &Options, first: &str) -> Result<Fingerprint, Error> {
        let build = self.build_step("build 2").await?;
        let (compiled, _) = self
            .build(&build, "with the task cache", 2, options)
            .await?;
        let (said, committed) = in_room(self.stage, build.mounts(), |room| {
            Ok((project::run(room, "out")?, content(&room.volume("cache"))?))
        })
        .await?;
        self.finish(build, true).await?;
        let (cold, warm) = (&self.builds[0], &self.builds[1]);
        let (faster, fewer) = (warm.took < cold.took, compiled < cold.compiled);
        let factor = cold.took.as_secs_f64() / warm.took.as_secs_f64().max(1e-9);
        let seen = format!(
            "{} crates in {}, then {compiled} in {}: {factor:.1} times as fast",
            cold.compiled,
            seconds(cold.took),
            seconds(warm.took)
        );
        self.claim(
            faster && fewer,
            "the second build took up the cache that the first one committed",
            seen,
        );
        let (before, after) = (first.strip_prefix("1 "), said.strip_prefix("2 "));
        self.claim(
            before.is_some() && before == after,
            "it is the changed program that came out of it, and it finds the same",
            format!("first {first:?}, then {said:?}"),
        );
        Ok(committed)
    }

    /// A step that fails spoils its cache; nobody else ever sees that.
    async fn failed_step(&mut self, committed: Fingerprint) -> Result<(), Error> {
        let mut bad = self.step("failed");
        self.mount(&mut bad, "cache", &["type=task-cache", "key=build"])
            .await?;
        let line = self.screen.begin("failed", "spoils the cache, then fails");
        let (found, spoilt) = in_room(self.stage, bad.mounts(), |room| {
            let cache = room.volume("cache");
            let found = content(&cache)?;
            let lock = cache.join("target/.rustc_info.json");
            fs::remove_file(&lock).map_err(|source| Error::io("remove", &lock, source))?;
            let junk = cache.join("target/junk");
            fs::write(&junk, "rubbish").map_err(|source| Error::io("write", &junk, source))?;
            Ok((found, content(&cache)?))
        })
        .await?;
        line.done("");
        self.finish(bad, false).await?;
        let mut next = self.step("after it");
        self.mount(
            &mut next,
            "cache",
            &["type=task-cache", "key=build", "commit=never"],
        )
        .await?;
        let line = self
            .screen
            .begin("after it", "reads every byte of the cache");
        let seen = in_room(self.stage, next.mounts(), |room| {
            content(&room.volume("cache"))
        })
        .await?;
        line.done("");
        self.finish(next, true).await?;
        self.claim(
            found == committed,
            "a cache comes back as it was committed",
            format!(
                "{} files, {}, every byte",
                thousands(found.files),
                bytes(found.bytes)
            ),
        );
        self.claim(
            seen == committed && spoilt != committed,
            "what a failed step did to its cache was not committed",
            "a file deleted, a file made; the next step's cache has neither change",
        );
        Ok(())
    }

    /// What the forks of the big tree took on disk, together.
    fn one_view_costs_nothing(&mut self) {
        if !self.tops {
            return;
        }
        let label = format!("input {SOURCES}");
        let forks = self.rows.iter().filter(|row| row.volume == label);
        let (mut count, mut shown, mut cost) = (0, 0, 0);
        for row in forks {
            count += 1;
            shown += row.bytes;
            cost += row.cost.unwrap_or(row.bytes);
        }
        self.claim(
            cost * 50 < shown,
            "a fork is a view, not a copy",
            format!(
                "{count} forks of the sources showed {} and took {} on disk",
                bytes(shown),
                bytes(cost)
            ),
        );
    }

    /// Everything is unpublished, and the pool is in order.
    async fn nothing_is_left(&mut self, options: &Options) -> Result<(), Error> {
        let findings = self
            .admin
            .check(api::CheckRequest {})
            .await
            .map_err(Error::refused("check"))?
            .into_inner()
            .findings;
        let tenant = Some(self.namespace.clone());
        let volumes = self
            .admin
            .list_volumes(api::ListVolumesRequest {
                tenant: tenant.clone(),
            })
            .await
            .map_err(Error::refused("list volumes"))?
            .into_inner()
            .volumes;
        let artifacts = self
            .admin
            .list_artifacts(api::ListArtifactsRequest { tenant })
            .await
            .map_err(Error::refused("list artifacts"))?
            .into_inner()
            .artifacts;
        let names: Vec<&str> = artifacts
            .iter()
            .map(|artifact| artifact.reference.as_str())
            .filter(|name| !name.is_empty())
            .collect();
        let mounts = self.stage.pods_mounts()?;
        let pods = fs::read_dir(self.stage.kubelet().join("pods"))
            .map_or(0, |entries| entries.flatten().count());
        let mut seen = format!(
            "{mounts} mounts, {pods} pods, {} volumes, {} findings of `check`; sealed: {}",
            volumes.len(),
            findings.len(),
            names.join(", ")
        );
        for finding in &findings {
            seen.push_str("; ");
            seen.push_str(&finding.detail);
        }
        let clean = mounts == 0 && pods == 0 && volumes.is_empty() && findings.is_empty();
        self.claim(
            clean
                && [SOURCES, CACHE, PROGRAM]
                    .iter()
                    .all(|name| names.contains(name)),
            "nothing is left behind but what was to be kept",
            seen,
        );
        if options.pool.is_some() && !options.keep {
            // The pool is somebody's; the demo's content goes, the pool stays.
            for reference in [SOURCES, CACHE, PROGRAM] {
                let request = api::DestroyRequest {
                    tenant: self.namespace.clone(),
                    reference: reference.to_owned(),
                };
                self.admin
                    .destroy(request)
                    .await
                    .map_err(Error::refused("destroy"))?;
            }
            self.admin
                .reap(api::ReapRequest {})
                .await
                .map_err(Error::refused("reap"))?;
        }
        Ok(())
    }

    // ---- What every step needs ------------------------------------------------------------------------------------

    fn step(&self, title: &str) -> Step {
        let name = title.replace(' ', "-");
        Step {
            title: title.to_owned(),
            pod: self.kubelet.pod(&self.namespace, &name),
            volumes: Vec::new(),
        }
    }

    async fn build_step(&mut self, title: &str) -> Result<Step, Error> {
        let mut step = self.step(title);
        self.mount(
            &mut step,
            "src",
            &["type=input", &format!("from={SOURCES}")],
        )
        .await?;
        self.mount(&mut step, "cache", &["type=task-cache", "key=build"])
            .await?;
        self.mount(&mut step, "out", &["type=output", "name=program"])
            .await?;
        self.mount(&mut step, "scratch", &["type=scratch"]).await?;
        Ok(step)
    }

    /// Publishes a volume for a step.
    async fn mount(
        &mut self,
        step: &mut Step,
        name: &'static str,
        attributes: &[&str],
    ) -> Result<(), Error> {
        let attributes: Vec<(&str, &str)> = attributes
            .iter()
            .filter_map(|attribute| attribute.split_once('='))
            .collect();
        let label: Vec<&str> = attributes
            .iter()
            .filter(|(key, _)| matches!(*key, "type" | "from" | "key" | "name"))
            .map(|(_, value)| *value)
            .collect();
        let label = label.join(" ");
        let published = step
            .pod
            .publish(name, attributes, PublishOptions::default())
            .await
            .map_err(Error::refused(format!(
                "publish {label} for {}",
                step.title
            )))?;
        step.volumes.push(Mounted {
            name,
            label,
            published,
            waited: false,
        });
        Ok(())
    }

    /// Builds in a step, and notes how long it took.
    async fn build(
        &mut self,
        step: &Step,
        label: &'static str,
        edition: u32,
        options: &Options,
    ) -> Result<(usize, Fingerprint), Error> {
        let line = self
            .screen
            .begin(&step.title, &format!("compiles a program, {label}"));
        let jobs = options.jobs;
        let (compiled, took, program) = in_room(self.stage, step.mounts(), move |room| {
            if edition > 1 {
                project::edit(&room.volume("src"), edition)?;
            }
            let began = Instant::now();
            let compiled = project::build(room, jobs)?;
            Ok((compiled, began.elapsed(), content(&room.volume("out"))?))
        })
        .await?;
        line.done(&format!(
            "{compiled} crate{}",
            if compiled == 1 { "" } else { "s" }
        ));
        self.builds.push(Build {
            label,
            took,
            compiled,
        });
        Ok((compiled, program))
    }

    /// Ends a step: measures its volumes, unpublishes them, says how it ended, and waits for what that seals.
    async fn finish(&mut self, step: Step, succeeded: bool) -> Result<(), Error> {
        for volume in &step.volumes {
            let target = volume.published.target.clone();
            let own = self
                .stage
                .pool
                .join(layout::VOLUMES)
                .join(&volume.published.volume_id);
            let (shown, own) = on_thread(move || Ok((size(&target)?, size(&own)?))).await?;
            self.rows.push(Row {
                step: step.title.clone(),
                volume: volume.label.clone(),
                took: volume.published.took,
                waited: volume.waited,
                files: shown.files,
                bytes: shown.bytes,
                cost: self.tops.then_some(own.blocks),
            });
        }
        for volume in &step.volumes {
            let what = format!("unpublish {} of {}", volume.label, step.title);
            step.pod
                .unpublish(volume.name)
                .await
                .map_err(Error::refused(what))?;
        }
        let outcome = if succeeded {
            api::Outcome::Succeeded
        } else {
            api::Outcome::Failed
        };
        self.admin
            .report_outcome(api::ReportOutcomeRequest {
                pod_uid: step.pod.uid().to_owned(),
                outcome: outcome.into(),
                wait: true,
            })
            .await
            .map_err(Error::refused(format!("say how {} ended", step.title)))?;
        let dir = step.pod.dir();
        step.pod
            .remove()
            .map_err(|source| Error::io("remove the pod's directory", dir, source))
    }
}

/// A file that both steps edit, and how it was.
fn contested(room: &Room) -> PathBuf {
    room.volume("src").join("project/src/main.rs")
}

/// Edits a file that the other step edits, makes one, and, on the left, deletes a whole crate; returns its name.
fn change(room: &Room, mine: &str) -> Result<PathBuf, Error> {
    let path = contested(room);
    let mut text = fs::read(&path).map_err(|source| Error::io("read", &path, source))?;
    text.extend_from_slice(format!("// {mine}\n").as_bytes());
    fs::write(&path, text).map_err(|source| Error::io("write", &path, source))?;
    let made = room.volume("src").join(mine);
    fs::write(&made, mine).map_err(|source| Error::io("write", &made, source))?;
    let crates = room.volume("src").join("crates");
    let mut names: Vec<PathBuf> = fs::read_dir(&crates)
        .map_err(|source| Error::io("read", &crates, source))?
        .flatten()
        .map(|entry| entry.path())
        .collect();
    names.sort_unstable();
    let victim = names.into_iter().next().unwrap_or(crates);
    if mine == "left" {
        remove_tree(&victim)?;
    }
    let name = victim.file_name().map(PathBuf::from);
    Ok(name.unwrap_or_default())
}

/// Whether a step sees all that it did itself, and nothing that the other did.
fn unmixed(room: &Room, mine: &str, other: &str, removed: &Path) -> Result<bool, Error> {
    let path = contested(room);
    let text = fs::read(&path).map_err(|source| Error::io("read", &path, source))?;
    let text = String::from_utf8_lossy(&text);
    let src = room.volume("src");
    let has_removed = src.join("crates").join(removed).exists();
    Ok(text.ends_with(&format!("// {mine}\n"))
        && !text.contains(&format!("// {other}\n"))
        && src.join(mine).exists()
        && !src.join(other).exists()
        && has_removed == (mine == "right"))
}

#[expect(
    clippy::disallowed_methods,
    reason = "a step deletes in its own volume, as `rm -r` does; the driver never does it so"
)]
fn remove_tree(path: &Path) -> Result<(), Error> {
    fs::remove_dir_all(path).map_err(|source| Error::io("delete", path, source))
}
