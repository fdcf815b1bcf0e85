//! Connections between the nodes of a cluster, and to its controller: TLS 1.3 with raw public keys,
//! and HTTP/2 over it. Each side has a key of its own, and the client pins that of the server. Also
//! the back-off of all clients that connect again, and the limit of the log of refusals.
//!
//! Who has which key is known above: the user of a connection compares it.

mod accept;
mod backoff;
mod dial;
mod key;
mod refusals;
mod tls;

pub use accept::{IsKnown, Link, Who, accept};
pub use backoff::Backoff;
pub use dial::connect;
pub use key::{Key, KeyError, name_of};
pub use refusals::Refusals;
