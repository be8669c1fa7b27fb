from __future__ import annotations

import gc
from typing import Any

import pytest


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The calls of CUDA over host memory, a `HostDriver`."""
    from dask_gpurt.backends import cuda, cudf_values, device_copies
    from tests.backends.host_driver import HostDriver  # of RMM, which the tests that ask for it have

    cached = (cuda.probe, device_copies.leaving, device_copies._pinned_pool, cudf_values.packing_room)
    for function in cached:
        function.cache_clear()
    yield HostDriver().install(monkeypatch)
    gc.collect()
    for function in cached:
        function.cache_clear()
