//! The URL of a tier: where it is, and the options that are no secrets. Credentials come from the
//! crate's own chains (environment, web identity, instance metadata), never from here.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::{BackoffConfig, ClientOptions, ObjectStore, RetryConfig};
use tokio::runtime::Handle;

use super::client::Client;
use super::error::Result;
use super::file;
use super::patient::Patient;
use super::store::{Store, Times};

/// Why a text is no URL of a tier. No message repeats the text, since it may hold a password.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UrlError {
    /// The scheme is unknown.
    #[error("must begin with s3://BUCKET, gs://BUCKET, az://CONTAINER or file:///DIRECTORY")]
    Scheme,
    /// There is no bucket.
    #[error("names no bucket")]
    NoBucket,
    /// There is no directory.
    #[error("must name an absolute directory: file:///DIRECTORY")]
    NoDirectory,
    /// It has a user or a password.
    #[error(
        "must not hold credentials; set them in the environment or use the identity of the machine"
    )]
    Credentials,
    /// An option is unknown.
    #[error(
        "has the unknown option {0:?}; known are endpoint, region, path-style, allow-http and \
         account"
    )]
    Option(String),
    /// An option's value makes no sense.
    #[error("has a value for {0} that is not valid; use {1}")]
    Value(&'static str, &'static str),
    /// A part of the path is no part of a key.
    #[error("has a path with an empty part, `.` or `..`")]
    Path,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scheme {
    S3,
    Gs,
    Az,
    File,
}

/// The URL of a tier, such as `s3://bucket/prefix?region=eu-central-1`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Url {
    scheme: Scheme,
    /// The bucket or container; empty for a directory.
    bucket: String,
    /// The prefix, or the directory.
    path: String,
    endpoint: Option<String>,
    region: Option<String>,
    account: Option<String>,
    path_style: Option<bool>,
    allow_http: bool,
}

impl FromStr for Url {
    type Err = UrlError;

    fn from_str(text: &str) -> Result<Self, UrlError> {
        let (scheme, rest) = text.split_once("://").ok_or(UrlError::Scheme)?;
        let scheme = match scheme {
            "s3" => Scheme::S3,
            "gs" => Scheme::Gs,
            "az" => Scheme::Az,
            "file" => Scheme::File,
            _ => return Err(UrlError::Scheme),
        };
        let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
        if place.contains('@') {
            return Err(UrlError::Credentials);
        }
        let (bucket, path) = place.split_once('/').unwrap_or((place, ""));
        let path = path.trim_end_matches('/');
        let part_is_bad = |part: &str| matches!(part, "" | "." | "..");
        if !path.is_empty() && path.split('/').any(part_is_bad) {
            return Err(UrlError::Path);
        }
        match scheme {
            Scheme::File if !bucket.is_empty() || path.is_empty() => {
                return Err(UrlError::NoDirectory);
            }
            Scheme::S3 | Scheme::Gs | Scheme::Az if bucket.is_empty() => {
                return Err(UrlError::NoBucket);
            }
            _ => {}
        }
        let mut url = Self {
            scheme,
            bucket: bucket.to_owned(),
            path: path.to_owned(),
            endpoint: None,
            region: None,
            account: None,
            path_style: None,
            allow_http: false,
        };
        for option in query.split('&').filter(|option| !option.is_empty()) {
            url.option(option)?;
        }
        Ok(url)
    }
}

impl Url {
    fn option(&mut self, option: &str) -> Result<(), UrlError> {
        const YES_NO: &str = "true or false";
        let (name, value) = option.split_once('=').unwrap_or((option, ""));
        let flag = |name| {
            value
                .parse::<bool>()
                .map_err(|_| UrlError::Value(name, YES_NO))
        };
        match name {
            "endpoint" if value.contains('@') => return Err(UrlError::Credentials),
            "endpoint" if !value.starts_with("http://") && !value.starts_with("https://") => {
                return Err(UrlError::Value(
                    "endpoint",
                    "https://HOST or http://HOST:PORT",
                ));
            }
            "endpoint" => self.endpoint = Some(value.to_owned()),
            "region" => self.region = Some(value.to_owned()),
            "account" => self.account = Some(value.to_owned()),
            "path-style" => self.path_style = Some(flag("path-style")?),
            "allow-http" => self.allow_http = flag("allow-http")?,
            // The value may be a secret that was meant for another place.
            other => {
                let name: String = other.chars().take(40).collect();
                return Err(UrlError::Option(name));
            }
        }
        Ok(())
    }

