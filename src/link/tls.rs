//! TLS 1.3 with raw public keys (RFC 7250) on both sides: no authority and no certificates. The
//! client pins the server's key. The server takes every key, once its holder has proved that it has
//! the private part; the service compares it with the list of peers, so that a refusal has a code.

use std::sync::Arc;

use rustls::client::AlwaysResolvesClientRawPublicKeys;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{
    CryptoProvider, WebPkiSupportedAlgorithms, ring, verify_tls13_signature_with_raw_key,
};
use rustls::pki_types::{CertificateDer, ServerName, SubjectPublicKeyInfoDer, UnixTime};
use rustls::server::AlwaysResolvesServerRawPublicKeys;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::version::TLS13;
use rustls::{
    ClientConfig, DigitallySignedStruct, DistinguishedName, Error, PeerIncompatible, ServerConfig,
    SignatureScheme,
};

use super::key::{Key, name_of};
use crate::model::Sha256;

/// How HTTP/2 is named in TLS.
const H2: &[u8] = b"h2";

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

/// Verifies raw public keys.
#[derive(Debug)]
struct Verifier {
    /// The key that the other side must have; `None`: any.
    pinned: Option<Sha256>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl Verifier {
    fn new(pinned: Option<Sha256>) -> Self {
        let algorithms = provider().signature_verification_algorithms;
        Self { pinned, algorithms }
    }

    fn check(&self, key: &CertificateDer<'_>) -> Result<(), Error> {
        match self.pinned {
            Some(pinned) if name_of(key) != pinned => {
                let shown = name_of(key);
                Err(Error::General(format!(
                    "it has another key than the list of peers says: {shown}"
                )))
            }
            _ => Ok(()),
        }
    }

    fn signature(
        &self,
        message: &[u8],
        key: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let key = SubjectPublicKeyInfoDer::from(key.as_ref());
        verify_tls13_signature_with_raw_key(message, &key, signature, &self.algorithms)
    }
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        key: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.check(key)?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _key: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(Error::PeerIncompatible(
            PeerIncompatible::Tls13RequiredForQuic,
        ))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        key: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.signature(message, key, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

impl ClientCertVerifier for Verifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        key: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.check(key)?;
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _key: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(Error::PeerIncompatible(
            PeerIncompatible::Tls13RequiredForQuic,
        ))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        key: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.signature(message, key, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

/// The server's side.
pub(super) fn server(key: &Key) -> Result<Arc<ServerConfig>, Error> {
    let resolver = AlwaysResolvesServerRawPublicKeys::new(key.certified());
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])?
        .with_client_cert_verifier(Arc::new(Verifier::new(None)))
        .with_cert_resolver(Arc::new(resolver));
    config.alpn_protocols = vec![H2.to_vec()];
    Ok(Arc::new(config))
}

/// The client's side, towards the holder of this key alone.
pub(super) fn client(key: &Key, pinned: Sha256) -> Result<Arc<ClientConfig>, Error> {
    let resolver = AlwaysResolvesClientRawPublicKeys::new(key.certified());
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Verifier::new(Some(pinned))))
        .with_client_cert_resolver(Arc::new(resolver));
    config.alpn_protocols = vec![H2.to_vec()];
    // The key is the name.
    config.enable_sni = false;
    Ok(Arc::new(config))
}
