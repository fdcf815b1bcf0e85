//! A long step: a pod that runs until it is told to end, for cases that change its environment. Its
//! data stays visible, each volume is mounted once, and all its data is kept afterwards.

use std::fmt::Write as _;

use crate::cluster::eventually;
use crate::env::Env;

const CACHE: &str = "task-cache/long-step";

/// The pod of `long-step.yaml`: with a cache and an output, and a scratch volume where it looks for
/// the file `end`.
pub(crate) struct Step<'a> {
    env: &'a Env<'a>,
    name: &'a str,
    uid: String,
    /// The lines added to its output; each has their number.
    added: String,
}

impl<'a> Step<'a> {
    /// One that is made, and starts when it can.
    pub(crate) fn comes(env: &'a Env, name: &'a str) -> Self {
        env.apply_with("long-step.yaml", &[("NAME", name)]);
        Self {
            env,
            name,
            uid: env.uid(name),
            added: String::new(),
        }
    }

    /// One that has written what it begins with.
    pub(crate) fn runs(env: &'a Env, name: &'a str) -> Self {
        let step = Self::comes(env, name);
        env.ready(name);
        step
    }

    pub(crate) fn uid(&self) -> &str {
        &self.uid
    }

    /// It has its volumes, each of them once, and in them all that it wrote; and one line more is
    /// written.
    pub(crate) fn works(&mut self) {
        let line = self.added.lines().count() + 1;
        let _ = writeln!(self.added, "{line}");
        let look = format!(
            "cat /cache/begun /out/begun; echo {line} >> /out/more; cat /out/more; mount | grep -cE ' /(cache|out|scratch) '"
        );
        assert_eq!(
            self.env.exec(self.name, &look),
            format!("{}\nbegun\n{}3\n", self.name, self.added)
        );
        assert_eq!(
            self.env.mounted(&self.uid),
            ["cache", "out", "scratch"],
            "{}",
            self.name
        );
    }

    /// It is told to end, and ends well.
    pub(crate) fn ends(self) {
        self.env.exec(self.name, "touch /scratch/end");
        self.ended();
    }

    /// The same from outside, for a pod that cannot exec. It may take its time.
    pub(crate) fn told_to_end(&self) {
        self.env.touch_from_outside(&self.uid, "scratch", "end");
    }

    /// It has ended well: what it wrote all the time is kept, to the letter.
    pub(crate) fn ended(self) {
        self.env.succeeded(self.name);
        let output = format!("artifact/{}", self.name);
        eventually("all of it is sealed", || {
            let volumes = self.env.list("volumes");
            let mut left = volumes
                .iter()
                .filter(|volume| volume["pod"]["uid"] == *self.uid);
            left.next().is_none().then_some(())
        });
        let name = format!("{}\n", self.name);
        let mut files = vec![
            (&*output, "begun", "begun\n"),
            (&*output, "more", &*self.added),
            (CACHE, "begun", &*name),
        ];
        files.retain(|(_, _, content)| !content.is_empty());
        self.env.hold(&files);
    }
}
