//! The records of what is ephemeral: small JSON files in a volume's own directory, written without fsync; and the one
//! that lies beside a layer.
//!
//! The page cache survives `kill -9`, and nothing of an ephemeral volume matters after a power cut. A record that does
//! not parse is not an error of the driver but a fact about the directory: it is rubbish.

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::model::{ClaimRecord, LayerRecord, Outcome, Timestamp, VolumeRecord, layout};
use crate::sys::{self, Dir, Errno};

/// Records are small; what is larger is none of ours.
const LIMIT: usize = 256 * 1024;
const OUTCOME: &str = "outcome";
const DOOMED: &str = "doomed";

/// Why a directory has no record that counts.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unreadable {
    /// There is none.
    #[error("it has no record")]
    Missing,
    /// It does not parse: torn, or of a form we do not know.
    #[error("its record cannot be read: {0}")]
    Damaged(String),
}

/// Writes a volume's record, new.
pub fn write_volume(volume: &Dir, record: &VolumeRecord, replace: bool) -> sys::Result<()> {
    let bytes = serde_json::to_vec(record).expect("plain data serialises");
    if replace {
        volume.replace(layout::VOLUME_JSON, &bytes)
    } else {
        volume.write_new(layout::VOLUME_JSON, &bytes)
    }
}

/// A volume's record that is made and not yet written: while it is empty, it is one that does not count.
#[derive(Debug)]
pub struct BlankRecord(sys::Blank);

/// Makes the record of a volume of which nothing is known yet.
pub fn blank_volume(volume: &Dir) -> sys::Result<BlankRecord> {
    volume.blank(layout::VOLUME_JSON).map(BlankRecord)
}

impl BlankRecord {
    /// Writes it; `volume` is the directory in which it was made.
    pub fn fill(self, volume: &Dir, record: &VolumeRecord) -> sys::Result<()> {
        let bytes = serde_json::to_vec(record).expect("plain data serialises");
        self.0.fill(&bytes, volume, layout::VOLUME_JSON)
    }
}

/// Reads a volume's record.
pub fn read_volume(volume: &Dir) -> sys::Result<Result<VolumeRecord, Unreadable>> {
    Ok(
        read(volume, layout::VOLUME_JSON)?.and_then(|record: VolumeRecord| {
            if record.format == VolumeRecord::FORMAT {
                Ok(record)
            } else {
                Err(Unreadable::Damaged(format!("format {}", record.format)))
            }
        }),
    )
}

/// Writes a claim's record, over an older one.
pub fn write_claim(volume: &Dir, record: &ClaimRecord) -> sys::Result<()> {
    let bytes = serde_json::to_vec(record).expect("plain data serialises");
    volume.replace(layout::CLAIM_JSON, &bytes)
}

/// Reads a claim's record.
pub fn read_claim(volume: &Dir) -> sys::Result<Result<ClaimRecord, Unreadable>> {
    Ok(
        read(volume, layout::CLAIM_JSON)?.and_then(|record: ClaimRecord| {
            if record.format == ClaimRecord::FORMAT {
                Ok(record)
            } else {
                Err(Unreadable::Damaged(format!("format {}", record.format)))
            }
        }),
    )
}

/// Writes the record of a layer that is being sealed; over the one that a seal cut short may have left. One that is torn is none.
pub fn write_sealing(layer: &Dir, record: &LayerRecord) -> sys::Result<()> {
    let bytes = serde_json::to_vec(record).expect("plain data serialises");
    match layer.write_new(layout::SEALING_JSON, &bytes) {
        Err(error) if error.is(Errno::EEXIST) => layer.replace(layout::SEALING_JSON, &bytes),
        result => result,
    }
}

/// Says in the layer that the index names it and that its content is durable. Repeatable.
pub fn confirm_layer(layer: &Dir) -> sys::Result<()> {
    match layer.rename_over(layout::SEALING_JSON, layer, layout::LAYER_JSON) {
        Err(error) if error.is(Errno::ENOENT) && layer.has(layout::LAYER_JSON)? => Ok(()),
        result => result,
    }
}

/// Reads the record of a layer that was durable at some time.
pub fn read_layer(layer: &Dir) -> sys::Result<Result<LayerRecord, Unreadable>> {
    read_layer_record(layer, layout::LAYER_JSON)
}

/// Reads the record of a layer that is being sealed, or was.
pub fn read_sealing(layer: &Dir) -> sys::Result<Result<LayerRecord, Unreadable>> {
    match read_layer_record(layer, layout::SEALING_JSON)? {
        Err(Unreadable::Missing) => read_layer(layer),
        record => Ok(record),
    }
}

