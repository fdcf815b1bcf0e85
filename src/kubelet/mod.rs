//! The driver's registration with kubelet, by a socket in `plugins_registry/`. It knows kubelet's
//! registration protocol and nothing of CSI; the caller passes what to register.
//!
//! Kubelet watches that directory. It asks a new socket for the driver's name and endpoint, calls
//! the endpoint, and reports the result to the socket. When a socket disappears, kubelet removes
//! the driver from the node. So the socket appears when the driver can serve, and disappears first.
//!
//! The socket's name contains an `@`. Kubelet sends no host, so its gRPC library uses the socket's
//! path as `:authority` and writes `/` as `%2F`. The gRPC library here refuses a host with `%`, but
//! takes the part before `@` as a user, which may contain it.
//!
//! - Kubelet refuses: it may be too early or busy. The socket stays for a while, because kubelet
//!   retries too. Then it is made again, which kubelet treats as new. The pause grows.
//! - Kubelet refuses while the API server is away: it needs that to register a driver
//!   (`InstallCSIDriver` writes to the CSINode). The socket is removed until the API server
//!   answers. Kubelet (1.37) doubles its wait by socket path up to two minutes. Only a success
//!   resets it, not a new socket. Otherwise no pod of the node could start for that long after the
//!   API server is back.
//! - The socket's file disappears: kubelet or an installer cleared the directory. It is made again.
//!   inotify reports this. Without free inotify instances, the driver polls.

mod service;

use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::Mode;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use crate::proto::pluginregistration::registration_server::RegistrationServer;
use crate::server::{self, Drain, Routes, Socket, SocketPlace, Trace};
use crate::sys::{self, Dir, DirWatch};

use service::Answer;

/// The directory that kubelet watches, relative to its root directory.
pub const REGISTRY: &str = "plugins_registry";

/// The pause before the socket is made again. It doubles from the first to the last.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LAST_PAUSE: Duration = Duration::from_secs(60);
/// The pause while the API server is away for the driver. Kubelet may reach it, so the driver still
/// tries, but rarely, because each failure counts.
const FIRST_PAUSE_AWAY: Duration = Duration::from_secs(15);
const LAST_PAUSE_AWAY: Duration = Duration::from_secs(300);
/// How long an answer to kubelet may take before the socket is closed.
const TO_ANSWER: Duration = Duration::from_millis(200);
/// How often to look for the socket's file without inotify.
const LOOK: Duration = Duration::from_secs(10);

/// The registration's parameters.
#[derive(Debug, Clone)]
pub struct Config {
    /// Kubelet's root directory.
    pub kubelet: PathBuf,
    /// The driver's name. The socket's name contains it.
    pub driver: &'static str,
    /// The socket at which kubelet calls the driver.
    pub endpoint: PathBuf,
    /// Whether the API server answers, as far as known; `None` if the driver does not use it.
    pub cluster: Option<watch::Receiver<bool>>,
}

/// Why a driver cannot be registered, whatever kubelet answers.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The protocol has the endpoint as a string.
    #[error(
        "the socket's path {} is not UTF-8, which kubelet's protocol requires; choose \
         another", path.display())]
    NoText {
        /// The path.
        path: PathBuf,
    },
    /// The registration socket cannot be made.
    #[error("registration with kubelet: {0}")]
    Socket(#[from] server::Error),
}

/// A driver's registration with the kubelet of its node.
#[derive(Debug)]
pub struct Registration {
    driver: &'static str,
    endpoint: String,
    socket: PathBuf,
    cluster: Option<watch::Receiver<bool>>,
    registered: watch::Sender<bool>,
}

/// How an offer ended.
enum End {
    /// The driver stops.
    Withdrawn,
    /// The socket's file is gone or replaced.
    Vanished,
    /// Kubelet refused it and did not retry in time.
    Refused,
    /// Kubelet refused it while the API server is away.
    Away,
    /// The socket could not be made or served.
    Failed(String),
}

