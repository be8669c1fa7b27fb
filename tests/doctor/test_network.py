"""T10 and T12: real interfaces in a network namespace of its own, recorded counters, InfiniBand as a tree."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from dask_gpurt.doctor import network, nic
from dask_gpurt.doctor.finding import State
from dask_gpurt.doctor.network import Interface, agree

from .trees import Tree, alone, needs_namespaces, node, told

if TYPE_CHECKING:
    from pathlib import Path

_LOOK = """
from dask_gpurt.doctor.network import CHECK
from tests.doctor.trees import node
for v in CHECK.look(node()):
    print(v.state, v.found, "|", v.remedy)
"""
_PAIR = """
ip link add v0 mtu {first} type veth peer name v1 mtu {second}
ip addr add 10.9.0.1/24 dev v0; ip addr add 10.9.0.2/24 dev v1
ip link set v0 up; ip link set v1 up
"""


@needs_namespaces("-Urn")
def test_real_interfaces_with_two_mtus() -> None:
    lines = alone(_LOOK, before=_PAIR.format(first=1400, second=9000), unshare="-Urn").splitlines()
    (found,) = [line for line in lines if line.startswith("fail")]
    assert found.startswith("fail 10.9.0.0/24 has MTUs of 1400 (v0) and 9000 (v1)")
    assert "ip link set v1 mtu 1400" in found
    lines = alone(_LOOK, before=_PAIR.format(first=1500, second=1500), unshare="-Urn").splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["ok", "ok"]


def test_links_of_a_cluster_are_compared() -> None:
    links = [Interface("eth0", "10.0.0.0/24", 1500, 25_000, f"host{i}") for i in range(4)]
    assert not list(agree(links))
    slow = Interface("eth1", "10.0.0.0/24", 1500, 1000, "host9")
    (found,) = agree([*links, slow])
    assert (found.state, found.found) == (State.WARN, "eth1 of host9 is linked at 1000 Mbit/s")
    assert not list(agree([links[0], slow]))  # of two, neither is odd
    assert not list(agree([*links, Interface("veth", "10.0.0.0/24", 1500, 0, "host8")]))


def snmp(sent: int, again: int) -> str:
    return f"Ip: A\nIp: 1\nTcp: RtoMin OutSegs RetransSegs\nTcp: 200 {sent} {again}\n"


@pytest.mark.parametrize(
    ("before", "after", "state", "text"),
    [
        ((0, 0), (10_000, 5), State.OK, "0.05% of 10000 TCP segments were sent again, in 0.01 s"),
        ((50_000, 9000), (60_000, 9050), State.WARN, "0.50% of 10000 TCP segments"),
        ((0, 0), (10_000, 200), State.FAIL, "2.00% of 10000 TCP segments"),
        ((50_000, 2500), (50_100, 2500), State.FAIL, "4.99% of 50100 TCP segments were sent again, since the start"),
        ((0, 0), (900, 400), State.OK, "900 TCP segments sent, too few to tell"),
    ],
)
def test_segments_sent_again(
    tmp_path: Path, before: tuple[int, int], after: tuple[int, int], state: State, text: str
) -> None:
    tree = Tree(tmp_path, {"proc/net/snmp": snmp(*before)}, {"proc/net/snmp": snmp(*after)})
    assert any(v.found.startswith(text) for v in told(network.CHECK, node(tree), state))


_LOSSY = """
import socket, subprocess, time
from dask_gpurt.backends.system import System
from dask_gpurt.doctor.network import CHECK, _segments
from tests.doctor.trees import node
listener = socket.create_server(("127.0.0.1", 0), backlog=64)
pairs = []
for _ in range(30):
    a = socket.create_connection(listener.getsockname())
    a.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    pairs.append((a, listener.accept()[0]))
for a, b in pairs:
    for _ in range(40):
        a.send(b"x")
        b.recv(1)
print([v.found for v in CHECK.look(node())][0])
subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
for a, _ in pairs:
    a.send(b"x")
deadline = time.monotonic() + 30
while _segments(System())[1] < 40:
    assert time.monotonic() < deadline
    time.sleep(0.05)
for v in CHECK.look(node()):
    print(v.state, v.found, "|", v.remedy)
