//! What the steps do, one after the other, and what each proves.
//! How a step runs and ends is in `mod.rs`.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::super::error::Error;
use super::super::options::Options;
use super::super::project;
use super::super::report::{bytes, micros, seconds, thousands};
use super::super::step::{Container, in_container};
use super::super::tree::{Fingerprint, Size, Source, content};
use super::{CACHE, Mounted, PROGRAM, Pipeline, SOURCES, Step};
use baggageclaim::kubelet_double::PublishOptions;
use baggageclaim::proto::admin::v1 as api;

/// The text behind a line of progress that needs none.
fn nothing<T>(_: &T) -> String {
    String::new()
}

impl Pipeline<'_> {
    /// Runs all steps.
    pub(super) async fn steps(&mut self, source: Source, options: &Options) -> Result<(), Error> {
        let fetched = self.get(source).await?;
        self.two_changes(fetched).await?;
        let (built, waited) = self.cold_build(options).await?;
        let first = self.test_step(built, waited).await?;
        self.another_pool(built, &first, options).await?;
        let committed = self.warm_build(options, &first).await?;
        self.failed_step(committed).await?;
        self.second_node(fetched, committed, &first, options)
            .await?;
        self.third_node(fetched, committed, &first, options).await?;
        self.one_view_costs_nothing();
        self.nothing_is_left(options).await
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
        let fetch = move |container: &Container| {
            let sources = container.volume("sources");
            let size = project::fetch(container, &source, &sources)?;
            Ok((size, content(&sources)?))
        };
        let found = |(size, _): &(Size, Fingerprint)| {
            format!("{} files, {}", thousands(size.files), bytes(size.bytes))
        };
        let what = "fetches real sources into a resource cache";
        let (_, fetched) = self.work(&step, what, found, fetch).await?;
        self.finish(step, true).await?;
        Ok(fetched)
    }

    /// Two steps change the same input at the same time.
    async fn two_changes(&mut self, fetched: Fingerprint) -> Result<(), Error> {
        let mut a = self.step("left");
        let mut b = self.step("right");
        for step in [&mut a, &mut b] {
            self.mount_sources(step).await?;
        }
        let line = self
            .screen
            .begin("left+right", "change the same files of one input, at once");
        let change = |step: &Step, mine: &'static str| {
            in_container(self.sandbox, step.mounts(), move |container| {
                change(container, mine)
            })
        };
        let (left, right) = tokio::join!(change(&a, "left"), change(&b, "right"));
        let removed = left?;
        right?;
        let look = |step: &Step, mine: &'static str, other: &'static str| {
            let removed = removed.clone();
            in_container(self.sandbox, step.mounts(), move |container| {
                unmixed(container, mine, other, &removed)
            })
        };
        let (left, right) = tokio::join!(look(&a, "left", "right"), look(&b, "right", "left"));
        let (left, right) = (left?, right?);
        line.done("");
        let mut c = self.step("third");
        self.mount_sources(&mut c).await?;
        let read = |container: &Container| content(&container.volume("src"));
        let what = "reads every byte of that input";
        let third = self.work(&c, what, nothing, read).await?;
        for step in [a, b, c] {
            self.finish(step, true).await?;
        }
        let seen = format!(
            "{} files, {}, with modes, owners and times",
            thousands(third.files),
            bytes(third.bytes)
        );
        self.claim(
            third == fetched,
            "a fork shows exactly what `get` fetched, and the sealed tree did not change under its \
             forks",
            seen,
        );
        self.claim(
            left && right,
            "two steps changed the same input at once, and did not see each other",
            "one file edited by both, one made by each, a directory deleted by one: each saw its \
             own only",
        );
        Ok(())
    }

    /// Builds without a cache. Publishes the output for the next step before this one is sealed.
    async fn cold_build(&mut self, options: &Options) -> Result<(Fingerprint, Step), Error> {
        let build = self.build_step("build 1").await?;
        let (compiled, program) = self.build(&build, "cold", 1, options).await?;
        // Kubelet publishes the next step's volumes while the last one still ends.
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
        self.mount_sources(&mut test).await?;
        let found = |(_, said): &(Fingerprint, String)| {
            let functions = said.rsplit(' ').next().unwrap_or("?");
            format!("it found {functions} functions")
        };
        let what = "runs the program that the build left as its output";
        let (received, said) = self.work(&test, what, found, read_and_run).await?;
        self.finish(test, true).await?;
        let digests = if received == built {
            "the same digest"
        } else {
            "another digest"
        };
        self.claim(
            received == built && said.starts_with("1 "),
            "an output of one step is an input of the next, byte for byte, and the program in it \
             runs",
            format!("{}, {digests}", bytes(built.bytes)),
        );
        Ok(said)
    }

    /// A second build, from the committed cache, after a change of one file.
    async fn warm_build(&mut self, options: &Options, first: &str) -> Result<Fingerprint, Error> {
        let build = self.build_step("build 2").await?;
        let (compiled, _) = self
            .build(&build, "with the task cache", 2, options)
            .await?;
        let (said, committed) = in_container(self.sandbox, build.mounts(), |container| {
            Ok((
                project::run(container, "out")?,
                content(&container.volume("cache"))?,
            ))
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

    /// A step spoils its cache and fails. The next step sees the cache as it was committed.
    async fn failed_step(&mut self, committed: Fingerprint) -> Result<(), Error> {
        let mut bad = self.step("failed");
        self.mount(&mut bad, "cache", &["type=task-cache", "key=build"])
            .await?;
        let spoil = |container: &Container| {
            let cache = container.volume("cache");
            let found = content(&cache)?;
            let lock = cache.join("target/.rustc_info.json");
            fs::remove_file(&lock).map_err(|source| Error::io("remove", &lock, source))?;
            let junk = cache.join("target/junk");
            fs::write(&junk, "rubbish").map_err(|source| Error::io("write", &junk, source))?;
            Ok((found, content(&cache)?))
        };
        let what = "spoils the cache, then fails";
        let (found, spoilt) = self.work(&bad, what, nothing, spoil).await?;
        self.finish(bad, false).await?;
        let mut next = self.step("after it");
        self.mount(
            &mut next,
            "cache",
            &["type=task-cache", "key=build", "commit=never"],
        )
        .await?;
        let read = |container: &Container| content(&container.volume("cache"));
        let what = "reads every byte of the cache";
        let seen = self.work(&next, what, nothing, read).await?;
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

    /// Adds up the disk space of all forks of the large tree.
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

    /// Verifies that nothing is published and that the pool has no findings.
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
        let mounts = self.sandbox.pods_mounts()?;
        let pods = fs::read_dir(self.sandbox.kubelet().join("pods"))
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
            // The pool is the user's: delete only the demo's content.
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
}

/// The content and the output of the program that the build made.
pub(super) fn read_and_run(container: &Container) -> Result<(Fingerprint, String), Error> {
    let program = content(&container.volume("program"))?;
    Ok((program, project::run(container, "program")?))
}

/// A file that both steps edit.
fn contested(container: &Container) -> PathBuf {
    container.volume("src").join("project/src/main.rs")
}

/// Edits the common file and makes a file. The left step also deletes a crate; returns its name.
fn change(container: &Container, mine: &str) -> Result<PathBuf, Error> {
    let path = contested(container);
    let mut text = fs::read(&path).map_err(|source| Error::io("read", &path, source))?;
    text.extend_from_slice(format!("// {mine}\n").as_bytes());
    fs::write(&path, text).map_err(|source| Error::io("write", &path, source))?;
    let made = container.volume("src").join(mine);
    fs::write(&made, mine).map_err(|source| Error::io("write", &made, source))?;
    let crates = container.volume("src").join("crates");
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

/// Whether a step sees all changes of its own, and none of the other step's.
fn unmixed(container: &Container, mine: &str, other: &str, removed: &Path) -> Result<bool, Error> {
    let path = contested(container);
    let text = fs::read(&path).map_err(|source| Error::io("read", &path, source))?;
    let text = String::from_utf8_lossy(&text);
    let src = container.volume("src");
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
