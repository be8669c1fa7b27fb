"""The ledger, the dictionary of metrics and the report on live clusters."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import dask
import pytest
from distributed import Client, secede, worker_client

import dask_gpurt
from benchmarks.advice import TROUBLES
from dask_gpurt.client.reports import report_now, snapshot, snapshot_of
from dask_gpurt.errors import GpurtError
from dask_gpurt.observe.collect.causes import CLOCK, WAITS
from dask_gpurt.observe.figures import history
from dask_gpurt.observe.figures.figure import exported
from dask_gpurt.observe.figures.table import SCHEDULER, WORKER
from dask_gpurt.observe.report.charts import timeline
from dask_gpurt.observe.report.facts import from_snapshots
from tests.memory_watch import NO_WATCH
from tests.observe.dashboard.chromium import browser, executable
from tests.observe.fakes import OPTIONAL
from tests.observe.numbers import HEARTBEAT, unknown

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.cluster


def _sleep(i: int, *_: Any) -> int:
    time.sleep(0.02)
    return i


def _nested(i: int) -> int:
    with worker_client() as client:
        return int(client.submit(_sleep, i, pure=False).result())


def _away(i: int) -> int:
    secede()
    time.sleep(0.1)
    return i


def _work(client: Client) -> None:
    import dask.dataframe as dd
    import pandas as pd

    first = client.map(_sleep, range(12), pure=False)
    second = [client.submit(_sleep, i, *first[i : i + 3], pure=False) for i in range(9)]
    assert client.gather(second) == list(range(9))
    assert client.gather(client.map(_nested, range(3), pure=False)) == [0, 1, 2]
    assert client.gather(client.map(_away, range(3), pure=False)) == [0, 1, 2]
    frame = pd.DataFrame({"k": range(3000), "v": 1.0})
    assert dd.from_pandas(frame, npartitions=6).shuffle("k").v.sum().compute() == 3000


async def _offloads(worker: Any) -> int:
    """A metric that takes its time, as Dask's own of RMM does."""
    await asyncio.sleep(0.05)
    return 1


