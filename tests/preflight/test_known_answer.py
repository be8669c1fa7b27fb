"""The known answer, computed a second time without numpy."""

from __future__ import annotations

import itertools
import struct
from typing import TYPE_CHECKING

import xxhash

from dask_gpurt.backends.system import System
from dask_gpurt.preflight import known_answer

if TYPE_CHECKING:
    import pytest


def test_the_answer_by_another_way() -> None:
    """Plain integers of Python and `sorted`, which is stable."""
    hashed = xxhash.xxh3_128()

    def add(values: list[int]) -> None:
        hashed.update(struct.pack(f"<{len(values)}Q", *values))

    def key(row: int) -> int:
        product = row * 0x9E3779B97F4A7C15 % 2**64
        return product ^ product >> 29

    pairs = sorted(((key(row), row) for row in range(known_answer.ROWS)), key=lambda pair: pair[0] % 16)
    add([k for k, _ in pairs])
    add([row for _, row in pairs])
    by_key = sorted(k for k, _ in pairs)
    assert len(set(by_key)) == known_answer.ROWS
    add(by_key)
    place = {k: i for i, k in enumerate(by_key)}
    add([place[k] for k, _ in pairs[::4]])
    pairs.sort(key=lambda pair: pair[0] >> 52)
    groups = itertools.groupby(pairs, key=lambda pair: pair[0] >> 52)
    add([sum(row for _, row in group) % 2**64 for _, group in groups])
    add([row for _, row in pairs])
    assert hashed.hexdigest() == known_answer.ANSWER


def test_measured() -> None:
    found = known_answer.measure(System())
    assert found.digest == known_answer.ANSWER
    assert 0 <= found.own_seconds <= found.seconds


class Slept(System):
    """A machine on which the run waited for a CPU for the whole time, of which a share by its own limit."""

    def __init__(self, throttled: float) -> None:
        super().__init__("/nowhere")
        self.looks = itertools.count()
        self.throttled = throttled

    def waited_seconds(self) -> float:
        return 1000.0 * next(self.looks)

    def throttled_seconds(self) -> float:
        return self.throttled * next(self.looks)


def test_waits_for_neighbours_are_no_slowness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_answer, "compute", lambda: "x")
    assert known_answer.measure(Slept(0.0)).own_seconds == 0


def test_waits_for_the_own_limit_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_answer, "compute", lambda: "x")
    found = known_answer.measure(Slept(1000.0))
    assert found.own_seconds == found.seconds > 0
