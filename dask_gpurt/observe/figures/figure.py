"""`Figure`: one number that a cluster tells, in one row for all its readers.

The rows are in `table`. A row names

* the number in `dask_gpurt.status`, as a dotted path;
* its key in a worker's heartbeat, if it rides on it;
* its Prometheus family, kind and labels, if it is exported.

The Prometheus collectors (`prometheus`), docs/metrics.md (`dictionary`) and the sums in `dask_gpurt.status` are made
from these rows. A test holds them against a live cluster: it fails for a number that is in no row.

``*`` in a path or key stands for any one name, which then is the value of the next label that is ``*``. A path that is
not there, or has no number, gives no sample: a part that is not installed has no figures rather than zeros.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

#: after the namespace that Dask's configuration gives (``distributed.dashboard.prometheus.namespace``)
SUBSYSTEM = "gpurt"


class Total(enum.Enum):
    """What the values of all workers are together."""

    SUM = enum.auto()
    LARGEST = enum.auto()
    #: a share, rate or setting, of which a sum says nothing: the smallest and the largest
    RANGE = enum.auto()


LARGEST, RANGE = Total.LARGEST, Total.RANGE


@dataclasses.dataclass(frozen=True, slots=True)
class Figure:
    """One row of the table."""

    #: path in the statistics of its server; empty: not in `dask_gpurt.status`
    path: str
    #: bytes, seconds, a count, a ratio
    unit: str
    about: str
    #: key in the heartbeat of a worker; empty: not there
    heartbeat: str = ""
    #: counter: only grows while its server lives; gauge: as it is now; None: not exported
    kind: Literal["counter", "gauge"] | None = None
    #: Prometheus name after ``dask_gpurt_``; several figures may share it, with different labels
    family: str = ""
    #: (label, value); the value ``*``: the name that the next ``*`` of the key met
    labels: tuple[tuple[str, str], ...] = ()
    total: Total = Total.SUM

    @property
    def key(self) -> str:
        """Where an exporter finds the number: in a worker's heartbeat, else in the statistics."""
        return self.heartbeat or self.path

    def samples(self, tree: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], float]]:
        """(label values, number) in `tree`, without booleans and what is not finite."""
        for met, number in _walk(tree, self.key.split("."), ()):
            keys = iter(met)
            yield tuple(next(keys) if text == "*" else text for _, text in self.labels), number


def counter(path: str, family: str, unit: str, about: str, /, *, heartbeat: str = "", **labels: str) -> Figure:
    """A row that Prometheus sees, and that only grows."""
    return Figure(path, unit, about, heartbeat, "counter", family, tuple(labels.items()))


def gauge(path: str, family: str, unit: str, about: str, /, *, heartbeat: str = "", **labels: str) -> Figure:
    """A row that Prometheus sees, as it is now."""
    return Figure(path, unit, about, heartbeat, "gauge", family, tuple(labels.items()))


def status(path: str, unit: str, about: str, /, *, total: Total = Total.SUM) -> Figure:
    """A row of `dask_gpurt.status` alone."""
    return Figure(path, unit, about, total=RANGE if unit in ("ratio", "bytes/s") else total)


def full_name(figure: Figure, namespace: str = "dask") -> str:
    """The name as Prometheus shows it."""
    parts = [*([namespace] if namespace else []), SUBSYSTEM, figure.family]
    return "_".join(parts) + ("_total" if figure.kind == "counter" else "")


def exported(figures: Sequence[Figure]) -> tuple[Figure, ...]:
    """Those that Prometheus sees."""
    return tuple(figure for figure in figures if figure.kind is not None)


def _walk(node: object, path: list[str], met: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], float]]:
    if not path:
        if isinstance(node, (int, float)) and not isinstance(node, bool) and math.isfinite(node):
            yield met, node
        return
    if not isinstance(node, dict):
        return
    head, rest = path[0], path[1:]
    if head == "*":
        for key, child in node.items():
            yield from _walk(child, rest, (*met, str(key)))
    elif head in node:
        yield from _walk(node[head], rest, met)
