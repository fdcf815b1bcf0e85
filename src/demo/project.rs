//! The program that the pipeline builds: a small Cargo project that needs no network. Its
//! dependencies come from the tree that the `get` step fetched.

use std::fs;
use std::path::Path;

use super::error::Error;
use super::step::Container;
use super::tree;
use super::tree::Source;

/// The crates that this project is built of are fetched first.
const LOCKFILE: &str = include_str!("../../Cargo.lock");

/// The crates that the program needs. Cargo would also demand dependencies of other platforms, so
/// none of these has any.
const NEEDED: [&str; 4] = [
    "clap_builder-",
    "regex-automata-",
    "serde_derive-",
    "serde_json-",
];

const MANIFEST: &str = r#"[package]
name = "census"
version = "0.1.0"
edition = "2021"

[dependencies]
clap = { version = "4", default-features = false, features = ["std", "derive", "help"] }
regex = "1"
serde = { version = "1", features = ["derive"] }
serde_json = "1"

[profile.dev]
debug = false

[workspace]
"#;

const CARGO_CONFIG: &str = r#"[source.crates-io]
replace-with = "fetched"

[source.fetched]
directory = "../crates"
"#;

/// Counts the functions in the program's own dependencies.
const MAIN: &str = r#"use clap::Parser;

const EDITION: u32 = 1;

#[derive(Parser, serde::Serialize)]
struct Census {
    tree: std::path::PathBuf,
    #[arg(skip)]
    functions: usize,
}

fn count(dir: &std::path::Path, pattern: &regex::Regex) -> std::io::Result<usize> {
    let mut found = 0;
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            found += count(&path, pattern)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = std::fs::read(&path)?;
            found += pattern.find_iter(&String::from_utf8_lossy(&text)).count();
        }
    }
    Ok(found)
}

fn main() -> std::io::Result<()> {
    let mut census = Census::parse();
    let pattern = regex::Regex::new(r"\bfn [a-z_]+").expect("a pattern");
    census.functions = count(&census.tree, &pattern)?;
    eprintln!("{}", serde_json::to_string(&census).expect("plain data"));
    println!("{} {}", EDITION, census.functions);
    Ok(())
}
"#;

/// The `get` step: fetches the tree and writes the project beside it.
pub(super) fn fetch(
    container: &Container,
    source: &Source,
    to: &Path,
) -> Result<tree::Size, Error> {
    let mut first = Vec::new();
    let mut name = "";
    for line in LOCKFILE.lines() {
        if let Some(value) = line.strip_prefix("name = ") {
            name = value.trim_matches('"');
        } else if let Some(version) = line.strip_prefix("version = ") {
            first.push(format!("{name}-{}", version.trim_matches('"')));
        }
    }
    first.retain(|name| source.crates.contains_key(name));
    for needed in NEEDED {
        if !first.iter().any(|name| name.starts_with(needed)) {
            return Err(Error::Missing(format!(
                "the sources of {}, which cargo unpacks when it builds this project (CARGO_HOME is \
                 right?)",
                needed.trim_end_matches('-')
            )));
        }
    }
    let size = source.fetch(to, &first)?;
    let project = to.join("project");
    for (path, text) in [
        ("Cargo.toml", MANIFEST),
        (".cargo/config.toml", CARGO_CONFIG),
        ("src/main.rs", MAIN),
    ] {
        let path = project.join(path);
        let parent = path.parent().unwrap_or(&project);
        fs::create_dir_all(parent).map_err(|source| Error::io("make", parent, source))?;
        fs::write(&path, text).map_err(|source| Error::io("write", &path, source))?;
    }
    container.run("cargo", |cargo| {
        cargo
            .args(["generate-lockfile", "--offline", "--quiet"])
            .current_dir(&project)
            .env("CARGO_HOME", container.volume("scratch"));
        forget_ourselves(cargo);
    })?;
    Ok(size)
}

/// The edit between two builds: changes one file.
pub(super) fn edit(sources: &Path, edition: u32) -> Result<(), Error> {
    let path = sources.join("project/src/main.rs");
    let text = MAIN.replace("EDITION: u32 = 1", &format!("EDITION: u32 = {edition}"));
    fs::write(&path, text).map_err(|source| Error::io("write", &path, source))
}

/// Builds the program from `src` with `cache`, copies it to `out`, and returns the number of
/// compiled crates.
pub(super) fn build(container: &Container, jobs: Option<u16>) -> Result<usize, Error> {
    let target = container.volume("cache").join("target");
    let output = container.run("cargo", |cargo| {
        cargo
            .args(["build", "--frozen", "--color", "never"])
            .current_dir(container.volume("src").join("project"))
            .env("CARGO_HOME", container.volume("scratch"))
            .env("CARGO_TARGET_DIR", &target);
        if let Some(jobs) = jobs {
            cargo.args(["--jobs", &jobs.to_string()]);
        }
        forget_ourselves(cargo);
    })?;
    let (from, to) = (
        target.join("debug/census"),
        container.volume("out").join("census"),
    );
    fs::copy(&from, &to).map_err(|source| Error::io("copy", from, source))?;
    let said = String::from_utf8_lossy(&output.stderr);
    let compiled = said
        .lines()
        .filter(|line| line.trim_start().starts_with("Compiling "));
    Ok(compiled.count())
}

/// Runs the program in a volume on its own sources; returns its output.
pub(super) fn run(container: &Container, volume: &str) -> Result<String, Error> {
    let program = container.volume(volume).join("census");
    let output = container.run(&program.display().to_string(), |census| {
        census.arg(container.volume("src").join("crates"));
    })?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Removes variables that `cargo run` and `make` set for this project.
#[expect(
    clippy::disallowed_types,
    reason = "a step is the user's work: it compiles. The driver itself executes nothing"
)]
fn forget_ourselves(cargo: &mut std::process::Command) {
    for name in [
        "CARGO_BUILD_TARGET",
        "CARGO_BUILD_TARGET_DIR",
        "CARGO_ENCODED_RUSTFLAGS",
        "CARGO_MANIFEST_DIR",
        "MAKEFLAGS",
        "CARGO_MAKEFLAGS",
        "RUSTC_WRAPPER",
        "RUSTC_WORKSPACE_WRAPPER",
        "RUSTFLAGS",
    ] {
        cargo.env_remove(name);
    }
}
