//! A file system's metrics for a Prometheus server: their text, and a socket that serves it.
//!
//! Whoever can connect may read: the socket in the file system is the daemon's user's alone, and a port is one of this machine's
//! only. Off unless asked for.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use fs::{FileSystem, Metric, Quantiles, Value};

use crate::Error;
use crate::http::{Answer, Server};
use crate::sys;

/// How requests of the kernel come to a mount: `dev` or `uring`, once the kernel has agreed to it. See `transport`.
#[derive(Clone, Debug, Default)]
pub struct FuseWay(Arc<OnceLock<&'static str>>);

impl FuseWay {
    pub(crate) fn agreed(&self, over_io_uring: bool) {
        let way = if over_io_uring { "uring" } else { "dev" };
        self.0.get_or_init(|| way);
    }

    fn metric(&self) -> Option<Metric> {
        self.0.get().map(|&way| Metric {
            name: "sheaf_fuse_io",
            help: "How requests of the kernel come.",
            label: Some(("way", way.to_owned())),
            value: Value::Gauge(1.0),
        })
    }
}

/// All metrics of a mounted file system, whoever asks for them.
pub fn of(fs: &FileSystem, way: &FuseWay) -> Vec<Metric> {
    let mut metrics = fs.metrics();
    metrics.extend(way.metric());
    metrics
}

/// Where metrics are served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// A socket that is made there.
    Socket(PathBuf),
    /// Of a loopback interface.
    Port(SocketAddr),
}

impl Endpoint {
    /// A path from the root, or an address of this machine with a port.
    pub fn parse(text: &str) -> Option<Endpoint> {
        if text.starts_with('/') {
            return Some(Endpoint::Socket(PathBuf::from(text)));
        }
        let text = text.replace("localhost", &IpAddr::from([127, 0, 0, 1]).to_string());
        let address: SocketAddr = text.parse().ok()?;
        address
            .ip()
            .is_loopback()
            .then_some(Endpoint::Port(address))
    }
}

impl std::fmt::Display for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Endpoint::Socket(path) => write!(f, "{}", path.display()),
            Endpoint::Port(address) => write!(f, "{address}"),
        }
    }
}

/// Answers requests for `/metrics` until it is dropped.
pub struct MetricsServer {
    _server: Server,
    endpoint: Endpoint,
    port: Option<u16>,
}

impl std::fmt::Debug for MetricsServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MetricsServer")
            .field("endpoint", &self.endpoint)
            .finish_non_exhaustive()
    }
}

impl MetricsServer {
    /// Listens, and answers with what `read` says.
    ///
    /// # Errors
    /// [`Error::Metrics`] when the address or path cannot be listened at.
    pub fn start(
        endpoint: &Endpoint,
        read: impl Fn() -> Vec<Metric> + Send + 'static,
    ) -> Result<MetricsServer, Error> {
        let (server, port) = listen(endpoint, read).map_err(|error| Error::Metrics {
            endpoint: endpoint.to_string(),
            error,
        })?;
        Ok(MetricsServer {
            _server: server,
            endpoint: endpoint.clone(),
            port,
        })
    }

    /// The port, if there is one: asked for as 0 it is any that is free.
    pub fn port(&self) -> Option<u16> {
        self.port
    }
}

impl Drop for MetricsServer {
    fn drop(&mut self) {
        if let Endpoint::Socket(path) = &self.endpoint
            && let Err(error) = std::fs::remove_file(path)
        {
            tracing::warn!("{}: {error}", path.display());
        }
    }
}

const THREAD: &str = "sheaf-metrics";

fn listen(
    endpoint: &Endpoint,
    read: impl Fn() -> Vec<Metric> + Send + 'static,
) -> io::Result<(Server, Option<u16>)> {
    let answer = move |path: &str| answer(path, &read);
    match endpoint {
        Endpoint::Port(address) => {
            let listener = TcpListener::bind(address)?;
            listener.set_nonblocking(true)?;
            let port = listener.local_addr()?.port();
            Ok((Server::start(THREAD, listener, answer)?, Some(port)))
        }
        Endpoint::Socket(path) => {
            remove_abandoned(path)?;
            let listener = sys::listen_privately(path)?;
            listener.set_nonblocking(true)?;
            Ok((Server::start(THREAD, listener, answer)?, None))
        }
    }
}

/// A daemon that was killed leaves its socket. One that anybody listens at stays; what is no socket stays, too, and is told as that.
fn remove_abandoned(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::FileTypeExt;
    use std::os::unix::net::UnixStream;
    match std::fs::symlink_metadata(path) {
        Ok(found) if found.file_type().is_socket() => {}
        Ok(_) => {
            let what = "something is there that is no socket: move it away, or give another path";
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, what));
        }
        Err(_) => return Ok(()),
    }
    match UnixStream::connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            std::fs::remove_file(path)
        }
        _ => Ok(()),
    }
}

fn answer(path: &str, read: &dyn Fn() -> Vec<Metric>) -> Answer {
    match path {
        "/metrics" => Answer {
            status: "200 OK",
            kind: "text/plain; version=0.0.4; charset=utf-8",
            body: exposition(&read()),
        },
        _ => Answer::refusal("404 Not Found", "There is /metrics and nothing else."),
    }
}

