//! Publishes of content that is on a node of a cluster: with a controller, without one, and with
//! one that hangs. The drivers are real, with their agents, and so is the controller's part
//! (`hub`). The API server is a small one of this file: it has no objects but the node's own `Pool`
//! and the entry of the controller, and it answers only what a node asks for.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::cases::{Bench, make_files};
use crate::driver::Driver;
use crate::hub::Controller;
use crate::nodes::until;
use crate::table::Goal;

/// How long a node may take until the controller hears it.
const PATIENCE: Duration = Duration::from_secs(60);
/// What a node keeps of the cache policies of a cluster that has none. A node that never had any
/// holds its commits, and pods that wait for them.
const POLICIES: &str = r#"{"format":1,"namespaces":{}}"#;
/// The names of the drivers: of a node alone, and of nodes of a cluster. They are part of the paths
/// of sockets, which have at most 107 bytes.
const NODES: [&str; 4] = ["off", "solo", "on", "hung"];

/// What an API server has.
#[derive(Default)]
struct Objects {
    /// The status of the node's `Pool`.
    pool: Value,
    /// The entry of the controller.
    controller: Option<Value>,
}

/// An API server for one node.
pub struct ApiServer {
    objects: Arc<(Mutex<Objects>, Condvar)>,
    kubeconfig: PathBuf,
}

impl ApiServer {
    /// Starts one for the node of this name. It runs until the end of the process.
    pub fn start(dir: &Path, node: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let kubeconfig = dir.join(format!("{node}.kubeconfig"));
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": {"server": format!("http://{address}")}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
        });
        fs::write(&kubeconfig, config.to_string()).expect("write");
        let objects = Arc::<(Mutex<Objects>, Condvar)>::default();
        let shared = Arc::clone(&objects);
        // Threads, since a turn of calls blocks the runtime. They end with the process.
        std::thread::spawn(move || {
            for connection in listener.incoming().flatten() {
                let shared = Arc::clone(&shared);
                std::thread::spawn(move || drop(answer(connection, &shared)));
            }
        });
        Self {
            objects,
            kubeconfig,
        }
    }

    /// Its kubeconfig.
    pub fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    /// Waits until the node has published this.
    fn published(&self, what: impl Fn(&Value) -> bool) -> Value {
        let (objects, changed) = &*self.objects;
        let until = Instant::now() + PATIENCE;
        let mut now = objects.lock().expect("no panic");
        while !what(&now.pool) {
            let left = until.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "the node has published {}", now.pool);
            now = changed.wait_timeout(now, left).expect("no panic").0;
        }
        now.pool.clone()
    }

    /// Starts a controller that knows this node, and tells the node where it is.
    fn starts_controller(&self, dir: &Path, node: &str) -> Controller {
        let pool = self.published(|pool| pool["peer"]["key"].is_string());
        let members = dir.join(format!("{node}.members"));
        let key = pool["peer"]["key"].as_str().expect("text");
        fs::write(&members, format!("{node} {key}\n")).expect("write");
        let controller = Controller::start(&members);
        let entry = json!({
            "apiVersion": "v1", "kind": "ConfigMap",
            "metadata": {"name": "baggageclaim-controller", "namespace": "default",
                "resourceVersion": "2"},
            "data": {"address": controller.address, "key": controller.key.to_string(),
                "began": "1"},
        });
        let (objects, changed) = &*self.objects;
        objects.lock().expect("no panic").controller = Some(entry);
        changed.notify_all();
        self.published(|pool| pool["peer"]["catalog"] == true);
        controller
    }
}

