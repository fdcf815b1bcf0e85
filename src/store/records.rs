//! Records of ephemeral state: small JSON files in a volume's directory, and one in each layer.
//!
//! They are written without fsync. The page cache survives `kill -9`, and ephemeral volumes do not
//! outlive a reboot. A record that does not parse is not an error: its directory is garbage.

use std::str::FromStr;

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::model::{Artifact, ClaimRecord, LayerRecord, Outcome, Timestamp, VolumeRecord, layout};
use crate::sys::{self, Dir, Errno};

/// Records are small. A larger file is not one.
const LIMIT: usize = 256 * 1024;
const OUTCOME: &str = "outcome";
/// In a volume to be sealed: when its commit became due.
const DUE: &str = "due";
const WRITEBACK_FAILURE: &str = "doomed";

/// Why a directory has no valid record.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unreadable {
    /// The file does not exist.
    #[error("it has no record")]
    Missing,
    /// It does not parse: it is torn or has an unknown format.
    #[error("its record cannot be read: {0}")]
    Damaged(String),
}

/// Writes a volume's record.
pub fn write_volume(volume: &Dir, record: &VolumeRecord, replace: bool) -> sys::Result<()> {
    let bytes = json(record);
    if replace {
        volume.replace(layout::VOLUME_JSON, &bytes)
    } else {
        volume.write_new(layout::VOLUME_JSON, &bytes)
    }
}

/// Reads a volume's record.
pub fn read_volume(volume: &Dir) -> sys::Result<Result<VolumeRecord, Unreadable>> {
    read_record(volume, layout::VOLUME_JSON, |record: &VolumeRecord| {
        (record.format, VolumeRecord::FORMAT)
    })
}

/// Writes a claim's record and replaces an older one.
pub fn write_claim(volume: &Dir, record: &ClaimRecord) -> sys::Result<()> {
    volume.replace(layout::CLAIM_JSON, &json(record))
}

/// Reads a claim's record.
pub fn read_claim(volume: &Dir) -> sys::Result<Result<ClaimRecord, Unreadable>> {
    read_record(volume, layout::CLAIM_JSON, |record: &ClaimRecord| {
        (record.format, ClaimRecord::FORMAT)
    })
}

/// Writes the record of a layer that is being sealed. Replaces that of an interrupted seal.
pub fn write_sealing(layer: &Dir, record: &LayerRecord) -> sys::Result<()> {
    write_anyway(layer, layout::SEALING_JSON, &json(record))
}

/// Marks the layer as durable and referenced by the index. Idempotent.
pub fn confirm_layer(layer: &Dir) -> sys::Result<()> {
    match layer.rename_over(layout::SEALING_JSON, layer, layout::LAYER_JSON) {
        Err(error) if error.is(Errno::ENOENT) && layer.has(layout::LAYER_JSON)? => Ok(()),
        result => result,
    }
}

/// Changes the sharing of this artifact in the record of its newest layer. A layer that is not
/// confirmed yet, or whose record names another artifact, stays as it is. Unlike the records of
/// volumes, this one outlives the boot: a power cut may not leave an empty file.
pub fn note_sharing(layer: &Dir, artifact: &Artifact) -> sys::Result<()> {
    let Ok(mut record) = read_layer(layer)? else {
        return Ok(());
    };
    let recorded = record.artifact.as_mut();
    let Some(recorded) = recorded.filter(|recorded| recorded.id == artifact.id) else {
        return Ok(());
    };
    recorded.sharing = artifact.sharing;
    layer.replace_durably(layout::LAYER_JSON, &json(&record))
}

/// Reads the record of a layer that has been durable.
pub fn read_layer(layer: &Dir) -> sys::Result<Result<LayerRecord, Unreadable>> {
    read_layer_record(layer, layout::LAYER_JSON)
}

/// Reads the record of a layer whose seal has begun.
pub fn read_sealing(layer: &Dir) -> sys::Result<Result<LayerRecord, Unreadable>> {
    match read_layer_record(layer, layout::SEALING_JSON)? {
        Err(Unreadable::Missing) => read_layer(layer),
        record => Ok(record),
    }
}

fn read_layer_record(layer: &Dir, name: &str) -> sys::Result<Result<LayerRecord, Unreadable>> {
    read_record(layer, name, |record: &LayerRecord| {
        (record.format, LayerRecord::FORMAT)
    })
}

/// Writes the pod's outcome. The first report wins: it is never replaced.
pub fn write_outcome(volume: &Dir, outcome: Outcome) -> sys::Result<()> {
    match volume.write_new(OUTCOME, outcome.to_string().as_bytes()) {
        Err(error) if error.is(Errno::EEXIST) => Ok(()),
        result => result,
    }
}

