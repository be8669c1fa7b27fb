"""What is told of a run: the table on the terminal, the JSON file, the HTML page. One set of figures behind all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dask_gpurt.bench.paired import geometric_mean
from dask_gpurt.bench.tpch import verdict
from dask_gpurt.observe.render.html import MAX_SERIES, Page, flatten

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dask_gpurt.bench.tpch.runner import Measured, Outcome

#: property of `Traffic` -> heading of its column
COUNTERS = {"network": "net MB", "spilled": "spill MB", "shuffled": "shuffle MB"}

#: what the three columns mean, once under every table
LEGEND = (
    "net: bytes received from other workers, peer-to-peer shuffles included. spill: bytes written to disk, by eviction "
    "of keys and by shuffles that keep shards in files. shuffle: bytes of shards produced by peer-to-peer shuffles, "
    "those that stay on their worker included. ratio: time over the first engine's, below 1 is faster."
)


def columns(engines: Sequence[str], *, joined: bool = False) -> list[str]:
    """Headings of the table. `joined`: the engines' figures of one counter share a column, for a terminal's width."""
    out = ["query", *(f"{e} s" for e in engines)]
    out += ["ratio"] if len(engines) == 2 else [f"ratio {e}" for e in engines[1:]]
    for heading in COUNTERS.values():
        out += [heading] if joined or len(engines) == 1 else [f"{heading} {e}" for e in engines]
    return [*out, "answer"]


def row(number: int, cells: Mapping[str, Measured], *, joined: bool = False) -> list[str]:
    """One line of the table: medians of the runs."""
    cases = {e: cell.case for e, cell in cells.items()}
    first = next(iter(cases.values()))
    out = [f"q{number:02d}"]
    out += ["failed" if case is None else f"{case.median:.2f}" for case in cases.values()]
    for case in list(cases.values())[1:]:
        out.append(_ratio(None if case is None or first is None else case.ratio(first)))
    for counter in COUNTERS:
        out += _joined([_megabytes(cell.bytes(counter)) for cell in cells.values()], joined)
    if all(cell.ok for cell in cells.values()):
        return [*out, "equal"]
    return [*out, "ERROR" if any(cell.errors for cell in cells.values()) else "DIFFERENT"]


def _joined(figures: list[str], joined: bool) -> list[str]:
    return [" / ".join(figures)] if joined else figures


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _megabytes(value: int | None) -> str:
    return "–" if value is None else f"{value / 1e6:.1f}"


def totals(outcome: Outcome) -> dict[str, dict[str, Any]]:
    """Per engine: sum of medians, mean of ratios, bytes, highest peak; of those that all engines answered rightly."""
    numbers = [q for q in outcome.numbers if all(outcome.cells[q, e].ok for e in outcome.engines)]
    baseline = outcome.engines[0]
    out = {}
    for engine in outcome.engines:
        cells = [outcome.cells[q, engine] for q in numbers]
        cases = [cell.case for cell in cells if cell.case is not None]
        bases = [c for c in (outcome.cells[q, baseline].case for q in numbers) if c is not None]
        out[engine] = {
            "queries": len(numbers),
            "sum_of_medians_s": sum(case.median for case in cases),
            # NaN is not JSON.
            "geometric_mean_ratio": geometric_mean(c.ratio(base) for c, base in zip(cases, bases, strict=True))
            if cases
            else None,
            **{f"{counter}_bytes": sum(cell.bytes(counter) or 0 for cell in cells) for counter in COUNTERS},
            "peak_bytes": max((t.peak for cell in cells for t in cell.traffic), default=0),
        }
    return out


def total_rows(outcome: Outcome, *, joined: bool = False) -> list[list[str]]:
    """The table's last line: sums, and the geometric mean of the ratios."""
    figures = totals(outcome)
    out = ["sum", *(f"{t['sum_of_medians_s']:.2f}" for t in figures.values())]
    out += [_ratio(t["geometric_mean_ratio"]) for t in list(figures.values())[1:]]
    for counter in COUNTERS:
        out += _joined([_megabytes(t[f"{counter}_bytes"]) for t in figures.values()], joined)
    good = sum(all(outcome.cells[q, e].ok for e in outcome.engines) for q in outcome.numbers)
    return [[*out, f"{good}/{len(outcome.numbers)} equal"]]


class TextTable:
    """Lines of fixed columns, each printed when it is known."""

    def __init__(self, headings: Sequence[str]) -> None:
        self._widths = [max(len(h), 15 if h in COUNTERS.values() else 6) for h in headings]
        self._headings = headings

    def line(self, cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if i in (0, len(cells) - 1) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, self._widths, strict=True))
        ]
        return "  ".join(padded).rstrip()

    def head(self) -> str:
        line = self.line(self._headings)
        return line + "\n" + "-" * len(line)