/// Answers one request.
fn answer(
    mut connection: TcpStream,
    (objects, changed): &(Mutex<Objects>, Condvar),
) -> std::io::Result<()> {
    let mut bytes = Vec::new();
    let mut part = [0; 4096];
    let end = loop {
        if let Some(end) = bytes.windows(4).position(|four| four == b"\r\n\r\n") {
            break end + 4;
        }
        match connection.read(&mut part)? {
            0 => return Ok(()),
            read => bytes.extend_from_slice(&part[..read]),
        }
    };
    let head = String::from_utf8_lossy(&bytes[..end]).to_lowercase();
    let target = head.split(' ').nth(1).unwrap_or_default().to_owned();
    let length = head
        .lines()
        .find_map(|line| line.strip_prefix("content-length:"));
    let length: usize = length.map_or(0, |length| length.trim().parse().expect("a length"));
    while bytes.len() < end + length {
        match connection.read(&mut part)? {
            0 => return Ok(()),
            read => bytes.extend_from_slice(&part[..read]),
        }
    }
    if target.contains("watch=") {
        let entries = target.contains("/configmaps");
        connection.write_all(b"HTTP/1.1 200 X\r\ncontent-type: application/json\r\n\r\n")?;
        let mut now = objects.lock().expect("no panic");
        while !(entries && now.controller.is_some()) {
            now = changed.wait(now).expect("no panic");
        }
        let event = json!({"type": "ADDED", "object": now.controller});
        connection.write_all(format!("{event}\n").as_bytes())?;
        drop(now);
        // Nothing else happens.
        while connection.read(&mut part)? > 0 {}
        return Ok(());
    }
    let (code, body) = if head.starts_with("patch ") && target.contains("/pools/") {
        let patch: Value = serde_json::from_slice(&bytes[end..]).expect("JSON");
        let status = patch["status"].clone();
        objects.lock().expect("no panic").pool = status.clone();
        changed.notify_all();
        let name = target
            .split(['/', '?'])
            .skip_while(|it| *it != "pools")
            .nth(1);
        let pool = json!({
            "apiVersion": "baggageclaim.concourse-ci.org/v1alpha1", "kind": "Pool",
            "metadata": {"name": name, "resourceVersion": "2"}, "spec": {}, "status": status,
        });
        (200, pool)
    } else if head.starts_with("get ") {
        let list = json!({
            "apiVersion": "v1", "kind": "List", "metadata": {"resourceVersion": "1"}, "items": [],
        });
        (200, list)
    } else {
        let gone = json!({
            "apiVersion": "v1", "kind": "Status", "metadata": {}, "status": "Failure",
            "reason": "NotFound", "message": "it is not here", "code": 404,
        });
        (404, gone)
    };
    let body = body.to_string();
    let head = format!(
        "HTTP/1.1 {code} X\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\
         connection: close\r\n\r\n",
        body.len()
    );
    connection.write_all((head + &body).as_bytes())
}

impl Bench<'_> {
    /// Publishes of content on this node, by nodes of a cluster.
    pub async fn local_in_a_cluster(&mut self) {
        let dir = self.lab.run_dir();
        let servers = NODES.map(|node| ApiServer::start(&dir, node));
        let mut drivers = Vec::new();
        for (node, server) in NODES.iter().zip(&servers) {
            let pool = self.lab.dir(node);
            fs::write(pool.join("policies.json"), POLICIES).expect("write");
            let port = TcpListener::bind("127.0.0.1:0").expect("a port");
            let address = port.local_addr().expect("an address").to_string();
            drop(port);
            let flags: &[&str] = if *node == NODES[0] {
                &["--cluster", "off"]
            } else {
                &["--cluster", "on", "--peer-listen", &address]
            };
            drivers.push(Driver::node(self.lab, node, &server.kubeconfig, flags).await);
        }
        // They run until the end.
        let [_on, hung] = [2, 3].map(|at| servers[at].starts_controller(&dir, NODES[at]));
        let mut drivers: [Driver; 4] = drivers.try_into().unwrap_or_else(|_| unreachable!());
        for driver in &mut drivers {
            // The API server knows no pod that could succeed.
            let output = [("type", "output"), ("name", "kept"), ("commit", "always")];
            driver.seal(&output, |dir| make_files(dir, 1)).await;
            until(driver, "artifact/kept", |row| row.durable).await;
        }
        hung.hang();
        let input = [("type", "input"), ("from", "artifact/kept")];
        let took = self.in_turns(&mut drivers, &input, self.plan.turn).await;
        for (what, ours) in [
            ("without a controller", took[1]),
            ("with a controller", took[2]),
            ("with a controller that hangs", took[3]),
        ] {
            let name = format!("publish of an input on this node of a cluster, {what}");
            self.row(&name, "us", ours, Some(took[0]), Goal::Ratio(1.02));
        }
        drivers.into_iter().for_each(Driver::stop);
    }
}
