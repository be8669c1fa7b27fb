"""`versions`: what a process runs on, as far as results, messages or speed depend on it."""

from __future__ import annotations

import importlib.metadata
import platform
import re

#: distributions; those of RAPIDS with the CUDA version that is part of their names
_STACK = re.compile(
    r"(dask|distributed|dask-gpurt|msgpack|cloudpickle|numpy|pandas|pyarrow|lz4|zstandard|dask-cuda"
    r"|(?:cudf|rmm|ucxx|libucx)-cu\d+)"
)


def versions() -> dict[str, str]:
    """Name to version; Python among them. What is not installed is left out."""
    out = {"python": platform.python_version()}
    for distribution in importlib.metadata.distributions():
        name = re.sub(r"[-_.]+", "-", distribution.name or "").lower()
        # The first on the path is the one that is imported.
        if _STACK.fullmatch(name) and name not in out:
            out[name] = distribution.version
    return out
