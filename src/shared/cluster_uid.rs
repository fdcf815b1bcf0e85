//! The uid of a cluster, as it may be a part of a key.
//! Only the value is here; `clusters` has the records.

/// The uid of a cluster: that of its namespace `kube-system`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterUid(String);

impl ClusterUid {
    /// `None`: it is no uid, and can be no part of a key.
    #[must_use]
    pub fn new(uid: &str) -> Option<Self> {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
        let is_uid = !uid.is_empty() && uid.len() <= 64 && uid.bytes().all(is_plain);
        is_uid.then(|| Self(uid.to_owned()))
    }

    pub(super) fn as_str(&self) -> &str {
        &self.0
    }
}
