"""Ours: limits of the process, shared memory, swap, the clock, certificates."""

from __future__ import annotations

import os
import re
import time
from typing import TYPE_CHECKING

from dask_gpurt.doctor.certificates import end_of
from dask_gpurt.doctor.check import Check
from dask_gpurt.doctor.finding import fail, na, ok, warn
from dask_gpurt.doctor.nic import is_infiniband, ucx_installed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dask_gpurt.backends.system import System
    from dask_gpurt.doctor.check import Node
    from dask_gpurt.doctor.finding import Verdict

_FILES_WARN, _FILES_FAIL = 4096, 512
_SHM_BYTES = 256 << 20
#: pages a second
_SWAPPING = 256
_CLOCK_WARN, _CLOCK_FAIL = 0.1, 1.0
_DAYS = 14
#: number of a capability
_IPC_LOCK = 14


def _limits(node: Node) -> Iterator[Verdict]:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _FILES_WARN:
        yield (fail if soft < _FILES_FAIL else warn)(
            f"{soft} files and sockets may be open (hard limit {hard})",
            expected=f"at least {_FILES_WARN}",
            meaning="Each peer takes sockets, and each spilled value a file: 'Too many open files' on a large cluster",
            remedy="ulimit -n 65536 before the start, LimitNOFILE of the service, --ulimit nofile of the container",
        )
    else:
        yield ok(f"{'no limit of' if soft < 0 else soft} open files")
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if 0 <= soft < 1 << 30:
        yield fail(
            f"files may have {soft} bytes (RLIMIT_FSIZE)",
            expected="no limit",
            meaning="Larger values cannot be spilled",
            remedy="ulimit -f unlimited before the start",
        )
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    cards = "sys/class/infiniband"
    ports = [(card, p) for card in node.system.names(cards) for p in node.system.names(cards, card, "ports")]
    # Of RoCE, which may be just the card of this machine, only where UCX is there to use it.
    used = ports and (ucx_installed() or any(is_infiniband(node.system, *port) for port in ports))
    if soft >= 0 and used and not _may_lock(node.system):
        yield warn(
            f"{soft} bytes may be locked in memory, and there is InfiniBand",
            expected="no limit",
            meaning="UCX cannot register memory with the card, and takes TCP",
            remedy="ulimit -l unlimited before the start; of a container --ulimit memlock=-1, or IPC_LOCK",
        )


def _may_lock(system: System) -> bool:
    """Whether the limit of locked memory does not bind: with the capability IPC_LOCK, as pods with such cards are given
    it, and not in a user namespace, where the kernel does not count it."""
    status = system.text("proc/self/status") or ""
    held = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.M)
    return (
        held is not None
        and bool(int(held[1], 16) >> _IPC_LOCK & 1)
        and (system.text("proc/self/uid_map") or "").split() == ["0", "0", str(2**32 - 1)]
    )


def _shm(node: Node) -> Iterator[Verdict]:
    path = node.system.path("dev/shm")
    remedy = "--shm-size 1g of the container, or an emptyDir with medium: Memory at /dev/shm"
    expected, meaning = (
        "at least 256 MiB",
        "UCX has no shared memory for peers on this host, and copies through sockets",
    )
    try:
        space = os.statvfs(path)
    except OSError as e:
        yield warn(f"{path}: {e.strerror}", expected=expected, meaning=meaning, remedy=remedy)
        return
    free = space.f_bavail * space.f_frsize
    if free < _SHM_BYTES:
        yield warn(f"{path} has {free >> 20} MiB free", expected=expected, meaning=meaning, remedy=remedy)
    else:
        yield ok(f"{free >> 20} MiB free")


