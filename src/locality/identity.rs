//! How the API server knows the webhook, and the webhook the API server. The API server trusts one
//! certificate. In return it knows a path that no other program can guess: Kubernetes gives no
//! webhook a certificate of the API server by default.
//!
//! Key and certificate are in one file, so that they change together. The path is a digest of the
//! key. So it changes with the key, too.

use std::sync::Arc;

use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair};
use rustls::ServerConfig;
use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::version::TLS13;
use sha2::{Digest as _, Sha256};

use crate::model::hex;

/// How HTTP/1.1 is named in TLS.
const HTTP: &[u8] = b"http/1.1";
/// Divides this use of the key's digest from any other.
const PURPOSE: &[u8] = b"baggageclaim locality path\0";
/// The hex digits of the path: 128 bits.
const DIGITS: usize = 32;

/// Why there is no identity.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// No key, or no certificate.
    #[error("it needs a private key and a certificate, as PEM: {0}")]
    Pem(#[from] rustls::pki_types::pem::Error),
    /// They do not belong together, or TLS cannot use them.
    #[error("TLS cannot use its key and certificate: {0}")]
    Tls(#[from] rustls::Error),
    /// None can be made.
    #[error("no key and certificate can be made: {0}")]
    Make(#[from] rcgen::Error),
}

/// An identity in use.
#[derive(Debug)]
pub(super) struct Identity {
    path: [u8; 32],
    tls: Arc<ServerConfig>,
}

impl Identity {
    /// Reads the file.
    pub(super) fn read(file: &[u8]) -> Result<Self, IdentityError> {
        let key = PrivateKeyDer::from_pem_slice(file)?;
        let certificate = CertificateDer::from_pem_slice(file)?;
        let path = path_of(key.secret_der());
        let mut tls = ServerConfig::builder_with_provider(Arc::new(default_provider()))
            .with_protocol_versions(&[&TLS13])?
            .with_no_client_auth()
            .with_single_cert(vec![certificate], key)?;
        tls.alpn_protocols = vec![HTTP.to_vec()];
        Ok(Self {
            path: Sha256::digest(path).into(),
            tls: Arc::new(tls),
        })
    }

    /// Whether a request has the secret path. Digests are compared, so that the time tells nothing.
    pub(super) fn is_path(&self, path: &str) -> bool {
        let path: [u8; 32] = Sha256::digest(path).into();
        path == self.path
    }

    pub(super) fn tls(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.tls)
    }
}

/// A new identity, as it is given away.
#[derive(Debug)]
pub(super) struct New {
    /// The file for the webhook: key and certificate.
    pub(super) file: String,
    /// The certificate, for the API server.
    pub(super) certificate: String,
    /// The path, for the API server.
    pub(super) path: String,
}

/// Makes an identity of the server `dns`. The API server trusts this certificate alone, so no
/// authority signs it. Its validity begins and ends so far away that no clock decides.
pub(super) fn make(dns: &str) -> Result<New, IdentityError> {
    let key = KeyPair::generate()?;
    let mut params = CertificateParams::new(vec![dns.to_owned()])?;
    params.distinguished_name = DistinguishedName::new();
    let name = &mut params.distinguished_name;
    name.push(DnType::CommonName, "baggageclaim");
    let certificate = params.self_signed(&key)?.pem();
    Ok(New {
        file: key.serialize_pem() + &certificate,
        certificate,
        path: path_of(key.serialized_der()),
    })
}

fn path_of(private: &[u8]) -> String {
    let mut hash = Sha256::new();
    hash.update(PURPOSE);
    hash.update(private);
    format!("/{}", hex(&hash.finalize()[..DIGITS / 2]))
}

#[cfg(test)]
mod tests {
    use super::*;

    const DNS: &str = "a.b.svc";

    #[test]
    fn each_identity_has_a_path_of_its_own_that_its_file_leads_to() {
        let one = make(DNS).expect("made");
        let two = make(DNS).expect("made");
        assert_ne!(one.path, two.path);
        let read = Identity::read(one.file.as_bytes()).expect("read");
        assert!(read.is_path(&one.path));
        for wrong in ["", "/", &one.path[1..], &two.path, &one.path[..32]] {
            assert!(!read.is_path(wrong), "{wrong}");
        }
        // Kubernetes takes a path whose segments are DNS subdomains.
        let digits = one.path.strip_prefix('/').expect("it begins so");
        assert!(digits.len() == DIGITS && digits.bytes().all(|it| it.is_ascii_hexdigit()));
    }

    #[test]
    fn what_is_no_identity_is_refused() {
        let one = make(DNS).expect("made");
        let two = make(DNS).expect("made");
        let key = one.file.replace(&one.certificate, "");
        for wrong in [
            "",
            "text",
            &key,
            &one.certificate,
            // A key and the certificate of another.
            &(key.clone() + &two.certificate),
        ] {
            Identity::read(wrong.as_bytes()).expect_err(wrong);
        }
    }
}
