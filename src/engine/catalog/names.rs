//! Which artifact has a name: the owners of each, as artifacts are sealed, indexed, deleted and
//! lost. A part of [`Catalog`], in memory only.

use std::collections::{HashMap, HashSet};

use super::{Catalog, Sealed};
use crate::model::{Artifact, ArtifactId, Name, Reference, Tenant, takes_name};

impl Catalog {
    /// Makes an artifact visible that the index does not have yet, and enters it among the owners
    /// of its name. Returns whether it is the current owner.
    pub(in crate::engine) fn add_artifact(&mut self, artifact: Artifact) -> bool {
        let name = artifact.name();
        let mut owners = self.owners(&name);
        let place = self.place_of(&artifact, &owners);
        if let Some(place) = place {
            owners.insert(place, artifact.id);
        }
        let takes = owners.last() == Some(&artifact.id);
        let (indexed, durable) = (false, false);
        let sealed = Sealed {
            artifact,
            indexed,
            durable,
        };
        self.artifacts.insert(sealed);
        self.set_owners(name, owners);
        takes
    }

    /// Where an artifact stands among the owners of its name; `None`: a later owner is in the
    /// index, so the artifact has lost the name for good.
    fn place_of(&self, artifact: &Artifact, owners: &[ArtifactId]) -> Option<usize> {
        let is_passed = |sealed: &Sealed| takes_name(artifact, &sealed.artifact);
        let passed = owners
            .iter()
            .rposition(|id| self.artifacts.get(id).is_some_and(is_passed));
        let place = passed.map_or(0, |passed| passed + 1);
        let is_late = owners[place..].iter().any(|id| self.is_indexed(id));
        (!is_late).then_some(place)
    }

    /// Whether the index may get the name of an artifact that is not visible yet.
    pub(in crate::engine) fn may_take_name(&self, artifact: &Artifact) -> bool {
        let owners = self.owners(&artifact.name());
        self.place_of(artifact, &owners).is_some()
    }

    /// The current owner of a name.
    pub(super) fn owner_id(&self, name: &Name) -> Option<ArtifactId> {
        self.names.get(name)?.last().copied()
    }

    /// The current owner of a name and the previous ones that may get it back, oldest first.
    fn owners(&self, name: &Name) -> Vec<ArtifactId> {
        let owners = self.all_owners(name);
        owners.map(|sealed| sealed.artifact.id).collect()
    }

    fn all_owners(&self, name: &Name) -> impl Iterator<Item = &Sealed> {
        let owners = self.names.get(name).into_iter().flatten();
        owners.filter_map(|id| self.artifacts.get(id))
    }

    /// Replaces the owners of a name, and keeps the index of keys in step.
    pub(super) fn set_owners(&mut self, name: Name, mut owners: Vec<ArtifactId>) {
        self.changes.note(&name);
        if let Reference::TaskCache(key) = &name.reference {
            match owners.last().and_then(|id| self.artifacts.get(id)) {
                Some(sealed) => {
                    let version = (sealed.artifact.created, sealed.artifact.id);
                    self.keys.set(&name.tenant, key, version);
                }
                None => self.keys.remove(&name.tenant, key),
            }
        }
        if owners.is_empty() {
            self.names.remove(&name);
        } else {
            // Nearly every name has one.
            owners.shrink_to_fit();
            self.names.insert(name, owners);
        }
    }

    fn is_indexed(&self, id: &ArtifactId) -> bool {
        self.artifacts.get(id).is_some_and(|sealed| sealed.indexed)
    }

    /// Whether the index has a name that points at an existing artifact.
    pub(in crate::engine) fn is_name_indexed(&self, name: &Name) -> bool {
        self.owners(name).iter().any(|id| self.is_indexed(id))
    }

    /// The names that the index gets together with these artifacts. Each points at the artifact
    /// that would own it if a power cut took everything that the index does not have.
    pub(in crate::engine) fn names_of(
        &self,
        batch: &HashSet<ArtifactId>,
    ) -> HashMap<Name, ArtifactId> {
        let artifacts = batch.iter().filter_map(|id| self.artifacts.get(id));
        let names: HashSet<Name> = artifacts.map(|sealed| sealed.artifact.name()).collect();
        let newest = |name: &Name| self.owners(name).into_iter().rfind(|id| batch.contains(id));
        let with_owner = |name: Name| newest(&name).map(|id| (name, id));
        names.into_iter().filter_map(with_owner).collect()
    }

    /// Notes that the index has these artifacts and names.
    pub(in crate::engine) fn indexed(
        &mut self,
        batch: &HashSet<ArtifactId>,
        names: HashMap<Name, ArtifactId>,
    ) {
        for id in batch {
            self.artifacts.set_indexed(id);
        }
        for (name, id) in names {
            let mut owners = self.owners(&name);
            if let Some(older) = owners.iter().position(|one| *one == id) {
                owners.drain(..older);
                self.set_owners(name, owners);
            }
        }
    }

    /// Makes an artifact invisible. If it is the current owner of its name, the newest surviving
    /// previous owner gets that. Age alone does not decide: an older artifact may have been
    /// destroyed, and exist for its forks only.
    pub(in crate::engine) fn remove_artifact(&mut self, id: ArtifactId) -> Option<Sealed> {
        let sealed = self.artifacts.remove(&id)?;
        if self.is_named(&sealed.artifact) {
            let name = sealed.artifact.name();
            let survivors = self.owners(&name);
            self.set_owners(name, survivors);
        }
        Some(sealed)
    }

