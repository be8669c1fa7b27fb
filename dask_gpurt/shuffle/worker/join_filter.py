"""The keys of a join on one worker: `KeyCollector` keeps those of one side, `RowFilter` drops rows of the other.

Theory of operation. `KeyCollector.add` hashes the keys of every input that is split here (`rows.join_keys`); when the
side is complete the scheduler asks for their number, then for their bits (`scheduler.join_filters`). `RowFilter` gets
the union of all workers and says for each later input which rows may match. It never waits for one.

Both give up for themselves, and count why:

- keys of a partition that has another dtype than its meta are not hashed, and rows of such a partition not dropped;
- a side of more than `MOST_ROWS` rows here;
- a filter that costs more than it saves, by the inputs so far: looking up a row costs what it takes, and a row that is
  dropped saves its splitting and encoding. What sending, receiving, assembling and merging it take is a margin.
"""

from __future__ import annotations

import dataclasses
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any, ClassVar

from dask_gpurt.shuffle.protocol import messages
from dask_gpurt.shuffle.rows.join_keys import Keys
from dask_gpurt.shuffle.rows.key_filter import KeyFilter, bits_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    import numpy as np
    import pandas as pd

    from dask_gpurt.shuffle.counters import ShuffleCounters
    from dask_gpurt.shuffle.protocol.join_plan import JoinSide

#: rows of a side whose hashes one worker keeps: 16 MB
MOST_ROWS = 4 << 20


class KeyCollector:
    """The keys of the inputs of one side that were split here. `add` and `bits` in any thread.

    Parameters
    ----------
    columns
        The key columns.
    meta
        Empty input partition of the side.
    counters
        `join_keys`, `join_seconds`, `join_given_up`.
    """

    def __init__(self, columns: Sequence[Any], meta: pd.DataFrame, counters: ShuffleCounters) -> None:
        self._columns, self._meta, self._counters = columns, meta, counters
        self._lock = threading.Lock()
        #: input partition -> its keys; a second attempt replaces the first
        self._keys: dict[int, Keys] = {}
        self._rows = 0
        #: keys are kept no more
        self._over = False

    def add(self, partition: int, data: pd.DataFrame) -> None:
        """Keep the keys of an input. Never raises."""
        if self._over:
            return
        start = time.perf_counter()
        try:
            if not _as_meta(data, self._meta, self._columns):
                self.end("a partition is not like its meta")
                return
            keys = Keys.of(data, self._columns)
        except Exception:
            self._counters.last_error = traceback.format_exc()
            self.end("error")
            return
        with self._lock:
            if self._over:
                return
            before = self._keys.get(partition)
            self._rows += len(keys.hashes) - (0 if before is None else len(before.hashes))
            self._keys[partition] = keys
            many = self._rows > MOST_ROWS
        self._counters.add(join_keys=len(keys.hashes), join_seconds=time.perf_counter() - start)
        if many:
            self.end("more rows than are kept")

    def end(self, why: str = "") -> None:
        """Keep nothing any more; with a reason: counted."""
        with self._lock:
            over, self._over = self._over, True
            self._keys.clear()
        if why and not over:
            self._counters.gave_up(why)

    def known(self) -> messages.JoinKeys:
        """What there is."""
        with self._lock:
            some = [keys for keys in self._keys.values() if len(keys.hashes)]
            bounds = [keys.bounds for keys in some if keys.bounds is not None]
            lowest = min((low for low, _ in bounds), default=0)
            highest = max((high for _, high in bounds), default=-1)
            inputs = frozenset() if self._over else frozenset(self._keys)
            rows = sum(len(keys.hashes) for keys in some)
            return messages.JoinKeys(rows, len(bounds) == len(some), lowest, highest, 0, 0, inputs)

    def bits(self, words: int) -> bytes:
        """The keys as bits of a filter of so many words; they are not kept any longer. b"": there are none."""
        with self._lock:
            hashes = [keys.hashes for keys in self._keys.values()]
            over = self._over
        start = time.perf_counter()
        out = b"" if over else bits_of(hashes, words)
        self._counters.add(join_seconds=time.perf_counter() - start)
        self.end()
        return out


