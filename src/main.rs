//! The binary: the command line of the library, and the demo, which is a client of the library.
//! Nothing else lives here; flags and names of the environment are in `cli` and `config`.

mod demo;

use std::process::ExitCode;

fn main() -> ExitCode {
    baggageclaim::cli::main(demo::run)
}