/// The text format of Prometheus, version 0.0.4. A distribution is a summary whose quantile 1 is its largest value.
pub fn exposition(metrics: &[Metric]) -> String {
    let mut text = String::new();
    let mut last = "";
    for metric in metrics {
        let Metric { name, help, .. } = metric;
        if *name != last {
            let kind = match metric.value {
                Value::Counter(_) => "counter",
                Value::Gauge(_) => "gauge",
                Value::Summary(_) => "summary",
            };
            text += &format!("# HELP {name} {help}\n# TYPE {name} {kind}\n");
            last = name;
        }
        match &metric.value {
            Value::Counter(value) | Value::Gauge(value) => {
                let label = metric.label.as_ref();
                let label = label.map(|(label, of)| format!("{{{label}=\"{}\"}}", escaped(of)));
                text += &format!("{name}{} {value}\n", label.unwrap_or_default());
            }
            Value::Summary(quantiles) => text += &summary(name, quantiles),
        }
    }
    text
}

fn summary(name: &str, of: &Quantiles) -> String {
    let quantiles = [
        ("0.5", of.p50),
        ("0.9", of.p90),
        ("0.99", of.p99),
        ("0.999", of.p999),
        ("1", of.max),
    ];
    let line = |(quantile, value)| format!("{name}{{quantile=\"{quantile}\"}} {value}\n");
    let mut text: String = quantiles.into_iter().map(line).collect();
    text += &format!("{name}_sum {}\n{name}_count {}\n", of.sum, of.count);
    text
}

fn escaped(value: &str) -> String {
    let value = value.replace('\\', "\\\\");
    value.replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::TcpStream;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixStream;

    fn metrics() -> Vec<Metric> {
        let of = |name, label: Option<(&'static str, &str)>, value| Metric {
            name,
            help: "What it is.",
            label: label.map(|(label, of)| (label, of.to_owned())),
            value,
        };
        let quantiles = Quantiles {
            count: 4,
            sum: 2.5,
            p50: 0.5,
            p90: 1.0,
            p99: 1.0,
            p999: 1.0,
            max: 1.0,
        };
        vec![
            of(
                "a_total",
                Some(("device", "/dev/\"x\"")),
                Value::Counter(3.0),
            ),
            of("a_total", Some(("device", "/dev/y")), Value::Counter(4.0)),
            of("b", None, Value::Gauge(0.25)),
            of("c_seconds", None, Value::Summary(quantiles)),
        ]
    }

    const TEXT: &str = "\
# HELP a_total What it is.
# TYPE a_total counter
a_total{device=\"/dev/\\\"x\\\"\"} 3
a_total{device=\"/dev/y\"} 4
# HELP b What it is.
# TYPE b gauge
b 0.25
# HELP c_seconds What it is.
# TYPE c_seconds summary
c_seconds{quantile=\"0.5\"} 0.5
c_seconds{quantile=\"0.9\"} 1
c_seconds{quantile=\"0.99\"} 1
c_seconds{quantile=\"0.999\"} 1
c_seconds{quantile=\"1\"} 1
c_seconds_sum 2.5
c_seconds_count 4
";

    fn get(mut stream: impl Read + Write, path: &str) -> String {
        write!(stream, "GET {path} HTTP/1.0\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    #[test]
    fn a_metric_has_its_help_once() {
        assert_eq!(exposition(&metrics()), TEXT);
    }

    #[test]
    fn a_socket_of_the_daemon_alone_serves_them_and_goes_with_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics");
        let endpoint = Endpoint::parse(path.to_str().unwrap()).unwrap();
        // As a daemon that was killed leaves it.
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let server = MetricsServer::start(&endpoint, metrics).unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let answer = get(UnixStream::connect(&path).unwrap(), "/metrics");
        assert!(
            answer.contains("200 OK") && answer.ends_with(TEXT),
            "{answer}"
        );
        let answer = get(UnixStream::connect(&path).unwrap(), "/");
        assert!(answer.contains("404"), "{answer}");
        // Somebody listens.
        let second = MetricsServer::start(&endpoint, metrics).unwrap_err();
        assert!(second.to_string().contains("metrics"), "{second}");
        drop(server);
        assert!(!path.exists());
        std::fs::write(&path, "a file").unwrap();
        let file = MetricsServer::start(&endpoint, metrics).unwrap_err();
        assert!(file.to_string().contains("is no socket"), "{file}");
        assert_eq!(std::fs::read(&path).unwrap(), b"a file");
    }

    #[test]
    fn a_port_of_this_machine_serves_them() {
        let endpoint = Endpoint::parse("127.0.0.1:0").unwrap();
        let server = MetricsServer::start(&endpoint, metrics).unwrap();
        let port = server.port().unwrap();
        let answer = get(TcpStream::connect(("127.0.0.1", port)).unwrap(), "/metrics");
        assert!(answer.ends_with(TEXT), "{answer}");
        drop(server);
        assert!(TcpStream::connect(("127.0.0.1", port)).is_err());
    }

    #[test]
    fn nothing_is_served_to_the_network() {
        for address in [
            "0.0.0.0:9100",
            "192.168.1.1:9100",
            "[::]:9100",
            "host",
            "run/metrics",
        ] {
            assert_eq!(Endpoint::parse(address), None, "{address}");
        }
        for address in ["127.0.0.1:9100", "[::1]:9100", "localhost:9100"] {
            assert!(matches!(Endpoint::parse(address), Some(Endpoint::Port(_))));
        }
    }
}
