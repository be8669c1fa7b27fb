"""`Status`: what `dask_gpurt.status` returns. Prints as text, shows as HTML in a notebook, gives plain JSON values."""

from __future__ import annotations

import dataclasses
import html
import re
from typing import TYPE_CHECKING, Any

from dask_gpurt.observe.figures.figure import LARGEST, RANGE, Total
from dask_gpurt.observe.figures.table import WORKER

if TYPE_CHECKING:
    from collections.abc import Iterator


def _of(total: Total) -> re.Pattern[str]:
    """The names of figures with that total. ``*`` stands for any text: addresses have dots in them."""
    paths = (figure.path for figure in WORKER if figure.total is total)
    return re.compile("|".join(re.escape(path).replace(r"\*", ".+") for path in paths))


_LARGEST, _RANGE = _of(LARGEST), _of(RANGE)

#: suffix of a figure's name -> how it is written
_UNITS = {"_bytes": "B", "_seconds": "s", "_us": "us"}


@dataclasses.dataclass(frozen=True)
class Status:
    """A snapshot; see `to_dict` for its layout."""

    #: the scheduler's part; empty when the extension is not installed
    scheduler: dict[str, Any]
    #: address -> the worker's part; empty for a worker without, ``{"error": text}`` for one that did not answer
    workers: dict[str, dict[str, Any]]

    @property
    def installed(self) -> bool:
        """Is the extension on the scheduler?"""
        return bool(self.scheduler)

    def to_dict(self) -> dict[str, Any]:
        """``{"installed", "scheduler": {...}, "workers": {address: {...}}, "totals": {...}, "ranges": {...}}``

        ``totals``: `totals`, such as ``{"tiers.written.bytes": n}``; ``ranges``: `ranges`, as lists.
        """
        return {
            "installed": self.installed,
            "scheduler": self.scheduler,
            "workers": self.workers,
            "totals": self.totals(),
            "ranges": {name: list(span) for name, span in self.ranges().items()},
        }

    def totals(self) -> dict[str, float]:
        """Sums over all workers of what they report, by dotted name; of maxima, the largest.

        Shares, rates and settings are in `ranges`: their sum would mean nothing.
        """
        return {
            name: max(values) if _LARGEST.fullmatch(name) else sum(values)
            for name, values in self._by_name().items()
            if not _RANGE.fullmatch(name)
        }

    def ranges(self) -> dict[str, tuple[float, float]]:
        """Smallest and largest over all workers of shares, rates and settings, by dotted name."""
        return {name: (min(values), max(values)) for name, values in self._by_name().items() if _RANGE.fullmatch(name)}

    def _by_name(self) -> dict[str, list[float]]:
        out: dict[str, list[float]] = {}
        for worker in self.workers.values():
            for name, value in _numbers(worker):
                if not name.startswith("events.last"):
                    out.setdefault(name, []).append(value)
        return out

    def __repr__(self) -> str:
        lines = [self._headline()]
        for title, rows in self._sections():
            lines.append(title)
            lines += [f"  {name:<44} {value}" for name, value in rows]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        parts = [f"<h4>{html.escape(self._headline())}</h4>"]
        for title, rows in self._sections():
            body = "".join(
                f"<tr><td style='text-align:left'>{html.escape(n)}</td><td>{html.escape(v)}</td></tr>" for n, v in rows
            )
            parts.append(f"<details open><summary>{html.escape(title)}</summary><table>{body}</table></details>")
        return "".join(parts)

    def _headline(self) -> str:
        if not self.installed:
            return "dask-gpurt is not installed on this scheduler (`dask_gpurt.attach(client)` does it)"
        s = self.scheduler
        parts = ", ".join(f"{name} {state}" for name, state in s.get("parts", {}).items())
        having = sum(1 for w in self.workers.values() if w and "error" not in w)
        return (
            f"dask-gpurt {s.get('version')}, policy {s.get('policy')}: {parts};"
            f" on {having} of {len(self.workers)} workers"
        )

    def _sections(self) -> Iterator[tuple[str, list[tuple[str, str]]]]:
        for part in ("placement", "next_use", "shuffle"):
            if part in self.scheduler:
                yield f"scheduler: {part}", _rows(self.scheduler[part])
        counts = self.scheduler.get("events", {}).get("counts")
        if counts:
            yield "scheduler: events", _rows(counts)
        rows = [(name, _said(name, value)) for name, value in self.totals().items()]
        for name, (low, high) in self.ranges().items():
            rows.append((name, _said(name, low) if low == high else f"{_said(name, low)} to {_said(name, high)}"))
        if rows:
            yield "all workers", sorted(rows)
        refused = self.scheduler.get("refused", {})
        for address, worker in self.workers.items():
            if address in refused:
                yield f"worker {address}", [("without dask-gpurt", refused[address])]
            elif "error" in worker:
                yield f"worker {address}", [("error", str(worker["error"]))]
            elif not worker:
                yield f"worker {address}", [("without dask-gpurt", "stock Dask")]


def _numbers(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{prefix}{key}.")
        elif key == "links" and isinstance(value, list):
            # One for each peer and transport: they add up to what a transport did.
            for link in value:
                yield from _numbers(link, f"{prefix}{key}.{link['transport']}.")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield prefix + key, value


def _rows(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    out: list[tuple[str, str]] = []
    for key, value in tree.items():
        if isinstance(value, dict):
            out += _rows(value, f"{prefix}{key}.")
        elif value is not None and value != []:
            out.append((prefix + str(key), _said(str(key), value)))
    return out


def _said(name: str, value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        text = str(value)
        return text if len(text) <= 200 else text[:200] + "..."
    unit = next((u for suffix, u in _UNITS.items() if name.endswith(suffix)), "")
    if unit == "B":
        for prefix in ("", "k", "M", "G", "T"):
            if abs(value) < 1000 or prefix == "T":
                return f"{value:.3g} {prefix}B" if prefix else f"{value:.0f} B"
            value /= 1000
    number = f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.4g}"
    return f"{number} {unit}".rstrip()
