"""The preload of `device_frames` makes shuffles those of device frames: without, a run compares stock with stock."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("rmm")

CODE = """
import dask
import dask.dataframe as dd
import pandas as pd
from distributed import Client, LocalCluster

preload = {"preload": ["tests.upstream.device_frames"]}
with (
    LocalCluster(n_workers=1, processes=False, dashboard_address=None, scheduler_kwargs=preload) as cluster,
    Client(cluster) as client,
    dask.config.set({"dataframe.shuffle.method": "p2p"}),
):
    d = dd.from_pandas(pd.DataFrame({"k": range(100), "v": 1}), npartitions=4)
    assert len(d.shuffle("k").compute()) == 100
    d["c"] = d["k"].astype(pd.CategoricalDtype(range(100)))
    assert len(d.shuffle("k").compute()) == 100
    said = client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.plugins["shuffle"].takeover.statistics())
    assert (said["runs"], said["errors"]) == (2, 0), said["last_error"]
"""


@pytest.mark.cluster
def test_pandas_frames_are_shuffled_over_the_stand_in(tmp_path: Path) -> None:
    root, log = Path(__file__).parents[2], tmp_path / "active"
    environment = {**os.environ, "PYTHONPATH": str(root), "UPSTREAM_ACTIVE_LOG": str(log)}
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert log.with_name("active.device").read_text().splitlines() == ["device frames", "c is category"]
