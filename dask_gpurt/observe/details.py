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
    ("shuffle.messages_direct", "count", "Messages that went by a transport of this package, not by Dask's comms"),
    ("shuffle.bytes_direct", "bytes", "What those held"),
    ("shuffle.resent_safe", "count", "Messages sent again by Dask's comms"),
    ("shuffle.links_lost", "count", "Links to other workers that ended out of order"),
    ("shuffle.uncredited", "count", "Messages by Dask's comms that came without credit"),
    ("shuffle.transport_errors", "count", "Exceptions in transports"),
    ("shuffle.transport.transports.*.links_out", "count", "Links to other workers that are open"),
    ("shuffle.transport.transports.*.links_in", "count", "Links from other workers that are open"),
    ("shuffle.transport.transports.*.strangers", "count", "Connections refused, as they proved no part in a shuffle"),
    ("shuffle.transport.transports.*.lost", "count", "Links that ended out of order"),
    ("shuffle.transport.transports.*.errors", "count", "Exceptions in this transport"),
    ("shuffle.transport.transports.*.requests", "count", "UCX requests under way"),
    ("shuffle.transport.transports.*.buffers_reused", "count", "Messages received into memory used before"),
    ("shuffle.transport.transports.*.buffers_fresh", "count", "Messages received into fresh memory"),
    ("shuffle.transport.transports.*.buffers_idle_bytes", "bytes", "Receive memory kept for later"),
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
    ("placement.microseconds.given_up", "count", "Decisions that took longer than their budget, left to Dask"),
    ("placement.microseconds.full_seconds", "count", "Seconds in which decisions had used up their share"),
    ("placement.governor.trials", "count", "Times that half of the decisions were left to Dask, to compare"),
    ("placement.governor.retirements", "count", "Times that placement was left to Dask as it lost the comparison"),
    ("placement.governor.left_to_stock", "count", "Decisions left to Dask meanwhile"),
    ("placement.governor.left_by_lot", "count", "Decisions left to Dask by lot during trials"),
    ("placement.governor.open", "count", "Judged decisions whose tasks are not finished"),
    ("placement.governor.prefixes.*.observed", "count", "Judged decisions of that prefix"),
    ("placement.governor.prefixes.*.median_ratio", "ratio", "Actual over predicted seconds"),
    ("placement.governor.prefixes.*.mad_ratio", "ratio", "Median deviation from that"),
    ("placement.governor.prefixes.*.median_seconds", "seconds", "From the decision to the result"),
    ("placement.governor.prefixes.*.median_moved_bytes", "bytes", "Of inputs that had to be fetched"),
    ("placement.shadow.agreed", "count", "Decisions in shadow mode that Dask took alike"),
    ("placement.shadow.differed", "count", "Decisions in shadow mode that Dask took otherwise"),
    ("placement.shadow.passed", "count", "Decisions in shadow mode that were not compared"),
    ("placement.shadow.predicted_cost_seconds", "seconds", "What the model expects to gain, its whole cost"),
    ("placement.shadow.predicted_finish_seconds", "seconds", "What the model expects to gain, time to the results"),
    ("placement.shadow.predicted_moved_bytes", "bytes", "What the model expects to save"),
    ("placement.stealing.opinions.*", "count", "Second opinions on stealing, by what they were"),
    ("placement.stealing.rescued", "count", "Tasks asked back from slow workers"),
    ("placement.copies.*", "count", "Second copies of stragglers, by what became of them"),
    ("placement.copies.forbidden.*", "count", "Stragglers that must not run twice, by reason"),
    ("placement.routes_shortened", "count", "Tasks told of near holders only"),
    ("placement.replicas.named", "count", "Replicas named for dropping"),
    ("placement.replicas.not_the_fullest", "count", "Of those, by other reasons than the fullest worker"),
    ("placement.links.*.dropped", "count", "Transfers not believed"),
    ("placement.prefixes", "count", "Kinds of task whose duration is known"),
    ("placement.tables.*", "count", "Entries of its tables"),
    ("shuffle.pinned", "count", "Outputs sent to their worker at once"),
    ("shuffle.workers_able", "count", "Workers that can run the engine's shuffles"),
    ("trace.records", "count", "Records of the trace that is being written"),
    ("trace.lost_records", "count", "Records that were dropped, as the disk was too slow"),
    ("trace.bytes", "bytes", "Written into the trace"),
    ("trace.errors", "count", "Exceptions while the trace was written"),
)


def numbers(tree: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    """(path, number) for every number in nested mappings, without booleans."""
    for key, value in tree.items():
        if isinstance(value, dict):
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
