//! csi-sanity: builds it, and runs all of it against the sockets of a driver. Shared by the tests
//! of `standalone` and of a cluster's plugins.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use super::report::Report;

const MIB: u64 = 1 << 20;

/// csi-sanity, built; or why not, in a line.
pub(crate) fn tool() -> Result<&'static Path, &'static str> {
    static TOOL: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let built = TOOL.get_or_init(|| {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("csi-sanity");
        let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("csi-sanity");
        let built = Command::new("go")
            .args(["build", "-trimpath", "-mod=readonly", "-o"])
            .arg(&program)
            .arg(".")
            .current_dir(source)
            .output();
        match built {
            Err(error) => Err(format!(
                "csi-sanity needs Go 1.25 or newer (https://go.dev/dl) to be built, and `go` does not run: {error}"
            )),
            Ok(output) if !output.status.success() => Err(format!(
                "csi-sanity cannot be built: {}",
                String::from_utf8_lossy(&output.stderr).trim()
            )),
            Ok(_) => Ok(program),
        }
    });
    built.as_deref().map_err(String::as_str)
}

/// What is asked, and where.
pub(crate) struct Target<'a> {
    /// The socket of the node plugin.
    pub(crate) node: &'a Path,
    /// That of the controller plugin, if it is another.
    pub(crate) controller: Option<&'a Path>,
    /// Where volumes may be mounted.
    pub(crate) pods: &'a Path,
    /// Where csi-sanity writes its report.
    pub(crate) report: &'a Path,
}

impl Target<'_> {
    /// Runs all of csi-sanity.
    pub(crate) fn ask_all(&self, tool: &Path) -> Report {
        let told = Path::new(env!("CARGO_MANIFEST_DIR")).join("csi-sanity");
        let path = |name: &str, path: &Path| {
            let mut flag = std::ffi::OsString::from(format!("-csi.{name}="));
            flag.push(path);
            flag
        };
        let output = Command::new(tool)
            .arg(path("endpoint", self.node))
            .args(self.controller.map(|at| path("controllerendpoint", at)))
            .arg(path("mountdir", &self.pods.join("mount")))
            .arg(path("stagingdir", &self.pods.join("staging")))
            .arg(path("testvolumeparameters", &told.join("parameters.yaml")))
            .arg(path(
                "testvolumemutableparameters",
                &told.join("mutable-parameters.yaml"),
            ))
            .arg(path(
                "testsnapshotparameters",
                &told.join("snapshot-parameters.yaml"),
            ))
            .arg(path("secrets", &told.join("secrets.yaml")))
            .arg(format!("-csi.testvolumesize={}", 16 * MIB))
            .arg(format!("-csi.testvolumeexpandsize={}", 32 * MIB))
            .args([
                "-ginkgo.no-color",
                "-ginkgo.timeout=15m",
                "-ginkgo.silence-skips",
            ])
            .arg(format!("-ginkgo.json-report={}", self.report.display()))
            .output()
            .expect("csi-sanity runs");
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        Report::read(self.report, output.status.success(), said)
    }
}
