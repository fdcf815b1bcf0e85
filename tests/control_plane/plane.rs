//! A control plane without kubelets: a real etcd and a real kube-apiserver on free ports, with the
//! definitions of deploy/crds. The programs are those that `make e2e` builds; `E2E_BIN` names their
//! directory.

use std::fs::{self, File};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use rustix::process::{Pid, Signal, kill_process};

/// The longest start of a control plane on a busy machine.
const PATIENCE: Duration = Duration::from_secs(90);

/// A process that ends with its owner.
pub(crate) struct Daemon(pub(crate) Child);

impl Drop for Daemon {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A control plane; it ends when it is dropped.
pub(crate) struct ControlPlane {
    /// etcd, and the API server.
    daemons: [Daemon; 2],
    pub(crate) directory: tempfile::TempDir,
    pub(crate) kubeconfig: PathBuf,
    pub(crate) client: Client,
}

/// The directory of the programs; `None`: they are not there.
pub(crate) fn programs() -> Option<PathBuf> {
    let directory = std::env::var_os("E2E_BIN").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("target/e2e/bin"),
        PathBuf::from,
    );
    directory
        .join("kube-apiserver")
        .exists()
        .then_some(directory)
}

pub(crate) fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("an address").port()
}

/// A program of the control plane. It ends with the thread that starts it.
pub(crate) fn program(directory: &Path, name: &str) -> Command {
    let mut command = Command::new("setpriv");
    command
        .args(["--pdeathsig", "KILL", "--"])
        .arg(programs().expect("they were there").join(name))
        .current_dir(directory)
        .stdin(Stdio::null());
    command
}

pub(crate) fn daemon(directory: &Path, name: &str, arguments: &[String]) -> Daemon {
    let log = File::create(directory.join(format!("{name}.log"))).expect("a log");
    let child = program(directory, name)
        .args(arguments)
        .stdout(log.try_clone().expect("dup"))
        .stderr(log)
        .spawn();
    Daemon(child.expect("setpriv of util-linux"))
}

fn run(command: &mut Command) {
    let output = command.output().expect("the program runs");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {text}");
}

impl ControlPlane {
    /// Starts one. `None`, said loudly, if there are no programs.
    pub(crate) async fn start() -> Option<Self> {
        if programs().is_none() {
            crate::common::skip(
                "no kube-apiserver: `make e2e` builds it, or E2E_BIN names its directory",
            );
            return None;
        }
        let directory = tempfile::tempdir().expect("a temporary directory");
        let at = directory.path();
        let (etcd, peer, api) = (free_port(), free_port(), free_port());
        let etcd_daemon = daemon(
            at,
            "etcd",
            &[
                "--data-dir=etcd".to_owned(),
                "--unsafe-no-fsync".to_owned(),
                "--log-level=warn".to_owned(),
                format!("--listen-client-urls=http://127.0.0.1:{etcd}"),
                format!("--advertise-client-urls=http://127.0.0.1:{etcd}"),
                format!("--listen-peer-urls=http://127.0.0.1:{peer}"),
                format!("--initial-advertise-peer-urls=http://127.0.0.1:{peer}"),
                format!("--initial-cluster=default=http://127.0.0.1:{peer}"),
            ],
        );
        let openssl = |arguments: &[&str]| {
            run(Command::new("openssl").args(arguments).current_dir(at));
        };
        openssl(&[
            "ecparam",
            "-name",
            "prime256v1",
            "-genkey",
            "-noout",
            "-out",
            "tokens.key",
        ]);
        openssl(&["ec", "-in", "tokens.key", "-pubout", "-out", "tokens.pub"]);
        fs::write(at.join("tokens.csv"), "secret,admin,admin,system:masters\n").expect("write");
        let api_daemon = daemon(
            at,
            "kube-apiserver",
            &[
                format!("--etcd-servers=http://127.0.0.1:{etcd}"),
                "--bind-address=127.0.0.1".to_owned(),
                format!("--secure-port={api}"),
                "--cert-dir=certificates".to_owned(),
                "--token-auth-file=tokens.csv".to_owned(),
                "--authorization-mode=RBAC".to_owned(),
                "--disable-admission-plugins=ServiceAccount".to_owned(),
                "--service-cluster-ip-range=10.96.0.0/16".to_owned(),
                "--service-account-issuer=https://kubernetes.default.svc".to_owned(),
                "--service-account-key-file=tokens.pub".to_owned(),
                "--service-account-signing-key-file=tokens.key".to_owned(),
            ],
        );
        let kubeconfig = at.join("kubeconfig");
        let text = format!(
            "{{apiVersion: v1, kind: Config, current-context: c, \
             contexts: [{{name: c, context: {{cluster: c, user: admin}}}}], \
             clusters: [{{name: c, cluster: {{server: 'https://127.0.0.1:{api}', insecure-skip-tls-verify: true}}}}], \
             users: [{{name: admin, user: {{token: secret}}}}]}}\n"
        );
        fs::write(&kubeconfig, text).expect("write");
        let read = Kubeconfig::read_from(&kubeconfig).expect("a kubeconfig");
        let config = Config::from_custom_kubeconfig(read, &KubeConfigOptions::default()).await;
        let client = Client::try_from(config.expect("a configuration")).expect("a client");
        let plane = Self {
            daemons: [etcd_daemon, api_daemon],
            directory,
            kubeconfig,
            client,
        };
        plane.wait_until_ready().await;
        plane.define();
        Some(plane)
    }