/// The pod's outcome, if it was written. A torn record does not count.
pub fn read_outcome(volume: &Dir) -> sys::Result<Option<Outcome>> {
    match volume.read(OUTCOME, 64) {
        Ok(bytes) if bytes == b"succeeded" => Ok(Some(Outcome::Succeeded)),
        Ok(bytes) if bytes == b"failed" => Ok(Some(Outcome::Failed)),
        Ok(_) => {
            // A crash tore it between open and write. Remove it for the next report.
            volume.remove_file(OUTCOME)?;
            Ok(None)
        }
        Err(error) if error.is(Errno::ENOENT) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Writes when the volume's commit became due. Replaces an earlier time.
pub fn write_due(volume: &Dir, due: Timestamp) -> sys::Result<()> {
    let text = format!("{}\n", due.0);
    write_anyway(volume, DUE, text.as_bytes())
}

/// When the volume's commit became due, if that was written. A torn record does not count.
pub fn read_due(volume: &Dir) -> sys::Result<Option<Timestamp>> {
    match volume.read(DUE, 64) {
        Ok(bytes) => Ok(number(bytes).map(Timestamp)),
        Err(error) if error.is(Errno::ENOENT) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The condition that a retiring volume waits for, perhaps across a restart of the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// Its pod's outcome.
    Outcome,
    /// The cache policies of the cluster.
    Policies,
}

impl Wait {
    /// The file with the start time.
    fn file(self) -> &'static str {
        match self {
            Self::Outcome => "awaited",
            Self::Policies => "no-policies",
        }
    }
}

/// The start of this wait, in seconds since boot. Writes `now` if none is recorded.
pub fn waiting_since(volume: &Dir, wait: Wait, now: u64) -> sys::Result<u64> {
    let file = wait.file();
    let noted = match volume.read(file, 64) {
        Err(error) if error.is(Errno::ENOENT) => None,
        noted => {
            let since = number(noted?);
            if since.is_none() {
                // Torn by a crash, like an outcome.
                volume.remove_file(file)?;
            }
            since
        }
    };
    if let Some(since) = noted {
        return Ok(since);
    }
    volume.write_new(file, format!("{now}\n").as_bytes())?;
    Ok(now)
}

/// A write-back error: existing volumes may have silently lost data.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WritebackFailure {
    /// The boot in which it happened.
    pub boot: String,
    /// Volumes made up to this time are not sealed any more.
    pub until: Timestamp,
    /// Not all affected volumes are marked yet.
    #[serde(default)]
    pub unfinished: bool,
}

/// Records a write-back error for later processes of this boot.
pub fn record_writeback_failure(root: &Dir, failure: &WritebackFailure) -> sys::Result<()> {
    root.replace(WRITEBACK_FAILURE, &json(failure))
}

/// This boot's write-back error, if there was one.
pub fn read_writeback_failure(root: &Dir, boot: &str) -> sys::Result<Option<WritebackFailure>> {
    Ok(read(root, WRITEBACK_FAILURE)?
        .ok()
        .filter(|failure: &WritebackFailure| failure.boot == boot))
}

/// The number in a file of one line; `None`: a crash tore it.
fn number<T: FromStr>(bytes: Vec<u8>) -> Option<T> {
    let text = String::from_utf8(bytes).ok()?;
    text.strip_suffix('\n')?.parse().ok()
}

/// Writes a new file, or replaces the old one.
fn write_anyway(dir: &Dir, name: &str, bytes: &[u8]) -> sys::Result<()> {
    match dir.write_new(name, bytes) {
        Err(error) if error.is(Errno::EEXIST) => dir.replace(name, bytes),
        result => result,
    }
}

pub(super) fn json(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("plain data serialises")
}

/// `formats`: the format that the record has, and the one that this version reads.
fn read_record<T: DeserializeOwned>(
    dir: &Dir,
    name: &str,
    formats: impl Fn(&T) -> (u32, u32),
) -> sys::Result<Result<T, Unreadable>> {
    Ok(read(dir, name)?.and_then(|record| match formats(&record) {
        (format, known) if format == known => Ok(record),
        (format, _) => Err(Unreadable::Damaged(format!("format {format}"))),
    }))
}

fn read<T: DeserializeOwned>(dir: &Dir, name: &str) -> sys::Result<Result<T, Unreadable>> {
    read_up_to(dir, name, LIMIT)
}

/// Reads a file of at most `limit` bytes.
pub(super) fn read_up_to<T: DeserializeOwned>(
    dir: &Dir,
    name: &str,
    limit: usize,
) -> sys::Result<Result<T, Unreadable>> {
    match dir.read(name, limit) {
        Ok(bytes) => {
            Ok(serde_json::from_slice(&bytes)
                .map_err(|error| Unreadable::Damaged(error.to_string())))
        }
        Err(error) if error.is(Errno::ENOENT) => Ok(Err(Unreadable::Missing)),
        Err(error)
            if error.is(Errno::EFBIG) || error.is(Errno::EISDIR) || error.is(Errno::ELOOP) =>
        {
            Ok(Err(Unreadable::Damaged(error.to_string())))
        }
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Pod, VolumeSpec};

    fn scratch() -> (tempfile::TempDir, Dir) {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let dir = Dir::open(folder.path()).expect("it opens");
        (folder, dir)
    }

    #[test]
    fn a_record_comes_back_as_it_was_and_a_torn_one_is_rubbish() {
        let (_folder, dir) = scratch();
        let attributes = [("type", "output"), ("name", "a"), ("uid", "7")]
            .map(|(k, v)| (k.to_owned(), v.to_owned()));
        let record = VolumeRecord {
            format: VolumeRecord::FORMAT,
            id: "csi-1".parse().expect("id"),
            boot: "b".to_owned(),
            superblock: Some(7),
            created: Timestamp(5),
            tenant: "ci".parse().expect("label"),
            pod: Pod {
                uid: "u".parse().expect("uid"),
                name: "p".to_owned(),
                service_account: None,
            },
            spec: VolumeSpec::parse(&attributes.into()).expect("spec"),
            read_only: false,
            parent: None,
            layers: Vec::new(),
            seal: None,
            policy_limit: None,
            limit_unenforced: None,
            mounted_as: None,
            multiple_targets: None,
            targets: vec!["/t".into()],
        };
        assert_eq!(read_volume(&dir).expect("read"), Err(Unreadable::Missing));
        write_volume(&dir, &record, false).expect("written");
        assert_eq!(read_volume(&dir).expect("read"), Ok(record.clone()));
        let whole = dir.read(layout::VOLUME_JSON, LIMIT).expect("bytes");
        for cut in [0, 1, whole.len() / 2, whole.len() - 1] {
            dir.replace(layout::VOLUME_JSON, &whole[..cut])
                .expect("torn");
            assert!(
                matches!(
                    read_volume(&dir).expect("read"),
                    Err(Unreadable::Damaged(_))
                ),
                "cut at {cut}"
            );
        }
        write_volume(
            &dir,
            &VolumeRecord {
                format: 2,
                ..record
            },
            true,
        )
        .expect("written");
        assert!(matches!(
            read_volume(&dir).expect("read"),
            Err(Unreadable::Damaged(_))
        ));
    }

    #[test]
    fn the_first_outcome_counts_and_a_torn_one_was_never_said() {
        let (_folder, dir) = scratch();
        assert_eq!(read_outcome(&dir).expect("read"), None);
        dir.write_new(OUTCOME, b"succ").expect("torn");
        assert_eq!(read_outcome(&dir).expect("read"), None);
        write_outcome(&dir, Outcome::Failed).expect("written");
        write_outcome(&dir, Outcome::Succeeded).expect("ignored");
        assert_eq!(read_outcome(&dir).expect("read"), Some(Outcome::Failed));
    }

    #[test]
    fn what_is_waited_for_is_so_since_the_first_time_that_was_noted_whole() {
        let (_folder, dir) = scratch();
        let since = |wait, now| waiting_since(&dir, wait, now).expect("noted");
        dir.write_new("awaited", b"12").expect("torn");
        assert_eq!(since(Wait::Outcome, 1234), 1234);
        assert_eq!(since(Wait::Outcome, 5678), 1234);
        assert_eq!(since(Wait::Policies, 5679), 5679, "it is another wait");
        assert_eq!(since(Wait::Outcome, 9012), 1234);
    }

    #[test]
    fn a_writeback_failure_is_of_its_boot() {
        let (_folder, dir) = scratch();
        record_writeback_failure(
            &dir,
            &WritebackFailure {
                boot: "a".to_owned(),
                until: Timestamp(9),
                unfinished: false,
            },
        )
        .expect("written");
        assert_eq!(read_writeback_failure(&dir, "b").expect("read"), None);
        assert_eq!(
            read_writeback_failure(&dir, "a")
                .expect("read")
                .map(|failure| failure.until),
            Some(Timestamp(9))
        );
        // As older versions wrote it, without `unfinished`.
        let older = br#"{"boot":"a","until":9}"#;
        dir.replace(WRITEBACK_FAILURE, older).expect("written");
        let failure = read_writeback_failure(&dir, "a").expect("read");
        assert!(failure.is_some_and(|failure| !failure.unfinished));
    }
}
