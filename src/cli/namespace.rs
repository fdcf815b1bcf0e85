//! The flag by which most verbs name a namespace. It is apart from `verbs`, because verbs whose
//! flags are beside their code have it, too.

use clap::Args;

use crate::model::Tenant;

/// The flag `-n`. `destroy` and `import` require it.
#[derive(Debug, Args)]
pub(super) struct Namespace {
    /// Only what belongs to this namespace
    #[arg(
        short = 'n',
        long = "namespace",
        alias = "tenant",
        value_name = "NAMESPACE"
    )]
    pub(super) tenant: Option<Tenant>,
}

impl Namespace {
    /// The namespace of a verb that requires one.
    pub(super) fn required(self) -> Tenant {
        self.tenant.expect("clap refuses the verb without -n")
    }
}
