"""What workers fetched from each other: a part of each heartbeat, put together for the dashboard.

`reported` is the worker's side. A heartbeat names the `MOST_SOURCES` sources with most bytes. With more sources than
that it names hosts instead of workers, and sums up the rest as `OTHERS`. So a heartbeat has a bounded number of rows in
a cluster of any size. Which rows these are changes with their order: they are gauges, not counters.

`matrix` is the scheduler's side: source x destination, by worker in small clusters and by host in others. Workers
that have left are in `OTHERS` as well. Bytes of shuffles are not in it: Dask's transfer log does not see them.

The nominal speed of a link is that of the slower network card of its two ends, as the operating system has it. A
virtual card has none, nor has a link within a host: it is unknown then, never guessed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import heapq
import socket
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import psutil
from distributed.comm import get_address_host

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

#: sources that a heartbeat names, at most, besides `OTHERS`
MOST_SOURCES = 32
OTHERS = "others"
#: begins a source that stands for all workers of a host
HOST = "host "
#: workers up to which the matrix has a row for each, and hosts that have one with more workers than that
WORKERS, HOSTS = 16, 32


@functools.lru_cache(maxsize=4096)
def host_of(address: str) -> str:
    """The host of a worker's address; what cannot be read is taken as it is."""
    try:
        return str(get_address_host(address))
    except (ValueError, NotImplementedError, IndexError):
        return address


def reported(sources: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """What a heartbeat has of address -> (bytes, seconds, requests)."""
    sums: Mapping[str, Sequence[float]] = sources
    if len(sources) > MOST_SOURCES:
        hosts: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        for address, values in sources.items():
            _add(hosts[OTHERS if address == OTHERS else HOST + host_of(address)], values)
        sums = hosts
    best = heapq.nlargest(MOST_SOURCES, (name for name in sums if name != OTHERS), key=lambda name: sums[name][0])
    rest = [0.0, 0.0, 0.0]
    for name in sums.keys() - set(best):
        _add(rest, sums[name])
    out = {name: _row(sums[name]) for name in best}
    if rest[2]:
        out[OTHERS] = _row(rest)
    return out


def _add(sums: list[float], values: Sequence[float]) -> None:
    for i, value in enumerate(values):
        sums[i] += value


def _row(values: Sequence[float]) -> dict[str, float]:
    n, seconds, requests = values
    return {"bytes": int(n), "seconds": round(seconds, 6), "requests": int(requests)}


def nominal_bytes_per_second(ip: str | None) -> float | None:
    """Speed of the network card that has an address; None when there is none, or the system does not know."""
    if ip is None:
        return None
    wanted = {ip}
    if ":" not in ip:  # no IPv6, which that call does not know
        with contextlib.suppress(OSError):
            wanted.add(socket.gethostbyname(ip))
    try:
        cards = psutil.net_if_stats()
        for name, addresses in psutil.net_if_addrs().items():
            if any(a.address.split("%")[0] in wanted for a in addresses):
                megabits = cards[name].speed if name in cards else 0
                return megabits * 1e6 / 8 if megabits > 0 else None
    except OSError:
        return None
    return None


@dataclasses.dataclass(slots=True)
class Cell:
    """What one destination fetched from one source, since its workers started."""

    #: positions in `Matrix.names`
    source: int
    target: int
    bytes: float = 0.0
    seconds: float = 0.0
    requests: int = 0
    #: of the slower card; None: unknown
    nominal: float | None = None
    within_host: bool = False

    @property
    def bytes_per_second(self) -> float | None:
        """None where nothing was measured."""
        return self.bytes / self.seconds if self.seconds > 0 and self.bytes > 0 else None


@dataclasses.dataclass(frozen=True, slots=True)
class Matrix:
    """Source x destination."""

    names: list[str]
    #: only those with a request
    cells: list[Cell]
    #: a row is a host
    by_host: bool


def matrix(workers: Iterable[tuple[str, str, Mapping[str, Any]]]) -> Matrix:
    """(name, address, heartbeat) of all workers, put together."""
    rows = list(workers)
    by_host = len(rows) > WORKERS
    # place: where a row of the matrix is, by the address or the host that stands for a source
    pairs: defaultdict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    names: dict[str, str] = {}
    nominal: dict[str, float] = {}
    hosts: dict[str, str] = {}
    for name, address, figures in rows:
        host = host_of(address)
        place = host if by_host else address
        names[place], hosts[place] = (host if by_host else name), host
        speed = figures.get("nic_bytes_per_second")
        if speed:
            nominal[place] = min(speed, nominal.get(place, speed))
    # 17,000 rows for 500 workers, each second and for each open page: each name is looked into once, and adding is no
    # call.
    sources: dict[str, str] = {}
    for _, address, figures in rows:
        target = host_of(address) if by_host else address
        for told_as, sums in (figures.get("fetched") or {}).items():
            source = sources.get(told_as)
            if source is None:
                source = told_as
                if by_host and told_as != OTHERS:
                    source = told_as.removeprefix(HOST) if told_as.startswith(HOST) else host_of(told_as)
                source = sources[told_as] = source if source in names else OTHERS
            pair = pairs[source, target]
            pair[0] += sums["bytes"]
            pair[1] += sums["seconds"]
            pair[2] += sums["requests"]
    if by_host and len(names) > HOSTS:
        _fold(pairs, names)
    if any(OTHERS in pair for pair in pairs):
        names[OTHERS] = OTHERS
    at = {place: i for i, place in enumerate(names)}
    cells = []
    for (source, target), (n, seconds, requests) in pairs.items():
        within = source in hosts and target in hosts and hosts[source] == hosts[target]
        ends = (nominal.get(source), nominal.get(target))
        slower = None if within or None in ends else min(e for e in ends if e is not None)
        cells.append(Cell(at[source], at[target], n, seconds, int(requests), slower, within))
    return Matrix(list(names.values()), cells, by_host)


def _fold(pairs: defaultdict[tuple[str, str], list[float]], names: dict[str, str]) -> None:
    """Leave the hosts with the most bytes; the others become one."""
    traffic: defaultdict[str, float] = defaultdict(float)
    for (source, target), sums in pairs.items():
        traffic[source] += sums[0]
        traffic[target] += sums[0]
    keep = set(heapq.nlargest(HOSTS, names, key=lambda place: traffic[place]))
    for place in [p for p in names if p not in keep]:
        del names[place]
    for pair in [p for p in pairs if not (p[0] in keep and p[1] in keep)]:
        source, target = (place if place in keep else OTHERS for place in pair)
        if (source, target) != pair:
            _add(pairs[source, target], pairs.pop(pair))
