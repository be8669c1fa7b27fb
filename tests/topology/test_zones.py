"""Zones by round trip."""

from __future__ import annotations

import socket
import threading

import pytest

from dask_gpurt.model.link import Link
from dask_gpurt.topology.zones import NEAR_SECONDS, Zones, round_trip_seconds, seed


def test_one_zone_is_none() -> None:
    z = Zones()
    assert not z.add("a", 20e-6)
    assert not z.add("b", 300e-6)
    assert not z.add("c", NEAR_SECONDS)
    assert not z.several
    assert z.statistics() == {"zone-0": {"round_trip_seconds": NEAR_SECONDS, "workers": 3}}


def test_two_racks() -> None:
    z = Zones()
    assert not z.add("a", 20e-6)
    assert z.add("b", 20e-3)
    assert not z.add("c", 22e-3)
    assert not z.add("d", 90e-3)
    assert [z.by_address[x] for x in "abcd"] == ["zone-0", "zone-1", "zone-1", "zone-2"]
    assert z.farthest == pytest.approx(90e-3)
    assert not z.remove("c")
    assert z.statistics()["zone-1"]["workers"] == 1


def test_a_zone_leaves_with_its_last_worker() -> None:
    z = Zones()
    for address, trip in (("a", 20e-6), ("b", 20e-3), ("c", 90e-3)):
        z.add(address, trip)
    assert not z.remove("b")
    assert not z.remove("b")
    assert list(z.statistics()) == ["zone-0", "zone-2"]
    assert z.remove("c")
    assert not z.several
    assert z.add("d", 20e-3), "as if for the first time"
    assert z.by_address == {"a": "zone-0", "d": "zone-1"}
    assert z.remove("a")
    assert not z.remove("d")
    assert not z.add("e", 20e-6)
    assert z.statistics() == {"zone-0": {"round_trip_seconds": NEAR_SECONDS, "workers": 1}}


def test_seed() -> None:
    usual = Link(latency_seconds=5e-3, bytes_per_second=400e6)
    far = seed(20e-3, usual)
    assert far.latency_seconds == pytest.approx(25e-3)
    assert 5e6 < far.bytes_per_second < 50e6
    assert seed(1e-6, usual).bytes_per_second == usual.bytes_per_second


def test_a_socket_on_this_machine_is_near() -> None:
    if not hasattr(socket, "TCP_INFO"):
        pytest.skip("the kernel does not tell round trips")
    with socket.create_server(("127.0.0.1", 0)) as server:
        accepted = []
        t = threading.Thread(target=lambda: accepted.append(server.accept()[0]))
        t.start()
        with socket.create_connection(server.getsockname()) as c:
            t.join()
            with accepted[0] as s:
                c.sendall(b"x" * 1000)
                s.recv(1000)
                s.sendall(b"y")
                c.recv(1)
                trip = round_trip_seconds(s)
                assert trip is not None
                assert 0 < trip < 0.1


def test_other_sockets_say_nothing() -> None:
    a, b = socket.socketpair()
    with a, b:
        assert round_trip_seconds(a) is None
    assert round_trip_seconds(None) is None
