"""Each page in a real browser while a real cluster works: plots have data, move, fit, and nothing fails in silence."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from distributed import Client

import dask_gpurt
from dask_gpurt.placement import statistics
from dask_gpurt.placement.plugin import PlacementPlugin
from tests.observe.dashboard.chromium import Tab, browser, executable

pytest.importorskip("bokeh")

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dask_gpurt.placement.engine import Engine

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

#: in the page: all values of the columns of that name
COLUMN = (
    "(name => [...Bokeh.documents[0]._all_models.values()]"
    ".filter(m => m.type == 'ColumnDataSource' && name in m.data).flatMap(m => Array.from(m.data[name])))"
)
TEXTS = "[...Bokeh.documents[0]._all_models.values()].filter(m => m.type == 'Div').map(m => m.text)"

#: page -> columns that have a value above zero while the workload below runs
PAGES: dict[str, tuple[str, ...]] = {
    "individual-stall-causes": ("ago", "busy", "total"),
    "individual-shuffle-progress": ("inputs", "outputs", "count"),
    "individual-tier-history": ("ago", "host_bytes", "disk_bytes"),
    "individual-tier-occupancy": ("host", "disk", "x"),
    "individual-tier-disk-rates": ("ago", "written", "read"),
    "individual-shuffle-traffic": ("sent", "received", "kept"),
    # Whether a decision moves anything within the minute that is shown is the policy's affair.
    "individual-placement-decisions": ("local", "total"),
    "individual-placement-accuracy": ("predicted", "actual"),
    "individual-link-matrix": ("moved_bytes", "requests"),
    "individual-link-estimates": ("latency", "bandwidth", "samples", "alpha"),
    "individual-worker-speeds": ("speed",),
}
PAGES["gpurt"] = tuple(column for columns in PAGES.values() for column in columns)


def _work(client: Client, stop: threading.Event) -> None:
    """Shuffles of data frames that do not fit into the workers' host budget, and arrays that workers fetch."""
    import dask.dataframe as dd
    import numpy as np
    import pandas as pd
    from distributed import get_worker

    def load(i: int) -> Any:
        time.sleep(0.04 * (1 + get_worker().name))  # one worker takes twice as long as the other
        return np.full(500_000, float(i))

    def make(i: int, n: int = 300_000) -> Any:
        r = np.random.default_rng(i)
        return pd.DataFrame({"k": r.integers(0, 1000, n), "a": r.random(n), "b": r.random(n)})

    while not stop.is_set():
        df = dd.from_map(make, range(24)).persist()
        # A sum rather than a length, which Dask would find without the shuffle.
        assert df.shuffle("k")[["a", "b"]].sum().compute().gt(1e6).all()
        arrays = client.map(load, range(8), pure=False)
        sums = client.map(np.add, arrays, arrays[3:] + arrays[:3])
        assert sum(client.gather(client.map(np.max, sums))) == 2 * sum(range(8))
        del df, arrays, sums


def _decide_always(dask_scheduler: Any) -> None:
    """Placement leaves most of this work to Dask, which brings the pages on decisions nothing new."""
    dask_scheduler.plugins[PlacementPlugin.name].engine.always = True


_speeds = statistics.speeds


def _drifting(engine: Engine) -> dict[str, float]:
    """Speeds that change all the time: those of equal workers may stay at 1.00x, and their page then stands still."""
    return {address: speed * (1 + time.monotonic() % 60 / 600) for address, speed in _speeds(engine).items()}


@pytest.fixture(scope="module")
def base() -> Iterator[str]:
    """Address of a dashboard whose cluster works."""
    executable()  # skip before the cluster starts
    with (
        pytest.MonkeyPatch.context() as patch,
        dask_gpurt.local_cluster(
            n_workers=2,
            threads_per_worker=1,
            memory_limit="800 MB",
            dashboard_address="127.0.0.1:0",
            settings={"tiers.host-limit": 0.08},
        ) as cluster,
        Client(cluster) as client,
    ):
        patch.setattr(statistics, "speeds", _drifting)  # the scheduler is in this process
        client.run_on_scheduler(_decide_always)
        stop, failed = threading.Event(), list[BaseException]()

        def run() -> None:
            try:
                _work(client, stop)
            except BaseException as e:
                failed.append(e)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield f"http://127.0.0.1:{cluster.scheduler.http_server.port}/"
        finally:
            stop.set()
            thread.join()
        assert failed == []


async def _shows(tab: Tab, base: str, page: str, width: int) -> None:
    await tab.open(base + page, width, 700)
    await tab.until("Bokeh.documents[0].roots().length > 0")
    for column in PAGES[page]:
        await tab.until(f"{COLUMN}('{column}').some(v => v > 0)")
    texts = await tab.value(TEXTS)
    assert not [text for text in texts if "not installed" in text or "not shown" in text], texts
    # Alive: the websocket brings something new.
    before = await tab.value(f"JSON.stringify({TEXTS}) + {COLUMN}('ago')")
    await tab.until(f"JSON.stringify({TEXTS}) + {COLUMN}('ago') != {before!r}")
    # Drawn, and not wider than the window.
    canvases = "[...document.querySelectorAll('*')].filter(e => e.shadowRoot).length"
    assert await tab.value(canvases) > 0
    assert await tab.value("document.documentElement.scrollWidth") <= width
    assert tab.errors == []
    elsewhere = [url for url in tab.requests if not url.startswith((base, base.replace("http", "ws"), "data:"))]
    assert elsewhere == []


@pytest.mark.parametrize("page", list(PAGES))
def test_page(page: str, base: str) -> None:
    async def run() -> None:
        # A panel of JupyterLab's is as narrow as that; the overview is opened in a browser of its own.
        async with browser() as chromium, chromium.tab() as tab:
            await _shows(tab, base, page, 1300 if page == "gpurt" else 400)

    asyncio.run(run())


def test_the_menu_leads_to_the_overview(base: str) -> None:
    async def run() -> None:
        async with browser() as chromium, chromium.tab() as tab:
            await tab.open(base + "status")
            await tab.until("document.querySelector('.dropdown-content a[href=gpurt]')")
            await tab.value("document.querySelector('.dropdown-content a[href=gpurt]').click()")
            await tab.until("location.pathname == '/gpurt' && Bokeh.documents[0].roots().length == 11")

    asyncio.run(run())


def test_a_missing_browser_is_skipped_or_fails_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("GPURT_REQUIRE_CHROMIUM", raising=False)
    with pytest.raises(pytest.skip.Exception):
        executable()
    monkeypatch.setenv("GPURT_REQUIRE_CHROMIUM", "1")
    with pytest.raises(pytest.fail.Exception):
        executable()
