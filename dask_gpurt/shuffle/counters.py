"""What the shuffle's runs on one worker count.

Workers are keyed weakly: many live and die in one process in tests and with in-process clusters.
"""

from __future__ import annotations

import dataclasses
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from dask_gpurt.shuffle.transport.planes import PLANES

if TYPE_CHECKING:
    from distributed.worker import Worker

#: shuffles of which it is known how often they were restarted; a worker lives for months
RESTARTED = 100
#: for which a restart counts. A query that comes every day has the same shuffle each time
RESTARTED_SECONDS = 600.0


@dataclasses.dataclass
class ShuffleCounters:
    """What the runs of one worker did. Bytes and seconds are sums over all runs since the worker started."""

    #: runs created
    runs: int = 0
    #: runs closed
    runs_closed: int = 0
    #: input partitions split
    inputs: int = 0
    #: output partitions assembled
    outputs: int = 0
    #: messages sent to peers, resends included
    messages_sent: int = 0
    #: shards (one input for one worker) sent to peers
    shards_sent: int = 0
    bytes_sent: int = 0
    #: bytes handed to this worker itself, without a comm
    bytes_self: int = 0
    messages_received: int = 0
    bytes_received: int = 0
    #: chunks put into the store
    chunks: int = 0
    #: shards that had been received before, and were dropped
    duplicates: int = 0
    #: messages refused because they did not parse or failed their checksum
    refused: int = 0
    #: messages that went by a transport of ours and not by distributed's comms
    messages_direct: int = 0
    bytes_direct: int = 0
    #: bytes that compression took off messages between hosts
    bytes_squeezed: int = 0
    #: messages sent again by distributed's comms, after a transport of ours lost or the peer refused them
    resent_safe: int = 0
    #: links between workers that ended out of order
    links_lost: int = 0
    #: messages by distributed's comms that came without credit (a retry, or one larger than the budget allows)
    uncredited: int = 0
    #: errors in a transport
    transport_errors: int = 0
    #: restarts of a whole shuffle that this worker asked for (an output asked for again, or lost on a tier)
    restarts: int = 0
    #: of those, refused by the scheduler: it had restarted or forgotten the shuffle already
    restarts_refused: int = 0
    #: inputs whose values could not be counted: a skew is then reported without a value
    skew_unknown: int = 0
    #: values of columns that Arrow cannot hold, which were sent pickled
    values_pickled: int = 0
    #: errors while a run closed; what it kept is dropped all the same
    close_errors: int = 0
    #: times a run of this worker went on without a worker that was lost
    amendments: int = 0
    #: shards sent again because their receiver was lost
    shards_resent: int = 0
    #: outputs handed over to a less loaded worker
    outputs_handed: int = 0
    #: keys of one side of a join that were hashed for a filter of the other side
    join_keys: int = 0
    #: filters that came, and rows that were looked up in one
    join_filters: int = 0
    join_rows_in: int = 0
    #: rows that could not match and were not sent, and their bytes in memory, about
    join_rows_dropped: int = 0
    join_bytes_dropped: int = 0
    #: CPU time of hashing, making filters and looking rows up
    join_seconds: float = 0.0
    #: filters given up here, by reason
    join_given_up: dict[str, int] = dataclasses.field(default_factory=dict)
    #: runs that had no tier store and used a plain one in memory
    fallbacks: int = 0
    seconds_partition: float = 0.0
    seconds_encode: float = 0.0
    seconds_send: float = 0.0
    #: in threads, of the sends
    seconds_squeeze: float = 0.0
    seconds_put: float = 0.0
    seconds_assemble: float = 0.0
    #: the last traceback of an error in our code, as text
    last_error: str = ""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        #: of the last `RESTARTED` shuffles of which this worker had runs restarted: those runs, and when that was
        self._restarted: dict[str, dict[int, float]] = {}

    def add(self, **amounts: float) -> None:
        """Add to counters; from any thread."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self, name, getattr(self, name) + amount)

    def gave_up(self, why: str) -> None:
        """Count a filter of a join that was given up."""
        with self._lock:
            self.join_given_up[why] = self.join_given_up.get(why, 0) + 1

    def restarted(self, shuffle_id: str, run_id: int) -> int:
        """Count a run that has to be restarted, once for all threads; how many of its shuffle there were of late."""
        now = time.monotonic()
        with self._lock:
            runs = self._restarted.pop(shuffle_id, {})
            if len(self._restarted) >= RESTARTED:
                del self._restarted[next(iter(self._restarted))]
            self._restarted[shuffle_id] = runs  # the newest
            runs.setdefault(run_id, now)
            return sum(now - when < RESTARTED_SECONDS for when in runs.values())

    def heartbeat(self) -> dict[str, int]:
        """Figures for every heartbeat: flat, and cheap to get."""
        return {
            "shuffle_sent_bytes": self.bytes_sent,
            "shuffle_received_bytes": self.bytes_received,
            "shuffle_kept_bytes": self.bytes_self,
            "shuffle_active_runs": self.runs - self.runs_closed,
            "shuffle_outputs": self.outputs,
            "shuffle_restarts": self.restarts,
        }

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        with self._lock:
            return dataclasses.asdict(self)


_counters: weakref.WeakKeyDictionary[Worker, ShuffleCounters] = weakref.WeakKeyDictionary()


def counters_of(worker: Worker) -> ShuffleCounters:
    """The counters of a worker, made on first use."""
    return _counters.setdefault(worker, ShuffleCounters())


def corrupt_messages(worker: Worker) -> dict[str, int]:
    """Peer -> how many messages from it did not parse or failed a checksum; only peers with some."""
    plane = PLANES.get(worker)
    return {} if plane is None else dict(plane.links.corrupt)


def worker_statistics(worker: Worker) -> dict[str, Any]:
    """What the shuffle did on one worker: `ShuffleCounters`, and `Plane.statistics` as ``transport``; plain JSON."""
    plane = PLANES.get(worker)
    return {**counters_of(worker).as_dict(), "transport": None if plane is None else plane.statistics()}
