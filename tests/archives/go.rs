//! Go's `archive/tar` as the reader: what `tests/go-tar/` says of an archive is compared with the
//! tree that was packed.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use baggageclaim::archive::LayerMarks;
use serde::Deserialize;

use crate::common::snapshot::Entry;
use crate::common::{Fs, Lab, Snapshot, assert_same, go, require_lab, skip};
use crate::trips::{odd, set};
use crate::{kept, open, pack};

/// An entry as the program prints it.
#[derive(Deserialize)]
struct Said {
    name: String,
    #[serde(rename = "type")]
    kind: String,
    size: u64,
    mode: u32,
    uid: u32,
    gid: u32,
    seconds: i64,
    nanos: i64,
    target: String,
    major: u32,
    minor: u32,
    records: BTreeMap<String, String>,
    sha256: String,
}

fn bytes(hex: &str) -> Vec<u8> {
    let pairs = hex.as_bytes().chunks(2);
    let texts = pairs.map(|pair| std::str::from_utf8(pair).expect("hex"));
    texts
        .map(|text| u8::from_str_radix(text, 16).expect("hex"))
        .collect()
}

impl Said {
    /// The path as a snapshot has it: the root's is empty, a directory's has no slash at its end.
    fn path(&self) -> Vec<u8> {
        let name = bytes(&self.name);
        let name = name.strip_suffix(b"/").unwrap_or(&name);
        if name == b"." {
            return Vec::new();
        }
        name.to_vec()
    }

    fn records(&self) -> BTreeMap<Vec<u8>, Vec<u8>> {
        let records = self.records.iter();
        records.map(|(k, v)| (bytes(k), bytes(v))).collect()
    }

    /// The attributes in its records.
    fn xattrs(&self) -> BTreeMap<Vec<u8>, Vec<u8>> {
        let mut found = BTreeMap::new();
        for (key, value) in self.records() {
            if let Some(name) = key.strip_prefix(b"SCHILY.xattr.") {
                let name = String::from_utf8(name.to_vec()).expect("text");
                let name = name.replace("%3D", "=").replace("%25", "%");
                found.insert(name.into_bytes(), value);
            } else if let Some(name) = key.strip_prefix(b"SCHILY.acl.") {
                let name = [b"system.posix_acl_", name].concat();
                found.insert(name, value);
            }
        }
        found
    }
}

/// The program; without Go the test is skipped, in CI it fails.
fn program() -> Option<PathBuf> {
    match go::build("go-tar", ".", "go-tar") {
        Ok(program) => Some(program),
        Err(reason) => {
            skip(&reason);
            None
        }
    }
}

fn listed(program: &Path, archive: &[u8]) -> Vec<Said> {
    let mut child = Command::new(program)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    let mut input = child.stdin.take().expect("it is piped");
    let output = std::thread::scope(|scope| {
        // One that fails reads no further; its exit status says so.
        scope.spawn(move || input.write_all(archive));
        child.wait_with_output().expect("it ends")
    });
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let lines = output.stdout.split(|byte| *byte == b'\n');
    let lines = lines.filter(|line| !line.is_empty());
    lines
        .map(|line| serde_json::from_slice(line).expect("JSON"))
        .collect()
}

/// The ACL of `trips::odd`, as text.
const ACL: &[u8] = b"user::rw-,user:54321:r--,group::r--,group:4000000000:rw-,mask::r--,other::---";

