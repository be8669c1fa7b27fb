"""`Quarantine`: on the scheduler, take out workers that are at fault, and let those in again that are well.

Theory of operation. Every few seconds the heartbeats' ``health`` and the learned slowness of workers go into
`Evidence`. Each new suspect is an event with what was found and what mends it. With ``gpurt.quarantine: on`` the worker
is also held (`hold.Holds`), as long as at most a third of the workers are; after that it stays at the event, until
there is room. A link is never held: its fetches take another holder, and shuffles their safe way.

What a card, a disk or a checksum has shown does not mend itself: such a worker stays out until somebody releases it,
also when its nanny starts it again. A slow one is let in after `WARM_UPS` known computations in a row that take as long
there as elsewhere. A worker is let go if a task waits for it that no other may run, or that no other runs as all are
paused: a cluster must not hang.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import logging
import shlex
import statistics
import time
from typing import TYPE_CHECKING, Any

from distributed import SchedulerPlugin
from distributed.comm import get_address_host

from dask_gpurt.model.circuit_breaker import Guard
from dask_gpurt.model.events import Event, Sink, null_sink
from dask_gpurt.model.no_hook import ignored
from dask_gpurt.preflight.judge import SLOW
from dask_gpurt.quarantine.evidence import Cause, Evidence, Suspect
from dask_gpurt.quarantine.hold import Holds
from dask_gpurt.quarantine.worker import KEY, OP

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from distributed import Scheduler

logger = logging.getLogger("distributed.scheduler.gpurt")

#: name in ``WorkerState.metrics``
_METRICS = "gpurt"
_LOOK_SECONDS = 5.0
#: of all workers, at most, on the judgement of this module
SHARE = 1 / 3
#: known computations in a row that a slow worker has to do in time, and the time between two
WARM_UPS = 3
_WARM_UP_SECONDS = 30.0
#: others that do the same, for comparison
_OTHERS = 3
_ANSWER_SECONDS = 30.0


class Mode(enum.StrEnum):
    """``gpurt.quarantine``."""

    OFF = "off"
    #: say who is at fault
    ALARM = "alarm"
    #: and give it no more work
    ON = "on"


class Quarantine(SchedulerPlugin):
    """The quarantine of one scheduler.

    Parameters
    ----------
    mode
        Whether suspects are held.
    slowness
        Gives how many times the usual time tasks take on each worker, where that is known.
    sink
        Gets an event for each suspect, and for what becomes of it.
    """

    name = "gpurt-quarantine"
    transition = ignored

    def __init__(self, mode: Mode, slowness: Callable[[], Mapping[str, float]], *, sink: Sink = null_sink) -> None:
        self.mode = mode
        self.evidence = Evidence()
        self.guard = Guard("quarantine", logger, sink=sink)
        self.counts = {"suspects": 0, "held": 0, "alarms": 0, "released": 0, "let_go": 0}
        self._slowness = slowness
        self._sink = sink
        self._clock = time.monotonic
        self._scheduler: Scheduler | None = None
        self._holds: Holds | None = None
        self._timer: asyncio.TimerHandle | None = None
        #: why each worker is out
        self._why: dict[str, Suspect] = {}
        #: what was said of whom and still counts, and why workers are out; newest last
        self._said: dict[tuple[str, Cause, str], Suspect] = {}
        #: name of a worker that must not come back by itself -> why; its nanny starts it under the same name. Another
        #: host may have a worker of that name later, as when a cluster gets smaller and larger
        self._names: dict[object, Suspect] = {}
        #: slow worker -> known computations in time so far
        self._in_time: dict[str, int] = {}
        self._tried = 0.0
        self._trial: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------ life

    async def start(self, scheduler: Scheduler) -> None:
        """Install. A second call does nothing: a scheduler that is not up yet starts all of its plugins, later.

        Raises
        ------
        SeamMismatch
            This distributed is not one we know. Nothing was changed.
        """
        if self._scheduler is not None:
            return
        holds = Holds(scheduler, lambda: self.guard.failed("drain"))
        holds.check()
        self._scheduler, self._holds = scheduler, holds
        self._arm()

    async def close(self) -> None:
        """The scheduler closes."""
        self._end_timers()

    def stop(self) -> None:
        """Let all workers go, and leave the scheduler as it was."""
        self._end_timers()
        if self._holds is not None:
            self._holds.stop()
        self._scheduler = self._holds = None

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """A worker has left."""
        self.evidence.forget(worker)
        if self._holds is not None:
            self._holds.forget(worker)
        self._why.pop(worker, None)
        self._in_time.pop(worker, None)
        for said in [said for said in self._said if said[0] == worker or said[2] == worker]:
            del self._said[said]

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._tick)

    def _end_timers(self) -> None:
        for timer in (self._timer, self._trial):
            if timer is not None:
                timer.cancel()
        self._timer = self._trial = None

    def _tick(self) -> None:
        try:
            self.look()
        except Exception:
            self.guard.failed("look")
        self._arm()

    # ------------------------------------------------------------------ looks

    def look(self) -> None:
        """Take in what is new, and act on it. Called every few seconds."""
        scheduler, holds = self._scheduler, self._holds
        if scheduler is None or holds is None:
            return
        now = self._clock()
        for ws in scheduler.workers.values():
            self._take_in(ws.address, ws.metrics.get(_METRICS, {}).get(KEY, {}), now)
        # A held worker gets no tasks from which its speed could be learned anew.
        self.evidence.speeds({w: s for w, s in self._slowness().items() if w not in holds.held}, now)
        suspects = {(one.worker, one.cause, one.peer): one for one in self.evidence.suspects(now)}
        for key in [key for key in self._said if key not in suspects and key[0] not in holds.held]:
            del self._said[key]  # it is well again, or that was too long ago
        for key, suspect in suspects.items():
            self._judge(key, suspect)
        for ws in [ws for ws in scheduler.workers.values() if ws.name in self._names]:
            if _host(self._names[ws.name].worker) != _host(ws.address):
                del self._names[ws.name]
            elif ws.address not in holds.held and self._others_run(ws.address) and holds.hold(ws.address):
                why = dataclasses.replace(self._names[ws.name], worker=ws.address)
                self._why[ws.address] = self._names[ws.name] = why
                self._tell("held", why, "is back, and gets no task")
        for worker in holds.look():
            self.counts["let_go"] += 1
            self._let_go(worker, "works again: a task waits that no other worker can run")
        self._try_slow_ones(now)

    def _take_in(self, worker: str, health: Mapping[str, Any], now: float) -> None:
        for sender, total in health.get("corrupt", {}).items():
            there = self._scheduler is not None and sender in self._scheduler.workers
            self.evidence.corrupt_so_far(sender, worker, int(total), now, there=there)
        if disk := health.get("disk"):
            self.evidence.disk_so_far(worker, int(disk), now)
        self.evidence.clocks(worker, str(health.get("clocks", "")))
        if (what := health.get("hardware")) and (worker, Cause.HARDWARE, "") not in self._said:
            self.evidence.hardware(worker, str(what))

    def _judge(self, key: tuple[str, Cause, str], suspect: Suspect) -> None:
        if self._holds is None:
            return
        if suspect.worker in self._holds.held:
            if self._comes_back(suspect.worker) and suspect.cause is not Cause.SLOW and not suspect.peer:
                self._said[key] = suspect
                self.counts["suspects"] += 1
                self._keep_out(suspect)
            return
        new = key not in self._said
        self._said[key] = suspect
        self.counts["suspects"] += new
        if suspect.peer:
            self._alarm(new, suspect, "is sent corrupt data over one link")
        elif self.mode is not Mode.ON:
            self._alarm(new, suspect, "is at fault and works on (gpurt.quarantine is alarm)")
        elif not self._room():
            self._alarm(new, suspect, f"is at fault and works on: {SHARE:.0%} of the workers are held already")
        elif not self._others_run(suspect.worker):
            self._alarm(new, suspect, "is at fault and works on: no other worker runs")
        # Also one that was said before: there is room for it now, or it has begun to work.
        elif self._holds.hold(suspect.worker):
            self._keep_out(suspect)

    def _alarm(self, new: bool, suspect: Suspect, what: str) -> None:
        if new:
            self.counts["alarms"] += 1
            self._tell("alarm", suspect, what)

    def _room(self) -> bool:
        assert self._holds is not None
        assert self._scheduler is not None
        return len(self._holds.held) + 1 <= SHARE * len(self._scheduler.workers)

    def _comes_back(self, worker: str) -> bool:
        """Whether a worker is out only until it is as fast as others."""
        why = self._why.get(worker)
        return why is not None and why.cause is Cause.SLOW

    def _others_run(self, worker: str) -> bool:
        """Whether work goes on without a worker; others that are there may be paused, and stay so."""
        assert self._scheduler is not None
        return any(ws.address != worker for ws in self._scheduler.running)

    def _keep_out(self, suspect: Suspect) -> None:
        """Note why a worker is out: it has just been held, or there is a better reason now than that it is slow."""
        assert self._scheduler is not None
        self.counts["held"] += suspect.worker not in self._why
        self._why[suspect.worker] = suspect
        if suspect.cause is not Cause.SLOW:
            self._names[self._scheduler.workers[suspect.worker].name] = suspect
        self._tell("held", suspect, "gets no more tasks, and its data leaves it")

    def _tell(self, kind: str, suspect: Suspect, what: str) -> None:
        text = f"worker {suspect.worker} {what}. {suspect.cause.value}: {suspect.found}. Remedy: {suspect.remedy}"
        fields = {"worker": suspect.worker, "cause": suspect.cause.value, "peer": suspect.peer, "found": suspect.found}
        self._sink(Event(f"quarantine.{kind}", text, fields))

    # ------------------------------------------------------------------ by hand, and back

    def hold(self, workers: Iterable[str], why: str) -> list[str]:
        """Take out workers because somebody says so; returns those that are out now.

        The last worker that runs is never taken out.
        """
        assert self._holds is not None
        assert self._scheduler is not None
        for worker in workers:
            if self._comes_back(worker) or (self._others_run(worker) and self._holds.hold(worker)):
                # By its name, which it keeps when its nanny starts it again.
                name = shlex.quote(str(self._scheduler.workers[worker].name))
                self._keep_out(Suspect(worker, Cause.ASKED, why, f"dask gpurt release ADDRESS {name}"))
        return list(self._holds.held)

    def release(self, workers: Iterable[str]) -> list[str]:
        """Let workers in again, and hold against them only what happens from now on; returns those that were out."""
        assert self._holds is not None
        return [worker for worker in workers if worker in self._holds.held and self._let_go(worker, "works again")]

    def names(self) -> set[str]:
        """Names of which a worker is kept out when it comes back."""
        return set(map(str, self._names))

    def release_names(self, words: Collection[str]) -> None:
        """Let workers of these names in when they come."""
        self._names = {name: why for name, why in self._names.items() if str(name) not in words}

    def _let_go(self, worker: str, what: str) -> bool:
        assert self._holds is not None
        self._holds.release(worker)
        self.evidence.pardon(worker)
        self._in_time.pop(worker, None)
        self.counts["released"] += 1
        for said in [said for said in self._said if said[0] == worker]:
            del self._said[said]
        suspect = self._why.pop(worker, None)
        if suspect is not None:
            self._names = {name: why for name, why in self._names.items() if why is not suspect}
            self._tell("released", suspect, what)
        return True

    # ------------------------------------------------------------------ slow ones

    def _try_slow_ones(self, now: float) -> None:
        slow = [worker for worker in self._why if self._comes_back(worker)]
        if not slow or now - self._tried < _WARM_UP_SECONDS or (self._trial is not None and not self._trial.done()):
            return
        self._tried = now
        self._trial = asyncio.create_task(self._try(slow), name="gpurt-warm-up")

    async def _try(self, slow: list[str]) -> None:
        """One known computation on each slow worker, and on some that are not."""
        try:
            assert self._scheduler is not None
            others = [ws.address for ws in self._scheduler.running][:_OTHERS]
            seconds = await _measured(self._scheduler, [*slow, *others])
            usual = [seconds[worker] for worker in others if worker in seconds]
            for worker in slow:
                if not self._comes_back(worker):
                    continue  # it has left meanwhile, or more is known of it
                well = worker in seconds and bool(usual) and seconds[worker] <= SLOW * statistics.median(usual)
                well = well and not self.evidence.has_slow_clocks(worker)
                self._in_time[worker] = self._in_time.get(worker, 0) + 1 if well else 0
                if self._in_time[worker] >= WARM_UPS:
                    self._let_go(worker, f"works again: {WARM_UPS} known computations took as long as elsewhere")
        except Exception:
            self.guard.failed("warm-up")

    # ------------------------------------------------------------------ what is shown

    def statistics(self) -> dict[str, Any]:
        """Plain JSON values."""
        held = {} if self._holds is None else self._holds.held
        return {
            "mode": self.mode.value,
            "counts": dict(self.counts),
            "taken_back": 0 if self._holds is None else self._holds.taken_back,
            "held": {worker: self._told(worker, one.since) for worker, one in held.items()},
            "suspects": [_plain(suspect) for suspect in self._said.values() if suspect.worker not in held],
            "exceptions": sum(part.failures for part in self.guard.parts.values()),
        }

    def _told(self, worker: str, since: float) -> dict[str, Any]:
        assert self._holds is not None
        # One without a reason was held by a call that raised before it was noted.
        why = self._why.get(worker) or Suspect(worker, Cause.ASKED, "reason unknown", "dask gpurt release")
        return {**_plain(why), "since": since, "only_here": self._holds.unique(worker)}


def _plain(suspect: Suspect) -> dict[str, Any]:
    return {**dataclasses.asdict(suspect), "cause": suspect.cause.value}


async def _measured(scheduler: Scheduler, workers: list[str]) -> dict[str, float]:
    """Seconds of the known computation on each worker that answers in time."""

    async def one(worker: str) -> object:
        call = scheduler.broadcast(msg={"op": OP}, workers=[worker], on_error="return")
        return (await asyncio.wait_for(call, _ANSWER_SECONDS))[worker]

    # Each by itself: one that hangs must not keep the others out.
    answers = await asyncio.gather(*map(one, workers), return_exceptions=True)
    return {worker: answer for worker, answer in zip(workers, answers, strict=True) if isinstance(answer, float)}


def _host(address: str) -> str:
    with contextlib.suppress(ValueError):
        return str(get_address_host(address))
    return address
