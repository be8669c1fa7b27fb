"""The blocks of docs/deploy/hpc.md: dask-jobqueue's clusters with a live scheduler, and the jobs that they submit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from .blocks import run_python, text

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("dask_jobqueue")
pytestmark = pytest.mark.cluster

#: the scheduler runs in this process, so it can be asked before there is a job
CHECK = """
import dask_gpurt
status = dask_gpurt.status(cluster.get_client())
assert status.installed and set(status.scheduler["parts"].values()) == {"on"}, status
cluster.close()
"""


@pytest.mark.parametrize(("name", "says"), [("slurm", "#SBATCH"), ("pbs", "#PBS")])
def test_a_batch_system(name: str, says: str, tmp_path: Path) -> None:
    source = text(name).replace(
        'preload": ["dask_gpurt.preload"]', 'preload": ["dask_gpurt.preload"], "dashboard_address": ":0"'
    )
    script = run_python(source + CHECK, tmp_path)
    assert says in script
    assert "--local-directory /tmp" in script
    # The operating system's word for a worker, with the scheduler's address.
    assert "distributed.cli.dask_worker tcp://" in script
    assert "--nworkers 4" in script


def test_the_configuration_file(tmp_path: Path) -> None:
    (tmp_path / "jobqueue.yaml").write_text(text("jobqueue-yaml"))
    source = """
from dask_jobqueue import SLURMCluster
cluster = SLURMCluster(cores=1, memory="1 GB", walltime="00:10:00")
print(cluster.job_script())
"""
    env = {"DASK_CONFIG": str(tmp_path / "jobqueue.yaml"), "DASK_DISTRIBUTED__SCHEDULER__DASHBOARD__ADDRESS": ":0"}
    assert "--local-directory /tmp" in run_python(source + CHECK, tmp_path, env=env)
