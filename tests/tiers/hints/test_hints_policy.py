"""The order of victims, and what a worker makes of hints, without a cluster."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
from distributed.worker_state_machine import ExecuteFailureEvent, ExecuteSuccessEvent

from benchmarks.eviction_record import record
from benchmarks.eviction_replay import Ours, moved, replay
from dask_gpurt.tiers.engine.entry import NEVER, Account, Entry
from dask_gpurt.tiers.engine.victims import Victims, soonest_use
from dask_gpurt.tiers.hints.protocol import KEEP, OP
from dask_gpurt.tiers.hints.scheduler import FLUSH_KEYS, MANY_HOLDERS, MANY_WAITERS, NextUsePlugin
from dask_gpurt.tiers.hints.worker import GUESS_SECONDS, HintReceiver, decided_share
from dask_gpurt.tiers.storage.codec import PickleCodec
from tests.tiers.conftest import guard

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.tiers.conftest import Rig

    RunRig = Callable[..., None]

ACCOUNT = Account("test", PickleCodec())


def entry(key: str, next_use: tuple[float, ...] | None = None, *, clean: bool = False, nbytes: int = 10_000) -> Entry:
    handle: Any = object() if clean else None
    made = Entry(key, ACCOUNT, nbytes, value=0, handle=handle)
    made.next_use = next_use
    return made


def drain(victims: Victims) -> list[str]:
    """All victims as `Engine.balance` asks for them; clean ones in capitals."""
    out = []
    while True:
        clean = victims.pop_clean()
        if clean is not None:
            out.append(str(clean.key).upper())
            continue
        dirty = victims.pop_dirty(small=True)
        if dirty is None:
            return out
        out.append(str(dirty.key))


def test_order() -> None:
    """No use ever, then unknown in LRU order, then the farthest use; clean among equals first; small ones last."""
    victims = Victims()
    for e in (
        entry("small", nbytes=10),
        entry("soon", (0, 1, 5)),
        entry("lru1"),
        entry("far", (0, 2, 0)),
        entry("lru2", clean=True),
        entry("never1", NEVER),
        entry("tie1", (0, 1, 9)),
        entry("tie2", (0, 1, 9), clean=True),
        entry("never2", NEVER),
        entry("lru3"),
        entry("soonest", (0, 1, 4), clean=True),
    ):
        victims.add(e)
    assert len(victims) == 11
    want = ["never1", "never2", "lru1", "LRU2", "lru3", "far", "TIE2", "tie1", "soon", "SOONEST", "small"]
    assert drain(victims) == want
    assert victims.decided_by == {"hint": 7, "lru": 3, "small": 1}
    assert decided_share(victims.decided_by) == 7 / 11
    assert len(victims) == 0


def test_one_order_for_those_that_rank_by_the_next_use_alone() -> None:
    """As values in device memory do: what is due here is needed before what is only foretold."""
    due_first, due_last, soon, far = entry("a", (0, 9)), entry("b"), entry("c", (0, 1)), entry("d", (0, 2))
    due_first.due, due_last.due = (0, 3), (0, 8)
    uses = [soonest_use(e) for e in (due_first, due_last, soon, far, entry("e", NEVER))]
    assert None not in uses
    assert uses == sorted(uses, key=lambda use: use or ())
    assert soonest_use(entry("f")) is None


def test_the_first_victim_is_found_without_passing_those_that_left() -> None:
    """In a plain dict each of n victims cost as many steps as had left before it: 4 s of event loop for 40,000."""
    victims = Victims()
    for table in (victims._unknown, victims._small, victims._clean):
        assert isinstance(table, OrderedDict)


def test_a_changed_hint_changes_the_place() -> None:
    victims = Victims()
    a, b = entry("a", (0, 1, 5)), entry("b", (0, 1, 6))
    victims.add(a)
    victims.add(b)
    a.next_use = (0, 1, 7)
    victims.add(a)
    b.guessed = True
    assert drain(victims) == ["a", "b"]
    assert victims.decided_by == {"hint": 1, "guess": 1}


def test_any_clean_one_when_nothing_can_be_written() -> None:
    victims = Victims()
    dirty, clean = entry("dirty", NEVER), entry("clean", (0, 1, 1), clean=True)
    victims.add(dirty)
    victims.add(clean)
    assert victims.pop_clean() is None
    assert victims.pop_clean(any_place=True) is clean
    assert victims.pop_clean(any_place=True) is None
    assert victims.decided_by == {"clean": 1}
    assert decided_share({}) is None


def test_a_flush_looks_for_its_tasks_once() -> None:
    """A search for each of 500 passed the places of all that were flushed before: 0.1 s of event loop in 500,000."""

    class Dirty(dict[Any, None]):
        looks = 0

        def __iter__(self) -> Any:
            self.looks += 1
            return super().__iter__()

    class Gone:
        key, who_has = "gone", ()

    plugin = NextUsePlugin()
    gone: Any = [Gone() for _ in range(FLUSH_KEYS + 1)]
    plugin._dirty = dirty = Dirty.fromkeys(gone)
    plugin._scheduler = cast("Any", SimpleNamespace(tasks={}))
    plugin._flush()
    assert dirty.looks == 1
    assert list(dirty) == gone[FLUSH_KEYS:]


class Holds(SimpleNamespace):
    """A worker as the scheduler's half sees it."""

    __hash__ = object.__hash__  # type: ignore[assignment]


