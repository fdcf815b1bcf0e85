//! The command line: its verbs, what they print, and how they end.
//! What a verb does is done by the driver; this asks it, through its admin socket, and shows the answer.

mod human;
mod progress;
mod rows;
mod run;
mod show;
mod table;
mod transfer;

use std::ffi::OsString;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, CommandFactory as _, Parser, Subcommand, ValueEnum};

use crate::config;
use crate::model::{PodUid, Reference, Sha256, Tenant};

/// A line per paragraph: it is wrapped to the terminal's width.
const LONG_ABOUT: &str = "\
Copy-on-write volumes for the steps of CI pipelines.

A step's pod names what it wants in its volume spec and gets a private, writable, instant view of it: what another step \
produced (input), a place whose content outlives the pod (output), something fetched once (resource cache), the last \
state of a cache (task cache), or an empty place (scratch). The orchestrator asks for them through CSI.

Everything is made of two things, an artifact (sealed, immutable) and a volume (somebody's working copy), and two deeds: \
fork makes a volume of an artifact, seal makes an artifact of a volume.";

const AFTER_LONG_HELP: &str = "\
Examples:
  Serve a pool on this machine:
    baggageclaim standalone --pool /var/lib/baggageclaim --socket /run/baggageclaim/csi.sock
  See what is there:
    baggageclaim volumes
    baggageclaim caches -n ci -o json
  Say how a pod ended, so that what it made is kept:
    baggageclaim outcome 0f8fad5b-d9cb-469f-a165-70867728950e succeeded
  Copy content out of the pool, and into it:
    baggageclaim export artifact/build-42 -n ci -o build-42.tar.zst
    baggageclaim import build-42.tar.zst --as artifact/build-42 -n ci
  Forget a task cache that went bad:
    baggageclaim destroy task-cache/go-build -n ci

Exit codes:
  0  done
  1  it could not be done; `check`: something is wrong with the pool
  2  the command line is wrong
  3  no driver answers

The words and the formats are in docs/ of the source: cli.md, on-disk.md.";

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

/// Copy-on-write volumes for the steps of CI pipelines
#[derive(Debug, Parser)]
#[command(
    name = "baggageclaim",
    version,
    long_about = LONG_ABOUT,
    after_long_help = AFTER_LONG_HELP,
    after_help = "`baggageclaim --help` says more, with examples; `baggageclaim VERB --help` explains a verb.",
    subcommand_value_name = "VERB",
    subcommand_help_heading = "Verbs",
    disable_help_subcommand = true,
    max_term_width = 100
)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Serve a pool on this machine, without Kubernetes
    ///
    /// Opens the pool (makes it when its directory is missing or empty), takes up what an earlier process left, and
    /// serves the CSI services on a unix socket: Identity, Node and, unless `--controller off`, Controller and
    /// GroupController. Needs root. The first process that opens a pool owns it; a second one is refused.
    ///
    /// Ends on SIGTERM or SIGINT: calls that run are answered within the grace period, mounts stay. A second signal
    /// ends it at once, which is safe: all that is promised is on disk.
    #[command(after_long_help = "\
Example:
  baggageclaim standalone --pool /srv/pool --socket /run/baggageclaim/csi.sock --backend overlay

How a pod ended is known here only from you: baggageclaim outcome POD_UID succeeded")]
    Standalone(Box<config::Standalone>),

    /// Serve one node of a Kubernetes cluster
    ///
    /// Opens the pool (makes it when its directory is missing or empty), takes up what an earlier process left, serves the
    /// CSI Identity and Node services (no Controller: that is `standalone`), and then registers itself with the kubelet of this node, again whenever kubelet
    /// restarts or says no. It tells its health and what it counts over HTTP. Needs root, and kubelet's directory at the path by which kubelet knows it.
    ///
    /// Ends on SIGTERM or SIGINT: the registration is withdrawn, calls that run are answered within the grace period,
    /// mounts stay: no running pod notices, and the next process takes them up. A second signal ends it at once, which is
    /// safe: all that is promised is on disk.
    #[command(after_long_help = "\
