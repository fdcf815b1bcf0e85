//! The verbs of the command line, their help, and most of their flags. `run` has what each verb
//! does. The flags of a verb with a file of its own are in that file.

use clap::{Args, Parser, Subcommand, ValueEnum};

use super::namespace::Namespace;
use super::{cluster, generations, shared, transfer};
use crate::config;
use crate::model::{PodUid, Reference, Tenant};

/// One line per paragraph: clap wraps it to the width of the terminal.
const LONG_ABOUT: &str = "\
Copy-on-write volumes for the steps of CI pipelines.

The pod of a step names a volume type in its spec and gets a private, writable view at once: the \
output of another step (input), a volume whose content outlives the pod (output), content that is \
fetched once (resource cache), the newest commit of a cache (task cache), or an empty volume \
(scratch). The orchestrator calls the driver through CSI.

An artifact is sealed content, which never changes. A volume is the working copy of a pod. To fork \
is to make a volume from an artifact; to seal is to make an artifact from a volume.";

const AFTER_LONG_HELP: &str = "\
Examples:
  Serve a pool on this machine:
    baggageclaim standalone --pool /var/lib/baggageclaim --socket /run/baggageclaim/csi.sock
  List volumes and caches:
    baggageclaim volumes
    baggageclaim caches -n ci -o json
  Report how a pod ended, so that its outputs are kept:
    baggageclaim outcome 0f8fad5b-d9cb-469f-a165-70867728950e succeeded
  Copy content out of the pool, and into it:
    baggageclaim export artifact/build-42 -n ci -o build-42.tar.zst
    baggageclaim import build-42.tar.zst --as artifact/build-42 -n ci
  Delete a task cache with bad content:
    baggageclaim destroy task-cache/go-build -n ci

Exit codes:
  0  success
  1  failure; `check`: there are findings
  2  wrong command line
  3  no driver answers, or no controller

docs/cli.md and docs/on-disk.md of the source describe the commands and the formats.";

const EXPORT_EXAMPLES: &str = "\
Examples:
  Keep a build's output in a file:
    baggageclaim export artifact/build-42 -n ci -o build-42.tar.zst
  Look into it:
    baggageclaim export artifact/build-42 -n ci | tar -tv
  Copy a cache to another node:
    baggageclaim export task-cache/go-build -n ci --format tar.zst |
      ssh root@node-2 baggageclaim import - --as task-cache/go-build -n ci";

const IMPORT_EXAMPLES: &str = "\
Examples:
  Make a file an input that steps can name as `from: artifact/tools`:
    baggageclaim import tools.tar.gz --as artifact/tools -n ci
  Make sure that it is the right one, by what `sha256sum` says of it:
    baggageclaim import tools.tar.gz --as artifact/tools -n ci --digest sha256:DIGITS
  Fill a cache with a directory:
    tar -C node_modules -c . | baggageclaim import - --as task-cache/npm -n ci";

const CLEAR_EXAMPLES: &str = "\
Examples:
  With your kubeconfig, as kubectl uses it:
    baggageclaim clear task-cache/main -n ci
  All task caches of pull requests:
    baggageclaim clear --prefix task-cache/pr- -n ci
  As an administrator, in the controller's pod, also for an output:
    kubectl exec -n baggageclaim deploy/baggageclaim-controller -c controller -- \\
      /baggageclaim clear artifact/build-42 -n ci";

const LOG_EXAMPLES: &str = "\
Examples:
  baggageclaim log task-cache/go-build -n ci
  On all nodes:
    kubectl exec -n baggageclaim deploy/baggageclaim-controller -c controller -- \\
      /baggageclaim log --cluster task-cache/go-build -n ci";

/// Copy-on-write volumes for the steps of CI pipelines
#[derive(Debug, Parser)]
#[command(
    name = "baggageclaim",
    version,
    long_about = LONG_ABOUT,
    after_long_help = AFTER_LONG_HELP,
    after_help = "More, with examples: `baggageclaim --help`. \
        About one verb: `baggageclaim VERB --help`.",
    subcommand_value_name = "VERB",
    subcommand_help_heading = "Verbs",
    disable_help_subcommand = true,
    max_term_width = 100
)]
pub(super) struct Cli {
    #[command(subcommand)]
    pub(super) verb: Verb,
}

