"""What a seam requires of the library below it, looked up before anything is changed.

A seam is the one file of an engine that uses private names of distributed, dask or bokeh. It requires them all when the
engine is installed: a rename upstream then is an error with a remedy, not a failure in the middle of a run.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from dask_gpurt.errors import SeamMismatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

#: the versions of dask and distributed that `setup.cfg` allows
SUPPORTED = ">=2025.9.1,<2026.9"
REMEDY = f"Nothing was changed. Remedy: use distributed {SUPPORTED}, or set gpurt.on-error: stock"


def require_names(root: object, what: str, paths: Iterable[str]) -> None:
    """Require that an object has attributes, given as dotted paths from it.

    Raises
    ------
    SeamMismatch
        One of them does not exist; `what` names the object in the message.
    """
    for path in paths:
        target = root
        for name in path.split("."):
            if not hasattr(target, name):
                raise SeamMismatch(f"{what}.{path} does not exist. {REMEDY}")
            target = getattr(target, name)


def require_call(callable_: Callable[..., object] | None, what: str, *args: object, **kwargs: object) -> None:
    """Require that something can be called with these arguments; it is not called. None: it does not exist.

    Raises
    ------
    SeamMismatch
        It cannot; `what` names it in the message.
    """
    try:
        if callable_ is None:
            raise TypeError("it does not exist")
        inspect.signature(callable_).bind(*args, **kwargs)
    except (TypeError, ValueError) as e:
        raise SeamMismatch(f"{what} cannot be called as this package relies on ({e}). {REMEDY}") from e
