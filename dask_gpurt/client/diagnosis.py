"""`Diagnosis`: five questions about a cluster, in order, and where the answer is found. Pure.

1. Is every node healthy, and does it work?
2. Do the threads have something to do?
3. Are they fed: disk, memory, CPU?
4. Does communication hold them up?
5. Only then: is another backend or another setting better?

The first step with a cause ends it: what comes after may only follow from it. A step without evidence says so and is
passed over, not answered. Nothing is tried again until it passes.

Each cause has an ``id``. Those that begin with ``M`` are mistakes that teams make when they add GPUs to a cluster.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING, Any

from dask_gpurt.doctor.finding import State
from dask_gpurt.observe.render.text import seconds_said

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from dask_gpurt.doctor.finding import Finding
    from dask_gpurt.observe.answers.snapshot import Snapshot
    from dask_gpurt.observe.report.facts import Run
    from dask_gpurt.observe.report.findings import Finding as Advice

#: seconds without the end of a task, while some run, that are a stall
STALL_SECONDS = 30.0
#: share of the threads' time from which something is the cause
WORTH = 0.2
#: seconds in which threads had work, below which shares mean nothing
COLD_SECONDS = 10.0
#: share that threads work from which they are used well
BUSY = 0.8
#: mean seconds of a task below which its overhead is more than its work
SHORT = 0.01
#: seconds of the slowest hundredth of the waits for a decision, from which they spike
SPIKE_SECONDS = 0.5
#: seconds without a heartbeat that are worth a word
_QUIET_SECONDS = 5.0
#: checks of the doctor by the step that they are for; all others are for the first
_FEEDING = frozenset({"T4", "T5", "T6", "T11", "swap"})
_LINKS = frozenset({"T10", "T12"})
#: who does not answer is known from the status
_ELSEWHERE = _FEEDING | _LINKS | {"answer"}
#: causes of the ledger by the step that they are for
_OF_GRAPHS = ("slow worker", "skew", "no ready task", "queued elsewhere", "scheduler", "own planning", "resources")
_OF_FEEDING = ("spilling", "task overhead")
_OF_LINKS = ("slow link", "network", "shuffle barrier")


class Answer(enum.StrEnum):
    """Of one step."""

    NO_CAUSE = "no cause here"
    CAUSE = "here is a cause"
    UNKNOWN = "not known"


@dataclasses.dataclass(frozen=True)
class Cause:
    """Why a cluster is slow or stuck."""

    #: ``M1`` to ``M6``, a check of the doctor, or a cause of the ledger
    id: str
    found: str
    meaning: str
    remedy: str


@dataclasses.dataclass(frozen=True)
class Step:
    """One question."""

    number: int
    question: str
    answer: Answer
    #: what was looked at, with figures
    looked_at: str
    causes: tuple[Cause, ...] = ()


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What was asked of a cluster."""

    snapshot: Snapshot
    #: of the doctor
    checks: tuple[Finding, ...]
    #: the newest run, or all since the start; None: nothing is observed there
    run: Run | None
    #: what cost time in it, the most first
    advice: tuple[Advice, ...]
    #: address -> as `StallLedger.progress`, with ``quiet``
    progress: Mapping[str, Mapping[str, Any]]
    stall_seconds: float = STALL_SECONDS


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """The steps up to the first cause, or all of them."""

    steps: tuple[Step, ...]

    @property
    def causes(self) -> list[Cause]:
        """All that were found."""
        return [cause for step in self.steps for cause in step.causes]

    def to_dict(self) -> dict[str, Any]:
        """``{"steps": [{number, question, answer, looked_at, causes: [{id, found, meaning, remedy}]}]}``"""
        return {"steps": [dataclasses.asdict(step) | {"answer": step.answer.value} for step in self.steps]}

    def __repr__(self) -> str:
        lines = []
        for step in self.steps:
            lines.append(f"{step.number}. {step.question} {step.answer}. {step.looked_at}")
            lines += [f"   {c.id}: {c.found}. {c.meaning}. Remedy: {c.remedy}" for c in step.causes]
        if not self.causes:
            lines.append("No cause was found.")
        return "\n".join(lines)


def diagnose(evidence: Evidence, *, every: bool = False) -> Diagnosis:
    """Go through the steps; `every`: also those after the first cause."""
    steps: list[Step] = []
    for number, (question, look) in enumerate(_STEPS, 1):
        answer, looked_at, causes = look(evidence)
        steps.append(Step(number, question, answer, looked_at, tuple(causes)))
        if causes and not every:
            break
    return Diagnosis(tuple(steps))


