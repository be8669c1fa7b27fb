"""`Check` and `run`: each check in a thread of its own, with a time limit. One that hangs or raises is a finding.

Checks run beside each other, since most of them wait: they take two looks a second apart. Those that measure
(`Check.alone`) run first, one at a time. A thread cannot be ended: one that hangs (a dead network mount) is left, and
until it ends its check is not started again in this process.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import TYPE_CHECKING

import psutil

from dask_gpurt.doctor.finding import Finding, State, Verdict, findings_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from dask_gpurt.backends.system import System
    from dask_gpurt.doctor.feed import Fed
    from dask_gpurt.doctor.gpus import Gpu

#: seconds for all checks together
TOTAL_SECONDS = 9.0
#: of its time that a check computes at least, if it does not hang: one that waits for a dead mount takes no processor
_COMPUTES = 0.02


@dataclasses.dataclass(frozen=True)
class Node:
    """What checks may look at. Of a worker, or of this machine, where some of it is unknown."""

    system: System
    gpu: Gpu
    environ: Mapping[str, str]
    #: where values are spilled to
    folders: tuple[str, ...]
    #: that is always left free there
    reserve_bytes: int | None = 0
    #: of a worker
    threads: int | None = None
    memory_limit_bytes: int | None = None
    #: allocations on the GPU that failed although there was room by the count
    fragmented: int = 0
    #: what its tasks kept busy lately; None: nothing is known
    fed: Fed | None = None
    #: this clock less the scheduler's
    clock_seconds: float | None = None
    #: paths of PEM files or their text
    certificates: tuple[str, ...] = ()
    #: and of authorities: one of several in a file may have ended, as when they change
    authorities: tuple[str, ...] = ()
    #: between two looks
    window_seconds: float = 1.0


@dataclasses.dataclass(frozen=True)
class Check:
    """A check, and its row in docs/doctor.md."""

    id: str
    name: str
    looks_at: str
    #: and when it warns
    fails_when: str
    remedy: str
    look: Callable[[Node], Iterable[Verdict]]
    limit_seconds: float = 5.0
    #: it measures: nothing else runs meanwhile
    alone: bool = False
    #: workers of one host would all say the same
    once_per_host: bool = False


class _Running:
    """One check in its thread."""

    def __init__(self, check: Check, node: Node) -> None:
        self.check = check
        self._node = node
        self._verdicts: list[Verdict] = []
        self._error: BaseException | None = None
        self.started = time.monotonic()
        self._seconds = 0.0
        self.thread = threading.Thread(target=self._run, name=f"gpurt-doctor-{check.id}", daemon=True)

    def start(self) -> None:
        """Begin; that no thread can be had is a finding too."""
        try:
            self.thread.start()
        except RuntimeError as e:
            self._error = e

    def _run(self) -> None:
        try:
            # One by one: what was found before it hangs or raises is true.
            for verdict in self.check.look(self._node):
                self._verdicts.append(verdict)
        except BaseException as e:  # whatever a broken node raises
            self._error = e
        self._seconds = time.monotonic() - self.started

    def _computed(self) -> float:
        """Processor seconds of its thread. By the kernel's table, as its clock must not be read once it has ended."""
        mine = (t for t in psutil.Process().threads() if t.id == self.thread.native_id)
        return sum(t.user_time + t.system_time for t in mine)

    def findings(self) -> list[Finding]:
        """What it says now, ended or not."""
        if self.thread.is_alive():
            seconds = time.monotonic() - self.started
            # With its own limit not reached, the time for all checks was over; one that computes is not stuck. A busy
            # machine is no fault of a part.
            hangs = seconds >= self.check.limit_seconds and self._computed() < _COMPUTES * seconds
            verdict = Verdict(
                State.FAIL if hangs else State.WARN,
                f"no answer after {seconds:.1f} s"
                + ("" if hangs else ", when its time, or that for all checks, was over"),
                f"an answer within {self.check.limit_seconds:g} s" if hangs else "an answer",
                "What this check looks at hangs, and work that needs it will"
                if hangs
                else "Nothing is known about what this check looks at: the machine is busy, or it hangs",
                f"look at {self.check.looks_at} by hand (a dead network mount, a driver that hangs: dmesg)",
            )
            return findings_of(self.check.id, self.check.name, [*self._verdicts, verdict], seconds)
        if self._error is not None:
            verdict = Verdict(
                State.WARN,
                f"the check ended with {type(self._error).__name__}: {' '.join(str(self._error).split())}",
                "an answer",
                "Nothing is known about what this check looks at",
                f"look at {self.check.looks_at} by hand, and report this",
            )
            return findings_of(self.check.id, self.check.name, [*self._verdicts, verdict], self._seconds)
        return findings_of(self.check.id, self.check.name, self._verdicts, self._seconds)


#: checks that did not end in time, by id
_hanging: dict[str, _Running] = {}


def run(checks: Sequence[Check], node: Node, *, total_seconds: float = TOTAL_SECONDS) -> list[Finding]:
    """Run checks; returns their findings in the order of the checks. Blocks: not for an event loop.

    Parameters
    ----------
    total_seconds
        For all of them; each has its own limit as well.
    """
    deadline = time.monotonic() + total_seconds
    running: dict[str, _Running] = {}
    for check in sorted(checks, key=lambda c: not c.alone):
        one = running[check.id] = _start(check, node)
        if check.alone:
            _wait(one, deadline)
    for one in running.values():
        _wait(one, deadline)
    return [finding for check in checks for finding in running[check.id].findings()]


def _start(check: Check, node: Node) -> _Running:
    before = _hanging.get(check.id)
    if before is not None and before.thread.is_alive():
        return before
    one = _Running(check, node)
    one.start()
    return one


def _wait(one: _Running, deadline: float) -> None:
    until = min(deadline, one.started + one.check.limit_seconds)
    if one.thread.is_alive():
        one.thread.join(max(0.0, until - time.monotonic()))
    if one.thread.is_alive():
        _hanging[one.check.id] = one
    elif _hanging.get(one.check.id) is one:
        del _hanging[one.check.id]
