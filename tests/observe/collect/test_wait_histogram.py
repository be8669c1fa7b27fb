"""Lengths of waits: what is counted, that histograms add up, and how far off a quantile may be."""

from __future__ import annotations

import pytest

from dask_gpurt.observe.collect import wait_histogram
from dask_gpurt.observe.collect.slots import SlotMeter
from tests.observe.collect.test_stall_ledger import Scheduler
from tests.observe.fakes import Clock


def test_a_quantile_is_a_fifth_off_at_most() -> None:
    lengths = [0.001 * 1.07**i for i in range(150)]
    made = wait_histogram.Tails()
    for seconds in lengths:
        made.add("network", seconds)
    for share in (0.01, 0.5, 0.9, 0.99, 1.0):
        exact = lengths[max(0, round(share * len(lengths)) - 1)]
        assert wait_histogram.quantile(made.counts["network"], share) == pytest.approx(exact, rel=0.2)
    assert wait_histogram.quantile([], 0.5) == 0.0


def test_what_is_short_is_not_counted_and_what_is_long_has_a_bucket() -> None:
    made = wait_histogram.Tails()
    made.add("memory", 0.0005)
    assert made.as_json() == {}
    made.add("memory", 1e9)
    assert sum(made.as_json()["memory"]) == 1
    assert len(made.as_json()["memory"]) == wait_histogram.BUCKETS
    made.add("network", 0.001)
    assert made.as_json()["network"] == [1]


def test_histograms_grow_and_start_over() -> None:
    assert wait_histogram.grown({"a": [1, 3]}, {"a": [1, 1]}) == {"a": [0, 2]}
    assert wait_histogram.grown({"a": [1, 3], "b": [1]}, {"a": [1, 3]}) == {"b": [1]}
    # Fewer than before: the worker counts from zero.
    assert wait_histogram.grown({"a": [1]}, {"a": [0, 4]}) == {"a": [1]}
    made = wait_histogram.Tails()
    made.grow({"a": [1, 2]})
    made.grow({"a": [0, 0, 1], "b": [5]})
    assert made.as_json() == {"a": [1, 2, 1], "b": [5]}
    assert wait_histogram.figures(made.counts)["b"]["count"] == 5
    assert wait_histogram.figures({"a": [0]}) == {}


def test_waits_of_slots_are_told_apart_by_cause() -> None:
    clock = Clock()
    clock.now = 0.0
    meter = SlotMeter(2, clock)
    meter.state(2, 0, paused=False, waiting=1, constrained=0)
    clock.now = 2.0  # one slot has waited for inputs, the other one had no task
    meter.state(2, 2, paused=False, waiting=0, constrained=0)
    task = meter.started("x")
    clock.now = 3.0
    outer = task.enter("unspill")
    clock.now = 3.25
    inner = task.enter("memory")
    clock.now = 3.5
    task.leave(inner)
    task.leave(outer)
    task.leave(outer)  # a second time: nothing
    task.enter("network")
    clock.now = 4.5
    meter.ended(task)
    got = wait_histogram.figures(meter.tails.counts)
    assert {cause: told["count"] for cause, told in got.items()} == {
        "network": 2,
        "unassigned": 1,
        "unspill": 1,
    }
    assert got["unspill"]["p50_seconds"] == pytest.approx(0.5, rel=0.2)
    assert got["network"]["p99_seconds"] == pytest.approx(2.0, rel=0.2)
    # As long as nothing ends there is nothing to count.
    assert meter.seconds()["network"] == pytest.approx(3.0)


def test_the_ledger_adds_up_what_workers_tell() -> None:
    scheduler = Scheduler()
    ledger, ws = scheduler.ledger, scheduler.workers["a"]
    figures = {"slot_slots_seconds": 1.0, "slot_unassigned_seconds": 1.0, "slot_waits": {"network": [0, 2]}}
    ledger.heartbeat(ws, figures)
    ledger.heartbeat(ws, figures | {"slot_unassigned_seconds": 2.0, "slot_waits": {"network": [0, 2, 1]}})
    assert ledger.details()["waits"] == {"network": [0, 2, 1]}
    told = ledger.statistics()["waits"]["network"]
    assert told["count"] == 3
    assert told["p50_seconds"] < told["p99_seconds"]
    # Attached anew: all of it counts.
    ledger.heartbeat(ws, {"slot_slots_seconds": 0.1, "slot_unassigned_seconds": 0.1, "slot_waits": {"network": [7]}})
    assert ledger.statistics()["waits"]["network"]["count"] == 10