_Looked = tuple["Answer", str, "list[Cause]"]


def _said(causes: list[Cause], looked_at: str) -> _Looked:
    return (Answer.CAUSE if causes else Answer.NO_CAUSE), looked_at, causes


# ------------------------------------------------------------------ 1: healthy


def _healthy(evidence: Evidence) -> _Looked:
    snapshot = evidence.snapshot
    causes = [
        Cause("silent", f"{snapshot.title(address)}: {why}", "Its tasks and its data wait for it", _LOOK_AT_PROCESS)
        for address, why in snapshot.silent.items()
    ]
    causes += _kept_out(snapshot)
    causes += [
        _of_check(check) for check in evidence.checks if check.state is State.FAIL and check.id not in _ELSEWHERE
    ]
    warned = sum(check.state is State.WARN for check in evidence.checks)
    return _said(
        causes,
        f"{len(snapshot.workers)} workers asked, {len(evidence.checks)} findings of the doctor, {warned} of them warn.",
    )


_LOOK_AT_PROCESS = "see whether its process is stopped, swapped out or holds the GIL (ps, py-spy dump); else retire it"


def _kept_out(snapshot: Snapshot) -> Iterator[Cause]:
    """Workers that get no tasks, and those that are suspected. All of one class of nodes: the pool is at fault."""
    kept = {a: m for a, m in snapshot.scheduler.get("preflight", {}).get("workers", {}).items() if m["kept"]}
    for address, member in kept.items():
        failed = [f for f in member["findings"] if f["state"] == "fail"]
        for finding in failed:
            found = f"{snapshot.title(address)} failed {finding['check']}: {finding['found']}"
            yield Cause("M1", found, "What runs on other nodes does not run on this one", finding["remedy"])
    quarantine = snapshot.scheduler.get("quarantine", {})
    for address, why in quarantine.get("held", {}).items():
        yield Cause("held", f"{snapshot.title(address)}: {why['found']}", "It gets no tasks", why["remedy"])
    for one in quarantine.get("suspects", ()):
        yield Cause("suspect", f"{snapshot.title(one['worker'])}: {one['found']}", "It works on", one["remedy"])


def _of_check(check: Finding) -> Cause:
    """A failed check. Nodes that differ in versions or drivers, or GPUs that are not to be had there, are mistakes."""
    mistakes = {"stack": "M4", "compat": "M4", "T1": "M1", "T2": "M1", "T3": "M1", "T7": "M1", "T8": "M1", "T9": "M1"}
    mistakes |= dict.fromkeys(_LINKS, "M3") | {"T4": "M6"}
    found = f"{check.name}: {check.found}, expected {check.expected}"
    return Cause(mistakes.get(check.id, check.id), found, check.meaning, check.remedy)


# ------------------------------------------------------------------ 2 to 4: used, fed, connected


def _used(evidence: Evidence) -> _Looked:
    stalled = list(_stall(evidence))
    run = evidence.run
    if run is None:
        return (Answer.CAUSE, "Nothing is observed.", stalled) if stalled else _unobserved()
    if run.wanted_seconds < COLD_SECONDS:
        looked_at = f"Threads had work for {seconds_said(run.wanted_seconds)} in all, too little to judge by."
        return (Answer.CAUSE if stalled else Answer.UNKNOWN), looked_at, stalled
    busy = run.busy_seconds / run.wanted_seconds
    causes = stalled + list(_advised(evidence, _OF_GRAPHS)) if busy < BUSY else stalled
    return _said(
        causes, f"Threads worked for {busy:.0%} of the time in which there was work ({run.title or 'all so far'})."
    )


def _fed(evidence: Evidence) -> _Looked:
    bad = [check for check in evidence.checks if check.state is State.FAIL and check.id in _FEEDING]
    # Busy threads that keep nothing busy only ever warn: the tasks may be meant to wait.
    bad += [check for check in evidence.checks if check.state is State.WARN and check.id == "T4"]
    causes = [_of_check(check) for check in bad]
    return _with_ledger(evidence, causes, _OF_FEEDING, ("unspill", "memory", "serialisation"))


def _connected(evidence: Evidence) -> _Looked:
    causes = [_of_check(check) for check in evidence.checks if check.state is State.FAIL and check.id in _LINKS]
    return _with_ledger(evidence, causes, _OF_LINKS, ("network", "shuffle_barrier"))