/// The tree as the reader shows it.
fn tree_of(said: &[Said]) -> Snapshot {
    let mut snapshot = Snapshot {
        entries: BTreeMap::new(),
    };
    for entry in said {
        let path = entry.path();
        let kind = match entry.kind.as_str() {
            "0" => 'f',
            "1" => 'h',
            "2" => 'l',
            "3" => 'c',
            "4" => 'b',
            "5" => 'd',
            "6" => 'p',
            other => panic!("{other} of {}", path.escape_ascii()),
        };
        let shown = if kind == 'h' {
            // What a link is, its file says. Its own head repeats mode, owner and time.
            let target = bytes(&entry.target);
            let file = snapshot.entries.get(&target).expect("its file came before");
            let (mode, time) = (entry.mode, (entry.seconds, entry.nanos));
            assert_eq!(
                (file.mode, file.uid, file.gid),
                (mode, entry.uid, entry.gid)
            );
            assert_eq!((file.mtime, entry.size), (time, 0));
            Entry {
                same_as: Some(target),
                ..file.clone()
            }
        } else {
            let target = (kind == 'l').then(|| bytes(&entry.target));
            Entry {
                kind,
                mode: entry.mode,
                uid: entry.uid,
                gid: entry.gid,
                mtime: (entry.seconds, entry.nanos),
                size: target.as_ref().map_or(entry.size, |it| it.len() as u64),
                sha256: (kind == 'f').then(|| entry.sha256.clone()),
                target,
                device: matches!(kind, 'c' | 'b').then_some((entry.major, entry.minor)),
                same_as: None,
                xattrs: entry.xattrs(),
            }
        };
        assert!(
            snapshot.entries.insert(path, shown).is_none(),
            "it is twice"
        );
    }
    snapshot
}

/// Unpacks what a codec packed.
type Unpack = fn(&[u8]) -> Vec<u8>;

#[test]
fn go_reads_what_was_packed() {
    let lab = require_lab!(Fs::Ext4);
    let Some(program) = program() else { return };
    let from = lab.dir("from");
    odd(&from);
    set(&from.join("zero"), "user.a=b%c", b"line\nand =");
    let mut tree = kept(Snapshot::of(&from), true);
    for entry in tree.entries.values_mut() {
        for (name, value) in &mut entry.xattrs {
            if name.starts_with(b"system.posix_acl_") {
                *value = ACL.to_vec();
            }
        }
    }
    // Go's library has no zstd.
    let unpack: [Unpack; 3] = [
        <[u8]>::to_vec,
        |bytes| {
            let mut plain = Vec::new();
            let mut reader = flate2::read::MultiGzDecoder::new(bytes);
            std::io::copy(&mut reader, &mut plain).expect("gzip");
            plain
        },
        |bytes| zstd::decode_all(bytes).expect("zstd"),
    ];
    for (codec, unpack) in crate::CODECS.into_iter().zip(unpack) {
        let (bytes, _) = pack(&lab, &from, codec, true).expect("pack");
        let said = listed(&program, &unpack(&bytes));
        assert_same(&tree, &tree_of(&said));
        let order: Vec<Vec<u8>> = said.iter().map(Said::path).collect();
        assert_eq!(order[0], b"");
        let holes = said.iter().find(|said| said.path() == b"holes");
        let records = holes.expect("it is there").records();
        assert_eq!(records.get(&b"GNU.sparse.major"[..]), Some(&b"1".to_vec()));
    }
}

fn names(lab: &Lab, program: &Path, marks: LayerMarks) -> Vec<(String, Option<Vec<u8>>)> {
    let bytes = crate::layers::pack_layer(lab, &lab.dir("layer"), marks).expect("pack");
    let plain = zstd::decode_all(&bytes[..]).expect("zstd");
    let said = listed(program, &plain);
    let named = said.iter().map(|said| {
        let name = String::from_utf8(said.path()).expect("text");
        let mark = said.records().remove(&b"BAGGAGECLAIM.layer"[..]);
        (name, mark)
    });
    named.collect()
}

#[test]
fn go_reads_the_deletions_of_a_layer() {
    let lab = require_lab!(Fs::Ext4);
    let Some(program) = program() else { return };
    let layer = lab.dir("layer");
    fs::create_dir(layer.join("all")).expect("mkdir");
    set(&layer.join("all"), "trusted.overlay.opaque", b"y");
    fs::write(layer.join("all/new"), "new").expect("write");
    open(&layer).make_node("gone", 0o020_000, 0).expect("mknod");
    let mark = |text: &str| Some(text.as_bytes().to_vec());
    let expected = [
        (String::new(), None),
        ("all".to_owned(), mark("opaque")),
        ("all/new".to_owned(), None),
        ("gone".to_owned(), mark("whiteout")),
    ];
    assert_eq!(names(&lab, &program, LayerMarks::Records), expected);
    let oci = ["", "all", "all/.wh..wh..opq", "all/new", ".wh.gone"];
    let expected = oci.map(|name| (name.to_owned(), None));
    assert_eq!(names(&lab, &program, LayerMarks::Oci), expected);
}
