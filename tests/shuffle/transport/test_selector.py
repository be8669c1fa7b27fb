"""Which way a message takes."""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from dask_gpurt.shuffle.transport.select.selector import (
    BACKOFF_LIMIT,
    BACKOFF_SECONDS,
    PRIOR,
    SAFE,
    Locality,
    TransportChooser,
)

if TYPE_CHECKING:
    from collections.abc import Callable

MiB = 1 << 20
AT_ONCE = 10


@pytest.mark.parametrize("size", [1, 65_536, MiB, 64 * MiB])
def test_plain_ethernet_never_takes_ucx(size):
    assert TransportChooser(Locality.REMOTE, ["ucx", "tcp"]).choose(size, False, 0.0) == "tcp"


def test_the_same_process_hands_over():
    assert TransportChooser(Locality.PROCESS, ["inproc", "tcp"]).choose(MiB, False, 0.0) == "inproc"


def test_device_buffers_take_ucx_or_the_safe_path():
    assert TransportChooser(Locality.REMOTE, ["ucx", "tcp"]).choose(MiB, True, 0.0) == "ucx"
    assert TransportChooser(Locality.REMOTE, ["tcp"]).choose(MiB, True, 0.0) == SAFE


@pytest.mark.parametrize("forced", ["rpc", "tcp", "ucx"])
def test_what_is_forced_is_taken_or_the_safe_path(forced):
    assert TransportChooser(Locality.HOST, ["ucx", "tcp"], forced).choose(MiB, False, 0.0) == forced
    assert TransportChooser(Locality.HOST, [], forced).choose(MiB, False, 0.0) == SAFE


def test_a_lost_transport_is_out_for_a_while_longer_each_time():
    c = TransportChooser(Locality.REMOTE, ["tcp"])
    c.lost("tcp", 0.0)
    assert c.choose(MiB, False, BACKOFF_SECONDS - 0.1) == SAFE
    assert c.choose(MiB, False, BACKOFF_SECONDS) == "tcp"
    c.lost("tcp", BACKOFF_SECONDS)
    c.lost("tcp", BACKOFF_SECONDS + 1)  # other messages of the same link: counted once
    assert c.choose(MiB, False, 3 * BACKOFF_SECONDS - 0.1) == SAFE
    assert c.choose(MiB, False, 3 * BACKOFF_SECONDS) == "tcp"
    # Losses of last week are forgotten.
    later = 3 * BACKOFF_SECONDS + BACKOFF_LIMIT + 1
    c.lost("tcp", later)
    assert c.choose(MiB, False, later + BACKOFF_SECONDS) == "tcp"


class World:
    """A sender with ten messages under way, on a machine that does one thing at a time and shares itself among them.

    Parameters
    ----------
    gbs
        Way -> GB/s, as a function of the seconds that have passed.
    noise
        Every message takes longer or shorter by so much (standard deviation of the logarithm); so does everything
        during a spell of 50 messages, which all ways share.
    """

    def __init__(self, gbs: dict[str, Callable[[float], float]], noise: float, seed: int, size: int = MiB) -> None:
        self.gbs, self.noise, self.size = gbs, noise, size
        self.random = random.Random(seed)
        self.now = 0.0
        self.took: Counter[str] = Counter()

    def run(self, chooser: TransportChooser, messages: int) -> float:
        """Seconds."""
        began = self.now
        # Work done so far per message under way: those that are there share the machine, so the one with the least
        # work ends first, at a level of work that grows by time over their number.
        level, flying, spell = 0.0, [], 1.0
        for i in range(messages):
            if i % 50 == 0:
                spell = math.exp(self.random.gauss(0, self.noise))
            name = chooser.choose(self.size, False, self.now)
            self.took[name] += 1
            work = self.size / (self.gbs[name](self.now) * 1e9) * spell * math.exp(self.random.gauss(0, self.noise))
            chooser.began(name, self.size, False, self.now)
            heapq.heappush(flying, (level + work, i, name))
            if len(flying) == AT_ONCE:
                level = self.end_one(chooser, flying, level)
        while flying:
            level = self.end_one(chooser, flying, level)
        return self.now - began

    def end_one(self, chooser: TransportChooser, flying: list[tuple[float, int, str]], level: float) -> float:
        n = len(flying)
        end, _, name = heapq.heappop(flying)
        self.now += (end - level) * n
        chooser.ended(name, self.size, False, self.now, True)
        return end


def still(**gbs: float) -> dict[str, Callable[[float], float]]:
    return {name: (lambda now, value=value: value) for name, value in gbs.items()}


