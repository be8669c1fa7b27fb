"""Cogroups of root tasks: pure tables first, then real clusters."""

from __future__ import annotations

import asyncio
import operator
from typing import TYPE_CHECKING, Any

import pytest
from distributed.utils_test import gen_cluster, inc, slowinc
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_gpurt.placement import engine
from dask_gpurt.placement.decide import root_blocks
from dask_gpurt.placement.decide.root_blocks import RootBlocks
from dask_gpurt.placement.decide.root_cuts import Member
from dask_gpurt.placement.plugin import PlacementPlugin
from tests.placement.fakes import SETTINGS

if TYPE_CHECKING:
    from collections.abc import Callable

    from distributed import Worker
    from distributed.scheduler import Scheduler


class Task:
    def __init__(self, key: str, priority: int, *dependencies: Task) -> None:
        self.key = key
        self.priority: tuple[int, ...] | None = (0, 1, priority)
        self.dependencies = set(dependencies)
        self.dependents: set[Task] = set()
        for d in dependencies:
            d.dependents.add(self)
        self.state = "released"
        self.group = key.rstrip("0123456789")
        self.who_has: set[Any] = set()

    def __repr__(self) -> str:
        return self.key


def sums(n: int, fan: int) -> list[Task]:
    """`n` roots, summed `fan` at a time."""
    roots = [Task(f"r{i}", 2 * i) for i in range(n)]
    return roots + [Task(f"s{i}", 2 * (i + fan) - 1, *roots[i : i + fan]) for i in range(0, n, fan)]


