//! The image: the files that the Dockerfile copies, and that `.dockerignore` passes all sources to
//! the builder. It builds nothing, which takes a registry and minutes: see `make image`.

#![expect(
    clippy::disallowed_types,
    reason = "cargo is asked what it thinks of what the builder gets"
)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

#[test]
fn the_image_is_one_static_binary_and_the_certificates_of_public_authorities() {
    let instructions = instructions();
    let last = instructions
        .iter()
        .rposition(|line| line.starts_with("FROM "));
    let (build, image) = instructions.split_at(last.expect("a stage"));
    // The builder image is named in one place, so that it can be replaced.
    let [variable, build @ ..] = build else {
        panic!("instructions: {build:?}");
    };
    let (name, default) = variable.split_once('=').expect("a default");
    assert_eq!(name, "ARG RUST_IMAGE");
    let (_, tag) = default.rsplit_once(':').expect("a tag or a digest");
    assert_ne!(tag, "latest", "{default}");
    assert_eq!(build[0], "FROM ${RUST_IMAGE} AS build");
    assert_eq!(
        image,
        [
            "FROM scratch",
            // Without them no client of a shared tier can be made, not even for plain HTTP.
            "COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/ca-certificates.crt",
            "COPY --from=build /baggageclaim /baggageclaim",
            r#"ENTRYPOINT ["/baggageclaim"]"#,
        ]
    );
    // And what is copied is the binary, built to need nothing else.
    let made = build.last().expect("instructions");
    for part in [
        "cargo rustc --release --locked --bin baggageclaim -- -C target-feature=+crt-static ",
        "&& cp target/release/baggageclaim /baggageclaim ",
        "&& ! ldd /baggageclaim ",
    ] {
        assert!(made.contains(part), "{part}: {made}");
    }
}

#[test]
fn make_image_builds_with_the_image_that_it_is_told() {
    let make = |words: &[&str]| {
        let make = Command::new("make")
            .args(["--dry-run", "--no-print-directory", "image"])
            .args(words)
            .current_dir(root())
            .output()
            .expect("make starts");
        assert!(make.status.success(), "{make:?}");
        String::from_utf8(make.stdout).expect("text")
    };
    let told = "rust@sha256:0123";
    let argument = format!("--build-arg RUST_IMAGE={told} ");
    assert!(make(&[&format!("RUST_IMAGE={told}")]).contains(&argument));
    assert!(!make(&[]).contains("--build-arg"));
}

#[test]
fn the_builder_gets_all_that_the_binary_is_made_of() {
    let sent = tempfile::tempdir().expect("a temporary directory");
    send(sent.path());
    // The source of a copy; `--from` names another build stage.
    for line in instructions() {
        let words: Vec<&str> = line.split(' ').collect();
        if let ["COPY", sources @ .., _] = &words[..]
            && !sources[0].starts_with("--from")
        {
            for source in sources {
                assert!(sent.path().join(source).exists(), "{line}");
            }
        }
    }
    let wanted = wanted();
    assert!(wanted.len() > 4, "{wanted:?}");
    for path in wanted {
        assert!(sent.path().join(&path).is_file(), "{}", path.display());
    }
    // Without those that Cargo.toml names cargo would not even begin.
    for [kind, name, path] in targets() {
        let places = [
            path,
            format!("{kind}s/{name}.rs"),
            format!("{kind}es/{name}/main.rs"),
        ];
        let is_file = |path: &String| sent.path().join(path).is_file();
        assert!(places.iter().any(is_file), "{kind} {name}");
    }
    // And the lock file is that of this Cargo.toml.
    let cargo = Command::new(env!("CARGO"))
        .args(["tree", "--locked", "--offline", "--edges=normal,build"])
        .current_dir(sent.path())
        .output()
        .expect("cargo starts");
    let complaint = String::from_utf8_lossy(&cargo.stderr);
    assert!(cargo.status.success(), "{complaint}");
}

/// The Dockerfile's instructions, a line each.
fn instructions() -> Vec<String> {
    let text = fs::read_to_string(root().join("Dockerfile")).expect("a Dockerfile");
    // A line that ends with a backslash goes on; comments may stand between the two.
    let lines = text
        .lines()
        .filter(|line| !line.trim_start().starts_with('#'));
    let text = lines.collect::<Vec<_>>().join("\n").replace("\\\n", " ");
    text.lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
        .filter(|line| !line.is_empty())
        .collect()
}

/// Copies what `.dockerignore` lets through, as it is written here: nothing, but these.
fn send(to: &Path) {
    let text = fs::read_to_string(root().join(".dockerignore")).expect(".dockerignore");
    let mut lines = text
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'));
    assert_eq!(lines.next(), Some("*"));
    for line in lines {
        let name = line.strip_prefix('!').expect("an exception");
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        assert!(name.chars().all(plain), "more than this test knows: {line}");
        copy(&root().join(name), &to.join(name));
    }
}

fn copy(from: &Path, to: &Path) {
    if from.is_dir() {
        fs::create_dir(to).expect("it is new");
        for entry in fs::read_dir(from).expect("it can be read") {
            let entry = entry.expect("an entry");
            copy(&entry.path(), &to.join(entry.file_name()));
        }
    } else {
        fs::copy(from, to).unwrap_or_else(|error| panic!("{}: {error}", from.display()));
    }
}

/// The files that the build reads besides the sources and the build script.
fn wanted() -> Vec<PathBuf> {
    let mut wanted = Vec::new();
    let mut waiting = vec![root().join("src")];
    while let Some(path) = waiting.pop() {
        if path.is_dir() {
            let entries = fs::read_dir(&path).expect("it can be read");
            waiting.extend(entries.map(|entry| entry.expect("an entry").path()));
            continue;
        }
        let text = fs::read_to_string(&path).unwrap_or_default();
        let texts = ["include_str!(\"", "include_bytes!(\"", "include!(\""];
        for included in texts.iter().flat_map(|before| text.split(before).skip(1)) {
            let name = included.split('"').next().unwrap_or_default();
            let place = path.parent().expect("it has one").join(name);
            let place = place.canonicalize().expect("it compiles");
            wanted.push(place.strip_prefix(root()).expect("ours").to_owned());
        }
    }
    let script = fs::read_to_string(root().join("build.rs")).expect("build.rs");
    let names = script.split('"').map(|name| Path::new("proto").join(name));
    wanted.extend(names.filter(|path| path.extension().is_some_and(|it| it == "proto")));
    wanted.extend(["Cargo.toml", "Cargo.lock", "build.rs"].map(PathBuf::from));
    wanted
}

/// The tests and benches that Cargo.toml names: kind, name, and path if it says that.
fn targets() -> Vec<[String; 3]> {
    let text = fs::read_to_string(root().join("Cargo.toml")).expect("Cargo.toml");
    let sections = text.split("\n[[").skip(1);
    let all = sections.filter_map(|section| {
        let (kind, fields) = section.split_once("]]")?;
        let value = |name: &str| {
            let before = format!("\n{name} = \"");
            let (_, value) = fields.split("\n[").next()?.split_once(&before)?;
            Some(value.split('"').next()?.to_owned())
        };
        Some([
            kind.to_owned(),
            value("name")?,
            value("path").unwrap_or_default(),
        ])
    });
    all.filter(|[kind, ..]| kind != "bin").collect()
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}
