"""The calls of CUDA's runtime that the backends make, over host memory: what is put off runs when it is waited for.

For tests of the order and the arguments of these calls, without a GPU. `HostDriver.install` replaces them in
``cuda.bindings``, RMM's streams, and RMM's resources that need a driver. Each stream is a queue: a copy is checked when
it is asked for, and made when its stream or an event on it is waited for. Until then its target is what it was. So who
reads too early reads old bytes.
"""

from __future__ import annotations

import ctypes
import itertools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import rmm.mr
from cuda.bindings import driver, runtime

from tests.tiers.device.host_rmm import host_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

TOTAL, FREE = 1 << 30, 1 << 29


class HostStream:
    """In the place of RMM's streams."""

    def __init__(self, owner: HostDriver, handle: int) -> None:
        self._owner, self._handle = owner, handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle

    def synchronize(self) -> None:
        self._owner.run(self._handle)


class HostDriver:
    """Queues of copies, events on them, and whether a context is active."""

    def __init__(self) -> None:
        self.queues: dict[int, list[Callable[[], None]]] = {}
        self.events: dict[int, tuple[int, int]] = {}
        #: pointer -> bytes of host memory that is page-locked
        self.registered: dict[int, int] = {}
        self._numbers = itertools.count(1)
        self.active = False
        #: the next call fails with this
        self.error = 0
        self.calls: list[str] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> HostDriver:
        """Replace the calls for one test."""
        for name in dir(self):
            if name.startswith(("cuda", "cuD")):
                monkeypatch.setattr(runtime if name.startswith("cuda") else driver, name, self._counted(name))
        import rmm.pylibrmm.stream as streams

        monkeypatch.setattr(streams, "DEFAULT_STREAM", HostStream(self, 0))
        monkeypatch.setattr(streams, "Stream", lambda flags=None: HostStream(self, next(self._numbers) + 100))
        for name in ("CudaMemoryResource", "PinnedHostMemoryResource", "CudaAsyncMemoryResource"):
            monkeypatch.setattr(rmm.mr, name, lambda **_: host_memory())
        return self

    def _counted(self, name: str) -> Callable[..., tuple[Any, ...]]:
        call = getattr(self, name)

        def counted(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append(name)
            if self.error:
                error, self.error = self.error, 0
                return (error, None)
            out = call(*arguments)
            return (0,) if out is None else (0, *out) if isinstance(out, tuple) else (0, out)

        return counted

    # ---- streams

    def later(self, stream: int, step: Callable[[], None]) -> None:
        """Put a kernel, or a copy, on a stream."""
        self.queues.setdefault(stream, []).append(step)

    def run(self, stream: int, most: int | None = None) -> None:
        """Do what a stream was given, or the first of it."""
        queue = self.queues.get(stream, [])
        while queue and most != 0:
            queue.pop(0)()
            most = None if most is None else most - 1

    def cudaMemcpyAsync(self, target: int, source: int, nbytes: int, kind: Any, stream: int) -> None:
        assert nbytes > 0
        assert target > 0
        assert source > 0
        assert kind in tuple(runtime.cudaMemcpyKind)
        self.later(stream, lambda: ctypes.memmove(target, source, nbytes) and None)

    def cudaHostRegister(self, pointer: int, nbytes: int, flags: int) -> None:
        assert pointer > 0
        assert flags == runtime.cudaHostRegisterDefault
        self.registered[pointer] = nbytes

    def cudaHostUnregister(self, pointer: int) -> None:
        del self.registered[pointer]

    def cudaDeviceSynchronize(self) -> None:
        for stream in list(self.queues):
            self.run(stream)

    def cudaEventCreateWithFlags(self, flags: int) -> int:
        assert flags == runtime.cudaEventBlockingSync | runtime.cudaEventDisableTiming
        event = next(self._numbers)
        self.events[event] = (0, 0)
        return event

    def cudaEventRecord(self, event: int, stream: int) -> None:
        self.events[event] = stream, len(self.queues.get(stream, []))

    def cudaStreamWaitEvent(self, stream: int, event: int, flags: int) -> None:
        assert flags == 0
        recorded = self.events[event]
        self.later(stream, lambda: self.run(*recorded))

    def cudaEventSynchronize(self, event: int) -> None:
        self.run(*self.events[event])

    def cudaEventDestroy(self, event: int) -> None:
        del self.events[event]

    # ---- the device

    def cudaGetDevice(self) -> int:
        return 0

    def cudaGetDeviceProperties(self, device: int) -> Any:
        return SimpleNamespace(name=b"host memory\0\0", integrated=0)

    def cudaMemGetInfo(self) -> tuple[int, int]:
        return FREE, TOTAL

    def cudaSetDevice(self, device: int) -> None:
        self.active = True

    def cudaFree(self, pointer: int) -> None:
        assert pointer == 0

    def cuDeviceGet(self, device: int) -> int:
        return device

    def cuDevicePrimaryCtxGetState(self, device: int) -> tuple[int, int]:
        return 0, int(self.active)