Example:
  baggageclaim node --pool /var/lib/baggageclaim --node-id \"$NODE_NAME\"")]
    Node(Box<config::Node>),

    /// Show it at work: a pipeline with real trees, and what it costs
    ///
    /// Starts a driver on a filesystem of its own and plays kubelet against its socket: a step fetches a tree, others
    /// change it without seeing each other, one compiles a program, the next runs it, and a second build takes up the
    /// cache of the first. Takes less than two minutes. Exits with 0 only when all that it claims was seen to be so.
    ///
    /// Needs root. All mounts are made in a mount namespace of its own, and nothing is left behind.
    ///
    /// In a pool of yours (`--pool`) whose backend is btrfs or copy, what a fork alone takes on disk cannot be told: each row says
    /// `shared`, and that a fork is a view and not a copy is not among the claims.
    Demo(config::Demo),

    /// List the volumes: the working copies of pods
    ///
    /// SIZE is what the volume itself takes on disk, without what it shares with its parent, as it was last measured. To list
    /// volumes has some measured whose SIZE is `-` or old, in the background: list them again.
    ///
    /// STATE is published (a pod has it), unpublished (the same pod may come again), awaiting-outcome (its pod is done,
    /// how is not known), in-use (its pod is done, a process still has its files open), sealing, or preparing.
    Volumes(List),

    /// List the artifacts: sealed content, and the names that point at it
    ///
    /// REFERENCE is what an input writes in `from`. An artifact without one has been replaced by newer content, and
    /// goes when no volume uses it any more.
    Artifacts(List),

    /// List the caches
    ///
    /// A resource cache keeps its first content, a task cache the newest. AGE is the age of that content.
    Caches(List),

    /// Show one volume or artifact, whole
    ///
    /// Exits with 1 when there is none, or more than one: then `-n` or a longer id says which.
    #[command(after_long_help = "\
Examples:
  baggageclaim inspect task-cache/go-build -n ci
  baggageclaim inspect 4f0c2a -o json")]
    Inspect(Inspect),

    /// Say how a pod ended
    ///
    /// Outputs and caches with `commit: on-success` are sealed when their pod succeeded, and thrown away otherwise.
    /// Without Kubernetes nobody else can know. The first word counts. It may be said before the pod's volumes are
    /// unpublished or after, for as long as `standalone --outcome-wait` says; not before they are published.
    ///
    /// Exits with 1 when the pod has no such volumes (any more), or when the other outcome was said first.
    Outcome(Outcome),

    /// Forget an artifact or a cache by its name
    ///
    /// An output that volumes were forked from is refused. A cache's name goes at once and its content when the last
    /// volume that was forked from it goes. A step that has such a volume is not fenced: when it succeeds it commits what
    /// it began with, and its changes, under the same name. To be rid of a cache that went bad, end those steps first.
    Destroy(Destroy),

    /// Write an artifact, a cache or a volume as an archive
    ///
    /// The archive is a tar stream (POSIX pax) that GNU tar reads, with owners, times, holes, extended attributes and
    /// ACLs. The same content gives the same stream, so its SHA-256 names the content: it is told at the end, and by
    /// `inspect` from then on.
    ///
    /// A volume's pod may go on while it is exported. On btrfs the archive shows one moment. Elsewhere it has each file as
    /// it was when it was read, and the command says so.
    ///
    /// FILE appears when it is complete. If the command ends before, by ^C for example, nothing is left.
    #[command(after_long_help = EXPORT_EXAMPLES)]
    Export(Export),

    /// Make an artifact or a cache of an archive
    ///
    /// Reads tar streams as GNU tar and others write them, plain or compressed by gzip, zstd or Snappy. Device nodes, and
    /// attributes that no archive may set, are left out and counted. An archive that is damaged, incomplete, too large, or
    /// that names something outside of itself is refused.
    ///
    /// The artifact appears whole and durable, or not at all. A resource cache keeps its first content; a task cache or
    /// an artifact gets the newest. Unused caches are evicted if the archive needs the space.
    #[command(after_long_help = IMPORT_EXAMPLES)]
    Import(Import),

    /// Collect garbage now
    ///
    /// What has expired goes, and if the pool is above its high watermark also what was not used for longest. Nothing
    /// that a volume uses is ever deleted. The driver does so by itself, too.
    Reap(Plain),

    /// Compare the index with what is on disk; changes nothing
    ///
    /// Asks the running driver; without one it looks itself. Exits with 1 when there are findings.
    ///
    /// With `--rebuild`, and only while no driver runs, the index is made anew from what lies beside the layers: for the
    /// day when it is lost or torn. Names come back as they were when their content was sealed.
    ///
    /// It cannot bring back what only the index knew: snapshots, groups of snapshots, and claims that have no directory in
    /// `volumes/` of the pool, which are those that were never mounted and, on overlay, those that were cloned or
    /// snapshotted and not mounted since. The next start throws away what only they had.
    Check(Check),

    /// Show the pool: backend, room, and how much is in it
    Status(Plain),

    /// Print what makes a shell complete this command line
    #[command(after_long_help = "\
Example, for bash:
  source <(baggageclaim completion bash)")]
    Completion(Completion),
}

