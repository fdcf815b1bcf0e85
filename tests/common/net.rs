//! Network namespaces: programs that run there, and the commands of `ip` that connect them.

use std::io::Read as _;
use std::process::{Child, Command, Stdio};

/// A network namespace, for as long as its process lives.
#[derive(Debug)]
pub struct Namespace(Child);

impl Namespace {
    /// A new one without any link that is up.
    pub fn new() -> Self {
        let mut child = Command::new("unshare")
            .args(["--net", "sh", "-c", "echo; exec sleep infinity"])
            .stdout(Stdio::piped())
            .spawn()
            .expect("unshare runs");
        let mut made = [0];
        let output = child.stdout.as_mut().expect("a pipe");
        output.read_exact(&mut made).expect("a network namespace");
        Self(child)
    }

    /// The process that keeps it.
    pub fn id(&self) -> u32 {
        self.0.id()
    }

    /// The path by which others enter it.
    pub fn path(&self) -> String {
        format!("/proc/{}/ns/net", self.id())
    }

    /// The command of a program that runs in it.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.args([&*format!("--net={}", self.path()), "--", program]);
        command
    }

    /// Runs `ip`.
    pub fn ip(&self, arguments: &str) {
        let mut command = self.command("ip");
        let ended = command.args(arguments.split(' ')).status();
        assert!(ended.expect("ip runs").success(), "ip {arguments}");
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ended = self.0.kill();
        let _ended = self.0.wait();
    }
}
