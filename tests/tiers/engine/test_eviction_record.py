"""The record of an engine, replayed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.eviction_record import record
from benchmarks.eviction_replay import Lru, moved, replay

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.tiers.conftest import Rig


def test_the_record_of_an_engine(run_rig: Callable[..., None]) -> None:
    async def test(rig: Rig) -> None:
        rig.store["before"] = bytes(5000)
        trace = record(rig.engine, 100)
        for i in range(3):
            rig.store[i] = bytes(5000)
        await rig.settle()
        for i in range(3):
            rig.store.release(await rig.store.ensure([i]))
            await rig.settle()
        rig.hint(0, (1, 2))
        del rig.store[1]
        await rig.settle()
        kinds = [e[1] for e in trace.events]
        assert kinds[:2] == ["budget", "add"]
        assert {"add", "write", "written", "pin", "unpin", "load", "loaded", "hint", "remove"} <= set(kinds)
        real, counters = moved(trace.events), rig.engine.counters.cumulative
        assert real.written_bytes // 5000 == counters["disk-write", "count"]
        assert real.read_bytes // 5000 == counters["disk-read", "count"]
        assert replay(trace.events, Lru()).total_bytes > 0
        assert trace.to_dict()["dropped"] == 0

    run_rig(test, budget=11_000)