def members(*addresses: str, nodes: int = 1) -> list[Member]:
    """Workers of equal weight, on so many nodes."""
    per = -(-len(addresses) // nodes)
    return [Member(a, f"node{i // per}", 1.0) for i, a in enumerate(addresses)]


def arrive(tasks: list[Task], workers: list[Member]) -> tuple[RootBlocks, dict[Any, Task]]:
    g = RootBlocks()
    g.arrived(tasks, lambda: workers)
    for t in tasks:
        if not t.dependencies:
            t.state = "queued"
    return g, {t.key: t for t in tasks}


def pull_all(g: RootBlocks, tasks: dict[Any, Any], address: str, n: int, **kwargs: Any) -> list[str]:
    out = []
    for _ in range(n):
        queued = [t for t in tasks.values() if t.state == "queued"]
        if not queued:
            g.pull(address, tasks, None)  # nothing is queued: drops what is stale
            break
        ts = g.pull(address, tasks, min(queued, key=lambda t: t.priority), **kwargs)
        if ts is None:
            break
        ts.state = "processing"
        g.gone(ts.key)
        out.append(ts.key)
    return out


def test_each_worker_has_a_contiguous_block() -> None:
    g, tasks = arrive(sums(16, 4), members("a", "b"))
    assert pull_all(g, tasks, "a", 3) == ["r0", "r1", "r2"]
    assert pull_all(g, tasks, "b", 3) == ["r8", "r9", "r10"]
    assert pull_all(g, tasks, "a", 3) == ["r3", "r4", "r5"]
    assert g.cut == 2


def test_roots_that_get_other_priorities_change_places_in_their_blocks() -> None:
    roots = [Task(f"{name}{i}", 8 * side + i) for side, name in enumerate("xy") for i in range(8)]
    g, tasks = arrive(roots, members("a", "b"))
    assert pull_all(g, tasks, "a", 1) == ["x0"]
    before = {key: block.owner for key, block in g.by_key.items()}
    # What is left of x, but x5, changes places with y.
    moved = [t for t in roots if t.key not in ("x0", "x5")]
    for t, priority in zip(moved[6:] + moved[:6], sorted(t.priority or () for t in moved), strict=True):
        t.priority = priority
    g.moved(moved)
    assert {key: block.owner for key, block in g.by_key.items()} == before
    for address in "ab":
        mine = [key for key, owner in before.items() if owner == address]
        pulled = pull_all(g, tasks, address, len(mine))
        assert sorted(pulled) == sorted(mine)
        others = [key for key in pulled if key != "x5"]
        assert others == sorted(others, key=lambda key: tasks[key].priority or ())


def test_neighbours_in_the_graph_are_on_one_node() -> None:
    g, tasks = arrive(sums(24, 6), members("a0", "a1", "b0", "b1", nodes=2))
    of = {a: pull_all(g, tasks, a, 6) for a in ("a0", "a1", "b0", "b1")}
    assert [k for keys in of.values() for k in keys] == [f"r{i}" for i in range(24)]


def test_a_cut_moves_to_the_border_of_a_sum() -> None:
    g, tasks = arrive(sums(42, 3), members("a", "b"))  # half is 21; with sums of 3 that is a border already
    assert len(pull_all(g, tasks, "a", 21)) == 21
    g, tasks = arrive(sums(44, 4), members("a", "b"))  # half is 22, in the middle of a sum
    block = [k for k, b in g.by_key.items() if b.owner == "a"]
    assert len(block) in (20, 24)


def test_shares_follow_weights() -> None:
    g, _ = arrive(sums(40, 2), [Member("slow", "n", 1.0), Member("fast", "n", 3.0)])
    owners = [b.owner for b in g.by_key.values()]
    assert owners.count("slow") == 10
    assert owners.count("fast") == 30


def test_a_root_that_everybody_needs_belongs_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(root_blocks, "MAX_DEPENDENTS", 8)
    shared = Task("shared", 0)
    roots = [Task(f"r{i}", i + 1) for i in range(16)]
    g, tasks = arrive([shared, *roots, *(Task(f"f{i}", 100 + i, r, shared) for i, r in enumerate(roots))], members("a"))
    assert len(g) == 16
    assert not g.waits(tasks["shared"])


def test_a_root_that_many_blocks_share_belongs_to_nobody() -> None:
    """Its users are on several workers. In a block it would wait behind what its owner has to do."""
    shared = [Task(f"shared{i}", i) for i in range(2)]
    roots = [Task(f"r{i}", i + 2) for i in range(16)]
    users = [Task(f"f{i}", 100 + i, r, shared[i % 2]) for i, r in enumerate(roots)]
    g, _tasks = arrive([*shared, *roots, *users], members("a", "b", "c", "d"))
    assert len(g) == 16
    assert not any(g.waits(t) for t in shared)
    # Not where each root is needed as often: of a product of matrices nothing would be left in blocks.
    rows = [Task(f"a{i}", i) for i in range(16)]
    columns = [Task(f"b{i}", 16 + i) for i in range(16)]
    products = [Task(f"p{i}-{j}", 100 + 16 * i + j, a, b) for i, a in enumerate(rows) for j, b in enumerate(columns)]
    g, _ = arrive([*rows, *columns, *products], members("a", "b", "c", "d"))
    assert len(g) == 32
    # Nor where one block has all that need it.
    few = Task("few", 0)
    roots = [Task(f"r{i}", i + 1) for i in range(40)]
    g, _ = arrive([few, *roots, *(Task(f"f{i}", 100 + i, r, few) for i, r in enumerate(roots[:8]))], members("a", "b"))
    assert len(g) == 41


def test_few_roots_have_no_owners() -> None:
    g, tasks = arrive(sums(3, 3), members("a", "b", "c", "d"))
    assert len(g) == 0
    assert g.pull("w", tasks, tasks["r0"]) is None


def test_scattered_data_has_no_priority() -> None:
    data = Task("data", 0)
    data.priority = None
    data.state = "memory"
    g = RootBlocks()
    g.arrived([*sums(8, 2), data, Task("f", 99, data)], lambda: members("a", "b"))
    assert len(g) == 8


def test_cancelled_and_running_roots_are_skipped() -> None:
    g, tasks = arrive(sums(8, 4), members("a"))
    del tasks["r0"]
    tasks["r1"].state = "processing"
    tasks["r2"].state = "released"
    assert pull_all(g, tasks, "a", 8) == ["r3", "r4", "r5", "r6", "r7"]
    assert len(g) == 0
    assert not g.by_owner
    assert not g.unowned


def test_a_root_that_is_not_ready_yet_is_waited_for() -> None:
    g, tasks = arrive(sums(8, 4), members("a"))
    tasks["r0"].state = "waiting"
    assert pull_all(g, tasks, "a", 1) == []
    tasks["r0"].state = "queued"
    assert pull_all(g, tasks, "a", 2) == ["r0", "r1"]


def test_a_block_whose_owner_left_is_taken_over() -> None:
    g, tasks = arrive(sums(12, 4), members("a", "b", "c"))
    assert pull_all(g, tasks, "a", 1) == ["r0"]
    assert pull_all(g, tasks, "b", 4) == ["r4", "r5", "r6", "r7"]
    g.worker_removed("a")
    g.worker_removed("a")
    assert pull_all(g, tasks, "b", 3) == ["r1", "r2", "r3"]


def test_who_has_nothing_takes_the_back_half_of_the_longest_block() -> None:
    g, tasks = arrive(sums(24, 4), members("a", "b"))
    assert pull_all(g, tasks, "a", 10) == [f"r{i}" for i in range(10)]
    taken = pull_all(g, tasks, "late", 12)
    assert taken[:4] == ["r16", "r17", "r18", "r19"]  # b had 12; the border of a sum is nearest to the middle
    assert g.split >= 1


def test_far_blocks_are_only_taken_when_allowed() -> None:
    g, tasks = arrive(sums(16, 4), members("a", "b", nodes=2))
    assert len(pull_all(g, tasks, "a", 8, node="node0", may_take=lambda owner, left: False)) == 8
    assert pull_all(g, tasks, "a", 1, node="node0", may_take=lambda owner, left: False) == []
    asked: list[tuple[str, int]] = []

    def may_take(owner: str, left: int) -> bool:
        asked.append((owner, left))
        return True

    assert pull_all(g, tasks, "a", 1, node="node0", may_take=may_take) == ["r12"]
    assert asked == [("b", 8)]


@pytest.mark.parametrize(("nbytes", "shared"), [(1000, True), (10**7, False)])
def test_roots_that_read_one_light_source_begin_their_graph(nbytes: int, shared: bool) -> None:
    """As all chunks of a zarr array read the array object. A heavy source is not copied to each worker for this."""
    source = Task("source", 0)
    source.get_nbytes = lambda: nbytes  # type: ignore[attr-defined]
    reads = [Task(f"read{i}", 2 * i + 1, source) for i in range(44)]
    joins = [Task(f"join{i}", 2 * (i + 4), *reads[i : i + 4]) for i in range(0, 44, 4)]
    g = RootBlocks()
    g.arrived([source, *reads, *joins], lambda: members("a", "b"), is_root=lambda t: t.group == "read")
    assert not len(g), "it is not known yet how heavy the source is"
    source.state = "memory"
    for t in reads:
        t.state = "waiting"
    assert g.waits(reads[0]) is shared
    owners = [g.owner(t.key) for t in reads]
    assert owners == (["a"] * 20 + ["b"] * 24 if shared else [None] * 44), "cut by what the whole graph joins"


def test_a_graph_is_not_looked_through_for_each_of_very_many_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    cut = root_blocks.share_out
    monkeypatch.setattr(root_blocks, "share_out", lambda *args: looked.append(len(args[0])) or cut(*args))
    monkeypatch.setattr(root_blocks, "LOOKED", 300, raising=False)
    sources = [Task(f"source-{name}", 5 * n) for n, name in enumerate("abcdefghij")]
    reads = [[Task(f"read-{s.key}-{i}", 5 * n + i + 1, s) for i in range(4)] for n, s in enumerate(sources)]
    for n, mine in enumerate(reads):
        sources[n].get_nbytes = lambda: 1000  # type: ignore[attr-defined]
        sources[n].group = f"source{n}"
        for t in mine:
            t.group = f"read{n}"
    g = RootBlocks()
    tasks = [*sources, *(t for mine in reads for t in mine)]
    g.arrived(tasks, lambda: members("a", "b"), is_root=lambda t: t.group.startswith("read"))
    for source, mine in zip(sources, reads, strict=True):
        source.state = "memory"
        for t in mine:
            t.state = "waiting"
        g.waits(mine[0])
    assert sum(looked) <= 300
    assert g.waits(reads[0][1]), "the first of them are"


def test_what_waits_for_computed_data_is_no_beginning() -> None:
    source = Task("source", 0)
    model = Task("model", 1, source)
    model.get_nbytes = lambda: 1000  # type: ignore[attr-defined]
    reads = [Task(f"read{i}", i + 2, model) for i in range(12)]
    g = RootBlocks()
    g.arrived([source, model, *reads], lambda: members("a", "b"), is_root=lambda t: t.group == "read")
    model.state = "memory"
    for t in reads:
        t.state = "waiting"
    assert not g.waits(reads[0]), "nothing says that pieces would save anything"


def test_a_graph_that_came_before_the_workers_is_shared_out() -> None:
    g, tasks = arrive(sums(16, 4), [])
    assert pull_all(g, tasks, "first", 1) == ["r8"]
    assert pull_all(g, tasks, "second", 1) == ["r4"]
    rest = pull_all(g, tasks, "first", 16)
    assert sorted(["r8", "r4", *rest]) == sorted(f"r{i}" for i in range(16))


@pytest.mark.parametrize("before", [(-1, 2, 0), (0, 0, 0)], ids=["user's priority", "older graph"])
def test_more_urgent_tasks_go_first(before: tuple[int, ...]) -> None:
    g, tasks = arrive(sums(8, 4), members("w", "v"))
    assert pull_all(g, tasks, "w", 1) == ["r0"]
    urgent = Task("urgent", 0)
    urgent.priority, urgent.state = before, "queued"
    tasks["urgent"] = urgent
    assert pull_all(g, tasks, "w", 1) == []
    assert pull_all(g, tasks, "v", 1) == []
    urgent.state = "processing"
    assert pull_all(g, tasks, "w", 3) == ["r1", "r2", "r3"]


def test_blocks_of_graphs_that_are_done_do_not_pile_up_behind_one_that_is_not() -> None:
    """A graph of low priority waits for days while others come and go; they never reach the front of the blocks."""
    who = members("a", "b")
    g, tasks = arrive(sums(8, 4), who)
    for n in range(400):
        graph = [Task(f"x{n}-{i}", i) for i in range(4)]
        g.arrived(graph, lambda: who)
        for t in graph:
            assert g.gone(t.key)
    assert len(g) == 8
    assert sum(map(len, g.by_owner.values())) <= 128
    assert max(map(len, g._longest.values())) <= 128
    assert sum(len(block.keys) for blocks in g.by_owner.values() for block in blocks) == 8
    assert len(pull_all(g, tasks, "a", 8)) == 8, "what is left is found"
    assert not g.by_owner


def test_the_same_graph_again() -> None:
    tasks = sums(8, 4)
    g, _ = arrive(tasks, members("a", "b"))
    for t in tasks:
        t.state = "released"
    g.arrived(tasks, lambda: members("a", "b"))
    assert len(g) == 8
    assert g.cut == 2


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 3))
def test_every_root_is_pulled_at_most_once_and_nothing_is_left(seed: int, workers: int, nodes: int) -> None:
    import random

    rnd = random.Random(seed)
    roots = [Task(f"r{i}", i) for i in range(40)]
    layer = list(roots)
    everything = list(roots)
    for level in range(3):
        layer = [
            Task(f"l{level}-{i}", 100 * (level + 1) + i, *rnd.sample(layer, min(len(layer), rnd.randint(1, 4))))
            for i in range(15)
        ]
        everything += layer
    who = members(*(f"w{i}" for i in range(workers)), nodes=nodes)
    g, tasks = arrive(everything, who)
    owned = set(g.by_key)
    seen: list[str] = []
    while True:
        if rnd.random() < 0.1:
            g.worker_removed(rnd.choice(who).address)
        if rnd.random() < 0.2 and g.by_key:
            key = rnd.choice(sorted(map(str, g.by_key)))
            tasks[key].state = "processing"
            g.gone(key)
            seen.append(key)
        member = rnd.choice(who)
        got = pull_all(g, tasks, member.address, rnd.randint(1, 3), node=member.node)
        seen += got
        if not got and not g.by_key:
            break
    assert sorted(seen) == sorted(owned)
    assert len(g) == 0
    assert not g.by_owner
    assert not g.unowned


