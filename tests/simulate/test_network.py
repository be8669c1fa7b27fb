"""Max-min fairness: by hand, against the definition, and over time."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from dask_gpurt.simulate.clock import VirtualLoop
from dask_gpurt.simulate.model import Cluster, Path
from dask_gpurt.simulate.network import TOLERANCE, Network

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence


def fair_rates(
    flows: Mapping[Hashable, Sequence[Hashable]], capacities: Mapping[Hashable, float]
) -> dict[Hashable, float]:
    """Max-min fair rates by progressive filling.

    Parameters
    ----------
    flows
        Flow -> the resources it needs, at least one.
    capacities
        Resource -> bytes/s.
    """
    left = dict(capacities)
    waiting = {f: tuple(dict.fromkeys(rs)) for f, rs in flows.items()}
    rates: dict[Hashable, float] = {}
    while waiting:
        count: dict[Hashable, int] = {}
        for rs in waiting.values():
            for r in rs:
                count[r] = count.get(r, 0) + 1
        tightest = min(count, key=lambda r: left[r] / count[r])
        rate = max(0.0, left[tightest] / count[tightest])
        for f in [f for f, rs in waiting.items() if tightest in rs]:
            rates[f] = rate
            for r in waiting.pop(f):
                left[r] -= rate
    return rates


def run(loop: VirtualLoop) -> None:
    while loop.step():
        pass


@pytest.mark.parametrize(
    ("flows", "capacities", "rates"),
    [
        ({"a": "x"}, {"x": 10}, {"a": 10}),
        ({"a": "x", "b": "x"}, {"x": 10}, {"a": 5, "b": 5}),
        # The textbook case: b is held back by y, and what it leaves on x is a's.
        ({"a": "x", "b": "xy", "c": "y", "d": "y"}, {"x": 10, "y": 6}, {"a": 8, "b": 2, "c": 2, "d": 2}),
        # A parking lot: the long flow shares every link.
        ({"long": "xyz", "a": "x", "b": "y", "c": "z"}, {"x": 4, "y": 2, "z": 8}, {"long": 1, "a": 3, "b": 1, "c": 7}),
        # Two levels: the bottleneck of some is not that of others.
        ({"a": "x", "b": "xy", "c": "yz", "d": "z"}, {"x": 2, "y": 10, "z": 10}, {"a": 1, "b": 1, "c": 5, "d": 5}),
    ],
)
def test_rates_by_hand(flows: dict[str, str], capacities: dict[str, float], rates: dict[str, float]) -> None:
    assert fair_rates({k: tuple(v) for k, v in flows.items()}, dict(capacities)) == pytest.approx(rates)
    loop = VirtualLoop()
    names = list(capacities)
    network = Network(loop, list(capacities.values()))
    made = {f: network.start([names.index(r) for r in rs], 1e9, lambda: None) for f, rs in flows.items()}
    loop.step()
    assert {f: flow.rate for f, flow in made.items()} == pytest.approx(rates, rel=2 * TOLERANCE)


@pytest.mark.parametrize("seed", range(8))
def test_local_updates_agree_with_the_definition(seed: int) -> None:
    """After every start and end of random transfers, rates are what progressive filling gives, nearly."""
    rnd = random.Random(seed)
    loop = VirtualLoop()
    capacities = [rnd.choice((1.0, 2.0, 5.0)) * 1e6 for _ in range(12)]
    network = Network(loop, capacities)
    checked = 0

    def check() -> None:
        nonlocal checked
        rates = network.rates()
        expected = fair_rates({f: f.resources for f in rates}, dict(enumerate(capacities)))
        for flow, rate in rates.items():
            if flow.left_bytes > 0:
                assert rate == pytest.approx(expected[flow], rel=0.05)
        for r, capacity in enumerate(capacities):
            assert sum(f.rate for f in rates if r in f.resources) <= capacity * 1.02
        checked += 1

    for _ in range(60):
        resources = rnd.sample(range(12), rnd.choice((2, 2, 4)))
        at = rnd.random() * 5

        def start(resources: list[int] = resources, nbytes: float = rnd.random() * 3e6) -> None:
            network.start(resources, nbytes, lambda: loop.at_instant_end(check))
            loop.at_instant_end(check)

        loop.at(at, start)
    run(loop)
    assert checked >= 120
    assert network.active == 0


def test_a_transfer_takes_what_its_rates_say() -> None:
    """Two share a link of 10 B/s from the start; the second has half the bytes. 5 B/s each, then 10 for the rest."""
    loop = VirtualLoop()
    network = Network(loop, [10.0])
    ends: dict[str, float] = {}
    network.start([0], 100, lambda: ends.__setitem__("long", loop.now))
    network.start([0], 50, lambda: ends.__setitem__("short", loop.now))
    run(loop)
    assert ends["short"] == pytest.approx(10.0, rel=0.01)
    assert ends["long"] == pytest.approx(15.0, rel=0.01)


def test_nothing_to_send_ends_at_once() -> None:
    loop = VirtualLoop()
    network = Network(loop, [10.0])
    ended: list[float] = []
    network.start([0], 0, lambda: ended.append(loop.now))
    run(loop)
    assert ended == [0.0]


@pytest.mark.parametrize("capacity", [0, -1, float("inf"), float("nan")])
def test_a_link_without_capacity_is_refused(capacity: float) -> None:
    with pytest.raises(ValueError, match="finite and more than 0"):
        Network(VirtualLoop(), [capacity])


def test_routes() -> None:
    c = Cluster(8, per_node=2, nodes_per_rack=2, near=Path(1, 10), far=Path(2, 5), uplink=Path(4, 3))
    capacities = c.capacities()

    def widths(a: int, b: int) -> tuple[float, list[float]]:
        latency, resources = c.route(a, b)
        return latency, [capacities[r] for r in resources]

    assert widths(0, 1) == (1, [10, 10])
    assert widths(0, 2) == (2, [5, 5])
    assert widths(0, 4) == (6, [5, 5, 3, 3])
    assert [c.link_class(0, i) for i in range(8)] == ["node"] * 2 + ["rack"] * 2 + ["far"] * 4
    # What goes out of a node and what comes in do not share a port.
    assert not set(c.route(0, 4)[1]) & set(c.route(4, 0)[1])
