//! Layers: a stack that overlayfs made is packed and unpacked layer by layer, on each backend, and
//! shows the same. And layers that lie.

#![expect(
    clippy::cast_possible_truncation,
    reason = "generations are few, and their numbers are content"
)]

use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, lchown, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use baggageclaim::archive::{
    self, Codec, Error, LayerMarks, Pack, Packed, Progress, Unpack, Unpacked,
};
use baggageclaim::sys::Dir;
use baggageclaim::tree::{self, Marks, Method};
use rustix::mount::{MountFlags, UnmountFlags};

use crate::common::{Fs, Lab, Snapshot, assert_same, require_lab, tree as made};
use crate::tar::Tar;
use crate::trips::set;
use crate::{found, kept, open};

/// How many layers the stack has.
pub(crate) const GENERATIONS: usize = 10;

pub(crate) fn pack_layer(lab: &Lab, from: &Path, marks: LayerMarks) -> archive::Result<Vec<u8>> {
    let temporary = lab.dir("temporary");
    let mut bytes = Vec::new();
    let how = Pack {
        codec: Codec::Zstd(1),
        devices: true,
        hashing: archive::Hashing::None,
        temporary: &open(&temporary),
    };
    let (root, progress) = (open(from), Progress::default());
    let _: Packed = archive::pack_layer(&root, marks, &mut bytes, how, &progress, &|| false)?;
    Ok(bytes)
}

pub(crate) fn how() -> Unpack {
    Unpack {
        devices: true,
        ..Unpack::default()
    }
}

fn unpack_layer(
    bytes: &[u8],
    to: &Path,
    below: &[Dir],
    marks: LayerMarks,
) -> archive::Result<Unpacked> {
    let progress = Progress::default();
    archive::unpack_layer(bytes, &open(to), below, marks, how(), &progress, &|| false)
}

fn unpack_onto(bytes: &[u8], tree: &Path, marks: LayerMarks) -> archive::Result<Unpacked> {
    let progress = Progress::default();
    archive::unpack_onto(bytes, &open(tree), marks, how(), &progress, &|| false)
}

/// An overlay that is unmounted in the end.
pub(crate) struct Overlay(PathBuf);

impl Overlay {
    /// Mounts `layers`, newest first; with `top` they can be written over.
    pub(crate) fn mount(at: PathBuf, layers: &[PathBuf], top: Option<(&Path, &Path)>) -> Self {
        let names: Vec<_> = layers
            .iter()
            .map(|path| path.to_str().expect("text"))
            .collect();
        let mut options = format!(
            "lowerdir={},metacopy=off,redirect_dir=nofollow,index=off,xino=off",
            names.join(":")
        );
        if let Some((top, work)) = top {
            let (top, work) = (top.display(), work.display());
            options = format!("{options},upperdir={top},workdir={work}");
        }
        let options = std::ffi::CString::new(options).expect("no NUL");
        let none = MountFlags::empty();
        rustix::mount::mount("layers", &at, "overlay", none, Some(&*options)).expect("overlay");
        Self(at)
    }

    fn snapshot(&self) -> Snapshot {
        shown(&self.0)
    }
}

impl Drop for Overlay {
    fn drop(&mut self) {
        rustix::mount::unmount(&self.0, UnmountFlags::DETACH).expect("umount");
    }
}

/// What is compared: as archives keep it.
pub(crate) fn shown(tree: &Path) -> Snapshot {
    kept(found(tree), true)
}

fn mv(from: &Path, to: &Path) {
    // Renaming a directory of a lower layer is EXDEV, and mv copies it.
    let status = Command::new("mv").arg("-T").arg(from).arg(to).status();
    assert!(
        status.expect("it starts").success(),
        "mv {}",
        from.display()
    );
}

