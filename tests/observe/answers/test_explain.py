"""`explain` and `where` on real schedulers and workers, and what they print."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import operator
import time
import unittest.mock
from typing import TYPE_CHECKING, Any

import dask
import numpy as np
import pytest
from distributed import Client, LocalCluster, wait
from distributed.utils_test import NO_AMM, BlockedGatherDep, div, gen_cluster, inc, slowinc

import dask_gpurt
from dask_gpurt.client import remote
from dask_gpurt.config import Settings
from dask_gpurt.errors import GpurtError, InstallError, UnknownKey
from dask_gpurt.extension import NAME, GpurtScheduler, on_worker
from dask_gpurt.observe.answers.explain import _TERMS, Explanation
from dask_gpurt.observe.answers.where import Where
from dask_gpurt.observe.render.text import bytes_said, seconds_said
from dask_gpurt.placement.decide.decision import Declined
from dask_gpurt.placement.engine import Engine
from dask_gpurt.placement.evaluate.decision_record import QUEUE
from tests.memory_watch import NO_WATCH

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from distributed import Scheduler, Worker

FOUR = [("127.0.0.1", 1)] * 4
QUIET = {"distributed.scheduler.work-stealing": False}


@contextlib.asynccontextmanager
async def extension(s: Scheduler, *, always: bool = True, **settings: Any) -> AsyncIterator[GpurtScheduler]:
    """The extension on a scheduler. `always`: tasks are weighed whatever is known, so that there is a comparison."""
    plugin = GpurtScheduler(Settings.load(settings))
    await plugin.start(s)
    s.add_plugin(plugin, name=NAME)
    if plugin.placement is not None and plugin.placement.engine is not None:
        plugin.placement.engine.always = always
    try:
        yield plugin
    finally:
        await plugin.uninstall()


async def until(condition: Callable[[], Any]) -> None:
    while not condition():  # noqa: ASYNC110 (the state is not ours, there is no event)
        await asyncio.sleep(0.01)


def block(n: int) -> np.ndarray[Any, Any]:
    return np.zeros(n, "u1")


def size(x: Any, *more: Any) -> int:
    return len(x)


def table(e: Explanation) -> list[str]:
    """The lines of the printed table that name a candidate, the chosen one first."""
    return [line for line in repr(e).splitlines() if line.lstrip("-> ").startswith("tcp://")]


def check(e: Explanation) -> None:
    """What holds for every decision by cost."""
    assert e.kind == "cost"
    best = min(e.candidates, key=lambda c: c.total_seconds)
    (chosen,) = (c for c in e.candidates if c.chosen)
    assert chosen.total_seconds == best.total_seconds
    assert chosen.address == e.chosen
    for c in e.candidates:
        wait = max(max(c.queue_seconds, c.inputs_seconds) + c.hidden_seconds, c.read_seconds)
        parts = wait + c.compute_seconds - c.excused_seconds + c.overflow_seconds + c.moved_seconds
        assert c.total_seconds == pytest.approx(parts)
    lines = table(e)
    assert len(lines) == len(e.candidates)
    assert lines[0].split()[:2] == ["->", e.chosen]
    totals = [float(line.split()[-1].replace(",", "")) for line in lines]
    assert totals[0] == min(totals)
    for c in e.candidates:
        assert sum(c.address in line for line in lines) == 1
    assert e.chosen in e.because
    assert json.loads(json.dumps(e.to_dict()))["because"] == e.because
    page = e._repr_html_()
    assert all(c.address in page for c in e.candidates)


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=FOUR, config=QUIET)
async def test_a_local_and_a_moved_task(c: Client, s: Scheduler, *workers: Worker) -> None:
    async with extension(s):
        holder = workers[2].address
        x = c.submit(block, 50_000_000, workers=[holder], pure=False)
        await x
        local = c.submit(size, x, pure=False)
        assert await local == 50_000_000
        e = await dask_gpurt.explain(c, local)
        check(e)
        assert e.worker == e.chosen == holder
        assert e.actual is not None
        assert e.actual["moved_bytes"] == 0
        assert "holds all of its inputs (50 MB)" in e.because
        assert "was idle but would have needed" in e.because
        assert "to fetch them" in e.because
        assert "placed by cost" in repr(e)
        assert "finished" in repr(e)

        small = await c.scatter(b"small", workers=[holder])
        busy = c.submit(slowinc, 1, delay=2, workers=[holder], pure=False)
        await until(lambda: s.tasks.get(busy.key) is not None and s.tasks[busy.key].state == "processing")
        assert s.plugins[NAME].placement is not None
        # Whatever its duration: the holder is busy, so somebody idle gets it.
        s.plugins[NAME].placement.engine.workers.by_address[holder].backlog_seconds = 10.0
        moved = c.submit(size, small, pure=False)
        await moved
        e = await dask_gpurt.explain(c, moved.key)
        check(e)
        assert e.worker == e.chosen != holder
        assert e.actual is not None
        assert e.actual["moved_bytes"] == s.tasks[small.key].nbytes
        assert e.predicted is not None
        assert e.predicted["moved_bytes"] == e.actual["moved_bytes"]
        assert e.actual["finish_seconds"] > 0
        assert e.actual["compute_seconds"] is not None
        assert "it was idle and fetching" in e.because
        assert "decision to result" in repr(e)
        (h,) = (k for k in e.candidates if k.address == holder)
        assert h.queue_seconds == pytest.approx(10.0)
        await busy


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=FOUR, config=QUIET)
async def test_a_restricted_task(c: Client, s: Scheduler, *workers: Worker) -> None:
    async with extension(s):
        x = await c.scatter(b"x" * 1000, workers=[workers[0].address])
        one = c.submit(size, x, workers=[workers[1].address], pure=False)
        two = c.submit(size, x, workers=[w.address for w in workers[2:]], pure=False)
        await wait([one, two])
        e = await dask_gpurt.explain(c, one)
        check(e)
        assert e.chosen == workers[1].address
        assert e.restricted
        assert "the only worker that it may run on" in e.because
        e = await dask_gpurt.explain(c, two)
        check(e)
        assert {k.address for k in e.candidates} == {w.address for w in workers[2:]}
        assert "of those that it may run on" in repr(e)


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=FOUR, config={**QUIET, "distributed.scheduler.validate": False}, timeout=60)
async def test_root_tasks(c: Client, s: Scheduler, *workers: Worker) -> None:
    async with extension(s):
        dsk: dict[Any, Any] = {("load", i): (slowinc, i, 0.01) for i in range(96)}
        for i in range(16):
            dsk["total", i] = (sum, [("load", j) for j in range(6 * i, 6 * i + 6)])
        totals = [("total", i) for i in range(16)]
        await c.gather(c.get(dsk, totals, sync=False))
        facts = [await dask_gpurt.explain(c, ("load", i)) for i in range(96)]
        grouped = [e for e in facts if e.kind == "root group"]
        assert len(grouped) == s.plugins[NAME].placement.engine.groups.pulled > 40
        for e in grouped:
            assert e.worker == e.chosen
            assert e.because == (
                f"It ran on {e.chosen} because that worker had begun the group of root tasks that are used "
                "together with it."
            )
            assert e.key in repr(e)
        for e in facts:
            if e.kind != "root group":
                assert (e.kind, e.reason) == ("stock", "queue")
                assert e.worker in e.because
        check(await dask_gpurt.explain(c, ("total", 3)))


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=FOUR, config=QUIET)
async def test_stock_decides_and_nothing_was_decided(c: Client, s: Scheduler, *workers: Worker) -> None:
    async with extension(s):
        first = c.submit(inc, 1, pure=False)
        await first
        e = await dask_gpurt.explain(c, first)
        assert (e.kind, e.reason) == ("stock", "no inputs")
        assert e.worker == next(iter(s.tasks[first.key].who_has)).address
        assert f"It ran on {e.worker} because it has no inputs" in repr(e)
        assert e.candidates == ()
        data = await c.scatter(1)
        e = await dask_gpurt.explain(c, data)
        assert e.kind == "scattered"
        assert "a client put into the cluster" in repr(e)
        slow = c.submit(slowinc, 1, delay=0.5, pure=False)
        after = c.submit(inc, slow, pure=False)
        await until(lambda: after.key in s.tasks)
        e = await dask_gpurt.explain(c, after)
        assert e.kind == "waiting"
        assert "'waiting'" in repr(e)
        await after


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=FOUR, config=QUIET)
async def test_a_task_that_failed_shows_what_it_raised(c: Client, s: Scheduler, *workers: Worker) -> None:
    async with extension(s):
        bad = c.submit(div, 1, 0, key="bad")
        needs = c.submit(inc, bad, key="needs")
        await wait([bad, needs])
        e = await dask_gpurt.explain(c, bad)
        assert e.kind == "stock"
        assert "; it raised ZeroDivisionError('division by zero')." in repr(e)
        e = await dask_gpurt.explain(c, needs)
        assert e.kind == e.to_dict()["kind"] == "failed"
        assert "not assigned to a worker; bad, which it needs, raised ZeroDivisionError" in repr(e)


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=FOUR, config=QUIET)
async def test_where_nothing_more_is_known_stock_decides(c: Client, s: Scheduler, *workers: Worker) -> None:
    async with extension(s, always=False):
        x = c.submit(inc, 1, key="x", workers=[workers[1].address])
        await c.submit(inc, x, key="y")
        e = await dask_gpurt.explain(c, "y")
        assert (e.kind, e.reason) == ("stock", Declined.PLAIN)
        assert e.worker == workers[1].address
        assert "nothing is known that Dask does not know" in repr(e)
        assert (await dask_gpurt.explain(c, "x")).reason == "no inputs"


@pytest.mark.cluster
def test_a_fallback_says_what_was_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Engine.decide

    def sometimes(self: Engine, ts: Any, valid: Any) -> Any:
        if ts.key == "doomed":
            raise ZeroDivisionError("injected by a test")
        if ts.key == "abroad":
            right(self, ts, valid)  # leaves a record, which the rejection replaces
            return next(ws for ws in self.scheduler.workers.values() if ws not in valid)
        return right(self, ts, valid)

    monkeypatch.setattr(Engine, "decide", sometimes)

    @gen_cluster(client=True, nthreads=FOUR, config=QUIET)
    async def run(c: Client, s: Scheduler, *workers: Worker) -> None:
        async with extension(s):
            x = await c.scatter(b"x", workers=[workers[3].address])
            await c.submit(size, x, key="doomed")
            e = await dask_gpurt.explain(c, "doomed")
            assert e.kind == "fallback"
            assert e.worker == workers[3].address
            assert "ZeroDivisionError: injected by a test" in repr(e)
            assert f"It ran on {workers[3].address} because placement failed and stock Dask decided" in repr(e)
            assert e.actual is not None
            assert e.actual["finish_seconds"] > 0
            await c.submit(size, x, key="abroad", workers=[workers[0].address])
            e = await dask_gpurt.explain(c, "abroad")
            assert e.kind == "fallback"
            assert e.worker == workers[0].address
            assert "the choice was rejected" in e.because
            assert s.plugins[NAME].placement.statistics()["exceptions"] == 1

    run()


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=FOUR)
async def test_keys_that_nobody_knows(c: Client, s: Scheduler, *workers: Worker) -> None:
    early = c.submit(inc, 1, key="early")
    await early
    with pytest.raises(GpurtError, match="placement is not on in this cluster"):
        await dask_gpurt.explain(c, "early")
    async with extension(s) as plugin:
        assert plugin.placement is not None
        assert plugin.placement.engine is not None
        plugin.placement.engine.log.limit = 3
        with pytest.raises(UnknownKey) as u:
            await dask_gpurt.explain(c, "early")
        assert "no decision about 'early': its state is 'memory', but it was assigned before" in str(u.value)
        for i in range(5):
            await c.submit(inc, i, key=f"k-{i}")
        await until(lambda: set(s.tasks) == {"early"})
        with pytest.raises(KeyError) as k:
            await dask_gpurt.explain(c, "k-0")
        assert "no decision about 'k-0': neither the scheduler nor its log of decisions knows it" in str(k.value)
        assert "3 decisions of the newest 3 that it keeps" in str(k.value)
        assert "Remedy" in str(k.value)
        with pytest.raises(UnknownKey, match="known keys that begin so: 'k-4', 'k-3', 'k-2'"):
            await dask_gpurt.explain(c, "k")
        assert (await dask_gpurt.explain(c, "k-4")).state is None, "forgotten by the scheduler, but still in the log"
        with pytest.raises(TypeError, match="got 2: 'a', 'b'"):
            dask_gpurt.explain(c, ["a", "b"])
        with pytest.raises(UnknownKey, match=r"knows none of 1 key: 'nope'.*Remedy"):
            await dask_gpurt.where(c, "nope")
        with pytest.raises(UnknownKey, match="nothing given"):
            await dask_gpurt.where(c, [])
        got = await dask_gpurt.where(c, ["nope", early])
        assert got["nope"].state == "unknown"
        assert got[early].state == "memory"
        with pytest.raises(KeyError):
            got["other"]


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2, config=QUIET)
async def test_a_question_waits_for_the_graph_that_it_has_overtaken(
    c: Client, s: Scheduler, a: Worker, b: Worker
) -> None:
    stock = c._send_to_scheduler

    def late(message: dict[str, Any]) -> None:
        c.loop.call_later(0.2, stock, message)

    async with extension(s):
        with unittest.mock.patch.object(c, "_send_to_scheduler", late):
            x = c.submit(inc, 1, key="x")
            assert (await dask_gpurt.where(c, [x, "nope"]))["x"].state != "unknown"
            y = c.submit(inc, 1, key="y")
            assert (await dask_gpurt.explain(c, y)).key == "y"
            z = c.submit(inc, 1, key="z")
            with pytest.raises(UnknownKey):  # the graph comes after that
                await dask_gpurt.where(c, z, timeout=0.1)
        await wait([x, y, z])


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2, config=QUIET)
async def test_where_asks_about_500_keys_at_a_time(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
    asked: list[int] = []

    def spied(name: str) -> Any:
        stock = getattr(remote, name)

        @functools.wraps(stock)
        def spy(**kwargs: Any) -> Any:
            asked.append(len(kwargs["keys"]))
            return stock(**kwargs)

        return unittest.mock.patch.object(remote, name, spy)

    data = await c.scatter(list(range(600)), hash=False)
    lost = await c.scatter(list(range(500)), hash=False, workers=[b.address])
    with spied("places"), spied("residence"):
        got = await dask_gpurt.where(c, data + lost)
        assert {copy.tier for place in got.places for copy in place.copies} == {"memory"}
    assert [place.key for place in got.places] == [future.key for future in data + lost]
    assert len(asked) == 3 + 2 + 2 + 1
    assert max(asked) == 500
    b.handlers["run"] = lambda comm, **kwargs: asyncio.Event().wait()
    got = await dask_gpurt.where(c, data + lost, timeout=1)
    assert list(got.silent) == [b.address]
    assert {copy.tier for place in got.places for copy in place.copies if copy.address == b.address} == {"unknown"}


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=FOUR)
async def test_nothing_is_kept_alive(c: Client, s: Scheduler, *workers: Worker) -> None:
    import gc
    import weakref

    async with extension(s):
        xs = c.map(inc, range(8), pure=False)
        total = c.submit(operator.add, xs[0], xs[1], pure=False)
        await total
        key = total.key
        ref = weakref.ref(s.tasks[key])
        del xs, total
        await until(lambda: not s.tasks)

        def gone() -> bool:
            gc.collect()
            return ref() is None

        await until(gone)  # a call that is just being answered may have it for a moment
        assert (await dask_gpurt.explain(c, key)).state is None


# Without the active memory manager, which drops the replica that is looked for, and without the watch of process
# memory: the workers live in the process of the whole suite, which pauses them when it has grown.
@pytest.mark.cluster
@gen_cluster(
    client=True,
    nthreads=[("127.0.0.1", 1)] * 2,
    config=QUIET | NO_AMM | NO_WATCH,
    worker_kwargs={"memory_limit": "1 GB"},
)
async def test_where_a_spilled_and_a_replicated_key_are(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
    async with extension(s):
        x = c.submit(block, 20_000_000, workers=[a.address], pure=False)
        y = c.submit(block, 1_000_000, workers=[b.address], pure=False)
        await wait([x, y])
        got = await dask_gpurt.where(c, x)
        (copy,) = got[x].copies
        assert (copy.address, copy.tier, copy.disk_bytes) == (a.address, "memory", None)
        parts = on_worker(a)
        assert parts is not None
        assert parts.runtime is not None
        runtime = parts.runtime
        runtime.engine.shrink(1 << 60)
        await until(lambda: runtime.store is not None and len(runtime.store.slow) == 1)
        runtime.engine.shrink(0)
        await c.replicate([y], n=2)
        got = await dask_gpurt.where(c, [x, y])
        (copy,) = got[x].copies
        assert (copy.address, copy.tier) == (a.address, "disk")
        assert 20_000_000 <= copy.nbytes < 20_001_000
        assert copy.disk_bytes > 20_000_000
        assert {(k.address, k.tier) for k in got[y].copies} == {(a.address, "memory"), (b.address, "memory")}
        assert got[x].clients == (c.id,)
        text = repr(got)
        line = next(line for line in text.splitlines() if x.key in line)
        assert a.address in line
        assert " disk " in line
        assert "20 MB" in line
        assert got.workers()[a.address]["disk"] == copy.disk_bytes
        assert x.key in got._repr_html_()
        assert json.loads(json.dumps(got.to_dict()))["keys"][x.key]["copies"][0]["tier"] == "disk"
        assert runtime.engine.counters.to_dict().get("sync_reads", 0) == 0, "looking reads nothing"


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)], config=QUIET)
async def test_where_what_is_not_done_is(c: Client, s: Scheduler, a: Worker) -> None:
    async with extension(s), BlockedGatherDep(s.address) as b:
        x = c.submit(block, 1000, workers=[a.address], pure=False)
        await x
        y = c.submit(size, x, workers=[b.address], pure=False)
        z = c.submit(inc, y, pure=False)
        await until(lambda: z.key in s.tasks and s.tasks[y.key].state == "processing")
        got = await dask_gpurt.where(c, [x, y, z])
        assert got[x].fetching == (b.address,)
        assert got[x].waiters == 1
        assert got[y].processing == b.address
        assert got[y].copies == ()
        assert got[z].state == "waiting"
        text = repr(got)
        assert "being fetched" in text
        assert "computed there" in text
        assert "nowhere" in text
        b.block_gather_dep.set()
        assert await z == 1001
        got = await dask_gpurt.where(c, x)
        assert got[x].fetching == ()


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2)
async def test_where_without_the_extension(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
    x = c.submit(block, 1000, workers=[a.address], pure=False)
    await x
    got = await dask_gpurt.where(c, x)
    (copy,) = got[x].copies
    assert (copy.address, copy.tier) == (a.address, "memory")
    assert copy.nbytes == s.tasks[x.key].nbytes


@pytest.mark.cluster
def test_with_a_synchronous_client_and_collections() -> None:
    import dask.array as da

    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        dask_gpurt.attach(client)
        x = da.ones(400, chunks=100).persist()
        wait(x)
        got = dask_gpurt.where(client, x)
        assert len(got.places) == 4
        assert "4 keys: 4 memory; " in repr(got)
        lazy = dask.delayed(size)(dask.delayed(block)(10)).persist()
        wait(lazy)
        e = dask_gpurt.explain(client, lazy)
        assert isinstance(e, Explanation)
        assert e.worker in repr(e)
        future = client.submit(time.sleep, 0)
        wait(future)
        assert dask_gpurt.explain(client, future).kind == "stock"
        decisions = dask_gpurt.status(client).to_dict()["scheduler"]["placement"]["decisions"]
        assert decisions["logged"] >= 5
        with pytest.raises(UnknownKey):
            dask_gpurt.explain(client, "nope")
        dask_gpurt.detach(client)


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2, config=QUIET)
async def test_all_questions_with_an_asynchronous_client(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
    assert not (await dask_gpurt.status(c)).installed
    with (
        unittest.mock.patch("dask_gpurt.extension.GpurtScheduler.start", side_effect=InstallError("injected")),
        pytest.raises(InstallError, match="injected"),
    ):
        await dask_gpurt.attach(c)
    assert (await dask_gpurt.attach(c)).installed
    x = c.submit(block, 1000, pure=False)
    await x
    assert (await dask_gpurt.explain(c, x)).kind == "stock"
    assert len((await dask_gpurt.where(c, x)).places) == 1
    await dask_gpurt.detach(c)
    got = await dask_gpurt.status(c)
    assert not got.installed
    assert got.workers == {a.address: {}, b.address: {}}


@pytest.mark.cluster
def test_an_address_or_a_cluster_instead_of_a_client() -> None:
    with LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster:
        for given in (cluster, cluster.scheduler.address):
            assert not dask_gpurt.status(given).installed
            assert dask_gpurt.attach(given).installed
            with pytest.raises(UnknownKey):
                dask_gpurt.where(given, "nope")
            dask_gpurt.detach(given)
        with pytest.raises(TypeError, match=r"3 \(int\), must be a distributed\.Client"):
            dask_gpurt.status(3)  # type: ignore[arg-type]
        with pytest.raises(GpurtError, match="there is no client, and no address of a scheduler"):
            dask_gpurt.status()


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2, config=QUIET)
async def test_a_worker_that_hangs_keeps_no_answer(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
    stock, held = b.handlers["run"], asyncio.Event()

    async def run(comm: Any, *args: Any, **kwargs: Any) -> Any:
        await held.wait()
        return await stock(comm, *args, **kwargs)

    b.handlers["run"] = run
    got = await dask_gpurt.status(c, timeout=3)
    assert got.workers == {a.address: {}, b.address: {"error": "TimeoutError('no answer within 3 s')"}}
    held.set()
    assert (await dask_gpurt.status(c)).workers == {a.address: {}, b.address: {}}


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)], config=QUIET)
async def test_a_connection_that_was_closed_is_replaced(c: Client, s: Scheduler, a: Worker) -> None:
    """The other end may close a pooled connection just before it is used."""
    stock, calls = a.handlers["run"], []

    async def run(comm: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            comm.abort()
        return await stock(comm, *args, **kwargs)

    x = c.submit(block, 1000, pure=False)
    await x
    a.handlers["run"] = run
    got = await dask_gpurt.where(c, x)
    assert [copy.tier for copy in got[x].copies] == ["memory"]
    assert len(calls) == 2


# ---------------------------------------------------------------------- text, without a cluster


def story(**changes: Any) -> dict[str, Any]:
    def candidate(address: str, **terms: Any) -> dict[str, Any]:
        out: dict[str, Any] = {
            "address": address,
            "why": "idle",
            "chosen": False,
            "idle": True,
            "has_bytes": 0.0,
            "missing_bytes": 1e6,
            "missing_inputs": 1.0,
            "fetching": False,
            "slowness": 1.0,
            **{f"{t}_seconds": 0.0 for t in _TERMS},
            **terms,
        }
        parts = (out[f"{t}_seconds"] for t in ("compute", "overflow", "moved"))
        return {
            **out,
            "total_seconds": max(out["queue_seconds"], out["inputs_seconds"], out["read_seconds"]) + sum(parts),
        }

    first = {"chosen": True, "why": "holder", "missing_bytes": 0.0, "missing_inputs": 0.0, "has_bytes": 1e6}
    return {
        "key": "f-1",
        "kind": "cost",
        "state": "memory",
        "workers": 9,
        "restricted": False,
        "inputs": {"bytes": 1e6, "count": 1},
        "chosen": "tcp://a",
        "candidates": [
            candidate("tcp://a", **{**first, **changes.pop("a", {})}),
            candidate("tcp://b", **{"inputs_seconds": 0.3, "moved_seconds": 0.3, **changes.pop("b", {})}),
        ],
        "actual": None,
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "it holds all of its inputs (1 MB); tcp://b was idle but would have needed 0.3 s to fetch them"),
        ({"a": {"fetching": True}}, "it holds or is already fetching all of its inputs"),
        (
            {"a": {"missing_bytes": 4e5, "missing_inputs": 1.0, "has_bytes": 6e5}},
            "it holds 600 kB of its 1 MB of inputs; tcp://b was idle but would have needed 0.3 s to fetch 1 MB",
        ),
        (
            {"b": {"inputs_seconds": 0.0, "moved_seconds": 0.0, "queue_seconds": 2.0, "idle": False}},
            "tcp://b was busy for another 2 s",
        ),
        (
            {"b": {"inputs_seconds": 0.0, "moved_seconds": 0.0, "compute_seconds": 1.0, "slowness": 4.0}},
            "tcp://b takes 4 times as long for the same task",
        ),
        (
            {"b": {"inputs_seconds": 0.0, "moved_seconds": 0.0, "overflow_seconds": 0.5}},
            "tcp://b would have had to write data out to disk (0.5 s)",
        ),
        (
            {"b": {"inputs_seconds": 0.0, "moved_seconds": 0.0, "read_seconds": 0.7}},
            "tcp://b would have had to wait 0.7 s for inputs to be read from disk",
        ),
        ({"b": {"inputs_seconds": 0.0, "moved_seconds": 0.0}}, "tcp://b would have cost the same"),
        (
            {"b": {"missing_inputs": 0.0, "missing_bytes": 0.0, "moved_seconds": 0.0}},
            "tcp://b would have had to wait 0.3 s for data on its way",
        ),
    ],
)
def test_the_sentence_names_what_decided(changes: dict[str, Any], says: str) -> None:
    assert says in Explanation.from_story(story(**changes)).because


def test_the_sentence_tells_what_happened_afterwards() -> None:
    actual = {"worker": "tcp://b", "stolen_from": "tcp://a", "outcome": None}
    e = Explanation.from_story(story(actual=actual))
    assert e.because.startswith("It was sent to tcp://a because")
    assert e.because.endswith("; work stealing moved it from there to tcp://b.")
    assert "not finished" in repr(e)
    e = Explanation.from_story(story(actual={**actual, "stolen_from": None}))
    assert e.because.endswith("; in the end it was tcp://b that got it.")
    assert Explanation.from_story(story()).because.startswith("It is to go to tcp://a because")


def test_in_shadow_mode_dask_has_decided() -> None:
    actual = {"worker": "tcp://b", "stolen_from": None, "outcome": "memory", "wait_seconds": 0.1, "moved_bytes": None}
    actual |= dict.fromkeys(("transfer_seconds", "compute_seconds", "finish_seconds"), 0.1)
    e = Explanation.from_story(story(kind="shadow", actual=actual))
    assert e.because.startswith("It ran on tcp://b because placement only looks on (gpurt.placement.shadow), so Dask's")
    assert "by cost it would have gone to tcp://a, because it holds all of its inputs" in e.because
    assert "in the end" not in e.because
    assert "left to stock Dask; finished" in repr(e)


def test_every_reason_to_leave_a_task_to_dask_is_a_sentence() -> None:
    for reason in (*Declined, QUEUE):
        because = Explanation.from_story(story(kind="stock", reason=str(reason))).because
        assert f"({reason})" not in because


def test_html_is_escaped() -> None:
    evil = "<script>alert(1)</script>"
    assert "<script>" not in Explanation.from_story(story(key=evil))._repr_html_()
    facts = {"state": "memory", "nbytes": 1, "holders": [evil], "processing": None, "fetching": [], "clients": []}
    got = Where.from_replies({evil: {**facts, "waiters": 2}}, {evil: TimeoutError(evil)})
    assert "<script>" not in got._repr_html_()
    assert got.places[0].copies[0].tier == "unknown"
    assert "2 tasks" in repr(got)


def test_many_keys_are_cut_short_in_print_only() -> None:
    facts = {"state": "memory", "nbytes": 10, "holders": ["tcp://a"], "processing": None, "fetching": []}
    here = {"tier": "memory", "nbytes": 10, "disk_bytes": None}
    keys = [("x", i) for i in range(50)]
    got = Where.from_replies(
        {k: {**facts, "clients": [], "waiters": 0} for k in keys}, {"tcp://a": dict.fromkeys(keys, here)}
    )
    text = repr(got)
    assert "... and 30 more" in text
    assert "50 keys: 50 memory; 500 B" in text
    assert len(got.to_dict()["keys"]) == 50
    assert got["x", 49].copies[0].nbytes == 10


def test_tiers_of_devices_are_columns_only_where_there_are_some() -> None:
    facts = {"state": "memory", "nbytes": 10, "holders": ["tcp://a"], "processing": None, "fetching": []}
    tiers = {"d": ("device", 10, None), "p": ("pinned", 10, 16), "k": ("disk", 10, 12)}
    places = {k: {**facts, "clients": [], "waiters": 0} for k in tiers}
    copies = {k: {"tier": t, "nbytes": n, "disk_bytes": below} for k, (t, n, below) in tiers.items()}
    got = Where.from_replies(places, {"tcp://a": copies})
    assert got.workers() == {"tcp://a": {"device": 10, "pinned": 16, "disk": 12}}
    assert "on device" in repr(got)
    assert "pinned" in repr(got)
    del copies["d"], copies["p"]
    assert "on device" not in repr(Where.from_replies({"k": places["k"], "j": places["k"]}, {"tcp://a": copies}))


@pytest.mark.parametrize(
    ("seconds", "says"),
    [(None, "-"), (0, "0 ms"), (1e-5, "0.01 ms"), (0.0052, "5.2 ms"), (0.31, "0.31 s"), (12.345, "12.3 s")],
)
def test_seconds(seconds: float | None, says: str) -> None:
    assert seconds_said(seconds) == says


@pytest.mark.parametrize(
    ("nbytes", "says"),
    [
        (None, "-"),
        (0, "0 B"),
        (999, "999 B"),
        (1234, "1.23 kB"),
        (999_999, "1 MB"),
        (120e6, "120 MB"),
        (5e15, "5,000 TB"),
    ],
)
def test_bytes(nbytes: float | None, says: str) -> None:
    assert bytes_said(nbytes) == says
