"""What a run comes to, in words: the gain, where it came from, which queries lost and why as far as it was counted."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dask_gpurt.bench.tpch.runner import Measured, Outcome

#: a ratio above this is a loss
LOSS = 1.03
#: queries named as where most of the gain came from
MOST = 3
#: counter of `Traffic` -> what more and less of it is called
_MOVED = {
    "network": "received from other workers",
    "spilled": "written to disk",
    "shuffled": "shuffled",
}
#: a difference of bytes below both is not named: megabytes, and share of the larger side
_FEWEST_MB, _SMALLEST_SHARE = 5.0, 0.1


def words(outcome: Outcome) -> list[str]:
    """One sentence a line, for each engine after the first against the first."""
    baseline, *others = outcome.engines
    out: list[str] = []
    for engine in others:
        out += _against(outcome, baseline, engine)
    for program, seconds in outcome.beside.items():
        middles = [statistics.median(s) for s in seconds.values()]
        out.append(f"{program}, beside it: {sum(middles):.2f} s for {len(middles)} queries (one process, no cluster).")
    return out


def _against(outcome: Outcome, baseline: str, engine: str) -> list[str]:
    pairs = {q: (outcome.cells[q, baseline], outcome.cells[q, engine]) for q in outcome.numbers}
    # The seconds of a wrong answer are no gain.
    both = {q: pair for q, pair in pairs.items() if pair[0].ok and pair[1].ok}
    out = []
    for name, other, i in ((engine, baseline, 1), (baseline, engine, 0)):
        failed = [q for q, pair in pairs.items() if pair[1 - i].ok and not pair[i].ok]
        if failed:
            out.append(f"{_names(failed)}: a right answer from {other} only, not from {name}; not in the sums.")
    if not both:
        return [*out, f"No query was answered rightly by both {engine} and {baseline}: there is nothing to compare."]
    saved = {q: _median(a) - _median(b) for q, (a, b) in both.items()}
    before, after = (sum(_median(pair[i]) for pair in both.values()) for i in (0, 1))
    factor = before / after
    how = f"{factor:.2f} times as fast" if factor >= 1 else f"{1 / factor:.2f} times as slow"
    out.append(f"{engine}: {len(both)} queries in {after:.2f} s, {baseline} in {before:.2f} s: {how}.")
    out += _first_and_later(both)
    out += _gains(saved, both)
    lost = [q for q, (a, b) in both.items() if _ratio(a, b) > LOSS]
    if not lost:
        out.append(f"No query is slower than {baseline} by more than {LOSS - 1:.0%}.")
    for q in lost:
        a, b = both[q]
        # Of medians that are nearly equal either may be the larger one.
        by = f"{_ratio(a, b):.2f} times, the median of the rounds"
        out.append(f"q{q:02d} is slower ({by}): {_median(b):.2f} s against {_median(a):.2f} s, {_why(a, b)}.")
    return out


def _first_and_later(both: dict[int, tuple[Measured, Measured]]) -> list[str]:
    """What is kept between runs helps later ones only: plans in the client, columns of files in the workers."""
    runs = {len(cell.seconds) for pair in both.values() for cell in pair}
    if len(runs) > 1 or runs == {1}:
        return []
    first = [sum(pair[i].seconds[0] for pair in both.values()) for i in (0, 1)]
    later = [sum(statistics.median(pair[i].seconds[1:]) for pair in both.values()) for i in (0, 1)]
    said = [f"{b:.2f} s against {a:.2f} s ({a / b:.2f} times)" for a, b in (first, later)]
    return [f"First runs of each: {said[0]}; later ones: {said[1]}."]


def _gains(saved: dict[int, float], both: dict[int, tuple[Measured, Measured]]) -> list[str]:
    gained = sorted((q for q, s in saved.items() if s > 0), key=lambda q: -saved[q])
    if not gained:
        return []
    told = []
    for q in gained[:MOST]:
        moved = _difference(*both[q], more=False)
        told.append(f"q{q:02d} {saved[q]:.2f} s" + (f" ({moved})" if moved else ""))
    share = sum(saved[q] for q in gained[:MOST]) / sum(saved[q] for q in gained)
    return [f"Most of it came from {', '.join(told)}: {share:.0%} of all seconds saved."]


def _why(baseline: Measured, case: Measured) -> str:
    if len(case.seconds) < 2:
        return (_difference(baseline, case, more=True) or "no count of bytes explains it") + (
            "; of one run, which may be noise (--runs 5 tells)"
        )
    a, b = baseline.case, case.case
    if a is not None and b is not None and b.ratio(a) - 1 <= a.spread + b.spread:
        return "within the noise of the runs"
    return _difference(baseline, case, more=True) or "no count of bytes explains it; the report has the state"


def _difference(baseline: Measured, case: Measured, *, more: bool) -> str:
    """The counters that went up (or down) from `baseline` to `case`, in words; empty if none did by much."""
    out = []
    for counter, verb in _MOVED.items():
        a, b = (m.bytes(counter) for m in (baseline, case))
        if a is None or b is None:
            continue
        change = (b - a if more else a - b) / 1e6
        if change > max(_FEWEST_MB, _SMALLEST_SHARE * max(a, b) / 1e6):
            out.append(f"{change:.0f} MB {'more' if more else 'less'} {verb}")
    kept = 0 if more else (case.bytes("kept") or 0) / 1e6
    if kept > _FEWEST_MB:
        out.append(f"{kept:.0f} MB of files' columns found decoded")
    return ", ".join(out)


def _median(cell: Measured) -> float:
    assert cell.case is not None  # only cells with a case come here
    return cell.case.median


def _ratio(baseline: Measured, case: Measured) -> float:
    assert baseline.case is not None
    assert case.case is not None
    return case.case.ratio(baseline.case)


def _names(numbers: list[int]) -> str:
    return ", ".join(f"q{q:02d}" for q in numbers)
