"""Which way a message takes."""

from __future__ import annotations

import pytest

from dask_gpurt.shuffle.transport.choice import BACKOFF_SECONDS, RARELY, SAFE, TRY_EVERY, Chooser, Place

MiB = 1 << 20


@pytest.mark.parametrize("size", [1, 65_536, MiB, 64 * MiB])
def test_plain_ethernet_never_takes_ucx(size):
    assert Chooser(Place.REMOTE, ["ucx", "tcp"]).choose(size, False, 0.0) == "tcp"


def test_the_same_process_hands_over():
    assert Chooser(Place.PROCESS, ["inproc", "tcp"]).choose(MiB, False, 0.0) == "inproc"


def test_device_buffers_take_ucx_or_the_safe_path():
    assert Chooser(Place.REMOTE, ["ucx", "tcp"]).choose(MiB, True, 0.0) == "ucx"
    assert Chooser(Place.REMOTE, ["tcp"]).choose(MiB, True, 0.0) == SAFE


@pytest.mark.parametrize("forced", ["rpc", "tcp", "ucx"])
def test_what_is_forced_is_taken_or_the_safe_path(forced):
    assert Chooser(Place.HOST, ["ucx", "tcp"], forced).choose(MiB, False, 0.0) == forced
    assert Chooser(Place.HOST, [], forced).choose(MiB, False, 0.0) == SAFE


def test_a_lost_transport_is_out_for_a_while_longer_each_time():
    c = Chooser(Place.REMOTE, ["tcp"])
    c.lost("tcp", 0.0)
    assert c.choose(MiB, False, BACKOFF_SECONDS - 0.1) == SAFE
    assert c.choose(MiB, False, BACKOFF_SECONDS) == "tcp"
    c.lost("tcp", BACKOFF_SECONDS)
    c.lost("tcp", BACKOFF_SECONDS + 1)  # other messages of the same link: counted once
    assert c.choose(MiB, False, 3 * BACKOFF_SECONDS - 0.1) == SAFE
    assert c.choose(MiB, False, 3 * BACKOFF_SECONDS) == "tcp"


def most(c: Chooser, size: int = MiB) -> str:
    names = [c.choose(size, False, 0.0) for _ in range(TRY_EVERY)]
    return max(names, key=names.count)


def test_a_slow_network_does_not_change_the_order():
    """All ways are slow then; those that were not tried must not look better for it."""
    c = Chooser(Place.REMOTE, ["tcp"])
    for _ in range(5000):
        c.observe("tcp", MiB, 0.1)
    assert most(c) == "tcp"


@pytest.mark.parametrize("messages", [1, 3, 10, 30, 100, 1000])
@pytest.mark.parametrize("seconds", [0.001, 0.01, 0.1])
def test_nor_does_it_at_any_time(messages, seconds):
    """A burst on a busy machine: from the first slow message on, the order stays that of the priors."""
    c = Chooser(Place.HOST, ["tcp"])
    for _ in range(messages):
        c.observe("tcp", MiB, seconds)
    assert most(c) == "tcp"


def test_what_is_really_slower_is_left_and_taken_again():
    c = Chooser(Place.REMOTE, ["tcp"])
    for _ in range(1000):
        c.observe("tcp", MiB, 0.01)
    for _ in range(300):
        c.observe(SAFE, MiB, 0.001)
    assert most(c) == SAFE
    assert most(c, 64 * MiB) == "tcp"  # nothing was learned about these
    for _ in range(20_000):
        c.observe("tcp", MiB, 0.0003)
    assert most(c) == "tcp"


def test_other_ways_are_tried_now_and_then():
    c = Chooser(Place.REMOTE, ["tcp"])
    names = [c.choose(MiB, False, 0.0) for _ in range(10 * TRY_EVERY)]
    assert names.count(SAFE) == 10
    for _ in range(1000):  # far behind: rarely
        c.observe("tcp", MiB, 0.001)
        c.observe(SAFE, MiB, 0.01)
    names = [c.choose(MiB, False, 0.0) for _ in range(10 * TRY_EVERY * RARELY)]
    assert names.count(SAFE) == 10
    forced = Chooser(Place.REMOTE, ["tcp"], "tcp")
    assert {forced.choose(MiB, False, 0.0) for _ in range(10 * TRY_EVERY)} == {"tcp"}