#[derive(Debug, Subcommand)]
pub(super) enum Verb {
    /// Serve a pool on this machine, without Kubernetes
    ///
    /// Opens the pool, and makes it if its directory is missing or empty. Recovers what an earlier
    /// process left. Then serves CSI on a unix socket: Identity, Node and, unless `--controller
    /// off`, Controller and GroupController. Needs root. Only one process at a time can open a
    /// pool.
    ///
    /// On SIGTERM or SIGINT the driver answers the running calls within the grace period and ends.
    /// Mounts stay. A second signal ends it at once. That is safe: everything that was acknowledged
    /// is on disk.
    #[command(after_long_help = "\
Example:
  baggageclaim standalone --pool /srv/pool --socket /run/baggageclaim/csi.sock --backend overlay

Report how each pod ended; nothing else tells the driver here: \
baggageclaim outcome POD_UID succeeded")]
    Standalone(Box<config::Standalone>),

    /// Serve one node of a Kubernetes cluster
    ///
    /// Opens the pool, and makes it if its directory is missing or empty. Recovers what an earlier
    /// process left. Then serves the CSI services Identity and Node (`controller` and `standalone`
    /// have the Controller), and registers with the kubelet of this node, again after kubelet
    /// restarts or refuses. Serves health and metrics over HTTP. Needs root, and kubelet's
    /// directory at the path by which kubelet knows it.
    ///
    /// On SIGTERM or SIGINT the driver withdraws its registration, answers the running calls within
    /// the grace period and ends. Mounts stay: running pods go on, and the next process takes the
    /// mounts over. A second signal ends it at once. That is safe: everything that was acknowledged
    /// is on disk.
    #[command(after_long_help = "\
Example:
  baggageclaim node --pool /var/lib/baggageclaim --node-id \"$NODE_NAME\"")]
    Node(Box<config::Node>),

    /// Serve a whole Kubernetes cluster: persistent volumes, catalog, policies
    ///
    /// Serves the CSI services Identity, Controller and GroupController for the sidecars
    /// csi-provisioner, csi-snapshotter and csi-resizer in the same pod. Asks the nodes by the
    /// objects Volume, Snapshot and Pool; each node runs `baggageclaim node --cluster on`.
    ///
    /// With `--hub-listen` it keeps the catalog of the content of all nodes, and carries out cache
    /// policies, clears and rollbacks. With `--shared` it collects the garbage of the shared tier.
    /// With `--webhook-listen` it serves the webhook for locality. Needs no pool and no privilege.
    #[command(after_long_help = "\
Example:
  baggageclaim controller --socket /run/csi/csi.sock")]
    Controller(Box<config::Controller>),

    /// Print the definitions of the objects for Kubernetes, as in deploy/crds
    #[command(hide = true)]
    Crds,

    /// Print what turns locality on: objects for `kubectl apply`
    ///
    /// Prints the Secret `baggageclaim-locality` with a new key and certificate for the controller,
    /// and the MutatingWebhookConfiguration by which the API server calls the controller when a pod
    /// is created. The pod then prefers the nodes that have its content. The output is secret.
    ///
    /// Each run makes a new key: apply its output to replace the one before. The controller needs
    /// `--webhook-listen`, which deploy/components/locality sets.
    #[command(after_long_help = "\
Example:
  baggageclaim locality | kubectl apply -f -")]
    Locality(Locality),

    /// Run a pipeline with real trees, and show what it costs
    ///
    /// Starts a driver on a filesystem of its own and calls it as kubelet does. One step fetches a
    /// tree. Others change it without seeing each other's changes. One compiles a program, the next
    /// runs it. A second build uses the cache of the first. Takes less than two minutes. Exits with
    /// 0 only if every claim on the screen was verified.
    ///
    /// Needs root. Makes all mounts in a mount namespace of its own, and leaves nothing behind.
    ///
    /// With `--pool` and the backend btrfs or copy, the space that a fork alone takes is unknown.
    /// Then each row shows `shared`, and the demo does not verify that a fork is no copy.
    Demo(config::Demo),

    /// List the volumes: the working copies of pods
    ///
    /// SIZE is the space that the volume takes on disk at its last measurement, without what it
    /// shares with its parent. Listing starts new measurements in the background where SIZE is `-`
    /// or old: list again to see them.
    ///
    /// STATE is preparing, fetching (the publish waits for content of a peer or the shared tier),
    /// published (mounted for a pod), unpublished (the same pod may mount it again),
    /// awaiting-outcome (the pod is done, its outcome is unknown), in-use (the pod is done, but a
    /// process still has files open), or sealing.
    Volumes(List),

    /// List the artifacts: sealed content, and the names that point at it
    ///
    /// REFERENCE is the value for `from` of an input. An artifact without one was replaced by newer
    /// content, and is deleted when no volume uses it any more.
    Artifacts(List),

    /// List the caches
    ///
    /// A resource cache keeps its first content, a task cache its newest. AGE is the age of that
    /// content.
    ///
    /// With `--cluster` it lists the caches of all nodes, and the nodes that have them. That asks
    /// the controller, so run it in the controller's pod.
    #[command(after_long_help = "\
