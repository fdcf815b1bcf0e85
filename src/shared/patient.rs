//! `Retry-After` of a storage that asks for fewer requests (answers 429 and 503; RFC 9110, section
//! 10.2.3). The crate repeats such a request after a pause of its own, so this client, around the
//! crate's, holds requests back until the time that the storage asked for.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use hyper::{HeaderMap, Response, StatusCode};
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpRequest, HttpResponse, HttpService, ReqwestConnector,
};
use object_store::{ClientOptions, Result};
use parking_lot::Mutex;
use tokio::time::Instant;

/// A request waits for so long. One that would wait longer fails at once, as if the storage had
/// refused it again: its caller has other things to do meanwhile. The client may begin its last
/// attempt 20 s after the first, and [`super::Times`] ends the request after 30 s.
pub(super) const WAITS: Duration = Duration::from_secs(8);
/// The longest pause that is believed.
const LONGEST: Duration = Duration::from_mins(2);

/// Makes such clients. Those of one `Patient` wait together.
#[derive(Debug, Clone, Default)]
pub(super) struct Patient(Pause);

/// No request is sent before this time. `None`: the storage has asked for no pause.
type Pause = Arc<Mutex<Option<Instant>>>;

impl HttpConnector for Patient {
    fn connect(&self, options: &ClientOptions) -> Result<HttpClient> {
        Ok(HttpClient::new(Client {
            inner: ReqwestConnector::default().connect(options)?,
            pause: Arc::clone(&self.0),
        }))
    }
}

#[derive(Debug)]
struct Client {
    inner: HttpClient,
    pause: Pause,
}

/// How long the storage asks to wait, if it gives a number of seconds.
fn asked(headers: &HeaderMap) -> Option<Duration> {
    let seconds = headers.get("retry-after")?.to_str().ok()?;
    let seconds = seconds.trim().parse().ok()?;
    Some(Duration::from_secs(seconds).min(LONGEST))
}

#[async_trait]
impl HttpService for Client {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let pause = *self.pause.lock();
        if let Some(until) = pause {
            if until > Instant::now() + WAITS {
                let mut busy = Response::new("<Code>SlowDown</Code>".to_owned().into());
                *busy.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
                return Ok(busy);
            }
            tokio::time::sleep_until(until).await;
        }
        let response = self.inner.execute(request).await?;
        let is_busy = matches!(
            response.status(),
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE
        );
        if let Some(seconds) = asked(response.headers()).filter(|_| is_busy) {
            let mut pause = self.pause.lock();
            *pause = (*pause).max(Some(Instant::now() + seconds));
        }
        Ok(response)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use hyper::Request;

    use super::*;

    /// Gives these answers, each with its `Retry-After`. Notes when it was asked.
    #[derive(Debug)]
    struct Busy {
        answers: Mutex<VecDeque<(u16, &'static str)>>,
        asked: Arc<Mutex<Vec<Instant>>>,
    }

    #[async_trait]
    impl HttpService for Busy {
        async fn call(&self, _: HttpRequest) -> Result<HttpResponse, HttpError> {
            self.asked.lock().push(Instant::now());
            let (status, after) = self.answers.lock().pop_front().expect("an answer");
            let response = Response::builder().status(status);
            let response = response.header("Retry-After", after);
            Ok(response.body(String::new().into()).expect("a response"))
        }
    }

    #[test]
    fn requests_wait_as_long_as_the_storage_asks_and_fail_at_once_if_that_is_too_long() {
        let answers = [
            (429, "1"),
            (200, "9"),
            (500, "9"),
            (503, "soon"),
            (503, "99999"),
        ];
        let asked = Arc::new(Mutex::new(Vec::new()));
        let busy = Busy {
            answers: Mutex::new(answers.into()),
            asked: Arc::clone(&asked),
        };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .expect("a runtime");
        runtime.block_on(async {
            let client = Client {
                inner: HttpClient::new(busy),
                pause: Pause::default(),
            };
            let request = || Request::new(String::new().into());
            for (status, _) in answers {
                let response = client.call(request()).await.expect("an answer");
                assert_eq!(response.status(), status);
            }
            let times = asked.lock().clone();
            let pauses: Vec<Duration> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
            let second = Duration::from_secs(1);
            assert!(pauses[0] >= second, "{pauses:?}");
            assert!(pauses[1..].iter().all(|it| *it < second), "{pauses:?}");
            let response = client.call(request()).await.expect("an answer");
            assert_eq!(response.status(), 503);
            assert_eq!(asked.lock().len(), answers.len(), "it was not sent");
            let until = client
                .pause
                .lock()
                .expect("the storage has asked for a pause");
            assert!(until > Instant::now() + WAITS && until <= Instant::now() + LONGEST);
        });
    }
}
