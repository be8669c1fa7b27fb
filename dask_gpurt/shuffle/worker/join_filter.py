"""The keys of a join on one worker: `KeyCollector` keeps those of one side, `RowFilter` drops rows of the other.

Theory of operation. `KeyCollector.add` hashes the keys of every input that is split here (`rows.join_keys`); when the
side is complete the scheduler asks for their number, which of a sample they may be, and then for their bits
(`scheduler.join_filters`). `RowFilter` gets the union of all workers and says for each later input which rows may
match. It never waits for one. Until then it keeps a sample of the keys that come by.

Both give up for themselves, and count why:

- keys of a partition that has another dtype than its meta are not hashed, and rows of such a partition not dropped;
- a side of more than `MOST_ROWS` rows here;
- a filter that costs more than it saves, by the inputs so far: looking up a row costs what it takes, and a row that is
  dropped saves its splitting and encoding. What sending, receiving, assembling and merging it take is a margin.

An input is looked up by a sample of its rows first, so that a filter that drops nothing costs next to nothing. All
seconds are CPU seconds of the thread: what a busy machine adds says nothing about a filter.
"""

from __future__ import annotations

import dataclasses
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dask_gpurt.shuffle.protocol import messages
from dask_gpurt.shuffle.protocol.join_price import LEAST_DROPPED
from dask_gpurt.shuffle.rows.join_keys import Keys, hashes_of
from dask_gpurt.shuffle.rows.key_filter import KeyFilter, bits_of, found

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    import pandas as pd

    from dask_gpurt.shuffle.counters import ShuffleCounters
    from dask_gpurt.shuffle.protocol.join_plan import JoinSide

#: rows of a side whose hashes one worker keeps: 16 MB
MOST_ROWS = 4 << 20
#: rows of an input that stand for all of it
SAMPLE_ROWS = 512
#: inputs that a sample of a side is taken from
SAMPLED_INPUTS = 4


class KeyCollector:
    """The keys of the inputs of one side that were split here. `add` and `bits` in any thread."""

    def __init__(self, columns: Sequence[Any], meta: pd.DataFrame, counters: ShuffleCounters) -> None:
        self._columns, self._meta, self._counters = columns, meta, counters
        self._lock = threading.Lock()
        #: input partition -> its keys; a second attempt replaces the first
        self._keys: dict[int, Keys] = {}
        self._rows = 0
        #: CPU seconds of hashing them
        self._seconds = 0.0
        #: keys are kept no more
        self._over = False

    def add(self, partition: int, data: pd.DataFrame) -> None:
        """Keep the keys of an input. Never raises."""
        if self._over:
            return
        start = time.thread_time()
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
            seconds = time.thread_time() - start
            self._seconds += seconds
        self._counters.add(join_keys=len(keys.hashes), join_seconds=seconds)
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
            return dataclasses.replace(
                messages.JoinKeys.none(),
                rows=rows,
                seconds=self._seconds,
                bounded=len(bounds) == len(some),
                low=lowest,
                high=highest,
                inputs=inputs,
            )

    def hits(self, sample: bytes) -> bytes:
        """Which hashes of a sample may be among the keys; see `key_filter.found`."""
        with self._lock:
            hashes = [keys.hashes for keys in self._keys.values()]
        start = time.thread_time()
        out = found(np.frombuffer(sample, dtype=np.uint32), hashes).tobytes()
        self._counters.add(join_seconds=time.thread_time() - start)
        return out

    def bits(self, words: int) -> bytes:
        """The keys as bits of a filter of so many words, or b""; they are not kept any longer."""
        with self._lock:
            hashes = [keys.hashes for keys in self._keys.values()]
            over = self._over
        start = time.thread_time()
        out = b"" if over or not words else bits_of(hashes, words)
        self._counters.add(join_seconds=time.thread_time() - start)
        self.end()
        return out


