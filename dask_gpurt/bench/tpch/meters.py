"""How many bytes a query moved, from the workers' own counters.

What is counted (bytes, all workers together):

``network``
    Received from other workers: keys fetched by tasks and by replication (in-memory size, as Dask accounts for them),
    plus shards of a peer-to-peer shuffle that went to another worker (as serialised).
``spilled``
    Written to disk (as written: compressed where it is): keys evicted from memory, plus the shards that a shuffle
    stores in files.
``shuffled``
    Shards produced by peer-to-peer shuffles, those that stay on their worker included (as serialised).
``kept``
    Columns of files that were not decoded, as a worker of the extension had kept them (as decoded).
``peak``
    Resident memory of the fullest worker process at its highest (not a sum). The kernel keeps it, and `read` sets it
    back.

Where the numbers come from. Keys: `Worker.transfer_outgoing_bytes_total`; it is the only such counter that neither
decays nor is cut off (`transfer_incoming_log` keeps 1,000 entries). It includes what the client fetches, which
`Meters` subtracts for the answer it is told of. Spilling: `worker.data.cumulative_metrics`, which stock's SpillBuffer
and the extension's store both keep. Shuffles: `Worker.digests_total` (``("p2p", span, where, label, unit)``). Stock
sends shards to its own worker through the same buffer as to others and counts them together, so `watch_stock_shuffle`
wraps that buffer to tell them apart by the address; it only counts. It is installed on every cluster alike.
The extension's shuffle reports what it encodes for others in the same digests. What its messages weigh when received,
and what it hands to its own worker without a message, it counts itself; both are read from its worker part. It keeps
shards in its store, whose spilling is counted with that of keys.

Counters die with their process. A worker that was restarted between two snapshots counts from zero, and what the dead
one had counted since the first snapshot is lost: `Traffic.complete` is then False.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dask_gpurt.bench.seam import watch_stock_shuffle

if TYPE_CHECKING:
    from distributed import Client, Worker


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes between two snapshots, over all workers."""

    #: keys received from other workers, in memory size
    keys: int
    #: serialised shards received from other workers
    shards_received: int
    #: serialised shards produced
    shuffled: int
    #: keys written to disk
    keys_spilled: int
    #: shards written to disk
    shards_spilled: int
    #: columns of files that were found decoded
    kept: int = 0
    #: resident memory of the fullest worker's process at its highest; 0: the kernel does not say
    peak: int = 0
    #: False if a worker was lost in between, and its counts with it
    complete: bool = True

    @property
    def network(self) -> int:
        """Bytes received from other workers."""
        return self.keys + self.shards_received

    @property
    def spilled(self) -> int:
        """Bytes written to disk."""
        return self.keys_spilled + self.shards_spilled

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "network": self.network, "spilled": self.spilled}


#: worker's address -> (its process's identity, counter name -> bytes)
Snapshot = dict[str, tuple[str, dict[str, int]]]


class Meters:
    """Reads the counters of one cluster; `start` then `stop` around what is to be measured."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._before: Snapshot | None = None

    def start(self) -> None:
        self._before = self._snapshot()

    def stop(self, *, fetched: int = 0) -> Traffic:
        """Bytes since `start`. `fetched`: bytes of keys that the client took from the workers meanwhile."""
        if self._before is None:
            raise RuntimeError("Meters.stop without start; call start before what is to be measured")
        before, self._before = self._before, None
        return difference(before, self._snapshot(), fetched=fetched)

    def _snapshot(self) -> Snapshot:
        replies = self._client.run(read, on_error="return")
        out: Snapshot = {}
        for address, reply in replies.items():
            if isinstance(reply, OSError):
                continue  # the worker died during the call; the others' counters are still wanted
            if isinstance(reply, BaseException):
                raise RuntimeError(f"reading the counters of worker {address} failed") from reply
            out[address] = reply
        return out


def difference(before: Snapshot, after: Snapshot, *, fetched: int = 0) -> Traffic:
    """What was counted between two snapshots."""
    total = dict.fromkeys(_COUNTERS, 0)
    complete = True
    for address, (process, counts) in after.items():
        known = before.get(address)
        base = known[1] if known is not None and known[0] == process else dict.fromkeys(_COUNTERS, 0)
        for name in _COUNTERS:
            total[name] += counts[name] - base[name]
    for address, (process, _) in before.items():
        if address not in after or after[address][0] != process:
            complete = False
    total["keys"] = max(0, total["keys"] - fetched)
    peak = max((counts["peak"] for _, counts in after.values()), default=0)
    return Traffic(**total, peak=peak, complete=complete)


_COUNTERS = ("keys", "shards_received", "shuffled", "keys_spilled", "shards_spilled", "kept")


def read(dask_worker: Worker) -> tuple[str, dict[str, int]]:
    """Runs on each worker: its identity and its counters since it started."""
    sent = watch_stock_shuffle()
    shuffled = shards_spilled = 0.0
    for name, value in dask_worker.digests_total.items():
        if isinstance(name, tuple) and name[0] == "p2p" and name[-1] == "bytes":
            # (p2p, span, where, label, bytes): where is foreground, background-comms or background-disk
            where, label = name[2], name[3]
            if label == "shards":
                shuffled += value
            elif where == "background-disk" and label == "disk-write":
                shards_spilled += value
    spill_metrics = getattr(dask_worker.data, "cumulative_metrics", None) or {}
    counts = {
        "keys": dask_worker.transfer_outgoing_bytes_total,
        "shards_received": sent["peers"],
        "shuffled": int(shuffled),
        "keys_spilled": int(spill_metrics.get(("disk-write", "bytes"), 0)),
        "shards_spilled": int(shards_spilled),
        "kept": 0,
        "peak": _peak(),
    }
    for name, value in _of_extension(dask_worker).items():
        counts[name] += value
    return dask_worker.id, counts


def _peak() -> int:
    """The highest resident memory of this process since the last call, bytes; 0 where the kernel does not say."""
    try:
        status = Path("/proc/self/status").read_text()
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # not Linux, or a container that forbids it: then the peak would be of all queries so far
        return 0
    found = re.search(r"^VmHWM:\s*(\d+) kB", status, re.MULTILINE)
    return int(found.group(1)) * 1024 if found else 0


def _of_extension(dask_worker: Worker) -> dict[str, int]:
    """Bytes that the extension counted on this worker; nothing without it."""
    # Not imported for this: a stock worker must not load the extension because it was measured.
    counters = sys.modules.get("dask_gpurt.shuffle.counters")
    if counters is None:
        return {}
    statistics = counters.worker_statistics(dask_worker)
    # Its digests have the shards that it encodes for others; those for its own worker are handed over as they are.
    reads = sys.modules.get("dask_gpurt.tiers.read_cache.seam")
    return {
        "shards_received": statistics["bytes_received"],
        "shuffled": statistics["bytes_self"],
        "kept": 0 if reads is None else reads.CACHE.spared_bytes,
    }
