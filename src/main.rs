//! The binary: parses what it was told, then runs it.
//! Nothing else lives here; flags and names of the environment are in `cli` and `config`.

use std::process::ExitCode;

fn main() -> ExitCode {
    baggageclaim::cli::main()
}
