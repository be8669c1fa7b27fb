"""`advise`: what to do about a run, as findings with the number behind them, the most expensive first.

A pure function of a `Run`. `RULES` is the table of what is looked for: each rule has the slot-seconds that its cause
cost, so that rules of different kinds can be ranked. A finding below one per cent of the time in which there was work,
or below a tenth of a thread-second, is not worth a line.

Seconds count for one finding only. A slow worker explains more than the time that its own tasks took too long: others
waited for its tasks (``skew`` on it, ``queued elsewhere``). A slow link explains the same for the worker behind it.
`Evidence` moves these seconds to their culprit before the rules look.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dask_gpurt.observe.render.text import bytes_said, seconds_said

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dask_gpurt.observe.report.facts import Fetches, Run
    from dask_gpurt.observe.report.tasks import Slowness

#: share of the wanted slot-seconds below which a finding is left out
WORTH = 0.01
#: and the thread-seconds, so that a cluster that has hardly worked gets no advice
WORTH_SECONDS = 0.1
#: what is said where there is no finding
NOTHING = "Nothing cost as much as one per cent of the threads' time, and a tenth of a second of it"
#: a worker that takes so many times as long as the others is slow
SLOW = 1.5
#: a link is slow when it has less than this share of the median bandwidth of the others
SLOW_LINK = 0.34
#: or less than this, in bytes per second: a gigabit has 125 MB/s
LITTLE = 60e6
#: share of the time of all fetches below which a link does not explain the waiting
LINK_SHARE = 0.3
#: bytes without which a bandwidth is not believed
MEASURED_BYTES = 4e6
#: tasks shorter than this are mostly overhead, in seconds
SHORT = 0.01


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that cost time."""

    #: ``slow worker``, ``slow link``, ``network``, ``spilling``, ``skew``, ``shuffle barrier``, ...
    cause: str
    #: slot-seconds that it cost, and the share of those in which there was work
    seconds: float
    share: float
    #: one sentence with the number
    text: str
    #: what to do
    remedy: str


@dataclasses.dataclass(frozen=True, slots=True)
class Evidence:
    """A run, and its idle seconds with those of a culprit moved to it."""

    run: Run
    #: cause -> slot-seconds, without what the slow worker explains
    causes: Mapping[str, float]
    slow: Slowness | None
    #: slot-seconds that others waited for the slow worker
    waited_for_slow: float
    #: the slow link that took most time
    link: Fetches | None

    @classmethod
    def of(cls, run: Run) -> Evidence:
        """Find the culprits of a run."""
        causes = dict(run.causes)
        slow = next((s for s in run.digest.slow if s.factor >= SLOW), None)
        waited = 0.0
        if slow is not None:
            theirs = sum(seconds for (_, address), seconds in run.skewed.items() if address == slow.address)
            theirs = min(theirs, causes["skew"])
            causes["skew"] -= theirs
            waited = theirs + causes["queued_elsewhere"]
            causes["queued_elsewhere"] = 0.0
        link = _slow_link(run)
        target = None if link is None else next((w for w in run.workers if w.address == link.target), None)
        if target is not None:
            wanted = target.slot_seconds - target.causes.get("no_work", 0.0)
            if wanted > 0:
                # What others waited for while the worker behind that link waited for its inputs.
                blocked = causes["queued_elsewhere"] * target.causes.get("network", 0.0) / wanted
                causes["queued_elsewhere"] -= blocked
                causes["network"] += blocked
        return cls(run, causes, slow, waited, link)

    @property
    def lost_by_slow(self) -> float:
        """Seconds by which the slow worker's own tasks took too long."""
        return 0.0 if self.slow is None else self.slow.seconds * (1 - 1 / self.slow.factor)

    def tiers(self, name: str) -> float:
        """A figure of the tiers, over all workers."""
        return sum(w.tiers.get(name, 0) for w in self.run.workers)


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """One thing that is looked for."""

    #: `Finding.cause`
    name: str
    #: slot-seconds that it cost; 0: it was not there
    seconds: Callable[[Evidence], float]
    #: the sentence of the finding, in which ``{}`` stands for these seconds; or what makes it
    text: str | Callable[[Evidence, str], str]
    #: what to do; or what makes that
    remedy: str | Callable[[Evidence], str]

    def finding(self, evidence: Evidence, seconds: float, share: float) -> Finding:
        """The finding of a rule that has cost `seconds`, `share` of those in which there was work."""
        said = seconds_said(seconds)
        text = self.text.format(said) if isinstance(self.text, str) else self.text(evidence, said)
        remedy = self.remedy if isinstance(self.remedy, str) else self.remedy(evidence)
        return Finding(self.name, seconds, share, text, remedy)


