"""Photographs of every page of the dashboard, of a status, and of JupyterLab, while joins run that do not fit.

    PYTHONPATH=. python ci/screenshots.py FOLDER

Eight named workers on one machine, one of them slower than the others (`ci/busy_cluster.py`). Each page is opened in
headless Chromium 400 pixels wide and 1300, on light and on dark, and with the pointer on it. They are for people:
tests/observe/dashboard/test_browser.py checks what a program can.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from typing import TYPE_CHECKING, Any

import yaml
from distributed import Client

import dask_gpurt
from ci.busy_cluster import MEMORY, SHARE, busy, cluster_of_eight
from tests.observe.dashboard.chromium import Browser, Tab, browser

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = (
    *("individual-stall-causes", "individual-shuffle-progress", "individual-tier-history"),
    *("individual-tier-occupancy", "individual-tier-disk-rates", "individual-shuffle-traffic"),
    *("individual-placement-decisions", "individual-placement-accuracy", "individual-link-matrix"),
    *("individual-link-estimates", "individual-worker-speeds", "gpurt"),
)
#: name, width, background
LOOKS = (("narrow", 400, ""), ("narrow-dark", 400, "#111418"), ("wide", 1300, ""), ("dark", 1300, "#111418"))


#: in the page: where to point, inside of the first plot, near its left edge
_PLACE = """(() => {
  const view = [...Bokeh.index.roots][0]
  const find = v => v.model.type == "Figure" ? v : (v.child_views ?? []).map(find).find(Boolean)
  const box = find(view).el.getBoundingClientRect()
  return [box.left + 0.45 * box.width, box.top + 0.55 * box.height]
})()"""


async def photograph(tab: Tab, page: str, folder: pathlib.Path) -> None:
    for name, width, background in LOOKS:
        height = {400: 400, 1300: 560}[width] if page != "gpurt" else {400: 4300, 1300: 2400}[width]
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await tab.call("Emulation.setDeviceMetricsOverride", **size)
        await tab.value(f"document.documentElement.style.background = document.body.style.background = '{background}'")
        await asyncio.sleep(1.2)  # for what the new size brings
        await tab.screenshot(folder / f"{page.removeprefix('individual-')}-{name}.png")
    if page != "gpurt":
        width, height = 600, 420
        await tab.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        await tab.value("document.documentElement.style.background = document.body.style.background = ''")
        await asyncio.sleep(1.2)
        at = await tab.value(_PLACE)
        for x in (at[0] - 3, at[0]):
            await tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=at[1])
        await asyncio.sleep(0.5)
        await tab.screenshot(folder / f"{page.removeprefix('individual-')}-hover.png")


async def dashboards(base: str, folder: pathlib.Path, pages: Sequence[str]) -> list[str]:
    """Photographs of all pages; what their consoles complained of."""
    complaints: list[str] = []
    async with browser() as chromium, chromium.tab() as first:  # the history begins with the first page that looks
        await first.open(base + "gpurt", 1300, 2400)
        await asyncio.sleep(20)
        for page in pages:
            async with chromium.tab() as tab:
                await tab.open(base + page, 1300, 560)
                await tab.until("Bokeh.documents[0].roots().length > 0")
                await asyncio.sleep(2)
                await photograph(tab, page, folder)
                complaints += [f"{page}: {e}" for e in tab.errors]
            print(page, flush=True)
    return complaints


#: a notebook's output, as JupyterLab dresses it
_NOTEBOOK = """<!doctype html><meta charset="utf-8"><style>
body {{ margin: 0; padding: 12px; background: {paper}; color: {ink}; font: 14px/1.4 system-ui, sans-serif; }}
table {{ border-collapse: collapse; font-size: 12px; }} td, th {{ padding: .5em; text-align: right; }}
tbody tr:nth-child(odd) {{ background: {band}; }}
</style>{body}"""


async def status(body: str, folder: pathlib.Path) -> None:
    """The HTML of a status in a narrow notebook and a wide one, on light and on dark."""
    looks = {"light": ("#ffffff", "#212121", "#f5f5f5"), "dark": ("#111111", "#e0e0e0", "#212121")}
    async with browser() as chromium:
        for name, (paper, ink, band) in looks.items():
            file = folder / "status.html"
            file.write_text(_NOTEBOOK.format(paper=paper, ink=ink, band=band, body=body), encoding="utf-8")
            for size, width, height in (("narrow", 400, 1300), ("wide", 1000, 900)):
                async with chromium.tab() as tab:
                    await tab.open(file.resolve().as_uri(), width, height)
                    await tab.until("document.querySelector('.gpurt')")
                    await tab.screenshot(folder / f"status-{size}-{name}.png")
            file.unlink()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def ask(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as reply:
        return json.load(reply)


@contextlib.contextmanager
def jupyterlab(home: pathlib.Path) -> Iterator[tuple[str, str]]:
    """A JupyterLab with our configuration, whose sidebar has started a cluster: its address, the scheduler's."""
    (home / "dask").mkdir()
    given = yaml.safe_load((ROOT / "plugins/jupyter/gpurt.yaml").read_text())
    factory = given["labextension"]["factory"]
    factory["kwargs"] = {
        "threads_per_worker": 1,
        "memory_limit": MEMORY,
        "dashboard_address": "127.0.0.1:0",
        "settings": {"tiers.host-limit": SHARE},
    }
    given["labextension"]["initial"] = [{"name": "A join that spills", "workers": 4}]
    (home / "dask" / "gpurt.yaml").write_text(yaml.safe_dump(given))
    # Its question whether one wants news would lie over the plots.
    (home / "settings" / "@jupyterlab" / "apputils-extension").mkdir(parents=True)
    news = home / "settings" / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    news.write_text('{"checkForUpdates": false, "fetchNews": "false"}')
    port = free_port()
    env = {
        **os.environ,
        "DASK_CONFIG": str(home / "dask"),
        "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "HOME": str(home),
    }
    jupyter = [sys.executable, "-m", "jupyter"]
    subprocess.run(
        [*jupyter, "lab", "workspaces", "import", str(ROOT / "plugins/jupyter/layout.json")], env=env, check=True
    )
    command = [*jupyter, "lab", "--no-browser", "--allow-root", "--ip", "127.0.0.1", "--port", str(port)]
    with open(home / "log", "wb") as log:
        server = subprocess.Popen(
            [*command, "--IdentityProvider.token=t", f"--notebook-dir={home}"], env=env, stdout=log, stderr=log
        )
    try:
        base = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 90
        while True:
            with contextlib.suppress(OSError):
                clusters = ask(f"{base}/dask/clusters?token=t")
                if clusters and clusters[0]["workers"] == 4:
                    break
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"JupyterLab does not start: {(home / 'log').read_text()[-3000:]}")
            time.sleep(0.5)
        yield f"{base}/lab/workspaces/gpurt?token=t", clusters[0]["scheduler_address"]
    finally:
        server.terminate()
        server.wait(30)