def _swap(node: Node) -> Iterator[Verdict]:
    def pages() -> int | None:
        fields = node.system.fields("proc/vmstat")
        return fields["pswpin"] + fields["pswpout"] if {"pswpin", "pswpout"} <= fields.keys() else None

    before = pages()
    seconds = node.system.wait(node.window_seconds)
    after = pages()
    memory = node.system.fields("proc/meminfo")
    used = (memory.get("SwapTotal", 0) - memory.get("SwapFree", 0)) / 1024
    if before is None or after is None:
        yield na("the kernel does not tell")
        return
    rate = (after - before) / seconds
    if rate > _SWAPPING:
        yield warn(
            f"{rate:.0f} pages/s are swapped, {used:.0f} MiB are in swap",
            expected=f"at most {_SWAPPING} pages/s",
            meaning="Memory is overcommitted: all processes wait, and spilling reads values from swap first",
            remedy="a lower --memory-limit, fewer workers on this machine, or swapoff -a",
        )
    else:
        yield ok(f"{used:.0f} MiB in use, {rate:.0f} pages/s")


def _clock(node: Node) -> Iterator[Verdict]:
    if node.clock_seconds is None:
        yield na("no scheduler to compare with")
        return
    delay = abs(node.clock_seconds)
    if delay <= _CLOCK_WARN:
        yield ok(f"{delay * 1e3:.0f} ms from the scheduler's")
        return
    yield (fail if delay > _CLOCK_FAIL else warn)(
        f"the clock is {delay:.2f} s from the scheduler's",
        expected=f"at most {_CLOCK_WARN:g} s",
        meaning="Times of tasks and transfers are wrong, so traces, reports and what placement learns of links are too",
        remedy="start chrony or another NTP client on both machines",
    )


def _tls(node: Node) -> Iterator[Verdict]:
    # All of a chain have to be valid, and one of the authorities: while they change the old one stays beside the new.
    ends = {**dict.fromkeys(node.authorities, max), **dict.fromkeys(node.certificates, min)}
    if not ends:
        yield na("no certificates are configured")
    for pem, which in ends.items():
        name = pem if "\n" not in pem else "the certificate in the configuration"
        try:
            days = (end_of(pem, which) - time.time()) / 86400
        except (OSError, ValueError) as e:
            yield fail(
                f"{name} cannot be read: {e}",
                expected="a certificate in PEM format",
                meaning="A process that is started now cannot connect",
                remedy="the paths under distributed.comm.tls, and their permissions",
            )
            continue
        if days >= _DAYS:
            yield ok(f"{name} ends in {days:.0f} days")
            continue
        yield (fail if days < 0 else warn)(
            f"{name} ended {-days:.0f} days ago" if days < 0 else f"{name} ends in {days:.1f} days",
            expected=f"more than {_DAYS} days",
            meaning="Processes that are started after it has ended cannot connect",
            remedy="a new certificate, then a restart of the cluster",
        )


CHECKS = (
    Check(
        id="limits",
        name="Limits",
        looks_at="RLIMIT_NOFILE, RLIMIT_FSIZE, RLIMIT_MEMLOCK beside InfiniBand",
        fails_when="fail: fewer than 512 open files, files limited below 1 GiB; warn: fewer than 4096 open files, "
        "locked memory limited beside InfiniBand",
        remedy="ulimit -n 65536, ulimit -f unlimited, ulimit -l unlimited",
        look=_limits,
    ),
    Check(
        id="shm",
        name="Shared memory",
        looks_at="free space of /dev/shm",
        fails_when="warn: less than 256 MiB",
        remedy="--shm-size of the container",
        look=_shm,
        once_per_host=True,
    ),
    Check(
        id="swap",
        name="Swap",
        looks_at="pages swapped in /proc/vmstat",
        fails_when="warn: more than 256 pages/s",
        remedy="a lower memory limit, or swapoff",
        look=_swap,
        once_per_host=True,
    ),
    Check(
        id="clock",
        name="Clock",
        looks_at="this clock and the scheduler's, as of the last heartbeat",
        fails_when="fail: more than 1 s apart; warn: more than 0.1 s",
        remedy="an NTP client on both machines",
        look=_clock,
    ),
    Check(
        id="tls",
        name="TLS",
        looks_at="the end of certificates; of a cluster, addresses with and without TLS",
        fails_when="fail: a certificate has ended or cannot be read, some listen with TLS and some without; warn: "
        "it ends within 14 days",
        remedy="a new certificate",
        look=_tls,
    ),
)
