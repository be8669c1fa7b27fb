from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_gpurt.model import Link, LinkClass
from dask_gpurt.topology import LinkMatrix, Transfer, merge
from dask_gpurt.topology.links import EVERY, LARGE_BYTES, RANGE, SEEDS, TELLING_BYTES, WINDOW, LinkFit

#: below this a time is jitter of the event loops, in seconds
JITTER = 2e-3


def feed(fit: LinkFit, true: Link, n: int, *, noise: float = 0.1, sizes: tuple[float, float] = (1e3, 1e9)) -> None:
    rnd = random.Random(1)
    for _ in range(n):
        nbytes = math.exp(rnd.uniform(math.log(sizes[0]), math.log(sizes[1])))
        fit.observe(nbytes, true.seconds(nbytes) * rnd.uniform(1 - noise, 1 + noise))


def test_seed_until_measured() -> None:
    links = LinkMatrix()
    for link_class in LinkClass:
        assert links.link(link_class) == SEEDS[link_class]
    assert links.link(LinkClass.PROCESS).seconds(1e9) < links.link(LinkClass.HOST).seconds(1e9)
    assert links.link(LinkClass.HOST).seconds(1e9) < links.link(LinkClass.NETWORK).seconds(1e9)


@pytest.mark.parametrize(
    "true",
    [Link(5e-4, 50e9), Link(2e-3, 1e9), Link(5e-2, 10e6), Link(1e-4, 1e8), Link(0.02, 5e9)],
    ids=["nvlink", "as seeded", "wan", "slow wire, quick answer", "slow answer"],
)
def test_learns_whatever_the_seed(true: Link) -> None:
    fit = LinkFit(Link(2e-3, 1e9))
    feed(fit, true, 300)
    for nbytes in (1e3, 1e6, 1e9):
        # Far below JITTER nothing is claimed.
        assert fit.link.seconds(nbytes) == pytest.approx(true.seconds(nbytes), rel=0.2, abs=JITTER / 10)


def test_a_few_samples_outvote_the_seed() -> None:
    true = Link(1e-3, 10e9)
    fit = LinkFit(Link(2e-3, 1e9))
    feed(fit, true, 20)
    assert fit.link.seconds(1e9) == pytest.approx(true.seconds(1e9), rel=0.6)


@pytest.mark.parametrize("nbytes", [100.0, 8e6, 1e9])
def test_all_transfers_of_one_size(nbytes: float) -> None:
    true = Link(4e-3, 250e6)
    fit = LinkFit(Link(2e-3, 1e9))
    feed(fit, true, 200, sizes=(nbytes, nbytes))
    assert fit.link.seconds(nbytes) == pytest.approx(true.seconds(nbytes), rel=0.2)