class Waits:
    """A task as the scheduler's half sees it."""

    def __init__(self, number: int, dependencies: tuple[Any, ...] = ()) -> None:
        self.key, self.priority, self.dependencies = f"w{number}", (0, number), dependencies
        self.who_has: list[Any] = []
        self.waiters: set[Any] = set()


def shared_key(holders: int) -> tuple[NextUsePlugin, Any, list[Any], list[tuple[str, int]]]:
    """The plugin on a scheduler with one key, many tasks that wait for it, and its holders; what is sent to whom."""
    plugin, shared, sent = NextUsePlugin(), Waits(-1), list[tuple[str, int]]()
    waiting = [Waits(number, (shared,)) for number in range(0, 4 * MANY_WAITERS, 2)]
    shared.waiters, shared.who_has = set(waiting), [Holds(address=f"a{i}") for i in range(holders)]
    plugin._scheduler = cast(
        "Any",
        SimpleNamespace(
            tasks={t.key: t for t in (shared, *waiting)},
            workers={ws.address: ws for ws in shared.who_has},
            worker_send=lambda address, message: sent.append((address, len(message["items"]))),
        ),
    )
    plugin._understands = lambda ws: True  # type: ignore[method-assign]
    plugin._dirty[shared] = None
    plugin._flush()
    assert len(sent) == holders
    sent.clear()
    return plugin, shared, waiting, sent


def test_one_more_waiter_of_a_shared_key_takes_its_place_among_them() -> None:
    """All of 50,000 were sorted again for each task that was submitted: 70 ms of the scheduler's loop."""
    plugin, shared, waiting, _ = shared_key(1)
    order = plugin._sorted[shared]
    more = Waits(7, (shared,))
    shared.waiters.add(more)
    plugin._scheduler.tasks[more.key] = more  # type: ignore[union-attr]
    plugin._note(more.key, "released", "waiting", None)
    shared.waiters.remove(waiting[0])
    plugin._note(waiting[0].key, "processing", "erred", None)
    plugin._flush()
    assert plugin._sorted[shared] is order
    assert plugin._uses(shared) == tuple(sorted(t.priority for t in shared.waiters)[:KEEP])
    # Those that were given up do not gather.
    for waiter in waiting[2:]:
        shared.waiters.discard(waiter)
        if len(shared.waiters) == MANY_WAITERS + 1:
            break
    plugin._uses(shared)
    assert len(plugin._sorted[shared]) <= 2 * len(shared.waiters)


@pytest.mark.parametrize("holders", [3, MANY_HOLDERS + 1])
def test_a_use_of_a_key_that_many_hold_is_news_for_few(holders: int) -> None:
    """Each task that ended was a message to each of 1,000 workers."""
    plugin, shared, waiting, sent = shared_key(holders)
    ends = plugin._sent[shared]
    for done in waiting[: KEEP - 1]:
        shared.waiters.remove(done)
        done.who_has = [shared.who_has[0]]
        plugin._note(done.key, "processing", "memory", "a0")
        plugin._dirty.pop(done, None)
        plugin._flush()
    assert {address for address, _ in sent} == ({"a0"} if holders > MANY_HOLDERS else {ws.address for ws in ends})
    sent.clear()
    shared.waiters.clear()
    plugin._dirty[shared] = None
    plugin._flush()
    assert len(sent) == holders  # that it is not used any more all must hear


