"""`run_apart`: run what may hang with its device in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


async def run_apart(function: Callable[[], object], seconds: float) -> bool:
    """Run a function that does not raise in a thread of its own; wait so long at most; whether it ended.

    Use it for what may hang with its device. Such a thread keeps neither the event loop nor the process from ending.
    Where the system starts none, the function runs on the loop.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def tell() -> None:
        if not done.done():
            done.set_result(None)

    def run() -> None:
        try:
            function()
        finally:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(tell)

    try:
        threading.Thread(target=run, name="gpurt-tier-close", daemon=True).start()
    except RuntimeError:  # the system starts no thread
        run()
    await asyncio.wait([done], timeout=seconds)
    return done.done()