fn read_layer_record(layer: &Dir, name: &str) -> sys::Result<Result<LayerRecord, Unreadable>> {
    Ok(read(layer, name)?.and_then(|record: LayerRecord| {
        if record.format == LayerRecord::FORMAT {
            Ok(record)
        } else {
            Err(Unreadable::Damaged(format!("format {}", record.format)))
        }
    }))
}

/// Notes how the pod's work ended. The first word counts: it is not replaced.
pub fn write_outcome(volume: &Dir, outcome: Outcome) -> sys::Result<()> {
    match volume.write_new(OUTCOME, outcome.to_string().as_bytes()) {
        Err(error) if error.is(Errno::EEXIST) => Ok(()),
        result => result,
    }
}

/// How the pod's work ended, if that was noted. What was cut short by a crash was not noted.
pub fn read_outcome(volume: &Dir) -> sys::Result<Option<Outcome>> {
    match volume.read(OUTCOME, 64) {
        Ok(bytes) if bytes == b"succeeded" => Ok(Some(Outcome::Succeeded)),
        Ok(bytes) if bytes == b"failed" => Ok(Some(Outcome::Failed)),
        Ok(_) => {
            // Torn by a crash between open and write: make room for the word when it is said again.
            volume.remove_file(OUTCOME)?;
            Ok(None)
        }
        Err(error) if error.is(Errno::ENOENT) => Ok(None),
        Err(error) => Err(error),
    }
}

/// What a volume that leaves may wait for so long that the driver restarts meanwhile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// That its pod's outcome becomes known.
    Outcome,
    /// Room for a copy of it.
    Room,
}

impl Wait {
    /// The file that says since when.
    fn file(self) -> &'static str {
        match self {
            Self::Outcome => "awaited",
            Self::Room => "no-room",
        }
    }
}

/// Since when this is waited for, in seconds since the boot: `now`, if that was not noted before.
pub fn waiting_since(volume: &Dir, wait: Wait, now: u64) -> sys::Result<u64> {
    let file = wait.file();
    let noted = match volume.read(file, 64) {
        Err(error) if error.is(Errno::ENOENT) => None,
        noted => {
            let text = String::from_utf8(noted?).unwrap_or_default();
            let since = text.strip_suffix('\n').and_then(|text| text.parse().ok());
            if since.is_none() {
                // Torn, as an outcome may be.
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

/// Notes that this is waited for no longer: the next time counts anew.
pub fn waits_no_more(volume: &Dir, wait: Wait) -> sys::Result<()> {
    match volume.remove_file(wait.file()) {
        Err(error) if error.is(Errno::ENOENT) => Ok(()),
        result => result,
    }
}

/// That a write-back failed: what was made before may have lost bytes, silently.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Doom {
    /// In which boot.
    pub boot: String,
    /// Volumes made up to then are not sealed any more.
    pub until: Timestamp,
    /// Not everything that has to say so by itself does yet.
    #[serde(default)]
    pub unfinished: bool,
}

/// Remembers a failed write-back, for the next process of this boot.
pub fn write_doom(root: &Dir, doom: &Doom) -> sys::Result<()> {
    root.replace(
        DOOMED,
        &serde_json::to_vec(doom).expect("plain data serialises"),
    )
}

/// The failed write-back of this boot, if there was one.
pub fn read_doom(root: &Dir, boot: &str) -> sys::Result<Option<Doom>> {
    Ok(read(root, DOOMED)?
        .ok()
        .filter(|doom: &Doom| doom.boot == boot))
}

fn read<T: DeserializeOwned>(dir: &Dir, name: &str) -> sys::Result<Result<T, Unreadable>> {
    match dir.read(name, LIMIT) {
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
        assert_eq!(since(Wait::Room, 5678), 5678, "it is another wait");
        waits_no_more(&dir, Wait::Room).expect("forgotten");
        waits_no_more(&dir, Wait::Room).expect("it is already");
        assert_eq!(since(Wait::Room, 9012), 9012);
        assert_eq!(since(Wait::Outcome, 9012), 1234);
    }

    #[test]
    fn doom_is_of_its_boot() {
        let (_folder, dir) = scratch();
        write_doom(
            &dir,
            &Doom {
                boot: "a".to_owned(),
                until: Timestamp(9),
                unfinished: false,
            },
        )
        .expect("written");
        assert_eq!(read_doom(&dir, "b").expect("read"), None);
        assert_eq!(
            read_doom(&dir, "a").expect("read").map(|doom| doom.until),
            Some(Timestamp(9))
        );
        // As versions wrote it that had nothing unfinished.
        let older = br#"{"boot":"a","until":9}"#;
        dir.replace(DOOMED, older).expect("written");
        let doom = read_doom(&dir, "a").expect("read");
        assert!(doom.is_some_and(|doom| !doom.unfinished));
    }
}
