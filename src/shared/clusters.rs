//! The namespace of each cluster that a tenant's part of the tier belongs to: a small record for
//! each cluster. The controller of the cluster compares it with the namespace that there is, and so
//! finds a namespace that was deleted while no controller ran.

use super::cluster_uid::ClusterUid;
use super::commit::check_format;
use super::error::{Error, Result};
use super::keys::Keys;
use super::record::{FORMAT, MOST_NAME, NamespaceRecord, encode};
use super::store::{Store, Version};
use crate::model::Tenant;

impl Store {
    /// The uid of the cluster's namespace whose content the tenant's part has; `None`: the cluster
    /// has recorded none. A record that cannot be read counts as none.
    pub fn namespace_of(&self, tenant: &Tenant, cluster: &ClusterUid) -> Result<Option<String>> {
        let (recorded, _) = self.recorded(&Keys::new(tenant).cluster(cluster))?;
        Ok(recorded)
    }

    fn recorded(&self, key: &str) -> Result<(Option<String>, Option<Version>)> {
        let Some((bytes, version)) = self.get(key, MOST_NAME)? else {
            return Ok((None, None));
        };
        match NamespaceRecord::parse(key, &bytes) {
            Ok(record) => Ok((Some(record.namespace), Some(version))),
            Err(Error::Corrupt { .. }) => Ok((None, Some(version))),
            Err(error) => Err(error),
        }
    }

    /// Records the uid of the cluster's namespace, or that it has none, if the record still says
    /// `earlier`; else [`Error::Conflict`]. So a request that takes effect late does not write over
    /// what another controller of the cluster recorded meanwhile.
    pub fn set_namespace_of(
        &self,
        tenant: &Tenant,
        cluster: &ClusterUid,
        earlier: Option<&str>,
        namespace: Option<&str>,
    ) -> Result<()> {
        let keys = Keys::new(tenant);
        check_format(self, &keys, false)?;
        let key = keys.cluster(cluster);
        let (recorded, version) = self.recorded(&key)?;
        if recorded.as_deref() != earlier {
            return Err(Error::Conflict { object: key });
        }
        let Some(namespace) = namespace else {
            // The client has no conditional deletion. A namespace without a record is recorded
            // again.
            return self.delete_once(&key);
        };
        let record = encode(&NamespaceRecord {
            format: FORMAT,
            namespace: namespace.to_owned(),
        });
        match version {
            Some(version) => self.replace(&key, record, &version),
            None => self.create(&key, record),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cluster_is_one_safe_component_of_a_key() {
        let uid = "6f1c9a3e-5a51-4d5c-8f0e-0a8c1f6d2b7e";
        let cluster = ClusterUid::new(uid).expect("a uid");
        let keys = Keys::new(&"ci".parse().expect("a label"));
        let key = keys.cluster(&cluster);
        assert_eq!(key, format!("v1/ci/clusters/{uid}"));
        assert_eq!(keys.parse(&key), None, "the collector leaves it alone");
        for other in ["", "..", "a/b", "a.condemned", "ü", &"x".repeat(65)] {
            assert_eq!(ClusterUid::new(other), None, "{other}");
        }
    }
}