class FakeTask(SimpleNamespace):
    """The fields of a worker's TaskState that the receiver reads."""

    def __init__(self, priority: tuple[int, ...], *, run_spec: Any = "f", waiters: Any = ()) -> None:
        super().__init__(priority=priority, run_spec=run_spec, waiters=set(waiters))

    __hash__ = object.__hash__  # type: ignore[assignment]


class Bench:
    """A receiver on a real engine and store, with a worker that has only tasks."""

    def __init__(self, rig: Rig) -> None:
        self.tasks: dict[str, FakeTask] = {}
        self.rig = rig
        self.worker = SimpleNamespace(stream_handlers={}, state=SimpleNamespace(tasks=self.tasks))
        self.receiver = HintReceiver(self.worker, rig.engine, rig.store, guard(), clock=lambda: rig.now)
        self.receiver.install()
        self.receiver.want(True)
        rig.engine.eviction.press()
        self.hear: Callable[..., None] = self.worker.stream_handlers[OP]

    def put(self, key: str) -> Entry:
        self.rig.store[key] = np.zeros(1000)
        found = self.rig.store.entry(key)
        assert found is not None
        return found


def success(key: str) -> Any:
    return ExecuteSuccessEvent(key=key, run_id=1, value=1, start=0, stop=1, nbytes=1, type=int, stimulus_id="s")


def bench(run_rig: RunRig, test: Callable[[Bench], Awaitable[None]]) -> None:
    async def main(rig: Rig) -> None:
        await test(Bench(rig))

    run_rig(main)


def test_uses_pass_as_tasks_are_executed(run_rig: RunRig) -> None:
    async def test(b: Bench) -> None:
        x = b.put("x")
        b.hear(items=[("x", [[0, 1, 4], [0, 1, 4], [0, 1, 8]]), ("absent", [])])
        assert x.next_use == (0, 1, 4)
        b.tasks["t"] = FakeTask((0, 1, 4, -7))
        b.tasks["u"] = FakeTask((0, 1, 8, -8))
        failure = ExecuteFailureEvent(
            key="t", run_id=1, start=0, stop=1, exception=None, traceback=None, exception_text="", traceback_text="",
            stimulus_id="s",
        )  # fmt: skip
        b.receiver.executed("t", [x], failure)
        assert x.next_use == (0, 1, 4), "it may run again"
        b.receiver.executed("t", [x], success("t"))
        assert x.next_use == (0, 1, 4), "two tasks may have one priority"
        b.receiver.executed("t", [x], success("t"))
        assert x.next_use == (0, 1, 8)
        assert not x.guessed
        b.receiver.executed("u", [x], success("u"))
        # what comes next only the scheduler knows: not a victim before that
        assert x.next_use == (-math.inf, 0, 1, 8)
        assert x.guessed
        b.hear(items=[("x", [])])
        assert x.next_use == NEVER
        assert not x.guessed
        stats = b.receiver.statistics()
        assert (stats["received"], stats["unknown_keys"], stats["advanced"], stats["guessed"]) == (3, 1, 2, 1)
        assert stats["exceptions"] == 0

    bench(run_rig, test)


def test_a_message_that_crossed_with_the_end_of_a_task(run_rig: RunRig) -> None:
    """It names a use that has passed here meanwhile; the scheduler takes for granted that we subtract it."""

    async def test(b: Bench) -> None:
        x = b.put("x")
        b.hear(items=[])
        b.tasks["t"] = FakeTask((0, 1, 4, -7))
        b.receiver.executed("t", [x], success("t"))
        b.hear(items=[("x", [[0, 1, 4], [0, 1, 8]])])
        assert x.next_use == (0, 1, 8)
        b.hear(items=[("x", [[0, 1, 4], [0, 1, 8]])])
        assert x.next_use == (0, 1, 4), "said again: it has to run again"
        b.receiver.executed("t", [x], success("t"))
        b.hear(items=[("x", [[0, 1, 4]])])
        assert x.guessed
        assert x.uses == ()

    bench(run_rig, test)


