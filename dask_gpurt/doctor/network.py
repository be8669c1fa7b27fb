"""T12: the network of this machine, and whether the machines of a cluster agree on it."""

from __future__ import annotations

import dataclasses
import ipaddress
import socket
import statistics
from typing import TYPE_CHECKING

import psutil

from dask_gpurt.doctor.check import Check
from dask_gpurt.doctor.finding import fail, ok, warn

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dask_gpurt.backends.system import System
    from dask_gpurt.doctor.check import Node
    from dask_gpurt.doctor.finding import Verdict

_RETRANSMITTED_WARN, _RETRANSMITTED_FAIL = 0.001, 0.01
#: segments below which a share says nothing
_SEGMENTS = 1000
_DROPS_PER_SECOND = 10
#: of the links of a cluster; one is slow below a third of their median
_SLOW_LINK = 1 / 3


@dataclasses.dataclass(frozen=True)
class Interface:
    """One interface with an address. Those of loopback are left out."""

    name: str
    #: such as "10.0.0.0/24"
    subnet: str
    mtu: int
    #: 0: unknown, as of most virtual ones
    megabits_per_second: int
    #: of the machine; empty: this one
    host: str = ""

    def __str__(self) -> str:
        return f"{self.name}{' of ' + self.host if self.host else ''}"


def interfaces() -> list[Interface]:
    """Those of this process's network namespace that are up (sysfs may show another namespace's)."""
    states = psutil.net_if_stats()
    out = []
    for name, addresses in psutil.net_if_addrs().items():
        state = states.get(name)
        if state is None or not state.isup:
            continue
        for a in addresses:
            if a.family == socket.AF_INET and a.netmask and not a.address.startswith("127."):
                subnet = str(ipaddress.ip_network(f"{a.address}/{a.netmask}", strict=False))
                out.append(Interface(name, subnet, int(state.mtu), int(state.speed)))
    return out


def agree(found: Iterable[Interface]) -> Iterator[Verdict]:
    """Whether all interfaces of a subnet have one MTU, and links of a cluster are about as fast as each other."""
    subnets: dict[str, list[Interface]] = {}
    for interface in found:
        subnets.setdefault(interface.subnet, []).append(interface)
    for subnet, members in subnets.items():
        mtus = sorted({m.mtu for m in members})
        if len(mtus) > 1:
            some = {m.mtu: str(m) for m in reversed(members)}
            yield fail(
                f"{subnet} has MTUs of " + " and ".join(f"{mtu} ({some[mtu]})" for mtu in mtus),
                expected="one MTU in a subnet",
                meaning="Large packets are lost without a word: connections open, and hang with the first large value",
                remedy=f"ip link set {some[mtus[-1]].split()[0]} mtu {mtus[0]}, or the larger one on all machines",
            )
        speeds = [m.megabits_per_second for m in members if m.megabits_per_second > 0]
        usual = statistics.median(speeds) if len(speeds) > 2 else 0
        for m in members:
            if 0 < m.megabits_per_second < _SLOW_LINK * usual:
                yield warn(
                    f"{m} is linked at {m.megabits_per_second} Mbit/s",
                    expected=f"about {usual:.0f} Mbit/s, as the others of {subnet}",
                    meaning="Shuffles wait for this machine",
                    remedy="the cable, the port of the switch, or ethtool -s on that interface",
                )


def _look(node: Node) -> Iterator[Verdict]:
    before, drops = _segments(node.system), _drops()
    seconds = node.system.wait(node.window_seconds)
    yield from _judge_segments(before, _segments(node.system), node.window_seconds)
    for name, count in _drops().items():
        rate = (count - drops.get(name, count)) / seconds
        if rate > _DROPS_PER_SECOND:
            yield warn(
                f"{name} drops {rate:.0f} packets/s",
                expected=f"at most {_DROPS_PER_SECOND}/s",
                meaning="What was dropped is sent again after a wait",
                remedy=f"larger rings (ethtool -G {name} rx 4096), and net.core.netdev_max_backlog",
            )
    here = interfaces()
    yield from agree(here)
    yield ok(", ".join(f"{i.name} MTU {i.mtu}" for i in here) or "no interface besides loopback")


def _drops() -> dict[str, int]:
    return {name: c.dropin + c.dropout for name, c in psutil.net_io_counters(pernic=True).items() if name != "lo"}


def _segments(system: System) -> tuple[int, int] | None:
    """TCP segments sent, and sent again, since the namespace is there."""
    rows = [line.split() for line in (system.text("proc/net/snmp") or "").splitlines() if line.startswith("Tcp:")]
    if len(rows) != 2:
        return None
    values = dict(zip(rows[0][1:], map(int, rows[1][1:]), strict=True))
    return values["OutSegs"], values["RetransSegs"]


def _judge_segments(before: tuple[int, int] | None, after: tuple[int, int] | None, seconds: float) -> Iterator[Verdict]:
    """Of the window, where enough was sent in it; else since the start."""
    if before is None or after is None:
        return
    sent, again = after[0] - before[0], after[1] - before[1]
    when = f"in {seconds:g} s"
    if sent < _SEGMENTS:
        (sent, again), when = after, "since the start"
    if sent < _SEGMENTS:
        yield ok(f"{sent} TCP segments sent, too few to tell how many are lost")
        return
    share = again / sent
    text = f"{share:.2%} of {sent} TCP segments were sent again, {when}"
    if share <= _RETRANSMITTED_WARN:
        yield ok(text)
        return
    yield (fail if share > _RETRANSMITTED_FAIL else warn)(
        text,
        expected=f"at most {_RETRANSMITTED_WARN:.1%}",
        meaning="Transfers stop for a fifth of a second and longer each time",
        remedy="errors of the interface (ethtool -S), its duplex and MTU, the switch",
    )


CHECK = Check(
    id="T12",
    name="Network",
    looks_at="MTU and speed of interfaces, segments sent again in /proc/net/snmp, packets dropped",
    fails_when="fail: MTUs differ in a subnet (of a cluster, in one that workers listen in), more than 1 % of segments "
    "sent again; warn: more than 0.1 %, more than 10 drops/s, a link below a third of the median of its subnet",
    remedy="the interface's MTU, rings or cable",
    look=_look,
    once_per_host=True,
)
