//! A self-signed certificate of a server (X.509 v3, RFC 5280), written as DER: one key of P-256,
//! one DNS name, no end. The API server trusts it alone, and by its own bytes, so no authority is
//! needed.

use ring::rand::SecureRandom as _;
use ring::rand::SystemRandom;
use ring::signature::EcdsaKeyPair;

const SEQUENCE: u8 = 0x30;
const SET: u8 = 0x31;
const INTEGER: u8 = 0x02;
const BIT_STRING: u8 = 0x03;
const OCTET_STRING: u8 = 0x04;
const OBJECT_ID: u8 = 0x06;
const UTF8_STRING: u8 = 0x0c;
const UTC_TIME: u8 = 0x17;
const GENERALIZED_TIME: u8 = 0x18;
/// Explicit tags of TBSCertificate: its version, and its extensions.
const VERSION: u8 = 0xa0;
const EXTENSIONS: u8 = 0xa3;
/// The tag of a `dNSName` in a GeneralName.
const DNS_NAME: u8 = 0x82;

/// 1.2.840.10045.4.3.2
const ECDSA_WITH_SHA256: &[u8] = &[0x2a, 0x86, 0x48, 0xce, 0x3d, 0x04, 0x03, 0x02];
/// 2.5.4.3
const COMMON_NAME: &[u8] = &[0x55, 0x04, 0x03];
/// 2.5.29.17
const SUBJECT_ALT_NAME: &[u8] = &[0x55, 0x1d, 0x11];

/// From the beginning of Unix time, so that no clock decides, to the time that RFC 5280 gives for
/// "no end". A new certificate replaces it at any time.
const NOT_BEFORE: &[u8] = b"700101000000Z";
const NOT_AFTER: &[u8] = b"99991231235959Z";
const ISSUER: &[u8] = b"baggageclaim";

/// A value: its tag, the length of its parts, and the parts.
fn der(tag: u8, parts: &[&[u8]]) -> Vec<u8> {
    let content = parts.concat();
    let length = content.len().to_be_bytes();
    let zeros = length.iter().take_while(|byte| **byte == 0).count();
    let mut value = vec![tag];
    match &length[zeros..] {
        [] => value.push(0),
        [short] if *short < 0x80 => value.push(*short),
        long => {
            value.push(0x80 | u8::try_from(long.len()).expect("a length has at most 8 bytes"));
            value.extend_from_slice(long);
        }
    }
    value.extend_from_slice(&content);
    value
}

/// The certificate of `key`, whose SubjectPublicKeyInfo is `public`, for the server `dns`. `None`:
/// this machine has no random numbers.
pub(super) fn self_signed(key: &EcdsaKeyPair, public: &[u8], dns: &str) -> Option<Vec<u8>> {
    let random = SystemRandom::new();
    let mut serial = [0; 16];
    random.fill(&mut serial).ok()?;
    // Positive, and in the shortest form.
    serial[0] = serial[0] & 0x7f | 0x40;
    let algorithm = der(SEQUENCE, &[&der(OBJECT_ID, &[ECDSA_WITH_SHA256])]);
    let common = [der(OBJECT_ID, &[COMMON_NAME]), der(UTF8_STRING, &[ISSUER])].concat();
    let name = der(SEQUENCE, &[&der(SET, &[&der(SEQUENCE, &[&common])])]);
    let validity = [
        der(UTC_TIME, &[NOT_BEFORE]),
        der(GENERALIZED_TIME, &[NOT_AFTER]),
    ]
    .concat();
    let names = der(SEQUENCE, &[&der(DNS_NAME, &[dns.as_bytes()])]);
    let extension = [
        der(OBJECT_ID, &[SUBJECT_ALT_NAME]),
        der(OCTET_STRING, &[&names]),
    ]
    .concat();
    let extensions = der(SEQUENCE, &[&der(SEQUENCE, &[&extension])]);
    let signed = der(
        SEQUENCE,
        &[
            // Version 3.
            &der(VERSION, &[&der(INTEGER, &[&[2]])]),
            &der(INTEGER, &[&serial]),
            &algorithm,
            &name,
            &der(SEQUENCE, &[&validity]),
            // It signs itself.
            &name,
            public,
            &der(EXTENSIONS, &[&extensions]),
        ],
    );
    let signature = key.sign(&random, &signed).ok()?;
    // No unused bits.
    let signature = der(BIT_STRING, &[&[0], signature.as_ref()]);
    Some(der(SEQUENCE, &[&signed, &algorithm, &signature]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_written_in_the_shortest_form() {
        assert_eq!(der(0x30, &[]), [0x30, 0]);
        for (length, head) in [
            (1, &[4, 1][..]),
            (0x7f, &[4, 0x7f]),
            (0x80, &[4, 0x81, 0x80]),
            (0xff, &[4, 0x81, 0xff]),
            (0x100, &[4, 0x82, 1, 0]),
            (0x1_0000, &[4, 0x83, 1, 0, 0]),
        ] {
            let content = vec![7; length];
            let value = der(4, &[&content]);
            assert_eq!(value, [head, &content].concat());
        }
    }
}
