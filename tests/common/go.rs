//! Programs in Go that tests run: built from a module of this repository through Go's module proxy,
//! and kept in `target/tmp`.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Builds `package` of the module in `tests/MODULE` as the program `name`. The error is a sentence.
pub fn build(module: &str, package: &str, name: &str) -> Result<PathBuf, String> {
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    let built = Command::new("go")
        .args(["build", "-trimpath", "-mod=readonly", "-o"])
        .arg(&program)
        .arg(package)
        .env("CGO_ENABLED", "0")
        .current_dir(tests.join(module))
        .output();
    match built {
        Err(error) => Err(format!(
            "{name} needs Go 1.25 or newer (https://go.dev/dl) to be built, and `go` does not run: \
             {error}"
        )),
        Ok(output) if !output.status.success() => Err(format!(
            "{name} cannot be built: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        )),
        Ok(_) => Ok(program),
    }
}
