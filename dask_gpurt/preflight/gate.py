"""`Gate`: on the scheduler, no task reaches a worker before it has proved itself.

A worker registers as ``init`` and tells that it is ``running`` a moment later. The gate keeps that message back while
``gpurt.preflight`` is ``hold`` or ``close``. In the scheduler's books the worker stays ``init``: it gets no task, no
stolen one, no scattered value and no replica, and it answers calls. ``Client.wait_for_workers`` waits for it. When it
has passed, the message goes where it would have gone.

* It passes when no finding is `State.FAIL`. One that is slow computes again, up to `judge.ATTEMPTS` times.
* It passes with a warning when there is no answer for `LIMIT_SECONDS`, or it has not got this package.
* It fails when its part could not be set up: another version, or a folder that it cannot write.
* Held workers stay so, and `status` shows why. Only when no worker has passed for `LIMIT_SECONDS`, they are let go with
  a warning: a check that is wrong about all of them must not end a cluster.
* Where ``distributed.scheduler.no-workers-timeout`` is set, a third of it is the limit if that is less: tasks must not
  fail because of the gate.

With ``warn`` nothing is kept back: workers are checked when they have had no task for a while.

Taken over: ``scheduler.stream_handlers["worker-status-change"]``, only where workers are kept back. An exception in
ours lets the message pass.

Rejected: setting a status on the worker, which its memory monitor sets back; checks in ``setup``, during which tasks
come and calls wait.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import random
import time
from typing import TYPE_CHECKING, Any

import dask.config
from dask.utils import parse_timedelta
from distributed import SchedulerPlugin
from distributed.core import Status
from distributed.protocol import pickle

from dask_gpurt.backends.system import stack
from dask_gpurt.model.checks import require_call, require_names
from dask_gpurt.model.circuit_breaker import Guard
from dask_gpurt.model.events import Event, Sink, null_sink
from dask_gpurt.model.no_hook import ignored
from dask_gpurt.model.node_class import EXTRA, NodeClass
from dask_gpurt.model.wrapped import StatusChanges
from dask_gpurt.preflight import judge
from dask_gpurt.preflight.checks import Finding, State
from dask_gpurt.preflight.members import Member, Mode, Phase
from dask_gpurt.preflight.restrictions import ClassRestrictions
from dask_gpurt.preflight.worker import OP

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distributed import Scheduler

logger = logging.getLogger("distributed.scheduler.gpurt")

#: without an answer, or with all workers held
LIMIT_SECONDS = 60.0
#: of the scheduler, used here and in `restrictions`
_NAMES = ("handlers", "unrunnable", "close_worker", "bulk_schedule_unrunnable_after_adding_worker", "transitions")
#: what becomes of workers
_COUNTED = ("clean", "warned", "failed", "closed", "no_answer", "let_go")
#: between looks for workers that do not answer, while there are any
_TICK_SECONDS = 1.0


class Gate(SchedulerPlugin):
    """The gate of one scheduler.

    Parameters
    ----------
    mode
        What becomes of a worker that fails.
    imports
        Modules that each worker must be able to import, beside those of the engines.
    sink
        Gets one event for each worker with findings.
    """

    name = "gpurt-preflight"
    transition = ignored

    def __init__(self, mode: Mode, imports: Sequence[str] = (), *, sink: Sink = null_sink) -> None:
        self.mode = mode
        self.members: dict[str, Member] = {}
        self.restrictions = ClassRestrictions()
        self.guard = Guard("preflight", logger, sink=sink)
        #: what became of workers, by word
        self.counts = dict.fromkeys(_COUNTED, 0)
        self._imports = tuple(imports)
        self._sink = sink
        self._clock = time.monotonic
        self._draw = random.Random()
        self._stack: dict[str, str] = {}
        self._scheduler: Scheduler | None = None
        self._running: StatusChanges | None = None
        self._timer: asyncio.TimerHandle | None = None
        #: since when workers are held and none has passed; None: that is not so
        self._none_since: float | None = None
        #: whether it was said that all are held
        self._said = False

    # ------------------------------------------------------------------ life

    async def start(self, scheduler: Scheduler) -> None:
        """Install. Workers that are there go on. A second call does nothing.

        Raises
        ------
        SeamMismatch
            This distributed is not one we know. Nothing was changed.
        """
        if self._scheduler is not None:
            return
        handler = scheduler.stream_handlers.get("worker-status-change")
        require_call(handler, "the scheduler's worker-status-change", status="running", worker="w", stimulus_id="s")
        require_names(scheduler, "Scheduler", _NAMES)
        self._stack = await asyncio.to_thread(stack)
        self._scheduler = scheduler
        self.restrictions.start(scheduler)
        scheduler.handlers[OP] = self.answer
        if self.mode.holds:
            self._running = StatusChanges(scheduler.stream_handlers, self._keeps)
            self._running.install()
        for address in scheduler.workers:
            self.members[address] = Member(address, self._clock(), gated=False)

    async def close(self) -> None:
        """The scheduler closes."""
        if self._timer is not None:
            self._timer.cancel()

    def stop(self) -> None:
        """Let all workers go, and leave the scheduler as it was."""
        for member in self.members.values():
            self._pass(member)
        if self._running is not None:
            self._running.uninstall()
        if self._timer is not None:
            self._timer.cancel()
        if self._scheduler is not None and self._scheduler.handlers.get(OP) == self.answer:
            del self._scheduler.handlers[OP]
        self.members.clear()
        self.restrictions.stop()
        self._scheduler = self._timer = None

    @property
    def limit_seconds(self) -> float:
        """For how long a worker is kept from work for want of an answer, or with all others."""
        limit = parse_timedelta(dask.config.get("distributed.scheduler.no-workers-timeout", None))
        return LIMIT_SECONDS if limit is None else min(LIMIT_SECONDS, limit / 3)

    # ------------------------------------------------------------------ events of the scheduler

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """A worker registers. It has not got its plugins yet."""
        gated = self.mode.holds and scheduler.workers[worker].status is Status.init
        self.members[worker] = Member(worker, self._clock(), gated=gated)
        if gated:
            self._arm()

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """A worker has left."""
        self.members.pop(worker, None)
        self.restrictions.left(worker)

    def update_graph(self, scheduler: Scheduler, *, annotations: dict[str, dict[Any, Any]], **kwargs: Any) -> None:
        """Tasks have come, which may ask for a class of nodes."""
        asked = annotations.get("gpurt")
        if asked:
            for text in self.restrictions.ask(asked, self._nodes()):
                self._sink(Event("preflight.annotation", text))  # which limits the lines in the log
                self._warn_clients(text)

    def _member(self, worker: str) -> Member | None:
        """By the address that the worker has for itself; the scheduler may have resolved a name in it."""
        if worker in self.members or self._scheduler is None:
            return self.members.get(worker)
        return self.members.get(self._scheduler.coerce_address(worker))

    def _nodes(self) -> dict[str, NodeClass]:
        return {m.address: m.node for m in self.members.values() if m.node is not None}

    def _keeps(self, status: str, worker: str, stimulus_id: str) -> bool:
        """Whether a change of status is not for the scheduler yet."""
        try:
            member = self.members.get(worker)
            if member is None or not member.kept:
                return False
            member.running = stimulus_id if status == "running" else None
            return member.running is not None
        except Exception:
            self.guard.failed("worker-status-change")
            return False

    # ------------------------------------------------------------------ what workers say

    def refused(self, worker: str, why: str, *, absent: bool) -> None:
        """A worker could not set up its part; `absent`: this package is not there, and it was not asked to be."""
        member = self._member(worker)
        if member is None or member.phase is not Phase.CHECKING:
            return
        found, _, remedy = why.partition(" Remedy: ")
        state = State.WARN if absent else State.FAIL
        member.findings["setup"] = Finding("setup", state, found.rstrip("."), "the part of dask-gpurt", remedy)
        self._decide(member)

    async def answer(self, worker: str, node: dict[str, Any] | None = None, report: Any = None) -> dict[str, Any]:
        """What a worker has told of itself or found; the answer says what it is to do next."""
        member = self._member(worker)
        if member is None or self._scheduler is None:
            return {}
        try:
            if node is not None:
                return self._told(member, NodeClass.from_dict(node))
            return self._reported(member, report)
        except Exception:
            self.guard.failed("report")
            self._pass(member)
            return {}

    def _told(self, member: Member, node: NodeClass) -> dict[str, Any]:
        assert self._scheduler is not None
        member.node = node
        self._scheduler.workers[member.address].extra[EXTRA] = node.to_dict()
        self.restrictions.joined(member.address, node)
        finding = judge.stack(dict(node.stack), self._stack)
        member.findings[finding.check] = finding
        hosts = {m.address: m.host for m in self.members.values() if m.node is not None and m is not member}
        return {
            "check": self.mode is not Mode.OFF,
            "held": member.kept,
            "imports": list(self._imports),
            "peers": judge.choose_peers(member.host, hosts, self._draw),
        }

    def _reported(self, member: Member, report: dict[str, Any]) -> dict[str, Any]:
        assert self._scheduler is not None
        findings = [Finding.from_dict(told) for told in report["findings"]]
        if report["peers"]:
            findings.append(judge.peers(report["peers"], self._scheduler.workers))
            member.peers = report["peers"]
        if report["own_seconds"] is not None:
            member.attempts += 1
            member.own_seconds = min(float(report["own_seconds"]), member.own_seconds or float("inf"))
            speed = judge.speed(member.own_seconds, self._others(member))
            findings.append(speed)
            if speed.state in (State.WARN, State.FAIL) and member.attempts < judge.ATTEMPTS:
                member.findings |= {finding.check: finding for finding in findings}
                return {"again": True}
        member.findings |= {finding.check: finding for finding in findings}
        self._decide(member)
        return {}

    def _others(self, member: Member) -> list[float]:
        """Times of the other workers of its class."""
        key = "" if member.node is None else member.node.key
        alike = (m for m in self.members.values() if m is not member and m.node is not None and m.node.key == key)
        return [m.own_seconds for m in alike if m.own_seconds is not None]

    # ------------------------------------------------------------------ verdicts

    def _decide(self, member: Member) -> None:
        """All of a worker's findings are there."""
        failed = member.found(State.FAIL)
        said = "; ".join(finding.said() for finding in failed or member.found(State.WARN))
        word = "failed" if failed else "warned" if said else "clean"
        held = bool(failed) and self.mode.holds and member.gated and member.phase is Phase.CHECKING
        if said:
            what = "gets no task" if held else "works on"
            fields = {"worker": member.address, "held": held, "findings": said}
            self._sink(Event(f"preflight.{word}", f"worker {member.address} {what}. {said}", fields))
        self.counts[word] += 1
        if not held:
            self._pass(member)
            return
        member.phase = Phase.HELD
        if self.mode is Mode.CLOSE and any(m.phase is not Phase.HELD for m in self.members.values()):
            assert self._scheduler is not None
            self.counts["closed"] += 1
            self._scheduler.close_worker(member.address)
        self._count_down()

    def _pass(self, member: Member) -> None:
        """A worker may work. Its `running`, if it was kept back, goes on."""
        stimulus_id, kept = member.running, member.kept
        member.phase, member.running = Phase.PASSED, None
        if not kept or stimulus_id is None or self._running is None or self._scheduler is None:
            return
        ws = self._scheduler.workers.get(member.address)
        # Not one that is being retired meanwhile.
        if ws is not None and ws.status in (Status.init, Status.paused):
            self._running.deliver(member.address, stimulus_id)

    def _count_down(self) -> None:
        """Begin to wait when no worker may work, and say so once all are held. Those that still come do not end it."""
        phases = {member.phase for member in self.members.values()}
        if Phase.HELD not in phases or Phase.PASSED in phases:
            self._none_since, self._said = None, False
            return
        if self._none_since is None:
            self._none_since = self._clock()
        if phases == {Phase.HELD} and not self._said:
            self._said = True
            text = (
                f"dask-gpurt: all {len(self.members)} workers failed their checks, so no task runs. They are let go "
                f"after {self.limit_seconds:g} s nevertheless. {self._worst()}"
            )
            logger.warning("%s", text)
            self._warn_clients(text)

    def _worst(self) -> str:
        """What most held workers have found."""
        held = (m for m in self.members.values() if m.phase is Phase.HELD)
        said = collections.Counter(finding.said() for m in held for finding in m.found(State.FAIL))
        return said.most_common(1)[0][0] if said else ""

    def _arm(self) -> None:
        if self._timer is None and self._scheduler is not None:
            self._timer = asyncio.get_running_loop().call_later(_TICK_SECONDS, self._tick)

    def _tick(self) -> None:
        self._timer = None
        try:
            self.look()
        except Exception:
            self.guard.failed("limits")
            for member in self.members.values():
                self._pass(member)
        if any(member.kept for member in self.members.values()):
            self._arm()

    def look(self) -> None:
        """Let go what has waited too long. Called each second while workers are kept."""
        now, limit = self._clock(), self.limit_seconds
        for member in list(self.members.values()):
            if member.kept and member.phase is Phase.CHECKING and now - member.since >= limit:
                member.findings["answer"] = Finding(
                    "answer",
                    State.WARN,
                    f"none for {limit:g} s",
                    "a report",
                    "see the log of this worker; plugins that take long are set up before it reports",
                )
                self.counts["no_answer"] += 1
                self._decide(member)
        self._count_down()
        if self._none_since is not None and now - self._none_since >= limit:
            held = [member for member in self.members.values() if member.phase is Phase.HELD]
            logger.warning("dask-gpurt: all %d held workers work now nevertheless. %s", len(held), self._worst())
            for member in held:
                self.counts["let_go"] += 1
                self._pass(member)

    def _warn_clients(self, text: str) -> None:
        if self._scheduler is not None:
            self._scheduler.log_event("warn", {"message": pickle.dumps(text), "category": pickle.dumps(UserWarning)})

    # ------------------------------------------------------------------ what is shown

    def statistics(self) -> dict[str, Any]:
        """Plain JSON values."""
        members = self.members.values()
        phases = collections.Counter(member.phase for member in members)
        return {
            "mode": self.mode.value,
            # Switched off, it checks nothing, and all may work.
            "phases": {} if self.mode is Mode.OFF else {phase.value: phases[phase] for phase in Phase},
            "counts": dict(self.counts),
            "classes": dict(collections.Counter(m.node.key for m in members if m.node is not None)),
            "workers": {m.address: m.to_dict() for m in members if m.kept or m.found(State.FAIL, State.WARN)},
            "waiting": self.restrictions.waiting(self._nodes()),
            "exceptions": sum(part.failures for part in self.guard.parts.values()),
        }
