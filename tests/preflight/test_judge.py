"""Verdicts: weak evidence is a warning."""

from __future__ import annotations

import random
from typing import Any

import pytest

from dask_gpurt.preflight import judge
from dask_gpurt.preflight.checks import State


@pytest.mark.parametrize(
    ("own", "others", "state"),
    [
        (1.0, [], State.NONE),
        (0.2, [0.1, 0.1, 0.1], State.OK),
        (0.21, [0.1], State.WARN),
        (0.21, [0.1, 0.1], State.WARN),
        (0.21, [0.1, 0.1, 0.1], State.FAIL),
        (0.21, [0.1, 0.2, 0.3], State.OK),
        (0.05, [1.0, 1.0, 1.0], State.OK),
    ],
)
def test_speed(own: float, others: list[float], state: State) -> None:
    finding = judge.speed(own, others)
    assert finding.state is state
    if state in (State.WARN, State.FAIL):
        assert "0.21 s" in finding.found
        assert "0.2 s" in finding.expected


OK: dict[str, Any] = {"seconds": 0.001, "bytes_per_second": 1e9}
BAD = {"error": "OSError: refused"}


@pytest.mark.parametrize(
    ("probes", "state"),
    [
        ({}, State.NONE),
        ({"a": OK, "b": OK}, State.OK),
        ({"a": OK, "b": BAD}, State.WARN),
        ({"a": BAD}, State.WARN),
        ({"a": BAD, "b": BAD}, State.FAIL),
        ({"a": OK, "gone": BAD}, State.OK),
        ({"a": BAD, "gone": BAD}, State.WARN),
        ({"gone": BAD}, State.NONE),
    ],
)
def test_peers(probes: dict[str, Any], state: State) -> None:
    finding = judge.peers(probes, {"a", "b"})
    assert finding.state is state
    assert ("refused" in finding.found) is (state in (State.WARN, State.FAIL))


def test_stack() -> None:
    same = {"dask": "1", "pandas": "2"}
    assert judge.stack(same, same).state is State.OK
    assert judge.stack({"dask": "1", "driver": "5"}, same).state is State.OK, "what one of them lacks is no difference"
    finding = judge.stack({"dask": "1", "pandas": "3"}, same)
    assert (finding.state, finding.found, finding.expected) == (State.WARN, "pandas 3", "pandas 2 as on the scheduler")


def test_four_peers_are_chosen_one_near_and_one_far() -> None:
    hosts = {f"near-{i}": "h" for i in range(20)} | {f"far-{i}": f"o{i}" for i in range(20)}
    seen = set()
    for seed in range(50):
        chosen = judge.choose_peers("h", hosts, random.Random(seed))
        assert len(set(chosen)) == 4
        assert chosen[0].startswith("near")
        assert chosen[1].startswith("far")
        seen.update(chosen)
    assert len(seen) > 20, "by lot"
    assert judge.choose_peers("h", {}, random.Random(0)) == []
    assert sorted(judge.choose_peers("h", {"a": "o", "b": "o"}, random.Random(0))) == ["a", "b"]
