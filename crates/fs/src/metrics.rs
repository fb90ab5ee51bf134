//! What a file system has done since it was opened, as a list of named values.
//!
//! Names and units are those of Prometheus: base units, `_total` for what only grows, and a label that divides a sum.
//! The list is the interface; whoever shows it needs to know nothing of what is in it.

use crate::filesystem::FileSystem;
use crate::tx::atomic::AtomicCounts;
use base::atomic::{AtomicU64, Ordering};
use engine::{BytesWritten, Distribution, StoreCounters, Summary, Waits};
use format::inode::{KIND_BUCKET, KIND_INDEX, KIND_INODE};

/// One value, or several of a distribution.
#[derive(Clone, Debug, PartialEq)]
pub struct Metric {
    pub name: &'static str,
    /// One sentence that says what is counted.
    pub help: &'static str,
    /// A name and its value.
    pub label: Option<(&'static str, String)>,
    pub value: Value,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value {
    /// Only grows.
    Counter(f64),
    /// Grows and shrinks.
    Gauge(f64),
    Summary(Quantiles),
}

/// Quantiles in the metric's unit; `sum` of all `count` values.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Quantiles {
    pub count: u64,
    pub sum: f64,
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
    pub p999: f64,
    pub max: f64,
}

/// What the files of a file system count.
#[derive(Debug, Default)]
pub(crate) struct FileCounts {
    /// Nanoseconds of each fsync and fdatasync.
    pub fsyncs: Distribution,
    /// Of them those that needed a commit, those that flushed what was written in place, and those of which a single write
    /// in place was durable by itself.
    pub committed: AtomicU64,
    pub flushed: AtomicU64,
    pub written_durably: AtomicU64,
    /// Those that an exactly kept mtime would have needed a commit for, and that did without.
    pub times_kept: AtomicU64,
    pub data_bytes: AtomicU64,
}

const NS: f64 = 1e-9;

struct List(Vec<Metric>);

impl List {
    fn add(&mut self, name: &'static str, help: &'static str, value: Value) {
        self.0.push(Metric {
            name,
            help,
            label: None,
            value,
        });
    }

    fn counter(&mut self, name: &'static str, help: &'static str, value: u64) {
        self.add(name, help, Value::Counter(value as f64));
    }

    fn gauge(&mut self, name: &'static str, help: &'static str, value: f64) {
        self.add(name, help, Value::Gauge(value));
    }

    /// A distribution, each value of which is `unit` of the metric's.
    fn summary(&mut self, name: &'static str, help: &'static str, summary: &Summary, unit: f64) {
        let of = |value: u64| value as f64 * unit;
        let quantiles = Quantiles {
            count: summary.count,
            sum: of(summary.sum),
            p50: of(summary.p50),
            p90: of(summary.p90),
            p99: of(summary.p99),
            p999: of(summary.p999),
            max: of(summary.max),
        };
        self.add(name, help, Value::Summary(quantiles));
    }

    /// One counter divided by a label.
    fn divided<L: Into<String>>(
        &mut self,
        name: &'static str,
        help: &'static str,
        label: &'static str,
        values: impl IntoIterator<Item = (L, u64)>,
    ) {
        for (of, value) in values {
            self.0.push(Metric {
                name,
                help,
                label: Some((label, of.into())),
                value: Value::Counter(value as f64),
            });
        }
    }
}

impl FileSystem {
    /// What this file system has done since it was opened, and how full it is. Values are read one after the other, while
    /// work goes on: two of them need not fit each other to the last one.
    pub fn metrics(&self) -> Vec<Metric> {
        let mut list = List(Vec::new());
        let store = self.store().counters();
        let files = self.files.counts();
        let data = files.data_bytes.load(Ordering::Relaxed);
        let causes = [("data", data)].into_iter().chain(causes(&store.written));
        let help = "Bytes written to the devices, by cause.";
        list.divided("sheaf_written_bytes_total", help, "cause", causes);
        commits(&mut list, &store);
        checkpoints(&mut list, &store);
        synced(&mut list, files);
        atomic_writes(&mut list, &self.atomic);
        self.devices(&mut list);
        self.memory(&mut list);
        self.space(&mut list);
        list.0
    }

