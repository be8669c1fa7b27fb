"""Whether the empty frame of an expression that is held is still the one that was computed.

Dask gives out that frame itself as ``ddf._meta``, and users change it in place, to give it to `map_partitions`. In Dask
this lasts as long as they keep the collection. With an expression that lives on it would last, too, and the next query
would see a frame without a column that its files have.

`note` puts a dict of ours in an expression, which sees the frame when it is computed: no later time is sure to be
before the user's. `is_changed` looks.
"""

from __future__ import annotations

import sys
from typing import Any

import pandas as pd

from dask_gpurt.planning.named import pickled

#: `labels` of an ordinary frame
NO_LABELS = True, None


class _Attributes(dict[str, Any]):
    """The attributes of an expression, with what its empty frame was when it was computed."""

    def __init__(self, attributes: dict[str, Any]) -> None:
        super().__init__(attributes)
        self.parts: tuple[Any, ...] | None = None
        #: see `labels`
        self.labels: tuple[Any, ...] = ()
        #: of the columns; a shallow copy of the frame would say as much, at ten times the price
        self.dtypes: list[Any] = []

    def __setitem__(self, name: str, value: Any) -> None:
        if name == "_meta":
            # Unpickling brings one that may have been changed. An expression itself may set it in two steps.
            if name in self and sys._getframe(1).f_code.co_name == "_reconstruct":
                return
            if isinstance(value, pd.DataFrame | pd.Series | pd.Index):
                self.parts, self.labels, self.dtypes = _parts(value), labels(value), _dtypes(value)
        super().__setitem__(name, value)


def note(expression: Any) -> None:
    """See the empty frame of an expression when it is computed."""
    if type(vars(expression)) is _Attributes:
        return  # two threads have found it at once; a second dict would not know what the first has seen
    # Dask's own class takes attributes for operands.
    object.__setattr__(expression, "__dict__", _Attributes(vars(expression)))


def is_changed(expression: Any) -> bool:
    """Whether the empty frame is another one than was computed. Takes some us, as it is asked at each lookup."""
    attributes = vars(expression)
    if type(attributes) is not _Attributes or attributes.parts is None:
        return False
    now = attributes.get("_meta")
    if now is None:  # of an expression made before us: another thread is about to drop what it had computed
        return False
    if labels(now) != attributes.labels:
        return True
    parts = _parts(now)
    if len(parts) == len(attributes.parts) and all(a is b for a, b in zip(parts, attributes.parts, strict=True)):
        return False
    if not _same(parts, attributes.parts) or _dtypes(now) != attributes.dtypes:
        return True
    attributes.parts = parts  # pandas has only arranged it in another way
    return False


def _parts(frame: Any) -> tuple[Any, ...]:
    """Objects of which there are others once somebody has changed a frame."""
    if isinstance(frame, pd.Index):
        return (frame, *_names(frame))
    manager = frame._mgr
    axes = manager.axes
    mine = (manager, manager.blocks, *axes, *_names(axes[0]), *_names(axes[-1]))
    return mine if frame.ndim == 2 else (*mine, frame.name)


def labels(frame: Any) -> tuple[Any, ...]:
    """What a frame has beside its columns, by value: users change its dict of attributes in place."""
    if isinstance(frame, pd.Index):
        return ()
    return frame.flags.allows_duplicate_labels, pickled(frame.attrs) if frame.attrs else None


def _names(axis: pd.Index) -> tuple[Any, ...]:
    return tuple(axis.names) if isinstance(axis, pd.MultiIndex) else (axis.name,)  # `names` makes a list


def _dtypes(frame: Any) -> list[Any]:
    """Of its columns, or its own."""
    return list(frame._mgr.get_dtypes()) if isinstance(frame, pd.DataFrame) else [frame.dtype]


def _same(now: tuple[Any, ...], before: tuple[Any, ...]) -> bool:
    """Whether the indexes and names in two results of `_parts` are the same by value."""
    if len(now) != len(before):
        return False
    first = 0 if isinstance(now[0], pd.Index) else 2  # after how pandas has arranged the columns
    return all(
        a is b or (type(a) is type(b) and bool(a.identical(b) if isinstance(a, pd.Index) else a == b))
        for a, b in zip(now[first:], before[first:], strict=True)
    )
