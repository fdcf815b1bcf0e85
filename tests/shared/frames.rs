//! A source whose frames come in another order, twice, of another layer, or not to their end, and a
//! tier that stalls within a layer. Peers are sources, too: the engine that takes the frames is
//! one.

use std::fs;
use std::io::{Cursor, Read as _};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use baggageclaim::archive::toc::{Want, end_record};
use baggageclaim::model::{ArtifactId, Reference, Tenant};
use baggageclaim::shared::{
    Bucket, Content, Error, Frames, LayerRef, Resolved, Result, Source, Store, Times,
};

use crate::common::random::Random;
use crate::common::{Fs, Lab, assert_same, require_lab};
use crate::failing::{Failing, Fault, Op};
use crate::tier::{Held, TIMES, Tier, bucket, down, hold, shown};
use crate::trips::{large, upload};

/// Bytes of the record before a frame, and of the end record (`docs/layer-format.md`). The last
/// four bytes of a frame's record are the length of what follows.
const RECORD: usize = 65;
const END: usize = 17;
/// Where in a frame's record the digest of its table is.
const DIGEST: std::ops::Range<usize> = 9..41;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum How {
    Backwards,
    Twice,
    OfAnotherLayer,
    /// After so many hundredths of it.
    Cut(usize),
}

struct Odd(Bucket, How);

struct OddContent<'a>(Box<dyn Content + 'a>, How);

impl Source for Odd {
    fn name(&self) -> String {
        format!("{:?}", self.1)
    }

    fn resolve(
        &self,
        tenant: &Tenant,
        name: &Reference,
        has: Option<ArtifactId>,
    ) -> Result<Resolved> {
        self.0.resolve(tenant, name, has)
    }

    fn open(
        &self,
        tenant: &Tenant,
        layer: &LayerRef,
        table: &fs::File,
        stop: &dyn Fn() -> bool,
    ) -> Result<Box<dyn Content>> {
        let inner = self.0.open(tenant, layer, table, stop)?;
        Ok(Box::new(OddContent(inner, self.1)))
    }
}

impl Content for OddContent<'_> {
    fn frames(&self, wants: &[Want]) -> Result<Frames> {
        let mut frames = self.0.frames(wants)?;
        let mut bytes = Vec::new();
        frames.stream.read_to_end(&mut bytes).expect("it is whole");
        Ok(Frames {
            stream: Box::new(Cursor::new(changed(&bytes, self.1))),
            bytes: frames.bytes,
        })
    }
}

fn changed(bytes: &[u8], how: How) -> Vec<u8> {
    if let How::Cut(part) = how {
        return bytes[..bytes.len() * part / 100].to_vec();
    }
    let mut frames: Vec<Vec<u8>> = Vec::new();
    let mut at = 0;
    while at + END < bytes.len() {
        let length = bytes[at + RECORD - 4..at + RECORD].try_into();
        let length = u32::from_le_bytes(length.expect("four bytes"));
        let end = at + RECORD + usize::try_from(length).expect("small");
        frames.push(bytes[at..end].to_vec());
        at = end;
    }
    assert_eq!(at + END, bytes.len(), "it is frames and an end");
    match how {
        How::Backwards => frames.reverse(),
        How::Twice => {
            frames = frames
                .iter()
                .flat_map(|it| [it.clone(), it.clone()])
                .collect();
        }
        How::OfAnotherLayer => {
            let last = frames.last_mut().expect("there is one");
            last[DIGEST.start] ^= 1;
        }
        How::Cut(_) => {}
    }
    let count = frames.len() as u64;
    [frames.concat(), end_record(count)].concat()
}

/// Some frames that do not compress: 3 MiB in files of several sizes.
fn layer(lab: &Lab) -> (PathBuf, Held) {
    let layer = lab.dir("layer");
    let mut random = Random::new(1);
    for number in 0..40 {
        let bytes = random.bytes(40_000);
        fs::write(layer.join(format!("f{number:02}")), bytes).expect("write");
    }
    fs::write(layer.join("large"), random.bytes(1_500_000)).expect("write");
    let held = hold(lab, &layer);
    (layer, held)
}

