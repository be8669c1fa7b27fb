"""Pages without a server."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bokeh.document import Document


def called_back(doc: Document) -> None:
    """Call a page's callbacks, as the server does on the event loop while it is open; each has to be a coroutine."""

    async def call() -> None:
        for callback in doc.session_callbacks:
            await callback.callback()

    asyncio.run(call())