def _with_ledger(evidence: Evidence, causes: list[Cause], names: tuple[str, ...], shown: tuple[str, ...]) -> _Looked:
    run = evidence.run
    if run is None or run.wanted_seconds < COLD_SECONDS:
        return _said(causes, "Of the run too little is known.") if causes else _unobserved()
    causes += _advised(evidence, names)
    said = ", ".join(f"{name} {run.causes.get(name, 0.0) / run.wanted_seconds:.0%}" for name in shown)
    return _said(causes, f"Of the threads' time with work: {said}.")


def _unobserved() -> _Looked:
    return Answer.UNKNOWN, "Too little work was observed (gpurt.observe.enabled, or nothing has run).", []


def _advised(evidence: Evidence, names: tuple[str, ...]) -> Iterator[Cause]:
    """What of these cost enough time."""
    for finding in evidence.advice:
        if finding.cause in names and finding.share >= WORTH:
            found = f"{finding.text.rstrip('.')} ({finding.share:.0%} of the threads' time)"
            id, meaning = _mistake(evidence, finding)
            yield Cause(id, found, meaning, finding.remedy.rstrip("."))


def _mistake(evidence: Evidence, finding: Advice) -> tuple[str, str]:
    """Which mistake a finding is, by the evidence; else its own name."""
    run = evidence.run
    assert run is not None
    if finding.cause == "slow worker" and (slow := next(iter(run.digest.slow), None)) is not None:
        classes = {w.address: w.node_class for w in run.workers}
        own = classes.get(slow.address, "")
        if own and sum(other != own for other in classes.values()) >= len(classes) / 2:
            return "M2", f"Its nodes are of another class ({own}): this work is slower on it"
    if finding.cause in ("scheduler", "task overhead"):
        kinds = run.digest.kinds
        if kinds and sum(k.seconds for k in kinds) < SHORT * sum(k.tasks for k in kinds):
            return "M6", "Neither CPU nor GPU is busy: what is between the tasks takes longer than they do"
    if finding.cause in ("scheduler", "own planning") and _spikes(evidence):
        return "M5", "Few of the waits are far longer than the rest"
    return finding.cause, "Threads were free and could not work"


def _spikes(evidence: Evidence) -> bool:
    waits = evidence.snapshot.scheduler.get("ledger", {}).get("waits", {}).get("unassigned", {})
    slowest = float(waits.get("p99_seconds", 0.0))
    return slowest > SPIKE_SECONDS and slowest > 20 * float(waits.get("p50_seconds", slowest))


def _stall(evidence: Evidence) -> Iterator[Cause]:
    """No task has ended anywhere for long while some run: the worker whose last progress is the oldest."""
    progress = evidence.progress
    running = {address: one for address, one in progress.items() if one["running"]}
    if not running or min(one["ended"] for one in progress.values()) < evidence.stall_seconds:
        return
    if min(one["oldest"] for one in running.values()) < evidence.stall_seconds:
        return  # all has just begun
    worst = max(
        running, key=lambda a: (running[a]["quiet"] >= _QUIET_SECONDS, running[a]["ended"], running[a]["oldest"])
    )
    one, title = running[worst], evidence.snapshot.title(worst)
    quiet = f", and it has been quiet for {seconds_said(one['quiet'])}" if one["quiet"] >= _QUIET_SECONDS else ""
    since = seconds_said(min(p["ended"] for p in progress.values()))
    yield Cause(
        "M3",
        f"no task has ended for {since} while {len(running)} workers run"
        f" some. The oldest progress is that of {title}: {seconds_said(one['ended'])} ago; it runs {one['running']} "
        f"tasks, {one['kind']!r} for {seconds_said(one['oldest'])}{quiet}",
        "Either that task is long, or its worker waits for something that does not come",
        "look at its stack (client.call_stack, py-spy dump), then at its interface, MTU and peers (dask gpurt doctor)",
    )


# ------------------------------------------------------------------ 5: another backend


def _portable(evidence: Evidence) -> _Looked:
    return Answer.NO_CAUSE, "Backends and settings may be compared now: dask gpurt bench tpch, dask gpurt compare.", []


_STEPS: tuple[tuple[str, Callable[[Evidence], _Looked]], ...] = (
    ("Is every node healthy and at work?", _healthy),
    ("Do the threads have something to do?", _used),
    ("Are they fed by disk, memory and CPU?", _fed),
    ("Does communication hold them up?", _connected),
    ("Is another backend or setting better?", _portable),
)
