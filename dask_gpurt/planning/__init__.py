"""What a client's process keeps between queries, so that Dask plans the next one sooner. See `held`.

`keep` begins it, `late` does so where that was too early, `forget` ends it, `switched` says for a while whether it goes
on. Importing this imports no pandas.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger("distributed.client.gpurt")

#: whether `keep` was called, and `forget` was not since
_wanted = False
#: blocks of `switched` in which planning is left to Dask
_left = 0


def keep() -> bool:
    """Hold expressions of queries from now on, where ``dask.dataframe`` is in use; whether that is so now.

    A client that has not imported it has nothing to hold, and the import would cost it a second. See `late` for one
    that does later.
    """
    global _wanted
    _wanted = True
    if "dask.dataframe" not in sys.modules:
        return False
    try:
        from dask_gpurt.planning.held import HELD
    except ImportError as e:  # a name that the seam needs; planning is Dask's then
        logger.info("planning is left to Dask: %s", e)
        return False
    return HELD.install()


def late() -> None:
    """Do what `keep` could not, where ``dask.dataframe`` was imported after it. Every question to a cluster calls this.

    Rejected: a finder in ``sys.meta_path``, which would see every import of everybody.
    """
    if _wanted and not _left:
        keep()


def forget() -> None:
    """Leave planning to Dask again, and let go of everything that was held."""
    global _wanted
    _wanted = False
    if "dask_gpurt.planning.held" in sys.modules:
        from dask_gpurt.planning.held import HELD

        HELD.uninstall()
        HELD.clear()


@contextlib.contextmanager
def switched(on: bool) -> Iterator[None]:
    """Hold, or leave planning to Dask, within the block; as before after it. Nothing that is held is let go.

    For comparisons with stock Dask, which does not find what is held.
    """
    from dask_gpurt.planning.held import HELD

    global _left
    before = HELD.installed
    if on:
        HELD.install()
    else:
        _left += 1  # a question to a cluster in the block does not end it
        HELD.uninstall(hide=True)
    try:
        yield
    finally:
        _left -= not on
        if before:
            HELD.install()
        else:
            HELD.uninstall(hide=True)
