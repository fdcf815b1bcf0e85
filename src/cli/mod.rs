//! The command line: its verbs (`verbs`), what they do (`run`), and how the process ends.
//! A verb asks the driver through the admin socket and shows the answer; the driver does the work.

mod answer;
mod archive_file;
mod cluster;
mod generations;
mod human;
mod namespace;
mod progress;
mod rows;
mod run;
mod shared;
mod show;
mod status;
mod table;
mod transfer;
mod verbs;

use std::ffi::OsString;
use std::io::Write as _;
use std::process::ExitCode;

use clap::{CommandFactory as _, Parser as _};

use crate::config;
use crate::sys::printable_lines;
use answer::Failure;
use verbs::Cli;

/// Runs the verb `demo`, which is a module of the binary.
pub type RunDemo = fn(config::Demo) -> Result<(), Box<dyn std::error::Error>>;

/// Parses the arguments of this process, runs the verb, and says how the process ends.
#[must_use]
pub fn main(demo: RunDemo) -> ExitCode {
    run(std::env::args_os(), demo)
}

fn run(arguments: impl Iterator<Item = OsString>, demo: RunDemo) -> ExitCode {
    let cli = match Cli::try_parse_from(arguments) {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version come this way, too. If they cannot be printed, nothing else can.
            let _ = error.print();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2));
        }
    };
    let failure = match run::run(cli.verb, demo) {
        Ok(code) => return code,
        Err(failure) => failure,
    };
    if failure.is_broken_pipe() {
        // The reader has closed the pipe: `baggageclaim volumes | head -1`.
        return ExitCode::SUCCESS;
    }
    if let Failure::Usage(error) = &failure {
        let error = Cli::command().error(clap::error::ErrorKind::ValueValidation, error);
        let _ = error.print();
    } else {
        // The driver's messages have names as tenants wrote them.
        let failure = printable_lines(&failure);
        let _ = writeln!(std::io::stderr(), "baggageclaim: {failure}");
    }
    failure.exit_code()
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use super::*;

    /// The help or error that `arguments` print.
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
    fn every_verb_of_shared_explains_itself() {
        for verb in ["ls", "du", "verify", "gc"] {
            let text = help(&["shared", verb, "--help"]);
            insta::assert_snapshot!(format!("help-shared-{verb}"), text);
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
                // Clap parses a default as it parses the environment, which other tests read, too.
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
            "standalone --reap-interval 0m",
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
