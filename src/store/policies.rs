//! `policies.json`: the policies of all namespaces, as the controller told them last.
//!
//! It is replaced durably. A file that does not parse, or has a field of a later version, is none:
//! the node then holds commits until the controller has told it the policies.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::records::{Unreadable, json, read_up_to};
use crate::model::{NamespacePolicy, Policies, Tenant, layout};
use crate::sys::{self, Dir, Errno};

/// The format that this version reads and writes.
const FORMAT: u32 = 1;
/// A larger file is none. The controller bounds each namespace.
const LIMIT: usize = 256 << 20;

#[derive(Debug, Serialize, Deserialize)]
struct File<Name: Ord, Policy> {
    format: u32,
    namespaces: BTreeMap<Name, Policy>,
}

/// Writes the policies. Those that are not known are not written.
pub fn write_policies(root: &Dir, policies: &Policies) -> sys::Result<()> {
    let Some(namespaces) = policies.all() else {
        return Ok(());
    };
    let file = File {
        format: FORMAT,
        namespaces,
    };
    replace(root, &json(&file), LIMIT)
}

/// Replaces the file, durably. What a start would not read is not written: EFBIG.
fn replace(root: &Dir, bytes: &[u8], limit: usize) -> sys::Result<()> {
    if bytes.len() > limit {
        return Err(root.error("write", layout::POLICIES_JSON, Errno::EFBIG));
    }
    root.replace_durably(layout::POLICIES_JSON, bytes)
}

/// Reads the policies.
pub fn read_policies(root: &Dir) -> sys::Result<Result<Policies, Unreadable>> {
    let file = read_up_to(root, layout::POLICIES_JSON, LIMIT)?;
    Ok(file.and_then(|file: File<Tenant, NamespacePolicy>| {
        if file.format == FORMAT {
            Ok(Policies::known(file.namespaces))
        } else {
            Err(Unreadable::Damaged(format!("format {}", file.format)))
        }
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{CommitRight, Name};

    #[test]
    fn policies_are_read_as_they_were_written_and_damaged_ones_are_none() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let root = Dir::open(folder.path()).expect("it opens");
        let read = || read_policies(&root).expect("the disk works");
        assert_eq!(read().expect_err("none"), Unreadable::Missing);
        write_policies(&root, &Policies::default()).expect("nothing to write");
        assert_eq!(read().expect_err("none"), Unreadable::Missing);

        let ci: Tenant = "ci".parse().expect("a label");
        let policies = Policies::known([(ci.clone(), NamespacePolicy::closed())]);
        write_policies(&root, &policies).expect("written");
        let found = read().expect("they are there");
        assert_eq!(found.all(), policies.all());
        let name = Name {
            tenant: ci,
            reference: "task-cache/a".parse().expect("a reference"),
        };
        assert_eq!(found.commit(&name, None), CommitRight::NotAllowed);

        let path = folder.path().join(layout::POLICIES_JSON);
        // Each field of this version; and a namespace without any, which is as none.
        let known = br#"{"format":1,"namespaces":{"no":{},"ci":{"rules":[{"names":["artifact/x"],
            "commit":["release"],"read":["qa"]}],"cacheLimit":5,"outputLimit":6}}}"#;
        std::fs::write(&path, known).expect("as it was written");
        let found = read().expect("it is read");
        assert_eq!(found.all().map(|all| all.len()), Some(1));
        write_policies(&root, &policies).expect("written");
        let whole = std::fs::read(&path).expect("read");
        let error = replace(&root, &whole, whole.len() - 1).expect_err("it is too large");
        assert!(error.is(Errno::EFBIG), "{error}");
        replace(&root, &whole, whole.len()).expect("written");
        assert_eq!(std::fs::read(&path).expect("it stays"), whole);
        for damaged in [
            b"".to_vec(),
            whole[..whole.len() - 1].to_vec(),
            br#"{"format":2,"namespaces":{}}"#.to_vec(),
            br#"{"format":1,"namespaces":{"ci":{"rules":[{"names":["x"]}]}}}"#.to_vec(),
            br#"{"format":1,"namespaces":{"ci":{"limit":1}}}"#.to_vec(),
            br#"{"format":1,"namespaces":{"ci":{"rules":[{"names":["artifact/x"],"x":1}]}}}"#
                .to_vec(),
        ] {
            std::fs::write(&path, &damaged).expect("damaged");
            let error = read().expect_err("it is none");
            assert!(matches!(error, Unreadable::Damaged(_)), "{error}");
        }
    }
}