impl Registration {
    /// Checks the parameters. Creates nothing.
    pub fn new(config: &Config) -> Result<Self, Error> {
        let endpoint = config.endpoint.to_str().ok_or_else(|| Error::NoText {
            path: config.endpoint.clone(),
        })?;
        let file = format!("{}@reg.sock", config.driver);
        let socket = config.kubelet.join(REGISTRY).join(file);
        Socket::check_path(&socket)?;
        Ok(Self {
            driver: config.driver,
            endpoint: endpoint.to_owned(),
            socket,
            cluster: config.cluster.clone(),
            registered: watch::Sender::new(false),
        })
    }

    /// Whether kubelet has registered the driver since the socket was last made.
    #[must_use]
    pub fn registered(&self) -> watch::Receiver<bool> {
        self.registered.subscribe()
    }

    /// Keeps the driver registered until the drain begins; then the socket's file is gone.
    pub async fn keep(self, drain: &Drain) {
        let socket = self.socket.display();
        let mut pauses = Pauses::default();
        loop {
            let end = self.offer(&mut pauses, drain).await;
            self.registered.send_replace(false);
            let is_away = matches!(end, End::Away);
            let pause = match end {
                End::Withdrawn => break,
                // `heard` has logged it and waited.
                End::Refused => Duration::ZERO,
                End::Vanished => {
                    let pause = pauses.after_vanishing();
                    tracing::info!(%socket, ?pause,
                        "the registration socket is gone (kubelet removes it when it restarts); \
                         creating it again");
                    pause
                }
                End::Away => pauses.next_away(),
                End::Failed(error) => {
                    let pause = pauses.next();
                    tracing::error!(%socket, error, ?pause,
                        "not registered with kubelet; retrying");
                    pause
                }
            };
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = self.answers(), if is_away => {
                    tracing::info!("the API server answers: offering the driver to kubelet again");
                    pauses.start_over();
                }
                () = drain.begun() => break,
            }
        }
        tracing::info!(%socket, "registration withdrawn");
    }

    /// Makes the socket and serves it until it must be remade or the driver stops. Then removes it.
    async fn offer(&self, pauses: &mut Pauses, drain: &Drain) -> End {
        let bound = tokio::select! {
            bound = self.bind() => bound,
            () = drain.begun() => return End::Withdrawn,
        };
        let (socket, watch) = match bound {
            Ok(bound) => bound,
            Err(error) => return End::Failed(error.to_string()),
        };
        let (said, told) = mpsc::unbounded_channel();
        let place = socket.place();
        let service = service::Service::new(self.driver, self.endpoint.clone(), said);
        let routes = Routes::new().with(RegistrationServer::new(service));
        let trace = Trace::new(new_span, &[]);
        let offer = Drain::new(Duration::ZERO);
        let served = server::serve(socket, routes, trace, offer.clone());
        tokio::pin!(served);
        tracing::info!(socket = %self.socket.display(), endpoint = self.endpoint,
            "offered to kubelet");
        let end = tokio::select! {
            // Handle kubelet's answer before anything that came after it.
            biased;
            end = self.heard(told, pauses) => end,
            ended = &mut served => {
                let why = ended.err().map_or("it ended".to_owned(), |error| error.to_string());
                return End::Failed(why);
            }
            () = vanished(&place, watch.as_ref()) => End::Vanished,
            () = drain.begun() => End::Withdrawn,
        };
        offer.close();
        if let Err(error) = served.await {
            tracing::debug!(%error, "the registration socket failed");
        }
        end
    }

    /// Handles kubelet's answers until the socket must be made again.
    async fn heard(&self, mut told: mpsc::UnboundedReceiver<Answer>, pauses: &mut Pauses) -> End {
        let mut renew_at = None;
        loop {
            tokio::select! {
                biased;
                Some(word) = told.recv() => match word {
                    Answer::Registered => {
                        tracing::info!(driver = self.driver, "registered with kubelet");
                        self.registered.send_replace(true);
                        pauses.reset();
                        renew_at = None;
                    }
                    Answer::Refused(why) => {
                        self.registered.send_replace(false);
                        if self.is_away() {
                            pauses.say_away(self.driver, &why);
                            tokio::time::sleep(TO_ANSWER).await;
                            return End::Away;
                        }
                        let pause = pauses.next();
                        tracing::error!(driver = self.driver, error = why, ?pause,
                            "kubelet did not register the driver; offering it again");
                        renew_at = Some(Instant::now() + pause);
                    }
                },
                () = at(renew_at) => return End::Refused,
            }
        }
    }

    /// Whether the API server is known not to answer. A refusal is an answer.
    fn is_away(&self) -> bool {
        // Without a sender, no watch over pods runs: the pool cannot be opened.
        self.cluster
            .as_ref()
            .is_some_and(|cluster| cluster.has_changed().is_ok() && !*cluster.borrow())
    }

    /// Returns when the API server answers.
    async fn answers(&self) {
        if let Some(mut cluster) = self.cluster.clone()
            && cluster.wait_for(|answers| *answers).await.is_ok()
        {
            return;
        }
        // The watch over pods has ended.
        std::future::pending::<()>().await;
    }

    /// The socket, and a watch on its directory that began before the socket was made.
    async fn bind(&self) -> Result<(Socket, Option<DirWatch>), server::Error> {
        let directory = self.socket.parent().unwrap_or(Path::new("/")).to_owned();
        let watch = sys::apart("socket", async move {
            // Kubelet creates it with this mode too, and may start later. If this fails, opening it
            // gives the better error.
            let _ = rustix::fs::mkdir(&directory, Mode::from(0o755));
            let dir = Dir::open(&directory)?;
            DirWatch::new(std::os::fd::AsFd::as_fd(&dir))
        });
        let watch = watch
            .await
            .and_then(|watch| watch.map_err(std::io::Error::other));
        let watch = watch.inspect_err(|error| {
            tracing::warn!(%error, every = ?LOOK,
                "the registration directory cannot be watched; polling it");
        });
        Ok((Socket::bind(&self.socket).await?, watch.ok()))
    }
}

