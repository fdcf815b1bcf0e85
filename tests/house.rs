//! The rules of the house, read from the source: who may know whom, where `unsafe` may stand, and that every
//! file says what may live in it.
//!
//! The rules are in CONTRIBUTING.md. A rule that no test can break is a wish, so each is tried on a small
//! tree that breaks it.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

/// The floors, from the ground up. A room may use the rooms of every floor below its own; rooms of one floor
/// do not know each other, except on the top floor, where everything is put together.
const FLOORS: [(&str, &[&str]); 8] = [
    ("used by all, use none", &["error", "model", "sys"]),
    ("seen by all that runs", &["telemetry"]),
    ("work on whole trees of files", &["tree"]),
    (
        "what the engine is made of",
        &["archive", "backend", "store"],
    ),
    ("the heart", &["engine"]),
    (
        "messages and sockets, for those who speak",
        &["proto", "server"],
    ),
    (
        "those who speak to the world",
        &[
            "admin",
            "csi",
            "http",
            "k8s",
            "kubelet",
            "kubelet_double",
            "peer",
        ],
    ),
    (
        "where it is put together",
        &["cli", "config", "demo", "driver", "node", "standalone"],
    ),
];

/// Files longer than this hold more than one thing.
const MOST_LINES: usize = 900;

/// The only room where `unsafe` may stand.
const UNSAFE_ROOM: &str = "sys";

#[test]
fn the_house_keeps_its_rules() {
    let broken = inspect(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"));
    assert!(broken.is_empty(), "\n{}\n", broken.join("\n"));
}

#[test]
fn every_room_has_one_floor() {
    let mut rooms: Vec<&str> = FLOORS
        .iter()
        .flat_map(|(_, rooms)| rooms.iter().copied())
        .collect();
    let all = rooms.len();
    rooms.sort_unstable();
    rooms.dedup();
    assert_eq!(rooms.len(), all);
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
            broken[0].contains("store (floor 3) uses engine (floor 4)"),
            "{text}: {broken:?}"
        );
    }
}

#[test]
fn neighbours_do_not_know_each_other_except_at_the_top() {
    let broken = broken_by_one("csi/node.rs", "use crate::http;\n");
    assert!(
        broken[0].contains("csi (floor 6) uses http (floor 6)"),
        "{broken:?}"
    );
    let broken = broken_by_one("sys/x.rs", "use crate::model;\n");
    assert!(
        broken[0].contains("sys (floor 0) uses model (floor 0)"),
        "{broken:?}"
    );
    assert_eq!(broken_by_one("demo/x.rs", "use crate::config;\n"), [""; 0]);
    let broken = broken_by_one("engine/x.rs", "use crate::proto::csi;\n");
    assert!(
        broken[0].contains("engine (floor 4) uses proto (floor 5)"),
        "{broken:?}"
    );
}

#[test]
fn what_points_down_or_only_looks_like_a_path_is_let_be() {
    let text = r##"
use crate::sys::Dir;
use crate::{backend, model::{self, engine}, store::csi};
use super::engine::x;
pub(crate) fn f<'a>(s: &'a str) -> &'a str { s }
// use crate::csi;
/* use crate::csi; /* nested */ use crate::http; */
/// See [`crate::csi`].
const A: &str = "crate::csi";
const B: &str = r#"crate::csi " crate::http"#;
const C: char = '\'';
mod inner { use super::super::seal; }
mod tests { use super::super::super::model; }
"##;
    assert_eq!(broken_by_one("engine/seal/top.rs", text), [""; 0]);
    assert_eq!(broken_by_one("main.rs", "use crate::csi;\n"), [""; 0]);
}

