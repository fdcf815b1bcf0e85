//! A fake API server: pods and events, lists and watches, and the ways in which a server fails.
//!
//! It answers only the driver's requests, and validates events as the real server does. It keeps a
//! history, so a watch can resume, or gets "too old resource version". A test with a whole cluster
//! uses the real server; this one shows failures that the real one rarely does.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

const TOKEN: &str = "the-driver";
/// The resource version of the initial state.
const FIRST: u64 = 100;

/// The server's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mood {
    Serving,
    /// Not listening: every connection is closed.
    Away,
    /// It accepts connections and never answers.
    Silent,
    /// Like `Silent`, for open and new connections alike. Open ones stay silent even in a later
    /// mood: the server lost its power, and its clients get no reset.
    Dead,
    /// It denies every request (403).
    Forbidding,
    /// It is overloaded (429).
    Busy,
}

/// The answer to a watch request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Watches {
    Served,
    /// This status and body, as from a proxy.
    Refused(u16, String),
    /// Accepted, then closed before the first event.
    Cut,
}

impl Watches {
    /// The API server's own refusal.
    pub fn forbidden() -> Self {
        let (code, status) = refusal(403, "Forbidden", "pods may not be watched");
        Self::Refused(code, status.to_string())
    }
}

#[derive(Debug)]
struct State {
    version: u64,
    /// The history up to this version is gone.
    forgotten: u64,
    pods: BTreeMap<(String, String), Value>,
    history: Vec<(u64, Value)>,
    /// Each with the version that it starts from.
    watchers: Vec<(u64, mpsc::UnboundedSender<Value>)>,
    /// Watches stay open and get no events.
    deaf: bool,
    watches: Watches,
    /// The delay of an answer to a request by name.
    asking_takes: Duration,
    /// The delay of the events between a watch's start version and the present.
    catching_up_takes: Duration,
    events: BTreeMap<String, Value>,
    /// The status that answers every event instead.
    events_refused: Option<u16>,
    requests: Vec<String>,
    /// How often it lost its power.
    deaths: usize,
    turned_away: usize,
}

/// The fake server; it stops when it is dropped.
#[derive(Debug)]
pub struct Api {
    state: Arc<Mutex<State>>,
    mood: watch::Sender<Mood>,
    port: u16,
    served: JoinHandle<()>,
}

impl Drop for Api {
    fn drop(&mut self) {
        self.served.abort();
        self.mood.send_replace(Mood::Away);
    }
}