Example:
  kubectl exec -n baggageclaim deploy/baggageclaim-controller -c controller -- \\
    /baggageclaim caches --cluster -n ci")]
    Caches(Caches),

    /// Show which nodes have the content of a name
    ///
    /// Asks the controller of a cluster whose nodes are peers, so run it in the controller's pod.
    ///
    /// STATE is current (the newest content, or the first of a resource cache), other (older, or
    /// later), cleared, or coming (a pod there may commit it). If a node is not CONNECTED to the
    /// controller, the controller forgets what it has after 2 minutes.
    #[command(after_long_help = "\
Example:
  kubectl exec -n baggageclaim deploy/baggageclaim-controller -c controller -- \\
    /baggageclaim explain task-cache/main -n ci")]
    Explain(cluster::Explain),

    /// Clear a cache or an output on all nodes of the cluster
    ///
    /// The order goes through the API server, with your rights. You need the right to create and
    /// delete Cache objects in the namespace; the roles edit and admin have it. To check: `kubectl
    /// auth can-i delete caches.baggageclaim.concourse-ci.org -n NAMESPACE`. The command makes a
    /// Cache object and deletes it: that is the order, and the controller carries it out. Only
    /// administrators clear outputs, in the controller's pod.
    ///
    /// Nodes with a connection to the controller clear it at once, and the others before their
    /// content counts again. No node is waited for. A step that began before the clear does not
    /// commit its content under a cleared name. It does no harm to clear a name twice, or one
    /// without content, so a name that is spelled wrong is no error. In the controller's pod the
    /// command says if no node was known to have content of the name.
    ///
    /// Needs a cluster whose nodes are peers (docs/peers.md).
    #[command(after_long_help = CLEAR_EXAMPLES)]
    Clear(cluster::Clear),

    /// Show one volume or artifact with all its fields
    ///
    /// Exits with 1 if none matches, or more than one; then add `-n` or use a longer id.
    #[command(after_long_help = "\
Examples:
  baggageclaim inspect task-cache/go-build -n ci
  baggageclaim inspect 4f0c2a -o json")]
    Inspect(Inspect),

    /// Report how a pod ended
    ///
    /// The driver seals outputs and caches with `commit: on-success` if their pod succeeded, and
    /// discards them otherwise. Without Kubernetes only this command tells it. The first report
    /// wins. Report after the volumes are published, and at the latest `--outcome-wait` after they
    /// are unpublished.
    ///
    /// Exits with 1 if the pod has no such volumes, or if the other outcome was reported before.
    Outcome(Outcome),

    /// Delete an artifact or a cache by its name
    ///
    /// An output is refused while volumes are forks of it. A cache loses its name at once, and its
    /// content when the last fork of it is gone. A running step with such a fork is not fenced: if
    /// it succeeds, it commits the old content with its changes under the same name. So end those
    /// steps before you delete a cache with bad content. `clear` does it for all nodes of a
    /// cluster, and fences those steps.
    Destroy(Destroy),

    /// Show the content that a name has and had on this node, with its authors
    ///
    /// Lists the artifacts that were sealed under the name and are still there, the newest first.
    /// An earlier one is there only while volumes are forks of it. CURRENT tells which one the name
    /// points at.
    ///
    /// With `--cluster` it lists those of all nodes: ON is the node that has it, NODE the one that
    /// committed it, and PARENT what it was a fork of. That asks the controller, so run it in the
    /// controller's pod. The nodes that do not answer are named on stderr.
    #[command(after_long_help = LOG_EXAMPLES)]
    Log(generations::Log),

    /// Commit earlier content of a name once more
    ///
    /// The earlier artifact must still be there: see `log`. The name gets its content as a new
    /// artifact, dated now. Nothing is copied. It ends when the new artifact is durable. A resource
    /// cache keeps its first content, and is refused.
    ///
    /// Without `--cluster` it works on this node alone. Nodes that have content of a task cache use
    /// their own. Steps that run may commit the content that you want to leave behind.
    ///
    /// In a cluster whose nodes are peers, use `--cluster`: all nodes then lose the later content.
    /// Do not run `clear` first. It deletes earlier artifacts that no volume uses, and `--cluster`
    /// refuses what was cleared.
    #[command(after_long_help = "\