#[test]
fn a_room_without_a_floor_is_found() {
    let broken = broken_by_one("attic/mod.rs", "");
    assert_eq!(
        broken,
        ["attic/mod.rs: the room attic has no floor (tests/house.rs)"]
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
    // What the crate's root itself declares is nobody's room.
    assert_eq!(
        broken_by_one("engine/mod.rs", "use crate::VERSION;\n"),
        [""; 0]
    );
}

#[test]
fn unsafe_outside_its_room_is_found() {
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
    assert_eq!(
        broken_by(&[("engine/mod.rs", &text)]),
        ["engine/mod.rs: 900 lines; a file has fewer than 900"]
    );
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
    for file in files {
        let text = fs::read_to_string(&file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
        inspect_file(src, &file, &text, &mut broken);
    }
    broken
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
    let lines = text.lines().count();
    if lines >= MOST_LINES {
        broken.push(format!(
            "{place}: {lines} lines; a file has fewer than {MOST_LINES}"
        ));
    }

    let module = module_of(&name);
    let room = module.first().map(String::as_str);
    if let Some(room) = room
        && floor(room).is_none()
    {
        broken.push(format!(
            "{place}: the room {room} has no floor (tests/house.rs)"
        ));
        return;
    }
    let tokens = tokens(text);
    if room != Some(UNSAFE_ROOM)
        && let Some(token) = tokens.iter().find(|token| token.text == "unsafe")
    {
        broken.push(format!(
            "{place}:{}: unsafe belongs in {UNSAFE_ROOM}",
            token.line
        ));
    }
    // main.rs and lib.rs are the roof: they may use everything.
    let Some(room) = room else { return };
    for (line, used) in uses(&tokens, module.len()) {
        if used == room {
            continue;
        }
        match (floor(room), floor(&used)) {
            (Some(here), Some(there))
                if there > here || (there == here && here + 1 < FLOORS.len()) =>
            {
                broken.push(format!(
                    "{place}:{line}: {room} (floor {here}) uses {used} (floor {there}); imports point down"
                ));
            }
            (_, None) if src.join(&used).is_dir() || src.join(format!("{used}.rs")).is_file() => {
                broken.push(format!(
                    "{place}:{line}: uses {used}, a room without a floor (tests/house.rs)"
                ));
            }
            _ => {}
        }
    }
}

fn floor(room: &str) -> Option<usize> {
    FLOORS.iter().position(|(_, rooms)| rooms.contains(&room))
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

/// What stands directly below the crate's root and is named here, with its line: after `crate::`, or after as
/// many `super::` as lead there. `depth` is that of the file's module.
fn uses(tokens: &[Token], depth: usize) -> Vec<(usize, String)> {
    let at = |index: usize| tokens.get(index).map_or("", |token| token.text.as_str());
    let mut found = Vec::new();
    // Whether each open brace is that of a module.
    let mut braces = Vec::new();
    let mut index = 0;
    while index < tokens.len() {
        match at(index) {
            "{" => {
                let module = index >= 2 && at(index - 2) == "mod";
                braces.push(module);
            }
            "}" => {
                braces.pop();
            }
            first @ ("crate" | "super") if at(index + 1) == "::" => {
                let inside = depth + braces.iter().filter(|&&module| module).count();
                let mut left = if first == "crate" {
                    0
                } else {
                    inside.saturating_sub(1)
                };
                let mut next = index + 2;
                while at(next) == "super" && at(next + 1) == "::" {
                    left = left.saturating_sub(1);
                    next += 2;
                }
                if left == 0 {
                    names(tokens, next, &mut found);
                }
                // A group's braces are still to be counted, so go on right behind the path.
                index = next;
                continue;
            }
            _ => {}
        }
        index += 1;
    }
    found
}

/// The name at `index`, or the first name of each member of the group there.
fn names(tokens: &[Token], index: usize, found: &mut Vec<(usize, String)>) {
    let Some(token) = tokens.get(index) else {
        return;
    };
    if token.text != "{" {
        found.push((token.line, token.text.clone()));
        return;
    }
    let mut depth = 0;
    for (offset, token) in tokens[index..].iter().enumerate() {
        match token.text.as_str() {
            "{" => depth += 1,
            "}" => depth -= 1,
            _ if depth == 1 && matches!(tokens[index + offset - 1].text.as_str(), "{" | ",") => {
                found.push((token.line, token.text.clone()));
            }
            _ => {}
        }
        if depth == 0 {
            return;
        }
    }
}

struct Token {
    line: usize,
    text: String,
}

/// Names and punctuation, without comments and without what stands in quotes. Knows as much of Rust as this
/// test needs.
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