    /// Opens the tier. Asks nothing of it yet.
    pub fn open(&self, runtime: Handle, times: Times) -> Result<Store> {
        let store = self.open_later(runtime, times);
        store.open()?;
        Ok(store)
    }

    /// The tier, which its first request opens. If that fails, the request does, and the next one
    /// tries again.
    #[must_use]
    pub fn open_later(&self, runtime: Handle, times: Times) -> Store {
        let patient = Patient::default();
        let client = |retry: RetryConfig| {
            let (url, patient) = (self.clone(), patient.clone());
            Client::new(move || url.objects(retry.clone(), patient.clone()))
        };
        let prefix = match self.scheme {
            Scheme::File => "",
            Scheme::S3 | Scheme::Gs | Scheme::Az => &self.path,
        };
        let clients = [client(retry()), client(once())];
        Store::over(clients, prefix, &self.to_string(), runtime, times)
    }

    fn objects(
        &self,
        retry: RetryConfig,
        patient: Patient,
    ) -> object_store::Result<Arc<dyn ObjectStore>> {
        match self.scheme {
            Scheme::File => file::open(&self.directory()),
            Scheme::S3 => self.s3(retry, patient),
            Scheme::Gs => self.gs(retry, patient),
            Scheme::Az => self.az(retry, patient),
        }
    }

    fn directory(&self) -> PathBuf {
        PathBuf::from(format!("/{}", self.path))
    }

    fn client(&self) -> ClientOptions {
        // Another part of the process may have chosen a provider before.
        let _chosen = rustls::crypto::ring::default_provider().install_default();
        ClientOptions::new()
            .with_connect_timeout(Duration::from_secs(5))
            // A transfer may take longer than any limit on all of it, and the client's limit on a
            // read begins before the request's body is sent. `Store` limits each wait.
            .with_timeout_disabled()
            .with_allow_http(self.allow_http)
    }

    fn s3(
        &self,
        retry: RetryConfig,
        patient: Patient,
    ) -> object_store::Result<Arc<dyn ObjectStore>> {
        let mut builder = AmazonS3Builder::from_env()
            .with_bucket_name(&self.bucket)
            .with_client_options(self.client())
            .with_http_connector(patient)
            .with_retry(retry);
        if let Some(endpoint) = &self.endpoint {
            builder = builder.with_endpoint(endpoint);
        }
        if let Some(region) = &self.region {
            builder = builder.with_region(region);
        }
        if let Some(path_style) = self.path_style {
            builder = builder.with_virtual_hosted_style_request(!path_style);
        }
        Ok(Arc::new(builder.build()?))
    }

    fn gs(
        &self,
        retry: RetryConfig,
        patient: Patient,
    ) -> object_store::Result<Arc<dyn ObjectStore>> {
        let builder = GoogleCloudStorageBuilder::from_env()
            .with_bucket_name(&self.bucket)
            .with_client_options(self.client())
            .with_http_connector(patient)
            .with_retry(retry);
        let builder = match &self.endpoint {
            Some(endpoint) => builder.with_base_url(endpoint),
            None => builder,
        };
        Ok(Arc::new(builder.build()?))
    }

