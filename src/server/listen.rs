//! How all servers with a TCP port bind it: the port of health and metrics, the peers' service, the
//! controller's catalog and its webhook. A machine may have no IPv6.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};

use crate::sys::Errno;

/// The pause after a connection could not be accepted.
pub(super) const TO_RECOVER: Duration = Duration::from_millis(100);

/// Why an address cannot be served.
#[derive(Debug, thiserror::Error)]
#[error("{address}: {source}")]
pub struct ListenError {
    address: SocketAddr,
    source: io::Error,
}

/// Listens at an address. `[::]` is every address, also of IPv4. On a machine without IPv6 it is
/// `0.0.0.0`.
pub async fn listen(address: SocketAddr) -> Result<TcpListener, ListenError> {
    let bound = listen_with(address, TcpListener::bind).await;
    bound.map_err(|source| ListenError { address, source })
}

/// The next connection to a server, which `what` names in the log. It pauses after an error, such
/// as too few descriptors: no event tells when there are more.
pub async fn accept(listener: &TcpListener, what: &str) -> (TcpStream, SocketAddr) {
    loop {
        match listener.accept().await {
            Ok(accepted) => return accepted,
            Err(error) => {
                tracing::warn!(%error, "a connection to {what} could not be accepted");
                tokio::time::sleep(TO_RECOVER).await;
            }
        }
    }
}

async fn listen_with<T, F>(address: SocketAddr, bind: impl Fn(SocketAddr) -> F) -> io::Result<T>
where
    F: Future<Output = io::Result<T>>,
{
    match bind(address).await {
        Err(error) if lacks_ipv6(&error) && address.ip() == Ipv6Addr::UNSPECIFIED => {
            bind((Ipv4Addr::UNSPECIFIED, address.port()).into()).await
        }
        bound => bound,
    }
}

/// Whether the machine has no IPv6 at all.
fn lacks_ipv6(error: &io::Error) -> bool {
    [Errno::EAFNOSUPPORT, Errno::EADDRNOTAVAIL]
        .iter()
        .any(|errno| error.raw_os_error() == Some(*errno as i32))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a machine without IPv6 says to an address. Returns the address that is bound.
    async fn without_ipv6(address: &str, errno: Errno) -> io::Result<String> {
        let address = address.parse().expect("an address");
        let bound = listen_with(address, |address| {
            std::future::ready(match address {
                SocketAddr::V6(_) => Err(io::Error::from_raw_os_error(errno as i32)),
                SocketAddr::V4(address) => Ok(address.to_string()),
            })
        });
        bound.await
    }

    #[tokio::test]
    async fn every_address_is_every_one_of_ipv4_without_ipv6() {
        for errno in [Errno::EAFNOSUPPORT, Errno::EADDRNOTAVAIL] {
            let bound = without_ipv6("[::]:9810", errno).await;
            assert_eq!(bound.expect("bound"), "0.0.0.0:9810");
            // One address is not replaced by all addresses.
            let refused = without_ipv6("[::1]:9810", errno).await;
            let refused = refused.expect_err("refused").raw_os_error();
            assert_eq!(refused, Some(errno as i32));
        }
        let taken = without_ipv6("[::]:9810", Errno::EADDRINUSE).await;
        assert_eq!(taken.expect_err("taken").kind(), io::ErrorKind::AddrInUse);
    }

    #[tokio::test]
    async fn ipv4_reaches_every_address() {
        let any = "[::]:0".parse().expect("an address");
        let listener = listen(any).await.expect("bound");
        let port = listener.local_addr().expect("an address").port();
        let stream = tokio::net::TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await;
        stream.expect("connected");
    }
}
