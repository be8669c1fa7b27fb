"""How roots are shared out: by group, by phase, next to the data they meet, and not where blocks serialise a graph."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from dask_gpurt.placement.decide import root_cuts
from dask_gpurt.placement.decide.root_blocks import RootBlocks
from dask_gpurt.placement.decide.root_cuts import Member


class Task:
    def __init__(self, key: str, priority: int, *dependencies: Task, nbytes: int = 1000) -> None:
        self.key = key
        self.priority = (0, 1, priority)
        self.group = key.rstrip("0123456789")
        self.dependencies = set(dependencies)
        self.dependents: set[Task] = set()
        for d in dependencies:
            d.dependents.add(self)
        self.state = "released"
        self.who_has: set[Any] = set()
        self.nbytes = nbytes

    def get_nbytes(self) -> int:
        return self.nbytes

    def __repr__(self) -> str:
        return self.key


class Holder(NamedTuple):
    address: str


def members(*addresses: str) -> list[Member]:
    return [Member(a, "node", 1.0) for a in addresses]


def in_memory(task: Task, address: str) -> None:
    task.state, task.who_has = "memory", {Holder(address)}


def owners(groups: RootBlocks, tasks: list[Task]) -> list[str | None]:
    return [groups.owner(t.key) for t in tasks]


def test_each_worker_gets_its_share_of_each_group() -> None:
    large = [Task(f"large{i}", i) for i in range(8)]
    small = [Task(f"small{i}", 100 + i) for i in range(8)]
    g = RootBlocks()
    g.arrived([*large, *small], lambda: members("a", "b"))
    for kind in (large, small):
        assert owners(g, kind) == ["a"] * 4 + ["b"] * 4


def two_phases(n: int) -> tuple[list[Task], Task, list[Task], list[Task]]:
    """Roots, what joins them, roots that wait for that, and what joins each of those with one of the first."""
    first = [Task(f"first{i}", i) for i in range(n)]
    barrier = Task("barrier", 100, *first)
    second = [Task(f"second{i}", 101 + 2 * i, barrier) for i in range(n)]
    return first, barrier, second, [Task(f"use{i}", 102 + 2 * i, first[i], second[i]) for i in range(n)]


def rootish(t: Task) -> bool:
    return t.group in ("first", "second")


def test_a_phase_behind_a_barrier_is_shared_out_when_it_begins_and_next_to_what_it_meets() -> None:
    first, barrier, second, use = two_phases(8)
    g = RootBlocks()
    g.arrived([*first, barrier, *second, *use], lambda: members("a", "b"), rootish)
    assert owners(g, first) == ["a"] * 4 + ["b"] * 4
    assert owners(g, second) == [None] * 8, "who waits for them could not do anything else"
    for i, t in enumerate(first):
        g.gone(t.key)
        in_memory(t, "ab"[i % 2])  # not where they were dealt to
    in_memory(barrier, "a")
    barrier.nbytes = 8
    for t in second:
        t.state = "waiting"
    assert g.waits(second[0])
    assert owners(g, second) == ["a", "b"] * 4


def test_a_large_value_that_all_read_is_not_brought_to_all() -> None:
    first, barrier, second, use = two_phases(8)
    g = RootBlocks()
    g.arrived([*first, barrier, *second, *use], lambda: members("a", "b"), rootish)
    for t in first:
        g.gone(t.key)
        in_memory(t, "a")
    in_memory(barrier, "a")
    barrier.nbytes = 10**9
    for t in second:
        t.state = "waiting"
    assert not g.waits(second[0])
    assert owners(g, second) == [None] * 8
    assert not g.later


def test_roots_of_a_phase_that_reads_several_values_are_sorted_by_them() -> None:
    x, y = Task("x", 0), Task("y", 1)
    roots = [Task(f"root{i}", 2 + i, (x, y)[i % 2]) for i in range(6)]
    assert root_cuts.by_input(roots) == [*roots[::2], *roots[1::2]]


def test_a_cancelled_phase_leaves_nothing() -> None:
    first, barrier, second, use = two_phases(4)
    g = RootBlocks()
    g.arrived([*first, barrier, *second, *use], lambda: members("a", "b"), rootish)
    assert g.later
    for t in [*first, *second]:
        g.gone(t.key)
    assert not g.later
    assert not g.by_key


def test_data_that_many_read_is_no_reason_to_be_anywhere() -> None:
    shared = Task("shared", 0, nbytes=10**9)
    in_memory(shared, "b")
    mine = Task("mine", 1, nbytes=1000)
    in_memory(mine, "a")
    roots = [Task(f"root{i}", 10 + i, shared) for i in range(root_cuts.MAX_GROUP + 1)]
    Task("join", 99, roots[0], mine)
    assert root_cuts.partner(roots[0]) == "a"
    assert root_cuts.partner(roots[1]) is None


def scan(n: int) -> tuple[list[Task], list[Task]]:
    """A cumulative sum: each link of a chain reads one chunk, and each chunk is added to it."""
    roots = [Task(f"chunk{i}", 10 * i) for i in range(n)]
    tasks: list[Task] = []
    link = None
    for i, root in enumerate(roots):
        tasks += [root]
        if link is not None:
            tasks += [Task(f"sum{i}", 10 * i + 2, link, root), Task(f"add{i}", 10 * i + 3, link, root)]
        link = Task(f"link{i}", 10 * i + 1, root, *([link] if link else []))
        tasks += [link]
    return roots, sorted(tasks, key=lambda t: t.priority)


def test_blocks_are_not_cut_where_they_serialise_the_graph() -> None:
    roots, tasks = scan(16)
    g = RootBlocks()
    g.arrived(tasks, lambda: members("a", "b", "c", "d"))
    assert owners(g, roots) == [None] * 16
    assert g.declined == 1


@pytest.mark.parametrize(("seconds", "contiguous"), [(0.001, True), (0.1, False), (None, False)])
def test_waiting_that_is_shorter_than_messages_is_no_reason(seconds: float | None, contiguous: bool) -> None:
    roots, tasks = scan(16)
    g = RootBlocks(lambda ts: seconds)
    g.arrived(tasks, lambda: members("a", "b", "c", "d"))
    assert owners(g, roots) == ([w for w in "abcd" for _ in range(4)] if contiguous else [None] * 16)


def test_of_one_task_without_a_known_time_nothing_is_concluded() -> None:
    _, tasks = scan(16)
    g = RootBlocks(lambda ts: None if ts.key == "add9" else 0.001)
    g.arrived(tasks, lambda: members("a", "b", "c", "d"))
    assert g.declined == 1


def test_sums_of_neighbours_are_not_serial() -> None:
    roots = [Task(f"root{i}", 10 * i) for i in range(16)]
    sums = [Task(f"sum{i}", 10 * i + 35, *roots[i : i + 4]) for i in range(0, 16, 4)]
    tasks = sorted([*roots, *sums], key=lambda t: t.priority)
    owner = {t: i // 4 for i, t in enumerate(roots)}
    assert not root_cuts.serialises(tasks, owner, [1.0] * 4)


@pytest.mark.parametrize(("most", "serial"), [(6, False), (9, True)])
def test_of_wide_levels_others_take_their_part(most: int, serial: bool) -> None:
    """A second level of sixteen tasks on four workers, of which the first has more than its share."""
    roots = [Task(f"root{i}", 100 * i) for i in range(16)]
    mine = [Task(f"mine{i}", 100 * (i % 4) + 1 + i, roots[i % 4]) for i in range(most)]
    others = [Task(f"other{i}", 100 * (4 + i) + 1, roots[4 + i]) for i in range(16 - most)]
    tasks = sorted([*roots, *mine, *others], key=lambda t: t.priority)
    owner = {t: i // 4 for i, t in enumerate(roots)}
    assert root_cuts.serialises(tasks, owner, [1.0] * 4) is serial


def test_one_input_of_many_tasks_does_not_place_them() -> None:
    """What follows a broadcast value runs anywhere; it is not counted against the worker that made it."""
    root = Task("root0", 0)
    tasks = [root, *(Task(f"leaf{i}", 1 + i, root) for i in range(40))]
    assert not root_cuts.serialises(tasks, {root: 0}, [1.0] * 4)


def test_what_a_block_holds_beyond_an_even_deal() -> None:
    roots = [Task(f"root{i}", i) for i in range(16)]
    for i in range(0, 16, 8):
        Task(f"join{i}", 100 + i, *roots[i : i + 8])
    assert root_cuts.beyond_even(roots, [roots[:8], roots[8:]]) == 8 - 8 / 2
    assert root_cuts.beyond_even(roots, [roots[i::4] for i in range(4)]) == 4 - 8 / 4


def test_blocks_that_hold_too_much_are_given_up() -> None:
    roots = [Task(f"root{i}", i) for i in range(8)]
    g = RootBlocks()
    g.arrived(roots, lambda: members("a", "b"))
    assert g.by_key
    g.dissolve()
    g.dissolve()
    assert not g.by_key
    assert owners(g, roots) == [None] * 8
    assert g.dissolved == 1
