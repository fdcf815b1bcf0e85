//! Layers that come from another node, as each backend makes them: a stack of ten generations is
//! sent layer by layer, and what each backend shows of it is compared.

use std::fs;
use std::os::fd::AsFd;
use std::path::Path;

use baggageclaim::archive::{self, LayerMarks, Progress};
use baggageclaim::backend::{self, Backend, Btrfs, Copy, MountApi, Overlay};
use baggageclaim::model::{LayerId, layout};
use baggageclaim::sys::{self, Dir};
use baggageclaim::tree::{self, Marks, Method};
use rustix::mount::UnmountFlags;

use crate::common::{Fs, Lab, Snapshot, assert_same, require_lab};
use crate::layers::{how, pack_layer, shown, stack};
use crate::open;
use crate::transfer::{Held, hold};

/// A layer on its way.
enum Sent {
    Tar(Vec<u8>, LayerMarks),
    Table(Held),
}

/// A pool's directories, and a backend on them.
struct Pool<'a> {
    lab: &'a Lab,
    dir: Dir,
    backend: Box<dyn Backend>,
}

impl<'a> Pool<'a> {
    fn new(
        lab: &'a Lab,
        name: &str,
        backend: impl FnOnce(&Dir) -> backend::Result<Box<dyn Backend>>,
    ) -> Self {
        let dir = open(&lab.dir(name));
        for name in [layout::LAYERS, layout::INCOMING, layout::EMPTY, "views"] {
            dir.create_dir(name, 0o700).expect("mkdir");
        }
        let backend = backend(&dir).expect("this filesystem has it");
        Self { lab, dir, backend }
    }

    /// Receives a layer on top of `below`, newest first.
    fn receive(&self, sent: &Sent, id: LayerId, below: &[LayerId]) {
        let never = || false;
        let name = id.to_string();
        let incoming = self.dir.open_beneath(layout::INCOMING).expect("open");
        incoming.create_dir(&name, 0o700).expect("mkdir");
        let layer = incoming.open_beneath(&name).expect("open");
        let place = self.backend.receive(&layer).expect("a place");
        let layers = self.dir.open_beneath(layout::LAYERS).expect("open");
        let content = |id: &LayerId| {
            let content = Path::new(&id.to_string()).join(layout::FS);
            layers.open_beneath(content).expect("a layer")
        };
        let is_stacked = self.backend.stacks();
        if let Some(parent) = below.first()
            && !is_stacked
        {
            let all = tree::copy(&content(parent), &place, Method::Reflink, Marks::Refuse);
            all.expect("copied");
        }
        match sent {
            Sent::Tar(bytes, marks) if is_stacked => {
                let below: Vec<Dir> = below.iter().map(content).collect();
                let (bytes, progress) = (&bytes[..], Progress::default());
                archive::unpack_layer(bytes, &place, &below, *marks, how(), &progress, &never)
                    .expect("unpack");
            }
            Sent::Tar(bytes, marks) => {
                let (bytes, progress) = (&bytes[..], Progress::default());
                archive::unpack_onto(bytes, &place, *marks, how(), &progress, &never)
                    .expect("unpack");
            }
            Sent::Table(held) if is_stacked => {
                // The receiver makes a directory of its own.
                let made = self.lab.dir("received");
                held.receive(&made);
                fs::remove_dir(place.path()).expect("rmdir");
                fs::rename(made.join("fs"), place.path()).expect("rename");
                fs::remove_dir_all(made).expect("rm");
            }
            Sent::Table(held) => {
                // Beside the tree's content: on btrfs a rename stays within one subvolume.
                let beside = place.path().join("beside");
                fs::create_dir(&beside).expect("mkdir");
                held.receive(&beside);
                fs::rename(beside.join("fs"), place.path().join("a new layer")).expect("rename");
                fs::remove_dir_all(&beside).expect("rm");
                tree::apply(&place, "a new layer".as_ref(), &never).expect("apply");
            }
        }
        self.backend.received(&layer).expect("received");
        incoming.rename(&name, &layers, &name).expect("rename");
    }

    /// What the backend shows of these layers, newest first.
    fn shows(&self, layers: &[LayerId]) -> Snapshot {
        let views = self.dir.open_beneath("views").expect("open");
        let name = format!("of-{}", layers[0]);
        views.create_dir(&name, 0o700).expect("mkdir");
        let scratch = views.open_beneath(&name).expect("open");
        let view = self.backend.content(&scratch, &name, layers);
        let view = view.expect("a view");
        let at = self.lab.dir("mounted");
        let parent = open(&self.lab.path());
        sys::move_mount_onto(view.as_fd(), &parent, "mounted").expect("move_mount");
        drop(view);
        let snapshot = shown(&at);
        rustix::mount::unmount(&at, UnmountFlags::DETACH).expect("umount");
        tree::delete(&views, Path::new(&name), &|| false).expect("delete");
        snapshot
    }
}

type Open = fn(&Dir) -> backend::Result<Box<dyn Backend>>;

#[test]
fn a_stack_of_ten_generations_survives_layer_by_layer_on_every_backend() {
    let overlay: Open = |pool| Ok(Box::new(Overlay::open(pool, MountApi::Classic)?));
    let btrfs: Open = |pool| Ok(Box::new(Btrfs::open(pool, false)?));
    let copy: Open = |pool| Ok(Box::new(Copy::open(pool)?));
    let source = require_lab!(Fs::Ext4);
    let (records, oci) = (LayerMarks::Records, LayerMarks::Oci);
    let stacks = [records, oci].map(|marks| stack(&source, marks));
    let tar = |marks, layer| Sent::Tar(pack_layer(&source, layer, marks).expect("pack"), marks);
    let table = |number, layer| Sent::Table(hold(&source, layer, &format!("sent-{number}")));
    let [(ours, ours_show), (ocis, ocis_show)] = &stacks;
    let numbered = ours.iter().enumerate();
    let ways: [(&str, Vec<Sent>, &[Snapshot]); 3] = [
        (
            "tar",
            ours.iter().map(|layer| tar(records, layer)).collect(),
            ours_show,
        ),
        (
            "OCI",
            ocis.iter().map(|layer| tar(oci, layer)).collect(),
            ocis_show,
        ),
        (
            "table",
            numbered
                .map(|(number, layer)| table(number, layer))
                .collect(),
            ours_show,
        ),
    ];
    for (name, fs, opens) in [
        ("overlay", Fs::Ext4, overlay),
        ("overlay", Fs::XfsReflink, overlay),
        ("btrfs", Fs::Btrfs, btrfs),
        ("copy", Fs::XfsReflink, copy),
        ("copy", Fs::Ext4, copy),
    ] {
        let lab = require_lab!(fs);
        for (way, sent, snapshots) in &ways {
            println!("{name} on {fs:?}, {way}");
            let pool = Pool::new(&lab, way, opens);
            let mut layers: Vec<LayerId> = Vec::new();
            for (generation, sent) in sent.iter().enumerate() {
                let id = LayerId::from_bits(1 + generation as u128);
                pool.receive(sent, id, &layers);
                layers.insert(0, id);
            }
            // All of them in the end: a newer layer does not change an older one.
            for (generation, snapshot) in snapshots.iter().enumerate() {
                let stack = &layers[layers.len() - 1 - generation..];
                assert_same(snapshot, &pool.shows(stack));
            }
        }
    }
}
