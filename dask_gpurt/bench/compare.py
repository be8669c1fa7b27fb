"""``dask gpurt bench compare A.json B.json``: is B slower than A, beyond what both runs vary by themselves?

A query's figure is its time over the first engine's in the same round, where both files have the same first engine and
several engines: a machine that was slower at B's time then changes nothing. With one engine it is its seconds.

The noise of a file is the range of its figures (largest minus smallest) over their median. B is worse where its median
is above A's by more than both noises together and by more than `TOLERANCE`. One run has no range, so files of a single
run are refused: their difference says nothing.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from typing import Any

#: a smaller share is not worth a failure, however small the noise
TOLERANCE = 0.03
#: fewest runs of a query that tell its noise
FEWEST_RUNS = 3
#: what is known of one query on one engine
_CELL = {"seconds", "errors", "differences"}


@dataclasses.dataclass(frozen=True)
class Change:
    """One query on one engine in both files."""

    query: str
    engine: str
    #: "of stock" for ratios to it, "s" for seconds
    unit: str
    #: medians
    before: float
    after: float
    #: added over both files, as a share
    noise: float
    #: why B failed where A had an answer; empty if it did not
    failure: str = ""

    @property
    def worse(self) -> bool:
        return bool(self.failure) or self._relative > max(self.noise, TOLERANCE)

    @property
    def better(self) -> bool:
        return not self.failure and -self._relative > max(self.noise, TOLERANCE)

    @property
    def _relative(self) -> float:
        return self.after / self.before - 1

    def __str__(self) -> str:
        where = f"{self.query} {self.engine}"
        if self.failure:
            return f"{where}: WORSE, it failed: {self.failure}"
        verdict = "WORSE" if self.worse else "better" if self.better else "same"
        return (
            f"{where}: {self.before:.3f} -> {self.after:.3f} {self.unit} "
            f"({self._relative:+.1%}, noise {self.noise:.1%}): {verdict}"
        )


def load(path: str) -> dict[str, Any]:
    """A file that ``dask gpurt bench tpch --json`` wrote.

    Raises
    ------
    ValueError
        It is something else.
    """
    try:
        with open(path, encoding="utf-8") as f:
            found = json.load(f)
    except ValueError as e:
        raise ValueError(f"{path} is not JSON ({e}). Remedy: give what bench tpch --json wrote") from None
    if not isinstance(found, dict) or not isinstance(found.get("queries"), dict):
        raise ValueError(f"{path} has no queries. Remedy: give what bench tpch --json wrote")
    for query, engines in found["queries"].items():
        cells = engines.values() if isinstance(engines, dict) else [None]
        if not all(isinstance(cell, dict) and cell.keys() >= _CELL for cell in cells):
            raise ValueError(
                f"{path} has no {', '.join(sorted(_CELL))} of {query}. Remedy: give what bench tpch --json wrote"
            )
    return found


def changes(a: dict[str, Any], b: dict[str, Any]) -> list[Change]:
    """Every query and engine that both have, in A's order.

    Raises
    ------
    ValueError
        The two measured different things, have nothing in common, or too few runs.
    """
    for option in ("scale", "fused", "cold"):
        if a.get(option, False) != b.get(option, False):
            raise ValueError(
                f"{option} is {a.get(option)!r} in the first and {b.get(option)!r} in the second; they do not compare"
            )
    engines = [e for e in _engines(a) if all(e in cells for r in (a, b) for cells in r["queries"].values())]
    queries = [q for q in a["queries"] if q in b["queries"]]
    if not engines or not queries:
        raise ValueError(
            f"no query and engine are in both: {_list(a['queries'])} on {_list(_engines(a))}, and "
            f"{_list(b['queries'])} on {_list(_engines(b))}"
        )
    # The first of both files; it may be one that some query lacks.
    baseline = engines[0] if engines[0] == _engines(a)[0] == _engines(b)[0] and len(engines) > 1 else None
    out = []
    for query in queries:
        for engine in engines:
            if engine != baseline:
                change = _change(query, engine, baseline, a["queries"][query], b["queries"][query])
                out += [change] if change is not None else []
    if not out:
        raise ValueError("the first has no answer to any query that both have; there is nothing to compare with")
    return out


def _change(
    query: str, engine: str, baseline: str | None, before: dict[str, Any], after: dict[str, Any]
) -> Change | None:
    """None where A has no answer itself."""
    problem = _problem(after[engine])
    if _problem(before[engine]):
        return None
    if problem:
        return Change(query, engine, "", 0.0, 0.0, 0.0, failure=problem)
    ratios = baseline is not None and not _problem(before[baseline]) and not _problem(after[baseline])
    unit = f"of {baseline}" if ratios else "s"
    figures = [_figures(cells, engine, baseline if ratios else None) for cells in (before, after)]
    for runs in figures:
        if len(runs) < FEWEST_RUNS:
            raise ValueError(
                f"{query} on {engine} has {len(runs)} run(s) in a file, must be at least {FEWEST_RUNS}: fewer tell no "
                f"noise. Remedy: bench tpch --runs {FEWEST_RUNS} or more"
            )
    medians = [statistics.median(runs) for runs in figures]
    noise = sum((max(runs) - min(runs)) / middle for runs, middle in zip(figures, medians, strict=True))
    return Change(query, engine, unit, medians[0], medians[1], noise)


def _figures(cells: dict[str, Any], engine: str, baseline: str | None) -> list[float]:
    seconds = cells[engine]["seconds"]
    if baseline is None:
        return list(seconds)
    return [s / base for s, base in zip(seconds, cells[baseline]["seconds"], strict=True)]


def _problem(cell: dict[str, Any]) -> str:
    """Why a cell has no figure that counts; empty if it has."""
    found = [*cell["errors"], *cell["differences"]]
    return str(found[0]) if found else "" if cell["seconds"] else "it was not run"


def _engines(result: dict[str, Any]) -> list[str]:
    return list(next(iter(result["queries"].values()), {}))


def _list(names: Any) -> str:
    return ", ".join(names) or "nothing"