# ---------------------------------------------------------------------- clusters

FOUR = [("127.0.0.1", 1)] * 4


async def until(condition: Callable[[], Any]) -> None:
    while not condition():  # noqa: ASYNC110 (the state is not ours, there is no event)
        await asyncio.sleep(0)


async def install(s: Scheduler) -> PlacementPlugin:
    plugin = PlacementPlugin(SETTINGS)
    s.add_plugin(plugin)
    await plugin.start(s)
    assert plugin.engine is not None
    plugin.engine.always = True  # the overrides are what these tests are about
    # As in `make_engine`: a decision that the machine has interrupted would be stock's.
    plugin.engine.budget.decision_seconds = plugin.engine.budget.share = float("inf")
    return plugin


def sum_graph(n: int, fan: int, delay: float = 0.01) -> tuple[dict[Any, Any], list[Any], dict[Any, int]]:
    dsk: dict[Any, Any] = {("load", i): (slowinc, i, delay) for i in range(n)}
    out = []
    for i in range(0, n, fan):
        key = ("total", i // fan)
        dsk[key] = (sum, [("load", j) for j in range(i, i + fan)])
        out.append(key)
    return dsk, out, {k: sum(j + 1 for j in range(k[1] * fan, (k[1] + 1) * fan)) for k in out}


def moved(workers: tuple[Worker, ...]) -> int:
    return sum(len(entry["keys"]) for w in workers for entry in w.transfer_incoming_log)


@pytest.mark.cluster
@pytest.mark.parametrize("validate", [True, False])
def test_sums_are_right_and_local(validate: bool) -> None:
    config = {"distributed.scheduler.validate": validate, "distributed.scheduler.work-stealing": False}

    @gen_cluster(client=True, nthreads=FOUR, config=config, timeout=60)
    async def run(c: Any, s: Scheduler, *workers: Worker) -> None:
        assert s.validate is validate
        plugin = await install(s)
        dsk, out, right = sum_graph(96, 6)
        assert await c.gather(c.get(dsk, out, sync=False)) == [right[k] for k in out]
        stats = plugin.statistics()
        assert stats["roots"]["groups"] == 4
        assert stats["roots"]["pulled"] > 40
        assert not stats["fallbacks"]
        # Stock moves most of the 96; what is moved here is the end of the queue, and with validate the first wave.
        assert moved(workers) < (60 if validate else 40)
        await until(lambda: not s.tasks)
        assert plugin.statistics()["tables"] == {
            "workers": 4,
            "charges": 0,
            "unknown": 0,
            "roots": 0,
            "copies_on_disk": 0,
        }

    run()


@pytest.mark.cluster
def test_the_number_of_tasks_out_stays_bounded() -> None:
    config = {"distributed.scheduler.validate": False, "distributed.scheduler.work-stealing": False}

    @gen_cluster(client=True, nthreads=FOUR, config=config, timeout=60)
    async def run(c: Any, s: Scheduler, *workers: Worker) -> None:
        await install(s)
        # Roots that take long beside a fetch: else several sums wait for their inputs at a time.
        dsk, out, right = sum_graph(96, 6, 0.03)
        future = c.get(dsk, out, sync=False)
        most = 0
        gathered = asyncio.ensure_future(c.gather(future))
        while not gathered.done():
            most = max(most, *(len(ws.processing) for ws in s.workers.values()))
            await asyncio.sleep(0)
        assert await gathered == [right[k] for k in out]
        # ceil(1.1 * 1) roots and a sum that became ready; one more root when all of them wait for inputs
        assert most <= 2 + 1 + 1

    run()


@pytest.mark.cluster
@pytest.mark.parametrize("validate", [True, False])
def test_worker_leaves_and_comes_while_roots_are_queued(validate: bool) -> None:
    from distributed import Worker as W

    @gen_cluster(client=True, nthreads=FOUR, config={"distributed.scheduler.validate": validate}, timeout=90)
    async def run(c: Any, s: Scheduler, *workers: Worker) -> None:
        plugin = await install(s)
        dsk, out, right = sum_graph(96, 6, 0.02)
        future = c.get(dsk, out, sync=False)
        await until(lambda: sum(ts.state == "memory" for ts in s.tasks.values()) >= 10)
        await workers[0].close()
        async with W(s.address, nthreads=1):
            assert await c.gather(future) == [right[k] for k in out]
        assert not plugin.statistics()["fallbacks"]
        del future
        await until(lambda: not s.tasks)
        assert plugin.statistics()["tables"]["roots"] == 0

    run()


@pytest.mark.cluster
def test_cancelled_graph_leaves_nothing() -> None:
    @gen_cluster(client=True, nthreads=FOUR, config={"distributed.scheduler.validate": False}, timeout=60)
    async def run(c: Any, s: Scheduler, *workers: Worker) -> None:
        plugin = await install(s)
        assert plugin.engine is not None
        dsk, out, _ = sum_graph(96, 6, 0.02)
        future = c.get(dsk, out, sync=False)
        await until(lambda: s.queued)
        assert plugin.statistics()["tables"]["roots"] > 0
        await c.cancel(future)
        del future
        await until(lambda: not s.tasks)
        assert plugin.statistics()["tables"]["roots"] == 0
        assert not plugin.engine.groups.by_owner
        assert not plugin.engine.groups.unowned

    run()


@pytest.mark.cluster
def test_nothing_hangs_when_uninstalled_with_a_deal_pending() -> None:
    @gen_cluster(client=True, nthreads=FOUR, config={"distributed.scheduler.validate": False}, timeout=60)
    async def run(c: Any, s: Scheduler, *workers: Worker) -> None:
        plugin = await install(s)
        before = plugin.update_graph
        dsk, out, right = sum_graph(96, 6)

        def update_graph(scheduler: Any, **kwargs: Any) -> None:
            before(scheduler, **kwargs)
            # Runs after this graph's transitions and before the deal, which was promised later.
            asyncio.get_running_loop().call_soon(plugin.uninstall)

        plugin.update_graph = update_graph  # type: ignore[method-assign]
        assert await c.gather(c.get(dsk, out, sync=False)) == [right[k] for k in out]
        assert "_TRANSITIONS_TABLE" not in s.__dict__

    run()


@pytest.mark.cluster
@pytest.mark.parametrize("name", ["graph_arrived", "pull", "waits"])
def test_an_exception_in_groups_does_no_harm(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError(f"{name} is broken")

    monkeypatch.setattr(RootBlocks if name == "waits" else engine.Engine, name, broken)

    @gen_cluster(client=True, nthreads=FOUR, config={"distributed.scheduler.validate": False}, timeout=60)
    async def run(c: Any, s: Scheduler, *workers: Worker) -> None:
        plugin = await install(s)
        dsk, out, right = sum_graph(96, 6)
        assert await c.gather(c.get(dsk, out, sync=False)) == [right[k] for k in out]
        assert set(s.workers) == {w.address for w in workers}
        stats = plugin.statistics()
        assert stats["exceptions"] > 0
        assert f"{name} is broken" in stats["last_traceback"]

    run()


@pytest.mark.cluster
def test_wrong_pulls_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere:
        key = "elsewhere"
        state = "queued"

    @gen_cluster(client=True, nthreads=FOUR, config={"distributed.scheduler.validate": False}, timeout=60)
    async def run(c: Any, s: Scheduler, *workers: Worker) -> None:
        monkeypatch.setattr(engine.Engine, "pull", lambda self, ws, ahead=False: Elsewhere())
        plugin = await install(s)
        dsk, out, right = sum_graph(96, 6)
        assert await c.gather(c.get(dsk, out, sync=False)) == [right[k] for k in out]
        assert plugin.statistics()["fallbacks"]["roots"]["rejected"] > 0

    run()


@pytest.mark.cluster
def test_saturation_inf_is_left_to_stock() -> None:
    config = {"distributed.scheduler.worker-saturation": "inf"}

    @gen_cluster(client=True, nthreads=FOUR, config=config, timeout=60)
    async def run(c: Any, s: Scheduler, *workers: Worker) -> None:
        plugin = await install(s)
        dsk, out, right = sum_graph(96, 6, 0.0)
        assert await c.gather(c.get(dsk, out, sync=False)) == [right[k] for k in out]
        stats = plugin.statistics()
        assert stats["roots"]["pulled"] == 0
        assert not stats["fallbacks"]

    run()


@pytest.mark.cluster
def test_graph_in_pieces() -> None:
    @gen_cluster(client=True, nthreads=FOUR, config={"distributed.scheduler.validate": False}, timeout=60)
    async def run(c: Any, s: Scheduler, *workers: Worker) -> None:
        plugin = await install(s)
        xs = [c.submit(inc, i, pure=False) for i in range(60)]
        ys = [c.submit(operator.add, a, b, pure=False) for a, b in zip(xs[::2], xs[1::2], strict=True)]
        dsk, out, right = sum_graph(96, 6, 0.0)
        assert await c.gather(c.get(dsk, out, sync=False)) == [right[k] for k in out]
        assert await c.submit(sum, ys) == sum(range(1, 61))
        assert not plugin.statistics()["fallbacks"]

    run()
