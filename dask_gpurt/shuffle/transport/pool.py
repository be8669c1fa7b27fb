"""Memory for messages that arrive: used again when nothing refers to it any more.

Theory of operation. Receiving into fresh memory costs a page fault for every 4 KiB, which halves the bandwidth. A block
comes as a numpy array; a message's frames are views on it, and whoever keeps one (the store, an Arrow table) keeps the
block. When the last view dies the memory goes back here, idle, up to `idle_limit` bytes; beyond that it is freed. So
the pool never holds more than what is in use plus `idle_limit`, and nobody has to say when he is done.

Blocks come in eighths of powers of two: at most 12.5 % more address space than asked for, and pages beyond the end of a
message are never touched.
"""

from __future__ import annotations

import collections
import threading
import weakref
from typing import Any

import numpy as np

#: blocks shorter than this many bytes are not worth keeping
_SMALLEST = 1 << 14


def _rounded(nbytes: int) -> int:
    step = max(_SMALLEST, 1 << max(0, nbytes.bit_length() - 4))
    return (nbytes + step - 1) // step * step


class BufferPool:
    """Thread-safe.

    Parameters
    ----------
    idle_limit
        Bytes kept for later use, at most.
    """

    def __init__(self, idle_limit: int) -> None:
        self._limit = idle_limit
        # Reentrant: a finalizer can run in this thread while it is in here.
        self._lock = threading.RLock()
        self._idle: dict[int, collections.deque[np.ndarray[Any, Any]]] = {}
        self.idle_bytes = 0
        self.reused = self.fresh = 0

    def take(self, nbytes: int) -> memoryview:
        """Writable memory of `nbytes`, aligned to 64 bytes; its contents are arbitrary."""
        if nbytes < _SMALLEST:
            return _aligned(np.empty(nbytes + 64, "u1"), nbytes)
        size = _rounded(nbytes)
        with self._lock:
            idle = self._idle.get(size)
            block = idle.pop() if idle else None
            if block is not None:
                self.idle_bytes -= size
                self.reused += 1
            else:
                self.fresh += 1
        if block is None:
            block = np.empty(size + 64, "u1")
        # The array that users see is another object on the same memory: its death says that no view is left.
        seen = np.frombuffer(block.data, "u1")
        weakref.finalize(seen, self._give_back, block, size).atexit = False
        return _aligned(seen, nbytes)

    def _give_back(self, block: np.ndarray[Any, Any], size: int) -> None:
        with self._lock:
            if self.idle_bytes + size <= self._limit:
                self._idle.setdefault(size, collections.deque()).append(block)
                self.idle_bytes += size

    def clear(self) -> None:
        """Free what is idle."""
        with self._lock:
            self._idle.clear()
            self.idle_bytes = 0


def _aligned(block: np.ndarray[Any, Any], nbytes: int) -> memoryview:
    skip = -block.ctypes.data % 64
    return block.data[skip : skip + nbytes]