class RowFilter:
    """Drops rows of one side that cannot match. `keep` and `note` in any thread.

    Parameters
    ----------
    columns
        The key columns.
    meta
        Empty input partition of the side.
    counters
        `join_filters`, `join_rows_in`, `join_rows_dropped`, `join_bytes_dropped`, `join_seconds`, `join_given_up`.
    """

    def __init__(self, columns: Sequence[Any], meta: pd.DataFrame, counters: ShuffleCounters) -> None:
        self._columns, self._meta, self._counters = columns, meta, counters
        self._lock = threading.Lock()
        self._filter: KeyFilter | None = None
        #: seconds of looking rows up, rows that were dropped
        self._spent, self._dropped = 0.0, 0
        #: seconds of splitting and encoding, and rows that were split
        self._seconds, self._split = 0.0, 0
        #: inputs and rows that came by
        self.inputs, self.rows = 0, 0

    def take(self, keys: KeyFilter | None) -> None:
        """Use the keys of the other side from now on."""
        if keys is not None and self._filter is None:
            self._filter = keys
            self._counters.add(join_filters=1)

    def keep(self, data: pd.DataFrame) -> np.ndarray[Any, Any] | None:
        """Which rows of an input may match, as a mask; None: all. Never raises."""
        keys = self._filter
        if keys is None or not len(data):
            return None
        start = time.perf_counter()
        try:
            if not _as_meta(data, self._meta, self._columns):
                self._counters.gave_up("a partition is not like its meta")
                return None
            mask = keys.passing(data, self._columns)
        except Exception:
            self._counters.last_error = traceback.format_exc()
            self._give_up("error")
            return None
        seconds = time.perf_counter() - start
        dropped = len(mask) - int(mask.sum())
        with self._lock:
            self._spent += seconds
            self._dropped += dropped
        self._counters.add(join_seconds=seconds, join_rows_in=len(mask))
        if not dropped:
            return None
        nbytes = int(data.memory_usage(index=False).sum() * (dropped / len(mask)))
        self._counters.add(join_rows_dropped=dropped, join_bytes_dropped=nbytes)
        return mask

    def note(self, rows: int, kept: int, seconds: float) -> None:
        """An input was split: its rows, those of them that were not dropped, and the seconds for these."""
        with self._lock:
            self.inputs += 1
            self.rows += rows
            self._seconds += seconds
            self._split += kept
            price = self._seconds / max(1, self._split)
            pays = self._dropped * price >= self._spent
        if self._filter is not None and not pays:
            self._give_up("drops too few rows")

    def _give_up(self, why: str) -> None:
        with self._lock:
            keys, self._filter = self._filter, None
        if keys is not None:
            self._counters.gave_up(why)


def _as_meta(data: pd.DataFrame, meta: pd.DataFrame, columns: Sequence[Any]) -> bool:
    """Whether the key columns have the dtypes that they were promised with."""
    return all(data.dtypes[name] == meta.dtypes[name] for name in columns)


class JoinRows:
    """What one run does with the keys of a join: nothing, unless it is a side of one.

    Parameters
    ----------
    side
        None: it is not.
    meta
        Empty input partition.
    """

    def __init__(self, side: JoinSide | None, meta: Any, counters: ShuffleCounters) -> None:
        self._collector = KeyCollector(side.columns, meta, counters) if side is not None and side.builds else None
        self._filter = RowFilter(side.columns, meta, counters) if side is not None and side.drops else None
        if side is not None and self._filter is not None:
            self._filter.take(side.filter)

    def keep(self, data: Any) -> np.ndarray[Any, Any] | None:
        """See `RowFilter.keep`."""
        return None if self._filter is None else self._filter.keep(data)

    def split(self, partition: int, data: Any, kept: int, seconds: float) -> None:
        """An input was split, and is sent next; see `KeyCollector.add` and `RowFilter.note`."""
        if self._filter is not None:
            self._filter.note(len(data), kept, seconds)
        if self._collector is not None:
            self._collector.add(partition, data)

    async def answer(self, message: object, offload: Callable[..., Awaitable[Any]]) -> messages.Ok:
        """Answer the scheduler.

        Parameters
        ----------
        message
            One of those in `ANSWERS`.
        offload
            Calls a function in a thread.
        """
        return await self.ANSWERS[type(message)](self, message, offload)

    async def _on_keys(self, message: messages.AskJoinKeys, offload: Callable[..., Awaitable[Any]]) -> messages.Ok:
        none = messages.JoinKeys(0, False, 0, -1, 0, 0, frozenset())
        keys = none if self._collector is None else self._collector.known()
        if self._filter is None:
            return keys
        return dataclasses.replace(keys, seen_inputs=self._filter.inputs, seen_rows=self._filter.rows)

    async def _on_bits(self, message: messages.AskJoinBits, offload: Callable[..., Awaitable[Any]]) -> messages.Ok:
        return messages.JoinBits(b"" if self._collector is None else await offload(self._collector.bits, message.words))

    async def _on_filter(self, message: messages.TakeJoinFilter, offload: Callable[..., Awaitable[Any]]) -> messages.Ok:
        if self._filter is not None:
            self._filter.take(KeyFilter(message.bits, (message.low, message.high) if message.bounded else None))
        return messages.Ok()

    #: how a message is answered, by its class
    ANSWERS: ClassVar[dict[type, Callable[..., Awaitable[messages.Ok]]]] = {
        messages.AskJoinKeys: _on_keys,
        messages.AskJoinBits: _on_bits,
        messages.TakeJoinFilter: _on_filter,
    }

    def close(self) -> None:
        """The run is over."""
        if self._collector is not None:
            self._collector.end()
