//! Live reads and writes of the objects. Each write is conditional: on the version that was read,
//! or on the absence of the object. Only writes of annotations are unconditional: an annotation
//! means the same in any version.

use std::fmt;

use kube::api::{ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Resource};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tonic::Code;

use super::decide::refusal;
use crate::engine::{Error, Result};
use crate::k8s::client::{deletion_as_read, has_code, patch_as_read, patch_status_as_read};

/// The error for an answer of the API server that is no decision.
pub(super) fn failed(error: &kube::Error) -> Error {
    refusal(Code::Unavailable, format!("the API server: {error}"))
}

/// The objects of one kind, in the API server.
#[derive(Debug, Clone)]
pub(super) struct Objects<K>(pub(super) Api<K>);

impl<K> Objects<K>
where
    K: Resource<DynamicType = ()> + Clone + fmt::Debug + DeserializeOwned + Serialize,
{
    pub(super) async fn get(&self, name: &str) -> Result<Option<K>> {
        self.0.get_opt(name).await.map_err(|error| failed(&error))
    }

    /// All objects that a selectable field selects.
    pub(super) async fn select(&self, field: &str, value: &str) -> Result<Vec<K>> {
        // These characters are syntax in a selector.
        let value = value.replace('\\', "\\\\").replace(',', "\\,");
        let value = value.replace('=', "\\=");
        let params = ListParams::default().fields(&format!("{field}={value}"));
        let list = self.0.list(&params).await.map_err(|error| failed(&error))?;
        Ok(list.items)
    }

    /// Makes an object; `None` if there is one of that name.
    pub(super) async fn make(&self, object: &K) -> Result<Option<K>> {
        match self.0.create(&PostParams::default(), object).await {
            Ok(made) => Ok(Some(made)),
            Err(error) if has_code(&error, 409) => Ok(None),
            Err(error) => Err(failed(&error)),
        }
    }

    /// Changes fields of `spec`; `None` if the object was changed or deleted since it was read.
    pub(super) async fn write(&self, object: &K, spec: Value) -> Result<Option<K>> {
        let written = patch_as_read(&self.0, object, json!({ "spec": spec })).await;
        written.map_err(|error| failed(&error))
    }

    /// Changes fields of `status`, unless the object was changed or deleted since it was read.
    pub(super) async fn write_status(&self, object: &K, status: Value) -> Result<()> {
        let written = patch_status_as_read(&self.0, object, status).await;
        written.map(drop).map_err(|error| failed(&error))
    }

    /// Sets an annotation to `true`. An object that was deleted meanwhile needs none.
    pub(super) async fn annotate(&self, name: &str, key: &str) -> Result<()> {
        let patch = json!({ "metadata": { "annotations": { key: "true" } } });
        let params = PatchParams::default();
        match self.0.patch(name, &params, &Patch::Merge(patch)).await {
            Err(error) if has_code(&error, 404) => Ok(()),
            done => done.map(drop).map_err(|error| failed(&error)),
        }
    }

    /// Deletes an object, unless it was changed since it was read.
    pub(super) async fn remove(&self, object: &K) -> Result<bool> {
        let name = object.meta().name.as_deref().unwrap_or_default();
        match self.0.delete(name, &deletion_as_read(object)).await {
            Ok(_) => Ok(true),
            Err(error) if has_code(&error, 404) => Ok(true),
            Err(error) if has_code(&error, 409) => Ok(false),
            Err(error) => Err(failed(&error)),
        }
    }
}
