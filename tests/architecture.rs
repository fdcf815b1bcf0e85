//! The rules of the architecture, read from the source: which module may use which, where `unsafe`
//! may stand, and that every file says what may live in it.
//!
//! The rules are in CONTRIBUTING.md. Each rule is also tried on a small tree that breaks it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

/// A tier: what it holds, in words, and its modules.
type Tier = (&'static str, &'static [&'static str]);

/// The tiers of `src/`, from the ground up. A module may use the modules of every tier below its
/// own. Modules of one tier do not use each other, except in the top tier.
const TIERS: [Tier; 12] = [
    ("used by all, use none", &["model", "sys"]),
    ("logs and metrics", &["telemetry"]),
    ("work on whole trees of files", &["tree"]),
    (
        "parts that the engine uses",
        &["archive", "backend", "store"],
    ),
    ("content in object storage", &["shared"]),
    (
        "the engine; the catalog of a cluster",
        &["catalog", "engine"],
    ),
    (
        "content between this node, its peers and the shared tier",
        &["distribution"],
    ),
    ("messages and gRPC servers", &["api", "proto", "server"]),
    ("connections between nodes", &["link"]),
    ("the catalog of a cluster, over the network", &["hub"]),
    (
        "services and clients",
        &[
            "admin",
            "csi",
            "http",
            "k8s",
            "kubelet",
            "kubelet_double",
            "locality",
            "peer",
        ],
    ),
    (
        "roles and the command line",
        &[
            "cli",
            "config",
            "controller",
            "demo",
            "driver",
            "node",
            "standalone",
        ],
    ),
];

/// The tiers inside `src/engine/`, from the ground up; `engine` is its `mod.rs`. Modules of one
/// tier may use each other, in cycles of at most [`MOST_IN_CYCLE`] files. Unit tests may use
/// everything: they open an engine.
const ENGINE_TIERS: [Tier; 8] = [
    (
        "types, and parts that know no engine",
        &[
            "artifacts",
            "backoff",
            "claims::entries",
            "claims::types",
            "clock",
            "counters",
            "durability",
            "error",
            "failpoint",
            "health",
            "lifecycle",
            "lifetime",
            "multiset",
            "name_changes",
            "notice",
            "pool",
            "pool_scan",
            "rounds",
            "target",
            "threads",
            "types",
        ],
    ),
    (
        "what memory holds, what collection shares",
        &[
            "catalog",
            "catalog::names",
            "collector",
            "parts",
            "state",
            "table_digests",
            "teardowns",
            "trash",
            "volumes",
        ],
    ),
    (
        "what all parts share; layers, mounts, space, policies",
        &[
            "fsck_input",
            "guard",
            "layers",
            "mounts",
            "pending",
            "pins",
            "policies",
            "shared",
            "space",
        ],
    ),
    (
        "changes of the index, failed write-back",
        &["fences", "transaction", "writeback_failure"],
    ),
    (
        "the life of a volume, of a persistent volume, of content",
        &[
            "claims::change",
            "claims::create",
            "claims::data_dir",
            "claims::freeze",
            "claims::lookup",
            "claims::mount",
            "claims::receive",
            "claims::snapshot",
            "commit",
            "hit",
            "publish",
            "quiesce",
            "republish",
            "seal",
            "teardown",
            "transfer",
            "transfer::export",
            "transfer::half",
            "transfer::import",
            "transfer::making",
            "transfer::open_layers",
            "transfer::receive",
            "transfer::rollback",
            "transfer::space",
            "transfer::wanted",
            "unpublish",
        ],
    ),
    (
        "garbage collection, tables of contents",
        &[
            "budgets",
            "claims::maintenance",
            "evict",
            "flatten",
            "measure",
            "purge",
            "reap",
            "remove",
            "tables",
        ],
    ),
    (
        "recovery, fsck, queries",
        &[
            "claims::list",
            "claims::recover",
            "fsck",
            "metrics",
            "open",
            "orphans",
            "outcome",
            "query",
            "rebuild",
            "recover",
            "scrub",
        ],
    ),
    (
        "the facade",
        &[
            "claims",
            "claims::facade",
            "claims::placement",
            "cluster",
            "engine",
            "sharing",
        ],
    ),
];

/// A file with more lines than this has more than one subject. Inline unit tests do not count.
const MOST_LINES: usize = 600;

/// A struct of the engine with more fields than this that other modules can reach is no owner of
/// its state. Types of the engine's interface (`pub`) are values and do not count.
const MOST_OPEN_FIELDS: usize = 12;

/// The most files in a cycle of imports. What more files need of each other belongs in a file of
/// its own, below them.
///
/// A file uses another if it names a path in that file's module, from `crate`, `super` or `self`
/// on, or from a child module on. The longest part of the path that is a file's module counts. A
/// re-export (`pub use`) is a use, so the graph also has the ways through a `mod.rs`. `mod x;`
/// alone is none. Unit tests do not count.
const MOST_IN_CYCLE: usize = 3;

/// The only module where `unsafe` may stand.
const UNSAFE_MODULE: &str = "sys";

#[test]
fn the_source_keeps_the_rules() {
    let broken = inspect(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"));
    assert!(broken.is_empty(), "\n{}\n", broken.join("\n"));
}

#[test]
fn every_module_has_one_tier() {
    for tiers in [&TIERS[..], &ENGINE_TIERS[..]] {
        let mut modules: Vec<&str> = tiers
            .iter()
            .flat_map(|(_, modules)| modules.iter().copied())
            .collect();
        let all = modules.len();
        modules.sort_unstable();
        modules.dedup();
        assert_eq!(modules.len(), all);
    }
}

#[test]
fn every_module_of_the_engine_that_has_a_tier_exists() {
    let engine = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/engine");
    for module in ENGINE_TIERS.iter().flat_map(|(_, modules)| *modules) {
        let path = engine.join(module.replace("::", "/"));
        let exists = *module == "engine"
            || path.with_extension("rs").is_file()
            || path.join("mod.rs").is_file();
        assert!(exists, "{module}");
    }
}

#[test]
fn the_map_for_contributors_names_files_that_exist() {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let text = fs::read_to_string(package.join("CONTRIBUTING.md")).expect("read");
    let is_source = |word: &&str| word.starts_with("src/") && Path::new(word).extension().is_some();
    let named: Vec<&str> = text.split('`').filter(is_source).collect();
    assert!(named.len() > 10, "{named:?}");
    let is_lost = |file: &&str| !package.join(file).is_file();
    let lost: Vec<&str> = named.iter().copied().filter(is_lost).collect();
    assert!(lost.is_empty(), "CONTRIBUTING.md names {lost:?}");
}

const HEADER: &str = "//! What this is.\n//! And what may live here.\n";

/// Writes a tree of sources and says what is wrong with it.
fn broken_by(files: &[(&str, &str)]) -> Vec<String> {
    let dir = tempfile::tempdir().expect("a temporary directory");
    for (path, text) in files {
        let path = dir.path().join(path);
        fs::create_dir_all(path.parent().expect("it has one")).expect("mkdir");
        fs::write(path, text).expect("write");
    }
    inspect(dir.path())
}

/// The same for one file whose header is right.
fn broken_by_one(path: &str, text: &str) -> Vec<String> {
    broken_by(&[(path, &format!("{HEADER}{text}"))])
}

#[test]
fn an_import_that_points_up_is_found_however_it_is_written() {
    for text in [
        "use crate::engine;\n",
        "use crate::engine::Engine;\n",
        "pub use crate::{model::Id, engine::{self, Pool}};\n",
        "use crate::{\n    model,\n    engine,\n};\n",
        "fn f() { crate::engine::start(); }\n",
        "fn f() -> Result<(), crate :: engine::Error> { Ok(()) }\n",
        "use super::super::engine::Engine;\n",
        "use super::super::{model, engine};\n",
        "#[cfg(test)]\nmod tests { use super::super::super::engine; }\n",
        "macro_rules! m { () => { $crate::engine::start() } }\n",
        "const S: &str = \"// no comment\"; use crate::engine;\n",
        "const C: char = '\"'; use crate::engine; const D: char = '\"';\n",
        "use crate::r#engine;\n",
    ] {
        let broken = broken_by_one("store/index.rs", text);
        assert_eq!(broken.len(), 1, "{text}: {broken:?}");
        assert!(
            broken[0].contains("store (tier 3) uses engine (tier 5)"),
            "{text}: {broken:?}"
        );
    }
}

#[test]
fn modules_of_one_tier_do_not_use_each_other_except_at_the_top() {
    let broken = broken_by_one("csi/node.rs", "use crate::http;\n");
    assert!(
        broken[0].contains("csi (tier 10) uses http (tier 10)"),
        "{broken:?}"
    );
    let broken = broken_by_one("sys/x.rs", "use crate::model;\n");
    assert!(
        broken[0].contains("sys (tier 0) uses model (tier 0)"),
        "{broken:?}"
    );
    assert_eq!(broken_by_one("demo/x.rs", "use crate::config;\n"), [""; 0]);
    let broken = broken_by_one("engine/state.rs", "use crate::proto::csi;\n");
    assert!(
        broken[0].contains("engine (tier 5) uses proto (tier 7)"),
        "{broken:?}"
    );
}

#[test]
fn what_points_down_or_only_looks_like_a_path_is_let_be() {
    let text = r##"
use crate::sys::Dir;
use crate::{backend, model::{self, engine}, store::csi};
use super::super::engine::error::x;
pub(crate) fn f<'a>(s: &'a str) -> &'a str { s }
// use crate::csi;
/* use crate::csi; /* nested */ use crate::http; */
/// See [`crate::csi`].
const A: &str = "crate::csi";
const B: &str = r#"crate::csi " crate::http"#;
const C: char = '\'';
mod inner { use super::super::pending; }
mod tests { use super::super::super::model; }
"##;
    assert_eq!(broken_by_one("engine/seal.rs", text), [""; 0]);
    assert_eq!(broken_by_one("main.rs", "use crate::csi;\n"), [""; 0]);
}

#[test]
fn the_catalog_uses_the_model_only() {
    assert_eq!(
        broken_by_one("catalog/find.rs", "use crate::model::Name;\n"),
        [""; 0]
    );
    for used in ["sys", "engine", "store"] {
        let broken = broken_by_one("catalog/find.rs", &format!("use crate::{used}::x;\n"));
        let expected = format!("catalog uses {used}; it is pure and uses model only");
        assert!(broken[0].ends_with(&expected), "{broken:?}");
    }
}

#[test]
fn a_module_without_a_tier_is_found() {
    let broken = broken_by_one("attic/mod.rs", "");
    assert_eq!(
        broken,
        ["attic/mod.rs: the module attic has no tier (tests/architecture.rs)"]
    );
    let broken = broken_by(&[
        ("attic.rs", HEADER),
        ("engine/mod.rs", &format!("{HEADER}use crate::attic;\n")),
    ]);
    assert!(
        broken
            .iter()
            .any(|line| line.starts_with("engine/mod.rs:3: uses attic")),
        "{broken:?}"
    );
    // Items of the crate's root are no modules.
    assert_eq!(
        broken_by_one("engine/mod.rs", "use crate::VERSION;\n"),
        [""; 0]
    );
}

#[test]
fn unsafe_outside_its_module_is_found() {
    let text = "// unsafe\n#![deny(unsafe_code)]\nfn f() { unsafe { g() } }\n";
    assert_eq!(
        broken_by_one("engine/mod.rs", text),
        ["engine/mod.rs:5: unsafe belongs in sys"]
    );
    assert_eq!(broken_by_one("sys/mod.rs", text), [""; 0]);
}

#[test]
fn a_file_that_does_not_say_what_it_is_for_is_found() {
    for text in [
        "",
        "use std::fs;\n",
        "//! One line.\nfn f() {}\n",
        "//! One.\n//!\n",
        "// A.\n// B.\n",
    ] {
        let broken = broken_by(&[("engine/mod.rs", text)]);
        assert_eq!(broken.len(), 1, "{text:?}: {broken:?}");
        assert!(broken[0].contains("begins with `//!`"), "{broken:?}");
    }
}

#[test]
fn a_file_that_is_too_long_is_found() {
    let mut text = HEADER.to_owned();
    while text.lines().count() < MOST_LINES {
        text.push_str("// more\n");
    }
    let tests = format!("{text}#[cfg(test)]\nmod tests {{}}\n");
    assert_eq!(broken_by(&[("engine/mod.rs", &tests)]), [""; 0]);
    assert_eq!(
        broken_by(&[("engine/tests.rs", &format!("{text}// more\n"))]),
        [""; 0]
    );
    text.push_str("// more\n");
    assert_eq!(
        broken_by(&[("engine/mod.rs", &text)]),
        ["engine/mod.rs: 601 lines without tests; a file has at most 600"]
    );
}

/// What is said of an import of one module of the engine by another.
fn upward(module: &str, used: &str) -> String {
    let named = |module: &str| {
        let tier = tier(&ENGINE_TIERS, module).expect("it has a tier");
        let name = full_name(module);
        format!("{name} (engine's tier {tier})")
    };
    format!("{} uses {}", named(module), named(used))
}

#[test]
fn an_upward_import_inside_the_engine_is_found_however_it_is_written() {
    let up = &upward("space", "seal");
    for text in [
        "use super::seal::settle;\n",
        "use super::{error, seal::{self, settle}};\n",
        "use crate::engine::seal;\n",
        "use crate::engine::{error::Error, seal};\n",
        "use crate::{model, engine::{seal, error}};\n",
        "fn f() { super::seal::settle(); }\n",
        "mod inner { use super::super::seal; }\n",
    ] {
        let broken = broken_by_one("engine/space.rs", text);
        assert_eq!(broken.len(), 1, "{text}: {broken:?}");
        assert!(broken[0].contains(up), "{text}: {broken:?}");
    }
    let broken = broken_by_one("engine/claims/create.rs", "use super::snapshot;\n");
    assert_eq!(broken, [""; 0], "they are of one tier");
    let broken = broken_by_one("engine/claims/create.rs", "use super::maintenance;\n");
    let collection = upward("claims::create", "claims::maintenance");
    assert!(broken[0].contains(&collection), "{broken:?}");
    // A re-export of the facade belongs to the facade.
    let broken = broken_by_one("engine/claims/create.rs", "use crate::engine::Engine;\n");
    let facade = upward("claims::create", "engine");
    assert!(broken[0].contains(&facade), "{broken:?}");
    let broken = broken_by_one("engine/claims/create.rs", "use super::Claims;\n");
    assert!(
        broken[0].contains(&upward("claims::create", "claims")),
        "{broken:?}"
    );
}

#[test]
fn a_cycle_of_two_modules_of_the_engine_is_found() {
    let layers = format!("{HEADER}use super::transaction::sync;\n");
    let transaction = format!("{HEADER}use super::layers::confirm;\n");
    let files = [
        ("engine/layers.rs", layers.as_str()),
        ("engine/transaction.rs", &transaction),
    ];
    let up = upward("layers", "transaction");
    let up = format!("engine/layers.rs:3: {up}; imports point down");
    assert_eq!(broken_by(&files), [up]);
}

#[test]
fn unit_tests_of_the_engine_may_use_its_facade() {
    let text = "#[cfg(test)]\nmod tests {\n    use crate::engine::{Config, Engine};\n    use super::super::seal;\n}\n";
    assert_eq!(broken_by_one("engine/space.rs", text), [""; 0]);
    assert_eq!(
        broken_by_one("engine/state/tests.rs", "use crate::engine::Engine;\n"),
        [""; 0]
    );
}

#[test]
fn a_module_of_the_engine_without_a_tier_is_found() {
    assert_eq!(
        broken_by_one("engine/attic.rs", ""),
        [
            "engine/attic.rs: the module engine::attic has no tier in the engine (tests/architecture.rs)"
        ]
    );
}

#[test]
fn a_struct_of_the_engine_that_everyone_can_reach_into_is_found() {
    let with = |count: usize, field: &str| {
        let fields =
            (0..count).map(|number| format!("    {field} f{number}: HashMap<u8, [u8; 2]>,\n"));
        let fields: String = fields.collect();
        format!("#[derive(Debug)]\npub(super) struct S<'a> {{\n{fields}}}\nfn f() {{}}\n")
    };
    for field in [
        "pub(super)",
        "pub(crate)",
        "pub(in crate::engine)",
        "/// Why.\n    pub",
    ] {
        let broken = broken_by_one("engine/space.rs", &with(MOST_OPEN_FIELDS + 1, field));
        assert_eq!(
            broken,
            ["engine/space.rs:4: struct S has 13 fields that other modules reach into; at most 12"],
            "{field}"
        );
        let broken = broken_by_one("engine/space.rs", &with(MOST_OPEN_FIELDS, field));
        assert_eq!(broken, [""; 0], "{field}");
    }
    assert_eq!(broken_by_one("engine/space.rs", &with(20, "")), [""; 0]);
    assert_eq!(broken_by_one("csi/x.rs", &with(20, "pub(super)")), [""; 0]);
    let public = with(20, "pub").replace("pub(super) struct", "pub struct");
    assert_eq!(broken_by_one("engine/space.rs", &public), [""; 0]);
}

#[test]
fn a_cycle_of_too_many_files_is_found() {
    let with = |files: &[(&str, &str)]| {
        let headed: Vec<(&str, String)> = files
            .iter()
            .map(|(path, text)| (*path, format!("{HEADER}{text}")))
            .collect();
        let files: Vec<(&str, &str)> = headed
            .iter()
            .map(|(path, text)| (*path, text.as_str()))
            .collect();
        broken_by(&files)
    };
    // Children that take types from their `mod.rs`, which uses them.
    let ways = [
        "use a::A;\nuse b::B;\nuse c::C;\n",
        "pub use self::{a::A, b::B, c::C};\n",
        "fn f() { a::f(); b::f(); c::f(); }\n",
    ];
    for way in ways {
        let root = format!("mod a;\nmod b;\nmod c;\n{way}pub struct Shared;\n");
        let (root, takes) = (root.as_str(), "use super::Shared;\n");
        let files = [
            ("csi/mod.rs", root),
            ("csi/a.rs", takes),
            ("csi/b.rs", takes),
            ("csi/c.rs", takes),
        ];
        let broken = with(&files);
        assert_eq!(broken.len(), 1, "{way}: {broken:?}");
        let expected = "csi/a.rs: in a cycle of 4 files, which has at most 3: csi/a.rs:3 uses \
                        csi/mod.rs, csi/b.rs:3 uses csi/mod.rs, ";
        assert!(broken[0].starts_with(expected), "{broken:?}");
        assert_eq!(with(&files[..3]), [""; 0], "{way}");
    }
    // Modules that are only declared, and unit tests, are no uses.
    let tests = "#[cfg(test)]\nmod tests { use super::super::Shared; }\n";
    let declared = "mod a;\nmod b;\nmod c;\npub struct Shared;\n";
    for (root, takes) in [(declared, "use super::Shared;\n"), (ways[0], tests)] {
        let files = [
            ("csi/mod.rs", root),
            ("csi/a.rs", takes),
            ("csi/b.rs", takes),
            ("csi/c.rs", takes),
        ];
        assert_eq!(with(&files), [""; 0], "{root}");
    }
    // A ring, without a `mod.rs`.
    let ring = [
        ("csi/a.rs", "use super::b::x;\n"),
        ("csi/b.rs", "use crate::csi::{c::{self, x}};\n"),
        ("csi/c.rs", "fn f() { super::d::x(); }\n"),
        ("csi/d.rs", "use super::a;\n"),
    ];
    assert_eq!(with(&ring).len(), 1);
    assert_eq!(with(&ring[..3]), [""; 0]);
}

// ---- The inspector ----------------------------------------------------------------------------

/// Every broken rule below `src`, a line each.
fn inspect(src: &Path) -> Vec<String> {
    let mut broken = Vec::new();
    let mut waiting = vec![src.to_owned()];
    let mut files = Vec::new();
    while let Some(dir) = waiting.pop() {
        for entry in fs::read_dir(&dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display())) {
            let path = entry.expect("it can be listed").path();
            if path.is_dir() {
                waiting.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                files.push(path);
            }
        }
    }
    files.sort();
    let mut used = BTreeMap::new();
    for file in files {
        let text = fs::read_to_string(&file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
        inspect_file(src, &file, &text, &mut broken);
        let name = file.strip_prefix(src).expect("it is below");
        let module = module_of(name);
        // main.rs and lib.rs may use everything.
        if !module.is_empty() && !module.iter().any(|part| part == "tests") {
            let imports = uses(&tokens(&text), &module);
            used.insert(module, (name.display().to_string(), imports));
        }
    }
    inspect_cycles(&used, &mut broken);
    broken
}

/// The files, by module: the name of each, and what it uses.
type Files = BTreeMap<Vec<String>, (String, Vec<Import>)>;

/// Cycles of imports that have too many files.
fn inspect_cycles(files: &Files, broken: &mut Vec<String>) {
    let file_of = |path: &[String]| {
        let mut beginnings = (1..=path.len()).rev().map(|length| &path[..length]);
        beginnings.find_map(|module| files.get_key_value(module))
    };
    // For each file, the files that it uses, and the line.
    let mut graph: BTreeMap<&str, BTreeMap<&str, usize>> = BTreeMap::new();
    for (name, imports) in files.values() {
        let edges = graph.entry(name).or_default();
        for import in imports.iter().filter(|import| !import.in_tests) {
            if let Some((_, (used, _))) = file_of(&import.path)
                && used != name
            {
                edges.entry(used).or_insert(import.line);
            }
        }
    }
    let reached = |from: &str| {
        let mut reached: BTreeSet<&str> = BTreeSet::new();
        let mut waiting: Vec<&str> = graph[from].keys().copied().collect();
        while let Some(file) = waiting.pop() {
            if reached.insert(file) {
                waiting.extend(graph[file].keys());
            }
        }
        reached
    };
    let reached: BTreeMap<&str, BTreeSet<&str>> =
        graph.keys().map(|file| (*file, reached(file))).collect();
    for (file, others) in &reached {
        let cycle: Vec<&str> = others
            .iter()
            .copied()
            .filter(|other| reached[other].contains(file))
            .collect();
        if cycle.len() <= MOST_IN_CYCLE || cycle[0] != *file {
            continue;
        }
        let inside = |from: &&str| {
            let edges = graph[from].iter().filter(|(to, _)| cycle.contains(to));
            let edges = edges.map(|(to, line)| format!("{from}:{line} uses {to}"));
            edges.collect::<Vec<String>>()
        };
        let edges: Vec<String> = cycle.iter().flat_map(inside).collect();
        broken.push(format!(
            "{file}: in a cycle of {} files, which has at most {MOST_IN_CYCLE}: {}",
            cycle.len(),
            edges.join(", ")
        ));
    }
}

fn inspect_file(src: &Path, file: &Path, text: &str, broken: &mut Vec<String>) {
    let name = file.strip_prefix(src).expect("it is below").to_owned();
    let place = name.display().to_string();

    let header = text
        .lines()
        .take_while(|line| line.starts_with("//!"))
        .filter(|line| line.len() > "//! ".len())
        .count();
    if header < 2 {
        broken.push(format!(
            "{place}: begins with `//!`, two lines or more, saying what it is and what may live in it"
        ));
    }
    let module = module_of(&name);
    let lines = product_lines(text, &module);
    if lines > MOST_LINES {
        broken.push(format!(
            "{place}: {lines} lines without tests; a file has at most {MOST_LINES}"
        ));
    }

    let top = module.first().map(String::as_str);
    if let Some(top) = top
        && tier(&TIERS, top).is_none()
    {
        broken.push(format!(
            "{place}: the module {top} has no tier (tests/architecture.rs)"
        ));
        return;
    }
    let tokens = tokens(text);
    if top != Some(UNSAFE_MODULE)
        && let Some(token) = tokens.iter().find(|token| token.text == "unsafe")
    {
        broken.push(format!(
            "{place}:{}: unsafe belongs in {UNSAFE_MODULE}",
            token.line
        ));
    }
    // main.rs and lib.rs may use everything.
    let Some(top) = top else { return };
    let imports = uses(&tokens, &module);
    for import in &imports {
        let Some(used) = import.path.first() else {
            continue;
        };
        if used == top {
            continue;
        }
        let line = import.line;
        if top == "catalog" && used != "model" {
            once(
                broken,
                format!("{place}:{line}: catalog uses {used}; it is pure and uses model only"),
            );
            continue;
        }
        match (tier(&TIERS, top), tier(&TIERS, used)) {
            (Some(here), Some(there))
                if there > here || (there == here && here + 1 < TIERS.len()) =>
            {
                once(
                    broken,
                    format!(
                        "{place}:{line}: {top} (tier {here}) uses {used} (tier {there}); imports point down"
                    ),
                );
            }
            (_, None) if src.join(used).is_dir() || src.join(format!("{used}.rs")).is_file() => {
                broken.push(format!(
                    "{place}:{line}: uses {used}, a module without a tier (tests/architecture.rs)"
                ));
            }
            _ => {}
        }
    }
    if top == "engine" {
        inspect_fields(&place, &tokens, broken);
        inspect_engine(&place, &module, &imports, broken);
    }
}

/// The lines of a file without its unit tests, which are its end or the whole file.
fn product_lines(text: &str, module: &[String]) -> usize {
    if module.iter().any(|part| part == "tests") {
        return 0;
    }
    let product = text.split_once("\n#[cfg(test)]\nmod tests {");
    product.map_or(text, |(product, _)| product).lines().count()
}

/// Adds a finding, unless it is there: a group may name a module more than once.
fn once(broken: &mut Vec<String>, finding: String) {
    if !broken.contains(&finding) {
        broken.push(finding);
    }
}

/// The same inside the engine.
fn inspect_engine(place: &str, module: &[String], imports: &[Import], broken: &mut Vec<String>) {
    // `state/tests.rs` holds the unit tests of `state.rs`.
    if module.last().is_some_and(|last| last == "tests") {
        return;
    }
    let name = module[1..].join("::");
    let name = if name.is_empty() { "engine" } else { &name };
    let Some(here) = tier(&ENGINE_TIERS, name) else {
        broken.push(format!(
            "{place}: the module engine::{name} has no tier in the engine (tests/architecture.rs)"
        ));
        return;
    };
    // A `mod.rs` may re-export what is above it.
    for import in imports.iter().filter(|it| !it.in_tests && !it.is_below) {
        if import.path.first().is_none_or(|first| first != "engine") {
            continue;
        }
        let (used, there) = module_of_engine(&import.path[1..]);
        if used != name && there > here {
            let finding = format!(
                "{place}:{}: {} (engine's tier {here}) uses {} (engine's tier {there}); imports point down",
                import.line,
                full_name(name),
                full_name(&used)
            );
            once(broken, finding);
        }
    }
}

/// Structs with too many fields that other modules can reach.
fn inspect_fields(place: &str, tokens: &[Token], broken: &mut Vec<String>) {
    let at = |index: usize| tokens.get(index).map_or("", |token| token.text.as_str());
    for index in (0..tokens.len()).filter(|&index| at(index) == "struct") {
        if index > 0 && at(index - 1) == "pub" {
            continue;
        }
        let mut next = index + 1;
        while !matches!(at(next), "{" | ";" | "(" | "") {
            next += 1;
        }
        if at(next) != "{" {
            continue;
        }
        let (mut depth, mut open) = (0, 0);
        loop {
            match at(next) {
                "{" => depth += 1,
                "}" => depth -= 1,
                "pub" if depth == 1 => open += 1,
                _ => {}
            }
            next += 1;
            if depth == 0 || next >= tokens.len() {
                break;
            }
        }
        if open > MOST_OPEN_FIELDS {
            broken.push(format!(
                "{place}:{}: struct {} has {open} fields that other modules reach into; at most \
                 {MOST_OPEN_FIELDS}",
                tokens[index].line,
                at(index + 1)
            ));
        }
    }
}

/// The name of a module of the engine from the crate's root on.
fn full_name(module: &str) -> String {
    match module {
        "engine" => "engine".to_owned(),
        module => format!("engine::{module}"),
    }
}

/// The module of the engine that a path below it names, and its tier: the longest known prefix of
/// the path. An unknown path is the facade's.
fn module_of_engine(path: &[String]) -> (String, usize) {
    let beginnings = (1..=path.len()).rev();
    let modules = beginnings.map(|length| path[..length].join("::"));
    let mut known = modules.filter_map(|name| Some((tier(&ENGINE_TIERS, &name)?, name)));
    match known.next() {
        Some((tier, name)) => (name, tier),
        None => (
            "engine".to_owned(),
            tier(&ENGINE_TIERS, "engine").expect("the facade has one"),
        ),
    }
}

fn tier(tiers: &[Tier], module: &str) -> Option<usize> {
    tiers
        .iter()
        .position(|(_, modules)| modules.contains(&module))
}

/// `engine/seal/top.rs` is `engine::seal::top`; `main.rs` and `lib.rs` are the root.
fn module_of(name: &Path) -> Vec<String> {
    let mut parts: Vec<String> = PathBuf::from(name)
        .with_extension("")
        .components()
        .map(|part| {
            part.as_os_str()
                .to_str()
                .expect("sources have plain names")
                .to_owned()
        })
        .collect();
    if parts.last().is_some_and(|last| last == "mod")
        || (parts.len() == 1 && matches!(parts[0].as_str(), "main" | "lib"))
    {
        parts.pop();
    }
    parts
}

/// A path that a file names.
struct Import {
    line: usize,
    /// From the crate's root.
    path: Vec<String>,
    /// Whether it is named in a `mod tests { … }`.
    in_tests: bool,
    /// Whether it is named from `self` or a child module on.
    is_below: bool,
}

/// The paths that begin with `crate::`, `super::`, `self::` or a child module, each member of a
/// group for itself. `module` is the file's.
fn uses(tokens: &[Token], module: &[String]) -> Vec<Import> {
    let at = |index: usize| tokens.get(index).map_or("", |token| token.text.as_str());
    let is_module = |index: &usize| at(*index) == "mod" && at(index + 2) == ";";
    let modules = (0..tokens.len()).filter(is_module);
    let children: BTreeSet<&str> = modules.map(|index| at(index + 1)).collect();
    let mut found = Vec::new();
    // The name of the module that each open brace is of, if it is of one.
    let mut braces: Vec<Option<&str>> = Vec::new();
    let mut index = 0;
    while index < tokens.len() {
        match at(index) {
            "{" => {
                let is_module = index >= 2 && at(index - 2) == "mod";
                braces.push(is_module.then(|| at(index - 1)));
            }
            "}" => {
                braces.pop();
            }
            // `pub(in crate::engine)` uses nothing.
            first @ ("crate" | "super")
                if at(index + 1) == "::" && (index == 0 || at(index - 1) != "in") =>
            {
                let inner = braces.iter().flatten();
                let in_tests = inner.clone().any(|name| *name == "tests");
                let mut base = module.to_vec();
                base.extend(inner.map(ToString::to_string));
                if first == "crate" {
                    base.clear();
                } else {
                    base.pop();
                }
                let mut next = index + 2;
                while at(next) == "super" && at(next + 1) == "::" {
                    base.pop();
                    next += 2;
                }
                // A group's braces are balanced, so they need not be counted.
                let found_at = found.len();
                index = paths(tokens, next, &base, &mut found);
                for import in &mut found[found_at..] {
                    import.in_tests = in_tests;
                }
                continue;
            }
            first
                if (first == "self" || children.contains(first))
                    && at(index + 1) == "::"
                    && (index == 0 || !matches!(at(index - 1), "::" | "."))
                    && braces.iter().flatten().next().is_none() =>
            {
                let next = if first == "self" { index + 2 } else { index };
                let found_at = found.len();
                index = paths(tokens, next, module, &mut found);
                for import in &mut found[found_at..] {
                    import.is_below = true;
                }
                continue;
            }
            _ => {}
        }
        index += 1;
    }
    found
}

/// The path that goes on at `index` below `base`, or those of the group there. Returns where it
/// ends.
fn paths(tokens: &[Token], mut index: usize, base: &[String], found: &mut Vec<Import>) -> usize {
    let at = |index: usize| tokens.get(index).map_or("", |token| token.text.as_str());
    let mut path = base.to_vec();
    while at(index) != "{" {
        let Some(token) = tokens.get(index) else {
            return index;
        };
        if token.text != "self" {
            path.push(token.text.clone());
        }
        if at(index + 1) != "::" {
            let line = token.line;
            found.push(Import {
                line,
                path,
                in_tests: false,
                is_below: false,
            });
            return index + 1;
        }
        index += 2;
    }
    index += 1;
    while !matches!(at(index), "}" | "") {
        index = paths(tokens, index, &path, found);
        // `as name` and the comma.
        while !matches!(at(index), "," | "}" | "") {
            index += 1;
        }
        if at(index) == "," {
            index += 1;
        }
    }
    index + 1
}

struct Token {
    line: usize,
    text: String,
}

/// Names and punctuation, without comments and without what stands in quotes. Knows as much of Rust
/// as this test needs.
fn tokens(text: &str) -> Vec<Token> {
    let chars: Vec<char> = text.chars().collect();
    let at = |index: usize| chars.get(index).copied().unwrap_or('\0');
    let mut tokens = Vec::new();
    let mut line = 1;
    let mut index = 0;
    while index < chars.len() {
        let start = index;
        match chars[index] {
            '/' if at(index + 1) == '/' => {
                while index < chars.len() && at(index) != '\n' {
                    index += 1;
                }
            }
            '/' if at(index + 1) == '*' => index = end_of_comment(&chars, index),
            '"' => index = end_of_string(&chars, index),
            '\'' => index = end_of_char_or_lifetime(&chars, index),
            c if c.is_alphanumeric() || c == '_' => {
                while at(index).is_alphanumeric() || at(index) == '_' {
                    index += 1;
                }
                let word: String = chars[start..index].iter().collect();
                let raw = matches!(word.as_str(), "r" | "br" | "cr");
                if raw && (at(index) == '"' || at(index) == '#') {
                    let mut hashes = 0;
                    while at(index + hashes) == '#' {
                        hashes += 1;
                    }
                    if at(index + hashes) == '"' {
                        index = end_of_raw_string(&chars, index + hashes + 1, hashes);
                    } else {
                        index += hashes; // r#name
                    }
                } else {
                    tokens.push(Token { line, text: word });
                }
            }
            ':' if at(index + 1) == ':' => {
                tokens.push(Token {
                    line,
                    text: "::".to_owned(),
                });
                index += 2;
            }
            c => {
                if !c.is_whitespace() {
                    let mut text = String::new();
                    let _ = write!(text, "{c}");
                    tokens.push(Token { line, text });
                }
                index += 1;
            }
        }
        line += chars[start..index].iter().filter(|&&c| c == '\n').count();
    }
    tokens
}

fn end_of_comment(chars: &[char], mut index: usize) -> usize {
    let mut depth = 0;
    while index < chars.len() {
        match (chars[index], chars.get(index + 1)) {
            ('/', Some('*')) => {
                depth += 1;
                index += 2;
            }
            ('*', Some('/')) => {
                depth -= 1;
                index += 2;
                if depth == 0 {
                    break;
                }
            }
            _ => index += 1,
        }
    }
    index.min(chars.len())
}

fn end_of_string(chars: &[char], mut index: usize) -> usize {
    index += 1;
    while index < chars.len() {
        match chars[index] {
            '\\' => index += 2,
            '"' => return index + 1,
            _ => index += 1,
        }
    }
    chars.len()
}

fn end_of_raw_string(chars: &[char], mut index: usize, hashes: usize) -> usize {
    while index < chars.len() {
        let closing = chars.get(index + 1..=index + hashes);
        if chars[index] == '"' && closing.is_some_and(|tail| tail.iter().all(|&c| c == '#')) {
            return index + 1 + hashes;
        }
        index += 1;
    }
    chars.len()
}

fn end_of_char_or_lifetime(chars: &[char], index: usize) -> usize {
    if chars.get(index + 1) == Some(&'\\') {
        let close = chars.iter().skip(index + 3).position(|&c| c == '\'');
        return close.map_or(chars.len(), |offset| index + 3 + offset + 1);
    }
    if chars.get(index + 2) == Some(&'\'') {
        return index + 3;
    }
    index + 1
}
