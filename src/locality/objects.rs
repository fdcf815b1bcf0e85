//! What an administrator applies to turn locality on: the identity as a Secret, for the controller,
//! and the MutatingWebhookConfiguration, for the API server. Each call makes a new identity.

use std::collections::BTreeMap;

use k8s_openapi::ByteString;
use serde_json::{Value, json};

use super::identity::{self, IdentityError};

/// The configuration without the identity.
const WEBHOOK: &str = include_str!("webhook.yaml");
/// The Secret, and the file in it. deploy/components/locality mounts it.
const SECRET: &str = "baggageclaim-locality";
const FILE: &str = "identity.pem";

/// Both objects, for a controller in this namespace.
pub fn objects(namespace: &str) -> Result<Value, IdentityError> {
    let mut webhook: Value = serde_saphyr::from_str(WEBHOOK).expect("a part of this program");
    let labels = webhook["metadata"]["labels"].clone();
    let hook = &mut webhook["webhooks"][0];
    let own = &mut hook["namespaceSelector"]["matchExpressions"][0]["values"][1];
    *own = namespace.into();
    let client = &mut hook["clientConfig"];
    let service = client["service"]["name"].as_str().unwrap_or_default();
    let new = identity::make(&format!("{service}.{namespace}.svc"))?;
    client["service"]["namespace"] = namespace.into();
    client["service"]["path"] = new.path.into();
    client["caBundle"] = json!(ByteString(new.certificate.into()));
    let secret = json!({
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": SECRET, "namespace": namespace, "labels": labels},
        "data": BTreeMap::from([(FILE, ByteString(new.file.into()))]),
    });
    // The Secret first: the controller needs it before the API server calls.
    Ok(json!({"apiVersion": "v1", "kind": "List", "items": [secret, webhook]}))
}
