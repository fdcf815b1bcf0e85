//! Registration with kubelet by the driver itself, through a socket in `plugins_registry/`.
//! This module knows kubelet's protocol and nothing of CSI; the caller passes in what is registered.
//!
//! Kubelet watches that directory. It asks a new socket for name and endpoint, calls the endpoint, and
//! reports the result to the socket. When the socket goes, kubelet removes the driver from the node. So the
//! driver makes the socket when it can serve, and removes it first when it ends.
//!
//! The name of the socket needs an `@`. Kubelet sends no host name with its call, so its gRPC library uses
//! the path of the socket (`:authority`) and writes `/` as `%2F`. The library here refuses a host with a `%`
//! before our code runs. It takes the text before an `@` for a user, which may have one.
//!
//! - Kubelet refuses the driver: it may be too early, or busy. The socket stays for a while, since kubelet
//!   tries again too. Then the driver makes a new socket, which kubelet notices; later each time.
//! - Kubelet refuses the driver while the API server is away, without which it registers no driver
//!   (`InstallCSIDriver` writes to the CSINode). The driver removes the socket until the API server answers
//!   again. The reason is the back-off of kubelet (1.37). It doubles after each failure, up to two minutes,
//!   is kept by the path of the socket, and ends only with a success, not with a new socket. So for that long
//!   after the API server is back no driver would be registered, and no pod of the node could start.
//! - The file of the socket vanishes: kubelet, or its installer, swept the directory. The driver makes the
//!   socket again. inotify reports it; without a free inotify instance the driver polls.

mod service;

use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::Mode;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use crate::engine;
use crate::proto::pluginregistration::registration_server::RegistrationServer;
use crate::server::{self, Drain, Routes, Socket, SocketPlace, Trace};
use crate::sys::{Dir, DirWatch};

use service::Told;

/// The directory that kubelet watches, in its root directory.
pub const REGISTRY: &str = "plugins_registry";

/// The pause before the driver makes a new socket: doubled each time, from the first to the last.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LAST_PAUSE: Duration = Duration::from_secs(60);
/// The same while the API server is away. Kubelet may reach it all the same, so the driver tries; but
/// seldom, since each failure doubles the back-off of kubelet.
const FIRST_PAUSE_AWAY: Duration = Duration::from_secs(15);
const LAST_PAUSE_AWAY: Duration = Duration::from_secs(300);
/// How long an answer to kubelet may take to be sent before the socket goes.
const TO_ANSWER: Duration = Duration::from_millis(200);
/// How often to look for the file of the socket without inotify.
const LOOK: Duration = Duration::from_secs(10);

/// The settings of a registration.
#[derive(Debug, Clone)]
pub struct Config {
    /// Kubelet's root directory.
    pub kubelet: PathBuf,
    /// The name of the driver, from which the socket has its name.
    pub driver: &'static str,
    /// The socket at which kubelet is to call the driver.
    pub endpoint: PathBuf,
    /// Whether the API server answers, as far as the driver knows; `None` if the driver does not use it.
    pub cluster: Option<watch::Receiver<bool>>,
}

/// Why a driver cannot be registered, independent of kubelet.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Kubelet takes the endpoint as text.
    #[error("the socket path {} is not UTF-8, as registration with kubelet requires; choose another path", path.display())]
    NoText {
        /// The path.
        path: PathBuf,
    },
    /// The registration's socket cannot be made.
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

/// Why an offer ended.
enum End {
    /// The drain began.
    Withdrawn,
    /// The file of the socket is gone or replaced.
    Vanished,
    /// Kubelet refused it, and did not accept it within the pause.
    Refused,
    /// Kubelet refused it while the API server was away.
    Away,
    /// The socket could not be made or served.
    Failed(String),
}

impl Registration {
    /// Checks the configuration. Makes nothing on disk.
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