    /// With `STOP` the API server answers nothing more, until `CONT`.
    pub(crate) fn signal_server(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.daemons[1].0), signal).expect("kill");
    }

    async fn wait_until_ready(&self) {
        let began = Instant::now();
        loop {
            let request = hyper::Request::get("/readyz")
                .body(Vec::new())
                .expect("valid");
            match self.client.request_text(request).await {
                Ok(_) => return,
                Err(error) if began.elapsed() > PATIENCE => {
                    let log = self.directory.path().join("kube-apiserver.log");
                    let log = fs::read_to_string(log).unwrap_or_default();
                    panic!("the API server does not get ready: {error}\n{log}");
                }
                // It has no event to wait for.
                Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
            }
        }
    }

    /// Defines our kinds.
    pub(crate) fn define(&self) {
        let crds = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/crds/crds.yaml");
        self.kubectl(&["apply", "--filename", crds.to_str().expect("text")]);
        let wait = [
            "wait",
            "--for=condition=Established",
            "--timeout=60s",
            "--filename",
        ];
        self.kubectl(&[&wait[..], &[crds.to_str().expect("text")]].concat());
    }

    /// Runs kubectl, and returns what it prints.
    pub(crate) fn kubectl(&self, arguments: &[&str]) -> String {
        let (done, said) = self.try_kubectl(arguments);
        assert!(done, "kubectl {arguments:?}: {said}");
        said
    }

    /// Deletes an object for good: no controller manager is there to remove its finalizers.
    pub(crate) fn delete(&self, kind: &str, name: &str) {
        self.kubectl(&["delete", kind, name, "--wait=false"]);
        let none = r#"--patch={"metadata": {"finalizers": null}}"#;
        // It is gone already if it had none.
        self.try_kubectl(&["patch", kind, name, "--type=merge", none]);
    }

    /// Makes an object.
    pub(crate) fn apply(&self, name: &str, text: &str) {
        let path = self.directory.path().join(format!("{name}.yaml"));
        fs::write(&path, text).expect("write");
        self.kubectl(&["apply", "--filename", path.to_str().expect("text")]);
    }

    /// Runs kubectl, and returns whether it succeeded and what it printed.
    pub(crate) fn try_kubectl(&self, arguments: &[&str]) -> (bool, String) {
        let output = Command::new(programs().expect("they were there").join("kubectl"))
            .arg("--kubeconfig")
            .arg(&self.kubeconfig)
            .args(arguments)
            .output()
            .expect("kubectl runs");
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8_lossy(&said).into_owned();
        (output.status.success(), said)
    }
}
