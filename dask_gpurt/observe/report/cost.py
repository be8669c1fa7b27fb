"""What the hosts of a run cost an hour, by the prices that were given."""

from __future__ import annotations

import fnmatch
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def by_class(
    workers: Iterable[tuple[str, str, str]], prices: float | Mapping[str, float]
) -> list[tuple[str, float, int]]:
    """(class of node, $ per hour of one, hosts), of (host, class, name) of each worker.

    Of the workers of a host the dearest counts. A host that no pattern fits costs nothing.
    """
    hosts: dict[str, tuple[str, float]] = {}
    for host, kind, name in workers:
        price = prices if isinstance(prices, (int, float)) else _price(prices, host, kind, name)
        hosts[host] = max(hosts.get(host, ("", -1.0)), (kind, price), key=lambda item: item[1])
    return sorted((kind, price, count) for (kind, price), count in Counter(hosts.values()).items())


def _price(prices: Mapping[str, float], *names: str) -> float:
    for pattern, price in prices.items():
        # Dask's configuration writes "-" for "_" in keys.
        if any(fnmatch.fnmatchcase(name.replace("_", "-"), pattern.replace("_", "-")) for name in names):
            return price
    return 0.0
