"""Random programs against the engine, on a real folder whose disk fails now and then; a dict is the model."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import tempfile
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dask_gpurt.errors import LostData
from dask_gpurt.tiers.hints.prefetch import Prefetch
from tests.tiers.conftest import FaultyOs, Rig, guard, handles

KEYS = st.integers(0, 7)


class TierMachine(RuleBasedStateMachine):
    """A file per value."""

    layout: ClassVar[dict[str, Any]] = {"small_bytes": 0}

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = tempfile.TemporaryDirectory()
        self.os = FaultyOs()
        self.rig: Rig = self.loop.run_until_complete(self._make())
        self.model: dict[int, np.ndarray[Any, Any]] = {}
        self.pinned: list[Any] = []
        self.spoilt: set[int] = set()
        self.tasks: dict[int, Any] = {}
        self.prefetch = Prefetch(self.rig.engine, self.tasks, self.rig.store.entry, 0.5, guard())
        self.prefetch.install()
        self.serial = 0

    async def _make(self) -> Rig:
        return Rig(os.path.join(self.folder.name, "t"), 30_000, self.os, limit_bytes=60_000, **self.layout)

    def teardown(self) -> None:
        self.loop.run_until_complete(self.rig.engine.close())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()
        self.folder.cleanup()

    def on_loop(self, function: Any) -> Any:
        async def main() -> Any:
            result = function()
            return await result if asyncio.iscoroutine(result) else result

        return self.loop.run_until_complete(main())

    @rule(key=KEYS, size=st.sampled_from([10, 5000, 10_000, 40_000]))
    def set(self, key: int, size: int) -> None:
        self.serial += 1
        value = np.full(size, self.serial % 251, "u1")
        self.model[key] = value.copy()
        self.spoilt.discard(key)
        self.on_loop(lambda: self.rig.store.__setitem__(key, value))

    @rule(key=KEYS, other=KEYS, view=st.booleans())
    def set_to_another_ones_value(self, key: int, other: int, view: bool) -> None:
        """Two keys, one memory."""
        entry = self.rig.store.entry(other)
        if entry is None or not entry.in_memory or key == other:
            return
        value = entry.value[1:] if view else entry.value
        self.model[key] = value.copy()
        self.spoilt.discard(key)
        self.on_loop(lambda: self.rig.store.__setitem__(key, value))

    @rule(key=KEYS)
    def delete(self, key: int) -> None:
        if key in self.model:
            del self.model[key]
            self.spoilt.discard(key)
            self.on_loop(lambda: self.rig.store.__delitem__(key))

    @rule(key=KEYS)
    def get(self, key: int) -> None:
        if key not in self.model:
            assert key not in self.rig.store
            return
        try:
            got = self.on_loop(lambda: self.rig.store[key])
        except LostData:
            assert key in self.spoilt
        else:
            np.testing.assert_array_equal(got, self.model[key])

    @rule(keys=st.lists(KEYS, max_size=4))
    def ensure(self, keys: list[int]) -> None:
        entries = self.on_loop(lambda: asyncio.wait_for(self.rig.store.ensure(keys), 60))
        for entry in entries:
            assert entry.in_memory or self.rig.store.is_lost(entry.key)
            if entry.in_memory:
                np.testing.assert_array_equal(entry.value, self.model[entry.key])
        self.pinned.append(entries)

    @rule()
    @precondition(lambda self: self.pinned)
    def release(self) -> None:
        self.on_loop(lambda: self.rig.store.release(self.pinned.pop()))

    @rule(keys=st.lists(KEYS, max_size=4))
    def ensure_in_the_background(self, keys: list[int]) -> None:
        async def go() -> None:
            self.rig.store.release(await self.rig.store.ensure(keys))

        async def start() -> None:
            self.background = asyncio.ensure_future(go())
            await asyncio.sleep(0)

        self.on_loop(start)

    @rule(n=st.sampled_from([0, 1, 20_000, 1 << 40]))
    def shrink(self, n: int) -> None:
        self.on_loop(lambda: self.rig.engine.shrink(n))

    @rule(key=KEYS, use=st.one_of(st.none(), st.tuples(st.integers(0, 3), st.integers(0, 9))))
    def hint(self, key: int, use: Any) -> None:
        self.on_loop(lambda: self.rig.hint(key, use))

    @rule(key=KEYS, due=st.one_of(st.none(), st.tuples(st.integers(0, 9))))
    def due(self, key: int, due: Any) -> None:
        entry = self.rig.store.entry(key)
        if entry is not None:
            self.on_loop(lambda: self.rig.engine.books.set_due(entry, due))

    @rule(keys=st.lists(KEYS, min_size=1, max_size=3, unique=True), priority=st.integers(0, 9))
    def task_is_sent(self, keys: list[int], priority: int) -> None:
        """Its inputs may be read ahead; it never runs, so some of them leave again, or are deleted, or are pinned."""
        self.serial += 1
        self.tasks[self.serial] = SimpleNamespace(
            state="ready", dependencies=[SimpleNamespace(key=key) for key in keys]
        )
        self.on_loop(lambda: self.prefetch.pending((priority,), self.serial, self.serial))

    @rule()
    def tasks_are_cancelled(self) -> None:
        self.tasks.clear()
        self.on_loop(self.prefetch.pump)

    @rule(n=st.integers(0, 50_000))
    def admit(self, n: int) -> None:
        async def go() -> None:
            with await asyncio.wait_for(self.rig.engine.admit(n), 60):
                pass

        self.on_loop(go)

    @rule(
        call=st.sampled_from(["open", "pwritev", "rename", "ftruncate"]),
        code=st.sampled_from([errno.ENOSPC, errno.EIO]),
    )
    def next_write_fails(self, call: str, code: int) -> None:
        self.os.plan[call, self.os.calls.get(call, 0)] = OSError(code, "injected")

    @rule(key=KEYS, at=st.integers(0, 10**6), how=st.sampled_from(["flip", "truncate", "remove"]))
    def spoil(self, key: int, at: int, how: str) -> None:
        self.settle()
        entry = self.rig.store.entry(key)
        if entry is None or entry.handle is None:
            return
        handle = entry.handle
        path = os.path.join(self.rig.disk.directory, handle.name)
        frames = handle.frames
        start, end = frames[0].offset, frames[-1].offset + frames[-1].extent_bytes
        if how == "flip":
            if os.path.getsize(path) < end:
                return  # cut off before
            with open(path, "r+b") as f:
                f.seek(start + at % (end - start))
                byte = f.read(1)[0]
                f.seek(-1, 1)
                f.write(bytes([byte ^ (1 << random.Random(at).randrange(8))]))
            self.spoilt.add(key)
            return
        # Behind the back of the handles: files and handles must stay the same, so an empty file is put in its place.
        os.truncate(path, 0 if how == "remove" else min(os.path.getsize(path), start + at % (end - start)))
        self.spoilt.update(e.key for e in self.entries() if e.handle is not None and e.handle.name == handle.name)

    def entries(self) -> list[Any]:
        return [e for e in map(self.rig.store.entry, self.model) if e is not None]

    @rule()
    def settle(self) -> None:
        self.on_loop(self.rig.settle)

    @invariant()
    def books_are_right(self) -> None:
        self.on_loop(self.rig.engine.validate)
        entries = self.rig.engine.books.entries
        assert self.prefetch.ahead_bytes == sum(e.nbytes for e in entries if e.prefetched)
        assert self.prefetch.started == sum(self.prefetch.outcomes.values()) + sum(e.prefetched for e in entries)
        assert self.prefetch.part.failures == 0, self.prefetch.part.last_traceback
        assert set(self.rig.store) == set(self.model)
        assert len(self.rig.store) == len(self.model)
        assert len(self.rig.store.slow) == len(list(self.rig.store.slow))
        assert len(self.rig.store.memory) == len(list(self.rig.store.memory))

    @rule()
    def files_are_the_handles(self) -> None:
        self.settle()
        found = handles(self.rig.engine)
        assert sorted({h.name for h in found}) == self.rig.disk.files()
        # One record may have several keys: of a value that is stored under a second key while it is being written.
        distinct = {id(h): h for h in found}.values()
        assert sum(h.nbytes for h in distinct) <= self.rig.disk.used_bytes <= 60_000
        if not self.rig.disk.files():
            assert self.rig.disk.used_bytes == 0


class SegmentMachine(TierMachine):
    """Several values per file, which are moved when the others are dead."""

    layout: ClassVar[dict[str, Any]] = {"small_bytes": 1 << 20, "segment_bytes": 16_000}


TierMachine.TestCase.settings = SegmentMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestTierMachine = TierMachine.TestCase
TestSegmentMachine = SegmentMachine.TestCase
