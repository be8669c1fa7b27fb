"""NVTX ranges, which Nsight Systems shows as a row of each thread; off where the ``nvtx`` package is not installed.

The package works without a GPU and without a profiler: its ranges then cost about a microsecond and go nowhere.
"""

from __future__ import annotations

import functools
import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from dask_gpurt.model.ranges import Ranges

logger = logging.getLogger("distributed.worker.gpurt")

#: what the ranges are filed under in the profiler
DOMAIN = "dask-gpurt"


class NvtxRanges:
    """`dask_gpurt.model.ranges.Ranges` by the ``nvtx`` package."""

    def __init__(self, module: Any) -> None:
        self._annotate = functools.partial(module.annotate, domain=DOMAIN)

    def range(self, name: str) -> AbstractContextManager[object]:
        """A range of this name while the context is open."""
        context: AbstractContextManager[object] = self._annotate(message=name)
        return context


def find() -> Ranges | None:
    """NVTX ranges; None where the package is not installed, or does not work."""
    try:
        nvtx = importlib.import_module("nvtx")
    except ImportError:
        return None
    except Exception as e:  # a broken installation raises what it likes
        logger.warning("dask-gpurt: no profiler ranges, nvtx cannot be imported (%s: %s)", type(e).__name__, e)
        return None
    return NvtxRanges(nvtx)