    fn devices(&self, list: &mut List) {
        let topology = self.store().array().topology().name();
        list.0.push(Metric {
            name: "sheaf_submission_topology",
            help: "Which threads submit requests to the devices: the topology of the mount, as a label of 1.",
            label: Some(("topology", topology.to_owned())),
            value: Value::Gauge(1.0),
        });
        self.reaping(list);
        let stats = self.store().array().stats();
        let mut of = |name, help, value: fn(&device::DeviceStats) -> u64| {
            let devices = stats.devices.iter();
            let values = devices.map(|device| (device.name.clone(), value(device)));
            list.divided(name, help, "device", values);
        };
        of(
            "sheaf_device_reads_total",
            "Read requests to the device.",
            |d| d.reads,
        );
        of(
            "sheaf_device_read_bytes_total",
            "Bytes read from the device.",
            |d| d.read_bytes,
        );
        of(
            "sheaf_device_writes_total",
            "Write requests to the device.",
            |d| d.writes,
        );
        of(
            "sheaf_device_written_bytes_total",
            "Bytes written to the device.",
            |d| d.written_bytes,
        );
        of(
            "sheaf_device_durable_writes_total",
            "Write requests to the device that were durable by themselves, without a flush.",
            |d| d.durable_writes,
        );
        of(
            "sheaf_device_flushes_total",
            "Flushes of the device.",
            |d| d.flushes,
        );
        of(
            "sheaf_device_errors_total",
            "Requests to the device that failed.",
            |d| d.errors,
        );
    }

    fn reaping(&self, list: &mut List) {
        let array = self.store().array();
        list.0.push(Metric {
            name: "sheaf_reaping",
            help: "How threads wait for the devices: the policy of the mount, as a label of 1.",
            label: Some(("policy", array.reaping().name().to_owned())),
            value: Value::Gauge(1.0),
        });
        let reaped = array.reaped();
        let at = |part| reaped.quantile(part) as f64 * NS;
        let waits = Quantiles {
            count: reaped.timed,
            sum: reaped.ns as f64 * NS,
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            p999: at(0.999),
            max: reaped.longest as f64 * NS,
        };
        let help = "Time from the start of transfers to the end of the wait for them.";
        list.add("sheaf_reap_seconds", help, Value::Summary(waits));
        let ends = [
            ("blocked", reaped.blocked),
            ("overslept", reaped.overslept),
            ("woken", reaped.early),
            ("caught", reaped.caught),
        ];
        let help = "Waits for devices, by what ended them: a wake-up by the kernel, a sleep that was too long, one that was cut \
                    short, a spin.";
        list.divided("sheaf_reap_waits_total", help, "end", ends);
        let help =
            "Sleeps of waits for devices until just before the predicted end of the transfer.";
        list.counter("sheaf_reap_sleeps_total", help, reaped.sleeps);
        let help = "Spins of waits for devices that ended before the transfer did.";
        list.counter("sheaf_reap_late_total", help, reaped.late);
        let times = [("spinning", reaped.spun_ns), ("all", reaped.cpu_ns)];
        for (of, ns) in times {
            list.0.push(Metric {
                name: "sheaf_reap_cpu_seconds_total",
                help: "CPU time of waits: that of spins, and all of it, which is estimated from one wait in 64.",
                label: Some(("of", of.to_owned())),
                value: Value::Counter(ns as f64 * NS),
            });
        }
    }