impl Api {
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let state = Arc::new(Mutex::new(State {
            version: FIRST,
            forgotten: 0,
            pods: BTreeMap::new(),
            history: Vec::new(),
            watchers: Vec::new(),
            deaf: false,
            watches: Watches::Served,
            asking_takes: Duration::ZERO,
            catching_up_takes: Duration::ZERO,
            events: BTreeMap::new(),
            events_refused: None,
            requests: Vec::new(),
            deaths: 0,
            turned_away: 0,
        }));
        let mood = watch::Sender::new(Mood::Serving);
        let (served_state, served_mood) = (state.clone(), mood.clone());
        let served = tokio::spawn(async move {
            loop {
                let (connection, _) = listener.accept().await.expect("a connection");
                let (state, mut mood) = (served_state.clone(), served_mood.subscribe());
                tokio::spawn(async move {
                    let now = *mood.borrow_and_update();
                    let deaths = state.lock().deaths;
                    let serving = std::pin::pin!(serve(connection, state.clone(), now));
                    tokio::select! {
                        biased;
                        // A change of mood may close all connections.
                        _ = mood.changed() => {}
                        () = serving => return,
                    }
                    if now == Mood::Dead || state.lock().deaths > deaths {
                        std::future::pending::<()>().await;
                    }
                });
            }
        });
        Self {
            state,
            mood,
            port,
            served,
        }
    }

    /// A kubeconfig for it.
    pub fn kubeconfig(&self, dir: &Path) -> PathBuf {
        let path = dir.join("kubeconfig");
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": {"server": format!("http://127.0.0.1:{}", self.port)}}],
            "users": [{"name": "u", "user": {"token": TOKEN}}],
        });
        std::fs::write(&path, config.to_string()).expect("write a kubeconfig");
        path
    }

    pub fn be(&self, mood: Mood) {
        self.state.lock().deaths += usize::from(mood == Mood::Dead);
        self.mood.send_replace(mood);
        if mood != Mood::Serving {
            self.state.lock().watchers.clear();
        }
    }

    /// Closes every running watch without an error event.
    pub fn cut(&self) {
        self.state.lock().watchers.clear();
    }

    /// Forgets the history: no watch can resume.
    pub fn forget_history(&self) {
        let mut state = self.state.lock();
        state.version += 1;
        state.forgotten = state.version;
        state.history.clear();
    }

    /// Restores the initial state: no pods, and no later versions.
    pub fn be_restored(&self) {
        let mut state = self.state.lock();
        state.version = FIRST;
        state.forgotten = 0;
        state.pods.clear();
        state.history.clear();
    }

    /// Sends no more events, to running watches either.
    pub fn go_deaf(&self) {
        self.state.lock().deaf = true;
    }

    /// Sets the answer to new watches; running ones are closed if no more are served.
    pub fn answer_watches(&self, watches: Watches) {
        let mut state = self.state.lock();
        if watches != Watches::Served {
            state.watchers.clear();
        }
        state.watches = watches;
    }

    pub fn be_slow(&self, asking_takes: Duration, catching_up_takes: Duration) {
        let mut state = self.state.lock();
        state.asking_takes = asking_takes;
        state.catching_up_takes = catching_up_takes;
    }

    pub fn refuse_events(&self, code: Option<u16>) {
        self.state.lock().events_refused = code;
    }

    /// Creates or changes a pod.
    pub fn put(&self, pod: &Pod) {
        let mut state = self.state.lock();
        let key = pod.key();
        let kind = if state.pods.contains_key(&key) {
            "MODIFIED"
        } else {
            "ADDED"
        };
        let object = state.happen(kind, pod.0.clone());
        state.pods.insert(key, object);
    }

    /// Deletes a pod from the API.
    pub fn remove(&self, pod: &Pod) {
        let mut state = self.state.lock();
        let object = state.pods.remove(&pod.key()).expect("the pod exists");
        state.happen("DELETED", object);
    }

    /// A pod's events: type, reason, text, count.
    pub fn events(&self, pod: &str) -> Vec<(String, String, String, u64)> {
        let state = self.state.lock();
        let of_pod = state
            .events
            .values()
            .filter(|event| event["regarding"]["name"] == pod);
        let text = |value: &Value| value.as_str().expect("text").to_owned();
        let mut events: Vec<_> = of_pod
            .map(|event| {
                let count = event["series"]["count"].as_u64().unwrap_or(1);
                let at = text(&event["eventTime"]);
                (
                    at,
                    text(&event["type"]),
                    text(&event["reason"]),
                    text(&event["note"]),
                    count,
                )
            })
            .collect();
        events.sort();
        events
            .into_iter()
            .map(|(_, kind, reason, note, count)| (kind, reason, note, count))
            .collect()
    }

    /// The number of requests that began like this.
    pub fn asked(&self, beginning: &str) -> usize {
        let state = self.state.lock();
        state
            .requests
            .iter()
            .filter(|request| request.starts_with(beginning))
            .count()
    }

    /// The number of connections while it was away or dead.
    pub fn turned_away(&self) -> usize {
        self.state.lock().turned_away
    }

    /// The number of running watches.
    pub fn watches(&self) -> usize {
        let mut state = self.state.lock();
        state.watchers.retain(|(_, watcher)| !watcher.is_closed());
        state.watchers.len()
    }
}

impl State {
    fn happen(&mut self, kind: &str, mut object: Value) -> Value {
        self.version += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        let event = json!({"type": kind, "object": object});
        self.history.push((self.version, event.clone()));
        if !self.deaf {
            let now = self.version;
            self.watchers
                .retain(|(from, watcher)| now <= *from || watcher.send(event.clone()).is_ok());
        }
        object
    }
}

/// A pod's object, built step by step. Its uid is its name.
#[derive(Debug, Clone)]
pub struct Pod(pub Value);

