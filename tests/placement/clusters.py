"""What the tests of placement on live clusters have in common."""

from __future__ import annotations

import asyncio
import operator
from typing import TYPE_CHECKING, Any

from distributed.utils_test import inc

from dask_gpurt.placement.plugin import PlacementPlugin
from tests.placement.fakes import SETTINGS

if TYPE_CHECKING:
    from collections.abc import Callable

    from distributed.scheduler import Scheduler

    from dask_gpurt.config import PlacementSettings

FOUR = [("127.0.0.1", 1)] * 4
#: the result of `tree`
EXPECTED = sum(range(1, 65))


async def install(s: Scheduler, settings: PlacementSettings = SETTINGS, **kw: Any) -> PlacementPlugin:
    plugin = PlacementPlugin(settings, **kw)
    s.add_plugin(plugin)
    await plugin.start(s)
    assert plugin.engine is not None
    plugin.engine.always = True  # the overrides are what these tests are about
    # As in `make_engine`: a decision that the machine has interrupted would be stock's.
    plugin.engine.budget.decision_seconds = plugin.engine.budget.share = float("inf")
    return plugin


async def until(condition: Callable[[], Any]) -> None:
    while not condition():  # noqa: ASYNC110 (the state is not ours, there is no event)
        await asyncio.sleep(0.01)


async def idle(s: Scheduler, plugin: PlacementPlugin) -> None:
    """All futures were released: the tables are empty."""
    await until(lambda: not s.tasks)
    tables = plugin.statistics()["tables"]
    assert (tables["charges"], tables["unknown"]) == (0, 0)
    assert plugin.engine is not None
    assert all(w.backlog_seconds == w.reserved_bytes == w.tasks == 0 for w in plugin.engine.workers.all.items)
    assert {w.ws for w in plugin.engine.workers.idle.items} == set(s.workers.values())


async def tree(c: Any, n: int = 64) -> int:
    layer = c.map(inc, range(n), pure=False)
    while len(layer) > 1:
        layer = [c.submit(operator.add, a, b, pure=False) for a, b in zip(layer[::2], layer[1::2], strict=True)]
    return await layer[0]