#[test]
fn the_order_and_the_repetition_of_frames_do_not_matter_and_others_are_refused() {
    let lab = require_lab!(Fs::Ext4);
    let (original, held) = layer(&lab);
    let before = shown(&original);
    let tier = Tier::file();
    let layer = upload(&tier, &held);
    let odd = |how| Odd(bucket(&tier.store), how);
    for how in [How::Backwards, How::Twice] {
        let into = lab.dir(&format!("{how:?}"));
        let fetched = down(&lab, &[&odd(how)], &layer, &into).expect("fetch");
        assert_eq!(fetched.bytes, layer.content, "{how:?}");
        assert_same(&before, &shown(&into.join("fs")));
    }
    let into = lab.dir("another");
    let another = odd(How::OfAnotherLayer);
    let error = down(&lab, &[&another], &layer, &into).expect_err("it is refused");
    assert!(error.is_of_the_source(), "{error:?}");
    assert!(error.to_string().contains("another layer"), "{error}");
    down(&lab, &[&another, &odd(How::Backwards)], &layer, &into).expect("the next one has it");
    assert_same(&before, &shown(&into.join("fs")));
}

#[test]
fn what_a_source_cuts_at_each_of_100_offsets_the_next_one_gives() {
    let lab = require_lab!(Fs::Tmpfs);
    let (original, held) = layer(&lab);
    let before = shown(&original);
    let tier = Tier::file();
    let layer = upload(&tier, &held);
    for part in 0..100 {
        let cut = Odd(bucket(&tier.store), How::Cut(part));
        let into = lab.dir("into");
        let sources: [&dyn Source; 2] = [&cut, &bucket(&tier.store)];
        let fetched = down(&lab, &sources, &layer, &into).expect("fetch");
        assert_eq!(fetched.bytes, layer.content, "{part}");
        assert_same(&before, &shown(&into.join("fs")));
        fs::remove_dir_all(&into).expect("remove");
    }
}

#[test]
fn a_tier_that_stalls_within_a_layer_meets_the_limit_and_what_came_stays() {
    let lab = require_lab!(Fs::Tmpfs);
    let original = large(&lab);
    let held = hold(&lab, &original);
    let tier = Tier::file();
    let layer = upload(&tier, &held);
    let into = lab.dir("into");
    // The reads of the table pass; then an answer comes in part, and the next ones never.
    let asked = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&asked);
    let cut = Arc::new(AtomicU64::new(0));
    let cuts = Arc::clone(&cut);
    let failing = Failing::new(Arc::clone(&tier.objects), move |op, path| {
        if op != Op::Get || !path.contains("/layers/") {
            return Fault::None;
        }
        match (
            count.fetch_add(1, Ordering::Relaxed),
            cuts.load(Ordering::Relaxed),
        ) {
            (number, first) if number < first => Fault::None,
            (number, first) if number == first => Fault::Cut(6 << 20),
            _ => Fault::Slow(Duration::from_secs(3600)),
        }
    });
    let times = Times {
        request: Duration::from_millis(300),
        ..TIMES
    };
    let handle = tier.runtime.handle().clone();
    let store = Store::new(Arc::new(failing), "", "test://stalls", handle, times);
    // How many reads there are before the content: the first try has none that pass.
    let mut fetched = 0;
    for first in 0..6 {
        asked.store(0, Ordering::Relaxed);
        cut.store(first, Ordering::Relaxed);
        let error = down(&lab, &[&bucket(&store)], &layer, &into).expect_err("it stalls");
        assert!(error.is_temporary(), "{first}: {error:?}");
        assert!(matches!(error, Error::Stalled { .. }), "{first}: {error:?}");
        let files = fs::read_dir(into.join("fs")).map_or(0, Iterator::count);
        fetched = files;
        if files > 0 {
            break;
        }
    }
    assert!(fetched > 0, "a part of it came");
    let rest = down(&lab, &[&bucket(&tier.store)], &layer, &into).expect("fetch");
    assert!(rest.bytes < layer.content, "{} came again", rest.bytes);
    assert_same(&shown(&original), &shown(&into.join("fs")));
}
