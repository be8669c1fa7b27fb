from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_gpurt.model import Link, LinkClass
from dask_gpurt.topology import LinkMatrix, Transfer, merge
from dask_gpurt.topology.links import JITTER, NEWS, SEEDS, TRUSTED, LinkFit


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


def test_outliers_are_dropped() -> None:
    true = Link(2e-3, 1e9)
    fit = LinkFit(true)
    feed(fit, true, TRUSTED, noise=0.01)
    before = fit.link
    assert not fit.observe(1e6, 60.0)
    assert fit.link == before
    assert fit.dropped == 1


def test_a_run_of_outliers_is_news() -> None:
    fast, slow = Link(2e-3, 1e9), Link(0.5, 1e7)
    fit = LinkFit(fast)
    feed(fit, fast, 50)
    feed(fit, slow, NEWS + 100)
    assert fit.link.seconds(1e8) == pytest.approx(slow.seconds(1e8), rel=0.3)


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
        fit.observe(1e6 * n, true.seconds(1e6 * n, n), n)
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
    assert 1e5 <= fit.link.bytes_per_second <= 1e13
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
