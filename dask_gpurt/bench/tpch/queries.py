"""The registry: query number -> function, and what a list of numbers on the command line means."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dask_gpurt.bench.tpch import queries_01_08, queries_09_15, queries_16_22

if TYPE_CHECKING:
    from collections.abc import Callable

    from dask_gpurt.bench.tpch.tables import Tables

_MODULES = (queries_01_08, queries_09_15, queries_16_22)

#: query number -> function of the tables that returns a lazy dask DataFrame or scalar
QUERIES: dict[int, Callable[[Tables], Any]] = {
    number: getattr(module, f"q{number:02d}")
    for number in range(1, 23)
    for module in _MODULES
    if hasattr(module, f"q{number:02d}")
}


def parse(text: str) -> list[int]:
    """``"1,3,5-7"`` -> [1, 3, 5, 6, 7]; ``"all"`` -> all 22. The order given is kept, repeats are dropped.

    Raises
    ------
    ValueError
        Not numbers, or no such query.
    """
    if text.strip() == "all":
        return list(QUERIES)
    out: dict[int, None] = {}
    for item in text.split(","):
        first, dash, last = item.strip().partition("-")
        try:
            numbers = range(int(first), int(last if dash else first) + 1)
        except ValueError:
            raise ValueError(f"queries: {item!r} is not a number or a range, such as 1,3,5-7 or all") from None
        if not numbers:
            raise ValueError(f"queries: {item!r} is an empty range; write the smaller number first")
        for number in numbers:
            if number not in QUERIES:
                raise ValueError(f"queries: there is no query {number}; TPC-H has 1 to 22")
            out[number] = None
    return list(out)
