"""`groups`: all figures of a status, grouped, with units. What `dask gpurt status -v` prints after the summary."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

from dask_gpurt.observe.figures.table import SCHEDULER, WORKER
from dask_gpurt.observe.render.text import bytes_said, seconds_said

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dask_gpurt.observe.answers.snapshot import Snapshot
    from dask_gpurt.observe.figures.figure import Figure

#: suffix of the name of a figure that is in no table -> its unit
_SUFFIXES = {"_bytes": "bytes", "_seconds": "seconds", "_us": "microseconds"}
#: characters of a text, such as a traceback, that are shown
_SHOWN = 200
#: values of a list that are shown one by one
_LISTED = 5
#: widest name that the values stand beside
_NAME = 60


def groups(snapshot: Snapshot) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """(title, rows of name and value). Of workers what adds up is added; of the rest there is the range."""
    s = snapshot.scheduler
    loose = {key: value for key, value in s.items() if not isinstance(value, dict)}
    if loose:
        yield "scheduler", list(_rows(loose, "", SCHEDULER))
    for part, tree in s.items():
        if isinstance(tree, dict) and tree:
            shown = tree.get("counts", {}) if part == "events" else tree
            rows = list(_rows(shown, "" if part == "events" else f"{part}.", SCHEDULER))
            if rows:
                yield f"scheduler: {part}", rows
    by_part: dict[str, list[tuple[str, str]]] = {}
    sums, ranges = snapshot.totals(), snapshot.ranges()
    for name in sorted({*sums, *ranges}):
        low, high = ranges.get(name, (sums.get(name, 0), sums.get(name, 0)))
        text = _said(name, low, WORKER) if low == high else f"{_said(name, low, WORKER)} to {_said(name, high, WORKER)}"
        part, _, rest = name.partition(".")
        by_part.setdefault(part, []).append((rest or part, text))
    for part, rows in by_part.items():
        yield f"all workers: {part}", rows


def lines(snapshot: Snapshot) -> list[str]:
    """As text."""
    out = []
    for title, rows in groups(snapshot):
        width = min(_NAME, max(len(name) for name, _ in rows))
        out += ["", title, *(f"  {name:<{width}}  {value}" for name, value in rows)]
    return out


def _rows(tree: dict[str, Any], prefix: str, table: Sequence[Figure]) -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _rows(value, f"{name}.", table)
        elif value is not None and value not in ("", []):
            yield name, _said(name, value, table)


@functools.cache
def _patterns(table: tuple[Figure, ...]) -> list[tuple[re.Pattern[str], str]]:
    # Addresses have dots in them.
    return [(re.compile(re.escape(f.path).replace(r"\*", ".+")), f.unit) for f in table if f.path]


def _unit(name: str, table: Sequence[Figure]) -> str:
    found = next((unit for pattern, unit in _patterns(tuple(table)) if pattern.fullmatch(name)), "")
    # A row for all figures of a dictionary has counts; which of them are bytes, their names say.
    named = next((unit for suffix, unit in _SUFFIXES.items() if name.endswith(suffix)), "")
    return named if found in ("", "count") and named else found


def _said(name: str, value: object, table: Sequence[Figure]) -> str:
    if isinstance(value, (list, tuple)) and len(value) > _LISTED:
        return f"{len(value):,} values"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        text = " ".join(str(value).split())
        return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    unit = _unit(name, table)
    if unit == "bytes":
        return bytes_said(value)
    if unit.replace("/s", " per second") == "bytes per second":
        return f"{bytes_said(value)}/s"
    if unit == "seconds":
        return seconds_said(value)
    if unit == "ratio":
        return f"{value:.3g}"
    number = f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.4g}"
    return f"{number} us" if unit == "microseconds" else number
