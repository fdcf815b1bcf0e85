//! What a large cache costs a pod, in four ways: mounted on the node that has it, mounted on a
//! second node, downloaded and unpacked from an object store, and copied from a shared directory.
//! README shows these figures.

#![expect(
    clippy::disallowed_methods,
    reason = "what is removed is the bench's own"
)]

use std::fs;
use std::time::Instant;

use object_store::ObjectStoreExt as _;
use object_store::path::Path as ObjectPath;

use crate::archives::{shell, timed};
use crate::cases::Bench;
use crate::nodes::{CACHE, READS, SIZE, file, millis, remove, tree};
use crate::server::Server;
use crate::table::{Goal, median};
use crate::tier::download;

/// Each way needs the space of the cache again.
const ROUNDS: usize = 3;

impl Bench<'_> {
    /// All rows of the headline.
    pub async fn headline(&mut self) {
        let files = self.plan.headline;
        let nodes = self.nodes(&["home", "second"]);
        let mut home = nodes.start(self, "home").await;
        home.seal(&CACHE, |dir| tree(dir, files)).await;
        crate::peers::offered(&mut home, "task-cache/tree").await;
        let lower = home.lower("task-cache/tree").await;

        let (mut here, mut second) = (Vec::new(), Vec::new());
        let (mut unpacked, mut copied) = (Vec::new(), Vec::new());
        let place = self.lab.dir("headline");
        let archive = place.join("tar.zst");
        let server = Server::with(&["--keep-alive", "--quiet"]);
        let server = server.inspect_err(|reason| eprintln!("bench: no object store: {reason}"));
        let object = ObjectPath::from("cache/tar.zst");
        if let Ok(server) = &server {
            let pack = "tar -cf - -C \"$0\" . | zstd -3 -T2 -q -o \"$1\"";
            shell(pack, &[&lower, &archive]);
            let bytes = fs::read(&archive).expect("read");
            server
                .store()
                .put(&object, bytes.into())
                .await
                .expect("put");
            fs::remove_file(&archive).expect("remove");
        }
        for round in 0..ROUNDS {
            let pod = home.pod();
            let (target, took) = home.publish(&pod, &READS);
            here.push(millis(took));
            assert!(file(&target, files - 1).is_file(), "the content is there");
            home.unpublish(&pod);

            let node = nodes.start(self, &format!("second-{round}")).await;
            let pod = node.pod();
            let (target, took) = node.publish(&pod, &READS);
            second.push(millis(took));
            assert!(file(&target, files - 1).is_file(), "the content is there");
            node.unpublish(&pod);
            remove(node);

            if let Ok(server) = &server {
                let to = self.lab.dir("headline/unpacked");
                let began = Instant::now();
                download(&*server.store(), &object, &archive).await;
                let unpack = "zstd -d -q -c \"$0\" | tar -xf - -C \"$1\"";
                shell(unpack, &[&archive, &to]);
                unpacked.push(millis(began.elapsed()));
                fs::remove_dir_all(&to).expect("remove");
            }
            let to = self.lab.dir("headline/copied");
            copied.push(timed(|| shell("cp -a \"$0/.\" \"$1\"", &[&lower, &to])));
            fs::remove_dir_all(&to).expect("remove");
        }
        fs::remove_dir_all(&place).expect("remove");
        home.stop();
        let size = format!("{files} files, {:.1} GB", (files * SIZE) as f64 / 1e9);
        let (unpacked, copied) = (median(unpacked), median(copied));
        for (what, took) in [
            ("mounted on the node that has it", median(here)),
            ("mounted on a second node", median(second)),
            ("tar.zst of an object store, unpacked", unpacked),
            ("copied from a shared directory", copied),
        ] {
            let name = format!("{size}: {what}");
            self.row(&name, "ms", took, Some(unpacked), Goal::None);
        }
    }
}
