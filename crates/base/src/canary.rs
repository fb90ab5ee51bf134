//! Deliberate breakages, to prove that the simulator finds them.
//!
//! A canary is one wrong line of code, chosen by name. In builds without the feature
//! `simulate` [`planted`] is the constant `false` and the wrong lines do not exist in the
//! binary. With it, a thread plants at most one canary for itself and the threads it starts.

/// What it takes besides operations for a canary to show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Needs {
    /// Operations alone, and opening again.
    Nothing,
    /// A power cut while one thread works.
    Cut,
    /// A device that fails, as the canary's description says.
    Fault,
    /// Several threads at once, and mostly a power cut.
    Threads,
    /// A journal that no crash leaves: its batches are made by the test.
    Forgery,
}

/// One breakage. Each names the rule of the design that it breaks, where there is one, and
/// what a user would see of it.
macro_rules! canaries {
    ($($(#[doc = $doc:literal])* $name:ident => $text:literal, $needs:ident,)*) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Canary {
            $($(#[doc = $doc])* $name,)*
        }

        impl Canary {
            /// Every canary there is.
            pub const ALL: &[Canary] = &[$(Canary::$name,)*];

            /// Name on command lines and in reports.
            pub fn name(self) -> &'static str {
                match self {
                    $(Canary::$name => $text,)*
                }
            }

            /// What it takes for the canary to show.
            pub fn needs(self) -> Needs {
                match self {
                    $(Canary::$name => Needs::$needs,)*
                }
            }
        }
    };
}

canaries! {
    /// A commit's batch is written without flushing the data it names first (R14): after a power
    /// cut a synced file holds zeros or what its blocks held before.
    SkipPreflush => "skip-preflush", Cut,
    /// Recovery does not look at the data for which the last batches vouch (batches): after a power cut a file that was
    /// being synced holds what its blocks held before.
    DataUnchecked => "data-unchecked", Cut,
    /// Blocks are written in place while the batch that vouches for what they held is not confirmed (vouched, invariant 1):
    /// after a power cut recovery takes that batch for one that was never whole, and what was synced is gone.
    VouchedOverwritten => "vouched-overwritten", Cut,
    /// Blocks are read before the batch that they are written with (vouched, invariant 3): who reads a file gets what its blocks held before.
    DataReadEarly => "data-read-early", Threads,
    /// A page that is cleaned is clean before its write has ended (clean, invariant 3): who syncs its file then finds nothing to
    /// write and nothing to flush, and what was synced is gone after a power cut.
    CleanedTooEarly => "cleaned-too-early", Threads,
    /// Read-ahead does not keep who cuts the file waiting (ahead, invariant 3): what it read before a cut is there after
    /// the file has grown again.
    AheadPastCut => "ahead-past-cut", Threads,
    /// A page that is being read from its device is shown before it has come (cache loads, invariant 1): who reads it gets what its
    /// frame held before.
    LoadPublishedEarly => "load-published-early", Threads,
    /// A page that somebody reads where it is is written over there (cache guards, invariant 1): what it showed when it was taken
    /// changes under who has it.
    GuardOverwritten => "guard-overwritten", Threads,
    /// What a stream has brought ahead is handed out without a look at what happened since (data/stream, invariant 1): a read shows what a
    /// write that was over had superseded.
    StreamUnasked => "stream-unasked", Threads,
    /// Who reads a file does not end what a stream has written to it (data/stream/behind, invariant 1): a read misses what a write that
    /// was over had written.
    PiecesNotEnded => "pieces-not-ended", Threads,
    /// What a stream has written is logged while it is on its way (data/stream/behind, invariant 3): who reads the file gets what its new
    /// blocks held before, also after a power cut.
    PieceLoggedEarly => "piece-logged-early", Nothing,
    /// A batch is written without data-sync semantics: a commit is acknowledged before it is
    /// durable, and what was synced is gone after a power cut.
    BatchNotDurable => "batch-not-durable", Cut,
    /// A batch completes before those ahead of it (journal, invariant 4): an fsync returns while
    /// an earlier batch, without which its own cannot be replayed, is still on its way.
    DurableOutOfOrder => "durable-out-of-order", Threads,
    /// An epoch is gathered while operations are still pinned in it (journal, invariant 1): their
    /// records land in a later batch than the one that was waited for, so a synced change is lost.
    PinsIgnored => "pins-ignored", Threads,
    /// Operations take no journal credit (R6): the ring runs over batches that recovery still
    /// needs. Shows when more than the ring is logged with few nodes dirty, as by thousands of
    /// changes of one file, and then power is cut.
    NoCredits => "no-credits", Cut,
    /// A failed journal write is taken for a good one: fsync returns, and what it synced is gone
    /// after the next open. Needs an error on a write to the journal.
    FailedBatchIgnored => "failed-batch-ignored", Fault,
    /// Only the first change of an operation is logged: half of a rename or of a create survives,
    /// or replay finds a version missing.
    HalfRecord => "half-record", Cut,
    /// A nid that is used again starts at version 1: replay takes its changes for old ones and
    /// drops them. Shows when a deletion was checkpointed before the nid was reused.
    VersionReset => "version-reset", Cut,
    /// Blocks are given out before their freeing is durable (R11): after a cut a file that still
    /// has them shows another file's bytes. Shows when free space is short, so that blocks freed
    /// are wanted again at once.
    BlocksReusedEarly => "blocks-reused-early", Cut,
    /// A checkpoint leaves out a node that changed (checkpoint, invariant 1): its changes go with
    /// the journal's tail.
    DirtyNodeForgotten => "dirty-node-forgotten", Cut,
    /// A checkpoint does not fold what was merged into a directory (R5): its image lacks names
    /// that the journal, whose tail moves on, has no more. Its count is wrong after a cut.
    MergesNotFolded => "merges-not-folded", Cut,
    /// An index node takes over the keys of the one before it, and its first child does not: names
    /// that are made there later end up where nobody looks.
    IndexNotLowered => "index-not-lowered", Nothing,
    /// Who has locked a directory's leaf does not look whether its names moved on the way there
    /// (content/tally, invariant 3): a name that exists is not found, or is made twice.
    ShapeIgnored => "shape-ignored", Threads,
    /// Replay merges what the directory's image has already (R5): its count is wrong after a cut.
    MergesReplayedTwice => "merges-replayed-twice", Cut,
    /// Replay takes the time of the merge that the journal happens to have last for the newest: after a cut a directory
    /// has an older time than was shown before, though nothing is lost.
    MergesInLogOrder => "merges-in-log-order", Threads,
    /// A checkpoint does not make the journal durable before its table pages (R3): an image shows
    /// the first half of an operation whose other nodes' changes were lost with the journal's end.
    /// Shows when operations change nodes while these are being captured.
    ImagesAheadOfLog => "images-ahead-of-log", Threads,
    /// Segments that this checkpoint empties are written before its commit point (segments,
    /// invariant 2): a cut leaves the last checkpoint with holes in it, and the file system does
    /// not open.
    SegmentReusedEarly => "segment-reused-early", Cut,
    /// A checkpoint record is written before what it names is flushed: a cut leaves a record of
    /// pages that are not there.
    CheckpointUnflushed => "checkpoint-unflushed", Cut,
    /// Recovery does not look at the second copy of a checkpoint record: where a device lies about the first, what there was before that
    /// checkpoint is taken for the newest, or nothing opens. Needs a lost or misdirected write, or rot, of a record.
    SecondCopyIgnored => "second-copy-ignored", Fault,
    /// Operations do not ask for a checkpoint, nor slow down, before the journal is full: all stop then until one has been
    /// made, though nothing is lost.
    PaceIgnored => "pace-ignored", Nothing,
    /// The journal's tail moves before the record that says so: batches that the last checkpoint
    /// needs are overwritten, or name a checkpoint that was never written. Shows when somebody
    /// commits between the two.
    TailBeforeRecord => "tail-before-record", Threads,
    /// A checkpoint writes both slots, and before what its record names is flushed: when the power
    /// goes then, no slot holds a checkpoint that is whole.
    BothSlots => "both-slots", Cut,
    /// A checkpoint's tables keep the states that chunks had before (R4): a chunk with data counts
    /// as free after the next open, and is given out again.
    ChunkStateStale => "chunk-state-stale", Nothing,
    /// Recovery ends without a checkpoint (R8): the journal goes on under a mount number that the
    /// record does not know, and the next recovery stops before it. Needs two cuts, or a cut and a
    /// process that ends.
    NoClosingCheckpoint => "no-closing-checkpoint", Cut,
    /// A mount's first checkpoint record is written before the labels say that mount: after a cut between the two devices look like
    /// old copies (device/ages, invariant 1).
    LabelsAfterRecord => "labels-after-record", Cut,
    /// Replay applies a change although the one before it is missing (R9): a node gets into a
    /// state that it never had. No fault makes a gap while all else works; a batch with one is
    /// forged.
    VersionGapAccepted => "version-gap-accepted", Forgery,
    /// What says how far the journal must reach is ignored (R9): a damaged batch ends it early,
    /// and synced changes are gone without a word. Needs bit rot, or a lost write, in a batch that
    /// later ones follow.
    SilentTruncation => "silent-truncation", Fault,
    /// A batch of an earlier mount, or behind another predecessor, is taken for the next one: a
    /// change that was cut off comes back. Shows when batches were in flight together, a later one
    /// survived without an earlier one, and the next mount logs as many bytes as were missing.
    StaleBatchAccepted => "stale-batch-accepted", Threads,
    /// A batch is replayed although its checksum is wrong: half an operation, or garbage.
    TornBatchAccepted => "torn-batch-accepted", Cut,
    /// Pages are looked up by nid alone (R11): a new file shows the cached bytes of a deleted one
    /// that had its nid.
    GenerationIgnored => "generation-ignored", Nothing,
    /// Who copies a cached page without its set's lock does not look whether it changed meanwhile (cache/tags,
    /// invariant 2): a read has part of one write and part of another, or bytes of another page.
    VersionUnchecked => "version-unchecked", Threads,
    /// A flush reaches the first device only: what was synced to the others is lost. Needs two
    /// devices.
    FirstDeviceFlushed => "first-device-flushed", Cut,
    /// fsync takes its fast path although the size, the extents or the attributes are not durable
    /// (R7): the file is short or empty after a cut.
    FsyncUncommitted => "fsync-uncommitted", Cut,
    /// fsync of a directory returns without a commit: names that were made in it are gone after a cut.
    DirectoryUncommitted => "directory-uncommitted", Cut,
    /// What an operation has changed of a file is noted for its fsync after the operation has unlocked it (op, invariant 7): who sees the new
    /// name or attribute, and syncs the file, finds nothing to wait for, and the change is gone after a cut.
    ChangeNotedLate => "change-noted-late", Threads,
    /// Who syncs a file beside another takes the write-back that is under way for its own: what it wrote is not durable when it returns.
    FlushUnderWayCovers => "flush-under-way-covers", Threads,
    /// A sync that is handed over joins a call that is already under way (aio/syncs, invariant 1): what was written before it and after that call
    /// had begun is not durable when it has ended.
    SyncJoined => "sync-joined", Threads,
    /// fsync does not flush what was overwritten in place: old bytes come back after a cut.
    OverwriteUnflushed => "overwrite-unflushed", Cut,
    /// A failed flush is not remembered by the files that wrote before it (R17): the next fsync
    /// succeeds, although what they wrote may be lost. Needs a flush that fails once, after an
    /// overwrite in place.
    FailedFlushForgotten => "failed-flush-forgotten", Fault,
    /// Who writes durably does not wait until it is known whether a flush beside it has failed (device/flush, invariant 6): an fsync that overwrites a page returns, and what
    /// that flush has dropped is gone after a cut. Needs devices that cannot force a write.
    FlushBesideUnseen => "flush-beside-unseen", Threads,
    /// A batch is acknowledged although a flush has failed while it was written (journal, invariant 6), which may have dropped it: what was synced is gone after a cut. Needs
    /// devices that cannot force a write.
    BatchBesideUnseen => "batch-beside-unseen", Threads,
    /// A failure that loses data is remembered by its file alone: a sync succeeds although nobody
    /// was told, and what it should cover is gone after a cut. Needs a flush that fails for
    /// somebody else than the one who syncs.
    LossUntold => "loss-untold", Fault,
    /// A failed write of file data is taken for a good one: fsync returns, and the file holds what
    /// its blocks held before. Needs an error on a write to a data block.
    FailedWriteIgnored => "failed-write-ignored", Fault,
    /// A file's size is logged when it is written to, not when its data is home: after a cut it
    /// ends in zeros that nobody wrote. Shows when another file or a directory is synced between
    /// write and fsync.
    SizeBeforeData => "size-before-data", Cut,
    /// Growing past an unaligned end leaves what the page holds behind it (R16): a file cut short
    /// and grown again shows its old bytes once its pages are read anew.
    TailNotZeroed => "tail-not-zeroed", Nothing,
    /// A page's logged bytes are given up before its block is written (data/tail, invariant 2): after a cut, what was
    /// synced is what the block held before. Shows when an append was synced and its page is written back.
    TailEndedEarly => "tail-ended-early", Cut,
    /// A page's logged bytes outlive its way home (data/tail, invariant 2): they come back in place of what was
    /// written to its block later.
    TailOutlived => "tail-outlived", Nothing,
    /// Nobody waits for a range of pages that another holds (data/ranges, invariant 1): of two writes of the same pages each is
    /// seen in part.
    RangeIgnored => "range-ignored", Threads,
    /// Readers do not look whether somebody writes several pages (data/gate, invariant 3): they see half of a write.
    StoresUnseen => "stores-unseen", Threads,
    /// Write-back and a write past the cache do not wait for one another: what was in the cache lands on top of what was
    /// written later.
    DirectUnderHome => "direct-under-home", Threads,
    /// A write past the cache does not tell those who read its pages from their device meanwhile, neither while it runs nor by the
    /// pages' sets: they cache what was there before.
    LoadUndoomed => "load-undoomed", Threads,
    /// A read in flight caches what it has brought though its file may have been cut or written past the cache since it looked: pages are
    /// cached that are not the file's any more.
    FlightKeptLate => "flight-kept-late", Threads,
    /// Who cuts a file does not wait for its writes in flight: one lands in blocks that are another file's by then.
    FlightsNotAwaited => "flights-not-awaited", Nothing,
    /// A write in flight that has landed is not noted in its file: an fsync after it flushes nothing.
    FlightUnnoted => "flight-unnoted", Cut,
    /// A direct write into a hole maps its block before it has been written (data/fill, invariant 2): a cut shows what was there before.
    FilledBeforeWritten => "filled-before-written", Cut,
    /// An unlinked file in use is not listed among the orphans: a cut leaks the inode and its
    /// blocks.
    OrphanIntentDropped => "orphan-intent-dropped", Cut,
    /// A rename over a file does not write back the new one first: the name shows neither the old
    /// content nor the new.
    ReplaceBeforeData => "replace-before-data", Cut,
    /// An exchange writes back the file whose name is given first, and not the other.
    ExchangeBeforeData => "exchange-before-data", Cut,
    /// Renames of directories between directories do not exclude each other (R13): two of them
    /// make a cycle that no path reaches.
    RenameUnlocked => "rename-unlocked", Threads,
    /// A directory may be moved below itself (R13): it and all in it can no longer be reached.
    AncestryUnchecked => "ancestry-unchecked", Nothing,
    /// A rename believes what it found before it had the locks (R15): a name that was changed
    /// meanwhile is overwritten.
    NameNotRechecked => "name-not-rechecked", Threads,
    /// A writer does not wait for readers that entered its lock without taking it: they see half a
    /// change.
    ReadersNotAwaited => "readers-not-awaited", Threads,
    /// What one core added to a crowded directory's counts is not in them.
    TallyPartForgotten => "tally-part-forgotten", Threads,
    /// A core gives out what it holds for a nid although that node is gone (R11): the number's next owner
    /// is not found by this core.
    GoneNodeHeld => "gone-node-held", Threads,
    /// An exact stamp does not raise the floor of all stamps (times, invariant 1): a file that is changed after
    /// another gets an older time.
    FloorNotRaised => "floor-not-raised", Nothing,
    /// Who looks at a file's times leaves no trace (times, invariant 2): a change that follows at once leaves
    /// them as they were.
    LookForgotten => "look-forgotten", Nothing,
    /// A change of a directory's names does not look whether somebody was shown the directory meanwhile (tally,
    /// invariant 5): who lists it again finds other names under the same time.
    LookNotSeen => "look-not-seen", Threads,
    /// The timer leaves times of files that are only written over where they are, in memory: after a cut a file
    /// that was overwritten and synced long before has a time older still.
    TimesNotPersisted => "times-not-persisted", Cut,
    /// Change cookies go on after a crash as after a clean end (cookies, invariant 2): what they had been handed out
    /// for is lost, and others get them for something else.
    CookiesGoOn => "cookies-go-on", Cut,
    /// A transaction's names are logged, and durable, before its content: a cut leaves half of it.
    TransactionInParts => "transaction-in-parts", Cut,
    /// A transaction does not look again, under the locks, at what it relied on (tx, invariant 2): what others did meanwhile is lost, or a name
    /// refers to nothing.
    TransactionUnchecked => "transaction-unchecked", Threads,
    /// A relaxed transaction's whole pages are written to the files as single calls would: after a cut they are there without
    /// the rest of it.
    TransactionWrittenOver => "transaction-written-over", Cut,
    /// Pages of a transaction are merged with what their files hold before these are locked (data/transact, invariant 1): what is written
    /// beside them meanwhile is lost.
    TransactionMergedEarly => "transaction-merged-early", Threads,
    /// What a transaction changed is not taken back when it fails half way (large, invariant 1): it is seen, and partly logged with what comes
    /// later.
    TransactionNotUndone => "transaction-not-undone", Threads,
    /// The commit of an atomic write logs its pages in two operations (decision 0030): after a cut the file holds half of it.
    AtomicInParts => "atomic-in-parts", Cut,
    /// The commit of an atomic write returns before it is durable: after a cut it is gone.
    AtomicNotAwaited => "atomic-not-awaited", Cut,
    /// An atomic write that is dropped keeps the blocks that were promised to it (tx/atomic, invariant 1): space is gone until the next mount.
    AtomicPromiseKept => "atomic-promise-kept", Nothing,
    /// Batches fill logical blocks instead of physical ones (decision 0041): a cut in one damages the end of the one before, which was
    /// durable.
    SmallBatches => "small-batches", Cut,
    /// A write that a full array stops zeroes the first page of its file: what was there, and should be still, is gone.
    FullWriteZeroes => "full-write-zeroes", Nothing,
    /// A write that a full array stops is told of as an error of a device: a program gives up a file with which nothing is wrong.
    FullTakenForFailure => "full-taken-for-failure", Nothing,
    /// Blocks that go back to a file's promise after a write that failed are promised once more, to nobody: space is gone until the next mount.
    PromiseLeaked => "promise-leaked", Fault,
    /// A listing leaves out the names of a leaf that a device does not return, and succeeds: files seem to be gone.
    LeafLeftOut => "leaf-left-out", Fault,
    /// A transaction that has read a file conflicts, whether or not somebody has changed that: it never commits.
    ReadersConflict => "readers-conflict", Nothing,
    /// rmdir removes a directory that is not empty (R12): all in it is lost.
    FullDirectoryRemoved => "full-directory-removed", Nothing,
}

impl Canary {
    pub fn from_name(name: &str) -> Option<Canary> {
        Canary::ALL.iter().copied().find(|c| c.name() == name)
    }
}

#[cfg(feature = "simulate")]
mod switch {
    use super::Canary;
    use std::cell::Cell;

    thread_local! {
        static PLANTED: Cell<Option<Canary>> = const { Cell::new(None) };
    }

    /// Whether the caller is to do the wrong thing.
    #[inline]
    pub fn planted(canary: Canary) -> bool {
        PLANTED.get() == Some(canary)
    }

    /// Plants a canary, or none, for the calling thread and those it starts from now on.
    pub fn plant(canary: Option<Canary>) {
        PLANTED.set(canary);
    }

    /// What a new thread inherits.
    pub(crate) fn current() -> Option<Canary> {
        PLANTED.get()
    }
}

#[cfg(feature = "simulate")]
pub(crate) use switch::current;
#[cfg(feature = "simulate")]
pub use switch::{plant, planted};

/// Whether the caller is to do the wrong thing: never, in a build that serves users.
#[cfg(not(feature = "simulate"))]
#[inline(always)]
pub const fn planted(_: Canary) -> bool {
    false
}
