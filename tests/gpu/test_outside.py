"""What is read off CuPy and KvikIO is there, in the wheels that are installed. Needs no GPU."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from dask_gpurt.backends.device_values import CudaBackend


def module(name: str) -> Any:
    return pytest.importorskip(name, reason=f"{name.partition('.')[0]} is not installed", exc_type=ImportError)


def test_memory_of_cupy_that_came_from_rmm_is_known_by_its_class() -> None:
    memory = module("cupy.cuda.memory")
    assert "UnownedMemory(" in inspect.getsource(module("rmm.allocators.cupy").rmm_cupy_allocator)
    for name in ("PooledMemory", "MemoryAsync", "Memory", "ManagedMemory"):
        assert not issubclass(memory.UnownedMemory, getattr(memory, name))
    backend = CudaBackend(mock.Mock())
    buffer = bytearray(256)
    unowned = memory.UnownedMemory(1 << 20, 256, buffer, 0)

    class Array:  # what is read of a ``cupy.ndarray``, of which none can be made without a GPU
        __module__ = "cupy"

        def __init__(self, mem: Any) -> None:
            self.data = SimpleNamespace(mem=mem)

    assert not backend.outside(Array(unowned))
    assert backend.outside(Array(memory.BaseMemory()))


def test_kvikio_says_whether_the_driver_has_gpudirect_storage() -> None:
    assert module("kvikio.cufile_driver").get("is_gds_available") in (True, False)
