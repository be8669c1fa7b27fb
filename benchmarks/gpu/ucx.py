"""Device messages by UCX: whole or not, and GB/s, for memory, processes, context and order of each kind.

A case is MEMORY-PROCESSES-CONTEXT-ORDER:

* *malloc* or *async*: messages lie in memory of ``cudaMalloc``, or of CUDA's asynchronous pool;
* *one* or *two* processes;
* *with* or *without* the device's context in the thread of UCX. Without it, UCX has crashed: the case then fails;
* *ours*: sent and received as `dask_gpurt.backends.ucx_device` orders it; *raw*: at once.

Each message is filled by a kernel that nothing waits for, and received into memory that a kernel before has poisoned.
So what is *raw* may arrive wrong: it is counted, and is what *ours* is for. A wrong message of *ours* is a problem.
"""

from __future__ import annotations

import importlib
import multiprocessing
import threading
import time
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.target import MB, get, missing

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from benchmarks.gpu.target import Target

SIZES = (MB, 16 * MB, 64 * MB)
MESSAGES = 20
POISON = 0xDB
#: a peer that has ended, or waits for something that does not come
PATIENCE_SECONDS = 20.0


class _HostSide:
    """`DeviceSide` of the stand-in: nothing has to be waited for."""

    def enter(self) -> None:
        """There is no context."""

    def prepare(self, buffers: list[Any]) -> list[Any]:
        return buffers

    def allocate(self, nbytes: int) -> Any:
        import numpy

        return numpy.empty(nbytes, "u1")


def run(what: str, target: Target) -> dict[str, Any]:
    """A receiver here, and a sender in a thread or a process."""
    missing("ucxx")
    _, processes, _, order = what.split("-")
    here, there = multiprocessing.get_context("spawn").Pipe()
    arguments = (there, what, target.name)
    if processes == "one":
        sender: Any = threading.Thread(target=send, args=arguments, daemon=True)
    else:
        sender = multiprocessing.get_context("spawn").Process(target=send, args=arguments, daemon=True)
    sender.start()
    out = receive(here, what, target)
    sender.join(PATIENCE_SECONDS)
    if out["wrong"] and order == "ours":
        out["problem"] = f"{out['wrong']} of {out['messages']} messages were not what was sent"
    return out


class _End:
    """UCX in the calling thread, for one peer."""

    def __init__(self, connection: Connection, what: str, target: Target, *, setup: bool) -> None:
        from dask_gpurt.backends.ucx import UcxWorker

        memory, _, context, order = what.split("-")
        self.arrays: Any = importlib.import_module(target.arrays)
        self.sizes = [max(1, int(size * target.scale)) for size in SIZES]
        self.ordered = order == "ours"
        self.side: Any = _HostSide()
        if target.name == "gpu":
            from dask_gpurt.backends.ucx_device import CudaSide

            self.side = CudaSide()
            if setup:
                _install(memory)
        if context == "with":
            self.side.enter()
        self.worker = UcxWorker()
        connection.send(self.worker.address)
        if not connection.poll(PATIENCE_SECONDS):
            raise TimeoutError("the other end did not start")
        self.peer = self.worker.endpoint(connection.recv())

    def wait(self, request: Any) -> None:
        end = time.monotonic() + PATIENCE_SECONDS
        while not request.completed:
            self.worker.progress()
            if time.monotonic() > end:
                raise TimeoutError("a message did not arrive")
        request.check_error()


def _install(memory: str) -> None:
    """What CuPy and RMM allocate from in this process."""
    import rmm.mr

    from dask_gpurt.backends.rmm_stack import DeviceAllocator, own_pool

    limit = 8 << 30
    base = (lambda: own_pool("async", limit)) if memory == "async" else rmm.mr.CudaMemoryResource
    DeviceAllocator(lambda nbytes: False, limit, pool=base, cupy=True).install()


def send(connection: Connection, what: str, name: str) -> None:
    """The other end: fill, send, and give up at once."""
    end = _End(connection, what, get(name), setup=what.split("-")[1] == "two")
    for size in end.sizes:
        for i in range(MESSAGES):
            message = [end.arrays.full(size, i, "u1")]
            if end.ordered:
                message = end.side.prepare(message)
            end.wait(end.worker.send(end.peer, message[0], i))
            del message
        if not connection.poll(PATIENCE_SECONDS):  # it has all of this size
            return
        connection.recv()
    connection.recv()


def receive(connection: Connection, what: str, target: Target) -> dict[str, Any]:
    """This end: receive into what was poisoned, and compare."""
    end = _End(connection, what, target, setup=True)
    rates, wrong, messages = {}, 0, 0
    for size in end.sizes:
        seconds = 0.0
        for i in range(MESSAGES):
            poisoned = end.arrays.full(size, POISON, "u1")
            if end.ordered:
                del poisoned
                room = end.side.allocate(size)
            else:
                room = poisoned  # the kernel may still be writing
            start = time.perf_counter()
            end.wait(end.worker.receive(end.peer, room, i))
            seconds += time.perf_counter() - start
            wrong += not bool((end.arrays.asarray(room).view("u1") == i).all())
            messages += 1
        connection.send("next")
        rates[f"{size} bytes"] = round(MESSAGES * size / seconds / 1e9, 3)
    connection.send("done")
    return {"gigabytes_per_second": rates, "wrong": wrong, "messages": messages}
