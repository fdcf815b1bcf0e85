//! Two network namespaces on one veth link. The first node of a family of rows is on one side, and
//! all others are on the other side. The rivals of a transfer use the link, too.

use std::cell::Cell;
use std::fs::File;
use std::net::{TcpListener, TcpStream};
use std::process::Command;

use nix::sched::{CloneFlags, setns};

use crate::common::net::Namespace;

/// The first port. Nothing else listens in a new namespace.
const PORT: u16 = 9810;

/// A side of a link.
#[derive(Debug, Clone, Copy)]
pub enum Side {
    Near,
    Far,
}

/// The link.
#[derive(Debug)]
pub struct Link {
    near: Namespace,
    far: Namespace,
    port: Cell<u16>,
}

impl Link {
    pub fn new() -> Self {
        let link = Self {
            near: Namespace::new(),
            far: Namespace::new(),
            port: Cell::new(PORT),
        };
        let far = link.far.id();
        link.near.ip(&format!(
            "link add uplink type veth peer name uplink netns {far}"
        ));
        for side in [Side::Near, Side::Far] {
            let (namespace, address) = link.of(side);
            namespace.ip(&format!("address add {address}/24 dev uplink"));
            namespace.ip("link set uplink up");
            namespace.ip("link set lo up");
        }
        link
    }

    fn of(&self, side: Side) -> (&Namespace, &'static str) {
        match side {
            Side::Near => (&self.near, "10.98.0.1"),
            Side::Far => (&self.far, "10.98.0.2"),
        }
    }

    /// A new address on this side.
    pub fn address(&self, side: Side) -> String {
        let port = self.port.get();
        self.port.set(port + 1);
        format!("{}:{port}", self.of(side).1)
    }

    /// The command of a program that runs on this side.
    pub fn command(&self, side: Side, program: &str) -> Command {
        self.of(side).0.command(program)
    }

    /// Takes connections on this side.
    pub fn listen(&self, side: Side) -> TcpListener {
        let address = self.address(side);
        self.inside(side, || TcpListener::bind(address).expect("a port"))
    }

    /// A connection from the near side to the far side.
    pub fn connection(&self) -> (TcpStream, TcpStream) {
        let listener = self.listen(Side::Far);
        let address = listener.local_addr().expect("an address");
        let near = self.inside(Side::Near, || TcpStream::connect(address).expect("connect"));
        let (far, _) = listener.accept().expect("accept");
        (near, far)
    }

    /// Runs a job on a thread that is on this side. A socket stays where it was made.
    fn inside<T: Send>(&self, side: Side, job: impl FnOnce() -> T + Send) -> T {
        let namespace = File::open(self.of(side).0.path()).expect("open");
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                setns(namespace, CloneFlags::CLONE_NEWNET).expect("setns");
                job()
            });
            thread.join().expect("no panic")
        })
    }
}
