"""`PLANES`: worker -> its data plane, for workers that have begun a shuffle.

Apart from `plane`, which writes it: that module's import takes as long as a tenth of a worker's start, and a question
about a worker without a shuffle must not import it.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from distributed.worker import Worker

    from dask_gpurt.shuffle.transport.peers import LinkTable


class OpenPlane(Protocol):
    """What others than runs ask of a `Plane`, and tell it."""

    #: every message goes by Dask's own connections
    only_safe: bool
    links: LinkTable

    def statistics(self) -> dict[str, Any]:
        """Plain JSON values."""

    async def stop(self) -> None:
        """Close its sockets and threads."""


#: weakly, as many workers live and die in one process in tests
PLANES: weakref.WeakKeyDictionary[Worker, OpenPlane] = weakref.WeakKeyDictionary()
