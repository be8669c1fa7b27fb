"""plugins/jupyter: the configuration is one that dask-labextension takes, the layout opens plots that exist."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import dask
import pytest
import yaml

pytest.importorskip("bokeh")

from dask_gpurt.observe.dashboard import pages

JUPYTER = Path(__file__).parents[2] / "plugins" / "jupyter"


def _widgets(node: dict[str, Any]) -> list[str]:
    return node.get("widgets") or [w for child in node.get("children", []) for w in _widgets(child)]


def test_the_layout_opens_every_plot_once() -> None:
    data = json.loads((JUPYTER / "layout.json").read_text())["data"]
    opened = _widgets(data["layout-restorer:data"]["main"]["dock"])
    prefix = "dask-dashboard-launcher:"
    assert sorted(opened) == sorted(prefix + address for address in pages.PLOTS)
    for widget in opened:
        item = data[widget]["data"]["item"]
        assert prefix + item["route"] == widget
        # As the sidebar names it: what follows "individual", in capitals.
        assert item["label"] == item["key"] == " ".join(item["route"].split("-")[1:]).title()


@pytest.mark.cluster
def test_the_sidebars_clusters_have_the_extension() -> None:
    async def run() -> None:
        # Imported here: it wants an event loop while it is imported.
        manager = pytest.importorskip("dask_labextension.manager")
        given = yaml.safe_load((JUPYTER / "gpurt.yaml").read_text())
        given["labextension"]["factory"]["kwargs"] = {"processes": False, "dashboard-address": ":0"}
        # Merged, as Dask does with a file; `dask.config.set` of a mapping would replace the extension's own defaults.
        with dask.config.set(
            {"labextension": dask.config.merge(dask.config.get("labextension"), given["labextension"])}
        ):
            cluster, _ = await manager.make_cluster({"workers": 1})
        async with cluster:
            assert "gpurt" in cluster.scheduler.plugins

    asyncio.run(run())
