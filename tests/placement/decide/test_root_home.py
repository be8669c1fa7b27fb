"""`home`: roots that stay where their inputs are, by scripted tables and on a live cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from distributed.core import Status
from distributed.utils_test import gen_cluster

from dask_gpurt.model.link import Link, LinkClass
from dask_gpurt.placement.decide.root_home import home
from tests.placement.clusters import FOUR, install
from tests.placement.fakes import FakeTask, FakeWorker, assign, learn, make_engine

if TYPE_CHECKING:
    from collections.abc import Callable

    from distributed import Worker
    from distributed.scheduler import Scheduler

SLICES = 50
SIZE = 500_000_000


class Script:
    """Five workers, the first of which has a frame that many slices are cut from. It is sent in half a second."""

    def __init__(self, *extra: FakeTask) -> None:
        self.workers = [FakeWorker(i, memory_limit=10**10) for i in range(5)]
        self.engine = make_engine(self.workers)
        self.engine.links.reseed(LinkClass.NETWORK, Link(1e-3, 1e9))
        self.frame = FakeTask("frame", nbytes=SIZE, on=(self.workers[0],))
        self.slices = [FakeTask(f"slice-{i}", self.frame, *extra) for i in range(SLICES)]
        learn(self.engine, "slice", 0.002, SIZE // SLICES)

    def home(self) -> Any:
        task: Any = self.slices[0]
        return home(task, self.engine.tables)


def test_slices_of_a_large_frame_stay() -> None:
    s = Script()
    assert s.home() is s.workers[0]


def test_behind_others_and_a_task_that_has_seceded() -> None:
    s = Script()
    for task in s.slices[1:20]:
        assign(s.engine, task, s.workers[0])
    seceded = FakeTask("unheard-of")
    assign(s.engine, seceded, s.workers[0])
    s.workers[0].long_running.add(seceded)
    assert s.home() is s.workers[0]


def test_the_sooner_of_two_holders() -> None:
    s = Script()
    s.frame.who_has.add(s.workers[1])  # type: ignore[union-attr]
    learn(s.engine, "other", 0.1)
    assign(s.engine, FakeTask("other-1"), s.workers[0])
    assert s.home() is s.workers[1]


def _many_hold_it(s: Script) -> None:
    s.frame.who_has = set(s.workers)


def _is_busy(s: Script) -> None:
    learn(s.engine, "other", 10.0)
    assign(s.engine, FakeTask("other-1"), s.workers[0])


def _is_stuck(s: Script) -> None:
    assign(s.engine, s.slices[1], s.workers[0])
    s.workers[0].executing = {s.slices[1]: 60.0}


def _has_something_unknown(s: Script) -> None:
    assign(s.engine, FakeTask("unheard-of"), s.workers[0])


def _has_much_in_hand(s: Script) -> None:
    for i in range(300):
        assign(s.engine, FakeTask(f"slice-{SLICES + i}"), s.workers[0])


def _is_paused(s: Script) -> None:
    s.workers[0].status = Status.paused


def _one_is_elsewhere(s: Script) -> None:
    s.slices[0].dependencies.add(FakeTask("mask", nbytes=1000, on=(s.workers[1],)))


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.engine.durations.prefixes.clear(),
        lambda s: learn(s.engine, "slice", 0.1, SIZE // SLICES) or learn(s.engine, "slice", 0.1, SIZE // SLICES),
        lambda s: learn(s.engine, "slice", 0.002, 100 * SIZE),
        lambda s: s.engine.links.reseed(LinkClass.NETWORK, Link(1e-3, 1e11)),
        lambda s: setattr(s.frame, "nbytes", 1000),
        lambda s: setattr(s.engine.scheduler, "is_rootish", lambda ts: False),
        lambda s: setattr(s.engine.scheduler, "running", {s.workers[0]}),
        _many_hold_it,
        _is_busy,
        _is_stuck,
        _has_something_unknown,
        _has_much_in_hand,
        _is_paused,
        _one_is_elsewhere,
    ],
    ids=[
        *("unknown", "long", "large results", "fast link", "small", "not a root", "one worker"),
        *("many hold it", "busy", "stuck", "unknown work", "many tasks", "paused", "an input is elsewhere"),
    ],
)
def test_else_dask_queues_them(change: Callable[[Script], object]) -> None:
    s = Script()
    change(s)
    assert s.home() is None


def test_without_inputs_there_is_none() -> None:
    s = Script()
    task: Any = FakeTask("load")
    assert home(task, s.engine.tables) is None


def test_on_a_live_cluster() -> None:
    """Many small slices of three arrays: nothing is sent once it is known how short they are."""

    @gen_cluster(client=True, nthreads=FOUR)
    async def run(c: Any, s: Scheduler, *workers: Worker) -> None:
        s.validate = False
        plugin = await install(s)
        assert plugin.engine is not None
        arrays = [
            c.submit(np.full, 1_000_000, i, pure=False, workers=[w.address], allow_other_workers=True)
            for i, w in enumerate(workers[:3])
        ]
        await c.gather([c.submit(len, a) for a in arrays])
        plugin.engine.links.reseed(LinkClass.HOST, Link(1e-3, 1e6))

        def cut(i: int, a: Any) -> int:
            return int(a[i])

        await c.gather(c.map(cut, range(3), a=arrays[0], pure=False))  # few: no roots
        tasks = [f for a in arrays for f in c.map(cut, range(40), a=a, pure=False)]
        assert await c.gather(tasks) == [i for i in range(3) for _ in range(40)]
        assert plugin.statistics()["roots"]["at_home"] == len(tasks)
        for i in range(3):
            said = plugin.explain(tasks[40 * i + 7].key)
            assert said is not None
            assert (said["kind"], said["chosen"]) == ("root at home", workers[i].address)
        for i, a in enumerate(arrays):
            assert s.tasks[a.key].who_has == {s.workers[workers[i].address]}
        plugin.uninstall()

    run()


def test_by_stock_they_are_sent_everywhere() -> None:
    """What the rule is for. Should Dask change, it may go."""

    @gen_cluster(client=True, nthreads=FOUR)
    async def run(c: Any, s: Scheduler, *workers: Worker) -> None:
        array = await c.scatter(np.ones(1_000_000), workers=[workers[0].address])
        await c.gather(c.map(lambda i, a: int(a[i]), range(40), a=array, pure=False))
        assert len(s.tasks[array.key].who_has) == len(workers)

    run()
