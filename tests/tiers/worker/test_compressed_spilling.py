"""What a worker writes to disk by default is compressed where that gains."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from distributed import wait
from distributed.utils_test import gen_cluster

from dask_gpurt.config import Settings
from dask_gpurt.model.compression import Rate
from dask_gpurt.tiers.runtime import TierRuntime

if TYPE_CHECKING:
    from distributed import Client, Scheduler, Worker


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=[("", 1)])
async def test_zeros_take_no_room_on_the_disk(c: Client, s: Scheduler, a: Worker) -> None:
    """Dask compresses, too: it wrote 20 MB where this worker wrote 4.6 GB."""
    pytest.importorskip("lz4.block")
    runtime = await TierRuntime.install(a, Settings.load().tiers)
    zeros = c.submit(np.zeros, 8 << 20, "u1")
    noise = c.submit(np.random.default_rng(1).bytes, 8 << 20)
    await wait([zeros, noise])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Rate, "bytes_per_second", 100e6)  # of a network disk; some are faster than any codec
        runtime.engine.shrink(16 << 20)
        await runtime.engine.idle()
    on_disk = runtime.statistics()["disk_bytes"]
    assert 8 << 20 <= on_disk < 9 << 20
    assert not (await zeros).any()
    assert await noise == np.random.default_rng(1).bytes(8 << 20)
    await runtime.uninstall()
