//! The pipeline: a step as the demo runs it, with its pod and volumes, and the helpers that every
//! step needs. `steps` has what each step does and proves; `transfer` the part in another pool;
//! `second_node` the part on another node.
//!
//! A claim on the screen compares bytes, modes, counts or times that this run saw, through the
//! mounts as a step sees them or in the pool's directories, with plain walks.

mod second_node;
mod steps;
mod transfer;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::driver::Driver;
use super::error::Error;
use super::options::Options;
use super::project;
use super::report::{Build, Claim, Row, Screen};
use super::sandbox::Sandbox;
use super::step::{Container, in_container, on_thread};
use super::tree::{Fingerprint, Source, content, size};
use baggageclaim::admin;
use baggageclaim::kubelet_double::{Kubelet, Pod, PublishOptions, Published};
use baggageclaim::model::layout;
use baggageclaim::proto::admin::v1 as api;

const SOURCES: &str = "resource-cache/sources";
const CACHE: &str = "task-cache/build";
const PROGRAM: &str = "artifact/program";

/// A volume that a step has.
struct Mounted {
    /// Its name in the step.
    name: &'static str,
    /// Its name in the table.
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
    /// The name and the target path of each volume.
    fn mounts(&self) -> Vec<(String, PathBuf)> {
        let mount = |volume: &Mounted| (volume.name.to_owned(), volume.published.target.clone());
        self.volumes.iter().map(mount).collect()
    }
}

/// The pipeline as it runs.
struct Pipeline<'a> {
    sandbox: &'a Sandbox,
    screen: Screen,
    kubelet: Kubelet,
    admin: admin::Client,
    namespace: String,
    /// Whether a volume's own directory holds exactly what the volume alone takes (overlay).
    tops: bool,
    rows: Vec<Row>,
    builds: Vec<Build>,
    claims: Vec<Claim>,
}

/// Runs the whole pipeline and prints the report.
pub(super) async fn run(sandbox: &Sandbox, options: &Options) -> Result<(), Error> {
    let screen = Screen::new(options.colour);
    Screen::print(
        "baggageclaim demo: a pipeline whose steps get their volumes through the real CSI socket\n",
    );
    let source = Source::find(options.cargo_home.as_deref(), options.tree.as_deref())?;
    let (driver, kubelet) = Driver::start(&sandbox.paths(), "demo", options).await?;
    let mut admin = admin::connect(&sandbox.pool).await?;
    let status = admin
        .status(api::StatusRequest {})
        .await
        .map_err(Error::refused("status"))?
        .into_inner();
    Screen::print(&format!(
        "  pool      {} on {}\n  because   {}\n",
        status.backend, sandbox.ground, status.backend_reason
    ));
    let mut pipeline = Pipeline {
        sandbox,
        screen,
        kubelet,
        admin,
        // A shared pool may already have caches of these names.
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
    pipeline.steps(source, options).await?;
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
    fn claim(&mut self, proved: bool, text: impl Into<String>, seen: impl Into<String>) {
        self.claims.push(Claim {
            text: text.into(),
            seen: seen.into(),
            proved,
        });
    }

    /// Runs `work` in a step's container, with a line on the screen that ends with `found`.
    async fn work<T: Send + 'static>(
        &self,
        step: &Step,
        what: &str,
        found: impl FnOnce(&T) -> String,
        work: impl FnOnce(&Container) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let line = self.screen.begin(&step.title, what);
        let result = in_container(self.sandbox, step.mounts(), work).await?;
        line.done(&found(&result));
        Ok(result)
    }

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
        self.mount_sources(&mut step).await?;
        self.mount(&mut step, "cache", &["type=task-cache", "key=build"])
            .await?;
        self.mount(&mut step, "out", &["type=output", "name=program"])
            .await?;
        self.mount(&mut step, "scratch", &["type=scratch"]).await?;
        Ok(step)
    }

    /// Publishes a fork of the sources for a step.
    async fn mount_sources(&mut self, step: &mut Step) -> Result<(), Error> {
        let from = format!("from={SOURCES}");
        self.mount(step, "src", &["type=input", &from]).await
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

    /// Builds in a step, and notes the time it took.
    async fn build(
        &mut self,
        step: &Step,
        label: &'static str,
        edition: u32,
        options: &Options,
    ) -> Result<(usize, Fingerprint), Error> {
        let jobs = options.jobs;
        let crates = |(compiled, _, _): &(usize, Duration, Fingerprint)| {
            let plural = if *compiled == 1 { "" } else { "s" };
            format!("{compiled} crate{plural}")
        };
        let what = format!("compiles a program, {label}");
        let build = move |container: &Container| {
            if edition > 1 {
                project::edit(&container.volume("src"), edition)?;
            }
            let began = Instant::now();
            let compiled = project::build(container, jobs)?;
            let took = began.elapsed();
            Ok((compiled, took, content(&container.volume("out"))?))
        };
        let (compiled, took, program) = self.work(step, &what, crates, build).await?;
        self.builds.push(Build {
            label,
            took,
            compiled,
        });
        Ok((compiled, program))
    }

    /// Ends a step: measures and unpublishes its volumes, reports its outcome, and waits for the
    /// seals.
    async fn finish(&mut self, step: Step, succeeded: bool) -> Result<(), Error> {
        for volume in &step.volumes {
            let target = volume.published.target.clone();
            let own = self
                .sandbox
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