    /// Whether kubelet has confirmed the registration since the socket was last made.
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
                // It was logged already, and the pause is over.
                End::Refused => Duration::ZERO,
                End::Vanished => {
                    let pause = pauses.after_vanishing();
                    tracing::info!(%socket, ?pause, "the registration socket is gone, as when kubelet restarts; it is made again");
                    pause
                }
                End::Away => pauses.next_away(),
                End::Failed(error) => {
                    let pause = pauses.next();
                    tracing::error!(%socket, error, ?pause, "not registered with kubelet; it is tried again");
                    pause
                }
            };
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = self.answers(), if is_away => {
                    tracing::info!("the API server answers; the driver is offered to kubelet again");
                    pauses.restart();
                }
                () = drain.begun() => break,
            }
        }
        tracing::info!(%socket, "registration withdrawn");
    }

    /// Makes the socket and serves it until a new one is needed or the drain begins. Then its file is gone.
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
        tracing::info!(socket = %self.socket.display(), endpoint = self.endpoint, "offered to kubelet");
        let end = tokio::select! {
            // A report of kubelet comes before anything that happened after it.
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
            tracing::debug!(%error, "the registration's socket ended badly");
        }
        end
    }

    /// Receives what kubelet reports about the offer, until a new socket is needed.
    async fn heard(&self, mut told: mpsc::UnboundedReceiver<Told>, pauses: &mut Pauses) -> End {
        let mut renew_at = None;
        loop {
            tokio::select! {
                biased;
                Some(word) = told.recv() => match word {
                    Told::Registered => {
                        tracing::info!(driver = self.driver, "registered with kubelet");
                        self.registered.send_replace(true);
                        pauses.reset();
                        renew_at = None;
                    }
                    Told::Refused(why) => {
                        self.registered.send_replace(false);
                        if self.is_away() {
                            pauses.say_away(self.driver, &why);
                            tokio::time::sleep(TO_ANSWER).await;
                            return End::Away;
                        }
                        let pause = pauses.next();
                        tracing::error!(driver = self.driver, error = why, ?pause,
                            "kubelet did not register the driver; it is offered again");
                        renew_at = Some(Instant::now() + pause);
                    }
                },
                () = at(renew_at) => return End::Refused,
            }
        }
    }

    /// Whether the API server does not answer, or has not yet. A refusal is an answer.
    fn is_away(&self) -> bool {
        self.cluster
            .as_ref()
            .is_some_and(|cluster| !*cluster.borrow())
    }

    /// Ready when the API server answers.
    async fn answers(&self) {
        if let Some(mut cluster) = self.cluster.clone()
            && cluster.wait_for(|answers| *answers).await.is_ok()
        {
            return;
        }
        // The watch over it has ended.
        std::future::pending::<()>().await;
    }

    /// The socket, and a watch over its directory that began before the socket was made.
    async fn bind(&self) -> Result<(Socket, Option<DirWatch>), server::Error> {
        let directory = self.socket.parent().unwrap_or(Path::new("/")).to_owned();
        let watch = engine::apart("socket", async move {
            // Kubelet makes it too, maybe later. Opening it reports any error better.
            let _ = rustix::fs::mkdir(&directory, Mode::from(0o755));
            let dir = Dir::open(&directory)?;
            DirWatch::new(std::os::fd::AsFd::as_fd(&dir))
        });
        let watch = watch
            .await
            .and_then(|watch| watch.map_err(std::io::Error::other));
        let watch = watch.inspect_err(|error| {
            tracing::warn!(%error, every = ?LOOK, "no inotify watch on the plugin directory; the driver polls it");
        });
        Ok((Socket::bind(&self.socket).await?, watch.ok()))
    }
}

/// Ready when the socket has lost its name.
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

/// Ready at a moment; without one, never.
async fn at(moment: Option<Instant>) {
    match moment {
        Some(moment) => tokio::time::sleep_until(moment).await,
        None => std::future::pending().await,
    }
}

/// The exponential back-off of the offers.
#[derive(Debug, Default)]
struct Pauses {
    in_a_row: u32,
    /// The socket vanished before kubelet had said anything good of it.
    vanished: bool,
    /// The same while the API server is away.
    away_in_a_row: u32,
    /// The log says already that the API server is away.
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

    /// Logs it once, and as no error: the pod of the driver often comes up first.
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
                "kubelet did not register the driver, because it needs the API server, which does not answer here either; \
                 the driver is offered again when that is back"
            );
        }
    }

    /// What kept kubelet from registering is over.
    fn restart(&mut self) {
        (self.in_a_row, self.away_in_a_row) = (0, 0);
    }

    /// At once, unless it vanishes again and again.
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
    fn the_pauses_grow_to_a_minute_and_begin_anew_after_success() {
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
        pauses.restart();
        assert_eq!(pauses.next(), FIRST_PAUSE);
        assert_eq!(pauses.next_away(), FIRST_PAUSE_AWAY);
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