    /// Makes all artifacts invisible that the index does not have.
    pub(in crate::engine) fn remove_unindexed(&mut self) -> Vec<Sealed> {
        let unindexed = self.artifacts.values().filter(|sealed| !sealed.indexed);
        let unindexed: Vec<_> = unindexed.map(|sealed| sealed.artifact.id).collect();
        let removed = unindexed.into_iter();
        removed.filter_map(|id| self.remove_artifact(id)).collect()
    }

    /// Hides an artifact that is to be deleted. Returns whether it had its name; the name then has
    /// no owner.
    pub(in crate::engine) fn take_out(&mut self, id: ArtifactId) -> Option<(Artifact, bool)> {
        let artifact = &self.artifacts.get(&id)?.artifact;
        let (name, had_name) = (artifact.name(), self.is_named(artifact));
        if had_name {
            self.take_name(&name);
        }
        self.remove_artifact(id)
            .map(|sealed| (sealed.artifact, had_name))
    }

    /// Puts an artifact back that could not be deleted. `had_name`: it gets its name back, too. Its
    /// age does not decide that, since it may have lost the name for good.
    pub(in crate::engine) fn put_back(&mut self, artifact: Artifact, had_name: bool) {
        let (id, name) = (artifact.id, artifact.name());
        self.artifacts.insert(Sealed::durable(artifact));
        if had_name {
            self.put_name_back(name, id);
        }
    }

    /// Takes a name away that is to be deleted: from its holder, and from all who had it before.
    pub(in crate::engine) fn take_name(&mut self, name: &Name) -> Option<ArtifactId> {
        let owner = self.owner_id(name);
        self.set_owners(name.clone(), Vec::new());
        owner
    }

    fn names_of_tenant(&self, tenant: &Tenant) -> impl Iterator<Item = &Name> {
        let first = Name {
            tenant: tenant.clone(),
            reference: Reference::first(),
        };
        let names = self.names.range(first..).map(|(name, _)| name);
        names.take_while(move |name| name.tenant == *tenant)
    }

    /// The names that fences cover, each with the lowest number of content that keeps the name.
    /// `tenants`: the namespaces of the fences; `None`: all. `least`: that number; 0: the name is
    /// not covered.
    fn covered(
        &self,
        tenants: Option<&[Tenant]>,
        least: impl Fn(&Name) -> u64,
    ) -> impl Iterator<Item = (&Name, u64)> {
        let all = tenants.is_none().then(|| self.names.keys());
        let some = tenants.unwrap_or_default().iter();
        let some = some.flat_map(move |tenant| self.names_of_tenant(tenant));
        let names = all.into_iter().flatten().chain(some);
        let numbered = names.map(move |name| (name, least(name)));
        numbered.filter(|(_, least)| *least > 0)
    }

    /// The names in the index that fences clear. See [`Catalog::covered`].
    pub(in crate::engine) fn indexed_names(
        &self,
        tenants: Option<&[Tenant]>,
        least: impl Fn(&Name) -> u64,
    ) -> Vec<Name> {
        // Only the oldest owner of a name may be in the index.
        let is_one = |(name, least): &(&Name, u64)| {
            let oldest = self.all_owners(name).next();
            oldest.is_some_and(|sealed| sealed.indexed && sealed.artifact.fence < *least)
        };
        let names = self.covered(tenants, least).filter(is_one);
        names.map(|(name, _)| name.clone()).collect()
    }

    /// Takes their names for good from all artifacts that fences clear, whether or not the index
    /// has them. See [`Catalog::covered`].
    pub(in crate::engine) fn clear(
        &mut self,
        tenants: Option<&[Tenant]>,
        least: impl Fn(&Name) -> u64,
    ) {
        let is_concerned = |(name, least): &(&Name, u64)| {
            let mut owners = self.all_owners(name);
            owners.any(|sealed| sealed.artifact.fence < *least)
        };
        let names = self.covered(tenants, least).filter(is_concerned);
        let names: Vec<_> = names.map(|(name, least)| (name.clone(), least)).collect();
        for (name, least) in names {
            let owners = self.all_owners(&name);
            let kept = owners.filter(|it| it.artifact.fence >= least);
            let kept = kept.map(|sealed| sealed.artifact.id).collect();
            self.set_owners(name, kept);
        }
    }

    /// Puts a name back that could not be deleted. An artifact that took it meanwhile keeps it; if
    /// the index has that artifact, for good.
    pub(in crate::engine) fn put_name_back(&mut self, name: Name, id: ArtifactId) {
        let mut owners = self.owners(&name);
        if !owners.iter().any(|id| self.is_indexed(id)) {
            owners.insert(0, id);
            self.set_owners(name, owners);
        }
    }

    /// Whether the artifact still has its name.
    pub(in crate::engine) fn is_named(&self, artifact: &Artifact) -> bool {
        self.owner_id(&artifact.name()) == Some(artifact.id)
    }

    /// Whether the artifact's name points at another one for good. While the other would not
    /// survive a power cut, the name would point at this one after it.
    pub(in crate::engine) fn is_superseded(&self, artifact: &Artifact) -> bool {
        let owners = self.names.get(&artifact.name());
        !owners.is_some_and(|ids| ids.contains(&artifact.id))
    }
}
