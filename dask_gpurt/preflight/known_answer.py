"""A computation of 2^20 rows whose answer is known: partition, sort, join, group-by and copy. It finds a core that
miscounts, and its time is compared between nodes of one class.

Integers only, in numpy, little-endian: their results are the same in every version and on every architecture. Each
step has one right result. The sorts are stable, the keys are distinct, and sums of unsigned integers wrap.

The time is that which neighbours do not explain. The kernel counts how long a thread was ready to run and had no CPU.
That is taken off, so that workers that start beside each other on one host are not slow. A limit of the control
group, which counts as such a wait too, is put back on: it is the worker's own.

It takes 0.15 s of one core, and 50 MB for that time.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from dask_gpurt.backends.system import System

ROWS = 1 << 20
#: xxh3-128 of the results
ANSWER = "187149c066bd75de4f272711ed588431"
#: bytes of memory that it takes at the most
MEMORY_BYTES = 50_000_000


@dataclasses.dataclass(frozen=True)
class Measured:
    """One run."""

    digest: str
    #: by the clock
    seconds: float
    #: without waiting for CPUs that others had
    own_seconds: float


def compute() -> str:
    """The answer of this machine."""
    import numpy as np

    hashed = xxhash.xxh3_128()

    def add(values: npt.NDArray[np.uint64 | np.int64]) -> None:
        hashed.update(values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes())

    rows = np.arange(ROWS, dtype=np.uint64)
    keys = rows * np.uint64(0x9E3779B97F4A7C15)  # odd, so all are distinct
    keys ^= keys >> np.uint64(29)
    # Partition, as a shuffle does: rows of one output together, in their order.
    order = np.argsort((keys % np.uint64(16)).astype(np.uint8), kind="stable")
    keys, rows = keys[order], rows[order]
    del order
    add(keys)
    add(rows)
    # Sort.
    by_key = np.sort(keys, kind="stable")
    add(by_key)
    # Join: where each fourth key is among the sorted ones.
    add(np.searchsorted(by_key, keys[::4]).astype(np.int64))
    # Group by 2^12 values, and sum.
    groups = (keys >> np.uint64(52)).astype(np.uint16)
    order = np.argsort(groups, kind="stable")
    del keys, by_key
    groups, rows = groups[order], rows[order]
    del order
    first = np.flatnonzero(np.diff(groups, prepend=np.uint16(groups[0] + 1)))
    add(np.add.reduceat(rows, first))
    # Copy.
    add(rows.copy())
    return hashed.hexdigest()


def measure(system: System) -> Measured:
    """Compute once, in this thread."""
    start, waited, throttled = time.perf_counter(), system.waited_seconds(), system.throttled_seconds()
    digest = compute()
    seconds = time.perf_counter() - start
    others = system.waited_seconds() - waited - (system.throttled_seconds() - throttled)
    return Measured(digest, seconds, seconds - min(seconds, max(0.0, others)))
