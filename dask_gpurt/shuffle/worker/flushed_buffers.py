"""Have a run take inputs again after distributed's send buffer was flushed, which closes it."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any

from dask_gpurt.shuffle import seam

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dask_gpurt.shuffle.counters import ShuffleCounters


class FlushedBuffers:
    """Send buffers of one run that were closed by a flush before an amendment. On the event loop."""

    def __init__(self, counters: ShuffleCounters) -> None:
        self._counters = counters
        self._buffers: list[seam.CommShardsBuffer] = []

    def reopened(
        self, buffer: seam.CommShardsBuffer, send: Callable[[str, list[Any]], Awaitable[Any]]
    ) -> seam.CommShardsBuffer:
        """A send buffer that takes inputs: `buffer`, the run's, or a new one like it if a flush has closed that."""
        if seam.accepts_input(buffer):
            return buffer
        self._buffers.append(buffer)
        return type(buffer)(
            send=send,
            max_message_size=buffer.max_message_size,
            memory_limiter=buffer.memory_limiter,
            concurrency_limit=buffer.concurrency_limit,
        )

    async def flush(self) -> None:
        """Wait until all is sent that they had.

        Raises
        ------
        Exception
            What went wrong in one of them.
        """
        for buffer in self._buffers:
            await buffer.flush()
            buffer.raise_on_exception()

    async def close(self) -> None:
        """Close them; errors are counted."""
        for buffer in self._buffers:
            try:
                await buffer.close()
            except Exception:
                self._counters.add(close_errors=1)
                self._counters.last_error = traceback.format_exc()