/// Returns when the socket has lost its name.
async fn vanished(place: &SocketPlace, watch: Option<&DirWatch>) {
    while place.is_held().await {
        let Some(watch) = watch else {
            tokio::time::sleep(LOOK).await;
            continue;
        };
        if watch.changed().await.is_err() {
            tokio::time::sleep(LOOK).await;
        }
    }
}

/// Returns at this moment, or never.
async fn at(moment: Option<Instant>) {
    match moment {
        Some(moment) => tokio::time::sleep_until(moment).await,
        None => std::future::pending().await,
    }
}

/// The pauses, which grow with the failures in a row.
#[derive(Debug, Default)]
struct Pauses {
    in_a_row: u32,
    /// The socket disappeared before kubelet registered the driver.
    vanished: bool,
    /// The failures in a row while the API server is away.
    away_in_a_row: u32,
    /// Whether the log reports that the API server is away.
    away_said: bool,
}

impl Pauses {
    fn next(&mut self) -> Duration {
        let pause = FIRST_PAUSE.saturating_mul(1 << self.in_a_row.min(16));
        self.in_a_row += 1;
        pause.min(LAST_PAUSE)
    }

    fn next_away(&mut self) -> Duration {
        let pause = FIRST_PAUSE_AWAY.saturating_mul(1 << (2 * self.away_in_a_row.min(8)));
        self.away_in_a_row += 1;
        pause.min(LAST_PAUSE_AWAY)
    }

    /// Logs it once and not as an error: at boot the driver's pod may start before the API server.
    fn say_away(&mut self, driver: &str, why: &str) {
        if std::mem::replace(&mut self.away_said, true) {
            tracing::debug!(
                driver,
                error = why,
                "kubelet still does not register the driver"
            );
        } else {
            tracing::warn!(
                driver,
                error = why,
                "kubelet did not register the driver: registration needs the API server, which does \
                 not answer; the driver is offered again when that server is back"
            );
        }
    }

    /// The cause of kubelet's refusals is over.
    fn start_over(&mut self) {
        (self.in_a_row, self.away_in_a_row) = (0, 0);
    }

