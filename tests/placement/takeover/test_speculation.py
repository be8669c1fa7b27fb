"""Second copies of running tasks on live clusters with validation on: every order in which things can end."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import dask
import pytest
from distributed import Worker, get_worker
from distributed.utils_test import NO_AMM, gen_cluster

from dask_gpurt.config import PlacementSettings
from dask_gpurt.placement.plugin import PlacementPlugin
from dask_gpurt.placement.takeover.worker_copies import WorkerCopies
from tests.placement.clusters import until
from tests.placement.fakes import SETTINGS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distributed.scheduler import Scheduler

    from dask_gpurt.placement.takeover.speculation import Speculation

pytestmark = pytest.mark.cluster

#: three workers of one thread each, validation on
three = gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 3, timeout=60)
#: and nobody but the test who drops replicas
three_without_amm = gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 3, timeout=60, config=NO_AMM)
#: worker address -> open: its tasks end
GATES: dict[str, threading.Event] = {}
#: addresses whose next task fails at its end
FAILING: set[str] = set()
#: (worker address, key) of every run that has reached its gate
INSIDE: set[tuple[str, Any]] = set()


@pytest.fixture(autouse=True)
def gates() -> Iterator[None]:
    GATES.clear()
    FAILING.clear()
    INSIDE.clear()
    yield
    for gate in GATES.values():
        gate.set()


def held(*args: Any) -> str:
    """Runs until the gate of its worker is open; returns the worker's address."""
    address = get_worker().address
    gate = GATES.setdefault(address, threading.Event())
    INSIDE.add((address, get_worker().get_current_task()))
    assert gate.wait(30)
    if address in FAILING:
        FAILING.discard(address)  # once: a retry may come back at once
        raise ValueError(f"failed on {address}")
    return address


def open_gate(worker: Worker) -> None:
    GATES.setdefault(worker.address, threading.Event()).set()


def inside(w: Worker, key: str) -> bool:
    """Whether it has reached its gate: a run that has not would wait for the gate of the next round."""
    return (w.address, key) in INSIDE


async def started(s: Scheduler) -> PlacementPlugin:
    plugin = PlacementPlugin(SETTINGS)
    s.add_plugin(plugin)
    await plugin.start(s)
    return plugin


async def twice(
    c: Any, s: Scheduler, first: Worker, second: Worker, **kw: Any
) -> tuple[PlacementPlugin, Speculation, Any]:
    """A task that runs on both workers."""
    plugin = await started(s)
    assert plugin.copies is not None
    f = c.submit(held, pure=False, key="held-1", workers=[first.address], **kw)
    await until(lambda: inside(first, "held-1"))
    s.tasks[f.key].worker_restrictions = None
    assert plugin.copies.start(s.tasks[f.key], s.workers[second.address])
    assert not plugin.copies.start(s.tasks[f.key], s.workers[second.address]), "one copy is enough"
    await until(lambda: inside(second, "held-1"))
    return plugin, plugin.copies, f


async def settled(s: Scheduler, copies: Speculation, *workers: Worker) -> None:
    """All ended: the scheduler and the workers agree on who has what."""
    for w in workers:
        open_gate(w)
    await until(lambda: all(not w.state.executing_count for w in workers))
    await until(
        lambda: all(
            set(w.data) == {ts.key for ts in s.workers[w.address].has_what} for w in workers if w.address in s.workers
        )
    )
    s.validate_state()
    for w in workers:
        w.validate_state()
    assert not copies.copies
    assert not copies.per_worker


@three
async def test_the_first_wins(c: Any, s: Scheduler, a: Worker, b: Worker, d: Worker) -> None:
    plugin, copies, f = await twice(c, s, a, b)
    open_gate(a)
    assert await f == a.address
    await settled(s, copies, a, b, d)
    assert {ws.address for ws in s.tasks[f.key].who_has or ()} == {a.address}
    assert copies.counts == {"started": 1, "lost": 1}
    assert plugin.statistics()["copies"]["running"] == 0
    assert not plugin.statistics()["fallbacks"]