impl Pod {
    pub fn new(name: &str) -> Self {
        Self(json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name, "namespace": "ci", "uid": name, "annotations": {}},
            "spec": {"nodeName": "here", "restartPolicy": "Never", "containers": [{"name": "main", "image": "x"}]},
            "status": {"phase": "Pending"},
        }))
    }

    fn key(&self) -> (String, String) {
        let text = |value: &Value| value.as_str().expect("text").to_owned();
        (
            text(&self.0["metadata"]["namespace"]),
            text(&self.0["metadata"]["name"]),
        )
    }

    #[must_use]
    pub fn annotated(mut self, key: &str, value: &str) -> Self {
        self.0["metadata"]["annotations"][format!("baggageclaim.concourse-ci.org/{key}")] =
            json!(value);
        self
    }

    #[must_use]
    pub fn phase(mut self, phase: &str) -> Self {
        self.0["status"]["phase"] = json!(phase);
        self
    }

    /// Its container terminated, this many seconds after 10:01.
    #[must_use]
    pub fn exited(mut self, container: &str, code: i32, second: u32) -> Self {
        let finished = format!("2026-01-01T10:01:{second:02}Z");
        self.0["status"]["containerStatuses"] = json!([{"name": container, "state":
            {"terminated": {"exitCode": code, "finishedAt": finished, "reason": if code == 0 { "Completed" } else { "Error" }}}}]);
        self
    }

    /// It was deleted, this many seconds after 10:01, with a grace period of 30 seconds.
    #[must_use]
    pub fn deleted(mut self, second: u32) -> Self {
        let until = format!(
            "2026-01-01T10:{:02}:{:02}Z",
            1 + (second + 30) / 60,
            (second + 30) % 60
        );
        self.0["metadata"]["deletionTimestamp"] = json!(until);
        self.0["metadata"]["deletionGracePeriodSeconds"] = json!(30);
        self
    }

    /// Kubelet evicted it, and only the condition says so.
    #[must_use]
    pub fn evicted(mut self) -> Self {
        self.0["status"]["conditions"] = json!([{"type": "DisruptionTarget", "status": "True",
            "reason": "TerminationByKubelet", "lastTransitionTime": "2026-01-01T10:02:00Z"}]);
        self
    }

    #[must_use]
    pub fn succeeded(self) -> Self {
        self.exited("main", 0, 10).phase("Succeeded")
    }

    #[must_use]
    pub fn failed(self, code: i32) -> Self {
        self.exited("main", code, 10).phase("Failed")
    }
}

struct Request {
    method: String,
    path: String,
    query: HashMap<String, String>,
    body: Value,
    authorized: bool,
}

async fn read(connection: &mut TcpStream) -> Option<Request> {
    let mut bytes = Vec::new();
    let head = loop {
        if let Some(end) = bytes.windows(4).position(|four| four == b"\r\n\r\n") {
            break end;
        }
        if connection.read_buf(&mut bytes).await.ok()? == 0 {
            return None;
        }
    };
    let text = String::from_utf8(bytes[..head].to_vec()).expect("a head of text");
    let mut lines = text.lines();
    let mut words = lines.next()?.split(' ').map(str::to_owned);
    let (method, target) = (words.next()?, words.next()?);
    let headers: HashMap<String, String> = lines
        .filter_map(|line| line.split_once(':'))
        .map(|(name, value)| (name.to_lowercase(), value.trim().to_owned()))
        .collect();
    let length: usize = headers
        .get("content-length")
        .map_or(0, |length| length.parse().expect("a length"));
    while bytes.len() < head + 4 + length {
        if connection.read_buf(&mut bytes).await.ok()? == 0 {
            return None;
        }
    }
    let body = serde_json::from_slice(&bytes[head + 4..]).unwrap_or(Value::Null);
    let (path, query) = target.split_once('?').unwrap_or((&target, ""));
    let query = query.split('&').filter_map(|pair| pair.split_once('='));
    let query = query.map(|(key, value)| (key.to_owned(), value.replace("%3D", "=")));
    Some(Request {
        method,
        path: path.to_owned(),
        query: query.collect(),
        body,
        authorized: headers
            .get("authorization")
            .is_some_and(|value| value == &format!("Bearer {TOKEN}")),
    })
}

