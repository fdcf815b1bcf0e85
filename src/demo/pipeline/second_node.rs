//! The part of the pipeline on other nodes: drivers with pools of their own. The second one has
//! nothing but the shared tier. It fetches the sources and the cache, and builds on. The third one
//! has nothing but a peer, the first one, and does the same.

use std::time::{Duration, Instant};

use super::{CACHE, Pipeline, SOURCES, Step};
use crate::demo::driver::Driver;
use crate::demo::error::Error;
use crate::demo::options::Options;
use crate::demo::project;
use crate::demo::report::{Row, bytes, seconds};
use crate::demo::step::{in_container, on_thread};
use crate::demo::tree::{Fingerprint, content, size};
use baggageclaim::model::layout;
use baggageclaim::proto::admin::v1 as api;

/// How long the uploads may take.
const UPLOADS: Duration = Duration::from_secs(300);
const LOOK_AGAIN: Duration = Duration::from_millis(50);

impl Pipeline<'_> {
    /// Builds on a node that has none of the pipeline's content.
    pub(super) async fn second_node(
        &mut self,
        fetched: Fingerprint,
        committed: Fingerprint,
        first: &str,
        options: &Options,
    ) -> Result<(), Error> {
        let line = self
            .screen
            .begin("node 2", "waits until all of it is in the shared tier");
        self.uploaded().await?;
        let tier = self.sandbox.tier();
        let stored = on_thread(move || size(&tier)).await?.bytes;
        line.done(&bytes(stored));

        let paths = self.sandbox.node_paths("node-2")?;
        let (driver, kubelet) = Driver::start(&paths, "demo-2", options).await?;
        let mut step = Step {
            title: "node 2".to_owned(),
            pod: kubelet.pod(&self.namespace, "node-2"),
            volumes: Vec::new(),
        };
        let doing = "fetches them from the shared tier into a fresh pool";
        let (found, told) = self.fetches(&mut step, doing).await?;
        self.claim(
            found == (fetched, committed),
            "what one node committed is on another node, byte for byte",
            told,
        );
        self.builds_on(&mut step, "on a second node", 3, first, options)
            .await?;
        self.leave(step, &paths.pool).await?;
        drop(kubelet);
        driver.stop()
    }

    /// Builds on a node that has none of the pipeline's content, and gets it straight from the
    /// first node.
    pub(super) async fn third_node(
        &mut self,
        fetched: Fingerprint,
        committed: Fingerprint,
        first: &str,
        options: &Options,
    ) -> Result<(), Error> {
        let paths = self.sandbox.peer_paths("node-3")?;
        let (driver, kubelet) = Driver::start(&paths, "demo-3", options).await?;
        let mut step = Step {
            title: "node 3".to_owned(),
            pod: kubelet.pod(&self.namespace, "node-3"),
            volumes: Vec::new(),
        };
        let doing = "fetches them straight from node 1 into a fresh pool";
        let (found, told) = self.fetches(&mut step, doing).await?;
        self.claim(
            found == (fetched, committed),
            "without a bucket they come straight from the node that has them, byte for byte",
            told,
        );
        self.builds_on(&mut step, "on a third node", 4, first, options)
            .await?;
        self.leave(step, &paths.pool).await?;
        drop(kubelet);
        driver.stop()
    }

    /// Builds an edition of the program with the sources and the cache that came, and runs it.
    /// `first`: what the program of the first build printed.
    async fn builds_on(
        &mut self,
        step: &mut Step,
        label: &'static str,
        edition: u32,
        first: &str,
        options: &Options,
    ) -> Result<(), Error> {
        let output = ["type=output", "name=program", "commit=never"];
        self.mount(step, "out", &output).await?;
        self.mount(step, "scratch", &["type=scratch"]).await?;
        let (compiled, _) = self.build(step, label, edition, options).await?;
        let said = in_container(self.sandbox, step.mounts(), |container| {
            project::run(container, "out")
        });
        let said = said.await?;
        let before = first.strip_prefix("1 ");
        let after = said.strip_prefix(&format!("{edition} "));
        let cold = self.builds[0].compiled;
        self.claim(
            before.is_some() && before == after && compiled < cold,
            format!(
                "{} builds on where the first one was, and its program finds the same",
                step.title
            ),
            format!("{cold} crates on the first node, then {compiled}; {said:?}"),
        );
        Ok(())
    }

    /// Mounts the sources and the cache. Returns what they hold, and a text about it.
    async fn fetches(
        &mut self,
        step: &mut Step,
        doing: &str,
    ) -> Result<((Fingerprint, Fingerprint), String), Error> {
        let line = self.screen.begin(&step.title, doing);
        let began = Instant::now();
        self.mount_sources(step).await?;
        let cache = ["type=task-cache", "key=build", "commit=never"];
        self.mount(step, "cache", &cache).await?;
        let took = seconds(began.elapsed());
        let found = in_container(self.sandbox, step.mounts(), |container| {
            let (sources, cache) = (container.volume("src"), container.volume("cache"));
            Ok((content(&sources)?, content(&cache)?))
        })
        .await?;
        let shown = bytes(found.0.bytes + found.1.bytes);
        line.done(&format!("{shown} in {took}"));
        let told = format!("{SOURCES} and {CACHE}: {shown}, mounted after {took}");
        Ok((found, told))
    }

    /// Waits until the first node has uploaded everything.
    async fn uploaded(&mut self) -> Result<(), Error> {
        let began = Instant::now();
        loop {
            let status = self.admin.status(api::StatusRequest {}).await;
            let status = status.map_err(Error::refused("status"))?.into_inner();
            let tier = status.shared.unwrap_or_default();
            if tier.uploads_waiting == 0 {
                return Ok(());
            }
            if began.elapsed() > UPLOADS || !tier.permanent_error.is_empty() {
                return Err(Error::NotShared(tier.last_error));
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }

    /// Ends a step of another node, which commits nothing.
    async fn leave(&mut self, step: Step, pool: &std::path::Path) -> Result<(), Error> {
        for volume in &step.volumes {
            let target = volume.published.target.clone();
            let own = pool.join(layout::VOLUMES);
            let own = own.join(&volume.published.volume_id);
            let (shown, own) = on_thread(move || Ok((size(&target)?, size(&own)?))).await?;
            self.rows.push(Row {
                step: step.title.clone(),
                volume: volume.label.clone(),
                took: volume.published.took,
                waited: false,
                files: shown.files,
                bytes: shown.bytes,
                cost: self.tops.then_some(own.blocks),
            });
            let what = format!("unpublish {} of {}", volume.label, step.title);
            step.pod
                .unpublish(volume.name)
                .await
                .map_err(Error::refused(what))?;
        }
        let dir = step.pod.dir();
        step.pod
            .remove()
            .map_err(|source| Error::io("remove the pod's directory", dir, source))
    }
}