@pytest.mark.parametrize(("nbytes", "seconds"), [(1e6, 60.0), (1e9, 600.0), (10.0, 60.0), (1e9, 1e-6)])
def test_one_odd_sample_changes_little(nbytes: float, seconds: float) -> None:
    true = Link(2e-3, 1e9)
    fit = LinkFit(true)
    feed(fit, true, 4 * WINDOW, noise=0.01)
    fit.observe(nbytes, seconds)
    feed(fit, true, WINDOW // 2, noise=0.01)
    for size in (1e3, 1e6, 1e9):
        assert fit.link.seconds(size) == pytest.approx(true.seconds(size), rel=0.1)


def test_a_changed_network_is_learned() -> None:
    fast, slow = Link(2e-3, 1e9), Link(0.5, 1e7)
    fit = LinkFit(fast)
    feed(fit, fast, 50)
    for now in (slow, fast):
        feed(fit, now, 5 * WINDOW)
        for size in (1e3, 1e6, 1e8):
            assert fit.link.seconds(size) == pytest.approx(now.seconds(size), rel=0.25)


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_a_run_of_large_transfers_is_believed_within_a_window(factor: float) -> None:
    was, now = Link(2e-3, 1e9), Link(2e-3, 1e9 * factor)
    fit = LinkFit(was)
    feed(fit, was, 200, sizes=(1e4, 1e8))
    for _ in range(WINDOW + EVERY):
        fit.observe(1e8, now.seconds(1e8))
    assert fit.link.seconds(1e8) == pytest.approx(now.seconds(1e8), rel=0.1)


def test_contended_small_fetches_do_not_drive_out_large_ones() -> None:
    # Fifteen workers fetch 2 MB from one port, then pairs fetch 6 MB alone, again and again; then 128 MB.
    fit = LinkFit(SEEDS[LinkClass.NETWORK])
    true = Link(1e-3, 1.25e9)
    for _ in range(4):
        for _ in range(12):
            fit.observe(2e6, true.seconds(15 * 2e6))
        for _ in range(30):
            fit.observe(6e6, true.seconds(6e6))
        assert 0.6e9 < fit.link.bytes_per_second < 1.6e9
    slower = Link(1e-3, true.bytes_per_second / 1.5)
    for i in range(200):
        assert fit.observe(128e6, slower.seconds(128e6))
        fit.observe(6e6, true.seconds(6e6))
        if i > WINDOW // 2:
            assert fit.link.seconds(128e6) == pytest.approx(slower.seconds(128e6), rel=0.3)
    assert fit.dropped == 0


@pytest.mark.parametrize("contended", [0.2, 0.5])
@pytest.mark.parametrize("large", [4e6, 64e6])
def test_contention_is_not_the_bandwidth(contended: float, large: float) -> None:
    off = []
    for seed in range(5):
        rnd = random.Random(seed)
        fit = LinkFit(SEEDS[LinkClass.NETWORK])
        for i in range(1000):
            nbytes = 1e4 if i % 4 else large
            share = rnd.randint(2, 15) if rnd.random() < contended else 1
            fit.observe(nbytes, Link(2e-3, 1e9 / share).seconds(nbytes) * math.exp(rnd.gauss(0, 0.2)))
            if i > 8 * WINDOW:
                off.append(fit.link.bytes_per_second / 1e9)
    assert sum(0.5 < x < 2 for x in off) > 0.97 * len(off)
    assert min(off) > 0.1
    assert max(off) < 2.0


def test_receivers_of_one_value_weigh_as_one() -> None:
    true = Link(2e-3, 1e9)
    fit = LinkFit(true)
    for _ in range(20):
        for _ in range(15):
            fit.observe(1e7, 15 * true.seconds(1e7), receivers=15)
        for _ in range(4):
            fit.observe(1e7, true.seconds(1e7))
    assert fit.link.bytes_per_second == pytest.approx(1e9, rel=0.2)


def test_small_fetches_leave_the_bandwidth_and_large_ones_the_latency() -> None:
    small, large = LinkFit(Link(2e-3, 1e9)), LinkFit(Link(2e-3, 1e9))
    for _ in range(100):
        small.observe(LARGE_BYTES / 2, 1.0)
        large.observe(LARGE_BYTES * 2, 1.0)
    assert small.link.bytes_per_second == small.seed.bytes_per_second
    assert large.link.latency_seconds == large.seed.latency_seconds


def test_a_bandwidth_far_from_the_seed_needs_telling_transfers() -> None:
    seed = Link(1e-3, 1e8)
    fit = LinkFit(seed)
    for _ in range(1000):
        fit.observe(TELLING_BYTES / 4, 1e-3)
    assert fit.link.bytes_per_second <= RANGE * seed.bytes_per_second
    for _ in range(1000):
        fit.observe(LARGE_BYTES, 0.199)
    assert fit.link.bytes_per_second >= seed.bytes_per_second / RANGE
    for _ in range(WINDOW + EVERY):
        fit.observe(1e9, 0.021)
    assert fit.link.bytes_per_second == pytest.approx(5e10, rel=0.1)
    for _ in range(WINDOW + EVERY):
        fit.observe(1e6, 1.0)
    assert fit.link.bytes_per_second == pytest.approx(1e6, rel=0.1)


def test_nothing_is_faster_than_hardware() -> None:
    fit = LinkFit(Link(1e-3, 1e9))
    for _ in range(100):
        fit.observe(1e12, 1e-3)
    assert fit.link.bytes_per_second <= 1e11


@pytest.mark.parametrize(
    ("nbytes", "seconds", "requests"),
    [(1e6, 0.0, 1), (1e6, -1.0, 1), (1e6, math.nan, 1), (-1.0, 1.0, 1), (math.inf, 1.0, 1), (1.0, 1.0, 0)],
)
def test_nonsense_is_dropped(nbytes: float, seconds: float, requests: int) -> None:
    fit = LinkFit(Link(2e-3, 1e9))
    assert not fit.observe(nbytes, seconds, requests)
    assert fit.link == fit.seed
    assert fit.samples == 0


def test_requests_one_after_the_other_pay_latency_each() -> None:
    true = Link(0.01, 1e9)
    fit = LinkFit(Link(2e-3, 1e9))
    for n in (1, 2, 5, 10) * 30:
        fit.observe(1e3 * n, true.seconds(1e3 * n, n), n)
        fit.observe(1e7 * n, true.seconds(1e7 * n, n), n)
    assert fit.link.seconds(4e6, 4) == pytest.approx(true.seconds(4e6, 4), rel=0.1)


def test_classes_are_separate() -> None:
    links = LinkMatrix()
    for _ in range(50):
        links.observe(LinkClass.NETWORK, 1e8, 10.0)
    assert links.link(LinkClass.HOST) == SEEDS[LinkClass.HOST]
    assert links.link(LinkClass.NETWORK).seconds(1e8) == pytest.approx(10.0, rel=0.2)
    said = links.statistics()
    assert said["network"]["samples"] == 50
    assert said["host"]["samples"] == 0


def test_jitter_of_small_fetches_does_not_unsettle_the_fit() -> None:
    # Small fetches take anything from 0.2 ms to 20 ms, whatever their size; a few large ones are slower than linear.
    fit = LinkFit(Link(2e-3, 10e9))
    rnd = random.Random(5)
    for i in range(600):
        if i % 10:
            fit.observe(rnd.uniform(100, 1e5), math.exp(rnd.uniform(math.log(2e-4), math.log(2e-2))))
        else:
            fit.observe(1e7, 0.05 * rnd.uniform(0.5, 2.0))
    assert fit.dropped < 60
    assert 1e-3 < fit.link.seconds(1e3) < 2e-2
    assert 0.02 < fit.link.seconds(1e7) < 0.1


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1e13), st.floats(1e-9, 1e5), st.integers(1, 100)), max_size=60))
def test_always_a_sane_link(samples: list[tuple[float, float, int]]) -> None:
    fit = LinkFit(Link(2e-3, 1e9))
    for sample in samples:
        fit.observe(*sample)
    assert 1e-4 <= fit.link.latency_seconds <= 1.0
    assert 1e5 <= fit.link.bytes_per_second <= 1e11
    assert fit.samples + fit.dropped <= len(samples)