/// What each generation does to the tree that it inherits.
#[expect(clippy::too_many_lines, reason = "one scenario, told in order")]
fn generation(root: &Path, number: usize, marks: LayerMarks) {
    let at = |name: &str| root.join(name);
    if number == 0 {
        crate::trips::odd(root);
        for entry in fs::read_dir(root).expect("list") {
            let name = entry.expect("entry").file_name();
            // Towards OCI such names are refused.
            if marks == LayerMarks::Oci && name.as_bytes().starts_with(b".wh.") {
                fs::remove_file(root.join(name)).expect("remove");
            }
        }
        for dir in ["stays", "goes", "moves", "emptied", "replaced"] {
            fs::create_dir_all(at(dir).join("sub")).expect("mkdir");
            made::files(&at(dir).join("sub"), 20);
        }
        for n in 0..GENERATIONS {
            fs::write(at(&format!("file-{n}")), n.to_string()).expect("write");
            fs::hard_link(at(&format!("file-{n}")), at(&format!("stays/link-{n}"))).expect("link");
        }
        return;
    }
    let previous = number - 1;
    // A deletion at the top and one far down, a rename of a file, a file that is changed.
    fs::remove_file(at(&format!("file-{previous}"))).expect("remove");
    mv(
        &at(&format!("stays/link-{number}")),
        &at(&format!("renamed-{number}")),
    );
    let changed = File::options().write(true).open(at("holes")).expect("open");
    changed
        .write_all_at(&[number as u8], (number as u64) << 16)
        .expect("write");
    // Links to files of a lower layer, which are copied up.
    fs::hard_link(
        at(&format!("file-{number}")),
        at(&format!("again-{number}")),
    )
    .expect("link");
    fs::hard_link(at("stays/sub"), at("x")).expect_err("a directory has one name");
    let dir = at(&format!("dir-{number}"));
    fs::create_dir(&dir).expect("mkdir");
    fs::write(dir.join("one"), vec![number as u8; 100_000]).expect("write");
    fs::hard_link(dir.join("one"), dir.join("two")).expect("link");
    symlink(format!("to-{number}"), dir.join("symlink")).expect("symlink");
    set(&dir, "user.generation", &[number as u8]);
    fs::set_permissions(
        at("stays"),
        fs::Permissions::from_mode(0o700 + number as u32),
    )
    .expect("chmod");
    lchown(at("dangling"), Some(number as u32), Some(7)).expect("chown");
    match number {
        2 => fs::remove_dir_all(at("goes")).expect("remove"),
        3 => mv(&at("moves"), &at("moved")),
        4 => {
            for entry in fs::read_dir(at("emptied/sub")).expect("list") {
                let path = entry.expect("entry").path();
                fs::remove_dir_all(&path)
                    .or_else(|_| fs::remove_file(&path))
                    .expect("remove");
            }
        }
        // The same name, and nothing of what it had.
        5 => {
            fs::remove_dir_all(at("replaced")).expect("remove");
            fs::create_dir_all(at("replaced/sub")).expect("mkdir");
            fs::write(at("replaced/sub/new"), "new").expect("write");
        }
        6 => {
            fs::remove_dir_all(at("dir-1")).expect("remove");
            fs::write(at("dir-1"), "a file now").expect("write");
            fs::remove_file(at("renamed-1")).expect("remove");
            fs::create_dir(at("renamed-1")).expect("mkdir");
        }
        7 => mv(&at("moved"), &at("moves")),
        8 => fs::create_dir_all(at("goes/sub")).expect("it comes back"),
        9 => {
            fs::remove_dir_all(at("dir-2")).expect("remove");
            set(&at("replaced"), "user.late", b"x");
        }
        _ => {}
    }
    made::times(
        root,
        1_400_000_000 + i64::try_from(number).expect("small"),
        5,
    );
}

/// The layers of a stack, oldest first, and what each generation shows.
pub(crate) fn stack(lab: &Lab, marks: LayerMarks) -> (Vec<PathBuf>, Vec<Snapshot>) {
    let (mut layers, mut snapshots) = (Vec::new(), Vec::new());
    let empty = lab.dir("empty");
    for number in 0..GENERATIONS {
        let top = lab.dir(&format!("{marks:?}-layer-{number}"));
        let work = lab.dir(&format!("{marks:?}-work-{number}"));
        let mut below: Vec<PathBuf> = layers.clone();
        below.reverse();
        if below.is_empty() {
            below.push(empty.clone());
        } else {
            // As the driver does it: the root of a new top looks as the one below.
            let from = open(&below[0]);
            let stat = from.stat_self().expect("stat");
            tree::copy_directory_attributes(&from, &open(&top), &stat, Marks::Keep)
                .expect("attributes");
        }
        let merged = Overlay::mount(lab.dir("merged"), &below, Some((&top, &work)));
        generation(&merged.0, number, marks);
        snapshots.push(merged.snapshot());
        drop(merged);
        layers.push(top);
    }
    (layers, snapshots)
}

