"""Two racks on one machine: rack A = nodes 0 (scheduler and client), 1, 2; rack B = nodes 3, 4.

Each node is a network namespace; a bridge joins the nodes of a rack, `wire.c` the two bridges. Needs root, ``ip``
with network namespaces, ``/dev/net/tun`` and a C compiler; `why_not` says what is missing.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import TracebackType

HERE = os.path.dirname(os.path.abspath(__file__))
#: node -> rack
RACK = ("a", "a", "a", "b", "b")
MTU = "9000"


def why_not() -> str | None:
    """Why the racks cannot be built on this machine; None: they can."""
    if os.geteuid() != 0:
        return "network namespaces need root. Remedy: run it as root, or in a container with CAP_NET_ADMIN"
    for tool, remedy in (("ip", "install iproute2"), ("gcc", "install a C compiler")):
        if shutil.which(tool) is None:
            return f"{tool} is not there. Remedy: {remedy}"
    if not os.path.exists("/dev/net/tun"):
        return "/dev/net/tun is not there. Remedy: modprobe tun, or pass the device to the container"
    probe = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
    if probe.returncode:
        return f"ip netns does not work: {probe.stderr.strip()}. Remedy: a kernel with network namespaces"
    return None


def prepare(name: str) -> None:
    """Before racks are built: end a program that cannot, and have it take them down when it is ended from outside."""
    missing = why_not()
    if missing is not None:
        raise SystemExit(f"{name}: {missing}")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(f"{name}: ended by signal {number}"))


class Racks:
    """Builds the racks on entry and removes them on exit.

    Parameters
    ----------
    delay_ms
        One way, over the wire between the racks.
    rate_mbit
        Of that wire, each way.
    """

    def __init__(self, delay_ms: float = 10.0, rate_mbit: float = 100.0) -> None:
        self.delay_ms = delay_ms
        self.rate_mbit = rate_mbit
        self.prefix = f"gr{os.getpid()}"
        self._wire: subprocess.Popen[str] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._spaces: list[str] = []

    def node(self, i: int) -> str:
        """Name of a node's namespace."""
        return f"{self.prefix}n{i}"

    def address(self, i: int) -> str:
        return f"10.98.77.{10 + i}"

    def command(self, i: int) -> list[str]:
        """What to put before a command so that it runs on a node."""
        return ["ip", "netns", "exec", self.node(i)]

    def __enter__(self) -> Racks:
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _space(self, name: str) -> str:
        _ip("netns", "add", name)
        self._spaces.append(name)
        _ip("-n", name, "link", "set", "lo", "up")
        return name

    def _switch(self, rack: str) -> str:
        return f"{self.prefix}{rack}"

    def _build(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        binary = os.path.join(self._folder.name, "wire")
        subprocess.run(["gcc", "-O2", "-o", binary, os.path.join(HERE, "wire.c")], check=True)
        for rack in "ab":
            switch = self._space(self._switch(rack))
            _ip("-n", switch, "link", "add", "br0", "mtu", MTU, "type", "bridge")
            _ip("-n", switch, "link", "set", "br0", "up")
        for i, rack in enumerate(RACK):
            node, switch = self._space(self.node(i)), self._switch(rack)
            port = f"p{i}"
            # fmt: off
            _ip("-n", switch, "link", "add", port, "mtu", MTU, "type", "veth", "peer", "name", "eth0", "netns", node)
            # fmt: on
            _ip("-n", node, "link", "set", "eth0", "mtu", MTU)
            _ip("-n", switch, "link", "set", port, "master", "br0", "up")
            _ip("-n", node, "addr", "add", f"{self.address(i)}/24", "dev", "eth0")
            _ip("-n", node, "link", "set", "eth0", "up")
            _ip("-n", node, "route", "add", "default", "via", "10.98.77.1")
        a, b = self._switch("a"), self._switch("b")
        self._wire = subprocess.Popen(
            [binary, a, "wire0", b, "wire0", str(self.delay_ms), str(self.rate_mbit)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        out: IO[str] | None = self._wire.stdout
        assert out is not None
        if out.readline().strip() != "ready":
            raise RuntimeError("the wire did not come up; its message is above")
        for switch in (a, b):
            _ip("-n", switch, "link", "set", "wire0", "mtu", MTU, "master", "br0", "up")

    def _remove(self) -> None:
        if self._wire is not None:
            self._wire.terminate()
            self._wire.wait()
            self._wire = None
        for name in reversed(self._spaces):
            subprocess.run(["ip", "netns", "del", name], check=False)
        self._spaces.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def wire_bytes(switch: str) -> int:
    """Bytes that have crossed the wire, both ways, with all headers. `switch` is the namespace of one rack's bridge."""
    shown = subprocess.run(
        ["ip", "-n", switch, "-s", "-j", "link", "show", "dev", "wire0"], capture_output=True, text=True, check=True
    )
    stats: dict[str, Any] = json.loads(shown.stdout)[0]["stats64"]
    return int(stats["rx"]["bytes"]) + int(stats["tx"]["bytes"])


def _ip(*args: str) -> None:
    done = subprocess.run(["ip", *args], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(args)}: {done.stderr.strip()}")
