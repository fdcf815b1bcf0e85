//! The part of the pipeline in a second pool: exports the program as an archive, imports it by its
//! digest, and runs it there. Calls the commands as a user does, and times them.

#![expect(
    clippy::disallowed_types,
    reason = "export and import are shown as people run them: as commands"
)]

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use super::steps::read_and_run;
use super::{PROGRAM, Pipeline};
use crate::demo::driver::Driver;
use crate::demo::error::Error;
use crate::demo::options::Options;
use crate::demo::report::{bytes, micros, seconds};
use crate::demo::step::{in_container, on_thread};
use crate::demo::tree::Fingerprint;
use baggageclaim::kubelet_double::{Kubelet, PublishOptions};

impl Pipeline<'_> {
    /// Copies the program to a new pool with its own driver, and runs it there.
    pub(super) async fn another_pool(
        &mut self,
        built: Fingerprint,
        said: &str,
        options: &Options,
    ) -> Result<(), Error> {
        let line = self.screen.begin(
            "copy",
            "exports the program, imports it by its digest into a fresh pool, and runs it there",
        );
        let (here, there) = (self.sandbox.paths(), self.sandbox.second_paths()?);
        let archive = there.archive.clone();
        let (driver, kubelet) = Driver::start(&there, "demo-copy", options).await?;
        let verb = |pool: &PathBuf, arguments: &[&str]| {
            let mut command = Command::new(&options.program);
            command.env("BAGGAGECLAIM_POOL", pool);
            let (verb, arguments) = arguments.split_at(1);
            command.args(verb).arg("-n").arg(&self.namespace);
            command.args(arguments);
            command
        };
        let mut export = verb(&here.pool, &["export", PROGRAM, "-o"]);
        export.arg(&archive);
        let (_, exporting) = run(export).await?;
        let inspect = verb(&here.pool, &["inspect", PROGRAM, "-o", "json"]);
        let (shown, _) = run(inspect).await?;
        let shown: serde_json::Value = serde_json::from_slice(&shown).unwrap_or_default();
        let digest = shown["digest"].as_str().unwrap_or_default().to_owned();
        let mut import = verb(
            &there.pool,
            &["import", "--as", PROGRAM, "--digest", &digest],
        );
        import.arg(&archive);
        let (_, importing) = run(import).await?;
        let size = std::fs::metadata(&archive);
        let size = size.map_err(|source| Error::io("look at", &archive, source))?;
        let (received, runs, fork) = self.run_there(&kubelet).await?;
        drop(kubelet);
        driver.stop()?;
        line.done(&format!(
            "{} as tar.zst: export {}, import {}, a fork of it {}",
            bytes(size.len()),
            seconds(exporting),
            seconds(importing),
            micros(fork),
        ));
        self.claim(
            received == built && runs == said && !digest.is_empty(),
            "an artifact goes to another pool as an archive, byte for byte, and the program in it \
             runs there",
            format!(
                "{}, {}",
                bytes(built.bytes),
                digest.get(..19).unwrap_or("no digest")
            ),
        );
        Ok(())
    }

    /// Runs the program of the second pool on the sources of the first. Returns its fingerprint,
    /// its output, and the duration of its fork's publish.
    async fn run_there(
        &mut self,
        kubelet: &Kubelet,
    ) -> Result<(Fingerprint, String, Duration), Error> {
        let mut step = self.step("copy");
        self.mount_sources(&mut step).await?;
        let pod = kubelet.pod(&self.namespace, "copy");
        let input = [("type", "input"), ("from", PROGRAM)];
        let published = pod.publish("program", input, PublishOptions::default());
        let published = published
            .await
            .map_err(Error::refused("publish the program in the other pool"))?;
        let mut mounts = step.mounts();
        mounts.push(("program".to_owned(), published.target.clone()));
        let (received, runs) = in_container(self.sandbox, mounts, read_and_run).await?;
        pod.unpublish("program")
            .await
            .map_err(Error::refused("unpublish the program in the other pool"))?;
        let dir = pod.dir();
        pod.remove()
            .map_err(|source| Error::io("remove the pod's directory", dir, source))?;
        self.finish(step, true).await?;
        Ok((received, runs, published.took))
    }
}

/// Runs a command to its end; returns its output and its duration.
async fn run(mut command: Command) -> Result<(Vec<u8>, Duration), Error> {
    on_thread(move || {
        let began = Instant::now();
        let output = crate::demo::step::output(&mut command)?;
        Ok((output.stdout, began.elapsed()))
    })
    .await
}
