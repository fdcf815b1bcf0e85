//! The part of the pipeline in another pool: the program leaves as an archive, comes in by its
//! digest, and runs there. The commands are run as a person would run them, and timed.

#![expect(
    clippy::disallowed_types,
    reason = "export and import are shown as people run them: as commands"
)]

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use super::{PROGRAM, Pipeline, SOURCES};
use crate::demo::driver::Driver;
use crate::demo::report::{bytes, seconds};
use crate::demo::step::{in_room, on_thread};
use crate::demo::tree::{Fingerprint, content};
use crate::demo::{Error, Options, project};
use baggageclaim::kubelet_double::{Kubelet, PublishOptions};

impl Pipeline<'_> {
    /// Copies the program to a fresh pool with a driver of its own, and runs it there.
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
        let (here, there) = (self.stage.place(), self.stage.second_place()?);
        let archive = there.archive.clone();
        let (driver, kubelet) = Driver::start(&there, options).await?;
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
            super::micros(fork),
        ));
        self.claim(
            received == built && runs == said && !digest.is_empty(),
            "an artifact goes to another pool as an archive, byte for byte, and the program in it runs there",
            format!("{}, {}", bytes(built.bytes), digest.get(..19).unwrap_or("no digest")),
        );
        Ok(())
    }

    /// Runs the program of the other pool over the sources of this one: what it holds, what it
    /// says, and what its fork took.
    async fn run_there(
        &mut self,
        kubelet: &Kubelet,
    ) -> Result<(Fingerprint, String, Duration), Error> {
        let mut step = self.step("copy");
        self.mount(
            &mut step,
            "src",
            &["type=input", &format!("from={SOURCES}")],
        )
        .await?;
        let pod = kubelet.pod(&self.namespace, "copy");
        let input = [("type", "input"), ("from", PROGRAM)];
        let published = pod.publish("program", input, PublishOptions::default());
        let published = published
            .await
            .map_err(Error::refused("publish the program in the other pool"))?;
        let mut mounts = step.mounts();
        mounts.push(("program".to_owned(), published.target.clone()));
        let (received, runs) = in_room(self.stage, mounts, |room| {
            Ok((
                content(&room.volume("program"))?,
                project::run(room, "program")?,
            ))
        })
        .await?;
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

/// Runs a command to its end; what it printed, and how long it took.
async fn run(mut command: Command) -> Result<(Vec<u8>, Duration), Error> {
    on_thread(move || {
        let began = Instant::now();
        let output = crate::demo::step::output(&mut command)?;
        Ok((output.stdout, began.elapsed()))
    })
    .await
}
