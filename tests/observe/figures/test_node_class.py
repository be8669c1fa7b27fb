"""The class of a node: what is known is said, what is not is left out."""

from __future__ import annotations

import types

from dask_gpurt.observe.figures.node_class import node_class, of_worker

GiB = 2**30


def test_what_is_known_is_said() -> None:
    assert node_class(accelerator=None, threads=1, memory_bytes=0) == "1 thread"
    assert node_class(accelerator=None, threads=2, memory_bytes=2.97 * GiB) == "2 threads, 3.0 GiB"
    told = node_class(accelerator="NVIDIA H200", threads=16, memory_bytes=64.2 * GiB, nic_bytes_per_second=3.125e9)
    assert told == "NVIDIA H200, 16 threads, 64 GiB, 25 Gbit/s"


def test_of_a_worker() -> None:
    ws = types.SimpleNamespace(nthreads=4, memory_limit=8 * GiB, extra={"gpu": {"name": "A100", "memory-total": 1}})
    assert of_worker(ws, {"nic_bytes_per_second": None}) == "A100, 4 threads, 8.0 GiB"
    assert of_worker(types.SimpleNamespace(nthreads=4, memory_limit=0, extra={}), None) == "4 threads"