def transfer(start: float, stop: float, nbytes: float, link_class: LinkClass = LinkClass.HOST) -> Transfer:
    return Transfer(start, stop, nbytes, link_class)


def test_merge_shares_the_link_among_concurrent_transfers() -> None:
    # Two fetches of 100 bytes that took 2 s side by side were 200 bytes in 2 s, not twice 100 bytes in 2 s.
    assert merge([transfer(0, 2, 100), transfer(0, 2, 100)]) == [(LinkClass.HOST, 200, 2, 1)]
    assert merge([transfer(1, 4, 30), transfer(0, 2, 10)]) == [(LinkClass.HOST, 40, 4, 1)]


def test_merge_keeps_separate_what_was_separate() -> None:
    assert merge([transfer(0, 1, 10), transfer(1, 3, 20)]) == [
        (LinkClass.HOST, 10, 1, 1),
        (LinkClass.HOST, 20, 2, 1),
    ]


def test_merge_leaves_out_mixed_groups() -> None:
    mixed = [transfer(0, 2, 10), transfer(1, 3, 10, LinkClass.NETWORK), transfer(5, 6, 7)]
    assert merge(mixed) == [(LinkClass.HOST, 7, 1, 1)]
    assert merge([]) == []


def test_merge_tells_how_many_fetched_the_same() -> None:
    shared = [Transfer(0, 2, 10, LinkClass.HOST, 5), Transfer(1, 3, 10, LinkClass.HOST)]
    assert merge(shared) == [(LinkClass.HOST, 20, 3, 5)]