#[derive(Debug, Args)]
struct List {
    /// Only what belongs to this namespace
    #[arg(
        short = 'n',
        long = "namespace",
        alias = "tenant",
        value_name = "NAMESPACE"
    )]
    tenant: Option<Tenant>,
    /// How it looks
    #[arg(short, long, value_name = "FORMAT", default_value = "table")]
    output: config::Output,
    /// Go on, and show what changes: one line for each change; each second it is looked for. As JSON, an object a line
    #[arg(short, long)]
    watch: bool,
    #[command(flatten)]
    pool: config::Pool,
}

#[derive(Debug, Args)]
struct Inspect {
    /// The name of an artifact or cache, or the id of a volume or artifact; the beginning of an id will do
    #[arg(value_name = "NAME|ID", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    what: String,
    /// Only what belongs to this namespace
    #[arg(
        short = 'n',
        long = "namespace",
        alias = "tenant",
        value_name = "NAMESPACE"
    )]
    tenant: Option<Tenant>,
    /// How it looks
    #[arg(short, long, value_name = "FORMAT", default_value = "yaml")]
    output: config::Data,
    #[command(flatten)]
    pool: config::Pool,
}

#[derive(Debug, Args)]
struct Completion {
    /// For which shell
    shell: clap_complete::Shell,
}

#[derive(Debug, Args)]
struct Plain {
    /// How it looks
    #[arg(short, long, value_name = "FORMAT", default_value = "text")]
    output: config::PlainOutput,
    #[command(flatten)]
    pool: config::Pool,
}

#[derive(Debug, Args)]
struct Outcome {
    /// The pod's uid, as `baggageclaim volumes -o wide` shows it
    pod_uid: PodUid,
    /// How it ended
    #[arg(value_name = "OUTCOME")]
    ended: OutcomeWord,
    /// Return only when every volume of this node that is being sealed or deleted, of whatever pod, is done; not waited
    /// for are those whose outcome is not known, and those whose files are still open somewhere
    #[arg(long)]
    wait: bool,
    #[command(flatten)]
    pool: config::Pool,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum OutcomeWord {
    /// It did what it was meant to
    Succeeded,
    /// It did not
    Failed,
}

#[derive(Debug, Args)]
struct Destroy {
    /// artifact/NAME, resource-cache/KEY or task-cache/KEY
    reference: Reference,
    /// Whose it is
    #[arg(
        short = 'n',
        long = "namespace",
        alias = "tenant",
        value_name = "NAMESPACE"
    )]
    tenant: Tenant,
    /// Say what would go, and forget nothing. Exits with 1 where it would be refused
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    pool: config::Pool,
}

#[derive(Debug, Args)]
struct Export {
    /// artifact/NAME, resource-cache/KEY, task-cache/KEY, volume/ID, or an id as `inspect` takes it; the beginning of an id
    /// will do
    #[arg(value_name = "REFERENCE", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    what: String,
    /// Only what belongs to this namespace
    #[arg(
        short = 'n',
        long = "namespace",
        alias = "tenant",
        value_name = "NAMESPACE"
    )]
    tenant: Option<Tenant>,
    /// Where the archive goes; `-` is stdout, unless that is a terminal
    #[arg(short, long, value_name = "FILE|-", default_value = "-")]
    output: PathBuf,
    /// How it is compressed. Without this flag the end of FILE's name decides, and else it is not
    #[arg(long, value_name = "FORMAT")]
    format: Option<transfer::Format>,
    /// Replace FILE if it is there
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    pool: config::Pool,
}

#[derive(Debug, Args)]
struct Import {
    /// The archive; `-` is stdin
    #[arg(value_name = "FILE|-")]
    file: PathBuf,
    /// What it becomes: artifact/NAME, task-cache/KEY or resource-cache/KEY
    #[arg(long = "as", value_name = "REFERENCE")]
    reference: Reference,
    /// Whose it will be
    #[arg(
        short = 'n',
        long = "namespace",
        alias = "tenant",
        value_name = "NAMESPACE"
    )]
    tenant: Tenant,
    /// Import it only if it has this digest: the archive as it is, or the tar stream in it
    #[arg(long, value_name = "sha256:DIGITS")]
    digest: Option<Sha256>,
    /// Delete it so long after the import, or a cache so long after its last use. Without this flag it stays until room is needed
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration)]
    ttl: Option<Duration>,
    #[command(flatten)]
    pool: config::Pool,
}

#[derive(Debug, Args)]
struct Check {
    /// Make the index anew; no driver may run
    #[arg(long, conflicts_with = "output")]
    rebuild: bool,
    /// How it looks
    #[arg(short, long, value_name = "FORMAT", default_value = "text")]
    output: config::PlainOutput,
    #[command(flatten)]
    pool: config::Pool,
}