class RowFilter:
    """Drops rows of one side that cannot match. `keep` and `note` in any thread."""

    def __init__(self, columns: Sequence[Any], meta: pd.DataFrame, counters: ShuffleCounters) -> None:
        self._columns, self._meta, self._counters = columns, meta, counters
        self._lock = threading.Lock()
        self._filter: KeyFilter | None = None
        #: a filter was given up
        self._over = False
        #: seconds of looking rows up, rows that were dropped
        self._spent, self._dropped = 0.0, 0
        #: seconds of splitting and encoding, and rows that were split
        self._seconds, self._split = 0.0, 0
        #: inputs and rows that came by
        self._inputs, self._rows = 0, 0
        #: hashes of keys of the first inputs, while there is no filter
        self._sample: list[np.ndarray[Any, Any]] = []

    def take(self, keys: KeyFilter | None) -> None:
        """Use the keys of the other side from now on."""
        if keys is not None and self._filter is None and not self._over:
            self._filter = keys
            self._sample.clear()
            self._counters.add(join_filters=1)

    def keep(self, data: pd.DataFrame) -> np.ndarray[Any, Any] | None:
        """Which rows of an input may match, as a mask; None: all. Never raises."""
        keys = self._filter
        if not len(data) or (keys is None and (self._over or len(self._sample) >= SAMPLED_INPUTS)):
            return None
        start = time.thread_time()
        looked, mask = 0, None
        try:
            if not _as_meta(data, self._meta, self._columns):
                if keys is not None:
                    self._counters.gave_up("a partition is not like its meta")
                return None
            if keys is None:
                self._sample.append(_sample(data, self._columns))
            else:
                looked, mask = self._looked_up(keys, data)
            dropped = 0 if mask is None else len(mask) - int(mask.sum())
            # Of any column, such as one of a class of the user's, which may not know its size.
            nbytes = int(data.memory_usage(index=False).sum() * (dropped / len(data))) if dropped else 0
        except Exception:
            self._counters.last_error = traceback.format_exc()
            self._give_up("error")
            return None
        seconds = time.thread_time() - start
        if keys is not None:
            with self._lock:
                self._spent += seconds
                self._dropped += dropped
        self._counters.add(join_seconds=seconds, join_rows_in=looked)
        if not dropped:
            return None
        self._counters.add(join_rows_dropped=dropped, join_bytes_dropped=nbytes)
        return mask

    def _looked_up(self, keys: KeyFilter, data: pd.DataFrame) -> tuple[int, np.ndarray[Any, Any] | None]:
        """(rows that were looked up, which rows may match; None: so many that it is no use to know)."""
        if len(data) >= 2 * SAMPLE_ROWS and not keys.outside(data, self._columns):
            some = keys.holds(_sample(data, self._columns))
            if some.mean() > 1 - LEAST_DROPPED:
                return len(some), None
        return len(data), keys.passing(data, self._columns)

    def known(self, keys: messages.JoinKeys) -> messages.JoinKeys:
        """What there is of these rows, besides the keys of the side."""
        with self._lock:
            sample = b"".join(one.tobytes() for one in list(self._sample))
            return dataclasses.replace(
                keys,
                seen_inputs=self._inputs,
                seen_rows=self._rows,
                split_rows=self._split,
                split_seconds=self._seconds,
                sample=sample,
            )

    def note(self, rows: int, kept: int, seconds: float) -> None:
        """An input was split: its rows, those of them that were not dropped, and the seconds for these."""
        with self._lock:
            self._inputs += 1
            self._rows += rows
            self._seconds += seconds
            self._split += kept
            price = self._seconds / max(1, self._split)
            pays = self._dropped * price >= self._spent
        if self._filter is not None and not pays:
            self._give_up("drops too few rows")

    def _give_up(self, why: str) -> None:
        with self._lock:
            keys, self._filter = self._filter, None
            self._over = True
            self._sample.clear()
        if keys is not None:
            self._counters.gave_up(why)


def _sample(data: pd.DataFrame, columns: Sequence[Any]) -> np.ndarray[Any, Any]:
    """Hashes of rows all over a partition, `SAMPLE_ROWS` or up to twice as many; of all rows if there are not more."""
    return hashes_of(data, columns, max(1, len(data) // SAMPLE_ROWS))


def _as_meta(data: pd.DataFrame, meta: pd.DataFrame, columns: Sequence[Any]) -> bool:
    """Whether the key columns have the dtypes that they were promised with."""
    return all(data[name].dtype == meta[name].dtype for name in columns)


class JoinRows:
    """What one run does with the keys of a join: nothing, unless it is a side of one."""

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
        """Answer one of the messages in `ANSWERS`; `offload` calls a function in a thread."""
        return await self.ANSWERS[type(message)](self, message, offload)

    async def _on_keys(self, message: messages.AskJoinKeys, offload: Callable[..., Awaitable[Any]]) -> messages.Ok:
        keys = messages.JoinKeys.none() if self._collector is None else self._collector.known()
        return keys if self._filter is None else self._filter.known(keys)

    async def _on_hits(self, message: messages.AskJoinHits, offload: Callable[..., Awaitable[Any]]) -> messages.Ok:
        if self._collector is None:
            return messages.JoinHits(bytes(len(message.sample) // 4))
        return messages.JoinHits(await offload(self._collector.hits, message.sample))

    async def _on_bits(self, message: messages.AskJoinBits, offload: Callable[..., Awaitable[Any]]) -> messages.Ok:
        return messages.JoinBits(b"" if self._collector is None else await offload(self._collector.bits, message.words))

    async def _on_filter(self, message: messages.TakeJoinFilter, offload: Callable[..., Awaitable[Any]]) -> messages.Ok:
        if self._filter is not None:
            self._filter.take(KeyFilter(message.bits, (message.low, message.high) if message.bounded else None))
        return messages.Ok()

    #: how a message is answered, by its class
    ANSWERS: ClassVar[dict[type, Callable[..., Awaitable[messages.Ok]]]] = {
        messages.AskJoinKeys: _on_keys,
        messages.AskJoinHits: _on_hits,
        messages.AskJoinBits: _on_bits,
        messages.TakeJoinFilter: _on_filter,
    }

    def close(self) -> None:
        """The run is over."""
        if self._collector is not None:
            self._collector.end()
