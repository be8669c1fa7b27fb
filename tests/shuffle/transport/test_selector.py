"""Which way a message takes."""

from __future__ import annotations

import pytest

from dask_gpurt.shuffle.transport.select.selector import (
    BACKOFF_LIMIT,
    BACKOFF_SECONDS,
    DEVICE,
    SAFE,
    Locality,
    TransportChooser,
)


@pytest.mark.parametrize(
    ("able", "way"),
    [
        (["ucx", "tcp"], "tcp"),  # UCX loses over plain Ethernet
        (["ucx", "tls"], "tls"),
        (["ucx"], "ucx"),
        (["tcp", "inproc"], "inproc"),
        ([], SAFE),
    ],
)
def test_the_order_of_the_ways(able, way):
    assert TransportChooser(Locality.REMOTE, able).choose(False, 0.0) == way


def test_device_buffers_take_ucx_or_the_safe_path():
    assert TransportChooser(Locality.REMOTE, ["ucx", "tcp"]).choose(True, 0.0) == "ucx"
    assert TransportChooser(Locality.PROCESS, ["inproc", "ucx"]).choose(True, 0.0) == "inproc"
    assert TransportChooser(Locality.REMOTE, ["tcp"]).choose(True, 0.0) == SAFE
    assert TransportChooser(Locality.REMOTE, ["ucx", "tcp"], "tcp").choose(True, 0.0) == SAFE


@pytest.mark.parametrize("forced", ["rpc", "tcp", "ucx"])
def test_what_is_forced_is_taken_or_the_safe_path(forced):
    assert TransportChooser(Locality.HOST, ["ucx", "tcp"], forced).choose(False, 0.0) == forced
    assert TransportChooser(Locality.HOST, [], forced).choose(False, 0.0) == SAFE


def test_a_lost_transport_is_out_for_a_while_longer_each_time():
    c = TransportChooser(Locality.REMOTE, ["tcp"])
    c.lost("tcp", 0.0)
    assert c.choose(False, BACKOFF_SECONDS - 0.1) == SAFE
    assert c.choose(False, BACKOFF_SECONDS) == "tcp"
    c.lost("tcp", BACKOFF_SECONDS)
    c.lost("tcp", BACKOFF_SECONDS + 1)  # other messages of the same link: counted once
    assert c.choose(False, 3 * BACKOFF_SECONDS - 0.1) == SAFE
    assert c.choose(False, 3 * BACKOFF_SECONDS) == "tcp"
    # Losses of last week are forgotten.
    later = 3 * BACKOFF_SECONDS + BACKOFF_LIMIT + 1
    c.lost("tcp", later)
    assert c.choose(False, later + BACKOFF_SECONDS) == "tcp"


def test_a_transport_that_never_worked_is_tried_ever_less_often():
    # As behind a firewall that drops it: each try keeps messages waiting for seconds.
    c = TransportChooser(Locality.REMOTE, ["tcp"])
    tries, now = 0, 0.0
    while now < 24 * 3600:
        if c.choose(False, now) == "tcp":
            tries += 1
            c.lost("tcp", now, worked=False)
        now += 600  # shuffles that come further apart than a transport that worked is ever out
    assert 2 < tries < 10
    # It works at last, and is then as any other.
    while c.choose(False, now) != "tcp":
        now += 600
    c.lost("tcp", now + BACKOFF_LIMIT + 1)
    assert c.choose(False, now + BACKOFF_LIMIT + 1 + BACKOFF_SECONDS) == "tcp"


def test_a_peer_without_device_memory_gets_the_next_messages_from_the_host():
    c = TransportChooser(Locality.REMOTE, ["ucx"])
    c.lost(DEVICE, 0.0)
    assert c.choose(True, BACKOFF_SECONDS - 0.1) == SAFE
    assert c.choose(False, BACKOFF_SECONDS - 0.1) == "ucx"
    assert c.choose(True, BACKOFF_SECONDS) == "ucx"