    fn memory(&self, list: &mut List) {
        let pages = self.files.page_counters();
        let values = [("hit", pages.hits), ("miss", pages.misses)];
        let help = "Pages that reads through the cache found there, those included that read-ahead had brought, and pages that such reads \
                    had to bring themselves.";
        list.divided("sheaf_page_lookups_total", help, "outcome", values);
        let help = "Pages that read-ahead brought into the cache before anybody wanted them.";
        list.counter("sheaf_read_ahead_pages_total", help, pages.ahead);
        let [cleaned, writes, waits] = self.files.cleaning_counts();
        let help = "Dirty pages that went home before somebody needed their frames.";
        list.counter("sheaf_precleaned_pages_total", help, cleaned);
        let help = "Writes by which dirty pages went home before somebody needed their frames.";
        list.counter("sheaf_precleaning_writes_total", help, writes);
        let help = "Overwrites that waited for room among dirty pages.";
        list.counter("sheaf_room_waits_total", help, waits);
        let help = "Bytes that large writes, one behind the other, wrote past the cache.";
        list.counter(
            "sheaf_streamed_bytes_total",
            help,
            self.files.streamed_bytes(),
        );
        let help = "Bytes of sheaf_streamed_bytes_total that went to the devices after the write call had returned.";
        list.counter(
            "sheaf_streamed_behind_bytes_total",
            help,
            self.files.behind_bytes(),
        );
        let help = "Bytes that large reads, one behind the other, read past the cache.";
        list.counter(
            "sheaf_streamed_read_bytes_total",
            help,
            self.files.streamed_read_bytes(),
        );
        let dirty = self.files.dirty_pages() as f64 * format::BLOCK_SIZE as f64;
        let help = "Bytes of file pages that wait to be written.";
        list.gauge("sheaf_dirty_page_bytes", help, dirty);
        let help =
            "Bytes of the cache of file pages that large pages of the machine were put behind.";
        list.gauge(
            "sheaf_large_page_bytes",
            help,
            self.files.large_bytes() as f64,
        );
        let help = "Bytes of metadata in memory that wait for a checkpoint.";
        let dirty = self.store().dirty_metadata_bytes() as f64;
        list.gauge("sheaf_dirty_metadata_bytes", help, dirty);
    }