def advise(run: Run) -> list[Finding]:
    """Findings, the most expensive first; empty when nothing was worth a line."""
    wanted = run.wanted_seconds
    if wanted <= 0:
        return []
    evidence = Evidence.of(run)
    costs = ((rule, rule.seconds(evidence)) for rule in RULES)
    found = [
        rule.finding(evidence, cost, cost / wanted)
        for rule, cost in costs
        if cost >= max(WORTH * wanted, WORTH_SECONDS)
    ]
    return sorted(found, key=lambda f: -f.seconds)


def _slow_link(run: Run) -> Fetches | None:
    """The slow link that took most time, if there is one that matters."""
    every = sum(f.seconds for f in run.fetches)
    measured = [f for f in run.fetches if f.bytes >= MEASURED_BYTES and f.seconds > 0]
    for f in sorted(measured, key=lambda f: -f.seconds):
        others = sorted(o.bytes_per_second for o in measured if o is not f)
        usual = others[len(others) // 2] if others else 0.0
        if f.seconds < LINK_SHARE * every:
            return None
        if f.bytes_per_second < LITTLE or f.bytes_per_second < SLOW_LINK * usual:
            return f
    return None


def _of(cause: str) -> Callable[[Evidence], float]:
    return lambda evidence: evidence.causes[cause]


def _slow_worker(evidence: Evidence, said: str) -> str:
    slow, run = evidence.slow, evidence.run
    assert slow is not None
    return (
        f"The same tasks take {slow.factor:.1f} times as long on {run.worker(slow.address)} as on the others "
        f"({slow.tasks} tasks); that cost {seconds_said(evidence.lost_by_slow)} there, and others waited "
        f"{seconds_said(evidence.waited_for_slow)} for it."
    )


def _slow_link_text(evidence: Evidence, said: str) -> str:
    slow, run = evidence.link, evidence.run
    assert slow is not None
    return (
        f"Threads waited {said} for inputs from other workers; "
        f"{slow.seconds / sum(f.seconds for f in run.fetches):.0%} of the time of all fetches was that of a "
        f"slow link: from {run.worker(slow.source)} to {run.worker(slow.target)} came {bytes_said(slow.bytes)} at "
        f"{bytes_said(slow.bytes_per_second)}/s."
    )


def _network(evidence: Evidence, said: str) -> str:
    moved = bytes_said(sum(f.bytes for f in evidence.run.fetches))
    return f"Threads waited {said} for inputs from other workers; {moved} were fetched."


def _spilling_seconds(evidence: Evidence) -> float:
    return (evidence.causes["unspill"] if evidence.tiers("read_bytes") else 0.0) + evidence.causes["memory"]


def _spilling(evidence: Evidence, said: str) -> str:
    written, read = evidence.tiers("written_bytes"), evidence.tiers("read_bytes")
    parts = []
    if read:
        parts.append(f"{seconds_said(evidence.causes['unspill'])} for data to be read back from disk")
    if evidence.causes["memory"]:
        parts.append(f"{seconds_said(evidence.causes['memory'])} for room in memory")
    return f"Threads waited {' and '.join(parts)}; {bytes_said(written)} were written and {bytes_said(read)} read."


def _spilling_remedy(evidence: Evidence) -> str:
    remedy = (
        "Give the workers more memory, or have smaller or fewer pieces of data alive at once: smaller partitions, "
        "fewer threads per worker, persist less."
    )
    if not evidence.tiers("no_room"):
        return remedy
    return (
        "There was no room on disk for what had to leave memory: give spilled data more of it (gpurt.tiers.directory, "
        f"disk-limit, disk-reserve). {remedy}"
    )


def _skew(evidence: Evidence, said: str) -> str:
    run = evidence.run
    worst = max(run.skewed.items(), key=lambda item: item[1], default=None)
    text = f"Threads were idle for {said} while one task took much longer than its siblings"
    if worst is not None:
        (prefix, address), _ = worst
        text += f": {prefix} on {run.worker(address)}"
        siblings = next((kind for kind in run.digest.kinds if kind.prefix == prefix), None)
        if siblings is not None:
            text += f", {seconds_said(siblings.longest)} against a median of {seconds_said(siblings.median)}"
    if len(run.outputs) > 1:
        sizes = sorted(run.outputs)
        median_bytes = max(1, sizes[len(sizes) // 2])
        if sizes[-1] > 3 * median_bytes:
            text += (
                f"; the largest output of a shuffle has {bytes_said(sizes[-1])}, "
                f"{sizes[-1] / median_bytes:,.0f} times the median"
            )
    return text + "."


def _unless_tasks_are_small(otherwise: str) -> Callable[[Evidence], str]:
    """The remedy for overhead of each task, where tasks are short; else another one."""

    def remedy(evidence: Evidence) -> str:
        kinds = evidence.run.digest.kinds
        mean = sum(k.seconds for k in kinds) / sum(k.tasks for k in kinds) if kinds else SHORT
        if mean >= SHORT:
            return otherwise
        return (
            f"Tasks take {seconds_said(mean)} on average: make them larger (partitions, batches); below 10 ms the "
            "overhead of a task is more than its work."
        )

    return remedy


#: what is looked for
RULES: tuple[Rule, ...] = (
    Rule(
        "slow worker",
        lambda evidence: evidence.lost_by_slow + evidence.waited_for_slow,
        _slow_worker,
        "Look what else runs on that host, whether its clock is throttled (heat, power limit) or its CPU quota is "
        "smaller than its threads; until then, retire it or give it fewer threads.",
    ),
    Rule(
        "slow link",
        lambda evidence: evidence.causes["network"] if evidence.link is not None else 0.0,
        _slow_link_text,
        "Check that path (link speed, duplex, a shared or throttled interface, traffic of others, which interface the "
        "workers listen on: --interface); keep workers that exchange much on one side of it.",
    ),
    Rule(
        "network",
        lambda evidence: evidence.causes["network"] if evidence.link is None else 0.0,
        _network,
        "Move less (select columns and rows before joins and shuffles), or have fewer, larger workers per host.",
    ),
    Rule(
        "spilling",
        _spilling_seconds,
        _spilling,
        _spilling_remedy,
    ),
    Rule(
        "skew",
        _of("skew"),
        _skew,
        "The data is uneven: split the hot key (add a random part to it and aggregate twice), filter it out before, "
        "or use more partitions if it is many keys that fell together.",
    ),
    Rule(
        "shuffle barrier",
        _of("shuffle_barrier"),
        "Threads waited {} for the last inputs of a shuffle to be sent.",
        "Inputs of similar size and cost let all workers finish together; more, smaller partitions before the "
        "shuffle help when the last ones are few.",
    ),
    Rule(
        "no ready task",
        _of("no_ready_task"),
        "Threads had nothing to do for {} because all other tasks waited for results of those that ran.",
        "The graph has too few tasks side by side: use more partitions (at least two or three per thread), or fewer "
        "workers.",
    ),
    Rule(
        "queued elsewhere",
        _of("queued_elsewhere"),
        "Threads were free for {} while ready tasks waited for other workers, because their inputs are there, or "
        "because they may run there only.",
        "Spread the data (client.rebalance, or more partitions), and look whether restrictions (workers=, resources=) "
        "are needed; dask_gpurt.explain(client, key) tells why a task is where it is.",
    ),
    Rule(
        "scheduler",
        _of("scheduler"),
        "Threads waited {} for the scheduler to assign a task, or for the message.",
        _unless_tasks_are_small("Look at the scheduler's CPU use on the dashboard; fewer, larger tasks relieve it."),
    ),
    Rule(
        "own planning",
        _of("planning"),
        "Threads waited {} while placement decided.",
        "Set gpurt.placement.candidates lower, or gpurt.placement.enabled: false for this workload.",
    ),
    Rule(
        "task overhead",
        _of("serialisation"),
        "Workers spent {} of their threads' time between tasks, on serialisation and on their event loop.",
        _unless_tasks_are_small(
            "Large arguments in tasks are serialised with each of them: scatter them once, or load them in the task. "
            "The first tasks on a worker also import their modules there: dask worker --preload MODULE does so before."
        ),
    ),
    Rule(
        "resources",
        _of("resources"),
        "Threads were free for {} while tasks waited for an abstract resource.",
        "Declare more of the resource on the workers, or ask for less of it in resources=.",
    ),
)
