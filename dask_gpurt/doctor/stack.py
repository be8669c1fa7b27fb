"""`versions`: what a process runs on, as far as results, messages or speed depend on it."""

from __future__ import annotations

import importlib.metadata
import platform

_NAMES = (
    *("dask", "distributed", "dask-gpurt", "msgpack", "cloudpickle", "numpy", "pandas", "pyarrow", "lz4", "zstandard"),
    *("dask-cuda", *(f"{name}-cu{cuda}" for name in ("cudf", "rmm", "ucxx", "libucx") for cuda in (12, 13))),
)


def versions() -> dict[str, str]:
    """Distribution to version; Python among them. What is not installed is left out."""
    out = {"python": platform.python_version()}
    for name in _NAMES:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if version:  # metadata that was cut off has none
            out[name] = version
    return out