/// Shows each generation of a stack of layers, oldest first, and compares.
pub(crate) fn compare_stack(lab: &Lab, layers: &[PathBuf], snapshots: &[Snapshot]) {
    for number in 0..layers.len() {
        let mut below = layers[..=number].to_vec();
        below.reverse();
        if below.len() == 1 {
            // An overlay of one layer has to have another.
            below.push(lab.dir("empty"));
        }
        let merged = Overlay::mount(lab.dir("merged"), &below, None);
        assert_same(&snapshots[number], &merged.snapshot());
    }
}

pub(crate) fn newest_first(layers: &[PathBuf]) -> Vec<Dir> {
    layers.iter().rev().map(|layer| open(layer)).collect()
}

#[test]
fn a_stack_of_ten_generations_survives_layer_by_layer_on_overlay() {
    for fs in [Fs::Ext4, Fs::XfsReflink, Fs::Tmpfs] {
        let lab = require_lab!(fs);
        for marks in [LayerMarks::Records, LayerMarks::Oci] {
            let (layers, snapshots) = stack(&lab, marks);
            compare_stack(&lab, &layers, &snapshots);
            let mut unpacked: Vec<PathBuf> = Vec::new();
            for (number, layer) in layers.iter().enumerate() {
                let bytes = pack_layer(&lab, layer, marks).expect("pack");
                let to = lab.dir(&format!("{marks:?}-{number}"));
                unpack_layer(&bytes, &to, &newest_first(&unpacked), marks).expect("unpack");
                // The layer itself is the same, too: packed again it is the same bytes.
                assert!(
                    pack_layer(&lab, &to, marks).expect("pack") == bytes,
                    "layer {number}"
                );
                unpacked.push(to);
            }
            compare_stack(&lab, &unpacked, &snapshots);
        }
    }
}

#[test]
fn a_stack_of_ten_generations_is_applied_to_full_trees() {
    let source = require_lab!(Fs::Ext4);
    let stacks = [LayerMarks::Records, LayerMarks::Oci].map(|marks| (marks, stack(&source, marks)));
    for fs in [Fs::Btrfs, Fs::Ext4, Fs::XfsReflink] {
        let lab = require_lab!(fs);
        for (marks, (layers, snapshots)) in &stacks {
            let marks = *marks;
            let place = open(&lab.dir(&format!("{marks:?}")));
            for (number, layer) in layers.iter().enumerate() {
                let name = number.to_string();
                let below = number.checked_sub(1).map(|number| {
                    place
                        .open_beneath(number.to_string())
                        .expect("the one below")
                });
                match (fs, &below) {
                    (Fs::Btrfs, None) => place.create_subvolume(&name).expect("subvolume"),
                    (Fs::Btrfs, Some(below)) => {
                        place
                            .create_snapshot(&name, below, false)
                            .expect("snapshot");
                    }
                    (_, None) => place.create_dir(&name, 0o700).expect("mkdir"),
                    (_, Some(below)) => {
                        place.create_dir(&name, 0o700).expect("mkdir");
                        let to = place.open_beneath(&name).expect("open");
                        tree::copy(below, &to, Method::Reflink, Marks::Refuse).expect("copy");
                    }
                }
                let to = place.path().join(&name);
                let bytes = pack_layer(&source, layer, marks).expect("pack");
                unpack_onto(&bytes, &to, marks).expect("unpack");
                println!("{fs:?}, {marks:?}, generation {number}");
                assert_same(&snapshots[number], &shown(&to));
            }
            // The older ones have not changed.
            for (number, snapshot) in snapshots.iter().enumerate() {
                assert_same(snapshot, &shown(&place.path().join(number.to_string())));
            }
        }
    }
}

#[test]
fn gnu_tar_reads_an_oci_layer() {
    let lab = require_lab!(Fs::Ext4);
    let (layers, _) = stack(&lab, LayerMarks::Oci);
    let archive = lab.dir("archives").join("archive");
    fs::write(
        &archive,
        pack_layer(&lab, &layers[5], LayerMarks::Oci).expect("pack"),
    )
    .expect("write");
    let mut tar = Command::new("tar");
    let listed = tar
        .arg("--zstd")
        .arg("-tf")
        .arg(&archive)
        .output()
        .expect("it starts");
    assert!(listed.status.success());
    let names: Vec<&[u8]> = listed.stdout.split(|&byte| byte == b'\n').collect();
    for name in [
        "./",
        ".wh.file-4",
        "replaced/",
        "replaced/.wh..wh..opq",
        "replaced/sub/new",
    ] {
        assert!(names.contains(&name.as_bytes()), "{name} in {names:?}");
    }
}

