"""Runs a command in a network namespace of its own, and not as an almighty root.

Why the network: some upstream tests claim fixed ports (8786, 8787); in parallel runs, or beside another cluster of this
machine, they fail. Why the rights: tests that make a folder read-only with ``chmod`` expect the write to fail; root has
CAP_DAC_OVERRIDE, for which it succeeds.

The namespace gets a loopback interface that is up, a second address on it and a default route over it: distributed
finds its own address by a connected UDP socket, and warns when there is no route (a warning is an error in its
suite). Nothing leaves the machine. All of it is ioctl and prctl, so no tool needs to be installed.

As root: ``unshare(NEWNET)``; otherwise ``unshare(NEWUSER | NEWNET)`` with the user mapped to itself. A process cannot
leave a namespace that it could enter but not set up, so `probe` tries it in a child first; where it fails the command
runs on the shared network (``--shared-network``), and the status says so. Status: one JSON line on stderr, or, with
``--probe``, on stdout and no command is run: ``{"network": "own"|"shared: why", "rights": "no DAC override"|"ordinary
user"|"root: why"}``.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import socket
import struct
import subprocess
import sys

NEWNET, NEWUSER = 0x40000000, 0x10000000
SIOCADDRT, SIOCSIFFLAGS, SIOCSIFADDR, SIOCSIFNETMASK = 0x890B, 0x8914, 0x8916, 0x891C
IFF_UP_RUNNING, RTF_UP = 0x1 | 0x40, 0x1
PR_CAPBSET_DROP = 24
#: CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
DAC_CAPS = (1, 2)
#: Any private address that is no loopback address: the one that distributed finds as "the address of this machine".
ADDRESS, NETMASK = "10.98.0.1", "255.255.255.0"

_libc = ctypes.CDLL(None, use_errno=True)


class _Route(ctypes.Structure):
    """``struct rtentry`` of linux/route.h."""

    _fields_ = (
        ("pad1", ctypes.c_ulong),
        ("dst", ctypes.c_char * 16),
        ("gateway", ctypes.c_char * 16),
        ("genmask", ctypes.c_char * 16),
        ("flags", ctypes.c_ushort),
        ("pad2", ctypes.c_short),
        ("pad3", ctypes.c_ulong),
        ("pad4", ctypes.c_void_p),
        ("metric", ctypes.c_short),
        ("dev", ctypes.c_char_p),
        ("mtu", ctypes.c_ulong),
        ("window", ctypes.c_ulong),
        ("irtt", ctypes.c_ushort),
    )


def _call(what: str, result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def _inet(address: str) -> bytes:
    return struct.pack("=HH4s8x", socket.AF_INET, 0, socket.inet_aton(address))


def _network_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        fcntl.ioctl(s, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP_RUNNING))
        fcntl.ioctl(s, SIOCSIFADDR, struct.pack("16s16s", b"lo:1", _inet(ADDRESS)))
        fcntl.ioctl(s, SIOCSIFNETMASK, struct.pack("16s16s", b"lo:1", _inet(NETMASK)))
        route = _Route(dst=_inet("0.0.0.0"), genmask=_inet("0.0.0.0"), flags=RTF_UP, dev=b"lo")
        _call("default route over lo", _libc.ioctl(s.fileno(), ctypes.c_ulong(SIOCADDRT), ctypes.byref(route)))


def enter_own_network() -> None:
    """Enters a new network namespace and sets it up. Raises OSError; the process is of no use after that."""
    uid, gid = os.getuid(), os.getgid()
    _call("unshare", _libc.unshare(NEWNET if uid == 0 else NEWNET | NEWUSER))
    if uid != 0:
        for path, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{path}", "w") as f:
                f.write(text)
    _network_up()


def plain_rights() -> str:
    """Drops the capabilities that let root ignore file modes, from the next exec on; returns what was reached."""
    if os.geteuid() != 0:
        return "ordinary user"
    try:
        for cap in DAC_CAPS:
            _call("prctl", _libc.prctl(PR_CAPBSET_DROP, cap, 0, 0, 0))
        with open("/proc/self/status") as f:
            inheritable = next(int(line.split()[1], 16) for line in f if line.startswith("CapInh:"))
    except OSError as e:
        return f"root: {e}"
    if inheritable & sum(1 << cap for cap in DAC_CAPS):
        return "root: DAC override is inheritable"
    return "no DAC override"


def probe() -> dict[str, str]:
    """What a child of this process gets, as the status described above."""
    out = subprocess.run([sys.executable, __file__, "--probe"], capture_output=True, text=True, timeout=60, check=False)
    if out.returncode == 0:
        return dict(json.loads(out.stdout))
    return {"network": f"shared: {(out.stderr.strip() or 'the probe failed').splitlines()[-1]}", "rights": "unknown"}


def main(argv: list[str]) -> None:
    """``isolate.py [--shared-network] COMMAND ...`` or ``isolate.py --probe``."""
    if not argv:
        sys.exit("usage: isolate.py --probe | [--shared-network] COMMAND ARGUMENT...")
    network = "own"
    if argv[0] == "--shared-network":
        network, argv = "shared: as asked", argv[1:]
    elif argv == ["--probe"]:
        try:
            enter_own_network()
        except OSError as e:
            network = f"shared: {e}"
        sys.stdout.write(json.dumps({"network": network, "rights": plain_rights()}) + "\n")
        return
    else:
        enter_own_network()
    sys.stderr.write(json.dumps({"network": network, "rights": plain_rights()}) + "\n")
    sys.stderr.flush()
    os.execvp(argv[0], argv)


if __name__ == "__main__":
    main(sys.argv[1:])