async fn serve(mut connection: TcpStream, state: Arc<Mutex<State>>, mood: Mood) {
    match mood {
        Mood::Away => {
            state.lock().turned_away += 1;
            return;
        }
        Mood::Silent => std::future::pending().await,
        Mood::Dead => {
            state.lock().turned_away += 1;
            std::future::pending::<()>().await;
        }
        Mood::Serving | Mood::Forbidding | Mood::Busy => {}
    }
    let Some(request) = read(&mut connection).await else {
        return;
    };
    state
        .lock()
        .requests
        .push(format!("{} {}", request.method, request.path));
    let (code, answer) = if !request.authorized {
        refusal(401, "Unauthorized", "who are you?")
    } else if mood == Mood::Forbidding {
        refusal(403, "Forbidden", "nothing is allowed to the driver")
    } else if mood == Mood::Busy {
        refusal(429, "TooManyRequests", "there is too much to do")
    } else if request.query.contains_key("watch") {
        return serve_watch(&mut connection, &request, &state).await;
    } else {
        if request.path.starts_with("/api/v1/namespaces/ci/") {
            let takes = state.lock().asking_takes;
            tokio::time::sleep(takes).await;
        }
        answer(&request, &state)
    };
    say(
        &mut connection,
        code,
        "application/json",
        &answer.to_string(),
    )
    .await;
}

async fn say(connection: &mut TcpStream, code: u16, kind: &str, body: &str) {
    let head = format!(
        "HTTP/1.1 {code} X\r\ncontent-type: {kind}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
        body.len()
    );
    let _ = connection.write_all((head + body).as_bytes()).await;
    let _ = connection.shutdown().await;
}

fn refusal(code: u16, reason: &str, message: &str) -> (u16, Value) {
    (
        code,
        json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "reason": reason, "message": message, "code": code}),
    )
}

#[expect(clippy::too_many_lines, reason = "one entry for each case")]
fn answer(request: &Request, state: &Mutex<State>) -> (u16, Value) {
    let parts: Vec<&str> = request.path.trim_matches('/').split('/').collect();
    let mut state = state.lock();
    match (request.method.as_str(), parts.as_slice()) {
        ("GET", ["api", "v1", "pods"]) => {
            assert_eq!(
                request.query["fieldSelector"], "spec.nodeName=here",
                "only this node's pods"
            );
            // A pod has up to 1.5 MiB, and clients hold a page several times.
            let limit = &request.query["limit"];
            let limit: usize = limit.parse().expect("a number");
            assert!(limit <= 25, "a page of {limit} pods");
            // A token holds the list's version and how many pods were sent.
            let token = request.query.get("continue");
            let token = token.and_then(|token| token.split_once('.'));
            let version = token.map_or(state.version.to_string(), |it| it.0.to_owned());
            let sent: usize = token.map_or(0, |it| it.1.parse().expect("a number"));
            let pods = state.pods.values();
            let mut items = pods
                .filter(|pod| pod["spec"]["nodeName"] == "here")
                .skip(sent);
            let page: Vec<&Value> = items.by_ref().take(limit).collect();
            let more = items.next().map(|_| format!("{version}.{}", sent + limit));
            (
                200,
                json!({"kind": "PodList", "apiVersion": "v1", "items": page,
                "metadata": {"resourceVersion": version, "continue": more}}),
            )
        }
        // A list for an impossible name: the driver only wants the resource version.
        ("GET", ["api", "v1", "namespaces", "default", "pods"]) => {
            assert_eq!(request.query["fieldSelector"], "metadata.name=none");
            (
                200,
                json!({"kind": "PodList", "apiVersion": "v1",
                "metadata": {"resourceVersion": state.version.to_string()}, "items": []}),
            )
        }
        ("GET", ["api", "v1", "namespaces", namespace, "pods", name]) => {
            let key = ((*namespace).to_owned(), (*name).to_owned());
            match state.pods.get(&key) {
                Some(pod) => (200, pod.clone()),
                None => refusal(404, "NotFound", &format!("pods {name:?} not found")),
            }
        }
        (
            "POST",
            [
                "apis",
                "events.k8s.io",
                "v1",
                "namespaces",
                namespace,
                "events",
            ],
        ) => {
            if let Some(code) = state.events_refused {
                return refusal(code, "Refused", "events are refused");
            }
            let event = &request.body;
            if let Some(wrong) = wrong_with(event, namespace) {
                return refusal(422, "Invalid", &wrong);
            }
            let name = event["metadata"]["name"]
                .as_str()
                .expect("checked")
                .to_owned();
            state.events.insert(name, event.clone());
            (201, event.clone())
        }
        (
            "PATCH",
            [
                "apis",
                "events.k8s.io",
                "v1",
                "namespaces",
                _,
                "events",
                name,
            ],
        ) => {
            let Some(event) = state.events.get_mut(*name) else {
                return refusal(404, "NotFound", "no such event");
            };
            let mut patched = request.body.clone();
            let series = patched["series"].take();
            for (key, value) in patched.as_object().expect("an object") {
                if key != "series" && key != "metadata" && event[key] != *value {
                    return refusal(422, "Invalid", &format!("{key} is immutable"));
                }
            }
            event["series"] = series;
            (200, event.clone())
        }
        _ => refusal(
            403,
            "Forbidden",
            &format!(
                "{} {} is not allowed to the driver",
                request.method, request.path
            ),
        ),
    }
}