/// Runs what this process was told to; what the binary does.
#[must_use]
pub fn main() -> ExitCode {
    run(std::env::args_os())
}

fn run(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let cli = match Cli::try_parse_from(arguments) {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version come this way, too. If they cannot be printed there is nobody to tell.
            let _ = error.print();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2));
        }
    };
    let failure = match run::run(cli.verb) {
        Ok(code) => return code,
        Err(failure) => failure,
    };
    if failure.is_broken_pipe() {
        // Whoever reads has seen enough: `baggageclaim volumes | head -1`.
        return ExitCode::SUCCESS;
    }
    if let run::Failure::Usage(error) = &failure {
        let error = Cli::command().error(clap::error::ErrorKind::ValueValidation, error);
        let _ = error.print();
    } else {
        let _ = writeln!(std::io::stderr(), "baggageclaim: {failure}");
    }
    failure.exit_code()
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use super::*;

    /// What `arguments` print that print help.
    fn help(arguments: &[&str]) -> String {
        let arguments = std::iter::once(&"baggageclaim").chain(arguments);
        // Not as wide as the terminal that the test happens to run in.
        let cli = Cli::command().term_width(100);
        let error = cli
            .try_get_matches_from(arguments)
            .expect_err("help is an error to clap");
        error.render().to_string()
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn help_teaches() {
        insta::assert_snapshot!("help", help(&["--help"]));
        insta::assert_snapshot!("help-short", help(&["-h"]));
    }

    #[test]
    fn every_verb_explains_itself() {
        for verb in Cli::command().get_subcommands() {
            let name = verb.get_name();
            insta::assert_snapshot!(format!("help-{name}"), help(&[name, "--help"]));
        }
    }

    #[test]
    fn every_flag_of_the_driver_has_a_name_in_the_environment() {
        let cli = Cli::command();
        for role in ["standalone", "node"] {
            let role = cli
                .get_subcommands()
                .find(|verb| verb.get_name() == role)
                .expect("there is one");
            for flag in role.get_arguments() {
                let Some(name) = flag.get_long().filter(|name| *name != "help") else {
                    continue;
                };
                let expected = match name {
                    // The name that it has everywhere.
                    "kubeconfig" => "KUBECONFIG".to_owned(),
                    name => format!("BAGGAGECLAIM_{}", name.to_uppercase().replace('-', "_")),
                };
                assert_eq!(
                    flag.get_env().and_then(|env| env.to_str()),
                    Some(expected.as_str())
                );
            }
        }
    }

    #[test]
    fn every_flag_without_a_value_takes_the_same_words() {
        let cli = Cli::command();
        let mut flags = Vec::new();
        for verb in cli.get_subcommands() {
            let arguments = verb
                .get_arguments()
                .filter(|flag| matches!(flag.get_action(), clap::ArgAction::SetTrue))
                .filter(|flag| flag.get_env().is_some());
            flags.extend(arguments.map(|flag| (verb.get_name(), flag.get_id().as_str())));
        }
        assert!(flags.contains(&("standalone", "alpha")), "{flags:?}");
        for (verb, flag) in flags {
            for (word, meant) in [
                ("1", true),
                ("on", true),
                ("yes", true),
                ("true", true),
                ("0", false),
                ("off", false),
                ("no", false),
                ("false", false),
            ] {
                // A default is read as the environment is, which a test cannot change: other tests read it, too.
                let matches = Cli::command()
                    .mut_subcommand(verb, |verb| {
                        verb.mut_arg(flag, |flag| flag.env(None::<&str>).default_value(word))
                    })
                    .try_get_matches_from(["baggageclaim", verb])
                    .unwrap_or_else(|error| panic!("{verb} {flag}={word}: {error}"));
                let (_, matches) = matches.subcommand().expect("a verb");
                assert_eq!(matches.get_flag(flag), meant, "{verb} {flag}={word}");
            }
        }
    }

    #[test]
    fn mistakes_are_told_in_words() {
        let mut table = String::new();
        for line in [
            "",
            "volume",
            "volumes -o xml",
            "inspect",
            "completion tcsh",
            "volumes -n Upper",
            "outcome ../x succeeded",
            "outcome x maybe",
            "destroy src -n ci",
            "destroy artifact/src",
            "standalone --input-wait soon",
            "standalone --backend zfs",
            "standalone --high-watermark 101",
            "standalone --reserve 64MB",
            "node --kubernetes maybe",
            "node --http localhost",
        ] {
            let message = help(&line.split_whitespace().collect::<Vec<_>>());
            let message = message.trim_end();
            // Writing to a String cannot fail.
            let _ = writeln!(table, "$ baggageclaim {line}\n{message}\n");
        }
        insta::assert_snapshot!(table);
    }
}