@three
async def test_the_second_wins(c: Any, s: Scheduler, a: Worker, b: Worker, d: Worker) -> None:
    WorkerCopies(a).install()  # the dependent may come before the losing copy ends
    plugin, copies, f = await twice(c, s, a, b)
    open_gate(b)
    assert await f == b.address
    assert {ws.address for ws in s.tasks[f.key].who_has or ()} == {b.address}
    assert not s.workers[a.address].processing
    assert not s.workers[b.address].processing
    # A dependent that runs where the losing copy still computes the same key.
    g = c.submit(str, f, workers=[a.address], pure=False)
    open_gate(a)
    assert await g == b.address
    await settled(s, copies, a, b, d)
    assert copies.counts["won"] == 1
    assert plugin.engine is not None
    assert not plugin.engine.backlog.charges
    assert not plugin.statistics()["fallbacks"]
    moves = [(start, finish) for _, start, finish, *_ in s.story(f.key) if isinstance(start, str)]
    assert ("processing", "memory") in moves
    assert ("processing", "released") not in moves
    story = plugin.explain(f.key)
    assert story is not None
    assert story["actual"]["worker"] == b.address


@three_without_amm  # it may drop the replica of the winner, and leave the one that the dependent has fetched
async def test_both_at_once(c: Any, s: Scheduler, a: Worker, b: Worker, d: Worker) -> None:
    plugin, copies, f = await twice(c, s, a, b)
    open_gate(a)
    open_gate(b)
    assert await f in (a.address, b.address)
    for w in (a, b):
        WorkerCopies(w).install()  # `held` returns something else on every worker
    for i in range(2, 40):
        for w in (a, b):
            GATES[w.address] = threading.Event()
        f = c.submit(held, pure=False, key=f"held-{i}", workers=[a.address])
        await until(lambda i=i: inside(a, f"held-{i}"))  # type: ignore[misc]
        assert copies.start(s.tasks[f.key], s.workers[b.address])
        await until(lambda i=i: inside(b, f"held-{i}"))  # type: ignore[misc]
        open_gate(b)
        open_gate(a)
        g = c.submit(str, f, workers=[(a if i % 2 else b).address], pure=False)
        got = await f
        assert await g == got
        assert got in (a.address, b.address)
        assert got in {ws.address for ws in s.tasks[f.key].who_has or ()}
    await settled(s, copies, a, b, d)
    assert copies.counts["started"] == 39
    assert copies.counts["won"] + copies.counts["lost"] == 39
    assert not plugin.statistics()["fallbacks"]


@three
async def test_the_losers_own_value_is_not_read(c: Any, s: Scheduler, a: Worker, b: Worker, d: Worker) -> None:
    stock = a.execute
    one = WorkerCopies(a)
    one.install()
    _, copies, f = await twice(c, s, a, b)
    open_gate(b)
    assert await f == b.address
    await until(lambda: a.state.tasks[f.key].state == "cancelled")
    # The winner does not answer: the loser's run ends before the value can have been fetched.
    transfers = b.transfer_outgoing_count_limit
    b.transfer_outgoing_count_limit = 0
    g = c.submit(str, f, workers=[a.address], pure=False)
    await until(lambda: a.state.tasks[f.key].state == "resumed")
    open_gate(a)
    await until(lambda: one.statistics()["discarded"] == 1)
    b.transfer_outgoing_count_limit = transfers
    assert await g == b.address
    await settled(s, copies, a, b, d)
    one.uninstall()
    one.uninstall()
    assert a.execute == stock


@three
async def test_a_late_message_of_the_loser_is_not_heard(c: Any, s: Scheduler, a: Worker, b: Worker, d: Worker) -> None:
    _, copies, f = await twice(c, s, a, b)
    old = s.tasks[f.key].run_id
    open_gate(b)
    assert await f == b.address
    s.stream_handlers["task-finished"](
        key=f.key, worker=a.address, stimulus_id="late", run_id=old, nbytes=1, type=b"", typename="", startstops=[]
    )
    assert copies.counts["swallowed"] == 1
    assert s.tasks[f.key].state == "memory"
    await settled(s, copies, a, b, d)
    assert await f == b.address


@three
async def test_an_error_of_the_copy_does_not_count(c: Any, s: Scheduler, a: Worker, b: Worker, d: Worker) -> None:
    _, copies, f = await twice(c, s, a, b)
    FAILING.add(b.address)
    open_gate(b)
    await until(lambda: copies.counts["erred"])
    assert not copies.start(s.tasks[f.key], s.workers[d.address]), "it would fail again, ten times a second"
    assert s.tasks[f.key].state == "processing"
    open_gate(a)
    assert await f == a.address
    await settled(s, copies, a, b, d)


@pytest.mark.parametrize("retries", [0, 1])
@three
async def test_an_error_of_the_first_is_the_tasks(
    c: Any, s: Scheduler, a: Worker, b: Worker, d: Worker, retries: int
) -> None:
    _, copies, f = await twice(c, s, a, b, retries=retries)
    FAILING.add(a.address)
    open_gate(a)
    if retries:
        await until(lambda: s.tasks[f.key].retries == 0)
        FAILING.clear()
        open_gate(b)
        open_gate(d)
        assert await f in (a.address, b.address, d.address)
    else:
        with pytest.raises(ValueError, match="failed on"):
            await f
    await settled(s, copies, a, b, d)