/// Why the real server would reject the event.
fn wrong_with(event: &Value, namespace: &str) -> Option<String> {
    for field in [
        "action",
        "reason",
        "reportingController",
        "reportingInstance",
        "eventTime",
        "note",
        "type",
    ] {
        if event[field].as_str().is_none_or(str::is_empty) {
            return Some(format!("{field} is required"));
        }
    }
    let length = |field: &str| event[field].as_str().map_or(0, str::len);
    if length("note") > 1024
        || length("action") > 128
        || length("reason") > 128
        || length("reportingInstance") > 128
    {
        return Some("something is too long".to_owned());
    }
    let regarding = &event["regarding"];
    let is_whole = ["name", "uid"]
        .iter()
        .all(|field| regarding[*field].is_string());
    if regarding["namespace"] != namespace || regarding["kind"] != "Pod" || !is_whole {
        return Some("regarding is not the pod".to_owned());
    }
    event["metadata"]["name"]
        .as_str()
        .is_none()
        .then(|| "metadata.name is required".to_owned())
}

async fn serve_watch(connection: &mut TcpStream, request: &Request, state: &Mutex<State>) {
    let from: u64 = request.query["resourceVersion"].parse().expect("a version");
    let watches = state.lock().watches.clone();
    if let Watches::Refused(code, words) = watches {
        return say(connection, code, "text/plain", &words).await;
    }
    let head =
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n";
    if connection.write_all(head.as_bytes()).await.is_err() {
        return;
    }
    if watches == Watches::Cut {
        let _ = connection.write_all(b"0\r\n\r\n").await;
        return;
    }
    let takes = state.lock().catching_up_takes;
    tokio::time::sleep(takes).await;
    let (sender, mut happening) = mpsc::unbounded_channel();
    {
        let mut state = state.lock();
        if from < state.forgotten {
            let (_, gone) = refusal(410, "Expired", "too old resource version");
            let _ = sender.send(json!({"type": "ERROR", "object": gone}));
        } else {
            for (_, event) in state.history.iter().filter(|(version, _)| *version > from) {
                let _ = sender.send(event.clone());
            }
            state.watchers.push((from, sender.clone()));
        }
    }
    drop(sender);
    let seconds = request.query["timeoutSeconds"].parse();
    let over = tokio::time::sleep(Duration::from_secs(seconds.expect("a number")));
    let mut over = std::pin::pin!(over);
    loop {
        let event = tokio::select! {
            event = happening.recv() => event,
            () = &mut over => {
                let _ = connection.write_all(b"0\r\n\r\n").await;
                return;
            }
        };
        let Some(event) = event else { return };
        let line = format!("{event}\n").into_bytes();
        // A chunk is not a line: long lines come in several chunks.
        for part in line.chunks(line.len() / 2 + 1) {
            let head = format!("{:x}\r\n", part.len());
            let chunk = [head.as_bytes(), part, b"\r\n"].concat();
            if connection.write_all(&chunk).await.is_err() {
                return;
            }
            let _ = connection.flush().await;
        }
    }
}