    fn space(&self, list: &mut List) {
        let space = self.store().space();
        let bytes = |blocks: u64| blocks as f64 * format::BLOCK_SIZE as f64;
        let help = "Bytes that the file system has for files and metadata, used and free.";
        list.gauge("sheaf_size_bytes", help, bytes(space.total_blocks));
        let help = "Bytes of sheaf_size_bytes that are free.";
        list.gauge("sheaf_free_bytes", help, bytes(space.free_blocks));
        let failed = self.store().failed().is_some();
        let help = "1 once an error has made the file system read-only.";
        list.gauge("sheaf_failed", help, f64::from(u8::from(failed)));
    }
}

/// Bytes of metadata written, by cause; together all of them.
pub fn causes(written: &BytesWritten) -> [(&'static str, u64); 11] {
    let nodes = |kinds: &[u8]| -> u64 {
        let bytes = kinds.iter().map(|kind| written.nodes[usize::from(*kind)]);
        bytes.sum()
    };
    let all: u64 = written.nodes.iter().sum();
    let named = nodes(&[KIND_INODE, KIND_BUCKET, KIND_INDEX]);
    [
        ("journal_records", written.records),
        ("journal_batches", written.batches),
        ("inodes", nodes(&[KIND_INODE])),
        ("directory_leaves", nodes(&[KIND_BUCKET])),
        ("tree_indexes", nodes(&[KIND_INDEX])),
        ("other_nodes", all - named),
        ("table_leaves", written.table_leaves),
        ("table_inner", written.table_inner),
        ("space_tables", written.space),
        ("checkpoint_padding", written.padding),
        ("checkpoint_records", written.slots),
    ]
}

fn commits(list: &mut List, store: &StoreCounters) {
    let help = "Operations that were logged in the journal.";
    list.counter("sheaf_operations_total", help, store.records);
    let name = "sheaf_commit_seconds";
    let help = "Time that a batch of the journal took to be durable, with the flush of its data.";
    list.summary(name, help, &store.batches, NS);
    let help = "Operations that one batch of the journal made durable.";
    list.summary("sheaf_commit_operations", help, &store.batch_records, 1.0);
    let help = "Bytes of a batch of the journal, with its header and padding.";
    list.summary("sheaf_commit_bytes", help, &store.batch_bytes, 1.0);
    let causes = [
        ("data", store.data_flushes),
        ("journal", store.journal_flushes),
        ("checkpoint", store.checkpoint_flushes),
    ];
    let help = "Flushes of devices, by what issued them; others that waited for one share it.";
    list.divided("sheaf_flushes_total", help, "cause", causes);
    let causes = [
        ("data", store.data_durably),
        ("journal", store.journal_durably),
        ("checkpoint", store.checkpoint_durably),
    ];
    let help = "Writes that were durable by themselves, which a device that cannot force one does with a flush.";
    list.divided("sheaf_durable_writes_total", help, "cause", causes);
}

fn checkpoints(list: &mut List, store: &StoreCounters) {
    let help = "Time that a checkpoint took.";
    list.summary("sheaf_checkpoint_seconds", help, &store.checkpoints, NS);
    let help = "Nodes that checkpoints wrote.";
    let nodes = store.checkpoint_nodes;
    list.counter("sheaf_checkpoint_nodes_total", help, nodes);
    let help = "Segments of metadata that cleaning emptied.";
    let cleaned = store.cleaned_segments;
    list.counter("sheaf_cleaned_segments_total", help, cleaned);
    let help =
        "Bytes that were live in cleaned segments, and that checkpoints wrote again elsewhere.";
    list.counter("sheaf_cleaned_bytes_total", help, store.cleaned_bytes);
    let waits = [("paced", store.paced), ("checkpoint", store.stalled)];
    let of = |value: fn(&Waits) -> u64| waits.map(|(cause, waits)| (cause, value(&waits)));
    let help = "Operations that waited: slowed down as a checkpoint came near, or for one to end.";
    list.divided("sheaf_waits_total", help, "cause", of(|w| w.count));
    for (cause, waits) in waits {
        list.0.push(Metric {
            name: "sheaf_wait_seconds_total",
            help: "Time for which operations waited, slowed down as a checkpoint came near, or for one to end.",
            label: Some(("cause", cause.to_owned())),
            value: Value::Counter(waits.ns as f64 * NS),
        });
    }
}

fn atomic_writes(list: &mut List, counts: &AtomicCounts) {
    let get = |count: &AtomicU64| count.load(Ordering::Relaxed);
    let events = [
        ("started", get(&counts.started)),
        ("committed", get(&counts.committed)),
        ("aborted", get(&counts.aborted)),
    ];
    let help = "Atomic writes of open files, by what became of them.";
    list.divided("sheaf_atomic_writes_total", help, "event", events);
}

fn synced(list: &mut List, files: &FileCounts) {
    let help = "Time that an fsync or fdatasync of a file took. Requests in flight that shared one count once.";
    let fsyncs = files.fsyncs.summary();
    list.summary("sheaf_fsync_seconds", help, &fsyncs, NS);
    let get = |count: &AtomicU64| count.load(Ordering::Relaxed);
    let parts = [
        ("commit", get(&files.committed)),
        ("flush", get(&files.flushed)),
        ("write", get(&files.written_durably)),
    ];
    let help = "Calls of fsync and fdatasync that needed a commit, a flush of what was written in place, or one durable write in place; \
                one call may be in several of these, or in none.";
    list.divided("sheaf_fsync_waits_total", help, "for", parts);
    let help =
        "Commits of a time alone that an fsync did without, because times are persisted coarsely.";
    let kept = get(&files.times_kept);
    list.counter("sheaf_mtime_commits_saved_total", help, kept);
}