async def lab(chromium: Browser, url: str, folder: pathlib.Path) -> None:
    async with chromium.tab() as tab:
        await tab.open(url, 1600, 1000)
        await tab.until("document.querySelector('.dask-ClusterListingItem')", 90)
        # A cluster that was there before the page is not connected to by itself.
        await tab.value("document.querySelector('.dask-ClusterListingItem').click()")
        drawn = "(f => { try { return f.contentWindow.Bokeh.documents[0].roots().length > 0 } catch { return false } })"
        try:
            await tab.until(f"[...document.querySelectorAll('iframe')].filter({drawn}).length >= 4", 100)
            await asyncio.sleep(25)
        except AssertionError:
            print([request for request in tab.requests if "individual" in request or "/ws" in request][:20])
            raise
        finally:
            await tab.screenshot(folder / "jupyterlab.png")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--pages", nargs="+", default=PAGES, choices=PAGES)
    parser.add_argument("--only", choices=("dashboards", "status", "jupyterlab"))
    o = parser.parse_args()
    o.folder.mkdir(parents=True, exist_ok=True)
    complaints: list[str] = []
    if o.only != "jupyterlab":
        with cluster_of_eight() as cluster, Client(cluster) as client, busy(client):
            base = f"http://127.0.0.1:{cluster.scheduler.http_server.port}/"
            if o.only != "status":
                complaints = asyncio.run(dashboards(base, o.folder, o.pages))
            else:
                time.sleep(30)
            asyncio.run(status(dask_gpurt.status(client)._repr_html_(), o.folder))
    if o.only in (None, "jupyterlab"):

        async def run(url: str) -> None:
            async with browser() as chromium:
                await lab(chromium, url, o.folder)

        with (
            tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch,
            jupyterlab(pathlib.Path(scratch)) as (url, address),
            Client(address) as client,
            busy(client),
        ):
            asyncio.run(run(url))
    for complaint in complaints:
        print(complaint)
    return 1 if complaints else 0


if __name__ == "__main__":
    raise SystemExit(main())