Examples:
  baggageclaim rollback task-cache/go-build --to 4f0c2a -n ci
  baggageclaim rollback --cluster task-cache/go-build --to 4f0c2a -n ci")]
    Rollback(generations::Rollback),

    /// Write an artifact, a cache or a volume as an archive
    ///
    /// The archive is a tar stream (POSIX pax) that GNU tar reads, with owners, times, holes,
    /// extended attributes and ACLs. The same content gives the same stream, so its SHA-256 names
    /// the content: it is told at the end, and by `inspect` from then on.
    ///
    /// A volume's pod may go on while it is exported. On btrfs the archive shows one moment.
    /// Elsewhere it has each file as it was when it was read, and the command says so.
    ///
    /// FILE appears when it is complete. If the command ends before, by ^C for example, nothing is
    /// left.
    #[command(after_long_help = EXPORT_EXAMPLES)]
    Export(transfer::Export),

    /// Make an artifact or a cache of an archive
    ///
    /// Reads tar streams as GNU tar and others write them, plain or compressed by gzip, zstd or
    /// Snappy. Device nodes, and attributes that no archive may set, are left out and counted. An
    /// archive that is damaged, incomplete, too large, or that names something outside of itself is
    /// refused.
    ///
    /// The artifact appears whole, or not at all. It is durable when the command ends. A resource
    /// cache keeps its first content; a task cache or an artifact gets the newest. Unused caches
    /// are evicted if the archive needs the space.
    ///
    /// The command warns if the pool is above its high watermark. The driver may then evict the
    /// new content before a pod uses it.
    #[command(after_long_help = IMPORT_EXAMPLES)]
    Import(transfer::Import),

    /// Collect garbage now
    ///
    /// Deletes expired artifacts and, if the pool is above its high watermark, the least recently
    /// used ones. Never deletes what a volume uses. The driver also does this by itself.
    Reap(Plain),

    /// Compare the index with the files on disk; changes nothing
    ///
    /// Asks the running driver, or reads the pool itself if no driver runs. Exits with 1 if there
    /// are findings.
    ///
    /// With `--rebuild`, and only while no driver runs, makes a new index from the records beside
    /// the layers, for an index that is lost or damaged. Names come back as they were when their
    /// content was sealed. An index that can be read is replaced only with `--force`. The old index
    /// is kept beside the new one.
    ///
    /// It cannot restore what only the index had: snapshots, snapshot groups, and persistent
    /// volumes without a directory in `volumes/` of the pool. These were never mounted or, on
    /// overlay, were cloned or snapshotted and not mounted since. The next start deletes the
    /// content that only they had. `--dry-run` names that content.
    #[command(after_long_help = "\
Examples:
  baggageclaim check
  baggageclaim check --rebuild --dry-run
  baggageclaim check --rebuild")]
    Check(Check),

    /// Show the pool: backend, free space, and what it contains
    Status(Plain),

    /// Print the key of this node, for the list of peers of other nodes
    ///
    /// Makes the key if its file is missing. Prints the SHA-256 of its public part. Put it into the
    /// file that `--peers` names, on each node that this one gives content to, or gets content
    /// from.
    #[command(after_long_help = "\