"""


@needs_namespaces("-Urn")
def test_segments_that_a_real_interface_loses() -> None:
    before, *after = alone(_LOSSY, before="ip link set lo up", unshare="-Urn").splitlines()
    assert before.startswith("0.00% of ")
    (found,) = [line for line in after if line.startswith("fail ")]
    assert "TCP segments were sent again, since the start | errors of the interface" in found


def test_packets_that_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([{"eth0": 5, "eth1": 5}, {"eth0": 6, "eth1": 25}] * 2)
    monkeypatch.setattr(network, "_drops", lambda: next(counts))
    tree = Tree(tmp_path, {})
    tree.late = 2.0
    assert not told(network.CHECK, node(tree, window_seconds=1.0), State.WARN)  # ten a second
    (found,) = told(network.CHECK, node(Tree(tmp_path, {}), window_seconds=1.0), State.WARN)
    assert found.found == "eth1 drops 20 packets/s"
    assert "ethtool -G eth1" in found.remedy


CARD = "sys/class/infiniband/mlx5_0/ports/1/state"


@pytest.mark.parametrize(
    ("setting", "state", "text"),
    [
        ("mlx5_0:1", State.OK, "UCX_NET_DEVICES=mlx5_0:1 is there"),
        ("lo,mlx5_0", State.OK, "is there"),
        ("mlx5_7:1,lo", State.FAIL, "UCX_NET_DEVICES=mlx5_7:1,lo, and there is no mlx5_7:1"),
        ("^mlx5_7:1", State.OK, "leaves those out"),
    ],
)
def test_devices_that_ucx_is_told_to_use(tmp_path: Path, setting: str, state: State, text: str) -> None:
    tree = Tree(tmp_path, {CARD: "4: ACTIVE\n"})
    found = told(nic.CHECK, node(tree, environ={"UCX_NET_DEVICES": setting}), state)
    assert any(text in v.found for v in found), found
    if state is State.FAIL:
        assert "mlx5_0:1" in found[0].expected


@pytest.mark.parametrize("name", ["mlx5_0:1", "mlx5_0", "eth7"])
def test_a_port_that_is_down(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nic.psutil, "net_if_stats", lambda: {"eth7": SimpleNamespace(isup=False)})
    tree = Tree(tmp_path, {CARD: "1: DOWN\n"})
    (found,) = told(nic.CHECK, node(tree, environ={"UCX_NET_DEVICES": name}), State.FAIL)
    assert f"the port of {name} is not active" in found.found
    assert not told(nic.CHECK, node(tree, environ={"UCX_NET_DEVICES": f"^{name}"}), State.FAIL)


def test_a_card_with_one_active_port(tmp_path: Path) -> None:
    tree = Tree(tmp_path, {CARD: "4: ACTIVE\n", CARD.replace("/1/", "/2/"): "1: DOWN\n"})
    assert not told(nic.CHECK, node(tree, environ={"UCX_NET_DEVICES": "mlx5_0"}), State.FAIL)


@pytest.mark.parametrize(
    ("transports", "used"),
    [(None, True), ("all", True), ("tcp,sm", False), ("rc_x,sm", True), ("^ib", False), ("^tcp", True)],
)
def test_an_active_port_that_ucx_may_not_use(
    tmp_path: Path, transports: str | None, used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nic, "ucx_installed", lambda: True)
    environ = {} if transports is None else {"UCX_TLS": transports}
    warned = told(nic.CHECK, node(Tree(tmp_path, {CARD: "4: ACTIVE\n"}), environ=environ), State.WARN)
    assert bool(warned) is not used
    if warned:
        assert warned[0].found == f"InfiniBand ports mlx5_0:1 are active, and UCX_TLS is {transports}"


def test_an_active_port_without_ucx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nic, "ucx_installed", lambda: False)
    (found,) = told(nic.CHECK, node(Tree(tmp_path, {CARD: "4: ACTIVE\n"})), State.WARN)
    assert found.remedy == "pip install 'dask-gpurt[ucx]'"
    # The same card on Ethernet, as in most machines of a cloud.
    roce = Tree(tmp_path / "roce", {CARD: "4: ACTIVE\n", CARD.replace("state", "link_layer"): "Ethernet\n"})
    assert [v.state for v in nic.CHECK.look(node(roce))] == [State.NA]


@pytest.mark.parametrize(("device", "there"), [("lo", True), ("nothing7", False)])
def test_ucx_agrees_on_what_is_there(device: str, there: bool) -> None:
    pytest.importorskip("ucxx._lib.libucxx")
    code = """
    from ucxx._lib import libucxx as lib
    lib.UCXWorker(lib.UCXContext({}))
    """
    said = alone(code, UCX_NET_DEVICES=device, UCX_LOG_LEVEL="warn")
    assert (device in said) is not there, "UCX complains of a device by its name"
    assert bool(told(nic.CHECK, node(environ={"UCX_NET_DEVICES": device}), State.FAIL)) is not there