@three
async def test_the_first_worker_dies(c: Any, s: Scheduler, a: Worker, b: Worker, d: Worker) -> None:
    _, copies, f = await twice(c, s, a, b)
    await s.remove_worker(a.address, stimulus_id="test")
    await until(lambda: s.tasks[f.key].state == "processing")
    open_gate(b)
    # Wherever it was assigned anew, the copy's result is taken.
    assert await f == b.address
    open_gate(a)
    await settled(s, copies, b, d)
    assert copies.counts["won"] == 1


@three
async def test_the_first_worker_dies_and_its_successor_is_first(
    c: Any, s: Scheduler, a: Worker, b: Worker, d: Worker
) -> None:
    _, copies, f = await twice(c, s, a, b)
    s.tasks[f.key].worker_restrictions = {d.address}
    await s.remove_worker(a.address, stimulus_id="test")
    await until(lambda: d.state.executing_count == 1)
    open_gate(d)
    assert await f == d.address
    open_gate(a)
    await settled(s, copies, b, d)
    assert copies.counts["lost"] == 1


@three
async def test_the_copy_is_adopted(c: Any, s: Scheduler, a: Worker, b: Worker, d: Worker) -> None:
    _, copies, f = await twice(c, s, a, b)
    s.tasks[f.key].worker_restrictions = {b.address}
    await s.remove_worker(a.address, stimulus_id="test")
    await until(lambda: s.tasks[f.key].processing_on is s.workers[b.address])
    assert copies.copies[f.key].adopted
    open_gate(b)
    assert await f == b.address
    open_gate(a)
    await settled(s, copies, b, d)
    moves = [(start, finish) for _, start, finish, *_ in s.story(f.key) if isinstance(start, str)]
    assert moves.count(("processing", "released")) == 1, "only for the death of the first worker"


@three
async def test_an_adopted_copy_that_has_finished_answers_twice(
    c: Any, s: Scheduler, a: Worker, b: Worker, d: Worker
) -> None:
    """It ends before the message of the new assignment comes, and is told of once for each of the two run ids."""
    _, copies, f = await twice(c, s, a, b)
    s.tasks[f.key].worker_restrictions = {b.address}
    later: list[Any] = []
    send, stream = s.worker_send, s.stream_comms[b.address]
    real = stream.send

    def hold_back(*msgs: Any) -> None:
        held_back = [m for m in msgs if m["op"] == "compute-task"]
        later.extend(held_back)
        real(*[m for m in msgs if m not in held_back])

    stream.send = hold_back
    await s.remove_worker(a.address, stimulus_id="test")
    await until(lambda: later)
    assert copies.copies[f.key].adopted
    open_gate(b)
    assert await f == b.address
    stream.send = real
    send(b.address, later[0])
    await until(lambda: copies.counts["swallowed"] == 1)
    open_gate(a)
    await settled(s, copies, b, d)
    moves = [(start, finish) for _, start, finish, *_ in s.story(f.key) if isinstance(start, str)]
    assert moves.count(("processing", "memory")) == 1
    assert ("memory", "released") not in moves


@three
async def test_the_task_is_stolen_by_the_worker_of_a_copy_that_waits(
    c: Any, s: Scheduler, a: Worker, b: Worker, d: Worker
) -> None:
    """It is the task itself from then on: freed as a loser, its result would be lost and computed again."""
    plugin = await started(s)
    copies = plugin.copies
    assert copies is not None
    others = [c.submit(held, pure=False, key=f"other-{i}", workers=[w.address]) for i, w in enumerate((b, d))]
    f = c.submit(held, pure=False, key="held-1", workers=[a.address])
    await until(lambda: all(w.state.executing_count == 1 for w in (a, b, d)))
    ts = s.tasks[f.key]
    ts.worker_restrictions = {d.address}
    assert copies.start(ts, s.workers[b.address])
    await s.remove_worker(a.address, stimulus_id="test")
    assert ts.processing_on is s.workers[d.address]
    ts.worker_restrictions = None
    await until(lambda: f.key in b.state.tasks and f.key in d.state.tasks)
    s.extensions["stealing"].move_task_request(ts, ts.processing_on, s.workers[b.address])
    await until(lambda: ts.processing_on is s.workers[b.address])
    run_id = ts.run_id
    await until(lambda: b.state.tasks[f.key].run_id == run_id)
    open_gate(b)
    assert await f == b.address
    open_gate(a)
    await settled(s, copies, b, d)
    assert await c.gather(others) == [b.address, d.address]
    moves = [(start, finish) for _, start, finish, *_ in s.story(f.key) if isinstance(start, str)]
    assert ("memory", "released") not in moves
    assert copies.counts == {"started": 1, "won": 1}
    assert not copies.gained["held"], "nothing against further copies"


