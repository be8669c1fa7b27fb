"""Every program of the soak gives the right answer on a quiet cluster of processes with the extension."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from distributed import Client

import dask_gpurt
from tests.stress.programs import PROGRAMS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with (
        dask_gpurt.local_cluster(
            n_workers=2, threads_per_worker=2, memory_limit="1GB", dashboard_address=None
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(client: Client, name: str, tmp_path: Path) -> None:
    PROGRAMS[name].body(client, random.Random(name), tmp_path)
    assert len(client.scheduler_info(n_workers=-1)["workers"]) == 2
