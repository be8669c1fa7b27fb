"""`Snapshot`: what a cluster answered when it was asked for its status, as plain values, and sums of what adds up."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

from dask_gpurt.observe.figures.figure import LARGEST, RANGE, Total
from dask_gpurt.observe.figures.table import WORKER


def _of(total: Total) -> re.Pattern[str]:
    """The names of figures with that total. ``*`` stands for any text: addresses have dots in them."""
    paths = (figure.path for figure in WORKER if figure.total is total)
    return re.compile("|".join(re.escape(path).replace(r"\*", ".+") for path in paths))


_LARGEST, _RANGE = _of(LARGEST), _of(RANGE)

#: errors of a worker that answers, and cannot import what it is asked to run
LACKING = ("ModuleNotFoundError", "ImportError", "AttributeError")


@dataclasses.dataclass(frozen=True)
class Member:
    """A worker, as the scheduler knows it without asking."""

    name: str
    threads: int
    #: of its process
    memory_bytes: int
    #: 0: none
    memory_limit_bytes: int
    #: since its last heartbeat, when that of another worker came
    quiet_seconds: float = 0.0
    #: why it runs stock although it was sent its part; "" if it does not
    refused: str = ""


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """See `to_dict` for the layout."""

    #: the scheduler's part; empty when the extension is not installed
    scheduler: dict[str, Any]
    #: address -> the worker's part; empty for a worker without, ``{"error": text}`` for one that did not answer
    workers: dict[str, dict[str, Any]]
    #: of the scheduler
    address: str = ""
    #: why the scheduler could not say what is installed: the package is not there; "" if it could
    missing: str = ""
    #: address -> what the scheduler knows of that worker
    members: dict[str, Member] = dataclasses.field(default_factory=dict)

    @property
    def installed(self) -> bool:
        """Is the extension on the scheduler?"""
        return bool(self.scheduler)

    @property
    def having(self) -> dict[str, dict[str, Any]]:
        """The workers that answered and have the extension."""
        return {address: worker for address, worker in self.workers.items() if worker and "error" not in worker}

    @property
    def silent(self) -> dict[str, str]:
        """Address -> why there is no answer."""
        return {
            address: _plain(worker["error"])
            for address, worker in self.workers.items()
            if "error" in worker and not self._lacks(address)
        }

    @property
    def without(self) -> dict[str, str]:
        """Address of a worker that runs stock Dask -> why."""
        return {
            address: self._refused(address) or _plain(worker.get("error", "it was not sent its part"))
            for address, worker in self.workers.items()
            if not worker or self._lacks(address)
        }

    def _refused(self, address: str) -> str:
        member = self.members.get(address)
        return str(self.scheduler.get("refused", {}).get(address) or (member.refused if member else ""))

    def _lacks(self, address: str) -> bool:
        """Whether it answers, and the package is missing there, or is another version."""
        error = self.workers[address].get("error", "")
        return bool(error) and (bool(self._refused(address)) or any(name in error for name in LACKING))

    def title(self, address: str) -> str:
        """How a worker is called; a number alone would not say that it is one."""
        member = self.members.get(address)
        if member is None or member.name == address:
            return address
        return f"worker {member.name}" if member.name.isdigit() else member.name

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
            for name, values in self._by_name.items()
            if not _RANGE.fullmatch(name)
        }

    def ranges(self) -> dict[str, tuple[float, float]]:
        """Smallest and largest over all workers of shares, rates and settings, by dotted name."""
        return {name: (min(values), max(values)) for name, values in self._by_name.items() if _RANGE.fullmatch(name)}

    @functools.cached_property
    def _by_name(self) -> dict[str, list[float]]:
        """Made once, as several parts of a text ask for it: 500 workers that shuffled report millions of numbers."""
        out: dict[str, list[float]] = {}
        for worker in self.workers.values():
            _collect(worker, "", out)
        return {name: values for name, values in out.items() if not name.startswith("events.last")}


def _collect(tree: dict[str, Any], prefix: str, out: dict[str, list[float]]) -> None:
    """Add the numbers of a worker to those of the others."""
    for key, value in tree.items():
        if isinstance(value, dict):
            _collect(value, f"{prefix}{key}.", out)
        elif key == "links" and isinstance(value, list):
            # One for each peer and transport: they add up to what a transport did.
            for link in value:
                _collect(link, f"{prefix}{key}.{link['transport']}.", out)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            out.setdefault(prefix + key, []).append(value)


def _plain(error: str) -> str:
    """The text of an exception, of its ``repr``; a kind that says something stays before it."""
    found = re.fullmatch(r"""(?:TimeoutError|Exception)\((['"])(.*)\1\)""", error)
    return (found.group(2) if found else error).replace("\\'", "'")
