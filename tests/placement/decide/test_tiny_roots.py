"""`TinyRoots`: groups of roots that are given out at once, by scripted groups and on a live cluster."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
from distributed.utils_test import gen_cluster

from dask_gpurt.placement.decide.root_blocks import RootBlocks
from dask_gpurt.placement.decide.tiny_roots import BANNED, CARRIED_BYTES, ROOM_SHARE, STRIKES, TinyRoots
from tests.placement.clusters import FOUR, install
from tests.placement.fakes import FakeWorker, make_engine

if TYPE_CHECKING:
    from collections.abc import Callable

    from distributed import Worker
    from distributed.scheduler import Scheduler

N = 100


class Group:
    """What is read of a TaskGroup, of N tasks that have not begun."""

    def __init__(self, prefix: Any, n: int = N) -> None:
        self.prefix = prefix
        self.name = f"{prefix.name}-{id(self)}"
        self.states: defaultdict[str, int] = defaultdict(int, released=n)
        self.all_durations: defaultdict[str, float] = defaultdict(float)
        self.nbytes_total = 0

    @property
    def done(self) -> bool:
        return not self.states["processing"]  # as Dask's: also while tasks have not begun

    def end(self, seconds: float, nbytes: int = 8, state: str = "memory") -> None:
        """All tasks are done and took so long, and made so much, each."""
        n = self.states.pop("released")
        self.states[state] += n
        self.all_durations["compute"] += n * seconds
        self.nbytes_total += n * nbytes
        self.prefix.state_counts[state] += n


class Prefix:
    def __init__(self, name: str = "increment") -> None:
        self.name = name
        self.state_counts: defaultdict[str, int] = defaultdict(int)


class Task:
    def __init__(self, group: Group, run_spec: object = None) -> None:
        self.key = object()
        self.group = group
        self.run_spec = run_spec


class Script:
    """A scheduler of four threads to which graphs of one group arrive."""

    def __init__(self, host: str = "") -> None:
        self.workers = [FakeWorker(i, host=host, memory_limit=10**9) for i in range(4)]
        self.engine = make_engine(self.workers)
        s: Any = self.engine.scheduler
        s.total_nthreads = 4
        s.is_rootish = lambda ts: True
        s.decide_worker_rootish_queuing_disabled = lambda ts: self.workers[0]
        self.tiny = TinyRoots(self.engine.tables, RootBlocks())
        self.now = 0.0
        self.engine.tables.clock = lambda: self.now

    def arrives(self, group: Group, run_spec: object = None) -> bool:
        """Whether the group is given out at once."""
        self.tiny.graph_arrived()
        task: Any = Task(group, run_spec)
        return self.tiny.at_once(task) and self.tiny.worker(task) is self.workers[0]

    def runs(
        self, group: Group, *seconds: float, nbytes: int = 8, state: str = "memory", per_task: float = 0.001
    ) -> None:
        """All tasks of a group run to their end and take so long, in turn; one ends every so many seconds."""
        task: Any = Task(group)
        kind = self.engine.tables.durations.kind(task)
        for i in range(group.states["released"]):
            self.now += per_task
            self.tiny.ran(kind, seconds[i % len(seconds)])
        group.end(sum(seconds) / len(seconds), nbytes, state)


SHORT = 0.0005


def test_what_is_repeated_and_tiny_goes_at_once() -> None:
    s, prefix = Script(), Prefix()
    for answer in (False, True, True):
        group = Group(prefix)
        assert s.arrives(group) is answer
        s.runs(group, SHORT)
    assert s.tiny.given == 2


class _Unpicklable:
    def __reduce__(self) -> Any:
        raise OSError("not now")


@pytest.mark.parametrize("near", [False, True])
@pytest.mark.parametrize(
    ("run_spec", "answer"),
    [
        (("sum", np.zeros(CARRIED_BYTES // 16)), True),
        (("sum", np.zeros(CARRIED_BYTES // 8)), False),
        (("sum", pd.DataFrame({"text": [f"word {i}" for i in range(CARRIED_BYTES // 8)]})), False),
        (("len", b"x" * CARRIED_BYTES), False),
        (_Unpicklable(), False),
    ],
    ids=["half", "array", "text", "bytes", "unpicklable"],
)
def test_what_carries_data_is_queued(run_spec: object, answer: bool, near: bool) -> None:
    """A worker behind a slow link would get its even share of it at once."""
    s, prefix = Script(host="10.0.0.9" if near else ""), Prefix()
    group = Group(prefix)
    s.arrives(group, run_spec)
    s.runs(group, SHORT)
    assert s.arrives(Group(prefix), run_spec) is (answer or near)


def test_of_very_many_groups_at_work_not_all_are_followed() -> None:
    """Thousands of persisted arrays that wait: each graph that arrives would look through all of them."""
    s = Script()
    groups = [Group(Prefix(f"p{i}")) for i in range(600)]
    for group in groups:
        s.arrives(group)
        group.states["processing"] = 1  # it does not end
    assert len(s.tiny._looked) == 256
    groups[0].states["processing"] = 0
    assert not s.arrives(late := Group(Prefix("late")))
    assert late in s.tiny._looked, "as soon as one is done"


@pytest.mark.parametrize(
    "end",
    [
        lambda s, g: s.runs(g, 0.03, per_task=0.008),
        lambda s, g: s.runs(g, SHORT, per_task=SHORT / 4),
        lambda s, g: s.runs(g, SHORT, nbytes=10**9),
        lambda s, g: s.runs(g, SHORT, state="erred"),
        lambda s, g: s.runs(g, SHORT, state="forgotten"),
        lambda s, g: g.states.update(processing=1),
    ],
    ids=["long", "threads were busy", "large", "erred", "cancelled", "at work"],
)
def test_otherwise_it_is_queued(end: Callable[[Script, Group], None]) -> None:
    s, prefix = Script(), Prefix()
    group = Group(prefix)
    assert not s.arrives(group)
    end(s, group)
    assert not s.arrives(Group(prefix))


@pytest.mark.parametrize(
    ("seconds", "answer"),
    [((0.003,), True), ((0.001, 0.005), True), ((*[0.001] * 9, 0.05), False)],
    ids=["even", "uneven", "a few are long"],
)
def test_an_even_deal_must_not_be_late(seconds: tuple[float, ...], answer: bool) -> None:
    """Of 40 tasks on four threads, which were idle for 50 ms when they were queued."""
    s, prefix = Script(), Prefix()
    group = Group(prefix, 40)
    s.arrives(group)
    mean = sum(seconds) / len(seconds)
    s.runs(group, *seconds, per_task=mean / 4 + 0.05 / 40)
    assert s.arrives(Group(prefix, 40)) is answer


def test_what_is_slower_at_once_is_queued_again_and_tried_again_much_later() -> None:
    s, prefix = Script(), Prefix()
    answers = []
    for _ in range(2 * BANNED):
        group = Group(prefix)
        answers.append(s.arrives(group))
        s.runs(group, SHORT, per_task=0.002 if answers[-1] else 0.001)
    assert answers[: 1 + STRIKES] == [False, *[True] * STRIKES]
    assert answers[1 + STRIKES :].count(True) == 1


def test_tasks_that_are_not_followed_are_no_idle_time() -> None:
    s, prefix = Script(), Prefix()
    group = Group(prefix)
    s.arrives(group)
    kind = s.engine.tables.durations.kind(Task(group))  # type: ignore[arg-type]
    for _ in range(N // 10):
        s.now += 10 * SHORT / 4
        s.tiny.ran(kind, SHORT, 10)
    group.end(SHORT)
    assert not s.arrives(Group(prefix)), "all four threads were busy"


def test_a_short_phase_is_queued_where_a_worker_is_slow() -> None:
    s, prefix = Script(), Prefix()
    group = Group(prefix, 40)
    s.arrives(group)
    s.runs(group, 0.003, per_task=0.003)
    slow = s.engine.tables.workers.all.items[2]
    slow.slowness = 2.0
    s.engine.tables.speeds.learned(slow)
    assert not s.arrives(Group(prefix, 40))


def test_another_prefix_or_size_is_no_evidence() -> None:
    s, prefix = Script(), Prefix()
    group = Group(prefix)
    s.arrives(group)
    s.runs(group, SHORT)
    assert not s.arrives(Group(Prefix("load")))
    assert not s.arrives(Group(prefix, 4 * N))
    assert s.arrives(Group(prefix, N + 1))


def test_results_of_all_tasks_count() -> None:
    s, prefix = Script(), Prefix()
    mark = sum(info.mark_bytes for info in s.engine.tables.workers.all.items)
    for factor, answer in ((0.9, False), (1.1, True), (0.9, False)):
        group = Group(prefix)
        assert s.arrives(group) is answer
        s.runs(group, SHORT, nbytes=int(factor * ROOM_SHARE * mark / N))


def test_only_what_is_free_counts() -> None:
    """Of each worker: one that holds much gets its even share, too."""
    s, prefix = Script(), Prefix()
    infos = s.engine.tables.workers.all.items
    mark = sum(info.mark_bytes for info in infos)
    for held, answer in ((0.0, False), (0.5, True), (0.7, False)):
        infos[2].ws.nbytes = int(held * infos[2].mark_bytes)
        group = Group(prefix)
        assert s.arrives(group) is answer
        s.runs(group, SHORT, nbytes=int(0.4 * ROOM_SHARE * mark / N))


def test_what_may_be_sent_ahead_goes_to_a_full_worker_too() -> None:
    s, prefix = Script(), Prefix()
    for info in s.engine.tables.workers.all.items:
        info.ws.nbytes = int(3 * info.mark_bytes)
    for answer in (False, True):
        group = Group(prefix)
        assert s.arrives(group) is answer
        s.runs(group, SHORT)


def test_the_last_worker_leaves() -> None:
    """Its tasks are ready again before the tables hear that it has left."""
    s, prefix = Script(), Prefix()
    group = Group(prefix)
    s.arrives(group)
    s.runs(group, SHORT)
    s.engine.scheduler.total_nthreads = 0
    assert not s.arrives(Group(prefix))


def test_not_behind_other_work() -> None:
    s, prefix = Script(), Prefix()
    group = Group(prefix)
    s.arrives(group)
    s.runs(group, SHORT)
    s.workers[3].processing.add("long")
    assert not s.arrives(Group(prefix))


def test_beside_a_task_that_has_seceded() -> None:
    """As one that submits work of its own, and waits for it."""
    s, prefix = Script(), Prefix()
    group = Group(prefix)
    s.arrives(group)
    s.runs(group, SHORT)
    s.workers[3].processing.add("submits")
    s.workers[3].long_running.add("submits")
    assert s.arrives(Group(prefix))


def test_behind_other_tiny_roots() -> None:
    s = Script()
    one, other = Prefix("one"), Prefix("other")
    for prefix in (one, other):
        group = Group(prefix)
        s.arrives(group)
        s.runs(group, SHORT)
    first, second, third = Group(one), Group(other), Group(one)
    assert s.arrives(first)
    first.states["processing"] = first.states.pop("released")
    s.workers[0].processing.update(range(N))
    assert s.arrives(second)
    s.workers[3].processing.add("long")
    assert not s.arrives(third), "those that are done do not count"


def test_a_group_that_goes_on_is_judged_by_its_new_tasks() -> None:
    """Where the futures of the last call are released after the next call, both are one group."""
    s, prefix = Script(), Prefix()
    group = Group(prefix)
    assert not s.arrives(group)
    s.runs(group, SHORT)
    for seconds, answer in ((SHORT, True), (0.05, True), (SHORT, False)):
        group.states["released"] += N
        # The graph's tasks are there when the hook is called.
        assert s.arrives(group) is answer
        s.runs(group, seconds)


def test_a_group_that_gets_more_tasks_while_it_runs_is_looked_at_anew() -> None:
    """As by two calls of ``map`` with functions of one name: how many and how large the second are is not known."""
    s, prefix = Script(), Prefix()
    group = Group(prefix)
    s.arrives(group)
    s.runs(group, SHORT)
    group = Group(prefix)
    assert s.arrives(group)
    group.states["processing"] = group.states.pop("released")
    s.workers[0].processing.update(range(N))
    group.states["released"] = 4 * N
    assert not s.arrives(group), "of so many nothing is known"
    group.states["memory"] = group.states.pop("processing")
    s.workers[0].processing.clear()
    s.runs(group, SHORT)
    assert s.arrives(Group(prefix, 4 * N))


def test_what_is_done_is_not_kept() -> None:
    """Groups refer to those they depend on: keeping one that got tasks which no root followed would keep all."""
    s, prefix = Script(), Prefix()
    group = Group(prefix)
    s.arrives(group)
    group.states["processing"], group.states["released"] = N, 1
    s.tiny.graph_arrived()
    assert s.tiny._grown == {group}
    group.states["memory"] = group.states.pop("processing") + group.states.pop("released")
    s.tiny.graph_arrived()
    assert not s.tiny._looked
    assert not s.tiny._grown
    assert not s.tiny.times


def test_tasks_that_join_a_group_count_for_its_mean() -> None:
    s, prefix = Script(), Prefix()
    group = Group(prefix)
    s.arrives(group)
    group.states["released"] += 3 * N
    s.runs(group, SHORT)
    assert s.arrives(Group(prefix)), "four times the seconds, of four times the tasks"


def test_small_groups_are_not_kept() -> None:
    s = Script()
    for _ in range(10):
        assert not s.arrives(Group(Prefix(), 8))
    assert not s.tiny._looked


@pytest.mark.cluster
def test_a_map_that_is_repeated_is_not_queued() -> None:
    @gen_cluster(client=True, nthreads=FOUR)
    async def run(c: Any, s: Scheduler, *workers: Worker) -> None:
        # Placement queues by itself only without validation, and so do roots that are not queued.
        s.validate = False
        plugin = await install(s)
        tiny = plugin.engine.root_dispatch.tiny
        queued, kinds = [], []
        for _ in range(3):
            futures = c.map(lambda i: i + 1, range(200), pure=False)
            assert sum(await c.gather(futures)) == 20100
            stories = [s.story(f.key) for f in futures]
            queued.append(sum(any("queued" in event for event in story) for story in stories))
            assert len({ws for f in futures for ws in s.tasks[f.key].who_has}) == len(workers)
            said = [story for f in futures if (story := plugin.explain(f.key)) is not None]
            kinds.append({story["kind"] for story in said if story["actual"]["outcome"] == "memory"})
            del futures
        assert queued[0] > 0
        assert queued[1:] == [0, 0]
        assert tiny.given == 400
        assert "tiny root" not in kinds[0]
        assert kinds[1:] == [{"tiny root"}, {"tiny root"}]
        plugin.uninstall()

    run()
