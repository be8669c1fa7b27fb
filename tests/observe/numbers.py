"""Every number in what a server tells, and whether the table of figures has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dask_gpurt.observe.figures.table import WORKER

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

#: keys of a worker's heartbeat, with ``*`` for any name
HEARTBEAT = tuple(figure.heartbeat for figure in WORKER if figure.heartbeat)


def numbers(tree: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    """(path, number) for every number in nested mappings, and lists of mappings, without booleans."""
    for key, value in tree.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            yield from numbers({str(i): item for i, item in enumerate(value)}, (*path, str(key)))
        elif isinstance(value, dict):
            yield from numbers(value, (*path, str(key)))
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield (*path, str(key)), value


def known(path: Sequence[str], patterns: Sequence[str]) -> bool:
    """Does one of the patterns stand for this path?"""
    for pattern in patterns:
        parts = pattern.split(".")
        if len(parts) == len(path) and all(p in ("*", name) for p, name in zip(parts, path, strict=True)):
            return True
    return False


def unknown(tree: Mapping[str, Any], patterns: Sequence[str]) -> list[tuple[str, ...]]:
    """The numbers that no pattern stands for."""
    return [path for path, _ in numbers(tree) if not known(path, patterns)]
