"""Where a peer is, from what both say of themselves, and which transports are worth opening for that place."""

from __future__ import annotations

import os
import uuid

from dask_gpurt.shuffle.transport.select.selector import Locality

#: whether `auto` opens UCX between workers of one host: for device buffers, as all others prefer tcp. Off, see
#: `candidates`; tests over the stand-in for device memory switch it on
UCX_ON_HOST = False
_TOKEN = uuid.uuid4().hex


def process_token() -> str:
    """Equal for two workers in one process."""
    return f"{os.getpid()}-{_TOKEN}"


def host_token() -> str:
    """Equal for two processes that can share memory.

    That takes one boot of one kernel, one namespace of System V memory and of process ids, and one network: what has a
    network of its own was set up as a host of its own, and traffic past that network would evade what is metered,
    limited or forbidden there.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as f:
            boot = f.read().strip()
        return "-".join([boot, *(os.readlink(f"/proc/self/ns/{name}") for name in ("ipc", "pid", "net"))])
    except OSError:  # not Linux: no other process counts as on this host
        return uuid.uuid4().hex


def candidates(place: Locality) -> list[str]:
    """The transports that `auto` opens for a peer at this place, where nothing forbids it."""
    # Over plain Ethernet UCX loses to sockets. On one host it is up to 1.45 times faster than `cma` when nothing else
    # runs, but not inside of a shuffle, which keeps the cores busy that its thread wants: 2 % more wall time at 16
    # partitions, 15 % at 64 (`benchmarks/transport.py`, with and without `--shuffle`). Device buffers: single messages
    # took 250 GB/s between two processes of an H200, yet a shuffle of 2 GB did not end there in 50 s, and by tcp it
    # did (`benchmarks/results/gpu`). Until that is understood they are staged.
    return ["tcp", "ucx"] if UCX_ON_HOST and place is Locality.HOST else ["tcp"]


def locality_of(process: str, host: str) -> Locality:
    """Where a peer with these tokens is, seen from here."""
    if process == process_token():
        return Locality.PROCESS
    return Locality.HOST if host == host_token() else Locality.REMOTE
