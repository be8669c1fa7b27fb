"""T13: errors that the NVIDIA driver wrote into the kernel's log in the last day."""

from __future__ import annotations

import dataclasses
import os
import re
from typing import TYPE_CHECKING

from dask_gpurt.doctor.check import Check
from dask_gpurt.doctor.finding import fail, na, ok, warn
from dask_gpurt.doctor.gpu import NVIDIA, pci_devices

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dask_gpurt.backends.system import System
    from dask_gpurt.doctor.check import Node
    from dask_gpurt.doctor.finding import Verdict

#: those of a program: a kernel that reads where it may not, or was ended. All others, unknown ones too, are the card's.
OF_PROGRAMS = frozenset((13, 31, 43, 45, 68, 109))
#: behind the address may follow the instance of MIG: "(PCI:0000:01:00 GPU-I:05)"
_XID = re.compile(r"^\d+,\d+,(\d+),.*?;NVRM: Xid \(PCI:([0-9a-fA-F:.]+)[^)]*\): (\d+)")
_DAY_SECONDS = 86400.0
#: more than the kernel's ring holds (megabytes on a machine of many processors, the newest records last), in case that
#: somebody writes without end
_RECORDS = 1 << 18


@dataclasses.dataclass(frozen=True)
class Xid:
    """One error of a card."""

    number: int
    #: address on the PCI bus
    device: str
    #: since the system's start
    seconds: float


def xid_of(line: str) -> Xid | None:
    """The error that a line of /dev/kmsg tells of; None: it is about something else."""
    match = _XID.match(line)
    return None if match is None else Xid(int(match[3]), match[2], int(match[1]) / 1e6)


def opened(system: System) -> int:
    """The kernel's log, opened so that a read does not wait; OSError where this user may not read it."""
    return os.open(system.path("dev/kmsg"), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def lines(log: int, most: int) -> Iterator[str]:
    """What an opened log holds that was not read yet, of so many records at most."""
    for _ in range(most):
        try:
            record = os.read(log, 8192)
        except BlockingIOError:
            return
        except BrokenPipeError:
            continue  # the ring has gone on past this record
        if not record:
            return
        yield from record.decode("utf-8", "replace").splitlines()


def _look(node: Node) -> Iterator[Verdict]:
    system = node.system
    if not pci_devices(system, NVIDIA):
        yield na("no NVIDIA GPU")
        return
    uptime = float((system.text("proc/uptime") or "0").split()[0])
    counts: dict[tuple[int, str], int] = {}
    try:
        log = opened(system)
        try:
            for line in lines(log, _RECORDS):
                xid = xid_of(line)
                if xid is not None and xid.seconds > uptime - _DAY_SECONDS:
                    key = xid.number, xid.device
                    counts[key] = counts.get(key, 0) + 1
        finally:
            os.close(log)
    except OSError as e:
        yield na(f"the kernel's log cannot be read: {e.strerror}")
        return
    for (number, device), count in sorted(counts.items()):
        text = f"Xid {number} of {device}, {count} times in the last day"
        if number in OF_PROGRAMS:
            yield warn(
                text,
                expected="none",
                meaning="A program did what it must not: its worker's context is lost, and tasks there failed",
                remedy="restart that worker; compute-sanitizer on the task",
            )
        else:
            yield fail(
                text,
                expected="none",
                meaning="The card, its memory or its links are at fault: results that were on it may be wrong",
                remedy="drain this node, nvidia-smi --gpu-reset or a reboot; if it comes again, replace the card",
            )
    if not counts:
        yield ok("no Xid in the last day")


CHECK = Check(
    id="T13",
    name="Xid",
    looks_at="errors of the NVIDIA driver in /dev/kmsg, of the last day",
    fails_when="fail: any Xid but those of programs (13, 31, 43, 45, 68, 109), which warn",
    remedy="restart the worker; drain the node, reset or replace the card",
    look=_look,
    once_per_host=True,
)
