"""Workers use again what tasks freed, for as long as the tiers are there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from distributed import Client
from distributed.utils_test import poll_for

import dask_gpurt
from dask_gpurt.memory.reuse import allocated

pytestmark = pytest.mark.skipif(allocated() is None, reason="needs glibc 2.33")


def on() -> bool:
    from dask_gpurt.memory.reuse import reuse

    return reuse.on


def faults() -> int:
    """Of fifty functions of 2.4 MB, in the thread of a task."""
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        np.ones(300_000) + 1
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def of_worker(client: Client, function: Any) -> Any:
    [value] = client.run(function).values()
    return value


def test_from_the_start_to_the_end_of_the_tiers() -> None:
    with (
        dask_gpurt.local_cluster(n_workers=1, threads_per_worker=1, memory_limit="1 GiB", dashboard_address=":0") as c,
        Client(c) as client,
    ):
        poll_for(lambda: of_worker(client, on), timeout=30)
        client.submit(faults, pure=False).result()
        ours = client.submit(faults, pure=False).result()
        dask_gpurt.detach(client)
        assert not of_worker(client, on)
        stock = client.submit(faults, pure=False).result()
        assert ours < stock / 10
