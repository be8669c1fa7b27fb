"""Runs after the fact, on live clusters: what is a run, its report, two of them side by side, and the pages."""

from __future__ import annotations

import asyncio
import os
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import dask
import pytest
from distributed import Client, Event, fire_and_forget, span, wait, worker_client

import dask_gpurt
from dask_gpurt.errors import GpurtError, UnknownRun
from dask_gpurt.observe.collect.causes import BUSY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.cluster

_APART = 1.2


def sleep(i: int, *_: Any, seconds: float = 0.02) -> int:
    time.sleep(seconds)
    return i


def _fail(i: int) -> int:
    raise ValueError(f"no {i}")


def _nested(i: int) -> int:
    with worker_client() as client:
        return int(client.submit(sleep, i, pure=False).result())


def _until(what: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not _holds(what):
        assert time.monotonic() < end
        time.sleep(0.05)


def _holds(what: Callable[[], bool]) -> bool:
    try:
        return what()
    except UnknownRun:
        return False  # the graph has not arrived


def _sealed(client: Client, number: int) -> dict[str, Any]:
    """The record of a run, when it is summed up."""
    _until(lambda: not dask_gpurt.report(client, run=number).record["open"])
    return dask_gpurt.report(client, run=number).record


@pytest.fixture
def client() -> Iterator[Client]:
    with (
        dask_gpurt.local_cluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        yield client


def test_a_run_is_reported_after_the_fact(client: Client, tmp_path: Path) -> None:
    assert repr(dask_gpurt.runs(client)) == "nothing has run yet"
    with pytest.raises(UnknownRun, match="nothing has run yet"):
        dask_gpurt.report(client, run=-1)
    began = time.time()
    futures = client.map(sleep, range(40), pure=False)
    client.gather(futures)
    took = time.time() - began
    # At once: workers are asked, as their next heartbeat may be far.
    got = dask_gpurt.report(client, run=-1)
    assert (got.record["number"], got.record["name"], got.record["outcome"]) == (1, "sleep", "finished")
    assert 0.4 <= got.run.seconds <= took
    assert got.run.task_count == len(got.run.tasks) == 40
    assert got.run.busy_seconds >= 0.8 * 40 * 0.02
    # As in every report, the causes sum to the time there was.
    accounted = got.run.busy_seconds + sum(got.run.causes.values())
    assert accounted == pytest.approx(got.run.slot_seconds, rel=0.02, abs=0.02)
    assert got.run.causes["no_work"] == pytest.approx(0, abs=1e-6)
    (kind,) = got.run.digest.kinds
    assert (kind.prefix, kind.tasks) == ("sleep", 40)
    assert "run 1, sleep: finished" in repr(got)
    assert "<table" in got._repr_html_() or "Nothing cost" in repr(got)
    path = tmp_path / "run.html"
    assert dask_gpurt.report(str(path), client, run=1).record["number"] == 1
    assert "report of run 1, sleep" in path.read_text()
    # Summed up for good it says the same.
    later = _sealed(client, 1)
    assert later["task_count"] == 40
    assert later["busy_seconds"] == pytest.approx(got.run.busy_seconds, rel=0.1, abs=0.05)
    assert dask_gpurt.status(client).scheduler["runs"]["kept"] == 1
    assert 0 < dask_gpurt.status(client).scheduler["runs"]["kept_bytes"] < 100_000


def test_what_is_one_run(client: Client) -> None:
    # persist, and compute before it is done
    slow = dask.delayed(sleep)(1, seconds=0.5)
    kept = client.persist(slow)
    assert client.compute(dask.delayed(sleep)(kept)).result() == kept.compute()
    assert dask_gpurt.report(client, run=-1).record["graphs"] == 2
    time.sleep(_APART)
    # many futures, of which some are always under way
    assert sum(client.gather([client.submit(sleep, i, pure=False) for i in range(20)])) == 190
    got = dask_gpurt.report(client, run=-1).record
    assert (got["number"], got["graphs"], got["task_count"]) == (2, 20, 20)
    time.sleep(_APART)
    # a loop of graphs that are shorter than the time between two heartbeats
    for i in range(5):
        client.submit(sleep, i, pure=False).result()
    got = dask_gpurt.report(client, run=-1).record
    assert (got["number"], got["graphs"]) == (3, 5)
    # other names, and spans, are other runs
    client.submit(abs, -1, pure=False).result()
    with span("load"):
        client.submit(sleep, 1, key="loading-1").result()
    with span("sum"):
        client.submit(sleep, 1, key="summing-1").result()
    names = [(h["span"], h["name"]) for h in dask_gpurt.runs(client).headlines]
    assert names[:4] == [("sum", "summing"), ("load", "loading"), ("", "abs"), ("", "sleep")]
    # nothing to do is no run
    kept.compute()
    assert len(dask_gpurt.runs(client)) == 6
    # tasks of tasks belong to the run that goes on
    time.sleep(_APART)
    client.gather(client.map(_nested, range(3), pure=False))
    got = dask_gpurt.report(client, run=-1).record
    assert (got["number"], got["name"], got["graphs"]) == (7, "nested", 4)


def test_how_a_run_can_end(client: Client) -> None:
    event = Event()
    future = client.submit(lambda: event.wait(), key="waits")
    wait(client.submit(sleep, 1, pure=False))
    got = dask_gpurt.report(client, run=-1)
    assert got.record["outcome"] == "going on"
    assert "still going on" in repr(got)
    assert got.run.seconds < dask_gpurt.report(client, run=-1).run.seconds
    event.set()
    future.result()
    assert dask_gpurt.report(client, run=-1).record["outcome"] == "finished"
    time.sleep(_APART)
    # a task fails, and what was asked for fails with it
    failing = dask.delayed(sleep)(dask.delayed(_fail)(1))
    with pytest.raises(ValueError, match="no 1"):
        failing.compute()
    got = dask_gpurt.report(client, run=-1)
    assert (got.record["number"], got.record["outcome"]) == (2, "failed")
    assert "A task failed." in repr(got)
    # nobody wants it any more
    event.clear()
    blocked = [
        client.submit(lambda: event.wait(), key="blocks"),
        client.submit(sleep, 1, workers="nowhere", key="never"),
    ]
    _until(lambda: dask_gpurt.report(client, run=-1).record["number"] == 3)
    client.cancel(blocked)
    event.set()
    _until(lambda: dask_gpurt.report(client, run=-1).record["outcome"] == "cancelled")
    # a future that nobody holds is wanted all the same
    time.sleep(_APART)
    fire_and_forget(client.submit(sleep, 1, seconds=0.3, pure=False))
    _until(lambda: dask_gpurt.report(client, run=-1).record["outcome"] == "finished")
    assert dask_gpurt.report(client, run=-1).record["number"] == 4
    _sealed(client, 4)
    assert client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.plugins["gpurt"].runs.wanted)) == 0