    fn az(
        &self,
        retry: RetryConfig,
        patient: Patient,
    ) -> object_store::Result<Arc<dyn ObjectStore>> {
        let mut builder = MicrosoftAzureBuilder::from_env()
            .with_container_name(&self.bucket)
            .with_client_options(self.client())
            .with_http_connector(patient)
            .with_retry(retry);
        if let Some(account) = &self.account {
            builder = builder.with_account(account);
        }
        if let Some(endpoint) = &self.endpoint {
            builder = builder.with_endpoint(endpoint.clone());
        }
        Ok(Arc::new(builder.build()?))
    }
}

/// A request is tried again by the crate, but not for longer than a caller waits for it.
fn retry() -> RetryConfig {
    RetryConfig {
        backoff: BackoffConfig {
            init_backoff: Duration::from_millis(100),
            max_backoff: Duration::from_secs(5),
            base: 2.,
        },
        max_retries: 3,
        retry_timeout: Duration::from_secs(20),
    }
}

/// A request is sent once.
fn once() -> RetryConfig {
    RetryConfig {
        max_retries: 0,
        ..retry()
    }
}

/// Without the options: for messages.
impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = match self.scheme {
            Scheme::S3 => "s3",
            Scheme::Gs => "gs",
            Scheme::Az => "az",
            Scheme::File => "file",
        };
        write!(f, "{scheme}://{}", self.bucket)?;
        if self.path.is_empty() {
            return Ok(());
        }
        write!(f, "/{}", self.path)
    }
}

#[cfg(test)]
mod tests {
    use super::super::error::Error;
    use super::super::patient::WAITS;
    use super::*;

    #[test]
    fn a_storage_that_asks_for_pauses_is_busy_before_it_counts_as_away() {
        let most = retry().retry_timeout + WAITS;
        assert!(most < Times::default().request, "{most:?}");
    }

    #[test]
    fn a_directory_that_is_made_later_can_be_used_then() {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .expect("a runtime");
        let base = tempfile::tempdir().expect("a temporary directory");
        let directory = base.path().join("tier");
        let url: Url = format!("file://{}", directory.display())
            .parse()
            .expect("a URL");
        let store = url.open_later(runtime.handle().clone(), Times::default());
        for _ in 0..2 {
            let error = store.tenants().expect_err("there is no directory");
            assert!(matches!(error, Error::Permanent { .. }), "{error:?}");
            assert!(!directory.exists(), "only a person makes the directory");
        }
        std::fs::create_dir(&directory).expect("it is new");
        assert_eq!(store.tenants().expect("it is there"), []);
    }

    #[test]
    fn urls_name_a_bucket_or_a_directory_and_a_prefix() {
        for (text, shown) in [
            ("s3://b", "s3://b"),
            ("s3://b/", "s3://b"),
            ("s3://b/p/q/", "s3://b/p/q"),
            ("gs://b/p", "gs://b/p"),
            ("az://c/p?account=a", "az://c/p"),
            ("file:///srv/tier", "file:///srv/tier"),
            (
                "s3://b/p?endpoint=http://127.0.0.1:1&region=x&path-style=true&allow-http=true",
                "s3://b/p",
            ),
        ] {
            let url: Url = text
                .parse()
                .unwrap_or_else(|error| panic!("{text}: {error}"));
            assert_eq!(url.to_string(), shown);
        }
        for (text, error) in [
            ("", UrlError::Scheme),
            ("http://b", UrlError::Scheme),
            ("s3:///p", UrlError::NoBucket),
            ("file://host/dir", UrlError::NoDirectory),
            ("file:///", UrlError::NoDirectory),
            ("s3://b/../c", UrlError::Path),
            ("s3://b//c", UrlError::Path),
            ("s3://key:hunter2@b/p", UrlError::Credentials),
            ("s3://b?endpoint=http://u:hunter2@h", UrlError::Credentials),
            ("s3://b?secret=hunter2", UrlError::Option("secret".into())),
            (
                "s3://b?allow-http=yes",
                UrlError::Value("allow-http", "true or false"),
            ),
        ] {
            let refused = text.parse::<Url>().expect_err(text);
            assert_eq!(refused, error, "{text}");
            assert!(!refused.to_string().contains("hunter2"), "{refused}");
        }
    }
}
