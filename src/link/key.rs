//! The key by which other nodes know this one: P-256, kept in a file or in memory only. Its name is
//! the SHA-256 of its SubjectPublicKeyInfo, which is what TLS shows of it.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair};
use rustls::crypto::ring::sign::any_ecdsa_type;
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer};
use rustls::sign::CertifiedKey;
use sha2::{Digest as _, Sha256 as Hasher};

use crate::model::Sha256;
use crate::sys;

/// The name of a public key.
#[must_use]
pub fn name_of(spki: &[u8]) -> Sha256 {
    Sha256(Hasher::digest(spki).into())
}

/// Why a key cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// The file cannot be read or made.
    #[error("the key file {} cannot be {operation}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The operation.
        operation: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// The file holds something else.
    #[error(
        "the key file {} holds no P-256 key: {cause}; `baggageclaim peer-key` makes one",
        path.display()
    )]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        cause: String,
    },
    /// No key can be made.
    #[error("a key for peers: {0}")]
    Generate(String),
}

/// A private key, with its public part as TLS shows it.
#[derive(Debug, Clone)]
pub struct Key {
    certified: Arc<CertifiedKey>,
    name: Sha256,
}

impl Key {
    /// The SHA-256 of its public part.
    #[must_use]
    pub fn name(&self) -> Sha256 {
        self.name
    }

    pub(super) fn certified(&self) -> Arc<CertifiedKey> {
        Arc::clone(&self.certified)
    }

    /// A new key, in memory only.
    pub fn generate() -> Result<Self, KeyError> {
        let key = generate().and_then(Self::of);
        key.map_err(KeyError::Generate)
    }

    /// Reads the key, or makes the file if it is missing. Its directory must exist.
    pub fn open(path: &Path) -> Result<Self, KeyError> {
        let failed = |operation| {
            move |source| KeyError::Io {
                path: path.to_owned(),
                operation,
                source,
            }
        };
        match std::fs::read(path) {
            Ok(bytes) => Self::parse(path, bytes),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let bytes = generate().map_err(|cause| KeyError::Invalid {
                    path: path.to_owned(),
                    cause,
                })?;
                match create(path, &bytes) {
                    Ok(()) => Self::parse(path, bytes),
                    // Another process was faster.
                    Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                        let bytes = std::fs::read(path).map_err(failed("read"))?;
                        Self::parse(path, bytes)
                    }
                    Err(error) => Err(failed("made")(error)),
                }
            }
            Err(error) => Err(failed("read")(error)),
        }
    }

    fn parse(path: &Path, bytes: Vec<u8>) -> Result<Self, KeyError> {
        Self::of(bytes).map_err(|cause| KeyError::Invalid {
            path: path.to_owned(),
            cause,
        })
    }

    fn of(bytes: Vec<u8>) -> Result<Self, String> {
        let private = PrivatePkcs8KeyDer::from(bytes).into();
        let signing = any_ecdsa_type(&private).map_err(|error| error.to_string())?;
        let public = signing.public_key().ok_or("it has no public part")?;
        let name = name_of(&public);
        // A raw public key travels in the place of a certificate.
        let shown = CertificateDer::from(public.to_vec());
        let certified = Arc::new(CertifiedKey::new(vec![shown], signing));
        Ok(Self { certified, name })
    }
}

fn generate() -> Result<Vec<u8>, String> {
    let key = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, &SystemRandom::new());
    let key = key.map_err(|_| "this machine has no random numbers".to_owned())?;
    Ok(key.as_ref().to_vec())
}

/// Makes the file whole or not at all: a second process may read it the next moment.
fn create(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(format!(".{:032x}", sys::random()));
    let temporary = PathBuf::from(temporary);
    let mut options = OpenOptions::new();
    let written = options
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&temporary)
        .and_then(|mut file: File| {
            file.write_all(bytes)?;
            file.sync_all()
        })
        .and_then(|()| std::fs::hard_link(&temporary, path));
    let removed = std::fs::remove_file(&temporary);
    written.and(removed)?;
    // Its name is shown next, and other nodes will know it: it must outlast a power cut.
    let directory = path.parent().filter(|parent| *parent != Path::new(""));
    File::open(directory.unwrap_or(Path::new(".")))?.sync_all()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_key_is_made_once_for_root_alone_and_read_again() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("key");
        let first = Key::open(&path).expect("it is made");
        let mode = path.metadata().expect("it is there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert_eq!(Key::open(&path).expect("read").name(), first.name());
        let other = Key::open(&dir.path().join("other")).expect("it is made");
        assert_ne!(other.name(), first.name());
        let names = std::fs::read_dir(dir.path()).expect("list").count();
        assert_eq!(names, 2, "no temporary file stays");
    }

    #[test]
    fn what_is_no_key_is_refused_and_stays() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("key");
        std::fs::write(&path, "no key").expect("write");
        let error = Key::open(&path).expect_err("it is refused").to_string();
        assert!(error.contains("holds no P-256 key"), "{error}");
        assert_eq!(std::fs::read(&path).expect("read"), b"no key");
        let error = Key::open(&dir.path().join("none/key")).expect_err("no directory");
        assert!(error.to_string().contains("cannot be made"), "{error}");
    }
}
