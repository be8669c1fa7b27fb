"""Next-use hints on real schedulers and workers: they are right, they decide, and they do no harm."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

import pytest
from distributed import Client, Event, Scheduler, Worker, wait
from distributed.utils_test import NO_AMM, async_poll_for, gen_cluster

import dask_gpurt  # noqa: F401  (registers the defaults)
from dask_gpurt.config import Settings
from dask_gpurt.errors import SeamMismatch
from dask_gpurt.extension import NAME, GpurtScheduler, on_worker
from dask_gpurt.model import circuit_breaker
from dask_gpurt.tiers.engine.entry import NEVER
from dask_gpurt.tiers.hints import scheduler
from dask_gpurt.tiers.hints import worker as hints_worker
from dask_gpurt.tiers.hints.protocol import HEARTBEAT_FIELD, KEEP, OP, PROTOCOL
from dask_gpurt.tiers.hints.scheduler import NextUsePlugin
from dask_gpurt.tiers.runtime import TierRuntime
from dask_gpurt.tiers.scheduler_plugin import HEARTBEAT_NAME
from tests.memory_watch import NO_WATCH
from tests.tiers.conftest import beat

if TYPE_CHECKING:
    from dask_gpurt.tiers.engine.entry import Entry

pytestmark = pytest.mark.cluster

SIZE = 10_000


def make(i: int, *_: Any) -> bytes:
    # Not an array: nothing can refer weakly to it, so what was evicted is gone until it is read.
    return bytes([i % 251]) * SIZE


def gated(event: str, *arrays: Any) -> int:
    assert Event(event).wait(timeout=60)
    return sum(int(a[0]) for a in arrays)


async def attach(s: Scheduler, *workers: Worker, **settings: Any) -> GpurtScheduler:
    """The extension without what is not under test here; the workers have asked for hints."""
    values = {"placement.enabled": False, "shuffle.enabled": False, "tiers.disk-reserve": 0, **settings}
    plugin = GpurtScheduler(Settings.load(values))
    await plugin.start(s)
    s.add_plugin(plugin, name=plugin.name)
    for w in workers:
        if runtime(w).store is not None:
            press(runtime(w))
        await beat(w)
    return plugin


def press(tiers: TierRuntime) -> None:
    """As if memory was about to be short."""
    eviction = tiers.engine.eviction
    eviction.relaxes = False
    eviction.press()
    for listener in eviction.on_pressed:
        listener()


def runtime(w: Worker) -> TierRuntime:
    parts = on_worker(w)
    assert parts is not None
    assert parts.runtime is not None
    return parts.runtime


def entry(w: Worker, key: Any) -> Entry:
    store = runtime(w).store
    assert store is not None
    found = store.entry(key)
    assert found is not None, key
    return found


def bytes_moved(w: Worker) -> int:
    stats = runtime(w).statistics()
    return int(stats["written"]["bytes"] + stats["read"]["bytes"])


def uses_in_graph(s: Scheduler, key: Any) -> list[tuple[Any, ...]]:
    return sorted(w.priority for w in s.tasks[key].waiters or ())


def wrong(s: Scheduler, workers: list[Worker]) -> list[Any]:
    """What workers believe about the next use of what they hold, where it is not the truth.

    A copy that was fetched and not used yet is not known to the scheduler's plugin: there the worker guesses by those
    of its own tasks that wait for it. Once they run, its guess ends after `GUESS_SECONDS`, and it knows nothing.
    """
    out = []
    for w in workers:
        for ts in s.workers[w.address].has_what:
            want = uses_in_graph(s, ts.key)
            got = entry(w, ts.key)
            soon = [use if use == NEVER else (-math.inf, *use) for use in want]
            fetched = w.state.tasks[ts.key].run_spec is None
            if fetched and (got.next_use in soon if got.guessed else got.next_use is None):
                continue
            if got.guessed and got.sent and got.next_use in (want + soon)[1:]:
                continue
            if got.guessed or got.next_use != (want[0] if want else NEVER):
                out.append((w.address, ts.key, want[:1], got.next_use, got.guessed, got.uses))
    return out


async def known(s: Scheduler, n: int) -> None:
    """Graphs and events travel on different roads: wait until all tasks are there before a gate opens."""
    await async_poll_for(lambda: len(s.tasks) >= n, timeout=20)


async def settled(s: Scheduler, *workers: Worker) -> None:
    for _ in range(1000):
        if not wrong(s, list(workers)):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(wrong(s, list(workers)))


# Without the active memory manager: on a slow machine it drops the copies that the test looks for.
def hints_sent(s: Scheduler) -> list[str]:
    """Addresses to which the scheduler sends hints from now on, one for each message."""
    sent: list[str] = []
    real = s.worker_send

    def spy(worker: str, msg: dict[str, Any]) -> None:
        if msg["op"] == OP:
            sent.append(worker)
        real(worker, msg)

    s.worker_send = spy  # type: ignore[method-assign]
    return sent


@gen_cluster(client=True, nthreads=[("127.0.0.1", 30)] * 2, config=NO_WATCH | NO_AMM, timeout=120)
async def test_hints_are_right_at_every_stage(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
    """Against the scheduler's graph: after computing, as uses pass, with replicas, many dependents, and none."""
    plugin = await attach(s, a, b)
    gates = [Event(f"gate{i}", client=c) for i in range(4)]
    x = [c.submit(make, i, key=("x", i), workers=[(a, b)[i % 2].address], priority=200) for i in range(8)]
    reads = []
    for i in range(24):  # each x is read six times, on both sides
        w = (a, b)[i // 12]
        v, u = x[i % 8], x[(3 * i + 1) % 8]
        reads.append(c.submit(gated, f"gate{1 + i // 8}", v, u, key=f"read{i}", workers=[w.address], priority=-i))
    alone = c.submit(make, 7, key="alone", workers=[a.address], priority=200)
    many = c.submit(make, 99, key="many", workers=[a.address], priority=200)
    readers = [c.submit(gated, "gate1", many, key=f"reader{i}", workers=[a.address], priority=-100) for i in range(200)]
    await known(s, 8 + 24 + 1 + 200 + 1)
    await wait([*x, many, alone])
    await settled(s, a, b)
    for key in (("x", 0), "many"):
        uses = entry(a, key).uses
        assert 2 <= len(uses) <= KEEP
        assert list(uses) == uses_in_graph(s, key)[: len(uses)]
    assert len(uses_in_graph(s, "many")) > scheduler.MANY_WAITERS
    assert entry(a, "alone").next_use == NEVER

    await gates[1].set()
    await wait(reads[:8])
    await settled(s, a, b)
    await gates[2].set()
    await wait(reads[:12])
    await settled(s, a, b)
    assert len(s.tasks["x", 0].who_has or ()) == 2, "no replica was made, so none was told"
    await gates[3].set()
    await wait(reads)
    await wait(readers)
    await settled(s, a, b)
    assert all(entry(w, ts.key).next_use == NEVER for w in (a, b) for ts in s.workers[w.address].has_what)

    stats = plugin.statistics()["next_use"]
    assert stats["exceptions"] == 0, stats["last_traceback"]
    assert stats["workers"] == 2
    assert stats["transition_us"] > 0
    # far fewer words than uses: workers count along
    assert stats["sent"]["hints"] < 500
    for w in (a, b):
        hints = runtime(w).statistics()["hints"]
        assert hints["exceptions"] == 0, hints["last_traceback"]
        assert hints["received"] > 0
    assert runtime(a).statistics()["hints"]["advanced"] > 10
    del x, many
    reads.clear()
    readers.clear()
    await async_poll_for(lambda: not any(k in s.tasks for k in [("x", 0), "many"]), timeout=10)
    await async_poll_for(lambda: not plugin.statistics()["next_use"]["tables"]["sorted"], timeout=10)


@gen_cluster(client=True, nthreads=[("127.0.0.1", 2)] * 2, config=NO_WATCH)
async def test_a_use_passes_to_the_peer_that_fetches(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
    await attach(s, a, b)
    gates = [Event(f"gate{i}", client=c) for i in range(2)]
    before = c.submit(make, 0, key="before", workers=[a.address])
    await wait(before)
    await settled(s, a)  # hints have begun
    x = c.submit(make, 1, key="x", workers=[a.address], priority=9)
    near = c.submit(gated, "gate0", x, key="near", workers=[b.address], priority=2)
    far = c.submit(gated, "gate1", x, key="far", workers=[a.address], priority=-3)
    await known(s, 4)
    await wait(x)
    await async_poll_for(lambda: "x" in b.data and entry(a, "x").guessed, timeout=10)
    found = entry(a, "x")
    assert found.sent == 1
    # Not that of `near`, which has it.
    await async_poll_for(lambda: found.next_use == s.tasks["far"].priority, timeout=10)
    assert await x == make(1)
    assert found.sent == 1, "what a client fetches is no task's use"
    await gates[0].set()
    await wait(near)
    await settled(s, a, b)
    assert found.sent == 0
    await gates[1].set()
    await wait(far)
    await settled(s, a, b)


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)], config=NO_WATCH)
async def test_new_and_cancelled_dependents(c: Client, s: Scheduler, a: Worker) -> None:
    await attach(s, a)
    gate = Event("gate", client=c)
    x = c.submit(make, 1, key="x")
    await wait(x)
    await settled(s, a)
    assert entry(a, "x").next_use == NEVER
    blocker = c.submit(gated, "gate", key="blocker", priority=5)
    first = c.submit(gated, "gate", x, key="first")
    second = c.submit(gated, "gate", x, key="second")
    await async_poll_for(lambda: len(entry(a, "x").uses) == 2, timeout=10)
    assert entry(a, "x").uses == (s.tasks["first"].priority, s.tasks["second"].priority)
    first.release()
    await async_poll_for(lambda: entry(a, "x").next_use == s.tasks["second"].priority, timeout=10)
    second.release()
    await async_poll_for(lambda: entry(a, "x").next_use == NEVER, timeout=10)
    await gate.set()
    await blocker


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2, config=NO_WATCH)
async def test_a_worker_that_does_not_ask_gets_nothing(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
    """An unknown op would close it; so `b`, and `a` before its heartbeat, must never see one."""
    receiver = await TierRuntime.install(a, Settings.load({"tiers.disk-reserve": 0}).tiers)
    plugin = NextUsePlugin()
    await plugin.start(s)
    s.add_plugin(plugin)
    sent = hints_sent(s)
    x = [c.submit(make, i, key=f"x{i}", workers=[w.address]) for i in range(10) for w in ((a, b)[i % 2],)]
    await wait(x)
    await async_poll_for(lambda: not plugin.statistics()["tables"]["dirty"], timeout=10)
    assert sent == []
    a.metrics[NAME] = lambda w: receiver.protocols()
    await beat(a)
    await asyncio.sleep(2 * scheduler.LOOK_SECONDS)
    assert sent == [], "its memory is not short"
    press(receiver)
    await beat(a)
    # met for the first time: also told about what it had before
    last = c.submit(make, 10, key="x10", workers=[a.address])
    await wait(last)
    store = receiver.store
    assert store is not None
    await async_poll_for(lambda: all(store.entry(k).next_use == NEVER for k in store), timeout=10)  # type: ignore[union-attr]
    assert len(store) == 6
    assert set(sent) == {a.address}
    y = c.map(lambda v, w: int(v[0] + w[0]), x[1::2], x[::2], workers=[b.address])
    assert await c.gather(y) == [1, 5, 9, 13, 17]
    plugin.stop()
    assert set(sent) == {a.address}
    assert set(s.workers) == {a.address, b.address}
    assert OP not in b.stream_handlers


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)], config=NO_WATCH)
async def test_eviction_follows_the_graph(c: Client, s: Scheduler, a: Worker) -> None:
    """Made in one order, read in another: what leaves first is what no task reads, then what is read last."""
    await attach(s, a)
    gate = Event("gate", client=c)
    x = [c.submit(make, i, key=f"x{i}") for i in range(8)]
    await wait(x)
    hold = c.submit(gated, "gate", key="hold", priority=100)
    readers = {i: c.submit(gated, "gate", x[i], key=f"read{i}", priority=-p) for p, i in enumerate([3, 0, 6, 1, 5, 2])}
    await async_poll_for(lambda: sum(len(entry(a, f"x{i}").uses) for i in range(8)) == 6, timeout=10)
    engine, store = runtime(a).engine, runtime(a).store
    assert store is not None
    left: list[str] = []
    for _ in range(8):
        engine.shrink(1)
        await engine.idle()
        left += [k for k in store.slow if k not in left]
    assert set(left[:2]) == {"x4", "x7"}
    assert left[2:] == [f"x{i}" for i in reversed(readers)]
    stats = runtime(a).statistics()
    assert stats["evictions"] == {"hint": 2, "due": 6}  # the readers are here: the worker knows by itself
    assert stats["hints"]["evictions_by_hint_share"] == 0.25
    engine.shrink(0)
    await gate.set()
    assert await c.gather(list(readers.values())) == list(readers)
    await hold


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)], worker_kwargs={"memory_limit": "200 kB"}, config=NO_WATCH)
async def test_fewer_bytes_than_without(c: Client, s: Scheduler, a: Worker) -> None:
    """A scan made and read in the same order is LRU's worst case. The same work, real spilling, bytes counted."""

    async def work(tag: str) -> int:
        x = [c.submit(make, i, key=f"{tag}-x{i}") for i in range(30)]
        await wait(x)
        await runtime(a).engine.idle()
        before = bytes_moved(a)
        hold = c.submit(gated, tag, key=f"{tag}-hold", priority=1)
        reads = [
            c.submit(gated, tag, v, key=f"{tag}-{r}-{i}", priority=-100 * r - i)
            for r in range(3)
            for i, v in enumerate(x)
        ]
        await async_poll_for(lambda: all(f.key in a.state.tasks for f in reads), timeout=20)
        await asyncio.sleep(10 * scheduler.FLUSH_SECONDS)
        await Event(tag, client=c).set()
        assert await c.gather(reads) == [*range(30)] * 3
        await hold
        await runtime(a).engine.idle()
        return bytes_moved(a) - before

    plugin = await attach(s, a)
    hinted = await work("hinted")
    assert runtime(a).statistics()["hints"]["evictions_by_hint_share"] > 0
    assert plugin.next_use is not None
    plugin.next_use.stop()
    await async_poll_for(lambda: not runtime(a).statistics()["hints"]["active"], timeout=10)
    local = await work("local")
    seam = runtime(a)._seam
    assert seam is not None
    seam.local.uninstall()
    lru = await work("lru")
    assert lru > 60 * SIZE
    assert hinted < 0.8 * lru
    assert local < 0.8 * lru
    runtime(a).engine.validate()


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2, config=NO_WATCH, timeout=120)
async def test_late_worker_is_told_in_portions(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
    x = c.map(lambda i: i, range(1200), key=[f"x{i}" for i in range(1200)], workers=[a.address])
    await wait(x)
    plugin = await attach(s, a, b)
    last = c.submit(make, 1, key="last", workers=[a.address])
    await wait(last)
    await settled(s, a, b)
    assert plugin.statistics()["next_use"]["flushes"] >= 1200 / scheduler.FLUSH_KEYS


@pytest.mark.parametrize("where", ["_note", "_collect", "worker_send"])
def test_exceptions_are_counted_and_harmless(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(circuit_breaker, "LIMIT", 20)

    @gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2, config=NO_WATCH)
    async def test(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
        plugin = await attach(s, a, b)
        ours = plugin.next_use
        assert ours is not None
        real = s.worker_send

        def fail(*args: Any) -> None:
            raise RuntimeError("injected")

        def fail_ours(worker: str, msg: dict[str, Any]) -> None:
            if msg["op"] == OP:
                raise RuntimeError("injected")
            real(worker, msg)

        if where == "worker_send":
            s.worker_send = fail_ours  # type: ignore[method-assign]
        else:
            setattr(ours, where, fail)
        for i in range(40):
            x = c.map(make, range(i, i + 4), pure=False)
            assert await c.submit(lambda v: int(sum(a[0] for a in v)), x) == 4 * i + 6
            await asyncio.sleep(2 * scheduler.FLUSH_SECONDS)
            if ours.part.retired:
                break
        stats = plugin.statistics()["next_use"]
        assert stats["retired"].startswith("20 failures within 60 s; the last one: RuntimeError: injected")
        assert stats["exceptions"] >= 20
        assert "injected" in stats["last_traceback"]
        counts = plugin.statistics()["events"]["counts"]
        assert counts["tiers.fallback"] == counts["tiers.retired"] == 1
        if where == "worker_send":
            s.worker_send = real  # type: ignore[method-assign]
        assert set(s.workers) == {a.address, b.address}
        await plugin.uninstall()

    test()


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)], config=NO_WATCH)
async def test_an_exception_on_the_worker(c: Client, s: Scheduler, a: Worker) -> None:
    plugin = await attach(s, a)
    first = c.submit(make, 1)
    await wait(first)
    await async_poll_for(lambda: runtime(a).statistics()["hints"]["active"], timeout=10)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("injected")

    engine = runtime(a).engine
    real, engine.hint = engine.hint, fail  # type: ignore[method-assign]
    x = c.map(make, range(10), pure=False)
    assert await c.gather(c.map(lambda v: int(v[0]), x)) == list(range(10))
    await async_poll_for(lambda: runtime(a).statistics()["hints"]["exceptions"] > 10, timeout=10)
    assert "injected" in runtime(a).statistics()["hints"]["last_traceback"]
    engine.hint = real  # type: ignore[method-assign]
    assert set(s.workers) == {a.address}
    await plugin.uninstall()
    assert set(s.workers) == {a.address}


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2, config=NO_WATCH)
async def test_detach_under_traffic(
    c: Client, s: Scheduler, a: Worker, b: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages are under way when the workers' part is told to leave: nobody dies, nothing stays."""
    # A handler does stay where the last message takes longer than this.
    monkeypatch.setattr(hints_worker, "STOP_SECONDS", 20.0)
    handlers = [dict(w.stream_handlers) for w in (a, b)]
    plugins, attributes = dict(s.plugins), sorted(vars(s))
    for _ in range(3):
        plugin = await attach(s, a, b)
        assert OP in a.stream_handlers
        x = c.map(make, range(100), pure=False)
        y = c.map(lambda v, w: int(v[0]) + int(w[0]), x, x[::-1], pure=False)
        await wait(y[:20])
        await plugin.uninstall()
        assert [dict(w.stream_handlers) for w in (a, b)] == handlers
        assert dict(s.plugins) == plugins
        assert sorted(vars(s)) == attributes
        assert await c.gather(y) == [99] * 100
        assert set(s.workers) == {a.address, b.address}
        assert a.status.name == b.status.name == "running"


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)], config=NO_WATCH)
async def test_what_was_asked_before_a_detach_is_not_answered_after_it(c: Client, s: Scheduler, a: Worker) -> None:
    """No heartbeat in between: what is on the worker now has not asked, and does not wait for a last message."""
    x = c.map(make, range(10), pure=False)
    await wait(x)
    first = await attach(s, a)
    await first.uninstall()
    sent = hints_sent(s)
    second = await attach(s)
    y = c.map(lambda v: int(v[0]), x, pure=False)
    assert await c.gather(y) == list(range(10))
    await second.uninstall()
    assert sent == [], "one that comes late closes the worker"


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)], config=NO_WATCH)
async def test_only_with_tiers(c: Client, s: Scheduler, a: Worker) -> None:
    plugin = await attach(s, a, **{"tiers.enabled": False})
    assert plugin.next_use is None
    assert NextUsePlugin.name not in s.plugins
    assert OP not in a.stream_handlers
    await beat(a)
    assert "next_use" not in s.workers[a.address].metrics[NAME]


@gen_cluster(nthreads=[])
async def test_unknown_scheduler_is_refused(s: Scheduler) -> None:
    s.worker_send = lambda worker: None  # type: ignore[method-assign, assignment, misc]
    with pytest.raises(SeamMismatch, match=r"worker_send cannot be called .* Remedy"):
        await NextUsePlugin().start(s)


@gen_cluster(nthreads=[("127.0.0.1", 1)] * 2, config=NO_WATCH)
async def test_of_very_many_workers_some_are_looked_at_each_time(s: Scheduler, a: Worker, b: Worker) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "LOOK_WORKERS", 1)
        patch.setattr(scheduler, "LOOK_SECONDS", 3600)
        plugin = NextUsePlugin()
        await plugin.start(s)
        for ws in s.workers.values():
            ws.metrics[HEARTBEAT_NAME] = {HEARTBEAT_FIELD: PROTOCOL}
        seen = []
        for _ in range(3):
            plugin.look()
            seen.append(len(plugin._ready))
        assert seen == [1, 2, 2]
        del s.workers[a.address].metrics[HEARTBEAT_NAME]
        for _ in range(2):
            plugin.look()
        assert {ws.address for ws in plugin._ready} == {b.address}
        await plugin.close()