@three
async def test_the_second_worker_dies(c: Any, s: Scheduler, a: Worker, b: Worker, d: Worker) -> None:
    _, copies, f = await twice(c, s, a, b)
    await s.remove_worker(b.address, stimulus_id="test")
    assert copies.counts["worker lost"] == 1
    assert s.tasks[f.key].suspicious == 0
    assert not copies.start(s.tasks[f.key], s.workers[d.address]), "it may be what kills workers"
    open_gate(a)
    assert await f == a.address
    open_gate(b)
    await settled(s, copies, a, d)


@three
async def test_cancelled_by_the_client(c: Any, s: Scheduler, a: Worker, b: Worker, d: Worker) -> None:
    _, copies, f = await twice(c, s, a, b)
    await c.cancel([f])
    await until(lambda: not s.tasks)
    assert not copies.copies
    # What the scheduler says of the old future comes before this: it would cancel the new one, which has its key.
    await c.submit(str, workers=[d.address], pure=False)
    # The same key with another meaning, while both still compute the old one.
    g = c.submit(lambda: "new", key=f.key)
    open_gate(a)
    open_gate(b)
    assert await g == "new"
    await settled(s, copies, a, b, d)


@three
async def test_computed_again_where_the_loser_still_runs(c: Any, s: Scheduler, a: Worker, b: Worker, d: Worker) -> None:
    _, copies, f = await twice(c, s, a, b)
    open_gate(b)
    assert await f == b.address
    # The only result is lost; the task goes back to where the loser has not noticed anything yet.
    s.tasks[f.key].worker_restrictions = {a.address}
    await s.remove_worker(b.address, stimulus_id="test")
    await until(lambda: s.tasks[f.key].processing_on is s.workers[a.address])
    open_gate(a)
    assert await asyncio.wait_for(c.submit(str, f, workers=[d.address], pure=False), 20) == a.address
    await settled(s, copies, a, d)


@three
async def test_detach_while_a_copy_runs(c: Any, s: Scheduler, a: Worker, b: Worker, d: Worker) -> None:
    plugin, copies, f = await twice(c, s, a, b)
    plugin.uninstall()
    open_gate(b)
    open_gate(a)
    assert await f == a.address
    await settled(s, copies, a, b, d)