def result(outcome: Outcome, facts: Mapping[str, Any], clusters: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Everything, as plain JSON values."""
    cells = {}
    for number in outcome.numbers:
        cells[f"q{number:02d}"] = {
            e: {
                "seconds": outcome.cells[number, e].seconds,
                "median_s": case.median if (case := outcome.cells[number, e].case) else None,
                "first_s": outcome.cells[number, e].first,
                "later_p50_s": outcome.cells[number, e].warm(0.5),
                "later_p95_s": outcome.cells[number, e].warm(0.95),
                "price": price(outcome.cells[number, e], facts.get("price_per_hour")),
                "traffic_bytes": [t.to_dict() for t in outcome.cells[number, e].traffic],
                "differences": [str(d) for d in outcome.cells[number, e].differences],
                "errors": outcome.cells[number, e].errors,
            }
            for e in outcome.engines
        }
    return {
        **facts,
        "clusters": [dict(c) for c in clusters],
        "all_equal_to_duckdb": outcome.ok,
        "totals": totals(outcome),
        "verdict": verdict.words(outcome),
        "beside_s": outcome.beside,
        "queries": cells,
        "notes": outcome.notes,
    }


def page(
    outcome: Outcome,
    facts: Mapping[str, Any],
    clusters: Sequence[Mapping[str, Any]],
    status: Mapping[str, Mapping[str, Any]],
) -> Page:
    """The report. `status`: engine -> what ``dask_gpurt.status(client).to_dict()`` said at the end."""
    out = Page(f"TPC-H at scale {facts['scale']:g}: {' against '.join(outcome.engines)}")
    baseline, *others = outcome.engines
    figures = totals(outcome)
    if outcome.ok:
        out.text(f"All {len(outcome.numbers)} answers are equal to DuckDB's, on every engine.", kind="good")
    else:
        bad = [f"q{q:02d}" for q in outcome.numbers if not all(outcome.cells[q, e].ok for e in outcome.engines)]
        out.text(f"Not equal to DuckDB's answer, or failed: {', '.join(bad)}.", kind="bad")
    for line in verdict.words(outcome):
        out.text(line)
    for engine in others:
        mean = figures[engine]["geometric_mean_ratio"]
        if mean is not None:
            text = f"{engine}: geometric mean of the ratios to {baseline} {mean:.2f} (below 1 is faster)."
            out.text(text, kind="note")
    for note in outcome.notes:
        out.text(note, kind="note")
    out.text(f"Measured on: {facts['exercised_on']}. Commit {facts['commit']}, {facts['when']}.", kind="note")
    out.heading("Seconds per query")
    shown = outcome.engines[:MAX_SERIES]
    out.bars(
        shown,
        [
            (f"q{q:02d}", [c.median if (c := outcome.cells[q, e].case) else None for e in shown])
            for q in outcome.numbers
        ],
        unit="s",
        about="median seconds of each query on each engine",
    )
    out.heading("All figures")
    rows = [row(q, outcome.of(q)) for q in outcome.numbers]
    out.table(columns(outcome.engines), rows, footer=total_rows(outcome))
    out.text(LEGEND, kind="note")
    out.heading("First run, later runs, price")
    per_hour = facts.get("price_per_hour")
    out.table(_RUNS, [_of_runs(outcome, q, e, per_hour) for q in outcome.numbers for e in outcome.engines])
    _pictures(out, outcome)
    problems = [str(d) for d in outcome.differences]
    problems += [f"query {q} on {e}: {text}" for (q, e), cell in outcome.cells.items() for text in cell.errors]
    if problems:
        out.heading("What was wrong")
        out.table(["problem"], [[p] for p in problems])
    out.heading("Machine, versions, command")
    out.facts({k: v for k, v in facts.items() if k not in ("exercised_on", "when", "commit")})
    for cluster in clusters:
        out.heading(f"Cluster {cluster['engine']}")
        out.facts({k: v for k, v in cluster.items() if k != "engine"})
    for engine, state in status.items():
        out.heading(f"State of the extension on {engine}, at the end")
        _state(out, state)
    return out


_RUNS = ("query", "engine", "first s", "later p50 s", "later p95 s", "price")


def _of_runs(outcome: Outcome, number: int, engine: str, price_per_hour: float | None) -> list[Any]:
    cell = outcome.cells[number, engine]
    return [f"q{number:02d}", engine, cell.first, cell.warm(0.5), cell.warm(0.95), price(cell, price_per_hour)]


def price(cell: Measured, price_per_hour: float | None) -> float | None:
    """What the median run costs, in the currency of the price per hour; None without a price or an answer."""
    return None if price_per_hour is None or cell.case is None else cell.case.median * price_per_hour / 3600


def _pictures(out: Page, outcome: Outcome) -> None:
    """For each query its runs and its bytes."""
    shown = outcome.engines[:MAX_SERIES]
    for number in outcome.numbers:
        cells = [outcome.cells[number, e] for e in shown]
        out.heading(f"q{number:02d}")
        # With a run that failed it is not known which of the rounds the others are.
        seconds = [() if cell.case is None else cell.case.seconds for cell in cells]
        runs = max(map(len, seconds))
        rows = [(f"run {r + 1}", [s[r] if r < len(s) else None for s in seconds]) for r in range(runs)]
        out.bars(shown, rows, unit="s", about=f"seconds of each run of query {number}")
        moved = [(heading, [_mega(c.bytes(counter)) for c in cells]) for counter, heading in COUNTERS.items()]
        out.bars(shown, moved, unit="MB", about=f"megabytes that query {number} moved, by counter")


def _mega(value: int | None) -> float | None:
    return None if value is None else value / 1e6


def _state(out: Page, state: Mapping[str, Any]) -> None:
    """The scheduler's part as a list; the workers' counters as a table, without those that are zero everywhere."""
    workers = state.get("workers")
    if not isinstance(workers, dict) or not all(isinstance(w, dict) for w in workers.values()):
        out.facts(state)
        return
    out.facts({k: v for k, v in state.items() if k not in ("workers", "totals")})
    by_worker = [dict(flatten(worker)) for worker in workers.values()]
    names = list(dict.fromkeys(name for values in by_worker for name in values))
    rows = [[name, *(values.get(name) for values in by_worker)] for name in names]
    told = [r for r in rows if any(value not in (0, None, "", {}, []) for value in r[1:])]
    out.table(["per worker", *workers], told)
    out.text(f"Left out: {len(rows) - len(told)} counters that are zero or empty on every worker.", kind="note")
