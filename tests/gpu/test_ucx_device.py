"""UCX with device buffers: what was in one GPU's memory is in memory of the GPU at the receiver. Needs a GPU."""

from __future__ import annotations

import os
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import pytest

from dask_gpurt.backends.rmm_stack import DeviceAllocator, own_pool
from dask_gpurt.memory.pages import Pages, system
from dask_gpurt.shuffle.transport.base import Header, Peer, ReceiveGate, Services
from dask_gpurt.shuffle.transport.link.records import RunKey, is_device, message_bytes, size_of

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.gpu
RUN, SECRET = RunKey(7, 1), bytes(16)
if os.environ.get("GPURT_REQUIRE_GPU") == "1":
    import cupy
    import rmm  # noqa: F401
    import ucxx  # noqa: F401
else:
    cupy = pytest.importorskip("cupy")
    pytest.importorskip("rmm")
    pytest.importorskip("ucxx")
    if not cupy.cuda.is_available():
        pytest.skip("needs a GPU", allow_module_level=True)


@pytest.fixture(autouse=True)
def _stream_ordered_memory() -> Iterator[None]:
    """Values of CUDA's asynchronous pool, as on a worker: cudaMalloc orders by itself what must be ordered here."""
    allocator = DeviceAllocator(lambda nbytes: False, 1 << 30, pool=lambda: own_pool("async", 1 << 30), cupy=True)
    allocator.install()
    yield
    allocator.close()


class Node:
    def __init__(self, address: str) -> None:
        from dask_gpurt.shuffle.transport.ucx.transport import UcxTransport

        self.frames: list[Any] = []
        self.gate = ReceiveGate(1 << 28)
        services = Services(
            address=address,
            gate=self.gate,
            secret_of=lambda run: SECRET,
            on_message=self.message,
            on_loss=lambda *args: None,
        )
        self.transport = UcxTransport(services, Pages(system()))

    def send(self, peer: Peer, buffers: list[Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self.transport.submit(future.set_result, peer, Header(RUN, SECRET), buffers)
        return future

    def message(self, run: RunKey, sender: str, frames: list[Any], paid: int, done: Any) -> None:
        self.frames.append(frames)
        done("")


@pytest.fixture
def pair():
    a, b = Node("a"), Node("b")
    yield a, b
    a.transport.stop()
    b.transport.stop()


def test_sizes_of_device_buffers():
    block = cupy.arange(1000, dtype="f4")
    assert is_device(block)
    assert size_of(block) == 4000
    assert message_bytes([block, b"x"]) == 64 + 4032 + 64


@pytest.mark.parametrize("n", [1, 1 << 10, 1 << 20, 1 << 24])
def test_device_memory_arrives_in_device_memory(pair, n):
    a, b = pair
    block = cupy.arange(n, dtype="u1")
    peer = Peer("b", b.transport.endpoint_for(RUN, "a"), b.gate.message_limit)
    future = a.send(peer, [b"head", block])
    assert future.result(60).problem == ""
    ((head, got),) = b.frames
    assert bytes(head) == b"head"
    assert is_device(got)
    assert bool((cupy.asarray(got).view("u1") == block).all())
    assert b.gate.statistics()["held_bytes"] == 0


def test_many_device_buffers(pair):
    a, b = pair
    """Each is whole and with what was sent with it; those that take less time may be there first."""
    blocks = [cupy.full(100_000, i, "u1") for i in range(50)]
    peer = Peer("b", b.transport.endpoint_for(RUN, "a"), b.gate.message_limit)
    start = time.monotonic()
    futures = [a.send(peer, [bytes([i]), x]) for i, x in enumerate(blocks)]
    assert [f.result(60).problem for f in futures] == [""] * 50
    assert time.monotonic() - start < 60
    assert sorted(bytes(head)[0] for head, _ in b.frames) == list(range(50))
    assert all(bool((cupy.asarray(block).view("u1") == bytes(head)[0]).all()) for head, block in b.frames)
