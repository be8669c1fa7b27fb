"""What a worker's settings make of its memory limit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dask_gpurt.config import Settings
from dask_gpurt.tiers.memory import limits_of


def worker(limit: int | None, target: Any = 0.6, spill: Any = 0.7, pause: Any = 0.8) -> Any:
    manager = SimpleNamespace(
        memory_limit=limit,
        memory_target_fraction=target,
        memory_spill_fraction=spill,
        memory_pause_fraction=pause,
        max_spill=False,
        memory_monitor_interval=0.1,
    )
    return SimpleNamespace(memory_manager=manager, state=SimpleNamespace(nthreads=1))


@pytest.mark.parametrize(
    ("pause", "ceiling"),
    [
        (0.8, 750),  # values never bring a worker to where distributed pauses it
        (0.7, 650),
        (0.95, 800),  # nor to where the nanny ends it
        (False, 800),
    ],
)
def test_the_process_stays_below_the_pause(pause: Any, ceiling: int) -> None:
    limits = limits_of(worker(1000, pause=pause), Settings.load().tiers, shards_only=False)
    assert limits.ceiling_bytes == pytest.approx(ceiling, abs=1)
    assert (limits.budget_bytes, limits.watch_high_bytes, limits.watch_low_bytes) == (600, 700, 600)


@pytest.mark.parametrize(("limit", "spill"), [(None, 0.7), (1000, False)])
def test_nothing_is_watched_without_a_limit_or_a_mark(limit: int | None, spill: Any) -> None:
    limits = limits_of(worker(limit, spill=spill), Settings.load().tiers, shards_only=False)
    assert limits.watch_high_bytes is limits.ceiling_bytes is None