    /// At once, but with a growing pause if it happens repeatedly.
    fn after_vanishing(&mut self) -> Duration {
        if std::mem::replace(&mut self.vanished, true) {
            self.next()
        } else {
            Duration::ZERO
        }
    }

    fn reset(&mut self) {
        *self = Self::default();
    }
}

fn new_span(method: &str) -> tracing::Span {
    tracing::error_span!("rpc", registration.method = method)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pauses_grow_to_a_minute_and_start_over_after_success() {
        let mut pauses = Pauses::default();
        let seconds: Vec<u64> = (0..8).map(|_| pauses.next().as_secs()).collect();
        assert_eq!(seconds, [1, 2, 4, 8, 16, 32, 60, 60]);
        pauses.reset();
        assert_eq!(pauses.after_vanishing(), Duration::ZERO);
        assert_eq!(pauses.after_vanishing(), FIRST_PAUSE);
        pauses.reset();
        assert_eq!(pauses.after_vanishing(), Duration::ZERO);
        pauses.reset();
        let seconds: Vec<u64> = (0..40).map(|_| pauses.next_away().as_secs()).collect();
        assert_eq!(
            (&seconds[..5], seconds[39]),
            (&[15, 60, 240, 300, 300][..], 300)
        );
        for longer in [1, 2] {
            assert_eq!(pauses.next(), FIRST_PAUSE * longer);
        }
        pauses.start_over();
        assert_eq!(pauses.next(), FIRST_PAUSE);
        assert_eq!(pauses.next_away(), FIRST_PAUSE_AWAY);
    }

    #[test]
    fn an_api_server_that_is_not_watched_is_not_away() {
        let (watch, cluster) = watch::channel(false);
        let registration = Registration::new(&Config {
            kubelet: "/var/lib/kubelet".into(),
            driver: "driver.example",
            endpoint: "/csi.sock".into(),
            cluster: Some(cluster),
        });
        let registration = registration.expect("all is well");
        assert!(registration.is_away());
        watch.send_replace(true);
        assert!(!registration.is_away());
        watch.send_replace(false);
        drop(watch);
        assert!(!registration.is_away());
    }

    #[test]
    fn the_path_of_the_socket_passes_for_a_host_as_kubelet_writes_it() {
        use tonic::codegen::http::uri::Authority;
        let registration = Registration::new(&Config {
            kubelet: "/var/lib/kubelet".into(),
            driver: "driver.example",
            endpoint: "/csi.sock".into(),
            cluster: None,
        });
        let path = registration.expect("all is well").socket;
        let host = path.to_str().expect("text").replace('/', "%2F");
        Authority::try_from(host.as_str()).expect("a host");
        Authority::try_from(host.replace('@', "-")).expect_err("what the @ is for");
    }

    #[test]
    fn what_kubelet_could_never_call_is_refused_before_the_start() {
        use std::os::unix::ffi::OsStrExt as _;
        let config = |kubelet: &str, endpoint: &[u8]| Config {
            kubelet: kubelet.into(),
            driver: "driver.example",
            endpoint: std::ffi::OsStr::from_bytes(endpoint).into(),
            cluster: None,
        };
        let registration = Registration::new(&config("/var/lib/kubelet", b"/csi.sock"));
        let registration = registration.expect("all is well");
        assert_eq!(
            registration.socket,
            Path::new("/var/lib/kubelet/plugins_registry/driver.example@reg.sock")
        );
        assert!(!*registration.registered().borrow());
        let error = Registration::new(&config("/k", b"/\xff")).expect_err("no text");
        assert!(matches!(error, Error::NoText { .. }), "{error}");
        let long = format!("/{}", "k".repeat(80));
        let error = Registration::new(&config(&long, b"/csi.sock")).expect_err("too long");
        assert!(
            error.to_string().contains("choose a shorter one"),
            "{error}"
        );
        let error = Registration::new(&config("kubelet", b"/csi.sock")).expect_err("relative");
        assert!(error.to_string().contains("must be absolute"), "{error}");
    }
}