@pytest.mark.slow
def test_a_lost_worker_and_a_restart() -> None:
    with (
        dask_gpurt.local_cluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        futures = client.map(sleep, range(60), seconds=0.05, pure=False)
        _until(lambda: dask_gpurt.report(client, run=-1).record["worker_count"] == 2)
        address, first = next(iter(client.scheduler_info()["workers"].items()))
        client.run(os._exit, 1, workers=[address], on_error="ignore")
        assert sum(client.gather(futures)) == sum(range(60))
        got = dask_gpurt.report(client, run=-1)
        assert got.record["lost"] == [str(first["name"])]
        assert "Workers that left in it" in repr(got)
        assert got.record["outcome"] == "finished"
        held = client.map(sleep, range(100), seconds=0.5, pure=False)
        _until(lambda: dask_gpurt.report(client, run=-1).record["number"] == 2)
        client.restart()
        assert dask_gpurt.report(client, run=2).record["outcome"] == "restarted"
        del held
        client.wait_for_workers(2, timeout=60)
        assert client.submit(sleep, 1, pure=False).result() == 1
        assert dask_gpurt.report(client, run=-1).record["number"] == 3
        assert dask_gpurt.status(client).scheduler["ledger"]["errors"] == 0


def test_several_clients_have_their_own(client: Client) -> None:
    with Client(client.scheduler.address, set_as_default=False) as other:
        mine = client.map(sleep, range(30), pure=False)
        theirs = other.submit(abs, -1, pure=False)
        assert theirs.result() == 1
        client.gather(mine)
        # Which graph comes first is up to the two connections.
        reports = [dask_gpurt.report(client, run=1), dask_gpurt.report(other, run=2)]
        second, first = sorted(reports, key=lambda report: str(report.record["name"]))
        assert (first.record["name"], second.record["name"]) == ("sleep", "abs")
        assert first.record["shared"]
        assert "Other runs went on at the same time" in repr(second)
        left = other.submit(Event.wait, Event("go", client=other), pure=False)
        _until(lambda: len(dask_gpurt.runs(client)) == 3)
    del left
    _until(lambda: dask_gpurt.report(client, run=3).record["outcome"] == "cancelled")
    Event("go", client=client).set()


def test_two_runs_side_by_side(client: Client) -> None:
    client.gather(client.map(sleep, range(20), pure=False))
    time.sleep(_APART)
    client.gather(client.map(sleep, range(20), seconds=0.08, pure=False))
    _sealed(client, 1)
    _sealed(client, 2)
    got = dask_gpurt.compare(client)
    before, after = got.seconds
    assert got.ratio == pytest.approx(after / before)
    assert got.ratio > 1
    # 20 tasks of 0.08 s instead of 0.02 s
    assert got.changes()[BUSY] >= 0.9 * 20 * 0.06
    text = repr(got)
    assert text.startswith("run 2 took ")
    assert "threads worked" in text
    assert "tasks sleep" in text
    assert "run 1" in got._repr_html_()
    assert dask_gpurt.compare(client, 2, 1).ratio == pytest.approx(before / after)
    same = dask_gpurt.compare(client, 1, 1)
    assert same.ratio == 1
    assert not any(same.changes().values())
    assert set(got.to_dict()) == {"first", "second", "seconds", "ratio", "changes"}


@pytest.mark.parametrize(
    ("run", "error", "said"),
    [
        (7, UnknownRun, "there were 1 so far. Remedy: one of those that are kept, 1 alone; or -1 for the newest to -1"),
        (0, UnknownRun, "there is no run 0"),
        (-2, UnknownRun, "there is no run -2"),
        ("7", TypeError, "the run is '7' .str., must be a whole number"),
        (True, TypeError, "the run is True"),
        (1.0, TypeError, "the run is 1.0"),
    ],
)
def test_no_such_run(client: Client, run: Any, error: type[Exception], said: str) -> None:
    client.submit(sleep, 1, pure=False).result()
    with pytest.raises(error, match=said):
        dask_gpurt.report(client, run=run)
    with pytest.raises(error, match=said):
        dask_gpurt.compare(client, 1, run)
    with pytest.raises(TypeError, match="must be where the HTML file goes"):
        dask_gpurt.report(client)


@pytest.mark.slow
def test_detach_forgets_and_attach_begins_anew(client: Client) -> None:
    client.submit(sleep, 1, pure=False).result()
    assert len(dask_gpurt.runs(client)) == 1
    dask_gpurt.detach(client)
    for question in (dask_gpurt.runs, dask_gpurt.compare):
        with pytest.raises(GpurtError, match="there are no runs: the extension is not installed"):
            question(client)
    with pytest.raises(GpurtError, match="there are no runs"):
        dask_gpurt.report(client, run=-1)
    # attached while something runs: it is in no run, what comes later is
    busy = client.submit(sleep, 1, seconds=1.5, pure=False)
    _until(lambda: any(client.processing().values()))
    dask_gpurt.attach(client)
    assert len(dask_gpurt.runs(client)) == 0
    assert client.submit(sleep, 2, pure=False).result() == 2
    assert dask_gpurt.report(client, run=-1).record["number"] == 1
    busy.result()


@pytest.mark.slow
def test_an_address_and_an_asynchronous_client(client: Client) -> None:
    client.submit(sleep, 1, pure=False).result()
    with (
        dask_gpurt.local_cluster(n_workers=1, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster, set_as_default=False) as other,
    ):
        address = cluster.scheduler_address
        other.submit(sleep, 1, pure=False).result()
        assert len(dask_gpurt.runs(address)) == 1
        assert dask_gpurt.report(address, run=-1).record["number"] == 1
        assert dask_gpurt.compare(cluster, 1, 1).ratio == 1
        assert dask_gpurt.report(run=-1).record["number"] == 1

        async def questions() -> None:
            async with Client(address, asynchronous=True, set_as_default=False) as own:
                assert len(await dask_gpurt.runs(own)) == 1
                assert (await dask_gpurt.report(own, run=-1)).record["number"] == 1
                assert (await dask_gpurt.compare(own, 1, 1)).ratio == 1

        asyncio.run(questions())


def _get(address: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(address) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as e:
        return e.code, e.read().decode()


def test_the_pages(client: Client) -> None:
    pytest.importorskip("bokeh")
    port = client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.http_server.port)
    base = f"http://127.0.0.1:{port}/"
    client.submit(sleep, 1, key="a<b>bold</b>-1").result()
    assert '"gpurt-history"' in _get(base + "status")[1]  # in the menu
    status, text = _get(base + "gpurt-history")
    assert status == 200
    assert "bokeh" in text
    table = client.run_on_scheduler(_table)
    assert '<a href="gpurt-run?run=1">1</a>' in table
    assert "a&lt;b&gt;bold" in table
    assert "<b>bold" not in table
    for query in ("?run=1", "?run=-1", ""):
        status, text = _get(base + "gpurt-run" + query)
        assert status == 200
        assert "What the threads did" in text
    assert _get(base + "gpurt-run?run=7")[0] == 404
    assert "Kept are: 1 to 1" in _get(base + "gpurt-run?run=7")[1]
    status, text = _get(base + "gpurt-run?run=%3Cscript%3E")
    assert status == 400
    assert "<script>" not in text
    dask_gpurt.detach(client)
    assert _get(base + "gpurt-run?run=1")[0] == 503
    assert "not installed" in client.run_on_scheduler(_table)
    dask_gpurt.attach(client)
    assert _get(base + "gpurt-run")[0] == 404


def _table(dask_scheduler: Any) -> str:
    from dask_gpurt.observe.dashboard.runs import RunTable

    table = RunTable(dask_scheduler)
    table.update()
    assert table.errors == 0
    return str(table.root.text)
