"""Traces and their replay, on traces short enough to be followed by hand."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.eviction_record import Trace
from benchmarks.eviction_replay import Belady, Lru, Moved, Ours, replay


def trace(text: str) -> list[tuple[float, str, int, Any]]:
    """``+0 +1 p0 u0 -0``: add, pin, unpin, remove; each value has 5,000 bytes; ``h0=3`` is a hint, ``d0=3`` a due."""
    out: list[tuple[float, str, int, Any]] = [(0.0, "budget", -1, 10_000)]
    kinds = {"+": "add", "p": "pin", "u": "unpin", "-": "remove", "h": "hint", "d": "due", "a": "adopt"}
    for word in text.split():
        number, _, argument = word[1:].partition("=")
        value: Any = (float(argument),) if argument else 5000 if word[0] in "+a" else None
        out.append((0.0, kinds[word[0]], int(number), value))
    return out


def test_a_scan_is_the_worst_case_of_lru() -> None:
    scan = trace("+0 +1 +2 p0 u0 p1 u1 p2 u2 p0 u0 p1 u1 p2 u2")
    assert replay(scan, Lru()) == Moved(15_000, 30_000)
    # 2 leaves (the farthest), 1 when 2 is needed (0 comes sooner), and 0, which nobody needs again, for 1.
    assert replay(scan, Belady(scan)) == Moved(15_000, 10_000)
    assert replay(scan, Lru(), budget_bytes=15_000) == Moved()


def test_ours_follows_what_was_said() -> None:
    said = trace("+0 h0=1 +1 h1=9 +2 h2=5 p0 u0")
    assert replay(said, Ours()) == Moved(5000, 0)  # 1 left
    due = trace("+0 h0=1 +1 h1=9 d1=9 +2 h2=5 p0 u0")
    assert replay(due, Ours()) == Moved(5000, 0)  # 2 left: of 1 the task is here
    assert replay(trace("+0 h0=1 +1 h1=9 d1=9 +2 h2=5 p1 u1"), Ours()).read_bytes == 0


def test_pinned_values_stay_and_are_told() -> None:
    # 2 leaves at once, as the others are in use, is read again beside them, and 0 leaves when its user is done.
    assert replay(trace("+0 p0 +1 p1 +2 p2 u0 u1 u2"), Lru()) == Moved(10_000, 5000, overflow_bytes=5000)
    assert replay(trace("a0 a1 p0 p1 u0 u1 -0 -1"), Lru()) == Moved(0, 10_000)


def test_a_clean_copy_is_not_written_again() -> None:
    again = trace("+0 +1 +2 p0 u0 +3 p1 u1 p0 u0")
    result = replay(again, Lru())
    assert result.written_bytes == 4 * 5000
    assert result.read_bytes == 3 * 5000


def test_a_full_record_ends() -> None:
    record = Trace(2, lambda: 0.0)
    for _ in range(5):
        record.note("budget", None, 1)
    assert len(record.events) == 2
    assert record.dropped == 3
    with pytest.raises(ValueError, match="limit is 0"):
        Trace(0, lambda: 0.0)
