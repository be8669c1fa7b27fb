"""A task that waits with its partition is not taken to an idle worker, unless that can gain more than it costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from dask_gpurt.placement.decide.steal_gain import LOOKED
from dask_gpurt.placement.decide.steal_policy import STOCK
from tests.placement.fakes import FakeTask, FakeWorker, assign, learn, make_engine

if TYPE_CHECKING:
    from dask_gpurt.placement.engine import Engine

PARTITION = 100_000_000


class End:
    """The end of a query: one worker holds a partition and reads the next, the other is idle.

    From each partition come two columns, which are joined and summed. The sums of both partitions are added.
    """

    def __init__(self, *, reading: float = 2.0, column: float = 0.005, joining: float = 0.005) -> None:
        self.busy, self.idle = FakeWorker(1), FakeWorker(2)
        self.engine: Engine = make_engine([self.busy, self.idle])
        there = FakeTask("read-0", nbytes=PARTITION, on=(self.busy,))
        self.reading = FakeTask("read-1")
        self.columns = []
        sums = []
        for i, source in enumerate((there, self.reading)):
            columns = [FakeTask(f"column-{i}-{n}", source) for n in range(2)]
            join = FakeTask(f"join-{i}", *columns)
            sums.append(FakeTask(f"sum-{i}", join))
            self.columns.append(columns)
        self.total = FakeTask("total", *sums)
        for prefix, seconds in (("read", reading), ("column", column), ("join", joining), ("sum", 0.001)):
            learn(self.engine, prefix, seconds, 1000)
        for task in (self.reading, *self.columns[0]):
            assign(self.engine, task, self.busy)

    def thief(self, task: FakeTask) -> Any:
        return self.engine.thief(task, {self.idle}, {}, None)


def test_a_short_task_stays_with_its_partition_at_the_end_of_a_graph() -> None:
    """What follows needs the partition that is being read as well, so it would wait for it anywhere."""
    end = End()
    for task in end.columns[0]:
        assert end.thief(task) is None
    assert end.engine.steal_policy.opinions["gain"] == 2


def test_a_long_task_goes() -> None:
    end = End(column=4.0)
    assert end.thief(end.columns[0][0]) is end.idle


def test_a_short_task_that_much_follows_from_goes() -> None:
    """Its own time is no measure: the work behind it can begin seconds sooner."""
    end = End(joining=10.0)
    assert end.thief(end.columns[0][0]) is end.idle


def test_small_inputs_go() -> None:
    end = End()
    (source,) = end.columns[0][0].dependencies
    source.nbytes = 1000
    assert end.thief(end.columns[0][0]) is end.idle


def test_a_task_that_other_work_depends_on_goes() -> None:
    """What follows from it does not follow from what the worker reads, and may be the longest path of the graph."""
    end = End()
    learn(end.engine, "other", 5.0)
    FakeTask("other-0", end.columns[0][0])
    assert end.thief(end.columns[0][0]) is end.idle


@pytest.mark.parametrize("case", ["what follows", "too many"])
def test_without_a_bound_nothing_changes(case: str) -> None:
    end = End()
    if case == "what follows":
        FakeTask("never-seen", end.columns[0][0])
    else:
        for i in range(LOOKED + 1):
            FakeTask(f"sum-{i + 2}", end.columns[0][0])
    assert end.thief(end.columns[0][0]) is end.idle


def test_not_all_of_a_million_followers_are_looked_at() -> None:
    class Followers(list[FakeTask]):
        looked_at = 0

        def __iter__(self) -> Any:
            for one in super().__iter__():
                self.looked_at += 1
                yield one

    end = End()
    followers = Followers(FakeTask(f"sum-{i + 2}") for i in range(10 * LOOKED))
    end.reading.dependents = followers  # type: ignore[assignment]
    assert end.thief(end.columns[0][0]) is end.idle
    assert 0 < followers.looked_at <= LOOKED + 1


def test_a_task_of_unknown_duration_is_left_to_dask() -> None:
    end = End()
    unknown = FakeTask("unknown", *end.columns[0][0].dependencies)
    assign(end.engine, unknown, end.busy)
    assert end.thief(unknown) is STOCK


def test_work_of_unknown_duration_on_the_worker_is_no_bound() -> None:
    end = End()
    assign(end.engine, FakeTask("unknown"), end.busy)
    assert end.thief(end.columns[0][0]) is end.idle


@pytest.mark.parametrize(("slices", "goes"), [(40, True), (2, False)])
def test_one_of_many_slices_takes_their_frame_along(slices: int, goes: bool) -> None:
    """The frame takes a second to send and a slice half of one, but half of all slices may follow."""
    busy, idle = FakeWorker(1), FakeWorker(2)
    engine = make_engine([busy, idle])
    frame = FakeTask("frame", nbytes=PARTITION, on=(busy,))
    tasks = [FakeTask(f"slice-{i}", frame) for i in range(slices)]
    FakeTask("join", *tasks)
    learn(engine, "slice", 0.5, 1000)
    for prefix, seconds in (("other", 3.0), ("join", 0.001)):
        learn(engine, prefix, seconds, 1000)
    assign(engine, FakeTask("other-0"), busy)
    for task in tasks:
        assign(engine, task, busy)
    thief: Any = engine.thief(tasks[-1], {idle}, {}, None)  # type: ignore[arg-type]
    assert (thief is idle) is goes
    assert engine.steal_policy.opinions["gain"] == (not goes)