#: GB/s of rpc and tcp; what is measured, ways that are nearly equal, priors that are wrong
SPEEDS = [(0.5, 1.0), (0.9, 1.0), (0.99, 1.0), (1.0, 0.97), (1.2, 1.0), (2.0, 1.0), (5.0, 1.0), (0.2, 1.0)]


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize(("rpc", "tcp"), SPEEDS)
@pytest.mark.parametrize("place", [Locality.HOST, Locality.REMOTE])
def test_within_five_percent_of_the_best_one(place, rpc, tcp, noise):
    """From the thousandth message on, the same noise for each: however wrong the priors are."""
    spent = {}
    for way in ("rpc", "tcp", "auto"):
        world = World(still(rpc=rpc, tcp=tcp), noise, seed=1)
        chooser = TransportChooser(place, ["tcp"], way)
        world.run(chooser, 1000)
        spent[way] = world.run(chooser, 6000)
    best = min(spent["rpc"], spent["tcp"])
    assert spent["auto"] <= 1.05 * best, spent


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_a_faster_way_is_found_within_some_hundred_messages(noise):
    fastest = next(iter(PRIOR[Locality.REMOTE]))
    world = World(still(rpc=1.0, tcp=1.0, ucx=2.0), noise, seed=2)
    chooser = TransportChooser(Locality.REMOTE, ["ucx", "tcp"])
    assert fastest == "ucx"
    assert chooser.choose(MiB, False, 0.0) == "tcp"
    world.run(chooser, 4000)
    world.took.clear()
    world.run(chooser, 1000)
    assert world.took["ucx"] > 900, world.took


def test_a_slow_network_does_not_change_the_order():
    """All ways get ten times slower, at any moment: what was not tried since must not look better for it."""

    def speed(value: float) -> Callable[[float], float]:
        return lambda now: value / 10 if 1.0 < now < 30.0 else value

    world = World({"rpc": speed(0.8), "tcp": speed(1.0)}, 0.2, seed=3)
    chooser = TransportChooser(Locality.REMOTE, ["tcp"])
    world.run(chooser, 10_000)
    assert world.now > 30.0
    assert world.took["tcp"] > 9_000, world.took


def test_what_gets_slower_alone_is_left_and_taken_again():
    """The ways change places twice."""
    world = World({"rpc": lambda now: 1.0, "tcp": lambda now: 0.5 if 5.0 < now < 20.0 else 2.0}, 0.1, seed=4)
    chooser = TransportChooser(Locality.REMOTE, ["tcp"])
    for until, usual in ((5.0, "tcp"), (20.0, "rpc"), (40.0, "tcp")):
        while world.now < until:
            world.took.clear()
            world.run(chooser, 1000)
            seen = max(world.took, key=world.took.__getitem__)
        assert seen == usual, (until, world.took)


def test_trials_cost_little_and_end():
    """With a way that is five times slower than the usual one, and known to be."""
    world = World(still(rpc=0.4, tcp=2.0), 0.1, seed=5)
    chooser = TransportChooser(Locality.HOST, ["tcp"])
    world.run(chooser, 40_000)
    assert 0 < world.took[SAFE] < 40_000 * 0.005, world.took


def test_a_trial_that_failed_says_nothing():
    """A message that was refused, or lost, took no time that could be compared."""
    world = World(still(rpc=1.0, tcp=1.0, ucx=0.5), 0.0, seed=6)
    chooser = TransportChooser(Locality.REMOTE, ["ucx", "tcp"])
    while (name := chooser.choose(MiB, False, world.now)) == "tcp":
        chooser.began(name, MiB, False, world.now)
        world.now += 0.001
        chooser.ended(name, MiB, False, world.now, True)
    chooser.began(name, MiB, False, world.now)
    chooser.ended(name, MiB, False, world.now + 1e-9, False)
    chooser.lost(name, world.now)
    assert {chooser.choose(MiB, False, world.now) for _ in range(10)} == {"tcp"}
    world.run(chooser, 1000)
    assert world.took["tcp"] > 800, world.took


def test_device_buffers_do_not_count_for_the_others():
    chooser = TransportChooser(Locality.HOST, ["ucx", "tcp"])
    for i in range(1000):
        chooser.began("ucx", MiB, True, i * 1e-6)
        chooser.ended("ucx", MiB, True, i * 1e-6 + 1e-7, True)
    assert chooser.choose(MiB, False, 1.0) == "tcp"


def test_forced_ways_are_never_left_for_a_trial():
    world = World(still(rpc=2.0, tcp=1.0), 0.1, seed=7)
    world.run(TransportChooser(Locality.REMOTE, ["tcp"], "tcp"), 5000)
    assert set(world.took) == {"tcp"}
