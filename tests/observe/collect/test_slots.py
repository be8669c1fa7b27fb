"""Every second of every slot has one use, whatever happens in which order; with a clock that moves when it is told."""

from __future__ import annotations

import random
import threading
from contextvars import copy_context
from typing import Any

import pytest

from dask_gpurt.model.slots import MEMORY, NETWORK, SLOT, UNSPILL, waiting
from dask_gpurt.observe.collect.slots import SlotMeter
from tests.observe.fakes import Clock


def _exact(meter: SlotMeter) -> dict[str, float]:
    seconds = meter.seconds()
    slots = seconds.pop("slots")
    assert sum(seconds.values()) == pytest.approx(slots, abs=1e-6)
    assert all(value >= -1e-9 for value in seconds.values()), seconds
    return {name: round(value, 6) for name, value in seconds.items() if round(value, 6)}


def _state(meter: SlotMeter, executing: int = 0, **known: Any) -> None:
    meter.state(2, executing, **{"paused": False, "waiting": 0, "constrained": 0, **known})


def test_idle_slots_by_state() -> None:
    clock = Clock()
    meter = SlotMeter(2, clock)
    clock.now += 1
    _state(meter, waiting=1)
    clock.now += 10
    _state(meter, waiting=5)
    clock.now += 100
    _state(meter, paused=True, waiting=5)
    clock.now += 1000
    _state(meter, constrained=1)
    clock.now += 10_000
    assert _exact(meter) == {"network": 10 + 200, "memory": 2000, "resources": 10_000, "unassigned": 2 + 10 + 10_000}


def test_a_loop_that_stood_still_while_a_task_was_decoded() -> None:
    clock = Clock()
    meter = SlotMeter(2, clock)
    clock.now += 10
    assert _exact(meter) == {"unassigned": 20}
    clock.now += 3
    _state(meter, executing=1, standing=2.5)  # as its modules were imported
    task = meter.started("x")
    clock.now += 1
    assert _exact(meter) == {"unassigned": 20 + 3 + 0.5 + 1, "serialisation": 2.5, "running": 1}
    meter.ended(task, 1)
    _state(meter, executing=0, standing=0.5)  # a task that ends was not decoded
    clock.now += 0.25
    _state(meter, executing=2, standing=100.0)  # the machine slept
    assert _exact(meter)["serialisation"] == 2.5
    _state(meter)
    clock.now += 0.25
    _state(meter, executing=1, standing=10.0)  # no slot was idle for as long
    assert _exact(meter)["serialisation"] == 2.75
    _state(meter)
    clock.now += 1
    read = _exact(meter)["unassigned"]
    clock.now += 2
    _state(meter, executing=2, standing=3.0)  # what was read stays
    assert _exact(meter)["unassigned"] == read
    assert _exact(meter)["serialisation"] == 2.75 + 4


def test_a_task_with_waits() -> None:
    clock = Clock()
    meter = SlotMeter(2, clock)
    _state(meter, executing=1)
    task = meter.started("x")
    token = task.enter(UNSPILL)
    clock.now += 2
    inner = task.enter(MEMORY)  # the innermost counts
    clock.now += 3
    task.leave(inner)
    clock.now += 1
    task.leave(token)
    clock.now += 0.5  # prepared
    clock.now += 4  # its own work
    assert _exact(meter) == {"unspill": 3, "memory": 3, "running": 4.5, "unassigned": 10.5}
    meter.ended(task, 4)
    _state(meter)
    assert _exact(meter) == {"unspill": 3, "memory": 3, "busy": 4, "serialisation": 0.5, "unassigned": 10.5}


def test_waits_of_the_thread_are_no_work() -> None:
    clock = Clock()
    meter = SlotMeter(1, clock)
    meter.state(1, 1, paused=False, waiting=0, constrained=0)
    task = meter.started("x")
    SLOT.set(task)

    def run() -> None:
        with waiting(NETWORK):
            clock.now += 3

    clock.now += 1
    thread = threading.Thread(target=copy_context().run, args=(run,))
    thread.start()
    thread.join()
    clock.now += 1
    SLOT.set(None)
    meter.ended(task, 5)
    assert _exact(meter) == {"network": 3, "busy": 2}


def test_waits_end_in_any_order_and_after_the_task() -> None:
    clock = Clock()
    meter = SlotMeter(1, clock)
    meter.state(1, 1, paused=False, waiting=0, constrained=0)
    task = meter.started("x")
    first = task.enter(NETWORK)
    clock.now += 1
    second = task.enter(UNSPILL)
    clock.now += 1
    task.leave(first)
    clock.now += 1
    meter.ended(task, 0)
    meter.state(1, 0, paused=False, waiting=0, constrained=0)
    clock.now += 1
    task.leave(second)
    task.leave(task.enter(MEMORY))  # a background flush that found the slot of a task long gone
    meter.ended(task, 7)
    assert _exact(meter) == {"network": 1, "unspill": 2, "unassigned": 1}


def test_barriers_and_seceded_tasks() -> None:
    clock = Clock()
    meter = SlotMeter(2, clock)
    _state(meter, executing=2)
    barrier, other = meter.started("shuffle-barrier-1"), meter.started("y")
    clock.now += 2
    meter.seceded("y")
    _state(meter, executing=1)
    clock.now += 3
    meter.ended(other, 5)
    meter.ended(barrier, 5)
    assert _exact(meter) == {"shuffle_barrier": 5, "busy": 2, "unassigned": 3}


def test_without_a_slot_waiting_costs_nothing() -> None:
    assert SLOT.get() is None
    with waiting(NETWORK):
        pass


@pytest.mark.parametrize("seed", range(5))
def test_the_sum_is_exact_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    clock = Clock()
    meter = SlotMeter(4, clock)
    running: list[tuple[Any, list[Any], float]] = []
    before: dict[str, float] = {}
    for i in range(2000):
        clock.now += rng.random() * rng.choice((0, 1e-6, 1e-3, 1))
        move = rng.randrange(5)
        if move == 0 and len(running) < 4:
            meter.state(4, len(running) + 1, paused=False, waiting=0, constrained=0)
            running.append((meter.started(i), [], clock.now))
        elif move == 1 and running:
            task, tokens, start = running.pop(rng.randrange(len(running)))
            meter.ended(task, rng.choice((None, 0.0, (clock.now - start) * rng.random(), 1e9)))
            for token in tokens:
                task.leave(token)
            meter.state(
                4, len(running), paused=rng.random() < 0.1, waiting=rng.randrange(6), constrained=rng.randrange(3)
            )
        elif move == 2 and running:
            task, tokens, _ = rng.choice(running)
            tokens.append(task.enter(rng.choice((NETWORK, UNSPILL, MEMORY))))
        elif move == 3 and running:
            task, tokens, _ = rng.choice(running)
            if tokens:
                task.leave(tokens.pop(rng.randrange(len(tokens))))
        seconds = meter.seconds()
        _exact(meter)
        for name, value in before.items():
            assert name == "running" or seconds[name] >= value - 1e-6, f"{name} fell"
        before = seconds