def test_guesses(run_rig: RunRig) -> None:
    """Only while hints come; own priority when computed here, that of who waits when fetched; not for ever."""

    async def test(b: Bench) -> None:
        b.tasks["early"] = FakeTask((0, 1, 1, -1))
        assert b.put("early").next_use is None
        b.hear(items=[])
        b.tasks["computed"] = FakeTask((0, 1, 2, -1))
        reader = FakeTask((0, 1, 9, -3))
        b.tasks["fetched"] = FakeTask((0, 1, 9, -1), run_spec=None, waiters=[reader, FakeTask((0, 2, 0, -3))])
        b.tasks["replica"] = FakeTask((1, 0), run_spec=None)
        computed, fetched, replica = b.put("computed"), b.put("fetched"), b.put("replica")
        soon = -math.inf
        assert (computed.next_use, fetched.next_use, replica.next_use) == ((soon, 0, 1, 2), (soon, 0, 1, 9), None)
        b.rig.now += GUESS_SECONDS
        b.hear(items=[])
        # no word came: one is LRU again, of the other its reader is still known here
        assert (computed.next_use, fetched.next_use) == (None, (soon, 0, 1, 9))
        b.tasks["fetched"].waiters.clear()
        b.rig.now += GUESS_SECONDS
        b.hear(items=[])
        assert fetched.next_use is None
        b.rig.validate()

    bench(run_rig, test)


def test_a_fresh_value_is_not_the_victim(run_rig: RunRig) -> None:
    async def test(b: Bench) -> None:
        b.put("old")
        b.hear(items=[("old", [[0, 1, 50]])])
        b.tasks["fresh"] = FakeTask((0, 1, 49, -1))
        b.put("fresh")
        b.rig.engine.shrink(1)
        await b.rig.settle()
        assert list(b.rig.store.slow) == ["old"]

    bench(run_rig, test)


def test_what_is_about_to_be_freed_is_not_written(run_rig: RunRig) -> None:
    """Its last use has passed a moment ago; all that is foretold is for tasks before that one, which still wait."""

    async def test(b: Bench) -> None:
        passed, fetched, soon = b.put("passed"), b.put("fetched"), b.put("soon")
        b.hear(items=[("passed", [[0, 1, 9]]), ("soon", [[0, 1, 3]])])
        b.receiver._guess(fetched, (0, 1, 9))
        b.tasks["t"] = FakeTask((0, 1, 9, -1))
        b.receiver.executed("t", [passed, fetched], success("t"))
        b.rig.engine.shrink(1)
        await b.rig.settle()
        assert list(b.rig.store.slow) == ["soon"]
        assert soon.handle is not None
        b.hear(items=[("passed", []), ("fetched", [])])
        assert (passed.next_use, fetched.next_use) == (NEVER, NEVER)

    bench(run_rig, test)


def test_a_use_that_a_peer_has_fetched_it_for_is_not_one_here(run_rig: RunRig) -> None:
    async def test(b: Bench) -> None:
        x, last, fresh = b.put("x"), b.put("last"), b.put("fresh")
        b.receiver.sent([x])  # no scheduler has spoken so far
        assert (x.next_use, x.sent) == (None, 0)
        b.hear(items=[("x", [[0, 1, 4], [0, 1, 7], [0, 1, 9]]), ("last", [[0, 1, 4]])])
        b.receiver.sent([x, last, fresh])
        assert (x.next_use, x.guessed) == ((0, 1, 7), True)
        assert (last.next_use, last.guessed) == ((-math.inf, 0, 1, 4), True)
        # The word about a value that was fetched at once had left before that.
        b.hear(items=[("fresh", [[0, 1, 5], [0, 1, 6]])])
        assert (fresh.next_use, fresh.guessed) == ((0, 1, 6), True)
        b.receiver.sent([x])
        assert x.next_use == (0, 1, 9)
        # The first of the two peers has used it; of the other the scheduler will speak in time.
        b.hear(items=[("x", [[0, 1, 7], [0, 1, 9]]), ("fresh", [[0, 1, 6]])])
        assert (x.next_use, x.guessed, x.sent) == ((0, 1, 7), False, 0)
        assert (fresh.next_use, fresh.guessed, fresh.sent) == ((0, 1, 6), False, 0)
        b.receiver.sent([x])
        b.rig.now += GUESS_SECONDS
        b.hear(items=[])
        assert (x.next_use, x.guessed, x.sent) == ((0, 1, 7), False, 0), "the peer has not used it yet"
        assert (last.next_use, last.guessed) == ((0, 1, 4), False)
        b.tasks["t"] = FakeTask((0, 1, 7, -1))
        b.receiver.sent([x])
        b.receiver.executed("t", [x], success("t"))
        assert (x.next_use, x.guessed) == ((-math.inf, 0, 1, 9), True)

    bench(run_rig, test)