#[test]
fn names_of_whiteouts_are_refused_towards_oci_only() {
    let lab = require_lab!(Fs::Ext4);
    for name in [".wh.x", ".wh..wh..opq", ".wh.", "d/.wh.d"] {
        let from = lab.dir("from");
        let path = from.join(name);
        fs::create_dir_all(path.parent().expect("parent")).expect("mkdir");
        fs::write(&path, "mine").expect("write");
        let error = pack_layer(&lab, &from, LayerMarks::Oci).expect_err(name);
        assert!(matches!(error, Error::Unpackable { .. }), "{name}: {error}");
        let bytes = pack_layer(&lab, &from, LayerMarks::Records).expect(name);
        let to = lab.dir("to");
        unpack_layer(&bytes, &to, &[], LayerMarks::Records).expect(name);
        assert_same(&shown(&from), &shown(&to));
        fs::remove_dir_all(&from).expect("remove");
        fs::remove_dir_all(&to).expect("remove");
    }
    // A name that leaves no room for the prefix.
    let from = lab.dir("from");
    let path = from.join(OsStr::from_bytes(&[b'n'; 252]));
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &path,
        rustix::fs::FileType::CharacterDevice,
        rustix::fs::Mode::empty(),
        0,
    )
    .expect("mknod");
    pack_layer(&lab, &from, LayerMarks::Oci).expect_err("too long");
    pack_layer(&lab, &from, LayerMarks::Records).expect("it has room");
}

/// A layer below with a directory, a file, and a symlink that leads out of it.
fn below(lab: &Lab) -> PathBuf {
    let below = lab.dir("below");
    fs::create_dir(below.join("d")).expect("mkdir");
    fs::write(below.join("d/f"), "below").expect("write");
    set(&below.join("d"), "user.below", b"x");
    fs::set_permissions(below.join("d"), fs::Permissions::from_mode(0o710)).expect("chmod");
    made::times(&below.join("d"), 1_000_000, 7);
    symlink("../outside", below.join("s")).expect("symlink");
    fs::write(lab.dir("outside").join("precious"), "as it was").expect("write");
    below
}

#[test]
fn what_a_layer_takes_from_those_below() {
    let lab = require_lab!(Fs::Ext4);
    let below = below(&lab);
    let layer = Tar::new().hard("h", "d/f").file("d/new", b"x").end();
    let to = lab.dir("to");
    unpack_layer(&layer, &to, &[open(&below)], LayerMarks::Oci).expect("unpack");
    let tree = Snapshot::of(&to);
    // The directory that has no entry looks as the one below.
    let (d, there) = (tree.get("d").expect("d"), Snapshot::of(&below));
    assert_eq!(Some(d), there.get("d"));
    let linked = tree.get("h").expect("h");
    assert_eq!(linked.same_as.as_deref(), Some(&b"d/f"[..]));
    assert_eq!(fs::read_to_string(to.join("h")).expect("read"), "below");
    assert_eq!(fs::metadata(below.join("d/f")).expect("stat").nlink(), 1);
    // A deletion, and something new of its name.
    let layer = Tar::new()
        .file(".wh.d", b"")
        .dir("d")
        .file("d/own", b"x")
        .end();
    let to = lab.dir("again");
    unpack_layer(&layer, &to, &[open(&below)], LayerMarks::Oci).expect("unpack");
    let merged = Overlay::mount(lab.dir("merged"), &[to, below.clone()], None).snapshot();
    assert!(
        merged.get("d/own").is_some() && merged.get("d/f").is_none(),
        "{merged}"
    );
    unpack_onto(&layer, &below, LayerMarks::Oci).expect("unpack");
    let merged = Snapshot::of(&below);
    assert!(
        merged.get("d/own").is_some() && merged.get("d/f").is_none(),
        "{merged}"
    );
}

