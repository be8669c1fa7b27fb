"""The options of cuDF, for processes with this folder on PYTHONPATH: no frames, no kernels, nothing else of it.

dask-cuda's ``CUDFSetup`` switches cuDF's own spilling on by its public option, and we look at the same.
"""

from __future__ import annotations

_options: dict[str, object] = {"spill": False, "spill_stats": 0}


def set_option(name: str, value: object) -> None:
    """As cuDF's."""
    _options[name] = value


def get_option(name: str) -> object:
    """As cuDF's."""
    return _options[name]
