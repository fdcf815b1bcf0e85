//! The pages of the documentation and their manifests. Tests include this file by `#[path]`.

use std::fs;
use std::path::{Path, PathBuf};

/// The pages of the documentation, in order.
pub(crate) fn pages() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let directories = ["docs", "docs/design"].map(|directory| root.join(directory));
    let pages = directories
        .iter()
        .flat_map(|directory| fs::read_dir(directory).expect("docs/"));
    let pages = pages.map(|page| page.expect("a page").path());
    let is_page = |path: &PathBuf| path.extension().is_some_and(|its| its == "md");
    let mut pages: Vec<PathBuf> = pages.filter(is_page).collect();
    pages.extend(["README.md", "CONTRIBUTING.md", "SECURITY.md"].map(|page| root.join(page)));
    pages.sort();
    pages
}

/// The YAML blocks with whole manifests, and those that a shell command reads up to `END`, each
/// with its page. Fragments are left out.
pub(crate) fn manifests() -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    for page in pages() {
        let text = fs::read_to_string(&page).expect("a page is text");
        let between = |begin, end| {
            let rests = text.split(begin).skip(1);
            rests.map(move |rest| rest.split(end).next().unwrap_or_default())
        };
        for block in between("```yaml\n", "```").chain(between("<<END\n", "END\n")) {
            let is_whole =
                |line: &str| line.starts_with("apiVersion:") || line.starts_with("kind:");
            if block.lines().any(is_whole) {
                found.push((page.clone(), block.to_owned()));
            }
        }
    }
    found
}