#[test]
#[expect(clippy::too_many_lines, reason = "it is a list")]
fn layers_that_lie_are_refused() {
    let lab = require_lab!(Fs::Ext4);
    let below = below(&lab);
    let before = Snapshot::of(&lab.path().join("outside"));
    let new = Tar::new;
    let mark = |value: &[u8]| new().pax(&[("BAGGAGECLAIM.layer", value)]);
    let (oci, records) = (LayerMarks::Oci, LayerMarks::Records);
    let cases = [
        (oci, "of no name", new().file(".wh.", b"").end()),
        (oci, "of dot", new().file(".wh..", b"").end()),
        (
            oci,
            "of dot dot",
            new().dir("d").file("d/.wh...", b"").end(),
        ),
        (oci, "opaque root", new().file(".wh..wh..opq", b"").end()),
        (oci, "reserved", new().dir(".wh..wh.plnk").end()),
        (oci, "below one", new().file(".wh.d/f", b"x").end()),
        (oci, "with content", new().file(".wh.d", b"x").end()),
        (oci, "that is a directory", new().dir(".wh.d").end()),
        (oci, "that is a symlink", new().symlink(".wh.d", "x").end()),
        (
            oci,
            "that is a hard link",
            new().file("a", b"").hard(".wh.d", "a").end(),
        ),
        (
            oci,
            "link to one",
            new().file(".wh.d", b"").hard("a", ".wh.d").end(),
        ),
        (
            oci,
            "behind what it deletes",
            new().file("a", b"x").file(".wh.a", b"").end(),
        ),
        (
            oci,
            "of a directory it has",
            new().dir("a").file(".wh.a", b"").end(),
        ),
        (
            oci,
            "opaque below a file",
            new().file("a", b"x").file("a/.wh..wh..opq", b"").end(),
        ),
        (
            oci,
            "through a symlink",
            new().symlink("s", "../outside").file("s/.wh.x", b"").end(),
        ),
        (
            oci,
            "below what is deleted",
            new().file(".wh.d", b"").file("d/f", b"x").end(),
        ),
        (
            oci,
            "link to the deleted",
            new().file("d/.wh.f", b"").hard("a", "d/f").end(),
        ),
        (
            oci,
            "link through a symlink below",
            new().hard("a", "s/precious").end(),
        ),
        (oci, "link to a directory below", new().hard("a", "d").end()),
        (oci, "our own mark", mark(b"whiteout").file("a", b"").end()),
        (records, "root", mark(b"whiteout").dir("./").end()),
        (records, "opaque root", mark(b"opaque").dir("./").end()),
        (records, "opaque file", mark(b"opaque").file("a", b"").end()),
        (
            records,
            "whiteout with content",
            mark(b"whiteout").file("a", b"x").end(),
        ),
        (
            records,
            "whiteout directory",
            mark(b"whiteout").dir("a").end(),
        ),
        (
            records,
            "dot dot",
            mark(b"whiteout").file("../a", b"").end(),
        ),
        (records, "unknown", mark(b"other").file("a", b"").end()),
        (
            records,
            "of a later version",
            new()
                .pax(&[("BAGGAGECLAIM.other", b"x")])
                .file("a", b"")
                .end(),
        ),
        (
            records,
            "behind what it deletes",
            new()
                .file("a", b"x")
                .pax(&[("BAGGAGECLAIM.layer", b"whiteout")])
                .file("a", b"")
                .end(),
        ),
        (
            records,
            "a device that is one",
            new().link(b'3', "a", "").end(),
        ),
    ];
    for (number, (marks, name, bytes)) in cases.into_iter().enumerate() {
        let to = lab.dir(&format!("to-{number}"));
        let error = unpack_layer(&bytes, &to, &[open(&below)], marks)
            .expect_err(&format!("{marks:?}: {name}"));
        let told = matches!(error, Error::Refused { .. } | Error::Malformed { .. });
        assert!(told, "{name}: {error}");
        let onto = lab.dir(&format!("onto-{number}"));
        tree::copy(&open(&below), &open(&onto), Method::Bytes, Marks::Refuse).expect("copy");
        unpack_onto(&bytes, &onto, marks).expect_err(name);
    }
    assert_same(&before, &Snapshot::of(&lab.path().join("outside")));
    // A whole tree has no deletions.
    let bytes = mark(b"whiteout").file("a", b"").end();
    let error = crate::unpack(&bytes, &lab.dir("whole"), false).expect_err("a mark");
    assert!(matches!(error, Error::Refused { .. }), "{error}");
}