def test_what_was_freed_while_a_peer_fetched_it_is_no_news(run_rig: RunRig) -> None:
    """A record that names it after its end could not be replayed."""

    async def test(b: Bench) -> None:
        trace = record(b.rig.engine, 100)
        x = b.put("x")
        b.hear(items=[("x", [[0, 1, 4], [0, 1, 7]])])
        b.rig.engine.pin(x)
        del b.rig.store["x"]
        b.receiver.sent([x])
        b.rig.engine.unpin(x)
        assert trace.events[-1][1] == "remove"
        assert moved(trace.events) == replay(trace.events, Ours())

    bench(run_rig, test)


def test_waiters_are_not_searched_where_the_next_is_known(run_rig: RunRig) -> None:
    """A broadcast value has thousands, and they would be searched again for each of them that has run."""

    class Waiters:
        def __iter__(self) -> Any:
            raise AssertionError("searched")

    async def test(b: Bench) -> None:
        x = b.put("x")
        b.tasks["x"] = FakeTask((0, 9, 9, 1))
        b.tasks["x"].waiters = Waiters()  # type: ignore[assignment]
        b.rig.engine.books.set_due(x, (0, 3, 1, 7))
        b.hear(items=[("x", [(0, 1, 1)])])
        b.tasks["t"] = FakeTask((0, 1, 1, 2))
        b.receiver.executed("t", [x], success("t"))  # its last known use: a guess, for a while
        b.rig.now += 10
        b.put("y")
        assert b.receiver.part.failures == 0, b.receiver.part.last_traceback
        assert x.guessed

    bench(run_rig, test)


def test_garbage_never_raises(run_rig: RunRig) -> None:
    """An exception in a stream handler would close the worker."""

    async def test(b: Bench) -> None:
        x = b.put("x")
        for garbage in ([1], [("x", 3)], [("x", [[None]])], [([], [])], None):
            b.hear(items=garbage)
            assert x in b.rig.engine.books.victims
            assert x.next_use is None
        b.hear(items=[], of_the_future=1)
        assert b.receiver.part.failures >= 4
        assert "Error" in b.receiver.statistics()["last_traceback"]
        b.hear(items=[("x", [(0, 1, 1)])])
        assert x.next_use == (0, 1, 1)
        b.tasks["t"] = FakeTask(5)  # type: ignore[arg-type]
        before = b.receiver.part.failures
        b.receiver.executed("t", [x], success("t"))
        assert b.receiver.part.failures == before + 1
        b.rig.validate()

    bench(run_rig, test)


def test_the_handler_stays_until_nothing_can_come(run_rig: RunRig, monkeypatch: Any) -> None:
    from dask_gpurt.tiers.hints import worker as hints_worker

    async def test(b: Bench) -> None:
        x = b.put("x")
        assert b.receiver.heartbeat() == {"next_use": 1}
        b.hear(items=[("x", [[0, 1, 1]])])
        leaving = asyncio.ensure_future(b.receiver.uninstall())
        await asyncio.sleep(0)
        assert OP in b.worker.stream_handlers
        assert x.next_use is None
        b.worker.stream_handlers[OP](items=[("x", [[0, 1, 1]])])
        assert x.next_use is None
        assert not leaving.done()
        b.worker.stream_handlers[OP](items=[], stop=True)
        await leaving
        assert b.worker.stream_handlers == {}
        assert b.receiver.heartbeat() == {}

        # never asked for hints: nothing to wait for
        other = HintReceiver(b.worker, b.rig.engine, b.rig.store, guard())
        other.install()
        assert other.heartbeat() == {}
        await other.uninstall()
        assert b.worker.stream_handlers == {}

        # nobody says stop: something that does nothing stays, and does not keep the next one out
        monkeypatch.setattr(hints_worker, "STOP_SECONDS", 0.01)
        other.install()
        other.want(True)
        other.heartbeat()
        await other.uninstall()
        b.worker.stream_handlers[OP](items=[("x", [[0, 1, 1]])], anything=1)
        assert x.next_use is None
        other.install()
        assert other.state == "on"

    bench(run_rig, test)


def test_somebody_elses_handler_is_left_alone(run_rig: RunRig) -> None:
    async def test(b: Bench) -> None:
        theirs = print
        worker = SimpleNamespace(stream_handlers={OP: theirs}, state=b.worker.state)
        receiver = HintReceiver(worker, b.rig.engine, b.rig.store, guard())
        receiver.install()
        assert receiver.state.startswith("off: ")
        assert receiver.heartbeat() == {}
        await receiver.uninstall()
        assert worker.stream_handlers == {OP: theirs}

    bench(run_rig, test)
