"""The rests after failures: doubling, bounded, and no overflow after a day of them."""

from __future__ import annotations

from dask_gpurt.tiers.backoff import LONGEST_SECONDS, BackOff, rest_seconds


def test_doubles_to_a_minute() -> None:
    assert [rest_seconds(n) for n in (1, 2, 3, 6, 7, 8)] == [1.0, 2.0, 4.0, 32.0, LONGEST_SECONDS, LONGEST_SECONDS]


def test_rests_from_the_last_failure_that_is_borne() -> None:
    rest = BackOff(patience=3)
    assert [rest.failed(now=100.0) for _ in range(2)] == [False, False]
    assert rest.until == 0.0
    assert rest.failed(now=100.0)
    assert rest.until == 101.0
    assert not rest.failed(now=101.5)
    assert rest.until == 103.5
    rest.failures = 0
    assert not rest.failed(now=200.0)
    assert rest.until == 103.5


def test_many_failures() -> None:
    rest = BackOff()
    for _ in range(5000):
        rest.failed(now=0.0)
    assert rest.until == LONGEST_SECONDS
