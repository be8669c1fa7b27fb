"""`run_apart`, `call_apart`: run what may hang with its device in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")


async def call_apart(function: Callable[..., _T], *args: object) -> _T:
    """What a function gives, or raises, that is run by `run_apart`; for what may take as long as it likes."""
    results: list[_T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function(*args))
        except BaseException as e:
            errors.append(e)

    await run_apart(run, None)
    if errors:
        raise errors.pop()  # no name for it: it would refer to itself by this frame
    return results[0]


async def run_apart(function: Callable[[], object], seconds: float | None) -> bool:
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
        threading.Thread(target=run, name="gpurt-tier-apart", daemon=True).start()
    except RuntimeError:  # the system starts no thread
        run()
    await asyncio.wait([done], timeout=seconds)
    return done.done()