def test_a_report_does_not_end_a_worker() -> None:
    """A heartbeat that overlaps with another one makes Dask close the worker: reports once made their own."""
    with (
        dask_gpurt.local_cluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        (worker,) = cluster.workers.values()
        worker.metrics = {**worker.metrics, "offloads": _offloads}
        worker.periodic_callbacks["heartbeat"].stop()  # on a busy machine it overlaps with the test's own
        for i in range(5):
            client.submit(_sleep, i, pure=False).result()  # something for a heartbeat to tell
            client.sync(_beat_and_look, client, worker)
        assert worker.status.name == "running"


async def _beat_and_look(client: Client, worker: Any) -> None:
    beat = asyncio.ensure_future(worker.heartbeat())
    await asyncio.sleep(0)  # it is under way
    told, _ = await asyncio.gather(snapshot_of(client, 30), beat)
    assert told["workers"][worker.address]["status"]["slots"]["errors"] == 0


def test_what_was_not_read_is_not_told_as_unspilling() -> None:
    """Tasks that take their rows out of a shuffle go through the event loop; that is no read."""
    import dask.dataframe as dd
    import pandas as pd

    with (
        dask.config.set(NO_WATCH),
        dask_gpurt.local_cluster(
            n_workers=2, threads_per_worker=1, processes=False, memory_limit="4 GB", dashboard_address=":0"
        ) as cluster,
        Client(cluster) as client,
    ):
        frame = pd.DataFrame({"k": range(20_000), "v": 1.0})
        assert dd.from_pandas(frame, npartitions=8).shuffle("k").v.sum().compute() == 20_000
        for facts in snapshot(client)["workers"].values():
            assert facts["status"]["tiers"]["read"]["bytes"] == 0
            assert facts["status"]["slots"]["seconds"]["unspill"] == 0


def _timed_snapshot(client: Client) -> tuple[dict[str, Any], float]:
    began = time.monotonic()
    return snapshot(client), time.monotonic() - began


@pytest.mark.parametrize(
    "settings",
    [{}, {"placement.enabled": False}, {"tiers.enabled": False}, {"shuffle.enabled": False}],
    ids=["all", "no placement", "no tiers", "no shuffle"],
)
def test_the_causes_sum_to_the_time_there_was(settings: dict[str, Any], tmp_path: Path) -> None:
    with (
        dask_gpurt.local_cluster(
            n_workers=2, threads_per_worker=2, processes=False, dashboard_address=":0", settings=settings
        ) as cluster,
        Client(cluster) as client,
    ):
        before, first = _timed_snapshot(client)
        _work(client)
        after, last = _timed_snapshot(client)
        run = from_snapshots(before, after)
        there = 4 * run.seconds
        every = run.busy_seconds + sum(run.causes.values())
        assert every == pytest.approx(run.slot_seconds, rel=0.02)
        # Workers tell theirs at some moment of a snapshot, the clock is read at another.
        assert every == pytest.approx(there, rel=0.02, abs=4 * max(first, last))
        assert all(seconds >= 0 for seconds in run.causes.values())
        # Work is not counted twice, nor lost: tasks of a worker_client give their slot away while they wait.
        tasks = [t for t in run.tasks if t.prefix == "sleep"]
        assert len(tasks) == 24
        assert sum(t.seconds for t in tasks) <= run.busy_seconds <= there
        for facts in after["workers"].values():
            seconds = dict(facts["status"]["slots"]["seconds"])
            slots = seconds.pop("slots")
            assert sum(seconds.values()) == pytest.approx(slots, rel=1e-6)
            assert facts["status"]["slots"]["errors"] == 0
        assert after["scheduler"]["ledger"]["errors"] == 0
        run = report_now(str(tmp_path / "all.html"), client)
        assert run.task_count >= 24
        assert "Advice" in (tmp_path / "all.html").read_text()


def test_every_number_is_in_the_dictionary() -> None:
    """Remedy: add the figure to dask_gpurt/observe/figures/table.py."""
    with (
        dask.config.set(NO_WATCH),
        dask_gpurt.local_cluster(
            n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0", memory_limit="2 GiB"
        ) as cluster,
        Client(cluster) as client,
    ):
        _work(client)
        time.sleep(0.6)
        status = dask_gpurt.status(client)
        plugin = cluster.scheduler.plugins["gpurt"]
        assert unknown(plugin.figures(), [figure.path for figure in SCHEDULER]) == []
        patterns = [figure.path for figure in WORKER]
        for worker in status.workers.values():
            told = {part: worker[part] for part in ("slots", "shuffle", "tiers")}
            assert unknown(told, patterns) == []
        for ws in cluster.scheduler.workers.values():
            figures = ws.metrics["gpurt"]
            keys = {key.split(".")[0] for key in HEARTBEAT} - set(OPTIONAL)
            assert set(figures) - keys <= {"next_use", CLOCK, WAITS}, "protocols and histograms are no figures"
            assert keys <= set(figures)
            assert unknown(figures, ["next_use", CLOCK, *HEARTBEAT]) == []
        # The scheduler's figures have samples; those without are of what did not happen here.
        empty = {figure.key for figure in exported(SCHEDULER) if not list(figure.samples(plugin.figures()))}
        nothing = ("placement.declined", "placement.fallbacks.*", "placement.speeds", "preflight.phases")
        assert empty <= {f"{p}.*" for p in (*nothing, "shuffle.fallbacks")}


def test_observation_can_be_off() -> None:
    with (
        dask_gpurt.local_cluster(
            n_workers=1,
            threads_per_worker=1,
            processes=False,
            dashboard_address=":0",
            settings={"observe.enabled": False},
        ) as cluster,
        Client(cluster) as client,
    ):
        assert client.submit(_sleep, 1).result() == 1
        scheduler, worker = cluster.scheduler, cluster.workers[0]
        assert "gpurt-ledger" not in scheduler.plugins
        assert "heartbeat_worker" not in str(scheduler.handlers["heartbeat_worker"].__module__)
        # Second copies of slow tasks look at the ends of runs there, too.
        assert not vars(worker)["handle_stimulus"].__module__.startswith("dask_gpurt.observe")
        assert history.of(scheduler) is None
        with pytest.raises(GpurtError, match="observation is off"), dask_gpurt.report("never.html", client):
            pass


#: what grows when the machine is busy with something else, which a test must not depend on
MACHINE = {"scheduler", "own planning", "task overhead", "no ready task", "shuffle barrier"}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(TROUBLES))
def test_the_first_advice_names_the_cause(name: str, tmp_path: Path) -> None:
    """``python -m benchmarks.advice`` is the stricter one: on a quiet machine it is the first of all."""
    found = TROUBLES[name](str(tmp_path / "report.html"))
    assert [f.cause for f in found if f.cause not in MACHINE][:1] == [name], found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    executable()
    path = tmp_path_factory.mktemp("report") / "run.html"
    with (
        dask_gpurt.local_cluster(
            n_workers=2,
            threads_per_worker=2,
            processes=False,
            dashboard_address=":0",
            settings={"observe.cost-per-hour": 3.6},
        ) as cluster,
        Client(cluster) as client,
        dask_gpurt.report(str(path), client) as report,
    ):
        _work(client)
    assert report.run is not None
    # Bounded whatever ran: as if the same tasks had run a thousand times.
    many = timeline(report.run.workers, report.run.tasks * 1000, report.run.start, report.run.stop)
    assert many.markup.count("<rect") <= 2 * 2 * 1600 * 2
    return path


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (400, "dark")])
def test_the_report_in_a_browser(page: Path, width: int, scheme: str) -> None:
    async def look() -> None:
        async with browser() as chromium, chromium.tab() as tab:
            await tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            await tab.open(page.as_uri(), width=width, height=900)
            await tab.until("document.readyState == 'complete' && document.querySelectorAll('h2').length > 5")
            assert tab.errors == []
            assert [url for url in tab.requests if url != page.as_uri()] == [], "self-contained"
            assert await tab.value("document.querySelectorAll('script').length") == 0
            headings = await tab.value("[...document.querySelectorAll('h2')].map(h => h.textContent)")
            for heading in ("Advice", "What the threads did", "Tasks over time", "Memory tiers", "Links", "Cost"):
                assert heading in headings
            assert await tab.value("document.querySelectorAll('svg.lane rect').length") > 10
            assert await tab.value("document.querySelectorAll('.stack > span').length") > 5
            # The page itself never scrolls sideways; only tables do, in their own box.
            assert await tab.value("document.documentElement.scrollWidth") <= width
            dark = await tab.value("getComputedStyle(document.body).backgroundColor")
            assert (dark == "rgb(21, 25, 29)") == (scheme == "dark")
            await tab.screenshot(page.with_name(f"{width}.png"))

    asyncio.run(look())
