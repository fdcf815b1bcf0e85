//! Generates messages, clients and servers in Rust from `proto/*.proto`.
//!
//! protox is a protobuf compiler in Rust, so the build needs no `protoc`. It also writes the
//! descriptor to `OUT_DIR`, with custom options, for `proto::DESCRIPTOR`.

use std::error::Error;
use std::path::PathBuf;

const FILES: [&str; 5] = [
    "csi.proto",
    "admin.proto",
    "hub.proto",
    "peer.proto",
    "pluginregistration.proto",
];

/// The messages that the CLI shows in JSON and YAML as they are: their fields are an interface
/// (docs/cli.md).
const SHOWN: [&str; 3] = ["Usage", "ReapResponse", "Peers"];

fn main() -> Result<(), Box<dyn Error>> {
    for file in FILES {
        println!("cargo::rerun-if-changed=proto/{file}");
    }

    let mut compiler = protox::Compiler::new(["proto"])?;
    compiler
        .include_imports(true)
        .include_source_info(true)
        .open_files(FILES)?;

    let out = PathBuf::from(std::env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
    std::fs::write(
        out.join("descriptor.bin"),
        compiler.encode_file_descriptor_set(),
    )?;

    let mut code = tonic_prost_build::configure()
        // Sorted maps: an error about the first bad attribute always names the same one.
        .btree_map(".")
        // Content is not copied out of what came.
        .bytes(".baggageclaim.peer.v1.Chunk.data");
    for message in SHOWN {
        let shown = "#[derive(serde::Serialize)] #[serde(rename_all = \"camelCase\")]";
        code = code.type_attribute(format!(".baggageclaim.admin.v1.{message}"), shown);
    }
    code.compile_fds(compiler.file_descriptor_set())?;
    Ok(())
}
