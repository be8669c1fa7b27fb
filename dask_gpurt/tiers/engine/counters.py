"""What the engine counts."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from dask_gpurt.tiers.storage.handle import IoCost


class LoopTime:
    """How long our own code holds the event loop. A context manager around each way into it; nested ones count once.

    Two looks at the clock per entry (well below a microsecond): cheap enough to be always on.
    """

    __slots__ = ("_began", "_depth", "max_seconds", "sum_seconds")

    def __init__(self) -> None:
        self._depth = 0
        self._began = 0.0
        #: of all holds
        self.sum_seconds = 0.0
        #: of the longest hold
        self.max_seconds = 0.0

    def __enter__(self) -> None:
        if not self._depth:
            self._began = time.perf_counter()
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._depth -= 1
        if not self._depth:
            seconds = time.perf_counter() - self._began
            self.sum_seconds += seconds
            self.max_seconds = max(self.max_seconds, seconds)


@dataclasses.dataclass
class Counters:
    """Ever growing, since the engine was made. Written on the loop thread."""

    #: values read on the caller's thread; on the event loop that blocks it
    sync_reads: int = 0
    #: evictions that needed no write
    clean_drops: int = 0
    #: values that a task had got, and that were found to be what their copy is: they are clean again
    unchanged: int = 0
    #: copies with a wrong length or checksum
    checksum_failures: int = 0
    #: stored values that could not be read back
    lost: int = 0
    #: stored values whose own code raised while they were rebuilt
    decode_errors: int = 0
    write_errors: Counter[str] = dataclasses.field(default_factory=Counter)
    read_errors: Counter[str] = dataclasses.field(default_factory=Counter)
    #: (activity, unit) -> value, with the labels of distributed's own spilling
    cumulative: defaultdict[tuple[str, str], float] = dataclasses.field(default_factory=lambda: defaultdict(float))
    #: values that were asked for and were in memory, and their bytes
    memory_reads: int = 0
    memory_read_bytes: int = 0
    #: time on the event loop; the synchronous slow path is in it
    loop_time: LoopTime = dataclasses.field(default_factory=LoopTime)
    #: called with each write as (label, value, unit); for Dask's fine performance metrics
    listener: Callable[[str, float, str], None] | None = None

    def written(self, cost: IoCost) -> None:
        """Count a write."""
        self._io("disk-write", "serialize", cost)

    def read(self, cost: IoCost) -> None:
        """Count a read."""
        self._io("disk-read", "deserialize", cost)

    def as_stock(self) -> dict[tuple[str, str], float]:
        """`cumulative` with all that distributed's own store counts."""
        if self.memory_reads:
            self.cumulative["memory-read", "count"] = self.memory_reads
            self.cumulative["memory-read", "bytes"] = self.memory_read_bytes
        return self.cumulative

    def _io(self, io_label: str, codec_label: str, cost: IoCost) -> None:
        for label, value, unit in (
            (io_label, cost.io_seconds, "seconds"),
            (io_label, 1, "count"),
            (io_label, cost.nbytes, "bytes"),
            (codec_label, cost.codec_seconds, "seconds"),
        ):
            self.cumulative[label, unit] += value
            if self.listener is not None and io_label == "disk-write":
                self.listener(label, value, unit)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON."""
        get = self.cumulative.get
        out: dict[str, Any] = {}
        for word, io_label, codec_label in (
            ("written", "disk-write", "serialize"),
            ("read", "disk-read", "deserialize"),
        ):
            out[word] = {
                "bytes": int(get((io_label, "bytes"), 0)),
                "ops": int(get((io_label, "count"), 0)),
                "io_seconds": get((io_label, "seconds"), 0.0),
                "codec_seconds": get((codec_label, "seconds"), 0.0),
            }
        out.update(
            sync_reads=self.sync_reads,
            clean_drops=self.clean_drops,
            unchanged=self.unchanged,
            checksum_failures=self.checksum_failures,
            lost=self.lost,
            decode_errors=self.decode_errors,
            write_errors=dict(self.write_errors),
            read_errors=dict(self.read_errors),
            loop_blocked_seconds={"sum": self.loop_time.sum_seconds, "max": self.loop_time.max_seconds},
        )
        return out
