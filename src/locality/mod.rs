//! Locality: a pod prefers the nodes that have the content which it starts from. Off by default.
//!
//! It is a mutating admission webhook in the controller, beside the catalog: when a pod is created,
//! the API server asks, and the answer adds *preferred* node affinity by the nodes' names. So nodes
//! need no labels. A plugin or an extender of the scheduler would need a change of the control
//! plane, which managed clusters do not allow.
//!
//! No pod waits or fails because of it. The API server ignores a webhook that fails
//! (`failurePolicy: Ignore`), and each answer has a limit of 200 ms ([`serve`]).
//!
//! The controller has no right to write the webhook's configuration. A right to patch one, even
//! limited to its name, is a right to change every object of the cluster: the rules can be
//! widened, and no admission policy applies to these objects (Kubernetes 1.37,
//! `IsExemptAdmissionConfigurationResource`). So an administrator applies what
//! `baggageclaim locality` prints.
//!
//! | file | holds |
//! |---|---|
//! | `policy` | which nodes are preferred, and how much; pure |
//! | `review` | the API server's question and the answer, as JSON; pure |
//! | `identity` | the key, the certificate, and the secret path |
//! | `objects` | what an administrator applies |
//! | `serve` | the HTTPS port |
//!
//! It uses the catalog through a function ([`Find`]) that the role passes in.

mod identity;
mod objects;
mod policy;
mod review;
mod serve;

pub use identity::IdentityError;
pub use objects::objects;
pub use serve::{Counters, Error, Find, Webhook};
