"""Numbers that `dask_gpurt.status` tells and that leave the process in no other way: (path, unit, meaning).

``*`` in a path stands for any key. See `dask_gpurt.observe.metrics` for the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

WORKER: tuple[tuple[str, str, str], ...] = (
    ("slots.seconds.*", "seconds", "Threads x time by use, of now; `slots` is the sum of the others"),
    ("slots.fetched.*.bytes", "bytes", "Fetched from that worker"),
    ("slots.fetched.*.seconds", "seconds", "Spent in those fetches, which may overlap"),
    ("slots.fetched.*.requests", "count", "Of those fetches"),
    ("slots.errors", "count", "Exceptions while slots were measured"),
    ("shuffle.runs", "count", "Shuffles that this worker took part in"),
    ("shuffle.runs_closed", "count", "Those that have ended"),
    ("shuffle.inputs", "count", "Input partitions split"),
    ("shuffle.outputs", "count", "Output partitions assembled"),
    ("shuffle.messages_sent", "count", "Messages to other workers"),
    ("shuffle.messages_received", "count", "Messages from other workers"),
    ("shuffle.shards_sent", "count", "Parts of inputs sent to other workers"),
    ("shuffle.bytes_sent", "bytes", "Sent to other workers"),
    ("shuffle.bytes_received", "bytes", "Received from other workers"),
    ("shuffle.bytes_self", "bytes", "Handed to this worker itself"),
    ("shuffle.chunks", "count", "Chunks put into the store"),
    ("shuffle.duplicates", "count", "Shards that came twice, and were dropped"),
    ("shuffle.refused", "count", "Messages that did not parse or failed their checksum"),
    ("shuffle.restarts", "count", "Whole shuffles that this worker started over"),
    ("shuffle.fallbacks", "count", "Runs without a tier store, which used memory alone"),
    ("shuffle.seconds_partition", "seconds", "Spent splitting inputs"),
    ("shuffle.seconds_encode", "seconds", "Spent encoding shards"),
    ("shuffle.seconds_send", "seconds", "Spent sending, waiting for acknowledgement included"),
    ("shuffle.seconds_put", "seconds", "Spent storing chunks, waiting for room included"),
    ("shuffle.seconds_assemble", "seconds", "Spent assembling outputs"),
    ("tiers.host_bytes", "bytes", "Held in host memory"),
    ("tiers.host_limit_bytes", "bytes", "Budget of host memory"),
    ("tiers.moving_bytes", "bytes", "Being written from host memory to disk"),
    ("tiers.loading_bytes", "bytes", "Being read from disk"),
    ("tiers.reserved_bytes", "bytes", "Host memory promised to reads under way"),
    ("tiers.disk_bytes", "bytes", "Held on disk"),
    ("tiers.disk_limit_bytes", "bytes", "Budget of disk"),
    ("tiers.disks.*.used_bytes", "bytes", "Held in that folder, dead records included"),
    ("tiers.disks.*.write_bytes_per_second", "bytes/s", "Bandwidth of writes there, as measured"),
    ("tiers.disks.*.read_bytes_per_second", "bytes/s", "Bandwidth of reads there, as measured"),
    (
        "tiers.disks.*.compressed_frames.*",
        "count",
        "Frames written there, by codec; not counted where there is none",
    ),
    ("tiers.disks.*.compactions", "count", "Files of small values whose living ones were moved elsewhere"),
    ("tiers.disks.*.errors.*", "count", "Failures that set the folder aside, by kind"),
    ("tiers.spilled_keys", "count", "Task results that are not in host memory"),
    ("tiers.spilled_memory_bytes", "bytes", "What those take in memory"),
    ("tiers.spilled_disk_bytes", "bytes", "What those take on disk"),
    ("tiers.shard_chunks", "count", "Chunks of running shuffles"),
    ("tiers.shard_disk_bytes", "bytes", "What of those is on disk"),
    ("tiers.entries.*", "count", "Entries by state"),
    ("tiers.admission_wait_seconds", "seconds", "Spent by reads that waited for room in host memory"),
    ("tiers.admission_waits", "count", "Reads that waited"),
    ("tiers.admission_forced", "count", "Reads let in above the mark, as nothing could be moved out"),
    ("tiers.admission_queue", "count", "Reads that wait now"),
    ("tiers.memory_alarms", "count", "Times that process memory passed its limit"),
    ("tiers.fallbacks.*", "count", "Calls left to Dask, by call"),
    ("tiers.lost_keys", "count", "Keys given up, to be computed again"),
    ("tiers.returned_tasks", "count", "Tasks handed back because an input was gone"),
    ("tiers.written.bytes", "bytes", "Written to disk"),
    ("tiers.written.ops", "count", "Writes"),
    ("tiers.written.io_seconds", "seconds", "Spent in writes, without encoding"),
    ("tiers.written.codec_seconds", "seconds", "Spent encoding"),
    ("tiers.read.bytes", "bytes", "Read from disk"),
    ("tiers.read.ops", "count", "Reads"),
    ("tiers.read.io_seconds", "seconds", "Spent in reads, without decoding"),
    ("tiers.read.codec_seconds", "seconds", "Spent decoding"),
    ("tiers.write_errors.*", "count", "Failed writes, by kind"),
    ("tiers.read_errors.*", "count", "Failed reads, by kind"),
    ("tiers.sync_reads", "count", "Values read on the caller's thread"),
    ("tiers.clean_drops", "count", "Values that left memory without a write, as a copy was on disk"),
    ("tiers.checksum_failures", "count", "Copies whose checksum was wrong"),
    ("tiers.lost", "count", "Stored values that could not be read back"),
    ("tiers.decode_errors", "count", "Stored values whose own code raised"),
    ("tiers.loop_blocked_seconds.sum", "seconds", "The event loop spent in the tiers"),
    ("tiers.loop_blocked_seconds.max", "seconds", "The longest of these times"),
    ("tiers.evictions.*", "count", "Values chosen to leave memory, by what decided"),
    ("tiers.hints.*", "count", "Next uses received, unknown, advanced, guessed, expired; exceptions"),
    ("tiers.hints.evictions_by_hint_share", "ratio", "Evictions that a next use decided"),
    ("tiers.local_uses.*", "count", "Tasks that are here and have not run; exceptions"),
    ("tiers.input_wait_seconds", "seconds", "Tasks waited for their inputs to come to memory, summed"),
    ("tiers.prefetch.share", "ratio", "Of the host budget, for values read ahead"),
    ("tiers.prefetch.queue", "count", "Tasks whose inputs may be read ahead"),
    ("tiers.prefetch.ahead_bytes", "bytes", "Read ahead, or being read, and not used yet"),
    ("tiers.prefetch.started", "count", "Values read ahead; the sum of the next four, and those not used yet"),
    ("tiers.prefetch.started_bytes", "bytes", "Of those"),
    ("tiers.prefetch.in_time", "count", "Were in memory when their task came"),
    ("tiers.prefetch.late", "count", "Were still being read when their task came"),
    ("tiers.prefetch.early", "count", "Left memory again before their task came"),
    ("tiers.prefetch.wasted", "count", "Were deleted, or could not be read"),
    ("tiers.prefetch.bytes.*", "bytes", "The same by outcome"),
    ("tiers.prefetch.rests", "count", "Times that reading ahead paused, as it had been wrong"),
    ("tiers.prefetch.exceptions", "count", "Exceptions while it was decided what to read ahead"),
    ("tiers.below.*.used_bytes", "bytes", "Held on that tier; tiers.below is told with an object store only"),
    ("tiers.below.*.limit_bytes", "bytes", "Budget of that tier"),
    ("tiers.below.*.writes", "count", "Values that it took"),
    ("tiers.below.*.written_bytes", "bytes", "Of those"),
    ("tiers.below.*.full", "count", "Values that it had no room for"),
    ("tiers.below.*.failed_writes", "count", "Writes that failed otherwise"),
    ("tiers.below.*.skipped_writes", "count", "Values not offered to it, as it was set aside"),
    ("tiers.below.*.resting_seconds", "seconds", "For which it is set aside still"),
    (
        "tiers.below.object.*",
        "count",
        "Requests of the object store by kind; bytes and seconds as named",
    ),
    (
        "tiers.shared.*",
        "count",
        "Copies that outlive this worker: reported, adopted, refused; leases; exceptions",
    ),
    ("tiers.device.*", "count", "Values in device memory, tasks run again alone; bytes as named"),
    (
        "tiers.device.out_of_memory.*",
        "count",
        "Allocations on the device that failed at first, and their outcome",
    ),
    ("tiers.device.to_and_from_device.*", "count", "What left the device and came back; bytes and seconds as named"),
    ("tiers.device.below.*.*", "count", "The same for each tier below the device"),
)

SCHEDULER: tuple[tuple[str, str, str], ...] = (
    ("ledger.busy_seconds", "seconds", "Threads x time in which tasks ran, those included that have not ended"),
    ("ledger.workers.*.slot_seconds", "seconds", "The same sums for each worker"),
    ("ledger.workers.*.busy_seconds", "seconds", "The same sums for each worker"),
    ("ledger.workers.*.causes.*", "seconds", "The same sums for each worker"),
    ("next_use.workers", "count", "Workers that take next uses"),
    ("next_use.sent.messages", "count", "Messages with next uses"),
    ("next_use.transitions", "count", "Transitions looked at"),
    ("next_use.transition_us", "microseconds", "Time for one, without what is sent"),
    ("next_use.flushes", "count", "Times that next uses were sent"),
    ("next_use.total_us_per_transition", "microseconds", "Time for one, with what is sent"),
    ("next_use.tables.*", "count", "Entries of its tables"),
    ("placement.decisions.total", "count", "Decisions; moved and local are parts of it"),
    ("placement.decisions.logged", "count", "Decisions that `explain` knows"),
    ("placement.decisions.finished", "count", "Finished decisions that the next four are made of"),
    ("placement.decisions.mean_predicted_seconds", "seconds", "From the decision to the result, as predicted"),
    ("placement.decisions.mean_actual_seconds", "seconds", "From the decision to the result, as it was"),
    ("placement.decisions.median_ratio", "ratio", "Actual over predicted"),
    ("placement.decisions.inputs_error_p90_seconds", "seconds", "90th percentile of how far off transfers were"),
    ("placement.prices", "count", "Prices told to work stealing"),
    ("placement.roots.groups", "count", "Groups of root tasks closed"),
    ("placement.roots.pulled", "count", "Root tasks handed to the owner of their group"),
    ("placement.microseconds.over_budget", "count", "Times that decisions were left to Dask for a while"),
    ("placement.links.*.dropped", "count", "Transfers not believed"),
    ("placement.prefixes", "count", "Kinds of task whose duration is known"),
    ("placement.tables.*", "count", "Entries of its tables"),
    ("shared_copies.workers", "count", "Workers whose copies in the object store are known"),
    ("shared_copies.known_copies", "count", "Such copies"),
    ("shared_copies.adopted_keys", "count", "Results of lost workers that others took over without computing them"),
    ("shared_copies.adopted_bytes", "bytes", "Of those"),
    ("shared_copies.lost_keys", "count", "Results of lost workers that had no copy there"),
    ("shared_copies.swept_objects", "count", "Objects deleted for workers that are gone"),
    ("shared_copies.expired_prefixes", "count", "Leftovers of dead clusters that were deleted"),
    ("shared_copies.exceptions", "count", "Exceptions in this part"),
    ("shuffle.workers_able", "count", "Workers that can run the engine's shuffles"),
    ("trace.records", "count", "Records of the trace that is being written"),
    ("trace.lost_records", "count", "Records that were dropped, as the disk was too slow"),
    ("trace.bytes", "bytes", "Written into the trace"),
    ("trace.errors", "count", "Exceptions while the trace was written"),
)


def numbers(tree: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    """(path, number) for every number in nested mappings, and lists of mappings, without booleans."""
    for key, value in tree.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            yield from numbers({str(i): item for i, item in enumerate(value)}, (*path, str(key)))
        elif isinstance(value, dict):
            yield from numbers(value, (*path, str(key)))
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield (*path, str(key)), value


def known(path: Sequence[str], patterns: Sequence[str]) -> bool:
    """Does one of the patterns stand for this path?"""
    for pattern in patterns:
        parts = pattern.split(".")
        if len(parts) == len(path) and all(p in ("*", name) for p, name in zip(parts, path, strict=True)):
            return True
    return False