Example:
  echo \"$(hostname) $(hostname):9810 $(baggageclaim peer-key)\" >> peers")]
    PeerKey(config::PeerKey),

    /// Look at a shared tier in object storage, and collect its garbage
    ///
    /// Works on the bucket itself and needs no driver. The flag `--shared` of a driver has it use
    /// the tier.
    Shared(shared::Shared),

    /// Print the completion script for a shell
    #[command(after_long_help = "\
Example, for bash:
  source <(baggageclaim completion bash)")]
    Completion(Completion),
}

#[derive(Debug, Args)]
pub(super) struct Locality {
    /// The namespace of the controller
    #[arg(short, long, value_name = "NAMESPACE", default_value = "baggageclaim")]
    pub(super) namespace: Tenant,
}

#[derive(Debug, Args)]
pub(super) struct List {
    #[command(flatten)]
    pub(super) namespace: Namespace,
    /// The output format
    #[arg(short, long, value_name = "FORMAT", default_value = "table")]
    pub(super) output: config::Output,
    /// Keep running and print one line per change, checked every second; as JSON, one object per
    /// line
    #[arg(short, long)]
    pub(super) watch: bool,
    #[command(flatten)]
    pub(super) pool: config::Pool,
}

#[derive(Debug, Args)]
pub(super) struct Caches {
    #[command(flatten)]
    pub(super) list: List,
    /// List the caches of all nodes of the cluster
    #[arg(long)]
    pub(super) cluster: bool,
    #[command(flatten)]
    pub(super) controller: cluster::Controller,
}

#[derive(Debug, Args)]
pub(super) struct Inspect {
    /// The name of an artifact or cache, or the id of a volume or artifact, or the first digits of
    /// an id
    #[arg(value_name = "NAME|ID", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub(super) what: String,
    #[command(flatten)]
    pub(super) namespace: Namespace,
    /// The output format
    #[arg(short, long, value_name = "FORMAT", default_value = "yaml")]
    pub(super) output: config::Data,
    #[command(flatten)]
    pub(super) pool: config::Pool,
}

#[derive(Debug, Args)]
pub(super) struct Completion {
    /// The shell
    pub(super) shell: clap_complete::Shell,
}

#[derive(Debug, Args)]
pub(super) struct Plain {
    /// The output format
    #[arg(short, long, value_name = "FORMAT", default_value = "text")]
    pub(super) output: config::PlainOutput,
    #[command(flatten)]
    pub(super) pool: config::Pool,
}

#[derive(Debug, Args)]
pub(super) struct Outcome {
    /// The uid of the pod, as `baggageclaim volumes -o wide` shows it
    pub(super) pod_uid: PodUid,
    /// How it ended
    #[arg(value_name = "OUTCOME")]
    pub(super) ended: OutcomeWord,
    /// Wait until no volume of this node is being sealed or deleted, except volumes with an unknown
    /// outcome and volumes whose files a process has open
    #[arg(long)]
    pub(super) wait: bool,
    #[command(flatten)]
    pub(super) pool: config::Pool,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(super) enum OutcomeWord {
    /// The pod succeeded
    Succeeded,
    /// The pod failed
    Failed,
}

#[derive(Debug, Args)]
#[command(mut_arg("tenant", |arg| arg.required(true).help("The namespace it belongs to")))]
pub(super) struct Destroy {
    /// artifact/NAME, resource-cache/KEY or task-cache/KEY
    pub(super) reference: Reference,
    #[command(flatten)]
    pub(super) namespace: Namespace,
    /// Show what would be deleted, and delete nothing. Exits with 1 if it would be refused
    #[arg(long)]
    pub(super) dry_run: bool,
    #[command(flatten)]
    pub(super) pool: config::Pool,
}

#[derive(Debug, Args)]
pub(super) struct Check {
    /// Make a new index; no driver may run
    #[arg(long, conflicts_with = "output")]
    pub(super) rebuild: bool,
    /// Say what a rebuild would make and what would be lost, and change nothing
    #[arg(long, requires = "rebuild")]
    pub(super) dry_run: bool,
    /// Replace an index that can be read, too
    #[arg(long, requires = "rebuild")]
    pub(super) force: bool,
    /// The output format
    #[arg(short, long, value_name = "FORMAT", default_value = "text")]
    pub(super) output: config::PlainOutput,
    #[command(flatten)]
    pub(super) pool: config::Pool,
}
