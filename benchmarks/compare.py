"""Paired measurement for the benchmarks of the checkout: `dask_gpurt.bench.paired`, and what times whole functions."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from dask_gpurt.bench.paired import Case, geometric_mean, turns

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["Case", "geometric_mean", "paired", "table", "turns"]


def paired(cases: Mapping[str, Callable[[], object]], runs: int) -> dict[str, Case]:
    """Run every case `runs` times, taking turns, and time it.

    Parameters
    ----------
    cases
        Name -> what to time. The first is the baseline in `table`.
    runs
        Rounds; each case once in each.
    """
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _, name in turns(list(cases), runs):
        start = time.perf_counter()
        cases[name]()
        seconds[name].append(time.perf_counter() - start)
    return {name: Case(name, tuple(s)) for name, s in seconds.items()}


def table(results: Mapping[str, Case]) -> dict[str, dict[str, Any]]:
    """Per case its figures and its ratio to the first case, ready for a result file."""
    baseline = next(iter(results.values()))
    return {name: {**case.to_dict(), "ratio": case.ratio(baseline)} for name, case in results.items()}