@three
async def test_a_broken_handler_does_no_harm(
    c: Any, s: Scheduler, a: Worker, b: Worker, d: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin, copies, f = await twice(c, s, a, b)

    def broken(*args: Any) -> bool:
        raise ZeroDivisionError("broken")

    monkeypatch.setattr(copies, "_may_finish", broken)
    monkeypatch.setattr(copies, "_may_err", broken)
    open_gate(b)
    await until(lambda: copies.counts["cancelled"])
    open_gate(a)
    assert await f == a.address
    await settled(s, copies, a, b, d)
    assert plugin.statistics()["fallbacks"]["copies"]["exception"] > 0
    assert set(s.workers) == {w.address for w in (a, b, d)}


@three_without_amm
async def test_inputs_of_a_copy_are_not_dropped_as_superfluous(
    c: Any, s: Scheduler, a: Worker, b: Worker, d: Worker
) -> None:
    data = (await c.scatter({"input": "x"}, workers=[a.address]))["input"]
    plugin = await started(s)
    copies = plugin.copies
    assert copies is not None
    f = c.submit(held, data, pure=False, key="held-1", workers=[a.address])
    await until(lambda: a.state.executing_count == 1)
    s.tasks[f.key].worker_restrictions = None
    assert copies.start(s.tasks[f.key], s.workers[b.address])
    await until(lambda: b.state.executing_count == 1)
    await until(lambda: len(s.tasks["input"].who_has or ()) == 2)
    # What active memory management does with a replica that no task it knows of needs.
    s.request_remove_replicas(b.address, ["input"], stimulus_id="superfluous")
    await c.run(lambda: None)  # after whatever was sent
    assert "input" in b.data
    assert copies.counts["inputs kept"] == 1
    open_gate(b)
    assert await f == b.address
    await settled(s, copies, a, b, d)
    # With no copy there the request goes through.
    s.request_remove_replicas(b.address, ["input"], stimulus_id="superfluous")
    await until(lambda: "input" not in b.data)
    plugin.uninstall()
    assert "request_remove_replicas" not in vars(s)


@three
async def test_an_override_of_removals_that_was_there_before_is_put_back(
    c: Any, s: Scheduler, a: Worker, b: Worker, d: Worker
) -> None:
    seen: list[str] = []

    def theirs(addr: str, keys: list[Any], *, stimulus_id: str) -> None:
        seen.append(addr)

    s.request_remove_replicas = theirs
    plugin = await started(s)
    s.request_remove_replicas(b.address, ["key"], stimulus_id="test")
    plugin.uninstall()
    assert vars(s)["request_remove_replicas"] is theirs
    assert seen == [b.address]
    del s.request_remove_replicas


@three
async def test_patrol_finds_a_straggler(c: Any, s: Scheduler, a: Worker, b: Worker, d: Worker) -> None:
    plugin = await started(s)
    for w in (a, b, d):
        open_gate(w)
    for i in range(6):
        await c.submit(held, pure=False, key=("held", i))
    GATES[a.address] = threading.Event()
    f = c.submit(held, pure=False, key=("held", 77), workers=[a.address])
    await until(lambda: a.state.executing_count == 1)
    s.tasks[f.key].worker_restrictions = None
    assert await f in (b.address, d.address)
    with dask.annotate(gpurt_rerun=False):
        g = c.submit(held, pure=False, key=("held", 78), workers=[a.address])
    assert plugin.copies is not None
    await until(lambda: plugin.engine is not None and plugin.copies is not None and plugin.copies.counts["won"])
    open_gate(a)
    assert await g == a.address
    await settled(s, plugin.copies, a, b, d)
    assert not plugin.statistics()["fallbacks"]


@three
async def test_a_wish_for_a_worker_that_is_busy_keeps_no_copy_off(
    c: Any, s: Scheduler, a: Worker, b: Worker, d: Worker
) -> None:
    plugin = await started(s)
    for w in (a, b, d):
        open_gate(w)
    for i in range(6):
        await c.submit(held, pure=False, key=("held", i))
    GATES[a.address] = threading.Event()
    f = c.submit(held, pure=False, key=("held", 77), workers=[a.address], allow_other_workers=True)
    await until(lambda: a.state.executing_count == 1)
    assert await asyncio.wait_for(f, 20) in (b.address, d.address)
    open_gate(a)
    assert plugin.copies is not None
    await settled(s, plugin.copies, a, b, d)


@three
async def test_never_when_annotated_or_switched_off(c: Any, s: Scheduler, a: Worker, b: Worker, d: Worker) -> None:
    plugin = await started(s)
    for w in (a, b, d):
        open_gate(w)
    for i in range(6):
        await c.submit(held, pure=False, key=f"held-{i}")
    GATES[a.address] = threading.Event()
    with dask.annotate(gpurt_rerun=False):
        f = c.submit(held, pure=False, key="held-77", workers=[a.address])
    await until(lambda: a.state.executing_count == 1)
    s.tasks[f.key].worker_restrictions = None
    assert plugin.engine is not None
    await until(lambda: plugin.engine is not None and plugin.engine.forbade["annotated"] > 2)
    assert plugin.copies is not None
    assert not plugin.copies.counts
    open_gate(a)
    assert await f == a.address
    plugin.uninstall()
    off = PlacementPlugin(PlacementSettings(enabled=True, candidates=16, stragglers=False))
    await off.start(s)
    assert off.copies is None
    assert s.stream_handlers["task-finished"] == s.handle_task_finished
    off.uninstall()


@three
async def test_no_second_effect_without_a_slow_worker(c: Any, s: Scheduler, a: Worker, b: Worker, d: Worker) -> None:
    """Tasks that a program submits may have effects: on equal workers a long one runs once, as with stock."""
    plugin = await started(s)
    for w in (a, b, d):
        open_gate(w)
    for i in range(6):
        await c.submit(held, i, pure=False)
    for w in (a, b):
        GATES[w.address] = threading.Event()
    impure = c.submit(held, pure=False, workers=[a.address])
    pure = c.submit(held, workers=[b.address])
    await until(lambda: a.state.executing_count == b.state.executing_count == 1)
    for f in (impure, pure):
        s.tasks[f.key].worker_restrictions = None
    await until(lambda: plugin.engine is not None and plugin.engine.forbade["impure"] > 4)
    assert plugin.copies is not None
    assert not plugin.copies.counts
    for w in (a, b):
        open_gate(w)
    assert await c.gather([impure, pure]) == [a.address, b.address]
